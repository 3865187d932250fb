"""A record's candidates as cells of a table, for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from tmm_cache import problem_fields

#: A `tmm_cache.CandidateResult`. Its module imports this one, for notebooks.
Result: TypeAlias = Any

#: The columns of numbers: microseconds, a count, relative errors, bytes.
NUMBERS = ("median µs", "min", "max", "samples", "error", "tolerance", "workspace")
COLUMNS = ("", "kernel", "status", *NUMBERS)


def rows(candidates: Sequence[Result], winner: int) -> Iterator[tuple[tuple[str, ...], str]]:
    """The cells under `COLUMNS` of each candidate and the rest as text; the winner first, the
    others from the fastest on."""
    order = sorted(
        range(len(candidates)),
        key=lambda index: (index != winner, candidates[index].median_us or 1e300),
    )
    for index in order:
        result = candidates[index]
        cells = (
            "*" if index == winner else "",
            problem_fields.printable(result.kernel),
            result.status,
            microseconds(result.median_us),
            microseconds(min(result.samples_us, default=None)),
            microseconds(max(result.samples_us, default=None)),
            str(len(result.samples_us)),
            _error(result.error),
            _error(result.tolerance),
            bytes_text(result.workspace_bytes),
        )
        yield cells, _words(result)


def _words(result: Result) -> str:
    """The non-numeric part: config, traits, version and why the candidate was rejected."""
    traits = {"deterministic": result.deterministic, "batch-invariant": result.batch_invariant}
    return "; ".join(
        filter(
            None,
            (
                problem_fields.config(result.config),
                " ".join(name for name, has in traits.items() if has),
                f"version {problem_fields.printable(result.version)}",
                None if result.steady_us is None else f"{result.steady_us:.2f} µs in steady state",
                None if result.reason is None else problem_fields.printable(result.reason),
            ),
        )
    )


def microseconds(value: float | None) -> str:
    """A time in hundredths of a microsecond, finer than a GPU clock resolves."""
    return problem_fields.ABSENT if value is None else f"{value:.2f}"


def bytes_text(count: int) -> str:
    """`1.5 KiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _error(value: float | None) -> str:
    return problem_fields.ABSENT if value is None else f"{value:.2e}"
