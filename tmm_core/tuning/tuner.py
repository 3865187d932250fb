"""Tunes a problem: measures candidates and returns a :class:`TuningRecord`.

Each batch of candidates is compiled in parallel, verified and screened; :class:`Search` decides
whether another batch is worth compiling. The best are then timed interleaved, by the clock *in use*
(:mod:`tmm_core.tuning.timing`), until a winner is clear. They are also timed at other M of the
record's bucket. A candidate that fails to compile, is wrong or hangs costs only itself, and the
record states the failure.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from msgspec import structs
from tmm_cache import TuningRecord

from tmm_core.epilogues import parse
from tmm_core.settings import Settings
from tmm_core.spec.device import current_device, fingerprint
from tmm_core.spec.kernel import Candidate, Kernel
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.operand import Operand
from tmm_core.spec.precision import require_precision
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import Steps, drained
from tmm_core.tuning.candidate_launchers import CandidateLaunchers, CompileJob, Deadline
from tmm_core.tuning.candidate_run import CandidateRun
from tmm_core.tuning.cold_operands import Copies
from tmm_core.tuning.compile_pool import Compilers, compiling_threads
from tmm_core.tuning.compile_pool import default as default_compilers
from tmm_core.tuning.findings import Findings
from tmm_core.tuning.first_launch import FirstLaunches
from tmm_core.tuning.ranking import decide, identity
from tmm_core.tuning.search import NO_HINTS, Hints, Search
from tmm_core.tuning.stages import Tuning
from tmm_core.tuning.timing import GraphTimer, HostTimer, timer_for
from tmm_core.verify.environment_faults import verdicts
from tmm_core.verify.verifier import Verifier

T = TypeVar("T")

#: Seconds that no wait for compilers takes, unless the process was stopped (Ctrl-Z, a paused
#: container).
STOPPED = 1.0
#: The epilogues of the products of :meth:`Tuner.preload`.
PRELOADED = (None, "silu", "gelu")


@dataclass(eq=False)
class Tuner:
    """Measures candidates on the device a problem names."""

    #: Chains in CUDA graphs, or wall time on a CPU; tests pass others.
    timer: GraphTimer | HostTimer | None = None
    #: The number of threads that bind candidates; by default the number of cores, at most 16.
    workers: int = field(default_factory=compiling_threads)
    #: The pool of compiling processes; by default the one of this process.
    compilers: Compilers = field(default_factory=default_compilers)
    #: Launches candidates in another process first; None: they are only launched in this one.
    first_launches: FirstLaunches | None = None
    #: Jobs that are already compiling for problems to be tuned next.
    prepared: dict[Problem, dict[CompileJob, Future[None]]] = field(default_factory=dict)

    def steps(
        self,
        problem: Problem,
        kernels: Sequence[Kernel[Any]],
        settings: Settings,
        before: TuningRecord | None = None,
        *,
        new: Sequence[Kernel[Any]],
        findings: Findings,
        hints: Hints = NO_HINTS,
        spent: float = 0.0,
    ) -> Steps[TuningRecord]:
        """Time the kernels missing in ``before``, together with BLAS and its winner.

        Returns ``before`` itself if it is complete. Kernels have their own versions, so only an
        upgraded plugin's candidates are measured again.

        The generator yields between measurements. It then holds no lock and no CUDA capture, only
        memory, which ``close()`` frees, and threads that bind kernels, which end by themselves.
        Resume it on the device and stream on which it was started.

        Args:
            new: The kernels to time.
            findings: Filled with findings that the record does not state. The caller reports them
                once the record is saved.
            hints: Winners of near problems, or of this one elsewhere, which are tried first.
            spent: Seconds of the budget that finding ``kernels`` took.

        Raises:
            ValueError: ``kernels`` has no baseline (nothing to compare with).
            UnsupportedProblemError: The process's fp32 precision is not the problem's.
            RuntimeError: Not even BLAS runs.
        """
        started = time.monotonic()
        deadline = Deadline(started - spent + settings.tune_budget)
        if before is not None and not new:
            return before
        # Torch refuses some ragged products; then there is no baseline.
        if problem.groups is None and not any(kernel.name == BASELINE for kernel in kernels):
            raise ValueError(f"no {BASELINE!r} kernel to compare with")
        search = Search(problem, new, hints)
        yield from self._charged(search.query(kernels, before, deadline), deadline)
        tuning = self._tuning(problem, settings, deadline, findings)
        yield from self._run(tuning, tuning.run(search), deadline)
        for candidate, why in search.untried([run.candidate for run in tuning.runs]):
            tuning.runs.append(CandidateRun(candidate))
            tuning.runs[-1].fail(why)
        results = tuning.conclude()
        measured = {(r.kernel, r.version) for r in results}
        present = {(k.name, k.version) for k in kernels}
        if before is not None:
            results += [
                c
                for c in verdicts(before.candidates)
                if (c.kernel, c.version) in present and (c.kernel, c.version) not in measured
            ]
        winner = decide(results, before.best if before else None)
        # The winner may be from ``before``: an equal incumbent, or a kernel that was not timed now.
        findings.verified = results[winner].kernel == BASELINE or any(
            run.verified and identity(run.result(problem)) == identity(results[winner])
            for run in tuning.runs
        )
        return TuningRecord(
            problem=problem.to_json(),
            winner=winner,
            candidates=tuple(results),
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            # Tests replace this clock by others, which may go backwards.
            tuning_seconds=max(0.0, round(time.monotonic() - started - deadline.rested, 3)),
        )

    def race_at(
        self,
        key: Problem,
        record: TuningRecord,
        m: int,
        candidates: Mapping[int, Candidate],
        settings: Settings,
    ) -> Steps[TuningRecord]:
        """Time some candidates of the record of ``key``, given by index, at another M of its
        bucket; returns the record with these times. A candidate that is wrong there does not
        win."""
        deadline = Deadline(time.monotonic() + settings.tune_budget)
        tuning = self._tuning(key, settings, deadline, Findings())
        runs = {index: CandidateRun(candidate) for index, candidate in candidates.items()}
        for run in runs.values():
            run.status = "ok"
        yield from self._run(tuning, tuning.measure_at({m: [*runs.values()]}, "repeated"), deadline)
        results = list(record.candidates)
        for index, run in runs.items():
            times = {**results[index].inside_us, **run.inside_us}
            results[index] = structs.replace(results[index], inside_us=times)
            if run.status == "wrong":
                reason = run.reason
                results[index] = structs.replace(results[index], status="wrong", reason=reason)
        winner = record.winner if results[record.winner].status == "ok" else decide(results)
        return structs.replace(record, candidates=tuple(results), winner=winner)

    def _tuning(
        self, problem: Problem, settings: Settings, deadline: Deadline, findings: Findings
    ) -> Tuning:
        # BLAS multiplies by the process's precision setting.
        require_precision(problem)
        device = current_device(problem.device)
        # Each thread that binds may delay a call by 5 ms (the GIL).
        workers = 1 if settings.on_cache_miss == "background" else self.workers
        launchers = CandidateLaunchers(
            self.compilers, workers, self.first_launches, device, settings.tune_memory, deadline,
            self.prepared.pop(problem, {}),
        )  # fmt: skip
        return Tuning(problem, settings, self.timer or timer_for(device), launchers, findings)

    def _run(self, tuning: Tuning, steps: Steps[None], deadline: Deadline) -> Steps[None]:
        """Run ``steps``, then free the tuning's memory."""
        process = os.getpid()
        try:
            yield from self._charged(steps, deadline)
        finally:
            if process == os.getpid():  # a forked child cannot use its parent's GPU
                tuning.release()

    def _charged(self, steps: Steps[T], deadline: Deadline) -> Steps[T]:
        """Run ``steps``. Pauses, the compile processes' start and the time for which this process
        was stopped are not charged to the budget."""
        rested = None
        try:
            while True:
                pending = steps.send(rested)
                left, starting = time.monotonic(), self.compilers.are_starting(pending)
                rested = yield pending
                waited = time.monotonic() - left
                deadline.rested += waited if rested else 0.0
                free = rested or starting or waited > STOPPED
                deadline.at += waited if free else 0.0
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            steps.close()

    def preload(self, blas: Kernel[Any], device: torch.device) -> None:
        """Verify and time BLAS for small products. This loads the functions of torch's libraries
        that a tuning uses, which would take up to 0.15 s of a tuning's first steps."""
        row = Operand(torch.bfloat16)
        column = replace(row, layout="col")
        timer = timer_for(device)
        for name in PRELOADED:
            problem = Problem(
                m=48, n=64, k=64, a=row, b=column, out=row,
                epilogue=parse(name), device=fingerprint(device),
            )  # fmt: skip
            verifier = Verifier(problem, device)
            launcher = blas.bind(problem, blas.default_config(problem))
            verifier.verdict(launcher)
            verifier.release()
            runner = Copies(problem, device, None).runner(launcher)
            timer.measure([runner], 1, copies=len(runner.inputs), burst_us=1.0)
        timer.release()

    def prepare(
        self, problem: Problem, kernels: Sequence[Kernel[Any]], hints: Hints = NO_HINTS
    ) -> None:
        """Start compiling the first candidates of :meth:`steps`, without waiting."""
        if any(kernel.name == BASELINE for kernel in kernels):
            search = Search(problem, kernels, hints)
            drained(search.query(kernels))
            self.prepared[problem] = {
                (problem, candidate): self.compilers.submit(problem, candidate)
                for candidate in search.first()
            }
