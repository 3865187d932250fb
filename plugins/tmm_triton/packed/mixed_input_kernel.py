"""The kernel of ``triton.mixed_input``: its block, its producer, and the warps that rearrange
``a``. :mod:`tmm_triton.packed.mixed_input` describes it.
"""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tmm_core.triton import releases
from tmm_triton.packed.mixed_input_consumer import consume
from tmm_triton.packed.work_units import range_of_k, rounds_of, stage_of, unit_at, work_of
from tmm_triton.ragged_tiles import store_table, zero_beyond

async_load = releases.async_load


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
    work = work_of(sizes, C)
    for unit in range(work[0], work[1], work[2]):
        tile, along_k = unit_at(unit, work, sizes, C)
        group, m, _end, n = tile
        _part, first, last = along_k
        for step in range(first, first + rounds_of(first, last, C) * C.k_ways):
            stage, phase = stage_of(position, C)
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

    A stage belongs to the same warp in every round, for the reason that :func:`rounds_of` gives.
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
        work = work_of(sizes, C)
        for unit in range(work[0], work[1], work[2]):
            _part, first, last, _tile = range_of_k(unit, work, sizes, C)
            positions += rounds_of(first, last, C) * C.k_ways
        for position in range(positions):
            stage, phase = stage_of(position, C)
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
