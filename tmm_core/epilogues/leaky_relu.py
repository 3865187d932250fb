"""``leaky_relu(slope)``: z, or slope · z below zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tmm_core.spec.epilogue import Epilogue

if TYPE_CHECKING:
    import triton.language as tl

_aten: Any = torch.ops.aten


def leaky_relu(z, slope: tl.constexpr):
    return tl.where(z < 0, z * slope, z)


def leaky_relu_slope(z, slope: tl.constexpr):
    return tl.where(z > 0, 1.0, slope)


def _text(negative_slope: float = 0.01) -> str:
    return f"leaky_relu({float(negative_slope)!r})"


EPILOGUES = (
    Epilogue(
        "leaky_relu",
        lambda z, slope=0.01: F.leaky_relu(z, slope),
        device=leaky_relu,
        derivative=lambda z, slope: _aten.leaky_relu_backward(torch.ones_like(z), z, slope, False),
        device_derivative=leaky_relu_slope,
        builtin=True,
    ),
)
SPELLINGS = {F.leaky_relu: _text, nn.LeakyReLU: _text}
