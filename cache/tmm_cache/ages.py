"""When a record was last used here, kept as its file's time of change.

No index is kept beside the records: it could be torn, and every process would write to it. The
time of access would do, were it not for mounts without it and for backups that read everything.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

#: A use is noted at most so often: one `utime` a day and record.
TOUCH_SECONDS: Final = 86400.0

#: Files with an older time came from elsewhere and were never used here. Nobody's record is of
#: the year 1970, and archives and layers of images set such times too.
_NEVER_USED: Final = 365 * 86400.0


def mark_imported(path: Path) -> None:
    """Say of a file that came from another machine that it was not used here yet.

    Raises OSError.
    """
    # In millionths of the time since 1970: of two imports no file has the same.
    os.utime(path, ns=(time.time_ns(), time.time_ns() // 1000))


def was_used(status: os.stat_result) -> bool:
    """Whether this machine has tuned the record or answered with it."""
    return status.st_mtime >= _NEVER_USED


def last_used(status: os.stat_result) -> float:
    """When it was used last, or came here."""
    return status.st_mtime if was_used(status) else status.st_ctime


def touch(path: Path) -> None:
    """Note that the record is used now, if that was not noted within a day."""
    # Not where the root is read-only or another's.
    with contextlib.suppress(OSError):
        if abs(time.time() - os.stat(path).st_mtime) > TOUCH_SECONDS:
            os.utime(path)
