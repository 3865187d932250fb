"""Chooses a kernel for a problem: the registry, the ladder of choices, the tuner and its clock.

:func:`dispatcher` is the process's own; it serves calls that have no plan yet
(:data:`tmm_core.launch.warm.answerer`).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from tmm_core.launch import warm

if TYPE_CHECKING:
    from tmm_core.dispatch.ladder import Dispatcher

T = TypeVar("T")


class _Once(Generic[T]):
    """``make()``, called once by the first thread. functools.cache would call it in every thread
    that arrives before the first call returns."""

    def __init__(self, make: Callable[[], T]) -> None:
        functools.update_wrapper(self, make)
        self._make = make
        self._lock = threading.Lock()
        #: The result; None before the first call.
        self.made: T | None = None

    def __call__(self) -> T:
        if (made := self.made) is None:
            with self._lock:
                made = self.made
                if made is None:
                    made = self.made = self._make()
        return made

    def cache_clear(self) -> None:
        self.made = None

    def after_fork(self) -> None:
        self._lock = threading.Lock()


@_Once
def dispatcher() -> Dispatcher:
    """The process's own dispatcher, over installed plugins and the user's cache."""
    from tmm_core.dispatch.deferred import collector_off

    with collector_off():
        # Imported here: they would take half of the time to import tmm_core.
        from tmm_cache import CacheStore

        from tmm_core.dispatch.ladder import Dispatcher
        from tmm_core.dispatch.registry import Registry

        return Dispatcher(Registry.from_environment(), None, CacheStore())


warm.answerer = dispatcher


def _after_fork() -> None:
    """Replace locks in a child: no thread would release those that the parent's threads held."""
    dispatcher.after_fork()
    if dispatcher.made is not None:
        dispatcher.made.after_fork()


if hasattr(os, "register_at_fork"):  # absent on Windows
    os.register_at_fork(after_in_child=_after_fork)
