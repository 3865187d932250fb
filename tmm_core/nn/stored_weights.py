"""Quantised weights of layers: which format's groups a weight gets, and products with torchao's."""

from __future__ import annotations

from typing import Any

import torch

from tmm_core import api, foreign, formats
from tmm_core.formats import grids
from tmm_core.interop import autograd_state, fallbacks
from tmm_core.interop.calls import traced_text_of
from tmm_core.interop.row_quantization import quantize_rows
from tmm_core.quantized import Quantized
from tmm_core.rounding import quantize
from tmm_core.spec.arguments import Arguments

Tensor = torch.Tensor


def quantised(weight: Tensor, format: str) -> Quantized:
    """``weight`` ``[N, K]`` or ``[E, N, K]`` by :func:`tmm_core.quantize`, as a tensor of the
    weight's dtype.

    Numbers of 8 bits have a scale for each row. Smaller ones have one for each group along K, the
    format's longest that divides K; if none does, one for each row.

    Raises:
        ValueError: There is no such format, or it cannot have such scales or this K. Or tmm cannot
            multiply it with activations of the weight's dtype.
    """
    form, k = formats.named(format), weight.shape[-1]
    if weight.dtype not in formats.FLOATS:
        raise ValueError(f"products of {weight.dtype} take no quantised weight")
    fit = [size for rows, size in form.grids if rows == 1 and size and k % size == 0]
    group = max(fit, default=0) if form.pack > 1 or grids.ROW not in form.grids else 0
    if weight.dim() == 2:
        found = quantize(weight, format, group=group)
    else:  # one by one: fp32 copies of all would take several times their memory
        each = [quantize(matrix, format, group=group) for matrix in weight]
        scales = [one.scale.reshape(one.shape[0], -1) for one in each]
        stored = torch.stack([one.stored for one in each])
        found = Quantized(stored, torch.stack(scales), format=format, group=group or None)
    return found.to(weight.dtype)  # type: ignore[return-value]


def read(weight: Any) -> Quantized | None:
    """Return the operand of another library's weight, in the same memory; None if there is none."""
    found = foreign.read(weight)
    return None if found is weight else found


def product(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: str) -> Tensor:
    """``epilogue(x @ weight.T + bias)`` for a weight of another library's type.

    In a graph being compiled and while gradients are recorded, torchao multiplies. A quantised
    operand of tmm has no gradient, and torchao's product has one for ``x``.
    """
    if not torch.compiler.is_compiling() and (stored := read(weight)) is not None:
        recorded = autograd_state.recorded(x, bias)
        if not recorded and type(x) is Tensor:
            return api.linear(x, stored, bias, epilogue=epilogue)
    text = traced_text_of(epilogue)
    return fallbacks.by_type(Arguments(x, weight, bias, epilogue=text), linear=True)


def is_readable(weight: Any) -> bool:
    """Whether :func:`product` takes an epilogue with ``weight``."""
    return not fallbacks.foreign(weight) or read(weight) is not None


def rounded_rows(x: Tensor, weight: Quantized) -> Tensor:
    """Round activations to 8-bit floats for a product with ``weight``. There is one scale per 128
    values if the weight has blocks of 128 along K, else one per row."""
    return quantize_rows(x, group=128 if weight.block[1] == 128 else 0)


def in_fp32(scale: Tensor) -> Tensor:
    """Return the scales of a parameter in fp32, without a gradient.

    They are converted at each call: a write through ``scale.data`` changes neither the parameter's
    version nor its address.
    """
    plain = scale.detach()
    # One operator, but Triton, for which Inductor writes code, has no type for exponents.
    if plain.dtype is grids.EXPONENT or (
        plain.dtype in grids.EXPONENTS and torch.compiler.is_compiling()
    ):
        return grids.factors(plain.view(grids.EXPONENT), torch.float32)
    return plain.to(torch.float32)
