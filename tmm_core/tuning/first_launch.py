"""Makes first launches in a separate process: ``tmm tune --isolate``.

A process does not survive a launch that hangs, exits or crashes, and a GPU fault destroys the CUDA
context. So each candidate is first bound and launched in a worker, which is restarted if lost; the
candidates that pass are launched here.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import torch

from tmm_core.spec.kernel import Candidate
from tmm_core.spec.problem import Problem
from tmm_core.tuning.compile_pool import Compilers, HungError, NotCompiledError

#: Seconds that binding and launching one candidate may take.
LAUNCH_LIMIT = 60.0
#: Candidates of one kernel and problem that may hang before its others are skipped: their time is
#: not charged to the tuning budget.
MOST_HUNG = 2

_SKIPPED = f"not tried: {MOST_HUNG} other configs of it hung in their first launch"


class FirstLaunches(Compilers):
    """Launches candidates on a device in a worker process, which the first of them starts."""

    forks = False
    variables: ClassVar = {}
    without = "first launches are made in this process, since none can be started"
    late, died = "its first launch did not end within {}", "its first launch: the process {}"
    raised = "its first launch raised {}"

    def __init__(self, device: torch.device) -> None:
        super().__init__(1, LAUNCH_LIMIT)
        self._device = str(device)
        self._hung: Counter[tuple[str, Problem]] = Counter()

    def failure(
        self, problem: Problem, candidate: Candidate, memory: int
    ) -> NotCompiledError | None:
        """Bind and launch ``candidate`` for ``problem`` in the worker, whose tensors may take
        ``memory`` bytes. Returns the failure; None if there was none, or no worker can be
        started."""
        about = candidate.kernel.name, problem
        if self._hung[about] >= MOST_HUNG:
            return NotCompiledError(_SKIPPED)
        launch = self.submit(problem, candidate, device=self._device, memory=memory)
        try:
            launch.result()
        except NotCompiledError as failure:
            self._hung[about] += isinstance(failure, HungError)
            return failure
        finally:
            self.cancel_pending([launch])  # pending if this was interrupted
        return None
