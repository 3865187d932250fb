"""Generates the functions of warm calls as source, with every constant inlined."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Iterable
from typing import Any


def address(tensor: str) -> str:
    """Return the statement that reads a tensor's address, given the tensor's name."""
    return f"{tensor}_ptr = {tensor}.data_ptr()"


def written(name: str, parameters: str, lines: Iterable[str], namespace: dict[str, Any]) -> Any:
    """Compile a function from source. Tracebacks and ``inspect`` show the source until the function
    is deleted."""
    body = "\n    ".join(lines)
    source = f"def {name}({parameters}):\n    {body}\n"
    filename = f"<tmm {name} {next(_numbers)}>"
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    function = namespace[name]
    weakref.finalize(function, linecache.cache.pop, filename, None).atexit = False
    return function


#: Numbers in the file names of generated functions.
_numbers = itertools.count(1)
