"""The header of a record's file: the fields a list needs, in the first 4 kB.

Parsing a record takes 0.5 ms, almost all of it for the candidates. A record's file begins with its
problem and its winner, so listing 10,000 records reads 10,000 headers and needs no index. A header
is not validated; loading the record checks everything. A file without a usable header (made by
hand, or of an older schema) is read in full.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Final, NamedTuple

from tmm_cache.cache_errors import reraise
from tmm_cache.disk import closing, opened
from tmm_cache.fields import SIZES, is_size, measure, optional, parse
from tmm_cache.keys import Document
from tmm_cache.record import CLOCK, SCHEMA, TuningRecord, blas_us

#: A problem and a config take about 900 bytes.
HEADER_BYTES: Final = 4096
_REST: Final = b'"candidates": ['
_TIME: Final = optional(measure)


class Best(NamedTuple):
    """The winner of a record and BLAS's time; times are medians in microseconds."""

    kernel: str
    config: Document
    us: float | None
    blas_us: float | None

    @property
    def speedup(self) -> float | None:
        """How many times faster than BLAS the winner is; None if either was not timed, or if a time
        is not a plausible kernel time."""
        if self.blas_us is None or not self.us:
            return None
        quotient = self.blas_us / self.us
        return quotient if math.isfinite(quotient) else None

    @classmethod
    def of(cls, record: TuningRecord) -> Best:
        best = record.best
        return cls(best.kernel, best.config, best.median_us, blas_us(record))


class Header(NamedTuple):
    """The parsed header. Only the sizes of `problem` are checked."""

    problem: Document
    best: Best

    @classmethod
    def of(cls, record: TuningRecord) -> Header:
        return cls(record.problem, Best.of(record))


def with_header(document: dict[str, Any], record: TuningRecord) -> dict[str, Any]:
    """A record's document with a summary of its winner before the long fields."""
    candidates = document.pop("candidates")
    best = Best.of(record)._replace(config=candidates[record.winner]["config"])  # as JSON
    return document | {"best": best._asdict(), "candidates": candidates}


def read_header(path: Path) -> Header | None:
    """The header of a file; None if it has no usable one."""
    try:
        with closing(opened(path, os.O_RDONLY)) as handle:
            data = os.read(handle, HEADER_BYTES)
    except OSError as error:
        reraise(error)
        return None
    end = data.find(_REST)
    if end <= 0:
        return None
    try:
        document: Any = parse(data[:end].rstrip(b", \n") + b"}")
        problem, best = document["problem"], Best(**document["best"])
        usable = (
            document["schema"] == SCHEMA
            and document["clock"] == CLOCK
            and all(is_size(problem[size]) for size in SIZES)
            and isinstance(best.kernel, str)
            and isinstance(best.config, dict)
        )
        best = best._replace(us=_TIME(best.us), blas_us=_TIME(best.blas_us))
        return Header(problem, best) if usable else None
    except (LookupError, ValueError, TypeError) as error:
        reraise(error)
        return None
