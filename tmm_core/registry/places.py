"""Finds where a kernel's code is, for messages about its faults."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
import sys
from types import CodeType
from typing import Any

from tmm_base.guards import chain, function_of, suppress, traceback_of, unwrapped

from tmm_core.spec.kernel import Kernel


def place_of(kernel: Kernel[Any], error: BaseException | None, method: str = "bind") -> str:
    """Return the file and line in the kernel's packages that raised ``error``, else the beginning
    of this method or attribute; empty if neither is known."""
    kind: type = type(getattr(kernel, "kernel", kernel))  # of a registered kernel
    code, own = _code(kind, method), []
    for module in {sys.modules.get(base.__module__) for base in kind.__mro__ if base not in _BASES}:
        if file := getattr(module, "__file__", None):
            # A module in no package shares its folder with other projects.
            packaged = getattr(module, "__package__", "")
            own.append(os.path.dirname(file) + os.sep if packaged else file)
    found = _class_place(kind) if code is None else f"{code.co_filename}:{code.co_firstlineno}"
    files = (*own, code.co_filename) if code is not None else tuple(own)
    for each in () if error is None else chain(error):
        for entry in traceback_of(each):
            if (file := entry.tb_frame.f_code.co_filename).startswith(files):
                found = f"{file}:{entry.tb_lineno}"
    return found


#: Classes of a kernel that are not its own.
_BASES = (Kernel, *Kernel.__mro__)


def _code(kind: type, method: str) -> CodeType | None:
    """The code of a method or property; an attribute has none."""
    member = function_of(inspect.getattr_static(kind, method, None))
    return getattr(unwrapped(member), "__code__", None)


def _class_place(kind: type) -> str:
    with suppress(OSError, TypeError, KeyError):
        file = inspect.getfile(kind)
        return f"{file}:{_classes(file)[kind.__name__]}"
    return ""


@functools.lru_cache(maxsize=16)
def _classes(file: str) -> dict[str, int]:
    """The lines at which a file's classes begin, by name. ``inspect`` parses the whole file for
    each class, 0.1 s for 9,000 lines."""
    lines = [*enumerate(linecache.getlines(file), 1)]
    found = [(re.match(r"\s*class\s+(\w+)", line), number) for number, line in reversed(lines)]
    return {match[1]: number for match, number in found if match}
