"""``tmm::matmul_outputs``: products whose epilogue has auxiliary outputs.

It is a separate operator with the same arguments, so that ``tmm::matmul`` returns one tensor. If
derivatives are needed or a transform is active, ``tmm::matmul`` computes the result. The outputs
are then computed from it by their references, in torch, and are not differentiable.
"""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

import torch

from tmm_core import compat
from tmm_core.interop import autograd_state, fallbacks, flops, operator
from tmm_core.interop.declaration import declare
from tmm_core.interop.libraries import differentiated
from tmm_core.launch.check import check
from tmm_core.launch.output_memory import allocator
from tmm_core.launch.warm import epilogue_of, fast_path_allowed, run
from tmm_core.spec.arguments import Arguments

Tensor = torch.Tensor

# Declares an operator that the epilogue ``quantize`` calls.
importlib.import_module("tmm_core.interop.row_quantization")


def matmul(call: Arguments) -> tuple[Tensor, ...]:
    """``(result, *outputs)`` of an epilogue that has outputs.

    Raises:
        ValueError: ``out`` is given, or an operand is a DTensor.
        RuntimeError, ValueError, TypeError: As :func:`tmm_core.matmul`.
    """
    if call.out is not None:
        raise ValueError("matmul(): out= cannot be given where the epilogue has outputs")
    if not torch.compiler.is_compiling():
        parsed = epilogue_of(call.epilogue)
        if any(isinstance(t, compat.dtensor()) for t in call.given):
            names = ", ".join(port.name for port in parsed.outputs)
            raise ValueError(f"epilogue outputs ({names}) have no sharding rule for DTensor")
        if fallbacks.needs_fallback(*call[:4]):
            check(call, parsed)  # raises: only kernels serve these
        if autograd_state.differentiated(*call.given):
            return _by_references(call)
    return tuple(_operator(*call[:-1]))


def _by_references(call: Arguments) -> tuple[Tensor, ...]:
    parsed = epilogue_of(call.epilogue)
    check(call, parsed)
    y = operator.matmul(*call._replace(epilogue=parsed.bare.interned())[:-1])
    return (y, *parsed.auxiliary(y))


def _run(*given: Any) -> list[Tensor]:
    result: Any = run(*given)
    return [result] if isinstance(result, Tensor) else list(result)


def _apart(*given: Any) -> list[Tensor]:
    return list(_by_references(Arguments(*given)))


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "tmm::matmul_outputs has no such rule: call tmm_core.matmul, outside of torch.compile"
    )


def _empty(call: Arguments, shape: torch.Size) -> list[Tensor]:
    result = operator.empty(call, shape)
    return [result, *allocator(epilogue_of(call.epilogue), shape)(result)]


_operator: Any = declare(
    "matmul_outputs",
    Arguments,
    run=_run,
    allowed=fast_path_allowed,
    check=check,
    empty=_empty,
    derivative=differentiated(lambda *given: _operator(*given), _apart),
    vmap=_refuse,
    flop_formula=flops.matmul_flops,
    returns="Tensor[]",
)
