"""Dequantises stored operands to values, which torch multiplies.

Scales for a whole row of ``a`` or column of ``b`` multiply the product, which is exact. The
scales of groups and blocks differ along K, so they multiply the values.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from tmm_core import Operand, Problem, Scale

Tensor = torch.Tensor
OptTensor = Tensor | None

#: A function from stored numbers, scales and zero points to values; see :func:`bind`.
Values = Callable[[Tensor, OptTensor, OptTensor], Tensor]


def bind(problem: Problem, of: str, dtype: torch.dtype | None = None) -> Values:
    """A function that returns the values of operand ``of``, multiplied by the scales that differ
    along K. It returns a plain operand unchanged. On a GPU a Triton kernel computes the values in
    one pass if it serves the operand; otherwise torch's operators do.

    The function's arguments are the stored numbers, their scales and their zero points. Scales are
    read only if they form a grid. Zero points form a grid too, or broadcast to the values.

    Args:
        dtype: The values' dtype. The default holds them exactly, or with scales of a grid as
            precisely as the result needs.
    """
    spec: Operand = getattr(problem, of)
    form = spec.form
    if form is None:
        return lambda t, scale, zero: t
    scaled = spec.scale if spec.grid else None
    if dtype is None:
        wide = spec.zero is not None if scaled is None else wide_range(problem, scaled.dtype)
        dtype = torch.float32 if wide else problem.value
    exact = scaled is None or scaled.dtype is dtype  # apart from the last rounding
    whole = spec.zero is None or not spec.zero.is_floating_point
    inner = dtype if exact and whole else torch.float32
    fused = _fused(problem, of, dtype)

    def values(t: Tensor, scale: OptTensor, zero: OptTensor) -> Tensor:
        scale = scale if spec.grid else None
        if of == "b":
            # In the layout of the stored weight, with K contiguous, torch's results are aligned.
            t = t.mT
            scale, zero = (x if x is None or x.dim() < 2 else x.mT for x in (scale, zero))
        if fused is not None:
            result = fused(t, scale, zero)
        else:
            result = form.values(t, scale, zero, inner, spec.block).to(dtype)
        return result.mT if of == "b" else result

    return values


def bind_scaled(problem: Problem, of: str) -> Values | None:
    """Return a function that returns the values of operand ``of``, multiplied by all of its scales
    and rounded once to ``problem.value``. The product then needs no scales. None if scales of rows
    have to multiply the product in fp32: without a kernel, or beyond the range of fp16."""
    spec: Operand = getattr(problem, of)
    if spec.zero is not None and not spec.grid:
        return None
    if spec.form is None or spec.scale is None or spec.grid:
        return bind(problem, of, problem.value)
    if problem.value is not torch.bfloat16:
        return None
    fused = _fused(problem, of, problem.value, True)
    if fused is None:
        return None

    def values(t: Tensor, scale: OptTensor, zero: OptTensor) -> Tensor:
        assert scale is not None
        scale = scale.reshape((1,) * (t.dim() - scale.dim()) + scale.shape)
        if t.dim() == 3:
            scale = scale.expand(t.shape[0], -1, -1)
        if of == "a":
            return fused(t, scale, zero)
        return fused(t.mT, scale.mT, zero).mT

    return values


def _fused(problem: Problem, of: str, dtype: torch.dtype, folds: bool = False) -> Values | None:
    if problem.device.type != "cuda":
        return None
    try:
        triton: Any = importlib.import_module("tmm_core.triton")
    except ImportError:
        return None
    return triton.dequantizer(problem, of, dtype, folds)  # type: ignore[no-any-return]


def rescaled(z: Tensor, scale: OptTensor) -> Tensor:
    """The product ``z`` times a scale that broadcasts to it. A scale of one number may have any
    number of dimensions."""
    if scale is None:
        return z
    scale = Scale.numbers(scale, torch.float32)
    return z * (scale.reshape(()) if scale.numel() == 1 else scale)


def wide_range(problem: Problem, scale: torch.dtype) -> bool:
    """Whether values times their scales need fp32: on a CPU, for a wider result, and where scales
    may exceed fp16's range."""
    may_overflow = problem.value is torch.float16 and scale is not torch.float16
    return problem.device.type == "cpu" or problem.out.dtype.itemsize > 2 or may_overflow
