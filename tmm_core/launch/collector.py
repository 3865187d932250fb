"""Disables Python's cyclic garbage collector where it costs time or breaks a capture."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable the cyclic GC during imports: their objects are long-lived. Saves 90 of the 310 ms
    that the imports of Triton, Gluon and a kernel take."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Keep the cyclic GC from destroying an old CUDA graph during a capture, which would invalidate
    the capture.

    The GC is disabled inside. Existing objects are then moved to the oldest generation, for the
    next full collection. Otherwise the first allocation afterwards would start a collection while
    the capture goes on.
    """
    with collector_off():
        try:
            yield
        finally:
            if not gc.get_freeze_count():  # unfreezing would undo another library's freeze
                gc.freeze()  # resets the counts of allocations
                gc.unfreeze()  # into the oldest generation
