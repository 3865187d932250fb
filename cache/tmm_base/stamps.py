"""Fingerprints of files that show whether they changed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tmm_base.guards import reraise


def stamp(paths: Iterable[str | os.PathLike[str]]) -> list[Any]:
    """Return a fingerprint of files: the path, size, mtime and ctime of each.

    Archives and copies restore the mtime but not the ctime. An absent file has neither.
    """
    stamps: list[Any] = []
    for path in sorted(os.fspath(path) for path in paths):
        try:
            status = os.stat(path)
        except OSError as error:
            reraise(error)
            stamps.append([path])
        else:
            stamps.append([path, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
    return stamps
