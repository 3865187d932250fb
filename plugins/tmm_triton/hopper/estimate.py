"""Estimates the Hopper kernel's time from its config: waves of tiles, memory and launch.

Launched code does not depend on this module: new measurements change it without a new version.
"""

from __future__ import annotations

import math

from tmm_core import Machine, Problem
from tmm_triton.hopper.config import Constants, WarpSpecializedConfig
from tmm_triton.hopper.operand_layout import by_words
from tmm_triton.hopper.tile_shapes import adapted, groups_present, steps, tile_count
from tmm_triton.partials import REDUCE_US
from tmm_triton.ragged_tiles import rows_ragged

#: Share of the tensor cores' peak at the power limit of an H200 (800 TFLOP/s), and bytes per µs of
#: an SM from L2. 8192×4096×512 reached 95e3 in 128×128 tiles. Tiles of 64×256 need a quarter more,
#: and are no slower for products of all sizes.
_REACH, _SM_BYTES = 800 / 989, 125e3
#: Bytes that TMA could load in the time that it needs for one row of a box, however short. 64×80
#: tiles of a row-major b have rows of 32 bytes, and take 2.5 times as long as tiles of a
#: column-major b, whose rows have 128.
_ROW_BYTES = 85
#: Share of the loads' time by which overlapped loads delay multiplying, because they cost power and
#: so clock rate. Tiles of 128×256 load three quarters of what 128×128 do: 8192×6144×4096 on an H200
#: is 4 % faster in them in steady state. This constant and the next two are fitted to timings
#: (``benchmarks/results/estimated_tiles.txt``).
_POWER = 1 / 6
#: Share of an epilogue that the tile's other consumers do not hide.
_EXPOSED = 0.9
#: Factor on multiplying if the first tiles are split, more than ``_FEW_WAVES`` waves follow, and
#: both operands are read again. Blocks then do not work on a rectangle of tiles. On an H100, whose
#: L2 is smaller, 8192×6144×4096 takes 803 µs in 128×128 tiles with the last wave in three parts,
#: and 582 in other tiles. But split tiles win often, mostly on an H200: with 1.1 they were not
#: proposed where they won by 5 to 14 % (``benchmarks/results/proposals.md``).
_IRREGULAR, _FEW_WAVES = 1.03, 2
#: µs of a launch with its first loads, and of rounding and storing 128×256 elements. A product of
#: 32 128³ matrices took 8.3 µs when the first loads started 0.4 later, an empty kernel 3.3.
_LAUNCH_US, _EPILOGUE_US = 5.6, 0.9
#: µs to store, or add, a part of 128×256 elements (``tail_splits``), and to wait until another
#: block's part can be added.
_PART_US, _WAITING_US = 1.0, 3.0
#: µs to end the products of a range of K and add their sums to the sums of earlier ranges
#: (assumed).
_ENDED_US = 0.3
#: Bytes per µs at which the reducing kernel reads parts of every tile (``splits``) from L2.
_PARTS_BYTES = 3e6
#: Factor on the loads' time where the sums of each step are scaled and added separately, if all SMs
#: work. Fitted to 269 configs with scales of blocks, of 21 products on an H100 and an H200
#: (``benchmarks/results/h200/scaled_loads.txt``).
_SCALED_LOADS = 1.7
#: Maximum rows (columns) of the output for which ``evict_first`` is tried, since few tiles read the
#: other operand. Maximum for which it always won. The factor on memory's time without it.
#: Saved on an H200, in µs:
#:   32 to 128 rows: 2.3 to 4.7 of 17 to 70.
#:   256 rows: 3.1 of 22.9 (4096²), 3.8 of 53.1 (8192²), -2.5 of 97 (28672×4096).
#:   512 rows: -1.7 of 180 to 1.2 of 86, and 3.1 of 35.8 if K is 32768.
#:   1024 rows: nothing.
_STREAMED, SURELY_STREAMED, _DISPLACING = 512, 128, 1.1
#: µs that TMA takes to zero-fill an out-of-bounds byte. In boxes of 64 rows, with 4096²: 4.7 at 36
#: rows and 1.1 at 50; with 4096×14336: 30 at 4 rows.
_FILLING_US = 17e-6
#: µs of a k-step whose box is loaded by words, and its bytes per µs. In 127×4093×4096 a box of 8 KB
#: took 0.75 µs and one of 16 KB 1.3, including launch and epilogue.
_WORDS_US, _SM_WORDS_BYTES = 0.25, 18e3
#: Mean rows of a group below which most of a tile is padding, and the factor on memory's time that
#: is assumed until it is measured. So ``triton.ragged``, with tiles of 16 rows, is tried first.
_FEW_OF_GROUP, _FEW_PADDED = 32, 1.15


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
    if c.promoted:
        working = tile_count(problem, config) * config.splits / Machine.of(problem.device).sms
        load *= max(1.0, _SCALED_LOADS * min(1.0, working))
    loop = max(multiply, load) + load * _POWER
    epilogue = _EPILOGUE_US * config.BLOCK_M * config.BLOCK_N / (128 * 256)
    if not problem.epilogue.is_identity or problem.residual is not None:
        epilogue *= 1.5
    waves = _waves(problem, config)
    adding = 0.0
    if config.splits > 1:
        adding = REDUCE_US + 8 * config.splits * problem.m * problem.n / _PARTS_BYTES
    if config.ranges > 1:
        adding = (config.ranges - 1) * math.ceil(waves) * _ENDED_US
    if config.tail_splits > 1:
        adding = config.tail_splits * _PART_US * config.BLOCK_M * width / (128 * 256)
        if not (config.pingpong and waves > 1):
            adding += _WAITING_US  # nothing overlaps the wait
    if config.tail_splits > 1 and waves > _FEW_WAVES and not streams(problem):
        loop *= _IRREGULAR
    if config.pingpong and waves > 1:
        busy = waves * max(loop, epilogue / 2) + epilogue
    elif config.pingpong:
        # The other consumer is idle, and one alone leaves gaps.
        busy = waves * 1.1 * loop + epilogue
    else:
        exposed = epilogue if config.consumers == 1 else _EXPOSED * epilogue
        busy = waves * loop + math.ceil(waves) * exposed
    # The closer the two times are, the less of the shorter one is hidden.
    memory = problem.bytes / Machine.of(problem.device).memory
    if streams(problem) and not config.evict_first:
        memory *= _DISPLACING
    if rows_ragged(problem) and _mean_rows(problem) <= _FEW_OF_GROUP:
        memory *= _FEW_PADDED
    # Zero-filling a box's missing rows blocks other loads.
    absent = max(0, c.a_boxes * c.A_ROWS - problem.m)
    filling = _FILLING_US * absent * depth * itemsize * math.ceil(waves)
    return _LAUNCH_US + adding + filling + math.sqrt(math.hypot(busy**2, memory**2))


def times_us(problem: Problem, config: WarpSpecializedConfig) -> dict[str, float]:
    """Return the times of the components of :func:`estimate_us` alone."""
    waves, (multiply, load) = _waves(problem, config), _tile_us(problem, config)
    memory = problem.bytes / Machine.of(problem.device).memory
    tiles = {"tensor cores": waves * multiply, "L2": waves * load}
    return {**tiles, "memory": memory, "launch": _LAUNCH_US}


def _waves(problem: Problem, config: WarpSpecializedConfig) -> float:
    """Tiles per SM; the last wave counts less if its tiles are split."""
    count, sms = tile_count(problem, config) * config.splits, Machine.of(problem.device).sms
    if config.tail_splits > 1:
        return count // sms + 1 / config.tail_splits
    return -(-count // sms)


def _tile_us(problem: Problem, config: WarpSpecializedConfig) -> tuple[float, float]:
    """µs to multiply a tile, or its part of K, and to load its operands from L2."""
    width, depth = _extent(problem, config)
    rate = Machine.of(problem.device).flops(problem) * _REACH
    columns: float = width
    if config.narrow and problem.b.layout == "row":
        columns *= max(1, _ROW_BYTES / (problem.b.dtype.itemsize * config.narrow))
    load = problem.a.dtype.itemsize * (config.BLOCK_M + columns) * depth / _SM_BYTES
    return 2 * config.BLOCK_M * width * depth / rate, load


def _extent(problem: Problem, config: WarpSpecializedConfig) -> tuple[int, int]:
    """Columns of ``b`` that a tile reads, and its part of K in whole stages."""
    width = config.BLOCK_N * (2 if problem.gated else 1)
    return width, steps(problem, config) * config.BLOCK_K


def streams(problem: Problem) -> bool:
    """Whether operands are loaded with ``evict_first``."""
    if problem.groups is not None:
        # If most groups have a single row of tiles, their part of b is read once.
        return rows_ragged(problem) and _mean_rows(problem) <= SURELY_STREAMED
    return problem.batch == 1 and min(problem.m, problem.n) <= _STREAMED


def _mean_rows(problem: Problem) -> int:
    return -(-problem.m // groups_present(problem))
