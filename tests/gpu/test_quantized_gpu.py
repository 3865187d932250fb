"""Quantised weights on a GPU, by every kernel that takes them, against fp64."""

from __future__ import annotations

import pytest
import torch

import tmm_core
from tmm_core import Quantized

pytestmark = pytest.mark.gpu
Tensor = torch.Tensor


def quantized(weight: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Quantized, Tensor]:
    """The weight in int8 with a scale for each row, and its values in fp64."""
    scale = (weight.float().abs().amax(-1, keepdim=True) / 127).to(dtype)
    codes = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return Quantized(codes, scale), codes.double() * scale.double()


def close(found: Tensor, expected: Tensor, roundings: int = 4) -> None:
    """Assert that the error, relative to a value plus the rms, is below this many roundings to
    bf16."""
    error = (found.double() - expected).abs() / (expected.abs() + expected.square().mean().sqrt())
    assert error.max() < roundings * 2**-8, float(error.max())


@pytest.mark.parametrize("kernel", ["naive", "grouped", "split_k", "fused_epilogue", None])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 512), (7, 1000, 1032), (300, 520, 776)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_weights(kernel: str | None, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    weight, values = quantized(torch.randn(n, k, device="cuda") / k**0.5, dtype)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    forced = None if kernel is None else f"triton.{kernel}"
    with torch.no_grad():
        y = tmm_core.linear(x, weight, bias, epilogue="silu", kernel=forced)
    close(y, torch.nn.functional.silu(x.double() @ values.T + bias.double()))


@pytest.mark.parametrize("kernel", ["triton.fused_epilogue", "blas"])
def test_gated_int8_weights(kernel: str) -> None:
    x = torch.randn(33, 520, device="cuda", dtype=torch.bfloat16)
    weight, values = quantized(torch.randn(2 * 264, 520, device="cuda") / 520**0.5)
    gate, up = (x.double() @ values.T).chunk(2, dim=-1)
    y = tmm_core.linear(x, weight, epilogue="swiglu", kernel=kernel)
    # BLAS rounds gate and up to bf16, and the result has the errors of both.
    close(y, torch.nn.functional.silu(gate) * up, roundings=8)


@pytest.mark.parametrize("kernel", ["triton.ragged", "blas"])
def test_grouped_int8_weights(kernel: str) -> None:
    x = torch.randn(96, 256, device="cuda", dtype=torch.bfloat16)
    weight, values = quantized(torch.randn(4, 128, 256, device="cuda") / 16)
    ends = [16, 16, 64, 96]
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    expected = torch.cat([
        x[start:end].double() @ values[group].T
        for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ])  # fmt: skip
    close(tmm_core.grouped_linear(x, weight, offs=offs, kernel=kernel), expected)
