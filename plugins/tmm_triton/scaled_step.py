"""Multiplies one step along K of operands that are packed, or whose scales or zero points differ
along K.

A step is inside one group of each operand: its sum is multiplied by the scales of that group, in
fp32, and added to the others. Zero points are subtracted before the product.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tmm_core import Operand, Problem
from tmm_core.triton import factors, pointer

#: A group longer than any K: one number for a whole row or tensor.
_WHOLE = 1 << 30


@triton.jit
def stored(count, PACK: tl.constexpr):
    """The number of stored elements of ``count`` values along K."""
    if PACK == 1:
        return count
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return count // PACK


@triton.jit
def stored_range(k, ks, BLOCK_K: tl.constexpr, PACK: tl.constexpr):
    """The stored elements of the values ``ks``, which begin at ``k``."""
    if PACK == 1:
        return ks
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return k // PACK + tl.arange(0, BLOCK_K // PACK)


@triton.jit
def numbers(grid, z, outer, inside, k, OUTER: tl.constexpr, GROUP: tl.constexpr):
    """The scales or zero points at ``k`` of some rows (columns), as they are stored.

    Args:
        grid: The pointer, and the strides along the batch, the rows (columns) and K.
    """
    at = z.to(tl.int64) * grid[1] + (outer // OUTER) * grid[2] + (k // GROUP) * grid[3]
    return tl.load(grid[0] + at, mask=inside, other=0)


@triton.jit
def advance(
    a, b, acc, k, z, rows, row_at, M, cols, N, a_grid, b_grid, zeros,
    STEP: tl.constexpr, PRECISION: tl.constexpr, SWAP: tl.constexpr,
    A_OUTER: tl.constexpr, A_GROUP: tl.constexpr, B_OUTER: tl.constexpr, B_GROUP: tl.constexpr,
    ZERO_OUTER: tl.constexpr, ZERO_GROUP: tl.constexpr,
):  # fmt: skip
    """Add the product of one step, times the scales of its groups, to ``acc``.

    Args:
        rows, cols: Rows and columns of the tile; they exist below M and N.
        row_at: The rows of ``a``, which an index may name.
        a_grid, b_grid, zeros: As :func:`numbers` takes them.
    """
    if A_GROUP is None and B_GROUP is None:
        if ZERO_GROUP is None:
            acc = STEP(a, b, acc, PRECISION, SWAP)
        else:
            zero = numbers(zeros, z, cols, cols < N, k, ZERO_OUTER, ZERO_GROUP).to(tl.float32)
            acc = STEP(a, b, acc, PRECISION, SWAP, zero)
    else:
        part = tl.zeros(acc.shape, dtype=tl.float32)
        if ZERO_GROUP is None:
            part = STEP(a, b, part, PRECISION, SWAP)
        else:
            zero = numbers(zeros, z, cols, cols < N, k, ZERO_OUTER, ZERO_GROUP).to(tl.float32)
            part = STEP(a, b, part, PRECISION, SWAP, zero)
        if B_GROUP is not None:
            scale = factors(numbers(b_grid, z, cols, cols < N, k, B_OUTER, B_GROUP))
            part *= scale[:, None] if SWAP else scale[None, :]
        if A_GROUP is not None:
            scale = factors(numbers(a_grid, z, row_at, rows < M, k, A_OUTER, A_GROUP))
            part *= scale[None, :] if SWAP else scale[:, None]
        acc += part
    return acc


def arguments(problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the run-time arguments and the constants of steps."""
    typed: dict[str, Any] = {}
    constants: dict[str, Any] = {"PACK": problem.b.pack}

    def strides(prefix: str, tensor: str, stacked: bool, dims: str) -> dict[str, Any]:
        along = {f"{prefix}{dim}": ("i64", (tensor, i + stacked)) for i, dim in enumerate(dims)}
        return {**along, f"{prefix}z": ("i64", (tensor, 0) if stacked else 0)}

    for name, dims in (("a", "mk"), ("b", "kn")):
        spec: Operand = getattr(problem, name)
        if spec.grid:
            stacked, of = len(problem.shape(name)) > 2, name.upper()
            typed |= strides(f"stride_{name}s", f"{name}_scale", stacked, dims)
            constants |= {f"{of}_OUTER": spec.block[0], f"{of}_GROUP": spec.block[1]}
    if problem.b.zero is not None:
        spec, stacked = problem.b, len(problem.b_shape) > 2
        typed["b_zero_ptr"] = pointer(problem.b.zero), "b_zero"
        constants |= {"ZERO_OUTER": max(1, spec.block[0]), "ZERO_GROUP": spec.block[1] or _WHOLE}
        if spec.grid:
            typed |= strides("stride_0", "b_zero", stacked, "kn")
        else:  # packed
            row = spec.block[0] == 1
            constants |= {"stride_0k": 0, "stride_0n": int(row)}
            typed["stride_0z"] = "i64", problem.width if row and stacked else 0
    return typed, constants
