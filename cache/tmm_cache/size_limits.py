"""Keeps the cache within its limit of size, and removes left-over temporary files.

A save cleans its own folder and, now and then, the whole root. Only the least recently used records
and notes of the root are removed. Layers, records that this process holds, and those that were just
written are kept. The last use of a record is its file's mtime: an index could be torn, and every
process would write to it.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tmm_base.guards import reraise, suppress

from tmm_cache.cache_errors import warn_once
from tmm_cache.disk import remove_with_lock
from tmm_cache.keys import SLUG
from tmm_cache.paths import DIGEST, NOTE_FILE, NOTES, RECORD, TEMPORARY

DEFAULT_SIZE: Final = 256 * 2**20
#: Eviction goes down to this fraction of the limit, so that the next save does not evict again.
_ROOM: Final = 0.9
#: Files written or used more recently may still be in use by another process.
_RECENT_SECONDS: Final = 60.0
#: A younger temporary file may be a save in progress. A save that takes longer, because its process
#: was stopped, fails with a warning.
STALE_SECONDS: Final = 3600.0

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([kmgt]?)(?:i?b)?", re.ASCII | re.IGNORECASE)
_SCHEMA, _GPU = re.compile(r"v[0-9]+"), re.compile(SLUG)


def parse_size(text: str) -> int | None:
    """`64M`, `1.5GiB`, `1000000` as bytes; None, no limit, for 0. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"found {text!r}, accepted is a size like 64M or 2G, or 0 for no limit")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " ")) or None


def size_limit(environ: Mapping[str, str] = os.environ) -> int | None:
    """`TMM_CACHE_MAX_SIZE` in bytes, None for no limit; the default, with one warning, for an
    invalid value."""
    try:
        return parse_size(environ.get("TMM_CACHE_MAX_SIZE") or str(DEFAULT_SIZE))
    except ValueError as error:
        reraise(error)
        warn_once(Path("TMM_CACHE_MAX_SIZE"), f"{error}; passed over")
        return DEFAULT_SIZE


class SizeLimiter:
    """Keeps a root within its limit, in a process that saves."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._limit = size_limit()
        self._swept: set[Path] = set()
        #: Saved since the last scan of the whole root, which takes 50 ms for 10,000 records.
        #: None: there was no scan.
        self._bytes: int | None = None

    def saved(self, path: Path, size: int, held: Container[Path]) -> None:
        """Clean up the root after saving `size` bytes there. Never raises OSError.

        `path` and the paths in `held` are kept.
        """
        if path.parent not in self._swept:
            self._swept.add(path.parent)
            for left in leftovers(path.parent):
                with suppress(OSError):
                    left.unlink()
        if self._limit is None:
            return
        if self._bytes is not None and self._bytes + size <= (1 - _ROOM) * self._limit:
            self._bytes += size
        else:
            self._bytes = 0
            evict(self._root, self._limit, lambda file: file == path or file in held)


def leftovers(folder: Path) -> list[Path]:
    """Return the temporary files left by killed processes."""
    latest = time.time() - STALE_SECONDS
    found = []
    for path in files(folder, TEMPORARY):
        with suppress(OSError):
            if os.stat(path).st_mtime < latest:
                found.append(path)
    return found


def files(folder: Path, names: re.Pattern[str]) -> list[Path]:
    """Return the files of a folder whose names match, sorted; none if it can't be listed."""
    found = _entries(folder, names)
    return sorted(Path(entry.path) for entry in found if entry.is_file(follow_symlinks=False))


@dataclass(frozen=True, slots=True, order=True)
class _File:
    used_ns: int
    path: Path
    size: int


def evict(root: Path, limit: int, keep: Callable[[Path], bool]) -> int:
    """Remove the least recently used files until the root is within its limit; returns how many.

    Never raises OSError: files that can't be removed stay.
    """
    now_ns = time.time_ns()
    listed = sorted(_evictable(root))
    total = sum(file.size for file in listed)
    if total <= limit:
        return 0
    removed = 0
    for file in listed:
        if total <= _ROOM * limit:
            break
        # A file used in the future was written under another clock.
        recent = abs(now_ns - file.used_ns) <= _RECENT_SECONDS * 1e9
        if not recent and not keep(file.path) and _drop(file):
            total -= file.size
            removed += 1
    return removed


def _evictable(root: Path) -> Iterator[_File]:
    """Notes, and records of every schema: records of an older tmm may never be read again."""
    found = [
        record
        for version in _entries(root, _SCHEMA)
        for gpu in _entries(version, _GPU)
        for environment in _entries(gpu, DIGEST)
        for record in _entries(environment, RECORD)
    ]
    for entry in (*found, *_entries(root / NOTES, NOTE_FILE)):
        with suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield _File(status.st_mtime_ns, Path(entry.path), status.st_size)


def _entries(folder: str | os.PathLike[str], names: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    """The entries of a folder whose names match; none if it can't be listed. Links are left out:
    one may lead to a layer, or out of the root."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if names.fullmatch(entry.name) and not entry.is_symlink():
                yield entry


def _drop(file: _File) -> bool:
    """Remove a file and its lock, unless it was used or rewritten since the listing."""
    with suppress(OSError):
        if os.stat(file.path).st_mtime_ns == file.used_ns:
            remove_with_lock(file.path)
            return True
    return False
