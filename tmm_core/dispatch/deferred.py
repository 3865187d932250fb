"""What kernels answered whose modules are not imported before they are asked for.

Choosing for a problem asks every kernel, and a process that replays what an earlier one tuned
would import Triton (191 ms on an H200's host) to hear from kernels that lost. Their answers are
noted by what they depend on, and a process that finds them noted imports the winner alone.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tmm_core.settings import Settings
from tmm_core.spec.asking import let_through
from tmm_core.spec.kernel import Deferred, Kernel
from tmm_core.spec.problem import Problem

if TYPE_CHECKING:
    from tmm_cache import Notes


@contextmanager
def collector_off() -> Iterator[None]:
    """For what imports: all that it makes stays, and to look for garbage among it and all that
    torch has made took 90 of the 310 ms in which Triton, Gluon and a kernel are imported."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


#: This package, and its folders on which no kernel's answer depends.
_CORE = Path(__file__).parents[1]
_APART = {"bench", "interop", "nn", "records", "testing", "tools"}
#: Name and version.
Able = tuple[str, str]


class Answers:
    """Which deferred kernels said, when they were asked, that they can serve a problem.

    Args:
        deferred: All of the registry's.
        root: Of the cache in which it is noted.
    """

    def __init__(self, deferred: Mapping[str, Deferred], root: Path) -> None:
        self.deferred = deferred
        self._root = root

    @functools.cached_property
    def _notes(self) -> Notes | None:
        from tmm_cache import Notes, stamp

        files = own_files()
        try:
            for each in self.deferred.values():
                files.update(each.files())
            others = {name: each.circumstances() for name, each in self.deferred.items()}
            return Notes("able", [sys.version, stamp(files), others], self._root)
        except BaseException as error:  # a stranger's, or what it returned is not JSON
            let_through(error)
            return None  # nothing is noted

    def get(self, problem: Problem, settings: Settings) -> frozenset[Able] | None:
        """Those that can, of what was noted; None where nothing was."""
        noted = self._notes.get(_about(problem, settings)) if self._notes else None
        if not isinstance(noted, list):
            return None
        able = set()
        for each in noted:
            match each:
                case [str(name), str(version)] if name in self.deferred:
                    able.add((name, version))
                case _:
                    return None
        return frozenset(able)

    def add(self, problem: Problem, settings: Settings, able: list[Kernel[Any]]) -> None:
        """Note those of ``able`` that are deferred ones."""
        if self._notes is not None:
            mine = sorted([k.name, k.version] for k in able if k.name in self.deferred)
            self._notes.add(_about(problem, settings), mine)


def own_files() -> set[Path]:
    """Those of tmm's files that a kernel's answer may depend on."""
    folders = [each for each in _CORE.iterdir() if each.is_dir() and each.name not in _APART]
    return {*_CORE.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))}


def _about(problem: Problem, settings: Settings) -> str:
    from tmm_cache import digest

    requirements = ("deterministic", "batch_invariant", "capturing")
    return digest(
        {
            "problem": problem.to_json(),
            "device": dataclasses.asdict(problem.device),
            "requirements": [getattr(problem, name) for name in requirements],
            "disable": sorted(settings.disable),
        }
    )
