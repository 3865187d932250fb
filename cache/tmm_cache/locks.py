"""The right to tune a problem: a lock file beside its record, held with `filelock`.

The OS releases it when its holder dies.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tmm_cache.disk import FILE_MODE

if TYPE_CHECKING:
    from filelock import BaseFileLock

#: A longer wait is logged: another rank tunes for seconds to minutes.
_SILENT_SECONDS: Final = 1.0
#: Interval between two such lines of this process: it may wait for one problem after another.
_LOG_INTERVAL_SECONDS: Final = 60.0

#: When this process last logged that it waits.
_logged = -_LOG_INTERVAL_SECONDS


def acquire(path: Path, timeout: float = 0.0) -> BaseFileLock | None:
    """Acquire the lock at `path`; None if another holds it for more than `timeout` seconds.

    Raises OSError if the file cannot be opened or its file system cannot lock.
    """
    from filelock import FileLock  # 19 ms, not needed for replay

    # An existence lock would outlive a killed holder.
    lock = FileLock(path, mode=FILE_MODE, thread_local=False, fallback_to_soft=False)
    try:
        if _acquired(lock, min(timeout, _SILENT_SECONDS)):
            return lock
        if timeout <= _SILENT_SECONDS:
            return None
        _log_wait(timeout)
        return lock if _acquired(lock, timeout - _SILENT_SECONDS) else None
    except BaseException:
        lock.release(force=True)  # a signal's exception may come when it is held
        raise


def _log_wait(timeout: float) -> None:
    global _logged
    if time.monotonic() - _logged >= _LOG_INTERVAL_SECONDS:
        _logged = time.monotonic()
        import logging  # 5 ms, only needed when waiting

        logging.getLogger("tmm_cache").warning(
            "waiting for another process that tunes the same problem, at most %.0f s", timeout
        )


def _acquired(lock: BaseFileLock, timeout: float) -> bool:
    from filelock import Timeout

    try:
        lock.acquire(timeout=timeout)
    except Timeout:
        return False
    return True
