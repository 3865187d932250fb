"""BLAS belongs to the core: it answers with any set of plugins, and without any metadata."""

from __future__ import annotations

import importlib.metadata
import os
import pkgutil
import runpy
import subprocess
import sys
import types
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeKernel, plugin
from tmm_base.pyinstaller import hook_dirs

import tmm_core
from tmm_core import TmmWarning, dispatch
from tmm_core.registry.registry import Registry
from tmm_core.tools import cli

ROOT = Path(__file__).parents[2]
PACKAGES = ("tmm_core", "cache/tmm_base", "cache/tmm_cache", "plugins/tmm_blas")
X = torch.randn(8, 8)

#: Run where ``sys.argv[1]`` holds the packages and no distribution's metadata can be read.
PROGRAM = """
import importlib.metadata, sys, warnings
warnings.simplefilter("error")
importlib.metadata.MetadataPathFinder.find_distributions = classmethod(lambda *_: [])
sys.path.insert(0, sys.argv[1])
sys.frozen = len(sys.argv) > 2
import torch, tmm_blas, tmm_core
from tmm_core.nn import Linear

assert tmm_core.__file__.startswith(sys.argv[1]), tmm_core.__file__
x = torch.randn(64, 64)
wanted = torch.nn.functional.silu(x @ x)
assert torch.allclose(tmm_core.matmul(x, x, epilogue="silu"), wanted, atol=1e-4)
assert [kernel.name for kernel in tmm_core.kernels()] == ["blas"]
assert "blas" in str(tmm_core.explain(x, x))
tripled = tmm_core.Epilogue("tripled", lambda z: z * 3)
assert torch.allclose(tmm_core.matmul(x, x, epilogue=tripled), 3 * (x @ x), atol=1e-3)
y = x.clone().requires_grad_()
tmm_core.matmul(x, y, epilogue="relu").sum().backward()
assert y.grad is not None
offs = torch.tensor([1, 3], dtype=torch.int32)
assert tmm_core.grouped_matmul(x[:3], torch.randn(2, 64, 8), offs=offs).shape == (3, 8)
assert Linear(64, 8)(x).shape == (64, 8)
tmm_core.tune(tmm_core.problem(x, x))
from tmm_core.tools import cli
assert cli.main(["doctor"]) == 0
"""


def runs(*arguments: str, **variables: str) -> None:
    environ = dict(os.environ, TRITON_INTERPRET="0", **variables)
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environ)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_it_answers_without_metadata(tmp_path: Path) -> None:
    """Packages on PYTHONPATH have no metadata, nor a path that the locale can encode."""
    folder = tmp_path / "paquets-é"
    folder.mkdir()
    for package in PACKAGES:
        (folder / Path(package).name).symlink_to(ROOT / package)
    runs(str(folder), LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")


@pytest.mark.slow
def test_it_answers_in_a_frozen_application_from_a_zip_without_sources(tmp_path: Path) -> None:
    path = tmp_path / "packages.zip"
    with zipfile.PyZipFile(str(path), "w") as archive:
        for package in PACKAGES:
            archive.writepy(str(ROOT / package))
    runs(str(path), "frozen")


def test_pyinstaller_includes_what_is_found_by_listing_folders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyInstaller's functions are replaced by some of the same purpose."""

    def submodules(package: str, on_error: str) -> list[str]:
        found = pkgutil.walk_packages(
            importlib.import_module(package).__path__, f"{package}.", onerror=lambda _: None
        )
        return [package, *(module.name for module in found)]

    hooks = types.ModuleType("PyInstaller.utils.hooks")
    vars(hooks).update(
        collect_submodules=submodules,
        collect_data_files=lambda package: [(package, "files")],
        copy_metadata=lambda name: [(name, "metadata")],
    )
    monkeypatch.setitem(sys.modules, "PyInstaller.utils.hooks", hooks)
    named = '[project.entry-points.pyinstaller40]\nhook-dirs = "tmm_base.pyinstaller:hook_dirs"\n'
    assert named in (ROOT / "pyproject.toml").read_text()
    (folder,) = hook_dirs()
    made = runpy.run_path(str(Path(folder, "hook-tmm_core.py")))
    needed = {
        f"tmm_core.epilogues.{path.stem}" for path in (ROOT / "tmm_core/epilogues").glob("*.py")
    }
    needed |= {f"tmm_core.formats.{path.stem}" for path in (ROOT / "tmm_core/formats").glob("*.py")}
    needed = {name for name in needed if not name.endswith("__init__")}
    needed |= {"tmm_blas.plugin", "tmm_triton.plugin", "tmm_cache"}
    assert needed <= set(made["hiddenimports"])
    assert set(made["datas"]) == {("tmm-core", "metadata"), ("tmm_core", "files")}
    # Triton reads the source of device functions.
    assert made["module_collection_mode"]["tmm_triton"] == "pyz+py"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TMM_PLUGINS", "fast_gemm", "TMM_PLUGINS: unknown plugin 'fast_gemm'"),
        ("TMM_PLUGINS", "trition", "unknown plugin 'trition'; did you mean 'triton'"),
        ("TMM_PLUGINS", "", None),
        ("TMM_PLUGINS", "blas", None),
        ("TMM_PLUGINS", "triton", None),
        ("TMM_DISABLE_PLUGINS", "blas", None),
        ("TMM_DISABLE_PLUGINS", "blas,triton", None),
        ("TMM_DISABLE_PLUGINS", "blass", "unknown plugin 'blass'; did you mean 'blas'"),
        ("TMM_DISABLE", "blas", None),
        ("TMM_DISABLE", "triton.skiny", "TMM_DISABLE .*'triton.skiny'; did you mean 'triton.sk"),
    ],
)
def test_it_answers_under_each_setting(
    variable: str,
    value: str,
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    if message is None:
        result = tmm_core.matmul(X, X)
    else:
        with pytest.warns(TmmWarning, match=message) as caught:
            result = tmm_core.matmul(X, X)
        assert len(caught) == 1
    assert torch.allclose(result, X @ X, atol=1e-5)
    # Silently from here on.
    assert torch.allclose(tmm_core.matmul(X[:4], X), X[:4] @ X, atol=1e-5)
    assert dispatch.default_dispatcher().registry.kernel("blas").name == "blas"


@pytest.mark.parametrize("variable", ["TMM_PLUGINS", "TMM_DISABLE_PLUGINS", "TMM_DISABLE"])
def test_several_unknown_names_are_one_warning(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "one, two")
    monkeypatch.setenv("TMM_DISABLE_PLUGINS", "three")
    with pytest.warns(TmmWarning, match="'three'") as caught:
        tmm_core.matmul(X, X)
    assert len(caught) == 1


def test_doctor_fails_on_an_unknown_plugin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMM_PLUGINS", "blas,fast_gemm")
    assert cli.main(["doctor"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "fast_gemm" in line]
    assert any(line.startswith("! ") and "unknown plugin 'fast_gemm'" in line for line in lines)
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    dispatch.default_dispatcher.cache_clear()
    assert cli.main(["doctor"]) == 0


class Entry:
    """An installed plugin, as importlib.metadata describes it."""

    def __init__(self, name: str, thing: Any, value: str = "", group: str = "tmm_core") -> None:
        self.name, self._thing, self.value, self.group = name, thing, value or name, group
        self.dist = types.SimpleNamespace(name=name, version="1")

    def load(self) -> Any:
        if isinstance(self._thing, BaseException):
            raise self._thing
        return self._thing


def listing(*entries: Any) -> Any:
    def found(group: str) -> Iterable[Any]:
        return [entry for entry in entries if entry.group == group]

    return found


def test_it_answers_with_every_plugin_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [Entry(name, ImportError("broken")) for name in ("triton", "other")]
    monkeypatch.setattr(importlib.metadata, "entry_points", listing(*broken))
    with pytest.warns(TmmWarning, match="is not used: import failed") as caught:
        assert torch.allclose(tmm_core.matmul(X, X), X @ X, atol=1e-5)
    assert len(caught) == 2  # one for each distribution


def test_it_answers_where_metadata_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(group: str) -> Any:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(importlib.metadata, "entry_points", damaged)
    with pytest.warns(TmmWarning, match="installed plugins cannot be listed: UnicodeDecodeError"):
        assert torch.allclose(tmm_core.matmul(X, X), X @ X, atol=1e-5)


def test_its_entry_point_registers_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution that repackages tmm has a second entry point."""
    from tmm_blas import plugin as of_blas

    entries = [Entry("blas", of_blas, "tmm_blas.plugin")]
    entries += [Entry("repackaged", of_blas, "tmm_blas.plugin")]
    monkeypatch.setattr(importlib.metadata, "entry_points", listing(*entries))
    registry = Registry.from_environment({})
    assert [kernel.name for kernel in registry.kernels()] == ["blas"]
    (blas,) = registry.kernels()
    assert (blas.source.plugin, blas.source.is_ours) == ("blas", True)
    assert registry.faults() == []


def test_no_plugin_may_be_named_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    class Impostor(FakeKernel):
        pass

    entries = [Entry("aaa", plugin(Impostor("blas"), FakeKernel("aaa.k")))]
    monkeypatch.setattr(importlib.metadata, "entry_points", listing(*entries))
    registry = Registry.from_environment({})
    message = "'aaa' .*is partly used: kernel 'blas' is already registered by plugin 'blas'"
    with pytest.warns(TmmWarning, match=message):
        kernels = {kernel.name: kernel.kernel for kernel in registry.kernels()}
    assert not isinstance(kernels["blas"], Impostor)
    assert set(kernels) == {"aaa.k", "blas"}
