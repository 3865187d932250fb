"""Ranks the candidates of a record by its times, at its own M and at other M of its bucket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tmm_cache import CandidateResult, TuningRecord

from tmm_core.spec.bucket import probes
from tmm_core.spec.launcher import BASELINE

#: The margin by which a winner has to beat BLAS. With the samples of the last round, two medians of
#: one kernel differ by up to 0.5 % on a quiet H200.
MARGIN = 0.01

#: Times this close to the best are a tie. A fixed rule breaks it, so that restarts agree.
TIE = 0.005

#: Times of large products that differ by less do not show which is faster in longer use
#: (:data:`tmm_core.tuning.timing.BURST_US`).
CLOSE = 0.02

#: An M that was never measured gets its own race if calls take more than this many µs. A wrong
#: choice then costs more than the race. Candidates within :data:`OPEN` times the best take part.
#: Orders of tiles differ by up to 8 % at one M, tiles by 15.
LONG_CALL_US, OPEN = 100.0, 1.15
#: Maximum number of kernels in such a race, besides BLAS, and of raced M that a record keeps.
RACERS, MOST_RACED = 2, 16

#: Kernel, and config as sorted pairs.
CandidateId = tuple[str, tuple[tuple[str, Any], ...]]


def identity(result: CandidateResult) -> CandidateId:
    """Return the identity of a candidate within a record."""
    return result.kernel, tuple(sorted(result.config.items()))


def finalists(results: Iterable[CandidateResult]) -> list[CandidateResult]:
    """Return the valid results of the last round. Medians of earlier rounds are not comparable: the
    GPU's clock had not settled."""
    timed = [result for result in results if result.status == "ok" and result.samples_us]
    most = max((len(result.samples_us) for result in timed), default=0)
    return [result for result in timed if len(result.samples_us) == most]


def fastest_first(record: TuningRecord, *also: str) -> list[CandidateResult]:
    """Return the ranking: finalists, then candidates eliminated earlier, then candidates slower
    than BLAS in steady state; each by time. Results of the statuses ``also`` are included."""
    ended = set(map(identity, finalists(record.candidates)))
    slower = slower_in_steady_state(record.candidates)
    timed = [c for c in record.candidates if c.status in ("ok", *also) and c.samples_us]

    def rank(c: CandidateResult) -> tuple[Any, ...]:
        return c in slower, identity(c) not in ended, _us(c), c.kernel, str(c.config)

    return sorted(timed, key=rank)


def slower_in_steady_state(
    results: Iterable[CandidateResult], by: float = CLOSE
) -> list[CandidateResult]:
    """Return the results that take longer than BLAS in steady state, by this part of BLAS's
    time."""
    results = list(results)
    blas = [r.steady_us for r in results if r.kernel == BASELINE and r.steady_us is not None]
    if not blas:
        return []
    most = min(blas) * (1 + by)
    return [r for r in results if r.steady_us is not None and r.steady_us > most]


def decide(results: Sequence[CandidateResult], incumbent: CandidateResult | None = None) -> int:
    """Return the index of the winner, among the finalists.

    BLAS wins unless a kernel beats it by :data:`MARGIN` and is not slower in steady state. If some
    finalists were timed in steady state, only these can win: among those within :data:`CLOSE` of
    the best, the fastest in steady state wins. Otherwise ties within :data:`TIE` of the best are
    broken by determinism, then workspace, the incumbent, and name.

    Raises:
        ValueError: Nothing was timed.
    """
    ended = finalists(results)
    if not ended:
        raise ValueError("no candidate was timed")
    blas = min((r for r in ended if r.kernel == BASELINE), key=_us, default=None)
    slower = slower_in_steady_state(ended)
    timed = [r for r in ended if r.steady_us is not None]
    able = [r for r in timed or ended if r not in slower]
    best = min(map(_us, able))
    if blas is not None and best > _us(blas) * (1 - MARGIN):
        return results.index(blas)
    if timed:
        near = [r for r in able if _us(r) <= best * (1 + CLOSE)]
        return results.index(min(near, key=lambda r: r.steady_us or 0.0))
    kept = None if incumbent is None else identity(incumbent)

    def rank(r: CandidateResult) -> tuple[Any, ...]:
        return not r.deterministic, r.workspace_bytes, identity(r) != kept, r.kernel, str(r.config)

    return results.index(min((r for r in able if _us(r) <= best * (1 + TIE)), key=rank))


def times_around(
    results: Iterable[CandidateResult], m: int, record_m: int
) -> dict[int, dict[CandidateId, float]]:
    """Return the times in µs measured around ``m`` in the bucket of ``record_m``, by M and
    candidate.

    There is one M on each side: the nearest that is not above ``m``, and the nearest that is not
    below it. Candidates slower than BLAS in steady state at the record's own M are left out. BLAS's
    times are from the nearest M on each side at which BLAS was timed, even without kernels.
    """
    results = list(results)
    slower = slower_in_steady_state(results)
    results = [result for result in results if result not in slower]
    at: dict[int, dict[CandidateId, float]] = {}
    for result in finalists(results):
        at.setdefault(record_m, {})[identity(result)] = _us(result)
    for result in results:
        if result.status == "ok":
            for there, us in result.inside_us.items():
                at.setdefault(there, {})[identity(result)] = us
    timed = [there for there, us in at.items() if any(name[0] != BASELINE for name in us)]
    below = max((there for there in timed if there <= m), default=m + 1)
    above = min((there for there in timed if there >= m), default=m - 1)
    around = {there: at[there] for there in (below, above) if there in at}
    # The nearest M comes last, so that its time is kept.
    for there in sorted(at, key=lambda there: -abs(there - m)):
        alone = {name: us for name, us in at[there].items() if name[0] == BASELINE}
        for side in around:
            if min(side, m) <= there <= max(side, m):
                around[side] = {**around[side], **alone}
    return around


def compared_at(record: TuningRecord) -> list[int]:
    """Return the record's own M and each M at which a kernel was timed, sorted."""
    kernels = [c for c in record.candidates if c.kernel != BASELINE]
    timed = {record.extent, *(m for kernel in kernels for m in kernel.inside_us)}
    return [m for m in record.measured_at if m in timed]


def racers(record: TuningRecord, m: int) -> list[int]:
    """Return the indices of the candidates to race at ``m``: BLAS, and the kernels that are best
    around ``m``. Empty if ``m`` was measured, or if a race is not worth its time."""
    edge = record.extent
    around = times_around(record.candidates, m, edge)
    ratios = behind(around)
    fast = min((us for times in around.values() for us in times.values()), default=0.0)
    known = compared_at(record)
    raced = {*known} - {edge, *probes(edge)}
    if m in known or fast <= LONG_CALL_US or len(raced) >= MOST_RACED:
        return []
    near = sorted((name for name in ratios if ratios[name] <= OPEN), key=lambda n: (ratios[n], n))
    kernels = [name for name in near if name[0] != BASELINE][:RACERS]
    blas = fastest_blas(around)
    if not kernels or len({*kernels, *([blas] if blas in near else [])}) < 2:
        return []
    names = [identity(result) for result in record.candidates]
    return [names.index(name) for name in ([blas] if blas else []) + kernels]


def ranked_around(around: Mapping[int, Mapping[CandidateId, float]]) -> list[CandidateId]:
    """Return the candidates that beat BLAS by :data:`MARGIN` at every M of ``around``. They are
    ordered by their largest ratio to the fastest candidate at any of these M."""
    ahead = {
        name: slower
        for name, slower in behind(around).items()
        if name[0] != BASELINE
        and all(
            times[name] <= us * (1 - MARGIN)
            for times in around.values()
            for (kernel, _), us in times.items()
            if kernel == BASELINE
        )
    }
    return sorted(ahead, key=lambda name: (ahead[name], name))


def fastest_blas(around: Mapping[int, Mapping[CandidateId, float]]) -> CandidateId | None:
    """Return BLAS's candidate with the smallest worst ratio to BLAS's fastest at each M."""
    own = [{n: us for n, us in times.items() if n[0] == BASELINE} for times in around.values()]
    ratios = behind(dict(enumerate(own)))
    return min(ratios, key=lambda name: (ratios[name], name), default=None)


def behind(around: Mapping[int, Mapping[CandidateId, float]]) -> dict[CandidateId, float]:
    """Return the largest ratio to the fastest of each candidate that was timed at every M."""
    common = set.intersection(*(set(times) for times in around.values())) if around else set()
    return {
        name: max(times[name] / min(times.values()) for times in around.values()) for name in common
    }


def _us(result: CandidateResult) -> float:
    time_us = result.median_us
    return float("inf") if time_us is None else time_us
