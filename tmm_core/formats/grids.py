"""Scales: which values of an operand share one, and how they apply to its values.

An operand's scales are a grid: one scale for each block of ``(outer, k)`` values. ``outer`` are
rows of ``a`` or columns of ``b``; zero stands for the whole dimension. Zero points form the same
grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

Tensor = torch.Tensor

#: ``<<`` and ``>>``, which leave the numbers of a DTensor as they are (torch 2.13).
shift_left, shift_right = torch.bitwise_left_shift, torch.bitwise_right_shift

#: The values that share a scale: ``(0, 0)`` all, ``(1, 0)`` a row of ``a`` or column of ``b``,
#: ``(1, g)`` a group of g values along K, ``(128, 128)`` a block.
Block = tuple[int, int]
TENSOR: Block = (0, 0)
ROW: Block = (1, 0)

#: ``tensor`` and ``row`` as above; ``group``: several along K; ``block``: of several rows.
Kind = Literal["tensor", "row", "group", "block"]

#: The dtype of scales that are exponents (E8M0): 2^(x − 127), and NaN for 255. Torch's
#: float8_e8m0fnu is passed as this one, which every torch and Triton can read.
EXPONENT = torch.uint8
#: Both dtypes of exponents.
EXPONENTS = {EXPONENT, torch.float8_e8m0fnu}


def kind_of(block: Block) -> Kind:
    """The kind of a grid."""
    if block in (TENSOR, ROW):
        return "tensor" if block == TENSOR else "row"
    return "group" if block[0] == 1 else "block"


def text_of(block: Block) -> str:
    """``"tensor"``, ``"row"`` or ``"1x128"``."""
    return kind_of(block) if block in (TENSOR, ROW) else f"{block[0]}x{block[1]}"


def parse(text: str) -> Block:
    """The block of that text.

    Raises:
        ValueError: The text names no block.
    """
    if text in ("tensor", "row"):
        return TENSOR if text == "tensor" else ROW
    outer, _, k = text.partition("x")
    if not (outer.isdecimal() and k.isdecimal()):
        raise ValueError(f"scales are by tensor, row or a block such as 1x128, not {text!r}")
    block = int(outer), int(k)
    if block[0] < 1 or block[1] < 1:
        raise ValueError(f"blocks of scales have positive sizes, not {text!r}")
    return block


def block_of_call(group: int | None, block: Sequence[int] | None) -> Block | None:
    """The block that a caller names as ``block`` or as ``group``; None if neither is given.

    Raises:
        ValueError: Both are given, or the block does not have two sizes.
        TypeError: A size is no integer.
    """
    if group is None and block is None:
        return None
    if group is not None and block is not None:
        raise ValueError("give the group or the block: a group is a block of one row")
    if not (block is None or isinstance(block, Sequence)):
        raise TypeError(f"block must be two integers (rows, along K), got {block!r}")
    found = (1, group) if block is None else tuple(block)
    if not all(isinstance(size, int) for size in found):
        raise TypeError(f"sizes of groups and blocks are integers, got {found}")
    if len(found) != 2:
        raise ValueError(f"block must be two integers (rows, along K), got {found}")
    return found  # type: ignore[return-value]  # checked


def simplest(block: Block, outer: int, k: int, stack: int = 1) -> Block:
    """The simplest block that divides a matrix of these sizes in the same way.

    Args:
        stack: The number of matrices; each has its own scales.
    """
    rows, width = block
    if 0 < k <= width:
        width = 0
    if stack == 1 and width == 0 and (rows == 0 or 0 < outer <= rows):
        return TENSOR
    return ROW if (rows, width) == ROW else block


def sizes(block: Block, outer: int, k: int) -> tuple[int, int]:
    """The number of scales along both dimensions."""
    rows, width = block
    return -(-outer // rows) if rows else 1, -(-k // width) if width else 1


def factors(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as numbers of a floating dtype; exponents (:data:`EXPONENT`) become powers of two."""
    if scale.dtype is not EXPONENT:
        return scale.to(dtype)
    bits = scale.to(torch.int32)
    # 2^-127 is a subnormal number, 0x00400000.
    power = torch.where(bits == 0, 0x400000, shift_left(bits, 23))
    return torch.where(bits == 255, 0x7FC00000, power).view(torch.float32).to(dtype)


def exponents(scale: Tensor) -> Tensor:
    """The largest exponents whose powers of two do not exceed these positive numbers. NaN gives the
    exponent that stands for NaN."""
    # The exponent's bits: log2 would round a number just below a power of two up.
    bits = shift_right(scale.float().view(torch.int32), 23).clamp(0, 254)
    return torch.where(scale.isnan(), 255, bits).to(EXPONENT)


def combined(
    function: Callable[[Tensor, Tensor], Tensor],
    values: Tensor,
    part: Tensor,
    block: Block,
    along: int,
) -> Tensor:
    """``function(values, part)``, where each element of ``part`` goes with a block of values.

    Args:
        values: ``[…, rows, columns]``, or one dimension, along K.
        part: The grid, with as many dimensions; scales of a tensor or row need only broadcast.
        along: The dimension of K, -1 or -2; the other one is ``outer``.
    """
    if kind_of(block) in ("tensor", "row"):
        return function(values, part)
    shape = values.shape
    for size, dimension in zip(block, (-3 - along, along), strict=True):
        if size <= 1 or values.dim() < -dimension:
            continue
        if along == dimension and shape[dimension] % size == 0:
            # Broadcasting avoids a copy of the scales.
            blocks = values.unflatten(dimension, (-1, size))
            return function(blocks, part.unsqueeze(dimension)).view(shape)
        part = part.repeat_interleave(size, dimension).narrow(dimension, 0, shape[dimension])
    return function(values, part)
