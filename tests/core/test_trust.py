"""A kernel that was not verified on this machine is verified before its first result is used."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import (
    DEVICE,
    FakeBlas,
    FakeConfig,
    FakeKernel,
    FakeTimer,
    Faulty,
    Tuner,
    plugin,
    problem,
    settings,
)
from tmm_cache import CacheStore

from tmm_core import Groups, PluginError, TmmWarning, Traits
from tmm_core.dispatch import first_use
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.launch.plan import Choice
from tmm_core.registry.registry import Registry
from tmm_core.settings import Settings
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.problem import Problem
from tmm_core.verify import data_sets

FAST = {"fast": 10.0, "blas": 20.0}
UNTUNED = settings(on_cache_miss="heuristic")
#: Launches of a verification at first use, and at further sizes.
FIRST, BRIEF = 3, 2


class Counting(Faulty):
    """Counts its launches. It is right, unless ``wrong``, and except at the M of ``wrong_at``."""

    def __init__(
        self, name: str = "fast", wrong: bool = False, wrong_at: Sequence[int] = (), **fields: Any
    ) -> None:
        super().__init__(self._count, name, estimate=1.0, **fields)
        self.launches, self.wrong, self.wrong_at = 0, wrong, wrong_at

    def _count(self, right: Any, *rest: Any) -> Any:
        self.launches += 1
        result = right(*rest)
        return result.add_(1) if self.wrong or len(rest[0]) in self.wrong_at else result


def dispatcher(kernel: FakeKernel, store: CacheStore) -> Dispatcher:
    registry = Registry()
    registry.register(plugin(FakeBlas(estimate=100.0), kernel), "fakes")
    return Dispatcher(registry, Tuner(FakeTimer(FAST)), store)


def name(d: Dispatcher, problem: Problem, how: Settings = UNTUNED) -> str:
    """The kernel that answers the problem, after a check of its result."""
    choice, launcher = d.bound(problem, how)
    shape = (problem.m, problem.k), (problem.k, problem.n)
    a, b = (torch.randn(size) for size in shape)
    torch.testing.assert_close(launcher(a, b, None, None, 1.0, None), a @ b)
    return choice.candidate.kernel.name


def shipped(root: Path) -> Path:
    """A folder of records in which ``fast`` won."""
    dispatcher(FakeKernel("fast"), CacheStore(root, [])).choose(problem(), settings())
    assert list(root.rglob("*.json"))
    return root


def test_a_wrong_untuned_choice_is_never_used(tmp_path: Path) -> None:
    kernel = Counting(wrong=True)
    d = dispatcher(kernel, CacheStore(tmp_path, []))
    with pytest.warns(TmmWarning, match="fast was wrong at its first use .* exceeds"):
        assert name(d, problem()) == "blas"
    launches = kernel.launches
    assert name(d, problem()) == "blas"  # silently
    assert kernel.launches == launches
    assert "exceeds" in d.rejections(problem(), UNTUNED)["fast"][0]
    # In another bucket there is no second warning for the same distribution.
    assert name(d, problem(m=128)) == "blas"
    assert "exceeds" in d.rejections(problem(m=128), UNTUNED)["fast"][0]


def test_a_right_untuned_choice_is_verified_once(tmp_path: Path) -> None:
    kernel = Counting()
    d = dispatcher(kernel, CacheStore(tmp_path, []))
    assert d.choose(problem(), UNTUNED).candidate.kernel.kernel is kernel
    assert kernel.launches == 0  # explain() launches nothing
    assert name(d, problem()) == "fast"
    assert kernel.launches == FIRST + 1
    assert name(d, problem()) == "fast"
    assert kernel.launches == FIRST + 2
    assert name(d, problem(m=50)) == "fast"  # another size of the bucket
    assert kernel.launches == FIRST + 2 + BRIEF + 1
    assert name(d, problem(m=50)) == "fast"
    assert kernel.launches == FIRST + 2 + BRIEF + 2


def test_a_kernel_is_verified_once_for_all_processes(tmp_path: Path) -> None:
    kernel = Counting()
    assert name(dispatcher(kernel, CacheStore(tmp_path, [])), problem()) == "fast"
    again = Counting()
    assert name(dispatcher(again, CacheStore(tmp_path, [])), problem()) == "fast"
    assert (kernel.launches, again.launches) == (FIRST + 1, 1)
    edited = Counting(version="2", wrong=True)
    with pytest.warns(TmmWarning, match="wrong at its first use"):
        assert name(dispatcher(edited, CacheStore(tmp_path, [])), problem()) == "blas"


def test_a_record_from_elsewhere_is_verified(tmp_path: Path) -> None:
    layer = shipped(tmp_path / "layer")
    kernel = Counting()
    d = dispatcher(kernel, CacheStore(tmp_path / "own", [layer]))
    assert name(d, problem(), settings()) == "fast"
    assert kernel.launches == FIRST + 1
    again = Counting()  # the stamp of the first
    assert name(dispatcher(again, CacheStore(tmp_path / "own", [layer])), problem()) == "fast"
    assert again.launches == 1
    wrong = Counting(wrong=True)
    d = dispatcher(wrong, CacheStore(tmp_path / "another", [layer]))
    with pytest.warns(TmmWarning, match="wrong at its first use"):
        assert name(d, problem(), settings()) == "blas"


def test_an_own_record_is_not_verified(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("wrong", [False, True])
def test_the_second_of_a_tuning_is_verified_when_it_answers(tmp_path: Path, wrong: bool) -> None:
    """A tuning verifies its winner in every way of use, and one launch of the others."""
    second = Counting("second", wrong_at=[50] if wrong else [])
    registry = Registry()
    registry.register(plugin(FakeBlas(estimate=100.0), FakeKernel("fast"), second), "fakes")
    times = {"fast": 10.0, "second": 12.0, "blas": 20.0}
    d = Dispatcher(registry, Tuner(FakeTimer(times)), CacheStore(tmp_path, []))
    assert name(d, problem(), settings()) == "fast"
    launches = second.launches
    excluded = settings(disable=frozenset({"fast"}))
    assert name(d, problem(), excluded) == "second"
    assert second.launches == launches + FIRST + 1
    if wrong:
        with pytest.warns(TmmWarning, match="second was wrong at its first use"):
            assert name(d, problem(m=50), excluded) == "blas"
    else:
        assert name(d, problem(m=50), excluded) == "second"
        assert second.launches == launches + FIRST + 1 + BRIEF + 1


def test_an_equal_incumbent_is_verified_when_it_answers(tmp_path: Path) -> None:
    """The tuning verified ``equal``, which would have won without the record."""
    layer = shipped(tmp_path / "layer")
    times = {**FAST, "equal": FAST["fast"]}
    registry = Registry()
    kernels = FakeBlas(estimate=100.0), Counting(), FakeKernel("equal")
    registry.register(plugin(*kernels), "fakes")
    d = Dispatcher(registry, Tuner(FakeTimer(times)), CacheStore(tmp_path / "own", [layer]))
    choice = d.choose(problem(), settings())
    assert choice.candidate.kernel.name == "fast"
    assert not d.first_use.may_launch(problem(), choice)
    assert name(d, problem(), settings()) == "fast"
    assert d.first_use.may_launch(problem(), choice)


@pytest.mark.parametrize("mode", ["tune", "background"])
def test_a_wrong_winner_of_a_tuning_leaves_the_next(mode: Any) -> None:
    """The wrong kernels are right in the launches that every candidate gets, and wrong afterwards
    at the record's own M."""

    def later(count: list[int], right: Any, *rest: Any) -> Any:
        count[0] += len(rest[0]) == problem().m
        return right(*rest).add_(count[0] > BRIEF)

    liars = [Faulty(functools.partial(later, [0]), liar) for liar in ("fastest", "faster")]
    times = {"fastest": 5.0, "faster": 8.0, "fast": 10.0, "blas": 20.0}
    kernels = [FakeBlas(), FakeKernel("fast"), *liars]
    record = Tuner(FakeTimer(times)).tune(problem(), kernels, settings(on_cache_miss=mode))
    status = {c.kernel: c.status for c in record.candidates}
    assert status == {"fastest": "wrong", "faster": "wrong", "fast": "ok", "blas": "ok"}
    assert record.best.kernel == "fast"


def test_a_neighbours_winner_is_an_untuned_choice(tmp_path: Path) -> None:
    wrong = Counting(wrong=True)
    d = dispatcher(wrong, CacheStore(shipped(tmp_path), []))
    assert d.choose(problem(n=64), UNTUNED).origin == "neighbour"
    with pytest.warns(TmmWarning, match="wrong at its first use"):
        assert name(d, problem(n=64)) == "blas"


def test_under_capture_blas_answers(tmp_path: Path) -> None:
    kernel = Counting()
    d = dispatcher(kernel, CacheStore(tmp_path / "own", [shipped(tmp_path / "layer")]))
    capturing = problem(capturing=True)
    choice, _ = d.bound(capturing, settings())
    assert choice.candidate.kernel.name == "blas"
    assert "never verified on this machine for M=64, and a CUDA graph" in choice.reason
    assert kernel.launches == 0
    assert name(d, problem(), settings()) == "fast"
    assert d.bound(capturing, settings())[0].candidate.kernel.kernel is kernel


def test_a_kernel_is_not_used_if_memory_does_not_suffice_to_verify_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Counting()
    d = dispatcher(kernel, CacheStore(tmp_path, []))
    monkeypatch.setattr(data_sets, "default_limit", lambda device, most=0: 1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice, _ = d.bound(problem(), UNTUNED)
    assert choice.candidate.kernel.name == "blas"
    assert "MiB of memory" in choice.reason
    assert kernel.launches == 0

    def exhausted(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.undo()
    d = dispatcher(Faulty(exhausted, "fast", estimate=1.0), CacheStore(tmp_path, []))
    with pytest.warns(TmmWarning, match="no memory"):
        choice, _ = d.bound(problem(), UNTUNED)
    assert "no memory" in choice.reason


def test_a_kernel_that_raises_at_its_first_use_costs_itself(tmp_path: Path) -> None:
    def explode(*arguments: Any) -> Any:
        raise RuntimeError("illegal address")

    d = dispatcher(Faulty(explode, "fast", estimate=1.0), CacheStore(tmp_path, []))
    with pytest.warns(TmmWarning, match="fast failed on .*illegal address"):
        assert name(d, problem()) == "blas"
    with pytest.raises(RuntimeError, match="illegal address"):
        d.bound(problem(), settings(kernel="fast"))
    # With verify=False the caller takes the risk.
    choice, launcher = d.bound(problem(), settings(kernel="fast", verify=False))
    assert choice.origin == "forced"
    with pytest.raises(RuntimeError, match="illegal address"):
        launcher(*[torch.empty(0)] * 2, None, None, 1.0, None)


def test_interpreted_kernels_are_verified_too(tmp_path: Path) -> None:
    d = dispatcher(Counting(wrong=True), CacheStore(tmp_path, []))
    instance = problem(device=replace(DEVICE, interpreted=True))
    with pytest.warns(TmmWarning, match="wrong at its first use"):
        assert name(d, instance) == "blas"


def test_a_forced_kernel_is_verified_at_its_first_use(tmp_path: Path) -> None:
    right, forced = Counting(), settings(kernel="fast")
    d = dispatcher(right, CacheStore(tmp_path / "right", []))
    for launches in (FIRST + 1, FIRST + 2):
        assert name(d, problem(), forced) == "fast"
        assert right.launches == launches
    wrong = Counting(wrong=True)
    d = dispatcher(wrong, CacheStore(tmp_path / "wrong", []))
    for _ in range(2):  # again, as long as it is forced
        with pytest.raises(PluginError, match=r"'fast' is forced and wrong .* exceeds .*TMM_V"):
            d.bound(problem(), forced)
    launches = wrong.launches
    choice, _ = d.bound(problem(), settings(kernel="fast", verify=False))
    assert (choice.origin, wrong.launches) == ("forced", launches)
    assert "never verified" in choice.reason
    # A guess is verified all the same.
    with pytest.warns(TmmWarning, match="wrong at its first use"):
        assert name(d, problem(), settings(on_cache_miss="heuristic", verify=False)) == "blas"


def test_a_kernel_that_forces_itself_is_wrong(tmp_path: Path) -> None:
    """Each launch of its verification would verify it again."""
    forced, kernel = settings(kernel="fast"), Counting()
    d = dispatcher(kernel, CacheStore(tmp_path, []))

    def launcher(*arguments: Any) -> Any:
        kernel.launches += 1
        return d.bound(problem(), forced)[1](*arguments)

    kernel.bind = lambda problem, config: launcher  # type: ignore[method-assign]
    for _ in range(2):
        before = kernel.launches
        with pytest.raises(PluginError, match="a launch of kernel 'fast' calls itself"):
            d.bound(problem(), forced)
        assert kernel.launches == before + 1


def test_a_forced_kernel_that_cannot_be_verified_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, forced = Counting(), settings(kernel="fast")
    d = dispatcher(kernel, CacheStore(tmp_path, []))
    with pytest.warns(TmmWarning, match="used unverified: .* for M=64, and a CUDA graph"):
        assert d.bound(problem(capturing=True), forced)[0].origin == "forced"
    monkeypatch.setattr(data_sets, "default_limit", lambda device, most=0: 1000)
    with pytest.warns(TmmWarning, match="used unverified: .* MiB of memory"):
        assert d.bound(problem(), forced)[0].origin == "forced"
    assert kernel.launches == 0


@pytest.mark.parametrize("origin", ["own record", "record from elsewhere", "tuned", "forced"])
def test_every_size_of_a_bucket_is_verified_at_its_first_use(tmp_path: Path, origin: str) -> None:
    """The tuning saw the edge and odd sizes only."""
    root = shipped(tmp_path / "records")
    kernel = Counting(wrong_at=(40, 56))
    layers = [root] if origin == "record from elsewhere" else []
    own = root if origin == "own record" else tmp_path / "own"
    d = dispatcher(kernel, CacheStore(own, layers))
    how = settings(kernel="fast") if origin == "forced" else settings()
    assert name(d, problem(), how) == "fast"
    assert name(d, problem(m=44), how) == "fast"
    if origin == "forced":
        for m in (40, 56):
            with pytest.raises(PluginError, match=rf"wrong for {m}×"):
                d.bound(problem(m=m), how)
        return
    # Under capture it cannot be verified.
    assert d.bound(problem(m=40, capturing=True), how)[0].candidate.kernel.name == "blas"
    assert d.bound(problem(m=44, capturing=True), how)[0].candidate.kernel.kernel is kernel
    with pytest.warns(TmmWarning, match="fast was wrong at its first use on 40×"):
        assert name(d, problem(m=40), how) == "blas"
    assert name(d, problem(m=56), how) == "blas"  # it is not used in this bucket any more


def test_large_sizes_are_verified_by_class(tmp_path: Path) -> None:
    kernel = Counting()
    d = dispatcher(kernel, CacheStore(tmp_path, []))
    small = {"n": 8, "k": 8}
    for m, launches in ((10241, FIRST + 1), (11265, 1), (10369, BRIEF + 1), (11393, 1)):
        before = kernel.launches
        assert name(d, problem(m=m, **small)) == "fast"
        assert kernel.launches - before == launches, m


def test_a_batch_invariant_record_of_groups_counts_as_own(tmp_path: Path) -> None:
    """Groups without one reduction order for all sizes use the bucket's plain record."""
    instance = problem(m=128, groups=Groups(2, "m"))
    store, candidate = CacheStore(tmp_path, []), Candidate(FakeKernel("fast"), FakeConfig(tile=1))
    first_use.FirstUse(store).stamp(instance, candidate)
    invariant = replace(instance, batch_invariant=True)
    choice = Choice(candidate, "cache")
    assert first_use.FirstUse(store).may_launch(invariant, choice)
    # Its own record would be another one.
    assert not first_use.FirstUse(store).may_launch(invariant, replace(choice, arithmetic="k"))
    assert not first_use.FirstUse(store).may_launch(replace(invariant, m=100), choice)


def test_batch_invariant_mode_verifies_too(tmp_path: Path) -> None:
    wrong = Counting(wrong=True, traits=Traits(batch_invariant=True))
    registry = Registry()
    blas = FakeBlas(estimate=100.0, traits=Traits(batch_invariant=True))
    registry.register(plugin(blas, wrong), "fakes")
    d = Dispatcher(registry, Tuner(FakeTimer(FAST)), CacheStore(tmp_path, []))
    with pytest.warns(TmmWarning) as caught:
        choice, _ = d.bound(problem(batch_invariant=True), UNTUNED)
    assert choice.candidate.kernel.name == "blas"
    first, then = (str(warning.message) for warning in caught)
    assert "fast was wrong at its first use" in first
    assert "its rows differ" in then


def invariant(kernel: FakeKernel, store: CacheStore) -> Dispatcher:
    registry = Registry()
    registry.register(plugin(FakeBlas(), kernel), "fakes")
    return Dispatcher(registry, Tuner(FakeTimer(FAST)), store)


def test_own_batch_invariant_records_hold_under_capture(tmp_path: Path) -> None:
    traits = Traits(batch_invariant=True)
    instance = problem(m=40, batch_invariant=True)
    invariant(Counting(traits=traits), CacheStore(tmp_path, [])).tune(instance, settings())
    again = Counting(traits=traits)
    d = invariant(again, CacheStore(tmp_path, []))
    choice, _ = d.bound(replace(instance, capturing=True), UNTUNED)
    assert (choice.origin, choice.candidate.kernel.kernel) == ("cache", again)
    assert again.launches == 0


def test_a_warning_says_that_blas_is_not_batch_invariant(tmp_path: Path) -> None:
    guessed = Counting(traits=Traits(batch_invariant=True))
    d = invariant(guessed, CacheStore(tmp_path, []))
    instance = problem(batch_invariant=True, capturing=True)
    with pytest.warns(TmmWarning, match="BLAS, which is not batch-invariant: .* being captured"):
        choice, _ = d.bound(instance, UNTUNED)
    assert choice.candidate.kernel.name == "blas"
    assert guessed.launches == 0


def test_a_warning_made_an_error_is_not_the_kernels_fault(tmp_path: Path) -> None:
    guessed = Counting(traits=Traits(batch_invariant=True))
    d = invariant(guessed, CacheStore(tmp_path, []))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TmmWarning, match="BLAS, which is not batch-invariant"):
            d.bound(problem(batch_invariant=True, capturing=True), UNTUNED)
    choice, _ = d.bound(problem(batch_invariant=True), UNTUNED)
    assert choice.candidate.kernel.kernel == guessed


def test_a_stamp_is_for_one_kernel_config_bucket_and_version() -> None:
    kernel = FakeKernel("k", tiles=(1, 2))
    one, two = (Candidate(kernel, config) for config in kernel.configs(problem()))
    for sized in (False, True):
        key = first_use._key(problem(), one, sized)
        assert key == first_use._key(problem(static_weights=True), one, sized)
        assert (key == first_use._key(problem(m=50), one, sized)) is not sized
        others = [
            first_use._key(problem(), two, sized),
            first_use._key(problem(m=65), one, sized),
            first_use._key(problem(bias=torch.float32), one, sized),
            first_use._key(problem(deterministic=True), one, sized),
            first_use._key(problem(), Candidate(FakeKernel("other"), one.config), sized),
            first_use._key(problem(), Candidate(FakeKernel("k", version="2"), one.config), sized),
        ]
        assert len({key, *others}) == 7


class OfTwoModes(FakeKernel):
    """A launcher for deterministic mode is wrong, or every launch in torch's."""

    def __init__(self, of_torch: bool) -> None:
        super().__init__("fast", estimate=1.0)
        self.of_torch = of_torch

    def bind(self, problem: Problem, config: FakeConfig) -> Any:
        right: Any = super().bind(problem, config)

        def launch(*given: Any) -> Any:
            torchs = torch.are_deterministic_algorithms_enabled()
            wrong = torchs if self.of_torch else problem.deterministic
            return right(*given).add_(1) if wrong else right(*given)

        launch.cost = right.cost  # type: ignore[attr-defined]
        return launch


@pytest.mark.parametrize("of_torch", [False, True])
@pytest.mark.parametrize("how", [settings(), UNTUNED])
def test_deterministic_mode_has_its_own_verification(
    of_torch: bool, how: Settings, tmp_path: Path
) -> None:
    """Kernels choose another launcher for it, for example one without atomics."""
    d = dispatcher(OfTwoModes(of_torch), CacheStore(tmp_path, []))
    assert name(d, problem(), how) == "fast"
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.warns(TmmWarning, match="fast was wrong at its first use"):
            assert name(d, problem(deterministic=True), how) == "blas"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("height", [192, 256, 320, 384, 512])
def test_sizes_of_one_class_fill_a_tall_tile_alike(height: int) -> None:
    """The name of the config's field does not matter. A config's other numbers add no classes."""
    filled: dict[str, set[int]] = {}
    for m in range(1025, 8193):
        key = first_use.size_class(m, {"rows": height, "on": True, "name": "x", "K": 1024})
        filled.setdefault(key, set()).add(m % (8 * height))
    assert all(len(rows) == 1 for rows in filled.values())
    assert len(filled) == min(8192 - 1024, 8 * math.lcm(128, height))
    for config in ({"m": 128}, {"m": 200}, {"m": 576}, {"m": True}, {"m": "256"}, {"m": 256.0}):
        assert first_use.size_class(3080, config) == "8 of 1024"


def test_the_tile_of_a_candidate_decides_the_class_of_its_size() -> None:
    def key(m: int, tile: int) -> str:
        candidate = Candidate(FakeKernel("k"), FakeConfig(tile=tile))
        return first_use._key(problem(m=m), candidate, True)

    assert key(33000, 128) == key(34024, 128)  # the bucket of 40960
    assert key(33000, 256) != key(34024, 256)
    assert key(33000, 256) == key(35048, 256)


def test_classes_of_sizes() -> None:
    """Each size up to 1024 is a class; beyond, each remainder of eight tiles of 128 is a class."""
    assert len({first_use.size_class(m) for m in range(1, 1025)}) == 1024
    assert first_use.size_class(1024) != first_use.size_class(1152)
    assert len({first_use.size_class(m) for m in range(1025, 4096)}) == 1024
    for unit in (2, 4, 8, 16, 32, 64, 128):
        aligned = {first_use.size_class(m) for m in range(2048, 4096, unit)}
        assert aligned.isdisjoint(first_use.size_class(m) for m in range(2048, 4096) if m % unit)
