"""The command's human-readable output: tables, and one record in full.

No line is longer than the terminal, or than 100 columns elsewhere; `--json` leaves nothing out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from tmm_cache import columns as layout
from tmm_cache import evidence, facets
from tmm_cache.console import counted
from tmm_cache.differences import Difference
from tmm_cache.head import Best
from tmm_cache.keys import Document
from tmm_cache.record import CLOCK, TuningRecord
from tmm_cache.scan import Summary


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str] | str],
    right: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print a table on stdout, as `columns.table` lays it out for the terminal or a pipe."""
    lines = layout.table(columns, rows, layout.width(), right=right, optional=optional)
    print("\n".join(lines))


_NUMBERS = ("µs", "blas µs", "vs blas", "age")
_COLUMNS = ("", "M", "epilogue", "kernel", "config", *_NUMBERS, "record")
#: Columns that a narrow table drops, least important first.
_OPTIONAL = ("config", "blas µs", "age")


def print_summaries(found: Sequence[Summary], layers: Mapping[Path, str], *, each: bool) -> None:
    """Print one table per layer, GPU, environment and clock, with a heading for each weight and
    dtype, and a row for each range of M that one kernel won, or for each record."""

    # Keyed once: with 10,000 records each pass over the problems takes 10 ms.
    keyed = sorted(map(_keyed, found), key=lambda one: one[:-1])
    before = ""
    for _, members in groupby(keyed, key=lambda one: one.place):
        of_place = list(members)
        rows: list[tuple[str, ...] | str] = []
        for _, group in groupby(of_place, key=lambda one: one.weight):
            of_weight = list(group)
            rows.append(_heading(of_weight))
            if each:
                rows += [_row([one]) for one in of_weight]
            else:
                runs = groupby(of_weight, key=lambda one: (one.expression, one.kernel))
                rows += [_row(list(run)) for _, run in runs]
        one = of_place[0].summary
        clock = "" if one.clock == CLOCK else f", clock {facets.printable(one.clock)}"
        title = f"{counted(len(of_place), 'record')}, {layers[one.root]}{clock}"
        print(before, end="")
        for text in (title, f"{one.gpu}, environment {one.environment_digest}"):
            print("\n".join(layout.paragraph(text, layout.width())))
        before = "\n"
        print_table(_COLUMNS, rows, _NUMBERS, _OPTIONAL)


class _Keyed(NamedTuple):
    """A record with its sort key: the fields it is grouped by, then M."""

    place: tuple[str, ...]
    weight: tuple[Any, ...]
    expression: str
    m: Any
    digest: str
    kernel: str
    summary: Summary


def _keyed(summary: Summary) -> _Keyed:
    problem = summary.problem
    m, n, k = facets.sizes(problem)
    return _Keyed(
        (str(summary.root), summary.gpu, summary.environment_digest, summary.clock),
        (n, k, problem.get("batch"), facets.dtypes(problem, short=True), facets.layouts(problem)),
        facets.expression(problem),
        m,
        summary.digest,
        summary.head.best.kernel,
        summary,
    )


def _heading(members: Sequence[_Keyed]) -> str:
    """`weight 4096x1024 bf16, row x column: M 1…512, 3 records`."""
    *_, dtypes, layouts = members[0].weight
    sizes = _range([one.m for one in members], facets.text_of)
    return (
        f"weight {facets.weight(members[0].summary.problem)} {dtypes}, {layouts}: "
        f"M {sizes}, {counted(len(members), 'record')}"
    )


def _row(members: Sequence[_Keyed]) -> tuple[str, ...]:
    best = [one.summary.head.best for one in members]
    alone = len(members) == 1
    return (
        "",
        _range([one.m for one in members], facets.text_of),
        members[0].expression,
        facets.printable(best[0].kernel),
        facets.config(best[0].config) if alone else "",
        _range([one.us for one in best], evidence.microseconds),
        _range([one.blas_us for one in best], evidence.microseconds),
        _range([one.speedup for one in best], times),
        facets.age(max(one.summary.head.created_at for one in members)),
        members[0].digest[:8] if alone else f"{len(members)} of them",
    )


def _range(values: Sequence[Any], text: Callable[[Any], str]) -> str:
    """`1…4096`, or the only value."""
    known = [value for value in values if value is not None]
    if not known:
        return facets.ABSENT
    least, most = text(min(known)), text(max(known))
    return least if least == most else f"{least}…{most}"


#: Kinds of differences that are listed of one GPU.
_MOST_KINDS = 8


def print_kinds(found: Sequence[Difference]) -> None:
    """Print how many problems two caches would answer differently, by GPU, kind of difference and
    winners; the most frequent first."""
    rows: list[tuple[str, ...] | str] = []
    for gpu, members in groupby(sorted(found, key=lambda row: row.key), lambda row: row.key[0]):
        counts = Counter((row.what, _winners(row)) for row in members)
        kinds = sorted(counts.items(), key=lambda kind: (-kind[1], kind[0]))
        rows.append(f"{gpu}: {counted(sum(count for _, count in kinds), 'difference')}")
        rows += [(what, str(count), winners) for (what, winners), count in kinds[:_MOST_KINDS]]
        if rest := sum(count for _, count in kinds[_MOST_KINDS:]):
            rows.append(("others", str(rest), "listed by --each"))
    print_table(("difference", "problems", "winner: A | B"), rows, ("problems",))


def print_differences(found: Sequence[Difference]) -> None:
    """Print each problem that two caches would answer differently, under its GPU and environment,
    with the winner, time and config of each."""
    rows: list[tuple[str, ...] | str] = []
    for (gpu, environment), members in groupby(found, key=lambda row: row.key[:2]):
        rows.append(f"{gpu}, environment {environment}")
        for row in members:
            problem, both = row.either.problem, [each for each in (row.a, row.b) if each]
            times = " | ".join(evidence.microseconds(each.head.best.us) for each in both)
            kind = facets.dtypes(problem, short=True), facets.layouts(problem)
            asked = (facets.shape(problem), *kind, facets.expression(problem))
            rows.append((row.what, row.key[2][:8], *asked, _winners(row), times))
            for name, each in (("A", row.a), ("B", row.b)):
                if each and (config := facets.config(each.head.best.config)):
                    rows.append(f"     {name}: {config}")
    columns = ("difference", "record", "problem", "dtype", "layouts", "epilogue")
    optional = ("layouts", "epilogue", "dtype")
    print_table((*columns, "winner: A | B", "µs: A | B"), rows, ("µs: A | B",), optional)


def _winners(row: Difference) -> str:
    names = dict.fromkeys(
        facets.printable(each.head.best.kernel) for each in (row.a, row.b) if each
    )
    if len(names) == 1 and row.what == "other winner":
        return f"{next(iter(names))}, other config"
    return " | ".join(names)


def print_record(summary: Summary, record: TuningRecord, layer: str) -> None:
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
        ("created", f"{record.created} ({facets.age(record.created_at)} ago)"),
        ("clock", facets.printable(record.clock)),
        ("tuning", f"{record.tuning_seconds:.1f} s"),
        ("speedup", f"{times(Best.of(record).speedup)} over blas"),
    ]
    if record.note is not None:
        lines.append(("note", facets.printable(record.note)))
    for name, text in lines:
        print("\n".join(layout.paragraph(f"{name:<16}{text}", layout.width(), hanging=16)))
    rows: list[tuple[str, ...] | str] = []
    for cells, words in evidence.rows(record.candidates, record.winner):
        rows += [cells, f"     {words}"]
    optional = ("min", "max", "samples", "tolerance", "workspace", "error")
    print_table(evidence.COLUMNS, rows, evidence.NUMBERS, optional)


def _indented(mapping: Document) -> list[tuple[str, str]]:
    return [
        (f"  {facets.printable(name)}", facets.text_of(value)) for name, value in mapping.items()
    ]


def times(value: float | None) -> str:
    """`1.83x`."""
    return facets.ABSENT if value is None else f"{value:.2f}x"
