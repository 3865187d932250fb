"""Tests of the Triton kernels that need a GPU: counters, captured launches, tensor maps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tmm_triton.flags import _CAPTURES
from tmm_triton.persistent import Persistent
from tmm_triton.split_k import SplitK, SplitKConfig

pytest.importorskip("triton.experimental.gluon")

from tmm_triton.hopper import search_space, tile_shapes
from tmm_triton.hopper.config import WarpSpecializedConfig, unfinished
from tmm_triton.hopper.warp_specialized import WarpSpecialized

from tmm_core import Launcher, Problem
from tmm_core.epilogues import parse
from tmm_core.spec.device import fingerprint

pytestmark = pytest.mark.gpu

CONFIG = SplitKConfig(
    BLOCK_M=16, BLOCK_N=64, BLOCK_K=128, num_stages=4, num_warps=4,
    SPLIT_K=5, SWAP=False,
)  # fmt: skip


#: Two waves of tiles on 132 SMs, and some that are cut in two; a part of a wave, in four.
CUT = WarpSpecializedConfig(
    BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_stages=6, schedule="pingpong",
    consumers=2, num_warps=4, subtiles=4, tail_splits=2, splits=1, evict_first=False,
)  # fmt: skip
SHARED = replace(CUT, BLOCK_M=192, schedule="cooperative", consumers=3, num_stages=5, tail_splits=4)
#: Every tile in seven, with a second kernel to add them.
PARTS = replace(
    CUT, BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, subtiles=2, tail_splits=1, splits=7, evict_first=True
)
#: The tile of one product.
ONE_PRODUCT = {
    "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_stages": 4, "schedule": "cooperative",
    "consumers": 2, "num_warps": 4, "subtiles": 4, "tail_splits": 1, "splits": 1, "early": "",
}  # fmt: skip


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def bound(kernel: Any, a: torch.Tensor, b: torch.Tensor, config: Any = None) -> Launcher:
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype, device="cuda")
    problem = Problem.of(a, b, out, fingerprint(torch.device("cuda", 0)))
    assert kernel.reasons_against(problem) == []
    launcher: Launcher = kernel.bind(problem, config or kernel.default_config(problem))
    return launcher


def close(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    expected = a.double() @ b.double()
    return bool((out.double() - expected).norm() < 4e-3 * expected.norm())


def waiting(case: str) -> tuple[Launcher, torch.Tensor, torch.Tensor]:
    """A launcher and its operands. Its programs wait for each other, except in ``split``."""
    if case in ("cut", "shared", "parts"):
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs Hopper")
        config = {"cut": CUT, "shared": SHARED, "parts": PARTS}[case]
        rows, columns = {"cut": (2304, 2304), "shared": (576, 1024), "parts": (100, 200)}[case]
        a, b = random(rows, 2000), random(2000, columns, seed=1)
        problem = Problem.of(a, b, torch.empty_like(a @ b), fingerprint(a.device))
        if tile_shapes.adapted(problem, config) != config:
            pytest.skip(f"{config.tail_splits} parts of these tiles suit another number of SMs")
        return bound(WarpSpecialized(), a, b, config), a, b
    a, b = random(33, 2000), random(2000, 200, seed=1)
    return bound(SplitK(), a, b, CONFIG), a, b


@pytest.mark.parametrize("case", ["cut", "shared", "parts"])
def test_a_launch_that_waits_does_not_change_the_previous_result(case: str) -> None:
    run, a, b = waiting(case)
    first = run(a, b, None, None, 1.0, None)
    assert close(first, a, b)
    for _ in range(50):
        out = torch.full_like(first, float("nan"))
        assert torch.equal(run(a, b, None, None, 1.0, out), first)


@pytest.mark.parametrize("case", ["cut", "shared", "parts"])
def test_counters_of_streams_are_their_own(case: str) -> None:
    run, a, b = waiting(case)
    expected = run(a, b, None, None, 1.0, None)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = []
    for _ in range(40):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(run(a, b, None, None, 1.0, None))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("case", ["split", "cut", "shared", "parts"])
def test_captured_launches_may_replay_together(case: str) -> None:
    run, a, b = waiting(case)
    expected = run(a, b, None, None, 1.0, None)
    graphs, outs = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # More of them than have counters zeroed ahead.
            outs.append([run(a, b, None, None, 1.0, None) for _ in range(_CAPTURES * 3 // 4)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(3):
        for out in (o for some in outs for o in some):
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for some in outs for out in some)


@pytest.mark.parametrize("m", [1, 4, 20, 33, 100, 129, 300, 1000])
@pytest.mark.parametrize("n", [1000, 1032, 4097])
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_tiles_that_end_outside(m: int, n: int, layout: str) -> None:
    """Boxes lower than a tile, tiles moved inside, outputs by TMA and by pointers."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    a = random(512, -(-m // 8) * 8)[:, :m].t() if layout[0] == "t" else random(m, 512)
    b = random(-(-n // 8) * 8, 512, seed=1)[:n].t()
    if layout[1] == "n":
        b = random(512, -(-n // 8) * 8, seed=1)[:, :n]
    problem = Problem.of(
        a, b, torch.empty(m, n, dtype=a.dtype, device="cuda"), fingerprint(a.device)
    )
    expected = a.double() @ b.double()
    for config in WarpSpecialized().configs(problem):
        run = bound(WarpSpecialized(), a, b, config)
        out = torch.full((m + 1, n), float("nan"), dtype=a.dtype, device="cuda")
        run(a, b, None, None, 1.0, out[:m])
        assert (out[:m].double() - expected).norm() < 4e-3 * expected.norm(), config
        assert out[m].isnan().all(), config


@pytest.mark.parametrize("tile", search_space._SIDE_BY_SIDE_TILES, ids=str)
@pytest.mark.parametrize("m", [1, 100, 300, 1500])
def test_two_adjacent_products(tile: Any, m: int) -> None:
    """Every strip in its place, the bits of one product, several tiles a block, parts of K."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    for n, k, layout in ((96, 64, "nt"), (1000, 520, "nn"), (1032, 1000, "tt"), (9000, 200, "tn")):
        a = random(k, -(-m // 8) * 8)[:, :m].t() if layout[0] == "t" else random(m, k)
        b = random(n, k, seed=1).t() if layout[1] == "t" else random(k, n, seed=1)
        bias = random(n, seed=2)
        problem = Problem.of(
            a, b, torch.empty(m, n, dtype=a.dtype, device="cuda"), fingerprint(a.device),
            bias=bias, epilogue=parse("silu"),
        )  # fmt: skip
        one = next(iter(WarpSpecialized().configs(replace(problem, batch_invariant=True))))
        one = replace(one, **ONE_PRODUCT)
        expected = WarpSpecialized().bind(problem, one)(a, b, bias, None, 1.0, None)
        right = torch.nn.functional.silu(a.double() @ b.double() + bias)
        assert (expected.double() - right).norm() < 4e-3 * right.norm()
        for config in search_space._fitted(problem, tile):
            out = torch.full((m + 1, n), float("nan"), dtype=a.dtype, device="cuda")
            WarpSpecialized().bind(problem, config)(a, b, bias, None, 1.0, out[:m])
            assert torch.equal(out[:m], expected), (config, n, k)
            assert out[m].isnan().all(), config
        cut = replace(search_space._fitted(unfinished(problem), tile)[0], splits=3)
        out = WarpSpecialized().bind(problem, cut)(a, b, bias, None, 1.0, None)
        assert (out.double() - right).norm() < 4e-3 * right.norm(), (cut, n, k)


@pytest.mark.parametrize("tile", search_space._SIDE_BY_SIDE_TILES, ids=str)
def test_adjacent_gate_and_up_products(tile: Any) -> None:
    """Products have a bias and a residual, use TMA or pointers, and several tiles per block."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    for m, n, k, layout in ((1, 96, 64, "nt"), (300, 1000, 520, "nn"), (1500, 4504, 1000, "nt")):
        a = random(m, k)
        b = random(2 * n, k, seed=1).t() if layout[1] == "t" else random(k, 2 * n, seed=1)
        bias, residual = random(2 * n, seed=2), random(m, n + 1, seed=3)[:, :n]
        z = a.double() @ b.double() + bias
        right = torch.nn.functional.silu(z[:, :n]) * z[:, n:]
        for added in (None, residual, residual.contiguous()):
            problem = Problem.of(
                a, b, torch.empty(m, n, dtype=a.dtype, device="cuda"), fingerprint(a.device),
                bias=bias, residual=added, epilogue=parse("swiglu"),
            )  # fmt: skip
            wanted = right if added is None else right + added
            for config in search_space._fitted(problem, tile):
                out = torch.full((m + 1, n), float("nan"), dtype=a.dtype, device="cuda")
                WarpSpecialized().bind(problem, config)(a, b, bias, added, 1.0, out[:m])
                assert (out[:m].double() - wanted).norm() < 4e-3 * wanted.norm(), (config, m)
                assert out[m].isnan().all(), config


@pytest.mark.parametrize("count", [2, 4, 8])
def test_ranges_of_k_have_the_bits_of_parts(count: int) -> None:
    """Each block has several tiles, and the epilogue has every term."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    for m, n, k in ((300, 1000, 4096), (2500, 1536, 8192), (70, 64, 4096)):
        a, b = random(m, k), random(n, k, seed=1).t()
        bias, residual = random(n, seed=2), random(m, n, seed=3)
        problem = Problem.of(
            a, b, torch.empty(m, n, dtype=a.dtype, device="cuda"), fingerprint(a.device),
            bias=bias, residual=residual, epilogue=parse("silu"),
        )  # fmt: skip
        problem = replace(problem, batch_invariant=True)  # else a residual may be added by FMAs
        parts = replace(CUT, **{**ONE_PRODUCT, "splits": count})
        expected = WarpSpecialized().bind(problem, parts)(a, b, bias, residual, 1.0, None)
        right = torch.nn.functional.silu(a.double() @ b.double() + bias) + residual
        assert (expected.double() - right).norm() < 4e-3 * right.norm()
        fitted = [search_space._fitted(problem, tile)[:1] for tile in search_space._tiles(problem)]
        for (config,) in search_space._ranged(problem, [f for f in fitted if f], count):
            out = torch.full((m + 1, n), float("nan"), dtype=a.dtype, device="cuda")
            WarpSpecialized().bind(problem, config)(a, b, bias, residual, 1.0, out[:m])
            assert torch.equal(out[:m], expected), (config, n, k)
            assert out[m].isnan().all(), config


@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize(
    "shape", [(1, 8, 4096), (50, 516, 8000), (130, 200, 5000), (300, 64, 9999)]
)
def test_every_tile_cut_along_k(shape: tuple[int, int, int], layout: str) -> None:
    """The second kernel applies alpha, bias, epilogue and residual."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    m, n, k = shape
    whole = -(-k // 8) * 8
    a, b = random(m, whole)[:, :k], random(n, whole, seed=1)[:, :k].t()
    a = random(k, -(-m // 8) * 8)[:, :m].t() if layout[0] == "t" else a
    b = random(k, -(-n // 8) * 8, seed=1)[:, :n] if layout[1] == "n" else b
    bias, residual = random(n, seed=2), random(m, n, seed=3)
    problem = Problem.of(
        a, b, residual, fingerprint(a.device), bias=bias, residual=residual, scaled=True,
        epilogue=parse("silu"),
    )  # fmt: skip
    z = 0.5 * (a.double() @ b.double()) + bias
    expected = torch.nn.functional.silu(z) + residual
    cut = [c for c in WarpSpecialized().configs(problem) if c.splits > 1]
    assert cut
    for config in cut:
        run = WarpSpecialized().bind(problem, config)
        out = torch.full((m + 1, n), float("nan"), dtype=a.dtype, device="cuda")
        run(a, b, bias, residual, 0.5, out[:m])
        assert (out[:m].double() - expected).norm() < 6e-3 * expected.norm(), config
        assert out[m].isnan().all(), config


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs TMA"
)
def test_tensor_maps_follow_their_tensors() -> None:
    a, b = random(100, 256), random(200, 256, seed=1).t()
    run = bound(Persistent(), a, b)
    for seed in range(100):  # more addresses than maps are kept
        other = random(100, 512, seed=seed)[:, :256] if seed % 2 else random(100, 256, seed=seed)
        assert close(run(other, b, None, None, 1.0, None), other, b)
    shared = random(1, 256, 200).expand(3, 256, 200)
    batch = random(3, 100, 256)
    assert close(
        bound(Persistent(), batch, shared)(batch, shared, None, None, 1.0, None), batch, shared
    )
