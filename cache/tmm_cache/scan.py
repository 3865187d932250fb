"""Walking a root: every record of it, every fault of it, and the files that go with them.

Whoever lists, verifies, exports or removes walks the same way, so that they agree on what is
there. Names that the layout doesn't know are somebody else's and are passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tmm_cache.files import Fault, read_environment, read_record
from tmm_cache.keys import JSON, is_slug
from tmm_cache.layout import DIGEST, RECORD, VERSION, VERSIONS
from tmm_cache.record import TuningRecord


@dataclass(frozen=True, slots=True)
class Folder:
    """The records of one GPU under one environment."""

    path: Path
    gpu: str
    environment_digest: str

    @property
    def is_old(self) -> bool:
        """Whether it is of an older schema: its records are hints."""
        return self.path.parts[-3] != VERSION

    def names(self) -> list[str] | Fault:
        """What lies in it, sorted."""
        return _names(self.path)


@dataclass(frozen=True, slots=True)
class Entry:
    """One readable record and where it lies.

    `root` is the layer that holds it. `environment` is None where its readable file is missing or
    broken.
    """

    path: Path
    root: Path
    gpu: str
    environment_digest: str
    environment: Mapping[str, JSON] | None
    record: TuningRecord

    @property
    def digest(self) -> str:
        """The problem's digest."""
        return self.path.stem


def folders(root: Path, gpu: str | None = None) -> Iterator[Folder | Fault]:
    """The folders of records under a root, those of the current schema first, then in the order
    of their names; an absent root has none."""
    for top in (root / version for version in VERSIONS):
        for name in _each(top):
            if isinstance(name, Fault):
                yield name
                return  # most often the root is at fault, and the older folder with it
            if is_slug(name) and gpu in (None, name) and os.path.isdir(top / name):
                for environment in _each(top / name):
                    if isinstance(environment, Fault):
                        yield environment
                        continue
                    path = top / name / environment
                    if DIGEST.fullmatch(environment) and os.path.isdir(path):
                        yield Folder(path, name, environment)


def scan(root: Path, gpu: str | None = None) -> Iterator[Entry | Fault]:
    """Every record and every fault under a root, in the order of `folders` and their names."""
    for folder in folders(root, gpu):
        if isinstance(folder, Fault):
            yield folder
        else:
            yield from scan_folder(root, folder)


def scan_folder(root: Path, folder: Folder) -> Iterator[Entry | Fault]:
    """Every record and every fault of one folder; the environment's fault comes first."""
    names = folder.names()
    if isinstance(names, Fault):
        yield names
        return
    environment = read_environment(folder.path)
    if isinstance(environment, Fault):
        yield environment
        environment = None
    for name in filter(RECORD.fullmatch, names):
        path = folder.path / name
        record = read_record(path)
        if isinstance(record, TuningRecord):
            yield Entry(path, root, folder.gpu, folder.environment_digest, environment, record)
        elif record is not None:  # None: removed since it was listed
            yield record


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
