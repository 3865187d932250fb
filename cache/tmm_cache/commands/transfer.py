"""The commands that carry records to other machines: export, import and freeze."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from tmm_base.console import DONE, FOUND, counted, note

from tmm_cache.commands.show import passed_over
from tmm_cache.disk import make_folder, require_target
from tmm_cache.files import Fault
from tmm_cache.paths import require_own
from tmm_cache.scan import summaries
from tmm_cache.store import CacheStore
from tmm_cache.transport import import_records, write_transport


def export(store: CacheStore, options: Namespace) -> int:
    """Write the user's own records into one file."""
    return _write([store.root], options.file)


def freeze(store: CacheStore, options: Namespace) -> int:
    """Write the records of the root and of all layers into the lock file."""
    file: Path = options.output or store.lock_path
    if file.parent == store.root:
        make_folder(file.parent)
    return _write([store.root, *store.layers], file)


def _write(roots: Iterable[Path], file: Path) -> int:
    """FOUND if there is no record, or one could not be read and was left out."""
    require_target(file)
    faults: list[Fault] = []
    found = (each for root in roots for each in summaries(root, faults.append))
    count = write_transport(file, found, faults.append)
    for fault in dict.fromkeys(faults):
        passed_over(fault)
    note(f"{counted(count, 'record')} written to {file}")
    return DONE if count and not faults else FOUND


def import_(store: CacheStore, options: Namespace) -> int:
    """Write a file's records into the user's own root."""
    require_own(store.root)
    imported = import_records(options.file, store.root, options.force)
    for reason in imported.faults:
        note(f"left out {reason}")
    kept = f", {imported.kept} kept that were as new or newer" if imported.kept else ""
    note(f"{counted(imported.written, 'record')} written to {store.root}{kept}")
    return FOUND if imported.faults else DONE
