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
from collections.abc import Callable
from typing import Any

import torch

from tmm_core import compat
from tmm_core.compat import forward_ad, transforms_active
from tmm_core.formats import BY_STORAGE
from tmm_core.interop import levels
from tmm_core.interop.gradients import Call, eager_product, followed, gradients
from tmm_core.launch.warm import epilogue_of, undisturbed
from tmm_core.spec.arguments import COMMON, Arguments
from tmm_core.spec.epilogue import IDENTITY

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
        return in_parts(*given)
    return in_parts(*given, product=_record_product)


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


def in_parts(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    epilogue: str = "",
    out_dtype: torch.dtype | None = None,
    transposed: bool = False,
    *,
    product: Callable[..., Tensor] = eager_product,
) -> Tensor:
    """A recorded call: the product with the part of the epilogue that it can fuse (its head); then
    the rest of the epilogue, by kernels where there are any; then the residual.

    Args:
        transposed: ``b`` is a layer's weight, ``[N, K]``; a transposed view of it would be
            another node.
        product: By default that of a call that needs no dispatcher
            (:func:`tmm_core.launch.warm.undisturbed`): one node, without the operator.
    """
    if not epilogue:
        return product(a, b, bias, residual, alpha, IDENTITY, out_dtype, transposed)
    parsed = epilogue_of(epilogue)
    if parsed.outputs:
        bare = parsed.bare.interned()
        more = (alpha, bare, out_dtype, transposed)
        y = in_parts(a, b, bias, residual, *more, product=product)
        return (y, *parsed.beside(y))  # type: ignore[return-value]  # as the plan's launcher
    head, rest = parsed.parts
    inner = residual if rest is None and head is IDENTITY else None
    y = product(a, b, bias, inner, alpha, head, out_dtype, transposed)
    if rest is not None:
        rows = b.dim() == 2 <= a.dim()
        y = followed(y, rest, eager=rows and product is eager_product)
    return y if residual is None or residual is inner else (y + residual).to(y.dtype)


def _record_product(*given: Any) -> Tensor:
    *arguments, head, out_dtype, _ = given
    return levels.record(_Product, *arguments, levels.head_text(head), out_dtype)


class _Product(levels.OneLevel):
    """``epilogue(alpha · (a @ b) + bias) + residual`` for an epilogue with ``output_vjp``;
    the residual only where the epilogue is the identity."""

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        with levels.below_autograd():
            return levels.owned(levels.by_operator(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, bias, residual, alpha, epilogue, ctx.out_dtype = inputs
        head = epilogue_of(epilogue)
        y = None if head.linear else output
        wants_a, wants_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if wants_b else None, b if wants_a else None, y)
        if forward_ad._current_level >= 0 or transforms_active():
            ctx.save_for_forward(a, b, y)
        ctx.call = Call(a, b, bias, residual, alpha, head, eager=False)
        ctx.output = levels.form_of(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = gradients(ctx.call, ctx.needs_input_grad, *ctx.saved_tensors, grad)
        return *found, None, None, None

    @staticmethod
    def jvp(
        ctx: Any,
        ta: Tensor | None,
        tb: Tensor | None,
        tbias: Tensor | None,
        tresidual: Tensor | None,
        *_: None,
    ) -> Tensor:
        call, (shape, dtype) = ctx.call, ctx.output
        with levels.outer_levels():
            a, b, y = map(levels.primal, ctx.saved_tensors)
            # The first product adds the tangents of bias and residual, as its bias and residual.
            t, more = tresidual, (call.alpha, "", ctx.out_dtype)
            if ta is not None:
                t, tbias = levels.by_operator(ta, b, tbias, t, *more), None
            if tb is not None:
                t, tbias = levels.by_operator(a, tb, tbias, t, *more), None
            if tbias is not None:
                tbias = tbias if len(call.b) > 1 else tbias[0]
                t = tbias if t is None else t + tbias
            assert t is not None
            t = t.expand(shape).to(dtype)
            return call.head.output_vjp(t, y, *call.head.parameters)  # type: ignore[no-any-return]
