"""The symbols on which a forward or another function runs to be traced."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.overrides import TorchFunctionMode


class NotProvenError(Exception):
    """Why a forward stays as it is."""


def unpacked(values: Any, number: int) -> tuple[Any, ...]:
    """Return the values that ``a, b = values`` assigns to so many variables.

    Raises:
        ValueError: There are more or fewer.
    """
    found = tuple(values)
    if len(found) > number:
        raise ValueError(f"too many values to unpack (expected {number})")
    if len(found) < number:
        raise ValueError(f"not enough values to unpack (expected {number}, got {len(found)})")
    return found


class _Symbol(fx.Proxy):
    """Stands for a tensor, without what torch's symbols compute differently from a tensor."""

    def __getattr__(self, name: str) -> Any:
        return _Attribute(self, name)

    def __repr__(self) -> str:
        raise NotProvenError("its forward makes a text of a tensor")

    def __hash__(self) -> int:
        raise NotProvenError("its forward looks a tensor up in a table")

    def __iter__(self) -> Any:
        frame = sys._getframe(1)
        steps = dis.get_instructions(frame.f_code)
        step = next(each for each in steps if each.offset >= frame.f_lasti)
        if step.opname != "UNPACK_SEQUENCE":
            return super().__iter__()  # refused
        values: Any = self.tracer.create_proxy("call_function", unpacked, (self, step.arg), {})
        return iter([values[i] for i in range(step.arg or 0)])

    def _refuse(self, other: Any) -> Any:
        raise NotProvenError("its forward changes a tensor in place")

    # Without these Python computes a new value.
    __iadd__ = __isub__ = __imul__ = __imatmul__ = __itruediv__ = __ifloordiv__ = _refuse
    __imod__ = __ipow__ = __iand__ = __ior__ = __ixor__ = __ilshift__ = __irshift__ = _refuse


class _Attribute(_Symbol, fx.proxy.Attribute):
    """Stands for an attribute or a method of a tensor."""


class _OnSymbols(TorchFunctionMode):
    """Refuses functions of torch that take no symbol: a graph would keep what they returned once,
    such as a random number."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if result is not None and not any(issubclass(each, fx.Proxy) for each in types):
            raise NotProvenError("its forward computes without its input")
        return result


class _Tracer(fx.Tracer):
    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Symbol(node, self)


class Child(nn.Module):
    """Stands for a child: it can be called, which adds a node to a graph, and nothing else."""

    def __init__(self, name: str, tracer: fx.Tracer) -> None:
        super().__init__()
        self._name, self._tracer = name, tracer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tracer.create_proxy("call_module", self._name, args, kwargs)

    def __getattribute__(self, name: str) -> Any:
        # The tracer uses what nn.Module defines; a forward that does is refused for the name.
        if name.startswith("_") or hasattr(nn.Module, name):
            return super().__getattribute__(name)
        raise NotProvenError(f"its forward reads {self._name}.{name}")

    def __iter__(self) -> Any:
        raise NotProvenError(f"its forward calls the children of {self._name}")

    def __getitem__(self, index: Any) -> Any:
        return iter(self)

    def __len__(self) -> Any:
        return iter(self)

    def __bool__(self) -> bool:
        return True


def graph_of(function: Callable[[Any], Any]) -> fx.Graph:
    """Return the graph of a function that calls no module."""
    return traced(lambda tracer, symbol: function(symbol))


def traced(function: Callable[[Any, Any], Any]) -> fx.Graph:
    """Return the graph of ``function(tracer, symbol)``.

    Torch's way to trace replaces ``nn.Module.__call__`` meanwhile, also for other threads. Models
    may run there.
    """
    tracer: Any = _Tracer()
    graph = fx.Graph(tracer_cls=fx.Tracer)
    tracer.root, tracer.tensor_attrs, tracer.graph = nn.Module(), {}, graph
    with _OnSymbols():
        result = function(tracer, tracer.create_proxy("placeholder", "input", (), {}))
    tracer.create_node("output", "output", (tracer.create_arg(result),), {})
    for node in reversed(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return graph
