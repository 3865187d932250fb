"""Large products of the Hopper kernel, each tile alone and in clusters of two blocks that load b once
for both, beside cuBLAS: in bursts of milliseconds that take turns, and for half a second without
pause, at the limit of power. On a Hopper GPU::

    python benchmarks/clusters.py 8192x8192x8192 gated:2048x14336x4096 --output FILE
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tmm_triton.hopper_search import configs
from tmm_triton.warp_specialized import WarpSpecialized

from tmm_core import Operand, Problem
from tmm_core.epilogues import parse
from tmm_core.spec.device import fingerprint

#: Seconds of a burst, how many there are of each, and seconds without pause.
BURST, BURSTS, STEADY = 5e-3, 11, 0.2
#: Tiles that are tried in both ways.
TILES = ("128x256", "256x128")


def seconds(run: Callable[[], Any], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / calls


def measured(runs: dict[str, Callable[[], Any]]) -> dict[str, tuple[float, float]]:
    """µs of each, in bursts and without pause."""
    calls = {name: max(2, round(BURST / seconds(run, 3))) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(BURSTS):
        for name in random.sample(list(runs), len(runs)):
            samples[name].append(seconds(runs[name], calls[name]))
    steady: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(3):
        for name in random.sample(list(runs), len(runs)):
            one = statistics.median(samples[name])
            seconds(runs[name], round(STEADY / 2 / one))
            steady[name].append(seconds(runs[name], round(STEADY / one)))
    return {
        name: (statistics.median(samples[name]) * 1e6, statistics.mean(steady[name]) * 1e6)
        for name in runs
    }


def compared(text: str, say: Callable[[str], None]) -> None:
    kind, _, sizes = text.rpartition(":")
    m, n, k = map(int, sizes.split("x"))
    gated = kind == "gated"
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(2 * n if gated else n, k, device="cuda", dtype=torch.bfloat16).t()
    col = Operand(torch.bfloat16, "row" if kind == "nn" else "col")
    row = Operand(torch.bfloat16)
    problem = Problem(
        m, n, k, row, col, row, fingerprint(a.device),
        epilogue=parse("swiglu" if gated else None),
    )  # fmt: skip
    if kind == "nn":
        b = b.contiguous()
    kernel = WarpSpecialized()
    whole: dict[Any, Any] = {}
    for config in configs(problem):
        config = replace(config, tail_splits=1)
        if not config.narrow and not config.evict_first and config.splits == 1:
            whole.setdefault(
                (config.schedule, config.consumers, config.BLOCK_M, config.BLOCK_N), config
            )
    tried = []
    for config in whole.values():
        if (
            f"{config.BLOCK_M}x{config.BLOCK_N * (2 if gated else 1)}" not in TILES
            or config.consumers == 1
        ):
            continue
        if config.pingpong and config.BLOCK_N == 128:
            continue
        tried.append(config)
        group = max(1, config.GROUP_M // 2)
        try:
            tried.append(replace(config, cluster=2, GROUP_M=group))
        except ValueError:
            continue
    with ThreadPoolExecutor(12) as pool:

        def bind(config: Any) -> Any:
            torch.cuda.set_device(0)
            try:
                return kernel.bind(problem, config)
            except Exception as error:
                return error

        launchers = list(pool.map(bind, tried))
    expected = a @ b
    if gated:
        gate, up = expected.float().chunk(2, dim=1)
        expected = (torch.nn.functional.silu(gate) * up).bfloat16()
    flat = b
    runs: dict[str, Callable[[], Any]] = {"cuBLAS": lambda: a @ flat}
    for config, launcher in zip(tried, launchers, strict=True):
        name = f"{config.schedule} {config.consumers} {config.BLOCK_M}x{config.BLOCK_N} cluster {config.cluster} group {config.GROUP_M}"
        if isinstance(launcher, Exception):
            say(f"  {name}: {launcher!r:.300}")
            continue
        out = launcher(a, b, None, None, 1.0, None)
        torch.cuda.synchronize()
        worst = (
            out.float() - expected.float()
        ).abs().max().item() / expected.float().abs().max().item()
        if worst > 1e-2:
            say(f"  {name}: wrong, {worst:.3g}")
            continue
        runs[name] = lambda launcher=launcher: launcher(a, b, None, None, 1.0, None)
    found = measured(runs)
    bursts, steady = found["cuBLAS"]
    say(f"{text}: cuBLAS {bursts:.1f} µs, without pause {steady:.1f}")
    for name, (burst, still) in found.items():
        if name != "cuBLAS":
            say(
                f"  {name:44s} {burst:8.1f} {bursts / burst:6.3f}   {still:8.1f} {steady / still:6.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    with open(arguments.output, "a") as file:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=file, flush=True)

        say(f"{torch.cuda.get_device_name()}, {time.strftime('%Y-%m-%d')}")
        for text in arguments.problems:
            compared(text, say)


if __name__ == "__main__":
    sys.exit(main())
