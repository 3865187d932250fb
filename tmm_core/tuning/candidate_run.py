"""The state of one candidate during a tuning, and which of several stay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from tmm_core.errors import error_message, error_text
from tmm_core.registry.query import Asked
from tmm_core.spec.bucket import inside
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.tuning.cold_operands import Runner
from tmm_core.tuning.compile_pool import NotCompiledError
from tmm_core.tuning.environment_faults import Cause, cause_of, cause_of_text
from tmm_core.tuning.findings import refuses
from tmm_core.tuning.ranking import MARGIN
from tmm_core.tuning.search import group

#: The best config of every other kernel stays on record as a reserve if it takes at most this many
#: times the best.
RESERVE = 3.0
#: Where no kernel beats BLAS at a bucket's edge, the best one is measured inside if it takes at
#: most this many times as long.
BEHIND = 1.3
#: Errors whose text tells what happened without their type.
_SELF_EXPLAINING = (TimeoutError, NotCompiledError)


@dataclass(eq=False)
class Attempt:
    """The state of one candidate during a tuning."""

    candidate: Candidate
    #: Records know all of these but "untried".
    status: Literal["ok", "slow", "wrong", "failed", "untried"] = "slow"
    launcher: Launcher | None = None
    run: Runner | None = None
    samples: list[float] = field(default_factory=list)
    #: By the clock "steady".
    steady_us: float | None = None
    inside_us: dict[int, float] = field(default_factory=dict)
    error: float | None = None
    reason: str | None = None
    #: The exception that was the reason, if one was.
    raised: BaseException | None = None
    #: What of the environment left it untried.
    cause: Cause | None = None
    #: Bytes of scratch memory.
    workspace: int = 0

    @property
    def time(self) -> float:
        return median(self.samples) if self.samples else math.inf

    @property
    def is_baseline(self) -> bool:
        return self.candidate.kernel.name == BASELINE

    @property
    def is_faulty(self) -> bool:
        """Whether its kernel's own code is at fault, which is not said of BLAS and of refusals."""
        if self.is_baseline:
            return False
        raised = self.raised is not None and not refuses(self.raised)
        own = self.status == "failed" or self.cause in ("hung", "alike")
        return self.status == "wrong" or (raised and own)

    def fail(
        self, error: BaseException | str, status: Literal["wrong", "failed"] = "failed"
    ) -> None:
        """Take the candidate out of the tuning: with a verdict, which the record states with the
        error, or untried, if the environment failed."""
        self.launcher = self.run = None
        self.raised, cause = None, None
        if isinstance(error, BaseException):  # not str: that asks for its __class__
            self.raised, cause = error, cause_of(error)
            explains = issubclass(type(error), _SELF_EXPLAINING) and error_message(error).strip()
            error = explains or error_text(error)
        self.reason = error.strip()[:500]
        # As whoever reads the record will judge it.
        cause = None if status == "wrong" else cause or cause_of_text(self.reason)
        self.status, self.cause = (status, None) if cause is None else ("untried", cause)

    def hold_to_answers(self) -> None:
        """Take it out if its kernel was set aside for an invalid answer; BLAS is always needed."""
        kernel = self.candidate.kernel
        if isinstance(kernel, Asked) and kernel.fault is not None and not self.is_baseline:
            self.fail(kernel.fault)


def anchor(racing: Sequence[Attempt]) -> int:
    """The index of BLAS, which is one kernel with a stable time."""
    return next((place for place, trial in enumerate(racing) if trial.is_baseline), 0)


def survivors(problem: Problem, racing: list[Attempt], keep: float, limit: int) -> list[Attempt]:
    """BLAS and the best ``limit`` candidates within a factor ``keep`` of the best.

    In batch-invariant mode BLAS does not count as the best: one of the others is used even where it
    is far ahead, and first looks do not tell which (1500×5120×13824 on an H200 took 304 µs in these
    and 332 in use)."""
    ranked = sorted(racing, key=lambda t: t.time)
    serving = [t for t in ranked if not (problem.batch_invariant and t.is_baseline)]
    best = (serving or ranked)[0].time
    return [
        trial
        for place, trial in enumerate(ranked)
        if trial.is_baseline or (trial.time <= best * keep and place < limit)
    ]


def reserves(problem: Problem, racing: Sequence[Attempt]) -> list[Attempt]:
    """Each kernel's best config within :data:`RESERVE`, and its best config that relies on no
    promise of the caller. A reserve answers if the winner is filtered out, quarantined or
    uninstalled. In batch-invariant mode, the best of each arithmetic, however slow: other M may
    prefer it, and it is then used here too."""
    ranked = _ranked(racing)
    best: dict[tuple[object, bool], Attempt] = {}
    for trial in ranked:
        candidate = trial.candidate
        best.setdefault((group(problem, candidate), bool(candidate.config.assumes)), trial)
    most = math.inf if problem.batch_invariant else RESERVE
    return [trial for trial in best.values() if trial.time <= ranked[0].time * most]


def _ranked(racing: Sequence[Attempt]) -> list[Attempt]:
    """Those that run and were timed, fastest first."""
    return sorted((t for t in racing if t.run is not None and t.samples), key=lambda t: t.time)


def of_each_arithmetic(problem: Problem, racing: Sequence[Attempt], keep: float) -> list[Attempt]:
    """The two fastest of each arithmetic within a factor ``keep`` of its best. In batch-invariant
    mode other M may prefer an arithmetic that is slower here; its best config is then used, and
    first looks do not tell which that is (1500×1536×8960 on an H200, in two parts of K: the one
    that they chose takes 82.7 µs in use, another 73)."""
    alike: dict[object, list[Attempt]] = {}
    for trial in _ranked(racing):
        if (arithmetic := group(problem, trial.candidate)) is not None:
            alike.setdefault(arithmetic, []).append(trial)
    return [t for each in alike.values() for t in each[:2] if t.time <= each[0].time * keep]


def for_the_bucket(problem: Problem, reserves: Sequence[Attempt]) -> list[Attempt]:
    """The reserves to race and to measure inside the bucket. Those that beat BLAS at the edge may
    answer there if the winner is not deterministic or not capture-safe. If none does, the fastest
    kernel within :data:`BEHIND` may still be ahead inside: at M = 780 cuBLAS took 39 µs for
    1280×8192 and a kernel 26, although cuBLAS won at the edge, 896."""
    blas = min((t.time for t in reserves if t.is_baseline), default=math.inf)
    if ahead := [trial for trial in reserves if trial.time <= blas * (1 - MARGIN)]:
        return ahead
    kernels = [t for t in reserves if not t.is_baseline and t.time <= blas * BEHIND]
    return kernels[:1] if inside(problem) else []
