"""Binds candidates in threads, and abandons a thread that hangs.

``bind`` compiles in this process what was not compiled elsewhere, and cannot be interrupted. So a
candidate that takes too long keeps its thread while others are bound in parallel, and several that
hang time out together.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from tmm_core.spec.kernel import Launcher

#: Seconds one candidate may take to bind.
BIND_LIMIT = 60.0
#: Seconds after which a candidate no longer occupies a worker slot.
STALLED = 5.0
#: Candidates of one kernel that may hang before its others are skipped.
MOST_HUNG = 2
#: Maximum number of stalled threads beside which others are started.
_MOST_STALLED = 16


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One candidate to bind.

    Attributes:
        kernel: Its kernel's name.
        compiled: Done when ``bind`` may be called.
        bind: Returns the launcher.
    """

    kernel: str
    compiled: Future[None]
    bind: Callable[[], Launcher]


class Binding:
    """A batch of candidates being bound to launchers.

    Args:
        workers: Threads that bind at one time.
    """

    def __init__(self, tasks: Sequence[Task], device: torch.device, workers: int) -> None:
        self._tasks, self._device, self._workers = tasks, device, workers
        self._limit = BIND_LIMIT
        self._stalled = min(STALLED, self._limit / 8)
        self._changed = threading.Condition()
        self._ready: deque[int] = deque()
        self._begun: dict[int, float] = {}
        self._outcomes: dict[int, Launcher | BaseException] = {}
        self._hung: Counter[str] = Counter()
        #: Threads that were not abandoned.
        self._threads = 0
        self._over = False

    def outcomes(
        self,
        deadline: float,
        late: Callable[[], None],
        done: Callable[[], None] = lambda: None,
    ) -> list[Launcher | BaseException]:
        """Each task's launcher, or the exception raised instead.

        Args:
            deadline: A ``time.monotonic`` time after which ``late`` is called, once, to end the
                pending futures.
            done: Called for each finished candidate.
        """
        for place, task in enumerate(self._tasks):
            task.compiled.add_done_callback(functools.partial(self._arrived, place))
        told, is_late = 0, False
        try:
            while told < len(self._tasks):
                with self._changed:
                    now = time.monotonic()
                    self._expire(now)
                    here = self._staff(now)
                    if here is None and len(self._outcomes) == told:
                        self._changed.wait(self._patience(now, None if is_late else deadline))
                if here is not None:
                    self._finish(here)
                for _ in range(told, len(self._outcomes)):
                    done()
                    told += 1
                if not is_late and time.monotonic() > deadline:
                    is_late = True
                    late()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
        return [self._outcomes[place] for place in range(len(self._tasks))]

    def _arrived(self, place: int, _: Future[None]) -> None:
        with self._changed:
            self._ready.append(place)
            self._changed.notify_all()

    def _next(self) -> int | None:
        """The next task that may start, under the lock; None: none."""
        while self._ready:
            place = self._ready.popleft()
            if place not in self._outcomes:
                self._begun[place] = time.monotonic()
                return place
        return None

    def _work(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread starts on device 0
        while True:
            with self._changed:
                while (place := self._next()) is None:
                    if self._over:
                        return
                    self._changed.wait()
            if not self._finish(place):
                return

    def _finish(self, place: int) -> bool:
        """Bind one; False if it was given up meanwhile, and this thread with it."""
        outcome: Launcher | BaseException
        try:
            self._tasks[place].compiled.result()
            outcome = self._tasks[place].bind()
        except BaseException as error:  # compilers raise SystemExit and worse
            outcome = error
        with self._changed:
            kept = self._begun.pop(place, None) is not None
            self._outcomes.setdefault(place, outcome)
            self._changed.notify_all()
        return kept

    def _staff(self, now: float) -> int | None:
        """Start threads for waiting tasks while others are stalled; return a task for the caller if
        no thread can be started."""
        while self._ready:
            stalled = sum(now - begun >= self._stalled for begun in self._begun.values())
            idle = self._threads - len(self._begun)
            most = self._workers + min(stalled, _MOST_STALLED)
            if idle >= len(self._ready) or self._threads >= most:
                break
            try:
                threading.Thread(target=self._work, name="tmm-bind", daemon=True).start()
            except RuntimeError:  # no thread can be started
                return None if self._threads else self._next()
            self._threads += 1
        return None

    def _expire(self, now: float) -> None:
        """Give up tasks that have taken too long, with their threads; after the second of a kernel,
        also its waiting tasks."""
        for place, begun in list(self._begun.items()):
            if now - begun < self._limit:
                continue
            kernel = self._tasks[place].kernel
            self._give_up(place, f"did not bind within {self._limit:g} s")
            del self._begun[place]
            self._threads -= 1
            self._hung[kernel] += 1
            if self._hung[kernel] == MOST_HUNG:
                why = f"not tried: {MOST_HUNG} other configs of it did not bind within"
                for other, task in enumerate(self._tasks):
                    if task.kernel == kernel and other not in self._begun:
                        self._give_up(other, f"{why} {self._limit:g} s")

    def _give_up(self, place: int, why: str) -> None:
        self._outcomes.setdefault(place, TimeoutError(why))

    def _patience(self, now: float, deadline: float | None) -> float | None:
        """Seconds until the next time limit."""
        moments = [begun + self._limit for begun in self._begun.values()]
        if self._ready:
            moments += [b + self._stalled for b in self._begun.values() if b + self._stalled > now]
        if deadline is not None:
            moments.append(deadline)
        return max(0.0, min(moments) - now) + 0.001 if moments else None
