"""Tables for a width: what is left out, where cells fold, what notebooks get."""

from __future__ import annotations

import re

import pytest
from cache_builders import problem, record
from hypothesis import given
from hypothesis import strategies as st
from tmm_cache import columns, markup

WORD = st.text("abcdefgh.=_", min_size=1, max_size=9)
CELL = st.lists(WORD, max_size=6).map(" ".join)


@given(st.lists(st.tuples(CELL, CELL, CELL), max_size=6), st.integers(40, 120))
def test_no_line_is_too_long_and_no_word_is_cut_or_lost(
    rows: list[tuple[str, str, str]], width: int
) -> None:
    lines = columns.table(("one", "two", "three"), rows, width)
    assert max(map(len, lines)) <= width
    shown = sorted(" ".join(lines[2:]).split())
    assert shown == sorted(" ".join(" ".join(row) for row in rows).split())


def test_columns_are_left_out_in_order_and_numbers_stand_at_the_right() -> None:
    rows = [("a", "12345678", "1.5"), ("bb", "x", "10.25")]
    names = ("name", "config", "µs")
    wide = columns.table(names, rows, 40, right=("µs",), optional=("config",))
    assert wide == [
        "name  config       µs",
        "─────────────────────",
        "a     12345678    1.5",
        "bb    x         10.25",
    ]
    narrow = columns.table(names, rows, 20, right=("µs",), optional=("config",))
    assert narrow == ["name     µs", "───────────", "a       1.5", "bb    10.25"]


def test_cells_fold_between_words_behind_a_plus_and_a_range() -> None:
    lines = columns.table(
        ("epilogue", "µs"), [("bias+gelu_tanh+softcap(30)", "1.00…2.00")], 18, right=("µs",)
    )
    assert lines[2:] == ["bias+        1.00…", "gelu_tanh+    2.00", "softcap(30)"]


def test_a_word_is_cut_only_where_the_width_leaves_no_other_way() -> None:
    (line, *more) = columns.table(("name", "of"), [("x" * 30, "y" * 10)], 20)[2:]
    assert more
    assert len(line) <= 20
    assert columns.paragraph("/a/" + "b" * 60, 40, indent=4) == ["    /a/" + "b" * 60]


@pytest.mark.parametrize(
    ("width", "below"),
    [
        (20, ["winners", "triton.warp_spe", "cialized=426", "blas=72"]),
        (34, ["winners", "triton.warp_specialized=426", "blas=72"]),
        (40, ["winners triton.warp_specialized=426", "blas=72"]),
    ],
)
def test_columns_that_do_not_fit_beside_the_others_are_printed_below(
    width: int, below: list[str]
) -> None:
    rows = [
        ("nvidia-h200", "573", "triton.warp_specialized=426 blas=72"),
        ("nvidia-h100", "1", ""),
    ]
    lines = columns.table(("gpu", "records", "winners"), rows, width, right=("records",))
    assert lines[0] == "gpu          records"
    assert lines[2] == "nvidia-h200      573"
    assert lines[-1] == "nvidia-h100        1"
    assert lines[3:-1] == [f"     {line}" for line in below]
    assert columns.table(("gpu", "records", "winners"), rows, 49)[2].endswith("=426")


def test_no_column_is_printed_below_while_folding_suffices() -> None:
    assert columns.table(("n", "of"), [("a bb", "c dd")], 6) == [
        "n   of",
        "──────",
        "a   c",
        "bb  dd",
    ]


def test_a_text_among_the_rows_is_a_paragraph() -> None:
    rows = ["weight 64x32 bf16: M 1…9, 3 records", ("a", "b"), "     tile=1 warps=2 stages=three"]
    assert columns.table(("x", "y"), rows, 30)[2:] == [
        "weight 64x32 bf16: M 1…9, 3",
        "records",
        "a  b",
        "     tile=1 warps=2",
        "     stages=three",
    ]


def test_markup_escapes_what_a_stranger_wrote() -> None:
    text = markup.table(("<b>", "µs"), [("<script>", "1")], right=("µs",))
    text += markup.facts([("a&b", "<i>")])
    assert "<script>" not in text
    assert "<i>" not in text
    assert "<b>" not in text
    assert '<td style="text-align:right">1</td>' in text


def test_a_notebook_shows_a_record_as_a_table() -> None:
    html = record(problem(m=16))._repr_html_()
    assert "16x4096x512 bfloat16" in html
    assert len(re.findall("<tr>", html)) == 4 + 1 + 5  # facts, the heading, the candidates
    assert html.index("triton.split_k") < html.index("triton.naive")
    assert "out of shared memory [red]" in html


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_width_is_the_terminals_or_that_of_a_pipe(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "133")
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal, raising=False)
    assert columns.width() == (133 if is_terminal else 100)
