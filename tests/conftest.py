"""Every test has an empty cache folder, and without a GPU kernels are interpreted."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# numpy's threads, fighting over two cores for tiles of 64, cost the interpreter four times the
# CPU time that its work does. Before numpy and torch are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# With AVX-512 oneDNN's GELU of Inf is NaN, and its float16 products warn of some strides: torch
# computes the same on every processor.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

import pytest
import torch

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck
    from hypothesis import settings as drawing

    # The speed at which a machine draws inputs is not under test.
    drawing.register_profile("tmm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    drawing.load_profile("tmm")

if not torch.cuda.is_available():
    # Triton reads this when a kernel's module is imported.
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.insert(0, str(Path(__file__).parent))  # fakes.py

from fakes import FakeKernel
from uninterpreted import Uninterpreted

from tmm_core import dispatch, errors, settings
from tmm_core.interop import autograd_state, epilogue_kernels
from tmm_core.launch import nesting, warm
from tmm_core.registry import query, registry
from tmm_core.spec import code
from tmm_core.tuning import findings
from tmm_core.verify import random_inputs

#: Of random inputs. CI sets it, so that a commit that fails fails again.
SEED = os.environ.setdefault("TEST_SEED", os.urandom(4).hex())  # the same in all workers


def pytest_report_header() -> str:
    return (
        f"TEST_SEED={SEED} draws these random inputs again; "
        "--slow 0/1 also runs slow tests, which are deselected otherwise"
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", default="0/0", metavar="K/N", help="also run part K of N of the slow tests"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--slow")
    run: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if _is_slow(item) and not _is_in_part(item, part) else run).append(item)
    # Some 6,000: pytest reports each test that is skipped, but none that is deselected.
    config.hook.pytest_deselected(items=left_out)
    # The slowest tests come first, so that no worker ends with one while the others are idle.
    items[:] = sorted(run, key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}  # a keyword may be a parameter's
        if "endurance" in marks and "endurance" not in config.getoption("-m"):
            item.add_marker(pytest.mark.skip(reason="minutes; run by -m endurance"))
        if "gpu" in marks and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _is_slow(item: pytest.Item) -> bool:
    """Whether a test is marked slow; ``slow(quick=5)`` leaves one in five cases quick."""
    mark = item.get_closest_marker("slow")
    quick = None if mark is None else mark.kwargs.get("quick")
    return mark is not None and (quick is None or _number(item) % quick != 0)


def _is_in_part(item: pytest.Item, which: str) -> bool:
    part, parts = map(int, which.split("/"))
    return parts > 0 and (_number(item) >> 16) % parts == part


def _number(item: pytest.Item) -> int:
    """A number that stays the same while other tests are added."""
    return zlib.crc32(item.nodeid.encode())


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw random inputs by the seed and the test, in any order of tests."""
    seed = zlib.crc32(f"{SEED} {request.node.nodeid}".encode())
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():  # without one, torch would keep the seed and where it was set
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    seeds = itertools.count(seed)
    monkeypatch.setattr(random_inputs, "new_seed", lambda: next(seeds) % 2**32)


@pytest.fixture(scope="session")
def list_plugins() -> Callable[[], list[importlib.metadata.EntryPoint]]:
    """Lists the plugins of this environment once: it takes 15 ms, in each of thousands of tests."""
    list_anew, usual_place = registry._installed, where_plugins_are_found()
    usual = list_anew()
    return lambda: usual if where_plugins_are_found() == usual_place else list_anew()


@pytest.fixture(autouse=True)
def isolated(
    tmp_path: Path, list_plugins: Callable[[], list[importlib.metadata.EntryPoint]]
) -> Iterator[None]:
    # Not the test's own monkeypatch, whose undo() would lead to the developer's cache.
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("TMM_"):
                patch.delenv(name)
        patch.setenv("TMM_CACHE_DIR", str(tmp_path / "tmm-cache"))
        patch.setenv("TMM_SHIPPED_RECORDS", "0")
        patch.setattr(query, "version_of", stated)
        patch.setattr(registry, "_installed", list_plugins)
        forget()
        yield
        forget()


@pytest.fixture
def blas_alone(isolated: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No Triton, and one thread: two cores that others use too make tiny products wait."""
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def compiler_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all workers of this run."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    return shared / "uninterpreted"


@pytest.fixture(scope="session")
def uninterpreted(compiler_folder: Path) -> Iterator[Uninterpreted]:
    """Calls a function where Triton compiles."""
    process = Uninterpreted(compiler_folder)
    yield process
    process.close()


@pytest.fixture(scope="session")
def uninterpreted_amd(compiler_folder: Path) -> Iterator[Uninterpreted]:
    """The same, for AMD's GPUs."""
    process = Uninterpreted(compiler_folder, amd=True)
    yield process
    process.close()


def stated(kernel: Any, version: str, distribution: str = "") -> str:
    """A fake's version is what its test states: a test file is not the code of one kernel."""
    return (
        version
        if isinstance(kernel, FakeKernel)
        else code.version_of(kernel, version, distribution)
    )


def where_plugins_are_found() -> tuple[Any, ...]:
    """The objects that a test replaces to add plugins."""
    return importlib.metadata.entry_points, *sys.path


def forget() -> None:
    """Make the process read environment, plugins and cache anew."""
    findings._warned.clear()
    if (aten := sys.modules.get("tmm_core.interop.aten")) is not None:
        aten.disable()
    dispatch.default_dispatcher.cache_clear()
    warm.forget_plans()
    epilogue_kernels._found.clear()
    autograd_state._levels_were_traced = False
    errors._faults.clear()
    nesting.NESTING.clear()
    settings._from_environment.cache_clear()
