"""BLAS's other ways to compute what its default computes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tmm_blas.blas import Blas

import tmm_core
from tmm_core.verify import compare

HALVES = {"halves": True}
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3 = torch.float8_e4m3fn


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
    assert compare.error(y, exact) <= compare.TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("epilogue", "more"),
    [
        ("silu", {}),
        ("clamped_swiglu(1.702, 7)", {}),
        ("swiglu", {"alpha": 0.5}),
        ("swiglu", {"out_dtype": torch.float64}),
    ],
)
def test_a_product_without_halves_is_refused(epilogue: str, more: dict[str, object]) -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 6)
    with pytest.raises(tmm_core.PluginError, match="halves need a gated 2-D product"):
        tmm_core.matmul(a, b, epilogue=epilogue, kernel="blas", config=HALVES, **more)  # type: ignore[arg-type]


#: Operands of every way: a folded product, one of 2-D operands, a batch, and a vector.
SHAPES = {
    "2-D": ((4, 8), (8, 6)), "folded": ((2, 4, 8), (8, 6)), "batch": ((2, 4, 8), (2, 8, 6)),
    "vector": ((8,), (8, 6)),
}  # fmt: skip
EPILOGUES = [None, "relu", "gelu+softcap(2)", "swiglu", "geglu+relu"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def made(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def ways(problem: Any) -> list[dict[str, Any]]:
    """Every config that BLAS has for a problem, each of its fields among them."""
    return [config.to_json() for config in Blas().configs(problem)]


@pytest.fixture
def untuned(blas_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMM_ON_CACHE_MISS", "heuristic")


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64, E4M3], ids=str)
@pytest.mark.slow(quick=8)
def test_every_way_returns_the_problems_dtype(kind: str, dtype: torch.dtype, device: str) -> None:
    """All dtypes of bias, residual and result are tried, with and without ``out``."""
    shape_a, shape_b = SHAPES[kind]
    a, b = made(*shape_a, dtype=dtype).to(device), made(*shape_b, dtype=dtype).to(device)
    scales = {"scale_a": torch.full((), 0.5, device=device)} if dtype is E4M3 else {}
    own = BF16 if dtype is E4M3 else dtype
    seen: set[tuple[Any, ...]] = set()
    terms = [None, *dict.fromkeys([own, FP32])]
    for epilogue, bias, residual, out_dtype, alpha in itertools.product(
        EPILOGUES, terms, terms, [None, FP32, BF16], [1.0, 0.5]
    ):
        if dtype is E4M3 and not {bias, residual} <= {None, FP32, out_dtype or own}:
            continue
        given: dict[str, Any] = {"epilogue": epilogue, "out_dtype": out_dtype, "alpha": alpha}
        width = 3 if epilogue and "glu" in epilogue else 6
        if bias is not None:
            given["bias"] = made(6, dtype=bias).to(device)
        if residual is not None:
            shape = torch.matmul(a.float(), b.float()).shape
            given["residual"] = made(*shape[:-1], width, dtype=residual).to(device)
        given |= scales
        problem = tmm_core.problem(a, b, **given)
        wanted = out_dtype or own
        values = []
        for config in ways(problem):
            seen.update((name, value) for name, value in config.items())
            y = tmm_core.matmul(a, b, kernel="blas", config=config, **given)
            assert y.dtype is wanted, (config, given)
            out = torch.empty_like(y)
            tmm_core.matmul(a, b, kernel="blas", config=config, out=out, **given)
            values += [y, out]
        for y in values[1:]:
            torch.testing.assert_close(y, values[0], rtol=4e-2, atol=4e-2)
    if kind == "2-D" and dtype is not E4M3:
        assert ("halves", True) in seen


@pytest.mark.usefixtures("untuned")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64, E4M3], ids=str)
@pytest.mark.slow
def test_every_grouped_way_returns_the_problems_dtype(dtype: torch.dtype) -> None:
    offs, own = torch.tensor([1, 1, 4], dtype=torch.int32), BF16 if dtype is E4M3 else dtype
    terms = [None, *dict.fromkeys([own, FP32])]
    operands = {
        "m": (made(4, 8, dtype=dtype), made(3, 8, 8, dtype=dtype), (4, 8)),
        "k": (made(8, 4, dtype=dtype), made(4, 8, dtype=dtype), (3, 8, 8)),
        "n": (made(3, 8, 8, dtype=dtype), made(8, 4, dtype=dtype), (8, 4)),
        "unaligned": (made(4, 5, dtype=dtype), made(3, 5, 7, dtype=dtype), (4, 7)),
    }
    for along, (a, b, shape) in operands.items():
        for bias, residual, weights, out_dtype in itertools.product(
            terms, terms, terms, [None, FP32, BF16]
        ):
            if dtype is E4M3 and not {bias, residual, weights} <= {None, FP32, out_dtype or own}:
                continue
            given: dict[str, Any] = {"offs": offs, "out_dtype": out_dtype, "epilogue": "relu"}
            if bias is not None and along != "n":
                given["bias"] = made(shape[-1], dtype=bias)
            if residual is not None:
                given["residual"] = made(*shape, dtype=residual)
            if weights is not None and along in ("m", "unaligned"):
                given["out_weights"] = made(4, dtype=weights)
                given["out_index"] = torch.tensor([3, 1, 0, 2])
            y = tmm_core.grouped_matmul(a, b, **given)
            assert y.dtype is (out_dtype or own), given
            out = torch.empty_like(y)
            assert tmm_core.grouped_matmul(a, b, out=out, **given) is out
            torch.testing.assert_close(out, y, rtol=4e-2, atol=4e-2)
