"""Tools for authors of Triton kernels: launches, epilogues, numerics under the interpreter.

This package imports Triton, so no other module of ``tmm_core`` imports it at the top.
"""

from __future__ import annotations

from tmm_core.compat import current_stream
from tmm_core.errors import reraise
from tmm_core.spec import toolchain
from tmm_core.spec.device import interpreting
from tmm_core.spec.kernel import SEARCH_LIMITED
from tmm_core.triton import releases
from tmm_core.triton.compile import compile_for, pointer, source, supports, target_of
from tmm_core.triton.dequantize import Dequantize, dequantizer
from tmm_core.triton.device_functions import device_function, port_function, step_function
from tmm_core.triton.launch import Launch
from tmm_core.triton.launcher_codegen import Argument, Described, Step, launcher
from tmm_core.triton.scales import factors

__all__ = [
    "SEARCH_LIMITED",
    "Argument",
    "Dequantize",
    "Described",
    "Launch",
    "Step",
    "compile_for",
    "current_stream",
    "dequantizer",
    "device_function",
    "factors",
    "interpreting",
    "launcher",
    "pointer",
    "port_function",
    "releases",
    "reraise",
    "source",
    "step_function",
    "supports",
    "target_of",
    "toolchain",
]
