"""Charts of results, drawn by matplotlib: as PNG beside the results, as SVG in the page."""

from __future__ import annotations

import operator
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tmm_core.bench import report, series
from tmm_core.bench.results import OTHER_CLOCKS, Document, Results
from tmm_core.bench.runner import TMM, TORCH
from tmm_core.bench.suites import SWEEP

#: Label, colour and line style of each column that is drawn.
Lines = Mapping[str, tuple[str, Any, str]]
#: Colour of each label, and its ratio for each document, if it has one.
Marks = dict[str, tuple[str, Sequence[float | None]]]

#: Okabe and Ito's colour-blind-safe palette.
BLUE, RED, GREEN, YELLOW = "#0072B2", "#D55E00", "#009E73", "#E69F00"

#: Lines of the chart of squares.
_LINES: Lines = {
    "kernel triton.naive one tile": ("naive, 128×128", "#999999", ":"),
    "kernel triton.grouped one tile": ("grouped, 128×128 too", YELLOW, "--"),
    "kernel triton.grouped": ("grouped, its best config", GREEN, "-."),
    TMM: ("tmm (tuned)", RED, "-"),
    TORCH: ("cuBLAS (torch.matmul)", BLUE, "-"),
}
#: Colour maps of single kernels, in turn.
_MAPS = ("Blues", "Greens", "Purples", "Greys", "Oranges")


def figures(results: Results, metric: str = "tflops") -> dict[str, Any]:
    """The matplotlib figures that ``results`` have data for, by name. Lines of single kernels are
    in ``metric``, one of :data:`series.METRICS`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (``pip install 'tmm-core[bench]'``).
    """
    found = {}
    for (suite, dtype), documents in report.by_class(results.measured).items():
        if suite == "square":
            found[f"square-{dtype}"] = _curves(documents, _LINES, "tflops")
        elif suite == SWEEP:
            found[f"sweep-{dtype}"] = _curves(documents, _of_series(documents, metric), metric)
    classes = [d for d in results.measured if d["suite"] != SWEEP]
    if classes:
        found["ratios"] = _ratios(classes)
        found["roofline"] = _roofline(classes)
    if any(clock in document for document in classes for clock in OTHER_CLOCKS):
        found["clocks"] = _clocks(classes)
    return found


def save(results: Results, folder: Path, metric: str = "tflops") -> list[Path]:
    """Write the figures as PNG into ``folder``; returns their files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {folder / f"{name}.png": figure for name, figure in figures(results, metric).items()}
    for path, figure in drawn.items():
        figure.savefig(path, dpi=144)
    return list(drawn)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes


def _curves(documents: Sequence[Document], lines: Lines, metric: str) -> Any:
    """A line for each column that was timed."""
    figure, axes = _figure(9, 5.5)
    label, xs = series.axis(documents)
    ordered = sorted(zip(xs, documents, strict=True), key=operator.itemgetter(0))
    for column, (name, colour, style) in lines.items():
        points = [(x, series.told(document, column, metric)) for x, document in ordered]
        known = [(x, y) for x, y in points if y is not None]
        if known:
            at, values = zip(*known, strict=True)
            axes.plot(at, values, style, color=colour, label=name, marker="o", markersize=3)
    if metric == "ratio":
        axes.axhline(1, color="black", linewidth=0.8)
    unit, dtype = series.METRICS[metric][0], documents[0]["case"]["dtype"]
    axes.set(xlabel=label, ylabel=f"{unit}, in use", title=f"{unit}, {dtype}")
    if metric != "us":
        axes.set_ylim(0, None)
    if isinstance(xs[0], str):
        axes.tick_params(axis="x", labelrotation=30)
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _of_series(documents: Sequence[Document], metric: str) -> Lines:
    """The lines of single kernels, a colour map per kernel, dark to light along its sweep; tmm's
    and torch's."""
    from matplotlib import colormaps

    of_kernel: dict[str, list[str]] = {}
    for column in series.columns(documents):
        if column.startswith("kernel "):
            label = column.removeprefix("kernel ")
            of_kernel.setdefault(label.split(" ")[0], []).append(label)
    lines: dict[str, tuple[str, Any, str]] = {}
    for i, labels in enumerate(of_kernel.values()):
        for j, label in enumerate(labels):
            shade = 0.9 - 0.55 * j / max(1, len(labels) - 1)
            lines[f"kernel {label}"] = label, colormaps[_MAPS[i % len(_MAPS)]](shade), "-"
    lines[TMM] = "tmm (chosen)", RED, "-"
    if metric != "ratio":
        lines[TORCH] = "torch", "black", "--"
    return lines


def _ratios(documents: Sequence[Document]) -> Any:
    ratios = [document["ratio"] for document in documents]
    by_blas = [document["kernel"].split(".")[0] == "blas" for document in documents]
    pairs = list(zip(ratios, by_blas, strict=True))
    marks: Marks = {
        "BLAS chosen": (BLUE, [ratio if blas else None for ratio, blas in pairs]),
        "another kernel chosen": (RED, [None if blas else ratio for ratio, blas in pairs]),
    }
    means: Marks = {"geometric mean": ("black", ratios)}
    return _by_class(documents, marks, means, "Every problem, by class")


def _clocks(documents: Sequence[Document]) -> Any:
    marks: Marks = {"in use": (BLUE, [document["ratio"] for document in documents])}
    for clock, colour in zip(OTHER_CLOCKS, (YELLOW, RED, GREEN), strict=True):
        marks[clock] = colour, [report.clock_ratio(document, clock) for document in documents]
    means = {f"_{clock}": mark for clock, mark in marks.items()}  # not in the legend
    return _by_class(documents, marks, means, "Every clock; bars: geometric means")


def _by_class(documents: Sequence[Document], marks: Marks, means: Marks, title: str) -> Any:
    """Ratios on one axis, a row for each class: ``marks`` as points, of ``means`` a bar at the
    geometric mean of each class."""
    suites = list(dict.fromkeys(document["suite"] for document in documents))
    figure, axes = _figure(9, 2 + 0.4 * len(suites))
    rows = [suites.index(document["suite"]) for document in documents]
    for label, (colour, ratios) in marks.items():
        points = [(x, y) for x, y in zip(ratios, rows, strict=True) if x is not None]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, "o", color=colour, alpha=0.5, markersize=5, label=label)
    for label, (colour, ratios) in means.items():
        by_row: dict[int, list[float]] = {}
        for ratio, row in zip(ratios, rows, strict=True):
            if ratio is not None:
                by_row.setdefault(row, []).append(ratio)
        middles = list(map(statistics.geometric_mean, by_row.values()))
        bar = {"color": colour, "markersize": 16, "markeredgewidth": 2}
        axes.plot(middles, list(by_row), "|", label=label, **bar)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.2g}×")
    axes.set(
        yticks=range(len(suites)),
        yticklabels=suites,
        xlabel="torch's time / tmm's (right of 1: tmm is faster)",
        title=title,
    )
    axes.set_ylim(len(suites) - 0.4, -0.6)
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _roofline(documents: Sequence[Document]) -> Any:
    """The rate of each problem over its arithmetic intensity, below the highest bandwidth and rate
    that one of these problems reached."""
    figure, axes = _figure(9, 5)
    xs = [document["flops"] / document["bytes"] for document in documents]
    rates = {
        column: [series.told(document, column, "tflops") or 0.0 for document in documents]
        for column in (TORCH, TMM)
    }
    for column, colour in ((TORCH, YELLOW), (TMM, BLUE)):
        axes.plot(xs, rates[column], "o", color=colour, alpha=0.5, markersize=4, label=column)
    points = [(x, y) for ys in rates.values() for x, y in zip(xs, ys, strict=True)]
    bandwidth, rate = max(y / x for x, y in points), max(y for _, y in points)
    corners = [min(*xs, rate / bandwidth), rate / bandwidth, max(*xs, rate / bandwidth)]
    roof = [min(rate, x * bandwidth) for x in corners]
    axes.plot(corners, roof, color="black", linewidth=0.8)
    axes.loglog()
    title = f"Roofline: {bandwidth:.2f} TB/s and {rate:.0f} TFLOPS, the highest measured"
    axes.set(xlabel="FLOP / byte", ylabel="TFLOPS", title=title)
    axes.legend()
    return figure
