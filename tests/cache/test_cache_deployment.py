"""Freeze, diff and merge: what a deployment carries, what differs, whose evidence is kept."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_builders import (
    BLAS,
    ENVIRONMENT,
    GPU,
    OLDER_ENVIRONMENT,
    SPLIT_K,
    problem,
    record,
    warned,
)
from tmm_cache import CacheStore, CandidateResult, Difference
from tmm_cache.cli import main
from tmm_cache.files import Stored
from tmm_cache.merge import merged

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CacheStore:
    """A layer below the user's own root."""
    layer = tmp_path / "below"
    monkeypatch.setenv("TMM_CACHE_PATH", str(layer))
    return CacheStore(layer, [])


def locked(monkeypatch: pytest.MonkeyPatch, value: str = "1") -> CacheStore:
    monkeypatch.setenv("TMM_REQUIRE_LOCKED", value)
    return CacheStore()


def test_what_is_frozen_answers_alone(
    store: CacheStore, below: CacheStore, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    store.save(GPU, ENVIRONMENT, record(note="own"))
    below.save(GPU, ENVIRONMENT, record(note="below"))
    below.save(GPU, ENVIRONMENT, record(problem(m=2)))
    below.save(GPU, ENVIRONMENT, record(problem(m=3), clock="alone"))
    assert main(["freeze"]) == 0
    assert "2 records locked in" in capsys.readouterr().err
    below.save(GPU, ENVIRONMENT, record(problem(m=4)))
    deployed = locked(monkeypatch)
    assert deployed.locked
    found = deployed.locate(GPU, ENVIRONMENT, problem())
    assert found is not None
    assert found.record == record(note="own").thinned()
    assert (found.path, found.own, found.sealed) == (store.root / "tmm.lock.json", False, True)
    assert deployed.load(GPU, ENVIRONMENT, problem(m=2)) is not None
    # Neither what was added since, nor a hint, nor what this process holds.
    deployed.hold(GPU, ENVIRONMENT, record(problem(m=5)))
    assert [deployed.load(GPU, ENVIRONMENT, problem(m=m)) for m in (3, 4, 5)] == [None] * 3
    assert deployed.load(GPU, OLDER_ENVIRONMENT, problem()) is None


def test_a_lock_file_lies_where_it_is_told_and_is_the_same_each_time(
    store: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for m in (2, 1):
        store.save(GPU, ENVIRONMENT, record(problem(m=m)))
    store.save("nvidia-a100", ENVIRONMENT, record())
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert main(["freeze", "-o", str(one), "--gpu", "nvidia-h*"]) == 0
    monkeypatch.setenv("TMM_LOCK_FILE", str(two))
    assert main(["freeze", "--gpu", "nvidia-h*"]) == 0
    assert one.read_bytes() == two.read_bytes()
    assert locked(monkeypatch).load(GPU, ENVIRONMENT, problem(m=1)) is not None
    assert CacheStore().load("nvidia-a100", ENVIRONMENT, problem()) is None
    assert main(["freeze", "-o", "/dev/null"]) == 2


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_a_lock_that_is_required_and_absent_is_told_once_and_answers_nothing(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    deployed = locked(monkeypatch, value)
    with warned("there is no such file"):
        assert deployed.load(GPU, ENVIRONMENT, problem()) is None
    assert deployed.load(GPU, ENVIRONMENT, problem()) is None
    assert deployed.nearest_key(GPU, ENVIRONMENT, problem()) is None
    assert not locked(monkeypatch, "0").locked


def spoiled(document: Any, how: str) -> Any:
    if how == "winner":
        document["records"][0]["record"]["winner"] = 0
    elif how == "lock":
        document["lock"] = 2
    elif how == "records":
        document["records"] = {}
    elif how == "climbs":
        document["records"][0]["gpu"] = "../.."
    elif how == "problem":
        del document["records"][0]["record"]["problem"]
    else:
        return {"list": [], "number": 7}[how]
    return document


@pytest.mark.parametrize(
    "how", ["winner", "lock", "records", "climbs", "problem", "list", "number", "torn", "empty"]
)
def test_a_damaged_lock_file_is_told_once_and_answers_nothing(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    assert main(["freeze"]) == 0
    file = store.root / "tmm.lock.json"
    text = file.read_text()
    if how in ("torn", "empty"):
        file.write_text(text[:-9] if how == "torn" else "")
    else:
        file.write_text(json.dumps(spoiled(json.loads(text), how)))
    deployed = locked(monkeypatch)
    with warned("is not a lock file"):
        assert deployed.load(GPU, ENVIRONMENT, problem()) is None


def test_a_bad_record_in_a_lock_file_with_a_right_checksum_costs_itself(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tmm_cache.files import sealed

    for m in (1, 2):
        store.save(GPU, ENVIRONMENT, record(problem(m=m)))
    assert main(["freeze"]) == 0
    file = store.root / "tmm.lock.json"
    document = json.loads(file.read_text())
    del document["checksum"]
    first = document["records"][0]["record"]
    first["winner"] = 99
    file.write_bytes(sealed(document))
    good = 3 - first["problem"]["m"]
    deployed = locked(monkeypatch)
    with warned("winner: found 99"):
        assert deployed.load(GPU, ENVIRONMENT, problem(m=3 - good)) is None
    assert deployed.load(GPU, ENVIRONMENT, problem(m=good)) is not None


def test_the_nearest_key_is_told_field_by_field(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.nearest_key(GPU, ENVIRONMENT, problem()) is None
    for m in (64, 4096):
        store.save(GPU, ENVIRONMENT, record(problem(m=m)))
    store.save(GPU, ENVIRONMENT, record(problem(epilogue="gelu")))
    store.save("nvidia-a100", ENVIRONMENT, record())
    assert main(["freeze"]) == 0
    for asked in (store, locked(monkeypatch)):
        near = asked.nearest_key(GPU, ENVIRONMENT, problem(m=100))
        assert near is not None
        assert (near.gpu, near.problem) == (GPU, problem(m=64))
        assert near.differences == (Difference("m", 100, 64),)
        assert str(near.differences[0]) == "m: asked 100, there 64"
        near = asked.nearest_key(GPU, OLDER_ENVIRONMENT, problem(m=64) | {"b": {"layout": "row"}})
        assert near is not None
        assert {str(each) for each in near.differences} == {
            "b.layout: asked row, there column",
            "b.dtype: asked nothing, there bfloat16",
            "b.aligned: asked nothing, there true",
            "environment.torch: asked 2.12.0, there 2.13.0",
        }
        same = asked.nearest_key("nvidia-a100", ENVIRONMENT, problem())
        assert same is not None
        assert same.differences == ()


def test_diff_tells_two_caches_apart(store: CacheStore, tmp_path: Path, capsys: Captured) -> None:
    other = CacheStore(tmp_path / "other", [])
    for each in (store, other):
        each.save(GPU, ENVIRONMENT, record(problem(m=1)))
    store.save(GPU, ENVIRONMENT, record(problem(m=2)))
    other.save(GPU, ENVIRONMENT, record(problem(m=3)))
    other.save("nvidia-a100", ENVIRONMENT, record(problem(m=1)))
    store.save(GPU, ENVIRONMENT, record(problem(m=4)))
    other.save(GPU, ENVIRONMENT, record(problem(m=4), winner=0))
    store.save(GPU, ENVIRONMENT, record(problem(m=5)))
    slower = replace(SPLIT_K, samples_us=(13.0,))
    other.save(GPU, ENVIRONMENT, record(problem(m=5), candidates=(BLAS, slower)))
    places = [str(store.root), str(other.root)]
    assert main(["diff", *places, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    told = {(each["gpu"], each["problem"]["m"]): each["difference"] for each in found}
    assert told == {
        (GPU, 2): "only in A",
        (GPU, 3): "only in B",
        ("nvidia-a100", 1): "only in B",
        (GPU, 4): "other winner",
        (GPU, 5): "other times",
    }
    (times,) = (each for each in found if each["problem"]["m"] == 5)
    assert (times["a"]["us"], times["b"]["us"]) == (11.5, 13.0)
    assert main(["diff", *places]) == 1
    captured = capsys.readouterr()
    assert captured.err.endswith("5 differences in 6 problems\n")
    (line,) = (line for line in captured.out.splitlines() if line.startswith("other winner"))
    assert "triton.split_k" in line.split("|")[0]
    assert "blas" in line.split("|")[1]


def test_a_lock_file_is_no_different_from_what_it_was_made_of(
    store: CacheStore, tmp_path: Path
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    assert main(["freeze"]) == 0
    lock = str(store.root / "tmm.lock.json")
    assert main(["diff", str(store.root), lock]) == 0
    store.save(GPU, ENVIRONMENT, record(problem(m=2)))
    assert main(["diff", str(store.root), lock]) == 1
    assert main(["diff", str(store.root), str(tmp_path / "absent")]) == 2


def test_merge_adds_what_is_missing_as_a_strangers(
    store: CacheStore, tmp_path: Path, capsys: Captured
) -> None:
    other = CacheStore(tmp_path / "other", [])
    other.save(GPU, ENVIRONMENT, record())
    other.save(GPU, ENVIRONMENT, record(problem(m=2), clock="alone"))
    store.save(GPU, ENVIRONMENT, record(problem(m=3)))
    other.save(GPU, ENVIRONMENT, record(problem(m=3)))
    lock = tmp_path / "lock.json"
    assert main(["--cache-dir", str(other.root), "freeze", "-o", str(lock)]) == 0
    capsys.readouterr()
    assert main(["merge", str(other.root), str(lock)]) == 0
    assert "1 record added to" in (said := capsys.readouterr().err)
    assert ", 0 changed, 3 kept as they were" in said
    found = store.locate(GPU, ENVIRONMENT, problem())
    assert found is not None
    assert (found.record, found.own, found.sealed) == (record(), False, True)
    mine = store.locate(GPU, ENVIRONMENT, problem(m=3))
    assert mine is not None
    assert mine.trusted
    assert [entry.record.problem["m"] for entry in store.entries()].count(2) == 0


def test_merge_of_a_damaged_record_notes_it_and_takes_the_others(
    store: CacheStore, tmp_path: Path, capsys: Captured
) -> None:
    other = CacheStore(tmp_path / "other", [])
    other.save(GPU, ENVIRONMENT, record(problem(m=1)))
    broken = other.save(GPU, ENVIRONMENT, record(problem(m=2)))
    assert broken is not None
    broken.write_text(broken.read_text()[:-30])
    assert main(["merge", str(other.root)]) == 1
    assert f"passed over {broken}" in capsys.readouterr().err
    assert [entry.record.problem["m"] for entry in store.entries()] == [1]


def timed(kernel: str, us: float, count: int = 3, version: str = "1", **more: Any) -> Any:
    config = more.pop("config", {})
    return CandidateResult(kernel, version, config, "ok", (us,) * count, **more)


OLD, NEW = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"


def of(*candidates: CandidateResult, winner: int = 0, created: str = OLD) -> Any:
    return record(candidates=candidates, winner=winner, created=created)


def test_merged_keeps_the_newer_version_of_a_kernel_and_all_others() -> None:
    mine = of(timed("blas", 20), timed("x", 10, version="1"), timed("mine", 15), winner=1)
    theirs = of(timed("blas", 20), timed("x", 12, version="2"), timed("theirs", 16), winner=1)
    newer = replace(theirs, created=NEW)
    both = merged(Stored(mine, True), Stored(newer, True))
    assert [(c.kernel, c.version) for c in both.candidates] == [
        ("blas", "1"),
        ("x", "2"),
        ("mine", "1"),
        ("theirs", "1"),
    ]
    assert (both.best.kernel, both.created) == ("x", NEW)
    older = merged(Stored(newer, True), Stored(mine, True))
    assert {(c.kernel, c.version) for c in older.candidates} == {
        (c.kernel, c.version) for c in both.candidates
    }
    assert older.best.version == "2"


def test_what_is_merged_with_itself_stays_as_it_is() -> None:
    one = of(timed("blas", 20), timed("x", 10), timed("y", 15), timed("x", 12, config={"t": 1}))
    again = of(*one.candidates)
    assert merged(Stored(one, True), Stored(again, True)) is one
    more = of(*one.candidates, timed("z", 14))
    assert merged(Stored(more, True), Stored(one, True)) is more
    assert merged(Stored(one, True), Stored(more, True)) is not one


def test_merged_takes_more_samples_and_a_seal_before_them() -> None:
    few, many = of(timed("blas", 20, 3)), of(timed("blas", 21, 9))
    assert merged(Stored(few, True), Stored(many, True)).best.median_us == 21
    assert merged(Stored(many, True), Stored(few, True)) is many
    assert merged(Stored(few, True), Stored(many, False)) is few
    assert merged(Stored(many, False), Stored(few, True)).best.median_us == 20


def test_merged_believes_wrong_before_any_time() -> None:
    mine = of(timed("blas", 20), timed("x", 5, 99), winner=1)
    theirs = of(timed("blas", 20), CandidateResult("x", "1", {}, "wrong", error=3.0))
    for one, two in ((mine, theirs), (theirs, mine)):
        both = merged(Stored(one, True), Stored(two, True))
        assert both.best.kernel == "blas"
        assert [c.status for c in both.candidates] == ["ok", "wrong"]


def test_merged_goes_by_the_winner_that_beats_its_own_blas_by_more() -> None:
    mine = of(timed("blas", 20), timed("x", 16), winner=1)
    # Of a machine that is slower altogether, where y beats BLAS by more than x does here.
    theirs = of(timed("blas", 40), timed("y", 20), winner=1)
    assert merged(Stored(mine, True), Stored(theirs, True)).best.kernel == "y"
    assert merged(Stored(theirs, True), Stored(mine, True)).best.kernel == "y"
    alike = of(timed("blas", 20), timed("y", 15.95), winner=1)
    assert merged(Stored(mine, True), Stored(alike, True)).best.kernel == "x"


def test_a_folder_that_cannot_be_looked_at_is_no_absent_one(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    store.save(GPU, OLDER_ENVIRONMENT, record())
    lost = store.path(GPU, OLDER_ENVIRONMENT, problem()).parent
    real = os.stat

    def failing(path: Any, *more: Any, **options: Any) -> Any:
        if path == lost:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *more, **options)

    monkeypatch.setattr(os, "stat", failing)
    assert main(["freeze"]) == 1
    said = capsys.readouterr().err
    assert f"passed over {lost}: cannot be looked at: " in said
    assert "1 record locked in" in said
