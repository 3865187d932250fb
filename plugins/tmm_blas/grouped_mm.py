"""Ragged products by torch's grouped operators, followed by its operators on rows.

On CUDA torch multiplies groups of bf16 on Hopper and Blackwell if leading strides are multiples of
16 bytes. Otherwise it reads ``offs`` on the host and so waits for the GPU; this kernel declines
then. If groups start inside rows of memory, torch asserts on the device that each starts at a
multiple of 16 bytes. A failed assertion would end the process, so this kernel declines that too.

Scaled e4m3 is multiplied on Hopper only, with ragged rows, in the layout of ``torch._scaled_mm``.

On a CPU ``offs`` is in host memory, so a loop of one product per group serves problems that torch
refuses. 8-bit floats are dequantised, and scaled after the product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from tmm_blas.dequantized import OptTensor, Values, bind_scaled, rescaled
from tmm_blas.dequantized import bind as bind_values
from tmm_core import Launcher, Operand, Problem

Tensor = torch.Tensor

#: Alignment of rows that torch's grouped operators require, in bytes.
ALIGNMENT = 16
#: The rate of torch's grouped product of 8-bit floats, relative to a single product; and bytes per
#: µs that an SM reads in grouped products. Fitted to 72 problems on an H100 and 72 on an H200.
REACH_8_BIT, READS = 0.6, 18e3
#: Dtypes of torch's grouped operator on a CPU.
_ON_CPU = (torch.bfloat16, torch.float16, torch.float32)


def reasons_against(problem: Problem) -> Iterable[str]:
    """Yield why torch cannot serve a ragged problem without waiting for the GPU."""
    problem = gathered(problem)
    device = problem.device
    if device.type == "cpu":
        return
    if not device.nvidia:
        yield "torch's grouped product is used only on NVIDIA GPUs and on CPUs"
    elif device.capability[0] not in (9, 10):
        yield "torch's grouped product reads offs on the host, except on Hopper and Blackwell"
    if _scales_rows(problem):
        yield from _reasons_against_scaled(problem)
    elif problem.value != torch.bfloat16:
        yield f"torch's grouped product takes bf16, not {problem.value}"
    elif problem.out.dtype != torch.bfloat16:
        yield f"torch's grouped product returns bf16, not {problem.out.dtype}"
    elif _splits_rows(problem):
        yield "torch's grouped product asserts that groups start at multiples of 16 bytes"
    if not (problem.a.aligned and problem.b.aligned):
        yield "torch's grouped product needs operands whose rows are aligned to 16 bytes"
    if 0 in (problem.m, problem.n, problem.k):
        yield "nothing to multiply: a dimension is 0"


def gathered(problem: Problem) -> Problem:
    """The problem for torch: its ``a`` is a copy of the rows that an index names."""
    if problem.groups is None or problem.groups.a_index is None:
        return problem
    pitch = problem.a_shape[-1] * problem.a.dtype.itemsize
    aligned = problem.m <= 1 or pitch % ALIGNMENT == 0
    copy = replace(problem.a, layout="row", aligned=aligned, wide=False)
    return replace(problem, a=copy, groups=replace(problem.groups, a_index=None))


def _splits_rows(problem: Problem) -> bool:
    """Whether groups start inside contiguous rows of memory, of an operand or of the result."""
    if problem.along == "m":
        return problem.a.layout == "col"
    if problem.along == "n":
        return True  # torch's result is row-major
    return problem.a.layout != "col" or problem.b.layout == "col"


def _scales_rows(problem: Problem) -> bool:
    """Whether torch's scaled grouped product, which takes scales by row, may serve operands."""
    return problem.native and not (problem.a.grid or problem.b.grid)


def _reasons_against_scaled(problem: Problem) -> Iterable[str]:
    """Yield why torch's scaled grouped product cannot serve 8-bit operands."""
    width = problem.b_shape[-1]
    if not hasattr(torch, "_scaled_grouped_mm"):
        yield "this torch has no scaled grouped product"
    if problem.device.capability[0] != 9:
        yield "torch's scaled grouped product is for Hopper"
    dtypes = (problem.a.dtype, problem.b.dtype, problem.out.dtype)
    if dtypes != (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16):
        yield "torch's scaled grouped product takes e4m3 and returns bf16"
    if problem.along != "m":
        yield "torch's scaled grouped product asserts that groups start at multiples of 16 bytes"
    if problem.a.layout != "row" or problem.b.layout != "col":
        yield "torch's scaled grouped product takes a row-major a and a column-major b"
    if problem.k % 16 or width % 16:
        sizes = f"{problem.k} and {width}"
        yield f"torch's scaled grouped product takes multiples of 16 as K and N, not {sizes}"


def bind(problem: Problem) -> Launcher:
    """The whole expression, with torch's roundings."""
    groups = problem.groups
    assert groups is not None
    side_by_side = gathered(problem)
    multiply = _product(side_by_side)
    dtype = torch.float32 if problem.device.type == "cpu" else problem.value
    of_a, of_b = (bind_values(side_by_side, name, dtype) for name in "ab")
    folded = _folded(side_by_side)
    out_dtype, strides = problem.out.dtype, problem.out_strides
    packed = problem.empty_out("meta").is_contiguous()
    # torch's operators return packed rows; in-place operators keep the padding. They may not write
    # to an epilogue's result, which can be another object's tensor.
    own = problem.epilogue.is_identity
    cleared = Tensor.masked_fill_ if own else Tensor.masked_fill
    eight_bit = problem.a.dtype.itemsize == 1
    scaled = _scales_rows(problem) and problem.device.type != "cpu"

    def run(
        a: Tensor,
        b: Tensor,
        bias: OptTensor,
        residual: OptTensor,
        alpha: float,
        out: OptTensor,
        **rows: Tensor,
    ) -> Tensor:
        offs = rows["offs"]
        a_scale, b_scale = rows.get("a_scale"), rows.get("b_scale")
        a_zero, b_zero = rows.get("a_zero"), rows.get("b_zero")
        if "a_index" in rows:
            index = rows["a_index"]
            a = a[index] if eight_bit else a.index_select(0, index)
            if problem.a.scale is not None and problem.a.scale.kind != "tensor":
                a_scale = None if a_scale is None else a_scale.index_select(0, index)
                a_zero = None if a_zero is None else a_zero.index_select(0, index)
        if scaled:
            z = _scaled_by_torch(a, b, offs, a_scale, b_scale)
        elif problem.stored:
            a = _values(problem, "a", of_a, a, a_scale, a_zero, offs)
            if folded is not None and b_scale is not None:
                b, b_scale = folded(b, b_scale), None
            else:
                b = _values(problem, "b", of_b, b, b_scale, b_zero, offs)
            z = _rescaled(problem, multiply(a, b, offs), offs, a_scale, b_scale)
        else:
            z = multiply(a, b, offs)
        if alpha != 1.0:
            z = z.mul_(alpha)
        if bias is not None:
            z = _combined(torch.add, z, _of_rows(problem, bias, offs), True)
        y = problem.epilogue.apply(z)
        if "out_weights" in rows:
            y = _combined(torch.mul, y, rows["out_weights"][:, None], own)
        # Rows beyond the last group are overwritten: multiplied by 0, NaN would remain.
        beyond = _beyond(problem, offs) if groups.zeroed else None
        if beyond is not None:
            y = cleared(y, beyond, 0)
        if "out_index" in rows:
            places = rows["out_index"].long()
            y = y.new_empty_strided(y.shape, strides).index_copy_(0, places, y)
            if beyond is not None:
                beyond = torch.empty_like(beyond).index_copy_(0, places, beyond)
        if residual is not None:
            y = _combined(torch.add, y, residual, own)
            y = y if beyond is None else cleared(y, beyond, 0)
        if out is None and packed:
            return y.to(out_dtype).contiguous()
        if out is None and y.dtype is out_dtype and y.stride() == strides:
            return y
        return (problem.empty_out(y.device) if out is None else out).copy_(y)

    return run


def _folded(problem: Problem) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return a function from stored weights and their scales of rows to values. None if the scales
    have to multiply the product, which takes two passes over it."""
    if problem.along != "m" or problem.b.scale is None or problem.b.grid or _scales_rows(problem):
        return None
    values = bind_scaled(problem, "b")
    shape = problem.shape("b_scale")
    if values is None:
        return None

    def run(b: Tensor, scale: Tensor) -> Tensor:
        return values(b, scale if scale.numel() == 1 else scale.view(shape)[:, None], None)

    return run


def _combined(function: Any, y: Tensor, other: Tensor, own: bool) -> Tensor:
    """``function(y, other)``, in place if ``y`` is this call's ``own`` and keeps its dtype."""
    own = own and torch.promote_types(y.dtype, other.dtype) is y.dtype
    return function(y, other, out=y) if own else function(y, other)  # type: ignore[no-any-return]


def _of_rows(problem: Problem, bias: Tensor, offs: Tensor) -> Tensor:
    """The bias of each row of the product, or of each product if K is ragged."""
    if problem.along == "k":
        return bias[:, None, :]
    return bias[_groups_of(problem, offs)]


def _groups_of(problem: Problem, offs: Tensor) -> Tensor:
    """The group of each row or column; arbitrary beyond the last group."""
    places = torch.arange(problem.extent, device=offs.device, dtype=offs.dtype)
    group = torch.searchsorted(offs, places, right=True)
    return group.clamp_(max=offs.shape[0] - 1)


def _values(
    problem: Problem,
    name: str,
    values: Values,
    t: Tensor,
    scale: OptTensor,
    zero: OptTensor,
    offs: Tensor,
) -> Tensor:
    """An operand's values, with zero points reshaped to broadcast to them."""
    if (problem.a if name == "a" else problem.b).grid:
        return values(t, scale, zero)
    if zero is not None and zero.numel() == 1:
        zero = zero.reshape(())
    elif zero is not None and t.dim() == 3:
        zero = zero.view(t.shape[0], -1)
        zero = zero[:, :, None] if name == "a" else zero[:, None]
    elif zero is not None and problem.along == "k":
        zero = zero.view(problem.shape(f"{name}_zero"))[_groups_of(problem, offs)]
        zero = zero.mT if name == "a" else zero
    elif zero is not None and name == "a":
        zero = zero[:, None]
    return values(t, None, zero)


def _rescaled(
    problem: Problem, z: Tensor, offs: Tensor, a_scale: OptTensor, b_scale: OptTensor
) -> Tensor:
    """The product ``z`` times the row scales of both operands."""
    along = problem.along
    a_scale = None if problem.a.grid else a_scale
    b_scale = None if problem.b.grid else b_scale
    if a_scale is not None and a_scale.numel() != 1:
        if along == "m":
            a_scale = a_scale[:, None]
        else:
            a_scale = a_scale.view(problem.shape("a_scale"))
            a_scale = a_scale[:, :, None] if along == "k" else a_scale[_groups_of(problem, offs)].mT
    if b_scale is not None and b_scale.numel() != 1 and along != "n":
        b_scale = _of_rows(problem, b_scale.view(problem.shape("b_scale")), offs)
    return rescaled(rescaled(z, a_scale), b_scale)


def _beyond(problem: Problem, offs: Tensor) -> Tensor:
    """Which rows or columns of the result belong to no group."""
    beyond = torch.arange(problem.extent, device=offs.device) >= offs[-1]
    return beyond[:, None] if problem.along == "m" else beyond


def _product(problem: Problem) -> Any:
    """A function from ``(a, b, offs)`` to the product: torch's operator or, on a CPU, a loop over
    groups."""
    same = problem.out.dtype == problem.value and not problem.stored
    aligned = problem.a.aligned and problem.b.aligned
    whole = 0 not in (problem.m, problem.n, problem.k)
    on_cpu = same and aligned and whole and problem.value in _ON_CPU and hasattr(F, "grouped_mm")
    if problem.device.type != "cpu" or on_cpu:
        return _by_torch
    own = torch.float32 if problem.stored else problem.value
    wide = torch.promote_types(own, problem.out.dtype)

    def loop(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return _by_groups(a.to(wide), b.to(wide), offs, problem)

    return loop


def _by_torch(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return F.grouped_mm(_with_strides(a), _with_strides(b), offs=offs)


def _with_strides(t: Tensor) -> Tensor:
    """``t`` with strides that torch accepts. It also checks the stride of a single row or column,
    which is arbitrary."""
    rows, columns = t.shape[-2:]
    if rows != 1 and columns != 1:
        return t
    *batch, of_rows, of_columns = t.stride()
    unit = ALIGNMENT // t.element_size()
    if Operand.of(t).layout == "row":
        of_rows, of_columns = (-(-columns // unit) * unit if rows == 1 else of_rows), 1
    else:
        of_rows, of_columns = 1, (-(-rows // unit) * unit if columns == 1 else of_columns)
    return t.as_strided(t.shape, (*batch, of_rows, of_columns))


def _scaled_by_torch(
    a: Tensor, b: Tensor, offs: Tensor, a_scale: OptTensor, b_scale: OptTensor
) -> Tensor:
    """The product of e4m3 with ragged rows. torch requires a scale for every row and column."""
    rows, columns = (a.shape[0],), (b.shape[0], b.shape[-1])
    by_row = _filled(a_scale, rows, a.device)
    by_column = _filled(b_scale, columns, a.device)
    return torch._scaled_grouped_mm(a, b, by_row, by_column, offs=offs, out_dtype=torch.bfloat16)


def _filled(scale: OptTensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The scale expanded to ``shape``; ones if there is none."""
    if scale is None:
        return torch.ones(shape, dtype=torch.float32, device=device)
    return scale.expand(shape).contiguous() if scale.numel() == 1 else scale


def _by_groups(a: Tensor, b: Tensor, offs: Tensor, problem: Problem) -> Tensor:
    """One product per group; ``offs`` is in host memory."""
    along, z = problem.along, problem.empty_out("cpu")
    if (z.shape[-1], z.dtype) != (b.shape[-1], a.dtype):
        z = a.new_empty((*z.shape[:-1], b.shape[-1]))
    for group, (start, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        if along == "m":
            torch.mm(a[start:end], b[group], out=z[start:end])
        elif along == "n":
            z[:, start:end] = a[group] @ b[:, start:end]
        else:
            torch.mm(a[:, start:end], b[start:end], out=z[group])
    return z
