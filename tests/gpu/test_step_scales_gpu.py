"""``triton.warp_specialized`` with scales of blocks on a Hopper GPU. Kinds of scales, configs,
groups and odd shapes are compared with fp64, in outputs between guard bands."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from test_streaming_gpu import close
from tmm_triton.hopper.warp_specialized import WarpSpecialized

import tmm_core
from tmm_core import Groups, Operand, Problem, Quantized, Scale
from tmm_core.epilogues import parse

pytestmark = pytest.mark.gpu
Tensor = torch.Tensor
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn

KERNEL = "triton.warp_specialized"


def scaled(*shape: int, block: tuple[int, int] | None) -> Any:
    """Random 8-bit floats with scales by block or row, and their values in fp64."""
    *lead, n, k = shape
    codes = (torch.randn(shape, device="cuda") / 4).to(E4M3)
    outer, group = block or (1, k)
    sizes = *lead, -(-n // outer), -(-k // group)
    scale = torch.rand(sizes, device="cuda") + 0.5
    factor = scale.double().repeat_interleave(outer, -2)[..., :n, :]
    values = codes.double() * factor.repeat_interleave(group, -1)[..., :k]
    if block is None:
        return Quantized(codes, scale, format="fp8"), values
    if block[0] == 1 and n % 2:
        scale = scale.mT.contiguous().mT  # as torch.nn.functional.scaled_mm has them
    return Quantized(codes, scale, format="fp8", block=block), values


def poisoned(m: int, n: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
    """An output of NaN, and all of the memory that it is a part of."""
    memory = torch.full((m + 2, n + 16), torch.nan, device="cuda", dtype=dtype)
    return memory[:m, :n], memory


def untouched(memory: Tensor, m: int, n: int) -> bool:
    return bool(memory[m:].isnan().all() and memory[:, n:].isnan().all())


GROUP, BLOCK = (1, 128), (128, 128)


@pytest.mark.parametrize("which", range(9))
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 256, 512), (64, 200, 1152), (300, 333, 2048), (130, 1024, 96)]
)
def test_odd_shapes(m: int, n: int, k: int, which: int) -> None:
    (a, x), (b, w) = scaled(m, k, block=GROUP), scaled(n, k, block=BLOCK)
    problem = tmm_core.plan(a, b.t(), kernel=KERNEL).problem
    configs = list(WarpSpecialized().configs(problem))
    out, memory = poisoned(m, n)
    config = configs[which % len(configs)].to_json()
    with torch.no_grad():
        tmm_core.linear(a, b, out=out, kernel=KERNEL, config=config)
    close(out, x @ w.T)
    assert untouched(memory, m, n)


@pytest.mark.parametrize(
    "blocks", [(GROUP, GROUP), (GROUP, BLOCK), (GROUP, None), (None, BLOCK), (None, GROUP)], ids=str
)
def test_kinds_of_scales(blocks: Any) -> None:
    m, n, k = 261, 392, 1280
    a, x = scaled(m, k, block=blocks[0])
    b, w = scaled(n, k, block=blocks[1])
    with torch.no_grad():
        found = tmm_core.linear(a, b, kernel=KERNEL)
    close(found, x @ w.T)


@pytest.mark.parametrize("width", [200, 256])
@pytest.mark.parametrize("extras", [False, True])
def test_gated(extras: bool, width: int) -> None:
    m, k = 150, 1024
    (a, x), (b, w) = scaled(m, k, block=GROUP), scaled(2 * width, k, block=BLOCK)
    bias = torch.randn(2 * width, device="cuda", dtype=BF16) if extras else None
    residual = torch.randn(m, width, device="cuda", dtype=BF16) if extras else None
    with torch.no_grad():
        found = tmm_core.linear(a, b, bias, residual=residual, epilogue="swiglu", kernel=KERNEL)
    z = x @ w.T + (0 if bias is None else bias.double())
    expected = torch.nn.functional.silu(z[:, :width]) * z[:, width:]
    close(found, expected + (0 if residual is None else residual.double()))


@pytest.mark.parametrize("parts", [{"splits": 3}, {"tail_splits": 2}], ids=str)
def test_parts_of_k(parts: dict[str, int]) -> None:
    m, n, k = 100, 512, 7168
    (a, x), (b, w) = scaled(m, k, block=GROUP), scaled(n, k, block=BLOCK)
    problem = tmm_core.plan(a, b.t(), kernel=KERNEL).problem
    config = WarpSpecialized().default_config(problem)
    with torch.no_grad():
        given = {**config.to_json(), "early": "", "splits": 1, "tail_splits": 1, **parts}
        found = [tmm_core.linear(a, b, kernel=KERNEL, config=given) for _ in range(2)]
    close(found[0], x @ w.T)
    assert torch.equal(*found)


@pytest.mark.parametrize("which", range(6))
def test_batch(which: int) -> None:
    (a, x), (b, w) = scaled(3, 70, 640, block=GROUP), scaled(3, 136, 640, block=BLOCK)
    problem = tmm_core.plan(a, b.mT, kernel=KERNEL).problem
    configs = list(WarpSpecialized().configs(problem))
    config = configs[which % len(configs)].to_json()
    with torch.no_grad():
        close(tmm_core.matmul(a, b.mT, kernel=KERNEL, config=config), x @ w.mT)


@pytest.mark.parametrize("sizes", [(0, 5, 0, 300, 64, 1, 0), (700, 0, 0, 3, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("which", range(4))
def test_groups(which: int, gated: bool, sizes: tuple[int, ...]) -> None:
    k, n, rows = 1152, 256, sum(sizes)
    (a, x), (b, w) = scaled(rows, k, block=GROUP), scaled(len(sizes), 2 * n, k, block=BLOCK)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).int()
    how: dict[str, Any] = {"offs": ends, "kernel": KERNEL}
    how |= {"epilogue": "swiglu"} if gated else {}
    problem = Problem(
        m=rows, n=n if gated else 2 * n, k=k, a=Operand.of(a.stored, scale=Scale(GROUP)),
        b=Operand.of(b.stored.mT, scale=Scale(BLOCK)), out=Operand(BF16),
        groups=Groups(len(sizes), "m"), epilogue=parse(how.get("epilogue")),
        device=tmm_core.plan(a.stored, a.stored.t()).problem.device,
    )  # fmt: skip
    configs = list(WarpSpecialized().configs(problem))
    out, memory = poisoned(rows, problem.n)
    with torch.no_grad():
        tmm_core.grouped_linear(a, b, out=out, config=configs[which].to_json(), **how)
    starts = [0, *ends.tolist()]
    for g, (start, end) in enumerate(itertools.pairwise(starts)):
        z = x[start:end] @ w[g].T
        if gated:
            z = torch.nn.functional.silu(z[:, :n]) * z[:, n:]
        if end > start:
            close(out[start:end], z)
    assert untouched(memory, rows, problem.n)


def test_rows_do_not_depend_on_the_others() -> None:
    n, k = 1024, 3584
    (a, _), (b, _) = scaled(300, k, block=GROUP), scaled(n, k, block=BLOCK)
    with torch.no_grad(), tmm_core.override(batch_invariant=True, kernel=KERNEL):
        whole = tmm_core.linear(a, b)
        for m in (1, 17, 130):
            few = Quantized(a.stored[:m], a.scale[:m], format="fp8", block=GROUP)
            assert torch.equal(tmm_core.linear(few, b), whole[:m])
