"""Fills the stages of ``triton.warp_specialized``: the producer requests boxes from TMA, the loader
brings words through registers. The first stages are requested before the warps take their roles."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tmm_core.triton import releases
from tmm_triton.hopper.scheduler import (
    descriptor_index,
    next_stage,
    skip_stages,
    tile_at,
    unit_at,
    work_of,
)
from tmm_triton.ragged_tiles import box_start, group_bounds
from tmm_triton.unaligned_loads import box_of, box_rows, box_words

async_load = releases.async_load
barrier = releases.barrier
reinterpret = releases.reinterpret


@jit
def _load(
    a_desc, b_desc, strides, ring, barriers, sizes, tile, first, last, stage, phase,
    FRESH: gl.constexpr, PARTS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Request the tile's k-steps from ``first`` up to ``last``, each when its stage is free; if
    FRESH, no stage was used yet. Return the ring position after them. PARTS are the operands
    requested: ``"ab"``, or ``"b"`` and then, for the same stages, ``"a"``."""
    a_ring, b_ring = ring
    full, empty = barriers
    a_stride, b_stride = strides
    _, N, K, _, _, _ = sizes
    A_BOXES: gl.constexpr = C.a_boxes
    B_BOXES: gl.constexpr = C.b_boxes
    OF_A: gl.constexpr = 0 if C.WORDS == "a" else A_BOXES
    OF_B: gl.constexpr = 0 if C.WORDS == "b" else B_BOXES
    EACH: gl.constexpr = B_BOXES // C.products
    BYTES: gl.constexpr = C.IN_BYTES * (OF_A * C.A_ROWS + OF_B * C.box_columns) * C.BLOCK_K
    ASKED_A: gl.constexpr = 0 if PARTS == "b" else OF_A
    ASKED_B: gl.constexpr = 0 if PARTS == "a" else OF_B
    A_KIND: gl.constexpr = C.a_kind
    B_KIND: gl.constexpr = C.b_kind
    matrix, row, column, end, _corner = tile_at(tile, sizes, C)
    of_a = descriptor_index(matrix, a_stride, A_KIND)
    of_b = descriptor_index(matrix, b_stride, B_KIND)
    start = first * C.BLOCK_K
    stop = gl.minimum(last * C.BLOCK_K, K)
    if C.RAGGED == "k":
        begin, end = group_bounds(matrix, sizes[5], K)
        start = begin + first * C.BLOCK_K
        stop = begin + last * C.BLOCK_K
    for k in range(start, stop, C.BLOCK_K):
        if not FRESH:
            # A fresh barrier counts as having completed phase −1: the first round passes.
            mbarrier.wait(empty.index(stage), phase ^ 1)
        ready = full.index(stage)
        if PARTS != "a":
            # Whole boxes of both operands, including elements that TMA fills with zeros.
            mbarrier.expect(ready, BYTES)
        for part in gl.static_range(ASKED_A):
            where = box_start(of_a, end, row + part * C.rows, k, C.A_COL, A_KIND)
            slot = a_ring.index(stage * A_BOXES + part)
            if C.rows > C.A_ROWS:
                slot = slot.slice(0, C.A_ROWS, dim=1 if A_KIND == "stack" else 0)
            async_load(a_desc, where, ready, slot)
        for part in gl.static_range(ASKED_B):
            at = column + part // EACH * N + part % EACH * C.box_columns
            where = box_start(of_b, end, k, at, C.B_COL, B_KIND)
            slot = b_ring.index(stage * B_BOXES + (part + C.ahead) % B_BOXES)
            async_load(b_desc, where, ready, slot)
        stage, phase = next_stage(stage, phase, C)
    return stage, phase


@jit
def _primed(first, last, C: gl.constexpr):
    """The end of the k-steps of the block's first unit that are requested before the warps take
    their roles."""
    return gl.minimum(first + C.PRIMED, last)


@jit
def _first(sizes, C: gl.constexpr):
    """The k-steps that are requested before the warps take their roles, and their tile."""
    work = work_of(sizes, C)
    tile, first, last = unit_at(0, work, sizes, C)
    if C.tail_splits > 1 or C.RAGGED == "m":
        last = gl.where(work[0] > 0, last, first)  # a block may have nothing to do
    return tile, first, _primed(first, last, C)


@jit
def prime(
    a_desc, b_desc, strides, ring, barriers, sizes, PARTS: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Request the first k-steps: the warps take their roles while these are in flight."""
    tile, first, last = _first(sizes, C)
    stage = 0
    phase = 0
    _load(
        a_desc, b_desc, strides, ring, barriers, sizes, tile, first, last, stage, phase,
        True, PARTS, C,
    )  # fmt: skip


@jit
def prefetch(pointer, stride, strides, sizes, C: gl.constexpr):
    """Prefetch b's part of the first k-steps into L2. A prefetch returns no data, and L2 is
    coherent for all SMs. If the previous launch is still writing b, the loads after ``gdc_wait``
    read what it wrote."""
    _, N, K, _, _, _ = sizes
    tile, first, last = _first(sizes, C)
    matrix, _row, column, _end, _corner = tile_at(tile, sizes, C)
    # Rows of memory by pieces, one per k-step.
    LINES: gl.constexpr = C.box_columns if C.B_COL else C.BLOCK_K
    BOXES: gl.constexpr = C.b_boxes
    EACH: gl.constexpr = BOXES // C.products
    PIECES: gl.constexpr = C.pieces
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [C.num_warps, 1], [1, 0])
    line = gl.expand_dims(gl.arange(0, LINES, layout=gl.SliceLayout(1, LAYOUT)), 1)
    piece = gl.expand_dims(gl.arange(0, PIECES, layout=gl.SliceLayout(0, LAYOUT)), 0)
    step = first + piece
    end = 2 * N if C.GATED else N
    if C.BATCHED:
        pointer += matrix * strides[1]
    for part in gl.static_range(BOXES):
        at = column + part // EACH * N + part % EACH * C.box_columns
        if C.B_COL:
            outer = at + line
            inner = step * C.BLOCK_K
            count = gl.minimum(K - inner, C.BLOCK_K)
            inside = (outer < end) & (step < last)
        else:
            outer = step * C.BLOCK_K + line
            inner = at
            count = gl.minimum(end - inner, C.box_columns)
            inside = (outer < K) & (step < last)
        # A bulk prefetch has a granularity of 16 bytes, at which rows need not end.
        bytes = gl.where(inside, count * C.IN_BYTES // 16 * 16, 0)
        address = pointer + (outer.to(gl.int64) * stride + inner)
        gl.inline_asm_elementwise(
            """{ .reg .pred p; setp.gt.s32 p, $2, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }""",
            "=r,l,r", [address, bytes], gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@jit
def produce(loads, C: gl.constexpr):
    a_desc, b_desc, strides, ring, barriers, sizes = loads
    work = work_of(sizes, C)
    _, first, last = unit_at(0, work, sizes, C)
    primed = _primed(first, last, C) - first
    stage, phase = skip_stages(0, 0, primed, C)
    for unit in range(work[0]):
        tile, first, last = unit_at(unit, work, sizes, C)
        first += gl.where(unit == 0, primed, 0)
        stage, phase = _load(
            a_desc, b_desc, strides, ring, barriers, sizes, tile, first, last, stage, phase,
            False, "ab", C,
        )  # fmt: skip


@jit
def _put(
    words, rows, ring, barriers, stage, phase,
    BOX: gl.constexpr, ALONG_K: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Store a box when its stage is free; returns the ring position after it."""
    full, empty = barriers
    SLOT: gl.constexpr = [BOX[0], BOX[1] // 4]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * BOX[1]), 64, 2)
    box = box_of(words, rows, ALONG_K)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    reinterpret(ring.index(stage), gl.uint64, SLOT, LAYOUT).store(box)
    # All threads' stores come before the barrier, the barrier before the arrival.
    barrier()
    mbarrier.arrive(full.index(stage))
    return next_stage(stage, phase, C)


@jit
def bring_words(loads, C: gl.constexpr):
    """The loader: does the producer's work for the operand that TMA cannot read. One or two further
    k-steps are in flight while one is stored."""
    operand, ring, barriers, sizes = loads
    M, N, K, _, _, _ = sizes
    IS_A: gl.constexpr = C.WORDS == "a"
    ALONG_K: gl.constexpr = not C.A_COL if IS_A else C.B_COL
    BOX: gl.constexpr = C.a_box if IS_A else C.b_box
    work = work_of(sizes, C)
    stage = 0
    phase = 0
    for unit in range(work[0]):
        tile, first, last = unit_at(unit, work, sizes, C)
        _batch, row, column, _end, _corner = tile_at(tile, sizes, C)
        rows = box_rows(operand, row if IS_A else column, M if IS_A else N, K, BOX, ALONG_K, C)
        one = box_words(rows, first, last, K, ALONG_K, C)
        other = box_words(rows, first + 1, last, K, ALONG_K, C)
        for step in range(first, last, 2):
            stage, phase = _put(one, rows, ring, barriers, stage, phase, BOX, ALONG_K, C)
            one = box_words(rows, step + 2, last, K, ALONG_K, C)
            if step + 1 < last:
                stage, phase = _put(other, rows, ring, barriers, stage, phase, BOX, ALONG_K, C)
            other = box_words(rows, step + 3, last, K, ALONG_K, C)
