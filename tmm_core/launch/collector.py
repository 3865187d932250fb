"""Disables Python's cyclic garbage collector where it costs time or breaks a capture."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

#: One object for each block of :func:`collector_off` that is in force, of all threads.
_blocks: set[object] = set()
#: Whether the collector was enabled before the first of them.
_was_enabled = True


def _after_fork() -> None:
    """End all blocks, since a block of another thread would never end in the child."""
    if _blocks and _was_enabled:
        gc.enable()
    _blocks.clear()


if hasattr(os, "register_at_fork"):  # absent on Windows
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable the cyclic GC. Objects of imports are long-lived: this saves 90 of the 310 ms that
    the imports of Triton, Gluon and a kernel take. The GC stays disabled until the blocks of all
    threads have ended: another thread may be inside a capture."""
    global _was_enabled
    block = object()
    if not _blocks:
        _was_enabled = gc.isenabled()
    _blocks.add(block)
    gc.disable()
    try:
        yield
    finally:
        _blocks.discard(block)
        if _was_enabled and not _blocks:
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
