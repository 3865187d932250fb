"""Merges two records of one problem, keeping the better evidence of each candidate.

Times of two machines differ by several per cent, so each winner is compared with BLAS's time in its
own record. Hints are not merged: their clock does not decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from tmm_cache.files import Stored
from tmm_cache.head import Best
from tmm_cache.keys import canonical
from tmm_cache.record import CandidateResult, TuningRecord

#: A winner from elsewhere replaces the own one if its speedup over BLAS is greater by this much.
MARGIN: Final = 0.01


def merged(own: Stored, other: Stored) -> TuningRecord:
    """Both records merged; `own.record` itself if the other has nothing better.

    If two versions of a kernel were measured, the newer record's candidates are kept. Within one
    version every config is kept: "wrong" in either is wrong; otherwise a sealed record takes
    precedence over an unsealed one, then more samples over fewer, then the own over the other.
    """
    mine, theirs = _by_kernel(own.record), _by_kernel(other.record)
    newer = other.record.created_at > own.record.created_at
    candidates: list[CandidateResult] = []
    for kernel in dict.fromkeys((*mine, *theirs)):
        here, there = mine.get(kernel, {}), theirs.get(kernel, {})
        if here and there and _versions(here) != _versions(there):
            candidates += (there if newer else here).values()
            continue
        both = {
            config: _better(here[config], there[config], own.sealed, other.sealed)
            for config in here
            if config in there
        }
        candidates += (here | there | both).values()
    before, after = ({_key(c): c for c in each} for each in (own.record.candidates, candidates))
    if before == after:  # regardless of order
        return own.record
    winner = _winner(candidates, own.record, other.record)
    if winner is None:
        return own.record
    latest = other.record if newer else own.record
    return replace(
        own.record,
        winner=winner,
        candidates=tuple(candidates),
        created=latest.created,
        tuning_seconds=latest.tuning_seconds,
    )


def _by_kernel(record: TuningRecord) -> dict[str, dict[str, CandidateResult]]:
    found: dict[str, dict[str, CandidateResult]] = {}
    for each in record.candidates:
        found.setdefault(each.kernel, {})[canonical(each.config)] = each
    return found


def _key(each: CandidateResult) -> tuple[str, str, str]:
    return each.kernel, each.version, canonical(each.config)


def _versions(candidates: Mapping[str, CandidateResult]) -> set[str]:
    return {each.version for each in candidates.values()}


def _better(
    mine: CandidateResult, theirs: CandidateResult, my_seal: bool, their_seal: bool
) -> CandidateResult:
    def rank(each: CandidateResult, sealed: bool) -> tuple[bool, bool, int]:
        return each.status == "wrong", sealed, len(each.samples_us)

    return theirs if rank(theirs, their_seal) > rank(mine, my_seal) else mine


def _winner(
    candidates: list[CandidateResult], own: TuningRecord, other: TuningRecord
) -> int | None:
    """The winner with the greater speedup over its own record's BLAS, if it may still win; else the
    fastest candidate; None if no candidate may win."""
    places = {_key(each): index for index, each in enumerate(candidates) if each.status == "ok"}
    mine, theirs = places.get(_key(own.best)), places.get(_key(other.best))
    if mine is not None and theirs is not None:
        ahead = _speedup(other) > _speedup(own) * (1 + MARGIN)
        return theirs if ahead else mine
    if mine is not None or theirs is not None:
        return theirs if mine is None else mine
    timed = [
        (each.median_us, index)
        for index, each in enumerate(candidates)
        if each.status == "ok" and each.median_us is not None
    ]
    return min(timed)[1] if timed else None


def _speedup(record: TuningRecord) -> float:
    return Best.of(record).speedup or 1.0
