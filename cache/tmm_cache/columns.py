"""Lays out tables and paragraphs for a width, by dropping columns and never splitting words.

rich shrinks columns by splitting words, and costs 45 ms plus 0.5 ms per row; a list of 10,000
records takes 40 ms here.
"""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

#: The width of output to a pipe or file: fits logs, mail and side-by-side diffs.
PIPED = 100
GAP = 2
#: Indentation of what is printed below a row.
_INDENT = 5

#: A cell may be broken after a space, the plus of an epilogue chain, or the dots of a range.
_WORDS = re.compile("[^ +…]*[ +…]?")


def width() -> int:
    """The terminal's width, or :data:`PIPED` if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str] | str],
    width: int,
    *,
    right: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> list[str]:
    """The lines of a table, none longer than `width`.

    A row that is a string is a paragraph across all columns: a heading, or, if it begins with a
    space, a continuation of the row above. Columns in `right` are right-aligned. Columns in
    `optional` are dropped, first to last, while a row is too long; then long cells are folded
    between words. Columns whose longest words do not fit side by side are printed below their row.
    Only a word that is longer than a line is broken.
    """
    whole = [row for row in rows if not isinstance(row, str)]
    kept = fitting(columns, whole, width, optional)
    below = _below([columns, *whole], kept, width)
    kept = [index for index in kept if index not in below]
    names = [columns[index] for index in kept]
    widths = _widths([names, *([row[index] for index in kept] for row in whole)], width)
    sides = [str.rjust if name in right else str.ljust for name in names]

    def lines_of(cells: Sequence[str]) -> Iterator[str]:
        fits = all(len(cell) <= size for cell, size in zip(cells, widths, strict=True))
        for folded in [cells] if fits else zip_longest(*map(_folded, cells, widths), fillvalue=""):
            padded = [side(cell, n) for side, cell, n in zip(sides, folded, widths, strict=True)]
            yield (" " * GAP).join(padded).rstrip()

    lines = [*lines_of(names), "─" * (sum(widths) + GAP * (len(widths) - 1))]
    for row in rows:
        if isinstance(row, str):
            lines += paragraph(row.lstrip(), width, indent=len(row) - len(row.lstrip()))
        else:
            lines += lines_of([row[index] for index in kept])
            for index in below:
                if row[index]:
                    folded = _folded(f"{columns[index]} {row[index]}", width - _INDENT)
                    lines += [" " * _INDENT + line for line in folded]
    return lines


def fitting(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, optional: Sequence[str]
) -> list[int]:
    """The indices of the columns that fit the width."""
    natural = [GAP + max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    kept = list(range(len(columns)))
    for name in optional:
        if sum(natural[index] for index in kept) - GAP <= width:
            break
        kept.remove(columns.index(name))
    return kept


def paragraph(text: str, width: int, *, indent: int = 0, hanging: int | None = None) -> list[str]:
    """The lines of a text, indented by `indent`, and by `hanging` from the second line on.

    A word longer than a line, usually a path that somebody will copy, stays whole.
    """
    return textwrap.wrap(
        text,
        max(width, indent + 20),
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent if hanging is None else hanging),
        break_on_hyphens=False,
        break_long_words=False,
    )


def _below(rows: Sequence[Sequence[str]], kept: Sequence[int], width: int) -> list[int]:
    """The columns to print below their row, so that the longest words of the others fit side by
    side: those with the longest words; never the first."""
    least = {index: _longest_word([row[index] for row in rows]) for index in kept}
    below: list[int] = []
    while sum(least.values()) + GAP * (len(least) - 1) > width and len(least) > 1:
        longest = max(list(least)[1:], key=lambda index: least[index])
        below.append(longest)
        del least[longest]
    return sorted(below)


def _longest_word(cells: Sequence[str]) -> int:
    return max(len(word) for cell in cells for word in _words(cell))


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The columns' widths: what they need, with the widest reduced if that is too much."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, cells)) for cells in columns]
    room = width - GAP * (len(widths) - 1)
    if sum(widths) <= room:
        return widths
    least = [_longest_word(cells) for cells in columns]
    for floor in (least, [1] * len(widths)):
        while sum(widths) > room:
            spare = [size - low for size, low in zip(widths, floor, strict=True)]
            if not any(spare):
                break
            widths[max(range(len(widths)), key=lambda i: (spare[i] > 0, widths[i]))] -= 1
    return widths


def _words(cell: str) -> list[str]:
    return [word.rstrip(" ") for word in _WORDS.findall(cell)]


def _folded(cell: str, size: int) -> list[str]:
    lines = [""]
    for word in _WORDS.findall(cell):
        if lines[-1] and len(lines[-1]) + len(word.rstrip(" ")) > size:
            lines.append("")
        while len(word.rstrip(" ")) > size:
            lines[-1:] = [word[:size], ""]
            word = word[size:]
        lines[-1] += word
    return [line.rstrip(" ") for line in lines if line]
