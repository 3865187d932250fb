"""``tmm::matmul`` as a torch operator.

Opaque to torch.compile and dispatching at run time, so that thousands of M cost no
recompile; what it does is :mod:`tmm_core.dispatch`.
"""

from __future__ import annotations

from typing import Any

import torch

from tmm_core import compat
from tmm_core.interop import autograd, flops, vmap
from tmm_core.launch.check import check, check_out, result_dtype
from tmm_core.launch.warm import epilogue_of, plain, run
from tmm_core.settings import overridden, within
from tmm_core.spec.problem import FP8

Tensor = torch.Tensor

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor? bias=None, Tensor? residual=None, float alpha=1.0, "
    "str epilogue='', ScalarType? out_dtype=None, Tensor? scale_a=None, Tensor? scale_b=None"
)

library = torch.library.Library("tmm", "DEF")
library.define(f"matmul({_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.define(
    f"matmul.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _run_out(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    epilogue: str = "",
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    out: Tensor,
) -> Tensor:
    shape = check(a, b, bias, residual, epilogue_of(epilogue), out_dtype, scale_a, scale_b)
    inputs = [t for t in (a, b, bias, residual, scale_a, scale_b) if t is not None]
    apart = check_out(out, shape, result_dtype(a, out_dtype), inputs)
    arguments = (a, b, bias, residual, alpha, epilogue, out_dtype, scale_a, scale_b)
    if apart and _in_memory(out, *inputs):
        return run(*arguments, out)
    return out.copy_(matmul(*arguments))


def _in_memory(*tensors: Tensor) -> bool:
    """Whether a kernel can be handed these as they are: no mode or transform has to see the call
    either."""
    return (
        not compat.dispatch_modes()
        and not autograd.differentiated(*tensors)
        and all(map(plain, tensors))
    )


library.impl("matmul", run, "CompositeExplicitAutograd")
# Taken apart wherever torch traces, transforms or counts: there is one operator to know.
library.impl("matmul.out", _run_out, "CompositeImplicitAutograd")


@torch.library.register_fake("tmm::matmul", lib=library)  # type: ignore[untyped-decorator]
def _fake(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    epilogue: str = "",
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
) -> Tensor:
    shape = check(a, b, bias, residual, epilogue_of(epilogue), out_dtype, scale_a, scale_b)
    return a.new_empty(shape, dtype=result_dtype(a, out_dtype))


if compat.below_autograd is not None:
    library.impl("matmul", autograd.matmul, "Autograd")
else:
    torch.library.register_autograd(
        "tmm::matmul", autograd.by_torch, setup_context=autograd.keep, lib=library
    )
torch.library.register_vmap("tmm::matmul", vmap.matmul, lib=library)


def _autocast(device: str) -> Any:
    def cast(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        alpha: float = 1.0,
        epilogue: str = "",
        out_dtype: torch.dtype | None = None,
        scale_a: Tensor | None = None,
        scale_b: Tensor | None = None,
    ) -> Tensor:
        """As torch.matmul under autocast: floating operands in the active dtype. 8-bit ones
        are left alone with all that goes with them: their scales stand for their range."""
        dtype = torch.get_autocast_dtype(device)

        def to(t: Tensor | None) -> Tensor | None:
            eligible = t is not None and t.is_floating_point() and t.dtype != torch.float64
            eligible = eligible and a.dtype not in FP8
            return t.to(dtype) if t is not None and eligible else t

        with compat.without_autocast(device):
            cast = (to(a), to(b), to(bias), to(residual))
            arguments = (*cast, alpha, epilogue, out_dtype, scale_a, scale_b)
            if cast[1] is b:
                return matmul(*arguments)  # type: ignore[no-any-return]
            # A weight that was cast just now was written just now.
            return within(overridden(), matmul, *arguments)  # type: ignore[no-any-return]

    return cast


library.impl("matmul", _autocast("cuda"), "AutocastCUDA")
library.impl("matmul", _autocast("cpu"), "AutocastCPU")
flops.count(torch.ops.tmm.matmul, flops.matmul_flops)

matmul = torch.ops.tmm.matmul.default
matmul_out = torch.ops.tmm.matmul.out
