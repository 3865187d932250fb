"""The cache limits itself: it removes left-over files, and records beyond its size limit, but never
records in use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cache_builders import ENVIRONMENT, GPU, child, problem, record, warned
from tmm_cache import CacheStore, Notes, size_limits
from tmm_cache.paths import VERSION
from tmm_cache.size_limits import DEFAULT_SIZE, evict, leftovers, parse_size, size_limit

Captured = pytest.CaptureFixture[str]

DAY = 86400.0


def aged(path: Path, seconds: float) -> Path:
    """Date the file's last use this many seconds back."""
    moment = time.time() - seconds
    os.utime(path, (moment, moment))
    return path


def saved(store: CacheStore, m: int, days: float, gpu: str = GPU) -> Path:
    path = store.save(gpu, ENVIRONMENT, record(problem(m=m)))
    assert path is not None
    return aged(path, days * DAY)


def kept(store: CacheStore) -> list[object]:
    return sorted(entry.record.problem["m"] for entry in CacheStore(store.root, []).summaries())


def nothing(path: Path) -> bool:
    return False


def a_dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64M", 64 * 2**20),
        ("64MB", 64 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2k", 2048),
        ("1000", 1000),
        (" 1t ", 2**40),
        ("0", None),
        ("0G", None),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int | None) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["x", "-1M", "1P", "M", "1e3", "1,5G", "nan"])
def test_an_invalid_size_costs_a_warning_and_gives_the_default(text: str) -> None:
    with pytest.raises(ValueError, match="accepted is a size like 64M"):
        parse_size(text)
    with warned("TMM_CACHE_MAX_SIZE: found"):
        assert size_limit({"TMM_CACHE_MAX_SIZE": text + "?"}) == DEFAULT_SIZE


def test_the_limit_comes_from_the_environment(store: CacheStore) -> None:
    assert size_limit({}) == 256 * 2**20
    assert size_limit({"TMM_CACHE_MAX_SIZE": "2k"}) == 2048
    assert size_limit({"TMM_CACHE_MAX_SIZE": "0"}) is None


def test_without_a_limit_nothing_is_evicted(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(store, 1, days=999)
    monkeypatch.setattr(size_limits, "DEFAULT_SIZE", 1)
    monkeypatch.setenv("TMM_CACHE_MAX_SIZE", "0")
    assert CacheStore().save(GPU, ENVIRONMENT, record(problem(m=2))) is not None
    assert kept(store) == [1, 2]


def test_a_use_is_noted_once_a_day(store: CacheStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(store, 1, days=1.01)
    touched, real = [], os.utime

    def utime(*arguments: object, **options: object) -> None:
        touched.append(arguments)
        real(*arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "utime", utime)
    for _ in range(3):
        assert store.load(GPU, ENVIRONMENT, problem(m=1)) is not None
    assert len(touched) == 1
    assert time.time() - path.stat().st_mtime < 60


def test_the_use_of_a_layer_is_not_noted(store: CacheStore, tmp_path: Path) -> None:
    below = CacheStore(tmp_path / "below", [])
    path = saved(below, 1, days=9)
    before = path.stat().st_mtime_ns
    assert CacheStore(store.root, [below.root]).load(GPU, ENVIRONMENT, problem(m=1)) is not None
    assert path.stat().st_mtime_ns == before


def test_the_least_recently_used_record_goes_first(store: CacheStore) -> None:
    for m in range(1, 11):
        saved(store, m, days=11 - m)
    assert store.load(GPU, ENVIRONMENT, problem(m=1)) is not None  # used again
    size = store.path(GPU, ENVIRONMENT, problem(m=1)).stat().st_size
    files = [store.path(GPU, ENVIRONMENT, problem(m=m)) for m in range(1, 11)]
    assert evict(store.root, sum(file.stat().st_size for file in files), nothing) == 0
    # Down to nine tenths: five records fit into 6.0 x 0.9.
    assert evict(store.root, 6 * size, nothing) == 5
    assert kept(store) == [1, 7, 8, 9, 10]
    assert evict(store.root, 6 * size, nothing) == 0


def test_new_records_and_held_records_stay(store: CacheStore) -> None:
    for m in (1, 2, 3):
        saved(store, m, days=9)
    aged(store.path(GPU, ENVIRONMENT, problem(m=1)), 5)  # by another process, seconds ago
    held = store.path(GPU, ENVIRONMENT, problem(m=2))
    with CacheStore().lock(GPU, ENVIRONMENT, problem(m=3), timeout=0):
        pass
    lock = Path(f"{store.path(GPU, ENVIRONMENT, problem(m=3))}.lock")
    assert lock.exists()
    assert evict(store.root, 1, held.__eq__) == 1
    assert not lock.exists()
    assert kept(store) == [1, 2]


def test_a_record_used_between_the_scan_and_the_removal_stays(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(store, 1, days=9)
    real = size_limits._evictable

    def used_since(root: Path) -> list[size_limits._File]:
        files = list(real(root))
        os.utime(path)
        return files

    monkeypatch.setattr(size_limits, "_evictable", used_since)
    assert evict(store.root, 1, nothing) == 0
    assert kept(store) == [1]


def test_files_that_are_not_the_caches_are_not_evicted(store: CacheStore, tmp_path: Path) -> None:
    below = CacheStore(tmp_path / "below", [])
    saved(below, 1, days=99)
    folder = saved(store, 1, days=9).parent
    (store.root / VERSION / "linked").symlink_to(below.root / VERSION / GPU)
    mine = [folder / "mine.json", store.root / VERSION / "models" / "0.json", store.root / "x.json"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        aged(path, 99 * DAY)
    assert evict(store.root, 1, nothing) == 1
    assert all(path.read_text() == "mine" for path in mine)
    assert kept(below) == [1]


def test_records_of_an_older_schema_and_old_notes_are_counted_and_go(store: CacheStore) -> None:
    older = store.root / "v0" / GPU / ("0" * 16) / f"{'1' * 16}.json"
    older.parent.mkdir(parents=True)
    older.write_text("{}" * 500)
    Notes("able", None, store.root).add("x", "y" * 1000)
    (notes,) = (store.root / "notes").iterdir()
    for path in (older, notes):
        aged(path, 99 * DAY)
    saved(store, 1, days=1)
    assert evict(store.root, 1500, nothing) >= 2
    assert not older.exists()
    assert not notes.exists()


def test_a_time_in_the_future_does_not_keep_a_record(store: CacheStore) -> None:
    ahead = saved(store, 1, days=-400)
    saved(store, 2, days=9)
    size = ahead.stat().st_size
    assert evict(store.root, int(1.9 * size), nothing) == 1
    assert kept(store) == [1]
    assert evict(store.root, size // 2, nothing) == 1
    assert kept(store) == []


def test_the_first_save_evicts(store: CacheStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for m in range(1, 7):
        saved(store, m, days=9)
    size = store.path(GPU, ENVIRONMENT, problem(m=1)).stat().st_size
    monkeypatch.setenv("TMM_CACHE_MAX_SIZE", str(4 * size))
    looks, real = [], size_limits.evict
    monkeypatch.setattr(size_limits, "evict", lambda *a: looks.append(a) or real(*a))
    fresh = CacheStore()
    fresh.hold(GPU, ENVIRONMENT, record(problem(m=5)))
    assert fresh.save(GPU, ENVIRONMENT, record(problem(m=99))) is not None
    # 3.6 records fit; one is held and one was just saved.
    assert len(kept(store)) == 3
    assert {5, 99} <= set(kept(store))
    assert len(looks) == 1


def test_loading_never_scans_the_root(store: CacheStore) -> None:
    saved(store, 1, days=9)
    code = (
        "import sys; from cache_builders import *; from tmm_cache import CacheStore\n"
        "assert CacheStore().load(GPU, ENVIRONMENT, problem(m=1))\n"
        "print({'tmm_cache.size_limits', 'tmm_cache.commands'} & {*sys.modules})"
    )
    assert child("-c", code).communicate()[0] == "set()\n"


def left(folder: Path, writer: int, seconds: float, name: str = "0" * 16) -> Path:
    path = folder / f"{name}.json.{writer}-0123abcd.tmp"
    path.write_text("{")
    return aged(path, seconds)


def test_a_save_removes_files_of_killed_processes(store: CacheStore) -> None:
    folder = saved(store, 1, days=0).parent
    dead = a_dead_process()
    gone = [
        left(folder, dead, 3700),
        left(folder, dead, 3700, "environment"),
        left(folder, 2**70, 3700),  # no process can have this number
        left(folder, os.getpid(), 3700),  # the number may have been reused
    ]
    stays = [left(folder, dead, 3500, "1" * 16), folder]
    foreign = folder / "editor.tmp"
    foreign.write_text("")
    aged(foreign, 99 * DAY)
    CacheStore().save(GPU, ENVIRONMENT, record(problem(m=2)))
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in (*stays, foreign))


def test_a_folder_is_swept_once_per_process(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = []
    monkeypatch.setattr(size_limits, "leftovers", lambda folder: swept.append(folder) or [])
    for m in range(1, 4):
        store.save(GPU, ENVIRONMENT, record(problem(m=m)))
        store.save("nvidia-a100", ENVIRONMENT, record(problem(m=m)))
    assert len(swept) == len(set(swept)) == 2


def test_sweeping_an_absent_folder_is_not_a_fault(tmp_path: Path) -> None:
    assert leftovers(tmp_path / "absent") == []
