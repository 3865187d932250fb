"""Edge cases of kernels: tiles at the edge, zeros, single rows, and alternative code paths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import DEVICE, problem
from tmm_blas import blas

import tmm_core
from tmm_core import Epilogue, Port, Supports
from tmm_core.epilogues import parse
from tmm_core.spec.operand import Operand, Scale

pytest.importorskip("triton")

from tmm_triton.hopper.operand_layout import box_rows_of_a

from tmm_core.triton.pointwise import Pointwise

KINDS = ("row", "col", "scalar")


def same(y: torch.Tensor) -> torch.Tensor:
    return y


@pytest.mark.parametrize("kind", KINDS)
def test_a_maximum_below_zero_at_edge_tiles(kind: Any) -> None:
    """Elements beyond the edge do not count as zeros."""
    a, b = torch.rand(37, 24) + 0.1, -torch.rand(24, 40) - 0.1
    port = Port("most", kind, reduce="max")
    epilogue = Epilogue("f", same, device=same, outputs=(port,))
    y, most = tmm_core.matmul(a, b, epilogue=epilogue, kernel="triton.fused_epilogue")
    assert most.max() < 0
    torch.testing.assert_close(most, port.apply(y), rtol=1e-4, atol=1e-4)


def test_a_closed_gate_passes_no_infinite_gradient() -> None:
    z = torch.tensor([[-1.0, 2.0, float("inf"), float("inf")]])
    dz = Pointwise(parse("reglu"), 4, z.dtype, z.device).backward(torch.ones(1, 2), z)
    assert dz.tolist() == [[0.0, float("inf"), 0.0, 2.0]]


@pytest.mark.parametrize("name", ["relu", "relu2", "leaky_relu(0.25)", "reglu"])
def test_the_slope_at_zero_is_torchs(name: str) -> None:
    epilogue = parse(name)
    z = torch.tensor([[0.0, -0.0, 1.0, -1.0]]).repeat(2, 2 if epilogue.gated else 1)
    grad = torch.ones(2, 4)
    dz = Pointwise(epilogue, z.shape[1], z.dtype, z.device).backward(grad, z)
    leaf = z.clone().requires_grad_()
    epilogue.apply(leaf).sum().backward()
    torch.testing.assert_close(dz, leaf.grad, rtol=0, atol=0)
    torch.testing.assert_close(epilogue.vjp(grad, z), leaf.grad, rtol=0, atol=0)


@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_output_of_fp64_keeps_its_precision(kind: Any, reduce: Any) -> None:
    y = torch.full((3, 7), 1.0, dtype=torch.float64) + torch.arange(7) * 2.0**-40
    port = Port("p", kind, reduce=reduce)
    dims = {"row": 1, "col": 0, "scalar": (0, 1)}[kind]
    expected = y.sum(dims) if reduce == "sum" else y.amax(dims)
    torch.testing.assert_close(port.reduced(port.terms(y)), expected, rtol=1e-15, atol=0)


def test_a_matrix_of_one_strided_row_or_column_has_a_layout() -> None:
    flat = torch.zeros(1000)
    assert Operand.of(flat.as_strided((1, 8), (100, 4))) == Operand(flat.dtype, "col", True)
    assert Operand.of(flat.as_strided((1, 8), (100, 3))) == Operand(flat.dtype, "col", False)
    assert Operand.of(flat.as_strided((8, 1), (4, 3))).layout == "row"
    assert Operand.of(flat.as_strided((2, 8), (100, 4))).layout == "strided"
    x, w = torch.randn(1, 64)[:, ::4], torch.randn(16, 8)
    y = tmm_core.matmul(x, w, kernel="triton.naive")
    torch.testing.assert_close(y, x @ w, rtol=1e-4, atol=1e-4)


def test_capabilities_from_the_least_up_to_the_limit_are_served() -> None:
    supports = Supports(devices=("cuda",), capability=(8, 0), below=(9, 0))

    def against(capability: tuple[int, int]) -> list[str]:
        device = replace(DEVICE, type="cuda", capability=capability)
        return [r for r in supports.reasons_against(problem(device=device)) if "capability" in r]

    assert not against((8, 0))
    assert not against((8, 9))
    assert against((7, 5))
    assert against((9, 0))
    assert against((10, 0))


@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 33, 64, 65, 1000])
def test_a_box_has_as_many_rows_as_swizzling_needs_and_no_more(m: int) -> None:
    device = replace(DEVICE, type="cuda")
    row = problem(m=m, device=device)
    rows = box_rows_of_a(row, 64)
    assert max(8, min(m, 64)) <= rows <= min(max(8, 2 * m - 1), 64)
    assert box_rows_of_a(replace(row, a=replace(row.a, layout="col")), 64) == 64


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("alpha", [1.0, -0.5])
def test_torchs_8_bit_product_has_alpha_once(
    alpha: float, by_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher calls a fake with the signature of ``torch._scaled_mm``."""
    ones, f8 = torch.ones, torch.float8_e4m3fn

    def scaled_mm(
        a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None, **given: Any
    ) -> Any:
        out = given.get("out")
        z = (a.float() @ b.float()) * scale_a * scale_b
        z = (z if bias is None else z + bias.float()).to(given["out_dtype"])
        return z if out is None else out.copy_(z)

    monkeypatch.setattr(torch, "ones", lambda *shape, device=None, **more: ones(*shape, **more))
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    a, b = torch.randn(16, 32).to(f8), torch.randn(16, 32).to(f8).mT
    scale_a = torch.rand(16, 1) + 0.5 if by_row else torch.rand(()) + 0.5
    scale_b = torch.rand(1, 16) + 0.5 if by_row else torch.rand(()) + 0.5
    out = torch.empty(16, 16, dtype=torch.bfloat16)
    instance = tmm_core.Problem.of(
        a, b, out, replace(DEVICE, type="cuda"), scaled=alpha != 1,
        stored={"a": {"scale": Scale.of(scale_a)}, "b": {"scale": Scale.of(scale_b)}},
    )  # fmt: skip
    launch = blas._bind_scaled_mm(instance)
    y = launch(a, b, None, None, alpha, None, a_scale=scale_a, b_scale=scale_b)
    expected = alpha * (a.float() @ b.float()) * scale_a * scale_b
    torch.testing.assert_close(y.float(), expected, rtol=1e-2, atol=1e-2)
    launch(a, b, None, None, alpha, out, a_scale=scale_a, b_scale=scale_b)
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
