"""The process behind :mod:`tmm_core.dispatch.first_launch`, started by ``python -m``.

Jobs and answers are lines of JSON. It ends when its parent does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys

import torch

from tmm_core.dispatch.jobs import Job, recalled
from tmm_core.dispatch.registry import Registry
from tmm_core.dispatch.verifier import Verifier
from tmm_core.spec.asking import told
from tmm_core.spec.precision import precision

_PR_SET_PDEATHSIG = 1


class Worker:
    """Binds and launches on one device."""

    def __init__(self, device: torch.device, registry: Registry) -> None:
        self._device, self._registry = device, registry
        #: The last problem's: its tensors serve all candidates.
        self._verifier: Verifier | None = None

    def answer(self, job: Job) -> Job:
        """The exception raised, and whether this process should end."""
        if not job:
            return {"error": None, "ends": False}
        try:
            problem, candidate = recalled(self._registry, job)
        except BaseException:  # differs here: left to the parent
            return {"error": None, "ends": False}
        if self._verifier is None or self._verifier.problem != problem:
            self._verifier = None
            self._verifier = Verifier(problem, self._device, memory_limit=job["memory"])
        try:
            with precision(problem.tf32):
                launcher = candidate.kernel.bind(problem, candidate.config)
                # Checks only that both kinds of launch end, not their results.
                self._verifier.verdict(launcher, brief=True)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
        except BaseException as error:
            # A GPU fault is sticky: it raises again in every later launch of the context.
            return {"error": told(error)[:2000], "ends": self._device.type == "cuda"}
        return {"error": None, "ends": False}


def main() -> None:
    device, folder = json.loads(sys.argv[1])
    channel = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(Exception):  # where there is no prctl, by the channel's end
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):  # removed since
        os.chdir(folder)
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    worker = Worker(torch.device(device), Registry.from_environment())
    for line in channel.makefile("rb"):
        channel.sendall(json.dumps(worker.answer(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main()
