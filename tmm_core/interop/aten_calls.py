"""Converts calls of aten's products to calls of tmm, for :mod:`tmm_core.interop.aten_answers`.

The result is None for a call that tmm does not answer: one that torch refuses, or whose operands
are empty, have other dtypes, or start at addresses that are not multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tmm_core import compat
from tmm_core.formats import FLOATS, NARROW_FLOATS
from tmm_core.spec.arguments import (
    GROUPED_EXTRAS,
    MOST_ALPHA,
    Arguments,
    GroupedArguments,
)

Tensor = torch.Tensor

#: The smallest magnitude of an alpha that tmm answers. BLAS does not read the product if alpha is 0
#: in fp32, so that NaN and Inf in it do not count. A kernel multiplies them.
LEAST_ALPHA = torch.finfo(torch.float32).tiny


def plain_call(offset: int, a: Tensor, b: Tensor, out: Tensor | None = None) -> Arguments | None:
    """Convert a call of ``mm`` or ``bmm``; ``offset`` are the low four bits of all addresses."""
    one_device = all(t.device == a.device for t in (b, out) if t is not None)
    if offset or a.dtype not in FLOATS or a.dtype != b.dtype or not one_device:
        return None
    if a.dim() < 2 or a.dim() != b.dim() or a.shape[:-2] != b.shape[:-2]:
        return None  # torch broadcasts no batch
    if 0 in a.shape or 0 in b.shape or a.shape[-1] != b.shape[-2]:
        return None
    if out is not None:
        shape = (*a.shape[:-1], b.shape[-1])
        if out.dtype != a.dtype or out.shape != shape or compat.internal_overlap(out):
            return None
    return Arguments(a, b, out=out)


def call_with_summand(
    offset: int, a: Tensor, b: Tensor, c: Tensor, alpha: Any, out: Tensor | None = None
) -> Arguments | None:
    """Convert a call of ``addmm`` or ``baddbmm``, whose summand ``c`` is a bias or a residual."""
    call = plain_call(offset, a, b, out)
    real = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if call is None or not real or not LEAST_ALPHA <= abs(alpha) <= MOST_ALPHA:
        return None
    if c.dtype != a.dtype or c.device != a.device:
        return None
    call = call._replace(alpha=float(alpha))
    if c.shape == b.shape[-1:] and a.dim() == 2:
        return call._replace(bias=c)
    return call._replace(residual=c)


def scaled_call(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Arguments | None:
    """Convert a call of ``_scaled_mm`` with scales per tensor, or per row and column."""
    wide = out_dtype in FLOATS and scale_result is None
    if (
        not (wide and a.dim() == b.dim() == 2)
        or a.dtype not in NARROW_FLOATS
        or b.dtype not in NARROW_FLOATS
    ):
        return None
    if {scale_a.dtype, scale_b.dtype} != {torch.float32}:
        return None
    one = scale_a.numel() == scale_b.numel() == 1
    if not one and (scale_a.shape, scale_b.shape) != ((a.shape[0], 1), (1, b.shape[1])):
        return None
    return Arguments(a, b, bias, out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b)


def scaled_launch(plan: Any) -> Callable[..., Tensor]:
    """Return the launcher of a plan with the arguments of ``_scaled_mm``."""
    launch = plan.with_extras

    def run(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Any = None, *_: Any
    ) -> Tensor:
        return launch(a, b, bias, None, 1.0, None, scale_a, scale_b, None, None)  # type: ignore[no-any-return]

    return run


def grouped_call(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> GroupedArguments | None:
    """Convert a call of ``_grouped_mm`` with ragged groups. Torch takes no bias and no other dtype
    of the result, and only rows or columns that start at multiples of 16 bytes."""
    if offs is None or a.dtype not in FLOATS or a.dtype != b.dtype or a.dim() < 2 or b.dim() < 2:
        return None
    if bias is not None or out_dtype not in (None, a.dtype):
        return None
    if not (strides_accepted(a) and strides_accepted(b)):
        return None
    return GroupedArguments(a, b, offs)


def strides_accepted(t: Tensor) -> bool:
    """Whether torch's grouped product takes the strides and the address of an operand."""
    (*_, rows, cols), (*_, down, along) = t.shape, t.stride()
    apart = 16 // t.element_size()
    by_column = down == 1 and along >= max(1, rows)
    leading = along if by_column else down
    by_row = along == 1 and down >= max(1, cols)
    return (by_column or by_row) and leading % apart == 0 and t.data_ptr() % 16 == 0


def grouped_launch(plan: Any) -> Callable[..., Tensor]:
    """Return the launcher of a plan with the arguments of ``_grouped_mm``."""
    launch = plan.with_extras
    absent = (None,) * (len(GROUPED_EXTRAS) - 1)

    def run(a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None, *_: Any) -> Tensor:
        return launch(a, b, None, None, 1.0, None, offs, *absent)  # type: ignore[no-any-return]

    return run
