"""Calls with ``out``: what autograd learns of the write, what is refused, and that later calls like
one before are checked as the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_valid_calls import OFFS
from torch.utils.flop_counter import FlopCounterMode

import tmm_core
from tmm_core.interop import grouped_operator, operator

Tensor = torch.Tensor
Call = Callable[[Tensor], Any]

A, B = torch.randn(4, 8), torch.randn(8, 4)
GROUPS = torch.randn(2, 8, 4)


def planned(out: Tensor) -> Tensor:
    return tmm_core.plan(A, B)(A, B, out=out)


def planned_for_triton(out: Tensor) -> Tensor:
    return tmm_core.plan(A, B, kernel="triton.naive")(A, B, out=out)


def by_operator(out: Tensor) -> Tensor:
    with tmm_core.override(kernel="triton.naive"):
        y: Tensor = torch.ops.tmm.matmul.out(A, B, out=out)
    return y


#: Calls whose result is 4×4.
CALLS: dict[str, Call] = {
    "matmul": lambda out: tmm_core.matmul(A, B, out=out),
    "matmul by Triton": lambda out: tmm_core.matmul(A, B, out=out, kernel="triton.naive"),
    "with a residual": lambda out: tmm_core.matmul(A, B, residual=B[:4], epilogue="silu", out=out),
    "linear": lambda out: tmm_core.linear(A, B.T.contiguous(), out=out),
    "grouped": lambda out: tmm_core.grouped_matmul(A, GROUPS, offs=OFFS, out=out),
    "grouped by Triton": lambda out: tmm_core.grouped_matmul(
        A, GROUPS, offs=OFFS, out=out, kernel="triton.ragged"
    ),
    "operator": by_operator,
    "plan": planned,
    "plan of Triton": planned_for_triton,
}
TIMES = [1, 2]


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    return CALLS[request.param]


@pytest.mark.parametrize("times", TIMES)
def test_a_backward_that_needs_the_values_before_is_refused(call: Call, times: int) -> None:
    saved, x = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    for _ in range(times - 1):
        call(torch.empty(4, 4))
    y = (x * saved).sum()
    assert call(saved) is saved
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize("times", TIMES)
def test_a_tensor_of_inference_mode_is_refused_outside_of_it(call: Call, times: int) -> None:
    with torch.inference_mode():
        out, other = torch.zeros(4, 4), torch.zeros(4, 4)
        for _ in range(times):
            assert call(out) is out
    before = out.clone()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor") as refused:
        other.zero_()
    for _ in range(times):
        with pytest.raises(RuntimeError) as mine:
            call(out)
    assert str(mine.value) == str(refused.value)
    assert torch.equal(out, before)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("by_plan", [False, True])
def test_an_operand_as_out_is_refused_at_each_call(name: str, by_plan: bool) -> None:
    given = {"a": torch.randn(4, 4), "b": torch.randn(4, 4)}
    call = tmm_core.plan(**given) if by_plan else tmm_core.matmul
    call(**given, out=torch.empty(4, 4))
    before = given[name].clone()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            call(**given, out=given[name])
    assert torch.equal(given[name], before)


def test_a_plan_writes_between_the_rows_of_an_operand() -> None:
    room = torch.randn(1, 32)
    a = torch.as_strided(room, (2, 8), (24, 1))  # gaps of 16 numbers
    out = torch.as_strided(room, (2, 4), (4, 1), 12)
    expected = a.double() @ B.double()
    y = tmm_core.plan(a, B)(a, B, out=out)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["matmul", "linear", "grouped"])
def test_later_calls_need_no_dispatcher(name: str, monkeypatch: Any) -> None:
    expected = CALLS[name](torch.empty(4, 4)).clone()

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("the dispatcher was called")

    monkeypatch.setattr(operator, "matmul_out", refused)
    monkeypatch.setattr(grouped_operator, "grouped_matmul_out", refused)
    out = torch.full((4, 4), float("nan"))
    assert CALLS[name](out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kernel", ["blas", "triton.naive"])
@pytest.mark.parametrize("grouped", [False, True])
def test_later_calls_see_that_an_operand_is_negated(grouped: bool, kernel: str) -> None:
    """It has the memory and the strides of an earlier operand."""
    x = torch.randn(4, 8, dtype=torch.complex64)
    for a in (torch.imag(x), torch.imag(x.conj())) * 2:
        out = torch.empty(4, 4)
        if grouped:
            given = {} if kernel == "blas" else {"kernel": "triton.ragged"}
            tmm_core.grouped_matmul(a, GROUPS, offs=OFFS, out=out, **given)
        else:
            tmm_core.matmul(a, B, out=out, kernel=kernel)
        expected = tmm_core.grouped_matmul(a.clone(), GROUPS, offs=OFFS) if grouped else a @ B
        rows = int(OFFS[-1]) if grouped else None
        torch.testing.assert_close(out[:rows], expected[:rows])


@pytest.mark.parametrize("name", ["matmul", "matmul by Triton", "linear", "grouped by Triton"])
def test_later_calls_are_checked_as_the_first(name: str) -> None:
    call = CALLS[name]
    call(torch.empty(4, 4))
    with pytest.raises(RuntimeError, match="requires grad"):
        call(torch.empty(4, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match="dtype"):
        call(torch.empty(4, 4, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="single memory location"):
        call(torch.empty(1, 4).expand(4, 4))
    for _ in range(2):
        small = torch.empty(2, 2)
        with pytest.warns(UserWarning, match="was resized"):
            call(small)
        torch.testing.assert_close(small, call(torch.empty(4, 4)))


def test_out_under_autocast_keeps_its_dtype() -> None:
    expected = A.double() @ B.double()
    for _ in range(2):
        with torch.autocast("cpu"):
            out = tmm_core.matmul(A, B, out=torch.empty(4, 4))
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_mode_sees_later_calls() -> None:
    call = CALLS["matmul"]
    call(torch.empty(4, 4))
    with FlopCounterMode(display=False) as counter:
        call(torch.empty(4, 4))
    assert counter.get_total_flops() == 2 * 4 * 8 * 4
