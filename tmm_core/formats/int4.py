"""4-bit integers with a scale, and perhaps a zero point, for each group of values along K.

A byte holds two values, the one of lower K in the low bits. Without zero points 8 stands for zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tmm_core.formats import Format

if TYPE_CHECKING:
    import triton.language as tl


def decode(block, dtype):  # compiled by Triton
    """A block's values."""
    return (block.to(tl.int8) - 8).to(dtype)


FORMAT = Format(
    name="int4",
    storage=(torch.uint8,),
    pack=2,
    grids=((1, 0), (1, 32), (1, 64), (1, 128)),
    scale_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    zeros=True,
    origin=8.0,
    limit=7.0,
    quantize=lambda numbers, dtype: (numbers.round() + 8).clamp(0, 15).to(dtype),
    dequantize=lambda codes: codes.to(torch.bfloat16) - 8,
    decode=decode,
    # The products are exact in fp32: only the result is rounded.
    tolerance=0.0,
)
