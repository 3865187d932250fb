"""The consumers of ``triton.mixed_input``: they decode the weight and multiply."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tmm_core.triton import factors
from tmm_triton.packed.decoding import decoded, numbers_at, numbers_of_step, stored_units
from tmm_triton.packed.tile_sums import exchanged, store_part, store_tile, with_part
from tmm_triton.packed.work_units import next_stage, rounds_of, unit_at, work_of


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
    work = work_of(sizes, C)
    for unit in range(work[0], work[1], work[2]):
        tile, along_k = unit_at(unit, work, sizes, C)
        group, m, end, n = tile
        part_of_k, first, last = along_k
        n += NTH * HIGH
        row = n + own % HIGH + own // HIGH * N
        rows = (group, row, part_of_step, n + own % HIGH < N)
        acc = (gl.zeros([ROWS, FIRST], gl.float32, SUMS), 0)  # 0 for an absent rest
        if REST:
            acc = (acc[0], gl.zeros([ROWS, REST], gl.float32, SUMS_OF_REST))
        begin = first + KTH
        at = (0, 0)
        if C.GROUP:
            at = (numbers_at(grids[0], rows, begin, C), 0)
        if C.ZERO:
            at = (at[0], numbers_at(grids[1], rows, begin, C))
        scale, zero, at = numbers_of_step(at, grids, rows, begin, last, K, C)
        scale_1, zero_1, at = numbers_of_step(at, grids, rows, begin + C.k_ways, last, K, C)
        mbarrier.wait(full.index(stage), phase)
        values = decoded(stored_units(b_ring, stage, NTH, C), zero, scale, T, C)
        for step in range(begin, last - C.k_ways, C.k_ways):
            part = _start(values, ring, stage, acc, turns, turn, WHO, C)
            turn ^= 1
            following, phase = next_stage(stage, phase, C)
            mbarrier.wait(full.index(following), phase)
            units = stored_units(b_ring, following, NTH, C)
            scale_2, zero_2, at = numbers_of_step(at, grids, rows, step + 2 * C.k_ways, last, K, C)
            part, held = _ended(part, (values, units), C)
            values, units = held
            mbarrier.arrive(empty.index(stage))
            acc = _added(acc, part, scale, C)
            values = decoded(units, zero_1, scale_1, T, C)
            stage = following
            scale, scale_1, zero_1 = scale_1, scale_2, zero_2
        part = _start(values, ring, stage, acc, turns, turn, WHO, C)
        turn ^= 1
        part, _held = _ended(part, (values,), C)
        mbarrier.arrive(empty.index(stage))
        acc = _added(acc, part, scale, C)
        stage, phase = next_stage(stage, phase, C)
        if begin + (rounds_of(first, last, C) - 1) * C.k_ways >= last:
            mbarrier.wait(full.index(stage), phase)  # a stage without a step
            mbarrier.arrive(empty.index(stage))
            stage, phase = next_stage(stage, phase, C)
        if C.k_ways > 1:
            acc = (exchanged(acc[0], exchange, exchanges, NTH, KTH, C), 0)
            exchanges ^= 1
        if KTH == 0:
            stores = True
            if C.stream_k:
                stores = first == 0
                if not stores:
                    store_part(acc, parts, NTH, C)
                elif last < gl.cdiv(K, C.BLOCK_K):
                    acc = with_part(acc, parts, NTH, C)
            if stores:
                tile = (group, m, end, n)
                store_tile(acc[0], tile, part_of_k, sizes, grids[0], target, EPILOGUE, C)
                if REST:
                    tile = (group, m + FIRST, end, n)
                    store_tile(acc[1], tile, part_of_k, sizes, grids[0], target, EPILOGUE, C)


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
