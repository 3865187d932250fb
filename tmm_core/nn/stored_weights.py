"""Quantised weights: rounds a layer's weight to a format, and reads torchao's weights in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from tmm_core import api, formats
from tmm_core.interop import autograd_state, fallbacks
from tmm_core.quantized import Quantized
from tmm_core.spec.arguments import Arguments

Tensor = torch.Tensor

#: torchao's types whose numbers and scales a format describes, with the format.
_TORCHAO = {"Int8Tensor": "int8", "Float8Tensor": "fp8"}
#: The parts of each weight when it was read, and the operand; None: no format describes it.
_read: Any = WeakIdKeyDictionary()


def quantised(weight: Tensor, format: str) -> Quantized:
    """``weight`` ``[N, K]`` rounded to the nearest numbers of a format.

    Numbers of 8 bits have a scale for each row. Smaller ones have one for each group along K, the
    longest of 128, 64 and 32 that divides K; if none does, one for each row. The largest magnitude
    of a row or group becomes the format's largest number; one of zeros has the scale 1.

    Raises:
        ValueError: No such format; or scales or a K that it cannot have.
    """
    form = formats.named(format)
    if torch.float32 not in form.scale_dtypes:
        raise ValueError(f"convert(): weights cannot be rounded to format {format}")
    n, k = weight.shape
    if k % form.pack:
        raise ValueError(f"format {format} stores {form.pack} numbers in one, and K = {k}")
    storage = form.storage[0]
    limit = form.limit or torch.finfo(storage).max
    group = _group(form, k)
    numbers = weight.detach().float().view(n, k // group, group)
    scale = numbers.abs().amax(-1) / limit
    scale = torch.where(scale > 0, scale, 1)
    codes = form.quantize((numbers / scale[..., None]).clamp(-limit, limit), storage).view(n, k)
    stored = form.packed(codes)
    found = Quantized(stored, scale, format=format, group=None if group == k else group)
    return found.to(weight.dtype)  # type: ignore[return-value]


def _group(form: formats.Format, k: int) -> int:
    """The values of a row that share a scale."""
    fit = (g for g in (128, 64, 32) if k % g == 0 and (1, g) in form.grids)
    return next(fit, k) if form.pack > 1 else k


def read(weight: Any) -> Quantized | None:
    """The operand that a weight of torchao's stands for, in the same memory; None if it is not a
    weight in 8 bits with a scale for each row beside plain activations."""
    kind = type(weight)
    format = _TORCHAO.get(kind.__name__)
    if format is None or kind.__module__.partition(".")[0] != "torchao":
        return None
    parts = weight.qdata, weight.scale
    kept = _read.get(weight)
    if kept is None or any(old is not new for old, new in zip(kept[0], parts, strict=True)):
        kept = _read[weight] = parts, _operand(weight, format)
    return kept[1]  # type: ignore[no-any-return]


def _operand(weight: Any, format: str) -> Quantized | None:
    for name in ("act_quant_kwargs", "act_quant_scale", "act_pre_scale"):
        if getattr(weight, name, None) is not None:
            return None
    if weight.dim() != 2 or list(weight.block_size) != [1, weight.shape[1]]:
        return None
    zero = getattr(weight, "zero_point", None)
    if zero is not None and bool(zero.any()):
        return None
    try:
        return Quantized(weight.qdata, weight.scale, format=format)
    except ValueError:  # a dtype that the format has not
        return None


def product(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: str) -> Tensor:
    """``epilogue(x @ weight.T + bias)`` for a weight of another library's type.

    In a graph being compiled and while gradients are recorded, the weight multiplies itself: a
    quantised operand has no gradient, and torchao's have one of ``x``.
    """
    if not torch.compiler.is_compiling() and (stored := read(weight)) is not None:
        recorded = autograd_state.recorded(x, bias)
        if not recorded and type(x) is Tensor:
            return api.linear(x, stored, bias, epilogue=epilogue)
    return fallbacks.linear(Arguments(x, weight, bias, epilogue=epilogue))


def is_readable(weight: Any) -> bool:
    """Whether :func:`product` takes an epilogue with ``weight``."""
    return not fallbacks.foreign(weight) or read(weight) is not None


def parameter(t: Tensor) -> nn.Parameter:
    """A parameter of quantised numbers, which have no gradient."""
    return nn.Parameter(t, requires_grad=False)
