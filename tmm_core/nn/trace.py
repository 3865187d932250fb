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
import itertools
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from tmm_core.errors import error_message, reraise
from tmm_core.nn.reached import Reached, body, is_torchs
from tmm_core.nn.symbols import Child, NotProvenError, graph_of, traced
from tmm_core.registry.watched_call import putting_back

#: Values that cannot change in place; a comparison shows whether the attribute was assigned anew.
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.memory_format)
#: Containers that a forward may add to, such as a list of losses.
_CONTAINERS = (list, dict, set, collections.deque)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
#: Steps of Python's bytecode that handle exceptions, of the tracer too, or enter contexts.
_HANDLERS = {"SETUP_FINALLY", "SETUP_WITH", "PUSH_EXC_INFO", "BEFORE_WITH", "LOAD_SPECIAL"}
_ASSIGNMENTS = {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL"}
#: Python's functions that compute the same of a symbol as of a tensor, or refuse it.
_BUILTINS = {"abs", "all", "any", "bool", "float", "int", "max", "min", "pow", "round", "sum"}
#: Where torch's functions are; ``nn.functional`` and ``torch.functional`` have one name.
_TORCH = (torch, torch.nn, torch.nn.functional, torch.functional, torch.special)


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
            name: None if child is None else Child(name, tracer)
            for name, child in module._modules.items()
        }
        before.update(stand_in.__dict__)
        return kind.forward(stand_in, symbol)

    try:
        # A stand-in receives the attributes that forward may assign to self, or add to.
        stand_in: Any = kind.__new__(kind)
        with putting_back():
            graph = traced(forward)
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
        self._identifies = False
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
        if self._identifies:
            raise NotProvenError("its forward asks whether two values are one object")
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
            given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            for value in given:
                self._constant("a default value", value)
        for code in nested(_code_of(function)):
            if code in self._seen:
                continue
            self._seen.add(code)
            instructions = list(dis.get_instructions(code))
            steps = {step.opname for step in instructions}
            if steps & _HANDLERS:
                raise NotProvenError("its forward handles exceptions or enters contexts")
            if steps & _ASSIGNMENTS:
                raise NotProvenError("its forward assigns attributes or globals")
            # Comparisons by identity or by hash do not call the symbol's methods.
            self._compares |= any(
                step in ("IS_OP", "CONTAINS_OP") or step.endswith(("_NONE", "_NOT_NONE"))
                for step in steps
            )
            for before, step in itertools.pairwise(instructions):
                # A symbol is not None, as a tensor is; but x.to(...) may be x.
                self._identifies |= step.opname == "IS_OP" and before.opname != "LOAD_CONST"
            for step in instructions:
                if step.opcode in dis.hasname:
                    is_attribute = step.opname.endswith(("_ATTR", "_METHOD"))
                    (self._attribute_named if is_attribute else self._global)(step.argval, function)

    def _global(self, name: str, function: Any) -> None:
        """Resolve the name of a global variable, or of a function of Python."""
        scope, of_torch = function.__globals__, False
        shown = name == "super" or name in _BUILTINS
        if name in scope:
            value = scope[name]
            called = isinstance(value, _FUNCTIONS) and value in self._targets
            of_torch = any(value is module for module in (*_TORCH, math))
            shown = called or of_torch or isinstance(value, CONSTANTS)
        if not shown:
            raise NotProvenError(f"its forward uses {name}, which its trace does not show")
        if name not in scope or of_torch or is_torchs(function):
            return
        if vars(sys.modules.get(function.__module__, type)) is not scope:
            raise NotProvenError(f"its forward uses {name} of a module that cannot be found")
        self._globals[function.__module__, name] = scope[name]

    def _attribute_named(self, name: str, function: Any) -> None:
        """Resolve the name of an attribute, of the module or of another value."""
        module, kind = self._module, type(self._module)
        if name == "forward" or name in self.present:
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
        elif isinstance(method := _function(getattr(kind, name, None)), types.FunctionType):
            if getattr(nn.Module, name, None) is getattr(kind, name):
                if hasattr(torch.Tensor, name):  # to, float and others, which tensors have too
                    return
                raise NotProvenError(f"its forward calls nn.Module.{name}")
            if name in vars(module):
                raise NotProvenError(f"its method {name} was replaced on the instance")
            self._methods[name] = getattr(kind, name)
            if "super" in method.__code__.co_names:
                raise NotProvenError(f"its method {name} calls a base class's")
            self._scan(method)
        elif hasattr(module, name):
            self._reads[name] = self._constant(name, getattr(module, name))
        elif name not in self._targets and not _is_usual(name):
            raise NotProvenError(f"its forward uses {name}, which its trace does not show")
        elif hasattr(torch.Tensor, name) and not callable(getattr(torch.Tensor, name)):
            self._attribute = name

    def _constant(self, name: str, value: Any) -> Any:
        parts: tuple[Any, ...] = (value,)
        if isinstance(value, functools.partial):
            parts = value.func, *value.args, *value.keywords.values()
            value = functools.partial(value.func, *value.args, **value.keywords)
        for part in parts:
            called = isinstance(part, _FUNCTIONS) and part in self._targets
            if not called and not isinstance(part, CONSTANTS):
                raise NotProvenError(f"its forward reads {name}, which may change unnoticed")
        return value


def _function(member: Any) -> Any:
    """Return the function that reading a property calls; ``member`` itself if it is none."""
    return member.fget if isinstance(member, property) else member


def _is_usual(name: str) -> bool:
    """Whether a name can only be an attribute of a tensor, a function of ``math``, a module of
    torch or a constant of torch. A symbol has special attributes of its own, such as a class."""
    if name.startswith("__"):
        return False
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
