"""Launches that overlap the previous one give the same bits as launches one by one."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from tmm_triton.hopper.config import WarpSpecializedConfig
from tmm_triton.hopper.warp_specialized import WarpSpecialized
from tmm_triton.skinny import Skinny
from tmm_triton.split_k import SplitK

from tmm_core import Launcher, Problem
from tmm_core.spec.device import fingerprint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs Hopper",
    ),
]

Tensor = torch.Tensor
Call = Callable[[Tensor, Tensor], Tensor]
SIZE, CALLS = 1024, 200

#: Two waves of tiles on 132 SMs, some of them cut in two, whose blocks wait for each other's flags.
CUT = WarpSpecializedConfig(
    BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_stages=6, schedule="pingpong",
    consumers=2, num_warps=4, subtiles=4, tail_splits=2, splits=1, evict_first=False,
)  # fmt: skip


def random(*shape: int, seed: int = 0) -> Tensor:
    """A random matrix, scaled so that products by square ones keep their magnitude."""
    generator = torch.Generator("cuda").manual_seed(seed)
    full = torch.randn(*shape, generator=generator, device="cuda")
    return (full / shape[-1] ** 0.5).bfloat16()


def bound(kernel: Any, a: Tensor, b: Tensor, config: Any) -> Call:
    problem = Problem.of(a, b, a @ b, fingerprint(a.device), static_weights=True)
    assert kernel.reasons_against(problem) == []
    launcher: Launcher = kernel.bind(problem, config)
    return lambda a, b: launcher(a, b, None, None, 1.0, None)


def ways(m: int) -> list[tuple[Any, Any]]:
    """Kernels and configs that differ in their work before the wait, and in how they add partial
    sums."""
    a, b = random(m, SIZE), random(SIZE, SIZE, seed=1).t()
    problem = Problem.of(a, b, a @ b, fingerprint(a.device), static_weights=True)
    chosen: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    for kernel in (WarpSpecialized(), Skinny(), SplitK()):
        if kernel.reasons_against(problem):
            continue
        for config in kernel.configs(problem):
            parts = getattr(config, "splits", 1) > 1 or getattr(config, "SPLIT_K", 1) > 1
            key = (kernel.name, config.early, parts)
            chosen.setdefault(key, (kernel, config))
            if isinstance(config, WarpSpecializedConfig):
                # Blocks so small that blocks of the next launch fit on the same SM.
                small = replace(config, num_stages=2)
                chosen.setdefault((*key, "small"), (kernel, small))
    return list(chosen.values())


def chain(call: Call, x: Tensor, weights: list[Tensor], between: bool, alone: bool) -> list[Tensor]:
    """Products in a chain: each multiplies the result of the one before."""
    outs = []
    for i in range(CALLS):
        if between:
            x = x * -1.0
        x = call(x, weights[i % len(weights)].t())
        outs.append(x)
        if alone:
            torch.cuda.synchronize()
    return outs


@pytest.mark.parametrize("between", [False, True], ids=["bare", "elementwise"])
@pytest.mark.parametrize("way", ["eager", "graph", "streams"])
@pytest.mark.parametrize("m", [1, 16, 64])
def test_a_chain_of_products_gives_the_bits_of_single_launches(
    m: int, way: str, between: bool
) -> None:
    x = random(m, SIZE)
    weights = [random(SIZE, SIZE, seed=seed) for seed in range(1, 9)]
    for kernel, config in ways(m):
        call = bound(kernel, x, weights[0].t(), config)
        expected = chain(call, x, weights, between, alone=True)
        assert expected[-1].isfinite().all()
        assert expected[-1].any()
        torch.cuda.synchronize()
        if way == "graph":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = [chain(call, x, weights, between, alone=False)]
            for _ in range(3):
                for out in got[0]:
                    out.fill_(float("nan"))
                torch.cuda.synchronize()
                graph.replay()
        else:
            streams = [torch.cuda.Stream() for _ in range(2 if way == "streams" else 1)]
            got = [[] for _ in streams]
            x_of = [x.clone() for _ in streams]
            torch.cuda.synchronize()
            for i in range(CALLS):
                for stream, outs, place in zip(streams, got, range(2), strict=False):
                    with torch.cuda.stream(stream) if way == "streams" else nullcontext():
                        if between:
                            x_of[place] = x_of[place] * -1.0
                        x_of[place] = call(x_of[place], weights[i % len(weights)].t())
                        outs.append(x_of[place])
        torch.cuda.synchronize()
        for outs in got:
            for place, (mine, theirs) in enumerate(zip(outs, expected, strict=True)):
                assert torch.equal(mine, theirs), (kernel.name, str(config), place)


@pytest.mark.parametrize(("n", "k"), [(2048, 8192), (5120, 4096), (8192, 2048)])
@pytest.mark.parametrize("kernel", [Skinny(), SplitK()], ids=("skinny", "split_k"))
def test_blocks_of_an_overlapping_launch_are_spread_evenly(kernel: Any, n: int, k: int) -> None:
    a, b = random(1, k), random(n, k, seed=1).t()
    problem = Problem.of(a, b, a @ b, fingerprint(a.device), static_weights=True)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    configs = [config for config in kernel.configs(problem) if config.early]
    assert configs
    for build in (build for config in configs for build in kernel.builds(problem, config)):
        even = -(-math.prod(build.grid) // sms)
        assert fitting(build.launch("cuda").compiled) <= even


def fitting(compiled: Any) -> int:
    """How many blocks fit on an SM, by the driver."""
    found, (warps, _, shared) = ctypes.c_int(), compiled.packed_metadata
    status = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(found), ctypes.c_void_p(compiled.function), 32 * warps, ctypes.c_size_t(shared)
    )
    assert status == 0
    return found.value


def test_tiles_cut_along_k_in_a_chain() -> None:
    """Each launch uses the flags and the workspace of the one before."""
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("parts of these tiles suit another number of SMs")
    x = random(2304, 2304)
    weights = [random(2304, 2304, seed=seed) for seed in range(1, 4)]
    for early in ("", "l2", "b"):
        call = bound(WarpSpecialized(), x, weights[0].t(), replace(CUT, early=early))
        expected = chain(call, x, weights, False, alone=True)
        got = chain(call, x, weights, False, alone=False)
        torch.cuda.synchronize()
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine, theirs), early


@pytest.mark.parametrize("writer", ["copy", "kernel", "product"])
@pytest.mark.parametrize("captured", [False, True])
def test_a_weight_that_was_just_written_is_read_correctly(writer: str, captured: bool) -> None:
    """The caller does not promise static weights; the config prefetches or not."""
    x, weight = random(16, SIZE), random(SIZE, SIZE)
    sources = [random(SIZE, SIZE, seed=seed) for seed in range(2, 6)]
    left = random(SIZE, SIZE, seed=9)
    for kernel, config in ways(16):
        if config.assumes:
            continue
        call = bound(kernel, x, weight.t(), config)
        many = bound(WarpSpecialized(), left, left.t(), _default(left))

        def steps(alone: bool, call: Call = call, many: Call = many) -> list[Tensor]:
            outs = []
            for i in range(CALLS // 4):
                source = sources[i % len(sources)]
                w = weight
                if writer == "copy":
                    weight.copy_(source)
                elif writer == "kernel":
                    torch.mul(source, 1.0 + i % 3, out=weight)
                else:
                    w = many(left, source.t())
                torch.cuda.synchronize() if alone else None
                outs.append(call(x, w.t()))
                torch.cuda.synchronize() if alone else None
            return outs

        expected = steps(alone=True)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = steps(alone=False)
            graph.replay()
        else:
            got = steps(alone=False)
        torch.cuda.synchronize()
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine, theirs), (kernel.name, str(config))


def _default(left: Tensor) -> Any:
    problem = Problem.of(left, left.t(), left, fingerprint(left.device))
    return WarpSpecialized().default_config(problem)


def test_an_ordinary_kernel_in_between_keeps_the_promise_of_static_weights() -> None:
    """As docs/serve.md requires: the weight is written, then another kernel runs."""
    x, weight = random(16, SIZE), random(SIZE, SIZE)
    sources = [random(SIZE, SIZE, seed=seed) for seed in range(2, 6)]
    scratch = torch.zeros(8, device="cuda")
    for kernel, config in ways(16):
        call = bound(kernel, x, weight.t(), config)
        expected = [call(x, source.t()) for source in sources]
        torch.cuda.synchronize()
        for i in range(CALLS):
            torch.mul(sources[i % len(sources)], 1.0, out=weight)
            scratch.add_(1.0)
            got = call(x, weight.t())
            assert torch.equal(got, expected[i % len(sources)]), (kernel.name, str(config), i)


class _EdgeData(ctypes.Structure):
    """``CUgraphEdgeData`` of the CUDA driver API, 12.3 and later."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


def _programmatic_edges(graph: int) -> int:
    """The number of a graph's edges whose second kernel may begin before the first has ended."""
    driver = ctypes.CDLL("libcuda.so.1")
    edges = getattr(driver, "cuGraphGetEdges_v2", None)
    if edges is None:
        pytest.skip("this driver has no edge data")
    count = ctypes.c_size_t(0)
    handle = ctypes.c_void_p(graph)
    assert edges(handle, None, None, None, ctypes.byref(count)) == 0
    data = (_EdgeData * count.value)()
    ends = [(ctypes.c_void_p * count.value)() for _ in range(2)]
    assert edges(handle, *ends, data, ctypes.byref(count)) == 0
    return sum(edge.type == 1 for edge in data)


def test_a_warm_launch_overlaps_in_a_graph_too() -> None:
    """Warm launches call the installed Triton's C function directly."""
    x, weight = random(16, SIZE), random(SIZE, SIZE, seed=1)
    for kernel, config in ways(16):
        for overlaps in (True, False):
            early = (config.early or "wait") if overlaps else ""
            call = bound(kernel, x, weight.t(), replace(config, early=early))
            call(x, weight.t())
            try:
                graph = torch.cuda.CUDAGraph(keep_graph=True)
            except TypeError:
                pytest.skip("this torch keeps no graph to look at")
            with torch.cuda.graph(graph):
                for _ in range(5):
                    call(x, weight.t())
            edges = _programmatic_edges(graph.raw_cuda_graph())
            reduces = getattr(config, "splits", 1) > 1 or getattr(config, "SPLIT_K", 1) > 1
            launches = 10 if reduces else 5
            # A second kernel that adds up the parts always begins early.
            assert edges == (launches - 1 if overlaps else 5 if reduces else 0), str(config)
