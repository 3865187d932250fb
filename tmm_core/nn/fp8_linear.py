"""Transformers' ``FP8Linear``: a weight in 8-bit floats, with a scale for each block, as in
DeepSeek-V3's checkpoints, or one scale in all."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tmm_core import api
from tmm_core.errors import reraise
from tmm_core.interop import autograd_state
from tmm_core.nn import stored_weights
from tmm_core.nn.classes import ProductLayer, loaded
from tmm_core.quantized import Quantized

Tensor = torch.Tensor


def theirs() -> Any:
    """Transformers' class; None until it is imported."""
    return loaded("transformers.integrations.finegrained_fp8", "FP8Linear")


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
    """Return the weight of ``layer`` and its scales, in the same memory if the scales are fp32.

    Raises:
        ValueError: The format has no such scales.
    """
    scale = stored_weights.in_fp32(layer.weight_scale_inv)
    block = None if scale.numel() == 1 else tuple(layer.block_size)
    return Quantized(layer.weight.detach(), scale, format="fp8", block=block)


class FP8Product(ProductLayer):
    """Multiplies plain activations by the weight's values, or activations rounded to 8 bits, as
    Transformers' own forward does by kernels from a hub."""

    #: Whether activations are rounded to 8-bit floats, with their own scales.
    rounds_activations = False

    def product(self, x: Tensor, epilogue: str) -> Tensor:
        own: Any = self
        weight = own.weight if own.weight.element_size() > 1 else operand(own)
        options: dict[str, Any] = {"epilogue": epilogue}
        if self.rounds_activations and isinstance(weight, Quantized):
            options["out_dtype"] = x.dtype
            x = stored_weights.rounded_rows(x, weight)
        return self._run(partial(api.linear, **options), x, weight, own.bias)  # type: ignore[no-any-return]

    def forward(self, input: Tensor) -> Any:
        if self.replaced() or autograd_state.recorded(input, self.bias):  # type: ignore[arg-type]
            return super().forward(input)  # FP8Linear's
        return self.product(input, "")
