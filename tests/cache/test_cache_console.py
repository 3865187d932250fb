"""Tables and paragraphs fit a width: how cells fold, and how numbers are aligned."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tmm_base import console

WORD = st.text("abcdefgh.=_[]", min_size=1, max_size=9)
CELL = st.lists(WORD, max_size=6).map(" ".join)


@given(st.lists(st.tuples(CELL, CELL, CELL), max_size=6), st.integers(40, 120))
@pytest.mark.slow
def test_no_line_is_too_long_and_no_word_is_cut_or_lost(
    rows: list[tuple[str, str, str]], width: int
) -> None:
    lines = console.table(("one", "two", "three"), rows, width)
    assert max(map(len, lines)) <= width
    shown = sorted(" ".join(lines[2:]).split())
    assert shown == sorted(" ".join(" ".join(row) for row in rows).split())


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_data_is_json_in_every_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path may have letters that the terminal's encoding lacks, or bytes of no encoding."""
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))
    text = "µ é \N{GRINNING FACE} \udcff"
    assert console.guarded("tmm", lambda: console.print_json({"path": text}) or 0) == 0
    escaped = output.getvalue().decode(encoding)
    assert json.loads(escaped) == {"path": text}
    assert len(escaped.splitlines()) == 3  # indented
    output.seek(output.truncate(0))
    assert console.guarded("tmm", lambda: console.print_json({"path": "µ é"}) or 0) == 0
    plain = output.getvalue().decode(encoding)
    assert json.loads(plain) == {"path": "µ é"}
    assert ("µ" in plain) == (encoding != "ascii")


def test_children_inherit_the_null_device_for_a_closed_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, opening, opened = os.fstat, os.open, list[int]()

    def closed(number: int) -> Any:
        if number == 1:
            raise OSError(errno.EBADF, "closed")
        return status(number)

    def recorded(*given: Any) -> int:
        opened.append(opening(*given))
        return opened[-1]

    monkeypatch.setattr(os, "fstat", closed)
    monkeypatch.setattr(os, "open", recorded)
    console._open_standard_streams()
    (number,) = opened
    try:
        assert os.get_inheritable(number)
        assert os.path.samestat(status(number), os.stat(os.devnull))
    finally:
        os.close(number)


def test_numbers_are_aligned_to_the_right() -> None:
    rows = [("a", "12345678", "1.5"), ("bb", "x", "10.25")]
    names = ("name", "config", "µs")
    assert console.table(names, rows, 40, right=("µs",)) == [
        "name  config       µs",
        "─────────────────────",
        "a     12345678    1.5",
        "bb    x         10.25",
    ]


def test_numbers_are_aligned_to_the_right_of_folded_rows_too() -> None:
    rows = [("a b c d e f", "1.5"), ("b", "10.25")]
    assert console.table(("name", "µs"), rows, 14, right=("µs",)) == [
        "name        µs",
        "──────────────",
        "a b c d    1.5",
        "e f",
        "b        10.25",
    ]


def test_cells_that_fit_are_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textwrap would take seconds for ten thousand rows."""
    monkeypatch.delattr(console.textwrap, "wrap")
    rest = "bf16 row x col silu", "triton.split_k", "11.50"
    rows = [(f"{n}x4096x4096", *rest) for n in range(10_000)]
    lines = console.table(("problem", "operands", "kernel", "µs"), rows, 100, right=("µs",))
    assert len(lines) == 10_002


def test_cells_of_many_words_fold_before_a_word_is_cut() -> None:
    rows = [("triton.warp_specialized", "a b c d e f g h i j k l m n o p")]
    lines = console.table(("kernel", "config"), rows, 40)
    assert lines[2].startswith("triton.warp_specialized  a b ")
    assert len(lines) > 3


def test_no_word_is_folded_at_its_hyphens() -> None:
    rows = [("k", "cuBLAS is-as-fast, run-by-run")]
    assert console.table(("a", "b"), rows, 18)[2:] == [
        "k  cuBLAS",
        "   is-as-fast,",
        "   run-by-run",
    ]


def test_a_row_without_room_for_its_words_is_a_paragraph() -> None:
    rows = [("large", "", "bfloat16"), "more of it", ("decode", "0.979×", "x" * 15)]
    assert console.table(("class", "worst", "dtype"), rows, 20) == [
        "class large, dtype",
        "     bfloat16",
        "     more of it",
        "class decode, worst",
        "     0.979×, dtype",
        "     " + "x" * 15,
    ]


def test_a_word_is_cut_only_in_a_table() -> None:
    assert console.paragraph("a /a/" + "b" * 60, 40, hanging=4) == ["a", "    /a/" + "b" * 60]


def test_a_text_among_the_rows_is_a_paragraph() -> None:
    rows = [("a", "b"), "tile=1 warps=2 stages=three"]
    assert console.table(("x", "y"), rows, 30)[2:] == [
        "a  b",
        "     tile=1 warps=2",
        "     stages=three",
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_width_is_the_terminals_or_that_of_a_pipe(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "133")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    assert console.width() == (133 if is_terminal else 100)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_notes_are_folded_for_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    console.note("nothing can be written: full")
    with pytest.raises(SystemExit, match="2"):
        console.Parser(prog="tmm tune").error("argument MxNxK: found '4x', accepted is MxNxK")
    fold = "\n     " if is_terminal else " "
    assert capsys.readouterr().err == (
        f"tmm: nothing can be written:{fold}full\n"
        f"tmm tune: argument MxNxK:{fold}found '4x', accepted is{fold}MxNxK\n"
    )
