"""The files of records and environments: their bytes, their checks and their faults.

A read never raises: it returns the content, None if there is no file, or a `Fault`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from tmm_base.guards import reraise

from tmm_cache.cache_errors import RecordError
from tmm_cache.disk import (
    NotRegularError,
    closing,
    make_folder,
    opened,
    read_all,
    require_regular,
    write_atomically,
)
from tmm_cache.fields import parse
from tmm_cache.keys import JSON, Document, digest, plain
from tmm_cache.paths import ENVIRONMENT
from tmm_cache.record import Brief, TuningRecord, problem_of

T = TypeVar("T")

#: A thousand candidates with a hundred samples each take 2 MB; a larger file is not a record.
MAX_BYTES = 16 * 2**20

#: Digits of the SHA-256 in a record's file: it detects damage, not forgery.
CHECKSUM_DIGITS = 16
#: The end of a document that `sealed` wrote.
_SEAL_BYTES = 64
_SEAL = re.compile(rb', "checksum": "([0-9a-f]{16})"\}\n\Z')


@dataclass(frozen=True, slots=True)
class Fault:
    """A file that exists and can't be used.

    `damaged`: its content is wrong for good. Otherwise it could not be read this time, for instance
    because a permission or a mount was missing.
    """

    path: Path
    reason: str
    damaged: bool = False
    #: Whether the fault affects every file of a folder: one warning, not thousands.
    of_folder: bool = False


#: Called with each fault that a walk over files meets; the walk goes on.
Report: TypeAlias = Callable[[Fault], object]


def parse_stored(data: bytes, name: str) -> TuningRecord:
    """Return the record of a file called `<name>.json`. A file made by hand may lack a checksum.

    Raises ValueError for bytes that are not JSON, and RecordError for JSON that is not a record or
    has a wrong checksum. RecordError is also raised if the file's name is not the digest of its
    problem: the file was edited, or copied under a wrong name.
    """
    record = TuningRecord.from_bytes(unsealed(data))
    actual = digest(record.problem)
    if actual != name:
        raise RecordError(f"problem: found the problem of {actual}.json, accepted is {name}'s own")
    return record


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:CHECKSUM_DIGITS]


def sealed(document: Document) -> bytes:
    """Return a document's bytes, with its checksum appended as the last field."""
    text = json.dumps(document, allow_nan=False)
    return f'{text[:-1]}, "checksum": "{_checksum(text)}"}}\n'.encode("ascii")


def unsealed(data: bytes, *, required: bool = False) -> bytes:
    """A document's bytes without its checksum. Raises ValueError if it has another checksum than
    its content, or none where one is ``required``."""
    if not data.strip():
        raise ValueError("the file is empty")
    if (seal := _SEAL.search(data, max(len(data) - _SEAL_BYTES, 0))) is not None:
        content = data[: seal.start()] + b"}"
        if hashlib.sha256(content).hexdigest()[:CHECKSUM_DIGITS].encode() == seal[1]:
            return content
    document = parse(data)  # an editor may have laid it out anew
    has_seal = isinstance(document, dict) and "checksum" in document
    if not has_seal and not required:
        return data
    found = document.pop("checksum") if has_seal else None  # type: ignore[attr-defined]
    text = json.dumps(document, allow_nan=False)
    if found != _checksum(text):
        raise RecordError("checksum: found another than the content's; the file changed")
    return text.encode("ascii")


def parse_environment(data: bytes, name: str) -> dict[str, JSON]:
    """Return the environment of a folder called `name`. Raises ValueError like `parse_stored`."""
    value = parse(data)
    if not isinstance(value, dict):
        raise RecordError("environment: found no object, accepted is an object")
    try:
        actual = digest(value)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"environment: found a value that is not JSON ({error})") from error
    if actual != name:
        raise RecordError(f"environment: its digest is {actual}, accepted is {name}")
    return value


def read_file(path: Path, *, most: int = MAX_BYTES) -> bytes | Fault | None:
    """Return a regular file's content; None if it is absent."""
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        reraise(error)
        return None
    except OSError as error:
        reraise(error)
        return Fault(path.parent, f"cannot be read: {error}", of_folder=True)
    try:
        require_regular(status)
        with closing(opened(path, os.O_RDONLY)) as handle:
            data = read_all(handle, most)
    except FileNotFoundError as error:
        reraise(error)
        return None
    except NotRegularError as error:
        return Fault(path, str(error))
    except OSError as error:
        reraise(error)
        return Fault(path, f"cannot be read: {error.strerror or error}")
    if len(data) > most:
        return Fault(path, f"is larger than {most} bytes", damaged=True)
    return data


def read_record(path: Path, report: Report) -> TuningRecord | None:
    """The record in a file; None if the file is absent, or has a fault, which is reported."""
    return _parsed(path, lambda data: parse_stored(data, path.stem), "record", report)


def read_brief(path: Path, report: Report) -> Brief | None:
    """Return the fields of a file's record that a list shows; None as for :func:`read_record`."""
    return _parsed(path, Brief.from_bytes, "record", report)


def read_problem(path: Path, report: Report) -> Document | None:
    """Return the problem of a file's record; None as for :func:`read_record`."""
    return _parsed(path, problem_of, "record", report)


def read_environment(folder: Path, report: Report) -> dict[str, JSON] | None:
    """Return the environment of a folder of records; None as for :func:`read_record`."""
    path = folder / ENVIRONMENT
    return _parsed(path, lambda data: parse_environment(data, folder.name), "environment", report)


def _parsed(path: Path, parse: Callable[[bytes], T], what: str, report: Report) -> T | None:
    read = read_file(path)
    try:
        if isinstance(read, bytes):
            return parse(read)
    except ValueError as error:
        reraise(error)
        read = Fault(path, f"is not a valid {what}: {error}", damaged=True)
    if read is not None:
        report(read)
    return None


def record_bytes(record: TuningRecord, checked: bool = False) -> bytes:
    """Return the sealed content of a record's file. `checked`: the record was just read, and is not
    checked again.

    Raises RecordError for a record that would not read back: a bug, better reported now than as a
    warning in every later process.
    """
    document = record.to_json()
    if not checked:
        TuningRecord.from_json(document)
    return sealed(document)


def write_record(path: Path, data: bytes, environment: Document) -> None:
    """Write a record's bytes, and its environment if that is absent or damaged.

    Raises OSError; then the file is unchanged.
    """
    write_environment(path.parent, environment)
    write_atomically(path, data)


def write_environment(folder: Path, environment: Document) -> None:
    """Write the readable environment of a folder, if it is absent or damaged, and make the folder.
    Raises OSError."""
    path = folder / ENVIRONMENT
    faults: list[Fault] = []
    if read_environment(folder, faults.append) is None and all(each.damaged for each in faults):
        make_folder(folder)
        text = json.dumps(plain(environment), indent=2) + "\n"
        write_atomically(path, text.encode("ascii"))
