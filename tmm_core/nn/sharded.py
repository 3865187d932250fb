"""Gated products of projections that ``parallelize_module`` sharded by columns.

Each rank holds the same rows of both weights, so its part of the result needs no other rank. It is
one product of its two shards, gated in the kernel. The hooks of ``ColwiseParallel`` on both layers,
which move the input and place the output, run once for the two.

Imported by a :class:`tmm_core.nn.GatedMLP` that has a DTensor as a weight.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tmm_core.compat import dtensor_of, dtensor_spec, holds_storage_alone, local_tensor
from tmm_core.interop.autograd_state import recorded
from tmm_core.nn.gated_product import apart, recorded_product, run
from tmm_core.nn.joint_storage import move_together, whole
from tmm_core.nn.linear import Linear

Tensor = torch.Tensor


def gated(mlp: Any, gate: Any, up: Any, x: Tensor) -> Tensor | None:
    """Return the result of a gated MLP's first two layers and the gating. None if the layers are
    not sharded in the same way by columns of one mesh dimension, or do more than multiply."""
    if not (_column_sharded(gate) and _column_sharded(up)):
        return None
    if not _placed_alike(gate, up):
        return None
    of_gate, of_up = _parameters(gate), _parameters(up)
    alike = [(p.shape, p.dtype, p.device_mesh) for p in of_gate]
    if alike != [(p.shape, p.dtype, p.device_mesh) for p in of_up]:
        return None
    for hook in gate._forward_pre_hooks.values():
        x = hook(gate, (x,))
    mesh = of_gate[0].device_mesh
    if not isinstance(x, DTensor) or x.device_mesh != mesh or x.dtype is not of_gate[0].dtype:
        return None
    if x.placements != (Replicate(),):
        return None
    held: Any = [[local_tensor(p) for p in each] for each in (of_gate, of_up)]
    hidden = any(t is None for t in (*held[0], *held[1]))  # `None in` compares tensors
    if not hidden:
        _join(mlp, *held)
    learns = hidden or recorded(x, *of_gate, *of_up)
    # Each rank's gradient of x is a term of the sum over the columns.
    local: Any = x.to_local(grad_placements=[Partial()]) if learns else local_tensor(x)
    if hasattr(local, "wait"):  # a collective is in flight
        local = _Awaited.apply(local) if learns else local.wait()  # type: ignore[no-untyped-call]
    shards: Any = [[p.to_local() for p in each] for each in (of_gate, of_up)] if learns else held
    biases = [pair[1] if len(pair) > 1 else None for pair in shards]
    y = _product(local, (shards[0][0], shards[1][0]), biases, mlp._text)
    kind = dtensor_spec(x), dtensor_spec(of_gate[0]), y.dtype
    if learns or kind not in _specs:
        shape = torch.Size([*x.shape[:-1], of_gate[0].shape[0]])
        stride = torch.empty(shape, device="meta").stride()
        whole: Any = DTensor.from_local(
            y, mesh, [Shard(y.dim() - 1)], run_check=False, shape=shape, stride=stride
        )
        if len(_specs) >= _MOST_SPECS:
            _specs.clear()
        _specs[kind] = dtensor_spec(whole)
    else:
        whole = dtensor_of(y, _specs[kind])
    for hook in gate._forward_hooks.values():
        whole = hook(gate, (x,), whole)
    return whole  # type: ignore[no-any-return]


def _join(mlp: Any, of_gate: list[Tensor], of_up: list[Tensor]) -> None:
    """Place the shards of gate (weight, bias) and of up one after the other."""
    where = [t.data_ptr() for t in (*of_gate, *of_up)]
    if where == mlp._shards_seen or (
        of_gate[0].is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return
    for first, second in zip(of_gate, of_up, strict=True):
        if first.shape == second.shape and all(map(_movable, (first, second))):
            move_together(first, second)
    # Tried once per set of addresses: shards that could not be joined are not retried.
    mlp._shards_seen = [t.data_ptr() for t in (*of_gate, *of_up)]


def _movable(shard: Tensor) -> bool:
    """Whether a shard has a storage to itself. FSDP gathers a shard into a buffer that it writes
    again in later calls. A shard that was moved out of this buffer would keep the old values."""
    return whole(shard) and holds_storage_alone(shard)


def _product(x: Tensor, weights: Any, biases: Any, text: str) -> Tensor:
    """This rank's part."""
    if not recorded(x, *weights, *biases):
        return run(x, weights, biases, text)
    y = recorded_product(x, weights, biases, text)
    return apart(x, weights, biases, text) if y is None else y


#: Specs of results, by the specs of x and of the weight and by dtype, and their maximum number.
_specs: dict[Any, Any] = {}
_MOST_SPECS = 4096

#: The hooks of pairs of layers that were found to place tensors alike, by the first hooks. Reading
#: closures takes longer than comparing hooks with known ones.
_alike: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def _placed_alike(gate: Any, up: Any) -> bool:
    """Whether both layers' hooks are torch's own, and place inputs and outputs in the same way."""
    hooks = (
        gate._forward_pre_hooks, gate._forward_hooks, up._forward_pre_hooks, up._forward_hooks,
    )  # fmt: skip
    seen = [[*each.values()] for each in hooks]
    if _alike.get(gate) == seen:
        return True
    before, after, before_up, after_up = map(_placing, hooks)
    if None in (before, after) or (before, after) != (before_up, after_up):
        return False
    _alike[gate] = seen
    return True


#: Qualified-name prefix of the hooks that place inputs and outputs.
_HOOKS = "torch.distributed.tensor._api.distribute_module."


def _parameters(layer: nn.Module) -> list[Any]:
    return [p for p in (layer._parameters["weight"], layer._parameters["bias"]) if p is not None]


def _column_sharded(layer: Any) -> bool:
    if type(layer) is not Linear or layer._text or "forward" in layer.__dict__:
        return False
    if layer.replaced():
        return False
    if layer._backward_hooks or layer._backward_pre_hooks:
        return False
    if layer._forward_hooks_with_kwargs or layer._forward_pre_hooks_with_kwargs:
        return False
    return all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in _parameters(layer))


def _placing(hooks: Mapping[int, Any]) -> list[Any] | None:
    """Return a comparable description of a layer's hooks; None if one is not torch's own for
    placing."""
    done = []
    for hook in hooks.values():
        # A closure of distribute_module over the style's function and the mesh.
        made_by = f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', '')}"
        if not (made_by.startswith(_HOOKS) and made_by.endswith(".<locals>.<lambda>")):
            return None
        cells = [cell.cell_contents for cell in hook.__closure__]
        found = [c for c in cells if isinstance(c, functools.partial)]
        if len(found) != 1 or found[0].keywords:
            return None
        rest = [c for c in cells if c is not found[0]]
        done.append((found[0].func, found[0].args, rest))
    return done


class _Awaited(torch.autograd.Function):
    """The result of a collective in flight, as a plain tensor."""

    @staticmethod
    def forward(ctx: Any, t: Any) -> Tensor:
        return t.wait()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
