"""Baselines for grouped calls: torch's grouped products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tmm_core.bench.case import Call
from tmm_core.formats import IMPLIED
from tmm_core.interop.aten_calls import strides_accepted
from tmm_core.launch.grouped_call import ragged_along
from tmm_core.tuning.timing import Run

Tensor = torch.Tensor
#: Computes the product of one call.
Product = Callable[[Call], Tensor]

#: Row alignment in bytes that torch's grouped product requires.
_ALIGNMENT = 16


def eager(calls: Sequence[Call]) -> Run:
    """``F.grouped_mm``, then the bias and the activation, as in a model's code; a gated one is one
    product of both halves. Operands that it rejects are padded, and the padding is timed too. 8-bit
    floats go through ``F.scaled_grouped_mm``.

    Raises:
        ValueError: torch has no grouped product of these 8-bit floats.
    """
    call = calls[0]
    if call.a.dtype not in IMPLIED:
        return _on(calls, _padded if _refuses(call) else _by_torch)
    if not (_scales_each(call) and hasattr(F, "scaled_grouped_mm")):
        raise ValueError("torch has no grouped product of these 8-bit floats")
    scales = {id(each): _row_scales(each) for each in calls}
    return _on(calls, lambda each: _by_scaled(each, *scales[id(each)]))


def _on(calls: Sequence[Call], product: Product) -> Run:
    """A product with bias, epilogue and residual, by torch's operators."""

    def run(copy: int) -> Tensor:
        call = calls[copy]
        y: Any = call.epilogue.expression(product(call), call.bias, call.residual)
        return y if call.out_dtype is None else y.to(call.out_dtype)  # type: ignore[no-any-return]

    return run


def _refuses(call: Call) -> bool:
    """Whether torch's grouped product refuses the call's strides or addresses."""
    return not (strides_accepted(call.a) and strides_accepted(call.b))


def _by_torch(call: Call) -> Tensor:
    assert call.rows is not None
    return F.grouped_mm(call.a, call.b, offs=call.rows.offs)


def _scales_each(call: Call) -> bool:
    """Whether torch multiplies the 8-bit operands of each group with scales of rows. It does so on
    Hopper for row-major by column-major e4m3, with K and N multiples of 16."""
    a, b = call.a, call.b
    return (
        a.is_cuda
        and torch.cuda.get_device_capability(a.device)[0] == 9
        and a.dtype == b.dtype == torch.float8_e4m3fn
        and ragged_along(a, b) == "m"
        and a.stride(-1) == b.stride(-2) == 1
        and a.shape[-1] % 16 == b.shape[-1] % 16 == 0
        and not _refuses(call)
    )


def _row_scales(call: Call) -> tuple[Tensor, Tensor]:
    """Scales for every row and column of ragged rows; a missing one is one."""
    one = torch.ones((), dtype=torch.float32, device=call.a.device)
    a_scale = call.parts.get("a_scale", one)
    b_scale = call.parts.get("b_scale", one)
    columns = call.b.shape[0], call.b.shape[-1]
    return a_scale.expand(call.a.shape[0]).contiguous(), b_scale.expand(columns).contiguous()


def _by_scaled(call: Call, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    assert call.rows is not None
    by_row = F.ScalingType.RowWise
    return F.scaled_grouped_mm(  # type: ignore[attr-defined,no-any-return]
        call.a, call.b, a_scale, by_row, b_scale, by_row, offs=call.rows.offs
    )


def _padded(call: Call) -> Tensor:
    """The product of copied operands, zero-padded to the next multiple of 16 bytes, as is usual."""
    assert call.rows is not None
    a, b = call.a, call.b
    unit = _ALIGNMENT // a.element_size()
    (m, k), n = a.shape[-2:], b.shape[-1]
    by_k = a.stride(-1) == 1, b.stride(-2) == 1
    ragged_k = a.dim() == b.dim()
    more = -k % unit if any(by_k) and not ragged_k else 0
    a = _grown(a, 0 if by_k[0] else -m % unit, more)
    b = _grown(b, more, 0 if by_k[1] else -n % unit)
    return F.grouped_mm(a, b, offs=call.rows.offs)[..., :m, :n]


def _grown(t: Tensor, rows: int, cols: int) -> Tensor:
    """``t`` with this many more rows and columns, in the same layout."""
    if t.stride(-1) == 1:
        return F.pad(t, (0, cols, 0, rows))
    return F.pad(t.mT, (0, rows, 0, cols)).mT
