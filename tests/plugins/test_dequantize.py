"""Tests the pass that dequantises for BLAS. Values in the interpreter and on a GPU are compared
with torch's operators, and the pass is compiled for four architectures."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test_quantized_compile import OPERANDS, TARGETS
from test_ragged_compile import BF16, ROW
from tmm_blas import blas, dequantized, grouped_mm
from tmm_blas.blas import Blas, BlasConfig

import tmm_core
from tmm_core import Groups, Operand, Problem, Quantized, Scale, formats, quantize
from tmm_core.epilogues import parse
from tmm_core.spec.device import fingerprint, interpreting
from tmm_core.triton import compile_for, dequantizer, source, target_of
from tmm_core.triton import dequantize as module
from tmm_core.triton.dequantize import Dequantize, arguments, dequantize_kernel

Tensor = torch.Tensor
E4M3 = torch.float8_e4m3fn
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not interpreting() else "cpu")
runs = pytest.mark.skipif(
    not interpreting() and DEVICE.type == "cpu", reason="needs the interpreter or a GPU"
)


def drawn(form: str, *shape: int, **how: Any) -> Quantized:
    return quantize(torch.randn(shape, device=DEVICE), form, **how)


def with_zeros(zero: torch.dtype, scale: torch.dtype) -> Quantized:
    plain = drawn("int4", 37, 256, group=64)
    zeros = torch.rand(plain.scale.shape, device=DEVICE) * 15
    # Scales of a checkpoint lie along rows.
    scales = plain.scale.to(scale).t().contiguous().t()
    return Quantized(plain.stored, scales, zeros.to(zero), format="int4", group=64)


WEIGHTS: dict[str, Any] = {
    "int4": lambda: drawn("int4", 70, 256, group=32),
    "int4 by 128": lambda: drawn("int4", 70, 384, group=128),
    "int4_signed by 256": lambda: drawn("int4_signed", 9, 512, group=256),
    "int8 by 64": lambda: drawn("int8", 33, 192, group=64),
    "mxfp4": lambda: drawn("mxfp4", 5, 40, 96),
    "mxfp8": lambda: drawn("mxfp8", 40, 96),
    "fp8 by 128": lambda: drawn("fp8", 17, 256, group=128),
    "fp8 in blocks": lambda: drawn("fp8", 2, 200, 304, block=(128, 128)),
    "fp8 in blocks, unaligned": lambda: drawn("fp8", 200, 300, block=(128, 128)),
    "zero points": lambda: with_zeros(torch.uint8, BF16),
    "fractions as zero points": lambda: with_zeros(torch.float16, torch.float16),
}
#: Scales of rows, which BLAS folds into values.
BY_ROW: dict[str, Any] = {
    "int8 by row": lambda: drawn("int8", 48, 128, group=0),
    "fp8 by row": lambda: drawn("fp8", 48, 128, group=0),
    "experts of int8": lambda: drawn("int8", 3, 48, 128, group=0),
}


def described(weight: Quantized) -> Operand:
    zero = None if weight.zero is None else weight.zero.dtype
    scale = Scale(weight.block, weight.scale.dtype)
    return Operand.of(weight.stored, format=weight.format, scale=scale, zero=zero)


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("of", [*WEIGHTS, *BY_ROW])
def test_values(of: str, dtype: torch.dtype) -> None:
    weight = {**WEIGHTS, **BY_ROW}[of]()
    zeros = weight.zero is not None
    found = Dequantize(described(weight), weight.shape[-1], dtype, DEVICE, True, zeros)(
        weight.stored, weight.scale, weight.zero
    )
    form = formats.named(weight.format)
    exact = form.values(weight.stored, weight.scale, weight.zero, torch.float32, weight.block)
    if dtype is BF16 and interpreting():  # which truncates
        assert ((found.float() - exact).abs() <= exact.abs() / 128).all()
    else:
        assert torch.equal(found, exact.to(dtype))


@runs
def test_codes_alone_and_nothing() -> None:
    """Scales of rows multiply the product, so this pass leaves them out."""
    weight = drawn("int8", 9, 100, group=0)
    run = Dequantize(described(weight), 100, BF16, DEVICE, False, False)
    assert torch.equal(run(weight.stored, None, None), weight.stored.to(BF16))
    assert run(weight.stored[:0], None, None).shape == (0, 100)


@runs
def test_one_scale_for_all_values() -> None:
    weight = drawn("int8", 9, 128, block=(0, 0))
    run = Dequantize(described(weight), 128, torch.float32, DEVICE, True, False)
    assert arguments(described(weight), 128, BF16, True, False)["constants"]["OUTER"] > 2**20
    found = run(weight.stored, weight.scale.reshape(1, 1), None)
    assert torch.equal(found, weight.stored.float() * weight.scale)


@runs
def test_scales_that_are_not_finite() -> None:
    weight = drawn("mxfp4", 3, 64)
    weight.scale[0, 0], weight.scale[1, 1] = 255, 0
    found = Dequantize(described(weight), 64, torch.float32, DEVICE, True, False)(
        weight.stored, weight.scale, None
    )
    assert found[0, :32].isnan().all()
    assert torch.equal(found[1, 32:], weight.dequantize().float()[1, 32:])


def compiled(target: str, of: str) -> list[tuple[int, str]]:
    device = TARGETS[target]
    found = []
    for which, operand in enumerate(OPERANDS[of]):
        if operand.form is None or (which == 0 and not operand.grid):
            continue
        zeros = operand.zero is not None and operand.grid
        for k in (4096, 300) if of == "fp8 by blocks" else (4096,):
            given = arguments(operand, k, BF16, operand.grid, zeros)
            src = source(dequantize_kernel, given["types"], given["constants"], given["divisible"])
            result = compile_for(target_of(device), src, num_warps=4, num_stages=1)
            found.append((k, result.asm.get("ptx", "")))
    return found


@pytest.mark.parametrize("of", OPERANDS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.slow(quick=8)
def test_it_compiles(target: str, of: str, request: pytest.FixtureRequest) -> None:
    if "fp8" in of and (TARGETS[target].capability < (8, 9) or target == "gfx942"):
        pytest.skip("8-bit floats need compute capability 8.9")
    process = "uninterpreted_amd" if target == "gfx942" else "uninterpreted"
    found = request.getfixturevalue(process)(compiled, target, of)
    assert found
    for k, ptx in found if target != "gfx942" else ():
        # Loads and stores of 16 bytes where rows are aligned.
        assert ("ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx) is (k == 4096)
        assert ".local" not in ptx


def problem_of(b: Operand, **changes: Any) -> Problem:
    problem = Problem(64, 256, 512, ROW, b, ROW, TARGETS["90"])
    return replace(problem, **changes)


def test_operands_that_it_leaves_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operators serve every other operand."""
    bound: list[Any] = []
    monkeypatch.setattr(module, "Dequantize", lambda *given: bound.append(given) or "bound")
    int4 = OPERANDS["int4"][1]
    assert dequantizer(problem_of(int4), "b", BF16) == "bound"
    assert bound == [(int4, 512, BF16, torch.device("cuda"), True, False)]
    two = problem_of(OPERANDS["fp8 by blocks"][1], a=OPERANDS["fp8 by blocks"][0])
    assert dequantizer(two, "a", BF16) == dequantizer(two, "b", BF16) == "bound"
    old = replace(two, device=TARGETS["80"])
    nvfp4 = Operand(torch.uint8, "col", format="nvfp4", scale=Scale.parse("1x16"))
    by_row = Operand(torch.int8, "col", format="int8", scale=Scale.parse("row"), zero=torch.int8)
    for problem in (
        problem_of(replace(int4, layout="row")), problem_of(ROW), problem_of(nvfp4),
        problem_of(by_row), old,
        problem_of(int4, device=fingerprint(torch.device("cpu"))),
        problem_of(int4, device=TARGETS["80"], groups=Groups(4, "k")),
    ):  # fmt: skip
        assert dequantizer(problem, "b", BF16) is None
    assert dequantizer(two, "a", BF16) == "bound"
    assert dequantizer(problem_of(int4), "a", BF16) is None


def test_scales_of_rows_are_applied_where_they_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Dequantize", lambda *given: given[-2:])
    by_row = Operand(torch.int8, "col", format="int8", scale=Scale.parse("row"))
    for folds in (False, True):
        assert dequantizer(problem_of(by_row), "b", BF16, folds) == (folds, False)
        assert dequantizer(problem_of(replace(by_row, scale=None)), "b", BF16, folds) == (
            False,
            False,
        )
        assert dequantizer(problem_of(OPERANDS["int4"][1]), "b", BF16, folds) == (True, False)


@pytest.mark.parametrize(
    ("form", "aligned", "k", "divisible"),
    [
        ("int8", True, 512, {"stored_ptr": 16, "stride_z": 16, "stride_n": 16, "K": 16}),
        ("int8", True, 520, {"stored_ptr": 16, "stride_z": 16, "stride_n": 16}),
        ("int8", True, 129, {"stored_ptr": 16, "stride_z": 16, "stride_n": 16}),
        ("int8", False, 512, {"K": 16}),
        ("int4", True, 40, {"stored_ptr": 16, "stride_z": 16, "stride_n": 16}),
    ],
)
def test_which_alignment_the_compiler_knows(
    form: str, aligned: bool, k: int, divisible: dict[str, int]
) -> None:
    dtype = formats.named(form).storage[0]
    operand = Operand(dtype, "col", format=form, aligned=aligned, scale=Scale.parse("row"))
    given = arguments(operand, k, BF16, False, False)
    assert given["divisible"] == {"out_ptr": 16, **divisible}
    assert given["constants"]["EVEN"] is (k % 128 == 0)


def test_it_is_not_loaded_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Dequantize", lambda *given: "bound")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert dequantizer(problem_of(OPERANDS["int4"][1]), "b", BF16) is None


def test_a_compiler_that_fails_costs_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError("no ptxas")

    monkeypatch.setattr(module, "Dequantize", fails)
    monkeypatch.setattr(module, "_reported", [])
    problem = problem_of(OPERANDS["int4"][1])
    with pytest.warns(tmm_core.TmmWarning, match=r"torch's operators do it .* no ptxas"):
        assert dequantizer(problem, "b", BF16) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dequantizer(problem, "b", BF16) is None


ROWS_OF_8_BITS = {
    "int8": (ROW, Operand(torch.int8, "col", format="int8", scale=Scale.parse("row bfloat16"))),
    "int8, one scale": (
        ROW, Operand(torch.int8, "col", format="int8", scale=Scale.parse("tensor")),
    ),
    "fp8 of both": (
        Operand(E4M3, scale=Scale.parse("row")), Operand(E4M3, "col", scale=Scale.parse("tensor")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("of", ROWS_OF_8_BITS)
def test_scales_of_rows_are_folded_into_values(
    of: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU this saves the result a pass in fp32. Here torch stands in for the kernel."""
    a, b = ROWS_OF_8_BITS[of]
    calls = []

    def fused(problem: Problem, which: str, dtype: torch.dtype, folds: bool = False) -> Any:
        calls.append((which, dtype, folds))

        def run(stored: Tensor, scale: Tensor, zero: None) -> Tensor:
            assert stored.stride(-1) == 1
            assert scale.dim() == stored.dim()
            assert stored.dim() == 2 or len(scale) == batch
            return (stored.double() * scale.double()).to(dtype)

        return run

    monkeypatch.setattr(dequantized, "_fused", fused)
    problem = replace(
        problem_of(b, a=a, m=5, n=7, k=32, batch=batch, bias=BF16, epilogue=parse("silu")),
        device=replace(TARGETS["90"], capability=(8, 0)),
    )
    lead = (batch,) if batch > 1 else ()
    rows = torch.randn(*lead, 5, 32).to(a.dtype)
    stored = (torch.randn(*lead, 7, 32) * 30).to(b.dtype)
    parts = {}
    if a.scale is not None:
        parts["a_scale"] = torch.rand(*lead, 5, 1) + 0.1
    by_row = b.scale is not None and b.scale.kind == "row"
    parts["b_scale"] = ((torch.rand(*lead, 1, 7) if by_row else torch.rand(())) + 0.1).to(
        b.scale.dtype  # type: ignore[union-attr]
    )
    bias = torch.randn(7, dtype=BF16)
    found = Blas().bind(problem, BlasConfig())(rows, stored.mT, bias, None, 1.0, None, **parts)
    exact = rows.double() * parts.get("a_scale", torch.ones(())).double()
    exact = exact @ (stored.mT.double() * parts["b_scale"].double()) + bias.double()
    exact = torch.nn.functional.silu(exact)
    assert found.dtype is BF16
    torch.testing.assert_close(found.double(), exact, rtol=3e-2, atol=3e-2 * float(exact.std()))
    assert [which for which, *_ in calls] == (["b"] if a.form is None else ["a", "b"])
    assert all(dtype is BF16 and folds for _, dtype, folds in calls)
    # Scales multiply the result if it is wider than 16 bits, or fp16.
    for out in (Operand(torch.float32), Operand(torch.float16)):
        assert blas._bind_values(replace(problem, out=out)) is None
    monkeypatch.setattr(dequantized, "_fused", lambda *_: None)
    assert blas._bind_values(problem) is None


@pytest.mark.parametrize("one", [False, True])
def test_scales_of_experts_are_folded_into_values(
    one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fused(*_: Any) -> Any:
        return lambda stored, scale, zero: (stored.double() * scale.double()).to(BF16)

    monkeypatch.setattr(dequantized, "_fused", fused)
    rescaled: list[Any] = []
    monkeypatch.setattr(grouped_mm, "rescaled", lambda z, scale: rescaled.append(scale) or z)
    b = ROWS_OF_8_BITS["int8, one scale" if one else "int8"][1]
    problem = problem_of(b, m=16, n=24, k=32, groups=Groups(3, "m"))
    rows = torch.randn(16, 32, dtype=BF16)
    stored = torch.randint(-127, 128, (3, 24, 32), dtype=torch.int8)
    scale = torch.rand(()) if one else torch.rand(3, 24).to(BF16) + 0.1
    ends = [5, 5, 16]
    given = {"offs": torch.tensor(ends, dtype=torch.int32), "b_scale": scale}
    found = Blas().bind(problem, BlasConfig())(rows, stored.mT, None, None, 1.0, None, **given)
    each = stored.double() * (scale.double() if one else scale.double()[..., None])
    exact = torch.cat([
        rows[start:end].double() @ each[group].T
        for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ])  # fmt: skip
    torch.testing.assert_close(found.double(), exact, rtol=3e-2, atol=3e-2 * float(exact.std()))
    assert rescaled == [None, None]


@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize("given_out", [False, True])
def test_values_of_groups_with_zero_points_are_multiplied_with_all_terms(
    layout: str, given_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's operators compute the values where the kernel cannot."""
    monkeypatch.setattr(dequantized, "_fused", lambda *_: None)
    codes = torch.randint(0, 255, (6, 32), dtype=torch.uint8)
    scale, zero = torch.rand(6, 2).to(BF16) + 0.1, torch.randint(0, 15, (6, 2), dtype=torch.uint8)
    a = torch.randn(4, 64).to(BF16)
    a = a if layout == "row" else a.t().contiguous().t()
    residual = torch.randn(4, 6).to(BF16)
    quantized = tmm_core.Quantized(codes, scale, zero, format="int4", group=32)
    problem = tmm_core.problem(a, quantized.T, residual=residual, alpha=2.0)
    problem = replace(problem, device=replace(TARGETS["90"], capability=(8, 0)))
    run = blas._bind_values(problem)
    assert run is not None
    out = torch.empty(4, 6, dtype=BF16) if given_out else None
    stored, scales, zeros = quantized.stored.T, quantized.scale.T, quantized.zero
    assert zeros is not None
    y = run(a, stored, None, residual, 2.0, out, b_scale=scales, b_zero=zeros.T)
    assert not given_out or y is out
    exact = 2.0 * (a.double() @ quantized.dequantize().double().T) + residual.double()
    torch.testing.assert_close(y.double(), exact, rtol=2e-2, atol=2e-2 * float(exact.std()))


def test_scales_beyond_fp16_multiply_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of such scales with small activations are finite."""
    monkeypatch.setattr(dequantized, "_fused", lambda *_: lambda t, scale, zero: t * scale)
    half = Operand(torch.float16)
    b = ROWS_OF_8_BITS["int8"][1]
    problem = replace(problem_of(b, a=half), out=half)
    assert problem.value is torch.float16
    assert blas._bind_values(problem) is None
    assert blas._bind_values(problem_of(b)) is not None
    for dtype, fits in ((torch.float32, False), (BF16, False), (torch.float16, True)):
        of_groups = replace(b, scale=Scale((1, 32), dtype))
        assert (blas._bind_values(replace(problem, b=of_groups)) is not None) is fits
        assert blas._bind_values(problem_of(of_groups)) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("of", [*WEIGHTS, *BY_ROW])
def test_blas_multiplies_these_values(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product by BLAS uses the pass, and equals the product by torch's operators."""
    weight = {**WEIGHTS, **BY_ROW}[of]()
    made: list[Any] = []
    original = module.Dequantize

    def spy(*given: Any) -> Any:
        made.append(given)
        return original(*given)

    monkeypatch.setattr(module, "Dequantize", spy)
    x = torch.randn(64, weight.shape[-1], device=DEVICE, dtype=BF16)
    offs = torch.tensor([0, 20, 20, 33, 64], device=DEVICE, dtype=torch.int32)
    with torch.no_grad():
        if weight.dim() == 3:
            offs = offs[-weight.shape[0] :]
            found = tmm_core.grouped_linear(x, weight, offs=offs, kernel="blas")
            each = weight.dequantize().double()
            starts = [0, *offs.tolist()[:-1]]
            expected = torch.cat([
                x[start:end].double() @ each[group].T
                for group, (start, end) in enumerate(zip(starts, offs.tolist(), strict=True))
            ])  # fmt: skip
        else:
            found = tmm_core.linear(x, weight, kernel="blas")
            expected = x.double() @ weight.dequantize().double().T
    assert made
    error = (found.double() - expected).abs() / (expected.abs() + expected.square().mean().sqrt())
    assert error.max() < 1.6e-2
