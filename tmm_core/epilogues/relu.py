"""``relu``, and its gated form ``reglu`` (GLU Variants, arXiv:2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tmm_core.epilogues._gated import gated
from tmm_core.spec.epilogue import Epilogue

if TYPE_CHECKING:
    import triton.language as tl

_aten: Any = torch.ops.aten


def relu(z):
    # Not tl.maximum(z, 0): NaN has to propagate, as in torch.
    return tl.where(z < 0, 0.0, z)


def relu_slope(z):
    return tl.where(z <= 0, 0.0, 1.0)


def reglu_slopes(gate, up):
    return tl.where(gate <= 0, 0.0, up), relu(gate)


RELU = Epilogue(
    "relu",
    F.relu,
    device=relu,
    derivative=lambda z: _aten.threshold_backward(torch.ones_like(z), z, 0),
    device_derivative=relu_slope,
    output_vjp=lambda grad, y: _aten.threshold_backward(grad, y, 0),
    builtin=True,
)

EPILOGUES = (RELU, gated("reglu", RELU, device_derivative=reglu_slopes))
SPELLINGS = {F.relu: "relu", torch.relu: "relu", nn.ReLU: "relu"}
