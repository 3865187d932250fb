"""Copies of operands through which a chain of calls rotates, like a model's layers.

A layer's weight was last read a whole step ago, and comes from memory. Its activation was written
by the previous layer, and is in the L2 if it fits. So ``b`` rotates. ``a`` rotates too if it does
not fit in the L2 or is no activation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tmm_core.errors import error_message, reraise
from tmm_core.launch.output_memory import allocating_outputs
from tmm_core.spec.device import free_memory
from tmm_core.spec.launcher import Launcher
from tmm_core.spec.operand import ALIGNMENT
from tmm_core.spec.problem import Problem
from tmm_core.verify import random_inputs
from tmm_core.verify.ragged_inputs import SIZE_SAMPLES, Inputs

T = TypeVar("T")

#: Minimum total size of the copies, in bytes and in multiples of the L2. A copy has then left the
#: L2 when it is read again.
CHAIN_BYTES, L2_TIMES = 240e6, 3
#: Maximum number of calls in a chain. A problem whose copies still fit in three times the L2 is
#: *resident*.
MOST_COPIES = 128
#: Maximum bytes of copies and outputs, if that much is free.
MEMORY_LIMIT = 8 * 2**30


def rotating(problem: Problem) -> tuple[str, ...]:
    """The operands that change from call to call. Both change in a batched product, in a weight
    gradient (``a`` is transposed) and if ``a`` is larger than half the L2; else only the weight."""
    large = problem.sizes["a"] > problem.device.l2 / 2 > 0
    both = problem.batch > 1 or problem.a.layout == "col" or large or problem.along != "m"
    return ("a", "b") if both else ("b",)


def copies(problem: Problem, limit: float = MEMORY_LIMIT) -> int:
    """Return the number of calls in a chain of ``problem``: enough that rotating operands come from
    memory, within ``limit`` bytes including outputs. 1 on a CPU."""
    if problem.device.type != "cuda":
        return 2 if problem.groups else 1  # ragged: two distributions
    changing = _rotating_bytes(problem)
    wanted = max(CHAIN_BYTES, L2_TIMES * problem.device.l2) / max(changing, 1)
    affordable = int(limit / max(changing + problem.sizes["out"], 1))
    return max(1, min(max(2, math.ceil(wanted)), MOST_COPIES, affordable))


def resident(problem: Problem, calls: Sequence[Any]) -> bool:
    """Whether the copies of a chain may still be in the L2."""
    count = len({call.b.data_ptr() for call in calls})
    return count * _rotating_bytes(problem) < L2_TIMES * problem.device.l2


def memory_limit(device: torch.device) -> float:
    """Bytes that a chain may take: a quarter of the free memory, at most :data:`MEMORY_LIMIT`."""
    if device.type != "cuda":
        return MEMORY_LIMIT
    return min(MEMORY_LIMIT, free_memory(device) / 4)


def rotated(arguments: T, problem: Problem, limit: float | None = None) -> list[T]:
    """Return the arguments of a chain's calls: variants of a dataclass of tensors, with copies of
    the rotating tensors. On a GPU a grouped product gets at least one call per sample of group
    sizes, unless their outputs would exceed half of the ``limit`` in bytes."""
    names = rotating(problem)
    given: Any = arguments
    limit = memory_limit(given.b.device) if limit is None else limit
    count = copies(problem, limit)
    variants = [arguments] + [
        dataclasses.replace(given, **{name: duplicate(getattr(given, name)) for name in names})
        for _ in range(count - 1)
    ]
    if problem.groups is None:
        return variants
    varies = problem.device.type == "cuda" and SIZE_SAMPLES * problem.sizes["out"] <= limit / 2
    calls = max(count, SIZE_SAMPLES) if varies else count
    chain: list[Any] = [variants[call % count] for call in range(calls)]
    return [dataclasses.replace(x, rows=x.rows.of_call(i)) for i, x in enumerate(chain)]


def duplicate(t: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides and the same address modulo 16 bytes."""
    reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True) if n > 0)
    unit = max(1, ALIGNMENT // t.element_size())
    offset = t.data_ptr() % ALIGNMENT // t.element_size()
    memory = torch.empty(reach + unit, dtype=t.dtype, device=t.device)
    # Copies the whole span with its gaps, since elements may share an address.
    memory[offset : offset + reach] = t.as_strided((reach,), (1,))
    return memory.as_strided(t.shape, t.stride(), offset)


def _rotating_bytes(problem: Problem) -> int:
    return sum(problem.sizes[name] for name in rotating(problem))


class Copies:
    """Copies of a problem's operands, through which calls rotate. They take ``most`` bytes, by
    default :func:`memory_limit` or one copy.

    Raises:
        MemoryError: One copy takes more than ``most``.
    """

    def __init__(self, problem: Problem, device: torch.device, most: int | None) -> None:
        if most is not None and (needed := problem.bytes) > most:
            raise MemoryError(
                f"operands and result take {needed / 2**20:.0f} MiB, and tune_memory "
                f"(TMM_TUNE_MEMORY) leaves {most / 2**20:.0f} for what is timed"
            )
        limit = memory_limit(device)
        limit = limit if most is None else min(limit, most)
        inputs = random_inputs.make(problem, device)
        self._inputs = rotated(inputs, problem, limit=limit)
        # Calls are made without `out=`, as models make them. With it, torch's operators would copy
        # their result, and BLAS with a bias or an epilogue would lose to slower kernels.
        self._problem, self._out = problem, None
        if not problem.allocates:
            self._out = random_inputs.empty(problem.out, problem.out_shape, device)

    def runner(self, launcher: Launcher) -> Runner:
        launcher = allocating_outputs(self._problem.epilogue, launcher, self._problem.out_shape)
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
            reraise(error)
            raise LaunchError(self, error) from error


class LaunchError(Exception):
    """A launch that raised during timing, with its runner."""

    def __init__(self, run: Runner, error: BaseException) -> None:
        super().__init__(error_message(error))
        self.run, self.error = run, error
