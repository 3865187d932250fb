"""Partial sums over ranges of K, and the kernel that adds them up.

Kernels that split K write partial sums of each range to a workspace, fp32, row-major. The reducing
kernel adds them in a fixed order and finishes the full sum with epilogue, bias and residual. It is
spread over all SMs, independent of the tiles, and on Hopper and later its launch overlaps the tail
of the previous kernel (programmatic dependent launch).
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from tmm_core import Problem
from tmm_triton.blocks import finish, rescale
from tmm_triton.operands import Build, TileConfig, Typed, build
from tmm_triton.pdl import hopper_or_later

#: Limit of the workspace, in bytes. A larger one costs more traffic than splitting saves. Kernels
#: index it with 32 bits.
MOST_WORKSPACE = 128 * 2**20
#: µs that the reducing kernel adds if its launch overlaps the first one's tail.
REDUCE_US = 1.5
#: Elements of partial sums that a program of the reducing kernel loads at a time: 16 for each of
#: 128 threads.
_LOADED = 2048
#: Maximum ranges among them. That leaves at least 32 columns, 128 bytes of each range.
_MOST_AHEAD = 64
#: The reducing kernel does not use a config's tile.
_TILE = TileConfig(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16, num_stages=1, num_warps=4)


@triton.jit
def _in_order(total, parts, COUNT: tl.constexpr):
    """``total`` with COUNT parts added one after the other, ``parts[COUNT, M, N]``. The order of
    ``tl.sum`` depends on Triton's version (since 3.8, pairs of pairs) and on the parts' layout."""
    if COUNT == 1:
        return total + parts.reshape(total.shape)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        halves = parts.reshape([2, COUNT // 2, parts.shape[1], parts.shape[2]])
        first, second = halves.permute(1, 2, 3, 0).split()
        total = _in_order(total, first, COUNT // 2)
        return _in_order(total, second, COUNT // 2)


@triton.jit
def reduce_kernel(
    partials_ptr, bias_ptr, residual_ptr, out_ptr,
    apart, M, N,
    stride_rz, stride_rm, stride_rn,
    stride_oz, stride_om, stride_on,
    stride_bias, alpha, a_scale_ptr, b_scale_ptr,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
    EPILOGUE: tl.constexpr, SPLIT_K: tl.constexpr, OVERLAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Finish a tile of the sum of SPLIT_K parts [batch, M, N] that are ``apart`` elements apart.

    AHEAD partial sums are loaded at a time. Loaded one by one, each has the latency of L2 (0.2 µs
    on an H200, 60 for 256 of them). The order of additions is fixed. With IN_ORDER, all parts are
    loaded at a time and added in the order of K.
    """
    z = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = z * M * N + rows[:, None] * N + cols[None, :]
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    acc = tl.zeros((AHEAD, BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, SPLIT_K, AHEAD):
        split = first + tl.arange(0, AHEAD)
        ptrs = partials_ptr + (split * apart)[:, None, None] + at[None, :, :]
        mask = (split < SPLIT_K)[:, None, None] & inside[None, :, :]
        # Written by other SMs: bypass this one's L1.
        acc += tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    if IN_ORDER:
        acc = _in_order(tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32), acc, AHEAD)
    else:
        acc = tl.sum(acc, axis=0)
    acc = rescale(acc, z, rows, cols, M, N, a_scale_ptr, b_scale_ptr, A_SCALE, B_SCALE)
    finish(
        acc, z, rows, cols, M, N, bias_ptr, stride_bias, alpha, EPILOGUE,
        residual_ptr, stride_rz, stride_rm, stride_rn, out_ptr, stride_oz, stride_om, stride_on,
    )  # fmt: skip


def reduction(problem: Problem, splits: int, apart: int) -> Build:
    """Return the reducing kernel of ``splits`` parts in the workspace, ``apart`` elements apart."""
    overlap = hopper_or_later(problem)
    m, n, ahead = _tile(problem, splits)
    constants = {
        "BLOCK_M": m, "BLOCK_N": n, "AHEAD": ahead, "OVERLAP": overlap, "SPLIT_K": splits,
        "IN_ORDER": problem.batch_invariant and splits <= ahead,
    }  # fmt: skip
    own: Typed = {"partials_ptr": ("*fp32", "workspace"), "apart": ("i32", apart)}
    grid = triton.cdiv(problem.m, m), triton.cdiv(problem.n, n), problem.batch
    reducing = build(reduce_kernel, problem, _TILE, grid, constants, own, launch_pdl=overlap)
    # Parts are whole rows, so the width of a row's loads is valid for each part.
    divisible = reducing.divisible
    if "N" in divisible:
        divisible = {**divisible, "apart": divisible["N"]}
    return replace(reducing, divisible=divisible)


def _tile(problem: Problem, splits: int) -> tuple[int, int, int]:
    """The tile of one program, and how many partial sums it loads at a time. The tile has one row,
    so that the order of additions does not change with M."""
    if problem.device.interpreted:
        return 128, 128, 2
    ahead = min(_MOST_AHEAD, triton.next_power_of_2(splits))
    return 1, min(_LOADED // ahead, triton.next_power_of_2(problem.n)), ahead
