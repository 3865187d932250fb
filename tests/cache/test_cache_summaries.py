"""A list has every good record, of every layer, and reports each fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cache_builders import ENVIRONMENT, GPU, problem, record, warned
from msgspec.structs import replace
from tmm_cache import CacheStore
from tmm_cache.fault_warnings import warn_of
from tmm_cache.scan import briefs


def save_one_and_one_with(store: CacheStore, name: str, value: Any) -> None:
    """Save a record of M = 1, and another one that has this value in a field."""
    store.save(GPU, ENVIRONMENT, record(problem(m=1)))
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    document = json.loads(path.read_text())
    del document["checksum"]
    path.write_text(json.dumps(document | {name: value}))


def test_every_record_is_listed_once_held_ones_first(store: CacheStore, tmp_path: Path) -> None:
    below = CacheStore(tmp_path / "below", [])
    for m in (3, 1, 2):
        store.save(GPU, ENVIRONMENT, record(problem(m=m)))
    below.save("nvidia-a100", ENVIRONMENT, record(problem(m=9)))
    store = CacheStore(layers=[below.root])
    store.hold(GPU, ENVIRONMENT, record(problem(m=2), mark="held", winner=0))
    found = list(store.summaries())
    assert [each.record.problem["m"] for each in found[::3]] == [2, 9]
    assert sorted(str(each.record.problem["m"]) for each in found) == ["1", "2", "3", "9"]
    assert found[0].record.best.kernel == "blas"
    assert [each.path.name for each in store.summaries("nvidia-a100")] == [found[-1].path.name]
    assert [store.read(each.path) for each in found] == [each.record for each in found]


def test_a_file_whose_fields_are_in_another_order_is_read(store: CacheStore) -> None:
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    document = json.loads(path.read_text())
    del document["checksum"]
    path.write_text(json.dumps(dict(reversed(document.items())), indent=1))
    (summary,) = store.summaries()
    assert summary.record == record()


@pytest.mark.parametrize("name", ["best", "imported"])
def test_records_of_older_versions_are_ignored(store: CacheStore, name: str) -> None:
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    document = json.loads(path.read_text())
    del document["checksum"]
    path.write_text(json.dumps(document | {name: {"kernel": "k"}}))
    assert store.read(path) == record()


def test_a_record_removed_or_damaged_since_the_listing_is_none(store: CacheStore) -> None:
    paths = [store.save(GPU, ENVIRONMENT, record(problem(m=m))) for m in (1, 2)]
    assert None not in paths
    first, second = sorted(path for path in paths if path is not None)
    first.unlink()
    second.write_text(second.read_text()[:-20])
    with warned(f"{second}: is not a valid record"):
        assert [store.read(path) for path in (first, second)] == [None, None]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schema", 3),
        ("schema", None),
        ("problem", []),
        ("problem", problem() | {"m": "64"}),
        ("problem", problem() | {"m": None}),
        ("problem", problem() | {"m": 10**400}),
        ("problem", [[[]]] * 400),
        ("clock", 7),
        ("winner", 5),
        ("candidates", []),
        ("created", "2026-13-01T00:00:00Z"),
    ],
)
def test_a_broken_file_is_a_fault_and_the_rest_is_listed(
    store: CacheStore, name: str, value: Any
) -> None:
    save_one_and_one_with(store, name, value)
    with warned("is not a valid record"):
        assert [summary.record.problem["m"] for summary in store.summaries()] == [1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("schema", 3), ("clock", 7), ("problem", problem() | {"m": "64"}), ("winner", 5),
     ("candidates", [{"kernel": 1}])],
)  # fmt: skip
def test_fields_that_a_list_shows_are_checked(store: CacheStore, name: str, value: Any) -> None:
    save_one_and_one_with(store, name, value)
    with warned("is not a valid record"):
        assert [each.record.problem["m"] for each in briefs(store.root, warn_of)] == [1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("schema", 3), ("clock", 7), ("problem", problem() | {"m": "64"}), ("problem", [])],
)
def test_fields_that_a_search_for_neighbours_reads_are_checked(
    store: CacheStore, name: str, value: Any
) -> None:
    save_one_and_one_with(store, name, value)
    with warned("is not a valid record"):
        assert [each.record for each in store.problems()] == [problem(m=1)]


def test_a_list_shows_of_a_record_its_winner_and_blas(store: CacheStore) -> None:
    store.save(GPU, ENVIRONMENT, record())
    (found,) = briefs(store.root, warn_of)
    assert found.record == (problem(), "triton.split_k", 11.5, 21.0)
    assert found.record.speedup == record().speedup == 21.0 / 11.5


def test_problems_are_listed_of_held_records_too(store: CacheStore) -> None:
    store.save(GPU, ENVIRONMENT, record())
    store.save(GPU, ENVIRONMENT, record(problem(m=2)))
    store.hold(GPU, ENVIRONMENT, record(problem(m=2), mark="held"))
    store.hold(GPU, ENVIRONMENT, record(problem(m=1)))
    *held, found = (each.record for each in store.problems())
    assert sorted(each["m"] for each in held) == [1, 2]
    assert found == problem()


def test_the_summary_of_a_saved_record_equals_the_listed_one(store: CacheStore) -> None:
    store.save(GPU, ENVIRONMENT, record())
    assert [store.summary(GPU, ENVIRONMENT, record())] == list(store.summaries())


@pytest.mark.parametrize(
    ("us", "blas_us", "speedup"),
    [
        (2.0, 5.0, 2.5),
        (20.0, 0.0, 0.0),
        (0.0, 5.0, None),
        (None, 5.0, None),
        (2.0, None, None),
        (1e-300, 1e300, None),
    ],
)
def test_a_winner_that_was_not_timed_has_no_speedup(
    us: float | None, blas_us: float | None, speedup: float | None
) -> None:
    blas, best = (
        replace(each, samples_us=() if time is None else (time,))
        for each, time in zip(record().candidates, (blas_us, us), strict=False)
    )
    assert record(candidates=(blas, best), winner=1).speedup == speedup


@pytest.mark.parametrize("name", ["blas.faster", "blas.", "Blas"])
def test_a_kernel_whose_name_begins_like_blas_is_not_blas(store: CacheStore, name: str) -> None:
    """It would be compared with itself."""
    blas, best = record().candidates[:2]
    named = record(candidates=(blas, replace(best, kernel=name)))
    store.save(GPU, ENVIRONMENT, named)
    [brief] = briefs(store.root, pytest.fail)
    assert brief.record.speedup == named.speedup == 21.0 / 11.5
