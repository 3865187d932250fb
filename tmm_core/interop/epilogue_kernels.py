"""Finds the kernels that apply an epilogue after its product in training.

Triton is imported with the first of them.
"""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from tmm_core import settings
from tmm_core.errors import error_text, reraise, warn
from tmm_core.formats import FLOATS
from tmm_core.spec.device import fingerprint
from tmm_core.spec.epilogue import Epilogue

if TYPE_CHECKING:
    from tmm_core.triton.pointwise import Pointwise

NAME = settings.POINTWISE

#: Keyed by epilogue, width and dtype of the product, device, and settings.
_found: dict[tuple[Any, ...], Pointwise | None] = {}


def kernels(
    epilogue: Epilogue, width: int, dtype: torch.dtype, like: torch.Tensor
) -> Pointwise | None:
    """Return the kernels that apply ``epilogue`` and its derivative to products of this width, on
    the device of ``like``. None if torch has to apply them. Then the epilogue lacks device
    functions, or a derivative in torch (for second derivatives). Or the kernels do not support the
    dtype, or Triton is absent or failed.
    """
    key = (epilogue.key, width, dtype, like.device, settings.overridden())
    try:
        return _found[key]
    except KeyError as error:
        reraise(error)
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # loading a kernel would end the capture
    pointwise = None
    if _serves(epilogue, width, dtype, like.device):
        try:
            module = importlib.import_module("tmm_core.triton.pointwise")
            with torch.cuda.device(like.device) if like.is_cuda else nullcontext():
                pointwise = module.Pointwise(epilogue, width, dtype, like.device)
        except Exception as error:
            reraise(error)
            warn_of_failure(epilogue, error)
    _found[key] = pointwise
    return pointwise


def takes(z: torch.Tensor) -> bool:
    """Whether the product is contiguous and aligned, as the kernels require."""
    return z.is_contiguous() and not z.data_ptr() & 15


def failed(epilogue: Epilogue, kernels: Pointwise, error: Exception) -> None:
    """Use torch's operators instead of these kernels from now on.

    Raises:
        OutOfMemoryError: ``error`` is one. Torch's operators would not avoid it.
    """
    if issubclass(type(error), torch.OutOfMemoryError):
        raise error
    warn_of_failure(epilogue, error)
    for key, value in list(_found.items()):
        if value is kernels:
            _found[key] = None


def warn_of_failure(epilogue: Epilogue, error: Exception) -> None:
    warn(
        f"{NAME} failed for epilogue {epilogue}, which torch applies from now on in training: "
        f"{error_text(error)}"
    )


def _serves(epilogue: Epilogue, width: int, dtype: torch.dtype, device: torch.device) -> bool:
    described = fingerprint(device)
    return (
        NAME not in settings.current().disable
        and (device.type == "cuda" or (device.type == "cpu" and described.interpreted))
        and bool(described.triton)
        and dtype in FLOATS
        and width > 0
        and all(
            stage.device is not None
            and stage.device_derivative is not None
            and (stage.derivative is not None or stage.output_vjp is not None)
            for stage in epilogue.chain
        )
    )
