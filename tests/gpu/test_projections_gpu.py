"""Projections of one input as one product, on a GPU and in a CUDA graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tmm_core.nn import convert, projections

pytestmark = pytest.mark.gpu


class Attention(nn.Module):
    """Query, key and value as Llama's attention computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(256, 256), nn.Linear(256, 64), nn.Linear(256, 64)
        self.head_dim = 64

    def forward(self, x: torch.Tensor) -> Any:
        shape = x.shape[:-1]
        heads = (*shape, -1, self.head_dim)
        q = self.q(x).view(heads).transpose(1, 2)
        k = self.k(x).view(heads).transpose(1, 2)
        v = self.v(x).view(heads).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.mark.parametrize("rows", [1, 16, 300])
def test_it_is_the_unconverted_ones_result_also_in_a_graph(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    original = Attention().to("cuda", torch.bfloat16)
    converted = copy.deepcopy(original)
    report = convert(converted)
    sizes: list[int] = []
    product = projections.JointProduct._product

    def counted(self: Any, x: torch.Tensor) -> Any:
        columns = product(self, x)
        sizes.append(len(columns))
        return columns

    monkeypatch.setattr(projections.JointProduct, "_product", counted)
    x = torch.randn(2, rows, 256, device="cuda").bfloat16()
    with torch.no_grad():
        for _ in range(2):
            y = converted(x)
        torch.testing.assert_close(y, original(x), rtol=3e-2, atol=3e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = converted(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(y, original(x), rtol=3e-2, atol=3e-2)
        assert sizes == [3, 3, 3]
        report.undo()
        torch.testing.assert_close(converted(x), original(x))
    del graph
