"""Finds the products of a compiled graph that read one matrix ``a``, and makes one call of them.

Query, key and value are such products, and gate and up of two weights. With few rows they run at
the same time in a CUDA graph (:mod:`tmm_core.interop.concurrent_operator`).
"""

from __future__ import annotations

import math
import operator as python
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from tmm_core.interop import concurrent_operator, operator
from tmm_core.interop.concurrent_operator import MOST_ROWS, OWN, SHARED
from tmm_core.interop.constants import TURNS, added
from tmm_core.interop.tails import MATRIX_PRODUCTS, RESHAPES, convert, is_product, terms_of
from tmm_core.spec.arguments import Arguments

aten = torch.ops.aten
#: The types of devices that have streams.
STREAMED = ("cuda",)
#: Views and conversions, by which a graph makes a product's operands of its inputs.
MOVED = TURNS | RESHAPES | {convert, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default}


class Product(NamedTuple):
    """A product of a compiled graph, with nodes as the tensors of its call."""

    node: Node
    call: Arguments

    @property
    def is_ours(self) -> bool:
        """Whether tmm computes it already."""
        return self.node.target is operator.matmul


def groups(graph: torch.fx.Graph) -> Iterator[list[Product]]:
    """Yield products of few rows that read the same ``a`` and do not need each other's results.
    There are at least two, and tmm computes at least one of them."""
    found: dict[Any, list[Product]] = {}
    for node in graph.nodes:
        call = _call_of(node)
        if call is not None and _is_member(node, call):
            found.setdefault(_shared(call), []).append(Product(node, call))
    for products in found.values():
        if len(products) > 1 and any(each.is_ours for each in products):
            yield products


def join(graph: torch.fx.Graph, products: list[Product]) -> None:
    """Replace these products by one call, in the place of the first."""
    first = products[0].node
    own = [tensor for each in products for tensor in _own(each.call)]
    with graph.inserting_before(first):
        sources = _sources(own) or set()
        for node in [node for node in graph.nodes if node in sources]:
            first.prepend(node)
        given = concurrent_operator.arguments([each.call for each in products])
        results = added(graph, concurrent_operator.concurrent, given)
        for i, each in enumerate(products):
            result = added(graph, python.getitem, (results, i))
            each.node.replace_all_uses_with(result)
    for each in products:
        graph.erase_node(each.node)


def _call_of(node: Node) -> Arguments | None:
    """The call that computes a node's product; None if tmm has no such call."""
    if node.target is operator.matmul:
        return Arguments(*node.args, **node.kwargs)  # type: ignore[arg-type]  # nodes stand for tensors
    terms = terms_of(node) if is_product(node, MATRIX_PRODUCTS) else None
    return None if terms is None else Arguments(*terms)  # type: ignore[arg-type]


def _is_member(node: Node, call: Any) -> bool:
    """Whether a product has few rows and needs nothing but ``a`` and the graph's inputs."""
    y, a, b = (each.meta["val"] for each in (node, call.a, call.b))
    if y.device.type not in STREAMED or b.dim() != 2:
        return False
    sizes = [size if isinstance(size, int) else size.node.hint for size in a.shape[:-1]]
    if None in sizes or not 0 < math.prod(sizes) <= MOST_ROWS:
        return False
    return _sources(_own(call)) is not None


def _own(call: Arguments) -> list[Node]:
    """The tensors that a product does not share."""
    return [node for name in OWN if isinstance(node := getattr(call, name), Node)]


def _shared(call: Arguments) -> tuple[str, ...]:
    """A key that two calls have in common if they differ in :data:`OWN` only. A graph may reshape
    and convert one tensor for each product."""
    a: Any = call.a
    steps = []
    while a.target in MOVED:
        steps.append(f"{a.target}{a.args[1:]}{a.kwargs}")
        a = a.args[0]
    return a.name, *steps, *(str(getattr(call, name)) for name in SHARED if name != "a")


def _sources(nodes: list[Node]) -> set[Node] | None:
    """The nodes that compute these from the graph's inputs, which may move to an earlier place;
    None if they need more than views and conversions."""
    found: set[Node] = set()
    rest = list(nodes)
    while rest:
        node = rest.pop()
        if node.op in ("placeholder", "get_attr") or node in found:
            continue
        if node.target not in MOVED:
            return None
        found.add(node)
        rest.extend(node.all_input_nodes)
    return found
