"""The names of the orders in which products are summed: which kernels give a row the same bits.

On Hopper every tensor-core instruction for 16-bit operands, ``wgmma m64nNk16`` of any width as well
as ``mma m16n8k16``, adds the products of 16 consecutive k to its fp32 accumulators with the same
result. So a sum over K depends neither on the tile nor on the step along K nor on which operand
comes first, and kernels that split K into equal ranges and add the parts in their order agree too.
``benchmarks/invariant_bits.py`` shows it: on an H100 31 configs of five kernels are bitwise equal
for four K, and so are those of 2, 4, 8 and 16 ranges each.
"""

from __future__ import annotations

from tmm_core import Problem

#: Of 16-bit operands on Hopper, 16 products of consecutive k at a time.
_STEP = "sm90-k16"


#: Ranges worth a try in batch-invariant mode, by K alone, and how much of K each has at least.
_SPLITS, _LEAST_SPLIT = (2, 4, 8), 512
#: Steps along K that kernels take, of which a range should be a multiple.
_USUAL_STEP = 128


def summed(problem: Problem, splits: int = 1, step: int = 16) -> str | None:
    """The name of the sum over K by tensor cores in ``splits`` ranges of whole ``step`` elements,
    or None where nothing is known that sums alike: other hardware, other operands, ranges of
    different lengths, whose ends depend on the step."""
    device = problem.device
    hopper = device.type == "cuda" and device.capability == (9, 0)
    if not hopper or device.interpreted or problem.a.dtype.itemsize != 2:
        return None
    if splits == 1:
        return _STEP
    return f"{_STEP}/split{splits}" if problem.k % (splits * step) == 0 else None


def equal_splits(problem: Problem) -> tuple[int, ...]:
    """Into how many ranges K may be cut in batch-invariant mode, besides one: so that kernels sum
    alike whatever their step, and for every M the same."""
    return tuple(
        splits
        for splits in _SPLITS
        if problem.k >= splits * _LEAST_SPLIT and summed(problem, splits, _USUAL_STEP) is not None
    )
