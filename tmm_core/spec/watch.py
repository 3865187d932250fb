"""Reports a plugin whose code does not return, without stopping it.

Python cannot interrupt another thread, so a hook or a kernel's method that never returns would hang
the call without a message. One daemon thread, started on demand, names the plugin on stderr.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tmm_cache.cache_errors import suppress

#: Seconds after which a query is reported, and a query that may compile.
PATIENCE, COMPILE_PATIENCE = 10.0, 120.0
#: Seconds between two checks. The thread ends when no query is running.
_LOOK = 0.5

#: False in a process that forks, and so must not have threads.
enabled = True
#: The running queries, and when each is reported (``time.monotonic``; None: it was reported).
_running: dict[int, tuple[float | None, Callable[[], str]]] = {}
_numbers = itertools.count()
_thread: threading.Thread | None = None


@contextlib.contextmanager
def watched(what: Callable[[], str], patience: float | None = None) -> Iterator[None]:
    """A context that is reported if it is not left within ``patience`` seconds, by default
    :data:`PATIENCE`."""
    number = next(_numbers)
    try:
        _running[number] = time.monotonic() + (PATIENCE if patience is None else patience), what
        _start()
        yield
    finally:
        _running.pop(number, None)


def _start() -> None:
    global _thread
    if enabled and (_thread is None or not _thread.is_alive()):  # also in a forked child
        thread = threading.Thread(target=_look, name="tmm-watch", daemon=True)
        with suppress(RuntimeError):  # no thread can be started: nothing is reported
            thread.start()
            _thread = thread


def _look() -> None:
    global _thread
    while _running:
        time.sleep(min(_LOOK, PATIENCE / 4))
        now = time.monotonic()
        for number, (due, what) in list(_running.items()):
            if due is not None and now > due and number in _running:
                _running[number] = None, what
                with suppress(Exception):  # stderr is closed
                    print(f"tmm: {what()}", file=sys.stderr, flush=True)
        if not _running:
            # A query that starts after this starts another thread, or keeps this loop running.
            _thread = None


if hasattr(os, "register_at_fork"):  # absent on Windows
    os.register_at_fork(after_in_child=_running.clear)
