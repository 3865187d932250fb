"""Torch's own samples of its products, under ``enable()``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_enable import Sums, enable, sums  # noqa: F401  # a fixture

pytest.importorskip("expecttest", reason="torch's samples need it")
from torch.testing._internal.common_methods_invocations import op_db

Tensor = torch.Tensor

NAMES = ("mm", "addmm", "bmm", "baddbmm", "matmul", "nn.functional.linear")


SAMPLED = [info for info in op_db if info.name in NAMES and not info.variant_test_name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("info", SAMPLED, ids=lambda info: info.name)
@pytest.mark.slow(quick=6)
def test_torchs_own_samples_with_gradients(
    sums: Sums,  # noqa: F811
    info: Any,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    seen = 0
    for sample in info.sample_inputs("cpu", dtype, requires_grad=True):
        given = (sample.input, *sample.args)
        leaves = [t for t in given if isinstance(t, Tensor) and t.requires_grad]

        def run(given: Any = given, sample: Any = sample, leaves: Any = leaves) -> Any:
            y = info.op(*given, **sample.kwargs)
            grads = torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
            return y.detach(), grads

        expected = run()
        with enable():
            got = run()
        seen += 1
        tolerance = {torch.bfloat16: 3e-2}.get(dtype, 1e-4)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        for mine, theirs in zip(got[1], expected[1], strict=True):
            assert mine is None or (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
    assert seen
    assert bool(sums.launched) == (dtype is not torch.float64)
