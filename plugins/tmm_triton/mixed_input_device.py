"""The device code of ``triton.mixed_input``: :mod:`tmm_triton.mixed_input` describes it."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tmm_core.triton import factors, releases
from tmm_triton.blocks import store
from tmm_triton.ragged import finished
from tmm_triton.ragged_tiles import find_tile, store_table, zero_beyond
from tmm_triton.stream_k import (
    add,
    await_flag,
    own_share,
    reset_flag,
    set_flag,
    start_of_share,
)
from tmm_triton.transposed_tiles import fours, fours_at, of_fours

async_load = releases.async_load


@jit
def _slot(position, C: gl.constexpr):
    """The stage of a step, counted over all tiles of a block, and the phase of its barriers."""
    return position % C.num_stages, position // C.num_stages & 1


@jit
def _next_slot(stage, phase, C: gl.constexpr):
    """The stage and phase of a consumer's next step, without a division, which would delay it."""
    stage += C.k_ways
    wraps = stage >= C.num_stages
    return gl.where(wraps, stage - C.num_stages, stage), gl.where(wraps, phase ^ 1, phase)


@jit
def _rounds(first, last, C: gl.constexpr):
    """How many steps along K each of the consumers of the same columns takes. So a stage belongs
    to the same consumer in every tile. An mbarrier shows only the parity of its phase, so no warp
    may wait for a phase before the previous one has ended."""
    return gl.cdiv(last - first, C.k_ways)


@jit
def _work_of(sizes, C: gl.constexpr):
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
def _range_of_k(unit, work, sizes, C: gl.constexpr):
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
def _unit_at(unit, work, sizes, C: gl.constexpr):
    """A tile's group, first row of ``a``, the end of its rows, and its first column; and the part
    of K. Neighbouring blocks read the same rows of the weight."""
    M, _N, _K, tile_rows, groups = sizes
    part, first, last, index = _range_of_k(unit, work, sizes, C)
    group = 0
    row = index % tile_rows * C.BLOCK_M
    end = M
    if C.RAGGED:
        group, row, end = find_tile(index % tile_rows, groups, M, C.BLOCK_M)
    return (group, row, end, index // tile_rows * C.BLOCK_N), (part, first, last)


@jit
def produce(loads, C: gl.constexpr):
    """The producer: requests the boxes of each step from TMA as soon as a stage is free."""
    a_desc, rest_desc, b_desc, ring, barriers, sizes = loads
    a_ring, rest_ring, b_ring = ring
    full, empty, landed, _turns = barriers
    BOXES: gl.constexpr = C.n_ways * C.HALVES
    HIGH: gl.constexpr = C.high
    OF_A: gl.constexpr = 2 * C.BLOCK_M * C.BLOCK_K
    BYTES: gl.constexpr = C.stage_bytes - OF_A if C.arranged else C.stage_bytes
    BOX: gl.constexpr = [1, HIGH, C.wide]
    position = 0
    work = _work_of(sizes, C)
    for unit in range(work[0], work[1], work[2]):
        tile, range_of_k = _unit_at(unit, work, sizes, C)
        group, m, _end, n = tile
        _part, first, last = range_of_k
        for step in range(first, first + _rounds(first, last, C) * C.k_ways):
            stage, phase = _slot(position, C)
            # A fresh barrier counts as having completed phase −1: the first round passes.
            mbarrier.wait(empty.index(stage), phase ^ 1)
            ready = full.index(stage)
            ready_a = ready
            if C.arranged:
                ready_a = landed.index(stage)
            if step < last:
                mbarrier.expect(ready, BYTES)
                for box in gl.static_range(BOXES):
                    row = n + box // C.HALVES * HIGH + box % C.HALVES * sizes[1]
                    slot = b_ring.index(stage * BOXES + box)
                    column = step * C.wide
                    if C.RAGGED:
                        async_load(b_desc, [group, row, column], ready, slot.reshape(BOX))
                    else:
                        async_load(b_desc, [row, column], ready, slot)
                if C.arranged:
                    mbarrier.expect(ready_a, OF_A)
                async_load(a_desc, [m, step * C.BLOCK_K], ready_a, a_ring.index(stage))
                if C.rest:
                    at = [m + C.first, step * C.BLOCK_K]
                    async_load(rest_desc, at, ready_a, rest_ring.index(stage))
            else:
                mbarrier.arrive(ready)
                if C.arranged:
                    mbarrier.arrive(ready_a)
            position += 1


@jit
def arrange(loads, WHO: gl.constexpr, C: gl.constexpr):
    """In every third stage, bring the values of ``a`` into the order in which consumers hold the
    weight's. Each lane of four has a quarter of a step's pairs.

    A stage belongs to the same warp in every round, for the reason that :func:`_rounds` gives.
    """
    if C.arranged:
        _a_desc, _rest_desc, _b_desc, ring, barriers, sizes = loads
        a_ring = ring[0]
        full, _empty, landed, _turns = barriers
        ROWS: gl.constexpr = C.at_once
        BLOCK_K: gl.constexpr = C.BLOCK_K
        LAYOUT: gl.constexpr = C.a_rows
        WHOLE: gl.constexpr = [ROWS, BLOCK_K]
        # The pairs of a quarter in turn; of a word of 8 values, those that are four places apart.
        PAIRS: gl.constexpr = [ROWS, 4, BLOCK_K // 8, 2]
        FOURS: gl.constexpr = [ROWS, 4, BLOCK_K // 32, 2, 4]
        CHUNKS: gl.constexpr = C.BLOCK_M // ROWS
        positions = 0
        work = _work_of(sizes, C)
        for unit in range(work[0], work[1], work[2]):
            _part, first, last, _tile = _range_of_k(unit, work, sizes, C)
            positions += _rounds(first, last, C) * C.k_ways
        for position in range(positions):
            stage, phase = _slot(position, C)
            if stage % 3 == WHO:
                mbarrier.wait(landed.index(stage), phase)
                for chunk in gl.static_range(CHUNKS):
                    rows = a_ring.index(stage).slice(chunk * ROWS, ROWS, dim=0)
                    a = rows.load(LAYOUT)
                    if C.pairs == 4:
                        a = a.reshape(FOURS).permute((0, 2, 4, 1, 3))
                    else:
                        a = a.reshape(PAIRS).permute((0, 2, 1, 3))
                    rows.store(a.reshape(WHOLE))
                fence_async_shared()
                mbarrier.arrive(full.index(stage))


@jit
def _column(step, C: gl.constexpr):
    """The first group of a step along K."""
    if C.GROUP > C.BLOCK_K:
        step = step // (C.GROUP // C.BLOCK_K)
    elif C.GROUP:
        step = step * C.parts
    return step


@jit
def _numbers_at(grid, rows, step, C: gl.constexpr):
    """Addresses of the scales or zero points of the weight's rows at a step, [rows, parts]."""
    pointer, stride_z, stride_n, stride_k = grid
    group, row, part, _inside = rows
    at = row // C.OUTER * stride_n
    if C.GROUP:
        at = at + (_column(step, C) + part) * stride_k
    if C.RAGGED:
        pointer += group * stride_z
    return pointer + at


@jit
def _of_step(at, grids, rows, step, last, K, C: gl.constexpr):
    """The scales and zero points of a step, and the addresses of the consumer's next one. Nothing
    reads what is returned for steps from ``last`` on."""
    scales_at, zeros_at = at
    _group, _row, part, inside = rows
    inside = inside & (step < last)
    if C.parts > 1:
        inside = inside & (_column(step, C) + part < gl.cdiv(K, C.GROUP))
    further = _column(step + C.k_ways, C) - _column(step, C)
    # A loop carries numbers only, so 0 stands for what is absent.
    scale = 0
    zero = 0
    if C.GROUP:
        scale = gl.load(scales_at, mask=inside)
        scales_at += further * grids[0][3]
    if C.ZERO:
        zero = gl.load(zeros_at, mask=inside)
        if C.GROUP:
            zeros_at += further * grids[1][3]
    return scale, zero, (scales_at, zeros_at)


@jit
def _units(b_ring, stage, NTH: gl.constexpr, C: gl.constexpr):
    """A consumer's part of a stage in registers, as it is stored."""
    UNITS: gl.constexpr = C.units
    OF_HALF: gl.constexpr = C.units_of_half
    SHAPE: gl.constexpr = [C.rows, C.wide]
    box = (stage * C.n_ways + NTH) * C.HALVES
    units = b_ring.index(box).load(OF_HALF)
    if C.HALVES == 2:
        up = b_ring.index(box + 1).load(OF_HALF)
        units = gl.join(units, up).permute((2, 0, 1)).reshape(SHAPE)
        units = gl.convert_layout(units, UNITS, assert_trivial=True)
    return units.to(gl.int32)


@jit
def _twice(value, T: gl.constexpr):
    """A pair of the same 16-bit float."""
    if value.dtype == gl.uint8:
        value = factors(value)
    bits = value.to(T).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@jit
def _spread(numbers, C: gl.constexpr):
    """A step's numbers, [rows, parts], for each unit, [rows, wide]."""
    SPLIT: gl.constexpr = C.split_units
    UNITS: gl.constexpr = C.units
    SHAPE: gl.constexpr = [C.rows, C.parts, C.wide // C.parts]
    WHOLE: gl.constexpr = [C.rows, C.wide]
    spread = gl.zeros(SHAPE, gl.int32, SPLIT) + gl.expand_dims(numbers, 2)
    return gl.convert_layout(spread.reshape(WHOLE), UNITS, assert_trivial=True)


@jit
def _values(units, zero, scale, T: gl.constexpr, C: gl.constexpr):
    """The values of a consumer's rows as ``wgmma``'s operand in registers, less their zero points,
    and multiplied by their scales if sums are not."""
    ROWS: gl.constexpr = C.rows
    BLOCK_K: gl.constexpr = C.BLOCK_K
    PROGRAM: gl.constexpr = C.PROGRAM
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, C.sums, 2)
    REGISTERS: gl.constexpr = C.registers_of
    operands = (units,)
    if C.ZERO:
        origin = _twice(-(zero.to(gl.float32) + C.OFFSET), T)
        operands += (_spread(origin, C),)  # type: ignore[assignment]
    if C.SCALED == "pair":
        operands += (_spread(_twice(scale, T), C),)  # type: ignore[assignment]
    elif C.SCALED == "wide":
        factor = scale.to(gl.float32).to(gl.int32, bitcast=True)
        operands += (_spread(factor, C),)  # type: ignore[assignment]
    # Each call spells its results' dtypes, which Triton 3.9 does not unwrap in a constant tuple.
    if C.pairs == 4:
        pairs = gl.inline_asm_elementwise(
            PROGRAM, REGISTERS, operands, is_pure=True, pack=1,
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        )  # fmt: skip
        pairs = gl.join(gl.join(pairs[0], pairs[2]), gl.join(pairs[1], pairs[3]))
    elif C.pairs == 2:
        pairs = gl.inline_asm_elementwise(
            PROGRAM, REGISTERS, operands, is_pure=True, pack=1, dtype=(gl.int32, gl.int32)
        )
        pairs = gl.join(pairs[0], pairs[1])
    else:
        pairs = gl.inline_asm_elementwise(
            PROGRAM, REGISTERS, operands, is_pure=True, pack=1, dtype=gl.int32
        )
    if C.arranged:
        # A thread's pairs, [rows, quarters, words of a quarter, pairs of a word], in turn.
        QUARTERS: gl.constexpr = [ROWS, 4, BLOCK_K // 8]
        WHOLE: gl.constexpr = [ROWS, BLOCK_K // 2]
        pairs = pairs.reshape(QUARTERS).permute((0, 2, 1)).reshape(WHOLE)
    low = pairs.to(gl.int16).to(T, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(T, bitcast=True)
    values = gl.join(low, high).reshape([ROWS, BLOCK_K])
    return gl.convert_layout(values, OPERAND, assert_trivial=True)


@jit
def _start(values, ring, stage, acc, turns, turn, WHO: gl.constexpr, C: gl.constexpr):
    """Start a step's products; with ``in_turn`` after the previous consumer has started its own."""
    if C.in_turn:
        mbarrier.wait(turns.index(WHO), turn)
    a = ring[0].index(stage).permute((1, 0))
    part = (warpgroup_mma(values, a, acc[0], use_acc=not C.PROMOTED, is_async=True), 0)
    if C.rest:
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, C.sums_of_rest, 2)
        same = gl.convert_layout(values, OPERAND, assert_trivial=True)
        a = ring[1].index(stage).permute((1, 0))
        rest = warpgroup_mma(same, a, acc[1], use_acc=not C.PROMOTED, is_async=True)
        part = (part[0], rest)
    if C.in_turn:
        NEXT: gl.constexpr = (WHO + 1) % C.consumers
        mbarrier.arrive(turns.index(NEXT))
    return part


@jit
def _ended(part, registers, C: gl.constexpr):
    """A step's sums once its products have ended, and the registers that they read."""
    if C.rest:
        ended = warpgroup_mma_wait(0, deps=part + registers)
        return (ended[0], ended[1]), ended[2:]
    else:  # noqa: RET505 (Triton compiles what follows a return)
        ended = warpgroup_mma_wait(0, deps=(part[0],) + registers)  # noqa: RUF005
        return (ended[0], 0), ended[1:]


@jit
def _added(acc, part, scale, C: gl.constexpr):
    """``acc`` with the sums of a step."""
    if C.PROMOTED:
        first = _scaled_up(acc[0], part[0], scale)
        rest = 0
        if C.rest:
            rest = _scaled_up(acc[1], part[1], scale)
        return first, rest
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return part


@jit
def _scaled_up(acc, part, scale):
    """``acc`` with the sums of a step, multiplied by the scale of each row of the weight."""
    SUMS: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = [acc.shape[0]]
    factor = factors(scale).reshape(ROWS)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, SUMS))
    return acc + part * gl.expand_dims(factor, 1)


@jit
def consume(sums, EPILOGUE: gl.constexpr, WHO: gl.constexpr, C: gl.constexpr):
    """A consumer: multiplies its rows of the weight, at its steps along K, by all rows of a tile of
    ``a``.

    Only loads and address arithmetic happen while ``wgmma`` runs: ptxas waits after every
    instruction if anything defines a register operand of the next ones in between. The other
    consumers then keep the tensor cores busy.

    Addresses and stages are advanced, not computed from the step. ptxas places such arithmetic in
    front of ``wgmma``, where a multiplication or division of 64 bits delays it.
    """
    ring, barriers, sizes, grids, exchange, parts, target = sums
    b_ring = ring[2]
    full, empty, _landed, turns = barriers
    N = sizes[1]
    K = sizes[2]
    T: gl.constexpr = ring[0].dtype
    ROWS: gl.constexpr = C.rows
    HIGH: gl.constexpr = C.high
    FIRST: gl.constexpr = C.first
    REST: gl.constexpr = C.rest
    SUMS: gl.constexpr = C.sums
    SUMS_OF_REST: gl.constexpr = C.sums_of_rest
    NUMBERS: gl.constexpr = C.numbers
    PARTS: gl.constexpr = C.parts
    NTH: gl.constexpr = WHO % C.n_ways
    KTH: gl.constexpr = WHO // C.n_ways
    own = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, NUMBERS)), 1)
    part_of_step = gl.expand_dims(gl.arange(0, PARTS, gl.SliceLayout(0, NUMBERS)), 0)
    stage = KTH
    phase = 0
    # A fresh barrier counts as having completed phase −1: the first consumer begins.
    turn = 1 if WHO == 0 else 0
    exchanges = 0
    work = _work_of(sizes, C)
    for unit in range(work[0], work[1], work[2]):
        tile, range_of_k = _unit_at(unit, work, sizes, C)
        group, m, end, n = tile
        part_of_k, first, last = range_of_k
        n += NTH * HIGH
        row = n + own % HIGH + own // HIGH * N
        rows = (group, row, part_of_step, n + own % HIGH < N)
        acc = (gl.zeros([ROWS, FIRST], gl.float32, SUMS), 0)  # 0 for an absent rest
        if REST:
            acc = (acc[0], gl.zeros([ROWS, REST], gl.float32, SUMS_OF_REST))
        begin = first + KTH
        at = (0, 0)
        if C.GROUP:
            at = (_numbers_at(grids[0], rows, begin, C), 0)
        if C.ZERO:
            at = (at[0], _numbers_at(grids[1], rows, begin, C))
        scale, zero, at = _of_step(at, grids, rows, begin, last, K, C)
        scale_1, zero_1, at = _of_step(at, grids, rows, begin + C.k_ways, last, K, C)
        mbarrier.wait(full.index(stage), phase)
        values = _values(_units(b_ring, stage, NTH, C), zero, scale, T, C)
        for step in range(begin, last - C.k_ways, C.k_ways):
            part = _start(values, ring, stage, acc, turns, turn, WHO, C)
            turn ^= 1
            following, phase = _next_slot(stage, phase, C)
            mbarrier.wait(full.index(following), phase)
            units = _units(b_ring, following, NTH, C)
            scale_2, zero_2, at = _of_step(at, grids, rows, step + 2 * C.k_ways, last, K, C)
            part, held = _ended(part, (values, units), C)
            values, units = held
            mbarrier.arrive(empty.index(stage))
            acc = _added(acc, part, scale, C)
            values = _values(units, zero_1, scale_1, T, C)
            stage = following
            scale, scale_1, zero_1 = scale_1, scale_2, zero_2
        part = _start(values, ring, stage, acc, turns, turn, WHO, C)
        turn ^= 1
        part, _held = _ended(part, (values,), C)
        mbarrier.arrive(empty.index(stage))
        acc = _added(acc, part, scale, C)
        stage, phase = _next_slot(stage, phase, C)
        if begin + (_rounds(first, last, C) - 1) * C.k_ways >= last:
            mbarrier.wait(full.index(stage), phase)  # a stage without a step
            mbarrier.arrive(empty.index(stage))
            stage, phase = _next_slot(stage, phase, C)
        if C.k_ways > 1:
            acc = (_exchanged(acc[0], exchange, exchanges, NTH, KTH, C), 0)
            exchanges ^= 1
        if KTH == 0:
            stores = True
            if C.stream_k:
                stores = first == 0
                if not stores:
                    _store_part(acc, parts, NTH, C)
                elif last < gl.cdiv(K, C.BLOCK_K):
                    acc = _with_part(acc, parts, NTH, C)
            if stores:
                tile = (group, m, end, n)
                _store_tile(acc[0], tile, part_of_k, sizes, grids[0], target, EPILOGUE, C)
                if REST:
                    tile = (group, m + FIRST, end, n)
                    _store_tile(acc[1], tile, part_of_k, sizes, grids[0], target, EPILOGUE, C)


@jit
def _by_thread(acc, C: gl.constexpr):
    """``wgmma``'s sums as [registers, threads], so that addresses are a thread's and a constant."""
    HEIGHT: gl.constexpr = acc.shape[1]
    SPLIT: gl.constexpr = [C.rows // 64, 4, 2, 8, HEIGHT // 8, 4, 2]
    FLAT: gl.constexpr = [C.rows * HEIGHT // 128, 128]
    return acc.reshape(SPLIT).permute((0, 2, 4, 6, 1, 3, 5)).reshape(FLAT)


@jit
def _by_row(acc, SUMS: gl.constexpr, C: gl.constexpr):
    """The reverse of :func:`_by_thread`, in the layout ``SUMS``."""
    HEIGHT: gl.constexpr = acc.shape[0] * 128 // C.rows
    SPLIT: gl.constexpr = [C.rows // 64, 2, HEIGHT // 8, 2, 4, 8, 4]
    FLAT: gl.constexpr = [C.rows, HEIGHT]
    acc = acc.reshape(SPLIT).permute((0, 4, 1, 5, 2, 6, 3)).reshape(FLAT)
    return gl.convert_layout(acc, SUMS, assert_trivial=True)


@jit
def _addresses(acc, parts, which, ROW: gl.constexpr, C: gl.constexpr):
    """Where the workspace has a consumer's sums of a shared tile from one of its rows on."""
    LAYOUT: gl.constexpr = acc.type.layout
    REGISTERS: gl.constexpr = acc.shape[0]
    THREADS: gl.constexpr = acc.shape[1]
    register = gl.expand_dims(gl.arange(0, REGISTERS, gl.SliceLayout(1, LAYOUT)), 1)
    thread = gl.expand_dims(gl.arange(0, THREADS, gl.SliceLayout(0, LAYOUT)), 0)
    # In two additions, so that all registers have the thread's address and a constant.
    of_thread = parts[0] + which * (C.rows * C.BLOCK_M) + thread
    return of_thread + (register * THREADS + ROW * C.rows)


@jit
def _store_part(acc, parts, NTH: gl.constexpr, C: gl.constexpr):
    """Store the sum over a part of a tile for the block with the tile's first steps."""
    which = own_share() * C.n_ways + NTH
    first = _by_thread(acc[0], C)
    gl.store(_addresses(first, parts, which, 0, C), first)
    if C.rest:
        rest = _by_thread(acc[1], C)
        gl.store(_addresses(rest, parts, which, C.first, C), rest)
    set_flag(parts[1] + which)


@jit
def _with_part(acc, parts, NTH: gl.constexpr, C: gl.constexpr):
    """Add the sum over a tile's last steps, which the next share begins with."""
    SUMS: gl.constexpr = C.sums
    SUMS_OF_REST: gl.constexpr = C.sums_of_rest
    which = (own_share() + 1) * C.n_ways + NTH
    first = _by_thread(acc[0], C)
    at = _addresses(first, parts, which, 0, C)
    await_flag(parts[1] + which)
    first = _plus(first, at)
    rest = 0
    if C.rest:
        rest = _by_thread(acc[1], C)
        rest = _by_row(_plus(rest, _addresses(rest, parts, which, C.first, C)), SUMS_OF_REST, C)
    reset_flag(parts[1] + which)
    return _by_row(first, SUMS, C), rest


@jit
def _plus(acc, at):
    """``acc`` plus the sums that another SM wrote: read them past this one's L1."""
    return add(acc, gl.load(at, cache_modifier=".cg"))


@jit
def _exchanged(acc, exchange, turn, NTH: gl.constexpr, KTH: gl.constexpr, C: gl.constexpr):
    """The consumer of the first steps adds the others' sums to ``acc``, in the order of their first
    steps. The others leave their sums in shared memory.

    Args:
        turn: 0 for the block's first tile, then 1, 0 and so on.
    """
    buffers, left, taken = exchange
    SUMS: gl.constexpr = C.sums
    if KTH == 0:
        mbarrier.wait(left.index(NTH), turn)
        OTHERS: gl.constexpr = C.k_ways - 1
        for other in gl.static_range(OTHERS):
            acc += buffers.index(other * C.n_ways + NTH).load(SUMS)
        mbarrier.arrive(taken.index(NTH))
    else:
        # A fresh barrier counts as having completed phase −1: the first tile passes.
        mbarrier.wait(taken.index(NTH), turn ^ 1)
        buffers.index((KTH - 1) * C.n_ways + NTH).store(acc)
        mbarrier.arrive(left.index(NTH))
    return acc


@jit
def _scaled(total, group, columns, N, scales, C: gl.constexpr):
    """Sums of [rows of a, rows of the weight], multiplied by a scale for each row of the weight, or
    one of all."""
    if C.ROW_SCALE == "row":
        pointer = scales[0]
        if C.RAGGED:
            pointer += group * scales[1]
        factor = gl.load(pointer + columns, mask=columns < N, other=0)
        total = total * gl.expand_dims(factors(factor), 0)
    elif C.ROW_SCALE == "tensor":
        total = total * factors(gl.load(scales[0]))
    return total


@jit
def _store_tile(acc, tile, part, sizes, scales, target, EPILOGUE: gl.constexpr, C: gl.constexpr):
    """Finish and store sums of [rows of the weight, rows of a]."""
    M, N, _K, _tile_rows, _groups = sizes
    out, bias, residual, alpha, indices, partials_ptr = target
    group, m, end, n = tile
    HEIGHT: gl.constexpr = acc.shape[1]
    HIGH: gl.constexpr = C.high
    gate = acc.permute((1, 0))
    up = gate
    if C.HALVES == 2:
        gate, up = gate.reshape([HEIGHT, 2, HIGH]).permute((0, 2, 1)).split()
    LAYOUT: gl.constexpr = gate.type.layout
    rows = m + gl.arange(0, HEIGHT, gl.SliceLayout(1, LAYOUT))
    cols = n + gl.arange(0, HIGH, gl.SliceLayout(0, LAYOUT))
    if C.splits > 1:
        store(gate, part, rows, cols, M, N, partials_ptr, M * N, N, 1)
    else:
        gate = _scaled(gate, group, cols, N * C.HALVES, scales, C)
        if C.HALVES == 2:
            up = _scaled(up, group, N + cols, 2 * N, scales, C)
        at = rows
        if indices[0] is not None:
            at = gl.load(indices[0] + rows, mask=rows < end, other=0)
        added = residual[0]
        if C.ADDS_FOURS:
            added = None
        y = finished(
            gate, up, group, rows, at, end, cols, N, N, bias[0], bias[1], bias[2], alpha,
            indices[1], added, 0, residual[1], residual[2], EPILOGUE, C.HALVES == 2, False,
        )  # fmt: skip
        if C.ADDS_FOURS:
            T: gl.constexpr = residual[0].dtype.element_ty
            pointers, inside = fours_at(residual[0], residual[1], tile, N, indices[0], HEIGHT, C)
            loaded = gl.load(pointers, mask=inside, other=0)
            y += of_fours(loaded, T, LAYOUT, C).to(gl.float32)
        y = y.to(out[0].dtype.element_ty)
        if C.STORES_FOURS:
            pointers, inside = fours_at(out[0], out[1], tile, N, indices[0], HEIGHT, C)
            gl.store(pointers, fours(y, C), mask=inside)
        else:
            pointers = out[0] + gl.expand_dims(at * out[1], 1) + gl.expand_dims(cols * out[2], 0)
            inside = gl.expand_dims(rows < end, 1) & gl.expand_dims(cols < N, 0)
            gl.store(pointers, y, mask=inside)


@jit
def mixed_input_kernel(
    a_desc, rest_desc, b_desc, bias_ptr, residual_ptr, out_ptr, partials_ptr, flags_ptr, M, N, K,
    stride_rm, stride_rn, stride_om, stride_on, stride_biasz, stride_bias, alpha,
    b_scale_ptr, b_zero_ptr, stride_bsz, stride_bsk, stride_bsn, stride_0z, stride_0k, stride_0n,
    offs_ptr, table_ptr, G, out_index_ptr, out_weights_ptr,
    EPILOGUE: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = C.num_stages
    A_SLOTS: gl.constexpr = [STAGES, C.first, C.BLOCK_K]
    B_SLOTS: gl.constexpr = [STAGES * C.n_ways * C.HALVES, C.high, C.wide]
    a_ring = gl.allocate_shared_memory(a_desc.dtype, A_SLOTS, a_desc.layout)
    rest_ring = a_ring
    if C.rest:
        REST_SLOTS: gl.constexpr = [STAGES, C.rest, C.BLOCK_K]
        rest_ring = gl.allocate_shared_memory(a_desc.dtype, REST_SLOTS, rest_desc.layout)
    B_LAYOUT: gl.constexpr = C.b_layout
    b_ring = gl.allocate_shared_memory(b_desc.dtype, B_SLOTS, B_LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    landed = full
    if C.arranged:
        landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(landed.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2 if C.arranged else 1)
        mbarrier.init(empty.index(i), count=C.n_ways)
    exchange = (full, full, full)
    if C.k_ways > 1:
        WAYS: gl.constexpr = C.n_ways
        SUMS: gl.constexpr = [C.consumers - C.n_ways, C.rows, C.BLOCK_M]
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
        buffers = gl.allocate_shared_memory(gl.float32, SUMS, PLAIN)
        left = gl.allocate_shared_memory(gl.int64, [WAYS, 1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [WAYS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(WAYS):
            mbarrier.init(left.index(i), count=C.k_ways - 1)
            mbarrier.init(taken.index(i), count=1)
        exchange = (buffers, left, taken)
    if C.OVERLAPS:
        # The previous launch may write what this one reads, or read what it writes.
        gdc_wait()
        gdc_launch_dependents()
    ring = (a_ring, rest_ring, b_ring)
    turns = full
    if C.in_turn:
        CONSUMERS: gl.constexpr = C.consumers
        turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(CONSUMERS):
            mbarrier.init(turns.index(i), count=1)
    barriers = (full, empty, landed, turns)
    groups = (offs_ptr, table_ptr, G)
    tile_rows = gl.cdiv(M, C.BLOCK_M)
    parts = (partials_ptr, flags_ptr)
    if C.RAGGED:
        groups = (offs_ptr, table_ptr + gl.program_id(0) * G, G)
        tile_rows = store_table(groups, M, C.BLOCK_M, 4)
        if C.ZEROED:
            zero_beyond((out_ptr, stride_om, out_index_ptr), groups, M, N, C.SCATTERED, 4)
    sizes = (M, N, K, tile_rows, groups)
    scales = (b_scale_ptr, stride_bsz, stride_bsn, stride_bsk)
    zeros = (b_zero_ptr, stride_0z, stride_0n, stride_0k)
    out = (out_ptr, stride_om, stride_on)
    bias = (bias_ptr, stride_biasz, stride_bias)
    residual = (residual_ptr, stride_rm, stride_rn)
    target = (out, bias, residual, alpha, (out_index_ptr, out_weights_ptr), partials_ptr)
    grids = (scales, zeros)
    sums = (ring, barriers, sizes, grids, exchange, parts, target)
    loads = (a_desc, rest_desc, b_desc, ring, barriers, sizes)
    # Triton accepts the roles only as a list in the call. In a sum of lists it would unwrap the
    # constants of the second list, and then refuse None.
    if C.consumers == 1:
        gl.warp_specialize(
            [
                (consume, (sums, EPILOGUE, 0, C)),
                (produce, (loads, C)),
                (arrange, (loads, 0, C)),
                (arrange, (loads, 1, C)),
                (arrange, (loads, 2, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    elif C.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (sums, EPILOGUE, 0, C)),
                (consume, (sums, EPILOGUE, 1, C)),
                (produce, (loads, C)),
                (arrange, (loads, 0, C)),
                (arrange, (loads, 1, C)),
                (arrange, (loads, 2, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    elif C.consumers == 3:
        gl.warp_specialize(
            [
                (consume, (sums, EPILOGUE, 0, C)),
                (consume, (sums, EPILOGUE, 1, C)),
                (consume, (sums, EPILOGUE, 2, C)),
                (produce, (loads, C)),
                (arrange, (loads, 0, C)),
                (arrange, (loads, 1, C)),
                (arrange, (loads, 2, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    else:
        gl.warp_specialize(
            [
                (consume, (sums, EPILOGUE, 0, C)),
                (consume, (sums, EPILOGUE, 1, C)),
                (consume, (sums, EPILOGUE, 2, C)),
                (consume, (sums, EPILOGUE, 3, C)),
                (produce, (loads, C)),
                (arrange, (loads, 0, C)),
                (arrange, (loads, 1, C)),
                (arrange, (loads, 2, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
