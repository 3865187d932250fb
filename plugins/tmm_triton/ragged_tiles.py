"""Groups of different sizes in ``triton.warp_specialized``: which tiles there are, and tensor maps
that end where a group does.

With ragged rows each block first counts the tile rows of all groups. It stores their running total
in its table in the workspace, where every role finds a tile's group by binary search. So blocks
visit existing tiles only, and their numbers of tiles differ by at most one. With a ragged K every
group has the same tiles but a different number of k-steps: an empty group has one, of zeros.
"""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from tmm_core import Problem
from tmm_core.triton import releases

barrier = releases.barrier

#: How each matrix is described: alone, as one of a stack, or clipped where groups end.
Kinds = dict[str, str]


def kinds(ragged: str | None, batched: bool) -> Kinds:
    """Return the kind of each matrix's tensor map."""
    if ragged is None:
        a = b = result = "stack" if batched else "matrix"
    elif ragged == "m":
        # Rows of a are independent. Rows of the next group in a box do no harm: their results are
        # not stored.
        a, b, result = "matrix", "stack", "clipped"
    else:
        a, b, result = "clipped", "clipped", "stack"
    return {"a": a, "b": b, "out": result, "residual": result}


def rows_ragged(problem: Problem) -> bool:
    return problem.groups is not None and problem.groups.ragged == "m"


@jit
def _sum(x, y):
    return x + y


@jit
def group_bounds(group, groups, TOTAL):
    """Where a group starts and ends, clamped so that a wrong ``offs`` gives no invalid address."""
    offs, _, count = groups
    group = gl.minimum(group, count - 1)
    start = gl.load(offs + (group - 1), mask=group > 0, other=0)
    end = gl.load(offs + group, mask=group >= 0, other=0)
    start = gl.minimum(gl.maximum(start, 0), TOTAL)
    return start, gl.minimum(gl.maximum(end, start), TOTAL)


@jit
def store_table(groups, M, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Store, for each group, the tile rows of the groups up to it; returns their number."""
    offs, table, count = groups
    THREADS: gl.constexpr = 32 * WARPS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    total = 0
    for first in range(0, count, THREADS):
        group = first + gl.arange(0, THREADS, layout=LAYOUT)
        known = group < count
        start = gl.load(offs + (group - 1), mask=known & (group > 0), other=0)
        end = gl.load(offs + group, mask=known, other=0)
        start = gl.minimum(gl.maximum(start, 0), M)
        end = gl.minimum(gl.maximum(end, start), M)
        tiles = gl.where(known, gl.cdiv(end - start, BLOCK), 0)
        gl.store(table + group, total + gl.associative_scan(tiles, 0, _sum), mask=known)
        total += gl.sum(tiles, axis=0)
    # All roles read the table; the first partition starts the others after this barrier.
    barrier()
    return total


@jit
def find_tile(tile_row, groups, M, BLOCK: gl.constexpr):
    """The group of a tile row, its first row in the result, and the group's end."""
    _, table, count = groups
    low = 0
    high = count - 1
    while low < high:
        middle = (low + high) // 2
        before = gl.load(table + middle) <= tile_row
        low = gl.where(before, middle + 1, low)
        high = gl.where(before, high, middle)
    before = gl.load(table + (low - 1), mask=low > 0, other=0)
    start, end = group_bounds(low, groups, M)
    return low, start + (tile_row - before) * BLOCK, end


@jit
def box_start(matrix, end, row, column, COL: gl.constexpr, KIND: gl.constexpr):
    """Where a box starts, in the order of its descriptor's dimensions. A clipped one ends at
    ``end`` (:func:`tmm_triton.hopper.operand_layout.clipped`)."""
    outer, inner = (column, row) if COL else (row, column)
    if KIND == "clipped":
        return 2**30, end, 2**30 - end + outer, inner
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return (matrix, outer, inner) if KIND == "stack" else (outer, inner)


@jit
def zero_beyond(out, groups, M, N, SCATTERED: gl.constexpr, WARPS: gl.constexpr):
    """Zero the rows of the result that are in no group; the blocks share these rows."""
    pointer, stride, index = out
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    ELEMENT: gl.constexpr = pointer.dtype.element_ty
    columns = gl.arange(0, 256 * WARPS, layout=LAYOUT)
    zeros = gl.zeros([256 * WARPS], ELEMENT, LAYOUT)
    _start, end = group_bounds(groups[2] - 1, groups, M)
    for row in range(end + gl.program_id(0), M, gl.num_programs(0)):
        start = row * stride
        if SCATTERED:
            start = gl.load(index + row) * stride
        for column in range(0, N, 256 * WARPS):
            at = column + columns
            gl.store(pointer + start + at, zeros, mask=at < N)
