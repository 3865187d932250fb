"""Estimates how much time a choice saves, compared with BLAS."""

from __future__ import annotations

from tmm_core.dispatch.lookup import Lookup
from tmm_core.launch.plan import Choice
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem
from tmm_core.tuning.ranking import times_around
from tmm_core.tuning.search import estimate_us


def saving_us(host: Lookup, problem: Problem, choice: Choice) -> float:
    """Return the µs of GPU time that one launch of ``choice`` saves compared with BLAS; 0 if
    unknown.

    Both times come from the record that chose it, at the measured M nearest to this one; without a
    record, from the kernels' estimates.
    """
    candidate = choice.candidate
    if candidate.kernel.name == BASELINE:
        return 0.0
    if choice.origin in ("cache", "tuned"):
        blas, own = record_times(host, problem), record_times(host, problem, candidate)
        return 0.0 if blas is None or own is None else max(0.0, blas - own)
    blas = estimate_us(problem, host.registry.kernel(BASELINE))
    own = estimate_us(problem, candidate.kernel, candidate.config)
    return 0.0 if blas is None or own is None else max(0.0, blas - own)


def record_times(
    host: Lookup, problem: Problem, candidate: Candidate | None = None
) -> float | None:
    """Return the µs of a candidate on record, or of BLAS's fastest config, at the measured M
    nearest to the problem's; None if it was not timed."""
    found = host.record(problem)
    if found is None:
        return None
    around = times_around(found[1].candidates, problem.extent, found[0].extent)
    for m in sorted(around, key=lambda m: abs(m - problem.extent)):
        times = around[m]
        if candidate is None:
            wanted = [us for (kernel, _), us in times.items() if kernel == BASELINE]
        else:
            name = candidate.kernel.name, tuple(sorted(candidate.config.to_json().items()))
            wanted = [times[name]] if name in times else []
        if wanted:
            return min(wanted)
    return None
