"""The columns timed on one problem: the eager call, tmm's, and single kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tmm_cache import TuningRecord

import tmm_core
from tmm_core.bench.case import Call
from tmm_core.bench.series import Series
from tmm_core.launch.plan import Plan
from tmm_core.spec.kernel import config_text
from tmm_core.tuning.ranking import fastest_first
from tmm_core.tuning.timing import Run

#: Candidates of a record that race against the choice, fastest first.
MOST_KNOWN = 5

Tensor = torch.Tensor
Expression = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
Products = Callable[[Tensor, Tensor, Tensor | None], list[Tensor]]


def eager(calls: Sequence[Call]) -> Run:
    """The call without tmm, as in a model's code: ``F.linear`` or ``torch.matmul``, then the
    activation. A gated call is two products, ``F.silu(x @ wg.T) * (x @ wu.T)``. 8-bit operands go
    through ``torch._scaled_mm``, which has no epilogue either."""
    return _on(calls, expression(calls[0]))


def tmm(calls: Sequence[Call]) -> Run:
    """``tmm_core.matmul`` with the call's arguments, as users write it."""
    given = [call.keywords for call in calls]
    function: Any = tmm_core.matmul if calls[0].rows is None else tmm_core.grouped_matmul
    return lambda copy: function(calls[copy].a, calls[copy].b, **given[copy])


def inductor(calls: Sequence[Call]) -> Run:
    """The same code under ``torch.compile(mode="max-autotune-no-cudagraphs")``.

    It compiles at the first call, which can take a minute.
    """
    # Each problem recompiles the same code object, and dynamo gives up after eight.
    torch._dynamo.reset()
    function = expression(calls[0])
    return _on(calls, torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False))


def _on(calls: Sequence[Call], function: Expression) -> Run:
    def run(copy: int) -> Tensor:
        call = calls[copy]
        return function(call.a, call.b, call.bias, call.residual)

    return run


def expression(call: Call) -> Expression:
    """The eager code of a call as a function of its tensors."""
    # Looked up here, so that the function is pure torch code, which dynamo can trace.
    first, *rest = call.epilogue.chain
    # With alternate columns there is one product, as in a model's code.
    halved, out_dtype = first.gated and not first.interleaved, call.out_dtype
    products = _products(call, halved)

    def run(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        inputs = products(a, b, bias)
        y = first.reference(*inputs, *first.parameters) if halved else first.apply(*inputs)
        for stage in rest:
            y = stage.apply(y)
        if residual is not None:
            y = y + residual
        return y if out_dtype is None else y.to(out_dtype)

    return run


def _products(call: Call, halved: bool) -> Products:
    """The products that an epilogue takes: of gate and up, or one. If one 8-bit operand has row
    scales, torch needs them for both; a missing scale is one."""
    problem = call.problem()
    dtype = problem.out.dtype
    by_row = any(t.scale is not None and t.scale.kind == "row" for t in (problem.a, problem.b))

    def scale(given: Tensor | None, *shape: int) -> Tensor | None:
        if not problem.native:
            return None
        given = call.a.new_ones((), dtype=torch.float32) if given is None else given
        return given.expand(shape).contiguous() if by_row else given

    def halves(t: Tensor | None) -> Sequence[Any]:
        if not halved:
            return (t,)
        return (t, t) if t is None or t.dim() == 0 else t.chunk(2, dim=-1)

    a_scale = scale(call.parts.get("a_scale"), problem.m, 1)
    scales = halves(scale(call.parts.get("b_scale"), 1, call.b.shape[-1]))

    def run(a: Tensor, b: Tensor, bias: Tensor | None) -> list[Tensor]:
        return [
            _product(a, columns, z)
            if a_scale is None
            else torch._scaled_mm(a, columns, a_scale, b_scale, z, out_dtype=dtype)
            for columns, b_scale, z in zip(halves(b), scales, halves(bias), strict=True)
        ]

    return run


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.matmul(a, b)
    return F.linear(a, b.mT, bias) if b.dim() == 2 else torch.matmul(a, b) + bias


def known(record: TuningRecord, chosen: Plan) -> list[Series]:
    """The fastest candidates on record besides the choice."""
    return [
        Series(f"{kernel} {config_text(config)}".rstrip(), kernel, tuple(config.items()))
        for kernel, config in ((r.kernel, r.config) for r in fastest_first(record)[:MOST_KNOWN])
        if (kernel, dict(config)) != (chosen.kernel, dict(chosen.config))
    ]
