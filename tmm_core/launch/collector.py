"""Disables Python's cyclic garbage collector where it costs time or breaks a capture."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable the cyclic GC: during imports, whose objects are long-lived, it took 90 of the 310 ms
    to import Triton, Gluon and a kernel."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
