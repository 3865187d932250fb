"""Operand formats: how stored numbers map to values, if the dtype alone does not determine it.

Each module of this package that defines a ``FORMAT`` is one format and is discovered automatically.
A new format is one file, and removing the file removes the format. Plugins add formats through the
hook ``tmm_formats``.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tmm_core.formats import grids
from tmm_core.formats.grids import ROW, TENSOR, Block

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of operands whose stored numbers encode other values.

    ``value = (dequantize(code) − (zero − origin)) · scale``, or without a zero point
    ``dequantize(code) · scale``. A stored element holds one code, or ``pack`` codes.

    Args:
        name: The name that callers give and that kernels declare in :class:`~tmm_core.Supports`.
        storage: Dtypes of the stored elements, which two operands may mix.
        quantize: Rounds numbers to codes of a storage dtype, as the reference.
        dequantize: Converts codes, exactly, to a dtype that torch multiplies.
        tolerance: The largest error accepted of a product, besides the result's rounding; see
            :mod:`tmm_core.verify.compare`.
        pack: Codes in a stored element, along K, the lowest bits first.
        grids: The blocks ``(outer, k)`` of values that may share a scale: ``outer`` rows of ``a``
            or columns of ``b``, and ``k`` values along K. 0 is the whole dimension.
        short: Whether the last block of a dimension may be short; else K has whole ones.
        scale_dtypes: Dtypes of scales; uint8 scales are exponents (E8M0): 2^(x − 127).
        zeros: Whether an operand may have zero points, one for each scale.
        origin: The code that stands for zero where there is no zero point.
        limit: The largest magnitude of dequantised numbers, to which random values are scaled;
            None: dequantised numbers are about as large as the values.
        result: Default dtype of the result, bias and residual where both operands are stored.
        implied: Whether the dtype alone determines the format, without a scale. Else callers name
            the format (:class:`tmm_core.Quantized`) and give a scale.
        native: Whether tensor cores multiply two such operands as they are stored.
        decode: Device function ``decode(block, dtype)``: converts a block of codes to values of a
            dtype of 16 bits or more, as ``dequantize``. A plain function, in which
            ``tl`` is Triton's language, or one under ``@triton.jit``; None: only BLAS serves the
            format, unless a kernel names it.

    Raises:
        TypeError, ValueError: A field is of another type, or out of bounds.
    """

    name: str
    storage: tuple[torch.dtype, ...]
    quantize: Callable[[Tensor, torch.dtype], Tensor]
    dequantize: Callable[[Tensor], Tensor]
    tolerance: float
    pack: int = 1
    grids: tuple[Block, ...] = (TENSOR, ROW)
    short: bool = False
    scale_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    zeros: bool = False
    origin: float = 0.0
    limit: float | None = None
    result: torch.dtype = torch.bfloat16
    implied: bool = False
    native: bool = False
    decode: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check all fields, so that a product of this format fails where the format is declared.

        Raises:
            TypeError, ValueError: As the constructor.
        """
        for name, (fits, wanted) in _FIELDS.items():
            if not fits(value := getattr(self, name)):
                raise TypeError(f"a format's {name} is {wanted}, got a {type(value).__name__}")
        if self.pack < 1 or not self.storage or not self.grids or not self.scale_dtypes:
            raise ValueError(f"format {self.name!r} stores no codes, or has no scales")

    def __str__(self) -> str:
        return " and ".join(str(dtype).removeprefix("torch.") for dtype in self.storage)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 * self.storage[0].itemsize // self.pack

    def unpacked(self, stored: Tensor, along: int = -1) -> Tensor:
        """The codes of stored elements, ``pack`` times as many along that dimension."""
        if self.pack == 1:
            return stored
        mask = (1 << self.bits) - 1
        shifts = [self.bits * place for place in range(self.pack)]
        codes = [grids.shift_right(stored, shift) & mask for shift in shifts]
        place = stored.dim() + along
        return torch.stack(codes, dim=place + 1).flatten(place, place + 1)

    def packed(self, codes: Tensor, along: int = -1) -> Tensor:
        """The stored elements of codes."""
        if self.pack == 1:
            return codes
        size = codes.shape[along] // self.pack
        parts = codes.unflatten(along, (size, self.pack)).movedim(along, 0).unbind()
        stored: Tensor = parts[0].clone()
        for place, part in enumerate(parts[1:], 1):
            stored |= grids.shift_left(part, self.bits * place)
        return stored

    def values(
        self,
        stored: Tensor,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        dtype: torch.dtype | None = None,
        block: Block = ROW,
        along: int = -1,
    ) -> Tensor:
        """The values of stored elements.

        Args:
            scale, zero: Grids of ``block``; grids of a tensor or row broadcast. None: a scale of
                one, and no zero point.
            dtype: The dtype of the computation; by default the dtype that ``dequantize`` returns.
            along: The dimension of K, -1 or -2.
        """
        numbers = self.dequantize(self.unpacked(stored, along))
        numbers = numbers if dtype is None else numbers.to(dtype)
        if zero is not None:
            zero = zero.to(numbers.dtype) - self.origin
            numbers = grids.combined(torch.sub, numbers, zero, block, along)
        if scale is not None:
            scale = grids.factors(scale, numbers.dtype)
            numbers = grids.combined(torch.mul, numbers, scale, block, along)
        return numbers

    def block(self, block: Block, outer: int, k: int, stack: int = 1) -> Block:
        """The simplest block like ``block`` in matrices of these sizes
        (:func:`tmm_core.formats.grids.simplest`).

        Raises:
            ValueError: The format has no such scales, or K has no whole groups.
        """
        own = grids.simplest(block, outer, k, stack)
        allowed = [grids.simplest(each, outer, k, stack) for each in self.grids]
        if own not in allowed:
            names = " or ".join(map(grids.text_of, self.grids))
            raise ValueError(f"format {self.name} has scales by {names}, not {grids.text_of(own)}")
        if own[1] and k % own[1] and not self.short:
            raise ValueError(f"format {self.name}: groups of {own[1]} do not divide K = {k}")
        return own

    def block_of(self, shape: tuple[int, ...], outer: int, k: int, stack: int = 1) -> Block:
        """The format's block whose grid has this shape, ``(rows, columns)``.

        Raises:
            ValueError: No block has such a grid, or several have.
        """
        fit = {
            grids.simplest(each, outer, k, stack)
            for each in self.grids
            if grids.sizes(each, outer, k) == shape
            and (self.short or not each[1] or k % each[1] == 0 or k < each[1])
        }
        if len(fit) == 1:
            return fit.pop()
        names = " or ".join(map(grids.text_of, self.grids))
        which = "several" if fit else "none"
        raise ValueError(
            f"format {self.name} has scales by {names}; {which} of them of shape {shape} for a "
            f"matrix of {(outer, k)}: name the group or the block"
        )


class Pair(NamedTuple):
    """The formats of a product's operands.

    Attributes:
        a, b: None: plain numbers.
        result: The default dtype of the result; None: the operands cannot be multiplied.
        blocks: For both operands, the values that share a scale; None: a tensor or a row.
    """

    a: Format | None
    b: Format | None
    result: torch.dtype | None
    blocks: tuple[Block | None, Block | None] = (None, None)

    @property
    def stored(self) -> bool:
        """Whether an operand has a format."""
        return self.a is not None or self.b is not None

    @property
    def packs(self) -> tuple[int, int]:
        """Values in a stored element of each operand."""
        return 1 if self.a is None else self.a.pack, 1 if self.b is None else self.b.pack


def _tuple_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) in (tuple, list) and all(map(fits, value))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_block(value: Any) -> bool:
    return type(value) in (tuple, list) and [*map(type, value)] == [int, int]


def _is_dtype(value: Any) -> bool:
    return type(value) is torch.dtype


def _is_flag(value: Any) -> bool:
    return type(value) is bool


#: The type of each field of a format: a check, and its description. Exact types, since a subclass
#: of a number or a tuple may compare and iterate as it likes.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda value: type(value) is str, "a text"),
    "storage": (_tuple_of(_is_dtype), "a tuple of dtypes"),
    "quantize": (callable, "a function"),
    "dequantize": (callable, "a function"),
    "tolerance": (_is_number, "a number"),
    "pack": (lambda value: type(value) is int, "a number of codes"),
    "grids": (_tuple_of(_is_block), "a tuple of pairs (outer, k)"),
    "short": (_is_flag, "True or False"),
    "scale_dtypes": (_tuple_of(_is_dtype), "a tuple of dtypes"),
    "zeros": (_is_flag, "True or False"),
    "origin": (_is_number, "a number"),
    "limit": (lambda value: value is None or _is_number(value), "a number or None"),
    "result": (_is_dtype, "a dtype"),
    "implied": (_is_flag, "True or False"),
    "native": (_is_flag, "True or False"),
    "decode": (lambda value: value is None or callable(value), "a function or None"),
}

#: All formats by name, and the formats that a storage dtype implies.
FORMATS: dict[str, Format] = {}
IMPLIED: dict[torch.dtype, Format] = {}
#: Digests of plugins' formats by name, a part of records' keys: an edited format is measured and
#: verified again. Tmm's version determines its own formats.
CODES: dict[str, str] = {}

#: The floating dtypes that kernels read and write: of plain operands, alone or beside stored ones,
#: and of auxiliary outputs.
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: The 8-bit floats that torch multiplies, and to which an auxiliary output may be rounded.
NARROW_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def add(form: Format) -> None:
    """Add a format.

    Raises:
        ValueError: Another format has its name, or is implied by one of its dtypes.
    """
    if FORMATS.get(form.name, form) is not form:
        raise ValueError(f"two formats are named {form.name!r}")
    implied = form.storage if form.implied else ()
    for dtype in implied:
        if (other := IMPLIED.get(dtype, form)) is not form:
            raise ValueError(f"{dtype} implies two formats, {other.name} and {form.name}")
    FORMATS[form.name] = form
    IMPLIED.update(dict.fromkeys(implied, form))


def remove(form: Format) -> None:
    """Forget a format."""
    del FORMATS[form.name]
    CODES.pop(form.name, None)
    for dtype in form.storage if form.implied else ():
        IMPLIED.pop(dtype, None)


for _module in pkgutil.iter_modules(__path__):
    _found = importlib.import_module(f"{__name__}.{_module.name}")
    if hasattr(_found, "FORMAT"):
        add(_found.FORMAT)


def discover() -> None:
    """Load the plugins, whose formats are then known; :mod:`tmm_core.dispatch` replaces this
    function."""


def named(name: str) -> Format:
    """The format of this name.

    Raises:
        ValueError: No installed format has it.
    """
    if name not in FORMATS:
        discover()
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}: installed are {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def of(dtype: torch.dtype, name: str = "") -> Format | None:
    """The format of this name, else the format that ``dtype`` implies; None for plain numbers."""
    return named(name) if name else IMPLIED.get(dtype)


def spelled(name: str, block: Block) -> str:
    """The name of a format with its block of scales, as calls pass it: ``"int4/1x128"``. Scales
    by tensor or row add nothing to the name: their shape shows which they are."""
    return name if block in (TENSOR, ROW) else f"{name}/{grids.text_of(block)}"


def zero_dtypes(form: Format) -> tuple[torch.dtype, ...]:
    """Dtypes of a format's zero points."""
    return (*form.storage, *form.scale_dtypes)


def read(names: str) -> tuple[tuple[str, Block | None], ...]:
    """The names and blocks of both operands in a call's text, ``"of a,of b"`` or empty.

    Raises:
        ValueError: The text after a slash names no block.
    """
    found = []
    for text in names.split(",") if names else ("", ""):
        name, _, block = text.partition("/")
        found.append((name, grids.parse(block) if block else None))
    return tuple(found)


def pair(a: torch.dtype, b: torch.dtype, names: str = "") -> Pair:
    """The formats of operands of these dtypes.

    Args:
        names: ``"of a,of b"``, each empty for plain numbers and for implied formats, else as
            :func:`spelled`; or empty.

    Raises:
        ValueError: A name is unknown.
    """
    (of_a, block_a), (of_b, block_b) = read(names)
    blocks = block_a, block_b
    forms = of(a, of_a), of(b, of_b)
    if forms == (None, None):
        return Pair(None, None, a if a is b else None)
    stored = [form for form in forms if form is not None]
    if len(stored) == 2:
        mixed = stored[0] is not stored[1] and not (of_a and of_b)
        return Pair(*forms, None if mixed else stored[0].result, blocks)
    plain, is_named = (b, of_a) if forms[1] is None else (a, of_b)
    # Torch does not multiply a plain operand by 8-bit floats; a caller who names the format wants
    # this product.
    return Pair(*forms, plain if is_named and plain in FLOATS else None, blocks)
