"""What the command prints for people: tables and one record in full.

On a terminal a table keeps to its width. Elsewhere every line is as long as it needs to be, since
a cut-off kernel name in a log or under `grep` is wrong and not just ugly.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from tmm_cache import facets
from tmm_cache.console import note
from tmm_cache.head import Best
from tmm_cache.keys import JSON
from tmm_cache.record import CLOCK, TuningRecord
from tmm_cache.scan import Summary

_WIDE = 100_000
_GAP = 2


def microseconds(value: float | None) -> str:
    """A time to the hundredth of a microsecond, beyond what a GPU clock resolves."""
    return facets.ABSENT if value is None else f"{value:.2f}"


def bytes_text(count: int) -> str:
    """`1.5 KiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print a table on stdout.

    The columns in `right` are of numbers. Where a terminal is too narrow, those in `optional` are
    left out, the first of them first, and a note says so.
    """
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
    if sum(widths) + _GAP * (len(widths) - 1) > width:
        _print_folded(columns, rows, right, optional, width)
        return
    rule = "─" * (sum(widths) + _GAP * (len(widths) - 1))
    sides = [str.rjust if name in right else str.ljust for name in columns]
    for cells in (columns, None, *rows):
        if cells is None:
            print(rule)
            continue
        padded = [side(cell, size) for side, cell, size in zip(sides, cells, widths, strict=True)]
        print((" " * _GAP).join(padded).rstrip())


def _print_folded(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str],
    optional: Sequence[str],
    width: int,
) -> None:
    # rich costs 45 ms and 0.5 ms a row, so it prints only what has to be folded.
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=width, markup=False, highlight=False, emoji=False)
    kept = _fitting(columns, rows, optional, width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index in kept:
        numeric = columns[index] in right
        table.add_column(
            columns[index],
            justify="right" if numeric else "left",
            no_wrap=numeric,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    # Captured after a flush, because rich answers a closed pipe by ending the process with 1.
    sys.stdout.flush()
    with console.capture() as captured:
        console.print(table)
    # rich pads cells to the column's width, to the right of the last column too.
    print("\n".join(line.rstrip() for line in captured.get().strip("\n").splitlines()))
    if len(kept) < len(columns):
        missing = [name for index, name in enumerate(columns) if index not in kept]
        note(f"left out for want of width: {', '.join(missing)}")


def _fitting(
    columns: Sequence[str], rows: Sequence[Sequence[str]], optional: Sequence[str], width: int
) -> list[int]:
    widths = [
        _GAP + max([len(name), *(len(row[index]) for row in rows)])
        for index, name in enumerate(columns)
    ]
    kept = list(range(len(columns)))
    for name in optional:
        if sum(widths[index] for index in kept) <= width:
            break
        kept.remove(columns.index(name))
    return kept


def print_summaries(found: Sequence[Summary], layers: Mapping[Path, str], now: datetime) -> None:
    """One table per GPU and environment, a line for each record."""

    def group(summary: Summary) -> tuple[str, str]:
        return summary.gpu, summary.environment_digest

    def order(summary: Summary) -> tuple[Any, ...]:
        return (*group(summary), *facets.sizes(summary.problem), summary.digest, str(summary.root))

    for (gpu, environment), members in groupby(sorted(found, key=order), key=group):
        print(f"{gpu}  environment {environment}")
        print_table(
            (
                "record",
                "M x N x K",
                "dtype",
                "layouts",
                "epilogue",
                "kernel",
                "config",
                "µs",
                "blas µs",
                "speedup",
                "age",
                "layer",
            ),
            [_row(summary, layers[summary.root], now) for summary in members],
            right=("µs", "blas µs", "speedup", "age"),
            optional=("config", "layouts", "layer", "blas µs", "age"),
        )


def _row(summary: Summary, layer: str, now: datetime) -> tuple[str, ...]:
    problem, best = summary.problem, summary.head.best
    return (
        summary.digest[:8],
        facets.shape(problem),
        facets.dtypes(problem),
        facets.layouts(problem),
        facets.epilogue(problem),
        facets.printable(best.kernel),
        facets.config(best.config),
        microseconds(best.us),
        microseconds(best.blas_us),
        _times(best.speedup),
        facets.age(summary.head.created_at, now),
        layer if summary.clock == CLOCK else f"{layer}, {facets.printable(summary.clock)}",
    )


def print_record(summary: Summary, record: TuningRecord, layer: str, now: datetime) -> None:
    """One record with every candidate."""
    lines: list[tuple[str, str]] = [
        ("record", summary.digest),
        ("file", facets.printable(str(summary.path))),
        ("layer", layer),
        ("gpu", summary.gpu),
        ("environment", summary.environment_digest),
        *_indented(summary.environment or {}),
        ("problem", facets.shape(record.problem)),
        *_indented(record.problem),
        ("created", f"{record.created} ({facets.age(record.created_at, now)} ago)"),
        ("clock", facets.printable(record.clock)),
        ("tuning", f"{record.tuning_seconds:.1f} s"),
        ("speedup", f"{_times(Best.of(record).speedup)} over blas"),
    ]
    if record.note is not None:
        lines.append(("note", facets.printable(record.note)))
    for name, text in lines:
        print(f"{name:<16}{text}")
    _print_candidates(record)


def _indented(mapping: Mapping[str, JSON]) -> list[tuple[str, str]]:
    return [
        (f"  {facets.printable(name)}", facets.text_of(value)) for name, value in mapping.items()
    ]


def _print_candidates(record: TuningRecord) -> None:
    def error(value: float | None) -> str:
        return facets.ABSENT if value is None else f"{value:.2e}"

    order = sorted(
        range(len(record.candidates)),
        key=lambda index: (index != record.winner, record.candidates[index].median_us or 1e300),
    )
    rows = []
    for index in order:
        result = record.candidates[index]
        traits = [
            *(["deterministic"] if result.deterministic else []),
            *(["batch-invariant"] if result.batch_invariant else []),
        ]
        rows.append(
            (
                "*" if index == record.winner else "",
                facets.printable(result.kernel),
                facets.printable(result.version),
                facets.config(result.config),
                result.status,
                microseconds(result.median_us),
                microseconds(min(result.samples_us, default=None)),
                microseconds(max(result.samples_us, default=None)),
                str(len(result.samples_us)),
                error(result.error),
                error(result.tolerance),
                bytes_text(result.workspace_bytes),
                " ".join(traits) or facets.ABSENT,
                facets.ABSENT if result.reason is None else facets.printable(result.reason),
            )
        )
    print_table(
        (
            "",
            "kernel",
            "version",
            "config",
            "status",
            "median µs",
            "min",
            "max",
            "samples",
            "error",
            "tolerance",
            "workspace",
            "traits",
            "reason",
        ),
        rows,
        right=("median µs", "min", "max", "samples", "error", "tolerance", "workspace"),
        optional=("min", "max", "samples", "version", "traits", "tolerance", "workspace", "error"),
    )


def _times(value: float | None) -> str:
    return facets.ABSENT if value is None else f"{value:.2f}x"
