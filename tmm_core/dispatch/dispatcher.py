"""Chooses a candidate for a problem and binds it: the slow path, which warm calls skip.

:meth:`Dispatcher.bound` chooses a candidate, binds it, and verifies it at its first use. The first
source that has a candidate decides. Each choice names its source:

1. forced      ``kernel=``, ``TMM_KERNEL``, ``override(kernel=…)``
2. cache       a record of this problem, else of its M bucket
3. tuned       measured now, where ``on_cache_miss="tune"`` and nothing forbids it
4. neighbour   the nearest tuned problem of the same kind, not measured here
5. heuristic   the kernels' own estimates
6. fallback    BLAS, which always can
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tmm_cache import CacheStore, TuningRecord

from tmm_core.dispatch.deferring import Deferring, Query
from tmm_core.errors import (
    ConfigError,
    PluginError,
    UnsupportedProblemError,
    error_text,
    foreign_place,
    reraise,
)
from tmm_core.launch import warm
from tmm_core.launch.nesting import awaited, turn
from tmm_core.launch.plan import Choice
from tmm_core.registry.registry import Registry
from tmm_core.settings import Settings, nested
from tmm_core.spec import toolchain
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.kernel import Candidate, Config, Kernel
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.tuning.findings import warn_of_environment
from tmm_core.tuning.untried import Noted, Obstacle
from tmm_core.verify.environment_faults import cause_of

if TYPE_CHECKING:
    from tmm_core.dispatch.invariant import Invariance
    from tmm_core.tuning.tuner import Tuner

#: Seconds between two log lines that another process is tuning.
LOG_INTERVAL = 60.0
#: Rows per group at which batch-invariant mode chooses for ragged products.
ROWS_EACH = 64

_ALONE = "no other kernel can serve this problem"
_MEASURING = "another thread, which may wait for this one, is measuring"
_INSIDE = "computed inside a plugin's code"
_WAITED_FOR = "a plugin's code waits for a thread, which may be this one"


class Dispatcher(Deferring):
    """Chooses candidates, and keeps its choices per bucket for this process."""

    def __init__(self, registry: Registry, tuner: Tuner | None, store: CacheStore) -> None:
        super().__init__(registry, tuner, store)
        #: Choices by the bucket's problem, with the caller's requirements, and by settings.
        self._choices: dict[tuple[Problem, Settings], Choice] = {}
        #: :attr:`Registry.registered` when choices were last forgotten for it.
        self._registered = registry.registered
        #: When this process last logged that another one is tuning.
        self._logged = -LOG_INTERVAL

    @nested()  # it compiles, verifies or times plugins' kernels
    def bound(self, problem: Problem, settings: Settings) -> tuple[Choice, Launcher]:
        """Return the choice of :meth:`choose` with its launcher, verified if it never was. A kernel
        that cannot be bound or is wrong is quarantined, and the next choice is tried.

        Raises:
            TmmError: Like :meth:`choose`.
            PluginError: A forced kernel is wrong.
            Exception: Raised by binding BLAS, or by binding or verifying a forced kernel.
        """
        # A plugin's own product is not refused for lack of a record.
        strict = settings.on_cache_miss == "error" or self.store.locked
        if settings.kernel is None and (settings.nested or awaited(likely=strict)):
            choice = self._fallback(problem, _INSIDE if settings.nested else _WAITED_FOR)
            choice = replace(choice, lasting=settings.nested)
            if not settings.nested:
                self._warn_of_blas(problem, choice)
            return choice, choice.candidate.kernel.bind(problem, choice.candidate.config)
        if settings.on_cache_miss == "background":
            self.resume(problem, settings)
            if (answer := self.kept(problem, settings)) is not None:
                return answer
        found = self._bound(problem, settings)
        if settings.on_cache_miss == "background" and not found[0].lasting:
            self.keep(problem, settings, found)
        return found

    def _bound(self, problem: Problem, settings: Settings) -> tuple[Choice, Launcher]:
        while True:
            choice = self.choose(problem, settings)
            kernel, config = choice.candidate.kernel, choice.candidate.config
            try:
                launcher = kernel.bind(problem, config)
                answer = self._verified(problem, choice, launcher, settings)
            except BaseException as error:
                reraise(error)
                if choice.origin == "forced" or kernel.name == BASELINE:
                    # ``checked_launch`` turns a GeneratorExit into a RuntimeError. No attribute of
                    # a foreign class is read here.
                    ends = type(error) is RuntimeError and type(error.__cause__) is GeneratorExit
                    # The launcher has another signature, so no frame of the traceback is its own.
                    unnamed = type(error) is TypeError and not foreign_place(error)
                    if issubclass(type(error), Exception) and not (ends or unnamed):
                        raise
                    # Otherwise the exception would end the process, or a generator of the caller.
                    raise PluginError(f"kernel {kernel.name} raised {error_text(error)}") from error
                self.quarantine(problem, choice, error)
                continue
            if answer is choice:
                return choice, launcher
            if answer is not None:
                return answer, answer.candidate.kernel.bind(problem, answer.candidate.config)

    def _verified(
        self, problem: Problem, choice: Choice, launcher: Launcher, settings: Settings
    ) -> Choice | None:
        """Verify a choice at its first use; returns it, or BLAS if it cannot be verified now. None:
        it is wrong, and quarantined.

        Raises:
            PluginError: The choice is forced and wrong.
        """
        name = choice.candidate.kernel.name
        if self.first_use.may_launch(problem, choice, settings.verify):
            return choice
        size = f"{problem.along.upper()}={problem.extent}"
        why, cause = f"{name} was never verified on this machine for {size}", None
        if problem.capturing:
            why += ", and a CUDA graph is being captured"
        else:
            verdict = None
            with turn(self._lock) as mine:  # a launch would disturb another thread's timing
                if mine:
                    if self.first_use.may_launch(problem, choice, settings.verify):
                        return choice
                    verdict = self.first_use.verify(
                        problem, choice, launcher, memory_limit=settings.tune_memory
                    )
            if verdict is None:
                why = f"{why}, and {_MEASURING}"
            elif verdict.unknown:
                why, cause = f"{why}: it {verdict.reason}", verdict.cause
            else:
                if verdict.reason is None:
                    return choice
                if choice.origin != "forced":
                    self.quarantine(problem, choice, verdict.reason)
                    return None
                raise PluginError(
                    f"kernel {name!r} is forced and wrong for {problem}: {verdict.reason}; "
                    f"TMM_VERIFY=0 or override(verify=False) uses it unverified"
                )
        if choice.origin == "forced":
            self.warn_once(f"a forced kernel is used unverified: {why}")
            return choice
        if cause is not None:
            left = {(name, choice.candidate.kernel.version): Obstacle(cause, why)}
            warn_of_environment(left, problem)
        blas = self._fallback(problem, why)
        if blas.candidate.kernel.reasons_against(problem):
            return choice
        self._warn_of_blas(problem, blas)
        return blas

    def _warn_of_blas(self, problem: Problem, blas: Choice) -> None:
        """Warn, once, if BLAS answers in batch-invariant mode."""
        if problem.batch_invariant and not blas.candidate.kernel.traits.batch_invariant:
            why = f"which is not batch-invariant: {blas.reason}"
            self.warn_once(f"{problem} is served by BLAS, {why}")

    def choose(self, problem: Problem, settings: Settings) -> Choice:
        """Return the choice of the first source that has one.

        Raises:
            UnknownNameError, UnsupportedProblemError, ConfigError, PluginError: A forced kernel or
                config is not usable.
            CacheMissError: ``on_cache_miss="error"`` and no record.
        """
        if (registered := self.registry.registered) != self._registered:
            self._forget()
            self._registered = registered  # last: until then other threads forget, too
        if unknown := self.registry.unknown_names(settings):
            self.warn_once("; ".join(unknown))
        if settings.kernel is not None:
            return self._forced(problem, settings)
        why = _for_blas(problem)
        if why and not self.registry.kernel(BASELINE).reasons_against(problem):
            return self._fallback(problem, why)
        if not problem.batch_invariant:
            return self._choose(problem, settings)
        plain = replace(problem, batch_invariant=False)
        if problem.groups is not None:
            # One config serves any number of rows: the one chosen for ROWS_EACH rows per group. A
            # ragged K has no such config, since its sums belong to a single call.
            if problem.along == "k":
                return self._choose(plain, settings)
            usual = bucketed(problem.at(ROWS_EACH * problem.groups.count))
            return self._choose(usual, settings)
        choice = self._invariance.choose(problem, settings)
        if choice is None:
            choice = self._choose(plain, settings)
            self.warn_once(
                f"{choice.candidate.kernel.name} is not batch-invariant, but nothing that is can "
                f"serve {problem}"
            )
        return choice

    def _choose(self, problem: Problem, settings: Settings) -> Choice:
        """Choose by a record, else by measuring, else without a measurement."""
        key = bucketed(problem.bare())
        if self.untried.changed():
            self._try_again()
        choices = self._choices
        began = time.monotonic()
        able = self.able(problem, settings)
        spent = time.monotonic() - began
        # If BLAS declines too, its own error is raised.
        if all(kernel.name == BASELINE for kernel in able):
            return self._alone(problem)
        query = Query(problem, key, settings, able, spent)
        # A record of the exact size takes precedence. It is looked up for each new shape, whereas
        # the bucket's choice is made once.
        if key.extent != problem.extent and (exact := self._recorded(query, problem.bare())):
            return exact
        # A choice made during capture has fewer candidates, so it is not kept. A kept choice also
        # serves captures.
        kept = bucketed(replace(problem, capturing=False)), settings
        forbidden = self.forbids_tuning(problem, settings)
        may_tune = forbidden is None
        choice = self._earlier(kept, able) or self._recorded(query, key, complete=may_tune)
        if choice is None and may_tune and settings.on_cache_miss == "background":
            choice = self._later(query)
        elif choice is None and may_tune:
            # Two measurements at one time would disturb each other.
            with turn(self._lock) as mine:
                if not mine:
                    return self._for_now(query, _MEASURING)
                choice = self._earlier(kept, able) or self._recorded(query, key, complete=True)
                choice = choice or self._tuned(query)
        elif choice is None:
            self.require_record(problem, key, settings)
            if settings.on_cache_miss != "heuristic" or problem.capturing:
                self.log_miss(key)
        choice = choice or self._unmeasured(query, forbidden or "")
        if choice.lasting and not problem.capturing:
            choices[kept] = choice
        waits = may_tune and not self.raced(query, choice)
        choice = self.inside(problem, key, choice, able)
        if settings.shares_gpu and choice.lasting and settings.on_cache_miss != "background":
            choice = self.beside(problem, choice, able)
        return replace(choice, lasting=False) if waits else choice

    # -- sources of a choice, in order ---------------------------------------------------

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
            if unmet := config.unmet_promises(problem):
                raise UnsupportedProblemError(
                    f"kernel {kernel.name!r} with config {config} relies on promises that the "
                    f"caller of {problem} did not make: {', '.join(unmet)}"
                )
            return Choice(Candidate(kernel, config), "forced", f"config given{unverified}")
        found = self.record(problem)
        if found is not None and (best := self.best(found[1], [kernel], problem)) is not None:
            return Choice(best, "forced", f"its best config on record{unverified}")
        usual = Candidate(kernel, kernel.default_config(problem))
        return Choice(usual, "forced", f"default config{unverified}")

    def _earlier(self, kept: tuple[Problem, Settings], able: list[Kernel[Any]]) -> Choice | None:
        """Return the earlier choice, if its kernel can still serve."""
        choice = self._choices.get(kept)
        return choice if choice is not None and choice.candidate.kernel in able else None

    def _recorded(self, query: Query, key: Problem, complete: bool = False) -> Choice | None:
        """Return the choice by the record of ``key``; if it has to be ``complete``, only if it
        lacks no kernel (new plugin, other version)."""
        record = self.record_of(key)
        if record is None:
            return None
        if complete and self.untried.missing(key, query.able, record, called=query.problem):
            return None
        if key == query.key:
            self.warn_untried(query.problem, self.untried.get(key))
        candidate = self.best(record, query.able, query.problem)
        return None if candidate is None else self.chosen_by(candidate, key)

    def _tuned(self, query: Query) -> Choice:
        """Tune, and return the winner; an untuned choice if tuning fails or another process
        measures."""
        problem, key, settings = query.problem, query.key, query.settings
        try:
            known = key == problem.bare() or query.spent > settings.tune_budget
            able = query.able if known else self.able(key, settings)
            # Where two calls must give the same bits, an interim answer is not allowed.
            waits = problem.batch_invariant
            record = self._tune(key, able, settings, wait=waits, spent=query.spent)
        except Exception as error:  # tuning is a feature; the matmul must be answered
            reraise(error)
            why = f"tuning failed: {error_text(error)}"
            self.warn_of_tuning(problem, error, why)
            return self._unmeasured(query, why)
        if record is None:
            return self._meanwhile(query)
        if (candidate := self.best(record, query.able, problem)) is not None:
            return self.chosen_by(candidate, key, "tuned")
        return self._unmeasured(query, "tuning gave no usable winner")

    def _later(self, query: Query) -> Choice:
        """Return an interim choice, while later calls tune in the background; a lasting choice if
        the tuning has ended without a usable winner."""
        name = query.key, query.settings
        known = self._recorded(query, query.key)
        if (why := self.ended.get(name)) is not None:
            return known or self._unmeasured(query, why)
        if name not in self.background:
            # Import the tuner and list the records now, since this call loads kernels anyway.
            _, _ = self.tuner, self._neighbours.families()
            able = self.able(query.key, query.settings)
            steps = self._tuning(query.key, able, query.settings, spent=query.spent)
            self.defer(name, query, steps, "tuning gave no usable winner")
        if known is not None:
            return replace(known, lasting=False)
        return self._for_now(query, "later calls tune it in the background")

    def _meanwhile(self, query: Query) -> Choice:
        """Return an interim choice while another process tunes the problem. It is not kept, so that
        the record answers as soon as it is stored."""
        if time.monotonic() - self._logged >= LOG_INTERVAL:
            self._logged = time.monotonic()
            logging.getLogger("tmm_core").warning(
                "another process is tuning; its products are answered untuned until it is done"
            )
        return self._for_now(query, "another process is tuning it")

    def _for_now(self, query: Query, why: str) -> Choice:
        """Return BLAS, which needs no compilation, if it serves the problem; else an untuned
        choice. Neither is kept."""
        try:
            choice = self._fallback(query.problem, why)
            self._warn_of_blas(query.problem, choice)
        except UnsupportedProblemError:
            choice = self._unmeasured(query, why)
        return replace(choice, lasting=False)

    def _unmeasured(self, query: Query, why: str) -> Choice:
        """Return the neighbour's choice, the heuristic's, or BLAS."""
        from tmm_core.dispatch import heuristic  # most processes find their problems on record

        choice = heuristic.choose(self, self._neighbours, query.problem, query.able, why)
        return choice or self._fallback(query.problem, why)

    def _alone(self, problem: Problem) -> Choice:
        """Return BLAS where every other kernel declines; warns if this machine cannot build Triton
        kernels."""
        choice = self._fallback(problem, _ALONE)
        if problem.device.type == "cuda" and (lacking := toolchain.lacking()):
            names = (each.name for each in self.registry.kernels() if each.name != BASELINE)
            if (other := next(names, None)) is not None:
                self.untried.watch()
                self.warn_untried(problem, Noted({(other, ""): Obstacle("toolchain", lacking)}))
        return choice

    def _fallback(self, problem: Problem, why: str) -> Choice:
        """Return BLAS.

        Raises:
            UnsupportedProblemError: No kernel serves the problem, and BLAS's declaration excludes
                it: BLAS would compute it wrongly. Problems that torch cannot compute raise torch's
                errors later.
        """
        kernel = self.registry.kernel(BASELINE)
        if against := kernel.supports.reasons_against(problem):
            raise UnsupportedProblemError(
                f"no kernel serves {problem}; {BASELINE}: {'; '.join(against)}"
            )
        return Choice(Candidate(kernel, kernel.config_type()), "fallback", why)

    # -- for commands and other modules -----------------------------------------------------

    @nested()
    def tune(self, problem: Problem, settings: Settings, *, force: bool = False) -> TuningRecord:
        """Measure ``problem`` exactly (no bucket) and store the record.

        A complete record is returned unchanged unless ``force``. Kernels that a record lacks
        because its budget ended, or because the environment failed, are timed now. (Calls do not
        time them in every process, since they would wait.) If another process is tuning the same
        problem, this waits for its record.

        Raises:
            UnsupportedProblemError: Called inside a plugin's code, which may itself be measured; or
                a dimension is 0.
        """
        if settings.nested:
            raise UnsupportedProblemError("a plugin's code cannot tune: it may itself be measured")
        if problem.is_empty:
            raise UnsupportedProblemError(f"{problem}: nothing to measure: a dimension is 0")
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
                record = self._tune(problem, able, settings, force=force, resume=True)
            assert record is not None  # it waits for other processes
            self._forget()
            return record

    def adopt(self, problem: Problem, record: TuningRecord) -> None:
        """Use the ``record`` of ``problem``, of any origin, for choices until this process ends.

        The record is also stored, unless it is stored already or the disk refuses it.
        """
        device, mode = problem.device, "batch_invariant" in record.problem
        key = replace(problem.bare(), batch_invariant=mode)
        with self._lock:
            known = self.store.load(device.gpu, device.environment, record.problem)
            if known is None or record not in (known, self.record_of(key)):
                known = self._store(key, record)
            self.store.hold(device.gpu, device.environment, known)
            self.stamp_winner(key, record)
            self._forget()
            self._neighbours.add(device, known)

    def quarantine(self, problem: Problem, choice: Choice, fault: BaseException | str) -> None:
        """Stop using this kernel for problems of this bucket, in this process. The ``fault`` is the
        kernel's exception, or the finding of verification."""
        kernel, bucket = choice.candidate.kernel, bucketed(problem.bare())
        if isinstance(fault, BaseException):
            text, error, failed = error_text(fault), fault, "failed"
        else:
            text, error, failed = fault, None, "was wrong at its first use"
        self.quarantined[kernel.name, bucket] = text if error is None else f"it raised {text}"
        self._forget()
        cause = None if error is None else cause_of(error)
        if cause is not None:
            self.untried.watch()
            left = {(kernel.name, kernel.version): Obstacle(cause, text)}
            warn_of_environment(left, problem, (cause,))
            return
        about = f"{failed} on {problem} and is not used for it any more: {text}"
        self.warn_of(kernel, about, error)

    def _try_again(self) -> None:
        """Forget choices, plans and kernels' faults, since the toolchain changed: every call
        chooses again."""
        self.quarantined.clear()
        if "tuner" in self.__dict__:
            self.tuner.compilers.close()  # its processes use the old toolchain
        self._forget()
        warm.forget_plans()

    def _forget(self) -> None:
        # Another thread may be choosing by what has just changed: it adds to the former choices.
        self._choices = {}
        self.answers.clear()
        self.ended.clear()
        self._invariance.forget()

    @functools.cached_property
    def _invariance(self) -> Invariance:
        # Most processes never import this module.
        from tmm_core.dispatch.invariant import Invariance

        return Invariance(self)

    def after_fork(self) -> None:
        """Replace locks that other threads of the parent process may hold."""
        self._lock = threading.RLock()
        self.registry.after_fork()
        self.abandon()


def _completed(kernel: Kernel[Any], problem: Problem, given: dict[str, Any]) -> Config:
    """Return the config with these fields; missing fields come from the kernel's default config.

    Raises:
        ConfigError: An unknown field, or a value out of bounds.
    """
    try:
        return kernel.config_type.from_json(given)
    except ConfigError:
        usual = kernel.default_config(problem).to_json()
        return kernel.config_type.from_json(usual | given)


def _for_blas(problem: Problem) -> str:
    """Why BLAS answers without regard to records and estimates; empty if these decide."""
    if problem.is_empty:
        return "nothing to multiply: a dimension is 0"
    if problem.device.interpreted and problem.device.type == "cuda":
        return "TRITON_INTERPRET is set, and records are of compiled kernels"
    return ""
