"""Reads functions' code and closure variables, and copies functions with these as they are."""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Iterator
from typing import Any


def cells_of(*values: Any) -> list[tuple[types.CellType, Any]]:
    """The closure variables that functions among ``values`` read, with their present values.
    Variables that a function writes itself are left out."""
    found: dict[int, tuple[types.CellType, Any]] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, functools.partial):
            waiting += (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, types.MethodType):
            waiting.append(value.__func__)
        elif isinstance(value, types.FunctionType):
            for cell in read_only(value):
                if id(cell) in found:
                    continue
                with contextlib.suppress(ValueError):  # not filled yet
                    found[id(cell)] = cell, cell.cell_contents
                    waiting.append(cell.cell_contents)
    return list(found.values())


def frozen(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """A function that keeps the present values of the closure variables in :func:`cells_of`; other
    objects as they are."""
    copies = {} if copies is None else copies
    if type(value) is functools.partial:
        func, *args = (frozen(each, copies) for each in (value.func, *value.args))
        keywords = {name: frozen(each, copies) for name, each in value.keywords.items()}
        return functools.partial(func, *args, **keywords)
    if isinstance(value, types.MethodType):
        return types.MethodType(frozen(value.__func__, copies), value.__self__)
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    if id(value) in copies:
        return copies[id(value)]
    own = [*map(id, read_only(value))]
    cells = tuple(types.CellType() if id(cell) in own else cell for cell in value.__closure__)
    copy = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    copy.__kwdefaults__, copy.__qualname__ = value.__kwdefaults__, value.__qualname__
    copy.__dict__.update(value.__dict__)
    copies[id(value)] = copy
    for cell, before in zip(cells, value.__closure__, strict=True):
        if cell is not before:
            with contextlib.suppress(ValueError):  # not filled yet
                cell.cell_contents = frozen(before.cell_contents, copies)
    return copy


def read_only(function: types.FunctionType) -> Iterator[types.CellType]:
    """The cells of a function that it does not write itself."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    written = {
        step.argval
        for each in codes(code)
        if "STORE_DEREF" in operations(each)
        for step in dis.get_instructions(each)
        if step.opname in ("STORE_DEREF", "DELETE_DEREF")
    }
    return (cell for name, cell in cells if name not in written)


def contents(cell: types.CellType) -> Any:
    """The value of a closure variable; None if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """This code and the code of the functions made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def names(code: types.CodeType) -> Iterator[str]:
    """The globals and attributes that code reads."""
    for each in codes(code):
        yield from each.co_names


def constants(code: types.CodeType) -> Iterator[Any]:
    """The constants in code."""
    for each in codes(code):
        yield from each.co_consts


def operations(code: types.CodeType) -> set[str]:
    """The names of the operations in code."""
    return {dis.opname[operation] for operation in code.co_code[::2]}
