"""The state of a candidate during a tuning, and the choice of candidates for the next round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from tmm_cache import CandidateResult

from tmm_core.errors import error_message, error_text
from tmm_core.registry.query import CheckedKernel
from tmm_core.spec.bucket import inside
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.tuning.cold_operands import Runner
from tmm_core.tuning.compile_pool import NotCompiledError
from tmm_core.tuning.findings import refuses
from tmm_core.tuning.ranking import MARGIN
from tmm_core.tuning.search import estimate_us, group
from tmm_core.verify import compare
from tmm_core.verify.environment_faults import Cause, cause_of, cause_of_text

#: The best config of every other kernel stays on record as a reserve if it takes at most this many
#: times the best time.
RESERVE = 3.0
#: Where no kernel beats BLAS at a bucket's edge, the best one is measured inside if it takes at
#: most this many times as long.
BEHIND = 1.3
#: Errors whose text explains the failure without their type.
_SELF_EXPLAINING = (TimeoutError, NotCompiledError)


@dataclass(eq=False)
class CandidateRun:
    """The state of one candidate during a tuning."""

    candidate: Candidate
    status: Literal["ok", "slow", "wrong", "failed"] = "slow"
    launcher: Launcher | None = None
    runner: Runner | None = None
    samples: list[float] = field(default_factory=list)
    #: µs by the clock ``steady``.
    steady_us: float | None = None
    inside_us: dict[int, float] = field(default_factory=dict)
    error: float | None = None
    reason: str | None = None
    #: The exception behind the reason, if there was one.
    raised: BaseException | None = None
    #: The fault of the environment that left the candidate untried.
    cause: Cause | None = None
    #: Bytes of scratch memory.
    workspace: int = 0
    #: Whether it was verified in every way in which it is used.
    verified: bool = False

    @property
    def time(self) -> float:
        return median(self.samples) if self.samples else math.inf

    @property
    def is_baseline(self) -> bool:
        return self.candidate.kernel.name == BASELINE

    @property
    def is_faulty(self) -> bool:
        """Whether the kernel's own code is at fault: never BLAS's, and not for a refusal."""
        if self.is_baseline:
            return False
        raised = self.raised is not None and not refuses(self.raised)
        own = self.status == "failed" and self.cause in (None, "hung", "alike")
        return self.status == "wrong" or (raised and own)

    def fail(
        self, error: BaseException | str, status: Literal["wrong", "failed"] = "failed"
    ) -> None:
        """Remove the candidate from the tuning. The record gets a verdict and the error; if the
        environment failed, the candidate is untried."""
        self.launcher = self.runner = None
        self.raised, cause = None, None
        if isinstance(error, BaseException):  # not str: that reads its __class__
            self.raised, cause = error, cause_of(error)
            explains = issubclass(type(error), _SELF_EXPLAINING) and error_message(error).strip()
            error = explains or error_text(error)
        self.reason = error.strip()[:500]
        self.cause = None if status == "wrong" else cause or cause_of_text(self.reason)
        self.status = status

    def fail_if_set_aside(self) -> None:
        """Remove the candidate if its kernel was set aside for an invalid result. BLAS is always
        needed."""
        kernel = self.candidate.kernel
        if isinstance(kernel, CheckedKernel) and kernel.fault is not None and not self.is_baseline:
            self.fail(kernel.fault)

    def result(self, problem: Problem) -> CandidateResult:
        """Return the result for the record of ``problem``."""
        kernel = self.candidate.kernel
        return CandidateResult(
            kernel=kernel.name,
            version=kernel.version,
            config=self.candidate.fields,
            status=self.status,
            samples_us=tuple(round(s, 3) for s in self.samples),
            inside_us={m: round(us, 3) for m, us in self.inside_us.items()},
            steady_us=None if self.steady_us is None else round(self.steady_us, 3),
            # JSON has no NaN, the error of a poisoned element. The reason mentions it.
            error=self.error if self.error is not None and math.isfinite(self.error) else None,
            tolerance=compare.tolerance(problem) if self.error is not None else None,
            workspace_bytes=self.workspace,
            deterministic=kernel.traits.deterministic,
            batch_invariant=kernel.traits.batch_invariant,
            reason=self.reason,
        )


def survivors(
    problem: Problem, racing: list[CandidateRun], keep: float, limit: int
) -> list[CandidateRun]:
    """Return BLAS and the best ``limit`` candidates within a factor ``keep`` of the best.

    In batch-invariant mode BLAS does not count as the best: a kernel is used even if BLAS is far
    ahead. Screening does not show which kernel is fastest in use."""
    ranked = sorted(racing, key=lambda run: run.time)
    serving = [run for run in ranked if not (problem.batch_invariant and run.is_baseline)]
    best = (serving or ranked)[0].time
    return [
        run
        for place, run in enumerate(ranked)
        if run.is_baseline or (run.time <= best * keep and place < limit)
    ]


def reserves(problem: Problem, racing: Sequence[CandidateRun]) -> list[CandidateRun]:
    """Return each kernel's best config within :data:`RESERVE`, and its best config that relies on
    no promise of the caller. A reserve answers if the winner is filtered out, quarantined or
    uninstalled. In batch-invariant mode, return the best of each arithmetic, however slow: if other
    M prefer an arithmetic, it is used here too."""
    ranked = _fastest_first(racing)
    best: dict[tuple[object, bool], CandidateRun] = {}
    for run in ranked:
        candidate = run.candidate
        best.setdefault((group(problem, candidate), bool(candidate.config.assumes)), run)
    most = math.inf if problem.batch_invariant else RESERVE
    return [run for run in best.values() if run.time <= ranked[0].time * most]


def _fastest_first(racing: Sequence[CandidateRun]) -> list[CandidateRun]:
    """Return the candidates that are still in the tuning and were timed, fastest first."""
    timed = (run for run in racing if run.runner is not None and run.samples)
    return sorted(timed, key=lambda run: run.time)


def of_each_arithmetic(
    problem: Problem, racing: Sequence[CandidateRun], keep: float
) -> list[CandidateRun]:
    """Return the two fastest candidates of each arithmetic within a factor ``keep`` of its best.
    Also return those expected to be the fastest of their arithmetic at another M of the record.

    In batch-invariant mode other M may prefer an arithmetic that is slower here. Its best config is
    then used here, and screening does not show which config that is."""
    alike: dict[object, list[CandidateRun]] = {}
    for run in _fastest_first(racing):
        if (arithmetic := group(problem, run.candidate)) is not None:
            alike.setdefault(arithmetic, []).append(run)
    kept = [r for each in alike.values() for r in each[:2] if r.time <= each[0].time * keep]
    return list(dict.fromkeys([*kept, *_best_inside(problem, alike.values())]))


def _best_inside(
    problem: Problem, alike: Iterable[Sequence[CandidateRun]]
) -> Iterator[CandidateRun]:
    """Yield, for other M of the record, the candidate of each arithmetic that is expected to be the
    fastest there but is not here. The expected time is the time here, scaled by the estimates'
    ratio."""
    for m in inside(problem):
        there = problem.at(m)
        for runs in alike:
            expected: dict[CandidateRun, float] = {}
            for run in runs:
                kernel, config = run.candidate.kernel, run.candidate.config
                here_us = estimate_us(problem, kernel, config)
                there_us = estimate_us(there, kernel, config)
                if here_us and there_us:
                    expected[run] = run.time * there_us / here_us
            if expected:
                best = min(expected, key=expected.__getitem__)
                if expected[best] < expected.get(runs[0], math.inf) * (1 - MARGIN):
                    yield best


def for_the_bucket(problem: Problem, reserves: Sequence[CandidateRun]) -> list[CandidateRun]:
    """Return the reserves to race and to measure inside the bucket. A reserve that beats BLAS at
    the edge answers inside if the winner is not deterministic or not capture-safe and the call
    needs that. If no reserve beats BLAS, the fastest kernel within :data:`BEHIND` may still be
    ahead inside."""
    blas = min((run.time for run in reserves if run.is_baseline), default=math.inf)
    if ahead := [run for run in reserves if run.time <= blas * (1 - MARGIN)]:
        return ahead
    kernels = [r for r in reserves if not r.is_baseline and r.time <= blas * BEHIND]
    return kernels[:1] if inside(problem) else []
