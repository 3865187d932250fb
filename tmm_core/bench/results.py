"""The file of a run: one JSON document per line, each written as soon as it exists.

The first line describes the environment, each other line a measured problem (or host costs). A run
that is killed keeps all but the line it was writing, and the files of several runs are read as one.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Document = dict[str, Any]

SUFFIX = ".jsonl"
KINDS = ("run", "host", "problem", "regret")
#: Other clocks than in use: one launch after a flush, replays back to back, and a chain with a
#: small kernel between its calls.
OTHER_CLOCKS = ("alone", "steady", "between")
#: The class of problems with random M, weight and epilogue.
RANDOM = "random"


class Writer:
    """Collects documents, and appends each to a new file in ``folder``, if one is given."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self.documents: list[Document] = []
        self.path: Path | None = None
        if folder is not None:
            now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%S.%f")
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / f"{now}-{name}{SUFFIX}"
            self.path.touch(exist_ok=False)

    def append(self, document: Document) -> None:
        self.documents.append(document)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(document, ensure_ascii=False) + "\n")


@dataclass
class Results:
    """The results of one or several runs."""

    runs: list[Document] = field(default_factory=list)
    #: The latest measurement of each problem, in the order they were first measured.
    problems: list[Document] = field(default_factory=list)
    #: The latest host costs per call.
    host: Document | None = None

    @property
    def measured(self) -> list[Document]:
        """The problems that have times and were tuned at their own M."""
        return [doc for doc in self.problems if "times" in doc and doc["kind"] == "problem"]

    @property
    def regrets(self) -> list[Document]:
        """The problems whose bucket was tuned instead of their own M."""
        return [doc for doc in self.problems if doc["kind"] == "regret"]

    @classmethod
    def of(cls, documents: Iterable[Document]) -> Results:
        """Results from documents in the order they were written; a problem's last one counts."""
        results = cls()
        problems: dict[str, Document] = {}
        for document in documents:
            if document["kind"] == "run":
                results.runs.append(document)
            elif document["kind"] == "host":
                results.host = document
            else:
                document = {"suite": RANDOM, **document}  # older regrets have no class
                key = identity(document["suite"], document["case"])
                # A later failure does not replace an earlier measurement.
                if "failed" not in document or key not in problems:
                    problems[key] = document
        results.problems = list(problems.values())
        return results

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Results:
        """Read the :func:`files` of runs.

        Raises:
            OSError: A path cannot be read.
            ValueError: A line is not a document, except for a torn last one.
        """
        return cls.of(document for file in files(paths) for document in documents(file))


def identity(suite: str, case: Document) -> str:
    """A key that is equal for two measurements of the same problem."""
    return json.dumps([suite, case], sort_keys=True)


def files(paths: Iterable[Path]) -> list[Path]:
    """The files of runs among these files and folders, each folder's in the order of their names
    (their times)."""
    return [
        file
        for path in paths
        for file in (sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path])
    ]


def documents(path: Path) -> list[Document]:
    """The documents of a file; raises like :meth:`Results.read`."""
    lines = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            document = json.loads(line)
            if not isinstance(document, dict) or document.get("kind") not in KINDS:
                raise ValueError("not a result of tmm bench")
        except ValueError as error:
            partial = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
            if partial and number == len(lines) and line.startswith(b"{"):
                continue  # the run was killed
            raise ValueError(f"{path}:{number}: {error}") from error
        found.append(document)
    return found
