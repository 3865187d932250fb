"""Tools for authors of kernels: a conformance suite and debugging helpers.

Everything is imported lazily: the suite needs pytest, and the device functions need Triton.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tmm_core.testing.conformance import KernelConformance
    from tmm_core.testing.debug import breakpoint_if, print_if
    from tmm_core.testing.epilogue_conformance import EpilogueConformance
    from tmm_core.testing.format_conformance import FormatConformance

__all__ = [
    "EpilogueConformance",
    "FormatConformance",
    "KernelConformance",
    "breakpoint_if",
    "print_if",
]

_HOME = {
    "EpilogueConformance": "epilogue_conformance",
    "FormatConformance": "format_conformance",
    "KernelConformance": "conformance",
    "breakpoint_if": "debug",
    "print_if": "debug",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
