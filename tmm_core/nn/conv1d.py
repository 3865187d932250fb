"""Transformers' ``Conv1D``: a linear layer whose weight is ``[in, out]``, as in GPT-2."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from tmm_core import api
from tmm_core.interop import fallbacks
from tmm_core.nn.classes import subclass
from tmm_core.nn.linear import is_leaf, leaf
from tmm_core.settings import with_static_weights

Tensor = torch.Tensor

#: The module of Transformers that defines it.
_THEIRS = "transformers.pytorch_utils"


def theirs() -> Any:
    """Transformers' class; None while no model can have such a layer."""
    return getattr(sys.modules.get(_THEIRS), "Conv1D", None)


class _Product(nn.Module):
    static_weights = False
    _text = ""

    def product(self, x: Tensor, epilogue: str) -> Tensor:
        """``epilogue(x @ weight + bias)``, where weight and bias are plain parameters."""
        of: Any = self._parameters
        if self.static_weights:
            return with_static_weights(_matmul, x, of["weight"], of["bias"], epilogue)
        return _matmul(x, of["weight"], of["bias"], epilogue)

    def forward(self, x: Tensor) -> Any:
        if type(x) is not Tensor and is_leaf(self, x):
            return leaf(self, x)
        weight: Any = self.weight
        if fallbacks.foreign(weight):
            return super().forward(x)  # Conv1D's
        if self.static_weights:
            return with_static_weights(_matmul, x, weight, self.bias, "")
        return _matmul(x, weight, self.bias, "")


def _matmul(x: Tensor, weight: Tensor, bias: Any, epilogue: str) -> Tensor:
    return api.matmul(x, weight, bias=bias, epilogue=epilogue)


def swapped(kind: type[nn.Module]) -> Any:
    """The subclass of Transformers' class that calls :func:`tmm_core.matmul`."""
    made = subclass(kind, _Product, "", (swapped, kind))
    made.computes_product = made
    return made
