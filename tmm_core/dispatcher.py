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
    ConfigError,
    TmmWarning,
    UnsupportedProblemError,
)
from tmm_core.kernel import BASELINE, Candidate, Kernel
from tmm_core.plan import Choice
from tmm_core.problem import Problem
from tmm_core.registry import Registry
from tmm_core.settings import Settings

if TYPE_CHECKING:
    from tmm_core.invariant import Invariance
    from tmm_core.neighbour import Neighbours
    from tmm_core.tuner import Tuner

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
    def _invariance(self) -> Invariance:
        from tmm_core.invariant import Invariance

        return Invariance(self)

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
        with self._lock:
            record = None
            if problem.batch_invariant:
                record = self._invariance.tune(problem, settings, force)
            if record is None:
                problem = _bare(problem)
                record = self._tune(problem, self._able(problem, settings), settings, force)
            self._forget()
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
            self._forget()
            self._neighbours.forget()

    def quarantine(self, problem: Problem, choice: Choice, error: Exception) -> None:
        """Never again use this kernel for problems of this bucket, in this process."""
        name = choice.candidate.kernel.name
        self._quarantine[name, bucketed(_bare(problem))] = f"{type(error).__name__}: {error}"
        self._forget()
        warnings.warn(
            f"kernel {name} failed on {problem} and is not used for it any more: "
            f"{type(error).__name__}: {error}",
            TmmWarning,
            stacklevel=3,
        )

    def _forget(self) -> None:
        self._choices.clear()
        self._invariance.forget()

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
        bare = _bare(problem)
        own = [replace(bare, batch_invariant=True)] if problem.batch_invariant else []
        for key in dict.fromkeys(f(p) for p in (*own, bare) for f in (lambda p: p, bucketed)):
            found = self.store.load(problem.device.gpu, environment, key.to_json())
            if found is not None:
                return key, found
        return None

    def _invariant(self, problem: Problem, settings: Settings) -> Choice:
        choice = self._invariance.choose(problem, settings)
        if choice is None:
            choice = self._choose(replace(problem, batch_invariant=False), settings)
            name = choice.candidate.kernel.name
            self._say_once(
                f"{name} is not batch-invariant, but nothing that is can serve {problem}"
            )
        return choice

    def _on_record(
        self,
        key: Problem,
        able: list[Kernel[Any]],
        settings: Settings,
        tune: bool,
        force: bool = False,
    ) -> TuningRecord | None:
        """The record of ``key`` for batch-invariant mode, measured now where ``tune``: of kernels
        that are, with BLAS beside them."""
        record = self.store.load(key.device.gpu, key.device.environment, key.to_json())
        known = {(c.kernel, c.version) for c in record.candidates} if record else set()
        complete = all((k.name, k.version) in known for k in able) and bool(known)
        if not tune or (complete and not force):
            return record
        blas = [] if any(k.name == BASELINE for k in able) else [self.registry.kernel(BASELINE)]
        try:
            with self._lock:
                return self._tune(key, [*able, *blas], settings, force)
        except Exception as error:  # tuning is a feature; the matmul must be answered
            self._say_once(f"tuning {key} failed: {type(error).__name__}: {error}")
            return record

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
            except Exception as error:
                self._warn_once(kernel, error)
                continue
            if estimate is not None:
                estimates[kernel.name] = (estimate, Candidate(kernel, config))
        if not estimates:
            return None
        ranked = sorted(estimates.values(), key=lambda e: (e[0], e[1].kernel.name))
        time, candidate = ranked[0]
        if any(kernel.name == BASELINE for kernel in able):
            baseline = estimates.get(BASELINE)
            if baseline is None:
                return None
            if time >= baseline[0] * HEURISTIC_ADVANTAGE:
                time, candidate = baseline
        return Choice(candidate, "heuristic", f"{why}; estimated {time:.3g} µs, not measured")

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
        winner = record.candidates[record.winner]
        for result in (winner, *_by_time(record)):
            candidate = self._candidate(result, able)
            if candidate is not None:
                return candidate
        return None

    def _candidate(
        self, result: CandidateResult, able: list[Kernel[Any]], any_version: bool = False
    ) -> Candidate | None:
        for kernel in able:
            if kernel.name == result.kernel and (any_version or kernel.version == result.version):
                try:
                    return Candidate(kernel, kernel.config_type.from_json(result.config))
                except ConfigError as error:
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
        text = fault if isinstance(fault, str) else f"{type(fault).__name__}: {fault}"
        self._say_once(f"kernel {kernel.name}: {text}")

    def _say_once(self, note: str) -> None:
        if note not in self._warned:
            self._warned.add(note)
            warnings.warn(note, TmmWarning, stacklevel=3)


def _bare(problem: Problem) -> Problem:
    return replace(problem, deterministic=False, batch_invariant=False, capturing=False)


def _fits(candidate: Candidate, problem: Problem) -> bool:
    """Whether a config found for another problem is in this one's search space."""
    return candidate.config in list(candidate.kernel.configs(problem))


def _other(key: Problem, problem: Problem) -> Problem | None:
    return key if key.m != problem.m else None


def _by_time(record: TuningRecord, statuses: tuple[str, ...] = ("ok",)) -> list[CandidateResult]:
    """Results of those statuses (by default the fully timed), fastest first."""
    done = [c for c in record.candidates if c.status in statuses]
    return sorted(done, key=lambda c: (c.median_us or float("inf"), c.kernel))
