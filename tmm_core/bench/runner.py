"""Times every task's providers interleaved, with the in-use clock of :mod:`tmm_core.tuning.timing`.

torch is timed twice in the same loop. A difference between columns that is smaller than the
difference between torch's two series is noise.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import tmm_core
from tmm_core import dispatch, settings
from tmm_core.bench import exhaustive, grouped_baselines, providers
from tmm_core.bench.case import Call
from tmm_core.bench.results import Document
from tmm_core.bench.series import Series, capable
from tmm_core.bench.suites import Task
from tmm_core.errors import error_text
from tmm_core.launch import warm
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.precision import precision
from tmm_core.spec.problem import Problem
from tmm_core.tuning import cold_operands
from tmm_core.tuning.stages import SETTLE
from tmm_core.tuning.timing import (
    CAPTURES,
    LONG_US,
    GraphTimer,
    HostTimer,
    Run,
    normalised,
    timer_for,
)
from tmm_core.verify import compare

#: Columns every measured problem has.
TORCH, AGAIN, TMM = "torch", "torch again", "tmm"
INDUCTOR = "inductor"

#: Rounds of the loop: a quartile needs some ten samples; beyond a few hundred, drift of the GPU's
#: clocks dominates the median's error.
LEAST_ROUNDS, MOST_ROUNDS = 11, 300
#: Samples of each column by the clock "steady", and µs of each.
STEADY_ROUNDS, STEADY_US = 4, 0.15e6
#: Samples of the clock "alone", which is reported but does not decide.
ALONE_ROUNDS = 15
#: Elements that the small kernel between the calls doubles: a norm's worth of work.
BETWEEN = 8192
#: Prefix of the columns of further candidates that race against the choice.
KNOWN = "known "


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The quantities to measure for each task, and the time to spend on them.

    Args:
        tune: Tune the task's problem first, unless it has a record.
        records: Whether records answer; else every problem is tuned without any, and its choice is
            compared with an exhaustive search.
        budget: Seconds of tuning per problem; None: the settings' value.
        kernels: Also time the best config of every capable kernel.
        series: Single kernels to time as well.
        inductor: Also time ``torch.compile`` of the eager code.
        clocks: Also report the clocks "alone" and "steady", and chains with a small kernel
            between the calls.
        seconds: Seconds of timing per problem, after tuning.
        deadline: ``time.monotonic()`` after which no task is started.
    """

    tune: bool = True
    records: bool = True
    budget: float | None = None
    kernels: bool = False
    series: tuple[Series, ...] = ()
    inductor: bool = False
    clocks: bool = False
    seconds: float = 0.5
    deadline: float = float("inf")


def run(tasks: Sequence[Task], device: torch.device, options: Options) -> Iterator[Document]:
    """Measure one task after the other; one document each. Ends early at the deadline.

    A task's failure is noted in its document and affects no other task.
    """
    timer = timer_for(device)
    for task, following in itertools.zip_longest(tasks, tasks[1:]):
        if time.monotonic() >= options.deadline:
            return
        if options.tune and options.records and following and not following.batch_invariant:
            prepare(partial(_problem_of, following, device), following.case.tf32)
        kind = "regret" if task.bucketed else "problem"
        document: Document = {"kind": kind, "suite": task.suite, "case": task.case.to_json()}
        started = time.monotonic()
        try:
            with nullcontext() if options.records else exhaustive.without_records():
                _measure(task, device, options, timer, document)
        except Exception as error:  # out of memory, a kernel's illegal access, …
            document["failed"] = error_text(error)
        timer.release()
        _release(device)
        document["seconds"] = round(time.monotonic() - started, 2)
        yield document


def prepare(make: Callable[[], Problem], tf32: bool, force: bool = False) -> None:
    """Start compiling the kernels of a problem, while another is measured."""
    with suppress(Exception), precision(tf32):  # its own measurement reports the error
        dispatch.default_dispatcher().prepare(make(), settings.current(), force)


def _problem_of(task: Task, device: torch.device) -> Problem:
    """The problem to tune for a task."""
    problem = task.case.problem(device)
    return bucketed(problem.bare()) if task.bucketed else problem


def _measure(
    task: Task,
    device: torch.device,
    options: Options,
    timer: GraphTimer | HostTimer,
    document: Document,
) -> None:
    # A problem without a record must not be tuned in the middle of a timing.
    with (
        torch.no_grad(),
        precision(task.case.tf32),
        settings.override(on_cache_miss="heuristic", batch_invariant=task.batch_invariant),
    ):
        call = task.case.call(device)
        record, started = None, time.monotonic()
        if options.tune:
            (record,) = tmm_core.tune(_problem_of(task, device), budget=_budget(options))
        spent = round(time.monotonic() - started, 2) if options.tune else None
        plan = call.plan()
        document |= _described(plan) | {"tuning_seconds": spent, "error": call.error()}
        calls = cold_operands.rotated(call, plan.problem)
        document["copies"] = copies = len(calls)
        document["resident"] = cold_operands.resident(plan.problem, calls)
        known = providers.known(record, plan) if record and task.bucketed else []
        runs = _runs(calls, options, document, known)
        document["times"] = times = _times(runs, timer, copies, options.seconds, document)
        if isinstance(timer, GraphTimer) and options.clocks:
            document |= _other_clocks(runs, timer, copies, times, device)
        if record and not (options.records or task.bucketed or task.batch_invariant):
            del runs, calls
            timer.release()
            document["search"] = exhaustive.search(plan.problem, record, device)


def _times(
    runs: dict[str, Run],
    timer: GraphTimer | HostTimer,
    copies: int,
    seconds: float,
    document: Document,
) -> Document:
    """Each column's median and quartiles. The document gets the ratios of torch's time to tmm's and
    to torch's second series, normalised per round; for regret, also the best known candidate's
    time. A large product's ratios are medians over several captures, which the document lists.

    Columns that do not compete are timed after the others. A column that is several times slower
    draws less power, and the columns after it in the same loop would run at a higher GPU clock.
    """
    beside = {name: run for name, run in runs.items() if name.startswith("kernel ")}
    racing = {name: run for name, run in runs.items() if name not in beside}
    captures = _captures(list(racing.values()), timer, copies, seconds)
    samples = pooled(captures)
    each = [
        dict(zip(racing, map(statistics.median, normalised(capture)), strict=True))
        for capture in captures
    ]
    ratios = [medians[TORCH] / medians[TMM] for medians in each]
    if len(ratios) > 1:
        document["ratios"] = [round(ratio, 4) for ratio in ratios]
    document["ratio"] = statistics.median(ratios)
    document["noise"] = statistics.median(m[TORCH] / m[AGAIN] for m in each)
    medians = {name: statistics.median(m[name] for m in each) for name in racing}
    if document["kind"] == "regret":
        known = {name: us for name, us in medians.items() if name == TMM or name.startswith(KNOWN)}
        best = min(known, key=known.__getitem__)
        document |= {
            "us": round(medians[TMM], 3),
            "torch_us": round(medians[TORCH], 3),
            "best_us": round(known[best], 3),
            "best": best.removeprefix(KNOWN),
        }
    if beside:
        samples += _samples(list(beside.values()), timer, copies, seconds / 2)
    return {
        name: _summary(series) for name, series in zip((*racing, *beside), samples, strict=True)
    }


def _other_clocks(
    runs: dict[str, Run], timer: GraphTimer, copies: int, times: Document, device: torch.device
) -> Document:
    """Medians of torch and tmm by the other clocks, in µs. The clock "steady" times torch twice,
    since its noise is several times larger."""
    both = [runs[TORCH], runs[TMM]]

    def named(samples: Sequence[Sequence[float]]) -> dict[str, float]:
        medians = (round(statistics.median(each), 3) for each in samples)
        return dict(zip((TORCH, TMM, AGAIN), medians, strict=False))

    found: Document = {"alone": named(timer.alone(both, ALONE_ROUNDS))}
    if all(times[name]["median_us"] >= LONG_US for name in (TORCH, TMM)):
        three = [*both, runs[AGAIN]]
        steady = timer.steady(three, STEADY_ROUNDS, copies=copies, steady_us=STEADY_US)
        found["steady"] = named(steady)
    else:
        small = torch.randn(BETWEEN, dtype=torch.float32, device=device)
        mixed = [_with_between(run, small) for run in both]
        found["between"] = named(timer.measure(mixed, LEAST_ROUNDS, copies=copies))
    return found


def _with_between(run: Run, small: torch.Tensor) -> Run:
    """The call followed by a small elementwise kernel, like the norms and activations of a model. A
    kernel then does not follow a launch of itself, and cannot overlap with it."""

    def both(copy: int) -> object:
        result = run(copy)
        small.mul_(1.0)
        return result

    return both


def _described(plan: tmm_core.Plan) -> Document:
    problem, kernel = plan.problem, plan.choice.candidate.kernel
    return {
        "problem": str(problem),
        "flops": problem.flops,
        "bytes": problem.bytes,
        "tolerance": compare.tolerance(problem),
        "kernel": kernel.name,
        "version": kernel.version,
        "config": plan.config,
        "origin": plan.origin,
        "reason": plan.choice.reason,
    }


def _budget(options: Options) -> float:
    """Seconds of tuning for the next problem."""
    budget = options.budget or settings.current().tune_budget
    return max(1.0, min(budget, options.deadline - time.monotonic()))


def _runs(
    calls: Sequence[Call], options: Options, document: Document, known: Sequence[Series] = ()
) -> dict[str, Run]:
    """The runs to time, by column, each called once already. An extra column that is unavailable
    is left out and its reason noted in ``document``; torch's and tmm's columns must work."""
    call = calls[0]
    eager = providers.eager if call.rows is None else grouped_baselines.eager
    runs = {TORCH: eager(calls), TMM: providers.tmm(calls), AGAIN: eager(calls)}
    for run in runs.values():
        _once(run, call.a.is_cuda)
    noted: dict[str, dict[str, Any]] = {"kernel_configs": {}, "not_timed": {}}

    def single(each: Series) -> Run:
        plan = each.plan(call)
        noted["kernel_configs"][each.label] = plan.config
        return planned(plan, calls)

    able = capable(call) if options.kernels else []
    extras: dict[str, Callable[[], Run]] = {
        f"{KNOWN}{each.label}": partial(single, each) for each in known
    }
    extras |= {each.column: partial(single, each) for each in (*able, *options.series)}
    if options.inductor and call.rows is None:
        extras[INDUCTOR] = lambda: providers.inductor(calls)
    for column, make in extras.items():
        try:
            run = make()
            _once(run, call.a.is_cuda)
        except Exception as error:  # it declines, is not installed, does not compile, …
            noted["not_timed"][column.removeprefix("kernel ")] = error_text(error)
        else:
            runs[column] = run
    document |= {name: found for name, found in noted.items() if found}
    return runs


def planned(plan: tmm_core.Plan, calls: Sequence[Call]) -> Run:
    """The plan's launcher on each of the calls."""
    inputs = [call.inputs() for call in calls]
    return lambda copy: inputs[copy].launch(plan.launcher, None)


def _once(run: Run, on_gpu: bool) -> None:
    run(0)
    if on_gpu:
        torch.cuda.synchronize()


def _samples(
    runs: Sequence[Run], timer: GraphTimer | HostTimer, copies: int, seconds: float
) -> list[list[float]]:
    timer.measure(runs, 1, copies=copies)  # captures
    if isinstance(timer, GraphTimer):
        timer.measure(runs, SETTLE, copies=copies)
    started = time.monotonic()
    timer.measure(runs, 1, copies=copies)
    per_round = time.monotonic() - started
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(seconds / per_round)))
    return timer.measure(runs, rounds, copies=copies)


def _captures(
    runs: Sequence[Run], timer: GraphTimer | HostTimer, copies: int, seconds: float
) -> list[list[list[float]]]:
    """The samples of each capture; there are several of large products."""
    captures = [_samples(runs, timer, copies, seconds)]
    if isinstance(timer, GraphTimer) and min(map(statistics.median, captures[0])) >= LONG_US:
        for _ in range(CAPTURES - 1):
            timer.forget_captures()
            captures.append(_samples(runs, timer, copies, seconds / CAPTURES))
    return captures


def pooled(captures: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Each run's samples, as many of every capture."""
    least = min(len(samples[0]) for samples in captures)
    parts = zip(*captures, strict=True)
    return [[us for samples in of_run for us in samples[:least]] for of_run in parts]


def _summary(samples: Sequence[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return {
        "median_us": round(middle, 3),
        "p25_us": round(low, 3),
        "p75_us": round(high, 3),
        "samples": len(samples),
    }


def _release(device: torch.device) -> None:
    """Free the problem's memory: plans keep workspaces, and the allocator keeps blocks that may
    not fit the next problem's sizes."""
    warm.forget_plans()
    if device.type == "cuda":
        torch.cuda.empty_cache()
