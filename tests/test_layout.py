"""The installed files, and the direction of imports."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "tmm_core": ROOT / "tmm_core",
    "tmm_base": ROOT / "cache" / "tmm_base",
    "tmm_cache": ROOT / "cache" / "tmm_cache",
    "tmm_triton": ROOT / "plugins" / "tmm_triton",
    "tmm_blas": ROOT / "plugins" / "tmm_blas",
}
#: Packages that each package may import besides the standard library and itself.
ALLOWED = {
    "tmm_base": {"tmm_core"},  # `tmm` starts its commands there
    "tmm_cache": {"filelock", "msgspec", "platformdirs", "tmm_base"},
    "tmm_core": {
        *("torch", "msgspec", "pluggy", "pebble"),
        *("tmm_base", "tmm_cache", "tmm_blas"),
    },
    "tmm_triton": {"torch", "triton", "tmm_core"},
    "tmm_blas": {"torch", "tmm_core"},
}
#: Further packages for parts of core that ``import tmm_core`` does not import.
EXTRA = {
    "cache/tmm_base/pyinstaller/hook-": {"PyInstaller"},  # PyInstaller alone runs it
    # Type checkers then know what ``tl`` is in a device function.
    "tmm_core/epilogues": {"triton"},
    "tmm_core/formats": {"triton"},
    "tmm_core/spec/epilogue.py": {"triton"},
    "tmm_core/triton": {"triton", "numpy"},  # numpy only where Triton interprets, which needs it
    "tmm_core/testing": {"triton", "pytest", "numpy"},
    "tmm_core/bench": {"triton"},
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
def test_packages_import_only_those_below(package: str) -> None:
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


#: The layers of core, the lowest first. A part imports only from lower layers: at the top of a
#: module, inside a function or for types alone. A part is a folder or a module of tmm_core;
#: ``tmm_core`` stands for ``tmm_core/__init__.py``.
LAYERS = (
    {"errors", "version", "formats"},
    {"compat", "settings", "spec"},
    {"epilogues", "launch", "quantized"},
    {"foreign", "integrations.checkpoints", "registry", "rounding", "triton"},
    {"verify"},
    {"tuning"},
    {"dispatch"},
    {"interop"},
    {"api", "grouped"},
    {"tmm_core", "nn"},
    {"bench", "testing", "integrations"},
    {"tools"},
)
LAYER = {part: number for number, parts in enumerate(LAYERS) for part in parts}


def part_of(module: str) -> str:
    _, *parts = module.split(".")
    if not parts:
        return "tmm_core"
    inside = ".".join(parts[:2])
    return inside if inside in LAYER else parts[0]


def modules(package: str) -> dict[str, set[str]]:
    """The modules of a package, each with the modules of this package that it imports."""
    top = PACKAGES[package]
    files = {}
    for path in top.rglob("*.py"):
        parts = path.relative_to(top.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {
        name: {target for found in named(path) if (target := _module(found, files))}
        for name, path in files.items()
    }


def named(path: Path) -> set[str]:
    """The imports of a file: modules, names in modules, and arguments of ``import_module``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        match node:
            case ast.Import(names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(str(module), names, 0):
                found |= {f"{module}.{alias.name}" for alias in names}
            case ast.Call(ast.Attribute(attr="import_module"), [ast.Constant(str(text)), *_]):
                found.add(text)
            case ast.Call(
                ast.Attribute(attr="import_module"),
                [ast.JoinedStr([ast.Constant(str(text)), *_]), *_],
            ):
                found.add(text.rstrip("."))
    return found


def _module(name: str, known: dict[str, Path]) -> str | None:
    """The known module of that name, or the known module that has the name."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def upward_imports(graph: dict[str, set[str]]) -> list[str]:
    """The imports of other parts that are not in a lower layer."""
    return [
        f"{name} (layer {LAYER[here]}) imports {target} (layer {LAYER[there]})"
        for name, targets in graph.items()
        for target in sorted(targets)
        if (here := part_of(name)) != (there := part_of(target)) and LAYER[here] <= LAYER[there]
    ]


def test_a_part_of_core_imports_from_lower_layers_only() -> None:
    assert len(LAYERS) <= 12
    graph = modules("tmm_core")
    assert set(LAYER) == {part_of(name) for name in graph}
    assert not upward_imports(graph)


def test_an_upward_import_is_detected() -> None:
    up = {"tmm_core.launch.warm": {"tmm_core.spec.problem", "tmm_core.dispatch.dispatcher"}}
    assert upward_imports(up) == [
        "tmm_core.launch.warm (layer 2) imports tmm_core.dispatch.dispatcher (layer 6)"
    ]
    # All kinds of imports are found: inside functions, for types, and by text.
    graph = modules("tmm_core")
    assert "tmm_core.tuning.tuner" in graph["tmm_core.dispatch.dispatcher"]
    assert "tmm_core.triton.pointwise" in graph["tmm_core.interop.epilogue_kernels"]
    assert "tmm_core.interop.sharding" in graph["tmm_core.interop.calls"]
    assert "tmm_core.tools.commands" in graph["tmm_core.tools.cli"]


#: Modules that Python refuses to import once the main thread has ended. A thread that runs on may
#: then make its first call.
POOLS = {"pebble", "concurrent.futures.process", "concurrent.futures.thread"}
POOLS |= {f"concurrent.futures.{kind}PoolExecutor" for kind in ("Process", "Thread")}


def imported_first(source: str) -> set[str]:
    """The names that a module imports when it is imported, apart from those for types alone."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_call_imports_a_pool_of_processes_or_threads() -> None:
    assert imported_first("from concurrent.futures import ThreadPoolExecutor") & POOLS
    assert imported_first("import concurrent.futures.process, os") & POOLS
    assert not imported_first("def f():\n    import pebble") & POOLS
    commands = ROOT / "tmm_core" / "tools"
    for package in PACKAGES.values():
        for path in package.rglob("*.py"):
            if not path.is_relative_to(commands):
                assert not imported_first(path.read_text()) & POOLS, path


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_have_no_cycle(package: str) -> None:
    graph = {name: targets - {name} for name, targets in modules(package).items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


#: ``tmm_core`` itself, and its packages for authors of kernels and their tests.
PUBLIC = {"tmm_core", "tmm_core.triton", "tmm_core.testing"}

#: Exceptions that a signal handler may raise, itself or by a call.
RAISED = {
    *("BaseException", "Exception", "ArithmeticError", "AssertionError", "AttributeError"),
    *("EOFError", "LookupError", "KeyError", "IndexError", "MemoryError", "NotImplementedError"),
    *("OSError", "ConnectionError", "FileNotFoundError", "OverflowError", "RecursionError"),
    *("RuntimeError", "SyntaxError", "TimeoutError", "TypeError", "UnicodeError", "ValueError"),
}
#: Handlers that need not re-raise an exception of a signal handler, with the reason.
UNINTERRUPTED = {
    "tmm_core/bench": "measurements of a developer",
    "tmm_core/testing": "tests of a developer",
    "tmm_core/tools": "a command reports what ends it",
    "tmm_core/tuning/candidate_launchers.py:_bound": "the exception is an outcome, which "
    "the reader raises again",
    "tmm_core/tuning/compile_pool.py:_run": "a thread, and signals interrupt the main one",
    "tmm_core/tuning/pool_host.py": "another process",
    "tmm_core/tuning/pool_worker.py": "another process",
    "tmm_core/verify/two_threads.py:_run": "a thread, and signals interrupt the main one",
    "tmm_core/interop/aten_entries.py": "op.failed raises it again",
}


def swallowed(source: str) -> list[tuple[str, str]]:
    """The function and the types of each handler that neither raises nor calls `reraise`."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "contextlib.suppress":
                found.append((function.name, ast.unparse(node)))
            if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
                types = "BaseException" if node.type is None else ast.unparse(node.type)
                calls = {ast.unparse(c.func) for c in ast.walk(node) if isinstance(c, ast.Call)}
                if RAISED & set(re.findall(r"\w+", types)) and "reraise" not in calls:
                    found.append((function.name, types))
    return found


def test_no_handler_swallows_a_signals_exception() -> None:
    found = {
        f"{path.relative_to(ROOT).as_posix()}:{function}: {types}"
        for package in PACKAGES.values()
        for path in package.rglob("*.py")
        for function, types in swallowed(path.read_text())
    }
    allowed = {place for place in found if place.startswith(tuple(UNINTERRUPTED))}
    assert found - allowed == set()
    assert all(any(place.startswith(each) for place in found) for each in UNINTERRUPTED)


@pytest.mark.parametrize("handler", ["except OSError:", "except (KeyError, ValueError) as e:"])
def test_a_handler_that_swallows_is_detected(handler: str) -> None:
    source = f"def f():\n    try:\n        g()\n    {handler}\n        "
    assert swallowed(f"{source}return 1")
    assert not swallowed(f"{source}reraise(e)\n        return 1")
    assert not swallowed(f"{source}raise")


def test_a_file_name_is_used_once() -> None:
    """Across the packages, so that it says what the file contains."""
    names = [path.name for folder in PACKAGES.values() for path in folder.rglob("*.py")]
    twice = {name for name in names if names.count(name) > 1}
    assert twice <= {"__init__.py", "plugin.py", "cli.py"}


def test_scales_belong_to_operands() -> None:
    """Only calls that take scales as arguments of their own, such as torch's, name them."""
    calls = {"api.py", "grouped.py", "interop/aten_calls.py", "spec/arguments.py"}
    core = PACKAGES["tmm_core"]
    paths = [path for folder in PACKAGES.values() for path in folder.rglob("*.py")]
    named = {path for path in paths if re.search("scale_[ab]", path.read_text())}
    assert named == {core / call for call in calls}


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


def test_the_wheel_installs_its_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == set(PACKAGES)
    for package in PACKAGES:
        assert f"{package}/py.typed" in names
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    template = ROOT / "tmm_core" / "tools" / "template"
    for path in template.rglob("*.in"):  # files of `tmm new-plugin`
        assert path.relative_to(ROOT).as_posix() in names


def test_the_wheel_declares_commands_and_plugins(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        text = archive.read(path).decode()
    for line in (
        "tmm = tmm_base.tmm:main",
        "tmm-cache = tmm_cache.cli:main",
        "blas = tmm_blas.plugin",
        "triton = tmm_triton.plugin",
    ):
        assert line in text


def test_the_oldest_lane_has_the_oldest_requirements(wheel: Path) -> None:
    """An older release that lacks something would otherwise be found by a user."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        metadata = archive.read(name).decode()
    least = dict(re.findall(r"^Requires-Dist: (\w+)>=([\d.]+)", metadata, re.MULTILINE))
    pinned = dict(
        re.findall(r"^(\w+)==([\d.]+)", (ROOT / "constraints-oldest.txt").read_text(), re.M)
    )
    assert {"torch", "pluggy", "filelock"} < {*least}
    for name, version in least.items():
        assert f"{pinned[name]}.".startswith(f"{version}."), name


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


#: The most files that each walk of CONTRIBUTING.md may meet.
WALKS = {
    "A warm call": 5,
    "A first call": 9,
    "A new kernel": 2,
    "A new epilogue": 1,
    "A new operand format": 1,
}


@pytest.mark.parametrize("walk", WALKS)
def test_walks_through_the_code_are_short_and_name_existing_code(walk: str) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.split(f"### {walk}\n", 1)[1].split("\n#", 1)[0]
    steps = re.findall(r"^\d\. `([^`]+)`: (.*(?:\n   .*)*)", section, re.MULTILINE)
    assert len(steps) == section.count("\n1. ") + len(re.findall(r"\n[2-9]\. ", section))
    assert 0 < len(steps) <= WALKS[walk]
    for name, message in steps:
        source = (ROOT / name).read_text(encoding="utf-8")
        for word in re.findall(r"`(\w+)`", message):
            assert word in source, f"{name} has no {word}"
