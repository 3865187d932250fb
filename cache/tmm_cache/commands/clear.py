"""The command that removes records: of the user's own root, and nothing else.

A wrong `rm -r` on the folder in `TMM_CACHE_DIR` can't be undone. So removal works on a list of
single files whose names match the layout. Without `-y` it prints their paths in the root. Folders
stay, each with its environment: another process may be about to save a record there.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from tmm_base.console import DONE, FOUND, counted, note
from tmm_base.guards import printable, reraise

from tmm_cache.commands.show import passed_over, selected
from tmm_cache.disk import remove_with_lock
from tmm_cache.files import Report
from tmm_cache.paths import LOCK, NOTE_FILE, NOTES, RECORD
from tmm_cache.scan import folders
from tmm_cache.size_limits import files, leftovers
from tmm_cache.store import CacheStore


def clear(store: CacheStore, options: Namespace) -> int:
    """Remove the records whose digest begins with `record` or, without it, all files of the
    root."""
    if options.record is None:
        found = list(_every_file(store.root, passed_over))
    else:
        found = [each.path for each in selected([store.root], options.record, passed_over)]
    if not found:
        note(f"nothing to remove in {store.root}")
        return DONE
    records = sum(RECORD.fullmatch(path.name) is not None for path in found)
    what = counted(records, "record")
    if len(found) > records:
        what += f" and {counted(len(found) - records, 'other file')}"
    if not options.yes:
        for path in found:
            print(printable(str(path.relative_to(store.root))))
        note(f"nothing removed; -y removes {what} from {store.root}")
        return FOUND
    removed = sum(_remove(store.root, path) for path in found)
    note(f"removed {removed} of {counted(len(found), 'file')}")
    return FOUND if removed < len(found) else DONE


def _every_file(root: Path, report: Report) -> Iterator[Path]:
    for folder in folders(root, report):
        yield from files(folder, RECORD)
        # A record's lock goes with the record.
        locks = files(folder, LOCK)
        yield from (path for path in locks if not path.with_suffix("").exists())
        yield from leftovers(folder)
    yield from files(root / NOTES, NOTE_FILE)
    yield from leftovers(root / NOTES)


def _remove(root: Path, path: Path) -> bool:
    """Remove a file, and a record's lock with the record; notes a fault."""
    if not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(root)):
        note(f"{path}: is outside {root}, through a link")
        return False
    try:
        remove_with_lock(path)
    except OSError as error:
        reraise(error)
        note(f"{path}: cannot be removed: {error.strerror or error}")
        return False
    return True
