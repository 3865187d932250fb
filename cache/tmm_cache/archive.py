"""Carries records to another machine: a tar file out, validated records in.

The archive is untrusted, and nothing is unpacked: names are matched against the layout, contents
are parsed, and the parsed record is what is written. The same records always give the same bytes,
so that an image layer is reproducible.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import posixpath
import re
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Final

from tmm_cache.batch import Batch
from tmm_cache.disk import open_regular, write_for_all
from tmm_cache.errors import RecordError, UsageError
from tmm_cache.files import (
    Fault,
    Stored,
    parse_environment,
    parse_stored,
    read_stored,
    record_bytes,
)
from tmm_cache.keys import DIGEST_DIGITS, JSON, SLUG
from tmm_cache.layout import ENVIRONMENT, VERSION, VERSIONS, record_path
from tmm_cache.record import TuningRecord
from tmm_cache.scan import Summary
from tmm_cache.unpack import Member, members

_MEMBER = re.compile(
    rf"(?:{'|'.join(VERSIONS)})/({SLUG})/([0-9a-f]{{{DIGEST_DIGITS}}})/([0-9a-f]{{{DIGEST_DIGITS}}}|environment)\.json"
)
#: How far the clock of the exporting machine may be ahead.
CLOCK_SKEW: Final = timedelta(days=1)
#: Environments stay in memory while an archive is read, records do not. One takes about 300 bytes.
MAX_ENVIRONMENT_BYTES: Final = 2**14
MOST_ENVIRONMENTS: Final = 4096


@dataclass(slots=True)
class Imported:
    """What an import did."""

    written: int = 0
    #: Records that were already here and are at least as new.
    kept: int = 0
    #: Members that are not part of a cache.
    ignored: int = 0
    #: Members whose content does not match their name, with the reason.
    faults: list[tuple[str, str]] = field(default_factory=list)


def write_archive(file: Path, entries: Iterable[Summary], *, thin: bool = False) -> int:
    """Write records and their environments to a `.tar.gz`; returns the number of records.

    With `thin`, without most of their samples.

    Raises OSError like `write_for_all`.
    """
    contents: dict[str, bytes] = {}
    count = 0
    for entry in entries:
        folder = f"{VERSION}/{entry.gpu}/{entry.environment_digest}"
        name = f"{folder}/{entry.digest}.json"
        if name in contents:  # a v1 record whose problem was measured again
            continue
        contents[name] = record_bytes(entry.record.thinned() if thin else entry.record)
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
            member = tarfile.TarInfo(name)  # owner and time default to 0
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    write_for_all(file, buffer.getvalue())
    return count


def read_archive(file: Path, root: Path, force: bool) -> Imported:
    """Write an archive's records into a root, unless the root has one at least as new.

    `force` overwrites newer ones too. A member with invalid content is skipped and reported, as is
    one created in the future, which would win over every record tuned until then. Raises
    UsageError, with nothing written, for a file that is not an archive, that exceeds the limits
    of `unpack`, or has a member that would escape the root: a link, a device, an absolute or
    climbing path. Raises OSError if the root can't be read or written.
    """
    try:
        handle = open_regular(file, os.O_RDONLY)
    except OSError as error:
        raise UsageError(f"{file}: is not a file that can be read ({error})") from error
    imported = Imported()
    with open(handle, "rb") as raw, Batch() as batch:
        # The first pass only validates: it writes nothing and keeps no record.
        environments = _environments(members(file, raw), imported)
        raw.seek(0)
        latest = datetime.now(timezone.utc) + CLOCK_SKEW
        #: What is at a path, or waits to be put there: an archive may hold both schemas.
        ranks: dict[Path, tuple[bool, datetime]] = {}
        for member in members(file, raw):
            match = _MEMBER.fullmatch(member.name)
            if match is None:
                imported.ignored += 1
            elif match[3] != "environment":
                path = record_path(root, match[1], match[2], match[3])
                try:
                    record = parse_stored(member.data(), match[3]).record
                    if record.created_at > latest:
                        raise RecordError(f"created: found {record.created}, which is yet to come")
                except ValueError as error:
                    imported.faults.append((member.name, str(error)))
                    continue
                rank = _rank(record)
                if not force and path not in ranks:
                    present = read_stored(path)
                    if isinstance(present, Stored):
                        ranks[path] = _rank(present.record)
                    elif isinstance(present, Fault) and not present.damaged:
                        # The record there may be newer, and readable the next time.
                        if present.place:
                            raise OSError(f"{present.path} {present.reason}")
                        imported.faults.append((member.name, f"{present.path} {present.reason}"))
                        continue
                if path in ranks and rank <= ranks[path]:
                    imported.kept += 1
                    continue
                ranks[path] = rank
                environment = environments.get(posixpath.dirname(member.name))
                batch.add(path, record_bytes(record, imported=True, checked=True), environment)
                imported.written += 1
    return imported


def _environments(found: Iterable[Member], imported: Imported) -> dict[str, dict[str, JSON]]:
    """The environments by folder; faults are added to `imported`."""
    environments: dict[str, dict[str, JSON]] = {}
    for member in found:
        match = _MEMBER.fullmatch(member.name)
        if match is None or match[3] != "environment":
            continue
        try:
            if len(environments) >= MOST_ENVIRONMENTS or member.size > MAX_ENVIRONMENT_BYTES:
                raise RecordError(
                    f"environment: found {member.size} bytes after {len(environments)} others, "
                    f"accepted are {MAX_ENVIRONMENT_BYTES} and {MOST_ENVIRONMENTS}"
                )
            environments[posixpath.dirname(member.name)] = parse_environment(
                member.data(), match[2]
            )
        except ValueError as error:
            imported.faults.append((member.name, str(error)))
    return environments


def _rank(record: TuningRecord) -> tuple[bool, datetime]:
    """A hint never replaces a record that answers; between equals the newer wins."""
    return not record.is_hint, record.created_at
