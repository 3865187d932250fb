"""The location of the user's own records, also on machines without one.

A container may run under a uid without an account, without HOME, in a working directory that was
removed. Then there is no folder to use: the store warns once and keeps its records in memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tmm_cache.errors import reraise, warn_once

#: The root of a process that has none. Nothing can exist below a device, so every read is a miss
#: and every record is held in memory.
NOWHERE: Final = Path(os.devnull, "tmm")

LOCK_NAME: Final = "tmm.lock.json"

_CONSEQUENCE = "what is tuned is lost when the process ends; set TMM_CACHE_DIR to a folder"


def default_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of the user's own records: `TMM_CACHE_DIR`, else the platform's cache folder.

    `NOWHERE`, with one `CacheWarning`, if neither names a folder.
    """
    chosen = environ.get("TMM_CACHE_DIR")
    if chosen:
        return absolute(chosen)
    home, shared = environ.get("HOME"), environ.get("XDG_CACHE_HOME")
    if home is not None and not os.path.isabs(home) and not os.path.isabs(shared or ""):
        # Releases of platformdirs disagree here: the file system's root, or the working directory.
        return _nowhere("~/.cache/tmm", f"HOME is {home!r}, which is not an absolute path")
    import platformdirs  # 15 ms, only needed here

    try:
        folder = platformdirs.user_cache_dir("tmm")
    except Exception as error:  # RuntimeError or KeyError: a uid without an account
        reraise(error)
        return _nowhere("~/.cache/tmm", f"no home folder ({error})")
    if not os.path.isabs(folder):
        return _nowhere(folder, "no home folder")
    return Path(folder)


def lock_path(environ: Mapping[str, str], root: Path) -> Path:
    """The lock file: `TMM_LOCK_FILE`, else `tmm.lock.json` in the root."""
    chosen = environ.get("TMM_LOCK_FILE")
    return absolute(chosen) if chosen else root / LOCK_NAME


def absolute(path: str | Path) -> Path:
    """The absolute path, so that a later `chdir` does not move the cache; `~` is a home folder.

    `NOWHERE`, with one `CacheWarning`, if it is relative to a working directory that was removed or
    to the home of an unknown user.
    """
    path = os.path.expanduser(path)  # unchanged for an unknown user; `Path.expanduser` raises
    if path.startswith("~"):
        return _nowhere(path, "no home folder of that user")
    try:
        return Path(path).absolute()
    except OSError as error:
        reraise(error)
        return _nowhere(path, f"the working directory is gone ({error.strerror or error})")


def real(path: Path) -> str:
    """The path with links resolved as far as possible; reading it reports the fault.

    `os.path.realpath` raises for a link that can be stat'ed but not read, like `/proc/1/root`;
    `Path.resolve` also for a loop.
    """
    try:
        return os.path.realpath(path)
    except OSError as error:
        reraise(error)
        return os.path.abspath(path)


def is_nowhere(path: Path) -> bool:
    """Whether a path is below `NOWHERE`, which was already reported."""
    return path == NOWHERE or NOWHERE in path.parents


def _nowhere(path: str | Path, reason: str) -> Path:
    warn_once(Path(path), f"{reason}; {_CONSEQUENCE}", about="nowhere")
    return NOWHERE
