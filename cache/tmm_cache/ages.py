"""When a record was last used here, stored as its file's mtime.

There is no index: it could be torn, and every process would write to it. The atime does not serve:
some mounts do not keep it, and backups read everything.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from tmm_cache.errors import reraise, suppress

#: Minimum interval between two updates: one `utime` per day and record.
TOUCH_SECONDS: Final = 86400.0

#: Files with an older mtime came from elsewhere and were never used here. No record was made in
#: 1970, and archives and image layers set such times too.
_NEVER_USED: Final = 365 * 86400.0


def mark_imported(path: Path) -> None:
    """Mark a file from another machine as not used here yet.

    Raises OSError.
    """
    # The time since 1970 divided by 1000, so that no two imports share an mtime.
    os.utime(path, ns=(time.time_ns(), time.time_ns() // 1000))


def was_used(status: os.stat_result) -> bool:
    """Whether this machine tuned the record or used it as an answer."""
    return status.st_mtime >= _NEVER_USED


def last_used(status: os.stat_result) -> float:
    """When the record was last used, or imported."""
    return status.st_mtime if was_used(status) else status.st_ctime


def touch(path: Path) -> None:
    """Note that the record is used now, at most once a day."""
    # Fails where the root is read-only or belongs to another user.
    with suppress(OSError):
        if abs(time.time() - os.stat(path).st_mtime) > TOUCH_SECONDS:
            os.utime(path)


def is_older(path: str | os.PathLike[str], seconds: float) -> bool:
    """Whether a file was written longer ago than this; False if it is gone."""
    try:
        return time.time() - os.stat(path, follow_symlinks=False).st_mtime > seconds
    except OSError as error:
        reraise(error)
        return False
