"""HQQ in 4 bits. A byte's high bits hold a number of the first half of the weight, its low bits one
of the second half."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tmm_core.formats.grids import shift_right
from tmm_core.formats.int4 import FORMAT
from tmm_core.quantized import Quantized

Tensor = torch.Tensor

_REQUIRED = ("nbits", "group_size", "shape", "scale", "zero")


def read(w_q: Tensor, meta: Mapping[str, Any]) -> Quantized:
    """The 4-bit weight of an HQQ layer, repacked along K.

    Args:
        w_q: ``HQQLinear.W_q``, ``[N · K/g / 2, g]`` uint8.
        meta: ``HQQLinear.meta``: ``nbits``, ``group_size``, ``shape``, ``axis``, ``scale`` and
            ``zero``, both ``[N · K/g, 1]`` and not quantised themselves.

    Raises:
        ValueError: ``meta`` lacks an entry. The weight has another number of bits, groups along N,
            or quantised scales or zero points; or a tensor has another dtype or shape.
    """
    if missing := [name for name in _REQUIRED if name not in meta]:
        raise ValueError(f"HQQ's meta lacks {', '.join(missing)}")
    if (
        meta["nbits"] != 4
        or meta.get("axis", 1) != 1
        or meta.get("packing", "4bit_u8") != "4bit_u8"
    ):
        raise ValueError(
            "HQQ weights must have 4 bits (4bit_u8) and axis=1, groups along K; got "
            f"nbits={meta['nbits']}, axis={meta.get('axis')}, packing={meta.get('packing')}"
        )
    if meta.get("quant_scale") or meta.get("quant_zero"):
        raise ValueError("HQQ weights must have scales and zero points that are not quantised")
    n, k = meta["shape"]
    group = meta["group_size"] or k
    if w_q.dtype is not torch.uint8 or 2 * w_q.numel() != n * k or k % group:
        raise ValueError(
            f"W_q must be uint8 of {n} × {k} numbers, two in a byte, in groups of {group}; got "
            f"{w_q.dtype} of shape {tuple(w_q.shape)}"
        )
    numbers = torch.cat((shift_right(w_q, 4), w_q & 15)).reshape(n, k)
    parts = {name: meta[name] for name in ("scale", "zero")}
    for name, t in parts.items():
        if t.numel() * group != n * k:
            raise ValueError(f"{name} must have one number per group, got {tuple(t.shape)}")
    scale, zero = (t.reshape(n, k // group) for t in parts.values())
    return Quantized(FORMAT.packed(numbers), scale, zero, format="int4", group=group)
