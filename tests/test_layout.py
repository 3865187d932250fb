"""What a person gets who installs this, and which way imports point."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "tmm_core": ROOT / "tmm_core",
    "tmm_cache": ROOT / "cache" / "tmm_cache",
    "tmm_triton": ROOT / "plugins" / "tmm_triton",
    "tmm_blas": ROOT / "plugins" / "tmm_blas",
}
#: What each package may import besides the standard library and itself.
ALLOWED = {
    "tmm_cache": {"platformdirs", "rich"},
    "tmm_core": {"torch", "pluggy", "tmm_cache", "rich"},
    "tmm_triton": {"torch", "triton", "tmm_core"},
    "tmm_blas": {"torch", "tmm_core"},
}
#: Parts of core that are never imported by ``import tmm_core`` may need more.
EXTRA = {
    "tmm_core/triton": {"triton"},
    "tmm_core/testing": {"triton", "pytest", "numpy"},
    "tmm_core/bench": {"triton", "matplotlib"},
}


def imports(path: Path) -> set[str]:
    """Absolute module names imported anywhere in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    files = list(PACKAGES[package].rglob("*.py"))
    assert files
    for path in files:
        place = path.relative_to(ROOT).as_posix()
        allowed = ALLOWED[package] | {package}
        for folder, more in EXTRA.items():
            if place.startswith(folder):
                allowed |= more
        tops = {name.partition(".")[0] for name in imports(path)}
        strangers = tops - allowed - set(sys.stdlib_module_names)
        assert not strangers, f"{place} imports {sorted(strangers)}"


#: ``tmm_core`` itself, and what it publishes for authors of kernels and their tests.
PUBLIC = {"tmm_core", "tmm_core.triton", "tmm_core.testing"}


@pytest.mark.parametrize("package", ["tmm_triton", "tmm_blas"])
def test_plugins_use_cores_public_names_only(package: str) -> None:
    for path in PACKAGES[package].rglob("*.py"):
        used = {name for name in imports(path) if name.partition(".")[0] == "tmm_core"}
        assert used <= PUBLIC, f"{path.name} imports {sorted(used - PUBLIC)}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_installs_four_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == set(PACKAGES)
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_declares_commands_and_plugins(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        text = archive.read(path).decode()
    for line in (
        "tmm = tmm_core.cli:main",
        "tmm-cache = tmm_cache.cli:main",
        "blas = tmm_blas.plugin",
        "triton = tmm_triton.plugin",
    ):
        assert line in text


FIND = """
import importlib.util, sys
sys.path = [entry for entry in sys.path if entry]
names = ("plugins", "cache", "tests", "benchmarks")
print([name for name in names if importlib.util.find_spec(name)])
"""


def test_an_editable_install_leaks_no_folder() -> None:
    found = subprocess.run(
        [sys.executable, "-c", FIND], capture_output=True, text=True, check=True, cwd="/"
    )
    assert found.stdout.strip() == "[]"
