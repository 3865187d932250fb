"""Copies files that the pages link to outside docs/ (results, notes, examples) to the site; the
README is its first page.

In a checkout the links point at those files. The site has copies under the same names, and each
link is rewritten to its target's place on the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ("benchmarks", "examples", "plugins")
_FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")
_SUFFIXES = (".md", ".png", ".txt", ".json", ".jsonl", ".py", ".toml")
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    found = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*")]
    for path in (*(ROOT / name for name in _FILES), *found):
        if path.is_file() and path.suffix in _SUFFIXES and "__pycache__" not in path.parts:
            files.append(File.generated(config, _on_site(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    path = Path(page.file.abs_src_path)

    def turned(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(path.parent / link[1]))
        if not target.exists() or not target.is_relative_to(ROOT):
            return link[0]
        there = os.path.relpath(_on_site(target), Path(_on_site(path)).parent)
        return f"]({there}{link[2] or ''})"

    return _LINK.sub(turned, markdown)


def _on_site(path: Path) -> str:
    if path in (ROOT, ROOT / "README.md"):
        return "index.md"
    if path.is_dir() and (path / "README.md").exists():
        path = path / "README.md"
    name = path.relative_to(ROOT).as_posix().removeprefix("docs/")
    # A README would become the index of plugins/, which also holds pages from docs/.
    return name.replace("plugins/README.md", "plugins/builtin.md")
