"""Quantised tensors as operands: their values in every kind of call, and refused arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tmm_core
from tmm_core import Quantized, formats
from tmm_core.verify import compare

Tensor = torch.Tensor
BF16 = torch.bfloat16
M, N, K = 5, 6, 16


def quantized(*shape: int, kind: str = "row", zeros: bool = True) -> Quantized:
    """Random int8 numbers, with their scales and zero points."""
    outer = (*shape[:-1], 1) if kind == "row" else ()
    codes = torch.randint(-128, 128, shape, dtype=torch.int8)
    zero = torch.randint(-20, 20, outer, dtype=torch.int8) if zeros else None
    return Quantized(codes, torch.rand(outer) / 64 + 0.01, zero)


def exact(t: Tensor) -> Tensor:
    """The values in fp64."""
    if not isinstance(t, Quantized):
        return t.double()
    zero = 0 if t.zero is None else t.zero.double()
    return (t.stored.double() - zero) * t.scale.double()


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype is BF16
    assert found.shape == expected.shape
    assert compare.error(found, expected) <= compare.TOLERANCE[BF16]


@pytest.mark.parametrize("kind", ["tensor", "row"])
@pytest.mark.parametrize("zeros", [False, True])
def test_values_of_either_operand(kind: str, zeros: bool) -> None:
    x, weight = torch.randn(M, K, dtype=BF16), quantized(N, K, kind=kind, zeros=zeros)
    a = quantized(M, K, kind=kind, zeros=zeros)
    expected = exact(x) @ exact(weight).T
    close(tmm_core.linear(x, weight, kernel="blas"), expected)
    close(tmm_core.matmul(x, weight.t(), kernel="blas"), expected)
    close(tmm_core.matmul(a, x.t(), kernel="blas"), exact(a) @ exact(x).T)
    close(tmm_core.matmul(a, weight.t(), kernel="blas"), exact(a) @ exact(weight).T)


@pytest.mark.parametrize("kind", ["tensor", "row"])
@pytest.mark.parametrize("zeros", [False, True])
def test_values_of_experts(kind: str, zeros: bool) -> None:
    """Each column of each expert has a scale and a zero point."""
    offs, rows = torch.tensor([2, 2, 7], dtype=torch.int32), torch.randn(7, K, dtype=BF16)
    weights, values = quantized(3, N, K, kind=kind, zeros=zeros), torch.empty(7, N).double()
    for group, (start, end) in enumerate([(0, 2), (2, 2), (2, 7)]):
        values[start:end] = exact(rows[start:end]) @ exact(weights)[group].T
    close(tmm_core.grouped_matmul(rows, weights.mT, offs=offs, kernel="blas"), values)
    a = quantized(7, K, kind=kind, zeros=zeros)
    plain = torch.randn(3, K, N, dtype=BF16)
    for group, (start, end) in enumerate([(0, 2), (2, 2), (2, 7)]):
        values[start:end] = exact(a)[start:end] @ exact(plain[group])
    close(tmm_core.grouped_matmul(a, plain, offs=offs, kernel="blas"), values)


def test_a_scale_is_not_given_twice() -> None:
    x, weight = torch.randn(M, K, dtype=BF16), quantized(N, K)
    with pytest.raises(TypeError, match="scale_b is given, but a quantised b has its own"):
        tmm_core.matmul(x, weight.t(), scale_b=torch.ones(()))


CODES = torch.ones(K, N, dtype=torch.int8)
ONE, ROW = torch.ones(()), torch.ones(1, N)

#: Arguments that replace a valid call's, the error, and its message.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"scale_b": None}, RuntimeError, "b of format int8 needs a scale"),
    ({"a": torch.ones(M, K, dtype=torch.float64)}, RuntimeError, "dtype"),
    ({"b": CODES.to(torch.uint8)}, RuntimeError, "format int8 stores int8, got torch.uint8"),
    ({"scale_b": ONE.double()}, RuntimeError, "scale_b must have dtype"),
    ({"scale_b": torch.ones(N, 1)}, ValueError, r"scale_b must be one number or have shape \(1, "),
    ({"scale_a": ONE}, RuntimeError, "scale_a is for"),
    ({"zero_b": ROW}, ValueError, "zero_b must have the shape of its operand's scale"),
    ({"zero_b": ONE.double()}, RuntimeError, "zero_b must have dtype"),
    ({"b": CODES.to(torch.float8_e4m3fn), "formats": ",fp8", "zero_b": ONE}, RuntimeError,
     "zero_b: format fp8 has no zero points"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "text"), REFUSED)
def test_wrong_parts_are_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    call: dict[str, Any] = {
        "a": torch.ones(M, K, dtype=BF16), "b": CODES, "scale_b": ONE, "formats": ",int8",
    }  # fmt: skip
    torch.ops.tmm.matmul(**call)
    with pytest.raises(error, match=text):
        torch.ops.tmm.matmul(**{**call, **change})


def test_a_named_format_allows_more_pairs_than_an_implied_one() -> None:
    e4m3, e5m2 = formats.named("fp8").storage
    assert formats.pair(torch.int8, torch.int8).stored is False
    assert formats.pair(BF16, torch.int8, ",int8").result is BF16
    assert formats.pair(torch.float64, torch.int8, ",int8").result is None
    assert formats.pair(BF16, e4m3).result is None
    assert formats.pair(e4m3, torch.int8, ",int8").result is None
    assert formats.pair(e4m3, torch.int8, "fp8,int8").result is BF16
    assert formats.pair(e4m3, e5m2).result is BF16


def test_int8_saturates() -> None:
    form = formats.named("int8")
    rounded = form.quantize(torch.tensor([-1e4, -128.4, 127.6, 1e4]), torch.int8)
    assert rounded.tolist() == [-128, -128, 127, 127]


def test_a_group_as_long_as_k_is_a_row_and_each_matrix_of_a_stack_has_a_scale() -> None:
    one, stack = torch.zeros(1, 32, dtype=torch.int8), torch.zeros(2, 1, 32, dtype=torch.int8)
    assert Quantized(one, torch.ones(()), block=(1, 32)).block == (0, 0)
    assert Quantized(stack, torch.ones(2, 1, 1), block=(1, 32)).block == (1, 0)
    assert Quantized(stack, torch.ones(2, 1), group=64).block == (1, 0)


@pytest.mark.parametrize("name", ["scale", "zero"])
def test_a_scale_or_zero_point_of_another_dtype_is_named(name: str) -> None:
    parts = {"scale": torch.ones(4, 1), "zero": torch.ones(4, 1, dtype=torch.int8)}
    parts[name] = parts[name].to(torch.int64)
    with pytest.raises(ValueError, match=f"{name} of format int8 must have dtype .*int64"):
        Quantized(torch.zeros(4, 8, dtype=torch.int8), **parts)


def test_only_a_quantised_tensor_is_copied_to_one() -> None:
    codes = torch.zeros(4, 8, dtype=torch.int8)
    own = Quantized(codes, torch.ones(4, 1))
    with pytest.raises(NotImplementedError, match="of a quantised tensor"):
        own.copy_(torch.ones(4, 8))
    with pytest.raises(RuntimeError, match="cannot copy"):
        own.copy_(Quantized(codes, torch.ones(())))
    own.copy_(Quantized(codes + 3, torch.full((4, 1), 2.0)))
    assert own.dequantize().eq(6).all()


@pytest.mark.parametrize("lead", [(), (2,)])
def test_one_scale_is_copied_from_a_view_or_a_copy(lead: tuple[int, ...]) -> None:
    codes = torch.zeros(*lead, 4, 8, dtype=torch.int8)
    own, other = (
        Quantized(codes + n, torch.tensor(float(n)), torch.tensor(n - 1, dtype=torch.int8))
        for n in (1, 2)
    )
    own.copy_(other.mT.clone().mT)  # whose scale and zero point have the values' dimensions
    assert own.dequantize().eq(2).all()
    own.stored += 1
    other.mT.copy_(own.mT)
    assert other.dequantize().eq(4).all()


@pytest.mark.parametrize(
    "weight",
    [
        5, None, torch.ones(4, 8, dtype=torch.int8), torch.ones(8), torch.ones(()),
        Quantized(torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 1)),
    ],
    ids=lambda weight: type(weight).__name__,
)  # fmt: skip
def test_quantize_refuses_all_but_floating_matrices(weight: Any) -> None:
    with pytest.raises(TypeError, match="takes a floating tensor of two dimensions or more"):
        tmm_core.quantize(weight, "int8")


def test_a_weight_of_one_row_is_rounded_with_one_scale() -> None:
    weight = torch.tensor([[1.0, -127.0]])
    for group in (None, 0):
        found = tmm_core.quantize(weight, "int8", group=group)
        assert (found.block, found.scale.numel()) == ((0, 0), 1)
        assert torch.equal(found.dequantize().float(), weight)
