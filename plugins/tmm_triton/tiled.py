"""``triton.grouped`` and ``triton.fused_epilogue``: one kernel over tiles, addressed by pointers.

Two things make it faster than the naive tiling. Tiles are visited GROUP_M rows at a time, so
concurrent programs need few distinct rows of A and columns of B, and find them in L2. Loads run
``num_stages`` steps ahead of the dot. If BLOCK_K divides K, the loop has no masks along K. It has
no requirements on operands, so it serves strides that bulk copies cannot address.
``triton.grouped`` is just this.

``triton.fused_epilogue`` serves gated products in one pass. silu(x·W_gate) · (x·W_up) is two
matmuls with one A. Computed separately, A is read twice and both products go through memory. Here a
program keeps two accumulators, for the same tile of the gate and the up half, and loads each tile
of A once for both dots. With SUBTILE 2 a tile is finished in two halves of its columns. The
epilogue's temporaries and the rounded copy then need half the registers, since a 128×256 tile has
few to spare. It also serves ungated products, with one accumulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import triton
import triton.language as tl

from tmm_core import ConfigError, Problem
from tmm_triton.blocks import add_residual, affine, load, parts, rescale, store, tile_of
from tmm_triton.operands import Build, TileConfig, build, check
from tmm_triton.output_ports import KINDS, MOST, REDUCES, Ports, put, put_groups, whole_groups
from tmm_triton.pdl import hopper_or_later
from tmm_triton.scaled_step import advance, stored, stored_range
from tmm_triton.triton_kernel import STEPPED, TritonKernel, group_sizes


@triton.jit
def tiled_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, K,
    stride_az, stride_am, stride_ak,
    stride_bz, stride_bk, stride_bn,
    stride_rz, stride_rm, stride_rn,
    stride_oz, stride_om, stride_on,
    stride_bias, alpha, a_scale_ptr, b_scale_ptr, GROUP_M,
    b_zero_ptr, stride_asz, stride_asm, stride_ask, stride_bsz, stride_bsk, stride_bsn,
    stride_0z, stride_0k, stride_0n,
    port_0_ptr, port_0_at, port_1_ptr, port_1_at,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
    STEP: tl.constexpr, EPILOGUE: tl.constexpr, PRECISION: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUBTILE: tl.constexpr, WHOLE_K: tl.constexpr,
    PACK: tl.constexpr, A_OUTER: tl.constexpr, A_GROUP: tl.constexpr, B_OUTER: tl.constexpr,
    B_GROUP: tl.constexpr, ZERO_OUTER: tl.constexpr, ZERO_GROUP: tl.constexpr,
    OF_0: tl.constexpr, KIND_0: tl.constexpr, REDUCE_0: tl.constexpr,
    OF_1: tl.constexpr, KIND_1: tl.constexpr, REDUCE_1: tl.constexpr,
    GROUPED_0: tl.constexpr, GROUP_0: tl.constexpr, GROUPED_1: tl.constexpr, GROUP_1: tl.constexpr,
):  # fmt: skip
    z = tl.program_id(1)
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    a_rows = a_ptr + z * stride_az + rows[:, None] * stride_am
    b_cols = b_ptr + z * stride_bz + cols[None, :] * stride_bn
    up_cols = b_cols + N * stride_bn

    a_grid = (a_scale_ptr, stride_asz, stride_asm, stride_ask)
    b_grid = (b_scale_ptr, stride_bsz, stride_bsn, stride_bsk)
    zeros = (b_zero_ptr, stride_0z, stride_0n, stride_0k)

    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        a = load(a_rows + ks[None, :] * stride_ak, rows, ks, M, K, False, WHOLE_K)
        bs, stored_k = stored_range(k, ks, BLOCK_K, PACK), stored(K, PACK)
        b = load(b_cols + bs[:, None] * stride_bk, bs, cols, stored_k, N, WHOLE_K, False)
        gate = advance(
            a, b, gate, k, z, rows, rows, M, cols, N, a_grid, b_grid, zeros,
            STEP, PRECISION, False, A_OUTER, A_GROUP, B_OUTER, B_GROUP, ZERO_OUTER, ZERO_GROUP,
        )  # fmt: skip
        if GATED:
            b_up = load(up_cols + bs[:, None] * stride_bk, bs, cols, stored_k, N, WHOLE_K, False)
            up = advance(
                a, b_up, up, k, z, rows, rows, M, cols + N, 2 * N, a_grid, b_grid, zeros,
                STEP, PRECISION, False, A_OUTER, A_GROUP, B_OUTER, B_GROUP, ZERO_OUTER, ZERO_GROUP,
            )  # fmt: skip

    width = 2 * N if GATED else N
    gate = rescale(gate, z, rows, cols, M, width, a_scale_ptr, b_scale_ptr, A_SCALE, B_SCALE)
    if GATED:
        up = rescale(up, z, rows, cols + N, M, width, a_scale_ptr, b_scale_ptr, A_SCALE, B_SCALE)
    parts_n = tl.cdiv(N, BLOCK_N) * SUBTILE
    gates, ups = parts(gate, SUBTILE), parts(up, SUBTILE)
    WIDTH: tl.constexpr = BLOCK_N // SUBTILE
    first = tile_n * BLOCK_N + tl.arange(0, WIDTH)
    for part in tl.static_range(SUBTILE):
        at = first + part * WIDTH
        acc = affine(gates[part], at, N, bias_ptr, stride_bias, alpha)
        if GATED:
            acc = EPILOGUE(acc, affine(ups[part], at + N, 2 * N, bias_ptr, stride_bias, alpha))
        else:
            acc = EPILOGUE(acc)
        acc = add_residual(acc, z, rows, at, M, N, residual_ptr, stride_rz, stride_rm, stride_rn)
        part_n = SUBTILE * tile_n + part
        put(
            acc, rows, at, M, N, tile_m, part_n, parts_n,
            port_0_ptr, port_0_at, OF_0, KIND_0, REDUCE_0,
        )  # fmt: skip
        put(
            acc, rows, at, M, N, tile_m, part_n, parts_n,
            port_1_ptr, port_1_at, OF_1, KIND_1, REDUCE_1,
        )  # fmt: skip
        store(acc, z, rows, at, M, N, out_ptr, stride_oz, stride_om, stride_on)
        # After the result: before it they took up to 184 bytes more of the stack per thread.
        put_groups(acc, rows, at, M, N, part_n, port_0_ptr, OF_0, GROUPED_0, GROUP_0)
        put_groups(acc, rows, at, M, N, part_n, port_1_ptr, OF_1, GROUPED_1, GROUP_1)


#: BLOCK_M, BLOCK_N, BLOCK_K, num_stages, num_warps at 16 bits per element: wide tiles for
#: sizes of many waves, narrow ones to fill the GPU with one.
_GROUPED_SHAPES = [
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


#: Shapes if K must not be split: a few rows then have only the tiles of the columns. These are
#: narrow, several per SM, since waves of one per SM leave SMs idle (N = 5120: 160 tiles of 32).
_INVARIANT_SHAPES = [
    (16, 32, 128, 6, 2),
    (16, 16, 256, 4, 2),
    (32, 32, 128, 5, 4),
    (64, 16, 128, 4, 4),
    (64, 32, 64, 6, 4),
    (64, 64, 64, 4, 4),
]


#: The most elements of a tile per thread where outputs have groups of columns.
_GROUPED_ELEMENTS = 64


@dataclass(frozen=True, kw_only=True)
class GroupedConfig(TileConfig):
    """A tile, its pipeline, and the number of tile rows that are visited as a group."""

    GROUP_M: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check("GROUP_M", self.GROUP_M, range(1, 65))


C = TypeVar("C", bound=GroupedConfig)


class Tiled(TritonKernel[C]):
    """The common part of ``triton.grouped`` and ``triton.fused_epilogue``."""

    supports = replace(STEPPED, outputs=KINDS, reduces=REDUCES)

    def declines(self, problem: Problem) -> Iterable[str]:
        yield from super().declines(problem)
        if len(problem.epilogue.outputs) > MOST:
            yield f"writes at most {MOST} auxiliary outputs"
        narrow = any(port.dtype.itemsize == 1 for port in problem.epilogue.outputs)
        if narrow and problem.device.type == "cuda" and not hopper_or_later(problem):
            yield "rounds to 8 bits by way of fp16 before Hopper"

    def every(
        self, problem: Problem, shapes: Sequence[tuple[int, ...]], **values: Iterable[Any]
    ) -> list[C]:
        """As in the base class. Where outputs have groups of columns, parts of a tile have whole
        groups, and a thread has at most 64 elements of the tile. With 128 elements it spilled 288
        to 1008 bytes."""
        found = super().every(problem, shapes, **values)
        if not any(port.group for port in problem.epilogue.outputs):
            return found
        whole = [c for c in found if whole_groups(problem, c.BLOCK_N // c.parts)]
        if problem.device.interpreted:
            return whole
        most = 32 * _GROUPED_ELEMENTS
        return [c for c in whole if c.BLOCK_M * c.BLOCK_N // c.num_warps <= most]

    def workspace_bytes(self, problem: Problem, config: C) -> int:
        return 4 * _ports(problem, config).workspace()

    def builds(self, problem: Problem, config: C) -> list[Build]:
        if not whole_groups(problem, config.BLOCK_N // config.parts):
            raise ConfigError(f"{config} has parts of groups of an output's columns")
        ports = _ports(problem, config)
        constants = {
            "GATED": problem.gated,
            "SUBTILE": config.parts,
            "WHOLE_K": problem.k % config.BLOCK_K == 0,
            **ports.constants(),
        }
        grid = config.tiles(problem), problem.batch, 1
        main = build(tiled_kernel, problem, config, grid, constants, ports.arguments())
        return [main, *ports.builds()]


def _ports(problem: Problem, config: GroupedConfig) -> Ports:
    rows, columns = -(-problem.m // config.BLOCK_M), -(-problem.n // config.BLOCK_N)
    return Ports(problem, rows, columns * config.parts)


class Grouped(Tiled[GroupedConfig]):
    name = "triton.grouped"
    version = "3"
    config_type = GroupedConfig
    reach, behind = 0.62, 1.2

    def configs(self, problem: Problem) -> list[GroupedConfig]:
        more = _INVARIANT_SHAPES if problem.batch_invariant else []
        configs = self.every(problem, _GROUPED_SHAPES + more, GROUP_M=group_sizes(problem))
        return self.ranked(problem, configs, 16 + len(more))


#: BLOCK_M, BLOCK_N, BLOCK_K, num_stages, num_warps at 16 bits per element.
_SHAPES = [
    (128, 256, 64, 3, 8),
    (128, 256, 64, 4, 8),
    (128, 128, 64, 4, 8),
    (64, 128, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (64, 64, 64, 5, 4),
    (32, 64, 128, 4, 4),
    (16, 64, 128, 5, 4),
]
#: Shapes if two accumulators share the registers: BLOCK_N is the width of each.
_GATED_SHAPES = [
    (128, 128, 32, 6, 8),
    (128, 128, 64, 3, 8),
    (128, 128, 64, 4, 8),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (64, 64, 128, 3, 4),
    (32, 64, 128, 3, 4),
    (16, 64, 128, 4, 4),
    (16, 32, 128, 5, 4),
]


#: Further gated tiles, whose parts have whole groups of 128 columns.
_GATED_GROUPS = [
    (64, 128, 64, 3, 8),
    (32, 128, 64, 4, 4),
    (16, 128, 64, 5, 4),
]


@dataclass(frozen=True, kw_only=True)
class FusedEpilogueConfig(GroupedConfig):
    """A tile (of each half, if gated), its pipeline, the order of tiles, and the number of parts in
    which a tile is finished."""

    SUBTILE: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check("SUBTILE", self.SUBTILE, (1, 2))

    @property
    def parts(self) -> int:
        return self.SUBTILE


class FusedEpilogue(Tiled[FusedEpilogueConfig]):
    name = "triton.fused_epilogue"
    version = "3"
    config_type = FusedEpilogueConfig
    supports = replace(Tiled.supports, gated=True)
    reach, behind = 0.66, 1.2

    def configs(self, problem: Problem) -> list[FusedEpilogueConfig]:
        shapes = _GATED_SHAPES if problem.gated else _SHAPES
        if problem.gated and any(port.group for port in problem.epilogue.outputs):
            shapes = shapes + _GATED_GROUPS
        configs = self.every(problem, shapes, SUBTILE=(2, 1), GROUP_M=group_sizes(problem))
        return self.ranked(problem, configs, 14)
