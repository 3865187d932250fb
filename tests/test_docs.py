"""The pages under docs/ are run as they stand: what they show works, on a CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("train", "serve", "shard", "grouped")

#: torch.compile's default backend wants a C++ compiler, which is no part of what is shown.
COMPILE = """import functools

import torch

torch.compile = functools.partial(torch.compile, backend="aot_eager")
"""


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of each block, in order."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_works(page: str, tmp_path: Path) -> None:
    """Python blocks as one program, except one that names itself, which becomes a file; then
    the commands, in order, in a folder with the examples."""
    found = blocks(page)
    files = [text for language, text in found if text.startswith("# ")]
    program = [text for language, text in found if language == "python" and text not in files]
    commands = [text for language, text in found if language == "sh"]
    assert len(files) + len(program) + len(commands) == len(found)
    for text in files:
        (tmp_path / text.split()[1]).write_text(text, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    # torch's script may be installed in another environment than this one, or nowhere on PATH.
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

    if program:
        run(sys.executable, "-W", "error", "-c", COMPILE + "\n".join(program))
    for text in commands:
        run("bash", "-euo", "pipefail", "-c", text)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_linked_and_links_to_what_there_is(page: str) -> None:
    assert f"(docs/{page}.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    path = ROOT / "docs" / f"{page}.md"
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (path.parent / target).exists(), target
    assert len(text.splitlines()) < 130
