"""Registers FLOP formulas with ``torch.utils.flop_counter``, without importing it.

Importing that module imports Triton (150 ms), and most programs never need it. So the formulas are
registered when it is imported.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from tmm_core import formats
from tmm_core.spec.arguments import Arguments

_MODULE = "torch.utils.flop_counter"


def matmul_flops(*given: Any, out_shape: Any = None, **named: Any) -> int:
    """Return the FLOPs of ``a @ b``; a multiply-add counts as two. The epilogue is not counted, as
    torch does not count its pointwise operators. Shapes stand for tensors."""
    call = Arguments(*given, **named)
    a, b = call.a, call.b
    rows = a[-2] if len(a) > 1 else 1
    width = b[-1] if len(b) > 1 else 1
    batch = torch.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2]))
    return int(2 * math.prod(batch) * rows * extent_of_k(call) * width)


def extent_of_k(call: Any) -> int:
    """K of a call, of whose stored elements each may hold several values."""
    ((name, _), _) = formats.read(call.formats)
    return int(call.a[-1]) * (formats.named(name).pack if name else 1)


def count(operator: Any, formula: Callable[..., int]) -> None:
    """Register ``formula`` for ``operator``, now or as soon as the counter is imported."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        module.register_flop_formula(operator)(formula)
        return
    if not _waiting:
        sys.meta_path.insert(0, _WhenImported())
    _waiting[operator] = formula


#: Formulas to register once the counter is imported.
_waiting: dict[Any, Callable[..., int]] = {}


class _WhenImported:
    """An import hook for one module, called once, when it has been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                for operator, formula in _waiting.items():
                    module.register_flop_formula(operator)(formula)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
