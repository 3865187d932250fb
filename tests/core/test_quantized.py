"""``Quantized``: calls of every kind, the tensor's own behaviour, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tmm_core
from tmm_core import Format, Quantized, formats

Tensor = torch.Tensor
BF16 = torch.bfloat16


def quantized(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Quantized, Tensor]:
    """Random int8 weights with a scale for each row, and their values in fp64."""
    codes = torch.randint(-127, 128, shape, dtype=torch.int8)
    scale = (torch.rand(*shape[:-1], 1) / 127 + 1e-3).to(dtype)
    return Quantized(codes, scale), codes.double() * scale.double()


def close(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected).abs() / (expected.abs() + expected.square().mean().sqrt())
    assert error.max() < 1.6e-2, float(error.max())


WEIGHT, VALUES = quantized(24, 32)
X = torch.randn(5, 32, dtype=BF16)

CALLS: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: tmm_core.linear(X, WEIGHT),
    "matmul": lambda: tmm_core.matmul(X, WEIGHT.t()),
    "operator": lambda: X @ WEIGHT.mT,
    "torch.matmul": lambda: torch.matmul(X, WEIGHT.t()),
    "F.linear": lambda: torch.nn.functional.linear(X, WEIGHT),
    "out": lambda: tmm_core.matmul(X, WEIGHT.t(), out=torch.empty(5, 24, dtype=BF16)),
    "integer alpha": lambda: tmm_core.linear(X, WEIGHT, alpha=1),
    "more dimensions": lambda: tmm_core.linear(X[None, None], WEIGHT)[0, 0],
    "vmapped": lambda: torch.vmap(lambda x: tmm_core.linear(x, WEIGHT))(X[:, None])[:, 0],
    "forced": lambda: tmm_core.linear(X, WEIGHT, kernel="blas"),
    "compiled": lambda: torch.compile(tmm_core.linear, backend="eager")(X, WEIGHT),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_takes_a_quantised_weight(call: str) -> None:
    y = CALLS[call]()
    assert y.dtype == BF16
    close(y, X.double() @ VALUES.T)


def test_it_is_an_operand_on_either_side() -> None:
    b = torch.randn(32, 6, dtype=BF16)
    close(tmm_core.matmul(WEIGHT, b), VALUES @ b.double())
    close(tmm_core.matmul(WEIGHT, WEIGHT.t()), VALUES @ VALUES.T)
    eight = (torch.randn(6, 32) / 4).to(torch.float8_e4m3fn)
    mixed = tmm_core.matmul(Quantized(eight, torch.tensor(2.0), format="fp8"), WEIGHT.t())
    close(mixed, 2 * eight.double() @ VALUES.T)
    weights_only = tmm_core.linear(X, Quantized(eight, torch.ones(6), format="fp8"))
    close(weights_only, X.double() @ eight.double().T)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_a_quantised_product_with_every_term(dtype: torch.dtype) -> None:
    weight, values = quantized(48, 32, dtype=dtype)
    bias, residual = torch.randn(48, dtype=BF16), torch.randn(5, 24, dtype=BF16)
    gate, up = (0.5 * X.double() @ values.T + bias.double()).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up + residual.double()
    y = tmm_core.linear(X, weight, bias, alpha=0.5, epilogue="swiglu", residual=residual)
    close(y, expected)


def test_zero_points_are_subtracted_first() -> None:
    codes = torch.randint(-128, 128, (24, 32), dtype=torch.int8)
    scale, zero = torch.rand(24) / 64, torch.randint(-20, 20, (24,), dtype=torch.int8)
    values = (codes.double() - zero.double()[:, None]) * scale.double()[:, None]
    close(tmm_core.linear(X, Quantized(codes, scale, zero)), X.double() @ values.T)
    close(Quantized(codes, scale, zero).dequantize(), values)


def test_groups() -> None:
    weight, values = quantized(3, 24, 32)
    x, ends = torch.randn(12, 32, dtype=BF16), [4, 4, 12]
    offs = torch.tensor(ends, dtype=torch.int32)
    parts = [x[s:e].double() @ v.T for s, e, v in zip([0, *ends], ends, values, strict=False)]
    close(tmm_core.grouped_linear(x, weight, offs=offs), torch.cat(parts))
    stack = torch.randn(3, 4, 32, dtype=BF16)
    close(tmm_core.grouped_matmul(stack, weight.mT), stack.double() @ values.mT)


def test_gathered_rows_take_their_scales_and_zero_points_along() -> None:
    codes = torch.randint(-128, 128, (5, 32), dtype=torch.int8)
    scale, zero = torch.rand(5) / 64, torch.randint(-20, 20, (5,), dtype=torch.int8)
    a, order = Quantized(codes, scale, zero), torch.tensor([4, 0, 3, 1, 2, 4])
    b, offs = torch.randn(2, 32, 24, dtype=BF16), torch.tensor([2, 6], dtype=torch.int32)
    rows = ((codes.double() - zero.double()[:, None]) * scale.double()[:, None])[order]
    y = tmm_core.grouped_matmul(a, b, offs=offs, a_index=order)
    close(y, torch.cat([rows[:2] @ b[0].double(), rows[2:] @ b[1].double()]))


def test_it_behaves_as_a_parameter() -> None:
    layer = torch.nn.Linear(32, 24, bias=False, dtype=BF16)
    layer.weight = torch.nn.Parameter(WEIGHT, requires_grad=False)
    expected = layer(X)
    close(expected, X.double() @ VALUES.T)
    other = copy.deepcopy(layer)
    assert torch.equal(other(X), expected)
    other.weight.stored.zero_()
    assert not torch.equal(other(X), expected)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(X), expected)
    assert layer.half().weight.dtype is torch.float16
    assert isinstance(layer.to("meta").weight, Quantized)
    with pytest.raises(NotImplementedError, match="dequantize"):
        torch.add(WEIGHT, 1)


def test_a_cast_of_autocast_is_of_the_plain_operand() -> None:
    with torch.autocast("cpu", BF16):
        y = tmm_core.linear(X.float(), WEIGHT)
    assert torch.equal(y, tmm_core.linear(X, WEIGHT))


ONE = torch.ones(())
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "format": (lambda: Quantized(WEIGHT.stored, ONE, format="int3"), ValueError, "unknown format"),
    "dtype": (lambda: Quantized(X, ONE), ValueError, "stores int8, got torch.bfloat16"),
    "scale": (lambda: Quantized(WEIGHT.stored, torch.ones(7)), ValueError, "scale must be one num"),
    "zero": (
        lambda: Quantized(X.to(torch.float8_e5m2), ONE, ONE, format="fp8"), ValueError,
        "no zero points",
    ),
    "group": (
        lambda: Quantized(WEIGHT.stored, ONE, group=7), ValueError,
        "int8 has scales by tensor or row or 1x32 or 1x64 or 1x128, not 1x7",
    ),
    "twice": (
        lambda: tmm_core.matmul(X, WEIGHT.t(), scale_b=ONE), TypeError,
        "scale_b is given, but a quantised b has its own",
    ),
    "plain": (
        lambda: tmm_core.matmul(X, WEIGHT.t().stored.to(BF16), scale_b=ONE), RuntimeError,
        "scale_b is for float8_e4m3fn and float8_e5m2 operands, got torch.bfloat16",
    ),
    "shapes": (lambda: tmm_core.linear(X[:, :7], WEIGHT), RuntimeError, "mat1 and mat2"),
    "integers": (lambda: tmm_core.linear(X.int(), WEIGHT), RuntimeError, "dtype"),
    "derivative": (
        lambda: tmm_core.linear(X.clone().requires_grad_(), WEIGHT).sum().backward(), RuntimeError,
        "no derivative",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_arguments_are_refused(case: str) -> None:
    call, kind, text = REFUSED[case]
    with pytest.raises(kind, match=text):
        call()


def test_a_format_has_one_name_and_one_dtype_of_its_own() -> None:
    form = formats.named("int8")
    other = Format(
        name="int8", storage=(torch.int8,), quantize=form.quantize, dequantize=form.dequantize,
        tolerance=0.0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="two formats are named 'int8'"):
        formats.add(other)
    formats.add(form)  # again
