"""The commands that move choices between caches: freeze, diff, merge.

Each takes the store and its parsed options, and returns the exit status. The other cache is a root
or a lock file.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from tmm_cache.batch import Batch
from tmm_cache.console import DONE, FOUND, Noted, counted, note, print_json
from tmm_cache.differences import differences
from tmm_cache.disk import make_folder, require_target
from tmm_cache.errors import RecordError
from tmm_cache.files import Fault, Stored, read_stored, record_bytes
from tmm_cache.filters import Filter
from tmm_cache.layout import record_path, require_own
from tmm_cache.lock import LockFile, write_lock
from tmm_cache.merge import merged
from tmm_cache.record import CLOCK
from tmm_cache.scan import Key, Summary, summaries
from tmm_cache.store import CacheStore


def freeze(store: CacheStore, options: Namespace) -> int:
    """Write the records of the root and of all layers into one lock file.

    Returns FOUND if a record could not be read and was left out.
    """
    file: Path = options.output or store.lock_path
    if file.parent == store.root:
        make_folder(file.parent)
    require_target(file)
    wanted = Filter(gpu=options.gpu)
    noted = Noted()
    found = (
        summary
        for root in (store.root, *store.layers)
        for summary in summaries(root, noted.fault, full=True)
        if wanted(summary)
    )
    count = write_lock(file, found)
    note(f"{counted(count, 'record')} locked in {file}")
    return DONE if count and not noted.count else FOUND


def diff(store: CacheStore, options: Namespace) -> int:
    """Count how two caches would answer differently; with `--each`, print each difference."""
    noted = Noted()
    mine, theirs = (_answers(source, noted) for source in (options.a, options.b))
    rows = differences(mine, theirs)
    if options.json:
        print_json(
            [
                {
                    "difference": row.what,
                    "gpu": row.key[0],
                    "environment_digest": row.key[1],
                    "digest": row.key[2],
                    "problem": row.either.problem,
                    "a": None if row.a is None else row.a.head.best._asdict(),
                    "b": None if row.b is None else row.b.head.best._asdict(),
                }
                for row in rows
            ]
        )
    elif rows:
        from tmm_cache import tables

        (tables.print_differences if options.each else tables.print_kinds)(rows)
    note(f"{counted(len(rows), 'difference')} in {counted(len(mine | theirs), 'problem')}")
    return FOUND if rows or noted.count else DONE


def merge(store: CacheStore, options: Namespace) -> int:
    """Take better evidence from other caches.

    Returns FOUND if a record could not be read: the own record then stays as it is.
    """
    require_own(store.root)
    added = changed = kept = 0
    noted = Noted()
    sources = [list(_summaries(source, noted)) for source in options.sources]
    for source in sources:
        with Batch() as batch:  # one per source: the next is compared with the result of this one
            for summary in source:
                stored = _stored(summary, noted)
                if stored is None or stored.record.is_hint:
                    continue
                path = record_path(store.root, *summary.key)
                present = read_stored(path)
                if isinstance(present, Fault) and not present.damaged:
                    # The record there may be better, and readable the next time.
                    if present.place:
                        raise OSError(f"{present.path} {present.reason}")
                    noted.fault(present)
                    continue
                record = stored.record
                if isinstance(present, Stored) and not present.record.is_hint:
                    record = merged(present, stored)
                    if record == present.record:
                        kept += 1
                        continue
                try:
                    # Marked as imported: its winner is verified here before its first use.
                    data = record_bytes(record, imported=True)
                except RecordError as error:  # valid each, too many merged
                    note(f"left out {path.name}: {error}")
                    continue
                batch.add(path, data, summary.environment)
                if record is stored.record:
                    added += 1
                else:
                    changed += 1
    note(
        f"{counted(added, 'record')} added to {store.root}, {changed} changed, "
        f"{kept} kept as they were"
    )
    return FOUND if noted.count else DONE


def _summaries(source: Path, noted: Noted, *, full: bool = False) -> Iterator[Summary]:
    """The records of a root or a lock file, `full` as in `summaries`. Raises UsageError for
    anything else."""
    if source.is_dir():
        return summaries(source, noted.fault, full=full)
    return LockFile(source).summaries(noted.fault)


def _answers(source: Path, noted: Noted) -> dict[Key, Summary]:
    # In full: the head of a file written by another program may repeat an older winner.
    found = _summaries(source, noted, full=True)
    return {each.key: each for each in found if each.clock == CLOCK}


def _stored(summary: Summary, noted: Noted) -> Stored | None:
    """The whole record; None if it is gone or has a fault, which is reported."""
    if summary.root.is_file():  # a lock file, already read
        record = summary.load()
        return None if record is None else Stored(record, sealed=True)
    stored = read_stored(summary.path)
    if isinstance(stored, Fault):
        noted.fault(stored)
        return None
    return stored
