"""The commands that write: clear, prune, export, import.

Each takes the store and its parsed options, and returns the exit status. They change only the
user's own root. Removals are summed up and confirmed first; `--dry-run` lists them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from tmm_cache import facets, removal
from tmm_cache.console import (
    DONE,
    FOUND,
    Noted,
    can_ask,
    confirmed,
    counted,
    note,
    print_json,
)
from tmm_cache.disk import require_target
from tmm_cache.errors import UsageError
from tmm_cache.filters import from_options
from tmm_cache.layout import require_own
from tmm_cache.removal import Removal
from tmm_cache.scan import summaries
from tmm_cache.store import CacheStore


def clear(store: CacheStore, options: Namespace) -> int:
    """Remove the records that pass the filters, or everything."""
    found = removal.cleared(store.root, from_options(options), Noted().fault)
    return _remove(store, options, found)


def prune(store: CacheStore, options: Namespace) -> int:
    """Remove what is outdated, damaged or left over."""
    found = removal.outdated(store.root, options.before, Noted().fault)
    return _remove(store, options, found)


def export(store: CacheStore, options: Namespace) -> int:
    """Write the user's own records that pass the filters into an archive.

    Returns FOUND if a record could not be read and was left out.
    """
    from tmm_cache.archive import write_archive

    require_target(options.file)
    wanted = from_options(options)
    noted = Noted()
    found = summaries(store.root, noted.fault, full=True)
    entries = [entry for entry in found if wanted(entry)]
    if not entries:
        note(f"no records{'' if wanted.is_empty else ' match'} in {store.root}; nothing written")
        return FOUND
    count = write_archive(options.file, entries, thin=options.thin)
    note(f"{counted(count, 'record')} written to {options.file}")
    return FOUND if noted.count else DONE


def import_(store: CacheStore, options: Namespace) -> int:
    """Write an archive's records into the user's own root."""
    from tmm_cache.archive import read_archive

    require_own(store.root)
    imported = read_archive(options.file, store.root, options.force)
    for name, reason in imported.faults:
        note(f"left out {name}: {reason}")
    if imported.ignored:
        note(f"left out {counted(imported.ignored, 'file')} that a cache does not have")
    kept = f", {imported.kept} kept that were as new or newer" if imported.kept else ""
    note(f"{counted(imported.written, 'record')} written to {store.root}{kept}")
    return FOUND if imported.faults else DONE


def _remove(store: CacheStore, options: Namespace, found: Iterator[Removal]) -> int:
    removals = list(found)
    if not removals:
        note(f"nothing to remove in {store.root}")
        if options.json:
            print_json([])
        return DONE
    records = sum(item.kind == "record" for item in removals)
    what = counted(records, "record")
    if len(removals) > records:
        what += f" and {counted(len(removals) - records, 'other file')}"
    asked = not (options.yes or options.dry_run)
    if asked and not can_ask():
        raise UsageError(f"-y is needed to remove {what} from {store.root} without a terminal")
    if options.json:
        print_json(
            [
                {"path": str(item.path), "kind": item.kind, "reason": item.reason}
                for item in removals
            ]
        )
    elif options.dry_run:
        for item in removals:
            print(facets.printable(f"{item.path}  {item.kind}: {item.reason}"))
    else:
        _sum_up(removals)
    if options.dry_run:
        note(f"would remove {what} from {store.root}")
        return DONE
    if asked and not confirmed(f"Remove {what} from {store.root}? [y/N] "):
        note("nothing removed")
        return FOUND
    removed = removal.remove(
        store.root, removals, lambda fault: note(f"{fault.path}: {fault.reason}")
    )
    note(f"removed {removed} of {counted(len(removals), 'file')}")
    return FOUND if removed < len(removals) else DONE


def _sum_up(removals: Sequence[Removal]) -> None:
    """Print a line for the files that share folder, kind and reason; a single file is named."""
    alike: dict[tuple[Path, str, str], list[Path]] = {}
    for item in removals:
        alike.setdefault((item.path.parent, item.kind, item.reason), []).append(item.path)
    for (folder, kind, reason), paths in alike.items():
        what = f"{paths[0]}  {kind}" if len(paths) == 1 else f"{folder}  {len(paths)} × {kind}"
        print(facets.printable(f"{what}: {reason}"))
