"""Times the Hopper kernel with different numbers of blocks: `python benchmarks/blocks.py OUT.json`.

A persistent kernel may launch fewer blocks than there are SMs without needing more waves. Each rule
below rounds the least such number up differently. Problems are random, so that no rule is fitted to
them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import replace
from statistics import geometric_mean
from typing import Any

import torch
from tmm_triton.hopper import search_space, warp_specialized
from tmm_triton.hopper.tile_shapes import tile_count

import tmm_core
from tmm_core.bench.exhaustive import race

#: N and K of the random problems.
COLUMNS = (3072, 3584, 4096, 5120, 6144, 8192, 11008, 13824, 14336)
DEPTHS = (2048, 2560, 3584, 4096, 5120, 6912, 8192)
#: (schedule, consumers, BLOCK_M, BLOCK_N)
TILES = (("pingpong", 2, 64, 256), ("cooperative", 2, 128, 256), ("pingpong", 2, 128, 192))
CAPTURES, ROUNDS, BURST_US = 3, 8, 5000.0


def rules(least: int, sms: int) -> dict[str, int]:
    """The number of blocks by each rule, from the least number that needs no additional wave."""
    rounded = {f"multiple of {n}": min(sms, math.ceil(least / n) * n) for n in (2, 4, 8)}
    return {"least": least, **rounded, "all SMs": sms}


def measured(problem: Any, config: Any, counts: list[int], kernel: Any) -> dict[str, float]:
    """µs of a call by number of blocks, and of torch's call."""
    launchers = {}
    for count in counts:
        warp_specialized._blocks = lambda *_, count=count: count
        launchers[str(count)] = kernel.bind(problem, config)
    blas = tmm_core.dispatch.default_dispatcher().registry.kernel("blas")
    launchers["torch"] = blas.bind(problem, blas.default_config(problem))
    us, _ = race(
        problem, torch.device("cuda"), launchers,
        captures=CAPTURES, rounds=ROUNDS, burst_us=BURST_US,
    )  # fmt: skip
    return {name: round(each, 2) for name, each in us.items()}


def main(out: str, seconds: float) -> None:
    chance, end = random.Random(20261125), time.monotonic() + seconds
    kernel: Any = tmm_core.dispatch.default_dispatcher().registry.kernel("triton.warp_specialized")
    usual = warp_specialized._blocks
    rows = []
    while time.monotonic() < end:
        m = round(math.exp(chance.uniform(math.log(1500), math.log(9000))))
        n, k = chance.choice(COLUMNS), chance.choice(DEPTHS)
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t()
        problem = tmm_core.problem(a, b)
        del a, b
        sms = problem.device.sm_count
        for schedule, consumers, rows_of, columns in TILES:
            shape = (schedule, consumers, 4, rows_of, columns, 64)
            config = next(iter(search_space._fitted(problem, shape)))
            group = chance.choice(search_space._groups(problem, config))
            config = replace(config, GROUP_M=group)
            tiles = tile_count(problem, config)
            warp_specialized._blocks = usual
            least = -(-tiles // -(-tiles // sms))
            counts = rules(least, sms)
            times = measured(problem, config, sorted(set(counts.values())), kernel)
            row = {
                "mnk": (m, n, k),
                "tile": f"{schedule} {rows_of}x{columns}",
                "group_m": group,
                "tiles": tiles,
                "counts": counts,
                "us": times,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    device = torch.cuda.get_device_name()
    with open(out, "w") as file:
        json.dump({"device": device, "rows": rows}, file)
    print(device, torch.__version__)
    for tile in (*dict.fromkeys(row["tile"] for row in rows), ""):
        summarize(tile, [row for row in rows if tile in row["tile"]])


def summarize(tile: str, rows: list[dict[str, Any]]) -> None:
    """Print each rule's gain over the least number of blocks, and over torch."""
    for rule in rules(1, 1):
        us = [row["us"][str(row["counts"][rule])] for row in rows]
        least = [row["us"][str(row["counts"]["least"])] for row in rows]
        gains = [usual / mine for usual, mine in zip(least, us, strict=True)]
        odd = [g for g, row in zip(gains, rows, strict=True) if row["counts"]["least"] % 2] or [1.0]
        torchs = [row["us"]["torch"] / mine for row, mine in zip(rows, us, strict=True)]
        print(
            f"{tile or 'all':24} {rule:14} n={len(rows):3} "
            f"x least: {geometric_mean(gains):.4f} worst {min(gains):.3f} best {max(gains):.3f}; "
            f"odd least n={len(odd)} {geometric_mean(odd):.4f}; "
            f"x torch {geometric_mean(torchs):.4f} worst {min(torchs):.3f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="where the JSON goes")
    parser.add_argument("seconds", type=float, nargs="?", default=120.0, help="120 by default")
    main(**vars(parser.parse_args()))
