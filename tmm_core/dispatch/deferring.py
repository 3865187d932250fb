"""Defers tunings and races, for which a call would wait: later calls run them in slices."""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tmm_base.guards import suppress
from tmm_cache import CacheStore, TuningRecord

from tmm_core.dispatch.measuring import Measuring
from tmm_core.errors import error_text, reraise
from tmm_core.launch.plan import Choice
from tmm_core.registry.registry import Registry
from tmm_core.settings import Settings
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.kernel import Candidate, Kernel
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import Steps, drained
from tmm_core.tuning.ranking import racers

if TYPE_CHECKING:
    from tmm_core.tuning.background import Background
    from tmm_core.tuning.tuner import Tuner

#: Maximum number of kept answers for problems whose tuning is unfinished.
MOST_ANSWERS = 4096

#: The name of a deferred measurement: its problem, and the settings.
Name = tuple[Problem, Settings]


@dataclass(frozen=True, slots=True)
class Query:
    """A problem to choose a kernel for."""

    problem: Problem
    #: The problem of its bucket's record.
    key: Problem
    settings: Settings
    #: The kernels that can serve it.
    able: list[Kernel[Any]]
    #: Seconds of the tuning budget spent on finding these kernels.
    spent: float


class Deferring(Measuring):
    """Measures in the background, and races candidates at the exact M of a call."""

    def __init__(self, registry: Registry, tuner: Tuner | None, store: CacheStore) -> None:
        super().__init__(registry, tuner, store)
        #: Answers for problems with an unfinished tuning or race, so that they are chosen only
        #: once; with the names of these measurements.
        self.answers: dict[Name, tuple[tuple[Name, Name], tuple[Choice, Launcher]]] = {}
        #: The measurements that ended, with the reason if the record gives no answer.
        self.ended: dict[Name, str] = {}

    @functools.cached_property
    def background(self) -> Background:
        from tmm_core.tuning.background import Background

        return Background(lambda problem: self._alone_on(problem.device))

    def preload(self) -> None:
        """Import the modules and list the records that a first call without a record needs, and
        load the functions of its tuning."""
        self.registry.kernels()
        self._neighbours.families()
        _ = self.tuner.compilers, self.background
        if torch.cuda.is_available():
            with suppress(Exception), self._lock:  # a tuning reports what fails
                device = torch.device("cuda", torch.cuda.current_device())
                self.tuner.preload(self.registry.kernel(BASELINE), device)
        gc.collect()
        gc.freeze()  # a collection of what torch and Triton import would take 0.1 s of a call

    def keep(self, problem: Problem, settings: Settings, found: tuple[Choice, Launcher]) -> None:
        """Keep the answer for a problem while its tuning or race is unfinished."""
        if len(self.answers) >= MOST_ANSWERS:
            self.answers.clear()
        bare = problem.bare()
        self.answers[problem, settings] = ((bucketed(bare), settings), (bare, settings)), found

    def kept(self, problem: Problem, settings: Settings) -> tuple[Choice, Launcher] | None:
        """Return the kept answer, if the problem's tuning or race is still unfinished."""
        names, found = self.answers.get((problem, settings), ((), None))
        if found is not None and not any(name in self.background for name in names):
            self.answers.pop((problem, settings), None)
            return None
        return found

    def abandon(self) -> None:
        """Forget the parent process's tunings."""
        self.answers.clear()
        if (background := self.__dict__.pop("background", None)) is not None:
            background.abandon()

    def defer(self, name: Name, query: Query, steps: Steps[Any], why: str) -> None:
        """Let later calls run ``steps``, which store a record. The reason ``why`` is given if that
        record has no usable answer."""
        before = self.record_of(query.key)

        def ending() -> Steps[None]:
            try:
                yield from steps
                self.ended[name] = why
            except Exception as error:  # a failed tuning must not fail the call
                reraise(error)
                self.ended[name] = f"tuning failed: {error_text(error)}"
                self.warn_of_tuning(query.problem, error, self.ended[name])

        from tmm_core.tuning.background import Task

        task = Task(query.key, ending(), lambda: self.record_of(query.key) != before)
        self.background.add(name, task)

    def resume(self, problem: Problem, settings: Settings) -> None:
        """Resume the tunings of earlier calls for a slice, if this call may be delayed."""
        if not self.background or self.forbids_tuning(problem, settings) is not None:
            return
        if self._lock.acquire(blocking=False):  # else another thread measures
            try:
                self.background.resume(settings.tune_share)
            finally:
                self._lock.release()

    def raced(self, query: Query, choice: Choice) -> bool:
        """Race the best candidates of the bucket's record at an M that was never measured, if a
        race is worth its time. Returns False if later calls run the race."""
        problem, key, settings = query.problem, query.key, query.settings
        name = problem.bare(), settings
        known = choice.from_record and key.extent != problem.extent
        if not known or name in self.ended:
            return True
        record = self.record_of(key)
        if record is None or len(candidates := self._racers(record, query)) < 2:
            return True
        if settings.on_cache_miss == "background":
            if name not in self.background:
                self.defer(name, query, self._racing(query, candidates), "")
            return False
        if not self._lock.acquire(blocking=False):
            return True  # another thread measures, which may take long
        self.ended[name] = ""
        from tmm_core.tuning.progress import LINE

        try:
            line = LINE.of(str(problem), settings.progress)
            with self._alone_on(key.device) as acquired, line as tick:
                if acquired:
                    drained(self._racing(query, candidates), tick)
        except Exception as error:
            reraise(error)
            self.warn_of_tuning(problem, error, f"racing failed: {error_text(error)}")
        finally:
            self._lock.release()
        return True

    def _racers(self, record: TuningRecord, query: Query) -> dict[int, Candidate]:
        raced = racers(record, query.problem.extent)
        able = (self.candidate(record.candidates[i], query.able, query.problem) for i in raced)
        return {i: each for i, each in zip(raced, able, strict=True) if each is not None}

    def _racing(self, query: Query, candidates: dict[int, Candidate]) -> Steps[None]:
        """Time ``candidates``, given by their indices in the bucket's record, at the query's M, and
        add the times to the record."""
        key, m = query.key, query.problem.extent
        before = self.record_of(key)
        if before is None:
            return
        record = yield from self.tuner.race_at(key, before, m, candidates, query.settings)
        # A tuning verifies its winner in every way of use; another winner is verified when used.
        self._store(key, record)
        for index, candidate in candidates.items():
            if m in record.candidates[index].inside_us:  # it was verified there
                self.first_use.stamp(query.problem, candidate)
