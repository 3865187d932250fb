"""The result of tuning one problem, and its JSON form.

A record keeps every candidate's samples, errors and refusals, not just the winner. So upgrading a
plugin retimes only its own candidates, and a wrong choice can be explained a year later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct
from tmm_base.guards import printable

from tmm_cache import fields
from tmm_cache.cache_errors import RecordError
from tmm_cache.fields import (
    ITEMS_MAX,
    PARAMETERS_MAX,
    Count,
    Measure,
    Name,
    Parameters,
    Size,
    Text,
)
from tmm_cache.keys import JSON, Document, plain

#: Version of the document below and of the folder layout.
SCHEMA: Final = 2

#: The clock of the times: back-to-back launches, as a program makes them.
CLOCK: Final = "in use"

Status: TypeAlias = Literal["ok", "slow", "wrong", "failed"]
_Schema: TypeAlias = Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)]
_Clock: TypeAlias = Literal[CLOCK]  # type: ignore[valid-type]
_Samples: TypeAlias = Annotated[tuple[Measure, ...], Meta(max_length=ITEMS_MAX)]
_TimesBySize: TypeAlias = Annotated[Mapping[Size, Measure], Meta(max_length=PARAMETERS_MAX)]


def _plain(mapping: Document, field: str) -> dict[str, JSON]:
    if type(mapping) is dict and {*map(type, mapping.values())} <= {int, str, bool}:
        return mapping.copy()  # most configs; ten times faster than below
    try:
        return plain(mapping)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{field}: found a value that is not JSON ({error})") from error


def _median(samples: Sequence[float]) -> float | None:
    """Return the median; None without samples."""
    # `import statistics` would cost the command 15 ms at startup.
    if not samples:
        return None
    ordered = sorted(samples)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return ordered[middle - 1] + (ordered[middle] - ordered[middle - 1]) / 2


def _blas_us(candidates: Iterable[CandidateResult | _Timed]) -> float | None:
    """Return the best median of the BLAS candidates; None if none was timed."""
    medians = [each.median_us for each in candidates if each.kernel == "blas"]
    return min((median for median in medians if median is not None), default=None)


def _speedup(us: float | None, blas_us: float | None) -> float | None:
    if blas_us is None or not us:
        return None
    quotient = blas_us / us
    return quotient if math.isfinite(quotient) else None


class CandidateResult(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The result of one (kernel, config) on the problem.

    `status`: "ok" was timed to the end. "slow" was eliminated early; its samples are from the early
    stages. "wrong" failed verification. "failed" did not compile, launch or finish in time.
    `version` is the kernel's, opaque here, as is `config`. `error` is the relative error that
    verification measured, None if it was not measured or is not finite (`reason` states which).
    `samples_us` are at the record's own M; `inside_us` are medians at other M of its bucket.
    `steady_us` is the mean time in steady state (back to back), measured for BLAS and kernels ahead
    of it if the product is large.
    """

    kernel: Name
    version: Name
    config: Parameters
    status: Status
    samples_us: _Samples = ()
    error: Measure | None = None
    tolerance: Measure | None = None
    workspace_bytes: Count = 0
    deterministic: bool = True
    batch_invariant: bool = False
    reason: Text | None = None
    inside_us: _TimesBySize = msgspec.field(default_factory=dict)
    steady_us: Measure | None = None

    def __repr__(self) -> str:
        """A line: kernel, config, status and median; `to_json` has everything."""
        from tmm_cache import problem_fields  # not needed by calls

        words = printable(self.kernel), problem_fields.config(self.config)
        time = "not timed" if self.median_us is None else f"{self.median_us:.2f} µs"
        return f"<CandidateResult {' '.join(filter(None, words))}: {self.status}, {time}>"

    def us_at(self, m: int, record_m: int) -> float | None:
        """The median time at M = `m` in a record of M = `record_m`; None if it was not timed."""
        return self.median_us if m == record_m else self.inside_us.get(m)

    @property
    def median_us(self) -> float | None:
        """Median of the samples in microseconds; None without samples."""
        return _median(self.samples_us)

    def thinned(self, is_complete: bool = True) -> CandidateResult:
        """Return a copy with three samples: the smallest, the median and the largest.

        A candidate that was eliminated early keeps only its median, so that it remains
        distinguishable.
        """
        if self.median_us is None or (is_complete and len(self.samples_us) <= 3):
            return self
        three = (min(self.samples_us), self.median_us, max(self.samples_us))
        samples = three if is_complete else (self.median_us,)
        return msgspec.structs.replace(self, samples_us=samples)

    def to_json(self) -> dict[str, JSON]:
        """The JSON object of this candidate, without fields equal to their default, so that adding
        such a field does not change older documents. Raises RecordError if the config is not
        JSON."""
        bare = msgspec.structs.replace(self, config=_plain(self.config, "config"))
        document: dict[str, JSON] = msgspec.to_builtins(bare, str_keys=True)
        if self.samples_us:
            document["samples_us"] = list(self.samples_us)
        return document

    @classmethod
    def from_json(cls, document: object) -> CandidateResult:
        """Read a candidate strictly. Raises RecordError."""
        fields.require_unicode(document)
        candidate: CandidateResult = fields.converted(document, CandidateResult)
        candidate.require_printable()
        return candidate

    def require_printable(self) -> None:
        """Check the kernel, its version and the config. Raises RecordError."""
        texts = (self.kernel, self.version, *self.config, *self.config.values())
        fields.require_printable(texts)


class TuningRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of tuning one problem.

    `problem` is the readable key, opaque except for the fields that the command shows. `created` is
    ISO-8601 in UTC, `tuning_seconds` the wall time of the whole tuning.
    """

    problem: Mapping[str, Any]
    winner: Count
    candidates: Annotated[tuple[CandidateResult, ...], Meta(min_length=1, max_length=ITEMS_MAX)]
    created: str
    tuning_seconds: Measure

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
        """`created` as a datetime. Raises RecordError if it is not a time with its zone."""
        found: _Created = fields.converted({"created": self.created}, _Created)
        return found.created

    @property
    def blas_us(self) -> float | None:
        """The best median of the BLAS candidates, in microseconds; None if none was timed."""
        return _blas_us(self.candidates)

    @property
    def speedup(self) -> float | None:
        """How many times faster than BLAS the winner is; None if either was not timed, or if a time
        is not a plausible kernel time."""
        return _speedup(self.best.median_us, self.blas_us)

    def __repr__(self) -> str:
        """A line: the problem, its winner and the times; `to_json` has everything."""
        from tmm_cache import problem_fields  # not needed by calls

        us, speedup = self.best.median_us, self.speedup
        sizes = problem_fields.shape(self.problem)
        dtypes = problem_fields.dtypes(self.problem, short=True)
        time = "not timed" if us is None else f"{us:.2f} µs"
        ratio = "" if speedup is None else f", {speedup:.2f}x over blas"
        tried = f"{len(self.candidates)} candidate{'s' * (len(self.candidates) != 1)}"
        return (
            f"<TuningRecord {sizes} {dtypes} {problem_fields.expression(self.problem)}: "
            f"{printable(self.best.kernel)} {time}{ratio}, {tried}>"
        )

    def thinned(self) -> TuningRecord:
        """Return a copy without most samples, for records shipped with a package."""
        most = max(len(each.samples_us) for each in self.candidates)
        thin = tuple(each.thinned(len(each.samples_us) == most) for each in self.candidates)
        return msgspec.structs.replace(self, candidates=thin)

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
        """Read a record strictly, since it may be untrusted.

        Raises RecordError, and nothing else, for any JSON value that is not a record. A record has
        the current schema and all required fields, no others, each of its type and within bounds.
        Times are finite and not negative; the winner is a candidate that is "ok".
        """
        fields.require_unicode(document)
        return _checked(fields.converted(document, _Document))

    @classmethod
    def from_bytes(cls, data: bytes) -> TuningRecord:
        """Read a record from the bytes of its document. Raises like `from_json`."""
        return _checked(fields.decoded(data, _Document))


class _Created(Struct):
    created: Annotated[datetime, Meta(tz=True)]


class _Timed(Struct, frozen=True):
    kernel: Name
    #: The text of its samples: a list needs two of thirty, and the others take most of the time.
    samples_us: msgspec.Raw = msgspec.Raw(b"[]")

    @property
    def median_us(self) -> float | None:
        """Like `CandidateResult.median_us`. Raises RecordError."""
        return _median(fields.decoded(self.samples_us, _Samples))


class _Headed(Struct, frozen=True):
    """The fields of a record's document that say what was measured."""

    schema: _Schema
    clock: _Clock
    problem: Mapping[str, Any]


def problem_of(data: bytes) -> Mapping[str, Any]:
    """Return the problem of a record's document. The rest of the file is not checked. Raises
    RecordError."""
    headed: _Headed = fields.decoded(data, _Headed)
    fields.require_sizes(headed.problem)
    return headed.problem


class _Timings(_Headed, frozen=True):
    """The fields of a record's document that a list of records shows."""

    winner: Count
    candidates: tuple[_Timed, ...]


class Brief(NamedTuple):
    """The fields of a record that a list of records shows. Neither the rest of its file nor its
    checksum is checked. Times are medians in microseconds."""

    problem: Mapping[str, Any]
    kernel: str
    us: float | None
    blas_us: float | None

    @classmethod
    def from_bytes(cls, data: bytes) -> Brief:
        """Read the fields from the bytes of a record's document. Raises RecordError."""
        timings: _Timings = fields.decoded(data, _Timings)
        fields.require_sizes(timings.problem)
        if timings.winner >= len(timings.candidates):
            raise RecordError(f"winner: found {timings.winner}")
        best = timings.candidates[timings.winner]
        return cls(timings.problem, best.kernel, best.median_us, _blas_us(timings.candidates))

    @property
    def speedup(self) -> float | None:
        """Like `TuningRecord.speedup`."""
        return _speedup(self.us, self.blas_us)


class _Document(TuningRecord, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A record as it is stored."""

    schema: _Schema
    clock: _Clock
    #: Ignored: older versions repeated the winner here, and said whether a record was imported.
    older_best: Any = msgspec.field(name="best", default=None)
    imported: Any = None


def _checked(record: TuningRecord) -> TuningRecord:
    """Return the record of a document, after checks that types cannot express. Raises
    RecordError."""
    fields.require_problem(record.problem)
    if record.winner >= len(record.candidates):
        raise RecordError(f"winner: found {record.winner} of {len(record.candidates)} candidates")
    if record.best.status != "ok":
        raise RecordError(f"candidates[{record.winner}].status: it won, and is not 'ok'")
    for index, each in enumerate(record.candidates):
        try:
            each.require_printable()
        except RecordError as error:
            raise RecordError(f"candidates[{index}]: {error}") from None
    _ = record.created_at  # raises RecordError
    return TuningRecord(*(getattr(record, name) for name in TuningRecord.__struct_fields__))
