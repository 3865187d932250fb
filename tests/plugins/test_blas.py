"""BLAS's other ways to compute what its default computes."""

from __future__ import annotations

import pytest
import torch

import tmm_core
from tmm_core.dispatch import verify

HALVES = {"halves": True}


@pytest.mark.parametrize("epilogue", ["swiglu", "geglu", "swiglu+softcap(2)"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_gate_and_up_by_a_product_each(
    epilogue: str, bias: bool, residual: bool, given: bool
) -> None:
    m, n, k = 5, 7, 11
    a, b = torch.randn(m, k), torch.randn(2 * n, k).t()
    more = {"bias": torch.randn(2 * n)} if bias else {}
    more |= {"residual": torch.randn(m, n)} if residual else {}
    out = torch.full((m, n), torch.nan) if given else None
    y = tmm_core.matmul(a, b, epilogue=epilogue, kernel="blas", config=HALVES, out=out, **more)
    wide = {name: t.double() for name, t in more.items()}
    exact = tmm_core.matmul(a.double(), b.double(), epilogue=epilogue, kernel="blas", **wide)
    assert out is None or y is out
    assert verify.error(y, exact) <= verify.TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("epilogue", "more"),
    [
        ("silu", {}),
        ("clamped_swiglu(1.702, 7)", {}),
        ("swiglu", {"alpha": 0.5}),
        ("swiglu", {"out_dtype": torch.float64}),
    ],
)
def test_what_has_no_halves_is_refused(epilogue: str, more: dict[str, object]) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 6)
    with pytest.raises(tmm_core.PluginError, match="halves are of a gated 2-D product"):
        tmm_core.matmul(a, b, epilogue=epilogue, kernel="blas", config=HALVES, **more)  # type: ignore[arg-type]
