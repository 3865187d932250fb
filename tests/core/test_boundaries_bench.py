"""Limits of the benchmark: medians, ends of ranges, and deadlines."""

from __future__ import annotations

import time
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fakes import FakeKernel, register
from test_bench import ColumnTimer, document, small_problems
from tmm_cache import CandidateResult

from tmm_core.bench import grouped_baselines, host, providers, report, runner, series, suites
from tmm_core.bench.case import Case
from tmm_core.bench.results import Results
from tmm_core.tuning.timing import GraphTimer

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


def measured(
    monkeypatch: pytest.MonkeyPatch, times: Sequence[float]
) -> tuple[ColumnTimer, dict[str, Any]]:
    """A random problem, timed as torch, the choice, torch again, and the others of the record."""
    small_problems(monkeypatch)
    timer = ColumnTimer(*times)
    monkeypatch.setattr(runner, "timer_for", lambda device: timer)
    tasks = suites.random_problems(1, torch.float32)
    (document,) = runner.run(tasks, CPU, runner.Options(budget=2.0, seconds=0.01))
    return timer, document


def test_the_choice_is_held_against_the_fastest_of_those_on_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(FakeKernel("fake.a", tiles=range(1, 10)))
    # How many of them a tuning times to the end, its clock decides.
    timed = [CandidateResult("fake.a", "1", {"tile": tile}, "ok", (1.0,)) for tile in range(1, 9)]
    monkeypatch.setattr(providers, "fastest_first", lambda record, *_: timed)
    monkeypatch.setattr(providers, "MOST_KNOWN", 3)
    _, point = measured(monkeypatch, [30.0, 20.0, 30.0, 25.0, 10.0, 40.0, 50.0])
    assert (point["torch_us"], point["us"], point["best_us"]) == (30.0, 20.0, 10.0)
    known = [name for name in point["times"] if name.startswith("known ")]
    assert len(known) in (2, 3)  # the choice may be one of them
    assert f"known {point['best']}" == known[1]


def test_every_problem_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, _ = measured(monkeypatch, [30.0, 20.0, 30.0])
    assert timer.released == 1


# -- report -------------------------------------------------------------------------------


def random_problem(m: int, us: float, best_us: float, torch_us: float = 100.0) -> dict[str, Any]:
    return {
        "kind": "regret", "case": Case(m=m, n=64, k=64).to_json(), "us": us, "best_us": best_us,
        "torch_us": torch_us,
    }  # fmt: skip


def test_each_random_problem_is_in_its_range_of_rows() -> None:
    sizes = (1, 16, 17, 128, 129, 1024, 1025, 8192)
    points = [random_problem(m, 50.0, 50.0) for m in sizes]
    rows = report.regrets(Results.of(points).regrets)
    assert [row[:2] for row in rows] == [
        ("1…16", "2"), ("17…128", "2"), ("129…1024", "2"), ("1025…8192", "2"), ("1…8192", "8"),
    ]  # fmt: skip


def test_the_worst_of_random_problems_are_named() -> None:
    points = [
        random_problem(32, us=50.0, best_us=50.0),  # twice torch, the best there is
        random_problem(64, us=125.0, best_us=50.0),  # behind torch and far behind the best
        random_problem(100, us=100.0, best_us=80.0),
    ]
    (*_, row) = report.regrets(Results.of(points).regrets)
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


# -- torch's grouped products -------------------------------------------------------------


E4M3 = torch.float8_e4m3fn


class OnGpu:
    """The form of a tensor on a GPU."""

    is_cuda, device = True, "cuda"

    def __init__(self, *shape: int, dtype: torch.dtype = E4M3, column: bool = False) -> None:
        stored = (*shape[:-2], *shape[:-3:-1]) if column else shape
        form = torch.empty(stored, dtype=dtype, device="meta")
        self.form = form.mT if column else form

    def data_ptr(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.form, name)


@pytest.mark.parametrize(
    ("a", "b", "serves"),
    [
        (OnGpu(8, 64), OnGpu(2, 64, 32, column=True), True),
        (OnGpu(8, 64), OnGpu(2, 64, 32), False),
        (OnGpu(8, 64, dtype=torch.float8_e5m2), OnGpu(2, 64, 32, column=True), False),
        (OnGpu(8, 64), OnGpu(2, 64, 24, column=True), False),
        (OnGpu(8, 72), OnGpu(2, 72, 32, column=True), False),
        (OnGpu(2, 8, 64), OnGpu(64, 32, column=True), False),
    ],
)
def test_torchs_scaled_groups_need_multiples_of_16(
    monkeypatch: pytest.MonkeyPatch, a: Any, b: Any, serves: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    call: Any = types.SimpleNamespace(a=a, b=b)
    assert grouped_baselines._scales_each(call) is serves
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not grouped_baselines._scales_each(call)


# -- samples --------------------------------------------------------------------------------


def test_a_summary_holds_the_quartiles() -> None:
    summary = runner._summary([4.0, 1.0, 2.0, 3.0, 5.12345])
    assert summary == {"median_us": 3.0, "p25_us": 2.0, "p75_us": 4.0, "samples": 5}
    assert report._spread({"median_us": 3.04, "p25_us": 2.0, "p75_us": 5.0}) == "3.0 ±1.5"


def test_each_capture_counts_alike() -> None:
    captures = [[[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], [[4.0, 5.0], [40.0, 50.0]]]
    assert runner.pooled(captures) == [[1.0, 2.0, 4.0, 5.0], [10.0, 20.0, 40.0, 50.0]]


class Clocked(GraphTimer):
    """A timer whose rounds take a second each."""

    def __init__(self, us: float) -> None:
        self.us, self.rounds, self.now = us, list[Any](), 0.0

    def measure(self, runs: Any, rounds: int = 1, *, copies: int, **_: Any) -> Any:
        self.rounds.append(rounds)
        self.now += rounds
        return [[self.us] * rounds for _ in runs]

    def forget_captures(self) -> None:
        self.rounds.append("again")


@pytest.mark.parametrize(
    ("us", "seconds", "rounds"),
    [
        (149.0, 50.0, [[1, 0, 1, 50]]), (149.0, 1e9, [[1, 0, 1, runner.MOST_ROUNDS]]),
        (149.0, 0.0, [[1, 0, 1, runner.LEAST_ROUNDS]]),
        (150.0, 60.0, [[1, 0, 1, 60], [1, 0, 1, 20], [1, 0, 1, 20]]),
    ],
)  # fmt: skip
def test_large_products_are_captured_several_times(
    us: float, seconds: float, rounds: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = Clocked(us)
    monkeypatch.setattr(runner, "time", types.SimpleNamespace(monotonic=lambda: timer.now))
    found = runner._captures([len, len], timer, 2, seconds)  # type: ignore[list-item]
    assert [[len(mine) for mine in capture] for capture in found] == [
        [each[-1]] * 2 for each in rounds
    ]
    every: list[Any] = []
    for each in rounds:
        every += [*(["again"] if every else []), 1, runner.SETTLE, 1, each[-1]]
    assert timer.rounds == every


def test_columns_of_every_combination() -> None:
    kernels = [FakeKernel("one"), FakeKernel("two")]
    found = series.combined(kernels, {}, {"tile": [1, 2]})
    assert [(each.label, each.fields) for each in found] == [
        (f"{name} tile={tile}", (("tile", tile),)) for name in ("one", "two") for tile in (1, 2)
    ]
    fixed = series.combined(kernels[:1], {"tile": 3}, {})
    assert [(each.label, each.fields) for each in fixed] == [("one", (("tile", 3),))]
    for common, sweeps in (({"stage": 1}, {}), ({}, {"stage": [1]})):
        with pytest.raises(ValueError, match=r"no kernel has a field 'stage'; there are one: tile"):
            series.combined(kernels, common, sweeps)
    given: list[Any] = []
    call: Any = types.SimpleNamespace(plan=lambda **more: given.append(more))
    for each in (*fixed, series.Series("one", "one")):
        each.plan(call)
    assert given == [
        {"kernel": "one", "config": {"tile": 3}}, {"kernel": "one", "config": None},
    ]  # fmt: skip
