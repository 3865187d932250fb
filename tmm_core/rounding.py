"""``quantize``: a weight rounded to a format, by the simplest scheme."""

from __future__ import annotations

import math

import torch

from tmm_core import formats
from tmm_core.formats import grids
from tmm_core.formats.grids import EXPONENT, Block
from tmm_core.quantized import Quantized

Tensor = torch.Tensor


def quantize(
    weight: Tensor,
    format: str = "int4",  # the field's word
    *,
    group: int | None = None,
    block: Block | None = None,
) -> Quantized:
    """Round a weight to the nearest numbers of a format. The scale of each group maps its largest
    value to the format's largest number.

    >>> w4 = tmm_core.quantize(layer.weight, "int4", group=128)  # doctest: +SKIP

    This is the simplest scheme: no calibration, no search, no zero points. GPTQ, AWQ and HQQ lose
    less; their checkpoints are read as they are (:class:`Quantized`).

    Args:
        weight: ``[..., N, K]``, of a floating dtype.
        format: As for :class:`Quantized`.
        group: The number of values along K that share a scale; by default the largest that the
            format has; 0: all of K.
        block: The rows, and the values along K, that share a scale.

    Returns:
        The weight, in new memory and without a gradient. The scales' dtype is the first that the
        format accepts: the weight's, fp32, or the format's own. A group with a NaN or an infinity
        is NaN.

    Raises:
        ValueError: No such format, group or block; or the groups do not divide K.
        TypeError: ``weight`` is not a floating tensor.
    """
    is_plain = isinstance(weight, Tensor) and not isinstance(weight, Quantized)
    if not (is_plain and weight.is_floating_point() and weight.dim() > 1):
        raise TypeError("quantize() takes a floating tensor of two dimensions or more")
    form = formats.named(format)
    named = grids.block_of_call(group, block)
    if named is None:
        along_k = [each for each in form.grids if each[0] == 1 and each[1]]
        named = max(along_k or form.grids, key=lambda each: each[1])
    *lead, n, k = weight.shape
    own = form.block(named, n, k, math.prod(lead))
    if k % form.pack:
        raise ValueError(f"format {format} stores {form.pack} values together, K is {k}")
    numbers = weight.detach().float()
    # Whole blocks are rounded; the last ones are padded with zeros.
    rows, columns = grids.sizes(own, n, k)
    height, width = own[0] or max(n, 1), own[1] or max(k, 1)
    padded = torch.nn.functional.pad(numbers, (0, columns * width - k, 0, rows * height - n))
    blocks = padded.unflatten(-1, (columns, width)).unflatten(-3, (rows, height))
    largest = blocks.abs().amax(dim=(-3, -1))
    largest = largest.amax() if own == grids.TENSOR else largest
    largest = largest.where(largest.isfinite(), torch.nan)
    limit = form.limit or torch.finfo(form.storage[0]).max
    if EXPONENT in form.scale_dtypes:
        # The power of two of the largest code, as OCP Microscaling Formats 1.0 defines it.
        scale = grids.exponents(largest / 2 ** math.floor(math.log2(limit)))
    else:
        preferred = (weight.dtype, torch.float32, form.scale_dtypes[0])
        dtype = next(each for each in preferred if each in form.scale_dtypes)
        # On a GPU torch multiplies by the reciprocal of a number, which can differ in the last bit.
        scale = (largest / largest.new_full((), limit)).to(dtype)
    factor = grids.factors(scale, torch.float32)
    divisor = torch.where(factor == 0, 1.0, factor)
    scaled = grids.combined(torch.div, numbers, divisor, own, -1)
    if form.limit is None:
        scaled = scaled.clamp(-limit, limit)  # the scale may have been rounded down
    stored = form.packed(form.quantize(scaled, form.storage[0]))
    return Quantized(stored, scale, format=format, block=None if own == grids.TENSOR else own)
