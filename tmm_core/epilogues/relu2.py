"""``relu2``: relu(z)² (Primer, arXiv:2109.08668)."""

from __future__ import annotations

import torch.nn.functional as F

from tmm_core.epilogues.relu import relu
from tmm_core.spec.epilogue import Epilogue


def relu2(z):
    r = relu(z)
    return r * r


def relu2_slope(z):
    return 2 * relu(z)


EPILOGUES = (
    Epilogue(
        "relu2",
        lambda z: F.relu(z).square(),
        device=relu2,
        derivative=lambda z: 2 * F.relu(z),
        device_derivative=relu2_slope,
        builtin=True,
    ),
)
