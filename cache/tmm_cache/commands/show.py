"""The commands that read: show and verify.

No line of a table is longer than the terminal, or than 100 columns elsewhere; `--json` leaves
nothing out.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from tmm_cache import console, measurements, problem_fields
from tmm_cache.cache_errors import UsageError
from tmm_cache.commands.filters import Filter
from tmm_cache.console import DONE, FOUND, Noted, counted, note, print_json
from tmm_cache.files import Fault
from tmm_cache.header import Best
from tmm_cache.keys import DIGEST_DIGITS, JSON, Document
from tmm_cache.ownership import foreign_below
from tmm_cache.paths import VERSION
from tmm_cache.problem_fields import printable
from tmm_cache.record import TuningRecord
from tmm_cache.scan import Summary, folders, summaries, summaries_of
from tmm_cache.size_limits import leftovers
from tmm_cache.store import CacheStore

_NUMBERS: Final = ("µs", "blas µs", "vs blas", "age")
_COLUMNS: Final = ("weight", "dtype", "layouts", "epilogue", "M", "kernel", "config", *_NUMBERS)
#: Columns that a narrow table drops, least important first.
_OPTIONAL: Final = ("config", "blas µs", "layouts", "age")
#: Digits of a digest in a list: they tell 10,000 records apart in most cases, and fit 100 columns.
_DIGITS: Final = 6


def show(store: CacheStore, options: Namespace) -> int:
    """List the user's own records, or with `--all` the records of the layers too. A digest prints
    its records in full, from any layer."""
    wanted = Filter.of(options)
    prefix: str | None = options.record
    if prefix is not None and not re.fullmatch(f"[0-9a-f]{{1,{DIGEST_DIGITS}}}", prefix):
        raise UsageError(
            f"record: found {prefix!r}, accepted is the beginning of a digest, like 3f9a"
        )
    roots = (store.root, *store.layers) if options.all or prefix is not None else (store.root,)
    everything = wanted.is_empty and not prefix
    found = [
        summary
        for root in roots
        for summary in summaries(root, Noted().fault)
        if everything or (wanted(summary) and summary.digest.startswith(prefix or ""))
    ]
    # Only those that are printed; None: removed or damaged since the listing.
    loaded = ((each, record) for each in found if (record := each.load()) is not None)
    if options.json:
        print_json([_json(summary, record) for summary, record in loaded])
    if not found:
        note(f"no records{'' if everything else ' match'} in {', '.join(map(str, roots))}")
        if left := [str(layer) for layer in store.layers if layer not in roots]:
            note(f"not listed: {', '.join(left)}; --all does")
        return DONE if everything else FOUND
    if options.json:
        return DONE
    if prefix is None:
        _print_list(found, store, each=options.each)
    else:
        for summary, record in loaded:
            _print_record(summary, record, store)
    return DONE


def verify(store: CacheStore, options: Namespace) -> int:
    """Read everything and print each fault."""
    records = 0
    faults: list[Fault] = []
    left: list[str] = []
    for root in (store.root, *store.layers):
        for folder in folders(root, faults.append):
            records += len(list(summaries_of(root, folder, faults.append, full=True)))
            left += map(str, leftovers(folder.path))
    if options.json:
        found = [
            {"path": str(fault.path), "reason": fault.reason, "damaged": fault.damaged}
            for fault in faults
        ]
        print_json({"records": records, "faults": found, "temporary": left})
    else:
        for fault in faults:
            print(printable(f"{fault.path}: {fault.reason}"))
    for path in left:
        note(f"{path}: left by a process that was killed; a save there removes it")
    if others := foreign_below(store.root / VERSION):
        more = f", and {len(others) - 1} more" if len(others) > 1 else ""
        note(f"{others[0]}{more}; such records are verified before their first use")
    note(f"{counted(records, 'good record')}, {counted(len(faults), 'fault')}")
    return FOUND if faults else DONE


def _json(summary: Summary, record: TuningRecord) -> JSON:
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


def _layer(root: Path, store: CacheStore) -> str:
    return "own" if root == store.root else printable(str(root))


def _print_list(found: Sequence[Summary], store: CacheStore, *, each: bool) -> None:
    """Print one table per layer, GPU and environment, with a row for each range of M of a
    weight, dtype and epilogue that one kernel won, or for each record."""
    # Keyed once: with 10,000 records each pass over the problems takes 10 ms.
    keyed = sorted(map(_keyed, found), key=lambda pair: pair[0])
    before = ""
    for (root, gpu, environment), members in groupby(keyed, lambda pair: pair[0][0]):
        of_table = list(members)
        runs = groupby(of_table, key=lambda pair: pair if each else _run(*pair))
        rows = [_row([summary for _, summary in run]) for _, run in runs]
        title = f"{counted(len(of_table), 'record')}, {_layer(Path(root), store)}"
        print(before, end="")
        for text in (title, f"{gpu}, environment {environment}"):
            print("\n".join(console.paragraph(text, console.width())))
        before = "\n"
        console.print_table((*_COLUMNS, "record"), rows, _NUMBERS, _OPTIONAL, ("record",))


def _keyed(summary: Summary) -> tuple[tuple[Any, ...], Summary]:
    """A record with its sort key: its table, the fields that a row shares, M and the digest."""
    problem = summary.problem
    m, n, k = problem_fields.sizes(problem)
    dtypes, layouts = problem_fields.dtypes(problem, short=True), problem_fields.layouts(problem)
    shared = (n, k, str(problem.get("batch")), dtypes, layouts, problem_fields.expression(problem))
    table = (str(summary.root), summary.gpu, summary.environment_digest)
    return (table, shared, m, summary.digest), summary


def _run(key: tuple[Any, ...], summary: Summary) -> tuple[Any, ...]:
    return (*key[:2], summary.header.best.kernel)


def _row(members: Sequence[Summary]) -> tuple[str, ...]:
    problem, best = members[0].problem, [each.header.best for each in members]
    alone = len(members) == 1
    return (
        problem_fields.weight(problem),
        problem_fields.dtypes(problem, short=True),
        problem_fields.layouts(problem),
        problem_fields.expression(problem).replace("+", " + "),  # so that it folds
        _range([each.problem.get("m") for each in members], problem_fields.text_of),
        printable(best[0].kernel),
        problem_fields.config(best[0].config) if alone else "",
        _range([each.us for each in best], measurements.microseconds),
        _range([each.blas_us for each in best], measurements.microseconds),
        _range([each.speedup for each in best], _times),
        problem_fields.age(max(each.header.created_at for each in members)),
        members[0].digest[:_DIGITS] if alone else f"{len(members)} of them",
    )


def _range(values: Sequence[Any], text: Callable[[Any], str]) -> str:
    """`1 … 4096`, or the only value: spaces let a narrow column fold it."""
    known = [value for value in values if value is not None]
    if not known:
        return problem_fields.ABSENT
    least, most = text(min(known)), text(max(known))
    return least if least == most else f"{least} … {most}"


def _print_record(summary: Summary, record: TuningRecord, store: CacheStore) -> None:
    """Print one record with every candidate."""
    lines: list[tuple[str, str]] = [
        ("record", summary.digest),
        ("file", printable(str(summary.path))),
        ("layer", _layer(summary.root, store)),
        ("gpu", summary.gpu),
        ("environment", summary.environment_digest),
        *_indented(summary.environment or {}),
        ("problem", problem_fields.shape(record.problem)),
        *_indented(record.problem),
        ("created", f"{record.created} ({problem_fields.age(record.created_at)} ago)"),
        ("tuning", f"{record.tuning_seconds:.1f} s"),
        ("speedup", f"{_times(Best.of(record).speedup)} over blas"),
    ]
    for name, text in lines:
        print("\n".join(console.paragraph(f"{name:<16}{text}", console.width(), hanging=16)))
    rows: list[tuple[str, ...] | str] = []
    for cells, words in measurements.rows(record.candidates, record.winner):
        rows += [cells, f"     {words}"]
    optional = ("min", "max", "samples", "tolerance", "workspace", "error")
    console.print_table(measurements.COLUMNS, rows, measurements.NUMBERS, optional)


def _indented(mapping: Document) -> list[tuple[str, str]]:
    return [
        (f"  {printable(name)}", problem_fields.text_of(value)) for name, value in mapping.items()
    ]


def _times(value: float | None) -> str:
    """`1.83x`."""
    return problem_fields.ABSENT if value is None else f"{value:.2f}x"
