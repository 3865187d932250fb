"""``log8``: weights as signed powers of 2^⅛ in a byte, with a scale for each row or one for all.

The lower seven bits are eight times the exponent, from 0 for the smallest magnitude 2^-15.875 to
127 for 1; the highest bit is the sign. There is no zero: it is rounded to the smallest magnitude.
"""

from __future__ import annotations

import torch

from tmm_core import Format

Tensor = torch.Tensor


def quantize(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    steps = (127 + 8 * numbers.abs().clamp(min=2.0**-20).log2()).round().clamp(0, 127)
    return (steps + 128 * (numbers < 0)).to(dtype)


def dequantize(stored: Tensor) -> Tensor:
    steps = (stored & 127).to(torch.float32)
    return torch.exp2((steps - 127) / 8) * torch.where(stored > 127, -1.0, 1.0)


def decode(block, dtype):  # type: ignore[no-untyped-def]  # compiled by Triton, which `tl` is of
    steps = (block & 127).to(tl.float32)  # noqa: F821
    value = tl.exp2((steps - 127) * 0.125)  # noqa: F821
    return tl.where(block > 127, -value, value).to(dtype)  # noqa: F821


LOG8 = Format(
    name="log8",
    storage=(torch.uint8,),
    scale_dtypes=(torch.float32, torch.bfloat16, torch.float16),
    limit=1.0,
    quantize=quantize,
    dequantize=dequantize,
    decode=decode,
    # A weight is rounded to a plain operand's 8 or 11 bits.
    tolerance=8e-3,
)
