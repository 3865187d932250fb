"""``softcap(cap)``: cap · tanh(z / cap) (Gemma 2, arXiv:2408.00118)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tmm_core.epilogues.tanh import tanh, tanh_slope
from tmm_core.spec.epilogue import Epilogue

if TYPE_CHECKING:
    import triton.language as tl

_aten: Any = torch.ops.aten


def softcap(z, cap: tl.constexpr):
    return cap * tanh(z / cap)


def softcap_slope(z, cap: tl.constexpr):
    return tanh_slope(z / cap)


EPILOGUES = (
    Epilogue(
        "softcap",
        lambda z, cap=30.0: cap * torch.tanh(z / cap),
        device=softcap,
        device_derivative=softcap_slope,
        output_vjp=lambda grad, y, cap: _aten.tanh_backward(grad, y / cap),
        positive=True,
        builtin=True,
    ),
)
