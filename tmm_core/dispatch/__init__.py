"""Chooses a kernel for a problem: the registry, records, tuning, or a choice without either.

:func:`default_dispatcher` is the process's own; it serves calls that have no plan yet
(:data:`tmm_core.launch.warm.answerer`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from tmm_core import formats
from tmm_core.launch import warm

if TYPE_CHECKING:
    from tmm_core.dispatch.dispatcher import Dispatcher


#: A fork waits this long for another thread's import, which may never return.
_FORK_SECONDS = 5.0
#: Packages that calls import when they need them.
_IMPORTED_IN_CALLS = ("tmm_", "filelock", "pebble", "platformdirs")


class _Own:
    """The dispatcher of this process, over installed plugins and the user's cache."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal's handler may call
        #: None before the first call.
        self.made: Dispatcher | None = None
        #: The lock that a thread holds while it forks.
        self._held = threading.local()

    def __call__(self) -> Dispatcher:
        """Return the dispatcher, made by the first thread that calls. functools.cache would make
        one in each thread that calls before the first call returns."""
        with self._lock:
            if self.made is None:
                from tmm_core.launch.collector import collector_off

                with collector_off():
                    # Imported here: these take half of the time to import tmm_core.
                    from tmm_cache import CacheStore

                    from tmm_core.dispatch.dispatcher import Dispatcher
                    from tmm_core.registry.registry import Registry

                    self.made = Dispatcher(Registry.from_environment(), None, CacheStore())
            return self.made

    def cache_clear(self) -> None:
        self.made = None

    def before_fork(self) -> None:
        """Wait until other threads have imported plugins and tmm's modules. A child waits for ever
        for a module that another thread was importing."""
        end = time.monotonic() + _FORK_SECONDS
        made = self.made
        lock = None if made is None else made.registry.loading_lock
        self._held.lock = lock if lock is not None and lock.acquire(timeout=_FORK_SECONDS) else None
        while _importing() and time.monotonic() < end:
            time.sleep(1e-3)

    def after_fork_in_parent(self) -> None:
        """Release what :meth:`before_fork` acquired."""
        if self._held.lock is not None:
            self._held.lock.release()

    def after_fork(self) -> None:
        """Replace locks in a forked child: threads of the parent may hold them."""
        self._lock = threading.RLock()  # a signal's handler may call
        if self.made is not None:
            self.made.after_fork()


def _importing() -> bool:
    """Whether a thread imports a module that calls import when they need it."""
    return any(
        getattr(getattr(module, "__spec__", None), "_initializing", False)
        for name, module in sys.modules.copy().items()
        if name.startswith(_IMPORTED_IN_CALLS)
    )


default_dispatcher = _Own()
warm.answerer = default_dispatcher


def _discover() -> None:
    default_dispatcher().registry.kernels()


formats.discover = _discover

if hasattr(os, "register_at_fork"):  # absent on Windows
    os.register_at_fork(
        before=default_dispatcher.before_fork,
        after_in_parent=default_dispatcher.after_fork_in_parent,
        after_in_child=default_dispatcher.after_fork,
    )
