"""``mish``: z · tanh(softplus(z)) (arXiv:1908.08681)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tmm_core import Epilogue


def derivative(z: torch.Tensor) -> torch.Tensor:
    t = torch.tanh(F.softplus(z))
    return t + z * torch.sigmoid(z) * (1 - t * t)


MISH = Epilogue(
    "mish",
    lambda z: F.mish(z),
    # By name, so that Triton is imported only to launch it.
    device="tmm_example.mish_device:mish",
    derivative=derivative,
    device_derivative="tmm_example.mish_device:slope",
)
