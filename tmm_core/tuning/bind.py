"""Binds candidates in threads, and abandons a thread that hangs.

``bind`` compiles in this process what was not compiled elsewhere, and cannot be interrupted. So a
candidate that takes too long keeps its thread while others are bound in parallel. Several
candidates that hang time out together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

import torch

from tmm_core.errors import reraise
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import Steps
from tmm_core.verify.environment_faults import BUDGET_ENDED

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
    """Candidates being bound to launchers, each in a thread of its own.

    Args:
        deadline: The time after which only BLAS is bound.
        workers: The number of threads that bind at one time.
        late: Called with the pending futures of :attr:`waiting` after the deadline, to end them.
    """

    def __init__(
        self,
        device: torch.device,
        deadline: Deadline,
        workers: int,
        late: Callable[[Iterable[Future[None]]], None],
    ) -> None:
        self._device, self._deadline, self._workers = device, deadline, workers
        self._late = late
        self._stalled = min(STALLED, BIND_LIMIT / 8)
        #: Candidates to bind, each with a future that is done when ``bind`` may be called.
        self.waiting: dict[CompileJob, Future[None]] = {}
        #: The start of each candidate's thread, and the thread's future outcome. A candidate that
        #: was given up is removed.
        self._begun: dict[CompileJob, tuple[float, Future[Outcome]]] = {}
        self._outcomes: dict[CompileJob, Outcome] = {}

    def some(self) -> Steps[dict[CompileJob, Outcome]]:
        """Launchers of the candidates that were bound since the last call, or the exceptions raised
        instead: of all that are compiled, and of at least one. Threads still run only for those
        that are stalled, so that launches may be timed. Empty if no candidate is left."""
        while self.waiting or self._begun or self._outcomes:
            if self._deadline.passed and (compiling := self._compiling()):
                self._late(compiling)
            now = time.monotonic()
            self._collect(now)
            ages = [now - begun for begun, _ in self._begun.values()]
            stalled = sum(age >= self._stalled for age in ages)
            self._start(self._workers + min(stalled, _MOST_STALLED))
            if self._outcomes and len(self._begun) == stalled:
                break
            yield [*self._compiling(), *(answer for _, answer in self._begun.values())]
        found, self._outcomes = self._outcomes, {}
        return found

    def _compiling(self) -> list[Future[None]]:
        return [compiled for compiled in self.waiting.values() if not compiled.done()]

    def _collect(self, now: float) -> None:
        """Take the outcomes of threads that ended. Give up candidates that have taken too long,
        with their threads."""
        for job, (begun, answer) in list(self._begun.items()):
            if answer.done():
                self._outcomes[job] = answer.result()
            elif now - begun >= BIND_LIMIT:
                self._outcomes[job] = TimeoutError(f"did not bind within {BIND_LIMIT:g} s")
            else:
                continue
            del self._begun[job]

    def _start(self, most: int) -> None:
        """Start threads for compiled candidates, at most ``most`` in all. If no thread can be
        started, bind one candidate here."""
        for job, compiled in list(self.waiting.items()):
            late = self._deadline.passed and job[1].kernel.name != BASELINE
            if not compiled.done() or (len(self._begun) >= most and not late):
                continue
            if late:
                self._outcomes[job] = self._bound(job, compiled)  # only returns the reason
            else:
                answer: Future[Outcome] = Future()
                thread = threading.Thread(
                    target=self._work, args=(job, compiled, answer), name="tmm-bind", daemon=True
                )
                try:
                    thread.start()
                    self._begun[job] = time.monotonic(), answer
                except RuntimeError as error:  # no thread can be started
                    reraise(error)
                    if self._begun or self._outcomes:
                        continue
                    self._outcomes[job] = self._bound(job, compiled)
            del self.waiting[job]

    def _work(self, job: CompileJob, compiled: Future[None], answer: Future[Outcome]) -> None:
        answer.set_result(self._bound(job, compiled))

    def _bound(self, job: CompileJob, compiled: Future[None]) -> Outcome:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread starts on device 0
            compiled.result()
            problem, candidate = job
            if self._deadline.passed and candidate.kernel.name != BASELINE:
                raise CancelledError
            return candidate.kernel.bind(problem, candidate.config)
        except CancelledError:
            return TimeoutError(BUDGET_ENDED)
        except BaseException as error:  # compilers raise SystemExit and worse
            return error
