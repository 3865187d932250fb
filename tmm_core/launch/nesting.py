"""Finds kernels whose launch itself computes a product, such as one that pads its operands.

BLAS answers this product, as it did when the kernel was verified and timed. Otherwise the kernel
could choose itself without end. A launch does not announce itself, since that would cost every warm
call 0.2 µs. The slow path finds the launch among its callers, and from then on the kernel's plans
announce their launches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from tmm_core import settings
from tmm_core.spec.launcher import BASELINE, Bound, Launcher

#: The code of the functions that launch plans, each with the plan in its variable ``plan``. The
#: keys are ids, because some code that torch.compile writes has no hash.
ENTRIES: dict[int, CodeType] = {}
#: Names of the kernels whose launch was found to compute a product.
NESTING: set[str] = set()


def launching(skipped: int = 0) -> str | None:
    """Return the name of the kernel whose launch made this call; None if there is none. Launches of
    BLAS do not count, because BLAS runs the callers' epilogues.

    Args:
        skipped: The number of launches to skip, from the innermost.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if id(frame.f_code) in ENTRIES and (plan := frame.f_locals.get("plan")) is not None:
            if skipped == 0 and plan.kernel != BASELINE:
                return str(plan.kernel)
            skipped = max(0, skipped - 1)
        frame = frame.f_back
    return None


def add_entry(function: Callable[..., Any]) -> None:
    """Add a function that launches plans."""
    code = function.__code__
    ENTRIES[id(code)] = code


def announced(launcher: Launcher | Bound) -> Launcher:
    """Wrap the launcher of a kernel in :data:`NESTING`, so that its products are answered by
    BLAS."""
    run = Bound.of(launcher).run

    def launch(*arguments: Any, **extras: Any) -> torch.Tensor:
        with settings.nested():
            return run(*arguments, **extras)

    return launch
