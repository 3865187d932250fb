"""Batch-invariant mode: one arithmetic for all M of a weight, and for each M its fastest config.

An arithmetic names everything that the bits of a row depend on (:meth:`Kernel.arithmetic`), the
same on every machine. A weight's arithmetic is chosen by its cost at every M of a ladder::

    M            16     64    256    1024
    sm90-k16    1.02   1.00   1.10   1.03   ← least regret
    …/split4    1.00   1.05   1.00   1.21

where a cost is the time over the fastest known, including BLAS. A measured choice is pinned in the
cache's notes, so that restarts agree; ``TMM_ARITHMETIC`` pins it by name, so that machines agree.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tmm_cache import JSON, CandidateResult, Notes, TuningRecord, digest

from tmm_core.dispatch.measuring import Measuring
from tmm_core.errors import PluginError, UnsupportedProblemError
from tmm_core.launch.plan import Choice
from tmm_core.settings import Settings
from tmm_core.spec.bucket import bucketed, inside
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.kernel import Candidate, Kernel
from tmm_core.spec.operand import ALIGNMENT, Layout, Operand
from tmm_core.spec.problem import Problem
from tmm_core.tuning.ranking import behind, fastest_first, identity, times_around

#: The M at which arithmetics are compared, from decode to prefill. More of them would not change
#: the choice (docs/notes/batch_invariance.md), and the first call of a weight would wait longer.
LADDER = (16, 64, 256, 1024)
#: Weight of the worst M relative to the mean over all M, both as logarithms.
WORST = 0.5
#: Maximum elements of a rung's largest matrix. Larger rungs are left out, since verification takes
#: about ten bytes per element.
LARGEST = 2**28
#: Status of a valid candidate that lost early. It may be the only one of its arithmetic.
_ELIMINATED = "slow"
#: µs assumed for a config without an estimate, so that it is chosen only as a last resort.
_NO_ESTIMATE = 1e6


@dataclass(frozen=True, slots=True)
class Rung:
    """The known times at one M: the fastest of all in µs, and the fastest of each arithmetic.
    ``inside`` has them for other M of the bucket, at which not every arithmetic was timed."""

    best_us: float
    times: Mapping[str, float]
    inside: Sequence[Rung] = ()

    def regrets(self, name: str) -> list[float]:
        """The logarithms of an arithmetic's time over the best, at each M at which it was timed."""
        timed = [rung for rung in (self, *self.inside) if name in rung.times]
        return [math.log(rung.times[name] / rung.best_us) for rung in timed]


def least_regret(rungs: Sequence[Rung]) -> str | None:
    """Return the arithmetic with the lowest cost over the rungs; None if there is none. A cost is
    the mean plus :data:`WORST` times the worst of the times, relative to the best known at each
    rung. A rung counts by its mean over the M of its bucket: a kernel may be ahead at the edge and
    far behind inside. Only the arithmetics that serve the most rungs are compared. Ties go to the
    first by name."""
    names = {name for rung in rungs for name in rung.times}

    def rank(name: str) -> tuple[int, float, str]:
        served = [rung for rung in rungs if name in rung.times]
        regrets = [rung.regrets(name) for rung in served]
        score = statistics.fmean(map(statistics.fmean, regrets)) + WORST * max(map(max, regrets))
        return len(rungs) - len(served), score, name

    return min(names, key=rank, default=None)


class Invariance:
    """Chooses among batch-invariant kernels, and keeps its choices for this process."""

    def __init__(self, host: Measuring) -> None:
        self._host = host
        #: Arithmetics by weight and settings. An untuned choice stays too: bits must not change
        #: between two calls because the second may measure.
        self._arithmetics: dict[tuple[str, Settings], str] = {}
        self._choices: dict[tuple[Problem, tuple[int, bool], Settings, str], Choice] = {}
        self._notes: dict[DeviceFingerprint, Notes] = {}

    def copy_from(self, other: Invariance) -> None:
        """Copy the choices of ``other``."""
        self._arithmetics = dict(other._arithmetics)
        self._choices = dict(other._choices)

    def forget(self) -> None:
        """Forget configs, since records or kernels changed. Arithmetics stay. Another thread that
        is choosing adds to the former choices."""
        self._choices = {}

    def choose(self, problem: Problem, settings: Settings) -> Choice | None:
        """Return the fastest config for this M of the weight's arithmetic; None if no
        batch-invariant kernel can serve ``problem``.

        Raises:
            UnsupportedProblemError: The settings name an arithmetic that is not available here.
            CacheMissError: ``on_cache_miss="error"`` and the weight was never tuned, or it is
                missing from the required lock file.
        """
        able = self._host.able(problem, settings)
        if settings.arithmetic is not None:
            choice = self._within(problem, able, settings.arithmetic, settings)
            if choice is None:
                offered = ", ".join(sorted(self._offered(problem, able))) or "none"
                raise UnsupportedProblemError(
                    f"no kernel here can serve {problem} by the arithmetic "
                    f"{settings.arithmetic!r} of TMM_ARITHMETIC or override(arithmetic=…); "
                    f"there are: {offered}"
                )
            return choice
        wanted = self._arithmetic(problem, settings) if able else None
        if wanted is None:
            return None
        choice = self._within(problem, able, wanted, settings)
        if choice is not None:
            return choice
        other = least_regret([self._expected(problem, able)])
        if other is None:
            return None
        self._host.warn_once(
            f"{problem} cannot be served by its weight's arithmetic {wanted}, but by {other}: its "
            f"rows differ from those computed with another M"
        )
        return self._within(problem, able, other, settings)

    def tune(self, problem: Problem, settings: Settings, force: bool) -> TuningRecord | None:
        """Measure the rungs of the weight and ``problem`` itself, and return its own record. A
        untuned arithmetic is replaced by the measured one."""
        self._arithmetics.clear()
        own = replace(problem, capturing=False)
        able = self._host.able(own, settings)
        if able and settings.arithmetic is None:
            weight_digest, notes = digest(weight(own)), self._notes_of(own)
            rungs = list(self._rungs(own, settings))
            noted = notes.get(weight_digest)
            is_kept = self._is_offered(noted, rungs) and not force
            if not is_kept and not is_gradient(own):
                chosen = self._measured(rungs, settings, tune=True, force=force)
                if chosen is not None:
                    notes.add(weight_digest, chosen)
        return self._host.on_record(own, able, settings, tune=True, force=force)

    # -- the weight's arithmetic --------------------------------------------------------

    def _arithmetic(self, problem: Problem, settings: Settings) -> str | None:
        """Return the weight's arithmetic: from notes, else from records, measured now if allowed,
        else from estimates."""
        weight_digest = digest(weight(problem))
        chosen = self._arithmetics.get((weight_digest, settings))
        if chosen is None:
            chosen = self._resolved(problem, weight_digest, settings)
            if chosen is not None:
                # If two threads resolve it, both use the first result.
                chosen = self._arithmetics.setdefault((weight_digest, settings), chosen)
        return chosen

    def _resolved(self, problem: Problem, weight_digest: str, settings: Settings) -> str | None:
        notes, rungs = self._notes_of(problem), list(self._rungs(problem, settings))
        noted = notes.get(weight_digest)
        if isinstance(noted, str) and self._is_offered(noted, rungs):
            return noted
        if noted is not None:
            self._host.warn_once(
                f"no kernel that may be used here knows the arithmetic {noted} by which the "
                f"weight of {problem} was served: it has another now, and other bits"
            )
        chosen = None
        if not is_gradient(problem):
            tunes = self._host.forbids_tuning(problem, settings) is None
            chosen = self._measured(rungs, settings, tunes)
        if chosen is not None:
            if noted is None:
                notes.add(weight_digest, chosen)
            return chosen
        return least_regret([self._expected(rung, able) for rung, able in rungs])

    def _rungs(
        self, problem: Problem, settings: Settings
    ) -> Iterator[tuple[Problem, list[Kernel[Any]]]]:
        for rung in ladder(problem):
            if able := self._host.able(rung, settings):
                yield rung, able

    def _measured(
        self,
        rungs: Sequence[tuple[Problem, list[Kernel[Any]]]],
        settings: Settings,
        tune: bool,
        force: bool = False,
    ) -> str | None:
        """Return the arithmetic of least regret on record. If nothing may be measured, None unless
        all rungs are on record."""
        known = []
        for (rung, able), following in itertools.zip_longest(rungs, rungs[1:]):
            if tune and not force:
                # Rungs are measured in the order in which they compile: the next rung's candidates
                # compile while this one is timed.
                for each, _ in filter(None, ((rung, able), following)):
                    self._host.prepare(each, settings)
            record = self._host.on_record(rung, able, settings, tune, force)
            found = None if record is None else self._known(rung, able, record)
            if found is None and not tune:
                return None
            known += [] if found is None else [found]
        return least_regret(known)

    def _known(self, rung: Problem, able: list[Kernel[Any]], record: TuningRecord) -> Rung | None:
        times: dict[str, float] = {}
        inside: dict[int, Rung] = {}
        results = fastest_first(record, _ELIMINATED)
        if not results:
            return None
        for result in results:
            candidate = self._host.candidate(result, able, rung)
            name = None
            if candidate is not None:
                name = candidate.kernel.arithmetic(rung, candidate.config)
            if name is not None:
                times.setdefault(name, _us_of_last_round(result, results[0]))
            for m, us in result.inside_us.items():
                there = inside.get(m, Rung(math.inf, {}))
                own = {} if name is None else {name: min(us, there.times.get(name, math.inf))}
                inside[m] = Rung(min(us, there.best_us), {**there.times, **own})
        best_us = statistics.median(results[0].samples_us)
        return Rung(best_us, times, [*inside.values()]) if times else None

    def _expected(self, rung: Problem, able: list[Kernel[Any]]) -> Rung:
        offered = self._offered(rung, able)
        times = {name: min(members.values()) for name, members in offered.items()}
        return Rung(min(times.values(), default=_NO_ESTIMATE), times)

    def _is_offered(self, name: object, rungs: Sequence[tuple[Problem, list[Kernel[Any]]]]) -> bool:
        return any(name in self._offered(rung, able) for rung, able in rungs)

    def _offered(
        self, problem: Problem, able: list[Kernel[Any]]
    ) -> dict[str, dict[Candidate, float]]:
        """Return every arithmetic with its candidates and their estimated times."""
        offered: dict[str, dict[Candidate, float]] = {}
        for kernel in able:
            try:
                configs = [kernel.default_config(problem), *kernel.configs(problem)]
                for config in dict.fromkeys(configs):
                    if (name := kernel.arithmetic(problem, config)) is not None:
                        expected = kernel.estimate_us(problem, config) or _NO_ESTIMATE
                        offered.setdefault(name, {})[Candidate(kernel, config)] = expected
            except PluginError:  # it was set aside, with a warning
                continue
        return offered

    def _notes_of(self, problem: Problem) -> Notes:
        device = problem.device
        if device not in self._notes:
            state: dict[str, JSON] = {"gpu": device.gpu, "environment": device.environment}
            self._notes[device] = Notes("arithmetic", state, self._host.store.root)
        return self._notes[device]

    # -- one M of the weight ------------------------------------------------------------

    def _within(
        self, problem: Problem, able: list[Kernel[Any]], wanted: str, settings: Settings
    ) -> Choice | None:
        """Return the fastest candidate of that arithmetic on record, else by estimate."""
        own = replace(problem, capturing=False)
        edge = bucketed(own)
        key = (edge, _position(edge, own.extent), settings, wanted)
        choices = self._choices
        choice = choices.get(key)
        if choice is not None and self._may_serve(choice.candidate, problem, able, wanted):
            return choice
        choice = self._fastest(problem, able, wanted, settings)
        if choice is not None and not problem.capturing:
            choices[key] = choice
        return choice

    def _fastest(
        self, problem: Problem, able: list[Kernel[Any]], wanted: str, settings: Settings
    ) -> Choice | None:
        own = replace(problem, capturing=False)
        edge = bucketed(own)
        forbidden = self._host.forbids_tuning(problem, settings)
        for key in dict.fromkeys((own, edge)):
            at_key = self._host.able(key, settings)
            tune = forbidden is None and key == edge
            record = self._host.on_record(key, at_key, settings, tune)
            timed = [] if record is None else _around(record, problem.extent, key.extent)
            for result in timed:
                candidate = self._host.candidate(result, able, problem)
                if candidate is not None and self._may_serve(candidate, problem, able, wanted):
                    return self._host.chosen_by(candidate, key, arithmetic=wanted)
        if record is None:
            self._host.require_record(problem, edge, settings)
        offered = self._offered(problem, able).get(wanted)
        if not offered:
            return None
        if forbidden is not None and (problem.capturing or settings.on_cache_miss != "heuristic"):
            self._host.log_miss(edge)
        best = min(offered, key=lambda c: (offered[c], c.kernel.name, str(c.config)))
        why = forbidden or "no config of its arithmetic was timed"
        reason = f"{why}; estimated {offered[best]:.3g} µs, the least of its arithmetic"
        return Choice(best, "heuristic", reason, arithmetic=wanted)

    def _may_serve(
        self, candidate: Candidate, problem: Problem, able: list[Kernel[Any]], wanted: str
    ) -> bool:
        kernel = candidate.kernel
        return kernel in able and kernel.arithmetic(problem, candidate.config) == wanted


def _around(record: TuningRecord, extent: int, edge: int) -> list[CandidateResult]:
    """Return the timed results of a bucket's record: first the results timed at the measured M
    around this one, in the order of these times."""
    slower = behind(times_around(record.candidates, extent, edge))
    return sorted(
        fastest_first(record, _ELIMINATED), key=lambda r: slower.get(identity(r), math.inf)
    )


def _us_of_last_round(result: CandidateResult, fastest: CandidateResult) -> float:
    """Return the µs of a result, comparable with the last round of the fastest result. A result
    that was eliminated early is scaled by the fastest one's ratio of all rounds to these early
    rounds."""
    early = statistics.median(fastest.samples_us[: len(result.samples_us)])
    return statistics.median(result.samples_us) * statistics.median(fastest.samples_us) / early


def _position(edge: Problem, extent: int) -> tuple[int, bool]:
    """Return the position of this M among the measured M of the bucket, and whether it is one of
    them."""
    measured = (*inside(edge), edge.extent)
    return bisect.bisect_left(measured, extent), extent in measured


def weight(problem: Problem) -> dict[str, Any]:
    """Return what all M of one weight share: the problem without M and the properties that M may
    change. These are the layout and alignment of a, the output and the residual, and the kind of
    scales."""
    document = problem.to_json()
    for name in ("a", "out", "residual"):
        if document[name] is not None:
            document[name] = document[name]["dtype"]
    if problem.a.format:
        document["a"] += f" {problem.a.format}"
    document = {k: v for k, v in document.items() if k != "m"}
    document["b"] = {k: v for k, v in document["b"].items() if k != "scale"}
    return document | {"has_scales": bool(problem.parts), "is_gradient": is_gradient(problem)}


def is_gradient(problem: Problem) -> bool:
    """Whether ``a`` is column-major, as in a weight gradient. K is then the number of rows, which
    differs from batch to batch, and a ladder would be measured for each. Estimates decide there."""
    return problem.a.layout == "col"


def ladder(problem: Problem) -> list[Problem]:
    """Return the problems by which a weight's arithmetic is chosen, from small to large. They do
    not depend on which problem of the weight is met first."""
    sizes = [m for m in LADDER if max(problem.n, problem.k) * m * problem.batch <= LARGEST]
    return [_at(problem, m) for m in sizes or LADDER[:1]]


def _at(problem: Problem, m: int) -> Problem:
    """Return the weight's problem with M rows, of dense matrices."""

    def dense(operand: Operand, outer: int, inner: int, layout: Layout = "row") -> Operand:
        size = inner * operand.dtype.itemsize // operand.pack
        aligned = outer == 1 or size % ALIGNMENT == 0
        return replace(operand, layout=layout, aligned=aligned, wide=False)

    if is_gradient(problem):
        a = dense(problem.a, problem.k, m, "col")
    else:
        a = dense(problem.a, m, problem.k)
    return replace(
        problem,
        m=m,
        a=a,
        out=dense(problem.out, m, problem.n),
        residual=dense(problem.residual, m, problem.n) if problem.residual else None,
        capturing=False,
    )
