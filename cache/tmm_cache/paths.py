"""The paths of the cache: `<root>/v2/<gpu slug>/<environment digest>/<problem digest>.json`, its
roots and its layers.

File names are defined only here, so that readers, writers and removers agree on which files belong
to the cache. A file that these patterns don't match is never touched. A container may run under a
uid without an account, without HOME, in a working directory that was removed. Then there is no
root: the store warns once and keeps its records in memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tmm_base import UsageError
from tmm_base.guards import reraise, suppress

from tmm_cache.cache_errors import warn_once
from tmm_cache.keys import DIGEST_DIGITS, is_slug
from tmm_cache.ownership import foreign
from tmm_cache.record import SCHEMA

ENVIRONMENT: Final = "environment.json"
NOTES: Final = "notes"
LOCK_SUFFIX: Final = ".lock"
VERSION: Final = f"v{SCHEMA}"
SHIPPED_GROUP: Final = "tmm_core.records"
OWN_PACKAGE: Final = "tmm_core"

_HEX = rf"[0-9a-f]{{{DIGEST_DIGITS}}}"
DIGEST: Final = re.compile(_HEX)
RECORD: Final = re.compile(rf"{_HEX}\.json")
NOTE_FILE: Final = re.compile(r"[a-z]+-[0-9a-f]{64}\.jsonl")
LOCK: Final = re.compile(rf"{_HEX}\.json{re.escape(LOCK_SUFFIX)}")
_REPLACED: Final = rf"({_HEX}\.json|environment\.json|{NOTE_FILE.pattern})"
TEMPORARY: Final = re.compile(rf"{_REPLACED}\.[0-9]+-[0-9a-f]{{8}}\.tmp")


def temporary_name(name: str) -> str:
    """A temporary name for `name`, unique among processes and threads, matched by `TEMPORARY`."""
    return f"{name}.{os.getpid()}-{os.urandom(4).hex()}.tmp"


def require_own(root: Path) -> None:
    """Raises UsageError for a root that is not the user's own."""
    if (reason := foreign(root)) is not None:
        raise UsageError(f"{root}: {reason}; TMM_CACHE_SHARED=1 if it is shared on purpose")


def layer_paths(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the read-only layers below the user's own, nearest first: `TMM_CACHE_PATH`, then what
    installed packages ship."""
    parts = environ.get("TMM_CACHE_PATH", "").split(os.pathsep)
    own = tuple(Path(os.path.expanduser(part)) for part in parts if part)
    return own + shipped_layers(environ)


def shipped_layers(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """The `records` folders of installed packages, tmm's own last; none if `TMM_SHIPPED_RECORDS` is
    0.

    A distribution names its package in the entry-point group `tmm_core.records`. The package is not
    imported.
    """
    if environ.get("TMM_SHIPPED_RECORDS") == "0":
        return ()
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    found = {("", OWN_PACKAGE)}
    with suppress(Exception):  # the metadata of any package is damaged; the registry reports it
        found = {(each.name, each.value) for each in entry_points(group=SHIPPED_GROUP)}
    folders: dict[Path, None] = {}
    for _, package in sorted(found, key=lambda each: (each[1] == OWN_PACKAGE, each[0])):
        spec = None
        with suppress(ImportError, ValueError):
            spec = None if "." in package else find_spec(package)
        for place in (spec and spec.submodule_search_locations) or ():
            folder = Path(place, "records")
            if os.path.isdir(folder):  # Path.is_dir raises on EACCES
                folders[folder] = None
    return tuple(folders)


def record_path(root: Path, gpu: str, environment: str, problem: str) -> Path:
    """Return the file of a record, by its GPU and the digests of its environment and its problem.

    Raises ValueError for a GPU that is not a slug or an environment that is not a digest. Both
    become path components and must not escape the root.
    """
    if not is_slug(gpu):
        raise ValueError(f"gpu: found {gpu!r}, accepted is a slug like {'nvidia-h200-sm90'!r}")
    if not DIGEST.fullmatch(environment):
        raise ValueError(f"environment: found {environment!r}, accepted is a digest")
    return root / VERSION / gpu / environment / f"{problem}.json"


# -- roots ---------------------------------------------------------------------------------

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
    """Return the lock file: `TMM_LOCK_FILE`, else `tmm.lock.json` in the root."""
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


def is_nowhere(path: Path) -> bool:
    """Whether a path is below `NOWHERE`, which was already reported."""
    return path == NOWHERE or NOWHERE in path.parents


def _nowhere(path: str | Path, reason: str) -> Path:
    warn_once(Path(path), f"{reason}; {_CONSEQUENCE}")
    return NOWHERE
