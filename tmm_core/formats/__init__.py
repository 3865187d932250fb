"""Operand formats: how stored numbers map to values, where that takes more than a dtype.

Each other module of this package defines one format as its ``FORMAT`` and is discovered
automatically: a new format is one file, and removing the file removes the format. Plugins add
formats through the hook ``tmm_formats``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of operands whose stored numbers encode other values:
    ``value = (dequantize(stored) − zero) · scale``.

    Args:
        name: The name that callers give and that kernels declare in :class:`~tmm_core.Supports`.
        storage: Dtypes of the stored numbers, which two operands may mix.
        quantize: Rounds numbers to a storage dtype, as the reference.
        dequantize: Converts stored numbers, exactly, to a dtype that torch multiplies.
        tolerance: The largest error accepted of a product, besides the result's rounding; see
            :mod:`tmm_core.verify.compare`.
        scales: Kinds of scales: ``"tensor"``, ``"row"``.
        scale_dtypes: Dtypes of scales.
        zeros: Whether an operand may have zero points, one for each scale.
        limit: The largest magnitude of stored numbers, to which random values are scaled; None:
            stored numbers are about as large as their values.
        result: Default dtype of the result, bias and residual where both operands are stored.
        implied: Whether the dtype alone tells the format, without a scale. Else callers name it
            (:class:`tmm_core.Quantized`) and give a scale.
        native: Whether tensor cores multiply two such operands as they are stored.
        decode: Device function ``decode(block, dtype)``: converts a block of stored numbers to
            values of a dtype of 16 bits or more, without the scales. A plain function, in which
            ``tl`` is Triton's language, or one under ``@triton.jit``; None: only BLAS serves the
            format, unless a kernel names it.
    """

    name: str
    storage: tuple[torch.dtype, ...]
    quantize: Callable[[Tensor, torch.dtype], Tensor]
    dequantize: Callable[[Tensor], Tensor]
    tolerance: float
    scales: tuple[str, ...] = ("tensor", "row")
    scale_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    zeros: bool = False
    limit: float | None = None
    result: torch.dtype = torch.bfloat16
    implied: bool = False
    native: bool = False
    decode: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return " and ".join(str(dtype).removeprefix("torch.") for dtype in self.storage)

    def values(
        self,
        stored: Tensor,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The values of stored numbers.

        Args:
            scale, zero: Broadcast to ``stored``; None: one and zero.
            dtype: In which they are computed; by default that of :attr:`dequantize`.
        """
        numbers = self.dequantize(stored)
        numbers = numbers if dtype is None else numbers.to(dtype)
        if zero is not None:
            numbers = numbers - zero.to(numbers.dtype)
        return numbers if scale is None else numbers * scale.to(numbers.dtype)


class Pair(NamedTuple):
    """The formats of a product's operands.

    Attributes:
        a, b: None: plain numbers.
        result: The default dtype of the result; None: the operands cannot be multiplied.
    """

    a: Format | None
    b: Format | None
    result: torch.dtype | None

    @property
    def stored(self) -> bool:
        """Whether an operand has a format."""
        return self.a is not None or self.b is not None


#: All formats by name, and those that a storage dtype implies.
FORMATS: dict[str, Format] = {}
IMPLIED: dict[torch.dtype, Format] = {}

#: Dtypes of a plain operand beside a stored one.
BESIDE = (torch.float16, torch.bfloat16, torch.float32)


def add(form: Format) -> None:
    """Add a format.

    Raises:
        ValueError: Another format has its name, or is implied by one of its dtypes.
    """
    if FORMATS.setdefault(form.name, form) is not form:
        raise ValueError(f"two formats are named {form.name!r}")
    for dtype in form.storage if form.implied else ():
        if IMPLIED.setdefault(dtype, form) is not form:
            raise ValueError(f"{dtype} implies two formats, {IMPLIED[dtype].name} and {form.name}")


def remove(form: Format) -> None:
    """Forget a format."""
    del FORMATS[form.name]
    for dtype in form.storage if form.implied else ():
        IMPLIED.pop(dtype, None)


for _module in pkgutil.iter_modules(__path__):
    add(importlib.import_module(f"{__name__}.{_module.name}").FORMAT)


def discover() -> None:
    """Load the plugins, whose formats are then known; :mod:`tmm_core.dispatch` replaces this
    function."""


def named(name: str) -> Format:
    """The format of that name.

    Raises:
        ValueError: No installed format has it.
    """
    if name not in FORMATS:
        discover()
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}: installed are {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


def of(dtype: torch.dtype, name: str = "") -> Format | None:
    """The format of an operand of that dtype, whose format has that name if it is not implied."""
    return named(name) if name else IMPLIED.get(dtype)


def pair(a: torch.dtype, b: torch.dtype, names: str = "") -> Pair:
    """The formats of operands of these dtypes.

    Args:
        names: ``"of a,of b"``, each empty for plain numbers and for implied formats; or empty.

    Raises:
        ValueError: A name is unknown.
    """
    of_a, _, of_b = names.partition(",")
    forms = of(a, of_a), of(b, of_b)
    if forms == (None, None):
        return Pair(None, None, a if a is b else None)
    stored = [form for form in forms if form is not None]
    if len(stored) == 2:
        mixed = stored[0] is not stored[1] and not (of_a and of_b)
        return Pair(*forms, None if mixed else stored[0].result)
    plain, told = (b, of_a) if forms[1] is None else (a, of_b)
    # Torch refuses a plain operand beside 8-bit floats; a caller who names the format means it.
    return Pair(*forms, plain if told and plain in BESIDE else None)
