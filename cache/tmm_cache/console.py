"""Output of the command: data on stdout, notes on stderr, and three exit statuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tmm_cache.facets import printable
from tmm_cache.files import Fault
from tmm_cache.keys import JSON

T = TypeVar("T")

#: Exit statuses: done; something was found or left undone; bad usage.
DONE, FOUND, MISTAKE = 0, 1, 2


def note(text: str) -> None:
    """Print a message that is not data, on stderr."""
    print(f"tmm-cache: {printable(text)}", file=sys.stderr)


class Noted:
    """Reports faults and counts them."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def fault(self, fault: Fault) -> None:
        """Report one fault."""
        self.count += 1
        note(f"passed over {fault.path}: {fault.reason}")

    def without_faults(self, items: Iterable[T | Fault]) -> Iterator[T]:
        """The items that are not faults; each fault is reported."""
        for item in items:
            if isinstance(item, Fault):
                self.fault(item)
            else:
                yield item


def without_faults(items: Iterable[T | Fault]) -> Iterator[T]:
    """The items that are not faults; each fault is reported."""
    return Noted().without_faults(items)


def print_json(value: JSON) -> None:
    """Print data for a program. Raises ValueError for NaN and infinities, which JSON lacks."""
    print(json.dumps(value, indent=2, allow_nan=False))


def counted(number: int, noun: str) -> str:
    """`1 record`, `2 records`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def can_ask() -> bool:
    """Whether there is a terminal to ask at."""
    return sys.stdin is not None and sys.stdin.isatty()


def confirmed(question: str) -> bool:
    """Ask at the terminal; anything but yes is no."""
    # `input` would put the question among the data on stdout.
    sys.stdout.flush()
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
