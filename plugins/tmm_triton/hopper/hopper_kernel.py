"""The kernel of ``triton.warp_specialized``: sets a block up and starts the roles of its warps."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tmm_triton.hopper.consumer import consume
from tmm_triton.hopper.producer import bring_words, prefetch, prime, produce
from tmm_triton.ragged_tiles import store_table, zero_beyond


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
def warp_specialized_kernel(
    a_desc, b_desc, c_desc, r_desc, M, N, K, GROUP_M, BATCH, a_stride_z, b_stride_z,
    out_ptr, out_stride_z, out_stride, bias_ptr, bias_stride,
    residual_ptr, residual_stride_z, residual_stride_m, residual_stride_n,
    alpha, a_scale_ptr, b_scale_ptr, parts_ptr, flags_ptr, TAIL, words_ptr, words_stride,
    ahead_ptr, ahead_stride, port_ptr, port_at, port_stride, port_2_ptr,
    offs_ptr, table_ptr, G, bias_stride_z, out_index_ptr, out_weights_ptr,
    stride_asz, stride_asm, stride_ask, stride_bsz, stride_bsk, stride_bsn,
    EPILOGUE: gl.constexpr, OF: gl.constexpr, OF_2: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = C.num_stages
    # Lists are added because Triton does not parse a starred element.
    a_slots: gl.constexpr = [STAGES * C.a_boxes] + C.a_box  # noqa: RUF005
    b_slots: gl.constexpr = [STAGES * C.b_boxes] + C.b_box  # noqa: RUF005
    a_ring = _ring(words_ptr if C.WORDS == "a" else a_desc, a_slots, C.WORDS == "a")
    b_ring = _ring(words_ptr if C.WORDS == "b" else b_desc, b_slots, C.WORDS == "b")
    if C.POINTERS:
        destination = (out_ptr, (out_stride_z, out_stride), out_index_ptr)
    else:
        c_slots: gl.constexpr = [C.consumers * C.buffers] + c_desc.block_shape  # noqa: RUF005
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
    # With groups, the fields of BATCH and TAIL are replaced below: grouped problems have neither.
    sizes = (M, N, K, GROUP_M, BATCH, TAIL)
    if C.early == "b":
        prime(a_desc, b_desc, strides, ring, barriers, sizes, "b", C)
    elif C.early == "l2":
        prefetch(ahead_ptr, ahead_stride, strides, sizes, C)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=C.a_boxes)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    if C.FETCH:
        STRIPS: gl.constexpr = C.consumers * C.buffers
        loaded = gl.allocate_shared_memory(gl.int64, [STRIPS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STRIPS):
            mbarrier.init(loaded.index(i), count=1)
        residual = (r_desc, residual_stride_z, staging, loaded)
    else:
        residual = (residual_ptr, residual_stride_z, residual_stride_m, residual_stride_n)
    if C.overlaps:
        # The previous launch may run until here. It may write operands of this launch, read its
        # output, or use the same flags and workspace. Nothing above touches such memory, except b
        # if the caller promises that b is not being written. All threads of the first partition
        # wait, and then start the others through a barrier of the block. So no role loads, stores
        # or reads a flag before all earlier launches are complete. Every block waits, so this grid
        # ends after the previous one: a launch that waits for this grid waits for all before it.
        gdc_wait()
    if C.RAGGED == "m":
        groups = (offs_ptr, table_ptr + gl.program_id(0) * G, G)
        sizes = (M, N, K, GROUP_M, store_table(groups, M, C.BLOCK_M, C.num_warps), groups)
    elif C.RAGGED == "k":
        sizes = (M, N, K, GROUP_M, G, (offs_ptr, table_ptr, G))
    prime(a_desc, b_desc, strides, ring, barriers, sizes, "a" if C.early == "b" else "ab", C)
    if C.overlaps:
        # From here on the next launch's blocks start as SMs become free. This comes after the wait:
        # the next launch's early part must not overlap the previous launch.
        gdc_launch_dependents()
    if C.ZEROED:
        out = (out_ptr, out_stride, out_index_ptr)
        zero_beyond(out, sizes[5], M, N, C.SCATTERED, C.num_warps)
    bias = (bias_ptr, bias_stride, bias_stride_z)
    factors = (alpha, a_scale_ptr, b_scale_ptr)
    port = (port_ptr, port_at, port_stride, port_2_ptr)
    grids = (
        (a_scale_ptr, stride_asz, stride_asm, stride_ask),
        (b_scale_ptr, stride_bsz, stride_bsn, stride_bsk),
    )
    target = (destination, bias, residual, factors, port, out_weights_ptr, grids)
    parts = (parts_ptr, flags_ptr)
    loads = (a_desc, b_desc, strides, ring, barriers, sizes)
    sums = (ring, barriers, turn, target, parts, sizes)
    bring = ((words_ptr, words_stride), a_ring if C.WORDS == "a" else b_ring, barriers, sizes)
    # Triton accepts the roles only as a list in the call. In a sum of lists it would unwrap the
    # constants of the second list, and then refuse None.
    if C.consumers == 1 and C.WORDS is None:
        gl.warp_specialize(
            [(consume, (sums, EPILOGUE, OF, OF_2, 0, C)), (produce, (loads, C))],
            C.worker_warps,
            C.worker_registers,
        )
    elif C.consumers == 1:
        gl.warp_specialize(
            [
                (consume, (sums, EPILOGUE, OF, OF_2, 0, C)),
                (produce, (loads, C)),
                (bring_words, (bring, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    elif C.consumers == 2 and C.WORDS is None:
        gl.warp_specialize(
            [
                (consume, (sums, EPILOGUE, OF, OF_2, 0, C)),
                (consume, (sums, EPILOGUE, OF, OF_2, 1, C)),
                (produce, (loads, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    elif C.consumers == 2:
        gl.warp_specialize(
            [
                (consume, (sums, EPILOGUE, OF, OF_2, 0, C)),
                (consume, (sums, EPILOGUE, OF, OF_2, 1, C)),
                (produce, (loads, C)),
                (bring_words, (bring, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
    else:
        gl.warp_specialize(
            [
                (consume, (sums, EPILOGUE, OF, OF_2, 0, C)),
                (consume, (sums, EPILOGUE, OF, OF_2, 1, C)),
                (consume, (sums, EPILOGUE, OF, OF_2, 2, C)),
                (produce, (loads, C)),
            ],
            C.worker_warps,
            C.worker_registers,
        )
