"""Plants NaN and Inf in the groups of a ragged problem; :mod:`tmm_core.dispatch.special` does so in
a plain one.

What lies in one group must not reach another: where K is ragged, some of the values are in the
first or last term of a group's sums, which a neighbour's tile may load beside its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from tmm_core.dispatch.ragged import Inputs
from tmm_core.dispatch.ragged_reference import ranges
from tmm_core.dispatch.special import COUNT, Axis, Change, Special, column, expecting, values_of
from tmm_core.spec.problem import Problem


def special(problem: Problem, inputs: Inputs, axis: Axis, room: int) -> Special | None:
    """Special values for these inputs; None if no group can hold one.

    Args:
        room: Bytes that operands of the reference may take in fp64.
    """
    changes = _changes(problem, inputs, axis, random.Random())
    return expecting(problem, inputs, axis, changes, room, within=inputs.rows.defined(problem))


def _changes(
    problem: Problem, inputs: Inputs, axis: Axis, chance: random.Random
) -> Iterator[Change]:
    """Changes to elements that belong to a group, no element twice."""
    along, end = problem.along, inputs.rows.ends[-1]
    filled = [each for each in ranges(inputs.rows.ends) if each[1] < each[2]]
    if not (filled and problem.m and problem.n):
        return
    rows = axis == "rows"
    matrix = inputs.a if rows else inputs.b.mT
    # Lines are rows of a, or columns of b; those of a ragged dimension lie in the groups.
    lines = range(matrix.shape[-2])
    if along == ("m" if rows else "n"):
        lines = range(end)
    read = _read(inputs, end) if along == "m" and rows else {}
    terms = [problem.k - 1, 0, chance.randrange(max(1, problem.k))]
    if along == "k":
        last, first = chance.choice(filled[:-1] or filled), chance.choice(filled[1:] or filled)
        some = chance.choice(filled)
        terms = [last[2] - 1, first[1], chance.randrange(some[1], some[2])]
    able = list(read) or lines
    values = values_of(matrix.dtype)
    for place, line in enumerate(chance.sample(able, min(len(able), COUNT)) if problem.k else []):
        index: tuple[int, ...] = (line, terms[place])
        if matrix.dim() > 2:
            index = (chance.choice(filled)[0], *index)
        value = values[place % len(values)]
        places = read.get(line) or (line if rows else column(problem, line),)
        yield Change(matrix, index, tuple(places), value, matrix[index].clone())
    yield from _beside(problem, inputs, rows, filled, chance)


def _beside(
    problem: Problem,
    inputs: Inputs,
    rows: bool,
    filled: list[tuple[int, int, int]],
    chance: random.Random,
) -> Iterator[Change]:
    """NaN in an element of the residual, or in one group's bias."""
    group, start, end = chance.choice(filled)
    if rows and inputs.residual is not None:
        row, col = chance.randrange(problem.m), chance.randrange(problem.n)
        row = chance.randrange(start, end) if problem.along == "m" else row
        col = chance.randrange(start, end) if problem.along == "n" else col
        index = (group, row, col) if problem.along == "k" else (row, col)
        yield Change(inputs.residual, index, (row,), math.nan, inputs.residual[index].clone())
    if not rows and inputs.bias is not None:
        index = group, chance.randrange(inputs.bias.shape[1])
        at = column(problem, index[1])
        yield Change(inputs.bias, index, (at,), math.nan, inputs.bias[index].clone())


def _read(inputs: Inputs, end: int) -> dict[int, list[int]]:
    """The rows of the result for which each row of ``a`` is read, of those in a group."""
    given = inputs.rows
    read = range(end) if given.a_index is None else given.a_index[:end].tolist()
    written = range(end) if given.out_index is None else given.out_index[:end].tolist()
    found: dict[int, list[int]] = {}
    for line, at in zip(read, written, strict=True):
        found.setdefault(line, []).append(at)
    return found
