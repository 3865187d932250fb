"""Neighbours: ranked by heads of files, read one at a time, and nothing a file says raises."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import DEVICE, FakeBlas, FakeKernel, dispatcher, problem, settings
from msgspec.structs import replace as revised
from tmm_cache import CacheStore, CacheWarning, CandidateResult, TuningRecord, digest

from tmm_core.dispatch.neighbour import Neighbours
from tmm_core.spec.problem import Problem


def record(of: Problem, **changes: Any) -> TuningRecord:
    best = CandidateResult("fast", "1", {"tile": 2}, "ok", (9.0,))
    plain = TuningRecord(of.to_json(), 0, (best,), "2026-01-31T12:00:00Z", 1.0)
    return revised(plain, **changes)


def save(store: CacheStore, of: Problem, **changes: Any) -> Path:
    path = store.save(of.device.gpu, of.device.environment, record(of, **changes))
    assert path is not None
    return path


@pytest.fixture
def store(tmp_path: Path) -> CacheStore:
    return CacheStore(tmp_path, [])


def sizes(neighbours: Neighbours, problem: Problem) -> list[Any]:
    return [near.record.problem["m"] for near in neighbours.nearest(problem)]


def test_the_nearest_records_come_first_and_are_read_lazily(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for m in (256, 128, 64, 4096):
        save(store, problem(m=m))
    save(store, problem(m=100, tf32=True))
    save(store, problem(m=100, device=replace(DEVICE, torch="1")))
    read: list[Path] = []
    real = CacheStore.read
    monkeypatch.setattr(
        CacheStore, "read", lambda self, path: (read.append(path), real(self, path))[1]
    )
    found = Neighbours(store).nearest(problem(m=100))
    assert [next(found).record.problem["m"], len(read)] == [128, 1]
    assert [near.record.problem["m"] for near in found] == [64, 256, 100]


def test_a_save_adds_one_record_and_lists_nothing_again(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, problem(m=64))
    neighbours = Neighbours(store)
    new = record(problem(m=100))
    neighbours.add(DEVICE, new)  # before anything was listed: it is not yet on disk
    assert sizes(neighbours, problem(m=100)) == [64]
    monkeypatch.setattr(CacheStore, "summaries", lambda *_: pytest.fail("listed again"))
    for tuned in (new, revised(new, created="2026-02-02T00:00:00Z")):
        store.hold(DEVICE.gpu, DEVICE.environment, tuned)
        neighbours.add(DEVICE, tuned)
    (first, second) = neighbours.nearest(problem(m=100))
    assert first.record.created == "2026-02-02T00:00:00Z"
    assert second.record.problem["m"] == 64


def test_a_problem_that_a_dispatcher_tuned_is_a_neighbour_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = FakeKernel("fast", tiles=(1, 2))
    d, _ = dispatcher(FakeBlas(), fast, times={("fast", 2): 5.0, "blas": 20.0}, root=tmp_path)
    untuned = settings(on_cache_miss="heuristic")
    assert d.choose(problem(m=100), untuned).origin != "neighbour"
    monkeypatch.setattr(CacheStore, "summaries", lambda *_: pytest.fail("listed again"))
    d.tune(problem(m=128), settings())
    assert d.choose(problem(m=100), untuned).origin == "neighbour"


@pytest.mark.parametrize("nonsense", ["64", None, True, 0, -1, 1.5, 10**400, [], {}])
@pytest.mark.parametrize("size", ["m", "n", "k", "batch"])
def test_nonsense_in_a_problem_costs_its_record_and_one_warning(
    store: CacheStore, size: str, nonsense: Any
) -> None:
    save(store, problem(m=64))
    bad = save(store, problem(m=128))
    document = json.loads(bad.read_text())
    del document["checksum"]
    document["problem"][size] = nonsense
    bad.write_text(json.dumps(document))
    neighbours = Neighbours(store)
    with pytest.warns(CacheWarning, match=f"problem.{size}: Expected `int`") as caught:
        assert sizes(neighbours, problem(m=128)) == [64]
    assert len(caught) == 1
    assert sizes(neighbours, problem(m=128)) == [64]


def test_nonsense_in_other_fields_is_another_kind_of_problem(store: CacheStore) -> None:
    save(store, problem(m=64))
    for place, nonsense in enumerate([None, 7, "x", [], {"x": 1e300}]):
        odd = save(store, problem(m=65 + place))
        document = json.loads(odd.read_text())
        del document["checksum"]
        document["problem"]["a"] = nonsense
        odd.with_name(f"{digest(document['problem'])}.json").write_text(json.dumps(document))
        odd.unlink()
    assert len(list(store.summaries())) == 6
    assert sizes(Neighbours(store), problem(m=64)) == [64]


def test_a_record_with_an_infinite_number_is_passed_over(store: CacheStore) -> None:
    save(store, problem(m=64))
    odd = save(store, problem(m=65))
    odd.write_text(odd.read_text().replace('"m": 65', '"m": 65, "x": 1e999', 1))
    assert "1e999" in odd.read_text()
    with pytest.warns(CacheWarning, match="is not a valid record"):
        assert sizes(Neighbours(store), problem(m=64)) == [64]


def test_a_record_that_is_damaged_at_its_end_is_passed_over(store: CacheStore) -> None:
    save(store, problem(m=64))
    near = save(store, problem(m=128))
    near.write_text(near.read_text()[:-30])
    with pytest.warns(CacheWarning, match="is not a valid record"):
        assert sizes(Neighbours(store), problem(m=128)) == [64]


def test_an_interrupted_listing_is_repeated(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of the records would be taken for all."""
    for m in (64, 128):
        save(store, problem(m=m))
    neighbours, real = Neighbours(store), store.problems

    def interrupted() -> Iterator[Any]:
        yield next(iter(real()))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "problems", interrupted)
        with pytest.raises(KeyboardInterrupt):
            neighbours.families()
    assert sizes(neighbours, problem(m=100)) == [128, 64]
