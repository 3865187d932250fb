"""A record that others may have written names a kernel; the kernel is verified before its first
result is used, also when a tuning completes the record."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeBlas, FakeKernel, FakeTimer, plugin, problem, settings
from test_trust import FAST, Counting, dispatcher, name, shipped
from tmm_cache import CacheStore, CacheWarning

from tmm_core import TmmWarning
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.registry.registry import Registry
from tmm_core.tuning.tuner import Tuner


def writable_record(path: Path) -> None:
    path.chmod(0o666)


def writable_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def writable_folder_of_the_gpu(path: Path) -> None:
    path.parent.parent.chmod(0o775)


def record_of_another(path: Path) -> None:
    os.chown(path, 54321, -1)


def folder_of_another(path: Path) -> None:
    os.chown(path.parent, 54321, -1)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize(
    "make",
    [
        writable_record,
        writable_folder,
        writable_folder_of_the_gpu,
        pytest.param(record_of_another, marks=as_root),
        pytest.param(folder_of_another, marks=as_root),
    ],
)
def test_a_wrong_kernel_on_a_forged_record_is_never_used(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    [path] = shipped(tmp_path).rglob("????????????????.json")
    make(path)
    d = dispatcher(Counting(wrong=True), CacheStore(tmp_path, []))
    with pytest.warns() as caught:
        assert name(d, problem(), settings()) == "blas"
    assert name(d, problem(), settings()) == "blas"  # silently
    assert [warning.category for warning in caught] == [CacheWarning, TmmWarning]


def forged(root: Path) -> Path:
    """A layer's record in which one wrong kernel won, and another was second."""
    store = CacheStore(root, [])
    record = dispatcher(FakeKernel("fast"), store).tune(problem(), settings())
    [winner] = [c for c in record.candidates if c.kernel == "fast"]
    second = replace(winner, kernel="second", samples_us=(10.5,) * len(winner.samples_us))
    record = replace(record, candidates=(*record.candidates, second))
    store.save(problem().device.gpu, problem().device.environment, record)
    return root


# The root is no folder, and the winner is wrong in tuning.
@pytest.mark.filterwarnings("ignore::tmm_cache.CacheWarning", "ignore::tmm_core.TmmWarning")
@pytest.mark.parametrize("held", [False, True], ids=["saved", "held in memory"])
def test_completing_a_forged_record_does_not_make_it_trusted(tmp_path: Path, held: bool) -> None:
    """A new plugin is measured, which verifies the winner, and the rest of the record is kept."""
    layer = forged(tmp_path / "layer")
    if held:
        (tmp_path / "own").write_text("no folder")
    for _ in range(2):
        registry = Registry()
        kernels = Counting("fast", wrong=True), Counting("second", wrong=True), FakeKernel("new")
        registry.register(plugin(FakeBlas(estimate=100.0), *kernels), "fakes")
        timer = FakeTimer({"blas": 20.0, "new": 30.0})
        d = Dispatcher(registry, Tuner(timer), CacheStore(tmp_path / "own", [layer]))
        assert name(d, problem(), settings()) == "blas"
        assert "exceeds" in d.rejections(problem(), settings())["second"][0]


def test_completing_ones_own_record_verifies_nothing_again(tmp_path: Path) -> None:
    shipped(tmp_path)
    registry = Registry()
    kernel = Counting()
    registry.register(plugin(FakeBlas(estimate=100.0), kernel, FakeKernel("new")), "fakes")
    d = Dispatcher(registry, Tuner(FakeTimer(FAST)), CacheStore(tmp_path, []))
    assert d.bound(problem(), settings())[0].origin == "tuned"
    launches = kernel.launches
    assert name(d, problem(), settings()) == "fast"
    assert kernel.launches == launches + 1
