"""Measures what a cache of many records costs: `python benchmarks/cache_scale.py [RECORDS]`.

Fills a temporary root with records of thirty candidates, as tuning leaves them. Prints a row per
operation: seconds, seconds of CPU (user and system, children included), and the bar. If other
processes share the cores, as the load average shows, compare the seconds of CPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tmm_cache import CacheStore, CandidateResult, TuningRecord

GPU = "nvidia-h200-sm90-132"
ENVIRONMENT = {"capability": [9, 0], "sm_count": 132, "torch": "2.13.0"}
OPERAND = {"dtype": "bfloat16", "layout": "row", "aligned": True, "wide": False}
CONFIG = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_stages": 4, "num_warps": 4}


def problem(number: int) -> dict[str, object]:
    return {
        "m": 16 * (1 + number % 100),
        "n": 128 * (1 + number // 100),
        "k": 4096,
        "batch": 1,
        "a": OPERAND,
        "b": OPERAND | {"layout": "col"},
        "out": OPERAND,
        "epilogue": "silu" if number % 2 else "identity",
        "bias": None,
        "residual": None,
        "scaled": False,
        "tf32": False,
    }


def record(number: int) -> TuningRecord:
    samples = tuple(round(20 + place * 0.137, 3) for place in range(25))
    blas = CandidateResult("blas", "b0cfd442d2be", {"fused": False}, "ok", samples)
    others = tuple(
        CandidateResult(
            f"triton.kernel_{place % 7}",
            "3503c75412a8",
            CONFIG | {"GROUP_M": place},
            "slow" if place > 3 else "ok",
            samples[: 8 if place > 3 else 25],
            error=0.003,
            tolerance=0.016,
        )
        for place in range(30)
    )
    return TuningRecord(problem(number), 1, (blas, *others), "2026-01-31T12:00:00Z", 3.2)  # type: ignore[arg-type]


def timed(title: str, bar: float, run: Callable[[], object]) -> None:
    started, before = time.perf_counter(), os.times()
    run()
    took, after = time.perf_counter() - started, os.times()
    # CPU time of this process and its children, which other processes do not lengthen.
    busy = sum(after[:4]) - sum(before[:4])
    verdict = "ok" if took <= bar else "by CPU" if busy <= bar else "MISSED"
    load = os.getloadavg()[0]
    print(f"| {title} | {took:.2f} | {busy:.2f} | {bar:g} | {verdict} | {load:.1f} |", flush=True)


def command(root: Path, text: str) -> Callable[[], object]:
    line = f"{sys.executable} -m tmm_cache.cli --cache-dir {root} {text}"
    return lambda: subprocess.run(line, shell=True, check=True, capture_output=True)


def few(near: Iterator[object]) -> list[object]:
    return list(itertools.islice(near, 3))


def first_miss(root: Path) -> None:
    """In a process that has imported torch: the store is read, neighbours are ranked."""
    import torch

    from tmm_core.dispatch.neighbour import Neighbours
    from tmm_core.spec.device import DeviceFingerprint
    from tmm_core.spec.operand import Operand
    from tmm_core.spec.problem import Problem

    device = DeviceFingerprint("cuda", "NVIDIA H200", (9, 0), 132)
    row = Operand.from_json(OPERAND)
    asked = Problem(
        m=100, n=1000, k=4096, batch=1, a=row, b=replace(row, layout="col"), out=row, device=device
    )
    neighbours = Neighbours(CacheStore(root, []))
    found: list[object] = []
    timed("first miss: nearest records", 1.0, lambda: found.extend(few(neighbours.nearest(asked))))
    timed("second miss", 0.1, lambda: found.extend(few(neighbours.nearest(asked))))
    assert torch is not None
    assert len(found) == 6, "the problem has no neighbours: nothing was ranked"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=int, nargs="?", default=10_000, help="10000 by default")
    count = parser.parse_args().records
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        os.environ |= {"TMM_CACHE_DIR": str(root), "TMM_SHIPPED_RECORDS": "0"}
        store = CacheStore(root, [])
        part = CacheStore(Path(folder, "part"), [])
        print("| operation | seconds | of CPU | bar | holds | load |\n|---|---|---|---|---|---|")
        timed(f"save {count}", math.inf, lambda: [save(store, number) for number in range(count)])
        size = max(path.stat().st_size for path in root.rglob("*.json"))
        print(f"| (each of up to {size} bytes) | | | | | |")
        timed("show \\| head", 1.0, command(root, "show | head"))
        timed("show", 5.0, command(root, "show"))
        for number in range(4_000):
            save(part, number)
        file = Path(folder, "part.json.gz")
        command(part.root, f"export {file}")()
        timed("import of 4000", 60.0, command(Path(folder, "new"), f"import {file}"))
        first_miss(root)


def save(store: CacheStore, number: int) -> None:
    store.save(GPU, ENVIRONMENT, record(number))


if __name__ == "__main__":
    main()
