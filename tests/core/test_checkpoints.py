"""Weights of quantised checkpoints, against tensors packed number by number by their layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from written_by_packages import GROUP, WRITERS, written

import tmm_core
from tmm_core import Quantized
from tmm_core.integrations.checkpoints import awq, gptq
from tmm_core.verify import compare

Tensor = torch.Tensor
BF16 = torch.bfloat16
N, K, G = 16, 256, GROUP
WRITTEN = written()


def close(found: Tensor, expected: Tensor) -> None:
    assert compare.error(found, expected) <= compare.TOLERANCE[found.dtype]


def check(weight: Quantized, values: Tensor) -> None:
    """The weight has these values, and multiplies with them."""
    assert weight.shape == values.shape
    torch.testing.assert_close(weight.dequantize().double(), values, rtol=1e-2, atol=1e-9)
    x = torch.randn(5, values.shape[-1], dtype=BF16)
    if values.dim() == 2:
        close(tmm_core.linear(x, weight), x.double() @ values.T)


def word(numbers: list[int]) -> int:
    """Eight numbers in a signed word of 32 bits, the first in the lowest bits."""
    value = sum(number << (4 * place) for place, number in enumerate(numbers))
    return value - (1 << 32) if value >= 1 << 31 else value


def drawn(symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [N, K], zero points and scales [N, K/G] of normal weights, and their values."""
    weight = torch.randn(N, K).unflatten(-1, (-1, G))
    if symmetric:
        scale = (weight.abs().amax(-1) / 7).half()
        zero = torch.full_like(scale, 8).to(torch.int64)
    else:
        low, high = weight.amin(-1), weight.amax(-1)
        scale = ((high - low) / 15).half()
        zero = (-low / scale.float()).round().clamp(1, 15).to(torch.int64)
    codes = (weight / scale.float()[..., None]).round() + zero[..., None]
    codes = codes.clamp(0, 15).to(torch.int64)
    values = ((codes - zero[..., None]).double() * scale.double()[..., None]).flatten(-2)
    return codes.flatten(-2), zero, scale, values


def check_entry(name: str, entry: dict[str, Any]) -> None:
    """A weight that a package wrote has the values that the package reads."""
    values = entry["values"].double()
    if name == "hqq":
        check(Quantized.from_hqq(entry["W_q"], entry["meta"]), values)
        return
    if name == "torchao":
        check(Quantized.from_mxfp4(entry["blocks"], entry["scales"]), values)
        return
    if name == "compressed_tensors":
        names = "weight_packed", "weight_scale", "weight_zero_point"
        check(Quantized.from_compressed(*(entry[each] for each in names)), values)
        return
    stored = [entry[tensor] for tensor in ("qweight", "qzeros", "scales")]
    if name == "autoawq":
        check(Quantized.from_awq(*stored, group=G), values)
        return
    if name.endswith("activation order"):
        with pytest.raises(ValueError, match="g_idx is not in order"):
            Quantized.from_gptq(*stored, group=G, g_idx=entry["g_idx"])
        return
    weight = Quantized.from_gptq(*stored, group=G, g_idx=entry["g_idx"])
    check(weight, values)
    assert (weight.zero is None) is name.endswith("symmetric")


@pytest.mark.parametrize("name", WRITTEN)
def test_what_packages_wrote(name: str) -> None:
    check_entry(name, WRITTEN[name])


@pytest.mark.slow
@pytest.mark.parametrize("package", ["torchao", "compressed_tensors"])
def test_what_installed_packages_write(package: str) -> None:
    """These can be installed beside tmm, so that a newer release is tested too."""
    pytest.importorskip(package)
    _, writer = WRITERS[package]
    for name, entry in writer().items():
        check_entry(name, entry)


@pytest.mark.parametrize(("version", "stored", "zero"), [(1, 15, 0), (1, 14, 15), (2, 0, 0)])
def test_zero_points_of_gptq_are_four_bits(version: int, stored: int, zero: int) -> None:
    """Version 1 stores z − 1, so that 15 stands for 0."""
    qweight = torch.full((G // 8, 8), word([3] * 8), dtype=torch.int32)
    qzeros = torch.full((1, 1), word([stored] * 8), dtype=torch.int32)
    given = qweight, qzeros, torch.ones(1, 8, dtype=torch.float16)
    weight = Quantized.from_gptq(*given, group=G, version=version)
    assert (weight.dequantize() == 3 - zero).all()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(symmetric: bool, version: int) -> None:
    """The importer finds the version from the tensors."""
    codes, zero, scale, values = drawn(symmetric)
    qweight = torch.tensor(
        [[word(codes[n, 8 * i : 8 * i + 8].tolist()) for n in range(N)] for i in range(K // 8)],
        dtype=torch.int32,
    )
    kept = (zero - int(version == 1)) & 15
    qzeros = torch.tensor(
        [[word(kept[8 * j : 8 * j + 8, g].tolist()) for j in range(N // 8)] for g in range(K // G)],
        dtype=torch.int32,
    )
    scales = scale.t().contiguous()
    weight = Quantized.from_gptq(qweight, qzeros, scales, group=G)
    check(weight, values)
    assert (weight.zero is None) is symmetric
    assert weight.scale.data_ptr() == scales.data_ptr()
    copied = Quantized(
        weight.stored.clone(), weight.scale.contiguous(), weight.zero, format="int4", group=G
    )
    for found in (gptq.written(weight, version), gptq.written(copied, version)):
        for own, other in zip(found, (qweight, qzeros, scales), strict=True):
            assert torch.equal(own, other)
            assert own.is_contiguous()
    in_order = torch.arange(K, dtype=torch.int32) // G
    check(Quantized.from_gptq(qweight, qzeros, scales, group=G, g_idx=in_order), values)
    with pytest.raises(ValueError, match="g_idx is not in order"):
        Quantized.from_gptq(qweight, qzeros, scales, group=G, g_idx=in_order.flip(0))
    with pytest.raises(ValueError, match="scales must have shape"):
        Quantized.from_gptq(qweight, qzeros, scales.t(), group=G)
    with pytest.raises(ValueError, match="qzeros must be int32"):
        Quantized.from_gptq(qweight, qzeros, scales, group=128)


@pytest.mark.parametrize("symmetric", [False, True])
def test_awq(symmetric: bool) -> None:
    codes, zero, scale, values = drawn(symmetric)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(numbers: Tensor) -> Tensor:
        rows = [
            [word([int(row[8 * j + i]) for i in order]) for j in range(N // 8)] for row in numbers
        ]
        return torch.tensor(rows, dtype=torch.int32)

    qweight, qzeros, scales = words(codes.t()), words(zero.t()), scale.t().contiguous()
    weight = Quantized.from_awq(qweight, qzeros, scales, group=G)
    check(weight, values)
    copied = Quantized(
        weight.stored.clone(), weight.scale.contiguous(), weight.zero, format="int4", group=G
    )
    for found in (awq.written(weight), awq.written(copied)):
        for own, other in zip(found, (qweight, qzeros, scales), strict=True):
            assert torch.equal(own, other)
            assert own.is_contiguous()
    with pytest.raises(ValueError, match="qweight must be int32"):
        Quantized.from_awq(qweight.long(), qzeros, scales, group=G)
    with pytest.raises(ValueError, match="qzeros must be int32"):
        Quantized.from_awq(qweight, qzeros[1:], scales, group=G)
    for wrong in (scales[1:], scales[:, 1:], scales.t()):
        with pytest.raises(ValueError, match=rf"scales must have shape \({K // G}, {N}\), got"):
            Quantized.from_awq(qweight, qzeros, wrong, group=G)


@pytest.mark.parametrize("symmetric", [False, True])
def test_compressed_tensors(symmetric: bool) -> None:
    codes, zero, scale, values = drawn(symmetric)
    packed = torch.tensor(
        [[word(codes[n, 8 * i : 8 * i + 8].tolist()) for i in range(K // 8)] for n in range(N)],
        dtype=torch.int32,
    )
    zeros = torch.tensor(
        [[word(zero[8 * j : 8 * j + 8, g].tolist()) for g in range(K // G)] for j in range(N // 8)],
        dtype=torch.int32,
    )
    weight = Quantized.from_compressed(packed, scale, None if symmetric else zeros)
    check(weight, values)
    assert weight.stored.data_ptr() == packed.data_ptr()
    assert (weight.zero is None) is symmetric


def test_hqq() -> None:
    codes, zero, scale, _ = drawn(False)
    floating = zero.half() + 0.25
    values = codes.unflatten(-1, (-1, G)).double() - floating.double()[..., None]
    values = (values * scale.double()[..., None]).flatten(-2)
    groups = codes.reshape(-1, G)
    half = len(groups) // 2
    w_q = (groups[:half] << 4 | groups[half:]).to(torch.uint8)
    meta: dict[str, Any] = {
        "nbits": 4, "group_size": G, "shape": torch.Size((N, K)), "axis": 1, "packing": "4bit_u8",
        "scale": scale.reshape(-1, 1), "zero": floating.reshape(-1, 1),
    }  # fmt: skip
    check(Quantized.from_hqq(w_q, meta), values)
    for change in ({"nbits": 3}, {"axis": 0}, {"packing": "4bit_u32"}):
        with pytest.raises(ValueError, match="4 bits"):
            Quantized.from_hqq(w_q, {**meta, **change})
    with pytest.raises(ValueError, match="not quantised"):
        Quantized.from_hqq(w_q, {**meta, "quant_scale": True})
    for name in ("nbits", "group_size", "shape", "scale", "zero"):
        with pytest.raises(ValueError, match=f"lacks {name}$"):
            Quantized.from_hqq(w_q, {key: value for key, value in meta.items() if key != name})
    for name in ("axis", "packing"):  # older files lack them
        check(Quantized.from_hqq(w_q, {k: v for k, v in meta.items() if k != name}), values)
    for name in ("scale", "zero"):
        wrong = {**meta, name: meta[name][1:]}
        with pytest.raises(ValueError, match=f"{name} must have one number per group"):
            Quantized.from_hqq(w_q, wrong)
    for wrong in (w_q[1:], w_q.to(torch.int8)):
        with pytest.raises(ValueError, match=r"W_q must be uint8 of \d+ × \d+ numbers"):
            Quantized.from_hqq(wrong, meta)
    with pytest.raises(ValueError, match="in groups of 7; got"):
        Quantized.from_hqq(w_q, {**meta, "group_size": 7})


def test_hqq_without_groups() -> None:
    """A row is one group where the size of groups is None."""
    codes = torch.randint(0, 16, (4, K))
    scale, zero = torch.rand(4, 1) + 0.5, torch.rand(4, 1) * 15
    w_q = (codes[:2] << 4 | codes[2:]).to(torch.uint8)
    meta = {"nbits": 4, "group_size": None, "shape": (4, K), "scale": scale, "zero": zero}
    check(Quantized.from_hqq(w_q, meta), (codes.double() - zero.double()) * scale.double())


def test_block_scaled_fp8() -> None:
    stored = torch.randn(200, K).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2) + 0.5
    each = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    for given in (scale, scale.to(BF16).float()):
        own = given.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
        check(Quantized.from_fp8(stored, given), stored.double() * own.double())
    assert Quantized.from_fp8(stored, scale).stored.data_ptr() == stored.data_ptr()
    exponents = torch.tensor([[126, 127], [128, 120]], dtype=torch.uint8)
    powers = torch.exp2(exponents.double() - 127)
    each = powers.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    check(Quantized.from_fp8(stored, exponents), stored.double() * each)
    one = torch.tensor(0.5)
    check(Quantized.from_fp8(stored, one, None), stored.double() * 0.5)
    check(Quantized.from_fp8(stored, one), stored.double() * 0.5)


def test_experts_of_gpt_oss() -> None:
    blocks = torch.randint(0, 256, (3, N, K // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, N, K // 32), dtype=torch.uint8)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat((table, -table))
    low, high = table[(blocks & 15).long()], table[(blocks >> 4).long()]
    values = torch.stack((low, high), -1).flatten(-2) * torch.exp2(scales.double() - 127)[..., None]
    weight = Quantized.from_mxfp4(blocks, scales)
    assert weight.stored.data_ptr() == blocks.data_ptr()
    check(weight, values.flatten(-2))
    x, offs = torch.randn(6, K, dtype=BF16), torch.tensor([1, 4, 6], dtype=torch.int32)
    each = [
        x[s:e].double() @ v.T
        for s, e, v in zip((0, 1, 4), (1, 4, 6), values.flatten(-2), strict=True)
    ]
    close(tmm_core.grouped_linear(x, weight, offs=offs), torch.cat(each))
    with pytest.raises(ValueError, match="blocks must be"):
        Quantized.from_mxfp4(blocks.flatten(-2), scales)


@pytest.mark.parametrize(("n", "words"), [(8, 1), (9, 2), (17, 3)])
def test_the_last_word_of_compressed_zero_points_is_padded(n: int, words: int) -> None:
    packed = torch.zeros(n, 8, dtype=torch.int32)
    zeros = torch.full((words, 2), 0x77777777, dtype=torch.int32)
    weight = Quantized.from_compressed(packed, torch.ones(n, 2), zeros)
    assert weight.zero is not None
    assert weight.zero.shape == (n, 2)
    assert weight.dequantize().unique().tolist() == [-7.0]
    with pytest.raises(ValueError, match="weight_zero_point must be int32 of shape"):
        Quantized.from_compressed(packed, torch.ones(n, 2), zeros[:0])
