"""The products of a tensor-parallel decoder layer with Llama-70B's widths, by torch and by tmm.

Each rank holds its share of the weights: query, key and value projection and the gate and up
projection by columns, the output and the down projection by rows, each followed by an all-reduce.
Attention and norms, the same for both, are left out. ``--layers`` layers with their own weights
are captured as one CUDA graph for each way, and the graphs are replayed by turns::

    torchrun --standalone --nproc-per-node 2 benchmarks/tensor_parallel.py --json tp.json

torch gates by ``silu(gate) * up`` on the halves of one product; tmm does in the product's
epilogue. Every problem is tuned first, each on one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import tmm_core
import tmm_core.tools.ranks

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


def measure(layers: list[Layer], tokens: int, rounds: int) -> dict[str, Any]:
    """Median ms of all layers by both ways, and how far they are apart."""
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
    found = []
    for tokens in options.tokens:
        if on_gpu:
            tmm_core.tools.ranks.tune(problems(layers[0], tokens), budget=options.budget)
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
