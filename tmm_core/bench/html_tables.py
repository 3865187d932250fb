"""HTML for notebooks: tables and lists of facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    """A `<table>`; the columns in `right` are right-aligned."""
    sides = ["right" if name in right else "left" for name in columns]

    def line(cells: Sequence[str], tag: str) -> str:
        inner = "".join(
            f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        return f"<tr>{inner}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><thead>{line(columns, 'th')}</thead><tbody>{body}</tbody></table>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A two-column table of names and values."""
    lines = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in pairs
    )
    return f"<table>{lines}</table>"
