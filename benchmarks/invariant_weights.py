"""Compares batch-invariant mode on weights without records with unrestricted cuBLAS.

    python benchmarks/invariant_weights.py [--seconds 140] [-o FILE.json]

For each weight it reports the seconds that the first call waits. For some M it reports the choice,
its time and cuBLAS's in three captures, and whether a row has the same bits as alone. The table of
a weight's records compares each reduction order with BLAS at the measured M. If time is left, it
searches the slowest product exhaustively, each reduction order separately. It begins no weight
after ``--seconds``, and writes JSON to ``$OUT/invariant_weights.json`` by default.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from tmm_cache import CacheStore

import tmm_core
from tmm_core import dispatch, settings
from tmm_core.bench import exhaustive
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.dispatch.invariant import ladder
from tmm_core.launch import warm
from tmm_core.spec.kernel import SEARCH_LIMITED, Candidate
from tmm_core.spec.launcher import BASELINE, Bound
from tmm_core.spec.problem import Problem

#: N and K: few columns and a long K first.
WEIGHTS = [
    (3840, 15360), (2560, 9728), (1024, 7168), (3072, 12288), (4608, 4608), (11264, 2048),
    (5376, 21504), (2816, 16384), (12288, 3072), (1792, 8192), (2048, 11008), (7168, 2304),
]  # fmt: skip
ROWS = (1, 7, 20, 33, 70, 130, 450, 1500, 5000)
CAPTURES, ROUNDS, BURST_US = 3, 5, 2500.0

Row = dict[str, Any]


def measured(x: torch.Tensor, w: torch.Tensor, alone: torch.Tensor) -> Row:
    """One M: the choice and its time, compared with unrestricted cuBLAS."""
    problem = tmm_core.problem(x, w.T)
    plan = tmm_core.plan(x, w.T)
    same = bool(torch.equal(plan(x, w.T)[:1], alone))
    blas = dispatch.default_dispatcher().registry.kernel(BASELINE)
    free = replace(problem, batch_invariant=False)
    usual = Bound.of(blas.bind(free, blas.default_config(free))).run
    us, _ = exhaustive.race(
        free,
        x.device,
        {"blas": usual, "tmm": plan.launcher},
        captures=CAPTURES,
        rounds=ROUNDS,
        burst_us=BURST_US,
    )
    return {
        "m": problem.m,
        "kernel": plan.kernel,
        "config": plan.config,
        "arithmetic": plan.choice.arithmetic,
        "origin": plan.origin,
        "us": {name: round(each, 2) for name, each in us.items()},
        "ratio": round(us["blas"] / us["tmm"], 4),
        "same_bits": same,
    }


def recorded(problem: Problem) -> dict[str, dict[str, float]]:
    """The ratio of BLAS's time to each reduction order's, by M, from the weight's records."""
    chooser = dispatch.default_dispatcher()
    found: dict[str, dict[str, float]] = {}
    for rung in ladder(problem):
        record = chooser.record_of(rung)
        if record is None:
            continue
        able = chooser.able(rung, settings.current())
        times: dict[int, dict[str, float]] = {}
        for result in record.candidates:
            if result.kernel == BASELINE:
                name: str | None = BASELINE
            else:
                candidate = chooser.candidate(result, able, rung)
                name = candidate and candidate.kernel.arithmetic(rung, candidate.config)
            if name is None or (name != BASELINE and not name.startswith("sm90")):
                continue
            measured_us = {rung.m: result.median_us, **result.inside_us}
            for m, us in measured_us.items():
                if us is not None:
                    row = times.setdefault(m, {})
                    row[name] = min(us, row.get(name, us))
        for m, row in sorted(times.items()):
            if BASELINE in row:
                ratios = {a: round(row[BASELINE] / us, 3) for a, us in sorted(row.items())}
                found[str(m)] = {a: ratio for a, ratio in ratios.items() if a != BASELINE}
    return found


def searched(x: torch.Tensor, w: torch.Tensor) -> dict[str, Any]:
    """The fastest config of each reduction order at this M, among all configs, in µs."""
    problem = tmm_core.problem(x, w.T)
    able = dispatch.default_dispatcher().able(problem, settings.current())
    limit = SEARCH_LIMITED.set(False)
    try:
        every: dict[str, Candidate] = exhaustive._proposed(problem, able)
    finally:
        SEARCH_LIMITED.reset(limit)
    launchers, failed = exhaustive._bound(problem, x.device, every)
    us, _ = exhaustive.race(
        problem, x.device, launchers, captures=1, rounds=5, burst_us=BURST_US
    )  # fmt: skip
    best: dict[str, tuple[float, str]] = {}
    for name in us:
        each = every[name]
        kind = each.kernel.arithmetic(problem, each.config) or each.kernel.name
        best[kind] = min(best.get(kind, (us[name], name)), (us[name], name))
    ranked = sorted(best.items(), key=lambda item: item[1])[:8]
    return {"problem": str(problem), "best": ranked, "failed": len(failed), "of": len(every)}


def table(weights: Sequence[Row]) -> str:
    lines = [
        "| N×K | first call, s | arithmetic | "
        + " | ".join(str(m) for m in ROWS)
        + " | same bits |\n|---|---|---|"
        + "---|" * (len(ROWS) + 1)
    ]
    ratios = []
    for each in weights:
        rows = {row["m"]: row for row in each["rows"]}
        ratios += [row["ratio"] for row in each["rows"]]
        names = sorted({str(row["arithmetic"]) for row in each["rows"]})
        cells = [f"{rows[m]['ratio']:.3f}" if m in rows else "" for m in ROWS]
        same = all(row["same_bits"] for row in each["rows"])
        lines.append(
            f"| {each['n']}×{each['k']} | {each['first_s']:.1f} | {', '.join(names)} | "
            + " | ".join(cells)
            + f" | {'yes' if same else 'NO'} |"
        )
    if ratios:
        waits = [each["first_s"] for each in weights]
        lines += [
            "",
            f"Over {len(ratios)} products: geometric mean {geometric_mean(ratios):.4f}, worst "
            f"{min(ratios):.3f}, {sum(r < 0.9 for r in ratios)} below 0.9. A weight waits "
            f"{median(waits):.1f} s (median), {max(waits):.1f} s at most.",
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, weights: Any = WEIGHTS) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    until = time.perf_counter() + options.seconds
    on_gpu = options.device.startswith("cuda")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    mine, found, search = dispatch.default_dispatcher(), [], None
    with (
        tempfile.TemporaryDirectory() as folder,
        settings.override(batch_invariant=True, progress=False),
    ):
        store = CacheStore(Path(folder), layers=[])
        dispatch.default_dispatcher.made = Dispatcher(mine.registry, mine.tuner, store)
        for n, k in weights:
            if time.perf_counter() > until:
                break
            try:
                w = torch.randn(n, k, device=options.device, dtype=dtype)
                x = torch.randn(max(ROWS), k, device=options.device, dtype=dtype)
                began = time.perf_counter()
                alone = tmm_core.plan(x[:1], w.T)(x[:1], w.T).clone()
                each: Row = {"n": n, "k": k, "first_s": time.perf_counter() - began, "rows": []}
                found.append(each)
                for m in ROWS:
                    each["rows"].append(measured(x[:m], w, alone))
                each["records"] = recorded(tmm_core.problem(x[:1], w.T))
            except Exception as error:  # one weight must not cost the others
                print(f"{n}×{k}: {type(error).__name__}: {error}"[:300])
            warm.forget_plans()
        worst = min(
            ((row["ratio"], each, row) for each in found for row in each["rows"]),
            key=lambda each: each[0],
            default=None,
        )
        if worst is not None and time.perf_counter() < until:
            n, k, m = worst[1]["n"], worst[1]["k"], worst[2]["m"]
            w = torch.randn(n, k, device=options.device, dtype=dtype)
            try:
                search = searched(torch.randn(m, k, device=options.device, dtype=dtype), w)
            except Exception as error:
                print(f"search: {type(error).__name__}: {error}"[:300])
        dispatch.default_dispatcher.made = mine
    print(table(found))
    for each in found[:3]:
        print(f"{each['n']}×{each['k']}, BLAS over each arithmetic in its records:")
        for m, ratios in each.get("records", {}).items():
            print(f"  {m}: {ratios}")
    if search is not None:
        print(f"every config for {search['problem']}:")
        for kind, (us, name) in search["best"]:
            print(f"  {kind}: {us:.1f} µs, {name}"[:200])
    output = options.output
    if output is None and (out := os.environ.get("OUT")):
        output = Path(out) / "invariant_weights.json"
    if output is not None:
        about = torch.cuda.get_device_name() if on_gpu else "CPU"
        document = {"device": about, "torch": torch.__version__, "weights": found}
        output.write_text(json.dumps({**document, "search": search}, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
