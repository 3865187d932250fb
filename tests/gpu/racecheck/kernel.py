"""Launches ``triton.warp_specialized`` once, under compute-sanitizer.

Triton keeps a byte for each warp, which selects the partition that the warp runs. The program
prints the offset of these bytes in the block's shared memory, and the result's error::

    compute-sanitizer --tool racecheck --racecheck-report all python tests/gpu/racecheck/kernel.py 0
"""

from __future__ import annotations

import re
import sys

import torch
from tmm_triton.hopper import warp_specialized
from tmm_triton.hopper.hopper_kernel import warp_specialized_kernel
from triton.backends.compiler import GPUTarget

from tmm_core import Problem
from tmm_core.spec.device import fingerprint
from tmm_core.triton import compile_for, source

#: Bytes of a block's shared memory that the driver reserves, before the kernel's (sm_90).
RESERVED = 1024
#: Fields of a config that change how warps share a tile; one config for each combination runs.
WAYS = ("schedule", "consumers", "num_warps", "splits")


def main() -> None:
    m, n, k = 320, 320, 640
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(n, k, device="cuda").bfloat16().t()
    residual = torch.randn(m, n, device="cuda").bfloat16()
    out = torch.empty_like(residual)
    problem = Problem.of(a, b, out, fingerprint(a.device), residual=residual)
    kernel = warp_specialized.WarpSpecialized()
    configs = {
        tuple(getattr(config, name) for name in WAYS): config for config in kernel.configs(problem)
    }
    config = list(configs.values())[int(sys.argv[1]) % len(configs)]
    of = kernel.specialize(problem, config)
    src = source(warp_specialized_kernel, of.types, of.constants, of.divisible)
    ptx = compile_for(GPUTarget("cuda", 90, 32), src, **of.options).asm["ptx"]
    (offset,) = re.findall(r"ld\.shared\.b8\s+%r\d+, \[%r\d+\+(\d+)\]", ptx)
    print(f"{config}\ndispatch bytes at {RESERVED + int(offset)}", flush=True)
    kernel.bind(problem, config)(a, b, None, residual, 1.0, out)
    torch.cuda.synchronize()
    expected = a.double() @ b.double() + residual
    print(f"error {float((out - expected).norm() / expected.norm()):.2e}")


if __name__ == "__main__":
    main()
