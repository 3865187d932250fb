"""Whether fp32 products may be rounded to TF32, as torch is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from tmm_core.spec.problem import Problem

#: Held while the setting is other than the user's: it is the process's, so two that change
#: it at a time would leave one's in place. A thread that holds it may change it again.
_changing = threading.RLock()


@contextmanager
def precision(tf32: bool) -> Iterator[None]:
    """Inside, fp32 products on CUDA may be rounded to TF32, or may not.

    torch keeps this per process, not per thread: other threads see it while it lasts. Where
    it is as wanted already, nothing is changed and nobody waits.
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


def as_posed(problem: Problem) -> AbstractContextManager[None]:
    """:func:`precision` as ``problem`` says, where that bears on it: BLAS multiplies fp32
    operands on CUDA by the process's setting. A call that is tuned for was posed under its own,
    so that only ``tmm tune`` and its like ever change it."""
    if problem.a.dtype is torch.float32 and problem.device.type == "cuda":
        return precision(problem.tf32)
    return nullcontext()
