"""Keeps which kernels the environment left untried, so that they are tried again once it changes.

Records hold verdicts alone. A note beside them lists, for each problem, the untried kernels and the
toolchains under which they could not be tried:

- under another toolchain, the next call tries them;
- after a passing cause (no memory, a full disk, a killed process), so do later processes, up to
  :data:`PROCESSES` in all, so that serving does not wait for it at every start;
- ``tmm tune`` and ``tmm_core.tune`` always do.

A process reads the toolchain again at every problem that it meets first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import get_args

from tmm_cache import JSON, CacheStore, Notes, digest, stamp

from tmm_core.spec import toolchain
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.problem import Problem
from tmm_core.tuning.environment_faults import Cause

#: Processes that try a kernel again after a passing cause, under one toolchain.
PROCESSES = 3
#: Toolchains that a note remembers, the latest.
_TOOLCHAINS = 8
#: Letters of a reason that a note keeps.
_REASON = 300

#: Name and version.
Able = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Left:
    """Why a kernel is untried."""

    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class Noted:
    """The note about one problem."""

    kernels: Mapping[Able, Left] = field(default_factory=dict)
    #: The processes that tried them under each toolchain, by its fingerprint.
    tried: Mapping[str, int] = field(default_factory=dict)

    def again(self, fingerprint: str, here: bool) -> frozenset[Able]:
        """The kernels that a call tries again.

        Args:
            here: This process has tried them already, under this toolchain.
        """
        count = self.tried.get(fingerprint, 0)
        if count == 0:
            return frozenset(self.kernels)
        if here or count >= PROCESSES:
            return frozenset()
        return frozenset(name for name, left in self.kernels.items() if left.cause == "passing")

    def to_json(self) -> JSON:
        # Most kernels share a reason.
        reasons: dict[tuple[str, str], list[JSON]] = {}
        for (name, version), left in sorted(self.kernels.items()):
            reasons.setdefault((left.cause, left.reason), []).append([name, version])
        kernels: list[JSON] = [[*about, names] for about, names in reasons.items()]
        return {"kernels": kernels, "tried": dict(self.tried)}

    @classmethod
    def from_json(cls, document: object) -> Noted | None:
        """The note; None if it is none."""
        try:
            assert isinstance(document, dict)
            kernels = {
                (str(name), str(version)): Left(cause, str(reason))
                for cause, reason, names in document["kernels"]
                for name, version in names
                if cause in get_args(Cause)
            }
            tried = {str(name): int(count) for name, count in document["tried"].items()}
        except (AssertionError, LookupError, TypeError, ValueError, AttributeError):
            return None
        return cls(kernels, tried)


class Untried:
    """The notes of one store, and what this process knows beside them."""

    def __init__(self, store: CacheStore) -> None:
        self._store = store
        #: By problem, written or tried by this process, with the toolchain of then.
        self._mine: dict[Problem, tuple[Noted, str]] = {}
        #: The file of notes about each device, as it was read, and its state then.
        self._read: dict[DeviceFingerprint, tuple[list[JSON], Notes]] = {}
        #: The toolchain under which this process left kernels untried; None if it left none.
        self._toolchain: str | None = None

    def __bool__(self) -> bool:
        """Whether this process has met untried kernels."""
        return self._toolchain is not None

    def get(self, key: Problem) -> Noted | None:
        """The note about a record's problem; None if nothing was ever left untried for it."""
        if key in self._mine:
            return self._mine[key][0]
        return Noted.from_json(self._notes(key.device).get(digest(key.to_json())))

    def again(self, key: Problem, noted: Noted) -> frozenset[Able]:
        """The kernels that a call tries again now."""
        if not noted.kernels:
            return frozenset()
        now = toolchain.fingerprint()
        self._toolchain = self._toolchain or now
        here = key in self._mine and self._mine[key][1] == now
        return noted.again(now, here)

    def left(self, key: Problem) -> tuple[frozenset[Able], frozenset[Able]]:
        """The kernels that a call leaves untried now, and those that it tries again."""
        noted = self.get(key)
        if noted is None:
            return frozenset(), frozenset()
        again = self.again(key, noted)
        return frozenset(noted.kernels) - again, again

    def watch(self) -> None:
        """Watch the toolchain, since it failed a kernel outside of tuning."""
        self._toolchain = self._toolchain or toolchain.fingerprint()

    def note(self, key: Problem, tried: Collection[Able], left: Mapping[Able, Left]) -> None:
        """Note the outcome of a tuning: kernels ``tried``, of which some were ``left`` untried."""
        before = self.get(key)
        if before is None and not left:
            return
        now = toolchain.fingerprint()
        before = before or Noted()
        kept = {name: why for name, why in before.kernels.items() if name not in tried}
        short = {name: Left(why.cause, why.reason[:_REASON]) for name, why in left.items()}
        counts = {**before.tried, now: before.tried.get(now, 0) + 1}
        counts = dict(list(counts.items())[-_TOOLCHAINS:])
        noted = Noted(kept | short, counts)
        self._mine[key] = noted, now
        self._toolchain = now if noted.kernels else self._toolchain
        self._notes(key.device).add(digest(key.to_json()), noted.to_json())

    def changed(self) -> bool:
        """Whether the toolchain changed since kernels were left untried here; once per change."""
        if self._toolchain is None or (now := toolchain.fingerprint()) == self._toolchain:
            return False
        self._toolchain = now
        toolchain.forget_programs()
        return True

    def _notes(self, device: DeviceFingerprint) -> Notes:
        """The notes about a device, read again if another process has written some."""
        state: list[JSON] = [device.gpu, device.environment]
        read, notes = self._read.get(device, (None, None))
        notes = notes or Notes("untried", state, self._store.root)
        if (now := stamp([notes.path])) != read:
            notes = Notes("untried", state, self._store.root)
            self._read[device] = now, notes
        return notes

    def of_device(self, device: DeviceFingerprint) -> list[Noted]:
        """The notes about a device that list kernels."""
        found = map(Noted.from_json, self._notes(device).values())
        return [noted for noted in found if noted is not None and noted.kernels]
