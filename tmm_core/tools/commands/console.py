"""Output and exit statuses of ``tmm``: data on stdout, notes on stderr, three exit statuses."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from tmm_cache import columns as layout

#: Exit statuses: done; something is wrong or was left undone; a usage error.
DONE, FOUND, MISTAKE = 0, 1, 2
#: The status that shells use for an interrupted command.
INTERRUPTED = 130


class UsageError(Exception):
    """A usage error: reported in one line, exit status 2."""


def note(text: str) -> None:
    """Print a message for the user that is not data."""
    print(f"tmm: {text}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print data for a program; NaN and infinite times, which JSON lacks, become null."""
    print(json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str] | str], numbers: Sequence[str] = ()
) -> None:
    """Print a table on stdout, no wider than the terminal, or 100 columns if there is none; the
    columns in ``numbers`` are right-aligned. A text is a separate paragraph."""
    found = list(rows)
    print("\n".join(layout.table(columns, found, layout.width(), right=numbers)))


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """A context in which tmm's warnings (a broken plugin, a damaged record) become notes, once
    each."""
    from tmm_cache import CacheWarning

    from tmm_core.errors import TmmWarning

    told: set[str] = set()
    default = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, (TmmWarning, CacheWarning)):
            default(message, category, filename, lineno, file, line)
        elif str(message) not in told:
            told.add(str(message))
            note(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        for category in (TmmWarning, CacheWarning):
            warnings.simplefilter("always", category)
        yield
