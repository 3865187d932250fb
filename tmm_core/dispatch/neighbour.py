"""Finds the nearest tuned problems, whose winners are chosen untuned or tried first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from tmm_base.guards import suppress
from tmm_cache import CacheStore, Summary, TuningRecord
from tmm_cache.keys import Document

from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.problem import Problem

_SIZES = ("m", "n", "k", "batch")

#: Maximum distance of a neighbour, in octaves of M, N, K and batch together. Beyond a factor of
#: four in all, the class (decode, square, large K) has usually changed.
FARTHEST = 2.0


@dataclass(frozen=True, slots=True)
class Near:
    """A record and its distance from the problem."""

    record: TuningRecord
    octaves: float
    #: The record's GPU, and whether it was measured under other versions.
    where: str

    def __str__(self) -> str:
        size = "×".join(str(self.record.problem[name]) for name in ("m", "n", "k"))
        return f"{size} on {self.where} ({self.octaves:.2f} octaves)"


class Neighbours:
    """Finds records near a problem. It lists the store on first use, then tracks additions."""

    def __init__(self, store: CacheStore) -> None:
        self._store = store
        #: Records by their problems without sizes: a look-up compares only records of its family.
        self._families: dict[bytes | None, list[Summary[Document]]] | None = None

    def add(self, device: DeviceFingerprint, record: TuningRecord) -> None:
        """Add a saved record. It replaces an older record of its problem."""
        if self._families is None:
            return  # listed with the others on first use
        path = self._store.path(device.gpu, device.environment, record.problem)
        new = Summary(path, self._store.root, device.environment, record.problem)
        key = _family(record.problem)
        others = [each for each in self._families.get(key, ()) if each.path != new.path]
        self._families[key] = [*others, new]

    def families(self) -> dict[bytes | None, list[Summary[Document]]]:
        """Return the records by family; the store is listed once."""
        families = self._families
        if families is None:
            families = {}
            for found in self._store.problems():
                families.setdefault(_family(found.record), []).append(found)
            self._families = families
        return families

    def nearest(self, problem: Problem) -> Iterator[Near]:
        """Yield records of the same family within :data:`FARTHEST`. Records of this environment
        come first, then of this GPU under other versions, then of this architecture by nearest SM
        count. Each kind is ordered by distance. Records are read when they are needed."""
        wanted = problem.to_json()
        ranked = []
        for found in self.families().get(_family(wanted), ()):
            rank = _rank(found, problem.device)
            sizes = [(wanted[name], found.record[name]) for name in _SIZES]
            octaves = sum(abs(math.log2(max(1, size) / tuned)) for size, tuned in sizes)
            if rank is not None and octaves <= FARTHEST:
                order = (rank, octaves, str(found.path))
                ranked.append((order, found))
        ranked.sort(key=lambda pair: pair[0])
        for (rank, octaves, _), found in ranked:
            record = self._store.read(found.path)
            if record is not None:  # None: its file is damaged or gone
                versions = "" if rank[0] == 0 else " under other versions"
                yield Near(record, octaves, found.gpu + versions)


def _rank(found: Summary[Any], device: DeviceFingerprint) -> tuple[int, int] | None:
    """Return the rank of a record's device, best first; None: not comparable."""
    environment = found.environment or {}
    if found.gpu == device.gpu:
        return (0, 0) if dict(environment) == device.environment else (1, 0)
    if device.type == "cuda" and environment.get("capability") == list(device.capability):
        sms = environment.get("sm_count")
        if isinstance(sms, int):
            return (2, abs(sms - device.sm_count))
    return None


def _family(document: Mapping[str, Any]) -> bytes | None:
    """Return the part of a problem that neighbours share; None, which matches nothing, if it is
    nested too deeply."""
    shared = {key: value for key, value in document.items() if key not in _SIZES}
    with suppress(RecursionError):
        return msgspec.json.encode(shared, enc_hook=dict, order="sorted")  # dict: of any mapping
    return None
