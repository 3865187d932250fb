"""The transport document: the records of a cache in one file, for export, import and freeze.

`{"lock": 1, "records": [{"gpu": …, "environment": …, "record": …}], "checksum": …}`, compressed if
the name ends in `.gz`. Under `TMM_REQUIRE_LOCKED=1` a store answers only from such a file, so that
every process makes the choices that were tested. It may come from anybody: its size is limited
before memory is used, its checksum detects damage, and each record is checked when it is needed.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from tmm_base import UsageError

from tmm_cache.cache_errors import RecordError
from tmm_cache.disk import write_for_all
from tmm_cache.fields import decoded
from tmm_cache.files import (
    Fault,
    Report,
    read_file,
    read_record,
    record_bytes,
    sealed,
    unsealed,
    write_record,
)
from tmm_cache.keys import JSON, SLUG, Document, canonical, digest
from tmm_cache.paths import record_path
from tmm_cache.record import TuningRecord
from tmm_cache.scan import Key, Summary

#: Version of the document.
SCHEMA: Final = 1
#: Limit of the uncompressed document: ten thousand records of some 6 kB.
MAX_BYTES: Final = 64 * 2**20
#: Limit of one environment, which takes about 300 bytes.
MAX_ENVIRONMENT_BYTES: Final = 2**14
#: How far the clock of the exporting machine may be ahead.
CLOCK_SKEW: Final = timedelta(days=1)


def write_transport(file: Path, found: Iterable[Summary[TuningRecord]], report: Report) -> int:
    """Write these records to a file, without most of their samples; returns their number.

    If a problem has several records, the first is written. Without records no file is written.
    Records whose environment is unknown are reported and left out. Raises UsageError for more than
    `MAX_BYTES`, OSError like `write_for_all`.
    """
    written: dict[Key, JSON] = {}
    for summary in found:
        key, record = summary.key, summary.record
        if summary.environment is None:
            folder = summary.path.parent
            report(Fault(folder, "its records' environment is unknown", of_folder=True))
        elif key not in written:
            written[key] = {
                "gpu": summary.gpu,
                "environment": json.loads(canonical(summary.environment)),  # sorted
                "record": record.thinned().to_json(),
            }
    if not written:
        return 0
    # Sorted: the same records give the same bytes, from any layer.
    records = [written[key] for key in sorted(written)]
    data = sealed({"lock": SCHEMA, "records": records})
    if len(data) > MAX_BYTES:
        raise UsageError(f"{file}: {len(data)} bytes exceed the limit of {MAX_BYTES}")
    write_for_all(file, gzip.compress(data, mtime=0) if file.suffix == ".gz" else data)
    return len(written)


class Transport:
    """The records of a transport document. Raises UsageError for any other file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        read = read_file(path, most=MAX_BYTES)
        if not isinstance(read, bytes):
            raise UsageError(f"{path}: {read.reason if read else 'there is no such file'}")
        try:
            self._items = dict(_items(_unpacked(read)))
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"{path}: is not a file of records: {error}") from error

    def records(self) -> Iterator[tuple[Key, Document, TuningRecord | Fault]]:
        """Yield every record, checked, with its key and environment."""
        for key, (environment, document) in self._items.items():
            yield key, environment, self._checked(key, document)

    def record(self, key: Key) -> TuningRecord | Fault | None:
        """Return the record of a problem, checked; None if there is none."""
        return self._checked(key, self._items[key][1]) if key in self._items else None

    def _checked(self, key: Key, document: dict[str, Any]) -> TuningRecord | Fault:
        try:
            return TuningRecord.from_json(document)
        except RecordError as error:
            return Fault(self.path, f"holds no valid record of {key[2]}: {error}", damaged=True)


def _unpacked(data: bytes) -> bytes:
    """Return the uncompressed bytes. Raises ValueError if they are torn or exceed `MAX_BYTES`."""
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        with gzip.open(io.BytesIO(data)) as stream:
            data = stream.read(MAX_BYTES + 1)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(str(error)) from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"unpacks to more than {MAX_BYTES} bytes")
    return data


class _Item(Struct):
    gpu: Annotated[str, Meta(pattern=rf"^{SLUG}\Z")]
    environment: dict[str, Any]
    #: Checked when it is needed.
    record: dict[str, Any]


class _Document(Struct):
    lock: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)]
    records: list[_Item]


def _items(data: bytes) -> Iterator[tuple[Key, tuple[Document, dict[str, Any]]]]:
    """Yield the key, environment and document of each record; only the key is checked."""
    document: _Document = decoded(unsealed(data, required=True), _Document)
    seen: set[Key] = set()
    for place, item in enumerate(document.records):
        if len(canonical(item.environment)) > MAX_ENVIRONMENT_BYTES:
            raise ValueError(f"records[{place}] has too large an environment")
        if not isinstance(problem := item.record.get("problem"), dict):
            raise ValueError(f"records[{place}] lacks a problem")
        key = item.gpu, digest(item.environment), digest(problem)
        if key in seen:  # which of the two was tested is unknown
            raise ValueError(f"records[{place}] is the second record of {key[2]}")
        seen.add(key)
        yield key, (item.environment, item.record)


@dataclass(slots=True)
class Imported:
    """The result of an import."""

    written: int = 0
    #: Records of the root that are at least as new.
    kept: int = 0
    #: Why records were left out.
    faults: list[str] = field(default_factory=list)


def import_records(file: Path, root: Path, force: bool) -> Imported:
    """Write a document's records into a root, unless the root has one at least as new.

    `force` overwrites newer ones too. An invalid record is left out, and so is one created in the
    future, which would win over every record tuned until then. For the same reason a record of the
    root that was created in the future is replaced. Raises UsageError, with nothing written, for a
    file that is not a transport document, OSError if the root can't be used.
    """
    imported = Imported()
    latest = datetime.now(timezone.utc) + CLOCK_SKEW
    for key, environment, record in Transport(file).records():
        if isinstance(record, Fault):
            imported.faults.append(record.reason)
        elif record.created_at > latest:
            imported.faults.append(f"{key[2]} was created in the future: {record.created}")
        else:
            path = record_path(root, *key)
            unread: list[Fault] = []
            present = None if force else read_record(path, unread.append)
            if unread and not unread[0].damaged:
                # The record there may be newer, and readable the next time.
                if unread[0].of_folder:
                    raise OSError(f"{unread[0].path} {unread[0].reason}")
                imported.faults.append(f"{key[2]}: {unread[0].path} {unread[0].reason}")
            elif present is not None and record.created_at <= present.created_at <= latest:
                imported.kept += 1
            else:
                write_record(path, record_bytes(record, checked=True), environment)
                imported.written += 1
    return imported
