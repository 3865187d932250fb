"""The stages of one tuning: candidates are compiled, verified, and timed in ever longer rounds.

docs/notes/tuning.md has the measurements behind the limits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from tmm_cache import CandidateResult

from tmm_core.errors import error_message, error_text, reraise, warn
from tmm_core.settings import Settings
from tmm_core.spec.bucket import between, inside
from tmm_core.spec.device import current_device
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import Steps
from tmm_core.tuning.candidate_launchers import CandidateLaunchers, CompileJob
from tmm_core.tuning.candidate_run import (
    CandidateRun,
    for_the_bucket,
    of_each_arithmetic,
    reserves,
    survivors,
)
from tmm_core.tuning.cold_operands import Copies, LaunchError, Runner
from tmm_core.tuning.findings import Findings
from tmm_core.tuning.ranking import CLOSE, MARGIN, decide
from tmm_core.tuning.ranking import finalists as finalists_of
from tmm_core.tuning.search import Search
from tmm_core.tuning.timing import CAPTURES, LONG_US, Samples, is_disturbed, normalised
from tmm_core.tuning.untried import Obstacle
from tmm_core.verify.environment_faults import BUDGET_ENDED, alike, cause_of
from tmm_core.verify.verifier import Extent, Verifier

#: Samples of each candidate, µs per sample, and the ratio to the best up to which a candidate
#: stays. They are for the screening of every batch, the second round and the last round.
SCREENING, SCREENING_US, SCREENING_KEEPS = 3, 400.0, 1.3
SECOND, SECOND_US, SECOND_KEEPS = 4, 1500.0, 1.06
FINAL = 9
#: Warm-up samples of the last round, until a GPU's clock is what its power allows.
SETTLE = 4
#: µs of a steady-state measurement.
STEADY_US = 0.3e6
#: A kernel is measured in steady state again if its first time was within this share of the longest
#: time with which it may still win. One kernel measured twice differs by up to 3 %.
UNCLEAR = 0.03
#: Of the kernels that beat BLAS in the last round, so many are measured in steady state at first.
#: If these are slower than BLAS there, more follow, up to the second number.
STEADY_FIRST, STEADY_MOST = 2, 4
#: A kernel that takes at most this share of BLAS's time in use is also faster in steady state.
CLEAR = 1 / 1.15
#: Maximum number of candidates that the last round compares with BLAS, and of those that are then
#: timed at other M.
FINALISTS, KEPT = 6, 4
#: Maximum number of races: another follows if a finalist turns out to be wrong.
RACES = 3
#: Samples at each other M of the bucket.
INSIDE = 5
#: Maximum number of candidates that are screened together. So many of the first batch are tried
#: even after the budget has ended, so that every kernel of an ordinary machine is tried. Others are
#: tried only within the budget.
TOGETHER = 24
#: Maximum number of kernels that race and are recorded as reserves. tmm itself has ten.
MOST_RESERVES = 16

#: Launches of the final verification of the winner, and µs that they may take. A fault that occurs
#: once in twenty launches is missed by 60 launches with a probability of 4.6 %.
MOST_REPEATS, LEAST_REPEATS, REPEATS_US = 60, 4, 20e3


class Tuning:
    """The tuning of one problem: take all steps of :meth:`run`, then :meth:`conclude` returns the
    results. :meth:`release` must be called in any case."""

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        timer: Any,
        launchers: CandidateLaunchers,
        findings: Findings,
    ) -> None:
        self.runs: list[CandidateRun] = []
        self._findings = findings
        self._problem = problem
        self._device = current_device(problem.device)
        self._timer, self._launchers = timer, launchers
        self._memory = settings.tune_memory
        #: Whether the fastest candidate is verified while others compile. In the background some
        #: of this would delay calls in vain.
        self._eager = settings.on_cache_miss != "background"
        #: A third of the memory for each of three sets of tensors: the operands timed here, those
        #: timed at another M, and those for verification.
        self._share = None if self._memory is None else self._memory // 3
        self._verifier = Verifier(problem, self._device, memory_limit=self._share)
        #: Why candidates could not be timed; and whether that was reported.
        self._untimed, self._is_reported = "", False

    @functools.cached_property
    def _copies(self) -> Copies:
        # Made once kernels are compiled. Until then another tuning may hold the memory.
        return Copies(self._problem, self._device, self._share)

    def release(self) -> None:
        """Cancel compilations, and free the tensors held for measuring."""
        self._timer.release()
        self._launchers.release()
        self._verifier.release()

    def run(self, search: Search) -> Steps[None]:
        """Try the candidates of ``search``, then race the best.

        Raises:
            RuntimeError: No candidate runs, or none could be timed.
        """
        yield from self._search(search)
        self._require_baseline()
        racing = [run for run in self.runs if run.runner is not None]
        for _ in range(RACES):
            finalists = yield from self._race(racing)
            self._report_untimed()
            spare = reserves(self._problem, racing)[:MOST_RESERVES]
            for run in [*finalists, *spare]:
                run.status = "ok"
            yield from self._measure_inside(finalists)
            while (winner := self._winner()) is not None:
                yield from self._verify_whole(winner)
            self._require_baseline()
            # A fast but wrong candidate kept others out of the race.
            racing = [run for run in racing if run.runner is not None]
            if all(run.status == "ok" for run in finalists):
                return

    def _is_late(self) -> bool:
        return self._launchers.deadline.passed

    def _require_baseline(self) -> None:
        """Refuse a record without BLAS if the environment may be to blame, or if nothing runs.
        Otherwise a kernel would win because BLAS had too little memory."""
        for run in self.runs:
            if run.is_baseline and run.cause is not None:
                raise RuntimeError(f"{BASELINE} does not run: {run.reason}") from run.raised
        if all(run.runner is None for run in self.runs):
            why = next((run.reason for run in self.runs if run.is_baseline), None)
            raise RuntimeError(f"no candidate runs; {BASELINE}: {why}")

    def _search(self, search: Search) -> Steps[None]:
        """Verify and screen compiled candidates; others are awaited only if they may still win."""
        trying: dict[Candidate, CandidateRun] = {}
        batch = search.first()
        following = search.speculative(len(batch), self._launchers.compilers.workers - len(batch))
        # A small budget may end while the first batch compiles.
        spared, times = set(batch[:TOGETHER]), dict[Candidate, float]()
        while batch or trying:
            trying |= {candidate: CandidateRun(candidate) for candidate in batch}
            compiling = self._launchers.submit(self._jobs(batch), self._jobs(following))
            if not self.runs:
                yield compiling  # before it takes memory
            self.runs += [trying[candidate] for candidate in batch]
            while self._eager and self._launchers.all_compile and (run := self._leader()):
                yield from self._verify_whole(run)
            outcomes = yield from self._launchers.some()
            runs = [trying.pop(candidate) for _, candidate in outcomes]
            for run, outcome in zip(runs, outcomes.values(), strict=True):
                if isinstance(outcome, BaseException):
                    run.fail(outcome)
                else:
                    run.launcher = outcome
            for start in range(0, len(runs), TOGETHER):
                yield from self._try(runs[start : start + TOGETHER], spared)
            times = {run.candidate: run.time for run in self.runs if run.samples}
            for _, candidate in self._launchers.drop(self._jobs(search.lost(trying, times))):
                self.runs.remove(trying.pop(candidate))
            batch = [] if self._is_late() else search.next_batch(times, trying)
            gone = {*batch, *search.lost(following, times)}
            following = [candidate for candidate in following if candidate not in gone]

    def _jobs(self, candidates: Iterable[Candidate]) -> list[CompileJob]:
        return [(self._problem, candidate) for candidate in candidates]

    def _try(self, runs: Sequence[CandidateRun], spared: Container[Candidate]) -> Steps[None]:
        """Verify and screen candidates; after the end of the budget, those that are ``spared``."""
        for run in runs:
            if run.launcher is None:
                continue
            if self._is_late() and run.candidate not in spared:
                run.fail(BUDGET_ENDED)
                continue
            self._weigh(run)
            yield from self._verify(run, self._verifier)
            if run.launcher is not None:
                run.runner = self._copies.runner(run.launcher)
            yield ()
        running = [run for run in runs if run.runner is not None]
        yield from self._measure(running, SCREENING, SCREENING_US)

    def _weigh(self, run: CandidateRun) -> None:
        """Fail a candidate that needs more scratch memory than allowed."""
        run.workspace = run.candidate.kernel.workspace_bytes(self._problem, run.candidate.config)
        run.fail_if_set_aside()
        if self._memory is not None and run.workspace > self._memory:
            run.fail(
                f"takes {run.workspace / 2**20:.0f} MiB of scratch memory, and tune_memory "
                f"(TMM_TUNE_MEMORY) is {self._memory / 2**20:.0f}"
            )

    def _leader(self) -> CandidateRun | None:
        """Return the fastest candidate so far, unless that needs no more verification."""
        running = [run for run in self.runs if run.runner is not None and run.samples]
        return _unverified(min(running, key=lambda run: run.time, default=None))

    def _winner(self) -> CandidateRun | None:
        """Return the winner by the times so far, unless that needs no more verification."""
        results = [run.result(self._problem) for run in self.runs]
        return _unverified(self.runs[decide(results)] if finalists_of(results) else None)

    def _verify_whole(self, run: CandidateRun) -> Steps[None]:
        """Verify a candidate in every way in which it is used."""
        run.verified = True
        yield from self._verify(run, self._verifier, "whole", _repeats(run.time))

    def _verify(
        self, run: CandidateRun, verifier: Verifier, extent: Extent = "brief", repeats: int = 1
    ) -> Steps[None]:
        """Verify a candidate to ``extent``; fail it if its launcher raises or is wrong."""
        if run.launcher is None:
            return
        try:
            verdict = yield from verifier.steps(
                run.launcher,
                repeats=repeats,
                deterministic=run.candidate.kernel.traits.deterministic,
                baseline=run.is_baseline,
                extent=extent,
            )
        except GeneratorExit:  # the tuning is closed
            raise
        except BaseException as error:  # a kernel may call sys.exit
            reraise(error)
            run.fail(error)
            return
        run.error = verdict.error
        if not verdict.ok and not (verdict.unknown and run.is_baseline):
            run.fail(str(verdict.reason), "failed" if verdict.unknown else "wrong")

    def _measure(
        self,
        racing: Sequence[CandidateRun],
        rounds: int,
        burst_us: float,
        settle: int | None = None,
    ) -> Steps[None]:
        """Sample the racing candidates; a failing launch costs only its candidate. The last round
        has warm-up samples (``settle``), captures large products several times, and is repeated
        if BLAS was disturbed."""

        def sample(racing: list[CandidateRun], runners: list[Runner]) -> Steps[Samples]:
            options = {"copies": len(runners[0].inputs), "burst_us": burst_us}
            measuring = functools.partial(self._timer.measure_steps, runners, **options)
            if settle:
                yield from measuring(rounds=settle)
            again = getattr(self._timer, "forget_captures", None)
            long = min(run.time for run in racing) >= LONG_US
            captures = CAPTURES if settle is not None and again is not None and long else 1
            samples = yield from measuring(rounds=rounds // captures)
            for _ in range(captures - 1):
                assert again is not None
                again()
                yield from measuring(rounds=1)
                more = yield from measuring(rounds=rounds // captures)
                samples = [[*first, *second] for first, second in zip(samples, more, strict=True)]
            # BLAS shows disturbances best: it is one kernel with a stable time.
            blas = next((i for i, run in enumerate(racing) if run.is_baseline), 0)
            if settle is not None and is_disturbed(samples[blas]):
                samples = yield from measuring(rounds=rounds)
            return normalised(samples)

        for run, samples in (yield from self._sampled(racing, sample)):
            run.samples = samples
        yield ()

    def _measure_in_steady_state(self, racing: Sequence[CandidateRun]) -> Steps[None]:
        """Time the candidates back to back, at most twice each; the mean then counts."""

        def sample(_: list[CandidateRun], runners: list[Runner]) -> Steps[Samples]:
            options = {"copies": len(runners[0].inputs), "steady_us": STEADY_US}
            samples: Samples = yield from self._timer.steady_steps(runners, 1, **options)
            return samples

        for run, (us,) in (yield from self._sampled(racing, sample)):
            run.steady_us = us if run.steady_us is None else (run.steady_us + us) / 2
        yield ()

    def _sampled(
        self,
        racing: Sequence[CandidateRun],
        sample: Callable[[list[CandidateRun], list[Runner]], Steps[Samples]],
    ) -> Steps[list[tuple[CandidateRun, list[float]]]]:
        """Return the candidates that run, with their samples; none, with a warning, if timing
        fails. A candidate whose launch fails is removed, and the others are timed again."""
        racing = [run for run in racing if run.runner is not None]
        runners = [run.runner for run in racing if run.runner is not None]
        try:
            samples = (yield from sample(racing, runners)) if runners else []
            return list(zip(racing, samples, strict=True))
        except LaunchError as raised:
            next(run for run in racing if run.runner is raised.run).fail(raised.error)
            return (yield from self._sampled(racing, sample))
        except Exception as error:
            reraise(error)
            self._untimed = f"timing {self._problem} failed: {error_message(error)}"
            if not self.runs or any(run.samples for run in self.runs):
                self._report_untimed()
            return []

    def _report_untimed(self) -> None:
        """Warn once that candidates could not be timed. If none was, the tuning ends with this as
        its only error."""
        if not self._untimed or self._is_reported:
            return
        if self.runs and not any(run.samples for run in self.runs):
            raise RuntimeError(self._untimed)
        self._is_reported = True
        warn(self._untimed)

    def _race(self, racing: list[CandidateRun]) -> Steps[list[CandidateRun]]:
        """Sample BLAS and the fastest candidates until a winner is clear; returns these."""
        # Reserves may answer in the winner's place, so they take part in the race.
        if self._problem.batch_invariant:
            spare = of_each_arithmetic(self._problem, racing, SCREENING_KEEPS)
        else:
            spare = for_the_bucket(self._problem, reserves(self._problem, racing))[:MOST_RESERVES]
        racing = survivors(self._problem, racing, SCREENING_KEEPS, 2 * FINALISTS)
        if len(racing) > FINALISTS + 1 and not self._is_late():
            yield from self._measure(racing, SECOND, SECOND_US)
        racing = survivors(self._problem, racing, SECOND_KEEPS, FINALISTS)
        racing = list(dict.fromkeys([*racing, *spare]))
        # Some of these are timed at other M afterwards. They compile during the race.
        elsewhere = map(self._problem.at, inside(self._problem))
        self._launchers.submit((), [(at, run.candidate) for at in elsewhere for run in racing])
        if not self._is_late():
            settle = SETTLE if self._device.type == "cuda" else 0
            yield from self._measure(racing, FINAL, 2 * SECOND_US, settle)
            yield from self._race_in_steady_state([r for r in racing if r.runner is not None])
        running = [run for run in racing if run.runner is not None]
        best = sorted((run for run in running if not run.is_baseline), key=lambda run: run.time)
        kept = {*best[:KEPT], *spare}
        return [run for run in running if run.is_baseline or run in kept]

    def _race_in_steady_state(self, running: Sequence[CandidateRun]) -> Steps[None]:
        """Time large products in steady state, too: BLAS and the first kernels that beat it; others
        if these are slower than BLAS. If the best is :data:`CLEAR`, only kernels that may be chosen
        in its place are timed. Batch-invariant mode skips this: BLAS is not used there, and the
        choice depends on other M as well."""
        baseline = [run for run in running if run.is_baseline]
        blas = min((run.time for run in baseline), default=math.inf)
        ahead = sorted((r for r in running if r.time <= blas * (1 - MARGIN)), key=lambda r: r.time)
        able = hasattr(self._timer, "steady_steps")  # a CPU's wall time needs none
        long = bool(ahead) and blas < math.inf and ahead[0].time >= LONG_US
        if not able or self._problem.batch_invariant or not long:
            return
        first, others = ahead[:STEADY_FIRST], ahead[STEADY_FIRST:STEADY_MOST]
        if ahead[0].time <= blas * CLEAR:
            first = [run for run in first if run.time <= ahead[0].time * (1 + CLOSE)]
            if len(first) > 1:
                yield from self._measure_in_steady_state(first)
            return

        def of_most(run: CandidateRun) -> float:
            """Return a kernel's time over the longest with which it may still win."""
            blas = min((r.steady_us or math.inf for r in baseline), default=math.inf)
            return (run.steady_us or math.inf) / (blas * (1 + CLOSE))

        yield from self._measure_in_steady_state([*baseline, *first])
        unclear = [run for run in first if abs(of_most(run) - 1) <= UNCLEAR]
        near = [run for run in first if run.time <= ahead[0].time * (1 + CLOSE)]
        # A clear kernel is faster in steady state than unclear ones, and wins.
        if unclear and all(of_most(run) >= 1 - UNCLEAR for run in near):
            # In reverse order, which cancels a drift.
            yield from self._measure_in_steady_state([*unclear[::-1], *baseline])
        if all(of_most(run) > 1 for run in first):
            yield from self._measure_in_steady_state(others)

    def _measure_inside(self, finalists: Sequence[CandidateRun]) -> Steps[None]:
        """Verify and time the finalists at other M of the record's bucket, and BLAS at more M."""
        # Few constants depend on M, so most launchers are already compiled.
        if not (extents := inside(self._problem)):
            return
        places = dict.fromkeys(extents, finalists)
        if not self._problem.batch_invariant and not all(run.is_baseline for run in finalists):
            baseline = [run for run in finalists if run.is_baseline]
            places |= dict.fromkeys(between(self._problem.extent), baseline)
        yield from self.measure_at(places)

    def measure_at(
        self, places: Mapping[int, Sequence[CandidateRun]], extent: Extent = "brief"
    ) -> Steps[None]:
        """Time candidates at other M of the record's bucket. They are verified to ``extent`` at
        each M at which a kernel is timed."""
        bound = yield from self._launchers.bound(
            [(self._problem.at(m), run.candidate) for m, runs in places.items() for run in runs]
        )
        self._verifier.release()  # tensors of one M are held at a time
        for m, runs in places.items():
            if self._is_late():
                return
            kernels = any(not run.is_baseline for run in runs)
            problem = self._problem.at(m)
            verifier = Verifier(problem, self._device, memory_limit=self._share)
            copies = Copies(problem, self._device, self._share)
            there: list[tuple[CandidateRun, CandidateRun]] = []
            for run in runs:
                guest, launcher = CandidateRun(run.candidate), bound[problem, run.candidate]
                if isinstance(launcher, BaseException):  # the edge's config may not fit
                    self._leave_inside(run, launcher, m)
                    continue
                guest.launcher = launcher
                if kernels:
                    yield from self._verify(guest, verifier, extent)
                where = f"at {problem.along.upper()}={m}: {guest.reason}"
                if guest.launcher is not None:
                    guest.runner = copies.runner(guest.launcher)
                    there.append((run, guest))
                elif guest.status == "wrong" and run.status == "ok":
                    run.fail(where, "wrong")
                elif guest.raised is not None:
                    self._leave_inside(run, guest.raised, m)
                    if guest.cause is None:
                        self._findings.blame(run.candidate.kernel, where, guest.raised)
            verifier.release()
            yield from self._measure([guest for _, guest in there], INSIDE, SECOND_US)
            for run, guest in there:
                if guest.samples:
                    run.inside_us[m] = median(guest.samples)

    def _leave_inside(self, run: CandidateRun, error: BaseException, m: int) -> None:
        """Note a kernel that could not be timed at another M because of the environment."""
        cause = cause_of(error)
        if cause is not None and cause != "budget" and not run.is_baseline:
            along = self._problem.along.upper()
            left = Obstacle(cause, f"at {along}={m}: {error_text(error)}")
            self._findings.leave(run.candidate.kernel, left)

    def conclude(self) -> list[CandidateResult]:
        """Return the verdicts for the record. Everything else is added to the findings."""
        for run in self.runs:
            run.fail_if_set_aside()
        others = [run for run in self.runs if not run.is_baseline]
        if alike(run.result(self._problem) for run in others):
            # Every kernel failed in the same way before its launch: suspect the machine.
            for run in others:
                if run.status == "failed" and run.cause is None:
                    run.cause = "alike"
        tried = [run for run in self.runs if run.cause is None]
        known = {run.candidate.kernel for run in tried}
        for run in self.runs:
            kernel, reason = run.candidate.kernel, run.reason or ""
            # A kernel with one config within the budget counts as tried.
            if run.cause is not None and not (run.cause == "budget" and kernel in known):
                self._findings.leave(kernel, Obstacle(run.cause, reason))
            if run.is_faulty:
                more = "; every kernel failed so" if run.cause == "alike" else ""
                self._findings.blame(kernel, reason + more, run.raised)
            run.raised = None  # its frames refer to this tuning, and to those who called
        return [run.result(self._problem) for run in tried]


def _unverified(run: CandidateRun | None) -> CandidateRun | None:
    """Return the candidate, if it is to be verified in every way of use; BLAS is not."""
    return None if run is None or run.is_baseline or run.verified else run


def _repeats(us: float) -> int:
    """Return the number of launches, of ``us`` each, that verify a winner."""
    return max(LEAST_REPEATS, min(MOST_REPEATS, int(REPEATS_US / us))) if us > 0 else MOST_REPEATS
