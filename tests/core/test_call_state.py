"""State that one call leaves for the next: plans of kernels that raise, and of captured calls."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeKernel, installed

import tmm_core
from tmm_core import TmmWarning, Traits
from tmm_core.dispatch.first_use import FirstUse

Tensor = torch.Tensor


class Raising(FakeKernel):
    """Launches, and then raises."""

    def __init__(self, error: Exception, **fields: Any) -> None:
        self.launched = 0

        def spoil(out: Tensor) -> Tensor:
            self.launched += 1
            raise error

        # So good an estimate that it is chosen untuned.
        super().__init__("bad", spoil=spoil, estimate=1.0, **fields)


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Untuned, and as if verified before: these are tests of later launches."""
    monkeypatch.setenv("TMM_ON_CACHE_MISS", "heuristic")
    monkeypatch.setattr(FirstUse, "may_launch", lambda *_: True)


A, B = torch.randn(4, 8), torch.randn(8, 5)
A8, B8 = (t.to(torch.float8_e4m3fn) for t in (A, B))
CALLS: dict[str, Any] = {
    "plain": ({"a": A, "b": B}, A @ B),
    "scaled": (
        {"a": A8, "b": B8, "scale_a": torch.tensor(2.0), "out_dtype": torch.float32},
        2 * A8.float() @ B8.float(),
    ),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_kernel_that_raises_is_launched_once(kind: str) -> None:
    call, expected = CALLS[kind]
    bad = Raising(RuntimeError("boom"))
    blas = FakeBlas(estimate=50.0)
    if kind == "scaled":
        from tmm_blas.blas import Blas

        blas = Blas()  # type: ignore[assignment]
        bad.bind = lambda *about: lambda *given, **extras: bad.spoil(A)  # type: ignore[method-assign]
        bad.estimate = 1e-9
        # Without the number of SMs BLAS estimates no time, and no kernel is chosen instead.
        blas.estimate_us = lambda problem, config: 50.0  # type: ignore[method-assign]
    installed(blas, bad)
    with pytest.warns(TmmWarning, match="bad failed on .*boom") as caught:
        torch.testing.assert_close(tmm_core.matmul(**call), expected)
    assert len(caught) == 1
    for _ in range(2):
        torch.testing.assert_close(tmm_core.matmul(**call), expected)
    assert bad.launched == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_an_exception_that_is_not_the_kernels_fault_reaches_the_caller(error: Any) -> None:
    bad = Raising(error)
    installed(FakeBlas(estimate=50.0), bad)
    for count in (1, 2):
        with pytest.raises(type(error)):
            tmm_core.matmul(A, B)
        assert bad.launched == count


def test_a_forced_kernel_that_raises_is_neither_replaced_nor_forgotten() -> None:
    bad = Raising(RuntimeError("boom"))
    installed(FakeBlas(estimate=50.0), bad)
    for count in (1, 2):
        with pytest.raises(RuntimeError, match="boom"):
            tmm_core.matmul(A, B, kernel="bad")
        assert bad.launched == count


def test_a_kernel_that_cannot_be_bound_is_tried_once() -> None:
    bad = FakeKernel("bad", bind_error=RuntimeError("no compiler"), estimate=1.0)
    installed(FakeBlas(estimate=50.0), bad)
    with pytest.warns(TmmWarning, match="no compiler"):
        torch.testing.assert_close(tmm_core.matmul(A, B), A @ B)
    # Another key of the same bucket.
    wide = torch.randn(4, 12)[:, :8]
    torch.testing.assert_close(tmm_core.matmul(wide, B), wide @ B)
    assert len(bad.bound) == 1


class OnCuda(torch.Tensor):
    is_cuda = True


def test_a_plan_made_under_capture_is_made_anew_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing could be measured then, and kernels that are not safe to capture were left out."""
    capturing = True
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    fast = FakeKernel("fast", traits=Traits(capture_safe=False), estimate=1.0)
    blas = FakeBlas(estimate=50.0)
    installed(blas, fast)
    a, b = A.as_subclass(OnCuda), B.as_subclass(OnCuda)
    torch.testing.assert_close(tmm_core.matmul(a, b).as_subclass(Tensor), A @ B)
    assert [p.capturing for p in blas.bound] == [True]
    capturing = False
    for _ in range(2):
        torch.testing.assert_close(tmm_core.matmul(a, b).as_subclass(Tensor), A @ B)
    assert [p.capturing for p in fast.bound] == [False]
    assert len(blas.bound) == 1
