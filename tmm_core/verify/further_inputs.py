"""Further inputs for verification, one launch each: other values, magnitudes, alphas and layouts.

A kernel that caches by address, accumulates in fp16, or reads a bias as if it were contiguous is
right on usual inputs. Most rounds rewrite the last set of inputs in place, without raising the
version that torch counts: to a kernel they look like tensors it has seen before.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tmm_core.spec.arguments import ROWS
from tmm_core.spec.operand import Operand
from tmm_core.spec.problem import Problem
from tmm_core.verify import random_inputs
from tmm_core.verify.compare import reference
from tmm_core.verify.data_sets import DataSets, Expected, InputSet
from tmm_core.verify.guard_bands import (
    UNREADABLE,
    MemoryLayout,
    expanded_layout,
    memory_layout,
    vector_layout,
    with_guard_bands,
)
from tmm_core.verify.nonfinite import kinds_of, marks, split, values_of
from tmm_core.verify.ragged_inputs import Inputs
from tmm_core.verify.random_inputs import Recipe, Values

#: Where the tensors of a round are: in the memory of the last set, in memory of their
#: own, with strides of zero, or in one memory for several arguments.
Place = Literal["same", "own", "expanded", "shared"]

#: Exponents by which one operand is scaled down and the other up.
_SHIFTS = {torch.float16: (16, 8), torch.bfloat16: (60, 60), torch.float32: (60, 60)}
#: fp16 results of this size are subnormal.
_SUBNORMAL = 2.0**-18
#: The distance of two subnormal numbers of fp16.
_STEP = 2.0**-24
#: Error per product of a sum that cancels, relative to its largest partial sum. Tensor cores add 16
#: products at a time to an fp32 sum, and truncate the sum by up to 2⁻²³. Twice that is allowed. An
#: H200 lost 4.6e-3 of the result at K = 14336, where the limit is 1.4e-2.
_TRUNCATED = 2.0**-26
#: A round's tensors may take the memory limit divided by the first number. Its reference is kept
#: for the next launcher if it takes at most the limit divided by the second.
_SHARE, _KEPT = 16, 256


@dataclass(frozen=True, slots=True)
class Plan:
    """The description of a round."""

    name: str
    recipe: Recipe
    place: Place = "same"
    #: NaN and Inf in four of five rows of ``a``.
    flooded: bool = False


def planned(problem: Problem) -> Iterator[Plan]:
    """The rounds of a problem; the first suffices to detect a cache by address."""
    usual = Recipe(alpha=-1.0, sizes="single", poisoned=True)
    yield Plan("other values at the same addresses", usual)
    yield from _magnitudes(problem)
    if problem.scaled:
        yield Plan("alpha=0", replace(usual, alpha=0.0))
    if problem.groups is not None and problem.groups.a_index is not None:
        recipe = replace(usual, reads="one", sizes="skewed")
        yield Plan("one row of a to gather", recipe, "own")
    if problem.a.dtype.is_floating_point:
        yield Plan("many NaN and Inf", replace(usual, alpha=0.5, sizes="even"), flooded=True)
    yield Plan("strides of zero", Recipe(alpha=2.0), "expanded")
    yield Plan("one tensor as several arguments", Recipe(alpha=1.25), "shared")


def _magnitudes(problem: Problem) -> Iterator[Plan]:
    """Operands of different magnitudes; and, where the result is the product itself, sums that
    cancel and results of small magnitude."""
    dtype, linear = problem.a.dtype, problem.epilogue.is_identity
    plain = dtype in _SHIFTS and problem.b.dtype == dtype
    down, up = (2.0 ** (-_SHIFTS[dtype][0]), 2.0 ** _SHIFTS[dtype][1]) if plain else (1.0, 1.0)
    terms = min(1.0, down * up)
    alpha = 300.0 if linear else 3.0
    if plain or problem.groups is not None:
        small_a, small_b = Values(down, up, terms), Values(up, down, terms)
        yield Plan("a small, b large", Recipe(small_a, alpha, "one", poisoned=True))
        yield Plan("a large, b small", Recipe(small_b, 1 / alpha, "sparse", poisoned=True))
    half = dtype in (torch.float16, torch.bfloat16)
    if plain and half and linear and problem.along != "k" and problem.k >= 4:
        yield Plan("sums that cancel", Recipe(Values(cancelling=True), 0.75, poisoned=True))
    if dtype == problem.out.dtype == torch.float16 and plain and linear:
        small = Values(_SUBNORMAL, 1.0, _SUBNORMAL)
        yield Plan("subnormal results", Recipe(small, 0.875, poisoned=True))


class Round:
    """One launch on further inputs, whose reference is computed once."""

    def __init__(self, data: DataSets, plan: Plan) -> None:
        self.plan = plan
        self._data = data
        self._seed = random_inputs.new_seed()
        self._expected: Expected | None = None
        self._kinds: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        #: The tolerance added for fp16's coarse subnormal numbers, and for sums that cancel.
        self.slack = 0.0

    def inputs(self) -> Inputs:
        """Draw the values into memory, and return the arguments of the launch."""
        data, plan = self._data, self.plan
        if plan.place == "same":
            made = rewritten(data, data.sets()[-1], plan.recipe, self._seed)
        else:
            made = random_inputs.make(
                data.problem, data.device, seed=self._seed, recipe=plan.recipe,
                allocate=functools.partial(_allocate, data, plan.place, {}),
            )  # fmt: skip
        if plan.flooded:
            _flood(made.a.data, self._seed)
        return made

    def error(self, inputs: Inputs, result: torch.Tensor) -> float:
        """Return the result's error: NaN if a non-finite value is missing or in the wrong place."""
        data = self._data
        if self.plan.flooded:
            return self._kinds_differ(inputs, result)
        expected = self._expected or data.expect(inputs, whole=False)
        self.slack = 0.0
        if data.problem.out.dtype == torch.float16:
            self.slack += _STEP / float(expected.rms)
        if self.plan.recipe.values.cancelling:
            self.slack += data.problem.k * _TRUNCATED * random_inputs.CANCELLED
        if self._is_kept(expected.in_rows):
            self._expected = expected
        return expected.error(result, data.at_once).item()

    def _is_kept(self, reference: torch.Tensor) -> bool:
        """Whether a reference of that size is kept for the next launcher."""
        return reference.nbytes <= self._data.limit // _KEPT

    def _kinds_differ(self, inputs: Inputs, result: torch.Tensor) -> float:
        problem = self._data.problem
        rows, cols = self._data.sampled(inputs)
        if self._kinds is None:
            of = functools.partial(marks, problem)
            room = self._data.limit // 16
            kinds, free = split(reference(problem, inputs, rows, cols, room, of))
        else:
            rows, kinds, free = self._kinds
        if self._is_kept(kinds):
            self._kinds = rows, kinds, free
        found = kinds_of(result[..., rows, :][..., cols])
        return math.nan if bool(((found != kinds) & ~free).any()) else 0.0


def rounds_of(data: DataSets) -> list[Round]:
    """The rounds of the test data. There are none if the caller gave the inputs, and none in other
    memory if two sets do not fit."""
    if data.rounds is None:
        data.rounds = []
        of, problem = data.sets()[-1], data.problem
        if of.recipe is not None and 0 not in problem.out_shape:
            fits = sum(g.words.nbytes for g in of.checksums.memory.values())
            fits = fits <= data.limit // _SHARE
            for plan in planned(problem):
                if _applies(problem, plan.place) and (fits or plan.place == "same"):
                    data.rounds.append(Round(data, plan))
    return data.rounds


@contextlib.contextmanager
def restoring(data: DataSets) -> Iterator[None]:
    """Put the values of the last set back at the end."""
    try:
        yield
    finally:
        of = data.sets()[-1]
        assert of.recipe is not None
        rewritten(data, of, of.recipe, of.seed)


def rewritten(data: DataSets, of: InputSet, recipe: Recipe, seed: int) -> Inputs:
    """Draw other values into the tensors of a set, whose objects and versions stay the same."""
    memory = of.checksums.memory
    assert of.recipe is not None
    recipe = replace(recipe, reads=of.recipe.reads)  # the number of rows of `a` stays

    def allocate(name: str, spec: Operand, shape: tuple[int, ...]) -> torch.Tensor:
        return memory[name].tensor.data  # has a version counter of its own

    made = random_inputs.make(
        data.problem, data.device, seed=seed, allocate=allocate, recipe=recipe
    )
    rows, before = made.rows, of.inputs.rows
    if rows is not None and before is not None:
        kept = {name: getattr(before, name) for name in ROWS}
        for name, t in kept.items():
            if t is not None:
                t.data.copy_(getattr(rows, name))
        rows = replace(rows, **kept)
    return replace(of.inputs, alpha=made.alpha, rows=rows)


def _applies(problem: Problem, place: Place) -> bool:
    """Whether a problem allows this place."""
    if place == "shared":
        return problem.groups is None and bool(_aliases(problem))
    if place == "expanded":
        if problem.bias is not None:
            return True
        operands = [(problem.a, problem.a_shape), (problem.b, problem.b_shape)]
        operands += [(problem.residual, problem.out_shape)] if problem.residual else []
        return any(0 in expanded_layout(spec, shape).strides for spec, shape in operands)
    return True


def _aliases(problem: Problem) -> dict[str, str]:
    """The arguments that may be the same tensor as another."""
    like: dict[tuple[Operand, tuple[int, ...]], str] = {(problem.a, problem.a_shape): "a"}
    found = {}
    for name, spec, shape in (
        ("b", problem.b, problem.b_shape),
        ("residual", problem.residual, problem.out_shape),
    ):
        if spec is not None and (other := like.setdefault((spec, shape), name)) != name:
            found[name] = other
    return found


def _allocate(
    data: DataSets,
    place: Place,
    made: dict[str, torch.Tensor],
    name: str,
    spec: Operand,
    shape: tuple[int, ...],
) -> torch.Tensor:
    if place == "shared" and (other := _aliases(data.problem).get(name)):
        return made[other]
    placed: MemoryLayout = memory_layout(spec, shape)
    if place == "expanded" and name == "bias":
        placed = vector_layout(spec, shape, 0)
    elif place == "expanded" and name in ("a", "b", "residual"):
        placed = expanded_layout(spec, shape)
    made[name] = with_guard_bands(placed, data.device, UNREADABLE).tensor
    return made[name]


def _flood(a: torch.Tensor, seed: int) -> None:
    """Fill two of five rows with NaN, and set one element of another row to Inf and of another to
    −Inf."""
    values = values_of(a.dtype)
    term = seed % max(1, a.shape[-1])
    for first in (0, 1):
        a[..., first::5, :].fill_(math.nan)
    for first, value in enumerate(values[1:], 2):
        a[..., first::5, term : term + 1].fill_(value)
