"""`clear` removes the files that it lists, and only files of the cache."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from cache_builders import (
    ENVIRONMENT,
    GPU,
    problem,
    record,
)
from tmm_cache import CacheStore, Notes, digest
from tmm_cache.cli import main

Captured = pytest.CaptureFixture[str]


def files_under(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def environment_of(store: CacheStore) -> str:
    """The file that stays in a folder whose records were removed."""
    folder = store.path(GPU, ENVIRONMENT, problem()).parent
    return str((folder / "environment.json").relative_to(store.root))


def names(store: CacheStore) -> list[Any]:
    return sorted(str(entry.record.problem["m"]) for entry in store.summaries())


@pytest.fixture
def filled(store: CacheStore) -> CacheStore:
    for m in (1, 2, 3):
        store.save(GPU, ENVIRONMENT, record(problem(m=m)))
    with store.lock(GPU, ENVIRONMENT, problem(m=1), timeout=0):
        pass
    store.log_miss(GPU, ENVIRONMENT, problem(m=4))
    return store


def test_clear_lists_before_it_removes(filled: CacheStore, capsys: Captured) -> None:
    before = files_under(filled.root)
    assert main(["clear"]) == 1
    captured = capsys.readouterr()
    removable = {filled.path(GPU, ENVIRONMENT, problem(m=m)) for m in (1, 2, 3)}
    removable.add(Notes("misses", None, filled.root).path)
    listed = captured.out.splitlines()
    # Paths under a long root would be wider than a terminal.
    assert set(listed) == {str(path.relative_to(filled.root)) for path in removable}
    assert max(map(len, listed)) <= 100
    message = f"nothing removed; -y removes 3 records and 1 other file from {filled.root}"
    assert captured.err == f"tmm-cache: {message}\n"
    assert files_under(filled.root) == before
    assert main(["clear", "-y"]) == 0
    assert files_under(filled.root) == {environment_of(filled)}
    assert "removed 4 of 4 files" in capsys.readouterr().err
    assert main(["clear"]) == 0  # nothing left to list
    assert "nothing to remove" in capsys.readouterr().err


def test_one_record_is_removed_by_the_beginning_of_its_digest(filled: CacheStore) -> None:
    lock = Path(f"{filled.path(GPU, ENVIRONMENT, problem(m=1))}.lock")
    assert main(["clear", "-y", "0" * 16]) == 0
    assert main(["clear", "-y", digest(problem(m=2))[:8]]) == 0
    assert names(filled) == ["1", "3"]
    assert len(filled.misses()) == 1
    assert lock.exists()
    assert main(["clear", "-y", digest(problem(m=1))]) == 0
    assert names(filled) == ["3"]
    assert not lock.exists()


def test_clearing_everything_removes_notes(filled: CacheStore, capsys: Captured) -> None:
    for name in ("able", "triton"):
        Notes(name, None, filled.root).add("x", 1)
    (filled.root / "notes" / "mine.txt").write_text("")
    fresh = Notes("triton", None, filled.root).path
    assert main(["clear", "-y", digest(problem(m=1))]) == 0
    assert fresh.exists()
    assert main(["clear", "-y"]) == 0
    assert files_under(filled.root) == {"notes/mine.txt", environment_of(filled)}
    (filled.root / "notes" / "mine.txt").unlink()
    fresh.touch()
    stale = fresh.with_name(f"{fresh.name}.1-00000000.tmp")
    stale.touch()
    os.utime(stale, (time.time() - 7200,) * 2)
    assert main(["clear", "-y"]) == 0
    assert files_under(filled.root) == {environment_of(filled)}


def test_clear_never_touches_layers_or_files_of_others(
    filled: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    below = CacheStore(tmp_path / "below", [])
    below.save(GPU, ENVIRONMENT, record(problem(m=1)))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / filled.path(GPU, ENVIRONMENT, problem(m=1)).name).write_text("{}")
    linked = filled.root / "v2" / GPU / ("0" * 16)
    linked.symlink_to(outside)
    folder = filled.path(GPU, ENVIRONMENT, problem()).parent
    kept = [
        filled.root / "README",
        filled.root / "v3" / GPU / folder.name / f"{'0' * 16}.json",
        filled.root / "v2" / "models" / "weights.json",
        folder / "notes.json",
        folder / "0123.json",
        folder / f"{'0' * 16}.json.1-00000000.tmp",  # young: a save in progress
    ]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    before = files_under(below.root)
    monkeypatch.setenv("TMM_CACHE_PATH", str(below.root))
    assert main(["clear", "-y"]) == 1  # the damaged file behind the link stays, and is reported
    assert f"{linked / os.listdir(outside)[0]}: is outside" in capsys.readouterr().err.replace(
        "\n", ""
    )
    assert all(path.read_text() == "mine" for path in kept)
    assert files_under(below.root) == before
    assert os.listdir(outside) == [filled.path(GPU, ENVIRONMENT, problem(m=1)).name]
    assert files_under(filled.root) == {
        *(str(path.relative_to(filled.root)) for path in kept),
        environment_of(filled),
    }
    capsys.readouterr()
    digest = below.path(GPU, ENVIRONMENT, problem(m=1)).stem
    assert main(["clear", digest, "-y"]) == 0
    assert f"nothing to remove in {filled.root}" in " ".join(capsys.readouterr().err.split())
    assert files_under(below.root) == before


def test_clear_removes_records_under_a_root_that_is_a_link(
    filled: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(filled.root)
    monkeypatch.setenv("TMM_CACHE_DIR", str(link))
    assert names(filled)
    assert main(["clear", "-y"]) == 0
    assert names(filled) == []


def test_clear_names_files_that_it_could_not_remove(
    filled: CacheStore, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    stuck = filled.path(GPU, ENVIRONMENT, problem(m=2))
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == stuck:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["clear", "-y"]) == 1
    captured = capsys.readouterr()
    assert f"{stuck}: cannot be removed: Permission denied" in captured.err
    assert "removed 3 of 4 files" in captured.err
    assert names(filled) == ["2"]


def test_clear_removes_damaged_and_left_over_files(filled: CacheStore, capsys: Captured) -> None:
    folder = filled.path(GPU, ENVIRONMENT, problem()).parent
    filled.path(GPU, ENVIRONMENT, problem(m=2)).write_text("{")
    stale = folder / f"{'0' * 16}.json.99999999-00000000.tmp"
    young = folder / f"{'1' * 16}.json.1-00000000.tmp"
    foreign = folder / "editor.tmp"
    orphan = folder / f"{'2' * 16}.json.lock"
    odd = folder / f"{'4' * 16}.json"
    odd.mkdir()
    for path in (stale, young, foreign, orphan):
        path.touch()
    two_hours_ago = time.time() - 7200
    for path in (stale, foreign):
        os.utime(path, (two_hours_ago, two_hours_ago))
    assert main(["clear", "-y"]) == 0
    assert "removed 6 of 6 files" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [young.name, foreign.name, odd.name, "environment.json"]
    )


@pytest.mark.parametrize("text", [None, "{"])
def test_a_folder_without_records_is_not_listed(
    text: str | None, filled: CacheStore, capsys: Captured
) -> None:
    """Nor is its environment, which no command removes, and the next save replaces if damaged."""
    assert main(["clear", "-y"]) == 0
    if text is not None:
        (filled.root / environment_of(filled)).write_text(text)
    capsys.readouterr()
    assert main(["verify"]) == 0
    assert capsys.readouterr().err == "tmm-cache: 0 good records, 0 faults\n"
    assert main(["show"]) == 0
    assert "no records in" in capsys.readouterr().err
    assert main(["clear"]) == 0
    assert "nothing to remove in" in capsys.readouterr().err
    assert filled.save(GPU, ENVIRONMENT, record(problem(m=5))) is not None
    assert [each.environment for each in filled.summaries()] == [ENVIRONMENT]


def test_a_record_saved_during_a_clear_keeps_its_environment(
    filled: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its environment a record is never exported."""
    unlink = Path.unlink

    def save_meanwhile(removed: Path, missing_ok: bool = False) -> None:
        unlink(removed, missing_ok)
        filled.save(GPU, ENVIRONMENT, record(problem(m=5)))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", save_meanwhile)
        assert main(["clear", "-y"]) == 0
    assert [each.environment for each in filled.summaries()] == [ENVIRONMENT]
    assert names(filled) == ["5"]
