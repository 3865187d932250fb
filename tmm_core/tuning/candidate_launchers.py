"""Makes the launchers of one tuning's candidates: compiles in other processes, then binds here.

``bind`` compiles here if no other process has compiled the candidate, and cannot be interrupted. So
each candidate is bound in a separate thread. A candidate that takes too long keeps its thread while
others are bound in parallel. Several candidates that hang time out together.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field

import torch

from tmm_core.errors import reraise
from tmm_core.registry import watched_call
from tmm_core.registry.query import CheckedKernel
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.launcher import BASELINE, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.spec.steps import Steps
from tmm_core.spec.threads import start_thread
from tmm_core.tuning.compile_pool import Compilers
from tmm_core.tuning.first_launch import FirstLaunches
from tmm_core.verify.data_sets import default_limit
from tmm_core.verify.environment_faults import BUDGET_ENDED
from tmm_core.verify.forms import WrongError

#: Seconds one candidate may take to bind.
BIND_LIMIT = 60.0
#: Seconds after which a candidate no longer occupies a worker slot.
STALLED = 5.0
#: Maximum number of stalled threads; above it no further threads are started.
_MOST_STALLED = 16

#: The problem to compile for, and the candidate.
CompileJob = tuple[Problem, Candidate]
#: A launcher, or the exception that binding it raised.
Outcome = Launcher | BaseException


@dataclass
class Deadline:
    """The end of a tuning's budget. Waits that are not charged to the budget postpone it."""

    #: A ``time.monotonic`` time.
    at: float
    #: Seconds for which the caller did not resume the tuning.
    rested: float = 0.0

    @property
    def passed(self) -> bool:
        return time.monotonic() > self.at


@dataclass(eq=False)
class CandidateLaunchers:
    """Makes the launchers of candidates."""

    compilers: Compilers
    #: The number of threads that bind at one time.
    workers: int
    first_launches: FirstLaunches | None
    device: torch.device
    #: Bytes that tensors of a first launch may take.
    memory: int | None
    #: The time after which only BLAS is bound.
    deadline: Deadline
    #: The jobs that are being compiled for a later :meth:`submit`.
    ahead: dict[CompileJob, Future[None]]
    #: The jobs that were launched in another process.
    _launched: set[CompileJob] = field(default_factory=set)
    #: The submitted jobs, each with a future that is done when ``bind`` may be called.
    _waiting: dict[CompileJob, Future[None]] = field(default_factory=dict)
    #: The start of each job's thread, and its future outcome; without jobs that were given up.
    _binding: dict[CompileJob, tuple[float, Future[Outcome]]] = field(default_factory=dict)
    _outcomes: dict[CompileJob, Outcome] = field(default_factory=dict)

    # -- compiling -------------------------------------------------------------------------

    def submit(
        self, jobs: Sequence[CompileJob], ahead: Sequence[CompileJob] = ()
    ) -> list[Future[None]]:
        """Compile ``jobs``, and then the jobs of ``ahead``, which a later call may submit. Jobs of
        an earlier ``ahead`` that are in neither are cancelled. Returns the pending futures of
        ``jobs``, or all of their futures if none is pending."""
        begun = self.ahead

        def future(each: CompileJob) -> Future[None]:
            return begun.pop(each) if each in begun else self.compilers.submit(*each)

        compiling = {each: future(each) for each in jobs}
        self._waiting |= compiling
        self.ahead = {each: future(each) for each in ahead}
        self.compilers.cancel_pending(begun.values())
        return [f for f in compiling.values() if not f.done()] or [*compiling.values()]

    @property
    def all_compile(self) -> bool:
        """Whether :meth:`some` would wait for compilers."""
        return bool(self._waiting) and len(self._compiling()) == len(self._waiting)

    def drop(self, jobs: Iterable[CompileJob]) -> list[CompileJob]:
        """Cancel the ``jobs`` that still compile, and return them."""
        waiting = self._waiting
        dropped = {job: waiting[job] for job in jobs if job in waiting and not waiting[job].done()}
        for job in dropped:
            del waiting[job]
        self.compilers.cancel_pending(dropped.values())
        return [*dropped]

    def release(self) -> None:
        """Cancel all jobs."""
        self.compilers.cancel_pending(self._waiting.values())
        self._waiting.clear()
        self.submit(())

    def _compiling(self) -> list[Future[None]]:
        return [compiled for compiled in self._waiting.values() if not compiled.done()]

    def _launch_first(self, first: FirstLaunches) -> None:
        """Launch compiled candidates elsewhere; a failure becomes the future of its job."""
        waiting = self._waiting
        wait(waiting.values(), timeout=max(0.0, self.deadline.at - time.monotonic()))
        self.compilers.cancel_pending([*waiting.values()])
        for job in [job for job in waiting if job not in self._launched]:
            self._launched.add(job)
            (problem, candidate), future = job, waiting[job]
            failed = future.cancelled() or future.exception() is not None
            if failed or self.deadline.passed or candidate.kernel.name == BASELINE:
                continue
            memory = self.memory or default_limit(self.device)
            started = time.monotonic()
            if (failure := first.failure(problem, candidate, memory)) is not None:
                # Time lost by one candidate is not charged to the others.
                self.deadline.at += time.monotonic() - started
                waiting[job] = Future()
                waiting[job].set_exception(failure)

    # -- binding ---------------------------------------------------------------------------

    def bound(self, jobs: Sequence[CompileJob]) -> Steps[dict[CompileJob, Outcome]]:
        """Return the launcher of each job, or the exception that kept it from being bound."""
        self.submit(jobs)
        found: dict[CompileJob, Outcome] = {}
        while some := (yield from self.some()):
            found |= some
        return found

    def some(self) -> Steps[dict[CompileJob, Outcome]]:
        """Return the outcomes of the submitted jobs that were bound since the last call: of all
        compiled jobs, and of at least one. Only stalled jobs still have threads, so launches may be
        timed. The dict is empty if no job is left."""
        if self.first_launches:
            self._launch_first(self.first_launches)
        while self._waiting or self._binding or self._outcomes:
            if self.deadline.passed and (compiling := self._compiling()):
                self.compilers.cancel_pending(compiling)
            now = time.monotonic()
            self._collect(now)
            stalled = sum(now - begun >= STALLED for begun, _ in self._binding.values())
            self._start(self.workers + min(stalled, _MOST_STALLED))
            if self._outcomes and len(self._binding) == stalled:
                break
            yield [*self._compiling(), *(answer for _, answer in self._binding.values())]
        found, self._outcomes = self._outcomes, {}
        for outcome in found.values():
            if isinstance(outcome, BaseException):
                reraise(outcome)
        return found

    def _collect(self, now: float) -> None:
        """Take the outcomes of ended threads. Give up candidates that took too long."""
        for job, (begun, answer) in list(self._binding.items()):
            if answer.done():
                self._outcomes[job] = answer.result()
            elif now - begun >= BIND_LIMIT:
                self._outcomes[job] = TimeoutError(f"did not bind within {BIND_LIMIT:g} s")
            else:
                continue
            del self._binding[job]

    def _start(self, most: int) -> None:
        """Start up to ``most`` threads for compiled candidates; if none starts, bind one here."""
        for job, compiled in list(self._waiting.items()):
            late = self.deadline.passed and job[1].kernel.name != BASELINE
            if not compiled.done() or (len(self._binding) >= most and not late):
                continue
            if late:
                self._outcomes[job] = self._bound(job, compiled)  # only returns the reason
            else:
                answer: Future[Outcome] = Future()
                thread = threading.Thread(
                    target=self._work, args=(job, compiled, answer), name="tmm-bind", daemon=True
                )
                try:
                    start_thread(thread)
                    self._binding[job] = time.monotonic(), answer
                except RuntimeError as error:  # no thread can be started
                    reraise(error)
                    if self._binding or self._outcomes:
                        continue
                    self._outcomes[job] = self._bound(job, compiled)
            del self._waiting[job]

    def _work(self, job: CompileJob, compiled: Future[None], answer: Future[Outcome]) -> None:
        answer.set_result(self._bound(job, compiled))

    def _bound(self, job: CompileJob, compiled: Future[None]) -> Outcome:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a thread starts on device 0
            compiled.result()
            problem, candidate = job
            if self.deadline.passed and candidate.kernel.name != BASELINE:
                raise CancelledError
            return _launcher(problem, candidate, self.device)
        except CancelledError:
            return TimeoutError(BUDGET_ENDED)
        except BaseException as error:  # compilers raise SystemExit and worse
            return error


def _launcher(problem: Problem, candidate: Candidate, device: torch.device) -> Launcher:
    """Bind a candidate. A plugin's code is watched, as its launches are."""
    kernel = candidate.kernel
    bind = functools.partial(kernel.bind, problem, candidate.config)
    if not isinstance(kernel, CheckedKernel) or kernel.source.is_ours:
        return bind()
    launcher, changed = watched_call.watched(bind, device)
    if changed:
        raise WrongError(f"bind changed {' and '.join(changed)}")
    return launcher
