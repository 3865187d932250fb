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
from fakes import DEVICE, FakeBlas, FakeConfig, FakeKernel, installed, problem, settings
from fakes import dispatcher as make_dispatcher
from lying import half

import tmm_core
from tmm_core import Problem, dispatch
from tmm_core.errors import TmmWarning
from tmm_core.launch import warm
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


@pytest.mark.parametrize("forked", [False, True])
def test_a_signals_handler_may_call_while_the_dispatcher_is_made(
    forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = dispatch._Own()
    if forked:
        own.after_fork()
    inner: list[Any] = []

    def interrupted() -> Registry:
        if not inner:
            inner.append(None)
            inner.append(own())
        return Registry()

    monkeypatch.setattr(Registry, "from_environment", interrupted)
    thread = threading.Thread(target=own, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert len(inner) == 2
    assert own.made is not None


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
    class Slow(FakeKernel):
        def bind(self, problem: Any, config: Any) -> Any:
            time.sleep(0.1)
            return super().bind(problem, config)

    slow = Slow("slow")
    d, timer = make_dispatcher(FakeBlas(), slow, times={"slow": 5.0, "blas": 20.0})
    alike = settings()
    choices = race(6, lambda: d.choose(problem(), alike))
    assert {c.candidate.kernel.name for c in choices} == {"slow"}
    assert len({c.candidate for c in choices}) == 1
    first, *inside = [bound.m for bound in slow.bound]
    assert (first, sorted(inside)) == (64, [33, 49])  # the two are bound at once
    assert timer.measured.count("slow") == 1 + 1 + 2  # a look, the race, two M inside, as alone


def test_a_tuning_delays_no_other_problem() -> None:
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


class Paused(FakeKernel):
    """Is bound once the test says so; the first time only."""

    def __init__(self, name: str, **fields: Any) -> None:
        super().__init__(name, **fields)
        self.reached, self.resumed = threading.Event(), threading.Event()

    def bind(self, problem: Problem, config: Any) -> Any:
        if not self.reached.is_set():
            self.reached.set()
            assert self.resumed.wait(PATIENCE)
        return super().bind(problem, config)


@pytest.mark.parametrize("what", ["enable", "forget"])
def test_a_plan_that_was_made_while_plans_were_dropped(what: str) -> None:
    """It answers its own call only: the next one chooses by the records of today, and its products
    are not answered by ``enable()``."""
    fast, paused = FakeKernel("fast", estimate=1.0), Paused("blas", estimate=100.0)
    installed(paused, fast)
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    expected = a @ b

    def call() -> torch.Tensor:
        return tmm_core.matmul(a, b, kernel="blas")

    with ThreadPoolExecutor(1) as other:
        answer = other.submit(call)
        assert paused.reached.wait(PATIENCE)
        if what == "enable":
            tmm_core.enable(_key="CPU", on_cache_miss="heuristic")
        else:
            warm.forget_plans()
        paused.resumed.set()
        torch.testing.assert_close(answer.result(PATIENCE), expected)
    fast.bound.clear()
    try:
        assert not warm._plans
        torch.testing.assert_close(call(), expected)
        assert len(warm._plans) == 1
        assert not fast.bound
    finally:
        tmm_core.disable()


def test_a_choice_that_was_made_while_records_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, _ = make_dispatcher(
        FakeBlas(estimate=1.0), FakeKernel("fast"), times={"fast": 5.0, "blas": 9.0}, root=tmp_path
    )
    reached, resumed = threading.Event(), threading.Event()
    guess = d._unmeasured

    def paused(*given: Any) -> Any:
        guessed = guess(*given)
        reached.set()
        assert resumed.wait(PATIENCE)
        return guessed

    monkeypatch.setattr(d, "_unmeasured", paused)
    untuned = settings(on_cache_miss="heuristic")
    with ThreadPoolExecutor(1) as other:
        choice = other.submit(d.choose, problem(), untuned)
        assert reached.wait(PATIENCE)
        d.tune(problem(), settings())
        resumed.set()
        assert choice.result(PATIENCE).candidate.kernel.name == "blas"
    assert d.choose(problem(), untuned).candidate.kernel.name == "fast"
