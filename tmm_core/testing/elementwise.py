"""Evaluates a device function on given numbers, without a product."""

from __future__ import annotations

from typing import Any

import torch

from tmm_core.triton import pointwise
from tmm_core.triton.launch import Launch


def evaluate(
    function: Any, operands: tuple[torch.Tensor, ...], *, pair: bool = False
) -> tuple[torch.Tensor, ...]:
    """Apply ``function``, as :func:`tmm_core.triton.device_function` returns it, to 2-D fp32
    tensors of one shape: z, or gate and up. ``pair``: it returns two values, like the derivative of
    a gated epilogue."""
    z = torch.cat(operands, -1)
    (rows, columns), width = operands[0].shape, z.shape[1]
    names = ("z_ptr", "grad_ptr", "dz_ptr") if pair else ("z_ptr", "y_ptr")
    types = {**dict.fromkeys(names, "*fp32"), **dict.fromkeys(("M", "N", "ldz"), "i32")}
    high, wide = pointwise.BLOCK_M, pointwise.BLOCK_N
    constants = {"GATED": len(operands) == 2, "BLOCK_M": high, "BLOCK_N": wide}
    grid = -(-rows // high) * -(-columns // wide), 1, 1
    if pair:
        ones, slopes = z.new_ones(columns), torch.empty_like(z)  # the gradient, of every row
        constants |= {"SLOPE": function, "grad_row": 0, "grad_col": 1}
        launch = Launch(pointwise._backward, types, constants, device=z.device)
        launch(grid, ones, z, slopes, rows, columns, width)
        return slopes.chunk(2, -1)
    y = torch.empty_like(operands[0])
    launch = Launch(pointwise._forward, types, {**constants, "EPILOGUE": function}, device=z.device)
    launch(grid, z, y, rows, columns, width)
    return (y,)
