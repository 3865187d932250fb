"""Walks a root: yields every record and fault, and the files that go with them.

Listing, verifying, exporting and removing all walk the same way, so that they agree on what is
there. Names that the layout doesn't match are not the cache's and are skipped.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tmm_cache.complaints import passed_over
from tmm_cache.files import Fault, read_environment, read_record
from tmm_cache.head import Head, read_head
from tmm_cache.keys import JSON, is_slug
from tmm_cache.layout import DIGEST, RECORD, VERSION, VERSIONS
from tmm_cache.record import TuningRecord

T = TypeVar("T")

#: The fields of an `Entry` before its record: where it is, and what it was measured under.
Place = tuple[Path, Path, str, str, Mapping[str, JSON] | None]


@dataclass(frozen=True, slots=True)
class Folder:
    """The records of one GPU under one environment."""

    path: Path
    gpu: str
    environment_digest: str

    @property
    def schema(self) -> str:
        """The folder of its schema, like `v2`."""
        return self.path.parts[-3]

    @property
    def is_old(self) -> bool:
        """Whether its schema is older, so that its records are hints."""
        return self.schema != VERSION

    def names(self) -> list[str] | Fault:
        """The names of its files, sorted."""
        return _names(self.path)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a record is.

    `root` is the layer that holds it. `environment` is None if its readable file is missing or
    broken.
    """

    path: Path
    root: Path
    gpu: str
    environment_digest: str
    environment: Mapping[str, JSON] | None

    @property
    def digest(self) -> str:
        """The problem's digest."""
        return self.path.stem


@dataclass(frozen=True, slots=True)
class Entry(_Place):
    """A readable record and its location."""

    record: TuningRecord

    @property
    def summary(self) -> Summary:
        """A summary of this record."""
        place = self.path, self.root, self.gpu, self.environment_digest, self.environment
        return Summary(*place, Head.of(self.record), self.record)


@dataclass(frozen=True, slots=True)
class Summary(_Place):
    """A summary of a record and its location.

    It is read from the head of a file, unvalidated: `load` reads the record and checks it.
    """

    head: Head
    _record: TuningRecord | None = field(default=None, repr=False, compare=False)

    @property
    def problem(self) -> Mapping[str, JSON]:
        """The problem; only its sizes are checked."""
        return self.head.problem

    @property
    def clock(self) -> str:
        """The clock that the times were taken with."""
        return self.head.clock

    def load(self) -> TuningRecord | None:
        """The whole record; None if its file is gone, or damaged, with a `CacheWarning`."""
        record = read_record(self.path) if self._record is None else self._record
        if isinstance(record, Fault):
            passed_over(record)
            return None
        return record


@dataclass(frozen=True, slots=True)
class Located:
    """The record that answers for a problem, and its origin.

    `path` is None if it is held only in memory. `own`: it was saved by this process or in the
    user's own root, and not imported from an archive. `sealed`: its file has a correct checksum.
    """

    record: TuningRecord
    path: Path | None
    own: bool
    sealed: bool

    @property
    def trusted(self) -> bool:
        """Whether its winner may be used without verifying it on this machine first."""
        return self.own and self.sealed


def folders(root: Path, gpu: str | None = None) -> Iterator[Folder | Fault]:
    """The folders of records under a root, the current schema's first, then by name; an absent root
    has none."""
    for top in (root / version for version in VERSIONS):
        for name in _each(top):
            if isinstance(name, Fault):
                yield name
                return  # usually the root is at fault, and with it the older folder
            if not (is_slug(name) and gpu in (None, name)):
                continue
            for environment in _inside(top / name):
                if isinstance(environment, Fault):
                    yield environment
                elif DIGEST.fullmatch(environment):
                    path = top / name / environment
                    found = _is_folder(path)
                    if isinstance(found, Fault):
                        yield found
                    elif found:
                        yield Folder(path, name, environment)


def scan(root: Path, gpu: str | None = None) -> Iterator[Entry | Fault]:
    """Every record and every fault under a root, in the order of `folders`, then by name."""
    return _of_folders(root, gpu, scan_folder)


def scan_folder(root: Path, folder: Folder) -> Iterator[Entry | Fault]:
    """Every record and every fault of one folder; the environment's fault comes first."""
    for place in _places(root, folder):
        yield from _read(place)


def summaries(root: Path, gpu: str | None = None) -> Iterator[Summary | Fault]:
    """A summary of every record under a root, in the order of `scan`, and each fault met: a record
    with an intact head may be damaged further on."""
    return _of_folders(root, gpu, summaries_of)


def summaries_of(root: Path, folder: Folder) -> Iterator[Summary | Fault]:
    """Like `summaries`, for one folder."""
    for place in _places(root, folder):
        if not isinstance(place, Fault) and (head := read_head(place[0])) is not None:
            yield Summary(*place, head)
            continue
        for found in _read(place):
            yield found if isinstance(found, Fault) else found.summary


def _of_folders(
    root: Path, gpu: str | None, read: Callable[[Path, Folder], Iterator[T | Fault]]
) -> Iterator[T | Fault]:
    for folder in folders(root, gpu):
        if isinstance(folder, Fault):
            yield folder
        else:
            yield from read(root, folder)


def _read(place: Place | Fault) -> Iterator[Entry | Fault]:
    """The record at a place, or its fault; nothing if it was removed since it was listed."""
    found = place if isinstance(place, Fault) else read_record(place[0])
    if isinstance(found, Fault):
        yield found
    elif found is not None and not isinstance(place, Fault):
        yield Entry(*place, found)


def _places(root: Path, folder: Folder) -> Iterator[Place | Fault]:
    """The place of each record in a folder; the environment's fault comes first."""
    names = folder.names()
    if isinstance(names, Fault):
        yield names
        return
    environment = read_environment(folder.path)
    if isinstance(environment, Fault):
        yield environment
        environment = None
    for name in filter(RECORD.fullmatch, names):
        yield folder.path / name, root, folder.gpu, folder.environment_digest, environment


def _inside(path: Path) -> Iterator[str | Fault]:
    """The names in a folder; none if it is not a folder."""
    found = _is_folder(path)
    if isinstance(found, Fault):
        yield found
    elif found:
        yield from _each(path)


def _is_folder(path: Path) -> bool | Fault:
    # `os.path.isdir` returns False for an inaccessible folder, which would hide its records.
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        return Fault(path, f"cannot be looked at: {error}", damaged=False, place=True)


def _each(folder: Path) -> Iterator[str | Fault]:
    names = _names(folder)
    if isinstance(names, Fault):
        yield names
    else:
        yield from names


def _names(folder: Path) -> list[str] | Fault:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        return Fault(folder, f"cannot be listed: {error}", damaged=False, place=True)
