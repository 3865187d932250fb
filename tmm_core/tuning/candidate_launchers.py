"""Compiles and binds the candidates of one tuning: in other processes first, then here."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

from tmm_core.errors import reraise
from tmm_core.spec.launcher import BASELINE
from tmm_core.tuning.bind import Binding, Outcome, Posed
from tmm_core.tuning.compile_pool import Compilers
from tmm_core.tuning.first_launch import FirstLaunches
from tmm_core.verify.data_sets import default_limit

T = TypeVar("T")

#: A part of a tuning, to be resumed until it returns. It yields the compilations that its next step
#: waits for; none if that can go on at once.
Steps = Generator[Sequence[Future[None]], None, T]

#: Seconds to wait for the compiling processes, which start once and in 3 to 6 s on an idle machine.
START_PATIENCE = 20.0


class CandidateLaunchers:
    """Makes the launchers of candidates.

    Args:
        first_launches: Launches candidates in another process first; None: no such launches.
        memory: Bytes that tensors of a first launch may take.
        deadline: A ``time.monotonic`` time after which only BLAS is bound. It is postponed by waits
            that are not charged to the tuning.
        ahead: What is already being compiled.
    """

    def __init__(
        self,
        compilers: Compilers,
        workers: int,
        first_launches: FirstLaunches | None,
        device: torch.device,
        memory: int | None,
        deadline: float,
        ahead: dict[Posed, Future[None]],
    ) -> None:
        self.compilers, self._workers, self._first = compilers, workers, first_launches
        self._device, self._memory = device, memory
        self.deadline = deadline
        self._ahead = ahead

    def submit(self, asked: Sequence[Posed], ahead: Sequence[Posed] = ()) -> list[Future[None]]:
        """Compile the candidates of ``asked``, and after them those of ``ahead``, which may follow.
        Compilations ahead that are in neither are cancelled. Returns the futures of ``asked``."""
        begun = self._ahead

        def future(each: Posed) -> Future[None]:
            return begun.pop(each) if each in begun else self.compilers.submit(*each)

        compiling = [future(each) for each in asked]
        self._ahead = {each: future(each) for each in ahead}
        self.compilers.cancel_pending(begun.values())
        return compiling

    def bound(
        self,
        asked: Sequence[Posed],
        ahead: Sequence[Posed] = (),
        advance: Callable[[], None] = lambda: None,
    ) -> Steps[list[Outcome]]:
        """Each candidate's launcher for its problem, or the reason why there is none.

        Args:
            ahead: Candidates to compile in advance.
            advance: Called for each candidate.
        """
        compiling = self.submit(asked, ahead)
        try:
            yield compiling
            # A small budget would end before any kernel compiled, and the record would say that
            # none could.
            self.deadline += self.compilers.await_start(compiling, START_PATIENCE)
            ready = self._launched_first(asked, compiling) if self._first else compiling
            found = Binding(asked, ready, self._device, self.deadline, self._workers).outcomes(
                late=lambda: self.compilers.cancel_pending(compiling), done=advance
            )
        finally:
            self.compilers.cancel_pending(compiling)  # interrupted, or others hung
        for outcome in found:
            if isinstance(outcome, BaseException):
                reraise(outcome)
        return found

    def _launched_first(
        self, asked: Sequence[Posed], compiling: Sequence[Future[None]]
    ) -> list[Future[None]]:
        """Futures that end when a candidate is compiled and its first launch elsewhere has
        ended."""
        assert self._first is not None
        wait(compiling, timeout=max(0.0, self.deadline - time.monotonic()))
        self.compilers.cancel_pending(list(compiling))
        launched: list[Future[None]] = []
        for (problem, candidate), future in zip(asked, compiling, strict=True):
            launched.append(future)
            late = time.monotonic() > self.deadline
            failed = future.cancelled() or future.exception() is not None
            if failed or late or candidate.kernel.name == BASELINE:
                continue
            memory = self._memory or default_limit(self._device)
            started = time.monotonic()
            if (failure := self._first.failure(problem, candidate, memory)) is not None:
                # Time lost by one candidate is not charged to the others.
                self.deadline += time.monotonic() - started
                launched[-1] = Future()
                launched[-1].set_exception(failure)
        return launched
