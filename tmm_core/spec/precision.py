"""Whether fp32 products may be rounded to TF32, as torch is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def precision(tf32: bool) -> Iterator[None]:
    """Inside, fp32 products on CUDA may be rounded to TF32, or may not.

    torch keeps this per process, not per thread.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
