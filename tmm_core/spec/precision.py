"""Controls torch's setting of whether fp32 products may be rounded to TF32."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tmm_core.errors import UnsupportedProblemError
from tmm_core.spec.problem import Problem

#: Held while the setting differs from the user's. The setting is per process: of two concurrent
#: changes, one would persist. Reentrant within a thread.
_changing = threading.RLock()


@contextmanager
def precision(tf32: bool) -> Iterator[None]:
    """A context in which fp32 products on CUDA may, or may not, be rounded to TF32.

    Torch has one such setting per process, so other threads see the change. Use this only in
    commands, which have their own process, never in a call. If the setting is right already,
    nothing is changed or locked.
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


def require_precision(problem: Problem) -> None:
    """Refuse to measure ``problem`` under another precision than its own. BLAS multiplies fp32
    operands on CUDA by the setting of the process, which other threads use too.

    Raises:
        UnsupportedProblemError: The setting differs.
    """
    if problem.a.dtype is not torch.float32 or problem.device.type != "cuda":
        return
    setting = torch.backends.cuda.matmul.fp32_precision
    if (setting == "tf32") != problem.tf32:
        wanted = "tf32" if problem.tf32 else "ieee"
        raise UnsupportedProblemError(
            f"{problem} needs another precision than is set (fp32_precision={setting!r}, "
            f"for the whole process): set torch.backends.cuda.matmul.fp32_precision = {wanted!r} "
            f"before, or let `tmm tune` measure it in a process of its own"
        )
