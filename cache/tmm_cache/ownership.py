"""Checks who owns files: notes of verified kernels count only if no other user can write them.

Ownership is checked on the opened file and on each folder from the root down to it. All checks are
by descriptor, so that no user can exchange a folder between the check and the read. An ACL that
lets others write shows as write permission of the group. Forgeries under the user's own account are
out of scope, and so are acts of root.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from tmm_base.guards import reraise

_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
#: A folder that may be entered and not listed can be opened with O_PATH only, which Linux has.
_FOLDER: Final = (
    getattr(os, "O_PATH", 0) | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
)
_NO_FOLLOW: Final = getattr(os, "O_NOFOLLOW", 0)


def is_shared() -> bool:
    """Whether every user of the cache is trusted: `TMM_CACHE_SHARED=1`, or a platform without
    owners of files."""
    return os.environ.get("TMM_CACHE_SHARED") == "1" or not hasattr(os, "geteuid")


def foreign_status(status: os.stat_result) -> str | None:
    """Why others may have written a file or folder of this status; None if only this user can.

    Files of root are foreign to other users: what root verified was verified for root.
    """
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    return "can be written by others" if status.st_mode & _OTHERS_WRITE else None


def foreign(root: Path) -> str | None:
    """Why a root is not the user's own; None if it is, if it does not exist yet, or if
    `TMM_CACHE_SHARED=1` declares it shared."""
    if is_shared():
        return None
    try:
        status = os.stat(root)
    except OSError as error:  # absent, or a fault that reading will report
        reraise(error)
        return None
    if status.st_uid == os.geteuid() and not stat.S_ISDIR(status.st_mode):
        return None  # reading will report it
    return foreign_status(status)


def foreign_file(root: Path, path: Path, handle: int) -> str | None:
    """Why others than this user may have written the file at `path` below `root`, opened as
    `handle`; None if no other user can have.

    A reason begins with the path at fault. It is empty if the file was replaced since it was
    opened, or if a folder cannot be examined. A link below the root is at fault: the folders above
    its target are not checked. The root itself may be a link.
    """
    opened = os.fstat(handle)
    if (reason := foreign_status(opened)) is not None:
        return f"{path} {reason}"
    place, folder = root, None
    try:
        folder = os.open(root, _FOLDER)
        for name in path.relative_to(root).parts:
            if (reason := foreign_status(os.fstat(folder))) is not None:
                return f"{place} {reason}"
            place = place / name
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                return f"{place} is a link"
            if place != path:
                above, folder = folder, os.open(name, _FOLDER | _NO_FOLLOW, dir_fd=folder)
                os.close(above)
    except OSError as error:
        reraise(error)
        return ""
    finally:
        if folder is not None:
            os.close(folder)
    return None if os.path.samestat(found, opened) else ""
