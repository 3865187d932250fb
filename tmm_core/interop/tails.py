"""Finds the products of a compiled graph and the pointwise operators behind them.

These are a bias, an activation, a gate and a residual, in the operators of Inductor's
decompositions.

Inductor computes an activation of 16-bit values in fp32, between two conversions, and reshapes the
rows of a layer's product. A tail includes both.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from tmm_core import compat
from tmm_core.epilogues import ACTIVATIONS, GATED_BY, named
from tmm_core.interop.aten_calls import LEAST_ALPHA
from tmm_core.spec.arguments import MOST_ALPHA

aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default

#: The operators that are products.
MATRIX_PRODUCTS = {aten.mm.default, aten.addmm.default}
PRODUCTS = {*MATRIX_PRODUCTS, aten.bmm.default}
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}
RESHAPES = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}

#: Elementwise operators into which Inductor decomposes activations.
POINTWISE = {
    aten.relu.default, aten.tanh.default, aten.sigmoid.default, aten.exp.default, aten.erf.default,
    aten.neg.default, aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor,
}  # fmt: skip
#: Maximum number of operators in an activation: gelu_tanh has nine.
_LONGEST = 12


@dataclass
class Tail:
    """A product with the operators that follow it.

    Attributes:
        last: The last node, whose value is the result.
        nodes: All nodes of the tail, which a rewrite replaces.
        epilogue: The activation as a call names it; empty if there is none.
        residual: The summand of the last addition.
        shape: The argument of the last reshape, which ends with the result's columns, or None.
    """

    product: Node
    last: Node
    nodes: list[Node]
    epilogue: str = ""
    residual: Node | None = None
    shape: Any = None

    @property
    def gated(self) -> bool:
        """Whether the result has half of the product's columns."""
        return self.epilogue in GATED_BY.values()

    @property
    def result_shape(self) -> list[Any]:
        """The shape of the result before it is reshaped."""
        *rows, columns = self.product.meta["val"].shape
        return [*rows, columns // 2 if self.gated else columns]


def tails(graph: torch.fx.Graph) -> Iterator[Tail]:
    """Yield each product of the graph with its longest tail of values that nothing else reads."""
    for product in list(graph.nodes):
        if is_product(product, PRODUCTS):
            yield tail_of(product)


def is_product(node: Node, targets: set[Any]) -> bool:
    """Whether a node calls one of these products with sizes that are known."""
    if node.op != "call_function" or node.target not in targets:
        return False
    return all(map(_has_example, (node, *node.all_input_nodes)))


def _has_example(node: Node) -> bool:
    """Whether each size and stride of the node's value is a number, or was one in the first call. A
    size that depends on data is neither; torch raises an error if it is compared."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return True
    symbols = [n for n in (*val.shape, *val.stride()) if isinstance(n, torch.SymInt)]
    return all(symbol.node.hint is not None for symbol in symbols)


def tail_of(product: Node) -> Tail:
    """Return a product with its longest tail."""
    tail = bare(product)
    return _with_residual(_with_gate(tail) or _with_activation(tail))


def bare(product: Node) -> Tail:
    """Return a product without what follows it."""
    return Tail(product, product, [product])


def pairs(graph: torch.fx.Graph) -> Iterator[tuple[Tail, Tail]]:
    """Yield pairs of products, gate and up. Both multiply the same matrix ``a``, and the graph
    multiplies an activation of the first by the second. Both are reshaped alike."""
    for product in list(graph.nodes):
        if not is_product(product, MATRIX_PRODUCTS):
            continue
        gate = _through(bare(product))
        found = _activation(gate.last, product.meta["val"].dtype)
        mul = None if found is None or found[0] not in GATED_BY else _only_user(found[1][-1])
        if found is None or mul is None or mul.target is not aten.mul.Tensor or mul.kwargs:
            continue
        (last,) = [each for each in mul.args if each is not found[1][-1]] or [None]
        up = _ending_in(last)
        if up is None or not _alike(gate, up):
            continue
        yield gate, up


def _ending_in(last: Any) -> Tail | None:
    """Return the product, perhaps reshaped, that ends in ``last`` and that nothing else reads."""
    if not isinstance(last, Node) or _only_user(last) is None:
        return None
    source = last.args[0] if last.target in RESHAPES else last
    if not isinstance(source, Node) or not is_product(source, MATRIX_PRODUCTS):
        return None
    tail = bare(source)
    return tail if last is source else _through(tail) if _only_user(source) is last else None


def _alike(gate: Tail, up: Tail) -> bool:
    """Whether two products differ only in their weights and biases."""
    one, other = gate.product, up.product
    if one is other or one.target is not other.target or one.kwargs or other.kwargs:
        return False
    if not _same(one.args[-2], other.args[-2]) or gate.shape != up.shape:
        return False
    return tuple(one.meta["val"].shape) == tuple(other.meta["val"].shape)


def _same(x: Any, y: Any) -> bool:
    """Whether two nodes have the same value: the same node, or equal reshapes of one."""
    return x is y or (x.target in RESHAPES and x.target is y.target and x.args == y.args)


def _with_activation(tail: Tail) -> Tail:
    grown = _through(tail)
    found = _activation(grown.last, tail.product.meta["val"].dtype)
    if found is None:
        return tail
    name, nodes = found
    return replace(grown, last=nodes[-1], nodes=[*grown.nodes, *nodes], epilogue=name)


def _activation(z: Node, own: torch.dtype) -> tuple[str, list[Node]] | None:
    """Return the activation that all readers of ``z`` compute of it, and its nodes. The last node
    is the result in the dtype ``own``. None: there is no activation."""
    outside: list[Node] = []
    user = _only_user(z)
    if user is not None and user.target is convert:
        if own.itemsize != 2 or user.args[1] is not torch.float32:
            return None
        z, outside = user, [user]
    found = _pointwise(z)
    if found is None:
        return None
    name, inside = found
    nodes = [*outside, *inside]
    if outside:
        narrowed = _only_user(inside[-1])
        if narrowed is None or narrowed.target is not convert or narrowed.args[1] is not own:
            return None
        nodes.append(narrowed)
    return name, nodes


def _pointwise(z: Node) -> tuple[str, list[Node]] | None:
    """Return the activation that pointwise operators compute of ``z`` alone, and their nodes. The
    last node is the result: the first one after which nothing else reads the earlier values."""
    inside: list[Node] = []
    own = {z}
    while len(inside) < _LONGEST:
        readers = (user for node in (z, *inside) for user in node.users)
        added = next((n for n in readers if n not in own and _is_pointwise(n, own)), None)
        if added is None:
            return None
        inside.append(added)
        closed = all(own.union(inside).issuperset(node.users) for node in own)
        if closed and (name := _named(z, inside)) is not None:
            return name, inside
        own.add(added)
    return None


def _is_pointwise(node: Node, own: set[Node]) -> bool:
    """Whether a node computes a function of single elements, of ``own`` values and numbers."""
    if node.target not in POINTWISE or node.kwargs or not own.issuperset(node.all_input_nodes):
        return False
    return all(isinstance(each, (Node, int, float)) for each in node.args)


def _named(z: Node, nodes: list[Node]) -> str | None:
    """Return the activation that these nodes compute of ``z``, by its values; None if there is
    none."""

    def apply(t: torch.Tensor) -> torch.Tensor:
        values = {z: t}
        for node in nodes:
            values[node] = node.target(*torch.fx.map_arg(node.args, values.__getitem__))  # type: ignore[operator]
        return values[nodes[-1]]

    numbers = [each for node in nodes for each in node.args if isinstance(each, (int, float))]
    caps = {float(each) for each in numbers if LEAST_ALPHA <= each <= MOST_ALPHA}
    with compat.without_modes():
        return named(apply, (*ACTIVATIONS, *(f"softcap({cap!r})" for cap in sorted(caps))))


def _with_gate(tail: Tail) -> Tail | None:
    """Return the tail with ``activation(left half) * right half``; None if there is none."""
    grown = _through(tail)
    columns = tail.product.meta["val"].shape[-1]
    if not isinstance(columns, int) or columns % 2 or not _has_example(grown.last):
        return None
    if grown.last.meta["val"].shape[-1] != columns:
        return None
    halves = _halves(grown.last, columns // 2)
    if halves is None:
        return None
    gate, up, nodes = halves
    found = _activation(gate, tail.product.meta["val"].dtype)
    if found is None or found[0] not in GATED_BY:
        return None
    name, inside = found
    mul = _only_user(inside[-1])
    if mul is None or mul.target is not aten.mul.Tensor or mul.kwargs:
        return None
    if _only_user(up) is not mul or set(mul.args) != {inside[-1], up}:
        return None
    shape = grown.shape
    if shape is not None:
        shape = [*shape[:-1], columns // 2]
    nodes = [*grown.nodes, *nodes, *inside, mul]
    return Tail(tail.product, mul, nodes, GATED_BY[name], None, shape)


def _halves(z: Node, half: int) -> tuple[Node, Node, list[Node]] | None:
    """Return the halves of the columns of ``z``, and the nodes that cut it, if all readers do."""
    dims, users = (-1, z.meta["val"].dim() - 1), list(z.users)
    parts: dict[Any, Node] = {}
    if len(users) == 1 and users[0].target in SPLITS:
        (split,) = users
        _, sizes, dim = (*split.args, 0)[:3]
        if split.kwargs or dim not in dims or sizes not in (half, [half, half]):
            return None
        parts = {node.args[1]: node for node in split.users if node.target is operator.getitem}
        left, right, complete = parts.get(0), parts.get(1), len(split.users) == 2
        nodes = [split, *split.users]
    else:
        for node in users:
            if node.target is not aten.slice.Tensor or node.kwargs or len(node.args) != 4:
                return None
            _, dim, start, end = node.args
            if dim not in dims or not isinstance(start, int) or not isinstance(end, int):
                return None
            parts[start, min(end, 2 * half)] = node
        left, right = parts.get((0, half)), parts.get((half, 2 * half))
        nodes, complete = users, len(users) == 2
    return (left, right, nodes) if left and right and complete else None


def _with_residual(tail: Tail) -> Tail:
    grown = _through(tail)
    z = grown.last
    add = _only_user(z)
    if add is None or add.target is not aten.add.Tensor or add.kwargs or len(add.args) != 2:
        return tail
    if tail.product.target is aten.addmm.default and _summand_of(tail.product)[1] is not None:
        return tail
    (residual,) = [each for each in add.args if each is not z] or [None]
    if not isinstance(residual, Node) or not all(map(_has_example, (z, residual))):
        return tail
    product, added, total = z.meta["val"], residual.meta.get("val"), add.meta["val"]
    if not isinstance(added, torch.Tensor) or added.dtype is not product.dtype:
        return tail
    if tuple(added.shape) != tuple(product.shape) or not total.is_contiguous():
        return tail
    return replace(grown, last=add, nodes=[*grown.nodes, add], residual=residual)


def _through(tail: Tail) -> Tail:
    """Return the tail with the reshape behind it, if nothing else reads its value."""
    user = _only_user(tail.last)
    if user is None or user.target not in RESHAPES:
        return tail
    return replace(tail, last=user, nodes=[*tail.nodes, user], shape=user.args[1])


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _summand_of(product: Node) -> tuple[Node | None, Node | None]:
    """Return the summand of ``addmm``: a bias if it has one number per column, or a residual."""
    if product.target is not aten.addmm.default:
        return None, None
    c: Any = product.args[0]
    columns = product.meta["val"].shape[-1:]
    return (c, None) if c.meta["val"].shape == columns else (None, c)


def terms_of(product: Node) -> tuple[Node, Node, Node | None, Node | None, float] | None:
    """Return ``a``, ``b``, bias, residual and alpha of a product; None if tmm has no such call."""
    alpha: Any = product.kwargs.get("alpha", 1)
    if product.kwargs.get("beta", 1) != 1 or not isinstance(alpha, (int, float)):
        return None
    if not LEAST_ALPHA <= abs(alpha) <= MOST_ALPHA:
        return None
    bias, residual = _summand_of(product)
    a, b = product.args[-2:] if product.target is not aten.addmm.default else product.args[1:3]
    return a, b, bias, residual, float(alpha)  # type: ignore[return-value]  # nodes, by the schema
