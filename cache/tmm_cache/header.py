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


class Header(NamedTuple):
    """A record's problem, its winner and BLAS's time; times are medians in microseconds. In a
    parsed header only the sizes of the problem and the fields' types are checked."""

    problem: Document
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
    def of(cls, record: TuningRecord) -> Header:
        best = record.best
        return cls(record.problem, best.kernel, best.config, best.median_us, blas_us(record))


def with_header(document: dict[str, Any], record: TuningRecord) -> dict[str, Any]:
    """A record's document with a summary of its winner before the long fields."""
    candidates = document.pop("candidates")
    best = Header.of(record)._asdict() | {"config": candidates[record.winner]["config"]}  # as JSON
    del best["problem"]
    return document | {"best": best, "candidates": candidates}


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
        header = Header(document["problem"], **document["best"])
        usable = (
            document["schema"] == SCHEMA
            and document["clock"] == CLOCK
            and all(is_size(header.problem[size]) for size in SIZES)
            and isinstance(header.kernel, str)
            and isinstance(header.config, dict)
        )
        header = header._replace(us=_TIME(header.us), blas_us=_TIME(header.blas_us))
        return header if usable else None
    except (LookupError, ValueError, TypeError) as error:
        reraise(error)
        return None
