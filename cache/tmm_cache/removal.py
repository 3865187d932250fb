"""Removes the cache's own files from the user's own root, and nothing else.

A wrong `rm -r` on the folder in `TMM_CACHE_DIR` can't be undone, so removal works on a list of
single files whose names match the layout, and the command shows the list first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal, TypeAlias

from tmm_cache.ages import is_older, was_used
from tmm_cache.disk import remove_if_empty
from tmm_cache.errors import reraise, suppress
from tmm_cache.files import Fault, Report
from tmm_cache.filters import Filter
from tmm_cache.layout import BROKEN, LOCK, LOCK_SUFFIX, MISSES, NOTE_FILE, NOTES, RECORD
from tmm_cache.locks import held_at_once
from tmm_cache.record import CLOCK
from tmm_cache.scan import Folder, Summary, folders, summaries, summaries_of
from tmm_cache.upkeep import files, leftovers

Kind: TypeAlias = Literal["record", "damaged", "misses", "lock", "temporary", "notes"]

#: Notes unchanged for this long most likely belong to versions that are gone; otherwise they are
#: soon made again.
STALE_NOTES_SECONDS = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class Removal:
    """One file to remove, and why."""

    path: Path
    kind: Kind
    reason: str


def cleared(root: Path, wanted: Filter, report: Report) -> Iterator[Removal]:
    """The records that pass a filter. An empty one yields all files of the root: also damaged
    ones, misses, notes, locks and stale temporary files.

    This and `outdated` report other faults, such as a folder that can't be listed.
    """
    reason = "to be cleared"
    if not wanted.is_empty:
        found = summaries(root, report, full=True)
        yield from (Removal(entry.path, "record", reason) for entry in found if wanted(entry))
        return
    for folder in folders(root, report):
        faults: list[Fault] = []
        for entry in summaries_of(root, folder, faults.append, full=True):
            yield Removal(entry.path, "record", reason)
        yield from _damaged(faults, report)
        yield from misses(folder, reason)
        yield from _leftovers(folder)
    for path in files(root / NOTES, NOTE_FILE):
        yield Removal(path, "notes", reason)


def outdated(root: Path, before: datetime | None, report: Report) -> Iterator[Removal]:
    """The files that `prune` removes: damaged files and those set aside, stale notes and temporary
    files, locks without a record, records of an older schema whose problem was measured again, and
    records created before a time or, without one, of every environment of a GPU but its newest.

    The newest environment is the one whose records this machine made or used last. The creation
    time of an imported record is its own claim, so it outdates nothing before it is used here.
    """
    contents: dict[Folder, list[Summary]] = {}
    for folder in folders(root, report):
        faults: list[Fault] = []
        contents[folder] = list(summaries_of(root, folder, faults.append, full=True))
        yield from _damaged(faults, report)
    claimed: dict[Folder, datetime] = {}
    newest: dict[str, tuple[datetime, Folder]] = {}
    for folder, entries in contents.items():
        if entries:
            claimed[folder] = max(entry.head.created_at for entry in entries)
        used = max(filter(None, map(_used_since, entries)), default=None)
        if used is not None and (folder.gpu not in newest or used > newest[folder.gpu][0]):
            newest[folder.gpu] = used, folder
    answered = {
        entry.key for entries in contents.values() for entry in entries if entry.clock == CLOCK
    }
    for folder, entries in contents.items():
        # A folder with only misses, in neither, belongs to an environment yet to be tuned.
        superseded = False
        if before is None and folder in claimed and folder.gpu in newest:
            latest, current = newest[folder.gpu]
            other = folder.environment_digest != current.environment_digest
            superseded = other and claimed[folder] <= latest
        for entry in entries:
            if superseded:
                yield Removal(entry.path, "record", "an older environment of this GPU")
            elif before is not None and entry.head.created_at < before:
                yield Removal(entry.path, "record", f"created {entry.record.created}")
            elif folder.is_old and entry.key in answered:
                yield Removal(entry.path, "record", "of an older schema, and measured again")
        if superseded:
            yield from misses(folder, "an older environment of this GPU")
        yield from _leftovers(folder)
    for path in files(root / NOTES, NOTE_FILE):
        if is_older(path, STALE_NOTES_SECONDS):
            yield Removal(path, "notes", "nothing was noted there for a month")


def remove(root: Path, removals: Iterable[Removal], report: Report) -> int:
    """Remove the files, a record's lock with the record, and the folders that become empty.

    Returns how many were removed. Those that could not be, for instance held locks, are reported.
    """
    removed = 0
    touched: dict[Path, None] = {}
    inside = os.path.realpath(root)
    for removal in removals:
        path = removal.path
        if not Path(os.path.realpath(path.parent)).is_relative_to(inside):
            report(Fault(path, f"lies outside {root}, through a link"))
            continue
        touched[path.parent] = None
        try:
            if removal.kind == "lock":
                _remove_lock(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            reraise(error)
            report(Fault(path, f"cannot be removed: {error.strerror or error}"))
            continue
        removed += 1
        if removal.kind in ("record", "damaged"):
            # Held by a process that is tuning, or not writable: an empty file remains.
            with suppress(OSError):
                _remove_lock(path.with_name(path.name + LOCK_SUFFIX))
    for folder in touched:
        remove_if_empty(folder, root)
    return removed


def _used_since(entry: Summary) -> datetime | None:
    """When a record was made, at most its file's mtime; None if it was never used here."""
    try:
        status = os.stat(entry.path)
    except OSError as error:
        reraise(error)
        return None
    if not was_used(status):
        return None
    written = datetime.fromtimestamp(status.st_mtime, timezone.utc)
    return min(entry.head.created_at, written)


def _damaged(faults: Iterable[Fault], report: Report) -> Iterator[Removal]:
    """The files that are damaged; other faults are reported."""
    for fault in faults:
        if fault.damaged:
            yield Removal(fault.path, "damaged", fault.reason)
        else:
            report(fault)


def misses(folder: Folder, reason: str) -> Iterator[Removal]:
    """The folder's log of problems that were met and not tuned."""
    path = folder.path / MISSES
    if os.path.isfile(path):
        yield Removal(path, "misses", reason)


def _leftovers(folder: Folder) -> Iterator[Removal]:
    records = {path.name for path in files(folder.path, RECORD)}
    for path in files(folder.path, LOCK):
        if path.name.removesuffix(LOCK_SUFFIX) not in records:
            yield Removal(path, "lock", "without a record")
    for path in files(folder.path, BROKEN):
        yield Removal(path, "damaged", "was set aside")
    for path in leftovers(folder.path):
        yield Removal(path, "temporary", "left by a process that was killed")


def _remove_lock(path: Path) -> None:
    with held_at_once(path) as held:
        if held:
            path.unlink()
