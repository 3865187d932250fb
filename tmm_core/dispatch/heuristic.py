"""Chooses a candidate without a measurement, for a problem without a record.

docs/notes/tuning.md has the measurements behind the limits.
"""

from __future__ import annotations

from typing import Any

from tmm_core.dispatch.lookup import Lookup, fits
from tmm_core.dispatch.neighbour import Near, Neighbours
from tmm_core.errors import PluginError
from tmm_core.launch.plan import Choice
from tmm_core.spec.kernel import Candidate, Kernel
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem
from tmm_core.tuning.ranking import fastest_first

#: Without a measurement, another kernel is chosen over BLAS only if its estimate is below BLAS's
#: times this factor. Estimates are rooflines, and a default config is not the best one.
ADVANTAGE = 0.9

#: A near problem's winner is taken if its estimate is at most this many times the least estimate.
#: Tiles that filled the GPU there may leave half of it idle here.
NEAR = 1.2


def choose(
    host: Lookup, neighbours: Neighbours, problem: Problem, able: list[Kernel[Any]], why: str
) -> Choice | None:
    """Return the winner of the nearest record if estimates agree, else the candidate of the least
    estimate. None if BLAS can serve the problem and has no estimate."""
    #: Each kernel's estimate of its default config, in µs.
    expected: dict[str, tuple[float, Candidate]] = {}
    for kernel in able:
        try:
            config = kernel.default_config(problem)
            estimate = kernel.estimate_us(problem, config)
        except PluginError:  # it was set aside, with a warning
            continue
        if estimate is not None:
            expected[kernel.name] = (estimate, Candidate(kernel, config))
    least = min(expected.values(), key=lambda e: (e[0], e[1].kernel.name), default=None)
    if (near := _nearest(host, neighbours, problem, able)) is not None:
        candidate, where = near
        time = candidate.kernel.estimate_us(problem, candidate.config)
        if time is None or least is None or time <= NEAR * least[0]:
            return Choice(candidate, "neighbour", f"{why}; untuned choice from {where}")
    baseline = expected.get(BASELINE)
    if least is None or (baseline is None and any(kernel.name == BASELINE for kernel in able)):
        return None
    if baseline is not None and least[0] >= baseline[0] * ADVANTAGE:
        least = baseline
    time, candidate = least
    return Choice(candidate, "heuristic", f"{why}; estimated {time:.3g} µs, not measured")


def _nearest(
    host: Lookup, neighbours: Neighbours, problem: Problem, able: list[Kernel[Any]]
) -> tuple[Candidate, Near] | None:
    """Return the fastest usable candidate of the nearest record that has one, and that record."""
    for near in neighbours.nearest(problem):
        for result in fastest_first(near.record):
            candidate = host.candidate(result, able, problem, any_version=True)
            if candidate is not None and fits(candidate, problem):
                return candidate, near
    return None
