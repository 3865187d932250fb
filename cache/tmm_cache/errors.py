"""The cache's errors and warnings: it warns of a fault once and carries on.

A broken cache may cost a tuning run but never a matmul, so file faults are warnings. They are not
silent either: a cache that is never read looks like a slow model.
"""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path
from typing import Final

#: Packages whose frames are skipped to find the user's line that led to a fault.
_BETWEEN: Final = {
    *("tmm_cache", "tmm_core", "tmm_blas", "tmm_triton", "torch", "pluggy"),
    *("contextlib", "functools", "concurrent", "threading"),
}


class CacheWarning(UserWarning):
    """A fault that the cache tolerates: the message names the file and the reason."""


class UsageError(Exception):
    """A mistake in how a command is used: reported in one line, exit status 2."""


class RecordError(ValueError):
    """An invalid record: names the field, what was found and what is accepted."""


_warned: set[tuple[Path, str]] = set()
_warned_guard = threading.Lock()


def warn_once(path: Path, message: str, *, about: str = "") -> None:
    """Issue one `CacheWarning` per file and process.

    A serving process meets the same broken file on every miss. `about` distinguishes two faults of
    one path, so that both are reported.
    """
    with _warned_guard:
        if (path, about) in _warned:
            return
        _warned.add((path, about))
    warn_caller(f"{path}: {message}", CacheWarning)


def warn_caller(message: str, category: type[Warning]) -> None:
    """Issue a warning that points at the user's line that called into tmm; a fixed stack level
    would not do, since ten to thirty frames lie between."""
    frame = sys._getframe(1)
    # Generated functions have no module.
    while (
        frame.f_back is not None
        and (frame.f_globals.get("__name__") or "tmm_core").partition(".")[0] in _BETWEEN
    ):
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def has_warned(path: Path, *, about: str = "") -> bool:
    """Whether `warn_once` has already warned of this."""
    with _warned_guard:
        return (path, about) in _warned
