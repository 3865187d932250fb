"""A Gluon kernel that starts two partitions and does nothing else, for compute-sanitizer.

Racecheck's reports on it concern the code that Triton adds to every warp-specialised kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _first(out):
    gl.store(out, 1)


@gluon.jit
def _other(out):
    gl.store(out + 1, 1)


@gluon.jit
def partitions_kernel(out):
    gl.warp_specialize([(_first, (out,)), (_other, (out,))], [4], [24])


def main() -> None:
    out = torch.zeros(2, dtype=torch.int32, device="cuda")
    kernel: Any = partitions_kernel
    kernel[(8,)](out, num_warps=4)
    torch.cuda.synchronize()
    print(f"{out.tolist().count(0)} of 2 wrong")


if __name__ == "__main__":
    main()
