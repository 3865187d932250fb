"""``quantize_rows``: the numbers of ``quantize``, by torch's operators and by the kernel; and
products with block-scaled weights by BLAS."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

pytest.importorskip("triton")

from tmm_blas import cublaslt_blocks
from tmm_blas.blas import Blas, BlasConfig

import tmm_core
from tmm_core import Operand, Problem, Quantized, Scale, quantize, quantize_rows
from tmm_core.epilogues import parse
from tmm_core.interop import row_quantization
from tmm_core.spec.device import DeviceFingerprint, interpreting
from tmm_core.spec.launcher import Bound
from tmm_core.triton import compile_for, source, target_of
from tmm_core.triton.quantize_rows import QuantizeRows, arguments
from tmm_core.verify import compare

Tensor = torch.Tensor
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(5, 300, 128), (70, 256, 32), (3, 192, 64), (3, 5000, 0), (7, 200, 0), (1, 64, 0)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Rows with one of zeros, and numbers that are not finite in two others."""
    x = torch.randn(shape)
    if x.dim() == 2 and len(x) > 2:
        x[0], x[1, 3], x[2, 5] = 0, torch.nan, torch.inf
    return x.to(device, dtype)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize(("m", "k", "group"), SHAPES)
def test_the_numbers_of_quantize(
    m: int, k: int, group: int, dtype: torch.dtype, device: str
) -> None:
    x = drawn(m, k, dtype=dtype, device=device)
    found, expected = quantize_rows(x, group=group), quantize(x, "fp8", group=group)
    assert found.block == expected.block
    same(found.stored, expected.stored)
    same(found.scale.reshape(expected.scale.shape), expected.scale)
    # As F.scaled_mm wants the scales of groups.
    assert not group or found.scale.stride() == (1, m)


@pytest.mark.parametrize("shape", [(3, 0), (0, 0), (2, 0, 128), (2, 3, 0)])
@pytest.mark.parametrize("group", [128, 0])
def test_rows_without_values(shape: tuple[int, ...], group: int) -> None:
    found = quantize_rows(torch.ones(shape, dtype=BF16), group=group)
    assert found.dequantize().shape == shape


@pytest.mark.skipif(
    not interpreting() and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize(("m", "k", "group"), SHAPES)
def test_the_kernel_equals_the_reference(m: int, k: int, group: int, dtype: torch.dtype) -> None:
    device = "cpu" if interpreting() else "cuda"
    x = drawn(m, k, dtype=dtype, device=device)
    aligned = k * x.element_size() % 16 == 0
    stored, scale = QuantizeRows(dtype, k, group, aligned, torch.device(device))(x)
    expected_stored, expected = row_quantization._by_torch(x, group)
    same(stored, expected_stored)
    same(scale, expected)
    assert scale.shape == expected.shape
    assert not group or scale.stride() == expected.stride()


@pytest.mark.skipif(
    not interpreting() and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"
)
@pytest.mark.parametrize("group", [0, 128])
def test_rows_with_gaps_between_them(group: int) -> None:
    device = "cpu" if interpreting() else "cuda"
    x = drawn(5, 160, dtype=BF16, device=device)[:, :128]
    stored, scale = QuantizeRows(BF16, 128, group, True, torch.device(device))(x)
    expected_stored, expected = row_quantization._by_torch(x, group)
    same(stored, expected_stored)
    same(scale, expected)


@pytest.mark.parametrize(
    ("dtype", "k", "group", "aligned", "divisible"),
    [
        (BF16, 512, 128, True, {"x_ptr": 16, "stride_m": 8, "K": 16}),
        (torch.float32, 512, 0, True, {"x_ptr": 16, "stride_m": 4, "K": 16}),
        (BF16, 520, 128, True, {"x_ptr": 16, "stride_m": 8}),
        (BF16, 512, 128, False, {"K": 16}),
    ],
    ids=["groups", "rows", "an odd K", "unaligned"],
)
def test_which_alignment_the_compiler_knows(
    dtype: torch.dtype, k: int, group: int, aligned: bool, divisible: dict[str, int]
) -> None:
    _, given = arguments(dtype, k, group, aligned)
    assert given["divisible"] == {"stored_ptr": 16, "scale_ptr": 16, **divisible}
    assert given["constants"].get("EVEN", True) is (group == 0 or k % group == 0)


@pytest.mark.parametrize(
    ("m", "k", "group", "programs"),
    [(5, 300, 0, 5), (5, 256, 128, 1), (32, 256, 128, 1), (33, 256, 128, 2), (33, 4000, 32, 17)],
)
def test_every_row_and_group_has_a_program(m: int, k: int, group: int, programs: int) -> None:
    run = QuantizeRows(BF16, k, group, True, torch.device("cpu"))
    grids: list[Any] = []
    run._call = lambda *given: grids.append(given[:3])
    run(torch.zeros(m, k, dtype=BF16))
    run(torch.zeros(0, k, dtype=BF16))
    assert grids == [(programs, 1, 1)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lead", [(), (2, 3), (4, 1)])
def test_any_number_of_dimensions_and_any_strides(lead: tuple[int, ...], device: str) -> None:
    x = torch.randn(*lead, 256, device=device)
    found = quantize_rows(x, group=128)
    assert found.shape == x.shape
    expected = quantize(x.reshape(-1, 256), "fp8", group=128)
    same(found.stored.reshape(-1, 256), expected.stored)
    same(found.scale.reshape(-1, 2), expected.scale)
    if lead:
        w = quantize(torch.randn(64, 256, device=device), "fp8", block=(128, 128))
        exact = found.dequantize().double() @ w.dequantize().double().T
        y = tmm_core.linear(found, w)
        assert compare.error(y.cpu(), exact.cpu()) <= 2 * compare.TOLERANCE[BF16]
    turned = torch.randn(256, 6, device=device).t()
    same(quantize_rows(turned).stored, quantize(turned, "fp8", group=0).stored)
    assert quantize_rows(torch.randn(0, 256, device=device), group=128).shape == (0, 256)


def test_invalid_operands_are_refused_first() -> None:
    x = torch.randn(3, 256)
    for group in (16, 256, True, 128.0):
        with pytest.raises(ValueError, match="groups of 32, 64 or 128 values, or 0"):
            quantize_rows(x, group=group)  # type: ignore[arg-type]
    for wrong in (x.double(), x.int(), torch.tensor(1.0), [1.0]):
        with pytest.raises(TypeError, match="takes a tensor of rows in float16"):
            quantize_rows(wrong)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no derivative"):
        quantize_rows(x.requires_grad_())
    with torch.no_grad():
        quantize_rows(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
def test_no_derivative_is_lost() -> None:
    x, t = torch.randn(3, 256), torch.randn(3, 256)
    rows = quantize_rows(x).dequantize()

    def of_a_vector(scale: Tensor) -> Tensor:
        return quantize_rows(x).dequantize() * scale

    with pytest.raises(RuntimeError, match="no derivative"):
        torch.func.jvp(lambda x: quantize_rows(x).dequantize(), (x,), (t,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        with pytest.raises(RuntimeError, match="no derivative"):
            quantize_rows(dual, group=128)
        assert torch.equal(quantize_rows(dual.detach()).dequantize(), rows)
    one = torch.ones(())
    assert torch.equal(torch.func.jvp(of_a_vector, (one,), (one,))[1], rows)


def test_a_compiled_function() -> None:
    w = quantize(torch.randn(64, 256), "fp8", block=(128, 128))

    def layer(x: Tensor) -> Tensor:
        return tmm_core.linear(quantize_rows(x, group=128), w)

    x = torch.randn(2, 5, 256)
    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), layer(x))
    torch.library.opcheck(
        torch.ops.tmm.quantize_rows.default, (x, 128), test_utils=("test_schema", "test_faketensor")
    )


def compiled(sm: int, group: int, k: int) -> str:
    fn, given = arguments(BF16, k, group, k % 8 == 0)
    options = {name: given.pop(name) for name in ("num_warps", "num_stages")}
    device = DeviceFingerprint("cuda", "none", (sm // 10, sm % 10), cuda="13.0")
    result = compile_for(target_of(device), source(fn, **given), **options)  # type: ignore[arg-type]
    return str(result.asm["ptx"])


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("sm", [90, 100])
@pytest.mark.slow
def test_it_compiles(sm: int, group: int, uninterpreted: Any) -> None:
    ptx = uninterpreted(compiled, sm, group, 4096)
    assert "ld.global.v4.b32" in ptx
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert ".local" not in ptx
    assert uninterpreted(compiled, sm, group, 301)


# -- by cuBLASLt -------------------------------------------------------------------------------

H100 = DeviceFingerprint("cuda", "none", (9, 0), 132, 232448, cuda="13.0")
GROUPS, BLOCKS = Scale.parse("1x128"), Scale.parse("128x128")
ROWS = Operand(E4M3, scale=GROUPS)
TWO = Problem(64, 256, 640, ROWS, Operand(E4M3, "col", scale=BLOCKS), Operand(BF16), H100)


@pytest.mark.parametrize(
    ("change", "takes"),
    [
        ({}, True), ({"m": 1}, True), ({"b": Operand(E4M3, "col", scale=GROUPS)}, True),
        ({"epilogue": parse("swiglu"), "n": 64}, True), ({"bias": BF16}, True),
        ({"epilogue": parse("swiglu"), "n": 32}, False), ({"n": 192}, False), ({"k": 320}, False),
        ({"batch": 2}, False), ({"m": 0}, False), ({"out": Operand(torch.float16)}, False),
        ({"device": replace(H100, capability=(10, 0))}, False),
        ({"device": replace(H100, capability=(8, 9))}, False),
        ({"device": replace(H100, cuda="12.8")}, False),
        ({"device": replace(H100, cuda="12.9")}, True),
        ({"device": replace(H100, cuda="hip-6.4")}, False),
        ({"device": replace(H100, cuda="")}, False),
        ({"b": Operand(E4M3, scale=BLOCKS)}, False), ({"a": replace(ROWS, aligned=False)}, False),
        ({"a": Operand(E4M3, scale=Scale.parse("1x64"))}, False), ({"a": Operand(BF16)}, False),
        ({"a": replace(ROWS, dtype=torch.float8_e5m2)}, False),
        ({"a": Operand(E4M3, scale=Scale.parse("row"))}, False),
    ],
)  # fmt: skip
def test_which_products_are_cublaslts(change: dict[str, Any], takes: bool) -> None:
    problem = replace(TWO, **change)
    assert cublaslt_blocks.serves(problem) is takes
    assert (BlasConfig(blocks=True) in list(Blas().configs(problem))) is takes
    if not takes and problem.device.type == "cuda":
        with pytest.raises((ValueError, tmm_core.UnsupportedProblemError)):
            Blas().bind(problem, BlasConfig(blocks=True))


def read(t: Tensor, rows: int, columns: int, pitch: int) -> Tensor:
    """The numbers at an address, as cuBLASLt reads them: columns that begin ``pitch`` apart."""
    return t.as_strided((rows, columns), (1, pitch))


def by_address(
    a: Tensor, b: Tensor, a_scale: Tensor, a_recipe: str, b_scale: Tensor, b_recipe: str,
    output_dtype: Any,
) -> Tensor:  # fmt: skip
    """``F.scaled_mm`` as cuBLASLt reads its scales: by address, without shape and strides."""
    (m, k), n = a.shape, b.shape[1]
    assert m % 4 == 0, "CUBLAS_STATUS_NOT_SUPPORTED"
    assert a_recipe == "1x128"
    groups = read(a_scale, m, k // 128, m).repeat_interleave(128, 1)
    if b_recipe == "1x128":
        of_b = read(b_scale, n, k // 128, n).repeat_interleave(128, 1).t()
    else:
        pitch = -(-k // 128 // 4) * 4
        assert b_scale.shape == (pitch, n // 128)
        of_b = read(b_scale, k // 128, n // 128, pitch)
        of_b = of_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return ((a.double() * groups.double()) @ (b.double() * of_b.double())).to(output_dtype)


def model_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = types.SimpleNamespace(BlockWise1x128="1x128", BlockWise128x128="128x128")
    monkeypatch.setattr(cublaslt_blocks.F, "ScalingType", scaling, raising=False)
    monkeypatch.setattr(cublaslt_blocks.F, "scaled_mm", by_address, raising=False)


@pytest.mark.parametrize("m", [1, 5, 8])
@pytest.mark.parametrize("k", [512, 640])
@pytest.mark.parametrize("block", [(128, 128), (1, 128)])
@pytest.mark.parametrize("turned", [False, True])
def test_scales_have_cublaslts_memory_layout(
    m: int, k: int, block: tuple[int, int], turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_cublaslt(monkeypatch)
    weight = quantize(torch.randn(256, k), "fp8", block=block)
    rows = quantize_rows(torch.randn(m, k), group=128)
    if turned:  # both in the other order
        weight.scale = weight.scale.t().contiguous().t()
        rows.scale = rows.scale.contiguous()
    b = replace(TWO.b, scale=Scale(block, torch.float32))
    product = cublaslt_blocks.bind(replace(TWO, m=m, k=k, b=b))
    found = product(rows.stored, weight.stored.t(), rows.scale, weight.scale.t())
    exact = rows.dequantize().double() @ weight.dequantize().double().T
    # dequantize() rounds to bf16.
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2 * float(exact.std()))


def test_each_operand_has_its_scales_and_terms_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    model_cublaslt(monkeypatch)
    weight = quantize(torch.randn(256, 640) / 25, "fp8", block=(128, 128))
    rows = quantize_rows(torch.randn(64, 640), group=128)
    bias, residual = torch.randn(256, dtype=BF16), torch.randn(64, 256, dtype=BF16)
    terms = {"bias": BF16, "residual": Operand(BF16), "epilogue": parse("silu")}
    launcher = Bound.of(Blas().bind(replace(TWO, **terms), BlasConfig(blocks=True))).run
    found = launcher(
        rows.stored, weight.stored.t(), bias, residual, 0.5, None,
        a_scale=rows.scale, b_scale=weight.scale.t(),
    )  # fmt: skip
    z = 0.5 * (rows.dequantize().float() @ weight.dequantize().float().T) + bias.float()
    exact = torch.nn.functional.silu(z) + residual.float()
    torch.testing.assert_close(found.float(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 33, 300])
@pytest.mark.parametrize("k", [512, 640])
@pytest.mark.parametrize("block", [(128, 128), (1, 128)])
@pytest.mark.parametrize("epilogue", [None, "silu", "swiglu"])
def test_blocks_by_cublaslt(m: int, k: int, block: Any, epilogue: str | None) -> None:
    x = torch.randn(m, k, device="cuda", dtype=BF16)
    rows: Quantized = quantize_rows(x, group=128)
    weight = quantize(torch.randn(512, k, device="cuda") / k**0.5, "fp8", block=block)
    # Scales that differ, so that another one is seen.
    weight.scale *= torch.rand_like(weight.scale) + 0.5
    problem = tmm_core.problem(rows, weight.t(), epilogue=epilogue)
    if not cublaslt_blocks.serves(problem):
        pytest.skip("this GPU or CUDA has no such product")
    with torch.no_grad():
        y = tmm_core.linear(rows, weight, epilogue=epilogue, kernel="blas", config={"blocks": True})
    z = rows.stored.double() * rows.scale.double().repeat_interleave(128, 1)[:, :k]
    each = weight.scale.double().repeat_interleave(block[0], 0).repeat_interleave(128, 1)
    z = z @ (weight.stored.double() * each).T
    if epilogue == "silu":
        z = torch.nn.functional.silu(z)
    elif epilogue == "swiglu":
        gate, up = z.chunk(2, -1)
        z = torch.nn.functional.silu(gate) * up
    error = (y.double() - z).abs() / (z.abs() + z.square().mean().sqrt())
    assert error.max() < 2.5e-2
