"""Notes: results that one process computes and later ones reuse; losing them only costs time.

A file of notes belongs to one state: versions, sizes and times of files, environment variables. Its
name is a digest of that state, so another state uses another file. Each note is a line, appended in
a single write, so any number of processes can share a file without a lock. Damaged or torn lines
are ignored. A full file of replaced or repeated notes is replaced by the latest ones. A file is
neither read nor written if others than the user may have written it, its folder or its root.
Nothing here warns, and only `write` raises OSError.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from tmm_base.guards import suppress

from tmm_cache import disk
from tmm_cache.fields import parse
from tmm_cache.keys import JSON, canonical
from tmm_cache.ownership import foreign, foreign_file, is_shared
from tmm_cache.paths import NOTES, default_root

#: A larger file gets no more notes: about a thousand problems, read at every start.
MAX_BYTES: Final = 2**20


class Notes:
    """The notes called `name` of one state, which is JSON.

    `root` defaults to `default_root()`. Raises like `canonical`.
    """

    def __init__(self, name: str, state: JSON, root: Path | None = None) -> None:
        digest = hashlib.sha256(canonical(state).encode("ascii")).hexdigest()
        self._root = root = default_root() if root is None else root
        self.path = root / NOTES / f"{name}-{digest}.jsonl"
        #: Why others may have written the file, empty if that is unknown; None: they cannot have.
        self.foreign = foreign(root)
        self._notes: dict[str, JSON] = {}
        #: Notes that a failing disk refused: the next one takes them along.
        self._unwritten: dict[str, JSON] = {}
        #: Whether the latest notes alone fill the file.
        self._is_full = False
        if self.foreign is None:
            with suppress(OSError):
                self._read()

    def get(self, about: str) -> JSON:
        """Return the latest note about this; None if there is none."""
        return self._notes.get(about)

    def values(self) -> list[JSON]:
        """Return the latest note about each thing."""
        return list(self._notes.values())

    def add(self, about: str, value: JSON) -> None:
        """Add a note, if a file can be written."""
        with suppress(OSError):
            self.write(about, value)

    def write(self, about: str, value: JSON) -> None:
        """Like `add`; raises OSError if the file cannot be written."""
        if self.get(about) == value and about not in self._unwritten:
            return
        self._notes[about] = value
        # Checked each time: others may have been given write permission since.
        if self.foreign is not None or foreign(self._root) is not None:
            return
        notes = {**self._unwritten, about: value}
        lines = "\n".join(map(canonical, notes.items())).encode("ascii")
        self._unwritten[about] = value
        disk.make_folder(self.path.parent)
        is_written = disk.append_line(self.path, lines, MAX_BYTES) or self._rewritten(notes)
        for each in notes:  # not others: another thread may fail to write its own
            self._unwritten.pop(each, None)
        if not is_written:
            raise OSError("it is full")

    def _rewritten(self, unwritten: dict[str, JSON]) -> bool:
        """Read the full file again and replace it by the latest notes and these. Returns False
        if they would fill more than half of the file, now or at an earlier call. Raises OSError."""
        if self._is_full:
            return False
        self._read()
        self._notes |= unwritten
        with suppress(RecursionError):  # a damaged note
            notes = map(canonical, self._notes.copy().items())  # another thread may add one
            data = "\n".join(["", *notes]).encode("ascii")
            if self.foreign is None and len(data) <= MAX_BYTES // 2:
                disk.write_atomically(self.path, data)
                return True
        self._is_full = True
        return False

    def _read(self) -> None:
        with disk.closing(disk.open_regular(self.path, os.O_RDONLY)) as handle:
            if not is_shared():
                self.foreign = foreign_file(self._root, self.path, handle)
            data = disk.read_all(handle, MAX_BYTES) if self.foreign is None else b""
        for line in filter(None, data.split(b"\n")):
            with suppress(ValueError):  # a killed process left a torn line
                note = parse(line)
                if isinstance(note, list) and len(note) == 2 and isinstance(note[0], str):
                    self._notes[note[0]] = note[1]
        if self.foreign is None:
            disk.touch(self.path)
