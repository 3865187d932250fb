"""Charts of single kernels, drawn by matplotlib as PNG."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tmm_core.bench import report, series
from tmm_core.bench.results import Document, Results
from tmm_core.bench.runner import TMM, TORCH
from tmm_core.bench.suites import SWEEP

#: Label, colour and line style of each column that is drawn.
Lines = Mapping[str, tuple[str, Any, str]]

#: tmm's colour, of Okabe and Ito's palette for the colour-blind.
RED = "#D55E00"
#: Colour maps of single kernels, in turn.
_MAPS = ("Blues", "Greens", "Purples", "Greys", "Oranges")


def figures(results: Results, metric: str = "tflops") -> dict[str, Any]:
    """A matplotlib figure for each dtype in which single kernels were timed, by name, in
    ``metric``, one of :data:`series.METRICS`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (``pip install 'tmm-core[bench]'``).
    """
    swept = report.by_class(each for each in results.measured if each["suite"] == SWEEP)
    return {
        f"sweep-{dtype}": _curves(documents, _of_series(documents, metric), metric)
        for (_, dtype), documents in swept.items()
    }


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
