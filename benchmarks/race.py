"""Races of any candidates for one problem, for the scripts beside this one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import torch

from tmm_core import dispatch
from tmm_core.spec.kernel import Candidate, Kernel
from tmm_core.spec.launcher import Bound, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.tuning.cold_operands import Copies
from tmm_core.tuning.timing import normalised, timer_for

#: Seconds to wait for the compilation of one candidate.
PATIENCE = 120.0
#: Bytes that the copies of a race may take.
MEMORY = int(12e9)


def race(
    problem: Problem,
    device: torch.device,
    launchers: Mapping[str, Launcher],
    *,
    captures: int,
    rounds: int,
    burst_us: float,
) -> dict[str, float]:
    """The µs of each launcher in use. They are medians over fresh captures, because the same
    product in two graphs differs by up to 4 %."""
    use: dict[str, list[float]] = {name: [] for name in launchers}
    for _ in range(captures):
        timer, copies = timer_for(device), Copies(problem, device, MEMORY)
        runs = [copies.runner(launcher) for launcher in launchers.values()]
        count = len(runs[0].inputs)
        times = normalised(timer.measure(runs, rounds, copies=count, burst_us=burst_us))
        for name, samples in zip(launchers, times, strict=True):
            use[name].append(median(samples))
        timer.release()
        del timer, copies, runs
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {name: median(values) for name, values in use.items()}


def proposed(problem: Problem, kernels: Iterable[Kernel[Any]]) -> dict[str, Candidate]:
    """The candidates in the kernels' search spaces, by name."""
    found = [
        Candidate(kernel, config)
        for kernel in kernels
        for config in (kernel.default_config(problem), *kernel.configs(problem))
        if not config.unmet_promises(problem)
    ]
    texts = (json.dumps(each.config.to_json(), sort_keys=True) for each in found)
    return {f"{each.kernel.name} {text}": each for each, text in zip(found, texts, strict=True)}


def bound(
    problem: Problem, device: torch.device, candidates: Mapping[str, Candidate]
) -> tuple[dict[str, Launcher], dict[str, Any]]:
    """The launchers of the candidates that compile and run, and why the others do not."""
    compilers = dispatch.default_dispatcher().tuner.compilers
    compiling = {name: compilers.submit(problem, each) for name, each in candidates.items()}
    launchers, failed = {}, {}
    copies = Copies(problem, device, problem.bytes)  # one
    for name, each in candidates.items():
        try:
            compiling[name].result(timeout=PATIENCE)
            launcher = Bound.of(each.kernel.bind(problem, each.config)).run
            copies.runner(launcher)(0)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            launchers[name] = launcher
        except Exception as error:  # costs this candidate alone
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    return launchers, failed
