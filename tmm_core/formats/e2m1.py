"""4-bit floats (e2m1): ±{0, ½, 1, 1½, 2, 3, 4, 6}, which several formats store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tmm_core.formats.grids import shift_left

if TYPE_CHECKING:
    import triton.language as tl

Tensor = torch.Tensor


def quantize(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest codes. A number halfway between two gets the code with an even mantissa."""
    size = numbers.abs().float()
    # The distance of neighbours: ½ below 2, 1 below 4, then 2.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    near = ((size / step).round() * step).clamp(max=6)
    code = torch.where(near < 2, 2 * near, torch.where(near < 4, near + 2, near / 2 + 4))
    return (code + 8 * numbers.signbit()).to(dtype)


def dequantize(codes: Tensor) -> Tensor:
    bits = codes.to(torch.int32)
    size = bits & 7
    # Two of the three bits are an exponent; 1 is the subnormal ½, whose bits in bf16 are 0x3F00.
    wide = torch.where(size < 2, size * 0x3F00, 0x3F00 + size * 64)
    wide = shift_left(wide | (bits & 8) * 4096, 16)
    return wide.view(torch.float32).to(torch.bfloat16)


def decode(block, dtype):  # compiled by Triton
    """A block's values: bits of bf16, which fp16 and fp32 hold exactly."""
    bits = block.to(tl.int16)
    size = bits & 7
    wide = tl.where(size < 2, size * 0x3F00, 0x3F00 + (size << 6))
    wide = wide | ((bits & 8) << 12)
    return wide.to(tl.int16).to(tl.bfloat16, bitcast=True).to(dtype)
