"""Estimates how much time a choice saves, compared with BLAS."""

from __future__ import annotations

from tmm_core.dispatch.lookup import Lookup
from tmm_core.launch.plan import Choice
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem
from tmm_core.tuning.ranking import CandidateId, identity, slower_in_steady_state, times_around
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
    if choice.from_record:
        blas, own = record_times(host, problem), record_times(host, problem, candidate)
        return 0.0 if blas is None or own is None else max(0.0, blas - own)
    blas = estimate_us(problem, host.registry.kernel(BASELINE))
    own = estimate_us(problem, candidate.kernel, candidate.config)
    return 0.0 if blas is None or own is None else max(0.0, blas - own)


def record_times(
    host: Lookup, problem: Problem, candidate: Candidate | None = None
) -> float | None:
    """Return the µs of a candidate on record, or of BLAS's fastest config, at the nearest measured
    M; None if it was not timed."""
    found = host.record(problem)
    if found is None:
        return None
    around = times_around(found[1].candidates, problem.extent, found[0].extent)
    for m in sorted(around, key=lambda m: abs(m - problem.extent)):
        times = around[m]
        if candidate is None:
            wanted = [us for (kernel, _), us in times.items() if kernel == BASELINE]
        else:
            name = _identity(candidate)
            wanted = [times[name]] if name in times else []
        if wanted:
            return min(wanted)
    return None


def loses_in_steady_state(host: Lookup, problem: Problem, choice: Choice) -> bool:
    """Whether the record that decided says that the choice takes longer than BLAS in steady state.

    A winner may take longer by up to :data:`tmm_core.tuning.ranking.CLOSE`, if it is faster in
    bursts. The large products of a model follow each other as in steady state.
    """
    found = host.record(problem) if choice.from_record else None
    slower = [] if found is None else slower_in_steady_state(found[1].candidates, by=0.0)
    return _identity(choice.candidate) in map(identity, slower)


def _identity(candidate: Candidate) -> CandidateId:
    return candidate.kernel.name, tuple(sorted(candidate.fields.items()))
