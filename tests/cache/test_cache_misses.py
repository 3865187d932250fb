"""The log of problems that were met where tuning was forbidden."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from cache_builders import ENVIRONMENT, GPU, OLDER_ENVIRONMENT, child, problem, record, warned
from tmm_cache import CacheStore, Miss, Notes

LOGGER = """
import sys
from cache_builders import *
from tmm_cache import CacheStore
sys.stdin.readline()
store = CacheStore()
for m in range(200):
    store.log_miss(GPU, ENVIRONMENT, problem(m=m))
    store.log_miss(GPU, ENVIRONMENT, problem(m=m))
"""


@pytest.fixture
def log(store: CacheStore) -> Path:
    return Notes("misses", None, store.root).path


def logged(store: CacheStore) -> list[object]:
    return [miss.problem["m"] for miss in store.misses()]


def test_a_miss_has_the_problem_the_gpu_and_the_environment(store: CacheStore) -> None:
    store.log_miss(GPU, ENVIRONMENT, problem())
    assert store.misses() == [Miss(GPU, ENVIRONMENT, problem())]


def test_a_problem_is_logged_once_by_all_stores(store: CacheStore) -> None:
    for _ in range(3):
        store.log_miss(GPU, ENVIRONMENT, problem(m=1))
    store.log_miss(GPU, ENVIRONMENT, problem(m=2))
    CacheStore().log_miss(GPU, ENVIRONMENT, dict(reversed(problem(m=1).items())))
    assert logged(store) == [1, 2]


def test_each_gpu_and_environment_has_its_own_misses(store: CacheStore) -> None:
    store.log_miss(GPU, ENVIRONMENT, problem())
    store.log_miss(GPU, OLDER_ENVIRONMENT, problem())
    store.log_miss("nvidia-a100", ENVIRONMENT, problem())
    found = [(miss.gpu, miss.environment) for miss in store.misses()]
    assert len(found) == 3
    assert found[2] == ("nvidia-a100", ENVIRONMENT)
    assert (GPU, OLDER_ENVIRONMENT) in found


@pytest.mark.parametrize("keep", [1, 10, 40])
def test_a_torn_last_line_is_not_a_fault_and_swallows_nothing(
    store: CacheStore, log: Path, keep: int
) -> None:
    store.log_miss(GPU, ENVIRONMENT, problem(m=1))
    whole = len(log.read_bytes())
    store.log_miss(GPU, ENVIRONMENT, problem(m=2))
    log.write_bytes(log.read_bytes()[: whole + keep])
    assert logged(store) == [1]
    CacheStore().log_miss(GPU, ENVIRONMENT, problem(m=3))
    assert logged(store) == [1, 3]


@pytest.mark.parametrize(
    "line", ["[]", '["x", 3]', '["x", {"other": {}}]', "\\xff", '["x", {"problem": {"m": NaN}}]']
)
def test_lines_that_are_not_misses_are_skipped(store: CacheStore, log: Path, line: str) -> None:
    store.log_miss(GPU, ENVIRONMENT, problem(m=1))
    with log.open("a") as file:
        file.write(f"\n{line}")
    CacheStore().log_miss(GPU, ENVIRONMENT, problem(m=2))
    assert logged(store) == [1, 2]


def test_a_problem_with_a_record_is_not_a_miss(store: CacheStore) -> None:
    for m in (1, 2):
        store.log_miss(GPU, ENVIRONMENT, problem(m=m))
    store.log_miss("nvidia-a100", ENVIRONMENT, problem(m=1))
    store.log_miss(GPU, OLDER_ENVIRONMENT, problem(m=1))
    store.save(GPU, ENVIRONMENT, record(problem(m=1)))
    assert logged(store) == [2, 1, 1]


def test_misses_are_the_roots_own(store: CacheStore, tmp_path: Path) -> None:
    below = CacheStore(tmp_path / "below", [])
    below.log_miss(GPU, ENVIRONMENT, problem())
    assert CacheStore(layers=[below.root]).misses() == []


def test_processes_append_without_losing_or_tearing_a_line(store: CacheStore) -> None:
    loggers = [child("-c", LOGGER) for _ in range(3)]
    for logger in loggers:
        assert logger.stdin is not None
        logger.stdin.write("go\n")
        logger.stdin.flush()
    for logger in loggers:
        assert logger.communicate() == ("", "")
    assert sorted(logged(store)) == [*range(200)]


def test_a_miss_that_a_full_disk_refused_is_noted_with_the_next(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store.log_miss(GPU, ENVIRONMENT, problem(m=0))
    with monkeypatch.context() as patch, warned("cannot be written"):
        patch.setattr(os, "write", full)
        for m in (1, 2):
            store.log_miss(GPU, ENVIRONMENT, problem(m=m))
    assert logged(store) == [0]
    store.log_miss(GPU, ENVIRONMENT, problem(m=1))
    assert logged(store) == [0, 1, 2]
    store.log_miss(GPU, ENVIRONMENT, problem(m=3))
    assert logged(store) == [0, 1, 2, 3]
    notes = Notes("misses", None, store.root)
    assert notes.path.read_bytes().count(b"\n") == 4
    write = os.write

    def half(*given: Any) -> int:
        """Another thread's note is refused, while this one is written."""
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            notes.add("other", 1)
        monkeypatch.setattr(os, "write", write)
        return write(*given)

    monkeypatch.setattr(os, "write", half)
    notes.add("mine", 1)
    notes.add("mine", 2)
    assert Notes("misses", None, store.root).get("other") == 1


def test_an_unreadable_log_is_a_warning(store: CacheStore, log: Path) -> None:
    log.mkdir(parents=True)
    assert store.misses() == []
    with warned(r"notes/misses-[0-9a-f]{64}\.jsonl cannot be written"):
        store.log_miss(GPU, ENVIRONMENT, problem())
