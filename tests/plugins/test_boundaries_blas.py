"""Limits of BLAS's ways: which problems each serves, and what each step adds to an estimate."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tmm_blas import blas, cublaslt_blocks, dequantized, grouped_mm
from tmm_blas.blas import Blas, BlasConfig
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tmm_core
from tmm_core import Groups, Operand, Problem, Scale
from tmm_core.epilogues import parse
from tmm_core.epilogues.clamped_swiglu import CLAMPED
from tmm_core.interop.grouped_operator import grouped_matmul
from tmm_core.spec.arguments import GroupedArguments
from tmm_core.spec.device import DeviceFingerprint

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
H100 = DeviceFingerprint("cuda", "NVIDIA H100", (9, 0), 132, 232448, 50 * 2**20)
ROW, COL = Operand(BF16), Operand(BF16, "col")
LAYER = Problem(64, 4096, 4096, ROW, COL, ROW, H100)
EIGHT = replace(LAYER, a=Operand(E4M3), b=Operand(E4M3, "col"))
GROUPED = replace(LAYER, groups=Groups(8, "m"))
INDEXED = Groups(8, "m", a_index=torch.int64)
INT8 = Operand(torch.int8, "col", format="int8", scale=Scale.parse("row"))


def ways(problem: Problem) -> set[str]:
    return {
        name for config in Blas().configs(problem) for name, on in config.to_json().items() if on
    }


RELU = replace(LAYER, epilogue=parse("relu"), bias=BF16)


@pytest.mark.parametrize(
    ("change", "fused"),
    [
        ({}, True), ({"bias": None}, False), ({"bias": FP32}, False), ({"residual": ROW}, False),
        ({"scaled": True}, False), ({"batch": 2}, False), ({"epilogue": parse("silu")}, False),
        ({"out": Operand(FP32)}, False), ({"device": replace(H100, type="cpu")}, False),
        ({"groups": Groups(2, "m")}, False), ({"epilogue": parse("relu+tanh")}, False),
    ],
)  # fmt: skip
def test_bias_and_relu_are_fused_into_a_plain_product_alone(
    change: dict[str, Any], fused: bool
) -> None:
    problem = replace(RELU, **change)
    assert ("fused" in ways(problem)) is fused
    if not fused and problem.groups is None:
        with pytest.raises(ValueError, match=r"fuses bias \+ relu into plain"):
            Blas().bind(problem, BlasConfig(fused=True))


GATED = replace(LAYER, epilogue=parse("swiglu"))


@pytest.mark.parametrize(
    ("change", "divisible"),
    [
        ({}, True), ({"bias": BF16}, True), ({"residual": ROW}, True), ({"bias": FP32}, False),
        ({"scaled": True}, False), ({"batch": 2}, False), ({"out": Operand(FP32)}, False),
        ({"epilogue": parse("silu")}, False), ({"groups": Groups(2, "m")}, False),
        ({"epilogue": CLAMPED}, False),
        ({"a": Operand(E4M3), "b": Operand(E4M3, "col")}, False),
    ],
)  # fmt: skip
def test_gate_and_up_are_apart_in_a_plain_product_alone(
    change: dict[str, Any], divisible: bool
) -> None:
    assert ("halves" in ways(replace(GATED, **change))) is divisible


@pytest.mark.parametrize(
    ("change", "takes"),
    [
        ({}, True), ({"device": replace(H100, capability=(8, 9))}, True),
        ({"device": replace(H100, capability=(8, 6))}, False), ({"batch": 2}, False),
        ({"m": 0}, False), ({"m": 1}, True), ({"k": 4104}, False), ({"n": 4104}, False),
        ({"n": 4104, "epilogue": parse("swiglu")}, True),  # of twice as many columns
        ({"n": 4100, "epilogue": parse("swiglu")}, False), ({"n": 0}, False), ({"k": 0}, False),
        ({"a": Operand(E5M2)}, True), ({"a": Operand(E5M2), "b": Operand(E5M2, "col")}, False),
        ({"a": Operand(E4M3, "col")}, False), ({"b": Operand(E4M3)}, False),
        ({"a": Operand(E4M3, aligned=False)}, False),
        ({"device": replace(H100, cuda="hip-6.4")}, False),
    ],
)  # fmt: skip
def test_the_8_bit_product_of_torch_has_its_own_limits(change: dict[str, Any], takes: bool) -> None:
    assert blas._takes_8_bit(replace(EIGHT, **change)) is takes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""), ({"a": COL}, "groups start at multiples of 16 bytes"),
        ({"out": Operand(FP16)}, "returns bf16"),
        ({"out": Operand(FP32), "b": INT8}, "returns bf16"), ({"b": INT8}, ""),
        ({"device": replace(H100, capability=(10, 0))}, ""),
        ({"device": replace(H100, capability=(12, 0))}, "on the host"),
        ({"groups": Groups(8, "n")}, "groups start at multiples of 16 bytes"),
        ({"groups": Groups(8, "k"), "a": COL, "b": ROW}, ""),
        ({"groups": Groups(8, "k"), "a": COL, "b": COL}, "groups start at multiples"),
        ({"groups": Groups(8, "k"), "a": ROW, "b": ROW}, "groups start at multiples"),
        ({"a": replace(ROW, aligned=False)}, "aligned to 16 bytes"), ({"k": 0}, "dimension is 0"),
        # Rows that an index names are copied, row-major and one behind the other.
        ({"groups": INDEXED, "a": replace(COL, aligned=False)}, ""),
        ({"groups": INDEXED, "k": 4100}, "aligned to 16 bytes"),
        ({"groups": INDEXED, "k": 4100, "m": 1}, ""),
        ({"groups": INDEXED, "k": 4100, "m": 2}, "aligned to 16 bytes"),
        ({"b": replace(COL, aligned=False)}, "aligned to 16 bytes"),
    ],
)  # fmt: skip
def test_the_grouped_product_of_torch_has_its_own_limits(
    change: dict[str, Any], reason: str
) -> None:
    found = list(grouped_mm.reasons_against(replace(GROUPED, **change)))
    assert bool(found) is bool(reason), found
    assert any(reason in each for each in found) or not reason


@pytest.mark.parametrize(
    ("change", "able"),
    [
        ({}, True), ({"k": 4104}, False), ({"n": 4104}, False),
        ({"n": 4104, "epilogue": parse("swiglu")}, True), ({"out": Operand(FP32)}, False),
        ({"device": replace(H100, capability=(10, 0))}, False),
        ({"a": Operand(E5M2)}, False), ({"groups": Groups(8, "k")}, False),
    ],
)  # fmt: skip
def test_the_grouped_8_bit_product_of_torch_has_its_own_limits(
    change: dict[str, Any], able: bool
) -> None:
    problem = replace(replace(EIGHT, groups=Groups(8, "m")), **change)
    assert (not list(grouped_mm.reasons_against(problem))) is able


def test_a_torch_without_a_grouped_8_bit_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_scaled_grouped_mm", raising=False)
    problem = replace(EIGHT, groups=Groups(8, "m"))
    assert list(grouped_mm.reasons_against(problem)) == ["this torch has no scaled grouped product"]


BLOCKS = replace(
    EIGHT,
    a=Operand(E4M3, scale=Scale.parse("1x128")),
    b=Operand(E4M3, "col", scale=Scale.parse("128x128")),
    device=replace(H100, cuda="12.9"),
)


def test_scales_of_blocks_are_not_for_torchs_grouped_product() -> None:
    """Torch's grouped product takes scales by row, for both operands."""
    rows = replace(EIGHT, groups=Groups(8, "m"))
    assert grouped_mm._scales_rows(rows)
    assert not grouped_mm._scales_rows(replace(rows, a=BLOCKS.a))
    assert not grouped_mm._scales_rows(replace(rows, b=BLOCKS.b))


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True), ({"m": 1}, True), ({"b": Operand(E4M3, "col", scale=BLOCKS.a.scale)}, True),
        ({"device": replace(H100, cuda="13.0")}, True), ({"device": replace(H100, cuda="")}, False),
        ({"device": replace(H100, cuda="12.8")}, False), ({"m": 0}, False), ({"k": 4160}, False),
        ({"device": replace(BLOCKS.device, capability=(10, 0))}, False), ({"n": 4160}, False),
        ({"device": replace(BLOCKS.device, type="cpu")}, False), ({"k": 0}, False),
        ({"device": replace(H100, cuda="hip-6.4")}, False), ({"n": 0}, False),
        ({"batch": 2}, False), ({"out": Operand(FP32)}, False),
        ({"n": 4160, "epilogue": parse("swiglu")}, True),  # of twice as many columns
        ({"n": 4128, "epilogue": parse("swiglu")}, False),
        ({"a": replace(BLOCKS.a, dtype=E5M2)}, False),
        ({"b": replace(BLOCKS.b, dtype=E5M2)}, False),
        ({"a": replace(BLOCKS.a, layout="col")}, False),
        ({"b": replace(BLOCKS.b, layout="row")}, False),
        ({"a": replace(BLOCKS.a, aligned=False)}, False),
        ({"b": replace(BLOCKS.b, aligned=False)}, False),
        ({"a": replace(BLOCKS.a, scale=Scale.parse("1x64"))}, False),
        ({"a": replace(BLOCKS.a, scale=Scale.parse("row"))}, False),
        ({"b": replace(BLOCKS.b, scale=Scale.parse("64x128"))}, False),
        ({"groups": Groups(2, "m")}, False),
    ],
)  # fmt: skip
def test_scales_of_blocks_are_for_cublaslt_within_its_limits(
    change: dict[str, Any], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("scaled_mm", "ScalingType"):
        monkeypatch.setattr(F, name, getattr(F, name, None), raising=False)
    problem = replace(BLOCKS, **change)
    assert ("blocks" in ways(problem)) is served
    if not served and problem.groups is None:
        with pytest.raises(ValueError, match="blocks need e4m3 in groups of 128"):
            Blas().bind(problem, BlasConfig(blocks=True))


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("columns", [1, 4, 6])
def test_scales_are_column_major_without_gaps(rows: int, columns: int) -> None:
    """Torch accepts gaps between columns, but cuBLASLt would read them as scales."""
    memory = torch.rand(8, 8)
    by_row, by_column = memory[:rows, :columns], memory[:columns, :rows].t()
    for given in (by_row, by_row.contiguous(), by_column, by_row[:1].expand(rows, -1)):
        groups, blocks = cublaslt_blocks.of_groups(given), cublaslt_blocks.of_blocks(given)
        assert torch.equal(groups, given)
        assert torch.equal(blocks[:rows], given)
        assert blocks.shape == (-(-rows // 4) * 4, columns)
        assert groups.t().is_contiguous()
        assert blocks.t().is_contiguous()
    dense = by_row.t().contiguous().t()
    assert cublaslt_blocks.of_groups(dense).data_ptr() == dense.data_ptr() or rows == 1
    kept = rows == 4 or (rows, columns) == (4, 1)
    assert (cublaslt_blocks.of_blocks(dense).data_ptr() == dense.data_ptr()) is kept


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1), (2, 1, 5), (2, 5, 1)], ids=str)
def test_a_single_row_or_column_has_a_stride_that_torch_accepts(shape: tuple[int, ...]) -> None:
    """Torch's grouped product also checks strides of dimensions of size 1."""
    *batch, rows, columns = shape
    for by_column in (False, True):
        apart = columns if by_column else rows
        strides = [64] * len(batch) + [3 if apart == 1 else 8, 1][:: -1 if by_column else 1]
        given = torch.randn(128).bfloat16().as_strided(shape, strides)
        found = grouped_mm._with_strides(given)
        assert torch.equal(found, given)
        assert 1 in found.stride()[-2:]
        assert all(stride == 1 or stride % 8 == 0 for stride in found.stride())


@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_narrow_result_is_of_operands_as_wide_as_they_are(batch: tuple[int, ...]) -> None:
    """fp16 cannot represent 1e5 and 1e-5, but it can represent their product."""
    a, b = torch.full((*batch, 3, 8), 1e5), torch.full((*batch, 8, 4), 1e-5)
    y = tmm_core.matmul(a, b, out_dtype=FP16, kernel="blas")
    assert torch.equal(y, torch.full((*batch, 3, 4), 8.0, dtype=FP16))
    wide = tmm_core.matmul(a.bfloat16(), b.bfloat16(), out_dtype=torch.float64, kernel="blas")
    expected = a.bfloat16().double() @ b.bfloat16().double()
    torch.testing.assert_close(wide, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("of_a", "of_b", "to", "wide"),
    [
        (BF16, BF16, FP32, FP32), (FP16, FP16, FP32, FP32), (FP16, BF16, FP32, FP32),
        (FP16, FP32, FP16, FP32), (BF16, BF16, FP16, FP32), (FP32, FP32, FP16, FP32),
        (BF16, BF16, torch.float64, torch.float64),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_only_a_gpu_multiplies_halves_of_one_dtype_into_fp32(
    of_a: torch.dtype, of_b: torch.dtype, to: torch.dtype, wide: torch.dtype, device: str
) -> None:
    """Other operands are converted first, without loss."""
    calls = []

    def mm(a: Tensor, b: Tensor, **more: Any) -> Tensor:
        calls.append((a.dtype, b.dtype, more))
        return a

    with FakeTensorMode():
        a, b = (torch.empty(4, 4, dtype=of, device=device) for of in (of_a, of_b))
        blas._wide(a, b, to, mm)
    direct = device == "cuda" and of_a is of_b is not FP32 and to is FP32
    assert calls == [(of_a, of_b, {"out_dtype": to}) if direct else (wide, wide, {})]


# -- estimates ----------------------------------------------------------------------------


def us(problem: Problem, **config: bool) -> float:
    found = Blas().estimate_us(problem, BlasConfig(**config))
    assert found is not None
    return found


LARGE = replace(LAYER, m=8192, n=8192, k=8192)


def test_every_step_after_the_product_costs_its_pass_and_its_launch() -> None:
    silu = replace(LARGE, epilogue=parse("silu"))
    added = replace(LARGE, residual=ROW)
    plain = us(LARGE)
    assert plain < us(silu) < us(added) < us(replace(silu, residual=ROW))
    # Only the residual adds bytes and operations.
    launches = blas.LAUNCH_US
    small = replace(LAYER, m=1, n=8, k=8)
    assert us(replace(small, epilogue=parse("silu"))) - us(small) == pytest.approx(
        launches, rel=0.05
    )
    gated = replace(small, epilogue=parse("swiglu"))
    assert us(gated, halves=True) - us(gated) == pytest.approx(launches)


def test_a_pass_over_a_result_in_the_l2_is_faster() -> None:
    def extra(l2: int) -> float:
        small = replace(LAYER, m=2048, n=2048, k=64, device=replace(H100, l2=l2))
        return us(replace(small, epilogue=parse("silu"))) - us(small) - blas.LAUNCH_US

    size = 2048 * 2048 * 2
    assert extra(2 * size) == pytest.approx(3 * extra(2 * size + 2))


def test_a_pass_over_a_wider_result_takes_longer() -> None:
    def extra(dtype: torch.dtype) -> float:
        large = replace(LARGE, out=Operand(dtype))
        return us(replace(large, epilogue=parse("silu"))) - us(large) - blas.LAUNCH_US

    assert extra(FP32) == pytest.approx(2 * extra(BF16))


def test_unaligned_rows_multiply_at_a_fraction_of_the_rate() -> None:
    for name in ("a", "b"):
        change: dict[str, Any] = {name: replace(getattr(LARGE, name), aligned=False)}
        odd = replace(LARGE, **change)
        product, launch = us(LARGE) - blas.LAUNCH_US, blas.LAUNCH_US
        assert us(odd) - launch == pytest.approx(blas.UNALIGNED_PENALTY * product)


# -- groups on a CPU ----------------------------------------------------------------------


def launched(dtype: torch.dtype, zeroed: bool, **terms: Any) -> torch.Tensor:
    """The baseline's result for two groups, and for two rows of no group."""
    torch.manual_seed(0)
    a, b = torch.randn(8, 16).to(dtype), torch.randn(2, 16, 8).to(dtype)
    a[6:] = torch.nan
    offs = torch.tensor([2, 6], dtype=torch.int32)
    call = GroupedArguments(a, b, offs, zeroed=zeroed, **terms)
    with tmm_core.override(disable="triton.ragged"):
        y: torch.Tensor = grouped_matmul(*call[:-1])
        return y


@pytest.mark.parametrize("epilogue", ["", "relu", "silu"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_terms_of_another_dtype_are_added_without_a_rounding_between(
    epilogue: str, dtype: torch.dtype
) -> None:
    """The sum is in place if the product's dtype can hold it, and never in a narrower dtype."""
    text = parse(epilogue or None).interned() if epilogue else ""
    residual, weights = torch.randn(8, 8), torch.rand(8)
    y = launched(dtype, True, epilogue=text, residual=residual, out_weights=weights)
    assert y.dtype is dtype
    assert torch.equal(y[6:], torch.zeros(2, 8, dtype=dtype))
    z = launched(dtype, True, epilogue=text).float()
    expected = (z * weights[:, None] + residual)[:6].to(dtype)
    torch.testing.assert_close(y[:6], expected, rtol=2**-8, atol=0 if dtype is BF16 else 1e-6)


def test_a_bias_of_the_last_group_serves_rows_beyond_it() -> None:
    """Rows beyond the last group take its bias, since an index beyond it would be out of range."""
    bias = torch.randn(2, 8)
    y = launched(FP32, True, bias=bias)
    torch.testing.assert_close(y[:6], launched(FP32, True)[:6] + bias[[0, 0, 1, 1, 1, 1]])
    assert torch.equal(y[6:], torch.zeros(2, 8))


def ones_of(z: torch.Tensor) -> torch.Tensor:
    return z.new_ones(1).expand_as(z)


@pytest.mark.parametrize("terms", [{}, {"residual": torch.ones(8, 8)}], ids=["", "residual"])
def test_zeros_beyond_the_last_group_are_not_written_to_an_epilogues_result(
    terms: dict[str, Any],
) -> None:
    """An epilogue may return an expanded tensor, with fewer elements than its shape."""
    y = launched(FP32, True, epilogue=tmm_core.Epilogue("ones", ones_of).interned(), **terms)
    expected = torch.ones(8, 8) + len(terms)
    expected[6:] = 0
    assert torch.equal(y, expected)


def by_columns(z: torch.Tensor) -> torch.Tensor:
    return z.mT.contiguous().mT


def test_rows_of_a_result_are_packed_whatever_an_epilogue_returns() -> None:
    y = launched(FP32, False, epilogue=tmm_core.Epilogue("columns", by_columns).interned())
    assert y.stride() == (8, 1)
    assert torch.equal(y[:6], launched(FP32, False)[:6])


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_products_of_values_have_the_rate_of_16_bits(name: str) -> None:
    """With many rows a product of stored formats is compute-bound, like the dense product."""
    form = tmm_core.formats.named(name)
    large = replace(LAYER, m=2**16)
    scale = Scale.parse("row" if name == "int8" else "row bfloat16")
    weight = Operand(form.storage[0], "col", format=name, scale=scale)
    dense, stored = (
        Blas().estimate_us(each, BlasConfig()) for each in (large, replace(large, b=weight))
    )
    assert dense is not None
    assert stored == pytest.approx(dense, rel=0.1)


def test_scales_of_blocks_are_multiplied_at_the_rate_of_8_bits() -> None:
    """By cuBLASLt; otherwise values are written in 16 bits first."""
    large = replace(BLOCKS, m=2**16)
    assert us(large, blocks=True) < 0.6 * us(large)


@pytest.mark.parametrize("scale", [BF16, FP32])
def test_values_beyond_the_range_of_fp16_are_wider(scale: torch.dtype) -> None:
    codes = torch.full((16, 64), 127, dtype=torch.int8)
    scales = torch.full((16, 2), 1024.0, dtype=scale)
    x = torch.full((4, 64), 2.0**-10, dtype=FP16)
    weight = tmm_core.Quantized(codes, scales, group=32)
    y = tmm_core.linear(x, weight, kernel="blas")
    assert torch.equal(y, torch.full((4, 16), 127.0 * 64, dtype=FP16))


@pytest.mark.parametrize(
    ("shape", "strides", "folds"),
    [
        ((2, 3, 4), (12, 4, 1), True), ((2, 3, 4), (24, 8, 2), True),
        ((2, 3, 4), (16, 4, 1), False), ((2, 3, 4), (4, 8, 1), False),
        ((5, 2, 3, 4), (24, 12, 4, 1), True), ((5, 2, 3, 4), (28, 12, 4, 1), False),
        ((5, 2, 3, 4), (32, 16, 4, 1), False), ((3, 4), (4, 1), False),
        ((0, 3, 4), (12, 4, 1), False), ((2, 0, 4), (0, 4, 1), False),
    ],
)  # fmt: skip
def test_rows_without_gaps_between_them_are_one_matrix_to_torch(
    shape: tuple[int, ...], strides: tuple[int, ...], folds: bool
) -> None:
    a, b = torch.empty_strided(shape, strides), torch.empty(4, 6)
    assert blas._torch_folds(LAYER, a, b) is folds
    assert not blas._torch_folds(LAYER, a, torch.empty(4, 0))
    assert not blas._torch_folds(LAYER, a, torch.empty(4))


@pytest.mark.parametrize("batch", [1, 2])
def test_weights_of_a_batch_are_a_batch_of_products_to_torch(batch: int) -> None:
    a, b = torch.empty(2, 3, 4), torch.empty(2, 4, 6)
    assert blas._torch_folds(replace(LAYER, batch=batch), a, b) is (batch == 2)


@pytest.fixture
def scaled_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace ``torch._scaled_mm`` by a model of what it computes and refuses on a GPU."""

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None, **how: Any) -> Any:
        dtype = how["out_dtype"]
        assert a.stride() == (a.shape[1], 1)
        assert scale_a.numel() == scale_b.numel() == 1 or dtype is BF16
        assert bias is None or bias.dtype is dtype is not FP32
        z = (a.float() @ b.float()) * scale_a * scale_b
        z = (z if bias is None else z + bias.float()).to(dtype)
        if (out := how.get("out")) is None:
            return z
        # Torch 2.11 on an H200 ignored gaps between columns.
        assert out.is_contiguous()
        return out.copy_(z)

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, device=None, **more: ones(*shape, **more))
    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


@pytest.mark.parametrize("scales", ["none", "tensor", "row", "row and tensor"])
@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float64], ids=str)
@pytest.mark.parametrize("m", [1, 16])
def test_all_terms_of_an_8_bit_product_are_applied(
    scaled_mm: None, scales: str, dtype: torch.dtype, m: int
) -> None:
    a = torch.randn(m, 3 * 32)[:, :32].to(E4M3)
    a = a.as_strided((1, 32), (7, 1)) if m == 1 else a.contiguous()
    b = torch.randn(16, 32).to(E4M3).mT
    by_row = {"a": torch.rand(m, 1) + 0.5, "b": torch.rand(1, 16) + 0.5}
    whole = {name: torch.rand(()) + 0.5 for name in "ab"}
    given = {
        "none": {}, "tensor": whole, "row": by_row,
        "row and tensor": {"a": by_row["a"], "b": whole["b"]},
    }[scales]  # fmt: skip
    product = a.double() @ b.double()
    for scale in given.values():
        product = product * scale
    parts = {f"{name}_scale": scale for name, scale in given.items()}
    stored = {name: {"scale": Scale.of(scale)} for name, scale in given.items()}
    terms: list[Any] = [None, torch.randn(16, dtype=BF16), torch.randn(16)]
    added: list[Any] = [None, torch.randn(m, 16, dtype=BF16)]
    for alpha, bias, residual, epilogue in itertools.product(
        (1.0, -0.5), terms, added, ("identity", "relu")
    ):
        out = torch.empty(m, 16, dtype=dtype)
        problem = Problem.of(
            a, b, out, H100, bias=bias, residual=residual, scaled=alpha != 1.0,
            epilogue=parse(epilogue), stored=stored,
        )  # fmt: skip
        expected = alpha * product + (0 if bias is None else bias.double())
        expected = expected.relu() if epilogue == "relu" else expected
        expected = expected + (0 if residual is None else residual.double())
        run = blas._bind_scaled_mm(problem)
        gaps = torch.empty(m, 32, dtype=dtype)[:, ::2]
        for given_out in (None, out, gaps):
            y = run(a, b, bias, residual, alpha, given_out, **parts)
            assert given_out is None or y is given_out
            assert y.dtype is dtype
            torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_scale_that_is_absent_is_one_on_the_operands_device(device: str) -> None:
    ones = grouped_mm._filled(None, (2, 3), torch.device(device))
    assert (ones.shape, ones.dtype, ones.device.type) == ((2, 3), FP32, device)
    own = torch.rand(2, 3, device=device)
    assert grouped_mm._filled(own, (2, 3), own.device) is own
    whole = grouped_mm._filled(own[:1, :1], (2, 3), own.device)
    assert whole.is_contiguous()
    assert whole.shape == (2, 3)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1), (2, 1), (1, 3), (4, 2, 1)])
def test_a_product_keeps_its_shape_when_it_is_scaled(shape: tuple[int, ...]) -> None:
    """A scale of one number may have more dimensions than the product."""
    z = torch.randn(4, 2, 3) if len(shape) == 3 and shape[0] > 1 else torch.randn(2, 3)
    scale = torch.rand(shape)
    found = dequantized.rescaled(z, scale)
    assert torch.equal(found, z * scale.expand(z.shape) if scale.numel() > 1 else z * scale.item())
    assert found.shape == z.shape


# -- stored operands with their scales ------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "spec", "kernel", "bound"),
    [
        (BF16, INT8, True, True), (BF16, INT8, False, False), (FP16, INT8, True, False),
        (BF16, replace(INT8, scale=Scale.parse("tensor")), True, True),
        (BF16, replace(INT8, zero=torch.int8), True, False),
        (FP16, replace(INT8, scale=Scale.parse("1x32")), False, True),
        (BF16, COL, True, True),
    ],
)  # fmt: skip
def test_scales_of_rows_are_folded_into_values_by_a_kernel_alone(
    value: torch.dtype, spec: Operand, kernel: bool, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of fp16 times a scale may be Inf, and torch's operators would round the sum twice."""
    fused = (lambda t, scale, zero: t.float() * scale) if kernel else None
    monkeypatch.setattr(dequantized, "_fused", lambda *given: fused)
    problem = replace(LAYER, a=Operand(value), b=spec, out=Operand(value))
    assert (dequantized.bind_scaled(problem, "b") is not None) is bound


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, True), ({"out": Operand(FP32)}, False), ({"out": Operand(FP16)}, False),
        ({"device": replace(H100, type="cpu")}, False),
        (dict.fromkeys(("a", "out"), Operand(FP32)), False),
        (dict.fromkeys(("a", "out"), Operand(FP16)), False),
    ],
)  # fmt: skip
def test_values_with_their_scales_are_multiplied_for_a_16_bit_result_alone(
    changes: dict[str, Any], bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dequantized, "_fused", lambda *given: lambda t, scale, zero: t * scale)
    launcher = blas._bind_values(replace(LAYER, b=INT8, **changes))
    assert (launcher is not None) is bound


@pytest.mark.parametrize("of", ["a", "b"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("scales", ["row", "rows of each", "one"])
def test_a_kernel_gets_rows_of_an_operand_with_their_scales(
    of: str, batch: int, scales: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fused(t: Tensor, scale: Tensor, zero: Any) -> Tensor:
        assert t.is_contiguous()  # K is the contiguous dimension
        assert t.dim() == scale.dim()
        assert scale.shape[:-2] == t.shape[:-2]
        assert scale.shape[-1] == 1
        return t.float() * scale

    monkeypatch.setattr(dequantized, "_fused", lambda *given: fused)
    stored = replace(INT8, layout="row" if of == "a" else "col")
    problem = replace(LAYER, **{"a": ROW, "b": COL, of: stored}, batch=batch)
    lead = (batch,) if batch > 1 else ()
    rows = torch.randint(-9, 9, (*lead, 4, 8), dtype=torch.int8)
    shape = {"row": (4, 1), "rows of each": (*lead, 4, 1), "one": ()}[scales]
    scale = torch.rand(shape) + 0.5
    values = dequantized.bind_scaled(problem, of)
    assert values is not None
    if of == "a":
        found = values(rows, scale, None)
    else:
        found = values(rows.mT, scale if scales == "one" else scale.mT, None).mT
    torch.testing.assert_close(found, rows.float() * scale)


@pytest.mark.parametrize(
    ("dtype", "kind", "serves"),
    [
        (torch.complex64, "cuda", True), (torch.float64, "cuda", True), (BF16, "cuda", True),
        (torch.int32, "cuda", False), (torch.int64, "cuda", False), (torch.int32, "cpu", True),
    ],
)  # fmt: skip
def test_cuda_multiplies_numbers_with_a_fraction_alone(
    dtype: torch.dtype, kind: str, serves: bool
) -> None:
    row, col = Operand(dtype), Operand(dtype, "col")
    problem = replace(LAYER, a=row, b=col, out=row, device=replace(H100, type=kind))
    declined = [] if serves else [f"torch has no {dtype} matmul on CUDA"]
    assert list(Blas().declines(problem)) == declined
