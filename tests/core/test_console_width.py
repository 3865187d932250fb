"""Output of the commands fits the terminal, breaks no word and follows its colours."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeKernel, dispatcher, problem, settings
from msgspec.structs import replace as revised
from tmm_base import console

import tmm_core
from tmm_core.dispatch.explanation import alike, explain_problem
from tmm_core.nn import convert
from tmm_core.tools.cli import main
from tmm_core.tools.commands import doctor

WIDTHS = (80, 100)


def words(text: str) -> list[str]:
    return re.findall(r"[\w.]+", text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def explained(tmp_path: Path) -> Any:
    names = ("quite.long_name_of_a_kernel", "another.kernel_with_a_name")
    odd = FakeKernel("odd.kernel", against=lambda problem: ["runs on NVIDIA GPUs, not on cpu"])
    even = FakeKernel("even.kernel", against=lambda problem: ["runs on NVIDIA GPUs, not on cpu"])
    times = {"blas": 20.0, names[0]: 10.0, (names[0], 1, 33): 7.25, (names[0], 1, 49): 8.5}
    kernels = [FakeBlas(), *map(FakeKernel, names), odd, even]
    d, _ = dispatcher(*kernels, times=times, root=tmp_path)
    d.choose(problem(m=40), settings())
    found = explain_problem(d, problem(m=40), settings(on_cache_miss="heuristic"))
    assert found.record is not None
    candidates = tuple(revised(c, steady_us=200.0) for c in found.record.candidates)
    return replace(found, record=revised(found.record, candidates=candidates))


@pytest.mark.parametrize("width", WIDTHS)
def test_an_explanation_fits_and_breaks_no_word(explained: Any, width: int) -> None:
    lines = explained.text(width).splitlines()
    # A path stays whole, to be copied.
    assert not [line for line in lines if len(line) > width and " " in line.strip()]
    assert set(words(explained.text(1000))) == set(words(explained.text(width)))
    # Kernels that decline for the same reason share a line.
    assert sum(line.startswith("rejected") for line in lines) == 1
    assert any("even.kernel, odd.kernel: runs on NVIDIA GPUs" in line for line in lines)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.slow
def test_shipped_records_fit_and_break_no_word(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tmm_cache.cli import main as cache_main

    monkeypatch.setattr(console, "width", lambda *_: width)
    monkeypatch.delenv("TMM_SHIPPED_RECORDS", raising=False)
    assert cache_main(["show", "--all"]) == 0
    narrow = capsys.readouterr().out
    assert len(narrow.splitlines()) > 500
    assert max(map(len, narrow.splitlines())) <= width
    monkeypatch.setattr(console, "width", lambda *_: 400)
    assert cache_main(["show", "--all"]) == 0
    assert set(words(narrow)) <= set(words(capsys.readouterr().out))


@pytest.mark.parametrize("width", WIDTHS)
def test_doctor_fits_and_has_a_legend(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "width", lambda *_: width)
    assert main(["doctor", "--device", "cpu"]) in (0, 1)
    legend, *lines = capsys.readouterr().out.splitlines()
    assert all(mark in legend for mark in ("! a problem", "- a note", "no mark"))
    long = [line for line in lines if len(line) > width]
    assert not [line for line in long if " " in line[20:].strip()]  # a path is not divided
    declining = [line for line in lines if "decline" in line]
    assert len(declining) <= 3
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("command", ["explain", "tune", "bench"])
def test_every_option_has_a_help_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.split("options:")[1].splitlines()
    for line, below in itertools.pairwise([*lines, ""]):
        if line.startswith("  -"):
            assert re.search(r"\S {2,}\S", line) or below.startswith(" " * 10), line


@pytest.mark.parametrize("variable", ["", "NO_COLOR", "TERM"])
def test_colour_follows_the_terminal_and_no_color(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert doctor._coloured("text", "33") == "text"  # a pipe
    monkeypatch.setattr("sys.stdout", Terminal())
    if variable:
        monkeypatch.setenv(variable, "dumb")
    wanted = "text" if variable else "\033[33mtext\033[0m"
    assert doctor._coloured("text", "33") == wanted
    assert doctor._coloured("text", "") == "text"


def test_names_with_the_same_texts_are_grouped() -> None:
    pairs = [("a", ["1"]), ("b", ["2"]), ("c", ["1"])]
    assert alike(pairs) == [(["a", "c"], ("1",)), (["b"], ("2",))]


def test_reprs_are_short(explained: Any) -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 6)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    for line in explained.text(60).splitlines():
        assert not line.rstrip().endswith(";"), line
    for thing in (explained, tmm_core.explain(x, w), convert(model)):
        assert len(repr(thing)) <= 200, repr(thing)
        assert repr(thing).startswith(f"<{type(thing).__name__}")
