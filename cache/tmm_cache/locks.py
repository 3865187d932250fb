"""A file lock, held with `flock`: the right to tune a problem.

The OS releases it when its holder dies. Nothing here blocks: the path may be a FIFO, and a lock
held by another process is polled until a deadline.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tmm_cache.disk import open_regular
from tmm_cache.errors import suppress

with suppress(ImportError):  # on Windows
    import fcntl

#: Interval between two attempts.
_POLL_SECONDS: Final = 0.05
#: A longer wait is logged: another rank tunes for seconds to minutes.
_SILENT_SECONDS: Final = 1.0
#: Interval between two such lines of this process: it may wait for one problem after another.
_SAID_EVERY_SECONDS: Final = 60.0

#: When this process last said that it waits.
_said = -_SAID_EVERY_SECONDS


def acquire(path: Path, timeout: float) -> int | None:
    """Acquire the lock at `path`; returns the descriptor that holds it, or None if that took more
    than `timeout` seconds. Waiting is logged, at most once a minute.

    Raises OSError if the file can't be opened, is not a regular file or can't be locked.
    """
    global _said
    start = time.monotonic()
    while (handle := _attempt(path)) is None:
        waited = time.monotonic() - start
        if waited >= timeout:
            break
        if waited >= _SILENT_SECONDS and time.monotonic() - _said >= _SAID_EVERY_SECONDS:
            _said = time.monotonic()
            import logging  # 5 ms, only needed when waiting

            logging.getLogger("tmm_cache").warning(
                "waiting for another process that tunes the same problem, at most %.0f s", timeout
            )
        time.sleep(min(_POLL_SECONDS, timeout - waited))
    return handle


def release(handle: int) -> None:
    """Release a lock, even when this raises OSError."""
    try:
        # A child forked meanwhile has the file open: closing alone would not unlock it.
        fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def _attempt(path: Path) -> int | None:
    if "fcntl" not in globals():
        raise OSError(errno.ENOSYS, "this platform has no flock")
    try:
        handle = open_regular(path, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        # Some network file systems look up and create in two steps; the file vanished in between.
        if path.parent.is_dir():
            return None
        raise
    held = False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # If `clear` has removed the file since it was opened, the lock protects nothing.
        held = os.fstat(handle).st_nlink > 0
    except (BlockingIOError, PermissionError) as error:
        if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES):
            raise
    finally:
        if not held:
            os.close(handle)
    return handle if held else None


@contextlib.contextmanager
def held_at_once(path: Path) -> Iterator[bool]:
    """Hold the lock at `path` if its file is there; yields whether it is.

    Raises OSError if another process holds it.
    """
    if not path.is_file():
        yield False
        return
    handle = acquire(path, timeout=0)
    if handle is None:
        raise OSError(errno.EWOULDBLOCK, "another process holds it")
    try:
        yield True
    finally:
        release(handle)
