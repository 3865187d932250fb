"""Finds, in the trace of a forward, products that an epilogue can finish.

The result is a program: the traced graph, with each product and its activation in one call.
:mod:`tmm_core.nn.fused` runs the program only while everything that the proof assumed still holds.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tmm_core.epilogues import GATED_BY
from tmm_core.nn.activation import Activation, of_node
from tmm_core.nn.symbols import NotProvenError, unpacked
from tmm_core.nn.trace import Trace


@dataclass(frozen=True)
class Fusion:
    """A product, and the activation that its epilogue computes."""

    #: Name of the layer among the module's children.
    layer: str
    #: Name of the activation among the children; None: it is a function, or the layer's own.
    activation: str | None
    epilogue: str


@dataclass
class Program:
    """A forward with fused products."""

    #: The graphs for training and for evaluation.
    graphs: tuple[fx.Graph, fx.Graph]
    fusions: list[Fusion]
    #: Activations that are not fused: the layer's name, the activation, and the reason.
    apart: list[tuple[str, str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Gating:
    """``down(activation(gate(x)) * up(x))``."""

    #: Names of gate, up and down.
    names: tuple[str, str, str]
    #: The activation's name among the children; None: it is a function.
    activation: str | None
    epilogue: str


def product(layer: Any, x: torch.Tensor, epilogue: str) -> torch.Tensor:
    """Return the product of a child, finished by ``epilogue``, as programs call it."""
    found: torch.Tensor = layer.product(x, epilogue)
    return found


def program(traced: Trace, layers: set[str], known: Mapping[str, Activation]) -> Program:
    """Return the program of a module's forward. ``layers`` are the children that compute a
    :func:`product` with an empty epilogue, and ``known`` those that are activations."""
    training, evaluation = (_Rewriting(graph, layers, known) for graph in traced.graphs)
    if set(training.fusions) != set(evaluation.fusions):
        apart = [(f.layer, f.activation or f.epilogue, "it depends on the mode")
                 for f in {*training.fusions} ^ {*evaluation.fusions}]  # fmt: skip
        return Program(traced.graphs, [], apart)
    fusions = list(dict.fromkeys(training.fusions))
    apart = list(dict.fromkeys(training.apart + evaluation.apart))
    return Program((training.graph, evaluation.graph), fusions, apart)


class _Rewriting:
    """A copy of a graph, with fused products."""

    def __init__(self, graph: fx.Graph, layers: set[str], known: Mapping[str, Activation]) -> None:
        self.graph, self.fusions = fx.Graph(), list[Fusion]()
        self.apart: list[tuple[str, str, str]] = []
        self.graph.output(self.graph.graph_copy(graph, {}))
        self._layers, self._known = layers, known
        for node in list(self.graph.nodes):
            if (name := self._activation(node)) is not None:
                self._consider(node, name)

    def _activation(self, node: fx.Node) -> str | None:
        if node.op == "call_module":
            found = self._known.get(str(node.target))
            return found.epilogue if found is not None and _only_argument(node) else None
        return of_node(node)

    def _consider(self, node: fx.Node, name: str) -> None:
        (source,) = node.all_input_nodes
        act = str(node.target) if node.op == "call_module" else None
        if self._is_product(source):
            if len(source.users) == 1:
                self._fuse(source, node, Fusion(str(source.target), act, name))
            else:
                reason = "its result is also used without the activation"
                self.apart.append((str(source.target), act or name, reason))
        elif source.target is operator.getitem:
            self._consider_halves(node, source, act, name)

    def _is_product(self, node: fx.Node) -> bool:
        return node.op == "call_module" and node.target in self._layers and _only_argument(node)

    def _consider_halves(self, node: fx.Node, half: fx.Node, act: str | None, name: str) -> None:
        """``activation(h[0]) * h[1]`` of the halves of a product, gate first."""
        parts: Any = half.args[0]
        whole = parts.args[0] if getattr(parts, "target", None) is unpacked else parts
        if not isinstance(whole, fx.Node) or not _halves(whole):
            return
        source = whole.all_input_nodes[0]
        if not self._is_product(source):
            return
        reason = None
        others = [*{*whole.users, *parts.users} - {half, parts}]
        if name not in GATED_BY:
            reason = f"no gated epilogue computes {name}"
        elif half.args[1] != 0:
            reason = "its gate is the second half of the product"
        elif len(source.users) != 1 or len(others) != 1 or others[0].args[1:] != (1,):
            reason = "its halves are also used otherwise"
        elif not _multiplied(node, others[0]) or len(half.users) != 1:
            reason = "its halves are used for more than their product"
        if reason is not None:
            self.apart.append((str(source.target), act or name, reason))
            return
        (multiplied,) = node.users
        self._fuse(source, multiplied, Fusion(str(source.target), act, GATED_BY[name]))

    def _fuse(self, source: fx.Node, last: fx.Node, fusion: Fusion) -> None:
        # Where the product was, and not later: its input may be changed in place after it.
        with self.graph.inserting_before(source):
            layer = self.graph.create_node("get_attr", fusion.layer)
            args: Any = (layer, *source.all_input_nodes, fusion.epilogue)
            fused = self.graph.call_function(product, args)
        last.replace_all_uses_with(fused)
        for node in _unused(last, source):
            self.graph.erase_node(node)
        self.fusions.append(fusion)


def _unused(last: fx.Node, source: fx.Node) -> list[fx.Node]:
    """Return the nodes from ``source`` to ``last``, users first."""
    nodes, found, waiting = list(last.graph.nodes), {last}, [last]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node not in found and nodes.index(node) >= nodes.index(source):
                found.add(node)
                waiting.append(node)
    return sorted(found, key=nodes.index, reverse=True)


def _halves(node: fx.Node) -> bool:
    """Whether the node splits its input's last dimension into two."""
    if (node.op, node.target) == ("call_method", "chunk") or node.target is torch.chunk:
        args: dict[str, Any] = dict(zip(("input", "chunks", "dim"), node.args, strict=False))
        args |= node.kwargs
        return args.get("chunks") == 2 and args.get("dim") == -1
    return False


def _multiplied(first: fx.Node, second: fx.Node) -> bool:
    """Whether the product of the two is their only use."""
    users = [*first.users, *second.users]
    if len(users) != 2 or users[0] is not users[1]:
        return False
    try:
        return set(_factors(users[0])) == {first, second}
    except NotProvenError:
        return False


def gating(traced: Trace, known: Mapping[str, Activation]) -> Gating:
    """Prove that a forward is ``down(activation(gate(x)) * up(x))`` and nothing more.

    Raises:
        NotProvenError: It is not.
    """
    training, evaluation = (_gating(graph, known) for graph in traced.graphs)
    if training != evaluation:
        raise NotProvenError("its forward depends on the mode")
    return training


def _gating(graph: fx.Graph, known: Mapping[str, Activation]) -> Gating:
    nodes = list(graph.nodes)
    # x, gate, activation, up, product, down and the output.
    if len(nodes) != 7 or nodes[0].op != "placeholder":
        raise NotProvenError("its forward is not down(activation(gate(x)) * up(x))")
    x = nodes[0]
    down = _called(nodes[-1].args[0])
    left, right = _factors(_argument(down))
    for gated, factor in ((left, right), (right, left)):
        act = str(gated.target) if gated.op == "call_module" else None
        found = None if act is None else known.get(act)
        name = of_node(gated, GATED_BY) if act is None else found and found.epilogue
        if name in GATED_BY:
            gate, up = _called(_argument(gated)), _called(factor)
            names = (str(gate.target), str(up.target), str(down.target))
            if _argument(gate) is x and _argument(up) is x and len(set(names)) == 3:
                return Gating(names, act, GATED_BY[name])
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


def _called(node: Any) -> fx.Node:
    if not isinstance(node, fx.Node) or node.op != "call_module":
        raise NotProvenError("its forward does more than call its children")
    return node


def _argument(node: fx.Node) -> fx.Node:
    """Return the node that ``node`` takes; for a call of a child, its only argument."""
    args = (*node.args, *node.kwargs.values())
    if not args or not isinstance(args[0], fx.Node):
        raise NotProvenError("its forward calls a child with something other than a tensor")
    if node.op == "call_module" and len(args) != 1:
        raise NotProvenError("its forward passes more than one argument to a child")
    return args[0]


def _only_argument(node: fx.Node) -> bool:
    return len(node.args) == 1 and not node.kwargs and isinstance(node.args[0], fx.Node)
