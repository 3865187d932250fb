"""What nobody verified on this machine is verified before its first result is used."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import DEVICE, FakeBlas, FakeKernel, FakeTimer, Faulty, plugin, problem, settings
from tmm_cache import CacheStore

from tmm_core import TmmWarning, Traits
from tmm_core.dispatch import fixture, trust
from tmm_core.dispatch.ladder import Dispatcher
from tmm_core.dispatch.registry import Registry
from tmm_core.dispatch.tuner import Tuner
from tmm_core.settings import Settings
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.problem import Problem

FAST = {"fast": 10.0, "blas": 20.0}
GUESS = settings(on_cache_miss="heuristic")


class Counting(Faulty):
    """Right, and counts its launches."""

    def __init__(self, name: str = "fast", wrong: bool = False, **fields: Any) -> None:
        super().__init__(self._count, name, estimate=1.0, **fields)
        self.launches, self.wrong = 0, wrong

    def _count(self, right: Any, *rest: Any) -> Any:
        self.launches += 1
        result = right(*rest)
        return result.add_(1) if self.wrong else result


def dispatcher(kernel: FakeKernel, store: CacheStore) -> Dispatcher:
    registry = Registry()
    registry.register(plugin(FakeBlas(estimate=100.0), kernel), "fakes")
    return Dispatcher(registry, Tuner(FakeTimer(FAST)), store)


def name(d: Dispatcher, asked: Problem, how: Settings = GUESS) -> str:
    choice, launcher = d.bound(asked, how)
    shape = (asked.m, asked.k), (asked.k, asked.n)
    a, b = (torch.randn(size) for size in shape)
    torch.testing.assert_close(launcher(a, b, None, None, 1.0, None), a @ b)
    return choice.candidate.kernel.name


def shipped(root: Path) -> Path:
    """A folder of records in which ``fast`` won."""
    dispatcher(FakeKernel("fast"), CacheStore(root, [])).choose(problem(), settings())
    assert list(root.rglob("*.json"))
    return root


def test_a_wrong_guess_is_never_used(tmp_path: Path) -> None:
    kernel = Counting(wrong=True)
    d = dispatcher(kernel, CacheStore(tmp_path, []))
    with pytest.warns(TmmWarning, match="fast was wrong at its first use .* exceeds"):
        assert name(d, problem()) == "blas"
    launches = kernel.launches
    assert name(d, problem()) == "blas"  # silently
    assert kernel.launches == launches
    assert "exceeds" in d.rejections(problem(), GUESS)["fast"][0]
    # Another bucket: the distribution has had its warning.
    assert name(d, problem(m=128)) == "blas"
    assert "exceeds" in d.rejections(problem(m=128), GUESS)["fast"][0]


def test_a_right_guess_is_verified_once(tmp_path: Path) -> None:
    kernel = Counting()
    d = dispatcher(kernel, CacheStore(tmp_path, []))
    assert d.choose(problem(), GUESS).candidate.kernel.kernel is kernel
    assert kernel.launches == 0  # explain() launches nothing
    assert name(d, problem()) == "fast"
    assert kernel.launches == 2 + 1
    assert name(d, problem()) == "fast"
    assert name(d, problem(m=50)) == "fast"  # of the same bucket
    assert kernel.launches == 2 + 3


def test_stamps_last(tmp_path: Path) -> None:
    kernel = Counting()
    assert name(dispatcher(kernel, CacheStore(tmp_path, [])), problem()) == "fast"
    again = Counting()
    assert name(dispatcher(again, CacheStore(tmp_path, [])), problem()) == "fast"
    assert (kernel.launches, again.launches) == (3, 1)
    edited = Counting(version="2", wrong=True)
    with pytest.warns(TmmWarning, match="wrong at its first use"):
        assert name(dispatcher(edited, CacheStore(tmp_path, [])), problem()) == "blas"


def test_a_record_from_elsewhere_is_verified(tmp_path: Path) -> None:
    layer = shipped(tmp_path / "layer")
    kernel = Counting()
    d = dispatcher(kernel, CacheStore(tmp_path / "own", [layer]))
    assert name(d, problem(), settings()) == "fast"
    assert kernel.launches == 3
    again = Counting()  # the stamp of the first
    assert name(dispatcher(again, CacheStore(tmp_path / "own", [layer])), problem()) == "fast"
    assert again.launches == 1
    wrong = Counting(wrong=True)
    d = dispatcher(wrong, CacheStore(tmp_path / "another", [layer]))
    with pytest.warns(TmmWarning, match="wrong at its first use"):
        assert name(d, problem(), settings()) == "blas"


def test_a_record_of_ones_own_is_not(tmp_path: Path) -> None:
    kernel = Counting()
    d = dispatcher(kernel, CacheStore(shipped(tmp_path), []))
    assert name(d, problem(), settings()) == "fast"
    assert kernel.launches == 1
    tuned = Counting()
    d = dispatcher(tuned, CacheStore(tmp_path / "new", []))
    assert d.bound(problem(), settings())[0].origin == "tuned"
    launches = tuned.launches
    assert name(d, problem(), settings()) == "fast"
    assert tuned.launches == launches + 1


def test_a_neighbours_winner_is_a_guess(tmp_path: Path) -> None:
    wrong = Counting(wrong=True)
    d = dispatcher(wrong, CacheStore(shipped(tmp_path), []))
    assert d.choose(problem(n=64), GUESS).origin == "neighbour"
    with pytest.warns(TmmWarning, match="wrong at its first use"):
        assert name(d, problem(n=64)) == "blas"


def test_under_capture_blas_answers(tmp_path: Path) -> None:
    kernel = Counting()
    d = dispatcher(kernel, CacheStore(tmp_path / "own", [shipped(tmp_path / "layer")]))
    capturing = problem(capturing=True)
    choice, _ = d.bound(capturing, settings())
    assert choice.candidate.kernel.name == "blas"
    assert "never verified on this machine, and a CUDA graph" in choice.reason
    assert kernel.launches == 0
    assert name(d, problem(), settings()) == "fast"
    assert d.bound(capturing, settings())[0].candidate.kernel.kernel is kernel


def test_what_memory_does_not_suffice_for_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Counting()
    d = dispatcher(kernel, CacheStore(tmp_path, []))
    monkeypatch.setattr(fixture, "default_limit", lambda device, most=0: 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice, _ = d.bound(problem(), GUESS)
    assert choice.candidate.kernel.name == "blas"
    assert "MiB of memory" in choice.reason
    assert kernel.launches == 0

    def exhausted(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.undo()
    d = dispatcher(Faulty(exhausted, "fast", estimate=1.0), CacheStore(tmp_path, []))
    choice, _ = d.bound(problem(), GUESS)
    assert "no memory" in choice.reason


def test_what_raises_at_its_first_use_costs_itself(tmp_path: Path) -> None:
    def explode(*arguments: Any) -> Any:
        raise RuntimeError("illegal address")

    d = dispatcher(Faulty(explode, "fast", estimate=1.0), CacheStore(tmp_path, []))
    with pytest.warns(TmmWarning, match="fast failed on .*illegal address"):
        assert name(d, problem()) == "blas"
    choice, launcher = d.bound(problem(), settings(kernel="fast"))  # the caller's word
    assert choice.origin == "forced"
    with pytest.raises(RuntimeError, match="illegal address"):
        launcher(*[torch.empty(0)] * 2, None, None, 1.0, None)


def test_interpreted_kernels_are_left_to_their_authors(tmp_path: Path) -> None:
    kernel = Counting(wrong=True)
    d = dispatcher(kernel, CacheStore(tmp_path, []))
    asked = problem(device=replace(DEVICE, interpreted=True))
    assert d.bound(asked, GUESS)[0].candidate.kernel.kernel is kernel
    assert kernel.launches == 0


def test_batch_invariant_mode_is_no_way_around(tmp_path: Path) -> None:
    wrong = Counting(wrong=True, traits=Traits(batch_invariant=True))
    registry = Registry()
    blas = FakeBlas(estimate=100.0, traits=Traits(batch_invariant=True))
    registry.register(plugin(blas, wrong), "fakes")
    d = Dispatcher(registry, Tuner(FakeTimer(FAST)), CacheStore(tmp_path, []))
    with pytest.warns(TmmWarning) as said:
        choice, _ = d.bound(problem(batch_invariant=True), GUESS)
    assert choice.candidate.kernel.name == "blas"
    first, then = (str(warning.message) for warning in said)
    assert "fast was wrong at its first use" in first
    assert "its rows differ" in then


def invariant(kernel: FakeKernel, store: CacheStore) -> Dispatcher:
    registry = Registry()
    registry.register(plugin(FakeBlas(), kernel), "fakes")
    return Dispatcher(registry, Tuner(FakeTimer(FAST)), store)


def test_batch_invariant_records_of_ones_own_hold_under_capture(tmp_path: Path) -> None:
    traits = Traits(batch_invariant=True)
    asked = problem(m=40, batch_invariant=True)
    invariant(Counting(traits=traits), CacheStore(tmp_path, [])).tune(asked, settings())
    again = Counting(traits=traits)
    d = invariant(again, CacheStore(tmp_path, []))
    choice, _ = d.bound(replace(asked, capturing=True), GUESS)
    assert (choice.origin, choice.candidate.kernel.kernel) == ("cache", again)
    assert again.launches == 0


def test_where_blas_takes_the_place_of_batch_invariance_it_is_said(tmp_path: Path) -> None:
    guessed = Counting(traits=Traits(batch_invariant=True))
    d = invariant(guessed, CacheStore(tmp_path, []))
    asked = problem(batch_invariant=True, capturing=True)
    with pytest.warns(TmmWarning, match="BLAS, which is not batch-invariant: .* being captured"):
        choice, _ = d.bound(asked, GUESS)
    assert choice.candidate.kernel.name == "blas"
    assert guessed.launches == 0


def test_a_warning_made_an_error_is_not_the_kernels_fault(tmp_path: Path) -> None:
    guessed = Counting(traits=Traits(batch_invariant=True))
    d = invariant(guessed, CacheStore(tmp_path, []))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TmmWarning, match="BLAS, which is not batch-invariant"):
            d.bound(problem(batch_invariant=True, capturing=True), GUESS)
    choice, _ = d.bound(problem(batch_invariant=True), GUESS)
    assert choice.candidate.kernel.kernel == guessed


def test_a_stamp_is_for_one_kernel_config_bucket_and_version() -> None:
    kernel = FakeKernel("k", tiles=(1, 2))
    one, two = (Candidate(kernel, config) for config in kernel.configs(problem()))
    key = trust._key(problem(), one)
    assert key == trust._key(problem(m=50, deterministic=True), one)
    others = [
        trust._key(problem(), two),
        trust._key(problem(m=65), one),
        trust._key(problem(bias=torch.float32), one),
        trust._key(problem(), Candidate(FakeKernel("other"), one.config)),
        trust._key(problem(), Candidate(FakeKernel("k", version="2"), one.config)),
    ]
    assert len({key, *others}) == 6
