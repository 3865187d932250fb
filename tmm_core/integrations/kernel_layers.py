"""Layers for the ``kernels`` package, whose ``kernelize`` gives a module another layer's forward.

``kernelize`` does not examine the module. So a forward here checks at each call that the module
computes the same as the layer. Otherwise it runs the forward of the module's own class.
"""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tmm_core import api
from tmm_core.interop import fallbacks
from tmm_core.nn import activation, conv1d, fusion_match
from tmm_core.nn.classes import replaced
from tmm_core.nn.reached import Reached
from tmm_core.nn.symbols import NotProvenError
from tmm_core.nn.trace import trace

Tensor = torch.Tensor


# kernelize accepts only layers without their own constructor, further methods or attributes.
class Linear(nn.Module):
    """``torch.nn.Linear`` over the kernel registry."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        if not _is_product(self, nn.Linear):
            return own_forward(self, input)
        own: Any = self
        return api.linear(input, own.weight, own.bias)


class Conv1D(nn.Module):
    """Transformers' ``Conv1D``, a linear layer whose weight is ``[in, out]``."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        if not _is_product(self, conv1d.theirs()):
            return own_forward(self, x)
        own: Any = self
        return api.matmul(x, own.weight, bias=own.bias)


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))``, with the activation in the kernel of ``gate``.

    kernelize changes no parameter, so gate and up stay two products. ``tmm_core.nn.convert`` joins
    their weights and computes one.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        found = _gating(self)
        if found is None:
            return own_forward(self, x)
        (gate, up, down), epilogue = found
        between = api.linear(x, gate.weight, gate.bias, epilogue=epilogue)
        return down(between * up(x))  # type: ignore[no-any-return]


LAYERS: tuple[type[nn.Module], ...] = (Linear, Conv1D, GatedMLP)
_FORWARDS = frozenset(layer.forward for layer in LAYERS)


def own_forward(module: Any, x: Tensor) -> Tensor:
    """The result of the forward that the class of ``module`` defines."""
    found: Tensor = type(module).forward(module, x)
    return found


def is_ours(module: nn.Module) -> bool:
    """Whether ``kernelize`` gave ``module`` a forward of these layers."""
    forward = module.__dict__.get("forward")
    return isinstance(forward, types.MethodType) and forward.__func__ in _FORWARDS


def _is_product(layer: Any, kind: type | None) -> bool:
    """Whether ``layer`` is of exactly this type, unchanged, and multiplies by a plain weight."""
    exact: bool = type(layer) is kind and not replaced(kind)
    return exact and not fallbacks.foreign(layer.weight)


def _does_no_more(layer: Any) -> bool:
    """Whether calling a linear layer computes its product, and nothing else."""
    return _is_product(layer, nn.Linear) and not activation.interposed(layer, _FORWARDS)


#: The computation that the forward of each examined class was proven to do, with the code that it
#: runs; None: not a gated MLP.
_proven: dict[type[nn.Module], tuple[Reached, fusion_match.Gating] | None] = {}


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether the class of ``module`` has the forward of a gated MLP of linear layers."""
    kind = type(module)
    if kind not in _proven:
        if is_ours(module):  # the proof is about the forward of the class
            module = copy.copy(module)
            del module.forward
        _proven[kind] = _prove(module)
    proven = _proven[kind]
    if proven is not None:  # also examines the activation, before a graph is traced
        activation.activated_by(module._modules.get(str(proven[1].activation)))
    return proven is not None


def _prove(module: nn.Module) -> tuple[Reached, fusion_match.Gating] | None:
    if len(module._modules) < 3 or any(child._modules for child in module.children()):
        return None
    found = {name: activation.recognise(child) for name, child in module.named_children()}
    try:
        traced = trace(module)
        gating = fusion_match.gating(traced, {n: act for n, act in found.items() if act})
    except NotProvenError:
        return None
    # An attribute that the forward reads may differ from one module of the class to the next.
    if traced.reached.reads or traced.tensors or gating.activation is None:
        return None
    return traced.reached, gating


def _gating(mlp: nn.Module) -> tuple[list[Any], str] | None:
    """The layers of a gated MLP and its activation; None if its class must compute it."""
    kind = type(mlp)
    if kind not in _proven and not torch.compiler.is_compiling():
        is_gated_mlp(mlp)
    proven = _proven.get(kind)
    if proven is None:
        return None
    reached, gating = proven
    children = mlp._modules
    layers = [children.get(name) for name in gating.names]
    if not (_does_no_more(layers[0]) and _does_no_more(layers[1])):
        return None
    if not reached.holds(mlp):
        return None
    epilogue = activation.activated_by(children.get(str(gating.activation)))
    return (layers, epilogue) if epilogue is not None else None


@dataclass(frozen=True)
class Repository:
    """Where ``kernelize`` loads a layer from: this package, not a hub."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer


#: Names of layers in mappings, with the layer that serves each.
NAMES: dict[str, type[nn.Module]] = {
    "Linear": Linear,
    "Conv1D": Conv1D,
    "SwiGLUMLP": GatedMLP,
    "GeGLUMLP": GatedMLP,
    # Any gating activation: SwiGLUMLP and GeGLUMLP of other mappings stand for one.
    "GatedMLP": GatedMLP,
}
