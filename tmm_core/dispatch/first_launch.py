"""First launches in a process of their own: ``tmm tune --isolate``.

A launch that hangs, exits or crashes cannot be survived by the process that makes it, and a fault
on the GPU takes its context along. So each candidate is bound and launched in a worker first,
which is started again where it was lost; what comes back is launched here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections import Counter
from typing import IO, Any

import torch

from tmm_core.dispatch.compilers import START_LIMIT
from tmm_core.dispatch.jobs import job_of
from tmm_core.dispatch.processes import ending, scratch_file, startable, started, tail
from tmm_core.errors import warn
from tmm_core.spec.kernel import Candidate
from tmm_core.spec.problem import Problem

#: Seconds that binding and launching one candidate may take.
LAUNCH_LIMIT = 60.0
#: Of one kernel and problem as many candidates may hang before the others are not tried.
MOST_HUNG = 2

_PROGRAM = ["-m", "tmm_core.dispatch.first_launch_worker"]


class FirstLaunches:
    """Launches candidates in a worker process, which is started when it is first needed.

    Args:
        device: To launch on, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._worker: _Worker | None = None
        self._hung: Counter[tuple[str, Problem]] = Counter()
        #: None can be had, which has been said.
        self._broken = False

    def fault(self, problem: Problem, candidate: Candidate, memory: int) -> str | None:
        """What went wrong when ``candidate`` was bound and launched for ``problem``, with and
        without ``out``; None where nothing did, and where no process can be had.

        Args:
            memory: Bytes that the worker's tensors may take.
        """
        about = candidate.kernel.name, problem
        if self._hung[about] >= MOST_HUNG:
            return f"not tried: {MOST_HUNG} other configs of it hung in their first launch"
        worker = self._running()
        if worker is None:
            return None
        try:
            answer = worker.ask({**job_of(problem, candidate), "memory": memory}, LAUNCH_LIMIT)
        except TimeoutError:
            self._hung[about] += 1
            self.close()
            return f"its first launch did not end within {LAUNCH_LIMIT:g} s"
        except OSError:  # it has ended
            said, status = worker.said(), self.close()
            return f"its first launch: the process {ending(status)}" + (f": {said}" if said else "")
        if answer["ends"]:
            self.close()
        error: str | None = answer["error"]
        return None if error is None else f"its first launch raised {error}"

    def close(self) -> int:
        """End the worker; its exit status, 0 where there is none."""
        worker, self._worker = self._worker, None
        return 0 if worker is None else worker.end()

    def _running(self) -> _Worker | None:
        if self._worker is None and not self._broken:
            try:
                if not startable():
                    raise OSError("this platform forks no process")
                self._worker = _Worker(self._device)
                self._worker.ask({}, START_LIMIT)
            except OSError as error:  # TimeoutError among them
                worker, self._worker, self._broken = self._worker, None, True
                said = ""
                if worker is not None:
                    said = f": {worker.said()}"
                    worker.end()
                warn(
                    "first launches are made in this process, for another cannot be had: "
                    f"{type(error).__name__}: {error}{said}"
                )
        return self._worker


class _Worker:
    """The process, and the channel to it. Raises OSError where there can be none."""

    def __init__(self, device: torch.device) -> None:
        self._scratch: IO[bytes] | None = scratch_file()
        self._channel, theirs = socket.socketpair()
        try:
            with theirs:
                self._child = started(_PROGRAM, str(device), theirs.fileno(), self._scratch)
        except BaseException:
            self._channel.close()
            if self._scratch is not None:
                self._scratch.close()
            raise

    def ask(self, job: dict[str, Any], limit: float) -> dict[str, Any]:
        """Its answer. Raises TimeoutError, and OSError where it has ended."""
        self._channel.settimeout(limit)
        self._channel.sendall(json.dumps(job).encode() + b"\n")
        received = b""
        while not received.endswith(b"\n"):
            part = self._channel.recv(1 << 16)
            if not part:
                raise OSError("it has ended")
            received += part
        answer: dict[str, Any] = json.loads(received)
        return answer

    def said(self) -> str:
        """The last of what it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(1.0)  # to the end of what it has to say
        return tail(self._scratch)

    def end(self) -> int:
        """End it and what it started; its exit status."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(0.2)
        with contextlib.suppress(OSError):
            os.killpg(self._child.pid, signal.SIGKILL)
        status = self._child.wait()
        if self._scratch is not None:
            self._scratch.close()
        return status
