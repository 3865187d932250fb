"""Measures the stages of a first tuning. Problems without records are tuned one after the other in
the foreground, with a cold compile cache.

    python benchmarks/tuning_time.py [--seconds 70] [--only decode square] [-o FILE.json]

For each problem the table shows the total seconds, the wait for compiling and loading kernels, and
the seconds in each later stage. It also has the numbers of compile jobs that ended and that were
cancelled, the number of timed candidates, and the times of the winner and of BLAS. The JSON adds
the begin and end of each job, each stage with its share of the host's time, and the records. It is
``$OUT/tuning_time.json`` by default. A small first problem starts the compilers and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from quantised import quantised
from tmm_cache import CacheStore, TuningRecord

import tmm_core
from tmm_core import dispatch, settings
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem
from tmm_core.tuning.compile_pool import Compilers
from tmm_core.tuning.stages import Tuning

#: A class, M, N, K, and the epilogue or the weight's format. Classes are interleaved, since a run
#: may end before the list does.
SHAPES = [
    ("decode", 16, 4096, 4096, ""), ("square", 4096, 4096, 4096, ""),
    ("prefill", 2048, 14336, 4096, ""), ("epilogue", 1024, 5120, 5120, "gelu"),
    ("int4", 16, 14336, 4096, "int4"), ("between", 320, 9728, 2560, ""),
    ("decode", 64, 28672, 4096, ""), ("square", 2304, 2304, 2304, ""),
    ("prefill", 6144, 8192, 3584, ""), ("epilogue", 256, 13824, 5120, "silu"),
    ("int4", 256, 4096, 4096, "int4"), ("between", 640, 1280, 8192, ""),
    ("decode", 1, 5120, 13824, ""), ("square", 1536, 1536, 1536, ""),
    ("prefill", 3584, 4096, 7168, ""), ("epilogue", 4096, 8192, 2048, "relu"),
    ("between", 160, 7168, 5120, ""), ("decode", 33, 6400, 1600, ""),
]  # fmt: skip
#: The problem that starts the compilers.
FIRST = ("first", 512, 1024, 512, "")
COMPILING = "compiling and loading"
#: The stage of a tuning that waits in a generator; the first counts.
STAGES = {
    "measure_at": "other M", "_verify_whole": "verifying the winner",
    "_verify": "verifying candidates", "_measure_in_steady_state": "steady state",
    "_measure": "timing",
}  # fmt: skip


@dataclass
class Row:
    """One problem's seconds."""

    kind: str
    problem: str
    seconds: float = 0.0
    #: Seconds by stage: all, and the part in which this thread ran on a CPU.
    stages: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    #: Each stage's begin and end, in order.
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    #: Compile jobs: the kernel, config and M, begin, end, and how it ended.
    jobs: list[dict[str, Any]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    winner: str = ""
    winner_us: float = 0.0
    blas_us: float = 0.0
    timed: int = 0


def stage_of(steps: Any) -> str:
    """The stage in which a tuning's generator waits, by the generators that it runs."""
    names = []
    while steps is not None and (code := getattr(steps, "gi_code", None)) is not None:
        names.append(code.co_name)
        steps = steps.gi_yieldfrom
    return next((stage for name, stage in STAGES.items() if name in names), COMPILING)


class Watch:
    """Notes jobs and stages of the current tuning in its row."""

    def __init__(self) -> None:
        self.row = Row("", "")
        self.began = 0.0

    def now(self) -> float:
        return round(time.perf_counter() - self.began, 4)

    def install(self) -> None:
        submit, run = Compilers.submit, Tuning.run

        def submitted(pool: Compilers, problem: Problem, candidate: Any, **more: Any) -> Any:
            row, job = self.row, {"kernel": candidate.kernel.name, "at": problem.extent}
            job |= {"config": candidate.config.to_json(), "begin": self.now()}
            row.jobs.append(job)
            future = submit(pool, problem, candidate, **more)

            def ended(future: Any) -> None:
                job["end"] = self.now()
                failed = None if future.cancelled() else future.exception()
                job["how"] = "cancelled" if future.cancelled() else str(failed or "")[:100]

            future.add_done_callback(ended)
            return future

        def watched(tuning: Tuning, search: Any) -> Any:
            row, steps, rested = self.row, run(tuning, search), None
            spans, seconds, host = row.spans, defaultdict(float), defaultdict(float)
            try:
                while True:
                    begun, busy = self.now(), time.thread_time()
                    try:
                        pending = steps.send(rested)
                    except StopIteration:
                        return
                    finally:
                        ended = steps.gi_frame is None
                        stage = spans[-1][0] if ended and spans else stage_of(steps)
                        host[stage] += time.thread_time() - busy
                        if not spans or spans[-1][0] != stage:
                            spans.append((stage, begun, begun))
                    rested = yield pending
                    seconds[stage] += self.now() - begun
                    spans[-1] = stage, spans[-1][1], self.now()
            finally:
                steps.close()
                row.stages = {stage: round(s, 3) for stage, s in seconds.items()}
                row.host = {stage: round(s, 3) for stage, s in host.items()}

        Compilers.submit = submitted  # type: ignore[method-assign]
        Tuning.run = watched  # type: ignore[method-assign]

    def tune(self, chooser: Dispatcher, kind: str, problem: Problem) -> Row:
        self.row = row = Row(kind, str(problem))
        self.began = time.perf_counter()
        with settings.override(progress=False) as current:
            record = chooser.tune(problem, current, force=True)
        row.seconds = round(time.perf_counter() - self.began, 3)
        conclude(row, record)
        return row


def conclude(row: Row, record: TuningRecord) -> None:
    row.record = record.to_json()
    best = record.best
    row.winner = " ".join([best.kernel, *(f"{k}={v}" for k, v in best.config.items())])
    row.winner_us = best.median_us or 0.0
    blas = [c.median_us for c in record.candidates if c.kernel == BASELINE and c.median_us]
    row.blas_us = min(blas, default=0.0)
    row.timed = sum(bool(c.samples_us) for c in record.candidates)


def problem_of(m: int, n: int, k: int, name: str, device: torch.device) -> Problem:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.empty(m, k, device=device, dtype=dtype)
    if name in ("int4", "int8", "mxfp4"):
        return bucketed(tmm_core.problem(x, quantised(name, n, k, device=device).T))
    w = torch.empty(n, k, device=device, dtype=dtype)
    return bucketed(tmm_core.problem(x, w.T, epilogue=name or None))


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| | problem | s | compiling, loading | verifying | timing | steady state | other M "
        "| jobs | cancelled | timed | winner | µs | BLAS, µs |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        get = row.stages.get
        verifying = get("verifying candidates", 0.0) + get("verifying the winner", 0.0)
        cancelled = sum(job.get("how") == "cancelled" for job in row.jobs)
        lines.append(
            f"| {row.kind} | {row.problem} | {row.seconds:.2f} | {get(COMPILING, 0.0):.2f} "
            f"| {verifying:.2f} | {get('timing', 0.0):.2f} | {get('steady state', 0.0):.2f} "
            f"| {get('other M', 0.0):.2f} | {len(row.jobs) - cancelled} | {cancelled} "
            f"| {row.timed} | {row.winner.split()[0]} | {row.winner_us:.1f} | {row.blas_us:.1f} |"
        )
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    seconds = sorted(row.seconds for row in rows)
    if len(seconds) < 2:
        return "Too few problems for a median."
    ninth = statistics.quantiles(seconds, n=10, method="inclusive")[-1]
    stages = {stage for row in rows for stage in row.stages}
    of = {s: statistics.median(row.stages.get(s, 0.0) for row in rows) for s in stages}
    parts = ", ".join(f"{s} {us:.2f}" for s, us in sorted(of.items(), key=lambda each: -each[1]))
    return (
        f"{len(rows)} problems: {statistics.median(seconds):.2f} s in the median, {ninth:.2f} at "
        f"the ninth decile, {seconds[-1]:.2f} at most. Medians of stages: {parts}."
    )


def main(arguments: Sequence[str] | None = None, shapes: Any = SHAPES) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=70.0, help="begins no problem after these")
    parser.add_argument("--only", nargs="*", help="classes")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(arguments)
    device, until = torch.device(options.device), time.perf_counter() + options.seconds
    asked = [shape for shape in shapes if not options.only or shape[0] in options.only]
    watch, rows = Watch(), []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder, "triton"))
        mine = dispatch.default_dispatcher()
        chooser = Dispatcher(mine.registry, mine.tuner, CacheStore(Path(folder, "a"), layers=[]))
        tmm_core.preload()
        problems = [(kind, problem_of(*shape, device)) for kind, *shape in [FIRST, *asked]]
        watch.install()
        first = watch.tune(chooser, *problems.pop(0))
        print(f"the process's first problem: {first.seconds:.2f} s", flush=True)
        for place, (kind, problem) in enumerate(problems):
            if time.perf_counter() > until:
                break
            store = CacheStore(Path(folder, f"store {place}"), layers=[])
            rows.append(watch.tune(Dispatcher(mine.registry, mine.tuner, store), kind, problem))
            print(f"{rows[-1].seconds:.2f} s {rows[-1].problem}: {rows[-1].winner}", flush=True)
    text = table(rows) + "\n\n" + summary(rows)
    print("\n" + text)
    output = options.output
    if output is None and (out := os.environ.get("OUT")):
        output = Path(out) / "tuning_time.json"
    if output is not None:
        about = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        document = {"device": about, "torch": torch.__version__, "cores": os.cpu_count()}
        document |= {"first": asdict(first), "rows": [asdict(row) for row in rows]}
        output.write_text(json.dumps(document, indent=None) + "\n")
        output.with_suffix(".md").write_text(text + "\n")
    return rows


if __name__ == "__main__":
    main()
