"""Configs of the warp-specialised kernel: the constants of each for a problem, the search space,
and the time model.

Separate from the kernel, because measurements change this module and not the kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from tmm_core import Config, Machine, Operand, Problem
from tmm_triton import sums
from tmm_triton.early import with_early
from tmm_triton.partials import MOST_WORKSPACE, REDUCE_US
from tmm_triton.ragged_tiles import kinds, rows_ragged

#: TMA needs base and leading stride to be multiples of this many bytes.
ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True)
class WarpSpecializedConfig(Config):
    """A tile, and how the block's warps share it.

    Args:
        BLOCK_M, BLOCK_N, BLOCK_K: The tile, N of the output (a gated problem reads twice that).
        GROUP_M: Tile rows that are walked as a group.
        num_stages: Stages of the ring.
        schedule: ``"cooperative"`` or ``"pingpong"``.
        consumers: Two that alternate, or one to three that share the tile's rows.
        num_warps: Warps per consumer.
        subtiles: Column strips in which a tile is stored; more strips need less staging memory.
        tail_splits: Parts along K into which the tiles of an incomplete wave are split.
        splits: Parts along K into which every tile is split, added by a second kernel.
        evict_first: Operands are loaded with the ``evict_first`` hint.
        early: Whether it starts before the previous launch has ended (:mod:`tmm_triton.early`).
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    num_stages: int
    schedule: str
    consumers: int
    num_warps: int
    subtiles: int
    tail_splits: int
    splits: int
    evict_first: bool
    early: str = ""

    def __post_init__(self) -> None:
        if self.schedule not in ("cooperative", "pingpong"):
            raise ValueError(f"schedule must be cooperative or pingpong, got {self.schedule!r}")
        if self.consumers not in ((2,) if self.pingpong else (1, 2, 3)):
            raise ValueError(f"{self.schedule}: {self.consumers} consumers")
        if self.num_warps not in (4, 8) or self.consumers * self.num_warps > 12:
            raise ValueError(f"{self.consumers} consumers of {self.num_warps} warps")
        if not 1 <= self.tail_splits <= _MOST_TAIL_SPLITS:
            raise ValueError(f"tail_splits {self.tail_splits}")
        if not 1 <= self.splits <= _MOST_SPLITS or self.splits > 1 < self.tail_splits:
            raise ValueError(f"splits {self.splits}, tail_splits {self.tail_splits}")
        if not isinstance(self.evict_first, bool):
            raise ValueError(f"evict_first {self.evict_first!r}")
        if self.early not in ("", "wait", "l2", "b"):
            raise ValueError(f"early must be '', 'wait', 'l2' or 'b', got {self.early!r}")
        # One wgmma covers 64 rows, 16 per warp of four.
        if self.rows * (1 if self.pingpong else self.consumers) != self.BLOCK_M:
            raise ValueError(f"BLOCK_M {self.BLOCK_M} does not divide among the consumers")
        if self.rows not in (64, 128, 256) or self.rows % (16 * self.num_warps):
            raise ValueError(f"a consumer of {self.num_warps} warps cannot own {self.rows} rows")
        if self.BLOCK_N not in (32, 64, 128, 256) or self.BLOCK_K not in (32, 64, 128):
            raise ValueError(f"tile N×K {self.BLOCK_N}×{self.BLOCK_K}")
        if self.accumulators > 128:
            raise ValueError(f"{self.accumulators} accumulator registers a thread exceed 128")
        # With one stage, releasing it would wait for the next stage, which waits for the release.
        if not 2 <= self.num_stages <= 16 or not 1 <= self.GROUP_M <= 1024:
            raise ValueError(f"num_stages {self.num_stages}, GROUP_M {self.GROUP_M}")
        if self.subtiles not in (1, 2, 4, 8) or self.BLOCK_N // self.subtiles < 16:
            raise ValueError(f"{self.subtiles} subtiles of {self.BLOCK_N} columns")

    @property
    def assumes(self) -> tuple[str, ...]:
        return ("static_weights",) if self.early == "b" else ()

    @property
    def pingpong(self) -> bool:
        return self.schedule == "pingpong"

    @property
    def rows(self) -> int:
        """Rows of the tile per consumer."""
        return self.BLOCK_M if self.pingpong else self.BLOCK_M // self.consumers

    @property
    def accumulators(self) -> int:
        """fp32 accumulators per thread and product (a gated problem has two)."""
        return self.rows * self.BLOCK_N // (32 * self.num_warps)

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of shared memory per block."""
        c = Constants.of(problem, self)
        stage = c.IN_BYTES * (c.BLOCK_M + c.b_boxes * c.columns) * c.BLOCK_K
        staging = c.CONSUMERS * c.buffers * c.ROWS * c.width * c.OUT_BYTES
        # The bias is exchanged between threads through shared memory.
        bias = c.CONSUMERS * c.width * problem.bias.itemsize if problem.bias else 0
        return c.STAGES * stage + staging + bias + _SHARED_OVERHEAD


#: mbarriers, and Triton's memory for starting the partitions: at most 250 bytes over all configs on
#: both releases.
_SHARED_OVERHEAD = 512


@dataclass(frozen=True)
class Constants:
    """The constants that a kernel is specialised on, besides the types of its arguments."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    CONSUMERS: int
    WARPS: int
    ROWS: int
    SUBTILES: int
    PINGPONG: bool
    #: Whether an operand is column-major.
    A_COL: bool
    B_COL: bool
    GATED: bool
    SCALED: bool
    #: Kinds of the scales of 8-bit operands.
    SCALE_A: str | None
    SCALE_B: str | None
    #: Bytes of an element of the operands.
    IN_BYTES: int
    BIAS: bool
    RESIDUAL: bool
    BATCHED: bool
    #: The residual is loaded by TMA, into the staging buffers of the result.
    FETCH: bool
    #: The output is stored through pointers, element by element.
    POINTERS: bool
    #: Bytes of an element of the output.
    OUT_BYTES: int
    #: Parts along K of the tiles of an incomplete wave.
    TAIL_SPLITS: int
    #: Rows of A per box.
    A_ROWS: int
    #: Stages requested before the warps take their roles.
    PRIMED: int
    #: Parts along K of every tile, each with its own output.
    SPLITS: int
    #: Unused in the source: it distinguishes kernels with and without hinted loads.
    EVICT_FIRST: bool
    #: When the next launch may begin: after the block's ``"first"`` or ``"last"`` loads. Empty:
    #: this launch overlaps neither the previous nor the next one.
    DEPENDENTS: str = ""
    #: The config's ``early``.
    EARLY: str = ""
    #: The operand, ``"a"`` or ``"b"``, that warps load word by word, and how many warps do.
    WORDS: str | None = None
    LOADERS: int = 8
    #: The dimension along which groups differ in size, and whether rows of none become zeros.
    RAGGED: str | None = None
    ZEROED: bool = False
    #: Rows of the result are stored where ``out_index`` says, and multiplied by ``out_weights``.
    SCATTERED: bool = False
    WEIGHTED: bool = False
    #: Elements that a thread stores at once where it stores through pointers.
    STORED: int = 1
    #: By what rows are reduced to an output beside the result.
    REDUCE: str | None = None
    #: The kernel's: Triton keeps what it compiled by the values of its constants, which tell
    #: nothing of what the properties below make of them.
    VERSION: str = ""

    def __post_init__(self) -> None:
        boxes = self.a_boxes if self.WORDS == "a" else self.b_boxes
        if self.WORDS is not None and (self.CONSUMERS == 3 or boxes > 1):
            raise ValueError(f"{self.WORDS} is loaded by words, {boxes} boxes at a time")
        if self.EARLY in ("l2", "b") and self.WORDS == "b":
            raise ValueError("b is loaded by words, which nothing does early")

    @classmethod
    def of(
        cls,
        problem: Problem,
        config: WarpSpecializedConfig,
        version: str = "",
        dependents: str = "first",
    ) -> Constants:
        problem = multiplied(problem, config)
        return cls(
            BLOCK_M=config.BLOCK_M,
            BLOCK_N=config.BLOCK_N,
            BLOCK_K=config.BLOCK_K,
            STAGES=config.num_stages,
            CONSUMERS=config.consumers,
            WARPS=config.num_warps,
            ROWS=config.rows,
            SUBTILES=config.subtiles,
            PINGPONG=config.pingpong,
            A_COL=problem.a.layout == "col",
            B_COL=problem.b.layout == "col",
            GATED=problem.gated,
            SCALED=problem.scaled,
            SCALE_A=problem.scale_a,
            SCALE_B=problem.scale_b,
            IN_BYTES=problem.a.dtype.itemsize,
            BIAS=problem.bias is not None,
            RESIDUAL=problem.residual is not None,
            BATCHED=problem.batch > 1,
            FETCH=residual_by_tma(problem),
            POINTERS=stored_by_pointers(problem),
            OUT_BYTES=problem.out.dtype.itemsize,
            TAIL_SPLITS=config.tail_splits,
            A_ROWS=_rows_brought(problem, config),
            PRIMED=min(config.num_stages, 16 if config.early in ("l2", "b") else _PRIMED),
            SPLITS=config.splits,
            EVICT_FIRST=config.evict_first,
            DEPENDENTS=dependents if config.early else "",
            EARLY=config.early,
            WORDS=by_words(problem),
            RAGGED=problem.groups.ragged if problem.groups else None,
            ZEROED=problem.groups is not None and problem.groups.zeroed,
            SCATTERED=scattered(problem),
            WEIGHTED=problem.groups is not None and problem.groups.out_weights is not None,
            STORED=_stored_at_once(problem),
            REDUCE=next((port.reduce for port in problem.epilogue.outputs), None),
            VERSION=version,
        )

    @property
    def overlaps(self) -> bool:
        """Whether it is launched while the previous launch may still run."""
        return bool(self.DEPENDENTS)

    @property
    def pieces(self) -> int:
        """A power of two, at least the number of the first k-steps."""
        return 1 << (self.PRIMED - 1).bit_length()

    @property
    def stacked(self) -> bool:
        """Whether the result is a stack of matrices, with as many tiles each."""
        return self.out_kind == "stack"

    @property
    def a_kind(self) -> str:
        return kinds(self.RAGGED, self.BATCHED)["a"]

    @property
    def b_kind(self) -> str:
        return kinds(self.RAGGED, self.BATCHED)["b"]

    @property
    def out_kind(self) -> str:
        """The result's kind of tensor map, and a residual's."""
        return kinds(self.RAGGED, self.BATCHED)["out"]

    @property
    def a_box(self) -> list[int]:
        """The shape of a box of A in shared memory."""
        return boxed(self.ROWS, self.BLOCK_K, self.A_COL, self.a_kind)

    @property
    def b_box(self) -> list[int]:
        """The shape of a box of B in shared memory."""
        return boxed(self.BLOCK_K, self.columns, self.B_COL, self.b_kind)

    @property
    def arrivals(self) -> int:
        """Arrivals that make a stage full: the producer's, and the loader's."""
        return 1 if self.WORDS is None else 2

    @property
    def policy(self) -> str:
        """The loader's eviction policy."""
        return "evict_first" if self.EVICT_FIRST else ""

    @property
    def a_boxes(self) -> int:
        """TMA boxes of A per stage, one for each consumer that shares the tile."""
        return self.BLOCK_M // self.ROWS

    @property
    def b_boxes(self) -> int:
        """TMA boxes of B per stage."""
        return 2 if self.GATED or self.halves else 1

    @property
    def promoted(self) -> bool:
        """Whether each k-step is summed separately, and the sums are added in fp32
        (``hopper_consumers``)."""
        return self.IN_BYTES == 1

    @property
    def halves(self) -> bool:
        """Whether the tile's left and right half are separate products, like gate and up if gated:
        registers suffice for a separate sum of only one of them at a time."""
        return self.promoted and not self.GATED and self.BLOCK_N == 256

    @property
    def columns(self) -> int:
        """Columns of one product."""
        return self.BLOCK_N // 2 if self.halves else self.BLOCK_N

    @property
    def width(self) -> int:
        """Columns of a strip."""
        return self.BLOCK_N // self.SUBTILES

    @property
    def buffers(self) -> int:
        """Staging buffers per consumer: with two, one is filled while the other is stored."""
        return min(2, self.SUBTILES)

    @property
    def groups(self) -> int:
        """Warpgroups per block, one of which is the producer's."""
        return -(-(self.WARPS + sum(self.worker_warps)) // 4)

    @property
    def mma_n(self) -> int:
        """Columns of one wgmma. ptxas refuses one with 128 accumulators per thread if the block
        starts with 128 registers per thread (512 threads), although the consumers have more by
        then."""
        return min(self.columns, 128 if self.groups > 3 else 256)

    @property
    def worker_warps(self) -> list[int]:
        """Warps of each role except the first consumer, which is Triton's default partition."""
        loaders = [] if self.WORDS is None else [self.LOADERS]
        return [self.WARPS] * (self.CONSUMERS - 1) + [1] + loaders

    @property
    def worker_registers(self) -> list[int]:
        """Registers per thread of these roles: the producer has the minimum of setmaxnreg,
        consumers an equal share of the remainder of the SM's 65536; the first gets the rest."""
        producer, loaders = 24, [] if self.WORDS is None else [_LOADER_REGISTERS]
        groups = self.CONSUMERS * self.WARPS // 4
        each = 65536 // (128 * self.groups) // 8 * 8
        spared = self.groups * each - producer - sum(loaders) * self.LOADERS // 4
        consumer = min(240, spared // groups // 8 * 8)
        return [consumer] * (self.CONSUMERS - 1) + [producer] + loaders


def boxed(rows: int, columns: int, col: bool, kind: str) -> list[int]:
    """The box [rows, columns] of one matrix in memory order, after the other dimensions of its
    kind of tensor map."""
    box = [columns, rows] if col else [rows, columns]
    return [1] * {"matrix": 0, "stack": 1, "clipped": 2}[kind] + box


#: ``(schedule, consumers, num_warps, BLOCK_M, BLOCK_N, BLOCK_K)``; N counts both halves if gated.
#: Each was the fastest of all for some problem on an H200, unless noted.
_TILES = (
    # The epilogue overlaps the other consumer's main loop: 2 to 7 % faster than the next tile for
    # costly epilogues or a short K, under sustained load at the power limit.
    ("pingpong", 2, 4, 128, 128, 64),
    # 128×256 is needed to multiply at full rate with L2's bandwidth; 192×256 needs a quarter less
    # and fits other sizes into one wave (2304³: 108 tiles, not 162).
    ("cooperative", 2, 4, 128, 256, 64),
    ("cooperative", 2, 4, 256, 128, 64),
    ("cooperative", 3, 4, 192, 256, 64),
    # One partition of two warpgroups, in step.
    ("cooperative", 1, 8, 128, 256, 64),
    # For less than a wave of the above, or to fill the last wave better.
    ("cooperative", 3, 4, 192, 128, 64),
    ("cooperative", 2, 4, 128, 128, 64),
    ("pingpong", 2, 4, 64, 256, 64),
    ("pingpong", 2, 4, 64, 128, 64),
    ("cooperative", 2, 4, 128, 64, 64),
    # 384×4096 is 128 of these, nearly a wave, but 96 of 128×128: in batch-invariant mode, with
    # K = 4096, 21.5 µs. The second was never chosen.
    ("cooperative", 3, 4, 192, 64, 64),
    ("cooperative", 3, 4, 192, 64, 128),
    ("pingpong", 2, 4, 64, 64, 128),
    # To read a weight with as many SMs as possible if K must not be split.
    ("cooperative", 1, 4, 64, 32, 128),
)
#: For 8-bit operands, whose stages are summed in separate registers, for at most 128 columns at a
#: time. The consumers must not run in lockstep, nor alternate.
_FP8_TILES = (
    ("cooperative", 2, 4, 128, 256, 128),
    ("cooperative", 3, 4, 192, 128, 128),
    ("cooperative", 2, 4, 128, 128, 128),
    ("cooperative", 3, 4, 192, 64, 128),
    ("cooperative", 2, 4, 128, 64, 128),
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
#: How many tiles, and configs in all, are proposed for one problem, and how many tiles if reading
#: dominates: in 29 such problems the best was among the first five by estimate, in 19 the first.
_TILES_TRIED, _CONFIGS_TRIED, _TILES_STREAMED = 8, 16, 5
#: And how many tiles split along K, if a row's sums must not depend on M.
_CUT_TRIED = 3
#: Maximum K that counts as short.
_SHORT_K = 1024
#: Registers per thread of the loader.
_LOADER_REGISTERS = 112
#: Stages of 24 KB that cover the memory latency at full rate; more only take longer to fill.
_STAGES_WANTED = 8

#: Share of the tensor cores' peak at the power limit of an H200 (800 TFLOP/s), and bytes per µs of
#: an SM from L2: 8192×4096×512 reached 95e3 in 128×128 tiles, and 64×256 tiles, which need a
#: quarter more, are no slower for products of all sizes.
_REACH, _SM_BYTES = 800 / 989, 125e3
#: Maximum number of stages requested before the warps take their roles: 4 saved 0.2 to 0.6 µs in
#: all of 25 problems compared with none, 1 and 2 saved less.
_PRIMED = 4
#: µs of a launch with its first loads (a product of 32 128³ matrices took 8.3 when these started
#: 0.4 later, an empty kernel 3.3); and of rounding and storing 128×256 elements.
_LAUNCH_US, _EPILOGUE_US = 5.6, 0.9
#: µs to store, or add, a part of 128×256 elements (``tail_splits``), the minimum K of a part, and
#: the maximum number of parts of a tile.
_PART_US, _LEAST_PART, _MOST_TAIL_SPLITS = 1.0, 512, 4
#: µs of waiting until another block's part can be added.
_WAITING_US = 3.0
#: Maximum parts of every tile, the minimum K of each, and bytes per µs at which the reducing kernel
#: reads them from L2.
_MOST_SPLITS, _LEAST_SPLIT, _PARTS_BYTES = 256, 256, 3e6
#: Assumed cost factor of summing a tile's halves one after the other, until it is measured: such
#: that it is tried when tuning, but not guessed untuned.
_HALVES = 1.15
#: Maximum rows (columns) of the output for which ``evict_first`` is tried, since few tiles read the
#: other operand; for which it always won; and how much longer memory takes without it. µs saved on
#: an H200: with 32 to 128 rows 2.3 to 4.7 of 17 to 70; with 256 3.1 of 22.9 (4096²) and 3.8 of 53.1
#: (8192²) but -2.5 of 97 (28672×4096); with 512 -1.7 of 180 to 1.2 of 86, and 3.1 of 35.8 where K
#: is 32768; with 1024 none.
_STREAMED, _SURELY_STREAMED, _DISPLACING = 512, 128, 1.1
#: µs that TMA takes to zero-fill an out-of-bounds byte. In boxes of 64 rows, with 4096²: 4.7 at 36
#: rows and 1.1 at 50; with 4096×14336: 30 at 4 rows.
_FILLING_US = 17e-6
#: Maximum rows (columns) of the other operand if one is loaded word by word: for more it would be
#: loaded again, while ``triton.realigned`` copies it once.
_FEW = 128
#: µs of a k-step whose box is loaded by words, and its bytes per µs: in 127×4093×4096 a box of 8 KB
#: took 0.75 µs, one of 16 KB 1.3, including launch and epilogue.
_WORDS_US, _SM_WORDS_BYTES = 0.25, 18e3
#: Mean rows of a group for which most of a tile is padding, and how much longer memory is assumed
#: to take, until it is measured: ``triton.ragged``, in tiles of 16 rows, is to come first.
_FEW_OF_GROUP, _FEW_PADDED = 32, 1.15
#: How many tiles are also tried with the opposite ``evict_first``.
_BOTH_WAYS = 3


def configs(problem: Problem) -> Iterable[WarpSpecializedConfig]:
    """The search space, best guess first."""
    tiles = _FP8_TILES if problem.fp8 else _WORD_TILES if by_words(problem) else _TILES
    fitting = list(filter(None, (_fitted(problem, tile) for tile in tiles)))
    # In one band of rows if tiles overlap, so that whole columns of tiles are split the same way.
    banded = [replace(v[0], GROUP_M=min(1024, _tile_rows(problem, v[0]))) for v in fitting]
    cut = [
        [replace(config, tail_splits=splits)]
        for config in banded
        if (splits := _tail_splits(problem, config)) > 1
    ]
    cut += [
        [replace(variants[0], splits=splits)]
        for variants in filter(None, (_fitted(_sums(problem), tile) for tile in tiles))
        if (splits := _splits(problem, variants[0])) > 1
    ]

    def by_estimate(tiles: list[list[WarpSpecializedConfig]]) -> list[list[WarpSpecializedConfig]]:
        return sorted(tiles, key=lambda variants: estimate_us(problem, variants[0]))

    tried = _TILES_STREAMED if _streams(problem) else _TILES_TRIED
    ranked = by_estimate(fitting + cut)[:tried]
    if problem.batch_invariant:
        # A split tile has another arithmetic: each M should have both kinds.
        ranked = by_estimate(fitting)[:tried] + by_estimate(cut)[:_CUT_TRIED]
    if _streams(problem) and (problem.groups or min(problem.m, problem.n) > _SURELY_STREAMED):
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
    chosen = itertools.islice(filter(None, turns), _CONFIGS_TRIED)
    yield from with_early(list(chosen), _early(problem))[:_CONFIGS_TRIED]


def _early(problem: Problem) -> tuple[str, ...]:
    """The ``early`` values to try, if reading b dominates: for longer products the end of a launch
    hardly matters."""
    if problem.m > _SURELY_STREAMED or problem.batch > 1 or problem.groups is not None:
        return ()
    if by_words(problem) == "b":
        return ("wait",)
    return ("b", "l2", "wait") if problem.static_weights else ("l2", "wait")


def _extent(problem: Problem, config: WarpSpecializedConfig) -> tuple[int, int]:
    """Columns of ``b`` that a tile reads, and its part of K in whole stages."""
    width = config.BLOCK_N * (2 if problem.gated else 1)
    return width, steps(problem, config) * config.BLOCK_K


def steps(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Steps of a tile along K, or of its part of K; of a mean group if K is ragged."""
    k = problem.k
    if problem.groups is not None and problem.along == "k":
        k = -(-k // groups_present(problem))
    return -(-k // (config.BLOCK_K * config.splits))


def _tile_us(problem: Problem, config: WarpSpecializedConfig) -> tuple[float, float]:
    """µs to multiply a tile, or its part of K, and to load its operands from L2."""
    width, depth = _extent(problem, config)
    rate = Machine.of(problem.device).flops(problem) * _REACH
    load = problem.a.dtype.itemsize * (config.BLOCK_M + width) * depth / _SM_BYTES
    return 2 * config.BLOCK_M * width * depth / rate, load


def _waves(problem: Problem, config: WarpSpecializedConfig) -> float:
    """Tiles per SM; the last ones may be split."""
    count, sms = tile_count(problem, config) * config.splits, Machine.of(problem.device).sms
    if config.tail_splits > 1:
        return count // sms + 1 / config.tail_splits
    return -(-count // sms)


def times_us(problem: Problem, config: WarpSpecializedConfig) -> dict[str, float]:
    """The times of the components of :func:`estimate_us` alone."""
    waves, (multiply, load) = _waves(problem, config), _tile_us(problem, config)
    memory = problem.bytes / Machine.of(problem.device).memory
    tiles = {"tensor cores": waves * multiply, "L2": waves * load}
    return {**tiles, "memory": memory, "launch": _LAUNCH_US}


def estimate_us(problem: Problem, config: WarpSpecializedConfig) -> float:
    """Waves of whole tiles, each bound by its multiplication or its loads."""
    config = adapted(problem, config)
    width, depth = _extent(problem, config)
    itemsize = problem.a.dtype.itemsize
    multiply, load = _tile_us(problem, config)
    if words := by_words(problem):
        box = itemsize * config.BLOCK_K * (config.BLOCK_M if words == "a" else config.BLOCK_N)
        load = depth / config.BLOCK_K * (_WORDS_US + box / _SM_WORDS_BYTES)
    c = Constants.of(problem, config)
    if c.halves:
        multiply *= _HALVES
    # Overlapped loads cost power and so clock rate: the larger tile wins ties.
    loop = max(multiply, load) + load / 20
    epilogue = _EPILOGUE_US * config.BLOCK_M * config.BLOCK_N / (128 * 256)
    if not problem.epilogue.is_identity or problem.residual is not None:
        epilogue *= 1.5
    waves = _waves(problem, config)
    adding = 0.0
    if config.splits > 1:
        adding = REDUCE_US + 8 * config.splits * problem.m * problem.n / _PARTS_BYTES
    if config.tail_splits > 1:
        adding = config.tail_splits * _PART_US * config.BLOCK_M * width / (128 * 256)
        if not (config.pingpong and waves > 1):
            adding += _WAITING_US  # nothing overlaps the wait
    if config.pingpong and waves > 1:
        busy = waves * max(loop, epilogue / 2) + epilogue
    elif config.pingpong:
        # The other consumer is idle, and one alone leaves gaps.
        busy = waves * 1.1 * loop + epilogue
    else:
        # Consumers not in lockstep hide some of it.
        exposed = epilogue if config.consumers == 1 else 0.6 * epilogue
        busy = waves * loop + math.ceil(waves) * exposed
    # The closer the two times are, the less of the shorter one is hidden.
    memory = problem.bytes / Machine.of(problem.device).memory
    if _streams(problem) and not config.evict_first:
        memory *= _DISPLACING
    if rows_ragged(problem) and _mean_rows(problem) <= _FEW_OF_GROUP:
        memory *= _FEW_PADDED
    # Zero-filling a box's missing rows blocks other loads.
    absent = max(0, c.a_boxes * c.A_ROWS - problem.m)
    filling = _FILLING_US * absent * depth * itemsize * math.ceil(waves)
    return _LAUNCH_US + adding + filling + math.sqrt(math.hypot(busy**2, memory**2))


def _fitted(
    problem: Problem, tile: tuple[str, int, int, int, int, int]
) -> list[WarpSpecializedConfig]:
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
    if block_n < 32:
        return []
    variants: list[WarpSpecializedConfig] = []
    # 160 registers per thread do not hold two sums and the scales of 64 columns, nor 240 the
    # accumulators and the addresses of so wide a strip.
    narrow = (problem.fp8 and consumers == 3) or stored_by_pointers(problem)
    widths = (64,) if narrow else (128, 64)
    for width in widths:
        config = WarpSpecializedConfig(
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP_M=1,
            num_stages=2,
            schedule=schedule,
            consumers=consumers,
            num_warps=num_warps,
            subtiles=min(8, max(1, block_n * problem.out.dtype.itemsize // width)),
            tail_splits=1,
            splits=1,
            evict_first=_streams(problem),
        )
        stage = (block_m + block_n * (2 if problem.gated else 1)) * block_k
        stage *= problem.a.dtype.itemsize
        spare = problem.device.shared_memory - config.shared_memory(problem)
        stages = min(2 + spare // stage, _STAGES_WANTED)
        if stages > max((v.num_stages for v in variants), default=1):
            variants.insert(0, replace(config, num_stages=stages))
    return variants


def _groups(problem: Problem, config: WarpSpecializedConfig) -> list[int]:
    """GROUP_M such that one wave's tiles span about as much of M as of N, and half of it; less if K
    is short, when the order of output writes matters more than repeated reads (8192×4096×512: 50.2
    µs at 4, 52.5 at 16)."""
    rows = _tile_rows(problem, config)
    if config.tail_splits > 1 and problem.m % config.BLOCK_M:
        return [config.GROUP_M]
    wave = min(tile_count(problem, config), problem.device.sm_count)
    width = config.BLOCK_N * (2 if problem.gated else 1)
    square = round(math.log2(math.sqrt(wave * width / config.BLOCK_M)))
    groups = [square - 2, square - 1] if problem.k <= _SHORT_K else [square, square - 1]
    if config.splits > 1:
        del groups[1:]  # one wave of few tiles
    return list(dict.fromkeys(min(rows, 2 ** max(0, group)) for group in groups))


def _streams(problem: Problem) -> bool:
    """Whether operands are loaded with ``evict_first``."""
    if problem.groups is not None:
        # Where one row of tiles is all of most groups, their part of b is read once.
        return rows_ragged(problem) and _mean_rows(problem) <= _SURELY_STREAMED
    return problem.batch == 1 and min(problem.m, problem.n) <= _STREAMED


def _mean_rows(problem: Problem) -> int:
    return -(-problem.m // groups_present(problem))


def _sums(problem: Problem) -> Problem:
    """The product alone in fp32, which another kernel finishes."""
    return Problem(
        m=problem.m,
        n=problem.n,
        k=problem.k,
        a=problem.a,
        b=problem.b,
        out=Operand(torch.float32),
        device=problem.device,
        batch=problem.batch,
    )


def multiplied(problem: Problem, config: WarpSpecializedConfig) -> Problem:
    """The problem that the kernel itself computes."""
    return problem if config.splits == 1 else _sums(problem)


def _splits(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Parts along K to split every tile into, so that all SMs have one; if a row's sums must not
    depend on M, a number that does not depend on it."""
    share = problem.device.sm_count // tile_count(problem, config)
    if problem.batch_invariant:
        room = _room_for_parts(problem, config)
        return max((s for s in sums.equal_splits(problem) if s <= min(2 * share, room)), default=1)
    return max(1, min(share, problem.k // _LEAST_SPLIT, _room_for_parts(problem, config)))


def _room_for_parts(problem: Problem, config: WarpSpecializedConfig) -> int:
    """How many parts of every tile may be left to the reducing kernel: those that the workspace
    holds and that have a k-step; one where TMA could not write them, or it cannot finish them."""
    if problem.gated or problem.batch > 1 or problem.n % 4 or problem.epilogue.outputs:
        return 1
    if problem.groups is not None:
        return 1
    steps = -(-problem.k // config.BLOCK_K)
    held = MOST_WORKSPACE // (4 * part_elements(problem, config))
    return max(1, min(steps, held, _MOST_SPLITS))


def part_elements(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Workspace elements of one part of every tile; rows are padded to whole tiles for TMA."""
    return -(-problem.m // config.BLOCK_M) * config.BLOCK_M * problem.n


def _tail_splits(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Parts along K to split the tiles of the last wave into: as many as there are SMs for, and
    long enough to be worth adding. One if 160 registers hold hardly more than the accumulators."""
    if config.consumers == 3 and config.accumulators > 64:
        return 1
    longest = max(1, problem.k // _LEAST_PART)
    return min(_room_for_splits(problem, config), longest, _MOST_TAIL_SPLITS)


def adapted(problem: Problem, config: WarpSpecializedConfig) -> WarpSpecializedConfig:
    """A config of another problem, such as another M of the bucket, limited to the parts that this
    problem's last wave has SMs and room for: a part that no block computes would be waited for
    forever."""
    tail_splits = min(config.tail_splits, _room_for_splits(problem, config))
    splits = min(config.splits, _room_for_parts(problem, config))
    words = by_words(problem) == "b" and config.early in ("l2", "b")
    early = "wait" if words else config.early
    if problem.groups is not None:
        early = ""  # offs determines which k-steps are the first
    return replace(config, tail_splits=tail_splits, splits=splits, early=early)


def _room_for_splits(problem: Problem, config: WarpSpecializedConfig) -> int:
    """SMs per tile of the last wave; one if a row's sums must not depend on M, tiles overlap, or
    the host does not know how many there are."""
    tail = tail_tiles(problem, config)
    if not tail or problem.batch_invariant or problem.groups or not _alike(problem, config):
        return 1
    return max(1, problem.device.sm_count // tail)


def tail_tiles(problem: Problem, config: WarpSpecializedConfig) -> int:
    """The number of tiles that ``tail_splits`` splits, which come first: those of an incomplete
    wave, rounded up to whole columns of tiles if rows of tiles overlap."""
    tail = tile_count(problem, config) % problem.device.sm_count
    rows = _tile_rows(problem, config)
    return -(-tail // rows) * rows if _overlaps(problem.m, config.BLOCK_M) else tail


def _alike(problem: Problem, config: WarpSpecializedConfig) -> bool:
    """Whether of the tiles that store the same elements all are split or none: an element must not
    depend on which tile stores last. The last row of tiles overlaps the previous one, and so does
    the last column; in one band of rows tiles are numbered by column, and the first are split."""
    if stored_by_pointers(problem):
        return True
    down = _overlaps(problem.m, config.BLOCK_M)
    across = _overlaps(problem.n, config.BLOCK_N)
    if not (down or across):
        return True
    rows = _tile_rows(problem, config)
    if problem.batch > 1 or rows > config.GROUP_M:
        return False
    uncut = tile_count(problem, config) - tail_tiles(problem, config)
    return not across or uncut >= 2 * rows


def _overlaps(size: int, block: int) -> bool:
    """Whether tiles along a dimension overlap."""
    return size > block and size % block != 0


def _tile_rows(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Rows of tiles; an estimate for ragged ones: half of a group's last tile is empty."""
    if not rows_ragged(problem):
        return -(-problem.m // config.BLOCK_M)
    count = groups_present(problem)
    return max(count, problem.m // config.BLOCK_M + count // 2)


def _rows_brought(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Rows of A in a box: at most the next power of two of M. The tile's remaining rows multiply
    stale memory and are not stored: zero-filling the 60 missing rows of a 4×4096×14336 by TMA
    raised its time from about 40 µs to 70 on an H200. Swizzling needs at least eight."""
    if problem.a.layout != "row":
        return config.rows
    return min(config.rows, max(8, 1 << (problem.m - 1).bit_length()))


def tile_count(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Tiles of the whole batch, or of all groups: an estimate if their rows differ."""
    across = -(-problem.n // config.BLOCK_N)
    if problem.groups is not None and not rows_ragged(problem):
        return problem.groups.count * _tile_rows(problem, config) * across
    return problem.batch * _tile_rows(problem, config) * across


def most_tiles(problem: Problem, config: WarpSpecializedConfig) -> int:
    """The maximum of :func:`tile_count` over all sizes of groups."""
    if not rows_ragged(problem):
        return tile_count(problem, config)
    rows = problem.m // config.BLOCK_M + groups_present(problem)
    return rows * -(-problem.n // config.BLOCK_N)


def groups_present(problem: Problem) -> int:
    """How many groups can have anything at all."""
    assert problem.groups is not None
    return max(1, min(problem.groups.count, problem.extent))


def by_words(problem: Problem) -> str | None:
    """The operand that TMA cannot read, ``"a"`` or ``"b"``, if there is only one, and so few rows
    or columns of the other multiply it that it is read once or twice."""
    misaligned = [name for name in "ab" if not getattr(problem, name).aligned]
    plain = problem.batch == 1 and not problem.gated and problem.a.dtype.itemsize == 2
    plain = plain and problem.groups is None
    # Distances past a row's end are counted in bits, as 32-bit integers.
    counted = max(problem.m, problem.n, problem.k) < 2**27
    if len(misaligned) != 1 or not (plain and counted):
        return None
    other = problem.m if misaligned == ["b"] else problem.n
    return misaligned[0] if other <= _FEW else None


def stored_by_pointers(problem: Problem) -> bool:
    """Whether TMA cannot write the output: its rows are scattered, or are not whole multiples of
    its alignment."""
    return scattered(problem) or _rows_unaligned(problem)


def _rows_unaligned(problem: Problem) -> bool:
    """Whether rows of the output do not start or end at multiples of 16 bytes, which TMA stores
    whole (on an H200 a 1×1 output overwrote its 7 neighbours)."""
    return not problem.out.aligned or problem.n * problem.out.dtype.itemsize % ALIGNMENT != 0


def _stored_at_once(problem: Problem) -> int:
    if not scattered(problem) or _rows_unaligned(problem):
        return 1
    return ALIGNMENT // problem.out.dtype.itemsize


def scattered(problem: Problem) -> bool:
    """Whether an index says where rows of the result are stored."""
    return problem.groups is not None and problem.groups.out_index is not None


def residual_by_tma(problem: Problem) -> bool:
    """Whether TMA loads the residual into the staging buffers of the output."""
    residual = problem.residual
    return (
        residual is not None
        and not stored_by_pointers(problem)
        and residual.dtype == problem.out.dtype
        and residual.layout == "row"
        and residual.aligned
    )
