"""Starts threads, also while the interpreter ends."""

from __future__ import annotations

import sys
import threading


def start_thread(thread: threading.Thread) -> None:
    """Start ``thread``. The interpreter may be ending: a ``__del__`` may multiply.

    Raises:
        RuntimeError: No thread can be started. Before Python 3.12 such a thread never ran while the
            interpreter ended, and ``Thread.start`` waited for it without end.
    """
    if sys.is_finalizing():
        raise RuntimeError("can't create new thread at interpreter shutdown")
    thread.start()
