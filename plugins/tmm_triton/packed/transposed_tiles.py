"""Device code that stores a transposed result, and loads its residual, four elements at a time.

``triton.mixed_input`` computes ``out.T``. So in ``wgmma``'s layout a thread's register has two
neighbours of a column of the result. ``movmatrix`` transposes blocks of 8 by 8 elements in the
registers of a warp. After an exchange between threads, each has four neighbours of a row, and four
threads have a whole sector (``benchmarks/results/h200/stores_of_four.txt``).
"""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl


@jit
def _transposed(pairs):
    """Blocks of 8 by 8 elements of 16 bits, transposed. Two neighbours of a column in a register
    become two of a row, or the reverse."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [pairs],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def fours(y, C: gl.constexpr):
    """A finished tile of 16-bit floats, [rows of a, rows of the weight], as numbers of 64 bits that
    have four neighbours of a row."""
    HEIGHT: gl.constexpr = y.shape[0]
    HIGH: gl.constexpr = y.shape[1]
    COLUMNS: gl.constexpr = [HEIGHT // 8, 4, 2, HIGH]
    BLOCKS: gl.constexpr = [HEIGHT // 8, 4, HIGH // 8, 8]
    ROWS: gl.constexpr = [HEIGHT, HIGH // 2]
    HALVES: gl.constexpr = [HEIGHT, HIGH // 4, 2]
    PAIRS: gl.constexpr = C.pairs_of_rows(HEIGHT)
    FOURS: gl.constexpr = C.fours(HEIGHT)
    first, second = y.to(gl.int16, bitcast=True).reshape(COLUMNS).permute((0, 1, 3, 2)).split()
    pairs = gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )
    pairs = _transposed(pairs).reshape(BLOCKS).permute((0, 3, 2, 1)).reshape(ROWS)
    first, second = gl.convert_layout(pairs, PAIRS).reshape(HALVES).split()
    numbers = gl.inline_asm_elementwise(
        "mov.b64 $0, {$1, $2};", "=l,r,r", [first, second], dtype=gl.int64, is_pure=True, pack=1
    )
    return gl.convert_layout(numbers, FOURS, assert_trivial=True)


@jit
def of_fours(numbers, T: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr):
    """The reverse of :func:`fours`, in the layout ``LAYOUT``."""
    HEIGHT: gl.constexpr = numbers.shape[0]
    HIGH: gl.constexpr = numbers.shape[1] * 4
    BLOCKS: gl.constexpr = [HEIGHT // 8, 8, HIGH // 8, 4]
    COLUMNS: gl.constexpr = [HEIGHT // 8, 4, HIGH]
    ROWS: gl.constexpr = [HEIGHT, HIGH // 2]
    WHOLE: gl.constexpr = [HEIGHT, HIGH]
    PAIRS: gl.constexpr = C.pairs_of_blocks(HEIGHT)
    first, second = gl.inline_asm_elementwise(
        "mov.b64 {$0, $1}, $2;", "=r,=r,l", [numbers], dtype=(gl.int32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip
    pairs = gl.convert_layout(gl.join(first, second).reshape(ROWS), PAIRS)
    pairs = _transposed(pairs.reshape(BLOCKS).permute((0, 3, 2, 1)).reshape(COLUMNS))
    first, second = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16),
        is_pure=True, pack=1,
    )  # fmt: skip
    halves = gl.join(first, second).permute((0, 1, 3, 2)).reshape(WHOLE)
    return gl.convert_layout(halves, LAYOUT, assert_trivial=True).to(T, bitcast=True)


@jit
def fours_at(pointer, stride, tile, N, index_ptr, HEIGHT: gl.constexpr, C: gl.constexpr):
    """Where a matrix has a tile's elements by four, and whether that is inside it."""
    FOURS: gl.constexpr = C.fours(HEIGHT)
    OF_ROW: gl.constexpr = C.high // 4
    _group, m, end, n = tile
    rows = m + gl.arange(0, HEIGHT, gl.SliceLayout(1, FOURS))
    cols = n // 4 + gl.arange(0, OF_ROW, gl.SliceLayout(0, FOURS))
    inside = gl.expand_dims(rows < end, 1) & gl.expand_dims(cols < N // 4, 0)
    at = rows
    if index_ptr is not None:
        at = gl.load(index_ptr + rows, mask=rows < end, other=0)
    pointer = pointer.to(gl.pointer_type(gl.int64), bitcast=True)
    return pointer + gl.expand_dims(at * (stride // 4), 1) + gl.expand_dims(cols, 0), inside
