"""Finds the products of a compiled graph and the pointwise operators behind them.

These are a bias, an activation and a residual, in the operators of Inductor's decompositions.

Inductor computes an activation of 16-bit values in fp32, between two conversions, and reshapes the
rows of a layer's product. A tail includes both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

aten, convert = torch.ops.aten, torch.ops.prims.convert_element_type.default

#: The operators that are products.
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
RESHAPES = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}

#: Expressions of the product ``z``: an operator and its arguments.
Z = "z"
_HALF = (aten.mul.Tensor, Z, 0.5)
_CUBE = (aten.mul.Tensor, (aten.mul.Tensor, (aten.mul.Tensor, Z, Z), Z), 0.044715)
_INNER = (aten.mul.Tensor, (aten.add.Tensor, Z, _CUBE), 0.7978845608028654)
_ERF = (aten.erf.default, (aten.mul.Tensor, Z, 0.7071067811865476))
_EXP = (aten.exp.default, (aten.neg.default, Z))

#: Activations by the epilogue's name.
ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "relu": (aten.relu.default, Z),
    "tanh": (aten.tanh.default, Z),
    "sigmoid": (aten.sigmoid.default, Z),
    "silu": (aten.div.Tensor, Z, (aten.add.Tensor, _EXP, 1)),
    "gelu": (aten.mul.Tensor, _HALF, (aten.add.Tensor, _ERF, 1)),
    "gelu_tanh": (
        aten.mul.Tensor,
        _HALF,
        (aten.add.Tensor, (aten.tanh.default, _INNER), 1),
    ),
}
_ROOTS = {expression[0] for expression in ACTIVATIONS.values()}


@dataclass
class Tail:
    """A product with the operators that follow it.

    Attributes:
        last: The last node, whose value is the result.
        nodes: All nodes of the tail, which a rewrite replaces.
        epilogue: The activation's name; empty if there is none.
        residual: The summand of the last addition.
        shape: The shape argument of the last reshape; None if nothing is reshaped.
    """

    product: Node
    last: Node
    nodes: list[Node]
    epilogue: str = ""
    residual: Node | None = None
    shape: Any = None


def tails(graph: torch.fx.Graph) -> Iterator[Tail]:
    """Yield each product of the graph with its longest tail whose inner values nothing else
    reads."""
    for product in list(graph.nodes):
        if product.op == "call_function" and product.target in PRODUCTS:
            yield _with_residual(_with_activation(Tail(product, product, [product])))


def _with_activation(tail: Tail) -> Tail:
    grown = _through(tail)
    z, widened = grown.last, False
    user = _only_user(z)
    if user is not None and user.target is convert:
        if z.meta["val"].dtype.itemsize != 2 or user.args[1] is not torch.float32:
            return tail
        z, widened = user, True
    for root in _reached(z):
        for name, expression in ACTIVATIONS.items():
            inside: list[Node] = []
            if not _matches(expression, root, z, inside) or not _closed([z, *inside], root):
                continue
            nodes = [*grown.nodes, *([z] if widened else []), *inside]
            last = root
            if widened:
                narrowed = _only_user(root)
                own = tail.product.meta["val"].dtype
                if (
                    narrowed is None
                    or narrowed.target is not convert
                    or narrowed.args[1] is not own
                ):
                    return tail
                nodes, last = [*nodes, narrowed], narrowed
            return Tail(tail.product, last, nodes, name, None, grown.shape)
    return tail


def _with_residual(tail: Tail) -> Tail:
    grown = _through(tail)
    z = grown.last
    add = _only_user(z)
    if add is None or add.target is not aten.add.Tensor or add.kwargs or len(add.args) != 2:
        return tail
    if tail.product.target is aten.addmm.default and _summand_of(tail.product)[1] is not None:
        return tail
    (residual,) = [each for each in add.args if each is not z] or [None]
    if not isinstance(residual, Node):
        return tail
    mine, theirs, sum_ = z.meta["val"], residual.meta.get("val"), add.meta["val"]
    if not isinstance(theirs, torch.Tensor) or theirs.dtype is not mine.dtype:
        return tail
    if tuple(theirs.shape) != tuple(mine.shape) or not sum_.is_contiguous():
        return tail
    return Tail(tail.product, add, [*grown.nodes, add], tail.epilogue, residual, grown.shape)


def _through(tail: Tail) -> Tail:
    """Return the tail with the reshape behind it, if nothing else reads its value."""
    user = _only_user(tail.last)
    if user is None or user.target not in RESHAPES:
        return tail
    nodes = [*tail.nodes, user]
    return Tail(tail.product, user, nodes, tail.epilogue, tail.residual, user.args[1])


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _reached(z: Node) -> Iterator[Node]:
    """Yield nodes that may be an activation's root: users of ``z``, up to some steps away."""
    seen, near = {z}, [z]
    for _ in range(8):  # the longest path of an activation
        near = [user for node in near for user in node.users if user not in seen]
        seen.update(near)
        yield from (node for node in near if node.target in _ROOTS)


def _matches(expression: Any, node: Any, z: Node, inside: list[Node]) -> bool:
    """Whether ``node`` computes ``expression`` of ``z``; adds the nodes of that computation to
    ``inside``."""
    if expression is Z:
        return node is z
    if not isinstance(expression, tuple):
        return isinstance(node, (int, float)) and node == expression
    if not isinstance(node, Node) or node.target is not expression[0] or node.kwargs:
        return False
    if node not in inside:
        inside.append(node)
    operands = expression[1:]
    if len(node.args) != len(operands):
        return False
    orders = [node.args]
    if node.target in (aten.mul.Tensor, aten.add.Tensor):
        orders.append(node.args[::-1])
    for order in orders:
        known = len(inside)
        if all(_matches(e, n, z, inside) for e, n in zip(operands, order, strict=True)):
            return True
        del inside[known:]
    return False


def _closed(nodes: list[Node], root: Node) -> bool:
    """Whether values of ``nodes``, except that of ``root``, are read only by ``nodes``."""
    own = set(nodes)
    return all(node is root or own.issuperset(node.users) for node in nodes)


def _summand_of(product: Node) -> tuple[Node | None, Node | None]:
    """Return the summand of ``addmm``: as a bias if it is a vector, else as a residual."""
    if product.target is not aten.addmm.default:
        return None, None
    c: Any = product.args[0]
    return (c, None) if c.meta["val"].dim() == 1 else (None, c)


def terms_of(product: Node) -> tuple[Node, Node, Node | None, Node | None, float] | None:
    """Return ``a``, ``b``, bias, residual and alpha of a product; None if tmm has no such call."""
    alpha: Any = product.kwargs.get("alpha", 1)
    if product.kwargs.get("beta", 1) != 1 or not isinstance(alpha, (int, float)):
        return None
    bias, residual = _summand_of(product)
    a, b = product.args[-2:] if product.target is not aten.addmm.default else product.args[1:3]
    return a, b, bias, residual, float(alpha)  # type: ignore[return-value]  # nodes, by the schema
