"""Operand formats: what the numbers of an operand stand for, where they are more than a dtype.

Each module of this package but this one holds one format, as its ``FORMAT``, and is found by being
there: a new format is one file, and without its file a format does not exist.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Tensor = torch.Tensor

#: What scales an operand: one number, or one for each row of ``a`` (column of ``b``).
ScaleKind = Literal["tensor", "row"]


@dataclass(frozen=True, kw_only=True)
class Format:
    """Numbers in a storage dtype that a product takes for others.

    Args:
        name: As kernels declare it in :class:`~tmm_core.Supports`.
        storage: Dtypes of the operands, which go with one another.
        scales: Kinds of scales that an operand may have.
        result: Dtype of the result, bias and residual by default.
        quantize: Rounds numbers to a storage dtype.
        dequantize: The numbers exactly, in a dtype that torch multiplies; scales left out.
        tolerance: The largest error accepted of a product, besides the result's rounding; see
            :mod:`tmm_core.dispatch.verify`.
        decode: The device function from storage to what tensor cores take, as
            ``"module:attribute"``; None: they take the storage dtype.
    """

    name: str
    storage: tuple[torch.dtype, ...]
    scales: tuple[ScaleKind, ...]
    result: torch.dtype
    quantize: Callable[[Tensor, torch.dtype], Tensor]
    dequantize: Callable[[Tensor], Tensor]
    tolerance: float
    decode: str | None = None

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
    """The format that both operands are of; None: plain numbers, or two that do not go together."""
    found = BY_STORAGE.get(a)
    return found if found is not None and BY_STORAGE.get(b) is found else None


def wide(dtype: torch.dtype) -> torch.dtype:
    """What goes with operands of ``dtype`` by default: itself, or what their format says."""
    found = BY_STORAGE.get(dtype)
    return dtype if found is None else found.result
