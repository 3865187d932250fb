"""docs/learn.md is run as it stands, and every command prints what the page shows after it.

In a shown output ``…`` stands for anything, and a line of its own for any lines.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tmm_base import console

from tmm_core import dispatch
from tmm_core.tools.cli import main

pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "learn.md").read_text("utf-8")
#: Columns of the site's code blocks; wider lines scroll.
WIDTH = 88
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def steps() -> list[tuple[str, str]]:
    """Each command, with the output that is shown after it."""
    blocks = BLOCK.findall(PAGE)
    found = []
    for (language, text), (following, shown) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language == "sh":
            [command] = [line for line in text.replace("\\\n", " ").splitlines() if line]
            found.append((" ".join(command.split()), shown if following == "text" else ""))
    return found


STEPS = steps()


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a reader has it, with the shipped records. Its `tmm` prints lines of the page's
    width, although its output is no terminal."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    tmm = tmp_path / "bin" / "tmm"
    tmm.parent.mkdir()
    tmm.write_text(
        f"#!{sys.executable}\nimport sys\n\nfrom tmm_base import console\n\n"
        f"console.PIPED = {WIDTH}\n\nfrom tmm_core.tools.cli import main\n\nsys.exit(main())\n"
    )
    tmm.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TMM_SHIPPED_RECORDS")
    monkeypatch.setattr(console, "PIPED", WIDTH)
    dispatch.default_dispatcher.cache_clear()
    return tmp_path


def matches(shown: str, printed: str) -> bool:
    lines = [re.escape(line).replace("…", ".*") for line in shown.splitlines()]
    pattern = "".join("(?:.*\n)*" if line == ".*" else f"{line}\n" for line in lines)
    return re.fullmatch(pattern, printed.rstrip("\n") + "\n") is not None


def here(words: list[str]) -> bool:
    """Whether a command can be run in this process, which has imported torch and Triton."""
    return words[0] == "tmm" or (words[0] == "python" and words[1].endswith(".py"))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the page interprets its kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the overflow that is shown
def test_every_command_prints_the_shown_output(
    reader: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(STEPS) >= 10
    for command, shown in STEPS:
        words, stderr = shlex.split(command), ""
        if words[0] == "export":
            continue  # the tests interpret anyway
        if not here(words):
            folders = str(reader / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]
            path = os.pathsep.join(folders)
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
                capture_output=True, text=True, timeout=300,
            )  # fmt: skip
            printed, stderr = done.stdout, done.stderr
        elif words[0] == "tmm":
            assert main(words[1:]) == 0, capsys.readouterr().err
            printed = capsys.readouterr().out
        else:
            monkeypatch.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
            printed = capsys.readouterr().out
        assert matches(shown, printed), f"{command}\n{printed}{stderr}"
    shutil.rmtree(reader / "my-gemm")


def test_quoted_code_is_the_code_that_runs() -> None:
    """Each block of Python is a part of an example as it stands."""
    examples = [path.read_text("utf-8") for path in (ROOT / "examples" / "learn").glob("*.py")]
    quoted = [text for language, text in BLOCK.findall(PAGE) if language == "python"]
    assert quoted
    for text in quoted:
        assert any(text in example for example in examples), text


def test_the_page_is_linked_and_its_links_have_targets() -> None:
    assert "(docs/learn.md)" in (ROOT / "README.md").read_text("utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


def test_matching() -> None:
    assert matches("a\n…\nz\n", "a\nb\nc\nz\n")
    assert matches("a … z\n", "a b z\n")
    assert not matches("a\nz\n", "a\nb\nz\n")
    assert not matches("a.z\n", "abz\n")


@pytest.mark.parametrize("name", ["learn", "enable", "records"])
def test_no_block_of_code_scrolls(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks
    assert [line for block in blocks for line in block.splitlines() if len(line) > WIDTH] == []
