"""The copies of operands that a chain of calls runs over, as a model's layers do.

A layer's weight was last read a whole step ago and comes from memory; its activation was written
by the layer before and is in the L2 where it fits. So ``b`` rotates, and ``a`` stays, unless it is
too large to be found there or is no activation at all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, TypeVar

import torch

from tmm_core.dispatch import ragged
from tmm_core.spec.problem import ALIGNMENT, Problem

T = TypeVar("T")

#: Bytes that the copies come to at least, and how many times the L2: nothing of a copy is left in
#: the L2 when its turn comes again.
CHAIN_BYTES, L2_TIMES = 240e6, 3
#: Calls in a chain at most. A problem whose copies then still fit three times the L2 is *resident*.
MOST_COPIES = 128
#: Memory that copies and outputs may take, unless less of it is free.
MEMORY_LIMIT = 8 * 2**30


def rotating(problem: Problem) -> tuple[str, ...]:
    """The operands that change from call to call: both of a batched product, of a weight gradient
    (``a`` is transposed) and where ``a`` is larger than half the L2; else the weight alone."""
    a_bytes = math.prod(problem.a_shape) * problem.a.dtype.itemsize
    both = problem.batch > 1 or problem.a.layout == "col" or a_bytes > problem.device.l2 / 2 > 0
    both = both or problem.along != "m"
    return ("a", "b") if both else ("b",)


def copies(problem: Problem, limit: float = MEMORY_LIMIT) -> int:
    """Calls in a chain of ``problem``: enough for the operands that rotate to come from memory,
    and no more than ``limit`` bytes hold, outputs included. 1 on a CPU."""
    if problem.device.type != "cuda":
        return 2 if problem.groups else 1  # ragged ones in two distributions
    changing = _rotating_bytes(problem)
    wanted = max(CHAIN_BYTES, L2_TIMES * problem.device.l2) / max(changing, 1)
    written = math.prod(problem.out_shape) * problem.out.dtype.itemsize
    affordable = int(limit / max(changing + written, 1))
    return max(1, min(max(2, math.ceil(wanted)), MOST_COPIES, affordable))


def bytes_of(problem: Problem) -> int:
    """What one copy of all operands and the result take."""
    width = problem.n * (2 if problem.gated else 1)
    a, b = problem.m * problem.k * problem.a.dtype.itemsize, problem.k * width
    tile = problem.m * problem.n
    out = tile * problem.out.dtype.itemsize
    residual = tile * problem.residual.dtype.itemsize if problem.residual else 0
    return problem.batch * (a + b * problem.b.dtype.itemsize + out + residual)


def resident(problem: Problem, count: int) -> bool:
    """Whether the copies of a chain may be found in the L2 all the same."""
    return count * _rotating_bytes(problem) < L2_TIMES * problem.device.l2


def memory_limit(device: torch.device) -> float:
    """Bytes that a chain may take: a quarter of what is free, at most :data:`MEMORY_LIMIT`."""
    if device.type != "cuda":
        return MEMORY_LIMIT
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(MEMORY_LIMIT, (free + held) / 4)


def rotated(arguments: T, problem: Problem, count: int) -> list[T]:
    """``count`` variants of a tuple or dataclass of tensors, of which the rotating ones are
    copies."""
    names = rotating(problem)
    given: Any = arguments
    replaced = getattr(given, "_replace", None) or functools.partial(dataclasses.replace, given)
    copies = [arguments] + [
        replaced(**{name: duplicate(getattr(given, name)) for name in names})
        for _ in range(count - 1)
    ]
    return copies if problem.groups is None else ragged.alternated(copies)


def duplicate(t: torch.Tensor) -> torch.Tensor:
    """A copy with the very strides and the same offset from 16 bytes."""
    reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True) if n > 0)
    unit = max(1, ALIGNMENT // t.element_size())
    offset = t.data_ptr() % ALIGNMENT // t.element_size()
    memory = torch.empty(reach + unit, dtype=t.dtype, device=t.device)
    # As it lies in memory, gaps included: elements may share an address.
    memory[offset : offset + reach] = t.as_strided((reach,), (1,))
    return memory.as_strided(t.shape, t.stride(), offset)


def _rotating_bytes(problem: Problem) -> int:
    sizes = {
        "a": math.prod(problem.a_shape) * problem.a.dtype.itemsize,
        "b": math.prod(problem.b_shape) * problem.b.dtype.itemsize,
    }
    return sum(sizes[name] for name in rotating(problem))
