"""Pages, comments, docstrings and names use the field's words: the private ones of earlier versions
do not return."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("tmm_core", "plugins", "cache", "docs", "examples", "tests")
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *ROOT.glob("*.md"),
        ROOT / "Makefile",
        *(ROOT / ".ci").glob("*"),
        *(ROOT / "benchmarks").glob("*.*"),
        *(path for name in FOLDERS for path in (ROOT / name).rglob("*")),
    )
    if (path.suffix in (".py", ".md") or path.name in ("Makefile", "run"))
    and path != Path(__file__)
)
#: Each private word, and what to write in its place.
PRIVATE = {
    r"outlast\w*": "slower than BLAS in steady state",
    r"without pause": "in steady state, back to back",
    r"(by|in|take|takes|took|taking) turns": "interleaved",
    r"held up": "disturbed",
    r"levelled": "normalised per round",
    r"rehears\w*": "dry run",
    r"posed": "a problem instance, a compile job; described",
    r"(of )?kin": "same architecture",
    r"soil\w*": "poisoned",
    r"lets? through": "re-raise",
    r"beside the result": "auxiliary outputs",
    r"as (it|they) lies?": "in its memory layout",
    r"(is|are|was) told": "is reported",
    r"asked of": "query",
}
WORDS = re.compile(rf"\b({'|'.join(PRIVATE)})\b", re.IGNORECASE)


def prose(path: Path) -> str:
    """A page without its code, or a module's comments, docstrings, messages and names."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    parts = [
        token.string.lstrip("#: ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    nodes = [*ast.walk(ast.parse(text))]
    parts += [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return re.sub(r"``.*?``", "", " ".join(parts), flags=re.DOTALL) + ". ".join(names(nodes))


def names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield each name that the nodes define, as words: "take turns" for ``take_turns``."""
    for node in nodes:
        stored = isinstance(getattr(node, "ctx", None), ast.Store)
        defined = isinstance(node, ast.arg | ast.ClassDef | ast.FunctionDef) or stored
        name = next((n for f in ("name", "arg", "id", "attr") if (n := getattr(node, f, ""))), "")
        if defined and isinstance(name, str):
            yield re.sub(r"_|(?<=[a-z0-9])(?=[A-Z])", " ", name)


def found(file: str) -> list[str]:
    return [match[0] for match in WORDS.finditer(re.sub(r"\s+", " ", prose(ROOT / file)))]


@pytest.mark.parametrize("file", FILES)
def test_no_private_word(file: str) -> None:
    words = found(file)
    advice = [
        text for word in words for key, text in PRIVATE.items() if re.fullmatch(key, word, re.I)
    ]
    assert not words, f"{file}: {', '.join(words)}; write: {', '.join(advice)}"


def test_a_private_word_is_found(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("It outlasts BLAS.\n\n```\nwithout pause\n```\n")
    assert WORDS.findall(prose(path))
    assert "pause" not in prose(path)
    module = tmp_path / "module.py"
    module.write_text(
        'def by_turns(kin):\n    """They take\n    turns."""\n    # without pause\n    posed = 1\n'
        "class LevelledTimes:\n    def lets(self, through):\n        self.held_up = posed\n"
    )
    text = re.sub(r"\s+", " ", prose(module))
    words = ["Levelled", "by turns", "held up", "kin", "posed", "take turns", "without pause"]
    assert sorted(match[0] for match in WORDS.finditer(text)) == words
