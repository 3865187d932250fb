"""Weights that torch's compiler freezes, and how two of them become one.

With ``torch._inductor.config.freezing`` a graph without gradients keeps its parameters as
constants, and torch evaluates nodes that depend only on constants when it compiles. So a
concatenation of two weights, added before, costs nothing in a call. Torch then also removes nodes
that nothing reads. Parameters that are not frozen would be copied in each call, and are left alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from tmm_core import compat
from tmm_core.interop.tails import Tail

aten = torch.ops.aten
#: A graph ends with this operator for each input that it changes.
WRITES = aten.copy_.default
#: Operators that transpose a matrix.
TRANSPOSES = {aten.permute.default, aten.t.default, aten.transpose.int}


def frozen(graph: torch.fx.Graph) -> set[Node]:
    """Return the parameters, inputs or attributes of an export, that torch will make constants."""
    if not compat.inductor_config().freezing or torch.is_grad_enabled():
        return set()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    attributes = {node for node in graph.nodes if node.op == "get_attr" and "val" in node.meta}
    found = attributes.union(inputs[i] for i in compat.freezable_inputs())
    return {node for node in found if not any(user.target is WRITES for user in node.users)}


def join(graph: torch.fx.Graph, gate: Tail, up: Tail, known: set[Node]) -> Node | None:
    """Make one product of two that differ in their weights, with the gate's columns first, and let
    the users of both read its halves. Returns the product; None if a weight is not ``known`` to
    become a constant."""
    weights: Any = [tail.product.args[-1] for tail in (gate, up)]
    biases: Any = [tail.product.args[0] for tail in (gate, up) if len(tail.product.args) == 3]
    sources = set(map(_source, weights))
    if len(sources) == 1 or not known.issuperset(sources.union(biases)):
        return None
    half = gate.product.meta["val"].shape[-1]
    if any(tuple(bias.meta["val"].shape) != (half,) for bias in biases):
        return None
    place = {node: i for i, node in enumerate(graph.nodes)}
    first = min(gate, up, key=lambda tail: place[tail.last])
    if any(isinstance(n, Node) and place[n] > place[first.last] for n in gate.shape or ()):
        return None
    with graph.inserting_before(first.last):
        terms = [added(graph, aten.cat.default, (biases,))] if biases else []
        b = _joined(graph, weights)
        z = product = added(graph, gate.product.target, (*terms, first.product.args[-2], b))
        if gate.shape is not None:
            z = added(graph, aten.reshape.default, (z, [*gate.shape[:-1], 2 * half]))
        dim = z.meta["val"].dim() - 1
        halves = [
            added(graph, aten.slice.Tensor, (z, dim, start, start + half)) for start in (0, half)
        ]
    for tail, own in zip((gate, up), halves, strict=True):
        tail.last.replace_all_uses_with(own)
    return product


def undo(product: Node, gate: Tail, up: Tail) -> None:
    """Take back :func:`join`, which returned ``product``."""
    z = product if gate.shape is None else next(iter(product.users))
    for tail, own in zip((gate, up), z.users, strict=True):
        own.replace_all_uses_with(tail.last)


def added(graph: torch.fx.Graph, target: Any, arguments: tuple[Any, ...]) -> Node:
    """Add a node, with the example value that the compiler's other passes expect."""
    value = target(*torch.fx.map_arg(arguments, lambda n: n.meta["val"]))  # may raise
    node: Node = graph.call_function(target, arguments)
    node.meta["val"] = value
    return node


def _source(weight: Node) -> Node:
    """Return the stored parameter of a weight, which is the parameter or its transpose."""
    source: Node = weight.args[0] if weight.target in TRANSPOSES else weight  # type: ignore[assignment]
    return source


def _joined(graph: torch.fx.Graph, weights: list[Node]) -> Node:
    """Return the columns of two weights side by side, in the memory layout of the weights."""
    if any(weight is _source(weight) for weight in weights):
        return added(graph, aten.cat.default, (weights, 1))
    rows = added(graph, aten.cat.default, ([_source(weight) for weight in weights],))
    return added(graph, aten.permute.default, (rows, [1, 0]))
