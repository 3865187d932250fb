"""Work in steps: a generator that its caller drains at once, or resumes whenever it likes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

#: Work to be resumed until it returns. It yields what it waits for: it has nothing to do until one
#: of these is done; none if it can go on at once. True is sent to it if it rested meanwhile.
Steps = Generator[Sequence["Future[Any]"], "bool | None", T]

#: Seconds after which work that waits looks at its time limits.
LOOK = 0.05


def drained(steps: Steps[T], tick: Callable[[], None] = lambda: None) -> T:
    """Take all ``steps``; returns their result.

    Args:
        tick: Called after every step.
    """
    while True:
        try:
            pending = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        tick()
        if pending:
            wait(pending, LOOK, FIRST_COMPLETED)
