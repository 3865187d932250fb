"""Prints the energy and the time of large products in bf16, by torch and by the kernel that tmm
chooses, each running back to back for a second.

    python benchmarks/energy.py [--seconds 1]

The energy is the difference of NVML's counter for the whole GPU, which is updated some ten times a
second. A product's mJ are the counter's difference divided by its launches. It needs nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import pynvml
import torch

import tmm_core

#: M, N and K of prefills and squares.
SIZES = (
    (2048, 14336, 4096), (4096, 4096, 14336), (8192, 4096, 4096), (8192, 14336, 4096),
    (5000, 8192, 5120), (5888, 5888, 5888), (4096, 4096, 4096), (8192, 8192, 8192),
)  # fmt: skip
ROUNDS = 2


def measured(run: Callable[[], object], handle: object, seconds: float) -> tuple[float, float]:
    """µs and mJ of one call in steady state."""
    repeated(run, 0.4 * seconds)  # until the clock has settled
    before = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    calls, taken = repeated(run, seconds)
    used = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before
    return taken / calls * 1e6, used / calls


def repeated(run: Callable[[], object], seconds: float) -> tuple[int, float]:
    """Call ``run`` for some seconds; returns the number of calls and the seconds that they took."""
    calls, begun = 0, time.perf_counter()
    while time.perf_counter() < begun + seconds:
        for _ in range(50):
            run()
        torch.cuda.synchronize()
        calls += 50
    return calls, time.perf_counter() - begun


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each sample")
    options = parser.parse_args()
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    print(f"{'':18} {'torch: µs':>10} {'mJ':>8} {'tmm: µs':>10} {'mJ':>8} {'time':>7} energy")
    for m, n, k in SIZES:
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).T
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        ways = {
            "torch": lambda a=a, b=b, out=out: torch.mm(a, b, out=out),
            "tmm": lambda a=a, b=b, out=out: tmm_core.matmul(a, b, out=out),
        }
        for run in ways.values():
            run()
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for turn in range(ROUNDS):
            for name in list(ways)[:: 1 if turn % 2 else -1]:
                samples[name].append(measured(ways[name], handle, options.seconds))
        (torch_us, torch_mj), (own_us, own_mj) = (
            tuple(map(statistics.mean, zip(*samples[name], strict=True))) for name in ways
        )
        kernel = tmm_core.explain(a, b).kernel
        print(
            f"{f'{m}×{n}×{k}':18} {torch_us:10.1f} {torch_mj:8.2f} {own_us:10.1f} {own_mj:8.2f} "
            f"{torch_us / own_us:6.3f}× {torch_mj / own_mj:6.3f}×  {kernel}",
            flush=True,
        )


if __name__ == "__main__":
    main()
