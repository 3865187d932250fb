"""The reference of a ragged problem: the whole expression in high precision, group by group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from tmm_core.dispatch import random_inputs, verify
from tmm_core.dispatch.ragged import Inputs, Rows
from tmm_core.dispatch.verify import Places
from tmm_core.spec.arguments import Arguments
from tmm_core.spec.problem import Problem

#: Default limit of the bytes that an operand of one product may take in fp64.
ROOM = 1 << 30


def whole(problem: Problem, inputs: random_inputs.Inputs) -> torch.Tensor:
    """The complete reference of a plain or a ragged problem."""
    return reference(problem, inputs, slice(None), slice(None), ROOM)


def ranges(ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Each group with its start and end."""
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        yield group, start, end


def reference(
    problem: Problem,
    inputs: random_inputs.Inputs,
    rows: Places,
    cols: Places,
    room: int,
    of: verify.Of = verify.result,
) -> torch.Tensor:
    """Those rows and columns of a plain or a ragged result, in fp64 or another sufficient
    precision; zeros beyond the last group. Arguments are those of :func:`verify.in_pieces`."""
    if not isinstance(inputs, Inputs):
        return verify.in_pieces(problem, inputs, rows, cols, room, of)
    given, along = inputs.rows, problem.along
    device = inputs.a.device
    at_rows = torch.arange(problem.m, device=device)[rows]
    at_cols = torch.arange(problem.n, device=device)[cols]
    dtype = torch.promote_types(problem.out.dtype, torch.float32)
    lead = problem.out_shape[:-2]
    result = torch.zeros((*lead, len(at_rows), len(at_cols)), dtype=dtype, device=device)
    # The row of the product for each row of the result.
    source = at_rows
    if given.out_index is not None:
        where = torch.empty(problem.m, dtype=torch.long, device=device)
        where[given.out_index.long()] = torch.arange(problem.m, device=device)
        source = where[at_rows]
    step = max(64, room // (8 * max(1, problem.k) * (1 + problem.gated)))
    for group, start, end in ranges(given.ends):
        here: Places = slice(None)
        there: Places = slice(None)
        if along == "m":
            here = ((source >= start) & (source < end)).nonzero()[:, 0]
        elif along == "n":
            there = ((at_cols >= start) & (at_cols < end)).nonzero()[:, 0]
        mine = _one(problem, inputs, group, (start, end))
        many = len(at_rows[here]), len(at_cols[there])
        if 0 in many:
            continue
        for top in range(0, many[0], step):
            for left in range(0, many[1], step):
                r = torch.arange(many[0], device=device)[top : top + step]
                c = torch.arange(many[1], device=device)[left : left + step]
                r = here[r] if isinstance(here, torch.Tensor) else r
                c = there[c] if isinstance(there, torch.Tensor) else c
                piece = of(*_piece(problem, mine, given, source[r], at_rows[r], at_cols[c]))
                out = result[group] if lead else result
                out[r[:, None], c[None, :]] = piece.to(dtype)
    return result


def _one(problem: Problem, inputs: Inputs, group: int, part: tuple[int, int]) -> Arguments:
    """The operands of one group, with the rows and columns of all groups."""
    a, b, bias, residual = inputs.a, inputs.b, inputs.bias, inputs.residual
    scale_a, scale_b = inputs.scale_a, inputs.scale_b
    along = problem.along
    if problem.scale_a == "row" and scale_a is not None:
        scale_a = scale_a if along == "m" else scale_a.view(problem.scale_a_shape)[group]
        scale_a = scale_a[:, None]
    if problem.scale_b == "row" and scale_b is not None and along != "n":
        scale_b = scale_b.view(problem.scale_b_shape)[group]
    if along == "m":
        b = b[group]
    elif along == "n":
        a = a[group]
    else:
        a, b = a[:, slice(*part)], b[slice(*part)]
        residual = None if residual is None else residual[group]
    bias = None if bias is None else bias[group]
    return Arguments(a, b, bias, residual, inputs.alpha, scale_a=scale_a, scale_b=scale_b)


def _piece(
    problem: Problem,
    inputs: Arguments,
    given: Rows,
    rows: torch.Tensor,
    at: torch.Tensor,
    cols: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The epilogue's input, and the result: rows ``rows`` of the product, which are rows ``at`` of
    the result."""
    index = rows if given.a_index is None else given.a_index.long()[rows]
    residual = inputs.residual
    mine = verify.part(problem, inputs._replace(residual=None), index, cols)
    z = verify.accumulated(problem, mine)
    y = verify.finished(problem, mine, z)
    if given.out_weights is not None:
        y = y * given.out_weights[rows].to(y.dtype)[:, None]
    return z, y if residual is None else y + residual[at][:, cols].to(y.dtype)
