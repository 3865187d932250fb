"""Device code shared by kernels: the order of tiles, and how blocks are loaded, multiplied,
finished and stored."""

from __future__ import annotations

import triton
import triton.language as tl

from tmm_core.triton import factors


@triton.jit
def tile_of(pid, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M):
    """The tile of the ``pid``-th program: down GROUP_M tiles, then right, so that concurrent
    programs share rows of A and columns of B in L2."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    per_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first = (pid // per_group) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    within = pid % per_group
    return first + within % height, within // height


@triton.jit
def load(ptrs, rows, cols, M, N, WHOLE_ROWS: tl.constexpr, WHOLE_COLS: tl.constexpr):
    """A tile with zeros outside [M, N]; a dimension that blocks divide needs no mask."""
    if WHOLE_ROWS and WHOLE_COLS:
        tile = tl.load(ptrs)
    elif WHOLE_COLS:
        tile = tl.load(ptrs, mask=rows[:, None] < M, other=0.0)
    elif WHOLE_ROWS:
        tile = tl.load(ptrs, mask=cols[None, :] < N, other=0.0)
    else:
        tile = tl.load(ptrs, mask=(rows[:, None] < M) & (cols[None, :] < N), other=0.0)
    return tile


@triton.jit
def words(source, row, word, rows, cols, stride):
    """The ``word``-th eight bytes of unaligned rows, with zeros past cols and rows.

    The two aligned words that contain them are loaded and funnel-shifted. Both contain bytes of the
    row, so each is in a page of the row.
    """
    SIZE: tl.constexpr = source.dtype.element_ty.primitive_bitwidth
    PER: tl.constexpr = 64 // SIZE
    start = source.to(tl.int64) + (row * stride).to(tl.int64) * (SIZE // 8)
    skew = ((start & 7) * 8).to(tl.int32)[:, None]
    ptrs = (start & -8).to(tl.pointer_type(tl.uint64))[:, None] + word[None, :]
    left = cols - word[None, :] * PER
    inside = (row[:, None] < rows) & (left > 0)
    low = tl.load(ptrs, mask=inside, other=0)
    reaches = inside & (skew > 0) & (left * SIZE > 64 - skew)
    high = tl.load(ptrs + 1, mask=reaches, other=0)
    # In two shifts: a shift by 64 bits is undefined.
    value = (low >> skew.to(tl.uint64)) | ((high << 1) << (63 - skew).to(tl.uint64))
    past = tl.maximum(64 - tl.maximum(left, 0) * SIZE, 0)
    ones = tl.full([1, 1], -1, tl.int64).to(tl.uint64)
    return tl.where(past < 64, value & (ones >> tl.minimum(past, 63).to(tl.uint64)), 0)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` in fp32."""
    if a.dtype.primitive_bitwidth == 8:
        # Hopper's tensor cores sum 8-bit products with about 14 bits: add to fp32 along the way.
        PROMOTE: tl.constexpr = a.shape[1] if a.shape[1] < 128 else 128
        return tl.dot(a, b, acc, max_num_imprecise_acc=PROMOTE)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def step(a, b, acc, PRECISION: tl.constexpr, SWAP: tl.constexpr = False):
    """One step along K of plain operands: ``acc + a @ b``; with SWAP, the transpose of that sum."""
    return dot(tl.trans(b), tl.trans(a), acc, PRECISION) if SWAP else dot(a, b, acc, PRECISION)


@triton.jit
def rescale(
    acc, z, rows, cols, M, N, a_scale_ptr, b_scale_ptr,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
):  # fmt: skip
    """``acc · a_scale · b_scale``, where each scale is a scalar, one per row or column, or
    absent."""
    if A_SCALE == "row":
        scale = tl.load(a_scale_ptr + z * M + rows, mask=rows < M, other=0.0)
        acc *= factors(scale)[:, None]
    elif A_SCALE == "tensor":
        acc *= factors(tl.load(a_scale_ptr))
    if B_SCALE == "row":
        scale = tl.load(b_scale_ptr + z * N + cols, mask=cols < N, other=0.0)
        acc *= factors(scale)[None, :]
    elif B_SCALE == "tensor":
        acc *= factors(tl.load(b_scale_ptr))
    return acc


@triton.jit
def affine(acc, cols, N, bias_ptr, stride_bias, alpha):
    """``alpha · acc + bias``; either may be absent."""
    if alpha is not None:
        acc = acc * alpha
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + cols * stride_bias, mask=cols < N, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    return acc


@triton.jit
def add_residual(acc, z, rows, cols, M, N, residual_ptr, stride_rz, stride_rm, stride_rn):
    if residual_ptr is not None:
        ptrs = residual_ptr + z * stride_rz
        ptrs += rows[:, None] * stride_rm + cols[None, :] * stride_rn
        acc += load(ptrs, rows, cols, M, N, False, False).to(tl.float32)
    return acc


@triton.jit
def store(acc, z, rows, cols, M, N, out_ptr, stride_oz, stride_om, stride_on):
    """Round once, and store the elements inside [M, N]."""
    ptrs = out_ptr + z * stride_oz
    ptrs += rows[:, None] * stride_om + cols[None, :] * stride_on
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def finish(
    acc, z, rows, cols, M, N,
    bias_ptr, stride_bias, alpha, EPILOGUE: tl.constexpr,
    residual_ptr, stride_rz, stride_rm, stride_rn, out_ptr, stride_oz, stride_om, stride_on,
):  # fmt: skip
    """``out[z] = EPILOGUE(alpha · acc + bias) + residual[z]`` for one tile."""
    acc = EPILOGUE(affine(acc, cols, N, bias_ptr, stride_bias, alpha))
    acc = add_residual(acc, z, rows, cols, M, N, residual_ptr, stride_rz, stride_rm, stride_rn)
    store(acc, z, rows, cols, M, N, out_ptr, stride_oz, stride_om, stride_on)


@triton.jit
def parts(acc, COUNT: tl.constexpr):
    """The whole tile, or its left and right halves. No data moves between threads: each thread of
    an MMA accumulator holds elements of both halves."""
    if COUNT == 1:
        return (acc,)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()
