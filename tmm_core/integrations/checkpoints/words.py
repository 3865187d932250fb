"""Numbers of 4 bits in 32-bit words, lowest bits first. The same memory read as bytes has two
numbers in each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tmm_core.quantized import Quantized

Tensor = torch.Tensor

#: The order of numbers in a word.
PLAIN = tuple(range(8))


def check_words(name: str, t: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless the words are int32 of this shape."""
    if t.dtype is not torch.int32 or tuple(t.shape) != shape:
        raise ValueError(
            f"{name} must be int32 of shape {shape}, got {t.dtype} of shape {tuple(t.shape)}"
        )


def groups(group: int, k: int) -> tuple[int, int]:
    """The values along K that share a scale, and the number of such groups.

    Args:
        group: -1 for all of K.

    Raises:
        ValueError: It does not divide K.
    """
    group = k if group == -1 else group
    if group < 1 or (group < k and k % group):
        raise ValueError(f"groups of {group} do not divide K = {k}")
    return group, -(-k // group)


def unpacked(words: Tensor, order: Sequence[int] = PLAIN) -> Tensor:
    """The numbers of words, uint8, eight times as many along the last dimension.

    Args:
        order: Which of the eight numbers each four bits of a word hold, the lowest bits first.
    """
    found = torch.empty((*words.shape, 8), dtype=torch.uint8, device=words.device)
    for place, which in enumerate(order):
        found[..., which] = (words >> (4 * place)) & 15
    return found.flatten(-2)


def packed(numbers: Tensor, order: Sequence[int] = PLAIN) -> Tensor:
    """The words of numbers below 16."""
    eights = numbers.unflatten(-1, (-1, 8)).to(torch.int32)
    words = torch.zeros(eights.shape[:-1], dtype=torch.int32, device=numbers.device)
    for place, which in enumerate(order):
        words |= eights[..., which] << (4 * place)
    return words


def zeros_of(weight: Quantized) -> Tensor:
    """The zero points of a weight, ``[N, K/g]``, which are 8 if it has none."""
    if weight.zero is not None:
        return weight.zero
    return torch.full_like(weight.scale, 8, dtype=torch.uint8)


def unless_symmetric(zero: Tensor) -> Tensor | None:
    """The zero points; None if all are 8, the default."""
    return None if bool((zero == 8).all()) else zero
