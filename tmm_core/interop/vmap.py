"""``torch.vmap`` over ``tmm::matmul``: the mapped dimension becomes more rows, or a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tmm_core.launch.check import check, result_dtype
from tmm_core.launch.warm import epilogue_of
from tmm_core.spec.arguments import Arguments, extras

Tensor = torch.Tensor


def matmul(info: Any, in_dims: Sequence[int | None], *given: Any) -> tuple[Tensor, int]:
    """The rule for ``torch.library.register_vmap``. ``in_dims`` gives the mapped dimension of each
    argument; the result's mapped dimension is the first.

    Kernels take a bias as a vector, so torch adds a mapped bias and applies everything after it.
    Products of stored operands are computed one after another.
    """
    call = Arguments(*given)
    dims = (*in_dims, *(None,) * (len(given) - len(in_dims)))
    one = Arguments(*map(_unmapped, given, dims))
    shape = check(one, epilogue_of(call.epilogue))
    if extras(call) or call.formats:
        if not info.batch_size:
            return call.a.new_empty((0, *shape), dtype=result_dtype(one)), 0
        each = (
            [t if dim is None else t.select(dim, place) for t, dim in zip(given, dims, strict=True)]
            for place in range(info.batch_size)
        )
        return torch.stack([torch.ops.tmm.matmul(*arguments) for arguments in each]), 0
    a, b, bias, residual, alpha, epilogue, out_dtype = call[:7]
    of_a, of_b, of_bias, of_residual = (*in_dims, None, None)[:4]
    # Dimensions of the result of one call.
    ranks = a.dim() - (of_a is not None), b.dim() - (of_b is not None)
    rank = max(*ranks, 2) - ranks.count(1)

    def term(t: Tensor, dim: int | None) -> Tensor:
        """Return ``t`` with the rank of the result, to which it is added."""
        lead = 0 if dim is None else 1
        t = t if dim is None else t.movedim(dim, 0)
        ones = (1,) * (rank - t.dim() + lead)
        return t.reshape((*t.shape[:lead], *ones, *t.shape[lead:]))

    if residual is not None:
        residual = term(residual, of_residual)
    if bias is None or of_bias is None:
        if of_a is not None or of_b is not None:
            rest = (bias, residual, alpha, epilogue, out_dtype)
            return _products(a, b, of_a, of_b, of_residual is not None, *rest), 0
        assert residual is not None
        y = torch.ops.tmm.matmul(a, b, bias, None, alpha, epilogue, out_dtype)
        return (y + residual).to(y.dtype), 0
    z = _products(a, b, of_a, of_b, False, None, None, alpha, "", out_dtype)
    bias = bias.movedim(of_bias, 0)
    # With a vector b the bias has one element, and the result no column to add it to.
    bias = term(bias[:, 0] if ranks[1] == 1 else bias, 0)
    return epilogue_of(epilogue).expression(z, bias, residual).to(z.dtype), 0


def _unmapped(value: Any, dim: int | None) -> Any:
    """Return an argument of one call of the mapped function, without its values."""
    if dim is None:
        return value
    shape = [size for place, size in enumerate(value.shape) if place != dim % value.dim()]
    return value.new_empty(()).expand(shape)


def _products(
    a: Tensor,
    b: Tensor,
    of_a: int | None,
    of_b: int | None,
    of_residual: bool,
    bias: Tensor | None,
    residual: Tensor | None,
    *rest: Any,
) -> Tensor:
    """Compute all mapped products by one call. The residual has the rank of one result, after the
    mapped dimension if ``of_residual``."""
    operator = torch.ops.tmm.matmul
    lead_a, lead_b, lead_r = int(of_a is not None), int(of_b is not None), int(of_residual)
    a = a if of_a is None else a.movedim(of_a, 0)
    b = b if of_b is None else b.movedim(of_b, 0)
    vector_a, vector_b = a.dim() == 1 + lead_a, b.dim() == 1 + lead_b
    if vector_b and lead_b and not lead_a and a.dim() == 2:
        # One matrix and many vectors: the vectors become rows of one operand.
        bias = None if bias is None else bias.expand(a.shape[0])
        return operator(b, a.mT, bias, residual, *rest)  # type: ignore[no-any-return]
    a = a.unsqueeze(-2) if vector_a else a
    b = b.unsqueeze(-1) if vector_b else b
    if residual is not None:
        residual = residual.unsqueeze(-1) if vector_b else residual
        residual = residual.unsqueeze(-2) if vector_a else residual
    batch_a, batch_b = a.dim() - 2 - lead_a, b.dim() - 2 - lead_b
    rows = a.shape[lead_a:-1]
    folds = bool(lead_b and batch_a and not batch_b)
    if folds:
        # Each b multiplies all rows of a, of every batch.
        a = a.flatten(lead_a, -2)
        if residual is not None:
            wide = residual.expand(*residual.shape[:lead_r], *rows, residual.shape[-1])
            residual = wide.flatten(lead_r, -2)
    elif lead_a and batch_a < batch_b:
        a = a.reshape(a.shape[0], *(1,) * (batch_b - batch_a), *a.shape[1:])
    elif lead_b and batch_b < batch_a:
        b = b.reshape(b.shape[0], *(1,) * (batch_a - batch_b), *b.shape[1:])
    y = operator(a, b, bias, residual, *rest)
    y = y.unflatten(1, rows) if folds else y
    y = y.squeeze(-2) if vector_a else y
    return y.squeeze(-1) if vector_b else y  # type: ignore[no-any-return]
