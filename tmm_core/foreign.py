"""Quantised tensors of other libraries, whose parts are read in place.

A tensor is recognised by its type's name, so that no library is imported for it. Tensors of other
types, and tensors that also quantise activations, are left to their own libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tmm_core.quantized import Quantized

Tensor = torch.Tensor


def read(t: Any) -> Any:
    """The tensor as a :class:`Quantized` that shares its memory; unchanged if its type is not
    recognised."""
    kind = type(t)
    if kind is Tensor or kind is torch.nn.Parameter:  # torch.compile cannot trace the rest
        return t
    reader = _READERS.get((kind.__module__.partition(".")[0], kind.__name__))
    found = None if reader is None or torch.compiler.is_exporting() else reader(t)
    return t if found is None else found


def read_operands(call: Any) -> Any:
    """The call with its operands passed through :func:`read`."""
    a, b = read(call.a), read(call.b)
    return call if a is call.a and b is call.b else call._replace(a=a, b=b)


def _int8(t: Any) -> Quantized | None:
    """torchao's ``Int8Tensor``: zero points that are all zero are left out."""
    if t.act_quant_kwargs is not None or t.act_pre_scale is not None:
        return None
    zero = _zero_points(t)
    return Quantized(t.qdata, t.scale, zero, format="int8", block=_block(t))


def _int4(t: Any) -> Quantized | None:
    """torchao's plain ``Int4Tensor``: ``value = stored · scale + zero_point``, and both parts are
    transposed."""
    if t.activation_dtype != torch.bfloat16 or t.act_pre_scale is not None:
        return None
    zero, scale = _zero_points(t), t.scale
    if zero is not None:
        # With a scale of zero all values equal the zero point. A small scale replaces it, because
        # the zero point is divided by the scale below.
        scale = torch.where(scale == 0, zero.to(scale.dtype) * 2.0**-24, scale)
        zero = torch.where(zero == 0, 0.0, -zero.float() / scale.float()).mT
    return Quantized(t.qdata, scale.mT, zero, format="int4_signed", block=_block(t))


def _float8(t: Any) -> Quantized | None:
    """torchao's ``Float8Tensor``, or its transpose."""
    if t.act_quant_kwargs is not None:
        return None
    is_transposed = t.dim() == 2 and t.qdata.stride(0) == 1 and t.qdata.stride(1) != 1
    stored, scale, block = t.qdata, t.scale, _block(t)
    if not is_transposed:
        return Quantized(stored, scale, format="fp8", block=block)
    if block is not None:
        block = block[1], block[0]
    transposed: Any = Quantized(stored.t(), scale.t(), format="fp8", block=block).t()
    return transposed  # type: ignore[no-any-return]  # torch types it as a Tensor


def _block(t: Any) -> tuple[int, int] | None:
    """The rows, and the values along K, that share a scale; None if all values share one."""
    if t.scale.numel() == 1:
        return None
    rows, k = t.block_size[-2:]
    return int(rows), int(k)


def _zero_points(t: Any) -> Tensor | None:
    """The zero points, or None where they are known to be zero.

    torchao stores zero points for symmetric weights too, and kernels are faster without. Reading
    them waits for a GPU, so there they are read once per version of the tensor, which a write
    through ``.data`` does not change. A tensor made in inference mode has no version: its zero
    points are returned unread.
    """
    zero: Tensor = t.zero_point
    if torch.compiler.is_compiling() or zero.is_meta or type(zero) is not Tensor:
        return zero
    if zero.device.type == "cpu":
        return zero if zero.any() else None
    if zero.is_inference():
        return zero
    version = zero._version
    known = getattr(t, _KNOWN, None)
    if known is None or known[0] is not zero or known[1] != version:
        if zero.is_cuda and torch.cuda.is_current_stream_capturing():
            return zero
        known = zero, version, not bool(zero.any())
        setattr(t, _KNOWN, known)
    return None if known[2] else zero


#: The attribute of a tensor that holds its zero points, their version and whether all are zero.
_KNOWN = "_tmm_zero_points"

_READERS: dict[tuple[str, str], Callable[[Any], Quantized | None]] = {
    ("torchao", "Int8Tensor"): _int8,
    ("torchao", "Int4Tensor"): _int4,
    ("torchao", "Float8Tensor"): _float8,
}
