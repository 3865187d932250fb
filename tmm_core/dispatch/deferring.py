"""Puts off what a call would wait for: later calls go on with it, in slices."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tmm_cache import CacheStore, TuningRecord

from tmm_core.dispatch.first_use import FirstUse
from tmm_core.dispatch.measuring import Measuring
from tmm_core.errors import error_text, reraise
from tmm_core.launch.plan import Choice
from tmm_core.registry.registry import Registry
from tmm_core.settings import Settings
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.kernel import Candidate, Kernel
from tmm_core.spec.launcher import Launcher
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import Steps, drained
from tmm_core.tuning.ranking import racers

if TYPE_CHECKING:
    from tmm_core.tuning.background import Background
    from tmm_core.tuning.tuner import Tuner

#: Answers of unfinished problems that are kept.
MOST_ANSWERS = 4096

#: A measurement that is put off: its problem, and the settings.
Name = tuple[Problem, Settings]


@dataclass(frozen=True, slots=True)
class Query:
    """A problem without a choice."""

    problem: Problem
    #: The problem of its bucket's record.
    key: Problem
    settings: Settings
    #: The kernels that can serve it.
    able: list[Kernel[Any]]
    #: Seconds of the tuning budget that finding these took.
    spent: float
    #: Why nothing may be measured for it; None if it may.
    forbidden: str | None


class Deferring(Measuring):
    """Measures in the background, and the exact M of a bucket."""

    def __init__(self, registry: Registry, tuner: Tuner | None, store: CacheStore) -> None:
        super().__init__(registry, tuner, store)
        self.first_use = FirstUse(store)
        #: In the background: the answers of unfinished problems, which are chosen once, and the
        #: names of what may finish them.
        self.answers: dict[Name, tuple[tuple[Name, Name], tuple[Choice, Launcher]]] = {}
        #: The tunings and races that ended there, and why the record may give no answer.
        self.ended: dict[Name, str] = {}

    @functools.cached_property
    def background(self) -> Background:
        from tmm_core.tuning.background import Background

        return Background(lambda problem: self._alone_on(problem.device))

    def keep(self, problem: Problem, settings: Settings, found: tuple[Choice, Launcher]) -> None:
        """Keep the answer of an unfinished problem."""
        if len(self.answers) >= MOST_ANSWERS:
            self.answers.clear()
        bare = problem.bare()
        self.answers[problem, settings] = ((bucketed(bare), settings), (bare, settings)), found

    def kept(self, problem: Problem, settings: Settings) -> tuple[Choice, Launcher] | None:
        """The answer of a problem that is still unfinished."""
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
        """Have later calls go on with ``steps``, which store a record.

        Args:
            why: The reason for another answer if the record has none.
        """
        before = self.record_of(query.key)

        def noting() -> Steps[None]:
            try:
                yield from steps
                self.ended[name] = why
            except Exception as error:  # tuning is a feature
                reraise(error)
                self.ended[name] = f"tuning failed: {error_text(error)}"
                self.warn_of_tuning(query.problem, error, self.ended[name])

        from tmm_core.tuning.background import Task

        task = Task(query.key, noting(), lambda: self.record_of(query.key) != before)
        self.background.add(name, task)

    def resume(self, problem: Problem, settings: Settings) -> None:
        """Go on with the tunings of earlier calls for a slice, where this call may be delayed."""
        if not self.background or self.forbids_tuning(problem, settings) is not None:
            return
        if self._lock.acquire(blocking=False):  # else another thread measures
            try:
                self.background.resume(settings.tune_share)
            finally:
                self._lock.release()

    def raced(self, query: Query, choice: Choice) -> bool:
        """Race the best of the bucket's record at an M that was never measured, if that is worth
        its time; returns False if later calls do so."""
        problem, key, settings = query.problem, query.key, query.settings
        name = problem.bare(), settings
        known = choice.origin in ("cache", "tuned") and key.extent != problem.extent
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
            with self._alone_on(key.device) as mine, line as tick:
                if mine:
                    drained(self._racing(query, candidates), tick)
        except Exception as error:
            reraise(error)
            self.warn_of_tuning(problem, error, f"racing failed: {error_text(error)}")
        finally:
            self._lock.release()
        return True

    def _racers(self, record: TuningRecord, query: Query) -> dict[int, Candidate]:
        found = {}
        for index in racers(record, query.problem.extent):
            result = record.candidates[index]
            candidate = self.able_candidate(result, query.problem, query.key, query.settings)
            if candidate is not None:
                found[index] = candidate
        return found

    def _racing(self, query: Query, candidates: dict[int, Candidate]) -> Steps[None]:
        """Add to the bucket's record what ``candidates``, by their indices in it, take at the
        query's M."""
        key, m = query.key, query.problem.extent
        before = self.record_of(key)
        if before is None:
            return
        record = yield from self.tuner.race_at(key, before, m, candidates, query.settings)
        self._store(key, record, self._is_trusted(key))
        for index, candidate in candidates.items():
            if m in record.candidates[index].inside_us:  # it was verified there
                self.first_use.stamp(query.problem, candidate)
