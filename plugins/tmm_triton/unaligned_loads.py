"""Loads boxes of an unaligned operand, which TMA cannot read, through registers.

Every eight bytes of a box span two 8-byte aligned words, which are loaded and funnel-shifted::

    memory       |  word 0   |  word 1   |  word 2   |
    row               ▕ a b c d │ e f g h │ …
                  skew ◀─▶

These words can be read for any row: they contain bytes of it, and so are in one of its pages. A
k-step is a multiple of 8 bytes, so a row's skew is computed once per tile. The cost is in
instructions, not bytes: with twice as many instructions a 127×4093×4096 took 38 µs on an H200, with
these 28 (cuBLAS 48).
"""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl


@jit
def box_rows(operand, at, size, K, BOX: gl.constexpr, ALONG_K: gl.constexpr, C: gl.constexpr):
    """Return the words of a box, which begins at row (column) ``at`` of ``size``, as a tuple.

    Its items are the address of each word; the skew of the data within it, in bits; the bytes per
    k-step; the k at which each row ends; and the bits of each word past the end of its row.

    Args:
        operand: A pointer to 16-bit elements, and the row stride in elements.
        BOX: Rows and columns, in the order of memory.
        ALONG_K: Memory runs along K.
    """
    pointer, stride = operand
    WORDS: gl.constexpr = BOX[1] // 4
    ACROSS: gl.constexpr = min(32, WORDS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ACROSS, ACROSS], [C.LOADERS, 1], [1, 0])
    down = gl.expand_dims(gl.arange(0, BOX[0], layout=gl.SliceLayout(1, LAYOUT)), 1)
    across = gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, LAYOUT)) * 4, 0)
    address = pointer.to(gl.int64)
    row = down + at if ALONG_K else down
    column = 0 if ALONG_K else at
    # The skew is the same for every eighth row, and so for all rows of a thread.
    skew = (address.to(gl.int32) + 2 * ((row & 7) * stride.to(gl.int32) + column)) & 7
    start = address + 2 * (row.to(gl.int64) * stride + column) - skew + 2 * across
    if ALONG_K:
        apart = 2 * C.BLOCK_K
        ends = gl.where(row < size, K, 0)
        past = (across + 4 - K) * 16
    else:
        apart = 2 * C.BLOCK_K * stride
        ends = K - row
        past = (at + across + 4 - size) * 16
    return start, skew * 8, apart, ends, past


@jit
def box_words(rows, step, last, K, ALONG_K: gl.constexpr, C: gl.constexpr):
    """The words that contain the box of a k-step, or zeros from ``last`` on. They are the lower
    words, the upper words, and how many bits they reach past a row's end."""
    start, skew, apart, ends, past = rows
    k = gl.where(step < last, step * C.BLOCK_K, K)
    if ALONG_K:
        past = past + k * 16
    at = (start + step * apart).to(gl.pointer_type(gl.uint64), bitcast=True)
    low = gl.load(at, mask=(k < ends) & (past < 64), other=0, eviction_policy=C.policy)
    high = gl.load(at + 1, mask=(k < ends) & (past < skew), other=0, eviction_policy=C.policy)
    return low, high, past


@jit
def box_of(words, rows, ALONG_K: gl.constexpr):
    """The box, with four elements per 64 bits and zeros past the end of K."""
    low, high, past = words
    value = _funnel(low, high, rows[1])
    if ALONG_K:
        # In two shifts: a shift by 64 bits is undefined.
        half = (gl.minimum(gl.maximum(past, 0), 64) // 2).to(gl.uint64)
        value = (((value << half) << half) >> half) >> half
    return value


@jit
def _funnel(low, high, skew):
    """64 of 128 bits, from bit ``skew`` < 64 on."""
    return gl.inline_asm_elementwise(
        """{ .reg .b32 a, b, c, d; .reg .pred p;
        mov.b64 {a, b}, $1; mov.b64 {c, d}, $2; setp.ge.s32 p, $3, 32;
        selp.b32 a, b, a, p; selp.b32 b, c, b, p; selp.b32 c, d, c, p;
        shf.r.wrap.b32 a, a, b, $3; shf.r.wrap.b32 b, b, c, $3; mov.b64 $0, {a, b}; }""",
        "=l,l,l,r", [low, high, skew], gl.uint64, is_pure=True, pack=1,
    )  # fmt: skip
