"""Host cost of a warm call: µs from one call to the next, without waiting for the GPU.

Matrices are tiny, so that the GPU finishes each before the next is launched. Calls come in batches
with a synchronisation between, so that no launch waits for room in the queue.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

import tmm_core
from tmm_core import settings
from tmm_core.bench.case import Case
from tmm_core.bench.results import Document
from tmm_core.launch.collector import collector_off
from tmm_core.spec.operand import dtype_name

SIZE = 16
#: Calls per batch, of at most two launches each: well within the 1024 that a queue holds.
CALLS = 100
REPEATS = 200
WARM = 10


def measure(device: torch.device, *, tune: bool = True, budget: float | None = None) -> Document:
    """Median host cost in µs per call of equivalent torch and tmm calls.

    Args:
        tune: Tune the three problems first, so that tmm launches the kernels that it would use.
        budget: Seconds of tuning per problem; None: the settings' value.
    """
    call = Case(m=SIZE, n=SIZE, k=SIZE, bias=True).call(device)
    x, w, bias = call.a, call.b, call.bias
    assert bias is not None
    out = torch.empty_like(x)
    arguments: dict[str, tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = {
        "plain": (x, w, {}),
        "silu": (x, w, {"epilogue": "silu"}),
        "linear+bias": (x, w.t(), {"bias": bias}),
    }
    matmul, linear = tmm_core.matmul, tmm_core.linear
    with torch.no_grad(), nullcontext() if tune else settings.override(on_cache_miss="heuristic"):
        if tune:
            problems = [tmm_core.problem(a, b, **more) for a, b, more in arguments.values()]
            tmm_core.tune(problems, budget=budget)
        plans = {name: tmm_core.plan(a, b, **more) for name, (a, b, more) in arguments.items()}
        plan, fused = plans["plain"], plans["silu"]
        calls: dict[str, Callable[[], object]] = {
            "torch.matmul(x, w)": lambda: torch.matmul(x, w),
            "torch.mm(x, w, out=out)": lambda: torch.mm(x, w, out=out),
            "F.silu(torch.matmul(x, w))": lambda: F.silu(torch.matmul(x, w)),
            "F.linear(x, w, bias)": lambda: F.linear(x, w, bias),
            "tmm.matmul(x, w)": lambda: matmul(x, w),
            'tmm.matmul(x, w, epilogue="silu")': lambda: matmul(x, w, epilogue="silu"),
            "tmm.linear(x, w, bias)": lambda: linear(x, w, bias),
            "plan(x, w)": lambda: plan(x, w),
            "plan(x, w, out=out)": lambda: plan(x, w, out=out),
            'plan(x, w) of epilogue="silu"': lambda: fused(x, w),
            "torch.matmul(x, w) again": lambda: torch.matmul(x, w),
        }
        costs = host_us(calls, device)
    return {
        "kind": "host",
        "dtype": dtype_name(x.dtype),
        "size": SIZE,
        "kernels": {name: str(each.choice.candidate) for name, each in plans.items()},
        "us": {name: round(us, 2) for name, us in costs.items()},
    }


def host_us(
    calls: dict[str, Callable[[], object]], device: torch.device, repeats: int = REPEATS
) -> dict[str, float]:
    """Median µs per call; each repeat times a batch of every call, one after the other."""
    for call in calls.values():
        for _ in range(WARM):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    # A garbage collection in the middle of a batch is not a cost of the call it interrupts.
    with collector_off():
        for _ in range(repeats):
            for name, call in calls.items():
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                started = time.perf_counter()
                for _ in range(CALLS):
                    call()
                samples[name].append((time.perf_counter() - started) * 1e6 / CALLS)
    return {name: statistics.median(times) for name, times in samples.items()}
