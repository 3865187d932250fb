"""The page of `tmm bench`: whole, self-contained, and drawn by a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tmm_core.bench import page
from tmm_core.bench.charts import Point, Row, _ticks, plane, rows
from tmm_core.bench.results import Results
from tmm_core.tools.cli import main

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


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


def sections(text: str) -> dict[str, str]:
    found = re.findall(r"<section><h2>(.*?)</h2>(.*?)</section>", text, re.DOTALL)
    return dict(found)


@pytest.fixture(scope="module", params=["h200", "h100"])
def results(request: pytest.FixtureRequest) -> Results:
    return Results.read([RESULTS / request.param])


def test_the_page_shows_every_measured_problem(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TMM_SHIPPED_RECORDS")
    text = page.html(results)
    found = sections(text)
    count = len(results.measured)
    assert found["Ratios by class"].count("<circle") == count
    assert found["Roofline"].count("<circle") == 2 * count  # torch's and tmm's
    assert found["Problems"].count("<tr>") == count + 1
    for clock in ("in use", "alone", "steady", "between"):
        assert "geometric mean" in found["Clocks side by side"]
        assert f" {clock}: geometric mean " in found["Clocks side by side"]
    lost = sum(document["ratio"] < 0.99 for document in results.measured)
    assert found["Ratios by class"].count('circle class="lost"') == lost
    _Balanced().feed(text)


def test_the_page_needs_nothing_beside_it(results: Results) -> None:
    text = page.html(results)
    assert not re.search(r"<script|<link|<img|\bsrc=|\bhref=|@import|url\(", text)
    assert set(re.findall(r"https?://[^\"\s<]+", text)) == {"http://www.w3.org/2000/svg"}
    frame = page.Page(results)._repr_html_()
    assert unescape(frame.split('srcdoc="')[1].split('"')[0]) == text


def test_bench_writes_the_page_beside_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    argv = ["bench", "--device", "cpu", "--dtype", "fp32", "--seconds-per-problem", "0.01"]
    assert main([*argv, "--shapes", "8x8x8", "--output", str(tmp_path)]) == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().err
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "8×8×8 float32" in text
    assert "Clocks side by side" not in text  # not taken


def test_a_run_without_a_measurement_has_a_page() -> None:
    assert "<h1>tmm against torch on an unknown device</h1>" in page.html(Results())


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.97, 1.06, [0.97 + 0.01 * step for step in range(10)]),
        (0.9, 2.3, [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2]),
        (0.9, 30, [1, 2, 5, 10, 20]),
        (0.5, 5000, [1, 10, 100, 1000]),
    ],
)
def test_an_axis_has_few_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert list(_ticks(low, high)) == pytest.approx(ticks)


def test_points_stand_where_their_values_are() -> None:
    drawn = rows([Row("all", [Point(x, f"<{x}>") for x in (0.5, 1.0, 2.0)])], "ratio")
    left, middle, right = (float(x) for x in re.findall(r'cx="([\d.]+)"', drawn))
    assert middle - left == pytest.approx(right - middle, abs=0.2)  # of a logarithmic axis
    assert "<title>&lt;0.5&gt;</title>" in drawn
    up = plane([Point(1, "", y=1), Point(10, "", y=100)], [], "x", "y")
    low, high = (float(y) for y in re.findall(r'cy="([\d.]+)"', up))
    assert high < low


@pytest.mark.chromium
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt install chromium")
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    assert CHROMIUM is not None
    path = page.save(Results.read([RESULTS / "h200"]), tmp_path)
    shot = tmp_path / "page.png"
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         f"--user-data-dir={tmp_path / 'profile'}", "--force-device-scale-factor=1",
         "--window-size=1100,4000", f"--screenshot={shot}", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert shot.exists(), done.stderr
    pixels = (image.imread(shot)[..., :3] * 255).round().astype(int)
    assert pixels.shape == (4000, 1100, 3)
    # What is drawn whole: diamonds of tmm and of shipped records, the axis of every chart.
    for colour in ((0, 114, 178), (0, 158, 115), (27, 31, 36)):
        assert int((abs(pixels - colour).max(-1) <= 1).sum()) > 300, colour
