"""Modules whose forward computes several of its steps in one product.

``convert`` changes the class of a module to a subclass of it, made here. The children do not
change: a caller may still call, hook, wrap or replace them. Each call checks that everything the
proof assumed still holds, and otherwise runs the module's own forward.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from tmm_core import compat
from tmm_core.nn import stored_weights
from tmm_core.nn.activation import Activation, interposed
from tmm_core.nn.classes import own, subclass
from tmm_core.nn.gated_layers import GatedMLP
from tmm_core.nn.reached import Reached

Tensor = torch.Tensor


class Assumed(NamedTuple):
    """The assumptions of a proof about a module's forward."""

    #: The module's own class.
    kind: Any
    #: The code that the forward runs, and the attributes that it reads.
    reached: Reached
    #: Children, and parameters or buffers, that it uses.
    present: tuple[str, ...]
    tensors: tuple[str, ...]
    #: Children whose products get an epilogue.
    layers: tuple[str, ...]
    #: Children that the epilogues replace.
    activations: tuple[tuple[str, Activation], ...]

    def hold(self, module: nn.Module) -> bool:
        """Whether all assumptions still hold for ``module``."""
        if compat.global_hooks():
            return False
        children = module._modules
        for name in self.layers:
            if not computes_product(children.get(name)):
                return False
        for name, activation in self.activations:
            if not activation.is_(children.get(name)):
                return False
        for name in self.present:
            if children.get(name) is None or name in module.__dict__:
                return False
        for name in self.tensors:
            if getattr(module, name, None) is None:
                return False
        return self.reached.holds(module)


def computes_product(layer: Any) -> bool:
    """Whether calling ``layer`` computes one product that takes an epilogue, and nothing else."""
    kind = type(layer)
    if getattr(kind, "computes_product", None) is not kind or layer._text or layer.replaced():
        return False
    # FullyShardedDataParallel and torch.nn.utils.prune make them plain attributes.
    of = layer._parameters
    weight = of.get("weight")
    # An epilogue takes floating-point products only, a torch activation may take others.
    if weight is None or "bias" not in of or not weight.dtype.is_floating_point:
        return False
    return stored_weights.is_readable(weight) and not interposed(layer)


def _forward(assumed: Assumed, fused: Any, symbols: bool = False) -> Any:
    """A forward that calls ``fused`` while the assumptions hold, with ``symbols`` also for a symbol
    of ``torch.fx``, and otherwise the class's own."""
    kind = assumed.kind

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            (x,) = args
            fits = isinstance(x, Tensor) or (symbols and isinstance(x, fx.Proxy))
            if fits and assumed.hold(self):
                return fused(self, x)
        return kind.forward(self, *args, **kwargs)

    return forward


def programmed(assumed: Assumed, graphs: tuple[fx.Graph, fx.Graph]) -> Any:
    """Return the class of modules that run one of these graphs, in training or in evaluation."""
    sources = [graph.python_code("self") for graph in graphs]
    in_training, in_evaluation = map(_compiled, sources)

    def fused(self: Any, x: Tensor) -> Any:
        return in_training(self, x) if self.training else in_evaluation(self, x)

    kind = assumed.kind
    key = assumed, *(source.src for source in sources)
    # A graph cannot be pickled: a module that is read from a pickle runs its own forward.
    return subclass(kind, None, key, (own, kind), forward=_forward(assumed, fused))


def _compiled(source: Any) -> Any:
    scope = dict(source.globals)
    exec(compile(source.src, "<tmm_core.nn.fused>", "exec"), scope)
    return scope["forward"]


def gated(assumed: Assumed, names: tuple[str, str, str], epilogue: str) -> Any:
    """The class of modules that compute ``down(activation(gate(x)) * up(x))``, as GatedMLP does."""
    origin = gated, assumed, names, epilogue
    forward = _forward(assumed, GatedMLP.forward, symbols=True)
    facts = {"_names": names, "_epilogue": epilogue, "_text": epilogue}
    facts["__init__"] = assumed.kind.__init__  # type(module)(...) makes another one
    return subclass(assumed.kind, GatedMLP, origin, origin, forward=forward, **facts)


def sequential(kind: Any, known: tuple[Activation, ...]) -> Any:
    """The class of ``nn.Sequential`` whose products are finished by the activations after them."""

    def forward(self: Any, input: Any) -> Any:
        if kind.forward is not nn.Sequential.forward or compat.global_hooks():
            return kind.forward(self, input)
        modules = list(self)
        fused = None
        for module, after in zip(modules, [*modules[1:], None], strict=True):
            if fused is not None and module is fused:
                fused = None
                continue
            epilogue = _epilogue(known, after)
            if epilogue and isinstance(input, Tensor) and computes_product(module):
                input, fused = module.product(input, epilogue), after
            else:
                input = module(input)
        return input

    return subclass(kind, None, known, (sequential, kind, known), forward=forward)


def _epilogue(known: tuple[Activation, ...], module: Any) -> str:
    """The epilogue of the ``known`` ones that ``module`` computes; empty if it computes none."""
    for activation in known:
        if activation.is_(module):
            return activation.epilogue
    return ""
