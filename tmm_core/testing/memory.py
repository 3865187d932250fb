"""Matrices in every layout, inside buffers that reveal out-of-bounds reads and writes.

A matrix is a view of a larger buffer. An operand is surrounded and interleaved with NaN, so that a
kernel which reads past an edge and relies on a zero of the other operand to cancel it returns
NaN. An output is surrounded and interleaved with a known number, so that a store past an edge is
detected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tmm_core.spec.problem import ALIGNMENT

#: Elements before and after a matrix. A tile stored without masks reaches BLOCK_M rows past
#: the end, which on a CPU would corrupt other memory. Two guards and a small matrix stay below
#: the 2¹⁵ elements from which torch runs a loop on several threads.
GUARD = {"cpu": 12 << 10, "cuda": 1 << 18}

#: Surrounds outputs: exact in every dtype, int8 included.
SENTINEL = 96

#: Memory layouts of a matrix of given rows and columns. ``padded``: a larger leading stride than
#: needed, a multiple of 16 bytes; ``unaligned``: one that is not a multiple; ``sliced``: cut out
#: of a wider matrix, with an unaligned base too; ``strided``: neither rows nor columns
#: are contiguous; ``broadcast``: a stride of zero; ``overlapping``: rows that begin before the
#: row above ends.
LAYOUTS = (
    "row",
    "col",
    "row_padded",
    "col_padded",
    "row_unaligned",
    "col_unaligned",
    "row_sliced",
    "col_sliced",
    "strided",
    "broadcast_rows",
    "broadcast_cols",
    "broadcast",
    "overlapping",
)
#: Layouts in which every element has its own address, as outputs need.
WRITABLE = tuple(
    layout for layout in LAYOUTS if not layout.startswith(("broadcast", "overlapping"))
)

#: How the matrices of a batch are stacked: one after the other, all the same one, or
#: interleaved row by row, as the heads of an attention layer are.
STACKINGS = ("packed", "broadcast", "interleaved")


@dataclass(frozen=True, slots=True)
class Guarded:
    """A tensor, the buffer it is a view of, and the buffer's original contents."""

    tensor: torch.Tensor
    memory: torch.Tensor
    before: torch.Tensor
    #: Mask of the elements of ``memory`` that belong to the tensor.
    inside: torch.Tensor

    def changed(self) -> int:
        """Number of changed elements, in the tensor or around it."""
        return int(self._differs().sum())

    def changed_outside(self) -> int:
        """Number of changed elements around the tensor."""
        return int((self._differs() & ~self.inside).sum())

    def _differs(self) -> torch.Tensor:
        # Compare bits: NaN does not equal itself.
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        as_bits = bits[self.memory.element_size()]
        return self.memory.view(as_bits) != self.before.view(as_bits)


def operand(
    shape: Sequence[int],
    layout: str,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
    *,
    scale: float = 1.0,
    stacking: str = "packed",
    spread: int = 1,
) -> Guarded:
    """A random matrix (or 3-D batch of them) in ``layout``, surrounded by NaN.

    Args:
        shape: ``(rows, cols)`` or ``(batch, rows, cols)``.
        layout, stacking: Of :data:`LAYOUTS` and :data:`STACKINGS`.
        scale: Standard deviation of the elements; integers are drawn from −8 to 8.
        spread: Extra width of leading strides; varies them within their class.
    """
    strides, offset, length = _strides(shape, layout, stacking, dtype.itemsize, spread)
    if not (dtype.is_floating_point or dtype.is_complex):
        whole = torch.randint(-8, 9, (length,), generator=generator, device=device)
        return _guarded(whole, SENTINEL, shape, strides, offset, dtype)
    wide = torch.promote_types(dtype, torch.float32) if dtype.itemsize > 1 else torch.float32
    drawn = torch.randn(length, generator=generator, device=device, dtype=wide) * scale
    return _guarded(drawn, math.nan, shape, strides, offset, dtype)


def destination(
    shape: Sequence[int],
    layout: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    spread: int = 1,
) -> Guarded:
    """An output filled with NaN (zeros if the dtype has none) in a buffer filled with
    :data:`SENTINEL`; ``layout`` is one of :data:`WRITABLE`."""
    strides, offset, length = _strides(shape, layout, "packed", dtype.itemsize, spread)
    whole = not (dtype.is_floating_point or dtype.is_complex)
    unwritten = torch.full((length,), 0 if whole else math.nan, device=device)
    return _guarded(unwritten, SENTINEL, shape, strides, offset, dtype)


def vector(
    size: int, layout: str, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Guarded:
    """A random vector, ``"packed"``, ``"strided"`` (every third element) or ``"broadcast"``,
    surrounded by NaN."""
    step = {"packed": 1, "strided": 3, "broadcast": 0}[layout]
    drawn = torch.randn(max(0, size - 1) * step + 1, generator=generator, device=device)
    return _guarded(drawn, math.nan, (size,), (step,), 0, dtype)


def _guarded(
    values: torch.Tensor,
    outside: float,
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    dtype: torch.dtype,
) -> Guarded:
    """``values`` between two guards; elements outside the view of ``strides`` are replaced."""
    guard = GUARD[values.device.type]
    memory = torch.nn.functional.pad(values, (guard, guard))
    places = torch.arange(memory.numel(), device=memory.device)
    inside = torch.zeros_like(places, dtype=torch.bool)
    inside[places.as_strided(shape, strides, guard + offset).reshape(-1)] = True
    memory = torch.where(inside, memory, outside).to(dtype)
    view = memory.as_strided(shape, strides, guard + offset)
    return Guarded(view, memory, memory.clone(), inside)


def _strides(
    shape: Sequence[int], layout: str, stacking: str, itemsize: int, spread: int
) -> tuple[tuple[int, ...], int, int]:
    """Strides of the dimensions, offset from the guard, and number of elements from there."""
    *batch, rows, cols = shape
    unit = max(1, ALIGNMENT // itemsize)
    row, col, offset = _matrix(layout, rows, cols, unit, spread)
    if not batch:
        strides: tuple[int, ...] = (row, col)
    elif stacking == "broadcast":
        strides = (0, row, col)
    elif stacking == "interleaved":
        # Rows or columns stay contiguous; their neighbours belong to the other matrices.
        assert layout.startswith(("row", "col")), "only rows or columns can be interleaved"
        if layout.startswith("row"):
            strides = (row, row * batch[0], col)
        else:
            strides = (col, row, col * batch[0])
    else:
        reach = _reach((rows, cols), (row, col)) + 1
        strides = (_rounded_up(reach, unit) if row % unit == 0 else reach, row, col)
    return strides, offset, offset + _reach(shape, strides) + 1


def _matrix(layout: str, rows: int, cols: int, unit: int, spread: int) -> tuple[int, int, int]:
    """Row stride, column stride and offset in elements; ``unit`` of them are 16 bytes."""
    if layout.startswith("col"):
        leading, inner, offset = _matrix("row" + layout[3:], cols, rows, unit, spread)
        return inner, leading, offset
    if layout == "row":
        return cols, 1, 0
    if layout == "row_padded":
        return _rounded_up(cols, unit) + 2 * unit * spread, 1, 0
    if layout == "row_unaligned":
        return (cols | 1) + 2 * spread, 1, 0  # odd: never aligned
    if layout == "row_sliced":
        return _rounded_up(cols, unit) + 2 * unit * spread, 1, 3
    if layout == "strided":
        return (cols + 1) * (1 + spread), 1 + spread, 0
    if layout == "overlapping":
        return unit, 1, 0
    try:
        return {"broadcast_rows": (0, 1, 0), "broadcast_cols": (1, 0, 0), "broadcast": (0, 0, 0)}[
            layout
        ]
    except KeyError:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}") from None


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Offset of the last element from the first."""
    return sum(max(0, n - 1) * s for n, s in zip(shape, strides, strict=True))


def _rounded_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
