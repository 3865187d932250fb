"""``triton.split_k``: splits the sum over K among programs, for outputs too small to fill a GPU.

A product with few output tiles (decode, M·N small relative to K) leaves most SMs idle, or too few
bytes in flight to reach the memory bandwidth. Here SPLIT_K programs share a tile: each sums a
contiguous range of whole BLOCK_K steps in fp32 and writes its partial sum to a workspace. A second
kernel, ``partials.reduce_kernel``, is spread over all SMs. It adds the partial sums in a fixed
order and applies epilogue, bias and residual once, to the full sum. So the result is deterministic,
and with a given config a row's bits depend on neither M nor the other rows.

With ``num_stages=1`` the tiles of the next step wait in registers while this one is multiplied.
Unlike a copy to shared memory, a load can have the hint ``evict_first``. It keeps the load from
evicting L2 lines that would have to be written back first. On an H200 this saves 3 µs of a cold
read of 100 MB. It only pays if multiplication takes hardly any time, with 32 rows or fewer.

``SWAP`` computes the tile transposed, Bᵀ·Aᵀ. ``wgmma`` has a fixed height of 64 and a width from 8
up. So if A has few rows, N should be along the height.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl

from tmm_core import Anatomy, Problem
from tmm_triton import reduction_order
from tmm_triton.blocks import finish, load, rescale
from tmm_triton.operands import Build, TileConfig, Typed, build, check
from tmm_triton.partials import MOST_WORKSPACE, REDUCE_US, reduction
from tmm_triton.pdl import Overlapping, check_early, hopper_or_later, ways, with_early
from tmm_triton.scaled_step import advance, stored, stored_range
from tmm_triton.triton_kernel import STEPPED, TritonKernel


@triton.jit
def load_ahead(
    along, across, size, k, last, K, stride,
    BLOCK_K: tl.constexpr, WHOLE_K: tl.constexpr, ONCE: tl.constexpr, ALONG_ROWS: tl.constexpr,
):  # fmt: skip
    """An operand's tile at ``k``, with zeros from ``last`` on.

    Args:
        along: Pointers to the tile's rows (columns) at k = 0, of shape [·, 1] ([1, ·]).
        across: Their indices; they exist below ``size``.
        ONCE: No other program uses the tile.
        ALONG_ROWS: K runs along the tile's rows, as in a.
    """
    ks = k + tl.arange(0, BLOCK_K)
    ks = ks[None, :] if ALONG_ROWS else ks[:, None]
    across = across[:, None] if ALONG_ROWS else across[None, :]
    inside = (across < size) & (k < last)
    if not WHOLE_K:
        inside &= ks < K
    policy: tl.constexpr = "evict_first" if ONCE else ""
    return tl.load(along + ks * stride, mask=inside, other=0.0, eviction_policy=policy)


@triton.jit
def split_k_kernel(
    partials_ptr,
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
    SPLIT_K: tl.constexpr, SWAP: tl.constexpr, WHOLE_K: tl.constexpr,
    THROUGH_REGISTERS: tl.constexpr, A_ONCE: tl.constexpr, B_ONCE: tl.constexpr,
    OVERLAPS: tl.constexpr, EARLY: tl.constexpr,
    PACK: tl.constexpr, A_OUTER: tl.constexpr, A_GROUP: tl.constexpr, B_OUTER: tl.constexpr,
    B_GROUP: tl.constexpr, ZERO_OUTER: tl.constexpr, ZERO_GROUP: tl.constexpr,
):  # fmt: skip
    tile, split, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch = tl.num_programs(2)
    # These problems have few rows of tiles, so neighbours share columns of B.
    tiles_m = tl.cdiv(M, BLOCK_M)
    rows = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)

    # Ranges differ by at most one step, the longer ones come first.
    steps = tl.cdiv(K, BLOCK_K)
    least, longer = steps // SPLIT_K, steps % SPLIT_K
    first = (split * least + tl.minimum(split, longer)) * BLOCK_K
    last = tl.minimum(first + tl.where(split < longer, least + 1, least) * BLOCK_K, K)
    a_rows = a_ptr + z * stride_az + rows[:, None] * stride_am
    b_cols = b_ptr + z * stride_bz + cols[None, :] * stride_bn

    a_grid = (a_scale_ptr, stride_asz, stride_asm, stride_ask)
    b_grid = (b_scale_ptr, stride_bsz, stride_bsn, stride_bsk)
    zeros = (b_zero_ptr, stride_0z, stride_0n, stride_0k)

    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if EARLY:
        # Before the previous launch has ended: the caller promises that b is not being written.
        next_b = load_ahead(
            b_cols, cols, N, first, last, K, stride_bk, BLOCK_K, WHOLE_K, B_ONCE, False
        )
    if OVERLAPS:
        # Nothing above touches memory that may be written; all threads wait, and store only after
        # it.
        tl.extra.cuda.gdc_wait()
        # After the wait: the next launch's early part must not overlap the previous launch.
        tl.extra.cuda.gdc_launch_dependents()
    if THROUGH_REGISTERS:
        next_a = load_ahead(
            a_rows, rows, M, first, last, K, stride_ak, BLOCK_K, WHOLE_K, A_ONCE, True
        )
        if not EARLY:
            next_b = load_ahead(
                b_cols, cols, N, first, last, K, stride_bk, BLOCK_K, WHOLE_K, B_ONCE, False
            )
    for k in range(first, last, BLOCK_K):
        if THROUGH_REGISTERS:
            a, b = next_a, next_b
            next_a = load_ahead(
                a_rows, rows, M, k + BLOCK_K, last, K, stride_ak, BLOCK_K, WHOLE_K, A_ONCE, True
            )
            next_b = load_ahead(
                b_cols, cols, N, k + BLOCK_K, last, K, stride_bk, BLOCK_K, WHOLE_K, B_ONCE, False
            )
        else:
            ks = k + tl.arange(0, BLOCK_K)
            a = load(a_rows + ks[None, :] * stride_ak, rows, ks, M, K, False, WHOLE_K)
            bs = stored_range(k, ks, BLOCK_K, PACK)
            ptrs = b_cols + bs[:, None] * stride_bk
            b = load(ptrs, bs, cols, stored(K, PACK), N, WHOLE_K, False)
        acc = advance(
            a, b, acc, k, z, rows, rows, M, cols, N, a_grid, b_grid, zeros,
            STEP, PRECISION, SWAP, A_OUTER, A_GROUP, B_OUTER, B_GROUP, ZERO_OUTER, ZERO_GROUP,
        )  # fmt: skip
    if SWAP:
        acc = tl.trans(acc)

    if SPLIT_K == 1:
        acc = rescale(acc, z, rows, cols, M, N, a_scale_ptr, b_scale_ptr, A_SCALE, B_SCALE)
        finish(
            acc, z, rows, cols, M, N, bias_ptr, stride_bias, alpha, EPILOGUE,
            residual_ptr, stride_rz, stride_rm, stride_rn, out_ptr, stride_oz, stride_om, stride_on,
        )  # fmt: skip
    else:
        ptrs = partials_ptr + (split * batch + z) * M * N + rows[:, None] * N + cols[None, :]
        tl.store(ptrs, acc, mask=(rows[:, None] < M) & (cols[None, :] < N))


#: BLOCK_M, BLOCK_N, BLOCK_K, num_stages, num_warps at 16 bits per element.
_SHAPES = [
    (16, 64, 128, 5, 4),
    (16, 64, 256, 4, 4),
    (16, 128, 64, 6, 4),
    (16, 16, 512, 4, 2),
    (32, 64, 128, 5, 4),
    (32, 128, 64, 5, 4),
    (64, 64, 128, 6, 4),
    (64, 64, 128, 4, 4),
    (64, 128, 128, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 5, 4),
    (128, 128, 64, 5, 8),
    # Not 128×256 with 8 warps: its sums and their addresses spill 130 to 180 bytes.
    (64, 256, 64, 4, 8),
    (16, 64, 128, 1, 4),
    (16, 64, 256, 1, 4),
    (16, 128, 128, 1, 8),
    (32, 64, 128, 1, 4),
    (32, 128, 128, 1, 8),
]
#: Shapes if the parts of K are the same for every M, including one part: enough stages to keep
#: memory busy with few programs.
_INVARIANT_SHAPES = [
    (16, 64, 128, 8, 4),
    (16, 64, 256, 5, 4),
    (32, 64, 128, 8, 4),
    (64, 64, 128, 6, 4),
    (128, 64, 128, 4, 4),
]
#: Programs per SM to aim at. One wave won every aligned problem tried on an H200. Loads through
#: registers are not in flight while their program computes, so several programs have to alternate.
_PROGRAMS_PER_SM = (1, 1.5, 2)
_PROGRAMS_PER_SM_UNALIGNED = (1, 2, 4)
_MOST_SPLITS = 512


@dataclass(frozen=True, kw_only=True)
class SplitKConfig(TileConfig, Overlapping):
    """A tile, the number of ranges of K, and whether the launch overlaps the previous one
    (:mod:`tmm_triton.pdl`; not ``"l2"``)."""

    SPLIT_K: int
    SWAP: bool
    early: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check("SPLIT_K", self.SPLIT_K, range(1, _MOST_SPLITS + 1))
        check_early(self.early, able=self.num_stages == 1)

    def registers(self, problem: Problem) -> int:
        """As for any tile, plus the addresses of the stored partial sums."""
        addresses = self.BLOCK_M * self.BLOCK_N // (64 * self.num_warps)
        count = super().registers(problem) + (addresses if self.SPLIT_K > 1 else 0)
        if self.num_stages == 1 and problem.a.aligned and problem.b.aligned:
            tiles = (self.BLOCK_M + self.BLOCK_N) * self.BLOCK_K * problem.a.dtype.itemsize
            count += tiles // (4 * 32 * self.num_warps)
        return count


class SplitK(TritonKernel[SplitKConfig]):
    name = "triton.split_k"
    version = "3"
    config_type = SplitKConfig
    supports = STEPPED
    reach, behind = 0.62, 1.1

    def configs(self, problem: Problem) -> list[SplitKConfig]:
        configs = []
        shapes = _SHAPES + (_INVARIANT_SHAPES if problem.batch_invariant else [])
        for tile in self.every(problem, shapes, SPLIT_K=[1], SWAP=[False]):
            for split in _splits(problem, tile):
                config = replace(tile, SPLIT_K=split, SWAP=_swaps(problem, tile, split))
                if config.num_stages == 1 and not _through_registers(problem, config):
                    continue
                if split == 1 and not config.SWAP and not problem.device.interpreted:
                    continue  # triton.grouped does this
                if self.workspace_bytes(problem, config) > MOST_WORKSPACE:
                    continue
                configs.append(config)
        if problem.batch_invariant:
            # Each number of parts is another reduction order, and each M needs candidates of all
            # orders.
            whole = [config for config in configs if config.SPLIT_K == 1]
            cut = [config for config in configs if config.SPLIT_K > 1]
            ranked = self.ranked(problem, whole, 8) + self.ranked(problem, cut, 12)
        else:
            ranked = self.ranked(problem, configs, 24)
        return with_early(ranked, ways(problem))

    def default_config(self, problem: Problem) -> SplitKConfig:
        # The one candidate if partial sums never fit the workspace.
        whole = self.every(problem, [(32, 32, 32, 2, 4)], SPLIT_K=[1], SWAP=[False])
        return next(iter(self.configs(problem)), whole[0])

    def splits(self, config: SplitKConfig) -> int:
        return config.SPLIT_K

    def estimate_us(self, problem: Problem, config: SplitKConfig) -> float:
        estimate = super().estimate_us(problem, config)
        return estimate + (REDUCE_US if config.SPLIT_K > 1 else 0.0)

    def workspace_bytes(self, problem: Problem, config: SplitKConfig) -> int:
        if config.SPLIT_K == 1:
            return 0
        return 4 * config.SPLIT_K * problem.batch * problem.m * problem.n

    def anatomy(self, problem: Problem, config: SplitKConfig) -> Anatomy | None:
        # Programs are numbered down the columns of tiles.
        found = super().anatomy(problem, config)
        return found and replace(found, group_m=-(-problem.m // config.BLOCK_M))

    def builds(self, problem: Problem, config: SplitKConfig) -> list[Build]:
        split = config.SPLIT_K > 1
        own: Typed = {"partials_ptr": ("*fp32", "workspace")} if split else {}
        through = config.num_stages == 1
        constants = {
            "WHOLE_K": problem.k % config.BLOCK_K == 0,
            "THROUGH_REGISTERS": through,
            "A_ONCE": through and problem.n <= config.BLOCK_N,
            "B_ONCE": through and problem.m <= config.BLOCK_M,
        }
        grid = config.tiles(problem), config.SPLIT_K, problem.batch
        main = build(split_k_kernel, problem, config, grid, constants, own)
        if not split:
            return [main]
        apart = problem.batch * problem.m * problem.n
        return [main, reduction(problem, config.SPLIT_K, apart)]


def _swaps(problem: Problem, tile: SplitKConfig, split: int) -> bool:
    """Whether to compute a tile transposed: ``wgmma`` then needs a block of 64 along N and whole
    warpgroups. With 64 rows it pays only if it saves the pipeline a longer epilogue; through
    registers (unaligned operands) ``mma`` was faster on an H200."""
    able = hopper_or_later(problem) and tile.BLOCK_N >= 64 and tile.num_warps % 4 == 0
    aligned = problem.a.aligned and problem.b.aligned
    return able and aligned and (tile.BLOCK_M < 64 or (tile.BLOCK_M == 64 and split == 1))


def _through_registers(problem: Problem, config: SplitKConfig) -> bool:
    """Whether it may pay to load the operands into registers first.

    On an H200 it pays with one row of tiles, transposed so that ``wgmma`` has little to do. Rows
    must end at multiples of 16 bytes, since otherwise every element needs its own load."""
    contiguous = [problem.k, problem.n if problem.b.layout == "row" else problem.k]
    whole = all(size % 8 == 0 for size in contiguous)
    narrow = config.SWAP and problem.m <= config.BLOCK_M
    plain = problem.b.pack == 1 and not (problem.a.grid or problem.b.grid)
    return narrow and whole and plain and problem.a.dtype.itemsize == 2


def _splits(problem: Problem, tile: SplitKConfig) -> list[int]:
    """Values of SPLIT_K that aim at a few programs per SM and leave each at least one step."""
    if problem.device.interpreted:
        return [3, 1]
    programs = problem.batch * tile.tiles(problem)
    steps = triton.cdiv(problem.k, tile.BLOCK_K)
    if problem.batch_invariant:
        equal = reduction_order.equal_splits(problem)
        return [
            1,
            *(s for s in equal if reduction_order.summed(problem, s, tile.BLOCK_K) is not None),
        ]
    aligned = problem.a.aligned and problem.b.aligned
    per_sm = _PROGRAMS_PER_SM if aligned else _PROGRAMS_PER_SM_UNALIGNED
    aims = [round(problem.device.sm_count * each / programs) for each in per_sm]
    return sorted({max(1, min(aim, steps, _MOST_SPLITS)) for aim in aims})
