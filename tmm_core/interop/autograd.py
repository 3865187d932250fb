"""Derivatives of ``tmm::matmul``: reverse and forward mode, any order, and under vmap.

A differentiated call is split into parts with cheap derivatives: one product, fused with those
stages of the epilogue whose derivative follows from their output, then the rest of the epilogue,
then the residual. If only a gradient is needed, the rest is one kernel and its derivative another
(:mod:`tmm_core.interop.pointwise`); else torch's own operators compute it, which Inductor fuses
and transforms decompose.

Backward saves ``a`` if ``b`` needs a gradient, ``b`` if ``a`` does, and the output of the product
if an epilogue follows it. That is never more than eager saves, and if the whole epilogue is fused,
the pre-activation is never in memory. Nothing is computed twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tmm_core import compat
from tmm_core.compat import forward_ad, transforms_active
from tmm_core.formats import BY_STORAGE
from tmm_core.interop import levels
from tmm_core.interop.rows import followed, rows_product
from tmm_core.launch.warm import epilogue_of, run, undisturbed
from tmm_core.settings import overridden, within
from tmm_core.spec.arguments import COMMON, Arguments
from tmm_core.spec.epilogue import IDENTITY, Epilogue

Tensor = torch.Tensor


def matmul(*given: Any) -> Tensor:
    """The operator's kernel for the Autograd dispatch key, which passes arguments in the schema's
    order and omits trailing defaults."""
    tensors = [t for t in given if isinstance(t, Tensor)]
    if not levels.differentiated(*tensors):
        with compat.below_autograd():
            return levels.by_operator(*given)
    if given[0].dtype in BY_STORAGE:
        return levels.record(levels.Underivable, levels.by_operator, *given)
    given = given[:COMMON]
    below = undisturbed(*tensors, cast=True, shown=True)
    if below and not any(map(levels.is_batched, tensors[:2])):
        return eager(*given)
    return _in_parts(_record_product, *given)


def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the call's arguments for :func:`by_torch`."""
    tensors = [t if isinstance(t, Tensor) else None for t in inputs]
    ctx.save_for_backward(*tensors)
    ctx.rest = [None if isinstance(t, Tensor) else t for t in inputs]


def by_torch(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The operator's derivative if this torch cannot call it below its autograd
    (:mod:`tmm_core.compat`): recomputes the expression with torch's operators."""
    # Torch omits arguments left at their defaults.
    needs = itertools.chain(ctx.needs_input_grad, itertools.repeat(False))
    given = [
        rest if t is None else t.detach().requires_grad_(wanted)
        for t, rest, wanted in zip(ctx.saved_tensors, ctx.rest, needs, strict=False)
    ]
    call = Arguments(*given)
    a, b, bias, residual, alpha, epilogue, out_dtype = call[:7]
    if call.extras or a.dtype in BY_STORAGE:
        raise RuntimeError("tmm::matmul of 8-bit operands has no derivative")
    with torch.enable_grad():
        z = alpha * (a @ b)
        y = epilogue_of(epilogue).expression(z, bias, residual).to(out_dtype or a.dtype)
    wanted = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
    found = dict(zip(map(id, wanted), torch.autograd.grad(y, wanted, grad), strict=True))
    return tuple(found.get(id(t)) for t in given[: len(ctx.needs_input_grad)])


def eager(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    epilogue: str = "",
    out_dtype: torch.dtype | None = None,
    transposed: bool = False,
) -> Tensor:
    """:func:`matmul` for a recorded call that needs no dispatcher
    (:func:`tmm_core.launch.warm.undisturbed`): one node, without the operator.

    Args:
        transposed: ``b`` is a layer's weight, ``[N, K]``; a transposed view of it would be
            another node.
    """
    if a.dim() < 2 or b.dim() != 2:
        b = b.t() if transposed else b
        return _in_parts(_record_eager_product, a, b, bias, residual, alpha, epilogue, out_dtype)
    return _in_parts(rows_product, a, b, bias, residual, alpha, epilogue, out_dtype, transposed)


def _in_parts(
    product: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    epilogue: str = "",
    out_dtype: torch.dtype | None = None,
    *more: Any,
) -> Tensor:
    """``product`` with the part of the epilogue that it can fuse (its head) and ``more``; then the
    rest of the epilogue, by kernels where there are any; then the residual."""
    if not epilogue:
        return product(a, b, bias, residual, alpha, IDENTITY, out_dtype, *more)
    parsed = epilogue_of(epilogue)
    if parsed.outputs:
        bare = parsed.bare.interned()
        y = _in_parts(product, a, b, bias, residual, alpha, bare, out_dtype, *more)
        return (y, *parsed.beside(y))  # type: ignore[return-value]  # as the plan's launcher
    head, rest = parsed.parts
    inner = residual if rest is None and head is IDENTITY else None
    y = product(a, b, bias, inner, alpha, head, out_dtype, *more)
    if rest is not None:
        y = followed(y, rest, eager=product is rows_product)
    return y if residual is None or residual is inner else (y + residual).to(y.dtype)


def _record_product(
    a: Tensor, b: Tensor, bias: Any, residual: Any, alpha: float, head: Epilogue, out_dtype: Any
) -> Tensor:
    return levels.record(_Product, a, b, bias, residual, alpha, levels.head_text(head), out_dtype)


def _record_eager_product(
    a: Tensor, b: Tensor, bias: Any, residual: Any, alpha: float, head: Epilogue, out_dtype: Any
) -> Tensor:
    return _EagerProduct.apply(a, b, bias, residual, alpha, levels.head_text(head), out_dtype)  # type: ignore[attr-defined, no-any-return]


def _multiply(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """``alpha · (a @ b)``, through the operator if torch's dispatcher is needed."""
    if (
        not torch.compiler.is_dynamo_compiling()
        and undisturbed(a, b)
        and not (levels.recorded(a, b) or levels.is_batched(a) or levels.is_batched(b))
    ):
        return run(a, b, None, None, alpha)
    return levels.by_operator(a, b, None, None, alpha)


class _Product(levels.OneLevel):
    """``epilogue(alpha · (a @ b) + bias) + residual`` for an epilogue with ``output_vjp``;
    the residual only where the epilogue is the identity."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        with levels.below_autograd():
            return levels.owned(levels.by_operator(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, bias, residual, ctx.alpha, epilogue, ctx.out_dtype = inputs
        ctx.epilogue = epilogue_of(epilogue)
        y = None if ctx.epilogue.linear else output
        wants_a, wants_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if wants_b else None, b if wants_a else None, y)
        if forward_ad._current_level >= 0 or transforms_active():
            ctx.save_for_forward(a, b, y)
        ctx.a, ctx.b, ctx.bias, ctx.residual = map(levels.form_of, (a, b, bias, residual))
        ctx.a_column, ctx.b_column = levels.is_column_major(a), levels.is_column_major(b)
        ctx.output = levels.form_of(output)
        ctx.settings = overridden()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return within(ctx.settings, _Product._gradients, ctx, grad)

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, y = ctx.saved_tensors
        wants_a, wants_b, wants_bias, wants_residual, *_ = ctx.needs_input_grad
        (a_shape, dtype), (b_shape, _) = ctx.a, ctx.b
        dz = ctx.epilogue.output_vjp(grad, y, *ctx.epilogue.parameters)
        # Vectors are matrices of one row or column here; their gradients drop it again.
        dz2 = dz if len(b_shape) > 1 else dz[..., None]
        dz2 = dz2 if len(a_shape) > 1 else dz2[..., None, :]
        da = db = dbias = dresidual = None
        if wants_bias:
            shape, bias_dtype = ctx.bias
            dbias = dz2.sum(tuple(range(dz2.dim() - 1)), dtype=levels.wider(dz2.dtype, bias_dtype))
            dbias = levels.as_gradient(dbias, bias_dtype)
        if wants_residual:
            shape, residual_dtype = ctx.residual
            dresidual = levels.as_gradient(_summed_to(grad, shape), residual_dtype)
        dz2 = levels.as_gradient(dz2, dtype)
        alpha = ctx.alpha
        if wants_a:
            b2 = b if b.dim() > 1 else b[:, None]
            shape = a_shape if len(a_shape) > 1 else (1, *a_shape)
            da = levels.lying_as(ctx.a_column, _multiply, dz2, _adjoint(b2), alpha)
            if da.shape != a_shape:
                da = da.sum_to_size(shape).reshape(a_shape)
        if wants_b:
            a2 = a if a.dim() > 1 else a[None]
            shape = b_shape if len(b_shape) > 1 else (*b_shape, 1)
            if len(b_shape) <= 2 < a2.dim():
                a2, dz2 = _flattened(a2, dz2)
            db = levels.lying_as(ctx.b_column, _multiply, _adjoint(a2), dz2, alpha)
            if db.shape != b_shape:
                db = db.sum_to_size(shape).reshape(b_shape)
        return da, db, dbias, dresidual, None, None, None

    @staticmethod
    def jvp(
        ctx: Any,
        ta: Tensor | None,
        tb: Tensor | None,
        tbias: Tensor | None,
        tresidual: Tensor | None,
        *_: None,
    ) -> Tensor:
        shape, dtype = ctx.output
        with levels.outer_levels():
            a, b, y = map(levels.primal, ctx.saved_tensors)
            # The first product adds the tangents of bias and residual, as its bias and residual.
            t = tresidual
            if ta is not None:
                t, tbias = levels.by_operator(ta, b, tbias, t, ctx.alpha, "", ctx.out_dtype), None
            if tb is not None:
                t, tbias = levels.by_operator(a, tb, tbias, t, ctx.alpha, "", ctx.out_dtype), None
            if tbias is not None:
                tbias = tbias if len(ctx.b[0]) > 1 else tbias[0]
                t = tbias if t is None else t + tbias
            assert t is not None
            t = t.expand(shape).to(dtype)
            return ctx.epilogue.output_vjp(t, y, *ctx.epilogue.parameters)  # type: ignore[no-any-return]


def _summed_to(t: Tensor, shape: Sequence[int]) -> Tensor:
    """``t.sum_to_size(shape)``, also for data-dependent sizes."""
    if all(type(n) is int for n in (*t.shape, *shape)):
        return t.sum_to_size(tuple(shape))
    lead = t.dim() - len(shape)
    ones = [lead + i for i, n in enumerate(shape) if type(n) is int and n == 1]
    t = t.sum(ones, keepdim=True) if ones else t
    return t.sum(tuple(range(lead))) if lead else t


class _EagerProduct(_Product):
    """:class:`_Product` without the operator, for calls that do not need the dispatcher."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        return levels.owned(run(*arguments))


def _adjoint(t: Tensor) -> Tensor:
    return t.mH if t.is_complex() else t.mT


def _flattened(a: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    """``[…, M, K]`` and ``[…, M, N]`` as matrices with the same number of rows. Rows are summed
    over, so their order is free: a sharded dimension becomes the first, because DTensor flattens
    without communication (torch 2.10: flattens at all) only if no other dimension is sharded."""
    for placement in getattr(a, "placements", ()):
        if placement.is_shard() and 0 < placement.dim < a.dim() - 1:
            a, dz = a.movedim(placement.dim, 0), dz.movedim(placement.dim, 0)
            break
    return a.flatten(0, -2), dz.flatten(0, -2)
