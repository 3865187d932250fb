"""The progress bar of a call that waits for tuning."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

from tmm_cache.errors import suppress

#: Seconds before the bar appears.
SILENCE = 1.0


class Progress:
    """A bar on stderr, or in a notebook's cell, once the wait is longer than :data:`SILENCE`.

    Args:
        title: Names the problem being tuned.
        shown: True: on any stderr; False: never; None: only on a terminal or in a notebook.
    """

    def __init__(self, title: str, shown: bool | None) -> None:
        self._title, self._shown = title, shown
        self._done, self._total = 0, 0
        self._bar: Any = None
        self._timer = threading.Timer(SILENCE, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Progress:
        if self._shown is not False:
            with suppress(RuntimeError):  # no thread: nothing is shown
                self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with suppress(Exception):  # stderr is closed or its reader gone
            self._timer.join()  # the bar may be about to appear
            if self._bar is not None:
                self._bar.stop()

    def total(self, count: int) -> None:
        """Set the total number of candidates."""
        self._total = count

    def advance(self) -> None:
        """Count one more finished candidate."""
        self._done += 1
        self._update()

    def _update(self) -> None:
        if self._bar is not None:
            with suppress(Exception):
                self._bar.update(self._bar.task_ids[0], completed=self._done, total=self._total)

    def _show(self) -> None:
        # A display error must cost neither the tuning nor print a traceback of a thread.
        with suppress(Exception):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            console = Console(stderr=True)
            if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:
                # rich's widget would warn at every refresh if it cannot be shown; a line can be.
                console = Console(stderr=True, force_jupyter=False, force_terminal=True)
            if not (self._shown or console.is_terminal or console.is_jupyter):
                return
            columns = (TextColumn("tuning {task.description}"), BarColumn(), MofNCompleteColumn())
            # A log gets the bar once, at the end, so it must not be transient there.
            bar = Bar(*columns, console=console, transient=console.is_terminal)
            bar.add_task(self._title)
            self._bar = bar
            self._update()
            bar.start()
