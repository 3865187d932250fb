"""A mutant: a small edit of the code, and the tests that must fail under it.

A mutant names its file by the end of its path, so that moving a module does not put it out of date.
When code changes, change the mutant with it: the text that it replaces must occur exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Folders of the tree whose files mutants change.
SOURCES = ("tmm_core", "plugins", "cache")


@dataclass(frozen=True)
class Mutant:
    """One edit.

    Args:
        name: As ``make mutants NAMES=…`` takes it.
        file: The file's name, or the end of its path.
        old, new: The replaced text, and its replacement.
        why: What goes wrong.
        tests: At least one of these must fail.
    """

    name: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]


def place(mutant: Mutant, tree: Path) -> Path:
    """The file that a mutant changes.

    Raises:
        ValueError: The text occurs never, or more than once.
    """
    named = [
        path
        for folder in SOURCES
        for path in (tree / folder).rglob(Path(mutant.file).name)
        if path.as_posix().endswith("/" + mutant.file)
    ]
    counts = {path: path.read_text().count(mutant.old) for path in named}
    if sum(counts.values()) != 1:
        where = f"in {len(named)} files named {mutant.file}"
        raise ValueError(f"what it replaces occurs {sum(counts.values())} times {where}")
    return next(path for path, count in counts.items() if count)
