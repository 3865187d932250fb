"""The right to tune a problem: a lock file beside its record, held with `filelock`.

The OS releases it when its holder dies.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tmm_cache.disk import FILE_MODE

if TYPE_CHECKING:
    from filelock import BaseFileLock


def acquire(path: Path, timeout: float = 0.0) -> BaseFileLock | None:
    """Acquire the lock at `path`; None if another holds it for more than `timeout` seconds.

    Raises OSError if the file cannot be opened or its file system cannot lock.
    """
    from filelock import FileLock, Timeout  # 19 ms, not needed for replay

    # An existence lock would outlive a killed holder.
    lock = FileLock(path, mode=FILE_MODE, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(timeout=timeout)
    except Timeout:
        return None
    except BaseException:
        lock.release(force=True)  # a signal's exception may come when it is held
        raise
    return lock
