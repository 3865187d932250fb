"""``quantize_rows``: rounds activations to 8-bit floats, by one kernel on a GPU."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch.autograd import forward_ad

from tmm_core.errors import error_text, reraise, warn
from tmm_core.formats import FLOATS
from tmm_core.interop import autograd_state
from tmm_core.interop.libraries import define
from tmm_core.quantized import Quantized
from tmm_core.rounding import quantize
from tmm_core.spec.device import fingerprint

Tensor = torch.Tensor

#: The sizes of the format's groups; 0: a whole row.
_GROUPS = (0, 32, 64, 128)
_E4M3 = torch.float8_e4m3fn

#: Launchers by dtype, length, group, alignment and device; None if torch has to round.
_found: dict[tuple[Any, ...], Any] = {}


def quantize_rows(x: Tensor, *, group: int = 0) -> Quantized:
    """Round activations to 8-bit floats (e4m3), for products with weights in 8-bit floats.

    >>> y = tmm_core.linear(tmm_core.quantize_rows(x, group=128), w8)  # doctest: +SKIP

    Each scale is the largest magnitude of its values divided by 448, in fp32. On a GPU one kernel
    reads ``x`` once (rows of more than 4,096 values twice). Scales of groups have the memory layout
    of ``torch.nn.functional.scaled_mm``: the scales of one group are adjacent for all rows.
    ``quantize(x, "fp8", group=group)`` gives the same values.

    Args:
        x: ``[…, K]`` in fp16, bf16 or fp32, of any strides.
        group: The values along K that share a scale: 32, 64 or 128; 0: all of a row.

    Returns:
        The rows, of the shape of ``x``. NaN and Inf make their group NaN.

    Raises:
        TypeError: ``x`` has another dtype, or no dimension.
        ValueError: ``group`` is another number.
        RuntimeError: A gradient of ``x`` would be recorded, or it has a tangent: rounding has none.
    """
    if type(group) is not int or group not in _GROUPS:
        raise ValueError(f"quantize_rows() has groups of 32, 64 or 128 values, or 0, not {group}")
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or not x.dim():
        raise TypeError(
            "quantize_rows() takes a tensor of rows in float16, bfloat16 or float32, not "
            f"{getattr(x, 'dtype', type(x).__name__)}"
        )
    if autograd_state.recorded(x) or forward_ad.unpack_dual(x).tangent is not None:
        raise RuntimeError("quantize_rows() has no derivative: pass x.detach()")
    stored, scale = torch.ops.tmm.quantize_rows(x, group)
    return Quantized(stored, scale, format="fp8", group=group or None)


def _run(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    *lead, k = x.shape
    rows = x.reshape(math.prod(lead), k)
    if rows.stride(-1) != 1 and k > 1:
        rows = rows.contiguous()
    kernel = _kernel(rows, group) if rows.numel() else None
    stored, scale = _by_torch(rows, group) if kernel is None else kernel(rows)
    return stored.view(x.shape), scale.unflatten(0, lead) if lead else scale.squeeze(0)


def _by_torch(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    m, k = rows.shape
    chunks = -(-k // group) if group else 1
    if not rows.numel():
        return rows.to(_E4M3), rows.new_empty((chunks, m), dtype=torch.float32).t()
    found: Any = quantize(rows, "fp8", group=group)
    return found.stored, found.scale.reshape(m, chunks).t().contiguous().t()


def _kernel(rows: Tensor, group: int) -> Any:
    """Return the kernel for these rows; None if torch has to quantise them."""
    if not rows.is_cuda:
        return None
    aligned = not (rows.data_ptr() & 15 or rows.stride(0) * rows.element_size() & 15)
    key = rows.dtype, rows.shape[1], group, aligned, rows.device
    if key in _found:
        return _found[key]
    if torch.cuda.is_current_stream_capturing():
        return None  # loading a kernel would end the capture
    kernel, device = None, fingerprint(rows.device)
    # Before Hopper, Triton rounds to 8 bits by way of fp16.
    if device.triton and not device.cuda.startswith("hip") and device.capability >= (9, 0):
        try:
            module = importlib.import_module("tmm_core.triton.quantize_rows")
            with torch.cuda.device(rows.device):
                kernel = module.QuantizeRows(rows.dtype, rows.shape[1], group, aligned, rows.device)
        except Exception as error:
            reraise(error)
            warn(f"quantize_rows() runs by torch's operators from now on: {error_text(error)}")
    _found[key] = kernel
    return kernel


def _fake(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    *lead, k = x.shape
    chunks, rows = -(-k // group) if group else 1, math.prod(lead)
    scale = x.new_empty((chunks, rows), dtype=torch.float32).t()
    stored = x.new_empty(x.shape, dtype=_E4M3)
    return stored, scale.unflatten(0, lead) if lead else scale.squeeze(0)


define("quantize_rows(Tensor x, int group) -> (Tensor, Tensor)", _run, _fake)
