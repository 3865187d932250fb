"""Limits of what is measured and of what is chosen: widths of buckets, ladders of M, distances of
neighbours, sizes of chains, ends of what has been timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import DEVICE, FakeBlas, FakeConfig, FakeKernel, dispatcher, problem, settings
from test_invariant import Summing, asked, chosen
from test_invariant import timed as timed_by_m
from test_tuner import result
from tmm_cache import CacheStore, TuningRecord

from tmm_core import Groups, TmmWarning
from tmm_core.dispatch import deferring
from tmm_core.dispatch.explanation import _measurements
from tmm_core.dispatch.invariant import LADDER, _at, _place, ladder, weight
from tmm_core.dispatch.lookup import Lookup
from tmm_core.dispatch.neighbour import Neighbours
from tmm_core.registry.registry import Registry
from tmm_core.spec.bucket import inside, probes
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
from tmm_core.tuning.untried import unmeasured

FP32 = torch.float32
COLUMN = Operand(FP32, "col")
GPU = replace(DEVICE, type="cuda", l2=50 * 2**20)


# -- buckets ------------------------------------------------------------------------------


def test_a_bucket_of_two_large_tiles_is_measured_at_two_m_and_a_wider_one_at_four() -> None:
    assert probes(2048) == (1793, 1921)  # 256 rows wide
    assert len(probes(2560)) == 4  # 512


def test_a_record_that_is_no_edge_is_measured_at_its_own_m_alone() -> None:
    assert inside(problem(m=64)) == (33, 49)
    assert inside(problem(m=63)) == inside(problem(m=65)) == ()


# -- the ladder of a weight ---------------------------------------------------------------


def test_every_matrix_of_a_rung_fits_the_limit() -> None:
    def rungs(**fields: Any) -> list[int]:
        return [rung.m for rung in ladder(asked(1, **fields))]

    assert rungs(k=2**20) == rungs(n=2**20) == [16, 64, 256]
    assert rungs(n=2**18, batch=4) == [16, 64, 256]
    assert rungs(n=2**18) == list(LADDER)  # the largest is 2**28, the limit itself
    assert rungs(n=2**18 + 8) == list(LADDER)[:-1]
    assert rungs(n=2**29) == [16]


def test_a_rung_is_of_dense_matrices() -> None:
    """One row of any length starts on 16 bytes; rows of 20 bytes do not all."""
    of = asked(9, k=5, n=5, residual=Operand(FP32, "strided", False))
    one, more = _at(of, 1), ladder(of)
    assert one.a.aligned
    assert one.out.aligned
    assert one.residual == Operand(FP32)
    assert not any(rung.a.aligned or rung.out.aligned for rung in more)
    assert {rung.residual for rung in more} == {Operand(FP32, aligned=False)}
    # In a gradient, rows of a are M long.
    gradient = ladder(asked(9, k=5, a=COLUMN))
    assert [rung.a.aligned for rung in gradient] == [m % 4 == 0 for m in LADDER]
    assert {rung.a.layout for rung in gradient} == {"col"}


def test_scales_are_of_a_weight_and_their_kind_is_not() -> None:
    eight = Operand(torch.float8_e4m3fn)
    row, tensor = (replace(eight, scale=Scale.parse(kind)) for kind in ("row", "tensor"))  # type: ignore[arg-type]
    scaled = asked(16, a=row, b=tensor)
    assert weight(scaled) == weight(replace(scaled, m=1, a=tensor))
    assert weight(scaled) != weight(replace(scaled, a=eight, b=eight))


def test_an_m_that_was_measured_is_not_taken_for_one_between() -> None:
    edge = asked(64)
    places = [_place(edge, m) for m in (32, 33, 34, 49, 50, 64)]
    assert len(set(places)) == len(places)
    assert _place(edge, 40) == _place(edge, 41) != _place(edge, 49)


def test_tuning_an_m_measures_its_bucket_once(tmp_path: Path) -> None:
    """A call inside a bucket is answered by the bucket's record: none is made of its own M."""
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: "one"}), root=tmp_path)
    timer = timed_by_m(d, {("blas", 1): 9.0, ("k", 1): 5.0})
    assert chosen(d, 100)[0] == "k"
    assert timer.tuned == [*LADDER, 112]


def test_what_force_measures_replaces_what_was_pinned(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), Summing("k", {1: "one", 2: "two"}), root=tmp_path)
    timed_by_m(d, {("blas", 1): 10.0, ("k", 1): 5.0, ("k", 2): 6.0})
    assert chosen(d, 16) == ("k", 1, "one")
    timed_by_m(d, {("blas", 1): 10.0, ("k", 1): 6.0, ("k", 2): 5.0})
    d.tune(asked(16), settings())
    assert chosen(d, 16) == ("k", 1, "one")
    d.tune(asked(16), settings(), force=True)
    assert chosen(d, 16) == ("k", 2, "two")


def test_what_a_capture_was_given_is_measured_after_it(tmp_path: Path) -> None:
    """The arithmetic stays, since the graph holds its bits; the config of it need not."""
    kernel = Summing("k", {1: "one", 2: "one"}, estimate=1.0)
    d, _ = dispatcher(FakeBlas(), kernel, root=tmp_path)
    timed_by_m(d, {("blas", 1): 10.0, ("k", 1): 6.0, ("k", 2): 5.0})
    given = settings()
    captured = d.choose(replace(asked(16), capturing=True), given)
    assert (captured.origin, captured.arithmetic) == ("heuristic", "one")
    after = d.choose(asked(16), given)
    assert (after.origin, after.candidate.config.to_json()) == ("cache", {"tile": 2})


# -- neighbours ---------------------------------------------------------------------------


def recorded(asked: Problem, *results: Any) -> TuningRecord:
    return TuningRecord(asked.to_json(), 0, results, "2026-01-31T12:00:00Z", 1.0)


def near(store: CacheStore, asked: Problem, *tuned: Problem) -> list[int]:
    for each in tuned:
        record = TuningRecord(
            each.to_json(), 0, (result("fast", 9.0),), "2026-01-31T12:00:00Z", 1.0
        )
        store.save(each.device.gpu, each.device.environment, record)
    return [found.record.problem["m"] for found in Neighbours(store).nearest(asked)]


def test_four_times_the_size_is_near_and_more_is_not(tmp_path: Path) -> None:
    store = CacheStore(tmp_path, [])
    tuned = [problem(m=m) for m in (15, 16, 256, 257)]
    assert sorted(near(store, problem(m=64), *tuned)) == [16, 256]


def test_a_problem_of_no_size_has_neighbours(tmp_path: Path) -> None:
    """As one of size 1: nothing has no logarithm."""
    store = CacheStore(tmp_path, [])
    assert near(store, problem(m=0), problem(m=2)) == [2]


@pytest.mark.parametrize(("estimate", "name"), [(9.0, "blas"), (8.9, "fast")])
def test_a_guess_has_to_be_a_tenth_faster_than_blas(
    estimate: float, name: str, tmp_path: Path
) -> None:
    blas, fast = FakeBlas(estimate=10.0), FakeKernel("fast", estimate=estimate)
    d, _ = dispatcher(blas, fast, root=tmp_path)
    choice = d.choose(problem(), settings(on_cache_miss="heuristic"))
    assert choice.candidate.kernel.name == name


def test_where_blas_cannot_serve_the_least_estimate_answers(tmp_path: Path) -> None:
    """And where it can but has no estimate, nothing is chosen over it."""
    guess = settings(on_cache_miss="heuristic")
    kernels = FakeKernel("slow", estimate=9.0), FakeKernel("fast", estimate=5.0)
    for against, origin, name in ((["not here"], "heuristic", "fast"), ([], "fallback", "blas")):
        blas = FakeBlas(against=lambda problem, against=against: against)
        d, _ = dispatcher(blas, *kernels, root=tmp_path)
        choice = d.choose(problem(), guess)
        assert (choice.origin, choice.candidate.kernel.name) == (origin, name)


# -- chains of calls ----------------------------------------------------------------------


def test_what_rotates_is_what_a_model_reads_anew() -> None:
    weight_alone, both = ("b",), ("a", "b")
    layer = problem(m=64, n=4096, k=4096, device=GPU)
    assert cold_operands.rotating(layer) == weight_alone
    assert cold_operands.rotating(replace(layer, batch=2)) == both
    assert (
        cold_operands.rotating(replace(layer, a=COLUMN)) == both
    )  # a gradient's a is no activation
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
    """One whose operands exceed every cache also follows another call."""
    large = problem(m=64, n=16384, k=16384, device=GPU)  # a weight of 1 GiB
    assert cold_operands.copies(large) == 2
    assert cold_operands.copies(large, limit=2**30) == 1
    small = problem(m=16, n=64, k=64, device=GPU)
    assert cold_operands.copies(small) == cold_operands.MOST_COPIES


def test_groups_are_drawn_in_turn_unless_their_results_fill_the_memory() -> None:
    grouped = problem(m=8, n=4, k=4, device=GPU, groups=Groups(2, "m"))
    inputs = cold_operands.random_inputs.make(replace(grouped, device=DEVICE), torch.device("cpu"))
    every = cold_operands.SIZE_SAMPLES * grouped.sizes["out"]
    assert (
        len(cold_operands.rotated(inputs, grouped, 1, limit=2 * every))
        == cold_operands.SIZE_SAMPLES
    )
    assert len(cold_operands.rotated(inputs, grouped, 1, limit=2 * every - 1)) == 1
    assert len(cold_operands.rotated(inputs, grouped, 20, limit=2 * every)) == max(
        20, cold_operands.SIZE_SAMPLES
    )


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


def test_what_a_round_did_to_all_is_taken_out_and_the_usual_pace_stays() -> None:
    """Two rounds of a slow clock among five: the medians stay µs of the others."""
    pace = [1.0, 1.0, 1.5, 1.0, 1.5]
    first, second = timing.normalised([[10 * p for p in pace], [20 * p for p in pace]])
    assert first == pytest.approx([10.0] * 5)
    assert second == pytest.approx([20.0] * 5)


# -- who won ------------------------------------------------------------------------------


def test_one_sample_less_is_not_the_whole_race() -> None:
    whole = replace(result("whole", 10.0), samples_us=(10.0,) * 5)
    nearly = replace(result("nearly", 9.0), samples_us=(9.0,) * 4)
    assert finalists([whole, nearly]) == [whole]
    assert decide([nearly, whole, replace(whole, kernel="blas")]) == 2


def test_of_two_ways_of_blas_the_faster_in_steady_state_is_the_bar() -> None:
    def steady(kernel: str, us: float, steady_us: float, **fields: Any) -> Any:
        return result(kernel, us, steady_us=steady_us, **fields)

    ways = [
        steady("blas", 100.0, 100.0, config={"fused": False}),
        steady("blas", 101.0, 120.0, config={"fused": True}),
    ]
    assert decide([*ways, steady("k", 90.0, 110.0)]) == 0
    assert decide([*ways, steady("k", 90.0, 101.0)]) == 2


def test_of_those_close_in_bursts_alone_steady_state_decides() -> None:
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
    """M is another size of the problem, at which nothing was compared."""
    edge = replace(problem(m=49, n=49, k=49), groups=Groups(2, along)).at(64)
    k = result("k", 5.0, inside_us={33: 6.0})
    blas = result("blas", 10.0, inside_us={33: 10.0, 49: 10.0})
    record = recorded(edge, k, blas)
    assert (record.along, record.extent) == (along, 64)
    assert record.measured_at == (33, 49, 64)
    assert compared_at(record) == [33, 64]
    columns, _ = _measurements(record)
    assert columns[1:4:2] == (f"µs at {along.upper()}=64", f"µs at {along.upper()}=33")


def test_before_the_first_m_that_was_measured_blas_answers(tmp_path: Path) -> None:
    """A bucket has a first M, but what was measured may begin after it."""
    times = {("fast", 1): 5.0, "blas": 10.0}
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=times, root=tmp_path)
    record = d.tune(problem(m=64), settings())
    late = [replace(each, inside_us={49: each.samples_us[0]}) for each in record.candidates]
    d.store.save(DEVICE.gpu, DEVICE.environment, replace(record, candidates=tuple(late)))
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
    return Search(problem(**fields), kernels, kernels, None, given)


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


def test_the_best_ratio_of_a_kernel_scales_its_estimates() -> None:
    """One that took less than expected says of the others that they may, too."""

    class Sloped(FakeKernel):
        def estimate_us(self, problem: Problem, config: FakeConfig) -> float:
            return 10.0 + config.tile / 100

    kernel = Sloped("k", tiles=(1, 2, 3, 4))
    search = proposed(FakeBlas(estimate=20.0), kernel)
    search._first = 3
    tried = [each for each in search.first() if each.kernel is kernel]
    assert [each.config.tile for each in tried] == [1, 2]
    # The first took half of what was expected, the second all of it: by the first, the others
    # may be the fastest.
    more = search.next_batch({tried[0]: 5.0, tried[1]: 10.0})
    assert [each.config.tile for each in more] == [3, 4]


def test_when_all_have_been_tried_nothing_is() -> None:
    search = proposed(FakeBlas(), FakeKernel("k", tiles=range(1, 60)))
    times = {Candidate(FakeKernel("x"), FakeConfig(tile=i)): 1.0 for i in range(1, 60)}
    assert search.next_batch(times) == []


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
            raise RuntimeError("not today")

    asked = problem()
    for kernel, wanted in ((Kernel("k"), True), (Raising("k"), False)):
        record = TuningRecord(
            asked.to_json(), 0, (result("k", 5.0, config={"tile": "?"}),), "", 1.0
        )
        assert unmeasured(asked, [kernel], record) == []
        promised = replace(asked, static_weights=True)
        assert unmeasured(promised, [kernel], record) == ([kernel] if wanted else [])


def test_a_quarantine_is_the_reason_in_its_own_bucket_alone() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("k"), times={"k": 5.0, "blas": 10.0})
    choice = d.choose(problem(m=64), settings())
    with pytest.warns(TmmWarning, match="failed on"):
        d.quarantine(problem(m=64), choice, RuntimeError("boom"))
    there = d.rejections(problem(m=40), settings())
    assert any("quarantined" in reason for reason in there["k"])
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
