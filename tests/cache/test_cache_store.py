"""A saved record is loaded from the nearest layer that has it, and only for its own problem."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import MappingProxyType

import pytest
from cache_builders import ENVIRONMENT, GPU, OLDER_ENVIRONMENT, mark_of, problem, record
from msgspec.structs import replace
from tmm_cache import CacheStore, CacheWarning, RecordError, Summary, TuningRecord, digest


def test_round_trip_leaves_one_readable_document(store: CacheStore) -> None:
    path = store.save(GPU, ENVIRONMENT, record())
    assert path == store.path(GPU, ENVIRONMENT, problem())
    assert store.load(GPU, ENVIRONMENT, problem()) == record()
    assert store.found(GPU, ENVIRONMENT, problem()) == path
    assert path is not None
    document = json.loads(path.read_text())
    assert (document["schema"], document["clock"]) == (2, "in use")
    assert list(document["problem"].items()) == list(problem().items())  # in the caller's order
    assert document["candidates"][1]["samples_us"] == [10.0, 14.0, 12.0, 11.0]
    environment = path.with_name("environment.json")
    assert json.loads(environment.read_text()) == ENVIRONMENT
    assert sorted(os.listdir(path.parent)) == sorted([path.name, "environment.json"])


def test_any_mapping_is_a_config(store: CacheStore) -> None:
    tuned = record()
    config = MappingProxyType({**tuned.best.config})
    candidates = list(tuned.candidates)
    candidates[tuned.winner] = replace(tuned.best, config=config)
    path = store.save(GPU, ENVIRONMENT, replace(tuned, candidates=tuple(candidates)))
    assert path is not None
    assert json.loads(path.read_text())["candidates"][1]["config"] == config


def test_a_root_may_be_below_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CacheStore(Path("~/records"), []).root == tmp_path / "records"


def test_nothing_is_made_before_the_first_save(store: CacheStore) -> None:
    assert store.load(GPU, ENVIRONMENT, problem()) is None
    assert store.found(GPU, ENVIRONMENT, problem()) is None
    assert list(store.summaries()) == []
    assert store.misses() == []
    assert not store.root.exists()


def test_folders_and_files_are_private_under_any_umask(store: CacheStore) -> None:
    previous = os.umask(0)
    try:
        path = store.save(GPU, ENVIRONMENT, record())
    finally:
        os.umask(previous)
    assert path is not None
    for folder in (store.root, store.root / "v2", path.parent.parent, path.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_another_problem_environment_or_gpu_is_a_miss(store: CacheStore) -> None:
    store.save(GPU, ENVIRONMENT, record())
    assert store.load(GPU, ENVIRONMENT, problem(m=129)) is None
    assert store.load(GPU, OLDER_ENVIRONMENT, problem()) is None
    assert store.load("nvidia-a100", ENVIRONMENT, problem()) is None
    reordered = dict(reversed(problem().items()))
    assert store.load(GPU, ENVIRONMENT, reordered) == record()


def test_saving_again_replaces_the_record_and_keeps_the_environment_file(store: CacheStore) -> None:
    first = store.save(GPU, ENVIRONMENT, record())
    assert first is not None
    marker = first.with_name("environment.json").stat().st_ino
    assert store.save(GPU, ENVIRONMENT, record(winner=0, mark=None)) == first
    assert store.load(GPU, ENVIRONMENT, problem()) == record(winner=0, mark=None)
    assert first.with_name("environment.json").stat().st_ino == marker


def test_a_record_that_would_not_read_back_is_refused_and_leaves_the_old_one(
    store: CacheStore,
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    for bad in (record(winner=2), record(winner=9), record(tuning_seconds=float("nan"))):
        with pytest.raises(RecordError):
            store.save(GPU, ENVIRONMENT, bad)
    assert store.load(GPU, ENVIRONMENT, problem()) == record()


@pytest.fixture
def layered(tmp_path: Path) -> tuple[CacheStore, CacheStore, CacheStore]:
    """A store over two layers, and stores that write into each of the layers."""
    near, far = tmp_path / "near", tmp_path / "far"
    return CacheStore(layers=[near, far]), CacheStore(near, []), CacheStore(far, [])


def test_root_comes_before_layers_and_near_before_far(
    layered: tuple[CacheStore, CacheStore, CacheStore],
) -> None:
    store, near, far = layered

    def answer() -> tuple[TuningRecord | None, Path | None]:
        return (
            store.load(GPU, ENVIRONMENT, problem()),
            store.found(GPU, ENVIRONMENT, problem()),
        )

    path = far.save(GPU, ENVIRONMENT, record(mark="far"))
    assert answer() == (record(mark="far"), path)
    path = near.save(GPU, ENVIRONMENT, record(mark="near"))
    assert answer() == (record(mark="near"), path)
    path = store.save(GPU, ENVIRONMENT, record(mark="own"))
    assert answer() == (record(mark="own"), path)
    assert far.load(GPU, ENVIRONMENT, problem()) == record(mark="far")


def test_saving_never_writes_to_a_layer(layered: tuple[CacheStore, CacheStore, CacheStore]) -> None:
    store, near, far = layered
    store.save(GPU, ENVIRONMENT, record())
    assert not near.root.exists()
    assert not far.root.exists()


def test_entries_are_of_all_layers_in_a_stable_order(
    layered: tuple[CacheStore, CacheStore, CacheStore],
) -> None:
    store, near, far = layered
    for m in (3, 1, 2):
        store.save(GPU, ENVIRONMENT, record(problem(m=m)))
    near.save(GPU, ENVIRONMENT, record(problem(m=1), mark="near"))
    far.save("nvidia-a100", OLDER_ENVIRONMENT, record(problem(m=9)))
    entries = list(store.summaries())
    assert entries == list(store.summaries())
    assert [entry.record for entry in entries] == [entry.record for entry in store.summaries()]
    assert [entry.root for entry in entries] == [store.root] * 3 + [near.root, far.root]
    assert sorted(entry.record.problem["m"] for entry in entries[:3]) == [1, 2, 3]  # type: ignore[type-var]
    assert [entry.path for entry in entries[:3]] == sorted(entry.path for entry in entries[:3])
    assert entries[3] == Summary(
        path=near.path(GPU, ENVIRONMENT, problem(m=1)),
        root=near.root,
        environment=ENVIRONMENT,
        record=record(problem(m=1), mark="near"),
    )
    assert (entries[3].gpu, entries[3].environment_digest) == (GPU, digest(ENVIRONMENT))
    assert entries[3].record == record(problem(m=1), mark="near")
    assert [entry.gpu for entry in store.summaries("nvidia-a100")] == ["nvidia-a100"]
    assert list(store.summaries("nvidia-b200")) == []


def test_files_of_others_and_other_schemas_are_passed_over_in_silence(store: CacheStore) -> None:
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    for other in (
        store.root / "README",
        store.root / "v3" / GPU / path.parent.name / path.name,
        store.root / "v2" / "README",
        store.root / "v2" / "Not A Slug" / path.parent.name / path.name,
        path.parent.parent / "notes" / path.name,
        path.with_name("notes.json"),
        path.with_name(f"{path.name}.123-0123abcd.tmp"),
        path.with_name(f"{path.name}.lock"),
    ):
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("not a record")
    assert [entry.path for entry in store.summaries()] == [path]


def test_a_held_record_answers_for_any_state_of_the_disk(store: CacheStore) -> None:
    store.hold(GPU, ENVIRONMENT, record(mark="held"))
    assert store.load(GPU, ENVIRONMENT, problem()) == record(mark="held")
    assert store.found(GPU, ENVIRONMENT, problem()) is None
    assert not store.root.exists()
    # Another process writes; this one keeps its record.
    path = CacheStore(store.root).save(GPU, ENVIRONMENT, record(mark="written"))
    assert store.load(GPU, ENVIRONMENT, problem()) == record(mark="held")
    assert store.found(GPU, ENVIRONMENT, problem()) == path
    (entry,) = store.summaries(GPU)
    assert (entry.path, entry.environment, mark_of(entry.record)) == (path, ENVIRONMENT, "held")
    assert list(store.summaries("another-gpu")) == []


def test_a_save_replaces_a_held_record(store: CacheStore) -> None:
    store.hold(GPU, ENVIRONMENT, record(mark="held"))
    store.save(GPU, ENVIRONMENT, record(mark="newer"))
    assert store.load(GPU, ENVIRONMENT, problem()) == record(mark="newer")
    folder = store.path(GPU, ENVIRONMENT, problem()).parent
    folder.rename(folder.with_name("moved"))
    folder.write_text("not a folder")
    with pytest.warns(CacheWarning, match="cannot be written"):
        assert store.save(GPU, ENVIRONMENT, record(mark="newest")) is None
    assert store.load(GPU, ENVIRONMENT, problem()) == record(mark="newest")
