"""Limits and rare paths: exactly at a limit, one beyond it, a forked child, a write that is
cut short, a wrong clock."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

import pytest
from cache_builders import (
    ENVIRONMENT,
    GPU,
    SPLIT_K,
    problem,
    record,
    warned,
)
from msgspec.structs import replace
from tmm_cache import CacheStore, Notes, disk, notes, paths, size_limits
from tmm_cache.cli import main
from tmm_cache.locks import acquire
from tmm_cache.transport import import_records

DAY = 86400.0


def set_mtime(path: Path, moment: float) -> None:
    os.utime(path, (moment, moment))


# -- ages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "noted"), [(0.9, False), (1.1, True), (-0.9, False), (-1.1, True)]
)
def test_a_use_is_noted_when_the_last_is_a_day_away_on_either_side(
    store: CacheStore, days: float, noted: bool
) -> None:
    """A time in the future was written under a wrong clock, and is corrected."""
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    before = time.time() - days * DAY
    set_mtime(path, before)
    assert store.load(GPU, ENVIRONMENT, problem()) == record()
    assert (abs(path.stat().st_mtime - time.time()) < 60) == noted
    assert (path.stat().st_mtime == pytest.approx(before, abs=1e-3)) != noted


# -- locks ---------------------------------------------------------------------------------


def test_a_forked_child_does_not_keep_a_lock_that_is_released(tmp_path: Path) -> None:
    """DataLoader workers are forked at any time, and live on."""
    path = tmp_path / "file.lock"
    held = acquire(path, timeout=0)
    assert held is not None
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        assert acquire(path, timeout=0) is None
        held.release()
        again = acquire(path, timeout=0)
        assert again is not None
        again.release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_release_the_lock_of_its_parent(store: CacheStore) -> None:
    with store.lock(GPU, ENVIRONMENT, problem(), timeout=0) as mine:
        assert mine
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with CacheStore().lock(GPU, ENVIRONMENT, problem(), timeout=0) as theirs:
            assert not theirs


# -- files ---------------------------------------------------------------------------------


def test_a_write_that_is_cut_short_is_continued(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """POSIX lets `write` take fewer bytes, as it does after a signal or near a quota."""
    write = os.write
    monkeypatch.setattr(disk.os, "write", lambda handle, data: write(handle, bytes(data)[:100]))
    path = store.save(GPU, ENVIRONMENT, record())
    monkeypatch.undo()
    assert path is not None
    assert CacheStore(store.root, []).load(GPU, ENVIRONMENT, problem()) == record()


@pytest.mark.parametrize("missing", [1, 100, 200])
def test_a_note_that_is_cut_short_is_reported(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch, missing: int
) -> None:
    """A disk that is almost full takes a part of it. `tmm tune --misses` would not know of it."""
    write = os.write
    monkeypatch.setattr(disk.os, "write", lambda handle, data: write(handle, data[:-missing]))
    with warned("No space left on device"):
        store.log_miss(GPU, ENVIRONMENT, problem())
    assert CacheStore(store.root, []).misses() == []


def test_a_line_is_appended_up_to_the_last_byte_of_the_limit(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert disk.append_line(log, b"1234", 10)
    assert disk.append_line(log, b"1234", 10)
    assert log.read_bytes() == b"\n1234\n1234"
    assert not disk.append_line(log, b"", 10)
    assert disk.append_line(tmp_path / "other", b"123", 4)
    assert not disk.append_line(tmp_path / "another", b"1234", 4)


def test_notes_stop_at_their_limit(store: CacheStore) -> None:
    taken = Notes("plugins", [1], store.root)
    taken.add("most", "x" * (notes.MAX_BYTES - 100))
    taken.add("beyond", "y" * 200)
    assert taken.get("beyond") == "y" * 200  # in this process
    later = Notes("plugins", [1], store.root)
    assert later.get("most") is not None
    assert later.get("beyond") is None


@pytest.mark.parametrize(("different", "fits"), [(1, True), (4, True), (90, False)])
def test_a_full_file_of_repeated_notes_takes_further_ones(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch, different: int, fits: bool
) -> None:
    """Every rank notes the same, and a note replaces an older one. A file that stayed full would
    cost a verification in every later process."""
    monkeypatch.setattr(notes, "MAX_BYTES", 1000)
    early = Notes("verified", None, store.root)
    for turn in range(90):
        Notes("verified", None, store.root).add(f"size {turn % different}", turn)
    late = "longer than a rest that has no room for a size"
    early.add("late", late)
    later = Notes("verified", None, store.root)
    assert later.get("late") == (late if fits else None)
    assert later.get("size 0") is not None
    assert later.path.stat().st_size <= 1000
    with monkeypatch.context() as patched:
        patched.setattr(early, "_read", lambda: pytest.fail("a full file is read for each note"))
        if not fits:
            early.add("later", late)
    assert [path.name for path in later.path.parent.iterdir()] == [later.path.name]


def test_a_full_file_that_others_may_have_written_is_not_rewritten(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "MAX_BYTES", 100)
    own = Notes("verified", None, store.root)
    for turn in range(8):
        own.add("x", turn)
    own.path.chmod(0o622)
    before = own.path.read_bytes()
    for turn in range(8):
        own.add("x", -turn)
    assert own.path.read_bytes().startswith(before)


@pytest.mark.parametrize(("days", "noted"), [(0.9, False), (1.1, True), (-1.1, True)])
def test_notes_that_are_read_are_in_use(store: CacheStore, days: float, noted: bool) -> None:
    """Otherwise a full cache drops the notes that each process reads before records that none
    reads, and with them the arithmetic that restarts agree on."""
    Notes("arithmetic", None, store.root).add("x", 1)
    path = Notes("arithmetic", None, store.root).path
    set_mtime(path, time.time() - days * DAY)
    assert Notes("arithmetic", None, store.root).get("x") == 1
    assert (abs(path.stat().st_mtime - time.time()) < 60) is noted


def test_the_target_of_a_link_is_replaced_and_the_link_stays(
    store: CacheStore, tmp_path: Path
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "records.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    assert main(["export", str(link)]) == 0
    assert link.is_symlink()
    other = CacheStore(tmp_path / "other", [])
    assert import_records(target, other.root, force=False).written == 1


# -- samples ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "raced", "kept"),
    [
        ((1.0, 2.0, 3.0), True, (1.0, 2.0, 3.0)),
        ((4.0, 1.0, 3.0, 2.0), True, (1.0, 2.5, 4.0)),
        ((3.0, 1.0), True, (3.0, 1.0)),
        ((3.0, 1.0), False, (2.0,)),
        ((), True, ()),
        ((), False, ()),
    ],
)
def test_thinned_keeps_the_extremes_and_the_median(
    samples: tuple[float, ...], raced: bool, kept: tuple[float, ...]
) -> None:
    assert replace(SPLIT_K, samples_us=samples).thinned(raced).samples_us == kept


# -- nearest -------------------------------------------------------------------------------


# -- paths  --------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "tmm", "./cache/tmm"])
def test_a_platform_without_an_absolute_folder_has_none(
    monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    import platformdirs

    monkeypatch.delenv("TMM_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: folder)
    with warned("no home folder; what is tuned is lost"):
        assert paths.default_root() == paths.NOWHERE


@pytest.mark.parametrize("environ", [{}, {"TMM_CACHE_MAX_SIZE": ""}])
def test_a_size_limit_that_is_empty_is_the_default(environ: dict[str, str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert size_limits.size_limit(environ) == size_limits.DEFAULT_SIZE
