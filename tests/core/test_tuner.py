"""Verified before timed, staged, decided by a stable rule."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from fakes import (
    FakeBlas,
    FakeConfig,
    FakeKernel,
    FakeTimer,
    Idle,
    Tuner,
    problem,
    searched,
    settings,
)
from msgspec.structs import replace as revised
from tmm_cache import CandidateResult, TuningRecord

from tmm_core import Traits
from tmm_core.registry.registry import Source
from tmm_core.spec.operand import Operand
from tmm_core.spec.problem import Problem
from tmm_core.tuning import candidate_launchers, search, stages, timing
from tmm_core.tuning.candidate_launchers import CandidateLaunchers, Deadline
from tmm_core.tuning.cold_operands import LaunchError
from tmm_core.tuning.compile_pool import Compilers
from tmm_core.tuning.findings import Findings
from tmm_core.tuning.ranking import compared_at, decide, fastest_first, times_around
from tmm_core.tuning.search import Hints
from tmm_core.tuning.timing import GraphTimer, HostTimer, normalised, timer_for
from tmm_core.verify import compare, random_inputs


def result(kernel: str, us: float, **fields: Any) -> CandidateResult:
    return CandidateResult(
        kernel=kernel,
        version="1",
        config=fields.pop("config", {}),
        status=fields.pop("status", "ok"),
        samples_us=(us, us, us),
        **fields,
    )


def tune(*kernels: FakeKernel, **fields: Any) -> tuple[TuningRecord, FakeTimer]:
    timer = FakeTimer(fields.pop("times", {}))
    before = fields.pop("before", None)
    instance = fields.pop("problem", problem())
    return Tuner(timer).tune(instance, kernels, settings(**fields), before), timer


def status(record: TuningRecord) -> dict[str, str]:
    return {c.kernel: c.status for c in record.candidates}


def winner(record: TuningRecord) -> str:
    return record.candidates[record.winner].kernel


def unwritten(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out[-1, -1] = float("nan")
    return out


def one_wrong_element(out: torch.Tensor) -> torch.Tensor:
    out = out.clone()
    out[3, 5] += 0.05
    return out


@pytest.mark.parametrize("spoil", [unwritten, one_wrong_element, lambda out: out * 1.001])
def test_a_fast_and_wrong_kernel_never_wins(spoil: Any) -> None:
    record, timer = tune(
        FakeBlas(), FakeKernel("cheat", spoil=spoil), times={"cheat": 1.0, "blas": 20.0}
    )
    assert winner(record) == "blas"
    assert status(record)["cheat"] == "wrong"
    assert "cheat" not in timer.measured
    (evidence,) = (c for c in record.candidates if c.kernel == "cheat")
    assert evidence.tolerance is not None
    assert evidence.reason is not None
    assert "exceeds" in evidence.reason


@pytest.mark.parametrize("rows", [None, 1, 63])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_a_result_left_in_the_output_does_not_pass_for_another_kernels(
    layout: Any, rows: int | None
) -> None:
    """BLAS is verified before, and a right kernel after that: each leaves the right answer."""
    idle = Idle("z.idle")
    idle.rows = rows
    instance = problem(out=Operand(torch.float32, layout), bias=torch.float32)
    kernels = FakeBlas(), FakeKernel("right"), idle
    record, timer = tune(*kernels, problem=instance, times={"z.idle": 1.0, "blas": 20.0})
    assert status(record) == {"blas": "ok", "right": "slow", "z.idle": "wrong"}
    assert "z.idle" not in timer.measured
    assert next(c for c in record.candidates if c.kernel == "z.idle").reason.startswith("error nan")


#: Two units in the last place of a result or so; of TF32 what rounding the operands makes.
LIMITS = [
    (torch.float64, False, 1e-12),
    (torch.float32, False, 2e-5),
    (torch.float32, True, 4e-3),
    (torch.float16, False, 2e-3),
    (torch.bfloat16, False, 1.6e-2),
]


@pytest.mark.parametrize(("dtype", "tf32", "limit"), LIMITS, ids=str)
def test_the_largest_error_that_passes(dtype: torch.dtype, tf32: bool, limit: float) -> None:
    def off_by(share: float) -> Any:
        def spoil(out: torch.Tensor) -> torch.Tensor:
            exact = out.double()
            finite = exact.isfinite()  # NaN and Inf are verified apart
            # A power of two, so that NaN in some rows does not change the bits of others.
            rms = exact[finite].square().mean().sqrt().log2().round().exp2()
            off = exact + share * limit * (exact.abs() + rms)
            return torch.where(finite, off, exact).to(dtype)

        return spoil

    operand = Operand(dtype)
    instance = problem(a=operand, b=operand, out=operand, tf32=tf32)
    kernels = FakeKernel("off", spoil=off_by(0.6)), FakeKernel("wrong", spoil=off_by(1.4))
    record, _ = tune(FakeBlas(), *kernels, problem=instance, times={"off": 5.0, "blas": 20.0})
    assert status(record) == {"blas": "ok", "off": "ok", "wrong": "wrong"}
    assert winner(record) == "off"


def test_the_reference_covers_the_whole_expression() -> None:
    from tmm_core.epilogues import parse

    operand = Operand(torch.float32)
    whole = problem(
        epilogue=parse("gelu_tanh+softcap(2)"), bias=torch.float32, residual=operand, scaled=True
    )
    record, _ = tune(FakeBlas(), FakeKernel("right"), problem=whole)
    assert all(c.error is not None and c.error < 1e-5 for c in record.candidates)
    record, _ = tune(FakeBlas(), FakeKernel("w", spoil=lambda o: o - 1e-3), problem=whole)
    assert status(record)["w"] == "wrong"


def test_a_compile_error_costs_that_candidate() -> None:
    broken = FakeKernel("broken", bind_error=RuntimeError("out of resource: shared memory"))
    record, _ = tune(FakeBlas(), broken, FakeKernel("fine"), times={"fine": 5.0})
    assert winner(record) == "fine"
    (evidence,) = (c for c in record.candidates if c.kernel == "broken")
    assert evidence.status == "failed"
    assert "shared memory" in str(evidence.reason)


def test_a_launch_error_costs_that_candidate() -> None:
    def explode(out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("illegal address")

    record, _ = tune(FakeBlas(), FakeKernel("bad", spoil=explode))
    assert status(record) == {"blas": "ok", "bad": "failed"}


class Hangs(FakeKernel):
    """Hangs in ``bind``, where ``at`` says so."""

    def __init__(self, name: str, at: Callable[[Problem], bool], **fields: Any) -> None:
        super().__init__(name, **fields)
        self.release, self.at = threading.Event(), at

    def bind(self, problem: Problem, config: FakeConfig) -> Any:
        if self.at(problem):
            self.release.wait(20)
        return super().bind(problem, config)


@pytest.mark.parametrize("workers", [1, 2])
def test_hanging_binds_cost_one_limit_and_no_other_candidate(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidate_launchers, "BIND_LIMIT", 0.4)
    monkeypatch.setattr(candidate_launchers, "STALLED", 0.05)
    hangs = Hangs("a.hangs", lambda problem: True, tiles=range(1, 21))
    good = FakeKernel("good", tiles=(1, 2))
    timer = FakeTimer({"good": 5.0, "blas": 10.0})
    started = time.monotonic()
    found = Findings()
    kernels = [FakeBlas(), hangs, good]
    record = Tuner(timer, workers).tune(problem(), kernels, settings(), findings=found)
    hangs.release.set()
    assert time.monotonic() - started < 10 * 0.4  # twenty one after another take 8 s
    assert record.best.kernel == "good"
    # A limit of time is no verdict, and whoever wrote the kernel should know of it.
    assert {c.kernel for c in record.candidates} == {"blas", "good"}
    assert found.left["a.hangs", "1"].cause == "hung"
    reasons = [reason.partition(" (")[0] for _, reason in found.faults[Source("a.hangs")]]
    assert reasons == ["did not bind within 0.4 s"] * 20


def test_a_bind_that_hangs_inside_the_bucket_costs_the_time_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidate_launchers, "BIND_LIMIT", 0.3)
    monkeypatch.setattr(candidate_launchers, "STALLED", 0.04)
    hangs = Hangs("hangs", lambda problem: problem.m != 64)
    record, _ = tune(FakeBlas(), hangs, times={"hangs": 5.0, "blas": 10.0})
    hangs.release.set()
    (mine,) = (c for c in record.candidates if c.kernel == "hangs")
    assert (mine.status, mine.inside_us) == ("ok", {})


def test_where_no_thread_can_be_had_this_one_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    record, _ = tune(FakeBlas(), FakeKernel("good"), times={"good": 5.0, "blas": 10.0})
    assert record.best.kernel == "good"


def test_an_empty_search_space_is_recorded_and_not_queried_again() -> None:
    record, _ = tune(FakeBlas(), FakeKernel("none", tiles=(1,)))
    again, timer = tune(FakeBlas(), FakeKernel("none"), before=record)
    assert again is record
    assert timer.measured == []


def test_slow_ones_are_eliminated_early() -> None:
    tiles = tuple(range(1, 21))
    times: dict[Any, float] = {("k", t): 10.0 + t * 4 for t in tiles}
    record, timer = tune(FakeBlas(), FakeKernel("k", tiles=tiles), times=times)
    assert record.candidates[record.winner].config == {"tile": 1}
    # a first look at 21, the race of what is near the best, at the edge and at two M inside
    assert len(timer.measured) < 21 + 3 * (stages.FINALISTS + 2)
    assert sum(c.status == "slow" for c in record.candidates) > 10


def test_every_kernel_keeps_a_runner_up() -> None:
    record, _ = tune(
        FakeBlas(), FakeKernel("a"), FakeKernel("b"), times={"a": 10.0, "b": 25.0, "blas": 30.0}
    )
    assert status(record) == {"blas": "ok", "a": "ok", "b": "ok"}


def test_blas_is_timed_to_the_end_however_slow() -> None:
    record, _ = tune(FakeBlas(), FakeKernel("k"), times={"k": 1.0, "blas": 1000.0})
    assert status(record) == {"blas": "ok", "k": "ok"}
    assert record.blas_us == 1000.0


def test_a_removed_kernel_leaves_the_record() -> None:
    times = {"a": 10.0, "gone": 5.0, "blas": 20.0}
    before, _ = tune(FakeBlas(), FakeKernel("a"), FakeKernel("gone"), times=times)
    assert winner(before) == "gone"
    record, timer = tune(
        FakeBlas(), FakeKernel("a"), FakeKernel("new"), before=before, times={**times, "new": 30.0}
    )
    assert {c.kernel for c in record.candidates} == {"blas", "a", "new"}
    assert winner(record) == "a"
    assert "a" in timer.measured  # it was no finalist, and races in the place of the winner


def test_a_decision_is_not_made_by_disturbed_samples() -> None:
    class Busy(FakeTimer):
        """Disturbs half of the first decisive series, for two launches more."""

        series = 0

        def measure(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
            samples = super().measure(runs, rounds, **chain)
            self.series += rounds == stages.FINAL
            if self.series == 1 and rounds == stages.FINAL:
                for mine, late in zip(samples, (5.0, 40.0), strict=True):
                    mine[::2] = [us + late for us in mine[::2]]
                    mine[1] += late
            return samples

    timer = Busy({"blas": 10.0, "k": 5.0})
    record = Tuner(timer).tune(problem(), [FakeBlas(), FakeKernel("k")], settings())
    assert timer.series == 2
    assert winner(record) == "k"


def test_the_budget_ends_a_tuning_with_its_results_so_far() -> None:
    class Slow(FakeTimer):
        def measure(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
            time.sleep(0.1)
            return super().measure(runs, rounds, **chain)

    record = Tuner(Slow({"k": 5.0})).tune(
        problem(), [FakeBlas(), FakeKernel("k")], settings(tune_budget=0.05)
    )
    assert winner(record) == "k"
    assert len(record.candidates[record.winner].samples_us) == stages.SCREENING


@pytest.mark.parametrize("late", [False, True])
def test_no_batch_follows_the_end_of_the_budget(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its candidates would be compiled to be left out."""
    batches = []
    monkeypatch.setattr(stages.Tuning, "_is_late", lambda self: late)
    monkeypatch.setattr(search.Search, "next_batch", lambda *given: batches.append(given) or [])
    tune(FakeBlas(), FakeKernel("k"), times={"k": 5.0, "blas": 10.0})
    assert bool(batches) is not late


def test_a_budget_that_ends_early_leaves_no_kernel_untried() -> None:
    class Slow(FakeKernel):
        def bind(self, problem: Any, config: FakeConfig) -> Any:
            time.sleep(0.05)
            return super().bind(problem, config)

    kernels = [FakeBlas(), Slow("a", tiles=tuple(range(1, 40))), Slow("b"), Slow("c")]
    timer = FakeTimer({"c": 5.0})
    record = Tuner(timer, workers=1).tune(problem(), kernels, settings(tune_budget=0.5))
    assert {"a", "b", "c"} <= set(timer.measured)
    assert len(record.candidates) < 24  # what the budget left out is not on record
    assert winner(record) == "c"


class Graded(FakeKernel):
    """Expects a tile to take its number of µs, and has no idea of tile 1000."""

    def estimate_us(self, problem: Any, config: FakeConfig) -> float | None:
        if self.estimate is not None:
            raise ZeroDivisionError("a plugin's mistake")
        return None if config.tile == 1000 else config.tile


def tried(*kernels: FakeKernel, **fields: Any) -> list[int]:
    record, _ = tune(*kernels, **fields)
    return [c.config["tile"] for c in record.candidates if c.kernel == "k" and c.config]


def test_hopeless_configs_are_not_compiled() -> None:
    tiles = (500, 400, 300, 16, 17, 1000, 10)
    # A config without an estimate stays.
    assert sorted(tried(FakeBlas(estimate=10.0), Graded("k", tiles=tiles))) == [10, 16, 1000]
    # There is no estimate to compare them with.
    assert sorted(tried(FakeBlas(), Graded("k", tiles=tiles))) == sorted(tiles)
    blas = FakeBlas(estimate=10.0)
    assert sorted(tried(blas, Graded("k", tiles=tiles, estimate=1.0))) == sorted(tiles)


def test_a_kernel_without_hope_is_on_record_with_the_reason() -> None:
    kernels = [FakeBlas(estimate=10.0), Graded("k", tiles=(500,))]
    record, timer = tune(*kernels)
    (entry,) = (c for c in record.candidates if c.kernel == "k")
    assert entry.status == "failed"
    assert "hopeless" in str(entry.reason)
    assert "k" not in timer.measured
    again, _ = tune(*kernels, before=record)
    assert again is record


def test_no_more_are_compiled_than_may_still_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once some are timed, estimates are scaled by what these took."""
    monkeypatch.setattr(search, "BATCHES", (3, 24))
    tiles = (100, 103, 112, 140)
    blas = FakeBlas(estimate=100.0)
    # All take the expected time: 112 cannot win, by more than the model's uncertainty.
    exact: dict[Any, float] = {("k", tile): tile for tile in tiles} | {"blas": 150.0}
    assert tried(blas, Graded("k", tiles=tiles), times=exact) == [100, 103]
    # The second takes less than expected: the third may be the best, and is not.
    better = exact | {("k", 103): 101.0}
    assert tried(blas, Graded("k", tiles=tiles), times=better) == [100, 103, 112]


def test_kernels_with_equal_estimates_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with many equal estimates does not keep another's configs out of a batch."""
    monkeypatch.setattr(search, "BATCHES", (6, 24))
    many = FakeKernel("many", tiles=tuple(range(1, 20)), estimate=100.0)
    few, far = Graded("few", tiles=(104, 106, 108)), Graded("far", tiles=(111, 112))
    kernels = [FakeBlas(estimate=90.0), many, few, far]
    first = [c.kernel.name for c in searched(problem(), kernels, kernels).first()]
    assert sorted(first) == ["blas", "far", "few", "few", "many", "many"]
    monkeypatch.setattr(search, "BATCHES", (8, 24))
    first = [c.kernel.name for c in searched(problem(), kernels, kernels).first()]
    assert sorted(first) == ["blas", "far", *["few"] * 3, *["many"] * 3]


class Listed(Compilers):
    """Compiles nothing, and keeps the tiles and M that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []
        self.cancelled: list[int] = []

    def submit(self, problem: Problem, candidate: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        if candidate.kernel.name == "k":
            self.asked.append((candidate.config.tile, problem.m))
            future.tile = candidate.config.tile  # type: ignore[attr-defined]
        return future

    def cancel_pending(self, futures: Any) -> None:
        self.cancelled += [tile for f in futures if (tile := getattr(f, "tile", None))]


def test_likely_next_candidates_are_compiled_after_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is compiled once, and cancelled if it is not asked for then."""
    monkeypatch.setattr(search, "BATCHES", (3, 5))
    tiles = (100, 103, 106, 115, 140)
    times: dict[Any, float] = {("k", tile): tile for tile in tiles}
    times |= {"blas": 150.0, ("k", 103): 101.0}
    compilers = Listed()
    tuner = Tuner(FakeTimer(times), compilers=compilers)
    kernels = [FakeBlas(estimate=100.0), Graded("k", tiles=tiles)]
    record = tuner.tune(problem(), kernels, settings())
    edge = [tile for tile, m in compilers.asked if m == 64]
    assert edge == [100, 103, 106, 115]  # two behind the first batch; one is asked for
    assert [c.config["tile"] for c in record.candidates if c.kernel == "k"] == [100, 103, 106]
    assert 115 in compilers.cancelled
    # Finalists at other M of the bucket, before they race.
    elsewhere = [(tile, m) for tile, m in compilers.asked if m != 64]
    assert {tile for tile, _ in elsewhere} <= {100, 103, 106}
    assert len(elsewhere) == len(set(elsewhere)) > 0


class Pending(Listed):
    """One tile compiles until :attr:`until` returns true, or until it is cancelled."""

    def __init__(self, tile: int, until: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.tile, self.until = tile, until

    def submit(self, problem: Problem, candidate: Any) -> Future[None]:
        future = super().submit(problem, candidate)
        if getattr(future, "tile", None) != self.tile:
            return future
        until = self.until

        class Compiling(Future[None]):
            tile = self.tile

            def done(self) -> bool:
                if until() and not super().done():
                    self.set_result(None)
                return super().done()

        return Compiling()

    def cancel_pending(self, futures: Any) -> None:
        futures = [*futures]
        super().cancel_pending(futures)
        for future in futures:
            future.cancel()


@pytest.mark.parametrize(
    ("others", "tile", "waits"),
    [((), 119, False), ((), 115, True), ((130, 135), 108, False), ((130, 135), 104, True)],
)
def test_candidates_that_can_no_longer_win_are_not_awaited(
    others: tuple[int, ...], tile: int, waits: bool
) -> None:
    """The first tile takes 0.8 of its estimate: others may be 15 % better, less once three were
    timed."""
    later = time.monotonic() + 0.3
    compilers = Pending(tile, until=lambda: time.monotonic() > later)
    times: dict[Any, float] = {"blas": 125.0, ("k", 100): 80.0, ("k", 130): 110, ("k", 135): 110}
    kernels = [FakeBlas(estimate=100.0), Graded("k", tiles=(100, *others, tile))]
    record = Tuner(FakeTimer(times), compilers=compilers).tune(problem(), kernels, settings())
    timed = {c.config["tile"] for c in record.candidates if c.kernel == "k" and c.samples_us}
    assert timed == {100, *others, *[tile][: int(waits)]}
    assert (tile in compilers.cancelled) == (not waits)


@pytest.mark.parametrize("mode", ["tune", "background"])
@pytest.mark.slow
def test_the_fastest_so_far_is_verified_while_others_compile(
    mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, and not in the background, where this would delay calls."""
    whole: list[Any] = []
    steps = stages.Verifier.steps

    def noted(self: Any, launcher: Any, **options: Any) -> Any:
        if options["extent"] == "whole" and not options["baseline"]:
            whole.append(launcher.cost)
        return steps(self, launcher, **options)

    monkeypatch.setattr(stages.Verifier, "steps", noted)
    compilers = Pending(103, until=lambda: bool(whole))
    times: dict[Any, float] = {"blas": 150.0, ("k", 100): 100.0, ("k", 103): 99.0}
    kernels = [FakeBlas(estimate=100.0), Graded("k", tiles=(100, 103))]
    mine = settings(tune_budget=2.0, on_cache_miss=mode)
    record = Tuner(FakeTimer(times), compilers=compilers).tune(problem(), kernels, mine)
    timed = [c.config["tile"] for c in record.candidates if c.kernel == "k" and c.samples_us]
    assert timed == ([100, 103] if mode == "tune" else [100])
    assert whole == [("k", tile) for tile in timed]


def test_the_winner_alone_is_verified_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """This tuning is in the background, where nothing is verified while others compile."""
    whole: list[Any] = []
    steps = stages.Verifier.steps

    def noted(self: Any, launcher: Any, **options: Any) -> Any:
        if options["extent"] == "whole":
            whole.append(launcher.cost)
        return steps(self, launcher, **options)

    monkeypatch.setattr(stages.Verifier, "steps", noted)
    kernels = [FakeBlas(), FakeKernel("k", tiles=(1, 2, 3))]
    for blas in (20.0, 5.0):
        times = {"blas": blas, ("k", 1): 12.0, ("k", 2): 10.0, ("k", 3): 11.0}
        Tuner(FakeTimer(times)).tune(problem(), kernels, settings(on_cache_miss="background"))
        assert whole == [("k", 2)]  # and BLAS never: it is the reference of the others


def test_idle_processes_compile_possible_next_candidates_of_every_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels with worse estimates are included, since times decide which kernel follows."""
    monkeypatch.setattr(search, "BATCHES", (3, 5))
    near, far = Graded("near", tiles=(100, 101, 102, 103)), Graded("far", tiles=(110, 120, 130))
    kernels = [FakeBlas(estimate=100.0), near, far]
    given = searched(problem(), kernels, kernels)
    assert len(given.first()) == 3
    for handed, room, tiles in (
        (3, 0, [101, 102]), (3, 3, [101, 102, 120]), (3, 16, [101, 102, 120, 130]),
        (4, 16, [101, 120]), (5, 16, []),
    ):  # fmt: skip
        found = [c.config.to_json()["tile"] for c in given.speculative(handed, room)]
        assert found == tiles


def test_samples_are_normalised_per_round() -> None:
    """The clock falls in the middle of a round, so that two medians of one kernel differ."""
    fast, slow = [100.0] * 4, [110.0] * 4
    blas, same, better = [*fast, 100.0, *slow], [*fast, 110.0, *slow], [*fast, 108.0, *slow]
    better = [us * 0.9 for us in better]
    assert median(blas) == 100.0
    assert median(same) == 110.0
    medians = [median(mine) for mine in normalised([blas, same, better])]
    assert [us / medians[0] for us in medians] == pytest.approx([1.0, 1.0, 0.9])
    assert 100.0 <= medians[0] <= 110.0
    assert normalised([[3.0, 4.0, 5.0]]) == [[4.0, 4.0, 4.0]]
    # A disturbance of one column alone stays.
    held = [100.0, 300.0, 100.0]
    assert normalised([[100.0] * 3, held, [50.0] * 3])[1] == held


class Flickering(FakeTimer):
    """A GPU whose clock falls in the fifth of nine rounds, before the fastest kernel's turn."""

    def measure(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
        series = super().measure(runs, rounds, **chain)
        for place, mine in enumerate(series if rounds == 9 else ()):
            fallen = 4 if place == 0 else 5
            mine[fallen:] = [1.1 * us for us in mine[fallen:]]
        return series


def test_a_clock_that_changes_in_a_race_decides_nothing() -> None:
    kernels = [FakeBlas(), FakeKernel("k"), FakeKernel("far")]
    times = {"blas": 10.0, "k": 9.5, "far": 10.2}
    assert Tuner(Flickering(times)).tune(problem(), kernels, settings()).best.kernel == "k"


def test_winners_of_other_records_are_tried_first() -> None:
    tiles = tuple(range(1, 40))
    kernels = [FakeBlas(estimate=10.0), Graded("k", tiles=tiles), FakeKernel("other")]
    hints = Hints([("k", {"tile": 39}), ("gone", {}), ("k", {"tile": 0}), ("other", {"stale": 1})])
    record = Tuner(FakeTimer({("k", 39): 1.0})).tune(problem(), kernels, settings(), hints=hints)
    first = next(c for c in record.candidates if c.kernel == "k")
    assert first.config == {"tile": 39}
    assert record.best.config == {"tile": 39}


def test_where_a_close_record_is_little_else_is_tried() -> None:
    kernels = [
        FakeBlas(estimate=50.0),
        Graded("k", tiles=tuple(range(40, 80))),
        Graded("far", tiles=(75,)),
    ]
    hints = Hints([("k", {"tile": 60})], close=True)
    timer = FakeTimer({("k", 60): 10.0, "k": 30.0})
    record = Tuner(timer).tune(problem(), kernels, settings(), hints=hints)
    assert record.best.config == {"tile": 60}
    assert len([c for c in record.candidates if c.kernel == "k"]) <= search.CLOSE_BATCHES[1]
    # A kernel that was left out is on record with the reason, so that it is not tried again.
    (left_out,) = (c for c in record.candidates if c.kernel == "far")
    assert "were tried instead" in str(left_out.reason)
    assert Tuner(timer).tune(problem(), kernels, settings(), record) is record


def test_a_bucket_is_measured_inside() -> None:
    record, _ = tune(FakeBlas(), FakeKernel("k"), times={"k": 5.0, ("k", 1, 49): 7.0})
    assert record.measured_at == (33, 49, 64)
    (mine,) = (c for c in record.candidates if c.kernel == "k")
    assert mine.inside_us == {33: 5.0, 49: 7.0}
    exact, _ = tune(FakeBlas(), FakeKernel("k"), problem=problem(m=50))
    assert exact.measured_at == (50,)


def test_blas_alone_is_timed_at_further_m_of_a_bucket() -> None:
    kernel = FakeKernel("k", traits=Traits(batch_invariant=True))
    times: dict[Any, float] = {"blas": 10.0, "k": 5.0, ("blas", 1, 115): 6.0}

    def inside(*kernels: Any, **how: Any) -> dict[str, list[int]]:
        record, _ = tune(FakeBlas(), *kernels, times=times, problem=problem(m=128, **how))
        return {c.kernel: sorted(c.inside_us) for c in record.candidates}

    probed, further = [113, 121], [115, 117, 119, 122, 124, 126]
    assert inside(kernel) == {"blas": sorted(probed + further), "k": probed}
    assert inside() == {"blas": probed}
    assert inside(kernel, batch_invariant=True) == {"blas": probed, "k": probed}


def test_blas_counts_at_the_nearest_m_at_which_it_was_timed() -> None:
    blas = revised(result("blas", 10.0), inside_us={33: 9.0, 40: 6.0, 49: 8.0})
    kernel = revised(result("k", 7.0), inside_us={33: 5.0, 49: 7.5})

    def around(m: int) -> dict[int, dict[str, float]]:
        found = times_around([blas, kernel], m, 64)
        return {
            there: {name: us for (name, _), us in times.items()} for there, times in found.items()
        }

    assert around(36) == {33: {"k": 5.0, "blas": 9.0}, 49: {"k": 7.5, "blas": 6.0}}
    assert around(44) == {33: {"k": 5.0, "blas": 6.0}, 49: {"k": 7.5, "blas": 8.0}}
    assert around(40) == {33: {"k": 5.0, "blas": 6.0}, 49: {"k": 7.5, "blas": 6.0}}
    assert around(49) == {49: {"k": 7.5, "blas": 8.0}}
    assert around(60) == {49: {"k": 7.5, "blas": 8.0}, 64: {"k": 7.0, "blas": 10.0}}
    record = TuningRecord({"m": 64}, 1, (blas, kernel), "2026-01-01T00:00:00Z", 1.0)
    assert compared_at(record) == [33, 49, 64]


def test_a_launch_that_fails_inside_costs_its_candidate_there() -> None:
    class Failing(FakeTimer):
        def measure(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
            for run in runs:
                if run.launcher.cost[0] == "k" and run.inputs[0].a.shape[-2] == 49:
                    raise LaunchError(run, ValueError("not here"))
            return super().measure(runs, rounds, **chain)

    record = Tuner(Failing({"k": 5.0})).tune(problem(), [FakeBlas(), FakeKernel("k")], settings())
    inside = {c.kernel: sorted(c.inside_us) for c in record.candidates}
    assert (winner(record), inside) == ("k", {"blas": [33, 49], "k": [33]})


@pytest.mark.parametrize(
    ("edge", "inside"), [(12.5, {33: 5.0, 49: 5.0}), (13.5, {}), (9.95, {33: 5.0, 49: 5.0})]
)
def test_a_kernel_not_far_behind_at_the_edge_is_measured_inside(
    edge: float, inside: dict[int, float]
) -> None:
    there = {("k", 1, 33): 5.0, ("k", 1, 49): 5.0}
    record, _ = tune(FakeBlas(), FakeKernel("k"), times={"blas": 10.0, "k": edge, **there})
    (mine,) = (c for c in record.candidates if c.kernel == "k")
    assert (winner(record), mine.status, mine.inside_us) == ("blas", "ok", inside)
    exact, _ = tune(
        FakeBlas(), FakeKernel("k"), times={"blas": 10.0, "k": edge, **there}, problem=problem(m=50)
    )
    assert exact.measured_at == (50,)


def test_a_kernel_that_is_wrong_inside_the_bucket_never_wins() -> None:
    def spoil(out: torch.Tensor) -> torch.Tensor:
        return out if out.shape[-2] == 64 else out * 1.1

    record, _ = tune(FakeBlas(), FakeKernel("cheat", spoil=spoil), times={"cheat": 1.0})
    assert winner(record) == "blas"
    (evidence,) = (c for c in record.candidates if c.kernel == "cheat")
    assert evidence.status == "wrong"
    assert "at M=" in str(evidence.reason)


@pytest.mark.parametrize("layout", ["row", "col"])
def test_candidates_are_timed_as_calls_launch_them(layout: Any) -> None:
    """A row-major output is the launcher's to allocate: BLAS, given one, copies into it."""
    given: list[bool] = []

    class Watching(FakeTimer):
        def measure(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
            launched = [run.launcher for run in runs]
            for run, launcher in zip(runs, launched, strict=True):

                def spy(*arguments: Any, launcher: Any = launcher) -> Any:
                    given.append(arguments[5] is not None)
                    return launcher(*arguments)

                replace(run, launcher=spy)(0)
            return super().measure(runs, rounds, **chain)

    instance = problem(out=Operand(torch.float32, layout), bias=torch.float32)
    Tuner(Watching({})).tune(instance, [FakeBlas(), FakeKernel("k")], settings())
    assert set(given) == {layout == "col"}


def test_where_nothing_runs_the_baselines_reason_is_shown() -> None:
    def explode(out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match=r"no candidate runs; blas: .*the device is gone"):
        tune(FakeBlas(spoil=explode), FakeKernel("k", spoil=explode), times={})


def test_without_a_baseline_nothing_is_decided() -> None:
    with pytest.raises(ValueError, match="blas"):
        tune(FakeKernel("alone"))


def test_blas_needs_beating_by_the_margin() -> None:
    assert decide([result("blas", 100.0), result("k", 99.1)]) == 0
    assert decide([result("blas", 100.0), result("k", 98.0)]) == 1


def test_ties_break_by_a_stable_rule() -> None:
    blas = result("blas", 100.0)
    loose = result("a", 50.0, deterministic=False)
    big = result("b", 50.1, workspace_bytes=4096)
    lean = result("c", 50.2)
    twin = result("d", 50.0)
    clearly = result("e", 49.0, deterministic=False)
    assert decide([blas, loose, big, lean]) == 3
    assert decide([blas, twin, lean]) == 2  # by name
    assert decide([blas, twin, lean], incumbent=twin) == 1
    assert decide([blas, lean, clearly]) == 2
    assert decide([blas, result("x", 1.0, status="wrong")]) == 0


def test_traits_and_workspace_are_on_record() -> None:
    k = FakeKernel("k", traits=Traits(deterministic=False, batch_invariant=True), workspace=77)
    record, _ = tune(FakeBlas(), k)
    (c,) = (c for c in record.candidates if c.kernel == "k")
    assert (c.deterministic, c.batch_invariant, c.workspace_bytes) == (False, True, 77)


@pytest.mark.parametrize("layout", ["row", "col", "strided"])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("size", [(16, 24), (5, 7), (1, 7), (1, 8), (7, 1)])
def test_inputs_are_of_the_requested_class(
    layout: Any, aligned: bool, size: tuple[int, int]
) -> None:
    if layout == "strided" and (aligned or 1 in size):
        pytest.skip("no such class")
    spec = Operand(torch.bfloat16, layout, aligned)
    t = random_inputs.empty(spec, size, torch.device("cpu"))
    assert tuple(t.shape) == size
    found = Operand.of(t)
    if 1 not in size:
        assert found == spec
        assert found.aligned == aligned
    else:
        assert found.aligned or not aligned


def test_error_sees_one_element_in_a_million() -> None:
    expected = torch.randn(1000, 1000, dtype=torch.float64)
    out = expected.float()
    assert compare.error(out, expected) < 1e-6
    out[7, 7] += 1
    assert compare.error(out, expected) > 0.1
    out[7, 7] = float("nan")
    assert not compare.error(out, expected) <= 1e9
    assert compare.error(torch.zeros(3, 3), torch.zeros(3, 3)) == 0.0


def test_the_best_of_each_arithmetic_is_verified_however_slow() -> None:
    kernels = [
        FakeKernel(f"k{i}", tiles=(1, 2), traits=Traits(batch_invariant=True)) for i in (1, 2)
    ]
    times = {"blas": 10.0, ("k1", 1): 5.0, ("k1", 2): 80.0, ("k2", 1): 90.0, ("k2", 2): 95.0}
    record, _ = tune(FakeBlas(), *kernels, times=times, problem=problem(batch_invariant=True))
    # Each config is another arithmetic.
    assert [c.status for c in record.candidates] == ["ok"] * 5
    plain, _ = tune(FakeBlas(), *kernels, times=times)
    assert status(plain) == {"blas": "ok", "k1": "slow", "k2": "slow"}


def test_kernels_of_the_mode_race_even_if_blas_is_far_ahead() -> None:
    class Cool(FakeTimer):
        """At first k's second tile looks best."""

        def measure(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
            samples = super().measure(runs, rounds, **chain)
            if rounds == stages.FINAL:
                return samples
            return [[29.0] * rounds if us[0] == 40.0 else us for us in samples]

    times = {"blas": 10.0, ("k", 1): 30.0, ("k", 2): 40.0, ("k", 3): 90.0}
    kernel = FakeKernel("k", tiles=(1, 2, 3), traits=Traits(batch_invariant=True))
    instance = problem(batch_invariant=True)
    record = Tuner(Cool(times)).tune(instance, [FakeBlas(), kernel], settings())
    raced = [c for c in fastest_first(record) if len(c.samples_us) == stages.FINAL]
    assert [(c.kernel, c.median_us) for c in raced[:3]] == [
        ("blas", 10.0), ("k", 30.0), ("k", 40.0),
    ]  # fmt: skip
    usual = Tuner(Cool(times)).tune(problem(), [FakeBlas(), kernel], settings())
    assert [c.kernel for c in fastest_first(usual) if len(c.samples_us) == stages.FINAL] == ["blas"]


def test_the_steady_clock_interleaves_and_drops_the_start_of_each_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The column that is replayed first finds a cool GPU, so it is replayed last too."""
    replayed: list[tuple[str, int]] = []

    class Event:
        def elapsed_time(self, other: Any) -> float:
            return 6.0

    class Chain:
        takes_us = 10.0

        def __init__(self, name: str) -> None:
            self.name = name

        def timed(self, replays: int) -> tuple[Event, Event]:
            replayed.append((self.name, replays))
            return Event(), Event()

    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    timer = GraphTimer(torch.device("cuda", 0))
    runs: Any = ["torch", "tmm"]
    monkeypatch.setattr(timer, "_chains", {(id(run), 2): Chain(run) for run in runs})
    samples = timer.steady(runs, 4, copies=2, steady_us=450.0)
    assert samples == [[100.0] * 4] * 2
    assert replayed[0] == ("torch", 15)
    samples = [name for name, count in replayed if count == 30]
    rounds = list(zip(samples[::2], samples[1::2], strict=True))
    assert set(rounds) == {("torch", "tmm"), ("tmm", "torch")}
    assert replayed[1::2] == [(name, 15) for name in samples]


def test_in_batch_invariant_mode_the_best_of_each_arithmetic_race() -> None:
    """First looks do not tell which config of an arithmetic is best, which another M may pin."""

    class Summing(FakeKernel):
        def arithmetic(self, problem: Problem, config: Any) -> str | None:
            return {1: "even", 2: "even", 9: None}.get(config.tile, "odd")

    times = {"blas": 10.0, ("k", 9): 9.0} | {("k", tile): 10.0 * tile for tile in range(1, 7)}
    times |= {("k", 4): 30.5, ("k", 5): 30.7}
    kernel = Summing("k", tiles=(1, 2, 3, 4, 5, 6, 9), traits=Traits(batch_invariant=True))
    record = Tuner(FakeTimer(times)).tune(
        problem(batch_invariant=True), [FakeBlas(), kernel], settings()
    )
    raced = [c.config["tile"] for c in record.candidates if len(c.samples_us) == stages.FINAL]
    assert raced[1:] == [1, 3, 4, 9]


def test_an_unlikely_kernel_has_no_place_of_its_own() -> None:
    """It is tried by its rank alone: 40 configs of the best kernel come first."""
    near, far = 10.0 * search.UNLIKELY, 10.1 * search.UNLIKELY
    best = FakeKernel("best", tiles=range(1, 41), estimate=10.0)
    kernels = [FakeBlas(), best, FakeKernel("near", estimate=near), FakeKernel("far", estimate=far)]
    first = searched(problem(), kernels, kernels).first()
    assert [c.kernel.name for c in first].count("near") == 1
    assert "far" not in [c.kernel.name for c in first]
    kernels[1] = FakeKernel("best", estimate=10.0)
    first = searched(problem(), kernels, kernels).first()
    assert {c.kernel.name for c in first} == {"blas", "best", "near", "far"}


class Recapturing(FakeTimer):
    """A GPU's timer, by which each capture of a kernel takes its own time."""

    def __init__(self, captures: dict[str, list[float]]) -> None:
        super().__init__({})
        self.captures, self.forgotten = captures, 0

    def forget_captures(self) -> None:
        self.forgotten += 1

    def measure(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
        self.times = {name: us[self.forgotten % len(us)] for name, us in self.captures.items()}
        return super().measure(runs, rounds, **chain)


def test_large_products_are_captured_anew_in_the_last_round() -> None:
    """The first capture of p is 20 % slower than two others: its outputs lie badly."""

    def raced(scale: float) -> tuple[str, int, int]:
        captures = {"blas": [250.0], "p": [240.0, 200.0, 200.0], "q": [220.0]}
        timer = Recapturing({name: [us * scale for us in each] for name, each in captures.items()})
        kernels = [FakeBlas(), FakeKernel("p"), FakeKernel("q")]
        record = Tuner(timer).tune(problem(), kernels, settings())
        samples = {len(c.samples_us) for c in record.candidates}
        assert len(samples) == 1
        return winner(record), timer.forgotten, samples.pop()

    assert raced(1.0) == ("p", timing.CAPTURES - 1, stages.FINAL)
    assert raced(0.5) == ("q", 0, stages.FINAL)


class OfM(FakeKernel):
    """A batch-invariant kernel of two arithmetics, even and odd tiles, that estimates ``us`` of a
    tile at an M."""

    def __init__(self, us: Callable[[int, int], float], tiles: Sequence[int]) -> None:
        super().__init__("k", tiles=tiles, traits=Traits(batch_invariant=True))
        self.us = us

    def arithmetic(self, problem: Problem, config: Any) -> str | None:
        return "odd" if config.tile % 2 else "even"

    def estimate_us(self, problem: Problem, config: Any) -> float:
        return self.us(config.tile, problem.m)


def test_in_batch_invariant_mode_arithmetics_are_interleaved() -> None:
    """The estimates put all even tiles before the odd ones."""
    kernel = OfM(lambda tile, m: float(tile + 100 * (tile % 2)), range(1, 41))
    instance = problem(m=64, batch_invariant=True)
    first = searched(instance, [FakeBlas(), kernel], [kernel]).first()
    odd = [c.config.tile for c in first if c.kernel is kernel and c.config.tile % 2]
    assert len(first) == search.BATCHES[0] + search.MORE_INVARIANT
    assert odd[:3] == [1, 3, 5]
    assert len(searched(problem(m=64), [FakeBlas(), kernel], [kernel]).first()) == 12


def test_the_best_of_an_arithmetic_at_another_m_is_tried_and_timed_there() -> None:
    """Tile 80 is the last by estimate at the edge, 64, and the first at M = 33."""

    def estimate(tile: int, m: int) -> float:
        return 1.0 if (tile, m) == (80, 33) else 10.0 + tile / 100

    times = {("k", tile): 10.0 + tile / 100 for tile in range(2, 81, 2)}
    kernel = OfM(estimate, range(2, 81, 2))
    instance = problem(m=64, batch_invariant=True)
    record = Tuner(FakeTimer({"blas": 20.0, **times, ("k", 80, 33): 1.0})).tune(
        instance, [FakeBlas(), kernel], settings()
    )
    assert record.best.config == {"tile": 2}
    (there,) = [c for c in record.candidates if c.config.get("tile") == 80]
    assert there.inside_us[33] == 1.0
    assert 78 not in [c.config.get("tile") for c in record.candidates]


class SteadyTimer(FakeTimer):
    """A GPU's timer: by the clock steady each takes what ``steady`` says, tiles alike."""

    def __init__(self, times: dict[Any, float], steady: dict[Any, float]) -> None:
        super().__init__(times)
        self.still = FakeTimer(steady)

    def steady(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
        return self.still.measure(runs, rounds, **chain)

    def steady_steps(self, runs: Any, rounds: int, **chain: Any) -> Any:
        yield from ()
        return self.steady(runs, rounds, **chain)


def in_steady_state(
    times: dict[Any, float], steady: dict[str, float] | None = None, **how: Any
) -> tuple[str, list[str]]:
    """The winner and those that were timed in steady state, in the order of their kernels."""
    kernels = [FakeKernel(name, traits=Traits(batch_invariant=True)) for name in "pqr"]
    still = {"blas": 200.0, "p": 199.0, "q": 198.0, "r": 150.0, **(steady or {})}
    record = Tuner(SteadyTimer(times, still)).tune(
        problem(**how), [FakeBlas(), *kernels], settings()
    )
    timed = {c.kernel: c.steady_us for c in record.candidates if c.steady_us is not None}
    assert timed.items() <= still.items()
    return winner(record), [*timed]


def test_large_products_that_bursts_do_not_distinguish_are_timed_back_to_back() -> None:
    # r is fastest in steady state, but 3 % slower in use.
    times = {"blas": 210.0, "p": 200.0, "q": 203.0, "r": 206.0}
    assert in_steady_state(times) == ("q", ["blas", "p", "q"])
    assert in_steady_state({**times, "q": 205.0})[0] == "p"
    # A candidate that is not ahead of BLAS in use cannot win.
    assert in_steady_state({**times, "blas": 205.5}) == ("q", ["blas", "p", "q"])
    assert in_steady_state({**times, "blas": 201.0}) == ("blas", [])
    assert in_steady_state({name: us / 2 for name, us in times.items()}) == ("p", [])
    assert in_steady_state(times, batch_invariant=True) == ("p", [])


def test_steady_state_is_not_measured_again_where_one_is_clearly_faster() -> None:
    """p may or may not be slower than BLAS; q, level with p in use, is faster than both."""
    for q, again in ((201.0, []), (205.0, ["p", "blas"])):
        measured: list[list[str]] = []

        class Noting(SteadyTimer):
            def steady(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
                measured.append([run.launcher.cost[0] for run in runs])  # noqa: B023
                return super().steady(runs, rounds, **chain)

        timer = Noting({"blas": 210.0, "p": 200.0, "q": q}, {"blas": 200.0, "p": 203.0, "q": 190.0})
        kernels = [FakeBlas(), FakeKernel("p"), FakeKernel("q")]
        record = Tuner(timer).tune(problem(), kernels, settings())
        assert measured == [["blas", "p", "q"], *[again][: len(again)]]
        assert winner(record) == ("p" if again else "q")


def test_candidates_far_ahead_of_blas_are_compared_with_close_ones_in_steady_state() -> None:
    times = {"blas": 231.0, "p": 200.0, "q": 203.0, "r": 206.0}
    assert in_steady_state(times) == ("q", ["p", "q"])
    assert in_steady_state({**times, "q": 205.0}) == ("p", [])
    assert in_steady_state({**times, "blas": 229.0}) == ("q", ["blas", "p", "q"])


def test_a_kernel_slower_than_blas_in_steady_state_does_not_win() -> None:
    """A kernel that draws more power than BLAS looks faster when interleaved with others."""
    times = {"blas": 210.0, "p": 190.0, "q": 203.0, "r": 207.5}
    assert in_steady_state(times, steady={"p": 204.1})[0] == "q"
    assert in_steady_state(times, steady={"p": 203.9})[0] == "p"
    # Others are timed in steady state where the first are slower than BLAS.
    assert in_steady_state(times, steady={"p": 205.0, "q": 203.9})[1] == ["blas", "p", "q"]
    assert in_steady_state(times, steady={"p": 205.0, "q": 206.0}) == ("r", ["blas", "p", "q", "r"])
    assert in_steady_state(times, steady={"p": 205.0, "q": 205.0, "r": 205.0})[0] == "blas"


@pytest.mark.parametrize(
    ("p", "clear"), [(197.0, True), (198.5, False), (210.0, False), (211.0, True)]
)
def test_steady_state_is_measured_again_where_the_first_measurement_is_unclear(
    p: float, clear: bool
) -> None:
    measured: list[list[str]] = []

    class Drifting(SteadyTimer):
        """The second measurement takes 8 µs longer than the first."""

        def steady(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
            measured.append([run.launcher.cost[0] for run in runs])
            samples = super().steady(runs, rounds, **chain)
            return [[us + 8.0 * (len(measured) - 1) for us in mine] for mine in samples]

    timer = Drifting({"blas": 210.0, "p": 200.0}, {"blas": 200.0, "p": p})
    record = Tuner(timer).tune(problem(), [FakeBlas(), FakeKernel("p")], settings())
    assert measured == ([["blas", "p"]] if clear else [["blas", "p"], ["p", "blas"]])
    later = 0.0 if clear else 4.0
    assert {c.kernel: c.steady_us for c in record.candidates} == {
        "blas": 200 + later,
        "p": p + later,
    }


def test_a_kernel_that_loses_in_steady_state_does_not_answer_inside_the_bucket() -> None:
    blas = revised(result("blas", 210.0), steady_us=200.0, inside_us={33: 105.0})
    late = revised(result("p", 190.0), steady_us=205.0, inside_us={33: 90.0})
    good = revised(result("q", 200.0), steady_us=200.0, inside_us={33: 100.0})
    results = [late, blas, good]
    assert decide(results) == 2
    record = TuningRecord({"m": 64}, 2, tuple(results), "2026-01-01T00:00:00Z", 1.0)
    assert [r.kernel for r in fastest_first(record)] == ["q", "blas", "p"]
    # Nor does one that was not timed in steady state where others were.
    assert decide([late, blas, result("r", 195.0)]) == 1
    around = times_around(results, 33, 64)
    assert {name for name, _ in around[33]} == {"blas", "q"}


def test_a_launch_that_fails_in_steady_state_costs_only_itself() -> None:
    class Failing(SteadyTimer):
        def steady(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
            for run in runs:
                if run.launcher.cost[0] == "q":
                    raise LaunchError(run, ValueError("not here"))
            return super().steady(runs, rounds, **chain)

    timer = Failing({"blas": 210.0, "p": 200.0, "q": 201.0}, {})
    kernels = [FakeKernel("p"), FakeKernel("q")]
    record = Tuner(timer).tune(problem(), [FakeBlas(), *kernels], settings())
    assert winner(record) == "p"
    assert [c.status for c in record.candidates if c.kernel == "q"] == ["failed"]
    assert [c.kernel for c in record.candidates if c.steady_us is not None] == ["blas", "p"]


def test_a_tuning_holds_nothing_between_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call may resume or close it, in another thread."""
    start = candidate_launchers.start_thread

    def bind_at_once(thread: threading.Thread) -> None:
        start(thread)
        thread.join()

    # On a busy machine a thread may bind while the tuning rests.
    monkeypatch.setattr(candidate_launchers, "start_thread", bind_at_once)
    series: list[int] = []

    class Counting(FakeTimer):
        def measure(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
            series.append(rounds)
            return super().measure(runs, rounds, **chain)

    timer = Counting({("k", 1): 5.0, "blas": 10.0})
    kernels = [FakeBlas(), FakeKernel("k", tiles=(1, 2))]
    threads = threading.active_count()
    steps = Tuner(timer).steps(problem(m=512), kernels, settings(progress=True))
    count = 0
    while True:
        measured = len(series)
        try:
            pending = next(steps)
        except StopIteration as end:
            record = end.value
            break
        count += 1
        assert all(future.done() for future in pending)  # nothing compiles elsewhere here
        assert threading.active_count() == threads
        assert len(series) - measured <= 1
    assert count > 5
    assert record.best.kernel == "k"


def test_a_closed_tuning_frees_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    verifier = stages.Verifier
    release = verifier.release
    monkeypatch.setattr(verifier, "release", lambda v: released.append("tensors") or release(v))
    compilers = Compilers()
    cancelled: list[Any] = []
    monkeypatch.setattr(compilers, "cancel_pending", lambda futures: cancelled.extend(futures))
    tuner = Tuner(FakeTimer({}), compilers=compilers)
    steps = tuner.steps(problem(), [FakeBlas(), FakeKernel("k")], settings())
    pending = next(filter(None, steps))
    assert not released
    steps.close()
    assert released == ["tensors"]
    assert cancelled == list(pending)
    assert tuner.tune(problem(), [FakeBlas()], settings()).best.kernel == "blas"


def test_threads_are_started_in_addition_to_stalled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 stalled threads, and as many more as may work."""
    ended = threading.Event()

    class Hanging(FakeKernel):
        def bind(self, problem: Problem, config: FakeConfig) -> Any:
            ended.wait(30)
            return super().bind(problem, config)

    monkeypatch.setattr(candidate_launchers, "STALLED", 0.0)
    kernel, compiled = Hanging("hanging"), Future[None]()
    compiled.set_result(None)
    jobs = [(problem(), search.Candidate(kernel, FakeConfig(tile=1 + i))) for i in range(40)]
    compilers: Any = None
    deadline = Deadline(time.monotonic() + 60)
    made = CandidateLaunchers(compilers, 2, None, torch.device("cpu"), None, deadline, {})
    made._waiting = dict.fromkeys(jobs, compiled)
    steps = made.some()
    try:
        for _ in range(20):  # each starts what has room
            next(steps)
        assert len(made._binding) == 2 + 16
    finally:
        ended.set()
        for _, answer in list(made._binding.values()):
            answer.result(30)


def test_blas_is_judged_by_the_form_of_its_result_alone() -> None:
    """BLAS's values are the reference, but a result of another dtype is wrong."""
    record, _ = tune(FakeBlas(spoil=lambda out: out + 0.01), FakeKernel("fast"))
    assert status(record)["blas"] == "ok"
    record, _ = tune(FakeBlas(spoil=lambda out: out.double()), FakeKernel("fast"))
    assert status(record) == {"blas": "wrong", "fast": "ok"}
    assert winner(record) == "fast"


def test_each_device_has_its_timer() -> None:
    assert type(timer_for(torch.device("cuda", 1))) is GraphTimer
    assert type(timer_for(torch.device("cpu"))) is HostTimer
