"""Tensors between guard bands, which expose reads and writes out of bounds.

Kernels are promised an operand's stride class, not its strides. One function lays out a tensor of a
class for timing and for verification. With ``padded`` there are gaps between its rows, as far as
the class allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tmm_core.spec.operand import ALIGNMENT, Operand
from tmm_core.verify.ragged_inputs import poison

#: Filler around an input: NaN in every floating dtype. A kernel that reads out of bounds and relies
#: on a zero of the other operand to cancel the value returns NaN.
UNREADABLE = 0xFF
#: Filler around an output; an unlikely result of arithmetic.
UNWRITTEN = 0xA5

#: Rows of a band: the height of the tallest tile. A store without masks writes this far past the
#: output.
TILE_ROWS = 128
#: Minimum and maximum bytes of a band.
LEAST, MOST = 4 << 10, 8 << 20

#: Bytes per row of the matrix over which checksums are computed.
_LINE = 4 << 10

_INT32_MAX = 2**31 - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """A tensor's layout in memory, in elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def length(self) -> int:
        """The number of elements from the start of the memory to the end of the tensor."""
        steps = zip(self.shape, self.strides, strict=True)
        return self.offset + sum(max(0, size - 1) * step for size, step in steps) + 1


def memory_layout(spec: Operand, shape: tuple[int, ...], *, padded: bool = False) -> MemoryLayout:
    """Return the layout of a tensor whose last two dimensions are of the class ``spec``."""
    *batch, rows, cols = shape
    if spec.layout == "col":
        flipped = memory_layout(replace(spec, layout="row"), (*batch, cols, rows), padded=padded)
        *outer, leading, inner = flipped.strides
        return replace(flipped, shape=shape, strides=(*outer, inner, leading))
    unit = max(1, ALIGNMENT // spec.dtype.itemsize)
    offset, inner = 0, 1
    interleaved = spec.layout == "strided" and padded
    if interleaved:
        leading, inner = 3, 3 * rows + 1
    elif spec.layout == "strided":
        leading, inner = 2 * cols, 2
    else:
        natural = cols % unit == 0 or rows == 1
        leading = cols + unit * padded
        if spec.aligned:
            leading = -(-leading // unit) * unit if rows > 1 else leading
        elif padded:
            # An even leading stride and an odd address; or, for a single row, the address alone.
            leading, offset = leading + leading % 2, 1
        elif natural and rows > 1:
            leading += 1  # misaligned to 16 bytes
        elif natural:
            offset = 1  # a single row has no leading stride to misalign
    reach = max(0, rows - 1) * leading + max(0, cols - 1) * inner
    if padded and not spec.wide and reach > _INT32_MAX:
        return memory_layout(spec, shape)  # with gaps, offsets would exceed 32 bits
    matrix = cols * inner if interleaved else rows * leading
    if spec.aligned and not interleaved:
        matrix = -(-matrix // unit) * unit
    strides = (*([matrix] if batch else []), leading, inner)
    return MemoryLayout(shape, spec.dtype, strides, offset)


def expanded_layout(spec: Operand, shape: tuple[int, ...], columns: bool = False) -> MemoryLayout:
    """Return a layout of the class ``spec`` with strides of zero where the class allows them; for
    inputs only.

    Args:
        columns: Of a ``strided`` tensor, only the columns share memory, instead of all elements.
    """
    placed = memory_layout(spec, shape, padded=True)
    *batch, rows, cols = shape
    leading, inner = placed.strides[-2:]
    if not spec.wide and not spec.aligned:
        if spec.layout == "row" and rows > 1 and cols > 1:
            leading = 0
        elif spec.layout == "col" and cols > 1 and rows > 1:
            inner = 0
        elif spec.layout == "strided":
            leading, inner = (leading if columns else 0), 0
    return replace(placed, strides=(0, leading, inner) if batch else (leading, inner))


def unusual_layout(
    spec: Operand, shape: tuple[int, ...], *, near: bool = False, overlapping: bool = False
) -> MemoryLayout:
    """Return a layout that the class ``spec`` allows, but that operands seldom have.

    The leading stride is three times a row's length; rows of a batch's matrices alternate. Aligned
    addresses are not multiples of 32 bytes. If ``near``, matrices have gaps, and addresses that
    need not be aligned are multiples of 8 bytes. Then rows also overlap, if ``overlapping`` and the
    class allow it.
    """
    if spec.layout == "col":
        *batch, rows, cols = shape
        flipped = replace(spec, layout="row")
        placed = unusual_layout(flipped, (*batch, cols, rows), near=near, overlapping=overlapping)
        *outer, leading, inner = placed.strides
        return replace(placed, shape=shape, strides=(*outer, inner, leading))
    *batch, rows, cols = shape
    unit = max(1, ALIGNMENT // spec.dtype.itemsize)
    inner = 3 - near if spec.layout == "strided" else 1
    offset = unit if spec.aligned else max(1, unit // (2 if near else 4))
    offset = 0 if spec.layout == "strided" else offset
    line = -(-cols * inner // unit) * unit + unit
    leading, matrix = 3 * line * math.prod(batch), line
    if near:
        loose = overlapping and not spec.aligned and not spec.wide and cols > 1
        leading = (3 if inner > 1 else cols // 2 + 1) if loose else line
        matrix = rows * line + 2 * unit
    strides = (*([matrix] if batch else []), leading, inner)
    return MemoryLayout(shape, spec.dtype, strides, offset)


def vector_layout(spec: Operand, shape: tuple[int, ...], step: int) -> MemoryLayout:
    """Return the layout of rows whose elements are ``step`` apart; with 0, all share an address."""
    leading = 0 if step == 0 else step * shape[1] + 1
    return MemoryLayout(shape, spec.dtype, (leading, step))


@dataclass(frozen=True, slots=True)
class GuardedTensor:
    """A tensor inside memory otherwise filled with one byte value."""

    tensor: torch.Tensor
    #: All of the memory, as 64-bit words.
    words: torch.Tensor
    filler: int

    def sums(self) -> torch.Tensor:
        """Return checksums of the tensor, its gaps and bands."""
        return checksums(self.words)

    def refill(self) -> None:
        """Overwrite all of the memory with its filler, without raising the tensor's version."""
        self.words.data.fill_(_word(self.filler, 8))

    def intact(self) -> torch.Tensor:
        """Return whether bands and gaps are unchanged, as a tensor; overwrites the tensor
        inside."""
        t = torch.view_as_real(self.tensor) if self.tensor.is_complex() else self.tensor
        t.view(_BITS[t.element_size()]).fill_(_word(self.filler, t.element_size()))
        return (self.words == _word(self.filler, 8)).all()

    def poison(self) -> torch.Tensor:
        """Return the tensor filled with NaN (integers: with zeros), with bands and gaps reset."""
        self.refill()
        return poison(self.tensor)


def with_guard_bands(
    placed: MemoryLayout, device: torch.device, filler: int, spec: Operand | None = None
) -> GuardedTensor:
    """An uninitialised tensor of this layout between two bands of ``filler``; of the usual layout
    if this one is not of the class ``spec``."""
    inside, band = _extent(placed)
    memory = torch.empty(inside + 2 * band, dtype=torch.uint8, device=device)
    memory.fill_(filler)
    offset = band // placed.dtype.itemsize + placed.offset
    tensor = memory.view(placed.dtype).as_strided(placed.shape, placed.strides, offset)
    if spec is not None and not in_class(tensor, spec):
        return with_guard_bands(memory_layout(spec, placed.shape), device, filler)
    return GuardedTensor(tensor, memory.view(torch.int64).view(-1, _LINE // 8), filler)


def checksums(t: torch.Tensor) -> torch.Tensor:
    """Return the sums of a matrix's, or a batch's, bits along its last two dimensions, modulo 2⁶⁴.
    Without a copy, they detect every change of one element, and every swap of two in different rows
    and columns."""
    t = torch.view_as_real(t).flatten(-2) if t.is_complex() else t
    bits = t.view(_BITS[t.element_size()])
    return torch.cat([bits.sum(dimension).flatten() for dimension in (-2, -1)])


def footprint(spec: Operand, shape: tuple[int, ...]) -> int:
    """Maximum bytes of :func:`with_guard_bands`, padded or not."""
    extents = (_extent(memory_layout(spec, shape, padded=padded)) for padded in (False, True))
    return max(inside + 2 * band for inside, band in extents)


def in_class(t: torch.Tensor, spec: Operand) -> bool:
    """Whether the last two dimensions of a tensor are of the class ``spec``."""
    found = Operand.of(t)
    return (found.layout, found.aligned, found.wide) == (spec.layout, spec.aligned, spec.wide)


def in_one_memory(tensors: Mapping[str, GuardedTensor]) -> dict[str, GuardedTensor]:
    """Return copies of tensors and their bands with the same strides and alignment, which follow
    one another in one storage."""
    words = torch.cat([each.words for each in tensors.values()])
    memory, start, found = words.flatten().view(torch.uint8), 0, {}
    for name, each in tensors.items():
        t, lines = each.tensor, len(each.words)
        offset = start * _LINE // t.element_size() + t.storage_offset()
        moved = memory.view(t.dtype).as_strided(t.shape, t.stride(), offset)
        found[name] = GuardedTensor(moved, words[start : start + lines], each.filler)
        start += lines
    return found


def _extent(placed: MemoryLayout) -> tuple[int, int]:
    """Bytes of the inside, and of each band."""
    size = placed.dtype.itemsize
    longest = max(placed.strides[-2:]) * size
    band = -(-min(max(TILE_ROWS * longest, LEAST), MOST) // _LINE) * _LINE
    return -(-placed.length * size // _LINE) * _LINE, band


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors share an allocation, or one's allocation reaches into the other's."""
    if not x.numel() or not y.numel():
        return False
    first, second = x.untyped_storage(), y.untyped_storage()
    start, other_start = first.data_ptr(), second.data_ptr()
    return start < other_start + second.nbytes() and other_start < start + first.nbytes()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Whether two tensors of one shape and dtype agree bit for bit, as a tensor."""
    x, y = (torch.view_as_real(t) if t.is_complex() else t for t in (x, y))
    as_bits = _BITS[x.element_size()]
    return (x.view(as_bits) == y.view(as_bits)).all()


def _word(byte: int, size: int) -> int:
    """Return the signed integer whose ``size`` bytes are all ``byte``."""
    return int.from_bytes(bytes([byte]) * size, "little", signed=True)
