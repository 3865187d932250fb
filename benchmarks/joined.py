"""Tiles of two products beside each other, with one ``wgmma`` for both and with two, beside cuBLAS
and the other tiles, by the clock in use. On a Hopper GPU::

    python benchmarks/joined.py 384x6144x4096 nn:2304x2304x2304 --output FILE
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tmm_blas.blas import Blas
from tmm_triton import hopper_search
from tmm_triton.hopper_config import WarpSpecializedConfig
from tmm_triton.hopper_estimate import estimate_us
from tmm_triton.operands import Build
from tmm_triton.warp_specialized import WarpSpecialized

from tmm_core import Operand, Problem
from tmm_core.dispatch.copies import Copies
from tmm_core.dispatch.timing import GraphTimer
from tmm_core.spec.device import fingerprint

#: Tiles that are not proposed, and how many of the other tiles are compared, best estimates first.
FURTHER = (
    ("pingpong", 2, 4, 64, 144, 64),
    ("cooperative", 2, 4, 128, 80, 64),
)
OTHERS = 5
ROUNDS, SETTLE, BURST_US = 11, 3, 3000.0


class Apart(WarpSpecialized):
    """The kernel with two ``wgmma`` for two products."""

    def specialize(self, problem: Problem, config: WarpSpecializedConfig) -> Build:
        build = super().specialize(problem, config)
        edits = tuple(edit for edit in build.options["edits"] if edit != "joined")
        return replace(build, options={**build.options, "edits": edits})


def tried(problem: Problem) -> list[WarpSpecializedConfig]:
    """Configs of all tiles of two products, and of the best others, without parts of K."""
    tiles = (*hopper_search._tiles(problem), *FURTHER)
    fitted = [hopper_search._fitted(problem, tile)[:1] for tile in tiles]
    configs = [
        replace(c, GROUP_M=hopper_search._groups(problem, c)[0]) for [c] in filter(None, fitted)
    ]
    configs.sort(key=lambda config: estimate_us(problem, config))
    others = [config for config in configs if not config.narrow][:OTHERS]
    return [config for config in configs if config.narrow or config in others]


def posed(text: str, device: torch.device) -> Problem:
    """The problem of a text such as ``512x512x512`` or ``nn:512x512x512``."""
    kind, _, sizes = text.rpartition(":")
    m, n, k = map(int, sizes.split("x"))
    row = Operand(torch.bfloat16)
    b = row if kind == "nn" else Operand(torch.bfloat16, "col")
    return Problem(m, n, k, row, b, row, fingerprint(device))


def compared(text: str, timer: GraphTimer, say: Callable[[str], None]) -> None:
    problem = posed(text, timer.device)
    both, one = (WarpSpecialized(), Apart()), (WarpSpecialized(),)
    asked = [
        (kernel, config) for config in tried(problem) for kernel in (both if config.narrow else one)
    ]

    def bound(kernel: WarpSpecialized, config: WarpSpecializedConfig) -> Any:
        torch.cuda.set_device(timer.device)
        try:
            return kernel.bind(problem, config)
        except Exception as error:
            return error

    with ThreadPoolExecutor(12) as pool:
        launchers = list(pool.map(bound, *zip(*asked, strict=True)))
    blas, copies = Blas(), Copies(problem, timer.device, None)
    runs: dict[str, Any] = {
        "cuBLAS": copies.runner(blas.bind(problem, blas.default_config(problem)))
    }
    estimates = {}
    expected = runs["cuBLAS"](0).float()
    for (kernel, config), launcher in zip(asked, launchers, strict=True):
        name = f"{config.schedule} {config.BLOCK_M}×{config.BLOCK_N}×{config.BLOCK_K}"
        if isinstance(kernel, Apart):
            name += " apart"
        if isinstance(launcher, Exception):
            say(f"  {name}: {launcher!r:.200}")
            continue
        run = copies.runner(launcher)
        worst = ((run(0).float() - expected).abs().max() / expected.abs().max()).item()
        if worst > 1e-2:
            say(f"  {name}: wrong, {worst:.3g}")
            continue
        runs[name], estimates[name] = run, estimate_us(problem, config)
    options = {"copies": len(copies._inputs), "burst_us": BURST_US}
    timer.measure(list(runs.values()), SETTLE, **options)
    samples = timer.measure(list(runs.values()), ROUNDS, **options)
    timer.release()
    us = {name: statistics.median(mine) for name, mine in zip(runs, samples, strict=True)}
    say(f"{text}: cuBLAS {us['cuBLAS']:.2f} µs")
    for name in sorted(estimates, key=us.__getitem__):
        ratio = us["cuBLAS"] / us[name]
        say(f"  {name:30s} {us[name]:8.2f} {ratio:6.3f}   ({estimates[name]:.1f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problems", nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    timer = GraphTimer(torch.device("cuda", 0))
    with open(arguments.output, "a") as file:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=file, flush=True)

        say(f"{torch.cuda.get_device_name()}, {time.strftime('%Y-%m-%d')}")
        for text in arguments.problems:
            compared(text, timer, say)


if __name__ == "__main__":
    sys.exit(main())
