"""DTensor sharding rules: which shards of the operands give which shard of the result.

DTensor queries, for each call and mesh dimension, the placements with which the operator works. It
redistributes operands to the cheapest of them, then runs the operator on every rank's local
tensors. With ``out[…, m, n] = epilogue(alpha · Σ_k a[…, m, k] · b[…, k, n] + bias[n]) + residual[…,
m, n]`` the operator works where

* everything is replicated;
* a batch dimension, M or N is sharded, in the result and in all operands that have it;
* K is sharded in ``a`` and ``b``, so that each rank holds a term of the sum. The epilogue must be
  linear, and bias and residual must be terms of such a sum too.

If an operand has one scale for each block of values, or several values in a stored element, shards
are equal and hold whole blocks and elements. Otherwise there is no rule for the dimension.

A gated epilogue pairs column n of ``b`` with column N + n. A contiguous shard of the 2N columns
holds one without the other, so there is no rule for the columns. Shard the gate and the up
projection the same way, and call with local tensors, as ``examples/tensor_parallel_swiglu.py``
does.

Importing this module registers the rules with DTensor, which takes 1.5 s, so ``import tmm_core``
does not. A call of ``tmm_core.matmul`` with a DTensor imports it; before ``torch.compile``, import
it yourself. Nothing in ``matmul`` waits for another rank; only DTensor's redistribution does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from tmm_core import compat, formats
from tmm_core.errors import TmmWarning
from tmm_core.formats import grids
from tmm_core.interop import fallbacks, grouped_operator, operator
from tmm_core.interop.autograd_state import recorded
from tmm_core.launch import warm
from tmm_core.launch.grouped_call import ragged_along
from tmm_core.spec.arguments import GROUPED_ROLES, PARTS, ROLES, Arguments, GroupedArguments, Role

#: Placements of the result, then of each tensor argument in the operator's order.
Rule = tuple[list[Placement], list[Placement]]
#: Names of dimensions in order; the names of batch dimensions are numbers.
Names = Sequence[object]


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
    # `static_argnum` on. `register_sharding` includes only integers of these. A call with "silu"
    # would then get the partial sums of an earlier call without an epilogue. Absent tensors must be
    # in the key too, since a decision refers to operands by position (torch 2.10 omits them below
    # `static_argnum`).
    rules = {operator.matmul: shardings, grouped_operator.grouped_matmul: grouped_shardings}
    for product, rule in rules.items():
        register_sharding(product)(rule)
        propagator.op_to_schema_info[product] = info(static_argnum=0)


def shardings(*given: Any, **named: Any) -> list[Rule]:
    """Return the rules over one mesh dimension for operands of these shapes."""
    call: Any = Arguments(*given, **named)
    a, b = call.a, call.b
    lacking = "m" * (a.ndim == 1) + "n" * (b.ndim == 1)
    dimensions = _dimensions(call, ROLES, range(max(a.ndim, b.ndim, 2) - 2), lacking)
    return _rules(call, dimensions, [*dimensions["out"], "k"])


def grouped_shardings(*given: Any, **named: Any) -> list[Rule]:
    """Return the rules for a grouped product: M, N or K is sharded, except the ragged one. Groups
    and the ragged dimension are not sharded, since ``offs`` describes all of them. Shard experts as
    local tensors."""
    call: Any = GroupedArguments(*given, **named)
    ragged = ragged_along(call.a, call.b)
    free = [each for each in ("m", "n", "k") if each != ragged]
    if ragged == "k":
        # Flat scales hold the groups one after another, so their rows cannot be sharded.
        for role in PARTS:
            part, along = getattr(call, role.name), role.dims.strip("1").lower()
            if part is not None and part.ndim == 1 and part.shape[0] != 1 and along in free:
                free.remove(along)
    dimensions = _dimensions(call, GROUPED_ROLES, ["group"], "1")
    dimensions["out"] = dimensions["out"][ragged != "k" :]
    return _rules(call, dimensions, free)


def _dimensions(
    call: Any, roles: Iterable[Role], lead: Iterable[object], lacking: str
) -> dict[str, Names]:
    """Return the names of each tensor's dimensions: ``lead``, then the matrix dimensions that are
    not ``lacking``. A tensor may have only the last of these dimensions."""
    blocks = {
        name: block for name, (_, block) in zip("ab", formats.read(call.formats), strict=True)
    }
    dims = {
        # The scales of blocks have a dimension along K.
        role.name: role.dims.replace("1", "k") if blocks.get(role.of) else role.dims
        for role in roles
        if role.is_tensor
    }
    return {
        name: [*lead, *(each for each in text.lower() if each not in lacking)]
        for name, text in dims.items()
    }


def _rules(call: Any, dimensions: Mapping[str, Names], free: Names) -> list[Rule]:
    """Return the rules of a product: each tensor has named ``dimensions``, and all tensors may be
    sharded along the ``free`` ones."""
    fused, out = warm.epilogue_of(call.epilogue), dimensions["out"]
    tensors = {name: t for name in dimensions if (t := getattr(call, name)) is not None}
    terms = [name for name in ("bias", "residual") if name in tensors]
    # DTensor turns a replicated tensor into terms by dividing it, which is wrong for integers.
    divisible = all(tensors[name].tensor_meta.dtype.is_floating_point for name in terms)
    rules: list[Rule] = [([Replicate()], [Replicate() for _ in tensors])]
    for along in free:
        places = {name: _shard(t, dimensions[name], along) for name, t in tensors.items()}
        if places["a"].is_replicate() and places["b"].is_replicate():
            continue  # of size one
        if not _whole_blocks(call, along):
            continue
        if along != "k" and not (along == "n" and fused.gated):
            rules.append(([Shard(out.index(along))], [*places.values()]))
        elif along == "k" and not fused.gated and fused.linear and divisible:
            places |= {name: Partial() for name in terms}
            rules.append(([Partial()], [*places.values()]))
    return rules


def _whole_blocks(call: Any, along: object) -> bool:
    """Whether shards along a dimension hold whole blocks of scales, and whole stored elements."""
    named = zip((call.a, call.b), "mn", formats.read(call.formats), strict=True)
    for t, outer, (name, block) in named:
        form = formats.of(t.tensor_meta.dtype, name)
        if form is None or along not in (outer, "k"):
            continue
        rows, width = block or grids.ROW
        if along == "k":
            k = t.shape[-1 if outer == "m" or t.ndim == 1 else -2]
            extent, size = k * form.pack, max(width, form.pack)
        else:
            extent, size = t.shape[-2 if outer == "m" else -1], rows
            size = 1 if extent <= size else size  # all ranks read the same scale
        if size > 1 and extent % (size * t.mesh.size()):
            return False
    return True


def _shard(t: Any, dimensions: Names, along: object) -> Placement:
    """Return the shard of ``t`` along a dimension; replicated if ``t`` lacks it or is broadcast."""
    own = dimensions[max(0, len(dimensions) - t.ndim) :]
    if along not in own or t.shape[own.index(along)] == 1:
        return Replicate()
    return Shard(own.index(along))


def in_place(call: Arguments, transposed: bool) -> torch.Tensor | None:
    """Return the product of DTensors, which each rank computes from its local tensors. Return None
    if an operand has to be moved, or if gradients are recorded.

    DTensor's dispatch of an operator written in Python takes about 100 µs on the host. A small
    product takes as long on a GPU. So a call is dispatched once for each kind of operands, and the
    placements of its result serve later calls. ``transposed``: ``call.b`` is [N, K].
    """
    tensors = call.a, call.b, call.bias, call.residual
    given: list[Any] = [t for t in tensors if t is not None]
    if any(type(t) is not DTensor for t in given) or recorded(*given):
        return None
    held: list[Any] = [None if t is None else _awaited(t) for t in tensors]
    a, b, bias, residual = held
    if not warm.fast_path_allowed(a, b, bias, residual):
        return None
    specs = tuple(None if t is None else compat.dtensor_spec(t) for t in tensors)
    kind = specs, call.epilogue, call.out_dtype, transposed
    if kind not in _decided:
        return _decide(call, kind, transposed)
    if (spec := _decided[kind]) is None:
        return None
    b = b.t() if transposed else b
    y = warm.run(a, b, bias, residual, call.alpha, call.epilogue, call.out_dtype)
    return compat.dtensor_of(y, spec)


def _awaited(t: Any) -> Any:
    """Return the local tensor, once the collective that computes it has ended."""
    local: Any = compat.local_tensor(t)
    return local.wait() if type(local) is not torch.Tensor and hasattr(local, "wait") else local


#: The results' specs, by kind of call; None if operands are moved, or torch decided otherwise.
_decided: dict[Any, Any] = {}
#: Maximum number of kinds that are kept.
_MOST_DECIDED = 4096


def _decide(call: Arguments, kind: Any, transposed: bool) -> torch.Tensor | None:
    """Return the result of the operator itself. Later calls of this kind have its placements. None
    if the bias has to be given another form first."""
    call = call._replace(b=compat.transposed(call.b)) if transposed else call
    if fallbacks.needs_fallback(*call[:4]):
        return None
    y: Any = operator.matmul(*call[:-1])
    given: list[Any] = [t for t in (call.a, call.b, call.bias, call.residual) if t is not None]
    specs = [compat.dtensor_spec(t) for t in given]
    placements = _unmoved(call, specs)
    is_mine = type(y) is DTensor and y.device_mesh.get_coordinate() is not None
    agrees = is_mine and placements is not None and tuple(y.placements) == tuple(placements)
    if len(_decided) >= _MOST_DECIDED:
        _decided.clear()
    _decided[kind] = compat.dtensor_spec(y) if agrees else None
    return y  # type: ignore[no-any-return]


def _unmoved(call: Arguments, specs: Sequence[Any]) -> list[Placement] | None:
    """Return the result's placements by the rule for the operands' placements; None without one."""
    named = (name for name in ("a", "b", "bias", "residual") if getattr(call, name) is not None)
    rules = shardings(*call._replace(**dict(zip(named, specs, strict=True)))[:-1])
    found: list[Placement] = []
    for along in range(specs[0].mesh.ndim):
        here = [spec.placements[along] for spec in specs]
        results = [result for result, operands in rules if operands == here]
        if not results:
            return None
        found += results[0]
    return found


register()
