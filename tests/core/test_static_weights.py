"""The caller's promise about weights: which kernels rely on it, and which records made with or
without it serve other calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeConfig, FakeKernel, dispatcher, plugin, problem, settings

import tmm_core
from tmm_core import Problem, SettingsError, TmmWarning, UnsupportedProblemError, dispatch
from tmm_core.launch import warm
from tmm_core.nn import GatedMLP, Linear, convert
from tmm_core.settings import Settings, current, with_static_weights, within

STATIC = settings(static_weights=True)
PROBLEM = problem(static_weights=True)
EARLY, PLAIN = 100, 1


@dataclass(frozen=True, kw_only=True)
class EarlyConfig(FakeConfig):
    @property
    def assumes(self) -> tuple[str, ...]:
        return ("static_weights",) if self.tile == EARLY else ()


class EarlyKernel(FakeKernel):
    """Faster under the promise of static weights."""

    config_type = EarlyConfig

    def configs(self, problem: Problem) -> Iterable[FakeConfig]:
        return [EarlyConfig(tile=tile) for tile in self.tiles]

    def default_config(self, problem: Problem) -> FakeConfig:
        return EarlyConfig(tile=PLAIN)


#: Both configs are proposed with and without the promise, as an author should not do.
TIMES = {("early", EARLY): 5.0, ("early", PLAIN): 8.0, "blas": 10.0}


def early() -> EarlyKernel:
    return EarlyKernel("early", tiles=(PLAIN, 2, EARLY))


def test_a_record_made_with_the_promise_serves_without_it(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), early(), times=TIMES, root=tmp_path)
    assert d.choose(PROBLEM, STATIC).candidate.config.to_json() == {"tile": EARLY}
    fresh, timer = dispatcher(FakeBlas(), early(), times=TIMES, root=tmp_path)
    choice = fresh.choose(problem(), settings())
    assert (choice.candidate.config.to_json(), choice.origin) == ({"tile": PLAIN}, "cache")
    # Nor where nothing may be tuned, or a kernel is forced.
    for how in (settings(on_cache_miss="error"), settings(kernel="early")):
        assert fresh.choose(problem(), how).candidate.config.to_json() == {"tile": PLAIN}
    assert timer.measured == []


def test_many_fast_configs_that_need_the_promise_leave_one_without_it(tmp_path: Path) -> None:
    """Configs that rely on the promise fill all places of the last round."""

    class Many(EarlyKernel):
        config_type = ManyConfig

        def default_config(self, problem: Problem) -> FakeConfig:
            return ManyConfig(tile=PLAIN)

        def configs(self, problem: Problem) -> Iterable[FakeConfig]:
            return [ManyConfig(tile=tile) for tile in self.tiles]

    kernel = Many("early", tiles=(PLAIN, *range(EARLY, EARLY + 9)))
    times = {("early", tile): 5.0 for tile in kernel.tiles} | {("early", PLAIN): 8.0, "blas": 10.0}
    d, _ = dispatcher(FakeBlas(), kernel, times=times, root=tmp_path)
    assert d.choose(PROBLEM, STATIC).candidate.config.to_json() != {"tile": PLAIN}
    assert d.choose(problem(), settings()).candidate.config.to_json() == {"tile": PLAIN}
    found = d.record(PROBLEM)
    assert found is not None
    (plain,) = (c for c in found[1].candidates if (c.kernel, c.config["tile"]) == ("early", PLAIN))
    assert (plain.status, sorted(plain.inside_us)) == ("ok", [33, 49])  # as the winner's


@dataclass(frozen=True, kw_only=True)
class ManyConfig(FakeConfig):
    @property
    def assumes(self) -> tuple[str, ...]:
        return ("static_weights",) if self.tile >= EARLY else ()


def test_without_the_promise_nothing_is_tried_that_relies_on_it() -> None:
    kernel = early()
    d, _ = dispatcher(FakeBlas(), kernel, times=TIMES)
    choice = d.choose(problem(), settings())
    assert choice.candidate.config.to_json() == {"tile": PLAIN}
    record = d.tune(problem(), settings(), force=True)
    assert {c.config.get("tile") for c in record.candidates if c.kernel == "early"} == {PLAIN, 2}


def test_a_record_made_without_the_promise_is_completed_once(tmp_path: Path) -> None:
    d, timer = dispatcher(FakeBlas(), early(), FakeKernel("other"), times=TIMES, root=tmp_path)
    assert d.choose(problem(), settings()).candidate.config.to_json() == {"tile": PLAIN}
    timer.measured.clear()
    assert d.choose(PROBLEM, STATIC).candidate.config.to_json() == {"tile": EARLY}
    assert set(timer.measured) == {"early", "blas"}  # no other config needs the promise
    fresh, timer = dispatcher(FakeBlas(), early(), FakeKernel("other"), times=TIMES, root=tmp_path)
    choice = fresh.choose(PROBLEM, STATIC)
    assert (choice.candidate.config.to_json(), choice.origin) == ({"tile": EARLY}, "cache")
    assert fresh.choose(problem(), settings()).candidate.config.to_json() == {"tile": PLAIN}
    assert timer.measured == []


def test_a_config_that_failed_early_is_not_tried_at_every_start(tmp_path: Path) -> None:
    class Failing(EarlyKernel):
        def bind(self, problem: Problem, config: FakeConfig) -> Any:
            if config.assumes:
                raise ValueError("does not compile")
            return super().bind(problem, config)

    for measures in (True, False):
        kernel = Failing("early", tiles=(PLAIN, EARLY))
        d, timer = dispatcher(FakeBlas(), kernel, times=TIMES, root=tmp_path)
        warned = pytest.warns(TmmWarning, match="does not compile")
        with warned if measures else contextlib.nullcontext():
            choice = d.choose(PROBLEM, STATIC)
        assert choice.candidate.config.to_json() == {"tile": PLAIN}
        assert bool(timer.measured) is measures


@pytest.mark.parametrize("plain_us", [8.0, 900.0], ids=["early alone", "all"])
def test_a_config_that_was_hopeless_early_is_not_queried_at_every_start(
    tmp_path: Path, plain_us: float
) -> None:
    class Hopeless(EarlyKernel):
        def estimate_us(self, problem: Problem, config: FakeConfig) -> float:
            return 1000.0 if config.assumes else plain_us

    for measures in (True, False):
        kernels = FakeBlas(estimate=10.0), Hopeless("early", tiles=(PLAIN, EARLY))
        d, timer = dispatcher(*kernels, times=TIMES, root=tmp_path)
        hopeless = plain_us > 100
        assert d.choose(PROBLEM, STATIC).candidate.kernel.name == ("blas" if hopeless else "early")
        assert bool(timer.measured) is measures
    record = d.tune(PROBLEM, STATIC)
    (entry,) = (c for c in record.candidates if c.status == "failed")
    assert entry.config == {"tile": EARLY}
    assert "expects to take" in str(entry.reason)


def test_a_forced_config_needs_the_promise_that_it_relies_on() -> None:
    d, _ = dispatcher(FakeBlas(), early())
    forced = '{"tile": 100}'
    choice = d.choose(PROBLEM, settings(static_weights=True, kernel="early", config=forced))
    assert choice.candidate.config.to_json() == {"tile": EARLY}
    with pytest.raises(UnsupportedProblemError, match=r"'early'.*tile=100.*static_weights"):
        d.choose(problem(), settings(kernel="early", config=forced))


@pytest.mark.parametrize("under", [with_static_weights, partial(within, STATIC)])
def test_a_call_that_raises_leaves_the_settings_as_they_were(under: Any) -> None:
    def fails() -> None:
        seen.append(current())
        raise LookupError

    seen: list[Settings] = []
    for context in (contextlib.nullcontext(), tmm_core.override(kernel="blas")):
        with context:
            before = current()
            with pytest.raises(LookupError):
                under(fails)
            assert current() == before
            assert seen.pop() != before


def test_the_promise_is_not_part_of_the_key() -> None:
    assert PROBLEM.to_json() == problem().to_json()


def test_variable_and_override(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.from_environ({"TMM_STATIC_WEIGHTS": "1"}).static_weights
    assert not Settings.from_environ({}).static_weights
    with pytest.raises(SettingsError, match="TMM_STATIC_WEIGHTS"):
        Settings.from_environ({"TMM_STATIC_WEIGHTS": "maybe"})
    with tmm_core.override(tune_budget=3.0) as base:
        assert with_static_weights(current).static_weights
        assert with_static_weights(current).tune_budget == 3.0
        assert with_static_weights(current) is with_static_weights(current)
        assert current() is base
        with tmm_core.override(static_weights=True) as promising:
            assert with_static_weights(current) is promising
            assert not within(promising, current).static_weights
            assert within(promising, current).tune_budget == 3.0
        assert within(base, current) is base


@pytest.fixture
def problems() -> list[Problem]:
    """The problems of calls on a CPU, seen by a kernel that declines all of them."""
    seen: list[Problem] = []

    def note(problem: Problem) -> list[str]:
        seen.append(problem)
        return ["only looks"]

    kernel = FakeKernel("test.looks", against=note)
    dispatch.default_dispatcher().registry.register(plugin(kernel), "looks")
    return seen


def promises(problems: list[Problem]) -> list[bool]:
    """The promise of each distinct problem; empties the list."""
    values = list(dict.fromkeys((each.m, each.n, each.k, each.static_weights) for each in problems))
    problems.clear()
    return [value[-1] for value in values]


def test_the_promise_is_about_matrices(problems: list[Problem]) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    tmm_core.matmul(x, w)
    assert promises(problems) == [False]
    with tmm_core.override(static_weights=True):
        tmm_core.matmul(x, w)
        assert promises(problems) == [True]
        tmm_core.matmul(x.expand(3, 4, 8), w)
        assert promises(problems) == [True]
        tmm_core.matmul(x, w.expand(3, 8, 6))  # a batch of products, of activations as a rule
        assert promises(problems) == [False]


def test_backward_does_not_rely_on_the_promise(
    problems: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = (torch.randn(*shape, requires_grad=True) for shape in ((4, 8), (8, 6)))
    with tmm_core.override(static_weights=True):
        y = tmm_core.matmul(x, w)
        assert promises(problems) == [True]
        y.sum().backward()
        assert promises(problems) == [False, False]
    monkeypatch.setenv("TMM_STATIC_WEIGHTS", "1")
    tmm_core.settings._from_environment.cache_clear()
    warm.forget_plans()
    tmm_core.matmul(x, w).sum().backward()
    assert promises(problems) == [True, False, False]


def test_a_weight_that_autocast_casts_was_written_just_now(problems: list[Problem]) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    cast = torch.autocast("cpu", dtype=torch.bfloat16)
    with torch.no_grad(), tmm_core.override(static_weights=True), cast:
        tmm_core.matmul(x, w)
        assert promises(problems) == [False]
        warm.forget_plans()
        tmm_core.matmul(x, w.bfloat16())
        assert promises(problems) == [True]


def test_converted_layers_promise_static_weights(problems: list[Problem]) -> None:
    class MLP(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.Linear(8, 12, bias=False)
            self.up = torch.nn.Linear(8, 12, bias=False)
            self.down = torch.nn.Linear(12, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
            return out

    def model() -> torch.nn.Sequential:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(8, 8), torch.nn.ReLU(), MLP(), Linear(8, 4), GatedMLP(4, 6))
        return torch.nn.Sequential(*layers).eval()

    x = torch.randn(3, 8)
    with torch.no_grad():
        ours, theirs = model(), model()
        assert convert(ours, static_weights=True)
        torch.testing.assert_close(ours(x), theirs(x))
        # One product of the first layer, two of the MLP, one of the third, two of the last. The
        # others belong to the model that was not converted.
        calls = [(p.m, p.n, p.k, p.static_weights) for p in problems]
        assert {call[:3] for call in calls if call[3]} == {
            (3, 8, 8), (3, 12, 8), (3, 8, 12), (3, 4, 8), (3, 6, 4), (3, 4, 6),
        }  # fmt: skip
        problems.clear()
        warm.forget_plans()
        ours = model()
        convert(ours)
        ours(x)
        assert problems
        assert not any(promises(problems))
