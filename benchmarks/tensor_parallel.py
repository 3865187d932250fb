"""The products of a tensor-parallel decoder layer with Llama-70B's widths, by torch and by tmm.

Each rank holds its share of the weights. The query, key, value, gate and up projections are split
by columns. The output and the down projection are split by rows; an all-reduce follows each.
Attention and norms, the same for both, are left out. ``--layers`` layers with their own weights
are captured as one CUDA graph for torch and one for tmm, and their replays are interleaved::

    torchrun --standalone --nproc-per-node 2 benchmarks/tensor_parallel.py --json tp.json

torch gates by ``silu(gate) * up`` on the halves of one product; tmm does in the product's
epilogue. Every problem is tuned first, each on one rank.

``--eager`` times the same layers call by call, and modules under torch's own ``ColwiseParallel``
and ``RowwiseParallel``, converted or not. It reports the milliseconds until the host has queued
all calls, and until the results are computed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tmm_core
import tmm_core.tools.ranks
from tmm_core.nn import convert

Tensor = torch.Tensor

WAYS = ("torch", "tmm")
#: Llama-3-70B: width, all heads, heads of keys and of values, elements per head, width of the MLP.
WIDTH, HEADS, KEYS, EACH, HIDDEN = 8192, 64, 8, 128, 28672
#: Sizes of a run on a CPU, which shows only that it works.
SMALL = (64, 4, 2, 16, 96)
#: Largest difference between the two, relative to the largest value: each rounds to bf16 four times
#: per layer, tmm once less.
TOLERANCE = 0.05


class Layer:
    """A rank's share of one layer's weights, each ``[out, in]``."""

    def __init__(self, sizes: tuple[int, ...], ranks: int, device: str) -> None:
        width, heads, keys, each, hidden = sizes

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device=device).mul_(columns**-0.5).bfloat16()

        self.qkv = weight((heads + 2 * keys) * each // ranks, width)
        self.out = weight(width, heads * each // ranks)
        self.gate_up = weight(2 * hidden // ranks, width)
        self.down = weight(width, hidden // ranks)

    def run(self, x: Tensor, way: str) -> Tensor:
        linear = tmm_core.linear if way == "tmm" else F.linear
        qkv = linear(x, self.qkv)
        y = linear(qkv[:, : self.out.shape[1]], self.out)
        dist.all_reduce(y)
        if way == "tmm":
            hidden = tmm_core.linear(y, self.gate_up, epilogue="swiglu")
        else:
            gate, up = F.linear(y, self.gate_up).chunk(2, dim=1)
            hidden = F.silu(gate) * up
        y = linear(hidden, self.down)
        dist.all_reduce(y)
        return y


class MLP(nn.Module):
    """The usual gated MLP, which ``convert`` fuses."""

    def __init__(self, layer: Layer, width: int, hidden: int) -> None:
        super().__init__()
        gate, up = layer.gate_up.chunk(2)
        self.gate_proj, self.up_proj = _linear(width, hidden), _linear(width, hidden)
        self.down_proj, self.act_fn = _linear(hidden, width), nn.SiLU()
        self.shards = {"gate_proj": gate, "up_proj": up, "down_proj": layer.down}

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """The layer as modules, whose weights are DTensors once they are parallel."""

    def __init__(self, layer: Layer, sizes: tuple[int, ...]) -> None:
        super().__init__()
        width, heads, keys, each, hidden = sizes
        self.qkv = _linear(width, (heads + 2 * keys) * each)
        self.out = _linear(heads * each, width)
        self.mlp = MLP(layer, width, hidden)
        self.local = layer.out.shape[1]
        self.shards = {"qkv": layer.qkv, "out": layer.out}

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.out(self.qkv(x)[:, : self.local]))


def _linear(columns: int, rows: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False, device="meta", dtype=torch.bfloat16)


def parallel(layer: Layer, sizes: tuple[int, ...], mesh: Any, way: str) -> nn.Module:
    """A block of ``layer``'s weights, converted if by tmm, each weight a DTensor of the shards."""
    block = Block(layer, sizes)
    shards = {**block.shards, **{f"mlp.{name}": w for name, w in block.mlp.shards.items()}}
    if way == "tmm":
        convert(block)
    plan = {name: ColwiseParallel() for name in ("qkv", "mlp.gate_proj", "mlp.up_proj")}
    plan |= {name: RowwiseParallel() for name in ("out", "mlp.down_proj")}
    parallelize_module(block, mesh, plan)
    block.to_empty(device=layer.qkv.device)
    for name, shard in shards.items():
        block.get_submodule(name).weight.data.to_local().copy_(shard)
    return block


def problems(layer: Layer, tokens: int) -> list[Any]:
    """The problems of one layer on this rank."""

    def like(columns: int) -> Tensor:
        return layer.qkv.new_empty(tokens, columns)

    plain = (layer.qkv, like(layer.qkv.shape[1])), (layer.down, like(layer.down.shape[1]))
    found = [tmm_core.problem(x, w.t()) for w, x in plain]
    queries = like(layer.qkv.shape[0])[:, : layer.out.shape[1]]
    found.append(tmm_core.problem(queries, layer.out.t()))
    x = like(layer.gate_up.shape[1])
    found.append(tmm_core.problem(x, layer.gate_up.t(), epilogue="swiglu"))
    return found


def prepared(
    layers: list[Layer], tokens: int
) -> tuple[Tensor, Callable[[str], Callable[[], Tensor]]]:
    """An input that all ranks have, and for each way a function that runs the layers on it."""
    first = layers[0]
    x = torch.randn(tokens, first.qkv.shape[1], device=first.qkv.device).bfloat16()
    dist.broadcast(x, 0)

    def by(way: str) -> Callable[[], Tensor]:
        def run() -> Tensor:
            y = x
            for layer in layers:
                y = layer.run(y, way)
            return y

        return run

    return x, by


def measure(layers: list[Layer], tokens: int, rounds: int) -> dict[str, Any]:
    """Median ms of all layers by both ways, and how far they are apart."""
    x, by = prepared(layers, tokens)

    results = {way: by(way)().double() for way in WAYS}
    apart = float((results["tmm"] - results["torch"]).abs().max() / results["torch"].abs().max())
    if not apart <= TOLERANCE:
        raise SystemExit(f"{tokens} tokens: the two differ by {apart:.3f}")
    found: dict[str, Any] = {"tokens": tokens, "difference": apart}
    if x.is_cuda:
        graphs = {way: captured(by(way)) for way in WAYS}
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for turn in range(rounds):
            # The second one finds a warmer GPU: the order alternates.
            for way in WAYS if turn % 2 else reversed(WAYS):
                times[way].append(replayed(graphs[way]))
        found["ms"] = {way: round(statistics.median(times[way]), 4) for way in WAYS}
        found["ratio"] = round(found["ms"]["torch"] / found["ms"]["tmm"], 4)
    return found


def eager(
    ways: Mapping[str, Callable[[], Tensor]], on_gpu: bool, rounds: int, calls: int = 10
) -> dict[str, list[float]]:
    """Median ms of a run, and of its calls until the host has queued them, by way."""
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for run in ways.values():
        run()
    for turn in range(rounds):
        for way in list(ways)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                ways[way]()
            queued = time.perf_counter()
            if on_gpu:
                torch.cuda.synchronize()
            ended = time.perf_counter()
            times[way].append(((ended - began) * 1e3 / calls, (queued - began) * 1e3 / calls))
    return {
        way: [round(statistics.median(each), 4) for each in zip(*mine, strict=True)]
        for way, mine in times.items()
    }


def measure_eager(
    layers: list[Layer], blocks: Mapping[str, list[nn.Module]], tokens: int, rounds: int
) -> dict[str, Any]:
    """All layers, call by call, on local tensors and as modules of DTensors."""
    x, by = prepared(layers, tokens)

    def of(way: str) -> Callable[[], Tensor]:
        def run() -> Tensor:
            y = x
            for block in blocks[way]:
                y = block(y)
            return y

        return run

    found: dict[str, Any] = {"tokens": tokens, "eager": {}}
    for kind, make in (("local", by), ("modules", of)):
        ways = {way: make(way) for way in WAYS}
        results = {way: run().double() for way, run in ways.items()}
        apart = (results["tmm"] - results["torch"]).abs().max() / results["torch"].abs().max()
        ms = eager(ways, x.is_cuda, rounds)
        found["eager"][kind] = {
            "ms, ms queued": ms,
            "ratio": round(ms["torch"][0] / ms["tmm"][0], 4),
            "host": round(ms["torch"][1] / ms["tmm"][1], 4),
            "difference": round(float(apart), 5),
        }
    return found


def captured(run: Callable[[], Tensor]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replayed(graph: torch.cuda.CUDAGraph, least_ms: float = 20.0) -> float:
    """ms of one replay, over as many in a row as take ``least_ms``: as many on every rank."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time(count: int) -> float:
        dist.barrier()
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    once = torch.tensor(time(1), device="cuda")
    dist.all_reduce(once, dist.ReduceOp.MAX)
    return time(max(1, round(least_ms / float(once))))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 64, 512, 2048, 8192])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds to tune a product")
    parser.add_argument("--eager", action="store_true", help="time calls instead of graphs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    options = parser.parse_args()
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= local_ranks
    if on_gpu:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ranks, first = dist.get_world_size(), dist.get_rank() == 0
    torch.manual_seed(dist.get_rank())
    sizes = (WIDTH, HEADS, KEYS, EACH, HIDDEN) if on_gpu else SMALL
    layers = [Layer(sizes, ranks, "cuda" if on_gpu else "cpu") for _ in range(options.layers)]
    blocks: dict[str, list[nn.Module]] = {}
    if options.eager:
        mesh = init_device_mesh("cuda" if on_gpu else "cpu", (ranks,))
        blocks = {way: [parallel(layer, sizes, mesh, way) for layer in layers] for way in WAYS}
    found = []
    for tokens in options.tokens:
        if on_gpu:
            tmm_core.tools.ranks.tune(problems(layers[0], tokens), budget=options.budget)
        if options.eager:
            found.append(measure_eager(layers, blocks, tokens, options.rounds))
        else:
            found.append(measure(layers, tokens, options.rounds))
        if first:
            print(json.dumps(found[-1]), flush=True)
    if first and options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if on_gpu:
        dist.destroy_process_group()
    else:
        # gloo's threads outlive their group; one that frees a tensor while Python ends aborts.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
