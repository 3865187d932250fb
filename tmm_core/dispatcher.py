"""From a problem to a plan: the slow path that the warm path never sees.

The ladder, top rung first; each choice says which rung it stands on:

1. forced      ``kernel=``, ``TMM_KERNEL``, ``override(kernel=…)``
2. cache       a record of this problem, else of its M bucket
3. tune        measure now, where ``on_cache_miss="tune"`` and nothing forbids it
4. neighbour   the nearest tuned problem of the same kind: a guess
5. heuristic   the kernels' own estimates
6. fallback    BLAS, which always can
"""

from __future__ import annotations

import functools
import json
import math
import threading
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tmm_cache import CacheStore, CandidateResult, TuningRecord

from tmm_core.bucket import bucketed
from tmm_core.deferred import Answers
from tmm_core.device import DeviceFingerprint
from tmm_core.errors import (
    CacheMissError,
    PluginError,
    TmmWarning,
    UnsupportedProblemError,
)
from tmm_core.kernel import BASELINE, Candidate, Config, Kernel
from tmm_core.plan import Choice
from tmm_core.problem import Problem
from tmm_core.registry import Registry
from tmm_core.settings import Settings

if TYPE_CHECKING:
    from tmm_core.neighbour import Neighbours
    from tmm_core.tuner import Tuner

#: Batch-invariant mode chooses the arithmetic at this M for all M, so that it cannot depend on M;
#: and among kernels that take at most so many times the fastest's time there, the one that leaves
#: other M the most configs to choose from.
INVARIANT_M = 256
INVARIANT_COST = 1.2

#: Without a measurement, another kernel is chosen over BLAS only where its estimate is better
#: than BLAS's by this factor: estimates are rooflines, and a default config is not the best one.
#: By what an H200 measured over the suite, 0.8 loses 4.8 % of its time, 0.85 4.2, 0.9 3.4, 0.95
#: 3.0 and 1.0 3.3, classes where BLAS was right losing from 0.95 on.
HEURISTIC_ADVANTAGE = 0.9

#: Inside a bucket another candidate takes the winner's place only where it is expected to be faster
#: by this factor: estimates carry the times over, and even cuBLAS's own lie some 4 % off a line
#: between two sizes (random M by 4096×4096 on an H200).
CARRIED_ADVANTAGE = 0.96

#: How long to wait for another process that is tuning the same problem, in budgets.
LOCK_PATIENCE = 4.0

#: Seconds to wait for another process that is storing the record adopted here.
ADOPT_PATIENCE = 1.0


_ALONE = "no other kernel can serve this problem"


class Dispatcher:
    """Chooses candidates. Holds what it has chosen, per bucket, for this process."""

    def __init__(self, registry: Registry, tuner: Tuner | None, store: CacheStore) -> None:
        self.registry = registry
        if tuner is not None:
            self.tuner = tuner
        self.store = store
        self._choices: dict[tuple[Problem, Settings], Choice] = {}
        #: (kernel, bucket) pairs that raised at run time, with the error's text.
        self._quarantine: dict[tuple[str, Problem], str] = {}
        self._warned: set[str] = set()
        self._answers: Answers | None = None
        #: Held while something is measured or stored.
        self._lock = threading.RLock()

    # A process that finds its problems on record imports neither.

    @functools.cached_property
    def tuner(self) -> Tuner:
        from tmm_core.tuner import Tuner

        return Tuner()

    @functools.cached_property
    def _neighbours(self) -> Neighbours:
        from tmm_core.neighbour import Neighbours

        return Neighbours(self.store)

    def after_fork(self) -> None:
        """Let go of what another thread of the parent process held."""
        self._lock = threading.RLock()
        self.registry.after_fork()

    def choose(self, problem: Problem, settings: Settings) -> Choice:
        """Climb down the ladder.

        Raises:
            UnknownNameError, UnsupportedProblemError, ConfigError, PluginError: A forced
                kernel or config that cannot be had.
            CacheMissError: ``on_cache_miss="error"`` and no record.
        """
        if settings.kernel is not None:
            return self._forced(problem, settings)
        if problem.batch_invariant:
            return self._invariant(problem, settings)
        return self._choose(problem, settings)

    def _choose(self, problem: Problem, settings: Settings) -> Choice:
        key = bucketed(_bare(problem))
        if (replayed := self._replayed(problem, key, settings)) is not None:
            return replayed
        # An exact record may exist beside the bucket's: exact sizes are looked up each time
        # a new shape comes by, the bucket's choice is made once.
        able = self._able(problem, settings)
        # Where even BLAS declines, it is BLAS that says so.
        if all(kernel.name == BASELINE for kernel in able):
            return self._fallback(_ALONE)
        if key.m != problem.m:
            exact = self._cached(problem, _bare(problem), able)
            if exact is not None:
                return exact
        choice = self._chosen(key, settings, able)
        if choice is None and self._forbids_tuning(problem, settings) is None:
            choice = self._cached(problem, key, able, settings)
            if choice is None:
                # One at a time measures, or they would measure each other; nobody else waits.
                with self._lock:
                    choice = self._chosen(key, settings, able)
                    choice = choice or self._resolve(problem, key, able, settings)
        choice = choice or self._resolve(problem, key, able, settings)
        if not problem.capturing:
            self._choices[key, settings] = choice
        return self._carried(problem, key, choice, settings)

    def _carried(
        self, problem: Problem, edge: Problem, choice: Choice, settings: Settings
    ) -> Choice:
        """A bucket's choice, for an M inside it: of BLAS and the configs of the winner's kernel on
        record the fastest, each by its time at the bucket's edge and how much less its kernel
        expects this M to take. BLAS's time shrinks with M, a tile kernel's by whole waves of tiles.
        """
        if (
            problem.m == edge.m
            or problem.batch_invariant
            or choice.origin not in ("cache", "tuned")
            or (found := self.record(problem)) is None
            or found[0] != edge
        ):
            return choice
        winner = choice.candidate.kernel
        kernels = [winner]
        if winner.name != BASELINE and (BASELINE, edge) not in self._quarantine:
            blas = self.registry.kernel(BASELINE)
            kernels += [] if self.registry.reasons_against(blas, problem, settings) else [blas]
        expected: dict[Candidate, float] = {}
        for result in _by_time(found[1]):
            candidate = self._candidate(result, kernels)
            if candidate is not None and result.median_us is not None:
                expected[candidate] = result.median_us * self._shrinks(candidate, problem, edge)
        own = expected.get(choice.candidate)
        best = min(expected, key=lambda c: expected[c], default=choice.candidate)
        if own is None or expected[best] > CARRIED_ADVANTAGE * own:
            return choice
        reason = (
            f"{choice.reason}; expected to take {expected[best] / own:.2f} of the winner's time"
        )
        return replace(choice, candidate=best, reason=f"{reason} at M={problem.m}")

    def _shrinks(self, candidate: Candidate, problem: Problem, edge: Problem) -> float:
        """The time of ``problem`` over that of ``edge``, as the kernel expects it; 1 where it has
        no idea."""
        kernel, config = candidate.kernel, candidate.config
        try:
            here, there = kernel.estimate_us(problem, config), kernel.estimate_us(edge, config)
        except Exception as error:
            self._warn_once(kernel, error)
            return 1.0
        return here / there if here and there else 1.0

    def _chosen(self, key: Problem, settings: Settings, able: list[Kernel[Any]]) -> Choice | None:
        """What was chosen before, where it may still serve."""
        choice = self._choices.get((key, settings))
        return choice if choice is not None and choice.candidate.kernel in able else None

    def _replayed(self, problem: Problem, key: Problem, settings: Settings) -> Choice | None:
        """The winner of a complete record, where those kernels that are not imported yet have
        answered in another process, so that the winner alone need be. It is asked again."""
        if problem.batch_invariant or not self.registry.unloaded():
            return None
        answered = self._answered.get(problem, settings)
        if answered is None:
            return None
        at_hand = self.registry.loaded_candidates(problem, settings)
        if not answered and all(kernel.name == BASELINE for kernel in at_hand):
            return self._fallback(_ALONE)
        able = answered | {(kernel.name, kernel.version) for kernel in at_hand}
        found = self.record(problem)
        if found is None:
            return None
        asked, record = found
        best = record.best
        if (best.kernel, best.version) not in able or not able <= {
            (c.kernel, c.version) for c in record.candidates
        }:
            return None
        kernel = self.registry.kernel(best.kernel)
        candidate = self._candidate(best, [kernel])
        if (
            candidate is None
            or (kernel.name, key) in self._quarantine
            or self.registry.reasons_against(kernel, problem, settings)
        ):
            return None
        choice = Choice(candidate, "cache", self._where(asked), _other(asked, problem))
        return self._carried(problem, key, choice, settings)

    @property
    def _answered(self) -> Answers:
        # Plugins registered by hand may come at any time.
        deferred = self.registry.deferred
        if self._answers is None or self._answers.deferred != deferred:
            self._answers = Answers(dict(deferred), self.store.root)
        return self._answers

    def tune(self, problem: Problem, settings: Settings, *, force: bool = False) -> TuningRecord:
        """Measure ``problem`` as it is (no bucket) and store the record.

        A record that is complete already is returned as it is unless ``force``. Where
        another process is tuning the same problem, waits for its record.
        """
        problem = _bare(problem)
        with self._lock:
            record = self._tune(problem, self._able(problem, settings), settings, force)
            self._choices.clear()
            return record

    def adopt(self, device: DeviceFingerprint, record: TuningRecord) -> None:
        """Choose by ``record``, whoever measured it, as long as this process lives.

        It is stored too, unless it is already or the disk refuses it.
        """
        gpu, environment = device.gpu, device.environment
        with self._lock:
            with self.store.lock(gpu, environment, record.problem, ADOPT_PATIENCE):
                if self.store.load(gpu, environment, record.problem) != record:
                    self.store.save(gpu, environment, record)
            self.store.hold(gpu, environment, record)
            self._choices.clear()
            self._neighbours.forget()

    def quarantine(self, problem: Problem, choice: Choice, error: BaseException) -> None:
        """Never again use this kernel for problems of this bucket, in this process."""
        name = choice.candidate.kernel.name
        self._quarantine[name, bucketed(_bare(problem))] = f"{type(error).__name__}: {error}"
        self._choices.clear()
        warnings.warn(
            f"kernel {name} failed on {problem} and is not used for it any more: "
            f"{type(error).__name__}: {error}",
            TmmWarning,
            stacklevel=3,
        )

    def rejections(self, problem: Problem, settings: Settings) -> dict[str, list[str]]:
        """Every kernel that is not a candidate, with its reasons; for ``explain()``."""
        _, rejected = self.registry.candidates(problem, settings)
        for (name, bucket), error in list(self._quarantine.items()):
            if bucket == bucketed(_bare(problem)):
                rejected.setdefault(name, []).append(f"quarantined: it raised {error}")
        return rejected

    def record(self, problem: Problem) -> tuple[Problem, TuningRecord] | None:
        """The record that answers for ``problem``, exact or its bucket's, and for what."""
        environment = problem.device.environment
        for key in dict.fromkeys((_bare(problem), bucketed(_bare(problem)))):
            found = self.store.load(problem.device.gpu, environment, key.to_json())
            if found is not None:
                return key, found
        return None

    def _invariant(self, problem: Problem, settings: Settings) -> Choice:
        """The choice at :data:`INVARIANT_M`, with the fastest config for this M of those that
        are known to share its arithmetic."""
        model = replace(problem, m=INVARIANT_M)
        choice = self._choose(model, settings)
        kernel = choice.candidate.kernel
        if not kernel.traits.batch_invariant:
            self._warn_once(kernel, f"is not batch-invariant, but nothing else can serve {problem}")
            return choice
        if self._forbids_tuning(problem, settings) is None:
            self._choose(_bare(problem), settings)  # leaves a record where there was none
        wanted = kernel.arithmetic(model, choice.candidate.config)
        if (found := self.record(problem)) is not None:
            asked, record = found
            for result in _by_time(record, ("ok", "slow")):
                candidate = self._candidate(result, [kernel])
                if candidate and kernel.arithmetic(problem, candidate.config) == wanted:
                    return Choice(candidate, "cache", self._where(asked), _other(asked, problem))
        return self._alike(problem, choice, wanted)

    def _alike(self, problem: Problem, choice: Choice, wanted: object) -> Choice:
        """Where this M was not measured: of the configs that sum as ``choice``'s does the one with
        the best estimate."""
        kernel, config = choice.candidate.kernel, choice.candidate.config
        try:
            alike = dict.fromkeys([config, *_sharing(kernel, problem, wanted)])
            known = {c: kernel.estimate_us(problem, c) for c in alike}
        except Exception as error:
            self._warn_once(kernel, error)
            return choice
        best = min(known, key=lambda c: known[c] or math.inf)
        if best == config:
            return choice
        reason = f"{choice.reason}; estimated the fastest here of those that sum alike"
        return Choice(Candidate(kernel, best), "heuristic", reason)

    # -- rungs -----------------------------------------------------------------------

    def _resolve(
        self, problem: Problem, key: Problem, able: list[Kernel[Any]], settings: Settings
    ) -> Choice:
        if (choice := self._cached(problem, key, able, settings)) is not None:
            return choice
        forbidden = self._forbids_tuning(problem, settings)
        if settings.on_cache_miss == "error":
            raise CacheMissError(
                f"no tuned record for {problem} (bucket M={key.m}) in {self.store.root} and "
                f"on_cache_miss='error'; run `tmm tune` for it or allow 'tune' or 'heuristic'"
            )
        if forbidden is None:
            try:
                record = self._tune(key, self._able(key, settings), settings)
            except Exception as error:  # tuning is a feature; the matmul must be answered
                forbidden = f"tuning failed: {type(error).__name__}: {error}"
                warnings.warn(f"{problem}: {forbidden}", TmmWarning, stacklevel=2)
            else:
                if (candidate := self._best(record, able, problem)) is not None:
                    return Choice(candidate, "tuned", self._where(key), _other(key, problem))
        elif settings.on_cache_miss == "tune" or problem.capturing:
            self.store.log_miss(problem.device.gpu, problem.device.environment, key.to_json())
        why = forbidden or "tuning gave no usable winner"
        return (
            self._neighbour(problem, able, why)
            or self._heuristic(problem, able, why)
            or self._fallback(why)
        )

    def _forced(self, problem: Problem, settings: Settings) -> Choice:
        assert settings.kernel is not None
        kernel = self.registry.kernel(settings.kernel)
        if reasons := self.registry.reasons_against(kernel, problem, settings):
            raise UnsupportedProblemError(
                f"kernel {kernel.name!r} cannot serve {problem}: {'; '.join(reasons)}"
            )
        if settings.config is not None:
            config = kernel.config_type.from_json(json.loads(settings.config))
            return Choice(Candidate(kernel, config), "forced", "config given")
        found = self.record(problem)
        timed = [] if found is None else _by_time(found[1])
        for result in timed:
            if result.kernel == kernel.name and (c := self._candidate(result, [kernel])):
                return Choice(c, "forced", "its best config on record")
        return Choice(Candidate(kernel, kernel.default_config(problem)), "forced", "default config")

    def _cached(
        self,
        problem: Problem,
        key: Problem,
        able: list[Kernel[Any]],
        settings: Settings | None = None,
    ) -> Choice | None:
        """From the record of ``key``. With ``settings``, a record that does not know some
        kernel (new plugin, other version) is left to be completed where tuning may happen."""
        record = self.store.load(problem.device.gpu, problem.device.environment, key.to_json())
        if record is None:
            return None
        if settings is not None and self._forbids_tuning(problem, settings) is None:
            known = {(c.kernel, c.version) for c in record.candidates}
            if any((k.name, k.version) not in known for k in able):
                return None
        candidate = self._best(record, able, problem)
        if candidate is None:
            return None
        return Choice(candidate, "cache", self._where(key), _other(key, problem))

    def _tune(
        self,
        key: Problem,
        able: list[Kernel[Any]],
        settings: Settings,
        force: bool = False,
    ) -> TuningRecord:
        device, document = key.device, key.to_json()
        patience = settings.tune_budget * LOCK_PATIENCE
        with self.store.lock(device.gpu, device.environment, document, patience) as _held:
            # Whoever held the lock before may have left what was to be measured.
            before = self.store.load(device.gpu, device.environment, document)
            record = self.tuner.tune(key, able, settings, None if force else before)
            if record is not before:
                self.store.save(device.gpu, device.environment, record)
                self._neighbours.forget()
            return record

    def _neighbour(self, problem: Problem, able: list[Kernel[Any]], why: str) -> Choice | None:
        for near in self._neighbours.nearest(problem):
            for result in _by_time(near.record):
                candidate = self._candidate(result, able, any_version=True)
                if candidate is not None and _fits(candidate, problem):
                    return Choice(candidate, "neighbour", f"{why}; untuned guess from {near}")
        return None

    def _heuristic(self, problem: Problem, able: list[Kernel[Any]], why: str) -> Choice | None:
        estimates: dict[str, tuple[float, Candidate]] = {}
        for kernel in able:
            try:
                config = kernel.default_config(problem)
                estimate = kernel.estimate_us(problem, config)
                if not _is_for_mode(kernel, problem, config):
                    continue
            except Exception as error:
                self._warn_once(kernel, error)
                continue
            if estimate is not None:
                estimates[kernel.name] = (estimate, Candidate(kernel, config))
        if not estimates:
            return None
        ranked = sorted(estimates.values(), key=lambda e: (e[0], e[1].kernel.name))
        if problem.batch_invariant:
            near = [e for e in ranked if e[0] <= INVARIANT_COST * ranked[0][0]]
            ranked = sorted(near, key=lambda e: -self._leeway(e[1], problem))
        time, candidate = ranked[0]
        if any(kernel.name == BASELINE for kernel in able):
            baseline = estimates.get(BASELINE)
            if baseline is None:
                return None
            if time >= baseline[0] * HEURISTIC_ADVANTAGE:
                time, candidate = baseline
        return Choice(candidate, "heuristic", f"{why}; estimated {time:.3g} µs, not measured")

    def _leeway(self, candidate: Candidate, problem: Problem) -> int:
        """How many configs sum as this one does."""
        kernel = candidate.kernel
        try:
            wanted = kernel.arithmetic(problem, candidate.config)
            return len(_sharing(kernel, problem, wanted))
        except Exception as error:
            self._warn_once(kernel, error)
            return 0

    def _fallback(self, why: str) -> Choice:
        kernel = self.registry.kernel(BASELINE)
        return Choice(Candidate(kernel, kernel.config_type()), "fallback", why)

    # -- what the rungs share --------------------------------------------------------

    def _able(self, problem: Problem, settings: Settings) -> list[Kernel[Any]]:
        able, _ = self.registry.candidates(problem, settings)
        if self.registry.deferred:
            self._answered.add(problem, settings, able)
        bucket = bucketed(_bare(problem))
        return [k for k in able if (k.name, bucket) not in self._quarantine]

    def _best(
        self, record: TuningRecord, able: list[Kernel[Any]], problem: Problem
    ) -> Candidate | None:
        """The winner on record, or the fastest after it that may serve this very call."""
        if problem.batch_invariant:
            return self._most_adaptable(record, able, problem)
        winner = record.candidates[record.winner]
        for result in (winner, *_by_time(record)):
            candidate = self._candidate(result, able)
            if candidate is not None:
                return candidate
        return None

    def _most_adaptable(
        self, record: TuningRecord, able: list[Kernel[Any]], problem: Problem
    ) -> Candidate | None:
        """The fastest candidate of the arithmetic that most of those timed share, among
        arithmetics within :data:`INVARIANT_COST` of the fastest."""
        groups: dict[tuple[str, object], list[tuple[float, Candidate]]] = {}
        for result in _by_time(record, ("ok", "slow")):
            candidate = self._candidate(result, able)
            if candidate is not None and result.median_us is not None:
                arithmetic = candidate.kernel.arithmetic(problem, candidate.config)
                if arithmetic is None:
                    continue
                members = groups.setdefault((candidate.kernel.name, arithmetic), [])
                members.append((result.median_us, candidate))
        if not groups:
            return None
        limit = INVARIANT_COST * min(members[0][0] for members in groups.values())
        near = [members for members in groups.values() if members[0][0] <= limit]
        # Dicts keep the order of time: of equals the fastest is first.
        return max(near, key=len)[0][1]

    def _candidate(
        self, result: CandidateResult, able: list[Kernel[Any]], any_version: bool = False
    ) -> Candidate | None:
        for kernel in able:
            if kernel.name == result.kernel and (any_version or kernel.version == result.version):
                try:
                    return Candidate(kernel, kernel.config_type.from_json(result.config))
                except Exception as error:  # ConfigError, or a stranger's own
                    self._warn_once(kernel, error)
        return None

    def _forbids_tuning(self, problem: Problem, settings: Settings) -> str | None:
        if problem.capturing:
            return "a CUDA graph is being captured"
        if settings.on_cache_miss != "tune":
            return f"on_cache_miss={settings.on_cache_miss!r}"
        if problem.deterministic:
            return "deterministic mode: a choice by timing may differ from run to run"
        if problem.device.interpreted:
            return "interpreted kernels' times mean nothing"
        return None

    def _where(self, key: Problem) -> str:
        device = key.device
        path = self.store.found(device.gpu, device.environment, key.to_json())
        return str(path or "not stored")

    def _warn_once(self, kernel: Kernel[Any], fault: Exception | str) -> None:
        if isinstance(fault, PluginError):  # it was set aside, which has been said
            return
        text = fault if isinstance(fault, str) else f"{type(fault).__name__}: {fault}"
        note = f"kernel {kernel.name}: {text}"
        if note not in self._warned:
            self._warned.add(note)
            warnings.warn(note, TmmWarning, stacklevel=2)


def _bare(problem: Problem) -> Problem:
    return replace(problem, deterministic=False, batch_invariant=False, capturing=False)


def _fits(candidate: Candidate, problem: Problem) -> bool:
    """Whether a config found for another problem is in this one's search space and for its
    mode."""
    kernel, config = candidate.kernel, candidate.config
    return _is_for_mode(kernel, problem, config) and config in list(kernel.configs(problem))


def _is_for_mode(kernel: Kernel[Any], problem: Problem, config: Config) -> bool:
    """Whether a row's bits do not depend on M with this config, where they must not."""
    return not problem.batch_invariant or kernel.arithmetic(problem, config) is not None


def _sharing(kernel: Kernel[Any], problem: Problem, arithmetic: object) -> list[Config]:
    """The kernel's configs of that arithmetic."""
    return [c for c in kernel.configs(problem) if kernel.arithmetic(problem, c) == arithmetic]


def _other(key: Problem, problem: Problem) -> Problem | None:
    return key if key.m != problem.m else None


def _by_time(record: TuningRecord, statuses: tuple[str, ...] = ("ok",)) -> list[CandidateResult]:
    """Results of those statuses (by default the fully timed), fastest first."""
    done = [c for c in record.candidates if c.status in statuses]
    return sorted(done, key=lambda c: (c.median_us or float("inf"), c.kernel))
