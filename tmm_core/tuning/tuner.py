"""Tunes a problem: takes candidates and returns a :class:`TuningRecord`.

Each batch of candidates is compiled in parallel, verified and timed briefly; :class:`Proposals`
decides whether another batch is worth compiling. The best are then timed in turns with the clock
*in use* (:mod:`tmm_core.tuning.timing`) until a winner is clear, and at other M of the record's
bucket. A candidate that fails to compile, is wrong or hangs costs only itself, and the record
states that.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any

from tmm_cache import TuningRecord

from tmm_core.errors import error_text
from tmm_core.settings import Settings
from tmm_core.spec.kernel import Kernel
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.precision import require_posed
from tmm_core.spec.problem import Problem
from tmm_core.tuning.candidate_run import Attempt
from tmm_core.tuning.environment_faults import verdicts
from tmm_core.tuning.findings import Findings
from tmm_core.tuning.progress import Progress
from tmm_core.tuning.ranking import decide
from tmm_core.tuning.search import NO_HINTS, Hints, Proposals
from tmm_core.tuning.stages import Equipment, Tuning
from tmm_core.tuning.unmeasured import unmeasured
from tmm_core.tuning.untried import Able, Noted


class Tuner(Equipment):
    """Measures candidates on the device a problem names."""

    def tune(
        self,
        problem: Problem,
        kernels: Sequence[Kernel[Any]],
        settings: Settings,
        before: TuningRecord | None = None,
        hints: Hints = NO_HINTS,
        resume: bool = False,
        noted: Noted | None = None,
        again: frozenset[Able] = frozenset(),
        findings: Findings | None = None,
        spent: float = 0.0,
    ) -> TuningRecord:
        """Time the kernels missing in ``before``, together with BLAS and its winner.

        Returns ``before`` itself if it is complete. Kernels have their own versions, so only an
        upgraded plugin's candidates are measured again.

        Args:
            hints: Winners of near problems, or of this one elsewhere, which are tried first.
            resume: Also time kernels that ``before`` lacks because its budget ended too soon, or
                because the environment failed.
            noted, again: See :func:`unmeasured`.
            findings: Filled with what the record does not say; to be reported by the caller once
                the record is saved.
            spent: Seconds of the budget that finding ``kernels`` took.

        Raises:
            ValueError: ``kernels`` has no baseline (nothing to compare with).
            UnsupportedProblemError: The set fp32 precision is not the problem's.
            RuntimeError: Not even BLAS runs.
        """
        started = time.monotonic()
        deadline = started - spent + settings.tune_budget
        findings = Findings() if findings is None else findings
        new = unmeasured(problem, kernels, before, resume, noted, again)
        if before is not None and not new:
            return before
        # Torch refuses some ragged products; then there is no baseline.
        if problem.groups is None and not any(kernel.name == BASELINE for kernel in kernels):
            raise ValueError(f"no {BASELINE!r} kernel to compare with")
        proposals = Proposals(problem, kernels, new, before, hints, deadline)
        # The record's BLAS must run at the problem's precision.
        require_posed(problem)
        with Progress(str(problem), settings.progress) as progress:
            tuning = Tuning(problem, settings, progress, self, findings, deadline)
            try:
                tuning.run(proposals)
            finally:
                tuning.release()
        for candidate, why in proposals.untried([trial.candidate for trial in tuning.trials]):
            tuning.trials.append(Attempt(candidate))
            tuning.trials[-1].fail(error_text(why) if isinstance(why, BaseException) else why)
        results = tuning.conclude()
        findings.tried |= {(k.name, k.version) for k in new}
        measured = {(r.kernel, r.version) for r in results}
        present = {(k.name, k.version) for k in kernels}
        if before is not None:
            results += [
                c
                for c in verdicts(before.candidates)
                if (c.kernel, c.version) in present and (c.kernel, c.version) not in measured
            ]
        return TuningRecord(
            problem=problem.to_json(),
            winner=decide(results, before.best if before else None),
            candidates=tuple(results),
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            tuning_seconds=round(time.monotonic() - started, 3),
        )

    def prepare(
        self, problem: Problem, kernels: Sequence[Kernel[Any]], hints: Hints = NO_HINTS
    ) -> None:
        """Start compiling the first candidates of :meth:`tune`, without waiting."""
        if any(kernel.name == BASELINE for kernel in kernels):
            first = Proposals(problem, kernels, kernels, None, hints).first()
            self.prepared[problem] = {
                (problem, candidate): self.compilers.submit(problem, candidate)
                for candidate in first
            }
