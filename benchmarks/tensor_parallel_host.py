"""CPU time of a tensor-parallel layer's calls on the host, by torch and by tmm, on one rank.

    python benchmarks/tensor_parallel_host.py

The layer is the one of ``tensor_parallel.py`` at its smallest. Its modules are under torch's
``ColwiseParallel`` and ``RowwiseParallel``, converted or not. Its process group is torch's fake
one, which communicates nothing. Prints µs, the least of seven repetitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import tensor_parallel as layers
import torch
import torch.distributed as dist
from torch.distributed.tensor import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

REPETITIONS, CALLS = 7, 100


def least_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPETITIONS):
        began = time.process_time()
        for _ in range(CALLS):
            call()
        times.append((time.process_time() - began) / CALLS)
    return min(times) * 1e6


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    layer = layers.Layer(layers.SMALL, 2, "cpu")
    width, heads, _, each, hidden = layers.SMALL
    x, attended = torch.randn(16, width).bfloat16(), torch.randn(16, heads * each // 2).bfloat16()
    between = torch.randn(16, hidden // 2).bfloat16()
    print(f"torch {torch.__version__}, µs of one call")
    print(
        "| | layer | by columns | by rows | gated MLP | of it by rows |\n|---|---|---|---|---|---|"
    )
    for way in layers.WAYS:
        block = layers.parallel(layer, layers.SMALL, mesh, way)
        for _ in range(5):
            block(x)
        calls: list[Callable[[], object]] = [
            lambda: block(x),  # noqa: B023
            lambda: block.qkv(x),  # noqa: B023
            lambda: block.out(attended),  # noqa: B023
            lambda: block.mlp(x),  # noqa: B023
            lambda: block.mlp.down_proj(between),  # noqa: B023
        ]
        print(f"| {way} | " + " | ".join(f"{least_us(call):.0f}" for call in calls) + " |")


if __name__ == "__main__":
    main()
