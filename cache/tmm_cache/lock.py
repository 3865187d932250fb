"""The lock file: the records that a deployment uses, in one document shipped with it.

`tmm-cache freeze` writes it; under `TMM_REQUIRE_LOCKED=1` a store answers only from it, so that
every process always chooses what was tested. It is untrusted: its checksum detects damage, and each
record is checked when it is requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tmm_cache.disk import write_for_all
from tmm_cache.errors import RecordError, UsageError
from tmm_cache.files import Fault, Report, has_checksum, parse, read_bytes, sealed
from tmm_cache.head import Head
from tmm_cache.keys import JSON, Document, digest, is_slug
from tmm_cache.record import TuningRecord
from tmm_cache.scan import Key, Summary

#: Version of the document.
LOCK_SCHEMA: Final = 1
#: Thinned records take some 6 kB: ten thousand of them are 60 MB.
MAX_BYTES: Final = 256 * 2**20


def write_lock(file: Path, found: Iterable[Summary]) -> int:
    """Write these records to a lock file; returns their number.

    The first of several records of a problem is locked. Hints, which never answer, and records
    whose environment is unknown are left out. Raises OSError like `write_for_all`.
    """
    locked: dict[Key, JSON] = {}
    for summary in found:
        key, record = summary.key, summary.record
        if not record.is_hint and summary.environment is not None and key not in locked:
            locked[key] = {
                "gpu": summary.gpu,
                "environment": summary.environment,
                "record": record.thinned().to_json(),
            }
    # Sorted: the same records give the same bytes, whichever layer they came from.
    records = [locked[key] for key in sorted(locked)]
    write_for_all(file, sealed({"lock": LOCK_SCHEMA, "records": records}))
    return len(locked)


class LockFile:
    """The records of a lock file. Raises UsageError for any other file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = read_bytes(path, MAX_BYTES)
        if not isinstance(data, bytes):
            raise UsageError(f"{path}: {data.reason if data else 'there is no such file'}")
        try:
            self._items = dict(_items(data))
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"{path}: is not a lock file: {error}") from error

    def keys(self) -> Iterator[tuple[str, Document, Document]]:
        """GPU, environment and problem of every record."""
        for (gpu, _, _), (environment, document) in self._items.items():
            yield gpu, environment, document["problem"]

    def summaries(self, report: Report) -> Iterator[Summary]:
        """A summary of every valid record, at a path inside the file."""
        for key, (environment, _) in self._items.items():
            gpu, folder, name = key
            path = self.path / gpu / folder / f"{name}.json"
            record = self.record(key)
            if isinstance(record, Fault):
                report(replace(record, path=path))
            elif record is not None:
                yield Summary(path, self.path, gpu, folder, environment, Head.of(record), record)

    def record(self, key: Key) -> TuningRecord | Fault | None:
        """The record of a problem, checked; None if none is locked."""
        if key not in self._items:
            return None
        try:
            record = TuningRecord.from_json(self._items[key][1])
        except RecordError as error:
            return Fault(self.path, f"holds no valid record of {key[2]}: {error}", damaged=True)
        return None if record.is_hint else record


def _items(data: bytes) -> Iterator[tuple[Key, tuple[Document, dict[str, Any]]]]:
    """Each record's key, with its environment and its document, of which the problem is checked to
    be an object."""
    document = parse(data)
    if not isinstance(document, dict) or document.get("lock") != LOCK_SCHEMA:
        raise ValueError(f"its field 'lock' is not {LOCK_SCHEMA}")
    if not has_checksum(data, document, document.pop("checksum", None)):
        raise ValueError("its checksum is not the content's: freeze again")
    records = document.get("records")
    if not isinstance(records, list):
        raise ValueError("it holds no list of records")
    for place, item in enumerate(records):
        if not isinstance(item, dict):
            raise ValueError(f"records[{place}] is not an object")
        gpu, environment, record = item.get("gpu"), item.get("environment"), item.get("record")
        if not (isinstance(gpu, str) and is_slug(gpu) and isinstance(environment, dict)):
            raise ValueError(f"records[{place}] lacks GPU and environment")
        if not (isinstance(record, dict) and isinstance(record.get("problem"), dict)):
            raise ValueError(f"records[{place}] lacks a problem")
        yield (gpu, digest(environment), digest(record["problem"])), (environment, record)
