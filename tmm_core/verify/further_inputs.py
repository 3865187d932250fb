"""Further inputs for verification, one launch each: other values, magnitudes, alphas and layouts.

A kernel that caches by address, accumulates in fp16, or reads a bias as if it were contiguous is
right on usual inputs. Most rounds rewrite the last set of inputs in place, without raising the
version that torch counts. To a kernel they look like tensors that it has seen before.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from tmm_core.spec.arguments import ROWS
from tmm_core.spec.operand import Layout, Operand
from tmm_core.spec.problem import Problem
from tmm_core.verify import random_inputs
from tmm_core.verify.data_sets import DataSets, Expected, InputSet, differing
from tmm_core.verify.guard_bands import (
    UNREADABLE,
    UNWRITTEN,
    GuardedTensor,
    MemoryLayout,
    checksums,
    expanded_layout,
    in_class,
    in_one_memory,
    memory_layout,
    unusual_layout,
    vector_layout,
    with_guard_bands,
)
from tmm_core.verify.nonfinite import expected_kinds, kinds_of, values_of
from tmm_core.verify.ragged_inputs import Inputs, Sizes
from tmm_core.verify.random_inputs import USUAL, Recipe, Values

#: torch's modes in which calls are made. Training launches without grad mode, serving in inference
#: mode, and a call with plain tensors in grad mode. Plans and calls with ``out`` also launch under
#: autocast; other calls turn it off below the operator that casts.
Mode = Literal["grad mode", "no_grad", "inference mode", "autocast", "autocast in inference mode"]
#: Where the tensors of a round are. ``same``: in the memory of the last set. ``restrided``: at the
#: same addresses, with the strides of the first set. ``own``: in memory of
#: their own between guard bands. ``plain``: as torch allocates them; the bias and the residual are
#: the same tensors as other arguments, if their shapes allow it. ``shared``: likewise, and b is
#: one, too. ``expanded`` and similar: with strides of zero. ``apart``, ``near``: with rows apart or
#: overlapping (:func:`unusual_layout`).
Place = Literal[
    "same", "restrided", "own", "plain", "expanded", "expanded b", "all expanded",
    "expanded columns", "apart", "near", "shared",
]  # fmt: skip
#: Operands with strides of zero.
_EXPANDED: dict[str, tuple[str, ...]] = {
    "expanded": ("a", "residual"),
    "expanded b": ("b",),
    "all expanded": ("a", "b", "residual"),
    "expanded columns": ("a", "b", "residual"),
}
#: Arguments that a model makes in inference mode, where its weights are parameters.
_ACTIVATIONS = ("a", "residual")

#: Exponents by which one operand is scaled down and the other up.
_SHIFTS = {torch.float16: (16, 8), torch.bfloat16: (100, 100), torch.float32: (60, 60)}
#: Exponents by which both operands are scaled up, where alpha scales the product down.
_LARGE = {torch.float16: 6, torch.bfloat16: 55, torch.float32: 55}
#: Factors of operands whose products are large: exp(88) overflows fp32.
_FACTORS = {torch.float16: 8.0, torch.bfloat16: 32.0, torch.float32: 32.0}
#: The stride of a bias whose elements are not adjacent.
_APART = 67
#: fp16 results of this size are subnormal.
_SUBNORMAL = 2.0**-18
#: Error per product of a sum that cancels, relative to its largest partial sum. Tensor cores add 16
#: products at a time to an fp32 sum, and truncate the sum by up to 2⁻²³. Twice that is allowed. An
#: H200 lost 4.6e-3 of the result at K = 14336, where the limit is 1.4e-2.
_TRUNCATED = 2.0**-26
#: A round's tensors may take the memory limit divided by this number.
_SHARE = 16


_FLIPPED: dict[str, Layout] = {"row": "col", "col": "row"}


@dataclass(frozen=True, slots=True)
class Plan:
    """The description of a round."""

    name: str
    recipe: Recipe
    place: Place = "same"
    #: NaN and Inf in four of five rows of ``a``, and in columns of ``b``.
    flooded: bool = False
    #: The values of the last set are in another order, with the same sums.
    rolled: bool = False
    #: All results exceed fp16's range.
    infinite: bool = False
    mode: Mode = "grad mode"
    #: Only values are unusual: one launch suffices for all forms of a launcher.
    of_values: bool = False

    @property
    def nonfinite(self) -> bool:
        """Whether results contain NaN and Inf, so that only the kind of each number is compared."""
        return self.flooded or math.isnan(self.recipe.alpha)

    @property
    def judges_outputs(self) -> bool:
        """Whether auxiliary outputs are compared: their functions may amplify errors of unusual
        magnitudes."""
        return self.recipe.values == USUAL and not (self.nonfinite or self.infinite)


def planned(problem: Problem) -> Iterator[Plan]:
    """Yield the rounds of a problem; the first suffices to detect a cache by address."""
    usual = Recipe(alpha=-1.0, sizes="small")
    yield Plan("other values at the same addresses", usual)
    if problem.groups is None:
        yield Plan("values in another order", Recipe(alpha=3.0), rolled=True)
    else:
        yield from _sizes(problem)
    yield from _magnitudes(problem)
    yield from _patterns(problem)
    if problem.scaled:
        yield from _alphas(problem)
    if problem.a.dtype.is_floating_point:
        yield Plan("many NaN and Inf", replace(usual, alpha=0.5, sizes="even"), flooded=True)
    # All rows of an expanded tensor are one row in memory, which cannot be poisoned.
    yield Plan("strides of zero", Recipe(alpha=2.0, poisoned=False), "expanded")
    shared = Recipe(alpha=1.75, poisoned=False)
    yield Plan("strides of zero in b", shared, "expanded b")
    yield Plan("strides of zero in all operands", shared, "all expanded")
    yield Plan("strides of zero between columns", shared, "expanded columns")
    yield Plan("rows far apart", Recipe(alpha=1.5), "apart", mode="inference mode")
    yield Plan("unusual addresses", Recipe(alpha=-2), "near", mode="no_grad")
    plain = Recipe(alpha=1.25, sizes="equal", weights=True)
    yield Plan("plain or equal tensors", plain, "plain", mode="inference mode")
    yield Plan("one tensor as several arguments", Recipe(alpha=1.25), "shared")
    # The last one: it overwrites gaps of the last set.
    yield Plan("other strides at the same addresses", Recipe(alpha=-1.5), "restrided")


def _sizes(problem: Problem) -> Iterator[Plan]:
    """Extremes of group sizes, and rows that are gathered out of one or in order."""
    assert problem.groups is not None
    some: tuple[Sizes, ...] = ("first", "last", "none", "few", "rising", "falling")
    for sizes in some:
        recipe = Recipe(sizes=sizes, alpha=1.5, weights=True)
        yield Plan(f"group sizes: {sizes}", recipe)
    if problem.groups.a_index is None and problem.groups.out_index is not None:
        yield Plan("all rows in order", Recipe(reads="same", alpha=1.5), "own")
    if problem.groups.a_index is not None:
        one = Recipe(reads="one", alpha=-1.0)
        yield Plan("one row of a to gather", one, "own")
        yield Plan("all rows of a in order", Recipe(reads="same", alpha=1.5), "own")
        yield Plan("each row of a twice", Recipe(reads="twice", alpha=1.5), "own")


def _patterns(problem: Problem) -> Iterator[Plan]:
    """Operands that are zero, of one sign, of one number or one-hot, with positive alphas as
    attention has them and larger ones; and unusual scales."""
    chance = random.Random(random_inputs.new_seed())
    wide = problem.out.dtype.itemsize > 2 or problem.out.dtype is torch.bfloat16
    most = 3.0 if problem.epilogue.is_identity else 0.5
    each = [
        ("a of zeros", Values(a=0.0, terms=0.0), (-2, -1)),
        ("b of zeros", Values(b=0.0, of_a="positive"), (most - 1, most)),
        ("positive numbers", Values(of_a="positive", of_b="positive"), (-1, -0.4)),
        ("one-hot rows", Values(of_a="one-hot", of_b="negative"), (0.6, most)),
        ("one number in each operand", Values(of_a="one number", of_b="one number"), (-2, -1)),
    ]
    if problem.scaled and wide and problem.epilogue.is_identity:
        each.append(("a large alpha", Values(), (4.5, 6)))
    if problem.parts:
        each.append(("scales of any size", Values(scales=True), (-0.5, 0.5)))
    for name, values, exponents in each:
        alpha = 10 ** chance.uniform(*exponents)
        yield Plan(name, Recipe(values, alpha, "even"), of_values=True)


def _alphas(problem: Problem) -> Iterator[Plan]:
    """Alphas of each sign and magnitude."""
    chance = random.Random(random_inputs.new_seed())
    most = 3.0 if problem.epilogue.is_identity else 0.5
    yield Plan("alpha=0", Recipe(alpha=0.0, sizes="small"))
    if problem.a.dtype.is_floating_point:
        yield Plan("alpha=nan", Recipe(alpha=math.nan))
    for exponent in (chance.uniform(-2.5, -1), chance.uniform(most - 0.5, most)):
        alpha = -(10**exponent)
        yield Plan(f"alpha={alpha:.3g}", Recipe(alpha=alpha))
    if (large := _LARGE.get(problem.a.dtype)) and problem.b.dtype is problem.a.dtype:
        values = Values(2.0**large, 2.0**large)
        recipe = Recipe(values, alpha=2.0 ** (-2 * large))
        yield Plan("large products and a small alpha", recipe)


def _magnitudes(problem: Problem) -> Iterator[Plan]:
    """Operands of different magnitudes; and, where the result is the product itself, sums that
    cancel and results of small magnitude."""
    dtype, linear = problem.a.dtype, problem.epilogue.is_identity
    plain = dtype in _SHIFTS and problem.b.dtype == dtype
    down, up = (2.0 ** (-_SHIFTS[dtype][0]), 2.0 ** _SHIFTS[dtype][1]) if plain else (1.0, 1.0)
    terms = min(1.0, down * up)
    # Results in fp16 have terms like the product; other dtypes also large ones.
    wide = plain and problem.out.dtype in (torch.bfloat16, torch.float32)
    alpha, more = (3000.0, 2.0**30 if wide else terms) if linear else (3.0, terms)
    if plain or problem.groups is not None:
        small_a, small_b = Values(down, up, terms), Values(up, down, more)
        yield Plan("a small, b large", Recipe(small_a, alpha, "one"))
        least = 1 / 300 if linear else 1 / alpha
        yield Plan("a large, b small", Recipe(small_b, least, "sparse"))
    if not dtype.is_floating_point and not dtype.is_complex and not problem.stored:
        yield Plan("integers of any size", Recipe(Values(whole=True)))
    half = dtype in (torch.float16, torch.bfloat16)
    summed = problem.along != "k" and problem.k >= 4
    if plain:
        yield Plan("zeros and whole numbers", Recipe(Values(sparse=True), 0.875))
    cancels = plain and half and summed and not problem.gated
    if plain and not (cancels and linear):
        size = _FACTORS[dtype]
        values = Values(size, size, size**2 if problem.out.dtype is dtype else 1.0)
        yield Plan("large products", Recipe(values, 1.125))
    if cancels:
        yield Plan("sums that cancel", Recipe(Values(cancelling=True), 0.75))
    if plain and summed and problem.out.dtype is torch.float16 and not problem.gated:
        fused = problem.batch == 1 and problem.groups is None  # by torch's own operator, too
        if problem.bias is torch.float16 and not problem.scaled and fused:
            values = Values(sum=8e4, bias=-3e4)
            yield Plan("products beyond fp16's range", Recipe(values))
        if linear and problem.groups is None:
            beyond = Values(sum=3e5)
            yield Plan("results beyond fp16's range", Recipe(beyond), infinite=True)
    if dtype == problem.out.dtype == torch.float16 and plain and linear:
        small = Values(_SUBNORMAL, 1.0, _SUBNORMAL)
        yield Plan("subnormal results", Recipe(small, 0.875))


class Round:
    """Further inputs, drawn into memory, for one launch of each form: the other kind of
    :class:`InputSet`."""

    once = True

    def __init__(self, data: DataSets, plan: Plan) -> None:
        self.plan, self._data = plan, data
        self._seed = random_inputs.new_seed()
        self._out: GuardedTensor | None = None
        self.called, self.judges_outputs = f", with {plan.name}", plan.judges_outputs
        #: Functions that return checksums of an argument's memory, or copies of group sizes.
        self._sums: dict[str, Callable[[], torch.Tensor]] = {}
        #: The arguments of the reference.
        self.drawn = self._drawn()
        rows = self.drawn.rows.given if self.drawn.rows else {}
        self._sums |= {name: t.clone for name, t in rows.items()}
        self._at_first = {name: sums() for name, sums in self._sums.items()}

    def _drawn(self) -> Inputs:
        data, plan = self._data, self.plan
        of = data.sets()[-1]
        if plan.place in ("same", "restrided"):
            self._sums = {name: each.sums for name, each in of.memory.items()}
        if plan.rolled:
            made = rewritten(data, of, of.recipe, of.seed)
            made = replace(made, alpha=plan.recipe.alpha if data.problem.scaled else 1.0)
            for t in made.tensors.values():
                # CUDA rolls no 8-bit floats.
                stored = t.data.view(torch.uint8) if t.dtype.itemsize == 1 else t.data
                stored.copy_(stored.roll(1, -1))
        elif plan.place == "same":
            made = rewritten(data, of, plan.recipe, self._seed)
        elif plan.place == "restrided":
            for each in of.memory.values():
                each.refill()
            made = rewritten(data, of, plan.recipe, self._seed, restrided=True)
            out = data.out(1)
            out.refill()
            self._out = replace(out, tensor=_restrided("out", out.tensor, data.problem.out))
        else:
            with torch.inference_mode(plan.mode == "inference mode"):
                made = self._in_own_memory()
        if plan.flooded:
            _flood(made.a.data, made.b.data, self._seed)
        return made

    def _in_own_memory(self) -> Inputs:
        data, place = self._data, self.plan.place
        own = _OwnMemory(data, place)
        made = random_inputs.make(
            data.problem, data.device, seed=self._seed, recipe=self.plan.recipe, allocate=own
        )
        self._sums = {name: functools.partial(checksums, t) for name, t in own.made.items()}
        self._sums |= {name: each.sums for name, each in own.memory.items()}
        if place not in ("apart", "near"):
            return made
        spec = data.problem.out
        placed = unusual_layout(spec, data.problem.out_shape, near=place == "near")
        self._out = with_guard_bands(placed, data.device, UNWRITTEN, spec)
        if place == "apart":
            guarded = {n: replace(own.memory[n], tensor=t) for n, t in made.tensors.items()}
            moved = in_one_memory({**guarded, "out": self._out})
            self._out = moved.pop("out")
            self._sums |= {name: each.sums for name, each in moved.items()}
            given: dict[str, Any] = {name: each.tensor for name, each in moved.items()}
            return replace(made, **given)
        return made

    @property
    def inputs(self) -> Inputs:
        """The arguments of a launch: in training they require gradients, and a layer passes
        parameters, which may be frozen."""
        inputs = self.drawn
        if self.plan.place == "plain":
            return replace(inputs, b=torch.nn.Parameter(inputs.b, requires_grad=False))
        if self.plan.place != "near":
            return inputs

        def needs(t: torch.Tensor | None, weight: bool) -> Any:
            if t is None or not t.is_floating_point():
                return t
            if weight:
                return torch.nn.Parameter(t)
            with torch.enable_grad():
                return t.detach().requires_grad_().view_as(t)  # as a layer's result

        given = {name: needs(t, name not in _ACTIVATIONS) for name, t in inputs.tensors.items()}
        rows = inputs.rows
        if rows is not None:
            rows = replace(rows, out_weights=needs(rows.out_weights, weight=False))
        return replace(inputs, **given, rows=rows)

    def out(self) -> GuardedTensor | None:
        """The output of a round with unusual strides, filled with small numbers: a launch may not
        read it. None if strides are usual."""
        if self._out is not None:
            self._out.tensor.fill_(0.5)
        return self._out

    def changed(self) -> list[str]:
        """Return the names of arguments that launches changed, or whose gaps or guard bands they
        did."""
        return differing({name: sums() for name, sums in self._sums.items()}, self._at_first)

    def error(self, out: torch.Tensor, at_once: int) -> float:
        """Return a result's error: NaN if a non-finite value is missing or in the wrong place."""
        if self.plan.nonfinite:
            rows, cols, kinds, free = self._kinds
            wrong = (kinds_of(out[..., rows, :][..., cols]) != kinds) & ~free
            return math.nan if bool(wrong.any()) else 0.0
        if self.plan.infinite:
            return 0.0 if bool(out.isposinf().all()) else math.nan
        judged = self._is_judged(self.expected.in_rows.numbers)
        return self.expected.error(out, at_once).item() if judged else 0.0

    @property
    def slack(self) -> float:
        """The tolerance added for sums that cancel."""
        if not self.plan.recipe.values.cancelling:
            return 0.0
        problem = self._data.problem
        times = 1 if problem.epilogue.is_identity else 2
        return times * problem.k * _TRUNCATED * random_inputs.CANCELLED

    def refer(self) -> object:
        """Compute what results are compared with, and return it: as long a step as a launch."""
        if self.plan.nonfinite:
            return self._kinds
        return None if self.plan.infinite else self.expected

    @functools.cached_property
    def expected(self) -> Expected:
        """The reference."""
        return self._data.expect(self.drawn, whole=False)

    @functools.cached_property
    def _kinds(self) -> tuple[torch.Tensor, slice, torch.Tensor, torch.Tensor]:
        """Rows and columns to compare where only kinds are, the kinds there, and where any result
        is accepted."""
        rows, cols = self._data.sampled(self.drawn)
        room = self._data.limit // 16
        return rows, cols, *expected_kinds(self._data.problem, self.drawn, rows, cols, room)

    def _is_judged(self, expected: torch.Tensor) -> bool:
        """Whether results can be judged. The epilogue must leave them finite before they are
        rounded to their dtype and, for sums that cancel, about as large as the sums. If it
        saturates, small errors become large relative to the results."""
        values, epilogue = self.plan.recipe.values, self._data.problem.epilogue
        if values == USUAL or epilogue.is_identity or not expected.numel():
            return True
        least = random_inputs.SPREAD / 8 if values.cancelling else 0.0
        wide = expected.is_floating_point() or expected.is_complex()
        most = torch.finfo(expected.dtype).max / 2 if wide else math.inf
        return least <= float(expected.abs().max()) <= most  # NaN compares false


def plans_of(data: DataSets) -> list[Plan]:
    """Return the rounds of the test data; none in other memory if two sets do not fit."""
    of, problem = data.sets()[-1], data.problem
    if 0 in problem.out_shape:
        return []
    fits = sum(g.words.nbytes for g in of.memory.values()) <= data.limit // _SHARE
    return [
        plan
        for plan in planned(problem)
        if _applies(problem, plan.place) and (fits or plan.place in ("same", "restrided"))
    ]


@contextlib.contextmanager
def restoring(data: DataSets) -> Iterator[None]:
    """Put the values of the last set back at the end."""
    try:
        yield
    finally:
        of = data.sets()[-1]
        if not data.altered:  # else the set is released
            for each in of.memory.values():
                each.refill()
            rewritten(data, of, of.recipe, of.seed)


def rewritten(
    data: DataSets, of: InputSet, recipe: Recipe, seed: int, restrided: bool = False
) -> Inputs:
    """Draw other values into the tensors of a set, whose objects and versions stay the same; or, if
    ``restrided``, into new tensors in their memory."""
    memory = of.memory
    recipe = replace(recipe, reads=of.recipe.reads)  # the number of rows of `a` stays

    def allocate(name: str, spec: Operand, shape: tuple[int, ...]) -> torch.Tensor:
        t = memory[name].tensor.data  # has a version counter of its own
        return _restrided(name, t, spec) if restrided else t

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
    given = made if restrided else of.inputs
    return replace(given, alpha=made.alpha, rows=rows)


def _restrided(name: str, t: torch.Tensor, spec: Operand) -> torch.Tensor:
    """Return an operand, term or output of the last set with the strides of the first one, at the
    same address; or itself, if a tensor there would be of another class."""
    if name not in ("a", "b", "bias", "residual", "out"):
        return t
    shape = tuple(t.shape)
    placed = vector_layout(spec, shape, 1) if name == "bias" else memory_layout(spec, shape)
    moved = t.as_strided(shape, placed.strides)
    return moved if name == "bias" or in_class(moved, spec) else t


def _applies(problem: Problem, place: Place) -> bool:
    """Whether a problem allows this place."""
    if place == "shared":
        return "b" in _aliases(problem)
    if place == "all expanded":
        return _applies(problem, "expanded") and _applies(problem, "expanded b")
    if place == "expanded columns":
        return any(t and t.layout == "strided" for t in (problem.a, problem.b, problem.residual))
    if place == "expanded b":
        return 0 in expanded_layout(problem.b, problem.b_shape).strides
    if place == "expanded":
        if problem.bias is not None:
            return True
        operands = [(problem.a, problem.a_shape)]
        operands += [(problem.residual, problem.out_shape)] if problem.residual else []
        return any(0 in expanded_layout(spec, shape).strides for spec, shape in operands)
    return True


def _aliases(problem: Problem) -> dict[str, str]:
    """Return the arguments that may be the same tensor as another."""
    if problem.groups is not None:
        return {}
    like: dict[tuple[Operand, tuple[int, ...]], str] = {(problem.a, problem.a_shape): "a"}
    if problem.a.layout in _FLIPPED and problem.a.format == "":
        flipped = replace(problem.a, layout=_FLIPPED[problem.a.layout])
        *batch, rows, cols = problem.a_shape
        like[flipped, (*batch, cols, rows)] = "a.mT"
    found = {}
    for name, spec, shape in (
        ("b", problem.b, problem.b_shape),
        ("residual", problem.residual, problem.out_shape),
    ):
        if spec is not None and (other := like.setdefault((spec, shape), name)) != name:
            found[name] = other
    return found


@dataclass(frozen=True)
class _OwnMemory:
    """Allocates the tensors of a round that is not in the memory of the last set."""

    data: DataSets
    place: Place
    #: The tensors so far, by name, and the memory of those between guard bands.
    made: dict[str, torch.Tensor] = field(default_factory=dict)
    memory: dict[str, GuardedTensor] = field(default_factory=dict)

    def __call__(self, name: str, spec: Operand, shape: tuple[int, ...]) -> torch.Tensor:
        allocate = self.plain if self.place in ("plain", "shared") else self.guarded
        self.made[name] = allocate(name, spec, shape)
        return self.made[name]

    def guarded(self, name: str, spec: Operand, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor between guard bands."""
        place = self.place
        kept: Operand | None = None
        placed: MemoryLayout = memory_layout(spec, shape)
        if place in ("apart", "near") and name == "bias":
            placed = vector_layout(spec, shape, _APART if place == "apart" else 1)
            placed = replace(placed, offset=1)
        elif place in ("apart", "near") and name in ("a", "b", "residual"):
            near, kept = place == "near", spec
            tight = near and self.data.problem.groups is None
            placed = unusual_layout(spec, shape, near=near, overlapping=tight)
        elif place == "expanded" and name == "bias":
            placed = vector_layout(spec, shape, 0)
        elif name in _EXPANDED.get(place, ()):
            placed = expanded_layout(spec, shape, columns=place == "expanded columns")
        self.memory[name] = with_guard_bands(placed, self.data.device, UNREADABLE, kept)
        return self.memory[name].tensor

    def plain(self, name: str, spec: Operand, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor as torch allocates it, or another argument."""
        problem, made = self.data.problem, self.made
        other = _aliases(problem).get(name)
        if other is not None and (self.place, name) != ("plain", "b"):
            return made["a"].mT if other == "a.mT" else made[other]
        if name == "bias" and problem.groups is None:
            for t in made.values():
                if t.numel() and t.dtype is spec.dtype and t.shape[-1] == shape[1]:
                    return t[..., :1, :].reshape(1, -1) if t.dim() == 2 else t[0, :1]
        with torch.inference_mode(torch.is_inference_mode_enabled() and name in _ACTIVATIONS):
            return random_inputs.empty(spec, shape, self.data.device)


def _flood(a: torch.Tensor, b: torch.Tensor, seed: int) -> None:
    """Fill rows of ``a`` with NaN, and some with Inf. Set one element of other rows to Inf or −Inf;
    some of these rows also get a NaN. Set one element of some columns of ``b`` to Inf or zero."""
    values = values_of(a.dtype)
    term = seed % max(1, a.shape[-1])
    a[..., 0::5, :].fill_(math.nan)
    for first, value in enumerate(values[1:], 2):
        a[..., first::5, term : term + 1].fill_(value)
        a[..., first + 10 :: 15, :].fill_(value)
    a[..., 1::5, term : term + 1].fill_(values[-1])
    a[..., 1::5, term - 1 :][..., :1].fill_(math.nan)
    if len(values_of(b.dtype)) > 1 and a.shape[-1] == b.shape[-2]:
        b[..., term : term + 1, 3::7].fill_(0)
        b[..., term - 1 :, 4::7][..., :1, :].fill_(math.inf)
