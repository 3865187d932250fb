"""Functions written out as source, with every constant in its place: what a warm call runs."""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Body:
    """What a launcher does, for a plan to write out under its own checks.

    Attributes:
        on_device: The statement that does what it is given, on the launch's device, where
            another is current.
        lines: Statements that end with the return of the output. They speak of a launcher's
            arguments, by name, and of ``<name>_ptr``, for which there is :func:`address`.
        namespace: What else they speak of.
    """

    on_device: Callable[[str], str]
    lines: tuple[str, ...]
    namespace: Mapping[str, Any]


def address(tensor: str) -> str:
    """The statement that reads the address of the tensor of that name."""
    return f"{tensor}_ptr = {tensor}.data_ptr()"


def written(name: str, parameters: str, lines: Iterable[str], namespace: dict[str, Any]) -> Any:
    """The function with that source, which tracebacks and ``inspect`` show for as long as it
    lives."""
    body = "\n    ".join(lines)
    source = f"def {name}({parameters}):\n    {body}\n"
    filename = f"<tmm {name} {next(_numbers)}>"
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    function = namespace[name]
    weakref.finalize(function, linecache.cache.pop, filename, None).atexit = False
    return function


#: Of generated functions, for the names of their files.
_numbers = itertools.count(1)
