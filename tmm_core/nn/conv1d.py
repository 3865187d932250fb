"""Transformers' ``Conv1D``: a linear layer whose weight is ``[in, out]``, as in GPT-2."""

from __future__ import annotations

from typing import Any

import torch

from tmm_core import api
from tmm_core.interop import fallbacks
from tmm_core.nn.classes import ProductLayer, loaded
from tmm_core.nn.linear import leaf

Tensor = torch.Tensor


def theirs() -> Any:
    """Transformers' class; None until it is imported."""
    return loaded("transformers.pytorch_utils", "Conv1D")


class Conv1DProduct(ProductLayer):
    def product(self, x: Tensor, epilogue: str) -> Tensor:
        """``epilogue(x @ weight + bias)``, where weight and bias are plain parameters."""
        of: Any = self._parameters
        return self._run(_matmul, x, of["weight"], of["bias"], epilogue)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Any:
        if type(x) is not Tensor and (node := leaf(self, x)) is not None:
            return node
        if self.replaced():
            return self._by_library(x)
        weight: Any = self.weight
        if fallbacks.foreign(weight):
            return super().forward(x)  # Conv1D's
        return self._run(_matmul, x, weight, self.bias, "")


def _matmul(x: Tensor, weight: Tensor, bias: Any, epilogue: str) -> Tensor:
    return api.matmul(x, weight, bias=bias, epilogue=epilogue)
