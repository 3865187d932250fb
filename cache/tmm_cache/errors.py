"""What the cache says when it meets a fault: it warns once and carries on.

A broken cache may cost a tuning run, never a matmul, so faults of files are warnings. They must
not be silent either: a cache that is never read looks like a slow model.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path


class CacheWarning(UserWarning):
    """A fault that the cache tolerated: the message names the file and the reason."""


class RecordError(ValueError):
    """A document that is no valid record: names the field, what was found, what is accepted."""


_warned: set[tuple[Path, str]] = set()
_warned_guard = threading.Lock()


def warn_once(path: Path, message: str, *, about: str = "") -> None:
    """Issue one `CacheWarning` per file and process.

    A serving process meets the same broken file on every miss; `about` tells apart two faults of
    one path that must not hide each other.
    """
    with _warned_guard:
        if (path, about) in _warned:
            return
        _warned.add((path, about))
    warnings.warn(f"{path}: {message}", CacheWarning, stacklevel=4)


def has_warned(path: Path, *, about: str = "") -> bool:
    """Whether `warn_once` has warned of this."""
    with _warned_guard:
        return (path, about) in _warned
