"""Warns of a store's faults, each once: one warning for a thousand files that fail alike."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from tmm_cache.cache_errors import has_warned, warn_once
from tmm_cache.files import Fault
from tmm_cache.ownership import foreign
from tmm_cache.paths import VERSION, is_nowhere

# Errors of the whole root rather than of one file: the next attempt would fail the same way.
_UNWRITABLE: Final = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.ELOOP}


def warn_of(fault: Fault) -> None:
    """Warn of a fault. A fault that all files of a folder share is reported once per root, files
    that cannot be read once per folder: the others most likely fail the same way."""
    if is_nowhere(fault.path):
        return
    if fault.of_folder:
        text = f"{fault.reason}; passed over, and records that exist only there are tuned again"
        parents = (fault.path, *fault.path.parents)[:3]
        root = next((path.parent for path in parents if path.name == VERSION), fault.path)
        warn_once(root, text, about="place")
    else:
        key = fault.path if fault.damaged else fault.path.parent
        warn_once(fault.path, f"{fault.reason}; passed over", about="file", key=key)


class FaultWarnings:
    """The warnings of one root: its ownership, and files that could not be written."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def may_write(self) -> bool:
        """Whether the root is this user's own, and so may be trusted and written. Warns if not."""
        # Checked each time: a root that did not exist may since have been made by another user.
        if (reason := foreign(self._root)) is None:
            return True
        warn_once(
            self._root,
            f"{reason}; it is read as untrusted and not written, and tuning results are "
            f"lost when the process ends (TMM_CACHE_SHARED=1 if it is shared on purpose)",
            about="foreign",
        )
        return False

    def untrusted(self, reason: str) -> None:
        """Warn that others may have written what was verified under the root; once per root."""
        warn_once(
            self._root,
            f"{reason}; records are verified again before their first use in each process "
            f"(TMM_CACHE_SHARED=1 if all its users are trusted)",
            about="untrusted",
        )

    def unwritable(self, error: OSError) -> None:
        """Warn that records of this process stay in memory."""
        if is_nowhere(self._root):
            return
        reason = error.strerror or error
        warn_once(
            self._root,
            f"cannot be written ({reason}); unwritten records are lost when the process ends",
            about="place",
        )

    def auxiliary(self, path: Path, error: OSError, action: str, consequence: str) -> None:
        """Warn that an auxiliary file cannot be ``action`` ("written", "locked"), or of a fault of
        the whole root. Records work without the file."""
        if error.errno in _UNWRITABLE:
            self.unwritable(error)
        elif not (is_nowhere(self._root) or has_warned(self._root, about="place")):
            reason = error.strerror or error
            # One warning for a thousand files: the others most likely fail the same way.
            warn_once(
                self._root,
                f"{path.relative_to(self._root)} cannot be {action} ({reason}); {consequence}",
                about=action,
            )
