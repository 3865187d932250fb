"""Whether what would be released works: build, metadata, size, licence, and the quick tests against
the wheel alone in a fresh environment.

The environment uses the dependencies of this one, but nothing of this tree: the tests come from the
source distribution. Nothing is uploaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: Maximum bytes of a file. The wheel compresses its records: 1,300 of them take 1.5 MB.
MOST = {".whl": 3_000_000, ".gz": 6_000_000}
QUICK = ("core/test_api.py", "core/test_plan.py", "cache/test_cache_store.py")


def run(*command: str | Path, **more: object) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, **more)  # type: ignore[call-overload]


def built(folder: Path) -> tuple[Path, Path]:
    """The source distribution, and the wheel that is built from it."""
    run(sys.executable, "-m", "build", "--no-isolation", "-o", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    with tarfile.open(sdist) as archive:
        of_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        of_wheel = set(archive.namelist())
        records = [i for i in archive.infolist() if "/records/" in i.filename]
    for name in ("LICENSE", "CHANGELOG.md", "README.md", "pyproject.toml", "tests/conftest.py"):
        assert name in of_sdist, f"{name} is not in {sdist.name}"
    licences = [n for n in of_wheel if n.endswith(".dist-info/licenses/LICENSE")]
    assert licences, "the wheel has no licence"
    assert "tmm_core/py.typed" in of_wheel, "the wheel has no py.typed"
    tops = {name.partition("/")[0] for name in of_wheel}
    strange = {n for n in tops if not n.endswith(".dist-info")}
    assert strange == {"tmm_core", "tmm_triton", "tmm_blas", "tmm_base", "tmm_cache"}, strange
    compiled = [n for n in of_wheel | of_sdist if n.endswith((".pyc", ".so"))]
    assert not compiled, compiled
    assert records, "the wheel ships no records"
    packed, plain = (sum(getattr(i, a) for i in records) for a in ("compress_size", "file_size"))
    print(f"records: {len(records)} files, {plain:,} bytes, {packed:,} in the wheel")
    for file in (sdist, wheel):
        size = file.stat().st_size
        print(f"{file.name}: {size:,} bytes")
        assert size <= MOST[file.suffix], f"more than {MOST[file.suffix]:,} bytes"


def check_changelog(wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"## [{version}]" in text or "## [Unreleased]" in text, f"no entry for {version}"


def environment(folder: Path, wheel: Path) -> Path:
    """An environment of the wheel and of what it requires; its Python."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps",
        "--no-index", wheel)  # fmt: skip
    paths = (p for p in sys.path if p.endswith(("site-packages", "dist-packages")))
    lib = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # Python searches folders that a .pth file names, but does not read the .pth files in them, one
    # of which makes this tree importable.
    (lib / "dependencies.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n")
    return python


def check_tests(sdist: Path, python: Path, folder: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (top,) = folder.iterdir()
    shutil.move(top / "tests", folder / "tests")
    shutil.copy(top / "pyproject.toml", folder)  # pytest's settings
    shutil.rmtree(top)  # only the wheel can be imported
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TMM_"))}
    where = "import tmm_core, tmm_cache, tmm_triton; print(tmm_core.__file__)"
    found = subprocess.run(
        [python, "-c", where], cwd=folder, env=variables, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert Path(found).is_relative_to(python.parent.parent), found
    for command in ("tmm", "tmm-cache"):
        run(python.with_name(command), "--version", cwd=folder, env=variables)
    tests = [f"tests/{name}" for name in QUICK]
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=folder, env=variables)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sdist, wheel = built(folder / "dist")
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
        check_contents(sdist, wheel)
        check_changelog(wheel)
        (folder / "tests").mkdir()
        check_tests(sdist, environment(folder / "venv", wheel), folder / "tests")
    print("ready to release")


if __name__ == "__main__":
    main()
