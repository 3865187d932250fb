"""Limits of the benchmark: medians, ends of ranges, and deadlines."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import subprocess
import time
import types
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from fakes import FakeConfig, FakeKernel, problem, register
from test_bench import ColumnTimer, document, small_problems
from tmm_cache import CandidateResult

import tmm_core
from tmm_core import Traits, dispatch, settings
from tmm_core.bench import (
    exhaustive,
    grouped_baselines,
    host,
    provenance,
    providers,
    quick,
    report,
    runner,
    series,
    suites,
)
from tmm_core.bench.case import LAYOUTS, Case
from tmm_core.bench.results import KINDS, Results
from tmm_core.launch import warm
from tmm_core.tuning.timing import GraphTimer
from tmm_core.verify.environment_faults import BUDGET_ENDED

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
    clock = itertools.count()  # a second per look: a batch takes one
    monkeypatch.setattr(host.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(host, "CALLS", 10)
    assert host.host_us({"call": lambda: None}, CPU, repeats=2)["call"] == 1e5


def test_no_garbage_is_collected_while_calls_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CALLS", 2)
    monkeypatch.setattr(host, "WARM", 1)
    seen: list[bool] = []
    host.host_us({"call": lambda: seen.append(gc.isenabled())}, CPU, repeats=2)
    assert seen == [True, *[False] * 4]
    assert gc.isenabled()


# -- regret -------------------------------------------------------------------------------


def measured(
    monkeypatch: pytest.MonkeyPatch, times: Sequence[float]
) -> tuple[ColumnTimer, dict[str, Any]]:
    """Time a random problem: torch, the choice, torch again, the record's other candidates."""
    small_problems(monkeypatch)
    timer = ColumnTimer(*times)
    monkeypatch.setattr(runner, "timer_for", lambda device: timer)
    tasks = suites.random_problems(1, torch.float32)
    (document,) = runner.run(tasks, CPU, runner.Options(budget=2.0, seconds=0.01))
    return timer, document


def test_the_choice_is_compared_with_the_fastest_candidates_on_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(FakeKernel("fake.a", tiles=range(1, 10)))
    # The clock of a tuning decides how many of them it times to the end.
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


def test_noise_is_an_absolute_value() -> None:
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
    """Has the shape, strides and dtype of a tensor on a GPU, but no memory."""

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
    summary = runner._summary([4.00061, 1.0, 2.00041, 3.00051, 5.0])
    assert summary == {"median_us": 3.001, "p25_us": 2.0, "p75_us": 4.001, "samples": 5}
    assert report._spread({"median_us": 3.04, "p25_us": 2.0, "p75_us": 5.0}) == "3.0 ±1.5"


def test_each_capture_gives_equally_many_samples() -> None:
    captures = [[[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]], [[4.0, 5.0], [40.0, 50.0]]]
    assert runner.pooled(captures) == [[1.0, 2.0, 4.0, 5.0], [10.0, 20.0, 40.0, 50.0]]


class Clocked(GraphTimer):
    """A timer that takes one second for each round."""

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


# -- calls --------------------------------------------------------------------------------


def test_the_error_of_a_call_that_writes_a_part_of_its_result_is_not_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though the output may get memory that holds a right result."""
    call = Case(m=4, n=6, k=8, dtype=torch.float32).call(CPU)
    assert call.error() < 1e-5
    right = call.matmul()

    def reused(problem: Any, device: torch.device) -> torch.Tensor:
        return right.clone()

    def upper_rows(self: Any, out: torch.Tensor) -> torch.Tensor:
        out[:2] = right[:2]
        return out

    monkeypatch.setattr(type(call.problem()), "empty_out", reused)
    monkeypatch.setattr(type(call), "matmul", upper_rows)
    assert not call.error() < 1


def test_calls_of_groups_are_launched_with_a_bias_for_each_or_with_none() -> None:
    bare = Case(m=32, n=16, k=16, dtype=torch.float32, groups=4).call(CPU)
    assert bare.inputs() is bare
    call = Case(m=32, n=16, k=16, dtype=torch.float32, groups=4, bias=True).call(CPU)
    bias = call.inputs().bias
    assert bias is not None
    assert call.bias is not None
    assert torch.equal(bias, call.bias.expand(4, 16))
    plain = Case(m=32, n=16, k=16, bias=True).call(CPU)
    assert plain.inputs() is plain


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_have_the_strides_of_the_layout(layout: str) -> None:
    call = Case(m=4, n=6, k=8, layout=layout).call(CPU)
    assert [t.is_contiguous() for t in (call.a, call.b)] == [x == "n" for x in layout]
    assert {a + b for a in "nt" for b in "nt"} == set(LAYOUTS)


def test_sizes_of_groups_are_alternately_skewed_and_even_by_default() -> None:
    assert Case(m=1, n=1, k=1, groups=2).routing == "both"


def grouped(**fields: Any) -> Any:
    return Case(m=24, n=16, k=16, dtype=torch.bfloat16, groups=3, **fields).call(CPU)


def test_groups_by_torch_have_the_requested_dtype() -> None:
    for out_dtype in (None, torch.float32):
        call = grouped(out_dtype=out_dtype, bias=True, epilogue="silu")
        y = grouped_baselines._on([call], lambda call: call.a @ call.b[0])(0)
        assert y.dtype == (out_dtype or torch.bfloat16)
        exact = torch.nn.functional.silu(call.a @ call.b[0] + call.bias)
        torch.testing.assert_close(y.float(), exact.float(), atol=0.1, rtol=0.02)


@pytest.mark.parametrize("column", [providers.eager, providers.tmm, grouped_baselines.eager])
def test_each_copy_of_the_operands_is_multiplied(
    column: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operands that were read lately would be in the L2 cache."""
    many = column is grouped_baselines.eager
    monkeypatch.setattr(grouped_baselines, "_by_torch", lambda call: call.a @ call.b[0])
    make = grouped if many else Case(m=4, n=6, k=8, bias=True, dtype=torch.float32).call
    calls = [make(bias=True) if many else make(CPU) for _ in range(2)]
    run = column(calls)
    for copy, call in enumerate(calls):
        b = call.b[0] if many else call.b
        torch.testing.assert_close(run(copy), call.a @ b + call.bias)


def test_scales_that_are_missing_are_ones_for_each_row_and_column() -> None:
    call = Case(m=32, n=16, k=16, dtype=torch.float8_e4m3fn, groups=2).call(CPU)
    a_scale, b_scale = grouped_baselines._row_scales(call)
    assert torch.equal(a_scale, torch.ones(32))
    assert torch.equal(b_scale, torch.ones(2, 16))
    with pytest.raises(ValueError, match="torch has no grouped product of these 8-bit floats"):
        grouped_baselines.eager([call])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_groups_are_padded_and_cut(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """The contiguous dimension is padded to a multiple of 16 bytes."""
    call = Case(m=15, n=13, k=11, dtype=torch.float32, groups=3, layout=layout).call(CPU)
    given: list[torch.Tensor] = []

    def product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        given.extend((a, b))
        assert offs is call.rows.offs  # type: ignore[union-attr]
        return a @ b[0]

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", product)
    y = grouped_baselines._padded(call)
    torch.testing.assert_close(y, call.a @ call.b[0])
    assert y.shape == (15, 13)
    for t, plain in zip(given, (call.a, call.b), strict=True):
        along = -1 if plain.stride(-1) == 1 else -2
        assert t.stride(along) == 1
        assert t.shape[along] % 4 == 0
        assert not torch.isnan(t).any()


def test_a_tensor_grows_in_its_own_layout() -> None:
    t = torch.arange(6.0).view(2, 3)
    for mine in (t, t.t().contiguous().t()):
        grown = grouped_baselines._grown(mine, 1, 2)
        assert grown.shape == (3, 5)
        assert torch.equal(grown[:2, :3], t)
        assert grown.sum() == t.sum()
        assert (grown.stride(-1) == 1) == (mine.stride(-1) == 1)


# -- the choice and its rivals ------------------------------------------------------------


def candidate(us: float, **changes: Any) -> CandidateResult:
    given: dict[str, Any] = {
        "kernel": "k", "version": "1", "config": {}, "status": "ok", "samples_us": (us,),
    }  # fmt: skip
    return CandidateResult(**given | changes)


@pytest.mark.parametrize(
    ("best", "changes", "message"),
    [
        ("k {}", None, "found"),
        ("b", None, "proposed, but not tried"),
        ("c", None, "never proposed"),
        ("a", {"samples_us": (), "reason": f"{BUDGET_ENDED} now"}, "not compiled in time"),
        ("a", {"samples_us": (), "reason": "x", "status": "failed"}, "failed: x"),
        ("a", {"samples_us": (), "reason": None, "status": "wrong"}, "wrong: None"),
        ("a", {"samples_us": (1.0,) * exhaustive.SCREENING}, "lost in the screening round"),
        ("a", {"samples_us": (1.0,) * (exhaustive.SCREENING + 1)}, "lost in the second round"),
        ("a", {"samples_us": (1.0,) * exhaustive.SECOND}, "lost in the second round"),
        ("a", {"samples_us": (1.0,) * (exhaustive.SECOND + 1)}, "lost in the deciding round"),
        (
            "a", {"samples_us": (1.0,) * (exhaustive.SECOND + 1), "steady_us": 1.0},
            "lost in the steady-state round",
        ),
    ],
)  # fmt: skip
def test_the_step_that_lost_the_best(
    best: str, changes: dict[str, Any] | None, message: str
) -> None:
    tried = {} if changes is None else {"a": candidate(1.0, **changes)}
    assert exhaustive.step(best, "k {}", tried, ["b", "k {}"]) == message


BLAS, ONE, TWO = 'blas {"tile": 1}', 'fast {"tile": 1}', 'fast {"tile": 2}'


def searched(
    monkeypatch: pytest.MonkeyPatch,
    use: dict[str, float],
    steady: dict[str, float],
    wrong: Sequence[str] = (),
) -> dict[str, Any]:
    """The search of a problem whose tuning tried and chose one of two configs."""
    kernels = [FakeKernel("blas"), FakeKernel("fast", tiles=(1, 2))]
    best = candidate(1.0, kernel="fast", config={"tile": 1})
    record: Any = types.SimpleNamespace(best=best, candidates=[best])
    chooser = types.SimpleNamespace(able=lambda problem, current: kernels)
    stub = types.SimpleNamespace(default_dispatcher=lambda: chooser)
    monkeypatch.setattr(exhaustive, "dispatch", stub)

    def race(problem: Any, device: Any, launchers: Any, **how: Any) -> Any:
        last = how.get("steady", False)
        assert how["captures"] == (exhaustive.CAPTURES if last else 1)
        return (
            {name: use[name] for name in launchers},
            {name: us for name, us in steady.items() if name in launchers} if last else {},
        )

    class Verifier:
        def __init__(self, *_: Any, memory_limit: int) -> None:
            assert memory_limit == 1 << 20  # the limit of a tuning

        def verdict(self, launcher: str) -> Any:
            return types.SimpleNamespace(ok=launcher not in wrong)

        def release(self) -> None: ...

    monkeypatch.setattr(exhaustive, "race", race)
    monkeypatch.setattr(exhaustive, "Verifier", Verifier)
    monkeypatch.setattr(exhaustive, "_bound", lambda *given: ({n: n for n in given[-1]}, {}))
    with settings.override(tune_memory=1 << 20):
        return exhaustive.search(problem(), record, CPU)


def test_a_search_finds_a_candidate_that_the_tuning_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    use = {BLAS: 10.0, ONE: 9.0, TWO: 8.0}
    assert searched(monkeypatch, use, {BLAS: 10.0, TWO: 10.0}) == {
        "chosen": ONE, "best": TWO, "step": "proposed, but not tried", "regret": 9 / 8,
        "blas_over_best": 10 / 8, "candidates": 3, "tried": 1, "failed": {}, "us": use,
        "steady_us": {BLAS: 10.0, TWO: 10.0},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("use", "steady", "wrong", "best"),
    [
        ((10.0, 9.0, 8.0), {}, [], TWO),
        ((10.0, 9.0, 8.0), {BLAS: 10.0, TWO: 10.0 * (1 + exhaustive.CLOSE)}, [], TWO),
        ((10.0, 9.0, 8.0), {BLAS: 10.0, TWO: 10.1 * (1 + exhaustive.CLOSE)}, [], ONE),
        ((10.0, 9.0, 8.0), {}, [TWO], ONE),
        ((10.0, 9.0, 10.0 * (1 - exhaustive.MARGIN)), {}, [ONE], ONE),
        ((10.0, 10.0 * (1 - exhaustive.MARGIN), 10.0), {}, [], ONE),
        ((10.0, 10.01 * (1 - exhaustive.MARGIN), 10.0), {}, [], BLAS),
    ],
)  # fmt: skip
def test_the_best_of_a_search_is_chosen_by_the_rules_of_the_tuning(
    monkeypatch: pytest.MonkeyPatch,
    use: tuple[float, float, float],
    steady: dict[str, float],
    wrong: list[str],
    best: str,
) -> None:
    found = searched(monkeypatch, dict(zip((BLAS, ONE, TWO), use, strict=True)), steady, wrong)
    assert found["best"] == best
    assert found["failed"] == {name: "wrong" for name in wrong if name != ONE}


@pytest.mark.parametrize(
    ("kind", "us", "requested", "steady"),
    [
        (GraphTimer, exhaustive.LONG_US, True, {"a": 7.0, "b": 8.0}),
        (GraphTimer, exhaustive.LONG_US - 4, True, {}),
        (GraphTimer, exhaustive.LONG_US, False, {}),
        (object, exhaustive.LONG_US, True, {}),
    ],
)
def test_long_products_race_in_steady_state_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, kind: Any, us: float, requested: bool, steady: dict[str, float]
) -> None:
    released: list[object] = []

    class Timer(kind):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def measure(self, runs: Any, rounds: int, copies: int, burst_us: float) -> Any:
            assert (len(runs), rounds, copies, burst_us) == (2, 5, 3, 9.0)
            now = us + (0, 3, 1)[len(released)]
            return [[now] * rounds, [now + 1] * rounds]

        def steady(self, runs: Any, rounds: int, copies: int, steady_us: float) -> Any:
            assert (len(runs), rounds, copies, steady_us) == (2, 1, 3, exhaustive.STEADY_US)
            return [[7.0], [8.0]]

        def release(self) -> None:
            released.append(self)

    copies = types.SimpleNamespace(runner=lambda launcher: types.SimpleNamespace(inputs=range(3)))
    monkeypatch.setattr(exhaustive, "timer_for", lambda device: Timer())
    monkeypatch.setattr(exhaustive, "Copies", lambda problem, device, memory: copies)
    launchers: Any = {"a": None, "b": None}
    how: dict[str, Any] = {"captures": 3, "rounds": 5, "burst_us": 9.0, "steady": requested}
    found = exhaustive.race(problem(), CPU, launchers, **how)
    assert found == ({"a": us + 1, "b": us + 2}, steady)  # medians over captures
    assert len({*map(id, released)}) == 3


def test_a_candidate_is_identified_by_its_kernel_and_sorted_fields() -> None:
    found = exhaustive._proposed(problem(), [FakeKernel("fake", tiles=(3, 2))])
    assert [*found] == ['fake {"tile": 3}', 'fake {"tile": 2}']
    assert exhaustive._name(candidate(1.0, config={"b": 1, "a": 2})) == 'k {"a": 2, "b": 1}'
    assert [each.config for each in found.values()] == [FakeConfig(tile=3), FakeConfig(tile=2)]


def test_a_candidate_that_does_not_compile_costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float | None] = []

    class Compiling(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            waited.append(timeout)
            return super().result(0)

    def submit(problem: Any, candidate: Any) -> Future[None]:
        made = Compiling()
        if candidate.config.tile == 2:
            made.set_exception(RuntimeError("no ptxas"))
        else:
            made.set_result(None)
        return made

    compilers = types.SimpleNamespace(submit=submit)
    chosen = types.SimpleNamespace(tuner=types.SimpleNamespace(compilers=compilers))
    monkeypatch.setattr(
        exhaustive, "dispatch", types.SimpleNamespace(default_dispatcher=lambda: chosen)
    )
    proposed = exhaustive._proposed(problem(), [FakeKernel("fake", tiles=(3, 2))])
    launchers, failed = exhaustive._bound(problem(), CPU, proposed)
    assert [*launchers] == ['fake {"tile": 3}']
    assert failed == {'fake {"tile": 2}': "RuntimeError: no ptxas"}
    assert waited == [exhaustive.PATIENCE] * 2


def test_without_records_kernels_are_compiled_into_an_empty_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TMM_REQUIRE_LOCKED", "1")
    monkeypatch.setenv("TMM_LOCK_FILE", "/x")
    usual, folder = dispatch.default_dispatcher(), os.environ.get("TRITON_CACHE_DIR")
    a = torch.randn(4, 8)
    with exhaustive.without_records():
        tmm_core.matmul(a, a.T)
        assert warm._plans
        root = dispatch.default_dispatcher().store.root
        assert os.environ["TRITON_CACHE_DIR"] == f"{root}/triton"
        assert os.environ["TMM_REQUIRE_LOCKED"] == "0"
        assert "TMM_LOCK_FILE" not in os.environ
        assert root != usual.store.root
    assert dispatch.default_dispatcher() is usual
    assert not warm._plans
    assert (os.environ.get("TRITON_CACHE_DIR"), os.environ["TMM_LOCK_FILE"]) == (folder, "/x")
    assert not root.exists()


def test_rivals_are_the_fastest_other_candidates_on_record() -> None:
    results = [
        candidate(3.0), candidate(1.0, config={"tile": 2}), candidate(2.0, kernel="other"),
        *(candidate(4.0 + i, kernel=f"k{i}") for i in range(5)),
    ]  # fmt: skip
    record: Any = types.SimpleNamespace(candidates=results)
    chosen: Any = types.SimpleNamespace(kernel="k", config={})
    found = providers.known(record, chosen)
    assert [(each.kernel, dict(each.fields)) for each in found] == [
        ("k", {"tile": 2}), ("other", {}), ("k0", {}), ("k1", {}),
    ]  # fmt: skip
    assert [each.label for each in found][:2] == ["k tile=2", "other"]


def test_inductor_compiles_the_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def compiled(function: Any, **more: Any) -> Any:
        given.append(more)
        return lambda *tensors: function(*tensors) + 1

    monkeypatch.setattr(torch, "compile", compiled)
    resets: list[bool] = []
    stub = types.SimpleNamespace(reset=lambda: resets.append(True))
    monkeypatch.setitem(vars(torch), "_dynamo", stub)  # importing the real module takes a second
    call = Case(m=4, n=4, k=4, dtype=torch.float32, epilogue="relu").call(CPU)
    torch.testing.assert_close(
        providers.inductor([call])(0),
        providers.eager([call])(0) + 1,  # type: ignore[operator]
    )
    assert given == [{"mode": "max-autotune-no-cudagraphs", "dynamic": False}]
    assert resets == [True]


@pytest.mark.parametrize("text", ["", "silu", "silu+tanh", "silu+tanh+relu", "swiglu+tanh+relu"])
def test_the_eager_code_of_a_chain_has_every_stage(text: str) -> None:
    case = Case(m=4, n=4, k=4, dtype=torch.float32, epilogue=text, residual=True)
    call = case.call(CPU)
    y = providers.eager([call])(0)
    expected = call.epilogue.expression(call.a @ call.b, call.bias, call.residual)
    torch.testing.assert_close(torch.as_tensor(y), expected)


# -- the run ------------------------------------------------------------------------------


def test_a_call_is_followed_by_a_small_kernel_and_keeps_its_result() -> None:
    small = torch.ones(3)
    version = small._version
    run = runner._with_between(lambda copy: copy + 1, small)
    assert run(4) == 5
    assert small._version == version + 1


def test_options_are_off_unless_given() -> None:
    usual = runner.Options()
    assert (usual.tune, usual.records, usual.seconds) == (True, True, 0.5)
    assert (usual.kernels, usual.inductor, usual.clocks, usual.series) == (False, False, False, ())


@pytest.mark.parametrize(("bucketed", "m"), [(False, 100), (True, 112)])
def test_a_bucketed_task_is_tuned_at_the_edge_of_its_bucket(bucketed: bool, m: int) -> None:
    task = suites.Task("s", Case(m=100, n=16, k=16), bucketed=bucketed)
    assert runner._problem_of(task, CPU).m == m
    assert (task.batch_invariant, suites.Task("s", task.case).bucketed) == (False, False)


@pytest.mark.parametrize(
    ("changes", "invariant", "prepared"),
    [({}, False, 1), ({"tune": False}, False, 0), ({"records": False}, False, 0), ({}, True, 0)],
)
def test_the_next_problem_is_compiled_while_one_is_measured(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], invariant: bool, prepared: int
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(runner, "prepare", lambda make, tf32: sizes.append(make().m))
    monkeypatch.setattr(runner, "_measure", lambda *_: None)
    tasks = [suites.Task("s", Case(m=m, n=16, k=16), invariant) for m in (16, 32)]
    documents = [*runner.run(tasks, CPU, runner.Options(**changes))]
    assert [each["kind"] for each in documents] == ["problem"] * 2
    assert sizes == [32] * prepared


def test_a_gpus_memory_is_given_back_and_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    runner._release(CPU)
    runner._once(lambda copy: done.append(f"run {copy}"), False)
    assert done == ["run 0"]
    done.clear()
    runner._release(torch.device("cuda", 0))
    runner._once(lambda copy: done.append(f"run {copy}"), True)
    assert done == ["emptied", "run 0", "waited"]


def test_inductor_is_timed_unless_the_problem_is_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.providers, "inductor", lambda calls: lambda copy: None)
    groups: list[Any] = []
    eager = lambda calls: groups.append(calls) or (lambda copy: None)  # noqa: E731
    monkeypatch.setattr(runner.grouped_baselines, "eager", eager)
    options = runner.Options(inductor=True)
    plain = Case(m=16, n=16, k=16, dtype=torch.float32).call(CPU)
    assert runner.INDUCTOR in runner._runs([plain], options, {})
    assert groups == []
    calls = [grouped()]
    assert runner.INDUCTOR not in runner._runs(calls, options, {})
    assert groups == [calls] * 2  # torch, twice


# -- provenance, classes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("described", "commit"),
    [("a1" * 20, ("a1" * 20, False)), ("a1" * 20 + "-dirty", ("a1" * 20, True)), (None, None)],
)
def test_the_commit_and_whether_files_changed(
    monkeypatch: pytest.MonkeyPatch, described: str | None, commit: tuple[str, bool] | None
) -> None:
    monkeypatch.setattr(provenance.Path, "exists", lambda path: True)
    monkeypatch.setattr(provenance, "_output", lambda command: described)
    found = commit or (None, None)
    assert provenance._commit() == found
    about = provenance.describe(CPU, ["bench", "--quick"])
    assert (about["commit"], about["uncommitted_changes"]) == found
    assert (about["driver"], about["command"]) == (None, ["bench", "--quick"])


def test_a_gpus_driver_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        ran.append(command)
        if len(ran) == 2:
            raise subprocess.TimeoutExpired(command, 20)
        return types.SimpleNamespace(stdout=" 580.1\n" if len(ran) == 1 else " ")

    monkeypatch.setattr(subprocess, "run", run)
    properties = types.SimpleNamespace(uuid="x-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    gpu = torch.device("cuda", 0)
    assert [provenance.driver_version(gpu) for _ in range(3)] == ["580.1", None, None]
    query = ["--query-gpu=driver_version", "--format=csv,noheader"]
    assert ran == [["nvidia-smi", "--id=GPU-x-1", *query]] * 3


def test_a_call_is_warm_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CALLS", 3)
    calls: list[int] = []
    host.host_us({"one": lambda: calls.append(1)}, CPU, repeats=2)
    assert len(calls) == 10 + 2 * 3


def test_random_problems_equal_the_problems_of_earlier_results() -> None:
    found = [(task.case.m, task.case.n, task.case.k) for task in suites.random_problems(3)]
    assert found == [(2016, 27648, 5120), (10, 1280, 8192), (38, 5120, 5120)]


def test_calls_with_out_allocate_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    into: set[str] = set()
    results: dict[str, torch.Tensor] = {}

    def timed(calls: dict[str, Any], device: torch.device) -> dict[str, float]:
        into.update(name for name, call in calls.items() if call() is call())
        results.update((name, call().clone()) for name, call in calls.items())
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(host, "host_us", timed)
    host.measure(CPU, tune=False)
    assert into == {"torch.mm(x, w, out=out)", "plan(x, w, out=out)"}
    # Each call computes what its name says, by torch and by tmm.
    plain = results["torch.matmul(x, w)"]
    for name, y in results.items():
        right = results["F.linear(x, w, bias)"] if "bias" in name else plain
        right = torch.nn.functional.silu(plain) if "silu" in name else right
        torch.testing.assert_close(y, right, rtol=0.02, atol=0.05, msg=name)
    assert not torch.allclose(results["F.linear(x, w, bias)"], plain, atol=0.1)


def test_a_class_that_includes_others_has_their_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"dtypes": "bf16", "shapes": [[16, 32, 64]]}
    both = {"plain": plain, "again": {"like": "plain", "batch_invariant": True}}
    monkeypatch.setattr(suites, "shipped", lambda: both)
    [task] = suites.select(["again"])
    assert (task.suite, task.case.m, task.batch_invariant) == ("again", 16, True)


def test_torchs_groups_need_addresses_of_16_bytes() -> None:
    memory = torch.zeros(24 * 16 + 8, dtype=torch.bfloat16)
    call = grouped()
    for first, refuses in ((0, False), (8, False), (4, True), (1, True)):
        a = memory[first : first + 24 * 16].view(24, 16)
        assert (a.data_ptr() - memory.data_ptr()) == 2 * first
        assert grouped_baselines._refuses(dataclasses.replace(call, a=a)) is refuses


def test_every_row_of_a_quick_run_is_a_class_with_problems() -> None:
    assert quick.ROWS.keys() <= suites.shipped().keys()
    assert all(suites.select([name], dtype=torch.bfloat16) for name in quick.ROWS)


def test_each_class_has_a_section_of_its_own_problems() -> None:
    classes = enumerate(("one", "two", "one"), start=1)
    documents = [document(16 * number, 1.1, suite) for number, suite in classes]
    found = {each.title: each for each in report.sections(Results(problems=documents))}
    assert [len(found[name].rows) for name in ("one", "two")] == [2, 1]
    assert len(report.SUMMARY_COLUMNS) == len(found[""].rows[0])
    assert KINDS == ("run", "host", "problem", "regret")
    assert (Results().problems, Results().runs) == ([], [])


@pytest.mark.parametrize(
    ("a", "b", "padded"),
    [
        (torch.empty(4, 16), torch.empty(2, 16, 8), False),
        (torch.empty(4, 8)[:, :4], torch.empty(2, 4, 4), False),
        (torch.empty(4, 16), torch.empty(2, 8, 16).mT, False),
        (torch.empty(1, 6), torch.empty(1, 6, 8), True),  # the stride of one row counts, too
        (torch.empty(1, 16)[:, :8], torch.empty(1, 8, 8), False),
        (torch.empty(4, 6), torch.empty(2, 6, 8), True),
        (torch.empty(4, 8), torch.empty(2, 8, 6), True),
        (torch.empty(65)[1:].view(4, 16), torch.empty(2, 16, 8), True),
        (torch.empty(4, 16), torch.empty(2 * 16 * 8 + 1)[1:].view(2, 16, 8), True),
        (torch.empty(4, 16), torch.empty(33 * 4)[:132].view(1, 33, 4)[:, :, :2], False),
    ],
)  # fmt: skip
def test_operands_that_torch_takes_are_not_padded(
    a: torch.Tensor, b: torch.Tensor, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_padded", "_by_torch"):
        monkeypatch.setattr(grouped_baselines, name, lambda call, name=name: name)
    epilogue = types.SimpleNamespace(expression=lambda y, bias, residual: y)
    call: Any = types.SimpleNamespace(
        a=a, b=b, epilogue=epilogue, bias=None, residual=None, out_dtype=None
    )
    assert grouped_baselines.eager([call])(0) == ("_padded" if padded else "_by_torch")


@pytest.mark.parametrize(
    ("script", "found"), [("echo ' x '", "x"), ("echo x; exit 3", None), ("true", "")]
)
def test_the_output_of_a_command_counts_if_it_succeeds(script: str, found: str | None) -> None:
    assert provenance._output(["sh", "-c", script]) == found
    assert provenance._output(["/no/such/command", script]) is None


# -- what a problem is measured with -------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "bucketed", "invariant", "tune", "searched", "rivals"),
    [
        (True, False, False, True, 0, 0), (False, False, False, True, 1, 0),
        (False, True, False, True, 0, 1), (False, False, True, True, 0, 0),
        (True, True, False, True, 0, 1), (True, True, False, False, 0, 0),
    ],
)  # fmt: skip
def test_which_problems_are_searched_and_which_have_rivals(
    monkeypatch: pytest.MonkeyPatch,
    records: bool,
    bucketed: bool,
    invariant: bool,
    tune: bool,
    searched: int,
    rivals: int,
) -> None:
    """Problems tuned without records are searched; those tuned at another M have rivals."""
    if invariant:
        register(FakeKernel("firm", traits=Traits(batch_invariant=True), estimate=9.0))
    found: list[Any] = []
    timer = ColumnTimer(30.0, 20.0, 30.0, 25.0)
    monkeypatch.setattr(runner, "timer_for", lambda device: timer)
    monkeypatch.setattr(exhaustive, "search", lambda *given: found.append(given[1]) or {"x": 1})
    known = [series.Series("blas", "blas")]
    monkeypatch.setattr(providers, "known", lambda record, plan: known)
    case = Case(m=20, n=16, k=16, dtype=torch.float32)
    task = suites.Task("s", case, invariant, bucketed)
    options = runner.Options(records=records, tune=tune, budget=1.0)
    (measured,) = runner.run([task], CPU, options)
    assert "failed" not in measured, measured
    assert len(found) == searched
    assert ("search" in measured) is bool(searched)
    assert len([name for name in measured["times"] if name.startswith("known ")]) == rivals
    assert ("best_us" in measured) is bucketed
    assert (measured["tuning_seconds"] is None) is not tune
    assert timer.released == 1 + searched


@pytest.mark.parametrize("clocks", [True, False])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_other_clocks_are_of_a_gpu_on_request(
    monkeypatch: pytest.MonkeyPatch, clocks: bool, on_gpu: bool
) -> None:
    class Timer(GraphTimer if on_gpu else object):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def release(self) -> None: ...

    monkeypatch.setattr(runner, "timer_for", lambda device: Timer())
    monkeypatch.setattr(runner, "_samples", lambda runs, *_: [[1.0] * 11 for _ in runs])
    monkeypatch.setattr(runner, "_other_clocks", lambda *_: {"alone": {}})
    task = suites.Task("s", Case(m=8, n=8, k=8, dtype=torch.float32))
    (measured,) = runner.run([task], CPU, runner.Options(tune=False, clocks=clocks))
    assert "failed" not in measured, measured
    assert ("alone" in measured) is (clocks and on_gpu)


def test_each_column_is_called_once_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def column(name: str) -> Any:
        return lambda given: lambda copy: calls.append(f"{name} {copy}")

    monkeypatch.setattr(providers, "eager", column("eager"))
    monkeypatch.setattr(providers, "tmm", column("tmm"))
    call = Case(m=8, n=8, k=8, dtype=torch.float32).call(CPU)
    made: dict[str, Any] = {}
    blas = series.Series("blas", "blas")
    options = runner.Options(series=(blas,))
    runs = runner._runs([call], options, made, [series.Series("no", "nowhere")])
    assert list(runs) == ["torch", "tmm", "torch again", "kernel blas"]
    assert calls == ["eager 0", "tmm 0", "eager 0"]
    assert list(made["kernel_configs"]) == ["blas"]
    assert "nowhere" in made["not_timed"]["known no"]
    made.clear()
    runner._runs([call], runner.Options(), made)
    assert made == {}


def test_scaled_groups_go_through_torchs_own_product(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Case(m=32, n=16, k=16, dtype=E4M3, groups=2, scales="row").call(CPU)
    given: list[Any] = []

    def product(a: Any, b: Any, *scales: Any, offs: Any) -> torch.Tensor:
        given.extend([a, b, *scales, offs])
        return torch.ones(32, 16)

    monkeypatch.setattr(grouped_baselines, "_scales_each", lambda call: True)
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", product, raising=False)
    rows = types.SimpleNamespace(RowWise="by row")
    monkeypatch.setattr(torch.nn.functional, "ScalingType", rows, raising=False)
    y = grouped_baselines.eager([call])(0)
    assert torch.equal(torch.as_tensor(y), torch.ones(32, 16))
    a, b, a_scale, by_a, b_scale, by_b, offs = given
    assert call.rows is not None
    assert (a is call.a, b is call.b, offs is call.rows.offs) == (True, True, True)
    assert by_a == by_b == "by row"
    assert torch.equal(a_scale, call.parts["a_scale"].expand(32))
    assert b_scale.shape == (2, 16)
    monkeypatch.delattr(torch.nn.functional, "scaled_grouped_mm")
    with pytest.raises(ValueError, match="no grouped product of these 8-bit floats"):
        grouped_baselines.eager([call])


def test_an_installed_package_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance.Path, "exists", lambda path: False)
    monkeypatch.setattr(provenance, "_output", None)
    assert provenance._commit() == (None, None)


@pytest.mark.parametrize("budget", [None, 7.0])
def test_a_budget_is_given_or_set_and_ends_with_the_run(
    monkeypatch: pytest.MonkeyPatch, budget: float | None
) -> None:
    monkeypatch.setattr(runner.time, "monotonic", lambda: 100.0)
    usual = budget or settings.current().tune_budget
    for left, found in ((usual, usual), (usual + 1, usual), (usual - 1, usual - 1), (0.5, 1.0)):
        options = runner.Options(budget=budget, deadline=100.0 + left)
        assert runner._budget(options) == found


def test_a_run_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_measure", lambda *_: None)
    monkeypatch.setattr(runner.time, "monotonic", lambda: 9.0)
    task = suites.Task("s", Case(m=8, n=8, k=8))
    for deadline, count in ((9.0, 0), (9.1, 1)):
        options = runner.Options(tune=False, deadline=deadline)
        assert len([*runner.run([task], CPU, options)]) == count


def test_a_report_has_the_sections_that_there_are_results_for() -> None:
    steady = {"torch": 100.0, "tmm": 80.0}
    search = {"step": "found", "regret": 1.0, "blas_over_best": 1.1}
    plain = document(16, 1.0, "one")
    more = document(32, 1.0, "two", steady=steady, search=search)
    swept = document(64, 1.0, suites.SWEEP)
    regret = random_problem(8, us=50.0, best_us=50.0)
    failed = {key: plain[key] for key in ("kind", "suite")} | {
        "case": Case(m=1, n=1, k=1).to_json(), "failed": "why",
    }  # fmt: skip
    clocks = "clocks, geometric mean / worst"
    searches = "first use without records, against an exhaustive search"

    def titles(*documents: Any) -> list[str]:
        return [each.title for each in report.sections(Results.of(documents))]

    assert titles(plain) == ["", "one"]
    assert titles(plain, more) == ["", clocks, searches, "one", "two"]
    assert titles(plain, regret) == ["", "one", "random M, weight and epilogue"]
    found = {each.title: each for each in report.sections(Results.of([plain, swept, failed]))}
    assert (found["one"].detail, found[suites.SWEEP].detail) == (True, False)
    assert (len(found["one"].rows), len(found["one"].lines)) == (1, 1)
    (alone,) = [each for each in report.sections(Results.of([failed])) if each.title == "one"]
    assert (list(alone.columns), list(alone.rows)) == ([], [])
