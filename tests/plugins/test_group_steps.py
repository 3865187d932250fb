"""Kernels that decode packed weights with scales for groups at each step of K, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tmm_core
from tmm_core import ConfigError, Quantized, formats

Tensor = torch.Tensor
KERNELS = ["triton.naive", "triton.grouped", "triton.split_k", "triton.fused_epilogue"]


def weight(form: str, shape: tuple[int, ...], group: int | None) -> tuple[Quantized, Tensor]:
    """A random weight and its values in fp64."""
    found = formats.named(form)
    *outer, k = shape
    grid = (*outer, k // group if group else 1)
    if form == "int8":
        codes = torch.randint(-127, 128, shape, dtype=torch.int8)
    else:
        codes = torch.randint(0, 256, (*outer, k // found.pack), dtype=torch.uint8)
    if form == "mxfp4":
        scale = torch.randint(120, 130, grid, dtype=torch.uint8)
        factor = torch.exp2(scale.double() - 127)
    else:
        scale = (torch.rand(grid) + 0.5).bfloat16()
        factor = scale.double()
    values = found.dequantize(found.unpacked(codes)).double()
    values *= factor.repeat_interleave(k // grid[-1], -1)
    return Quantized(codes, scale, format=form, group=group), values


def close(found: Tensor, expected: Tensor) -> None:
    error = (found.double() - expected).abs() / (expected.abs() + expected.square().mean().sqrt())
    assert error.max() < 1.2e-2, float(error.max())


def linear(x: Tensor, w: Quantized, **how: Any) -> Tensor:
    with torch.no_grad():
        return tmm_core.linear(x, w, **how)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("form", "group", "m", "n", "k"),
    [
        ("int4", 128, 5, 40, 256), ("int4", 32, 33, 65, 96), ("int4", None, 1, 33, 200),
        ("mxfp4", 32, 7, 50, 96), ("int8", 64, 5, 48, 192),
    ],
)  # fmt: skip
@pytest.mark.slow(quick=10)
def test_groups(kernel: str, form: str, group: int | None, m: int, n: int, k: int) -> None:
    w, values = weight(form, (n, k), group)
    x = torch.randn(m, k).bfloat16() / 16
    bias = torch.randn(n).bfloat16()
    y = linear(x, w, bias=bias, epilogue="relu", kernel=kernel)
    close(y, (x.double() @ values.T + bias.double()).relu())


def test_gated_groups() -> None:
    w, values = weight("int4", (2 * 24, 256), 128)
    x = torch.randn(9, 256).bfloat16() / 16
    gate, up = (x.double() @ values.T).chunk(2, dim=-1)
    y = linear(x, w, epilogue="swiglu", kernel="triton.fused_epilogue")
    close(y, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("form", ["int4", "mxfp4"])
@pytest.mark.slow
def test_experts(form: str) -> None:
    w, values = weight(form, (3, 48, 128), 32)
    x = torch.randn(20, 128).bfloat16() / 8
    offs = torch.tensor([3, 3, 20], dtype=torch.int32)
    with torch.no_grad():
        y = tmm_core.grouped_linear(x, w, offs=offs, kernel="triton.ragged")
    close(y, torch.cat([x[:3].double() @ values[0].T, x[3:].double() @ values[2].T]))


@pytest.mark.slow
def test_scales_may_have_any_strides() -> None:
    w, values = weight("int4", (40, 256), 64)
    across = Quantized(w.stored, w.scale.t().contiguous().t(), format="int4", group=64)
    x = torch.randn(5, 256).bfloat16() / 16
    for kernel in KERNELS:
        close(linear(x, across, kernel=kernel), x.double() @ values.T)


def test_exponents_at_their_limits() -> None:
    w, values = weight("mxfp4", (16, 64), 32)
    w.scale[0, 0], w.scale[1, 1] = 0, 255  # 2^-127, and NaN
    values = w.dequantize().double()
    x = torch.randn(4, 64).bfloat16()
    y = linear(x, w, kernel="triton.grouped")
    assert y[:, 1].isnan().all()
    kept = [0, *range(2, 16)]
    close(y[:, kept], x.double() @ values[kept].T)


def test_a_step_has_one_group() -> None:
    w, _ = weight("int4", (16, 64), 32)
    config = {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 64, "num_stages": 2, "num_warps": 4}
    with pytest.raises(ConfigError, match="several groups of 32"):
        linear(torch.randn(4, 64).bfloat16(), w, kernel="triton.naive", config=config)
