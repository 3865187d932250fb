"""Problems that were met where tuning was forbidden, kept for `tmm tune --misses`.

Under graph capture or with tuning switched off nobody may wait for a timing, but the operator
wants to know what to tune. One line per problem is appended in a single write, so that any number
of processes share the file without a lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tmm_cache.files import MAX_BYTES, Fault, append_line, parse, read_bytes
from tmm_cache.keys import JSON, canonical, digest
from tmm_cache.layout import MISSES


@dataclass(frozen=True, slots=True)
class Miss:
    """A problem without a record: which GPU and environment met it, and in how many processes.

    `environment` is None where its readable file is missing or broken.
    """

    gpu: str
    environment_digest: str
    environment: Mapping[str, JSON] | None
    problem: Mapping[str, JSON]
    count: int


def append_miss(folder: Path, problem: Mapping[str, JSON]) -> None:
    """Add a line. Raises OSError, also where the log is full or no regular file."""
    line = canonical({"problem": problem}).encode("ascii")
    if not append_line(folder / MISSES, line, MAX_BYTES):
        raise OSError("it is full, tune or clear its problems")


def read_misses(folder: Path) -> tuple[list[tuple[Mapping[str, JSON], int]], Fault | None]:
    """The problems of a folder's log, each once, with how often it was logged; and its fault.

    A torn last line is a process that was killed and no fault.
    """
    path = folder / MISSES
    data = read_bytes(path)
    if isinstance(data, Fault):
        return [], data
    if data is None:
        return [], None
    problems: dict[str, Mapping[str, JSON]] = {}
    counts: dict[str, int] = {}
    fault = None
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        problem = _problem(line)
        if problem is not None:
            key = digest(problem)
            problems.setdefault(key, problem)
            counts[key] = counts.get(key, 0) + 1
        elif number < len(lines) and fault is None:
            fault = Fault(path, f"line {number} is no miss", damaged=False)
    return [(problem, counts[key]) for key, problem in problems.items()], fault


def _problem(line: bytes) -> Mapping[str, JSON] | None:
    try:
        document = parse(line)
        problem = document["problem"] if isinstance(document, dict) else None
        canonical(problem)
    except (KeyError, ValueError, RecursionError):
        return None
    return problem if isinstance(problem, dict) else None
