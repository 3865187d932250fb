"""Transformers' ``FP8Linear``: a weight in 8-bit floats, with a scale for each block, as in
DeepSeek-V3's checkpoints, or one in all."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from tmm_core import api
from tmm_core.errors import reraise
from tmm_core.interop import autograd_state
from tmm_core.nn import stored_weights
from tmm_core.nn.classes import subclass
from tmm_core.quantized import Quantized
from tmm_core.settings import with_static_weights

Tensor = torch.Tensor

#: The module of Transformers that defines it.
_THEIRS = "transformers.integrations.finegrained_fp8"


def theirs() -> Any:
    """Transformers' class; None while no model can have such a layer."""
    return getattr(sys.modules.get(_THEIRS), "FP8Linear", None)


def unfit(layer: Any) -> str | None:
    """Why no operand describes the weight of ``layer``."""
    if layer.weight.dtype is not torch.float8_e4m3fn:
        return f"its weight is stored as {layer.weight.dtype}"
    try:
        operand(layer)
    except ValueError as error:
        reraise(error)
        return f"its scales are not supported ({error})"
    return None


def operand(layer: Any) -> Quantized:
    """The weight of ``layer`` and its scales, in the same memory if the scales are fp32.

    Raises:
        ValueError: The format has no such scales.
    """
    scale = stored_weights.in_fp32(layer.weight_scale_inv)
    block = None if scale.numel() == 1 else tuple(layer.block_size)
    return Quantized(layer.weight.detach(), scale, format="fp8", block=block)


class _Product(nn.Module):
    """Multiplies plain activations by the weight's values, or activations rounded to 8 bits, as
    Transformers' own forward does by kernels from a hub."""

    static_weights = False
    #: Round activations to 8-bit floats, with scales of their own.
    rounds_activations = False
    _text = ""

    def product(self, x: Tensor, epilogue: str) -> Tensor:
        own: Any = self
        weight = own.weight if own.weight.element_size() > 1 else operand(own)
        call: tuple[Any, ...] = x, weight, own.bias, epilogue, None
        if self.rounds_activations and isinstance(weight, Quantized):
            call = stored_weights.rounded_rows(x, weight), weight, own.bias, epilogue, x.dtype
        if self.static_weights:
            return with_static_weights(_linear, *call)
        return _linear(*call)

    def forward(self, input: Tensor) -> Any:
        if autograd_state.recorded(input, self.bias):  # type: ignore[arg-type]
            return super().forward(input)  # FP8Linear's
        return self.product(input, "")


def _linear(x: Tensor, weight: Tensor, bias: Any, epilogue: str, dtype: Any) -> Tensor:
    return api.linear(x, weight, bias, epilogue=epilogue, out_dtype=dtype)


def swapped(kind: type[nn.Module]) -> Any:
    """The subclass of Transformers' class that calls :func:`tmm_core.linear`."""
    made = subclass(kind, _Product, "", (swapped, kind))
    made.computes_product = made
    return made
