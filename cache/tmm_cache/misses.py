"""Logs problems that were met where tuning was forbidden, for `tmm tune --misses`.

Under graph capture or with tuning switched off a call can't wait for a timing, but the operator
wants to know what to tune. One line per problem is appended in a single write, so that any number
of processes can share the file without a lock.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tmm_cache.complaints import Complaints
from tmm_cache.disk import append_line, make_folder
from tmm_cache.files import (
    MAX_BYTES,
    Fault,
    Report,
    read_bytes,
    read_environment,
    write_environment,
)
from tmm_cache.keys import Document, canonical
from tmm_cache.layout import MISSES
from tmm_cache.scan import Folder, folders


@dataclass(frozen=True, slots=True)
class Miss:
    """A problem without a record, with the GPU, environment and number of processes that met it.

    `environment` is None if its readable file is missing or broken.
    """

    gpu: str
    environment_digest: str
    environment: Document | None
    problem: Document
    count: int


class MissLog:
    """The logs of one root. Never raises OSError."""

    def __init__(self, root: Path, complaints: Complaints) -> None:
        self._root = root
        self._complaints = complaints
        self._logged: set[Path] = set()

    def add(self, path: Path, environment: Document, problem: Document) -> None:
        """Log the problem whose record would be at `path`, once."""
        if path in self._logged or not self._complaints.may_write():
            return
        self._logged.add(path)
        try:
            make_folder(path.parent)
            write_environment(path.parent, environment)
            line = canonical({"problem": problem}).encode("ascii")
            if not append_line(path.with_name(MISSES), line, MAX_BYTES):
                raise OSError("it is full, tune or clear its problems")
        except OSError as error:
            log = path.with_name(MISSES)
            told = "problems that are not tuned are not noted"
            self._complaints.beside(log, error, "written", told)

    def all(self) -> list[Miss]:
        """The logged problems, each once per GPU and environment."""
        found, report = [], self._complaints.fault
        for folder in self._folders():
            problems = read_misses(folder.path, report)
            if not problems:
                continue
            environment = read_environment(folder.path, report)
            found += [
                Miss(folder.gpu, folder.environment_digest, environment, problem, count)
                for problem, count in problems
            ]
        return found

    def clear(self) -> int:
        """Clear the logs; returns how many were removed."""
        from tmm_cache import removal  # not needed for replay

        removals = [
            each for folder in self._folders() for each in removal.misses(folder, "asked for")
        ]
        self._logged.clear()
        return removal.remove(self._root, removals, self._complaints.fault)

    def _folders(self) -> Iterator[Folder]:
        for folder in folders(self._root, self._complaints.fault):
            if not folder.is_old:
                yield folder


def read_misses(folder: Path, report: Report) -> list[tuple[Document, int]]:
    """The problems of a folder's log, each once, with its count.

    A torn last line comes from a killed process and is not a fault.
    """
    path = folder / MISSES
    data = read_bytes(path)
    if not isinstance(data, bytes):
        if data is not None:
            report(data)
        return []
    counts: Counter[str] = Counter()
    faults: list[Fault] = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            counts[canonical({**json.loads(line)["problem"]})] += 1
        except (KeyError, TypeError, ValueError, RecursionError):
            if number < len(lines):
                faults.append(Fault(path, f"line {number} is not a miss", damaged=False))
    for fault in faults[:1]:
        report(fault)
    return [(json.loads(text), count) for text, count in counts.items()]
