"""A matmul call that dispatches over a registry of kernels and stores winners per GPU.

>>> import torch, tmm_core
>>> x, w = torch.randn(4, 8), torch.randn(8, 3)
>>> torch.allclose(tmm_core.matmul(x, w, epilogue="relu"), torch.relu(x @ w), atol=1e-6)
True
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tmm_core import settings
from tmm_core.api import explain, kernels, linear, matmul, plan, preload, problem, tune
from tmm_core.errors import (
    CacheMissError,
    ConfigError,
    PluginError,
    SettingsError,
    TmmError,
    TmmWarning,
    UnknownNameError,
    UnsupportedProblemError,
    reraise,
)
from tmm_core.formats import Format
from tmm_core.grouped import grouped_linear, grouped_matmul
from tmm_core.launch.plan import Plan
from tmm_core.quantized import Quantized
from tmm_core.rounding import quantize
from tmm_core.settings import Settings, override
from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.groups import Groups
from tmm_core.spec.launcher import Bound, Launcher
from tmm_core.spec.operand import Operand, Scale
from tmm_core.spec.port import Port
from tmm_core.spec.problem import Problem
from tmm_core.version import __version__ as __version__

if TYPE_CHECKING:
    from tmm_core.dispatch.explanation import Explanation, KernelInfo
    from tmm_core.interop.aten import disable, enable, enabled_report
    from tmm_core.interop.inductor import inductor_options
    from tmm_core.interop.row_quantization import quantize_rows
    from tmm_core.spec.anatomy import Anatomy, Resources
    from tmm_core.spec.hookspecs import hookimpl
    from tmm_core.spec.kernel import Candidate, Config, Kernel, Traits
    from tmm_core.spec.machine import Machine
    from tmm_core.spec.supports import ANY, Supports

#: Names for authors of kernels, for explanations and for use without changing code, by module. A
#: module is imported when one of its names is used first, which keeps ``import tmm_core`` short.
_LATER = {
    "dispatch.explanation": ("Explanation", "KernelInfo"),
    "interop.aten": ("disable", "enable", "enabled_report"),
    "interop.inductor": ("inductor_options",),
    "interop.row_quantization": ("quantize_rows",),
    "spec.anatomy": ("Anatomy", "Resources"),
    "spec.hookspecs": ("hookimpl",),
    "spec.kernel": ("Candidate", "Config", "Kernel", "Traits"),
    "spec.machine": ("Machine",),
    "spec.supports": ("ANY", "Supports"),
}
_MODULES = {name: f"tmm_core.{module}" for module, names in _LATER.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


__all__ = [
    "ANY",
    "Anatomy",
    "Bound",
    "CacheMissError",
    "Candidate",
    "Config",
    "ConfigError",
    "Epilogue",
    "Explanation",
    "Format",
    "Groups",
    "Kernel",
    "KernelInfo",
    "Launcher",
    "Machine",
    "Operand",
    "Plan",
    "PluginError",
    "Port",
    "Problem",
    "Quantized",
    "Resources",
    "Scale",
    "Settings",
    "SettingsError",
    "Supports",
    "TmmError",
    "TmmWarning",
    "Traits",
    "UnknownNameError",
    "UnsupportedProblemError",
    "disable",
    "enable",
    "enabled_report",
    "explain",
    "grouped_linear",
    "grouped_matmul",
    "hookimpl",
    "inductor_options",
    "kernels",
    "linear",
    "matmul",
    "override",
    "plan",
    "preload",
    "problem",
    "quantize",
    "quantize_rows",
    "reraise",
    "tune",
]

if settings.enabled_by_environment():
    __getattr__("enable")()
