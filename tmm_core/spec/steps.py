"""Work in steps: a generator whose caller takes all steps at once, or resumes it at any time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

#: Work to be resumed until it returns. It yields the futures that it waits for; an empty sequence
#: if it can go on at once. The caller sends True if it paused the work meanwhile.
Steps = Generator[Sequence["Future[Any]"], "bool | None", T]

#: Seconds after which waiting work is resumed to check its time limits.
CHECK_INTERVAL = 0.05


def drained(steps: Steps[T], tick: Callable[[], None] = lambda: None) -> T:
    """Take all ``steps``, and call ``tick`` after each; returns their result."""
    while True:
        try:
            pending = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        tick()
        wait(pending, CHECK_INTERVAL, FIRST_COMPLETED)  # returns at once if it waits for nothing
