"""Activations, and functions like them: element by element, of the product alone.

``gelu`` is the erf form, as torch's default; ``softcap(cap)`` is cap·tanh(z/cap) (Gemma 2,
arXiv:2408.00118); ``relu2`` is relu(z)² (Primer, arXiv:2109.08668).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tmm_core.spec.epilogue import IDENTITY, builtin

_aten: Any = torch.ops.aten


def relu_slope(z: torch.Tensor) -> torch.Tensor:
    """d relu / d z."""
    return _aten.threshold_backward(torch.ones_like(z), z, 0)  # type: ignore[no-any-return]


def silu_slope(z: torch.Tensor) -> torch.Tensor:
    """d silu / d z."""
    if torch.is_grad_enabled():  # torch's formula; its kernel has no derivative
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))
    return _aten.silu_backward(torch.ones_like(z), z)  # type: ignore[no-any-return]


def gelu_slope(z: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """d gelu / d z."""
    return _aten.gelu_backward(torch.ones_like(z), z, approximate=approximate)  # type: ignore[no-any-return]


EPILOGUES = (
    IDENTITY,
    builtin("relu", F.relu, output_vjp=lambda grad, y: _aten.threshold_backward(grad, y, 0)),
    builtin("relu2", lambda z: F.relu(z).square(), derivative=lambda z: 2 * F.relu(z)),
    builtin(
        "leaky_relu",
        lambda z, slope: F.leaky_relu(z, slope),
        0.01,
        derivative=lambda z, slope: _aten.leaky_relu_backward(torch.ones_like(z), z, slope, False),
    ),
    builtin("gelu", lambda z: F.gelu(z), derivative=gelu_slope),
    builtin(
        "gelu_tanh",
        lambda z: F.gelu(z, approximate="tanh"),
        derivative=lambda z: gelu_slope(z, "tanh"),
    ),
    builtin("silu", F.silu, derivative=silu_slope),
    builtin("sigmoid", torch.sigmoid, output_vjp=_aten.sigmoid_backward),
    builtin("tanh", torch.tanh, output_vjp=_aten.tanh_backward),
    builtin(
        "softplus",
        lambda z: F.softplus(z),
        output_vjp=lambda grad, y: grad * -torch.expm1(-y),
    ),
    builtin(
        "softcap",
        lambda z, cap: cap * torch.tanh(z / cap),
        30.0,
        output_vjp=lambda grad, y, cap: _aten.tanh_backward(grad, y / cap),
        positive=True,
    ),
    builtin(
        "scale",
        lambda z, factor: z * factor,
        1.0,
        linear=True,
        output_vjp=lambda grad, y, factor: grad * factor,
    ),
)
