"""Every command and option that a page names exists, and so does every name of tmm that a benchmark
or an example uses. Every environment variable has a page."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
from tmm_cache import cli as tmm_cache_cli

from tmm_core.tools import cli as tmm_cli

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "plugins", "examples", "benchmarks")
#: The changelog also names removed commands.
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(p for name in FOLDERS for p in (ROOT / name).rglob("*.md")))
    if path.name != "CHANGELOG.md"
)
SOURCES = [p for name in ("tmm_core", "plugins", "cache") for p in (ROOT / name).rglob("*.py")]
#: Inline code, and the lines of fenced blocks; `$ ` may stand before a command.
CODE = re.compile(r"```.*?^\s*```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(
    r"(?:^|[`&;|(]|[A-Z_]+=\S+ )\s*(?:\$ )?(tmm-cache|tmm)(?![\w.-])((?: [^`\n#|;&)]+)?)",
    re.MULTILINE,
)
#: Modules whose names scripts may use.
OWN = ("tmm_core", "tmm_base", "tmm_cache", "tmm_triton", "tmm_blas")
PARSERS = {"tmm": tmm_cli._parser(), "tmm-cache": tmm_cache_cli._parser()}


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [action] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(action.choices)


def named(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command that a page's code names, with its words."""
    for block in CODE.findall(text.replace("\\\n", " ")):
        for program, rest in COMMAND.findall(block):
            yield program, rest.split()


def unknown(program: str, words: list[str]) -> str | None:
    """The first word that the command does not know; None if it knows all."""
    parser = PARSERS[program]
    words = [word.strip(",.:") for word in words]
    if words[:1] == ["--cache-dir"]:
        del words[:2]
    options = {*parser._option_string_actions}
    if words and re.fullmatch("[a-z][a-z-]*", words[0]):
        if words[0] not in subparsers(parser):
            return words[0]
        options = {*subparsers(parser)[words.pop(0)]._option_string_actions}
    used = [word.partition("=")[0] for word in words if word.startswith("--")]
    return next((option for option in used if option not in options), None)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_names_exists(page: str) -> None:
    found = list(named((ROOT / page).read_text("utf-8")))
    wrong = [(program, words) for program, words in found if unknown(program, words)]
    assert not wrong


def test_every_command_that_a_message_or_docstring_names_exists() -> None:
    found = [
        (path.name, program, words)
        for path in SOURCES
        for span in re.findall(r"`(tmm(?:-cache)? [^`{\n]+)`", path.read_text("utf-8"))
        for program, words in named(f"`{span}`")
    ]
    assert len(found) > 10
    assert not [each for each in found if unknown(*each[1:])]


def test_every_environment_variable_has_a_row_in_the_table_of_settings() -> None:
    read = {name for p in SOURCES for name in re.findall(r"\bTMM_[A-Z_]+", p.read_text("utf-8"))}
    page = (ROOT / "docs/models.md").read_text("utf-8")
    rows = re.findall(r"^\| `TMM_.*", page, re.MULTILINE)
    assert read == {name for row in rows for name in re.findall(r"TMM_[A-Z_]+", row)}


def test_commands_are_found_in_pages() -> None:
    """A pattern that matches nothing would pass every page."""
    found = [each for page in PAGES for each in named((ROOT / page).read_text("utf-8"))]
    assert len(found) > 60
    used = {(program, words[0]) for program, words in found if words}
    assert {("tmm", name) for name in subparsers(PARSERS["tmm"])} <= used
    assert {("tmm-cache", "freeze"), ("tmm-cache", "--cache-dir")} <= used


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("see `tmm why`", "why"),
        ("`tmm tune --shapes 1x1x1`", "--shapes"),
        ("```sh\ncd x && TMM_KERNEL=blas tmm verfy   # all\n```", "verfy"),
        ("`tmm-cache --cache-dir x shwo`", "shwo"),
        ("`tmm-cache --cache-dir x show --json`", None),
        ("run `tmm tune --misses`, or", None),
        ("`tmm-cache clear --older-then 30d`", "--older-then"),
        ("`tmm explain 4096x4096x4096 --why`", None),
        ("`tmm`", None),
        ("`tmm-cache show RECORD`", None),
        ("`tmm bench --kernel a --sweep GROUP_M=1,2 \\\n  --sqares 1`", "--sqares"),
    ],
)
def test_a_name_that_does_not_exist_is_reported(text: str, wrong: str | None) -> None:
    [(program, words)] = named(text)
    assert unknown(program, words) == wrong


@pytest.mark.parametrize("program", PARSERS)
def test_every_option_has_a_help_text(program: str) -> None:
    commands = subparsers(PARSERS[program])
    for name, parser in {"": PARSERS[program], **commands}.items():
        for action in parser._actions:
            if not isinstance(action, argparse._SubParsersAction):
                assert action.help, (name, action.dest)


def member(module: ModuleType, name: str) -> object:
    """A module's attribute or submodule of this name; None if there is none."""
    found = getattr(module, name, None)
    if found is None and hasattr(module, "__path__"):
        with suppress(ModuleNotFoundError):
            found = importlib.import_module(f"{module.__name__}.{name}")
    return found


def missing(tree: ast.AST) -> list[str]:
    """The missing names that a script imports from tmm's modules, or reads of them."""
    found, modules = [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.startswith(OWN):
                    module = importlib.import_module(each.name)
                    top = importlib.import_module(each.name.partition(".")[0])
                    modules[each.asname or top.__name__] = module if each.asname else top
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OWN):
            module = importlib.import_module(str(node.module))
            for each in node.names:
                if (value := member(module, each.name)) is None:
                    found.append(each.name)
                if isinstance(value, ModuleType):
                    modules[each.asname or each.name] = value

    def module_of(node: ast.expr) -> ModuleType | None:
        if isinstance(node, ast.Name):
            return modules.get(node.id)
        of = module_of(node.value) if isinstance(node, ast.Attribute) else None
        value = None if of is None else getattr(of, node.attr, None)  # type: ignore[attr-defined]
        return value if isinstance(value, ModuleType) else None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (of := module_of(node.value)) is not None:
            found += [] if hasattr(of, node.attr) else [ast.unparse(node)]
    return found


def test_every_name_of_tmm_that_a_script_uses_exists() -> None:
    """Tests run few of the scripts."""
    pytest.importorskip("triton")
    scripts = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert len(scripts) > 30
    for path in scripts:
        assert not missing(ast.parse(path.read_text("utf-8"))), path.name


def test_the_page_of_benchmarks_names_every_script() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    for path in (ROOT / "benchmarks").glob("*.py"):
        if "__main__" in path.read_text("utf-8"):
            assert re.search(rf"[`/]{path.stem}\b", page), path.name


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("from tmm_core.interop import aten as a\na.enable; a.no", ["a.no"]),
        ("import tmm_core.nn as n\nn.convert; n.no.more", ["n.no"]),
        (
            "import tmm_core.nn\ntmm_core.nn.no, tmm_core.no, torch.no",
            ["tmm_core.nn.no", "tmm_core.no"],
        ),
        ("from tmm_core.bench import case, no", ["no"]),
    ],
)
def test_a_missing_name_is_detected(text: str, names: list[str]) -> None:
    assert missing(ast.parse(text)) == names
