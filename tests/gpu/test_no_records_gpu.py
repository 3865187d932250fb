"""Tuning without records against an exhaustive search, on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from tmm_core import dispatch
from tmm_core.bench import runner
from tmm_core.bench.case import Case
from tmm_core.bench.suites import Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_a_large_product_is_searched_by_both_clocks() -> None:
    """Products of 150 µs and more are also timed in steady state."""
    task = Task("mine", Case(m=4096, n=4096, k=4096, layout="nt"))
    usual = dispatch.default_dispatcher()
    options = runner.Options(records=False, seconds=0.1)
    (document,) = runner.run([task], torch.device("cuda", torch.cuda.current_device()), options)
    assert "failed" not in document, document
    found = document["search"]
    assert found["candidates"] > found["tried"] > 1
    assert found["best"] in found["us"]
    assert set(found["steady_us"]) == set(found["us"])
    assert 0.9 < found["regret"] < 3
    assert dispatch.default_dispatcher() is usual
    assert "tmm-bench-" not in os.environ.get("TRITON_CACHE_DIR", "")
