"""``triton.streaming``: multiplies a few rows by packed weights as fast as these can be read.

With 16 rows or fewer the bytes of the weight decide, and 4-bit weights have a quarter of them. So
decoding must cost less than reading. The weight goes from memory to the registers that the tensor
cores read; no lane exchanges data with another before the sums are complete.

    a row of the weight, [N, K]      128 values of one warp's step, 64 bytes in 4 bits
    lane 4n     ────────────────►    words 0–3   (16 bytes, one load)
    lane 4n + 1                      words 4–7
    lane …                           …

* The order of a sum is free. So both operands are permuted along K such that a lane multiplies the
  values that it has loaded. A tensor core's register holds two values of one word
  (:mod:`tmm_triton.word_decoders`).
* A lane has neighbouring words of a step. With 4 bits and more than 8 rows it has neighbours in
  both halves of a step (``PIECES``). The four lanes of a row then load their part of ``a`` from one
  line of 128 bytes. With 16 rows, lookups of lines in the L1 cache are the limit.
* A step covers 128 values of a row: a whole group of the scale, or a part of one. The sum of a step
  is multiplied by its scale in fp32, so that the weight's values are never rounded.
* The warps of a program divide K, and rows of the weight (``WARPS_N``), whose activations then come
  from the L1 cache. Each warp has loads of several steps in flight.
* Rows outside the result are read as its last row, and not stored: loads without masks clear no
  registers.
* Zero points are subtracted from the sums: Σ a·(q − z) = Σ a·q − z·Σ a.

It is written in Gluon, where the author chooses layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tmm_core import ConfigError, Machine, Problem
from tmm_core.triton import SEARCH_LIMITED
from tmm_triton import roofline, word_decoders
from tmm_triton.blocks import add_residual, affine, finish, store
from tmm_triton.operands import Build, TileConfig, build, check, kind
from tmm_triton.pdl import Overlapping, check_early, ways
from tmm_triton.skinny import Skinny, against_rows
from tmm_triton.triton_kernel import TritonKernel

#: Values along K in one step of a warp.
STEP = 128


@jit
def _quarters(
    words, WARPS_K: gl.constexpr, ROWS: gl.constexpr, OWN: gl.constexpr, PIECES: gl.constexpr
):
    """The quarters of each lane's words, [WARPS_K, ROWS, 4, OWN / 4]."""
    split = words.reshape([WARPS_K, ROWS, PIECES, 4, 4 // PIECES, OWN // 4])
    split = split.permute([0, 1, 3, 5, 2, 4]).reshape([WARPS_K, ROWS, 4, OWN // 4, 2, 2])
    even, odd = split.split()
    first, third = even.split()
    second, fourth = odd.split()
    return first, second, third, fourth


@jit
def _halves(pairs, T: gl.constexpr):
    """Both floats of each pair of 16 bits, in a new last dimension."""
    return gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(T, bitcast=True)


@jit
def _decoded(words, PROGRAM: gl.constexpr, PER: gl.constexpr, T: gl.constexpr):
    """The 8 values of each lane's quarter, [WARPS_K, ROWS, 4, 8 / PER], in the order of a tensor
    core's operand, [WARPS_K, ROWS, 32]: by pairs, then by lanes."""
    if PER == 8:
        first, second, third, fourth = gl.inline_asm_elementwise(
            PROGRAM, "=r,=r,=r,=r,r", [words],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        pairs = gl.join(gl.join(first, third), gl.join(second, fourth))
    else:
        first, second = gl.inline_asm_elementwise(
            PROGRAM, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
        pairs = gl.join(first, second)
    WARPS_K: gl.constexpr = words.shape[0]
    ROWS: gl.constexpr = words.shape[1]
    values = _halves(pairs.reshape([WARPS_K, ROWS, 4, 4]), T)
    return values.permute([0, 1, 3, 2, 4]).reshape([WARPS_K, ROWS, 32])


@jit
def _arranged(a, PER: gl.constexpr, T: gl.constexpr):
    """A quarter of ``a`` in the order of the values that :func:`_decoded` returns.

    Args:
        a: Neighbours along K as 32-bit numbers, four for each lane, [WARPS_K, 16, BLOCK_M].
    """
    WARPS_K: gl.constexpr = a.shape[0]
    BLOCK_M: gl.constexpr = a.shape[2]
    if PER == 8:
        # A decoded pair holds values of a word that are four places apart.
        halves = _halves(a.reshape([WARPS_K, 4, 2, 2, BLOCK_M]), T).permute([0, 3, 5, 1, 2, 4])
    else:
        halves = _halves(a.reshape([WARPS_K, 4, 4, BLOCK_M]), T).permute([0, 2, 1, 4, 3])
    return halves.reshape([WARPS_K, 32, BLOCK_M])


@jit
def _load(at, step, steps, WHOLE: gl.constexpr, POLICY: gl.constexpr):
    """Load what belongs to a step of K. There are zeros behind the last one, unless all steps that
    are asked for exist (``WHOLE``)."""
    if WHOLE:
        return gl.load(at, eviction_policy=POLICY)
    else:  # noqa: RET505
        return gl.load(at, mask=step < steps, other=0, eviction_policy=POLICY)


@jit
def _quarter_of_a(at, i: gl.constexpr, step, steps, PIECES: gl.constexpr, WHOLE: gl.constexpr):
    """Load the part of ``a`` that the i-th quarter of each lane's words is multiplied by."""
    OF_PIECE: gl.constexpr = 4 // PIECES
    offset = i // OF_PIECE * (64 // PIECES) + i % OF_PIECE * 4
    return _load(at + offset, step, steps, WHOLE, "")


@jit
def _with(values, value):
    """A tuple and one more value."""
    return values + (value,)  # noqa: RUF005 (Triton knows no starred expressions)


@jit
def _load_ahead(
    at, part, steps,
    WARPS_K: gl.constexpr, OF_WORD: gl.constexpr, WHOLE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The words of the first ``STAGES`` steps."""
    words = ()
    for i in gl.static_range(STAGES):
        step = i * WARPS_K
        loaded = _load(at + step * OF_WORD, step + part, steps, WHOLE, "evict_first")
        words = _with(words, loaded)
    return words


@jit
def _number(at, stride, step, steps, GROUP: gl.constexpr, WHOLE: gl.constexpr):
    """The scales or zero points of a step; groups are ``stride`` apart."""
    return _load(at + step // (GROUP // 128) * stride, step, steps, WHOLE, "")


@jit
def _numbers_ahead(
    at, stride, part, steps,
    WARPS_K: gl.constexpr, GROUP: gl.constexpr, WHOLE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The scales or zero points of the first ``STAGES`` steps."""
    numbers = ()
    for i in gl.static_range(STAGES):
        step = i * WARPS_K + part
        numbers = _with(numbers, _number(at, stride, step, steps, GROUP, WHOLE))
    return numbers


@jit
def _add_step(
    words, scale, zero, acc, of_a, quarters, next_a, step, steps,
    PROGRAM: gl.constexpr, PER: gl.constexpr, T: gl.constexpr, ZERO: gl.constexpr,
    ORIGIN: gl.constexpr, B_GROUP: gl.constexpr, WARPS_K: gl.constexpr, ROWS: gl.constexpr,
    B: gl.constexpr, A: gl.constexpr, PIECES: gl.constexpr, WHOLE: gl.constexpr,
    LAST: gl.constexpr,
):  # fmt: skip
    """``acc`` plus one step's products, multiplied by the scales of its group if there are groups.
    Without them, ``of_a`` plus the sums of ``a``.

    Words are decoded by quarters, and the next step of ``a`` takes the place of this one by
    quarters, to save registers. It is returned unless this step is the ``LAST`` one.
    """
    own = acc
    if B_GROUP:
        own = gl.zeros_like(acc)
        of_a = own
    of_words = _quarters(words, WARPS_K, ROWS, 32 // PER, PIECES)
    following = ()
    for i in gl.static_range(4):
        value = gl.convert_layout(_decoded(of_words[i], PROGRAM, PER, T), B)
        other = gl.convert_layout(_arranged(quarters[i], PER, T), A)
        if not LAST:
            loaded = _quarter_of_a(next_a, i, step, steps, PIECES, WHOLE)
            following = _with(following, loaded)
        own = mma_v2(value, other, own)
        if ZERO:
            of_a = mma_v2(gl.full([WARPS_K, ROWS, 32], 1.0, T, B), other, of_a)
    if not B_GROUP:
        acc = own
    elif ZERO:
        acc += (own - of_a * (zero.to(gl.float32) - ORIGIN)) * scale.to(gl.float32)
    else:
        acc += own * scale.to(gl.float32)
    return acc, of_a, following


@jit
def _await_previous():
    """Wait for the previous launch. All threads wait, and store only after it. The next launch's
    early part must not overlap the previous launch."""
    gdc_wait()
    gdc_launch_dependents()


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
    WHOLE: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
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
    row = gl.minimum(first + row % BLOCK_N, N - 1) + row // BLOCK_N * N

    a_part = gl.arange(0, WARPS_K, gl.SliceLayout(1, gl.SliceLayout(2, PAIRS)))
    pair = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, PAIRS)))
    m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(1, PAIRS)))
    a_part = gl.expand_dims(gl.expand_dims(a_part, 1), 2)
    pair = gl.expand_dims(gl.expand_dims(pair, 0), 2)
    m = gl.minimum(gl.expand_dims(gl.expand_dims(m, 0), 1), M - 1)

    s_part = gl.arange(0, WARPS_K, gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))
    s_row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    s_part = gl.expand_dims(gl.expand_dims(s_part, 1), 2)
    s_row = gl.expand_dims(gl.expand_dims(s_row, 0), 2)
    s_row = gl.minimum(first + s_row % BLOCK_N, N - 1) + s_row // BLOCK_N * N

    # A step's distance from the base is the same for all lanes.
    b_base = (b_ptr + z * stride_bz).to(gl.pointer_type(gl.int32), bitcast=True)
    a_base = (a_ptr + z * stride_az).to(gl.pointer_type(gl.int32), bitcast=True)
    b_at = (row * (stride_bn // 4) + part * OF_WORD + word).to(gl.uint32)
    a_at = m * (stride_am // 2) + a_part * 64 + pair // 4 * (16 // PIECES) + pair % 4
    a_at = a_at.to(gl.uint32)
    if b_scale_ptr is not None:
        scales_at = b_scale_ptr + z * stride_bsz + s_row * stride_bsn
    if ZERO:
        zero_at = b_zero_ptr + z * stride_0z + s_row * stride_0n
    steps = K // 128
    acc = gl.zeros([WARPS_K, ROWS, BLOCK_M], gl.float32, SUMS)
    of_a = acc
    if OVERLAPS and not EARLY:
        _await_previous()
    words = _load_ahead(b_base + b_at, part, steps, WARPS_K, OF_WORD, WHOLE, STAGES)
    if EARLY:
        # The caller promises that b is not being written.
        _await_previous()
    if B_GROUP:
        scales = _numbers_ahead(
            scales_at, stride_bsk, s_part, steps, WARPS_K, B_GROUP, WHOLE, STAGES
        )
    else:
        scales = (0,) * STAGES
    if B_GROUP and ZERO:
        points = _numbers_ahead(zero_at, stride_0k, s_part, steps, WARPS_K, B_GROUP, WHOLE, STAGES)
    else:
        points = (0,) * STAGES
    a = ()
    for i in gl.static_range(4):
        a = _with(a, _quarter_of_a(a_base + a_at, i, a_part, steps, PIECES, WHOLE))
    # Without masks the last STAGES steps must load nothing, and follow the loop.
    for turn in range(0, steps - STAGES * WARPS_K if WHOLE else steps, STAGES * WARPS_K):
        # After STAGES steps each buffer is at its place again, so no value moves between registers.
        for i in gl.static_range(STAGES):
            after = turn + (i + 1) * WARPS_K
            ahead = turn + (i + STAGES) * WARPS_K
            acc, of_a, a = _add_step(
                words[0], scales[0], points[0], acc, of_a, a,
                a_base + after * 64 + a_at, after + a_part, steps,
                PROGRAM, PER, T, ZERO, ORIGIN, B_GROUP, WARPS_K, ROWS, B, A, PIECES, WHOLE,
                False,
            )  # fmt: skip
            if B_GROUP:
                number = _number(scales_at, stride_bsk, ahead + s_part, steps, B_GROUP, WHOLE)
                scales = _with(scales[1:], number)
                if ZERO:
                    number = _number(zero_at, stride_0k, ahead + s_part, steps, B_GROUP, WHOLE)
                    points = _with(points[1:], number)
            at = b_base + ahead * OF_WORD + b_at
            loaded = _load(at, ahead + part, steps, WHOLE, "evict_first")
            words = _with(words[1:], loaded)
    if WHOLE:
        for i in gl.static_range(STAGES):
            after = steps - (STAGES - i - 1) * WARPS_K
            acc, of_a, a = _add_step(
                words[i], scales[i], points[i], acc, of_a, a,
                a_base + after * 64 + a_at, after + a_part, steps,
                PROGRAM, PER, T, ZERO, ORIGIN, B_GROUP, WARPS_K, ROWS, B, A, PIECES, WHOLE,
                i == STAGES - 1,
            )  # fmt: skip
    if not B_GROUP:
        if ZERO:
            acc -= of_a * (gl.load(zero_at).to(gl.float32) - ORIGIN)
        if b_scale_ptr is not None:
            acc *= gl.load(scales_at).to(gl.float32)

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
    warps_k: int, warps_n: int, rows: int, block_m: int, per: int, pieces: int
) -> tuple[gl.DistributedLinearLayout, gl.DistributedLinearLayout]:
    """The layouts of the weight's words, [warps_k, rows, 128 / per], and of a quarter of a step of
    ``a``, [warps_k, 16, block_m] pairs. Lanes hold what they multiply: four share a row, and each
    has ``pieces`` runs of neighbouring words."""
    run, words = 32 // per // pieces, 128 // per  # words of a run and of a row
    split_k = [[1 << i, 0, 0] for i in range(_bits(warps_k))]
    registers = [[0, 0, 1 << i] for i in range(_bits(run))]
    registers += [[0, 0, words // pieces << i] for i in range(_bits(pieces))]
    registers += [[0, 8, 0]]
    registers += [[0, 16 * warps_n << i, 0] for i in range(_bits(rows // (16 * warps_n)))]
    quads = [[0, 0, run], [0, 0, 2 * run], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    along_n = [[0, 16 << i, 0] for i in range(_bits(warps_n))]
    of_words = gl.DistributedLinearLayout(
        registers, quads, along_n + split_k, [], [warps_k, rows, words]
    )
    registers = [[0, 1, 0], [0, 2, 0]]
    registers += [[0, 0, 8 << i] for i in range(_bits(block_m // 8))]
    quads = [[0, 4, 0], [0, 8, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    along_n = [[0, 0, 0]] * _bits(warps_n)
    return of_words, gl.DistributedLinearLayout(
        registers, quads, along_n + split_k, [], [warps_k, 16, block_m]
    )


def _bits(power: int) -> int:
    return power.bit_length() - 1


@dataclass(frozen=True, kw_only=True)
class StreamingConfig(TileConfig, Overlapping):
    """A program's tile, and the step along K that its warps divide.

    Args:
        BLOCK_M: 8 or 16 rows of ``a``; the tile's narrow side.
        BLOCK_N: Columns of the result, at least 16 for each warp along N.
        BLOCK_K: Step along K of all warps together, 128 elements each.
        num_stages: 2 or 4 steps of the weight that a warp holds or awaits.
        early: See :mod:`tmm_triton.pdl`; not ``"l2"``.
    """

    early: str = ""

    def __post_init__(self) -> None:
        check("BLOCK_M", self.BLOCK_M, (8, 16))
        check("BLOCK_N", self.BLOCK_N, (16, 32, 64, 128))
        check("BLOCK_K", self.BLOCK_K, (128, 256, 512, 1024, 2048))
        check("num_stages", self.num_stages, (2, 4))
        check("num_warps", self.num_warps, (1, 2, 4, 8, 16))
        check_early(self.early, able=True)
        if self.num_warps % self.warps_k or 16 * self.warps_n > self.BLOCK_N:
            raise ValueError(f"{self.num_warps} warps cannot divide {self.BLOCK_N}×{self.BLOCK_K}")

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
        return 4 * self.BLOCK_M * self.width(problem) * (self.warps_k + 1)

    def registers(self, problem: Problem) -> int:
        """Registers of a thread for words and scales of ``num_stages`` steps, for sums, and for a
        step of ``a``. Half of that step is held a second time, as the tensor cores read it."""
        rows = self.width(problem) // self.warps_n
        words = rows * STEP * problem.b.dtype.itemsize // (problem.b.pack * 4 * 32)
        numbers = rows // 8 * ((problem.b.scale is not None) + (problem.b.zero is not None))
        ahead = self.num_stages * (words + (numbers if problem.b.grid else 0))
        return ahead + 6 * self.BLOCK_M + 2 * rows * self.BLOCK_M // 32


def _row_scale(problem: Problem) -> dict[str, int]:
    """Return the strides of scales for whole rows, which are in memory one after another."""
    if problem.b.grid:
        return {}
    row = int(kind(problem.b) == "row")
    apart = problem.width if row and problem.batch > 1 else 0
    return {"stride_bsz": apart, "stride_bsk": 0, "stride_bsn": row}


def _shapes(rows: int) -> Iterator[StreamingConfig]:
    """Yield every config for ``rows`` of ``a``, without ``early``. More than 8 warps lack
    registers."""
    warps = itertools.product((1, 2, 4, 8), (1, 2, 4, 8))
    for n, (warps_k, warps_n), stages in itertools.product((16, 32, 64, 128), warps, (2, 4)):
        if warps_k * warps_n <= 8 and 16 * warps_n <= n:
            yield StreamingConfig(
                BLOCK_M=rows, BLOCK_N=n, BLOCK_K=STEP * warps_k, num_stages=stages,
                num_warps=warps_k * warps_n,
            )  # fmt: skip


#: µs of a launch and of a wave of programs; µs of a step of a wave whose warps have 16 rows of the
#: weight each; µs in which an SM decodes a 4-bit number, for each 8 rows of ``a``. The last one is
#: the fraction that each row of ``a`` adds to all but the launch. They are fitted to 2,290 times on
#: an H100 and an H200. Times 12 % above a product's best have half the weight of the best. The
#: error is 9 % (``benchmarks/results/streaming_estimate.txt``).
_LAUNCH_US, _WAVE_US, _STEP_US, _DECODE_US, _ROW = 2.12, 1.85, 0.186, 3.58e-6, 0.0091
#: The order of the norm of these times (:func:`roofline.overlapping`).
_OVERLAP = 1.3
#: Registers of a thread for operands and sums that leave enough of 255 for the rest.
_MOST_REGISTERS = 200
#: The number of shapes that a tuning tries, by how they start. On an H200 the best of them takes at
#: most 4 % longer than the best of all, and 0.2 % in the mean of 18 products
#: (``benchmarks/results/h200/few_rows_configs.txt``).
_TRIED = {"b": 2, "wait": 5, "": 2}
#: The same where only one start is possible.
_TRIED_ALONE = 6


class Streaming(TritonKernel[StreamingConfig]):
    """Up to 16 rows of 16-bit floats, and a weight of packed numbers contiguous along K."""

    name = "triton.streaming"
    version = "3"
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
        yield from against_rows(problem)
        if not problem.stored:
            yield "is for packed weights"
        if problem.k % STEP:
            yield f"K {problem.k} is not a multiple of {STEP}"
        if problem.b.grid and problem.b.block[1] % STEP:
            yield f"groups of {problem.b.block[1]} are not multiples of {STEP}"

    def configs(self, problem: Problem) -> list[StreamingConfig]:
        shapes = _shapes(8 if problem.m <= 8 else 16)
        fitting = [each for each in shapes if each.registers(problem) <= _MOST_REGISTERS]
        fitting.sort(key=lambda each: self.estimate_us(problem, each))
        starts = (*ways(problem), "")
        most = _TRIED if len(starts) > 1 else {"": _TRIED_ALONE}
        tried = [
            replace(each, early=start)
            for start in starts
            for each in (fitting[: most[start]] if SEARCH_LIMITED.get() else fitting)
        ]
        return sorted(tried, key=lambda each: self.estimate_us(problem, each))

    def estimate_us(self, problem: Problem, config: StreamingConfig) -> float:
        """Reading ``b``, decoding 4-bit numbers and waiting for steps, which overlap in part."""
        machine, form = Machine.of(problem.device), problem.b.form
        assert form is not None
        programs = problem.batch * -(-problem.n // config.BLOCK_N)
        waves, idle = roofline.waves_and_idle(problem, config, programs)
        reading = problem.bytes / machine.memory * (1 + idle / 2)
        decoding = 0.0
        if word_decoders.PER_WORD[form.name] == 8:
            numbers = problem.batch * problem.width * problem.k / machine.sms
            decoding = numbers * (1 + idle) * _DECODE_US * config.BLOCK_M / 8
        steps = -(-problem.k // config.BLOCK_K)
        rows = config.width(problem) / config.warps_n
        waiting = waves * (_WAVE_US + _STEP_US * steps * math.sqrt(rows / 16))
        us = roofline.overlapping((reading, decoding, waiting), _OVERLAP)
        return _LAUNCH_US + us * (1 + _ROW * problem.m)

    def builds(self, problem: Problem, config: StreamingConfig) -> list[Build]:
        if problem.m > config.BLOCK_M:
            raise ConfigError(f"{config} has tiles of fewer rows than {problem.m}")
        form = problem.b.form
        assert form is not None
        per = word_decoders.PER_WORD[form.name]
        halves = 2 if problem.gated else 1
        pieces = 2 if per == 8 and config.BLOCK_M == 16 else 1
        words, pairs = layouts(
            config.warps_k, config.warps_n, config.width(problem), config.BLOCK_M, per, pieces
        )
        constants = {
            "WARPS_K": config.warps_k,
            "WARPS_N": config.warps_n,
            "HALVES": halves,
            "PER": per,
            "PROGRAM": word_decoders.program(
                form.name, problem.b.dtype, problem.a.dtype, word=True
            ),
            "ORIGIN": form.origin,
            "WORDS": words,
            "PAIRS": pairs,
            "WHOLE": problem.k % (config.BLOCK_K * config.num_stages) == 0,
            "STAGES": config.num_stages,
            "PIECES": pieces,
        }
        grid = (-(-problem.n // config.BLOCK_N), problem.batch, 1)
        constants |= _row_scale(problem)
        registers = roofline.register_limit(problem, config)
        return [build(streaming_kernel, problem, config, grid, constants, maxnreg=registers)]
