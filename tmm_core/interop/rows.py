"""Derivatives of a product of rows with one matrix, as layers call it: one node without the
operator, with the lowest host cost, and one for the rest of the epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tmm_core.interop import levels
from tmm_core.interop.pointwise import failed, kernels, takes
from tmm_core.launch.warm import run, undisturbed
from tmm_core.settings import overridden, within
from tmm_core.spec.epilogue import IDENTITY, Epilogue

if TYPE_CHECKING:
    from tmm_core.triton.pointwise import Pointwise

Tensor = torch.Tensor


class Call:
    """The non-tensor state that the backward of a product of rows needs."""

    __slots__ = (
        *("alpha", "bias", "head", "residual", "settings"),
        *("a_columns", "b_columns", "transposed"),
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
    ) -> None:
        self.alpha = alpha
        self.head = head
        self.bias = None if bias is None else bias.dtype
        self.residual = levels.form_of(residual)
        self.a_columns = levels.is_column_major(a)
        #: Whether b is column-major, in the orientation in which it is multiplied.
        self.b_columns = levels.is_column_major(b) is not transposed
        self.transposed = transposed
        self.settings = overridden()


class _EagerRows(levels.OneLevel):
    """``_EagerProduct`` of ``[…, M, K]`` with one matrix, as layers call it, with the lowest host
    cost."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        alpha: float,
        head: Epilogue,
        out_dtype: torch.dtype | None,
        transposed: bool,
    ) -> Tensor:
        y = run(
            a,
            b.t() if transposed else b,
            bias,
            residual,
            alpha,
            levels.head_text(head),
            out_dtype,
        )
        y = levels.owned(y)
        wants_a, wants_b, *_ = ctx.needs_input_grad
        kept = None if head.linear else y
        ctx.save_for_backward(a if wants_b else None, b if wants_a else None, kept)
        ctx.call = Call(a, b, bias, residual, alpha, head, transposed)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, y = ctx.saved_tensors
        gradients = gradients_of_rows(ctx.call, ctx.needs_input_grad, a, b, y, grad)
        return *gradients, None, None, None, None


rows_product = _EagerRows.apply  # type: ignore[attr-defined]


def gradients_of_rows(call: Call, *arguments: Any) -> tuple[Tensor | None, ...]:
    """:func:`_gradients_of_rows` under the settings of ``call``."""
    return within(call.settings, _gradients_of_rows, call, *arguments)


def _gradients_of_rows(
    call: Call,
    wanted: Sequence[bool],
    a: Tensor | None,
    b: Tensor | None,
    y: Tensor | None,
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of a, b, bias and residual.

    Args:
        call: The forward call.
        wanted: Which gradients are needed.
        a, b: Saved if the other's gradient is needed.
        y: The output, if the head is not linear.
        grad: Its gradient.
    """
    alpha, head = call.alpha, call.head
    wants_a, wants_b, wants_bias, wants_residual, *_ = wanted
    direct = _is_direct(grad)
    dz, da, db, dbias, dresidual = grad, None, None, None, None
    if head is not IDENTITY:
        assert head.output_vjp is not None
        dz = head.output_vjp(dz, y, *head.parameters)
    many = dz.dim() != 2
    rows = dz.flatten(0, -2) if many else dz
    if wants_bias:
        dtype: Any = call.bias
        same = rows.dtype is dtype
        dbias = rows.sum(0) if same else rows.sum(0, dtype=levels.wider(rows.dtype, dtype))
        dbias = levels.as_gradient(dbias, dtype)
    if wants_residual:
        assert call.residual is not None
        shape, dtype = call.residual
        dresidual = levels.as_gradient(grad.sum_to_size(shape), dtype)
    multiply = run if direct else levels.by_operator
    # In the operands' layouts: autograd copies, by transposing, a gradient in another layout.
    if wants_a:
        assert b is not None
        rows = levels.as_gradient(rows, b.dtype)
        b = b.conj() if b.is_complex() else b
        b = b if call.transposed else b.mT
        if call.a_columns and not many:
            da = multiply(b.mT, rows.mT, None, None, alpha).mT
        else:
            da = multiply(rows, b, None, None, alpha)
            da = da.view(*dz.shape[:-1], da.shape[-1]) if many else da
    if wants_b:
        assert a is not None
        rows = levels.as_gradient(rows, a.dtype)
        a = a.flatten(0, -2) if a.dim() != 2 else a
        a = a.conj() if a.is_complex() else a
        if call.b_columns:
            db = multiply(rows.mT, a, None, None, alpha)
        else:
            db = multiply(a.mT, rows, None, None, alpha)
        db = db if call.transposed is call.b_columns else db.mT
    return da, db, dbias, dresidual


def _is_direct(grad: Tensor) -> bool:
    """Whether backward's products of ``grad`` need no dispatcher, and are not recorded for second
    derivatives."""
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_dynamo_compiling()
        and undisturbed(grad, grad, shown=True)
        and not (levels.is_batched(grad) or grad.is_complex())
    )


class _Following(levels.OneLevel):
    """The part of the epilogue after a product, by kernels. As a separate node it frees the product
    before the gradients of its operands are computed."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, epilogue: Epilogue, found: Pointwise) -> Tensor:
        ctx.save_for_backward(z)
        ctx.epilogue, ctx.found = epilogue, found
        if takes(z):
            try:
                return found.forward(z)
            except Exception as error:
                failed(epilogue, found, error)
        return epilogue.apply(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (z,) = ctx.saved_tensors
        if _is_direct(grad) and takes(z):
            try:
                return ctx.found.backward(grad, z), None, None
            except Exception as error:
                failed(ctx.epilogue, ctx.found, error)
        return ctx.epilogue.vjp(grad, z), None, None


follow = _Following.apply  # type: ignore[attr-defined]


def followed(z: Tensor, rest: Epilogue, eager: bool) -> Tensor:
    """The part of the epilogue after a product, ``rest``, applied to the product: by kernels where
    there are any, else by torch's operators.

    Args:
        eager: Nothing but a gradient is recorded, at one level; only then can kernels serve.
    """
    found = kernels(rest, z.shape[-1], z.dtype, z) if eager else None
    if found is not None:
        return follow(z, rest, found)  # type: ignore[no-any-return]
    for stage in rest.stages or (rest,):
        z = levels.apply_stage(stage, z)
    return z
