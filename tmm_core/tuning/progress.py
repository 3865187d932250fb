"""The progress line that calls show while they wait for tuning: one line per step of a model."""

from __future__ import annotations

import functools
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tmm_base.guards import suppress

#: Seconds that a step waits before the line appears.
SILENCE = 1.0
#: Seconds between two changes of the line, and between two lines of a log.
CHANGE_INTERVAL, LOG_INTERVAL = 0.2, 10.0
#: Seconds without tuning after which another step begins.
APART = 2.0


class Progress:
    """Shows the time that the tunings of a step take together. In a terminal or a notebook the line
    is overwritten, and erased at the end. A log gets a line every :data:`LOG_INTERVAL` seconds, if
    the settings require it."""

    def __init__(self) -> None:
        self._count, self._waited = 0, 0.0
        #: When the last tuning ended, and when the line may change.
        self._ended, self._next = -math.inf, -math.inf
        #: The width of the line that is shown.
        self._width = 0

    @contextmanager
    def of(self, title: str, shown: bool | None) -> Iterator[Callable[[], None]]:
        """A context for tuning the product ``title``; yields a function to call after each step.
        ``shown``: on any stderr, or never; None: only in a terminal or a notebook."""
        began = time.monotonic()
        if began - self._ended > APART:
            self._count, self._waited = 0, 0.0
        self._count += 1
        try:
            yield functools.partial(self._show, title, shown, began)
        finally:
            self._ended = time.monotonic()
            self._waited += self._ended - began
            self._overwrite("")

    def _show(self, title: str, shown: bool | None, began: float) -> None:
        now = time.monotonic()
        waited = self._waited + now - began
        if shown is False or waited < SILENCE or now < self._next:
            return
        many = f"{self._count} product{'s' * (self._count > 1)}"
        line = f"tuning {title} ({many} in {waited:.0f} s so far)"
        with suppress(Exception):  # stderr is closed, or its reader gone
            overwrites = sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel")
            self._next = now + (CHANGE_INTERVAL if overwrites else LOG_INTERVAL)
            if overwrites:
                self._overwrite(line[: shutil.get_terminal_size().columns - 1])
            elif shown:
                print(line, file=sys.stderr, flush=True)

    def _overwrite(self, line: str) -> None:
        if line or self._width:
            with suppress(Exception):
                end = "" if line else "\r"
                print("\r" + line.ljust(self._width), end=end, file=sys.stderr, flush=True)
            self._width = len(line)


#: The progress line of this process.
LINE = Progress()
