"""Turns a problem into a plan: the slow path, which warm calls skip.

The ladder, top rung first; each choice names its rung:

1. forced      ``kernel=``, ``TMM_KERNEL``, ``override(kernel=…)``
2. cache       a record of this problem, else of its M bucket
3. tune        measure now, where ``on_cache_miss="tune"`` and nothing forbids it
4. neighbour   the nearest tuned problem of the same kind: a guess
5. heuristic   the kernels' own estimates
6. fallback    BLAS, which always can
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tmm_cache import CacheStore, TuningRecord

from tmm_core.dispatch.evidence import Evidence
from tmm_core.dispatch.proposals import CLOSE, NO_HINTS, Hints
from tmm_core.dispatch.registry import Registry
from tmm_core.dispatch.standing import by_time
from tmm_core.dispatch.trust import Trust
from tmm_core.dispatch.unmeasured import unmeasured
from tmm_core.errors import ConfigError, TmmWarning, UnsupportedProblemError, warn
from tmm_core.launch.plan import Choice
from tmm_core.settings import Settings
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.kernel import Candidate, Config, Kernel
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.problem import Problem

if TYPE_CHECKING:
    from tmm_core.dispatch.invariant import Invariance
    from tmm_core.dispatch.neighbour import Neighbours
    from tmm_core.dispatch.tuner import Tuner

#: Records that a tuning starts from, and candidates of each: records of this problem on another GPU
#: or under other versions, or of near problems.
HINTING_RECORDS, HINTS_EACH = 3, 3

#: How long to wait for another process that is tuning the same problem, in tuning budgets.
LOCK_PATIENCE = 4.0

#: Seconds to wait for another process that is storing an adopted record.
ADOPT_PATIENCE = 1.0


#: Rows per group at which batch-invariant mode chooses for ragged products.
ROWS_EACH = 64

_ALONE = "no other kernel can serve this problem"


class Dispatcher(Evidence):
    """Chooses candidates, and keeps its choices per bucket for this process."""

    def __init__(self, registry: Registry, tuner: Tuner | None, store: CacheStore) -> None:
        super().__init__(registry, store)
        if tuner is not None:
            self.tuner = tuner
        self.trust = Trust(store)
        self._choices: dict[tuple[Problem, Settings], Choice] = {}
        #: Held while something is measured or stored.
        self._lock = threading.RLock()

    # Created lazily: a process that finds its problems on record imports none of their modules.

    @functools.cached_property
    def tuner(self) -> Tuner:
        from tmm_core.dispatch.tuner import Tuner

        return Tuner()

    @functools.cached_property
    def _invariance(self) -> Invariance:
        from tmm_core.dispatch.invariant import Invariance

        return Invariance(self, self._on_record)

    @functools.cached_property
    def _neighbours(self) -> Neighbours:
        from tmm_core.dispatch.neighbour import Neighbours

        return Neighbours(self.store)

    def after_fork(self) -> None:
        """Replace locks that another thread of the parent process may hold."""
        self._lock = threading.RLock()
        self.registry.after_fork()

    def bound(self, problem: Problem, settings: Settings) -> tuple[Choice, Launcher]:
        """The choice of :meth:`choose`, compiled, and verified if it never was: a kernel that fails
        at either is quarantined, and the next one down the ladder is tried.

        Raises:
            TmmError: Like :meth:`choose`.
            Exception: Raised by binding BLAS or a forced kernel.
        """
        while True:
            choice = self.choose(problem, settings)
            kernel, config = choice.candidate.kernel, choice.candidate.config
            try:
                launcher = kernel.bind(problem, config)
                fault = self._doubt(problem, choice, launcher, settings)
            except TmmWarning:  # a warning made an error, which is not the kernel's fault
                raise
            except Exception as error:
                if choice.origin == "forced" or kernel.name == BASELINE:
                    raise
                self.quarantine(problem, choice, error)
                continue
            if fault is None:
                return choice, launcher
            if isinstance(fault, Choice):
                return fault, fault.candidate.kernel.bind(problem, fault.candidate.config)
            self.quarantine(problem, choice, fault)

    def _doubt(
        self, problem: Problem, choice: Choice, launcher: Launcher, settings: Settings
    ) -> str | Choice | None:
        """Verify a choice at its first use. Returns None if it is right, a text if it is wrong, or
        a replacement if it cannot be verified now."""
        if self.trust.holds(problem, choice):
            return None
        untried = f"{choice.candidate.kernel.name} was never verified on this machine"
        if problem.capturing:
            return self._instead(problem, f"{untried}, and a CUDA graph is being captured")
        with self._lock:  # not during timing
            if self.trust.holds(problem, choice):
                return None
            verdict = self.trust.verify(
                problem, choice.candidate, launcher, memory_limit=settings.tune_memory
            )
        if verdict.unknown:
            return self._instead(problem, f"{untried}: it {verdict.reason}")
        return verdict.reason

    def _instead(self, problem: Problem, why: str) -> Choice | None:
        """BLAS in place of an unverifiable choice; None if BLAS cannot serve the problem."""
        choice = self._fallback(problem, why)
        if choice.candidate.kernel.reasons_against(problem):
            return None
        if problem.batch_invariant and not choice.candidate.kernel.traits.batch_invariant:
            self.say_once(f"{problem} is served by BLAS, which is not batch-invariant: {why}")
        return choice

    def choose(self, problem: Problem, settings: Settings) -> Choice:
        """Choose by descending the ladder.

        Raises:
            UnknownNameError, UnsupportedProblemError, ConfigError, PluginError: A forced kernel or
                config is not usable.
            CacheMissError: ``on_cache_miss="error"`` and no record.
        """
        if settings.disable:
            for what in self.registry.misnamed(settings.disable):
                self.say_once(f"TMM_DISABLE or override(disable=…): {what}")
        if settings.kernel is not None:
            return self._forced(problem, settings)
        if problem.batch_invariant and problem.groups is not None:
            return self._choose_invariant_groups(problem, settings)
        if problem.batch_invariant:
            return self._invariant(problem, settings)
        return self._choose(problem, settings)

    def _choose_invariant_groups(self, problem: Problem, settings: Settings) -> Choice:
        """One config for ragged products with any number of rows: the choice for :data:`ROWS_EACH`
        rows per group. Sums over a ragged K belong to a single call."""
        assert problem.groups is not None
        if problem.along == "k":
            return self._choose(replace(problem, batch_invariant=False), settings)
        usual = bucketed(problem.at(ROWS_EACH * problem.groups.count))
        return replace(self._choose(usual, settings), evidence=usual)

    def _choose(self, problem: Problem, settings: Settings) -> Choice:
        key = bucketed(problem.bare())
        if (replayed := self._replayed(problem, key, settings)) is not None:
            return replayed
        # An exact record may exist beside the bucket's: exact sizes are looked up for each new
        # shape, the bucket's choice is made once.
        able = self.able(problem, settings)
        # If even BLAS declines, its own error is raised.
        if all(kernel.name == BASELINE for kernel in able):
            return self._fallback(problem, _ALONE)
        if key.extent != problem.extent:
            exact = self._cached(problem, problem.bare(), able)
            if exact is not None:
                return exact
        # A choice made during capture has fewer candidates, so it is not kept; kept ones serve
        # capture.
        remembered = bucketed(replace(problem, capturing=False))
        choice = self._chosen(remembered, settings, able)
        if choice is None and self.forbids_tuning(problem, settings) is None:
            choice = self._cached(problem, key, able, settings)
            if choice is None:
                # One measurement at a time, or they would disturb each other; other threads do not
                # wait.
                with self._lock:
                    choice = self._chosen(remembered, settings, able)
                    choice = choice or self._resolve(problem, key, able, settings)
        choice = choice or self._resolve(problem, key, able, settings)
        if not problem.capturing:
            self._choices[remembered, settings] = choice
        return self.inside(problem, key, choice, settings)

    def _chosen(self, key: Problem, settings: Settings, able: list[Kernel[Any]]) -> Choice | None:
        """The earlier choice, if it may still serve."""
        choice = self._choices.get((key, settings))
        return choice if choice is not None and choice.candidate.kernel in able else None

    def _replayed(self, problem: Problem, key: Problem, settings: Settings) -> Choice | None:
        """The winner of a complete record, if the answers of kernels not imported yet are known
        from another process: then only the winner is imported, and asked again."""
        # Only the kernels know whether a record covers the candidates that static_weights allows.
        if problem.batch_invariant or problem.static_weights or not self.registry.unloaded():
            return None
        answered = self._answered.get(problem, settings)
        if answered is None:
            return None
        at_hand, _ = self.registry.candidates(problem, settings, deferred=False)
        if not answered and all(kernel.name == BASELINE for kernel in at_hand):
            return self._fallback(problem, _ALONE)
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
        candidate = self.able_candidate(best, problem, key, settings)
        if candidate is None:
            return None
        return self.inside(problem, key, self.chosen_by(candidate, asked, problem), settings)

    def tune(self, problem: Problem, settings: Settings, *, force: bool = False) -> TuningRecord:
        """Measure ``problem`` exactly (no bucket) and store the record.

        A complete record is returned as it is unless ``force``. Kernels that a record lacks because
        its budget ended too soon are timed now; a call does not do so, as it would wait for them in
        every process. If another process is tuning the
        same problem, waits for its record.
        """
        problem = replace(problem, static_weights=settings.static_weights and problem.batch == 1)
        with self._lock:
            record = None
            if problem.batch_invariant:
                record = self._invariance.tune(problem, settings, force)
            if record is None:
                problem = problem.bare()
                able = self.able(problem, settings)
                record = self._tune(problem, able, settings, force, resume=True)
            self._forget()
            return record

    def prepare(self, problem: Problem, settings: Settings, force: bool = False) -> None:
        """Start compiling the first candidates for ``problem`` without waiting, unless it is on
        record: when several problems are tuned in turn, the next one's kernels compile while one is
        timed."""
        problem = problem.bare()
        if problem.device.interpreted or (not force and self.record_of(problem)):
            return
        self.tuner.prepare(problem, self.able(problem, settings), self._hints(problem))

    def adopt(self, device: DeviceFingerprint, record: TuningRecord) -> None:
        """Use ``record`` for choices, whatever its origin, as long as this process lives.

        It is also stored, unless it already is or the disk refuses it.
        """
        gpu, environment = device.gpu, device.environment
        with self._lock:
            with self.store.lock(gpu, environment, record.problem, ADOPT_PATIENCE):
                if self.store.load(gpu, environment, record.problem) != record:
                    self.store.save(gpu, environment, record)
            self.store.hold(gpu, environment, record)
            self._forget()
            self._neighbours.add(device, record)

    def quarantine(self, problem: Problem, choice: Choice, fault: BaseException | str) -> None:
        """Never again use this kernel for problems of this bucket, in this process.

        Args:
            fault: Its exception, or verification's finding.
        """
        name = choice.candidate.kernel.name
        raised = isinstance(fault, BaseException)
        text = f"{type(fault).__name__}: {fault}" if raised else str(fault)
        self.quarantined[name, bucketed(problem.bare())] = f"it raised {text}" if raised else text
        self._forget()
        failed = "failed" if raised else "was wrong at its first use"
        warn(f"kernel {name} {failed} on {problem} and is not used for it any more: {text}")

    def _forget(self) -> None:
        self._choices.clear()
        self._invariance.forget()

    def _invariant(self, problem: Problem, settings: Settings) -> Choice:
        choice = self._invariance.choose(problem, settings)
        if choice is None:
            choice = self._choose(replace(problem, batch_invariant=False), settings)
            name = choice.candidate.kernel.name
            self.say_once(f"{name} is not batch-invariant, but nothing that is can serve {problem}")
        return choice

    def _on_record(
        self,
        key: Problem,
        able: list[Kernel[Any]],
        settings: Settings,
        tune: bool,
        force: bool = False,
    ) -> TuningRecord | None:
        """The record of ``key`` for batch-invariant mode, measured now if ``tune``: of the
        batch-invariant kernels, and BLAS for comparison."""
        record = self.record_of(key)
        known = {(c.kernel, c.version) for c in record.candidates} if record else set()
        complete = all((k.name, k.version) in known for k in able) and bool(known)
        if not tune or (complete and not force):
            return record
        blas = [] if any(k.name == BASELINE for k in able) else [self.registry.kernel(BASELINE)]
        try:
            with self._lock:
                return self._tune(key, [*able, *blas], settings, force)
        except Exception as error:  # tuning is a feature; the matmul must be answered
            self.say_once(f"tuning {key} failed: {type(error).__name__}: {error}")
            return record

    # -- rungs -----------------------------------------------------------------------

    def _resolve(
        self, problem: Problem, key: Problem, able: list[Kernel[Any]], settings: Settings
    ) -> Choice:
        if (choice := self._cached(problem, key, able, settings)) is not None:
            return choice
        forbidden = self.forbids_tuning(problem, settings)
        self.require_record(problem, key, settings)
        if forbidden is None:
            try:
                record = self._tune(key, self.able(key, settings), settings)
            except Exception as error:  # tuning is a feature; the matmul must be answered
                forbidden = f"tuning failed: {type(error).__name__}: {error}"
                warn(f"{problem}: {forbidden}")
            else:
                if (candidate := self.best(record, able, problem)) is not None:
                    return self.chosen_by(candidate, key, problem, "tuned")
        elif settings.on_cache_miss == "tune" or problem.capturing:
            self.note_miss(key)
        why = forbidden or "tuning gave no usable winner"
        from tmm_core.dispatch import guesses  # most processes find their problems on record

        guess = guesses.choose(self, self._neighbours, problem, able, why)
        return guess or self._fallback(problem, why)

    def _forced(self, problem: Problem, settings: Settings) -> Choice:
        assert settings.kernel is not None
        kernel = self.registry.kernel(settings.kernel)
        if reasons := self.registry.reasons_against(kernel, problem, settings):
            raise UnsupportedProblemError(
                f"kernel {kernel.name!r} cannot serve {problem}: {'; '.join(reasons)}"
            )
        if settings.config is not None:
            config = _completed(kernel, problem, json.loads(settings.config))
            if unsaid := config.unsaid(problem):
                raise UnsupportedProblemError(
                    f"kernel {kernel.name!r} with config {config} relies on what was not said of "
                    f"{problem}: {', '.join(unsaid)}"
                )
            return Choice(Candidate(kernel, config), "forced", "config given")
        found = self.record(problem)
        if found is not None and (best := self.best(found[1], [kernel], problem)) is not None:
            return Choice(best, "forced", "its best config on record")
        return Choice(Candidate(kernel, kernel.default_config(problem)), "forced", "default config")

    def _cached(
        self,
        problem: Problem,
        key: Problem,
        able: list[Kernel[Any]],
        settings: Settings | None = None,
    ) -> Choice | None:
        """The choice from the record of ``key``. With ``settings``, a record that lacks a kernel
        (new plugin, other version) is left to be completed by tuning, if allowed."""
        record = self.record_of(key)
        if record is None:
            return None
        completed = settings is not None and self.forbids_tuning(problem, settings) is None
        if completed and unmeasured(problem, able, record):
            return None
        candidate = self.best(record, able, problem)
        return None if candidate is None else self.chosen_by(candidate, key, problem)

    def _tune(
        self,
        key: Problem,
        able: list[Kernel[Any]],
        settings: Settings,
        force: bool = False,
        resume: bool = False,
    ) -> TuningRecord:
        device, document = key.device, key.to_json()
        patience = settings.tune_budget * LOCK_PATIENCE
        with self.store.lock(device.gpu, device.environment, document, patience) as _held:
            # The lock's previous holder may have stored the record.
            kept = None if force else self.record_of(key)
            hints = self._hints(key) if kept is None else NO_HINTS
            # A record from elsewhere keeps candidates that this machine never verified.
            found = self.store.locate(device.gpu, device.environment, document)
            verified = kept is None or (found is not None and found.trusted)
            record = self.tuner.tune(key, able, settings, kept, hints, resume)
            if record is not kept:
                self.store.save(device.gpu, device.environment, record, verified=verified)
                self._neighbours.add(device, record)
            return record

    def _hints(self, problem: Problem) -> Hints:
        """Winners of this problem elsewhere, or of near ones, which a tuning tries first."""
        near = list(itertools.islice(self._neighbours.nearest(problem), HINTING_RECORDS))
        candidates = [
            (result.kernel, result.config)
            for each in near
            for result in by_time(each.record)[:HINTS_EACH]
        ]
        return Hints(candidates, bool(near) and near[0].octaves <= CLOSE)

    def _fallback(self, problem: Problem, why: str) -> Choice:
        """BLAS, whose own errors report the limits of torch; but a problem that it does not declare
        would be computed wrongly.

        Raises:
            UnsupportedProblemError: No kernel serves the problem, and BLAS does not declare it.
        """
        kernel = self.registry.kernel(BASELINE)
        if against := kernel.supports.reasons_against(problem):
            raise UnsupportedProblemError(
                f"no kernel serves {problem}; {BASELINE}: {'; '.join(against)}"
            )
        return Choice(Candidate(kernel, kernel.config_type()), "fallback", why)


def _completed(kernel: Kernel[Any], problem: Problem, given: dict[str, Any]) -> Config:
    """The config with these fields; missing ones come from the kernel's default config.

    Raises:
        ConfigError: An unknown field, or a value out of bounds.
    """
    try:
        return kernel.config_type.from_json(given)
    except ConfigError:
        usual = kernel.default_config(problem).to_json()
        if not set(given) < set(usual):
            raise
        return kernel.config_type.from_json(usual | given)
