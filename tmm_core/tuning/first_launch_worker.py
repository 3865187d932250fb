"""The process behind :mod:`tmm_core.tuning.first_launch`, started by ``python -m``.

Jobs and answers are lines of JSON. It ends when its parent does.
"""

from __future__ import annotations

import json

import torch

from tmm_core.errors import error_text
from tmm_core.registry.registry import Registry
from tmm_core.spec.precision import precision
from tmm_core.tuning.compile_job import Job, recalled
from tmm_core.tuning.environment_faults import cause_of, place_of
from tmm_core.tuning.processes import end_with_parent, opened
from tmm_core.verify.verifier import Verifier


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
                self._verifier.verdict(launcher, extent="brief")
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
        except BaseException as error:
            # A GPU fault is sticky: it raises again in every later launch of the context.
            return {
                "error": error_text(error)[:2000],
                "cause": cause_of(error),
                "place": place_of(candidate.kernel, error),
                "ends": self._device.type == "cuda",
            }
        return {"error": None, "ends": False}


def main() -> None:
    device, channel = opened()
    end_with_parent()
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    worker = Worker(torch.device(device), Registry.from_environment())
    for line in channel.makefile("rb"):
        channel.sendall(json.dumps(worker.answer(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main()
