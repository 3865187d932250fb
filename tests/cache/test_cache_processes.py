"""Tests several processes on one cache, and processes that die while they use it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import filelock
import pytest
from cache_builders import ENVIRONMENT, GPU, child, mark_of, problem, record, warned
from tmm_cache import CacheStore, Notes, locks
from tmm_cache import store as store_module
from tmm_cache.locks import acquire

WRITER = """
import itertools
from cache_builders import *
from tmm_cache import CacheStore
store = CacheStore()
for turn in itertools.count():
    samples = tuple(float(i) for i in range(turn % 7 * 500 + 1))
    winner = CandidateResult("blas", "b", {}, "ok", samples)
    for m in range(1, 6):
        store.save(GPU, ENVIRONMENT, record(problem(m=m), candidates=(winner,), winner=0))
        store.log_miss(GPU, ENVIRONMENT, problem(m=turn * 5 + m))
"""

HOLDER = """
import sys
from cache_builders import *
from tmm_cache import CacheStore
with CacheStore().lock(GPU, ENVIRONMENT, problem(), timeout=5) as mine:
    print(mine, flush=True)
    sys.stdin.readline()
"""

TUNER = """
import os, sys, time
from cache_builders import *
from tmm_cache import CacheStore
store = CacheStore()
sys.stdin.readline()
with store.lock(GPU, ENVIRONMENT, problem(), timeout=20) as mine:
    assert mine
    if store.load(GPU, ENVIRONMENT, problem()) is None:
        print("tuned")
        time.sleep(0.2)
        store.save(GPU, ENVIRONMENT, record())
"""

SAVER = """
import sys
from cache_builders import *
from tmm_cache import CacheStore
store = CacheStore()
sys.stdin.readline()
for turn in range(20):
    for m in range(1, 9):
        assert store.save(GPU, ENVIRONMENT, record(problem(m=m), mark=sys.argv[1])) is not None
"""


@pytest.mark.parametrize("timeout", [0.0, 2.0])
def test_a_lock_that_an_exception_interrupts_is_free(
    timeout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is free even while the exception is held, as an interactive Python does."""
    acquired = filelock.FileLock.acquire

    def interrupted(lock: filelock.FileLock, timeout: float) -> None:
        acquired(lock, timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr(filelock.FileLock, "acquire", interrupted)
    with pytest.raises(KeyboardInterrupt) as held:
        acquire(tmp_path / "lock", timeout)
    monkeypatch.undo()
    assert held.value is not None
    lock = acquire(tmp_path / "lock")
    assert lock is not None
    lock.release()


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_every_record_whole(store: CacheStore) -> None:
    store.save(GPU, ENVIRONMENT, record(problem(m=99)))
    folder = store.path(GPU, ENVIRONMENT, problem()).parent
    chance = random.Random(20260131)
    for _ in range(12 if os.environ.get("TMM_ENDURANCE") else 5):
        writer = child("-c", WRITER)
        last = store.path(GPU, ENVIRONMENT, problem(m=5))
        before = last.stat().st_mtime_ns if last.exists() else 0
        deadline = time.monotonic() + 20
        while (
            not last.exists() or last.stat().st_mtime_ns == before
        ) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.02))
        writer.kill()
        _, complaints = writer.communicate()
        assert complaints == ""
        assert last.stat().st_mtime_ns != before
        for path in folder.glob("*.json"):
            json.loads(path.read_bytes())
        # Warnings are errors: every record is whole, and each problem's is its own.
        assert sorted(str(entry.record.problem["m"]) for entry in store.summaries()) == [
            "1",
            "2",
            "3",
            "4",
            "5",
            "99",
        ]
        assert store.load(GPU, ENVIRONMENT, problem(m=99)) == record(problem(m=99))
        assert len(Notes("misses", None, store.root).values()) >= 5


@pytest.mark.slow
def test_processes_that_save_the_same_records_never_show_a_torn_one(store: CacheStore) -> None:
    savers = [child("-c", SAVER, f"saver {number}") for number in range(3)]
    for saver in savers:
        assert saver.stdin is not None
        saver.stdin.write("go\n")
        saver.stdin.flush()
    seen = set()
    while any(saver.poll() is None for saver in savers):
        for m in range(1, 9):
            found = store.load(GPU, ENVIRONMENT, problem(m=m))  # a warning would be an error
            if found is not None:
                assert found == record(problem(m=m), mark=mark_of(found))
                seen.add(mark_of(found))
    for saver in savers:
        assert saver.communicate() == ("", "")
        assert saver.returncode == 0
    assert len(list(store.summaries())) == 8
    assert seen <= {"saver 0", "saver 1", "saver 2"}
    assert [path.name for path in store.root.rglob("*.tmp")] == []


def test_a_lock_that_another_process_holds_is_waited_for(store: CacheStore) -> None:
    holder = child("-c", HOLDER)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    start = time.monotonic()
    with store.lock(GPU, ENVIRONMENT, problem(), timeout=0.3) as mine:
        assert mine is False
    assert 0.25 < time.monotonic() - start < 15
    with store.lock(GPU, ENVIRONMENT, problem(m=2), timeout=0) as mine:
        assert mine is True  # another problem's lock is another lock
    release = threading.Timer(0.2, lambda: holder.communicate("\n"))
    release.start()
    with store.lock(GPU, ENVIRONMENT, problem(), timeout=20) as mine:
        assert mine is True
    release.join()


def test_a_killed_process_leaves_no_lock_behind(store: CacheStore) -> None:
    holder = child("-c", HOLDER)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    holder.kill()
    holder.communicate()
    with store.lock(GPU, ENVIRONMENT, problem(), timeout=5) as mine:
        assert mine is True


def test_only_one_of_many_processes_tunes(store: CacheStore) -> None:
    tuners = [child("-c", TUNER) for _ in range(4)]
    for tuner in tuners:
        assert tuner.stdin is not None
        tuner.stdin.write("go\n")
        tuner.stdin.flush()
    answers = [tuner.communicate() for tuner in tuners]
    assert sorted(printed for printed, _ in answers) == [""] * 3 + ["tuned\n"]
    # On a loaded machine one may say that it waits.
    waiting = "waiting for another process that tunes this problem\n"
    assert {said for _, said in answers} <= {"", waiting}


def test_threads_of_one_process_exclude_each_other(store: CacheStore) -> None:
    with store.lock(GPU, ENVIRONMENT, problem(), timeout=0) as mine:
        assert mine is True
        found = []

        def other() -> None:
            with store.lock(GPU, ENVIRONMENT, problem(), timeout=0) as also:
                found.append(also)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert found == [False]


@pytest.mark.parametrize(
    "error", [RuntimeError("tuner"), OSError(errno.ENOSPC, "tuner"), TimeoutError("tuner")]
)
def test_an_error_inside_the_lock_comes_through_and_frees_it(
    store: CacheStore, error: Exception
) -> None:
    def tune() -> None:
        with store.lock(GPU, ENVIRONMENT, problem(), timeout=0) as mine:
            assert mine is True
            raise error

    for _ in range(2):
        with pytest.raises(type(error), match="tuner"):
            tune()


def test_the_lock_is_given_back_and_not_left_to_the_garbage_collector(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def kept(path: Path, timeout: float) -> Any:
        made.append(acquire(path, timeout))
        return made[-1]

    monkeypatch.setattr(store_module, "acquire", kept)
    for _ in range(2):
        with store.lock(GPU, ENVIRONMENT, problem(), timeout=0) as mine:
            assert mine is True
            assert made[-1].is_locked
        assert not made[-1].is_locked


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_a_timeout_must_be_a_number_of_seconds(store: CacheStore, timeout: float) -> None:
    with (
        pytest.raises(ValueError, match="timeout: found"),
        store.lock(GPU, ENVIRONMENT, problem(), timeout),
    ):
        pass


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        (errno.ENOLCK, "two processes may tune"),
        (errno.ENOSYS, "two processes may tune"),
        (errno.EIO, "two processes may tune"),
        (errno.ESTALE, "two processes may tune"),
        (errno.EPERM, "two processes may tune"),
        (errno.EROFS, "unwritten records are lost"),
    ],
)
def test_where_no_lock_can_be_had_one_tunes_without(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch, code: int, complaint: str
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with warned(complaint) as caught:
        for m in (1, 2):
            with store.lock(GPU, ENVIRONMENT, problem(m=m), timeout=0) as mine:
                assert mine is True
                assert store.save(GPU, ENVIRONMENT, record(problem(m=m))) is not None
    assert [str(warning.message).split(":")[0] for warning in caught] == [str(store.root)]
    assert ("lost" in str(caught[0].message)) is (code == errno.EROFS)


def test_a_folder_in_the_place_of_a_lock_costs_the_lock_alone(store: CacheStore) -> None:
    path = store.path(GPU, ENVIRONMENT, problem())
    path.with_name(f"{path.name}.lock").mkdir(parents=True)
    with (
        warned(f"{path.name}.lock cannot be locked .*; two processes may tune") as caught,
        store.lock(GPU, ENVIRONMENT, problem(), timeout=0) as mine,
    ):
        assert mine is True
        assert store.save(GPU, ENVIRONMENT, record()) == path
    assert "lost" not in str(caught[0].message)


def test_a_folder_that_can_hold_no_file_does_not_look_like_another_process(
    store: CacheStore,
) -> None:
    """Such as a link to /proc/self: filelock waits for a file that cannot be made."""
    folder = store.path(GPU, ENVIRONMENT, problem()).parent
    folder.parent.mkdir(parents=True)
    folder.symlink_to("/proc/self")
    with (
        warned("two processes may tune"),
        store.lock(GPU, ENVIRONMENT, problem(), timeout=0) as mine,
    ):
        assert mine is True


def test_a_lock_and_a_record_that_both_fail_cost_one_warning(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    with (
        warned("unwritten records are lost"),
        store.lock(GPU, ENVIRONMENT, problem(), timeout=0),
    ):
        assert store.save(GPU, ENVIRONMENT, record()) is None


@pytest.mark.slow
def test_a_long_wait_is_logged_once_in_a_process(
    store: CacheStore, caplog: pytest.LogCaptureFixture
) -> None:
    locks._log_wait.cache_clear()
    holder = child("-c", HOLDER)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    with store.lock(GPU, ENVIRONMENT, problem(), timeout=0.5) as mine:
        assert mine is False
    assert caplog.messages == []
    for _ in range(2):
        with store.lock(GPU, ENVIRONMENT, problem(), timeout=1.1) as mine:
            assert mine is False
    assert caplog.messages == ["waiting for another process that tunes this problem"]
    holder.communicate("\n")


def test_a_lock_whose_file_was_removed_is_another_lock(store: CacheStore) -> None:
    """A process that waits with the old file open would share the problem with one that makes a new
    file."""
    path = Path(f"{store.path(GPU, ENVIRONMENT, problem())}.lock")
    path.parent.mkdir(parents=True)
    real = fcntl.flock

    def removed_first(handle: int, how: int) -> None:
        path.unlink(missing_ok=True)
        fcntl.flock = real
        real(handle, how)

    fcntl.flock = removed_first
    try:
        first = acquire(path, timeout=1)
    finally:
        fcntl.flock = real
    assert first is not None
    assert path.exists()
    assert acquire(path, timeout=0) is None
    first.release()
