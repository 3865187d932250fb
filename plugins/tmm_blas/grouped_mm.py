"""Ragged products by torch's grouped operator, followed by its operators on rows.

On CUDA torch multiplies groups of bf16 on Hopper and Blackwell if leading strides are multiples of
16 bytes. Otherwise it reads ``offs`` on the host and so waits for the GPU; this kernel declines
then. On a CPU ``offs`` is in host memory, and one product per group serves what torch refuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from tmm_core import Groups, Launcher, Problem

Tensor = torch.Tensor

#: Dtypes of torch's grouped operator on a CPU.
_ON_CPU = (torch.bfloat16, torch.float16, torch.float32)


def reasons_against(problem: Problem) -> Iterable[str]:
    """Why torch cannot serve a ragged problem without waiting for the GPU."""
    device, dtype = problem.device, problem.a.dtype
    if device.type == "cpu":
        return
    if device.type != "cuda" or device.cuda.startswith("hip"):
        yield "torch's grouped product is used only on NVIDIA GPUs and on CPUs"
    elif device.capability[0] not in (9, 10):
        yield "torch's grouped product reads offs on the host, except on Hopper and Blackwell"
    if dtype != torch.bfloat16 or problem.out.dtype != dtype:
        yield f"torch's grouped product is of bf16, not {dtype} to {problem.out.dtype}"
    if not (problem.a.aligned and problem.b.aligned):
        yield "torch's grouped product needs operands whose rows are aligned to 16 bytes"
    if 0 in (problem.m, problem.n, problem.k):
        yield "nothing to multiply: a dimension is 0"


def bind(problem: Problem) -> Launcher:
    """The whole expression, in torch's own roundings."""
    groups = problem.groups
    assert groups is not None
    multiply = _product(problem)

    def run(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        alpha: float,
        out: Tensor | None,
        **rows: Tensor,
    ) -> Tensor:
        offs = rows["offs"]
        if "a_index" in rows:
            a = a.index_select(0, rows["a_index"])
        z = multiply(a, b, offs)
        if alpha != 1.0:
            z = z * alpha
        if bias is not None:
            z = z + _of_rows(problem, bias, offs)
        y = problem.epilogue.apply(z)
        if "out_weights" in rows:
            y = y * rows["out_weights"][:, None]
        # Zeros replace what lies beyond the last group: 0 · NaN would not.
        known = _known(problem, offs) if groups.zeroed else None
        if known is not None:
            y = torch.where(known, y, 0)
        if "out_index" in rows:
            places = rows["out_index"].long()
            y = torch.empty_like(y).index_copy_(0, places, y)
            if known is not None:
                known = torch.empty_like(known).index_copy_(0, places, known)
        if residual is not None:
            y = y + residual if known is None else torch.where(known, y + residual, 0)
        y = y.to(problem.out.dtype)
        if out is not None:
            return out.copy_(y)
        return y if y.is_contiguous() else y.contiguous()

    return run


def _of_rows(problem: Problem, bias: Tensor, offs: Tensor) -> Tensor:
    """Each group's bias, expanded to its rows of the product, or to its product."""
    if problem.along == "k":
        return bias[:, None, :]
    places = torch.arange(problem.m, device=offs.device, dtype=offs.dtype)
    group = torch.searchsorted(offs, places, right=True)
    return bias[group.clamp_(max=offs.shape[0] - 1)]


def _known(problem: Problem, offs: Tensor) -> Tensor:
    """Which rows or columns of the result belong to a group."""
    known = torch.arange(problem.extent, device=offs.device) < offs[-1]
    return known[:, None] if problem.along == "m" else known


def _product(problem: Problem) -> Any:
    """A function from ``(a, b, offs)`` to the product: torch's operator or, on a CPU, a loop over
    groups."""
    groups = problem.groups
    assert groups is not None
    same = problem.out.dtype == problem.a.dtype
    aligned = problem.a.aligned and problem.b.aligned
    whole = 0 not in (problem.m, problem.n, problem.k)
    if problem.device.type != "cpu" or (
        same and aligned and whole and problem.a.dtype in _ON_CPU and hasattr(F, "grouped_mm")
    ):
        return _by_torch
    wide = torch.promote_types(problem.a.dtype, problem.out.dtype)

    def loop(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return _by_groups(a.to(wide), b.to(wide), offs, groups)

    return loop


def _by_torch(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return F.grouped_mm(a, b, offs=offs)


def _by_groups(a: Tensor, b: Tensor, offs: Tensor, groups: Groups) -> Tensor:
    """One product per group, with the ends in host memory."""
    along, m, n = groups.ragged, a.shape[-2], b.shape[-1]
    shape = (groups.count, m, n) if along == "k" else (m, n)
    z = a.new_empty(shape)
    for group, (start, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        if along == "m":
            torch.mm(a[start:end], b[group], out=z[start:end])
        elif along == "n":
            z[:, start:end] = a[group] @ b[:, start:end]
        else:
            torch.mm(a[:, start:end], b[start:end], out=z[group])
    return z
