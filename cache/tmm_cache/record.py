"""The result of tuning one problem, and its JSON form.

A record keeps every candidate's samples, errors and refusals, not just the winner. So upgrading a
plugin retimes only its own candidates, and a wrong choice can be explained a year later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias, get_args

from tmm_cache import fields
from tmm_cache.cache_errors import RecordError, suppress
from tmm_cache.fields import RefusedError, shown
from tmm_cache.keys import JSON, Document, plain

#: Version of the document below and of the folder layout.
SCHEMA: Final = 2

#: The clock of the times: back-to-back launches, as a program makes them.
CLOCK: Final = "in use"

Status: TypeAlias = Literal["ok", "slow", "wrong", "failed"]
_STATUSES: tuple[Status, ...] = get_args(Status)

# `datetime.fromisoformat` accepts more with each Python version, and several may read a cache.
_UTC_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{3}|\.[0-9]{6})?(Z|\+00:00)"
)


def _plain(mapping: Document, field: str) -> dict[str, JSON]:
    if type(mapping) is dict and {*map(type, mapping.values())} <= {int, str, bool}:
        return mapping.copy()  # most configs; ten times faster than below
    try:
        return plain(mapping)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{field}: found a value that is not JSON ({error})") from error


@dataclass(frozen=True, slots=True, repr=False)
class CandidateResult:
    """The result of one (kernel, config) on the problem.

    `status`: "ok" was timed to the end, "slow" was eliminated early (its samples are from the early
    stages), "wrong" failed verification, "failed" did not compile, launch or finish in time.
    `version` is the kernel's, opaque here, as is `config`. `error` is the relative error that
    verification measured, None if it was not measured or is not finite (`reason` tells which).
    `samples_us` are at the record's own M; `inside_us` are medians at other M of its bucket.
    `steady_us` is the mean time in steady state (back to back), measured for BLAS and kernels ahead
    of it if the product is large.
    """

    kernel: str
    version: str
    config: Document
    status: Status
    samples_us: tuple[float, ...] = ()
    error: float | None = None
    tolerance: float | None = None
    workspace_bytes: int = 0
    deterministic: bool = True
    batch_invariant: bool = False
    reason: str | None = None
    inside_us: Mapping[int, float] = field(default_factory=dict)
    steady_us: float | None = None

    def __repr__(self) -> str:
        """A line: kernel, config, status and median; `dataclasses.asdict` has everything."""
        from tmm_cache import problem_fields  # not needed by calls

        words = problem_fields.printable(self.kernel), problem_fields.config(self.config)
        time = "not timed" if self.median_us is None else f"{self.median_us:.2f} µs"
        return f"<CandidateResult {' '.join(filter(None, words))}: {self.status}, {time}>"

    def us_at(self, m: int, record_m: int) -> float | None:
        """The median time at M = `m` in a record of M = `record_m`; None if it was not timed."""
        return self.median_us if m == record_m else self.inside_us.get(m)

    @property
    def median_us(self) -> float | None:
        """Median of the samples in microseconds; None without samples."""
        # `import statistics` would cost the command 15 ms at startup.
        if not self.samples_us:
            return None
        ordered = sorted(self.samples_us)
        middle = len(ordered) // 2
        if len(ordered) % 2:
            return ordered[middle]
        return ordered[middle - 1] + (ordered[middle] - ordered[middle - 1]) / 2

    def thinned(self, is_complete: bool = True) -> CandidateResult:
        """A copy with three samples: the smallest, the median and the largest.

        A candidate that was eliminated early keeps only its median, so that it remains
        distinguishable.
        """
        if self.median_us is None or (is_complete and len(self.samples_us) <= 3):
            return self
        three = (min(self.samples_us), self.median_us, max(self.samples_us))
        return replace(self, samples_us=three if is_complete else (self.median_us,))

    def to_json(self) -> dict[str, JSON]:
        """The JSON object of this candidate, without fields equal to their default, so that adding
        such a field does not change older documents. Raises RecordError if the config is not
        JSON."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _CANDIDATE}
        values["config"] = _plain(self.config, "config")
        values["samples_us"] = list(self.samples_us)
        values["inside_us"] = {str(m): time for m, time in sorted(self.inside_us.items())}
        return {
            name: value
            for name, value in values.items()
            if name not in _OPTIONAL or getattr(self, name) != getattr(_BARE, name)
        }

    @classmethod
    def from_json(cls, document: object) -> CandidateResult:
        """Parse a candidate. Raises RecordError."""
        return cls(**fields.fields(document, _CANDIDATE, _OPTIONAL))


_CANDIDATE: Final = {
    "kernel": fields.name,
    "version": fields.name,
    "config": fields.parameters,
    "status": fields.kind(f"one of {_STATUSES}", _STATUSES.__contains__),
    "samples_us": fields.measures,
    "error": fields.optional(fields.measure),
    "tolerance": fields.optional(fields.measure),
    "workspace_bytes": fields.count,
    "deterministic": fields.flag,
    "batch_invariant": fields.flag,
    "reason": fields.optional(fields.text),
    "inside_us": fields.times_by_size,
    "steady_us": fields.optional(fields.measure),
}
#: A candidate of the required fields only, and the names of the others.
_BARE: Final = CandidateResult(kernel="", version="", config={}, status="ok")
_OPTIONAL: Final = _CANDIDATE.keys() - {"kernel", "version", "config", "status"}


@dataclass(frozen=True, slots=True, repr=False)
class TuningRecord:
    """The result of tuning one problem.

    `problem` is the readable key, opaque except for the fields that the command shows. `created` is
    ISO-8601 in UTC, `tuning_seconds` the wall time of the whole tuning.
    """

    problem: Document
    winner: int
    candidates: tuple[CandidateResult, ...]
    created: str
    tuning_seconds: float

    @property
    def along(self) -> str:
        """The dimension whose sizes share records in buckets: the ragged one of groups, else M."""
        groups = self.problem.get("groups")
        along = groups.get("ragged") if isinstance(groups, Mapping) else None
        return along if along in ("n", "k") else "m"

    @property
    def extent(self) -> int:
        """The problem's own size of that dimension."""
        own = self.problem[self.along]
        assert isinstance(own, int)
        return own

    @property
    def measured_at(self) -> tuple[int, ...]:
        """Every size at which a candidate was timed, including the problem's own, sorted."""
        sizes = {m for candidate in self.candidates for m in candidate.inside_us}
        return tuple(sorted({self.extent, *sizes}))

    @property
    def best(self) -> CandidateResult:
        """The winning candidate."""
        return self.candidates[self.winner]

    @property
    def created_at(self) -> datetime:
        """`created` as a UTC datetime. Raises ValueError if it is not one."""
        return utc_time(self.created)

    def __repr__(self) -> str:
        """A line: the problem, its winner and the times; `to_json` has everything."""
        from tmm_cache import problem_fields  # not needed by calls

        us, blas = self.best.median_us, blas_us(self)
        sizes = problem_fields.shape(self.problem)
        dtypes = problem_fields.dtypes(self.problem, short=True)
        time = "not timed" if us is None else f"{us:.2f} µs"
        ratio = f", {blas / us:.2f}x over blas" if us and blas else ""
        tried = f"{len(self.candidates)} candidate{'s' * (len(self.candidates) != 1)}"
        return (
            f"<TuningRecord {sizes} {dtypes} {problem_fields.expression(self.problem)}: "
            f"{problem_fields.printable(self.best.kernel)} {time}{ratio}, {tried}>"
        )

    def thinned(self) -> TuningRecord:
        """Without most samples, for records shipped with a package."""
        most = max(len(each.samples_us) for each in self.candidates)
        thin = tuple(each.thinned(len(each.samples_us) == most) for each in self.candidates)
        return replace(self, candidates=thin)

    def to_json(self) -> dict[str, JSON]:
        """The JSON document of this record. Raises RecordError if the problem or a config is not
        JSON."""
        return {
            "schema": SCHEMA,
            "clock": CLOCK,
            "problem": _plain(self.problem, "problem"),
            "winner": self.winner,
            "created": self.created,
            "tuning_seconds": self.tuning_seconds,
            "candidates": [candidate.to_json() for candidate in self.candidates],
        }

    @classmethod
    def from_json(cls, document: object) -> TuningRecord:
        """Parse a record strictly, since it may be untrusted.

        Raises RecordError, and nothing else, for any JSON value that is not a record. A record has
        the current schema and all required fields, no others, each of its type and within bounds.
        Times are finite and not negative; the winner is a candidate that is "ok".
        """
        # First, or another schema would be rejected for its fields.
        schema = document.get("schema", SCHEMA) if isinstance(document, dict) else SCHEMA
        fields.at(".schema", _RECORD["schema"], schema)
        values = fields.fields(document, _RECORD, ())
        del values["schema"], values["clock"]
        record = cls(**values)
        winner, candidates = record.winner, record.candidates
        if winner >= len(candidates):
            accepted = f"an index into the {len(candidates)} candidates"
            raise RefusedError(str(winner), accepted, ".winner")
        if (status := record.best.status) != "ok":
            raise RefusedError(shown(status), "'ok', it won", f".candidates[{winner}].status")
        return record


def blas_us(record: TuningRecord) -> float | None:
    """The best median of the BLAS candidates, in microseconds; None if none was timed."""
    medians = [
        candidate.median_us
        for candidate in record.candidates
        if candidate.kernel == "blas" or candidate.kernel.startswith("blas.")
    ]
    return min((median for median in medians if median is not None), default=None)


def utc_time(text: object) -> datetime:
    """Parse a time in the format of records. Raises ValueError for anything else."""
    if not isinstance(text, str) or not _UTC_TIME.fullmatch(text):
        raise ValueError(f"{shown(text)} is not a UTC time")
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _is_utc_time(value: object) -> bool:
    with suppress(ValueError):
        return bool(utc_time(value))
    return False


_RECORD: Final = {
    "schema": fields.kind(
        f"{SCHEMA}, the version of this tmm", lambda v: type(v) is int and v == SCHEMA
    ),
    "clock": fields.kind(repr(CLOCK), lambda value: value == CLOCK),
    "problem": fields.problem,
    "winner": fields.count,
    "candidates": fields.items(CandidateResult.from_json),
    "created": fields.kind("a UTC time like '2026-01-31T12:00:00Z'", _is_utc_time),
    "tuning_seconds": fields.measure,
}
