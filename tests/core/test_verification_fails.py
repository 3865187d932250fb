"""A fault of verification itself, as a lack of memory or of an operation, is no kernel's fault."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeKernel, FakeTimer, plugin, problem, settings
from tmm_cache import CacheStore
from torch.utils._python_dispatch import TorchDispatchMode

from tmm_core import Problem, TmmWarning
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.registry.registry import Registry
from tmm_core.spec.kernel import Config
from tmm_core.spec.operand import Operand
from tmm_core.tuning import findings
from tmm_core.tuning.tuner import Tuner
from tmm_core.verify import compare, ways_of_use
from tmm_core.verify.verifier import Verdict, Verifier

CPU = torch.device("cpu")
HALF = Operand(torch.float16)
PROBLEM = problem(8, 8, 8, a=HALF, b=HALF, out=HALF, bias=torch.float16)

MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
HOST = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
LACKING = NotImplementedError("\"addmm_impl_cpu_\" not implemented for 'Half'")


class FailsAt(TorchDispatchMode):
    """Raises an error in ``times`` of torch's operations outside launches, from number ``at``."""

    def __init__(self, at: int, error: Exception, times: int = 1) -> None:
        super().__init__()
        self.at, self.error, self.times, self.count, self.launching = at, error, times, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.launching:
            self.count += 1
            if 0 <= self.count - self.at < self.times:
                raise type(self.error)(*self.error.args)  # the traceback of one error would grow
        return func(*args, **(kwargs or {}))


def launcher(mode: FailsAt, problem: Problem = PROBLEM) -> Any:
    right: Any = FakeKernel("k").bind(problem, Config())

    def launch(*given: Any) -> Any:
        before, mode.launching = mode.launching, True
        try:
            return right(*given)
        finally:
            mode.launching = before

    return launch


def verdict(verifier: Verifier, mode: FailsAt) -> Verdict:
    with mode:
        return verifier.verdict(launcher(mode))


@pytest.fixture(autouse=True)
def _in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways_of_use.WaysOfUse, "together", lambda self: iter(()))


@pytest.mark.parametrize(
    ("error", "places"), [(MEMORY, 6), (HOST, 2), (LACKING, 8)], ids=["GPU", "CPU", "operation"]
)
@pytest.mark.slow
def test_an_error_at_any_operation_is_not_the_kernels_fault(error: Exception, places: int) -> None:
    counted = FailsAt(-1, error)
    assert verdict(Verifier(PROBLEM, CPU), counted).ok
    for at in random.Random(0).sample(range(1, counted.count), places):
        verifier = Verifier(PROBLEM, CPU)
        found = verdict(verifier, FailsAt(at, error))
        if error is LACKING:
            assert found.unknown, at
            assert str(found.reason).startswith("cannot be verified: NotImplementedError"), at
        else:
            assert (found.ok, verifier.is_reduced) == (True, True), (at, found)  # with less


def test_memory_that_stays_short_is_tried_once_more_and_no_further() -> None:
    found = verdict(Verifier(PROBLEM, CPU), mode := FailsAt(5, MEMORY, times=10**6))
    assert found.unknown
    assert "OutOfMemoryError" in str(found.reason)
    assert mode.count < 20


@pytest.mark.parametrize("error", [MEMORY, LACKING, ValueError("own")])
def test_an_exception_of_a_launcher_is_raised_again(error: Exception) -> None:
    def launch(*given: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as raised:
        Verifier(PROBLEM, CPU).verdict(launch)
    assert raised.value is error


def test_an_error_of_the_gpu_may_be_a_launchs() -> None:
    """Launches are asynchronous: a later operation that waits for them raises."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        verdict(Verifier(PROBLEM, CPU), FailsAt(30, error))


def lacking(*_: Any) -> Any:
    raise LACKING


def dispatcher(root: Path, kernel: FakeKernel) -> Dispatcher:
    registry = Registry()
    registry.register(plugin(FakeBlas(estimate=100.0), kernel), "test")
    timer = FakeTimer({kernel.name: 10.0, "blas": 20.0})
    return Dispatcher(registry, Tuner(timer), CacheStore(root, []))


@pytest.fixture
def _reference_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_warned", set())
    monkeypatch.setattr(compare, "_product", lacking)


@pytest.mark.usefixtures("_reference_fails")
def test_a_tuning_leaves_the_kernel_untried_with_one_warning(tmp_path: Path) -> None:
    d = dispatcher(tmp_path, FakeKernel("fast"))
    with pytest.warns(TmmWarning, match="kept tmm from trying kernel fast.*not implemented"):
        choice, _ = d.bound(PROBLEM, settings())
    assert choice.candidate.kernel.name == "blas"
    assert d.bound(PROBLEM.at(300), settings())[0].candidate.kernel.name == "blas"  # no warning


@pytest.mark.usefixtures("_reference_fails")
def test_a_forced_kernel_is_used_and_a_warning_says_unverified(tmp_path: Path) -> None:
    d = dispatcher(tmp_path, FakeKernel("fast"))
    with pytest.warns(TmmWarning, match="used unverified"):
        choice, _ = d.bound(PROBLEM, settings(kernel="fast"))
    assert choice.candidate.kernel.name == "fast"


def test_a_recorded_kernel_answers_once_verification_works_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher(tmp_path, FakeKernel("fast")).bound(PROBLEM, settings())
    monkeypatch.setattr(findings, "_warned", set())
    other = PROBLEM.at(5)  # a size that was not verified
    with monkeypatch.context() as broken:
        broken.setattr(compare, "_product", lacking)
        d = dispatcher(tmp_path, FakeKernel("fast"))
        with pytest.warns(TmmWarning, match="kept tmm from trying kernel fast"):
            assert d.bound(other, settings())[0].candidate.kernel.name == "blas"
    assert d.bound(other, settings())[0].candidate.kernel.name == "fast"


def test_a_wrong_kernel_is_named_where_memory_was_short(tmp_path: Path) -> None:
    spoiled: Any = FakeKernel("k", spoil=lambda out: out.mul_(1.5)).bind(PROBLEM, Config())
    mode = FailsAt(20, MEMORY)
    with mode:
        found = Verifier(PROBLEM, CPU).verdict(spoiled)
    assert not found.unknown
    assert "exceeds" in str(found.reason)
