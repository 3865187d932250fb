"""`tmm new-plugin` writes a package that builds, installs, is listed and conforms."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tmm_core.tools.cli import main


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=cwd, env={**os.environ, **environment},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", "fast-gemm"]) == 0
    assert "cd fast-gemm" in capsys.readouterr().out
    return tmp_path / "fast-gemm"


@pytest.mark.slow
def test_the_package_builds_installs_is_listed_and_conforms(package: Path, tmp_path: Path) -> None:
    # A search for the module pip makes setuptools use Python's own distutils. torch's compiler then
    # fails in this process.
    if not any(importlib.metadata.distributions(name="pip")):
        pytest.skip("pip is not installed")
    pytest.importorskip("hatchling")
    site = tmp_path / "site"
    offline = ("--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check")
    run("pip", "install", "--quiet", *offline, "--target", site, package, cwd=tmp_path)
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    # All of its suite takes 20 s of CPU; these are all files, the first dtypes and the claims.
    chosen = "Elu or by_name or registers or serves or (sizes and (37x or bfloat16)) or epilogues"
    suite = run(
        "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-k", chosen,
        cwd=package, PYTHONPATH=path,
    )  # fmt: skip
    passed = re.search(r"(\d+) passed", suite)
    assert passed is not None
    assert int(passed[1]) > 40, suite
    assert "failed" not in suite


def test_the_package_has_all_its_files_and_lints(package: Path) -> None:
    files = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    modules = ("__init__", "plugin", "kernel", "epilogue")
    assert files == {
        *(".gitignore", ".github/workflows/test.yml", "README.md", "pyproject.toml"),
        *(f"fast_gemm/{name}.py" for name in modules),
        "fast_gemm/py.typed",
        *(f"tests/{name}.py" for name in ("conftest", "test_kernel", "test_epilogue")),
    }
    for name in files:
        assert not re.search(r"@\w+@", (package / name).read_text(encoding="utf-8")), name
    if importlib.util.find_spec("ruff") is None:
        pytest.skip("ruff is not installed")
    run("ruff", "check", "--select", "E,F,W,I,UP,B", "--line-length", "100", ".", cwd=package)
    run("ruff", "format", "--check", "--line-length", "100", ".", cwd=package)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("1st", "name: found '1st', accepted is a package's name"),
        ("a b", "name: found 'a b'"),
        ("class", "name: 'class' is a module's name already"),
        ("tmm-core", "name: 'tmm_core' is a module's name already"),
        ("json", "name: 'json' is a module's name already"),
        ("taken", "taken exists already and is not an empty folder"),
    ],
)
def test_an_impossible_name_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file")
    assert main(["new-plugin", name]) == 2
    assert complaint in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
