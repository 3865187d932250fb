"""What only a GPU can show of the Triton kernels: counters, captured launches, tensor maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tmm_triton.persistent import Persistent
from tmm_triton.split_k import _CAPTURES, SplitK, SplitKConfig

from tmm_core import Launcher, Problem
from tmm_core.device import fingerprint

pytestmark = pytest.mark.gpu

CONFIG = SplitKConfig(
    BLOCK_M=16, BLOCK_N=64, BLOCK_K=128, num_stages=4, num_warps=4,
    SPLIT_K=5, REDUCE="last", SWAP=False,
)  # fmt: skip


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


@pytest.mark.parametrize("swap", [False, True])
def test_the_last_program_leaves_its_counter_zero(swap: bool) -> None:
    a, b = random(33, 2000), random(2000, 200, seed=1)
    config = SplitKConfig(**{**CONFIG.to_json(), "SWAP": swap})
    run = bound(SplitK(), a, b, config)
    first = run(a, b, None, None, 1.0, None)
    assert close(first, a, b)
    for _ in range(50):
        out = torch.full_like(first, float("nan"))
        assert torch.equal(run(a, b, None, None, 1.0, out), first)


def test_counters_of_streams_are_their_own() -> None:
    a, b = random(33, 2000), random(2000, 200, seed=1)
    run = bound(SplitK(), a, b, CONFIG)
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


@pytest.mark.parametrize("reduce", ["last", "kernel"])
def test_captured_launches_may_replay_together(reduce: str) -> None:
    a, b = random(33, 2000), random(2000, 200, seed=1)
    run = bound(SplitK(), a, b, SplitKConfig(**{**CONFIG.to_json(), "REDUCE": reduce}))
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
