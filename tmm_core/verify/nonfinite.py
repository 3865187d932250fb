"""Plants NaN and Inf in some rows of ``a`` or columns of ``b``, and checks where they arrive.

Each row (or column) gets one such value, so that no sum depends on the order of its terms. A
product with NaN is NaN. A product with Inf is Inf of one sign, or NaN if the other factor is zero.
An epilogue may turn Inf into NaN, as silu(-Inf) = -Inf · 0 does. The result depends on how the
formula is written, so any result is accepted there.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from tmm_core.spec.problem import Problem
from tmm_core.verify import random_inputs
from tmm_core.verify.compare import Places, pieces, ranges, rms, zeros
from tmm_core.verify.guard_bands import same_bits
from tmm_core.verify.ragged_inputs import Inputs

#: The number of rows or columns with a non-finite value.
COUNT = 3
#: Further draws of a row or column that has no such value yet.
_DRAWS = 8

Axis = Literal["rows", "columns"]
AXES: tuple[Axis, ...] = get_args(Axis)


@dataclass(frozen=True, slots=True)
class Change:
    """One element of an input, with its new value."""

    tensor: torch.Tensor
    index: tuple[int, ...]
    #: The rows or columns of the result that it affects.
    places: tuple[int, ...]
    value: float


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Non-finite values for some inputs, and their expected effect on a result."""

    axis: Axis
    changes: tuple[Change, ...]
    #: Affected rows or columns of the result, in every matrix of a batch.
    places: torch.Tensor
    #: The expected kinds (:func:`kinds_of`) in these places, and where any result is accepted.
    kinds: torch.Tensor
    free: torch.Tensor
    #: The rows and the columns of the result that are defined.
    defined: tuple[slice, slice] = (slice(None), slice(None))

    def fault(
        self, out: torch.Tensor, elsewhere_finite: bool = True, usual: torch.Tensor | None = None
    ) -> str | None:
        """How the non-finite values of ``out`` differ from the reference. Overwrites ``usual``.

        Args:
            elsewhere_finite: All other results are finite.
            usual: The result of the same inputs without these values, of a deterministic kernel.
        """
        defined = (..., *self.defined)
        out, usual = out[defined], None if usual is None else usual[defined]
        elsewhere = ~out.isfinite()
        here = (..., self.places, slice(None)) if self.axis == "rows" else (..., self.places)
        elsewhere[here] = False
        wrong = (kinds_of(out[here]) != self.kinds) & ~self.free
        counts = torch.stack([wrong.sum(), elsewhere.sum()]).tolist()
        what = f"with NaN and Inf in {self.axis} {self.places.tolist()}"
        if counts[1] and elsewhere_finite:
            return f"{what}, {counts[1]} elements of others are not finite"
        if counts[0]:
            first = tuple(wrong.nonzero()[0].tolist())
            has, wanted = out[here][first].item(), _NAMES[int(self.kinds[first])]
            return f"{what}, {counts[0]} elements there are wrong: one is {has:g} and not {wanted}"
        if usual is not None and out.numel():
            usual[here] = out[here]
            if not same_bits(usual, out):
                return f"{what}, elements of others have other bits"
        return None


_NAMES = {2: "nan", 1: "inf", -1: "-inf", 0: "a number"}


def nonfinite_inputs(problem: Problem, inputs: Inputs, axis: Axis, room: int) -> NonFinite | None:
    """Choose non-finite values for these inputs; None if no input can represent one.

    Values in rows are planted in a and the residual, values in columns in b and the bias.

    Args:
        room: Bytes that operands of the reference may take in fp64.
    """
    chance = random.Random(random_inputs.new_seed())
    changes = tuple(_changes(problem, inputs, axis, chance))
    if not changes:
        return None
    affected = sorted({place for change in changes for place in change.places})
    places = torch.tensor(affected, device=inputs.a.device)
    rows, cols = defined = inputs.defined(problem)
    at_rows, at_cols = (places, cols) if axis == "rows" else (rows, places)
    with planted(changes):
        kinds, free = expected_kinds(problem, inputs, at_rows, at_cols, room)
    return NonFinite(axis, changes, places, kinds, free, defined)


@contextmanager
def planted(changes: Sequence[Change]) -> Iterator[None]:
    """A context in which the inputs have these changes."""
    before = [change.tensor[change.index].clone() for change in changes]
    for change in changes:
        change.tensor[change.index] = change.value
    try:
        yield
    finally:
        for change, value in zip(changes, before, strict=True):
            change.tensor[change.index] = value


def _changes(
    problem: Problem, inputs: Inputs, axis: Axis, chance: random.Random
) -> Iterator[Change]:
    """Yield changes to elements that belong to a group or a matrix of a batch; no element twice."""
    filled = [(matrix, 0, problem.m) for matrix in range(problem.batch)]
    if inputs.rows is not None:
        filled = [each for each in ranges(inputs.rows.ends) if each[1] < each[2]]
    if not (filled and problem.m and problem.n):
        return
    along, end = problem.along, filled[-1][2]
    rows = axis == "rows"
    matrix = inputs.a if rows else inputs.b.mT
    # Lines are rows of a, or columns of b. In a ragged dimension only lines in groups count.
    lines = range(matrix.shape[-2])
    if along == ("m" if rows else "n"):
        lines = range(end)
    read = _rows_computed_from(inputs, end) if rows else {}
    # The last term first: kernels mask the tail of a sum.
    terms = [problem.k - 1, 0, chance.randrange(max(1, problem.k))]
    if along == "k":
        last, first = chance.choice(filled[:-1] or filled), chance.choice(filled[1:] or filled)
        some = chance.choice(filled)
        terms = [last[2] - 1, first[1], chance.randrange(some[1], some[2])]
    able = list(read) or lines
    values = values_of(matrix.dtype)
    sampled = chance.sample(able, min(len(able), COUNT)) if problem.k and values else []
    planned = [(line, terms[i], values[i % len(values)]) for i, line in enumerate(sampled)]
    if sampled and not rows and problem.gated:
        drawn = {column(problem, line) for line in sampled}
        others = chance.sample(lines, min(len(lines), _DRAWS))
        free = [line for line in others if column(problem, line) not in drawn]
        line = _in_other_half(problem, sampled[0], (free or sampled)[0])
        planned.append((line, terms[0], values[0]))
    taken: set[int] = set()
    for line, term, value in planned:
        index: tuple[int, ...] = (line, term)
        if matrix.dim() > 2:
            index = (chance.choice(filled)[0], *index)
        places = read.get(line) or (line if rows else column(problem, line),)
        taken.update(places)
        yield Change(matrix, index, tuple(places), value)
    yield from _in_terms(problem, inputs, rows, filled, chance, taken)


def _in_terms(
    problem: Problem,
    inputs: Inputs,
    rows: bool,
    filled: list[tuple[int, int, int]],
    chance: random.Random,
    taken: set[int],
) -> Iterator[Change]:
    """NaN and Inf in elements of the residual, or of a bias: one group's, or the common one; and
    NaN in the weight of a row. They are not in the rows or columns of the result that are
    ``taken``, whose values would hide them, if a few draws find others."""
    group, start, end = chance.choice(filled)

    def draw(lines: range, place: Callable[[int], int] = int) -> int:
        found = chance.choice(lines)
        for _ in range(_DRAWS):
            if place(found) not in taken:
                break
            found = chance.choice(lines)
        taken.add(place(found))
        return found

    index: tuple[int, ...]
    residual, bias = inputs.residual, inputs.bias
    if rows and residual is not None:
        for value in _nan_and_inf(residual.dtype, chance):
            row = draw(range(start, end) if problem.along == "m" else range(problem.m))
            col = chance.choice(range(start, end) if problem.along == "n" else range(problem.n))
            index = (group, row, col) if residual.dim() > 2 else (row, col)
            yield Change(residual, index, (row,), value)
    given = inputs.rows
    if rows and given is not None and given.out_weights is not None:

        def written(row: int) -> int:
            return row if given.out_index is None else int(given.out_index[row])

        row = draw(range(filled[-1][2]), written)
        yield Change(given.out_weights, (row,), (written(row),), math.nan)
    if not rows and bias is not None:
        first: int | None = None
        for value in [*_nan_and_inf(bias.dtype, chance), *[math.nan] * problem.gated]:
            col = draw(range(bias.shape[-1]), functools.partial(column, problem))
            if first is not None and value != value:
                col = _in_other_half(problem, first, col)
            first = col if first is None else first
            index = (group, col) if bias.dim() > 1 else (col,)
            yield Change(bias, index, (column(problem, col),), value)


def _in_other_half(problem: Problem, first: int, line: int) -> int:
    """Return a column of ``b`` or of the bias for the same column of the result as ``line``: of the
    gate if ``first`` is of up, else of up. Chance alone would often put all NaN into gates."""
    n = problem.n
    if problem.epilogue.interleaved:
        return line - line % 2 + (first + 1) % 2
    return line % n + (0 if first >= n else n)


def _nan_and_inf(dtype: torch.dtype, chance: random.Random) -> list[float]:
    """NaN, and Inf of one sign, as far as the dtype has them."""
    values = values_of(dtype)
    infinite = values[1:]
    return [*values[:1], *chance.sample(infinite, min(1, len(infinite)))]


def _rows_computed_from(inputs: Inputs, end: int) -> dict[int, list[int]]:
    """Map each row of ``a`` to the rows of the result that are computed from it, within groups.
    Empty if rows are neither gathered nor scattered."""
    given = inputs.rows
    if given is None or (given.a_index is None and given.out_index is None):
        return {}
    read = range(end) if given.a_index is None else given.a_index[:end].tolist()
    written = range(end) if given.out_index is None else given.out_index[:end].tolist()
    found: dict[int, list[int]] = {}
    for line, at in zip(read, written, strict=True):
        found.setdefault(line, []).append(at)
    return found


def column(problem: Problem, line: int) -> int:
    """Return the column of the result that depends on a column of ``b`` or of the bias."""
    return line // 2 if problem.epilogue.interleaved else line % problem.n


def values_of(dtype: torch.dtype) -> tuple[float, ...]:
    """Return the non-finite values of a dtype; integers have none."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return ()
    infinite = torch.tensor(math.inf, device="cpu").to(dtype.to_real()).float().isinf()
    return (math.nan, math.inf, -math.inf) if infinite else (math.nan,)


#: Rounding, to TF32 for example, may change the sign of a number below this part of the rms.
_UNSIGNED = 0.05


def expected_kinds(
    problem: Problem, inputs: Inputs, rows: Places, cols: Places, room: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kinds of these rows and columns of the expected result, and where any result is
    accepted. The arguments are :func:`compare.expected`'s."""
    kinds = zeros(problem, rows, cols, torch.float32, inputs.a.device)
    free = torch.zeros_like(kinds, dtype=torch.bool)
    for at, piece in pieces(problem, inputs, rows, cols, room):
        kinds[at], free[at] = marks(problem, piece.z, piece.y)
    return kinds, free


def marks(problem: Problem, z: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the kinds of a result ``y`` of the epilogue's input ``z``, and where any result is
    accepted.

    Any result is accepted where the epilogue turns an Inf in ``z`` into NaN, or multiplies Inf by a
    number whose sign depends on rounding. So are results that may be rounded to Inf.
    """
    undefined = z.isnan()
    unsigned = torch.zeros_like(y, dtype=torch.bool)
    if problem.gated:
        gate, up = problem.epilogue.inputs(undefined)
        undefined = gate | up
        numbers = z.abs().masked_fill(~z.isfinite(), math.nan)
        small = numbers < _UNSIGNED * rms(numbers)
        gate, up = problem.epilogue.inputs(small)
        unsigned = y.isinf() & (gate | up)
    found = problem.epilogue.apply(z).isnan()
    # Torch's own functions may differ between dtypes.
    found |= problem.epilogue.apply(z.to(problem.out.dtype)).isnan()
    free = (found & ~undefined) | unsigned
    if y.is_floating_point():
        free |= y.isfinite() & (y.abs() > 0.98 * torch.finfo(problem.out.dtype).max)
    return kinds_of(y), free


def kinds_of(t: torch.Tensor) -> torch.Tensor:
    """2 for NaN, 1 for Inf, −1 for −Inf, 0 for a number; of complex numbers 2 for NaN and Inf."""
    if t.is_complex():
        return torch.where(t.isfinite(), 0.0, 2.0).float()
    infinite = torch.where(t.isinf(), t.float().sign(), 0.0)
    return torch.where(t.isnan(), 2.0, infinite)
