"""Compares a tuning without records with an exhaustive search (``tmm bench --no-records``).

It shows what the tuning's choice costs, and which step of the tuning lost the best candidate.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from tmm_cache import CacheStore, CandidateResult, TuningRecord

from tmm_core import dispatch, settings
from tmm_core.bench.results import Document
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.errors import error_text
from tmm_core.launch import warm
from tmm_core.registry.query import read_config
from tmm_core.spec.kernel import SEARCH_LIMITED, Candidate, Kernel
from tmm_core.spec.launcher import BASELINE, Bound, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.tuning.cold_operands import Copies
from tmm_core.tuning.ranking import CLOSE, MARGIN
from tmm_core.tuning.stages import SCREENING, SECOND
from tmm_core.tuning.timing import CAPTURES, LONG_US, GraphTimer, normalised, timer_for
from tmm_core.verify.environment_faults import BUDGET_ENDED
from tmm_core.verify.verifier import Verifier

#: The screening of all candidates: rounds, and µs of a burst.
FIRST, FIRST_US = 3, 2000.0
#: The number of candidates that race against BLAS and the tuning's choice. Rounds in each capture
#: of the race, µs of a burst, and µs of a sample in steady state.
FINALISTS, ROUNDS, BURST_US, STEADY_US = 6, 7, 5000.0, 0.15e6
#: Seconds to wait for the compilation of one candidate.
PATIENCE = 120.0
#: Bytes that the copies of a race may take.
MEMORY = int(12e9)


@contextmanager
def without_records() -> Iterator[None]:
    """A context in which the process uses an empty cache. No record answers or serves as a hint,
    and no kernel is compiled yet."""
    process = dispatch.default_dispatcher
    usual = process()
    with tempfile.TemporaryDirectory(prefix="tmm-bench-", ignore_cleanup_errors=True) as folder:
        hidden = {"TRITON_CACHE_DIR": f"{folder}/triton", "TMM_REQUIRE_LOCKED": "0"}
        with patch.dict(os.environ, hidden):
            os.environ.pop("TMM_LOCK_FILE", None)
            with suppress(ImportError):  # without Triton no kernel was compiled
                from tmm_core.triton.launch import forget_compiled

                forget_compiled()
            store = CacheStore(Path(folder), layers=())
            process.made = Dispatcher(usual.registry, usual.tuner, store)
            try:
                yield
            finally:
                process.made = usual
                warm.forget_plans()


@functools.cache
def _compiled() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of the kernels compiled in all searches of the process. A config's code is
    mostly the same for every problem, and 130 configs take 16 cores ten seconds."""
    return tempfile.TemporaryDirectory(prefix="tmm-search-", ignore_cleanup_errors=True)


def search(problem: Problem, record: TuningRecord, device: torch.device) -> Document:
    """Race every config of every capable kernel against the choice of ``record``.

    All are screened. The fastest race with BLAS and the choice. The tuning's own rules choose the
    best: it is not slower than BLAS in steady state, and ahead of BLAS by a margin in use.
    """
    able = dispatch.default_dispatcher().able(problem, settings.current())
    chosen = _name(record.best)
    tried = {_name(result): result for result in record.candidates}
    proposed = _proposed(problem, able)
    limit = SEARCH_LIMITED.set(False)
    try:
        every = _proposed(problem, able) | proposed
    finally:
        SEARCH_LIMITED.reset(limit)
    winner = next(kernel for kernel in able if kernel.name == record.best.kernel)
    every |= {chosen: Candidate(winner, read_config(winner, record.best.config))}
    with patch.dict(os.environ, {"TRITON_CACHE_DIR": _compiled().name}):
        launchers, failed = _bound(problem, device, every)
    screened, _ = race(problem, device, launchers, captures=1, rounds=FIRST, burst_us=FIRST_US)
    ranked = sorted(screened, key=screened.__getitem__)
    baseline = [name for name in launchers if every[name].kernel.name == BASELINE]
    verifier = Verifier(problem, device, memory_limit=settings.current().tune_memory)
    finalists: dict[str, Launcher] = {}
    for name in ranked:
        if name in (chosen, *baseline):
            finalists[name] = launchers[name]
        elif len(set(finalists) - {chosen, *baseline}) < FINALISTS:
            if verifier.verdict(launchers[name]).ok:
                finalists[name] = launchers[name]
            else:
                failed[name] = "wrong"
    verifier.release()
    use, steady = race(
        problem, device, finalists, captures=CAPTURES, rounds=ROUNDS, burst_us=BURST_US, steady=True
    )
    blas = min(use[name] for name in baseline)
    blas_steady = min((steady[name] for name in baseline if name in steady), default=0.0)
    fair = [
        name for name in use if name in baseline or steady.get(name, 0) <= blas_steady * (1 + CLOSE)
    ]
    best = min(fair, key=use.__getitem__)
    if use[best] > blas * (1 - MARGIN):
        best = min(baseline, key=use.__getitem__)
    return {
        "chosen": chosen,
        "best": best,
        "step": step(best, chosen, tried, proposed),
        "regret": use[chosen] / use[best],
        "blas_over_best": blas / use[best],
        "candidates": len(every),
        "tried": len(tried),
        "failed": failed,
        "us": {name: round(us, 3) for name, us in use.items()},
        "steady_us": {name: round(us, 3) for name, us in steady.items()},
    }


def step(
    best: str, chosen: str, tried: Mapping[str, CandidateResult], proposed: Iterable[str]
) -> str:
    """The step of the tuning that lost the best candidate."""
    if best == chosen:
        return "found"
    if best not in tried:
        return "proposed, but not tried" if best in proposed else "never proposed"
    result = tried[best]
    samples = len(result.samples_us)
    if not samples:
        late = BUDGET_ENDED in (result.reason or "")
        return "not compiled in time" if late else f"{result.status}: {result.reason}"[:80]
    if samples <= SCREENING:
        return "lost in the screening round"
    if samples <= SECOND:
        return "lost in the second round"
    return f"lost in the {'deciding' if result.steady_us is None else 'steady-state'} round"


def race(
    problem: Problem,
    device: torch.device,
    launchers: Mapping[str, Launcher],
    *,
    captures: int,
    rounds: int,
    burst_us: float,
    steady: bool = False,
) -> tuple[dict[str, float], dict[str, float]]:
    """The µs of each launcher in use, and on request in steady state if all are long enough. They
    are medians over fresh captures, because the same product in two graphs differs by up to 4 %."""
    use: dict[str, list[float]] = {name: [] for name in launchers}
    slow: dict[str, list[float]] = {name: [] for name in launchers}
    for _ in range(captures):
        timer, copies = timer_for(device), Copies(problem, device, MEMORY)
        runs = [copies.runner(launcher) for launcher in launchers.values()]
        count = len(runs[0].inputs)
        times = normalised(timer.measure(runs, rounds, copies=count, burst_us=burst_us))
        for name, samples in zip(launchers, times, strict=True):
            use[name].append(median(samples))
        long = min(median(samples) for samples in times) >= LONG_US
        if steady and long and isinstance(timer, GraphTimer):
            found = timer.steady(runs, 1, copies=count, steady_us=STEADY_US)
            for name, samples in zip(launchers, found, strict=True):
                slow[name] += samples
        timer.release()
        del timer, copies, runs
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {n: median(v) for n, v in use.items()}, {n: median(v) for n, v in slow.items() if v}


def _name(result: CandidateResult) -> str:
    return f"{result.kernel} {json.dumps(dict(result.config), sort_keys=True)}"


def _proposed(problem: Problem, kernels: Iterable[Kernel[Any]]) -> dict[str, Candidate]:
    """The candidates in the kernels' search spaces, by name."""
    found = [
        Candidate(kernel, config)
        for kernel in kernels
        for config in (kernel.default_config(problem), *kernel.configs(problem))
        if not config.unmet_promises(problem)
    ]
    texts = (json.dumps(each.fields, sort_keys=True) for each in found)
    return {f"{each.kernel.name} {text}": each for each, text in zip(found, texts, strict=True)}


def _bound(
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
            failed[name] = error_text(error)[:200]
    return launchers, failed
