"""A run's results as one self-contained HTML page, without scripts or network access."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tmm_cache import markup

from tmm_core.bench import report
from tmm_core.bench.charts import Line, Point, Row, plane, rows
from tmm_core.bench.results import OTHER_CLOCKS, Document, Results
from tmm_core.bench.runner import TMM, TORCH

NAME = "report.html"

#: Colours of :data:`tmm_core.bench.results.OTHER_CLOCKS`.
_CLOCK_SERIES = ("torch", "lost", "other")

_STYLE = """
:root { --ink: #1b1f24; --paper: #fff; --faint: #d8dee4; --tmm: #0072b2; --torch: #e69f00;
        --lost: #d55e00; --other: #009e73; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #15191e; --faint: #343b43; --tmm: #56b4e9; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); } .grid { stroke: var(--faint); } .middle { stroke: var(--ink); }
circle { fill-opacity: .55; } .tmm { fill: var(--tmm); } .torch { fill: var(--torch); }
.lost { fill: var(--lost); } .other { fill: var(--other); } .mark { stroke: var(--ink); }
table { border-collapse: collapse; font-size: .85rem; display: block; overflow-x: auto; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid var(--faint); white-space: nowrap; }
.key span { display: inline-block; width: .8em; height: .8em; border-radius: 50%; }
"""


def save(results: Results, folder: Path) -> Path:
    """Write the page into ``folder``; returns its file."""
    path = folder / NAME
    path.write_text(html(results), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Page:
    """The page of results, for display in a notebook: ``Page(Results.read([folder]))``."""

    results: Results

    def _repr_html_(self) -> str:
        # In a frame, to keep its style sheet out of the notebook.
        frame = 'style="width:100%;height:42rem;border:0"'
        return f'<iframe {frame} srcdoc="{escape(html(self.results))}"></iframe>'


def html(results: Results) -> str:
    """The whole page."""
    run = results.runs[-1] if results.runs else None
    name = escape(run["environment"]["name"] if run else "an unknown device")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>tmm against torch on {name}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>tmm against torch on {name}</h1>\n{body(results)}\n</body></html>\n"
    )


def body(results: Results) -> str:
    """The sections below the title; those without data are left out."""
    measured = results.measured
    parts = [
        _runs(results),
        markup.table(report.SUMMARY_COLUMNS, report.summaries(results), report.SUMMARY_NUMBERS),
    ]
    if measured:
        parts += [
            _section(
                "Ratios by class",
                "torch's time over tmm's in use, a point for each problem and a diamond for their "
                "geometric mean: right of 1 tmm is faster.",
                rows(_ratio_rows(measured), "torch / tmm"),
                key={"tmm": "tmm", "lost": f"below {report.LOST}"},
            ),
            _section(
                "Roofline",
                "Rate of each problem over its arithmetic intensity. The lines are the highest "
                "bandwidth and rate that a problem of these runs reached, not data-sheet values.",
                _roofline(measured),
                key={"tmm": "tmm", "torch": "torch"},
            ),
        ]
    if clocks := _clock_rows(measured):
        parts.append(
            _section(
                "Clocks side by side",
                "torch's time over tmm's by each clock, geometric means as diamonds. In use "
                "decides: calls over many weights in turn. Alone is one launch after a flush of "
                "the L2, steady the chain without pause, between a chain with a small kernel "
                "between its calls. In the table: geometric mean / worst.",
                rows(clocks, "torch / tmm")
                + markup.table(report.CLOCK_COLUMNS, report.clocks(results)),
                key={"tmm": "in use", **dict(zip(_CLOCK_SERIES, OTHER_CLOCKS, strict=True))},
            )
        )
    if results.regrets:
        parts.append(
            _section(
                "Random M, weight and epilogue",
                "Problems that were not tuned, with one choice per bucket of M.",
                markup.table(report.REGRET_COLUMNS, report.regrets(results)),
                key={},
            )
        )
    if measured:
        parts.append(_section("Problems", "", _problems(measured), key={}))
    return "\n".join(parts)


def _section(title: str, text: str, content: str, *, key: dict[str, str]) -> str:
    colours = " &nbsp; ".join(
        f'<span style="background:var(--{series})"></span> {escape(label)}'
        for series, label in key.items()
    )
    said = f"<p>{escape(text)}</p>" if text else ""
    shown = f'<p class="key">{colours}</p>' if key else ""
    return f"<section><h2>{escape(title)}</h2>{said}{shown}{content}</section>"


def _runs(results: Results) -> str:
    if not results.runs:
        return ""
    runs = [(run["started"], f"tmm {run['tmm']}, {report.commit(run)}") for run in results.runs]
    return markup.facts([*report.versions(results.runs[-1]), *runs])


def _grouped(documents: Iterable[Document]) -> dict[str, list[Document]]:
    return {
        f"{suite} {dtype.removeprefix('float8_')}": members
        for (suite, dtype), members in report.by_class(documents).items()
    }


def _ratio_rows(measured: Sequence[Document]) -> list[Row]:
    found = []
    for label, documents in _grouped(measured).items():
        points = [
            Point(d["ratio"], report.line(d), "tmm" if d["ratio"] >= report.LOST else "lost")
            for d in documents
        ]
        found.append(Row(label, points, [_mean(points, label)]))
    return found


def _mean(points: Sequence[Point], label: str, series: str = "tmm") -> Point:
    mean = statistics.geometric_mean([point.x for point in points])
    return Point(mean, f"{label}: geometric mean {mean:.3f} of {len(points)}", series)


def _roofline(measured: Sequence[Document]) -> str:
    points = []
    for document in measured:
        intensity = document["flops"] / document["bytes"]
        for series in (TORCH, TMM):
            us = document["times"][series]["median_us"]
            said = f"{report.title(document)}: {series} {us:.2f} µs"
            points.append(Point(intensity, said, series, document["flops"] / us / 1e6))
    bandwidth = max(point.y / point.x for point in points)  # TFLOPS over FLOP/byte: TB/s
    rate = max(point.y for point in points)
    knee = rate / bandwidth
    least, most = (pick([knee, *(point.x for point in points)]) for pick in (min, max))
    lines = [
        Line(
            (min(least, knee), min(least, knee) * bandwidth), (knee, rate), f"{bandwidth:.2f} TB/s"
        ),
        Line((knee, rate), (most, rate), f"{rate:.0f} TFLOPS"),
    ]
    return plane(points, lines, "FLOP / byte", "TFLOPS")


def _clock_rows(measured: Sequence[Document]) -> list[Row]:
    series = dict(zip(OTHER_CLOCKS, _CLOCK_SERIES, strict=True))
    found = []
    for label, documents in _grouped(measured).items():
        marks = [_mean([Point(d["ratio"], "") for d in documents], f"{label} in use")]
        points = [Point(d["ratio"], f"in use: {report.line(d)}") for d in documents]
        for clock, colour in series.items():
            taken = [
                Point(ratio, f"{clock} {ratio:.3f}×: {report.title(d)}", colour)
                for d in documents
                if (ratio := report.clock_ratio(d, clock)) is not None
            ]
            if taken:
                points += taken
                marks.append(_mean(taken, f"{label} {clock}", colour))
        if len(marks) > 1:
            found.append(Row(label, points, marks))
    return found


def _problems(measured: Sequence[Document]) -> str:
    columns, cells = report.problem_table(measured)
    numbers = [name for name in columns if name not in ("problem", "kernel", "origin")]
    rows = [(document["suite"], *row) for document, row in zip(measured, cells, strict=True)]
    return markup.table(("class", *columns), rows, numbers)
