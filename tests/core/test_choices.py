"""A dispatcher remembers its choices: each serves the calls that it fits, and no others.

One Settings object throughout, since choices are remembered by its identity."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import DEVICE, FakeBlas, FakeKernel, dispatcher, problem, settings
from msgspec.structs import replace as revised
from tmm_cache import CandidateResult, TuningRecord

from tmm_core import TmmWarning, Traits
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.launch.plan import Choice
from tmm_core.spec.bucket import bucket_edge
from tmm_core.spec.problem import Problem

#: Requirements of a call, each with the traits of a kernel that does not meet it.
REQUIREMENTS = {
    "deterministic": Traits(deterministic=False, batch_invariant=True),
    "batch_invariant": Traits(batch_invariant=False),
    "capturing": Traits(capture_safe=False, batch_invariant=True),
}


def name(choice: Choice) -> str:
    return choice.candidate.kernel.name


def loose_and_firm(requirement: str) -> tuple[Dispatcher, Any]:
    """A dispatcher whose fastest kernel cannot meet the requirement; the next kernel can."""
    firm = Traits(batch_invariant=True)
    kernels = (
        FakeKernel("loose", traits=REQUIREMENTS[requirement]),
        FakeKernel("firm", traits=firm),
    )
    times = {"loose": 5.0, "firm": 10.0, "blas": 20.0}
    return dispatcher(FakeBlas(traits=firm), *kernels, times=times)


def test_these_are_all_the_requirements() -> None:
    bare, met = problem(), problem(**dict.fromkeys(REQUIREMENTS, True))
    # One of the requirements has separate records.
    assert met.to_json() == bare.to_json() | {"batch_invariant": True}
    assert replace(met, **dict.fromkeys(REQUIREMENTS, False)) == bare


@pytest.mark.parametrize("requirement", REQUIREMENTS)
@pytest.mark.parametrize("m", [256, 250])
@pytest.mark.slow(quick=6)
def test_a_remembered_choice_is_checked_against_requirements(requirement: str, m: int) -> None:
    d, _ = loose_and_firm(requirement)
    one = settings()
    required = problem(m=m, **{requirement: True})
    for _ in range(2):
        assert name(d.choose(problem(m=m), one)) == "loose"
        assert name(d.choose(required, one)) == "firm"


@pytest.mark.parametrize("requirement", REQUIREMENTS)
@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.slow(quick=6)
def test_a_choice_that_was_required_is_not_imposed_on_all(requirement: str, tuned: bool) -> None:
    """Nor is an untuned choice, if a requirement forbids measuring."""
    d, _ = loose_and_firm(requirement)
    one = settings()
    if tuned:
        d.tune(problem(m=256), one)
    guessed = not tuned and requirement != "batch_invariant"
    required = problem(m=256, **{requirement: True})
    assert name(d.choose(required, one)) == ("blas" if guessed else "firm")
    assert name(d.choose(problem(m=256), one)) == "loose"


def test_a_choice_is_remembered_for_its_settings() -> None:
    d, timer = loose_and_firm("deterministic")
    one, without = settings(), settings(disable=frozenset({"loose"}))
    assert name(d.choose(problem(), one)) == "loose"
    assert name(d.choose(problem(), without)) == "firm"
    assert name(d.choose(problem(), one)) == "loose"
    timer.measured.clear()
    d.choose(problem(), one)
    assert timer.measured == []


def test_a_choice_does_not_answer_another_problem() -> None:
    """Every field of a problem other than sizes and requirements."""
    d, _ = dispatcher(
        FakeBlas(),
        FakeKernel("fast", against=lambda p: ["is scaled"] if p.scaled else []),
        times={"fast": 5.0, "blas": 20.0},
    )
    one = settings()
    assert name(d.choose(problem(), one)) == "fast"
    assert name(d.choose(problem(scaled=True), one)) == "blas"
    assert name(d.choose(problem(n=64), one)) == "fast"


# -- quarantine --------------------------------------------------------------------------


def quarantined(m: int) -> tuple[Dispatcher, Any]:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times={"fast": 5.0, "blas": 20.0})
    one = settings()
    choice = d.choose(problem(m=m), one)
    assert name(choice) == "fast"
    with pytest.warns(TmmWarning, match="fast failed on .*boom"):
        d.quarantine(problem(m=m), choice, RuntimeError("boom"))
    return d, one


@pytest.mark.parametrize("requirements", [{}, {"deterministic": True}, {"capturing": True}])
@pytest.mark.slow
def test_a_quarantine_holds_for_the_bucket(requirements: dict[str, bool]) -> None:
    d, one = quarantined(63)
    for m in (33, 40, 62, 63, 64):
        instance = problem(m=m, **requirements)
        assert name(d.choose(instance, one)) == "blas", m
        assert "boom" in d.rejections(instance, one)["fast"][-1]
    for m in (32, 65, 80):
        assert name(d.choose(problem(m=m), one)) == "fast", m
        assert "fast" not in d.rejections(problem(m=m), one)


def test_requirements_at_the_failure_do_not_matter() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times={"fast": 5.0, "blas": 20.0})
    one = settings()
    choice = d.choose(problem(), one)
    with pytest.warns(TmmWarning, match="boom"):
        d.quarantine(problem(capturing=True), choice, RuntimeError("boom"))
    assert name(d.choose(problem(), one)) == "blas"


def test_an_exact_record_does_not_bring_back_a_quarantined_kernel(tmp_path: Path) -> None:
    kernels = FakeBlas(), FakeKernel("fast")
    d, _ = dispatcher(*kernels, times={"fast": 5.0, "blas": 20.0}, root=tmp_path)
    one = settings()
    d.tune(problem(m=60), one)
    choice = d.choose(problem(m=63), one)
    with pytest.warns(TmmWarning, match="boom"):
        d.quarantine(problem(m=63), choice, RuntimeError("boom"))
    assert name(d.choose(problem(m=60), one)) == "blas"


# -- what changes under a choice ---------------------------------------------------------


def result(kernel: str, us: float) -> CandidateResult:
    return CandidateResult(kernel, "1", {"tile": 1}, "ok", (us, us, us))


def record(problem: Problem, winner: int, *candidates: CandidateResult) -> TuningRecord:
    created = "2026-01-31T12:00:00+00:00"
    return TuningRecord(problem.to_json(), winner, candidates, created, 1.0)


@pytest.mark.parametrize("m", [64, 63])
def test_an_adopted_record_replaces_earlier_choices(m: int) -> None:
    """Otherwise ranks that have chosen already would differ from those that have not."""
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times={"fast": 5.0, "blas": 20.0})
    one = settings()
    assert name(d.choose(problem(m=m), one)) == "fast"
    d.adopt(problem(), record(problem(), 0, result("blas", 10.0), result("fast", 12.0)))
    timer.measured.clear()
    assert name(d.choose(problem(m=m), one)) == "blas"
    assert timer.measured == []


def test_an_adopted_record_answers_under_capture() -> None:
    """The rank that measured the record verified the winner, so it answers on all ranks."""
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"))
    d.adopt(problem(), record(problem(), 1, result("blas", 20.0), result("fast", 12.0)))
    choice, _ = d.bound(problem(capturing=True), settings())
    assert name(choice) == "fast"


def test_an_adopted_record_is_a_neighbour_at_once() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"))
    guess = settings(on_cache_miss="heuristic")
    assert d.choose(problem(), guess).origin == "fallback"
    d.adopt(problem(n=64), record(problem(n=64), 1, result("blas", 20.0), result("fast", 12.0)))
    near = d.choose(problem(), guess)
    assert (near.origin, name(near)) == ("neighbour", "fast")


def test_tuning_replaces_earlier_choices() -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times={"fast": 5.0, "blas": 20.0})
    one = settings()
    assert name(d.choose(problem(), one)) == "fast"
    timer.times = {"fast": 30.0, "blas": 20.0}
    assert name(d.choose(problem(), one)) == "fast"
    d.tune(problem(), one, force=True)
    assert name(d.choose(problem(), one)) == "blas"


def test_an_untuned_choice_does_not_outlive_its_settings() -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times={"fast": 5.0, "blas": 20.0})
    guess, one = settings(on_cache_miss="heuristic"), settings()
    assert name(d.choose(problem(), guess)) == "blas"
    assert name(d.choose(problem(), one)) == "fast"


# -- neighbours --------------------------------------------------------------------------


def guessed(problem: Problem, *tuned: Problem, tiles: Sequence[int] = (1, 2, 3)) -> Choice:
    """The untuned choice. The best tile of each tuned problem is its place in the list, from 1."""
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast", tiles=tiles))
    for tile, other in enumerate(tuned, 1):
        timer.times = {("fast", tile): 5.0, "blas": 20.0}
        d.tune(other, settings())
    return d.choose(problem, settings(on_cache_miss="heuristic"))


H200 = replace(DEVICE, type="cuda")


def test_a_gpu_of_the_same_capability_is_a_neighbour() -> None:
    """The capability is a list in a record that was read, and a tuple on the device."""
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"))
    other = replace(H200, name="Fake H100", sm_count=114)
    for device in (other, replace(other, name="Fake A100", capability=(8, 0))):
        instance = replace(problem(n=64), device=device)
        d.store.save(
            device.gpu,
            device.environment,
            record(instance, 1, result("blas", 20.0), result("fast", 5.0)),
        )
    choice = d.choose(problem(device=H200), settings(on_cache_miss="heuristic"))
    assert (choice.origin, name(choice)) == ("neighbour", "fast")
    assert "114" in choice.reason or other.gpu in choice.reason
    older = replace(H200, capability=(7, 5), name="Fake T4")
    assert d.choose(problem(device=older), settings(on_cache_miss="heuristic")).origin == "fallback"


@pytest.mark.parametrize("sms", [(60, 130), (130, 60), (300, 130), (130, 300), (134, 60)])
def test_the_gpu_with_equally_many_sms_is_the_nearest(sms: tuple[int, int]) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast", tiles=(1, 2)))
    for tile, count in enumerate(sms, 1):
        device = replace(H200, name=f"Fake {count}", sm_count=count)
        results = (
            result("blas", 20.0),
            revised(result("fast", 5.0), config={"tile": tile}),
        )
        d.store.save(device.gpu, device.environment, record(problem(device=device), 1, *results))
    choice = d.choose(problem(device=H200), settings(on_cache_miss="heuristic"))
    nearest = min(range(2), key=lambda place: abs(sms[place] - 132)) + 1
    assert choice.candidate.config.to_json() == {"tile": nearest}


@pytest.mark.parametrize(
    ("sizes", "nearest"),
    [
        ([{"n": 16}, {"n": 40}], 2),
        ([{"n": 40}, {"n": 16}], 1),
        ([{"m": 16}, {"m": 128}], 2),
        ([{"m": 32, "n": 64}, {"m": 64, "n": 48}], 2),  # what is less here is more there
        ([{"n": 48}, {"k": 32}, {"batch": 2}], 1),
        ([{"batch": 4}, {"k": 24}], 2),
        ([{"m": 1}, {"n": 512}, {"batch": 5}], 0),  # all too far
        ([{"m": 16, "n": 512}], 0),  # and not made up for by being smaller elsewhere
    ],
)
@pytest.mark.slow(quick=6)
def test_the_nearest_is_least_octaves_away(sizes: list[dict[str, int]], nearest: int) -> None:
    choice = guessed(problem(), *(problem(**each) for each in sizes))
    if not nearest:
        assert choice.origin == "fallback"
        return
    assert choice.origin == "neighbour"
    assert choice.candidate.config.to_json() == {"tile": nearest}


# -- buckets -----------------------------------------------------------------------------


def test_every_bucket_up_to_a_thousand() -> None:
    edges = [1, 2, 4, 8, 16, 32, 64]
    for octave in (64, 128, 256, 512):
        edges += [octave * quarter // 4 for quarter in (5, 6, 7, 8)]
    for m in range(1, 1025):
        assert bucket_edge(m) == min(edge for edge in edges if edge >= m), m


@pytest.mark.parametrize("m", [*range(33, 65, 7), 63, 64])
def test_a_record_of_64_rows_serves_from_33(m: int, tmp_path: Path) -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times={"fast": 5.0}, root=tmp_path)
    d.tune(problem(m=64), settings())
    timer.measured.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = d.choose(problem(m=m), settings(on_cache_miss="error"))
    assert (choice.origin, name(choice)) == ("cache", "fast")
    assert timer.measured == []


# -- what a record is good for -----------------------------------------------------------


def test_times_of_another_version_decide_nothing(tmp_path: Path) -> None:
    times = {"fast": 5.0, "blas": 20.0}
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=times, root=tmp_path)
    d.tune(problem(), settings())
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast", version="2"), times=times, root=tmp_path)
    choice = d.choose(problem(), settings(on_cache_miss="heuristic"))
    assert (choice.origin, name(choice)) == ("cache", "blas")


def test_a_neighbours_config_must_be_one_of_this_problems() -> None:
    class Narrow(FakeKernel):
        """Has a second tile for wide outputs alone."""

        def configs(self, problem: Problem) -> list[Any]:
            return list(super().configs(problem))[: 1 if problem.n < 64 else 2]

    d, _ = dispatcher(
        FakeBlas(), Narrow("fast", tiles=(1, 2)), times={("fast", 1): 5.2, ("fast", 2): 5.0}
    )
    d.tune(problem(n=128), settings())
    guess = settings(on_cache_miss="heuristic")
    for n, tile in ((64, 2), (63, 1)):
        choice = d.choose(problem(n=n), guess)
        assert (choice.origin, choice.candidate.config.to_json()) == ("neighbour", {"tile": tile})
