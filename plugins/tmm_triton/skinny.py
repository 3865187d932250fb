"""``triton.skinny``: multiplies a few rows by a weight as fast as the weight can be read.

With 16 rows or fewer, only the bytes of ``b`` and the way they are loaded matter. They take the
shortest path, from memory directly into the registers that the tensor cores read. Shared memory
and its barriers are bypassed:

    b, column-major         one warp's MMA operand: [16 columns of b] × [64 along K]
    column n   ──────────►  lane 4n     │ 8 elements │ + 32 further on
               16 bytes a   lane 4n + 1 │ 8 elements │ …
               lane         …

* An MMA needs a lane to hold pairs 8 elements apart. The order of a sum is free: with both operands
permuted the same way along K (``k_width=8``), a lane holds 16 contiguous bytes, one load.
* The warps of a program divide K and share nothing until their sums are added up, so no warp waits
for another. Programs are small and several share an SM: when one ends, the others keep the memory
busy.
* Loads of the next step are issued before the products of this one (``num_stages=2``).
* ``b`` is read with the hint ``evict_first``: it evicts itself from L2 instead of other data, which
would have to be written back first. On an H200 that alone saves 3 µs of a cold read of 30 to 130
MB, in any kernel.

It is written in Gluon, where the author chooses layouts; plain Triton passes every operand of a dot
through shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tmm_core import Machine, Problem
from tmm_triton import roofline
from tmm_triton.blocks import finish
from tmm_triton.operands import VECTOR, Build, TileConfig, build, check
from tmm_triton.pdl import Overlapping, check_early, ways, with_early
from tmm_triton.triton_kernel import POINTERS, TritonKernel

#: Columns of the widest tile of ``a`` transposed. On an H200 32 rows were no faster than with
#: ``triton.split_k``: each warp reads all rows of ``a`` for its 16 columns of ``b``.
MOST_ROWS = 16


@jit
def _load(ptrs, inside, MASKED: gl.constexpr, POLICY: gl.constexpr):
    if MASKED:
        return gl.load(ptrs, mask=inside, other=0.0, eviction_policy=POLICY)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return gl.load(ptrs, eviction_policy=POLICY)


@jit
def skinny_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, K,
    stride_az, stride_am, stride_ak,
    stride_bz, stride_bk, stride_bn,
    stride_rz, stride_rm, stride_rn,
    stride_oz, stride_om, stride_on,
    stride_bias, alpha,
    EPILOGUE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    WARPS_K: gl.constexpr, AHEAD: gl.constexpr,
    WHOLE_M: gl.constexpr, WHOLE_N: gl.constexpr, WHOLE_K: gl.constexpr,
    OVERLAPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    # bᵀ · aᵀ of one warp's part of K in the first dimension; an MMA is 16 columns of b wide.
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS_K, 1, 1], [1, 16, 8])
    B: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    A: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    PART: gl.constexpr = BLOCK_K // WARPS_K
    z = gl.program_id(1)
    above = gl.program_id(2) * BLOCK_M
    first = gl.program_id(0) * BLOCK_N
    part = gl.arange(0, WARPS_K, gl.SliceLayout(1, gl.SliceLayout(2, B))) * PART
    n = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, B)))
    k = gl.arange(0, PART, gl.SliceLayout(0, gl.SliceLayout(1, B)))
    n = gl.expand_dims(gl.expand_dims(n, 0), 2)
    b_k = gl.expand_dims(gl.expand_dims(part, 1), 2) + gl.expand_dims(gl.expand_dims(k, 0), 1)
    part = gl.arange(0, WARPS_K, gl.SliceLayout(1, gl.SliceLayout(2, A))) * PART
    m = above + gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(1, A)))
    k = gl.arange(0, PART, gl.SliceLayout(0, gl.SliceLayout(2, A)))
    m = gl.expand_dims(gl.expand_dims(m, 0), 1)
    a_k = gl.expand_dims(gl.expand_dims(part, 1), 2) + gl.expand_dims(gl.expand_dims(k, 0), 2)
    b_ptrs = b_ptr + z * stride_bz + n * stride_bn + b_k * stride_bk
    a_ptrs = a_ptr + z * stride_az + m * stride_am + a_k * stride_ak
    B_MASKED: gl.constexpr = not (WHOLE_N and WHOLE_K)
    A_MASKED: gl.constexpr = not (WHOLE_M and WHOLE_K)

    acc = gl.zeros([WARPS_K, BLOCK_N, BLOCK_M], gl.float32, SUMS)
    if EARLY:
        # Before the previous launch has ended: the caller promises that b is not being written.
        b = _load(b_ptrs, (n < N) & (b_k < K), B_MASKED, "evict_first")
    if OVERLAPS:
        # Nothing above touches memory that may be written; all threads wait, and store only after
        # it.
        gdc_wait()
        # After the wait: the next launch's early part must not overlap the previous launch.
        gdc_launch_dependents()
    if AHEAD:
        if not EARLY:
            b = _load(b_ptrs, (n < N) & (b_k < K), B_MASKED, "evict_first")
        a = _load(a_ptrs, (m < M) & (a_k < K), A_MASKED, "")
        for at in range(BLOCK_K, K, BLOCK_K):
            next_b = _load(b_ptrs + at, (n < N) & (at + b_k < K), B_MASKED, "evict_first")
            next_a = _load(a_ptrs + at, (m < M) & (at + a_k < K), A_MASKED, "")
            acc = mma_v2(b, a, acc)
            b = next_b
            a = next_a
        acc = mma_v2(b, a, acc)
    else:
        for at in range(0, K, BLOCK_K):
            b = _load(b_ptrs + at, (n < N) & (at + b_k < K), B_MASKED, "evict_first")
            a = _load(a_ptrs + at, (m < M) & (at + a_k < K), A_MASKED, "")
            acc = mma_v2(b, a, acc)

    # One element per thread if there are enough threads; neighbours along N.
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS_K, 1], [1, 0])
    total = gl.convert_layout(gl.sum(acc, axis=0).permute((1, 0)), OUT)
    rows = above + gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))
    cols = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT))
    finish(
        total, z, rows, cols, M, N, bias_ptr, stride_bias, alpha, EPILOGUE,
        residual_ptr, stride_rz, stride_rm, stride_rn, out_ptr, stride_oz, stride_om, stride_on,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SkinnyConfig(TileConfig, Overlapping):
    """A program's tile, and the step along K that its warps divide.

    Args:
        BLOCK_M: 8 or 16 rows of ``a``; the tile's narrow side.
        BLOCK_N: Columns of ``b``.
        BLOCK_K: Step along K of all warps together, at least 64 elements each.
        num_stages: 2 if the next step is loaded before this one is multiplied, else 1.
        early: See :mod:`tmm_triton.pdl`; not ``"l2"``.
    """

    early: str = ""

    def __post_init__(self) -> None:
        check("BLOCK_M", self.BLOCK_M, (8, 16))
        check("BLOCK_N", self.BLOCK_N, (16, 32))
        check("BLOCK_K", self.BLOCK_K, (64, 128, 256, 512, 1024, 2048))
        check("num_stages", self.num_stages, (1, 2))
        check("num_warps", self.num_warps, (1, 2, 4, 8))
        check_early(self.early, able=self.num_stages == 2)
        if self.part < 64:
            raise ValueError(f"BLOCK_K {self.BLOCK_K} leaves a warp {self.part} elements, not 64")

    @property
    def part(self) -> int:
        """Elements along K that one warp reads in one step."""
        return self.BLOCK_K // self.num_warps

    def shared_memory(self, problem: Problem) -> int:
        """Bytes in which the warps' sums are exchanged."""
        return 4 * self.num_warps * self.BLOCK_M * self.BLOCK_N

    def registers(self, problem: Problem) -> int:
        """Registers of a thread that hold operands and sums."""
        operands = self.num_stages * (self.BLOCK_N + self.BLOCK_M) * self.part // 64
        return operands + self.BLOCK_N * self.BLOCK_M // 32


#: BLOCK_N, BLOCK_K, num_warps, num_stages.
_SHAPES = (
    (16, 512, 4, 2),
    (16, 1024, 8, 2),
    (32, 512, 4, 2),
    (16, 1024, 4, 2),
    (16, 512, 2, 2),
    (16, 256, 4, 2),
    (32, 256, 4, 2),
    (16, 256, 2, 2),
    (16, 512, 8, 1),
    (32, 128, 2, 1),
)
#: Fitted to ten problems with 15 configs each on an H200: µs of load latency when all SMs load, and
#: µs of a step in addition to its bytes.
_READ_LATENCY, _STEP_US = 1.3, 0.1


def against_rows(problem: Problem) -> Iterable[str]:
    """Yield why a kernel for few rows cannot serve a problem: its rows, or batch-invariant mode."""
    if problem.batch_invariant:
        yield "sums in an order that no kernel for more rows has"
    if problem.m > MOST_ROWS:
        yield f"is for {MOST_ROWS} rows at most, not {problem.m}"


class Skinny(TritonKernel[SkinnyConfig]):
    """Up to 16 rows of 16-bit floats, both operands contiguous along K."""

    name = "triton.skinny"
    version = "3"
    config_type = SkinnyConfig

    supports = replace(
        POINTERS,
        devices=("cuda",),  # NVIDIA instructions
        operands=(torch.float16, torch.bfloat16),
        formats=(),
        weights=(),
        layouts={**POINTERS.layouts, "a": ("row",), "b": ("col",)},
        unaligned=("out", "residual"),
    )

    def declines(self, problem: Problem) -> Iterable[str]:
        yield from super().declines(problem)
        yield from against_rows(problem)
        if problem.k % (VECTOR // 2):
            yield f"K {problem.k} is not a multiple of {VECTOR // 2}"

    def arithmetic(self, problem: Problem, config: SkinnyConfig) -> str | None:
        """A lane's elements of 32 consecutive k go to two instructions, in an order that no other
        kernel has. Each warp sums a separate part of each step."""
        if problem.device.capability != (9, 0):
            return self.own_arithmetic(problem, config)
        # A single warp takes the same elements at a time for any step.
        part = f"x{config.part}" if config.num_warps > 1 else ""
        return f"sm90-k32-permuted/warps{config.num_warps}{part}"

    def configs(self, problem: Problem) -> list[SkinnyConfig]:
        rows = 8 if problem.m <= 8 else 16
        configs = [
            SkinnyConfig(BLOCK_M=rows, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages)
            for n, k, warps, stages in _SHAPES
        ]
        return with_early(self.ranked(problem, configs, 8), ways(problem))

    def beside(self, problem: Problem) -> SkinnyConfig | None:
        """Blocks of 4 warps need shared memory for their last sum only. On an H200 the longest step
        was the best for up to 8 rows if it divides K; with more rows its operands take too many
        registers. Overlap with the previous launch costs time on several streams."""
        rows = 8 if problem.m <= 8 else 16
        step = 1024 if rows == 8 and problem.k % 1024 == 0 else 512 if problem.k > 256 else 256
        return SkinnyConfig(BLOCK_M=rows, BLOCK_N=16, BLOCK_K=step, num_warps=4, num_stages=2)

    def estimate_us(self, problem: Problem, config: SkinnyConfig) -> float:
        """The time to read ``b``, longer if too few bytes are in flight and if the last programs
        leave SMs idle. In the problems to which it was fitted, the best of the first five by this
        estimate was the best of all. The first was 1.7 % slower."""
        machine, programs = Machine.of(problem.device), problem.batch * config.tiles(problem)
        step = config.BLOCK_N * config.BLOCK_K * problem.b.dtype.itemsize
        ahead = (1.5 if config.num_stages == 2 else 1) * step
        at_once = min(programs / machine.sms, roofline.resident(problem, config))
        in_flight = at_once * ahead * machine.sms
        slow = max(1.0, math.sqrt(_READ_LATENCY * machine.memory / in_flight))
        waves, idle = roofline.waves_and_idle(problem, config, programs)
        steps = waves * -(-problem.k // config.BLOCK_K)
        reading = problem.bytes / machine.memory * slow * (1 + idle / 2)
        return machine.EMPTY_US + machine.RAMP_US + reading + _STEP_US * steps

    def builds(self, problem: Problem, config: SkinnyConfig) -> list[Build]:
        constants = {
            "WARPS_K": config.num_warps,
            "AHEAD": config.num_stages == 2,
            "WHOLE_M": problem.m % config.BLOCK_M == 0,
            "WHOLE_N": problem.n % config.BLOCK_N == 0,
            "WHOLE_K": problem.k % config.BLOCK_K == 0,
        }
        # Without this limit ptxas spills, to save registers for one more resident block.
        registers = config.registers(problem) + 48
        options: dict[str, Any] = {}
        if config.num_stages == 2:
            options["maxnreg"] = min(255, registers // 8 * 8)
        grid = (-(-problem.n // config.BLOCK_N), problem.batch, -(-problem.m // config.BLOCK_M))
        return [build(skinny_kernel, problem, config, grid, constants, **options)]
