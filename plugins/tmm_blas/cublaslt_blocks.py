"""Multiplies two operands in e4m3 with scales of groups and blocks, by cuBLASLt on Hopper.

``torch.nn.functional.scaled_mm`` reads scales by address and checks little: in another layout than
cuBLASLt's the result is wrong without an error. Scales of ``a``, ``[M, K/128]``, are column-major.
Scales of groups of ``b`` have the same layout, ``[N, K/128]``. Scales of blocks of ``b``, ``[K/128,
N/128]``, are column-major too, and K/128 is rounded up to a multiple of 4. See
https://docs.nvidia.com/cuda/cublas, "1D and 128x128 block scaling for FP8".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from tmm_core import Problem

Tensor = torch.Tensor

GROUP = 128
#: The oldest CUDA whose cuBLASLt takes such scales.
CUDA = (12, 9)
_UNIT = 4


def takes_layout(problem: Problem, multiple: int) -> bool:
    """Whether cuBLASLt multiplies 8-bit operands of these layouts and sizes: a row-major times a
    column-major matrix, whose K and N are multiples of that number."""
    return (
        problem.native
        and problem.device.nvidia
        and problem.batch == 1
        and problem.m > 0
        and problem.a.layout == "row"
        and problem.b.layout == "col"
        and problem.a.aligned
        and problem.b.aligned
        and problem.k % multiple == problem.width % multiple == 0
        and 0 not in (problem.k, problem.width)
    )


def serves(problem: Problem) -> bool:
    """Whether torch and cuBLASLt multiply the problem's operands with their scales."""
    return (
        takes_layout(problem, GROUP)
        and problem.groups is None
        and not problem.epilogue.outputs
        and problem.a.dtype == problem.b.dtype == torch.float8_e4m3fn
        and problem.a.scale is not None
        and problem.b.scale is not None
        and problem.a.scale.dtype == problem.b.scale.dtype == torch.float32
        and problem.a.block == (1, GROUP)
        and problem.b.block in ((1, GROUP), (GROUP, GROUP))
        and problem.out.dtype is torch.bfloat16
        and problem.device.capability == (9, 0)
        and _release(problem.device.cuda) >= CUDA
        and hasattr(F, "scaled_mm")
        and hasattr(F, "ScalingType")
    )


def bind(problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A function from ``(a, b, a_scale, b_scale)`` to the product in bf16."""
    scaling: Any = F.ScalingType
    by_block = problem.b.block[0] != 1
    of_b = scaling.BlockWise128x128 if by_block else scaling.BlockWise1x128
    multiply: Any = F.scaled_mm

    def product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
        rows = a.shape[0]
        if beyond := -rows % _UNIT:
            # cuBLASLt refuses other numbers of rows.
            bits = F.pad(a.view(torch.uint8), (0, 0, 0, beyond))
            a, a_scale = bits.view(a.dtype), F.pad(a_scale, (0, 0, 0, beyond))
        b_scale = of_blocks(b_scale) if by_block else of_groups(b_scale.t())
        result: Tensor = multiply(
            a, b, of_groups(a_scale), scaling.BlockWise1x128, b_scale, of_b,
            output_dtype=torch.bfloat16,
        )  # fmt: skip
        return result[:rows]

    return product


def of_groups(scale: Tensor) -> Tensor:
    """Scales ``[rows, K/128]``, copied to column-major unless they already are."""
    rows, columns = scale.shape
    if scale.stride(0) == 1 and (columns == 1 or scale.stride(1) == rows):
        return scale
    return scale.t().contiguous().t()


def of_blocks(scale: Tensor) -> Tensor:
    """Scales ``[K/128, N/128]``, padded to ``[L, N/128]`` and column-major. L is K/128 rounded up
    to a multiple of 4."""
    rows, columns = scale.shape
    beyond = -rows % _UNIT
    if not beyond and scale.stride(0) == 1 and (columns == 1 or scale.stride(1) == rows):
        return scale
    return F.pad(scale.t(), (0, beyond)).contiguous().t()


def _release(cuda: str) -> tuple[int, ...]:
    """``(13, 0)`` for ``"13.0"``; empty if the release is unknown."""
    parts = cuda.split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()
