"""Weights of Transformers' expert layers, plain or quantised, as operands of grouped products.

Transformers' quantised layers hold 8-bit floats in blocks (``FP8Experts``), or 4-bit floats in
groups of 32 (``FP8Experts`` of DeepSeek-V4, and the layers of gpt-oss). Activations are quantised
only with ``convert(activations="fp8")``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tmm_core.errors import reraise
from tmm_core.nn.classes import defined_by, loaded
from tmm_core.nn.stored_weights import in_fp32
from tmm_core.quantized import Quantized

Tensor = torch.Tensor


def of(layer: Any, name: str) -> Tensor:
    """Return a layer's weight of that name, ``[E, N, K]``, a view of its parameters.

    Raises:
        ValueError: Its format is unknown.
    """
    if (blocks := getattr(layer, f"{name}_blocks", None)) is not None:
        scales = getattr(layer, f"{name}_scales").detach()
        return Quantized(blocks.detach().flatten(-2), scales, format="mxfp4", group=32)
    weight: Tensor = getattr(layer, name)
    scale = getattr(layer, f"{name}_scale_inv", None)
    if scale is None or weight.element_size() > 1:
        return weight.mT if getattr(layer, "is_transposed", False) else weight
    weight = weight.detach()
    if weight.dtype is torch.int8:  # two numbers in a byte
        if scale.element_size() > 1:
            raise ValueError(f"groups of mxfp4 have exponents as scales, not {scale.dtype}")
        return Quantized(weight.view(torch.uint8), scale.detach(), format="mxfp4", group=32)
    scale = in_fp32(scale)
    if layer.block_size is not None:
        return Quantized(weight, scale, format="fp8", block=tuple(layer.block_size))
    # One scale for each expert, or for each half of gate and up.
    rows = weight.shape[-2] // scale.shape[-2]
    return Quantized(weight, scale.repeat_interleave(rows, -2), format="fp8")


def quantised(layer: Any) -> bool:
    """Whether the weights of an expert layer are quantised."""
    return isinstance(of(layer, "down_proj"), Quantized)


def is_fp8(layer: Any) -> bool:
    """Whether Transformers' layer, of experts or linear, stores its weights in e4m3 and computes
    the scales of its activations at each call."""
    weight = getattr(layer, "down_proj", getattr(layer, "weight", None))
    dynamic = getattr(layer, "activation_scheme", None) == "dynamic"
    return dynamic and weight is not None and weight.dtype is torch.float8_e4m3fn


def unfit(layer: Any) -> str | None:
    """Return why an operand cannot describe the weights of an expert layer; None if one can."""
    for name in ("gate_up_proj" if layer.has_gate else "up_proj", "down_proj"):
        try:
            of(layer, name)
        except ValueError as error:
            reraise(error)
            return f"its {name} is not supported ({error})"
    return None


def out_of_reach(layer: nn.Module) -> str | None:
    """Return why no operand describes weights that were rearranged for other kernels, or None."""
    theirs = loaded("transformers.integrations.mxfp4", "Mxfp4GptOssExperts")
    if theirs is None or type(layer) is not theirs:
        return None
    return (
        "its weights are in the layout of kernels from a hub; load the model with "
        'experts_implementation="tmm"'
    )


def owns(gate: Any) -> bool:
    """Whether ``gate`` is the gate of ``FP8Experts``."""
    theirs = loaded("transformers.integrations.finegrained_fp8", "FP8Experts")
    return theirs is not None and gate is theirs._apply_gate and defined_by(gate, theirs)
