"""The consumers of ``triton.warp_specialized``: they multiply full stages, and store or add up the
parts of tiles that are split along K."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.language.nvidia.hopper.tma import store_wait

from tmm_core.triton import releases
from tmm_triton.hopper.scheduler import (
    as_matrix,
    next_stage,
    skip_stages,
    tile_at,
    unit_at,
    work_of,
)
from tmm_triton.hopper.step_scales import add_scaled, scales_at, upcoming
from tmm_triton.hopper.tile_epilogue import bias_of, fetch, store_tile
from tmm_triton.stream_k import add, await_flag, own_share, reset_flag, set_flag

reinterpret = releases.reinterpret


@jit
def _add_promoted(a, b, acc):
    """Add one stage's products in fp32, since the tensor cores sum 8-bit floats with about 14 bits.
    The other consumers multiply meanwhile. Even the first sums are added, to zeros: when they were
    used directly, ptxas moved them and waited after every wgmma of large tiles."""
    part = warpgroup_mma(a, b, acc, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=(part,))
    return acc + part


@jit
def _await_full(full, stage, phase, C: gl.constexpr):
    """Wait until a stage's operands have arrived and are visible to ``wgmma``."""
    mbarrier.wait(full.index(stage), phase)
    if C.WORDS is not None:
        # Here, not at the stores: the fence waits for all of a thread's loads, and the loader has
        # loads of the next k-steps in flight.
        fence_async_shared()


@jit
def _columns(b_ring, slot, COLUMNS: gl.constexpr, C: gl.constexpr):
    """B's part of a product, from this slot on: consecutive boxes in shared memory are viewed as
    one box of all their columns."""
    KIND: gl.constexpr = C.b_kind
    b = as_matrix(b_ring.index(slot), KIND)
    SHAPE: gl.constexpr = [COLUMNS, C.BLOCK_K] if C.B_COL else [C.BLOCK_K, COLUMNS]
    BOXES: gl.constexpr = COLUMNS // C.box_columns
    if BOXES > 1 and C.ahead == BOXES:
        RING: gl.constexpr = [C.num_stages * C.b_boxes // BOXES] + SHAPE  # noqa: RUF005
        b = reinterpret(b_ring, b.dtype, RING, b.layout).index(slot // BOXES)
    elif BOXES > 1 and C.ahead:
        # Only the shape matters: joined_ahead takes the address from the second product's boxes.
        b = reinterpret(b_ring.slice(0, BOXES), b.dtype, SHAPE, b.layout)
    elif BOXES > 1:
        b = reinterpret(b, b.dtype, SHAPE, b.layout)
    if C.B_COL:
        b = b.permute((1, 0))
    return b


@jit
def _multiply(ring, stage, acc, up, FIRST: gl.constexpr, WHO: gl.constexpr, C: gl.constexpr):
    """Start this stage's products and wait for the previous stage's."""
    a_ring, b_ring = ring
    KIND: gl.constexpr = C.a_kind
    a = as_matrix(a_ring.index(stage * C.a_boxes + WHO % C.a_boxes), KIND)
    if C.A_COL:
        a = a.permute((1, 0))
    b = _columns(b_ring, stage * C.b_boxes, C.columns, C)
    AT: gl.constexpr = 0 if C.ahead else C.b_boxes - C.second // C.box_columns
    if C.promoted:
        acc = _add_promoted(a, b, acc)
        if C.second:
            b = _columns(b_ring, stage * C.b_boxes + AT, C.second, C)
            up = _add_promoted(a, b, up)
        return acc, up
    # Not accumulating the first time saves clearing the registers.
    acc = warpgroup_mma(a, b, acc, use_acc=not FIRST, is_async=True)
    if C.second:
        b = _columns(b_ring, stage * C.b_boxes + AT, C.second, C)
        up = warpgroup_mma(a, b, up, use_acc=not FIRST, is_async=True)
        acc, up = warpgroup_mma_wait(2, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(1, deps=(acc,))
    return acc, up


@jit
def _multiply_steps(
    begin, end, ring, barriers, stage, phase, reading, acc, up,
    WHO: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Multiply the k-steps from ``begin`` up to ``end``. After each step, release the stage of the
    step before it, ``reading`` at first. Return the ring position after the steps, the stage that
    is still read, and the sums."""
    full, empty = barriers
    for _ in range(begin, end):
        _await_full(full, stage, phase, C)
        acc, up = _multiply(ring, stage, acc, up, False, WHO, C)
        mbarrier.arrive(empty.index(reading))
        reading = stage
        stage, phase = next_stage(stage, phase, C)
    return stage, phase, reading, acc, up


@jit
def _start_product(ring, stage, part, SECOND: gl.constexpr, WHO: gl.constexpr, C: gl.constexpr):
    """Start a stage's first or second product, whose sums take the registers of ``part``."""
    a_ring, b_ring = ring
    KIND: gl.constexpr = C.a_kind
    a = as_matrix(a_ring.index(stage * C.a_boxes + WHO % C.a_boxes), KIND)
    AT: gl.constexpr = C.b_boxes // 2 if SECOND else 0
    b = _columns(b_ring, stage * C.b_boxes + AT, C.columns, C)
    return warpgroup_mma(a, b, part, use_acc=False, is_async=True)


@jit
def _multiply_scaled(
    begin, end, ring, barriers, stage, phase, acc, up, lines, scales, grids,
    WHO: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Multiply the k-steps from ``begin`` up to ``end``, and the sums of each step by its scales.
    Return the ring position after the steps, and the sums."""
    full, empty = barriers
    LAYOUT: gl.constexpr = acc.type.layout
    SHAPE: gl.constexpr = [C.rows, C.columns]
    # All products use these registers, so each starts when the previous sums are added. When the
    # second product had its own registers, ptxas started it earlier and spilled the first
    # product's.
    part = gl.zeros(SHAPE, gl.float32, LAYOUT)
    for step in range(begin, end):
        _await_full(full, stage, phase, C)
        part = _start_product(ring, stage, part, False, WHO, C)
        later = scales_at(lines, step + C.scales_ahead, end, grids, C)
        part = warpgroup_mma_wait(0, deps=(part,))
        if C.second:
            acc = add_scaled(acc, part, scales[0], False, LAYOUT, C)
            part = _start_product(ring, stage, part, True, WHO, C)
            part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(stage))
        if C.second:
            up = add_scaled(up, part, scales[0], True, LAYOUT, C)
        else:
            acc = add_scaled(acc, part, scales[0], False, LAYOUT, C)
        stage, phase = next_stage(stage, phase, C)
        scales = scales[1:] + (later,)  # noqa: RUF005
    return stage, phase, acc, up


@jit
def _multiply_pairs(
    begin, end, ring, barriers, stage, phase, acc, up, lines, scales, grids,
    WHO: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Like :func:`_multiply_scaled`, for pairs of products: one each of two steps, or both of one
    step. The second runs while the first is scaled. A single last step is left to
    :func:`_multiply_scaled`, and its scales are returned too.

    Both products end within an iteration: ptxas allows no reads of sums whose product still runs
    when the loop repeats.
    """
    full, empty = barriers
    LAYOUT: gl.constexpr = acc.type.layout
    SHAPE: gl.constexpr = [C.rows, C.columns]
    one = gl.zeros(SHAPE, gl.float32, LAYOUT)
    other = gl.zeros(SHAPE, gl.float32, LAYOUT)
    STEPS: gl.constexpr = 1 if C.second else 2
    for step in range(begin, end - STEPS + 1, STEPS):
        reading = stage
        _await_full(full, stage, phase, C)
        one = _start_product(ring, stage, one, False, WHO, C)
        stage, phase = next_stage(stage, phase, C)
        if C.second:
            other = _start_product(ring, reading, other, True, WHO, C)
        else:
            _await_full(full, stage, phase, C)
            other = _start_product(ring, stage, other, False, WHO, C)
        later = scales_at(lines, step + C.scales_ahead, end, grids, C)
        if not C.second:
            last = scales_at(lines, step + 1 + C.scales_ahead, end, grids, C)
        one, other = warpgroup_mma_wait(1, deps=(one, other))
        if not C.second:
            mbarrier.arrive(empty.index(reading))
            reading = stage
            stage, phase = next_stage(stage, phase, C)
        acc = add_scaled(acc, one, scales[0], False, LAYOUT, C)
        other = warpgroup_mma_wait(0, deps=(other,))
        mbarrier.arrive(empty.index(reading))
        if C.second:
            up = add_scaled(up, other, scales[0], True, LAYOUT, C)
            scales = scales[1:] + (later,)  # noqa: RUF005
        else:
            acc = add_scaled(acc, other, scales[1], False, LAYOUT, C)
            scales = scales[2:] + (later, last)  # noqa: RUF005
    return stage, phase, acc, up, scales


@jit
def _await_products(acc, up, C: gl.constexpr):
    """Wait for all products; returns their sums."""
    if C.GATED or C.narrow:
        acc, up = warpgroup_mma_wait(0, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, up


@jit
def _skip_unit(unit, stage, phase, work, sizes, C: gl.constexpr):
    """The ring position after the other consumer's unit."""
    _, first, last = unit_at(unit, work, sizes, C)
    return skip_stages(stage, phase, last - first, C)


@jit
def part_at(parts, share, product, WHO: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Addresses in the workspace of the consumer's rows of a share's part. A register of all
    threads is contiguous. When rows were contiguous, a warp's access used 4 of every 32 bytes that
    it moved, and a part of 128×128 elements took 17 µs."""
    SIZE: gl.constexpr = C.rows * C.columns
    THREADS: gl.constexpr = 32 * C.num_warps
    start = ((share * C.a_boxes + WHO % C.a_boxes) * C.b_boxes + product) * SIZE
    # In wgmma's accumulators a thread has pairs of neighbours, in every eighth row and column.
    row = gl.arange(0, C.rows, layout=gl.SliceLayout(1, LAYOUT))
    thread = row % 8 * 4 + row // 16 % C.num_warps * 32
    register = row // 8 % 2 * 2 + row // (16 * C.num_warps) * (C.columns // 2)
    down = gl.expand_dims(thread + register * THREADS, 1)
    column = gl.arange(0, C.columns, layout=gl.SliceLayout(0, LAYOUT))
    register = column % 2 + column // 8 * 4
    return parts[0] + start + down + gl.expand_dims(column // 2 % 4 + register * THREADS, 0)


@jit
def _flag(parts, share, WHO: gl.constexpr, C: gl.constexpr):
    return parts[1] + share * C.a_boxes + WHO % C.a_boxes


@jit
def _store_part(acc, up, parts, WHO: gl.constexpr, C: gl.constexpr):
    """Store the sum over a part of a tile for the block with its first k-steps."""
    LAYOUT: gl.constexpr = acc.type.layout
    gl.store(part_at(parts, own_share(), 0, WHO, C, LAYOUT), acc)
    if C.b_boxes == 2:
        gl.store(part_at(parts, own_share(), 1, WHO, C, LAYOUT), up)
    set_flag(_flag(parts, own_share(), WHO, C))


@jit
def _add_parts(acc, up, parts, WHO: gl.constexpr, C: gl.constexpr):
    """Add the other blocks' parts of this tile in the order of K; returns the sums over all of
    K."""
    LAYOUT: gl.constexpr = acc.type.layout
    for part in range(1, C.tail_splits):
        flag = _flag(parts, own_share() + part, WHO, C)
        await_flag(flag)
        # Written by other SMs: bypass this one's L1.
        at = part_at(parts, own_share() + part, 0, WHO, C, LAYOUT)
        acc = add(acc, gl.load(at, cache_modifier=".cg"))
        if C.b_boxes == 2:
            at = part_at(parts, own_share() + part, 1, WHO, C, LAYOUT)
            up = add(up, gl.load(at, cache_modifier=".cg"))
        reset_flag(flag)
    return acc, up


@jit
def consume(
    sums, EPILOGUE: gl.constexpr, OF: gl.constexpr, OF_2: gl.constexpr, WHO: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    ring, barriers, turn, target, parts, sizes = sums
    full, empty = barriers
    N = sizes[1]
    ROWS: gl.constexpr = C.rows
    COLUMNS: gl.constexpr = C.columns
    NARROW: gl.constexpr = C.second
    BUFFERS: gl.constexpr = C.buffers
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[C.num_warps, 1],
        instr_shape=[16, C.mma_n, 32 // C.IN_BYTES],
    )
    if C.narrow:
        NARROW_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[C.num_warps, 1], instr_shape=[16, NARROW, 16]
        )
    stage = 0
    phase = 0
    turn_phase = 1 - WHO
    strip_phase = 0
    work = work_of(sizes, C)
    STRIDE: gl.constexpr = 2 if C.pingpong else 1
    if C.stepped:
        ahead = upcoming(WHO if C.pingpong else 0, work, sizes, target[6], LAYOUT, WHO, C)
    if C.pingpong and WHO == 1:
        stage, phase = _skip_unit(0, stage, phase, work, sizes, C)
    for unit in range(WHO if C.pingpong else 0, work[0], STRIDE):
        tile, first, last = unit_at(unit, work, sizes, C)
        acc = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
        up = acc
        if C.narrow:
            up = gl.zeros([ROWS, NARROW], gl.float32, NARROW_LAYOUT)
        if C.pingpong:
            mbarrier.wait(turn.index(WHO), turn_phase)
            turn_phase ^= 1
        if C.stepped:
            matrix, row, column, end, corner = ahead[0]
        else:
            _await_full(full, stage, phase, C)
            acc, up = _multiply(ring, stage, acc, up, True, WHO, C)
            reading = stage
            stage, phase = next_stage(stage, phase, C)
            # Divisions, and a wait for stores, overlap the first products.
            matrix, row, column, end, corner = tile_at(tile, sizes, C)
            if not C.pingpong:
                row += WHO * ROWS
        limits = sizes
        if C.RAGGED == "m":
            limits = (end, N, sizes[2], sizes[3], sizes[4], sizes[5])
        if C.FETCH:  # noqa: SIM102 (decided when compiling, the other when running)
            if (row < end) & (first == 0):
                store_wait(0)
                for i in gl.static_range(BUFFERS):
                    fetch(target[2], i, matrix, row, column, end, WHO, C)
        begin = first
        if C.ranges > 1:
            # Adding to -0 leaves every sum as it is, even the sign of 0.
            total = gl.full([ROWS, COLUMNS], -0.0, gl.float32, LAYOUT)
            total_up = total
            if C.narrow:
                total_up = gl.full([ROWS, NARROW], -0.0, gl.float32, NARROW_LAYOUT)
            for part in range(1, C.ranges):
                upto = last * part // C.ranges
                stage, phase, reading, acc, up = _multiply_steps(
                    begin + 1, upto, ring, barriers, stage, phase, reading, acc, up, WHO, C
                )
                acc, up = _await_products(acc, up, C)
                mbarrier.arrive(empty.index(reading))
                total += acc
                if C.narrow:
                    total_up += up
                begin = upto
                _await_full(full, stage, phase, C)
                acc, up = _multiply(ring, stage, acc, up, True, WHO, C)
                reading = stage
                stage, phase = next_stage(stage, phase, C)
        if C.stepped:
            start, scales = begin, ahead[2]
            if C.paired:
                stage, phase, acc, up, scales = _multiply_pairs(
                    begin, last, ring, barriers, stage, phase, acc, up, ahead[1], scales,
                    target[6], WHO, C,
                )  # fmt: skip
                start = last - (0 if C.second else (last - begin) % 2)
            if not (C.paired and C.second):
                stage, phase, acc, up = _multiply_scaled(
                    start, last, ring, barriers, stage, phase, acc, up, ahead[1], scales,
                    target[6], WHO, C,
                )  # fmt: skip
            # Scales are on their way while this tile is stored.
            ahead = upcoming(unit + STRIDE, work, sizes, target[6], LAYOUT, WHO, C)
        else:
            stage, phase, reading, acc, up = _multiply_steps(
                begin + 1, last, ring, barriers, stage, phase, reading, acc, up, WHO, C
            )
        if C.pingpong:
            mbarrier.arrive(turn.index(1 - WHO))
            stage, phase = _skip_unit(unit + 1, stage, phase, work, sizes, C)
        bias = target[1]
        if C.BIAS:
            bias = bias_of(target[1], matrix, column, N, C.subtiles, C)
            if C.GATED:
                bias = bias + bias_of(target[1], matrix, N + column, 2 * N, C.subtiles, C)
        if not C.stepped:
            acc, up = _await_products(acc, up, C)
            mbarrier.arrive(empty.index(reading))
        if C.ranges > 1:
            acc = total + acc
            if C.narrow:
                up = total_up + up
        # A consumer's rows may all be outside. The branch also keeps the compiler from hoisting the
        # code after it, which delayed the last stage by half an epilogue.
        if row < end:
            if C.tail_splits > 1 and first > 0:
                _store_part(acc, up, parts, WHO, C)
            else:
                if C.tail_splits > 1 and last < work[5]:
                    acc, up = _add_parts(acc, up, parts, WHO, C)
                if C.splits > 1:
                    row += matrix * gl.cdiv(sizes[0], C.BLOCK_M) * C.BLOCK_M
                store_tile(
                    acc, up, bias, matrix, row, column, corner, strip_phase, target, limits,
                    EPILOGUE, OF, OF_2, WHO, C,
                )  # fmt: skip
                # A tile uses each buffer this many times; every use flips the buffer's phase.
                if C.subtiles // C.buffers % 2 == 1:
                    strip_phase ^= 1
    store_wait(0)
