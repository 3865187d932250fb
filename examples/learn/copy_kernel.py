"""A copy kernel with a bug that appears only with several blocks; docs/learn.md finds it."""

import sys

import torch
import triton
import triton.language as tl

from tmm_core.testing import print_if


@triton.jit
def copy(x_ptr, out_ptr, n, STEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    print_if("at", "", at)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, x, mask=at < n)


def run(x, step):
    out = torch.zeros(x.numel())
    copy[(triton.cdiv(x.numel(), 2),)](x, out, x.numel(), STEP=step, BLOCK=2)
    print("copied", out.tolist())


x = torch.arange(1.0, 7.0)
if "--fixed" in sys.argv:
    run(x, step=2)
elif "--transposed" in sys.argv:
    columns = x.reshape(2, 3).t()
    assert columns.is_contiguous  # always true: the method is not called
    print("input ", columns.flatten().tolist())
    run(columns, step=2)
else:
    run(x, step=6)
