"""Device code that adds what other blocks or consumers summed to a tile, and stores the result."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tmm_core.triton import factors
from tmm_triton.blocks import store
from tmm_triton.packed.transposed_tiles import fours, fours_at, of_fours
from tmm_triton.ragged import finished
from tmm_triton.stream_k import add, await_flag, own_share, reset_flag, set_flag


@jit
def store_part(acc, parts, NTH: gl.constexpr, C: gl.constexpr):
    """Store the sum over a part of a tile for the block with the tile's first steps."""
    which = own_share() * C.n_ways + NTH
    first = _by_thread(acc[0], C)
    gl.store(_addresses(first, parts, which, 0, C), first)
    if C.rest:
        rest = _by_thread(acc[1], C)
        gl.store(_addresses(rest, parts, which, C.first, C), rest)
    set_flag(parts[1] + which)


@jit
def with_part(acc, parts, NTH: gl.constexpr, C: gl.constexpr):
    """Add the sum over a tile's last steps, which the next share begins with."""
    SUMS: gl.constexpr = C.sums
    SUMS_OF_REST: gl.constexpr = C.sums_of_rest
    which = (own_share() + 1) * C.n_ways + NTH
    first = _by_thread(acc[0], C)
    at = _addresses(first, parts, which, 0, C)
    await_flag(parts[1] + which)
    first = _plus(first, at)
    rest = 0
    if C.rest:
        rest = _by_thread(acc[1], C)
        rest = _by_row(_plus(rest, _addresses(rest, parts, which, C.first, C)), SUMS_OF_REST, C)
    reset_flag(parts[1] + which)
    return _by_row(first, SUMS, C), rest


@jit
def _plus(acc, at):
    """``acc`` plus the sums that another SM wrote: read them past this one's L1."""
    return add(acc, gl.load(at, cache_modifier=".cg"))


@jit
def _addresses(acc, parts, which, ROW: gl.constexpr, C: gl.constexpr):
    """Where the workspace has a consumer's sums of a shared tile from one of its rows on."""
    LAYOUT: gl.constexpr = acc.type.layout
    REGISTERS: gl.constexpr = acc.shape[0]
    THREADS: gl.constexpr = acc.shape[1]
    register = gl.expand_dims(gl.arange(0, REGISTERS, gl.SliceLayout(1, LAYOUT)), 1)
    thread = gl.expand_dims(gl.arange(0, THREADS, gl.SliceLayout(0, LAYOUT)), 0)
    # In two additions, so that all registers have the thread's address and a constant.
    of_thread = parts[0] + which * (C.rows * C.BLOCK_M) + thread
    return of_thread + (register * THREADS + ROW * C.rows)


@jit
def _by_thread(acc, C: gl.constexpr):
    """``wgmma``'s sums as [registers, threads], so that addresses are a thread's and a constant."""
    HEIGHT: gl.constexpr = acc.shape[1]
    SPLIT: gl.constexpr = [C.rows // 64, 4, 2, 8, HEIGHT // 8, 4, 2]
    FLAT: gl.constexpr = [C.rows * HEIGHT // 128, 128]
    return acc.reshape(SPLIT).permute((0, 2, 4, 6, 1, 3, 5)).reshape(FLAT)


@jit
def _by_row(acc, SUMS: gl.constexpr, C: gl.constexpr):
    """The reverse of :func:`_by_thread`, in the layout ``SUMS``."""
    HEIGHT: gl.constexpr = acc.shape[0] * 128 // C.rows
    SPLIT: gl.constexpr = [C.rows // 64, 2, HEIGHT // 8, 2, 4, 8, 4]
    FLAT: gl.constexpr = [C.rows, HEIGHT]
    acc = acc.reshape(SPLIT).permute((0, 4, 1, 5, 2, 6, 3)).reshape(FLAT)
    return gl.convert_layout(acc, SUMS, assert_trivial=True)


@jit
def exchanged(acc, exchange, turn, NTH: gl.constexpr, KTH: gl.constexpr, C: gl.constexpr):
    """The consumer of the first steps adds the others' sums to ``acc``, in the order of their first
    steps. The others leave their sums in shared memory.

    Args:
        turn: 0 for the block's first tile, then 1, 0 and so on.
    """
    buffers, left, taken = exchange
    SUMS: gl.constexpr = C.sums
    if KTH == 0:
        mbarrier.wait(left.index(NTH), turn)
        OTHERS: gl.constexpr = C.k_ways - 1
        for other in gl.static_range(OTHERS):
            acc += buffers.index(other * C.n_ways + NTH).load(SUMS)
        mbarrier.arrive(taken.index(NTH))
    else:
        # A fresh barrier counts as having completed phase −1: the first tile passes.
        mbarrier.wait(taken.index(NTH), turn ^ 1)
        buffers.index((KTH - 1) * C.n_ways + NTH).store(acc)
        mbarrier.arrive(left.index(NTH))
    return acc


@jit
def store_tile(acc, tile, part, sizes, scales, target, EPILOGUE: gl.constexpr, C: gl.constexpr):
    """Finish and store sums of [rows of the weight, rows of a]."""
    M, N, _K, _tile_rows, _groups = sizes
    out, bias, residual, alpha, indices, partials_ptr = target
    group, m, end, n = tile
    HEIGHT: gl.constexpr = acc.shape[1]
    HIGH: gl.constexpr = C.high
    gate = acc.permute((1, 0))
    up = gate
    if C.HALVES == 2:
        gate, up = gate.reshape([HEIGHT, 2, HIGH]).permute((0, 2, 1)).split()
    LAYOUT: gl.constexpr = gate.type.layout
    rows = m + gl.arange(0, HEIGHT, gl.SliceLayout(1, LAYOUT))
    cols = n + gl.arange(0, HIGH, gl.SliceLayout(0, LAYOUT))
    if C.splits > 1:
        store(gate, part, rows, cols, M, N, partials_ptr, M * N, N, 1)
    else:
        gate = _scaled(gate, group, cols, N * C.HALVES, scales, C)
        if C.HALVES == 2:
            up = _scaled(up, group, N + cols, 2 * N, scales, C)
        at = rows
        if indices[0] is not None:
            at = gl.load(indices[0] + rows, mask=rows < end, other=0)
        added = residual[0]
        if C.ADDS_FOURS:
            added = None
        y = finished(
            gate, up, group, rows, at, end, cols, N, N, bias[0], bias[1], bias[2], alpha,
            indices[1], added, 0, residual[1], residual[2], EPILOGUE, C.HALVES == 2, False,
        )  # fmt: skip
        if C.ADDS_FOURS:
            T: gl.constexpr = residual[0].dtype.element_ty
            pointers, inside = fours_at(residual[0], residual[1], tile, N, indices[0], HEIGHT, C)
            loaded = gl.load(pointers, mask=inside, other=0)
            y += of_fours(loaded, T, LAYOUT, C).to(gl.float32)
        y = y.to(out[0].dtype.element_ty)
        if C.STORES_FOURS:
            pointers, inside = fours_at(out[0], out[1], tile, N, indices[0], HEIGHT, C)
            gl.store(pointers, fours(y, C), mask=inside)
        else:
            pointers = out[0] + gl.expand_dims(at * out[1], 1) + gl.expand_dims(cols * out[2], 0)
            inside = gl.expand_dims(rows < end, 1) & gl.expand_dims(cols < N, 0)
            gl.store(pointers, y, mask=inside)


@jit
def _scaled(total, group, columns, N, scales, C: gl.constexpr):
    """Sums of [rows of a, rows of the weight], multiplied by a scale for each row of the weight, or
    one of all."""
    if C.ROW_SCALE == "row":
        pointer = scales[0]
        if C.RAGGED:
            pointer += group * scales[1]
        factor = gl.load(pointer + columns, mask=columns < N, other=0)
        total = total * gl.expand_dims(factors(factor), 0)
    elif C.ROW_SCALE == "tensor":
        total = total * factors(gl.load(scales[0]))
    return total
