"""Measures eight problems with the installed Triton, for a comparison with another release.

    python benchmarks/releases.py -o OLD.json
    PYTHONPATH=FOLDER_OF_ANOTHER_TRITON python benchmarks/releases.py --earlier OLD.json -o NEW.json

Each problem is tuned without records, and its choice and BLAS are timed in three captures. With
``--earlier`` the choice of the other run is timed too, compiled by this Triton. The runs are
compared by their ratios to BLAS, which does not depend on Triton. Each run takes a minute.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import triton
from tmm_cache import CacheStore

import tmm_core
from tmm_core import dispatch, settings
from tmm_core.bench import exhaustive
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.launch import warm
from tmm_core.spec.launcher import BASELINE, Bound
from tmm_core.verify.environment_faults import is_tried

#: M, N, K and the epilogue: squares, prefill, decode, a long K, odd sizes, a gated product.
SHAPES = [
    (4096, 4096, 4096, ""), (16, 4096, 14336, ""), (2048, 14336, 4096, "silu"),
    (33, 3840, 15360, ""), (256, 256, 32768, ""), (1024, 4001, 4096, ""),
    (2048, 28672, 4096, "swiglu"), (777, 5120, 5120, ""),
]  # fmt: skip
CAPTURES, ROUNDS, BURST_US = 3, 7, 4000.0

Row = dict[str, Any]


def measured(shape: tuple[int, int, int, str], device: str, earlier: Row | None) -> Row:
    m, n, k, name = shape
    epilogue = name or None
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    x = torch.randn(m, k, device=device, dtype=dtype)
    w = torch.randn(n, k, device=device, dtype=dtype)
    problem = tmm_core.problem(x, w.T, epilogue=epilogue)
    row: Row = {"problem": str(problem), "shape": list(shape)}
    began = time.perf_counter()
    (record,) = tmm_core.tune(problem)
    row["tuning_s"] = round(time.perf_counter() - began, 2)
    status: dict[str, int] = {}
    for result in record.candidates:
        status[result.status] = status.get(result.status, 0) + 1
    row["candidates"] = status
    failed = [c for c in record.candidates if c.status in ("failed", "wrong")]
    row["failed"] = {c.kernel: str(c.reason)[:200] for c in failed if is_tried(c.reason or "")}
    plan = tmm_core.plan(x, w.T, epilogue=epilogue)
    row |= {"kernel": plan.kernel, "config": plan.config}
    blas = dispatch.default_dispatcher().registry.kernel(BASELINE)
    usual = Bound.of(blas.bind(problem, blas.default_config(problem))).run
    launchers = {"blas": usual, "chosen": plan.launcher}
    if earlier is not None and "kernel" in earlier:
        try:
            other = tmm_core.plan(
                x, w.T, epilogue=epilogue, kernel=earlier["kernel"], config=earlier["config"]
            )
            launchers["the other's choice"] = other.launcher
        except Exception as error:  # the kernel declines this Triton
            row["declined"] = f"{type(error).__name__}: {error}"[:300]
    us, _ = exhaustive.race(
        problem, x.device, launchers, captures=CAPTURES, rounds=ROUNDS, burst_us=BURST_US
    )
    row["us"] = {name: round(each, 2) for name, each in us.items()}
    row["ratio"] = {name: round(us["blas"] / each, 4) for name, each in us.items()}
    if earlier is not None and "ratio" in earlier:
        row["over_earlier"] = round(row["ratio"]["chosen"] / earlier["ratio"]["chosen"], 4)
        if "the other's choice" in us:
            forced = row["ratio"]["the other's choice"] / earlier["ratio"]["chosen"]
            row["same_kernel_over_earlier"] = round(forced, 4)
    return row


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| problem | tuning, s | kernel | BLAS, µs | chosen, µs | ratio | over the other's ratio "
        "| same kernel and config |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "us" not in row:
            lines.append(f"| {row['problem']} | failed: {row['error'][:160]} | | | | | | |")
            continue
        same = row.get("same_kernel_over_earlier", row.get("declined", ""))
        lines.append(
            f"| {row['problem']} | {row['tuning_s']} | {row['kernel']} | {row['us']['blas']:.1f} "
            f"| {row['us']['chosen']:.1f} | {row['ratio']['chosen']:.3f} "
            f"| {row.get('over_earlier', '')} | {same} |"
        )
    for name, about in (
        ("over_earlier", "choices"), ("same_kernel_over_earlier", "the same kernels and configs"),
    ):  # fmt: skip
        if known := [row[name] for row in rows if name in row]:
            mean = geometric_mean(known)
            lines += ["", f"Over the other's: {about} {mean:.4f} in the mean, {min(known):.3f} at "]
            lines[-1] += f"worst, of {len(known)}."
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None, shapes: Any = SHAPES) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--earlier", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="begins no problem after these")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    runs: list[Row] = []
    if options.earlier is not None and options.earlier.exists():
        runs = json.loads(options.earlier.read_text())["rows"]
    until = time.perf_counter() + options.seconds
    rows: list[Row] = []
    mine = dispatch.default_dispatcher()
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(record=True) as caught,
        settings.override(progress=False),
    ):
        warnings.simplefilter("always")
        store = CacheStore(Path(folder), layers=[])
        dispatch.default_dispatcher.made = Dispatcher(mine.registry, mine.tuner, store)
        for shape in shapes:
            if time.perf_counter() > until:
                break
            try:
                known = next((row for row in runs if row.get("shape") == list(shape)), None)
                rows.append(measured(shape, options.device, known))
            except Exception as error:  # one problem must not cost the others
                name = "×".join(map(str, shape[:3]))
                rows.append({"problem": name, "error": f"{type(error).__name__}: {error}"})
            warm.forget_plans()
        dispatch.default_dispatcher.made = mine
    print(f"Triton {triton.__version__}, torch {torch.__version__}")
    print(table(rows))
    messages = sorted({str(each.message)[:300] for each in caught})
    for text in messages[:8]:
        print(f"warning: {text}")
    for row in rows:
        for kernel, reason in row.get("failed", {}).items():
            print(f"{row['problem']}: {kernel}: {reason}"[:220])
    document = {"triton": triton.__version__, "torch": torch.__version__, "rows": rows}
    options.output.write_text(json.dumps({**document, "warnings": messages}, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
