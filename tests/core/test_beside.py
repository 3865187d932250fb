"""Products that run at the same time, on several streams: each leaves room for the others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeConfig, FakeKernel, dispatcher, installed, problem, settings

import tmm_core
from tmm_core import SettingsError, TmmWarning
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.launch.plan import Choice
from tmm_core.settings import Settings, current, sharing_gpu

ALONE, SHARING = settings(), settings(shares_gpu=True)
#: The config that :class:`Roomy` offers, and its search space, whose first is the fastest.
OFFERED, TILES = FakeConfig(tile=7), (1, 2)


class Roomy(FakeKernel):
    """Offers a config for products that run beside others."""

    def __init__(self, name: str = "roomy", **fields: Any) -> None:
        super().__init__(name, tiles=TILES, **fields)

    def beside(self, problem: Any) -> Any:
        return OFFERED


def chooser(*kernels: FakeKernel) -> Dispatcher:
    times = {"fast": 5.0, "roomy": 8.0, "blas": 20.0}
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), *kernels, times=times)
    return d


def shown(choice: Choice) -> str:
    return f"{choice.origin}: {choice.candidate}"


@pytest.mark.parametrize("m", [64, 60])
def test_the_config_that_a_kernel_offers_is_chosen(m: int) -> None:
    d = chooser(Roomy())
    for _ in range(2):  # a remembered choice, too
        assert shown(d.choose(problem(m=m), ALONE)) == "tuned: fast tile=1"
        choice = d.choose(problem(m=m), SHARING)
        assert shown(choice) == "heuristic: roomy tile=7"
        assert choice.reason == "it leaves room for products beside it; alone: fast tile=1"


def test_without_an_offer_the_usual_choice_stays() -> None:
    d = chooser(FakeKernel("roomy"))
    assert shown(d.choose(problem(), SHARING)) == "tuned: fast tile=1"


def test_a_kernel_that_cannot_serve_offers_nothing() -> None:
    d = chooser(Roomy(against=lambda p: ["is scaled"] if p.scaled else []))
    assert shown(d.choose(problem(scaled=True), SHARING)) == "tuned: fast tile=1"
    d = chooser(Roomy())
    without = settings(shares_gpu=True, disable=frozenset({"roomy"}))
    assert shown(d.choose(problem(), without)) == "tuned: fast tile=1"


@pytest.mark.parametrize("estimates", [(3.0, 2.0), (None, 2.0), (None, None)])
def test_of_several_the_least_estimate(estimates: tuple[float | None, float | None]) -> None:
    kernels = [Roomy(f"roomy{i}", estimate=us) for i, us in enumerate(estimates)]
    best = "roomy0" if estimates == (None, None) else "roomy1"
    assert shown(chooser(*kernels).choose(problem(), SHARING)) == f"heuristic: {best} tile=7"


@pytest.mark.parametrize(
    "change",
    [{"kernel": "fast"}, {"on_cache_miss": "background"}],
    ids=lambda change: next(iter(change)),
)
def test_settings_that_say_more_precisely_what_to_use(change: dict[str, Any]) -> None:
    d = chooser(Roomy())
    d.choose(problem(), ALONE)  # there is a record
    choice = d.choose(problem(), settings(shares_gpu=True, **change))
    assert choice.candidate.kernel.name == "fast"


def test_an_interim_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another process tunes, a call must not compile a kernel for this purpose."""
    d = chooser(Roomy())
    monkeypatch.setattr(d, "_tune", lambda *_, **__: None)
    choice = d.choose(problem(), SHARING)
    assert (choice.candidate.kernel.name, choice.lasting) == ("blas", False)


def test_batch_invariant_mode_keeps_its_bits() -> None:
    traits = tmm_core.Traits(batch_invariant=True)
    d, _ = dispatcher(
        FakeBlas(traits=traits), Roomy(traits=traits), times={"roomy": 5.0, "blas": 20.0}
    )
    invariant = problem(batch_invariant=True)
    choices = [shown(d.choose(invariant, each)) for each in (ALONE, SHARING)]
    assert choices[0] == choices[1]
    assert "tile=7" not in choices[0]


@pytest.mark.parametrize("locked", [False, True])
def test_locked_records_are_final(locked: bool) -> None:
    d = chooser(Roomy())
    usual, able = d.choose(problem(), ALONE), d.able(problem(), SHARING)
    d.store = SimpleNamespace(locked=locked)  # type: ignore[assignment]
    assert (d.beside(problem(), usual, able) is usual) is locked


# -- faults ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda *_: [].pop(), "IndexError"),
        (lambda *_: {"tile": 3}, "not a FakeConfig"),
        (lambda *_: FakeConfig, "not a FakeConfig"),
    ],
)
def test_a_bad_offer_sets_the_kernel_aside(answer: Callable[..., Any], message: str) -> None:
    class Bad(Roomy):
        beside = answer

    d = chooser(Bad())
    with pytest.warns(TmmWarning, match=rf"kernel 'roomy' .*beside .*{message}"):
        assert shown(d.choose(problem(), SHARING)) == "tuned: fast tile=1"
    assert shown(d.choose(problem(m=70), SHARING)) == "tuned: fast tile=1"  # no second warning


def test_a_wrong_kernel_is_found_at_its_first_use() -> None:
    """Its own record does not vouch for the config that it offers."""

    class Wrong(Roomy):
        def bind(self, problem: Any, config: FakeConfig) -> Any:
            launch: Any = super().bind(problem, config)
            if config != OFFERED:
                return launch

            def wrong(*arguments: Any) -> Any:
                return launch(*arguments).mul_(2)

            return wrong

    a, b = torch.randn(6, 5), torch.randn(5, 7)
    installed(FakeBlas(), Wrong())
    usual = tmm_core.matmul(a, b)
    with pytest.warns(TmmWarning, match="roomy"):
        shared = sharing_gpu(tmm_core.matmul, a, b)
    torch.testing.assert_close(usual, a @ b)
    torch.testing.assert_close(shared, a @ b)


# -- the setting -----------------------------------------------------------------------------


def test_only_the_function_runs_under_the_setting() -> None:
    def seen(*arguments: int) -> tuple[Settings, Any]:
        return current(), arguments

    before = current()
    with tmm_core.override(deterministic=True) as outer:
        inside, arguments = sharing_gpu(seen, 1, 2)
        assert (inside.deterministic, inside.shares_gpu, arguments) == (True, True, (1, 2))
        assert current() is outer
    assert current() is before
    assert not before.shares_gpu


def test_callers_cannot_set_it() -> None:
    with (
        pytest.raises(SettingsError, match="unknown setting shares_gpu"),
        tmm_core.override(shares_gpu=True),
    ):
        pass
