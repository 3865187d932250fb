"""``softplus``: log(1 + e^z)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from tmm_core.epilogues.relu import relu
from tmm_core.epilogues.sigmoid import sigmoid
from tmm_core.spec.epilogue import Epilogue

if TYPE_CHECKING:
    import triton.language as tl


def softplus(z):
    # log(1 + e^z) = max(z, 0) + log(1 + e^−|z|), which never overflows.
    small = tl.exp(-tl.abs(z))
    # log(1 + s) loses s below 1e-4; there s − s²/2 is exact to fp32 rounding.
    log1p = tl.where(small < 1e-4, small * (1 - 0.5 * small), tl.log(1 + small))
    return relu(z) + log1p


def _text(beta: float = 1, threshold: float = 20) -> str | None:
    return "softplus" if (beta, threshold) == (1, 20) else None


EPILOGUES = (
    Epilogue(
        "softplus",
        lambda z: F.softplus(z),
        device=softplus,
        device_derivative=sigmoid,
        output_vjp=lambda grad, y: grad * -torch.expm1(-y),
        builtin=True,
    ),
)
SPELLINGS = {F.softplus: _text, nn.Softplus: _text}
