"""Finds the problems that two caches would answer differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tmm_cache.scan import Key, Summary


class Difference(NamedTuple):
    """A problem that two caches would answer differently, with the record of each."""

    what: str
    key: Key
    a: Summary | None
    b: Summary | None

    @property
    def either(self) -> Summary:
        """The record of A or of B."""
        either = self.a or self.b
        assert either is not None
        return either


def differences(mine: Mapping[Key, Summary], theirs: Mapping[Key, Summary]) -> list[Difference]:
    """The differences between two caches, sorted by key."""
    return [
        Difference(what, key, mine.get(key), theirs.get(key))
        for key in sorted({*mine, *theirs})
        if (what := _kind(mine.get(key), theirs.get(key))) is not None
    ]


def _kind(a: Summary | None, b: Summary | None) -> str | None:
    if a is None or b is None:
        return "only in B" if a is None else "only in A"
    mine, theirs = a.head.best, b.head.best
    if (mine.kernel, mine.config) != (theirs.kernel, theirs.config):
        return "other winner"
    return "other times" if (mine.us, mine.blas_us) != (theirs.us, theirs.blas_us) else None
