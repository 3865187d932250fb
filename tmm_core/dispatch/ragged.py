"""Group sizes and indices for launches of a ragged problem, to verify and to time them.

Group sizes are drawn on the host, so that a reference can compute one product per group. There are
two distributions, since the fastest kernel for one need not be the fastest for the other: a
*skewed* one, where few groups have most of the rows, as from a router, and an *even* one. Both have
empty groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tmm_core.spec.arguments import EXTRAS, ROWS
from tmm_core.spec.groups import Groups
from tmm_core.spec.problem import Problem

#: One group in this many is empty.
EMPTY_ONE_IN = 5
#: Draws of group sizes that a chain of calls takes in turn. Each fills the groups' last tiles
#: differently: torch's product of 4096 rows in 8 groups took 718 µs with some, 851 with others.
DRAWS = 6
#: How often each gathered row is read: ``a`` has fewer rows by this factor.
READS = 2


@dataclass(frozen=True, slots=True)
class Rows:
    """The arguments of a ragged problem's launches besides operands, and their values on the
    host."""

    offs: torch.Tensor
    #: The ends of groups, as in ``offs``.
    ends: tuple[int, ...]
    #: Rows of ``a``, if rows are ragged.
    read: int
    a_index: torch.Tensor | None = None
    out_index: torch.Tensor | None = None
    out_weights: torch.Tensor | None = None
    #: The ``offs`` of other draws, from the two distributions in turn.
    draws: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(
        cls,
        groups: Groups,
        total: int,
        device: torch.device,
        generator: torch.Generator,
        *,
        skewed: bool,
        whole: bool,
    ) -> Rows:
        """Random groups with ``total`` rows (or columns, or terms of sums) in all; see
        :func:`tmm_core.dispatch.random_inputs.make`."""
        seed = int(torch.randint(2**31, (), generator=generator, device=device))
        chance = torch.Generator("cpu").manual_seed(seed)
        used = total if whole else total - min(3, total // 4)
        ends = ends_of(groups.count, used, chance, skewed)

        def place(numbers: Any, dtype: torch.dtype | None) -> torch.Tensor:
            return torch.as_tensor(numbers, device="cpu").to(device, dtype)

        read, a_index, out_index, out_weights = total, None, None, None
        if groups.a_index is not None:
            read = max(1, total // READS)
            drawn = torch.randint(read, (total,), generator=chance, device="cpu")
            a_index = place(drawn, groups.a_index)
        if groups.out_index is not None:
            # Rows in no group map to each other.
            there = [
                torch.randperm(used, generator=chance, device="cpu"),
                torch.arange(used, total, device="cpu"),
            ]
            out_index = place(torch.cat(there), groups.out_index)
        if groups.out_weights is not None:
            drawn = torch.rand(total, generator=chance, dtype=torch.float32, device="cpu") + 0.5
            drawn[used:] = torch.nan
            out_weights = place(drawn, groups.out_weights)
        draws = [
            ends_of(groups.count, used, chance, skewed == (draw % 2 == 0))
            for draw in range(1, DRAWS)
        ]
        offs, *others = (place(each, torch.int32) for each in (ends, *draws))
        return cls(offs, tuple(ends), read, a_index, out_index, out_weights, tuple(others))

    def of_call(self, call: int) -> Rows:
        """The rows of that call of a chain, whose calls take the draws in turn."""
        draws = (self.offs, *self.draws)
        return replace(self, offs=draws[call % len(draws)])

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """The keyword tensors of a launch, scales left out."""
        return {name: t for name in ROWS if (t := getattr(self, name)) is not None}

    def soil(self, problem: Problem, given: Inputs) -> None:
        """Put NaN beyond the last group, where nothing may be read."""
        end, residual = self.ends[-1], given.residual
        a = given.a if self.a_index is None else None
        scale_a = given.scale_a if problem.scale_a == "row" and a is not None else None
        scale_b = given.scale_b if problem.scale_b == "row" else None
        beyond: dict[str, list[tuple[torch.Tensor | None, int]]] = {
            "m": [(a, 0), (scale_a, 0), (residual, 0)],
            "n": [(given.b, 1), (scale_b, 0), (residual, 1)],
            "k": [(a, 1), (given.b, 0)],
        }
        for t, dimension in beyond[problem.along]:
            if t is not None:
                t.narrow(dimension, end, t.shape[dimension] - end).fill_(torch.nan)

    def defined(self, problem: Problem) -> tuple[int, int] | None:
        """The dimension along which the result is defined only up to the last group, and that
        limit; None: it is defined everywhere."""
        assert problem.groups is not None
        if problem.along == "k" or problem.groups.zeroed or self.ends[-1] == problem.extent:
            return None
        return ("m", "n").index(problem.along), self.ends[-1]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of a launch, of a ragged problem with its ``rows``."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    alpha: float = 1.0
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    rows: Rows | None = None

    @property
    def extras(self) -> dict[str, torch.Tensor]:
        """The keyword arguments of a launch."""
        scales = {name: t for name in EXTRAS if (t := getattr(self, name)) is not None}
        return scales | (self.rows.given if self.rows else {})

    def launch(self, launcher: Callable[..., torch.Tensor], out: Any) -> torch.Tensor:
        """Call a launcher, which writes to ``out`` or allocates."""
        given = self.extras
        return launcher(self.a, self.b, self.bias, self.residual, self.alpha, out, **given)


def ends_of(count: int, total: int, chance: torch.Generator, skewed: bool) -> list[int]:
    """Ends of ``count`` groups with ``total`` rows in all; some of several are empty."""
    shares = torch.ones(count, dtype=torch.float64, device="cpu")
    if skewed:
        shares /= torch.arange(1, count + 1, device="cpu")
    shares = shares[torch.randperm(count, generator=chance, device="cpu")]
    empty = -(-count // EMPTY_ONE_IN) if count > 1 else 0
    shares[torch.randperm(count, generator=chance, device="cpu")[:empty]] = 0
    ends = (shares.cumsum(0) / shares.sum() * total).round().long()
    return ends.tolist()
