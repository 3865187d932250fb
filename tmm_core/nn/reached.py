"""Detects that the code of a forward, or what it reads, was replaced after a proof about it.

A class may get another method, a Python module another function or constant, a function new code in
an interactive session, and a module other attributes. Torch's own code is not watched.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tmm_core.nn.classes import defined_by

#: The functions that torch calls around a forward. None: other code had replaced it before.
_TORCHS = tuple(
    function if defined_by(function, nn.Module) else None
    for function in (nn.Module.__call__, nn.Module._call_impl, nn.Module._slow_forward)
)


class Absent:
    """Stands for the value of an attribute that a module lacks."""


@dataclass(frozen=True)
class Reached:
    """The code that a forward reached when it was traced, and the values that it read.

    Attributes:
        functions: Each function with its code and its defaults.
        methods: The methods that the module calls as its own, with the class and the name.
        names: Other names of classes and of Python's modules, with their values.
        reads: Attributes of the module, with their values.
    """

    functions: tuple[tuple[Any, ...], ...] = ()
    methods: tuple[tuple[type, str, Any], ...] = ()
    names: tuple[tuple[Any, str, Any], ...] = ()
    reads: tuple[tuple[str, Any], ...] = ()

    def holds(self, module: nn.Module) -> bool:
        """Whether ``module`` would run the same code now, and read the same values."""
        # Torch's compiler cannot read code, and guards the code that it traces.
        if self.functions and not torch.compiler.is_compiling():
            for function, code, defaults, by_name in self.functions:
                if function.__code__ is not code or function.__defaults__ is not defaults:
                    return False
                if function.__kwdefaults__ != by_name:
                    return False
        for kind, name, method in self.methods:
            if getattr(kind, name, None) is not method or name in module.__dict__:
                return False
        for owner, name, value in self.names:
            found = getattr(owner, name, None)
            if found is not value and not _equal(found, value):
                return False
        for name, value in self.reads:
            found = getattr(module, name, Absent)
            if found is not value and not _equal(found, value):
                return False
        return True

    def __hash__(self) -> int:  # the values of names may have none
        return hash(tuple(function for function, *_ in self.functions))

    def __reduce__(self) -> Any:
        # Neither code nor Python's modules can be pickled: the code of the reading process counts.
        functions = tuple(function for function, *_ in self.functions)
        named = [(_named(owner), name, value) for owner, name, value in self.names]
        return _read, (functions, self.methods, named, self.reads)


def _equal(found: Any, value: Any) -> bool:
    if isinstance(value, functools.partial):
        return isinstance(found, functools.partial) and _parts(found) == _parts(value)
    return type(found) is type(value) and bool(found == value)


def _parts(function: functools.partial[Any]) -> tuple[Any, ...]:
    return function.func, function.args, function.keywords


def _named(owner: Any) -> Any:
    return owner.__name__ if isinstance(owner, types.ModuleType) else owner


def _read(functions: Any, methods: Any, named: Any, reads: Any) -> Reached:
    names = (
        (sys.modules.get(owner) if isinstance(owner, str) else owner, name, value)
        for owner, name, value in named
    )
    return Reached(tuple(map(body, functions)), methods, tuple(names), reads)


def body(function: Any) -> tuple[Any, ...]:
    """Return a function with its present code and defaults."""
    return function, function.__code__, function.__defaults__, copy.copy(function.__kwdefaults__)


def is_torchs(thing: Any) -> bool:
    """Whether a function or a class is torch's own."""
    return str(thing.__module__).partition(".")[0] == "torch"


def is_called_as_usual(kind: Any) -> bool:
    """Whether torch calls the forward of a class, and no other code around it. False also if other
    code has replaced what torch calls around all forwards."""
    calls, inside, traced = _TORCHS
    if kind.__call__ is calls and kind._call_impl is inside and kind._slow_forward is traced:
        return True
    # Torch's tracers replace them. A wrapper may have the name of torch's module, but not its code.
    given = kind.__call__, kind._call_impl, kind._slow_forward
    packages = {getattr(each, "__globals__", {}).get("__name__", "") for each in given}
    return all(name.partition(".")[0] == "torch" for name in packages)
