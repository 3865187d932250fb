"""Decides which candidates a tuning tries, in which order, and when no candidate left can win.

Known candidates come first: BLAS, the winner so far, and winners of the same or a near problem on a
GPU of the same architecture. The kernels' own configs follow, by estimate. Once some of a kernel's
configs have been timed, its estimates are scaled by the best ratio of measured to expected time.
Configs still expected to lose are never compiled. docs/notes/tuning.md has the measurements behind
the limits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tmm_base.guards import suppress
from tmm_cache import CandidateResult, TuningRecord

from tmm_core.errors import error_text, reraise
from tmm_core.registry.query import read_config
from tmm_core.spec.bucket import inside
from tmm_core.spec.kernel import Candidate, Config, Kernel
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import Steps
from tmm_core.tuning.candidate_launchers import Deadline
from tmm_core.tuning.ranking import fastest_first
from tmm_core.verify.environment_faults import BUDGET_ENDED

#: A config expected to take more than this many times BLAS's expected time is left out.
HOPELESS = 1.6

#: A kernel whose best estimate is more than this many times the least of all estimates has no
#: reserved place in the first batch.
UNLIKELY = 1.4

#: Maximum number of candidates from other records that are tried first.
MOST_HINTS = 6

#: Octaves of M, N and K within which a record counts as close to this problem.
CLOSE = 0.5

#: Candidates in the first batch, and in all: usually, and with a close record.
BATCHES, CLOSE_BATCHES = (12, 20), (8, 12)

#: Further candidates of the first batch in batch-invariant mode, which has several arithmetics to
#: try.
MORE_INVARIANT = 4

#: Kernels whose best estimates differ by at most this factor are interleaved in a batch.
SIMILAR = 1.1

#: Number of estimates in one step.
ESTIMATES_A_STEP = 16

#: A config is compiled, or waited for, only if its scaled estimate times this factor is below the
#: best time so far. The factors hold after one, two and more timed configs of its kernel.
CAUTION = (0.85, 0.9, 0.95)


@dataclass(frozen=True)
class Hints:
    """Winners of other records.

    Attributes:
        candidates: Names of kernels and configs, the most promising first.
        close: The records are of this problem on another GPU or under other versions, or of a
            problem within :data:`CLOSE`. Few other candidates are tried then.
    """

    candidates: Sequence[tuple[str, Mapping[str, Any]]] = ()
    close: bool = False


NO_HINTS = Hints()
_NEVER = Deadline(math.inf)


class Search:
    """The candidates of one tuning, handed out in batches once :meth:`query` has ended. Kernels
    that are not ``new`` have results on record."""

    def __init__(
        self, problem: Problem, new: Sequence[Kernel[Any]], hints: Hints = NO_HINTS
    ) -> None:
        self._problem, self._new, self._hints = problem, new, hints
        self._first, self._most = CLOSE_BATCHES if hints.close else BATCHES
        self._first += MORE_INVARIANT * problem.batch_invariant
        #: Kernels without a config to try, and why.
        self.empty: dict[Kernel[Any], str] = {}
        #: Every candidate with its estimate in µs.
        self._estimates: dict[Candidate, float | None] = {}
        #: Candidates that were handed out, or will never be.
        self._handed: set[Candidate] = set()
        self._anchors: list[Candidate] = []
        #: Candidates that are tried in any case.
        self._must: frozenset[Candidate] = frozenset()

    def query(
        self,
        kernels: Sequence[Kernel[Any]],
        before: TuningRecord | None = None,
        deadline: Deadline = _NEVER,
    ) -> Steps[None]:
        """Query the kernels for their configs and estimates.

        Args:
            kernels: All kernels that can serve the problem.
            before: The record to complete, if any. Its winner and BLAS are tried for comparison.
            deadline: The end of the budget, after which no kernel but BLAS is queried.
        """
        problem, new = self._problem, self._new
        winner = _incumbent(before, kernels)
        baseline = next((kernel for kernel in kernels if kernel.name == BASELINE), None)
        expected = None if baseline is None else estimate_us(problem, baseline)
        # Batch-invariant mode compares arithmetics, so it needs the times of slow ones too.
        hopeless = math.inf if problem.batch_invariant else HOPELESS * (expected or math.inf)
        wanted = set(map(id, new))
        for kernel in sorted(kernels, key=lambda kernel: kernel is not baseline):
            fresh = id(kernel) in wanted
            if deadline.passed and fresh and kernel is not baseline:
                self.empty[kernel] = BUDGET_ENDED
                continue
            # One step with the last estimates took up to 56 ms (stalls_after_verification.md).
            yield ()
            try:
                if fresh:
                    configs = [kernel.default_config(problem), *kernel.configs(problem)]
                elif kernel is baseline:
                    configs = [kernel.default_config(problem)]
                elif winner is not None and kernel.name == winner.kernel:
                    configs = [read_config(kernel, winner.config)]
                else:
                    continue
            except Exception as error:
                reraise(error)
                # Not the error: a tuning in the background would keep its callers' variables.
                self.empty[kernel] = error_text(error)
                continue
            yield ()
            candidates = yield from self._estimated(kernel, configs, deadline)
            if not fresh or kernel is baseline:
                self._anchors += candidates
                continue
            estimates = {c: self._estimates[c] or 0.0 for c in candidates}
            least = min(estimates.values(), default=0.0)
            if not candidates:
                self.empty[kernel] = "its search space is empty for this problem"
            elif least > hopeless:
                self.empty[kernel] = f"expects to take {least:.3g} µs, hopeless against BLAS"
            self._handed |= {c for c in candidates if estimates[c] > hopeless}
        self._hinted = _hinted(self._hints, new, problem)
        for hint in self._hinted:
            self._estimates.setdefault(hint, estimate_us(problem, hint.kernel, hint.config))

    def _estimated(
        self, kernel: Kernel[Any], configs: Sequence[Config], deadline: Deadline
    ) -> Steps[list[Candidate]]:
        """The candidates with these configs; after the deadline only the first is estimated."""
        candidates: dict[Candidate, None] = {}
        for config in dict.fromkeys(c for c in configs if not c.unmet_promises(self._problem)):
            if deadline.passed and candidates:
                break
            candidates[Candidate(kernel, config)] = None
            estimate = estimate_us(self._problem, kernel, config)
            self._estimates[Candidate(kernel, config)] = estimate
            if len(candidates) % ESTIMATES_A_STEP == 0:
                yield ()
        return list(candidates)

    def first(self) -> list[Candidate]:
        """Hand out the first batch: BLAS and the winner on record, hints, candidates without
        estimates, and the best others by estimate. Unless hints are close, each likely kernel has
        at least one."""
        ranked = self._ranked(dict.fromkeys(self._waiting(), 1.0))
        known = self._hinted and self._hints.close and not self._problem.batch_invariant
        # The best candidate of each group, and its best that relies on a caller's promise.
        best = {(group(self._problem, c), bool(c.config.assumes)): c for c in reversed(ranked)}
        of_each = list(best.values())[::-1]
        must = dict.fromkeys([*self._anchors, *self._hinted])
        must |= dict.fromkeys(c for c in of_each if self._estimates[c] is None)
        must |= dict.fromkeys(c for c in of_each if not known and self._is_likely(c))
        if self._problem.batch_invariant:
            must |= dict.fromkeys(self._best_inside(ranked))
        self._must = frozenset(must)
        left = [c for c in ranked if c not in must]
        others = _interleaved(left, self._estimates)
        if self._problem.batch_invariant:
            turns = zip(others, self._by_arithmetic(left), strict=True)
            others = list(dict.fromkeys(itertools.chain.from_iterable(turns)))
        return self._hand([*must, *others][: max(self._first, len(must))])

    def _is_likely(self, candidate: Candidate) -> bool:
        """Whether the best candidate of a kernel is worth a place in the first batch. In
        batch-invariant mode every arithmetic is, however slow: other M may need it."""
        least = min((us for us in self._estimates.values() if us), default=0.0)
        estimate = self._estimates[candidate] or 0.0
        return self._problem.batch_invariant or estimate <= UNLIKELY * least

    def _best_inside(self, ranked: Sequence[Candidate]) -> list[Candidate]:
        """Return the best candidate of each arithmetic by its estimate, for every other M of the
        record. For 33 rows of 15360, TMA fills 31 rows of a box with zeros, which takes 16 of 45
        µs. At the bucket's edge, 64, it fills none."""
        found: dict[Candidate, None] = {}
        for m in inside(self._problem):
            there = self._problem.at(m)
            best: dict[object, tuple[float, Candidate]] = {}
            for c in ranked:
                us = estimate_us(there, c.kernel, c.config)
                kind = group(self._problem, c)
                if us is not None and (kind not in best or us < best[kind][0]):
                    best[kind] = us, c
            found |= dict.fromkeys(candidate for _, candidate in best.values())
        return list(found)

    def _by_arithmetic(self, ranked: Sequence[Candidate]) -> list[Candidate]:
        """The ranked candidates, with arithmetics interleaved. One arithmetic has to serve every M
        of a weight, and is chosen by its best time at each M. Variants of one tile, which have
        equal estimates, follow other tiles."""
        kinds: dict[object, tuple[list[Candidate], list[Candidate]]] = {}
        seen: set[object] = set()
        for c in ranked:
            kind = group(self._problem, c)
            tile = kind, c.kernel, self._estimates[c]
            tiles, variants = kinds.setdefault(kind, ([], []))
            (variants if tile in seen else tiles).append(c)
            seen.add(tile)
        turns = itertools.zip_longest(*(tiles + variants for tiles, variants in kinds.values()))
        return [c for each in turns for c in each if c is not None]

    def next_batch(
        self, times: Mapping[Candidate, float], waiting: Collection[Candidate] = ()
    ) -> list[Candidate]:
        """Hand out candidates that may still win, given the times so far. The list is empty if
        there is none, or if that depends on a kernel that has no time yet, but is ``waiting``."""
        scale = self._scale(times, (1.0,) if self._hints.close else CAUTION)
        if any(c.kernel not in scale for c in waiting if self._estimates[c]):
            return []
        # Candidates without an estimate cannot be ruled out.
        unknown = [c for c in self._waiting() if self._estimates[c] is None]
        scaled = {c: scale[c.kernel] for c in self._waiting() if c.kernel in scale}
        settled = {*unknown, *self._losing(scaled, times, scale)}
        able = [c for c in self._ranked(scaled) if c not in settled]
        left = max(0, self._most - len(times) - len(waiting))
        return self._hand([*unknown, *_interleaved(able, self._estimates)][:left])

    def lost(
        self, candidates: Iterable[Candidate], times: Mapping[Candidate, float]
    ) -> list[Candidate]:
        """Return the ``candidates`` that are expected to lose, given the times so far. Candidates
        that the first batch must have are left out."""
        if self._problem.batch_invariant:  # other M may prefer a slower arithmetic
            return []
        able = [c for c in candidates if c not in self._must]
        return self._losing(able, times, self._scale(times, CAUTION))

    def _losing(
        self,
        candidates: Iterable[Candidate],
        times: Mapping[Candidate, float],
        scale: Mapping[Kernel[Any], float],
    ) -> list[Candidate]:
        """Return the candidates whose scaled estimate is not below the best time."""
        best = min(times.values(), default=math.inf)
        return [
            c
            for c in candidates
            if c.kernel in scale
            and (us := self._estimates[c]) is not None
            and us * scale[c.kernel] >= best
        ]

    def _scale(
        self, times: Mapping[Candidate, float], caution: Sequence[float]
    ) -> dict[Kernel[Any], float]:
        """The least ratio of measured to estimated time of each kernel, times its ``caution``."""
        ratios: dict[Kernel[Any], list[float]] = {}
        for candidate, us in times.items():
            if estimate := self._estimates.get(candidate):
                ratios.setdefault(candidate.kernel, []).append(us / estimate)
        return {
            kernel: min(factors) * caution[min(len(factors), len(caution)) - 1]
            for kernel, factors in ratios.items()
        }

    def speculative(self, handed: int, room: int) -> list[Candidate]:
        """Return candidates to compile in advance: the ones that :meth:`next_batch` may return
        after ``handed`` candidates in all. Their number is at most ``room``, or the size of the
        next batch if that is larger. Later times decide which kernels fill the batch, so each
        kernel gets as many candidates as the whole batch may have."""
        left = max(0, self._most - handed)
        found: dict[Kernel[Any], list[Candidate]] = {}
        for candidate in self._ranked(dict.fromkeys(self._waiting(), 1.0)):
            found.setdefault(candidate.kernel, []).append(candidate)
        able = dict.fromkeys((c for candidates in found.values() for c in candidates[:left]), 1.0)
        return self._ranked(able)[: max(left, room)]

    def untried(self, tried: Sequence[Candidate]) -> list[tuple[Candidate, str]]:
        """Return the best candidate, with the reason, of each kernel without a ``tried`` candidate.
        A kernel also counts if only its candidates that rely on a caller's promise were not tried.
        The record lists them, so that they are not tuned again."""
        known, relying = {c.kernel for c in tried}, {c.kernel for c in tried if c.config.assumes}
        found = []
        by_kernel: dict[Kernel[Any], list[Candidate]] = {}
        for candidate in self._estimates:
            by_kernel.setdefault(candidate.kernel, []).append(candidate)
        for kernel in dict.fromkeys([*self.empty, *self._new]):
            candidates = by_kernel.get(kernel, [])
            promised = [c for c in candidates if c.config.assumes and kernel not in relying]
            if promised or kernel not in known:
                ranked = self._ranked(dict.fromkeys(promised or candidates, 1.0))
                best = ranked[0] if ranked else Candidate(kernel, Config())
                why = f"expects to take {self._estimates.get(best) or 0.0:.3g} µs"
                why += "; candidates that won nearby or looked better were tried instead"
                found.append((best, self.empty.get(kernel, why)))
        return found

    def _waiting(self) -> list[Candidate]:
        return [c for c in self._estimates if c not in self._handed]

    def _ranked(self, scale: Mapping[Candidate, float]) -> list[Candidate]:
        """Sort by scaled estimate; candidates without an estimate come first, in their order."""
        return sorted(scale, key=lambda c: (self._estimates[c] or 0.0) * scale[c])

    def _hand(self, candidates: list[Candidate]) -> list[Candidate]:
        self._handed.update(candidates)
        return candidates


def _interleaved(
    ranked: Sequence[Candidate], estimates: Mapping[Candidate, float | None]
) -> list[Candidate]:
    """Interleave the ranked candidates of the kernels within :data:`SIMILAR` of the best.

    Estimates rank the configs of one kernel better than they rank kernels. A kernel whose estimates
    ignore a part of its config has many equal estimates, which would fill a batch."""
    best = {c.kernel: estimates[c] or 0.0 for c in reversed(ranked)}
    similar = [kernel for kernel in best if best[kernel] <= min(best.values()) * SIMILAR]
    similar.sort(key=best.__getitem__)
    # A kernel lists different tiles before variants of one, which have equal estimates.
    able = set(ranked)
    listed = [[c for c in estimates if c.kernel is kernel and c in able] for kernel in similar]
    mixed = [c for each in itertools.zip_longest(*listed) for c in each if c is not None]
    return list(dict.fromkeys([*mixed, *ranked]))


def _incumbent(
    before: TuningRecord | None, kernels: Sequence[Kernel[Any]]
) -> CandidateResult | None:
    """Return the winner on record, or the next best candidate whose kernel is unchanged."""
    if before is None:
        return None
    present = {(kernel.name, kernel.version) for kernel in kernels}
    able = (c for c in (before.best, *fastest_first(before)) if (c.kernel, c.version) in present)
    return next((c for c in able if c.kernel != BASELINE), None)


def group(problem: Problem, candidate: Candidate) -> object:
    """Return the group of a candidate: its kernel, or its arithmetic in batch-invariant mode, where
    one arithmetic serves all M of a weight. The best of each group is measured even if slow."""
    if not problem.batch_invariant:
        return candidate.kernel
    return candidate.kernel.arithmetic(problem, candidate.config)


def _hinted(hints: Hints, kernels: Sequence[Kernel[Any]], problem: Problem) -> list[Candidate]:
    """Return the candidates of these kernels that the hints name."""
    by_name = {kernel.name: kernel for kernel in kernels}
    found: dict[Candidate, None] = {}
    for name, config in hints.candidates:
        kernel = by_name.get(name)
        if kernel is None or name == BASELINE:
            continue
        with suppress(Exception):  # a config of another version: drop the hint
            hinted = Candidate(kernel, read_config(kernel, config))
            if not hinted.config.unmet_promises(problem):
                found[hinted] = None
    return list(found)[:MOST_HINTS]


def estimate_us(
    problem: Problem, kernel: Kernel[Any], config: Config | None = None
) -> float | None:
    """A kernel's own estimate for a config, or for its default config; None if it has none."""
    with suppress(Exception):  # drops the estimate, not the kernel
        return kernel.estimate_us(problem, config or kernel.default_config(problem))
    return None
