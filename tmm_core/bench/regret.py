"""The cost of choosing once per bucket of M, at sizes that were not tuned.

A serving loop meets any M and uses its bucket's record. Random problems (M, weight and epilogue),
from a fixed seed, are compared with eager torch and with the best known candidate, among those that
the record has timed; all are timed in use at exactly this M.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from statistics import median

import torch
from tmm_cache import CandidateResult

import tmm_core
from tmm_core import settings
from tmm_core.bench import providers
from tmm_core.bench.case import Call, Case, parse_expression
from tmm_core.bench.results import Document
from tmm_core.bench.runner import planned
from tmm_core.launch.plan import Plan
from tmm_core.spec.bucket import bucket_edge, bucketed
from tmm_core.tuning import cold_operands
from tmm_core.tuning.ranking import by_time
from tmm_core.tuning.timing import GraphTimer, HostTimer, Run, levelled, timer_for

LARGEST_M = 8192
ROUNDS = 11
#: Candidates of the record that are timed in addition to the choice, fastest first.
MOST_KNOWN = 5

#: Weights N×K of models: projections of Llama 3 8B, Qwen 2.5 14B and 32B, Llama 3 70B on eight
#: GPUs, Mistral 7B and GPT-2 XL.
WEIGHTS = (
    (6144, 4096), (4096, 4096), (4096, 14336), (7168, 5120), (5120, 5120), (5120, 13824),
    (27648, 5120), (13824, 5120), (1280, 8192), (8192, 3584), (4096, 7168), (6400, 1600),
)  # fmt: skip
EXPRESSIONS = ("", "", "silu", "gelu_tanh", "bias", "bias+gelu_tanh+residual", "residual", "swiglu")


def cases(count: int, dtype: torch.dtype = torch.bfloat16) -> list[Case]:
    """``count`` random problems with M log-uniform in 1 … :data:`LARGEST_M`."""
    generator = random.Random(0)
    found = []
    for _ in range(count):
        m = round(math.exp(generator.uniform(0, math.log(LARGEST_M))))
        n, k = generator.choice(WEIGHTS)
        expression = parse_expression(generator.choice(EXPRESSIONS))
        found.append(Case(m=m, n=n, k=k, dtype=dtype, layout="nt", **expression))
    return found


def measure(
    device: torch.device,
    asked: Iterable[Case],
    *,
    budget: float | None = None,
    deadline: float = math.inf,
) -> Iterator[Document]:
    """One document for each of the ``asked`` problems, until ``time.monotonic()`` reaches the
    deadline; each one's bucket is tuned first."""
    timer = timer_for(device)
    for case in asked:
        if time.monotonic() >= deadline:
            return
        document: Document = {"kind": "regret", "case": case.to_json()}
        try:
            with torch.no_grad(), settings.override(on_cache_miss="heuristic"):
                document |= _point(case.call(device), timer, budget)
        except Exception as error:  # such as out of memory: affects this problem only
            document["failed"] = f"{type(error).__name__}: {error}"
        timer.release()
        yield document


def _point(call: Call, timer: GraphTimer | HostTimer, budget: float | None) -> Document:
    problem = call.problem()
    edge = bucketed(problem.bare())
    (record,) = tmm_core.tune([edge], budget=budget)
    chosen = call.plan()
    plans = {_key(chosen): chosen}
    for result in by_time(record)[:MOST_KNOWN]:
        if _key(result) not in plans:
            with suppress(Exception):  # a config for another M may not fit this one
                plans[_key(result)] = call.plan(kernel=result.kernel, config=result.config)
    calls = cold_operands.rotated(call, problem)
    runs: list[Run] = [providers.eager(calls), *(planned(p, calls) for p in plans.values())]
    theirs, *ours = map(median, levelled(timer.measure(runs, ROUNDS, copies=len(calls))))
    times = dict(zip(plans, ours, strict=True))
    best = min(times, key=lambda key: times[key])
    return {
        "bucket": bucket_edge(problem.m),
        "chosen": " ".join(_key(chosen)),
        "reason": chosen.choice.reason,
        "us": round(times[_key(chosen)], 3),
        "torch_us": round(theirs, 3),
        "best": " ".join(best),
        "best_us": round(times[best], 3),
        "tuning_seconds": record.tuning_seconds,
    }


def _key(candidate: Plan | CandidateResult) -> tuple[str, str]:
    """A kernel's name and its config as JSON."""
    return candidate.kernel, json.dumps(dict(candidate.config), sort_keys=True)
