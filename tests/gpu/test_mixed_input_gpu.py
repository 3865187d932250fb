"""``triton.mixed_input`` on a Hopper GPU: formats, scales, configs and odd shapes against fp64."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import test_streaming_gpu
from test_streaming_gpu import check_bias_and_silu, close, weight
from tmm_triton.packed.mixed_input import MixedInput
from tmm_triton.packed.mixed_input_config import Constants

import tmm_core
from tmm_core import Quantized

pytestmark = pytest.mark.gpu
Tensor = torch.Tensor
BF16 = torch.bfloat16

KERNEL = "triton.mixed_input"
linear = functools.partial(test_streaming_gpu.linear, kernel=KERNEL)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 512), (40, 1000, 1152), (300, 333, 2176)])
@pytest.mark.parametrize(
    ("form", "group", "zeros"),
    [
        ("int4", 128, False), ("int4", 128, True), ("int4", 64, False), ("int4", None, True),
        ("int8", None, False), ("int8", 128, False), ("fp8", None, False), ("fp8", 128, False),
    ],
)  # fmt: skip
def test_formats(
    form: str, group: int | None, zeros: bool, m: int, n: int, k: int, dtype: torch.dtype
) -> None:
    check_bias_and_silu(weight(form, n, k, group, dtype, zeros=zeros), m, dtype, KERNEL)


@pytest.mark.parametrize("m", [1, 70, 513])
def test_blocks_of_scales(m: int) -> None:
    n, k = 328, 1024
    codes = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.rand(3, k // 128, device="cuda") + 0.5
    values = codes.double() * scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    x = torch.randn(m, k, device="cuda", dtype=BF16) / 32
    close(linear(x, Quantized(codes, scale, format="fp8", block=(128, 128))), x.double() @ values.T)


def exponents(form: str, n: int, k: int) -> tuple[Quantized, Tensor]:
    """A random weight of a microscaling format, and its values in fp64."""
    scale = torch.randint(120, 134, (n, k // 32), device="cuda", dtype=torch.uint8)
    if form == "mxfp4":
        codes = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
        sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda", dtype=torch.float64)
        numbers = torch.cat((sizes, -sizes))
        values = numbers[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
    else:
        codes = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
        values = codes.double()
    values = values * 2.0 ** (scale.double() - 127).repeat_interleave(32, 1)
    return Quantized(codes, scale, format=form, group=32), values


@pytest.mark.parametrize("m", [1, 20, 64, 150, 300])
@pytest.mark.parametrize("k", [32, 512, 2880])
@pytest.mark.parametrize("form", ["mxfp4", "mxfp8", "int4"])
def test_groups_of_32(form: str, k: int, m: int) -> None:
    n = 328
    made = weight("int4", n, k, 32, BF16, zeros=True) if form == "int4" else exponents(form, n, k)
    w, values = made
    x = torch.randn(m, k, device="cuda", dtype=BF16) / k**0.5
    for config in MixedInput().configs(tmm_core.plan(x, w.t(), kernel=KERNEL).problem):
        close(linear(x, w, config=config.to_json()), x.double() @ values.T)


@pytest.mark.parametrize("m", [1, 40, 150, 300])
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_gate_and_residual(form: str, m: int) -> None:
    w, values = weight(form, 2 * 264, 1024, 128, BF16)
    x = torch.randn(m, 1024, device="cuda", dtype=BF16) / 32
    residual = torch.randn(264, m, device="cuda", dtype=BF16).t()
    gate, up = (x.double() @ values.T).chunk(2, dim=-1)
    close(
        linear(x, w, epilogue="swiglu", residual=residual),
        torch.nn.functional.silu(gate) * up + residual.double(),
    )


@pytest.mark.parametrize("m", [20, 90, 300])
@pytest.mark.parametrize("n", [264, 260, 258])
def test_layouts_of_the_result_and_the_residual(n: int, m: int) -> None:
    w, values = weight("int4", n, 1024, 128, BF16)
    x = torch.randn(m, 1024, device="cuda", dtype=BF16) / 32
    wide = torch.randn(m, 288, device="cuda", dtype=BF16)
    residuals = (
        None, wide[:, :n], wide[:, 8 : n + 8], wide[:, 1 : n + 1], wide[:1, :n].expand(m, n),
        wide[:, :n].float(), wide[:, :n].t().contiguous().t(),
    )  # fmt: skip
    for start, residual in itertools.product((0, 8, 1), residuals):
        around = torch.full((m, 288), torch.nan, device="cuda", dtype=BF16)
        out = around[:, start : start + n]
        linear(x, w, out=out, residual=residual)
        expected = x.double() @ values.T
        close(out, expected if residual is None else expected + residual.double())
        assert around.isnan().sum() == m * (288 - n)


@pytest.mark.parametrize("m", [3, 30, 64, 72, 100, 150, 600])
@pytest.mark.parametrize("k", [1024, 1152, 1216])
def test_every_config_is_right_and_repeats_its_bits(m: int, k: int) -> None:
    w, values = weight("int4", 520, k, 64, BF16)
    x = torch.randn(m, k, device="cuda", dtype=BF16) / k**0.5
    expected = x.double() @ values.T
    plan = tmm_core.plan(x, w.t(), kernel=KERNEL)
    configs = MixedInput().configs(plan.problem)
    assert configs
    for config in configs:
        out = torch.full((m, 520), torch.nan, device="cuda", dtype=BF16)
        y, again = (linear(x, w, config=config.to_json(), out=out).clone() for _ in range(2))
        close(y, expected)
        assert y.equal(again)


@pytest.mark.parametrize(("m", "n"), [(64, 9608), (70, 20488), (150, 17000), (300, 17000)])
@pytest.mark.parametrize("epilogue", [None, "swiglu"])
def test_blocks_share_the_last_tiles(m: int, n: int, epilogue: str | None) -> None:
    """Streams that run at the same time have their own flags."""
    width, k = n * (2 if epilogue else 1), 1152
    w, values = weight("int4", width, k, 64, BF16)
    x = torch.randn(m, k, device="cuda", dtype=BF16) / k**0.5

    def expected(values: Tensor) -> Tensor:
        sums = x.double() @ values.T
        if epilogue is None:
            return sums
        gate, up = sums.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    exact, rounded = expected(values), expected(w.dequantize().double())
    plan = tmm_core.plan(x, w.t(), kernel=KERNEL, epilogue=epilogue)
    shared = [config for config in MixedInput().configs(plan.problem) if config.stream_k]
    assert shared
    other = torch.cuda.Stream()
    for config in shared:
        call = functools.partial(linear, x, w, config=config.to_json(), epilogue=epilogue)
        y = call()
        scaled = Constants.of(plan.problem, config).SCALED
        close(y, exact if scaled is None else rounded)
        other.wait_stream(torch.cuda.current_stream())
        for _ in range(20):
            with torch.cuda.stream(other):
                beside = call()
            again = call()
        torch.cuda.synchronize()
        assert y.equal(again)
        assert y.equal(beside)


@pytest.mark.parametrize("form", ["int4", "fp8", "mxfp4"])
@pytest.mark.parametrize("epilogue", [None, "swiglu"])
def test_groups_of_rows(form: str, epilogue: str | None) -> None:
    groups, n, k = 5, 264, 512
    width = 2 * n if epilogue else n
    made = [
        exponents(form, width, k) if form == "mxfp4" else weight(form, width, k, 128, BF16)
        for _ in range(groups)
    ]
    stored, scale = (
        torch.stack([getattr(w, name) for w, _ in made]) for name in ("stored", "scale")
    )
    w = Quantized(stored, scale, format=form, group=32 if form == "mxfp4" else 128)
    ends = torch.tensor([3, 3, 40, 171, 180], device="cuda", dtype=torch.int32)
    x = torch.randn(187, k, device="cuda", dtype=BF16) / k**0.5
    turned = x.flip(0)
    backwards = torch.arange(187, device="cuda").flip(0)
    with torch.no_grad():
        y = tmm_core.grouped_matmul(x, w.mT, offs=ends, epilogue=epilogue, kernel=KERNEL)
        gathered = tmm_core.grouped_matmul(x, w.mT, offs=ends, a_index=backwards, epilogue=epilogue)
        z = tmm_core.grouped_matmul(turned, w.mT, offs=ends, epilogue=epilogue)
        scattered = tmm_core.grouped_matmul(
            x, w.mT, offs=ends, out_index=backwards, epilogue=epilogue, kernel=KERNEL
        ).flip(0)
    start = 0
    for (_, values), end in zip(made, ends.tolist(), strict=True):
        for rows, results in ((x, (y, scattered)), (turned, (gathered, z))):
            expected, size = rows[start:end].double() @ values.T, 0.0
            if epilogue:
                gate, up = expected.chunk(2, dim=-1)
                gate = torch.nn.functional.silu(gate)
                expected = gate * up
                size = gate.abs() * up.square().mean().sqrt()  # the error of up, times the gate
            for result in results:
                if end > start:
                    close(result[start:end], expected, size)
        start = end


def test_nan_and_infinite_scales_reach_their_columns_only() -> None:
    w, values = weight("int4", 64, 1024, 128, BF16)
    w.scale[3, 2], w.scale[5, 0] = torch.nan, torch.inf
    for m in (40, 300):
        x = torch.randn(m, 1024, device="cuda", dtype=BF16) / 32
        y, expected = linear(x, w), x.double() @ values.T
        assert y[:, 3].isnan().all()
        assert not y[:, 5].isfinite().any()
        kept = [i for i in range(64) if i not in (3, 5)]
        close(y[:, kept], expected[:, kept])


def test_batch_invariant_mode_gives_a_row_the_same_bits() -> None:
    w, _ = weight("int4", 520, 1024, 128, BF16)
    x = torch.randn(200, 1024, device="cuda", dtype=BF16) / 32
    with tmm_core.override(batch_invariant=True):
        whole = linear(x, w)
        for rows in (1, 17, 64, 130):
            assert linear(x[:rows], w).equal(whole[:rows])
