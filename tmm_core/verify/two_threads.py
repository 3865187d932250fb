"""Launches from two threads at once: first alternating line by line, then freely.

A launch takes as little as 20 µs, and on a busy machine none of hundreds may overlap. So the
threads first alternate inside the launcher's Python code. Code without Python lines, such as a
GPU's, overlaps in the free launches that follow.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal

import torch

from tmm_core import compat
from tmm_core.errors import reraise
from tmm_core.spec.launcher import Launcher
from tmm_core.spec.threads import start_thread
from tmm_core.verify.data_sets import DataSets, InputSet

Tensor = torch.Tensor

#: How two threads launch. ``lines``: they alternate after each line. ``launches``: after each line
#: of one, the other makes a whole launch. ``free``: neither waits for the other.
Pace = Literal["lines", "launches", "free"]

#: Free launches of each thread in a round: minimum, maximum, and the seconds after which no more
#: than the minimum are made. 32 launches of 20 µs missed a shared scratch buffer once in ten times,
#: 128 never in 40.
LEAST_TOGETHER, MOST_TOGETHER, TOGETHER_SECONDS = 2, 32, 0.006
#: Maximum seconds for which a thread goes on while the other one makes its launches.
LONGEST_TOGETHER = 0.2
#: Threads stop alternating after this many lines, seconds of CPU time of one of them, or seconds of
#: wall time.
_MOST_LINES, _TURNS_CPU, _TURNS_SECONDS = 2000, 0.5, 5.0
#: How often a thread waits for its turn, and for how many seconds each time; on a busy machine each
#: wait takes longer. The other thread may need a lock that this one holds, so threads stop
#: alternating after some unsuccessful waits.
_WAITS, _WAIT, _MOST_UNSUCCESSFUL = 100, 0.001, 5
#: GPU cycles for which both threads' streams wait, so that their launches run together.
_GATHERING = 1_000_000
#: Seconds after which Python lets another thread run: by default 5 ms, longer than most launches.
_SWITCHING = 1e-6


class Turns:
    """Decides which of the threads 0 and 1 runs. Every wait has a time limit."""

    def __init__(self) -> None:
        self._changed, self._turn = threading.Condition(), 0
        self._until, self._left = time.monotonic() + _TURNS_SECONDS, _MOST_LINES
        #: Each thread's CPU time at its first turn. Other threads of the process may be busy.
        self._began: dict[int, float] = {}
        self._away: set[int] = set()
        self._unsuccessful = 0
        #: Launches between the other thread's lines use that thread's operands: weights are shared,
        #: so no launch may change them, not even temporarily.
        self.shared = False

    @property
    def over(self) -> bool:
        """Whether the lines or the time are used up."""
        now = time.thread_time()
        used = now - self._began.setdefault(threading.get_ident(), now)
        return self._left <= 0 or used > _TURNS_CPU or time.monotonic() > self._until

    def pass_on(self, thread: int) -> None:
        """Let the other thread run, and wait for the next turn."""
        other = 1 - thread
        with self._changed:
            self._away.discard(thread)
            self._left -= 1
            self._turn = other
            self._changed.notify_all()
            if other in self._away or self.over:
                return
            for _ in range(_WAITS):
                if self._changed.wait_for(lambda: self._turn == thread, _WAIT):
                    return
            self._away.add(other)  # until it comes here again
            self._unsuccessful += 1
            if self._unsuccessful >= _MOST_UNSUCCESSFUL:
                self._left = 0

    def leave(self, thread: int) -> None:
        """Let the other thread run alone from now on."""
        with self._changed:
            self._left, self._turn = 0, 1 - thread
            self._changed.notify_all()

    @contextlib.contextmanager
    def after_each_line(self, thread: int) -> Iterator[None]:
        """Pass the turn on after each line of Python code that this thread executes."""

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if self.over:
                sys.settrace(None)
                return None
            if event == "line":
                self.pass_on(thread)
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)


class Launches(threading.Thread):
    """Launches on one set of inputs, on their own stream; see :func:`launch_together`.

    Args:
        place: The number of this thread, 0 or 1.
        busy: The threads that have launches to make. Free launches go on until it is empty, so that
            the slower thread's launches overlap with others.
        held: The number of results that are kept.
    """

    def __init__(
        self,
        data: DataSets,
        launcher: Launcher,
        place: int,
        busy: set[int],
        pace: Pace,
        turns: Turns,
        most: int,
        held: int,
        into: bool,
    ) -> None:
        super().__init__(name="tmm-verify", daemon=True)
        self._sets = data.sets()
        self._launcher, self._device, self._place = launcher, data.device, place
        self._busy, self._pace, self._turns, self._most = busy, pace, turns, most
        self._out = data.out(place).tensor if into else None
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            if place == 0 and pace == "free":
                compat.gpu_sleep(_GATHERING)
            self._stream = _streams(self._device)[place]
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        held = 1 if self._out is not None else held
        #: The inputs and results of the last launches.
        self.results: collections.deque[tuple[InputSet, Any]] = collections.deque(maxlen=held)
        self.raised: BaseException | None = None
        # Carries `settings.nested`: BLAS answers a product that the kernel itself computes.
        self._variables = contextvars.copy_context()

    def run(self) -> None:
        self._variables.run(self._run)

    def _run(self) -> None:
        try:
            context: Any = contextlib.nullcontext()
            if self._stream is not None:
                torch.cuda.set_device(self._device)
                context = torch.cuda.stream(self._stream)
            with context:
                self._free() if self._pace == "free" else self._interleaved()
        except BaseException as error:  # a kernel may call sys.exit
            self.raised = error
        finally:
            self._turns.leave(self._place)
            self._busy.discard(self._place)

    def _launch(self, place: int | None = None) -> None:
        of = self._sets[self._place if place is None else place]
        self.results.append((of, of.inputs.launch(self._launcher, self._out)))

    def _interleaved(self) -> None:
        turns = self._turns
        if self._pace == "launches" and self._place:
            for _ in range(self._most):
                turns.pass_on(self._place)
                if turns.over:
                    return
                self._launch(1 - self._place if turns.shared else self._place)
            return
        for made in range(1 if self._pace == "lines" else 2):
            turns.shared = made > 0
            with turns.after_each_line(self._place):
                self._launch()

    def _free(self) -> None:
        begun = time.monotonic()
        for made in range(1, 2 * self._most):
            self._launch()
            taken = time.monotonic() - begun
            if made >= self._most or (made >= LEAST_TOGETHER and taken > TOGETHER_SECONDS):
                self._busy.discard(self._place)
            if not self._busy or (taken > LONGEST_TOGETHER and made >= LEAST_TOGETHER):
                return


def launch_together(
    data: DataSets, launcher: Launcher, pace: Pace, most: int, into: bool = False
) -> list[tuple[InputSet, Any]]:
    """Launch on both sets of inputs from two threads at once, on two streams of a GPU.

    Args:
        most: The number of each thread's free launches, or of launches between the other's lines.
        into: Launches of each thread write into the thread's own output, otherwise they allocate.

    Returns:
        The results that were kept, with their inputs; none if no thread can be started.

    Raises:
        BaseException: The first that a launch raised.
    """
    device, busy, turns = data.device, {0, 1}, Turns()
    out = max(1, data.problem.empty_out("meta").untyped_storage().nbytes())
    held = max(1, min(most, data.limit // (64 * out)))
    threads = [
        Launches(data, launcher, place, busy, pace, turns, most, held, into)
        for place in sorted(busy)
    ]
    with _switching():
        try:
            for thread in threads:
                start_thread(thread)
        except BaseException as error:
            busy.clear()
            turns.leave(1)
            reraise(error)
            if not issubclass(type(error), RuntimeError):
                raise
            return []  # no thread can be started
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for thread in threads:
        if thread.raised is not None:
            data.raised = thread.raised
            raise thread.raised
    return [result for thread in threads for result in thread.results]


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Two streams for all verifications: torch's allocator reuses memory within one stream."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


@contextlib.contextmanager
def _switching() -> Iterator[None]:
    """Let threads alternate within a launch."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCHING)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
