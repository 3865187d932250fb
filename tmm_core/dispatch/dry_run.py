"""Chooses without side effects, for ``explain()``.

A dry run ends where a call would measure, or would raise because there is no record.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from tmm_core.dispatch.deferring import Query
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.dispatch.invariant import Invariance
from tmm_core.errors import CacheMissError
from tmm_core.launch.plan import Choice
from tmm_core.settings import Settings
from tmm_core.spec.kernel import Kernel
from tmm_core.spec.problem import Problem
from tmm_core.tuning.untried import Noted


@dataclass(frozen=True, slots=True)
class Miss:
    """A cache miss: whether the call would tune or raise, and why."""

    action: Literal["tune", "error"]
    reason: str


def dry_run(
    dispatcher: Dispatcher, problem: Problem, settings: Settings
) -> tuple[Choice, Miss | None]:
    """Return the choice of ``dispatcher``; on a miss, its untuned choice and the miss.

    Nothing is measured, launched or logged, and nothing waits for another thread's tuning.

    Raises:
        TmmError: Like :meth:`Dispatcher.choose`, except CacheMissError.
    """
    try:
        return _DryRun(dispatcher).choose(problem, settings), None
    except _Measuring as measuring:
        miss = Miss("tune", str(measuring))
    except CacheMissError as error:
        miss = Miss("error", f"CacheMissError: {error}")
    heuristic = replace(settings, on_cache_miss="heuristic")
    untuned = _DryRun(dispatcher, forbidden="without a record")
    try:
        return untuned.choose(problem, heuristic), miss
    except CacheMissError:  # the store is locked, which forbids untuned choices
        return untuned._fallback(problem, "it always can"), miss


class _Measuring(BaseException):
    """Ends a dry run. It is a BaseException, because the dispatcher catches a tuning's Exceptions
    and chooses without a record."""


class _DryRun(Dispatcher):
    """A dispatcher on a copy of another's state."""

    def __init__(self, original: Dispatcher, forbidden: str | None = None) -> None:
        self.__dict__.update(original.__dict__)
        self._choices = dict(original._choices)
        self._lock = threading.RLock()
        self._forbidden = forbidden
        invariance = Invariance(self)
        invariance.copy_from(original._invariance)
        self.__dict__["_invariance"] = invariance

    def forbids_tuning(self, problem: Problem, settings: Settings) -> str | None:
        return self._forbidden or super().forbids_tuning(problem, settings)

    def prepare(self, problem: Problem, settings: Settings, force: bool = False) -> None:
        pass

    def log_miss(self, key: Problem) -> None:
        pass

    def warn_untried(self, problem: Problem, noted: Noted | None) -> None:
        pass

    def _tune(
        self, key: Problem, able: list[Kernel[Any]], settings: Settings, *_: Any, **__: Any
    ) -> NoReturn:
        before = self.record_of(key)
        names = ", ".join(kernel.name for kernel in self.untried.missing(key, able, before))
        what = "no record" if before is None else "a record without them"
        when = ", by later calls" * (settings.on_cache_miss == "background")
        took = f"for up to {settings.tune_budget:g} s{when}"
        raise _Measuring(f"{what} at M={key.m}: {names}, {took}")

    def _later(self, query: Query) -> Choice:
        self._tune(query.key, query.able, query.settings)

    def raced(self, query: Query, choice: Choice) -> bool:
        return True
