"""Other spellings of an epilogue than its name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import triton
from fakes import plugin
from torch import nn
from torch._dynamo.testing import CompileCounter

import tmm_core
from tmm_core import Epilogue, Port, dispatch
from tmm_core.epilogues import EPILOGUES, parse
from tmm_core.nn import GatedMLP, Linear

TANH = partial(F.gelu, approximate="tanh")

#: The argument, its key, and the function that it names.
ACCEPTED: dict[str, tuple[Any, str, Any]] = {
    "swish": ("swish", "silu", F.silu),
    "gelu_new": ("gelu_new", "gelu_tanh", TANH),
    "chain": ("swish+softcap(30)", "silu+softcap(30.0)", lambda z: 30 * (F.silu(z) / 30).tanh()),
    "F.silu": (F.silu, "silu", F.silu),
    "nn.SiLU": (nn.SiLU(inplace=True), "silu", F.silu),
    "F.gelu": (F.gelu, "gelu", F.gelu),
    "nn.GELU": (nn.GELU(), "gelu", F.gelu),
    "partial": (TANH, "gelu_tanh", TANH),
    "nn.GELU tanh": (nn.GELU(approximate="tanh"), "gelu_tanh", TANH),
    "torch.relu": (torch.relu, "relu", F.relu),
    "F.relu": (partial(F.relu, inplace=True), "relu", F.relu),
    "slope": (nn.LeakyReLU(0.2), "leaky_relu(0.2)", lambda z: F.leaky_relu(z, 0.2)),
    "F.leaky_relu": (F.leaky_relu, "leaky_relu(0.01)", F.leaky_relu),
    "nn.Softplus": (nn.Softplus(), "softplus", F.softplus),
    "nn.Tanh": (nn.Tanh(), "tanh", torch.tanh),
    "F.sigmoid": (F.sigmoid, "sigmoid", torch.sigmoid),
    "nn.Identity": (nn.Identity(), "identity", lambda z: z),
    "sequence": ([F.relu, "scale(2)"], "relu+scale(2.0)", lambda z: 2 * F.relu(z)),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_each_spelling_is_recognised(name: str) -> None:
    passed, key, function = ACCEPTED[name]
    assert parse(passed).key == key
    x, w = torch.randn(5, 8, dtype=torch.float64), torch.randn(8, 7, dtype=torch.float64)
    out = tmm_core.matmul(x, w, epilogue=passed)
    torch.testing.assert_close(out, function(x @ w))


@triton.jit
def square(z):
    return z * z


def _times_tanh(z: torch.Tensor) -> torch.Tensor:
    return z * torch.tanh(z)


class _Callable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return z


@pytest.mark.parametrize(
    ("passed", "message"),
    [
        (square, "Epilogue('square', reference=lambda z: …, device=square)"),
        (_times_tanh, "Epilogue('_times_tanh', reference=…)"),
        (lambda z: z + 1, "Epilogue('my_epilogue', reference=…)"),
        (_Callable(), "Epilogue('my_epilogue', reference=…)"),
        (nn.SiLU, "SiLU is a class; pass an instance"),
        (nn.Softplus(beta=2), "Epilogue("),
        (nn.Softplus(threshold=3), "Epilogue("),
        (partial(F.gelu, approximate="other"), "Epilogue("),
        (partial(F.silu, scale=2), "Epilogue("),
        (partial(F.leaky_relu, negative_slope="x"), "could not convert"),
        (partial(F.leaky_relu, torch.ones(2)), "Epilogue("),
        (partial(nn.SiLU, inplace=True), "Epilogue("),
        (nn.Linear(2, 2), "Epilogue("),
        (3, "epilogue must be a str or an Epilogue, got int"),
    ],
)
def test_another_spelling_is_refused_with_advice(passed: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        tmm_core.matmul(torch.ones(2, 2), torch.ones(2, 2), epilogue=passed)
    assert message in str(caught.value)


def test_a_name_has_letters_of_any_language() -> None:
    mine = tmm_core.Epilogue("über", lambda z: z + 1.0)
    for text in ("über", mine.key):
        assert parse(text, {"über": mine}) is mine


def test_a_plugins_own_name_is_not_taken_for_an_alias() -> None:
    mine = tmm_core.Epilogue("swish", lambda z: z * torch.sigmoid(2 * z))
    assert parse("swish", {"swish": mine}) is mine


def test_layers_and_graphs_take_them_too() -> None:
    layer = Linear(4, 6, epilogue=nn.SiLU())
    x = torch.randn(3, 4)
    torch.testing.assert_close(layer(x), F.silu(F.linear(x, layer.weight, layer.bias)))
    assert list(layer.children()) == []
    assert GatedMLP(4, 6, activation=F.silu).epilogue == "swiglu"
    assert GatedMLP(4, 6, activation="swish").epilogue == "swiglu"
    assert GatedMLP(4, 6, activation="silu").epilogue == "swiglu"

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return tmm_core.matmul(x, w, epilogue=F.silu) + tmm_core.matmul(x, w, epilogue="swish")

    w = torch.randn(4, 5)
    torch.testing.assert_close(compiled(x, w), 2 * F.silu(x @ w))


class Multiple:
    """An epilogue, and its closure variable."""

    def __init__(self, factor: float) -> None:
        def times(z: torch.Tensor) -> torch.Tensor:
            return z * factor

        def change(value: float) -> None:
            nonlocal factor
            factor = value

        self.epilogue, self.change = Epilogue("times", times), change


def product(kind: str, x: torch.Tensor, w: torch.Tensor, epilogue: Any) -> torch.Tensor:
    if kind == "linear":
        return tmm_core.linear(x, w.t(), epilogue=epilogue)
    if kind == "batch":
        return tmm_core.grouped_matmul(x[None], w[None], epilogue=epilogue)[0]
    if kind == "grouped":
        offs = torch.full((1,), len(x), dtype=torch.int32)
        return tmm_core.grouped_matmul(x, w[None], offs=offs, epilogue=epilogue)
    return tmm_core.matmul(x, w, epilogue=epilogue)


KINDS = ["matmul", "linear", "grouped", "batch"]


def compared(kind: str) -> tuple[torch.Tensor, Callable[[Any, torch.Tensor], None]]:
    """A product, and a function that compares a compiled call with an epilogue of it."""
    x, w = torch.randn(5, 8), torch.randn(8, 4)
    torch._dynamo.reset()
    compiled = torch.compile(partial(product, kind), backend="eager", fullgraph=True)

    def agrees(epilogue: Any, expected: torch.Tensor) -> None:
        torch.testing.assert_close(compiled(x, w, epilogue), expected)

    return x @ w, agrees


@pytest.mark.parametrize("kind", KINDS)
@torch._dynamo.config.patch(recompile_limit=32)
def test_a_compiled_call_is_compiled_again_for_another_epilogue(kind: str) -> None:
    z, agrees = compared(kind)
    for factor in (2.0, 3.0, 2.0):
        agrees(Multiple(factor).epilogue, z * factor)
        agrees(["relu", Multiple(factor).epilogue], torch.relu(z) * factor)
    for cap in (2.0, 3.0):
        agrees(EPILOGUES["softcap"].with_parameters(cap), cap * torch.tanh(z / cap))
    variable = Multiple(4.0)
    for factor in (4.0, 5.0, 6.0):
        variable.change(factor)
        agrees(variable.epilogue, z * factor)


@pytest.mark.parametrize("kind", KINDS)
@torch._dynamo.config.patch(recompile_limit=32)
def test_a_compiled_call_is_compiled_again_for_another_module(kind: str) -> None:
    z, agrees = compared(kind)
    leaky = nn.LeakyReLU()
    try:
        agrees(leaky, F.leaky_relu(z, 0.01))
    except torch._dynamo.exc.InternalTorchDynamoError:  # in torch 2.10
        pytest.skip("this torch does not trace calls of which a module is an argument")
    for slope in (0.1, 0.3, 0.5):
        leaky.negative_slope = slope
        agrees(leaky, F.leaky_relu(z, slope))
        agrees(("tanh", nn.LeakyReLU(slope)), F.leaky_relu(torch.tanh(z), slope))
    for approximate in ("none", "tanh"):
        agrees(nn.GELU(approximate), F.gelu(z, approximate=approximate))


def test_equal_epilogues_share_a_compiled_graph() -> None:
    x, w = torch.randn(5, 8), torch.randn(8, 4)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(tmm_core.matmul, backend=counter, fullgraph=True)
    for _ in range(3):
        y = compiled(x, w, epilogue=Multiple(2.0).epilogue)
        torch.testing.assert_close(y, 2 * (x @ w))
    assert counter.frame_count == 1


def tripled(z: torch.Tensor) -> torch.Tensor:
    return 3 * z


def test_a_graph_has_the_key_of_an_epilogue_that_is_given_by_name() -> None:
    # Torch's cache of graphs would give a process the function that another has under this name.
    named = Epilogue("tripled_by_name", tripled)
    dispatch.default_dispatcher().registry.register(plugin(epilogues=[named]), "named")
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    x, w = torch.randn(5, 8), torch.randn(8, 4)
    for epilogue in (named.name, f"relu+{named.name}"):
        torch._dynamo.reset()
        call = partial(tmm_core.matmul, epilogue=epilogue)
        compiled = torch.compile(call, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x, w), tmm_core.matmul(x, w, epilogue=epilogue))
        assert epilogue.replace(named.name, named.key) in graphs[-1]
    assert "@" in named.key


def test_every_epilogue_survives_a_pickle() -> None:
    amax = Port("amax", "row", reduce="max", of=torch.abs)
    users = Epilogue("tripled", tripled)
    for epilogue in (
        *EPILOGUES.values(), parse("gelu_tanh+softcap(2.5)"), parse("swiglu").then(users),
        replace(parse("tanh"), outputs=(amax,)), users,
    ):  # fmt: skip
        assert isinstance(epilogue.parts, tuple)  # derived, and kept on it
        for again in (pickle.loads(pickle.dumps(epilogue)), copy.deepcopy(epilogue)):
            assert again == epilogue
            assert again.outputs == epilogue.outputs
            z = torch.randn(3, 8)
            assert torch.equal(again.apply(z), epilogue.apply(z))
    # The process that reads it derives the key from its source.
    assert "key" in vars(users)
    assert "key" not in vars(pickle.loads(pickle.dumps(users)))
