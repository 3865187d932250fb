"""The copies of a problem's operands that candidates are timed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tmm_core.dispatch import random_inputs, rotation
from tmm_core.dispatch.ragged import Inputs
from tmm_core.errors import let_through
from tmm_core.launch.beside import delivering
from tmm_core.spec.launcher import Launcher
from tmm_core.spec.problem import Problem


class Copies:
    """Copies of a problem's operands, which calls take in turn.

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
        limit = limit if most is None else min(limit, most)
        inputs = random_inputs.make(problem, device)
        self._inputs = rotation.rotated(inputs, problem, limit=limit)
        # As in calls, without `out=`: torch's operators would copy their result into it, and BLAS
        # with a bias or an epilogue would lose to slower kernels.
        self._problem, self._out = problem, None
        if not problem.allocates:
            self._out = random_inputs.empty(problem.out, problem.out_shape, device)

    def runner(self, launcher: Launcher) -> Runner:
        launcher = delivering(self._problem.epilogue, launcher, self._problem.out_shape)
        return Runner(launcher, self._inputs, self._out)


@dataclass(frozen=True, slots=True, eq=False)
class Runner:
    """Calls a candidate on the i-th copy of the operands."""

    launcher: Launcher
    inputs: Sequence[Inputs]
    out: torch.Tensor | None

    def __call__(self, copy: int) -> object:
        try:
            return self.inputs[copy].launch(self.launcher, self.out)
        except BaseException as error:  # a kernel may call sys.exit
            let_through(error)
            raise LaunchError(self, error) from error


class LaunchError(Exception):
    """A launch that raised during timing, with its runner."""

    def __init__(self, run: Runner, error: BaseException) -> None:
        super().__init__(str(error))
        self.run, self.error = run, error
