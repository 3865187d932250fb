"""Limits of the benchmark: medians, ends of ranges, deadlines, and what a shared file hides."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeKernel, register
from test_bench import document, small_problems
from tmm_cache import CandidateResult

from tmm_core.bench import host, regret, report, share
from tmm_core.bench.case import Case
from tmm_core.bench.results import Results

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("blas_alone")


# -- host cost ----------------------------------------------------------------------------


def test_one_slow_batch_is_not_the_cost_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CALLS", 1)
    count = 0

    def call() -> None:
        nonlocal count
        count += 1
        if count == host.WARM + 2:
            time.sleep(0.05)

    assert host.host_us({"call": call}, CPU, repeats=5)["call"] < 5000


def test_the_cost_is_of_one_call_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CALLS", 10)
    us = host.host_us({"call": lambda: time.sleep(1e-3)}, CPU, repeats=2)["call"]
    assert 1000 <= us < 9000


# -- regret -------------------------------------------------------------------------------


class Said:
    """A timer whose runs take what a test says, in order."""

    def __init__(self, times: Sequence[float]) -> None:
        self.times = times
        self.counts: list[int] = []
        self.released = 0

    def measure(self, runs: Sequence[Any], rounds: int, **_: Any) -> list[list[float]]:
        self.counts.append(len(runs))
        return [[us] * rounds for us in self.times[: len(runs)]]

    def release(self) -> None:
        self.released += 1


def measured(
    monkeypatch: pytest.MonkeyPatch, times: Sequence[float], count: int = 1
) -> tuple[Said, list[dict[str, Any]]]:
    """Random problems, timed as torch, the choice, and then the others of the record."""
    small_problems(monkeypatch)
    timer = Said(times)
    monkeypatch.setattr(regret, "timer_for", lambda device: timer)
    cases = regret.cases(count, torch.float32)
    return timer, list(regret.measure(CPU, cases, budget=2.0))


def test_the_choice_is_held_against_the_fastest_of_those_on_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(FakeKernel("fake.a", tiles=range(1, 10)))
    # How many of them a tuning times to the end, its clock decides.
    timed = [CandidateResult("fake.a", "1", {"tile": tile}, "ok", (1.0,)) for tile in range(1, 9)]
    monkeypatch.setattr(regret, "by_time", lambda record: timed)
    timer, (point,) = measured(monkeypatch, [30.0, 20.0, 25.0, 10.0, 40.0, 50.0, 60.0, 70.0])
    assert (point["torch_us"], point["us"], point["best_us"]) == (30.0, 20.0, 10.0)
    assert point["best"] != point["chosen"]
    # Torch and the choice, and the fastest of the record, of which the choice may be one.
    (count,) = timer.counts
    assert count in (1 + regret.MOST_KNOWN, 2 + regret.MOST_KNOWN)


def test_every_problem_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, points = measured(monkeypatch, [30.0, 20.0], count=3)
    assert (len(points), timer.released) == (3, 3)


def test_past_the_deadline_no_problem_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    small_problems(monkeypatch)
    cases = regret.cases(3, torch.float32)
    assert list(regret.measure(CPU, cases, deadline=time.monotonic())) == []


# -- report -------------------------------------------------------------------------------


def random_problem(m: int, us: float, best_us: float, torch_us: float = 100.0) -> dict[str, Any]:
    return {
        "kind": "regret", "case": Case(m=m, n=64, k=64).to_json(), "us": us, "best_us": best_us,
        "torch_us": torch_us,
    }  # fmt: skip


def test_each_random_problem_is_in_its_range_of_rows() -> None:
    sizes = (1, 16, 17, 128, 129, 1024, 1025, 8192)
    points = [random_problem(m, 50.0, 50.0) for m in sizes]
    rows = report.regrets(Results.of(points))
    assert [row[:2] for row in rows] == [
        ("1…16", "2"), ("17…128", "2"), ("129…1024", "2"), ("1025…8192", "2"), ("1…8192", "8"),
    ]  # fmt: skip


def test_the_worst_of_random_problems_are_named() -> None:
    points = [
        random_problem(32, us=50.0, best_us=50.0),  # twice torch, the best there is
        random_problem(64, us=125.0, best_us=50.0),  # behind torch and far behind the best
        random_problem(100, us=100.0, best_us=80.0),
    ]
    (*_, row) = report.regrets(Results.of(points))
    found = dict(zip(report.REGRET_COLUMNS, row, strict=True))
    assert (found["at least"], found["of"].split()[0]) == ("0.800×", "64×64×64")
    assert (found["at most"], found["of it"].split()[0]) == ("2.500×", "64×64×64")
    assert found["chosen / best known"] == report.times((1.0 * 2.5 * 1.25) ** (1 / 3))


def test_lost_is_below_the_noise_of_two_series() -> None:
    ratios = {64: 0.989, 128: 0.99, 256: 0.995, 512: 1.0}
    documents = [document(m, ratio) for m, ratio in ratios.items()]
    (row,) = report.summaries(Results.of(documents))
    assert dict(zip(report.SUMMARY_COLUMNS, row, strict=True))["< 0.99×"] == "1"


def test_noise_has_no_sign() -> None:
    documents = [document(64, 1.0, noise=0.96), document(128, 1.0, noise=1.04)]
    (row,) = report.summaries(Results.of(documents))
    assert dict(zip(report.SUMMARY_COLUMNS, row, strict=True))["±"] == "4.0%"


def test_the_worst_by_another_clock_is_the_least_ratio() -> None:
    documents = [
        document(64, 2.0, steady={"torch": 100.0, "tmm": 80.0}),
        document(128, 1.0, steady={"torch": 100.0, "tmm": 125.0}),
    ]
    (row,) = report.clocks(Results.of(documents))
    found = dict(zip(report.CLOCK_COLUMNS, row, strict=True))
    assert (found["in use"], found["steady"]) == ("1.414 / 1.000", "1.000 / 0.800")
    assert found["alone"] == ""


# -- a file to share ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("/home/me/run.py", "<path>"),
        ("~/run.py and ~me/run.py", "<path> and <path>"),
        ("--output=/tmp/x --from ../there, ./here", "--output=<path> --from <path>, <path>"),
        ("OSError: '/tmp/a b'", "OSError: '<path> b'"),
        ("12 µs/call, triton/3.7, a/b", "12 µs/call, triton/3.7, a/b"),
        (["/tmp/x", {"at": ["/tmp/y"]}, 3], ["<path>", {"at": ["<path>"]}, 3]),
    ],
)
def test_a_shared_file_has_no_paths(text: Any, hidden: Any) -> None:
    assert share.without_paths(text) == hidden


def written(folder: Path, *documents: dict[str, Any]) -> Path:
    file = folder / "some.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in documents))
    return file


def test_host_costs_alone_can_be_shared(tmp_path: Path) -> None:
    """And none is written where there is nothing, nor over another."""
    costs = {
        "kind": "host", "us": {"plan": 1.0}, "kernels": {"plain": "blas"}, "size": 16,
        "dtype": "bfloat16",
    }  # fmt: skip
    target = tmp_path / "mine.zip"
    packed = share.pack([written(tmp_path, costs)], target)
    assert packed.host == costs
    before = target.read_bytes()
    with pytest.raises(FileExistsError):
        share.pack([written(tmp_path, document(64, 1.0))], target)
    assert target.read_bytes() == before
    with pytest.raises(ValueError, match="nothing was measured"):
        share.pack([written(tmp_path)], tmp_path / "empty.zip")
    assert not (tmp_path / "empty.zip").exists()
