"""Many threads, one dispatcher: first calls that race, and calls during a tuning."""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import DEVICE, FakeBlas, FakeConfig, FakeKernel, problem, settings
from fakes import dispatcher as make_dispatcher
from lying import half

import tmm_core
from tmm_core import dispatch
from tmm_core.errors import TmmWarning
from tmm_core.registry.registry import Registry
from tmm_core.spec import watch
from tmm_core.spec.kernel import Candidate
from tmm_core.tuning import compile_pool
from tmm_core.tuning.compile_pool import Compilers
from tmm_core.verify import two_threads
from tmm_core.verify.verifier import Verifier

PATIENCE = 30.0


def race(count: int, work: Callable[[], Any]) -> list[Any]:
    """The results of ``work`` in ``count`` threads that start together."""
    barrier = threading.Barrier(count)
    results: list[Any] = []

    def run() -> None:
        barrier.wait()
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_racing_first_calls_make_one_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Registry.from_environment.__func__  # type: ignore[attr-defined]

    def slow(cls: type[Registry]) -> Registry:
        time.sleep(0.05)
        return original(cls)  # type: ignore[no-any-return]

    monkeypatch.setattr(Registry, "from_environment", classmethod(slow))
    made = race(8, dispatch.default_dispatcher)
    assert len({id(d) for d in made}) == 1


def test_no_thread_is_started_while_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.12 it would never run, and ``Thread.start`` would wait for it."""
    started = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread))
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    monkeypatch.setattr(watch, "_thread", None)
    d, _ = make_dispatcher(FakeBlas(), FakeKernel("fast"), times={"fast": 5.0, "blas": 20.0})
    assert d.choose(problem(), settings()).candidate.kernel.name == "fast"
    data, launcher = (
        Verifier(half(), torch.device("cpu")),
        FakeKernel("k").bind(half(), FakeConfig()),
    )
    assert two_threads.launch_together(data, launcher, "free", 1) == []
    with watch.watched(lambda: "a query"):
        assert watch._thread is None
    monkeypatch.setattr(compile_pool, "_compiles", lambda kernel: True)
    monkeypatch.setattr(compile_pool, "interpreting", lambda: False)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: None)
    with pytest.warns(TmmWarning, match="at interpreter shutdown"):
        Compilers().submit(problem(), Candidate(FakeKernel("k"), FakeConfig())).result(PATIENCE)
    assert not started


def test_racing_first_calls_measure_once() -> None:
    pause = threading.Event()

    class Slow(FakeKernel):
        def bind(self, problem: Any, config: Any) -> Any:
            pause.wait(0.1)
            return super().bind(problem, config)

    slow = Slow("slow")
    d, timer = make_dispatcher(FakeBlas(), slow, times={"slow": 5.0, "blas": 20.0})
    alike = settings()
    choices = race(6, lambda: d.choose(problem(), alike))
    assert {c.candidate.kernel.name for c in choices} == {"slow"}
    assert len({id(c) for c in choices}) == 1
    first, *inside = [bound.m for bound in slow.bound]
    assert (first, sorted(inside)) == (64, [33, 49])  # the two are bound at once
    assert timer.measured.count("slow") == 1 + 1 + 2  # a look, the race, two M inside, as alone


def test_a_tuning_holds_up_no_other_problem() -> None:
    """The other problems have a record, may not be tuned, or were chosen before."""
    tuning, finish = threading.Event(), threading.Event()

    class Stuck(FakeKernel):
        def bind(self, problem: Any, config: Any) -> Any:
            if problem.m == 4096:
                tuning.set()
                assert finish.wait(PATIENCE)
            return super().bind(problem, config)

    d, _ = make_dispatcher(
        FakeBlas(estimate=20.0), Stuck("stuck", estimate=9.0), times={"stuck": 5.0, "blas": 20.0}
    )
    d.tune(problem(m=64), settings())
    before = settings(on_cache_miss="heuristic")
    chosen = d.choose(problem(m=8), before)
    results: list[Any] = []
    other = threading.Thread(target=lambda: results.append(d.choose(problem(m=4096), settings())))
    other.start()
    try:
        assert tuning.wait(PATIENCE)

        def beside() -> list[str]:
            return [
                d.choose(problem(m=64), settings()).origin,
                d.choose(problem(m=4096), settings(on_cache_miss="heuristic")).origin,
                d.choose(problem(m=4096, capturing=True), settings()).origin,
                d.choose(problem(m=64), settings(kernel="blas")).origin,
            ]

        (origins,) = race(1, beside)
        assert origins == ["cache", "heuristic", "heuristic", "forced"]
        assert d.choose(problem(m=8), before) is chosen
        assert not results
    finally:
        finish.set()
        other.join(PATIENCE)
    assert [c.origin for c in results] == ["tuned"]
    assert d.store.load(DEVICE.gpu, DEVICE.environment, problem(m=4096).to_json()) is not None


def test_settings_are_each_threads_own() -> None:
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    with tmm_core.override(on_cache_miss="error"):
        (got,) = race(1, lambda: tmm_core.matmul(a, b))
    torch.testing.assert_close(got, a @ b)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The process's dispatcher, as after a first call."""
    d, _ = make_dispatcher(FakeBlas(), times={}, root=tmp_path)
    monkeypatch.setattr(dispatch.default_dispatcher, "made", d)
    return dispatch.default_dispatcher


def test_a_fork_waits_for_another_threads_import(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's locks of modules stay locked in the child, which would wait for ever."""
    late = types.ModuleType("tmm_late")
    late.__spec__ = importlib.machinery.ModuleSpec("tmm_late", None)
    late.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tmm_late", late)
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        late.__spec__._initializing = len(naps) < 3  # type: ignore[union-attr]

    monkeypatch.setattr(dispatch.time, "sleep", sleep)  # type: ignore[attr-defined]
    own.before_fork()
    own.after_fork_in_parent()
    assert len(naps) == 3
    # An import that never returns costs the fork some seconds.
    late.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setattr(dispatch, "_FORK_SECONDS", 0.0)
    own.before_fork()
    own.after_fork_in_parent()
    assert len(naps) == 3


def test_a_fork_waits_for_another_threads_loading_of_plugins(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = own.made.registry.loading_lock

    def free() -> bool:
        with ThreadPoolExecutor(1) as others:
            return others.submit(lambda: lock.acquire(timeout=0) and not lock.release()).result()

    own.before_fork()
    assert not free()
    own.after_fork_in_parent()
    assert free()
    monkeypatch.setattr(dispatch, "_FORK_SECONDS", 0.0)
    with ThreadPoolExecutor(1) as others:
        others.submit(lock.acquire).result()  # a plugin's import that never returns
        own.before_fork()
        own.after_fork_in_parent()
        others.submit(lock.release).result()
    assert free()
    monkeypatch.setattr(own, "made", None)  # before the first call
    own.before_fork()
    own.after_fork_in_parent()
