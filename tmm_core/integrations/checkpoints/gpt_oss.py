"""MXFP4 experts, as gpt-oss stores them."""

from __future__ import annotations

import torch

from tmm_core.quantized import Quantized

Tensor = torch.Tensor


def read(blocks: Tensor, scales: Tensor) -> Quantized:
    """Weights of experts, in the memory of their tensors.

    Args:
        blocks: ``[E, N, K/32, 16]`` uint8, two numbers in a byte, the lower of K in the low bits.
        scales: ``[E, N, K/32]`` uint8, exponents plus 127.

    Raises:
        ValueError: A tensor has another dtype or shape.
    """
    if blocks.dim() < 3 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            "blocks must be [E, N, K/32, 16] and scales [E, N, K/32], got "
            f"{tuple(blocks.shape)} and {tuple(scales.shape)}"
        )
    return Quantized(blocks.flatten(-2), scales, format="mxfp4", group=32)
