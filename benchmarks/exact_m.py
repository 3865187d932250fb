"""Measures the short race at an M that was never measured: what it costs and what it gains.

    python benchmarks/exact_m.py [--seconds 110] [-o FILE.json]

Each weight is tuned at the edge of a bucket, unless a record ships. Two M inside the bucket follow,
at which nothing was measured. For each M it reports the choice by the bucket's record alone, the
duration of the race, and the choice after the race. Both choices are timed together with BLAS and
the record's other finalists, in three captures with fresh allocations. Takes two minutes; writes
JSON to ``$OUT/exact_m.json`` by default.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from tmm_cache import TuningRecord

import tmm_core
from tmm_core import dispatch, settings
from tmm_core.bench import exhaustive
from tmm_core.launch import warm
from tmm_core.spec.bucket import bucketed, probes
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE, Bound, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.tuning.ranking import finalists, identity

#: The edge of a bucket, N, K, and the epilogue; all take more than 100 µs on an H100.
WEIGHTS = [
    (1280, 8192, 5120, ""), (2048, 6144, 4096, ""), (5120, 5120, 5120, ""), (768, 28672, 4096, ""),
    (1792, 5120, 13824, ""), (3072, 4096, 4096, "silu"), (5120, 8192, 5120, ""),
    (4096, 3584, 8192, "gelu_tanh"), (6144, 4096, 4096, ""), (2560, 13824, 5120, ""),
]  # fmt: skip
#: M of each bucket, and candidates of its record that are timed there.
EACH, MOST = 2, 6
#: The race of this benchmark: captures, rounds in each, µs of a burst.
CAPTURES, ROUNDS, BURST_US = 3, 7, 4000.0

Row = dict[str, Any]


def measured(x: torch.Tensor, w: torch.Tensor, epilogue: str | None) -> Row:
    """One M: the choice without and with the race, and their times."""
    problem = tmm_core.problem(x, w.T, epilogue=epilogue)
    edge = bucketed(problem)
    chooser = dispatch.default_dispatcher()
    with settings.override(on_cache_miss="heuristic"):
        before = tmm_core.plan(x, w.T, epilogue=epilogue)
    began = time.perf_counter()
    with settings.override(on_cache_miss="tune", progress=False):
        after = tmm_core.plan(x, w.T, epilogue=epilogue)
    spent = time.perf_counter() - began
    record = chooser.record_of(edge)
    assert record is not None
    raced = any(problem.m in each.inside_us for each in record.candidates)
    launchers = {"before": before.launcher, "after": after.launcher}
    launchers |= others(problem, record)
    us, _ = exhaustive.race(
        problem, x.device, launchers, captures=CAPTURES, rounds=ROUNDS, burst_us=BURST_US
    )
    best = min(us, key=us.__getitem__)
    return {
        "problem": str(problem),
        "m": problem.m,
        "edge": edge.m,
        "raced": raced,
        "race_ms": round(1e3 * spent, 1),
        "before": f"{before.kernel} {before.config}",
        "after": f"{after.kernel} {after.config}",
        "best": best,
        "us": {name: round(each, 2) for name, each in us.items()},
    }


def others(problem: Problem, record: TuningRecord) -> dict[str, Launcher]:
    """BLAS and the finalists of the bucket's record."""
    chooser = dispatch.default_dispatcher()
    blas = chooser.registry.kernel(BASELINE)
    found = {BASELINE: Candidate(blas, blas.default_config(problem))}
    able = chooser.able(problem, settings.current())
    for result in sorted(finalists(record.candidates), key=lambda r: r.median_us or 0.0)[:MOST]:
        candidate = chooser.candidate(result, able, problem)
        if candidate is not None:
            found.setdefault(str(identity(result)), candidate)
    launchers: dict[str, Launcher] = {}
    for name, each in found.items():
        try:
            launchers[name] = Bound.of(each.kernel.bind(problem, each.config)).run
        except Exception as error:  # a failure costs only this candidate
            print(f"{problem}: {name}: {error}")
    return launchers


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| problem | edge | raced, ms | before, µs | after, µs | BLAS, µs | best / before "
        "| best / after | BLAS / after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        us = row["us"]
        best = us[row["best"]]
        cost = f"{row['race_ms']:.0f}" if row["raced"] else "no race"
        lines.append(
            f"| {row['problem']} | {row['edge']} | {cost} | {us['before']:.1f} | {us['after']:.1f} "
            f"| {us[BASELINE]:.1f} | {best / us['before']:.3f} | {best / us['after']:.3f} "
            f"| {us[BASELINE] / us['after']:.3f} |"
        )
    if rows:
        ratios = {
            name: [row["us"][over] / row["us"][under] for row in rows]
            for name, over, under in (
                ("BLAS / before", BASELINE, "before"), ("BLAS / after", BASELINE, "after"),
            )
        }  # fmt: skip
        ratios["best / before"] = [row["us"][row["best"]] / row["us"]["before"] for row in rows]
        ratios["best / after"] = [row["us"][row["best"]] / row["us"]["after"] for row in rows]
        lines += [""] + [
            f"{name}: geometric mean {geometric_mean(each):.4f}, worst {min(each):.3f}"
            for name, each in ratios.items()
        ]
        raced = [row["race_ms"] for row in rows if row["raced"]]
        if raced:
            lines.append(
                f"{len(raced)} of {len(rows)} raced: {median(raced):.0f} ms (median), "
                f"{max(raced):.0f} ms at most"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, weights: Any = WEIGHTS) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    until = time.perf_counter() + options.seconds
    on_gpu = options.device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    generator, rows, tuned = random.Random(1), [], []
    for edge, n, k, name in weights:
        if time.perf_counter() > until:
            break
        epilogue = name or None
        try:
            w = torch.randn(n, k, device=options.device, dtype=dtype)
            x = torch.randn(edge, k, device=options.device, dtype=dtype)
            known = set(probes(edge))
            inside = [m for m in range(min(known, default=edge), edge) if m not in known]
            began = time.perf_counter()
            with settings.override(progress=False):
                tmm_core.tune(tmm_core.problem(x, w.T, epilogue=epilogue))
            tuned.append(time.perf_counter() - began)
            for m in sorted(generator.sample(inside, EACH)):
                if time.perf_counter() < until:
                    rows.append(measured(x[:m].contiguous(), w, epilogue))
        except Exception as error:  # one weight must not cost the others
            print(f"{edge}×{n}×{k}: {type(error).__name__}: {error}")
        warm.forget_plans()
        if on_gpu:
            torch.cuda.empty_cache()
    text = table(rows)
    print(text)
    if tuned:
        print(f"tuning the edges: {median(tuned):.1f} s (median), {max(tuned):.1f} s at most")
    output = options.output
    if output is None and (out := os.environ.get("OUT")):
        output = Path(out) / "exact_m.json"
    if output is not None:
        about = torch.cuda.get_device_name() if on_gpu else "CPU"
        document = {"device": about, "torch": torch.__version__, "rows": rows, "tuned_s": tuned}
        output.write_text(json.dumps(document, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
