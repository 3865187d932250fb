"""An epilogue gives a result of the product's shape and the call's dtype, also in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchRuntimeError

import tmm_core
from tmm_core import Epilogue, Port
from tmm_core.nn import GatedMLP, Linear

Tensor = torch.Tensor
Call = Callable[[Tensor, Tensor, Epilogue], Tensor]

ENDS = torch.tensor([3, 6], dtype=torch.int32)


def grouped(a: Tensor, b: Tensor, epilogue: Epilogue, **more: Any) -> Tensor:
    b = b[None].expand(2, *b.shape)
    return tmm_core.grouped_matmul(a, b, offs=ENDS, epilogue=epilogue, **more)


def in_two(a: Tensor, b: Tensor, epilogue: Epilogue) -> Tensor:
    """N-D operands."""
    return tmm_core.matmul(a.view(2, 3, -1), b, epilogue=epilogue)


def compiled(a: Tensor, b: Tensor, epilogue: Epilogue) -> Tensor:
    torch._dynamo.reset()
    run = torch.compile(lambda a, b: tmm_core.matmul(a, b, epilogue=epilogue), backend="aot_eager")
    found: Tensor = run(a, b)
    return found


CALLS: dict[str, Call] = {
    "matmul": lambda a, b, e: tmm_core.matmul(a, b, epilogue=e),
    "linear": lambda a, b, e: tmm_core.linear(a, b.t(), epilogue=e),
    "bias": lambda a, b, e: tmm_core.matmul(a, b, bias=b[0], epilogue=e),
    "residual": lambda a, b, e: tmm_core.matmul(a, b, residual=a @ b, epilogue=e),
    "rows of a residual": lambda a, b, e: tmm_core.matmul(a, b, bias=a @ b, epilogue=e),
    "N-D": in_two,
    "grouped": grouped,
    "weighted": lambda a, b, e: grouped(a, b, e, out_weights=a[:, 0].float()),
    "chain": lambda a, b, e: tmm_core.matmul(a, b, epilogue=[e, "tanh"]),
    "vmap": lambda a, b, e: torch.vmap(lambda a: tmm_core.matmul(a, b, epilogue=e))(a[None]),
    "compiled": compiled,
}


def wide(z: Tensor) -> Tensor:
    return torch.sin(z.float())


def slope(z: Tensor) -> Tensor:
    return torch.cos(z.float())


@pytest.mark.parametrize("made", [Epilogue("wide", wide), Epilogue("wide", wide, derivative=slope)])
@pytest.mark.parametrize("call", CALLS)
def test_a_reference_may_compute_in_another_dtype(call: str, made: Epilogue) -> None:
    """The result has the same dtype with and without gradients."""
    a, b = torch.randn(6, 4).bfloat16(), torch.randn(4, 5).bfloat16()
    plain = CALLS[call](a, b, made)
    recorded = CALLS[call](a.clone().requires_grad_(), b, made)
    assert plain.dtype is recorded.dtype is torch.bfloat16
    torch.testing.assert_close(recorded, plain, rtol=2e-2, atol=2e-2)
    recorded.sum().backward()


def test_the_result_has_the_dtype_that_the_call_names() -> None:
    a, b = torch.randn(6, 4, requires_grad=True), torch.randn(4, 5)
    half = Epilogue("half", lambda z: z.half())
    assert tmm_core.matmul(a, b, epilogue=half, out_dtype=torch.float64).dtype is torch.float64
    # Rounded to fp16, and the residual added without being rounded.
    least = torch.full((6, 5), 2.0**-20)
    y = tmm_core.matmul(a, b, epilogue=half, residual=least)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, (a @ b).half() + least, rtol=0, atol=2.0**-22)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_layer_has_the_dtype_of_its_parameters(hooked: bool) -> None:
    gate = Epilogue("gate", lambda gate, up: wide(gate) * up.float(), gated=True)
    layer, mlp = Linear(4, 5, epilogue=Epilogue("wide", wide)), GatedMLP(4, 8, gate)
    for module in (layer.bfloat16(), mlp.bfloat16()):
        if hooked:
            next(iter(module.modules())).register_forward_hook(lambda *_: None)
            mlp.gate_proj.register_forward_hook(lambda *_: None)
        for mode in (torch.enable_grad(), torch.no_grad()):
            with mode:
                assert module(torch.randn(6, 4).bfloat16()).dtype is torch.bfloat16


def test_a_layer_whose_forward_was_replaced_has_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear(4, 5, epilogue=Epilogue("wide", wide)).bfloat16()
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: forward(self, x))
    assert layer(torch.randn(6, 4).bfloat16()).dtype is torch.bfloat16


SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "number": lambda z: z.sum(),
    "column": lambda z: z.sum(-1, keepdim=True),
    "row": lambda z: z.sum(-2, keepdim=True),
    "narrower": lambda z: z[..., :1],
    "more": lambda z: z[None],
}


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("call", CALLS)
def test_a_result_of_another_shape_is_refused(call: str, shape: str, recorded: bool) -> None:
    """A residual, a chain or a bias would broadcast it."""
    a, b = torch.randn(6, 4, requires_grad=recorded), torch.randn(4, 5)
    # Torch wraps an exception of an operator that it traces.
    kinds = (ValueError, TorchRuntimeError)
    with pytest.raises(kinds, match="'sums': its reference returned shape"):
        CALLS[call](a, b, Epilogue("sums", SHAPES[shape]))


def test_it_is_refused_for_an_out_a_chain_and_a_gate() -> None:
    a, b = torch.randn(6, 4), torch.randn(4, 8)
    whole = Epilogue("sums", lambda z: z.sum())
    with pytest.raises(ValueError, match=r"shape \(\), not \(6, 8\)"):
        tmm_core.matmul(a, b, epilogue=whole, out=torch.empty(6, 8))
    with pytest.raises(ValueError, match="'sums'"):
        tmm_core.matmul(a, b, epilogue=["relu", whole])
    gate = replace(whole, reference=lambda gate, up: torch.cat([gate, up], -1), gated=True)
    with pytest.raises(ValueError, match=r"shape \(6, 8\), not \(6, 4\)"):
        tmm_core.matmul(a, b, epilogue=gate)
    with pytest.raises(ValueError, match=r"shape \(6, 16\), not \(6, 8\)"):
        GatedMLP(4, 8, gate)(a.requires_grad_())


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("result", [None, 3.0, (1, 2)])
def test_a_result_that_is_no_tensor_is_refused(result: Any, recorded: bool) -> None:
    a, b = torch.randn(6, 4, requires_grad=recorded), torch.randn(4, 5)
    message = f"'odd': its reference returned {type(result).__name__}, not a tensor"
    for more in ({}, {"residual": torch.randn(6, 5)}):
        with pytest.raises(TypeError, match=message):
            tmm_core.matmul(a, b, epilogue=Epilogue("odd", lambda z: result), **more)


OUTPUTS = [
    Port("extra", "row", reduce="max", of=lambda y: y[:1]),
    Port("extra", "row", reduce="sum", of=lambda y: y[..., :1]),
    Port("extra", "col", reduce="sum", of=lambda y: torch.cat([y, y])),
    Port("extra", "scalar", reduce="sum", of=lambda y: y.sum()),
    Port("extra", "tile", of=lambda y: y[:, :1]),
    Port("extra", "tile", of=lambda y: y.sum(-1), group=2),
    Port("extra", "group", of=lambda y: y, group=2),
    Port("extra", "group", of=lambda y: y.amax(-1)[:1], group=2),
]


@pytest.mark.parametrize("port", OUTPUTS, ids=lambda port: port.kind)
@pytest.mark.parametrize("recorded", [False, True])
def test_an_output_of_values_of_another_shape_is_refused(port: Port, recorded: bool) -> None:
    a, b = torch.randn(6, 4, requires_grad=recorded), torch.randn(4, 8)
    made = Epilogue("sine", torch.sin, outputs=(port,))
    with pytest.raises(ValueError, match="output 'extra': its function `of` returned shape"):
        tmm_core.matmul(a, b, epilogue=made)
    none = replace(port, of=lambda y: None)
    with pytest.raises(TypeError, match="output 'extra': its function `of` returned NoneType, not"):
        tmm_core.matmul(a, b, epilogue=replace(made, outputs=(none,)))
