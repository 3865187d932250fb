"""``triton.grouped``: the naive tiling with the two things that make it fast.

Tiles are visited GROUP_M rows at a time, so that the programs running together need few
distinct rows of A and columns of B and find them in L2; and loads run ``num_stages`` steps
ahead of the dot. Where BLOCK_K divides K the loop compares nothing along K. It asks nothing
of its operands, so it is what serves strides that bulk copies cannot address.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from tmm_core import Launcher, Problem, Traits
from tmm_triton.kernel import TritonKernel, group_sizes, proposed, single, tiles
from tmm_triton.operands import Build, TileConfig, build, check, dot, finish, load, rescale, tile_of


@triton.jit
def grouped_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, K,
    stride_az, stride_am, stride_ak,
    stride_bz, stride_bk, stride_bn,
    stride_rz, stride_rm, stride_rn,
    stride_oz, stride_om, stride_on,
    stride_bias, alpha, scale_a_ptr, scale_b_ptr, GROUP_M,
    SCALE_A: tl.constexpr, SCALE_B: tl.constexpr,
    EPILOGUE: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    WHOLE_K: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(1)
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    a_rows = a_ptr + z * stride_az + rows[:, None] * stride_am
    b_cols = b_ptr + z * stride_bz + cols[None, :] * stride_bn

    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        a = load(a_rows + ks[None, :] * stride_ak, rows, ks, M, K, False, WHOLE_K)
        b = load(b_cols + ks[:, None] * stride_bk, ks, cols, K, N, WHOLE_K, False)
        acc = dot(a, b, acc, PRECISION, UPCAST)

    acc = rescale(acc, z, rows, cols, M, N, scale_a_ptr, scale_b_ptr, SCALE_A, SCALE_B)
    finish(
        acc, z, rows, cols, M, N, bias_ptr, stride_bias, alpha, EPILOGUE,
        residual_ptr, stride_rz, stride_rm, stride_rn, out_ptr, stride_oz, stride_om, stride_on,
    )  # fmt: skip


#: BLOCK_M, BLOCK_N, BLOCK_K, num_stages, num_warps at 16 bits per element: wide tiles for
#: sizes of many waves, narrow ones to fill the GPU with one.
_SHAPES = [
    (128, 256, 64, 3, 8),
    (128, 256, 64, 4, 8),
    (128, 128, 64, 3, 8),
    (128, 128, 64, 4, 8),
    (128, 128, 32, 5, 8),
    (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (64, 64, 64, 5, 4),
    (64, 32, 128, 4, 4),
    (128, 32, 64, 5, 4),
    (32, 64, 128, 5, 4),
    (16, 128, 128, 4, 4),
    (16, 64, 128, 5, 4),
    (16, 32, 256, 5, 2),
]


#: Where K must not be cut, so that a few rows have no more tiles than columns fill: narrow ones,
#: several to an SM, since whole waves of one each leave SMs idle (N = 5120: 160 tiles of 32).
_INVARIANT_SHAPES = [
    (16, 32, 128, 6, 2),
    (16, 16, 256, 4, 2),
    (32, 32, 128, 5, 4),
    (64, 16, 128, 4, 4),
    (64, 32, 64, 6, 4),
    (64, 64, 64, 4, 4),
]


@dataclass(frozen=True, kw_only=True)
class GroupedConfig(TileConfig):
    """A tile, its pipeline, and how many rows of tiles are visited together."""

    GROUP_M: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check("GROUP_M", self.GROUP_M, range(1, 65))


class Grouped(TritonKernel[GroupedConfig]):
    name = "triton.grouped"
    traits = Traits(deterministic=True, batch_invariant=True)
    config_type = GroupedConfig
    reach = 0.62

    def configs(self, problem: Problem) -> list[GroupedConfig]:
        more = _INVARIANT_SHAPES if problem.batch_invariant else []
        configs = [
            GroupedConfig(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_stages=s, num_warps=w, GROUP_M=g)
            for g in group_sizes(problem)
            for m, n, k, s, w in proposed(problem, _SHAPES + more)
        ]
        return self.ranked(problem, configs, 16 + len(more))

    def builds(self, problem: Problem, config: GroupedConfig) -> list[Build]:
        whole = problem.k % config.BLOCK_K == 0
        return [build(grouped_kernel, problem, config, {"WHOLE_K": whole})]

    def bind(self, problem: Problem, config: GroupedConfig) -> Launcher:
        return single(self, problem, config, (tiles(problem, config), problem.batch, 1))
