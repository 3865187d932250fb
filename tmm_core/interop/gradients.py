"""Gradients of a product; autograd nodes of the product and of the rest of its epilogue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tmm_core import compat
from tmm_core.errors import reraise
from tmm_core.interop import autograd_state
from tmm_core.interop.epilogue_kernels import failed, kernels, takes
from tmm_core.launch.warm import fast_path_allowed, run
from tmm_core.settings import overridden, within
from tmm_core.spec.epilogue import IDENTITY, Epilogue

if TYPE_CHECKING:
    from tmm_core.triton.pointwise import Pointwise

Tensor = torch.Tensor


class Call:
    """The state besides tensors that the backward of a product needs.

    Args:
        transposed: ``b`` is a layer's weight, ``[N, K]``.
        eager: The forward call needed no dispatcher.
    """

    __slots__ = (
        *("a", "alpha", "b", "bias", "dtype", "eager", "head", "residual", "settings"),
        *("a_columns", "b_columns", "many", "transposed"),
    )

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        residual: Tensor | None = None,
        alpha: float = 1.0,
        head: Epilogue = IDENTITY,
        transposed: bool = False,
        eager: bool = True,
    ) -> None:
        self.alpha = alpha
        self.head = head
        self.dtype = a.dtype
        self.a, self.b = a.shape, b.shape
        self.bias = None if bias is None else bias.dtype
        self.residual = autograd_state.form_of(residual)
        #: Whether all rows of a are multiplied by one matrix.
        self.many = len(self.b) <= 2 < len(self.a)
        columns = autograd_state.are_columns if self.many else autograd_state.is_column_major
        #: Whether a, as one matrix, is column-major.
        self.a_columns = columns(a)
        #: Whether b is column-major, in the orientation ``[K, N]``.
        self.b_columns = autograd_state.is_column_major(b) is not transposed
        self.transposed, self.eager = transposed, eager
        self.settings = overridden()


class Recorded(NamedTuple):
    """The arguments of a product that have no derivative. They are passed as one argument, since
    each argument costs autograd time.

    Attributes:
        text: The text of the head, or of its part (:class:`tmm_core.launch.warm.Part`).
        outside: The call's residual, which may be added after the product.
        parts: The arguments of stored operands.
    """

    alpha: float
    head: Epilogue
    text: str
    outside: Tensor | None
    out_dtype: torch.dtype | None
    parts: tuple[Any, ...]
    transposed: bool
    eager: bool


class Product(autograd_state.OneLevel):
    """``head(alpha · (a @ b) + bias) + residual`` for an epilogue with ``output_vjp``; with a
    residual only if the epilogue is the identity. A call that needs no dispatcher is launched
    without the operator, at the lowest host cost."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, how: Recorded
    ) -> Tensor:
        alpha, head, text, outside, out_dtype, parts, transposed, eager = how
        of_b = b.t() if transposed else b
        if eager:
            added = residual if outside is None else outside
            y = autograd_state.no_view(run(a, of_b, bias, added, alpha, text, out_dtype, *parts))
        else:
            with autograd_state.below_autograd():
                y = autograd_state.by_operator(
                    a, of_b, bias, residual, alpha, text, out_dtype, *parts
                )
            y = autograd_state.no_view(y)
        wants_a, wants_b, *_ = ctx.needs_input_grad
        kept = None if head.linear else y
        ctx.save_for_backward(a if wants_b else None, b if wants_a else None, kept)
        ctx.call = Call(a, b, bias, residual, alpha, head, transposed, eager)
        if not eager:
            ctx.save_for_forward(a, b, kept)
            ctx.set_materialize_grads(False)  # an absent tangent is None, not a product of zeros
            ctx.output, ctx.out_dtype = autograd_state.form_of(y), out_dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        found = gradients(ctx.call, ctx.needs_input_grad, *ctx.saved_tensors, grad)
        return *found, None

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
        with autograd_state.outer_levels():
            a, b, y = map(autograd_state.primal, ctx.saved_tensors)
            # The first product adds the tangents of bias and residual, as its bias and residual.
            t, more = tresidual, (call.alpha, "", ctx.out_dtype)
            if ta is not None:
                t, tbias = autograd_state.by_operator(ta, b, tbias, t, *more), None
            if tb is not None:
                t, tbias = autograd_state.by_operator(a, tb, tbias, t, *more), None
            if tbias is not None:
                tbias = tbias if len(call.b) > 1 else tbias[0]
                t = tbias if t is None else t + tbias
            assert t is not None
            t = t.expand(shape).to(dtype)
            return call.head.output_vjp(t, y, *call.head.parameters)  # type: ignore[no-any-return]


def gradients(call: Call, *arguments: Any) -> tuple[Tensor | None, ...]:
    """Return :func:`_gradients`, computed under the settings of ``call``."""
    return within(call.settings, _gradients, call, *arguments)


def _gradients(
    call: Call,
    wanted: Sequence[bool],
    a: Tensor | None,
    b: Tensor | None,
    y: Tensor | None,
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of a, b, bias and residual, if they are wanted. Each operand is saved only if
    the other's gradient is needed, and the output only if the head is not linear."""
    alpha, head = call.alpha, call.head
    wants_a, wants_b, wants_bias, wants_residual, *_ = wanted
    multiply = run if call.eager and _is_direct(grad, a, b) else autograd_state.by_operator
    dz, da, db, dbias, dresidual = grad, None, None, None, None
    if head is not IDENTITY:
        assert head.output_vjp is not None
        dz = head.output_vjp(dz, y, *head.parameters)
    # A vector is a matrix of one row or column here, and its gradient drops that dimension.
    dz = dz if len(call.b) > 1 else dz[..., None]
    dz = dz if len(call.a) > 1 else dz[..., None, :]
    sharded = call.many and hasattr(dz, "placements")
    if call.many and not sharded:
        # torch.autograd.grad(is_grads_batched=True) has no rule for flatten.
        dz = dz.reshape(math.prod(dz.shape[:-1]), dz.shape[-1])
    if wants_bias:
        dtype: Any = call.bias
        rows = tuple(range(dz.dim() - 1))
        dbias = dz.sum(rows, dtype=dz.dtype if dz.is_complex() else dtype)
        dbias = autograd_state.as_gradient(dbias, dtype)
    if wants_residual:
        assert call.residual is not None
        shape, dtype = call.residual
        dresidual = autograd_state.as_gradient(_summed_to(grad, shape), dtype)
    dz = autograd_state.as_gradient(dz, call.dtype)
    # Gradients have their operands' layouts: autograd would transpose others by a copy.
    if wants_a:
        assert b is not None
        b = b.conj() if len(call.b) > 1 else b.conj()[:, None]
        b = b if call.transposed else b.mT
        columns = call.a_columns and not sharded
        da = autograd_state.multiply_in_layout(columns, multiply, dz, b, None, None, alpha)
        if call.many and not sharded:
            da = da.view(call.a)
        elif da.shape != call.a:
            da = da.sum_to_size(call.a if len(call.a) > 1 else (1, *call.a)).reshape(call.a)
    if wants_b:
        assert a is not None
        a = a.conj() if len(call.a) > 1 else a.conj()[None]
        if sharded:
            a, dz = _flattened(a, dz)
        elif call.many:
            a = a.flatten(0, -2)
        if call.b_columns:
            db = multiply(dz.mT, a, None, None, alpha)
        else:
            db = multiply(a.mT, dz, None, None, alpha)
        db = db if call.transposed is call.b_columns else db.mT
        if db.shape != call.b:
            db = db.sum_to_size(call.b if len(call.b) > 1 else (*call.b, 1)).reshape(call.b)
    return da, db, dbias, dresidual


def _summed_to(t: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``t.sum_to_size(shape)``, also for data-dependent sizes."""
    if all(type(n) is int for n in (*t.shape, *shape)):
        return t.sum_to_size(tuple(shape))
    lead = t.dim() - len(shape)
    ones = [lead + i for i, n in enumerate(shape) if type(n) is int and n == 1]
    t = t.sum(ones, keepdim=True) if ones else t
    return t.sum(tuple(range(lead))) if lead else t


def _flattened(a: Any, dz: Tensor) -> tuple[Tensor, Tensor]:
    """Flatten the DTensors ``[…, M, K]`` and ``[…, M, N]`` into matrices with the same rows. The
    product sums over rows, so their order does not matter. A dimension of equal shards is moved to
    the front: only there DTensor flattens it without communication (in torch 2.10, at all). It
    flattens one of unequal shards only where it is not the first."""
    for along, placement in enumerate(getattr(a, "placements", ())):
        if placement.is_shard() and 0 < placement.dim < a.dim() - 1:
            if a.shape[placement.dim] % a.device_mesh.size(along) == 0:
                a, dz = a.movedim(placement.dim, 0), dz.movedim(placement.dim, 0)
            break
    return a.flatten(0, -2), dz.flatten(0, -2)


def _is_direct(grad: Tensor, *saved: Tensor | None) -> bool:
    """Whether products of ``grad`` in backward need no dispatcher and no second derivatives. A hook
    may unpack ``saved`` tensors of another kind than it packed."""
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_dynamo_compiling()
        and fast_path_allowed(grad, grad, *saved, shown=True)
        and not (compat.is_batched(grad) or grad.is_complex())
        and not autograd_state.transformed(grad, *saved)
    )


class _Following(autograd_state.OneLevel):
    """The rest of the epilogue after a product, by kernels. As a separate node it frees the product
    before the gradients of the operands are computed."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, epilogue: Epilogue, found: Pointwise) -> Tensor:
        ctx.save_for_backward(z)
        ctx.epilogue, ctx.found = epilogue, found
        if takes(z):
            try:
                return found.forward(z)
            except Exception as error:
                reraise(error)
                failed(epilogue, found, error)
        return epilogue.apply(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (z,) = ctx.saved_tensors
        if _is_direct(grad, z) and takes(z):
            try:
                return ctx.found.backward(grad, z), None, None
            except Exception as error:
                reraise(error)
                failed(ctx.epilogue, ctx.found, error)
        return ctx.epilogue.vjp(grad, z), None, None


follow = _Following.apply  # type: ignore[attr-defined]


def followed(z: Tensor, rest: Epilogue, eager: bool) -> Tensor:
    """Apply ``rest``, the part of the epilogue after a product. Kernels apply it if there are any
    and only a gradient is recorded, at one level (``eager``); else torch's operators do."""
    found = kernels(rest, z.shape[-1], z.dtype, z) if eager else None
    if found is not None:
        return follow(z, rest, found)  # type: ignore[no-any-return]
    y = z
    for stage in rest.chain:
        y = autograd_state.apply_stage(stage, y)
    return y.to(z.dtype)  # a reference may compute in another dtype
