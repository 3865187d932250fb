"""Describes a matrix of a call by the properties on which kernels depend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from tmm_core import formats
from tmm_core.formats import Format, grids
from tmm_core.formats.grids import ROW, TENSOR, Block, Kind

Layout = Literal["row", "col", "strided"]

#: Bulk copies and 16-byte vector loads need base and leading stride to be multiples of this.
ALIGNMENT = 16

_INT32_MAX = 2**31 - 1


class Scale(NamedTuple):
    """The scales of a stored operand, one for each block of its values (:data:`Block`); its zero
    points form the same grid."""

    block: Block
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, t: torch.Tensor | None, block: Block | None = None) -> Scale | None:
        """Classify a scale. Without a block, one element counts as per-tensor, even for a single
        row."""
        if t is None:
            return None
        return cls(block or (TENSOR if t.numel() == 1 else ROW), t.dtype)

    @property
    def kind(self) -> Kind:
        return grids.kind_of(self.block)

    @property
    def grid(self) -> bool:
        """Whether the scales form a grid of two dimensions, whose strides kernels use."""
        return self.block not in (TENSOR, ROW)

    @staticmethod
    def numbers(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Scales as numbers of a floating dtype (:func:`tmm_core.formats.grids.factors`)."""
        return grids.factors(t, dtype)

    def __str__(self) -> str:
        text = grids.text_of(self.block)
        return text + ("" if self.dtype is torch.float32 else f" {dtype_name(self.dtype)}")

    @classmethod
    def parse(cls, text: str) -> Scale:
        """Parse the text of a scale.

        Raises:
            ValueError: It is not a scale's text.
        """
        block, _, dtype = text.partition(" ")
        return cls(grids.parse(block), dtype_of(dtype or "float32"))


@dataclass(frozen=True, slots=True)
class Operand:
    """One matrix, described by its stride class rather than its strides.

    ``row``: consecutive elements of a row are adjacent; ``col``: of a column; ``strided``: neither.
    ``aligned``: base address and leading stride (and batch stride) are multiples of 16 bytes and
    rows (columns) do not overlap, so that TMA can address it. ``wide``: its largest offset does not
    fit in 32 bits. ``format`` is empty for plain numbers and where the dtype implies the format.
    ``zero``: the dtype of the zero points, which have the scale's kind; True: the storage dtype;
    None or False: there are no zero points.
    """

    dtype: torch.dtype
    layout: Layout = "row"
    aligned: bool = True
    wide: bool = False
    format: str = ""
    scale: Scale | None = None
    zero: torch.dtype | None = None

    def __post_init__(self) -> None:
        if isinstance(self.zero, bool):
            object.__setattr__(self, "zero", self.dtype if self.zero else None)

    @classmethod
    def of(cls, t: torch.Tensor, **stored: Any) -> Operand:
        """Classify the last two dimensions of a 2-D or 3-D tensor. The fields ``format``, ``scale``
        and ``zero`` come from ``stored``."""
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
        # The stride of a single row counts too: an index may address the row.
        reach = max((rows - 1) * s_row + (cols - 1) * s_col, s_row if rows == 1 else 0)
        return cls(t.dtype, layout, aligned, reach > _INT32_MAX, **stored)

    @property
    def form(self) -> Format | None:
        """The format; None: plain numbers."""
        return formats.of(self.dtype, self.format)

    @property
    def pack(self) -> int:
        """Values in a stored element, along K."""
        return 1 if self.form is None else self.form.pack

    @property
    def block(self) -> Block:
        """The block of values that share a scale; a row if there is no scale."""
        return ROW if self.scale is None else self.scale.block

    @property
    def grid(self) -> bool:
        """Whether its scales form a grid (:attr:`Scale.grid`)."""
        return self.scale is not None and self.scale.grid

    @property
    def spelled(self) -> str:
        """Its format as calls pass it (:func:`tmm_core.formats.spelled`)."""
        form = self.form
        named = form is not None and (self.format or self.grid)
        return formats.spelled(form.name, self.block) if form is not None and named else ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The operand's parts other than the stored numbers: ``"scale"``, ``"zero"``."""
        return ("scale",) * (self.scale is not None) + ("zero",) * (self.zero is not None)

    def to_json(self) -> dict[str, Any]:
        """The operand as a part of a record's key. Newer fields are included only if they differ
        from their defaults, so that the keys of dense operands do not change."""
        document: dict[str, Any] = {
            "dtype": dtype_name(self.dtype),
            "layout": self.layout,
            "aligned": self.aligned,
            "wide": self.wide,
        }
        if self.format:
            document["format"] = self.format
        if self.form is not None and (code := formats.CODES.get(self.form.name)):
            document["code"] = code
        if self.scale is not None:
            document["scale"] = str(self.scale)
        if self.zero is not None:
            document["zero"] = True if self.zero is self.dtype else dtype_name(self.zero)
        return document

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Operand:
        scale, zero = map(dict(doc).get, ("scale", "zero"))
        return cls(
            dtype_of(doc["dtype"]), doc["layout"], doc["aligned"], doc["wide"],
            formats.named(doc["format"]).name if doc.get("format") else "",
            None if scale is None else Scale.parse(scale),
            dtype_of(zero) if isinstance(zero, str) else zero,
        )  # fmt: skip


def grouped_strides(shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the strides of a grouped product's result as torch allocates it. Rows start at
    multiples of 16 bytes, as TMA requires; on ROCm they are contiguous."""
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
