"""The tile scheduler of ``triton.warp_specialized``: the tiles of a block, their k-steps, and the
ring stages of the steps. All roles of a block follow the same schedule."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from tmm_triton.ragged_tiles import find_tile, group_bounds
from tmm_triton.stream_k import own_share


@jit
def tile_at(index, sizes, C: gl.constexpr):
    """Return a tile's index in the batch, its group or its part of K; its first row and column; and
    the end of its matrix's rows. Also return where the tile would begin if it were not moved.

    Tiles are ordered matrix by matrix, each in bands of GROUP_M tile rows, column by column within
    a band, so that concurrent blocks share operands in L2. Tiles of ragged rows are ordered in
    bands of the rows of all groups.

    The last tiles are moved inside, because TMA takes longer to zero-fill elements than to load
    them. Elements that they share with the previous tiles are stored twice with the same bits, or
    once by pointers. Ragged rows are not moved, since another group may come before. Nor are
    columns, if blocks of b have scales or an output has groups: a tile then has whole blocks or
    groups."""
    M, N, _, GROUP_M, COUNT, groups = sizes
    rows = COUNT if C.RAGGED == "m" else gl.cdiv(M, C.BLOCK_M)
    matrix = 0
    if C.stacked or C.splits > 1:
        matrix = index // (rows * gl.cdiv(N, C.BLOCK_N))
        index -= matrix * (rows * gl.cdiv(N, C.BLOCK_N))
    band = GROUP_M * gl.cdiv(N, C.BLOCK_N)
    first = index // band * GROUP_M
    height = gl.minimum(rows - first, GROUP_M)
    within = index % band
    end = M
    if C.RAGGED == "m":
        height = gl.maximum(height, 1)  # also called by a block without tiles
        matrix, row, end = find_tile(first + within % height, groups, M, C.BLOCK_M)
    else:
        row = (first + within % height) * C.BLOCK_M
    column = within // height * C.BLOCK_N
    corner = (row, column)
    if C.RAGGED != "m":
        row = _inside(row, M, C.BLOCK_M, C.A_COL)
    if not (C.stepped or C.GROUP):
        column = _inside(column, N, C.BLOCK_N, not (C.B_COL and C.POINTERS))
    return matrix, row, column, end, corner


@jit
def _inside(start, size, BLOCK: gl.constexpr, CONTIGUOUS: gl.constexpr):
    """Where a block begins so that it ends inside, or exceeds the end by less than the alignment of
    a TMA box."""
    latest = size - BLOCK
    if CONTIGUOUS:
        latest = gl.cdiv(latest, 16) * 16
    return gl.maximum(gl.minimum(start, latest), 0)


@jit
def _tiles(sizes, C: gl.constexpr):
    M, N, _, _, COUNT, _ = sizes
    rows = COUNT if C.RAGGED == "m" else gl.cdiv(M, C.BLOCK_M)
    tiles = rows * gl.cdiv(N, C.BLOCK_N)
    return tiles * COUNT if C.stacked else tiles * C.splits


@jit
def work_of(sizes, C: gl.constexpr):
    """A block's work: the number of units and the k-steps of a whole tile. Also whether the first
    unit is part of a tile, which tile, and its first and last k-step."""
    steps = gl.cdiv(sizes[2], C.BLOCK_K)
    blocks = gl.num_programs(0)
    tiles = _tiles(sizes, C)
    cut = 0
    tile = 0
    first = 0
    last = steps
    if C.tail_splits > 1:
        TAIL = sizes[5]
        share = own_share()
        tile = share // C.tail_splits
        part = share % C.tail_splits
        cut = gl.where(tile < TAIL, 1, 0)
        first = steps * part // C.tail_splits
        last = steps * (part + 1) // C.tail_splits
        tiles -= TAIL
    units = cut + gl.cdiv(tiles - gl.program_id(0), blocks)
    return units, cut, tile, first, last, steps


@jit
def unit_at(index, work, sizes, C: gl.constexpr):
    """A tile and this block's k-steps of it."""
    _, cut, tile_cut, first_cut, last_cut, steps = work
    tile = gl.program_id(0) + index * gl.num_programs(0)
    first = 0
    last = steps
    if C.tail_splits > 1:
        is_cut = index < cut
        tile += sizes[5] - cut * gl.num_programs(0)
        tile = gl.where(is_cut, tile_cut, tile)
        first = gl.where(is_cut, first_cut, 0)
        last = gl.where(is_cut, last_cut, steps)
    if C.splits > 1:
        part = tile // (_tiles(sizes, C) // C.splits)
        first = steps * part // C.splits
        last = steps * (part + 1) // C.splits
    if C.RAGGED == "k":
        M, N, K, _, _, groups = sizes
        group = tile // (gl.cdiv(M, C.BLOCK_M) * gl.cdiv(N, C.BLOCK_N))
        start, end = group_bounds(group, groups, K)
        last = gl.maximum(gl.cdiv(end - start, C.BLOCK_K), 1)
    return tile, first, last


@jit
def descriptor_index(matrix, stride, KIND: gl.constexpr):
    """The matrix's index in its descriptor. TMA does not support a stride of zero, so the
    descriptor of a matrix that the whole batch shares holds only this matrix."""
    return gl.where(stride == 0, 0, matrix) if KIND == "stack" else matrix


@jit
def as_matrix(box, KIND: gl.constexpr):
    """A box in shared memory as a matrix, without further dimensions."""
    if KIND == "stack":
        box = box.reshape([box.shape[1], box.shape[2]])
    elif KIND == "clipped":
        box = box.reshape([box.shape[2], box.shape[3]])
    return box


@jit
def next_stage(stage, phase, C: gl.constexpr):
    """The ring position after this one; the phase flips where the ring starts over."""
    stage += 1
    wraps = stage == C.num_stages
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@jit
def skip_stages(stage, phase, steps, C: gl.constexpr):
    """The ring position ``steps`` further."""
    position = stage + steps
    return position % C.num_stages, phase ^ (position // C.num_stages & 1)
