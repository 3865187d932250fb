"""Identifies the functions of users' epilogues.

Within a process, two functions count as one if they have the same code and read the same constants
and objects. Other processes identify a function only if it has no closure, its code is in a module
with files, and the global variables that it reads are constants. Its text on disk then holds a
digest of these files, and the constants.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from tmm_base.guards import suppress

from tmm_core.spec.code import LIBRARIES, is_typed, package_digest, top_level

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype)


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    """A global variable that a function reads. It has the attribute of a closure's cell."""

    namespace: dict[str, Any]
    name: str

    @property
    def cell_contents(self) -> Any:
        return _bare(self.namespace.get(self.name))


@dataclass(frozen=True, eq=False, slots=True)
class Code:
    """The code of a function, with the attribute of a closure's cell. IPython's autoreload replaces
    it in functions that exist."""

    function: FunctionType

    @property
    def cell_contents(self) -> CodeType:
        return self.function.__code__


def _bare(value: Any) -> Any:
    """The function that Triton compiles, or the value of its constant; else ``value`` itself."""
    if type(value).__module__.partition(".")[0] != "triton":
        return value
    return getattr(value, "fn", getattr(value, "value", value))


def _globals_of(function: FunctionType, seen: set[CodeType]) -> Iterator[Global]:
    """Yield the global variables that a function reads, or a function of its package that it calls
    by name. Functions, classes and modules are left out: digests of files stand for these."""
    package = top_level(function.__module__)
    if package in LIBRARIES or function.__code__ in seen:
        return
    seen.add(function.__code__)
    for name, attribute in _names(function.__code__):
        variable = Global(function.__globals__, name)
        module = variable.cell_contents
        if type(module) is ModuleType and top_level(module.__name__) not in LIBRARIES:
            variable = Global(vars(module), attribute)
        value = variable.cell_contents
        if type(value) is FunctionType:
            if top_level(value.__module__) == package:
                yield from _globals_of(value, seen)
        elif variable.name in variable.namespace and not (
            callable(value) or isinstance(value, ModuleType)
        ):
            yield variable


@functools.cache
def _names(code: CodeType) -> tuple[tuple[str, str], ...]:
    """Return the names of the global variables that a function of this code reads. Each comes with
    the text of the next instruction's argument: an attribute's name, if one is read."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    following = itertools.pairwise(dis.get_instructions(code))
    read = [(one.argval, str(two.argval)) for one, two in following if one.opname == "LOAD_GLOBAL"]
    return tuple(dict.fromkeys(itertools.chain(read, *inner)))


def identity(function: Any) -> Hashable:
    """Return a value that two functions share only if they compute the same. It holds ids of
    objects, so it is valid only while ``function``, or its :func:`frozen` copy, exists."""
    if is_frozen(function):
        reads = function.__defaults__, tuple((function.__kwdefaults__ or {}).items())
        cells = tuple(value for _, value in cells_of(function))
        return id(function.__code__), id(function.__globals__), _value((*reads, cells))
    if type(function) is MethodType:  # another object at each access
        return id(function.__func__), id(function.__self__)
    if type(function) is functools.partial:
        given = function.args, tuple(function.keywords.items())
        return "partial", id(function.func), _value(given)
    return _value(function)


def _value(value: Any) -> Hashable:
    """Return an identity: of constants by type and value, of other objects by id."""
    if type(value) in _CONSTANTS:
        return type(value), repr(value)
    return tuple(map(_value, value)) if type(value) is tuple else id(value)


def _is_constant(value: Any) -> bool:
    return all(map(_is_constant, value)) if type(value) is tuple else type(value) in _CONSTANTS


def is_frozen(function: Any) -> bool:
    """Whether :func:`frozen` copies a function. A function that writes its closure variables, or
    has attributes, is not copied."""
    if type(function) is not FunctionType or vars(function) or _writes(function.__code__):
        return False
    with suppress(ValueError):  # a variable that is not filled yet
        return all(cell.cell_contents is cell.cell_contents for cell in function.__closure__ or ())
    return False


@functools.cache
def _writes(code: CodeType) -> bool:
    inner = any(_writes(each) for each in code.co_consts if isinstance(each, CodeType))
    operations = {each.opname for each in dis.get_instructions(code)}
    return inner or bool({"STORE_DEREF", "DELETE_DEREF"} & operations)


def cells_of(function: Any) -> list[tuple[CellType | Global, Any]]:
    """Return the variables outside of a function that is copied, which it reads, with their present
    values."""
    if not is_frozen(function):
        return []
    variables = (*(function.__closure__ or ()), *_globals_of(function, set()))
    return [(variable, variable.cell_contents) for variable in variables]


def reads_objects(function: Any) -> bool:
    """Whether a function reads objects that may change, such as a module, a tensor or a list."""
    if type(function) is functools.partial:
        given = (*function.args, *function.keywords.values())
        return reads_objects(function.func) or not _is_constant(given)
    if isinstance(function, BuiltinFunctionType):
        return False
    return not is_frozen(function) or not all(_stays(value) for _, value in cells_of(function))


def _stays(value: Any) -> bool:
    """Whether the value of a variable is a constant, or code without state."""
    if type(value) is FunctionType:
        return not value.__closure__ and not vars(value)
    return isinstance(value, (ModuleType, type, BuiltinFunctionType)) or _is_constant(value)


def reader_of(cell: CellType | Global) -> Any:
    """Return a function that returns the variable in ``cell``. Torch.compile guards a graph by the
    variables of the functions that it traces, but not by variables that these functions read. It
    imports a function's module, so globals of what is no module are not read."""
    variable = None

    def read() -> Any:
        return variable

    def read_global() -> Any:
        return _CONSTANTS

    if not isinstance(cell, Global):
        return FunctionType(read.__code__, globals(), "read", None, (cell,))
    module = sys.modules.get(str(cell.namespace.get("__name__")))
    if module is None or vars(module) is not cell.namespace:
        return read
    return FunctionType(read_global.__code__.replace(co_names=(cell.name,)), cell.namespace, "read")


def frozen(function: Any) -> Any:
    """Return a copy of a function that keeps the present values of its closure variables."""
    if not is_frozen(function):
        return function
    cells = tuple(CellType(cell.cell_contents) for cell in function.__closure__ or ())
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
    )
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    return copy


def lasting_text(function: Any) -> str | None:
    """Return a text that identifies a function, plain or ``@triton.jit``, in every process; None if
    there is none."""
    if function is None:
        return ""
    if isinstance(function, BuiltinFunctionType):
        name = function.__name__
        return f"torch.{name}" if getattr(torch, name, None) is function else None
    function = _bare(function)
    if type(function) is not FunctionType or function.__closure__ or is_typed(function):
        return None
    module = sys.modules.get(function.__module__)
    if module is None or function.__globals__ is not vars(module):
        return None
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    defaults += tuple(variable.cell_contents for variable in _globals_of(function, set()))
    # A library's version belongs to the environment.
    library = top_level(function.__module__) in LIBRARIES
    files = "" if library else package_digest(function.__module__)
    if files is None or not _is_constant(defaults):
        return None
    code = _code_text(function.__code__)
    return f"{function.__module__}.{function.__qualname__} {files} {defaults!r} {code}"


def _code_text(code: CodeType) -> str:
    """Return a text of the code, which distinguishes functions of one name in one file. It is the
    same under every hash seed."""
    constants = (
        _code_text(each) if isinstance(each, CodeType)
        else repr(sorted(map(repr, each)) if isinstance(each, frozenset) else each)
        for each in code.co_consts
    )  # fmt: skip
    return " ".join((code.co_code.hex(), *code.co_names, *constants))
