"""``tmm::matmul`` as a torch operator.

It is opaque to torch.compile and dispatches at run time (:mod:`tmm_core.dispatch`), so that
thousands of M cost no recompile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tmm_core import compat
from tmm_core.formats import BY_STORAGE
from tmm_core.interop import autograd, flops, levels, vmap
from tmm_core.launch.check import check, check_out, result_dtype
from tmm_core.launch.warm import epilogue_of, plain, run
from tmm_core.settings import overridden, within
from tmm_core.spec.arguments import ROLES, Arguments, Role, schema

Tensor = torch.Tensor

library = torch.library.Library("tmm", "DEF")
library.define(f"matmul({schema()}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.define(
    f"matmul.out({schema()}, *, Tensor(a!) out) -> Tensor(a!)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


# The dispatcher passes arguments in the schema's order and omits trailing defaults.


def _run_out(*given: Any, out: Tensor) -> Tensor:
    call = Arguments(*given)
    shape = check(call, epilogue_of(call.epilogue))
    apart = check_out(out, shape, result_dtype(call.a, call.out_dtype), call.given)
    if apart and in_memory(out, *call.given):
        return run(*given, out=out)
    return out.copy_(matmul(*given))


def in_memory(*tensors: Tensor) -> bool:
    """Whether these tensors can be passed to a kernel as they are, and no mode or transform has to
    see the call."""
    return (
        not compat.dispatch_modes()
        and not levels.differentiated(*tensors)
        and all(map(plain, tensors))
    )


library.impl("matmul", run, "CompositeExplicitAutograd")
# Decomposed wherever torch traces, transforms or counts, which then see only one operator.
library.impl("matmul.out", _run_out, "CompositeImplicitAutograd")


@torch.library.register_fake("tmm::matmul", lib=library)  # type: ignore[untyped-decorator]
def _fake(*given: Any) -> Tensor:
    call = Arguments(*given)
    shape = check(call, epilogue_of(call.epilogue))
    return call.a.new_empty(shape, dtype=result_dtype(call.a, call.out_dtype))


if compat.below_autograd is not None:
    library.impl("matmul", autograd.matmul, "Autograd")
else:
    torch.library.register_autograd(
        "tmm::matmul", autograd.by_torch, setup_context=autograd.keep, lib=library
    )
torch.library.register_vmap("tmm::matmul", vmap.matmul, lib=library)


def autocast(
    device: str, operator: Callable[..., Any], roles: Sequence[Role] = ROLES
) -> Callable[..., Any]:
    """The autocast rule on ``device`` of ``operator``, whose arguments have these ``roles``."""

    def cast(*given: Any) -> Any:
        """Cast floating operands to the active dtype, as torch.matmul does. Operands with a format
        and everything that goes with them stay as they are: their scales set their range."""
        dtype = torch.get_autocast_dtype(device)
        stored = given[0].dtype in BY_STORAGE

        def to(role: Role, value: Any) -> Any:
            eligible = role.cast and value is not None and not stored
            eligible = eligible and value.is_floating_point() and value.dtype != torch.float64
            return value.to(dtype) if eligible else value

        with compat.without_autocast(device):
            arguments = [to(role, value) for role, value in zip(roles, given, strict=False)]
            if arguments[1] is given[1]:
                return operator(*arguments)
            # The cast has just written the weight.
            return within(overridden(), operator, *arguments)

    return cast


flops.count(torch.ops.tmm.matmul, flops.matmul_flops)

matmul = torch.ops.tmm.matmul.default
library.impl("matmul", autocast("cuda", matmul), "AutocastCUDA")
library.impl("matmul", autocast("cpu", matmul), "AutocastCPU")
matmul_out = torch.ops.tmm.matmul.out
