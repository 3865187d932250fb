"""Device code that decodes packed values into the registers from which ``wgmma`` reads them."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from tmm_core.triton import factors


@jit
def _column(step, C: gl.constexpr):
    """The first group of a step along K."""
    if C.GROUP > C.BLOCK_K:
        step = step // (C.GROUP // C.BLOCK_K)
    elif C.GROUP:
        step = step * C.parts
    return step


@jit
def numbers_at(grid, rows, step, C: gl.constexpr):
    """Addresses of the scales or zero points of the weight's rows at a step, [rows, parts]."""
    pointer, stride_z, stride_n, stride_k = grid
    group, row, part, _inside = rows
    at = row // C.OUTER * stride_n
    if C.GROUP:
        at = at + (_column(step, C) + part) * stride_k
    if C.RAGGED:
        pointer += group * stride_z
    return pointer + at


@jit
def numbers_of_step(at, grids, rows, step, last, K, C: gl.constexpr):
    """The scales and zero points of a step, and the addresses of the consumer's next one. Nothing
    reads what is returned for steps from ``last`` on."""
    scales_at, zeros_at = at
    _group, _row, part, inside = rows
    inside = inside & (step < last)
    if C.parts > 1:
        inside = inside & (_column(step, C) + part < gl.cdiv(K, C.GROUP))
    further = _column(step + C.k_ways, C) - _column(step, C)
    # A loop carries numbers only, so 0 stands for what is absent.
    scale = 0
    zero = 0
    if C.GROUP:
        scale = gl.load(scales_at, mask=inside)
        scales_at += further * grids[0][3]
    if C.ZERO:
        zero = gl.load(zeros_at, mask=inside)
        if C.GROUP:
            zeros_at += further * grids[1][3]
    return scale, zero, (scales_at, zeros_at)


@jit
def stored_units(b_ring, stage, NTH: gl.constexpr, C: gl.constexpr):
    """A consumer's part of a stage in registers, as it is stored."""
    UNITS: gl.constexpr = C.units
    OF_HALF: gl.constexpr = C.units_of_half
    SHAPE: gl.constexpr = [C.rows, C.wide]
    box = (stage * C.n_ways + NTH) * C.HALVES
    units = b_ring.index(box).load(OF_HALF)
    if C.HALVES == 2:
        up = b_ring.index(box + 1).load(OF_HALF)
        units = gl.join(units, up).permute((2, 0, 1)).reshape(SHAPE)
        units = gl.convert_layout(units, UNITS, assert_trivial=True)
    return units.to(gl.int32)


@jit
def _twice(value, T: gl.constexpr):
    """A pair of the same 16-bit float."""
    if value.dtype == gl.uint8:
        value = factors(value)
    bits = value.to(T).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@jit
def _spread(numbers, C: gl.constexpr):
    """A step's numbers, [rows, parts], for each unit, [rows, wide]."""
    SPLIT: gl.constexpr = C.split_units
    UNITS: gl.constexpr = C.units
    SHAPE: gl.constexpr = [C.rows, C.parts, C.wide // C.parts]
    WHOLE: gl.constexpr = [C.rows, C.wide]
    spread = gl.zeros(SHAPE, gl.int32, SPLIT) + gl.expand_dims(numbers, 2)
    return gl.convert_layout(spread.reshape(WHOLE), UNITS, assert_trivial=True)


@jit
def decoded(units, zero, scale, T: gl.constexpr, C: gl.constexpr):
    """The values of a consumer's rows as ``wgmma``'s operand in registers, less their zero points,
    and multiplied by their scales if sums are not."""
    ROWS: gl.constexpr = C.rows
    BLOCK_K: gl.constexpr = C.BLOCK_K
    PROGRAM: gl.constexpr = C.PROGRAM
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, C.sums, 2)
    REGISTERS: gl.constexpr = C.registers_of
    operands = (units,)
    if C.ZERO:
        origin = _twice(-(zero.to(gl.float32) + C.OFFSET), T)
        operands += (_spread(origin, C),)  # type: ignore[assignment]
    if C.SCALED == "pair":
        operands += (_spread(_twice(scale, T), C),)  # type: ignore[assignment]
    elif C.SCALED == "wide":
        factor = scale.to(gl.float32).to(gl.int32, bitcast=True)
        operands += (_spread(factor, C),)  # type: ignore[assignment]
    # Each call spells its results' dtypes, which Triton 3.9 does not unwrap in a constant tuple.
    if C.pairs == 4:
        pairs = gl.inline_asm_elementwise(
            PROGRAM, REGISTERS, operands, is_pure=True, pack=1,
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        )  # fmt: skip
        pairs = gl.join(gl.join(pairs[0], pairs[2]), gl.join(pairs[1], pairs[3]))
    elif C.pairs == 2:
        pairs = gl.inline_asm_elementwise(
            PROGRAM, REGISTERS, operands, is_pure=True, pack=1, dtype=(gl.int32, gl.int32)
        )
        pairs = gl.join(pairs[0], pairs[1])
    else:
        pairs = gl.inline_asm_elementwise(
            PROGRAM, REGISTERS, operands, is_pure=True, pack=1, dtype=gl.int32
        )
    if C.arranged:
        # A thread's pairs, [rows, quarters, words of a quarter, pairs of a word], in turn.
        QUARTERS: gl.constexpr = [ROWS, 4, BLOCK_K // 8]
        WHOLE: gl.constexpr = [ROWS, BLOCK_K // 2]
        pairs = pairs.reshape(QUARTERS).permute((0, 2, 1)).reshape(WHOLE)
    low = pairs.to(gl.int16).to(T, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(T, bitcast=True)
    values = gl.join(low, high).reshape([ROWS, BLOCK_K])
    return gl.convert_layout(values, OPERAND, assert_trivial=True)
