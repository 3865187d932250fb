"""Counts the Hopper kernel's tiles and their steps along K, and limits the parts of K into which a
config splits them.

Launched code depends on this module, and so does the kernel's version.
"""

from __future__ import annotations

from dataclasses import replace

from tmm_core import Problem
from tmm_triton.hopper.config import MOST_SPLITS, WarpSpecializedConfig
from tmm_triton.hopper.operand_layout import by_words, stored_by_pointers
from tmm_triton.partials import MOST_WORKSPACE
from tmm_triton.ragged_tiles import rows_ragged


def tile_count(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Tiles of the whole batch, or of all groups: an estimate if their rows differ."""
    across = -(-problem.n // config.BLOCK_N)
    if problem.groups is not None and not rows_ragged(problem):
        return problem.groups.count * tile_rows(problem, config) * across
    return problem.batch * tile_rows(problem, config) * across


def most_tiles(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Return the maximum of :func:`tile_count` over all sizes of groups."""
    if not rows_ragged(problem):
        return tile_count(problem, config)
    rows = problem.m // config.BLOCK_M + groups_present(problem)
    return rows * -(-problem.n // config.BLOCK_N)


def tile_rows(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Rows of tiles; an estimate for ragged ones: half of a group's last tile is empty."""
    if not rows_ragged(problem):
        return -(-problem.m // config.BLOCK_M)
    count = groups_present(problem)
    return max(count, problem.m // config.BLOCK_M + count // 2)


def groups_present(problem: Problem) -> int:
    """Number of groups that can be non-empty."""
    assert problem.groups is not None
    return max(1, min(problem.groups.count, problem.extent))


def steps(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Steps of a tile along K, or of its part of K; of a mean group if K is ragged."""
    k = problem.k
    if problem.groups is not None and problem.along == "k":
        k = -(-k // groups_present(problem))
    return -(-k // (config.BLOCK_K * config.splits))


def tail_tiles(problem: Problem, config: WarpSpecializedConfig) -> int:
    """The number of tiles that ``tail_splits`` splits, which come first. They are the tiles of an
    incomplete wave, rounded up to whole columns of tiles if rows of tiles overlap."""
    tail = tile_count(problem, config) % problem.device.sm_count
    rows = tile_rows(problem, config)
    return -(-tail // rows) * rows if _overlaps(problem.m, config.BLOCK_M) else tail


def _overlaps(size: int, block: int) -> bool:
    """Whether tiles along a dimension overlap."""
    return size > block and size % block != 0


def adapted(problem: Problem, config: WarpSpecializedConfig) -> WarpSpecializedConfig:
    """A config, perhaps of another M of the bucket, limited to the parts and ranges of K that this
    problem has SMs, k-steps and workspace for. Otherwise blocks would wait forever for a part that
    no block computes."""
    tail_splits = min(config.tail_splits, room_for_splits(problem, config))
    splits = min(config.splits, room_for_parts(problem, config))
    words = by_words(problem) == "b" and config.early in ("l2", "b")
    early = "wait" if words else config.early
    if problem.groups is not None:
        early = ""  # offs determines which k-steps are the first
    ranges = min(config.ranges, room_for_ranges(problem, config))
    return replace(config, tail_splits=tail_splits, splits=splits, ranges=ranges, early=early)


def room_for_splits(problem: Problem, config: WarpSpecializedConfig) -> int:
    """The maximum of ``tail_splits``: SMs per tile of the last wave. It is 1 if a row's sums must
    not depend on M, if tiles overlap, or if the host does not know how many there are."""
    tail = tail_tiles(problem, config)
    if not tail or problem.batch_invariant or problem.groups or not _alike(problem, config):
        return 1
    return max(1, problem.device.sm_count // tail)


def _alike(problem: Problem, config: WarpSpecializedConfig) -> bool:
    """Whether tiles that store the same elements are all split or all whole. Otherwise an element
    would depend on which tile stores last. The last row of tiles overlaps the previous one, and so
    does the last column. In one band of rows tiles are numbered by column, and the first are
    split."""
    if stored_by_pointers(problem):
        return True
    down = _overlaps(problem.m, config.BLOCK_M)
    across = _overlaps(problem.n, config.BLOCK_N)
    if not (down or across):
        return True
    rows = tile_rows(problem, config)
    if problem.batch > 1 or rows > config.GROUP_M:
        return False
    uncut = tile_count(problem, config) - tail_tiles(problem, config)
    return not across or uncut >= 2 * rows


def may_split(problem: Problem) -> bool:
    """Whether every tile may be split into parts: TMA writes them, and the reducing kernel can
    finish them."""
    single = problem.batch == 1 and problem.groups is None
    return single and not (problem.gated or problem.n % 4 or problem.epilogue.outputs)


def room_for_parts(problem: Problem, config: WarpSpecializedConfig) -> int:
    """The maximum number of parts per tile for the reducing kernel: limited by the workspace and by
    the k-steps."""
    if not may_split(problem):
        return 1
    steps = -(-problem.k // config.BLOCK_K)
    held = MOST_WORKSPACE // (4 * part_elements(problem, config))
    return max(1, min(steps, held, MOST_SPLITS))


def room_for_ranges(problem: Problem, config: WarpSpecializedConfig) -> int:
    """The maximum of ``ranges``: one for each k-step. Gated problems, 8-bit operands and groups
    have one, since more are not implemented for them."""
    if problem.gated or problem.native or problem.groups is not None:
        return 1
    return -(-problem.k // config.BLOCK_K)


def part_elements(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Workspace elements of one part of every tile; rows are padded to whole tiles for TMA."""
    return -(-problem.m // config.BLOCK_M) * config.BLOCK_M * problem.n
