"""``triton.ragged``: many products in one launch, whose sizes along one dimension differ.

The end of each group is read from ``offs`` on the device, so that the host does not wait for it.
The grid is an upper bound. Group g, which starts at row s, owns the *slots* from ``s // BLOCK_M +
g`` on. It has at least as many slots as tiles. All groups together have ``T // BLOCK_M + G`` slots
for any sizes. A slot's group is the number of groups that end before it, found by a vector
comparison instead of a scan. Programs of slots without rows return at once.

Ragged columns are divided the same way. If K is ragged, each group has tiles for the whole result,
and sums over its own range.

Rows of ``a`` may be gathered by an index during loads, and rows of the result scattered, each
multiplied by a weight, during stores. Operands may have any strides. 8-bit floats are multiplied as
they are; their scales multiply the sums, before alpha and the bias.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import triton
import triton.language as tl

from tmm_core import Anatomy, Problem
from tmm_core.triton import factors
from tmm_triton.blocks import affine, load, parts, tile_of
from tmm_triton.operands import Build, TileConfig, build
from tmm_triton.scaled_step import advance, stored, stored_range
from tmm_triton.tiled import FusedEpilogueConfig
from tmm_triton.triton_kernel import GRID_LIMIT, STEPPED, TritonKernel, fills_registers


@triton.jit
def group_of(slot, offs_ptr, G, TOTAL, BLOCK: tl.constexpr, GROUPS: tl.constexpr):
    """The group that owns ``slot``, with its start and end; the group is ``G`` past the last one.
    Start and end are clamped to [0, TOTAL], so that a wrong ``offs`` gives no invalid address."""
    group, start, end = 0, 0, TOTAL
    for first in range(0, G, GROUPS):
        g = first + tl.arange(0, GROUPS)
        known = g < G
        ends = tl.load(offs_ptr + g, mask=known, other=0)
        before = known & (ends // BLOCK + g + 1 <= slot)
        group += tl.sum(before.to(tl.int32))
        start = tl.maximum(start, tl.max(tl.where(before, ends, 0)))
        end = tl.minimum(end, tl.min(tl.where(known & (before == 0), ends, TOTAL)))
    return group, start, end


@triton.jit
def pair(cols, N, INTERLEAVED: tl.constexpr):
    """The columns of gate and up in the product for these columns of the result."""
    if INTERLEAVED:
        of_gate, of_up = 2 * cols, 2 * cols + 1
    else:
        of_gate, of_up = cols, cols + N
    return of_gate, of_up


@triton.jit
def finish(
    gate, up, group, rows, at, top, cols, right, N,
    bias_ptr, stride_biasz, stride_bias, alpha, weights_ptr,
    residual_ptr, stride_rz, stride_rm, stride_rn, out_ptr, stride_oz, stride_om, stride_on,
    EPILOGUE: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store what :func:`finished` returns for rows below ``top`` and columns left of ``right``. Row
    r of the tile is row ``at[r]`` of the result."""
    acc = finished(
        gate, up, group, rows, at, top, cols, right, N, bias_ptr, stride_biasz, stride_bias, alpha,
        weights_ptr, residual_ptr, stride_rz, stride_rm, stride_rn, EPILOGUE, GATED, INTERLEAVED,
    )  # fmt: skip
    inside = (rows[:, None] < top) & (cols[None, :] < right)
    ptrs = out_ptr + group * stride_oz
    ptrs += at[:, None] * stride_om + cols[None, :] * stride_on
    tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def finished(
    gate, up, group, rows, at, top, cols, right, N,
    bias_ptr, stride_biasz, stride_bias, alpha, weights_ptr,
    residual_ptr, stride_rz, stride_rm, stride_rn,
    EPILOGUE: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """``weight · EPILOGUE(alpha · acc + bias) + residual``."""
    if bias_ptr is not None:
        bias_ptr += group * stride_biasz
    if GATED:
        of_gate, of_up = pair(cols, N, INTERLEAVED)
        gate = affine(gate, of_gate, 2 * N, bias_ptr, stride_bias, alpha)
        up = affine(up, of_up, 2 * N, bias_ptr, stride_bias, alpha)
        acc = EPILOGUE(gate, up)
    else:
        acc = EPILOGUE(affine(gate, cols, N, bias_ptr, stride_bias, alpha))
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + rows, mask=rows < top, other=0.0)
        acc *= weights.to(tl.float32)[:, None]
    if residual_ptr is not None:
        inside = (rows[:, None] < top) & (cols[None, :] < right)
        ptrs = residual_ptr + group * stride_rz
        ptrs += at[:, None] * stride_rm + cols[None, :] * stride_rn
        acc += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    return acc


@triton.jit
def rescaled(
    acc, group, of_a, in_rows, of_b, in_cols, M, WIDTH, a_scale_ptr, b_scale_ptr,
    RAGGED: tl.constexpr, A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
):  # fmt: skip
    """``acc`` times the scales of rows ``of_a`` and columns ``of_b`` of the operands, which have
    M rows and WIDTH columns in each group unless they are ragged."""
    if A_SCALE == "row":
        if RAGGED != "m":
            a_scale_ptr += group.to(tl.int64) * M
        acc *= factors(tl.load(a_scale_ptr + of_a, mask=in_rows, other=0.0))[:, None]
    elif A_SCALE == "tensor":
        acc *= factors(tl.load(a_scale_ptr))
    if B_SCALE == "row":
        if RAGGED != "n":
            b_scale_ptr += group.to(tl.int64) * WIDTH
        acc *= factors(tl.load(b_scale_ptr + of_b, mask=in_cols, other=0.0))[None, :]
    elif B_SCALE == "tensor":
        acc *= factors(tl.load(b_scale_ptr))
    return acc


@triton.jit
def ragged_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr,
    offs_ptr, a_index_ptr, out_index_ptr, out_weights_ptr, a_scale_ptr, b_scale_ptr,
    M, N, K, G,
    stride_az, stride_am, stride_ak,
    stride_bz, stride_bk, stride_bn,
    stride_rz, stride_rm, stride_rn,
    stride_oz, stride_om, stride_on,
    stride_biasz, stride_bias, alpha, GROUP_M,
    b_zero_ptr, stride_asz, stride_asm, stride_ask, stride_bsz, stride_bsk, stride_bsn,
    stride_0z, stride_0k, stride_0n,
    RAGGED: tl.constexpr, GROUPS: tl.constexpr, ZEROED: tl.constexpr,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
    STEP: tl.constexpr, EPILOGUE: tl.constexpr, PRECISION: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUBTILE: tl.constexpr, WHOLE_K: tl.constexpr,
    PACK: tl.constexpr, A_OUTER: tl.constexpr, A_GROUP: tl.constexpr, B_OUTER: tl.constexpr,
    B_GROUP: tl.constexpr, ZERO_OUTER: tl.constexpr, ZERO_GROUP: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    top, right, first_k, last_k = M, N, 0, K
    if RAGGED == "m":
        slots = M // BLOCK_M + G + ZEROED
        slot, tile_n = tile_of(pid, slots * BLOCK_M, N, BLOCK_M, BLOCK_N, GROUP_M)
        group, start, top = group_of(slot, offs_ptr, G, M, BLOCK_M, GROUPS)
        first_row = start + (slot - start // BLOCK_M - group) * BLOCK_M
        first_col = tile_n * BLOCK_N
        if first_row >= top:
            return
    elif RAGGED == "n":
        slots = N // BLOCK_N + G + ZEROED
        tile_m, slot = tile_of(pid, M, slots * BLOCK_N, BLOCK_M, BLOCK_N, GROUP_M)
        group, start, right = group_of(slot, offs_ptr, G, N, BLOCK_N, GROUPS)
        first_row = tile_m * BLOCK_M
        first_col = start + (slot - start // BLOCK_N - group) * BLOCK_N
        if first_col >= right:
            return
    else:
        tile_m, tile_n = tile_of(pid, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        group = tl.program_id(1)
        first_row, first_col = tile_m * BLOCK_M, tile_n * BLOCK_N
        last_k = tl.minimum(tl.maximum(tl.load(offs_ptr + group), 0), K)
        if group > 0:
            first_k = tl.minimum(tl.maximum(tl.load(offs_ptr + group - 1), 0), K)

    rows = first_row + tl.arange(0, BLOCK_M)
    cols = first_col + tl.arange(0, BLOCK_N)
    at = rows
    if out_index_ptr is not None:
        at = tl.load(out_index_ptr + rows, mask=rows < top, other=0)
    if ZEROED:
        if group >= G:
            # Past the last group nothing is read, not even a residual.
            zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=out_ptr.dtype.element_ty)
            ptrs = out_ptr + at[:, None] * stride_om + cols[None, :] * stride_on
            tl.store(ptrs, zeros, mask=(rows[:, None] < top) & (cols[None, :] < right))
            return
    elif RAGGED != "k":  # noqa: SIM102
        if group >= G:
            return
    of_a = rows
    if a_index_ptr is not None:
        of_a = tl.load(a_index_ptr + rows, mask=rows < top, other=0)
    a_rows = a_ptr + group * stride_az + of_a[:, None] * stride_am
    of_b, edge = cols, right
    if INTERLEAVED:
        # One product of all columns: a thread holds adjacent ones, so the pair is split in place.
        of_b, edge = 2 * first_col + tl.arange(0, 2 * BLOCK_N), 2 * right
    b_cols = b_ptr + group * stride_bz + of_b[None, :] * stride_bn
    up_cols = b_cols + N * stride_bn

    a_grid = (a_scale_ptr, stride_asz, stride_asm, stride_ask)
    b_grid = (b_scale_ptr, stride_bsz, stride_bsn, stride_bsk)
    zeros = (b_zero_ptr, stride_0z, stride_0n, stride_0k)

    gate = tl.zeros((BLOCK_M, 2 * BLOCK_N if INTERLEAVED else BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(first_k, last_k, BLOCK_K):
        ks = k + tl.arange(0, BLOCK_K)
        a = load(a_rows + ks[None, :] * stride_ak, rows, ks, top, last_k, False, WHOLE_K)
        bs, stored_k = stored_range(k, ks, BLOCK_K, PACK), stored(last_k, PACK)
        b = load(b_cols + bs[:, None] * stride_bk, bs, of_b, stored_k, edge, WHOLE_K, False)
        gate = advance(
            a, b, gate, k, group, rows, of_a, top, of_b, edge, a_grid, b_grid, zeros,
            STEP, PRECISION, False, A_OUTER, A_GROUP, B_OUTER, B_GROUP, ZERO_OUTER, ZERO_GROUP,
        )  # fmt: skip
        if GATED and not INTERLEAVED:
            ptrs = up_cols + bs[:, None] * stride_bk
            b_up = load(ptrs, bs, cols, stored_k, right, WHOLE_K, False)
            up = advance(
                a, b_up, up, k, group, rows, of_a, top, cols + N, right + N, a_grid, b_grid, zeros,
                STEP, PRECISION, False, A_OUTER, A_GROUP, B_OUTER, B_GROUP, ZERO_OUTER, ZERO_GROUP,
            )  # fmt: skip

    if INTERLEAVED:
        gate, up = gate.reshape(BLOCK_M, BLOCK_N, 2).split()
    width = 2 * N if GATED else N
    in_rows, in_cols = rows < top, cols < right
    of_gate, of_up = pair(cols, N, INTERLEAVED)
    gate = rescaled(
        gate, group, of_a, in_rows, of_gate, in_cols, M, width,
        a_scale_ptr, b_scale_ptr, RAGGED, A_SCALE, B_SCALE,
    )  # fmt: skip
    if GATED:
        up = rescaled(
            up, group, of_a, in_rows, of_up, in_cols, M, width,
            a_scale_ptr, b_scale_ptr, RAGGED, A_SCALE, B_SCALE,
        )  # fmt: skip
    gates, ups = parts(gate, SUBTILE), parts(up, SUBTILE)
    WIDTH: tl.constexpr = BLOCK_N // SUBTILE
    left = first_col + tl.arange(0, WIDTH)
    for part in tl.static_range(SUBTILE):
        finish(
            gates[part], ups[part], group, rows, at, top, left + part * WIDTH, right, N,
            bias_ptr, stride_biasz, stride_bias, alpha, out_weights_ptr,
            residual_ptr, stride_rz, stride_rm, stride_rn, out_ptr, stride_oz, stride_om, stride_on,
            EPILOGUE, GATED, INTERLEAVED,
        )  # fmt: skip


#: BLOCK_M, BLOCK_N, BLOCK_K, num_stages, num_warps at 16 bits per element.
_SHAPES = [
    (128, 256, 64, 3, 8),
    (128, 128, 64, 4, 8),
    (128, 64, 64, 4, 4),
    (64, 256, 64, 4, 8),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 5, 4),
    (32, 128, 64, 5, 4),
    (32, 64, 128, 5, 4),
    (16, 128, 128, 4, 4),
    (16, 64, 128, 5, 4),
    (16, 64, 256, 3, 4),
    (16, 32, 256, 5, 2),
]
#: Shapes if two accumulators share the registers: BLOCK_N is the width of each.
_GATED_SHAPES = [
    (128, 128, 64, 3, 8),
    (128, 64, 64, 4, 8),
    (64, 128, 64, 4, 8),
    (64, 64, 64, 4, 4),
    (64, 64, 128, 3, 4),
    (32, 64, 128, 3, 4),
    (16, 64, 128, 4, 4),
    (16, 32, 128, 5, 4),
    (16, 32, 256, 4, 2),
]
#: Additional shapes if 8-bit operands pass through registers, which hold two sums on Hopper.
_LOOSE_SHAPES = [(128, 64, 32, 4, 8), (64, 64, 32, 4, 8), (64, 64, 64, 4, 8)]
#: Number of group ends that are compared at a time.
_MOST_GROUPS = 256
#: Assumed ratio of the largest group's rows to the mean.
_SKEW = 4


@dataclass(frozen=True, kw_only=True)
class RaggedConfig(FusedEpilogueConfig):
    """A fused epilogue's tile; ragged operands take additional registers."""

    def registers(self, problem: Problem) -> int:
        problem = loosened(problem)
        # With arbitrary group starts, unaligned rows have a 64-bit address per element.
        loose = not (problem.a.aligned and problem.b.aligned)
        more = 16 if loose else 0
        if problem.gated and problem.device.capability < (9, 0):
            more += self.BLOCK_M * self.BLOCK_N // (8 * self.num_warps * 32)  # two operands of b
        return super().registers(problem) + more


class Ragged(TritonKernel[RaggedConfig]):
    name = "triton.ragged"
    version = "3"
    config_type = RaggedConfig
    supports = replace(
        STEPPED,
        gated=True,
        interleaved=True,
        empty=True,
        ragged=("m", "n", "k"),
        indexed=True,
        zeroed=True,
    )
    reach = 0.6

    def declines(self, problem: Problem) -> Iterable[str]:
        yield from super().declines(problem)
        if problem.groups is None:
            yield "is for ragged products"
        elif problem.groups.ragged == "k" and problem.groups.count > GRID_LIMIT:
            yield f"{problem.groups.count} groups exceed the grid's {GRID_LIMIT}"

    def configs(self, problem: Problem) -> list[RaggedConfig]:
        shapes = _GATED_SHAPES if problem.gated else _SHAPES
        problem = loosened(problem)
        if problem.native and not (problem.a.aligned and problem.b.aligned):
            shapes = [*shapes, *_LOOSE_SHAPES]
        mean = each(problem)
        order = (8, 1) if mean.m > 128 else (8,)
        configs = [
            c
            for c in self.every(problem, shapes, SUBTILE=(2, 1), GROUP_M=order)
            # Unaligned columns are stored one by one, each with its address.
            if not _spills(problem, c) and (problem.along != "n" or c.BLOCK_N <= 128)
        ]
        return self.ranked(each(problem, _SKEW), configs, 16)

    def estimate_us(self, problem: Problem, config: RaggedConfig) -> float:
        return super().estimate_us(each(problem) if problem.groups else problem, config)

    def own_arithmetic(self, problem: Problem, config: RaggedConfig) -> str | None:
        # The other groups' sizes determine where a range of K starts, and so how it is summed.
        if problem.groups is not None and problem.groups.ragged == "k":
            return None
        return super().own_arithmetic(problem, config)

    def anatomy(self, problem: Problem, config: RaggedConfig) -> Anatomy | None:
        # As equal products of the mean size.
        return super().anatomy(each(problem), config)

    def builds(self, problem: Problem, config: RaggedConfig) -> list[Build]:
        groups = problem.groups
        assert groups is not None
        constants = {
            "RAGGED": groups.ragged,
            "GROUPS": min(triton.next_power_of_2(groups.count), _MOST_GROUPS),
            "ZEROED": int(groups.zeroed),
            "GATED": problem.gated,
            "INTERLEAVED": problem.epilogue.interleaved,
            "WHOLE_K": groups.ragged != "k" and problem.k % config.BLOCK_K == 0,
        }
        return [build(ragged_kernel, problem, config, grid(problem, config), constants)]


def _spills(problem: Problem, config: RaggedConfig) -> bool:
    """Whether two accumulators that take half the registers leave too few of them for the
    addresses of scattered rows."""
    full = problem.gated and fills_registers(problem, config)
    if not full or problem.device.interpreted:
        return False
    scattered = problem.groups is not None and problem.groups.out_index is not None
    # Before Hopper operands are in registers too: it spilled 168 bytes on an A100.
    return config.SUBTILE == 1 or (scattered and problem.device.capability < (9, 0))


def grid(problem: Problem, config: TileConfig) -> tuple[int, int, int]:
    """Return the maximum number of tiles over all possible group sizes."""
    groups = problem.groups
    assert groups is not None
    high, wide = -(-problem.m // config.BLOCK_M), -(-problem.n // config.BLOCK_N)
    slots = groups.count + groups.zeroed
    if groups.ragged == "m":
        return (problem.m // config.BLOCK_M + slots) * wide, 1, 1
    if groups.ragged == "n":
        return high * (problem.n // config.BLOCK_N + slots), 1, 1
    return high * wide, groups.count, 1


#: The layouts of the operands whose groups start inside rows of memory.
_INSIDE = {"m": {"a": "col"}, "n": {"b": "row"}, "k": {"a": "row", "b": "col"}}


def loosened(problem: Problem) -> Problem:
    """Return the problem in which an operand counts as unaligned if its groups start inside rows of
    memory: it is loaded like unaligned rows."""
    if problem.groups is None:
        return problem
    loose = {
        name: replace(operand, aligned=False)
        for name, layout in _INSIDE[problem.groups.ragged].items()
        if (operand := getattr(problem, name)).layout == layout
    }
    return replace(problem, **loose)


def each(problem: Problem, times: int = 1) -> Problem:
    """Return a batch of equal products, ``times`` as large along the ragged dimension as the mean
    group."""
    groups = problem.groups
    assert groups is not None
    name = groups.ragged
    size = getattr(problem, name)
    # With fewer rows than groups, each row is a group.
    count = max(1, min(groups.count, size))
    mean = -(-size // count)
    plain = replace(problem, groups=None, batch=count)
    return replace(plain, **{name: max(1, min(size, times * mean))})
