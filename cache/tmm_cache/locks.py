"""The right to tune a problem: a lock file next to its record, held with `filelock`.

The OS releases it when its holder dies.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tmm_base.guards import suppress

from tmm_cache.disk import FILE_MODE

if TYPE_CHECKING:
    from filelock import BaseFileLock

#: A longer wait is logged: another process tunes for seconds to minutes.
_SILENT_SECONDS: Final = 1.0


def acquire(path: Path, timeout: float = 0.0) -> BaseFileLock | None:
    """Acquire the lock at `path`; None if another holds it for more than `timeout` seconds.

    Raises OSError if the file cannot be opened or its file system cannot lock.
    """
    from filelock import FileLock, Timeout  # 19 ms, not needed for replay

    # An existence lock would outlive a killed holder.
    lock = FileLock(path, mode=FILE_MODE, thread_local=False, fallback_to_soft=False)
    try:
        with suppress(Timeout):
            lock.acquire(timeout=min(timeout, _SILENT_SECONDS))
            return lock
        # filelock waits where no file can be made, as in a link to /proc/self.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE))
        if timeout > _SILENT_SECONDS:
            _log_wait()
            with suppress(Timeout):
                lock.acquire(timeout=timeout - _SILENT_SECONDS)
                return lock
    except BaseException:
        lock.release(force=True)  # a signal's exception may come when it is held
        raise
    return None


@functools.cache  # a process may wait for one problem after another
def _log_wait() -> None:
    import logging  # 5 ms, only needed when waiting

    logging.getLogger("tmm_cache").warning("waiting for another process that tunes this problem")
