"""Binds candidates in threads, and abandons a thread that hangs.

``bind`` compiles in this process what was not compiled elsewhere, and cannot be interrupted. So a
candidate that takes too long keeps its thread while others are bound in parallel. Several
candidates that hang time out together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

import torch

from tmm_core.errors import reraise
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import Steps
from tmm_core.tuning.environment_faults import BUDGET_ENDED

#: Seconds one candidate may take to bind.
BIND_LIMIT = 60.0
#: Seconds after which a candidate no longer occupies a worker slot.
STALLED = 5.0
#: Maximum number of stalled threads beside which others are started.
_MOST_STALLED = 16

#: The problem to compile for, and the candidate.
CompileJob = tuple[Problem, Candidate]
#: A launcher, or the exception that binding it raised.
Outcome = Launcher | BaseException


@dataclass
class Deadline:
    """The end of a tuning's budget. Waits that are not charged to the budget postpone it."""

    #: A ``time.monotonic`` time.
    at: float
    #: Seconds for which the caller did not resume the tuning.
    rested: float = 0.0

    @property
    def passed(self) -> bool:
        return time.monotonic() > self.at


class Binding:
    """A batch of candidates being bound to launchers, each in a thread of its own.

    Args:
        jobs: The candidates to bind.
        compiled: For each candidate, a future that is done when ``bind`` may be called.
        deadline: The time after which only BLAS is bound.
        workers: The number of threads that bind at one time.
    """

    def __init__(
        self,
        jobs: Sequence[CompileJob],
        compiled: Sequence[Future[None]],
        device: torch.device,
        deadline: Deadline,
        workers: int,
    ) -> None:
        self._jobs, self._compiled, self._device = jobs, compiled, device
        self._deadline, self._workers = deadline, workers
        self._stalled = min(STALLED, BIND_LIMIT / 8)
        #: By candidate: when its thread started, and the thread's future outcome. A candidate that
        #: was given up is removed.
        self._begun: dict[int, tuple[float, Future[Outcome]]] = {}
        self._outcomes: dict[int, Outcome] = {}

    def outcomes(self, late: Callable[[], None]) -> Steps[list[Outcome]]:
        """Each candidate's launcher, or the exception raised instead. Waits for compilations and
        threads.

        Args:
            late: Called once, after the deadline, to end the pending futures.
        """
        is_late = False
        while True:
            now = time.monotonic()
            for place, (_, answer) in list(self._begun.items()):
                if answer.done():
                    del self._begun[place]
                    self._outcomes.setdefault(place, answer.result())
            self._expire(now)
            waiting = self._start(now)
            if len(self._outcomes) == len(self._jobs):
                return [self._outcomes[place] for place in range(len(self._jobs))]
            if not is_late and self._deadline.passed:
                is_late = True
                late()
            else:
                yield [*waiting, *(answer for _, answer in self._begun.values())]

    def _start(self, now: float) -> list[Future[None]]:
        """Start threads for compiled candidates, and more of them while others are stalled. If no
        thread can be started, bind one candidate here. Returns the pending compilations."""
        waiting = []
        for place, compiled in enumerate(self._compiled):
            if place in self._outcomes or place in self._begun:
                continue
            stalled = sum(now - begun >= self._stalled for begun, _ in self._begun.values())
            room = self._workers + min(stalled, _MOST_STALLED) - len(self._begun)
            if not compiled.done():
                waiting.append(compiled)
            elif self._deadline.passed and self._jobs[place][1].kernel.name != BASELINE:
                self._outcomes[place] = self._bound(place)  # only returns the reason
            elif room > 0:
                answer: Future[Outcome] = Future()
                thread = threading.Thread(
                    target=self._work, args=(place, answer), name="tmm-bind", daemon=True
                )
                try:
                    thread.start()
                    self._begun[place] = time.monotonic(), answer
                except RuntimeError as error:  # no thread can be started
                    reraise(error)
                    if not self._begun:
                        self._outcomes[place] = self._bound(place)
        return waiting

    def _work(self, place: int, answer: Future[Outcome]) -> None:
        answer.set_result(self._bound(place))

    def _bound(self, place: int) -> Outcome:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread starts on device 0
            self._compiled[place].result()
            problem, candidate = self._jobs[place]
            if self._deadline.passed and candidate.kernel.name != BASELINE:
                raise CancelledError
            return candidate.kernel.bind(problem, candidate.config)
        except CancelledError:
            return TimeoutError(BUDGET_ENDED)
        except BaseException as error:  # compilers raise SystemExit and worse
            return error

    def _expire(self, now: float) -> None:
        """Give up candidates that have taken too long, with their threads."""
        for place, (begun, _) in list(self._begun.items()):
            if now - begun >= BIND_LIMIT:
                del self._begun[place]
                why = f"did not bind within {BIND_LIMIT:g} s"
                self._outcomes.setdefault(place, TimeoutError(why))
