"""Finds kernels whose launch itself computes a product, such as one that pads its operands.

BLAS answers this product, as it did when the kernel was verified and timed. Otherwise the kernel
could choose itself without end. A launch does not announce itself, since that would cost every warm
call 0.2 µs. The slow path finds the launch among its callers, and from then on the kernel's plans
announce their launches.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, Final

import torch
from tmm_base.guards import OWN_PACKAGES

from tmm_core import settings
from tmm_core.spec.code import LIBRARIES
from tmm_core.spec.launcher import BASELINE, Bound, Launcher

#: The code of the functions that launch plans, each with the plan in its variable ``plan``. The
#: keys are ids, because some code that torch.compile writes has no hash.
ENTRIES: dict[int, CodeType] = {}
#: Names of the kernels whose launch was found to compute a product.
NESTING: set[str] = set()
#: Threads in which a plugin's code was seen to wait.
_WAITING: set[int] = set()

#: The packages of tmm that run plugins' code.
_RUNS_PLUGINS: Final = tuple(
    f"tmm_core.{name}" for name in ("dispatch", "launch", "registry", "tuning", "verify")
)


#: Seconds between two attempts to take a lock.
_CHECK_INTERVAL = 0.05
#: Seconds after which a plugin's code is taken to wait for a thread that runs the same code: it may
#: ask again and again whether this thread has ended.
_PATIENCE = 10.0


@contextmanager
def turn(lock: Any, likely: bool = False) -> Iterator[bool]:
    """A context that holds a lock of threads that run plugins' code; yields False if the thread
    that holds it may wait for this one. ``likely`` is :func:`awaited`'s."""
    began = time.monotonic()
    while not lock.acquire(timeout=_CHECK_INTERVAL):
        if awaited(likely, late=time.monotonic() - began > _PATIENCE):
            yield False
            return
    try:
        yield True
    finally:
        lock.release()


def awaited(likely: bool = False, late: bool = False) -> bool:
    """Whether a plugin's code in another thread waits for a thread, which may be this one: it may
    not wait for that thread.

    Args:
        likely: Leave out plugins whose waiting code lacks a package that this thread runs.
        late: Include plugins' code that does not wait, if it has all packages that this thread
            runs, and there are some.
    """
    here = threading.get_ident()
    ours = _code(sys._getframe()) if likely or late else ()
    own = {package for package, _ in ours} - LIBRARIES
    # No variable holds the frames, since this one is among them: it would be kept alive by itself.
    waiting = {
        thread
        for thread, frame in sys._current_frames().items()
        if thread != here
        and ((waits := frame.f_globals.get("__name__") == "threading") or (late and own))
        and (packages := _plugin(frame))
        and (own <= packages or (waits and not likely))
    }
    _WAITING.update(waiting)
    return bool(waiting)


def has_waited() -> bool:
    """Whether, since the last time this was asked in this thread, a plugin's code waited in it
    while another thread called for a product."""
    here = threading.get_ident()
    waited = here in _WAITING
    _WAITING.discard(here)
    return waited


def _plugin(frame: Any) -> set[str]:
    """Return the packages of the plugin's code that a thread runs; empty if it runs none."""
    packages: set[str] = set()
    for package, name in _code(frame):
        if package in OWN_PACKAGES:
            return packages - LIBRARIES if name.startswith(_RUNS_PLUGINS) else set()
        packages.add(package)
    return set()


def _code(frame: Any) -> Iterator[tuple[str, str]]:
    """The package and the module of each frame, from the innermost."""
    while frame is not None:
        # Functions that tmm generates have no module.
        name = frame.f_globals.get("__name__") or _RUNS_PLUGINS[0]
        yield name.partition(".")[0], name
        frame = frame.f_back


def launching(skipped: int = 0) -> str | None:
    """Return the name of the kernel whose launch made this call; None if there is none. Launches of
    BLAS do not count, because BLAS runs the callers' epilogues.

    Args:
        skipped: The number of launches to skip, from the innermost.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if id(frame.f_code) in ENTRIES and (plan := frame.f_locals.get("plan")) is not None:
            if skipped == 0 and plan.kernel != BASELINE:
                return str(plan.kernel)
            skipped = max(0, skipped - 1)
        frame = frame.f_back
    return None


def add_entry(function: Callable[..., Any]) -> None:
    """Add a function that launches plans."""
    code = function.__code__
    ENTRIES[id(code)] = code


def announced(launcher: Launcher | Bound) -> Launcher:
    """Wrap the launcher of a kernel in :data:`NESTING`, so that its products are answered by
    BLAS."""
    run = Bound.of(launcher).run

    def launch(*arguments: Any, **extras: Any) -> torch.Tensor:
        with settings.nested():
            return run(*arguments, **extras)

    return launch
