"""Proves which layers may be fused, from a trace of ``forward`` and never from names.

``torch.fx`` runs a forward on symbols with every child module opaque, once in training mode
and once in evaluation mode. The graph is everything the forward does, whatever the input: a
forward that depends on its input's values or shape cannot be traced, and stays as it is. An
activation is recognised by its values: its graph has only elementwise functions and equals a
known epilogue in float64 over a grid of points.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from tmm_core.epilogues import parse
from tmm_core.errors import reraise
from tmm_core.nn.gated import GATED_BY

ACTIVATIONS = ("relu", "relu2", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "softplus")

_FUNCTIONS = (F.relu, F.leaky_relu, F.gelu, F.silu, F.softplus, F.sigmoid, F.tanh)
_OPERATORS = (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow)
_METHODS = ("relu", "sigmoid", "tanh", "erf", "exp", "add", "sub", "mul", "div", "pow", "square")
_ELEMENTWISE: frozenset[Any] = frozenset(
    (*_FUNCTIONS, *_OPERATORS, operator.neg, *(getattr(torch, name) for name in _METHODS))
)

#: In float64, equivalent formulas differ by some 1e-15; the two gelus by 1e-4.
TOLERANCE = 1e-12


class NotProvenError(Exception):
    """Why a layer stays as it is."""


@dataclass(frozen=True)
class Pair:
    """A layer whose results all go through an activation and nowhere else; or, with a
    ``reason``, one for which that does not hold."""

    parent: nn.Module
    linear: nn.Module
    activation: nn.Module
    epilogue: str
    reason: str | None = None


@dataclass(frozen=True)
class Gating:
    """``down(activation(gate(x)) * up(x))``."""

    #: Of gate, up and down.
    names: tuple[str, ...]
    epilogue: str


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def graphs(module: nn.Module) -> tuple[fx.Graph, fx.Graph]:
    """The graphs of ``module.forward`` over its children, in training and in evaluation.

    Raises:
        NotProvenError: The forward cannot be traced, or is not the class's own.
    """
    if "forward" in vars(module):
        raise NotProvenError("its forward was replaced on the instance")
    return _graph(module, training=True), _graph(module, training=False)


def _graph(module: nn.Module, training: bool) -> fx.Graph:
    # A stand-in receives the attributes that forward may assign to self.
    stand_in = module.__class__.__new__(module.__class__)
    stand_in.__dict__ = dict(module.__dict__, training=training)
    for name in ("_parameters", "_buffers", "_modules"):
        stand_in.__dict__[name] = dict(module.__dict__[name])
    try:
        return _Tracer().trace(stand_in)
    except Exception as error:  # third-party code, run on symbols
        reraise(error)
        text = str(error).strip().partition("\n")[0]
        raise NotProvenError(
            f"its forward cannot be traced ({type(error).__name__}: {text})"
        ) from None


def activation(module: nn.Module) -> str | None:
    """The epilogue that ``module`` computes; None if there is none, or it is not proven."""
    if [*module.children(), *module.parameters(), *module.buffers()]:
        return None
    candidates: tuple[str, ...] = ACTIVATIONS
    if isinstance(module, nn.LeakyReLU):
        candidates = (f"leaky_relu({float(module.negative_slope)!r})",)
    try:
        found = {_function(graph, candidates) for graph in graphs(module)}
    except NotProvenError:
        return None
    return found.pop() if len(found) == 1 else None


def _function(graph: fx.Graph, candidates: Iterable[str]) -> str | None:
    first, *middle, last = graph.nodes
    if first.op != "placeholder" or last.op != "output" or not middle:
        return None
    if last.args != (middle[-1],) or not all(map(is_elementwise, middle)):
        return None
    return _named(fx.GraphModule({}, graph), candidates)


def is_elementwise(node: fx.Node) -> bool:
    """Whether it calls a function of single elements."""
    if node.op == "call_function":
        return node.target in _ELEMENTWISE
    return node.op == "call_method" and node.target in _METHODS


def _named(function: Callable[[torch.Tensor], Any], candidates: Iterable[str]) -> str | None:
    """The epilogue that ``function`` agrees with, near zero and far from it."""
    near = torch.linspace(-40.0, 40.0, 4001, dtype=torch.float64, device="cpu")
    grid = torch.cat([near, near * 250.0])
    with torch.no_grad():
        got = function(grid.clone())
        if not isinstance(got, torch.Tensor) or got.shape != grid.shape or got.dtype != grid.dtype:
            return None
        for name in candidates:
            expected = parse(name).apply(grid)
            if torch.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE):
                return name
    return None


def pairs(
    module: nn.Module, linears: Iterable[nn.Module], activations: dict[nn.Module, str]
) -> list[Pair]:
    """Pairs of a linear layer and its activation among the children of ``module``.

    Raises:
        NotProvenError: The forward cannot be traced.
    """
    training, evaluation = (_pairs(module, g, set(linears), activations) for g in graphs(module))
    return [pair for pair in training if pair in evaluation]


def _pairs(
    module: nn.Module,
    graph: fx.Graph,
    linears: set[nn.Module],
    activations: dict[nn.Module, str],
) -> list[Pair]:
    calls: dict[nn.Module, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(_child(module, node), []).append(node)

    def source(node: fx.Node) -> nn.Module | None:
        """The layer whose result ``node`` takes, if nothing else takes it."""
        try:
            taken = _called(_argument(node))
        except NotProvenError:
            return None
        return _child(module, taken) if len(taken.users) == 1 else None

    found = []
    for activation, epilogue in activations.items():
        sources = [source(node) for node in calls.get(activation, [])]
        reason = None
        if any(layer not in linears for layer in sources):
            reason = "the activation after it also takes other results"
        for layer in dict.fromkeys(layer for layer in sources if layer in linears):
            assert layer is not None
            if reason is None and len(calls[layer]) != sources.count(layer):
                reason = "it is also called without the activation after it"
            found.append(Pair(module, layer, activation, epilogue, reason))
    return found


def gating(module: nn.Module, activations: dict[nn.Module, str]) -> Gating:
    """Prove that ``module`` is ``down(activation(gate(x)) * up(x))`` and nothing more.

    Raises:
        NotProvenError: It is not, or its forward cannot be traced.
    """
    training, evaluation = (_gating(module, graph, activations) for graph in graphs(module))
    if training != evaluation:
        raise NotProvenError("its forward depends on the mode")
    return training


def _gating(module: nn.Module, graph: fx.Graph, activations: dict[nn.Module, str]) -> Gating:
    nodes = list(graph.nodes)
    # x, gate, activation, up, product, down and the output.
    if len(nodes) != 7 or nodes[0].op != "placeholder":
        raise NotProvenError("its forward is not down(activation(gate(x)) * up(x))")
    x = nodes[0]
    down = _called(nodes[-1].args[0])
    left, right = _factors(_argument(down))
    for gated, factor in ((left, right), (right, left)):
        name = _gate(module, gated, activations)
        if name in GATED_BY:
            gate, up = _called(_argument(gated)), _called(factor)
            names = tuple(str(node.target) for node in (gate, up, down))
            if _argument(gate) is x and _argument(up) is x and len(set(names)) == 3:
                return Gating(names, GATED_BY[name])
    raise NotProvenError("its gate is not an activation with a gated epilogue")


def _factors(product: fx.Node) -> tuple[fx.Node, fx.Node]:
    multiplies = (product.op, product.target) in (
        ("call_function", operator.mul),
        ("call_function", torch.mul),
        ("call_method", "mul"),
    )
    if multiplies and len(product.args) == 2 and not product.kwargs:
        left, right = product.args
        if isinstance(left, fx.Node) and isinstance(right, fx.Node):
            return left, right
    raise NotProvenError("the input of its last layer is not a product of two tensors")


def _gate(module: nn.Module, node: fx.Node, activations: dict[nn.Module, str]) -> str | None:
    """The activation that ``node`` applies: a child, or a torch function."""
    if node.op == "call_module":
        return activations.get(_child(module, node))
    if not is_elementwise(node) or not callable(node.target) or len(node.all_input_nodes) != 1:
        return None
    function = node.target

    def apply(z: torch.Tensor) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: z)
        return function(*args, **kwargs)

    return _named(apply, GATED_BY)


def _child(module: nn.Module, node: fx.Node) -> nn.Module:
    return module.get_submodule(str(node.target))


def _called(node: Any) -> fx.Node:
    if not isinstance(node, fx.Node) or node.op != "call_module" or "." in str(node.target):
        raise NotProvenError("its forward does more than call its children")
    return node


def _argument(node: fx.Node) -> fx.Node:
    """The node that ``node`` takes; for a call of a child, its only argument."""
    given = (*node.args, *node.kwargs.values())
    if not given or not isinstance(given[0], fx.Node):
        raise NotProvenError("its forward calls a child with something other than a tensor")
    if node.op == "call_module" and len(given) != 1:
        raise NotProvenError("its forward passes more than one argument to a child")
    return given[0]
