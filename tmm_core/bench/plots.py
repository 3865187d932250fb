"""The plots everybody knows: TFLOPS over square sizes, and the ratio to torch per class."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tmm_core.bench.results import Document, Results
from tmm_core.bench.runner import TMM, TORCH

#: Series of the TFLOPS plot: column, label, colour (Okabe and Ito's, told apart by the
#: colour-blind), line style.
_LINES = (
    ("kernel triton.naive", "naive", "#999999", ":"),
    ("kernel triton.grouped", "grouped", "#E69F00", "--"),
    (TMM, "tmm (tuned)", "#D55E00", "-"),
    (TORCH, "cuBLAS (torch.matmul)", "#0072B2", "-"),
)


def save(results: Results, folder: Path) -> list[Path]:
    """Write the plots that ``results`` have data for; returns their files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (``pip install 'tmm-core[bench]'``).
        OSError: A file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, nor looked for
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    square = [document for document in results.measured if document["suite"] == "square"]
    for dtype in dict.fromkeys(document["case"]["dtype"] for document in square):
        members = [document for document in square if document["case"]["dtype"] == dtype]
        path = folder / f"square-{dtype}.png"
        _square(members, dtype, path)
        written.append(path)
    if results.measured:
        path = folder / "ratios.png"
        _ratios(results.measured, path)
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
