"""Walks a root: yields every record, and reports every fault.

Listing, verifying, exporting and removing all walk the same way, so that they agree on the files.
Names that the layout doesn't match are not the cache's and are skipped.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from tmm_base.guards import reraise

from tmm_cache.files import Fault, Report, read_brief, read_environment, read_problem, read_record
from tmm_cache.keys import Document, is_slug
from tmm_cache.paths import DIGEST, RECORD, VERSION
from tmm_cache.record import Brief, TuningRecord

R = TypeVar("R")

#: GPU, digest of the environment, digest of the problem.
Key: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Summary(Generic[R]):
    """A record, or the fields of it that a list shows, and its location.

    `root` is the layer that holds it. `environment` is None if its readable file is missing or
    broken.
    """

    path: Path
    root: Path
    environment: Document | None
    record: R

    @property
    def gpu(self) -> str:
        """The GPU's folder."""
        return self.path.parent.parent.name

    @property
    def environment_digest(self) -> str:
        """The environment's folder."""
        return self.path.parent.name

    @property
    def digest(self) -> str:
        """The problem's digest."""
        return self.path.stem

    @property
    def key(self) -> Key:
        """The key of the record among all records of a root."""
        return self.gpu, self.environment_digest, self.digest


def folders(root: Path, report: Report, gpu: str | None = None) -> Iterator[Path]:
    """The folders of records under a root, one for each GPU and environment, by name; an absent
    root has none."""
    top = root / VERSION
    slugs = [name for name in _names(top, report) if is_slug(name) and gpu in (None, name)]
    for of_gpu in _subfolders(top, slugs, report):
        digests = filter(DIGEST.fullmatch, _names(of_gpu, report))
        yield from _subfolders(of_gpu, digests, report)


def summaries(
    root: Path, report: Report, gpu: str | None = None
) -> Iterator[Summary[TuningRecord]]:
    """Every record under a root, in the order of `folders`, then by name."""
    return _walked(root, report, gpu, read_record)


def briefs(root: Path, report: Report) -> Iterator[Summary[Brief]]:
    """Like `summaries`, with the fields of each record that a list shows."""
    return _walked(root, report, None, read_brief)


def problems(root: Path, report: Report) -> Iterator[Summary[Document]]:
    """Like `summaries`, with the problem of each record."""
    return _walked(root, report, None, read_problem)


def _walked(
    root: Path, report: Report, gpu: str | None, read: Callable[[Path, Report], R | None]
) -> Iterator[Summary[R]]:
    for folder in folders(root, report, gpu):
        names = [*filter(RECORD.fullmatch, _names(folder, report))]
        # A folder whose records were removed keeps its environment, which may be damaged.
        if not names:
            continue
        environment = read_environment(folder, report)
        for path in (folder / name for name in names):
            # None: the file is damaged, or was removed since the folder was listed.
            if (record := read(path, report)) is not None:
                yield Summary(path, root, environment, record)


def _subfolders(folder: Path, names: Iterable[str], report: Report) -> Iterator[Path]:
    """Yield the paths of these names in a folder that are folders."""
    for path in (folder / name for name in names):
        # `os.path.isdir` returns False for an inaccessible folder, which would hide its records.
        try:
            if stat.S_ISDIR(os.stat(path).st_mode):
                yield path
        except OSError as error:
            reraise(error)
            if not isinstance(error, FileNotFoundError):
                report(Fault(path, f"cannot be read: {error}", of_folder=True))


def _names(folder: Path, report: Report) -> list[str]:
    """The sorted names in a folder; none if it is absent or cannot be listed, which is reported."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        reraise(error)
        if not isinstance(error, FileNotFoundError):
            report(Fault(folder, f"cannot be listed: {error}", of_folder=True))
        return []
