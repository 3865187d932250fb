"""The epilogue of a tile in ``triton.warp_specialized``: scales, bias, epilogue function, residual,
and the store, strip by strip through the staging buffers."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.language.nvidia.hopper.tma import store_wait

from tmm_core.triton import releases
from tmm_triton.hopper.scheduler import as_matrix, descriptor_index
from tmm_triton.ragged_tiles import box_start

async_load = releases.async_load
async_store = releases.async_store


@jit
def _strips(x, STRIPS: gl.constexpr):
    """``x[M, N]`` as a tuple of [M, N / STRIPS]; every element stays in its register."""
    if STRIPS == 1:
        return (x,)
    else:  # noqa: RET505 (Triton compiles what follows a return)
        left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]).split()
        return _strips(left, STRIPS // 2) + _strips(right, STRIPS // 2)


@jit
def _scaled(z, factors, matrix, row, column, M, end, LAYOUT: gl.constexpr, C: gl.constexpr):
    """``alpha · a_scale · b_scale · z``, each if the problem has it."""
    alpha, a_scale, b_scale = factors
    if C.a_kind == "stack" and C.A_SCALE == "row":
        a_scale += matrix * M
    if C.b_kind == "stack" and C.B_SCALE == "row":
        b_scale += matrix * end
    if C.SCALED:
        z = z * alpha
    if C.A_SCALE == "row":
        rows = row + gl.arange(0, z.shape[0], layout=gl.SliceLayout(1, LAYOUT))
        z = z * gl.expand_dims(gl.load(a_scale + rows, mask=rows < M, other=0.0), 1)
    elif C.A_SCALE == "tensor":
        z = z * gl.load(a_scale)
    if C.B_SCALE == "row":
        columns = column + gl.arange(0, z.shape[1], layout=gl.SliceLayout(0, LAYOUT))
        z = z * gl.expand_dims(gl.load(b_scale + columns, mask=columns < end, other=0.0), 0)
    elif C.B_SCALE == "tensor":
        z = z * gl.load(b_scale)
    return z


@jit
def bias_of(bias, matrix, column, end, STRIPS: gl.constexpr, C: gl.constexpr):
    """The bias of STRIPS strips, one value per thread. Each thread needs a quarter of all values,
    and gets them through shared memory when it reaches that strip."""
    pointer, stride, stride_z = bias
    if C.RAGGED is not None:
        pointer += matrix * stride_z
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [C.num_warps], [0])
    columns = column + gl.arange(0, C.width, layout=LAYOUT)
    strip = (gl.load(pointer + columns * stride, mask=columns < end, other=0.0),)
    if STRIPS == 1:
        return strip
    else:  # noqa: RET505 (Triton compiles what follows a return)
        return strip + bias_of(bias, matrix, column + C.width, end, STRIPS - 1, C)


@jit
def _with_bias(z, values, LAYOUT: gl.constexpr):
    values = gl.convert_layout(values, gl.SliceLayout(0, LAYOUT))
    return z + gl.expand_dims(values.to(gl.float32), 0)


@jit
def _residual(residual, matrix, row, column, sizes, C: gl.constexpr, LAYOUT: gl.constexpr):
    """A strip of the residual, by pointers."""
    pointer, stride_z, stride_m, stride_n = residual
    M, N, _, _, _, _ = sizes
    if C.stacked:
        pointer += matrix * stride_z
    rows = row + gl.arange(0, C.rows, layout=gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, C.width, layout=gl.SliceLayout(0, LAYOUT))
    down = gl.expand_dims(rows * stride_m, 1)
    across = gl.expand_dims(columns * stride_n, 0)
    inside = gl.expand_dims(rows < M, 1) & gl.expand_dims(columns < N, 0)
    return gl.load(pointer + down + across, mask=inside, other=0.0)


@jit
def fetch(staged, strip, matrix, row, column, end, WHO: gl.constexpr, C: gl.constexpr):
    """Request a strip of the residual, once the last store from its buffer has read it."""
    r_desc, stride, staging, loaded = staged
    BUFFERS: gl.constexpr = C.buffers
    BYTES: gl.constexpr = C.rows * C.width * C.OUT_BYTES
    KIND: gl.constexpr = C.out_kind
    slot = WHO * BUFFERS + strip % BUFFERS
    ready = loaded.index(slot)
    mbarrier.expect(ready, BYTES)
    of_r = descriptor_index(matrix, stride, KIND)
    where = box_start(of_r, end, row, column + strip * C.width, False, KIND)
    async_load(r_desc, where, ready, staging.index(slot))


@jit
def _weighted(y, weights, row, end, LAYOUT: gl.constexpr):
    """``y``, each row times its weight."""
    rows = row + gl.arange(0, y.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    weight = gl.load(weights + rows, mask=rows < end, other=0.0).to(gl.float32)
    return y * gl.expand_dims(weight, 1)


@jit
def _scatter(z, matrix, row, column, corner, target, sizes, C: gl.constexpr):
    """Store by pointers: rows that are scattered, or unaligned, which allows no access wider than
    an element."""
    pointer, strides, index = target
    stride_z, stride = strides
    M, N, _, _, _, _ = sizes
    if C.stacked:
        pointer += matrix * stride_z
    ACROSS: gl.constexpr = min(32, z.shape[1] // C.STORED)
    # A warp's lanes are side by side in one row, so that each of its stores is contiguous.
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, C.STORED], [32 // ACROSS, ACROSS], [C.num_warps, 1], [1, 0]
    )
    z = gl.convert_layout(z.to(pointer.dtype.element_ty), LAYOUT)
    rows = row + gl.arange(0, z.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, z.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    # Elements of the previous tile are not stored again: if one tile is split, sums may differ.
    own_rows = (rows >= corner[0]) & (rows < M)
    own_columns = (columns >= corner[1]) & (columns < N)
    inside = gl.expand_dims(own_rows, 1) & gl.expand_dims(own_columns, 0)
    across = gl.expand_dims(columns, 0)
    if C.SCATTERED:
        rows = gl.load(index + rows, mask=own_rows, other=0)
    gl.store(pointer + gl.expand_dims(rows * stride, 1) + across, z, mask=inside)


@jit
def _reduce_rows(
    y, strip, row, column, corner, port, sizes, LAYOUT: gl.constexpr, OF: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Store each row's reduction of a strip's columns, for ``output_ports.reduce_port_kernel``. If
    this tile was moved inside, elements that the previous tile counted are left out."""
    pointer, start, stride, _ = port
    M, N, _, _, _, _ = sizes
    rows = row + gl.arange(0, C.rows, layout=gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, C.width, layout=gl.SliceLayout(0, LAYOUT))
    own = gl.expand_dims((columns >= corner[1]) & (columns < N), 0)
    if C.REDUCE == "max":
        terms = gl.where(own, OF(y), float("-inf"))
        undefined = terms != terms
        most = gl.max(gl.where(undefined, float("-inf"), terms), axis=1)
        total = gl.where(gl.max(undefined.to(gl.int32), axis=1) > 0, float("nan"), most)
    else:
        total = gl.sum(gl.where(own, OF(y), 0.0), axis=1)
    part = corner[1] // C.BLOCK_N * C.subtiles + strip
    inside = (rows >= corner[0]) & (rows < M)
    gl.store(pointer + (start + part * stride) + rows, total, mask=inside)


@jit
def _store_groups(
    y, row, column, corner, pointer, sizes, LAYOUT: gl.constexpr, OF: gl.constexpr,
    KIND: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Store what a strip has of an output with groups of columns, which are whole; do nothing if
    KIND is None. Rows that the previous tile stored are left out."""
    if KIND is not None:
        M, N, _, _, _, _ = sizes
        COUNT: gl.constexpr = C.width // C.GROUP
        columns = column + gl.arange(0, C.width, layout=gl.SliceLayout(0, LAYOUT))
        y = gl.where(gl.expand_dims(columns < N, 0), y, 0.0)
        found = OF(y.reshape([C.rows, COUNT, C.GROUP]))
        if KIND == "tile":
            # Each warp has the rows that it had, 16 bytes per thread.
            IN: gl.constexpr = gl.BlockedLayout([4, 16], [4, 8], [C.num_warps, 1], [1, 0])
            found = found.reshape([C.rows, C.width]).to(pointer.dtype.element_ty)
            found = gl.convert_layout(found, IN)
            rows = row + gl.arange(0, C.rows, layout=gl.SliceLayout(1, IN))
            columns = column + gl.arange(0, C.width, layout=gl.SliceLayout(0, IN))
            across = gl.expand_dims(columns, 0)
            down = gl.expand_dims(rows.to(gl.int64) * N, 1)
            inside = gl.expand_dims(columns < N, 0)
        else:
            AT: gl.constexpr = found.type.layout
            rows = row + gl.arange(0, C.rows, layout=gl.SliceLayout(1, AT))
            groups = column // C.GROUP + gl.arange(0, COUNT, layout=gl.SliceLayout(0, AT))
            across = gl.expand_dims(groups.to(gl.int64) * M, 0)
            down = gl.expand_dims(rows, 1)
            inside = gl.expand_dims(groups * C.GROUP < N, 0)
        own = gl.expand_dims((rows >= corner[0]) & (rows < M), 1)
        gl.store(pointer + down + across, found, mask=own & inside)


@jit
def _store_outputs(
    y, strip, row, column, corner, port, sizes, LAYOUT: gl.constexpr, OF: gl.constexpr,
    OF_2: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Store what a strip has of the auxiliary outputs, if there are any."""
    PORT: gl.constexpr = C.PORT
    PORT_2: gl.constexpr = C.PORT_2
    if C.REDUCE is not None:
        _reduce_rows(y, strip, row, column, corner, port, sizes, LAYOUT, OF, C)
    if C.GROUP:
        _store_groups(y, row, column, corner, port[0], sizes, LAYOUT, OF, PORT, C)
        _store_groups(y, row, column, corner, port[3], sizes, LAYOUT, OF_2, PORT_2, C)


@jit
def store_tile(
    z, up, bias, matrix, row, column, corner, phase, target, sizes,
    EPILOGUE: gl.constexpr, OF: gl.constexpr, OF_2: gl.constexpr, WHO: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Finish the fp32 accumulator (two, gate and up, where gated), round it and send it off
    strip by strip, through one or two staging buffers."""
    destination, _, residual, factors, port, weights, _ = target
    M, N, _, _, _, _ = sizes
    SUBTILES: gl.constexpr = C.subtiles
    WIDTH: gl.constexpr = C.width
    KIND: gl.constexpr = C.out_kind
    BUFFERS: gl.constexpr = C.buffers
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[C.num_warps, 1], instr_shape=[16, WIDTH, 16]
    )
    strips = _strips(z, C.columns // WIDTH)
    if C.second:
        strips = strips + _strips(up, C.second // WIDTH)
    for i in gl.static_range(SUBTILES):
        at = column + i * WIDTH
        x = gl.convert_layout(strips[i], LAYOUT)
        x = _scaled(x, factors, matrix, row, at, M, 2 * N if C.GATED else N, LAYOUT, C)
        if C.BIAS:
            x = _with_bias(x, bias[i], LAYOUT)
        if C.GATED:
            y = gl.convert_layout(strips[SUBTILES + i], LAYOUT)
            y = _scaled(y, factors, matrix, row, at + N, M, 2 * N, LAYOUT, C)
            if C.BIAS:
                y = _with_bias(y, bias[SUBTILES + i], LAYOUT)
            x = EPILOGUE(x, y)
        else:
            x = EPILOGUE(x)
        if C.WEIGHTED:
            x = _weighted(x, weights, row, M, LAYOUT)
        if C.RESIDUAL and not C.FETCH:
            x = x + _residual(residual, matrix, row, at, sizes, C, LAYOUT).to(gl.float32)
        if not C.FETCH:
            _store_outputs(x, i, row, at, corner, port, sizes, LAYOUT, OF, OF_2, C)
        if C.POINTERS:
            _scatter(x, matrix, row, at, corner, destination, sizes, C)
        else:
            c_desc, staging, _ = destination
            slot = WHO * BUFFERS + i % BUFFERS
            buffer = as_matrix(staging.index(slot), KIND)
            if C.FETCH:
                if i > 0 and i - 1 + BUFFERS < SUBTILES:
                    store_wait(0)
                    fetch(residual, i - 1 + BUFFERS, matrix, row, column, M, WHO, C)
                loaded = residual[3]
                mbarrier.wait(loaded.index(slot), phase ^ (i // BUFFERS & 1))
                x = x + buffer.load(LAYOUT).to(gl.float32)
                _store_outputs(x, i, row, at, corner, port, sizes, LAYOUT, OF, OF_2, C)
            else:
                # The store that last used this buffer has read it. It is the one before the last,
                # or the last after a tile with an odd number of strips.
                store_wait(0 if i == 0 and SUBTILES % BUFFERS else BUFFERS - 1)
            buffer.store(x.to(c_desc.dtype))
            fence_async_shared()
            where = box_start(matrix, M, row, at, False, KIND)
            async_store(c_desc, where, staging.index(slot))
