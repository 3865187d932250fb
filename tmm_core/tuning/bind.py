"""Binds candidates in threads, and abandons a thread that hangs.

``bind`` compiles in this process what was not compiled elsewhere, and cannot be interrupted. So a
candidate that takes too long keeps its thread while others are bound in parallel, and several that
hang time out together.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future

import torch

from tmm_core.errors import reraise
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.tuning.environment_faults import BUDGET_ENDED

#: Seconds one candidate may take to bind.
BIND_LIMIT = 60.0
#: Seconds after which a candidate no longer occupies a worker slot.
STALLED = 5.0
#: Candidates of one kernel that may hang before its others are skipped.
MOST_HUNG = 2
#: Maximum number of stalled threads beside which others are started.
_MOST_STALLED = 16
#: Seconds between two looks at the time limits.
_LOOK = 0.05

#: A candidate and the problem to compile it for.
Posed = tuple[Problem, Candidate]
#: A launcher, or the exception that binding it raised.
Outcome = Launcher | BaseException


class Binding:
    """A batch of candidates being bound to launchers, each in a thread of its own.

    Args:
        compiled: For each candidate, a future that is done when ``bind`` may be called.
        deadline: A ``time.monotonic`` time after which none but BLAS is bound.
        workers: Threads that bind at one time.
    """

    def __init__(
        self,
        asked: Sequence[Posed],
        compiled: Sequence[Future[None]],
        device: torch.device,
        deadline: float,
        workers: int,
    ) -> None:
        self._asked, self._compiled, self._device = asked, compiled, device
        self._deadline, self._workers = deadline, workers
        self._stalled = min(STALLED, BIND_LIMIT / 8)
        #: Places of candidates that are compiled and wait for a thread.
        self._ready: deque[int] = deque()
        #: The times at which those in a thread began, unless they were given up.
        self._begun: dict[int, float] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._hung: Counter[str] = Counter()
        #: From other threads: a place, with None if it is compiled, or with its outcome.
        self._news: queue.SimpleQueue[tuple[int, Outcome | None]] = queue.SimpleQueue()

    def outcomes(self, late: Callable[[], None], done: Callable[[], None]) -> list[Outcome]:
        """Each candidate's launcher, or the exception raised instead.

        Args:
            late: Called after the deadline, once, to end the pending futures.
            done: Called for each finished candidate.
        """
        for place, future in enumerate(self._compiled):
            future.add_done_callback(functools.partial(self._arrived, place))
        told, is_late = 0, False
        while True:
            now = time.monotonic()
            self._expire(now)
            self._start(now)
            for _ in range(told, len(self._outcomes)):
                done()
                told += 1
            if told == len(self._asked):
                return [self._outcomes[place] for place in range(told)]
            if not is_late and now > self._deadline:
                is_late = True
                late()
            self._hear()

    def _arrived(self, place: int, _: Future[None]) -> None:
        self._news.put((place, None))

    def _hear(self) -> None:
        """Wait for the next news, at most until the next look."""
        try:
            place, outcome = self._news.get(timeout=_LOOK)
        except queue.Empty:
            return
        if outcome is None:
            self._ready.append(place)
        else:
            self._begun.pop(place, None)
            self._outcomes.setdefault(place, outcome)

    def _start(self, now: float) -> None:
        """Start threads for waiting candidates, more while others are stalled; bind one here if no
        thread can be started."""
        while self._ready:
            stalled = sum(now - begun >= self._stalled for begun in self._begun.values())
            if len(self._begun) >= self._workers + min(stalled, _MOST_STALLED):
                return
            place = self._ready.popleft()
            if place in self._outcomes:
                continue
            if now > self._deadline and self._asked[place][1].kernel.name != BASELINE:
                self._outcomes[place] = self._bound(place)  # which binds nothing any more
                continue
            try:
                threading.Thread(
                    target=self._work, args=(place,), name="tmm-bind", daemon=True
                ).start()
                self._begun[place] = time.monotonic()
            except RuntimeError as error:  # no thread can be started
                reraise(error)
                if self._begun:
                    self._ready.appendleft(place)
                else:
                    self._outcomes[place] = self._bound(place)
                return

    def _work(self, place: int) -> None:
        self._news.put((place, self._bound(place)))

    def _bound(self, place: int) -> Outcome:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread starts on device 0
            self._compiled[place].result()
            problem, candidate = self._asked[place]
            if time.monotonic() > self._deadline and candidate.kernel.name != BASELINE:
                raise CancelledError
            return candidate.kernel.bind(problem, candidate.config)
        except CancelledError:
            return TimeoutError(BUDGET_ENDED)
        except BaseException as error:  # compilers raise SystemExit and worse
            return error

    def _expire(self, now: float) -> None:
        """Give up candidates that have taken too long, with their threads; after the second of a
        kernel, also its waiting ones."""
        for place, begun in list(self._begun.items()):
            if now - begun < BIND_LIMIT:
                continue
            kernel = self._asked[place][1].kernel.name
            self._give_up(place, f"did not bind within {BIND_LIMIT:g} s")
            del self._begun[place]
            self._hung[kernel] += 1
            if self._hung[kernel] == MOST_HUNG:
                why = f"not tried: {MOST_HUNG} other configs of it did not bind within"
                for other, (_, candidate) in enumerate(self._asked):
                    if candidate.kernel.name == kernel and other not in self._begun:
                        self._give_up(other, f"{why} {BIND_LIMIT:g} s")

    def _give_up(self, place: int, why: str) -> None:
        self._outcomes.setdefault(place, TimeoutError(why))
