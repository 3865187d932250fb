"""Calls a plugin's code, and finds what it changed in the state of the process or thread.

Other threads change that state as well. Their changes are neither reported nor undone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from tmm_core.errors import reraise
from tmm_core.registry.process_state import PIECES, State

T = TypeVar("T")

#: Seconds for which a thread waits to see whether others change the state: as long as the launch
#: took, within these limits. Another thread may get no processor for some milliseconds.
_IDLE, _LONGEST_IDLE = 0.1, 5.0
#: Seconds between two checks of the state.
_CHECK_INTERVAL = 2e-3
#: Maximum seconds for which a call waits until another thread's watched call has returned.
TURN = 1.0


#: The lock of the call that is watched. Two that restore the process's state would undo each
#: other's work, and take the other's changes for their own.
_watching = threading.Lock()


@contextmanager
def _turn() -> Iterator[None]:
    """A context in which one call is watched at a time. A call that takes more than :data:`TURN`
    seconds keeps its lock to itself: it is waited for once. So is a call of another thread that a
    fork left out of the child."""
    global _watching
    lock = _watching
    if not lock.acquire(timeout=TURN):
        _watching = lock = threading.Lock()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


#: How torch and tmm compute in this thread.
OF_THE_THREAD = (
    "the grad mode", "the inference mode", "autocast", "torch's default device", "tmm's settings"
)  # fmt: skip
#: State that the import of a plugin may not change. The program did not ask for this import, which
#: its first product makes.
OF_THE_PROGRAM = [
    *(*OF_THE_THREAD, "torch's default dtype"),
    *(name for name, piece in PIECES.items() if piece.owner in ("main", "generator")),
]


@contextmanager
def putting_back(names: Iterable[str] = OF_THE_PROGRAM) -> Iterator[list[str]]:
    """A context that puts back these pieces of state, by default how torch computes. It yields a
    list, to which it adds the names of what it put back, except for random generators: to draw
    from these is no fault."""
    before, found = State(torch.device("cpu"), names), list[str]()
    try:
        yield found
    finally:
        found += [each for each in before.put_back() if PIECES[each].owner != "generator"]


def watched(call: Callable[[], T], device: torch.device) -> tuple[T, list[str]]:
    """Call a plugin's code, and restore what it changed; returns the result and the names of these
    pieces. If the code raises, the first exception is raised after that.

    Another thread may have changed state that threads share. So a change of shared state counts
    only if two further calls repeat it, and if it does not happen while this thread waits.
    Otherwise it is not undone, except for how torch computes, which the main thread decides.

    One call is watched at a time, unless another one takes more than :data:`TURN` seconds.
    """
    with _turn():
        return _watched(call, device)


def _watched(call: Callable[[], T], device: torch.device) -> tuple[T, list[str]]:
    results: list[T] = []
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            results.append(call())
        except BaseException as error:
            reraise(error)
            errors.append(error)

    try:
        changed = _changed(attempt, device)
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # a traceback has this frame
    return results[-1], changed


def _changed(call: Callable[[], None], device: torch.device) -> list[str]:
    before, began = State(device), time.monotonic()
    call()
    changed = before.changed()
    idle = min(max(_IDLE, time.monotonic() - began), _LONGEST_IDLE)
    own = [name for name in changed if before.pieces[name].owner == "thread"]
    suspects = [name for name in changed if name not in own]
    for _ in range(2):
        # To read the state takes 1 ms.
        if not (suspects and (suspects := _unchanged_while_waiting(suspects, idle, device))):
            break
        left = State(device)
        before.restore(suspects)
        again = State(device)
        call()
        confirmed = again.changed()
        once = [name for name in suspects if name not in confirmed]
        left.restore(name for name in once if not before.takes_back(name))
        suspects = [name for name in suspects if name in confirmed]
    before.restore(suspects)
    return own + suspects


def _unchanged_while_waiting(names: list[str], seconds: float, device: torch.device) -> list[str]:
    """Return the names of the pieces that no other thread changes within some seconds."""
    waiting = State(device)
    end = time.monotonic() + seconds
    while names and time.monotonic() < end:
        time.sleep(_CHECK_INTERVAL)
        changed = waiting.changed()
        names = [name for name in names if name not in changed]
    return names
