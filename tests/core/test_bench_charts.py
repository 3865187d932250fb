"""The charts of `tmm bench --plots`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tmm_core.bench import charts
from tmm_core.bench.results import Results
from tmm_core.tools.cli import main

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_every_measured_size_is_a_point_of_the_chart() -> None:
    pytest.importorskip("matplotlib")
    results = Results.read([RESULTS / "h200"])
    (figure,) = charts.figures(results).values()
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    swept = [each for each in results.measured if each["suite"] == "sweep"]
    for label, column in (("tmm (chosen)", "tmm"), ("torch", "torch")):
        rates = [each["flops"] / each["times"][column]["median_us"] / 1e6 for each in swept]
        assert sorted(lines[label].get_ydata()) == pytest.approx(sorted(rates))
    assert len(lines) == len(swept[0]["series"]) + 2


def test_without_matplotlib_plots_are_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    argv = ["bench", "--device", "cpu", "--dtype", "fp32", "--seconds-per-problem", "0.01"]
    argv += ["--shapes", "8x8x8", "--output", str(tmp_path)]
    assert main([*argv, "--plots"]) == 2
    assert "name them with --kernel" in capsys.readouterr().err
    argv += ["--kernel", "blas"]
    assert main(argv) == 0
    assert "8×8×8 float32" in (tmp_path / "report.md").read_text("utf-8")
    capsys.readouterr()
    assert main([*argv, "--plots"]) == 2
    assert "pip install 'tmm-core[bench]'" in capsys.readouterr().err
