"""8-bit floats with a power of two for each 32 values along K (OCP Microscaling Formats 1.0).

Tensor cores multiply two such operands from Blackwell on. Here kernels decode a weight of this
format; BLAS multiplies the values if both operands have it.
"""

from __future__ import annotations

import torch

from tmm_core.formats import NARROW_FLOATS, Format
from tmm_core.formats.grids import EXPONENT


def decode(block, dtype):  # compiled by Triton
    """A block's values."""
    return block.to(dtype)


FORMAT = Format(
    name="mxfp8",
    storage=NARROW_FLOATS,
    grids=((1, 32),),
    scale_dtypes=(EXPONENT,),
    quantize=lambda numbers, dtype: numbers.to(dtype),
    # bf16 holds both exactly.
    dequantize=lambda stored: stored.to(torch.bfloat16),
    decode=decode,
    # The products are exact in fp32: only the result is rounded.
    tolerance=0.0,
)
