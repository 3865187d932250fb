"""torch.matmul's semantics by random operands, on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("hypothesis")

from hypothesis import given, settings

import tmm_core

sys.path.insert(0, str(Path(__file__).parent.parent / "core"))

from test_semantics import compare, operands, outcome

pytestmark = pytest.mark.gpu


@given(operands("cuda"))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_values_and_errors_are_torchs(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b = pair
    theirs = outcome(lambda: torch.matmul(a, b))
    if a.dtype != b.dtype and isinstance(theirs, torch.Tensor):
        return  # torch.bmm of nothing looks at no dtypes
    others = {info.name for info in tmm_core.kernels()} - {"blas"}
    with tmm_core.override(disable=others):
        mine = outcome(lambda: tmm_core.matmul(a, b))
    if isinstance(theirs, NotImplementedError) and not a.shape[-1]:
        return  # a sum of nothing needs no kernel, and torch's has one for few dtypes
    if isinstance(theirs, Exception):
        # The words are those that torch has for a CPU where an operator's name is in them.
        assert type(mine) is type(theirs), (mine, theirs)
        if "not implemented for" not in str(theirs):
            compare(mine, theirs)
    else:
        compare(mine, theirs)
