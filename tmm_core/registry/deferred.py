"""Caches the answers of deferred kernels, whose modules are imported on first use.

Choosing for a problem asks every kernel, so a process that replays an earlier one's tuning would
import Triton (191 ms on an H200's host) to ask kernels that lost. Their answers are kept as notes,
keyed by everything they depend on, and a process that finds them imports only the winner.
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

from tmm_core.errors import reraise
from tmm_core.settings import Settings
from tmm_core.spec.code import files_of
from tmm_core.spec.kernel import Deferred, Kernel
from tmm_core.spec.problem import REQUIREMENTS, Problem

if TYPE_CHECKING:
    from tmm_cache import Notes


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable the cyclic GC: during imports, whose objects are long-lived, it took 90 of the 310 ms
    to import Triton, Gluon and a kernel."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


#: This package, and those of its folders that no kernel's answer depends on.
_CORE = Path(__file__).parents[1]
_APART = {"bench", "interop", "nn", "records", "testing", "tools"}
#: Name and version.
Able = tuple[str, str]


class Answers:
    """The recorded answers of deferred kernels: which of them can serve a problem.

    Args:
        deferred: All deferred kernels of the registry.
        root: The root of the cache that holds the notes.
    """

    def __init__(self, deferred: Mapping[str, Deferred], root: Path) -> None:
        self.deferred = deferred
        self._root = root

    @functools.cached_property
    def _notes(self) -> Notes | None:
        from tmm_cache import Notes, stamp

        try:
            files = own_files()
            for each in self.deferred.values():
                # Its author may have forgotten one.
                files.update(each.files(), files_of(each.load))
            others = {name: each.circumstances() for name, each in self.deferred.items()}
            return Notes("able", [sys.version, stamp(files), others], self._root)
        except BaseException as error:  # a plugin failed or returned no JSON, or tmm is in a zip
            reraise(error)
            return None  # no notes

    def get(self, problem: Problem, settings: Settings) -> frozenset[Able] | None:
        """The able kernels as noted; None if there is no note."""
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
        """Note the deferred ones of ``able``."""
        if self._notes is not None:
            mine = sorted([k.name, k.version] for k in able if k.name in self.deferred)
            self._notes.add(_about(problem, settings), mine)


def own_files() -> set[Path]:
    """The files of tmm that a kernel's answer may depend on."""
    folders = [each for each in _CORE.iterdir() if each.is_dir() and each.name not in _APART]
    return {*_CORE.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))}


def _about(problem: Problem, settings: Settings) -> str:
    from tmm_cache import digest

    return digest(
        {
            "problem": problem.to_json(),
            "device": dataclasses.asdict(problem.device),
            "requirements": [getattr(problem, name) for name in REQUIREMENTS],
            "disable": sorted(settings.disable),
        }
    )
