"""``gelu`` (the erf form, torch's default) and ``gelu_tanh``, and their gated forms ``geglu`` and
``geglu_tanh`` (GLU Variants, arXiv:2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from tmm_core.epilogues._fast_math import LOG2_E, exp2, logistic, polynomial, reciprocal
from tmm_core.epilogues._gated import gated
from tmm_core.spec.epilogue import Epilogue

if TYPE_CHECKING:
    import triton.language as tl

_aten: Any = torch.ops.aten

# −½ log2 e, and the normal density at zero.
_HALF_LOG2_E = -0.5 * LOG2_E
_NORMAL = 0.3989422804014327
# The tanh form as in torch.nn.functional.gelu, through sigmoid(2u): −2√(2/π)·log2 e, and GPT-2's
# cubic coefficient times that. Its slope: 2√(2/π), and thrice the cubic coefficient times that.
_LINEAR = -1.5957691216057308 * LOG2_E
_CUBIC = -1.5957691216057308 * LOG2_E * 0.044715
_SLOPE = 1.5957691216057308
_SLOPE_CUBIC = 1.5957691216057308 * 3 * 0.044715
_series = polynomial(
    0.03663934767246246, -0.15274786949157715, 0.18531760573387146, -0.037622835487127304,
    0.120841383934021, 0.10347343236207962, 0.12245871871709824, 0.12164024263620377,
)  # fmt: skip


def normal(z):
    """The normal distribution Φ(z), and e^(−z²/2).

    Φ(−|z|)·e^(z²/2) is approximated by t times a polynomial in t = 1 / (1 + 0.305 |z|), fitted for
    |z| up to 14.5 by weighted least squares, with a relative error of 9.7e-8. It does not cancel
    below zero, unlike ½(1 + erf), and takes 17 instructions per element instead of 32.
    """
    t = reciprocal(tl.abs(z) * 0.305 + 1)
    bell = exp2(z * (z * _HALF_LOG2_E))
    tail = _series(t) * t * bell
    return tl.where(z < 0, tail, 1 - tail), bell


def gelu(z):
    cdf, _ = normal(z)
    return z * cdf


def gelu_slope(z):
    # Φ(z), and the normal density times z.
    cdf, bell = normal(z)
    return cdf + z * bell * _NORMAL


def gelu_tanh(z):
    # ½(1 + tanh u) = sigmoid(2u)
    return z * reciprocal(1 + exp2(z * (z * z * _CUBIC + _LINEAR)))


def gelu_tanh_slope(z):
    square = z * z
    s, slope = logistic(z * (square * _CUBIC + _LINEAR))
    return s + z * slope * (square * _SLOPE_CUBIC + _SLOPE)


def _derivative(z: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return _aten.gelu_backward(torch.ones_like(z), z, approximate=approximate)  # type: ignore[no-any-return]


def _text(approximate: str = "none") -> str | None:
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)


GELU = Epilogue(
    "gelu",
    lambda z: F.gelu(z),
    device=gelu,
    derivative=lambda z: _derivative(z),
    device_derivative=gelu_slope,
    builtin=True,
)
GELU_TANH = Epilogue(
    "gelu_tanh",
    lambda z: F.gelu(z, approximate="tanh"),
    device=gelu_tanh,
    derivative=lambda z: _derivative(z, "tanh"),
    device_derivative=gelu_tanh_slope,
    builtin=True,
)

EPILOGUES = (GELU, GELU_TANH, gated("geglu", GELU), gated("geglu_tanh", GELU_TANH))
#: Hugging Face's configs name the tanh form gelu_new and gelu_pytorch_tanh.
SPELLINGS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    F.gelu: _text,
    nn.GELU: _text,
}
