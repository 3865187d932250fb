"""Rows in no group add nothing, even if they are NaN: on both paths, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from drawn import recording
from torch import nn

import tmm_core
from tmm_core.nn import Experts, experts

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

Tensor = torch.Tensor
NAN = math.nan


@pytest.fixture(autouse=True)
def quick(blas_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMM_ON_CACHE_MISS", "heuristic")


def both(call: Any, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The result, which is the same with and without gradients, and the gradients."""
    with torch.no_grad():
        plain = call(*tensors)
    given = [recording(t) for t in tensors]
    y = call(*given)
    torch.testing.assert_close(y.detach(), plain, equal_nan=True)
    return plain, list(torch.autograd.grad(y.sum(), given))


@pytest.mark.parametrize("poison", [NAN, math.inf])
def test_experts_of_other_ranks_add_nothing(poison: float) -> None:
    torch.manual_seed(0)
    layer = Experts(4, 8, 12, bias=True)
    x, chosen = torch.randn(2, 8), torch.tensor([[0, 4], [1, 4]])
    clean, dirty = torch.tensor([[0.5, 0.0]] * 2), torch.tensor([[0.5, poison]] * 2)
    wanted, wanted_grads = both(lambda x, w: layer(x, chosen, w), x, clean)
    y, grads = both(lambda x, w: layer(x, chosen, w), x, dirty)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(grads, wanted_grads)
    assert not grads[1][:, 1].any()


def test_an_expert_without_rows_may_hold_nan() -> None:
    torch.manual_seed(0)
    layer = Experts(4, 8, 12, bias=True)
    with torch.no_grad():
        for t in layer.parameters():
            t[2] = NAN
    x, chosen = torch.randn(3, 8), torch.tensor([[0, 1], [3, 4], [1, 0]])
    y, grads = both(lambda x, w: layer(x, chosen, w), x, torch.rand(3, 2))
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in grads)
    layer(x, chosen, torch.rand(3, 2)).sum().backward()
    for t in layer.parameters():
        assert t.grad is not None
        assert not t.grad[2].any()


class Gate(nn.Module):
    """Has a parameter, whose gradient sums over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.slope * x


def poisoned_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the rows that a grouped product leaves undefined with NaN."""
    product = experts.grouped.grouped_matmul

    def grouped_matmul(a: Tensor, b: Tensor, *, offs: Tensor, **more: Any) -> Tensor:
        y = product(a, b, offs=offs, **more)
        if "out_index" in more:
            return y
        known = torch.arange(len(y)) < offs[-1]
        return torch.where(known[:, None], y, NAN)

    monkeypatch.setattr(experts.grouped, "grouped_matmul", grouped_matmul)


def test_a_norm_and_a_gate_with_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer: Any = Experts(4, 8, 12)
    layer.post_expert_norm = nn.RMSNorm(8)
    layer.has_post_expert_norm = True
    gate = Gate()
    monkeypatch.setattr(experts, "_gate_of", lambda self: ("swiglu", gate))
    poisoned_product(monkeypatch)
    x, chosen = torch.randn(2, 8), torch.tensor([[0, 4], [1, 4]])
    y, grads = both(lambda x, w: layer(x, chosen, w), x, torch.tensor([[0.5, NAN]] * 2))
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in grads)
    layer(x, chosen, torch.tensor([[0.5, NAN]] * 2)).sum().backward()
    assert layer.post_expert_norm.weight.grad.isfinite().all()
    assert gate.slope.grad is not None
    assert gate.slope.grad.isfinite()


@pytest.mark.parametrize("epilogue", [None, "relu", "silu", "swiglu"])
def test_gradients_beyond_the_last_group_are_zero(epilogue: str | None) -> None:
    """This includes gradients of a residual and of weights, and results whose gradient is NaN."""
    torch.manual_seed(0)
    offs = torch.tensor([2, 2, 4], dtype=torch.int32)
    n = 3 if epilogue == "swiglu" else 6
    a, b, bias = torch.randn(6, 8), torch.randn(3, 8, 6), torch.randn(3, 6)
    weights, residual = torch.rand(6), torch.randn(6, n)
    a[4:] = weights[4:] = residual[4:] = b[1] = bias[1] = NAN
    given = [recording(t) for t in (a, b, bias, weights, residual)]
    y = tmm_core.grouped_matmul(
        given[0], given[1], offs=offs, bias=given[2], out_weights=given[3], residual=given[4],
        epilogue=epilogue,
    )  # fmt: skip
    up = torch.ones_like(y)
    up[4:] = NAN
    found = torch.autograd.grad(y, given, up)
    for t in found:
        assert t.isfinite().all()
    for t in (found[0], found[3], found[4]):
        assert not t[4:].any()
        assert t[:4].any()
    assert not found[1][1].any()
    assert not found[2][1].any()


def test_the_tangent_of_a_bias_does_not_read_the_weights() -> None:
    a, b, offs = torch.randn(4, 8), torch.randn(2, 8, 6), torch.tensor([2, 4], dtype=torch.int32)
    b[1, :, 0] = math.inf
    bias = torch.randn(2, 6)

    def call(bias: Tensor) -> Tensor:
        return tmm_core.grouped_matmul(a, b, offs=offs, bias=bias)

    tangent = torch.func.jvp(call, (bias,), (torch.ones(2, 6),))[1]
    torch.testing.assert_close(tangent, torch.ones(4, 6))
    plain = torch.func.jvp(
        lambda t: tmm_core.matmul(a, b[1], bias=t), (bias[0],), (torch.ones(6),)
    )[1]
    torch.testing.assert_close(plain, torch.ones(4, 6))


@pytest.mark.parametrize("along", ["m", "k"])
def test_the_tangent_of_a_bias_is_that_of_each_group(along: str) -> None:
    bias, tangent = torch.randn(3, 6), torch.randn(3, 6)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second group is empty
    a, b = torch.randn(5, 8), torch.randn(3, 8, 6)
    if along == "k":
        a, b = torch.randn(8, 5), torch.randn(5, 6)
    found = torch.func.jvp(
        lambda t: tmm_core.grouped_matmul(a, b, offs=offs, bias=t), (bias,), (tangent,)
    )[1]
    groups = tangent[[0, 0, 2, 2, 2]] if along == "m" else tangent[:, None].expand(3, 8, 6)
    torch.testing.assert_close(found, groups)


def test_the_tangent_of_a_skipped_row_is_zero() -> None:
    offs, places = torch.tensor([2], dtype=torch.int32), torch.tensor([1, 0, 3, 2])
    a, b = torch.randn(4, 8), torch.randn(1, 8, 6)

    def call(a: Tensor) -> Tensor:
        return tmm_core.grouped_matmul(a, b, offs=offs, out_index=places)

    ones = torch.ones(4, 8)
    ones[2:] = NAN
    _, tangent = torch.func.jvp(call, (a,), (ones,))
    assert tangent.isfinite().all()
    assert not tangent[2:].any()


def test_gathered_rows_of_one_row() -> None:
    """A single row has no stride, and its copies have one."""
    offs = torch.tensor([1, 1, 3], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        for k in (33, 3, 8):
            a, b = torch.randn(1, k).to(dtype), torch.randn(3, k, 8).to(dtype)
            rows = torch.zeros(3, dtype=torch.int64)
            y = tmm_core.grouped_matmul(a, b, offs=offs, a_index=rows)
            wanted = torch.cat([a @ b[0], a @ b[2], a @ b[2]])
            torch.testing.assert_close(y, wanted, rtol=2e-2, atol=2e-2)
