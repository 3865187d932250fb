"""DTensor sharding rules: which shards of the operands give which shard of the result.

For each call, DTensor queries which placements the operator can work with, one mesh dimension at
a time, and redistributes operands to the cheapest of them before it runs the operator on every
rank's local tensors. With
``out[…, m, n] = epilogue(alpha · Σ_k a[…, m, k] · b[…, k, n] + bias[n]) + residual[…, m, n]``
the operator works where

* everything is replicated;
* a batch dimension, M or N is sharded, in the result and in all operands that have it;
* K is sharded in ``a`` and ``b``: each rank holds a term of the sum. This passes through a linear
  epilogue, and through bias and residual if they are terms of such a sum too.

A gated epilogue pairs column n of ``b`` with column N + n. A contiguous shard of the 2N columns
holds one without the other, so there is no rule for its columns: shard the gate and the up
projection the same way and call with local tensors, as ``examples/tensor_parallel_swiglu.py`` does.

Importing this module registers the rules with DTensor, which takes 1.5 s, so ``import tmm_core``
does not. A call of ``tmm_core.matmul`` with a DTensor imports it; before ``torch.compile``, import
it yourself. Nothing in ``matmul`` waits for another rank; only DTensor's redistribution does.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from tmm_core import compat
from tmm_core.errors import TmmWarning
from tmm_core.interop import grouped, operator
from tmm_core.launch import warm
from tmm_core.spec.arguments import Arguments, GroupedArguments

#: Placements of the result, then of each tensor argument in the operator's order.
Rule = tuple[list[Placement], list[Placement]]


def register() -> None:
    """Register the rules of ``tmm::matmul`` and ``tmm::grouped_matmul`` with DTensor."""
    info = compat.schema_info()
    propagator = getattr(getattr(DTensor, "_op_dispatcher", None), "sharding_propagator", None)
    if info is None or propagator is None:
        warnings.warn(
            f"this torch ({torch.__version__}) does not let tmm set the keys of DTensor's cache of "
            "sharding decisions: matmul does not accept DTensors",
            TmmWarning,
            stacklevel=2,
        )
        return
    # DTensor caches its decisions, keyed by the operands' placements and by the arguments from
    # `static_argnum` on. Of these `register_sharding` includes only integers, so "silu" would
    # get the partial sums allowed to an earlier call without epilogue. Absent tensors count too
    # (torch 2.10 omits them below `static_argnum`): a decision refers to operands by position.
    rules = {operator.matmul: shardings, grouped.grouped_matmul: grouped_shardings}
    for product, rule in rules.items():
        register_sharding(product)(rule)
        propagator.op_to_schema_info[product] = info(static_argnum=0)


def shardings(*given: Any, **named: Any) -> list[Rule]:
    """The rules over one mesh dimension for operands with these ``shape`` and ``ndim``."""
    call: Any = Arguments(*given, **named)
    a, b, bias, residual = call[:4]
    scale_a, scale_b = call.scale_a, call.scale_b
    fused = warm.epilogue_of(call.epilogue)
    terms = [t for t in (bias, residual) if t is not None]
    scales = [t for t in (scale_a, scale_b) if t is not None]
    everywhere = [Replicate() for _ in (a, b, *terms, *scales)]
    rules: list[Rule] = [([Replicate()], [*everywhere])]
    batch = max(a.ndim, b.ndim, 2) - 2
    rows, columns = a.ndim > 1, b.ndim > 1
    ndim = batch + rows + columns
    for dim in range(ndim):
        # The index of a dimension of the result in each operand; negative: absent.
        in_a = in_b = in_bias = -1
        if dim < batch:
            in_a, in_b = dim - batch + a.ndim - 2, dim - batch + b.ndim - 2
        elif rows and dim == batch:
            in_a = a.ndim - 2
        elif fused.gated:
            continue
        else:
            in_b, in_bias = b.ndim - 1, 0
        places = [_shard(a, in_a), _shard(b, in_b)]
        if all(place.is_replicate() for place in places):
            continue  # of size one
        if bias is not None:
            places.append(_shard(bias, in_bias))
        if residual is not None:
            places.append(_shard(residual, dim - ndim + residual.ndim))
        # Scales have their operand's dimensions, or are scalars.
        for scale, place in ((scale_a, in_a), (scale_b, in_b)):
            if scale is not None:
                places.append(_shard(scale, place if place < scale.ndim else -1))
        rules.append(([Shard(dim)], places))
    # DTensor turns a replicated tensor into terms by dividing it, which is wrong for integers.
    divisible = all(t.tensor_meta.dtype.is_floating_point for t in terms)
    if not fused.gated and fused.linear and divisible:
        k = [Shard(a.ndim - 1), Shard(max(b.ndim - 2, 0))]
        rules.append(
            ([Partial()], [*k, *(Partial() for _ in terms), *(Replicate() for _ in scales)])
        )
    return rules


def grouped_shardings(*given: Any, **named: Any) -> list[Rule]:
    """The rules for a grouped product: M, N or K sharded, unless it is ragged. Groups and the
    ragged dimension are not sharded, since ``offs`` covers all of them: experts are sharded as
    local tensors."""
    call: Any = GroupedArguments(*given, **named)
    a, b, bias, residual = call.a, call.b, call.bias, call.residual
    fused = warm.epilogue_of(call.epilogue)
    # The dimensions of the matrices; offs and indices are replicated.
    rest = [t for t in (call.a_index, call.out_index, call.out_weights) if t is not None]
    terms = [t for t in (bias, residual) if t is not None]
    out_ndim = 3 if a.ndim == b.ndim == 2 else 2

    def rule(result: Placement, of_a: Placement, of_b: Placement, *of_terms: Placement) -> Rule:
        scales = [
            of_scale(call.scale_a, of_a, a.ndim - 2),
            of_scale(call.scale_b, of_b, b.ndim - 1),
        ]
        last = [*(Replicate() for _ in rest), *(place for place in scales if place is not None)]
        return [result], [of_a, of_b, Replicate(), *of_terms, *last]

    def of_scale(scale: Any, of: Placement, rows: int) -> Placement | None:
        """Sharded as the rows (columns) of its operand, which are the operand's dimension
        ``rows``."""
        if scale is None:
            return None
        return Shard(scale.ndim - 1) if of == Shard(rows) and not _is_one(scale) else Replicate()

    def of_terms(in_bias: bool, in_residual: int) -> list[Placement]:
        placed: list[Placement] = []
        if bias is not None:
            placed.append(Shard(bias.ndim - 1) if in_bias else Replicate())
        if residual is not None:
            placed.append(Shard(in_residual))
        return placed

    rules = [rule(Replicate(), Replicate(), Replicate(), *(Replicate() for _ in terms))]
    ragged = "k" if out_ndim == 3 else "m" if a.ndim == 2 else "n"
    # Flat scales of a ragged sum have a group's rows side by side.
    flat = [t is not None and t.ndim == 1 and not _is_one(t) for t in (call.scale_a, call.scale_b)]
    if ragged != "m" and not (ragged == "k" and flat[0]):
        m = out_ndim - 2
        rules.append(rule(Shard(m), Shard(a.ndim - 2), Replicate(), *of_terms(False, m)))
    if ragged != "n" and not fused.gated and not (ragged == "k" and flat[1]):
        n = out_ndim - 1
        rules.append(rule(Shard(n), Replicate(), Shard(b.ndim - 1), *of_terms(True, n)))
    if ragged != "k" and not fused.gated and fused.linear:
        partial = [Partial() for _ in terms]
        rules.append(rule(Partial(), Shard(a.ndim - 1), Shard(b.ndim - 2), *partial))
    return rules


def _is_one(scale: Any) -> bool:
    """Whether it is one number for all rows."""
    return bool(math.prod(scale.shape) == 1)


def _shard(t: Any, dim: int) -> Placement:
    """Sharded along ``dim``; replicated if ``t`` lacks it or is broadcast along it."""
    return Shard(dim) if dim >= 0 and t.shape[dim] != 1 else Replicate()


register()
