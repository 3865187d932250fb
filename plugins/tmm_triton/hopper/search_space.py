"""Proposes configs of the Hopper kernel for a problem, the best by estimate first."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from tmm_core import Problem
from tmm_core.triton import SEARCH_LIMITED
from tmm_triton import reduction_order
from tmm_triton.hopper.config import (
    COLUMNS,
    MOST_SUMMED,
    MOST_TAIL_SPLITS,
    WarpSpecializedConfig,
    columns_grouped,
    unfinished,
)
from tmm_triton.hopper.estimate import SURELY_STREAMED, estimate_us, streams
from tmm_triton.hopper.operand_layout import (
    by_words,
    residual_by_tma,
    side_by_side,
    stored_by_pointers,
)
from tmm_triton.hopper.tile_shapes import (
    may_split,
    room_for_parts,
    room_for_ranges,
    room_for_splits,
    tile_count,
    tile_rows,
)
from tmm_triton.pdl import with_early

#: ``(schedule, consumers, num_warps, BLOCK_M, BLOCK_N, BLOCK_K)``; N counts both halves if gated.
_Tile = tuple[str, int, int, int, int, int]
#: Each was the fastest of all for some problem on an H200, unless noted.
_TILES: tuple[_Tile, ...] = (
    # The epilogue overlaps the other consumer's main loop. Under sustained load at the power limit
    # this is 2 to 7 % faster than the next tile, for costly epilogues or a short K.
    ("pingpong", 2, 4, 128, 128, 64),
    # 128×256 is needed to multiply at full rate with L2's bandwidth. 192×256 needs a quarter less
    # and fits other sizes into one wave (2304³: 108 tiles, not 162).
    ("cooperative", 2, 4, 128, 256, 64),
    ("cooperative", 2, 4, 256, 128, 64),
    ("cooperative", 3, 4, 192, 256, 64),
    # One partition of two warpgroups, in step.
    ("cooperative", 1, 8, 128, 256, 64),
    # Smaller tiles, if the above make less than a wave, or to fill the last wave better.
    ("cooperative", 3, 4, 192, 128, 64),
    ("cooperative", 2, 4, 128, 128, 64),
    ("pingpong", 2, 4, 64, 256, 64),
    ("pingpong", 2, 4, 64, 128, 64),
    ("cooperative", 2, 4, 128, 64, 64),
    # 384×4096 is 128 of these tiles, nearly a wave, but only 96 of 128×128. In batch-invariant mode
    # it takes 21.5 µs with K = 4096.
    ("cooperative", 3, 4, 192, 64, 64),
    ("pingpong", 2, 4, 64, 64, 128),
    # To read a weight with as many SMs as possible if K must not be split.
    ("cooperative", 1, 4, 64, 32, 128),
)
#: Tiles of two products side by side fill waves that the others do not: 1500×1536 is 132 tiles
#: of 128×144, one wave. 300×13824 is two waves of ping-pong 64×192, and no other tile comes near
#: cuBLAS there (K = 5120, H200: 76 µs, the next best tile 85, cuBLAS 79). The first two are for
#: large products, also where power limits them. On an H100 8192³ runs at 1.089 of cuBLAS's speed in
#: use and 1.049 in steady state, with 128×256 at 1.046 and 1.011.
_SIDE_BY_SIDE_TILES = (
    ("pingpong", 2, 4, 128, 192, 64),
    ("pingpong", 2, 4, 128, 160, 64),
    ("pingpong", 2, 4, 64, 192, 64),
    ("pingpong", 2, 4, 64, 160, 64),
    ("pingpong", 2, 4, 64, 80, 64),
    ("cooperative", 2, 4, 128, 192, 64),
    ("cooperative", 2, 4, 128, 160, 64),
    ("cooperative", 2, 4, 128, 144, 64),
    ("cooperative", 2, 4, 128, 96, 64),
    ("cooperative", 3, 4, 192, 160, 64),
    ("cooperative", 3, 4, 192, 96, 64),
    ("cooperative", 1, 4, 64, 96, 64),
)
#: Tiles for 8-bit operands. Their stages are summed in separate registers, for at most 128 columns
#: at a time. Consumers must not run in lockstep, and must not alternate if the multiplication is
#: the limit.
_FP8_TILES = (
    ("cooperative", 2, 4, 128, 256, 128),
    ("cooperative", 3, 4, 192, 128, 128),
    ("cooperative", 2, 4, 128, 128, 128),
    ("cooperative", 3, 4, 192, 64, 128),
    ("cooperative", 2, 4, 128, 64, 128),
    # 256×4096×7168 are 128 of these, nearly a wave: 19.5 µs, and 20.0 in halves of 128×128.
    ("cooperative", 1, 4, 64, 128, 128),
    # To read a weight: 64 rows instead of 128 leave room for more of it in flight.
    ("pingpong", 2, 4, 64, 64, 128),
    ("cooperative", 1, 4, 64, 64, 128),
    ("cooperative", 1, 4, 64, 32, 128),
)
#: If an operand is loaded word by word: a k-step of 128 keeps 16 KB of it in flight.
_WORD_TILES = (
    ("cooperative", 2, 4, 128, 64, 128),
    ("cooperative", 2, 4, 128, 32, 128),
    ("cooperative", 2, 4, 128, 64, 64),
    ("pingpong", 2, 4, 64, 64, 128),
    ("cooperative", 1, 4, 64, 64, 128),
    ("cooperative", 1, 4, 64, 32, 128),
)
#: Tiles and configs proposed for one problem, and tiles if reading dominates. In 29 problems of
#: that kind the best tile was among the first five by estimate, and in 19 it was the first.
_TILES_TRIED, _CONFIGS_TRIED, _TILES_STREAMED = 8, 16, 5
#: Tiles of two products that are tried in addition, and the maximum ratio of their estimate to the
#: least one. No estimate is exact enough to rank both kinds. In 22 problems on both GPUs the
#: fastest such tile was among the first four, with at most 1.11 times the least estimate.
_SIDE_BY_SIDE_TRIED, _SIDE_BY_SIDE_NEAR = 4, 1.12
#: How many tiles split along K are tried, if a row's sums must not depend on M.
_CUT_TRIED = 3
#: How many tiles batch-invariant mode tries with each number of ranges of K, and how many configs
#: it adds to ``_CONFIGS_TRIED``.
_RANGED_TRIED, _KINDS_TRIED = 2, 8
#: Maximum K that counts as short.
_SHORT_K = 1024
#: Bytes of stages that cover the memory latency at full rate; more only take longer to fill.
_STAGED = 8 * 24 * 1024
#: Minimum K of a part of a tile of the last wave, and of a part of every tile.
_LEAST_PART, _LEAST_SPLIT = 512, 256
#: Maximum values of a strip per thread with groups of columns: with 128 a ping-pong tile of 128×128
#: spilled 672 bytes. Three consumers, of 160 registers, spilled up to 192 with 64.
_GROUPED = 64
#: How many tiles are also tried with the opposite ``evict_first``.
_BOTH_WAYS = 3


def configs(problem: Problem) -> Iterable[WarpSpecializedConfig]:
    """The search space, best estimate first; without a limit if ``SEARCH_LIMITED`` is not set."""
    return _configs(problem, SEARCH_LIMITED.get())


@functools.lru_cache(maxsize=8)  # the default config is the first, and the list takes 10 ms
def _configs(problem: Problem, limited: bool) -> tuple[WarpSpecializedConfig, ...]:
    fitting = list(filter(None, (_fitted(problem, tile) for tile in _tiles(problem))))
    # In one band of rows if tiles overlap, so that whole columns of tiles are split the same way.
    banded = [replace(v[0], GROUP_M=min(1024, tile_rows(problem, v[0]))) for v in fitting]
    cut = [
        [replace(config, tail_splits=splits)]
        for config in banded
        if (splits := _tail_splits(problem, config)) > 1
    ]
    part = unfinished(problem)
    cut += [
        [replace(variants[0], splits=splits)]
        for variants in filter(None, (_fitted(part, tile) for tile in _splittable(problem, part)))
        if (splits := _splits(problem, variants[0])) > 1
    ]

    @functools.cache
    def estimate(config: WarpSpecializedConfig) -> float:
        return estimate_us(problem, config)

    def by_estimate(tiles: list[list[WarpSpecializedConfig]]) -> list[list[WarpSpecializedConfig]]:
        return sorted(tiles, key=lambda variants: estimate(variants[0]))

    def best(
        tiles: list[list[WarpSpecializedConfig]], tried: int
    ) -> list[list[WarpSpecializedConfig]]:
        if not limited:
            return by_estimate(tiles)
        one = by_estimate([tile for tile in tiles if not tile[0].narrow])[:tried]
        two = by_estimate([tile for tile in tiles if tile[0].narrow])[:_SIDE_BY_SIDE_TRIED]
        most = _SIDE_BY_SIDE_NEAR * min((estimate(tile[0]) for tile in tiles), default=0.0)
        return by_estimate(one + [tile for tile in two if estimate(tile[0]) <= most])

    tried = _TILES_STREAMED if streams(problem) else _TILES_TRIED
    ranked = best(fitting + cut, tried)
    if problem.batch_invariant:
        # Parts of K are another reduction order, and each M needs candidates of all orders. Blocks
        # share the parts if there are few tiles; else they are summed one after the other.
        ranked = best(fitting, tried) + best(cut, _CUT_TRIED)
        for count in reduction_order.equal_splits(problem):
            ranked += by_estimate(_ranged(problem, fitting, count))[:_RANGED_TRIED]
    if streams(problem) and (problem.groups or min(problem.m, problem.n) > SURELY_STREAMED):
        for variants in ranked[:_BOTH_WAYS]:
            variants.append(replace(variants[0], evict_first=False))
    proposed = [
        [
            replace(config, GROUP_M=group)
            for config in variants
            for group in _groups(problem, config)
        ]
        for variants in ranked
    ]
    # Every tile once before any tile's variants.
    turns = itertools.chain.from_iterable(itertools.zip_longest(*proposed))
    most = _CONFIGS_TRIED + (_KINDS_TRIED if problem.batch_invariant else 0) if limited else None
    chosen = itertools.islice(filter(None, turns), most)
    return tuple(with_early(list(chosen), _early(problem))[:most])


def _tiles(problem: Problem) -> tuple[_Tile, ...]:
    """Return the tiles that suit the problem's operands."""
    if problem.native:
        return _FP8_TILES
    if by_words(problem):
        return _WORD_TILES
    return _TILES + _SIDE_BY_SIDE_TILES if side_by_side(problem) else _TILES


def _splittable(problem: Problem, part: Problem) -> list[_Tile]:
    """The tiles of ``part`` that leave SMs for at least two parts of each. In batch-invariant
    mode, whose parts do not depend on SMs, all of them."""
    if not may_split(problem):
        return []
    sms = problem.device.sm_count
    return [
        tile
        for tile in _tiles(part)
        if problem.batch_invariant or 2 * -(-problem.m // tile[3]) * -(-problem.n // tile[4]) <= sms
    ]


def _early(problem: Problem) -> tuple[str, ...]:
    """The ``early`` values to try, if reading b dominates: for longer products the end of a launch
    hardly matters."""
    if problem.m > SURELY_STREAMED or problem.batch > 1 or problem.groups is not None:
        return ()
    if by_words(problem) == "b":
        return ("wait",)
    return ("b", "l2", "wait") if problem.static_weights else ("l2", "wait")


def _fitted(problem: Problem, tile: _Tile) -> list[WarpSpecializedConfig]:
    """Variants of the tile with as many stages as fit shared memory; none if fewer than two do.

    Stores use strips of 128 bytes, the width of TMA's swizzle, preceded by narrower ones if their
    smaller staging buffer makes room for a stage.
    """
    schedule, consumers, num_warps, block_m, block_n, block_k = tile
    if by_words(problem) == "a" and consumers > 1 and schedule == "cooperative":
        return []  # it has two boxes of a
    if consumers == 3 and block_n == 256 and stored_by_pointers(problem):
        # 160 registers per thread hold its accumulators, but not also the addresses of 16 rows.
        return []
    block_n //= 2 if problem.gated else 1
    if block_n not in COLUMNS:
        return []
    variants: list[WarpSpecializedConfig] = []
    # 160 registers per thread do not hold two sums and the scales of 64 columns, nor 240 the
    # accumulators and the addresses of so wide a strip.
    slim = (problem.native and consumers == 3) or stored_by_pointers(problem)
    widths = (64,) if slim else (128, 64)
    # Each of two products is a whole number of strips.
    lowest, itemsize = block_n & -block_n, problem.out.dtype.itemsize
    group = columns_grouped(problem)
    if lowest % max(1, group):
        return []
    for width in widths:
        strip = min(lowest, max(16, width // itemsize, lowest // 8, group))
        if lowest != block_n and block_n // strip % 2 and residual_by_tma(problem):
            strip //= 2  # the residual's strips alternate between two buffers
        if strip < 16:
            continue
        config = WarpSpecializedConfig(
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP_M=1,
            num_stages=2,
            schedule=schedule,
            consumers=consumers,
            num_warps=num_warps,
            subtiles=block_n // strip,
            tail_splits=1,
            splits=1,
            evict_first=streams(problem),
        )
        if group and (consumers == 3 or config.rows * strip > _GROUPED * 32 * num_warps):
            continue
        stage = (block_m + block_n * (2 if problem.gated else 1)) * block_k
        stage *= problem.a.dtype.itemsize
        spare = problem.device.shared_memory - config.shared_memory(problem)
        stages = min(2 + spare // stage, max(8, _STAGED // stage))
        if stages > max((v.num_stages for v in variants), default=1):
            variants.insert(0, replace(config, num_stages=stages))
    return variants


def _groups(problem: Problem, config: WarpSpecializedConfig) -> list[int]:
    """Values of GROUP_M: the one with which a wave's tiles span about as much of M as of N, and
    half of it. They are less for a short K, where the order of output writes matters more than
    repeated reads (8192×4096×512: 50.2 µs at 4, 52.5 at 16)."""
    rows = tile_rows(problem, config)
    if config.tail_splits > 1 and problem.m % config.BLOCK_M:
        return [config.GROUP_M]
    wave = min(tile_count(problem, config), problem.device.sm_count)
    width = config.BLOCK_N * (2 if problem.gated else 1)
    square = round(math.log2(math.sqrt(wave * width / config.BLOCK_M)))
    groups = [square - 2, square - 1] if problem.k <= _SHORT_K else [square, square - 1]
    if config.splits > 1:
        del groups[1:]  # one wave of few tiles
    return list(dict.fromkeys(min(rows, 2 ** max(0, group)) for group in groups))


def _splits(problem: Problem, config: WarpSpecializedConfig) -> int:
    """The number of parts along K of every tile, so that all SMs have one. If a row's sums must not
    depend on M, the number does not depend on it either."""
    share = problem.device.sm_count // tile_count(problem, config)
    if problem.batch_invariant:
        room = room_for_parts(problem, config)
        return max(
            (s for s in reduction_order.equal_splits(problem) if s <= min(2 * share, room)),
            default=1,
        )
    return max(1, min(share, problem.k // _LEAST_SPLIT, room_for_parts(problem, config)))


def _ranged(
    problem: Problem, fitting: list[list[WarpSpecializedConfig]], count: int
) -> list[list[WarpSpecializedConfig]]:
    """Return the tiles whose block sums ``count`` ranges of K one after the other."""
    return [
        [replace(variants[0], ranges=count)]
        for variants in fitting
        if variants[0].accumulators <= MOST_SUMMED[variants[0].consumers]
        and count <= room_for_ranges(problem, variants[0])
    ]


def _tail_splits(problem: Problem, config: WarpSpecializedConfig) -> int:
    """The number of parts along K of each tile in the last wave: as many as SMs allow, each long
    enough to be worth adding. One if 160 registers hold hardly more than the accumulators, or the
    tile is two products, whose parts have no place in the workspace."""
    if config.narrow or (config.consumers == 3 and config.accumulators > 64):
        return 1
    longest = max(1, problem.k // _LEAST_PART)
    return min(room_for_splits(problem, config), longest, MOST_TAIL_SPLITS)
