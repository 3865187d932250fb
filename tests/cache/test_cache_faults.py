"""After any fault of its files the store answers, warns exactly once, and names the file."""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cache_builders import BOUND_AT_IMPORT, ENVIRONMENT, GPU, mark_of, problem, record, warned
from tmm_cache import CacheStore, Notes, files, notes
from tmm_cache import store as store_module
from tmm_cache.cli import main


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        document = {**json.loads(path.read_text()), **changes}
        del document["checksum"]  # as whoever edits by hand has to
        path.write_text(json.dumps(document))

    return edit


def replaced(data: bytes) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.write_bytes(data)

    return replace


def falsified(path: Path) -> None:
    """Another winner, under the old checksum."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "winner": 0}))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def made_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def made_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def made_a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def made_huge(path: Path) -> None:
    os.truncate(path, files.MAX_BYTES + 1)


CORRUPTIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncated, "is not a valid record: "),
    "empty": (replaced(b""), "is not a valid record: the file is empty"),
    "zeros": (replaced(b"\0" * 512), "is not a valid record: "),
    "garbage": (replaced(b"\xff\xfe\x00garbage"), "is not a valid record: JSON is malformed"),
    "too deep": (
        replaced(b"[" * 200_000),
        # In the words of Python's release.
        "while deserializing an object",
    ),
    "another program's JSON": (replaced(b'{"a": 1}'), "Object contains unknown field `a`"),
    "foreign schema": (edited(schema=3), "schema: Expected `int` <= 2"),
    "out of bounds": (edited(winner=99), "winner: found 99 of 5 candidates"),
    "negative time": (edited(tuning_seconds=-1), "tuning_seconds: Expected `float` >= 0.0"),
    "other checksum": (falsified, "checksum: found another than the content's"),
    "wrong problem": (edited(problem=problem(m=7)), "problem: found the problem of "),
    "a folder": (made_a_folder, "is not a regular file"),
    "a fifo": (made_a_fifo, "is not a regular file"),
    "huge": (made_huge, "is larger than"),
}


@pytest.fixture(params=CORRUPTIONS)
def broken(request: pytest.FixtureRequest, store: CacheStore) -> tuple[CacheStore, Path, str]:
    """A store with a broken record of m=128 and a good one; the broken record's path; the
    warning."""
    store.save(GPU, ENVIRONMENT, record(problem(m=1)))
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    spoil, complaint = CORRUPTIONS[request.param]
    spoil(path)
    return store, path, complaint


def test_a_broken_record_is_a_miss_with_one_warning(broken: tuple[CacheStore, Path, str]) -> None:
    store, path, complaint = broken
    with warned("") as caught:
        assert store.load(GPU, ENVIRONMENT, problem()) is None
    text = str(caught[0].message)
    assert text.startswith(f"{path}: ")
    assert complaint in text
    # Warnings are errors here: neither asking again, nor another store, nor listing warns twice.
    assert store.load(GPU, ENVIRONMENT, problem()) is None
    assert store.found(GPU, ENVIRONMENT, problem()) is None
    assert CacheStore().load(GPU, ENVIRONMENT, problem()) is None
    assert [entry.record.problem["m"] for entry in store.summaries()] == [1]
    assert store.load(GPU, ENVIRONMENT, problem(m=1)) == record(problem(m=1))


def test_listing_passes_over_a_broken_record_with_one_warning(
    broken: tuple[CacheStore, Path, str],
) -> None:
    store, path, complaint = broken
    with warned("") as caught:
        assert [entry.record.problem["m"] for entry in store.summaries()] == [1]
    assert [complaint in str(warning.message) for warning in caught] == [True]
    assert str(caught[0].message).startswith(f"{path}: ")


def test_a_layer_answers_for_a_broken_record_of_the_root(
    broken: tuple[CacheStore, Path, str], tmp_path: Path
) -> None:
    _, path, _ = broken
    below = CacheStore(tmp_path / "below", [])
    answer = below.save(GPU, ENVIRONMENT, record(mark="below"))
    store = CacheStore(layers=[below.root])
    with warned(str(path)):
        assert store.load(GPU, ENVIRONMENT, problem()) == record(mark="below")
    assert store.found(GPU, ENVIRONMENT, problem()) == answer


def test_saving_replaces_a_broken_record(broken: tuple[CacheStore, Path, str]) -> None:
    store, path, _ = broken
    if path.is_dir():
        with warned("cannot be written"):
            assert store.save(GPU, ENVIRONMENT, record()) is None
        return
    assert store.save(GPU, ENVIRONMENT, record()) == path
    assert store.load(GPU, ENVIRONMENT, problem()) == record()


def test_a_digest_collision_is_a_miss(store: CacheStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (files, store_module):
        monkeypatch.setattr(module, "digest", lambda mapping: "0" * 16)
    store.save(GPU, ENVIRONMENT, record())
    assert store.load(GPU, ENVIRONMENT, problem()) == record()
    with warned("records another problem of the same digest"):
        assert store.load(GPU, ENVIRONMENT, problem(m=7)) is None
    below = CacheStore(store.root.with_name("below"), [])
    path = below.save(GPU, ENVIRONMENT, record(problem(m=7)))
    assert CacheStore(layers=[below.root]).found(GPU, ENVIRONMENT, problem(m=7)) == path


def test_an_unreadable_file_is_a_miss(store: CacheStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others in its folder most likely are unreadable, too, such as records that root wrote."""
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    other = record(problem(m=7))
    store.save(GPU, ENVIRONMENT, other)

    monkeypatch.setattr(os, "open", failing("open", errno.EACCES, only=str(path.parent)))
    with warned(rf"{path}: cannot be read: Permission denied"):
        assert store.load(GPU, ENVIRONMENT, problem()) is None
        assert store.load(GPU, ENVIRONMENT, other.problem) is None
        assert list(store.summaries()) == []
    monkeypatch.undo()
    assert CacheStore(store.root, []).load(GPU, ENVIRONMENT, problem()) == record()


def test_a_file_that_vanishes_between_two_steps_is_a_silent_miss(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None

    monkeypatch.setattr(os, "open", failing("open", errno.ENOENT, only=str(path)))
    assert store.load(GPU, ENVIRONMENT, problem()) is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not a valid environment"),
        ("[]", "found no object"),
        ("{}", "environment: its digest is"),
    ],
)
def test_a_broken_environment_file_costs_a_warning_and_no_record(
    store: CacheStore, content: str, complaint: str
) -> None:
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    path.with_name("environment.json").write_text(content)
    with warned(complaint):
        entries = list(store.summaries())
        assert list(store.summaries()) == entries
    assert [(entry.environment, entry.record) for entry in entries] == [(None, record())]
    assert store.load(GPU, ENVIRONMENT, problem()) == record()
    # Without it no record of the folder could be exported.
    store.save(GPU, ENVIRONMENT, record(problem(m=2)))
    assert [entry.environment for entry in store.summaries()] == [ENVIRONMENT] * 2


def test_a_folder_in_place_of_an_environment_file_costs_no_record(store: CacheStore) -> None:
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    path.with_name("environment.json").unlink()
    path.with_name("environment.json").mkdir()
    with warned("is not a regular file"):
        assert store.save(GPU, ENVIRONMENT, record(problem(m=2))) is not None
        assert [entry.environment for entry in store.summaries()] == [None] * 2


def test_a_missing_environment_file_is_not_a_fault_and_is_written_again(store: CacheStore) -> None:
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    path.with_name("environment.json").unlink()
    assert [entry.environment for entry in store.summaries()] == [None]
    store.save(GPU, ENVIRONMENT, record(problem(m=2)))
    assert [entry.environment for entry in store.summaries()] == [ENVIRONMENT] * 2


def test_a_root_that_is_a_file_costs_persistence_and_one_warning(root: Path) -> None:
    root.write_text("a file")
    store = CacheStore()
    with warned("") as caught:
        assert store.save(GPU, ENVIRONMENT, record()) is None
        assert store.save(GPU, ENVIRONMENT, record(problem(m=2))) is None
        store.log_miss(GPU, ENVIRONMENT, problem())
        with store.lock(GPU, ENVIRONMENT, problem(), timeout=0) as mine:
            assert mine is True
    assert [str(warning.message).split(":")[0] for warning in caught] == [str(root)]
    assert "unwritten records are lost" in str(caught[0].message)
    assert root.read_text() == "a file"


def test_the_command_says_that_a_root_is_a_file(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root.write_text("a file")
    assert main(["show"]) == 0
    assert f"passed over {root / 'v2'}: cannot be listed" in capsys.readouterr().err


def test_reading_a_root_that_is_a_file_warns_once_and_falls_to_the_layers(
    root: Path, tmp_path: Path
) -> None:
    root.write_text("a file")
    below = CacheStore(tmp_path / "below", [])
    for m in (1, 2):
        below.save(GPU, ENVIRONMENT, record(problem(m=m)))
    store = CacheStore(layers=[below.root])
    with warned("Not a directory"):
        for m in (1, 2):
            assert store.load(GPU, ENVIRONMENT, problem(m=m)) == record(problem(m=m))
    assert len(list(store.summaries())) == 2  # of the same root, and no second warning
    assert store.save(GPU, ENVIRONMENT, record(problem(m=3))) is None


def failing(name: str, code: int, only: str = "") -> Callable[..., Any]:
    real = getattr(os, name)

    def fail(*arguments: Any, **options: Any) -> Any:
        if only and not any(only in str(argument) for argument in arguments):
            return real(*arguments, **options)
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("replace", errno.ENOSPC),
        ("replace", errno.EROFS),
        ("fsync", errno.ENOSPC),
        ("open", errno.EROFS),
        ("open", errno.EDQUOT),
        pytest.param("mkdir", errno.EACCES, marks=BOUND_AT_IMPORT),
    ],
)
def test_a_full_or_read_only_disk_costs_persistence_and_one_warning(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    if name != "mkdir":
        assert store.save(GPU, ENVIRONMENT, record()) is not None
    monkeypatch.setattr(os, name, failing(name, code))
    with warned("") as caught:
        assert store.save(GPU, ENVIRONMENT, record(mark="new")) is None
        assert store.save(GPU, ENVIRONMENT, record(problem(m=2))) is None
    monkeypatch.undo()
    complaint = f"{store.root}: cannot be written ({os.strerror(code)})"
    assert str(caught[0].message).startswith(complaint)
    if name != "mkdir":
        # The record of before is whole, and no temporary file takes up the space that is missing.
        assert CacheStore(store.root).load(GPU, ENVIRONMENT, problem()) == record()
        folder = store.path(GPU, ENVIRONMENT, problem()).parent
        assert [path for path in folder.iterdir() if path.name.endswith(".tmp")] == []
    # This process uses the record that it tuned.
    assert store.load(GPU, ENVIRONMENT, problem()) == record(mark="new")
    assert store.load(GPU, ENVIRONMENT, problem(m=2)) == record(problem(m=2))
    assert {mark_of(entry.record) for entry in store.summaries()} == {
        "new",
        mark_of(record()),
    }
    # Later processes use it too, now that the disk takes it.
    assert CacheStore(store.root).load(GPU, ENVIRONMENT, problem()) == record(mark="new")


def test_an_interrupt_in_the_middle_of_a_save_leaves_no_temporary_file(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.save(GPU, ENVIRONMENT, record(mark="new"))
    monkeypatch.undo()
    assert store.load(GPU, ENVIRONMENT, problem()) == record()
    assert sorted(os.listdir(path.parent)) == sorted([path.name, "environment.json"])


def test_a_file_system_that_cannot_sync_folders_keeps_the_record(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stat

    real = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    assert store.save(GPU, ENVIRONMENT, record()) is not None
    assert store.load(GPU, ENVIRONMENT, problem()) == record()


def test_the_data_is_synced_before_it_is_renamed_and_the_folder_after(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(handle: int) -> None:
        steps.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{handle}')).suffix}")
        fsync(handle)

    def seen_replace(source: Path, target: Path) -> None:
        assert Path(source).parent == Path(target).parent
        assert Path(source).read_bytes().endswith(b"}\n")
        steps.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    store.save(GPU, ENVIRONMENT, record())
    assert steps == ["fsync .tmp", "replace", "fsync "]


@pytest.mark.parametrize("fails", ["environment.json", "record"])
def test_a_record_is_never_stored_without_its_environment(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A reader between the two steps, or after a crash there, must know the record's
    environment."""
    record_name = store.path(GPU, ENVIRONMENT, problem()).name
    replace = os.replace
    placed: list[str] = []

    def seen_replace(source: Path, target: Path) -> None:
        name = Path(target).name
        if name == (fails if fails != "record" else record_name):
            raise OSError(errno.ENOSPC, "No space left on device")
        placed.append(name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", seen_replace)
    with warned("cannot be written"):
        store.save(GPU, ENVIRONMENT, record())
    assert placed == ([] if fails == "environment.json" else ["environment.json"])
    monkeypatch.undo()
    store.save(GPU, ENVIRONMENT, record())
    assert CacheStore(store.root, []).load(GPU, ENVIRONMENT, problem()) == record()


def test_roots_that_lead_nowhere_cost_persistence_only(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    store = CacheStore(loop, [loop, tmp_path / "absent"])
    assert store.layers == (tmp_path / "absent",)
    with warned("Too many levels of symbolic links"):
        assert store.load(GPU, ENVIRONMENT, problem()) is None
        assert store.save(GPU, ENVIRONMENT, record()) is None


def test_a_name_too_long_for_the_file_system_is_a_fault_like_any_other(tmp_path: Path) -> None:
    store = CacheStore(tmp_path / ("x" * 300), [])
    with warned("File name too long"):
        assert store.load(GPU, ENVIRONMENT, problem()) is None
        assert store.save(GPU, ENVIRONMENT, record()) is None


def test_a_full_log_of_misses_stops_growing(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "MAX_BYTES", 1200)
    with warned(r"notes/misses-.* cannot be written \(it is full"):
        for m in range(10):
            store.log_miss(GPU, ENVIRONMENT, problem(m=m))
    assert 0 < Notes("misses", None, store.root).path.stat().st_size <= 1200
    found = [miss.problem["m"] for miss in store.misses()]
    assert found == [*range(len(found))]
    assert 0 < len(found) < 10


def test_a_healthy_cache_never_warns(store: CacheStore) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.save(GPU, ENVIRONMENT, record())
        store.load(GPU, ENVIRONMENT, problem())
        store.load(GPU, ENVIRONMENT, problem(m=5))
        store.log_miss(GPU, ENVIRONMENT, problem(m=5))
        with store.lock(GPU, ENVIRONMENT, problem(), timeout=0) as mine:
            assert mine
        assert len(list(store.summaries())) == 1
        assert len(store.misses()) == 1


def test_a_record_is_written_once_its_disk_is_repaired(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    def full(path: Path, *_: Any) -> None:
        attempts.append(path)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(store_module, "write_record", full)
        with warned("cannot be written"):
            assert store.save(GPU, ENVIRONMENT, record(problem(m=1))) is None
        assert store.save(GPU, ENVIRONMENT, record(problem(m=2))) is None
        # The disk is tried once by each load, and neither warned of nor waited for again.
        assert store.load(GPU, ENVIRONMENT, problem(m=1)) == record(problem(m=1))
        assert len(attempts) == 3
    store.hold(GPU, ENVIRONMENT, record(problem(m=3)))  # for this process only
    assert store.load(GPU, ENVIRONMENT, problem(m=4)) is None
    assert [CacheStore().load(GPU, ENVIRONMENT, problem(m=m)) for m in (1, 2, 3)] == [
        record(problem(m=1)), record(problem(m=2)), None,
    ]  # fmt: skip
    assert store.found(GPU, ENVIRONMENT, problem(m=2)) is not None


def test_a_record_that_was_written_late_is_not_written_again(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(store_module, "write_record", _refused)
        with warned("cannot be written"):
            assert store.save(GPU, ENVIRONMENT, record()) is None
    path = store.save(GPU, ENVIRONMENT, record())
    assert path is not None
    path.unlink()  # as `tmm-cache clear` does
    assert store.load(GPU, ENVIRONMENT, problem()) is None
    assert not path.exists()


@pytest.mark.parametrize("held", [False, True])
def test_a_record_that_was_written_late_answers_until_a_newer_one_is_written(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """Another process writes the newer one. A record that is held answers all the same."""
    with monkeypatch.context() as broken:
        broken.setattr(store_module, "write_record", _refused)
        with warned("cannot be written"):
            assert store.save(GPU, ENVIRONMENT, record(mark="late")) is None
    if held:
        store.hold(GPU, ENVIRONMENT, record(mark="late"))
    assert store.load(GPU, ENVIRONMENT, problem()) == record(mark="late")
    CacheStore(store.root).save(GPU, ENVIRONMENT, record(mark="newer"))
    mark = "late" if held else "newer"
    assert store.load(GPU, ENVIRONMENT, problem()) == record(mark=mark)
    assert [mark_of(entry.record) for entry in store.summaries()] == [mark]


@pytest.mark.parametrize(
    ("day", "shared", "mark"),
    [(1, False, "late"), (2, False, "late"), (3, False, "theirs"), (3, True, "late")],
)
def test_a_record_that_is_written_late_replaces_no_newer_one(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch, day: int, shared: bool, mark: str
) -> None:
    """Another process wrote that one. In a folder that others can write, it counts no more than a
    layer's."""
    with monkeypatch.context() as broken:
        broken.setattr(store_module, "write_record", _refused)
        with warned("cannot be written"):
            store.save(GPU, ENVIRONMENT, record(created="2026-01-02T00:00:00Z", mark="late"))
    theirs = record(created=f"2026-01-0{day}T00:00:00Z", mark="theirs")
    CacheStore(store.root).save(GPU, ENVIRONMENT, theirs)
    if shared:
        store.root.chmod(0o777)
        warnings.simplefilter("ignore")
    for _ in range(2):
        found = store.load(GPU, ENVIRONMENT, problem())
        assert found is not None
        assert mark_of(found) == mark
    stored = CacheStore(store.root).load(GPU, ENVIRONMENT, problem())
    assert stored is not None
    assert mark_of(stored) == ("theirs" if shared else mark)


def _refused(*_: Any) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")
