"""The epilogue ``quantize`` beside a launch of its own that rounds, in use.

    python benchmarks/quantize_epilogue.py --rows 1 16 256 2048 8192 --weight 14336x4096

For each number of rows it prints µs of ``linear(x, w, epilogue="silu+quantize")``, of
``quantize_rows(linear(x, w, epilogue="silu"), group=128)`` and of the product with silu alone, and
the kernel of the first. Each product is tuned at its first use. The calls of one provider are
captured over so many weights that they exceed the L2; providers are replayed in turn, and medians
are printed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

import tmm_core

#: Bytes of weights that are multiplied in turn: three times the L2 of an H100.
IN_TURN = 3 * 50 * 2**20
#: Replays of each provider, and launches of each in one of them.
ROUNDS, LAUNCHES = 15, 48


def captured(call: Callable[[torch.Tensor], Any], weights: list[torch.Tensor]) -> Any:
    """A graph of :data:`LAUNCHES` calls, each with the next weight."""
    for weight in weights:
        call(weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in range(LAUNCHES):
            call(weights[launch % len(weights)])
    return graph


def times_us(graphs: list[Any]) -> list[float]:
    """The median µs of a call in each graph, replayed in turn."""
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for graph, mine in zip(graphs, samples, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            mine.append(1e3 * begin.elapsed_time(end) / LAUNCHES)
    return [statistics.median(mine) for mine in samples]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256, 2048, 8192])
    parser.add_argument("--weight", default="14336x4096", help="N and K")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of each tuning")
    options = parser.parse_args()
    n, k = map(int, options.weight.split("x"))
    count = max(2, -(-IN_TURN // (2 * n * k)))
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    print(f"{torch.cuda.get_device_name()}, bf16, {count} weights of {options.weight} in turn")
    for rows in options.rows:
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)

        def fused(w: torch.Tensor, x: torch.Tensor = x) -> Any:
            return tmm_core.linear(x, w, epilogue="silu+quantize")

        def alone(w: torch.Tensor, x: torch.Tensor = x) -> Any:
            return tmm_core.linear(x, w, epilogue="silu")

        def apart(w: torch.Tensor) -> Any:
            return tmm_core.quantize_rows(alone(w), group=128)

        with tmm_core.override(tune_budget=options.budget), torch.no_grad():
            graphs = [captured(call, weights) for call in (fused, apart, alone)]
            chosen = tmm_core.explain(x, weights[0].t(), epilogue="silu+quantize")
        us = times_us(graphs)
        print(
            f"{rows}: fused {us[0]:.2f} µs, rounded apart {us[1]:.2f}, silu alone {us[2]:.2f}; "
            f"{us[1] / us[0]:.3f} of the time apart; {chosen!r}",
            flush=True,
        )


if __name__ == "__main__":
    main()
