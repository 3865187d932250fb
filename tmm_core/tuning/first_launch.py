"""Makes first launches in a separate process: ``tmm tune --isolate``.

A process does not survive a launch that hangs, exits or crashes, and a GPU fault destroys the CUDA
context. So each candidate is first bound and launched in a worker, which is restarted if lost; the
candidates that pass are launched here.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from typing import Any

import torch
from tmm_cache.errors import suppress

from tmm_core.errors import reraise, warn
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.problem import Problem
from tmm_core.tuning.compile_job import job_of
from tmm_core.tuning.compile_pool import START_LIMIT, NotCompiledError
from tmm_core.tuning.processes import Child, empty, ending, startable, tail

#: Seconds that binding and launching one candidate may take.
LAUNCH_LIMIT = 60.0
#: Candidates of one kernel and problem that may hang before its others are skipped.
MOST_HUNG = 2

_PROGRAM = ["-m", "tmm_core.tuning.first_launch_worker"]


class FirstLaunches:
    """Launches candidates in a worker process, started on first use.

    Args:
        device: The device to launch on, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._worker: _Worker | None = None
        self._hung: Counter[tuple[str, Problem]] = Counter()
        #: Whether no worker can be started, which was reported.
        self._broken = False

    def fault(self, problem: Problem, candidate: Candidate, memory: int) -> str | None:
        """The text of :meth:`failure`, if any."""
        failure = self.failure(problem, candidate, memory)
        return None if failure is None else str(failure)

    def failure(
        self, problem: Problem, candidate: Candidate, memory: int
    ) -> NotCompiledError | None:
        """What went wrong in binding and launching ``candidate`` for ``problem``, with and without
        ``out``; None if nothing did, or if there is no worker.

        Args:
            memory: Bytes that the worker's tensors may take.
        """
        about = candidate.kernel.name, problem
        if self._hung[about] >= MOST_HUNG:
            why = f"not tried: {MOST_HUNG} other configs of it hung in their first launch"
            return NotCompiledError(why)
        worker = self._running()
        if worker is None:
            return None
        try:
            answer = worker.ask({**job_of(problem, candidate), "memory": memory}, LAUNCH_LIMIT)
        except OSError as error:
            late = issubclass(type(error), TimeoutError)
            said, status = "" if late else worker.said(), self.close()
            reraise(error)
            if late:
                self._hung[about] += 1
                return NotCompiledError(f"its first launch did not end within {LAUNCH_LIMIT:g} s")
            return NotCompiledError(f"its first launch: the process {ending(status, said)}")
        except BaseException:  # the worker's answer would be taken for another candidate's
            self.close()
            raise
        if answer["ends"]:
            self.close()
        if answer["error"] is None:
            return None
        why = f"its first launch raised {answer['error']}"
        return NotCompiledError(why, answer.get("cause"), answer.get("place", ""))

    def close(self) -> int:
        """End the worker; returns its exit status, 0 if there is none."""
        worker, self._worker = self._worker, None
        return 0 if worker is None else worker.end()

    def _running(self) -> _Worker | None:
        if self._worker is None and not self._broken:
            try:
                if not startable():
                    raise OSError("this platform cannot fork")
                self._worker = _Worker(_PROGRAM, str(self._device))
                self._worker.ask({}, START_LIMIT)
            except OSError as error:  # including TimeoutError
                worker, self._worker = self._worker, None
                said = ""
                if worker is not None:
                    said = f": {worker.said()}"
                    worker.end()
                reraise(error)
                self._broken = True
                warn(
                    "first launches are made in this process, since none can be started: "
                    f"{type(error).__name__}: {error}{said}"
                )
            except BaseException:
                self.close()
                raise
        return self._worker


class _Worker(Child):
    """The process and the channel to it."""

    def ask(self, job: dict[str, Any], limit: float) -> dict[str, Any]:
        """Its answer. Raises TimeoutError, or OSError if it has ended."""
        empty(self.scratch)
        self.channel.settimeout(limit)
        self.channel.sendall(json.dumps(job).encode() + b"\n")
        received = self.channel.makefile("rb").readline()
        if not received.endswith(b"\n"):
            raise OSError("it has ended")
        answer: dict[str, Any] = json.loads(received)
        return answer

    def said(self) -> str:
        """The end of its output."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)  # for the rest of its output
        return tail(self.scratch)
