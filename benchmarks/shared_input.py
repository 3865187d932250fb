"""Products of one input, one after the other and on several streams, in a CUDA graph.

Each graph has several sets of weights, so that no weight stays in L2 from one replay to the next. A
norm runs before each set and an elementwise operator after it; their time is subtracted. Kernels
are chosen by records or estimates, without tuning::

    python benchmarks/shared_input.py --rows 1 4 16 64
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tmm_core
from tmm_core.bench.provenance import describe
from tmm_core.interop import shared_input
from tmm_core.spec.arguments import Arguments

Tensor = torch.Tensor
Products = Callable[[Tensor, list[Tensor]], list[Tensor]]

#: Columns of the products, and K.
CASES = {
    "Llama-8B, query key value": ((4096, 1024, 1024), 4096),
    "Llama-8B, gate up": ((14336, 14336), 4096),
    "Llama-1B, query key value": ((2048, 512, 512), 2048),
    "Llama-1B, gate up": ((8192, 8192), 2048),
    "GPT-2, query key value": ((768, 768, 768), 768),
    "Llama-70B, query key value": ((8192, 1024, 1024), 8192),
    "Llama-13B, query key value": ((5120, 5120, 5120), 5120),
    "Qwen3-4B, query key value": ((4096, 1024, 1024), 2560),
    "Qwen3-0.6B, query key value": ((2048, 1024, 1024), 1024),
    "Mistral-12B, query key value": ((4096, 1024, 1024), 5120),
    "Gemma-2-9B, query key value": ((4096, 2048, 2048), 3584),
    "Qwen2.5-7B, query key value": ((3584, 512, 512), 3584),
    "Phi-3.5, gate up": ((4096, 4096), 2048),
}
#: Bytes of all weights of a graph, at least; and its sets of weights, at most.
BYTES, MOST_SETS = 300e6, 12
ROUNDS, REPLAYS = 9, 10


def torchs(a: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [a @ w.t() for w in weights]


def one_by_one(a: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [tmm_core.matmul(a, w.t()) for w in weights]


def streams(a: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Each product by the kernel that is the fastest alone."""
    products = [functools.partial(tmm_core.matmul, a, w.t()) for w in weights]
    return shared_input._at_once(products, a.device)


def beside(a: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """As in a compiled graph: small products leave room for each other."""
    return shared_input.concurrent(*shared_input.arguments([Arguments(a, w.t()) for w in weights]))


def none(a: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [a]


WAYS: dict[str, Products] = {
    "torch": torchs, "tmm": one_by_one, "streams": streams, "beside": beside, "": none,
}  # fmt: skip


def captured(products: Products, x: Tensor, norm: nn.Module, sets: Any) -> torch.cuda.CUDAGraph:
    def run() -> None:
        for weights in sets:
            products(norm(x), weights)[0].mul(2)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for weights in sets[:1]:
            (one_by_one if products is streams else products)(norm(x), weights)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def measured(rows: int, columns: tuple[int, ...], k: int) -> dict[str, float]:
    """µs of one set of products by each way, the median of some rounds."""
    given: Any = {"device": "cuda", "dtype": torch.bfloat16}
    count = max(2, min(MOST_SETS, int(BYTES / (2 * k * sum(columns))) + 1))
    sets = [[torch.randn(n, k, **given) for n in columns] for _ in range(count)]
    x, norm = torch.randn(rows, k, **given), nn.RMSNorm(k, **given)
    graphs = {name: captured(way, x, norm, sets) for name, way in WAYS.items()}
    us: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            graph.replay()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(REPLAYS):
                graph.replay()
            torch.cuda.synchronize()
            us[name].append((time.perf_counter() - start) * 1e6 / REPLAYS / count)
    medians = {name: statistics.median(mine) for name, mine in us.items()}
    return {name: medians[name] - medians[""] for name in WAYS if name}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds in all")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    print(describe(torch.device("cuda"), []))
    print("µs of a set of products, without the norm before and the operator behind it")
    print(f"{'rows':>4}  {'':28}" + "".join(f"{name:>14}" for name in WAYS if name) + "   gain")
    with torch.no_grad(), tmm_core.override(on_cache_miss="heuristic", progress=False):
        for rows in options.rows:
            for name, (columns, k) in CASES.items():
                if time.monotonic() > end:
                    print(f"{rows} × {name}: {options.seconds} s are over")
                    continue
                us = measured(rows, columns, k)
                gain = us["tmm"] / us["beside"]
                times = "".join(f"{value:14.2f}" for value in us.values())
                print(f"{rows:4}  {name:28}{times}{gain:7.3f}", flush=True)


if __name__ == "__main__":
    main()
