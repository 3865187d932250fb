"""NaN and Inf in some rows of ``a``, or columns of ``b``, and where they must arrive.

One special value stands in a row (or column), so that no sum has two and none depends on the
order of its terms: a product with NaN is NaN, one with Inf is Inf of one sign, or NaN where the
other factor is zero. What is free is what the reference answers with NaN although only Inf was
accumulated, such as silu(-Inf) = -Inf · 0: there it depends on how a formula is written.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tmm_core.dispatch import verify
from tmm_core.spec.problem import Problem

#: How many rows or columns get one.
COUNT = 3


@dataclass(frozen=True, slots=True)
class Planted:
    """Special values where they are now, and what they have to make of a result."""

    axis: Literal["rows", "columns"]
    #: Of the result, where special values may be.
    places: torch.Tensor
    #: The matrix of the batch they are in; None: there is no batch.
    matrix: int | None
    #: 2 for NaN, 1 for Inf, −1 for −Inf, 0 for a number; and where anything may be.
    kinds: torch.Tensor
    free: torch.Tensor

    def fault(self, out: torch.Tensor) -> str | None:
        """Where ``out`` has them otherwise than the reference."""
        one = out if self.matrix is None else out[self.matrix]
        here = one[self.places] if self.axis == "rows" else one[:, self.places]
        wrong = (_kinds(here) != self.kinds) & ~self.free
        elsewhere = ~out.isfinite()
        inside = elsewhere if self.matrix is None else elsewhere[self.matrix]
        if self.axis == "rows":
            inside[self.places] = False
        else:
            inside[:, self.places] = False
        counts = torch.stack([wrong.sum(), elsewhere.sum()]).tolist()
        what = f"with NaN and Inf in {self.axis} {sorted(self.places.tolist())}"
        if counts[1]:
            return f"{what}, {counts[1]} elements of others are no numbers"
        if counts[0]:
            row, col = wrong.nonzero()[0].tolist()
            has, wanted = float(here[row, col]), _NAMES[int(self.kinds[row, col])]
            return f"{what}, {counts[0]} elements there are wrong: one is {has:g} and not {wanted}"
        return None


_NAMES = {2: "nan", 1: "inf", -1: "-inf", 0: "a number"}


@contextmanager
def planted(
    problem: Problem, inputs: verify.Inputs, axis: Literal["rows", "columns"]
) -> Iterator[Planted | None]:
    """Inside, ``inputs`` have special values; None where there is nothing to hold any.

    In a and the residual along rows, in b and the bias along columns.
    """
    chance = random.Random()
    matrix = chance.randrange(problem.batch) if problem.batch > 1 else None
    one = inputs if matrix is None else _of_batch(problem, inputs, matrix)
    single = replace(problem, batch=1)
    changes = _changes(problem, one, axis, chance)
    if not changes:
        yield None
        return
    places = sorted({place for _, _, place, _ in changes})
    kept = [target[index].clone() for target, index, _, _ in changes]
    for target, index, _, value in changes:
        target[index] = value
    try:
        yield _planted(single, one, axis, torch.tensor(places, device=one.a.device), matrix)
    finally:
        for (target, index, _, _), before in zip(reversed(changes), reversed(kept), strict=True):
            target[index] = before


def _changes(
    problem: Problem,
    inputs: verify.Inputs,
    axis: Literal["rows", "columns"],
    chance: random.Random,
) -> list[tuple[torch.Tensor, tuple[int, ...], int, float]]:
    """Tensor, index into it, row or column of the result, and the value to put there."""
    if axis == "rows":
        matrix, extra, count = inputs.a, inputs.residual, problem.m
    else:
        # The matrices of a batch have one bias.
        bias = inputs.bias if problem.batch == 1 else None
        matrix, extra, count = inputs.b.mT, bias, problem.n
    if not (problem.m and problem.n):
        return []
    lines = chance.sample(range(len(matrix)), min(len(matrix), COUNT))
    changes: list[tuple[torch.Tensor, tuple[int, ...], int, float]] = []
    if problem.k:
        inner = (problem.k - 1, 0, chance.randrange(problem.k))  # the tail of the sum first
        values = _values(matrix.dtype)
        for place, line in enumerate(lines):
            value = values[place % len(values)]
            changes.append((matrix, (line, inner[place]), line % count, value))
    if extra is not None:
        line = chance.randrange(count)
        index = (line, chance.randrange(problem.n)) if axis == "rows" else (line,)
        changes.append((extra, index, line, math.nan))
    return changes


def _values(dtype: torch.dtype) -> tuple[float, ...]:
    """Special values that the format has."""
    return (math.nan,) if dtype == torch.float8_e4m3fn else (math.nan, math.inf, -math.inf)


def _of_batch(problem: Problem, inputs: verify.Inputs, matrix: int) -> verify.Inputs:
    """The product of one matrix of the batch."""
    row_a, row_b = problem.scale_a == "row", problem.scale_b == "row"
    scale_a, scale_b, residual = inputs.scale_a, inputs.scale_b, inputs.residual
    return replace(
        inputs,
        a=inputs.a[matrix],
        b=inputs.b[matrix],
        residual=None if residual is None else residual[matrix],
        scale_a=scale_a[matrix] if row_a and scale_a is not None else scale_a,
        scale_b=scale_b[matrix] if row_b and scale_b is not None else scale_b,
    )


def _planted(
    problem: Problem,
    inputs: verify.Inputs,
    axis: Literal["rows", "columns"],
    places: torch.Tensor,
    matrix: int | None,
) -> Planted:
    """What the reference makes of the inputs as they are, in those rows or columns."""
    every = slice(None)
    rows, cols = (places, every) if axis == "rows" else (every, places)
    piece = verify.part(problem, inputs, rows, cols)
    count = len(places)
    smaller = replace(problem, m=count) if axis == "rows" else replace(problem, n=count)
    z = verify.accumulated(smaller, piece)
    expected = verify.finished(smaller, piece, z)
    undefined = z.isnan()
    if problem.gated:
        gate, up = undefined.chunk(2, dim=-1)
        undefined = gate | up
    free = problem.epilogue.apply(z).isnan() & ~undefined
    return Planted(axis, places, matrix, _kinds(expected), free)


def _kinds(t: torch.Tensor) -> torch.Tensor:
    infinite = torch.where(t.isinf(), t.float().sign(), 0.0)
    return torch.where(t.isnan(), 2.0, infinite)
