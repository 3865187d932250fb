"""Compares products of few rows by a quantised weight with a mere read of the weight's bytes.

Both run in chains over enough weights to fill three times the L2. The read is the fastest of some
launch shapes of a kernel that loads every word of as many bytes as weight and scales have::

    python benchmarks/reads.py --json reads.json
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from quantised import Call, copies_of, medians, quantised, two_sizes

import tmm_core

#: Weights by rows and columns: in 4 bits two of 60 MB, and two of 120 MB and more.
WEIGHTS = ((28672, 4096), (14336, 8192), (28672, 8192), (57344, 8192))
#: Words that a program reads at a time, how often, and its warps.
READS = tuple(itertools.product((2048, 4096), (1, 2, 4), (4, 8)))
ROUNDS = 11


@triton.jit
def _read(words_ptr, sums_ptr, count, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    program = tl.program_id(0)
    sums = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(STEPS):
        at = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        words = tl.load(words_ptr + at, mask=at < count, eviction_policy="evict_first")
        sums += words
    tl.store(sums_ptr + program, tl.sum(sums))


def reads(size: int, count: int, device: torch.device) -> dict[str, Call]:
    """Reads of ``size`` bytes of each of ``count`` buffers."""
    words = size // 4
    buffers = [
        torch.randint(2**31 - 1, (words,), device=device, dtype=torch.int32) for _ in range(count)
    ]
    sums = torch.empty(words, device=device, dtype=torch.int32)

    def read(block: int, steps: int, warps: int) -> Call:
        grid = (triton.cdiv(words, block * steps),)
        return lambda i: _read[grid](buffers[i], sums, words, block, steps, num_warps=warps)

    return {"read " + "x".join(map(str, shape)): read(*shape) for shape in READS}


def measured(form: str, n: int, k: int, rows: list[int], device: torch.device) -> dict[str, Any]:
    count = max(2, copies_of(n * k * (0.5 if form == "int4" else 1), device))
    weights = [quantised(form, n, k, device=device) for _ in range(count)]
    size = weights[0].stored.nbytes + weights[0].scale.nbytes
    calls = reads(size, count, device)
    for m in rows:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        calls[f"{m} rows"] = lambda i, x=x: tmm_core.linear(x, weights[i])  # type: ignore[misc]
    for call in calls.values():  # compiles and tunes
        call(0)
    us = medians(calls, ROUNDS, count, device)
    least = min(each for name, each in us.items() if name.startswith("read"))
    share = {f"{m} rows": round(least / us[f"{m} rows"], 3) for m in rows}
    print(f"{form} {n}×{k}, {size / 1e6:.0f} MB: read in {least} µs, "
          f"{size / least / 1e6:.2f} TB/s; {share}", flush=True)  # fmt: skip
    return {"format": form, "n": n, "k": k, "bytes": size, "us": us, "share of a read": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["int4", "int8"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--weights", nargs="+", type=two_sizes, default=list(WEIGHTS))
    parser.add_argument("--budget", type=float, default=8.0, help="seconds to tune a product")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    options = parser.parse_args()
    device = torch.device("cuda:0")
    found = []
    with torch.no_grad(), tmm_core.override(tune_budget=options.budget):
        for form, (n, k) in itertools.product(options.formats, options.weights):
            found.append(measured(form, n, k, options.rows, device))
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
