"""Finds kernels whose launch computes a product itself, such as one that pads and calls matmul.

Such a product is answered by BLAS, as while the kernel was verified and timed, or the kernel could
choose itself for ever. A launch announces nothing, since that would cost every warm call 0.2 µs:
the slow path finds the launch among its callers, and from then on the kernel's plans announce it.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

import torch

from tmm_core import settings
from tmm_core.spec.launcher import BASELINE, Bound, Launcher

#: The code of the functions that launch plans; each has the plan in its variable ``plan``.
ENTRIES: set[CodeType] = set()
#: Names of the kernels whose launch was found to compute a product.
NESTING: set[str] = set()


def launching(skipped: int = 0) -> str | None:
    """The name of the kernel whose launch this call is made from; None if there is none. BLAS runs
    the callers' epilogues, so that it does not count.

    Args:
        skipped: How many launches, the innermost first, not to count.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in ENTRIES and (plan := frame.f_locals.get("plan")) is not None:
            if skipped == 0 and plan.kernel != BASELINE:
                return str(plan.kernel)
            skipped = max(0, skipped - 1)
        frame = frame.f_back
    return None


def announced(launcher: Launcher | Bound) -> Launcher:
    """The launcher of a kernel in :data:`NESTING`."""
    run = Bound.of(launcher).run

    def launch(*arguments: Any, **extras: Any) -> torch.Tensor:
        with settings.nested():
            return run(*arguments, **extras)

    return launch
