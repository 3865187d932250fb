"""Products of one matrix ``a``: finds them in a compiled graph, and makes one call of them.

Query, key and value are such products, and gate and up of two weights. The call is
``tmm::concurrent``. A product of few rows reads its weight, and does not reach the bandwidth of
memory while it starts and while it ends. Products on other streams fill these gaps: query, key and
value of one token take 23 µs in place of 29 µs on an H100
(``benchmarks/results/h100/concurrent.txt``). Streams cost the host some 40 µs for each product, so
they are used only while a CUDA graph is captured. Otherwise the products run one after the other,
and where gradients are needed, they are separate calls.
"""

from __future__ import annotations

import functools
import math
import operator as python
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from tmm_core.interop import operator
from tmm_core.interop.constants import TRANSPOSES, added
from tmm_core.interop.libraries import define
from tmm_core.interop.tails import MATRIX_PRODUCTS, RESHAPES, convert, is_product, terms_of
from tmm_core.launch.warm import run
from tmm_core.settings import sharing_gpu
from tmm_core.spec.arguments import ROLES, Arguments

Tensor = torch.Tensor

aten = torch.ops.aten
#: The most rows of ``a`` with which products share the GPU. With more, some take longer than one
#: after the other: 3 % of 256 rows, 13 % of 512.
MOST_ROWS = 64
#: Products leave room for each other (:meth:`tmm_core.Kernel.beside`) if the smallest weight has at
#: most ``SMALL`` bytes and the largest at most ``LARGE``. Alone a small weight is read at a part of
#: the bandwidth. A large one is read at all of it, if by the kernel that is the fastest alone; and
#: blocks of both kinds delay each other (``benchmarks/results/h200/shared_input.txt``).
SMALL, LARGE = 20e6, 60e6
#: The number of streams in addition to the current one.
_STREAMS = 3

#: Roles in the order of the operator's arguments.
_ROLES = tuple(role for role in ROLES if role.name != "out")
#: The arguments that each product has for itself: those with columns, and the epilogue.
OWN = tuple(r.name for r in _ROLES if "n" in r.dims.lower() or r.name == "epilogue")
#: The arguments that all products share.
SHARED = tuple(role.name for role in _ROLES if role.name not in OWN)
_IS_OWN = tuple(role.name in OWN for role in _ROLES)


@functools.cache
def _streams(device: torch.device, thread: int) -> list[torch.cuda.Stream]:
    """Return the further streams of a thread. Threads share none: a capture takes its streams."""
    return [torch.cuda.Stream(device) for _ in range(_STREAMS)]


def arguments(calls: list[Arguments]) -> tuple[Any, ...]:
    """Return the operator's arguments for these calls, which differ in :data:`OWN` only."""
    each = zip(*(call[:-1] for call in calls), strict=True)
    return tuple(
        list(values) if own else values[0] for own, values in zip(_IS_OWN, each, strict=True)
    )


def _calls(given: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the inverse of :func:`arguments`, without ``out``."""
    count = len(given[1])  # of b
    each = [value if own else (value,) * count for own, value in zip(_IS_OWN, given, strict=True)]
    return list(zip(*each, strict=True))


def _run(*given: Any) -> list[Tensor]:
    calls = _calls(given)
    a = given[0]
    if not a.is_cuda or a.numel() > MOST_ROWS * a.shape[-1]:
        return [run(*call) for call in calls]
    products = _beside_each_other(calls)
    if torch.cuda.is_current_stream_capturing():
        return _at_once(products, a.device)
    return [product() for product in products]


def _beside_each_other(calls: list[tuple[Any, ...]]) -> list[Callable[[], Tensor]]:
    """Return functions that compute the products. Small ones leave room for each other, also
    outside a capture: their kernels have to be verified before it."""
    sizes = [b.numel() * b.element_size() for _, b, *_ in calls]
    if min(sizes) <= SMALL and max(sizes) <= LARGE:
        return [functools.partial(sharing_gpu, run, *call) for call in calls]
    return [functools.partial(run, *call) for call in calls]


def _at_once(products: list[Callable[[], Tensor]], device: torch.device) -> list[Tensor]:
    """Compute the first product on the current stream, the others on further streams."""
    here = torch.cuda.current_stream(device)
    further = _streams(device, threading.get_ident())
    ready, ended = here.record_event(), []
    results = []
    try:
        for i, product in enumerate(products[1:]):
            stream = further[i % _STREAMS]
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                try:
                    results.append(product())
                finally:
                    ended.append(stream.record_event())
        return [products[0](), *results]
    finally:
        for event in ended:
            here.wait_event(event)


def _one_by_one(*given: Any) -> list[Tensor]:
    matmul: Callable[..., Tensor] = operator.matmul
    return [matmul(*call) for call in _calls(given)]


_types = (f"{role.type}{'[]' if role.name in OWN else ''} {role.name}" for role in _ROLES)
define(f"concurrent({', '.join(_types)}) -> Tensor[]", _run, _one_by_one, _one_by_one)
concurrent = torch.ops.tmm.concurrent.default


# -- the search in a graph -------------------------------------------------------------------------

#: The types of devices that have streams.
STREAMED = ("cuda",)
#: Views and conversions, by which a graph makes a product's operands of its inputs.
MOVED = TRANSPOSES | RESHAPES | {
    convert, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.alias.default,
}  # fmt: skip


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
        given = arguments([each.call for each in products])
        results = added(graph, concurrent, given)
        for i, each in enumerate(products):
            result = added(graph, python.getitem, (results, i))
            each.node.replace_all_uses_with(result)
    for each in products:
        graph.erase_node(each.node)


def _call_of(node: Node) -> Arguments | None:
    """Return the call that computes a node's product; None if tmm has no such call."""
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
    """Return the tensors that a product does not share."""
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
