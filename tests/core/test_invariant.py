"""Batch-invariant mode: the choice of a weight's arithmetic, and of configs within it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import DEVICE, FakeBlas, FakeConfig, FakeKernel, FakeTimer, dispatcher, problem, settings
from msgspec.structs import replace as revised

import tmm_core
from tmm_core import CacheMissError, Problem, TmmWarning, Traits, UnsupportedProblemError
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.dispatch.explanation import explain_problem
from tmm_core.dispatch.invariant import LADDER, Rung, ladder, least_regret, weight
from tmm_core.settings import Settings
from tmm_core.spec.operand import Operand
from tmm_core.tuning.tuner import Tuner

INVARIANT = Traits(batch_invariant=True)


class Summing(FakeKernel):
    """The name of a tile's arithmetic is what ``names`` says."""

    def __init__(self, name: str, names: Mapping[int, Any], **fields: Any) -> None:
        fields = {"tiles": tuple(names), "traits": INVARIANT, **fields}
        super().__init__(name, **fields)
        self.names = names

    def arithmetic(self, problem: Problem, config: FakeConfig) -> str | None:
        name: str | None = self.names[config.tile]
        return name


class TimerByM(FakeTimer):
    """Returns the time of a (kernel, tile) at the M of the call; ``tuned`` are the M of records."""

    def __init__(self, times: Mapping[tuple[str, int], Any]) -> None:
        super().__init__(dict(times))
        self.tuned: list[int] = []

    def measure(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
        m = runs[0].inputs[0].a.shape[-2]
        samples = []
        for run in runs:
            time = self.times[run.launcher.cost]
            samples.append([float(time(m) if callable(time) else time)] * rounds)
        return samples


def timed(d: Dispatcher, times: Mapping[tuple[str, int], Any]) -> TimerByM:
    timer = TimerByM(times)
    steps = Tuner(timer).steps

    def noting(key: Problem, *rest: Any, **named: Any) -> Any:
        record = yield from steps(key, *rest, **named)
        timer.tuned.append(key.m)
        return record

    d.tuner.steps = noting  # type: ignore[method-assign]
    return timer


def sampled(d: Dispatcher, change: Mapping[int, Callable[[Any], tuple[float, ...]]]) -> None:
    """Change the samples of these tiles in every record that is tuned."""
    steps = d.tuner.steps

    def changed(key: Problem, *rest: Any, **named: Any) -> Any:
        record = yield from steps(key, *rest, **named)
        found = [
            revised(each, samples_us=change[tile](each.samples_us))
            if (tile := each.config.get("tile")) in change
            else each
            for each in record.candidates
        ]
        return revised(record, candidates=tuple(found))

    d.tuner.steps = changed  # type: ignore[method-assign]


def weight_problem(m: int, **fields: Any) -> Problem:
    return problem(m=m, batch_invariant=True, **fields)


def chosen(d: Dispatcher, m: int, given: Settings | None = None) -> tuple[str, int, str | None]:
    choice = d.choose(weight_problem(m), given or settings())
    config = choice.candidate.config
    assert isinstance(config, FakeConfig)
    return choice.candidate.kernel.name, config.tile, choice.arithmetic


# The choice by regret.


def rungs(*times: Mapping[str, float]) -> list[Rung]:
    return [Rung(1.0, each) for each in times]


def test_least_regret_counts_every_rung_and_the_worst_again() -> None:
    # 1.1 everywhere against 1.0 and once 1.5: the mean of the second is less, its worst more.
    assert least_regret(rungs(*[{"even": 1.1, "uneven": 1.0}] * 3, {"even": 1.1, "uneven": 1.5}))
    even = [{"even": 1.12, "uneven": 1.0}] * 3 + [{"even": 1.12, "uneven": 1.5}]
    assert least_regret(rungs(*even)) == "even"
    slight = [{"even": 1.12, "uneven": 1.0}] * 3 + [{"even": 1.12, "uneven": 1.16}]
    assert least_regret(rungs(*slight)) == "uneven"


def test_least_regret_counts_every_m_of_a_bucket() -> None:
    inside = [Rung(1.0, {"edges": 1.6}), Rung(1.0, {"edges": 1.6, "even": 1.1})]
    edges = {"edges": 1.0, "even": 1.1}
    assert least_regret([Rung(1.0, edges), Rung(1.0, edges)]) == "edges"
    assert least_regret([Rung(1.0, edges), Rung(1.0, edges, inside)]) == "even"


def test_a_config_that_is_fast_only_at_the_edges_is_not_chosen(tmp_path: Path) -> None:
    kernel = Summing("k", {1: "edges", 2: "even"})
    d, _ = dispatcher(FakeBlas(), kernel, root=tmp_path)
    times = {("blas", 1): 10.0, ("k", 1): lambda m: 9.0 if m in LADDER else 20.0}
    timed(d, times | {("k", 2): lambda m: 10.0})
    assert chosen(d, 33) == ("k", 2, "even")


def test_an_arithmetic_that_some_m_cannot_have_comes_last() -> None:
    assert least_regret(rungs({"a": 1.0, "b": 3.0}, {"b": 3.0})) == "b"
    assert least_regret(rungs({"b": 1.0, "a": 1.0})) == "a"
    assert least_regret([]) is None


def test_a_single_measurement_at_one_m_does_not_decide(tmp_path: Path) -> None:
    """The winner at M = 256 loses elsewhere: the other arithmetic is chosen, for every M."""
    kernel = Summing("k", {1: "one", 2: "two", 4: "two"})
    d, _ = dispatcher(FakeBlas(), kernel, root=tmp_path)
    timer = timed(
        d,
        {
            ("blas", 1): 10.0,
            ("k", 1): lambda m: 5.0 if m == 256 else 20.0,
            ("k", 2): lambda m: 9.0 if m < 200 else 30.0,
            ("k", 4): lambda m: 9.0 if m >= 200 else 30.0,
        },
    )
    assert chosen(d, 256) == ("k", 4, "two")
    assert timer.tuned == list(LADDER)
    assert chosen(d, 16) == ("k", 2, "two")
    # Other buckets are measured when they first occur. Rungs are not measured again.
    assert chosen(d, 48) == ("k", 2, "two")
    assert chosen(d, 300) == ("k", 4, "two")
    assert timer.tuned == [*LADDER, 320]


def test_only_candidates_that_raced_to_the_end_are_compared(tmp_path: Path) -> None:
    """The first rounds are faster: the GPU's clock has not settled yet."""
    d, _ = dispatcher(FakeBlas(), Summing("one", {16: "k", 32: "k"}), root=tmp_path)
    timed(d, {("blas", 1): 60.0, ("one", 16): 50.0, ("one", 32): 52.0})
    sampled(d, {32: lambda samples: (45.0,)})
    assert chosen(d, 64) == ("one", 16, "k")


def test_first_rounds_are_compared_with_first_rounds(tmp_path: Path) -> None:
    """An arithmetic that lost every race is not chosen for the clock of its first rounds."""
    d, _ = dispatcher(FakeBlas(), Summing("one", {16: "won", 32: "lost"}), root=tmp_path)
    timed(d, {("blas", 1): 60.0, ("one", 16): 50.0, ("one", 32): 52.0})
    sampled(d, {16: lambda samples: (30.0, *samples[1:]), 32: lambda samples: (35.0,)})
    assert chosen(d, 64) == ("one", 16, "won")


def test_inside_a_bucket_the_config_is_the_fastest_measured_there(tmp_path: Path) -> None:
    def short(m: int) -> float:
        return 52.0 if m >= 500 else 30.0

    d, _ = dispatcher(FakeBlas(), Summing("one", {16: "k", 32: "k"}), root=tmp_path)
    timed(d, {("blas", 1): 60.0, ("one", 16): 50.0, ("one", 32): short})
    once = settings()
    assert chosen(d, 512, once) == ("one", 16, "k")
    assert chosen(d, 460, once) == ("one", 32, "k")
    # Between the largest M inside and the edge: 1.04 times the fastest there, not 1.67 here.
    assert chosen(d, 505, once) == ("one", 32, "k")


def test_inside_a_bucket_an_arithmetic_is_as_fast_as_its_fastest_config(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), Summing("one", {16: "k", 32: "k", 64: "other"}), root=tmp_path)
    times = {
        16: lambda m: 50.0 if m in LADDER else 30.0,
        32: lambda m: 52.0 if m in LADDER else 90.0,
        64: lambda m: 51.0,
    }
    timed(d, {("blas", 1): 60.0} | {("one", tile): time for tile, time in times.items()})
    assert chosen(d, 64) == ("one", 16, "k")


def test_kernels_share_an_arithmetic(tmp_path: Path) -> None:
    skinny = Summing("skinny", {1: "k16"}, against=lambda p: ["too many rows"] * (p.m > 16))
    tall = Summing("tall", {1: "k16", 2: "own"})
    d, _ = dispatcher(FakeBlas(), skinny, tall, root=tmp_path)
    timed(d, {("blas", 1): 10.0, ("skinny", 1): 5.0, ("tall", 1): 11.0, ("tall", 2): 12.0})
    assert chosen(d, 4) == ("skinny", 1, "k16")
    assert chosen(d, 17) == ("tall", 1, "k16")


@pytest.mark.slow
def test_configs_that_depend_on_m_and_kernels_that_do_are_left_out(tmp_path: Path) -> None:
    kernel = Summing("k", {1: None, 2: "two"})
    loose = FakeKernel("loose")
    d, _ = dispatcher(FakeBlas(), kernel, loose, root=tmp_path)
    timed(d, {("blas", 1): 10.0, ("k", 1): 1.0, ("k", 2): 9.0, ("loose", 1): 1.0})
    assert {chosen(d, m) for m in (1, 16, 300)} == {("k", 2, "two")}
    # This mode has a separate record, without the kernels that it forbids.
    record = d.record(weight_problem(16))
    assert record is not None
    assert {c.kernel for c in record[1].candidates} == {"k", "blas"}
    assert d.record(problem(m=16)) is None


@pytest.mark.slow
def test_without_a_name_of_its_own_each_config_is_an_arithmetic() -> None:
    kernel = FakeKernel("k", tiles=(1, 2), traits=INVARIANT)
    names = [kernel.arithmetic(weight_problem(1), FakeConfig(tile=tile)) for tile in (1, 2)]
    assert names == ["cpu-k@1(tile=1)", "cpu-k@1(tile=2)"]
    assert FakeKernel("k").arithmetic(weight_problem(1), FakeConfig()) is None
    d, _ = dispatcher(FakeBlas(), kernel)
    timed(d, {("blas", 1): 20.0, ("k", 1): 9.0, ("k", 2): lambda m: 5.0 if m < 300 else 8.0})
    assert {chosen(d, m)[1] for m in (1, 2, 17, 64, 300, 512, 4096)} == {2}


def test_the_next_rung_is_compiled_while_one_is_measured(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: "one"}), root=tmp_path)
    events: list[tuple[str, int]] = []
    prepare, steps = d.tuner.prepare, d.tuner.steps

    def preparing(key: Problem, *rest: Any) -> None:
        events.append(("compile", key.m))
        prepare(key, *rest)
        assert d.tuner.prepared[key].keys()

    def measuring(key: Problem, *rest: Any, **named: Any) -> Any:
        assert key in d.tuner.prepared
        events.append(("measure", key.m))
        return steps(key, *rest, **named)

    d.tuner.prepare, d.tuner.steps = preparing, measuring  # type: ignore[method-assign]
    assert chosen(d, LADDER[0])[0] == "k"
    first, second, third, last = LADDER
    assert events == [
        *(("compile", first), ("compile", second), ("measure", first)),
        *(("compile", third), ("measure", second), ("compile", last), ("measure", third)),
        ("measure", last),
    ]
    assert not d.tuner.prepared


# What stays.


@pytest.mark.slow
def test_a_measured_arithmetic_is_pinned_for_later_processes(tmp_path: Path) -> None:
    kernels = (FakeBlas(), Summing("k", {1: "one", 2: "two"}))
    d, _ = dispatcher(*kernels, root=tmp_path)
    timed(d, {("blas", 1): 10.0, ("k", 1): 5.0, ("k", 2): 6.0})
    assert chosen(d, 16) == ("k", 1, "one")
    # A new measurement would choose the other. A process that may not measure uses this one, too.
    for given in (settings(), settings(on_cache_miss="heuristic"), settings(on_cache_miss="error")):
        later, _ = dispatcher(*kernels, root=tmp_path)
        timed(later, {("blas", 1): 10.0, ("k", 1): 6.0, ("k", 2): 5.0})
        for m in (16, 100) if given.on_cache_miss != "error" else (16,):
            assert chosen(later, m, given) == ("k", 1, "one")


def test_a_weight_is_the_same_whatever_m_makes_of_its_operands(tmp_path: Path) -> None:
    one = weight_problem(1, k=5, a=Operand(torch.float32, aligned=True))
    many = weight_problem(9, k=5, a=Operand(torch.float32, aligned=False), capturing=True)
    assert weight(one) == weight(many)
    assert weight(one) != weight(replace(one, n=one.n + 1))
    assert weight(one) != weight(replace(one, bias=torch.float32))
    # Rows of 20 bytes that follow each other do not all start on 16.
    assert [rung.a.aligned for rung in ladder(one)] == [False] * len(LADDER)
    assert all(rung.out.aligned for rung in ladder(one))
    assert ladder(one) == ladder(many)


def test_rungs_that_memory_does_not_hold_are_left_out() -> None:
    assert [rung.m for rung in ladder(weight_problem(1))] == list(LADDER)
    assert [rung.m for rung in ladder(weight_problem(1, n=2**20))] == [16, 64, 256]
    assert [rung.m for rung in ladder(weight_problem(1, n=2**29))] == [16]


def test_no_ladder_is_measured_for_the_gradient_of_a_weight(tmp_path: Path) -> None:
    """The K of this product is the number of rows, so every batch would be measured."""
    kernel = Summing("k", {1: "one", 2: "two"}, estimate=1.0)
    d, _ = dispatcher(FakeBlas(), kernel, root=tmp_path)
    timer = timed(d, {("blas", 1): 10.0, ("k", 1): 5.0, ("k", 2): 4.0})
    gradient = weight_problem(64, a=Operand(torch.float32, "col"))
    choice = d.choose(gradient, settings())
    assert (choice.arithmetic, choice.origin) == ("one", "cache")
    assert timer.tuned == [64]
    d.tune(gradient, settings())
    assert timer.tuned == [64]


@pytest.mark.slow
def test_an_untuned_arithmetic_does_not_depend_on_m_nor_change_in_a_process(tmp_path: Path) -> None:
    class Graded(Summing):
        """Estimates that a tile is faster the closer it is to M."""

        def estimate_us(self, problem: Problem, config: FakeConfig) -> float | None:
            assert self.estimate is not None
            return self.estimate + abs(problem.m - config.tile) / 100

    wide = Graded("wide", {256: "even", 255: "odd", 64: "even", 16: "even"}, estimate=44.0)
    narrow = Graded("narrow", {8192: "tall"}, estimate=40.0)
    unsteady = Graded("unsteady", {9: None}, estimate=1.0)
    d, timer = dispatcher(FakeBlas(estimate=1.0), wide, narrow, unsteady, root=tmp_path)
    given = settings(on_cache_miss="heuristic")
    assert chosen(d, 256, given) == ("wide", 256, "even")
    assert chosen(d, 64, given) == ("wide", 64, "even")
    assert chosen(d, 1, given) == ("wide", 16, "even")
    assert chosen(d, 8192, given) == ("wide", 256, "even")
    # The choice is the same under capture and after it, since a graph keeps its bits.
    tuning = settings()
    captured = d.choose(replace(weight_problem(16), capturing=True), tuning)
    assert (captured.arithmetic, captured.origin) == ("even", "heuristic")
    assert timer.measured == []
    assert [m.problem["m"] for m in d.store.misses()] == [16]
    times = {(k.name, t): 5 for k in (wide, unsteady) for t in k.names}
    timed(d, {**times, ("blas", 1): 9, ("narrow", 8192): 1})
    assert d.choose(weight_problem(16), tuning).arithmetic == "even"
    # Until a tuning is requested, which uses the measurements.
    d.tune(weight_problem(16), tuning)
    assert d.choose(weight_problem(16), tuning).arithmetic == "tall"


def test_a_miss_of_this_mode_is_tuned_for_this_mode(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: "one"}), root=tmp_path)
    timed(d, {("blas", 1): 9.0, ("k", 1): 5.0})
    d.choose(replace(weight_problem(16), capturing=True), settings())
    (miss,) = d.store.misses()
    again = Problem.from_json(miss.problem, DEVICE, weight_problem(16).epilogue)
    assert again == weight_problem(16)
    record = d.tune(again, settings())
    assert record.problem == miss.problem
    assert d.choose(weight_problem(16), settings(on_cache_miss="error")).origin == "cache"


@pytest.mark.parametrize("forked", [False, True])
def test_a_tuning_of_this_mode_takes_its_own_lock_again(forked: bool, tmp_path: Path) -> None:
    """It measures several M in one turn, also in a forked child, which has a lock of its own."""
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: "one", 2: "two"}), root=tmp_path)
    timer = timed(d, {("blas", 1): 9.0, ("k", 1): 5.0, ("k", 2): 6.0})
    if forked:
        d.after_fork()
    thread = threading.Thread(target=lambda: d.tune(weight_problem(16), settings()), daemon=True)
    thread.start()
    thread.join(30.0)
    assert not thread.is_alive()
    assert timer.tuned


def test_an_error_where_nothing_is_on_record_and_that_is_forbidden(tmp_path: Path) -> None:
    d, timer = dispatcher(FakeBlas(), Summing("k", {1: "one"}), root=tmp_path)
    with pytest.raises(CacheMissError, match="TMM_BATCH_INVARIANT=1"):
        d.choose(weight_problem(16), settings(on_cache_miss="error"))
    assert timer.measured == []


@pytest.mark.slow
def test_an_arithmetic_without_a_kernel_is_reported(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: "one", 2: "two"}), root=tmp_path)
    timed(d, {("blas", 1): 10.0, ("k", 1): 5.0, ("k", 2): 6.0})
    assert chosen(d, 16) == ("k", 1, "one")
    later, _ = dispatcher(FakeBlas(), Summing("k", {2: "two"}, version="2"), root=tmp_path)
    timed(later, {("blas", 1): 10.0, ("k", 2): 6.0})
    with pytest.warns(TmmWarning, match="knows the arithmetic one"):
        assert chosen(later, 16) == ("k", 2, "two")
    # Where the kernel is again as it was, the weight has the bits that it had.
    back, _ = dispatcher(FakeBlas(), Summing("k", {1: "one", 2: "two"}), root=tmp_path)
    timed(back, {("blas", 1): 10.0, ("k", 1): 9.0, ("k", 2): 6.0})
    assert chosen(back, 16) == ("k", 1, "one")


def test_a_problem_its_arithmetic_cannot_serve_is_reported_to_differ(tmp_path: Path) -> None:
    def strided(p: Problem) -> list[str]:
        return ["rows are not contiguous"] if p.a.layout == "strided" else []

    fast, general = Summing("fast", {1: "fast"}, against=strided), Summing("general", {1: "any"})
    d, _ = dispatcher(FakeBlas(), fast, general, root=tmp_path)
    timed(d, {("blas", 1): 10.0, ("fast", 1): 5.0, ("general", 1): 7.0})
    odd = weight_problem(16, a=Operand(torch.float32, "strided", False))
    with pytest.warns(TmmWarning, match="arithmetic fast, but by any: its rows differ"):
        assert d.choose(odd, settings()).candidate.kernel.name == "general"
    # The first problem does not decide for later ones.
    assert chosen(d, 16) == ("fast", 1, "fast")


def test_quarantine_takes_another_config_of_the_arithmetic(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), Summing("a", {1: "k16"}), Summing("b", {1: "k16"}), root=tmp_path)
    timed(d, {("blas", 1): 10.0, ("a", 1): 5.0, ("b", 1): 7.0})
    choice = d.choose(weight_problem(64), settings())
    assert choice.candidate.kernel.name == "a"
    with pytest.warns(TmmWarning, match="failed on"):
        d.quarantine(weight_problem(64), choice, RuntimeError("boom"))
    # At an M whose bucket it failed in.
    after = d.choose(weight_problem(63), settings())
    assert (after.candidate.kernel.name, after.arithmetic) == ("b", "k16")


def test_a_plugins_arithmetic_that_fails_costs_the_kernel() -> None:
    class Raises(FakeKernel):
        def arithmetic(self, problem: Problem, config: FakeConfig) -> str | None:
            raise RuntimeError("no idea")

    odd = Summing("odd", {1: ("no", "name")})
    good = Summing("k", {1: "one"})
    d, _ = dispatcher(FakeBlas(), Raises("raises", traits=INVARIANT), odd, good)
    timed(d, {("blas", 1): 10.0, ("raises", 1): 1.0, ("odd", 1): 2.0, ("k", 1): 5.0})
    with pytest.warns(TmmWarning) as caught:
        assert chosen(d, 16) == ("k", 1, "one")
    texts = sorted(str(w.message) for w in caught)
    assert len(texts) == 1  # of one plugin
    assert "of plugin 'fakes' is set aside: arithmetic r" in texts[0]
    faults = {kernel.name: kernel.fault for kernel in d.registry.kernels()}
    assert "arithmetic returned ('no', 'name')" in faults["odd"]
    assert "arithmetic raised RuntimeError" in faults["raises"]


def test_a_rung_that_cannot_be_tuned_costs_the_rung(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: "one"}), root=tmp_path)
    timed(d, {("blas", 1): 10.0, ("k", 1): 5.0})
    steps = d.tuner.steps

    def failing(key: Problem, *rest: Any, **named: Any) -> Any:
        if key.m == 1024:
            raise torch.OutOfMemoryError("no room")
        return steps(key, *rest, **named)

    d.tuner.steps = failing  # type: ignore[method-assign]
    with pytest.warns(TmmWarning, match="for 1024×.*tuning failed: OutOfMemoryError: no room"):
        assert chosen(d, 16) == ("k", 1, "one")


def test_batch_invariance_that_no_kernel_has_is_reported() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("loose"), times={"loose": 1.0})
    with pytest.warns(TmmWarning, match="loose is not batch-invariant, but nothing that is"):
        assert d.choose(weight_problem(8), settings()).candidate.kernel.name == "loose"


# By name.


def test_an_arithmetic_is_pinned_by_configuration(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: "one", 2: "two"}), root=tmp_path)
    timer = timed(d, {("blas", 1): 10.0, ("k", 1): 5.0, ("k", 2): 6.0})
    pinned = settings(arithmetic="two")
    assert chosen(d, 16, pinned) == ("k", 2, "two")
    # No ladder is measured for it.
    assert timer.tuned == [16]
    assert chosen(d, 16) == ("k", 1, "one")
    with pytest.raises(UnsupportedProblemError, match=r"'three' of .*there are: one, two$"):
        d.choose(weight_problem(16), settings(arithmetic="three"))


def test_naming_an_arithmetic_turns_on_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(3, 8), torch.randn(8, 4)
    assert not tmm_core.problem(x, w).batch_invariant
    with tmm_core.override(arithmetic="sm90-k16") as changed:
        assert changed.arithmetic == "sm90-k16"
        assert tmm_core.problem(x, w).batch_invariant
        with pytest.raises(UnsupportedProblemError, match="'sm90-k16'"):
            tmm_core.matmul(x, w)
    assert Settings.from_environ({"TMM_ARITHMETIC": " a/split4 "}).arithmetic == "a/split4"
    assert Settings.from_environ({"TMM_ARITHMETIC": ""}).arithmetic is None


def test_explain_names_the_arithmetic(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: "one"}), root=tmp_path)
    timed(d, {("blas", 1): 10.0, ("k", 1): 5.0})
    chosen(d, 16)
    explained = explain_problem(d, weight_problem(16), settings(on_cache_miss="heuristic"))
    assert "sums by   one, as all M of this weight" in str(explained)
    assert explained.to_json()["arithmetic"] == "one"
    # The mode's own record answers.
    assert explained.record is not None
    assert explained.record.problem["batch_invariant"] is True
    plain = explain_problem(d, problem(m=16), settings(on_cache_miss="heuristic"))
    assert "sums by" not in str(plain)


def test_gradients_go_by_the_arithmetic_of_their_product() -> None:
    from tmm_core import dispatch

    kernel = Summing("fake.k", {1: "one", 2: "two"}, estimate=1.0)
    from fakes import plugin

    dispatch.default_dispatcher().registry.register(plugin(kernel), "fakes")
    x = torch.randn(6, 8, requires_grad=True)
    w = torch.randn(8, 4, requires_grad=True)
    with tmm_core.override(arithmetic="two", on_cache_miss="heuristic"):
        y = tmm_core.matmul(x, w)
    y.sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert torch.allclose(x.grad, w.sum(1).expand(6, 8), atol=1e-5)
    assert torch.allclose(w.grad, x.detach().sum(0)[:, None].expand(8, 4), atol=1e-5)
    # The product and both of its gradients, each of this mode.
    assert [bound.batch_invariant for bound in kernel.bound] == [True] * 3
