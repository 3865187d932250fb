"""Joins parameters in one storage, one after the other, so that a kernel reads them as one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tmm_base.guards import suppress
from torch import nn

from tmm_core.quantized import Quantized

Tensor = torch.Tensor
#: Number of a model's tensors in each storage, by the storage's address.
Counts = Mapping[int, int]


def in_own_storage(t: Tensor) -> Tensor:
    """``t`` at the same address, as the whole of a new storage."""
    start = t.storage_offset() * t.element_size()
    storage = t.untyped_storage()[start : start + t.nbytes]
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, 0, t.shape, t.stride())


def stacked(parts: Sequence[Tensor]) -> Tensor | None:
    """The rows of all parts as one tensor, without a copy; None if they are not adjacent, in this
    order, in one storage."""
    start = parts[0]
    for t in parts:
        if isinstance(t, Quantized):
            return _stacked_quantized(parts)
        same = t.dtype is start.dtype and t.shape[1:] == start.shape[1:]
        if not same or not t.is_contiguous():
            return None
    with suppress(RuntimeError):
        for first, second in itertools.pairwise(parts):
            if second.data_ptr() - first.data_ptr() != first.nbytes:
                return None
        # This raises for tensors that the allocator happened to place side by side: they are not
        # one storage. The line above raises for tensors without memory (fake, wrapped).
        return start.as_strided((sum(map(len, parts)), *start.shape[1:]), start.stride())
    return None


def stack(parts: Sequence[Tensor]) -> None:
    """Move parameters into one storage, if they are :func:`stackable`."""
    if all(isinstance(t, Quantized) for t in parts):
        if stackable(parts) and stacked(parts) is None:
            for name in ("stored", "scale"):
                joint = torch.cat([getattr(t, name) for t in parts])
                for t, rows in zip(parts, joint.split([len(t) for t in parts]), strict=True):
                    setattr(t, name, rows)
    elif stackable(parts):
        move_together(*parts)


def against_one_product(layers: Sequence[Any], storages: Callable[[], Counts]) -> str | None:
    """Why the parameters of linear layers cannot be one weight and one bias; None if they can."""
    for kind in ("weight", "bias"):
        given = [t for layer in layers if (t := getattr(layer, kind)) is not None]
        if len(given) not in (0, len(layers)):
            return "some of them have no bias"
        if any(t.is_meta for t in given) or (given and stacked(given) is not None):
            continue
        plain = [t for t in given if not isinstance(t, Quantized)]
        # A generator: types of other libraries may have no address, and are not stackable.
        shared = (storages()[t.untyped_storage().data_ptr()] > 1 for t in plain)
        if given and (not stackable(given) or any(shared)):
            return "their weights share memory with others, or differ in dtype or device"
    return None


def stackable(parts: Sequence[Tensor]) -> bool:
    """Whether these are plain parameters with a storage each, or quantised ones with scales for
    rows. They must differ only in their rows, and not be shared with other processes."""
    start = parts[0]
    if len({id(t) for t in parts}) < len(parts):
        return False
    if any(t.shape[1:] != start.shape[1:] or t.device != start.device for t in parts):
        return False
    if len({t.is_inference() for t in parts}) > 1:  # no tensor can become the other kind
        return False
    if any(isinstance(t, Quantized) for t in parts):
        stored = [t.stored for t in parts if isinstance(t, Quantized)]
        return _alike(parts) and not any(map(between_processes, stored))
    return all(t.dtype is start.dtype and _alone(t) for t in parts)


def _alike(parts: Sequence[Tensor]) -> bool:
    """Whether all are quantised in one format, by scales along rows and without zero points."""
    start = parts[0]
    return isinstance(start, Quantized) and all(
        isinstance(t, Quantized)
        and t._how == start._how
        and t.along == -1
        and t.block[0] == 1
        and t.zero is None
        and t.scale.shape[:1] == (len(t.stored),)
        for t in parts
    )


def _stacked_quantized(parts: Sequence[Any]) -> Quantized | None:
    if not _alike(parts):
        return None
    stored, scale = stacked([t.stored for t in parts]), stacked([t.scale for t in parts])
    if stored is None or scale is None:
        return None
    return Quantized._from_parts(stored, scale, None, parts[0]._how)


def move_together(*parts: Tensor) -> None:
    """Move tensors into one storage. The mode of this call does not decide whether they are tensors
    of inference mode: that stays as it was."""
    if stacked(parts) is not None:
        return
    start = parts[0]
    rows = [len(t) for t in parts]
    with torch.inference_mode(start.is_inference()), torch.no_grad():
        joint = torch.empty((sum(rows), *start.shape[1:]), dtype=start.dtype, device=start.device)
        for t, place in zip(parts, joint.split(rows), strict=True):
            place.copy_(t)
            t.data = place


def _alone(parameter: Tensor) -> bool:
    """Whether a parameter owns its memory. Flattened and sharded parameters are views of another
    tensor's. Memory that torch did not allocate is another object's, such as an array's."""
    if type(parameter) is not nn.Parameter or parameter.is_meta or parameter.is_sparse:
        return False
    own = whole(parameter) and parameter.untyped_storage().resizable()
    return own and not between_processes(parameter)


def between_processes(t: Tensor) -> bool:
    """Whether other processes may read and write this memory: they would not follow a move."""
    return t.device.type == "cpu" and t.is_shared()


def whole(t: Tensor) -> bool:
    """Whether ``t`` is all of its storage."""
    return t.untyped_storage().nbytes() == t.numel() * t.element_size()
