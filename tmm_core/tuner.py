"""Candidates in, a :class:`TuningRecord` out.

Compile in parallel, verify on a poisoned output, then time in stages: everything a little,
the promising more, finalists and BLAS afresh and alternating. A candidate that fails to
compile, is wrong, or hangs costs itself only, and the record says so.
"""

from __future__ import annotations

import concurrent.futures as futures
import datetime
import functools
import math
import os
import queue
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from tmm_cache import CandidateResult, TuningRecord

from tmm_core import verify
from tmm_core.asking import Asked, let_through
from tmm_core.compilers import COMPILE_LIMIT, Compilers, NotCompiledError, compiling_threads
from tmm_core.compilers import default as default_compilers
from tmm_core.errors import TmmWarning
from tmm_core.kernel import BASELINE, Candidate, Config, Kernel, Launcher
from tmm_core.precision import precision
from tmm_core.problem import Problem
from tmm_core.settings import Settings
from tmm_core.timing import CudaTimer, HostTimer, Timer, held_up, median

#: By how much a winner has to beat BLAS: medians of as many samples as the last stage takes
#: differ by up to 0.5 % on a quiet H200 where both are of the same kernel.
MARGIN = 0.01

#: Times this close to the best are a tie, broken by a stable rule so that restarts agree.
TIE = 0.005

#: (rounds, slower than the best by more than this factor: out). The last stage is the
#: fresh measure that decides; earlier samples only eliminate.
STAGES = ((3, 1.4), (8, 1.1), (25, 0.0))
#: Seconds that the last stage may take where its rounds are so short that more of them fit, and
#: their most: single samples of a kernel of 10 µs wander by 2 %.
FINAL_SECONDS, MOST_ROUNDS = 0.25, 100
FINALISTS = 6
RESERVE = 3.0

#: A config expected to take this many times BLAS's expected time is left out, unless it is among
#: its kernel's first: of 68 candidates a problem 23 are then not compiled, and none of 165 problems
#: on an H200 would have lost its winner (by 1.5 neither, by 1.4 two).
HOPELESS, FIRST = 1.6, 2


@dataclass
class _Trial:
    """One candidate on its way through a tuning."""

    candidate: Candidate
    status: Literal["ok", "slow", "wrong", "failed"] = "slow"
    launcher: Launcher | None = None
    samples: list[float] = field(default_factory=list)
    error: float | None = None
    reason: str | None = None

    @property
    def time(self) -> float:
        return median(self.samples) if self.samples else float("inf")

    @property
    def is_baseline(self) -> bool:
        return self.candidate.kernel.name == BASELINE

    def fail(self, error: BaseException | str) -> None:
        self.status = "failed"
        self.launcher = None
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.reason = text.strip()[:500]


class Tuner:
    """Measures candidates on the device a problem names.

    Args:
        timer: For tests; by default GPU events, or wall time on a CPU.
        workers: Threads that bind, and compile what was not compiled elsewhere (Triton releases
            the GIL in its passes and runs ptxas as a process); by default the number of cores,
            at most 16.
        compilers: What compiles elsewhere; by default the process's own.
    """

    def __init__(
        self,
        timer: Timer | None = None,
        workers: int | None = None,
        compilers: Compilers | None = None,
    ) -> None:
        self._timer = timer
        self._compilers = compilers or default_compilers()
        self._workers = workers or compiling_threads()

    def tune(
        self,
        problem: Problem,
        kernels: Sequence[Kernel[Any]],
        settings: Settings,
        before: TuningRecord | None = None,
    ) -> TuningRecord:
        """Time what ``before`` does not hold yet, with BLAS and its winner beside it.

        Returns ``before`` itself where it is complete. Kernels are told apart by their own
        version, so an upgraded plugin's candidates alone are measured again.

        Raises:
            ValueError: ``kernels`` has no baseline (nothing to compare with).
        """
        started = time.monotonic()
        old = {(c.kernel, c.version): c for c in before.candidates} if before else {}
        new = [k for k in kernels if (k.name, k.version) not in old]
        if before is not None and not new:
            return before
        if not any(kernel.name == BASELINE for kernel in kernels):
            raise ValueError(f"no {BASELINE!r} kernel to compare with")
        trials = list(_trials(problem, kernels, new, before))
        deadline = started + settings.tune_budget
        device = _device(problem)
        # What the record says of BLAS must be BLAS at the precision that was asked for.
        with precision(problem.tf32), _progress(problem, len(trials), settings) as advance:
            self._compile(trials, problem, device, deadline, advance)
            self._verify(trials, problem, device)
            self._time(trials, problem, device, deadline)
        results = _without_set_aside([_result(trial, problem) for trial in trials], kernels)
        measured = {(r.kernel, r.version) for r in results}
        present = {(k.name, k.version) for k in kernels}
        if before is not None:
            results += [
                c
                for c in before.candidates
                if (c.kernel, c.version) in present and (c.kernel, c.version) not in measured
            ]
        incumbent = before.candidates[before.winner] if before else None
        return TuningRecord(
            problem=problem.to_json(),
            winner=decide(results, incumbent),
            candidates=tuple(results),
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            tuning_seconds=round(time.monotonic() - started, 3),
        )

    def _compile(
        self,
        trials: list[_Trial],
        problem: Problem,
        device: torch.device,
        deadline: float,
        advance: Any,
    ) -> None:
        """Compile all in other processes, where that can be, and bind each in a thread as it is
        done. Threads, not a pool: one that hangs is left behind."""
        turns = _in_turns([trial for trial in trials if trial.status != "failed"])
        ready: queue.SimpleQueue[tuple[_Trial, futures.Future[None]] | None] = queue.SimpleQueue()
        done: dict[int, futures.Future[Launcher]] = {id(t): futures.Future() for t in turns}
        compiling = [self._compilers.submit(problem, trial.candidate) for trial in turns]

        def arrived(trial: _Trial, future: futures.Future[None]) -> None:
            ready.put((trial, future))

        for trial, future in zip(turns, compiling, strict=True):
            future.add_done_callback(functools.partial(arrived, trial))

        def work() -> None:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread starts on device 0
            while (compiled := ready.get()) is not None:
                trial, future = compiled
                promise = done[id(trial)]
                if future.cancelled() or (time.monotonic() > deadline and not trial.is_baseline):
                    promise.set_exception(TimeoutError("the tuning budget ended before it"))
                    continue
                try:
                    future.result()
                    kernel, config = trial.candidate.kernel, trial.candidate.config
                    promise.set_result(kernel.bind(problem, config))
                except BaseException as error:  # compilers raise SystemExit and worse
                    promise.set_exception(error)

        threads = min(self._workers, len(turns))
        for _ in range(threads):
            threading.Thread(target=work, daemon=True).start()
        try:
            futures.wait(compiling, timeout=max(0.0, deadline - time.monotonic()))
        finally:  # the budget ended, or the user ended it
            self._compilers.cancel_pending(compiling)
        for trial in turns:
            try:
                trial.launcher = done[id(trial)].result(timeout=COMPILE_LIMIT)
            except futures.TimeoutError as error:
                text = str(error) or f"did not compile within {COMPILE_LIMIT:.0f} s"
                trial.fail(text)
            except NotCompiledError as error:
                trial.fail(str(error))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                trial.fail(error)
            advance()
        for _ in range(threads):
            ready.put(None)

    def _verify(self, trials: list[_Trial], problem: Problem, device: torch.device) -> None:
        inputs = verify.make_inputs(problem, device, seed=_fresh_seed())
        expected = verify.reference(problem, inputs)
        limit = verify.tolerance(problem)
        for trial in trials:
            if trial.launcher is None:
                continue
            verify.poison(inputs.out)
            try:
                out = inputs.run(trial.launcher)
                trial.error = verify.error(out, expected)
            except BaseException as error:  # a kernel may call sys.exit
                let_through(error)
                trial.fail(error)
                continue
            # BLAS is what the others are held against; torch's own error is no verdict.
            if not trial.error <= limit and not trial.is_baseline:
                trial.status, trial.launcher = "wrong", None
                trial.reason = f"error {trial.error:.3g} exceeds {limit:.3g}"

    def _time(
        self, trials: list[_Trial], problem: Problem, device: torch.device, deadline: float
    ) -> None:
        timer = self._timer or (CudaTimer(device) if device.type == "cuda" else HostTimer())
        inputs = verify.make_inputs(problem, device, seed=_fresh_seed())
        # As called: without `out=`, into which torch's own operators would copy what they
        # compute, and BLAS with a bias or an epilogue lose to slower kernels.
        out = None if inputs.out.is_contiguous() else inputs.out
        racing = [t for t in trials if t.launcher is not None]
        if not racing:
            raise RuntimeError(f"no candidate runs; {BASELINE}: {_why_not(trials)}")
        each = FINAL_SECONDS  # seconds that one sample took
        for stage, (rounds, keep) in enumerate(STAGES):
            if stage == 0:
                _measured(timer, racing, inputs, out, 1)  # modules load, clocks rise
            elif time.monotonic() > deadline:
                break
            if not keep:
                affordable = FINAL_SECONDS / max(each * len(racing), 1e-9)
                rounds = max(rounds, min(MOST_ROUNDS, int(affordable)))
            before = time.monotonic()
            try:
                samples = _measured(timer, racing, inputs, out, rounds)
                if not keep and held_up(samples[_anchor(racing)]):
                    samples = _measured(timer, racing, inputs, out, rounds)
            except Exception as error:
                warnings.warn(f"timing {problem} failed: {error}", TmmWarning, stacklevel=2)
                break
            each = (time.monotonic() - before) / (rounds * len(racing))
            for trial, mine in zip(racing, samples, strict=True):
                trial.samples = mine
            if keep:
                racing = _survivors(racing, keep, FINALISTS if stage == len(STAGES) - 2 else None)
        for trial in racing:
            trial.status = "ok"
        release = getattr(timer, "release", None)
        if release is not None and self._timer is None:
            release()


def _anchor(racing: Sequence[_Trial]) -> int:
    """The place of BLAS, which is one kernel and should take as long every time."""
    return next((place for place, trial in enumerate(racing) if trial.is_baseline), 0)


def _why_not(trials: Sequence[_Trial]) -> str | None:
    return next((trial.reason for trial in trials if trial.is_baseline), None)


def _in_turns(trials: Sequence[_Trial]) -> list[_Trial]:
    """Each kernel's first config, then each one's second: where the budget ends before the
    configs do, no kernel has gone untried."""
    places: Counter[str] = Counter()
    placed = []
    for trial in trials:
        name = trial.candidate.kernel.name
        placed.append((places[name], trial))
        places[name] += 1
    return [trial for _, trial in sorted(placed, key=lambda each: each[0])]


def _survivors(racing: list[_Trial], keep: float, limit: int | None) -> list[_Trial]:
    """BLAS, the ``limit`` best within a factor ``keep`` of the best, and of each kernel its
    best config within :data:`RESERVE`: it is next in line where the winner is filtered out,
    quarantined or uninstalled."""
    ranked = sorted(racing, key=lambda t: t.time)
    best = ranked[0].time
    kept, seen = [], set()
    for place, trial in enumerate(ranked):
        name = trial.candidate.kernel.name
        close = trial.time <= best * keep and (limit is None or place < limit)
        reserve = name not in seen and trial.time <= best * RESERVE
        seen.add(name)
        if close or reserve or trial.is_baseline:
            kept.append(trial)
    return kept


def decide(results: Sequence[CandidateResult], incumbent: CandidateResult | None = None) -> int:
    """Index of the winner.

    BLAS, unless the best beats it by :data:`MARGIN`; among those within :data:`TIE` of the
    best: deterministic before not, then least workspace, then the incumbent, then by name.

    Raises:
        ValueError: Nothing was timed.
    """
    timed = [(i, r) for i, r in enumerate(results) if r.status == "ok" and r.samples_us]
    if not timed:
        raise ValueError("no candidate was timed")
    best = min(_us(r) for _, r in timed)
    baseline = [(i, r) for i, r in timed if r.kernel == BASELINE]
    if baseline:
        index, blas = min(baseline, key=lambda pair: _us(pair[1]))
        if best > _us(blas) * (1 - MARGIN):
            return index

    def rank(pair: tuple[int, CandidateResult]) -> tuple[Any, ...]:
        _, r = pair
        same = incumbent is not None and (r.kernel, r.config) == (
            incumbent.kernel,
            incumbent.config,
        )
        return (not r.deterministic, r.workspace_bytes, not same, r.kernel, str(r.config))

    return min((p for p in timed if _us(p[1]) <= best * (1 + TIE)), key=rank)[0]


def baseline_us(record: TuningRecord) -> float | None:
    """BLAS's median on record, in µs; None where it was not timed."""
    times = [c.median_us for c in record.candidates if c.kernel == BASELINE and c.status == "ok"]
    return min((t for t in times if t is not None), default=None)


def _us(result: CandidateResult) -> float:
    time_us = result.median_us
    return float("inf") if time_us is None else time_us


def _trials(
    problem: Problem,
    kernels: Sequence[Kernel[Any]],
    new: Sequence[Kernel[Any]],
    before: TuningRecord | None,
) -> Iterator[_Trial]:
    """New kernels' spaces, but for what is hopeless; of the others BLAS and the winner so far, as
    anchors."""
    winner = before.candidates[before.winner] if before else None
    longest = _longest_us(problem, kernels)
    for kernel in kernels:
        configs: list[Config] = []
        reason: Any = "its search space is empty for this problem"
        try:
            if kernel in new:
                configs = [kernel.default_config(problem), *kernel.configs(problem)]
                configs = _hopeful(problem, kernel, list(dict.fromkeys(configs)), longest)
            elif kernel.name == BASELINE:
                configs = [kernel.default_config(problem)]
            elif winner is not None and kernel.name == winner.kernel:
                configs = [kernel.config_type.from_json(winner.config)]
            else:
                continue
        except Exception as error:
            reason = error
        for config in configs:
            yield _Trial(Candidate(kernel, config))
        if not configs:
            empty = _Trial(Candidate(kernel, Config()))
            empty.fail(reason)
            yield empty


def _longest_us(problem: Problem, kernels: Sequence[Kernel[Any]]) -> float:
    """What a config may be expected to take and still be tried."""
    blas = next(kernel for kernel in kernels if kernel.name == BASELINE)
    return HOPELESS * (_expected_us(problem, blas, blas.default_config(problem)) or math.inf)


def _hopeful(
    problem: Problem, kernel: Kernel[Any], configs: list[Config], longest: float
) -> list[Config]:
    """Without those that the kernel itself expects to take longer; of what it has no idea stays."""
    return [
        config
        for place, config in enumerate(configs)
        if place < FIRST or (_expected_us(problem, kernel, config) or 0.0) <= longest
    ]


def _expected_us(problem: Problem, kernel: Kernel[Any], config: Config) -> float | None:
    try:
        return kernel.estimate_us(problem, config)
    except Exception:  # costs the guess, not the kernel
        return None


def _result(trial: _Trial, problem: Problem) -> CandidateResult:
    kernel, config = trial.candidate.kernel, trial.candidate.config
    scratch = kernel.workspace_bytes(problem, config) if trial.launcher is not None else 0
    return CandidateResult(
        kernel=kernel.name,
        version=kernel.version,
        config=config.to_json(),
        status=trial.status,
        samples_us=tuple(round(s, 3) for s in trial.samples),
        # A poisoned element leaves NaN, which JSON has not; the reason says it.
        error=trial.error if trial.error is not None and math.isfinite(trial.error) else None,
        tolerance=verify.tolerance(problem) if trial.error is not None else None,
        workspace_bytes=scratch,
        deterministic=kernel.traits.deterministic,
        batch_invariant=kernel.traits.batch_invariant,
        reason=trial.reason,
    )


def _without_set_aside(
    results: list[CandidateResult], kernels: Sequence[Kernel[Any]]
) -> list[CandidateResult]:
    """``results``, with those of kernels that answered nonsense meanwhile as failed."""
    faults = {k.name: k.fault for k in kernels if isinstance(k, Asked) and k.name != BASELINE}
    return [
        replace(result, status="failed", reason=fault[:500]) if fault is not None else result
        for result in results
        for fault in (faults.get(result.kernel),)
    ]


class _LaunchError(Exception):
    """A launch that raised while it was timed, and whose it was."""

    def __init__(self, trial: _Trial, error: BaseException) -> None:
        super().__init__(str(trial.candidate))
        self.trial, self.error = trial, error


@dataclass(frozen=True, slots=True)
class _Runner:
    """One launch of a candidate on the inputs all are timed on."""

    launcher: Launcher
    inputs: verify.Inputs
    out: torch.Tensor | None
    trial: _Trial

    def __call__(self) -> object:
        try:
            return self.inputs.launch(self.launcher, self.out)
        except BaseException as error:  # a kernel may call sys.exit
            let_through(error)
            raise _LaunchError(self.trial, error) from error


def _measured(
    timer: Timer,
    racing: list[_Trial],
    inputs: verify.Inputs,
    out: torch.Tensor | None,
    rounds: int,
) -> list[list[float]]:
    """Samples of each that races. One whose launch raises is out, and the others start over."""
    while True:
        runs = [_Runner(t.launcher, inputs, out, t) for t in racing if t.launcher is not None]
        try:
            return timer.measure(runs, rounds)
        except _LaunchError as failed:
            failed.trial.fail(failed.error)
            racing.remove(failed.trial)
            if not racing:
                raise


def _device(problem: Problem) -> torch.device:
    """The current device, of the problem's type: fingerprints have no index."""
    if problem.device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(problem.device.type)


def _fresh_seed() -> int:
    return int.from_bytes(os.urandom(4), "little")


@contextmanager
def _progress(problem: Problem, total: int, settings: Settings) -> Iterator[Any]:
    """A bar on stderr where a person is looking, nothing elsewhere."""
    shown = settings.progress
    if shown is None:
        shown = sys.stderr.isatty()
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("tuning {task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(str(problem), total=total)
        yield lambda: progress.advance(task)
