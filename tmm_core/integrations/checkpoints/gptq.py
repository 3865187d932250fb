"""GPTQ: words of eight numbers along K, zero points along N, in 4 bits."""

from __future__ import annotations

import torch

from tmm_core.formats.int4 import FORMAT
from tmm_core.integrations.checkpoints import words
from tmm_core.quantized import Quantized

Tensor = torch.Tensor


def read(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    group: int = 128,
    g_idx: Tensor | None = None,
    *,
    version: int | None = None,
    order: Tensor | None = None,
) -> Quantized:
    """A weight of a GPTQ checkpoint, repacked along K.

    Args:
        qweight: ``[K/8, N]`` int32.
        qzeros: ``[K/g, N/8]`` int32.
        scales: ``[K/g, N]``, which is not copied.
        group: g; -1: all of K.
        g_idx: ``[K]``, the group of each k: in order, as without activation order.
        version: The version of the zero points: 1 stores z − 1, 2 stores z. None: the version for
            which the weights' mean is nearer to zero. A checkpoint's own label is often wrong.
        order: From :func:`order`; the weight's columns are put in this order.

    Raises:
        ValueError: A tensor has another dtype or shape; or the groups are not in the order of k, so
            that each product would have to gather its activations.
    """
    k, n = qweight.shape[0] * 8, qweight.shape[-1]
    group, count = words.groups(group, k)
    if version not in (None, 1, 2):
        raise ValueError(f"zero points have version 1 or 2, not {version!r}")
    words.check_words("qweight", qweight, (k // 8, n))
    words.check_words("qzeros", qzeros, (count, n // 8))
    if tuple(scales.shape) != (count, n):
        raise ValueError(f"scales must have shape {(count, n)}, got {tuple(scales.shape)}")
    if g_idx is not None:
        usual = torch.arange(k, device=g_idx.device, dtype=g_idx.dtype) // group
        if g_idx.shape != (k,) or not torch.equal(g_idx, usual):
            raise ValueError(
                "g_idx is not in order of k (desc_act): a product would have to gather its "
                "activations, as in layers that convert() serves; quantise without activation order"
            )
    # A word of eight along K is four bytes of two.
    stored = qweight.t().contiguous().view(torch.uint8)
    if order is not None:
        stored = FORMAT.packed(FORMAT.unpacked(stored).index_select(1, order))
    zero = words.unpacked(qzeros)
    if version is None:
        version = _version(stored, zero)
    if version == 1:
        zero = (zero + 1) & 15
    zeros = words.unless_symmetric(zero)
    return Quantized(
        stored, scales.t(), None if zeros is None else zeros.t(), format="int4", group=group
    )


def order(g_idx: Tensor | None, group: int) -> Tensor | None:
    """The k of each column after the columns are sorted by group, ``[K]`` int64. A product with the
    sorted weight gathers its activations by this index. None if columns are sorted already.

    Raises:
        ValueError: Groups have other sizes than ``group``.
    """
    if g_idx is None:
        return None
    usual = torch.arange(len(g_idx), device=g_idx.device, dtype=g_idx.dtype) // group
    if torch.equal(g_idx, usual):
        return None
    found, places = torch.sort(g_idx, stable=True)
    if not torch.equal(found, usual):
        raise ValueError(f"g_idx has groups of other sizes than {group}")
    return places


def written(
    weight: Quantized, version: int = 1, order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``(qweight, qzeros, scales)`` of a weight."""
    stored = weight.stored
    if order is not None:
        codes = FORMAT.unpacked(stored)
        stored = FORMAT.packed(torch.empty_like(codes).index_copy_(1, order, codes))
    qweight = stored.contiguous().view(torch.int32).t().contiguous()
    zeros = (words.zeros_of(weight).t().to(torch.int32) - int(version == 1)) & 15
    return qweight, words.packed(zeros), weight.scale.t().contiguous()


def _version(stored: Tensor, zero: Tensor) -> int:
    """1 if ``zero`` is one below the zero points, else 2. In units of the quantisation step, the
    mean of weights is near zero, and the wrong version moves it by one."""
    mean = FORMAT.unpacked(stored).float().mean() - zero.float().mean()
    return 1 if float(mean) > 0.5 else 2
