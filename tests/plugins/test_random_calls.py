"""Random calls of random kernels in random configs, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_calls import Draw, fault_of, verify

from tmm_core.spec.device import interpreting

pytestmark = pytest.mark.skipif(not interpreting(), reason="Triton is not interpreting")


@pytest.mark.parametrize("seed", range(12))
def test_random_calls_are_right(seed: int, monkeypatch: Any) -> None:
    draw = Draw(seed, "cpu", small=True)
    for _ in range(2):
        verify(draw, monkeypatch, verified=False)


@pytest.mark.parametrize("wrong", [0.05, float("nan")])
def test_a_wrong_element_is_found(wrong: float) -> None:
    draw = Draw(1, "cpu", small=True)
    call = draw.call()
    right = call.expected.nan_to_num(0.0).to(torch.float32)
    assert fault_of(call, right) is None
    at = tuple(call.expected.isfinite().nonzero()[-1].tolist())
    right[at] += wrong * (1 + float(call.expected.abs().nan_to_num(0.0).max())) + float(
        call.slack[at]
    )
    assert "1 of" in str(fault_of(call, right))
