"""Finds products that no swap reaches, in the code of a model's forwards."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterator
from typing import Any

from tmm_base.guards import unwrapped
from torch import nn

from tmm_core.epilogues import SPELLINGS
from tmm_core.nn.trace import nested

#: Torch's modules that multiply by weights without calling the layers that hold them.
_MODULES: dict[type[nn.Module], str] = {
    nn.TransformerEncoderLayer: (
        "in evaluation mode torch's fast path reads the weights and calls no layer; "
        "torch.backends.mha.set_fastpath_enabled(False) turns it off"
    ),
    nn.MultiheadAttention: "it multiplies by in_proj_weight and out_proj.weight itself",
    nn.RNNBase: "it multiplies by its weights itself",
    nn.RNNCellBase: "it multiplies by its weights itself",
    nn.Bilinear: "it multiplies by its weight itself",
}

_PRODUCTS = {"linear", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm"}
_PRODUCTS |= {"bilinear", "einsum", "tensordot", "multi_dot", "scaled_dot_product_attention"}
_PRODUCTS |= {"grouped_mm", "_grouped_mm", "scaled_mm", "_scaled_mm"}
_ACTIVATIONS = {each.__name__ for each in SPELLINGS if not isinstance(each, (str, type))}
#: How far calls of functions are followed.
_DEPTH = 3


def out_of_reach(module: nn.Module) -> str | None:
    """Why torch computes the products of ``module`` even if modules inside it are swapped."""
    for kind, reason in _MODULES.items():
        if isinstance(module, kind) and (
            kind in (nn.RNNBase, nn.RNNCellBase) or type(module).forward is kind.forward
        ):
            return reason
    return None


def products(module: nn.Module) -> str | None:
    """Return the products that a forward computes without a layer; None if there are none."""
    if type(module).__module__.startswith("torch."):
        return None
    found: dict[str, str] = {}
    for function, name in _names(module):
        if name in _PRODUCTS or name == "@":
            found.setdefault(name, function)
    if not found:
        return None
    listed = ", ".join(
        name if function == "forward" else f"{name} in {function}()"
        for name, function in found.items()
    )
    return f"its code multiplies tensors itself ({listed})"


def activations(module: nn.Module) -> list[str]:
    """Return the functions of torch that the forward of ``module`` may apply to products."""
    return sorted({name for _, name in _names(module)} & _ACTIVATIONS)


def _names(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield a function's name and a name in its code, for a forward and the functions that it calls
    in its package. The module's own attributes are left out. A product by operator is
    ``@``."""
    forward = type(module).forward
    waiting: list[tuple[Any, int]] = [(forward, 0)]
    seen: set[Any] = set()
    while waiting:
        function, depth = waiting.pop(0)
        function = unwrapped(function)
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        for name in _in_code(function.__code__):
            if name in module._modules or name in module.__dict__:
                continue
            method = getattr(type(module), name, None)
            called = method if method is not None else function.__globals__.get(name)
            if isinstance(called, types.FunctionType):
                if depth < _DEPTH and _near(called, forward) and not hasattr(nn.Module, name):
                    waiting.append((called, depth + 1))
                if method is not None:
                    continue
            yield function.__name__, name


def _near(called: Any, forward: Any) -> bool:
    """Whether a function belongs to the same package: not to torch, nor to the standard library."""
    package = str(getattr(forward, "__module__", "")).partition(".")[0]
    return str(getattr(called, "__module__", "")).partition(".")[0] == package != "torch"


def _in_code(code: types.CodeType) -> Iterator[str]:
    for each in nested(code):
        yield from each.co_names
        if any(_is_product(step) for step in dis.get_instructions(each)):
            yield "@"


def _is_product(step: dis.Instruction) -> bool:
    if sys.version_info < (3, 11):
        return step.opname in ("BINARY_MATRIX_MULTIPLY", "INPLACE_MATRIX_MULTIPLY")
    return step.opname == "BINARY_OP" and step.argrepr in ("@", "@=")
