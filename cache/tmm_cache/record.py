"""What tuning one problem found out, and its one JSON form.

A record keeps the evidence (every candidate's samples, errors and refusals) and not just the
winner: a plugin that is upgraded has its own candidates timed again and nobody else's, and a
wrong choice can be explained a year later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from datetime import datetime
from typing import Literal, TypeAlias, get_args

from tmm_cache.errors import RecordError
from tmm_cache.fields import Fields, reject, shown
from tmm_cache.keys import JSON, plain

#: Version of the document below and of the folder layout.
SCHEMA = 1

Status: TypeAlias = Literal["ok", "slow", "wrong", "failed"]
_STATUSES: tuple[Status, ...] = get_args(Status)

# `datetime.fromisoformat` accepts more in each Python version, and a cache is read by several.
_UTC_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{3}|\.[0-9]{6})?(Z|\+00:00)"
)


def _plain(mapping: Mapping[str, JSON], field: str) -> dict[str, JSON]:
    try:
        return plain(mapping)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"{field}: found what is not JSON ({error})") from error


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """What one (kernel, config) did on the problem.

    `status`: "ok" was timed to the end, "slow" was eliminated early (its samples are of the early
    stages), "wrong" failed verification, "failed" did not compile, launch or finish in time.
    `version` is the kernel's own, opaque here, as is `config`. `error` is the relative error that
    verification measured, None where it was not measured or is not finite (say so in `reason`).
    """

    kernel: str
    version: str
    config: Mapping[str, JSON]
    status: Status
    samples_us: tuple[float, ...] = ()
    error: float | None = None
    tolerance: float | None = None
    workspace_bytes: int = 0
    deterministic: bool = True
    batch_invariant: bool = False
    reason: str | None = None

    @property
    def median_us(self) -> float | None:
        """Median of the samples in microseconds; None without samples."""
        # By hand: `import statistics` costs 15 ms of the command's start.
        if not self.samples_us:
            return None
        ordered = sorted(self.samples_us)
        middle = len(ordered) // 2
        if len(ordered) % 2:
            return ordered[middle]
        return ordered[middle - 1] + (ordered[middle] - ordered[middle - 1]) / 2

    def thinned(self) -> CandidateResult:
        """With the least, the greatest and the middle of its samples only: the same median."""
        if self.median_us is None:
            return self
        three = (min(self.samples_us), self.median_us, max(self.samples_us))
        return replace(self, samples_us=three)

    def to_json(self) -> dict[str, JSON]:
        """The JSON object of this candidate. Raises RecordError if the config is not JSON."""
        return {
            "kernel": self.kernel,
            "version": self.version,
            "config": _plain(self.config, "config"),
            "status": self.status,
            "samples_us": list(self.samples_us),
            "error": self.error,
            "tolerance": self.tolerance,
            "workspace_bytes": self.workspace_bytes,
            "deterministic": self.deterministic,
            "batch_invariant": self.batch_invariant,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, document: object, where: str = "candidate") -> CandidateResult:
        """Read a candidate back; `where` starts the names in complaints. Raises RecordError."""
        fields = Fields(document, where, tuple(field.name for field in fields_of(cls)))
        status = next((known for known in _STATUSES if known == fields.text("status")), None)
        if status is None:
            reject(f"{where}.status", shown(fields.text("status")), f"one of {_STATUSES}")
        return cls(
            kernel=fields.text("kernel"),
            version=fields.text("version"),
            config=fields.mapping("config"),
            status=status,
            samples_us=fields.measures("samples_us"),
            error=fields.optional_measure("error"),
            tolerance=fields.optional_measure("tolerance"),
            workspace_bytes=fields.count("workspace_bytes"),
            deterministic=fields.flag("deterministic"),
            batch_invariant=fields.flag("batch_invariant"),
            reason=fields.optional_text("reason"),
        )


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """Everything that tuning one problem found out.

    `problem` is the readable key, opaque but for what the command shows and filters by.
    `created` is ISO-8601 in UTC, `tuning_seconds` the wall time of the whole tuning.
    """

    problem: Mapping[str, JSON]
    winner: int
    candidates: tuple[CandidateResult, ...]
    created: str
    tuning_seconds: float
    note: str | None = None

    @property
    def best(self) -> CandidateResult:
        """The winning candidate."""
        return self.candidates[self.winner]

    @property
    def created_at(self) -> datetime:
        """`created` as a time in UTC. Raises ValueError where it is none."""
        return datetime.fromisoformat(self.created.replace("Z", "+00:00"))

    def thinned(self) -> TuningRecord:
        """Without most samples, for records that travel with a package."""
        return replace(self, candidates=tuple(each.thinned() for each in self.candidates))

    def to_json(self) -> dict[str, JSON]:
        """The JSON document of this record. Raises RecordError if problem or a config is not."""
        return {
            "schema": SCHEMA,
            "problem": _plain(self.problem, "problem"),
            "winner": self.winner,
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "created": self.created,
            "tuning_seconds": self.tuning_seconds,
            "note": self.note,
        }

    @classmethod
    def from_json(cls, document: object) -> TuningRecord:
        """Read a record back, strictly.

        Raises RecordError, and nothing else, for any JSON value that is no record: an unknown
        schema, a field that is missing, unknown or ill-typed, a time that is NaN or negative, a
        winner out of range or one that is not "ok".
        """
        # First, or a later schema would be told off for its fields.
        if isinstance(document, dict) and "schema" in document:
            schema = document["schema"]
            if type(schema) is not int or schema != SCHEMA:  # True == 1
                reject("schema", shown(schema), f"{SCHEMA}, the version of this tmm")
        fields = Fields(document, "", ("schema", *(field.name for field in fields_of(cls))))
        candidates = tuple(
            CandidateResult.from_json(item, f"candidates[{index}]")
            for index, item in enumerate(fields.items("candidates"))
        )
        winner = fields.count("winner")
        if winner >= len(candidates):
            reject("winner", str(winner), f"an index into the {len(candidates)} candidates")
        if candidates[winner].status != "ok":
            reject(f"candidates[{winner}].status", shown(candidates[winner].status), "'ok', it won")
        record = cls(
            problem=fields.mapping("problem"),
            winner=winner,
            candidates=candidates,
            created=fields.text("created"),
            tuning_seconds=fields.measure("tuning_seconds"),
            note=fields.optional_text("note"),
        )
        if not _is_utc_time(record):
            reject("created", shown(record.created), "a UTC time like '2026-01-31T12:00:00Z'")
        return record


def _is_utc_time(record: TuningRecord) -> bool:
    if not _UTC_TIME.fullmatch(record.created):
        return False
    try:
        _ = record.created_at
    except ValueError:  # 31 February
        return False
    return True
