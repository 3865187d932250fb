"""The progress bar of a call that waits for tuning."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from typing import Any

#: Seconds before the bar appears.
SILENCE = 1.0


class Progress:
    """A bar on stderr, or in a notebook's cell, once the wait is longer than :data:`SILENCE`.

    Args:
        title: Names the problem being tuned.
        shown: True: on any stderr; False: never; None: only on a terminal or in a notebook.
    """

    def __init__(self, title: str, shown: bool | None) -> None:
        self._title = title
        self._done, self._total = 0, 0
        self._bar: Any = None
        self._task: Any = None
        self._closed = False
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        if shown is not False:
            self._timer = threading.Timer(SILENCE, self._show, (bool(shown),))
            self._timer.daemon = True

    def __enter__(self) -> Progress:
        if self._timer is not None:
            with contextlib.suppress(RuntimeError):  # no thread: nothing is shown
                self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._bar is not None:
                with contextlib.suppress(Exception):  # stderr is closed or its reader gone
                    self._bar.stop()

    def total(self, count: int) -> None:
        """Set the total number of candidates."""
        self._total = count

    def advance(self) -> None:
        """Count one more finished candidate."""
        with self._lock:
            self._done += 1
            if self._bar is not None:
                with contextlib.suppress(Exception):
                    self._bar.update(self._task, completed=self._done, total=self._total)

    def _show(self, always: bool) -> None:
        # A display error must cost neither the tuning nor print a traceback of a thread.
        with contextlib.suppress(Exception):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            console = Console(stderr=True)
            if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
                # rich's widget would warn at every refresh if it cannot be shown; a line can be.
                console = Console(stderr=True, force_jupyter=False, force_terminal=True)
            if not (always or console.is_terminal or console.is_jupyter):
                return
            columns = (TextColumn("tuning {task.description}"), BarColumn(), MofNCompleteColumn())
            with self._lock:
                if not self._closed:
                    # A log gets the bar once, at the end, so it must not be transient there.
                    self._bar = Bar(*columns, console=console, transient=console.is_terminal)
                    self._task = self._bar.add_task(
                        self._title, completed=self._done, total=self._total
                    )
                    self._bar.start()
