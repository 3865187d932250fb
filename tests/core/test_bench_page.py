"""The page of `tmm bench`: the report's tables and charts, in one file."""

from __future__ import annotations

import re
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tmm_core.bench import charts, page, report
from tmm_core.bench.results import Results
from tmm_core.tools.cli import main

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


class _Balanced(HTMLParser):
    """Fails at a tag that closes another than the one that is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module", params=["h200", "h100"])
def results(request: pytest.FixtureRequest) -> Results:
    return Results.read([RESULTS / request.param])


@pytest.fixture(scope="module")
def text(results: Results) -> str:
    pytest.importorskip("matplotlib")
    return page.html(results)


def test_the_page_has_every_section_and_chart_of_the_report(results: Results, text: str) -> None:
    for section in report.sections(results):
        assert not section.title or f"<h2>{section.title}</h2>" in text
        for row in section.rows:
            assert all(cell in unescape(text) for cell in row)
    assert text.count("<tr>") > len(results.measured)
    assert text.count("<svg") == len(charts.figures(results))
    _Balanced().feed(text)


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


def test_the_page_needs_nothing_beside_it(results: Results, text: str) -> None:
    assert not re.search(r"<script|<link|<img|\bsrc=|\bhref=\"[^#]|@import|url\([^#]", text)
    assert {match.split("/")[2] for match in re.findall(r"https?://[^\"\s<]+", text)} == {
        "www.w3.org"  # names of namespaces
    }
    frame = page.Page(results)._repr_html_()
    assert unescape(frame.split('srcdoc="')[1].split('"')[0]).startswith("<!doctype html>")


def test_without_matplotlib_the_page_has_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    argv = ["bench", "--device", "cpu", "--dtype", "fp32", "--seconds-per-problem", "0.01"]
    assert main([*argv, "--shapes", "8x8x8", "--output", str(tmp_path)]) == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().err
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "8×8×8 float32" in text
    assert "<svg" not in text
    assert "pip install" in text


def test_a_run_without_a_measurement_has_a_page() -> None:
    assert "<h1>tmm against torch on an unknown device</h1>" in page.html(Results())
