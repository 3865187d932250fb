"""``tmm::grouped_matmul`` as a torch operator, and its derivatives.

Gradients are grouped products themselves. If rows are ragged, the gradient of ``a`` is a product
with ragged rows, and the gradient of ``b`` a product with a ragged K. The gradient of data beyond
the last group is zero for any data.
"""

from __future__ import annotations

from typing import Any

import torch

from tmm_core import compat
from tmm_core.interop import autograd_state, flops
from tmm_core.interop.declaration import declare, rewritten
from tmm_core.interop.gradients import followed
from tmm_core.launch.check import has_format, result_dtype
from tmm_core.launch.grouped_call import check, fast_path_allowed, ragged_along, replay, run
from tmm_core.launch.warm import MAX_PLANS, epilogue_of
from tmm_core.settings import overridden, within
from tmm_core.spec.arguments import GroupedArguments
from tmm_core.spec.epilogue import IDENTITY, Epilogue
from tmm_core.spec.operand import grouped_strides

Tensor = torch.Tensor


def _differentiable(*given: Any, **named: Any) -> Tensor:
    """The operator's kernel for the Autograd dispatch key.

    A differentiated call is split as in :mod:`tmm_core.interop.autograd`. First comes one product,
    fused with the first stage of the epilogue if possible. The rest of the epilogue, row weights,
    scattering and the residual follow.
    """
    call = GroupedArguments(*given, **named)
    a, b, offs, bias, residual, alpha, epilogue, out_dtype, a_index, *_ = call
    out_index, out_weights, zeroed = call.out_index, call.out_weights, call.zeroed
    if not autograd_state.differentiated(*call.given):
        with compat.below_autograd():
            return grouped_matmul(*call[:-1])  # type: ignore[no-any-return]
    if has_format(call):
        return autograd_state.record(autograd_state.Underivable, grouped_matmul, *call[:-1])
    parsed = epilogue_of(epilogue) if epilogue else IDENTITY
    eager = _is_eager(call)
    _check_whole(call, parsed, eager)
    head, rest = parsed.parts
    # The gradient of a row weight sums over its row, and scattering reads all rows. Rows beyond the
    # last group are replaced, not multiplied by zero: they may be NaN.
    clean = zeroed or out_weights is not None
    along = ragged_along(a, b)
    inner = residual if rest is None and head is IDENTITY and not clean else None
    y = autograd_state.record(
        _Product, a, b, offs, bias, inner, alpha, autograd_state.head_text(head), out_dtype,
        a_index, clean,
    )  # fmt: skip
    if rest is not None:
        y = followed(y, rest, eager=eager)
    adds_residual = residual is not None and inner is None
    known = _known(y, offs, along) if clean or adds_residual else None
    if clean and (rest is not None or bias is not None or head is not IDENTITY):
        y = torch.where(known, y, 0)  # type: ignore[arg-type]
    if out_weights is not None:
        y = (y * torch.where(known, out_weights[:, None], 0)).to(y.dtype)  # type: ignore[arg-type]
    if out_index is not None:
        places = out_index.long()
        y = torch.zeros_like(y).index_copy(0, places, y)
        if adds_residual:
            known = torch.empty_like(known).index_copy(0, places, known)  # type: ignore[arg-type]
    if adds_residual:
        y = (y + torch.where(known, residual, 0)).to(y.dtype)  # type: ignore[arg-type]
    return y


#: The shapes, dtypes and other arguments of differentiated calls that were found valid.
_valid: set[tuple[Any, ...]] = set()


def _check_whole(call: GroupedArguments, epilogue: Epilogue, eager: bool) -> None:
    """Check a call before a part of it is computed. An eager call whose arguments were valid before
    is not checked again, which saves a quarter of a small call's host time."""
    if not eager:
        check(call, epilogue)
        return
    key = tuple(
        (t.shape, t.dtype, t.device, t.layout, t.is_nested) if isinstance(t, Tensor) else t
        for t in (*call[:5], *call[6:])  # without alpha: every number is valid
    )
    if key not in _valid:
        check(call, epilogue)
        if len(_valid) >= MAX_PLANS:
            _valid.clear()
        _valid.add(key)


def _is_eager(call: GroupedArguments) -> bool:
    """Whether only the call's gradient is recorded, at one level."""
    rows = call.a_index, call.out_index, call.out_weights
    return (
        not torch.compiler.is_dynamo_compiling()
        and fast_path_allowed(*call[:5], *rows, cast=True, shown=True)
        and not (compat.is_batched(call.a) or compat.is_batched(call.b))
        and not autograd_state.transformed(*call.given)
    )


def _known(y: Tensor, offs: Tensor, along: str) -> Tensor:
    """Return a mask of the rows or columns of the result that are in a group: all, if K is
    ragged."""
    if along == "k":
        return torch.ones((), dtype=torch.bool, device=y.device)
    dimension = ("m", "n").index(along)
    # A DTensor can only be combined with DTensors, so the mask is made from ``offs``.
    places = offs.new_ones(y.shape[dimension]).cumsum(0) <= offs[-1]
    return places[:, None] if along == "m" else places


class _Product(autograd_state.OneLevel):
    """The grouped form of :class:`tmm_core.interop.gradients.Product`."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        offs: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        alpha: float,
        epilogue: str,
        out_dtype: torch.dtype | None,
        a_index: Tensor | None,
        zeroed: bool,
    ) -> Tensor:
        with autograd_state.below_autograd():
            rest = (bias, residual, alpha, epilogue, out_dtype, a_index, None, None, zeroed)
            y: Tensor = grouped_matmul(a, b, offs, *rest)
        ctx.alpha, ctx.epilogue, ctx.out_dtype = alpha, epilogue_of(epilogue), out_dtype
        ctx.zeroed = zeroed
        kept = None if ctx.epilogue.linear else y
        wants_a, wants_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(
            a if wants_b else None, b if wants_a else None, offs, a_index, kept
        )  # fmt: skip
        ctx.save_for_forward(a, b, offs, a_index, kept)
        ctx.set_materialize_grads(False)  # an absent tangent is None, not a product of zeros
        ctx.output = autograd_state.form_of(y)
        ctx.along = ragged_along(a, b)
        ctx.a, ctx.b, ctx.bias, ctx.residual = map(autograd_state.form_of, (a, b, bias, residual))
        ctx.a_column, ctx.b_column = map(autograd_state.is_column_major, (a, b))
        ctx.settings = overridden()
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 11
        return within(ctx.settings, _Product._gradients, ctx, grad)

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, offs, a_index, y = ctx.saved_tensors
        wants_a, wants_b, _, wants_bias, wants_residual, *_ = ctx.needs_input_grad
        along, alpha = ctx.along, ctx.alpha
        dz = ctx.epilogue.output_vjp(grad, y, *ctx.epilogue.parameters)
        da = db = dbias = dresidual = None
        if wants_bias:
            dbias = _summed(dz, offs, along, *ctx.bias)
        if wants_residual:
            known = _known(grad, offs, along)
            dresidual = autograd_state.as_gradient(torch.where(known, grad, 0), ctx.residual[1])
        dz = autograd_state.as_gradient(dz, ctx.a[1])
        if wants_a:
            da = autograd_state.multiply_in_layout(ctx.a_column, _multiply, dz, b.mT, offs, alpha)
            if a_index is not None:
                # The gradient of a row is the sum over all entries that gathered it. Entries beyond
                # the last group add zero.
                wide = torch.promote_types(da.dtype, torch.float32)
                zeros = da.new_zeros(ctx.a[0], dtype=wide)
                da = zeros.index_add(0, a_index, da.to(wide)).to(da.dtype)
        if wants_b:
            a = a if a_index is None else a.index_select(0, a_index)
            db = autograd_state.multiply_in_layout(ctx.b_column, _multiply, a.mT, dz, offs, alpha)
        return da, db, None, dbias, dresidual, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, ta: Any, tb: Any, _: None, tbias: Any, tresidual: Any, *__: None) -> Tensor:
        with autograd_state.outer_levels():
            a, b, offs, a_index, y = map(autograd_state.primal, ctx.saved_tensors)
            t = tresidual
            more = ("", ctx.out_dtype, a_index, None, None, ctx.zeroed)
            if ta is not None:
                t, tbias = grouped_matmul(ta, b, offs, tbias, t, ctx.alpha, *more), None
            if tb is not None:
                t, tbias = grouped_matmul(a, tb, offs, tbias, t, ctx.alpha, *more), None
            if tbias is not None:
                spread = _spread(tbias, offs, ctx.output[0], ctx.along)
                t = spread if t is None else t + spread
            shape, dtype = ctx.output
            t = t.expand(shape).to(dtype)
            return ctx.epilogue.output_vjp(t, y, *ctx.epilogue.parameters)  # type: ignore[no-any-return]


def _spread(bias: Tensor, offs: Tensor, shape: torch.Size, along: str) -> Tensor:
    """Return a bias that broadcasts to the result: the shared one, or each row's group's. Rows
    beyond the last group get the last group's bias."""
    if bias.dim() == 1:
        return bias
    if along == "k":
        return bias[:, None]
    places = torch.arange(shape[0], device=offs.device, dtype=offs.dtype)
    group = torch.searchsorted(offs, places, right=True).clamp(max=offs.shape[0] - 1)
    return bias.index_select(0, group)


def _multiply(a: Tensor, b: Tensor, offs: Tensor, alpha: float) -> Tensor:
    """Return a grouped product that is zero beyond the last group."""
    call = GroupedArguments(a, b, offs, alpha=alpha, zeroed=True)
    seen = (
        torch.compiler.is_dynamo_compiling()  # first, since Dynamo cannot trace the others
        or autograd_state.differentiated(a, b)
        or compat.is_batched(a)
        or compat.is_batched(b)
    )
    if not seen and fast_path_allowed(a, b, offs):
        if a.dim() == b.dim() and b.shape[1] != grouped_strides(b.shape, b.dtype)[0]:
            # Autograd would copy a gradient with padded rows for a weight without padding.
            call = call._replace(out=a.new_empty((offs.shape[0], a.shape[0], b.shape[1])))
        return run(*call)
    return grouped_matmul(*call[:-1])  # type: ignore[no-any-return]


def _summed(dz: Tensor, offs: Tensor, along: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a bias: the sum of each group's rows, as a product with ones."""
    wide = torch.promote_types(dz.dtype, torch.float32)
    if along == "k":
        sums = dz.sum(1, dtype=wide)
    else:
        ones = dz.new_ones((1, dz.shape[0]))
        sums = grouped_matmul(ones, dz, offs, None, None, 1.0, "", wide)[:, 0]
    return (sums.sum(0) if len(shape) == 1 else sums).to(dtype)


def grouped_flops(*given: Any, out_shape: Any = None, **named: Any) -> int:
    """Return the FLOPs if all rows are in groups; a multiply-add counts as two."""
    call: Any = GroupedArguments(*given, **named)
    rows = call.a[-2] if call.a_index is None else call.a_index[0]
    return int(2 * rows * flops.extent_of_k(call) * call.b[-1])


def _empty(call: GroupedArguments, shape: torch.Size) -> Tensor:
    dtype = result_dtype(call)
    return call.a.new_empty_strided(shape, grouped_strides(shape, dtype), dtype=dtype)


#: With ``out``, rows beyond the last group may be overwritten.
grouped_matmul = declare(
    "grouped_matmul",
    GroupedArguments,
    run=run,
    allowed=fast_path_allowed,
    check=check,
    empty=_empty,
    derivative=_differentiable,
    flop_formula=grouped_flops,
)
grouped_matmul_out = torch.ops.tmm.grouped_matmul.out


def write(call: GroupedArguments) -> Tensor:
    """Write the result of a call to its ``out``."""
    y = rewritten(call, fast_path_allowed, replay)
    return grouped_matmul_out(*call[:-1], out=call.out) if y is None else y
