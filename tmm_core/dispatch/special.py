"""Plants NaN and Inf in some rows of ``a`` or columns of ``b``, and checks where they arrive.

Each row (or column) gets one special value, so that no sum has two and none depends on the order of
its terms: a product with NaN is NaN, one with Inf is Inf of one sign, or NaN if the other factor is
zero. Any result is accepted where the reference gives NaN although only Inf was accumulated, such
as silu(-Inf) = -Inf · 0: it depends on how the formula is written.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from tmm_core.dispatch import verify
from tmm_core.spec.arguments import Arguments
from tmm_core.spec.problem import Problem

#: How many rows or columns get one.
COUNT = 3

Axis = Literal["rows", "columns"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, slots=True)
class Change:
    """One element of an input, with its old and its new value."""

    tensor: torch.Tensor
    index: tuple[int, ...]
    #: The rows or columns of the result that it affects.
    places: tuple[int, ...]
    value: float
    before: torch.Tensor


@dataclass(frozen=True, slots=True)
class Special:
    """Special values for some inputs, and their expected effect on a result."""

    axis: Axis
    changes: tuple[Change, ...]
    #: Affected rows or columns of the result.
    places: torch.Tensor
    #: Their matrix of the batch; None: there is no batch.
    matrix: int | None
    #: 2 for NaN, 1 for Inf, −1 for −Inf, 0 for a number; and where anything is accepted.
    kinds: torch.Tensor
    free: torch.Tensor
    #: A dimension of the result, and the number of its elements that are defined.
    within: tuple[int, int] | None = None

    @classmethod
    def of(cls, problem: Problem, inputs: Arguments, axis: Axis, room: int) -> Special | None:
        """Special values for these inputs; None if no input can hold one.

        Along rows they are in a and the residual, along columns in b and the bias.

        Args:
            room: Bytes that operands of the reference may take in fp64.
        """
        chance = random.Random()
        matrix = chance.randrange(problem.batch) if problem.batch > 1 else None
        one = inputs if matrix is None else _of_batch(problem, inputs, matrix)
        changes = tuple(_changes(problem, one, axis, chance))
        if not changes:
            return None
        places = places_of(changes, one.a.device)
        with planted(changes):
            marked = _marked_reference(replace(problem, batch=1), one, axis, places, room)
        return cls(axis, changes, places, matrix, *unmarked(marked))

    def planted(self) -> AbstractContextManager[None]:
        """A context in which the inputs contain the special values."""
        return planted(self.changes)

    def fault(self, out: torch.Tensor) -> str | None:
        """Where the special values of ``out`` differ from the reference."""
        if self.within is not None:
            out = out.narrow(self.within[0], 0, self.within[1])
        one = out if self.matrix is None else out[self.matrix]
        elsewhere = ~out.isfinite()
        inside = elsewhere if self.matrix is None else elsewhere[self.matrix]
        here = (..., self.places, slice(None)) if self.axis == "rows" else (..., self.places)
        inside[here] = False
        wrong = (kinds_of(one[here]) != self.kinds) & ~self.free
        counts = torch.stack([wrong.sum(), elsewhere.sum()]).tolist()
        what = f"with NaN and Inf in {self.axis} {self.places.tolist()}"
        if counts[1]:
            return f"{what}, {counts[1]} elements of others are not finite"
        if counts[0]:
            first = tuple(wrong.nonzero()[0].tolist())
            has, wanted = float(one[here][first]), _NAMES[int(self.kinds[first])]
            return f"{what}, {counts[0]} elements there are wrong: one is {has:g} and not {wanted}"
        return None


_NAMES = {2: "nan", 1: "inf", -1: "-inf", 0: "a number"}


def places_of(changes: Sequence[Change], device: torch.device) -> torch.Tensor:
    """The rows or columns of the result that these affect, each once."""
    return torch.tensor(
        sorted({place for change in changes for place in change.places}), device=device
    )


@contextmanager
def planted(changes: Sequence[Change]) -> Iterator[None]:
    """A context in which the inputs have these changes."""
    for change in changes:
        change.tensor[change.index] = change.value
    try:
        yield
    finally:
        for change in changes:
            change.tensor[change.index] = change.before


def _changes(
    problem: Problem, inputs: Arguments, axis: Axis, chance: random.Random
) -> Iterator[Change]:
    """Changes to one matrix of the batch; no element twice."""
    if not (problem.m and problem.n):
        return
    if axis == "rows":
        matrix, extra, count = inputs.a, inputs.residual, problem.m
    else:
        # The matrices of a batch share one bias.
        bias = inputs.bias if problem.batch == 1 else None
        matrix, extra, count = inputs.b.mT, bias, problem.n

    def at(line: int) -> int:
        """The row, or the column, of the result."""
        pairs = axis == "columns" and problem.epilogue.interleaved
        return line // 2 if pairs else line % count

    lines = chance.sample(range(len(matrix)), min(len(matrix), COUNT)) if problem.k else []
    inner = (problem.k - 1, 0, chance.randrange(problem.k or 1))  # the tail of the sum first
    values = values_of(matrix.dtype)
    for place, line in enumerate(lines):
        index = (line, inner[place])
        value = values[place % len(values)]
        yield Change(matrix, index, (at(line),), value, matrix[index].clone())
    if extra is not None:
        line = chance.randrange(count)
        where = (line, chance.randrange(problem.n)) if axis == "rows" else (line,)
        yield Change(extra, where, (at(line),), math.nan, extra[where].clone())


def values_of(dtype: torch.dtype) -> tuple[float, ...]:
    """The special values of the format."""
    infinite = torch.tensor(math.inf).to(dtype).float().isinf()
    return (math.nan, math.inf, -math.inf) if infinite else (math.nan,)


def _of_batch(problem: Problem, inputs: Arguments, matrix: int) -> Arguments:
    """The product of one matrix of the batch."""
    row_a, row_b = problem.scale_a == "row", problem.scale_b == "row"
    scale_a, scale_b, residual = inputs.scale_a, inputs.scale_b, inputs.residual
    return inputs._replace(
        a=inputs.a[matrix],
        b=inputs.b[matrix],
        residual=None if residual is None else residual[matrix],
        scale_a=scale_a[matrix] if row_a and scale_a is not None else scale_a,
        scale_b=scale_b[matrix] if row_b and scale_b is not None else scale_b,
    )


def _marked_reference(
    problem: Problem, inputs: Arguments, axis: Axis, places: torch.Tensor, room: int
) -> torch.Tensor:
    """The :func:`marks` of those rows or columns of the reference for the current inputs; computed
    piecewise."""
    length = problem.n if axis == "rows" else problem.m
    step = max(64, room // (8 * max(1, problem.k) * (1 + problem.gated)))
    pieces = []
    # The reference chooses its precision by size.
    smaller = replace(problem, m=len(places)) if axis == "rows" else replace(problem, n=len(places))
    for low in range(0, length, step):
        along = slice(low, low + step)
        rows, cols = (places, along) if axis == "rows" else (along, places)
        piece = verify.part(problem, inputs, rows, cols)
        z = verify.accumulated(smaller, piece)
        pieces.append(marks(problem, z, verify.finished(smaller, piece, z)))
    return torch.cat(pieces, 1 if axis == "rows" else 0)


#: Added to the kind of an element for which anything is accepted.
_FREE = 8.0


def marks(problem: Problem, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The kinds of a result ``y``, plus a constant where anything is accepted: its epilogue makes
    NaN of the Inf in ``z``."""
    undefined = z.isnan()
    if problem.gated:
        gate, up = problem.epilogue.inputs(undefined)
        undefined = gate | up
    return kinds_of(y) + _FREE * (problem.epilogue.apply(z).isnan() & ~undefined)


def unmarked(marked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kinds of :func:`marks`, and where anything is accepted."""
    free = marked > _FREE / 2
    return marked - _FREE * free, free


def kinds_of(t: torch.Tensor) -> torch.Tensor:
    """2 for NaN, 1 for Inf, −1 for −Inf, 0 for a number."""
    infinite = torch.where(t.isinf(), t.float().sign(), 0.0)
    return torch.where(t.isnan(), 2.0, infinite)
