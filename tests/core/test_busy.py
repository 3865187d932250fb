"""Processes that meet the same problems: they divide the tuning of a step among them, and say so in
one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import DEVICE, FakeBlas, FakeKernel, dispatcher, problem, settings
from tmm_cache import CacheStore

import tmm_core
from tmm_core import Traits, dispatch
from tmm_core.dispatch import dispatcher as answers
from tmm_core.dispatch import measuring
from tmm_core.launch import warm
from tmm_core.spec.device import fingerprint

FAST = {"fast": 10.0, "blas": 20.0}
LOGGER = "tmm_core"


@pytest.fixture
def shared(tmp_path: Path) -> tuple[Any, Any, CacheStore]:
    """A dispatcher, its timer, and the store of another process on the same root."""
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    return d, timer, CacheStore(tmp_path)


def held(store: CacheStore, problem: Any) -> Any:
    return store.lock(DEVICE.gpu, DEVICE.environment, problem.to_json(), 0.0)


def test_a_call_does_not_wait_for_another_process(
    shared: Any, caplog: pytest.LogCaptureFixture
) -> None:
    d, timer, other = shared
    with held(other, problem()), held(other, problem(n=48)):
        for n in (32, 48, 32):
            choice = d.choose(problem(n=n), settings())
            assert (choice.candidate.kernel.name, choice.origin) == ("blas", "fallback")
            assert not choice.lasting
            assert "another process is tuning it" in choice.reason
        assert not timer.measured
        # It goes on to a problem that no process is tuning.
        assert d.choose(problem(n=64), settings()).candidate.kernel.name == "fast"
    (line,) = [each.getMessage() for each in caplog.records if each.name == LOGGER]
    assert ".lock" not in line
    assert "another process is tuning" in line
    # The other ended without a record: this one measures.
    timer.measured.clear()
    assert d.choose(problem(), settings()).candidate.kernel.name == "fast"
    assert timer.measured
    # The line is printed again after a minute.
    d._logged -= answers.LOG_INTERVAL
    caplog.clear()
    with held(other, problem(n=80)):
        d.choose(problem(n=80), settings())
    assert [each.name for each in caplog.records] == [LOGGER]


def test_the_record_of_the_other_replaces_the_answer(shared: Any, tmp_path: Path) -> None:
    d, timer, other = shared
    with held(other, problem()):
        assert d.choose(problem(), settings()).candidate.kernel.name == "blas"
    theirs, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    theirs.choose(problem(), settings())
    choice = d.choose(problem(), settings())
    assert (choice.candidate.kernel.name, choice.origin) == ("fast", "cache")
    assert choice.lasting
    assert not timer.measured


@pytest.mark.slow
def test_where_bits_must_not_change_a_call_waits(tmp_path: Path) -> None:
    invariant = FakeKernel("fast", traits=Traits(batch_invariant=True))
    d, _ = dispatcher(FakeBlas(), invariant, times=FAST, root=tmp_path)
    other = CacheStore(tmp_path)
    instance = problem(batch_invariant=True)
    waits: list[float] = []
    lock = d.store.lock

    def noting(gpu: str, environment: Any, document: Any, timeout: float) -> Any:
        waits.append(timeout)
        return lock(gpu, environment, document, min(timeout, 0.1))

    d.store.lock = noting  # type: ignore[method-assign]
    with held(other, instance):
        d.choose(instance, settings(tune_budget=5.0))
    assert min(waits) == 5.0 * measuring.LOCK_PATIENCE


def test_asking_for_tuning_waits(shared: Any) -> None:
    d, timer, other = shared
    done: list[Any] = []
    with held(other, problem()):
        thread = threading.Thread(target=lambda: done.append(d.tune(problem(), settings())))
        thread.start()
        time.sleep(0.3)
        assert not done
        assert not timer.measured
    thread.join(20)
    assert done[0].best.kernel == "fast"


def test_two_processes_do_not_measure_on_one_gpu(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes would disturb each other on one GPU; on two GPUs they do not."""
    d, _, other = shared
    uuid = "GPU-1"

    class Properties:
        @property
        def uuid(self) -> str:
            return uuid

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties())
    device = replace(DEVICE, type="cuda")
    place = {"measured on": "GPU-1"}
    with other.lock(device.gpu, device.environment, place, 0.0):
        with d._alone_on(device) as alone:
            assert not alone
        uuid = "GPU-2"
        with d._alone_on(device) as alone:
            assert alone
        with d._alone_on(DEVICE) as alone:
            assert alone
    uuid = "GPU-1"
    with d._alone_on(device) as alone:
        assert alone
        with other.lock(device.gpu, device.environment, place, 0.0) as mine:
            assert not mine

    busy = threading.Event()

    def taken(_: Any) -> Any:
        busy.set()
        return nullcontext(False)

    monkeypatch.setattr(d, "_alone_on", taken)
    assert not d.choose(problem(), settings()).lasting
    assert busy.is_set()
    assert d.tune(problem(), settings()).best.kernel == "fast"  # who asks for it gets it


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times of interpreted kernels mean nothing, and calls do not tune."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    fingerprint.cache_clear()
    yield
    monkeypatch.undo()
    fingerprint.cache_clear()


@pytest.mark.usefixtures("compiled")
def test_no_plan_is_made_of_an_answer_for_now(shared: Any) -> None:
    """Calls choose again until the record is there, and a plan waits for it."""
    d, _, other = shared
    dispatch.default_dispatcher.made = d
    warm.forget_plans()
    a, b = torch.randn(64, 16), torch.randn(16, 32)
    problem = tmm_core.problem(a, b)
    store = CacheStore(other.root)
    plans: list[Any] = []
    with store.lock(problem.device.gpu, problem.device.environment, problem.to_json(), 0.0):
        first = tmm_core.matmul(a, b)
        assert not warm._plans
        thread = threading.Thread(target=lambda: plans.append(tmm_core.plan(a, b)))
        thread.start()
        time.sleep(0.3)
        assert not plans
    thread.join(20)
    torch.testing.assert_close(first, a @ b)
    assert plans[0].choice.lasting
    tmm_core.matmul(a, b)
    assert len(warm._plans) == 1


RANK = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
import torch
import tmm_core
from fakes import FakeBlas, FakeKernel, FakeTimer, dispatcher
from tmm_core import dispatch
from tmm_core.launch import warm

class Slow(FakeTimer):
    def measure(self, runs, rounds, **chain):
        time.sleep(0.15)
        return super().measure(runs, rounds, **chain)

root, rank = Path(sys.argv[1]), sys.argv[2]
made, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=root)
made.tuner.timer = Slow({{"fast": 10.0, "blas": 20.0}})
dispatch.default_dispatcher.made = made
seconds, tuning = {{}}, made.tuner.steps

def noting(problem, *arguments, **named):
    began = time.monotonic()
    record = yield from tuning(problem, *arguments, **named)
    if record is not arguments[2]:  # else the other one had measured it meanwhile
        seconds[problem.n] = time.monotonic() - began
    return record

made.tuner.steps = noting
data = [(torch.randn(64, 16), torch.randn(16, n)) for n in range(16, 16 + 8 * 6, 8)]
(root / rank).touch()
while len(list(root.glob("rank*"))) < 2:
    time.sleep(0.005)
steps = 0
while len(warm._plans) < len(data):
    steps += 1
    for x, w in data:
        torch.testing.assert_close(tmm_core.matmul(x, w), x @ w)
kernels = [plan.kernel for plan in warm._plans.values()]
print(json.dumps({{"seconds": seconds, "steps": steps, "kernels": kernels}}))
"""


@pytest.mark.slow
def test_two_processes_divide_the_problems_of_a_step(tmp_path: Path) -> None:
    program = RANK.format(here=str(Path(__file__).parents[1]))
    environ = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), f"rank{rank}"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = []
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert rank.returncode == 0, err
        outputs.append(json.loads(out))
        lines = err.splitlines()
        assert len(lines) <= 1, err
        assert not lines or "another process is tuning" in lines[0]
    one, other = (set(each["seconds"]) for each in outputs)
    assert not one & other  # nothing is measured twice
    assert len(one | other) == 6
    assert min(len(one), len(other)) >= 2
    assert all(each["kernels"] == ["fast"] * 6 for each in outputs)
