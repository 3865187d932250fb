"""Kernels that are new, changed or missing since a record was made, and the modules that a process
imports."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import pytest
from fakes import FakeBlas, FakeKernel, problem, settings
from tmm_cache import CacheStore

from tmm_core import TmmWarning, errors
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.launch import warm
from tmm_core.registry.registry import Registry
from tmm_core.tuning import findings
from tmm_core.tuning.tuner import Tuner

PROBLEM = problem()


Process = Callable[..., Dispatcher]


@pytest.fixture
def process(tmp_path: Path) -> Process:
    """Starts a process on the one cache; returns its dispatcher over these kernels."""

    def start(*kernels: FakeKernel, **times: float) -> Dispatcher:
        registry = Registry()
        registry.register(fakes.plugin(FakeBlas(), *kernels), "fakes")
        tuner = Tuner(fakes.FakeTimer({"blas": 5.0, **times}))
        return Dispatcher(registry, tuner, CacheStore(tmp_path / "cache", []))

    return start


def test_a_kernel_that_declines_by_now_is_not_chosen(process: Process) -> None:
    process(FakeKernel("k"), k=1.0).choose(PROBLEM, settings())
    dispatcher = process(FakeKernel("k", against=lambda p: ["not any more"]))
    assert dispatcher.choose(PROBLEM, settings()).candidate.kernel.name == "blas"


def test_another_version_is_timed_anew(process: Process) -> None:
    process(FakeKernel("k"), k=1.0).choose(PROBLEM, settings())
    dispatcher = process(FakeKernel("k", version="2"), k=9.0)
    choice = dispatcher.choose(PROBLEM, settings())
    assert (choice.candidate.kernel.name, choice.origin) == ("blas", "tuned")


def test_a_kernel_that_came_later_is_timed(process: Process) -> None:
    process(FakeKernel("k"), k=9.0).choose(PROBLEM, settings())
    dispatcher = process(FakeKernel("k"), FakeKernel("new"), k=9.0, new=1.0)
    assert dispatcher.choose(PROBLEM, settings()).candidate.kernel.name == "new"


def test_a_kernel_registered_by_hand_is_timed(process: Process) -> None:
    process(FakeKernel("k"), k=9.0).choose(PROBLEM, settings())
    dispatcher = process(FakeKernel("k"), k=9.0, new=1.0)
    current = settings()  # one object, as for two calls of a program
    dispatcher.choose(PROBLEM, current)
    dispatcher.registry.register(fakes.plugin(FakeKernel("new")), "new")
    assert dispatcher.choose(PROBLEM, current).candidate.kernel.name == "new"


def test_plans_from_before_a_registration_are_dropped(process: Process) -> None:
    """A notebook registers a plugin for a product that it has computed."""
    dispatcher, before = process(), warm.drops
    dispatcher.registry.register(fakes.plugin(FakeKernel("new")), "new")
    assert warm.drops > before


COLD = """
import os, sys
import torch, tmm_core
from tmm_core import dispatch, errors
from tmm_cache import CandidateResult, TuningRecord

a = torch.randn(16, 16)
tmm_core.settings.override  # settings are read
described = tmm_core.problem(a, a)
assert "triton" not in sys.modules and "pluggy" in sys.modules
chooser = dispatch.default_dispatcher()
if sys.argv[1] == "record":
    able, _ = chooser.registry.candidates(described, tmm_core.settings.current())
    assert len(able) > 3
    results = [
        CandidateResult(k.name, k.version, k.default_config(described).to_json(), "ok", (9.0,))
        for k in able
    ]
    winner = [r.kernel for r in results].index(sys.argv[2])
    now = "2026-01-01T00:00:00Z"
    record = TuningRecord(described.to_json(), winner, tuple(results), now, 1.0)
    chooser.store.save(described.device.gpu, described.device.environment, record)
choice = chooser.choose(described, tmm_core.settings.current())
assert choice.candidate.kernel.name == sys.argv[2], choice
torch.testing.assert_close(tmm_core.matmul(a, a), a @ a)
print(*[name for name in sys.modules if name.startswith("tmm_core.")])
"""


@pytest.mark.slow
def test_a_process_that_replays_does_not_import_the_tuner(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TMM_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "1"}
    for what in ("record", "replay"):
        command = [sys.executable, "-c", COLD, what, "triton.naive"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "tmm_core.dispatch.dispatcher" in imported
    assert not {"tmm_core.tuning.tuner", "tmm_core.tuning.timing"} & imported


def test_the_garbage_collector_is_left_as_it_was() -> None:
    seen: list[bool] = []

    class Point:
        name, value, dist = "k", "k", None

        def load(self) -> Any:
            seen.append(gc.isenabled())
            raise ImportError

    for enabled in (True, False):
        errors._faults.clear()
        registry = Registry(lambda: [Point()])  # type: ignore[arg-type, return-value, list-item]
        try:
            if not enabled:
                gc.disable()
            with pytest.warns(TmmWarning, match="import failed"):
                registry.kernels()
            assert gc.isenabled() is enabled
        finally:
            gc.enable()
    assert seen == [False, False]


def test_kernels_left_untried_are_reported_by_a_later_process(process: Process) -> None:
    class Untried(FakeKernel):
        def bind(self, problem: Any, config: fakes.FakeConfig) -> Any:
            raise FileNotFoundError("no ptxas here")

    first = process(Untried("k"))
    with pytest.warns(TmmWarning, match="no ptxas here"):
        first.choose(PROBLEM, settings())
    findings._warned.clear()  # as in a new process
    second = process(Untried("k"))
    with pytest.warns(TmmWarning, match="no ptxas here"):
        choice = second.choose(PROBLEM, settings())
    assert choice.candidate.kernel.name == "blas"
