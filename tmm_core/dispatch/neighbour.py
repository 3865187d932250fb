"""The nearest tuned problem: a guess for one that was never measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tmm_cache import CacheStore, Entry, TuningRecord

from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.problem import Problem

_SIZES = ("m", "n", "k", "batch")

#: Octaves of M, N, K and batch together past which a tuned problem says nothing: beyond a
#: factor of four in all, the class (decode, square, large K) has usually changed.
FARTHEST = 2.0


@dataclass(frozen=True, slots=True)
class Near:
    """A record with how far it is from what was asked."""

    record: TuningRecord
    octaves: float
    gpu: str
    same_environment: bool

    def __str__(self) -> str:
        problem = self.record.problem
        where = self.gpu if self.same_environment else f"{self.gpu} under other versions"
        return (
            f"{problem['m']}×{problem['n']}×{problem['k']} on {where} ({self.octaves:.2f} octaves)"
        )


class Neighbours:
    """Finds records near a problem; reads the store on first use and after ``forget()``."""

    def __init__(self, store: CacheStore) -> None:
        self._store = store
        self._entries: list[Entry] | None = None

    def forget(self) -> None:
        """Records have changed: read them anew when next asked."""
        self._entries = None

    def nearest(self, problem: Problem) -> Iterator[Near]:
        """Records of the same kind of problem within :data:`FARTHEST`, best guess first:
        this environment, then this GPU under other versions, then the architecture's
        nearest SM count; by distance within each."""
        entries = self._entries
        if entries is None:
            entries = self._entries = list(self._store.entries())
        asked = problem.to_json()
        ranked = []
        for entry in entries:
            rank = _rank(entry, problem.device)
            if rank is None or _family(entry.record.problem) != _family(asked):
                continue
            octaves = _octaves(asked, entry.record.problem)
            if octaves <= FARTHEST:
                near = Near(entry.record, octaves, entry.gpu, rank[0] == 0)
                ranked.append(((rank, octaves, str(entry.path)), near))
        ranked.sort(key=lambda pair: pair[0])
        return (near for _, near in ranked)


def _rank(entry: Entry, device: DeviceFingerprint) -> tuple[int, int] | None:
    """How much the record's device resembles this one; None: not at all."""
    environment = entry.environment or {}
    if entry.gpu == device.gpu:
        return (0, 0) if dict(environment) == device.environment else (1, 0)
    if device.type == "cuda" and environment.get("capability") == list(device.capability):
        sms = environment.get("sm_count")
        if isinstance(sms, int):
            return (2, abs(sms - device.sm_count))
    return None


def _family(document: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key not in _SIZES}


def _octaves(asked: Mapping[str, Any], tuned: Mapping[str, Any]) -> float:
    return sum(abs(math.log2(max(1, asked[s]) / max(1, int(tuned[s])))) for s in _SIZES)
