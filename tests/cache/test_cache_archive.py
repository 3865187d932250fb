"""Export and import: records travel exactly, strangers' archives do no harm."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from cache_builders import ENVIRONMENT, GPU, OLDER_ENVIRONMENT, problem, record
from tmm_cache import CacheStore, digest, files
from tmm_cache.cli import main
from tmm_cache.files import MAX_BYTES, record_bytes

Captured = pytest.CaptureFixture[str]

FOLDER = f"v2/{GPU}/{digest(ENVIRONMENT)}"
MEMBER = f"{FOLDER}/{digest(problem())}.json"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "records.tar.gz"


@pytest.fixture
def target(tmp_path: Path) -> CacheStore:
    return CacheStore(tmp_path / "target", [])


def fill(store: CacheStore) -> None:
    for m in (3, 1, 2):
        store.save(GPU, ENVIRONMENT, record(problem(m=m)))
    store.save("nvidia-a100", OLDER_ENVIRONMENT, record(problem(m=9, dtype="float16")))


def written(archive: Path, *members: tuple[tarfile.TarInfo, bytes]) -> None:
    with tarfile.open(archive, "w:gz") as file:
        for member, data in members:
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))


def good() -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(MEMBER), record_bytes(record())


def test_round_trip_keeps_records_and_environments(
    store: CacheStore, target: CacheStore, archive: Path, capsys: Captured
) -> None:
    fill(store)
    assert main(["export", str(archive)]) == 0
    assert "4 records written to" in capsys.readouterr().err
    assert main(["--cache-dir", str(target.root), "import", str(archive)]) == 0
    assert f"4 records written to {target.root}" in capsys.readouterr().err
    ours, theirs = list(store.entries()), list(target.entries())
    assert [entry.record for entry in ours] == [entry.record for entry in theirs]
    assert [entry.environment for entry in ours] == [entry.environment for entry in theirs]
    relative = [entry.path.relative_to(store.root) for entry in ours]
    assert relative == [entry.path.relative_to(target.root) for entry in theirs]
    assert target.load(GPU, ENVIRONMENT, problem(m=2)) == record(problem(m=2))


def test_the_same_records_give_the_same_bytes(
    store: CacheStore, target: CacheStore, tmp_path: Path
) -> None:
    fill(store)
    for m in (2, 3, 1):
        target.save(GPU, dict(reversed(ENVIRONMENT.items())), record(problem(m=m)))
    target.save("nvidia-a100", OLDER_ENVIRONMENT, record(problem(m=9, dtype="float16")))
    first, second = tmp_path / "first.tar.gz", tmp_path / "second.tgz"
    assert main(["export", str(first)]) == 0
    for path in store.root.rglob("*"):
        os.utime(path, (1, 1))
    assert main(["--cache-dir", str(target.root), "export", str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes()[4:8] == bytes(4)  # gzip's own time
    with tarfile.open(first) as file:
        members = file.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert {(member.mtime, member.uid, member.gid, member.mode) for member in members} == {
        (0, 0, 0, 0o644)
    }


def test_export_takes_filters_and_leaves_layers_out(
    store: CacheStore, tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store)
    below = CacheStore(tmp_path / "below", [])
    below.save(GPU, ENVIRONMENT, record(problem(m=77, dtype="float16")))
    monkeypatch.setenv("TMM_CACHE_PATH", str(below.root))
    assert main(["export", str(archive), "--dtype", "float16"]) == 0
    with tarfile.open(archive) as file:
        members = file.getnames()
    assert len(members) == 2
    assert all(name.startswith("v2/nvidia-a100/") for name in members)


def test_export_of_nothing_writes_nothing(archive: Path, capsys: Captured) -> None:
    assert main(["export", str(archive)]) == 1
    assert "nothing written" in capsys.readouterr().err
    assert not archive.exists()


def test_export_into_a_device_or_nowhere_is_refused(
    store: CacheStore, tmp_path: Path, capsys: Captured
) -> None:
    fill(store)
    fifo = tmp_path / "device"
    os.mkfifo(fifo)
    assert main(["export", str(fifo)]) == 2
    assert fifo.is_fifo()
    assert main(["export", str(tmp_path / "no" / "such" / "folder.tar.gz")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_failed_export_leaves_the_old_archive(
    store: CacheStore, archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    fill(store)
    archive.write_text("old")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["export", str(archive)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert archive.read_text() == "old"
    assert [path.name for path in archive.parent.glob("*.tmp")] == []


def test_import_keeps_newer_records_unless_forced(
    store: CacheStore, target: CacheStore, archive: Path, capsys: Captured
) -> None:
    store.save(GPU, ENVIRONMENT, record(created="2026-01-05T00:00:00Z", note="theirs"))
    assert main(["export", str(archive)]) == 0
    command = ["--cache-dir", str(target.root), "import", str(archive)]

    def note_after(created: str, *options: str) -> str | None:
        target.save(GPU, ENVIRONMENT, record(created=created, note="mine"))
        assert main([*command, *options]) == 0
        found = target.load(GPU, ENVIRONMENT, problem())
        assert found is not None
        return found.note

    capsys.readouterr()
    assert note_after("2026-01-06T00:00:00Z") == "mine"
    assert "0 records written" in (text := capsys.readouterr().err)
    assert "1 kept that were as new or newer" in text
    assert note_after("2026-01-05T00:00:00+00:00") == "mine"  # the same moment, written otherwise
    assert note_after("2026-01-04T00:00:00Z") == "theirs"
    assert note_after("2026-01-06T00:00:00Z", "--force") == "theirs"


def test_import_mends_a_damaged_record(target: CacheStore, archive: Path) -> None:
    path = target.save(GPU, ENVIRONMENT, record(created="2030-01-01T00:00:00Z"))
    assert path is not None
    path.write_text("{")
    written(archive, good())
    assert main(["--cache-dir", str(target.root), "import", str(archive)]) == 0
    assert target.load(GPU, ENVIRONMENT, problem()) == record()


def link(kind: bytes, name: str, to: str) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, to
    return member, b""


@pytest.mark.parametrize(
    "member",
    [
        (tarfile.TarInfo("../../evil.json"), b"{}"),
        (tarfile.TarInfo(f"v2/{GPU}/../../../{MEMBER}"), b"{}"),
        (tarfile.TarInfo("/etc/evil.json"), b"{}"),
        (tarfile.TarInfo("..\\evil.json"), b"{}"),
        link(tarfile.SYMTYPE, MEMBER, "/etc/passwd"),
        link(tarfile.SYMTYPE, f"v2/{GPU}", "/tmp"),
        link(tarfile.LNKTYPE, MEMBER, "/etc/passwd"),
        link(tarfile.FIFOTYPE, MEMBER, ""),
        link(tarfile.CHRTYPE, MEMBER, ""),
    ],
    ids=lambda member: f"{member[0].type!r} {member[0].name}",
)
def test_an_archive_that_climbs_or_links_is_refused_whole(
    target: CacheStore, archive: Path, capsys: Captured, member: tuple[tarfile.TarInfo, bytes]
) -> None:
    written(archive, good(), member)
    before = sorted(archive.parent.iterdir())
    assert main(["--cache-dir", str(target.root), "import", str(archive)]) == 2
    captured = capsys.readouterr().err
    assert captured.startswith(f"tmm-cache: {archive}: member ")
    assert len(captured.splitlines()) == 1
    assert not target.root.exists()
    assert sorted(archive.parent.iterdir()) == before


def test_wrong_contents_are_left_out_and_told_of(
    target: CacheStore, archive: Path, capsys: Captured
) -> None:
    misnamed = f"{FOLDER}/{'0' * 16}.json"
    huge = f"{FOLDER}/{'1' * 16}.json"
    garbage = f"{FOLDER}/{'2' * 16}.json"
    written(
        archive,
        good(),
        (tarfile.TarInfo(misnamed), record_bytes(record())),
        (tarfile.TarInfo(huge), b" " * (MAX_BYTES + 1)),
        (tarfile.TarInfo(garbage), b"\xff"),
        (tarfile.TarInfo(f"{FOLDER}/environment.json"), b'{"torch": "another"}'),
    )
    assert main(["--cache-dir", str(target.root), "import", str(archive)]) == 1
    captured = capsys.readouterr().err
    for name in (misnamed, huge, garbage, f"{FOLDER}/environment.json"):
        assert f"left out {name}: " in captured
    assert f"{huge}: is larger than {MAX_BYTES} bytes" in captured
    assert [(entry.record, entry.environment) for entry in target.entries()] == [(record(), None)]


def test_a_cache_that_was_packed_by_hand_imports(
    store: CacheStore, target: CacheStore, archive: Path, capsys: Captured
) -> None:
    fill(store)
    store.log_miss(GPU, ENVIRONMENT, problem(m=5))
    with store.lock(GPU, ENVIRONMENT, problem(m=1), timeout=0):
        pass
    (store.root / "v3").mkdir()
    (store.root / "v3" / "x.json").write_text("{}")
    with tarfile.open(archive, "w:gz") as file:
        file.add(store.root, ".")
    assert main(["--cache-dir", str(target.root), "import", str(archive)]) == 0
    assert "left out 3 files that a cache does not have" in capsys.readouterr().err
    assert [entry.record for entry in target.entries()] == [
        entry.record for entry in store.entries()
    ]
    assert target.misses() == []
    assert not (target.root / "v3").exists()


def test_names_that_are_no_slugs_or_digests_are_left_out(target: CacheStore, archive: Path) -> None:
    data = record_bytes(record())
    written(
        archive,
        (tarfile.TarInfo(MEMBER.replace(GPU, "NVIDIA H200")), data),
        (tarfile.TarInfo(MEMBER.replace(GPU, ".hidden")), data),
        (tarfile.TarInfo(MEMBER.replace("v2/", "v9/")), data),
        (tarfile.TarInfo(MEMBER.replace(digest(ENVIRONMENT), "zz")), data),
        (tarfile.TarInfo(f"deeper/{MEMBER}"), data),
    )
    assert main(["--cache-dir", str(target.root), "import", str(archive)]) == 0
    assert not target.root.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not an archive",
        b"\x1f\x8b" + b"\0" * 40,
        gzip.compress(b"not a tar"),
    ],
    ids=["empty", "text", "broken gzip", "gzip of text"],
)
def test_what_is_no_archive_is_one_line_and_status_two(
    target: CacheStore, archive: Path, capsys: Captured, content: bytes
) -> None:
    archive.write_bytes(content)
    assert main(["--cache-dir", str(target.root), "import", str(archive)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"tmm-cache: {archive}: is not a readable archive: ")
    assert len(captured.err.splitlines()) == 1
    assert not target.root.exists()


def test_a_truncated_archive_is_refused_wherever_it_ends(
    store: CacheStore, target: CacheStore, archive: Path
) -> None:
    fill(store)
    assert main(["export", str(archive)]) == 0
    whole = archive.read_bytes()
    for size in [*range(0, len(whole) - 40, 37), *range(len(whole) - 40, len(whole))]:
        archive.write_bytes(whole[:size])
        assert main(["--cache-dir", str(target.root), "import", str(archive)]) == 2, size
        assert not target.root.exists(), size


def test_a_missing_archive_is_a_mistake(tmp_path: Path, capsys: Captured) -> None:
    assert main(["import", str(tmp_path / "none.tar.gz")]) == 2
    assert main(["import", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("is not a file") == 2


def test_import_into_a_root_that_cannot_be_written_is_told(
    archive: Path, root: Path, capsys: Captured
) -> None:
    root.write_text("a file")
    written(archive, good())
    assert main(["import", str(archive)]) == 2
    assert str(root) in capsys.readouterr().err


def test_what_cannot_be_read_this_time_is_not_replaced(
    store: CacheStore, archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """A record behind a passing error may be newer than the archive's."""
    fill(store)
    assert main(["export", str(archive)]) == 0
    newer = record(problem(m=2), created="2026-03-03T00:00:00Z", note="newer")
    mine = store.save(GPU, ENVIRONMENT, newer)
    assert mine is not None
    real = files.read_bytes

    def failing(path: Path, *more: int) -> bytes | files.Fault | None:
        fault = files.Fault(path, "cannot be read: Input/output error", damaged=False)
        return fault if path == mine else real(path, *more)

    with monkeypatch.context() as patch:
        patch.setattr(files, "read_bytes", failing)
        assert main(["import", str(archive)]) == 1
        assert "cannot be read: Input/output error" in capsys.readouterr().err
        # Neither an archive nor a lock file is whole without it.
        for command in (["export", str(archive)], ["freeze"]):
            assert main(command) == 1
    assert store.load(GPU, ENVIRONMENT, problem(m=2)) == newer
