"""Limits of measurements and choices: widths of buckets, ladders of M, distances of neighbours,
sizes of chains, and the range of timed sizes."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import (
    DEVICE,
    FakeBlas,
    FakeConfig,
    FakeKernel,
    dispatcher,
    problem,
    searched,
    settings,
    unmeasured,
)
from msgspec.structs import replace as revised
from test_invariant import Summing, chosen, weight_problem
from test_invariant import timed as timed_by_m
from test_tuner import result
from tmm_cache import CacheStore, TuningRecord, digest
from tmm_cache.problem_fields import ABSENT

from tmm_core import (
    Groups,
    PluginError,
    Supports,
    TmmWarning,
    Traits,
    UnsupportedProblemError,
    errors,
)
from tmm_core.dispatch import deferring, heuristic, invariant, lookup
from tmm_core.dispatch import dispatcher as answers
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.dispatch.dry_run import dry_run
from tmm_core.dispatch.explanation import _measurements, alike, explain_problem, kernel_infos
from tmm_core.dispatch.first_use import size_class
from tmm_core.dispatch.invariant import (
    LADDER,
    Rung,
    _at,
    _position,
    _us_of_last_round,
    ladder,
    weight,
)
from tmm_core.dispatch.lookup import Lookup
from tmm_core.dispatch.measuring import OTHER_KERNELS
from tmm_core.dispatch.neighbour import Neighbours, _rank
from tmm_core.dispatch.saving import saving_us
from tmm_core.launch.plan import Choice
from tmm_core.registry.registry import Registry
from tmm_core.spec import toolchain
from tmm_core.spec.bucket import bucketed, inside, probes
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.operand import Operand, Scale
from tmm_core.spec.problem import Problem
from tmm_core.tuning import cold_operands, timing
from tmm_core.tuning.ranking import (
    compared_at,
    decide,
    fastest_blas,
    finalists,
    ranked_around,
    times_around,
)
from tmm_core.tuning.search import MOST_HINTS, Hints, Search
from tmm_core.tuning.untried import Obstacle
from tmm_core.verify import verifier
from tmm_core.verify.verifier import Verdict

FP32 = torch.float32
COLUMN = Operand(FP32, "col")
GPU = replace(DEVICE, type="cuda", l2=50 * 2**20)


# -- buckets ------------------------------------------------------------------------------


def test_a_bucket_of_two_large_tiles_is_measured_at_two_m_and_a_wider_one_at_four() -> None:
    assert probes(2048) == (1793, 1921)  # 256 rows wide
    assert len(probes(2560)) == 4  # 512


def test_a_record_off_the_edge_is_measured_only_at_its_own_m() -> None:
    assert inside(problem(m=64)) == (33, 49)
    assert inside(problem(m=63)) == inside(problem(m=65)) == ()


# -- the ladder of a weight ---------------------------------------------------------------


def test_every_matrix_of_a_rung_fits_the_limit() -> None:
    def rungs(**fields: Any) -> list[int]:
        return [rung.m for rung in ladder(weight_problem(1, **fields))]

    assert rungs(k=2**20) == rungs(n=2**20) == [16, 64, 256]
    assert rungs(n=2**18, batch=4) == [16, 64, 256]
    assert rungs(n=2**18) == list(LADDER)  # the largest is 2**28, the limit itself
    assert rungs(n=2**18 + 8) == list(LADDER)[:-1]
    assert rungs(n=2**29) == [16]


def test_problems_of_a_ladder_have_dense_matrices() -> None:
    """A single row of any length is aligned to 16 bytes; several rows of 20 bytes are not."""
    bf16 = torch.bfloat16
    of = weight_problem(
        9, k=5, n=5, residual=Operand(bf16, "strided", False, wide=True), capturing=True
    )
    one, more = _at(of, 1), ladder(of)
    assert one.a.aligned
    assert one.out.aligned
    assert one.residual == Operand(bf16)
    assert not any(rung.a.aligned or rung.out.aligned or rung.capturing for rung in more)
    assert {rung.residual for rung in more} == {Operand(bf16, aligned=False)}
    # In a gradient a is column-major, so its contiguous dimension is M.
    gradient = ladder(weight_problem(9, k=5, a=COLUMN))
    assert [rung.a.aligned for rung in gradient] == [m % 4 == 0 for m in LADDER]
    assert {rung.a.layout for rung in gradient} == {"col"}


@pytest.mark.parametrize(
    "a",
    [
        Operand(torch.float8_e4m3fn, scale=Scale.parse("1x32")),
        Operand(torch.uint8, format="int4", scale=Scale.parse("row"), zero=True),
    ],
)
def test_problems_of_a_ladder_have_the_stored_operand(a: Operand) -> None:
    for size, aligned in ((16, True), (24, False)):  # bytes of a row
        of = weight_problem(9, k=size * a.pack, a=replace(a, aligned=not aligned, wide=True))
        assert {rung.a for rung in ladder(of)} == {replace(a, aligned=aligned)}


def test_scales_are_of_a_weight_and_their_kind_is_not() -> None:
    eight = Operand(torch.float8_e4m3fn)
    row, tensor = (replace(eight, scale=Scale.parse(kind)) for kind in ("row", "tensor"))  # type: ignore[arg-type]
    scaled = weight_problem(16, a=row, b=tensor)
    assert weight(scaled) == weight(replace(scaled, m=1, a=tensor))
    assert weight(scaled) == weight(replace(scaled, b=row))
    assert weight(scaled) != weight(replace(scaled, a=eight, b=eight))


def test_the_format_of_its_rows_is_of_a_weight() -> None:
    plain = weight_problem(16, a=Operand(torch.uint8))
    four, nvidia = (replace(plain, a=Operand(torch.uint8, format=f)) for f in ("int4", "nvfp4"))
    assert len({str(weight(each)) for each in (plain, four, nvidia)}) == 3
    assert weight(four) == weight(replace(four, m=1))


def test_arithmetics_are_noted_for_one_gpu_and_environment(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), root=tmp_path)
    own, notes = weight_problem(16), d._invariance._notes_of
    changes = {"torch": "another", "name": "another", "sm_count": 7, "capability": (9, 9)}
    others = [replace(own.device, **{name: value}) for name, value in changes.items()]  # type: ignore[arg-type]
    notes(own).add("key", "one")
    assert notes(own).get("key") == "one"
    assert [notes(replace(own, device=other)).get("key") for other in others] == [None] * 4


def test_an_m_that_was_measured_is_not_taken_for_one_between() -> None:
    edge = weight_problem(64)
    places = [_position(edge, m) for m in (32, 33, 34, 49, 50, 64)]
    assert len(set(places)) == len(places)
    assert _position(edge, 40) == _position(edge, 41) != _position(edge, 49)


@pytest.mark.slow
def test_tuning_an_m_measures_its_bucket_once(tmp_path: Path) -> None:
    """The bucket's record answers a call at any M of the bucket; that M gets no record."""
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: "one"}), root=tmp_path)
    timer = timed_by_m(d, {("blas", 1): 9.0, ("k", 1): 5.0})
    assert chosen(d, 100)[0] == "k"
    assert timer.tuned == [*LADDER, 112]


def test_each_weight_has_an_arithmetic_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariant, "LADDER", (16,))
    kernel = Summing("k", {1: "one", 2: "two"})
    d, _ = dispatcher(FakeBlas(), kernel, root=tmp_path)
    timed_by_m(d, {("blas", 1): 10.0, ("k", 1): 5.0, ("k", 2): 6.0})
    assert chosen(d, 16) == ("k", 1, "one")
    timed_by_m(d, {("blas", 1): 10.0, ("k", 1): 6.0, ("k", 2): 5.0})
    mine = settings()
    for n, name in ((48, "two"), (32, "one"), (48, "two")):
        assert d.choose(weight_problem(16, n=n), mine).arithmetic == name


def test_an_arithmetic_that_was_used_stays_when_another_is_measured_to_be_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured graph keeps its reduction order. Another process gets the faster one."""
    monkeypatch.setattr(invariant, "LADDER", (16,))
    times = {("blas", 1): 10.0, ("k", 1): 6.0, ("k", 2): 5.0}
    kernels = FakeBlas(), Summing("k", {1: "one", 2: "two"}, estimate=1.0)
    d, _ = dispatcher(*kernels, root=tmp_path)
    timed_by_m(d, times)
    mine = settings()
    for capturing, origin in ((True, "heuristic"), (False, "cache")):
        choice = d.choose(replace(weight_problem(16), capturing=capturing), mine)
        assert (choice.origin, choice.arithmetic) == (origin, "one")
    d, _ = dispatcher(*kernels, root=tmp_path)
    timed_by_m(d, times)
    assert chosen(d, 16) == ("k", 2, "two")


def test_an_arithmetic_is_expected_to_take_as_long_as_its_best_config(tmp_path: Path) -> None:
    class Estimating(Summing):
        def estimate_us(self, problem: Problem, config: FakeConfig) -> float:
            return {1: 9.0, 2: 1.0, 3: 5.0}[config.tile]

    d, _ = dispatcher(FakeBlas(), Estimating("k", {1: "one", 2: "one", 3: "two"}), root=tmp_path)
    choice = d.choose(weight_problem(16), settings(on_cache_miss="heuristic"))
    assert (choice.arithmetic, choice.candidate.config.to_json()) == ("one", {"tile": 2})
    why = "on_cache_miss='heuristic'; estimated 1 µs, the least of its arithmetic"
    assert choice.reason == why


def test_early_rounds_are_scaled_to_the_last() -> None:
    """Before the clock settles, calls are faster: 600 µs in early rounds are 660 µs in the last."""
    fastest = revised(result("k", 1.0), samples_us=(5.0, 5.0, 6.0, 6.0, 6.0))
    early = revised(result("k", 1.0), samples_us=(10.0, 12.0))
    assert _us_of_last_round(early, fastest) == pytest.approx(11.0 * 6 / 5)
    assert _us_of_last_round(fastest, fastest) == 6.0


def test_explaining_compiles_nothing_ahead_and_knows_earlier_choices(tmp_path: Path) -> None:
    kernel = Summing("k", {1: "one", 2: "two"}, estimate=1.0)
    d, _ = dispatcher(FakeBlas(estimate=9.0), kernel, root=tmp_path)
    tuner = d.tuner = Preparing()  # type: ignore[assignment]
    mine, guessing = settings(), settings(on_cache_miss="heuristic")
    _, miss = dry_run(d, weight_problem(16), mine)
    assert miss is not None
    assert miss.action == "tune"
    assert tuner.prepared == {}
    d._invariance._arithmetics[digest(weight(weight_problem(16))), guessing] = "two"
    choice, miss = dry_run(d, weight_problem(16), guessing)
    assert (choice.arithmetic, miss) == ("two", None)


def test_a_rung_at_which_no_kernel_knows_an_arithmetic_is_expected_to_be_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, _ = dispatcher(FakeBlas(), root=tmp_path)
    monkeypatch.setattr(d._invariance, "_offered", lambda rung, able: {})
    expected = d._invariance._expected(weight_problem(16), [])
    assert (expected.best_us, expected.times) == (invariant._NO_ESTIMATE, {})
    of = weight_problem(16), "weight", settings(on_cache_miss="heuristic")
    assert d._invariance._resolved(*of) is None


def test_the_arithmetic_that_is_resolved_first_is_that_of_all_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, _ = dispatcher(FakeBlas(), root=tmp_path)
    current, names = settings(), iter(["late", "first", "other"])

    def resolved(*given: Any) -> str:
        name = next(names)
        if name == "late":  # meanwhile another thread resolves the same
            assert d._invariance._arithmetic(*given[::2]) == "first"
        return name

    monkeypatch.setattr(d._invariance, "_resolved", resolved)
    each = [weight_problem(16)] * 2
    assert [d._invariance._arithmetic(p, current) for p in each] == ["first", "first"]
    required = settings(deterministic=True)
    assert [d._invariance._arithmetic(p, required) for p in each] == ["other", "other"]


@pytest.mark.parametrize(
    ("mode", "action", "end"),
    [
        ("tune", "tune", "blas, fast, for up to 7 s"), ("error", "error", ""),
        ("background", "tune", "blas, fast, for up to 7 s, by later calls"),
        ("heuristic", None, ""),
    ],
)  # fmt: skip
def test_a_dry_run_tells_what_a_call_would_do(
    mode: Any, action: str | None, end: str, tmp_path: Path
) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    choice, miss = dry_run(d, problem(), settings(on_cache_miss=mode, tune_budget=7.0))
    assert choice.candidate.kernel.name == "blas"
    assert (miss and miss.action) == action
    assert (miss.reason if miss else "").endswith(end)


@pytest.mark.parametrize(
    ("extent", "config", "found"),
    [
        (1024, {}, "1024"), (1025, {}, "1 of 1024"), (2047, {}, "1023 of 1024"),
        (4096, {"BLOCK_M": 128}, "0 of 1024"), (4096, {"BLOCK_M": 192}, "1024 of 3072"),
        (4096, {"BLOCK_M": 130, "x": 160}, "0 of 1024"), (5000, {"BLOCK_M": 320}, "5000 of 5120"),
        (4099, {"BLOCK_M": 512}, "3 of 4096"), (5000, {"BLOCK_M": 576}, "904 of 1024"),
        (4096, {"warp": True, "s": "192"}, "0 of 1024"),
        (9000, {"BLOCK_M": 192, "BLOCK_N": 256}, "2856 of 6144"),
    ],
)  # fmt: skip
def test_sizes_that_fill_the_last_tile_alike(extent: int, config: Any, found: str) -> None:
    assert size_class(extent, config) == found


@pytest.mark.slow
def test_measurements_by_force_replace_the_pinned_choice(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: "one", 2: "two"}), root=tmp_path)
    timed_by_m(d, {("blas", 1): 10.0, ("k", 1): 5.0, ("k", 2): 6.0})
    assert chosen(d, 16) == ("k", 1, "one")
    timed_by_m(d, {("blas", 1): 10.0, ("k", 1): 6.0, ("k", 2): 5.0})
    d.tune(weight_problem(16), settings())
    assert chosen(d, 16) == ("k", 1, "one")
    d.tune(weight_problem(16), settings(), force=True)
    assert chosen(d, 16) == ("k", 2, "two")


def test_the_choice_of_a_capture_is_measured_after_it(tmp_path: Path) -> None:
    """The reduction order stays, since the graph keeps its bits; the config may change."""
    kernel = Summing("k", {1: "one", 2: "one"}, estimate=1.0)
    d, _ = dispatcher(FakeBlas(), kernel, root=tmp_path)
    timed_by_m(d, {("blas", 1): 10.0, ("k", 1): 6.0, ("k", 2): 5.0})
    given = settings()
    captured = d.choose(replace(weight_problem(16), capturing=True), given)
    assert (captured.origin, captured.arithmetic) == ("heuristic", "one")
    after = d.choose(weight_problem(16), given)
    assert (after.origin, after.candidate.config.to_json()) == ("cache", {"tile": 2})


# -- neighbours ---------------------------------------------------------------------------


def recorded(problem: Problem, *results: Any) -> TuningRecord:
    return TuningRecord(problem.to_json(), 0, results, "2026-01-31T12:00:00Z", 1.0)


def near(store: CacheStore, problem: Problem, *tuned: Problem) -> list[int]:
    for each in tuned:
        record = TuningRecord(
            each.to_json(), 0, (result("fast", 9.0),), "2026-01-31T12:00:00Z", 1.0
        )
        store.save(each.device.gpu, each.device.environment, record)
    return [found.record.problem["m"] for found in Neighbours(store).nearest(problem)]


def test_four_times_the_size_is_near_and_more_is_not(tmp_path: Path) -> None:
    store = CacheStore(tmp_path, [])
    tuned = [problem(m=m) for m in (15, 16, 256, 257)]
    assert sorted(near(store, problem(m=64), *tuned)) == [16, 256]


@pytest.mark.parametrize("size", ["m", "n", "k", "batch"])
def test_each_size_counts_in_the_distance(size: str, tmp_path: Path) -> None:
    store, instance = CacheStore(tmp_path, []), problem(batch=64)
    tuned = [replace(instance, **{size: getattr(instance, size) * by}) for by in (4, 2)]
    near(store, instance, *tuned, replace(instance, **{size: getattr(instance, size) * 5}))
    found = [
        (each.record.problem[size], each.octaves) for each in Neighbours(store).nearest(instance)
    ]
    assert found == [(tuned[1].to_json()[size], 1.0), (tuned[0].to_json()[size], 2.0)]


def test_the_order_of_a_documents_fields_says_nothing(tmp_path: Path) -> None:
    store, tuned = CacheStore(tmp_path, []), problem(m=32)
    neighbours = Neighbours(store)
    assert neighbours.families() == {}
    document = dict(reversed(tuned.to_json().items()))
    record = revised(recorded(tuned, result("fast", 9.0)), problem=document)
    store.save(DEVICE.gpu, DEVICE.environment, record)
    for us in (9.0, 5.0):  # the second replaces the first
        neighbours.add(DEVICE, revised(record, candidates=(result("fast", us),)))
    assert [each.record.problem["m"] for each in neighbours.nearest(problem())] == [32]


@pytest.mark.parametrize(
    ("estimate", "origin"), [(None, "neighbour"), (6.0, "neighbour"), (6.01, "heuristic")]
)
def test_a_near_winner_may_be_expected_to_take_a_fifth_longer(
    estimate: float | None, origin: str, tmp_path: Path
) -> None:
    """A neighbour's winner counts in any version, if the problem has its config."""

    class Estimating(FakeKernel):
        def estimate_us(self, problem: Problem, config: FakeConfig) -> float | None:
            return estimate if config.tile == 2 else 5.0

    fast = Estimating("fast", tiles=(1, 2), version="2")
    d, _ = dispatcher(FakeBlas(estimate=10.0), fast, root=tmp_path)
    mine = settings(on_cache_miss="heuristic")
    assert d.choose(problem(), mine).origin == "heuristic"
    other = [result("fast", 1.0, config={"tile": 3}), result("gone", 2.0)]
    known = problem(m=128)
    d.adopt(known, recorded(known, *other, result("fast", 3.0, config={"tile": 2})))
    choice = d.choose(problem(), mine)
    assert choice.origin == origin
    assert choice.candidate.config.to_json() == {"tile": 2 if origin == "neighbour" else 1}
    assert choice.candidate.kernel.version == "2"


def test_a_near_winner_answers_where_nothing_else_has_an_estimate(tmp_path: Path) -> None:
    class Estimating(FakeKernel):
        def estimate_us(self, problem: Problem, config: FakeConfig) -> float | None:
            return 9.0 if config.tile == 2 else None

    d, _ = dispatcher(FakeBlas(), Estimating("fast", tiles=(1, 2)), root=tmp_path)
    known = problem(m=128)
    d.adopt(known, recorded(known, result("fast", 3.0, config={"tile": 2})))
    choice = d.choose(problem(), settings(on_cache_miss="heuristic"))
    assert choice.origin == "neighbour"
    assert choice.candidate.config.to_json() == {"tile": 2}


def test_a_problem_of_no_size_has_neighbours(tmp_path: Path) -> None:
    """An empty problem counts as size 1, since the logarithm of zero is not defined."""
    store = CacheStore(tmp_path, [])
    assert near(store, problem(m=0), problem(m=2)) == [2]


@pytest.mark.parametrize(("estimate", "name"), [(9.0, "blas"), (8.9, "fast")])
def test_an_untuned_choice_has_to_be_a_tenth_faster_than_blas(
    estimate: float, name: str, tmp_path: Path
) -> None:
    blas, fast = FakeBlas(estimate=10.0), FakeKernel("fast", estimate=estimate)
    d, _ = dispatcher(blas, fast, root=tmp_path)
    choice = d.choose(problem(), settings(on_cache_miss="heuristic"))
    assert choice.candidate.kernel.name == name


def test_where_blas_cannot_serve_the_least_estimate_answers(tmp_path: Path) -> None:
    """Where BLAS can serve the problem but has no estimate, BLAS answers."""
    guess = settings(on_cache_miss="heuristic")
    kernels = FakeKernel("slow", estimate=9.0), FakeKernel("fast", estimate=5.0)
    for against, origin, name in ((["not here"], "heuristic", "fast"), ([], "fallback", "blas")):
        blas = FakeBlas(against=lambda problem, against=against: against)
        d, _ = dispatcher(blas, *kernels, root=tmp_path)
        choice = d.choose(problem(), guess)
        assert (choice.origin, choice.candidate.kernel.name) == (origin, name)


# -- chains of calls ----------------------------------------------------------------------


def test_operands_that_a_model_reads_from_memory_rotate() -> None:
    weight_alone, both = ("b",), ("a", "b")
    layer = problem(m=64, n=4096, k=4096, device=GPU)
    assert cold_operands.rotating(layer) == weight_alone
    assert cold_operands.rotating(replace(layer, batch=2)) == both
    assert (
        cold_operands.rotating(replace(layer, a=COLUMN)) == both
    )  # the a of a gradient is no activation
    # Half of the L2 is the largest activation that a layer finds there.
    half = GPU.l2 // 2 // (4 * 4096)
    assert cold_operands.rotating(replace(layer, m=half)) == weight_alone
    assert cold_operands.rotating(replace(layer, m=half + 1)) == both
    assert (
        cold_operands.rotating(replace(layer, m=half + 1, device=replace(GPU, l2=0)))
        == weight_alone
    )
    assert cold_operands.rotating(replace(layer, groups=Groups(4, "m"))) == weight_alone
    for along in ("n", "k"):
        assert cold_operands.rotating(replace(layer, groups=Groups(4, along))) == both


def test_a_chain_has_two_calls_unless_memory_has_room_for_one_alone() -> None:
    """Even a call whose operands exceed every cache is timed after another call."""
    large = problem(m=64, n=16384, k=16384, device=GPU)  # a weight of 1 GiB
    assert cold_operands.copies(large) == 2
    assert cold_operands.copies(large, limit=2**30) == 1
    small = problem(m=16, n=64, k=64, device=GPU)
    assert cold_operands.copies(small) == cold_operands.MOST_COPIES


def test_samples_of_group_sizes_alternate_unless_results_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grouped = problem(m=8, n=4, k=4, device=GPU, groups=Groups(2, "m"))
    inputs = cold_operands.random_inputs.make(replace(grouped, device=DEVICE), torch.device("cpu"))
    every = cold_operands.SIZE_SAMPLES * grouped.sizes["out"]

    def calls(count: int, limit: float) -> int:
        monkeypatch.setattr(cold_operands, "copies", lambda problem, limit: count)
        return len(cold_operands.rotated(inputs, grouped, limit))

    assert calls(1, 2 * every) == cold_operands.SIZE_SAMPLES
    assert calls(1, 2 * every - 1) == 1
    assert calls(20, 2 * every) == max(20, cold_operands.SIZE_SAMPLES)


@pytest.mark.parametrize("shape", [(3, 5), (1, 7), (0, 4)])
def test_a_copy_has_every_element(shape: tuple[int, int]) -> None:
    t = torch.randn(3, 16)[: shape[0], 1 : 1 + shape[1]]
    copy = cold_operands.duplicate(t)
    assert torch.equal(copy, t)
    assert copy.stride() == t.stride()
    if t.numel():
        assert copy.data_ptr() != t.data_ptr()


# -- clocks -------------------------------------------------------------------------------


def test_the_time_is_of_one_call_of_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(now)))
    seen: list[int] = []
    samples = timing.HostTimer().measure([seen.append, seen.append], 3, copies=4)
    assert samples == [[250000.0] * 3] * 2  # a second for four calls
    assert seen == [0, 1, 2, 3] * 6


def test_no_run_always_follows_the_same() -> None:
    turns = list(timing._interleaved(3, 40))
    rounds = [tuple(turns[i : i + 3]) for i in range(0, 120, 3)]
    assert all(sorted(each) == [0, 1, 2] for each in rounds)
    assert len(set(rounds)) == 6


def test_samples_are_disturbed_from_two_on_where_the_quartiles_are_far_apart() -> None:
    assert not timing.is_disturbed([])
    assert not timing.is_disturbed([10.0])
    assert timing.is_disturbed([10.0, 30.0])
    assert not timing.is_disturbed([10.0, 11.0])
    assert not timing.is_disturbed([10.0, 10.0, 14.0, 14.0, 14.0])
    assert timing.is_disturbed([10.0, 10.0, 14.0, 14.1, 14.1])


def test_changes_common_to_a_round_are_removed_and_the_usual_pace_stays() -> None:
    """Two of five rounds have a slow clock, so the medians are the other three rounds'."""
    pace = [1.0, 1.0, 1.5, 1.0, 1.5]
    first, second = timing.normalised([[10 * p for p in pace], [20 * p for p in pace]])
    assert first == pytest.approx([10.0] * 5)
    assert second == pytest.approx([20.0] * 5)


# -- who won ------------------------------------------------------------------------------


def test_one_sample_less_is_not_the_whole_race() -> None:
    whole = revised(result("whole", 10.0), samples_us=(10.0,) * 5)
    nearly = revised(result("nearly", 9.0), samples_us=(9.0,) * 4)
    assert finalists([whole, nearly]) == [whole]
    assert decide([nearly, whole, revised(whole, kernel="blas")]) == 2


def test_of_two_ways_of_blas_the_faster_in_steady_state_is_the_bar() -> None:
    def steady(kernel: str, us: float, steady_us: float, **fields: Any) -> Any:
        return result(kernel, us, steady_us=steady_us, **fields)

    ways = [
        steady("blas", 100.0, 100.0, config={"fused": False}),
        steady("blas", 101.0, 120.0, config={"fused": True}),
    ]
    assert decide([*ways, steady("k", 90.0, 110.0)]) == 0
    assert decide([*ways, steady("k", 90.0, 101.0)]) == 2


def test_steady_state_decides_among_candidates_that_are_close_in_bursts() -> None:
    blas = result("blas", 100.0, steady_us=100.0)
    far = result("far", 55.0, steady_us=40.0)
    best = result("best", 50.0, steady_us=50.0)
    near = result("near", 50.9, steady_us=49.0)
    assert decide([blas, far, best]) == 2
    assert decide([blas, far, best, near]) == 3


def test_inside_a_bucket_blas_is_beaten_by_the_margin_or_answers() -> None:
    blas, barely, clearly = ("blas", ()), ("barely", ()), ("clearly", ())
    around: Any = {33: {blas: 100.0, barely: 99.5, clearly: 98.5}}
    assert ranked_around(around) == [clearly]


def test_an_m_that_was_measured_is_both_sides_of_itself() -> None:
    k = result("k", 5.0, inside_us={33: 6.0, 49: 7.0})
    blas = result("blas", 10.0, inside_us={33: 10.0, 49: 10.0})
    assert set(times_around([k, blas], 49, 64)) == {49}
    assert set(times_around([k, blas], 50, 64)) == {49, 64}
    assert set(times_around([k, blas], 32, 64)) == {33}


@pytest.mark.parametrize("along", ["m", "n", "k"])
def test_a_record_is_of_sizes_of_the_ragged_dimension(along: Any) -> None:
    """Along N or K, measurements at other values of M compare nothing."""
    edge = replace(problem(m=49, n=49, k=49), groups=Groups(2, along)).at(64)
    k = result("k", 5.0, inside_us={33: 6.0})
    blas = result("blas", 10.0, inside_us={33: 10.0, 49: 10.0})
    record = recorded(edge, k, blas)
    assert (record.along, record.extent) == (along, 64)
    assert record.measured_at == (33, 49, 64)
    assert compared_at(record) == [33, 64]
    columns, _ = _measurements(record)
    assert columns[1:4:2] == (f"µs at {along.upper()}=64", f"µs at {along.upper()}=33")


def test_the_last_column_says_what_became_of_a_candidate() -> None:
    """In the order of their states, each without a reason of its own unless it has one."""
    lost = [
        revised(result(name, 7.0), status=status, reason=reason)
        for name, status, reason in (
            ("f", "failed", ""), ("why", "failed", "no disk"), ("w", "wrong", ""), ("s", "slow", "")
        )
    ]  # fmt: skip
    late = revised(result("late", 4.0), steady_us=30.0)
    blas = revised(result("blas", 10.0), steady_us=10.0)
    best = revised(result("k", 5.0), steady_us=6.0)
    _, rows = _measurements(recorded(problem(m=64), best, blas, late, *lost))
    assert [(row[0], row[-1]) for row in rows] == [
        ("late", "slower than blas in steady state"), ("k", "← winner"), ("blas", ""),
        ("s", "eliminated early"), ("w", "wrong"), ("f", "failed"), ("why", "no disk"),
    ]  # fmt: skip


def test_before_the_first_m_that_was_measured_blas_answers(tmp_path: Path) -> None:
    """The measurements of a bucket may begin at a larger M than the bucket."""
    times = {("fast", 1): 5.0, "blas": 10.0}
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=times, root=tmp_path)
    record = d.tune(problem(m=64), settings())
    late = [revised(each, inside_us={49: each.samples_us[0]}) for each in record.candidates]
    d.store.save(DEVICE.gpu, DEVICE.environment, revised(record, candidates=tuple(late)))
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=times, root=tmp_path)
    names = {m: d.choose(problem(m=m), settings()).candidate.kernel.name for m in (40, 49, 60)}
    assert names == {40: "blas", 49: "fast", 60: "fast"}


def test_blas_answers_in_its_fastest_way_whatever_its_name() -> None:
    first, last = ("blas", (("fused", False),)), ("blas", (("fused", True),))
    assert fastest_blas({33: {first: 10.0, last: 8.0}, 64: {first: 10.0, last: 9.0}}) == last
    assert fastest_blas({33: {first: 10.0, last: 11.0}}) == first
    assert fastest_blas({}) is None


# -- what is tried ------------------------------------------------------------------------


def proposed(
    *kernels: FakeKernel, hints: Sequence[tuple[str, dict[str, Any]]] = (), **fields: Any
) -> Search:
    given = Hints(hints, close=True) if hints else Hints()
    return searched(problem(**fields), kernels, kernels, None, given)


def test_a_config_that_may_just_be_worth_it_is_tried() -> None:
    at_the_limit = FakeKernel("k", estimate=16.0)
    assert len(proposed(FakeBlas(estimate=10.0), at_the_limit).first()) == 2
    beyond = proposed(FakeBlas(estimate=10.0), FakeKernel("k", estimate=16.01))
    assert len(beyond.first()) == 1
    assert "hopeless" in str(list(beyond.empty.values()))


def test_so_many_hints_are_tried_first_and_none_is_of_blas() -> None:
    kernel = FakeKernel("k", tiles=range(1, 30), estimate=5.0)
    hints = [("blas", {"tile": 7}), *(("k", {"tile": tile}) for tile in range(29, 15, -1))]
    blas = FakeBlas(estimate=10.0, tiles=(1, 7))
    first = proposed(blas, kernel, hints=hints).first()
    mine = [each.config.tile for each in first if each.kernel is kernel]
    assert mine[:MOST_HINTS] == list(range(29, 29 - MOST_HINTS, -1))
    assert 29 - MOST_HINTS not in mine[: MOST_HINTS + 1]


@pytest.mark.parametrize(
    ("close", "invariant", "others"), [(True, False, 0), (False, False, 1), (True, True, 1)]
)
def test_close_hints_take_the_place_of_a_candidate_of_each_kernel(
    close: bool, invariant: bool, others: int
) -> None:
    kernels = [
        FakeBlas(estimate=10.0), Summing("k", {1: "one", 2: "one"}), Summing("other", {1: "two"}),
    ]  # fmt: skip
    for kernel in kernels[1:]:
        kernel.estimate_us = lambda problem, config: 5.0  # type: ignore[method-assign]
    hints = Hints([("k", {"tile": 2})], close=close)
    search = searched(problem(batch_invariant=invariant), kernels, kernels, None, hints)
    search._first = 2
    names = [each.kernel.name for each in search.first()]
    assert names[:2] == ["blas", "k"]
    assert names.count("other") == others


def test_the_best_ratio_of_a_kernel_scales_its_estimates() -> None:
    """If a config took half of its estimate, other configs of its kernel may, too."""

    class Sloped(FakeKernel):
        def estimate_us(self, problem: Problem, config: FakeConfig) -> float:
            return 10.0 + config.tile / 100

    kernel = Sloped("k", tiles=(1, 2, 3, 4))
    search = proposed(FakeBlas(estimate=20.0), kernel)
    search._first = 3
    tried = [each for each in search.first() if each.kernel is kernel]
    assert [each.config.tile for each in tried] == [1, 2]
    # The first took half of its estimate and the second all of it. With the first ratio, the
    # other configs may be the fastest.
    more = search.next_batch({tried[0]: 5.0, tried[1]: 10.0})
    assert [each.config.tile for each in more] == [3, 4]


def test_nothing_is_tried_after_all_candidates_were() -> None:
    search = proposed(FakeBlas(), FakeKernel("k", tiles=range(1, 60)))
    times = {Candidate(FakeKernel("x"), FakeConfig(tile=i)): 1.0 for i in range(1, 60)}
    assert search.next_batch(times) == []


@pytest.mark.parametrize(("waiting", "more"), [(0, 3), (2, 1), (3, 0), (4, 0)])
def test_candidates_that_compile_count_among_those_that_are_tried(waiting: int, more: int) -> None:
    """A tuning never tries more candidates than its limit, however slowly they compile."""
    search = proposed(FakeBlas(), FakeKernel("k", tiles=range(1, 60)))
    compiling = search.first()[:waiting]
    tried = [Candidate(FakeKernel("x"), FakeConfig(tile=i)) for i in range(1, search._most - 2)]
    assert len(search.next_batch(dict.fromkeys(tried, 1.0), compiling)) == more


class Rising(FakeKernel):
    """Expects to take 10 µs for each tile."""

    def estimate_us(self, problem: Problem, config: FakeConfig) -> float:
        return 10.0 * config.tile


class Near(FakeKernel):
    """Its estimates differ by 1 µs."""

    def estimate_us(self, problem: Problem, config: FakeConfig) -> float:
        return 10.0 + config.tile


@pytest.mark.parametrize("timed", [False, True])
def test_a_batch_waits_for_the_first_time_of_a_kernel(timed: bool) -> None:
    """Candidates of another kernel might take the places of the fastest."""
    late, other = Near("late", tiles=(1, 2)), Near("other", tiles=(1, 2, 3))
    search = proposed(FakeBlas(estimate=60.0), late, other)
    search._first = 3
    of = {each.kernel: each for each in search.first()}
    times = {of[other]: 40.0, **({of[late]: 40.0} if timed else {})}
    more = search.next_batch(times, [] if timed else [of[late]])
    assert {each.kernel.name for each in more} == ({"late", "other"} if timed else set())


@pytest.mark.parametrize(("close", "tiles"), [(False, [2]), (True, [])])
def test_estimates_beside_close_hints_are_taken_as_they_are(close: bool, tiles: list[int]) -> None:
    """Other searches allow for estimates that are 15 % too large."""

    kernel = Near("k", tiles=(1, 2))
    search = proposed(FakeBlas(estimate=20.0), kernel, hints=[("k", {"tile": 1})] * close)
    search._first = 2
    (one,) = [each for each in search.first() if each.kernel is kernel]
    assert [each.config.tile for each in search.next_batch({one: 11.0})] == tiles


def test_a_kernel_without_estimates_is_tried_beside_close_hints() -> None:
    kernels = FakeKernel("k", tiles=(1, 2), estimate=5.0), FakeKernel("unknown")
    search = proposed(FakeBlas(estimate=10.0), *kernels, hints=[("k", {"tile": 2})])
    search._first = 2
    names = [each.kernel.name for each in search.first()]
    assert sorted(names) == ["blas", "k", "unknown"]


@pytest.mark.parametrize("invariant", [False, True])
def test_no_candidate_of_batch_invariant_mode_loses(invariant: bool) -> None:
    """Other M may prefer a slower arithmetic."""
    search = proposed(FakeBlas(estimate=30.0), Rising("k", tiles=(1, 2)), batch_invariant=invariant)
    one, two = (each for each in search._estimates if each.kernel.name == "k")
    assert search.lost([two], {one: 5.0}) == ([] if invariant else [two])


@pytest.mark.parametrize(("room", "count"), [(0, 2), (2, 2), (3, 3), (9, 5)])
def test_as_many_candidates_are_compiled_in_advance_as_may_follow(room: int, count: int) -> None:
    """Two more may be tried. There is room for BLAS and two of either kernel, or for fewer."""
    kernels = [FakeKernel(name, tiles=range(1, 20), estimate=5.0) for name in ("k", "other")]
    search = proposed(FakeBlas(estimate=10.0), *kernels)
    found = search.speculative(search._most - 2, room)
    assert len(found) == count


# -- what is known ------------------------------------------------------------------------


def test_without_the_promise_no_kernel_is_measured_for_it() -> None:
    class Relying(FakeConfig):
        assumes = ("static_weights",)

    class Kernel(FakeKernel):
        config_type = Relying

        def configs(self, problem: Problem) -> list[Any]:
            return [Relying(tile=2)]

    class Raising(Kernel):
        def configs(self, problem: Problem) -> list[Any]:
            raise PluginError("not today")

    instance = problem()
    for kernel, wanted in ((Kernel("k"), True), (Raising("k"), False)):
        record = TuningRecord(
            instance.to_json(), 0, (result("k", 5.0, config={"tile": "?"}),), "", 1.0
        )
        assert unmeasured(instance, [kernel], record) == []
        promised = replace(instance, static_weights=True)
        assert unmeasured(promised, [kernel], record) == ([kernel] if wanted else [])


def test_a_quarantine_is_the_reason_in_its_own_bucket_alone() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("k"), times={"k": 5.0, "blas": 10.0})
    choice = d.choose(problem(m=64), settings())
    with pytest.warns(TmmWarning, match="failed on"):
        d.quarantine(problem(m=64), choice, RuntimeError("boom"))
    there = d.rejections(problem(m=40), settings())
    assert there["k"] == ["quarantined: it raised RuntimeError: boom"]
    d.quarantine(problem(m=200), choice, "it is off by one")  # this kernel was warned about already
    assert d.rejections(problem(m=200), settings())["k"] == ["quarantined: it is off by one"]
    assert "k" not in d.rejections(problem(m=65), settings())


def test_a_warning_is_given_once(tmp_path: Path) -> None:
    evidence = Lookup(Registry(), CacheStore(tmp_path, []))
    with pytest.warns(TmmWarning, match="odd"):
        evidence.warn_once("odd")
    evidence.warn_once("odd")  # a second warning would be an error
    with pytest.warns(TmmWarning, match="even"):
        evidence.warn_once("even")


def test_so_many_answers_are_kept_while_their_tunings_are_unfinished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deferring, "MOST_ANSWERS", 3)
    d, _ = dispatcher(FakeBlas())
    mine, found = settings(), d.bound(problem(m=1), settings())
    for m in range(1, 9):
        d.keep(problem(m=m), mine, found)
        assert (problem(m=m), mine) in d.answers
        assert len(d.answers) == (m - 1) % 3 + 1


# -- what a call without a record does ------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "given", "reason"),
    [
        ({}, {}, None),
        ({}, {"on_cache_miss": "background"}, None),
        ({}, {"batch_invariant": True}, None),
        ({}, {"arithmetic": "one"}, None),
        ({}, {"on_cache_miss": "background", "batch_invariant": True}, "batch-invariant mode"),
        ({}, {"on_cache_miss": "background", "arithmetic": "one"}, "batch-invariant mode"),
        ({}, {"on_cache_miss": "heuristic"}, "on_cache_miss='heuristic'"),
        ({}, {"on_cache_miss": "error"}, "on_cache_miss='error'"),
        ({"capturing": True}, {}, "a CUDA graph is being captured"),
        ({"capturing": True}, {"on_cache_miss": "background"}, "a CUDA graph is being captured"),
        ({"deterministic": True}, {}, "deterministic mode"),
        ({"device": replace(DEVICE, interpreted=True)}, {}, "interpreted kernels' times"),
    ],
)
def test_why_nothing_is_measured(
    fields: dict[str, Any], given: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    found = d.forbids_tuning(problem(**fields), settings(**given))
    assert (found or "").startswith(reason or "")
    assert (found is None) is (reason is None)


@pytest.mark.parametrize("world", [1, 2])
def test_several_ranks_do_not_tune_in_the_background(
    world: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lookup, "_ranks", lambda: world)
    d, _ = dispatcher(FakeBlas(), root=tmp_path)
    background = d.forbids_tuning(problem(), settings(on_cache_miss="background"))
    assert (background is not None) is (world > 1)
    assert d.forbids_tuning(problem(), settings()) is None


@pytest.mark.parametrize(
    ("mode", "fields", "noted"),
    [
        ("tune", {}, False), ("tune", {"capturing": True}, True),
        ("tune", {"deterministic": True}, True), ("heuristic", {}, False),
        ("heuristic", {"capturing": True}, True), ("heuristic", {"deterministic": True}, False),
    ],
)  # fmt: skip
def test_problems_for_a_later_tuning_are_noted(
    mode: Any, fields: dict[str, bool], noted: bool, tmp_path: Path
) -> None:
    """In the mode ``heuristic`` only captures are noted, since their graphs may stay in use."""
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    d.choose(problem(m=50, **fields), settings(on_cache_miss=mode))
    assert [miss.problem["m"] for miss in d.store.misses()] == ([64] if noted else [])


@pytest.mark.parametrize("verified", [True, False])
def test_a_winner_that_its_tuning_did_not_verify_is_verified_when_it_is_used(
    verified: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {("fast", 1): 5.0, "blas": 10.0}
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=times, root=tmp_path)
    stamped: list[TuningRecord] = []
    steps = d.tuner.steps

    def tuned(*given: Any, findings: Any, **more: Any) -> Any:
        record = yield from steps(*given, findings=findings, **more)
        assert findings.verified
        findings.verified = verified
        return record

    monkeypatch.setattr(d.tuner, "steps", tuned)
    monkeypatch.setattr(d, "stamp_winner", lambda key, record: stamped.append(record))
    record = d.tune(problem(), settings())
    assert stamped == ([record] if verified else [])


@pytest.mark.parametrize("invariant_mode", [True, False])
def test_a_call_waits_for_another_process_where_its_bits_may_not_change(
    invariant_mode: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other calls get an interim choice, of which batch-invariant mode warns. The kernel names no
    reduction order."""
    waits: list[bool] = []
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: None}), root=tmp_path)

    def tune(key: Any, able: Any, settings: Any, *, wait: bool, spent: float) -> Any:
        waits.append(wait)
        return None

    monkeypatch.setattr(d, "_tune", tune)
    warned = pytest.warns(TmmWarning, match="BLAS, which is not batch-invariant: another process")
    with warned if invariant_mode else contextlib.nullcontext():
        choice = d._choose(problem(batch_invariant=invariant_mode), settings())
    assert waits == [invariant_mode]
    assert not choice.lasting


def test_an_arithmetic_is_of_the_records_where_nothing_may_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records choose if all rungs have one; otherwise estimates choose."""
    monkeypatch.setattr(invariant, "LADDER", (16, 64))

    class Estimating(Summing):
        def estimate_us(self, problem: Problem, config: FakeConfig) -> float:
            return float(config.tile)  # the first is expected to be faster

    kernels = FakeBlas(), Estimating("k", {1: "one", 2: "two"})
    times = {("blas", 1): 10.0, ("k", 1): 6.0, ("k", 2): 5.0}
    guess = settings(on_cache_miss="heuristic")
    for tuned, name in (((16,), "one"), ((16, 64), "two")):
        root = tmp_path / name
        d, _ = dispatcher(*kernels, root=root)
        timed_by_m(d, times)
        for m in tuned:
            rung = _at(weight_problem(16), m)
            d.on_record(rung, d.able(rung, settings()), settings(), tune=True)
        d, _ = dispatcher(*kernels, root=root)
        assert chosen(d, 16, guess)[2] == name


@pytest.mark.parametrize(
    ("mode", "capturing", "noted", "why"),
    [
        ("tune", False, False, "no config of its arithmetic was timed; "),
        ("heuristic", False, False, "on_cache_miss='heuristic'; "),
        ("tune", True, True, "a CUDA graph is being captured; "),
        ("heuristic", True, True, "a CUDA graph is being captured; "),
    ],
)
@pytest.mark.parametrize(("m", "edge"), [(15, 16), (16, 16), (17, 32)])
def test_an_m_of_a_weight_is_noted_where_it_could_not_be_measured(
    mode: Any, capturing: bool, noted: bool, why: str, m: int, edge: int, tmp_path: Path
) -> None:
    """A tuning that failed would fail again, and the mode ``heuristic`` tunes nothing. The edge of
    the bucket is noted, once for all M in it."""
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: "one", 2: "two"}), root=tmp_path)

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no clock")

    d.tuner.steps = failing  # type: ignore[method-assign]
    given = settings(arithmetic="two", on_cache_miss=mode)
    tries = mode == "tune" and not capturing
    with pytest.warns(TmmWarning, match="no clock") if tries else contextlib.nullcontext():
        choice = d.choose(replace(weight_problem(m), capturing=capturing), given)
    assert (choice.origin, choice.arithmetic) == ("heuristic", "two")
    assert choice.candidate.config == FakeConfig(tile=2)
    assert choice.reason.startswith(why)
    assert [miss.problem["m"] for miss in d.store.misses()] == [edge] * noted


@pytest.mark.parametrize("own_mode", [False, True])
def test_which_record_is_of_a_problem(own_mode: bool, tmp_path: Path) -> None:
    """Records of the problem's own mode come first; within a mode, the record of the exact M."""
    d, _ = dispatcher(FakeBlas(), root=tmp_path)
    instance = problem(m=50, batch_invariant=own_mode)
    modes = [False, True] if own_mode else [False]
    order = [replace(instance.at(m), batch_invariant=mode) for mode in modes for m in (64, 50)]
    for other in (49, 65):
        d.store.save(
            DEVICE.gpu, DEVICE.environment, recorded(instance.at(other), result("blas", 1.0))
        )
    if not own_mode:  # a call outside batch-invariant mode must not use these
        for place in (replace(instance.at(m), batch_invariant=True) for m in (64, 50)):
            d.store.save(DEVICE.gpu, DEVICE.environment, recorded(place, result("blas", 1.0)))
    assert d.record(instance) is None
    for place in order:
        mine = recorded(place, result("blas", 2.0))
        d.store.save(DEVICE.gpu, DEVICE.environment, mine)
        assert d.record(instance) == (place, mine)


def test_a_choice_says_where_its_record_is(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), root=tmp_path)
    candidate = Candidate(FakeBlas(), FakeConfig())
    instance, edge = problem(m=50), problem(m=56)
    assert d.chosen_by(candidate, instance) == Choice(candidate, "cache", "not stored")
    d.store.save(DEVICE.gpu, DEVICE.environment, recorded(edge, result("blas", 1.0)))
    found = d.chosen_by(candidate, edge, "tuned", "one")
    assert Path(found.reason).is_relative_to(tmp_path)
    assert found == Choice(candidate, "tuned", found.reason, "one")


def test_only_blas_has_to_propose_a_config_on_record(tmp_path: Path) -> None:
    """BLAS has no fallback if the config, found for another M, does not bind."""
    blas, fast = FakeBlas(), FakeKernel("fast", tiles=(1, 2))
    d, _ = dispatcher(blas, fast, root=tmp_path)
    for kernel in (fast, blas):
        assert d.candidate(result(kernel.name, 1.0), [kernel], problem()) is not None
    other = {"config": {"tile": 4}}
    found = d.candidate(result("fast", 1.0, **other), [fast], problem())
    assert found == Candidate(fast, FakeConfig(tile=4))
    with pytest.warns(TmmWarning, match="tile=4 on record is not a config for"):
        assert d.candidate(result("blas", 1.0, **other), [blas], problem()) is None


@pytest.mark.parametrize(
    ("raises", "fault"),
    [
        (False, "plugin 'fakes'.*kernel odd ConfigError: FakeConfig: tile must be int"),
        (True, "kernel 'odd' of plugin 'fakes' is set aside: config_type .*not today"),
    ],
)
def test_an_unusable_kernel_is_reported_once_with_its_fault(
    raises: bool, fault: str, tmp_path: Path
) -> None:
    class Wild(FakeConfig):
        @classmethod
        def from_json(cls, doc: Any) -> Any:
            raise RuntimeError("not today")

    d, _ = dispatcher(FakeBlas(), FakeKernel("odd"), root=tmp_path)
    odd: Any = d.registry.kernel("odd")
    odd.config_type = Wild if raises else FakeConfig
    bad = result("odd", 1.0, config={"tile": "large"})
    with pytest.warns(TmmWarning, match=fault):
        assert d.candidate(bad, [odd], problem()) is None
    assert d.candidate(bad, [odd], problem()) is None  # a second warning would be an error


# -- invalidation and messages ---------------------------------------------------------------


@pytest.mark.parametrize("what", ["quarantine", "adopt", "tune", "try again"])
def test_a_change_that_affects_choices_forgets_all_of_them(what: str, tmp_path: Path) -> None:
    d, _ = dispatcher(
        FakeBlas(), FakeKernel("fast"), times={"fast": 5.0, "blas": 9.0}, root=tmp_path
    )
    mine, instance = settings(), problem()
    found = d.bound(instance, mine)
    d.keep(instance, mine, found)
    d.ended[instance, mine] = "tuning gave no usable winner"
    d._invariance._choices[instance, (0, True), mine, "one"] = found[0]
    if what == "quarantine":
        with pytest.warns(TmmWarning, match="boom"):
            d.quarantine(instance, found[0], RuntimeError("boom"))
    elif what == "adopt":
        d.adopt(problem(m=8), recorded(problem(m=8), result("fast", 5.0)))
    elif what == "tune":
        d.tune(instance, mine)
    else:
        d._try_again()
    assert d.answers == d.ended == d._choices == d._invariance._choices == {}
    assert d.choose(instance, mine).candidate.kernel.name == (
        "blas" if what == "quarantine" else "fast"
    )


@pytest.mark.parametrize("used", [False, True])
def test_compilers_that_know_an_old_toolchain_end(used: bool, tmp_path: Path) -> None:
    """A process that tuned nothing has no compile processes, and starts none now."""
    d, _ = dispatcher(FakeBlas(), root=tmp_path)
    closed: list[bool] = []
    tuner = SimpleNamespace(compilers=SimpleNamespace(close=lambda: closed.append(True)))
    del d.__dict__["tuner"]
    if used:
        d.tuner = tuner  # type: ignore[assignment]
    d._try_again()
    assert closed == [True] * used
    assert ("tuner" in d.__dict__) is used


@pytest.mark.parametrize(
    ("kind", "lacks", "other", "warned"),
    [
        ("cuda", "no C compiler", True, True), ("cuda", "no C compiler", False, False),
        ("cuda", None, True, False), ("cpu", "no C compiler", True, False),
    ],
)  # fmt: skip
def test_a_choice_of_blas_says_that_nothing_compiles(
    kind: str, lacks: str | None, other: bool, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned_of: list[Any] = []
    monkeypatch.setattr(toolchain, "lacking", lambda: lacks)
    monkeypatch.setattr(lookup, "warn_of_environment", lambda left, *_: warned_of.append(left))
    kernels = [FakeKernel("k", against=lambda p: ["no"])] if other else []
    d, _ = dispatcher(FakeBlas(), *kernels)
    choice = d.choose(problem(device=replace(DEVICE, type=kind)), settings())
    assert (choice.origin, choice.candidate.kernel.name) == ("fallback", "blas")
    assert warned_of == ([{("k", ""): Obstacle("toolchain", "no C compiler")}] if warned else [])
    monkeypatch.setattr(toolchain, "fingerprint", lambda: "another")
    assert d.untried.changed() is warned


def test_a_kernel_that_the_toolchain_failed_is_tried_again_once_that_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(answers, "warn_of_environment", lambda *given: seen.append(given))
    monkeypatch.setattr(toolchain, "fingerprint", lambda: "one")
    d, _ = dispatcher(FakeBlas(), FakeKernel("k"), times={"k": 5.0, "blas": 10.0})
    choice = d.choose(problem(), settings())
    fault = FileNotFoundError("no ptxas here")
    fault.cause_elsewhere = "toolchain"  # type: ignore[attr-defined]
    d.quarantine(problem(), choice, fault)  # without a warning of the kernel's
    text = "FileNotFoundError: no ptxas here"
    kernel = choice.candidate.kernel
    left = {("k", kernel.version): Obstacle("toolchain", text)}
    assert seen == [(left, problem(), ("toolchain",))]
    assert d.rejections(problem(), settings())["k"] == [f"quarantined: it raised {text}"]
    assert not d.untried.changed()
    monkeypatch.setattr(toolchain, "fingerprint", lambda: "two")
    assert d.untried.changed()


def test_another_process_that_tunes_is_logged_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=lambda: now))
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    instance = problem()
    query = deferring.Query(instance, instance, settings(), d.able(instance, settings()), 0.0)
    for now, count in ((0.0, 1), (59.0, 1), (60.0, 2), (119.0, 2), (121.0, 3)):  # noqa: B007
        choice = d._meanwhile(query)
        assert (choice.reason, choice.lasting) == ("another process is tuning it", False)
        assert len(caplog.records) == count


def test_a_tuning_in_the_background_that_ended_without_a_winner_is_not_begun_again(
    tmp_path: Path,
) -> None:
    fast = FakeKernel("fast", estimate=1.0)
    d, _ = dispatcher(FakeBlas(estimate=9.0), fast, root=tmp_path)
    mine, instance = settings(on_cache_miss="background"), problem()
    first = d.choose(instance, mine)
    assert (first.origin, first.lasting) == ("fallback", False)
    assert len(d.background) == 1
    background = d.background
    d.abandon()
    assert not background._finalizer.alive  # it would free what is the parent's
    d.ended[instance, mine] = "tuning failed: no memory"
    choice = d.choose(instance, mine)
    assert (choice.origin, choice.lasting) == ("heuristic", True)
    assert choice.reason.startswith("tuning failed: no memory; estimated")
    assert not d.background


@pytest.mark.parametrize("along", ["m", "k"])
def test_groups_have_the_config_of_64_rows_each_in_batch_invariant_mode(
    along: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With groups along K it is a choice for this call alone, as its sums are."""
    fast = FakeKernel("fast", estimate=1.0, traits=Traits(batch_invariant=True))
    d, _ = dispatcher(FakeBlas(estimate=9.0), fast, root=tmp_path)
    instance = problem(m=40, groups=Groups(5, along), batch_invariant=True)
    chosen: list[Problem] = []
    real = d._choose
    monkeypatch.setattr(d, "_choose", lambda p, current: chosen.append(p) or real(p, current))
    choice = d.choose(instance, settings(on_cache_miss="heuristic"))
    assert (choice.candidate.kernel.name, choice.origin) == ("fast", "heuristic")
    own = replace(instance, batch_invariant=False)
    assert chosen == [bucketed(instance.at(320)) if along == "m" else own]
    assert bucketed(instance.at(320)) != bucketed(instance.at(325))


@pytest.mark.parametrize(
    ("verify", "note"), [(True, ""), (False, ", never verified (verify=False)")]
)
@pytest.mark.parametrize("config", [None, '{"tile": 2}'])
def test_a_forced_kernel_that_is_not_verified_says_so(
    verify: bool, note: str, config: str | None, tmp_path: Path
) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast", tiles=(1, 2)), root=tmp_path)
    mine = settings(kernel="fast", config=config, verify=verify)
    about = "config given" if config else "default config"
    assert d.choose(problem(), mine).reason == about + note
    if config is None:
        d.adopt(problem(), recorded(problem(), result("fast", 5.0, config={"tile": 2})))
        assert d.choose(problem(), mine).reason == "its best config on record" + note


def test_an_adopted_record_that_is_stored_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    other, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    assert not [*other._neighbours.nearest(problem(m=32))]
    record = recorded(problem(), result("fast", 5.0))
    d.adopt(problem(), record)
    assert d.record_of(problem()) == record
    assert [each.record for each in CacheStore(tmp_path).summaries()] == [record]
    for each in (d, other):
        monkeypatch.setattr(each.store, "save", lambda *_, **__: pytest.fail("written again"))
        each.adopt(problem(), record)
    assert [near.record for near in other._neighbours.nearest(problem(m=32))] == [record]


def test_an_adopted_record_leaves_the_results_of_other_plugins(tmp_path: Path) -> None:
    def stored() -> Any:
        return CacheStore(tmp_path).load(DEVICE.gpu, DEVICE.environment, problem().to_json())

    times = {"fast": 5.0, "blas": 9.0}
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=times, root=tmp_path)
    mine = d.tune(problem(), settings())
    others = [result(f"other{number}", 3.0) for number in range(OTHER_KERNELS + 2)]
    older = revised(result("blas", 8.0), version="0")  # every process has its own BLAS
    both = revised(mine, candidates=(*mine.candidates, older, *others))
    d.store.save(DEVICE.gpu, DEVICE.environment, both)
    d.adopt(problem(), d.tune(problem(), settings()))
    assert d.record_of(problem()) == mine
    assert stored() == both
    # One from a rank that has one of the other kernels.
    newer = revised(mine, candidates=(*mine.candidates, result("other1", 4.0)))
    d.adopt(problem(), newer)
    kept = [others[0], *others[2:]][:OTHER_KERNELS]
    assert stored() == revised(newer, candidates=(*newer.candidates, *kept))
    d.adopt(problem(), stored())
    assert stored() == revised(newer, candidates=(*newer.candidates, *kept))


@pytest.mark.parametrize("mode", [False, True])
def test_an_adopted_winner_is_verified_in_the_mode_of_its_record(
    mode: bool, tmp_path: Path
) -> None:
    """Ranks adopt a record whose tuning verified the winner on one of them."""
    kernel = FakeKernel("fast")
    d, _ = dispatcher(FakeBlas(), kernel, root=tmp_path)
    record = recorded(problem(batch_invariant=mode), result("fast", 5.0))
    d.adopt(problem(batch_invariant=not mode), record)
    (winner,) = [each for each in d.registry.kernels() if each.name == "fast"]
    for other in (False, True):
        instance = problem(batch_invariant=other)
        candidate = Candidate(winner, FakeConfig())
        assert d.first_use.is_verified(instance, candidate) == (other == mode)


def test_an_adopted_record_answers_although_the_disk_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    record = recorded(problem(), result("fast", 5.0))
    monkeypatch.setattr(d.store, "save", lambda *_, **__: None)
    d.adopt(problem(), record)
    assert d.record_of(problem()) == record
    assert list(CacheStore(tmp_path).summaries()) == []


def test_a_record_that_another_thread_stored_meanwhile_answers(tmp_path: Path) -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    record = recorded(problem(), result("fast", 5.0), result("blas", 9.0))

    class Held:
        def acquire(self, **_: Any) -> bool:
            d.store.save(DEVICE.gpu, DEVICE.environment, record)
            return True

        def release(self) -> None:
            pass

    d._lock = Held()  # type: ignore[assignment]
    choice = d.choose(problem(), settings())
    assert (choice.candidate.kernel.name, choice.origin) == ("fast", "cache")
    assert timer.measured == []


def test_a_problem_that_another_process_stored_meanwhile_is_not_measured_again(
    tmp_path: Path,
) -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    record = recorded(problem(), result("blas", 9.0), result("fast", 5.0))
    d.store.save(DEVICE.gpu, DEVICE.environment, record)
    able = d.able(problem(), settings())
    assert d._tune(problem(), able, settings()) == record
    assert timer.measured == []
    assert d._tune(problem(), able, settings(), force=True) != record
    assert {*timer.measured} == {"blas", "fast"}


class Preparing:
    """A tuner that notes the problems to be compiled ahead."""

    def __init__(self) -> None:
        self.prepared: dict[Problem, list[str]] = {}
        self.compilers, self.preloaded = object(), list[Any]()

    def prepare(self, problem: Problem, able: Sequence[Any], hints: Hints) -> None:
        assert [kernel for kernel, _ in hints.candidates] == ["fast"] * bool(hints.candidates)
        self.prepared[problem] = [kernel.name for kernel in able]

    def preload(self, *given: Any) -> None:
        self.preloaded.append(given)
        raise RuntimeError("no memory")


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_which_kernels_are_compiled_ahead(interpreted: bool, stored: bool, tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    device = replace(DEVICE, interpreted=interpreted)
    instance, idle = problem(device=device), interpreted or stored
    if stored:
        d.store.save(device.gpu, device.environment, recorded(instance, result("fast", 5.0)))
    else:
        d.store.save(
            device.gpu, device.environment, recorded(instance.at(128), result("fast", 5.0))
        )
    tuner = d.tuner = Preparing()  # type: ignore[assignment]
    d.prepare(replace(instance, capturing=True), settings())
    assert tuner.prepared == ({} if idle else {instance: ["blas", "fast"]})  # type: ignore[comparison-overlap]
    tuner.prepared.clear()
    d.prepare(instance, settings(), force=True)
    assert list(tuner.prepared) == ([] if interpreted else [instance])
    tuner.prepared.clear()
    d.prepare(instance, settings(disable="blas"))  # which is measured for comparison
    assert tuner.prepared == ({} if idle else {instance: ["fast", "blas"]})  # type: ignore[comparison-overlap]
    d.prepare(instance, settings())  # its candidates compile already
    assert list(tuner.prepared.values()) == ([] if idle else [["fast", "blas"]])  # type: ignore[comparison-overlap]
    tuner.prepared.clear()
    own = replace(instance, batch_invariant=True)  # a record of its own
    d.prepare(own, settings(), force=True)
    assert list(tuner.prepared) == ([] if interpreted else [own])


@pytest.mark.parametrize("cuda", [False, True])
def test_a_preload_lists_records_and_runs_blas_on_the_current_gpu(
    cuda: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preload ignores faults: the first tuning meets and reports them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    done: list[str] = []
    steps = {name: functools.partial(done.append, name) for name in ("collect", "freeze")}
    monkeypatch.setattr(deferring, "gc", SimpleNamespace(**steps))
    d, _ = dispatcher(FakeBlas(), root=tmp_path)
    tuner = d.tuner = Preparing()  # type: ignore[assignment]
    d.preload()
    assert d._neighbours._families == {}
    assert "background" in d.__dict__
    on = [(d.registry.kernel("blas"), torch.device("cuda", 1))]
    assert tuner.preloaded == (on if cuda else [])  # type: ignore[comparison-overlap]
    assert done == ["collect", "freeze"]  # no garbage is kept


@pytest.mark.parametrize(
    ("origin", "extent", "blas", "own", "saved"),
    [
        ("tuned", 64, 9.0, 5.0, 4.0), ("cache", 64, 9.0, 5.0, 4.0), ("cache", 64, 5.0, 9.0, 0.0),
        ("cache", 40, 9.0, 5.0, 3.0), ("cache", 33, 9.0, 5.0, 3.0), ("cache", 60, 9.0, 5.0, 4.0),
        ("heuristic", 64, 8.0, 6.0, 2.0), ("heuristic", 64, 6.0, 8.0, 0.0),
        ("neighbour", 64, 8.0, None, 0.0), ("forced", 64, None, 6.0, 0.0),
        ("tuned", 64, None, 5.0, 0.0), ("tuned", 64, 9.0, None, 0.0),
    ],
)  # fmt: skip
def test_the_time_that_a_choice_saves(
    origin: Any, extent: int, blas: float | None, own: float | None, saved: float, tmp_path: Path
) -> None:
    """The saving is from the record's times at the nearest M, or else from estimates."""
    ours = FakeKernel("fast", estimate=own, tiles=(1, 2))
    d, _ = dispatcher(FakeBlas(estimate=blas), ours, root=tmp_path)
    choice = Choice(Candidate(ours, FakeConfig(tile=2)), origin, "")
    instance = problem(m=extent)
    if origin in ("tuned", "cache"):
        assert saving_us(d, instance, choice) == 0.0  # there is no record
        timed = [result("blas", 50.0, config={"tile": 3})] * (blas is not None)
        if blas is not None:
            timed.append(result("blas", blas, config={"tile": 1}, inside_us={33: blas}))
        timed.append(result("fast", 1.0, config={"tile": 1}))
        if own is not None:
            timed.append(result("fast", own, config={"tile": 2}, inside_us={33: own + 1}))
        edge = problem(m=64)
        d.store.save(DEVICE.gpu, DEVICE.environment, recorded(edge, *timed))
    assert saving_us(d, instance, choice) == pytest.approx(saved)
    assert (
        saving_us(d, instance, replace(choice, candidate=Candidate(FakeBlas(), FakeConfig()))) == 0
    )


# -- what later calls do ----------------------------------------------------------------------


class Later:
    """Stands in for background tunings: their names, and the share of time given to each slice."""

    def __init__(self, *names: Any) -> None:
        self.names, self.shares, self.tasks = set(names), list[float](), list[Any]()

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return len(self.names)

    def resume(self, share: float) -> None:
        self.shares.append(share)

    def add(self, name: Any, task: Any) -> None:
        self.tasks.append(task)


def deferred(*names: Any) -> tuple[Dispatcher, Any]:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast", estimate=1.0))
    later = d.__dict__["background"] = Later(*names)
    return d, later


LATER = settings(on_cache_miss="background", tune_share=0.25)


@pytest.mark.parametrize(
    ("names", "instance", "shares"),
    [
        (("one",), problem(), [0.25]), ((), problem(), []),
        (("one",), problem(capturing=True), []), (("one",), problem(deterministic=True), []),
    ],
)  # fmt: skip
def test_a_call_that_may_wait_gives_a_slice(names: Any, instance: Problem, shares: Any) -> None:
    d, later = deferred(*names)
    d.resume(instance, LATER)
    assert later.shares == shares
    thread = threading.Thread(target=d.resume, args=(instance, LATER))
    with d._lock:  # this thread measures
        thread.start()
        thread.join(10)
    assert not thread.is_alive()
    assert later.shares == shares


@pytest.mark.parametrize("m", [64, 50, 49])
def test_an_answer_is_kept_until_its_tuning_or_its_race_ends(m: int) -> None:
    """The tuned problem is the call's without its requirements, such as determinism."""
    instance, mine = problem(m=50, deterministic=True), settings()
    d, later = deferred((problem(m=m), mine))
    assert d.kept(instance, mine) is None
    found = d.bound(instance, settings(on_cache_miss="heuristic"))
    d.keep(instance, mine, found)
    assert d.kept(instance, mine) is (None if m == 49 else found)
    assert d.kept(problem(m=51), mine) is None
    later.names.clear()
    assert d.kept(instance, mine) is None
    assert d.answers == {}


@pytest.mark.parametrize("error", [None, RuntimeError("boom")])
def test_how_a_tuning_in_the_background_ended_is_remembered(error: Exception | None) -> None:
    d, later = deferred()
    instance = problem()
    query = deferring.Query(instance, instance, LATER, [], 0.0)

    def steps() -> Any:
        yield "waits"
        if error is not None:
            raise error

    d.defer((instance, LATER), query, steps(), "no winner")
    (task,) = later.tasks
    assert (task.problem, task.is_done(), d.ended) == (instance, False, {})
    with (
        contextlib.nullcontext()
        if error is None
        else pytest.warns(TmmWarning, match="tuning failed: RuntimeError: boom")
    ):
        assert list(task.steps) == ["waits"]
    end = "tuning failed: RuntimeError: boom" if error else "no winner"
    assert d.ended == {(instance, LATER): end}
    d.store.save(DEVICE.gpu, DEVICE.environment, recorded(instance, result("blas", 1.0)))
    assert task.is_done()


def test_without_a_record_no_candidates_race(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), root=tmp_path)
    instance = problem(m=50)
    query = deferring.Query(instance, instance.at(64), settings(), [], 0.0)
    assert list(d._racing(query, {})) == []
    assert d.record_of(instance.at(64)) is None


def test_racing_candidates_are_verified_where_they_were_timed(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), FakeKernel("bad"), root=tmp_path)
    asked, edge, mine = problem(m=50), problem(m=64), settings()
    record = recorded(edge, result("blas", 220.0), result("fast", 200.0), result("bad", 190.0))
    d.quarantined["bad", edge] = "it was wrong"
    query = deferring.Query(asked, edge, mine, d.able(asked, mine), 0.0)
    racing = d._racers(record, query)
    assert {index: c.kernel.name for index, c in racing.items()} == {0: "blas", 1: "fast"}

    def race_at(key: Problem, before: TuningRecord, m: int, *_: Any) -> Any:
        assert (key, before, m) == (edge, record, 50)
        yield ()
        blas, fast, bad = record.candidates
        return revised(record, candidates=(blas, revised(fast, inside_us={50: 150.0}), bad))

    d.tuner.race_at = race_at  # type: ignore[method-assign]
    d.store.save(DEVICE.gpu, DEVICE.environment, record)
    assert list(d._racing(query, racing)) == [()]
    (_, fast, _) = d.record_of(edge).candidates  # type: ignore[union-attr]
    assert fast.inside_us == {50: 150.0}
    assert [d.first_use.is_verified(asked, c) for c in racing.values()] == [False, True]


@pytest.mark.parametrize("racers", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("origin", "m", "ended", "on_record"),
    [
        ("cache", 50, False, True), ("tuned", 50, False, True), ("heuristic", 50, False, True),
        ("cache", 64, False, True), ("cache", 50, True, True), ("cache", 50, False, False),
    ],
)  # fmt: skip
def test_which_calls_race_the_best_of_a_record(
    racers: int, origin: Any, m: int, ended: bool, on_record: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A race needs two candidates and an M without measurements; each M is raced once."""
    fast = FakeKernel("fast")
    choice = Choice(Candidate(fast, FakeConfig()), origin)
    for mode in ("tune", "background"):
        d, later = deferred()
        mine = settings(on_cache_miss=mode)
        asked, edge = problem(m=m), problem(m=64)
        raced: list[int] = []

        def racing(query: Any, candidates: Any, raced: Any = raced) -> Any:
            raced.append(len(candidates))
            yield ()

        monkeypatch.setattr(d, "record_of", lambda key: object() if on_record else None)
        monkeypatch.setattr(d, "_racers", lambda record, query: dict.fromkeys(range(racers)))
        monkeypatch.setattr(d, "_racing", racing)
        name = asked.bare(), mine
        if ended:
            d.ended[name] = ""
        query = deferring.Query(asked, edge, mine, [], 0.0)
        races = racers >= 2 and on_record and origin != "heuristic" and m != 64 and not ended
        for _ in range(2):
            assert d.raced(query, choice) is not (races and mode == "background")
        if mode == "tune":
            assert raced == [racers] * races
            assert (name in d.ended) is (races or ended)
        else:
            assert len(later.tasks) == 2 * races
            assert raced == []


@pytest.mark.parametrize(
    ("stamped", "origin", "extent"),
    [
        ("nothing", "cache", "first use"), ("another size", "cache", "forms"),
        ("another size", "forced", "forms"), ("the bucket's winner", "cache", "forms"),
        ("the bucket's winner", "tuned", "forms"), ("the bucket's winner", "forced", "forms"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["right", "wrong", "no memory"])
def test_how_much_of_a_candidate_is_verified_at_its_first_use(
    stamped: str, origin: Any, extent: str, end: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A candidate verified elsewhere in its bucket gets a short check, and a stamp if it passes."""
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    asked, edge = problem(m=2000), problem(m=2048)
    candidate = Candidate(FakeKernel("fast"), FakeConfig())
    choice = Choice(candidate, origin)
    if stamped == "another size":
        d.first_use.stamp(problem(m=1999), candidate)
    elif stamped == "the bucket's winner":
        d.stamp_winner(edge, recorded(edge, result("fast", 1.0, config={"tile": 1})))
    asked_for: list[Any] = []

    class Verifier:
        def __init__(self, problem: Problem, device: Any, **options: Any) -> None:
            asked_for.append((problem, device, options))

        def verdict(self, launcher: Any, *, extent: str) -> Verdict:
            asked_for.append((launcher, extent))
            if end == "no memory":
                raise torch.OutOfMemoryError("too large\nand more")
            return Verdict(0.0, None if end == "right" else "it is wrong")

    monkeypatch.setattr(verifier, "Verifier", Verifier)
    assert not d.first_use.is_verified(asked, candidate)
    launcher: Any = "launcher"
    verdict = d.first_use.verify(asked, choice, launcher, memory_limit=77)
    options = {"memory_limit": 77, "sampled": True}
    assert asked_for == [(asked, torch.device("cpu"), options), ("launcher", extent)]
    assert (verdict.ok, verdict.unknown) == (end == "right", end == "no memory")
    assert verdict.cause == ("passing" if end == "no memory" else None)
    assert verdict.reason == {
        "right": None, "wrong": "it is wrong", "no memory": "cannot be verified: too large",
    }[end]  # fmt: skip
    assert d.first_use.is_verified(asked, candidate) is (end == "right")


@pytest.mark.parametrize(("won_at", "known"), [(2048, True), (2000, True), (4096, False)])
def test_a_winner_serves_its_bucket_and_is_verified_at_its_own_size(
    won_at: int, known: bool, tmp_path: Path
) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    asked, candidate = problem(m=2000), Candidate(FakeKernel("fast"), FakeConfig())
    won = recorded(problem(m=won_at), result("fast", 1.0, config={"tile": 1}))
    d.stamp_winner(problem(m=won_at), won)
    assert d.first_use.is_verified(asked, candidate, sized=False) is known
    for origin in ("cache", "tuned"):
        assert d.first_use.may_launch(asked, Choice(candidate, origin)) is (won_at == 2000)
    deterministic = replace(asked, deterministic=True)  # no tuning is for that mode
    assert not d.first_use.is_verified(deterministic, candidate, sized=False)


def test_a_record_answers_if_it_cannot_be_completed(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("new"), root=tmp_path)
    key, mine = problem(m=64), settings()
    partial = recorded(key, result("blas", 9.0))
    d.store.save(DEVICE.gpu, DEVICE.environment, partial)

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no clock")

    d.tuner.steps = failing  # type: ignore[method-assign]
    able = d.able(key, mine)
    assert d.on_record(key, able, mine, tune=False) == partial
    with pytest.warns(TmmWarning, match="tuning failed: RuntimeError: no clock"):
        assert d.on_record(key, able, mine, tune=True) == partial


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("on_record", [False, True])
def test_a_record_without_all_kernels_answers_while_it_is_completed(
    ended: bool, on_record: bool, tmp_path: Path
) -> None:
    """The answer may change until the tuning has ended, and stays afterwards."""
    d, _ = dispatcher(FakeBlas(), FakeKernel("old"), FakeKernel("new"), root=tmp_path)
    later = d.__dict__["background"] = Later()
    asked = problem(m=64)
    if on_record:
        partial = recorded(asked, result("old", 5.0), result("blas", 9.0))
        d.store.save(DEVICE.gpu, DEVICE.environment, partial)
    query = deferring.Query(asked, asked, LATER, d.able(asked, LATER), 0.0)
    if ended:
        d.ended[asked, LATER] = "tuning gave no usable winner"
    choice = d._later(query)
    kernel = "old" if on_record else "blas"
    assert (choice.candidate.kernel.name, choice.lasting) == (kernel, ended)
    assert choice.origin == ("cache" if on_record else "fallback")
    assert len(later.tasks) == (not ended)
    if not on_record:
        why = "tuning gave no usable winner" if ended else "later calls tune it in the background"
        assert choice.reason.startswith(why)


def test_blas_that_a_record_names_is_chosen_for_no_other_reason(tmp_path: Path) -> None:
    """Inside a bucket BLAS may replace the record's winner; the reason is then given."""
    for fast, said in ((20.0, False), (5.0, True)):
        d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path / str(said))
        blas = result("blas", 10.0, inside_us={33: 10.0, 49: 10.0})
        other = result("fast", fast, inside_us={33: 20.0, 49: 20.0})
        results = (other, blas) if said else (blas, other)  # the winner is the first
        d.store.save(DEVICE.gpu, DEVICE.environment, recorded(problem(m=64), *results))
        choice = d.choose(problem(m=40), settings())
        assert choice.candidate.kernel.name == "blas"
        assert ("BLAS is not beaten around M=40" in choice.reason) is said


@pytest.mark.parametrize("estimate", [None, 5.0])
def test_where_blas_declines_an_interim_answer_is_an_untuned_choice(estimate: float | None) -> None:
    blas = FakeBlas()
    blas.supports = Supports(devices=("cpu",), operands=())  # type: ignore[misc]
    d, _ = dispatcher(blas, FakeKernel("fast", estimate=estimate))
    instance = problem()
    query = deferring.Query(instance, instance, settings(), d.able(instance, settings()), 0.0)
    if estimate is None:
        with pytest.raises(UnsupportedProblemError, match="no kernel serves"):
            d._for_now(query, "it is tuned")
        return
    choice = d._for_now(query, "it is tuned")
    assert (choice.candidate.kernel.name, choice.origin, choice.lasting) == (
        "fast", "heuristic", False,
    )  # fmt: skip
    assert choice.reason.startswith("it is tuned; estimated 5 µs")


def test_a_choice_without_a_record_is_made_once_for_its_bucket(tmp_path: Path) -> None:
    estimated = []

    class Fast(FakeKernel):
        def estimate_us(self, problem: Problem, config: FakeConfig) -> float:
            estimated.append(problem.m)
            return 5.0

    d, _ = dispatcher(FakeBlas(estimate=9.0), Fast("fast"), root=tmp_path)
    mine = settings(on_cache_miss="heuristic")
    first = d.choose(problem(m=64), mine)
    assert (first.candidate.kernel.name, first.origin) == ("fast", "heuristic")
    assert d.choose(problem(m=50), mine) is first
    assert set(estimated) == {64}


@pytest.mark.parametrize("lasting", [True, False])
def test_a_tuned_problem_is_a_neighbour_at_once(
    lasting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is stored for other processes, unless its epilogue exists in this one alone."""
    d, _ = dispatcher(FakeBlas(), root=tmp_path)
    assert d._neighbours.families() == {}
    monkeypatch.setattr(type(problem().epilogue), "lasting", lasting)
    d._store(problem(), recorded(problem(), result("blas", 1.0)))
    (near,) = d._neighbours.nearest(problem(m=128))
    assert near.octaves == 1
    assert d.record_of(problem()) == near.record
    assert len(list(CacheStore(tmp_path).summaries())) == lasting


@pytest.mark.parametrize(
    ("noted", "force", "fields", "measured"),
    [
        (None, False, {}, True), ("one", False, {}, False), ("one", True, {}, True),
        ("gone", False, {}, True), (None, False, {"arithmetic": "one"}, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("gradient", [False, True])
def test_tuning_measures_a_weight_unless_its_arithmetic_is_known(
    noted: str | None, force: bool, fields: Any, measured: bool, gradient: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(invariant, "LADDER", (16,))
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: "one", 2: "two"}), root=tmp_path)
    mine = settings(batch_invariant=True, **fields)
    own = replace(weight_problem(16), **({"a": COLUMN} if gradient else {}))
    notes = d._invariance._notes_of(own)
    if noted is not None:
        notes.add(digest(weight(own)), noted)
    monkeypatch.setattr(d._invariance, "_measured", lambda *_, **__: "two")
    monkeypatch.setattr(d, "on_record", lambda key, *_, **__: key)
    capturing = replace(own, capturing=True)
    assert d._invariance.tune(capturing, mine, force) == own
    assert notes.get(digest(weight(own))) == ("two" if measured and not gradient else noted)


@pytest.mark.parametrize(("static", "batch"), [(True, 1), (True, 2), (False, 1)])
def test_a_weight_that_does_not_change_is_tuned_as_such_if_it_is_one(
    static: bool, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, _ = dispatcher(FakeBlas(), root=tmp_path)
    tuned: list[Problem] = []

    def tune(key: Problem, *_: Any, **__: Any) -> Any:
        tuned.append(key)
        return "its record"

    monkeypatch.setattr(d, "_tune", tune)
    assert d.tune(problem(batch=batch), settings(static_weights=static)) == "its record"
    assert [each.static_weights for each in tuned] == [static and batch == 1]


# -- what is explained ------------------------------------------------------------------------


def test_names_share_a_line_if_all_their_reasons_are_the_same() -> None:
    pairs = [("b", ["x", "y"]), ("a", ["x"]), ("d", ["y", "x"]), ("c", ["x", "y"]), ("e", [])]
    assert alike(pairs) == [
        (["b", "c"], ("x", "y")), (["a"], ("x",)), (["d"], ("y", "x")), (["e"], ()),
    ]  # fmt: skip


@pytest.mark.parametrize(("m", "inside"), [(64, False), (50, True)])
def test_each_kernel_is_explained_once(m: int, inside: bool, tmp_path: Path) -> None:
    kernels = [FakeKernel(name) for name in ("fast", "new", "left")]
    kernels.append(FakeKernel("no", against=lambda p: ["m is even"]))
    d, _ = dispatcher(FakeBlas(), *kernels, root=tmp_path)
    lost = revised(result("blas", 9.0), samples_us=())
    d.adopt(problem(m=64), recorded(problem(m=64), result("fast", 5.0), lost))
    d.untried.note(problem(m=64), set(), {("left", "1"): Obstacle("passing", "no\n memory")})
    found = explain_problem(d, problem(m=m), settings(on_cache_miss="heuristic"))
    again = "tried again by later processes, and by `tmm tune`"
    assert list(found._others()) == [
        ("untried", f"left: no memory; {again}"),
        ("able", "new (not measured)"),
        ("rejected", "no: m is even"),
    ]
    facts = dict(found._facts())
    assert facts.get("measured") == ("at M=64, the bucket of M=50" if inside else None)
    columns, rows = _measurements(recorded(problem(m=64), result("fast", 5.0), lost))
    assert columns[:3] == ("kernel", "µs at M=64", "vs blas")
    assert [row[2] for row in rows] == [ABSENT, ABSENT]  # there is no time of BLAS


@pytest.mark.parametrize("mode", [False, True])
def test_untried_kernels_of_a_problem_without_a_record_are_explained(
    mode: bool, tmp_path: Path
) -> None:
    """Batch-invariant mode has records, and so notes, of its own."""
    traits = Traits(deterministic=True, batch_invariant=True)
    d, _ = dispatcher(FakeBlas(), FakeKernel("new", traits=traits), root=tmp_path)
    for own, reason in ((False, "no disk"), (True, "no memory")):
        bucket = problem(m=128, batch_invariant=own)
        d.untried.note(bucket, set(), {("new", "1"): Obstacle("budget", reason)})
    required = problem(m=120, deterministic=True, batch_invariant=mode)
    found = explain_problem(d, required, settings())
    again = "tried again by `tmm tune`, or when the toolchain changes"
    assert found.record is None
    assert found.untried == {"new": f"no {'memory' if mode else 'disk'}; {again}"}


def test_kernels_that_are_not_used_say_why() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("off"), FakeKernel("odd"), FakeKernel("fine"))
    with pytest.warns(TmmWarning, match="is set aside: it is odd"):
        d.registry.kernel("odd").set_aside("it is odd")  # type: ignore[attr-defined]
    found = kernel_infos(d.registry, settings(disable=frozenset({"off"})))
    assert {info.name: info.disabled for info in found} == {
        "blas": None, "fine": None, "off": "disabled by TMM_DISABLE or override",
        "odd": "kernel 'odd' of plugin 'fakes' is set aside: it is odd",
    }  # fmt: skip


def test_which_kernels_a_tuning_would_time(tmp_path: Path) -> None:
    """A kernel that this machine could not try is not timed again, unless no record exists."""
    d, _ = dispatcher(FakeBlas(), FakeKernel("left"), FakeKernel("new"), root=tmp_path)
    instance = problem()
    able = d.able(instance, settings())
    record = recorded(instance, result("blas", 9.0))

    def missing(known: TuningRecord | None, resume: bool = False) -> list[str]:
        return [kernel.name for kernel in d.untried.missing(instance, able, known, resume)]

    assert missing(record) == ["left", "new"]
    d.untried.note(instance, set(), {("left", "1"): Obstacle("passing", "no memory")})
    assert missing(record) == ["new"]
    assert missing(record, resume=True) == ["left", "new"]
    assert missing(None) == ["blas", "left", "new"]


@pytest.mark.parametrize(
    ("mode", "m", "spent", "names"),
    [
        ("tune", 64, 0.0, ["blas", "fast"]), ("tune", 50, 0.0, ["blas", "fast", "usual"]),
        ("tune", 50, 7.0, ["blas", "fast", "usual"]), ("tune", 50, 7.1, ["blas", "fast"]),
        ("background", 50, 7.1, ["blas", "fast", "usual"]),
    ],
)  # fmt: skip
def test_a_tuning_is_of_the_kernels_of_its_bucket_while_its_budget_lasts(
    mode: Any, m: int, spent: float, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may serve the bucket's edge, but not this call. The time spent on finding the
    call's kernels counts towards the budget."""
    d, _ = deferred()
    mine = settings(on_cache_miss=mode, tune_budget=7.0)
    asked, edge = problem(m=m), problem(m=64)
    given: list[Any] = []

    def tuning(key: Any, able: Any, settings: Any, *, spent: float, wait: bool = False) -> Any:
        given.append((key, [kernel.name for kernel in able], spent))
        return recorded(edge, result("blas", 9.0))

    monkeypatch.setattr(d, "_tuning" if mode == "background" else "_tune", tuning)
    query = deferring.Query(asked, edge, mine, d.able(asked, mine), spent)
    usual = FakeKernel("usual")
    monkeypatch.setattr(d, "able", lambda key, settings: [*query.able, usual])
    (d._later if mode == "background" else d._tuned)(query)
    assert given == [(edge, names, spent)]


def test_a_complete_record_is_measured_again_only_where_it_is_forced(tmp_path: Path) -> None:
    d, timer = dispatcher(FakeBlas(), Summing("k", {1: "one"}), root=tmp_path)
    key, mine = weight_problem(16), settings()
    able = d.able(key, mine)
    assert d.on_record(key, able, mine, tune=False) is None
    first = d.on_record(key, able, mine, tune=True)
    count = len(timer.measured)
    assert d.on_record(key, able, mine, tune=True) == first
    assert len(timer.measured) == count
    d.on_record(key, able, mine, tune=True, force=True)
    assert len(timer.measured) > count


@pytest.mark.parametrize(("nearest", "close"), [(90, True), (91, False)])
def test_a_tuning_starts_from_the_best_three_of_the_three_nearest(
    nearest: int, close: bool, tmp_path: Path
) -> None:
    """A record within half an octave is close."""
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    assert d.hints(problem()) == Hints([], False)
    sizes = (nearest, 100, 110, 120)
    for size in sizes:
        timed = [result("fast", float(us), config={"tile": size + us}) for us in (4, 3, 2, 1)]
        eliminated = result("fast", 0.5, status="slow", config={"tile": 1})
        former = revised(result("fast", 1.5, config={"tile": size + 1}), version="0")
        timed += [former, result("absent", 0.1)]
        d._store(problem(m=size), recorded(problem(m=size), *timed, eliminated))
    found = d.hints(problem())
    tiles = [config["tile"] for _, config in found.candidates]
    assert tiles == [size + us for size in sizes[:3] for us in (1, 2, 3)]
    assert found.close is close


@pytest.mark.parametrize(
    ("chosen", "timed", "declines", "answer"),
    [
        (("blas", 1), {1: 10.0, 2: 9.0}, False, ("blas", 2)),
        (("blas", 2), {1: 10.0, 2: 9.0}, False, None), (("blas", 2), {}, False, None),
        (("fast", 1), {1: 10.0, 2: 9.0}, False, ("blas", 2)),
        (("fast", 1), {}, False, ("blas", 1)), (("fast", 1), {1: 10.0, 2: 9.0}, True, None),
        (("blas", 1), {1: 20.0, 2: 21.0}, False, ("fast", 1)),
        (("fast", 1), {1: 20.0, 2: 21.0}, False, None),
        (("fast", 1), {1: 20.0, 2: 21.0}, True, None),
    ],
)  # fmt: skip
def test_which_kernel_answers_inside_a_bucket(
    chosen: tuple[str, int], timed: dict[int, float], declines: bool,
    answer: tuple[str, int] | None, tmp_path: Path,
) -> None:  # fmt: skip
    """The kernel that beats BLAS on both sides, else the fastest config of BLAS. None: the bucket's
    choice stays."""
    blas = FakeBlas(tiles=(1, 2), against=lambda problem: ["not here"] * declines)
    d, _ = dispatcher(blas, FakeKernel("fast"), root=tmp_path)
    edge, asked = problem(m=64), problem(m=40)
    others = [
        result("blas", 9.0, config={"tile": tile}, inside_us={33: us, 49: us})
        for tile, us in timed.items()
    ]
    inside_us = {33: 15.0, 49: 15.0} if timed else {}
    fast = result("fast", 9.0, config={"tile": 1}, inside_us=inside_us)
    d.store.save(DEVICE.gpu, DEVICE.environment, recorded(edge, fast, *others))
    name, tile = chosen
    choice = Choice(Candidate(d.registry.kernel(name), FakeConfig(tile=tile)), "cache", "path")
    able = d.able(asked, settings())
    found = d.inside(asked, edge, choice, able)
    if answer is None:
        assert found is choice
        return
    assert (found.candidate.kernel.name, found.candidate.config) == (
        answer[0], FakeConfig(tile=answer[1]),
    )  # fmt: skip
    assert found.origin == "cache"
    assert found.reason.startswith("path; " + ("the best at" if answer[0] == "fast" else "BLAS is"))
    for same in (edge, replace(asked, batch_invariant=True)):
        assert d.inside(same, edge, choice, able) is choice
    for origin in ("forced", "heuristic", "neighbour", "fallback"):
        other = replace(choice, origin=origin)
        assert d.inside(asked, edge, other, able) is other


@pytest.mark.parametrize("changes", [False, True])
def test_a_changed_toolchain_is_noticed_by_calls_and_by_tuning(
    changes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    begun: list[bool] = []
    monkeypatch.setattr(d.untried, "changed", lambda: changes)
    monkeypatch.setattr(d, "_try_again", lambda: begun.append(True))
    d.tune(problem(), settings())
    d.choose(problem(), settings())
    assert begun == [True, True] * changes


def test_for_a_problem_that_no_kernel_serves_no_weight_is_measured(tmp_path: Path) -> None:
    kernel = Summing("k", {1: "one"}, against=lambda p: ["few rows"] * (p.m < 16))
    d, timer = dispatcher(FakeBlas(), kernel, root=tmp_path)
    with pytest.warns(TmmWarning, match="blas is not batch-invariant, but nothing that is can"):
        assert d.choose(weight_problem(3), settings()).candidate.kernel.name == "blas"
    assert not timer.measured
    assert d.choose(weight_problem(16), settings()).candidate.kernel.name == "k"
    assert timer.measured


def test_a_config_of_an_arithmetic_is_chosen_once_for_each_m(tmp_path: Path) -> None:
    """Without a record, the choice estimates all candidates."""
    estimated: list[int] = []

    class Estimating(Summing):
        def estimate_us(self, problem: Problem, config: FakeConfig) -> float:
            estimated.append(problem.m)
            return 5.0

    d, _ = dispatcher(FakeBlas(), Estimating("k", {1: "one", 2: "one"}), root=tmp_path)
    mine = settings(on_cache_miss="heuristic", arithmetic="one")
    first = d.choose(weight_problem(40), mine)
    assert estimated
    estimated.clear()
    assert d.choose(weight_problem(40), mine) is d.choose(weight_problem(41), mine) is first
    assert estimated == []
    d.choose(weight_problem(49), mine)
    assert 49 in estimated


@pytest.mark.parametrize(
    ("verdict", "capturing", "origin", "declines", "answer"),
    [
        (Verdict(0.0, None), False, "cache", False, "fast"),
        (Verdict(0.0, None), False, "forced", False, "fast"),
        (Verdict(None, "x", unknown=True), False, "cache", False, "blas"),
        (Verdict(None, "x", unknown=True), False, "cache", True, "fast"),
        (Verdict(None, "x", unknown=True), False, "forced", False, "unverified"),
        (None, True, "cache", False, "blas"), (None, True, "cache", True, "fast"),
        (None, True, "forced", False, "unverified"),
        (Verdict(0.0, "it is off"), False, "cache", False, "wrong"),
        (Verdict(0.0, "it is off"), False, "forced", False, "refused"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("invariant_mode", [None, False, True])
def test_which_kernel_answers_at_a_first_use(
    verdict: Verdict | None, capturing: bool, origin: Any, declines: bool, answer: str,
    invariant_mode: bool | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The choice if it is right, or if BLAS cannot serve the problem; else BLAS. In batch-invariant
    mode BLAS that is not invariant answers with a warning."""
    traits = Traits(batch_invariant=bool(invariant_mode))
    blas = FakeBlas(traits=traits, against=lambda problem: ["not here"] * declines)
    d, _ = dispatcher(blas, FakeKernel("fast"))
    asked = problem(capturing=capturing, batch_invariant=invariant_mode is not None)
    choice = Choice(Candidate(d.registry.kernel("fast"), FakeConfig()), origin)
    monkeypatch.setattr(d.first_use, "may_launch", lambda *_: False)
    monkeypatch.setattr(d.first_use, "verify", lambda *_, **__: verdict)
    launcher: Any = "launcher"
    warned = (
        "a forced kernel is used unverified: fast was never verified" * (answer == "unverified")
        or "is served by BLAS, which is not batch-invariant"
        * (answer == "blas" and invariant_mode is False)
        or "it is off" * (answer == "wrong")
    )
    with pytest.warns(TmmWarning, match=warned) if warned else contextlib.nullcontext():
        if answer == "refused":
            with pytest.raises(PluginError, match="it is off"):
                d._verified(asked, choice, launcher, settings())
            return
        found = d._verified(asked, choice, launcher, settings())
    if answer == "wrong":
        assert (found, *d.quarantined.values()) == (None, "it is off")
    elif answer == "blas":
        assert (found.candidate.kernel.name, found.origin) == ("blas", "fallback")
        end = ", and a CUDA graph is being captured" if capturing else ": it x"
        assert found.reason == f"fast was never verified on this machine for M=64{end}"
    else:
        assert found is choice


def test_a_forked_child_answers_nothing_by_its_parents_tunings() -> None:
    d, _ = dispatcher(FakeBlas())
    d.answers[problem(), settings()] = ((), ())  # type: ignore[assignment]
    later = d.__dict__["background"] = SimpleNamespace(ended=False)
    later.abandon = lambda: setattr(later, "ended", True)
    lock = d._lock
    d.after_fork()
    assert d.answers == {}
    assert later.ended
    assert "background" not in d.__dict__
    assert d._lock is not lock


def warns(*_: Any, **__: Any) -> Any:
    """Like a function of a plugin that leads to a warning of tmm's."""
    errors.warn("odd")


class Warns(Summing):
    """Each of its functions gives a warning of tmm's."""

    configs = default_config = estimate_us = bind = warns


def test_a_warning_that_is_an_error_passes_every_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These tests run under ``-W error``. Other exceptions cost only a kernel or a tuning."""

    class Parsing(FakeConfig):
        from_json = warns

    d, later = deferred()
    own = Warns("w", {1: "one"})
    candidate = Candidate(own, FakeConfig())
    edge, mine = problem(m=64), settings()
    query = deferring.Query(problem(m=50), edge, mine, d.able(edge, mine), 0.0)
    known = Choice(Candidate(query.able[0], FakeConfig()), "cache")
    for name in ("_tune", "_racing"):
        monkeypatch.setattr(d, name, warns)
    monkeypatch.setattr(d, "_racers", lambda *_: dict.fromkeys(range(2)))
    monkeypatch.setattr(d, "record_of", lambda key: None)
    d.defer((edge, mine), query, (warns() for _ in range(1)), "no winner")
    with monkeypatch.context() as patch:
        patch.setattr(d, "record_of", lambda key: object())
        with pytest.raises(TmmWarning, match=r"^odd"):
            d.raced(query, known)
    assert d._lock.acquire(blocking=False)
    d._lock.release()
    parsing = FakeKernel("p")
    parsing.config_type = Parsing
    choice = Choice(candidate, "heuristic")
    calls: list[Any] = [
        lambda: d.on_record(edge, query.able, mine, tune=True), lambda: d._tuned(query),
        lambda: heuristic.choose(d, d._neighbours, edge, [own], "why"),
        lambda: saving_us(d, edge, choice), lambda: d._invariance._offered(edge, [own]),
        lambda: list(later.tasks[0].steps),
        lambda: d.candidate(result("p", 1.0), [parsing], edge),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TmmWarning, match=r"^odd"):
            call()
    assert d.ended == {(query.problem, mine): ""}  # the race, which is run once
    monkeypatch.setattr(d, "choose", lambda *_: choice)
    with pytest.raises(TmmWarning, match=r"^odd"):
        d._bound(edge, mine)
    assert d.quarantined == {}


def test_lines_of_an_explanation_are_indented_to_their_names(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("odd", against=lambda p: ["M is even " * 9]))
    lines = explain_problem(d, problem(), settings(on_cache_miss="heuristic")).text(50).splitlines()
    assert len(lines) > 9  # paths are not broken
    assert {line[:10].strip() for line in lines} == {
        "", "problem", "device", "chosen", "because", "record", "able", "rejected",
    }  # fmt: skip
    assert all(line[9] == " " != line[10] for line in lines)


def test_a_call_does_not_measure_kernels_that_this_machine_cannot_try(tmp_path: Path) -> None:
    d, timer = dispatcher(
        FakeBlas(), FakeKernel("left", traits=Traits(batch_invariant=True)), root=tmp_path
    )
    edge, mine = problem(), settings()
    for key in (edge, replace(edge, batch_invariant=True)):
        d.store.save(DEVICE.gpu, DEVICE.environment, recorded(key, result("blas", 9.0)))
        d.untried.note(key, set(), {("left", "1"): Obstacle("passing", "no memory")})
        able = d.able(key, mine)
        assert d.untried.missing(key, able, d.record_of(key)) == []
        with (
            pytest.warns(TmmWarning, match="no memory") if key is edge else contextlib.nullcontext()
        ):
            assert d.on_record(key, able, mine, tune=True) == d.record_of(key)
    assert d.choose(edge, mine).candidate.kernel.name == "blas"
    assert timer.measured == []
    d.tune(edge, mine)
    assert set(timer.measured) >= {"left"}


@pytest.mark.parametrize(
    ("tune", "force", "compiled"),
    [(True, False, [16, 64, 64, 256, 256]), (True, True, []), (False, False, [])],
)
def test_rungs_are_compiled_ahead_of_a_measurement(
    tune: bool, force: bool, compiled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rung compiles during the previous measurement; a forced measurement compiles its own."""
    kernel = Summing("k", {1: "one"})
    d, _ = dispatcher(FakeBlas(), kernel)
    known = {16: 5.0, 64: 6.0, 256: 7.0}
    ahead: list[int] = []
    asked: list[Any] = []

    def on_record(key: Problem, able: Any, settings: Any, tune: bool, force: bool) -> Any:
        asked.append((key.m, tune, force))
        return recorded(key, result("k", known[key.m], config={"tile": 1}))

    monkeypatch.setattr(d, "on_record", on_record)
    monkeypatch.setattr(d, "prepare", lambda rung, settings: ahead.append(rung.m))
    monkeypatch.setattr(
        d._invariance._host, "candidate", lambda *_: Candidate(kernel, FakeConfig())
    )
    rungs: list[Any] = [(weight_problem(m), [kernel]) for m in known]
    assert d._invariance._measured(rungs, settings(), tune, force) == "one"
    assert asked == [(m, tune, force) for m in known]
    assert ahead == compiled


@pytest.mark.parametrize(("mode", "raced"), [("tune", True), ("background", False)])
def test_a_choice_lasts_once_its_race_is_run(
    mode: Any, raced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A race in the background may still replace the choice."""
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    record = recorded(problem(m=64), result("fast", 5.0, config={"tile": 1}), result("blas", 9.0))
    d.store.save(DEVICE.gpu, DEVICE.environment, record)
    monkeypatch.setattr(d, "raced", lambda query, choice: raced)
    for m in (64, 50):
        choice = d.choose(problem(m=m), settings(on_cache_miss=mode))
        assert (choice.origin, choice.lasting) == ("cache", raced)
    quiet = d.choose(problem(), settings(on_cache_miss="heuristic"))
    assert quiet.lasting  # the mode measures nothing


def test_a_record_of_the_exact_size_answers_although_it_lacks_a_kernel(tmp_path: Path) -> None:
    """It was measured on purpose; a call completes only its bucket's record."""
    d, timer = dispatcher(FakeBlas(), FakeKernel("old"), FakeKernel("new"), root=tmp_path)
    exact = recorded(problem(m=50), result("old", 5.0, config={"tile": 1}), result("blas", 9.0))
    d.store.save(DEVICE.gpu, DEVICE.environment, exact)
    choice = d.choose(problem(m=50), settings())
    assert (choice.candidate.kernel.name, choice.origin) == ("old", "cache")
    assert timer.measured == []
    d.choose(problem(m=64), settings())
    assert {*timer.measured} == {"blas", "old", "new"}


def test_a_verdict_counts_in_a_process_that_lacks_all_kernels_that_were_timed(
    tmp_path: Path,
) -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("wrong"), root=tmp_path)
    wrong = revised(result("wrong", 5.0, config={"tile": 1}), samples_us=(), status="wrong")
    record = recorded(problem(), result("absent", 3.0), wrong)
    d.store.save(DEVICE.gpu, DEVICE.environment, record)
    assert d.choose(problem(), settings()).candidate.kernel.name == "blas"
    assert {*timer.measured} == {"blas"}


def test_a_record_whose_kernels_name_no_arithmetic_is_not_a_rung() -> None:
    kernel = Summing("k", {1: "one", 2: None})
    d, _ = dispatcher(FakeBlas(), kernel)
    rung = weight_problem(64)
    able: list[Any] = [kernel]
    blas = result("blas", 9.0, config={"tile": 1}, inside_us={33: 8.0})
    one, none = (
        result("k", us, config={"tile": tile}, inside_us={33: 7.0})
        for us, tile in ((5.0, 1), (4.0, 2))
    )
    for results in ((blas,), (none, blas), (revised(blas, samples_us=(), status="failed"),)):
        assert d._invariance._known(rung, able, recorded(rung, *results)) is None
    found = d._invariance._known(rung, able, recorded(rung, one, none, blas))
    assert found is not None
    assert (found.best_us, found.times) == (4.0, {"one": 5.0})
    assert [(each.best_us, each.times) for each in found.inside] == [(7.0, {"one": 7.0})]


@pytest.mark.parametrize(("noted", "left"), [(None, "two"), ("one", "one")])
def test_a_weight_keeps_the_note_of_an_arithmetic_that_is_not_offered_now(
    noted: str | None, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where its kernel is used again, the weight has the bits that it had."""
    d, _ = dispatcher(FakeBlas(), FakeKernel("k"), root=tmp_path)
    known = {} if noted is None else {"weight": noted}
    notes = SimpleNamespace(get=known.get, add=known.__setitem__)
    mine = d._invariance
    for name, value in {
        "_notes_of": notes, "_rungs": [], "_is_offered": False, "_measured": "two",
    }.items():  # fmt: skip
        monkeypatch.setattr(mine, name, lambda *_, value=value: value)
    with pytest.warns(TmmWarning, match="one by which") if noted else contextlib.nullcontext():
        assert mine._resolved(problem(batch_invariant=True), "weight", settings()) == "two"
    assert known == {"weight": left}


def test_which_devices_records_are_comparable() -> None:
    gpu = replace(DEVICE, type="cuda")
    same = SimpleNamespace(gpu=gpu.gpu, environment=gpu.environment)
    older = SimpleNamespace(gpu=gpu.gpu, environment={"torch": "1"})
    alike = {"capability": [9, 0], "sm_count": 114}
    assert _rank(same, gpu) == (0, 0)
    assert _rank(older, gpu) == (1, 0)
    for environment, found in (
        (alike, (2, 18)), ({**alike, "sm_count": 140}, (2, 8)), ({**alike, "sm_count": "x"}, None),
        ({**alike, "capability": [8, 0]}, None), ({"capability": [9, 0]}, None), (None, None),
    ):  # fmt: skip
        other = SimpleNamespace(gpu="another", environment=environment)
        assert _rank(other, gpu) == found
        assert _rank(other, DEVICE) is None  # a CPU


def test_the_cost_of_an_arithmetic_at_the_edge_and_inside() -> None:
    """It counts where it was timed, also where it was timed at the edge alone."""
    inside = [Rung(5.0, {"a": 10.0}), Rung(8.0, {"b": 8.0})]
    rung = Rung(10.0, {"a": 10.0, "b": 12.0, "c": 20.0}, inside)
    assert rung.regrets("a") == [0.0, math.log(2.0)]
    assert rung.regrets("b") == [math.log(12.0 / 10.0), 0.0]
    assert rung.regrets("c") == [math.log(2.0)]
    assert rung.regrets("d") == []
