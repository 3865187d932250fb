"""``tmm::matmul`` as a torch operator.

Opaque to torch.compile and dispatching at run time, so that thousands of M cost no
recompile; what it does is :mod:`tmm_core.dispatch`.
"""

from __future__ import annotations

from typing import Any

import torch

from tmm_core import flops
from tmm_core.check import check, check_out, result_dtype
from tmm_core.dispatch import epilogue_of, run
from tmm_core.problem import FP8

Tensor = torch.Tensor

_ARGUMENTS = (
    "Tensor a, Tensor b, Tensor? bias=None, Tensor? residual=None, float alpha=1.0, "
    "str epilogue='', ScalarType? out_dtype=None, Tensor? scale_a=None, Tensor? scale_b=None"
)

library = torch.library.Library("tmm", "DEF")
library.define(f"matmul({_ARGUMENTS}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.define(f"matmul.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)")


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
    check_out(out, shape, result_dtype(a, out_dtype), inputs)
    return run(a, b, bias, residual, alpha, epilogue, out_dtype, scale_a, scale_b, out)


library.impl("matmul", run, "CompositeExplicitAutograd")
library.impl("matmul.out", _run_out, "CompositeExplicitAutograd")


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


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, residual, ctx.alpha, ctx.epilogue, *_ = inputs
    ctx.save_for_backward(a, b, bias)
    ctx.residual = None if residual is None else (residual.shape, residual.dtype)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of the operator; the pre-activation is recomputed, not kept."""
    a, b, bias = ctx.saved_tensors
    if a.dtype in FP8:
        raise RuntimeError(f"tmm::matmul has no derivative for {a.dtype} @ {b.dtype}")
    alpha, epilogue = ctx.alpha, epilogue_of(ctx.epilogue)
    # torch leaves trailing arguments at their defaults out of this tuple.
    needs = (*ctx.needs_input_grad, False, False, False, False)
    wants_a, wants_b, wants_bias, wants_residual = needs[:4]
    dz = grad
    if not epilogue.is_identity and (wants_a or wants_b or wants_bias):
        z = torch.ops.tmm.matmul(a, b, bias, None, alpha)
        dz = torch.func.vjp(epilogue.apply, z)[1](grad.to(z.dtype))[0]
    dz = dz.to(a.dtype)
    # Vectors are matrices of one row or column here, and their gradient loses it again.
    a2 = a if a.dim() > 1 else a[None]
    b2 = b if b.dim() > 1 else b[:, None]
    dz2 = dz if b.dim() > 1 else dz[..., None]
    dz2 = dz2 if a.dim() > 1 else dz2[..., None, :]
    da = db = None
    if wants_a:
        da = torch.ops.tmm.matmul(dz2, b2.mT, None, None, alpha).sum_to_size(a2.shape).view_as(a)
    if wants_b:
        if b2.dim() == 2 and a2.dim() > 2:
            a2, dz2 = _rows(a2, dz2)
        db = torch.ops.tmm.matmul(a2.mT, dz2, None, None, alpha).sum_to_size(b2.shape).view_as(b)
    dbias = dz2.sum_to_size(bias.shape).to(bias.dtype) if wants_bias else None
    dresidual = None
    if wants_residual:
        shape, dtype = ctx.residual
        dresidual = grad.sum_to_size(shape).to(dtype)
    return da, db, dbias, dresidual, None, None, None, None, None


def _rows(a: Tensor, dz: Tensor) -> tuple[Tensor, Tensor]:
    """``[…, M, K]`` and ``[…, M, N]`` as matrices of as many rows. The rows are summed over, so
    their order is free: DTensor flattens without communication (torch 2.10 flattens at all)
    where no dimension but the first is sharded, so a sharded one becomes the first."""
    for placement in getattr(a, "placements", ()):
        if placement.is_shard() and 0 < placement.dim < a.dim() - 1:
            a, dz = a.movedim(placement.dim, 0), dz.movedim(placement.dim, 0)
            break
    return a.flatten(0, -2), dz.flatten(0, -2)


torch.library.register_autograd("tmm::matmul", _backward, setup_context=_setup, lib=library)


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

        keys = torch._C.DispatchKeySet(
            torch._C.DispatchKey.AutocastCUDA
            if device == "cuda"
            else torch._C.DispatchKey.AutocastCPU
        )
        with torch._C._ExcludeDispatchKeyGuard(keys):
            cast = (to(a), to(b), to(bias), to(residual))
            return matmul(*cast, alpha, epilogue, out_dtype, scale_a, scale_b)  # type: ignore[no-any-return]

    return cast


library.impl("matmul", _autocast("cuda"), "AutocastCUDA")
library.impl("matmul", _autocast("cpu"), "AutocastCPU")
flops.install()

matmul = torch.ops.tmm.matmul.default
matmul_out = torch.ops.tmm.matmul.out
