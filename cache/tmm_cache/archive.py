"""Carrying records to another machine: a tar file out, validated records in.

The archive is a stranger's until each member has proved to be a record, and nothing is unpacked:
names are matched against the layout, contents are parsed, and what is written is what was
understood. The same records always give the same bytes, so that an image layer is reproducible.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import posixpath
import re
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tmm_cache.files import (
    MAX_BYTES,
    parse_environment,
    parse_record,
    read_record,
    record_bytes,
    write_atomically,
    write_record,
)
from tmm_cache.keys import DIGEST_DIGITS, JSON, is_slug
from tmm_cache.layout import ENVIRONMENT, VERSION, VERSIONS, environment_folder
from tmm_cache.record import TuningRecord
from tmm_cache.scan import Entry

_MEMBER = re.compile(
    rf"(?:{'|'.join(VERSIONS)})/([^/]+)/([0-9a-f]{{{DIGEST_DIGITS}}})/([0-9a-f]{{{DIGEST_DIGITS}}}|environment)\.json"
)
# ValueError: tarfile lets some malformed headers through to `int`.
_BROKEN = (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, ValueError)


class ArchiveError(ValueError):
    """A file that is no archive of records, or one that no honest `export` has written."""


@dataclass(slots=True)
class Imported:
    """What an import did."""

    written: int = 0
    #: Records that were already here, as new or newer.
    kept: int = 0
    #: Members that are no part of a cache's records.
    ignored: int = 0
    #: Members whose content is not what their name says, with the reason.
    faults: list[tuple[str, str]] = field(default_factory=list)


def write_archive(file: Path, entries: Iterable[Entry]) -> int:
    """Write records and their environments to a `.tar.gz`; returns the number of records.

    Raises ArchiveError where the file is there and no regular file, OSError where it can't be
    written.
    """
    file = file.resolve()
    if file.exists() and not file.is_file():
        # Renaming over it would replace /dev/null for the whole machine.
        raise ArchiveError(f"{file}: is not a regular file")
    contents: dict[str, bytes] = {}
    count = 0
    for entry in entries:
        folder = f"{VERSION}/{entry.gpu}/{entry.environment_digest}"
        name = f"{folder}/{entry.digest}.json"
        if name in contents:  # an older schema's, of a problem that was measured anew
            continue
        contents[name] = record_bytes(entry.record)
        count += 1
        if entry.environment is not None:
            text = json.dumps(entry.environment, indent=2, sort_keys=True)
            contents[f"{folder}/{ENVIRONMENT}"] = text.encode("ascii") + b"\n"
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, data in sorted(contents.items()):
            member = tarfile.TarInfo(name)  # its owner and time are 0 unless set
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    write_atomically(file, buffer.getvalue(), mode=0o666)
    return count


def read_archive(file: Path, root: Path, force: bool) -> Imported:
    """Write an archive's records into a root, unless the root has one as new or newer.

    `force` overwrites newer ones too. A member whose content is wrong is left out and told of.
    Raises ArchiveError, with nothing written, for a file that is no archive or has a member that
    would lead out of the root: a link, a device, an absolute or climbing path. Raises OSError
    where the root can't be written.
    """
    if not file.is_file():
        raise ArchiveError(f"{file}: is not a file")
    imported = Imported()
    environments: dict[str, dict[str, JSON]] = {}
    records: dict[str, TuningRecord] = {}
    try:
        with tarfile.open(file, "r:*") as archive:
            members = archive.getmembers()
            _read_to_the_end(archive)
            for member in members:
                _refuse_unsafe(file, member)
            for member in members:
                name = posixpath.normpath(member.name)
                match = _MEMBER.fullmatch(name)
                if not member.isreg() or match is None or not is_slug(match[1]):
                    imported.ignored += member.isreg()
                    continue
                try:
                    data = _content(archive, member)
                    if match[3] == "environment":
                        environments[posixpath.dirname(name)] = parse_environment(data, match[2])
                    else:
                        records[name] = parse_record(data, match[3])
                except ValueError as error:
                    imported.faults.append((name, str(error)))
    except ArchiveError:
        raise
    except _BROKEN as error:
        raise ArchiveError(f"{file}: is not a readable archive: {error}") from error
    for name, record in sorted(records.items()):
        folder = posixpath.dirname(name)
        _, gpu, environment = folder.split("/")
        path = environment_folder(root, gpu, environment) / posixpath.basename(name)
        present = read_record(path)
        if isinstance(present, TuningRecord) and not force and not _is_better(record, present):
            imported.kept += 1
            continue
        # Two syncs a record would take four thousand of them a minute; the archive is still there.
        data = record_bytes(record, imported=True, checked=True)
        write_record(path, data, environments.get(folder), synced=False)
        imported.written += 1
    return imported


def _is_better(record: TuningRecord, present: TuningRecord) -> bool:
    """A hint never replaces a record that answers; of equals the newer counts."""
    if record.is_hint != present.is_hint:
        return present.is_hint
    return record.created_at > present.created_at


def _read_to_the_end(archive: tarfile.TarFile) -> None:
    # tarfile stops at the last member and would not notice that the checksum is cut off.
    while archive.fileobj is not None and archive.fileobj.read(2**20):
        pass


def _refuse_unsafe(file: Path, member: tarfile.TarInfo) -> None:
    parts = member.name.split("/")
    if member.name.startswith("/") or ".." in parts or "\\" in member.name or "\0" in member.name:
        raise ArchiveError(f"{file}: member {member.name!r} leads out of the cache")
    if not (member.isreg() or member.isdir()):
        raise ArchiveError(f"{file}: member {member.name!r} is neither a file nor a folder")


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes")
    stream = archive.extractfile(member)
    if stream is None:
        raise ValueError("has no content")
    with stream:
        return stream.read()
