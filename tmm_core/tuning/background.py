"""Tunes in the background, in slices that later calls run, for a share of the time that passes.

A tuning consists of short steps (:data:`tmm_core.spec.steps.Steps`); a slice ends between two
steps. Each call pays for at most one slice, and only once earlier slices are paid off. If calls
stop, tuning stops and holds only memory.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from tmm_base.guards import suppress

from tmm_core.errors import UnsupportedProblemError
from tmm_core.launch.collector import collector_off
from tmm_core.spec.device import fingerprint
from tmm_core.spec.precision import require_precision
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import Steps

#: Seconds after which a slice starts no further step. A started step is finished.
SLICE = 0.003
#: Seconds after which a waiting tuning is resumed anyway, to check its time limits.
CHECK_INTERVAL = 1.0


@dataclass(eq=False)
class Task:
    """A tuning, and the state in which it waits for its next slice."""

    problem: Problem
    steps: Steps[None]
    #: Whether another process has stored the record, which makes the tuning useless.
    is_done: Callable[[], bool]
    #: The futures that the tuning waits for; None before its first step.
    pending: Sequence[Future[Any]] | None = None
    #: Whether the tuning has ever waited; once resumed after that, it takes memory.
    waited: bool = False
    #: When the last slice ended.
    left: float = 0.0
    #: Index of the GPU and the stream on which the tuning was started.
    gpu: int | None = None
    stream: Any = None

    def is_ready(self, now: float) -> bool:
        waiting = self.pending and not any(future.done() for future in self.pending)
        return not waiting or now - self.left > CHECK_INTERVAL

    def may_run(self) -> bool:
        """Whether the tuning may be resumed on the current device, under the current precision."""
        if self.problem.device.type == "cuda":
            here = torch.cuda.current_device()
            started_elsewhere = self.pending is not None and self.gpu != here
            unlike = fingerprint(torch.device("cuda", here)) != self.problem.device
            if started_elsewhere or unlike or torch.cuda.is_current_stream_capturing():
                return False
        with suppress(UnsupportedProblemError):
            require_precision(self.problem)
            return True
        return False


class Background:
    """The unfinished tunings of a process, oldest first. One of them measures at a time. While it
    waits for compilers, the next one starts compiling. ``alone`` is a context in which no other
    process measures a problem; it yields whether that holds."""

    def __init__(
        self,
        alone: Callable[[Problem], contextlib.AbstractContextManager[bool]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._alone, self._clock = alone, clock
        self._tasks: dict[Hashable, Task] = {}
        #: Seconds that slices may take now; if negative, seconds to be paid off.
        self._credit, self._seen = 0.0, clock()
        # Runs before the interpreter clears its modules.
        self._finalizer = weakref.finalize(self, _close, self._tasks)

    def __contains__(self, name: Hashable) -> bool:
        return name in self._tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, name: Hashable, task: Task) -> None:
        """Add ``task`` for later slices, unless there is one of this name."""
        if not self._tasks:
            self._seen = self._clock()
        self._tasks.setdefault(name, task)

    def abandon(self) -> None:
        """Keep all tasks alive in a forked child, which cannot free the parent's GPU memory."""
        self._finalizer.detach()
        _ABANDONED.append(self._tasks)

    def resume(self, share: float) -> None:
        """Resume a tuning for a slice, if ``share`` of the time that passed allows one. One thread
        at a time may call it. An exception that interrupts the slice ends the tuning."""
        now = self._clock()
        self._credit = min(SLICE, self._credit + share * (now - self._seen))
        self._seen = now
        name = self._next(now) if self._credit > 0 else None
        if name is None:
            return
        task = self._tasks[name]
        # A slice waits for launches that are queued. It starts between calls, if that is soon.
        idle = task.problem.device.type != "cuda" or torch.cuda.current_stream().query()
        if not idle and self._credit < SLICE:
            return
        began, ended = now, False
        try:
            with self._alone(task.problem) as acquired:
                if acquired:
                    queued = self._clock()
                    _wait_for_gpu(task.problem)
                    began += self._clock() - queued  # the caller's own launches
                    ended = True
                    ended = self._go_on(task, began + self._credit)
        finally:
            task.left = self._clock()
            self._credit -= task.left - began
            if ended:
                self._tasks.pop(name, None)
                task.steps.close()

    def _next(self, now: float) -> Hashable | None:
        """Return the name of the tuning to resume; None if all of them wait."""
        able = (each for each in [*self._tasks.items()] if each[1].may_run())
        for place, (name, task) in enumerate(itertools.islice(able, 2)):
            if (place == 0 or not task.waited) and task.is_ready(now):
                return name
        return None

    def _go_on(self, task: Task, until: float) -> bool:
        """Resume a tuning until the time ``until``, or until it waits; returns whether it ended."""
        if task.is_done():
            return True
        on_gpu = task.problem.device.type == "cuda"
        if task.pending is None and on_gpu:
            task.gpu, task.stream = torch.cuda.current_device(), torch.cuda.current_stream()
        rested = None if task.pending is None else True
        stream: Any = torch.cuda.stream(task.stream) if on_gpu else contextlib.nullcontext()
        # Slices write to tensors that earlier slices allocated, so modes must be the same.
        # A full garbage collection takes up to 23 ms, as long as the longest steps.
        with stream, torch.inference_mode(False), torch.no_grad(), collector_off():
            while True:
                try:
                    task.pending = task.steps.send(rested)
                except StopIteration:
                    return True
                task.waited |= bool(task.pending)
                _wait_for_gpu(task.problem)
                rested, task.left = None, self._clock()
                if task.left >= until or not task.is_ready(task.left):
                    return False


#: Tunings that a parent process began.
_ABANDONED: list[object] = []


def _close(tasks: dict[Hashable, Task]) -> None:
    while tasks:
        tasks.popitem()[1].steps.close()


def _wait_for_gpu(problem: Problem) -> None:
    if problem.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
