"""``clamped_swiglu(alpha, limit)``: the gated epilogue of gpt-oss (arXiv:2508.10925), whose product
has gate and up in alternate columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tmm_core.epilogues.sigmoid import sigmoid
from tmm_core.spec.epilogue import Epilogue

if TYPE_CHECKING:
    import triton.language as tl


def clamped_swiglu(gate, up, alpha: tl.constexpr, limit: tl.constexpr):
    # Comparisons propagate NaN, as torch does.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (up + 1) * (gate * sigmoid(gate * alpha))


def _clamped(
    gate: torch.Tensor, up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0
) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


#: ``(up + 1) · gate · sigmoid(alpha · gate)``, with gate clamped to at most the limit and up to
#: ± limit.
CLAMPED = Epilogue("clamped_swiglu", _clamped, device=clamped_swiglu, gated=True, interleaved=True)

EPILOGUES = (CLAMPED,)
