"""The usual plots: TFLOPS over square sizes, and the ratio to torch per class."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tmm_core.bench import series
from tmm_core.bench.results import Document, Results
from tmm_core.bench.runner import TMM, TORCH
from tmm_core.bench.suites import SWEEP

#: Series of the TFLOPS plot: column, label, colour (Okabe and Ito's colour-blind-safe palette),
#: line style.
_LINES = (
    ("kernel triton.naive one tile", "naive, 128×128", "#999999", ":"),
    ("kernel triton.grouped one tile", "grouped, 128×128 too", "#E69F00", "--"),
    ("kernel triton.grouped", "grouped, its best config", "#009E73", "-."),
    (TMM, "tmm (tuned)", "#D55E00", "-"),
    (TORCH, "cuBLAS (torch.matmul)", "#0072B2", "-"),
)
#: Colour maps of single kernels, in turn.
_MAPS = ("Blues", "Greens", "Purples", "Greys", "Oranges")


def save(results: Results, folder: Path, metric: str = "tflops") -> list[Path]:
    """Write the plots that ``results`` have data for; returns their files. Lines of single kernels
    (``tmm bench --kernel``) are in ``metric``, one of :data:`series.METRICS`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (``pip install 'tmm-core[bench]'``).
        OSError: A file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    square = [document for document in results.measured if document["suite"] == "square"]
    for dtype in dict.fromkeys(document["case"]["dtype"] for document in square):
        members = [document for document in square if document["case"]["dtype"] == dtype]
        path = folder / f"square-{dtype}.png"
        _square(members, dtype, path)
        written.append(path)
    swept = [d for d in results.measured if d["suite"] == SWEEP]
    for dtype in dict.fromkeys(document["case"]["dtype"] for document in swept):
        path = folder / f"sweep-{dtype}.png"
        _sweep([d for d in swept if d["case"]["dtype"] == dtype], dtype, metric, path)
        written.append(path)
    if len(swept) < len(results.measured):
        path = folder / "ratios.png"
        _ratios([d for d in results.measured if d["suite"] != SWEEP], path)
        written.append(path)
    return written


def _square(documents: Sequence[Document], dtype: str, path: Path) -> None:
    figure, axes = _figure(9, 5.5)
    ordered = sorted(documents, key=lambda document: document["case"]["n"])
    for column, label, colour, style in _LINES:
        points = [
            (document["case"]["n"], _tflops(document, column))
            for document in ordered
            if column in document["times"]
        ]
        if points:
            sizes, rates = zip(*points, strict=True)
            axes.plot(sizes, rates, style, color=colour, label=label, marker="o", markersize=3)
    axes.set(
        xlabel="M = N = K",
        ylabel="TFLOPS, in use",
        title=f"Square matrices, {dtype}",
        ylim=(0, None),
    )
    axes.legend(loc="lower right")
    _write(figure, axes, path)


def _sweep(documents: Sequence[Document], dtype: str, metric: str, path: Path) -> None:
    """A line for each series; those of one kernel in shades of one colour."""
    figure, axes = _figure(9, 5.5)
    label, xs = series.axis(documents)
    ordered = sorted(zip(xs, documents, strict=True), key=lambda pair: _sort_key(pair[0]))
    drawn = series.columns(documents)
    shades = _shades([column for column in drawn if column.startswith("kernel ")])
    shades |= {TMM: ("#D55E00", "-"), TORCH: ("black", "--")}
    names = {TMM: "tmm (chosen)", TORCH: "torch"}
    for column in drawn:
        points = [(x, series.told(document, column, metric)) for x, document in ordered]
        known = [(x, y) for x, y in points if y is not None]
        if known and not (metric == "ratio" and column == TORCH):
            colour, style = shades[column]
            name = names.get(column, column.removeprefix("kernel "))
            at, values = zip(*known, strict=True)
            axes.plot(at, values, style, color=colour, label=name, marker="o", markersize=3)
    if metric == "ratio":
        axes.axhline(1, color="black", linewidth=0.8)
    unit = series.METRICS[metric][0]
    axes.set(xlabel=label, ylabel=f"{unit}, in use", title=f"{unit}, {dtype}")
    if metric != "us":
        axes.set_ylim(0, None)
    if isinstance(xs[0], str):
        axes.tick_params(axis="x", labelrotation=30)
    figure.legend(loc="outside right upper", fontsize="small")
    _write(figure, axes, path)


def _sort_key(x: float | str) -> tuple[bool, float | str]:
    return isinstance(x, str), x


def _shades(columns: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Colour and style of each column: a colour map per kernel, dark to light along its sweep."""
    from matplotlib import colormaps

    of_kernel: dict[str, list[str]] = {}
    for column in columns:
        of_kernel.setdefault(column.split(" ")[1], []).append(column)
    found: dict[str, tuple[Any, str]] = {}
    for i, members in enumerate(of_kernel.values()):
        for j, column in enumerate(members):
            shade = 0.9 - 0.55 * j / max(1, len(members) - 1)
            found[column] = colormaps[_MAPS[i % len(_MAPS)]](shade), "-"
    return found


def _tflops(document: Document, column: str) -> float:
    return float(document["flops"] / document["times"][column]["median_us"] / 1e6)


def _ratios(documents: Sequence[Document], path: Path) -> None:
    suites = list(dict.fromkeys(document["suite"] for document in documents))
    figure, axes = _figure(9, 2 + 0.4 * len(suites))
    for row, suite in enumerate(suites):
        members = [document for document in documents if document["suite"] == suite]
        ratios = [document["ratio"] for document in members]
        kept = [document["kernel"].split(".")[0] == "blas" for document in members]
        for label, colour, mine in (
            ("BLAS chosen", "#0072B2", [r for r, blas in zip(ratios, kept, strict=True) if blas]),
            (
                "another kernel chosen",
                "#D55E00",
                [r for r, blas in zip(ratios, kept, strict=True) if not blas],
            ),
        ):
            axes.plot(
                mine,
                [row] * len(mine),
                "o",
                color=colour,
                alpha=0.5,
                markersize=5,
                label=label if row == 0 else None,
            )
        mean = statistics.geometric_mean(ratios)
        axes.plot(
            [mean],
            [row],
            "|",
            color="black",
            markersize=16,
            markeredgewidth=2,
            label="geometric mean" if row == 0 else None,
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.2g}×")
    axes.set(
        yticks=range(len(suites)),
        yticklabels=suites,
        xlabel="torch's time / tmm's (right of 1: tmm is faster)",
        title="Every problem, by class",
    )
    axes.set_ylim(len(suites) - 0.4, -0.6)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    _write(figure, axes, path)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, height), layout="constrained")


def _write(figure: Any, axes: Any, path: Path) -> None:
    from matplotlib import pyplot

    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=144)
    pyplot.close(figure)
