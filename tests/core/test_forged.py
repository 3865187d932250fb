"""If others may have written a record, its kernel is verified before its first result is used. This
also holds when a tuning completes the record."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeBlas, FakeKernel, FakeTimer, plugin, problem, settings
from msgspec.structs import replace as revised
from test_trust import FAST, Counting, dispatcher, name, shipped
from tmm_cache import CacheStore, CacheWarning

from tmm_core import TmmWarning
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.registry.registry import Registry
from tmm_core.tuning.tuner import Tuner


def test_a_record_that_somebody_else_wrote_names_a_kernel_to_verify(tmp_path: Path) -> None:
    """The record has a checksum, is in the user's own root, and is for a problem tuned there."""
    store = CacheStore(forged(tmp_path, wins=True), [])
    d = dispatcher(Counting("second", wrong=True), store)
    with pytest.warns(TmmWarning, match="second was wrong at its first use"):
        assert name(d, problem(), settings()) == "blas"


def writable_note(path: Path) -> None:
    path.chmod(0o666)


def writable_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def writable_root(path: Path) -> None:
    path.parent.parent.chmod(0o775)


def note_of_another(path: Path) -> None:
    os.chown(path, 54321, -1)


def folder_of_another(path: Path) -> None:
    os.chown(path.parent, 54321, -1)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize(
    "make",
    [
        writable_note,
        writable_folder,
        writable_root,
        pytest.param(note_of_another, marks=as_root),
        pytest.param(folder_of_another, marks=as_root),
    ],
)
def test_a_forged_note_passes_no_wrong_kernel(tmp_path: Path, make: Callable[[Path], None]) -> None:
    [path] = (shipped(tmp_path) / "notes").glob("verified-*")
    make(path)
    d = dispatcher(Counting(wrong=True), CacheStore(tmp_path, []))
    with pytest.warns() as caught:
        assert name(d, problem(), settings()) == "blas"
    assert name(d, problem(), settings()) == "blas"  # silently
    assert [warning.category for warning in caught] == [CacheWarning, TmmWarning]


def forged(root: Path, wins: bool = False) -> Path:
    """A record in which one wrong kernel won, and another was second or, if ``wins``, won."""
    store = CacheStore(root, [])
    record = dispatcher(FakeKernel("fast"), store).tune(problem(), settings())
    [winner] = [c for c in record.candidates if c.kernel == "fast"]
    time = 9.5 if wins else 10.5
    second = revised(winner, kernel="second", samples_us=(time,) * len(winner.samples_us))
    best = len(record.candidates) if wins else record.winner
    record = revised(record, candidates=(*record.candidates, second), winner=best)
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


def test_completing_an_own_record_verifies_nothing_again(tmp_path: Path) -> None:
    shipped(tmp_path)
    registry = Registry()
    kernel = Counting()
    registry.register(plugin(FakeBlas(estimate=100.0), kernel, FakeKernel("new")), "fakes")
    d = Dispatcher(registry, Tuner(FakeTimer(FAST)), CacheStore(tmp_path, []))
    assert d.bound(problem(), settings())[0].origin == "tuned"
    launches = kernel.launches
    assert name(d, problem(), settings()) == "fast"
    assert kernel.launches == launches + 1
