"""Opens and replaces single files so that a crash or a full disk costs at most one file.

A write goes to a temporary file in the same folder. The file is synced and renamed over the old
one, so a reader sees the old file or the new one and takes no lock. Anything but a regular file is
refused, without blocking.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from tmm_base import UsageError
from tmm_base.guards import suppress

from tmm_cache.paths import LOCK_SUFFIX, temporary_name

FOLDER_MODE = 0o700
FILE_MODE = 0o600
#: Minimum interval between two updates of a file's last use.
TOUCH_SECONDS = 86400.0

# Windows lacks these flags and does not need them.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)


def open_regular(path: Path, flags: int) -> int:
    """Return a descriptor of a regular file. Raises OSError for anything else.

    It never blocks: a FIFO or a socket in place of a file is refused.
    """
    with suppress(FileNotFoundError):
        require_regular(os.stat(path))  # before opening: some devices have side effects
    return opened(path, flags)


def opened(path: Path, flags: int) -> int:
    """Like `open_regular`, without its `stat` before opening: for a path that was just checked, or
    where thousands of files are opened."""
    # Reading follows links, as in a mounted config volume; writing through one could change another
    # user's file.
    if flags & (os.O_WRONLY | os.O_RDWR):
        flags |= _NO_FOLLOW
    handle = os.open(path, flags | _NO_WAIT, FILE_MODE)
    try:
        # Again: the file may have been replaced after the first check.
        require_regular(os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


@contextlib.contextmanager
def closing(handle: int) -> Iterator[int]:
    """A context that closes a descriptor."""
    try:
        yield handle
    finally:
        os.close(handle)


def require_regular(status: os.stat_result) -> None:
    """Check that a status is a regular file's. Raises NotRegularError."""
    if not stat.S_ISREG(status.st_mode):
        raise NotRegularError("is not a regular file")


class NotRegularError(OSError):
    """A folder, FIFO, socket or device in the place of a file."""


def append_line(path: Path, line: bytes, most: int) -> bool:
    """Append in a single write; False if the file would exceed `most` bytes. Raises OSError.

    The newline comes first, so that a torn line left by a killed process can't swallow this one.
    """
    with closing(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)) as handle:
        if os.fstat(handle).st_size + 1 + len(line) > most:
            return False
        if os.write(handle, b"\n" + line) <= len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return True


def read_all(handle: int, most: int) -> bytes:
    """Read the rest of a file, at most one byte more than `most`. Raises OSError."""
    data = b""
    room = min(os.fstat(handle).st_size, most) + 1  # one read is enough, unless the file grows
    while len(data) <= most and (part := os.read(handle, room)):
        data += part
        room = 2**16
    return data


def touch(path: Path) -> None:
    """Record in a file's mtime that it is used now, at most once a day."""
    # Fails where the root is read-only or belongs to another user.
    with suppress(OSError):
        if abs(time.time() - os.stat(path).st_mtime) > TOUCH_SECONDS:
            os.utime(path)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, all private, unlike `mkdir(parents=True)`. Raises OSError."""
    if not folder.is_dir():
        if folder.parent != folder:
            make_folder(folder.parent)
        folder.mkdir(FOLDER_MODE, exist_ok=True)


def write_atomically(path: Path, data: bytes, mode: int = FILE_MODE) -> None:
    """Replace a file atomically. Raises OSError; then the old file is untouched."""
    temporary = path.with_name(temporary_name(path.name))
    try:
        with closing(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)) as handle:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno:
            error.filename = str(path)  # a write's error names no file, others the temporary one
        raise
    # Makes the rename durable. Some network file systems can't sync a folder, which only costs
    # durability across a power cut.
    with suppress(OSError), closing(os.open(path.parent, os.O_RDONLY)) as folder:
        os.fsync(folder)


def require_target(file: Path) -> None:
    """Check, before any work, that a file that a user named can be written.

    Raises UsageError that names the file or its folder.
    """
    try:
        target = file.resolve()  # RuntimeError: a loop of links, before Python 3.13
        if file.exists() and not file.is_file():  # a pipe is no path once it is resolved
            # Renaming over it would replace /dev/null for the whole machine.
            raise UsageError(f"{file}: is not a regular file")
        if not target.parent.is_dir():
            raise UsageError(f"{target.parent}: there is no such folder")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise UsageError(f"{target.parent}: no file can be written in this folder")
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{file}: cannot be written ({error})") from error


def write_for_all(file: Path, data: bytes) -> None:
    """Replace a file that a user named and `require_target` checked. Others may read it as far as
    `umask` allows. Raises OSError."""
    write_atomically(file.resolve(), data, mode=0o666)


def remove_with_lock(path: Path) -> None:
    """Remove a file, and a record's lock with the record. Raises OSError.

    A process that holds the lock continues; another may then tune the same problem at the same
    time.
    """
    path.unlink(missing_ok=True)
    path.with_name(path.name + LOCK_SUFFIX).unlink(missing_ok=True)
