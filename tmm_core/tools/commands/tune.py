"""``tmm tune``: measures problems ahead of time, saving one record after the other."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tmm_base import UsageError
from tmm_base.console import DONE, FOUND, INTERRUPTED, note, print_json, print_paragraph
from tmm_cache.record import CandidateResult

import tmm_core
from tmm_core import dispatch
from tmm_core.bench import report, runner, suites
from tmm_core.errors import error_text, reraise
from tmm_core.launch import warm
from tmm_core.spec.device import fingerprint
from tmm_core.spec.precision import precision
from tmm_core.spec.problem import Problem
from tmm_core.tools.commands import options as shared
from tmm_core.tools.commands.misses import title
from tmm_core.tuning.first_launch import FirstLaunches
from tmm_core.verify.environment_faults import is_tried

#: The status of candidates that were not tried: others were expected to be faster, or the budget
#: ended.
LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Pending:
    """A problem to tune, not built yet: the operands of only one exist at a time."""

    name: str
    tf32: bool
    make: Callable[[], Problem]


def run(options: argparse.Namespace) -> int:
    device = shared.device(options)
    pending = _pending(options, device)
    if not pending:
        note("nothing to tune")
    outcomes: list[dict[str, Any]] = []
    interrupted = False
    # With --json stdout is one document, so progress goes to stderr.
    say = partial(print_paragraph, hanging=6, file=sys.stderr if options.json else None)
    with ExitStack() as stack:
        if options.isolate:
            tuner = dispatch.default_dispatcher().tuner
            tuner.first_launches = stack.enter_context(closing(FirstLaunches(device)))
            stack.callback(setattr, tuner, "first_launches", None)
        for number, item in enumerate(pending, start=1):
            try:
                if number < len(pending):
                    following = pending[number]
                    runner.prepare(following.make, following.tf32, options.force)
                outcome = _tune(item, options)
            except KeyboardInterrupt:
                done = f"{number - 1} of {len(pending)} are done, and their records saved"
                note(f"interrupted; {done}")
                interrupted = True
                break
            outcomes.append(outcome)
            say(f"[{number:{len(str(len(pending)))}}/{len(pending)}] {_line(outcome)}")
    if options.json:
        print_json(outcomes)
    if interrupted:
        return INTERRUPTED
    return FOUND if any(outcome["status"] == "failed" for outcome in outcomes) else DONE


def _pending(options: argparse.Namespace, device: torch.device) -> list[Pending]:
    cases = shared.cases(options, options.shapes)
    if options.suite:
        with shared.usage():
            cases += [task.case for task in suites.select(options.suite, dtype=options.dtype)]
    pending = [Pending(str(case), case.tf32, partial(case.problem, device)) for case in cases]
    if options.misses:
        pending += _of_misses(device)
    if not (options.shapes or options.suite or options.misses):
        raise UsageError("give shapes (4096x4096x4096), --suite or --misses")
    return pending


def _of_misses(device: torch.device) -> list[Pending]:
    store, here = dispatch.default_dispatcher().store, fingerprint(device)
    misses = store.misses()
    local = [miss for miss in misses if miss.gpu == here.gpu]
    if others := len(misses) - len(local):
        note(f"{others} of {len(misses)} misses belong to other devices; tune them there")
    # Misses met under other versions are tuned under the present ones.
    problems = {json.dumps(miss.problem, sort_keys=True): miss.problem for miss in local}
    return [
        Pending(title(each), bool(each.get("tf32")), partial(warm.recall, each, device))
        for each in problems.values()
    ]


def _tune(item: Pending, options: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()
    outcome: dict[str, Any] = {"problem": item.name}
    try:
        with precision(item.tf32):
            problem = item.make()
            outcome |= {"problem": str(problem), "key": problem.to_json()}
            store, device = dispatch.default_dispatcher().store, problem.device
            before = store.load(device.gpu, device.environment, problem.to_json())
            [record] = tmm_core.tune(problem, force=options.force, budget=options.budget)
    except Exception as error:
        reraise(error)
        outcome |= {"status": "failed", "reason": error_text(error)}
    else:
        outcome |= {
            "status": "on record" if record == before else "tuned",
            "kernel": record.best.kernel,
            "config": dict(record.best.config),
            "median_us": record.best.median_us,
            "blas_us": record.blas_us,
            "candidates": dict(Counter(map(_status, record.candidates))),
        }
        if (noted := dispatch.default_dispatcher().untried.get(problem.bare())) and noted.kernels:
            outcome["untried"] = {name: why.reason for (name, _), why in noted.kernels.items()}
    outcome["seconds"] = round(time.monotonic() - started, 2)
    return outcome


def _status(result: CandidateResult) -> str:
    """The status of a candidate, or :data:`LEFT_OUT`. Records call both kinds failed."""
    if result.status == "failed" and not is_tried(result.reason or ""):
        return LEFT_OUT
    return result.status


def _line(outcome: Mapping[str, Any]) -> str:
    if outcome["status"] == "failed":
        return f"{outcome['problem']}  failed: {outcome['reason']}"
    us, blas = outcome["median_us"], outcome["blas_us"]
    against = f", {blas / us:.2f}× blas" if us and blas else ""
    tried = outcome["candidates"]
    notes = [
        "on record" if outcome["status"] == "on record" else f"{outcome['seconds']:.1f} s",
        f"{sum(tried.values()) - tried.get(LEFT_OUT, 0)} tried",
        *(f"{tried[fault]} {fault}" for fault in ("wrong", "failed") if fault in tried),
    ]
    if left := outcome.get("untried"):
        notes.append(f"{len(left)} untried: {' '.join(next(iter(left.values())).split())[:160]}")
    chosen = report.chosen(outcome)
    return f"{outcome['problem']}  {chosen}  {us:.1f} µs{against}  ({', '.join(notes)})"
