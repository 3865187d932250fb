"""A digest of the code that a kernel's machine code depends on, and of no other.

What ``bind`` and ``compile`` refer to is followed by name: functions, classes, constants and
methods of the kernel and of its config, in the kernel's own package and in ``tmm_core.triton``.
Docstrings and lines of comment are left out, as are the search space, what is declared and the
cost model, unless something that is launched refers to them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
import sys
import types
from collections.abc import Iterator
from typing import Any

#: What says which problems and configs are tried: no part of what is launched.
_NO_CODE = frozenset(("name", "version", "supports", "traits", "config_type", "declines", "configs",
                      "default_config", "reasons_against", "arithmetic"))  # fmt: skip
_ROOTS = ("bind", "compile")
_SHARED = "tmm_core.triton"
#: Finds what Triton compiled before; it makes no code.
_FINDS = "tmm_core.triton.kept"


def digest(kernel: type, config: type) -> str:
    """Twelve hexadecimal digits that change with the code that ``kernel`` launches.

    The same under every release of Python. Of code without a source (a prompt's, a compiled one)
    the bytecode is taken.

    Args:
        kernel: The class of a kernel.
        config: The class of its configs.
    """
    code = reached(kernel, config)
    lines = "\n".join(f"{label}\n{code[label]}" for label in sorted(code))
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def reached(kernel: type, config: type) -> dict[str, str]:
    """What :func:`digest` is of: the code of functions and classes by ``module.qualname``, and
    constants by ``module:name``."""
    found: dict[str, str] = {}
    waiting = [code for root in _ROOTS if (code := _plain(_attribute(kernel, root))) is not None]
    own = kernel.__module__.partition(".")[0]
    while waiting:
        each = waiting.pop()
        label = f"{each.__module__}.{each.__qualname__}"
        if label in found:
            continue
        found[label] = _text(each)
        functions = (each,) if isinstance(each, types.FunctionType) else tuple(_methods(each))
        for function in functions:
            for name, value in _referred(function, (kernel, config)):
                code = _plain(value)
                if code is not None:
                    if _is_ours(code.__module__, own):
                        waiting.append(code)
                elif "." not in name and (text := _constant(value)) is not None:
                    found[f"{function.__module__}:{name}"] = text
    return found


def _constant(value: Any) -> str | None:
    """The same text in every process; None of what is no constant."""
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(repr, value)))
    if not isinstance(value, (int, float, str, bool, tuple, list, dict, type(None))):
        return None
    text = repr(value)
    return None if " at 0x" in text else text


def _is_ours(module: str, own: str) -> bool:
    if module.partition(".")[0] == "tmm_core" and own != "tmm_core":
        return f"{module}.".startswith(f"{_SHARED}.") and module != _FINDS
    return module.partition(".")[0] == own


def _plain(thing: Any) -> Any:
    """The function or class under decorators (``triton.jit``, ``functools.cache``, ``property``);
    None of what is neither."""
    for _ in range(8):
        if isinstance(thing, (types.FunctionType, type)):
            return thing
        under = [
            getattr(thing, name, None)
            for name in ("__wrapped__", "fn", "func", "fget", "__func__")
            if not isinstance(thing, types.ModuleType)
        ]
        thing = next((each for each in under if callable(each)), None)
        if thing is None:
            return None
    return None


def _attribute(of: type, name: str) -> Any:
    return next((vars(base)[name] for base in of.__mro__ if name in vars(base)), None)


def _methods(of: type) -> Iterator[types.FunctionType]:
    file = _file(of)
    for each in vars(of).values():
        found = _plain(each)
        # What ``dataclass`` writes is in no file, or in another.
        if isinstance(found, types.FunctionType) and found.__code__.co_filename == file:
            yield found


def _file(of: type) -> str | None:
    return getattr(sys.modules.get(of.__module__), "__file__", None)


def _referred(function: types.FunctionType, classes: tuple[type, ...]) -> Iterator[tuple[str, Any]]:
    """What the names in ``function`` stand for: globals and what is closed over, attributes of
    modules among these, and of the kernel and its config by ``self.name`` and ``config.name``.
    Names that Python or ``dataclass`` defines are none of these."""
    names = sorted(n for n in set(_names(function.__code__)) if not n.startswith("__"))
    scope = {**function.__globals__, **_closed_over(function)}
    modules = [scope[name] for name in names if isinstance(scope.get(name), types.ModuleType)]
    for name in names:
        if name in scope:
            yield name, scope[name]
        for module in modules:
            if name in vars(module):
                yield f"{module.__name__}.{name}", vars(module)[name]
        for each in classes:
            if name not in _NO_CODE and (found := _attribute(each, name)) is not None:
                yield f"{each.__qualname__}.{name}", found


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _closed_over(function: types.FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not filled yet
            continue
    return found


def _text(of: Any) -> str:
    """The source without comments, docstrings, indentation and empty lines."""
    code = of.__code__ if isinstance(of, types.FunctionType) else None
    try:
        file = code.co_filename if code is not None else _file(of) or ""
        lines, places = _read(file)
        first, last = places[code.co_firstlineno if code is not None else of.__qualname__]
        return "\n".join(line for line in lines[first - 1 : last] if line)
    except (KeyError, SyntaxError):
        if code is None:
            return str(of.__qualname__)
        return _bytecode(code)


def _bytecode(code: types.CodeType) -> str:
    constants = (
        _bytecode(each) if isinstance(each, types.CodeType) else repr(each)
        for each in code.co_consts
    )
    return " ".join((code.co_code.hex(), *code.co_names, *constants))


@functools.cache
def _read(file: str) -> tuple[list[str], dict[int | str, tuple[int, int]]]:
    """The file's lines without docstrings, lines of comment and the space around the others; and
    where in it each function is, by its first line, and each class, by its name.

    Raises:
        SyntaxError: It is no Python.
    """
    source = linecache.getlines(file)
    lines = [line.strip() for line in source]
    places: dict[int | str, tuple[int, int]] = {}

    def visit(statements: list[ast.stmt], prefix: str) -> None:
        for each in statements:
            inside = prefix
            if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min([each.lineno, *(d.lineno for d in each.decorator_list)])
                place = first, each.end_lineno or first
                if isinstance(each, ast.ClassDef):
                    places[prefix + each.name] = place
                    inside = f"{prefix}{each.name}."
                else:
                    places[first] = place
                    inside = f"{prefix}{each.name}.<locals>."
                said = each.body[0]
                if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant):
                    last = said.end_lineno or said.lineno
                    lines[said.lineno - 1 : last] = [""] * (last - said.lineno + 1)
            for block in ("body", "orelse", "finalbody"):
                visit(getattr(each, block, []), inside)
            for handler in getattr(each, "handlers", ()):
                visit(handler.body, inside)

    visit(ast.parse("".join(source)).body, "")
    return ["" if line.startswith("#") else line for line in lines], places
