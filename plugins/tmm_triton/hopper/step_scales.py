"""Scales of blocks along K in ``triton.warp_specialized``: consumers multiply the sums of each step
by the scales of its rows and columns, in fp32.

Scales are read through pointers, since their rows need not be aligned. A step's scales are loaded
two or four steps ahead. A tile's first scales are loaded before the previous tile is stored.
"""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from tmm_triton.hopper.scheduler import tile_at, unit_at


@jit
def _of_columns(grid, matrix, column, end, known, C: gl.constexpr):
    """Addresses of the scales of a product's columns at the first step, and which of them exist.
    One address if all columns share a scale, else one per thread."""
    pointer, stride_z, stride_n, _ = grid
    if C.b_kind == "stack":
        pointer += matrix * stride_z
    if C.ALIKE:
        return pointer + column // C.B_OUTER * stride_n, known & (column < end)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [C.num_warps], [0])
        columns = column + gl.arange(0, C.columns, layout=LAYOUT)
        return pointer + columns // C.B_OUTER * stride_n, known & (columns < end)


@jit
def upcoming(unit, work, sizes, grids, LAYOUT: gl.constexpr, WHO: gl.constexpr, C: gl.constexpr):
    """A unit's tile, with the consumer's first row; the addresses of its scales; and the scales of
    its first steps, zeros if there is no such unit."""
    known = unit < work[0]
    unit = gl.maximum(gl.minimum(unit, work[0] - 1), 0)
    tile, first, last = unit_at(unit, work, sizes, C)
    matrix, row, column, end, corner = tile_at(tile, sizes, C)
    M, N, _, _, _, _ = sizes
    # Zeros where there are none: a loop carries numbers only.
    of_rows = (0, 0)
    of_columns = (0, 0)
    of_second = (0, 0)
    if not C.pingpong:
        row += WHO * C.rows
    if C.A_GROUP:
        pointer, stride_z, stride_m, _ = grids[0]
        if C.a_kind == "stack":
            pointer += matrix * stride_z
        rows = row + gl.arange(0, C.rows, layout=gl.SliceLayout(1, LAYOUT))
        of_rows = (pointer + rows * stride_m, known & (rows < M))
    if C.B_GROUP:
        width = 2 * N if C.GATED else N
        of_columns = _of_columns(grids[1], matrix, column, width, known, C)
        if C.second:
            at = column + (N if C.GATED else C.columns)
            of_second = _of_columns(grids[1], matrix, at, width, known, C)
    lines = (of_rows, of_columns, of_second)
    scales = _first_scales(lines, first, last, grids, C.scales_ahead, C)
    return (matrix, row, column, end, corner), lines, scales


@jit
def _numbers(line, stride, step, last, GROUP: gl.constexpr, C: gl.constexpr):
    pointer, inside = line
    at = step // (GROUP // C.BLOCK_K) * stride
    return gl.load(pointer + at, mask=inside & (step < last), other=0)


@jit
def scales_at(lines, step, last, grids, C: gl.constexpr):
    """The scales of a step as they are stored: of the rows, the columns, and the second product's
    columns. Nothing here uses them: a use would wait for the loads."""
    of_a = 0
    of_b = 0
    of_second = 0
    if C.A_GROUP:
        of_a = _numbers(lines[0], grids[0][3], step, last, C.A_GROUP, C)
    if C.B_GROUP:
        of_b = _numbers(lines[1], grids[1][3], step, last, C.B_GROUP, C)
        if C.second:
            of_second = _numbers(lines[2], grids[1][3], step, last, C.B_GROUP, C)
    return of_a, of_b, of_second


@jit
def _first_scales(lines, first, last, grids, COUNT: gl.constexpr, C: gl.constexpr):
    """The scales of the first COUNT steps."""
    scales = (scales_at(lines, first, last, grids, C),)
    if COUNT > 1:
        scales = scales + _first_scales(lines, first + 1, last, grids, COUNT - 1, C)
    return scales


@jit
def add_scaled(
    acc, part, scales, SECOND: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """``acc`` with the sums of a product, times the product of both operands' scales."""
    of_a, of_b, of_second = scales
    if SECOND:
        of_b = of_second
    if C.B_GROUP and not C.ALIKE:
        of_b = gl.expand_dims(gl.convert_layout(of_b, gl.SliceLayout(0, LAYOUT)), 0)
    if C.A_GROUP and C.B_GROUP:
        scale = gl.expand_dims(of_a, 1) * of_b
    elif C.A_GROUP:
        scale = gl.expand_dims(of_a, 1)
    else:
        scale = of_b
    return _fused(part, scale, acc)


@jit
def _fused(part, scale, acc):
    """``part · scale + acc``, rounded once. Volatile, so that it stays before the next product,
    which takes the registers of ``part``."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [part, scale, acc], gl.float32,
        is_pure=False, pack=1,
    )  # fmt: skip
