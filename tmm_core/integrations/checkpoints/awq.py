"""AWQ: words of eight numbers along N, interleaved, in 4 bits."""

from __future__ import annotations

import torch

from tmm_core.formats.int4 import FORMAT
from tmm_core.integrations.checkpoints import words
from tmm_core.quantized import Quantized

Tensor = torch.Tensor

#: The column of eight that each four bits of a word hold, the lowest first.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read(qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int = 128) -> Quantized:
    """A weight of an AWQ checkpoint, repacked along K.

    Args:
        qweight: ``[K, N/8]`` int32.
        qzeros: ``[K/g, N/8]`` int32.
        scales: ``[K/g, N]``, which is not copied.
        group: g; -1: all of K.

    Raises:
        ValueError: A tensor has another dtype or shape.
    """
    k, n = qweight.shape[0], qweight.shape[-1] * 8
    group, count = words.groups(group, k)
    words.check_words("qweight", qweight, (k, n // 8))
    words.check_words("qzeros", qzeros, (count, n // 8))
    if tuple(scales.shape) != (count, n):
        raise ValueError(f"scales must have shape {(count, n)}, got {tuple(scales.shape)}")
    stored = FORMAT.packed(words.unpacked(qweight, ORDER).t().contiguous())
    zero = words.unless_symmetric(words.unpacked(qzeros, ORDER))
    return Quantized(
        stored, scales.t(), None if zero is None else zero.t(), format="int4", group=group
    )


def written(weight: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """``(qweight, qzeros, scales)`` of a weight."""
    qweight = words.packed(FORMAT.unpacked(weight.stored).t(), ORDER)
    qzeros = words.packed(words.zeros_of(weight).t(), ORDER)
    return qweight, qzeros, weight.scale.t().contiguous()
