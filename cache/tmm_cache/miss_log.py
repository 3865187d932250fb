"""Logs problems that were met where tuning was forbidden, for `tmm tune --misses`.

Under graph capture or with tuning switched off a call can't wait for a timing, but the operator
wants to know what to tune. One line per problem is appended in a single write, so that any number
of processes can share the file without a lock.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tmm_cache.cache_errors import reraise
from tmm_cache.disk import append_line, remove_if_empty
from tmm_cache.files import (
    MAX_BYTES,
    Fault,
    Read,
    Report,
    json_lines,
    read_environment,
    read_file,
    write_environment,
)
from tmm_cache.keys import Document, canonical
from tmm_cache.paths import MISSES
from tmm_cache.scan import folders


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


def log_miss(log: Path, environment: Document, problem: Document) -> None:
    """Append a problem to the log of a folder. Raises OSError."""
    write_environment(log.parent, environment)
    if not append_line(log, canonical({"problem": problem}).encode("ascii"), MAX_BYTES):
        raise OSError("it is full, tune or clear its problems")


def logged_misses(root: Path, report: Report) -> list[Miss]:
    """The problems logged in a root, each once per GPU and environment."""
    found = []
    for folder in folders(root, report):
        problems = _read(folder.path, report)
        environment = read_environment(folder.path, report) if problems else None
        found += [
            Miss(folder.gpu, folder.environment_digest, environment, problem, count)
            for problem, count in problems
        ]
    return found


def clear_misses(root: Path, report: Report) -> int:
    """Remove the logs of a root; returns how many."""
    removed = 0
    for folder in folders(root, report):
        path = folder.path / MISSES
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            reraise(error)
            report(Fault(path, f"cannot be removed: {error.strerror or error}"))
            continue
        removed += 1
        remove_if_empty(folder.path, root)
    return removed


def _read(folder: Path, report: Report) -> list[tuple[Document, int]]:
    """The problems of a folder's log, each once, with its count."""
    read = read_file(folder / MISSES)
    if isinstance(read, Fault):
        report(read)
    lines = json_lines(read.data) if isinstance(read, Read) else ()
    problems = (line.get("problem") for line in lines if isinstance(line, dict))
    counts = Counter(canonical(each) for each in problems if isinstance(each, dict))
    return [(json.loads(text), count) for text, count in counts.items()]
