"""Remembers which kernels the environment left untried, until it changes.

Records hold only verdicts. A note in the cache lists, for each problem, the untried kernels and the
toolchains under which they could not be tried.

- Under another toolchain, the next call tries them.
- After a passing cause (no memory, a full disk, a killed process), later processes try them too.
  There are at most :data:`PROCESSES` such attempts: serving must not wait at every start.
- ``tmm tune`` and ``tmm_core.tune`` always try them.

A process reads the toolchain again whenever it meets a new problem.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from tmm_base.guards import suppress
from tmm_cache import JSON, CacheStore, CandidateResult, Notes, TuningRecord, digest, stamp

from tmm_core.errors import ConfigError, PluginError
from tmm_core.registry.query import read_config
from tmm_core.spec import toolchain
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.kernel import Kernel
from tmm_core.spec.problem import Problem
from tmm_core.verify.environment_faults import BUDGET_ENDED, Cause, verdicts

#: The number of processes that try a kernel under one toolchain after a passing cause.
PROCESSES = 3
#: The number of latest toolchains that a note remembers.
_TOOLCHAINS = 8
#: Maximum characters of a reason in a note.
_REASON = 300

#: A kernel's name and version.
KernelVersion = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason why the environment left a kernel untried."""

    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True)
class Noted:
    """The note about one problem."""

    kernels: Mapping[KernelVersion, Obstacle] = field(default_factory=dict)
    #: The number of processes that tried them, by the toolchain's fingerprint.
    tried: Mapping[str, int] = field(default_factory=dict)

    def again(self, fingerprint: str, here: bool) -> frozenset[KernelVersion]:
        """Return the kernels that a call tries again; ``here``: this process has already tried
        them, under this toolchain."""
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
        """Parse a note; None if the document is not a note."""
        with suppress(Exception):  # a damaged note may hold anything
            assert isinstance(document, dict)
            kernels = {
                (str(name), str(version)): Obstacle(cause, str(reason))
                for cause, reason, names in document["kernels"]
                for name, version in names
                if cause in get_args(Cause)
            }
            tried = {str(name): int(count) for name, count in document["tried"].items()}
            return cls(kernels, tried)
        return None


class Untried:
    """The notes of one store, and the state of this process."""

    def __init__(self, store: CacheStore) -> None:
        self._store = store
        #: Notes that this process wrote, by problem, with the toolchain at that time.
        self._written: dict[Problem, tuple[Noted, str]] = {}
        #: The state of each device's file when it was read, and its notes.
        self._read: dict[DeviceFingerprint, tuple[list[JSON], Notes]] = {}
        #: The toolchain under which this process left kernels untried; None if it left none.
        self._toolchain: str | None = None

    def get(self, key: Problem) -> Noted | None:
        """Return the note about a record's problem; None if no kernel was ever left untried."""
        if key in self._written:
            return self._written[key][0]
        return Noted.from_json(self._notes(key.device).get(digest(key.to_json())))

    def left(self, key: Problem) -> tuple[frozenset[KernelVersion], frozenset[KernelVersion]]:
        """Return the kernels that a call leaves untried now, and those that it tries again."""
        noted = self.get(key)
        if noted is None or not noted.kernels:
            return frozenset(), frozenset()
        now = toolchain.fingerprint()
        self._toolchain = self._toolchain or now
        here = key in self._written and self._written[key][1] == now
        again = noted.again(now, here)
        return frozenset(noted.kernels) - again, again

    def missing(
        self,
        key: Problem,
        kernels: Sequence[Kernel[Any]],
        record: TuningRecord | None,
        resume: bool = False,
        called: Problem | None = None,
    ) -> list[Kernel[Any]]:
        """Return the kernels that a tuning of ``key`` would time: those without a verdict on this
        version in ``record``, or without one for a config that uses the caller's promises
        (``Config.assumes``).

        Args:
            resume: Include kernels that the environment left untried, and kernels whose candidates
                the end of the tuning budget left out.
            called: The problem of the call, if it is not ``key``.
        """
        if record is None:
            return list(kernels)
        problem, (waiting, again) = called or key, self.left(key)
        known: dict[KernelVersion, list[CandidateResult]] = {}
        for result in verdicts(record.candidates):
            if not (resume and result.reason == BUDGET_ENDED):
                known.setdefault((result.kernel, result.version), []).append(result)

        def is_missing(kernel: Kernel[Any]) -> bool:
            name = kernel.name, kernel.version
            if name in waiting or name in again:
                return resume or name in again
            return name not in known or (
                problem.static_weights
                and not any(_assumes(kernel, each) for each in known[name])
                and _may_assume(kernel, problem)
            )

        return [kernel for kernel in kernels if is_missing(kernel)]

    def watch(self) -> None:
        """Watch the toolchain, because it made a kernel fail outside of tuning."""
        self._toolchain = self._toolchain or toolchain.fingerprint()

    def note(
        self, key: Problem, tried: Collection[KernelVersion], left: Mapping[KernelVersion, Obstacle]
    ) -> None:
        """Write a note about a tuning: the kernels to be ``tried``, and those ``left`` untried."""
        before = self.get(key)
        if before is None and not left:
            return
        now = toolchain.fingerprint()
        before = before or Noted()
        kept = {name: why for name, why in before.kernels.items() if name not in tried}
        short = {name: Obstacle(why.cause, why.reason[:_REASON]) for name, why in left.items()}
        counts = {**before.tried, now: before.tried.get(now, 0) + 1}
        counts = dict(list(counts.items())[-_TOOLCHAINS:])
        noted = Noted(kept | short, counts)
        self._written[key] = noted, now
        self._toolchain = now if noted.kernels else self._toolchain
        self._notes(key.device).add(digest(key.to_json()), noted.to_json())

    def changed(self) -> bool:
        """Whether the toolchain changed since kernels were left untried; true once per change."""
        if self._toolchain is None or (now := toolchain.fingerprint()) == self._toolchain:
            return False
        self._toolchain = now
        toolchain.forget_programs()
        return True

    def _notes(self, device: DeviceFingerprint) -> Notes:
        """Return the notes about a device, read again if another process has changed the file."""
        state: list[JSON] = [device.gpu, device.environment]
        read, notes = self._read.get(device, (None, None))
        notes = notes or Notes("untried", state, self._store.root)
        if (now := stamp([notes.path])) != read:
            notes = Notes("untried", state, self._store.root)
            self._read[device] = now, notes
        return notes

    def of_device(self, device: DeviceFingerprint) -> list[Noted]:
        """Return the notes about a device that list untried kernels."""
        found = map(Noted.from_json, self._notes(device).values())
        return [noted for noted in found if noted is not None and noted.kernels]


def _assumes(kernel: Kernel[Any], result: CandidateResult) -> bool:
    with suppress(ConfigError, PluginError):
        return bool(read_config(kernel, result.config).assumes)
    return False


def _may_assume(kernel: Kernel[Any], problem: Problem) -> bool:
    with suppress(PluginError):  # it was set aside, with a warning
        return any(config.assumes for config in kernel.configs(problem))
    return False
