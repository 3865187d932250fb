"""Which files are used, by owner and checksum; and notes of verified kernels."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_builders import ENVIRONMENT, GPU, OLDER_ENVIRONMENT, problem, record, warned
from tmm_cache import CacheStore
from tmm_cache.cli import main


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document, indent=2))


@pytest.mark.parametrize("imported", [False, True])
def test_a_record_may_lack_a_checksum(store: CacheStore, imported: bool) -> None:
    """A record made by hand has none. Older versions marked imported records."""
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    edit(path, lambda document: document.pop("checksum"))
    if imported:
        edit(path, lambda document: document.update(imported=True))
    assert store.load(GPU, ENVIRONMENT, problem()) == record()
    assert path.exists()


def test_spaces_do_not_change_the_checksum(store: CacheStore) -> None:
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document, indent=4))
    assert store.load(GPU, ENVIRONMENT, problem()) == record()


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document.update(winner=0),
        lambda document: document.update(checksum="0" * 16),
        lambda document: document.update(checksum=None),
        lambda document: document.update(imported=True),
        lambda document: document["candidates"][1]["config"].update(BLOCK_M=128),
        lambda document: document["candidates"][3].update(status="ok"),
    ],
)
def test_a_wrong_checksum_is_a_miss_until_the_record_is_saved_again(
    store: CacheStore, change: Callable[[dict[str, Any]], None]
) -> None:
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    edit(path, change)
    with warned(r"checksum: found another than .*; passed over"):
        assert store.load(GPU, ENVIRONMENT, problem()) is None
    assert store.load(GPU, ENVIRONMENT, problem()) is None
    assert store.save(GPU, ENVIRONMENT, record()) == path
    assert store.load(GPU, ENVIRONMENT, problem()) == record()


def made_writable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.chmod(0o777)


def made_anothers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = root.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(made_writable, "can be written by others"), (made_anothers, "belongs to user ")],
)
def test_a_root_of_another_user_is_read_as_a_layer_and_not_written(
    store: CacheStore,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    make(store.root, monkeypatch)
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    theirs = CacheStore()
    with warned(f"{reason}.*TMM_CACHE_SHARED=1"):
        assert theirs.load(GPU, ENVIRONMENT, problem()) == record()
        assert theirs.save(GPU, ENVIRONMENT, record(problem(m=2))) is None
        theirs.log_miss(GPU, ENVIRONMENT, problem(m=3))
        with theirs.lock(GPU, ENVIRONMENT, problem(), timeout=0) as mine:
            assert mine
        theirs.mark_verified(GPU, ENVIRONMENT, "key")
    assert theirs.load(GPU, ENVIRONMENT, problem(m=2)) == record(problem(m=2))
    assert theirs.is_verified(GPU, ENVIRONMENT, "key")
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*")} == before
    assert main(["import", "records.json"]) == 2
    assert f"{store.root}: {reason}" in " ".join(capsys.readouterr().err.split())
    # A verification noted by others does not count.
    monkeypatch.setenv("TMM_CACHE_SHARED", "1")
    CacheStore().mark_verified(GPU, ENVIRONMENT, "theirs")
    assert CacheStore().is_verified(GPU, ENVIRONMENT, "theirs")
    monkeypatch.delenv("TMM_CACHE_SHARED")
    assert not CacheStore().is_verified(GPU, ENVIRONMENT, "theirs")


def test_a_root_that_others_become_able_to_write_is_not_written_any_more(
    store: CacheStore,
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    store.log_miss(GPU, ENVIRONMENT, problem(m=3))
    store.mark_verified(GPU, ENVIRONMENT, "key")
    store.root.chmod(0o777)
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*")}
    with warned("can be written by others.*TMM_CACHE_SHARED=1"):
        store.log_miss(GPU, ENVIRONMENT, problem(m=4))
    assert store.save(GPU, ENVIRONMENT, record(problem(m=2))) is None
    store.mark_verified(GPU, ENVIRONMENT, "another")
    assert {path: path.stat().st_mtime_ns for path in store.root.rglob("*")} == before


def test_a_root_that_is_shared_on_purpose_counts_as_own(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    store.root.chmod(0o777)
    monkeypatch.setenv("TMM_CACHE_SHARED", "1")
    shared = CacheStore()
    assert shared.load(GPU, ENVIRONMENT, problem()) == record()
    assert shared.save(GPU, ENVIRONMENT, record(problem(m=2))) is not None


def test_a_verification_is_remembered_for_one_gpu_and_environment(store: CacheStore) -> None:
    assert not store.is_verified(GPU, ENVIRONMENT, "key")
    store.mark_verified(GPU, ENVIRONMENT, "key")
    for each in (store, CacheStore()):
        assert each.is_verified(GPU, ENVIRONMENT, "key")
        assert not each.is_verified(GPU, ENVIRONMENT, "another")
        assert not each.is_verified(GPU, OLDER_ENVIRONMENT, "key")
        assert not each.is_verified("nvidia-a100", ENVIRONMENT, "key")
    assert list(store.summaries()) == []


def test_a_verification_is_remembered_in_memory_where_the_disk_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CacheStore(tmp_path / "file", [])
    store.mark_verified(GPU, ENVIRONMENT, "key")
    assert store.is_verified(GPU, ENVIRONMENT, "key")
    assert not CacheStore(tmp_path / "file", []).is_verified(GPU, ENVIRONMENT, "key")
