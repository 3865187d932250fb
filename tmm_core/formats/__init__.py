"""Operand formats: how stored numbers map to values, where that takes more than a dtype.

Each other module of this package defines one format as its ``FORMAT`` and is discovered
automatically: a new format is one file, and removing the file removes the format.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Tensor = torch.Tensor

#: The scale of an operand: one number, or one for each row of ``a`` (column of ``b``).
ScaleKind = Literal["tensor", "row"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of operands whose storage dtype encodes other values.

    Args:
        name: The name that kernels declare in :class:`~tmm_core.Supports`.
        storage: Dtypes of the operands, which may be mixed.
        scales: Kinds of scales that an operand may have.
        result: Default dtype of the result, bias and residual.
        quantize: Rounds numbers to a storage dtype.
        dequantize: Converts exactly to a dtype that torch multiplies, without the scales.
        tolerance: The largest error accepted of a product, besides the result's rounding; see
            :mod:`tmm_core.verify.compare`.
    """

    name: str
    storage: tuple[torch.dtype, ...]
    scales: tuple[ScaleKind, ...]
    result: torch.dtype
    quantize: Callable[[Tensor, torch.dtype], Tensor]
    dequantize: Callable[[Tensor], Tensor]
    tolerance: float

    def __str__(self) -> str:
        return " and ".join(str(dtype).removeprefix("torch.") for dtype in self.storage)


#: All formats by name, and by storage dtype.
FORMATS: dict[str, Format] = {}
BY_STORAGE: dict[torch.dtype, Format] = {}
for _module in pkgutil.iter_modules(__path__):
    _format: Format = importlib.import_module(f"{__name__}.{_module.name}").FORMAT
    FORMATS[_format.name] = _format
    BY_STORAGE.update(dict.fromkeys(_format.storage, _format))


def of_pair(a: torch.dtype, b: torch.dtype) -> Format | None:
    """The format of both operands; None for plain numbers, or dtypes that cannot be mixed."""
    found = BY_STORAGE.get(a)
    return found if found is not None and BY_STORAGE.get(b) is found else None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The default dtype of results of ``dtype`` operands: the same, or their format's."""
    found = BY_STORAGE.get(dtype)
    return dtype if found is None else found.result
