"""Decides which choices are trusted, and verifies all others at their first use.

A record is evidence only on the machine that measured it. Candidates verified by the user's own
tuning, BLAS and forced kernels are trusted. A guess, or a winner that came with a package, an image
or an archive, is compared with samples of a reference before its first result is used, once per
machine and version of tmm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from tmm_cache import CacheStore, digest

from tmm_core.launch.plan import Choice
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.version import __version__

if TYPE_CHECKING:
    from tmm_core.dispatch.verifier import Verdict


class Trust:
    """The candidates known to be right on this machine, under this version of tmm."""

    def __init__(self, store: CacheStore) -> None:
        self._store = store

    def holds(self, problem: Problem, choice: Choice) -> bool:
        """Whether ``choice`` may be launched for ``problem`` without verification."""
        candidate = choice.candidate
        if candidate.kernel.name == BASELINE or choice.origin in ("forced", "fallback"):
            return True
        if problem.device.interpreted:  # takes seconds, and serves kernel authors
            return True
        # Batch-invariant mode has its own records, and plain ones if no kernel is invariant.
        evidence = replace(
            (choice.evidence or problem).bare(), batch_invariant=choice.arithmetic is not None
        )
        if choice.origin in ("cache", "tuned"):
            device = evidence.device
            found = self._store.locate(device.gpu, device.environment, evidence.to_json())
            if found is not None and found.trusted:  # from the user's own tuning
                return True
        return self.is_verified(problem, candidate)

    def is_verified(self, problem: Problem, candidate: Candidate) -> bool:
        """Whether this candidate was verified for a problem of this bucket."""
        key, device = _key(problem, candidate), problem.device
        return self._store.is_verified(device.gpu, device.environment, key)

    def stamp(self, problem: Problem, candidate: Candidate) -> None:
        """Record that this candidate was verified for a problem of this bucket."""
        key, device = _key(problem, candidate), problem.device
        self._store.mark_verified(device.gpu, device.environment, key)

    def verify(
        self,
        problem: Problem,
        candidate: Candidate,
        launcher: Launcher,
        *,
        memory_limit: int | None = None,
    ) -> Verdict:
        """Compare one launch without ``out`` and one with against samples of rows and columns,
        within a memory limit: about 5 ms and 0.5 GB for 8192³ in bf16 on an H100, most of it the
        launches. Stamps the candidate if it is right.

        Raises:
            Exception: Whatever the launcher raises, except for lack of memory.
        """
        from tmm_core.dispatch.verifier import Verdict, Verifier  # only needed here

        try:
            device = device_of(problem)
            verifier = Verifier(problem, device, memory_limit=memory_limit, sampled=True)
            verdict = verifier.verdict(launcher, brief=True)
        except torch.OutOfMemoryError as error:
            return Verdict(None, f"cannot be verified: {str(error).splitlines()[0]}", unknown=True)
        if verdict.ok:
            self.stamp(problem, candidate)
        return verdict


def device_of(problem: Problem) -> torch.device:
    """The current device of the problem's type: fingerprints have no index."""
    if problem.device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(problem.device.type)


def _key(problem: Problem, candidate: Candidate) -> str:
    """The key of a stamp: the kernel's current version, its config and the bucket's problem."""
    kernel = candidate.kernel
    return digest(
        {
            "kernel": kernel.name,
            "version": kernel.version,
            "config": candidate.config.to_json(),
            "problem": bucketed(problem.bare()).to_json(),
            "tmm": __version__,
        }
    )
