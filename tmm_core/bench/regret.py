"""What choosing once per bucket of M costs inside the bucket.

The M of a serving loop is any number. Its choice is the one made at its bucket's edge, so for
random M it is held against BLAS and against the best that is known for that weight: the winners
of all its buckets and every kernel's best config in the M's own bucket, all timed at this M.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from contextlib import suppress

import torch
from tmm_cache import CandidateResult, TuningRecord

import tmm_core
from tmm_core import settings
from tmm_core.bench.case import Call, Case
from tmm_core.bench.providers import best_of_each
from tmm_core.bench.results import Document
from tmm_core.dispatch.timing import CudaTimer, HostTimer, Run, Timer, median
from tmm_core.launch.plan import Plan
from tmm_core.spec.bucket import bucket_edge
from tmm_core.spec.kernel import BASELINE

LARGEST_M = 8192
ROUNDS = 15


def sizes(count: int, seed: int = 0) -> list[int]:
    """``count`` values of M up to :data:`LARGEST_M`, as many in every octave."""
    generator = random.Random(seed)
    top = math.log(LARGEST_M)
    return sorted(round(math.exp(generator.uniform(0, top))) for _ in range(count))


def measure(
    device: torch.device,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    count: int = 60,
    budget: float | None = None,
) -> Document:
    """``x[M, K] @ w[N, K].T`` for ``count`` random M, its buckets tuned first."""
    timer: Timer = CudaTimer(device) if device.type == "cuda" else HostTimer()
    ms = sizes(count)
    edges = sorted({bucket_edge(m) for m in ms})
    problems = [_call(edge, n, k, dtype, device).problem() for edge in edges]
    with torch.no_grad():
        records = dict(zip(edges, tmm_core.tune(problems, budget=budget), strict=True))
        winners = [record.best for record in records.values()]
        points = [
            _point(_call(m, n, k, dtype, device), winners, records[bucket_edge(m)], timer)
            for m in ms
        ]
    return {
        "kind": "regret",
        "n": n,
        "k": k,
        "dtype": str(dtype).removeprefix("torch."),
        "buckets": len(edges),
        "points": points,
    }


def _call(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Call:
    return Case(m=m, n=n, k=k, dtype=dtype, layout="nt").call(device)


def _point(
    call: Call, winners: Sequence[CandidateResult], record: TuningRecord, timer: Timer
) -> Document:
    with settings.override(on_cache_miss="heuristic"):
        chosen = tmm_core.plan(call.a, call.b)
    plans = {_key(chosen): chosen}
    known = {_key(result): result for result in (*best_of_each(record).values(), *winners)}
    for key, result in known.items():
        if key not in plans:
            with suppress(Exception):  # a config of another M need not fit this one
                plans[key] = tmm_core.plan(
                    call.a, call.b, kernel=result.kernel, config=result.config
                )
    runs: list[Run] = [lambda p=p: p(call.a, call.b) for p in plans.values()]  # type: ignore[misc]
    timer.measure(runs, 2)
    times = dict(zip(plans, map(median, timer.measure(runs, ROUNDS)), strict=True))
    best = min(times, key=lambda key: times[key])
    blas = min(us for (kernel, _), us in times.items() if kernel == BASELINE)
    return {
        "m": chosen.problem.m,
        "bucket": bucket_edge(chosen.problem.m),
        "chosen": " ".join(_key(chosen)),
        "us": round(times[_key(chosen)], 3),
        "blas_us": round(blas, 3),
        "best": " ".join(best),
        "best_us": round(times[best], 3),
    }


def _key(candidate: Plan | CandidateResult) -> tuple[str, str]:
    """A kernel's name and its config as JSON."""
    return candidate.kernel, json.dumps(dict(candidate.config), sort_keys=True)
