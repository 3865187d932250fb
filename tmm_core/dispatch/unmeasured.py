"""Finds the kernels missing from a tuning record; separate from the tuner, which a process that
finds its problems on record never imports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tmm_cache import CandidateResult, TuningRecord

from tmm_core.errors import ConfigError, PluginError, reraise
from tmm_core.spec.asking import read_config
from tmm_core.spec.kernel import Kernel
from tmm_core.spec.problem import Problem

#: The reason of a candidate that had not compiled when the tuning budget ended.
BUDGET_ENDED = "the tuning budget ended before it"


def unmeasured(
    problem: Problem,
    kernels: Sequence[Kernel[Any]],
    record: TuningRecord | None,
    resume: bool = False,
) -> list[Kernel[Any]]:
    """The kernels of which ``record`` has no result in this version, or none that uses the caller's
    promises (``Config.assumes``).

    Args:
        resume: Also those all of whose candidates the end of the tuning budget left out.
    """
    known: dict[tuple[str, str], list[CandidateResult]] = {}
    for result in record.candidates if record is not None else ():
        if not (resume and result.reason == BUDGET_ENDED):
            known.setdefault((result.kernel, result.version), []).append(result)
    return [
        kernel
        for kernel in kernels
        if (kernel.name, kernel.version) not in known
        or (
            problem.static_weights
            and not any(_assumes(kernel, each) for each in known[kernel.name, kernel.version])
            and _may_assume(kernel, problem)
        )
    ]


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
