"""compressed-tensors, pack-quantized: each 32-bit word holds eight numbers along K, two in each
byte."""

from __future__ import annotations

import torch

from tmm_core.integrations.checkpoints import words
from tmm_core.quantized import Quantized

Tensor = torch.Tensor


def read(
    weight_packed: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None = None
) -> Quantized:
    """A 4-bit weight of a compressed-tensors checkpoint, in the memory of its tensors.

    Args:
        weight_packed: ``[N, K/8]`` int32; 8 is added to each number before it is stored.
        weight_scale: ``[N, K/g]``.
        weight_zero_point: ``[N/8, K/g]`` int32, packed along N, with 8 added in the same way.

    Raises:
        ValueError: A tensor has another dtype or shape, or K is not a multiple of the groups.
    """
    n, k = weight_packed.shape[0], weight_packed.shape[-1] * 8
    words.check_words("weight_packed", weight_packed, (n, k // 8))
    counts = weight_scale.shape[1:]
    if weight_scale.dim() != 2 or weight_scale.shape[0] != n or not counts[0] or k % counts[0]:
        raise ValueError(f"weight_scale must be [{n}, K/g], got {tuple(weight_scale.shape)}")
    zero = None
    if weight_zero_point is not None:
        # The last word is padded.
        shape = -(-n // 8), counts[0]
        words.check_words("weight_zero_point", weight_zero_point, shape)
        zero = words.unless_symmetric(words.unpacked(weight_zero_point.t()).t()[:n])
    group = k // counts[0]
    stored = weight_packed.contiguous().view(torch.uint8)
    return Quantized(stored, weight_scale, zero, format="int4", group=group)
