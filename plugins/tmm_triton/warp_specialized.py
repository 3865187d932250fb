"""``triton.warp_specialized``: on Hopper one warp loads tiles by TMA, the others only multiply.

A kernel whose warps both load and multiply stops multiplying at the end of every tile, while it
rounds and stores. Here the block is persistent and its warps have roles:

* The producer, one warp with 24 registers per thread, walks all k-steps of all the block's tiles
and keeps a ring of ``num_stages`` shared-memory stages full. It never waits for an epilogue, only
for a free stage. The first few are requested before the warps take their roles, which costs 0.5 µs,
in which they arrive. With ``evict_first`` they are loaded with that hint
(``tmm_core.triton.evict_first``), which saves 2 to 4 µs if a weight is read by few rows. * If TMA
cannot read one operand, and few rows or columns multiply it, a loader of eight warps loads it
through registers (``tmm_triton.words``), and arrives at a stage like the producer. * Consumers,
warpgroups with up to 240 registers per thread, hold the accumulators and issue ``wgmma`` on full
stages. ``cooperative``: all share every tile, each owning some of its rows; they do not run in
lockstep, so one multiplies while another stores. ``pingpong``: two alternate on whole tiles, the
epilogue of one overlapping the main loop of the other; it wins for a short K (8192×4096×512 with
silu on an H200: 1.54 × eager cuBLAS, cooperative 1.25).

Two mbarriers per stage synchronize this. ``full`` flips when the stage's bytes have arrived,
``empty`` when every consumer has finished reading it. A wait sees only a parity, and would pass if
the barrier were two phases behind. The producer and cooperating consumers wait for every phase in
turn, so that cannot happen. A ping-pong consumer skips the other's k-steps: ``turn`` holds it until
the other has seen its last stage full, when all phases before its own are complete.

With ``tail_splits`` the tiles of an incomplete wave, here two of ten on four SMs, are split along K
into as many parts as there are SMs for, and come first::

    block 3  | tile 0, first half ◀┐ | tile 5              | tile 9              |
    block 2  | tile 0, second half ┘ | tile 4              | tile 8              |
    block 1  | tile 1, first half ◀┐ | tile 3              | tile 7              |
    block 0  | tile 1, second half ┘ | tile 2              | tile 6              |

The block with the first k-steps of a tile adds the parts that the others left in the workspace,
while its other consumers multiply. Splitting tiles at equal distances (stream-K) leaves no SM idle,
but then no two blocks need the same part of an operand at the same time: it took up to 20 % longer
on an H200. With ``splits``, for few tiles and a long K, every tile becomes that many tiles, each
with its own part of K; their sums go to a workspace, and a second kernel adds them up and finishes.

With ``early`` the launch overlaps the previous one (programmatic dependent launch): a block sets up
its barriers, waits for that launch to complete, and then requests its first k-steps. Before the
wait it may load those of the weight, if that is not being written (``static_weights``), or prefetch
them into L2, which is always safe.

A finished tile goes out strip by strip, through staging buffers and by TMA where that can
write it, else by pointers. The residual comes in by the same buffers before, under the main
loop: read by pointers when the tile was done, it doubled the time of 8192×4096×512. Of an output
beside the result each strip leaves a number a row in the workspace, and a second launch reduces
these. A batch is a third dimension of all tensor maps, and of the walk over tiles; groups of
different sizes are walked over and described by :mod:`tmm_triton.ragged_tiles`.

It is written in Gluon, where the author controls layouts, barriers and roles; plain Triton does not
specialise warps on Hopper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.language.nvidia.hopper.tma import (
    async_copy_global_to_shared,
    async_copy_shared_to_global,
    store_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tmm_core import ANY, Launcher, Operand, Problem, Supports, Traits
from tmm_core.triton import (
    Argument,
    Described,
    Step,
    device_function,
    launcher,
    pointer,
    port_function,
)
from tmm_triton import hopper_tiles, sums
from tmm_triton.counters import Counters
from tmm_triton.hopper_tiles import (
    ALIGNMENT,
    Constants,
    WarpSpecializedConfig,
    boxed,
    by_words,
    most_tiles,
    multiplied,
    part_elements,
    residual_by_tma,
    scattered,
)
from tmm_triton.kernel import FLOATS, Built, missing_toolchain, unknown_gluon
from tmm_triton.operands import Build
from tmm_triton.partials import reducing, reduction
from tmm_triton.ports import REDUCES, Ports
from tmm_triton.ragged_tiles import (
    MOST_ROWS,
    bounds,
    clipped,
    kinds_of,
    located,
    placed,
    rows_ragged,
    tabulated,
    zero_beyond,
)
from tmm_triton.words import box_of, box_rows, box_words

#: Gluon's names of the dtypes of operands, outputs, bias and residual.
_GLUON = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}


#: The barrier of all threads of a partition; Triton 3.7 renamed it.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@jit
def _acquire(flag):
    """A flag's value; later reads see everything written before it was set."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [flag], gl.int32, is_pure=False, pack=1
    )


@jit
def _tile(index, sizes, C: gl.constexpr):
    """A tile's index in the batch, its group or its part of K, its first row and column, and the
    end of its matrix's rows. Tiles go matrix by matrix, each in bands of GROUP_M tile rows walked
    column by column, so that concurrent blocks share operands in L2; those of ragged rows go in
    bands of the rows of all groups."""
    M, N, _, GROUP_M, COUNT, groups = sizes
    rows = COUNT if C.RAGGED == "m" else gl.cdiv(M, C.BLOCK_M)
    matrix = 0
    if C.stacked or C.SPLITS > 1:
        matrix = index // (rows * gl.cdiv(N, C.BLOCK_N))
        index -= matrix * (rows * gl.cdiv(N, C.BLOCK_N))
    band = GROUP_M * gl.cdiv(N, C.BLOCK_N)
    first = index // band * GROUP_M
    height = gl.minimum(rows - first, GROUP_M)
    within = index % band
    end = M
    if C.RAGGED == "m":
        height = gl.maximum(height, 1)  # also called by a block without tiles
        matrix, row, end = located(first + within % height, groups, M, C.BLOCK_M)
    else:
        row = (first + within % height) * C.BLOCK_M
    return matrix, row, within // height * C.BLOCK_N, end


@jit
def _moved(row, column, sizes, C: gl.constexpr):
    """Where a tile begins. The last ones are moved inside, because TMA takes longer to zero-fill
    elements than to load them. Elements that they then share with the previous ones are stored
    twice with the same bits, or once by pointers. Ragged rows are not moved, since another group
    may come before."""
    if C.RAGGED != "m":
        row = _inside(row, sizes[0], C.BLOCK_M, C.A_COL)
    column = _inside(column, sizes[1], C.BLOCK_N, not (C.B_COL and C.POINTERS))
    return row, column


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
    return tiles * COUNT if C.stacked else tiles * C.SPLITS


@jit
def _work(sizes, C: gl.constexpr):
    """A block's work: the number of units, whether the first is part of a tile, which tile, its
    first and last k-step, and the k-steps of a whole tile."""
    steps = gl.cdiv(sizes[2], C.BLOCK_K)
    blocks = gl.num_programs(0)
    tiles = _tiles(sizes, C)
    cut = 0
    tile = 0
    first = 0
    last = steps
    if C.TAIL_SPLITS > 1:
        TAIL = sizes[5]
        share = _share()
        tile = share // C.TAIL_SPLITS
        part = share % C.TAIL_SPLITS
        cut = gl.where(tile < TAIL, 1, 0)
        first = steps * part // C.TAIL_SPLITS
        last = steps * (part + 1) // C.TAIL_SPLITS
        tiles -= TAIL
    units = cut + gl.cdiv(tiles - gl.program_id(0), blocks)
    return units, cut, tile, first, last, steps


@jit
def _share():
    """The block's index among those that share tiles, counted from the last: a block then waits
    only for blocks started before it, which finish even if not all blocks fit at once."""
    return gl.num_programs(0) - 1 - gl.program_id(0)


@jit
def _unit(index, work, sizes, C: gl.constexpr):
    """A tile and this block's k-steps of it."""
    _, cut, tile_cut, first_cut, last_cut, steps = work
    tile = gl.program_id(0) + index * gl.num_programs(0)
    first = 0
    last = steps
    if C.TAIL_SPLITS > 1:
        is_cut = index < cut
        tile += sizes[5] - cut * gl.num_programs(0)
        tile = gl.where(is_cut, tile_cut, tile)
        first = gl.where(is_cut, first_cut, 0)
        last = gl.where(is_cut, last_cut, steps)
    if C.SPLITS > 1:
        part = tile // (_tiles(sizes, C) // C.SPLITS)
        first = steps * part // C.SPLITS
        last = steps * (part + 1) // C.SPLITS
    if C.RAGGED == "k":
        M, N, K, _, _, groups = sizes
        group = tile // (gl.cdiv(M, C.BLOCK_M) * gl.cdiv(N, C.BLOCK_N))
        start, end = bounds(group, groups, K)
        last = gl.maximum(gl.cdiv(end - start, C.BLOCK_K), 1)
    return tile, first, last


@jit
def _described(matrix, stride, KIND: gl.constexpr):
    """The matrix's index in its descriptor: TMA does not support a stride of zero, so a matrix
    shared by the whole batch is described alone."""
    return gl.where(stride == 0, 0, matrix) if KIND == "stack" else matrix


@jit
def _matrix(box, KIND: gl.constexpr):
    """A box in shared memory as a matrix, without further dimensions."""
    if KIND == "stack":
        box = box.reshape([box.shape[1], box.shape[2]])
    elif KIND == "clipped":
        box = box.reshape([box.shape[2], box.shape[3]])
    return box


@jit
def _next(stage, phase, C: gl.constexpr):
    """The ring position after this one; the phase flips where the ring starts over."""
    stage += 1
    wraps = stage == C.STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@jit
def _skip(stage, phase, steps, C: gl.constexpr):
    """The ring position ``steps`` further."""
    position = stage + steps
    return position % C.STAGES, phase ^ (position // C.STAGES & 1)


@jit
def _load(
    a_desc, b_desc, strides, ring, barriers, sizes, tile, first, last, stage, phase,
    FRESH: gl.constexpr, PARTS: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Request the tile's k-steps from ``first`` up to ``last``, each when its stage is free, or
    FRESH, when no stage was used yet; returns the ring position after them. PARTS are the operands
    requested: ``"ab"``, or ``"b"`` and then, for the same stages, ``"a"``."""
    a_ring, b_ring = ring
    full, empty = barriers
    a_stride, b_stride = strides
    _, N, K, _, _, _ = sizes
    A_BOXES: gl.constexpr = C.a_boxes
    B_BOXES: gl.constexpr = C.b_boxes
    OF_A: gl.constexpr = 0 if C.WORDS == "a" else A_BOXES
    OF_B: gl.constexpr = 0 if C.WORDS == "b" else B_BOXES
    BYTES: gl.constexpr = C.IN_BYTES * (OF_A * C.A_ROWS + OF_B * C.columns) * C.BLOCK_K
    ASKED_A: gl.constexpr = 0 if PARTS == "b" else OF_A
    ASKED_B: gl.constexpr = 0 if PARTS == "a" else OF_B
    A_KIND: gl.constexpr = C.a_kind
    B_KIND: gl.constexpr = C.b_kind
    matrix, row, column, end = _tile(tile, sizes, C)
    row, column = _moved(row, column, sizes, C)
    of_a = _described(matrix, a_stride, A_KIND)
    of_b = _described(matrix, b_stride, B_KIND)
    start = first * C.BLOCK_K
    stop = gl.minimum(last * C.BLOCK_K, K)
    if C.RAGGED == "k":
        begin, end = bounds(matrix, sizes[5], K)
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
            where = placed(of_a, end, row + part * C.ROWS, k, C.A_COL, A_KIND)
            slot = a_ring.index(stage * A_BOXES + part)
            if C.A_ROWS < C.ROWS:
                slot = slot.slice(0, C.A_ROWS, dim=1 if A_KIND == "stack" else 0)
            async_copy_global_to_shared(a_desc, where, ready, slot)
        for part in gl.static_range(ASKED_B):
            at = column + part * (C.columns if C.halves else N)
            where = placed(of_b, end, k, at, C.B_COL, B_KIND)
            slot = b_ring.index(stage * B_BOXES + part)
            async_copy_global_to_shared(b_desc, where, ready, slot)
        stage, phase = _next(stage, phase, C)
    return stage, phase


@jit
def _primed(first, last, C: gl.constexpr):
    """The end of the k-steps of the block's first unit that are requested before the warps take
    their roles."""
    return gl.minimum(first + C.PRIMED, last)


@jit
def _first(sizes, C: gl.constexpr):
    """The k-steps that are requested before the warps take their roles, and their tile."""
    work = _work(sizes, C)
    tile, first, last = _unit(0, work, sizes, C)
    if C.TAIL_SPLITS > 1 or C.RAGGED == "m":
        last = gl.where(work[0] > 0, last, first)  # a block may have nothing to do
    return tile, first, _primed(first, last, C)


@jit
def _prime(
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
def _prefetch(pointer, stride, strides, sizes, C: gl.constexpr):
    """Prefetch b's part of the first k-steps into L2. A prefetch returns no data, and L2 is
    coherent for all SMs: if the previous launch is still writing b, the loads after ``gdc_wait``
    read what it wrote."""
    _, N, K, _, _, _ = sizes
    tile, first, last = _first(sizes, C)
    matrix, row, column, _end = _tile(tile, sizes, C)
    row, column = _moved(row, column, sizes, C)
    # Rows of memory by pieces, one per k-step.
    LINES: gl.constexpr = C.columns if C.B_COL else C.BLOCK_K
    BOXES: gl.constexpr = C.b_boxes
    PIECES: gl.constexpr = C.pieces
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [C.WARPS, 1], [1, 0])
    line = gl.expand_dims(gl.arange(0, LINES, layout=gl.SliceLayout(1, LAYOUT)), 1)
    piece = gl.expand_dims(gl.arange(0, PIECES, layout=gl.SliceLayout(0, LAYOUT)), 0)
    step = first + piece
    end = 2 * N if C.GATED else N
    if C.BATCHED:
        pointer += matrix * strides[1]
    for part in gl.static_range(BOXES):
        at = column + part * (C.columns if C.halves else N)
        if C.B_COL:
            outer = at + line
            inner = step * C.BLOCK_K
            count = gl.minimum(K - inner, C.BLOCK_K)
            inside = (outer < end) & (step < last)
        else:
            outer = step * C.BLOCK_K + line
            inner = at
            count = gl.minimum(end - inner, C.columns)
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
def _produce(loads, C: gl.constexpr):
    a_desc, b_desc, strides, ring, barriers, sizes = loads
    work = _work(sizes, C)
    _, first, last = _unit(0, work, sizes, C)
    primed = _primed(first, last, C) - first
    stage, phase = _skip(0, 0, primed, C)
    for unit in range(work[0]):
        tile, first, last = _unit(unit, work, sizes, C)
        first += gl.where(unit == 0, primed, 0)
        stage, phase = _load(
            a_desc, b_desc, strides, ring, barriers, sizes, tile, first, last, stage, phase,
            False, "ab", C,
        )  # fmt: skip
    if C.DEPENDENTS == "last":
        gdc_launch_dependents()


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
    ring.index(stage)._reinterpret(gl.uint64, SLOT, LAYOUT).store(box)
    # All threads' stores come before the barrier, the barrier before the arrival.
    _barrier()
    mbarrier.arrive(full.index(stage))
    return _next(stage, phase, C)


@jit
def _bring(loads, C: gl.constexpr):
    """The loader: does the producer's work for the operand that TMA cannot read. One or two further
    k-steps are in flight while one is stored."""
    operand, ring, barriers, sizes = loads
    M, N, K, _, _, _ = sizes
    IS_A: gl.constexpr = C.WORDS == "a"
    ALONG_K: gl.constexpr = not C.A_COL if IS_A else C.B_COL
    BOX: gl.constexpr = C.a_box if IS_A else C.b_box
    work = _work(sizes, C)
    stage = 0
    phase = 0
    for unit in range(work[0]):
        tile, first, last = _unit(unit, work, sizes, C)
        _batch, row, column, _end = _tile(tile, sizes, C)
        row, column = _moved(row, column, sizes, C)
        rows = box_rows(operand, row if IS_A else column, M if IS_A else N, K, BOX, ALONG_K, C)
        one = box_words(rows, first, last, K, ALONG_K, C)
        other = box_words(rows, first + 1, last, K, ALONG_K, C)
        for step in range(first, last, 2):
            stage, phase = _put(one, rows, ring, barriers, stage, phase, BOX, ALONG_K, C)
            one = box_words(rows, step + 2, last, K, ALONG_K, C)
            if step + 1 < last:
                stage, phase = _put(other, rows, ring, barriers, stage, phase, BOX, ALONG_K, C)
            other = box_words(rows, step + 3, last, K, ALONG_K, C)


@jit
def _strips(x, STRIPS: gl.constexpr):
    """``x[M, N]`` as a tuple of [M, N / STRIPS]; every element stays in its register."""
    if STRIPS == 1:
        return (x,)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()
        return _strips(left, STRIPS // 2) + _strips(right, STRIPS // 2)


@jit
def _scaled(z, factors, matrix, row, column, M, end, LAYOUT: gl.constexpr, C: gl.constexpr):
    """``alpha · scale_a · scale_b · z``, each if the problem has it."""
    alpha, scale_a, scale_b = factors
    if C.a_kind == "stack" and C.SCALE_A == "row":
        scale_a += matrix * M
    if C.b_kind == "stack" and C.SCALE_B == "row":
        scale_b += matrix * end
    if C.SCALED:
        z = z * alpha
    if C.SCALE_A == "row":
        rows = row + gl.arange(0, z.shape[0], layout=gl.SliceLayout(1, LAYOUT))
        z = z * gl.expand_dims(gl.load(scale_a + rows, mask=rows < M, other=0.0), 1)
    elif C.SCALE_A == "tensor":
        z = z * gl.load(scale_a)
    if C.SCALE_B == "row":
        columns = column + gl.arange(0, z.shape[1], layout=gl.SliceLayout(0, LAYOUT))
        z = z * gl.expand_dims(gl.load(scale_b + columns, mask=columns < end, other=0.0), 0)
    elif C.SCALE_B == "tensor":
        z = z * gl.load(scale_b)
    return z


@jit
def _bias(bias, matrix, column, end, STRIPS: gl.constexpr, C: gl.constexpr):
    """The bias of STRIPS strips, one value per thread: each thread needs a quarter of all values,
    and gets them through shared memory when it reaches that strip."""
    pointer, stride, stride_z = bias
    if C.RAGGED is not None:
        pointer += matrix * stride_z
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [C.WARPS], [0])
    columns = column + gl.arange(0, C.width, layout=LAYOUT)
    strip = (gl.load(pointer + columns * stride, mask=columns < end, other=0.0),)
    if STRIPS == 1:
        return strip
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return strip + _bias(bias, matrix, column + C.width, end, STRIPS - 1, C)


@jit
def _with_bias(z, values, LAYOUT: gl.constexpr):
    values = gl.convert_layout(values, gl.SliceLayout(0, LAYOUT))
    return z + gl.expand_dims(values.to(gl.float32), 0)


@jit
def _residual(residual, matrix, row, column, sizes, C: gl.constexpr, LAYOUT: gl.constexpr):
    """A strip of the residual, by pointers."""
    pointer, stride_z, stride_m, stride_n = residual
    M, N, _, _, _, _ = sizes
    if C.stacked:
        pointer += matrix * stride_z
    rows = row + gl.arange(0, C.ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, C.width, layout=gl.SliceLayout(0, LAYOUT))
    down = gl.expand_dims(rows * stride_m, 1)
    across = gl.expand_dims(columns * stride_n, 0)
    inside = gl.expand_dims(rows < M, 1) & gl.expand_dims(columns < N, 0)
    return gl.load(pointer + down + across, mask=inside, other=0.0)


@jit
def _fetch(staged, strip, matrix, row, column, end, WHO: gl.constexpr, C: gl.constexpr):
    """Request a strip of the residual, once the last store from its buffer has read it."""
    r_desc, stride, staging, loaded = staged
    BUFFERS: gl.constexpr = C.buffers
    BYTES: gl.constexpr = C.ROWS * C.width * C.OUT_BYTES
    KIND: gl.constexpr = C.out_kind
    slot = WHO * BUFFERS + strip % BUFFERS
    ready = loaded.index(slot)
    mbarrier.expect(ready, BYTES)
    of_r = _described(matrix, stride, KIND)
    where = placed(of_r, end, row, column + strip * C.width, False, KIND)
    async_copy_global_to_shared(r_desc, where, ready, staging.index(slot))


@jit
def _weighted(y, weights, row, end, LAYOUT: gl.constexpr):
    """``y``, each row times its weight."""
    rows = row + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    weight = gl.load(weights + rows, mask=rows < end, other=0.0).to(gl.float32)
    return y * gl.expand_dims(weight, 1)


@jit
def _scatter(z, matrix, row, column, corner, target, sizes, C: gl.constexpr):
    """Store by pointers: rows that are scattered, or unaligned, which allows no access wider than
    an element."""
    pointer, strides, index = target
    stride_z, stride = strides
    M, N, _, _, _, _ = sizes
    if C.stacked:
        pointer += matrix * stride_z
    ACROSS: gl.constexpr = min(32, z.shape[1] // C.STORED)
    # A warp's lanes are side by side in one row, so that each of its stores is contiguous.
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, C.STORED], [32 // ACROSS, ACROSS], [C.WARPS, 1], [1, 0]
    )
    z = gl.convert_layout(z.to(pointer.dtype.element_ty), LAYOUT)
    rows = row + gl.arange(0, z.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, z.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    # Elements of the previous tile are not stored again: if one tile is split, sums may differ.
    own_rows = (rows >= corner[0]) & (rows < M)
    own_columns = (columns >= corner[1]) & (columns < N)
    inside = gl.expand_dims(own_rows, 1) & gl.expand_dims(own_columns, 0)
    across = gl.expand_dims(columns, 0)
    if C.SCATTERED:
        rows = gl.load(index + rows, mask=own_rows, other=0)
    gl.store(pointer + gl.expand_dims(rows * stride, 1) + across, z, mask=inside)


@jit
def _reduce_rows(
    y, strip, row, column, corner, port, sizes, LAYOUT: gl.constexpr, OF: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Leave what a strip's columns come to in each row, for ``ports.reduce_port_kernel``: nothing
    that the tile before has counted, where this one was moved."""
    pointer, start, stride = port
    M, N, _, _, _, _ = sizes
    rows = row + gl.arange(0, C.ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, C.width, layout=gl.SliceLayout(0, LAYOUT))
    own = gl.expand_dims((columns >= corner[1]) & (columns < N), 0)
    if C.REDUCE == "max":
        terms = gl.where(own, OF(y), float("-inf"))
        undefined = terms != terms
        most = gl.max(gl.where(undefined, float("-inf"), terms), axis=1)
        total = gl.where(gl.max(undefined.to(gl.int32), axis=1) > 0, float("nan"), most)
    else:
        total = gl.sum(gl.where(own, OF(y), 0.0), axis=1)
    part = corner[1] // C.BLOCK_N * C.SUBTILES + strip
    inside = (rows >= corner[0]) & (rows < M)
    gl.store(pointer + (start + part * stride) + rows, total, mask=inside)


@jit
def _store(
    z, up, bias, matrix, row, column, corner, phase, target, sizes,
    EPILOGUE: gl.constexpr, OF: gl.constexpr, WHO: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Finish the fp32 accumulator (two, gate and up, where gated), round it and send it off
    strip by strip, through one or two staging buffers."""
    destination, _, residual, factors, port, weights = target
    M, N, _, _, _, _ = sizes
    SUBTILES: gl.constexpr = C.SUBTILES
    WIDTH: gl.constexpr = C.width
    KIND: gl.constexpr = C.out_kind
    BUFFERS: gl.constexpr = C.buffers
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[C.WARPS, 1], instr_shape=[16, WIDTH, 16]
    )
    if C.halves:
        strips = _strips(z, SUBTILES // 2) + _strips(up, SUBTILES // 2)
    else:
        strips = _strips(z, SUBTILES)
    if C.GATED:
        up_strips = _strips(up, SUBTILES)
    for i in gl.static_range(SUBTILES):
        at = column + i * WIDTH
        x = gl.convert_layout(strips[i], LAYOUT)
        x = _scaled(x, factors, matrix, row, at, M, 2 * N if C.GATED else N, LAYOUT, C)
        if C.BIAS:
            x = _with_bias(x, bias[i], LAYOUT)
        if C.GATED:
            y = gl.convert_layout(up_strips[i], LAYOUT)
            y = _scaled(y, factors, matrix, row, at + N, M, 2 * N, LAYOUT, C)
            if C.BIAS:
                y = _with_bias(y, bias[SUBTILES + i], LAYOUT)
            x = EPILOGUE(x, y)
        else:
            x = EPILOGUE(x)
        if C.WEIGHTED:
            x = _weighted(x, weights, row, M, LAYOUT)
        if C.RESIDUAL and not C.FETCH:
            x = x + _residual(residual, matrix, row, at, sizes, C, LAYOUT).to(gl.float32)
        if C.REDUCE is not None and not C.FETCH:
            _reduce_rows(x, i, row, at, corner, port, sizes, LAYOUT, OF, C)
        if C.POINTERS:
            _scatter(x, matrix, row, at, corner, destination, sizes, C)
        else:
            c_desc, staging, _ = destination
            slot = WHO * BUFFERS + i % BUFFERS
            buffer = _matrix(staging.index(slot), KIND)
            if C.FETCH:
                if i > 0 and i - 1 + BUFFERS < SUBTILES:
                    store_wait(0)
                    _fetch(residual, i - 1 + BUFFERS, matrix, row, column, M, WHO, C)
                loaded = residual[3]
                mbarrier.wait(loaded.index(slot), phase ^ (i // BUFFERS & 1))
                x = x + buffer.load(LAYOUT).to(gl.float32)
                if C.REDUCE is not None:
                    _reduce_rows(x, i, row, at, corner, port, sizes, LAYOUT, OF, C)
            else:
                # The store that last used this buffer has read it.
                store_wait(BUFFERS - 1)
            buffer.store(x.to(c_desc.dtype))
            fence_async_shared()
            where = placed(matrix, M, row, at, False, KIND)
            async_copy_shared_to_global(c_desc, where, staging.index(slot))


@jit
def _promoted(a, b, acc):
    """Sums of 8-bit floats have about 14 bits in the tensor cores: this waits for the sums of one
    stage and adds them in fp32 while the other consumers multiply. Even the first is added, to
    zeros: used directly, ptxas moved it around and waited after every wgmma of large tiles."""
    part = warpgroup_mma(a, b, acc, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=(part,))
    return acc + part


@jit
def _await_full(full, stage, phase, C: gl.constexpr):
    """Wait until a stage's operands have arrived and are visible to ``wgmma``."""
    mbarrier.wait(full.index(stage), phase)
    if C.WORDS is not None:
        # Here, not at the stores: the fence waits for all of a thread's loads, and the loader has
        # those of the next k-steps in flight.
        fence_async_shared()


@jit
def _multiply(ring, stage, acc, up, FIRST: gl.constexpr, WHO: gl.constexpr, C: gl.constexpr):
    """Start this stage's products and wait for those of the previous stage."""
    a_ring, b_ring = ring
    A_KIND: gl.constexpr = C.a_kind
    B_KIND: gl.constexpr = C.b_kind
    a = _matrix(a_ring.index(stage * C.a_boxes + WHO % C.a_boxes), A_KIND)
    b = _matrix(b_ring.index(stage * C.b_boxes), B_KIND)
    if C.A_COL:
        a = a.permute((1, 0))
    if C.B_COL:
        b = b.permute((1, 0))
    if C.promoted:
        acc = _promoted(a, b, acc)
        if C.b_boxes == 2:
            b = _matrix(b_ring.index(stage * C.b_boxes + 1), B_KIND).permute((1, 0))
            up = _promoted(a, b, up)
        return acc, up
    # Not accumulating the first time saves clearing the registers.
    acc = warpgroup_mma(a, b, acc, use_acc=not FIRST, is_async=True)
    if C.GATED:
        b = _matrix(b_ring.index(stage * C.b_boxes + 1), B_KIND)
        if C.B_COL:
            b = b.permute((1, 0))
        up = warpgroup_mma(a, b, up, use_acc=not FIRST, is_async=True)
        acc, up = warpgroup_mma_wait(2, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(1, deps=(acc,))
    return acc, up


@jit
def _pass_by(unit, stage, phase, work, sizes, C: gl.constexpr):
    """The ring position after the other consumer's unit."""
    _, first, last = _unit(unit, work, sizes, C)
    return _skip(stage, phase, last - first, C)


@jit
def _part(parts, share, product, WHO: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Addresses in the workspace of the consumer's rows of a share's part: register by register,
    with each register of all threads contiguous. Row by row, a warp's access used 4 of every 32
    bytes that it moved, and a part of 128×128 elements took 17 µs."""
    SIZE: gl.constexpr = C.ROWS * C.columns
    THREADS: gl.constexpr = 32 * C.WARPS
    start = ((share * C.a_boxes + WHO % C.a_boxes) * C.b_boxes + product) * SIZE
    # In wgmma's accumulators a thread has pairs of neighbours, in every eighth row and column.
    row = gl.arange(0, C.ROWS, layout=gl.SliceLayout(1, LAYOUT))
    thread = row % 8 * 4 + row // 16 % C.WARPS * 32
    register = row // 8 % 2 * 2 + row // (16 * C.WARPS) * (C.columns // 2)
    down = gl.expand_dims(thread + register * THREADS, 1)
    column = gl.arange(0, C.columns, layout=gl.SliceLayout(0, LAYOUT))
    register = column % 2 + column // 8 * 4
    return parts[0] + start + down + gl.expand_dims(column // 2 % 4 + register * THREADS, 0)


@jit
def _flag(parts, share, WHO: gl.constexpr, C: gl.constexpr):
    return parts[1] + share * C.a_boxes + WHO % C.a_boxes


@jit
def _leave(acc, up, parts, WHO: gl.constexpr, C: gl.constexpr):
    """Store the sum over a part of a tile for the block with its first k-steps."""
    LAYOUT: gl.constexpr = acc.type.layout
    gl.store(_part(parts, _share(), 0, WHO, C, LAYOUT), acc)
    if C.b_boxes == 2:
        gl.store(_part(parts, _share(), 1, WHO, C, LAYOUT), up)
    # All threads' stores come before the barrier, the barrier before the release.
    _barrier()
    gl.atomic_xchg(_flag(parts, _share(), WHO, C), 1, sem="release")


@jit
def _completed(acc, up, parts, WHO: gl.constexpr, C: gl.constexpr):
    """The sums over all of K: adds the other blocks' parts of this tile, in the order of K."""
    LAYOUT: gl.constexpr = acc.type.layout
    for part in range(1, C.TAIL_SPLITS):
        flag = _flag(parts, _share() + part, WHO, C)
        while _acquire(flag) == 0:
            pass
        # Written by other SMs: bypass this one's L1.
        acc += gl.load(_part(parts, _share() + part, 0, WHO, C, LAYOUT), cache_modifier=".cg")
        if C.b_boxes == 2:
            up += gl.load(_part(parts, _share() + part, 1, WHO, C, LAYOUT), cache_modifier=".cg")
        # Zero for the next launch, once every thread has seen it set.
        _barrier()
        gl.store(flag, 0)
    return acc, up


@jit
def _consume(
    sums, EPILOGUE: gl.constexpr, OF: gl.constexpr, WHO: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    ring, barriers, turn, target, parts, sizes = sums
    full, empty = barriers
    N = sizes[1]
    ROWS: gl.constexpr = C.ROWS
    COLUMNS: gl.constexpr = C.columns
    BUFFERS: gl.constexpr = C.buffers
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[C.WARPS, 1],
        instr_shape=[16, C.mma_n, 32 // C.IN_BYTES],
    )
    stage = 0
    phase = 0
    turn_phase = 1 - WHO
    strip_phase = 0
    work = _work(sizes, C)
    if C.PINGPONG and WHO == 1:
        stage, phase = _pass_by(0, stage, phase, work, sizes, C)
    for unit in range(WHO if C.PINGPONG else 0, work[0], 2 if C.PINGPONG else 1):
        tile, first, last = _unit(unit, work, sizes, C)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
        up = acc
        if C.PINGPONG:
            mbarrier.wait(turn.index(WHO), turn_phase)
            turn_phase ^= 1
        _await_full(full, stage, phase, C)
        acc, up = _multiply(ring, stage, acc, up, True, WHO, C)
        reading = stage
        stage, phase = _next(stage, phase, C)
        # Divisions, and a wait for stores, overlap the first products.
        matrix, row, column, end = _tile(tile, sizes, C)
        limits = sizes
        if C.RAGGED == "m":
            limits = (end, N, sizes[2], sizes[3], sizes[4], sizes[5])
        corner = (row, column)
        row, column = _moved(row, column, sizes, C)
        if not C.PINGPONG:
            row += WHO * ROWS
        if C.FETCH:  # noqa: SIM102 (decided when compiling, the other when running)
            if (row < end) & (first == 0):
                store_wait(0)
                for i in gl.static_range(BUFFERS):
                    _fetch(target[2], i, matrix, row, column, end, WHO, C)
        for _ in range(first + 1, last):
            _await_full(full, stage, phase, C)
            acc, up = _multiply(ring, stage, acc, up, False, WHO, C)
            mbarrier.arrive(empty.index(reading))
            reading = stage
            stage, phase = _next(stage, phase, C)
        if C.PINGPONG:
            mbarrier.arrive(turn.index(1 - WHO))
            stage, phase = _pass_by(unit + 1, stage, phase, work, sizes, C)
        bias = target[1]
        if C.BIAS:
            bias = _bias(target[1], matrix, column, N, C.SUBTILES, C)
            if C.GATED:
                bias = bias + _bias(target[1], matrix, N + column, 2 * N, C.SUBTILES, C)
        if C.GATED:
            acc, up = warpgroup_mma_wait(0, deps=(acc, up))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(reading))
        # A consumer's rows may all be outside. The branch also keeps the compiler from hoisting the
        # code after it, which delayed the last stage by half an epilogue.
        if row < end:
            if C.TAIL_SPLITS > 1 and first > 0:
                _leave(acc, up, parts, WHO, C)
            else:
                if C.TAIL_SPLITS > 1 and last < work[5]:
                    acc, up = _completed(acc, up, parts, WHO, C)
                if C.SPLITS > 1:
                    row += matrix * gl.cdiv(sizes[0], C.BLOCK_M) * C.BLOCK_M
                _store(
                    acc, up, bias, matrix, row, column, corner, strip_phase, target, limits,
                    EPILOGUE, OF, WHO, C,
                )  # fmt: skip
                if C.buffers == C.SUBTILES:
                    strip_phase ^= 1
    store_wait(0)


@jit
def _ring(operand, SLOTS: gl.constexpr, BY_WORDS: gl.constexpr):
    """Shared memory for an operand's boxes."""
    if BY_WORDS:
        ELEMENT: gl.constexpr = operand.dtype.element_ty
        LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SLOTS[1:], ELEMENT)
        return gl.allocate_shared_memory(ELEMENT, SLOTS, LAYOUT)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return gl.allocate_shared_memory(operand.dtype, SLOTS, operand.layout)


@jit
def _kernel(
    a_desc, b_desc, c_desc, r_desc, M, N, K, GROUP_M, BATCH, a_stride_z, b_stride_z,
    out_ptr, out_stride_z, out_stride, bias_ptr, bias_stride,
    residual_ptr, residual_stride_z, residual_stride_m, residual_stride_n,
    alpha, scale_a_ptr, scale_b_ptr, parts_ptr, flags_ptr, TAIL, words_ptr, words_stride,
    ahead_ptr, ahead_stride, port_ptr, port_at, port_stride,
    offs_ptr, table_ptr, G, bias_stride_z, out_index_ptr, out_weights_ptr,
    EPILOGUE: gl.constexpr, OF: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = C.STAGES
    # Lists are added because Triton does not parse a starred element.
    a_slots: gl.constexpr = [STAGES * C.a_boxes] + C.a_box  # noqa: RUF005
    b_slots: gl.constexpr = [STAGES * C.b_boxes] + C.b_box  # noqa: RUF005
    a_ring = _ring(words_ptr if C.WORDS == "a" else a_desc, a_slots, C.WORDS == "a")
    b_ring = _ring(words_ptr if C.WORDS == "b" else b_desc, b_slots, C.WORDS == "b")
    if C.POINTERS:
        destination = (out_ptr, (out_stride_z, out_stride), out_index_ptr)
    else:
        c_slots: gl.constexpr = [C.CONSUMERS * C.buffers] + c_desc.block_shape  # noqa: RUF005
        staging = gl.allocate_shared_memory(c_desc.dtype, c_slots, c_desc.layout)
        destination = (c_desc, staging, out_index_ptr)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=C.arrivals)
    ring = (a_ring, b_ring)
    barriers = (full, empty)
    strides = (a_stride_z, b_stride_z)
    # Groups take the place of a batch, and of split tiles, which they do not have.
    sizes = (M, N, K, GROUP_M, BATCH, TAIL)
    if C.EARLY == "b":
        _prime(a_desc, b_desc, strides, ring, barriers, sizes, "b", C)
    elif C.EARLY == "l2":
        _prefetch(ahead_ptr, ahead_stride, strides, sizes, C)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=C.a_boxes)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    if C.FETCH:
        STRIPS: gl.constexpr = C.CONSUMERS * C.buffers
        loaded = gl.allocate_shared_memory(gl.int64, [STRIPS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STRIPS):
            mbarrier.init(loaded.index(i), count=1)
        residual = (r_desc, residual_stride_z, staging, loaded)
    else:
        residual = (residual_ptr, residual_stride_z, residual_stride_m, residual_stride_n)
    if C.overlaps:
        # The previous launch may run until here, and may write what this one reads, read what it
        # writes, or use the same flags and workspace. Nothing above touches memory that may be
        # written, except b if the caller promises that it is not. All threads of the first
        # partition wait, and it then starts the others through a barrier of the block: so no role
        # loads, stores or reads a flag before all earlier launches are complete. Every block waits,
        # so that this grid ends after the previous one: waiting for this one is waiting for all.
        gdc_wait()
    if C.RAGGED == "m":
        groups = (offs_ptr, table_ptr + gl.program_id(0) * G, G)
        sizes = (M, N, K, GROUP_M, tabulated(groups, M, C.BLOCK_M, C.WARPS), groups)
    elif C.RAGGED == "k":
        sizes = (M, N, K, GROUP_M, G, (offs_ptr, table_ptr, G))
    _prime(a_desc, b_desc, strides, ring, barriers, sizes, "a" if C.EARLY == "b" else "ab", C)
    if C.DEPENDENTS == "first":
        # The next launch's blocks then start as SMs become free. After the wait: the next launch's
        # early part must not overlap the previous launch.
        gdc_launch_dependents()
    if C.ZEROED:
        out = (out_ptr, out_stride, out_index_ptr)
        zero_beyond(out, sizes[5], M, N, C.SCATTERED, C.WARPS)
    bias = (bias_ptr, bias_stride, bias_stride_z)
    factors = (alpha, scale_a_ptr, scale_b_ptr)
    port = (port_ptr, port_at, port_stride)
    target = (destination, bias, residual, factors, port, out_weights_ptr)
    parts = (parts_ptr, flags_ptr)
    loads = (a_desc, b_desc, strides, ring, barriers, sizes)
    sums = (ring, barriers, turn, target, parts, sizes)
    bring = ((words_ptr, words_stride), a_ring if C.WORDS == "a" else b_ring, barriers, sizes)
    # Triton accepts the roles only as a list in the call.
    if C.CONSUMERS == 1 and C.WORDS is None:
        gl.warp_specialize(
            [(_consume, (sums, EPILOGUE, OF, 0, C)), (_produce, (loads, C))],
            C.worker_warps,
            C.worker_registers,
        )
    elif C.CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (sums, EPILOGUE, OF, 0, C)),
                (_produce, (loads, C)),
                (_bring, (bring, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    elif C.CONSUMERS == 2 and C.WORDS is None:
        gl.warp_specialize(
            [
                (_consume, (sums, EPILOGUE, OF, 0, C)),
                (_consume, (sums, EPILOGUE, OF, 1, C)),
                (_produce, (loads, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    elif C.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (sums, EPILOGUE, OF, 0, C)),
                (_consume, (sums, EPILOGUE, OF, 1, C)),
                (_produce, (loads, C)),
                (_bring, (bring, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (sums, EPILOGUE, OF, 0, C)),
                (_consume, (sums, EPILOGUE, OF, 1, C)),
                (_consume, (sums, EPILOGUE, OF, 2, C)),
                (_produce, (loads, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )


class WarpSpecialized(Built[WarpSpecializedConfig]):
    """Persistent TMA + ``wgmma`` with specialised warps, for 16-bit operands on Hopper."""

    name = "triton.warp_specialized"
    # A row's sums are formed in the order of k in any tile.
    traits = Traits(
        deterministic=True, batch_invariant=True, capture_safe=True, needs_workspace=True
    )
    config_type = WarpSpecializedConfig
    #: When a launch with ``early`` lets the next one begin; see ``benchmarks/pdl_decode.py``.
    dependents = "first"

    supports = Supports(
        devices=("cuda",),
        capability=(9, 0),
        below=(9, 1),
        operands=(torch.float16, torch.bfloat16),
        formats=("fp8",),
        scales=("tensor", "row"),
        out=FLOATS,
        bias=FLOATS,
        residual=FLOATS,
        layouts={"a": ("row", "col"), "b": ("row", "col"), "out": ("row",), "residual": ANY},
        unaligned=ANY,  # one operand by words: see declines
        wide=True,
        batch=None,
        alpha=True,
        epilogues=True,
        gated=True,
        outputs=("row",),
        reduces=REDUCES,
        ragged=("m", "k"),
        indexed=True,
        zeroed=True,
    )

    def declines(self, problem: Problem) -> Iterable[str]:
        if len(problem.epilogue.outputs) > 1:
            yield "writes at most one output beside the result"
        if problem.device.interpreted:
            yield "Triton's interpreter does not run Gluon"
        else:
            yield from missing_toolchain()
        yield from unknown_gluon()
        if problem.fp8 and (problem.a.layout, problem.b.layout) != ("row", "col"):
            yield "wgmma takes 8-bit operands along K only: a row-major, b column-major"
        for name, operand in (("a", problem.a), ("b", problem.b)):
            if not operand.aligned and (problem.fp8 or not by_words(problem)):
                yield f"{name} is not aligned to {ALIGNMENT} bytes (TMA)"
        if problem.gated and problem.b.layout == "row" and 2 * problem.n % ALIGNMENT:
            yield f"the up half of b is not aligned to {ALIGNMENT} bytes (TMA)"
        if problem.groups is not None:
            if problem.along == "k" and (problem.a.layout, problem.b.layout) != ("col", "row"):
                yield "groups along K begin and end at rows of memory: a column-major, b row-major"
            if problem.along == "m" and problem.a.layout != "row":
                yield f"groups along M begin anywhere, TMA at {ALIGNMENT} bytes: a row-major"
            if problem.groups.a_index is not None:
                yield "TMA does not gather rows on Hopper (triton.gathered copies them before)"
            if scattered(problem) and problem.residual is not None:
                yield "rows of the result are scattered, and the residual's with them"
            if problem.extent > MOST_ROWS:
                yield f"more than {MOST_ROWS} rows of groups (TMA)"

    def arithmetic(self, problem: Problem, config: WarpSpecializedConfig) -> str | None:
        if config.tail_splits > 1:
            return None  # M decides which tiles are split
        if problem.groups is not None and problem.along == "k":
            # The sizes of the other groups decide how a range of K is summed.
            return None
        if hopper_tiles.adapted(problem, config).splits != config.splits:
            return None  # with this M there is no room for all parts
        if any(port.reduce == "sum" for port in problem.epilogue.outputs):
            return super().arithmetic(problem, config)  # strip by strip
        if problem.fp8:
            # Each step's products are summed separately.
            return f"sm90-k32/promoted{config.BLOCK_K}" if config.splits == 1 else None
        return sums.summed(problem, config.splits, config.BLOCK_K)

    def configs(self, problem: Problem) -> Iterable[WarpSpecializedConfig]:
        return hopper_tiles.configs(problem)

    def default_config(self, problem: Problem) -> WarpSpecializedConfig:
        return next(iter(self.configs(problem)))

    def estimate_us(self, problem: Problem, config: WarpSpecializedConfig) -> float:
        return hopper_tiles.estimate_us(problem, config)

    def workspace_bytes(self, problem: Problem, config: WarpSpecializedConfig) -> int:
        config = hopper_tiles.adapted(problem, config)
        if problem.groups is not None:
            # Each block's table.
            table = _blocks(problem, config) * problem.groups.count
            return 4 * table if rows_ragged(problem) else 0
        return 4 * (_parts(problem, config) + _ports(problem, config).workspace())

    def specialize(self, problem: Problem, config: WarpSpecializedConfig) -> Specialization:
        """The specialization that :meth:`bind` compiles; also for an absent GPU."""
        problem = multiplied(problem, config)
        rows, width, batched = config.rows, config.BLOCK_N // config.subtiles, problem.batch > 1
        groups, kinds = problem.groups, kinds_of(problem)
        specialized = Constants.of(problem, config, self.version, self.dependents)
        types = {
            "a_desc": _descriptor_type(problem.a, specialized.A_ROWS, config.BLOCK_K, kinds["a"]),
            "b_desc": _descriptor_type(problem.b, config.BLOCK_K, specialized.columns, kinds["b"]),
            "M": "i32",
            "N": "i32",
            "K": "i32",
            # Not a constant: tuning it compiles nothing.
            "GROUP_M": "i32",
        }
        if batched:
            types |= {"BATCH": "i32", "a_stride_z": "i64", "b_stride_z": "i64"}
        if groups is not None:
            types |= {"offs_ptr": "*i32", "G": "i32"}
            if groups.ragged == "m":
                types |= {"table_ptr": "*i32", "b_stride_z": "i64"}
            for name in ("out_index", "out_weights"):
                if dtype := groups.extras[name]:
                    types[f"{name}_ptr"] = pointer(dtype)
        if specialized.WORDS is not None:
            del types[f"{specialized.WORDS}_desc"]
            types |= {"words_ptr": pointer(problem.a.dtype), "words_stride": "i64"}
        if config.tail_splits > 1:
            types |= {"parts_ptr": "*fp32", "flags_ptr": "*i32", "TAIL": "i32"}
        if config.early == "l2":
            types |= {"ahead_ptr": pointer(problem.b.dtype), "ahead_stride": "i64"}
        if outputs := problem.epilogue.outputs:
            types |= {"port_ptr": "*fp32", "port_at": "i64", "port_stride": "i64"}
        constants: dict[str, Any] = {
            "EPILOGUE": device_function(problem.epilogue),
            "OF": port_function(outputs[0]) if outputs else None,
            "C": specialized,
        }
        divisible = {}
        if specialized.POINTERS or specialized.ZEROED:
            types["out_ptr"] = pointer(problem.out.dtype)
            types["out_stride"] = "i64" if problem.out.wide or problem.m == 1 else "i32"
        if specialized.POINTERS and specialized.stacked:
            types["out_stride_z"] = "i64"
        if not specialized.POINTERS:
            types["c_desc"] = _descriptor_type(problem.out, rows, width, kinds["out"])
        if problem.bias is not None:
            types |= {"bias_ptr": pointer(problem.bias), "bias_stride": "i64"}
            types |= {"bias_stride_z": "i64"} if groups is not None else {}
        if residual_by_tma(problem):
            assert problem.residual is not None
            types["r_desc"] = _descriptor_type(problem.residual, rows, width, kinds["residual"])
        elif problem.residual is not None:
            # A dimension of one element may have any stride.
            wide = problem.residual.wide or 1 in (problem.m, problem.n)
            stride = "i64" if wide else "i32"
            types |= {"residual_ptr": pointer(problem.residual.dtype)}
            types |= {"residual_stride_m": stride, "residual_stride_n": stride}
            if problem.residual.layout == "row":
                # Neighbours are adjacent: aligned pairs are loaded at once.
                del types["residual_stride_n"]
                constants["residual_stride_n"] = 1
                if problem.residual.aligned and problem.n % 8 == 0:
                    divisible = {"residual_ptr": 16, "residual_stride_m": 4, "N": 8}
                    if specialized.stacked:
                        divisible["residual_stride_z"] = 4
        if problem.residual is not None and specialized.stacked:
            types["residual_stride_z"] = "i64"
        if specialized.STORED > 1 or (specialized.ZEROED and not specialized.POINTERS):
            # Scattered rows and zeros are stored 16 bytes at a time.
            step = ALIGNMENT // problem.out.dtype.itemsize
            whole = max(step, divisible.get("N", 1))
            divisible |= {"out_ptr": ALIGNMENT, "out_stride": step, "N": whole}
        if problem.scaled:
            types["alpha"] = "fp32"
        types |= {"scale_a_ptr": "*fp32"} if problem.scale_a else {}
        types |= {"scale_b_ptr": "*fp32"} if problem.scale_b else {}
        constants |= {name: None for name in _kernel.arg_names if name not in types | constants}
        options = {
            "num_warps": config.num_warps,
            "launch_pdl": specialized.overlaps,
            "evict_first": config.evict_first,
        }
        return Specialization(types, constants, divisible, options)

    def builds(self, problem: Problem, config: WarpSpecializedConfig) -> list[Build]:
        config = hopper_tiles.adapted(problem, config)
        of = self.specialize(problem, config)
        builds = [Build(_kernel, of.types, of.constants, of.divisible, of.options)]
        if config.splits > 1:
            builds.append(reduction(problem, config.splits))
        return builds + _ports(problem, config).builds()

    def bind(self, problem: Problem, config: WarpSpecializedConfig) -> Launcher:
        config = hopper_tiles.adapted(problem, config)
        of, *second = self.builds(problem, config)
        launch = of.launch(problem.device.type)
        rows, width = config.rows, config.BLOCK_N // config.subtiles
        groups, kinds = problem.groups, kinds_of(problem)

        def described(name: str, rows: int, columns: int) -> Described:
            operand = getattr(problem, name) or problem.out
            return Described(name, _describer(operand, rows, columns, kinds[name]))

        def parts() -> Described:
            describe = _describer(multiplied(problem, config).out, rows, width, "matrix")
            return Described("workspace", lambda t: describe(t.view(-1, problem.n)))

        blocks = _blocks(problem, config)
        known: dict[str, Argument] = {
            "a_desc": described("a", of.constants["C"].A_ROWS, config.BLOCK_K),
            "b_desc": described("b", config.BLOCK_K, of.constants["C"].columns),
            "c_desc": parts() if config.splits > 1 else described("out", rows, width),
            "r_desc": described("residual", rows, width),
            "M": problem.m,
            "N": problem.n,
            "K": problem.k,
            "GROUP_M": config.GROUP_M,
            "BATCH": problem.batch,
            "a_stride_z": ("a", 0),
            "b_stride_z": ("b", 0),
            "out_ptr": "out",
            "out_stride_z": ("out", 0),
            "out_stride": ("out", -2),
            "bias_ptr": "bias",
            "bias_stride": ("bias", -1),
            "bias_stride_z": ("bias", 0),
            "residual_ptr": "residual",
            "residual_stride_z": ("residual", 0),
            "residual_stride_m": ("residual", -2),
            "residual_stride_n": ("residual", -1),
            "alpha": "alpha",
            "scale_a_ptr": "scale_a",
            "scale_b_ptr": "scale_b",
        }
        if groups is not None:
            known |= {"offs_ptr": "offs", "table_ptr": "workspace", "G": groups.count}
            known |= {"out_index_ptr": "out_index", "out_weights_ptr": "out_weights"}
        if config.tail_splits > 1:
            flags = Counters(blocks * of.constants["C"].a_boxes)
            known |= {"parts_ptr": "workspace", "flags_ptr": flags}
            known |= {"TAIL": hopper_tiles.tail_tiles(problem, config)}
        if operand := of.constants["C"].WORDS:
            outer = -1 if getattr(problem, operand).layout == "col" else -2
            known |= {"words_ptr": operand, "words_stride": (operand, outer)}
        if config.early == "l2":
            outer = -1 if problem.b.layout == "col" else -2
            known |= {"ahead_ptr": "b", "ahead_stride": ("b", outer)}
        ports = _ports(problem, config)
        if ports.given:
            at = _parts(problem, config)
            known |= {"port_ptr": "workspace", "port_at": at, "port_stride": problem.m}
        arguments = {name: known[name] for name in of.types}
        steps = [Step(launch, (blocks, 1, 1), arguments)]
        if ports.given:
            return ports.launcher(steps[0])
        for build in second:
            steps.append(reducing(problem, build, apart=part_elements(problem, config)))
        scratch = self.workspace_bytes(problem, config) // 4
        workspace = (scratch, torch.float32 if groups is None else torch.int32) if scratch else None
        extras = (*groups.given, *problem.scales) if groups is not None else ()
        return launcher(
            steps, problem.out_shape, problem.out.dtype, workspace=workspace, extras=extras
        )


def _blocks(problem: Problem, config: WarpSpecializedConfig) -> int:
    """As many blocks as the waves need, not as there are SMs: 512 tiles take 132 blocks as many
    waves as 128, which work on a rectangle of tiles and leave power for higher clocks. The host
    does not know how many tiles ragged rows have."""
    sms, tiles = problem.device.sm_count, most_tiles(problem, config) * config.splits
    if config.tail_splits > 1:
        return sms
    return min(sms, tiles) if rows_ragged(problem) else -(-tiles // -(-tiles // sms))


def _parts(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Elements of the workspace that sums over parts of K take."""
    if config.splits > 1:
        return config.splits * part_elements(problem, config)
    if config.tail_splits == 1:
        return 0
    width = config.BLOCK_N * (2 if problem.gated else 1)
    return problem.device.sm_count * config.BLOCK_M * width


def _ports(problem: Problem, config: WarpSpecializedConfig) -> Ports:
    strips = -(-problem.n // config.BLOCK_N) * config.subtiles
    return Ports(problem, 0, strips, after=_parts(problem, config))


@dataclass(frozen=True)
class Specialization:
    """The kernel's arguments for :func:`tmm_core.triton.source`, and its options."""

    types: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: Mapping[str, int]
    options: Mapping[str, Any]


def _box(operand: Operand, rows: int, columns: int, kind: str) -> tuple[list[int], Any]:
    """The descriptor block of a [rows, columns] tile along the contiguous dimension, with the
    other dimensions of its kind (:data:`tmm_triton.ragged_tiles.Kinds`), and its layout in shared
    memory."""
    block = boxed(rows, columns, operand.layout != "row", kind)
    return block, gl.NVMMASharedLayout.get_default_for(block, _GLUON[operand.dtype])


def _descriptor_type(operand: Operand, rows: int, columns: int, kind: str) -> str:
    block, layout = _box(operand, rows, columns, kind)
    return f"tensordesc<{pointer(operand.dtype)[1:]}{block},{layout!r}>"


def _describer(
    operand: Operand, rows: int, columns: int, kind: str
) -> Callable[[torch.Tensor], Any]:
    block, layout = _box(operand, rows, columns, kind)
    outer, inner = (-2, -1) if operand.layout == "row" else (-1, -2)
    step = ALIGNMENT // operand.dtype.itemsize

    def describe(t: torch.Tensor) -> Any:
        shape = [t.shape[outer], t.shape[inner]]
        # A single row has no meaningful leading stride; TMA needs an aligned one.
        leading = t.stride(outer) if shape[0] > 1 else -(-shape[1] // step) * step
        strides = [leading, 1]
        if kind == "stack":
            # TMA does not support a stride of zero: a shared matrix is a batch of one. So is a
            # single group, whose stride may be anything.
            apart = t.stride(0) if len(t) > 1 else 0
            strides = [apart or shape[0] * leading, *strides]
            shape = [t.shape[0] if apart else 1, *shape]
        elif kind == "clipped":
            shape, strides = clipped(shape[1], leading)
        return TensorDescriptor(t, shape, strides, block, layout)

    return describe
