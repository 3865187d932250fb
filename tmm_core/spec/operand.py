"""Describes one matrix of a call by what kernels depend on: dtype, stride class, alignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Layout = Literal["row", "col", "strided"]

#: Bulk copies and 16-byte vector loads need base and leading stride to be multiples of this.
ALIGNMENT = 16

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Operand:
    """One matrix, described by its stride class rather than its strides.

    ``row``: consecutive elements of a row are adjacent; ``col``: of a column; ``strided``: neither.
    ``aligned``: base address and leading stride (and batch stride) are multiples of 16 bytes and
    rows (columns) do not overlap, so that TMA can address it. ``wide``: its largest offset does not
    fit in 32 bits.
    """

    dtype: torch.dtype
    layout: Layout = "row"
    aligned: bool = True
    wide: bool = False

    @classmethod
    def of(cls, t: torch.Tensor) -> Operand:
        """Classify the last two dimensions of a 2-D or 3-D tensor."""
        rows, cols = t.shape[-2:]
        s_row, s_col = t.stride()[-2:]
        layout: Layout
        # A dimension of size one has no meaningful stride; a contiguous vector gets the layout in
        # which it is one row or one column.
        column = s_row == 1 and cols <= 1 < rows
        if (s_col == 1 or cols <= 1) and not column:
            layout, leading, width, count = "row", s_row, cols, rows
        elif s_row == 1 or rows <= 1:
            layout, leading, width, count = "col", s_col, rows, cols
        else:
            layout, leading, width, count = "strided", 0, 0, 0
        steps = [
            s for s, n in ((leading, count), (t.stride(0), t.shape[0] * (t.dim() == 3))) if n > 1
        ]
        aligned = (
            layout != "strided"
            and (t.is_meta or t.data_ptr() % ALIGNMENT == 0)
            and all(s * t.element_size() % ALIGNMENT == 0 for s in steps)
            and (count <= 1 or leading >= width)
        )
        # A single row's stride is an argument too where an index names the row.
        reach = max((rows - 1) * s_row + (cols - 1) * s_col, s_row if rows == 1 else 0)
        return cls(t.dtype, layout, aligned, reach > _INT32_MAX)

    def to_json(self) -> dict[str, Any]:
        return {
            "dtype": dtype_name(self.dtype),
            "layout": self.layout,
            "aligned": self.aligned,
            "wide": self.wide,
        }

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Operand:
        return cls(dtype_of(doc["dtype"]), doc["layout"], doc["aligned"], doc["wide"])


def grouped_strides(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """The strides of a grouped product's result where none is given, as torch allocates it: rows
    start at multiples of 16 bytes, as TMA requires; on ROCm they are packed."""
    rows, width = shape[-2:]
    unit = 1 if torch.version.hip else ALIGNMENT // dtype.itemsize
    leading = (width + unit - 1) // unit * unit
    return (rows * leading, leading, 1)[-len(shape) :]


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``torch.bfloat16`` for ``"bfloat16"``.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return dtype
