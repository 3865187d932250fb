"""Recognises gpt-oss's gate in an expert layer, from a trace and from its values and never from
names."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from tmm_base.guards import suppress
from torch import fx, nn

from tmm_core.epilogues import EPILOGUES
from tmm_core.nn.activation import TOLERANCE, is_elementwise

Gate = Callable[[Any, torch.Tensor], torch.Tensor]

#: The attribute that stores what a layer's gate was found to be, with the numbers it depends on.
_KEPT = "_tmm_gate"
_CLAMPS = ("clamp", "clamp_min", "clamp_max")


def epilogue_of(layer: nn.Module, gate: Gate) -> str | None:
    """The epilogue of ``gate(layer, product)`` with the layer's ``alpha`` and ``limit``; None if it
    is another function, or one that was not looked at before a graph is traced."""
    numbers: Any = getattr(layer, "alpha", None), getattr(layer, "limit", None)
    if not all(type(number) in (int, float) for number in numbers):
        return None
    kept = layer.__dict__.get(_KEPT)
    if (kept is None or kept[0] != numbers) and not torch.compiler.is_compiling():
        kept = layer.__dict__[_KEPT] = numbers, _proven(layer, gate, *numbers)
    return kept[1] if kept is not None and kept[0] == numbers else None


def _proven(layer: nn.Module, gate: Gate, alpha: float, limit: float) -> str | None:
    with suppress(Exception):  # third-party code, run on symbols
        epilogue = EPILOGUES["clamped_swiglu"].with_parameters(alpha, limit)
        graph = fx.Tracer().trace(lambda product: gate(layer, product))
        if _pairs_columns(graph):
            found, grid = fx.GraphModule({}, graph)(_grid(limit)), epilogue.apply(_grid(limit))
            if torch.allclose(found, grid, rtol=TOLERANCE, atol=TOLERANCE):
                return epilogue.interned()
    return None


def _pairs_columns(graph: fx.Graph) -> bool:
    """Whether it takes even and odd columns, and computes with these element by element."""
    first, *middle, last = graph.nodes
    taken = [(first, (..., slice(start, None, 2))) for start in (None, 0, 1)]

    def allowed(node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return node.args in taken
        clamps = node.op == "call_method" and node.target in _CLAMPS
        return clamps or is_elementwise(node)

    return first.op == "placeholder" and last.op == "output" and all(map(allowed, middle))


def _grid(limit: float) -> torch.Tensor:
    """Pairs of gate and up, near zero, around the limit and far from it."""
    near = torch.linspace(-3.0, 3.0, 121, dtype=torch.float64, device="cpu")
    points = torch.cat([near * limit, near * 10, near * 1000])
    gate, up = torch.meshgrid(points, points, indexing="ij")
    return torch.stack([gate, up], -1).flatten(-2)
