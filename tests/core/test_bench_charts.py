"""The charts of `tmm bench --plots`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tmm_core.bench import charts
from tmm_core.bench.results import Results
from tmm_core.tools.cli import main

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module", params=["h200", "h100"])
def results(request: pytest.FixtureRequest) -> Results:
    return Results.read([RESULTS / request.param])


def test_every_measured_problem_is_a_point_of_the_charts(results: Results) -> None:
    pytest.importorskip("matplotlib")

    def points(axes: Any, *labels: str) -> list[int]:
        lines = {line.get_label(): line for line in axes.get_lines()}
        return [len(lines[label].get_xdata()) for label in labels]

    figures = {name: figure.axes[0] for name, figure in charts.figures(results).items()}
    count = sum(document["suite"] != "sweep" for document in results.measured)
    assert sum(points(figures["ratios"], "BLAS chosen", "another kernel chosen")) == count
    (square,) = (axes for name, axes in figures.items() if name == "square-bfloat16")
    sizes = sum(document["suite"] == "square" for document in results.measured)
    assert points(square, "tmm (tuned)", "cuBLAS (torch.matmul)") == [sizes, sizes]


def test_without_matplotlib_plots_are_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    argv = ["bench", "--device", "cpu", "--dtype", "fp32", "--seconds-per-problem", "0.01"]
    argv += ["--shapes", "8x8x8", "--output", str(tmp_path)]
    assert main(argv) == 0
    assert "8×8×8 float32" in (tmp_path / "report.md").read_text("utf-8")
    capsys.readouterr()
    assert main([*argv, "--plots"]) == 2
    assert "pip install 'tmm-core[bench]'" in capsys.readouterr().err
