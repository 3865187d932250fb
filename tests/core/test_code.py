"""Editing any file of a third party's kernel changes its version."""

from __future__ import annotations

import importlib
import itertools
import os
import py_compile
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import plugin
from tmm_blas.blas import Blas
from tmm_cache import CacheStore
from tmm_cache.fields import NAME_MAX

import tmm_core
from tmm_core import PluginError, formats
from tmm_core.dispatch.first_use import FirstUse
from tmm_core.registry import registry
from tmm_core.registry.query import CheckedKernel
from tmm_core.registry.registry import Registry, Source
from tmm_core.spec import code
from tmm_core.spec.code import format_code, version_of
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.operand import Operand

KERNEL = """
import functools
import json
from pathlib import Path

from tmm_blas.blas import Blas
from tmm_core import Config, Kernel

from stranger.base import Base
from stranger import helper

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
            return self.based(z * factor * helper.FACTOR)
        return launch
"""
FILES = {
    "stranger/__init__.py": "",
    "stranger/kernel.py": KERNEL,
    "stranger/base.py": "from tmm_core import Kernel\n\n"
    "class Base(Kernel):\n    def based(self, z): return z * 1\n",
    "stranger/helper.py": "FACTOR = 1\n",
    "stranger/data.json": '{"c": 1}',
    "stranger/data.jsonc": "1",  # not what data.json was compiled to
    "stranger/fast.so": "\x7fELF one",
}
KERNEL_FILE = "stranger/kernel.py"
#: The file, and its edit.
EDITS = {
    "a table of functions": (KERNEL_FILE, '{"+": plus}', '{"+": minus}'),
    "an attribute set in __init__": (KERNEL_FILE, "self.of_instance = 1", "self.of_instance = 2"),
    "a module-level object": (KERNEL_FILE, "OBJECT = Settings(1)", "OBJECT = Settings(2)"),
    "a helper module": ("stranger/helper.py", "1", "2"),
    "a data file": ("stranger/data.json", "1", "2"),
    "a file named by another and a c": ("stranger/data.jsonc", "1", "2"),
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


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages with a third-party distribution."""
    folder = tmp_path / "lib" / "site-packages"
    info = folder / "stranger-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tmm_core]\nstranger = stranger.kernel\n")
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
    assert own().version == before.version
    stated = version_of(before, "7")
    text = (site / name).read_text()
    assert text.count(old) == 1
    (site / name).write_text(text.replace(old, new))
    after = own()
    assert after.version != before.version
    # An author who states a version may have forgotten to change it.
    other = version_of(after, "7")
    assert other.startswith("7+")
    assert other != stated


def test_a_base_class_in_another_package_counts(site: Path) -> None:
    (site / "stranger_base").mkdir()
    (site / "stranger_base/__init__.py").write_text(FILES["stranger/base.py"])
    text = KERNEL.replace("from stranger.base import", "from stranger_base import")
    (site / KERNEL_FILE).write_text(text)
    before = own().version
    (site / "stranger_base/more.py").write_text("")
    assert own().version != before


def typed(source: str, name: str = "stranger_typed") -> Any:
    """The kernel as from a prompt, a notebook or ``exec``."""
    own()  # its helpers
    scope: dict[str, Any] = {"__name__": name}
    exec(compile(source, "<prompt>", "exec"), scope)
    return scope["Own"]()


@pytest.mark.parametrize("name", ["stranger_typed", "stranger.kernel", "__main__"])
def test_a_kernel_without_files_has_a_version_of_its_class(name: str, site: Path) -> None:
    """An edited cell defines a class anew, so the versions differ. Processes share none."""
    one, other = typed(KERNEL, name), typed(KERNEL, name)
    assert one.version != other.version
    assert one.version == type(one)().version
    assert typed(KERNEL, name).version != own().version


FORMAT = """
from dataclasses import replace
from tmm_core import hookimpl
from tmm_core.formats import FORMATS
def dequantize(codes): return FORMATS["int8"].dequantize(codes)
FORMAT = replace(FORMATS["int8"], name="stranger8", implied=False, dequantize=dequantize)
@hookimpl
def tmm_formats(): return [FORMAT]
"""


def key_of_format(site: Path, source: str) -> dict[str, Any]:
    """The part of a record's key about an operand of the plugin's format, in a new process."""
    forget_modules()
    (site / "stranger/form.py").write_text(source)
    module = importlib.import_module("stranger.form")
    Registry().register(module, "stranger")
    try:
        return Operand.of(torch.empty(2, 2, dtype=torch.int8), format="stranger8").to_json()
    finally:
        formats.remove(module.FORMAT)


def test_an_edited_format_has_other_records(site: Path) -> None:
    """Kernels were verified for the former one."""
    before = key_of_format(site, FORMAT)
    assert key_of_format(site, FORMAT) == before
    for old, new in (("return FORMATS", "return 2 * FORMATS"), ("implied=", "origin=1, implied=")):
        assert key_of_format(site, FORMAT.replace(old, new)) != before
    int8 = torch.empty(2, 2, dtype=torch.int8)
    assert before["code"]
    assert "code" not in Operand.of(int8, format="int8").to_json()


def test_a_device_function_of_a_format_counts_wherever_it_is(site: Path) -> None:
    (site / "stranger_device").mkdir()
    device = "import triton\n@triton.jit\ndef decode(block, dtype):\n    return block.to(dtype)\n"
    (site / "stranger_device/__init__.py").write_text(device)
    source = "from stranger_device import decode" + FORMAT.replace(
        "dequantize=dequantize)", "dequantize=dequantize, decode=decode)"
    )
    before = key_of_format(site, source)
    (site / "stranger_device/__init__.py").write_text(device.replace("block.to", "(-block).to"))
    assert key_of_format(site, source) != before


def test_a_format_whose_code_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(form: Any) -> str:
        raise ValueError("no code")

    monkeypatch.setattr(registry, "format_code", fails)
    form = replace(formats.named("int8"), name="unread8", implied=False)
    with pytest.raises(PluginError, match="no code"):
        Registry()._add_format(form, Source("p"))
    assert "unread8" not in formats.FORMATS


def test_a_formats_fields_count_where_its_functions_are_tmms() -> None:
    form = formats.named("int8")
    assert format_code(form) == format_code(replace(form))
    assert format_code(form) != format_code(replace(form, origin=1.0))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads
def test_forked_children_have_separate_identities(site: Path) -> None:
    """Each child's kernel would pass for the one that another child verified."""

    def identities() -> str:
        number = os.getpid()
        form = replace(formats.named("int8"), dequantize=eval("lambda codes: codes", {}))
        epilogue = tmm_core.Epilogue("f", lambda z: z * number)
        return f"{typed(KERNEL).version} {epilogue.key} {format_code(form)}"

    found = [identities().split()]
    for _ in range(2):
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.write(writer, identities().encode())
            os._exit(0)
        os.close(writer)
        assert os.waitpid(child, 0)[1] == 0
        with open(reader) as pipe:
            found.append(pipe.read().split())
    assert len({*itertools.chain(*found)}) == 9


def test_a_script_is_not_the_file_of_an_interactive_session(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Editors run cells of a script under a name of their own."""
    own()  # its helpers
    script = types.ModuleType("__main__")
    script.__file__ = str(site / KERNEL_FILE)
    monkeypatch.setitem(sys.modules, "__main__", script)

    def cell(source: str) -> str:
        exec(compile(source, "/tmp/ipykernel_1/2.py", "exec"), vars(script))
        return str(script.Own().version)

    assert cell(KERNEL) == cell(KERNEL)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert cell(KERNEL) != cell(KERNEL.replace("GLOBAL = 1", "GLOBAL = 2"))


@pytest.mark.parametrize(
    ("command", "spec", "whole"),
    [
        ("python kernel.py", None, False),
        ("python -m kernel", ModuleSpec("kernel", None), False),
        ("python -m stranger.kernel", ModuleSpec("stranger.kernel", None), True),
    ],
)
def test_files_of_the_program_that_runs(
    command: str, spec: Any, whole: bool, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of its package count if it was started as a part of one."""
    own()  # imports the package
    program = types.ModuleType("__main__")
    program.__file__, program.__spec__ = str(site / KERNEL_FILE), spec
    monkeypatch.setitem(sys.modules, "__main__", program)
    found = [code.package_digest("__main__")]
    for file in (KERNEL_FILE, "stranger/helper.py"):
        (site / file).write_text(f"{FILES[file]}\nMORE = 1\n")
        found.append(code.package_digest("__main__"))
    assert found[0] is not None
    assert found[0] != found[1]
    assert (found[1] != found[2]) is whole


PROGRAM = """
import sys
from stranger.kernel import Own
class Typed(Own): pass
print(Own().version)
exec("class Typed(Own):\\n    def bind(self, problem, config): pass")
print(Typed().version)
"""


@pytest.mark.slow
def test_only_a_kernel_with_files_has_one_version_in_all_processes(site: Path) -> None:
    outputs = []
    for seed in ("1", "2"):
        path = os.pathsep.join([str(site), *sys.path])
        environment = {"PYTHONHASHSEED": seed, "PATH": "", "PYTHONPATH": path}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        outputs.append(done.stdout.split())
    (one, typed_one), (other, typed_other) = outputs
    assert one == other
    assert typed_one != typed_other


@pytest.mark.parametrize("folder", ["", "stranger_namespace/"])
def test_a_single_module_is_its_file(folder: str, site: Path) -> None:
    """Several distributions may share a namespace package, but its other files count for a module
    in it."""
    (site / "stranger_namespace").mkdir()
    name = f"{folder}stranger_alone"
    source = KERNEL.replace("stranger.base", "stranger_base").replace("from stranger import", "#")
    (site / "stranger_base.py").write_text(FILES["stranger/base.py"])
    (site / f"{name}.py").write_text(source)

    def version() -> Any:
        forget_modules()
        return importlib.import_module(name.replace("/", ".")).Own().version

    before = version()
    (site / "stranger" / "helper.py").write_text("FACTOR = 3")
    assert version() == before
    (site / f"{folder}stranger_beside.py").write_text("FACTOR = 3")
    assert (version() != before) is bool(folder)
    (site / f"{name}.py").write_text(source.replace("GLOBAL = 1", "GLOBAL = 2"))
    assert version() != before


MADE = """
import types
from tmm_core import Config, Kernel
from stranger import helper

def fill(names):
    names.update(
        name="stranger.own", config_type=Config, configs=lambda self, problem: [Config()],
        default_config=lambda self, problem: Config(), bind=lambda *_: helper.FACTOR,
    )
Own = types.new_class("Own", (Kernel,), {}, fill)
"""
EXECUTED = """
from pathlib import Path
text = Path(__file__).with_name("data.json")
names = {}
exec(compile(Path(__file__).with_name("kernel.txt").read_text(), str(text), "exec"), names)
Own = names["Own"]
"""


TYPED = """
names = {}
exec("def bind(self, problem, config): pass", names)
Own.bind = functools.lru_cache(names["bind"])
"""
#: Methods of another package.
METHODS = {
    "other's method": "stranger_more.based",
    "other's method in a partial": "functools.partialmethod(stranger_more.based)",
    "other's method in a cache": "functools.lru_cache(stranger_more.based)",
    "other's property": "property(stranger_more.based)",
    "other's object": "stranger_more.Based()",
    "other's static object": "staticmethod(stranger_more.Based())",
}
MORE = """
def based(self, z): return z
class Based:
    def __call__(self, z): return z
"""


@pytest.mark.parametrize("way", ["made", "executed", "typed", "another module named", *METHODS])
def test_a_class_whose_module_is_not_its_own_counts(way: str, site: Path) -> None:
    (site / "stranger_more.py").write_text(MORE)
    (site / "stranger/kernel.txt").write_text(KERNEL)
    sources = {
        "made": MADE,
        "executed": EXECUTED,
        "another module named": KERNEL + "\nOwn.__module__ = 'torch.nn'\n",
        "typed": KERNEL + TYPED,
        **{
            each: f"{KERNEL}\nimport stranger_more\nOwn.based = {method}\n"
            for each, method in METHODS.items()
        },
    }
    (site / KERNEL_FILE).write_text(sources[way])
    before = own().version
    in_no_module = way in ("executed", "typed")  # of one process
    assert (own().version == before) is not in_no_module
    edited = "stranger_more.py" if way in METHODS else "stranger/helper.py"
    (site / edited).write_text(MORE + "FACTOR = 2\n")
    assert own().version != before


def test_a_compiled_module_without_source_and_a_linked_folder_count(site: Path) -> None:
    helper = site / "stranger/helper.py"
    (site / "linked").mkdir()
    (site / "stranger/link").symlink_to(site / "linked")
    (site / "stranger/self").symlink_to(site / "stranger")  # a cycle

    def compiled(factor: int) -> str:
        helper.write_text(f"FACTOR = {factor}\n")
        # A compiled file holds by default the time at which the source was written.
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(helper), str(helper) + "c", invalidation_mode=mode)
        helper.unlink()
        version: str = own().version
        return version

    before = compiled(1)
    assert compiled(2) != before == compiled(1)
    (site / "linked/table.bin").write_text("1")
    assert own().version != before


def test_other_files_of_a_distribution_count(site: Path) -> None:
    record = site / "stranger-1.0.dist-info/RECORD"
    record.write_text("stranger/kernel.py,,\nstranger_cuda.so,,\nstranger-1.0.dist-info/RECORD,,\n")
    plain = version_of(own(), "7")
    assert version_of(own(), "7", "no such distribution") == plain

    def version(compiled: str) -> str:
        (site / "stranger_cuda.so").write_text(compiled)
        importlib.invalidate_caches()
        kernel = own()
        of_registry = CheckedKernel(kernel, Source("any", "stranger")).version
        assert of_registry == version_of(kernel, kernel.version, "stranger")
        return version_of(kernel, "7", "stranger")

    before = version("one")
    assert before.startswith(plain)
    assert version("two") != before == version("one")


def test_files_of_installers_and_of_counted_packages_do_not_count_again(site: Path) -> None:
    (site / "stranger-1.0.dist-info/RECORD").write_text(
        "".join(
            f"{name},,\n"
            for name in ("stranger/kernel.py", "../../bin/stranger", "__editable__.stranger-1.pth",
                         "stranger.pth", "stranger-1.0.dist-info/RECORD", "__pycache__/x.pyc")
        )
    )  # fmt: skip
    assert version_of(own(), "7", "stranger") == version_of(own(), "7")


def test_a_function_that_is_set_on_the_instance_counts(site: Path) -> None:
    (site / "stranger_more.py").write_text("def based(z): return z\n")
    kernel = own()
    kernel.based = importlib.import_module("stranger_more").based
    before = version_of(kernel, "7")
    assert before != version_of(own(), "7")
    kernel.based = importlib.import_module("stranger_more").based
    (site / "stranger_more.py").write_text("def based(z): return z * 2\n")
    assert version_of(kernel, "7") != before


def test_packages_of_one_namespace_are_apart(site: Path) -> None:
    names = [f"stranger_namespace.{name}" for name in ("one", "other")]
    for name in names:
        folder = site / name.replace(".", "/")
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("X = 1")
        importlib.invalidate_caches()
        importlib.import_module(name)
    one, other = map(code.package_digest, names)
    assert one != other
    (site / "stranger_namespace/one/more.py").write_text("X = 2")
    assert code.package_digest(names[0]) != one
    assert code.package_digest(names[1]) == other


def test_a_module_whose_file_is_gone_is_in_no_file(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("stranger_gone")
    monkeypatch.setitem(sys.modules, "stranger_gone", module)
    assert code.package_digest("stranger_gone") is None
    module.__file__ = str(site / "gone" / "gone.py")
    assert code.package_digest("stranger_gone") is None
    archive = site / "stranger.zip"
    archive.write_text("one")
    module.__file__ = str(archive / "gone.py")
    before = code.package_digest("stranger_gone")
    archive.write_text("two")
    assert before != code.package_digest("stranger_gone") is not None


def test_a_version_that_fits_in_a_record_is_written_out(site: Path) -> None:
    kernel = own()
    files = len(version_of(kernel, "")) - 1
    fitting = "7" * (NAME_MAX - files - 1)
    assert version_of(kernel, fitting).startswith(fitting + "+")
    assert len(version_of(kernel, fitting)) == NAME_MAX
    assert len(version_of(kernel, fitting + "7")) == 12


def test_files_of_the_interpreter_and_of_editors_do_not_count(site: Path) -> None:
    before = own().version
    for name in ("__pycache__/kernel.cpython-39.pyc", ".kernel.py.swp/x"):
        (site / "stranger" / name).parent.mkdir(exist_ok=True)
        (site / "stranger" / name).write_text("anything")
    os.utime(site / KERNEL_FILE)
    assert own().version == before
    new = site / "stranger" / "new_table.bin"
    new.write_text("x")
    named = own().version
    assert named != before
    new.rename(new.with_name("other_table.bin"))
    assert own().version != named


def test_an_edit_within_one_process_is_read_again(site: Path) -> None:
    before = own().version
    present = os.stat(site / "stranger/data.json")
    (site / "stranger/data.json").write_text('{"c": 2}')
    # As an archive restores it.
    os.utime(site / "stranger/data.json", ns=(present.st_atime_ns, present.st_mtime_ns))
    assert own().version != before


def test_files_are_read_once(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = own().version
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read again"))
    assert own().version == before


def test_files_beyond_the_limit_count_by_size_and_time(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code._digest.cache_clear()
    monkeypatch.setattr(code, "_MOST_BYTES", 0)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read"))
    before = own().version
    (site / "stranger/data.json").write_text('{"c": 2}')
    os.utime(site / "stranger/data.json", (1, 1))
    assert own().version != before
    code._digest.cache_clear()


def test_the_folder_of_a_package_does_not_affect_its_version(site: Path) -> None:
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


def test_own_kernels_state_their_versions() -> None:
    assert version_of(Blas(), Blas().version) == Blas.version
    for kernel in tmm_core.kernels():
        assert set(kernel.version.split("+")) <= set("0123456789")


def test_a_subclass_of_an_own_kernel_is_not_that_kernel(site: Path) -> None:
    (site / "stranger/sub.py").write_text("from tmm_blas.blas import Blas\nclass Sub(Blas): pass\n")
    forget_modules()
    kernel = importlib.import_module("stranger.sub").Sub()
    assert version_of(kernel, kernel.version).startswith(f"{Blas.version}+")


def test_a_version_reads_no_file_again(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = own()
    version = version_of(kernel, "7")
    monkeypatch.delattr(Path, "read_bytes")
    assert version_of(kernel, "7") == version


def test_a_kernel_of_one_process_is_verified_in_every_process(tmp_path: Path, site: Path) -> None:
    store = CacheStore(tmp_path / "cache", [])
    problem = tmm_core.problem(torch.randn(4, 8), torch.randn(8, 4))

    def trusted(kernel: Any) -> bool:
        registry = Registry()
        registry.register(plugin(kernel), "stranger")
        candidate = Candidate(registry.kernel("stranger.own"), kernel.default_config(problem))
        before = FirstUse(store).is_verified(problem, candidate)
        FirstUse(store).stamp(problem, candidate)
        assert FirstUse(store).is_verified(problem, candidate)
        return before

    assert [trusted(own()) for _ in range(2)] == [False, True]
    # Another class in another process; a class that was typed again here is the same case.
    assert [trusted(typed(KERNEL)) for _ in range(2)] == [False, False]
