"""`clear` removes the files of the records that its filters select, and no others."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cache_builders import ENVIRONMENT, GPU, made, problem, record
from tmm_cache import CacheStore
from tmm_cache.cli import main
from tmm_cache.commands.filters import Filter

NOW = datetime(2026, 1, 31, tzinfo=timezone.utc)
#: A value of each field that no record has.
NOTHING: dict[str, Any] = {
    "gpu": "no-such",
    "kernel": "no.such",
    "dtype": "fp64",
    "shape": (1, None, None),
    "epilogue": "no_such",
    "before": datetime(2000, 1, 1, tzinfo=timezone.utc),
    "after": datetime(2100, 1, 1, tzinfo=timezone.utc),
}
#: Days since each of these records was made; its M is their number.
AGES = (0, 1, 10, 29, 31, 400)


@pytest.fixture
def aged(store: CacheStore) -> CacheStore:
    """A record of each age, and a miss."""
    for days in AGES:
        # An hour, so that a test may take its time.
        ago = timedelta(days=days, hours=1)
        store.save(GPU, ENVIRONMENT, record(problem(m=1000 + days), created=made(ago)))
    store.log_miss(GPU, ENVIRONMENT, problem(m=77))
    return store


def left(store: CacheStore) -> list[int]:
    """The ages of the records whose files are still there."""
    fresh = CacheStore(store.root, [])
    return sorted(int(str(entry.record.problem["m"])) - 1000 for entry in fresh.entries())


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--older-than", "30d"], [0, 1, 10, 29]),
        (["--older-than", "1w"], [0, 1]),
        (["--older-than", "500d"], list(AGES)),
        (["--newer-than", "30d"], [31, 400]),
        (["--newer-than", "30m"], list(AGES)),
        (["--older-than", "5d", "--newer-than", "30d"], [0, 1, 31, 400]),
        (["--older-than", "30d", "--shape", "1400x*x*"], [0, 1, 10, 29, 31]),
        (["--older-than", "30d", "--kernel", "no.such"], list(AGES)),
    ],
    ids=str,
)
def test_an_age_alone_names_what_goes(
    aged: CacheStore, options: list[str], kept: list[int]
) -> None:
    main(["clear", "-y", *options])
    assert left(aged) == kept
    # Who asks for records by age does not ask for everything else.
    assert len(CacheStore(aged.root, []).misses()) == 1


def test_without_a_filter_everything_goes(aged: CacheStore) -> None:
    assert main(["clear", "-y"]) == 0
    assert left(aged) == []
    assert CacheStore(aged.root, []).misses() == []


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Filter)])
def test_each_filter_by_itself_is_one(name: str, aged: CacheStore) -> None:
    assert Filter().is_empty
    wanted = Filter(**{name: NOTHING[name]})
    assert not wanted.is_empty
    entries = list(aged.entries())
    assert all(map(Filter(), entries))
    assert not any(map(wanted, entries))


def test_what_matches_nothing_removes_nothing(aged: CacheStore, root: Path) -> None:
    before = sorted(root.rglob("*"))
    for option, value in {
        "--gpu": "no-such",
        "--kernel": "no.such",
        "--dtype": "fp64",
        "--shape": "1x*x*",
        "--epilogue": "no_such",
        "--older-than": "9999d",
        "--newer-than": "1s",
    }.items():
        main(["clear", "-y", option, value])
        assert sorted(root.rglob("*")) == before, option
