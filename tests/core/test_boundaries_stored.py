"""Stored operands: values of every code, refusals of checkpoints, tensors of other libraries."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tmm_core import Quantized, foreign, quantize
from tmm_core.formats import e2m1, grids, named
from tmm_core.formats.int4 import FORMAT
from tmm_core.integrations.checkpoints import (
    awq,
    block_scaled,
    compressed,
    gpt_oss,
    gptq,
    hqq,
    words,
)
from tmm_core.nn import stored_experts

Tensor = torch.Tensor
BF16, F16, F32, I32, U8 = (
    torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint8,
)  # fmt: skip
E4M3 = torch.float8_e4m3fn


# -- codes ----------------------------------------------------------------------------------


def test_the_values_of_4_bit_floats() -> None:
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = torch.arange(16, dtype=U8)
    assert e2m1.dequantize(codes).tolist() == sizes + [-size for size in sizes]
    back = e2m1.quantize(torch.tensor(sizes + [-size for size in sizes]), U8)
    assert back.tolist() == list(range(16))
    for number, nearest in (
        (0.25, 0.0), (0.26, 0.5), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0),
        (5.0, 4.0), (5.1, 6.0), (100.0, 6.0), (-0.75, -1.0), (-7.0, -6.0),
    ):  # fmt: skip
        code = e2m1.quantize(torch.tensor([number]), U8)
        assert e2m1.dequantize(code).item() == nearest


def test_the_values_of_4_bit_integers() -> None:
    codes = torch.arange(16, dtype=U8)
    assert FORMAT.dequantize(codes).tolist() == list(range(-8, 8))
    numbers = torch.tensor([-9.0, -8.0, -0.5, 0.5, 1.5, 7.0, 9.0])
    assert FORMAT.quantize(numbers, U8).tolist() == [0, 0, 8, 8, 10, 15, 15]
    both = torch.tensor([[1, 2, 15, 0]], dtype=U8)
    assert FORMAT.packed(both).tolist() == [[1 + 2 * 16, 15]]
    assert FORMAT.unpacked(FORMAT.packed(both)).tolist() == both.tolist()


def test_exponents_are_powers_of_two() -> None:
    scale = torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=U8)
    found = grids.factors(scale, torch.float64)
    right = [2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127]
    assert found[:-1].tolist() == right
    assert math.isnan(found[-1])
    numbers = torch.tensor([1.0, 1.99, 2.0, 0.75, 2.0**-126, 2.0**127, math.nan, 0.0])
    assert grids.exponents(numbers).tolist() == [127, 127, 128, 126, 1, 254, 255, 0]
    plain = torch.tensor([0.1], dtype=F32)
    assert grids.factors(plain, F16).dtype is F16


@pytest.mark.parametrize(
    ("text", "block", "kind"),
    [
        ("tensor", (0, 0), "tensor"), ("row", (1, 0), "row"), ("1x128", (1, 128), "group"),
        ("128x128", (128, 128), "block"), ("2x1", (2, 1), "block"),
    ],
)  # fmt: skip
def test_scales_by_their_texts(text: str, block: tuple[int, int], kind: str) -> None:
    assert grids.parse(text) == block
    assert (grids.text_of(block), grids.kind_of(block)) == (text, kind)


@pytest.mark.parametrize(
    "text", ["", "x", "1x", "x128", "0x128", "1x0", "-1x2", "1x2x3", "columns", "1.0x2"]
)
def test_invalid_texts_of_scales_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"not {text!r}"):
        grids.parse(text)


@pytest.mark.parametrize(
    ("group", "block", "error", "message"),
    [
        (32, (1, 32), ValueError, "give the group or the block"),
        (None, 3, TypeError, r"block must be two integers .*, got 3"),
        (None, (1, 2, 3), ValueError, "block must be two integers"),
        (None, (1,), ValueError, "block must be two integers"),
        (None, (1, 2.0), TypeError, "sizes of groups and blocks are integers"),
        (32.0, None, TypeError, "sizes of groups and blocks are integers"),
    ],
)
def test_an_invalid_block_is_refused(
    group: Any, block: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        grids.block_of_call(group, block)


def test_a_group_is_a_block_of_one_row() -> None:
    assert grids.block_of_call(32, None) == grids.block_of_call(None, [1, 32]) == (1, 32)
    assert grids.block_of_call(None, None) is None


@pytest.mark.parametrize(
    ("block", "outer", "k", "stack", "found"),
    [
        ((1, 128), 4, 128, 1, (1, 0)), ((1, 128), 4, 129, 1, (1, 128)),
        ((1, 128), 4, 100, 1, (1, 0)), ((1, 128), 1, 128, 1, (0, 0)),
        ((1, 128), 1, 128, 2, (1, 0)), ((128, 128), 128, 128, 1, (0, 0)),
        ((128, 128), 129, 128, 1, (128, 128)), ((128, 128), 128, 128, 2, (128, 128)),
        ((0, 0), 4, 4, 1, (0, 0)), ((0, 0), 4, 4, 2, (0, 0)), ((1, 0), 1, 9, 1, (0, 0)),
        ((1, 128), 4, 0, 1, (1, 128)), ((1, 0), 0, 4, 1, (1, 0)),
    ],
)  # fmt: skip
def test_the_simplest_block_that_divides_alike(
    block: Any, outer: int, k: int, stack: int, found: Any
) -> None:
    assert grids.simplest(block, outer, k, stack) == found


@pytest.mark.parametrize(
    ("block", "found"),
    [
        ((0, 0), (1, 1)),
        ((1, 0), (5, 1)),
        ((1, 32), (5, 3)),
        ((2, 64), (3, 2)),
        ((128, 128), (1, 1)),
    ],
)
def test_the_number_of_scales(block: Any, found: Any) -> None:
    assert grids.sizes(block, 5, 96) == found


@pytest.mark.parametrize("along", [-1, -2])
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (1, 2), (1, 4), (2, 2), (2, 3), (1, 3)])
def test_each_value_is_multiplied_by_its_scale(block: Any, along: int) -> None:
    outer, k = 5, 8
    values = torch.arange(float(outer * k)).view(outer, k)
    part = torch.arange(1.0, 1 + math.prod(grids.sizes(block, outer, k)))
    part = part.view(grids.sizes(block, outer, k))
    rows, width = block
    right = torch.empty(outer, k)
    for i in range(outer):
        for j in range(k):
            at = i // rows if rows else 0, j // width if width else 0
            right[i, j] = values[i, j] * part[at]
    given = (values, part) if along == -1 else (values.t().contiguous(), part.t())
    found = grids.combined(torch.mul, *given, block, along)
    assert torch.equal(found if along == -1 else found.t(), right)


@pytest.mark.parametrize("block", [(1, 4), (2, 4), (128, 4), (1, 3)])
def test_scales_of_one_row_are_of_its_groups(block: Any) -> None:
    """A vector is one row, so a block has none of the other rows."""
    values, part = torch.arange(8.0), torch.arange(1.0, 4.0)[: -(-8 // block[1])]
    right = values * part.repeat_interleave(block[1])[:8]
    assert torch.equal(grids.combined(torch.mul, values, part, block, -1), right)


# -- words ------------------------------------------------------------------------------------


def test_words_hold_eight_numbers_from_the_low_bits_on() -> None:
    numbers = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]], dtype=U8)
    word = words.packed(numbers)
    assert word.dtype is I32
    assert word.item() & 0xFFFFFFFF == 0xF7654321
    assert words.unpacked(word).tolist() == numbers.tolist()
    interleaved = words.packed(numbers, awq.ORDER)
    assert interleaved.item() & 0xFFFFFFFF == 0xF6427531
    assert words.unpacked(interleaved, awq.ORDER).tolist() == numbers.tolist()


@pytest.mark.parametrize(
    ("group", "k", "found"),
    [(-1, 64, (64, 1)), (32, 64, (32, 2)), (64, 64, (64, 1)), (128, 64, (128, 1)), (1, 3, (1, 3)),
     (0, 64, None), (-2, 64, None), (48, 64, None)],
)  # fmt: skip
def test_groups_divide_k(group: int, k: int, found: Any) -> None:
    if found is not None:
        assert words.groups(group, k) == found
        return
    with pytest.raises(ValueError, match=f"groups of {group} do not divide K = {k}"):
        words.groups(group, k)


def test_zero_points_of_8_are_left_out() -> None:
    eights = torch.full((2, 2), 8, dtype=U8)
    assert words.unless_symmetric(eights) is None
    other = eights.clone()
    other[1, 1] = 9
    assert words.unless_symmetric(other) is other


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_zero_point_may_have_any_dimensions(shape: tuple[int, ...]) -> None:
    stored = torch.zeros(6, 32, dtype=torch.int8)
    for of_scale in ((), (1,), (1, 1)):
        zero = torch.full(shape, 3, dtype=torch.int8)
        weight = Quantized(stored, torch.ones(of_scale), zero, format="int8")
        assert weight.zero is not None
        assert weight.zero.shape == weight.scale.shape
    with pytest.raises(ValueError, match="zero must have the shape of scale"):
        Quantized(stored, torch.ones(()), torch.ones(2, dtype=torch.int8), format="int8")


@pytest.mark.parametrize("value", [448.0, 460.0, 500.0])
def test_numbers_that_an_exponent_leaves_too_large_are_clamped(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are clamped before rounding: some releases of torch round such a number to NaN."""
    given: list[float] = []

    def rounded(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        given.append(numbers.abs().max().item())
        return numbers.to(dtype)

    form = replace(named("mxfp8"), quantize=rounded)
    monkeypatch.setattr("tmm_core.rounding.formats.named", lambda name: form)
    quantize(torch.full((1, 32), -value), "mxfp8")
    assert given == [448.0]


# -- checkpoints --------------------------------------------------------------------------------

N, K, G = 16, 64, 32
QW, QZ = torch.zeros(K // 8, N, dtype=I32), torch.zeros(K // G, N // 8, dtype=I32)
SCALES = torch.ones(K // G, N, dtype=F16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 0}, "zero points have version 1 or 2, not 0"),
        ({"version": 3}, "zero points have version 1 or 2, not 3"),
        ({"qweight": QW.long()}, r"qweight must be int32 of shape \(8, 16\), got torch.int64"),
        ({"qzeros": QZ.long()}, "qzeros must be int32"),
        ({"qzeros": QZ[:1]}, r"qzeros must be int32 of shape \(2, 2\)"),
        ({"scales": SCALES.t()}, r"scales must have shape \(2, 16\), got \(16, 2\)"),
        ({"group": 48}, "groups of 48 do not divide K = 64"),
        ({"g_idx": torch.arange(K) % 2}, "g_idx is not in order of k"),
        ({"g_idx": torch.arange(K // 2) // G}, "g_idx is not in order of k"),
    ],
)
def test_an_invalid_gptq_weight_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"qweight": QW, "qzeros": QZ, "scales": SCALES, "group": G}
    with pytest.raises(ValueError, match=message):
        gptq.read(**given | changes)
    assert gptq.read(**given, g_idx=torch.arange(K) // G, version=2).shape == (N, K)


@pytest.mark.parametrize(("version", "zero"), [(1, 8), (2, 7)])
def test_versions_of_gptq_differ_by_one(version: int, zero: int) -> None:
    sevens = words.packed(torch.full((K // G, N), 7, dtype=U8))
    found = gptq.read(QW, sevens, SCALES, G, version=version)
    assert (found.zero is None) == (version == 1)
    assert found.dequantize().unique().tolist() == [-zero]
    for written in (1, 2):
        qweight, qzeros, scales = gptq.written(found, written)
        again = gptq.read(qweight, qzeros, scales, G, version=written)
        assert torch.equal(again.dequantize(), found.dequantize())


def test_a_zero_point_of_15_wraps_in_version_1() -> None:
    found = gptq.read(QW, words.packed(torch.full((K // G, N), 15, dtype=U8)), SCALES, G, version=1)
    assert found.zero is not None
    assert found.zero.unique().tolist() == [0]


@pytest.mark.parametrize(("mean", "version"), [(7, 2), (8, 1), (9, 1), (6, 2)])
def test_the_version_is_that_whose_weights_have_a_mean_near_zero(mean: int, version: int) -> None:
    stored = FORMAT.packed(torch.full((N, K), mean, dtype=U8))
    assert gptq._version(stored, torch.full((K // G, N), 7, dtype=U8)) == version


def test_at_the_limit_gptqs_version_is_two() -> None:
    stored = FORMAT.packed(torch.tensor([[8, 9] * 8], dtype=U8))
    for zero, version in ((8.0, 2), (7.99, 1), (8.01, 2)):
        assert gptq._version(stored, torch.tensor([zero])) == version


def test_groups_of_gptq_have_128_values_by_default() -> None:
    codes = torch.arange(256 * 8, dtype=I32).view(256, 8) % 15 + 1  # their mean is 8
    qweight = words.packed(codes.t()).t().contiguous()
    qzeros = words.packed(torch.full((2, 8), 7, dtype=I32))
    found = gptq.read(qweight, qzeros, torch.tensor([[1.0] * 8, [2.0] * 8]).half())
    expected = (codes - 8).float() * torch.tensor([1.0, 2.0]).repeat_interleave(128)[:, None]
    assert torch.equal(found.dequantize().float().t(), expected)


def test_columns_of_awq_are_interleaved() -> None:
    """A word holds columns 0, 2, 4, 6, 1, 3, 5, 7 from its low bits on."""
    word = sum(column << 4 * place for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    qweight = torch.tensor([word] * 128).to(torch.int64).to(I32)[:, None]
    found = awq.read(qweight, torch.zeros(1, 1, dtype=I32), torch.ones(1, 8).half())
    assert found.dequantize().float()[:, 0].tolist() == [float(column) for column in range(8)]


def test_the_order_of_columns_of_gptq() -> None:
    assert gptq.order(None, G) is None
    assert gptq.order(torch.arange(K) // G, G) is None
    assert gptq.order(torch.arange(4) % 2, 2).tolist() == [0, 2, 1, 3]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="g_idx has groups of other sizes than 2"):
        gptq.order(torch.tensor([0, 0, 0, 1]), 2)
    codes = torch.randint(0, 16, (K, N), dtype=U8)
    places = torch.randperm(K)
    qweight = FORMAT.packed(codes.t().contiguous()).view(I32).t().contiguous()
    plain = gptq.read(qweight, QZ, SCALES, G, version=1)
    ordered = gptq.read(qweight, QZ, SCALES, G, version=1, order=places)
    assert torch.equal(ordered.dequantize(), plain.dequantize()[:, places])
    assert torch.equal(gptq.written(ordered, order=places)[0], qweight)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qweight": torch.zeros(K, N // 8)}, "qweight must be int32"),
        ({"qzeros": torch.zeros(K // G, N // 8)}, "qzeros must be int32"),
        ({"scales": torch.ones(K // G, N - 1)}, r"scales must have shape \(2, 16\)"),
        ({"group": 0}, "groups of 0 do not divide"),
    ],
)
def test_an_invalid_awq_weight_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "qweight": torch.zeros(K, N // 8, dtype=I32), "qzeros": QZ, "scales": SCALES, "group": G,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        awq.read(**given | changes)
    assert awq.read(**given).shape == (N, K)


PACKED = torch.zeros(N, K // 8, dtype=I32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_packed": PACKED.long()}, "weight_packed must be int32"),
        ({"weight_scale": torch.ones(N - 1, 2)}, r"weight_scale must be \[16, K/g\]"),
        ({"weight_scale": torch.ones(N, 0)}, r"weight_scale must be \[16, K/g\]"),
        ({"weight_scale": torch.ones(N, 3)}, r"weight_scale must be \[16, K/g\]"),
        ({"weight_scale": torch.ones(N, 2, 1)}, r"weight_scale must be \[16, K/g\]"),
        ({"weight_zero_point": torch.zeros(3, 2, dtype=I32)}, "weight_zero_point must be int32"),
        ({"weight_zero_point": torch.zeros(2, 1, dtype=I32)}, "weight_zero_point must be int32"),
    ],
)
def test_an_invalid_compressed_weight_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"weight_packed": PACKED, "weight_scale": torch.ones(N, 2, dtype=BF16)}
    with pytest.raises(ValueError, match=message):
        compressed.read(**given | changes)
    found = compressed.read(**given)
    assert (found.shape, found.zero, found.block) == ((N, K), None, (1, 32))


def test_zero_points_of_rows_that_fill_no_word() -> None:
    zero = torch.randint(0, 16, (10, 2), dtype=U8)
    padded = torch.nn.functional.pad(zero.t(), (0, 6))
    point = words.packed(padded).t()
    found = compressed.read(PACKED[:10], torch.ones(10, 2, dtype=BF16), point)
    assert torch.equal(found.zero, zero)  # type: ignore[arg-type]


META: dict[str, Any] = {
    "nbits": 4, "axis": 1, "packing": "4bit_u8", "shape": (2, 4), "group_size": 2,
    "scale": torch.ones(4, 1, dtype=F16), "zero": torch.zeros(4, 1, dtype=F16),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nbits": 8}, "got nbits=8, axis=1"), ({"axis": 0}, "got nbits=4, axis=0"),
        ({"packing": "8bit"}, "packing=8bit"),
        ({"quant_scale": True}, "scales and zero points that are not quantised"),
        ({"quant_zero": True}, "scales and zero points that are not quantised"),
        ({"shape": (2, 6)}, "W_q must be uint8 of 2 × 6 numbers"),
        ({"group_size": 3}, "in groups of 3; got"),
        ({"scale": torch.ones(3, 1)}, r"scale must have one number per group, got \(3, 1\)"),
        ({"zero": torch.ones(5, 1)}, r"zero must have one number per group, got \(5, 1\)"),
    ],
)  # fmt: skip
def test_an_invalid_hqq_weight_is_refused(changes: dict[str, Any], message: str) -> None:
    stored = torch.zeros(2, 2, dtype=U8)
    with pytest.raises(ValueError, match=message):
        hqq.read(stored, META | changes)
    with pytest.raises(ValueError, match="W_q must be uint8"):
        hqq.read(stored.int(), META)


def test_halves_of_an_hqq_weight() -> None:
    """The first half of the groups is in the high bits."""
    high, low = torch.randint(0, 16, (2, 4, 32), dtype=U8)
    parts = {"scale": torch.full((8, 1), 2.0), "zero": torch.arange(8.0).view(8, 1)}
    meta = {**META, "shape": (4, 64), "group_size": 32, **parts}
    usual = {name: meta[name] for name in meta if name not in ("axis", "packing")}
    numbers = torch.cat([high, low]).float()
    right = (2 * (numbers - parts["zero"])).view(4, 64)
    for each in (meta, usual):
        assert torch.equal(hqq.read(high * 16 + low, each).dequantize().float(), right)
    parts = {name: t[:4] for name, t in parts.items()}
    whole = {**meta, "group_size": None, **parts}
    assert hqq.read(high * 16 + low, whole).block == (1, 0)


@pytest.mark.parametrize(
    ("scale", "values"),
    [
        (torch.full((1, 1), 2.0), 2.0), (torch.tensor(2.0), 2.0),
        (torch.full((1, 1), 128, dtype=U8), 2.0), (torch.full((1, 1), 2.0, dtype=BF16), 2.0),
    ],
)  # fmt: skip
def test_blocks_of_8_bit_floats(scale: Tensor, values: float) -> None:
    found = block_scaled.read(torch.ones(4, 8).to(E4M3), scale)
    assert found.dequantize().unique().tolist() == [values]
    assert found.scale.dtype is F32
    wide = block_scaled.read(torch.ones(256, 128).to(E4M3), torch.tensor([[1.0], [2.0]]))
    assert wide.dequantize()[:, 0].tolist() == [1.0] * 128 + [2.0] * 128


def test_blocks_have_128_values_by_default_and_one_scale_has_none() -> None:
    weight = torch.full((200, 160), 2.0).to(E4M3)
    scale, ends = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [0, 127, 128, 159]
    values = [[2.0, 2.0, 4.0, 4.0]] * 2 + [[6.0, 6.0, 8.0, 8.0]] * 2
    for found in (block_scaled.read(weight, scale), Quantized.from_fp8(weight, scale)):
        assert found.block == (128, 128)
        assert found.dequantize().float()[ends][:, ends].tolist() == values
    rows = block_scaled.read(torch.ones(200, 256).to(E4M3), torch.ones(200, 2), (1, 128))
    assert rows.block == (1, 128)
    with pytest.raises(ValueError, match="1x64 must have shape"):  # the block's shape
        block_scaled.read(torch.ones(200, 256).to(E4M3), torch.ones(200, 2), (1, 64))
    assert block_scaled.read(weight, torch.ones(1, 1)).block == grids.TENSOR


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [((2, 4, 3, 8), (2, 4, 3)), ((2, 4, 3, 16), (2, 4, 2)), ((3, 16), (3,)), ((4, 3, 32), (4, 3))],
)
def test_an_invalid_mxfp4_weight_is_refused(
    blocks: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"blocks must be \[E, N, K/32, 16\]"):
        gpt_oss.read(torch.zeros(blocks, dtype=U8), torch.zeros(scales, dtype=U8))
    found = gpt_oss.read(
        torch.full((2, 4, 3, 16), 0x21, dtype=U8), torch.full((2, 4, 3), 128, dtype=U8)
    )
    assert found.shape == (2, 4, 96)
    assert found.dequantize()[0, 0, :2].tolist() == [1.0, 2.0]


def test_a_tensor_has_the_dtype_of_scales_of_16_bits() -> None:
    data = torch.ones(4, 8, dtype=torch.int8)
    for dtype, found in ((F16, F16), (BF16, BF16), (F32, BF16)):
        assert Quantized(data, torch.ones(4, 1, dtype=dtype)).dtype == found
    with pytest.raises(TypeError, match="argument 'data' must be Tensor, not NoneType"):
        Quantized(None, torch.ones(4, 1))  # type: ignore[arg-type]


def test_parts_distinguish_rows_from_k_unless_there_is_one_scale_for_whole_bytes() -> None:
    data = torch.ones(4, 8, dtype=torch.int8)
    assert not Quantized(data, torch.ones(())).is_directed
    assert Quantized(data, torch.ones(4, 1)).is_directed
    packed = Quantized(torch.zeros(1, 8, dtype=U8), torch.ones(1, 1), format="int4")
    assert packed.block == grids.TENSOR
    assert packed.is_directed


def test_integer_scales_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight_scale_inv must be float32, .* got torch.int32"):
        block_scaled.read(torch.ones(4, 8).to(E4M3), torch.ones(1, 1, dtype=I32))


# -- quantised tensors ----------------------------------------------------------------------------


def weight(zero: bool = False, group: int = 32, fill: float = 1.0) -> Quantized:
    scale = torch.full((N, K // group), fill, dtype=BF16)
    zeros = torch.full((N, K // group), 8, dtype=U8) if zero else None
    return Quantized(torch.zeros(N, K // 2, dtype=U8), scale, zeros, format="int4", group=group)


@pytest.mark.parametrize(
    ("other", "fits"),
    [
        (weight(fill=3.0), True), (weight(zero=True), False), (weight(group=64), False),
        (Quantized(torch.zeros(N, K, dtype=torch.int8), torch.ones(N, 1)), False),
    ],
    ids=["alike", "zero points", "group", "format"],
)  # fmt: skip
def test_only_a_tensor_of_the_same_kind_is_copied(other: Quantized, fits: bool) -> None:
    for to, source in ((weight(), other), (other, weight())):
        before = to.dequantize()
        if fits:
            to.copy_(source)
            assert torch.equal(to.dequantize(), source.dequantize())
            continue
        with pytest.raises(RuntimeError, match="cannot copy Quantized"):
            to.copy_(source)
        assert torch.equal(to.dequantize(), before)


def test_zero_points_are_copied_with_the_rest() -> None:
    to, source = weight(zero=True), weight(zero=True)
    assert source.zero is not None
    source.zero.fill_(3)
    to.copy_(source)
    assert torch.equal(to.dequantize(), source.dequantize())
    assert to.dequantize().unique().tolist() == [-3.0]


@pytest.mark.parametrize(
    ("dtype", "fine"),
    [(F32, True), (F16, True), (torch.float64, True), (I32, False), (E4M3, False)],
)
def test_values_are_cast_to_floats_of_16_bits_or_more(dtype: torch.dtype, fine: bool) -> None:
    if fine:
        assert weight().to(dtype).dequantize().dtype is dtype
        return
    with pytest.raises(NotImplementedError, match="a quantised tensor has floating values"):
        weight().to(dtype)


def test_moves_of_dimensions_keep_k_known() -> None:
    stack = Quantized(
        torch.zeros(2, N, K // 2, dtype=U8),
        torch.ones(2, N, 2, dtype=BF16),
        format="int4",
        group=32,
    )
    assert (stack.along, stack.mT.along, stack.mT.mT.along) == (-1, -2, -1)
    assert stack.mT.shape == (2, K, N)
    assert stack.permute(0, 2, 1).along == stack.transpose(1, 2).along == -2
    assert stack.permute(0, 1, 2).along == -1
    for moved in (lambda: stack.transpose(0, 1), lambda: stack.permute(2, 0, 1)):
        with pytest.raises(NotImplementedError, match="rows and K as its last two dimensions"):
            moved()
    assert torch.equal(stack.mT.dequantize(), stack.dequantize().mT)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data": [1]}, TypeError, "argument 'data' must be Tensor, not list"),
        ({"scale": None}, TypeError, "argument 'scale' must be Tensor, not NoneType"),
        ({"zero": 3}, TypeError, "argument 'zero' must be Tensor, not int"),
        ({"data": torch.zeros(4, 8)}, ValueError, "format int8 stores .*, got torch.float32"),
        ({"data": torch.tensor(3, dtype=torch.int8)}, ValueError, "a dimension along K"),
        ({"scale": torch.ones(3)}, ValueError, "scale must be one number, or have shape"),
        ({"scale": torch.ones(4, 3)}, ValueError, "scale"),
        ({"scale": torch.ones(4, 1, dtype=torch.float64)}, ValueError, "scale of format int8 must"),
        ({"zero": torch.zeros(3, 1, dtype=torch.int8)}, ValueError, "zero must have the shape of"),
        ({"zero": torch.zeros(4, 1, dtype=I32)}, ValueError, "zero of format int8 must have dtype"),
        ({"scale": torch.ones(4, 1, device="meta")}, RuntimeError, "on the same device"),
        ({"data": torch.zeros(4, 8, dtype=torch.int8).to_sparse()}, RuntimeError, "a dense tensor"),
        ({"group": 32, "block": (1, 32)}, ValueError, "give the group or the block"),
        ({"format": "int9"}, Exception, "int9"),
    ],
)
def test_an_invalid_quantised_tensor_is_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    given: dict[str, Any] = {"data": torch.zeros(4, 8, dtype=torch.int8), "scale": torch.ones(4, 1)}
    assert Quantized(**given).shape == (4, 8)
    with pytest.raises(error, match=message):
        Quantized(**given | change)


# -- tensors of torchao -------------------------------------------------------------------


def stranger(name: str, module: str = "torchao.quantization", **fields: Any) -> Any:
    """An object whose type has the name of another library's type."""
    made = type(name, (), {"__module__": module})()
    usual = {"act_quant_kwargs": None, "act_pre_scale": None, "activation_dtype": BF16}
    for field, value in (usual | fields).items():
        setattr(made, field, value)
    return made


INT8 = {
    "qdata": torch.arange(32, dtype=torch.int8).view(4, 8), "scale": torch.full((4, 1), 2.0),
    "zero_point": torch.zeros(4, 1, dtype=torch.int8), "block_size": (1, 8),
}  # fmt: skip


def test_int8_of_torchao() -> None:
    found = foreign.read(stranger("Int8Tensor", **INT8))
    assert torch.equal(found.dequantize().float(), 2.0 * INT8["qdata"])
    assert found.zero is None
    assert found.stored.data_ptr() == INT8["qdata"].data_ptr()
    shifted = INT8 | {"zero_point": torch.ones(4, 1, dtype=torch.int8)}
    found = foreign.read(stranger("Int8Tensor", **shifted))
    assert torch.equal(found.dequantize().float(), 2.0 * (INT8["qdata"] - 1))


@pytest.mark.parametrize("stack", [(), (2,)])
def test_groups_of_torchao_in_a_stack(stack: tuple[int, ...]) -> None:
    shape = *stack, 4, 64
    data = torch.arange(math.prod(shape)).remainder(100).to(torch.int8).view(shape)
    scale = 2.0 ** torch.arange(math.prod(stack) * 8).remainder(5).view(*stack, 4, 2)
    fields = {"qdata": data, "scale": scale, "zero_point": torch.zeros_like(scale),
              "block_size": (*[1] * len(stack), 1, 32)}  # fmt: skip
    found = foreign.read(stranger("Int8Tensor", **fields))
    assert torch.equal(found.dequantize().float(), data * scale.repeat_interleave(32, -1))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Int8Tensor", {"act_quant_kwargs": 1}), ("Int8Tensor", {"act_pre_scale": 1}),
        ("Int4Tensor", {"activation_dtype": E4M3}), ("Int4Tensor", {"act_pre_scale": 1}),
        ("Float8Tensor", {"act_quant_kwargs": 1}), ("OtherTensor", {}),
        ("Int8Tensor", {"module": "elsewhere"}),
    ],
)  # fmt: skip
def test_a_tensor_that_also_rounds_activations_is_left_to_its_library(
    name: str, changes: dict[str, Any]
) -> None:
    given = stranger(name, **INT8 | changes)
    assert foreign.read(given) is given
    call = SimpleNamespace(a=given, b=given)
    assert foreign.read_operands(call) is call


def test_int4_of_torchao_is_signed_and_adds_its_zero_point() -> None:
    codes = torch.randint(0, 16, (4, 64), dtype=U8)
    stored = FORMAT.packed(codes)
    fields = {
        "qdata": stored, "scale": torch.full((2, 4), 2.0), "block_size": (1, 32),
        "zero_point": torch.zeros(2, 4),
    }  # fmt: skip
    signed = torch.where(codes < 8, codes.int(), codes.int() - 16)
    found = foreign.read(stranger("Int4Tensor", **fields))
    assert found.zero is None
    assert torch.equal(found.dequantize().float(), 2.0 * signed)
    fields["zero_point"] = torch.full((2, 4), 6.0)
    found = foreign.read(stranger("Int4Tensor", **fields))
    assert torch.allclose(found.dequantize().float(), 2.0 * signed + 6)


@pytest.mark.parametrize(
    ("shape", "scale", "block"),
    [
        ((4, 8), (4, 1), (1, 8)), ((4, 8), (1, 1), (4, 8)), ((1, 8), (1, 1), (1, 8)),
        ((256, 128), (2, 1), (128, 128)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("turned", [False, True])
def test_float8_of_torchao_and_its_transpose(
    shape: tuple[int, int], scale: tuple[int, int], block: tuple[int, int], turned: bool
) -> None:
    values = torch.randn(shape).to(E4M3)
    scales = torch.rand(scale) + 0.5
    rows, width = shape[0] // scale[0], shape[1] // scale[1]
    right = values.float() * scales.repeat_interleave(rows, 0).repeat_interleave(width, 1)
    fields: dict[str, Any] = {"qdata": values, "scale": scales, "block_size": block}
    if turned:
        fields = {"qdata": values.t(), "scale": scales.t(), "block_size": block[::-1]}
        right = right.t()
    given = stranger("Float8Tensor", **fields)
    type(given).dim = lambda self: 2
    found = foreign.read(given)
    assert found.shape == right.shape
    assert torch.allclose(found.dequantize().float(), right, rtol=1e-2)


def test_a_weight_of_one_column_is_not_its_transpose() -> None:
    """Both strides are one."""
    values, scale = torch.randn(4, 1).to(E4M3), torch.rand(4, 1) + 0.5
    given = stranger("Float8Tensor", qdata=values, scale=scale, block_size=(1, 1))
    type(given).dim = lambda self: 2
    found = foreign.read(given)
    assert found.shape == (4, 1)
    assert torch.allclose(found.dequantize().float(), values.float() * scale, rtol=1e-2)


def test_zero_points_that_changed_are_read_again() -> None:
    zero = torch.zeros(4, 1, dtype=torch.int8)
    given = stranger("Int8Tensor", **INT8 | {"zero_point": zero})
    assert foreign.read(given).zero is None
    zero[2] = 1
    assert foreign.read(given).zero is not None
    zero.zero_()
    assert foreign.read(given).zero is None
    given.zero_point = torch.ones(4, 1, dtype=torch.int8)
    assert foreign.read(given).zero is not None
    given.zero_point = torch.zeros(4, 1, dtype=torch.int8, device="meta")
    given.qdata, given.scale = given.qdata.to("meta"), given.scale.to("meta")
    assert foreign.read(given).zero is not None


# -- weights of expert layers -------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "scales", "repeated"),
    [
        ([1, 128], (2, 4, 2), (1, 128)), ([128, 128], (2, 1, 2), (4, 128)),
        (None, (2, 1, 1), (4, 256)), (None, (2, 2, 1), (2, 256)),
    ],
)  # fmt: skip
def test_experts_in_8_bit_floats(
    block: list[int] | None, scales: tuple[int, ...], repeated: tuple[int, int]
) -> None:
    weight, scale = torch.randn(2, 4, 256).to(E4M3), torch.rand(scales) + 0.5
    layer = SimpleNamespace(up=weight, up_scale_inv=scale, block_size=block)
    found: Any = stored_experts.of(layer, "up")
    assert found.stored.data_ptr() == weight.data_ptr()
    rows, columns = repeated
    each = scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
    assert torch.allclose(found.dequantize().float(), weight.float() * each, rtol=1e-2)


def test_experts_whose_weights_are_plain() -> None:
    weight = torch.randn(2, 8, 4)
    for attributes, turned in (
        ({}, False),
        ({"is_transposed": False}, False),
        ({"is_transposed": True}, True),
    ):
        for scale in (
            None,
            torch.ones(2, 1, 1),
        ):  # a scale of numbers that are not stored in 8 bits
            layer = SimpleNamespace(up=weight, up_scale_inv=scale, **attributes)
            found = stored_experts.of(layer, "up")
            assert found.data_ptr() == weight.data_ptr()
            assert torch.equal(found, weight.mT if turned else weight)


def test_formats_by_name() -> None:
    assert named("int4") is FORMAT
    for name in ("int8", "int4", "int4_signed", "fp8", "mxfp4", "mxfp8", "nvfp4"):
        assert named(name).name == name
