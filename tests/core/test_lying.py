"""No kernel that lies is believed, in a call or by the conformance suite; right ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeTimer, plugin, settings
from lying import LIES, Lie, half
from tmm_cache import CacheStore

from tmm_core import Groups, Problem, TmmWarning
from tmm_core.dispatch.ladder import Dispatcher
from tmm_core.dispatch.process_state import State
from tmm_core.dispatch.registry import Registry
from tmm_core.dispatch.tuner import Tuner

CPU = torch.device("cpu")
EACH = [(row, name) for row, lies in LIES.items() for name in lies]


class Blas(FakeBlas):
    """The baseline, also of groups."""

    def bind(self, problem: Problem, config: Any) -> Any:
        if problem.groups is None:
            return super().bind(problem, config)
        right = Lie().bind(problem, config)
        right.cost = ("blas", 1)
        return right


def dispatcher(kernel: Lie, root: Path) -> Dispatcher:
    registry = Registry()
    registry.register(plugin(Blas(estimate=100.0), kernel), "lying")
    return Dispatcher(
        registry, Tuner(FakeTimer({kernel.name: 10.0, "blas": 20.0})), CacheStore(root, [])
    )


@pytest.mark.parametrize(("row", "name"), EACH, ids=[f"{row} {name}" for row, name in EACH])
def test_a_lying_kernel_never_answers(row: str, name: str, tmp_path: Path) -> None:
    """It would win; BLAS answers, and a warning names the kernel."""
    kernel = LIES[row][name]()
    d = dispatcher(kernel, tmp_path)
    before = State(CPU)
    asked = kernel.asked
    if kernel.at is not None:
        d.bound(asked, settings())
        asked = asked.at(kernel.at)
    with pytest.warns(TmmWarning, match=r"kernel test.lying (failed in|was wrong at)"):
        choice, _ = d.bound(asked, settings())
    assert choice.candidate.kernel.name == "blas", choice
    assert not before.changed()


@pytest.mark.parametrize("groups", [False, True])
def test_a_right_kernel_answers(groups: bool, tmp_path: Path) -> None:
    fields: Any = {"groups": Groups(6, "m", a_index=torch.int64)} if groups else {}
    d = dispatcher(Lie(), tmp_path)
    for m in (64, 40, 33):
        choice, _ = d.bound(half(m, **fields), settings())
        assert choice.candidate.kernel.name == "test.lying"
