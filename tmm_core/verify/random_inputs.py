"""Makes the inputs of a problem, for tuning, verification, benchmarks and conformance suites.

:func:`fill` draws the values. :func:`make` also allocates tensors of the problem's stride classes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from tmm_core.formats import Format, grids
from tmm_core.spec.arguments import PARTS
from tmm_core.spec.operand import Operand
from tmm_core.spec.problem import Problem
from tmm_core.verify.guard_bands import memory_layout
from tmm_core.verify.ragged_inputs import Inputs, Reads, Rows, Sizes

Tensor = torch.Tensor

#: Makes an uninitialised tensor, given the argument's name, its stride class and its shape.
Empty = Callable[[str, Operand, tuple[int, ...]], Tensor]


#: Numbers that all elements of an operand have in common. ``one-hot``: one of each row is one, all
#: others are zero.
Pattern = Literal["", "positive", "negative", "one number", "one-hot"]


@dataclass(frozen=True, slots=True)
class Values:
    """Magnitudes of a set of inputs, relative to the usual ones.

    Attributes:
        a, b, terms: Factors on the operands, and on the bias and the residual.
        of_a, of_b: Patterns of the operands.
        cancelling: Sums grow beyond fp16's range and return: the first half of a's columns is
            positive, the other half negative, and b is positive.
        sum: All operands are positive, and the product is about this number; the bias is about
            ``bias``.
        whole: Integers are drawn from the whole range of their dtype.
        sparse: Operands are whole numbers from zero, most of them zero. A third of a's rows and of
            b's columns are zero. Some of a's rows are equal.
        scales: Scales are of several magnitudes, some of them zero if there are many, and many
            stored numbers are the largest or smallest of their format.
    """

    a: float = 1.0
    b: float = 1.0
    terms: float = 1.0
    cancelling: bool = False
    sum: float = 0.0
    bias: float = 1.0
    whole: bool = False
    sparse: bool = False
    scales: bool = False
    of_a: Pattern = ""
    of_b: Pattern = ""

    def pattern(self, name: str) -> Pattern:
        return {"a": self.of_a, "b": self.of_b}.get(name, "")

    def factor(self, name: str) -> float:
        return {"a": self.a, "b": self.b, "bias": self.terms, "residual": self.terms}.get(name, 1.0)


USUAL = Values()

#: The largest partial sum of inputs that cancel: four times fp16's largest number.
PEAK = 2.0**18
#: The spread of the results of inputs that cancel.
SPREAD = 4e3
#: The largest partial sum, relative to the results.
CANCELLED = PEAK / SPREAD


@dataclass(frozen=True, slots=True)
class Recipe:
    """How inputs are made.

    Attributes:
        sizes, reads: The group sizes and gathered rows of a ragged problem.
        whole: Groups cover everything; else the inputs are NaN beyond the last group.
        poisoned: Elements that no group reads are NaN.
        alpha: The factor, for a problem that has one.
        weights: The weights of rows are of any sign and size, some of them zero.
    """

    values: Values = USUAL
    alpha: float = 0.5
    sizes: Sizes = "skewed"
    reads: Reads = "fewer"
    whole: bool = True
    poisoned: bool = True
    weights: bool = False


#: The recipe for timing and comparing, without poison, which takes launches and memory.
DEFAULT = Recipe(poisoned=False)

#: Maximum number of 16-bit numbers that are drawn as fp32.
_AT_ONCE = 1 << 20


def fill(
    name: str,
    t: Tensor,
    k: int,
    generator: torch.Generator,
    values: Values = USUAL,
    form: Format | None = None,
) -> Tensor:
    """Fill ``t``, the argument ``name`` of a product that sums ``k`` terms, with random numbers.

    They are normally distributed: zeros and constants run faster on real hardware and hide wrong
    indexing. All but the bias are scaled by K^-¼, so that the product has unit variance. An
    epilogue is then tested where it is nonlinear, and not where it saturates or overflows fp16.
    Scales are around one; a format with a limit has scales that give its stored numbers the same
    spread. Integers are drawn from −8 to 8.

    Args:
        form: The format of an operand, or of the operand to which a part belongs.
    """
    once = _distinct(t)
    limit = form.limit if form is not None else None
    # Four standard deviations of the values are the largest stored number.
    unit = 1.0 if limit is None else 4 * max(1, k) ** -0.25 / limit
    spread = values.factor(name) * (1.0 if name == "bias" else max(1, k) ** -0.25)
    is_operand, pattern = name in ("a", "b"), values.pattern(name)
    if name.endswith("_scale"):
        _fill_scales(once, unit, values, generator)
    elif name.endswith("_zero"):
        drawn = torch.randint(-8, 9, once.shape, generator=generator, device=t.device)
        once.copy_(drawn if form is None or not form.origin else drawn.abs())
    elif values.cancelling and is_operand:
        _cancel(name, t, k, generator)
    elif values.sparse and is_operand:
        _sparse(name, t, generator)
    elif values.sum and (is_operand or name == "bias"):
        size = values.bias if name == "bias" else (values.sum / max(1, k)) ** 0.5
        numbers = torch.empty(once.shape, dtype=torch.float32, device=t.device)
        once.copy_(numbers.uniform_(0.95, 1.05, generator=generator).mul_(size))
    elif form is not None:
        sizes = *once.shape[:-1], once.shape[-1] * form.pack
        numbers = torch.empty(sizes, dtype=torch.float32, device=t.device)
        _draw(numbers, pattern, generator).mul_(spread / unit * (2 if values.scales else 1))
        once.copy_(form.packed(form.quantize(numbers, t.dtype)))
    elif not spread:
        once.zero_()
    elif t.is_floating_point() or t.is_complex():
        _fill_numbers(once, pattern, spread, generator)
    else:
        _fill_integers(once, pattern, values.whole, generator)
    return t


def _fill_scales(t: Tensor, unit: float, values: Values, generator: torch.Generator) -> None:
    """Fill scales with numbers around ``unit``."""
    drawn = torch.empty(t.shape, dtype=torch.float32, device=t.device)
    exponents = t.dtype is grids.EXPONENT
    least, most = (0.7 * unit, 2.8 * unit) if exponents else (0.5 * unit, 1.5 * unit)
    drawn.uniform_(least, most, generator=generator)
    if values.scales:
        powers = torch.empty_like(drawn).uniform_(-2.5, 0.5, generator=generator)
        drawn *= 10**powers
        if not exponents and drawn.numel() > 1:
            longest = max(range(drawn.dim()), key=lambda dimension: drawn.shape[dimension])
            drawn.movedim(longest, 0)[1::4] = 0
    t.copy_(grids.exponents(drawn) if exponents else drawn)


def _fill_numbers(t: Tensor, pattern: Pattern, spread: float, generator: torch.Generator) -> None:
    """Fill a tensor of a floating or complex dtype."""
    if pattern and t.is_floating_point() and t.dtype.itemsize > 1:
        _draw(t, pattern, generator).mul_(spread)
        return
    few = t.device.type == "cpu" and t.numel() <= _AT_ONCE
    if not pattern and (t.dtype.itemsize > 2 or (t.dtype.itemsize == 2 and not few)):
        t.normal_(0, spread, generator=generator)
        return
    # Torch has no random 8-bit floats. It draws 16-bit numbers one by one on a CPU, and fp32
    # numbers as vectors.
    numbers = torch.empty(t.shape, dtype=torch.float32, device=t.device)
    t.copy_(_draw(numbers, pattern, generator).mul_(spread))


def _fill_integers(t: Tensor, pattern: Pattern, whole: bool, generator: torch.Generator) -> None:
    """Fill a tensor of whole numbers or booleans; ``whole``: from the whole range of the dtype."""
    if pattern:
        numbers = _draw(
            torch.empty(t.shape, dtype=torch.float32, device=t.device), pattern, generator
        )
        # fp32 does not hold the sum of 1,400 products of such 8-bit numbers of one sign.
        numbers = (numbers + 3 * numbers.sign()) * min(torch.iinfo(t.dtype).max, 2**30) / 4
        t.copy_(numbers.round() if t.dtype.is_signed else numbers.round().abs())
    elif whole and t.dtype is not torch.bool:
        has = torch.iinfo(t.dtype)
        t.random_(has.min, min(has.max, 2**62), generator=generator)
    else:
        t.copy_(torch.randint(-8, 9, t.shape, generator=generator, device=t.device))


def _draw(t: Tensor, pattern: Pattern, generator: torch.Generator) -> Tensor:
    """Fill a tensor of a floating dtype with numbers of this pattern; without one they are normally
    distributed."""
    if not pattern:
        return t.normal_(generator=generator)
    if pattern == "one number":
        t.copy_(t.new_empty(()).uniform_(0.125, 1, generator=generator))
    elif pattern == "one-hot":
        rows = (*t.shape[:-1], 1)
        at = torch.randint(max(1, t.shape[-1]), rows, generator=generator, device=t.device)
        t.zero_().scatter_(-1, at[..., : t.shape[-1]], 1.0)
    else:
        t.uniform_(0.125, 1, generator=generator)
    return t.neg_() if pattern == "negative" else t


def _cancel(name: str, t: Tensor, k: int, generator: torch.Generator) -> None:
    """Fill an operand with numbers around one; see :class:`Values`."""
    size = (2 * PEAK / k) ** 0.5
    vary = min(0.25, SPREAD * math.sqrt(k) / (2 * PEAK))
    t.uniform_((1 - vary) * size, (1 + vary) * size, generator=generator)
    if name == "a":
        half, odd = divmod(t.shape[-1], 2)
        t.narrow(-1, half, odd).zero_()
        t.narrow(-1, half + odd, half).neg_()


def _sparse(name: str, t: Tensor, generator: torch.Generator) -> None:
    """Fill an operand with whole numbers; see :class:`Values`."""
    t.normal_(generator=generator).round_().clamp_(min=0)
    lines = t if name == "a" else t.mT
    if name == "a":
        lines[..., 1::2, :] = lines[..., : lines.shape[-2] // 2 * 2 : 2, :]
    lines[..., 2::3, :] = 0


def make(
    problem: Problem,
    device: torch.device,
    *,
    seed: int | None = None,
    allocate: Empty | None = None,
    recipe: Recipe = DEFAULT,
    filled: bool = True,
) -> Inputs:
    """Return random inputs of the problem's sizes and stride classes.

    Args:
        seed: By default a different seed each time.
        allocate: Allocates the tensors; by default each separately.
        filled: Fill the tensors. Some callers need only their shapes and strides.
    """
    generator = seeded(device, seed)

    def draw(name: str, spec: Operand, shape: tuple[int, ...]) -> Tensor:
        t = allocate(name, spec, shape) if allocate else empty(spec, shape, device)
        form = forms.get(name)
        return fill(name, t, problem.k, generator, recipe.values, form) if filled else t

    def part(of: str, name: str, keyword: str) -> Tensor:
        operand: Operand = getattr(problem, of)
        assert operand.scale is not None
        size: tuple[int, ...] = ()
        if operand.scale.kind != "tensor":
            size = problem.shape(keyword)
            if of == "a" and rows is not None and rows.a_index is not None:
                size = (rows.read, *size[1:])
        dtype = operand.scale.dtype if name == "scale" else operand.zero
        assert dtype is not None
        if operand.grid:
            # The layout in which checkpoints store them; verification also uses the other one.
            return draw(keyword, Operand(dtype, "row" if of == "a" else "col", False), size)
        return draw(keyword, Operand(dtype), (1, math.prod(size))).view(size)

    forms = {name: getattr(problem, name).form for name in ("a", "b")}
    forms |= {role.keyword: forms[role.of] for role in PARTS}
    rows, a_shape = None, problem.a_shape
    if problem.groups is not None:
        rows = Rows.of(
            problem.groups, problem.extent, device, generator,
            sizes=recipe.sizes, whole=recipe.whole, reads=recipe.reads,
            any_weights=recipe.weights,
        )  # fmt: skip
        if problem.groups.a_index is not None:
            a_shape = rows.read, a_shape[-1]
    a, b = draw("a", problem.a, a_shape), draw("b", problem.b, problem.b_shape)
    bias = residual = None
    if problem.bias is not None:
        bias = draw("bias", Operand(problem.bias), (1, *problem.shape("bias"))[-2:])
        bias = bias if problem.groups else bias[0]
    if problem.residual is not None:
        residual = draw("residual", problem.residual, problem.out_shape)
    alpha = recipe.alpha if problem.scaled else 1.0
    if not (problem.value.is_floating_point or problem.value.is_complex):
        # Torch takes whole numbers in the dtype's range.
        alpha = float(math.copysign(math.ceil(abs(alpha)), alpha if problem.value.is_signed else 1))
        alpha = max(-8.0, min(alpha, 8.0))
    parts = {
        role.keyword: part(role.of, role.part, role.keyword)
        for role in PARTS
        if role.keyword in problem.parts
    }
    given = Inputs(a, b, bias, residual, alpha, parts, rows)
    if rows is not None:
        rows.poison_beyond(problem, given)
        if recipe.poisoned:
            rows.poison_unread(problem, given)
    elif problem.static_weights and device.type == "cuda":
        torch.cuda.synchronize(device)  # static_weights promises a written b
    return given


def seeded(device: torch.device, seed: int | None = None) -> torch.Generator:
    """Return a generator that starts from ``seed``, or from another number each time. Torch's own
    generator, which the user may have seeded, does not change."""
    return torch.Generator(device).manual_seed(new_seed() if seed is None else seed)


def new_seed() -> int:
    """Return a random seed."""
    return int.from_bytes(os.urandom(4), "little")


def empty(spec: Operand, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return an uninitialised tensor whose last two dimensions are of the class ``spec``."""
    placed = memory_layout(spec, shape)
    memory = torch.empty(placed.length, dtype=spec.dtype, device=device)
    return memory.as_strided(shape, placed.strides, placed.offset)


def _distinct(t: Tensor) -> Tensor:
    """Return a view with each address of ``t`` once: torch does not fill tensors whose elements
    share an address."""
    for dimension, (size, step) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if step == 0 and size > 1:
            t = t.narrow(dimension, 0, 1)
    if t.dim() < 2 or not t.numel():
        return t
    t = t if t.stride(-2) >= t.stride(-1) else t.mT
    (*batch, rows, cols), (*outer, leading, inner) = t.shape, t.stride()
    if inner != 1 or leading >= cols:
        return t
    return t.as_strided((*batch, (rows - 1) * leading + cols), (*outer, 1))
