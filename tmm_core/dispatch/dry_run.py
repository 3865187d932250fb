"""What a call would do, for ``explain()``: runs the ladder itself under the current settings, and
stops where it would measure, or raise because there is no record."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, Literal

from tmm_cache import TuningRecord

from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.dispatch.invariant import Invariance
from tmm_core.errors import CacheMissError
from tmm_core.launch.plan import Choice
from tmm_core.settings import Settings
from tmm_core.spec.kernel import Kernel
from tmm_core.spec.problem import Problem
from tmm_core.tuning.unmeasured import unmeasured
from tmm_core.tuning.untried import Noted


@dataclass(frozen=True, slots=True)
class Miss:
    """What a call without a record does: tune or raise, and the reason."""

    action: Literal["tune", "error"]
    reason: str


def rehearse(
    dispatcher: Dispatcher, problem: Problem, settings: Settings
) -> tuple[Choice, Miss | None]:
    """The choice of ``dispatcher``; on a miss its guess, and the miss.

    Nothing is measured, launched or logged, and nothing waits for another thread's tuning.

    Raises:
        TmmError: Like :meth:`Dispatcher.choose`, except CacheMissError.
    """
    try:
        return _Rehearsal(dispatcher).choose(problem, settings), None
    except _Measuring as found:
        miss = Miss("tune", str(found))
    except CacheMissError as error:
        miss = Miss("error", f"CacheMissError: {error}")
    guessing = replace(settings, on_cache_miss="heuristic")
    rehearsal = _Rehearsal(dispatcher, forbidden="without a record")
    try:
        return rehearsal.choose(problem, guessing), miss
    except CacheMissError:  # the store is locked, which forbids guesses
        return rehearsal._fallback(problem, "it always can"), miss


class _Measuring(BaseException):
    """Ends a rehearsal; a BaseException, since the ladder answers an Exception with a guess."""


class _Rehearsal(Dispatcher):
    """A dispatcher on a copy of another's state."""

    def __init__(self, played: Dispatcher, forbidden: str | None = None) -> None:
        self.__dict__.update(played.__dict__)
        self._choices = dict(played._choices)
        self._lock = threading.RLock()
        self._forbidden = forbidden
        invariance = Invariance(self, self._on_record)
        invariance.know(played._invariance)
        self.__dict__["_invariance"] = invariance

    def forbids_tuning(self, problem: Problem, settings: Settings) -> str | None:
        return self._forbidden or super().forbids_tuning(problem, settings)

    def note_miss(self, key: Problem) -> None:
        pass

    def say_untried(self, problem: Problem, noted: Noted | None) -> None:
        pass

    def _tune(
        self, key: Problem, able: list[Kernel[Any]], settings: Settings, *_: Any, **__: Any
    ) -> TuningRecord:
        before = self.record_of(key)
        noted = self.untried.get(key)
        again = self.untried.again(key, noted) if noted is not None else frozenset()
        missing = unmeasured(key, able, before, False, noted, again)
        names = ", ".join(kernel.name for kernel in missing)
        what = "no record" if before is None else "a record without them"
        raise _Measuring(f"{what} at M={key.m}: {names}, for up to {settings.tune_budget:g} s")
