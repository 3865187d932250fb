"""All code of the README and of the pages under docs/ runs as it stands, on a CPU."""

from __future__ import annotations

import doctest
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

ROOT = Path(__file__).parent.parent
#: Pages whose code is run. The pages of a row share a process, which costs 3 s, but no names.
RUN = (
    ("README.md", "docs/models.md", "docs/grouped.md", "docs/plugins/hello.md"),
    ("docs/records.md",),
    ("docs/train.md",),
    ("docs/transformers.md",),
    ("docs/serve.md",),
    ("docs/shard.md",),
    ("docs/enable.md", "docs/compile.md"),
)
#: Pages with their own tests: tests/test_learn.py and tests/plugins/test_readme.py.
ELSEWHERE = ("docs/learn.md", "docs/plugins/reference.md")
#: A command of docs/shard.md that tests/core/test_distributed.py runs as it stands.
EXAMPLE = "examples/tensor_parallel_swiglu.py"
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
NOTES = "docs/notes/"

#: torch.compile's default backend needs a C++ compiler, which the pages do not require.
COMPILE = """import functools

import torch

torch.compile = functools.partial(torch.compile, backend="aot_eager")
"""
#: Each page is a module of its own, so that a page that uses another page's names fails.
MODULES = """
import sys
import types

for page, code in zip(sys.argv[1::2], sys.argv[2::2]):
    module = sys.modules[page] = types.ModuleType(page)
    exec(compile(code, page, "exec"), vars(module))
"""


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of each block with a language, in order; others are not run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


SOURCES = sorted(
    path for folder in ("tmm_core", "cache", "plugins") for path in (ROOT / folder).rglob("*.py")
)
#: Modules whose docstrings have examples that are not skipped.
EXAMPLES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    .removeprefix("plugins.")
    .removeprefix("cache.")
    .removesuffix(".__init__")
    for path in SOURCES
    if re.search(r"^ *>>> (?!.*doctest: \+SKIP)", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), extraglobs={"nn": nn})
    assert result.attempted
    assert not result.failed


@pytest.mark.slow
@pytest.mark.parametrize("pages", RUN, ids=lambda pages: Path(pages[0]).stem)
def test_code_and_commands_of_a_page_work(pages: tuple[str, ...], tmp_path: Path) -> None:
    """The Python blocks of a page run as one module, then the commands of all, in a folder with the
    examples. A Python block that begins with its file's name becomes this file instead."""
    found = [(page, *block) for page in pages for block in blocks(page)]
    files = [text for _, _, text in found if text.startswith("# ")]
    commands = [text for _, language, text in found if language == "sh"]
    modules: dict[str, list[str]] = {}
    for page, language, text in found:
        if language == "python" and text not in files:
            modules.setdefault(f"page_{Path(page).stem}", []).append(text)
    assert len(files) + sum(map(len, modules.values())) + len(commands) == len(found)
    for text in files:
        (tmp_path / text.split()[1]).write_text(text, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    # The script torchrun may belong to another environment, or not be on PATH.
    scripts = tmp_path / "bin"
    scripts.mkdir()
    torchrun = scripts / "torchrun"
    torchrun.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n', encoding="utf-8"
    )
    torchrun.chmod(0o755)
    path = [str(scripts), str(Path(sys.executable).parent), os.environ["PATH"]]
    environ = {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "0",
        "TMM_CACHE_DIR": str(tmp_path / "cache"),
    }

    def run(*command: str) -> None:
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, "\n".join([*command, done.stdout, done.stderr])

    if modules:
        named = [part for page, texts in modules.items() for part in (page, "\n".join(texts))]
        run(sys.executable, "-W", "error", "-c", COMPILE + MODULES, *named)
    for text in commands:
        if EXAMPLE in text:
            continue
        run("bash", "-euo", "pipefail", "-c", text)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "plugins/README.md", *PAGES])
def test_links_of_a_page_have_targets(page: str) -> None:
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", *PAGES])
def test_an_empty_line_precedes_a_list(page: str) -> None:
    """Without it the site's Markdown prints the list as one paragraph; GitHub's does not."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()
    item = re.compile(r"(-|\d+\.) ")
    for before, line in itertools.pairwise(lines):
        if item.match(line):
            assert not before or before.startswith("  ") or item.match(before), line


def test_every_page_is_in_the_readme_and_on_the_site() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    notes = (ROOT / NOTES / "index.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert f"- {page.removeprefix('docs/')}\n" in site, page
        if page.startswith(NOTES) and page != f"{NOTES}index.md":
            assert f"({page.removeprefix(NOTES)})" in notes, page
        else:
            assert page == "docs/api.md" or f"({page})" in readme, page


def test_the_readme_takes_two_screens() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 110


def test_the_list_of_run_pages_names_pages() -> None:
    named = {page for pages in RUN for page in pages} - {"README.md"}
    assert named <= set(PAGES)
    for page in PAGES:
        ran = {language for language, _ in blocks(page)} & {"python", "sh"}
        assert not ran or page in named or page in ELSEWHERE, page


@pytest.mark.slow
def test_the_site_builds_and_has_the_api(tmp_path: Path) -> None:
    for needed in ("material", "mkdocstrings"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip("make docs installs what the site needs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    api = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("matmul", "Supports", "EpilogueConformance", "convert"):
        assert re.search(rf'id="tmm_core[\w.]*\.{name}"', api), name
    assert (tmp_path / "site" / "benchmarks" / "results" / "h200" / "sweep-bfloat16.png").exists()
    # mkdocs only notes a link to a file that the site leaves out.
    for page in (tmp_path / "site").rglob("*.html"):
        for target in re.findall(r'href="(?![a-z]+:|/|#)([^"#]+)', page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page}: {target}"
