"""Decides which choices were verified on this machine, and verifies all others at their first use.

A tuning verifies its winner at the edge of a bucket. In all other cases a kernel is compared with
samples of a reference before its first result is used:

- it is forced or untuned;
- another kernel won its tuning;
- its record came with a package, an image or an archive;
- no size of this class (:func:`size_class`) was verified before.

Stamps in the cache record for later processes what was verified. A tuning record does not count,
since anybody may have written it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from tmm_cache import JSON, CacheStore, TuningRecord, digest

from tmm_core.launch.plan import Choice
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.device import DeviceFingerprint, current_device
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.version import __version__

if TYPE_CHECKING:
    from tmm_core.verify.verifier import Verdict


#: Each size up to this one is verified. Above it, sizes with the same remainder modulo a multiple
#: of all tile heights are verified once.
EACH_SIZE = 1024
#: Sizes with the same remainder modulo this number have the same alignment, and fill the last tile
#: of up to this many rows alike.
TILE = 128
#: Kernels go through tiles in groups of up to this many; the last group is often incomplete.
GROUPED = 8
#: A number in a config counts as the height of a taller tile, whatever its field, if it is a
#: multiple of the first number and at most the second.
_STEP, _TALLEST = 64, 512


def size_class(extent: int, config: Mapping[str, JSON] = MappingProxyType({})) -> str:
    """Return the class of a size; a kernel of this config is verified once per class and bucket.
    Each size up to :data:`EACH_SIZE` is a class. Larger sizes share a class if they fill the last
    tile, and the last group of tiles, alike.

    >>> size_class(264), size_class(2056), size_class(3080)
    ('264', '8 of 1024', '8 of 1024')
    >>> size_class(2056, {"BLOCK_M": 192}), size_class(5128, {"BLOCK_M": 192})
    ('2056 of 3072', '2056 of 3072')
    """
    if extent <= EACH_SIZE:
        return str(extent)
    tall = [v for v in config.values() if type(v) is int and TILE < v <= _TALLEST]
    every = GROUPED * math.lcm(TILE, *(v for v in tall if v % _STEP == 0))
    return f"{extent % every} of {every}"


class FirstUse:
    """The candidates known to be right on this machine, under this version of tmm."""

    def __init__(self, store: CacheStore) -> None:
        self._store = store

    def may_launch(self, problem: Problem, choice: Choice, verifies_forced: bool = True) -> bool:
        """Whether ``choice`` may be launched for ``problem`` without verification.

        Args:
            verifies_forced: Forced kernels are verified too.
        """
        candidate = choice.candidate
        if candidate.kernel.name == BASELINE or choice.origin == "fallback":
            return True
        if choice.origin == "forced" and not verifies_forced:
            return True
        if self._tuned_at(problem, choice) == problem.extent:
            return True  # the tuning verified it in every way
        return self.is_verified(problem, candidate)

    def _tuned_at(self, problem: Problem, choice: Choice) -> int | None:
        """Return the size at which a tuning by this user verified the choice, because it won; None
        if none did."""
        if choice.origin not in ("tuned", "cache") or problem.deterministic:
            return None  # no tuning is for deterministic mode
        # A choice kept for its bucket may have been made for the bucket's edge.
        places = [choice.evidence] if choice.evidence else [problem, bucketed(problem)]
        for each in places:
            # Batch-invariant mode has its own records, and plain ones if no kernel is invariant.
            evidence = replace(each.bare(), batch_invariant=choice.arithmetic is not None)
            device = evidence.device
            key = _winner_key(evidence.to_json(), _identity(choice.candidate))
            if self._store.is_verified(device.gpu, device.environment, key):
                return evidence.extent
        return None

    def stamp_winner(self, device: DeviceFingerprint, record: TuningRecord) -> None:
        """Record that the winner was verified in every way of use, at the record's size."""
        best = record.best
        key = _winner_key(
            record.problem, {"kernel": best.kernel, "version": best.version, "config": best.config}
        )
        self._store.mark_verified(device.gpu, device.environment, key)

    def is_verified(self, problem: Problem, candidate: Candidate) -> bool:
        """Whether this candidate was verified for a size of this problem's class."""
        return self._stamped(problem, candidate, sized=True)

    def stamp(self, problem: Problem, candidate: Candidate) -> None:
        """Record that this candidate was verified for a size of this problem's class."""
        device = problem.device
        for sized in (False, True):
            key = _key(problem, candidate, sized)
            self._store.mark_verified(device.gpu, device.environment, key)

    def _stamped(self, problem: Problem, candidate: Candidate, sized: bool) -> bool:
        key, device = _key(problem, candidate, sized), problem.device
        return self._store.is_verified(device.gpu, device.environment, key)

    def verify(
        self,
        problem: Problem,
        choice: Choice,
        launcher: Launcher,
        *,
        memory_limit: int | None = None,
    ) -> Verdict:
        """Compare a few launches with samples of rows and columns, within a memory limit, and stamp
        the candidate if it is right. This takes about 5 ms for 8192³ in bf16 on an H100, most of it
        for the launches, and 0.5 GB. If the candidate was verified at another size of the bucket,
        two launches suffice.

        Raises:
            Exception: The launcher's exception, unless it is a lack of memory.
        """
        from tmm_core.verify.verifier import Extent, Verdict, Verifier  # only needed here

        candidate = choice.candidate
        known = self._tuned_at(problem, choice) is not None
        known = known or self._stamped(problem, candidate, sized=False)
        extent: Extent = "brief" if known else "first use"
        try:
            device = current_device(problem.device)
            verifier = Verifier(problem, device, memory_limit=memory_limit, sampled=True)
            verdict = verifier.verdict(launcher, extent=extent)
        except torch.OutOfMemoryError as error:
            why = f"cannot be verified: {str(error).splitlines()[0]}"
            return Verdict(None, why, unknown=True, cause="passing")
        if verdict.ok:
            self.stamp(problem, candidate)
        return verdict


def _identity(candidate: Candidate) -> dict[str, JSON]:
    kernel = candidate.kernel
    config = candidate.config.to_json()
    return {"kernel": kernel.name, "version": kernel.version, "config": config}


def _winner_key(problem: Mapping[str, JSON], identity: Mapping[str, JSON]) -> str:
    """Return the key of a stamp for the winner of a problem's record."""
    return digest({**identity, "won": problem})


def _key(problem: Problem, candidate: Candidate, sized: bool) -> str:
    """Return the key of a stamp. It covers the kernel's version, its config, the bucket's problem
    and, if ``sized``, the class of the size."""
    document = _identity(candidate)
    document |= {"problem": bucketed(problem.bare()).to_json(), "tmm": __version__}
    if problem.deterministic:  # a bind may depend on it, and torch's operators do
        document["deterministic"] = True
    if sized:
        document["size"] = size_class(problem.extent, candidate.config.to_json())
    return digest(document)
