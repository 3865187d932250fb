"""Progress of waiting calls: one line for a step of a model, in a terminal or in a log."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeBlas, FakeKernel, dispatcher, problem, settings

from tmm_core.tuning import progress


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    times = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: times[0])
    return times


def stream(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> Stream:
    made = Stream(terminal)
    monkeypatch.setattr(sys, "stderr", made)
    return made


def step(line: progress.Progress, now: list[float], count: int, shown: bool | None) -> None:
    """A step of a model, with ``count`` products that take 3 s each."""
    for n in range(count):
        with line.of(f"64×64×{n}", shown) as tick:
            for _ in range(30):
                now[0] += 0.1
                tick()
        now[0] += 0.01


@pytest.mark.parametrize(
    ("terminal", "shown", "seen"),
    [
        *((True, True, True), (True, None, True), (True, False, False)),
        *((False, True, True), (False, None, False), (False, False, False)),
    ],
)
def test_progress_is_shown_in_terminals_or_on_request(
    monkeypatch: pytest.MonkeyPatch, now: list[float], terminal: bool, shown: Any, seen: bool
) -> None:
    made = stream(monkeypatch, terminal)
    step(progress.Progress(), now, 1, shown)
    assert ("tuning 64×64×0 (1 product in" in made.getvalue()) == seen


def test_nothing_is_shown_of_short_steps(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    """Times of short steps are not added up, but times of short tunings in one step are."""
    made, line = stream(monkeypatch, True), progress.Progress()
    for _ in range(100):
        with line.of("64×64×64", True) as tick:
            now[0] += 0.5
            tick()
        now[0] += 10.0
    assert made.getvalue() == ""
    for _ in range(3):
        with line.of("64×64×64", True) as tick:
            now[0] += 0.5
            tick()
    assert "(3 products in 2 s so far)" in made.getvalue() or "(2 products" in made.getvalue()


def test_one_line_for_a_step(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    """In a terminal it is overwritten, and erased at the end; it changes a few times a second."""
    made, line = stream(monkeypatch, True), progress.Progress()
    step(line, now, 20, None)
    text = made.getvalue()
    assert "\n" not in text
    assert "(20 products in 60 s so far)" in text
    assert text.endswith("\r")
    assert text.split("\r")[-2].strip() == ""
    assert len(text.split("\r")) < 60 / progress.CHANGE_INTERVAL * 1.2
    now[0] += 60.0
    step(line, now, 1, None)
    assert "(1 product in 3 s so far)" in made.getvalue()  # another step


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    made = stream(monkeypatch, False)
    step(progress.Progress(), now, 20, True)
    lines = made.getvalue().splitlines()
    assert 5 <= len(lines) <= 60 / progress.LOG_INTERVAL + 1
    assert all(line.startswith("tuning 64×64×") for line in lines)


def test_a_closed_stream_costs_nothing(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    made = stream(monkeypatch, True)
    made.close()
    step(progress.Progress(), now, 2, True)


def test_calls_show_progress(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENCE", 0.0)
    monkeypatch.setattr(progress, "LINE", progress.Progress())
    d, _ = dispatcher(FakeBlas(), FakeKernel("k"), root=tmp_path)
    d.choose(problem(), settings(progress=True))
    d.choose(problem(n=48), settings(progress=True))
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert "tuning 64×32×16" in line
