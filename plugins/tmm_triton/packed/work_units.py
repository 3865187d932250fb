"""Device code that divides a product by packed weights among blocks, and steps among consumers.

A unit of work is a tile, or a part of one along K. Every warp of a block computes the same units,
and counts their steps over all units to find a step's stage.
"""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from tmm_triton.ragged_tiles import find_tile
from tmm_triton.stream_k import own_share, start_of_share


@jit
def stage_of(position, C: gl.constexpr):
    """The stage of a step, counted over all tiles of a block, and the phase of its barriers."""
    return position % C.num_stages, position // C.num_stages & 1


@jit
def next_stage(stage, phase, C: gl.constexpr):
    """The stage and phase of a consumer's next step, without a division, which would delay it."""
    stage += C.k_ways
    wraps = stage >= C.num_stages
    return gl.where(wraps, stage - C.num_stages, stage), gl.where(wraps, phase ^ 1, phase)


@jit
def rounds_of(first, last, C: gl.constexpr):
    """How many steps along K each of the consumers of the same columns takes. So a stage belongs
    to the same consumer in every tile. An mbarrier shows only the parity of its phase, so no warp
    may wait for a phase before the previous one has ended."""
    return gl.cdiv(last - first, C.k_ways)


@jit
def work_of(sizes, C: gl.constexpr):
    """A block's units of work, which are tiles or parts of them: the first, their end, and their
    distance. With stream-K also the number of whole tiles, and what the block has of the tiles that
    blocks share: its first tile, its first round and the end of its rounds."""
    _M, N, K, tile_rows, _groups = sizes
    tiles = tile_rows * gl.cdiv(N, C.BLOCK_N)
    blocks = gl.num_programs(0)
    if C.stream_k:
        # More than a tile for each block, so that at most two blocks share a tile.
        whole = tiles // blocks - 1
        rounds = _rounds_of_tile(K, C)
        total = (tiles - whole * blocks) * rounds
        begin = start_of_share(own_share(), total)
        end = start_of_share(own_share() + 1, total)
        tile = begin // rounds
        return 0, whole + gl.cdiv(end, rounds) - tile, 1, (whole, tile, begin, end)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return gl.program_id(0), tiles * C.splits, blocks, 0


@jit
def _rounds_of_tile(K, C: gl.constexpr):
    """How many times the consumers of the same columns take a step each in a tile. The last round
    also has the steps that remain."""
    return gl.cdiv(K, C.BLOCK_K) // C.k_ways


@jit
def range_of_k(unit, work, sizes, C: gl.constexpr):
    """The part of K to sum: its number, first step and end; and the index of the tile."""
    _M, N, K, tile_rows, _groups = sizes
    steps = gl.cdiv(K, C.BLOCK_K)
    if C.stream_k:
        whole, tile, begin, end = work[3]
        tile += unit - whole
        start = tile * _rounds_of_tile(K, C)
        is_shared = unit >= whole
        is_cut = is_shared & (end < start + _rounds_of_tile(K, C))
        first = gl.where(is_shared, gl.maximum(begin - start, 0) * C.k_ways, 0)
        last = gl.where(is_cut, (end - start) * C.k_ways, steps)
        of_block = gl.program_id(0) + unit * gl.num_programs(0)
        return 0, first, last, gl.where(is_shared, whole * gl.num_programs(0) + tile, of_block)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        tiles = tile_rows * gl.cdiv(N, C.BLOCK_N)
        part = unit // tiles
        return part, steps * part // C.splits, steps * (part + 1) // C.splits, unit - part * tiles


@jit
def unit_at(unit, work, sizes, C: gl.constexpr):
    """A tile's group, first row of ``a``, the end of its rows, and its first column; and the part
    of K. Neighbouring blocks read the same rows of the weight."""
    M, _N, _K, tile_rows, groups = sizes
    part, first, last, index = range_of_k(unit, work, sizes, C)
    group = 0
    row = index % tile_rows * C.BLOCK_M
    end = M
    if C.RAGGED:
        group, row, end = find_tile(index % tile_rows, groups, M, C.BLOCK_M)
    return (group, row, end, index // tile_rows * C.BLOCK_N), (part, first, last)
