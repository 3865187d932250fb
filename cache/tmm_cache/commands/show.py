"""The commands that read: show and verify."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from tmm_base import UsageError, console
from tmm_base.console import DONE, FOUND, counted, note, print_json, print_line
from tmm_base.guards import printable

from tmm_cache import problem_fields
from tmm_cache.files import Fault, Report
from tmm_cache.keys import DIGEST_DIGITS, JSON
from tmm_cache.record import Brief, CandidateResult, TuningRecord
from tmm_cache.scan import Summary, briefs, summaries
from tmm_cache.store import CacheStore

_NUMBERS: Final = ("µs", "vs blas")
_COLUMNS: Final = ("problem", "operands, epilogue", "kernel", *_NUMBERS, "record")
#: Digits of a digest in a list. They distinguish most of 10,000 records, and fit 100 columns.
_DIGITS: Final = 6


def show(store: CacheStore, options: Namespace) -> int:
    """List the user's own records, or with `--all` the records of the layers too. A digest prints
    its records in full, from any layer."""
    named = options.record is not None
    roots = (store.root, *store.layers) if options.all or named else (store.root,)
    found = list(selected(roots, options.record, passed_over))
    # None: removed or damaged since the listing.
    whole = ((each, record) for each in found if (record := store.read(each.path)) is not None)
    if options.json:
        print_json([_json(summary, record) for summary, record in whole])
    if not found:
        note(f"no records{' match' if named else ''} in {', '.join(map(str, roots))}")
        if left := [str(layer) for layer in store.layers if layer not in roots]:
            note(f"not listed: {', '.join(left)}; --all does")
        return FOUND if named else DONE
    if options.json:
        return DONE
    if not named:
        _print_list(found, store)
    else:
        for summary, record in whole:
            _print_record(summary, record)
    return DONE


def passed_over(fault: Fault) -> None:
    """Note a file that a command leaves out."""
    note(f"passed over {fault.path}: {fault.reason}")


def selected(roots: Sequence[Path], prefix: str | None, report: Report) -> Iterator[Summary[Brief]]:
    """The records under `roots` whose digest begins with `prefix`; None: all. Raises UsageError
    if `prefix` cannot begin a digest."""
    if prefix is not None and not re.fullmatch(f"[0-9a-f]{{1,{DIGEST_DIGITS}}}", prefix):
        raise UsageError(
            f"record: found {prefix!r}, accepted is the beginning of a digest, like 3f9a"
        )
    for root in roots:
        for summary in briefs(root, report):
            if summary.digest.startswith(prefix or ""):
                yield summary


def verify(store: CacheStore, options: Namespace) -> int:
    """Read everything and print each fault."""
    records = 0
    faults: list[Fault] = []
    for root in (store.root, *store.layers):
        records += sum(1 for _ in summaries(root, faults.append))
    if options.json:
        found = [
            {"path": str(fault.path), "reason": fault.reason, "damaged": fault.damaged}
            for fault in faults
        ]
        print_json({"records": records, "faults": found})
    else:
        for fault in faults:
            print_line(printable(f"{fault.path}: {fault.reason}"))
    note(f"{counted(records, 'good record')}, {counted(len(faults), 'fault')}")
    return FOUND if faults else DONE


def _json(summary: Summary[Brief], record: TuningRecord) -> JSON:
    return {
        "digest": summary.digest,
        "path": str(summary.path),
        "layer": str(summary.root),
        "gpu": summary.gpu,
        "environment_digest": summary.environment_digest,
        "environment": summary.environment,
        "median_us": record.best.median_us,
        "blas_us": record.blas_us,
        "speedup": record.speedup,
        "record": record.to_json(),
    }


def _print_list(found: Sequence[Summary[Brief]], store: CacheStore) -> None:
    """Print one table per layer, GPU and environment, with a row for each record."""

    def size(each: Summary[Brief]) -> tuple[Any, ...]:
        m, n, k = problem_fields.sizes(each.record.problem)
        return n, k, m, each.digest

    # The scan yields the records of one folder after the other.
    for _, folder in groupby(found, lambda each: each.path.parent):
        first, *_ = members = sorted(folder, key=size)
        layer = "own" if first.root == store.root else printable(str(first.root))
        heading = f"{layer} records of {first.gpu}, environment {first.environment_digest}"
        console.print_paragraph(heading)
        console.print_table(_COLUMNS, [_row(each) for each in members], _NUMBERS)


def _row(summary: Summary[Brief]) -> tuple[str, ...]:
    record, problem = summary.record, summary.record.problem
    kind = (
        problem_fields.dtypes(problem, short=True),
        problem_fields.layouts(problem),
        problem_fields.expression(problem).replace("+", " + "),  # so that it folds
    )
    return (
        problem_fields.shape(problem),
        " ".join(kind),
        printable(record.kernel),
        _cell(record.us, ".2f"),
        _cell(record.speedup, ".2f", "x"),
        summary.digest[:_DIGITS],
    )


def _print_record(summary: Summary[Brief], record: TuningRecord) -> None:
    """Print one record with every candidate, the fastest first."""
    lines = [
        ("record", summary.digest),
        ("file", printable(str(summary.path))),
        ("gpu", summary.gpu),
        ("environment", summary.environment_digest),
        ("", problem_fields.config(summary.environment or {})),
        ("problem", problem_fields.config(record.problem)),
        ("created", record.created),
        ("tuning", f"{record.tuning_seconds:.1f} s"),
        ("speedup", f"{_cell(record.speedup, '.2f', 'x')} over blas"),
    ]
    for name, text in lines:
        console.print_paragraph(f"{name:<12}{text}", hanging=12)
    print()
    order = sorted(record.candidates, key=lambda each: each.median_us or float("inf"))
    rows = [_candidate(each, each is record.best) for each in order]
    numbers = ("µs", "samples", "error")
    console.print_table(("", "kernel", "status", *numbers, "reason"), rows, numbers)


def _candidate(result: CandidateResult, is_best: bool) -> tuple[str, ...]:
    return (
        "*" if is_best else "",
        f"{printable(result.kernel)} {problem_fields.config(result.config)}",
        result.status,
        _cell(result.median_us, ".2f"),
        str(len(result.samples_us)),
        _cell(result.error, ".1e"),
        printable(result.reason or ""),
    )


def _cell(value: float | None, form: str, unit: str = "") -> str:
    return problem_fields.ABSENT if value is None else f"{value:{form}}{unit}"
