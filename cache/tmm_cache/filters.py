"""The filters of the command: parses command-line options into a predicate on records.

`parse_*` raise ValueError with a line that argparse shows, so that a bad value never removes
anything.
"""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from typing import TypeAlias

from tmm_cache import facets
from tmm_cache.keys import Document
from tmm_cache.scan import Summary

Shape: TypeAlias = tuple[int | None, int | None, int | None]

_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_DTYPES = {short: name for name, short in facets.SHORT_DTYPES.items()} | {
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
}


def parse_shape(text: str) -> Shape:
    """`4096x*x512` as sizes, None for any. Raises ValueError."""
    parts = re.split("[xX×]", text)
    if len(parts) != 3 or not all(
        part == "*" or re.fullmatch("[0-9]{1,18}", part) for part in parts
    ):
        raise ValueError(f"found {text!r}, accepted is MxNxK, each a size or *")
    m, n, k = (None if part == "*" else int(part) for part in parts)
    return m, n, k


def parse_age(text: str) -> timedelta:
    """`30d`, `12h`, `1.5w` as a span. Raises ValueError."""
    match = _AGE.fullmatch(text)
    if match:
        try:
            return timedelta(**{_UNITS[match[2]]: float(match[1])})
        except OverflowError:
            pass
    raise ValueError(f"found {text!r}, accepted is a number and a unit of s m h d w, like 30d")


def parse_ago(text: str) -> datetime:
    """The time `30d` ago, clamped to the beginning of the calendar. Raises ValueError."""
    try:
        return datetime.now(timezone.utc) - parse_age(text)
    except OverflowError:
        return datetime.min.replace(tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class Filter:
    """Selects the records that a command applies to; an empty filter selects all.

    `gpu`, `kernel` (of the winner), `dtype` (of a) and `epilogue` are globs.
    """

    gpu: str | None = None
    kernel: str | None = None
    dtype: str | None = None
    shape: Shape | None = None
    epilogue: str | None = None
    before: datetime | None = None
    after: datetime | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the filter passes every record."""
        return self == Filter()

    def __call__(self, summary: Summary) -> bool:
        head, problem = summary.head, summary.problem
        dtype = None if self.dtype is None else _DTYPES.get(self.dtype, self.dtype)
        return (
            _matches(summary.gpu, self.gpu)
            and _matches(head.best.kernel, self.kernel)
            and _matches(facets.operand(problem, "a", "dtype"), dtype)
            and _matches(facets.epilogue(problem), self.epilogue)
            and (self.shape is None or _fits(problem, self.shape))
            and (self.before is None or head.created_at < self.before)
            and (self.after is None or head.created_at > self.after)
        )


def from_options(options: Namespace) -> Filter:
    """The filter for the command line's options, which are called like its fields."""
    return Filter(**{each.name: getattr(options, each.name) for each in fields(Filter)})


def _matches(text: str, pattern: str | None) -> bool:
    return pattern is None or fnmatchcase(text, pattern)


def _fits(problem: Document, wanted: Shape) -> bool:
    return all(
        size is None or size == found
        for size, found in zip(wanted, facets.sizes(problem), strict=True)
    )
