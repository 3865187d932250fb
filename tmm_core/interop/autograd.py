"""Derivatives of ``tmm::matmul``: reverse and forward mode, any order, and under vmap.

A differentiated call is split into parts with cheap derivatives: a product, the rest of the
epilogue, and the residual. The product is fused with the first stage of the epilogue if the output
of that stage determines its derivative. If only a gradient is needed, the rest is one kernel and
its derivative another (``epilogue_kernels``). Otherwise torch's own operators compute the rest,
which Inductor fuses and transforms decompose.

Backward saves ``a`` if ``b`` needs a gradient, ``b`` if ``a`` does, and the output of the product
if an epilogue follows it. Eager torch saves at least as much. If the whole epilogue is fused, the
pre-activation is never in memory. Nothing is computed twice.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tmm_core import compat
from tmm_core.interop import autograd_state
from tmm_core.interop.gradients import Product, Recorded, followed
from tmm_core.launch.check import check, has_format
from tmm_core.launch.warm import Part, epilogue_of, fast_path_allowed, part_of
from tmm_core.spec.arguments import Arguments
from tmm_core.spec.epilogue import IDENTITY

Tensor = torch.Tensor


def matmul(*given: Any) -> Tensor:
    """The operator's kernel for the Autograd dispatch key; trailing defaults are omitted."""
    tensors = [t for t in given if isinstance(t, Tensor)]
    transformed = autograd_state.transformed(*tensors)
    if not transformed and not autograd_state.recorded(*tensors):
        with compat.below_autograd():
            return autograd_state.by_operator(*given)
    if has_format(Arguments(*given)):
        return autograd_state.record(autograd_state.Underivable, autograd_state.by_operator, *given)
    below = fast_path_allowed(*tensors, cast=True, shown=True)
    batched = any(map(compat.is_batched, tensors[:2]))
    eager = below and not batched and not transformed
    return in_parts(*Arguments(*given)[:-1], eager=eager)


def in_parts(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    epilogue: str = "",
    out_dtype: torch.dtype | None = None,
    *parts: Any,
    transposed: bool = False,
    eager: bool = True,
) -> Tensor:
    """Compute a differentiated call, part by part. The stage of the epilogue that is fused with the
    product is its head.

    The whole call is checked before any part is computed. The check is made when the product's plan
    is built or, if the product needs torch's dispatcher, here.

    Args:
        parts: Arguments of stored operands, which are only checked: such calls have no derivative.
        transposed: ``b`` is a layer's weight ``[N, K]``. A view of it would be another node.
        eager: The call needs no dispatcher: one node, without the operator.
    """
    product: Any = Product.apply if eager else functools.partial(autograd_state.record, Product)  # type: ignore[attr-defined]
    more = (out_dtype, parts, transposed, eager)
    if not epilogue:
        return product(a, b, bias, residual, Recorded(alpha, IDENTITY, "", None, *more))  # type: ignore[no-any-return]
    parsed = epilogue_of(epilogue)
    part: Part = part_of(parsed)
    text = part.text
    if not eager:
        of_b = b.t() if transposed else b
        check(Arguments(a, of_b, bias, residual, alpha, epilogue, out_dtype, *parts), parsed)
        text = autograd_state.head_text(part.head)
    head, rest, inner = part.head, part.rest, residual if part.takes_residual else None
    y = product(a, b, bias, inner, Recorded(alpha, head, text, residual, *more))
    if rest is not None:
        rows = b.dim() == 2 <= a.dim()
        y = followed(y, rest, eager=rows and eager)
    if residual is not None and residual is not inner:
        y = (y + residual).to(y.dtype)
    return (y, *parsed.auxiliary(y)) if parsed.outputs else y  # type: ignore[return-value]  # as the plan's launcher
