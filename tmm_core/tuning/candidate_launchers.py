"""Compiles the candidates of one tuning in other processes, then binds them in this one."""

from __future__ import annotations

import time
from collections.abc import Sequence
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
        self.compilers, self._workers, self._first = compilers, workers, first_launches
        self._device, self._memory = device, memory
        self.deadline = deadline
        self._ahead = ahead

    def submit(
        self, jobs: Sequence[CompileJob], ahead: Sequence[CompileJob] = ()
    ) -> list[Future[None]]:
        """Compile ``jobs``, and after them the jobs of ``ahead``, which may follow. Earlier jobs
        ahead that are in neither are cancelled. Returns the futures of ``jobs``."""
        begun = self._ahead

        def future(each: CompileJob) -> Future[None]:
            return begun.pop(each) if each in begun else self.compilers.submit(*each)

        compiling = [future(each) for each in jobs]
        self._ahead = {each: future(each) for each in ahead}
        self.compilers.cancel_pending(begun.values())
        return compiling

    def bound(
        self, jobs: Sequence[CompileJob], ahead: Sequence[CompileJob] = ()
    ) -> Steps[list[Outcome]]:
        """Each candidate's launcher for its problem, or the reason why there is none.

        Args:
            ahead: Jobs to compile in advance.
        """
        compiling = self.submit(jobs, ahead)
        try:
            yield compiling
            ready = self._launched_first(jobs, compiling) if self._first else compiling
            binding = Binding(jobs, ready, self._device, self.deadline, self._workers)
            found = yield from binding.outcomes(lambda: self.compilers.cancel_pending(compiling))
        finally:
            self.compilers.cancel_pending(compiling)  # interrupted, or others hung
        for outcome in found:
            if isinstance(outcome, BaseException):
                reraise(outcome)
        return found

    def _launched_first(
        self, jobs: Sequence[CompileJob], compiling: Sequence[Future[None]]
    ) -> list[Future[None]]:
        """For each job, a future that is done once the candidate is compiled and its first launch
        in another process has ended."""
        assert self._first is not None
        wait(compiling, timeout=max(0.0, self.deadline.at - time.monotonic()))
        self.compilers.cancel_pending(list(compiling))
        launched: list[Future[None]] = []
        for (problem, candidate), future in zip(jobs, compiling, strict=True):
            launched.append(future)
            late = self.deadline.passed
            failed = future.cancelled() or future.exception() is not None
            if failed or late or candidate.kernel.name == BASELINE:
                continue
            memory = self._memory or default_limit(self._device)
            started = time.monotonic()
            if (failure := self._first.failure(problem, candidate, memory)) is not None:
                # Time lost by one candidate is not charged to the others.
                self.deadline.at += time.monotonic() - started
                launched[-1] = Future()
                launched[-1].set_exception(failure)
        return launched
