"""Computes the reference of a problem, and errors.

The reference is the whole expression in a higher precision, group by group, and the error is
relative, element by element. :mod:`tmm_core.verify.verifier` compares launchers with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from tmm_core.formats import grids
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
#: units in the last place of the result. TF32 rounds operands to 11 bits. These errors of 2⁻¹¹
#: average out to 4e-4 rms, and to 5.5 σ over 10⁸ elements.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
TF32_TOLERANCE = 4e-3


def ranges(ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Each group with its start and end."""
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        yield group, start, end


def reference(
    problem: Problem,
    inputs: Inputs,
    rows: Places = slice(None),
    cols: Places = slice(None),
    room: int = ROOM,
    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda z, y: y,
) -> torch.Tensor:
    """Return ``rows`` and ``cols`` of the expected result, in fp64 or another sufficient precision.
    The result is zero beyond the last group. A plain product is one group.

    Args:
        rows, cols: Indices, or a slice of all.
        room: Bytes that an operand of one piece may take in fp64.
        of: Maps the epilogue's input and the result, element by element, to what is returned.
    """
    given = inputs.rows
    device = inputs.a.device
    at_rows = torch.arange(problem.m, device=device)[rows]
    at_cols = torch.arange(problem.n, device=device)[cols]
    m, n, lead = len(at_rows), len(at_cols), problem.out_shape[:-2]
    dtype = torch.promote_types(problem.out.dtype, torch.float32)
    result = torch.zeros((*lead, m, n), dtype=dtype, device=device)
    # The row of the product for each row of the result.
    source = at_rows
    if given is not None and given.out_index is not None:
        where = torch.empty(problem.m, dtype=torch.long, device=device)
        where[given.out_index.long()] = torch.arange(problem.m, device=device)
        source = where[at_rows]
    # In fp64 rows of a, columns of b (twice as many where gated), and some of the result's.
    share = room // (8 * max(1, problem.batch))
    side = share // max(1, problem.k) // (1 + problem.gated)
    high = max(64, min(m, side))
    wide = max(64, min(n, side, share // (3 * high)))
    sized = replace(problem, m=m, n=n)  # the precision depends on the size
    for group, start, end in ranges((problem.m,) if given is None else given.ends):
        here, there = torch.arange(m, device=device), torch.arange(n, device=device)
        if problem.along == "m":
            here = ((source >= start) & (source < end)).nonzero()[:, 0]
        elif problem.along == "n":
            there = ((at_cols >= start) & (at_cols < end)).nonzero()[:, 0]
        mine = _one(problem, inputs, group, (start, end))
        out = result[group] if problem.along == "k" else result
        for r in here.split(high):
            for c in there.split(wide):
                places = source[r], at_rows[r], at_cols[c]
                out[..., r[:, None], c] = of(*_piece(sized, mine, *places)).to(dtype)
    return result


def _one(problem: Problem, inputs: Inputs, group: int, part: tuple[int, int]) -> Inputs:
    """The operands of one group, with the rows and columns of all groups."""
    if inputs.rows is None:
        return inputs
    a, b, bias, residual = inputs.a, inputs.b, inputs.bias, inputs.residual
    along = problem.along
    parts = dict(inputs.parts)
    for of, ragged in (("a", "m"), ("b", "n")):
        grid = getattr(problem, of).grid
        for name, t in inputs.by_row(problem, of).items():
            stack = t if grid else t.view(problem.shape(name)) if along != ragged else t
            own = t if along == ragged else stack[group]
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


def _piece(
    problem: Problem,
    inputs: Inputs,
    rows: torch.Tensor,
    at: torch.Tensor,
    cols: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The epilogue's input, and the result: rows ``rows`` of the product, which are rows ``at`` of
    the result."""
    index, given = rows, inputs.rows
    if given is not None and given.a_index is not None:
        index = given.a_index.long()[rows]
    residual = inputs.residual
    z = accumulated(problem, _part(problem, inputs, index, cols))
    y = problem.epilogue.apply(z)
    if given is not None and given.out_weights is not None:
        y = y * given.out_weights[rows].to(y.dtype)[:, None]
    return z, y if residual is None else y + residual[..., at, :][..., cols].to(y.dtype)


def _part(problem: Problem, inputs: Inputs, rows: torch.Tensor, cols: torch.Tensor) -> Inputs:
    """The arguments for these rows and columns of the product, without a residual."""
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


def accumulated(problem: Problem, inputs: Inputs) -> torch.Tensor:
    """The epilogue's input: ``alpha · (a @ b) + bias``, including scales as factors."""
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
    for factor in factors:
        z *= factor.to(z.dtype)
    if problem.scaled:
        z *= inputs.alpha
    if inputs.bias is not None:
        z += inputs.bias.to(z.dtype)
    return z


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
    """The largest error accepted; see :data:`TOLERANCE`."""
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
    expected = expected.to(torch.promote_types(expected.dtype, torch.float32))
    return float(worst(out, expected, rms(expected)))


def rms(expected: torch.Tensor) -> torch.Tensor:
    """Root mean square, or one if that is zero."""
    if not expected.numel():
        return torch.ones((), dtype=expected.dtype, device=expected.device)
    expected = expected.abs() if expected.is_complex() else expected
    scale = expected.square().mean().sqrt()
    return torch.where(scale > 0, scale, torch.ones_like(scale))


def worst(out: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return :func:`error` with a given rms, as a tensor on the device, without synchronising."""
    return ((out.to(expected.dtype) - expected).abs() / (expected.abs() + scale)).max()
