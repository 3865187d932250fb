"""4-bit integers in two's complement, as torchao's ``Int4Tensor`` stores weights.

A byte holds two values, the one of lower K in the low bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tmm_core.formats import Format

if TYPE_CHECKING:
    import triton.language as tl


def decode(block, dtype):  # compiled by Triton
    """A block's values."""
    return ((block.to(tl.int8) ^ 8) - 8).to(dtype)


FORMAT = Format(
    name="int4_signed",
    storage=(torch.int8, torch.uint8),
    pack=2,
    grids=((1, 0), (1, 32), (1, 64), (1, 128), (1, 256)),
    scale_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    zeros=True,
    limit=7.0,
    quantize=lambda numbers, dtype: (numbers.round().clamp(-8, 7).to(torch.int8) & 15).to(dtype),
    dequantize=lambda codes: ((codes.to(torch.int8) ^ 8) - 8).to(torch.bfloat16),
    decode=decode,
    # The products are exact in fp32: only the result is rounded.
    tolerance=0.0,
)
