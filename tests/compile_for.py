"""Compiles the Triton kernels for a GPU that need not be present, with any Triton.

    PYTHONPATH=FOLDER python tests/compile_for.py [MAJOR.MINOR]

FOLDER holds another Triton, as ``pip install --target FOLDER triton==3.9.0`` puts it there. It
prints one line per kernel, and fails if a kernel does not compile or serves nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from tmm_triton.plugin import KERNELS, load
from tmm_triton.triton_kernel import Built

from tmm_core import Operand, Problem, Scale
from tmm_core.epilogues import parse
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.groups import Groups
from tmm_core.triton import target_of


def problems(capability: tuple[int, int]) -> Iterator[Problem]:
    """One of every kind: small and large, gated, batched, of 8-bit floats, unaligned, ragged, with
    packed weights and with scales of blocks."""
    device = DeviceFingerprint(
        type="cuda",
        name="none",
        capability=capability,
        sm_count=132,
        torch=torch.__version__,
        triton=triton.__version__,
        cuda="13.0",
        shared_memory=232448 if capability >= (9, 0) else 166912,
    )
    row = Operand(torch.bfloat16)
    col, strange = replace(row, layout="col"), replace(row, aligned=False)
    large = Problem(m=4096, n=4096, k=4096, a=row, b=row, out=row, device=device)
    decode = replace(large, m=16, n=2048, b=col)
    yield from (decode, large, replace(large, b=col), replace(large, epilogue=parse("swiglu")))
    yield replace(large, bias=torch.bfloat16, residual=row, scaled=True, epilogue=parse("gelu"))
    yield from (replace(large, m=333, batch=8), replace(decode, k=14336), replace(large, a=strange))
    f8 = Operand(torch.float8_e4m3fn)
    f8 = replace(f8, scale=Scale.parse("row"))
    yield replace(large, a=f8, b=replace(f8, layout="col"))
    for groups in (Groups(8, "m"), Groups(8, "m", zeroed=True), Groups(8, "k")):
        yield replace(large, groups=groups)
    yield replace(large, groups=Groups(8, "m", torch.int64, torch.int32, torch.float32))
    yield replace(large, groups=Groups(8, "m", torch.int64), epilogue=parse("swiglu"))
    four = Operand(torch.uint8, "col", format="int4", scale=Scale((1, 128), torch.bfloat16))
    yield replace(decode, b=four)
    yield replace(large, b=four, groups=Groups(8, "m", torch.int64))
    by_block = replace(f8, layout="col", scale=Scale.parse("128x128"))
    yield replace(large, a=replace(f8, scale=Scale.parse("1x128")), b=by_block)


def main(capability: tuple[int, int]) -> int:
    """Returns the number of kernels that fail."""
    failed = 0
    for name in KERNELS:
        kernel, served, fault = load(name), 0, ""
        if not isinstance(kernel, Built):
            print(f"{name}: {kernel.reason}")  # type: ignore[attr-defined]  # a stand-in
            failed += 1
            continue
        for problem in problems(capability):
            config = None
            if not kernel.reasons_against(problem):
                config = next(iter(kernel.configs(problem)), None)
            if config is None:
                continue
            target = target_of(problem.device)
            assert target is not None
            try:
                for build in kernel.builds(problem, config):
                    build.compile_for(target)
            except Exception as raised:
                error: BaseException = raised
                while (cause := error.__cause__ or error.__context__) is not None:
                    error = cause  # the innermost of a call in a call
                fault = f"; {problem} fails: {type(error).__name__}: {error}"
            served += 1
        failed += bool(fault) or not served
        print(f"{name}: {served} problems{fault}", flush=True)
    return failed


if __name__ == "__main__":
    major, minor = (sys.argv[1] if len(sys.argv) > 1 else "9.0").split(".")
    print(f"Triton {triton.__version__}")
    sys.exit(main((int(major), int(minor))))
