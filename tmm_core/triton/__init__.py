"""For authors of Triton kernels: launching, epilogues, numerics under the interpreter.

Imports Triton, so nothing else in ``tmm_core`` imports this at the top of a module.
"""

from __future__ import annotations

from tmm_core.spec.device import interpreting
from tmm_core.triton import epilogues
from tmm_core.triton.epilogues import device_function, port_function
from tmm_core.triton.launch import (
    Argument,
    Described,
    Launch,
    Step,
    compile_for,
    launcher,
    pointer,
    source,
    supports,
    target_of,
)

__all__ = [
    "Argument",
    "Described",
    "Launch",
    "Step",
    "compile_for",
    "device_function",
    "epilogues",
    "interpreting",
    "launcher",
    "pointer",
    "port_function",
    "source",
    "supports",
    "target_of",
]
