"""Gated epilogues of two halves of the product, from GLU Variants (arXiv:2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F

from tmm_core.epilogues.activations import gelu_slope, relu_slope, silu_slope
from tmm_core.spec.epilogue import builtin

EPILOGUES = (
    builtin(
        "swiglu",
        lambda gate, up: F.silu(gate) * up,
        gated=True,
        derivative=lambda gate, up: (silu_slope(gate) * up, F.silu(gate)),
    ),
    builtin(
        "geglu",
        lambda gate, up: F.gelu(gate) * up,
        gated=True,
        derivative=lambda gate, up: (gelu_slope(gate) * up, F.gelu(gate)),
    ),
    builtin(
        "geglu_tanh",
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        gated=True,
        derivative=lambda gate, up: (
            gelu_slope(gate, "tanh") * up,
            F.gelu(gate, approximate="tanh"),
        ),
    ),
    builtin(
        "reglu",
        lambda gate, up: F.relu(gate) * up,
        gated=True,
        derivative=lambda gate, up: (relu_slope(gate) * up, F.relu(gate)),
    ),
)
