"""Applies an epilogue after its product in one pass over memory, and its derivative in another.

These serve training, where the product's kernel cannot fuse the epilogue because backward needs its
input. Gated epilogues read both halves of a row in place and write both halves of their gradient.
The bias gradient is not summed in the same pass. Sums of 256 rows at a time took 25 (gelu,
8192×3072) to 41 µs (swiglu, 4096×11008) more on an H200, as long as torch's separate sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tmm_core.spec.epilogue import Epilogue
from tmm_core.triton.compile import pointer
from tmm_core.triton.device_functions import device_derivative, device_function
from tmm_core.triton.launch import Launch

Tensor = torch.Tensor

#: A tile: 16 elements per thread, with 512-byte rows of 16-bit elements. None of 4×256 to 16×256
#: and 2×1024 was 3 % faster on an H200.
BLOCK_M, BLOCK_N = 8, 256


@triton.jit
def _tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of the program's tile, and the mask of its elements in the output."""
    tiles = tl.cdiv(N, BLOCK_N)
    rows = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    cols = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return rows, cols, (rows < M) & (cols < N)


@triton.jit
def _forward(
    z_ptr, y_ptr, M, N, ldz,
    EPILOGUE: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, inside = _tile(M, N, BLOCK_M, BLOCK_N)
    z_ptrs = z_ptr + rows.to(tl.int64) * ldz + cols
    z = tl.load(z_ptrs, inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(z_ptrs + N, inside, other=0.0).to(tl.float32)
        y = EPILOGUE(z, up)
    else:
        y = EPILOGUE(z)
    y_ptrs = y_ptr + rows.to(tl.int64) * N + cols
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def _backward(
    grad_ptr, z_ptr, dz_ptr, M, N, ldz, grad_row, grad_col,
    SLOPE: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows, cols, inside = _tile(M, N, BLOCK_M, BLOCK_N)
    places = rows.to(tl.int64) * ldz + cols
    grad_ptrs = grad_ptr + rows.to(tl.int64) * grad_row + cols * grad_col
    grad = tl.load(grad_ptrs, inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + places, inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(z_ptr + N + places, inside, other=0.0).to(tl.float32)
        slope, up_slope = SLOPE(z, up)
        dup = grad * up_slope
        tl.store(dz_ptr + N + places, dup.to(dz_ptr.dtype.element_ty), inside)
    else:
        slope = SLOPE(z)
    dz = grad * slope
    tl.store(dz_ptr + places, dz.to(dz_ptr.dtype.element_ty), inside)


class Pointwise:
    """The two passes of one epilogue, for products of one width, dtype and device.

    They are compiled at construction and, for another gradient layout, at its first use.

    Raises:
        Exception: What Triton raises when it cannot compile or load a kernel.
    """

    def __init__(
        self, epilogue: Epilogue, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._width = width
        self._columns = self._width // 2 if epilogue.gated else self._width
        self._tiles = -(-self._columns // BLOCK_N)
        self._types = {"z_ptr": pointer(dtype), "M": "i32", "N": "i32", "ldz": "i32"}
        self._constants = {"GATED": epilogue.gated, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
        self._slope = device_derivative(epilogue)
        self._device = device
        self._divisible = {"z_ptr": 16}
        aligned = self._columns % 16 == 0
        if aligned:
            self._divisible |= {"N": 16, "ldz": 16}
        launch = Launch(
            _forward,
            self._types | {"y_ptr": self._types["z_ptr"]},
            self._constants | {"EPILOGUE": device_function(epilogue)},
            device=device,
            divisible=self._divisible | {"y_ptr": 16},
        )
        self._forward = launch.call
        self._backward: dict[tuple[Any, ...], Callable[..., None]] = {}
        self._address = launch.address
        # Compile for a layer's usual gradient now, before any capture.
        self._compiled(dtype, True, aligned)

    def forward(self, z: Tensor) -> Tensor:
        """Return the epilogue of ``z``, which is row-major and aligned to 16 bytes."""
        y = z.new_empty((*z.shape[:-1], self._columns))
        m = z.numel() // self._width
        if m:
            address, n = self._address, self._columns
            programs = -(-m // BLOCK_M) * self._tiles
            self._forward(programs, 1, 1, address(z), address(y), m, n, self._width)
        return y

    def backward(self, grad: Tensor, z: Tensor) -> Tensor:
        """Return ``grad``, of any strides, times the derivative at ``z``."""
        dz = torch.empty_like(z)
        m = z.numel() // self._width
        if not m:
            return dz
        if grad.dim() != 2:
            grad = grad.reshape(m, self._columns)
        row, column = grad.stride()
        dense = column == 1
        call = self._compiled(grad.dtype, dense, not (grad.data_ptr() & 15 or row & 15))
        address = self._address
        programs, strides = -(-m // BLOCK_M) * self._tiles, (row,) if dense else (row, column)
        given = address(grad), address(z), address(dz), m, self._columns, self._width
        call(programs, 1, 1, *given, *strides)
        return dz

    def _compiled(self, dtype: torch.dtype, dense: bool, aligned: bool) -> Callable[..., None]:
        key = (dtype, dense, aligned)
        call = self._backward.get(key)
        if call is None:
            types = self._types | {"dz_ptr": self._types["z_ptr"], "grad_ptr": pointer(dtype)}
            types["grad_row"] = "i64"
            constants = self._constants | {"SLOPE": self._slope}
            if dense:
                constants["grad_col"] = 1
            else:
                types["grad_col"] = "i64"
            divisible = self._divisible | {"dz_ptr": 16}
            if aligned:
                divisible |= {"grad_ptr": 16, "grad_row": 16}
            launch = Launch(_backward, types, constants, device=self._device, divisible=divisible)
            call = self._backward[key] = launch.call
        return call
