"""``mish``: z · tanh(softplus(z)) (arXiv:1908.08681).

Nothing here imports Triton: tmm jits the device functions when a kernel first fuses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tmm_core import Epilogue

if TYPE_CHECKING:
    import triton.language as tl


def mish(z):
    # tanh(log(1 + e)) = (e² + 2e) / (e² + 2e + 2): no cancellation for small e, and 1 in fp32
    # from z = 20 on, long before e² overflows.
    e = tl.exp(tl.minimum(z, 20.0))
    n = e * (e + 2)
    return z * (n / (n + 2))


def slope(z):
    # t + z · sigmoid(z) · (1 − t²), where t is mish's tanh.
    e = tl.exp(tl.minimum(z, 20.0))
    n = e * (e + 2)
    t = n / (n + 2)
    return t + z * (e / (1 + e)) * (1 - t * t)


def derivative(z: torch.Tensor) -> torch.Tensor:
    t = torch.tanh(F.softplus(z))
    return t + z * torch.sigmoid(z) * (1 - t * t)


MISH = Epilogue(
    "mish",
    lambda z: F.mish(z),
    device=mish,
    derivative=derivative,
    device_derivative=slope,
)
