"""Conventions of the commands `tmm-cache` and `tmm`: data on stdout, notes on stderr, one-line
errors, and the exit statuses."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from tmm_cache.errors import reraise
from tmm_cache.facets import printable
from tmm_cache.files import Fault
from tmm_cache.keys import JSON

T = TypeVar("T")

#: Exit statuses: done; something was found or left undone; bad usage.
DONE, FOUND, MISTAKE = 0, 1, 2
#: The status that shells use for an interrupted command.
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors, and less to write."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISTAKE, f"{self.prog}: {printable(message)}\n")

    def flag(self, *names: str, text: str) -> None:
        """Add an option without a value, False by default."""
        self.add_argument(*names, action="store_true", help=text)

    def add_json(self) -> None:
        """Add `--json`."""
        self.flag("--json", text="print JSON")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A parser whose `ValueError` argparse shows with its message."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:  # argparse would drop its text
            raise argparse.ArgumentTypeError(str(error)) from error

    return parsed


def guarded(
    run: Callable[[], int], note: Callable[[str], None], errors: tuple[type[Exception], ...]
) -> int:
    """The exit status of a command; one of `errors` becomes a note."""
    _open_standard_streams()
    try:
        if hasattr(sys.stdout, "reconfigure"):
            # Escape µ and × on an ASCII terminal instead of failing.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            status = run()
        except SystemExit as stop:  # argparse, after --help or a usage error
            status = stop.code if isinstance(stop.code, int) else DONE
        sys.stdout.flush()
    except BrokenPipeError:  # `tmm-cache show | head`
        _discard_output()
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except errors as error:
        note(_text(error))
        _discard_output()
        return MISTAKE
    return status


def _open_standard_streams() -> None:
    """Open those that are closed on the null device: a file opened later would take the number of
    a closed one, and a child process would write its output into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError as error:
            reraise(error)
            # The lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (until the process ends)


def _text(error: Exception) -> str:
    """An error in a line, without the number of an OSError."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None:  # most likely stdout's
        return f"output cannot be written: {error.strerror}"
    return f"{error.filename}: {error.strerror}"


def _discard_output() -> None:
    """Flush stdout or, where it can't be written, let Python's own flush at exit succeed."""
    try:
        sys.stdout.flush()
    except OSError as error:
        reraise(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def warnings_as_notes(note: Callable[[str], None], *categories: type[Warning]) -> Iterator[None]:
    """A context in which warnings of these categories become notes, once each."""
    told: set[str] = set()
    default = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, categories):
            default(message, category, *place, **more)
        elif str(message) not in told:
            told.add(str(message))
            note(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        for category in categories:
            warnings.simplefilter("always", category)
        yield


def note(text: str) -> None:
    """Print a message that is not data, on stderr."""
    print(f"tmm-cache: {printable(text)}", file=sys.stderr)


class Noted:
    """Reports faults and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def fault(self, fault: Fault) -> None:
        """Report one fault."""
        self.count += 1
        note(f"passed over {fault.path}: {fault.reason}")


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
