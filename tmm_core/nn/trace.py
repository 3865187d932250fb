"""Traces a forward, and proves that its graph is everything the forward can do.

``torch.fx`` runs the forward on a symbol with every child module opaque, once in training and once
in evaluation. A symbol cannot show what decided the path that was taken. So the names in the
forward's code are checked too. Each must be a child or a function that the graph calls, an
attribute whose value is recorded, or a constant. A forward that reads anything else (a global mode,
a random number, a type, a child's attributes) stays as it is.

The objects that these names refer to may be replaced later, so they are recorded too
(:mod:`tmm_core.nn.reached`).
"""

from __future__ import annotations

import collections
import copy
import dis
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from tmm_core.errors import error_message, reraise
from tmm_core.nn.reached import Reached, body, is_torchs
from tmm_core.verify.watched_call import putting_back

#: Values that cannot change in place; a comparison shows whether the attribute was assigned anew.
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.memory_format)
#: Containers that a forward may add to, such as a list of losses.
_CONTAINERS = (list, dict, set, collections.deque)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
#: Steps of Python's bytecode that handle exceptions, of the tracer too, or enter contexts.
_HANDLERS = {"SETUP_FINALLY", "SETUP_WITH", "PUSH_EXC_INFO", "BEFORE_WITH", "LOAD_SPECIAL"}
#: Where torch's functions are; ``nn.functional`` and ``torch.functional`` have one name.
_TORCH = (torch, torch.nn, torch.nn.functional, torch.functional, torch.special)


class NotProvenError(Exception):
    """Why a forward stays as it is."""


@dataclass(frozen=True)
class Trace:
    """The graph of a forward of one tensor, and what the proof assumed."""

    #: In training, and in evaluation.
    graphs: tuple[fx.Graph, fx.Graph]
    #: Children of the module that the forward calls, and parameters and buffers that it reads.
    present: tuple[str, ...]
    tensors: tuple[str, ...]
    #: The code that the forward runs, and the attributes that it reads.
    reached: Reached


def trace(module: nn.Module) -> Trace:
    """Return the trace of ``module.forward``, called with one tensor.

    Raises:
        NotProvenError: The forward cannot be traced, or may do more than its trace shows.
    """
    if "forward" in vars(module):
        raise NotProvenError("its forward was replaced on the instance")
    if not reads_as_usual(module):
        raise NotProvenError("its class has its own way to read attributes")
    # Defaults are part of the trace: a call with more than one argument runs the forward.
    if _code_of(type(module).forward).co_argcount < 2:
        raise NotProvenError("its forward does not take one tensor")
    graphs = _graph(module, training=True), _graph(module, training=False)
    names = _Names(module, graphs).of_forward()
    return Trace(graphs, tuple(names.present), tuple(names.tensors), names.reached())


def reads_as_usual(module: nn.Module) -> bool:
    """Whether an attribute that names a child, parameter or buffer is that one."""
    kind: Any = type(module)
    return (
        kind.__getattribute__ is object.__getattribute__
        and kind.__getattr__ is nn.Module.__getattr__
    )


def trace_method(module: nn.Module, method: Any) -> tuple[fx.Graph, Reached]:
    """Return the graph of ``method(module, x)`` for a method of one tensor that calls no module.
    Also return the code that it runs, and the attributes of the module that it reads.

    Raises:
        NotProvenError: It may do more than its graph shows.
    """
    graph = graph_of(lambda x: method(module, x))
    return graph, _Names(module, (graph,)).of_method(method).reached()


def _code_of(function: Any) -> types.CodeType:
    if not isinstance(function, types.FunctionType):
        raise NotProvenError("its forward is not a plain function")
    if set(function.__code__.co_freevars) - {"__class__"}:
        raise NotProvenError("its forward is decorated or closes over variables")
    return function.__code__


class _Child(nn.Module):
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
    return _traced(lambda tracer, symbol: function(symbol))


def _traced(function: Callable[[Any, Any], Any]) -> fx.Graph:
    """Return the graph of ``function(tracer, symbol)``.

    Torch's way to trace replaces ``nn.Module.__call__`` meanwhile, also for other threads. Models
    may run there.
    """
    tracer: Any = fx.Tracer()
    graph = fx.Graph(tracer_cls=fx.Tracer)
    tracer.root, tracer.tensor_attrs, tracer.graph = nn.Module(), {}, graph
    result = function(tracer, tracer.create_proxy("placeholder", "input", (), {}))
    tracer.create_node("output", "output", (tracer.create_arg(result),), {})
    for node in reversed(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return graph


def _graph(module: nn.Module, training: bool) -> fx.Graph:
    kind: Any = type(module)
    before: dict[str, Any] = {}

    def forward(tracer: Any, symbol: Any) -> Any:
        def attribute(name: str) -> Any:
            return tracer.create_proxy("get_attr", name, (), {})

        stand_in.__dict__ = {
            name: copy.copy(value) if isinstance(value, _CONTAINERS) else value
            for name, value in module.__dict__.items()
        }
        stand_in.__dict__["training"] = training
        for name, value in module.__dict__.items():
            if isinstance(value, torch.Tensor):  # the forward may write to it
                stand_in.__dict__[name] = attribute(name)
        for table in ("_parameters", "_buffers"):
            stand_in.__dict__[table] = {
                name: None if value is None else attribute(name)
                for name, value in module.__dict__[table].items()
            }
        stand_in.__dict__["_modules"] = {
            name: None if child is None else _Child(name, tracer)
            for name, child in module._modules.items()
        }
        before.update(stand_in.__dict__)
        return kind.forward(stand_in, symbol)

    try:
        # A stand-in receives the attributes that forward may assign to self, or add to.
        stand_in: Any = kind.__new__(kind)
        with putting_back():
            graph = _traced(forward)
        after = stand_in.__dict__
    except NotProvenError:
        raise
    except fx.proxy.TraceError:
        raise NotProvenError(
            "its forward depends on the values or the shape of its input"
        ) from None
    except BaseException as error:  # third-party code, run on symbols, which may call sys.exit
        reraise(error)
        raise NotProvenError(_shortly(error)) from None
    if any(before.get(name, stand_in) is not value for name, value in after.items()):
        raise NotProvenError("its forward assigns attributes")
    return graph


def _shortly(error: BaseException) -> str:
    text = error_message(error).strip().partition("\n")[0]
    if "required positional argument" in text:
        return "its forward takes more than one argument"
    text = f"{type(error).__name__}: {text}"
    return f"its forward cannot be traced ({text if len(text) <= 80 else text[:77] + '...'})"


class _Names:
    """Resolves every name in a forward's code."""

    def __init__(self, module: nn.Module, graphs: tuple[fx.Graph, ...]) -> None:
        self._module = module
        self._seen: set[types.CodeType] = set()
        self._functions: dict[Any, None] = {}
        self._methods: dict[str, Any] = {}
        self._globals: dict[tuple[str, str], Any] = {}
        #: The module's class, and those whose forward is reached through super(), with the forward.
        self._forwards: list[tuple[Any, str, Any]] = []
        self._reads: dict[str, Any] = {}
        self.present: dict[str, None] = {}
        self.tensors: dict[str, None] = {}
        self._targets: set[Any] = set()
        #: An attribute of a tensor that the code names: its symbol shows no use of it until then.
        self._attribute = ""
        self._compares = False
        #: Whether the graphs show what the forward does in each mode.
        self._both_modes = len(graphs) > 1
        for node in (node for graph in graphs for node in graph.nodes):
            self._targets.add(node.target)
            if node.target is getattr:
                self._targets.add(node.args[1])
            self._targets.add(getattr(node.target, "__name__", ""))  # of a function

    def of_forward(self) -> _Names:
        """Resolve the names of the module's forward, and return this object."""
        own: Any = type(self._module)
        self._forwards.append((own, "forward", own.forward))
        kinds = [kind for kind in own.__mro__ if "forward" in vars(kind)]
        # The last is nn.Module's own; those between are reached through super().
        first: Any = vars(kinds[0])["forward"]
        self._scan(first)
        if "super" in first.__code__.co_names:
            for kind in kinds[1:-1]:
                self._forwards.append((kind, "forward", vars(kind)["forward"]))
                self._scan(vars(kind)["forward"])
        return self._checked()

    def of_method(self, method: Any) -> _Names:
        """Resolve the names of one of the module's methods, and return this object."""
        self._scan(method)
        return self._checked()

    def _checked(self) -> _Names:
        if self._compares and self._attribute:
            raise NotProvenError(f"its forward may depend on its input's {self._attribute}")
        return self

    def reached(self) -> Reached:
        kind: Any = type(self._module)
        methods = ((kind, name, method) for name, method in self._methods.items())
        names = ((sys.modules[of], name, value) for (of, name), value in self._globals.items())
        functions = map(body, self._functions)
        reads = tuple(self._reads.items())
        return Reached(tuple(functions), tuple(methods), (*names, *self._forwards), reads)

    def _scan(self, function: Any) -> None:
        if not is_torchs(function):
            self._functions[function] = None
        for code in nested(_code_of(function)):
            if code in self._seen:
                continue
            self._seen.add(code)
            steps = {step.opname for step in dis.get_instructions(code)}
            if steps & _HANDLERS:
                raise NotProvenError("its forward handles exceptions or enters contexts")
            # Comparisons by identity or by hash do not call the symbol's methods.
            self._compares |= any(
                step in ("IS_OP", "CONTAINS_OP") or step.endswith(("_NONE", "_NOT_NONE"))
                for step in steps
            )
            for name in code.co_names:
                self._resolve(name, function)

    def _resolve(self, name: str, function: Any) -> None:
        module, kind, scope = self._module, type(self._module), function.__globals__
        if name in ("super", "forward") or name in self.present:
            return
        if name == "training" and self._both_modes:
            return
        if module._modules.get(name) is not None:
            if hasattr(kind, name):
                raise NotProvenError(f"its class has an attribute {name}, which hides the child")
            if name not in self._targets:
                raise NotProvenError(f"its forward uses {name} without calling it")
            self.present[name] = None
        elif module._parameters.get(name) is not None or module._buffers.get(name) is not None:
            self.tensors[name] = None
        elif hasattr(kind, name) and isinstance(getattr(kind, name), types.FunctionType):
            if getattr(nn.Module, name, None) is getattr(kind, name):
                if hasattr(torch.Tensor, name):  # to, float and others, which tensors have too
                    return
                raise NotProvenError(f"its forward calls nn.Module.{name}")
            if name in vars(module):
                raise NotProvenError(f"its method {name} was replaced on the instance")
            self._methods[name] = getattr(kind, name)
            if "super" in self._methods[name].__code__.co_names:
                raise NotProvenError(f"its method {name} calls a base class's")
            self._scan(self._methods[name])
        elif hasattr(module, name):
            self._reads[name] = self._constant(name, getattr(module, name))
        elif name not in self._targets and not _is_pure(name, scope, self._targets):
            raise NotProvenError(f"its forward uses {name}, which its trace does not show")
        else:
            if name in scope:
                self._global(name, function)
            if hasattr(torch.Tensor, name) and not callable(getattr(torch.Tensor, name)):
                self._attribute = name

    def _global(self, name: str, function: Any) -> None:
        value = function.__globals__[name]
        if is_torchs(function) or isinstance(value, types.ModuleType):
            return
        if vars(sys.modules.get(function.__module__, type)) is not function.__globals__:
            raise NotProvenError(f"its forward uses {name} of a module that cannot be found")
        self._globals[function.__module__, name] = value

    def _constant(self, name: str, value: Any) -> Any:
        parts: tuple[Any, ...] = (value,)
        if isinstance(value, functools.partial):
            parts = value.func, *value.args, *value.keywords.values()
        for part in parts:
            called = isinstance(part, _FUNCTIONS) and part in self._targets
            if not called and not isinstance(part, CONSTANTS):
                raise NotProvenError(f"its forward reads {name}, which may change unnoticed")
        return value


def _is_pure(name: str, scope: dict[str, Any], targets: set[Any]) -> bool:
    """Whether the trace shows every use of ``name``.

    It shows every use of constants, torch and its modules, ``math`` and its functions, global
    functions that the graph calls, and attributes of tensors.
    """
    if name in scope:
        value = scope[name]
        pure = any(value is module for module in (*_TORCH, math))
        called = isinstance(value, _FUNCTIONS) and value in targets
        return pure or called or isinstance(value, CONSTANTS)
    if hasattr(math, name) or hasattr(torch.Tensor, name):
        return True
    found = [getattr(owner, name) for owner in _TORCH if hasattr(owner, name)]
    return bool(found) and all(
        isinstance(value, CONSTANTS) or any(value is owner for owner in _TORCH) for value in found
    )


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code, and the code of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)
