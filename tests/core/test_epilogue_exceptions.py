"""An epilogue's exception reaches the caller, as from ``torch.autograd.Function``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeKernel, dispatcher, settings
from tmm_base.guards import of_the_call, reraise

import tmm_core
from tmm_core import Epilogue, PluginError
from tmm_core.launch import warm
from tmm_core.spec.device import fingerprint
from tmm_core.spec.port import Port

Tensor = torch.Tensor


class Odd(BaseException):
    """A ``BaseException``, like pytest's ``Failed`` and Trio's ``Cancelled``."""


KINDS = [SystemExit, Odd, GeneratorExit, ValueError, StopIteration]
A, B = torch.randn(4, 8), torch.randn(8, 6)
GROUPS: Any = {"offs": torch.tensor([2, 4], dtype=torch.int32)}


def raising(kind: type[BaseException]) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise kind("mine")

    return function


def with_gradient(epilogue: Epilogue) -> None:
    a = A.clone().requires_grad_()
    tmm_core.matmul(a, B, epilogue=epilogue).sum().backward()


CALLS: dict[str, Callable[[Epilogue], Any]] = {
    "plain": lambda e: tmm_core.matmul(A, B, epilogue=e),
    "bias": lambda e: tmm_core.matmul(A, B, bias=B[0], epilogue=e),
    "out": lambda e: tmm_core.matmul(A, B, out=torch.empty(4, 6), epilogue=e),
    "forced": lambda e: tmm_core.matmul(A, B, kernel="blas", epilogue=e),
    "plan": lambda e: tmm_core.plan(A, B, epilogue=e)(A, B),
    "grouped": lambda e: tmm_core.grouped_matmul(A, torch.randn(2, 8, 6), epilogue=e, **GROUPS),
    "vmap": lambda e: torch.vmap(lambda a: tmm_core.matmul(a, B, epilogue=e))(A[None]),
    "gradient": with_gradient,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_an_exception_of_a_reference_reaches_the_caller(
    call: str, kind: type[BaseException]
) -> None:
    """Also from a chain and from an output, and in a second call, whose plan is known."""
    ends = Epilogue("ends", raising(kind))
    output = Epilogue("kept", lambda z: z, outputs=(Port("mine", "tile", of=raising(kind)),))
    for epilogue in (ends, Epilogue("sine", torch.sin).then(ends), output):
        if epilogue is output and call not in ("plain", "bias", "forced"):
            continue
        for _ in range(2):
            with pytest.raises(kind, match="mine"):
                CALLS[call](epilogue)
    torch.testing.assert_close(tmm_core.matmul(A, B), A @ B)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["derivative", "output_vjp"])
def test_an_exception_of_a_derivative_reaches_the_caller(
    name: str, kind: type[BaseException]
) -> None:
    epilogue = Epilogue("sine", torch.sin, **{name: raising(kind)})  # type: ignore[arg-type]
    with pytest.raises(kind, match="mine"):
        with_gradient(epilogue)


@pytest.mark.parametrize("kind", [SystemExit, Odd])
def test_verification_blames_no_kernel(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is computed in a tuning, and at a forced kernel's first use."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # where kernels are interpreted nothing is tuned
    fingerprint.cache_clear()
    made, _ = dispatcher(FakeBlas(), FakeKernel("fast"))
    ends = Epilogue("ends", raising(kind), device=lambda z: z)  # other kernels can fuse it
    problem = tmm_core.problem(A, B, epilogue=ends)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for chosen in (settings(), settings(kernel="fast")):
            with pytest.raises(kind, match="mine"):
                made.bound(problem, chosen)
    assert not made.quarantined
    fingerprint.cache_clear()


def test_a_kernels_own_exception_is_held_back() -> None:
    """Neither BLAS nor another kernel is the call's code."""
    made, _ = dispatcher(FakeBlas(), FakeKernel("leaving", spoil=raising(SystemExit)))
    problem = tmm_core.problem(A, B)
    with pytest.raises(PluginError, match="leaving raised SystemExit"):
        made.bound(problem, settings(kernel="leaving"))


def test_only_exceptions_that_passed_through_the_calls_code() -> None:
    """An ``Exception`` is a fault wherever it comes from: it ends no process."""

    @of_the_call
    def run(function: Callable[..., Any]) -> Any:
        return function()

    def held(function: Callable[..., Any], kind: type[BaseException]) -> None:
        try:
            function()
        except kind as error:
            reraise(error)

    for kind in (SystemExit, Odd):
        with pytest.raises(kind):
            held(lambda kind=kind: run(raising(kind)), kind)
        held(raising(kind), kind)
    held(lambda: run(raising(ValueError)), ValueError)
    assert warm.epilogue_of("relu").apply_to(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
