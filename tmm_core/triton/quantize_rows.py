"""Rounds rows to 8-bit floats (e4m3) in one pass, with a scale for each row or group of values."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tmm_core.triton.compile import pointer
from tmm_core.triton.launch import Launch

Tensor = torch.Tensor

#: Values of a program in groups, and values of a row that a program reads at once.
TILE, BLOCK = 8192, 4096
#: The largest number of e4m3.
LARGEST = torch.finfo(torch.float8_e4m3fn).max


@triton.jit
def _scale(largest, invalid, LARGEST: tl.constexpr):
    """The scale of a group by its largest magnitude, and what its values are divided by; both NaN
    where a value is NaN or Inf."""
    largest = tl.where(invalid, float("nan"), largest)
    scale = tl.div_rn(largest, LARGEST)
    return scale, tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _rounded(values, divisor, LARGEST: tl.constexpr):
    """The nearest numbers; rounding may exceed the largest one."""
    scaled = tl.div_rn(values, divisor)
    scaled = tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))
    return scaled.to(tl.float8e4nv)


@triton.jit
def groups_kernel(
    x_ptr, stored_ptr, scale_ptr, M, K, CHUNKS, stride_m, scale_k,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """``ROWS`` groups of ``CHUNK`` values along K."""
    pieces = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, piece = pieces // CHUNKS, pieces % CHUNKS
    inside = row < M
    k, ks = piece * CHUNK, tl.arange(0, CHUNK)
    mask = inside[:, None]
    if not EVEN:
        mask = mask & (k[:, None] + ks[None, :] < K)
    starts = x_ptr + row.to(tl.int64) * stride_m + k
    values = tl.load(starts[:, None] + ks[None, :], mask=mask, other=0.0).to(tl.float32)
    invalid = tl.max((tl.abs(values) < float("inf")).to(tl.int32) ^ 1, 1) != 0
    scale, divisor = _scale(tl.max(tl.abs(values), 1), invalid, LARGEST)
    tl.store(scale_ptr + piece.to(tl.int64) * scale_k + row, scale, mask=inside)
    ends = stored_ptr + row.to(tl.int64) * K + k
    found = _rounded(values, divisor[:, None], LARGEST)
    tl.store(ends[:, None] + ks[None, :], found, mask=mask)


@triton.jit
def rows_kernel(
    x_ptr, stored_ptr, scale_ptr, K, stride_m, BLOCK: tl.constexpr, LARGEST: tl.constexpr
):
    """One row, read twice where it is longer than a block."""
    row = tl.program_id(0).to(tl.int64)
    ks = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    invalid = tl.zeros((BLOCK,), dtype=tl.int32)
    for k in range(0, K, BLOCK):
        values = tl.load(x_ptr + row * stride_m + k + ks, mask=k + ks < K, other=0.0)
        values = values.to(tl.float32)
        invalid = invalid | ((tl.abs(values) < float("inf")).to(tl.int32) ^ 1)
        largest = tl.maximum(largest, tl.abs(values))
    scale, divisor = _scale(tl.max(largest, 0), tl.max(invalid, 0) != 0, LARGEST)
    tl.store(scale_ptr + row, scale)
    for k in range(0, K, BLOCK):
        values = tl.load(x_ptr + row * stride_m + k + ks, mask=k + ks < K, other=0.0)
        found = _rounded(values.to(tl.float32), divisor, LARGEST)
        tl.store(stored_ptr + row * K + k + ks, found, mask=k + ks < K)


class QuantizeRows:
    """The pass for rows of one dtype, length and alignment on one device.

    Args:
        dtype: The dtype of the rows.
        k: Values in a row, one or more.
        group: Values that share a scale, a power of two from 16 to 128; 0: all of a row.
        aligned: Whether the address and the distance of rows are multiples of 16 bytes.
        device: The device of the rows.

    Raises:
        Exception: What Triton raises when it cannot compile or load the kernel.
    """

    def __init__(
        self, dtype: torch.dtype, k: int, group: int, aligned: bool, device: torch.device
    ) -> None:
        self._group = group
        fn, given = arguments(dtype, k, group, aligned)
        launch = Launch(fn, device=device, **given)
        self._call, self._address = launch.call, launch.address

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored numbers ``[M, K]``, row-major, and the scales ``[M, 1]`` or ``[M,
        ⌈K/group⌉]``, column-major.

        Args:
            x: ``[M, K]`` with adjacent elements along K.
        """
        m, k = x.shape
        chunks = -(-k // self._group) if self._group else 1
        stored = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=x.device)
        scale = torch.empty((chunks, m), dtype=torch.float32, device=x.device).t()
        if m:
            address = self._address
            parts = address(x), address(stored), address(scale)
            if self._group:
                programs = -(-m * chunks * self._group // TILE)
                self._call(programs, 1, 1, *parts, m, k, chunks, x.stride(0), m)
            else:
                self._call(m, 1, 1, *parts, k, x.stride(0))
        return stored, scale


def arguments(dtype: torch.dtype, k: int, group: int, aligned: bool) -> tuple[Any, dict[str, Any]]:
    """Return the kernel, and its types, constants, divisibility and options."""
    types = {
        "x_ptr": pointer(dtype), "stored_ptr": pointer(torch.float8_e4m3fn),
        "scale_ptr": pointer(torch.float32),
    }  # fmt: skip
    divisible = {"stored_ptr": 16, "scale_ptr": 16}
    if aligned:
        divisible |= {"x_ptr": 16, "stride_m": 16 // dtype.itemsize}
    if k % 16 == 0:
        divisible["K"] = 16
    constants: dict[str, Any] = {"LARGEST": LARGEST}
    if group:
        types |= {"M": "i32", "K": "i32", "CHUNKS": "i32", "stride_m": "i64", "scale_k": "i64"}
        constants |= {"CHUNK": group, "ROWS": TILE // group, "EVEN": k % group == 0}
    else:
        types |= {"K": "i32", "stride_m": "i64"}
        constants["BLOCK"] = min(BLOCK, triton.next_power_of_2(k))
    return groups_kernel if group else rows_kernel, {
        "types": types, "constants": constants, "divisible": divisible, "num_warps": 4,
        "num_stages": 1,
    }  # fmt: skip
