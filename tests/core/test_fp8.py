"""8-bit operands and their scales, through the public calls and the operator."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import installed
from tmm_blas.blas import Blas

import tmm_core
from tmm_core.epilogues import parse
from tmm_core.spec.device import fingerprint
from tmm_core.spec.operand import Operand, Scale
from tmm_core.spec.problem import Problem
from tmm_core.verify import compare, random_inputs

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Tensor = torch.Tensor


def eight_bit(*shape: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.randn(shape).to(dtype)


def exact(a: Tensor, b: Tensor, scale_a: Any = 1.0, scale_b: Any = 1.0) -> Tensor:
    wide = [t.double() if isinstance(t, Tensor) else t for t in (a, scale_a, b, scale_b)]
    return (wide[0] * wide[1]) @ (wide[2] * wide[3])


def close(result: Tensor, expected: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    assert result.dtype is dtype
    assert result.shape == expected.shape
    assert compare.error(result, expected) <= compare.TOLERANCE[dtype]


def scales(kind: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    if kind == "row":
        return torch.rand(rows, 1) + 0.5, torch.rand(1, columns) + 0.5
    return torch.tensor(0.75), torch.tensor([2.0])


@pytest.mark.parametrize("a_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("b_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("kind", ["tensor", "row"])
def test_scaled_products(a_dtype: torch.dtype, b_dtype: torch.dtype, kind: str) -> None:
    a, b = eight_bit(33, 48, dtype=a_dtype), eight_bit(48, 20, dtype=b_dtype)
    scale_a, scale_b = scales(kind, 33, 20)
    weight = b.t().contiguous()
    both: dict[str, Any] = {"scale_a": scale_a, "scale_b": scale_b}
    for given in (both, {"scale_b": scale_b}, {"scale_a": scale_a}, {}):
        expected = exact(a, b, **given)
        close(tmm_core.matmul(a, b, **given), expected)
        close(tmm_core.linear(a, weight, **given), expected)


def test_the_whole_expression() -> None:
    x, weight = eight_bit(2, 7, 32), eight_bit(40, 32)
    scale_x, scale_w = torch.rand(2, 7, 1) + 0.5, torch.rand(1, 40) + 0.5
    bias, residual = torch.randn(40), torch.randn(7, 20, dtype=torch.bfloat16)
    z = 0.5 * exact(x, weight.t(), scale_x, scale_w) + bias
    expected = parse("swiglu").apply(z) + residual
    out = torch.empty(2, 7, 20, dtype=torch.float16)
    arguments: dict[str, Any] = {
        "alpha": 0.5, "epilogue": "swiglu", "scale_a": scale_x, "scale_b": scale_w,
    }  # fmt: skip
    result = tmm_core.linear(
        x, weight, bias, residual=residual.half(), out=out, out_dtype=torch.float16, **arguments
    )
    assert result is out
    close(out, expected, torch.float16)
    planned = tmm_core.plan(x, weight.t(), bias=bias, residual=residual, **arguments)
    again = planned(x, weight.t(), bias, residual, scale_a=scale_x, scale_b=scale_w)
    close(again, expected)


def test_scales_of_batches_and_vectors() -> None:
    a, b = eight_bit(3, 1, 5, 16), eight_bit(2, 16, 8)
    scale_a, scale_b = torch.rand(3, 1, 5, 1) + 0.5, torch.rand(2, 1, 8) + 0.5
    result = tmm_core.matmul(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
    close(result, exact(a, b, scale_a, scale_b), torch.float32)
    vector, scale = eight_bit(16), torch.tensor([1.5])
    close(tmm_core.matmul(vector, b, scale_a=scale), exact(vector, b, 1.5))
    close(tmm_core.matmul(a, vector, scale_a=scale_a), exact(a, vector) * scale_a.squeeze(-1))


def watched() -> list[tuple[Tensor, ...]]:
    """The scales of every launch of BLAS from now on."""
    seen: list[tuple[Tensor, ...]] = []

    class Watching(Blas):
        def bind(self, problem: Problem, config: Any) -> Any:
            right: Any = super().bind(problem, config)

            def launch(*arguments: Any, **scales: Any) -> Tensor:
                seen.append(tuple(scales.values()))
                return right(*arguments, **scales)

            return launch

    installed(Watching())
    return seen


def test_scales_of_any_stride() -> None:
    a, b = eight_bit(9, 16), eight_bit(16, 6)
    scale_a, scale_b = (torch.rand(9, 4) + 0.5)[:, 1:2], (torch.rand(6, 3) + 0.5)[:, 1:2].t()
    seen = watched()
    close(tmm_core.matmul(a, b, scale_a=scale_a, scale_b=scale_b), exact(a, b, scale_a, scale_b))
    assert all(scale.is_contiguous() for scales in seen for scale in scales)
    assert seen
    one = torch.tensor(0.25).expand(9, 1)
    planned = tmm_core.plan(a, b, scale_a=one)
    close(planned(a, b, scale_a=one), exact(a, b, 0.25))


@pytest.mark.parametrize("shared", ["a", "b"])
def test_scales_that_a_batch_shares_are_packed(shared: str) -> None:
    """Kernels step from matrix to matrix by the number of rows, or columns."""
    seen = watched()
    counts = {"a": 1, "b": 3} if shared == "a" else {"a": 3, "b": 1}
    a, b = eight_bit(counts["a"], 5, 16), eight_bit(counts["b"], 16, 8)
    scale_a, scale_b = torch.rand(counts["a"], 5, 1) + 0.5, torch.rand(counts["b"], 1, 8) + 0.5
    result = tmm_core.matmul(a, b, scale_a=scale_a, scale_b=scale_b)
    close(result, exact(a, b, scale_a, scale_b))
    ((of_a, of_b),) = seen
    assert (of_a.shape, of_b.shape) == ((3, 5, 1), (3, 1, 8))
    assert of_a.is_contiguous()
    assert of_b.is_contiguous()


def test_scales_are_read_at_every_call() -> None:
    a, b, scale = eight_bit(4, 16), eight_bit(16, 4), torch.ones(4, 1)
    for factor in (1.0, 3.0):
        close(tmm_core.matmul(a, b, scale_a=scale.mul_(factor)), exact(a, b, scale))


def test_a_product_without_terms_is_the_bias() -> None:
    result = tmm_core.matmul(
        eight_bit(3, 0), eight_bit(0, 4), scale_a=torch.ones(3, 1), bias=torch.ones(4)
    )
    assert torch.equal(result, torch.ones(3, 4, dtype=torch.bfloat16))
    assert tmm_core.matmul(eight_bit(0, 8), eight_bit(8, 4)).shape == (0, 4)


A, B = eight_bit(8, 32), eight_bit(32, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"scale_a": torch.ones(8)}, ValueError, r"scale_a must be one number or have shape \(8, "),
        ({"scale_a": torch.ones(4, 1)}, ValueError, r"shape \(8, 1\), got \(4, 1\)"),
        ({"scale_b": torch.ones(4, 1)}, ValueError, r"scale_b .* shape \(1, 4\), got \(4, 1\)"),
        ({"scale_b": torch.ones(()).half()}, RuntimeError, "dtype torch.float32, got torch.flo"),
        ({"scale_a": torch.ones((), device="meta")}, RuntimeError, "same device"),
        ({"out_dtype": E4M3}, TypeError, "floating dtype of 16 bits or more, got torch.float8"),
        ({"bias": torch.ones(4).to(E4M3)}, RuntimeError, "bias must have dtype"),
        ({"residual": torch.ones(8, 4).half()}, RuntimeError, "residual must have dtype"),
        ({"epilogue": "swiglu", "scale_b": torch.ones(1, 2)}, ValueError, r"shape \(1, 4\)"),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    arguments: Any, error: type[Exception], text: str
) -> None:
    for call in (tmm_core.matmul, tmm_core.plan, tmm_core.problem):
        with pytest.raises(error, match=text):
            call(A, B, **arguments)


def test_scales_are_for_8_bits() -> None:
    a, b = A.float(), B.float()
    with pytest.raises(RuntimeError, match="scale_a is for float8_e4m3fn and float8_e5m2"):
        tmm_core.matmul(a, b, scale_a=torch.ones(()))
    with pytest.raises(RuntimeError, match="same dtype"):
        tmm_core.matmul(A, b)


def test_a_plan_takes_only_the_scales_it_was_made_for() -> None:
    scale = torch.ones(8, 1)
    planned = tmm_core.plan(A, B, scale_a=scale)
    for given in ({}, {"scale_b": scale}, {"scale_a": torch.ones(())}):
        with pytest.raises(ValueError, match=r"takes (no scale_b|scale_a)"):
            planned(A, B, **given)
    with pytest.raises(ValueError, match="takes no scale_b, got one"):
        tmm_core.plan(A, B)(A, B, scale_b=scale[:1])


def test_products_of_8_bit_floats_have_no_derivative() -> None:
    bias = torch.ones(4, requires_grad=True)
    for epilogue in (None, "silu"):
        result = tmm_core.matmul(A, B, bias=bias, scale_a=torch.ones(()), epilogue=epilogue)
        with pytest.raises(RuntimeError, match=r"no derivative for torch\.float8_e4m3fn"):
            result.sum().backward()


def test_autocast_does_not_convert_8_bit_operands() -> None:
    scale = torch.rand(8, 1) + 0.5
    with torch.autocast("cpu", dtype=torch.float16):
        close(tmm_core.matmul(A, B, scale_a=scale), exact(A, B, scale))


def test_compiled_and_fake_calls() -> None:
    scale = torch.rand(8, 1) + 0.5
    compiled = torch.compile(
        lambda a, b, s: tmm_core.matmul(a, b, scale_a=s, epilogue="relu"),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    close(compiled(A, B, scale), exact(A, B, scale).relu())
    arguments = (A, B, None, None, 1.0, "", None, scale, torch.ones(1, 4))
    # torch's test for mutated inputs needs arithmetic that 8-bit floats do not have.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.tmm.matmul.default, arguments, test_utils=tests)


def test_other_problems_keep_their_keys() -> None:
    """Records from before there were scales are still found."""
    plain = tmm_core.problem(torch.ones(4, 8), torch.ones(8, 4))
    assert "scale" not in plain.to_json()["a"]
    problem = tmm_core.problem(A, B, scale_a=torch.ones(8, 1))
    document = json.loads(json.dumps(problem.to_json()))
    assert document["a"]["scale"] == "row"
    assert "scale" not in document["b"]
    assert Problem.from_json(document, problem.device, problem.epilogue) == problem
    other = {**document, "a": {**document["a"], "scale": "block"}}
    with pytest.raises(ValueError, match="by tensor, row or a block"):
        Problem.from_json(other, problem.device, problem.epilogue)
    assert str(problem) == "8×4×32 float8_e4m3fn→bfloat16 nn unaligned scales row·1"


def test_inputs_to_measure_with() -> None:
    operand = Operand(E4M3)
    device = fingerprint(torch.device("cpu"))
    out = Operand(torch.float32)
    problem = Problem(
        m=5, n=6, k=16, batch=2, a=replace(operand, scale=Scale.parse("row")),
        b=replace(operand, scale=Scale.parse("tensor")), out=out, device=device,
        epilogue=parse("swiglu"), scaled=True,
    )  # fmt: skip
    for instance in (problem, replace(problem, batch=1, b=problem.a)):
        inputs = random_inputs.make(instance, torch.device("cpu"), seed=3)
        assert inputs.parts.keys() == {"a_scale", "b_scale"}
        out = random_inputs.empty(instance.out, instance.out_shape, torch.device("cpu"))
        assert Problem.of(
            inputs.a, inputs.b, out, device, scaled=True,
            stored={name: {"scale": Scale.of(inputs.parts[f"{name}_scale"])} for name in "ab"},
            epilogue=instance.epilogue,
        ) == instance  # fmt: skip
        z = (
            exact(inputs.a, inputs.b, inputs.parts["a_scale"], inputs.parts["b_scale"])
            * inputs.alpha
        )
        expected = instance.epilogue.apply(z)
        product, _ = compare._multiplied(instance, inputs)
        assert torch.allclose(instance.epilogue.apply(product), expected, rtol=1e-12)


def test_vmap() -> None:
    a, b = (torch.randn(3, 5, 16).to(E4M3), torch.randn(4, 16, 8).to(E4M3))
    scale_a, scale_b = torch.rand(3, 5, 1) + 0.5, torch.rand(4, 1, 8) + 0.5

    def product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
        return tmm_core.matmul(a, b, scale_a=scale_a, scale_b=scale_b, epilogue="silu")

    inner = torch.vmap(product, (None, None, 0, 1))
    found = torch.vmap(inner, (0, 0, None, None))(a, scale_a, b, scale_b.movedim(0, 1))
    expected = [
        torch.stack([product(*row, *column) for column in zip(b, scale_b, strict=True)])
        for row in zip(a, scale_a, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(expected))
    empty = torch.vmap(lambda a: product(a, scale_a[0], b[0], scale_b[0]))(a[:0])
    assert (empty.shape, empty.dtype) == ((0, 5, 8), found.dtype)
