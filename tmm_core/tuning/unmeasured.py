"""Finds the kernels missing from a tuning record; separate from the tuner, which a process that
finds its problems on record never imports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tmm_cache import CandidateResult, TuningRecord

from tmm_core.errors import ConfigError, PluginError, reraise
from tmm_core.registry.query import read_config
from tmm_core.spec.kernel import Kernel
from tmm_core.spec.problem import Problem
from tmm_core.tuning.environment_faults import BUDGET_ENDED, verdicts
from tmm_core.tuning.untried import Able, Noted


def unmeasured(
    problem: Problem,
    kernels: Sequence[Kernel[Any]],
    record: TuningRecord | None,
    resume: bool = False,
    noted: Noted | None = None,
    again: frozenset[Able] = frozenset(),
) -> list[Kernel[Any]]:
    """The kernels of which ``record`` has no verdict on this version, or none that uses the
    caller's promises (``Config.assumes``).

    Args:
        resume: Also those that the environment left untried, and those all of whose candidates the
            end of the tuning budget left out.
        noted: The kernels that the environment left untried, which a call does not try now.
        again: Those of them that it does.
    """
    if record is None:
        return list(kernels)
    known: dict[Able, list[CandidateResult]] = {}
    for result in verdicts(record.candidates):
        if not (resume and result.reason == BUDGET_ENDED):
            known.setdefault((result.kernel, result.version), []).append(result)
    left = noted.kernels if noted is not None else {}

    def missing(kernel: Kernel[Any]) -> bool:
        name = kernel.name, kernel.version
        if name in left:
            return resume or name in again
        return name not in known or (
            problem.static_weights
            and not any(_assumes(kernel, each) for each in known[name])
            and _may_assume(kernel, problem)
        )

    return [kernel for kernel in kernels if missing(kernel)]


def _assumes(kernel: Kernel[Any], result: CandidateResult) -> bool:
    try:
        return bool(read_config(kernel, result.config).assumes)
    except (ConfigError, PluginError):
        return False


def _may_assume(kernel: Kernel[Any], problem: Problem) -> bool:
    try:
        return any(config.assumes for config in kernel.configs(problem))
    except Exception as error:  # costs only its own candidates
        reraise(error)
        return False
