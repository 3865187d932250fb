"""``triton.streaming`` on a GPU: every config, format, epilogue and odd shape against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from tmm_triton.streaming import Streaming

import tmm_core
from tmm_core import Quantized, formats

pytestmark = pytest.mark.gpu
Tensor = torch.Tensor

KERNEL = "triton.streaming"


def weight(
    form: str, n: int, k: int, group: int | None, dtype: torch.dtype, *, zeros: bool = False
) -> tuple[Quantized, Tensor]:
    """A random weight, and its values in fp64."""
    shape = (n, 1) if group is None else (n, k // group)
    scale = (torch.rand(shape, device="cuda") + 0.5).to(dtype)
    zero = None
    if form == "int4":
        codes = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
        values = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).double()
        zero = torch.randint(0, 16, shape, device="cuda").to(dtype) if zeros else None
        values -= 8 if zero is None else zero.double().repeat_interleave(k // shape[1], 1)
    elif form == "int8":
        codes = torch.randint(-128, 128, (n, k), device="cuda", dtype=torch.int8)
        values = codes.double()
    else:
        codes = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
        values, scale = codes.double(), scale.float()
    values *= scale.double().repeat_interleave(k // shape[1], 1)
    return Quantized(codes, scale, zero, format=form, group=group), values


def close(found: Tensor, expected: Tensor, size: Tensor | float = 0.0) -> None:
    """Compare with fp64, relative to the result plus its rms plus ``size``."""
    size = size + expected.abs() + expected.square().mean().sqrt()
    error = (found.double() - expected).abs() / size
    assert error.max() < 1.2e-2, float(error.max())


def linear(x: Tensor, w: Quantized, kernel: str = KERNEL, **how: Any) -> Tensor:
    with torch.no_grad():
        return tmm_core.linear(x, w, kernel=kernel, **how)


def check_bias_and_silu(
    weight: tuple[Quantized, Tensor], m: int, dtype: torch.dtype, kernel: str = KERNEL
) -> None:
    """Compare the kernel's product of random rows and a weight with fp64."""
    w, values = weight
    n, k = values.shape
    x = torch.randn(m, k, device="cuda", dtype=dtype) / k**0.5
    bias = torch.randn(n, device="cuda", dtype=dtype)
    close(
        linear(x, w, kernel, bias=bias, epilogue="silu"),
        torch.nn.functional.silu(x.double() @ values.T + bias.double()),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 512), (7, 1000, 1152), (16, 333, 4096)])
@pytest.mark.parametrize(
    ("form", "group", "zeros"),
    [
        ("int4", 128, False), ("int4", 128, True), ("int4", None, False),
        ("int8", None, False), ("int8", 128, False), ("fp8", None, False),
    ],
)  # fmt: skip
def test_formats(
    form: str, group: int | None, zeros: bool, m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    check_bias_and_silu(weight(form, n, k, group, dtype, zeros=zeros), m, dtype)


@pytest.mark.parametrize("m", [1, 13])
def test_gate_and_residual(m: int) -> None:
    w, values = weight("int4", 2 * 264, 1024, 128, torch.bfloat16)
    x = torch.randn(m, 1024, device="cuda", dtype=torch.bfloat16) / 32
    residual = torch.randn(m, 264, device="cuda", dtype=torch.bfloat16)
    gate, up = (x.double() @ values.T).chunk(2, dim=-1)
    close(
        linear(x, w, epilogue="swiglu", residual=residual),
        torch.nn.functional.silu(gate) * up + residual.double(),
    )


@pytest.mark.parametrize("k", [2048, 2304])
@pytest.mark.parametrize("m", [3, 16])
def test_every_config_is_right_and_repeats_its_bits(m: int, k: int) -> None:
    w, values = weight("int4", 520, k, 128, torch.bfloat16)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16) / 48
    expected = x.double() @ values.T
    plan = tmm_core.plan(x, w.t(), kernel=KERNEL)
    configs = Streaming().configs(plan.problem)
    assert len(configs) > 4
    for config in configs:
        y, again = (linear(x, w, config=config.to_json()) for _ in range(2))
        close(y, expected)
        assert y.equal(again)


def test_scales_of_other_strides_are_read_in_place() -> None:
    w, values = weight("int4", 256, 1024, 128, torch.bfloat16)
    across = w.scale.t().contiguous().t()  # [N, K / 128] whose columns are contiguous
    w = Quantized(w.stored, across, format="int4", group=128)
    x = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16) / 32
    close(linear(x, w), x.double() @ values.T)


def test_nan_and_infinite_scales_reach_only_their_columns() -> None:
    w, values = weight("int4", 64, 1024, 128, torch.bfloat16)
    w.scale[3, 2], w.scale[5, 0] = torch.nan, torch.inf
    x = torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16) / 32
    y, expected = linear(x, w), x.double() @ values.T
    assert y[:, 3].isnan().all()
    assert not y[:, 5].isfinite().any()
    kept = [i for i in range(64) if i not in (3, 5)]
    close(y[:, kept], expected[:, kept])


def test_reasons_against_it() -> None:
    x = torch.randn(17, 1024, device="cuda", dtype=torch.bfloat16)
    w, _ = weight("int4", 64, 1024, 128, torch.bfloat16)
    with pytest.raises(tmm_core.UnsupportedProblemError, match="16 rows at most"):
        linear(x, w)
    assert formats.named("int4").pack == 2
