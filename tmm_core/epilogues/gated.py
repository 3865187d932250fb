"""Gated epilogues of two halves of the product, from GLU Variants (arXiv:2002.05202)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tmm_core.epilogues.activations import gelu_slope, relu_slope, silu_slope
from tmm_core.spec.epilogue import Epilogue, builtin

_Function = Callable[[torch.Tensor], torch.Tensor]


def _gated(name: str, activation: _Function, slope: _Function) -> Epilogue:
    return builtin(
        name,
        lambda gate, up: activation(gate) * up,
        gated=True,
        derivative=lambda gate, up: (slope(gate) * up, activation(gate)),
    )


EPILOGUES = (
    _gated("swiglu", F.silu, silu_slope),
    _gated("geglu", F.gelu, gelu_slope),
    _gated(
        "geglu_tanh",
        functools.partial(F.gelu, approximate="tanh"),
        functools.partial(gelu_slope, approximate="tanh"),
    ),
    _gated("reglu", F.relu, relu_slope),
)
