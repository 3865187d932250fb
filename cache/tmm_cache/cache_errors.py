"""The cache's errors and warnings: it warns of a fault once and carries on.

A broken cache may cost a tuning run but never a matmul, so file faults are warnings. They are not
silent either: a cache that is never read looks like a slow model.
"""

from __future__ import annotations

import threading
from pathlib import Path

from tmm_base.guards import warn_caller


class CacheWarning(UserWarning):
    """A fault that the cache tolerates: the message names the file and the reason."""


class RecordError(ValueError):
    """An invalid record: names the field and the accepted values."""


_warned: set[tuple[Path, str]] = set()
_warned_guard = threading.Lock()


def warn_once(path: Path, message: str, *, about: str = "", key: Path | None = None) -> None:
    """Issue one `CacheWarning` per file (or `key`) and process: a serving process meets the same
    broken file on every miss. `about` distinguishes two faults, so that both are reported."""
    with _warned_guard:
        if (key or path, about) in _warned:
            return
        _warned.add((key or path, about))
    warn_caller(f"{path}: {message}", CacheWarning)


def has_warned(path: Path, *, about: str = "") -> bool:
    """Whether `warn_once` has already warned of this."""
    with _warned_guard:
        return (path, about) in _warned
