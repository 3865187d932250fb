"""Differences between Triton's releases, as far as the installed one shows them."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import CudaLauncher

from tmm_core.triton import releases


@pytest.mark.parametrize("name", list(releases._GLUON))
def test_the_installed_gluon_has_each_name(name: str) -> None:
    place, names = releases._GLUON[name]
    found = getattr(releases, name)
    assert any(found is getattr(releases._owner(place), each, None) for each in names)


def test_the_latest_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    place, (latest, earlier) = releases._GLUON["async_load"]
    gluon: Any = types.ModuleType(place)
    monkeypatch.setitem(sys.modules, place, gluon)
    monkeypatch.setattr(importlib, "import_module", lambda name: sys.modules[name])
    setattr(gluon, earlier, "before")
    assert releases.async_load == "before"
    assert not releases.views_end_with_boxes()
    setattr(gluon, latest, "now")
    assert releases.async_load == "now"
    assert releases.views_end_with_boxes()


def test_a_gluon_without_a_name_loses_only_the_kernels_that_use_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tmm_triton.hopper.warp_specialized
    from tmm_triton import plugin

    place, _ = releases._GLUON["reinterpret"]
    monkeypatch.setitem(releases._GLUON, "reinterpret", (place, ("view_of_another_kind",)))
    # The import below sets this attribute of the package, too.
    monkeypatch.setattr(tmm_triton, "hopper", tmm_triton.hopper)
    for name in [name for name in sys.modules if name.startswith("tmm_triton.hopper")]:
        monkeypatch.delitem(sys.modules, name)
    lost = plugin.load("triton.warp_specialized")
    assert isinstance(lost, plugin.Missing)
    assert "has no view_of_another_kind" in lost.reason
    assert not isinstance(plugin.load("triton.persistent"), plugin.Missing)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'gather'"):
        releases.gather  # noqa: B018  # looking it up is the test


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("set_to", "fused"), [(None, True), ("1", True), ("0", False)])
def test_products_and_sums_are_fused_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, set_to: str | None, fused: bool
) -> None:
    """The options give no warning about later releases."""
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    if set_to is not None:
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", set_to)
    options = releases.options_for({"num_warps": 8})
    parsed = CUDABackend(GPUTarget("cuda", 90, 32)).parse_options(options)
    assert (parsed.num_warps, parsed.enable_fp_fusion) == (8, fused)


def test_an_option_given_for_a_kernel_is_kept() -> None:
    assert releases.options_for({"enable_fp_fusion": False}) == {"enable_fp_fusion": False}


#: A module like Triton 3.6's launchers: the same name for all, and ``launch`` differs.
LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, NULL}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "__triton_launcher", NULL, -1, methods};
PyMODINIT_FUNC PyInit___triton_launcher(void) { return PyModule_Create(&module); }
"""


@pytest.fixture
def launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two files, and a Triton with a launcher for each signature."""
    from triton.backends.nvidia import driver
    from triton.runtime import build

    paths = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "launcher.c").write_text(LAUNCHER % number)
        built = build._build(
            "__triton_launcher", str(folder / "launcher.c"), str(folder), [], [], [], []
        )
        paths.append(str(built))
    monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    load = inspect.unwrap(build._load_module_from_path)  # a kernel may have been launched before
    monkeypatch.setattr(build, "_load_module_from_path", load)
    before = set(sys.modules)
    releases.load_launchers_apart.cache_clear()
    yield paths
    releases.load_launchers_apart.cache_clear()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_launcher_is_not_replaced_by_one_that_is_loaded_later(launchers: list[str]) -> None:
    """Both are loaded again before ``launch`` is read, as by two threads."""
    from triton.runtime import build

    def launched() -> list[int]:
        for _ in range(2):
            modules = [
                build._load_module_from_path("__triton_launcher", path) for path in launchers
            ]
        return [module.launch() for module in modules]

    assert launched() == [2, 2]  # as CPython loads them
    releases.load_launchers_apart(CudaLauncher)
    assert launched() == [1, 2]


def test_a_triton_with_one_launcher_stays_as_it_is(
    launchers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.nvidia import driver
    from triton.runtime import build

    monkeypatch.delattr(driver, "make_launcher")
    before = build._load_module_from_path
    releases.load_launchers_apart(CudaLauncher)
    assert build._load_module_from_path is before


@pytest.mark.parametrize(
    ("parameters", "known"),
    [
        ("gridX, gridY, gridZ, stream, function, *args", True),
        (
            "gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, "
            "launch_enter_hook, launch_exit_hook, *args",
            True,
        ),
        ("gridX, gridY, gridZ, stream, *args", False),  # what is the function?
        ("gridX, gridY, gridZ, function, stream, *args", False),
        ("gridX, gridY, gridZ, stream, function, mode, *args", False),
        ("gridX, gridY, gridZ, stream, function", False),  # nor the kernel's arguments
        ("gridX, gridY, gridZ, stream, function, **args", False),
        ("gridX, gridY, gridZ, stream, function, *, args", False),
        ("gridX, gridY, gridZ, stream, function, *args, mode", False),
    ],
)
def test_a_launcher_with_other_arguments_is_not_called(parameters: str, known: bool) -> None:
    """Its arguments would arrive in others' places."""
    made: dict[str, Any] = {}
    exec(f"def call(self, {parameters}): pass", made)
    assert releases.called_as_known(type("Launcher", (), {"__call__": made["call"]})) is known
    assert not releases.called_as_known(type("Uncallable", (), {}))
