"""Layers that call :func:`tmm_core.linear`, and ``convert``, which makes a model's layers do so.

>>> import torch
>>> from tmm_core.nn import convert
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
>>> report = convert(model)
>>> report.changes[0].after
"linear(epilogue='gelu')"
>>> model[0]
Linear(in_features=8, out_features=16, bias=True)
>>> report.undo()

Import it explicitly: ``import tmm_core`` alone does not.
"""

from __future__ import annotations

from tmm_core.nn.conversion_report import Change, LeftAlone, Report
from tmm_core.nn.convert import convert
from tmm_core.nn.experts import Experts
from tmm_core.nn.gated_layers import GatedMLP, SwiGLU
from tmm_core.nn.linear import Linear

__all__ = ["Change", "Experts", "GatedMLP", "LeftAlone", "Linear", "Report", "SwiGLU", "convert"]
