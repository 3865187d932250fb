"""Random calls of random kernels in random configs, on a GPU: each is right, and verification
refuses none."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from random_calls import Draw, verify

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(15))
def test_random_calls_are_right(seed: int, monkeypatch: Any) -> None:
    draw = Draw(seed, "cuda", small=False)
    for number in range(6):
        verify(draw, monkeypatch, verified=number % 3 == 0)


@pytest.mark.endurance
@pytest.mark.parametrize("seed", range(1000, 1015))
def test_random_calls_for_long(seed: int, monkeypatch: Any) -> None:
    draw, end = Draw(seed, "cuda", small=False), time.monotonic() + 150
    count = 0
    while time.monotonic() < end:
        verify(draw, monkeypatch, verified=count % 4 == 0)
        count += 1
        torch.cuda.empty_cache()
    print(f"{count} calls of seed {seed} are right")
