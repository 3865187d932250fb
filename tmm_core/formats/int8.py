"""8-bit integers with one scale for each row, or one in all, as torchao's ``Int8Tensor`` stores
weights; or one for each group of values along K.

The tensor cores multiply them as 16-bit floats, which hold every int8 exactly.
"""

from __future__ import annotations

import torch

from tmm_core.formats import Format
from tmm_core.formats.grids import ROW, TENSOR


def decode(block, dtype):  # compiled by Triton
    """A block's values."""
    return block.to(dtype)


FORMAT = Format(
    name="int8",
    storage=(torch.int8,),
    grids=(TENSOR, ROW, (1, 32), (1, 64), (1, 128)),
    scale_dtypes=(torch.float32, torch.bfloat16, torch.float16),
    zeros=True,
    limit=127.0,
    quantize=lambda numbers, dtype: numbers.round().clamp(-128, 127).to(dtype),
    dequantize=lambda stored: stored.to(torch.bfloat16),
    decode=decode,
    # The products are exact in fp32: only the result is rounded.
    tolerance=0.0,
)
