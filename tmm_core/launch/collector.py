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


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Let a capture survive many allocations: the cyclic GC may find a CUDA graph in old garbage,
    and to destroy it during a capture invalidates the capture.

    The GC is disabled inside, and what existed then is left to the next full collection: else the
    first allocation afterwards would start one, while the capture goes on.
    """
    with collector_off():
        try:
            yield
        finally:
            if not gc.get_freeze_count():  # else somebody has frozen objects, which stay so
                gc.freeze()  # resets the counts of allocations
                gc.unfreeze()  # into the oldest generation
