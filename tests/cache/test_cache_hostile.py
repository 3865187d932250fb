"""Archives that were made to hurt: limits hold before memory or disk is taken."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import time
import tracemalloc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cache_builders import ENVIRONMENT, GPU, OLDER_ENVIRONMENT, made, problem, record
from tmm_cache import CacheStore, digest, unpack
from tmm_cache import archive as archive_module
from tmm_cache.cli import main
from tmm_cache.files import record_bytes
from tmm_cache.layout import VERSION

Captured = pytest.CaptureFixture[str]

FOLDER = f"{VERSION}/{GPU}/{digest(ENVIRONMENT)}"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "records.tar.gz"


def entry(m: int, folder: str = FOLDER, **changes: Any) -> tuple[str, bytes]:
    made_of = record(problem(m=m), **changes)
    return f"{folder}/{digest(made_of.problem)}.json", record_bytes(made_of)


def pack(archive: Path, *members: tuple[str, bytes]) -> None:
    with tarfile.open(archive, "w:gz", compresslevel=1) as file:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))


def header(kind: bytes, size: int, name: str = "x") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


def zeros(size: int) -> bytes:
    """So many zero bytes, as gzip packs them."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb") as packed:
        for _ in range(size // 2**20):
            packed.write(bytes(2**20))
    return buffer.getvalue()


def refused(archive: Path, root: Path, capsys: Captured, complaint: str) -> None:
    """The import ends with one line, writes nothing, and takes little memory."""
    tracemalloc.start()
    try:
        assert main(["import", str(archive)]) == 2
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1
    assert not root.exists()
    assert peak < 48 * 2**20


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]
)
def test_a_header_that_claims_gigabytes_is_not_read(
    archive: Path, root: Path, capsys: Captured, kind: bytes
) -> None:
    archive.write_bytes(gzip.compress(header(kind, 2**30)) + zeros(200 * 2**20))
    assert archive.stat().st_size < 2**20
    refused(archive, root, capsys, "has a header of 1073741824 bytes")


def test_many_headers_of_headers_end(archive: Path, root: Path, capsys: Captured) -> None:
    data = header(tarfile.XHDTYPE, 512) + b"12 path=abc\n".ljust(512, b"\0")
    archive.write_bytes(gzip.compress(data * 20_000))
    refused(archive, root, capsys, "is not a readable archive")


def test_what_unpacks_to_too_much_is_refused(
    archive: Path, root: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "MAX_UNPACKED", 40 * 2**20)
    name, data = entry(1)
    for padding in (b"a big member", b""):
        size = 30 * 2**20 if padding else 0
        head = gzip.compress(header(tarfile.REGTYPE, len(data), name))
        body = gzip.compress(data.ljust(-(-len(data) // 512) * 512, b"\0"))
        tail = gzip.compress(header(tarfile.REGTYPE, size, "big") if padding else bytes(1024))
        archive.write_bytes(head + body + tail + zeros(64 * 2**20))
        refused(archive, root, capsys, "unpacks to more than")


def test_too_many_members_are_refused(
    archive: Path, root: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "MOST_MEMBERS", 50)
    pack(archive, *(entry(m) for m in range(1, 52)))
    refused(archive, root, capsys, "has more than 50 members")
    pack(archive, *(entry(m) for m in range(1, 51)))
    assert main(["import", str(archive)]) == 0


def test_a_member_beyond_the_end_or_before_the_start_is_refused(
    archive: Path, root: Path, capsys: Captured
) -> None:
    archive.write_bytes(header(tarfile.REGTYPE, 2**62) + bytes(1024))
    refused(archive, root, capsys, "has a member of 4611686018427387904 bytes")
    broken = bytearray(header(tarfile.REGTYPE, 0))
    broken[124:136] = b"\xff" * 12  # -1, by the extension of GNU
    broken[148:156] = b" " * 8
    broken[148:156] = f"{sum(broken):06o}\0 ".encode()
    archive.write_bytes(bytes(broken) + bytes(1024))
    refused(archive, root, capsys, "has a member of -1 bytes")


def test_sparse_files_are_refused(archive: Path, root: Path, capsys: Captured) -> None:
    archive.write_bytes(header(tarfile.GNUTYPE_SPARSE, 0) + bytes(1024))
    refused(archive, root, capsys, "is neither a file nor a folder")


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_an_archive_is_read_packed_or_not(
    archive: Path, root: Path, compress: Callable[[bytes], bytes]
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name, data in (entry(1), entry(2)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    archive.write_bytes(compress(buffer.getvalue()))
    assert main(["import", str(archive)]) == 0
    assert len(list(CacheStore().entries())) == 2


def test_large_and_many_environments_are_left_out(
    archive: Path, root: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_module, "MOST_ENVIRONMENTS", 2)
    environments = [{"torch": str(number)} for number in range(3)] + [{"torch": "x" * 2**14}]
    folders = [f"{VERSION}/{GPU}/{digest(environment)}" for environment in environments]
    pack(
        archive,
        *(entry(1, folder) for folder in folders),
        *(
            (f"{folder}/environment.json", json.dumps(environment).encode())
            for folder, environment in zip(folders, environments, strict=True)
        ),
    )
    assert main(["import", str(archive)]) == 1
    assert capsys.readouterr().err.count("left out ") == 2
    found = [each.environment for each in CacheStore().entries()]
    assert sorted(map(str, found)) == sorted(map(str, [*environments[:2], None, None]))


def test_a_record_from_the_future_is_left_out(
    store: CacheStore, archive: Path, capsys: Captured
) -> None:
    store.save(GPU, ENVIRONMENT, record(problem(m=1), note="mine"))
    pack(
        archive,
        entry(1, created="2999-01-01T00:00:00Z"),
        entry(2, created=made(timedelta(days=-2))),
        entry(3, created=made(timedelta(hours=-2))),  # a clock that is ahead
    )
    assert main(["import", str(archive), "--force"]) == 1
    error = capsys.readouterr().err
    assert error.count("which is yet to come") == 2
    mine = store.load(GPU, ENVIRONMENT, problem(m=1))
    assert mine is not None
    assert mine.note == "mine"
    assert sorted(each.record.problem["m"] for each in store.entries()) == [1, 3]


def test_what_was_imported_does_not_make_prune_remove_what_was_tuned(
    store: CacheStore, archive: Path, capsys: Captured
) -> None:
    """A stranger's record that says it is newer, under an environment that nobody has."""
    store.save(GPU, ENVIRONMENT, record(problem(m=1), created=made(timedelta(days=9))))
    foreign = {"torch": "99"}
    pack(
        archive,
        entry(2, f"{VERSION}/{GPU}/{digest(foreign)}", created=made(timedelta(hours=-20))),
        entry(3, created=made(timedelta(days=1))),
    )
    assert main(["import", str(archive)]) == 0
    assert main(["prune", "-y"]) == 0
    assert store.load(GPU, ENVIRONMENT, problem(m=1)) is not None
    # What says that it is older is outdated, as ever.
    pack(archive, entry(4, f"{VERSION}/{GPU}/{digest(foreign)}", created=made(timedelta(days=30))))
    assert main(["clear", "-y", "--shape", "2x*x*"]) == 0
    assert main(["import", str(archive)]) == 0
    assert main(["prune", "-y"]) == 0
    assert sorted(each.record.problem["m"] for each in store.entries()) == [1, 3]
    # Once it has answered here, it counts: this machine runs under that environment.
    pack(archive, entry(5, f"{VERSION}/{GPU}/{digest(foreign)}", created=made(timedelta(hours=2))))
    assert main(["import", str(archive)]) == 0
    assert store.load(GPU, foreign, problem(m=5)) is not None
    assert main(["prune", "-y"]) == 0
    assert [each.record.problem["m"] for each in store.entries()] == [5]


def test_a_cache_that_was_only_imported_is_not_pruned(archive: Path, root: Path) -> None:
    older = f"{VERSION}/{GPU}/{digest(OLDER_ENVIRONMENT)}"
    pack(archive, entry(1, older, created=made(timedelta(days=9))), entry(2))
    assert main(["import", str(archive)]) == 0
    assert main(["prune", "-y"]) == 0
    assert len(list(CacheStore().entries())) == 2


def test_an_import_that_fails_in_the_middle_leaves_whole_records_and_no_temporary_files(
    archive: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    pack(archive, *(entry(m) for m in range(1, 10)))
    real, calls = os.replace, []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 5:
            raise OSError(28, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(os, "replace", failing)
    assert main(["import", str(archive)]) == 2
    assert "No space left" in capsys.readouterr().err
    assert len(list(CacheStore().entries())) >= 3
    assert list(root.rglob("*.tmp")) == []


def test_four_thousand_records_are_imported_in_seconds(
    archive: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with a sync per batch, not per record, which is what takes the time on a busy disk."""
    pack(archive, *(entry(m) for m in range(1, 4001)))
    syncs, real = [], os.fsync

    def counted(handle: int) -> None:
        syncs.append(handle)
        real(handle)

    monkeypatch.setattr(os, "fsync", counted)
    before = time.process_time()
    assert main(["import", str(archive)]) == 0
    assert time.process_time() - before < 5
    assert len(syncs) < 30
    assert len(list(root.rglob("*.json"))) == 4001 - 1
