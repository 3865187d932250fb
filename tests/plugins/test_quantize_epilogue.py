"""Products that round their result to 8-bit floats for the next one. Checks the kernel, interpreted
and compiled for Hopper, BLAS, and the chain of two products."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from fakes import FakeKernel
from test_triton_compile import MOST_STACK
from tmm_triton.plugin import load
from tmm_triton.tile_anatomy import usage
from tmm_triton.tiled import FusedEpilogue, FusedEpilogueConfig, Grouped, GroupedConfig
from uninterpreted import Uninterpreted

import tmm_core
from tmm_core import ConfigError, Operand, Port, Problem, Quantized, Scale, quantize, quantize_rows
from tmm_core.epilogues import EPILOGUES, parse
from tmm_core.spec.device import DeviceFingerprint, fingerprint
from tmm_core.spec.supports import Supports
from tmm_core.triton import target_of
from tmm_core.verify.auxiliary_outputs import half_step
from tmm_core.verify.verifier import Verifier

Tensor = torch.Tensor
CPU, FP32, BF16, FP8 = torch.device("cpu"), torch.float32, torch.bfloat16, torch.float8_e4m3fn
QUANTIZE = EPILOGUES["quantize"]
STORED, SCALE = QUANTIZE.outputs
HOPPER = DeviceFingerprint("cuda", "H200", (9, 0), 132, 232448)
TILE = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 16, "num_stages": 2, "num_warps": 4}


def total(groups: Tensor) -> Tensor:
    return groups.sum(-1)


def device_total(groups):  # type: ignore[no-untyped-def]  # in Triton's language
    return tl.sum(groups, axis=2)  # noqa: F821


def in_groups(size: int) -> tuple[Port, ...]:
    return tuple(replace(port, group=size) for port in QUANTIZE.outputs)


def same(found: tuple[Tensor, Tensor], right: Quantized) -> None:
    for one, other in zip(found, (right.stored, right.scale), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        bits = torch.uint8 if one.dtype is FP8 else torch.int32
        numbers = ~other.float().isnan()
        assert torch.equal(one.float().isnan(), ~numbers)
        assert torch.equal(one.view(bits)[numbers], other.view(bits)[numbers])


def problem_of(text: str, outputs: tuple[Port, ...], **fields: Any) -> Problem:
    given: dict[str, Any] = dict.fromkeys(("a", "b", "out"), Operand(FP32))
    given |= {"device": fingerprint(CPU), "epilogue": replace(parse(text), outputs=outputs)}
    return Problem(37, 72, 24, **{**given, **fields})


# -- the kernel, interpreted -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "config", "text", "outputs"),
    [
        (Grouped(), GroupedConfig(**TILE, GROUP_M=3), "silu", in_groups(16)),
        (Grouped(), GroupedConfig(**TILE, GROUP_M=2), "identity", in_groups(64)[::-1]),
        (FusedEpilogue(), FusedEpilogueConfig(**TILE, GROUP_M=3, SUBTILE=2), "swiglu",
         in_groups(32)),
        (FusedEpilogue(), FusedEpilogueConfig(**TILE, GROUP_M=3, SUBTILE=1), "gelu",
         (Port("sum", "group", of=total, device=device_total, group=32),
          Port("row", "row", reduce="max"))),
    ],
    ids=("groups", "a-tile-is-a-group", "gated-halves", "sums"),
)  # fmt: skip
@pytest.mark.slow
def test_tiles_have_groups(kernel: Any, config: Any, text: str, outputs: Any) -> None:
    problem = problem_of(text, outputs, bias=FP32, residual=Operand(FP32), scaled=True)
    assert not kernel.reasons_against(problem)
    verdict = Verifier(problem, CPU).verdict(kernel.bind(problem, config))
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize("kernel", ["triton.grouped", "triton.fused_epilogue"])
@pytest.mark.parametrize("n", [72, 300])
def test_calls_give_the_result_of_quantize_rows(kernel: str, n: int) -> None:
    gated = kernel == "triton.fused_epilogue"
    a, b = torch.randn(2, 9, 40), torch.randn(40, 2 * n if gated else n)
    a[1, 3] *= 1e-3
    a[0, 4] = 0.0
    text = "swiglu+quantize" if gated else "silu+quantize"
    y, *found = tmm_core.matmul(a, b, epilogue=text, kernel=kernel)
    torch.testing.assert_close(y, parse(text[:-9]).apply(a @ b), rtol=1e-4, atol=1e-4)
    same(tuple(found), quantize_rows(y, group=128))
    assert found[1].stride()[-2:] == (1, 18)  # as scaled_mm reads scales


def test_nan_and_inf_make_their_group_nan() -> None:
    a, b = torch.ones(5, 24), torch.randn(24, 300)
    a[1, 3], b[7, 130] = math.nan, math.inf
    y, stored, scale = tmm_core.matmul(a, b, epilogue="quantize", kernel="triton.grouped")
    assert scale.isnan().tolist() == [[False, True, False], [True] * 3, *[[False, True, False]] * 3]
    same((stored, scale), quantize_rows(y, group=128))


def test_configs_have_whole_groups() -> None:
    half = dict.fromkeys(("a", "b", "out"), Operand(BF16))
    for kernel, text in (
        (Grouped(), "silu"),
        (FusedEpilogue(), "silu"),
        (FusedEpilogue(), "swiglu"),
    ):
        for m in (1, 16, 4096):
            epilogue = parse(text).then(QUANTIZE)
            problem = Problem(m, 4096, 4096, device=HOPPER, epilogue=epilogue, **half)
            configs = kernel.configs(problem)
            assert configs
            assert all(config.BLOCK_N // config.parts % 128 == 0 for config in configs)
            assert kernel.workspace_bytes(problem, configs[0]) == 0
            older = replace(problem, device=replace(HOPPER, capability=(8, 9)))
            assert "rounds to 8 bits by way of fp16 before Hopper" in kernel.reasons_against(older)
    problem = problem_of("silu", QUANTIZE.outputs)
    with pytest.raises(ConfigError, match="parts of groups"):
        Grouped().bind(problem, GroupedConfig(**TILE, GROUP_M=1))


def test_strips_of_the_hopper_kernel_have_whole_groups() -> None:
    kernel: Any = load("triton.warp_specialized")
    half = dict.fromkeys(("a", "b", "out"), Operand(BF16))
    problem = Problem(4096, 4096, 4096, device=HOPPER, epilogue=QUANTIZE, **half)
    for text in ("silu", "swiglu"):
        for m in (1, 16, 4096):
            instance = replace(problem, m=m, epilogue=parse(text).then(QUANTIZE))
            assert not kernel.reasons_against(instance)
            configs = kernel.configs(instance)
            assert configs
            assert all(config.BLOCK_N // config.subtiles % 128 == 0 for config in configs)
            assert all(config.shared_memory(instance) <= HOPPER.shared_memory for config in configs)
    narrow = replace(kernel.default_config(problem), BLOCK_N=128, subtiles=2)
    with pytest.raises(ValueError, match="parts of groups of 128 columns"):
        kernel.builds(problem, narrow)

    def declined(n: int, *outputs: Port) -> str:
        reason, *_ = kernel.declines(
            replace(problem, n=n, epilogue=replace(QUANTIZE, outputs=outputs))
        )
        return str(reason)

    row, twice = Port("row", "row", reduce="max"), replace(SCALE, name="twice", group=64)
    assert "where rows of out are not multiples of 16 bytes" in declined(4092, *QUANTIZE.outputs)
    assert "writes one auxiliary output, or two with groups" in declined(4096, row, SCALE)
    assert "writes one auxiliary output, or two with groups" in declined(4096, STORED, SCALE, twice)
    assert "no output plain (tile) without groups" in declined(4096, Port("plain", "tile"))
    assert "groups of one size, of at most 128" in declined(4096, STORED, twice)
    assert "groups of one size, of at most 128" in declined(4096, replace(SCALE, group=256))


def strips(config: Any) -> int:
    found: int = config.subtiles if hasattr(config, "subtiles") else config.parts
    return found


def compiled(name: str, text: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Each proposed tile of a kernel, compiled for Hopper."""
    kernel: Any = load(name)
    block = Scale.parse("1x128") if dtype is FP8 else None
    of_a, of_b = Operand(dtype, scale=block), Operand(dtype, "col", scale=block)
    epilogue = parse(text).then(QUANTIZE)
    problem = Problem(4096, 4096, 1024, of_a, of_b, Operand(BF16), HOPPER, epilogue=epilogue)
    lines = {}
    for config in kernel.configs(problem):
        (build,) = kernel.builds(problem, config)
        tile = config.BLOCK_M, config.BLOCK_N, strips(config)
        if tile not in lines:
            result = build.compile_for(target_of(HOPPER))
            used, ptx = usage(result.asm["cubin"]), result.asm["ptx"]
            lines[tile] = {
                "tile": tile,
                "shared": result.metadata.shared,
                "spilled": used["STACK"] + used["LOCAL"],
                "rounds": "cvt.rn.satfinite.e4m3x2.f32" in ptx,
                "multiplies": "wgmma.mma_async" in ptx,
            }
    return list(lines.values())


@pytest.mark.parametrize(
    ("name", "text", "dtype"),
    [
        *itertools.product(["triton.grouped"], ["silu"], [BF16, FP8]),
        *itertools.product(["triton.fused_epilogue"], ["swiglu"], [BF16, FP8]),
        ("triton.warp_specialized", "silu", BF16),
        ("triton.warp_specialized", "swiglu", FP8),
    ],
)
@pytest.mark.slow
def test_it_compiles_for_hopper(
    name: str, text: str, dtype: torch.dtype, uninterpreted: Uninterpreted
) -> None:
    lines = uninterpreted(compiled, name, text, dtype)
    assert lines
    for line in lines:
        assert line["rounds"], line
        assert line["multiplies"] is (line["tile"][0] >= 64), line
        assert line["spilled"] <= MOST_STACK, line
        assert line["shared"] <= HOPPER.shared_memory, line


# -- what is verified ------------------------------------------------------------------------------


class Spoilt(FakeKernel):
    """BLAS with outputs that it spoils."""

    def __init__(self, spoil: Any) -> None:
        super().__init__("fake.spoilt")
        self._spoil = spoil

    def bind(self, problem: Problem, config: Any) -> Any:
        blas: Any = tmm_core.dispatch.default_dispatcher().registry.kernel("blas")
        launch = blas.bind(problem, blas.default_config(problem))

        def run(*given: Any, outputs: tuple[Tensor, ...]) -> Tensor:
            y: Tensor = launch(*given, outputs=outputs)
            self._spoil(y, *outputs)
            return y

        return run


def _truncates(y: Tensor, stored: Tensor, scale: Tensor) -> None:
    exact = y.double() / scale.double().repeat_interleave(128, 1)[:, : y.shape[1]]
    away = stored.double().abs() > exact.abs()
    bits = stored.view(torch.uint8)
    bits[away] -= 1


def _divides_by_another(y: Tensor, stored: Tensor, scale: Tensor) -> None:
    exact = y / scale.repeat_interleave(128, 1)[:, : y.shape[1]]
    stored.copy_((exact * 1.02).clamp(-448, 448))


def _takes_the_group_before(y: Tensor, stored: Tensor, scale: Tensor) -> None:
    scale.copy_(scale.roll(1, 1))


def _drops_a_column(y: Tensor, stored: Tensor, scale: Tensor) -> None:
    stored[:, -1] = 0.0


def _keeps_numbers_beside_nan(y: Tensor, stored: Tensor, scale: Tensor) -> None:
    numbers = y.isfinite() & stored.float().isnan()
    stored.copy_(torch.where(numbers, 1.0, stored.float()))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda *_: None, ""),
        (_truncates, "output stored"),
        (_divides_by_another, "output stored"),
        (_takes_the_group_before, "output scale"),
        (_drops_a_column, "output stored"),
        (_keeps_numbers_beside_nan, "output stored .* is not NaN"),
        (lambda y, stored, scale: scale.mul_(1.05), "output scale"),
    ],
)
def test_wrong_outputs_are_found(spoil: Any, message: str) -> None:
    given: dict[str, Any] = dict.fromkeys(("a", "b", "out"), Operand(FP32))
    problem = Problem(40, 300, 64, device=fingerprint(CPU), epilogue=QUANTIZE, **given)
    verdict = Verifier(problem, CPU).verdict(Spoilt(spoil).bind(problem, None))
    assert verdict.ok == (not message)
    assert re.search(message, verdict.reason or "")


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_half_a_step_is_the_error_of_rounding(dtype: torch.dtype) -> None:
    every = torch.arange(127 if dtype is FP8 else 123, dtype=torch.uint8).view(dtype)
    numbers = every.double()
    step = half_step(every).double()
    assert torch.equal(2 * step[:-1], numbers[1:] - numbers[:-1])


def test_kernels_without_groups_decline_tiles_that_have_them() -> None:
    problem = problem_of("silu", QUANTIZE.outputs)
    able = Supports.everything()
    assert not able.reasons_against(problem)
    message = replace(able, outputs=("tile",)).reasons_against(problem)
    assert message == ["writes no output stored (tile)", "writes no output scale (group)"]


# -- calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("n", [128, 300, 1, 0])
def test_blas_gives_the_result_of_quantize_rows(dtype: torch.dtype, n: int) -> None:
    a, b = torch.randn(3, 7, 24).to(dtype), torch.randn(24, n).to(dtype)
    y, *found = tmm_core.matmul(a, b, epilogue="gelu+quantize", kernel="blas")
    same(tuple(found), quantize_rows(y, group=128))
    by_references = [port.apply(y) for port in QUANTIZE.outputs]
    same(tuple(by_references), quantize_rows(y, group=128))


def two_products(x: Tensor, w: Tensor, w8: Quantized) -> Tensor:
    _, stored, scale = tmm_core.linear(x, w, epilogue="silu+quantize")
    return tmm_core.linear(Quantized(stored, scale, format="fp8", group=128), w8)


@pytest.mark.parametrize("kernel", ["blas", "triton.grouped"])
def test_the_next_product_takes_the_quantised_result(kernel: str) -> None:
    x, w = torch.randn(6, 40), torch.randn(256, 40)
    w8 = quantize(torch.randn(96, 256), "fp8", block=(128, 128))
    with tmm_core.override(kernel=kernel):
        y = tmm_core.linear(x, w, epilogue="silu")
        expected = tmm_core.linear(quantize_rows(y, group=128), w8)
        found = two_products(x, w, w8)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    exact = F.silu(x.double() @ w.double().t()) @ w8.dequantize().double().t()
    # Rounding changes each of 256 terms by up to 1/16, and the rms of a sum by about 1/50.
    error = (found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.04


@pytest.mark.slow
def test_it_compiles_and_is_an_operator() -> None:
    x, w = torch.randn(2, 3, 40), torch.randn(256, 40)
    w8 = quantize(torch.randn(96, 256), "fp8", block=(128, 128))
    compiled = torch.compile(two_products, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 5):
        x = torch.randn(2, rows, 40)
        torch.testing.assert_close(compiled(x, w, w8), two_products(x, w, w8))
    call = (x, w.t(), None, None, 1.0, parse("silu").then(QUANTIZE).interned())
    torch.library.opcheck(torch.ops.tmm.matmul_outputs.default, call)
    scale = tmm_core.matmul(x.to("meta"), w.t().to("meta"), epilogue="quantize")[2]
    assert (scale.shape, scale.stride()) == ((2, 5, 2), (5, 1, 10))


def test_only_the_result_has_a_gradient() -> None:
    x, w = torch.randn(6, 40, requires_grad=True), torch.randn(40, 256)
    y, stored, scale = tmm_core.matmul(x, w, epilogue="silu+quantize")
    assert not any(t.requires_grad for t in (stored, scale))
    same((stored, scale), quantize_rows(y.detach(), group=128))
    (found,) = torch.autograd.grad(y.sum(), x)
    (exact,) = torch.autograd.grad(F.silu(x @ w).sum(), x)
    torch.testing.assert_close(found, exact)


def test_explain_and_plans() -> None:
    x, w = torch.randn(6, 40), torch.randn(40, 256)
    assert "silu+quantize" in str(tmm_core.explain(x, w, epilogue="silu+quantize"))
    y, *found = tmm_core.plan(x, w, epilogue="silu+quantize")(x, w)
    same(tuple(found), quantize_rows(y, group=128))
    with pytest.raises(ValueError, match="outputs"):
        tmm_core.matmul(x, w, epilogue="quantize", out=torch.empty(6, 256))
    with pytest.raises(ValueError, match="outputs"):
        tmm_core.matmul(x, w.expand(6, 40, 256), epilogue="quantize")
