"""Matrices in every layout, between guard bands that reveal out-of-bounds reads and writes
(:mod:`tmm_core.verify.guard_bands`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tmm_core.spec.operand import ALIGNMENT
from tmm_core.verify.guard_bands import (
    UNREADABLE,
    UNWRITTEN,
    GuardedTensor,
    MemoryLayout,
    with_guard_bands,
)

#: Memory layouts of a matrix of given rows and columns.
#:
#: - ``padded``: a larger leading stride than needed, a multiple of 16 bytes.
#: - ``unaligned``: a leading stride that is no multiple of 16 bytes.
#: - ``sliced``: cut out of a wider matrix, with an unaligned base too.
#: - ``strided``: neither rows nor columns are contiguous.
#: - ``broadcast``: a stride of zero.
#: - ``overlapping``: rows that begin before the row above ends.
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


def operand(
    shape: Sequence[int],
    layout: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    stacking: str = "packed",
) -> GuardedTensor:
    """An uninitialised matrix (or 3-D batch of them) in ``layout``, surrounded by NaN.

    Args:
        shape: ``(rows, cols)`` or ``(batch, rows, cols)``.
        layout, stacking: Names from :data:`LAYOUTS` and :data:`STACKINGS`.
    """
    return with_guard_bands(_placed(shape, layout, stacking, dtype), device, UNREADABLE)


def destination(
    shape: Sequence[int], layout: str, dtype: torch.dtype, device: torch.device
) -> GuardedTensor:
    """An output filled with NaN, surrounded by another number; ``layout`` is one of
    :data:`WRITABLE`."""
    made = with_guard_bands(_placed(shape, layout, "packed", dtype), device, UNWRITTEN)
    made.poison()
    return made


def _placed(shape: Sequence[int], layout: str, stacking: str, dtype: torch.dtype) -> MemoryLayout:
    *batch, rows, cols = shape
    unit = max(1, ALIGNMENT // dtype.itemsize)
    row, col, offset = _matrix(layout, rows, cols, unit)
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
        length = MemoryLayout((rows, cols), dtype, (row, col)).length
        strides = (_rounded_up(length, unit) if row % unit == 0 else length, row, col)
    return MemoryLayout(tuple(shape), dtype, strides, offset)


def _matrix(layout: str, rows: int, cols: int, unit: int) -> tuple[int, int, int]:
    """Row stride, column stride and offset in elements; ``unit`` of them are 16 bytes."""
    if layout.startswith("col"):
        leading, inner, offset = _matrix("row" + layout[3:], cols, rows, unit)
        return inner, leading, offset
    padded = _rounded_up(cols, unit) + 2 * unit
    known = {
        "row": (cols, 1, 0),
        "packed": (cols, 1, 0),  # a vector's
        "row_padded": (padded, 1, 0),
        "row_unaligned": ((cols | 1) + 2, 1, 0),  # odd: never aligned
        "row_sliced": (padded, 1, 3),
        "strided": (2 * (cols + 1), 2, 0),
        "overlapping": (unit, 1, 0),
        "broadcast_rows": (0, 1, 0),
        "broadcast_cols": (1, 0, 0),
        "broadcast": (0, 0, 0),
    }
    if layout not in known:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    return known[layout]


def _rounded_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
