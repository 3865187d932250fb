"""Estimates how much time a choice saves, compared with BLAS."""

from __future__ import annotations

from tmm_core.dispatch.lookup import Lookup
from tmm_core.errors import reraise
from tmm_core.launch.plan import Choice
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem
from tmm_core.tuning.ranking import times_around


def saving_us(host: Lookup, problem: Problem, choice: Choice) -> float:
    """Microseconds of GPU time that one launch of ``choice`` saves; 0 if nothing is known.

    By the record that chose it, at the measured M around this one, the smaller; else by the
    kernels' estimates.
    """
    candidate = choice.candidate
    if candidate.kernel.name == BASELINE:
        return 0.0
    found = host.record(problem)
    if choice.origin in ("cache", "tuned") and found is not None:
        name = candidate.kernel.name, tuple(sorted(candidate.config.to_json().items()))
        saved = []
        for times in times_around(found[1].candidates, problem.extent, found[0].extent).values():
            blas = [us for (kernel, _), us in times.items() if kernel == BASELINE]
            if blas and name in times:
                saved.append(min(blas) - times[name])
        return max(0.0, min(saved, default=0.0))
    blas_kernel = host.registry.kernel(BASELINE)
    try:
        baseline = blas_kernel.estimate_us(problem, blas_kernel.default_config(problem))
        own = candidate.kernel.estimate_us(problem, candidate.config)
    except Exception as error:
        reraise(error)
        return 0.0
    return 0.0 if baseline is None or own is None else max(0.0, baseline - own)
