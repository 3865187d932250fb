"""`tmm bench --quick`, and the README's table of gains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tmm_core.bench import quick
from tmm_core.bench.results import Results
from tmm_core.tools.cli import main

ROOT = Path(__file__).parents[2]


def test_every_row_is_measured_before_any_is_measured_twice() -> None:
    tasks = quick.tasks(on_gpu=True)
    names = [task.suite for task in tasks]
    assert names == [*quick.ROWS, *quick.ROWS]
    assert len({(task.suite, str(task.case)) for task in tasks}) == len(tasks)


def test_a_machine_without_a_gpu_gets_small_problems_and_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    assert main(["bench", "--quick", "--device", "cpu"]) == 0
    table, notes = capsys.readouterr()
    assert "no GPU" in notes
    assert "[22/22]" in notes
    assert max(len(line) for line in notes.splitlines() if not line.startswith("tmm: ")) <= 100
    heading, _, *rows = table.splitlines()
    assert re.split(r"\s{2,}", heading) == list(quick.COLUMNS)
    cells = [re.split(r"\s{2,}", row) for row in rows]
    assert [tuple(row[:2]) for row in cells] == list(quick.ROWS.values())
    assert all(row[2] == "2" and re.fullmatch(r"\d\.\d{3}×", row[3]) for row in cells)
    assert max(map(len, table.splitlines())) <= 100


def test_small_problems_differ_within_a_class() -> None:
    tasks = quick.tasks(on_gpu=False)
    assert max(max(t.case.m, t.case.n, t.case.k) for t in tasks) == max(quick.CPU_SIZES)
    assert len({(task.suite, str(task.case)) for task in tasks}) == len(tasks)


@pytest.mark.parametrize("more", [["--suite", "square"], ["--shapes", "8x8x8"], ["--regret", "3"]])
def test_a_choice_of_problems_contradicts_quick(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--quick", "--device", "cpu", *more]) == 2
    assert "--quick chooses its problems" in capsys.readouterr().err


def test_the_readme_has_the_gains_of_the_committed_results() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    found = []
    for gpu in ("h200", "h100"):
        results = Results.read([ROOT / "benchmarks" / "results" / gpu])
        found.append(quick.gains(results))
    for h200, h100 in zip(*found, strict=True):
        row = " | ".join((*h200[:3], f"{h200[3]} / {h200[4]}", f"{h100[3]} / {h100[4]}"))
        assert f"| {row} |" in readme
