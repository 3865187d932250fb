"""Allocates the auxiliary outputs of an epilogue, with which calls return a tuple."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tmm_core.spec.arguments import Arguments
from tmm_core.spec.epilogue import Epilogue

Tensor = torch.Tensor


def check_outputs(call: Arguments, epilogue: Epilogue, dtype: torch.dtype) -> None:
    """Refuse a call that cannot have the auxiliary outputs of ``epilogue``.

    Args:
        dtype: The result's dtype.

    Raises:
        ValueError: a or b is a vector, or b is a batch.
        TypeError: The result is not of floating dtype.
    """
    names = ", ".join(port.name for port in epilogue.outputs)
    if call.a.dim() < 2 or call.b.dim() != 2:
        raise ValueError(
            f"epilogue outputs ({names}) need a of two dimensions or more and b of two, got "
            f"{tuple(call.a.shape)} and {tuple(call.b.shape)}"
        )
    if not dtype.is_floating_point:
        raise TypeError(f"epilogue outputs ({names}) need a floating dtype, got {dtype}")


def allocating_outputs(epilogue: Epilogue, launcher: Any, shape: Sequence[int]) -> Any:
    """Wrap ``launcher`` to allocate the auxiliary outputs for a result of ``shape``, and to return
    ``(result, *outputs)``. Returns ``launcher`` itself if there are no outputs.

    Args:
        launcher: Takes the outputs by keyword, in the shapes for a result ``[M, N]``.
    """
    if not epilogue.outputs:
        return launcher
    *rows, n = shape
    flat = (torch.Size(rows).numel(), n)
    flat_shapes = [port.shape(flat) for port in epilogue.outputs]
    allocate = allocator(epilogue, shape)

    def run(a: Tensor, *rest: Any, **extras: Any) -> tuple[Tensor, ...]:
        outputs = allocate(a)
        views = tuple(t.view(flat) for t, flat in zip(outputs, flat_shapes, strict=True))
        return launcher(a, *rest, **extras, outputs=views), *outputs

    return run


def allocator(epilogue: Epilogue, shape: Sequence[int]) -> Callable[[Tensor], list[Tensor]]:
    """Return a function that allocates the auxiliary outputs for a result of ``shape``,
    uninitialised, on the device of the tensor that it is given."""
    sizes = [(port, math.prod(port.shape(shape))) for port in epilogue.outputs]
    return lambda like: [
        port.placed(like.new_empty(size, dtype=port.dtype), shape) for port, size in sizes
    ]
