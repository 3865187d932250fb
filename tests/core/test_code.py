"""A third party's kernel that was edited has another version, whatever was edited."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import plugin
from tmm_blas.blas import Blas
from tmm_cache import CacheStore

import tmm_core
from tmm_core.dispatch.first_use import Trust
from tmm_core.registry.deferred import Answers
from tmm_core.registry.registry import Registry
from tmm_core.settings import Settings
from tmm_core.spec import code
from tmm_core.spec.code import code_of, version_of
from tmm_core.spec.kernel import Candidate, Deferred

KERNEL = """
import functools
import json
from pathlib import Path

from tmm_blas.blas import Blas
from tmm_core import Config, Kernel

from stranger.base import Base
from stranger import helper
import stranger_more

GLOBAL = 1
class Settings:
    def __init__(self, factor): self.factor = factor
OBJECT = Settings(1)
def plus(z): return z + 0
def minus(z): return z - 0
TABLE = {"+": plus}
def make(c):
    def inner(z): return z * c
    return inner
closure = make(1)
def default(z, by=1): return z * by
def decorate(c):
    def over(function):
        @functools.wraps(function)
        def call(z): return function(z) * c
        return call
    return over
@decorate(1)
def decorated(z): return z


class Own(Base):
    name = "stranger.own"
    supports = Blas.supports
    config_type = Config
    attribute = 1

    def __init__(self): self.of_instance = 1
    def configs(self, problem): return [Config()]
    def default_config(self, problem): return Config()

    def bind(self, problem, config):
        blas = Blas().bind(problem, Blas.config_type())
        data = json.loads(Path(__file__).with_name("data.json").read_text())
        def launch(*arguments):
            z = decorated(default(closure(TABLE["+"](blas(*arguments)))))
            factor = OBJECT.factor * GLOBAL * self.attribute * self.of_instance * data["c"]
            return self.based(z * factor * helper.FACTOR * stranger_more.FACTOR)
        return launch
"""
FILES = {
    "stranger/__init__.py": "",
    "stranger/kernel.py": KERNEL,
    "stranger/base.py": "from tmm_core import Kernel\n\n"
    "class Base(Kernel):\n    def based(self, z): return z * 1\n",
    "stranger/helper.py": "FACTOR = 1\n",
    "stranger/data.json": '{"c": 1}',
    "stranger/fast.so": "\x7fELF one",
    "stranger_more.py": "FACTOR = 1\n",
}
KERNEL_FILE = "stranger/kernel.py"
#: The file, and what is edited in it.
EDITS = {
    "a table of functions": (KERNEL_FILE, '{"+": plus}', '{"+": minus}'),
    "an attribute set in __init__": (KERNEL_FILE, "self.of_instance = 1", "self.of_instance = 2"),
    "a module-level object": (KERNEL_FILE, "OBJECT = Settings(1)", "OBJECT = Settings(2)"),
    "a helper module": ("stranger/helper.py", "1", "2"),
    "a helper module beside the package": ("stranger_more.py", "1", "2"),
    "a data file": ("stranger/data.json", "1", "2"),
    "a shared library": ("stranger/fast.so", "one", "two"),
    "a default argument": (KERNEL_FILE, "by=1", "by=2"),
    "a closure cell": (KERNEL_FILE, "closure = make(1)", "closure = make(2)"),
    "a class attribute": (KERNEL_FILE, "attribute = 1", "attribute = 2"),
    "a base class": ("stranger/base.py", "z * 1", "z * 2"),
    "a global constant": (KERNEL_FILE, "GLOBAL = 1", "GLOBAL = 2"),
    "a decorator's argument": (KERNEL_FILE, "@decorate(1)", "@decorate(2)"),
}


def forget_modules() -> None:
    for name in [each for each in sys.modules if each.partition(".")[0].startswith("stranger")]:
        del sys.modules[name]
    importlib.invalidate_caches()
    code._plugins.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages with a stranger's distribution."""
    folder = tmp_path / "lib" / "site-packages"
    info = folder / "stranger-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tmm_core]\nstranger = stranger.kernel\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in FILES))
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    forget_modules()
    yield folder
    forget_modules()


def own() -> Any:
    """The kernel, imported anew."""
    forget_modules()
    return importlib.import_module("stranger.kernel").Own()


@pytest.mark.parametrize("edit", EDITS)
def test_every_edit_makes_another_version(edit: str, site: Path) -> None:
    name, old, new = EDITS[edit]
    before = own()
    found = code_of(before)
    assert found.certain
    assert code_of(own()) == found
    before.version  # noqa: B018  # it is computed once
    again = version_of(before, "7")
    text = (site / name).read_text()
    assert text.count(old) == 1
    (site / name).write_text(text.replace(old, new))
    after = own()
    assert after.version != before.version
    assert after.version == code_of(after).digest
    # An author who states a version may have forgotten to change it.
    (stated, _), (other, _) = again, version_of(after, "7")
    assert other.startswith("7+")
    assert other != stated


#: Edits of the source that the objects alone show.
IN_SOURCE = [edit for edit, (name, *_) in EDITS.items() if name == KERNEL_FILE]


@pytest.mark.parametrize("edit", IN_SOURCE)
def test_a_kernel_without_files_is_its_objects(edit: str, site: Path) -> None:
    """One from a prompt, a notebook or exec: an edit is seen, and yet nothing is certain."""

    def typed(source: str) -> Any:
        own()  # its helpers
        scope: dict[str, Any] = {"__name__": "stranger_typed"}
        exec(compile(source, "<prompt>", "exec"), scope)
        return scope["Own"]()

    _, old, new = EDITS[edit]
    one, same, other = (typed(each) for each in (KERNEL, KERNEL, KERNEL.replace(old, new)))
    assert code_of(one).digest == code_of(same).digest
    assert code_of(one).digest != code_of(other).digest
    assert not code_of(one).certain


def test_two_kernels_of_one_file_differ_by_what_they_hold(site: Path) -> None:
    one, other = own(), own()
    other.of_instance = 5
    assert one.version != other.version
    other = own()
    other.TABLE = {"+": lambda z: z}
    assert code_of(other).digest != one.version


def test_files_of_the_interpreter_and_of_editors_are_no_part(site: Path) -> None:
    before = own().version
    for name in ("__pycache__/kernel.cpython-39.pyc", ".kernel.py.swp/x"):
        (site / "stranger" / name).parent.mkdir(exist_ok=True)
        (site / "stranger" / name).write_text("anything")
    os.utime(site / KERNEL_FILE)
    assert own().version == before
    (site / "stranger" / "new_table.bin").write_text("x")
    assert own().version != before


def test_an_edit_within_one_process_is_read_again(site: Path) -> None:
    before = own().version
    kept = os.stat(site / "stranger/data.json")
    (site / "stranger/data.json").write_text('{"c": 2}')
    # As an archive restores it.
    os.utime(site / "stranger/data.json", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert own().version != before


def test_a_large_file_is_read_once(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = site / "stranger" / "fast.so"
    large.write_bytes(b"\x7fELF" + bytes(2**20))
    before = own().version
    monkeypatch.setattr(code, "_contents", {})  # as in another process
    code._notes.cache_clear()
    opened = []
    real = open

    def watched(file: Any, *arguments: Any, **more: Any) -> Any:
        opened.append(str(file))
        return real(file, *arguments, **more)

    monkeypatch.setattr("builtins.open", watched)
    assert own().version == before
    assert str(large) not in opened
    large.write_bytes(b"\x7fELE" + bytes(2**20))
    assert own().version != before


def test_the_place_of_a_package_is_no_part_of_its_version(site: Path) -> None:
    before = own().version
    forget_modules()
    moved = site.parent.parent / "other" / "site-packages"
    moved.parent.mkdir()
    site.rename(moved)
    sys.path.insert(0, str(moved))
    try:
        assert own().version == before
    finally:
        sys.path.remove(str(moved))


def test_own_kernels_keep_versions_of_the_code_that_they_reach() -> None:
    assert version_of(Blas(), Blas().version) == (Blas().version, True)


def test_it_takes_a_few_milliseconds(site: Path) -> None:
    kernel = own()
    code_of(kernel)
    start = time.perf_counter()
    for _ in range(5):
        code_of(kernel)
    assert (time.perf_counter() - start) / 5 < 0.05  # 2 ms, on a busy machine


def test_one_verification_serves_a_process_where_code_may_change_unseen(
    tmp_path: Path, site: Path
) -> None:
    kernel = own()
    store = CacheStore(tmp_path / "cache", [])
    problem = tmm_core.problem(torch.randn(4, 8), torch.randn(8, 4))

    def trusted(certain: bool) -> tuple[bool, bool]:
        registry = Registry()
        registry.register(plugin(own()), "stranger")
        asked = registry.kernel("stranger.own")
        asked.certain = certain  # type: ignore[attr-defined]
        trust, candidate = Trust(store), Candidate(asked, kernel.default_config(problem))
        before = trust.is_verified(problem, candidate)
        trust.stamp(problem, candidate)
        assert trust.is_verified(problem, candidate)
        return before, Trust(store).is_verified(problem, candidate)

    assert trusted(False) == (False, False)
    assert trusted(True) == (False, True)
    assert trusted(False) == (False, False)


def test_notes_of_a_deferred_kernel_follow_files_that_its_author_forgot(
    tmp_path: Path, site: Path
) -> None:
    loader = importlib.import_module("stranger.kernel").Own
    deferred = Deferred("stranger.own", loader, list)
    problem = tmm_core.problem(torch.randn(4, 8), torch.randn(8, 4))

    def noted() -> Any:
        return Answers({"stranger.own": deferred}, tmp_path / "cache").get(problem, Settings())

    Answers({"stranger.own": deferred}, tmp_path / "cache").add(problem, Settings(), [own()])
    assert noted()
    (site / "stranger" / "data.json").write_text('{"c": 22}')
    assert noted() is None
