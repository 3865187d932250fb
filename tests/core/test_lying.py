"""No kernel that lies is believed, in a call or by the conformance suite; right ones are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config  # sets a variable; torch imports it with its deterministic mode
from fakes import FakeBlas, FakeTimer, plugin, settings
from lying import LIES, LeavesAModeThatRaises, Lie, half
from lying_further import FURTHER
from tmm_cache import CacheStore

from tmm_core import Groups, PluginError, Problem, TmmWarning
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.registry.process_state import State
from tmm_core.registry.registry import Registry
from tmm_core.testing import KernelConformance
from tmm_core.tuning.tuner import Tuner

CPU = torch.device("cpu")
ALL = {**LIES, **FURTHER}
EACH = [(row, name) for row, lies in ALL.items() for name in lies]


class Blas(FakeBlas):
    """The baseline, also of groups."""

    def bind(self, problem: Problem, config: Any) -> Any:
        if problem.groups is None:
            return super().bind(problem, config)
        right = Lie().bind(problem, config)
        right.cost = ("blas", 1)
        return right


@pytest.fixture(autouse=True)
def _state_stays() -> Iterator[None]:
    """Restore the state that a kernel changes in launches that are not watched."""
    state = State(CPU)
    yield
    state.restore(state.changed())


def dispatcher(kernel: Lie, root: Path) -> Dispatcher:
    registry = Registry()
    registry.register(plugin(Blas(estimate=100.0), kernel), "lying")
    return Dispatcher(
        registry, Tuner(FakeTimer({kernel.name: 10.0, "blas": 20.0})), CacheStore(root, [])
    )


@pytest.mark.parametrize(("row", "name"), EACH, ids=[f"{row} {name}" for row, name in EACH])
@pytest.mark.slow(quick=6)
def test_a_lying_kernel_never_answers(row: str, name: str, tmp_path: Path) -> None:
    """The kernel would win, but BLAS answers, and a warning names the kernel."""
    kernel = ALL[row][name]()
    d = dispatcher(kernel, tmp_path)
    before = State(CPU)
    problem = kernel.problem
    if kernel.at is not None:
        d.bound(problem, settings())
        problem = problem.at(kernel.at)
    with pytest.warns(TmmWarning, match=r"kernel test.lying (failed in|was wrong at)"):
        choice, _ = d.bound(problem, settings())
    assert choice.candidate.kernel.name == "blas", choice
    assert not before.changed()


@pytest.mark.parametrize("name", ["TakesOneIndexForZero", "ReadsRowsInTheResult"])
def test_a_forced_kernel_of_groups_that_reads_another_row_is_refused(
    name: str, tmp_path: Path
) -> None:
    """Triton's interpreter finds it, too: one index into ten rows of ``a`` and an empty group."""
    kernel = LIES["A10"][name]()
    d = dispatcher(kernel, tmp_path)
    device = replace(kernel.problem.device, interpreted=True)
    problem = replace(kernel.problem, device=device, n=48, k=64)
    with pytest.raises(PluginError, match="is forced and wrong"):
        d.bound(problem, settings(kernel="test.lying"))


def test_a_mode_that_a_launch_leaves_active_ends_with_it(tmp_path: Path) -> None:
    """The mode would raise in each of torch's functions."""
    with pytest.warns(TmmWarning, match="it changed torch's function modes"):
        choice, _ = dispatcher(LeavesAModeThatRaises(), tmp_path).bound(half(8, 8, 8), settings())
    assert choice.candidate.kernel.name == "blas"
    assert torch.ones(2).sum() == 2


@pytest.mark.parametrize("groups", [False, True])
def test_a_right_kernel_answers(groups: bool, tmp_path: Path) -> None:
    fields: Any = {"groups": Groups(6, "m", a_index=torch.int64)} if groups else {}
    d = dispatcher(Lie(), tmp_path)
    for m in (64, 40, 33):
        choice, _ = d.bound(half(m, **fields), settings())
        assert choice.candidate.kernel.name == "test.lying"


# -- the conformance suite -------------------------------------------------------------------


def failures(kernel: Lie) -> list[str]:
    """The tests of the suite that fail for ``kernel``, of those that look at its use."""

    class Suite(KernelConformance):
        device = "cpu"
        dtypes = (torch.float16, torch.bfloat16)

    Suite.kernel = kernel
    suite, found = Suite(), []
    calls = [(str(p), functools.partial(suite.test_use, p)) for p in suite.probes_of_use()]
    calls += [("every_tile", suite.test_every_tile), ("ragged", suite.test_use_of_ragged)]
    for name, call in calls:
        with contextlib.suppress(pytest.skip.Exception):
            try:
                call()
            except (pytest.fail.Exception, RuntimeError):
                found.append(name)
                break
    return found


@pytest.mark.parametrize(("row", "name"), EACH, ids=[f"{row} {name}" for row, name in EACH])
@pytest.mark.slow(quick=18)
def test_a_lying_kernel_fails_the_conformance_suite(row: str, name: str) -> None:
    assert failures(ALL[row][name]())


@pytest.mark.slow
def test_a_right_kernel_passes_the_conformance_suite() -> None:
    assert failures(Lie()) == []
