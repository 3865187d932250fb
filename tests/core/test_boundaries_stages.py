"""Tests the rounds of a tuning one at a time, with candidates of known times. Checks which
candidates stay, are timed again and are recorded, and which configs are tried at all."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import (
    FakeBlas,
    FakeConfig,
    FakeKernel,
    FakeTimer,
    Faulty,
    Tuner,
    dispatcher,
    problem,
    searched,
    settings,
)
from msgspec.structs import replace as revised
from test_invariant import INVARIANT, Summing
from test_tuner import result
from tmm_cache import CacheStore, TuningRecord

from tmm_core import Problem, TmmWarning
from tmm_core.spec.bucket import between, inside
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.steps import drained
from tmm_core.tuning import (
    background,
    candidate_launchers,
    cold_operands,
    ranking,
    stages,
    tuner,
)
from tmm_core.tuning.background import Background, Task
from tmm_core.tuning.candidate_launchers import CandidateLaunchers, Deadline
from tmm_core.tuning.candidate_run import (
    CandidateRun,
    for_the_bucket,
    of_each_arithmetic,
    reserves,
    survivors,
)
from tmm_core.tuning.cold_operands import LaunchError
from tmm_core.tuning.findings import Findings
from tmm_core.tuning.search import CAUTION, Hints, _hinted, _incumbent, _interleaved
from tmm_core.tuning.stages import Tuning, _repeats, _unverified
from tmm_core.tuning.timing import HostTimer
from tmm_core.tuning.untried import Obstacle, Untried
from tmm_core.verify.environment_faults import BUDGET_ENDED


class Relying(FakeConfig):
    """A config that relies on the promise of static weights."""

    assumes = ("static_weights",)


def run(name: str, us: float | None, tile: int = 1, kernel: Any = None, **fields: Any) -> Any:
    """A run of a compiled candidate that was timed once, unless ``us`` is None."""
    kernel = kernel or (FakeBlas() if name == "blas" else FakeKernel(name))
    found = CandidateRun(Candidate(kernel, FakeConfig(tile=tile)))
    found.samples = [] if us is None else [us]
    found.runner = SimpleNamespace(inputs=[0, 1], name=f"{name}{tile}")  # type: ignore[assignment]
    for field, value in fields.items():
        setattr(found, field, value)
    return found


def names(runs: Sequence[CandidateRun]) -> str:
    return " ".join(f"{each.candidate.kernel.name}{each.candidate.config.to_json()['tile']}"
                    for each in runs)  # fmt: skip


# -- which candidates stay -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "keep", "limit", "invariant", "left"),
    [
        ({"blas": 9.0, "a": 5.0, "b": 6.5, "c": 6.6}, 1.3, 9, False, "a1 b1 blas1"),
        ({"blas": 9.0, "a": 5.0, "b": 6.0, "c": 6.1}, 1.3, 2, False, "a1 b1 blas1"),
        ({"blas": 1.0, "a": 5.0, "b": 6.0}, 1.3, 9, False, "blas1"),
        ({"blas": 1.0, "a": 5.0, "b": 6.0}, 1.3, 9, True, "blas1 a1 b1"),
        ({"blas": 1.0}, 1.3, 9, True, "blas1"),
    ],
)
def test_blas_and_candidates_near_the_best_stay(
    times: dict[str, float], keep: float, limit: int, invariant: bool, left: str
) -> None:
    racing = [run(name, us) for name, us in times.items()]
    found = survivors(problem(batch_invariant=invariant), racing, keep, limit)
    assert names(found) == left


def test_the_best_config_of_each_kernel_is_a_reserve() -> None:
    """Its best config that relies on no promise is another. The limit is 3 × the best time."""
    a, b, c = (FakeKernel(name) for name in "abc")
    relying = CandidateRun(Candidate(a, Relying(tile=9)), samples=[4.0], runner=run("x", 1).runner)
    racing = [
        run("a", 6.0, 1, a), run("a", 5.0, 2, a), relying, run("b", 12.0, 1, b),
        run("c", 12.1, 1, c), run("d", 1.0, runner=None), run("e", None),
    ]  # fmt: skip
    assert names(reserves(problem(), racing)) == "a9 a2 b1"


@pytest.mark.parametrize(
    ("m", "times", "left"),
    [
        (64, {"blas": 10.0, "a": 9.9, "b": 9.91}, "a1"),
        (64, {"blas": 10.0, "a": 9.95, "b": 9.96}, "a1"), (64, {"blas": 10.0, "a": 13.0}, "a1"),
        (64, {"blas": 10.0, "a": 13.01}, ""), (64, {"a": 13.0}, "a1"),
        (63, {"blas": 10.0, "a": 9.95}, ""), (63, {"blas": 10.0, "a": 9.9, "b": 9.8}, "a1 b1"),
    ],
)  # fmt: skip
def test_which_reserves_are_measured_inside_the_bucket(
    m: int, times: dict[str, float], left: str
) -> None:
    """If M is not the edge of its bucket, no other M is measured."""
    spare = [run(name, us) for name, us in times.items()]
    assert names(for_the_bucket(problem(m=m), spare)) == left


def test_two_configs_of_each_reduction_order_and_the_best_elsewhere_race() -> None:
    """The expected time at another M is the time here, scaled by the ratio of estimates."""

    class Estimating(Summing):
        def estimate_us(self, problem: Problem, config: FakeConfig) -> float | None:
            return None if config.tile == 6 else 1.0 if config.tile != 5 or problem.m == 64 else 0.5

    names_ = {1: "one", 2: "one", 3: "one", 4: "two", 5: "one", 6: "one", 7: None}
    kernel = Estimating("k", names_)
    times = {1: 5.0, 2: 6.4, 3: 6.45, 4: 50.0, 5: 9.0, 6: 9.1, 7: 1.0}
    racing = [run("k", us, tile, kernel) for tile, us in times.items()]
    instance = problem(m=64, batch_invariant=True)
    assert names(of_each_arithmetic(instance, racing, 1.3)) == "k1 k2 k4 k5"
    assert names(of_each_arithmetic(instance.at(63), racing, 1.28)) == "k1 k2 k4"
    assert names(of_each_arithmetic(instance.at(63), racing, 1.27)) == "k1 k4"
    # The fastest here has no estimate, so it may be slower than any other elsewhere.
    unknown = [run("k", us, tile, kernel) for tile, us in {6: 5.0, 1: 5.1, 5: 9.0}.items()]
    assert names(of_each_arithmetic(instance, unknown, 1.3)) == "k6 k1 k5"


# -- a candidate's result ----------------------------------------------------------------------


def test_a_result_holds_the_measurements() -> None:
    kernel = FakeKernel("k", version="7", traits=replace(INVARIANT, deterministic=False))
    found = run("k", None, 3, kernel, status="ok", error=0.25, workspace=12, steady_us=2.34567,
                samples=[1.23456, 2.0], inside_us={33: 4.56789}, reason="said")  # fmt: skip
    assert found.result(problem()) == revised(
        result("k", 1.0, config={"tile": 3}), version="7", samples_us=(1.235, 2.0), error=0.25,
        inside_us={33: 4.568}, steady_us=2.346, workspace_bytes=12, deterministic=False,
        batch_invariant=True, reason="said", tolerance=found.result(problem()).tolerance,
    )  # fmt: skip
    assert found.result(problem()).tolerance is not None
    found.error, found.steady_us, found.status = math.nan, None, "failed"
    odd = found.result(problem())
    assert (odd.error, odd.steady_us, odd.status) == (None, None, "failed")
    assert odd.tolerance is not None
    found.error = math.inf
    assert found.result(problem()).error is None
    found.error = None
    assert found.result(problem()).tolerance is None


@pytest.mark.parametrize(
    ("status", "cause", "raised", "faulty"),
    [
        ("wrong", None, None, True), ("failed", None, None, False),
        ("failed", None, ValueError("x"), True), ("failed", "hung", ValueError("x"), True),
        ("failed", "alike", ValueError("x"), True), ("failed", "passing", ValueError("x"), False),
        ("failed", "toolchain", ValueError("x"), False), ("failed", "hung", None, False),
        ("slow", None, None, False), ("slow", None, ValueError("x"), False),
    ],
)  # fmt: skip
def test_which_outcomes_are_faults_of_the_kernel(
    status: Any, cause: Any, raised: Any, faulty: bool
) -> None:
    for name, found in (("k", faulty), ("blas", False)):
        assert run(name, 1.0, status=status, cause=cause, raised=raised).is_faulty is found


@pytest.mark.parametrize(
    ("us", "launches"),
    [(0.0, 60), (1.0, 60), (333.0, 60), (334.0, 59), (400.0, 50), (5e3, 4), (1e6, 4)],
)
def test_a_winner_is_launched_4_to_60_times(us: float, launches: int) -> None:
    assert _repeats(us) == launches


def test_blas_and_verified_candidates_are_not_verified_again() -> None:
    fresh = run("k", 1.0)
    assert _unverified(fresh) is fresh
    for other in (None, run("blas", 1.0), run("k", 1.0, verified=True)):
        assert _unverified(other) is None


# -- the rounds ------------------------------------------------------------------------------


class Timer:
    """Returns the next of each candidate's times, and notes which are timed together."""

    def __init__(self, times: dict[str, list[float]] | None = None) -> None:
        self.times, self.seen = times or {}, list[Any]()

    def steady_steps(self, runners: Any, rounds: int, **options: Any) -> Any:
        yield from ()
        assert (rounds, options) == (1, {"copies": 2, "steady_us": stages.STEADY_US})
        self.seen.append(" ".join(each.name for each in runners))
        return [[self.times[each.name].pop(0)] for each in runners]

    def measure_steps(self, runners: Any, *, rounds: int, copies: int, burst_us: float) -> Any:
        yield from ()
        self.seen.append((rounds, burst_us))
        if (
            broken := next((each for each in runners if each.name in self.times), None)
        ) is not None:
            self.times.pop(broken.name)
            raise LaunchError(broken, ValueError("launch"))
        return [[10.0] * rounds for _ in runners]


def tuning(timer: Any, instance: Problem | None = None, memory: int | None = None) -> Tuning:
    """A tuning whose stages are run one by one."""
    deadline = Deadline(math.inf)
    launchers: Any = SimpleNamespace(deadline=deadline, submit=lambda *_: ())
    return Tuning(
        instance or problem(m=63), settings(tune_memory=memory), timer, launchers, Findings()
    )


@pytest.mark.parametrize(
    ("bursts", "steady", "seen"),
    [
        # Short calls, and calls that no kernel makes faster.
        ({"blas": 200.0, "a": 149.0}, {}, []),
        ({"blas": 200.0, "a": 198.5}, {}, []),
        ({"a": 200.0, "b": 201.0}, {}, []),
        # BLAS is far behind: only candidates as fast as the best are timed.
        ({"blas": 230.0, "a": 200.0}, {}, []),
        ({"blas": 230.0, "a": 200.0, "b": 204.0}, {"a": [2], "b": [1]}, ["a1 b1"]),
        ({"blas": 230.0, "a": 200.0, "b": 204.1}, {}, []),
        ({"blas": 230.0, "a": 199.0, "b": 200.0, "c": 201.0}, {"a": [2], "b": [1]}, ["a1 b1"]),
        # BLAS is near: it is timed, with the best two.
        (
            {"blas": 210.0, "a": 200.0, "b": 201.0, "c": 202.0},
            {"blas": [210], "a": [200], "b": [201]}, ["blas1 a1 b1"],
        ),
        # A time close to the longest that may win: all are timed again, in reverse order.
        (
            {"blas": 210.0, "a": 200.0, "b": 206.0},
            {"blas": [210, 212], "a": [210, 208], "b": [208, 214]},
            ["blas1 a1 b1", "b1 a1 blas1"],
        ),
        # Both are slower than BLAS: two more are timed, four in all.
        (
            {"blas": 210.0, "a": 200.0, "b": 201.0, "c": 202.0, "d": 203.0, "e": 204.0},
            {"blas": [210], "a": [230], "b": [240], "c": [200], "d": [200]},
            ["blas1 a1 b1", "c1 d1"],
        ),
        # Both take the longest time with which they may win: no others are timed.
        (
            {"blas": 210.0, "a": 200.0, "b": 201.0, "c": 202.0},
            {"blas": [100] * 2, "a": [102] * 2, "b": [102] * 2},
            ["blas1 a1 b1", "b1 a1 blas1"],
        ),
        # An unclear time does not matter if another candidate is clearly faster.
        (
            {"blas": 210.0, "a": 200.0, "b": 201.0},
            {"blas": [210], "a": [190], "b": [214]}, ["blas1 a1 b1"],
        ),
    ],
)  # fmt: skip
def test_which_candidates_are_timed_in_steady_state(
    bursts: dict[str, float], steady: dict[str, list[float]], seen: list[str]
) -> None:
    timer = Timer({f"{name}1": list(times) for name, times in steady.items()})
    racing = [run(name, us) for name, us in bursts.items()]
    drained(tuning(timer)._race_in_steady_state(racing))
    assert timer.seen == seen
    assert not any(timer.times.values())
    means = {name: sum(times) / len(times) for name, times in steady.items()}
    assert {r.candidate.kernel.name: r.steady_us for r in racing} == {
        name: means.get(name) for name in bursts
    }
    invariant = tuning(timer, problem(m=63, batch_invariant=True))
    drained(invariant._race_in_steady_state(racing))
    assert timer.seen == seen


@pytest.mark.parametrize(
    ("us", "settle", "again", "seen"),
    [
        (10.0, None, True, [(9, 5.0)]), (10.0, 0, True, [(9, 5.0)]),
        (10.0, 4, True, [(4, 5.0), (9, 5.0)]), (149.0, 4, True, [(4, 5.0), (9, 5.0)]),
        (
            150.0, 4, True,
            [(4, 5.0), (3, 5.0), "again", (1, 5.0), (3, 5.0), "again", (1, 5.0), (3, 5.0)],
        ),
        (150.0, None, True, [(9, 5.0)]), (150.0, 4, False, [(4, 5.0), (9, 5.0)]),
    ],
)  # fmt: skip
def test_the_samples_of_a_round(us: float, settle: Any, again: bool, seen: list[Any]) -> None:
    timer = Timer()
    if again:
        timer.forget_captures = lambda: timer.seen.append("again")  # type: ignore[attr-defined]
    racing = [run("blas", us), run("k", us + 1), run("gone", 1.0, runner=None)]
    drained(tuning(timer)._measure(racing, 9, 5.0, settle))
    assert timer.seen == seen
    assert [each.samples for each in racing] == [[10.0] * 9, [10.0] * 9, [1.0]]


@pytest.mark.parametrize("settle", [None, 0])
@pytest.mark.parametrize("name", ["blas", "k"])
def test_a_last_round_in_which_blas_was_disturbed_is_repeated(
    name: str, settle: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer, racing = Timer(), [run("k", 9.0), run("blas", 9.0)]

    def measure(runners: Any, *, rounds: int, **_: Any) -> Any:
        yield from ()
        timer.seen.append(rounds)
        odd = [10.0, 30.0] * rounds
        return [odd[:rounds] if each.name == f"{name}1" else [10.0] * rounds for each in runners]

    monkeypatch.setattr(timer, "measure_steps", measure)
    drained(tuning(timer)._measure(racing, 4, 5.0, settle))
    assert timer.seen == [4] * (1 + (name == "blas" and settle is not None))


def test_a_launch_that_fails_costs_its_candidate_and_the_others_are_timed_again() -> None:
    timer, racing = Timer({"b1": []}), [run("blas", 9.0), run("a", 9.0), run("b", 9.0)]
    drained(tuning(timer)._measure(racing, 3, 5.0))
    assert timer.seen == [(3, 5.0), (3, 5.0)]
    assert [each.samples for each in racing] == [[10.0] * 3, [10.0] * 3, [9.0]]
    assert (racing[2].status, racing[2].runner) == ("failed", None)
    with pytest.warns(TmmWarning, match=r"^timing .* failed: "):
        drained(tuning(SimpleNamespace())._measure(racing, 3, 5.0))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("count", [6, 7])
def test_the_race_has_two_rounds_if_many_stay(count: int, late: bool) -> None:
    """BLAS and six candidates need one round only."""
    timer = Timer()
    kernel = FakeKernel("k")
    racing = [run("k", 10.0 + i / 100, i + 1, kernel) for i in range(count)] + [run("blas", 12.0)]
    one = tuning(timer)
    one._launchers.deadline.at = 0.0 if late else math.inf
    stayed = drained(one._race(racing))
    second = (stages.SECOND, stages.SECOND_US)
    final = (stages.FINAL, 2 * stages.SECOND_US)
    assert timer.seen == ([] if late else [final] if count == 6 else [second, final])
    # The race measures 10 µs for all; after the deadline, earlier times count. Four and BLAS stay.
    assert sorted(names(stayed).split()) == ["blas1", "k1", "k2", "k3", "k4"]


@pytest.mark.parametrize(
    ("memory", "workspace", "fits"),
    [(None, 2**40, True), (2**20, 2**20, True), (2**20, 2**20 + 1, False)],
)
def test_scratch_memory_is_within_the_limit(memory: Any, workspace: int, fits: bool) -> None:
    found = run("k", 1.0, kernel=FakeKernel("k", workspace=workspace), launcher=len)
    tuning(Timer(), memory=memory)._weigh(found)
    assert found.workspace == workspace
    assert (found.launcher is not None) is fits
    if not fits:
        assert (found.status, found.reason) == (
            "failed",
            "takes 1 MiB of scratch memory, and tune_memory (TMM_TUNE_MEMORY) is 1",
        )


def test_a_kernel_that_is_set_aside_is_not_timed() -> None:
    kernel = FakeKernel("k")
    kernel.workspace_bytes = lambda problem, config: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    d, _ = dispatcher(FakeBlas(), kernel)
    found = run("k", 1.0, kernel=d.registry.kernel("k"), launcher=len)
    with pytest.warns(TmmWarning, match="set aside: workspace_bytes raised ZeroDivisionError"):
        tuning(Timer())._weigh(found)
    assert (found.status, found.launcher, found.runner) == ("failed", None, None)
    blas = run("blas", 1.0, launcher=len)
    tuning(Timer())._weigh(blas)
    assert blas.launcher is len


@pytest.mark.parametrize("late", [False, True])
def test_after_the_budget_only_the_first_batch_is_tried(late: bool) -> None:
    timer = Timer()
    one = tuning(timer)
    one._launchers.deadline.at = 0.0 if late else math.inf
    one.__dict__["_copies"] = SimpleNamespace(
        runner=lambda launcher: SimpleNamespace(inputs=[0], name="x")
    )
    one._verify = lambda *_: iter(())  # type: ignore[method-assign,assignment,return-value]
    racing = [run(name, None, launcher=len, runner=None) for name in ("blas", "a", "b")]
    racing.append(run("gone", None, launcher=None, runner=None))
    drained(one._try(racing, {racing[0].candidate, racing[1].candidate}))
    assert [len(each.samples) for each in racing] == [3, 3, 0 if late else 3, 0]
    assert racing[2].reason == (BUDGET_ENDED if late else None)
    assert timer.seen == [(stages.SCREENING, stages.SCREENING_US)]


def test_a_race_of_large_products_ends_in_steady_state() -> None:
    timer = Timer({"blas1": [12.0], "k1": [10.0]})
    racing = [run("k", 10.0), run("blas", 12.0), run("gone", 11.0, runner=None)]
    one = tuning(timer)
    one._measure = lambda *_: iter(())  # type: ignore[method-assign,assignment,return-value]
    for each in racing:
        each.samples = [each.time * 15]
    racing[1].samples = [160.0]
    assert names(drained(one._race(racing))) == "k1 blas1"
    assert [each.steady_us for each in racing] == [10.0, 12.0, None]


@pytest.mark.parametrize(
    ("name", "error", "left"),
    [
        ("k", MemoryError("x"), Obstacle("passing", "at M=33: MemoryError: x")),
        ("blas", MemoryError("x"), None), ("k", ValueError("x"), None),
        ("k", TimeoutError(BUDGET_ENDED), None),
    ],
)  # fmt: skip
def test_a_kernel_that_lacked_memory_inside_the_bucket_is_tried_again(
    name: str, error: Exception, left: Obstacle | None
) -> None:
    one = tuning(Timer())
    one._leave_inside(run(name, 1.0), error, 33)
    assert one._findings.left == ({} if left is None else {("k", "1"): left})


@pytest.mark.parametrize(
    ("fields", "kernels", "more"),
    [
        ({}, "blas k", True), ({}, "blas", False), ({"batch_invariant": True}, "blas k", False),
        ({"m": 1}, "blas k", None),
    ],
)  # fmt: skip
def test_blas_alone_is_timed_at_more_places_of_a_bucket(
    fields: dict[str, Any], kernels: str, more: bool | None
) -> None:
    """``more`` is None if the bucket has one M only."""
    instance = replace(problem(m=128), **fields)
    one = tuning(Timer(), instance)
    measured: list[dict[int, str]] = []

    def measure_at(places: Any) -> Any:
        measured.append({m: names(runs) for m, runs in places.items()})
        yield from ()

    one.measure_at = measure_at  # type: ignore[method-assign]
    drained(one._measure_inside([run(name, 1.0) for name in kernels.split()]))
    if more is None:
        assert measured == []
        return
    (places,) = measured
    every = dict.fromkeys(inside(instance), " ".join(f"{name}1" for name in kernels.split()))
    others = dict.fromkeys(between(instance.extent), "blas1") if more else {}
    assert places == every | others


# -- the tuner ---------------------------------------------------------------------------------


def test_findings_say_whether_the_tuning_verified_its_winner() -> None:
    """BLAS needs no verification. A winner on an older record was verified by another tuning."""
    times: dict[Any, float] = {"blas": 100.0, "k": 50.0, "slow": 200.0}
    blas, k, slow = FakeBlas(), FakeKernel("k"), FakeKernel("slow")

    def verified(kernels: Any, **more: Any) -> tuple[bool, TuningRecord]:
        found = Findings()
        record = Tuner(FakeTimer(times)).tune(
            problem(), kernels, settings(), findings=found, **more
        )
        return found.verified, record

    assert verified([blas])[0]
    assert verified([blas, slow])[0]
    fresh, record = verified([blas, k])
    assert fresh
    times["k"] = 300.0
    old, record = verified([blas, k, slow], before=record)
    assert record.best.kernel in ("k", "blas")
    assert old is (record.best.kernel == "blas")


@pytest.mark.parametrize(
    ("wrong", "races"),
    [
        ((), ["blas1 k1 k2 k3 k4"]),
        ((1,), ["blas1 k1 k2 k3 k4", "blas1 k2 k3 k4"]),
        ((1, 2), ["blas1 k1 k2 k3 k4", "blas1 k2 k3 k4", "blas1 k3 k4"]),
        ((1, 2, 3), ["blas1 k1 k2 k3 k4", "blas1 k2 k3 k4", "blas1 k3 k4"]),
    ],
)
def test_after_a_wrong_winner_the_candidates_that_it_excluded_race(
    wrong: tuple[int, ...], races: list[str]
) -> None:
    """There are three races at most."""
    one, seen, kernel = tuning(Timer()), list[str](), FakeKernel("k")
    one.runs = [run("blas", 9.0), *(run("k", tile, tile, kernel) for tile in (1, 2, 3, 4))]
    one.runs.append(run("gone", 0.5, runner=None))

    def race(racing: list[CandidateRun]) -> Any:
        yield ()
        seen.append(names(racing))
        return racing[:2]  # BLAS and the fastest

    def verify(winner: CandidateRun) -> Any:
        yield ()
        winner.verified = True
        if winner.candidate.config.to_json()["tile"] in wrong:
            winner.fail("another result", "wrong")

    stubs: Any = one
    stubs._search = stubs._measure_inside = lambda _: iter(())
    stubs._race, stubs._verify_whole = race, verify
    drained(one.run(searched(problem(), [], [])))
    assert seen == races


@pytest.mark.parametrize("races", [0, 1])
def test_a_race_without_blas_neither_begins_nor_counts(races: int) -> None:
    """Kernels would win because BLAS had too little memory."""
    one, seen = tuning(Timer()), list[str]()
    one.runs = [run("blas", 9.0), run("k", 1.0)]

    def race(racing: list[CandidateRun]) -> Any:
        yield ()
        seen.append(names(racing))
        one.runs[0].fail(MemoryError("full"))
        return racing

    stubs: Any = one
    stubs._search = stubs._measure_inside = stubs._verify_whole = lambda _: iter(())
    stubs._race, stubs._winner = race, lambda: None
    if not races:
        one.runs[0].fail(MemoryError("full"))
    with pytest.raises(RuntimeError, match=r"^blas does not run: MemoryError: full"):
        drained(one.run(searched(problem(), [], [])))
    assert seen == ["blas1 k1"] * races


SAME = "no such header"


@pytest.mark.parametrize(
    ("outcomes", "recorded", "left", "faults"),
    [
        # A kernel with one config within the budget counts as tried; for other causes it does not.
        (["k1", "k2 failed budget"], "blas1 k1", {}, {}),
        (["k1", "c1 failed budget"], "blas1 k1", {"c": "budget"}, {}),
        (["k1", "k2 failed toolchain"], "blas1 k1", {"k": "toolchain"}, {}),
        (["k1 failed", "k2 failed budget"], "blas1 k1", {}, {"k": SAME}),
        # Only causes of the environment stay.
        (["k1", "a1 failed hung", "b1 wrong"], "blas1 k1 b1", {"a": "hung"},
         {"a": SAME, "b": SAME}),
        # All kernels failed in the same way.
        (["a1 failed", "b1 failed"], "blas1", {"a": "alike", "b": "alike"},
         {"a": f"{SAME}; every kernel failed so", "b": f"{SAME}; every kernel failed so"}),
        (["a1 failed", "b1 failed passing"], "blas1", {"a": "alike", "b": "passing"},
         {"a": f"{SAME}; every kernel failed so"}),
        (["a1 failed", "a2 failed"], "blas1 a1 a2", {}, {"a": SAME}),
        (["a1 failed", "b1 failed", "c1"], "blas1 a1 b1 c1", {}, {"a": SAME, "b": SAME}),
    ],
)  # fmt: skip
def test_which_outcomes_are_recorded_left_for_later_or_reported(
    outcomes: list[str], recorded: str, left: dict[str, str], faults: dict[str, str]
) -> None:
    one = tuning(Timer())
    one.runs, kernels = [run("blas", 5.0, status="ok")], {n: FakeKernel(n) for n in "kabc"}
    for outcome in outcomes:
        named, status, cause = [*outcome.split(), "", ""][:3]
        name, tile = named[:-1], int(named[-1])
        found = run(name, 4.0, tile, kernels[name], status=status or "ok", cause=cause or None)
        if status:
            found.samples, found.reason, found.raised = [], SAME, ValueError("x")
        if cause == "budget":
            found.reason = BUDGET_ENDED
        one.runs.append(found)
    results = one.conclude()
    assert " ".join(f"{each.kernel}{each.config['tile']}" for each in results) == recorded
    findings = one._findings
    assert {name: why.cause for (name, _), why in findings.left.items()} == left
    reported = [fault for each in findings.faults.values() for fault in each]
    assert {name: reason.partition(" (")[0] for name, reason in reported} == faults
    assert not any(each.raised for each in one.runs)


def test_the_timer_and_the_threads_of_a_tuning() -> None:
    for mode, workers in (("background", 1), ("tune", 7)):
        one = tuner.Tuner(workers=7)._tuning(
            problem(), settings(on_cache_miss=mode), Deadline(math.inf), Findings()
        )
        assert isinstance(one._timer, HostTimer)
        assert one._launchers.workers == workers
        assert one._eager is (mode == "tune")


@pytest.mark.parametrize("wrong", [False, True])
def test_a_race_at_another_m_leaves_the_winner_unless_it_is_wrong_there(wrong: bool) -> None:
    """The winner need not have the shortest burst: it may have won in steady state."""

    def spoil(out: torch.Tensor) -> torch.Tensor:
        return out + wrong

    kernel = FakeKernel("a", spoil=spoil)
    timed = [
        result("blas", 30.0),
        result("a", 12.0),
        revised(result("b", 10.0), inside_us={33: 1}),
    ]
    edge = problem(m=64)
    before = TuningRecord(edge.to_json(), 1, tuple(timed), "", 1.0)
    racing = {1: Candidate(kernel, FakeConfig())}
    one = Tuner(FakeTimer({"a": 7.0}))
    after = drained(one.race_at(edge, before, 40, racing, settings()))
    assert after.winner == (2 if wrong else 1)
    assert [each.status for each in after.candidates] == ["ok", "wrong" if wrong else "ok", "ok"]
    assert after.candidates[1].inside_us == ({} if wrong else {40: 7.0})
    assert (after.candidates[0], after.candidates[2]) == (timed[0], timed[2])


def test_a_result_without_samples_has_no_rank() -> None:
    timed = [
        revised(result("a", 1.0), samples_us=()), result("b", 2.0),
        revised(result("c", 1.0), status="slow"), revised(result("d", 1.0), status="wrong"),
    ]  # fmt: skip
    record = TuningRecord(problem().to_json(), 1, tuple(timed), "", 1.0)
    assert [each.kernel for each in ranking.fastest_first(record)] == ["b"]
    assert [each.kernel for each in ranking.fastest_first(record, "slow")] == ["b", "c"]


def test_a_note_of_another_process_is_read(tmp_path: Path) -> None:
    one, other = Untried(CacheStore(tmp_path)), Untried(CacheStore(tmp_path))
    assert one.get(problem()) is None
    other.note(problem(), set(), {("k", "1"): Obstacle("passing", "no memory")})
    noted = one.get(problem())
    assert noted is not None
    assert noted.kernels == {("k", "1"): Obstacle("passing", "no memory")}
    assert one.of_device(problem().device) == [noted]


def test_a_note_that_the_disk_refuses_holds_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Untried(CacheStore(tmp_path)), Untried(CacheStore(tmp_path))
    monkeypatch.setattr(type(one._notes(problem().device)), "add", lambda *_: None)
    left = {("k", "1"): Obstacle("toolchain", "no compiler")}
    one.note(problem(), set(), left)
    assert (one.get(problem()), other.get(problem())) == (one._written[problem()][0], None)
    assert one.left(problem()) == (frozenset(left), frozenset())


class Work:
    """Tunings in the background with a fake clock, and the steps that were run."""

    def __init__(self) -> None:
        self.now, self.took, self.free = 100.0, list[str](), True
        self.background = Background(lambda _: contextlib.nullcontext(self.free), lambda: self.now)

    def add(self, name: str, *waits: Any, done: bool = False) -> None:
        def steps() -> Any:
            for each in waits:
                self.took.append(name)
                yield each
            self.took.append(f"{name} ended")

        self.background.add(name, Task(problem(), steps(), lambda: done))

    def resume(self, seconds: float, share: float = 0.1) -> list[str]:
        self.now += seconds
        self.took.clear()
        self.background.resume(share)
        return list(self.took)


def test_a_slice_takes_a_share_of_the_time_since_a_tuning_waits() -> None:
    work = Work()
    work.now = 200.0  # no tuning was pending meanwhile
    work.add("a", *[()] * 9)
    assert work.resume(0.0) == []
    work.free = False  # another process measures
    assert work.resume(0.01) == []
    assert work.background._credit == pytest.approx(0.001)
    work.free = True
    assert work.resume(0.0) == ["a"] * 9 + ["a ended"]  # steps that take no time
    assert "a" not in work.background
    work.add("b", (), ())
    work.add("b", (), (), ())  # ignored: b is waiting already
    assert work.resume(1.0) == ["b", "b", "b ended"]
    work.add("done", (), done=True)  # another process stored the record
    assert work.resume(1.0) == []
    assert len(work.background) == 0


def test_while_a_tuning_waits_for_compilers_the_next_one_begins() -> None:
    work, compiling = Work(), Future[None]()
    work.add("a", [compiling], ())
    work.add("b", [compiling], ())
    work.add("c", ())
    assert work.resume(0.01) == ["a"]
    assert work.resume(0.01) == ["b"]
    assert work.resume(0.01) == []  # only two are in progress, and c is the third
    assert work.resume(1.01) == ["a", "a ended"]  # resumed after a second without a result
    compiling.set_result(None)
    assert work.resume(0.01) == ["b", "b ended"]
    assert work.resume(0.01) == ["c", "c ended"]


def test_a_waiting_tuning_that_may_not_measure_waits_for_another_second() -> None:
    work, compiling = Work(), Future[None]()
    work.add("a", [compiling], ())
    assert work.resume(0.01) == ["a"]
    work.free = False
    assert work.resume(1.01) == []
    work.free = True
    assert work.resume(0.01) == []
    assert work.resume(1.01) == ["a", "a ended"]


def test_the_second_tuning_takes_no_memory_while_the_first_waits() -> None:
    work, compiling, other = Work(), Future[None](), Future[None]()
    work.add("a", [compiling], ())
    work.add("b", [other], ())
    assert [work.resume(0.01), work.resume(0.01)] == [["a"], ["b"]]
    other.set_result(None)
    assert work.resume(0.01) == []
    compiling.set_result(None)
    assert work.resume(0.01) == ["a", "a ended"]
    assert work.resume(0.01) == ["b", "b ended"]


GPU = replace(problem().device, type="cuda")


@pytest.mark.parametrize(
    ("begun", "started_on", "here", "capturing", "tf32", "may"),
    [
        (False, None, 1, False, False, True), (True, 1, 1, False, False, True),
        (True, 0, 1, False, False, False), (False, None, 0, False, False, False),
        (True, 1, 1, True, False, False), (True, 1, 1, False, True, False),
    ],
)  # fmt: skip
def test_where_a_tuning_on_a_gpu_may_go_on(
    begun: bool, started_on: Any, here: int, capturing: bool, tf32: bool, may: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A tuning goes on only on its own GPU, of the problem's kind, and outside of captures."""
    devices = [problem().device, GPU]
    monkeypatch.setattr(background, "fingerprint", lambda device: devices[device.index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: here)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    task = Task(problem(device=GPU, tf32=tf32), iter(()), lambda: False)  # type: ignore[arg-type]
    task.pending, task.gpu = [] if begun else None, started_on
    assert task.may_run() is may


def test_a_slice_on_a_gpu_is_on_the_stream_of_its_tuning_and_waits_for_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time of the caller's own launches is not charged."""
    work, idle, used = Work(), [True], list[Any]()

    def synchronize() -> None:
        work.now += 0.5 if not idle[0] else 0.0
        idle[0] = True

    stream = SimpleNamespace(query=lambda: idle[0], synchronize=synchronize)
    monkeypatch.setattr(Task, "may_run", lambda self: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(
        torch.cuda, "stream", lambda each: contextlib.nullcontext(used.append(each))
    )

    def steps() -> Any:
        for _ in range(3):
            work.took.append("a")
            yield [Future[None]()]

    task = Task(problem(device=GPU), steps(), lambda: False)
    work.background.add("a", task)
    idle[0] = False
    assert work.resume(0.01) == []  # the credit does not fill a slice
    assert work.resume(1.0) == ["a"]
    assert (task.gpu, task.stream, used) == (3, stream, [stream])
    assert work.background._credit == pytest.approx(background.SLICE)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(**vars(stream)))
    assert work.resume(2.0) == ["a"]
    assert used == [stream, stream]


# -- the budget ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rested", "starting", "waited", "at", "rests"),
    [
        (None, False, 0.5, 50.0, 0.0), (True, False, 0.5, 50.5, 0.5), (None, True, 0.5, 50.5, 0.0),
        (None, False, 1.0, 50.0, 0.0), (None, False, 3.0, 53.0, 0.0),
    ],
)  # fmt: skip
def test_which_times_are_charged_to_the_budget(
    rested: Any, starting: bool, waited: float, at: float, rests: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Pauses of the caller, the start of compile processes and seconds for which the process was
    stopped are not charged."""
    clock = iter([10.0, 10.0 + waited])
    monkeypatch.setattr(tuner, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    freed: list[bool] = []
    waits: list[Any] = []
    one = tuner.Tuner(compilers=SimpleNamespace(are_starting=lambda pending: starting))  # type: ignore[arg-type]

    def steps() -> Any:
        waits.append((yield "pending"))

    deadline = Deadline(50.0)
    released: Any = SimpleNamespace(release=lambda: freed.append(True))
    taken = one._run(released, steps(), deadline)
    assert next(taken) == "pending"  # type: ignore[comparison-overlap]
    with pytest.raises(StopIteration):
        taken.send(rested)
    assert (deadline.at, deadline.rested, waits, freed) == (at, rests, [rested], [True])


def test_pauses_while_kernels_are_queried_are_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    for module in (tuner, candidate_launchers):
        monkeypatch.setattr(module, "time", clock)
    kernels = [FakeBlas(), *(FakeKernel(f"k{number}") for number in range(3))]
    steps = Tuner(FakeTimer({"k2": 5.0})).steps(problem(), kernels, settings(tune_budget=1.0))
    rested: Any = None
    pauses = 0
    while True:
        try:
            pending = steps.send(rested)
        except StopIteration as end:
            record = end.value
            break
        wait(pending)
        rested = None if pending else True
        now[0] += 0.0 if pending else 10.0
        pauses += not pending
    assert pauses > len(kernels)
    assert {c.kernel for c in record.candidates} == {kernel.name for kernel in kernels}
    assert (record.best.kernel, record.tuning_seconds) == ("k2", 0.0)
    assert all(c.reason is None for c in record.candidates)


@pytest.mark.parametrize("forked", [False, True])
def test_a_tuning_that_is_closed_frees_its_memory_in_its_own_process(
    forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[bool] = []
    closed: list[bool] = []

    def steps() -> Any:
        try:
            yield "pending"
        finally:
            closed.append(True)

    one = tuner.Tuner(compilers=SimpleNamespace(are_starting=lambda pending: False))  # type: ignore[arg-type]
    released: Any = SimpleNamespace(release=lambda: freed.append(True))
    taken = one._run(released, steps(), Deadline(50.0))
    next(taken)
    if forked:
        monkeypatch.setattr(tuner.os, "getpid", lambda: 0)
    taken.close()
    assert (closed, freed) == ([True], [] if forked else [True])


def test_preload_verifies_and_times_small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product has a layer's layouts and an epilogue, and is measured once."""
    timed: list[Any] = []
    timer = SimpleNamespace(
        measure=lambda runs, rounds, **more: timed.append((len(runs), rounds, more)),
        release=lambda: timed.append("released"),
    )
    monkeypatch.setattr(tuner, "timer_for", lambda device: timer)
    verified: list[Any] = []
    verdict = tuner.Verifier.verdict
    monkeypatch.setattr(
        tuner.Verifier, "verdict", lambda self, run: verified.append(verdict(self, run).ok)
    )
    released: list[tuple[int, int]] = []
    release = tuner.Verifier.release
    monkeypatch.setattr(
        tuner.Verifier, "release",
        lambda self: (release(self), released.append((len(verified), len(timed)))),
    )  # fmt: skip
    blas = FakeBlas()
    tuner.Tuner().preload(blas, torch.device("cpu"))
    assert [str(each.epilogue) for each in blas.bound] == ["identity", "silu", "gelu"]
    for each in blas.bound:
        assert (each.m, each.n, each.k) == (48, 64, 64)
        assert (each.a.layout, each.b.layout, each.out.layout) == ("row", "col", "row")
        assert {each.a.dtype, each.b.dtype, each.out.dtype} == {torch.bfloat16}
    assert verified == [True] * 3
    assert timed == [(1, 1, {"copies": 1, "burst_us": 1.0})] * 3 + ["released"]
    assert released == [(1, 0), (2, 1), (3, 2)]  # before the next allocations


@pytest.mark.parametrize("blas", [False, True])
def test_the_first_batch_is_compiled_ahead_if_it_can_be_compared(blas: bool) -> None:
    kernels = [*([FakeBlas()] if blas else []), FakeKernel("k", tiles=(1, 2))]
    submit = SimpleNamespace(submit=lambda asked, candidate: (asked.m, str(candidate.config)))
    one = tuner.Tuner(compilers=submit)  # type: ignore[arg-type]
    one.prepare(problem(), kernels)
    found = {
        (job[1].kernel.name, future) for job, future in one.prepared.get(problem(), {}).items()
    }
    every = {("blas", (64, "tile=1")), ("k", (64, "tile=1")), ("k", (64, "tile=2"))}
    assert found == (every if blas else set())


# -- which configs are tried -------------------------------------------------------------------


def tried(kernel: str, tile: int) -> Candidate:
    return Candidate(KERNELS[kernel], FakeConfig(tile=tile))


KERNELS = {name: FakeKernel(name) for name in "abc"}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_estimates_are_trusted_more_after_more_timings(count: int) -> None:
    """A config is tried if estimate × least ratio of time to estimate × caution is below the best
    time."""
    assert CAUTION == (0.85, 0.9, 0.95)
    scale = CAUTION[min(count, 3) - 1] * 2.0
    kernel = FakeKernel("k", tiles=range(1, 31))
    estimates = {tile: 10.0 + tile for tile in range(1, 31)}
    kernel.estimate_us = lambda problem, config: estimates[config.tile]  # type: ignore[method-assign]
    for best, may in ((11.0 * scale, False), (11.0 * scale + 0.001, True)):
        one = searched(problem(), [kernel], [kernel])
        one._handed = {c for c in one._estimates if c.config.to_json()["tile"] != 1}
        others = [c for c in one._estimates if c.config.to_json()["tile"] > 26][:count]
        ratios = [2.0, 3.0, 4.0, 5.0]
        times = {c: one._estimates[c] * r for c, r in zip(others, ratios, strict=False)}  # type: ignore[operator]
        times[Candidate(FakeBlas(), FakeConfig())] = best
        assert [c.config.to_json()["tile"] for c in one.next_batch(times)] == [1] * may
        (waiting,) = [c for c in one._estimates if c.config.to_json()["tile"] == 1]
        assert one.lost([waiting], times) == [waiting] * (not may)


def test_a_kernel_without_a_time_has_not_lost() -> None:
    fast, new = FakeKernel("fast", estimate=1.0), FakeKernel("new", estimate=9.0)
    one = searched(problem(), [fast, new], [fast, new])
    times = {Candidate(fast, FakeConfig()): 1.0}
    assert one.lost([Candidate(new, FakeConfig())], times) == []
    assert one.lost([Candidate(fast, FakeConfig())], {Candidate(fast, FakeConfig()): 5.0}) == []


def test_what_the_first_batch_must_have_does_not_lose() -> None:
    """The best candidate of a likely kernel."""
    fast, slow = FakeKernel("fast", estimate=1.0), FakeKernel("slow", tiles=(1, 2, 3), estimate=1.2)
    one = searched(problem(), [fast, slow], [fast, slow])
    best, measured, other = (Candidate(slow, FakeConfig(tile=tile)) for tile in (1, 2, 3))
    assert best in one.first()
    times = {Candidate(fast, FakeConfig()): 1.0, measured: 9.0}
    assert one.lost([best, other], times) == [other]


def test_kernels_with_similar_estimates_alternate() -> None:
    """Estimates within a tenth of the best are alike; the other kernels follow by estimate."""
    estimates: dict[Candidate, float | None] = {
        tried("a", 1): 11.0, tried("b", 1): 10.0, tried("b", 2): 10.5, tried("b", 3): 12.0,
        tried("c", 1): 11.01, tried("a", 2): 11.5,
    }  # fmt: skip
    ranked = sorted(estimates, key=lambda c: estimates[c] or 0.0)
    found = _interleaved(ranked, estimates)
    assert [(c.kernel.name, c.config.to_json()["tile"]) for c in found] == [
        ("b", 1), ("a", 1), ("b", 2), ("a", 2), ("b", 3), ("c", 1),
    ]  # fmt: skip
    estimates[tried("c", 1)] = None  # without an estimate, the rank decides
    assert _interleaved([tried("c", 1), tried("b", 1), tried("a", 1)], estimates)[0] == tried(
        "c", 1
    )


def test_variants_of_a_tile_follow_other_tiles() -> None:
    kernel = Summing("k", dict.fromkeys((1, 2, 3), "one") | dict.fromkeys((4, 5), "two"))
    kernel.estimate_us = (  # type: ignore[method-assign]
        lambda problem, config: {1: 1.0, 2: 1.0, 3: 2.0, 4: 3.0, 5: 4.0}[config.tile]
    )
    one = searched(problem(batch_invariant=True), [kernel], [kernel])
    found = one._by_arithmetic(list(one._estimates))
    assert [c.config.to_json()["tile"] for c in found] == [1, 4, 3, 5, 2]


def test_equal_estimates_of_two_kernels_are_not_variants_of_a_tile() -> None:
    kernels: list[Any] = [Summing(name, dict.fromkeys((1, 2), "one")) for name in ("k", "j")]
    for kernel in kernels:
        kernel.estimate_us = lambda problem, config: float(config.tile)
    one = searched(problem(batch_invariant=True), kernels, kernels)
    found = one._by_arithmetic([Candidate(k, FakeConfig(tile=t)) for t in (1, 2) for k in kernels])
    assert [(c.kernel.name, c.config.to_json()["tile"]) for c in found] == [
        ("k", 1), ("j", 1), ("k", 2), ("j", 2),
    ]  # fmt: skip


def test_after_the_deadline_each_kernel_estimates_one_config(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only BLAS gives estimates for all of its configs."""
    now = 0.0
    monkeypatch.setattr(candidate_launchers, "time", SimpleNamespace(monotonic=lambda: now))
    kernel = FakeKernel("k", tiles=(1, 2, 3))
    one = searched(problem(), [kernel], [kernel], deadline=Deadline(0.0))
    assert len(one._estimates) == 3

    class Slow(FakeKernel):
        def estimate_us(self, problem: Problem, config: FakeConfig) -> float:
            nonlocal now
            now += 1.0
            return 1.0

    slow, blas = Slow("slow", tiles=(1, 2, 3)), FakeBlas(tiles=(1, 2))
    one = searched(problem(), [slow, blas, kernel], [slow, blas, kernel], deadline=Deadline(1.5))
    assert [(c.kernel.name, c.config.to_json()["tile"]) for c in one._estimates] == [
        ("blas", 1), ("blas", 2), ("slow", 1), ("slow", 2),
    ]  # fmt: skip
    assert one.empty == {kernel: BUDGET_ENDED}
    # BLAS is queried in any case; its first estimate may take the rest of the time.
    late = Slow("blas", tiles=(1, 2))
    one = searched(problem(), [kernel, late], [kernel, late], deadline=Deadline(now + 0.5))
    assert [(c.kernel.name, c.config.to_json()["tile"]) for c in one._estimates] == [("blas", 1)]
    assert one.empty == {kernel: BUDGET_ENDED}
    # So is the winner on record, with which the new kernels are compared.
    winner = FakeKernel("winner", tiles=(1, 2))
    best = result("winner", 1.0, config={"tile": 2})
    before = TuningRecord(problem().to_json(), 0, (best,), "2026-01-31T12:00:00Z", 1.0)
    one = searched(problem(), [kernel, winner], [kernel], before, deadline=Deadline(now - 1.0))
    assert one.empty == {kernel: BUDGET_ENDED}
    assert one._anchors == [Candidate(winner, FakeConfig(tile=2))]


@pytest.mark.parametrize(
    ("relies", "known", "found"),
    [((), (), [1]), ((2,), (), [2]), ((2,), (1,), [2]), ((2,), (2,), []), ((), (1,), [])],
)
def test_the_best_untried_config_of_each_kernel_is_on_record(
    relies: tuple[int, ...], known: tuple[int, ...], found: list[int]
) -> None:
    """If no tried config relies on a promise, the best one that does is recorded, too."""

    class Kernel(FakeKernel):
        config_type = FakeConfig

        def configs(self, problem: Problem) -> list[FakeConfig]:
            return [(Relying if tile in relies else FakeConfig)(tile=tile) for tile in (1, 2)]

        default_config = lambda self, problem: self.configs(problem)[0]  # noqa: E731

    kernel = Kernel("k", estimate=5.0)
    one = searched(problem(static_weights=True), [kernel], [kernel])
    every = {c.config.to_json()["tile"]: c for c in one._estimates}
    left = one.untried([every[tile] for tile in known])
    assert [c.config.to_json()["tile"] for c, _ in left] == found
    assert all(str(why).startswith("expects to take 5 µs; candidates that won") for _, why in left)


def test_the_incumbent_of_a_record() -> None:
    """The incumbent is the best kernel on record that is present in the same version."""
    timed = [result("blas", 1.0), result("gone", 2.0), revised(result("old", 3.0), version="0"),
             result("b", 5.0), result("a", 4.0)]  # fmt: skip
    before = TuningRecord(problem().to_json(), 3, tuple(timed), "", 1.0)
    kernels = [FakeBlas(), FakeKernel("old"), FakeKernel("a"), FakeKernel("b")]
    assert _incumbent(None, kernels) is None
    assert _incumbent(before, kernels[:2]) is None
    search = searched(problem(), kernels[:2], [], before)
    assert (search.empty, [each.kernel.name for each in search._anchors]) == ({}, ["blas"])
    for present, name in ((kernels, "b"), (kernels[:3], "a")):
        winner = _incumbent(before, present)
        assert winner is not None
        assert winner.kernel == name


def test_the_first_batch_has_the_best_config_with_and_without_a_promise() -> None:
    """A record that only had configs of a promise would not serve calls without it."""

    class Kernel(FakeKernel):
        def configs(self, problem: Problem) -> list[FakeConfig]:
            return [(Relying if tile < 40 else FakeConfig)(tile=tile) for tile in range(1, 42)]

        default_config = lambda self, problem: self.configs(problem)[0]  # noqa: E731

        def estimate_us(self, problem: Problem, config: FakeConfig) -> float:
            return 10.0 + config.tile / 100

    kernel = Kernel("k")
    one = searched(problem(static_weights=True), [kernel], [kernel])
    tiles = [c.config.to_json()["tile"] for c in one.first()]
    assert set(tiles) == {40, *range(1, 12)}


def test_that_candidates_could_not_be_timed_is_reported_once() -> None:
    one = tuning(FakeTimer({}))
    one._report_untimed()
    one.runs, one._untimed = [run("a", None)], "timing failed: no clock"
    with pytest.raises(RuntimeError, match=r"^timing failed: no clock$"):
        one._report_untimed()  # nothing was timed
    one.runs.append(run("b", 2.0))
    with pytest.warns(TmmWarning, match="timing failed: no clock"):
        one._report_untimed()
    one._report_untimed()  # warnings are errors here


@pytest.mark.parametrize(
    ("timed", "warns"), [([], True), ([None], False), ([2.0], True), ([None, 2.0], True)]
)
def test_a_round_that_cannot_be_timed_is_reported_if_others_were(
    timed: list[float | None], warns: bool
) -> None:
    """Without any time, the tuning reports it as its own error."""

    def broken(*given: Any) -> Any:
        raise ValueError("no clock")

    one = tuning(FakeTimer({}))
    one.runs = [run("a", us) for us in timed]
    reported = pytest.warns(TmmWarning, match="timing .* failed: no clock")
    with reported if warns else contextlib.nullcontext():
        assert drained(one._sampled([run("b", None)], broken)) == []
    assert one._untimed.endswith("failed: no clock")


def test_hints_that_name_no_candidate_here_are_dropped() -> None:
    kernel = FakeKernel("k")
    given: Any = [
        ("k", {"tile": 0}), ("blas", {"tile": 1}), ("gone", {"tile": 1}), ("k", {"tile": 2}),
        ("k", {"tile": 2}), ("k", {"x": 1}), ("k", {"tile": 3}),
    ]  # fmt: skip
    hints = Hints(given)
    found = _hinted(hints, [FakeBlas(), kernel], problem())
    assert [c.config.to_json()["tile"] for c in found] == [2, 3]


def test_a_deadline_passes_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate_launchers, "time", SimpleNamespace(monotonic=lambda: 5.0))
    assert [Deadline(at).passed for at in (4.9, 5.0, 5.1)] == [True, False, False]


# -- compiling and binding -------------------------------------------------------------------


def futures(**done: bool) -> dict[Any, Future[None]]:
    """A compile job for each of these kernels, completed or pending."""
    found: dict[Any, Future[None]] = {}
    for name, ends in done.items():
        kernel = FakeBlas() if name == "blas" else FakeKernel(name)
        future = found[problem(), Candidate(kernel, FakeConfig())] = Future()
        if ends:
            future.set_result(None)
    return found


def by_name(jobs: Any) -> dict[str, Any]:
    return {job[1].kernel.name: answer for job, answer in jobs.items()}


def test_compiled_candidates_are_bound_and_after_the_deadline_only_blas() -> None:
    late: list[Any] = []
    deadline = Deadline(math.inf)
    compilers: Any = SimpleNamespace(cancel_pending=late.extend)
    made = CandidateLaunchers(compilers, 2, None, torch.device("cpu"), None, deadline, {})
    made._waiting |= futures(a=True, b=True, slow=False)
    waiting = {job[1].kernel.name: future for job, future in made._waiting.items()}
    found = by_name(drained(made.some()))
    while len(found) < 2:  # one thread may end later
        found |= by_name(drained(made.some()))
    assert all(callable(launcher) for launcher in found.values())
    assert sorted(found) == ["a", "b"]
    assert (list(by_name(made._waiting)), late) == (["slow"], [])
    steps = made.some()
    assert next(steps) == [waiting["slow"]]
    steps.close()
    deadline.at = 0.0
    made._waiting |= futures(c=True, blas=True)
    found = by_name(drained(made.some()))
    assert set(late) == {waiting["slow"]}
    assert list(by_name(made._waiting)) == ["slow"]
    assert str(found["c"]) == BUDGET_ENDED
    assert isinstance(found["c"], TimeoutError)
    assert callable(found["blas"])
    waiting["slow"].cancel()
    found = by_name(drained(made.some()))
    assert (list(found), str(found["slow"])) == (["slow"], BUDGET_ENDED)
    assert drained(made.some()) == {}


def test_where_no_thread_starts_one_candidate_is_bound_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between them the tuning may show its progress and pass its deadline."""

    def refused(thread: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(candidate_launchers, "start_thread", refused)
    made = CandidateLaunchers(
        SimpleNamespace(), 2, None, torch.device("cpu"), None, Deadline(math.inf), {}
    )  # type: ignore[arg-type]
    made._waiting |= futures(a=True, b=True, c=True)
    for name in "abc":
        assert list(by_name(drained(made.some()))) == [name]
    assert drained(made.some()) == {}


def test_an_interrupt_of_a_binding_is_raised_and_other_exceptions_are_outcomes() -> None:
    made = CandidateLaunchers(
        SimpleNamespace(), 2, None, torch.device("cpu"), None, Deadline(math.inf), {}  # type: ignore[arg-type]
    )  # fmt: skip
    job = problem(), tried("a", 1)
    for error in (ValueError("x"), MemoryError("x")):
        made._outcomes = {job: error}
        assert drained(made.some()) == {job: error}
    made._outcomes = {job: KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        drained(made.some())


def test_which_compilations_continue() -> None:
    """A compilation that was submitted ahead is not begun again. Unneeded ones are cancelled."""
    begun: list[str] = []
    cancelled: list[Any] = []

    def submit(problem: Problem, candidate: Candidate) -> Future[None]:
        begun.append(candidate.kernel.name)
        return Future()

    compilers: Any = SimpleNamespace(submit=submit, cancel_pending=lambda of: cancelled.extend(of))
    ahead = futures(a=False, b=True)
    (a, b), (c, d) = ahead, futures(c=False, d=False)
    of_a, of_b = ahead.values()
    made = CandidateLaunchers(
        compilers, 1, None, torch.device("cpu"), None, Deadline(math.inf), dict(ahead)
    )
    assert not made.all_compile  # some compilations are missing
    assert made.submit([a], [c]) == [of_a]
    assert (begun, cancelled) == (["c"], [of_b])
    assert made.all_compile
    of_c, of_d = made.submit([c, d])
    assert begun == ["c", "d"]
    of_d.set_result(None)
    assert not made.all_compile
    assert made.drop([a, b, d]) == [a]
    assert cancelled == [of_b, of_a]
    assert made.submit([b]) != [of_b]  # b was cancelled, so it is compiled again
    made.release()
    assert cancelled[2:4] == [of_c, of_d]
    assert len(cancelled) == 5
    assert not made.all_compile


@pytest.mark.parametrize(
    ("kind", "free", "limit"),
    [("cpu", 2**40, 2**33), ("cuda", 2**40, 2**33), ("cuda", 2**34, 2**32)],
)
def test_a_chain_takes_a_quarter_of_the_memory(
    kind: str, free: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_operands, "free_memory", lambda device: free)
    assert cold_operands.memory_limit(torch.device(kind)) == limit


def test_copies_may_be_resident_up_to_three_times_the_l2() -> None:
    """A weight of 1 MiB gets 128 copies; three times an L2 of 50 MiB holds 149."""
    gpu = replace(problem().device, type="cuda", l2=50 << 20)
    instance = problem(m=16, n=512, k=512, device=gpu)
    copies = [SimpleNamespace(b=torch.empty(1)) for _ in range(150)]
    assert cold_operands.copies(instance) == 128
    for count, found in ((1, True), (149, True), (150, False)):
        assert cold_operands.resident(instance, copies[:count]) is found
    assert cold_operands.resident(instance, copies[:1] * 150)
    assert cold_operands.copies(replace(instance, n=2048, k=2048)) == 15  # 240 MB in all


def test_why_a_kernel_of_a_search_is_not_tried() -> None:
    class Odd(FakeKernel):
        def configs(self, problem: Problem) -> Any:
            raise ValueError("odd")

    blas, near = FakeBlas(estimate=10.0), FakeKernel("near", estimate=16.0)
    far, odd = FakeKernel("far", estimate=16.1), Odd("odd", estimate=1.0)
    kernels = [blas, near, far, odd]
    made = searched(problem(), kernels, kernels, None, Hints())
    assert {kernel.name: why for kernel, why in made.empty.items()} == {
        "far": "expects to take 16.1 µs, hopeless against BLAS", "odd": "ValueError: odd",
    }  # fmt: skip
    assert [c.kernel.name for c in made.first()] == ["blas", "near"]
    tried = [Candidate(kernel, FakeConfig()) for kernel in (blas, near)]
    assert [c.kernel.name for c, _ in made.untried(tried)] == ["far", "odd"]


def test_a_kernel_that_was_set_aside_is_reported_already() -> None:
    d, _ = dispatcher(FakeKernel("k"), FakeKernel("odd"))
    found, odd = Findings(), d.registry.kernel("odd")
    with pytest.warns(TmmWarning, match="is set aside: no reason"):
        odd.set_aside("no reason")  # type: ignore[attr-defined]
    for kernel in (d.registry.kernel("k"), FakeKernel("loose"), odd):
        found.leave(kernel, Obstacle("hung", "why"))
    assert found.reported == {("odd", "1")}
    assert len(found.left) == 3


def test_a_bind_that_takes_too_long_is_given_up() -> None:
    limit = candidate_launchers.BIND_LIMIT
    made = CandidateLaunchers(
        SimpleNamespace(), 1, None, torch.device("cpu"), None, Deadline(math.inf), {}  # type: ignore[arg-type]
    )  # fmt: skip
    hung, done = tried("a", 1), tried("b", 1)
    made._binding = {(problem(), c): (100.0, Future()) for c in (hung, done)}
    made._binding[problem(), done][1].set_result("launcher")  # type: ignore[arg-type]
    made._collect(100.0 + limit - 1.0)
    assert made._outcomes == {(problem(), done): "launcher"}
    assert list(made._binding) == [(problem(), hung)]
    made._collect(100.0 + limit)
    assert str(made._outcomes[problem(), hung]) == f"did not bind within {limit:g} s"
    assert made._binding == {}


@pytest.mark.parametrize("name", ["k", "blas"])
def test_late_candidates_do_not_wait_for_threads_that_are_stalled(name: str) -> None:
    """As many as may be stalled; only BLAS is bound after the deadline."""
    made = CandidateLaunchers(
        SimpleNamespace(), 1, None, torch.device("cpu"), None, Deadline(0.0), {}  # type: ignore[arg-type]
    )  # fmt: skip
    most = 1 + candidate_launchers._MOST_STALLED
    begun = time.monotonic() - candidate_launchers.STALLED
    made._binding = {
        (problem(), tried("a", tile)): (begun, Future()) for tile in range(1, most + 1)
    }
    made._waiting |= futures(**{name: True})
    steps = made.some()
    if name == "blas":
        assert len(next(steps)) == most
        steps.close()
        return
    with pytest.raises(StopIteration) as ended:
        next(steps)
    found = by_name(ended.value.value)
    assert (list(found), str(found["k"])) == (["k"], BUDGET_ENDED)
    assert len(made._binding) == most


def test_a_thread_binds_on_the_device_of_its_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    device = torch.device("cuda", 1)
    made = CandidateLaunchers(SimpleNamespace(), 1, None, device, None, Deadline(math.inf), {})  # type: ignore[arg-type]
    compiled = Future[None]()
    compiled.set_result(None)
    job = problem(), Candidate(FakeKernel("k"), FakeConfig())
    assert callable(made._bound(job, compiled))
    assert used == [device]


@pytest.mark.parametrize("late", [False, True])
def test_the_outcomes_of_a_candidate_at_another_m(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault counts against the kernel, a lack of memory does not. Only BLAS is not verified."""

    def raising(error: BaseException) -> Any:
        def fault(*_: Any) -> None:
            raise error

        return fault

    kernels = [
        FakeBlas(), FakeKernel("ok"), FakeKernel("wrong", spoil=lambda out: out + 1),
        Faulty(raising(ValueError("boom")), "raises"),
        Faulty(raising(torch.OutOfMemoryError("no memory")), "full"), FakeKernel("unbound"),
    ]  # fmt: skip
    runs = {k.name: CandidateRun(Candidate(k, FakeConfig())) for k in kernels}

    def bound(jobs: Any) -> Any:
        yield ()
        made = {(p, c): c.kernel.bind(p, c.config) for p, c in jobs}
        unbound = {job: MemoryError("none left") for job in jobs if job[1].kernel.name == "unbound"}
        return made | unbound

    one = tuning(FakeTimer({("ok", 1, 33): 7.0, ("blas", 1, 33): 9.0, ("blas", 1, 40): 8.0}))
    one._launchers.bound = bound  # type: ignore[method-assign]
    one._launchers.deadline.at = 0.0 if late else math.inf
    for run in runs.values():
        run.status = "ok"
    verified: list[tuple[str, int]] = []
    verify = one._verify

    def noted(run: Any, verifier: Any, *extent: Any) -> Any:
        verified.append((run.candidate.kernel.name, verifier.problem.m))
        return verify(run, verifier, *extent)

    one._verify = noted  # type: ignore[method-assign]
    events: list[Any] = []
    release, measure = stages.Verifier.release, one._measure

    def released(verifier: Any) -> None:
        events.append(verifier.problem.m)
        release(verifier)

    def measured(guests: Any, *how: Any) -> Any:
        events.append(names(guests))
        return measure(guests, *how)

    monkeypatch.setattr(stages.Verifier, "release", released)
    one._measure = measured  # type: ignore[method-assign]
    drained(one.measure_at({33: [*runs.values()], 40: [runs["blas"]]}))
    # Tensors for verification are released before others are allocated.
    around = one._problem.m
    assert [event for event, _ in itertools.groupby(events)] == [
        around,
        *([] if late else [33, "blas1 ok1", 40, "blas1"]),
    ]
    assert verified == [(name, 33) for name in runs if name != "unbound" and not late]
    times = {name: run.inside_us for name, run in runs.items() if run.inside_us}
    assert times == ({} if late else {"blas": {33: 9.0, 40: 8.0}, "ok": {33: 7.0}})
    failed = {name: run.status for name, run in runs.items() if run.status != "ok"}
    assert failed == ({} if late else {"wrong": "wrong"})
    assert late or str(runs["wrong"].reason).startswith("at M=33: ")
    faults = [fault for found in one._findings.faults.values() for fault in found]
    assert [name for name, _ in faults] == ([] if late else ["raises"])
    assert all(reason.startswith("at M=33: ValueError: boom") for _, reason in faults)
    left = one._findings.left
    assert {name for name, _ in left} == (set() if late else {"full", "unbound"})
    assert all(why.reason.startswith("at M=33: ") for why in left.values())
