"""A note of a verified kernel counts only if no other user could have written it."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_builders import ENVIRONMENT, GPU, problem, record, warned
from tmm_cache import CacheStore, Notes, disk, notes

#: A user that is neither root nor, most likely, the one who runs the tests.
STRANGER = 54321

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def trusted(store: CacheStore | None = None) -> bool:
    return (store or CacheStore()).is_verified(GPU, ENVIRONMENT, "key")


@pytest.fixture
def path(store: CacheStore) -> Path:
    store.mark_verified(GPU, ENVIRONMENT, "key")
    assert trusted()
    [path] = (store.root / "notes").iterdir()
    return path


def place(path: Path, level: int) -> Path:
    """The note's file, or the folder of notes."""
    return [path, *path.parents][level]


@pytest.mark.parametrize("level", range(2))
@pytest.mark.parametrize("bits", [0o002, 0o020, 0o1022])
def test_a_note_that_others_can_write_is_not_own(path: Path, level: int, bits: int) -> None:
    at = place(path, level)
    at.chmod(at.stat().st_mode | bits)
    with warned(f"{at} can be written by others; .* verified again .*TMM_CACHE_SHARED=1"):
        assert not trusted()
        assert not trusted()  # silently


@pytest.mark.parametrize("level", range(2))
@as_root
def test_a_note_of_another_user_is_not_own(path: Path, level: int) -> None:
    os.chown(place(path, level), STRANGER, -1)
    with warned(f"{place(path, level)} belongs to user {STRANGER}; "):
        assert not trusted()


@pytest.mark.parametrize("level", range(2))
@as_root
def test_root_is_another_user_too(path: Path, level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (path, *path.parents[:2]):
        os.chown(each, STRANGER, -1)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert trusted()
    os.chown(place(path, level), 0, -1)
    with warned("belongs to user 0"):
        assert not trusted()


@pytest.mark.parametrize("mode", [0o400, 0o444, 0o600, 0o644, 0o755])
def test_permissions_to_read_leave_a_note_own(path: Path, mode: int) -> None:
    path.chmod(mode)
    for folder in path.parents[:2]:
        folder.chmod(mode | 0o700)
    assert trusted()


@pytest.mark.parametrize("level", range(2))
def test_a_link_below_the_root_is_not_own(path: Path, level: int, tmp_path: Path) -> None:
    at = place(path, level)
    at.rename(tmp_path / "elsewhere")
    at.symlink_to(tmp_path / "elsewhere")
    with warned(f"{at} is a link; "):
        assert not trusted()


def test_a_root_that_is_a_link_is_own(
    path: Path, store: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(store.root)
    monkeypatch.setenv("TMM_CACHE_DIR", str(tmp_path / "link"))
    assert trusted()


def test_a_hard_link_is_own(path: Path, tmp_path: Path) -> None:
    """Backups make them; whoever can't write the file can't write it by another name either."""
    os.link(path, tmp_path / "backup")
    assert trusted()


def test_a_root_shared_on_purpose_is_trusted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o666)
    path.parent.chmod(0o777)
    monkeypatch.setenv("TMM_CACHE_SHARED", "1")
    assert trusted()
    monkeypatch.setenv("TMM_CACHE_SHARED", "yes")  # nothing but 1 declares it
    with warned("can be written by others"):
        assert not trusted()


@as_root
def test_a_root_that_another_user_made_meanwhile_is_not_own(tmp_path: Path) -> None:
    """In `/tmp` anybody may make the folder that `TMM_CACHE_DIR` names."""
    theirs = CacheStore(tmp_path / "theirs", [])
    theirs.mark_verified(GPU, ENVIRONMENT, "key")
    theirs.save(GPU, ENVIRONMENT, record())
    store = CacheStore(tmp_path / "later", [])
    assert store.load(GPU, ENVIRONMENT, problem()) is None
    theirs.root.rename(store.root)
    os.chown(store.root, STRANGER, -1)
    with warned(f"later: belongs to user {STRANGER}; it is read as untrusted and not written"):
        assert store.load(GPU, ENVIRONMENT, problem()) == record()
        assert not trusted(store)
        assert store.save(GPU, ENVIRONMENT, record(problem(m=2))) is None


def test_a_root_exchanged_during_the_read_is_not_own(
    path: Path, store: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folders are checked by descriptor, and the file opened must be the one in them."""
    own, forged = store.root, CacheStore(tmp_path / "forged", []).root
    CacheStore(forged, []).mark_verified(GPU, ENVIRONMENT, "key")
    opened = disk.opened

    def exchange() -> None:
        own.rename(tmp_path / "aside")
        forged.rename(own)
        (tmp_path / "aside").rename(forged)

    def meanwhile(at: Path, flags: int) -> int:
        exchange()
        try:
            return opened(at, flags)
        finally:
            exchange()

    monkeypatch.setattr(disk, "opened", meanwhile)
    assert not trusted()


@pytest.mark.parametrize("again", [False, True])
def test_notes_removed_during_the_read_are_not_believed(
    path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    check = notes.foreign_file

    def meanwhile(root: Path, at: Path, handle: int) -> str | None:
        data = path.read_bytes()
        path.unlink()
        if again:
            path.write_bytes(data)
        return check(root, at, handle)

    monkeypatch.setattr(notes, "foreign_file", meanwhile)
    assert not trusted()


def test_folders_that_cannot_be_checked_make_notes_untrusted_silently(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is at fault, and other calls report that."""
    stat = os.stat

    def failing(*arguments: Any, **options: Any) -> os.stat_result:
        if "dir_fd" in options:
            raise OSError(errno.EIO, "Input/output error")
        return stat(*arguments, **options)

    monkeypatch.setattr(os, "stat", failing)
    assert not trusted()


def test_no_descriptor_is_left_open(path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for bits in (0o700, 0o702):
        path.parent.chmod(bits)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trusted()
    assert len(os.listdir("/proc/self/fd")) == before


def others_can_write(at: Path) -> None:
    at.chmod(0o777)


def another_user_owns(at: Path) -> None:
    os.chown(at, STRANGER, -1)


@pytest.mark.parametrize("whole_folder", [False, True])
@pytest.mark.parametrize("make", [others_can_write, pytest.param(another_user_owns, marks=as_root)])
def test_notes_that_others_may_have_written_are_neither_read_nor_written(
    store: CacheStore, make: Callable[[Path], None], whole_folder: bool
) -> None:
    """A stamp by another user would pass a wrong kernel as verified."""
    store.mark_verified(GPU, ENVIRONMENT, "key")
    assert CacheStore().is_verified(GPU, ENVIRONMENT, "key")
    [file] = (store.root / "notes").iterdir()
    make(file.parent if whole_folder else file)
    before = file.read_bytes()
    later = CacheStore()
    with warned("records are verified again before their first use"):
        assert not later.is_verified(GPU, ENVIRONMENT, "key")
    later.mark_verified(GPU, ENVIRONMENT, "another")
    assert later.is_verified(GPU, ENVIRONMENT, "another")  # in this process
    assert file.read_bytes() == before


def test_the_users_own_notes_are_read(store: CacheStore) -> None:
    Notes("plugins", [1]).add("key", 2)
    assert Notes("plugins", [1]).get("key") == 2
