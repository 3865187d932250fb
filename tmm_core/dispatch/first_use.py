"""Decides which choices were verified on this machine, and verifies all others at their first use.

A tuning verifies its winner at the size of the record. In all other cases a kernel is compared
with samples of a reference before its first result is used:

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
from tmm_cache import JSON, CacheStore, digest

from tmm_core.errors import PluginError
from tmm_core.launch.plan import Choice
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.device import current_device
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
#: The smallest and the largest height of a taller tile. A number in any field of a config counts as
#: one if it is a multiple of the smallest and at most the largest.
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
    """Knows the candidates that were verified on this machine, under this version of tmm."""

    def __init__(self, store: CacheStore) -> None:
        self._store = store
        self._verifying: list[tuple[Problem, Candidate]] = []

    def may_launch(self, problem: Problem, choice: Choice, verifies_forced: bool = True) -> bool:
        """Whether ``choice`` may be launched for ``problem`` without verification. A forced kernel
        needs verification only if ``verifies_forced``."""
        candidate = choice.candidate
        if candidate.kernel.name == BASELINE or choice.origin == "fallback":
            return True
        if choice.origin == "forced" and not verifies_forced:
            return True
        return self.is_verified(_of_record(problem, choice), candidate)

    def is_verified(self, problem: Problem, candidate: Candidate, sized: bool = True) -> bool:
        """Whether this candidate was verified for a size of this problem's class; if not ``sized``,
        for any size of its bucket."""
        key, device = _key(problem, candidate, sized), problem.device
        return self._store.is_verified(device.gpu, device.environment, key)

    def stamp(self, problem: Problem, candidate: Candidate) -> None:
        """Record that this candidate was verified for a size of this problem's class."""
        device = problem.device
        for sized in (False, True):
            key = _key(problem, candidate, sized)
            self._store.mark_verified(device.gpu, device.environment, key)

    def verify(
        self, problem: Problem, choice: Choice, launcher: Launcher, memory_limit: int | None
    ) -> Verdict:
        """Compare a few launches with samples of rows and columns, within a memory limit, and stamp
        the candidate if it is right. This takes about 5 ms for 8192³ in bf16 on an H100, most of it
        for the launches, and 0.5 GB. If the candidate was verified at another size of the bucket,
        two launches suffice, and one of each other form, in which calls launch it.

        Raises:
            Exception: The launcher's exception, unless it is a lack of memory.
            PluginError: A launch of this verification asks for the same product by the same kernel.
        """
        from tmm_core.verify.verifier import Extent, Verdict, Verifier  # only needed here

        candidate, key = choice.candidate, _of_record(problem, choice)
        if (problem, candidate) in self._verifying:
            raise PluginError(f"a launch of kernel {candidate.kernel.name!r} calls itself")
        self._verifying.append((problem, candidate))
        known = self.is_verified(key, candidate, sized=False)
        extent: Extent = "forms" if known else "first use"
        try:
            device = current_device(problem.device)
            verifier = Verifier(problem, device, memory_limit=memory_limit, sampled=True)
            verdict = verifier.verdict(launcher, extent=extent)
        except torch.OutOfMemoryError as error:
            why = f"cannot be verified: {str(error).splitlines()[0]}"
            return Verdict(None, why, unknown=True, cause="passing")
        finally:
            self._verifying.pop()
        if verdict.ok:
            self.stamp(key, candidate)
        return verdict


def _of_record(problem: Problem, choice: Choice) -> Problem:
    """Return the problem in the mode of the record behind a choice. Batch-invariant mode has its
    own records, and plain ones if no kernel is invariant."""
    return replace(problem, batch_invariant=choice.arithmetic is not None)


def _key(problem: Problem, candidate: Candidate, sized: bool) -> str:
    """Return the key of a stamp. It covers the kernel's version, its config, the bucket's problem
    and, if ``sized``, the class of the size."""
    kernel, config = candidate.kernel, candidate.fields
    document: dict[str, JSON] = {"kernel": kernel.name, "version": kernel.version, "config": config}
    own = replace(problem.bare(), batch_invariant=problem.batch_invariant)
    document |= {"problem": bucketed(own).to_json(), "tmm": __version__}
    if problem.deterministic:  # a bind may depend on it, and torch's operators do
        document["deterministic"] = True
    if sized:
        document["size"] = size_class(problem.extent, config)
    return digest(document)
