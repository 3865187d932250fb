"""``silu``: z · sigmoid(z), and its gated form ``swiglu`` (GLU Variants, arXiv:2002.05202).

Ramachandran et al. (arXiv:1710.05941) call it swish.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tmm_core.epilogues._fast_math import LOG2_E, logistic
from tmm_core.epilogues._gated import gated
from tmm_core.epilogues.sigmoid import sigmoid
from tmm_core.spec.epilogue import Epilogue

_aten: Any = torch.ops.aten


def silu(z):
    return z * sigmoid(z)


def silu_slope(z):
    s, slope = logistic(z * -LOG2_E)
    return s + z * slope


def _derivative(z: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():  # torch's formula; its kernel has no derivative
        s = torch.sigmoid(z)
        return s * (1 + z * (1 - s))
    return _aten.silu_backward(torch.ones_like(z), z)  # type: ignore[no-any-return]


SILU = Epilogue(
    "silu",
    F.silu,
    device=silu,
    derivative=_derivative,
    device_derivative=silu_slope,
    builtin=True,
)

EPILOGUES = (SILU, gated("swiglu", SILU))
SPELLINGS = {"swish": "silu", F.silu: "silu", nn.SiLU: "silu"}
