"""The console of `tmm` and `tmm-cache`: data on stdout, notes on stderr, errors in one line, exit
statuses, and tables."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn, TextIO, TypeVar

from tmm_base import UsageError
from tmm_base.guards import printable, reraise

T = TypeVar("T")

#: Exit statuses: done; something was found or left undone; bad usage.
DONE, FOUND, MISTAKE = 0, 1, 2
#: The status that shells use for an interrupted command.
INTERRUPTED: Final = 130
#: The width of output to a pipe or file: fits logs, mail and side-by-side diffs.
PIPED: Final = 100
_GAP: Final = 2
_INDENT: Final = 5

#: The command that runs, as notes name it.
_program = "tmm"


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors and shorthands for common options."""

    def error(self, message: str) -> NoReturn:
        note(message, self.prog)
        sys.exit(MISTAKE)

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file)  # argparse ignores that the disk is full

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


# -- running a command -------------------------------------------------------------------


def guarded(program: str, run: Callable[[], int], *errors: type[Exception]) -> int:
    """The exit status of a command; a usage error, an OSError, or one of `errors`, becomes a
    note."""
    global _program
    _program = program
    expected: tuple[type[Exception], ...] = (UsageError, OSError, *errors)
    _open_standard_streams()
    try:
        if hasattr(sys.stdout, "reconfigure"):
            # Escape µ and × on an ASCII terminal instead of failing.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            status = run()
        except SystemExit as stop:  # argparse, after --help or a usage error
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            if not isinstance(stop.code, int | None):  # a text, which Python would print
                print_line(str(stop.code), sys.stderr)
        sys.stdout.flush()
    except BrokenPipeError:  # `tmm-cache show | head`
        _discard_output()
        return DONE
    except KeyboardInterrupt:
        return INTERRUPTED
    except expected as error:
        note(_text(error))
        _discard_output()
        return MISTAKE
    return status


def _open_standard_streams() -> None:
    """Open closed standard streams on the null device. Otherwise a file opened later would get the
    number of a closed one, and a child process would write its output into that file."""
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
        _discard(sys.stdout)


def _discard(stream: TextIO) -> None:
    """Write what this standard stream holds, and all that follows, to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def warnings_as_notes(*categories: type[Warning]) -> Iterator[None]:
    """A context in which warnings of these categories become notes, once each."""
    noted: set[str] = set()
    default = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, categories):
            default(message, category, *place, **more)
        elif str(message) not in noted:
            noted.add(str(message))
            note(str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        for category in categories:
            warnings.simplefilter("always", category)
        yield


# -- messages ----------------------------------------------------------------------------


def note(text: str, program: str | None = None) -> None:
    """Print a message that is not data, on stderr, if that can be written."""
    try:
        print_line(f"{program or _program}: {printable(text)}", sys.stderr)
    except OSError as error:
        reraise(error)
        _discard(sys.stderr)


def print_line(text: str, file: TextIO | None = None) -> None:
    """Print a text, by default on stdout: in one line, but folded between words on a terminal."""
    if (file or sys.stdout).isatty():
        print_paragraph(text, hanging=_INDENT, file=file)
    else:
        print(text, file=file, flush=True)


def print_json(value: Any) -> None:
    """Print data for a program; NaN and infinite times, which JSON lacks, become null.

    Characters that stdout cannot encode are escaped as JSON escapes them, and not as Python does.
    """
    # json writes them by the names that `parse_constant` reads.
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    text = json.dumps(finite, indent=2, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError as error:
        reraise(error)
        text = json.dumps(finite, indent=2)
    print(text)


def counted(number: int, noun: str) -> str:
    """`1 record`, `2 records`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


# -- tables ------------------------------------------------------------------------------


def width(file: TextIO | None = None) -> int:
    """The terminal's width, or :data:`PIPED` if the file, by default stdout, is not a terminal."""
    is_terminal = (file or sys.stdout).isatty()
    return shutil.get_terminal_size().columns if is_terminal else PIPED


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str] | str], right: Sequence[str] = ()
) -> None:
    """Print a table on stdout, as `table` lays it out for the terminal or a pipe."""
    print("\n".join(table(columns, rows, width(), right=right)))


def print_paragraph(text: str, *, hanging: int = 0, file: TextIO | None = None) -> None:
    """Print a text, by default on stdout, in lines as wide as the terminal or a pipe."""
    print("\n".join(paragraph(text, width(file), hanging=hanging)), file=file, flush=True)


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str] | str],
    width: int,
    *,
    right: Sequence[str] = (),
) -> list[str]:
    """The lines of a table, none longer than `width`: cells are folded between words. If that does
    not suffice, each row becomes a paragraph that names its columns. Columns in `right` are
    right-aligned. A row that is a string is an indented paragraph across all columns, which
    continues the row above."""
    cells = list(zip(columns, *(row for row in rows if not isinstance(row, str)), strict=True))
    widths = [max(map(len, column)) for column in cells]
    words = [max(len(word) for cell in column for word in [*cell.split(), ""]) for column in cells]
    room = [size - small for size, small in zip(widths, words, strict=True)]
    while sum(widths) + _GAP * (len(widths) - 1) > width:
        if not any(room):
            return [line for row in rows for line in _named(columns, row, width)]
        # Narrow the widest column that has room.
        widest = max(range(len(widths)), key=lambda index: (room[index] > 0, widths[index]))
        widths[widest] -= 1
        room[widest] -= 1

    def folded(row: Sequence[str]) -> Iterator[str]:
        parts = [
            # textwrap takes 10 µs for a cell, and most need no fold.
            [cell] if len(cell) <= size else textwrap.wrap(cell, size, break_on_hyphens=False)
            for cell, size in zip(row, widths, strict=True)
        ]
        for line in itertools.zip_longest(*parts, fillvalue=""):
            sized = zip(columns, line, widths, strict=True)
            padded = [c.rjust(n) if name in right else c.ljust(n) for name, c, n in sized]
            yield (" " * _GAP).join(padded).rstrip()

    lines = [*folded(columns), "─" * (sum(widths) + _GAP * (len(widths) - 1))]
    for row in rows:
        if isinstance(row, str):
            lines += _named(columns, row, width)
        else:
            lines += folded(row)
    return lines


def _named(columns: Sequence[str], row: Sequence[str] | str, width: int) -> list[str]:
    """A table's row as a paragraph that names its columns."""
    if isinstance(row, str):
        return paragraph(" " * _INDENT + row, width, hanging=_INDENT)
    cells = ", ".join(f"{name} {cell}" for name, cell in zip(columns, row, strict=True) if cell)
    return textwrap.wrap(cells, width, subsequent_indent=" " * _INDENT, break_on_hyphens=False)


def paragraph(text: str, width: int, *, hanging: int = 0) -> list[str]:
    """The lines of a text, indented by `hanging` from the second line on.

    A word longer than a line, usually a path that a user will copy, stays whole.
    """
    return textwrap.wrap(
        text,
        max(width, 20),
        subsequent_indent=" " * hanging,
        break_on_hyphens=False,
        break_long_words=False,
    )
