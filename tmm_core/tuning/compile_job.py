"""Converts a candidate and its problem to JSON for a process with the same plugins, and back."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tmm_core.registry.query import read_config
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.problem import REQUIREMENTS, Problem

if TYPE_CHECKING:
    from tmm_core.registry.registry import Registry

Job = dict[str, Any]


def job_of(problem: Problem, candidate: Candidate) -> Job:
    """The job as JSON."""
    return {
        "problem": problem.to_json(),
        "requirements": {name: getattr(problem, name) for name in REQUIREMENTS},
        "device": dataclasses.asdict(problem.device),
        "kernel": candidate.kernel.name,
        "version": candidate.kernel.version,
        "config": candidate.config.to_json(),
    }


def recalled(registry: Registry, job: Job) -> tuple[Problem, Candidate]:
    """The problem and the candidate that :func:`job_of` was given.

    Raises:
        LookupError, ValueError: Their meaning differs in this process: another version, an
            unregistered epilogue.
        BaseException: Whatever a plugin raises.
    """
    kernel = registry.kernel(job["kernel"])
    if kernel.version != job["version"]:
        raise LookupError(f"{kernel.name} is of version {kernel.version} here")
    epilogue = registry.epilogue(job["problem"]["epilogue"])  # by key: of the same source
    device = {**job["device"], "capability": tuple(job["device"]["capability"])}
    problem = Problem.from_json(job["problem"], DeviceFingerprint(**device), epilogue)
    problem = dataclasses.replace(problem, **job["requirements"])
    return problem, Candidate(kernel, read_config(kernel, job["config"]))
