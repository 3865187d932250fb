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

import contextlib
import functools
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from tmm_cache import CacheStore, TuningRecord

from tmm_core.dispatch.first_use import Trust
from tmm_core.dispatch.lookup import Evidence
from tmm_core.errors import (
    ConfigError,
    PluginError,
    UnsupportedProblemError,
    error_text,
    reraise,
)
from tmm_core.launch import warm
from tmm_core.launch.plan import Choice
from tmm_core.registry.registry import Registry
from tmm_core.settings import Settings, nested
from tmm_core.spec import toolchain
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.kernel import Candidate, Config, Kernel
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.tuning.environment_faults import cause_of, verdicts
from tmm_core.tuning.ranking import by_time
from tmm_core.tuning.search import CLOSE, NO_HINTS, Hints
from tmm_core.tuning.unmeasured import unmeasured
from tmm_core.tuning.untried import Able, Left, Noted

if TYPE_CHECKING:
    from tmm_core.dispatch.invariant import Invariance
    from tmm_core.dispatch.neighbour import Neighbours
    from tmm_core.tuning.tuner import Tuner

#: Records that a tuning starts from, and candidates of each: records of this problem on another GPU
#: or under other versions, or of near problems.
HINTING_RECORDS, HINTS_EACH = 3, 3

#: How long to wait for another process that is tuning the same problem, in tuning budgets.
LOCK_PATIENCE = 4.0

#: Seconds to wait for another process that is storing an adopted record.
ADOPT_PATIENCE = 1.0

#: Seconds between two lines that another process is tuning.
SAID_EVERY = 60.0

#: Rows per group at which batch-invariant mode chooses for ragged products.
ROWS_EACH = 64

Method = TypeVar("Method", bound=Callable[..., Any])


def _around_plugins(method: Method) -> Method:
    """A method that runs plugins' code: compiles, verifies and times kernels."""

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        with nested():
            return method(*arguments, **named)

    return cast(Method, call)


_ALONE = "no other kernel can serve this problem"


class _BusyError(Exception):
    """Another process tunes this problem, or another one on this GPU."""


class Dispatcher(Evidence):
    """Chooses candidates, and keeps its choices per bucket for this process."""

    def __init__(self, registry: Registry, tuner: Tuner | None, store: CacheStore) -> None:
        super().__init__(registry, store)
        if tuner is not None:
            self.tuner = tuner
        self.trust = Trust(store)
        self._choices: dict[tuple[Problem, Settings], Choice] = {}
        #: Settings whose names of plugins and kernels were looked up.
        self._named: set[Settings] = set()
        #: Held while something is measured or stored.
        self._lock = threading.RLock()
        #: Kernels that the environment failed outside of tuning, and their buckets.
        self._outside: set[tuple[str, Problem]] = set()
        #: When this process last said that another one is tuning.
        self._said = -SAID_EVERY

    # Created lazily: a process that finds its problems on record imports none of their modules.

    @functools.cached_property
    def tuner(self) -> Tuner:
        from tmm_core.tuning.tuner import Tuner

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

    @_around_plugins
    def bound(self, problem: Problem, settings: Settings) -> tuple[Choice, Launcher]:
        """The choice of :meth:`choose`, compiled, and verified if it never was: a kernel that fails
        at either is quarantined, and the next one down the ladder is tried.

        Raises:
            TmmError: Like :meth:`choose`.
            PluginError: A forced kernel is wrong.
            Exception: Raised by binding BLAS, or by binding or verifying a forced kernel.
        """
        if settings.nested and settings.kernel is None:
            choice = self._fallback(problem, "computed inside a plugin's code")
            return choice, choice.candidate.kernel.bind(problem, choice.candidate.config)
        while True:
            choice = self.choose(problem, settings)
            kernel, config = choice.candidate.kernel, choice.candidate.config
            try:
                launcher = kernel.bind(problem, config)
                fault = self._doubt(problem, choice, launcher, settings)
            except BaseException as error:
                reraise(error)
                if choice.origin == "forced" or kernel.name == BASELINE:
                    if issubclass(type(error), Exception):
                        raise
                    # It would end the process.
                    raise PluginError(f"kernel {kernel.name} raised {error_text(error)}") from error
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
        if self.trust.holds(problem, choice, settings.verify):
            return None
        size = f"{problem.along.upper()}={problem.extent}"
        untried = f"{choice.candidate.kernel.name} was never verified on this machine for {size}"
        if problem.capturing:
            return self._unverified(
                problem, choice, f"{untried}, and a CUDA graph is being captured"
            )
        with self._lock:  # not during timing
            if self.trust.holds(problem, choice, settings.verify):
                return None
            verdict = self.trust.verify(
                problem, choice, launcher, memory_limit=settings.tune_memory
            )
        if verdict.unknown:
            return self._unverified(problem, choice, f"{untried}: it {verdict.reason}")
        if verdict.reason is not None and choice.origin == "forced":
            raise PluginError(
                f"kernel {choice.candidate.kernel.name!r} is forced and wrong for {problem}: "
                f"{verdict.reason}; TMM_VERIFY=0 or override(verify=False) uses it unverified"
            )
        return verdict.reason

    def _unverified(self, problem: Problem, choice: Choice, why: str) -> Choice | None:
        """The replacement of a choice that cannot be verified now; None, with a warning, if the
        kernel is forced."""
        if choice.origin != "forced":
            return self._instead(problem, why)
        self.say_once(f"a forced kernel is used unverified: {why}")
        return None

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
        if settings not in self._named:
            self._named.add(settings)
            if unknown := self.registry.unknown_names(settings):
                self.say_once("; ".join(unknown))
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
        if self.untried and self.untried.changed():
            self._try_again()
        if (replayed := self._replayed(problem, key, settings)) is not None:
            return replayed
        began = time.monotonic()
        # An exact record may exist beside the bucket's: exact sizes are looked up for each new
        # shape, the bucket's choice is made once.
        able = self.able(problem, settings)
        spent = time.monotonic() - began
        # If even BLAS declines, its own error is raised.
        if all(kernel.name == BASELINE for kernel in able):
            return self._alone(problem)
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
                    choice = choice or self._resolve(problem, key, able, settings, spent)
        choice = choice or self._resolve(problem, key, able, settings, spent)
        if choice.lasting and not problem.capturing:
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
            return self._alone(problem)
        able = answered | {(kernel.name, kernel.version) for kernel in at_hand}
        found = self.record(problem)
        if found is None:
            return None
        asked, record = found
        best = record.best
        if (best.kernel, best.version) not in able or not self._complete(able, record, asked):
            return None
        candidate = self.able_candidate(best, problem, key, settings)
        if candidate is None:
            return None
        if self.untried.left(asked)[0]:
            self.say_untried(problem, self.untried.get(asked))
        return self.inside(problem, key, self.chosen_by(candidate, asked, problem), settings)

    def _complete(self, able: Set[Able], record: TuningRecord, key: Problem) -> bool:
        """Whether the record of ``key`` has a verdict on all these kernels, except for those that
        the environment left untried and that a call does not try again."""
        known = {(c.kernel, c.version) for c in verdicts(record.candidates)}
        left, again = self.untried.left(key)
        return bool(known) and not able & again and able <= known | left

    @_around_plugins
    def tune(self, problem: Problem, settings: Settings, *, force: bool = False) -> TuningRecord:
        """Measure ``problem`` exactly (no bucket) and store the record.

        A complete record is returned as it is unless ``force``. Kernels that a record lacks because
        its budget ended too soon, or because the environment failed, are timed now; a call does not
        do so in every process, as it would wait for them. If another process is tuning the same
        problem, waits for its record.

        Raises:
            UnsupportedProblemError: Called inside a plugin's code, which may be what is measured.
        """
        if settings.nested:
            raise UnsupportedProblemError("a plugin's code cannot tune: it may be what is measured")
        problem = replace(problem, static_weights=settings.static_weights and problem.batch == 1)
        with self._lock:
            record = None
            if self.untried.changed():
                self._try_again()
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
        kernel, bucket = choice.candidate.kernel, bucketed(problem.bare())
        raised = isinstance(fault, BaseException)
        text = error_text(fault) if isinstance(fault, BaseException) else fault
        self.quarantined[kernel.name, bucket] = f"it raised {text}" if raised else text
        self._forget()
        cause = cause_of(fault) if isinstance(fault, BaseException) else None
        if cause is not None:
            from tmm_core.tuning.findings import warn_of_environment

            self._outside.add((kernel.name, bucket))
            self.untried.watch()
            left = {(kernel.name, kernel.version): Left(cause, text)}
            warn_of_environment(left, problem, (cause,))
            return
        failed = "failed" if raised else "was wrong at its first use"
        about = f"{failed} on {problem} and is not used for it any more: {text}"
        self.warn_of(kernel, about, fault if isinstance(fault, BaseException) else None)

    def _try_again(self) -> None:
        """Choose again, since the toolchain changed: also for calls that have a plan."""
        for each in self._outside:
            self.quarantined.pop(each, None)
        self._outside.clear()
        if "tuner" in self.__dict__:
            self.tuner.compilers.close()  # its processes know the toolchain as it was
        self._forget()
        warm.forget_plans()

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
        names = {(k.name, k.version) for k in able}
        complete = record is not None and self._complete(names, record, key)
        if not tune or (complete and not force):
            if names & self.untried.left(key)[0]:
                self.say_untried(key, self.untried.get(key))
            return record
        blas = [] if any(k.name == BASELINE for k in able) else [self.registry.kernel(BASELINE)]
        try:
            with self._lock:
                return self._tune(key, [*able, *blas], settings, force)
        except Exception as error:  # tuning is a feature; the matmul must be answered
            reraise(error)
            self._warn_of_tuning(key, error, f"tuning failed: {error_text(error)}")
            return record

    # -- rungs -----------------------------------------------------------------------

    def _resolve(
        self,
        problem: Problem,
        key: Problem,
        able: list[Kernel[Any]],
        settings: Settings,
        spent: float = 0.0,
    ) -> Choice:
        if (choice := self._cached(problem, key, able, settings)) is not None:
            return choice
        forbidden = self.forbids_tuning(problem, settings)
        self.require_record(problem, key, settings)
        if forbidden is None:
            try:
                # Bits must not change between two calls where they are asked to be the same.
                waits = problem.batch_invariant or problem.deterministic
                asked = key == problem.bare() or spent > settings.tune_budget
                at_edge = able if asked else self.able(key, settings)
                record = self._tune(key, at_edge, settings, wait=waits, spent=spent)
            except _BusyError:
                return self._meanwhile(problem, able)
            except Exception as error:  # tuning is a feature; the matmul must be answered
                reraise(error)
                forbidden = f"tuning failed: {error_text(error)}"
                self._warn_of_tuning(problem, error, forbidden)
            else:
                if (candidate := self.best(record, able, problem)) is not None:
                    return self.chosen_by(candidate, key, problem, "tuned")
        elif settings.on_cache_miss == "tune" or problem.capturing:
            self.note_miss(key)
        why = forbidden or "tuning gave no usable winner"
        from tmm_core.dispatch import heuristic  # most processes find their problems on record

        guess = heuristic.choose(self, self._neighbours, problem, able, why)
        return guess or self._fallback(problem, why)

    def _forced(self, problem: Problem, settings: Settings) -> Choice:
        assert settings.kernel is not None
        kernel = self.registry.kernel(settings.kernel)
        unverified = "" if settings.verify else ", never verified (verify=False)"
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
            return Choice(Candidate(kernel, config), "forced", f"config given{unverified}")
        found = self.record(problem)
        if found is not None and (best := self.best(found[1], [kernel], problem)) is not None:
            return Choice(best, "forced", f"its best config on record{unverified}")
        usual = Candidate(kernel, kernel.default_config(problem))
        return Choice(usual, "forced", f"default config{unverified}")

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
        if settings is not None:
            noted = self.untried.get(key)
            again = self.untried.again(key, noted) if noted is not None else frozenset()
            completed = self.forbids_tuning(problem, settings) is None
            if completed and unmeasured(problem, able, record, False, noted, again):
                return None
            self.say_untried(problem, noted)
        candidate = self.best(record, able, problem)
        return None if candidate is None else self.chosen_by(candidate, key, problem)

    def _tune(
        self,
        key: Problem,
        able: list[Kernel[Any]],
        settings: Settings,
        force: bool = False,
        resume: bool = False,
        wait: bool = True,
        spent: float = 0.0,
    ) -> TuningRecord:
        """Measure a problem, unless its record is complete, and store the record.

        Args:
            wait: For another process that is tuning it, rather than raising :class:`_BusyError`.
            spent: Seconds of the budget that finding the kernels took.
        """
        from tmm_core.tuning.findings import Findings

        device, document = key.device, key.to_json()
        patience = settings.tune_budget * LOCK_PATIENCE if wait else 0.0
        findings = Findings()
        with (
            self.store.lock(device.gpu, device.environment, document, patience) as held,
            self._alone_on(device) as alone,
        ):
            if not (wait or (held and alone)):
                raise _BusyError
            # The lock's previous holder may have stored the record.
            kept = None if force else self.record_of(key)
            hints = self._hints(key) if kept is None else NO_HINTS
            noted = self.untried.get(key)
            again = self.untried.again(key, noted) if noted is not None else frozenset()
            # A record from elsewhere keeps candidates that this machine never verified.
            found = self.store.locate(device.gpu, device.environment, document)
            verified = kept is None or (found is not None and found.trusted)

            def tuned() -> TuningRecord:
                return self.tuner.tune(
                    key, able, settings, kept, hints, resume, noted, again, findings, spent
                )

            record = tuned()
            while record is not kept and (bad := self.unstorable(record)):
                # Others may have left the race because of theirs.
                able = [kernel for kernel in able if kernel.name not in bad]
                record = tuned()
            if record is not kept:
                if key.epilogue.lasting:
                    self.store.save(device.gpu, device.environment, record, verified=verified)
                else:  # no other process can have this epilogue
                    self.store.hold(device.gpu, device.environment, record, verified=verified)
                self._neighbours.add(device, record)
                self.untried.note(key, findings.tried, findings.left)
        findings.report(key)
        return record

    @contextlib.contextmanager
    def _alone_on(self, device: DeviceFingerprint) -> Iterator[bool]:
        """Hold the right to measure on the current GPU; yields False if another process has it: two
        that measure there at one time disturb each other."""
        if device.type != "cuda":
            yield True
            return
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        place: dict[str, Any] = {"measured on": uuid}
        with self.store.lock(device.gpu, device.environment, place, 0.0) as held:
            yield held

    def _meanwhile(self, problem: Problem, able: list[Kernel[Any]]) -> Choice:
        """The untuned answer while another process tunes the problem. It is not kept, so that the
        record answers once it is there; until then this process goes on to its next problem."""
        why = "another process is tuning it"
        if time.monotonic() - self._said >= SAID_EVERY:
            self._said = time.monotonic()
            logging.getLogger("tmm_core").warning(
                "another process is tuning; its products are answered untuned until it is done"
            )
        try:
            choice = self._fallback(problem, why)
        except UnsupportedProblemError:
            from tmm_core.dispatch import heuristic

            guess = heuristic.choose(self, self._neighbours, problem, able, why)
            if guess is None:
                raise
            choice = guess
        return replace(choice, lasting=False)

    def _alone(self, problem: Problem) -> Choice:
        """BLAS, where every other kernel declines; says why if this machine cannot build them."""
        choice = self._fallback(problem, _ALONE)
        if problem.device.type == "cuda" and self.registry.deferred:
            lacking = toolchain.lacking()
            if lacking is not None:
                about = {(next(iter(self.registry.deferred)), ""): Left("toolchain", lacking)}
                self.untried.watch()
                self.say_untried(problem, Noted(about))
        return choice

    def _warn_of_tuning(self, problem: Problem, error: Exception, forbidden: str) -> None:
        """Warn that a tuning failed; once per process if the environment is to blame."""
        cause = cause_of(error)
        if cause is None:
            self.say_once(f"{problem}: {forbidden}")
            return
        from tmm_core.tuning.findings import warn_of_environment

        warn_of_environment({(BASELINE, ""): Left(cause, forbidden)}, problem, (cause,))

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
