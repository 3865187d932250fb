"""Block-scaled 8-bit floats, as DeepSeek-V3 and Transformers' ``FP8Linear`` store weights."""

from __future__ import annotations

import torch

from tmm_core import formats
from tmm_core.formats import grids
from tmm_core.quantized import Quantized

Tensor = torch.Tensor


def read(
    weight: Tensor, weight_scale_inv: Tensor, block: tuple[int, int] | None = (128, 128)
) -> Quantized:
    """A weight of 8-bit floats, in the memory of its tensors.

    Args:
        weight: ``[…, N, K]`` float8_e4m3fn.
        weight_scale_inv: ``[…, ⌈N/128⌉, ⌈K/128⌉]``, by which the stored numbers are multiplied, in
            fp32, bf16 or exponents (E8M0); or one number.
        block: ``block_size`` of the checkpoint; None: one scale in all.

    Raises:
        ValueError: A tensor has another dtype or shape.
    """
    scale = weight_scale_inv
    if scale.dtype in grids.EXPONENTS:
        scale = grids.factors(scale.view(grids.EXPONENT), torch.float32)
    elif scale.dtype not in formats.FLOATS:
        raise ValueError(
            f"weight_scale_inv must be float32, bfloat16, float16 or exponents (E8M0), "
            f"got {scale.dtype}"
        )
    one = scale.numel() == 1
    return Quantized(weight, scale.float(), format="fp8", block=None if one else block)
