"""Tunes a problem: takes candidates and returns a :class:`TuningRecord`.

Each batch of candidates is compiled in parallel, verified and timed briefly; :class:`Proposals`
decides whether another batch is worth compiling. The best are then timed in turns with the clock
*in use* (:mod:`tmm_core.dispatch.timing`) until a winner is clear, and at other M of the record's
bucket. A candidate that fails to compile, is wrong or hangs costs only itself, and the record
states that.
"""

from __future__ import annotations

import concurrent.futures as futures
import datetime
import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from tmm_cache import CandidateResult, TuningRecord

from tmm_core.dispatch import random_inputs, rotation, verify
from tmm_core.dispatch.binding import Binding, Task
from tmm_core.dispatch.compilers import Compilers, NotCompiledError, compiling_threads
from tmm_core.dispatch.compilers import default as default_compilers
from tmm_core.dispatch.first_launch import FirstLaunches
from tmm_core.dispatch.fixture import memory_limit
from tmm_core.dispatch.progress import Progress
from tmm_core.dispatch.proposals import MARGIN, NO_HINTS, Hints, Proposals, decide, group
from tmm_core.dispatch.random_inputs import Inputs
from tmm_core.dispatch.timing import Timer, held_up, median, timer_for
from tmm_core.dispatch.unmeasured import unmeasured
from tmm_core.dispatch.verifier import Verifier
from tmm_core.errors import warn
from tmm_core.launch.beside import delivering
from tmm_core.settings import Settings
from tmm_core.spec.asking import Asked, let_through, told
from tmm_core.spec.bucket import bucket_edge, probes
from tmm_core.spec.kernel import BASELINE, Candidate, Config, Kernel, Launcher
from tmm_core.spec.precision import require_posed
from tmm_core.spec.problem import Problem

#: Samples of each candidate, µs per sample, and how much slower than the best a candidate may be to
#: stay: for a first look at every batch, a closer look, and the deciding stage.
LOOK, LOOK_US, LOOK_KEEPS = 3, 400.0, 1.3
CLOSER, CLOSER_US, CLOSER_KEEPS = 4, 1500.0, 1.06
FINAL = 9
#: µs from which on a product draws so much power that the GPU clock drops during timing, and the
#: rounds until it has: 4096³ on an H100 takes 172 µs at first and 195 after that.
LONG_US, SETTLE = 150.0, 4
#: Maximum number of candidates that the last stage compares with BLAS.
FINALISTS = 5
#: The best config of every other kernel stays on record as a reserve if it takes at most this many
#: times the best.
RESERVE = 3.0
#: Maximum number of races: another follows if a finalist turns out to be wrong.
RACES = 3
#: Samples at each other M of the bucket.
INSIDE = 5

#: Launches of the final verification of finalists, and µs that they may take: 60 miss a fault that
#: occurs once in twenty launches with a probability of 4.6 %.
MOST_REPEATS, LEAST_REPEATS, REPEATS_US = 60, 4, 20e3


@dataclass(eq=False)
class _Trial:
    """The state of one candidate during a tuning."""

    candidate: Candidate
    status: Literal["ok", "slow", "wrong", "failed"] = "slow"
    launcher: Launcher | None = None
    run: _Runner | None = None
    samples: list[float] = field(default_factory=list)
    inside_us: dict[int, float] = field(default_factory=dict)
    error: float | None = None
    reason: str | None = None
    #: Bytes of scratch memory.
    workspace: int = 0

    @property
    def time(self) -> float:
        return median(self.samples) if self.samples else math.inf

    @property
    def is_baseline(self) -> bool:
        return self.candidate.kernel.name == BASELINE

    def fail(
        self, error: BaseException | str, status: Literal["wrong", "failed"] = "failed"
    ) -> None:
        self.status = status
        self.launcher = self.run = None
        if isinstance(error, str | TimeoutError | NotCompiledError):
            text = str(error)
        else:
            text = told(error)
        self.reason = text.strip()[:500]


class Tuner:
    """Measures candidates on the device a problem names.

    Args:
        timer: For tests; by default chains in CUDA graphs, or wall time on a CPU.
        workers: Threads that bind, and compile what was not compiled elsewhere; by default the
            number of cores, at most 16.
        compilers: Compile in other processes; by default the process's own.
    """

    def __init__(
        self,
        timer: Timer | None = None,
        workers: int | None = None,
        compilers: Compilers | None = None,
    ) -> None:
        self.timer = timer
        #: Launches candidates in another process first; None: no such launches.
        self.first_launches: FirstLaunches | None = None
        self.compilers = compilers or default_compilers()
        self.workers = workers or compiling_threads()

    def tune(
        self,
        problem: Problem,
        kernels: Sequence[Kernel[Any]],
        settings: Settings,
        before: TuningRecord | None = None,
        hints: Hints = NO_HINTS,
    ) -> TuningRecord:
        """Time the kernels missing in ``before``, together with BLAS and its winner.

        Returns ``before`` itself if it is complete. Kernels have their own versions, so only an
        upgraded plugin's candidates are measured again.

        Args:
            hints: Winners of near problems, or of this one elsewhere, which are tried first.

        Raises:
            ValueError: ``kernels`` has no baseline (nothing to compare with).
            UnsupportedProblemError: The set fp32 precision is not the problem's.
            RuntimeError: Not even BLAS runs.
        """
        started = time.monotonic()
        new = unmeasured(problem, kernels, before)
        if before is not None and not new:
            return before
        # Torch refuses some ragged products; then there is no baseline.
        if problem.groups is None and not any(kernel.name == BASELINE for kernel in kernels):
            raise ValueError(f"no {BASELINE!r} kernel to compare with")
        proposals = Proposals(problem, kernels, new, before, hints)
        # The record's BLAS must run at the problem's precision.
        require_posed(problem)
        with Progress(str(problem), settings.progress) as progress:
            tuning = _Tuning(problem, self, settings, progress)
            try:
                tuning.run(proposals)
            finally:
                tuning.release()
        results = [tuning.result(trial) for trial in tuning.trials]
        untried = proposals.untried(trial.candidate for trial in tuning.trials)
        results += [_untried(kernel, config, why) for kernel, config, why in untried]
        results = _without_set_aside(results, kernels)
        measured = {(r.kernel, r.version) for r in results}
        present = {(k.name, k.version) for k in kernels}
        if before is not None:
            results += [
                c
                for c in before.candidates
                if (c.kernel, c.version) in present and (c.kernel, c.version) not in measured
            ]
        return TuningRecord(
            problem=problem.to_json(),
            winner=decide(results, before.best if before else None),
            candidates=tuple(results),
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            tuning_seconds=round(time.monotonic() - started, 3),
        )

    def prepare(
        self, problem: Problem, kernels: Sequence[Kernel[Any]], hints: Hints = NO_HINTS
    ) -> None:
        """Start compiling the first candidates of :meth:`tune`, without waiting."""
        if any(kernel.name == BASELINE for kernel in kernels):
            for candidate in Proposals(problem, kernels, kernels, None, hints).first():
                self.compilers.submit(problem, candidate)


class _Tuning:
    """The tuning of one problem."""

    def __init__(
        self,
        problem: Problem,
        tuner: Tuner,
        settings: Settings,
        progress: Progress,
    ) -> None:
        self.trials: list[_Trial] = []
        self._problem = problem
        self._device = _device(problem)
        self._own_timer = tuner.timer is None
        self._timer: Any = tuner.timer or timer_for(self._device)
        self._workers, self._compilers = tuner.workers, tuner.compilers
        self._first = tuner.first_launches
        self._deadline = time.monotonic() + settings.tune_budget
        self._progress = progress
        self._memory = settings.tune_memory
        #: A third of the memory for each of the sets held at one time: the operands timed here and
        #: at another M, and the tensors for verification.
        self._share = None if self._memory is None else self._memory // 3
        self._chain = _Chain(problem, self._device, self._share)
        self._verifier = Verifier(problem, self._device, memory_limit=self._share)

    def run(self, proposals: Proposals) -> None:
        """Try the proposals, then race the best.

        Raises:
            RuntimeError: No candidate runs.
        """
        self._progress.total(len(proposals))
        batch = proposals.first()
        while batch:
            self._try([_Trial(candidate) for candidate in batch])
            if time.monotonic() > self._deadline:
                break
            times = {t.candidate: t.time for t in self.trials if t.samples}
            batch = proposals.promising(times)
        racing = [t for t in self.trials if t.run is not None]
        if not racing:
            why = next((t.reason for t in self.trials if t.is_baseline), None)
            raise RuntimeError(f"no candidate runs; {BASELINE}: {why}")
        for _ in range(RACES):
            finalists = self._race(racing)
            reserves = _reserves(self._problem, racing)
            for trial in dict.fromkeys([*finalists, *reserves]):
                trial.status = "ok"
                self._verify(trial, self._verifier, _repeats(trial.time))
            self._inside([trial for trial in finalists if trial.status == "ok"])
            # A fast but wrong candidate kept others out of the race.
            racing = [trial for trial in racing if trial.run is not None]
            if not racing or all(trial.status == "ok" for trial in finalists):
                return

    def result(self, trial: _Trial) -> CandidateResult:
        """The result of a trial, for the record."""
        kernel, config = trial.candidate.kernel, trial.candidate.config
        return CandidateResult(
            kernel=kernel.name,
            version=kernel.version,
            config=config.to_json(),
            status=trial.status,
            samples_us=tuple(round(s, 3) for s in trial.samples),
            inside_us={m: round(us, 3) for m, us in trial.inside_us.items()},
            # A poisoned element leaves NaN, which JSON lacks; the reason tells of it.
            error=trial.error if trial.error is not None and math.isfinite(trial.error) else None,
            tolerance=verify.tolerance(self._problem) if trial.error is not None else None,
            workspace_bytes=trial.workspace,
            deterministic=kernel.traits.deterministic,
            batch_invariant=kernel.traits.batch_invariant,
            reason=trial.reason,
        )

    def release(self) -> None:
        """Free the tensors held for measuring."""
        if self._own_timer:
            self._timer.release()
        self._verifier.release()

    def _try(self, trials: list[_Trial]) -> None:
        """Compile, verify and briefly time a batch."""
        self.trials += trials
        self._compile(trials)
        for trial in trials:
            self._verify(trial, self._verifier)
            if trial.launcher is not None:
                trial.run = self._chain.runner(trial.launcher)
        self._measure([t for t in trials if t.run is not None], LOOK, LOOK_US)

    def _compile(self, trials: list[_Trial]) -> None:
        """Compile all in other processes, if possible, and bind each here when it is compiled."""
        outcomes = self._bound([(self._problem, t.candidate) for t in trials], self._progress)
        for trial, outcome in zip(trials, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                trial.fail(outcome)
                continue
            trial.launcher = outcome
            trial.workspace = _workspace(trial, self._problem)
            if self._memory is not None and trial.workspace > self._memory:
                trial.fail(
                    f"takes {trial.workspace / 2**20:.0f} MiB of scratch memory, and tune_memory "
                    f"(TMM_TUNE_MEMORY) is {self._memory / 2**20:.0f}"
                )

    def _bound(
        self, asked: Sequence[tuple[Problem, Candidate]], progress: Progress | None = None
    ) -> list[Launcher | BaseException]:
        """Each candidate's launcher for its problem, or the reason why there is none."""
        compiling = [self._compilers.submit(*each) for each in asked]

        def bind(problem: Problem, candidate: Candidate) -> Launcher:
            kernel = candidate.kernel
            if time.monotonic() > self._deadline and kernel.name != BASELINE:
                raise futures.CancelledError
            return kernel.bind(problem, candidate.config)

        try:
            ready = compiling if self._first is None else self._launched_first(asked, compiling)
            tasks = [
                Task(candidate.kernel.name, each, functools.partial(bind, problem, candidate))
                for (problem, candidate), each in zip(asked, ready, strict=True)
            ]
            found = Binding(tasks, self._device, self._workers).outcomes(
                self._deadline,
                late=lambda: self._compilers.cancel_pending(compiling),
                done=progress.advance if progress else lambda: None,
            )
        finally:
            self._compilers.cancel_pending(compiling)  # interrupted, or others hung
        for outcome in found:
            if isinstance(outcome, BaseException):
                let_through(outcome)
        late = TimeoutError("the tuning budget ended before it")
        return [late if isinstance(each, futures.CancelledError) else each for each in found]

    def _launched_first(
        self,
        asked: Sequence[tuple[Problem, Candidate]],
        compiling: Sequence[futures.Future[None]],
    ) -> list[futures.Future[None]]:
        """Futures that end when a candidate is compiled and its first launch elsewhere has
        ended."""
        assert self._first is not None
        futures.wait(compiling, timeout=max(0.0, self._deadline - time.monotonic()))
        self._compilers.cancel_pending(list(compiling))
        launched: list[futures.Future[None]] = []
        for (problem, candidate), future in zip(asked, compiling, strict=True):
            launched.append(future)
            late = time.monotonic() > self._deadline
            failed = future.cancelled() or future.exception() is not None
            if failed or late or candidate.kernel.name == BASELINE:
                continue
            memory = self._memory or memory_limit(self._device)
            started = time.monotonic()
            if (fault := self._first.fault(problem, candidate, memory)) is not None:
                # Time lost by one candidate is not charged to the others.
                self._deadline += time.monotonic() - started
                launched[-1] = futures.Future()
                launched[-1].set_exception(NotCompiledError(fault))
        return launched

    def _verify(self, trial: _Trial, verifier: Verifier, repeats: int = 0) -> None:
        """Fail a trial whose launcher raises or is wrong: by two launches, or, with ``repeats``, in
        every way it is used."""
        if trial.launcher is None:
            return
        try:
            verdict = verifier.verdict(
                trial.launcher,
                repeats=repeats,
                deterministic=trial.candidate.kernel.traits.deterministic,
                baseline=trial.is_baseline,
                brief=not repeats,
            )
        except BaseException as error:  # a kernel may call sys.exit
            let_through(error)
            trial.fail(error)
            return
        trial.error = verdict.error
        if not verdict.ok and not (verdict.unknown and trial.is_baseline):
            trial.fail(str(verdict.reason), "failed" if verdict.unknown else "wrong")

    def _measure(
        self, racing: Sequence[_Trial], rounds: int, burst_us: float, settle: int | None = None
    ) -> None:
        """Sample the racing candidates; a failing launch costs only its candidate.

        Args:
            settle: For the last stage: this many warm-up rounds do not count, and the stage is
                repeated if BLAS was disturbed during it.
        """
        racing = [trial for trial in racing if trial.run is not None]
        runs = [trial.run for trial in racing]
        if not runs:
            return
        options: dict[str, Any] = {
            "copies": self._chain.copies,
            "burst_us": burst_us,
        }
        try:
            if settle:
                self._timer.measure(runs, settle, **options)
            samples = self._timer.measure(runs, rounds, **options)
            if settle is not None and held_up(samples[_anchor(racing)]):
                samples = self._timer.measure(runs, rounds, **options)
        except _LaunchError as raised:  # it drops out, and the others start over
            next(trial for trial in racing if trial.run is raised.run).fail(raised.error)
            self._measure(racing, rounds, burst_us, settle)
            return
        except Exception as error:
            warn(f"timing {self._problem} failed: {error}")
            return
        for trial, mine in zip(racing, samples, strict=True):
            trial.samples = mine

    def _race(self, racing: list[_Trial]) -> list[_Trial]:
        """Sample BLAS and the fastest until a winner is clear; returns these."""
        # Reserves may answer in the winner's place, and so take part in the race.
        spare = _ahead(self._problem, _reserves(self._problem, racing))
        racing = _survivors(racing, LOOK_KEEPS, 2 * FINALISTS)
        if len(racing) > FINALISTS + 1 and time.monotonic() < self._deadline:
            self._measure(racing, CLOSER, CLOSER_US)
        racing = list(dict.fromkeys([*_survivors(racing, CLOSER_KEEPS, FINALISTS), *spare]))
        if time.monotonic() < self._deadline:
            long = min(t.time for t in racing) >= LONG_US
            self._measure(racing, FINAL, 2 * CLOSER_US, settle=SETTLE if long else 0)
        return [trial for trial in racing if trial.run is not None]

    def _inside(self, finalists: Sequence[_Trial]) -> None:
        """Verify and time the finalists at other M of the record's bucket."""
        if self._problem.extent != bucket_edge(self._problem.extent):
            return
        # Few constants depend on M: most of these are already compiled.
        extents = probes(self._problem.extent)
        asked = [(m, trial) for m in extents for trial in finalists]
        launchers = self._bound([(self._problem.at(m), t.candidate) for m, t in asked])
        bound = dict(zip(asked, launchers, strict=True))
        self._verifier.release()  # hold the tensors of one M at a time
        for m in extents:
            if time.monotonic() > self._deadline:
                return
            verifier = self._verifier.inside(m)
            problem = verifier.problem
            chain = _Chain(problem, self._device, self._share)
            there = []
            for trial in finalists:
                guest, launcher = _Trial(trial.candidate), bound[m, trial]
                if isinstance(launcher, BaseException):  # the edge's config may not fit
                    continue
                guest.launcher = launcher
                self._verify(guest, verifier, repeats=1)
                if guest.launcher is not None:
                    there.append((trial, chain.runner(guest.launcher)))
                elif guest.status == "wrong" and trial.status == "ok":
                    trial.fail(f"at {problem.along.upper()}={m}: {guest.reason}", "wrong")
            verifier.release()
            runs = [run for _, run in there]
            if not runs:
                continue
            try:
                samples = self._timer.measure(runs, INSIDE, copies=chain.copies, burst_us=CLOSER_US)
            except Exception as error:
                warn(f"timing {problem} failed: {error}")
                continue
            for (trial, _), mine in zip(there, samples, strict=True):
                trial.inside_us[m] = median(mine)


class _Chain:
    """Copies of a problem's operands, one for each call of its chain.

    Args:
        most: Bytes that they may take; by default the limit of :mod:`rotation`, or one copy.

    Raises:
        MemoryError: One copy takes more.
    """

    def __init__(self, problem: Problem, device: torch.device, most: int | None) -> None:
        if most is not None and (needed := problem.bytes) > most:
            raise MemoryError(
                f"operands and result take {needed / 2**20:.0f} MiB, and tune_memory "
                f"(TMM_TUNE_MEMORY) leaves {most / 2**20:.0f} for what is timed"
            )
        limit = rotation.memory_limit(device)
        self.copies = rotation.copies(problem, limit if most is None else min(limit, most))
        inputs = random_inputs.make(problem, device)
        self._inputs = rotation.rotated(inputs, problem, self.copies)
        # As in calls, without `out=`: torch's operators would copy their result into it, and BLAS
        # with a bias or an epilogue would lose to slower kernels.
        self._out = None if problem.lies_as_made(inputs.out) else inputs.out
        self._problem, self._shape = problem, inputs.out.shape

    def runner(self, launcher: Launcher) -> _Runner:
        launcher = delivering(self._problem.epilogue, launcher, self._shape)
        return _Runner(launcher, self._inputs, self._out)


@dataclass(frozen=True, slots=True, eq=False)
class _Runner:
    """Calls a candidate on the i-th copy of the operands."""

    launcher: Launcher
    inputs: Sequence[Inputs]
    out: torch.Tensor | None

    def __call__(self, copy: int) -> object:
        try:
            return self.inputs[copy].launch(self.launcher, self.out)
        except BaseException as error:  # a kernel may call sys.exit
            let_through(error)
            raise _LaunchError(self, error) from error


def _anchor(racing: Sequence[_Trial]) -> int:
    """The index of BLAS, which is one kernel with a stable time."""
    return next((place for place, trial in enumerate(racing) if trial.is_baseline), 0)


def _survivors(racing: list[_Trial], keep: float, limit: int) -> list[_Trial]:
    """BLAS and the best ``limit`` candidates within a factor ``keep`` of the best."""
    ranked = sorted(racing, key=lambda t: t.time)
    best = ranked[0].time
    return [
        trial
        for place, trial in enumerate(ranked)
        if trial.is_baseline or (trial.time <= best * keep and place < limit)
    ]


def _reserves(problem: Problem, racing: Sequence[_Trial]) -> list[_Trial]:
    """Each kernel's best config within :data:`RESERVE`, and its best config that relies on no
    promise of the caller. A reserve answers if the winner is filtered out, quarantined or
    uninstalled. In batch-invariant mode, the best of each arithmetic, however slow: other M may
    prefer it, and it is then used here too."""
    ranked = sorted((t for t in racing if t.run is not None and t.samples), key=lambda t: t.time)
    best: dict[tuple[object, bool], _Trial] = {}
    for trial in ranked:
        candidate = trial.candidate
        best.setdefault((group(problem, candidate), bool(candidate.config.assumes)), trial)
    most = math.inf if problem.batch_invariant else RESERVE
    return [trial for trial in best.values() if trial.time <= ranked[0].time * most]


def _ahead(problem: Problem, reserves: Sequence[_Trial]) -> list[_Trial]:
    """The reserves that beat BLAS at the edge: they may answer inside the bucket if the winner is
    not deterministic or not capture-safe. Batch-invariant mode needs no times inside."""
    if problem.batch_invariant:
        return []
    blas = min((t.time for t in reserves if t.is_baseline), default=math.inf)
    return [trial for trial in reserves if trial.time <= blas * (1 - MARGIN)]


def _repeats(us: float) -> int:
    """The number of launches, of ``us`` each, to verify a finalist: :data:`MOST_REPEATS`, or as
    many as :data:`REPEATS_US` allows."""
    return max(LEAST_REPEATS, min(MOST_REPEATS, int(REPEATS_US / us))) if us > 0 else MOST_REPEATS


def _untried(kernel: Kernel[Any], config: Config, why: BaseException | str) -> CandidateResult:
    """The entry of a kernel without a config worth trying; it keeps the record complete."""
    trial = _Trial(Candidate(kernel, config))
    trial.fail(why)
    return CandidateResult(
        kernel=kernel.name,
        version=kernel.version,
        config=config.to_json(),
        status="failed",
        reason=trial.reason,
    )


def _workspace(trial: _Trial, problem: Problem) -> int:
    """The scratch memory of a trial, which fails if its kernel's answer is invalid."""
    kernel = trial.candidate.kernel
    count = kernel.workspace_bytes(problem, trial.candidate.config)
    if isinstance(kernel, Asked) and kernel.fault is not None and not trial.is_baseline:
        trial.fail(kernel.fault)
    return count


def _without_set_aside(
    results: list[CandidateResult], kernels: Sequence[Kernel[Any]]
) -> list[CandidateResult]:
    """``results``, with those of kernels set aside in the meantime marked as failed."""
    faults = {k.name: k.fault for k in kernels if isinstance(k, Asked) and k.name != BASELINE}
    return [
        replace(result, status="failed", reason=fault[:500]) if fault is not None else result
        for result in results
        for fault in (faults.get(result.kernel),)
    ]


class _LaunchError(Exception):
    """A launch that raised during timing, with its runner."""

    def __init__(self, run: _Runner, error: BaseException) -> None:
        super().__init__(str(error))
        self.run, self.error = run, error


def _device(problem: Problem) -> torch.device:
    """The current device of the problem's type: fingerprints have no index."""
    if problem.device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(problem.device.type)
