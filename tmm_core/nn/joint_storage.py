"""Joins two parameters in one storage, one after the other, so that a kernel reads them as one."""

from __future__ import annotations

import torch
from torch import nn

from tmm_core.quantized import Quantized

Tensor = torch.Tensor


def seen_alone(t: Tensor) -> Tensor:
    """``t`` at the same address, as the whole of a new storage."""
    start = t.storage_offset() * t.element_size()
    storage = t.untyped_storage()[start : start + t.nbytes]
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, 0, t.shape, t.stride())


def joined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """``first`` and ``second`` as one tensor of twice the rows, without a copy; None if they
    are not adjacent in one storage."""
    if first is None or second is None or first.shape != second.shape:
        return None
    if isinstance(first, Quantized) or isinstance(second, Quantized):
        return _joined_parts(first, second)
    if first.dtype is not second.dtype or not (first.is_contiguous() and second.is_contiguous()):
        return None
    try:
        if second.data_ptr() - first.data_ptr() != first.nbytes:
            return None
        # Tensors that the allocator happened to place side by side are not one storage: this
        # raises for them, as the line above does for tensors without memory (fake, wrapped).
        return first.as_strided((2 * first.shape[0], *first.shape[1:]), first.stride())
    except RuntimeError:
        return None


def join(first: Tensor, second: Tensor) -> None:
    """Move two parameters into one storage, if they are :func:`joinable`."""
    if isinstance(first, Quantized) and isinstance(second, Quantized):
        _join_parts(first, second)
    elif joinable(first, second):
        with torch.inference_mode(first.is_inference()), torch.no_grad():
            move_together(first, second)


def _alike(first: Quantized, second: Quantized) -> bool:
    """Whether both have the same format and scales, for each row or parts of it, and no zero
    points."""
    rows = len(first.stored)
    return (
        first._how == second._how
        and first.along == -1
        and first.block[0] == 1
        and first.shape == second.shape
        and first.zero is None
        and second.zero is None
        and first.scale.shape[:1] == second.scale.shape[:1] == (rows,)
    )


def _joined_parts(first: Tensor, second: Tensor) -> Quantized | None:
    if not (isinstance(first, Quantized) and isinstance(second, Quantized)):
        return None
    if not _alike(first, second):
        return None
    stored, scale = joined(first.stored, second.stored), joined(first.scale, second.scale)
    if stored is None or scale is None:
        return None
    return Quantized._of(stored, scale, None, first._how)


def _join_parts(first: Quantized, second: Quantized) -> None:
    if first is not second and _alike(first, second) and _joined_parts(first, second) is None:
        rows = first.shape[0]
        for part in ("stored", "scale"):
            both = torch.cat((getattr(first, part), getattr(second, part)))
            setattr(first, part, both[:rows])
            setattr(second, part, both[rows:])


def move_together(first: Tensor, second: Tensor) -> None:
    if joined(first, second) is None:
        rows = first.shape[0]
        both = torch.empty((2 * rows, *first.shape[1:]), dtype=first.dtype, device=first.device)
        both[:rows].copy_(first)
        both[rows:].copy_(second)
        first.data, second.data = both[:rows], both[rows:]


def joinable(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are plain parameters of the same shape and dtype, each with a storage
    to itself."""
    alike = (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)
    return alike and first is not second and _alone(first) and _alone(second)


def _alone(parameter: Tensor) -> bool:
    """Whether a parameter owns its memory: flattened and sharded ones are views of another's."""
    if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.is_sparse:
        return False
    return whole(parameter)


def whole(t: Tensor) -> bool:
    """Whether ``t`` is all of its storage."""
    return t.untyped_storage().nbytes() == t.numel() * t.element_size()
