"""Limits, boundaries and second paths: exactly at a limit, one beyond it, the forked child, a write
that is cut short, a clock that was wrong."""

from __future__ import annotations

import io
import os
import signal
import tarfile
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cache_builders import (
    BLAS,
    ENVIRONMENT,
    GPU,
    OLDER_ENVIRONMENT,
    SPLIT_K,
    made,
    problem,
    record,
    warned,
)
from tmm_cache import CacheStore, Notes, ages, batch, disk, facets, notes, places, removal, unpack
from tmm_cache.archive import read_archive
from tmm_cache.batch import Batch
from tmm_cache.cli import main
from tmm_cache.errors import UsageError
from tmm_cache.filters import Filter
from tmm_cache.head import HEAD_BYTES, Best, read_head
from tmm_cache.locks import acquire
from tmm_cache.nearest import nearest

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
    """A time that is yet to come was written under a wrong clock, and is mended."""
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    before = time.time() - days * DAY
    set_mtime(path, before)
    assert store.load(GPU, ENVIRONMENT, problem()) == record()
    assert (abs(path.stat().st_mtime - time.time()) < 60) == noted
    assert (path.stat().st_mtime == pytest.approx(before, abs=1e-3)) != noted


def test_what_is_dated_before_1971_was_never_used_here(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for moment, used in ((0, False), (365 * DAY - 1, False), (365 * DAY, True)):
        set_mtime(file, moment)
        status = file.stat()
        assert ages.was_used(status) == used
        assert ages.last_used(status) == (moment if used else status.st_ctime)
    ages.mark_imported(file)
    assert not ages.was_used(file.stat())
    assert ages.last_used(file.stat()) == pytest.approx(time.time(), abs=60)
    ages.touch(file)
    assert ages.was_used(file.stat())
    ages.touch(tmp_path / "absent")


def test_two_imports_have_two_times(tmp_path: Path) -> None:
    """So that one that is replaced by another is noticed."""
    first, second = tmp_path / "first", tmp_path / "second"
    for file in (first, second):
        file.write_text("")
        ages.mark_imported(file)
        time.sleep(0.001)
    assert first.stat().st_mtime_ns != second.stat().st_mtime_ns


def test_the_age_of_a_link_is_its_own(tmp_path: Path) -> None:
    old, link = tmp_path / "old", tmp_path / "link"
    old.write_text("")
    set_mtime(old, time.time() - 100)
    link.symlink_to(old)
    assert ages.is_older(old, 90)
    assert not ages.is_older(old, 110)
    assert not ages.is_older(link, 90)
    assert not ages.is_older(tmp_path / "absent", 0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (59, "59s"),
        (60, "1m"),
        (3599, "59m"),
        (3600, "1h"),
        (86399, "23h"),
        (86400, "1d"),
    ],
)
def test_an_age_is_in_the_largest_unit(
    monkeypatch: pytest.MonkeyPatch, seconds: int, text: str
) -> None:
    now = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return now

    monkeypatch.setattr(facets, "datetime", Clock)
    assert facets.age(now - timedelta(seconds=seconds)) == text


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


def test_what_a_link_names_is_replaced_and_the_link_stays(
    store: CacheStore, tmp_path: Path
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "records.tar.gz", tmp_path / "link.tar.gz"
    target.write_text("old")
    link.symlink_to(target)
    assert main(["export", str(link)]) == 0
    assert link.is_symlink()
    other = CacheStore(tmp_path / "other", [])
    assert read_archive(target, other.root, force=False).written == 1


def test_a_batch_holds_a_bounded_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_MOST_FILES", 3)
    paths = [tmp_path / "folder" / f"{number}.json" for number in range(4)]
    with Batch() as waiting:
        for number, path in enumerate(paths, 1):
            waiting.add(path, b"data", None)
            assert paths[0].exists() == (number >= 3)
        assert not paths[3].exists()
    assert all(path.read_bytes() == b"data" for path in paths)


def test_a_batch_holds_a_bounded_number_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "_MOST_BYTES", 10)
    with Batch() as waiting:
        waiting.add(tmp_path / "a", b"12345", None)
        assert not (tmp_path / "a").exists()
        waiting.add(tmp_path / "b", b"12345", None)
        assert (tmp_path / "a").exists()
        waiting.add(tmp_path / "c", b"12345", None)
        assert not (tmp_path / "c").exists()  # counted from the last flush


# -- heads and times -----------------------------------------------------------------------


@pytest.mark.parametrize(("extra", "usable"), [(0, True), (3000, True), (4096, False)])
def test_a_head_may_take_four_kilobytes(store: CacheStore, extra: int, usable: bool) -> None:
    assert HEAD_BYTES == 4096
    asked = problem() | {"note": "x" * extra}
    path = store.save(GPU, ENVIRONMENT, record(asked))
    assert path is not None
    assert (read_head(path) is not None) == usable
    [summary] = store.summaries()  # longer ones are read in full
    assert summary.problem == asked


def test_a_time_of_zero_gives_no_speedup() -> None:
    assert Best("blas", {}, 0.0, 20.0).speedup is None
    assert Best("blas", {}, 20.0, 0.0).speedup == 0.0
    assert Best("blas", {}, 1e-300, 1e300).speedup is None


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


def test_a_filter_by_age_excludes_its_own_moment(store: CacheStore) -> None:
    store.save(GPU, ENVIRONMENT, record(created="2026-01-31T12:00:00Z"))
    [summary] = store.summaries()
    moment = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
    second = timedelta(seconds=1)
    assert not Filter(before=moment)(summary)
    assert not Filter(after=moment)(summary)
    assert Filter(before=moment + second, after=moment - second)(summary)
    assert not Filter(before=moment).is_empty
    assert not Filter(after=moment).is_empty


# -- nearest -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("near", "far"),
    [
        ({"m": 256}, {"m": 32}),  # an octave, and two
        ({"m": 255}, {"m": 64}),  # by ratio: the other's difference is half as large
        ({"m": 128 * 100}, {"epilogue": "gelu"}),  # 6.6 octaves
        ({"epilogue": "gelu"}, {"m": 128 * 400}),  # 8.6 octaves
        ({"environment": {"torch": "1"}}, {"epilogue": "gelu"}),
        ({"m": 128 * 8}, {"environment": {"torch": "1"}}),
        ({"environment": {"torch": "1", "triton": "1"}, "m": 256}, {"gpu": "nvidia-a100"}),
        ({"epilogue": "gelu", "batch": "none", "bias": 1}, {"gpu": "nvidia-a100"}),
    ],
)
def test_the_nearest_key_differs_least(near: dict[str, Any], far: dict[str, Any]) -> None:
    def key(changes: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
        changes = dict(changes)
        gpu = changes.pop("gpu", GPU)
        environment = ENVIRONMENT | changes.pop("environment", {})
        return gpu, environment, problem() | changes

    asked = (GPU, ENVIRONMENT, problem())
    for keys in ([near, far], [far, near]):
        found = nearest(asked, map(key, keys))
        assert found is not None
        assert (found.gpu, found.problem) == (key(near)[0], key(near)[2])
    assert nearest(asked, []) is None


def test_differences_name_the_field_and_what_is_absent() -> None:
    asked = (GPU, ENVIRONMENT, problem() | {"bias": None, "new": "x"})
    there = ("nvidia-a100", OLDER_ENVIRONMENT, problem(dtype="float16") | {"old": [1]})
    found = nearest(asked, [there])
    assert found is not None
    assert [str(each) for each in found.differences] == [
        "a.dtype: asked bfloat16, there float16",
        "b.dtype: asked bfloat16, there float16",
        "out.dtype: asked bfloat16, there float16",
        "new: asked x, there nothing",
        "environment.torch: asked 2.13.0, there 2.12.0",
        f"gpu: asked {GPU}, there nvidia-a100",
        "old: asked nothing, there [1]",
    ]


# -- removal -------------------------------------------------------------------------------


def outdated(store: CacheStore) -> list[int]:
    found = removal.outdated(store.root, None, pytest.fail)
    digests = {each.path.stem for each in found}
    return sorted(e.record.problem["m"] for e in store.entries() if e.digest in digests)


def test_an_environment_as_old_as_the_newest_is_outdated(store: CacheStore) -> None:
    created = made(timedelta(days=2))
    store.save(GPU, ENVIRONMENT, record(problem(m=1), created=created))
    path = store.save(GPU, OLDER_ENVIRONMENT, record(problem(m=2), created=created))
    assert path is not None
    ages.mark_imported(path)
    assert outdated(store) == [2]
    ages.mark_imported(store.path(GPU, ENVIRONMENT, problem(m=1)))
    assert outdated(store) == []  # neither was used here


def test_a_use_today_does_not_make_an_old_record_new(store: CacheStore) -> None:
    old, new = made(timedelta(days=300)), made(timedelta(days=3))
    path = store.save(GPU, OLDER_ENVIRONMENT, record(problem(m=1), created=old))
    newer = store.save(GPU, ENVIRONMENT, record(problem(m=2), created=new))
    assert path is not None
    assert newer is not None
    set_mtime(newer, time.time() - 2 * DAY)
    assert outdated(store) == [1]
    # A creation time that is yet to come counts as when the file was written.
    path = store.save(
        GPU, OLDER_ENVIRONMENT, record(problem(m=1), created=made(-timedelta(days=9)))
    )
    assert path is not None
    set_mtime(path, time.time() - 5 * DAY)
    assert outdated(store) == []


@pytest.mark.parametrize(("days", "kinds"), [(29, []), (31, ["notes"])])
def test_notes_are_stale_after_a_month(store: CacheStore, days: int, kinds: list[str]) -> None:
    Notes("plugins", [1], store.root).add("key", 1)
    [file] = (store.root / "notes").iterdir()
    set_mtime(file, time.time() - days * DAY)
    found = removal.outdated(store.root, None, pytest.fail)
    assert [each.kind for each in found] == kinds


def test_an_empty_filter_alone_clears_everything(store: CacheStore) -> None:
    store.save(GPU, ENVIRONMENT, record(problem(m=1), created=made(timedelta(days=60))))
    store.save(GPU, ENVIRONMENT, record(problem(m=2), created=made(timedelta(days=20))))
    store.log_miss(GPU, ENVIRONMENT, problem(m=3))
    moment = datetime.now(timezone.utc) - timedelta(days=30)
    for wanted, kinds in (
        (Filter(before=moment), ["record"]),
        (Filter(after=moment), ["record"]),
        (Filter(), ["misses", "record", "record"]),
    ):
        found = removal.cleared(store.root, wanted, pytest.fail)
        assert sorted(each.kind for each in found) == kinds


# -- archives ------------------------------------------------------------------------------


def packed(folder: Path, attribute: str) -> Path:
    """An archive of one file, whose extension header holds this attribute."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a")
        member.pax_headers = {"comment": attribute}
        archive.addfile(member)
    path = folder / "archive.tar"
    path.write_bytes(buffer.getvalue())
    return path


def test_a_header_may_have_as_many_bytes_as_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = packed(tmp_path, "x" * 980)
    size = tarfile.TarInfo.frombuf(path.read_bytes()[:512], "utf-8", "strict").size
    for limit, refused in ((size, False), (size - 1, True)):
        monkeypatch.setattr(unpack, "MAX_HEADER", limit)
        with path.open("rb") as raw:
            if refused:
                with pytest.raises(UsageError, match=f"a header of {size} bytes"):
                    list(unpack.members(path, raw))
            else:
                assert [member.name for member in unpack.members(path, raw)] == ["a"]


# -- places --------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "tmm", "./cache/tmm"])
def test_a_platform_without_an_absolute_folder_has_none(
    monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    import platformdirs

    monkeypatch.delenv("TMM_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: folder)
    with warned("no home folder; what is tuned is lost"):
        assert places.default_root() == places.NOWHERE


def test_records_at_both_ends_of_a_filter_by_blas(store: CacheStore) -> None:
    """A glob matches the whole name."""
    store.save(GPU, ENVIRONMENT, record(candidates=(BLAS,), winner=0))
    [summary] = store.summaries()
    assert Filter(kernel="blas")(summary)
    assert Filter(kernel="b*")(summary)
    assert not Filter(kernel="bla")(summary)
    assert not Filter(kernel="las")(summary)
