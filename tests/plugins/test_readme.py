"""The page for plugin authors is a plugin: its code, installed by its entry point, works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "docs" / "plugins" / "reference.md"


def blocks(language: str) -> list[str]:
    text = README.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def install(folder: Path) -> str:
    """Write the files that pip would: the module and its metadata. Return the module's name."""
    (package,) = blocks("toml")
    name = re.search(r'^name = "(.+)"$', package, re.M)[1]  # type: ignore[index]
    version = re.search(r'^version = "(.+)"$', package, re.M)[1]  # type: ignore[index]
    points = package.partition("[project.entry-points.tmm_core]\n")[2].replace('"', "")
    module = points.partition(" = ")[2].strip()
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[tmm_core]\n{points}")
    (folder / f"{module}.py").write_text("\n\n".join(blocks("python")), encoding="utf-8")
    return module


@pytest.mark.slow
def test_the_code_of_the_page_works(tmp_path: Path) -> None:
    module = install(tmp_path)
    paths = filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    # Kernels the size of these are slower on two interpreting threads than on one.
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider",
         "-o", "addopts=", "-c", os.devnull, "--rootdir", str(tmp_path), f"{module}.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    # Most of what a kernel of one dtype and layout does not decline.
    assert passed is not None
    assert int(passed[1]) > 50, done.stdout


def test_the_page_stays_one_page() -> None:
    assert len(README.read_text(encoding="utf-8").split()) < 2700
