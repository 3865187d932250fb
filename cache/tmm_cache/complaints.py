"""What a store says of faults: each once, and one of a whole folder or root for all its files."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Final

from tmm_cache.errors import has_warned, warn_once
from tmm_cache.files import Fault, set_aside
from tmm_cache.layout import RECORD, VERSIONS, foreign
from tmm_cache.places import is_nowhere, root_of

# Of the whole root, as against one file of it: whatever is tried next fails alike.
_UNWRITABLE: Final = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.ELOOP}


def passed_over(fault: Fault, outcome: str = "passed over") -> None:
    """Tell of a fault, of one that all files of a folder share once for the whole root."""
    if is_nowhere(fault.path):
        return
    if fault.place:
        text = f"{fault.reason}; {outcome}, and what lies only there is tuned anew"
        warn_once(root_of(fault.path, VERSIONS), text, about="place")
    else:
        warn_once(fault.path, f"{fault.reason}; {outcome}")


class Complaints:
    """Those of one root: whose it is, and what could not be read or written there."""

    __slots__ = ("_foreign", "_root")

    def __init__(self, root: Path) -> None:
        self._root = root
        self._foreign = foreign(root)

    @property
    def is_own(self) -> bool:
        """Whether the root is this user's, to be believed and written."""
        return self._foreign is None

    def may_write(self) -> bool:
        """As `is_own`, and where it is not the user is told."""
        if self._foreign is None:
            return True
        warn_once(
            self._root,
            f"{self._foreign}; it is read as a stranger's and not written, and what is tuned is "
            f"lost when the process ends (TMM_CACHE_SHARED=1 if it is shared on purpose)",
            about="foreign",
        )
        return False

    def fault(self, fault: Fault) -> None:
        """Tell of a fault; a damaged record of the user's own root is also set aside."""
        outcome = "passed over"
        mine = self.is_own and self._root in fault.path.parents
        if mine and fault.damaged and RECORD.fullmatch(fault.path.name):
            aside = set_aside(fault.path)
            outcome = outcome if aside is None else f"set aside as {aside.name}"
        passed_over(fault, outcome)

    def unwritable(self, error: OSError) -> None:
        """Tell that records of this process stay in its memory."""
        if is_nowhere(self._root):
            return
        reason = error.strerror or error
        warn_once(
            self._root,
            f"cannot be written ({reason}); what is not written is lost when the process ends",
            about="place",
        )

    def beside(self, path: Path, error: OSError, done: str, consequence: str) -> None:
        """Tell of a file without which records are kept all the same, unless of the whole root."""
        if error.errno in _UNWRITABLE:
            self.unwritable(error)
        elif not (is_nowhere(self._root) or has_warned(self._root, about="place")):
            reason = error.strerror or error
            # One of a thousand files: the others most likely fail alike.
            warn_once(
                self._root,
                f"{path.relative_to(self._root)} cannot be {done} ({reason}); {consequence}",
                about=done,
            )
