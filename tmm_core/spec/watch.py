"""Reports a plugin whose code does not return, without stopping it.

Python cannot interrupt another thread, so a hook or a kernel's method that never returns would hang
the call without a message. One daemon thread, started on demand, names the plugin on stderr.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tmm_base.guards import suppress

from tmm_core.spec.threads import start_thread

#: Seconds after which a query is reported: usually, and if it may compile.
PATIENCE, COMPILE_PATIENCE = 10.0, 120.0
#: Seconds between two checks. The thread ends when no query is running.
_INTERVAL = 0.5

#: False in a process that forks, and so must not have threads.
enabled = True
_thread: threading.Thread | None = None


@dataclass(eq=False)
class _Query:
    what: Callable[[], str]
    #: When it is reported (``time.monotonic``); None: it was reported.
    due: float | None


#: The running queries, by their addresses. If an exception of a signal's handler prevents a query's
#: removal, the entry disappears with the last reference to the query.
_running: weakref.WeakValueDictionary[int, _Query] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def watched(what: Callable[[], str], patience: float | None = None) -> Iterator[None]:
    """A context that is reported if it is not left within ``patience`` seconds, by default
    :data:`PATIENCE`."""
    global _thread
    query = _Query(what, time.monotonic() + (PATIENCE if patience is None else patience))
    try:
        _running[id(query)] = query
        if enabled and (_thread is None or not _thread.is_alive()):  # also in a forked child
            thread = threading.Thread(target=_watch, name="tmm-watch", daemon=True)
            with suppress(RuntimeError):  # no thread can be started: nothing is reported
                start_thread(thread)
                _thread = thread
        yield
    finally:
        _running.pop(id(query), None)


def _watch() -> None:
    global _thread
    while _running:
        time.sleep(min(_INTERVAL, PATIENCE / 4))
        _report(time.monotonic())
        if not _running:
            # A query that starts after this starts another thread, or keeps this loop running.
            _thread = None


def _report(now: float) -> None:
    for reference in _running.valuerefs():
        query = reference()
        if query is not None and query.due is not None and now > query.due:
            query.due = None
            with suppress(Exception):  # stderr is closed
                print(f"tmm: {query.what()}", file=sys.stderr, flush=True)


if hasattr(os, "register_at_fork"):  # absent on Windows
    os.register_at_fork(after_in_child=_running.clear)
