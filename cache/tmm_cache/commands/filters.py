"""The filters of the commands: options of the command line, as a predicate on records.

`parse_*` raise ValueError with a line that argparse shows, so that a bad value never removes
anything.
"""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from typing import TypeAlias

from tmm_cache import problem_fields
from tmm_cache.scan import Summary
from tmm_cache.size_limits import parse_age

Shape: TypeAlias = tuple[int | None, int | None, int | None]

_DTYPES = {short: name for name, short in problem_fields.SHORT_DTYPES.items()} | {
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

    @classmethod
    def of(cls, options: Namespace) -> Filter:
        """The filter for the command line's options, which are called like its fields."""
        return cls(**{each.name: getattr(options, each.name) for each in fields(cls)})

    @property
    def is_empty(self) -> bool:
        """Whether the filter passes every record."""
        return self == Filter()

    def __call__(self, summary: Summary) -> bool:
        header, problem = summary.header, summary.problem
        dtype = None if self.dtype is None else _DTYPES.get(self.dtype, self.dtype)
        globs = (
            (summary.gpu, self.gpu),
            (header.best.kernel, self.kernel),
            (problem_fields.operand(problem, "a", "dtype"), dtype),
            (problem_fields.epilogue(problem), self.epilogue),
        )
        sizes = zip(self.shape or (), problem_fields.sizes(problem), strict=False)
        return (
            all(glob is None or fnmatchcase(text, glob) for text, glob in globs)
            and all(wanted is None or wanted == size for wanted, size in sizes)
            and (self.before is None or header.created_at < self.before)
            and (self.after is None or header.created_at > self.after)
        )
