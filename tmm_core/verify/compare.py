"""Computes the reference result of a problem, and the errors of other results.

The reference is the whole expression in a higher precision, group by group. With each number comes
a bound of the error of a right kernel, from the expression's conditioning (:func:`_bound`).
:mod:`tmm_core.verify.verifier` compares launchers with both.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tmm_core.errors import of_the_call
from tmm_core.formats import grids
from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.operand import Operand
from tmm_core.spec.problem import Problem
from tmm_core.verify.ragged_inputs import Inputs

#: Rows or columns of a matrix: a slice, or a tensor of indices.
Places = slice | torch.Tensor

#: Default limit of the bytes that an operand of one product may take in fp64.
ROOM = 1 << 30

#: Products up to this many operations get an fp64 reference. Beyond, fp32 suffices for 16-bit
#: operands, and fp64 matmul is slow on most GPUs (1/64 of the fp32 rate).
FP64_FLOPS = 2**38

#: Largest accepted |out − ref| / (|ref| + rms(ref)), by the dtype that limits precision: about two
#: units in the last place of the result. TF32 rounds operands to 11 bits. Errors of 2⁻¹¹ average
#: out to 4e-4 rms, and the largest of 10⁸ is 5.5 times that.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
TF32_TOLERANCE = 4e-3

#: Error per term of a sum in fp32, relative to its partial sums. Tensor cores add some 16 products
#: at a time, and truncate the sum by up to 2⁻²³. (Fasi et al., Numerical behavior of NVIDIA tensor
#: cores, PeerJ Computer Science 7:e330.)
SUMMED = 2.0**-27
#: Error of a sum of few terms in fp32, relative to its norm and the square root of their number.
#: The partial sums are rounded with random signs. Sums of 1 to 1024 normal terms were computed term
#: by term and by torch on a CPU, 160,000 for each of ten numbers of terms. They were off by up to
#: 3.73 · 2⁻²⁴.
ROUNDED = 4 * 2.0**-24
#: Rounding error of one stage of an epilogue by torch's own operators, relative to the tolerance.
#: It is two of the tolerance's four unit roundoffs, for three roundings at most.
STAGE = 0.5
#: A stage's intermediates may be smaller than its output by this factor: softcap divides by 30.
SMALLER = 16.0


def ranges(ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield each group with its start and end."""
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        yield group, start, end


class Sample(NamedTuple):
    """Expected numbers, and the sizes to which their errors are relative."""

    numbers: torch.Tensor
    sizes: torch.Tensor

    def error(self, out: torch.Tensor, at_once: int) -> torch.Tensor:
        """Return the largest error, as a tensor on the device; NaN if a number is not one.

        Args:
            at_once: How many elements to compare at a time.
        """
        step = max(1, at_once // max(1, self.numbers[0].numel()))
        pieces = [
            worst(*(t[low : low + step] for t in (out, self.numbers, self.sizes)))
            for low in range(0, len(self.numbers), step)
        ]
        return functools.reduce(torch.maximum, pieces)  # propagates NaN


def expected(
    problem: Problem,
    inputs: Inputs,
    rows: Places = slice(None),
    cols: Places = slice(None),
    room: int = ROOM,
) -> Sample:
    """Return ``rows`` and ``cols`` of the expected result, in fp64 or another sufficient precision,
    with the sizes to which errors are relative. The result is zero beyond the last group.

    A size is |number| + rms, or the error of a right kernel (:func:`_bound`) divided by the
    tolerance, whichever is larger.

    Args:
        rows, cols: Indices, or a slice of all.
        room: Bytes that an operand of one piece may take in fp64.
    """
    numbers = zeros(problem, rows, cols, _wide(problem.out.dtype), inputs.a.device)
    limit = tolerance(problem)
    bounded = limit > 0 and problem.out.dtype.is_floating_point
    bounds = torch.zeros_like(numbers, dtype=torch.float32) if bounded else None
    for at, piece in pieces(problem, inputs, rows, cols, room):
        numbers[at] = piece.y.to(numbers.dtype)
        if bounds is not None:
            bounds[at] = (_bound(problem, piece) / limit).to(bounds.dtype)
    sizes = _magnitudes(numbers) + rms(_in_range(numbers, problem.out.dtype))
    return Sample(numbers, sizes if bounds is None else torch.maximum(sizes, bounds))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of this dtype are compared. Integers are compared exactly."""
    real = dtype.is_floating_point or dtype.is_complex
    return torch.promote_types(dtype, torch.float32) if real else torch.int64


def zeros(
    problem: Problem, rows: Places, cols: Places, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros for these rows and columns of the result."""
    sizes = [
        len(range(size)[at]) if isinstance(at, slice) else len(at)
        for size, at in ((problem.m, rows), (problem.n, cols))
    ]
    return torch.zeros((*problem.out_shape[:-2], *sizes), dtype=dtype, device=device)


def pieces(
    problem: Problem, inputs: Inputs, rows: Places, cols: Places, room: int
) -> Iterator[tuple[tuple[Any, ...], Piece]]:
    """Yield the parts of the expression whose operands take up to ``room`` bytes, with their places
    in the result of these rows and columns. A plain product is one group."""
    given = inputs.rows
    device = inputs.a.device
    at_rows = torch.arange(problem.m, device=device)[rows]
    at_cols = torch.arange(problem.n, device=device)[cols]
    m, n = len(at_rows), len(at_cols)
    # The row of the product for each row of the result.
    source = at_rows
    if given is not None and given.out_index is not None:
        where = torch.empty(problem.m, dtype=torch.long, device=device)
        where[given.out_index.long()] = torch.arange(problem.m, device=device)
        source = where[at_rows]
    # A piece holds, in fp64, rows of a, columns of b (twice as many where gated), and results.
    share = room // (8 * max(1, problem.batch))
    side = share // max(1, problem.k) // (1 + problem.gated)
    high = max(64, min(m, side))
    wide = max(64, min(n, side, share // (3 * high)))
    sized = replace(problem, m=m, n=n)  # the precision depends on the size
    for group, start, end in ranges((problem.m,) if given is None else given.ends):
        in_group, cols_in_group = torch.arange(m, device=device), torch.arange(n, device=device)
        if problem.along == "m":
            in_group = ((source >= start) & (source < end)).nonzero()[:, 0]
        elif problem.along == "n":
            cols_in_group = ((at_cols >= start) & (at_cols < end)).nonzero()[:, 0]
        part = _of_group(problem, inputs, group, (start, end))
        first: tuple[Any, ...] = (group,) if problem.along == "k" else (...,)
        for r in in_group.split(high):
            for c in cols_in_group.split(wide):
                piece = _piece(sized, part, source[r], at_rows[r], at_cols[c])
                yield (*first, r[:, None], c), piece


def _of_group(problem: Problem, inputs: Inputs, group: int, part: tuple[int, int]) -> Inputs:
    """Return the operands of one group, with the rows and columns of all groups."""
    if inputs.rows is None:
        return inputs
    a, b, bias, residual = inputs.a, inputs.b, inputs.bias, inputs.residual
    along = problem.along
    parts = dict(inputs.parts)
    for of, ragged in (("a", "m"), ("b", "n")):
        grid = getattr(problem, of).grid
        for name, t in inputs.by_row(problem, of).items():
            own = t if along == ragged else t[group]
            parts[name] = own if grid or of == "b" else own[:, None]
    if along == "m":
        b = b[group]
    elif along == "n":
        a = a[group]
    else:
        a, b = a[:, slice(*part)], b[slice(*part)]
        residual = None if residual is None else residual[group]
    bias = None if bias is None else bias[group]
    return Inputs(a, b, bias, residual, inputs.alpha, parts, inputs.rows)


class Piece(NamedTuple):
    """A part of the expression.

    Attributes:
        product: The product with scales and alpha.
        norm: The product's size if the terms of its sums had random signs.
        z: The epilogue's input.
        weights: The factors of the epilogue's output, or one.
        y: The result.
        alpha: The factor of the product.
    """

    product: torch.Tensor
    norm: torch.Tensor
    z: torch.Tensor
    weights: torch.Tensor | float
    y: torch.Tensor
    alpha: float


def _piece(
    problem: Problem, inputs: Inputs, rows: torch.Tensor, at: torch.Tensor, cols: torch.Tensor
) -> Piece:
    """Return some columns of the product's ``rows``, which are the rows ``at`` of the result."""
    index, given = rows, inputs.rows
    if given is not None and given.a_index is not None:
        index = given.a_index.long()[rows]
    own = _selected(problem, inputs, index, cols)
    product, norm = _multiplied(problem, own)
    z = product if own.bias is None else product + own.bias.to(product.dtype)
    y = problem.epilogue.apply(z)
    weights: torch.Tensor | float = 1.0
    if given is not None and given.out_weights is not None:
        weights = given.out_weights[rows].to(y.dtype)[:, None]
        y = y * weights
    if inputs.residual is not None:
        y = y + inputs.residual[..., at, :][..., cols].to(y.dtype)
    return Piece(product, norm, z, weights, y, inputs.alpha)


def _bound(problem: Problem, piece: Piece) -> torch.Tensor:
    """The largest error of a right kernel, which rounds no more often than torch's operators.

    This is a running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, 3.3).
    A product has the errors of its own rounding, of rounded operands (with random signs) and of
    truncated sums. Each stage of the epilogue turns an error of its input into the change that such
    an input makes of its output. Then it rounds its output.
    """
    limit, (least, most) = tolerance(problem), _range(problem.out.dtype)
    product, z, epilogue = piece.product, piece.z, problem.epilogue
    # TF32 and 8-bit sums are less precise; dequantised values may be rounded to 16 bits.
    rounded = limit if problem.stored or limit > TOLERANCE[problem.out.dtype] else 0.0
    if problem.a.dtype is not torch.float64:
        rounded += max(problem.k * SUMMED, math.sqrt(problem.k) * ROUNDED)
    error = limit * torch.maximum(product.abs(), z.abs())
    error += rounded * (product.abs() + piece.norm)
    # Product, multiple by alpha, sum with a bias and result are each off by half the least number.
    error += least * (abs(piece.alpha) + 3) / 2
    values, errors = epilogue.inputs(z), epilogue.inputs(error)
    stages = () if epilogue.is_identity else epilogue.chain
    # Torch's operators turn a number beyond the range into Inf, and go on with it.
    further = problem.residual is not None or isinstance(piece.weights, torch.Tensor)
    for number, stage in enumerate(stages, 1):
        y = _applied(stage, values)
        error = STAGE * limit * y.abs() + SMALLER * least
        for place, off in enumerate(errors):
            error += torch.maximum(
                _change(stage, values, place, off, y), _change(stage, values, place, -off, y)
            )
        if further or number < len(stages):
            error.masked_fill_(y.abs() > most, math.inf)
        values, errors = (y,), (error,)
    return error * piece.weights


@of_the_call
def _applied(stage: Epilogue, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """One stage of an epilogue, applied to its inputs."""
    return stage.reference(*values, *stage.parameters)


def _change(
    stage: Epilogue, values: Sequence[torch.Tensor], place: int, off: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Return the change of ``y``, the stage's output, if one input changes by ``off``; Inf if only
    one of the two outputs is NaN."""
    moved = (*values[:place], values[place] + off, *values[place + 1 :])
    found = _applied(stage, moved)
    same = (found == y) | (found.isnan() & y.isnan())
    return torch.where(same, 0.0, (found - y).abs()).nan_to_num_(math.inf, math.inf)


def _range(dtype: torch.dtype) -> tuple[float, float]:
    """Return the distance between the smallest numbers of a dtype, and its largest number. On a GPU
    only fp16 numbers may be subnormal."""
    of = torch.finfo(dtype)
    return of.smallest_normal * (of.eps if dtype is torch.float16 else 1.0), of.max


def _selected(problem: Problem, inputs: Inputs, rows: torch.Tensor, cols: torch.Tensor) -> Inputs:
    """Return the arguments for these rows and columns of the product, without a residual."""
    b, bias = inputs.b, inputs.bias
    wide = problem.epilogue.sources(cols, b.shape[-1] // (1 + problem.gated))
    parts = dict(inputs.parts)
    of_a, of_b = max(1, problem.a.block[0]), max(1, problem.b.block[0])
    for name, t in inputs.by_row(problem, "a").items():
        parts[name] = t[..., rows // of_a, :]
    for name, t in inputs.by_row(problem, "b").items():
        parts[name] = t[..., wide // of_b]
    return replace(
        inputs,
        a=inputs.a[..., rows, :],
        b=b[..., wide],
        bias=None if bias is None else bias[wide],
        residual=None,
        parts=parts,
    )


def _multiplied(problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """``alpha · (a @ b)`` with scales, and its size if the terms had random signs: the norms of the
    rows and columns, divided by √K."""
    precise = problem.a.dtype.itemsize > 2 or problem.flops <= FP64_FLOPS
    values: list[torch.Tensor] = []
    factors = []
    for name, t, along in (("a", inputs.a, -1), ("b", inputs.b, -2)):
        scale, zero = inputs.parts.get(f"{name}_scale"), inputs.parts.get(f"{name}_zero")
        spec: Operand = getattr(problem, name)
        form = spec.form
        if form is None:
            values.append(t)
        elif spec.grid:
            # Rows and columns were selected, so each has its own scales.
            block = 1, spec.block[1]
            values.append(form.values(t, scale, zero, torch.float64, block, along))
        else:
            values.append(form.values(t, None, zero, along=along))
            factors += [] if scale is None else [grids.factors(scale, torch.float32)]
    a, b = values
    z = _product(a, b, precise)
    norm = torch.ones_like(z)
    if z.is_floating_point():
        wide = torch.float64  # squares of bf16 exceed fp32's range
        of_a = torch.linalg.vector_norm(a, dim=-1, keepdim=True, dtype=wide)
        of_b = torch.linalg.vector_norm(b, dim=-2, keepdim=True, dtype=wide)
        norm = (of_a * of_b / max(1, a.shape[-1]) ** 0.5).to(z.dtype)
    for t in (z, norm):
        for factor in factors:
            t *= factor.to(t.dtype)
        if problem.scaled:
            t *= inputs.alpha if z.is_floating_point() or z.is_complex() else int(inputs.alpha)
    return z, norm.abs()


def _product(a: torch.Tensor, b: torch.Tensor, precise: bool) -> torch.Tensor:
    """Return the product in fp64, or in fp32 by an operator that ignores the TF32 setting: other
    threads use that setting. A product of two 16-bit numbers is exact in fp32. Integers and complex
    numbers are multiplied on the CPU, where torch multiplies every dtype and integers wrap."""
    if not a.is_floating_point():
        wide = torch.complex128 if a.is_complex() else a.dtype
        return torch.matmul(a.cpu().to(wide), b.cpu().to(wide)).to(a.device)
    if precise or a.dtype != b.dtype or a.dtype.itemsize != 2:
        return torch.matmul(a.to(torch.float64), b.to(torch.float64))
    if a.is_cuda:
        mm = torch.mm if a.dim() == 2 else torch.bmm
        return mm(a, b, out_dtype=torch.float32)
    return torch.matmul(a.to(torch.float32), b.to(torch.float32))


def tolerance(problem: Problem) -> float:
    """Return the largest error accepted; see :data:`TOLERANCE`."""
    dtype = problem.out.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    limit = TOLERANCE[dtype.to_real() if dtype.is_complex else dtype]
    if problem.stored:
        return max(limit, *(form.tolerance for form in problem.forms if form is not None))
    return max(limit, TF32_TOLERANCE) if problem.tf32 else limit


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return max |out − expected| / (|expected| + rms(expected)).

    The error is NaN if only ``out`` has a NaN, and zero if there are no elements. The rms keeps
    elements near zero from dominating. The maximum keeps a single wrong element from being averaged
    away."""
    if not expected.numel():
        return 0.0
    expected = expected.to(_wide(expected.dtype))
    return float(worst(out, expected, _magnitudes(expected) + rms(expected)))


def rms(expected: torch.Tensor) -> torch.Tensor:
    """Root mean square, or one if that is zero or undefined."""
    scale = _magnitudes(expected).square().nanmean().sqrt()
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def _magnitudes(t: torch.Tensor) -> torch.Tensor:
    """Absolute values; in fp64 for integers, since the least integer's overflows."""
    return (t if t.is_floating_point() or t.is_complex() else t.double()).abs()


def worst(out: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Return the largest error, relative to ``size``, as a tensor on the device, without
    synchronising. A result beyond the range of its dtype may be Inf or the largest number."""
    dtype = out.dtype
    out, expected = (_in_range(t, dtype) for t in (out.to(expected.dtype), expected))
    off = _magnitudes(out - expected) / size
    return torch.where((out == expected) | (out.isnan() & expected.isnan()), 0.0, off).max()


def _in_range(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of a wider dtype in the range of ``dtype``."""
    if not dtype.is_floating_point:
        return t
    of = torch.finfo(dtype)
    return t.clamp(of.min, of.max)
