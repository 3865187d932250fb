"""The gated epilogue of gpt-oss (arXiv:2508.10925), whose product has gate and up in alternate
columns."""

from __future__ import annotations

import torch

from tmm_core.spec.epilogue import Epilogue


def _clamped(
    gate: torch.Tensor, up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0
) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


#: ``(up + 1) · gate · sigmoid(alpha · gate)`` of a gate below the limit and an up within ± limit.
CLAMPED = Epilogue(
    "clamped_swiglu",
    _clamped,
    device="tmm_core.triton.clamped:clamped_swiglu",
    gated=True,
    interleaved=True,
)

EPILOGUES = (CLAMPED,)
