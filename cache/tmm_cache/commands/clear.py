"""The command that removes records: of the user's own root, and nothing else.

A wrong `rm -r` on the folder in `TMM_CACHE_DIR` can't be undone. So removal works on a list of
single files whose names match the layout. The list is summed up and confirmed first.
"""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tmm_cache.cache_errors import UsageError, reraise
from tmm_cache.commands.filters import Filter
from tmm_cache.console import DONE, FOUND, Noted, can_ask, confirmed, counted, note, print_json
from tmm_cache.disk import remove_if_empty, remove_with_lock
from tmm_cache.files import Report
from tmm_cache.paths import LOCK, MISSES, NOTE_FILE, NOTES, RECORD
from tmm_cache.problem_fields import printable
from tmm_cache.scan import folders, summaries
from tmm_cache.size_limits import files, leftovers
from tmm_cache.store import CacheStore

#: The files of a folder by kind, besides temporary ones.
_KINDS: Final = (
    ("record", RECORD),
    ("misses", re.compile(re.escape(MISSES))),
    ("lock", LOCK),
)


class Removal(NamedTuple):
    """One file to remove."""

    path: Path
    kind: str


def clear(store: CacheStore, options: Namespace) -> int:
    """Remove the records that pass the filters or, without filters, all files of the root."""
    removals = list(_wanted(store.root, Filter.of(options), Noted().fault))
    if not removals:
        note(f"nothing to remove in {store.root}")
        if options.json:
            print_json([])
        return DONE
    records = sum(item.kind == "record" for item in removals)
    what = counted(records, "record")
    if len(removals) > records:
        what += f" and {counted(len(removals) - records, 'other file')}"
    asks = not (options.yes or options.dry_run)
    if asks and not can_ask():
        raise UsageError(f"-y is needed to remove {what} from {store.root} without a terminal")
    if options.json:
        print_json([{"path": str(item.path), "kind": item.kind} for item in removals])
    elif options.dry_run:
        for item in removals:
            print(printable(f"{item.path}  {item.kind}"))
    else:
        alike = Counter((item.path.parent, item.kind) for item in removals)
        for (folder, kind), count in alike.items():
            print(printable(f"{folder}  {count} × {kind}"))
    if options.dry_run:
        note(f"would remove {what} from {store.root}")
        return DONE
    if asks and not confirmed(f"Remove {what} from {store.root}? [y/N] "):
        note("nothing removed")
        return FOUND
    removed = sum(_remove(store.root, item.path) for item in removals)
    for folder in {item.path.parent for item in removals}:
        remove_if_empty(folder, store.root)
    note(f"removed {removed} of {counted(len(removals), 'file')}")
    return FOUND if removed < len(removals) else DONE


def _wanted(root: Path, wanted: Filter, report: Report) -> Iterator[Removal]:
    if not wanted.is_empty:
        found = summaries(root, report, full=True)
        yield from (Removal(entry.path, "record") for entry in found if wanted(entry))
        return
    for folder in folders(root, report):
        for kind, names in _KINDS:
            for path in files(folder.path, names):
                # A record's lock goes with the record.
                if kind != "lock" or not path.with_suffix("").exists():
                    yield Removal(path, kind)
        for path in leftovers(folder.path):
            yield Removal(path, "temporary")
    for path in files(root / NOTES, NOTE_FILE):
        yield Removal(path, "notes")


def _remove(root: Path, path: Path) -> bool:
    """Remove a file, and a record's lock with the record; notes a fault."""
    if not Path(os.path.realpath(path.parent)).is_relative_to(os.path.realpath(root)):
        note(f"{path}: lies outside {root}, through a link")
        return False
    try:
        remove_with_lock(path)
    except OSError as error:
        reraise(error)
        note(f"{path}: cannot be removed: {error.strerror or error}")
        return False
    return True
