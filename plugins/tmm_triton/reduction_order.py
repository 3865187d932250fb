"""Names reduction orders: kernels with the same order give a row the same bits. The compiler
options here make them round alike after the sum, too.

On Hopper all tensor-core instructions for 16-bit operands add the products of 16 consecutive k to
their fp32 accumulators with the same result. They are ``wgmma m64nNk16`` of any width and ``mma
m16n8k16``. So a sum over K depends neither on the tile, nor on the step along K, nor on the order
of the operands. Kernels that split K into equal ranges and add the parts in order agree too.
``benchmarks/invariant_bits.py`` shows it: on an H100 31 configs of five kernels are bitwise equal
for four K, and so are those with 2, 4, 8 and 16 ranges each.
"""

from __future__ import annotations

from typing import Any

from tmm_core import Problem

#: The order for 16-bit operands on Hopper: 16 products of consecutive k at a time.
_STEP = "sm90-k16"


#: Numbers of ranges tried in batch-invariant mode, depending only on K, and the minimum K of each.
_SPLITS, _LEAST_SPLIT = (2, 4, 8), 512
#: The usual step of kernels along K; a range should be a multiple of it.
_USUAL_STEP = 128


def summed(problem: Problem, splits: int = 1, step: int = 16) -> str | None:
    """Return the name of the sum over K by tensor cores in ``splits`` ranges of whole steps of
    ``step`` elements. None if no other kernel is known to sum the same way. That is on other
    hardware, for other operands, or if ranges differ in length: their ends depend on the step."""
    hopper = problem.device.nvidia and problem.device.capability == (9, 0)
    if not hopper or problem.a.dtype.itemsize != 2:
        return None
    if splits == 1:
        return _STEP
    return f"{_STEP}/split{splits}" if problem.k % (splits * step) == 0 else None


def options(problem: Problem) -> dict[str, Any]:
    """Compiler options with which kernels that form the same sums give the same results.

    The compiler decides for each kernel whether a multiplication and an addition become one FMA,
    which rounds once instead of twice. In silu with a residual it used FMAs in the Hopper kernel,
    and none in the reducing kernel. So batch-invariant mode turns this off, except for fp32
    operands: their dots consist of FMAs, and their kernels share no sums."""
    exact = problem.batch_invariant and problem.a.dtype.itemsize <= 2
    return {"enable_fp_fusion": False} if exact else {}


def equal_splits(problem: Problem) -> tuple[int, ...]:
    """The numbers of ranges of K in batch-invariant mode, in addition to one. With each of them all
    kernels sum the same way, for any step and any M."""
    return tuple(
        splits
        for splits in _SPLITS
        if problem.k >= splits * _LEAST_SPLIT and summed(problem, splits, _USUAL_STEP) is not None
    )
