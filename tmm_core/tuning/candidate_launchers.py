"""Compiles the candidates of one tuning in other processes, then binds them in this one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

import torch

from tmm_core.errors import reraise
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.steps import Steps
from tmm_core.tuning.bind import Binding, CompileJob, Deadline, Outcome
from tmm_core.tuning.compile_pool import Compilers
from tmm_core.tuning.first_launch import FirstLaunches
from tmm_core.verify.data_sets import default_limit


class CandidateLaunchers:
    """Makes the launchers of candidates.

    Args:
        first_launches: Launches candidates in another process first; None: no such launches.
        memory: Bytes that tensors of a first launch may take.
        deadline: The time after which only BLAS is bound.
        ahead: The jobs that are already being compiled.
    """

    def __init__(
        self,
        compilers: Compilers,
        workers: int,
        first_launches: FirstLaunches | None,
        device: torch.device,
        memory: int | None,
        deadline: Deadline,
        ahead: dict[CompileJob, Future[None]],
    ) -> None:
        self.compilers, self._first = compilers, first_launches
        self._device, self._memory = device, memory
        self.deadline = deadline
        self._ahead = ahead
        self._binding = Binding(device, deadline, workers, compilers.cancel_pending)
        #: The jobs that were launched in another process.
        self._launched: set[CompileJob] = set()

    def submit(
        self, jobs: Sequence[CompileJob], ahead: Sequence[CompileJob] = ()
    ) -> list[Future[None]]:
        """Compile ``jobs``, and after them the jobs of ``ahead``, which may follow. Earlier jobs
        ahead that are in neither are cancelled. Returns the pending futures of ``jobs``, or all if
        none is pending."""
        begun = self._ahead

        def future(each: CompileJob) -> Future[None]:
            return begun.pop(each) if each in begun else self.compilers.submit(*each)

        compiling = {each: future(each) for each in jobs}
        self._binding.waiting |= compiling
        self._ahead = {each: future(each) for each in ahead}
        self.compilers.cancel_pending(begun.values())
        return [f for f in compiling.values() if not f.done()] or [*compiling.values()]

    @property
    def all_compile(self) -> bool:
        """Whether :meth:`some` would wait for compilers."""
        waiting = self._binding.waiting.values()
        return bool(waiting) and not any(compiled.done() for compiled in waiting)

    def drop(self, jobs: Iterable[CompileJob]) -> list[CompileJob]:
        """Cancel the ``jobs`` that still compile, and return them."""
        waiting = self._binding.waiting
        dropped = {job: waiting[job] for job in jobs if job in waiting and not waiting[job].done()}
        for job in dropped:
            del waiting[job]
        self.compilers.cancel_pending(dropped.values())
        return [*dropped]

    def release(self) -> None:
        """Cancel all jobs."""
        self.compilers.cancel_pending(self._binding.waiting.values())
        self._binding.waiting.clear()
        self.submit(())

    def some(self) -> Steps[dict[CompileJob, Outcome]]:
        """The launchers of the submitted jobs that are compiled, or the reasons why there are none.
        Waits until there is one; empty if none is left."""
        if self._first:
            self._launch_first(self._first)
        found = yield from self._binding.some()
        for outcome in found.values():
            if isinstance(outcome, BaseException):
                reraise(outcome)
        return found

    def bound(self, jobs: Sequence[CompileJob]) -> Steps[dict[CompileJob, Outcome]]:
        """The launcher of each job, or the reason why there is none."""
        self.submit(jobs)
        found: dict[CompileJob, Outcome] = {}
        while some := (yield from self.some()):
            found |= some
        return found

    def _launch_first(self, first: FirstLaunches) -> None:
        """Once the jobs are compiled, launch their candidates in another process. A job that fails
        there gets a future with the failure."""
        waiting = self._binding.waiting
        wait(waiting.values(), timeout=max(0.0, self.deadline.at - time.monotonic()))
        self.compilers.cancel_pending([*waiting.values()])
        for job in [job for job in waiting if job not in self._launched]:
            self._launched.add(job)
            (problem, candidate), future = job, waiting[job]
            failed = future.cancelled() or future.exception() is not None
            if failed or self.deadline.passed or candidate.kernel.name == BASELINE:
                continue
            memory = self._memory or default_limit(self._device)
            started = time.monotonic()
            if (failure := first.failure(problem, candidate, memory)) is not None:
                # Time lost by one candidate is not charged to the others.
                self.deadline.at += time.monotonic() - started
                waiting[job] = Future()
                waiting[job].set_exception(failure)
