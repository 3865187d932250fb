"""``tmm::gated_linear``, the product of a gated MLP with gate and up: one product if their weights
are adjacent in memory, otherwise two, gated by torch."""

from __future__ import annotations

from typing import Any

import torch

from tmm_core import api
from tmm_core.interop import autograd_state, flops
from tmm_core.interop.epilogue_kernels import kernels
from tmm_core.interop.fallbacks import in_dtype
from tmm_core.interop.gradients import Call, follow, gradients
from tmm_core.interop.libraries import define
from tmm_core.launch import warm
from tmm_core.launch.check import check
from tmm_core.nn.joint_storage import stacked
from tmm_core.nn.together import joint_of, product
from tmm_core.spec.arguments import Arguments
from tmm_core.spec.epilogue import IDENTITY

Tensor = torch.Tensor


def joint_operands(
    gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None
) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of the joint product; None if it must be two, gated by torch."""
    if gate.shape != up.shape:
        return None
    return joint_of((gate, up), (gate_bias, up_bias))


def gated(gate: Tensor, up: Tensor, text: str) -> Tensor:
    return in_dtype(warm.epilogue_of(text).applied(gate, up), gate.dtype)


def run(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    epilogue: str,
) -> Tensor:  # fmt: skip
    operands = joint_operands(gate, up, gate_bias, up_bias)
    if operands is None:
        return two_products(x, gate, up, gate_bias, up_bias, epilogue)
    return api.linear(x, *operands, epilogue=epilogue)


def two_products(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    epilogue: str,
) -> Tensor:  # fmt: skip
    return gated(product(x, gate, gate_bias), product(x, up, up_bias), epilogue)


def recorded_product(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    text: str,
) -> Tensor | None:  # fmt: skip
    """One product recorded for backward; None if it must be two, gated by torch."""
    if torch.compiler.is_compiling():
        return None
    if not warm.fast_path_allowed(x, gate, up, gate_bias, up_bias, shown=True):
        return None
    epilogue = warm.epilogue_of(text)
    found = kernels(epilogue, 2 * gate.shape[0], x.dtype, x)
    if found is None:
        return None
    with torch.no_grad():
        operands = joint_operands(gate, up, gate_bias, up_bias)
    if operands is None:
        return None
    z = _Joint.apply(x, gate, up, gate_bias, up_bias, *operands)  # type: ignore[attr-defined]
    return follow(z, epilogue, found)  # type: ignore[no-any-return]


class _Joint(autograd_state.OneLevel):
    """The product with two parameters that are one weight in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        wants_x, wants_gate, wants_up, *_ = ctx.needs_input_grad
        # The parameters themselves, because torch detects in-place changes of them, but not of
        # the joint weight.
        weights = (gate, up) if wants_x else (None, None)
        ctx.save_for_backward(x if wants_gate or wants_up else None, *weights)
        ctx.call = Call(x, weight, bias, transposed=True)
        return warm.run(x, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, gate, up = ctx.saved_tensors
        wants_x, wants_gate, wants_up, wants_gate_bias, wants_up_bias, *_ = ctx.needs_input_grad
        weight = None
        if wants_x:
            # Second derivatives need both, and saved-tensor hooks may have returned copies.
            weight = None if torch.is_grad_enabled() else stacked((gate, up))
            weight = torch.cat((gate, up)) if weight is None else weight
        wanted = wants_x, wants_gate or wants_up, wants_gate_bias or wants_up_bias, False
        dx, dw, dbias, _ = gradients(ctx.call, wanted, x, weight, None, grad)
        return dx, *_halves(dw), *_halves(dbias), None, None


def _halves(t: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if t is None:
        return None, None
    rows = t.shape[0] // 2
    return t[:rows], t[rows:]


def _fake(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    epilogue: str,
) -> Tensor:  # fmt: skip
    shape = check(Arguments(x, gate.t(), gate_bias), IDENTITY)
    check(Arguments(x, up.t(), up_bias, x.new_empty(shape)), IDENTITY)
    return x.new_empty(shape)


# A compiled graph cannot query addresses, so the operator does.
define(
    "gated_linear(Tensor x, Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias, "
    "str epilogue) -> Tensor",
    run,
    _fake,
    two_products,
)
flops.count(
    torch.ops.tmm.gated_linear,
    lambda x, gate, up, *_, **__: flops.matmul_flops(x, (x[-1], gate[0] + up[0])),
)
gated_linear = torch.ops.tmm.gated_linear.default
