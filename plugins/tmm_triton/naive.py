"""``triton.naive``: the textbook blocked matmul, kept as a baseline for reading the others.

One program computes one [BLOCK_M, BLOCK_N] tile of the output, walking K in steps of
BLOCK_K; programs are numbered along rows of tiles. All operands are addressed by pointers
with any stride, and every load is masked in both dimensions. The tail of K is masked in *both*
operands. Zeros in one alone would be multiplied by values past the end of the other, such as NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tmm_core import Problem
from tmm_triton.blocks import finish, load, rescale
from tmm_triton.operands import Build, TileConfig, build
from tmm_triton.scaled_step import advance, stored, stored_range
from tmm_triton.triton_kernel import STEPPED, TritonKernel


@triton.jit
def naive_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, K,
    stride_az, stride_am, stride_ak,
    stride_bz, stride_bk, stride_bn,
    stride_rz, stride_rm, stride_rn,
    stride_oz, stride_om, stride_on,
    stride_bias, alpha, a_scale_ptr, b_scale_ptr,
    b_zero_ptr, stride_asz, stride_asm, stride_ask, stride_bsz, stride_bsk, stride_bsn,
    stride_0z, stride_0k, stride_0n,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
    STEP: tl.constexpr, EPILOGUE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PACK: tl.constexpr, A_OUTER: tl.constexpr, A_GROUP: tl.constexpr, B_OUTER: tl.constexpr,
    B_GROUP: tl.constexpr, ZERO_OUTER: tl.constexpr, ZERO_GROUP: tl.constexpr,
):  # fmt: skip
    tile, z = tl.program_id(0), tl.program_id(1)
    tiles_n = tl.cdiv(N, BLOCK_N)
    rows = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    a_rows = a_ptr + z * stride_az + rows[:, None] * stride_am
    b_cols = b_ptr + z * stride_bz + cols[None, :] * stride_bn

    a_grid = (a_scale_ptr, stride_asz, stride_asm, stride_ask)
    b_grid = (b_scale_ptr, stride_bsz, stride_bsn, stride_bsk)
    zeros = (b_zero_ptr, stride_0z, stride_0n, stride_0k)

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        a = load(a_rows + ks[None, :] * stride_ak, rows, ks, M, K, False, False)
        bs = stored_range(k, ks, BLOCK_K, PACK)
        ptrs = b_cols + bs[:, None] * stride_bk
        b = load(ptrs, bs, cols, stored(K, PACK), N, False, False)
        acc = advance(
            a, b, acc, k, z, rows, rows, M, cols, N, a_grid, b_grid, zeros,
            STEP, PRECISION, False, A_OUTER, A_GROUP, B_OUTER, B_GROUP, ZERO_OUTER, ZERO_GROUP,
        )  # fmt: skip

    acc = rescale(acc, z, rows, cols, M, N, a_scale_ptr, b_scale_ptr, A_SCALE, B_SCALE)
    finish(
        acc, z, rows, cols, M, N, bias_ptr, stride_bias, alpha, EPILOGUE,
        residual_ptr, stride_rz, stride_rm, stride_rn, out_ptr, stride_oz, stride_om, stride_on,
    )  # fmt: skip


#: BLOCK_M, BLOCK_N, BLOCK_K, num_stages, num_warps at 16 bits per element.
_SHAPES = [
    (128, 128, 64, 3, 8),
    (64, 128, 64, 3, 4),
    (64, 64, 64, 3, 4),
    (16, 64, 64, 3, 4),
]


class Naive(TritonKernel[TileConfig]):
    name = "triton.naive"
    version = "3"
    config_type = TileConfig
    supports = STEPPED
    reach, behind = 0.58, 1.2

    def configs(self, problem: Problem) -> list[TileConfig]:
        return self.ranked(problem, self.every(problem, _SHAPES), 4)

    def builds(self, problem: Problem, config: TileConfig) -> list[Build]:
        return [build(naive_kernel, problem, config, (config.tiles(problem), problem.batch, 1))]
