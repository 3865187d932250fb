"""Tells libraries' code, which has a name, from a user's, which may change under its name."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

#: Packages whose functions and classes are identified by name: their versions belong to the
#: environment of a record, or to Python's.
LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "triton", "numpy", "builtins"}
#: ``Py_TPFLAGS_HEAPTYPE``: made by a ``class`` statement, or like one.
HEAP_TYPE = 1 << 9
#: The classes of torch's operators.
_OPERATORS = (type(torch.ops.aten.mm), type(torch.ops.aten.mm.default))
#: Values that are code rather than data.
CODE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


def hides(kind: type) -> bool:
    """Whether instances have memory that is neither a slot nor the pointers to their attributes and
    weak references, as those of classes written in C."""
    slots = sum(isinstance(each, types.MemberDescriptorType) for each in vars(kind).values())
    base = kind.__base__ or object
    return kind.__basicsize__ - base.__basicsize__ > 8 * (slots + 2) or (
        kind.__flags__ & HEAP_TYPE == 0
    )


def is_followed(value: Any, libraries: frozenset[str] = LIBRARIES) -> bool:
    """Whether a module's attributes belong to the identity of the functions that read them."""
    return isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in libraries


def is_jitted(value: Any) -> bool:
    kind = type(value)
    return kind.__module__.partition(".")[0] == "triton" and isinstance(
        getattr(value, "fn", None), types.FunctionType
    ) and kind.__name__ in ("JITFunction", "InterpretedFunction", "GluonJITFunction")  # fmt: skip


def library_name(value: Any, libraries: frozenset[str] = LIBRARIES) -> str | None:
    """The name under which a library has exactly this object; None if none has."""
    if isinstance(value, _OPERATORS):
        operator = str(value)
        return operator if operator.partition(".")[0] in ("aten", "prims") else None
    if not isinstance(value, CODE) and not callable(value):
        return None
    module: Any = getattr(value, "__module__", None)
    name: Any = getattr(value, "__qualname__", None)
    if type(value).__name__ == "ufunc":
        module, name = "numpy", getattr(value, "__name__", None)
    if module is None and isinstance(value, types.BuiltinFunctionType):
        owner = value.__self__  # torch.relu's is a class of torch._C
        if isinstance(owner, type):
            module, name = owner.__module__, f"{owner.__qualname__}.{value.__name__}"
    if type(module) is not str or type(name) is not str:
        return None
    if module.partition(".")[0] not in libraries or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    same = found is value or (isinstance(value, types.BuiltinFunctionType) and found == value)
    return f"{module}.{name}" if same else None
