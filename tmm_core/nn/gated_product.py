"""The product of one input with several layers' weights: one product if these are adjacent in
memory, otherwise one each. ``tmm::gated_linear`` gates two of them, for a gated MLP;
``tmm::joint_linear`` returns all side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], text: str
) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of the joint product; None if it must be one product each."""
    if text and weights[0].shape != weights[1].shape:
        return None
    return joint_of(weights, biases)


def gated(gate: Tensor, up: Tensor, text: str) -> Tensor:
    return in_dtype(warm.epilogue_of(text).applied(gate, up), gate.dtype)


def run(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], text: str = ""
) -> Tensor:
    """Return the products side by side, or those of gate and up, gated."""
    operands = joint_operands(weights, biases, text)
    if operands is None:
        return apart(x, weights, biases, text)
    return api.linear(x, *operands, epilogue=text)


def apart(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], text: str = ""
) -> Tensor:
    each = [product(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    return gated(each[0], each[1], text) if text else torch.cat(each, -1)


def recorded_product(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], text: str
) -> Tensor | None:
    """One product recorded for backward; None if it must be two, gated by torch."""
    if torch.compiler.is_compiling():
        return None
    if not warm.fast_path_allowed(x, *weights, *biases, shown=True):
        return None
    epilogue = warm.epilogue_of(text)
    found = kernels(epilogue, 2 * weights[0].shape[0], x.dtype, x)
    if found is None:
        return None
    with torch.no_grad():
        operands = joint_operands(weights, biases, text)
    if operands is None:
        return None
    z = _Joint.apply(x, *weights, *biases, *operands)  # type: ignore[attr-defined]
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


def _fake(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(len(weight) for weight in weights)))


def _gated_fake(
    x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None,
    epilogue: str,
) -> Tensor:  # fmt: skip
    shape = check(Arguments(x, gate.t(), gate_bias), IDENTITY)
    check(Arguments(x, up.t(), up_bias, x.new_empty(shape)), IDENTITY)
    return x.new_empty(shape)


def _of_two(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, gate, up, gate_bias, up_bias, epilogue: function(
        x, (gate, up), (gate_bias, up_bias), epilogue
    )


# Compiled graphs cannot query addresses, so the operators do.
define(
    "gated_linear(Tensor x, Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias, "
    "str epilogue) -> Tensor",
    _of_two(run),
    _gated_fake,
    _of_two(apart),
)
define("joint_linear(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor", run, _fake, apart)
flops.count(
    torch.ops.tmm.gated_linear,
    lambda x, gate, up, *_, **__: flops.matmul_flops(x, (x[-1], gate[0] + up[0])),
)
flops.count(
    torch.ops.tmm.joint_linear,
    lambda x, weights, *_, **__: flops.matmul_flops(x, (x[-1], sum(w[0] for w in weights))),
)
gated_linear = torch.ops.tmm.gated_linear.default
joint_linear = torch.ops.tmm.joint_linear.default
