"""Products of one input on several streams, in CUDA graphs of compiled models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tmm_core
from tmm_core.interop import shared_input
from tmm_core.nn import convert
from tmm_core.quantized import Quantized
from tmm_core.settings import sharing_gpu
from tmm_core.spec.arguments import Arguments

Tensor = torch.Tensor

pytestmark = pytest.mark.gpu

WIDTH, LAYERS = 1024, 12


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of products of each call that uses several streams."""
    found: list[int] = []
    at_once = shared_input._at_once

    def counted(products: Any, device: Any) -> Any:
        found.append(len(products))
        return at_once(products, device)

    monkeypatch.setattr(shared_input, "_at_once", counted)
    return found


class Block(nn.Module):
    """Query, key and value, then gate and up, so that each layer needs the one before."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n, bias=bias) for n in (WIDTH, 256, 256))
        self.gate, self.up = (nn.Linear(WIDTH, 1536, bias=False) for _ in range(2))
        self.down = nn.Linear(1536, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        h = x + F.rms_norm(q, (WIDTH,)) * torch.tanh(torch.cat((k, v, k, v), -1))
        return h + F.rms_norm(self.down(F.silu(self.gate(h)) * self.up(h)), (WIDTH,))


def _model(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(bias) for _ in range(LAYERS))).cuda().bfloat16().eval()
    for p in model.parameters():
        p.requires_grad_(False)
    return model


def _exact(model: Any, x: Tensor) -> Tensor:
    double = _model(model[0].q.bias is not None).double()
    return double(x.double())


def _captured(run: Any, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(x), run(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
    return graph, y


def _compiled(model: nn.Module, x: Tensor, **more: Any) -> Any:
    options = tmm_core.inductor_options(when="always", **more)
    return torch.compile(model, dynamic=False, options=options)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 64])
@torch.no_grad()
def test_a_captured_model_gives_its_values(rows: int, bias: bool, counts: list[int]) -> None:
    """Fresh inputs in each replay, results poisoned before."""
    model, x = _model(bias), torch.empty(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    x.normal_()
    with tmm_core.override(on_cache_miss="heuristic"):
        compiled = _compiled(model, x)
        graph, y = _captured(compiled, x)
        assert counts == [3, 2] * LAYERS
        streamed = []
        for _ in range(20):
            x.normal_()
            y.fill_(float("nan"))
            graph.replay()
            streamed.append(y.clone())
            # One product after the other, on one stream: the same kernels, so the same bits.
            assert torch.equal(streamed[-1], compiled(x))
        expected = _exact(model, x)
    usual = (model(x).double() - expected).abs().max()
    assert (streamed[-1].double() - expected).abs().max() <= 2 * usual + 1e-2


@pytest.mark.parametrize("rows", [1, 16])
@torch.no_grad()
def test_quantised_weights(rows: int) -> None:
    model, x = _model(False), torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    own = convert(model, inplace=False, weights="int4").model
    assert type(own[0].q.weight) is Quantized
    with tmm_core.override(on_cache_miss="heuristic"):
        compiled = _compiled(own, x)
        graph, y = _captured(compiled, x)
        for _ in range(10):
            x.normal_()
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, compiled(x))
    for layer, quantised in zip(model.modules(), own.modules(), strict=True):
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(quantised.weight.dequantize())
    usual = model(x).double()
    expected = model.double()(x.double())
    worst = (usual - expected).abs().max()
    assert (y.double() - expected).abs().max() <= 2 * worst + 1e-2


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own first one
@torch.no_grad()
def test_graphs_that_the_compiler_captures(counts: list[int]) -> None:
    """As by ``mode="reduce-overhead"``: the compiler captures, and owns the memory of results."""
    model, x = _model(False), torch.randn(16, WIDTH, device="cuda", dtype=torch.bfloat16)
    with tmm_core.override(on_cache_miss="heuristic"):
        compiled = _compiled(model, x)
        captured = _compiled(model, x, **{"triton.cudagraphs": True})
        for _ in range(10):
            x.normal_()
            assert torch.equal(captured(x), compiled(x))
    assert counts == [3, 2] * LAYERS


@torch.no_grad()
def test_a_graph_of_many_rows_uses_one_stream(monkeypatch: Any) -> None:
    def refused(*_: Any) -> Any:
        raise AssertionError("65 rows on several streams")

    monkeypatch.setattr(shared_input, "_at_once", refused)
    weights = [torch.randn(WIDTH, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    a = torch.randn(65, WIDTH, device="cuda", dtype=torch.bfloat16)

    def run(a: Tensor) -> Any:
        return torch.stack(_products(a, weights))

    with tmm_core.override(on_cache_miss="heuristic"):
        graph, y = _captured(run, a)
        y.fill_(float("nan"))
        graph.replay()
    expected = torch.stack([a.double() @ w.double() for w in weights])
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=1.0)


def _products(a: Tensor, weights: list[Tensor]) -> Any:
    calls = [Arguments(a, w) for w in weights]
    return shared_input.concurrent(*shared_input.arguments(calls))


@torch.no_grad()
def test_an_error_ends_the_further_streams() -> None:
    """A product that fails leaves a capture that can end, and the next capture works."""
    a = torch.randn(4, WIDTH, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(WIDTH, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    wrong = [weights[0], weights[1][:-1], weights[2]]
    with tmm_core.override(on_cache_miss="heuristic"):
        _products(a, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with pytest.raises(RuntimeError):
                _products(a, wrong)
            y = torch.stack(_products(a, weights))
        y.fill_(float("nan"))
        graph.replay()
    expected = torch.stack([a.double() @ w.double() for w in weights])
    torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=1.0)


@pytest.mark.parametrize(("rows", "roomy"), [(1, True), (16, True), (17, False)])
def test_a_kernel_of_small_blocks_is_chosen(rows: int, roomy: bool) -> None:
    a = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(1024, 4096, device="cuda", dtype=torch.bfloat16).t()
    with tmm_core.override(on_cache_miss="heuristic"):
        plan = sharing_gpu(tmm_core.plan, a, b)
    assert ("leaves room" in plan.choice.reason) is roomy
    if roomy:
        assert plan.kernel == "triton.skinny"
