"""The values of stored operands, which torch multiplies.

Scales for a whole row of ``a`` or column of ``b`` multiply the product, which is exact. The
scales of groups and blocks differ along K, so they multiply the values.
"""

from __future__ import annotations

import torch

from tmm_core import Operand, Problem, Scale

Tensor = torch.Tensor


def values(
    problem: Problem,
    of: str,
    t: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The values of operand ``of``, with those scales that differ along K; itself if it is plain.

    Args:
        scale: Read only if it is a grid.
        zero: Broadcasts to the values, or is a grid.
        dtype: Of the values; by default one that holds them exactly, or with such scales as
            precisely as the result needs.
    """
    spec: Operand = getattr(problem, of)
    form = spec.form
    if form is None:
        return t
    scale = scale if spec.grid else None
    if dtype is None:
        wide = zero is not None if scale is None else _wide_range(problem, scale.dtype)
        dtype = torch.float32 if wide else problem.value
    exact = scale is None or scale.dtype is dtype  # but for the last rounding
    whole = zero is None or not zero.is_floating_point()
    if of == "b":
        # Along K, as a weight's owner stores it, what torch's operators return is aligned.
        t = t.mT
        scale, zero = (x if x is None or x.dim() < 2 else x.mT for x in (scale, zero))
    found = form.values(t, scale, zero, dtype if exact and whole else torch.float32, spec.block)
    found = found.to(dtype)
    return found.mT if of == "b" else found


def rescaled(z: Tensor, scale: Tensor | None) -> Tensor:
    """The product ``z`` times a scale that broadcasts to it: one number may have any number of
    dimensions."""
    if scale is None:
        return z
    scale = Scale.numbers(scale, torch.float32)
    return z * (scale.reshape(()) if scale.numel() == 1 else scale)


def _wide_range(problem: Problem, scale: torch.dtype) -> bool:
    """Whether values with their scales take fp32: on a CPU, for a wider result, and where scales
    may exceed fp16's range."""
    beyond = problem.value is torch.float16 and scale is not torch.float16
    return problem.device.type == "cpu" or problem.out.dtype.itemsize > 2 or beyond
