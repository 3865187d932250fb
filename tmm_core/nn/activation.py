"""Recognises activations and gates by their values, never by names.

The graph of such a forward has only elementwise functions, and its results equal a known epilogue's
in float64.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tmm_base.guards import suppress
from torch import fx, nn

from tmm_core import compat
from tmm_core.epilogues import ACTIVATIONS, EPILOGUES, TOLERANCE, named
from tmm_core.nn.reached import Absent, Reached, body, is_called_as_usual
from tmm_core.nn.symbols import NotProvenError
from tmm_core.nn.trace import CONSTANTS, nested, trace, trace_method

_FUNCTIONS = (F.relu, F.leaky_relu, F.gelu, F.silu, F.softplus, F.sigmoid, F.tanh)
_OPERATORS = (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow)
_METHODS = ("relu", "sigmoid", "tanh", "erf", "exp", "add", "sub", "mul", "div", "pow", "square")
_ELEMENTWISE: frozenset[Any] = frozenset(
    (*_FUNCTIONS, *_OPERATORS, operator.neg, *(getattr(torch, name) for name in _METHODS))
)


class Activation(NamedTuple):
    """A module that was proven to compute an epilogue, and what the proof assumed."""

    kind: type[nn.Module]
    reached: Reached
    epilogue: str

    def is_(self, module: Any) -> bool:
        """Whether calling ``module`` does what was proven, and nothing more."""
        return type(module) is self.kind and not interposed(module) and self.reached.holds(module)


def interposed(module: nn.Module, equal: Container[Any] = ()) -> bool:
    """Whether calling ``module`` does more than its class's forward, or an ``equal`` one."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or ("forward" in module.__dict__ and not _is_usual(module, equal))
        or not is_called_as_usual(type(module))
    )


def _is_usual(module: nn.Module, equal: Container[Any]) -> bool:
    """Whether the attribute ``forward`` is the class's own, or an ``equal`` one: the package
    ``kernels`` assigns the class's to modules for which it has no kernel."""
    forward = module.__dict__["forward"]
    if not isinstance(forward, types.MethodType) or forward.__self__ is not module:
        return False
    return forward.__func__ is type(module).forward or forward.__func__ in equal


def recognise(module: nn.Module) -> Activation | None:
    """Return the epilogue that ``module`` computes; None if none is known, or it is not proven."""
    if [*module.children(), *module.parameters(), *module.buffers()] or interposed(module):
        return None
    candidates: tuple[str, ...] = ACTIVATIONS
    if isinstance(module, nn.LeakyReLU):
        candidates = (f"leaky_relu({float(module.negative_slope)!r})",)
    try:
        traced = trace(module)
    except NotProvenError:
        return None
    found = {_function(graph, candidates) for graph in traced.graphs}
    name = found.pop() if len(found) == 1 else None
    if name is None:
        return None
    return Activation(type(module), traced.reached, name)


def activated_by(module: Any) -> str | None:
    """The epilogue that calling an activation computes now. An activation that is not known yet is
    examined outside of graphs only: a graph that is traced before leaves it to torch."""
    if not isinstance(module, nn.Module) or compat.global_hooks():
        return None
    for known in _recognised.get(type(module), ()):
        if known.is_(module):
            return known.epilogue
    if torch.compiler.is_compiling() or _UNKNOWN in module.__dict__ or interposed(module):
        return None
    found = recognise(module)
    if found is None:
        module.__dict__[_UNKNOWN] = True
        return None
    _recognised[type(module)] = (*_recognised.get(type(module), ()), found)
    return found.epilogue


#: Activations that were recognised, by class.
_recognised: dict[type[nn.Module], tuple[Activation, ...]] = {}
#: The attribute of a module that was examined and not recognised.
_UNKNOWN = "_tmm_unknown"


def is_activation(module: Any) -> bool:
    """Whether ``module`` looks like an activation, for a report: by the file of its class."""
    file = type(module).__module__.rpartition(".")[2]
    return file in ("activation", "activations") and not [*module.children(), *module.parameters()]


def _function(graph: fx.Graph, candidates: Iterable[str]) -> str | None:
    _, *middle, output = graph.nodes
    if not middle or output.args != (middle[-1],) or not all(map(is_elementwise, middle)):
        return None
    return named(fx.GraphModule({}, graph), candidates)


def is_elementwise(node: fx.Node) -> bool:
    """Whether the node calls a function of single elements."""
    if node.op == "call_function":
        return node.target in _ELEMENTWISE
    return node.op == "call_method" and node.target in _METHODS


def of_node(node: fx.Node, candidates: Iterable[str] = ACTIVATIONS) -> str | None:
    """Return the epilogue that a node applies to its only input by a torch function, or None."""
    if not is_elementwise(node) or len(node.all_input_nodes) != 1:
        return None
    source = node.all_input_nodes[0]

    def apply(z: torch.Tensor) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: z)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    if node.target is F.leaky_relu and node.args == (source,):
        slope = node.kwargs.get("negative_slope", 0.01)
        candidates = (f"leaky_relu({float(slope)!r})",) if isinstance(slope, float) else ()
    return named(apply, candidates)


# -- the gates of Transformers' experts ------------------------------------------------------------

Gate = Callable[[Any, torch.Tensor], torch.Tensor]


class _Gate(NamedTuple):
    """A gate that was examined with these attributes of its layer, and the result."""

    function: Gate
    reached: Reached
    found: Any


#: Gates that were examined, by the class of their layer.
_Gates = dict[type[nn.Module], tuple[_Gate, ...]]
_of_halves: _Gates = {}
_of_pairs: _Gates = {}
#: The last ones of a class that are kept.
_MOST_GATES = 64


def _examined(
    known: _Gates, examine: Callable[[nn.Module, Any], _Gate | None], layer: nn.Module, gate: Gate
) -> Any:
    """Return what ``examine`` found out about the gate of a layer. None if it cannot be examined,
    or was not before a graph is traced."""
    kind = type(layer)
    for each in known.get(kind, ()):
        if each.function is gate and each.reached.holds(layer):
            return each.found
    if torch.compiler.is_compiling() or (made := examine(layer, gate)) is None:
        return None
    known[kind] = (*known.get(kind, ()), made)[-_MOST_GATES:]
    return made.found


def multiplies_halves(layer: nn.Module, gate: Gate) -> bool:
    """Whether ``gate(layer, product)`` multiplies ``act_fn`` of the first half of the columns by
    the second half, by its values on a grid.

    ``gate`` must be a library's. Its values depend on constants of the layer, such as the limits of
    a clamp. False also if it was not examined before a graph is traced.
    """
    return bool(_examined(_of_halves, _examine_halves, layer, gate))


def _examine_halves(layer: nn.Module, gate: Any) -> _Gate | None:
    names = {name for code in nested(gate.__code__) for name in code.co_names} - {"act_fn"}
    reads = {n: getattr(layer, n, Absent) for n in sorted(names) if not hasattr(nn.Module, n)}
    given = {name: value for name, value in reads.items() if value is not Absent}
    if not all(isinstance(value, CONSTANTS) for value in given.values()):
        return None
    near = torch.linspace(-3.0, 3.0, 61, dtype=torch.float64, device="cpu")
    points = torch.cat([near * factor for factor in (1.0, 10.0, 1e3, 1e30)])
    halves = torch.meshgrid(points, points, indexing="ij")
    multiplies = False
    with suppress(Exception):  # the library's code, on a stand-in of its layer
        result = gate(types.SimpleNamespace(**given, act_fn=torch.square), torch.cat(halves, -1))
        multiplies = torch.equal(result, halves[0].square() * halves[1])
    return _Gate(gate, Reached((body(gate),), reads=tuple(reads.items())), multiplies)


def gate_epilogue(layer: nn.Module, gate: Gate) -> str | None:
    """Return the epilogue of ``gate(layer, product)`` with the layer's ``alpha`` and ``limit``.

    None if it is another function, or was not examined before a graph is traced."""
    if any(type(getattr(layer, name, None)) not in (int, float) for name in ("alpha", "limit")):
        return None
    found: str | None = _examined(_of_pairs, _examine_pairs, layer, gate)
    return found


def _examine_pairs(layer: Any, gate: Gate) -> _Gate:
    alpha, limit = layer.alpha, layer.limit
    numbers = ("alpha", alpha), ("limit", limit)
    reached, found = Reached(reads=numbers), None
    with suppress(Exception):  # third-party code, run on symbols
        epilogue = EPILOGUES["clamped_swiglu"].with_parameters(alpha, limit)
        graph, traced = trace_method(layer, gate)
        reached = replace(traced, reads=(*numbers, *traced.reads))
        if _pairs_columns(graph):
            result, grid = fx.GraphModule({}, graph)(_pairs(limit)), epilogue.apply(_pairs(limit))
            if torch.allclose(result, grid, rtol=TOLERANCE, atol=TOLERANCE):
                found = epilogue.interned()
    return _Gate(gate, reached, found)


_CLAMPS = ("clamp", "clamp_min", "clamp_max")


def _pairs_columns(graph: fx.Graph) -> bool:
    """Whether the graph takes even and odd columns, and computes with these element by element."""
    first, *middle, last = graph.nodes
    taken = [(first, (..., slice(start, None, 2))) for start in (None, 0, 1)]

    def allowed(node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return node.args in taken
        clamps = node.op == "call_method" and node.target in _CLAMPS
        return clamps or is_elementwise(node)

    return first.op == "placeholder" and last.op == "output" and all(map(allowed, middle))


def _pairs(limit: float) -> torch.Tensor:
    """Pairs of gate and up, near zero, around the limit and far from it."""
    near = torch.linspace(-3.0, 3.0, 121, dtype=torch.float64, device="cpu")
    points = torch.cat([near * limit, near * 10, near * 1000])
    gate, up = torch.meshgrid(points, points, indexing="ij")
    return torch.stack([gate, up], -1).flatten(-2)
