"""The read-only commands: show, dir, stats, verify.

Each takes the store and its parsed options, and returns the exit status.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

from tmm_cache import evidence, facets
from tmm_cache.console import DONE, FOUND, Noted, counted, note, print_json
from tmm_cache.errors import UsageError
from tmm_cache.files import Fault, read_environment
from tmm_cache.filters import from_options
from tmm_cache.head import Best
from tmm_cache.keys import DIGEST_DIGITS, JSON
from tmm_cache.layout import VERSION
from tmm_cache.misses import read_misses
from tmm_cache.ownership import foreign_below
from tmm_cache.record import SCHEMA, TuningRecord
from tmm_cache.scan import Folder, Summary, folders, summaries, summaries_of
from tmm_cache.store import CacheStore
from tmm_cache.upkeep import leftovers


def show(store: CacheStore, options: Namespace) -> int:
    """List the user's own records, with `--all` also those of the layers, or print the records of
    one digest in full, from any layer."""
    wanted = from_options(options)
    prefix: str | None = options.record
    if prefix is not None and not re.fullmatch(f"[0-9a-f]{{1,{DIGEST_DIGITS}}}", prefix):
        raise UsageError(
            f"record: found {prefix!r}, accepted is the beginning of a digest, like 3f9a"
        )
    looked = (store.root, *store.layers) if options.all or prefix is not None else (store.root,)
    everything = wanted.is_empty and not prefix
    found = [
        summary
        for root in looked
        for summary in summaries(root, Noted().fault)
        if everything or (wanted(summary) and summary.digest.startswith(prefix or ""))
    ]
    # Only those that are printed; None: removed or damaged since the listing.
    loaded = ((each, record) for each in found if (record := each.load()) is not None)
    if options.json:
        print_json([_summary_json(summary, record) for summary, record in loaded])
    if not found:
        note(f"no records{'' if everything else ' match'} in {', '.join(map(str, looked))}")
        if left := [str(layer) for layer in store.layers if layer not in looked]:
            note(f"not looked at: {', '.join(left)}; --all does")
        return DONE if everything else FOUND
    if options.json:
        return DONE
    from tmm_cache import tables

    layers = _layer_names(store)
    if prefix is None:
        tables.print_summaries(found, layers, each=options.each)
    else:
        for summary, record in loaded:
            tables.print_record(summary, record, layers[summary.root])
    return DONE


def directory(store: CacheStore, options: Namespace) -> int:
    """Print the folder of the user's own records."""
    if options.json:
        layers: list[JSON] = [str(layer) for layer in store.layers]
        print_json({"root": str(store.root), "layers": layers, "schema": SCHEMA})
    else:
        print(store.root)
    return DONE


def stats(store: CacheStore, options: Namespace) -> int:
    """Count records, winners, misses and bytes per GPU and environment, from the heads of files:
    `verify` finds faults further on."""
    rows = [
        _statistics(root, folder)
        for root in (store.root, *store.layers)
        for folder in folders(root, Noted().fault)
    ]
    if options.json:
        print_json(rows)
        return DONE
    if not rows:
        note(f"no records in {store.root}")
        return DONE
    from tmm_cache import tables

    layers = {str(root): name for root, name in _layer_names(store).items()}
    columns = (
        *("gpu", "environment", "layer"),
        *("records", "bytes", "misses", "faults", "schema", "winners"),
    )
    tables.print_table(
        columns,
        [
            (
                row["gpu"],
                row["environment_digest"],
                layers[row["layer"]],
                str(row["records"]),
                evidence.bytes_text(row["bytes"]),
                str(row["misses"]),
                str(row["faults"]),
                row["schema"],
                facets.config(row["winners"]),
            )
            for row in rows
        ],
        right=("records", "bytes", "misses", "faults"),
        optional=("bytes", "faults", "layer", "schema"),
    )
    return DONE


def verify(store: CacheStore, options: Namespace) -> int:
    """Read everything and print each fault."""
    records = 0
    faults: list[Fault] = []
    left: list[JSON] = []
    for root in (store.root, *store.layers):
        for folder in folders(root, faults.append):
            records += len(list(summaries_of(root, folder, faults.append, full=True)))
            read_misses(folder.path, faults.append)
            left += map(str, leftovers(folder.path))
    if options.json:
        found: list[JSON] = [
            {"path": str(fault.path), "reason": fault.reason, "damaged": fault.damaged}
            for fault in faults
        ]
        print_json({"records": records, "faults": found, "temporary": left})
    else:
        for fault in faults:
            print(facets.printable(f"{fault.path}: {fault.reason}"))
    for path in left:
        note(f"{path}: left by a process that was killed; a save there or `prune` removes it")
    if others := foreign_below(store.root / VERSION):
        more = f", and {len(others) - 1} more" if len(others) > 1 else ""
        note(f"{others[0]}{more}; such records are verified before their first use")
    note(f"{counted(records, 'good record')}, {counted(len(faults), 'fault')}")
    return FOUND if faults else DONE


def _layer_names(store: CacheStore) -> dict[Path, str]:
    return {store.root: "own"} | {layer: facets.printable(str(layer)) for layer in store.layers}


def _statistics(root: Path, folder: Folder) -> dict[str, Any]:
    faults: list[Fault] = []
    found = list(summaries_of(root, folder, faults.append))
    again: list[Fault] = []  # counted above, or left to `verify`
    environment = read_environment(folder.path, again.append)
    problems = read_misses(folder.path, again.append)
    winners = Counter(summary.head.best.kernel for summary in found)
    times = sorted(summary.head.created_at for summary in found)
    return {
        "layer": str(root),
        "gpu": folder.gpu,
        "environment_digest": folder.environment_digest,
        "environment": environment,
        "schema": folder.schema,
        "records": len(found),
        "bytes": sum(summary.path.stat().st_size for summary in found),
        "misses": len(problems),
        "faults": len(faults),
        "winners": dict(winners.most_common()),
        "oldest": times[0].isoformat() if times else None,
        "newest": times[-1].isoformat() if times else None,
    }


def _summary_json(summary: Summary, record: TuningRecord) -> JSON:
    best = Best.of(record)
    return {
        "digest": summary.digest,
        "path": str(summary.path),
        "layer": str(summary.root),
        "gpu": summary.gpu,
        "environment_digest": summary.environment_digest,
        "environment": summary.environment,
        "median_us": best.us,
        "blas_us": best.blas_us,
        "speedup": best.speedup,
        "record": record.to_json(),
    }
