"""Hopper's own way to multiply: one warp moves tiles by TMA, the others only multiply.

A kernel whose warps both load and multiply stops multiplying at every tile's end, while it
rounds and stores. Here the block's warps have roles, and it stays for many tiles:

* The producer, one warp with 24 registers a thread, walks all k-steps of all the block's
  tiles and keeps a ring of ``num_stages`` shared-memory stages full. It never waits for an
  epilogue, only for a free stage.
* Consumers, warpgroups with up to 240 registers a thread, hold the accumulators and issue
  ``wgmma`` on whatever stage is full. ``cooperative``: all share every tile, each owning
  some of its rows; they are not in step, so one multiplies while another stores.
  ``pingpong``: two take whole tiles in turn, the epilogue of one under the main loop of the
  other; it wins where K is short (8192×4096×512 with silu on an H200: 1.54 × eager cuBLAS,
  cooperative 1.25).

Two mbarriers a stage carry all of this. ``full`` flips when the stage's bytes have landed,
``empty`` when every consumer of it is done reading. A wait sees only a parity, and passes
where the barrier is two phases behind the one waited for. The producer and cooperating
consumers wait for every phase in turn and never are. A ping-pong consumer leaves out the
other's k-steps: ``turn`` holds it until the other has seen its last stage full, when all
phases but the one it will wait for are over.

A finished tile goes out strip by strip, by TMA where that can write it, else by pointers.

Written in Gluon, which leaves layouts, barriers and roles to the author; plain Triton does
not specialise warps on Hopper.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
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

from tmm_core import Config, Kernel, Launcher, Operand, Problem, Traits
from tmm_core.triton import Launch, device_function, epilogues, pointer
from tmm_triton.kernel import missing_toolchain

#: Releases whose Gluon this is written for: an experimental API, where a later release may
#: mean something else by the same names.
_KNOWN_RELEASES = ("3.6.", "3.7.")
#: Bytes that TMA wants base and leading stride to be multiples of.
_ALIGNMENT = 16
#: Gluon's names of what operands, outputs and what is added to them may consist of.
_GLUON = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}
_WIDE = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class WarpSpecializedConfig(Config):
    """A tile and how the block's warps share it.

    Args:
        BLOCK_M, BLOCK_N, BLOCK_K: The tile, N of the output (a gated problem reads twice that).
        GROUP_M: Tile rows that are walked together.
        num_stages: Stages of the ring.
        schedule: ``"cooperative"`` or ``"pingpong"``.
        consumers: Two in turn, or one to three sharing the tile's rows.
        num_warps: Warps of one consumer.
        subtiles: Column strips in which a tile is stored; more of them need less staging.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    num_stages: int
    schedule: str
    consumers: int
    num_warps: int
    subtiles: int

    def __post_init__(self) -> None:
        if self.schedule not in ("cooperative", "pingpong"):
            raise ValueError(f"schedule must be cooperative or pingpong, got {self.schedule!r}")
        if self.consumers not in ((2,) if self.pingpong else (1, 2, 3)):
            raise ValueError(f"{self.schedule}: {self.consumers} consumers")
        if self.num_warps not in (4, 8) or self.consumers * self.num_warps > 12:
            raise ValueError(f"{self.consumers} consumers of {self.num_warps} warps")
        # One wgmma covers 64 rows, 16 of each of four warps.
        if self.rows * (1 if self.pingpong else self.consumers) != self.BLOCK_M:
            raise ValueError(f"BLOCK_M {self.BLOCK_M} does not divide among the consumers")
        if self.rows not in (64, 128, 256) or self.rows % (16 * self.num_warps):
            raise ValueError(f"a consumer of {self.num_warps} warps cannot own {self.rows} rows")
        if self.BLOCK_N not in (32, 64, 128, 256) or self.BLOCK_K not in (32, 64, 128):
            raise ValueError(f"tile N×K {self.BLOCK_N}×{self.BLOCK_K}")
        if self.accumulators > 128:
            raise ValueError(f"{self.accumulators} accumulator registers a thread exceed 128")
        # With one stage the release of a stage waits for the next, which waits for it.
        if not 2 <= self.num_stages <= 16 or not 1 <= self.GROUP_M <= 1024:
            raise ValueError(f"num_stages {self.num_stages}, GROUP_M {self.GROUP_M}")
        if self.subtiles not in (1, 2, 4, 8) or self.BLOCK_N // self.subtiles < 16:
            raise ValueError(f"{self.subtiles} subtiles of {self.BLOCK_N} columns")

    @property
    def pingpong(self) -> bool:
        return self.schedule == "pingpong"

    @property
    def rows(self) -> int:
        """Rows of the tile that one consumer owns."""
        return self.BLOCK_M if self.pingpong else self.BLOCK_M // self.consumers

    @property
    def accumulators(self) -> int:
        """fp32 accumulators of a thread, per product (a gated problem has two)."""
        return self.rows * self.BLOCK_N // (32 * self.num_warps)

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of shared memory that a block takes."""
        c = _Constants.of(problem, self)
        stage = c.IN_BYTES * (c.BLOCK_M + c.b_boxes * c.BLOCK_N) * c.BLOCK_K
        staging = c.CONSUMERS * c.buffers * c.ROWS * c.BLOCK_N // c.SUBTILES
        return c.STAGES * stage + staging * problem.out.dtype.itemsize + _SHARED_OVERHEAD


#: mbarriers, and what Triton keeps to start the partitions: 250 bytes at most over all
#: configs on both releases.
_SHARED_OVERHEAD = 512


@dataclass(frozen=True)
class _Constants:
    """What one compiled kernel is specialised on, besides the types of its arguments."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    CONSUMERS: int
    WARPS: int
    ROWS: int
    SUBTILES: int
    PINGPONG: bool
    #: Operands whose columns, not rows, are contiguous.
    A_COL: bool
    B_COL: bool
    GATED: bool
    SCALED: bool
    #: Kinds of the scales of 8-bit operands.
    SCALE_A: str | None
    SCALE_B: str | None
    #: Bytes of an element of the operands.
    IN_BYTES: int
    BIAS: bool
    RESIDUAL: bool
    #: The output is stored through pointers, element by element.
    POINTERS: bool

    @classmethod
    def of(cls, problem: Problem, config: WarpSpecializedConfig) -> _Constants:
        return cls(
            BLOCK_M=config.BLOCK_M,
            BLOCK_N=config.BLOCK_N,
            BLOCK_K=config.BLOCK_K,
            STAGES=config.num_stages,
            CONSUMERS=config.consumers,
            WARPS=config.num_warps,
            ROWS=config.rows,
            SUBTILES=config.subtiles,
            PINGPONG=config.pingpong,
            A_COL=problem.a.layout == "col",
            B_COL=problem.b.layout == "col",
            GATED=problem.gated,
            SCALED=problem.scaled,
            SCALE_A=problem.scale_a,
            SCALE_B=problem.scale_b,
            IN_BYTES=problem.a.dtype.itemsize,
            BIAS=problem.bias is not None,
            RESIDUAL=problem.residual is not None,
            POINTERS=_stored_by_pointers(problem),
        )

    @property
    def a_boxes(self) -> int:
        """TMA boxes of A in one stage, one for each consumer that shares the tile."""
        return self.BLOCK_M // self.ROWS

    @property
    def b_boxes(self) -> int:
        """TMA boxes of B in one stage."""
        return 2 if self.GATED else 1

    @property
    def promoted(self) -> bool:
        """Whether each k-step is summed apart, and the sums in fp32 (:func:`_multiply`)."""
        return self.IN_BYTES == 1

    @property
    def buffers(self) -> int:
        """Staging buffers of one consumer: with two, one is filled while the other is sent."""
        return min(2, self.SUBTILES)

    @property
    def mma_n(self) -> int:
        """Columns of one wgmma. ptxas refuses one with 128 accumulators a thread where the
        block starts with 128 registers a thread (512 threads), although by then the
        consumers have 160."""
        return min(self.BLOCK_N, 128 if self.CONSUMERS == 3 else 256)

    @property
    def producer_registers(self) -> int:
        # The least that setmaxnreg takes.
        return 24

    @property
    def consumer_registers(self) -> int:
        """An equal part of the SM's 65536 registers, less the producer's warpgroup's; Triton
        gives the first consumer, its default partition, what the others leave."""
        groups = self.CONSUMERS * self.WARPS // 4
        each = 65536 // (128 * (groups + 1)) // 8 * 8
        spared = (groups + 1) * each - self.producer_registers
        return min(240, spared // groups // 8 * 8)


@jit
def _tile(index, sizes, C: gl.constexpr):
    """First row and column of a tile, in bands of GROUP_M tile rows walked column by column,
    so that the blocks running at one time share operands in L2."""
    M, N, _, GROUP_M = sizes
    rows = gl.cdiv(M, C.BLOCK_M)
    band = GROUP_M * gl.cdiv(N, C.BLOCK_N)
    first = index // band * GROUP_M
    height = gl.minimum(rows - first, GROUP_M)
    within = index % band
    return (first + within % height) * C.BLOCK_M, within // height * C.BLOCK_N


@jit
def _tiles(sizes, C: gl.constexpr):
    M, N, _, _ = sizes
    return gl.cdiv(M, C.BLOCK_M) * gl.cdiv(N, C.BLOCK_N)


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
def _produce(a_desc, b_desc, ring, barriers, sizes, C: gl.constexpr):
    a_ring, b_ring = ring
    full, empty = barriers
    _, N, K, _ = sizes
    A_BOXES: gl.constexpr = C.a_boxes
    B_BOXES: gl.constexpr = C.b_boxes
    BYTES: gl.constexpr = C.IN_BYTES * (C.BLOCK_M + B_BOXES * C.BLOCK_N) * C.BLOCK_K
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), _tiles(sizes, C), gl.num_programs(0)):
        row, column = _tile(tile, sizes, C)
        for k in range(0, K, C.BLOCK_K):
            # A fresh barrier counts as having completed phase −1: the first round passes.
            mbarrier.wait(empty.index(stage), phase ^ 1)
            ready = full.index(stage)
            # Whole boxes count, also where TMA fills out-of-range elements with zeros.
            mbarrier.expect(ready, BYTES)
            for part in gl.static_range(A_BOXES):
                at = row + part * C.ROWS
                where = [k, at] if C.A_COL else [at, k]
                slot = a_ring.index(stage * A_BOXES + part)
                async_copy_global_to_shared(a_desc, where, ready, slot)
            for part in gl.static_range(B_BOXES):
                at = column + part * N
                where = [at, k] if C.B_COL else [k, at]
                slot = b_ring.index(stage * B_BOXES + part)
                async_copy_global_to_shared(b_desc, where, ready, slot)
            stage, phase = _next(stage, phase, C)


@jit
def _strips(x, STRIPS: gl.constexpr):
    """``x[M, N]`` as a tuple of [M, N / STRIPS]; every element stays in its register."""
    if STRIPS == 1:
        return (x,)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()
        return _strips(left, STRIPS // 2) + _strips(right, STRIPS // 2)


@jit
def _scaled(z, factors, row, column, M, end, LAYOUT: gl.constexpr, C: gl.constexpr):
    """``alpha · scale_a · scale_b · z``, each where the problem has it."""
    alpha, scale_a, scale_b = factors
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
def _with_bias(z, bias, column, end, LAYOUT: gl.constexpr):
    pointer, stride = bias
    columns = column + gl.arange(0, z.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    values = gl.load(pointer + columns * stride, mask=columns < end, other=0.0)
    return z + gl.expand_dims(values.to(gl.float32), 0)


@jit
def _with_residual(z, residual, row, column, M, N, LAYOUT: gl.constexpr):
    pointer, stride_m, stride_n = residual
    rows = row + gl.arange(0, z.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, z.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    down = gl.expand_dims(rows * stride_m, 1)
    across = gl.expand_dims(columns * stride_n, 0)
    inside = gl.expand_dims(rows < M, 1) & gl.expand_dims(columns < N, 0)
    return z + gl.load(pointer + down + across, mask=inside, other=0.0).to(gl.float32)


@jit
def _scatter(z, row, column, target, M, N, WARPS: gl.constexpr):
    """Store by pointers: rows that start anywhere take no access wider than an element."""
    pointer, stride = target
    ACROSS: gl.constexpr = min(32, z.shape[1])
    # A warp's lanes side by side in one row, so that each of its stores is one run of bytes.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    z = gl.convert_layout(z.to(pointer.dtype.element_ty), LAYOUT)
    rows = row + gl.arange(0, z.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, z.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    inside = gl.expand_dims(rows < M, 1) & gl.expand_dims(columns < N, 0)
    across = gl.expand_dims(columns, 0)
    gl.store(pointer + gl.expand_dims(rows * stride, 1) + across, z, mask=inside)


@jit
def _store(
    z, up, row, column, target, sizes,
    EPILOGUE: gl.constexpr, WHO: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Finish the fp32 accumulator (two, gate and up, where gated), round it and send it off
    strip by strip, through one or two staging buffers."""
    destination, bias, residual, factors = target
    M, N, _, _ = sizes
    SUBTILES: gl.constexpr = C.SUBTILES
    WIDTH: gl.constexpr = C.BLOCK_N // SUBTILES
    BUFFERS: gl.constexpr = C.buffers
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[C.WARPS, 1], instr_shape=[16, WIDTH, 16]
    )
    strips = _strips(z, SUBTILES)
    if C.GATED:
        up_strips = _strips(up, SUBTILES)
    for i in gl.static_range(SUBTILES):
        at = column + i * WIDTH
        x = gl.convert_layout(strips[i], LAYOUT)
        x = _scaled(x, factors, row, at, M, 2 * N if C.GATED else N, LAYOUT, C)
        if C.BIAS:
            x = _with_bias(x, bias, at, N, LAYOUT)
        if C.GATED:
            y = gl.convert_layout(up_strips[i], LAYOUT)
            y = _scaled(y, factors, row, at + N, M, 2 * N, LAYOUT, C)
            if C.BIAS:
                y = _with_bias(y, bias, at + N, 2 * N, LAYOUT)
            x = EPILOGUE(x, y)
        else:
            x = EPILOGUE(x)
        if C.RESIDUAL:
            x = _with_residual(x, residual, row, at, M, N, LAYOUT)
        if C.POINTERS:
            _scatter(x, row, at, destination, M, N, C.WARPS)
        else:
            c_desc, staging = destination
            buffer = staging.index(WHO * BUFFERS + i % BUFFERS)
            # The store that last used this buffer has read it.
            store_wait(BUFFERS - 1)
            buffer.store(x.to(c_desc.dtype))
            fence_async_shared()
            async_copy_shared_to_global(c_desc, [row, at], buffer)


@jit
def _multiply(ring, stage, acc, up, FIRST: gl.constexpr, WHO: gl.constexpr, C: gl.constexpr):
    """Start this stage's products and wait for those of the stage before. Sums of 8-bit floats
    have some 14 bits in the tensor cores: those of one stage are waited for, and added in fp32
    while the other consumers multiply."""
    a_ring, b_ring = ring
    a = a_ring.index(stage * C.a_boxes + WHO % C.a_boxes)
    b = b_ring.index(stage * C.b_boxes)
    if C.A_COL:
        a = a.permute((1, 0))
    if C.B_COL:
        b = b.permute((1, 0))
    if C.promoted:
        part = warpgroup_mma(a, b, acc, use_acc=False, is_async=True)
        if C.GATED:
            b = b_ring.index(stage * C.b_boxes + 1).permute((1, 0))
            part_up = warpgroup_mma(a, b, up, use_acc=False, is_async=True)
            part, part_up = warpgroup_mma_wait(0, deps=(part, part_up))
            up = part_up if FIRST else up + part_up
        else:
            part = warpgroup_mma_wait(0, deps=(part,))
        return part if FIRST else acc + part, up
    # Not accumulating the first time spares clearing the registers.
    acc = warpgroup_mma(a, b, acc, use_acc=not FIRST, is_async=True)
    if C.GATED:
        b = b_ring.index(stage * C.b_boxes + 1)
        if C.B_COL:
            b = b.permute((1, 0))
        up = warpgroup_mma(a, b, up, use_acc=not FIRST, is_async=True)
        acc, up = warpgroup_mma_wait(2, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(1, deps=(acc,))
    return acc, up


@jit
def _consume(
    ring, barriers, turn, target, sizes,
    EPILOGUE: gl.constexpr, WHO: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    full, empty = barriers
    K = sizes[2]
    ROWS: gl.constexpr = C.ROWS
    BLOCK_N: gl.constexpr = C.BLOCK_N
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[C.WARPS, 1],
        instr_shape=[16, C.mma_n, 32 // C.IN_BYTES],
    )
    k_steps = gl.cdiv(K, C.BLOCK_K)
    stage = 0
    phase = 0
    turn_phase = 1 - WHO
    first = gl.program_id(0)
    step = gl.num_programs(0)
    if C.PINGPONG:
        stage, phase = _skip(stage, phase, WHO * k_steps, C)
        first += WHO * step
        step *= 2
    for tile in range(first, _tiles(sizes, C), step):
        row, column = _tile(tile, sizes, C)
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
        up = acc
        if C.PINGPONG:
            mbarrier.wait(turn.index(WHO), turn_phase)
            turn_phase ^= 1
        mbarrier.wait(full.index(stage), phase)
        acc, up = _multiply(ring, stage, acc, up, True, WHO, C)
        reading = stage
        stage, phase = _next(stage, phase, C)
        for _ in range(1, k_steps):
            mbarrier.wait(full.index(stage), phase)
            acc, up = _multiply(ring, stage, acc, up, False, WHO, C)
            mbarrier.arrive(empty.index(reading))
            reading = stage
            stage, phase = _next(stage, phase, C)
        if C.PINGPONG:
            mbarrier.arrive(turn.index(1 - WHO))
            stage, phase = _skip(stage, phase, k_steps, C)
        if C.GATED:
            acc, up = warpgroup_mma_wait(0, deps=(acc, up))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(reading))
        own = row if C.PINGPONG else row + WHO * C.ROWS
        _store(acc, up, own, column, target, sizes, EPILOGUE, WHO, C)
    store_wait(0)


@jit
def _kernel(
    a_desc, b_desc, c_desc, out_ptr, out_stride, M, N, K, GROUP_M, bias_ptr, bias_stride,
    residual_ptr, residual_stride_m, residual_stride_n, alpha, scale_a_ptr, scale_b_ptr,
    EPILOGUE: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = C.STAGES
    # Lists are added because Triton does not parse a starred element.
    a_slots: gl.constexpr = [STAGES * C.a_boxes] + a_desc.block_shape  # noqa: RUF005
    b_slots: gl.constexpr = [STAGES * C.b_boxes] + b_desc.block_shape  # noqa: RUF005
    a_ring = gl.allocate_shared_memory(a_desc.dtype, a_slots, a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, b_slots, b_desc.layout)
    if C.POINTERS:
        destination = (out_ptr, out_stride)
    else:
        c_slots: gl.constexpr = [C.CONSUMERS * C.buffers] + c_desc.block_shape  # noqa: RUF005
        staging = gl.allocate_shared_memory(c_desc.dtype, c_slots, c_desc.layout)
        destination = (c_desc, staging)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=C.a_boxes)
    for i in gl.static_range(2):
        mbarrier.init(turn.index(i), count=1)
    ring = (a_ring, b_ring)
    barriers = (full, empty)
    bias = (bias_ptr, bias_stride)
    residual = (residual_ptr, residual_stride_m, residual_stride_n)
    target = (destination, bias, residual, (alpha, scale_a_ptr, scale_b_ptr))
    sizes = (M, N, K, GROUP_M)
    if C.CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (ring, barriers, turn, target, sizes, EPILOGUE, 0, C)),
                (_produce, (a_desc, b_desc, ring, barriers, sizes, C)),
            ],
            [1],
            [C.producer_registers],
        )
    elif C.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (ring, barriers, turn, target, sizes, EPILOGUE, 0, C)),
                (_consume, (ring, barriers, turn, target, sizes, EPILOGUE, 1, C)),
                (_produce, (a_desc, b_desc, ring, barriers, sizes, C)),
            ],
            [C.WARPS, 1],
            [C.consumer_registers, C.producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (ring, barriers, turn, target, sizes, EPILOGUE, 0, C)),
                (_consume, (ring, barriers, turn, target, sizes, EPILOGUE, 1, C)),
                (_consume, (ring, barriers, turn, target, sizes, EPILOGUE, 2, C)),
                (_produce, (a_desc, b_desc, ring, barriers, sizes, C)),
            ],
            [C.WARPS, C.WARPS, 1],
            [C.consumer_registers, C.consumer_registers, C.producer_registers],
        )


#: ``(schedule, consumers, num_warps, BLOCK_M, BLOCK_N, BLOCK_K)``, N counting both halves of
#: a gated problem's.
_TILES = (
    # 128×256 is what it takes to multiply at full rate on what L2 delivers; 192×256 asks a
    # quarter less of it, and fits other sizes into one wave (2304³: 108 tiles, not 162).
    ("cooperative", 2, 4, 128, 256, 64),
    ("cooperative", 2, 4, 256, 128, 64),
    ("cooperative", 3, 4, 192, 256, 64),
    # One partition of two warpgroups, in step.
    ("cooperative", 1, 8, 128, 256, 64),
    ("cooperative", 1, 8, 256, 128, 64),
    # Where K is short, the epilogue hides behind the other consumer's main loop.
    ("pingpong", 2, 4, 128, 128, 64),
    ("pingpong", 2, 4, 64, 256, 64),
    # Less than a wave of the above.
    ("cooperative", 3, 4, 192, 128, 64),
    ("cooperative", 2, 4, 128, 128, 64),
    ("cooperative", 2, 4, 128, 128, 128),
    ("pingpong", 2, 4, 64, 128, 64),
    ("cooperative", 2, 4, 128, 64, 64),
    ("cooperative", 2, 4, 128, 64, 128),
    ("pingpong", 2, 4, 64, 64, 128),
)
#: Of 8-bit operands, whose stages are summed in registers of their own: as many accumulators
#: again. The consumers must not be in step, nor take turns.
_FP8_TILES = (
    ("cooperative", 3, 4, 192, 128, 128),
    ("cooperative", 2, 4, 128, 128, 128),
    ("cooperative", 3, 4, 192, 64, 128),
    ("cooperative", 2, 4, 128, 64, 128),
)
#: How many of them, and configs in all, are proposed for one problem.
_TILES_TRIED, _CONFIGS_TRIED = 9, 20
#: Stages of 24 KB that cover the latency of memory at full rate; more only fill later.
_STAGES_WANTED = 8

#: FLOP per µs of an SM, as far as power lets the tensor cores of an H200 run (800 TFLOP/s
#: in all), and bytes per µs it gets from L2: 8192×4096×512 in 128×128 tiles took 95e3.
_SM_FLOPS, _SM_BYTES = 800e6 / 132, 100e3
#: Bytes per µs that an SM's share of memory delivers (a copy: 4.27 TB/s).
_SM_MEMORY_BYTES = 4.2e6 / 132
#: µs of a launch with its first loads; and of rounding and storing 128×256 elements.
_LAUNCH_US, _EPILOGUE_US = 4.5, 0.9


class WarpSpecialized(Kernel[WarpSpecializedConfig]):
    """Persistent TMA + ``wgmma`` with specialised warps, for 16-bit operands on Hopper."""

    name = "triton.warp_specialized"
    # A row's sums are formed in k order whatever the tile it falls in.
    traits = Traits(deterministic=True, batch_invariant=True, capture_safe=True)
    config_type = WarpSpecializedConfig
    shares = (epilogues,)

    def reasons_against(self, problem: Problem) -> list[str]:
        reasons = []
        device = problem.device
        if device.interpreted:
            reasons.append("Triton's interpreter does not run Gluon")
        elif device.type != "cuda" or device.capability != (9, 0):
            reasons.append("needs a Hopper GPU (compute capability 9.0)")
        else:
            reasons += missing_toolchain()
        if not triton.__version__.startswith(_KNOWN_RELEASES):
            known = " and ".join(release + "x" for release in _KNOWN_RELEASES)
            reasons.append(f"is written for the Gluon of Triton {known}, not {triton.__version__}")
        if problem.fp8:
            if (problem.a.layout, problem.b.layout) != ("row", "col"):
                reasons.append(
                    "wgmma takes 8-bit operands along K only: a row-major, b column-major"
                )
        elif problem.a.dtype != problem.b.dtype or problem.a.dtype.itemsize != 2:
            reasons.append(
                f"multiplies floats of 16 or 8 bits, not {problem.a.dtype} @ {problem.b.dtype}"
            )
        residual = problem.residual.dtype if problem.residual else None
        for what, dtype in (
            ("output", problem.out.dtype),
            ("bias", problem.bias),
            ("residual", residual),
        ):
            if dtype is not None and dtype not in _WIDE:
                reasons.append(f"{what} is {dtype}, not a float of 16 or 32 bits")
        if min(problem.m, problem.n, problem.k) < 1:
            reasons.append("has an empty dimension")
        if problem.batch != 1:
            reasons.append("is not batched")
        if not problem.epilogue.fusable:
            reasons.append(f"epilogue {problem.epilogue} has no device function")
        for name, operand in (("a", problem.a), ("b", problem.b)):
            if operand.layout == "strided":
                reasons.append(f"{name} has no contiguous dimension (TMA)")
            elif not operand.aligned:
                reasons.append(f"{name} is not {_ALIGNMENT}-byte aligned (TMA)")
        if problem.out.layout != "row":
            reasons.append("output is not row-major")
        if problem.gated and problem.b.layout == "row" and 2 * problem.n % _ALIGNMENT:
            reasons.append(f"the up half of b does not start {_ALIGNMENT}-byte aligned (TMA)")
        return reasons

    def arithmetic(self, problem: Problem, config: WarpSpecializedConfig) -> object:
        # Every wgmma adds 16 products along k to its accumulators, whatever their shape.
        return "k16"

    def configs(self, problem: Problem) -> Iterable[WarpSpecializedConfig]:
        tiles = _FP8_TILES if problem.fp8 else _TILES
        fitting = filter(None, (_fitted(problem, tile) for tile in tiles))
        ranked = sorted(fitting, key=lambda variants: self.estimate_us(problem, variants[0]))
        proposed = [
            [
                replace(config, GROUP_M=group)
                for config in variants
                for group in _groups(problem, config)
            ]
            for variants in ranked[:_TILES_TRIED]
        ]
        # Every tile once before any tile's variants.
        turns = itertools.chain.from_iterable(itertools.zip_longest(*proposed))
        yield from itertools.islice(filter(None, turns), _CONFIGS_TRIED)

    def default_config(self, problem: Problem) -> WarpSpecializedConfig:
        return next(iter(self.configs(problem)))

    def estimate_us(self, problem: Problem, config: WarpSpecializedConfig) -> float:
        """Waves of whole tiles, each as long as its multiplying or its loading takes."""
        sms = problem.device.sm_count
        width = config.BLOCK_N * (2 if problem.gated else 1)
        depth = -(-problem.k // config.BLOCK_K) * config.BLOCK_K
        itemsize = problem.a.dtype.itemsize
        load = itemsize * (config.BLOCK_M + width) * depth / _SM_BYTES
        multiply = itemsize * config.BLOCK_M * width * depth / _SM_FLOPS
        # Loads under the multiplying cost power, and with it clocks: the larger tile wins ties.
        loop = max(multiply, load) + load / 20
        epilogue = _EPILOGUE_US * config.BLOCK_M * config.BLOCK_N / (128 * 256)
        waves = -(-_tile_count(problem, config) // sms)
        if config.pingpong and waves > 1:
            busy = waves * max(loop, epilogue / 2) + epilogue
        elif config.pingpong:
            # The other consumer has nothing to do, and one alone leaves gaps.
            busy = 1.1 * loop + epilogue
        else:
            # Consumers out of step hide some of it.
            exposed = epilogue if config.consumers == 1 else 0.6 * epilogue
            busy = waves * (loop + exposed)
        return _LAUNCH_US + max(busy, problem.bytes / (_SM_MEMORY_BYTES * sms))

    def specialize(self, problem: Problem, config: WarpSpecializedConfig) -> Specialization:
        """What :meth:`bind` compiles; also for a GPU that is not there."""
        rows, width = config.rows, config.BLOCK_N // config.subtiles
        types = {
            "a_desc": _descriptor_type(problem.a, rows, config.BLOCK_K),
            "b_desc": _descriptor_type(problem.b, config.BLOCK_K, config.BLOCK_N),
            "M": "i32",
            "N": "i32",
            "K": "i32",
            # Not a constant: tuning it compiles nothing.
            "GROUP_M": "i32",
        }
        constants: dict[str, Any] = {
            "EPILOGUE": device_function(problem.epilogue),
            "C": _Constants.of(problem, config),
        }
        divisible = {}
        if _stored_by_pointers(problem):
            types["out_ptr"] = pointer(problem.out.dtype)
            types["out_stride"] = "i64" if problem.out.wide or problem.m == 1 else "i32"
        else:
            types["c_desc"] = _descriptor_type(problem.out, rows, width)
        if problem.bias is not None:
            types |= {"bias_ptr": pointer(problem.bias), "bias_stride": "i64"}
        if problem.residual is not None:
            # A dimension of one element may have any stride.
            wide = problem.residual.wide or 1 in (problem.m, problem.n)
            stride = "i64" if wide else "i32"
            types |= {"residual_ptr": pointer(problem.residual.dtype)}
            types |= {"residual_stride_m": stride, "residual_stride_n": stride}
            if problem.residual.layout == "row":
                # Neighbours are adjacent: two are loaded at once where pairs are aligned.
                del types["residual_stride_n"]
                constants["residual_stride_n"] = 1
                if problem.residual.aligned and problem.n % 8 == 0:
                    divisible = {"residual_ptr": 16, "residual_stride_m": 4, "N": 8}
        if problem.scaled:
            types["alpha"] = "fp32"
        types |= {"scale_a_ptr": "*fp32"} if problem.scale_a else {}
        types |= {"scale_b_ptr": "*fp32"} if problem.scale_b else {}
        constants |= {name: None for name in _kernel.arg_names if name not in types | constants}
        return Specialization(types, constants, divisible, config.num_warps)

    def bind(self, problem: Problem, config: WarpSpecializedConfig) -> Launcher:
        of = self.specialize(problem, config)
        launch = Launch(
            _kernel,
            of.types,
            of.constants,
            divisible=of.divisible,
            device=torch.device(problem.device.type),
            num_warps=of.num_warps,
        )
        shape, dtype = (problem.m, problem.n), problem.out.dtype
        rows, width = config.rows, config.BLOCK_N // config.subtiles
        a_map = launch.tensor_map("a_desc", _describer(problem.a, rows, config.BLOCK_K))
        b_map = launch.tensor_map("b_desc", _describer(problem.b, config.BLOCK_K, config.BLOCK_N))
        c_map = launch.tensor_map("c_desc", _describer(problem.out, rows, width))
        pointers = "out_ptr" in of.types
        sizes = (problem.m, problem.n, problem.k, config.GROUP_M)
        tiles = _tile_count(problem, config)
        # As many blocks as the waves need, not as there are SMs: 512 tiles take 132 blocks no
        # fewer waves than 128, which run at a rectangle of tiles and leave power to clocks.
        blocks = -(-tiles // -(-tiles // problem.device.sm_count))
        call = launch.call
        strides = [d for d in (0, 1) if f"residual_stride_{'mn'[d]}" in of.types]
        scaled = problem.scaled

        def run(
            a: torch.Tensor,
            b: torch.Tensor,
            bias: torch.Tensor | None,
            residual: torch.Tensor | None,
            alpha: float,
            out: torch.Tensor | None,
            *scales: torch.Tensor | None,
        ) -> torch.Tensor:
            if out is None:
                out = a.new_empty(shape, dtype=dtype)
            args: tuple[Any, ...] = (a_map(a), b_map(b))
            args += (out.data_ptr(), out.stride(0)) if pointers else (c_map(out),)
            args += sizes
            if bias is not None:
                args += (bias.data_ptr(), bias.stride(0))
            if residual is not None:
                args += (residual.data_ptr(), *map(residual.stride, strides))
            if scaled:
                args += (alpha,)
            for scale in scales:
                args += () if scale is None else (scale.data_ptr(),)
            call(blocks, 1, 1, *args)
            return out

        return run


@dataclass(frozen=True)
class Specialization:
    """The kernel's arguments as :func:`tmm_core.triton.source` takes them, and its warps."""

    types: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: Mapping[str, int]
    num_warps: int


def _fitted(
    problem: Problem, tile: tuple[str, int, int, int, int, int]
) -> list[WarpSpecializedConfig]:
    """The tile with as many stages as fit shared memory, none if fewer than two do.

    Stored in strips of 128 bytes, as wide as TMA swizzles, and then in narrower ones where
    their smaller staging buys a stage.
    """
    schedule, consumers, num_warps, block_m, block_n, block_k = tile
    if consumers == 3 and block_n == 256 and _stored_by_pointers(problem):
        # 160 registers a thread hold its accumulators, but not the addresses of 16 rows too.
        return []
    block_n //= 2 if problem.gated else 1
    variants: list[WarpSpecializedConfig] = []
    # 160 registers a thread do not hold two sums and the scales of 64 columns.
    widths = (64,) if problem.fp8 and consumers == 3 else (128, 64)
    for width in widths:
        config = WarpSpecializedConfig(
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP_M=1,
            num_stages=2,
            schedule=schedule,
            consumers=consumers,
            num_warps=num_warps,
            subtiles=min(8, max(1, block_n * problem.out.dtype.itemsize // width)),
        )
        stage = (block_m + block_n * (2 if problem.gated else 1)) * block_k
        stage *= problem.a.dtype.itemsize
        spare = problem.device.shared_memory - config.shared_memory(problem)
        stages = min(2 + spare // stage, _STAGES_WANTED)
        if stages > max((v.num_stages for v in variants), default=1):
            variants.append(replace(config, num_stages=stages))
    return variants


def _groups(problem: Problem, config: WarpSpecializedConfig) -> list[int]:
    """GROUP_M such that one wave's tiles span about as much of M as of N, and half of it."""
    rows = -(-problem.m // config.BLOCK_M)
    wave = min(_tile_count(problem, config), problem.device.sm_count)
    width = config.BLOCK_N * (2 if problem.gated else 1)
    square = max(1, round(math.log2(math.sqrt(wave * width / config.BLOCK_M))))
    return sorted({min(rows, 2**square), min(rows, 2 ** (square - 1))}, reverse=True)


def _stored_by_pointers(problem: Problem) -> bool:
    """Whether TMA cannot write the output: its rows start off 16 bytes, or end off them, which
    TMA stores whole (on an H200 a 1×1 output overwrote its 7 neighbours)."""
    return not problem.out.aligned or problem.n * problem.out.dtype.itemsize % _ALIGNMENT != 0


def _tile_count(problem: Problem, config: WarpSpecializedConfig) -> int:
    return -(-problem.m // config.BLOCK_M) * -(-problem.n // config.BLOCK_N)


def _box(operand: Operand, rows: int, columns: int) -> tuple[list[int], Any]:
    """The descriptor block of a [rows, columns] tile along the contiguous dimension, and its
    layout in shared memory."""
    block = [rows, columns] if operand.layout == "row" else [columns, rows]
    return block, gl.NVMMASharedLayout.get_default_for(block, _GLUON[operand.dtype])


def _descriptor_type(operand: Operand, rows: int, columns: int) -> str:
    block, layout = _box(operand, rows, columns)
    return f"tensordesc<{pointer(operand.dtype)[1:]}{block},{layout!r}>"


def _describer(operand: Operand, rows: int, columns: int) -> Callable[[torch.Tensor], Any]:
    block, layout = _box(operand, rows, columns)
    outer, inner = (0, 1) if operand.layout == "row" else (1, 0)
    step = _ALIGNMENT // operand.dtype.itemsize

    def describe(t: torch.Tensor) -> Any:
        shape = [t.shape[outer], t.shape[inner]]
        # A single row has no leading stride to speak of; TMA wants an aligned one.
        leading = t.stride(outer) if shape[0] > 1 else -(-shape[1] // step) * step
        return TensorDescriptor(t, shape, [leading, 1], block, layout)

    return describe
