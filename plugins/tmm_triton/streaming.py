"""``triton.streaming``: multiplies a few rows by packed weights as fast as these can be read.

With 16 rows or fewer the bytes of the weight decide, and 4-bit weights have a quarter of them. So
decoding must cost less than reading. The weight goes from memory to the registers that the tensor
cores read; no lane exchanges data with another before the sums are complete.

    a row of the weight, [N, K]      128 values of one warp's step, 64 bytes in 4 bits
    lane 4n     ────────────────►    words 0–3   (16 bytes, one load)
    lane 4n + 1                      words 4–7
    lane …                           …

* The order of a sum is free, so both operands are permuted along K such that a lane multiplies the
  values that it has loaded. The pairs of a tensor core's register are the i-th values of
  neighbouring words (:mod:`tmm_triton.word_decoders`).
* A step covers 128 values of a row: a whole group of the scale, or a part of one. The sum of a step
  is multiplied by its scale in fp32, so that the weight's values are never rounded.
* The warps of a program divide K, and rows of the weight (``WARPS_N``), whose activations then come
  from the L1 cache. The next step is loaded before this one is multiplied.
* Zero points are subtracted from the sums: Σ a·(q − z) = Σ a·q − z·Σ a.

It is written in Gluon, where the author chooses layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tmm_core import Problem, Traits
from tmm_core.triton import SEARCH_LIMITED
from tmm_triton import roofline, word_decoders
from tmm_triton.blocks import add_residual, affine, finish, store
from tmm_triton.operands import Build, TileConfig, build, check
from tmm_triton.pdl import check_early, ways, with_early
from tmm_triton.skinny import Skinny, against_rows
from tmm_triton.triton_kernel import TritonKernel, hopper_or_later, without_gluon

#: Values along K in one step of a warp.
STEP = 128


@jit
def _decode(words, PROGRAM: gl.constexpr, PER: gl.constexpr):
    """The ``PER`` blocks of the i-th values of each word, as the bits of 16-bit floats."""
    if PER == 8:
        return gl.inline_asm_elementwise(
            PROGRAM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words],
            dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return gl.inline_asm_elementwise(
            PROGRAM, "=r,=r,=r,=r,r,r", [words],
            dtype=(gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=2,
        )  # fmt: skip


@jit
def _pairs(a, ROWS: gl.constexpr, WARPS_K: gl.constexpr, PER: gl.constexpr):
    """The 32-bit pairs of ``a``, [WARPS_K, STEP / 2, ROWS], by their place in a word of the weight:
    blocks of [WARPS_K, STEP / PER, ROWS] in the order of a tensor core's operand."""
    if PER == 8:
        # k / 2 = 16 lane + 8 w1 + 4 w0 + place
        split = a.reshape([WARPS_K, 4, 2, 2, 2, 2, ROWS]).permute([0, 2, 1, 3, 6, 4, 5])
        even, odd = split.reshape([WARPS_K, 16, ROWS, 2, 2]).split()
        p0, p2 = even.split()
        p1, p3 = odd.split()
        return p0, p1, p2, p3
    else:  # noqa: RET505
        # k / 2 = 16 lane + 8 w2 + 4 w1 + 2 w0 + place
        split = a.reshape([WARPS_K, 4, 2, 2, 2, 2, ROWS]).permute([0, 2, 3, 1, 4, 6, 5])
        return split.reshape([WARPS_K, 32, ROWS, 2]).split()


@jit
def _ordered(v, ROWS: gl.constexpr, WARPS_K: gl.constexpr, PER: gl.constexpr):
    """Values of the weight, [WARPS_K, ROWS, STEP / PER], in the order of a tensor core's operand:
    in memory's order the lane's number comes first."""
    if PER == 8:
        order = v.reshape([WARPS_K, ROWS, 4, 2, 2]).permute([0, 1, 3, 2, 4])
    else:
        order = v.reshape([WARPS_K, ROWS, 4, 2, 2, 2]).permute([0, 1, 3, 4, 2, 5])
    return order.reshape([WARPS_K, ROWS, 128 // PER])


@jit
def _multiply(
    words, a, acc, of_a,
    PROGRAM: gl.constexpr, PER: gl.constexpr, T: gl.constexpr, ZERO: gl.constexpr,
    WARPS_K: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr,
    B: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """``acc`` plus one step's products, and ``of_a`` plus the sums of ``a`` if ``ZERO``."""
    values = _decode(words, PROGRAM, PER)
    pairs = _pairs(a, BLOCK_M, WARPS_K, PER)
    for i in gl.static_range(PER):
        pair = pairs[i // 2]
        half = (pair if i % 2 == 0 else pair >> 16).to(gl.int16).to(T, bitcast=True)
        half = gl.convert_layout(half, A)
        value = _ordered(values[i].to(T, bitcast=True), ROWS, WARPS_K, PER)
        value = gl.convert_layout(value, B)
        acc = mma_v2(value, half, acc)
        if ZERO:
            of_a = mma_v2(gl.full([WARPS_K, ROWS, 128 // PER], 1.0, T, B), half, of_a)
    return acc, of_a


@jit
def _load(ptrs, inside, WHOLE: gl.constexpr, POLICY: gl.constexpr):
    """Load what is inside. Other registers are cleared, unless no sum depends on them (WHOLE)."""
    if WHOLE:
        return gl.load(ptrs, mask=inside, eviction_policy=POLICY)
    else:  # noqa: RET505
        return gl.load(ptrs, mask=inside, other=0, eviction_policy=POLICY)


@jit
def streaming_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, out_ptr,
    M, N, K,
    stride_az, stride_am, stride_ak,
    stride_bz, stride_bk, stride_bn,
    stride_rz, stride_rm, stride_rn,
    stride_oz, stride_om, stride_on,
    stride_bias, alpha, b_scale_ptr, b_zero_ptr,
    stride_bsz, stride_bsk, stride_bsn, stride_0z, stride_0k, stride_0n,
    EPILOGUE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WARPS_K: gl.constexpr, WARPS_N: gl.constexpr,
    HALVES: gl.constexpr, B_GROUP: gl.constexpr, PER: gl.constexpr, PROGRAM: gl.constexpr,
    ORIGIN: gl.constexpr,
    WORDS: gl.constexpr, PAIRS: gl.constexpr,
    WHOLE_N: gl.constexpr, WHOLE_K: gl.constexpr,
    OVERLAPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    T: gl.constexpr = a_ptr.dtype.element_ty
    ZERO: gl.constexpr = b_zero_ptr is not None
    # Rows of the weight. A gated product has the gate's rows first, then the up projection's.
    ROWS: gl.constexpr = BLOCK_N * HALVES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS_K, WARPS_N, 1], [1, 16, 8])
    B: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    A: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    OF_WORD: gl.constexpr = 128 // PER
    first, z = gl.program_id(0) * BLOCK_N, gl.program_id(1)

    part = gl.arange(0, WARPS_K, gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    word = gl.arange(0, OF_WORD, gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    part = gl.expand_dims(gl.expand_dims(part, 1), 2)
    row = gl.expand_dims(gl.expand_dims(row, 0), 2)
    word = gl.expand_dims(gl.expand_dims(word, 0), 1)
    inside_b = WHOLE_N | (first + row % BLOCK_N < N)
    row = first + row % BLOCK_N + row // BLOCK_N * N

    a_part = gl.arange(0, WARPS_K, gl.SliceLayout(1, gl.SliceLayout(2, PAIRS)))
    pair = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(1, PAIRS)))
    a_part = gl.expand_dims(gl.expand_dims(a_part, 1), 2)
    pair = gl.expand_dims(gl.expand_dims(pair, 0), 2)
    m = gl.expand_dims(gl.expand_dims(m, 0), 1)
    inside_a = m < M

    s_part = gl.arange(0, WARPS_K, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))
    s_row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    s_part = gl.expand_dims(gl.expand_dims(s_part, 1), 2)
    s_row = gl.expand_dims(gl.expand_dims(s_row, 0), 2)
    inside_s = WHOLE_N | (first + s_row % BLOCK_N < N)
    s_row = first + s_row % BLOCK_N + s_row // BLOCK_N * N

    # A step's distance from the base is the same for all lanes.
    b_base = (b_ptr + z * stride_bz).to(gl.pointer_type(gl.int32), bitcast=True)
    a_base = (a_ptr + z * stride_az).to(gl.pointer_type(gl.int32), bitcast=True)
    b_at = (row * (stride_bn // 4) + part * OF_WORD + word).to(gl.uint32)
    a_at = (m * (stride_am // 2) + a_part * 64 + pair).to(gl.uint32)
    scale_base = z * stride_bsz + s_row * stride_bsn
    if ZERO:
        zero_base = z * stride_0z + s_row * stride_0n
    steps = K // 128
    zeros = gl.zeros([WARPS_K, ROWS, BLOCK_M], gl.float32, SUMS)
    acc = zeros
    of_a = zeros
    if EARLY:
        # Before the previous launch has ended: the caller promises that b is not being written.
        b = _load(b_base + b_at, inside_b & (part < steps), WHOLE_K, "evict_first")
    if OVERLAPS:
        # All threads wait, and store only after it. The next launch's early part must not overlap
        # the previous launch.
        gdc_wait()
        gdc_launch_dependents()
    if not EARLY:
        b = _load(b_base + b_at, inside_b & (part < steps), WHOLE_K, "evict_first")
    a = _load(a_base + a_at, inside_a & (a_part < steps), WHOLE_K, "")
    if B_GROUP:
        group = s_part // (B_GROUP // 128)
        inside = inside_s & (s_part < steps)
        scale = _load(b_scale_ptr + scale_base + group * stride_bsk, inside, False, "")
        if ZERO:
            zero = _load(b_zero_ptr + zero_base + group * stride_0k, inside, False, "")
    for first_step in range(0, steps, WARPS_K):
        step = first_step + WARPS_K
        next_b = _load(
            b_base + step * OF_WORD + b_at, inside_b & (step + part < steps), WHOLE_K, "evict_first"
        )
        next_a = _load(a_base + step * 64 + a_at, inside_a & (step + a_part < steps), WHOLE_K, "")
        if B_GROUP:
            group = (step + s_part) // (B_GROUP // 128)
            inside = inside_s & (step + s_part < steps)
            next_scale = _load(b_scale_ptr + scale_base + group * stride_bsk, inside, False, "")
            if ZERO:
                next_zero = _load(b_zero_ptr + zero_base + group * stride_0k, inside, False, "")
            own, of_a = _multiply(
                b, a, zeros, zeros, PROGRAM, PER, T, ZERO, WARPS_K, ROWS, BLOCK_M, B, A
            )
            if ZERO:
                own -= of_a * (zero.to(gl.float32) - ORIGIN)
                zero = next_zero
            acc += own * scale.to(gl.float32)
            scale = next_scale
        else:
            acc, of_a = _multiply(
                b, a, acc, of_a, PROGRAM, PER, T, ZERO, WARPS_K, ROWS, BLOCK_M, B, A
            )
        b = next_b
        a = next_a
    if not B_GROUP:
        if ZERO:
            zero = _load(b_zero_ptr + zero_base, inside_s, False, "")
            acc -= of_a * (zero.to(gl.float32) - ORIGIN)
        if b_scale_ptr is not None:
            acc *= _load(b_scale_ptr + scale_base, inside_s, False, "").to(gl.float32)

    # One element per thread if there are enough threads; neighbours along N.
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS_K * WARPS_N, 1], [1, 0])
    total = gl.convert_layout(gl.sum(acc, axis=0).permute((1, 0)), OUT)
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))
    cols = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT))
    if HALVES == 2:
        gate, up = total.reshape([BLOCK_M, 2, BLOCK_N]).permute([0, 2, 1]).split()
        gate = affine(gl.convert_layout(gate, OUT), cols, N, bias_ptr, stride_bias, alpha)
        up = affine(gl.convert_layout(up, OUT), N + cols, 2 * N, bias_ptr, stride_bias, alpha)
        y = EPILOGUE(gate, up)
        y = add_residual(y, z, rows, cols, M, N, residual_ptr, stride_rz, stride_rm, stride_rn)
        store(y, z, rows, cols, M, N, out_ptr, stride_oz, stride_om, stride_on)
    else:
        finish(
            total, z, rows, cols, M, N, bias_ptr, stride_bias, alpha, EPILOGUE,
            residual_ptr, stride_rz, stride_rm, stride_rn, out_ptr, stride_oz, stride_om, stride_on,
        )  # fmt: skip


def layouts(
    warps_k: int, warps_n: int, rows: int, block_m: int, per: int
) -> tuple[gl.DistributedLinearLayout, gl.DistributedLinearLayout]:
    """The layouts of the weight's words, [warps_k, rows, 128 / per], and of the pairs of ``a``,
    [warps_k, 64, block_m], in which lanes hold what they multiply: four lanes share a row."""
    lane, words = 32 // per, 128 // per  # words of a lane and of a row
    split_k = [[1 << i, 0, 0] for i in range(_bits(warps_k))]
    registers = [[0, 0, 1 << i] for i in range(_bits(lane))]
    registers += [[0, 8, 0]]
    registers += [[0, 16 * warps_n << i, 0] for i in range(_bits(rows // (16 * warps_n)))]
    quads = [[0, 0, lane], [0, 0, 2 * lane], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    along_n = [[0, 16 << i, 0] for i in range(_bits(warps_n))]
    of_words = gl.DistributedLinearLayout(
        registers, quads, along_n + split_k, [], [warps_k, rows, words]
    )
    registers = [[0, 1 << i, 0] for i in range(4)]
    registers += [[0, 0, 8 << i] for i in range(_bits(block_m // 8))]
    quads = [[0, 16, 0], [0, 32, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    along_n = [[0, 0, 0]] * _bits(warps_n)
    return of_words, gl.DistributedLinearLayout(
        registers, quads, along_n + split_k, [], [warps_k, 64, block_m]
    )


def _bits(power: int) -> int:
    return power.bit_length() - 1


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(TileConfig):
    """A program's tile, and the step along K that its warps divide.

    Args:
        BLOCK_M: 8 or 16 rows of ``a``; the tile's narrow side.
        BLOCK_N: Columns of the result, at least 16 for each warp along N.
        BLOCK_K: Step along K of all warps together, 128 elements each.
        num_stages: Always 2: the next step is loaded before this one is multiplied.
        early: See :mod:`tmm_triton.pdl`; not ``"l2"``.
    """

    early: str = ""

    def __post_init__(self) -> None:
        check("BLOCK_M", self.BLOCK_M, (8, 16))
        check("BLOCK_N", self.BLOCK_N, (16, 32, 64, 128))
        check("BLOCK_K", self.BLOCK_K, (128, 256, 512, 1024, 2048))
        check("num_stages", self.num_stages, (2,))
        check("num_warps", self.num_warps, (1, 2, 4, 8, 16))
        check_early(self.early, able=True)
        if self.num_warps % self.warps_k or 16 * self.warps_n > self.BLOCK_N:
            raise ValueError(f"{self.num_warps} warps cannot divide {self.BLOCK_N}×{self.BLOCK_K}")

    @property
    def assumes(self) -> tuple[str, ...]:
        return ("static_weights",) if self.early == "b" else ()

    @property
    def warps_k(self) -> int:
        """Warps that divide a step along K."""
        return self.BLOCK_K // STEP

    @property
    def warps_n(self) -> int:
        """Warps that divide the columns."""
        return self.num_warps // self.warps_k

    def shared_memory(self, problem: Problem) -> int:
        """Bytes in which the warps' sums are exchanged."""
        return 4 * self.BLOCK_M * self._rows(problem) * (self.warps_k + 1)

    def registers(self, problem: Problem) -> int:
        """Registers of a thread that hold the operands of this step and the next one, and sums.
        Of 8 registers for each row of ``a``, the compiler was seen to keep 5.5."""
        rows = self._rows(problem) // self.warps_n
        words = rows * STEP * problem.b.dtype.itemsize // (problem.b.pack * 4 * 32)
        return 2 * words + 11 * self.BLOCK_M // 2 + 2 * rows * self.BLOCK_M // 32

    def _rows(self, problem: Problem) -> int:
        return self.BLOCK_N * (2 if problem.gated else 1)


def _row_scale(problem: Problem) -> dict[str, int]:
    """The strides of scales for whole rows, which are in memory one after another."""
    if problem.b.grid:
        return {}
    row = int(problem.b.scale is not None and problem.b.scale.kind == "row")
    apart = problem.width if row and problem.batch > 1 else 0
    return {"stride_bsz": apart, "stride_bsk": 0, "stride_bsn": row}


#: BLOCK_N, BLOCK_K and num_warps that are tried.
_SHAPES = (
    (16, 1024, 8),
    (32, 1024, 8),
    (16, 512, 4),
    (32, 512, 4),
    (32, 512, 8),
    (64, 256, 4),
    (64, 512, 8),
    (64, 256, 2),
    (128, 256, 8),
    (128, 256, 4),
)


def _every_shape() -> Iterator[tuple[int, int, int]]:
    """Every shape for an exhaustive search, also those that no measurement favoured. More than 8
    warps lack registers."""
    for n, warps_k, warps_n in itertools.product((16, 32, 64, 128), (1, 2, 4, 8), (1, 2, 4, 8)):
        if warps_k * warps_n <= 8 and 16 * warps_n <= n:
            yield n, STEP * warps_k, warps_k * warps_n


#: Time of a launch relative to reading ``b``: without rows, and what each row adds. On an H100
#: 28672×4096 in 4-bit integers took 1.19 at one row and 1.39 at 16
#: (``benchmarks/results/h100/quantised_int4.json``).
_READ, _MULTIPLIED = 1.15, 0.016
#: Registers of a thread for operands and sums that leave enough of 255 for the rest.
_MOST_REGISTERS = 220


class Streaming(TritonKernel[StreamingConfig]):
    """Up to 16 rows of 16-bit floats, and a weight of packed numbers contiguous along K."""

    name = "triton.streaming"
    version = "1"
    # Each of an MMA's sums has its own order, the same for every row.
    traits = Traits(deterministic=True, batch_invariant=True)
    config_type = StreamingConfig

    supports = replace(
        Skinny.supports,
        weights=tuple(word_decoders.PER_WORD),
        scales=("tensor", "row", "group"),
        packed=True,
        zeros=True,
        wide=False,
        gated=True,
    )

    def declines(self, problem: Problem) -> Iterable[str]:
        yield from super().declines(problem)
        yield from without_gluon(problem)
        yield from against_rows(problem)
        if not problem.stored:
            yield "is for packed weights"
        if problem.k % STEP:
            yield f"K {problem.k} is not a multiple of {STEP}"
        if problem.b.grid and problem.b.block[1] % STEP:
            yield f"groups of {problem.b.block[1]} are not multiples of {STEP}"

    def configs(self, problem: Problem) -> list[StreamingConfig]:
        rows = 8 if problem.m <= 8 else 16
        limited = SEARCH_LIMITED.get()
        shapes = [
            StreamingConfig(BLOCK_M=rows, BLOCK_N=n, BLOCK_K=k, num_stages=2, num_warps=warps)
            for n, k, warps in (_SHAPES if limited else _every_shape())
        ]
        fitting = [each for each in shapes if each.registers(problem) <= _MOST_REGISTERS]
        fitting.sort(key=lambda each: self.estimate_us(problem, each))
        return with_early(fitting[:8] if limited else fitting, ways(problem))

    def estimate_us(self, problem: Problem, config: StreamingConfig) -> float:
        """The time to read ``b``, longer if too few bytes are in flight and if the last programs
        leave SMs idle, and to decode and multiply."""
        programs = problem.batch * -(-problem.n // config.BLOCK_N)
        step = config.BLOCK_N * config.BLOCK_K * problem.b.dtype.itemsize / problem.b.pack
        reading = roofline.reading_us(problem, config, programs, 1.5 * step)
        return (_READ + _MULTIPLIED * problem.m) * reading

    def builds(self, problem: Problem, config: StreamingConfig) -> list[Build]:
        overlaps = config.early != "" and hopper_or_later(problem)
        form = problem.b.form
        assert form is not None
        per = word_decoders.PER_WORD[form.name]
        halves = 2 if problem.gated else 1
        words, pairs = layouts(
            config.warps_k, config.warps_n, config.BLOCK_N * halves, config.BLOCK_M, per
        )
        constants = {
            "WARPS_K": config.warps_k,
            "WARPS_N": config.warps_n,
            "HALVES": halves,
            "PER": per,
            "PROGRAM": word_decoders.program(form.name, problem.b.dtype, problem.a.dtype),
            "ORIGIN": form.origin,
            "WORDS": words,
            "PAIRS": pairs,
            "WHOLE_N": problem.n % config.BLOCK_N == 0,
            "WHOLE_K": problem.k % config.BLOCK_K == 0,
            "OVERLAPS": overlaps,
            "EARLY": overlaps and config.early == "b",
        }
        grid = (-(-problem.n // config.BLOCK_N), problem.batch, 1)
        # Without this limit ptxas spills, to save registers for one more resident block.
        registers = min(255, (config.registers(problem) + 64) // 8 * 8)
        options: dict[str, Any] = {"launch_pdl": overlaps, "maxnreg": registers}
        return [
            build(
                streaming_kernel, problem, config, grid, constants | _row_scale(problem), **options
            )
        ]
