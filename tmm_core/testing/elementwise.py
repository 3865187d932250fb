"""Evaluates a device function on given numbers, without a product."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tmm_core.triton.launch import Launch

BLOCK = 1024


@triton.jit
def _evaluate(
    z_ptr,
    up_ptr,
    y_ptr,
    second_ptr,
    COUNT,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < COUNT
    z = tl.load(z_ptr + places, inside, other=0.0)
    if GATED:
        up = tl.load(up_ptr + places, inside, other=0.0)
        if PAIR:
            y, second = FUNCTION(z, up)
            tl.store(second_ptr + places, second, inside)
        else:
            y = FUNCTION(z, up)
    else:
        y = FUNCTION(z)
    tl.store(y_ptr + places, y, inside)


def evaluate(
    function: Any, operands: tuple[torch.Tensor, ...], *, pair: bool = False
) -> tuple[torch.Tensor, ...]:
    """Apply ``function``, as :func:`tmm_core.triton.device_function` returns it, to fp32 tensors of
    one shape: z, or gate and up. ``pair``: it returns two values."""
    z, up = operands[0].contiguous(), operands[-1].contiguous()
    y, second = torch.empty_like(z), torch.empty_like(z)
    types = {"z_ptr": "*fp32", "up_ptr": "*fp32", "y_ptr": "*fp32", "second_ptr": "*fp32"}
    constants = {
        "FUNCTION": function,
        "GATED": len(operands) == 2,
        "PAIR": pair,
        "BLOCK": BLOCK,
    }
    launch = Launch(_evaluate, types | {"COUNT": "i32"}, constants, device=z.device)
    launch((triton.cdiv(z.numel(), BLOCK), 1, 1), z, up, y, second, z.numel())
    return (y, second) if pair else (y,)
