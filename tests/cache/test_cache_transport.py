"""Export, import and freeze: records are copied whole, and a file of unknown origin does no
harm."""

from __future__ import annotations

import collections
import errno
import gzip
import json
import os
import shutil
import sys
import tracemalloc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cache_builders import (
    ENVIRONMENT,
    GPU,
    OLDER_ENVIRONMENT,
    made,
    mark_of,
    problem,
    record,
    warned,
)
from tmm_cache import CacheStore, TuningRecord, files, transport
from tmm_cache.cli import main
from tmm_cache.files import sealed

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


def test_only_frozen_records_answer(
    store: CacheStore, below: CacheStore, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    store.save(GPU, ENVIRONMENT, record(mark="own"))
    below.save(GPU, ENVIRONMENT, record(mark="below"))
    below.save(GPU, ENVIRONMENT, record(problem(m=2)))
    assert main(["freeze"]) == 0
    assert "2 records written to" in capsys.readouterr().err
    below.save(GPU, ENVIRONMENT, record(problem(m=4)))
    deployed = locked(monkeypatch)
    assert deployed.locked
    assert deployed.load(GPU, ENVIRONMENT, problem()) == record(mark="own").thinned()
    assert deployed.found(GPU, ENVIRONMENT, problem()) == store.root / "tmm.lock.json"
    assert deployed.load(GPU, ENVIRONMENT, problem(m=2)) is not None
    used = store.root / "tmm.lock.json"
    os.utime(used, (1e9, 1e9))
    CacheStore().load(GPU, ENVIRONMENT, problem())
    assert used.stat().st_mtime == 1e9  # a deployed file is only read
    # Neither a record that was added since, nor one that this process holds.
    deployed.hold(GPU, ENVIRONMENT, record(problem(m=5)))
    assert [deployed.load(GPU, ENVIRONMENT, problem(m=m)) for m in (4, 5)] == [None] * 2
    assert deployed.load(GPU, OLDER_ENVIRONMENT, problem()) is None


def test_a_lock_file_is_written_where_requested_and_is_reproducible(
    store: CacheStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for m in (2, 1):
        store.save(GPU, ENVIRONMENT, record(problem(m=m)))
    store.save("nvidia-a100", ENVIRONMENT, record())
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert main(["freeze", "-o", str(one)]) == 0
    monkeypatch.setenv("TMM_LOCK_FILE", str(two))
    assert main(["freeze"]) == 0
    assert one.read_bytes() == two.read_bytes()
    assert locked(monkeypatch).load(GPU, ENVIRONMENT, problem(m=1)) is not None
    assert CacheStore().load("nvidia-a100", ENVIRONMENT, problem()) is not None
    assert main(["freeze", "-o", "/dev/null"]) == 2


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_a_required_lock_file_that_is_absent_is_reported_once_and_answers_nothing(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    store.save(GPU, ENVIRONMENT, record())
    deployed = locked(monkeypatch, value)
    with warned("there is no such file"):
        assert deployed.load(GPU, ENVIRONMENT, problem()) is None
    assert deployed.load(GPU, ENVIRONMENT, problem()) is None
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
def test_a_damaged_lock_file_is_reported_once_and_answers_nothing(
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
    with warned("is not a file of records"):
        assert deployed.load(GPU, ENVIRONMENT, problem()) is None


def test_a_bad_record_in_a_lock_file_with_a_right_checksum_costs_itself(
    store: CacheStore, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_unreadable_folder_does_not_count_as_absent(
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
    message = capsys.readouterr().err
    assert f"passed over {lost}: cannot be read: " in message
    assert "1 record written to" in message


# -- export and import -------------------------------------------------------------------


@pytest.fixture(params=["records.json", "records.json.gz"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


@pytest.mark.parametrize("command", ["export", "freeze -o"])
def test_export_says_which_records_it_leaves_out(
    command: str, store: CacheStore, file: Path, capsys: Captured
) -> None:
    fill(store)
    lost = next(entry.path.parent for entry in store.summaries() if entry.record.problem["m"] == 1)
    (lost / "environment.json").unlink()
    written = sum(entry.environment is not None for entry in store.summaries())
    assert 0 < written < 4
    assert main([*command.split(), str(file)]) == 1
    said = capsys.readouterr().err
    assert said.count(f"passed over {lost}: its records' environment is unknown") == 1
    assert f"{written} record" in said
    assert len(document(file)["records"]) == written


@pytest.fixture
def target(tmp_path: Path) -> CacheStore:
    return CacheStore(tmp_path / "target", [])


def fill(store: CacheStore) -> None:
    for m in (3, 1, 2):
        store.save(GPU, ENVIRONMENT, record(problem(m=m)))
    store.save("nvidia-a100", OLDER_ENVIRONMENT, record(problem(m=9, dtype="float16")))


def item(new: TuningRecord, gpu: str = GPU, environment: Any = ENVIRONMENT) -> dict[str, Any]:
    return {"gpu": gpu, "environment": environment, "record": new.to_json()}


def write(file: Path, *items: Any) -> None:
    """A file of these records with a right checksum, which anybody can make."""
    data = sealed({"lock": 1, "records": list(items)})
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)


def import_into(target: CacheStore, file: Path, *options: str) -> int:
    return main(["--cache-dir", str(target.root), "import", str(file), *options])


def document(file: Path) -> Any:
    data = file.read_bytes()
    return json.loads(gzip.decompress(data) if file.suffix == ".gz" else data)


def test_round_trip_keeps_records_and_environments(
    store: CacheStore, target: CacheStore, file: Path, capsys: Captured
) -> None:
    fill(store)
    assert main(["export", str(file)]) == 0
    assert "4 records written to" in capsys.readouterr().err
    assert import_into(target, file) == 0
    assert f"4 records written to {target.root}" in capsys.readouterr().err
    ours, theirs = list(store.summaries()), list(target.summaries())
    assert [entry.record.thinned() for entry in ours] == [entry.record for entry in theirs]
    assert [entry.environment for entry in ours] == [entry.environment for entry in theirs]
    relative = [entry.path.relative_to(store.root) for entry in ours]
    assert relative == [entry.path.relative_to(target.root) for entry in theirs]


def test_export_and_freeze_write_one_document(store: CacheStore, tmp_path: Path) -> None:
    fill(store)
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert main(["export", str(one)]) == 0
    assert main(["freeze", "-o", str(two)]) == 0
    assert one.read_bytes() == two.read_bytes()


def test_the_same_records_give_the_same_bytes(
    store: CacheStore, target: CacheStore, tmp_path: Path
) -> None:
    fill(store)
    for m in (2, 3, 1):
        target.save(GPU, dict(reversed(ENVIRONMENT.items())), record(problem(m=m)))
    target.save("nvidia-a100", OLDER_ENVIRONMENT, record(problem(m=9, dtype="float16")))
    for name in ("records.json", "records.gz"):
        first, second = tmp_path / f"first-{name}", tmp_path / f"second-{name}"
        assert main(["export", str(first)]) == 0
        assert main(["--cache-dir", str(target.root), "export", str(second)]) == 0
        assert document(first) == document(second)
        if name == "records.gz":
            assert first.read_bytes()[4:8] == bytes(4)  # gzip's own time
            assert first.stat().st_size < (tmp_path / "first-records.json").stat().st_size / 4


def test_export_leaves_layers_out(store: CacheStore, below: CacheStore, file: Path) -> None:
    fill(store)
    below.save(GPU, ENVIRONMENT, record(problem(m=77)))
    assert main(["export", str(file)]) == 0
    sizes = {each["record"]["problem"]["m"] for each in document(file)["records"]}
    assert sizes == {
        entry.record.problem["m"] for entry in store.summaries() if entry.root == store.root
    }
    assert 77 not in sizes


def test_export_of_nothing_writes_nothing(file: Path, capsys: Captured) -> None:
    assert main(["export", str(file)]) == 1
    assert "0 records written" in capsys.readouterr().err
    assert not file.exists()


def test_export_into_a_device_or_nowhere_is_refused(
    store: CacheStore, tmp_path: Path, capsys: Captured
) -> None:
    fill(store)
    fifo = tmp_path / "device"
    os.mkfifo(fifo)
    assert main(["export", str(fifo)]) == 2
    assert fifo.is_fifo()
    assert main(["export", str(tmp_path / "no" / "such" / "folder.json")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    for end in os.pipe():  # as /dev/stdout may be; resolved, it is no path
        assert main(["export", f"/dev/fd/{end}"]) == 2
        assert capsys.readouterr().err.endswith(f"/dev/fd/{end}: is not a regular file\n")
        os.close(end)


def test_an_export_larger_than_import_accepts_is_refused(
    store: CacheStore, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    fill(store)
    monkeypatch.setattr(transport, "MAX_BYTES", 4000)
    assert main(["export", str(file)]) == 2
    assert "exceed the limit of 4000" in capsys.readouterr().err
    assert not file.exists()


def test_a_failed_export_leaves_the_old_file(
    store: CacheStore, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    fill(store)
    file.write_text("old")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["export", str(file)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert file.read_text() == "old"
    assert [path.name for path in file.parent.glob("*.tmp")] == []


def test_import_keeps_newer_records_unless_forced(
    store: CacheStore, target: CacheStore, file: Path, capsys: Captured
) -> None:
    store.save(GPU, ENVIRONMENT, record(created="2026-01-05T00:00:00Z", mark="theirs"))
    assert main(["export", str(file)]) == 0

    def note_after(created: str, *options: str) -> str | None:
        target.save(GPU, ENVIRONMENT, record(created=created, mark="mine"))
        assert import_into(target, file, *options) == 0
        found = target.load(GPU, ENVIRONMENT, problem())
        assert found is not None
        return mark_of(found)

    capsys.readouterr()
    assert note_after("2026-01-06T00:00:00Z") == "mine"
    assert "0 records written" in (text := capsys.readouterr().err)
    assert "1 kept that were as new or newer" in text
    assert note_after("2026-01-05T00:00:00+00:00") == "mine"  # the same moment, written otherwise
    assert note_after("2026-01-04T00:00:00Z") == "theirs"
    assert note_after("2026-01-06T00:00:00Z", "--force") == "theirs"


@pytest.mark.parametrize(
    ("ahead", "kept"),
    [(timedelta(days=2), False), (timedelta(hours=2), True), (timedelta(0), True)],
)
def test_a_record_made_by_a_wrong_clock_does_not_count_as_newer(
    ahead: timedelta, kept: bool, target: CacheStore, file: Path
) -> None:
    """It would win over every import until that day."""
    target.save(GPU, ENVIRONMENT, record(created=made(-ahead), mark="mine"))
    write(file, item(record(created=made(timedelta(minutes=5)), mark="theirs")))
    assert import_into(target, file) == 0
    found = target.load(GPU, ENVIRONMENT, problem())
    assert found is not None
    assert mark_of(found) == ("mine" if kept else "theirs")


def test_one_problem_on_two_gpus_and_in_two_environments_is_imported(
    target: CacheStore, file: Path
) -> None:
    others = item(record(), gpu="another"), item(record(), environment=OLDER_ENVIRONMENT)
    write(file, item(record()), *others)
    assert import_into(target, file) == 0
    assert len([*target.summaries()]) == 3


def test_import_replaces_a_damaged_record(target: CacheStore, file: Path) -> None:
    path = target.save(GPU, ENVIRONMENT, record(created="2030-01-01T00:00:00Z"))
    assert path is not None
    path.write_text("{")
    write(file, item(record()))
    assert import_into(target, file) == 0
    assert target.load(GPU, ENVIRONMENT, problem()) == record()


@pytest.mark.parametrize(
    "bad",
    [
        item(record(), gpu="../../evil"),
        item(record(), gpu="/etc"),
        item(record(), gpu=""),
        item(record(), environment="../../evil"),
        item(record(), environment={"torch": "x" * 2**14}),
        {**item(record()), "record": {}},
        {**item(record()), "record": {"problem": "../../evil"}},
        item(record(problem(m=2), mark="another")),
        [],
    ],
    ids=str,
)
def test_a_file_with_an_invalid_record_is_refused_entirely(
    target: CacheStore, file: Path, capsys: Captured, bad: Any
) -> None:
    write(file, item(record(problem(m=2))), bad)
    before = sorted(file.parent.iterdir())
    assert import_into(target, file) == 2
    captured = capsys.readouterr().err
    assert captured.startswith(f"tmm-cache: {file}: is not a file of records: records[1]")
    assert len(captured.splitlines()) == 1
    assert not target.root.exists()
    assert sorted(file.parent.iterdir()) == before


def test_records_that_are_invalid_or_of_the_future_are_left_out(
    target: CacheStore, file: Path, capsys: Captured
) -> None:
    target.save(GPU, ENVIRONMENT, record(problem(m=1), mark="mine"))
    bad = item(record(problem(m=4)))
    bad["record"]["winner"] = 99
    write(
        file,
        item(record(problem(m=1), created="2999-01-01T00:00:00Z")),
        item(record(problem(m=2), created=made(timedelta(days=-2)))),
        item(record(problem(m=3), created=made(timedelta(hours=-2)))),  # a clock that is ahead
        bad,
    )
    assert import_into(target, file, "--force") == 1
    error = capsys.readouterr().err
    assert error.count("was created in the future") == 2
    assert error.count("winner: found 99") == 1
    mine = target.load(GPU, ENVIRONMENT, problem(m=1))
    assert mine is not None
    assert mark_of(mine) == "mine"
    assert sorted(each.record.problem["m"] for each in target.summaries()) == [1, 3]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a document",
        b"{}",
        b'{"lock": 1, "records": []}',
        b"\x1f\x8b" + b"\0" * 40,
        gzip.compress(b"not a document"),
        gzip.compress(sealed({"lock": 1, "records": []})) * 2,
        b"[" * 100_000,
    ],
    ids=["empty", "text", "object", "no checksum", "broken gzip", "gzip", "two members", "deep"],
)
def test_an_invalid_file_of_records_gives_one_line_and_status_two(
    target: CacheStore, tmp_path: Path, capsys: Captured, content: bytes
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    assert import_into(target, file) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"tmm-cache: {file}: is not a file of records: ")
    assert len(captured.err.splitlines()) == 1
    assert not target.root.exists()


def test_a_truncated_file_is_refused_wherever_it_ends(
    store: CacheStore, target: CacheStore, file: Path
) -> None:
    fill(store)
    assert main(["export", str(file)]) == 0
    whole = file.read_bytes()
    end = len(whole) - (40 if file.suffix == ".gz" else 41)
    # Without its last byte, a newline, an uncompressed document is still whole.
    sizes = [*range(0, end, 97), *range(end, len(whole) - (file.suffix != ".gz"))]
    for size in sizes:
        file.write_bytes(whole[:size])
        assert import_into(target, file) == 2, size
        assert not target.root.exists(), size


def test_a_file_that_unpacks_to_too_much_is_refused_before_unpacking(
    target: CacheStore, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "MAX_BYTES", 2**20)
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(bytes(200 * 2**20), 1))
    assert bomb.stat().st_size < 2**20
    tracemalloc.start()
    try:
        assert import_into(target, bomb) == 2
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "unpacks to more than 1048576 bytes" in capsys.readouterr().err
    assert peak < 16 * 2**20
    bomb.write_bytes(bytes(2**20 + 1))
    assert import_into(target, bomb) == 2
    assert "is larger than 1048576 bytes" in capsys.readouterr().err
    assert not target.root.exists()


def test_a_missing_file_is_a_mistake(tmp_path: Path, capsys: Captured) -> None:
    assert main(["import", str(tmp_path / "none.json")]) == 2
    assert main(["import", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "there is no such file" in error
    assert "is not a regular file" in error


def test_import_into_a_root_that_cannot_be_written_is_reported(
    file: Path, root: Path, capsys: Captured
) -> None:
    root.write_text("a file")
    write(file, item(record()))
    assert main(["import", str(file)]) == 2
    assert str(root) in capsys.readouterr().err


def test_a_record_that_is_temporarily_unreadable_is_not_replaced(
    store: CacheStore, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A record behind a passing error may be newer than the file's."""
    fill(store)
    assert main(["export", str(file)]) == 0
    newer = record(problem(m=2), created="2026-03-03T00:00:00Z", mark="newer")
    mine = store.save(GPU, ENVIRONMENT, newer)
    assert mine is not None
    real = files.read_file

    def failing(path: Path, *more: Path | None) -> files.Read | files.Fault | None:
        fault = files.Fault(path, "cannot be read: Input/output error", damaged=False)
        return fault if path == mine else real(path, *more)

    with monkeypatch.context() as patch:
        patch.setattr(files, "read_file", failing)
        assert main(["import", str(file)]) == 1
        assert "cannot be read: Input/output error" in capsys.readouterr().err
        # No document is whole without it.
        for command in (["export", str(file)], ["freeze"]):
            assert main(command) == 1
    assert store.load(GPU, ENVIRONMENT, problem(m=2)) == newer


def test_an_import_that_fails_in_the_middle_leaves_whole_records_and_no_temporary_files(
    file: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    write(file, *(item(record(problem(m=m))) for m in range(1, 10)))
    real, calls = os.replace, []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(os, "replace", failing)
    assert main(["import", str(file)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert len(list(CacheStore().summaries())) >= 3
    assert list(root.rglob("*.tmp")) == []


def test_the_work_of_an_import_grows_with_its_records(tmp_path: Path, root: Path) -> None:
    calls = collections.Counter[int]()

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[number] += 1

    for number in (5, 5, 10, 20):  # the first import also imports modules
        calls[number] = 0
        file = tmp_path / f"{number}.json"
        write(file, *(item(record(problem(m=m))) for m in range(1, number + 1)))
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            assert main(["import", str(file)]) == 0
        finally:
            sys.setprofile(before)
        shutil.rmtree(root)
    assert calls[20] - calls[10] < 2.2 * (calls[10] - calls[5])
