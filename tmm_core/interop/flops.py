"""Registers FLOP formulas with ``torch.utils.flop_counter``, without importing it.

Importing that module imports Triton (150 ms), and most programs never need it. So the formulas are
registered when it is imported.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

_MODULE = "torch.utils.flop_counter"


def matmul_flops(
    a: Sequence[int], b: Sequence[int], *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """Return the FLOPs of ``a @ b``; a multiply-add counts as two. The epilogue is not counted, as
    torch does not count its pointwise operators."""
    rows = a[-2] if len(a) > 1 else 1
    width = b[-1] if len(b) > 1 else 1
    batch = torch.broadcast_shapes(tuple(a[:-2]), tuple(b[:-2]))
    # If one operand is packed, the other has the whole K.
    k = max(a[-1], b[-2] if len(b) > 1 else b[-1])
    return int(2 * math.prod(batch) * rows * k * width)


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
