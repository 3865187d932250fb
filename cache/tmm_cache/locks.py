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

with contextlib.suppress(ImportError):  # on Windows
    import fcntl

#: Interval between two attempts.
_POLL_SECONDS: Final = 0.05
#: A longer wait is logged: another rank tunes for seconds to minutes.
_SILENT_SECONDS: Final = 1.0


class Lock:
    """The lock file at `path`, not held yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this object holds it."""
        return self._handle is not None

    def acquire(self, timeout: float) -> bool:
        """Acquire the lock; returns whether that took at most `timeout` seconds. Waiting is logged.

        Raises OSError if the file can't be opened, is not a regular file or can't be locked.
        """
        start = time.monotonic()
        told = False
        while not self._attempt():
            waited = time.monotonic() - start
            if waited >= timeout:
                return False
            if waited >= _SILENT_SECONDS and not told:
                told = True
                import logging  # 5 ms, only needed when waiting

                logging.getLogger("tmm_cache").warning(
                    "waiting up to %.0f s for %s, which another process holds", timeout, self.path
                )
            time.sleep(min(_POLL_SECONDS, timeout - waited))
        return True

    def release(self) -> None:
        """Release the lock, even when this raises OSError."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            try:
                # A child forked meanwhile has the file open: closing alone would not unlock it.
                fcntl.flock(handle, fcntl.LOCK_UN)
            finally:
                os.close(handle)

    def _attempt(self) -> bool:
        if "fcntl" not in globals():
            raise OSError(errno.ENOSYS, "this platform has no flock")
        try:
            handle = open_regular(self.path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            # Some network file systems look up and create in two steps; the file vanished in
            # between.
            if self.path.parent.is_dir():
                return False
            raise
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If `clear` has removed the file since it was opened, the lock protects nothing.
            if os.fstat(handle).st_nlink:
                self._handle, handle = handle, -1
        except (BlockingIOError, PermissionError) as error:
            if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES):
                raise
        finally:
            if handle >= 0:
                os.close(handle)
        return self.is_held


@contextlib.contextmanager
def held_at_once(path: Path) -> Iterator[bool]:
    """Hold the lock at `path` if its file is there; yields whether it is.

    Raises OSError if another process holds it.
    """
    lock = Lock(path)
    if path.is_file() and not lock.acquire(timeout=0):
        raise OSError(errno.EWOULDBLOCK, "another process holds it")
    try:
        yield lock.is_held
    finally:
        lock.release()
