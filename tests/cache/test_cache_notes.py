"""Notes are found again in the state in which they were written, and in no other."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from tmm_cache import Notes, disk, stamp


def test_a_note_is_found_in_its_own_state_only(tmp_path: Path) -> None:
    Notes("n", ["a", 1], tmp_path).add("x", {"value": [1]})
    assert Notes("n", ["a", 1], tmp_path).get("x") == {"value": [1]}
    assert Notes("n", ["a", 1], tmp_path).get("y") is None
    assert Notes("n", ["a", 2], tmp_path).get("x") is None
    assert Notes("m", ["a", 1], tmp_path).get("x") is None
    with pytest.raises(TypeError):
        Notes("n", [object()], tmp_path)  # type: ignore[list-item]


def test_the_last_note_counts_and_is_written_once(tmp_path: Path) -> None:
    for value in (1, 2, 2):
        Notes("n", None, tmp_path).add("x", value)
    notes = Notes("n", None, tmp_path)
    assert notes.get("x") == 2
    (path,) = (tmp_path / "notes").iterdir()
    assert len(path.read_bytes().split(b"\n")) == 3
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("later", [[("x", 1)], [("y", 2)], [("y", 2), ("x", 3)]])
def test_a_note_that_the_disk_refused_is_written_with_the_next(
    later: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one may be the same note again."""
    notes = Notes("n", None, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", Mock(side_effect=OSError(errno.EIO, "no")))
        notes.add("x", 1)
        with pytest.raises(OSError, match="no"):
            notes.write("x", 1)
    for about, value in later:
        notes.add(about, value)
    expected = {"x": 1, **dict(later)}
    assert {about: Notes("n", None, tmp_path).get(about) for about in expected} == expected
    before = notes.path.read_bytes()
    for about, value in expected.items():
        notes.add(about, value)
    assert notes.path.read_bytes() == before


def test_damage_costs_only_the_damaged_lines(tmp_path: Path) -> None:
    Notes("n", None, tmp_path).add("x", 1)
    (path,) = (tmp_path / "notes").iterdir()
    with open(path, "ab") as file:
        file.write(b'\n[["x"], 3]\n["x", 4, 5]\n7\n\xff\n["x", ')
    Notes("n", None, tmp_path).add("y", 2)
    notes = Notes("n", None, tmp_path)
    assert (notes.get("x"), notes.get("y")) == (1, 2)


def test_a_full_file_and_an_impossible_folder_are_not_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tmm_cache.notes.MAX_BYTES", 20)
    notes = Notes("n", None, tmp_path)
    notes.add("x", "a" * 100)
    assert notes.get("x") == "a" * 100  # in this process
    assert Notes("n", None, tmp_path).get("x") is None
    (tmp_path / "file").write_text("")
    Notes("n", None, tmp_path / "file").add("x", 1)
    assert Notes("n", None, tmp_path / "file").get("x") is None


def test_a_stamp_detects_a_change_whose_size_and_time_are_restored(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert stamp([path]) == [[str(path)]]
    path.write_text("a")
    before, status = stamp([path]), os.stat(path)
    assert stamp([path]) == before
    path.write_text("b")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert stamp([path]) != before


@pytest.mark.parametrize(("room", "fits"), [(-1, False), (0, True), (1, True)])
def test_a_line_may_fill_a_file_to_its_limit(tmp_path: Path, room: int, fits: bool) -> None:
    path, line = tmp_path / "lines", b"a line"
    assert disk.append_line(path, line, len(line) + 1 + room) is fits
    assert path.read_bytes() == (b"\n" + line if fits else b"")
