"""``sigmoid``: 1 / (1 + e^−z)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tmm_core.epilogues._fast_math import LOG2_E, exp2, logistic, reciprocal
from tmm_core.spec.epilogue import Epilogue

_aten: Any = torch.ops.aten


def sigmoid(z):
    return reciprocal(1 + exp2(z * -LOG2_E))


def sigmoid_slope(z):
    _, slope = logistic(z * -LOG2_E)
    return slope


EPILOGUES = (
    Epilogue(
        "sigmoid",
        torch.sigmoid,
        device=sigmoid,
        device_derivative=sigmoid_slope,
        output_vjp=_aten.sigmoid_backward,
        builtin=True,
    ),
)
SPELLINGS = {F.sigmoid: "sigmoid", torch.sigmoid: "sigmoid", nn.Sigmoid: "sigmoid"}
