"""The tuning of one problem: its candidates are compiled, verified, and timed in ever longer
stages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tmm_cache import CandidateResult

from tmm_core.errors import error_text, reraise, warn
from tmm_core.settings import Settings
from tmm_core.spec.bucket import between, inside
from tmm_core.spec.device import current_device
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem
from tmm_core.tuning.bind import Binding, Outcome, Posed
from tmm_core.tuning.candidate_run import (
    Attempt,
    anchor,
    for_the_bucket,
    of_each_arithmetic,
    reserves,
    survivors,
)
from tmm_core.tuning.cold_operands import Copies, LaunchError, Runner
from tmm_core.tuning.compile_pool import Compilers, compiling_threads
from tmm_core.tuning.compile_pool import default as default_compilers
from tmm_core.tuning.environment_faults import BUDGET_ENDED, alike, cause_of
from tmm_core.tuning.findings import Findings
from tmm_core.tuning.first_launch import FirstLaunches
from tmm_core.tuning.progress import Progress
from tmm_core.tuning.ranking import CLOSE, MARGIN
from tmm_core.tuning.search import Proposals
from tmm_core.tuning.timing import LONG_US, Timer, held_up, levelled, timer_for
from tmm_core.tuning.untried import Left
from tmm_core.verify import compare
from tmm_core.verify.data_sets import default_limit
from tmm_core.verify.verifier import Extent, Verifier

#: Samples of each candidate, µs per sample, and how much slower than the best a candidate may be to
#: stay: for a first look at every batch, a closer look, and the deciding stage.
LOOK, LOOK_US, LOOK_KEEPS = 3, 400.0, 1.3
CLOSER, CLOSER_US, CLOSER_KEEPS = 4, 1500.0, 1.06
FINAL = 9
#: Rounds of the last stage that do not count, until a GPU's clock is what its power allows: 4096³
#: on an H100 takes 172 µs at first and 195 after that, 384×4096² in tiles of 128×96 22 µs and 25.
SETTLE = 4
#: µs of a turn without pause: in turns of half the length the times of two orders of tiles differed
#: by 10 %.
STEADY_US = 0.3e6
#: Second turns follow where a kernel's first was within this share of the longest time with which
#: it may still win: one kernel measured twice differs by up to 3 %.
UNCLEAR = 0.03
#: How many of those that beat BLAS in the last stage take such turns at first, and in all if BLAS
#: outlasts these. Four at first would have chosen another kernel for 12 of 44 products on record,
#: 0.4 % faster without pause and 0.1 % slower in use.
STEADY_FIRST, STEADIEST = 2, 4
#: A kernel that takes at most this share of BLAS's time in use is also faster without pause: all 55
#: measurements of such, on both GPUs, were at least 1.3 % ahead there.
CLEAR = 1 / 1.15
#: Maximum number of candidates that the last stage compares with BLAS.
FINALISTS = 6
#: Maximum number of races: another follows if a finalist turns out to be wrong.
RACES = 3
#: Seconds to wait for the compiling processes, which start once and in 3 to 6 s on an idle machine.
START_PATIENCE = 20.0
#: Samples at each other M of the bucket.
INSIDE = 5
#: Candidates that are verified and looked at together. The first of a tuning are whatever the time,
#: so that every kernel of an ordinary machine is tried; the others only within the budget.
TOGETHER = 24
#: Kernels that race, and that are verified as reserves, at most: the best. tmm itself has ten. And
#: how many of them after the budget's end.
MOST_RESERVES, LATE_RESERVES = 16, 4

#: Launches of the final verification of finalists, and µs that they may take: 60 miss a fault that
#: occurs once in twenty launches with a probability of 4.6 %.
MOST_REPEATS, LEAST_REPEATS, REPEATS_US = 60, 4, 20e3


@dataclass(eq=False)
class Equipment:
    """What candidates are compiled, launched and timed with."""

    #: For tests; by default chains in CUDA graphs, or wall time on a CPU.
    timer: Timer | None = None
    #: Threads that bind, and compile what was not compiled elsewhere; by default the number of
    #: cores, at most 16.
    workers: int = field(default_factory=compiling_threads)
    #: Compile in other processes; by default the process's own.
    compilers: Compilers = field(default_factory=default_compilers)
    #: Launches candidates in another process first; None: no such launches.
    first_launches: FirstLaunches | None = None
    #: What is being compiled for problems that are tuned next.
    prepared: dict[Problem, dict[Posed, Future[None]]] = field(default_factory=dict)


class Tuning:
    """The tuning of one problem."""

    def __init__(
        self,
        problem: Problem,
        settings: Settings,
        progress: Progress,
        equipment: Equipment,
        findings: Findings,
        deadline: float,
    ) -> None:
        self.trials: list[Attempt] = []
        self._findings = findings
        self._problem = problem
        self._device = current_device(problem.device)
        self._timer: Any = equipment.timer or timer_for(self._device)
        self._equipment, self._compilers = equipment, equipment.compilers
        #: Futures of what is compiled before it is asked for.
        self._ahead: dict[Posed, Future[None]] = equipment.prepared.pop(problem, {})
        self._deadline = deadline
        self._progress = progress
        self._memory = settings.tune_memory
        #: A third of the memory for each of the sets held at one time: the operands timed here and
        #: at another M, and the tensors for verification.
        self._share = None if self._memory is None else self._memory // 3
        self._copies = Copies(problem, self._device, self._share)
        self._verifier = Verifier(problem, self._device, memory_limit=self._share)

    def run(self, proposals: Proposals) -> None:
        """Try the proposals, then race the best.

        Raises:
            RuntimeError: No candidate runs.
        """
        self._progress.total(len(proposals))
        batch = proposals.first()
        while batch:
            idle = self._compilers.workers - len(batch)
            following = proposals.likely(len(self.trials) + len(batch), idle)
            self._try([Attempt(candidate) for candidate in batch], following)
            if time.monotonic() > self._deadline:
                break
            times = {t.candidate: t.time for t in self.trials if t.samples}
            batch = proposals.promising(times)
        self._require_baseline()
        racing = [t for t in self.trials if t.run is not None]
        for _ in range(RACES):
            finalists = self._race(racing)
            spare = reserves(self._problem, racing)[: self._most_reserves()]
            for trial in dict.fromkeys([*finalists, *spare]):
                trial.status = "ok"
                self._verify(trial, self._verifier, "whole", _repeats(trial.time))
            self._inside([trial for trial in finalists if trial.status == "ok"])
            self._require_baseline()
            # A fast but wrong candidate kept others out of the race.
            racing = [trial for trial in racing if trial.run is not None]
            if not racing or all(trial.status == "ok" for trial in finalists):
                return

    def _most_reserves(self) -> int:
        return MOST_RESERVES if time.monotonic() < self._deadline else LATE_RESERVES

    def _require_baseline(self) -> None:
        """Refuse a record without BLAS: kernels would win for want of the memory that it needs.

        Raises:
            RuntimeError: BLAS failed, and the environment may be to blame, or nothing else runs.
        """
        for trial in self.trials:
            if trial.is_baseline and trial.status == "untried":
                raise RuntimeError(f"{BASELINE} does not run: {trial.reason}") from trial.raised
        if all(trial.run is None for trial in self.trials):
            why = next((trial.reason for trial in self.trials if trial.is_baseline), None)
            raise RuntimeError(f"no candidate runs; {BASELINE}: {why}")

    def result(self, trial: Attempt) -> CandidateResult:
        """The result of a trial, for the record."""
        kernel, config = trial.candidate.kernel, trial.candidate.config
        return CandidateResult(
            kernel=kernel.name,
            version=kernel.version,
            config=config.to_json(),
            status="failed" if trial.status == "untried" else trial.status,
            samples_us=tuple(round(s, 3) for s in trial.samples),
            inside_us={m: round(us, 3) for m, us in trial.inside_us.items()},
            steady_us=None if trial.steady_us is None else round(trial.steady_us, 3),
            # A poisoned element leaves NaN, which JSON lacks; the reason tells of it.
            error=trial.error if trial.error is not None and math.isfinite(trial.error) else None,
            tolerance=compare.tolerance(self._problem) if trial.error is not None else None,
            workspace_bytes=trial.workspace,
            deterministic=kernel.traits.deterministic,
            batch_invariant=kernel.traits.batch_invariant,
            reason=trial.reason,
        )

    def release(self) -> None:
        """Free the tensors held for measuring, and compile no further."""
        self._submitted(())
        if self._equipment.timer is None:
            self._timer.release()
        self._verifier.release()

    def _try(self, trials: list[Attempt], following: Sequence[Candidate]) -> None:
        """Compile, verify and briefly time a batch. Candidates ``following`` are likely to be tried
        next, and are compiled in advance."""
        must = not self.trials  # a small budget may end as the first batch is compiled
        self.trials += trials
        self._compile(trials, following)
        for start in range(0, len(trials), TOGETHER):
            together = trials[start : start + TOGETHER]
            for trial in together:
                if trial.launcher is None:
                    continue
                if time.monotonic() > self._deadline and not (must and start == 0):
                    trial.fail(BUDGET_ENDED)
                    continue
                self._weigh(trial)
                self._verify(trial, self._verifier)
                if trial.launcher is not None:
                    trial.run = self._copies.runner(trial.launcher)
            self._measure([t for t in together if t.run is not None], LOOK, LOOK_US)

    def _weigh(self, trial: Attempt) -> None:
        """Fail a trial that takes more scratch memory than it may."""
        kernel, config = trial.candidate.kernel, trial.candidate.config
        trial.workspace = kernel.workspace_bytes(self._problem, config)
        trial.hold_to_answers()
        if self._memory is not None and trial.workspace > self._memory:
            trial.fail(
                f"takes {trial.workspace / 2**20:.0f} MiB of scratch memory, and tune_memory "
                f"(TMM_TUNE_MEMORY) is {self._memory / 2**20:.0f}"
            )

    def _compile(self, trials: list[Attempt], following: Sequence[Candidate]) -> None:
        """Compile all in other processes, if possible, and bind each here when it is compiled."""
        asked = [(self._problem, trial.candidate) for trial in trials]
        ahead = [(self._problem, candidate) for candidate in following]
        outcomes = self._bound(asked, ahead, self._progress)
        for trial, outcome in zip(trials, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                trial.fail(outcome)
                continue
            trial.launcher = outcome

    def _submitted(self, asked: Sequence[Posed], ahead: Sequence[Posed] = ()) -> list[Future[None]]:
        """Submit what is ``asked`` for, and behind it what may be asked for next, ``ahead``; cancel
        what was ahead before and is in neither. Returns the futures of what is asked for."""
        begun = self._ahead

        def future(each: Posed) -> Future[None]:
            return begun.pop(each) if each in begun else self._compilers.submit(*each)

        compiling = [future(each) for each in asked]
        self._ahead = {each: future(each) for each in ahead}
        self._compilers.cancel_pending(begun.values())
        return compiling

    def _bound(
        self,
        asked: Sequence[Posed],
        ahead: Sequence[Posed] = (),
        progress: Progress | None = None,
    ) -> list[Outcome]:
        """Each candidate's launcher for its problem, or the reason why there is none."""
        compiling = self._submitted(asked, ahead)
        # A small budget would end before any kernel compiled, and the record would say that none
        # could.
        self._deadline += self._compilers.await_start(compiling, START_PATIENCE)
        try:
            first = self._equipment.first_launches
            ready = self._launched_first(asked, compiling, first) if first else compiling
            found = Binding(
                asked, ready, self._device, self._deadline, self._equipment.workers
            ).outcomes(
                late=lambda: self._compilers.cancel_pending(compiling),
                done=progress.advance if progress else lambda: None,
            )
        finally:
            self._compilers.cancel_pending(compiling)  # interrupted, or others hung
        for outcome in found:
            if isinstance(outcome, BaseException):
                reraise(outcome)
        return found

    def _launched_first(
        self,
        asked: Sequence[Posed],
        compiling: Sequence[Future[None]],
        first: FirstLaunches,
    ) -> list[Future[None]]:
        """Futures that end when a candidate is compiled and its first launch elsewhere has
        ended."""
        wait(compiling, timeout=max(0.0, self._deadline - time.monotonic()))
        self._compilers.cancel_pending(list(compiling))
        launched: list[Future[None]] = []
        for (problem, candidate), future in zip(asked, compiling, strict=True):
            launched.append(future)
            late = time.monotonic() > self._deadline
            failed = future.cancelled() or future.exception() is not None
            if failed or late or candidate.kernel.name == BASELINE:
                continue
            memory = self._memory or default_limit(self._device)
            started = time.monotonic()
            if (failure := first.failure(problem, candidate, memory)) is not None:
                # Time lost by one candidate is not charged to the others.
                self._deadline += time.monotonic() - started
                launched[-1] = Future()
                launched[-1].set_exception(failure)
        return launched

    def _verify(
        self, trial: Attempt, verifier: Verifier, extent: Extent = "brief", repeats: int = 1
    ) -> None:
        """Fail a trial whose launcher raises or is wrong, as far as ``extent`` shows."""
        if trial.launcher is None:
            return
        try:
            verdict = verifier.verdict(
                trial.launcher,
                repeats=repeats,
                deterministic=trial.candidate.kernel.traits.deterministic,
                baseline=trial.is_baseline,
                extent=extent,
            )
        except BaseException as error:  # a kernel may call sys.exit
            reraise(error)
            trial.fail(error)
            return
        trial.error = verdict.error
        if not verdict.ok and not (verdict.unknown and trial.is_baseline):
            trial.fail(str(verdict.reason), "failed" if verdict.unknown else "wrong")

    def _measure(
        self, racing: Sequence[Attempt], rounds: int, burst_us: float, settle: int | None = None
    ) -> None:
        """Sample the racing candidates; a failing launch costs only its candidate.

        Args:
            settle: For the last stage: this many warm-up rounds do not count, and the stage is
                repeated if BLAS was disturbed during it.
        """

        def sample(racing: list[Attempt], runs: list[Runner]) -> list[list[float]]:
            options: dict[str, Any] = {"copies": len(runs[0].inputs), "burst_us": burst_us}
            if settle:
                self._timer.measure(runs, settle, **options)
            samples: list[list[float]] = self._timer.measure(runs, rounds, **options)
            if settle is not None and held_up(samples[anchor(racing)]):
                samples = self._timer.measure(runs, rounds, **options)
            return levelled(samples)

        for trial, mine in self._sampled(racing, sample):
            trial.samples = mine

    def _sampled(
        self,
        racing: Sequence[Attempt],
        sample: Callable[[list[Attempt], list[Runner]], list[list[float]]],
    ) -> list[tuple[Attempt, list[float]]]:
        """Those that run with their samples; none, with a warning, if timing fails. One whose
        launch fails drops out, and the others start over."""
        racing = [trial for trial in racing if trial.run is not None]
        runs = [trial.run for trial in racing if trial.run is not None]
        try:
            return list(zip(racing, sample(racing, runs), strict=True)) if runs else []
        except LaunchError as raised:
            next(trial for trial in racing if trial.run is raised.run).fail(raised.error)
            return self._sampled(racing, sample)
        except Exception as error:
            reraise(error)
            warn(f"timing {self._problem} failed: {error}")
            return []

    def _race(self, racing: list[Attempt]) -> list[Attempt]:
        """Sample BLAS and the fastest until a winner is clear; returns these."""
        # Others may answer in the winner's place, and so take part in the race.
        if self._problem.batch_invariant:
            spare = of_each_arithmetic(self._problem, racing, LOOK_KEEPS)
        else:
            spare = for_the_bucket(self._problem, reserves(self._problem, racing))
            spare = spare[: self._most_reserves()]
        racing = survivors(self._problem, racing, LOOK_KEEPS, 2 * FINALISTS)
        if len(racing) > FINALISTS + 1 and time.monotonic() < self._deadline:
            self._measure(racing, CLOSER, CLOSER_US)
        racing = survivors(self._problem, racing, CLOSER_KEEPS, FINALISTS)
        racing = list(dict.fromkeys([*racing, *spare]))
        # Compiled while these race: some of them are timed there afterwards.
        elsewhere = map(self._problem.at, inside(self._problem))
        self._submitted((), [(at, trial.candidate) for at in elsewhere for trial in racing])
        if time.monotonic() < self._deadline:
            settle = SETTLE if self._device.type == "cuda" else 0
            self._measure(racing, FINAL, 2 * CLOSER_US, settle)
            self._measure_steady(racing)
        return [trial for trial in racing if trial.run is not None]

    def _measure_steady(self, racing: Sequence[Attempt]) -> None:
        """Time large products without pause, too: BLAS and the first of those that beat it, others
        if it outlasts these; if the best is :data:`CLEAR`, only those that may be chosen in its
        place. Not in batch-invariant mode, where BLAS is not used and the choice depends on other M
        as well."""
        running = [trial for trial in racing if trial.run is not None]
        blas = min((trial.time for trial in running if trial.is_baseline), default=math.inf)
        ahead = sorted((t for t in running if t.time <= blas * (1 - MARGIN)), key=lambda t: t.time)
        able = hasattr(self._timer, "steady")  # a CPU's wall time needs none
        long = bool(ahead) and blas < math.inf and ahead[0].time >= LONG_US
        if not able or self._problem.batch_invariant or not long:
            return
        first, others = ahead[:STEADY_FIRST], ahead[STEADY_FIRST:STEADIEST]
        if ahead[0].time <= blas * CLEAR:
            first = [t for t in first if t.time <= ahead[0].time * (1 + CLOSE)]
            if len(first) > 1:
                self._take_turns(first)
            return
        baseline = [t for t in running if t.is_baseline]

        def of_most(trial: Attempt) -> float:
            """A kernel's time over the longest with which it may still win."""
            blas = min((t.steady_us or math.inf for t in baseline), default=math.inf)
            return (trial.steady_us or math.inf) / (blas * (1 + CLOSE))

        self._take_turns([*baseline, *first])
        if any(abs(of_most(t) - 1) <= UNCLEAR for t in first):
            self._take_turns([*baseline, *first][::-1])  # in the other order
        if all(of_most(t) > 1 for t in first):
            self._take_turns(others)

    def _take_turns(self, trials: Sequence[Attempt]) -> None:
        """Time the trials without pause, one after the other. The mean of a trial's turns counts,
        of which there are two at most."""

        def sample(_: list[Attempt], runs: list[Runner]) -> list[list[float]]:
            options = {"copies": len(runs[0].inputs), "steady_us": STEADY_US}
            samples: list[list[float]] = self._timer.steady(runs, 1, **options)
            return samples

        for trial, (us,) in self._sampled(trials, sample):
            trial.steady_us = us if trial.steady_us is None else (trial.steady_us + us) / 2

    def _inside(self, finalists: Sequence[Attempt]) -> None:
        """Verify and time the finalists at other M of the record's bucket, and BLAS at more of
        them."""
        # Few constants depend on M: most of these are already compiled.
        if not (extents := inside(self._problem)):
            return
        places = dict.fromkeys(extents, finalists)
        if not self._problem.batch_invariant and not all(t.is_baseline for t in finalists):
            baseline = [trial for trial in finalists if trial.is_baseline]
            places |= dict.fromkeys(between(self._problem.extent), baseline)
        asked = [(m, trial) for m, trials in places.items() for trial in trials]
        launchers = self._bound([(self._problem.at(m), t.candidate) for m, t in asked])
        bound = dict(zip(asked, launchers, strict=True))
        self._verifier.release()  # hold the tensors of one M at a time
        for m, trials in places.items():
            if time.monotonic() > self._deadline:
                return
            problem = self._problem.at(m)
            verifier = Verifier(problem, self._device, memory_limit=self._share)
            copies = Copies(problem, self._device, self._share)
            there: list[tuple[Attempt, Attempt]] = []
            for trial in trials:
                guest, launcher = Attempt(trial.candidate), bound[m, trial]
                if isinstance(launcher, BaseException):  # the edge's config may not fit
                    self._left_inside(trial, launcher, m)
                    continue
                guest.launcher = launcher
                if m in extents:
                    self._verify(guest, verifier, "repeated")
                if guest.launcher is not None:
                    guest.run = copies.runner(guest.launcher)
                    there.append((trial, guest))
                elif guest.status == "wrong" and trial.status == "ok":
                    trial.fail(f"at {problem.along.upper()}={m}: {guest.reason}", "wrong")
                elif guest.raised is not None:
                    self._left_inside(trial, guest.raised, m)
                    if guest.status == "failed":
                        where = f"at {problem.along.upper()}={m}: {guest.reason}"
                        self._findings.blame(trial.candidate.kernel, where, guest.raised)
            verifier.release()
            self._measure([guest for _, guest in there], INSIDE, CLOSER_US)
            for trial, guest in there:
                if guest.samples:
                    trial.inside_us[m] = median(guest.samples)

    def _left_inside(self, trial: Attempt, error: BaseException, m: int) -> None:
        """Note a kernel that the environment kept from being timed at another M."""
        cause = cause_of(error)
        if cause is not None and cause != "budget" and not trial.is_baseline:
            along = self._problem.along.upper()
            left = Left(cause, f"at {along}={m}: {error_text(error)}")
            self._findings.leave(trial.candidate.kernel, left)

    def conclude(self) -> list[CandidateResult]:
        """The results for the record: verdicts alone. Notes everything else in the findings."""
        for trial in self.trials:
            trial.hold_to_answers()
        self._suspect_the_machine()
        tried = [trial for trial in self.trials if trial.status != "untried"]
        known = {trial.candidate.kernel for trial in tried}
        for trial in self.trials:
            kernel, reason = trial.candidate.kernel, trial.reason or ""
            # One config within the budget is evidence enough of a kernel.
            if trial.cause is not None and not (trial.cause == "budget" and kernel in known):
                self._findings.leave(kernel, Left(trial.cause, reason))
            if trial.is_faulty:
                more = "; every kernel failed so" if trial.cause == "alike" else ""
                self._findings.blame(kernel, reason + more, trial.raised)
        return [self.result(trial) for trial in tried]

    def _suspect_the_machine(self) -> None:
        """Call all candidates untried if every kernel failed in the same way before its launch."""
        others = [trial for trial in self.trials if not trial.is_baseline]
        if alike(map(self.result, others)):
            for trial in others:
                if trial.status == "failed":
                    trial.status, trial.cause = "untried", "alike"


def _repeats(us: float) -> int:
    """The number of launches, of ``us`` each, to verify a finalist: :data:`MOST_REPEATS`, or as
    many as :data:`REPEATS_US` allows."""
    return max(LEAST_REPEATS, min(MOST_REPEATS, int(REPEATS_US / us))) if us > 0 else MOST_REPEATS
