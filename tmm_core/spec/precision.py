"""Whether fp32 products may be rounded to TF32, as torch is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tmm_core.errors import UnsupportedProblemError
from tmm_core.spec.problem import Problem

#: Held while the setting is other than the user's: it is the process's, so two that change
#: it at a time would leave one's in place. A thread that holds it may change it again.
_changing = threading.RLock()


@contextmanager
def precision(tf32: bool) -> Iterator[None]:
    """Inside, fp32 products on CUDA may be rounded to TF32, or may not.

    torch keeps this per process, not per thread: other threads see it while it lasts, so that it
    is for commands, whose process is their own, and never for a call. Where it is as wanted
    already, nothing is changed and nobody waits.
    """
    matmul = torch.backends.cuda.matmul
    if (matmul.fp32_precision == "tf32") == tf32:
        yield
        return
    with _changing:
        before = matmul.fp32_precision
        matmul.fp32_precision = "tf32" if tf32 else "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before


def require_posed(problem: Problem) -> None:
    """Refuse to measure ``problem`` under another precision than it was posed under: BLAS
    multiplies fp32 operands on CUDA by the process's setting, which other threads go by.

    Raises:
        UnsupportedProblemError: The setting is another.
    """
    if problem.a.dtype is not torch.float32 or problem.device.type != "cuda":
        return
    setting = torch.backends.cuda.matmul.fp32_precision
    if (setting == "tf32") != problem.tf32:
        wanted = "tf32" if problem.tf32 else "ieee"
        raise UnsupportedProblemError(
            f"{problem} was posed for another precision than is set (fp32_precision={setting!r}, "
            f"of the whole process): set torch.backends.cuda.matmul.fp32_precision = {wanted!r} "
            f"before, or let `tmm tune` measure it in a process of its own"
        )
