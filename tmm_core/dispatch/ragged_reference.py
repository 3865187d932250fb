"""The reference of a problem: the whole expression in high precision, group by group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from tmm_core.dispatch import verify
from tmm_core.dispatch.ragged import Inputs
from tmm_core.dispatch.verify import Places
from tmm_core.spec.problem import Problem

#: Default limit of the bytes that an operand of one product may take in fp64.
ROOM = 1 << 30
_ALL = slice(None)


def ranges(ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Each group with its start and end."""
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        yield group, start, end


def reference(
    problem: Problem,
    inputs: Inputs,
    rows: Places = _ALL,
    cols: Places = _ALL,
    room: int = ROOM,
    of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda z, y: y,
) -> torch.Tensor:
    """Those rows and columns of a result, in fp64 or another sufficient precision, and in pieces;
    zeros beyond the last group. A plain product is one group.

    Args:
        rows, cols: Indices, or a slice of all.
        room: Bytes that an operand of one piece may take in fp64.
        of: What to return, element by element, as a function of the epilogue's input and the
            result.
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
    scale_a, scale_b = inputs.scale_a, inputs.scale_b
    along = problem.along
    if problem.scale_a == "row" and scale_a is not None:
        scale_a = scale_a if along == "m" else scale_a.view(problem.shape("scale_a"))[group]
        scale_a = scale_a[:, None]
    if problem.scale_b == "row" and scale_b is not None and along != "n":
        scale_b = scale_b.view(problem.shape("scale_b"))[group]
    if along == "m":
        b = b[group]
    elif along == "n":
        a = a[group]
    else:
        a, b = a[:, slice(*part)], b[slice(*part)]
        residual = None if residual is None else residual[group]
    bias = None if bias is None else bias[group]
    return Inputs(a, b, bias, residual, inputs.alpha, scale_a, scale_b, inputs.rows)


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
    z = verify.accumulated(problem, verify.part(problem, inputs, index, cols))
    y = problem.epilogue.apply(z)
    if given is not None and given.out_weights is not None:
        y = y * given.out_weights[rows].to(y.dtype)[:, None]
    return z, y if residual is None else y + residual[..., at, :][..., cols].to(y.dtype)
