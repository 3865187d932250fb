"""Auxiliary outputs of the tiled kernels, interpreted, with tiles that divide no dimension."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tmm_triton.output_ports import MOST
from tmm_triton.tiled import FusedEpilogue, FusedEpilogueConfig, Grouped, GroupedConfig
from tmm_triton.triton_kernel import TritonKernel

import tmm_core
from tmm_core import Epilogue, Operand, Port, Problem
from tmm_core.epilogues import parse
from tmm_core.spec.device import DeviceFingerprint, fingerprint
from tmm_core.spec.epilogue import IDENTITY
from tmm_core.testing.terms import ABSOLUTE, SQUARE
from tmm_core.verify.verifier import Verifier

CPU, FP32 = torch.device("cpu"), torch.float32
TILE = {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 16, "num_stages": 2, "num_warps": 4}
HALVES = FusedEpilogueConfig(**TILE, GROUP_M=3, SUBTILE=2)

ROW = Port("row", "row", reduce="max", **ABSOLUTE)
ROW_SUM = Port("row_sum", "row", torch.bfloat16, reduce="sum", **SQUARE)
COL = Port("col", "col", reduce="max")
COL_SUM = Port("col_sum", "col", torch.float16, reduce="sum")
SCALAR = Port("scalar", "scalar", reduce="max", **ABSOLUTE)
SCALAR_SUM = Port("scalar_sum", "scalar", reduce="sum", **SQUARE)
TILE_COPY = Port("copy", "tile", torch.bfloat16)


def problem_of(epilogue: Epilogue, **fields: Any) -> Problem:
    given: dict[str, Any] = dict.fromkeys(("a", "b", "out"), Operand(FP32))
    given |= {"device": fingerprint(CPU), "epilogue": epilogue, **fields}
    return Problem(70, 40, 24, **given)


@pytest.mark.parametrize(
    ("kernel", "config", "text", "outputs"),
    [
        (Grouped(), GroupedConfig(**TILE, GROUP_M=3), "silu", (ROW, COL_SUM)),
        (FusedEpilogue(), HALVES, "swiglu", (ROW_SUM, SCALAR)),
        (FusedEpilogue(), HALVES, "identity", (SCALAR_SUM, TILE_COPY)),
        (FusedEpilogue(), replace(HALVES, SUBTILE=1), "gelu", (COL,)),
    ],
    ids=("rows-and-columns", "gated-halves", "all-and-tile", "columns"),
)
@pytest.mark.slow
def test_outputs_sum_all_tiles(
    kernel: TritonKernel[Any], config: Any, text: str, outputs: tuple[Port, ...]
) -> None:
    epilogue = replace(parse(text), outputs=outputs)
    problem = problem_of(epilogue, bias=FP32, residual=Operand(FP32), scaled=True)
    assert not kernel.reasons_against(problem)
    # The conformance suite verifies outputs in every way of use.
    verdict = Verifier(problem, CPU).verdict(kernel.bind(problem, config), extent="repeated")
    assert verdict.ok, verdict.reason


def test_calls_fuse_outputs() -> None:
    a, b = torch.randn(2, 3, 40), torch.randn(40, 24)
    epilogue = replace(parse("silu"), outputs=(ROW, COL_SUM))
    y, row, col = tmm_core.matmul(a, b, epilogue=epilogue, kernel="triton.grouped")
    exact = torch.nn.functional.silu(a @ b)
    torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(row, exact.abs().amax(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(col, exact.sum((0, 1)).half(), rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_nan_passes_through_both_reductions() -> None:
    a = torch.ones(70, 24)
    a[69, 3] = math.nan
    epilogue = replace(IDENTITY, outputs=(ROW, SCALAR))
    config = {**TILE, "GROUP_M": 1}
    _, row, scalar = tmm_core.matmul(
        a, torch.ones(24, 40), epilogue=epilogue, kernel="triton.grouped", config=config
    )
    assert row[69].isnan()
    assert row[:69].tolist() == [24.0] * 69
    assert scalar.isnan()


def test_outputs_that_are_sums_have_a_reduction_order_of_their_own() -> None:
    """The product's sums do not depend on the tile, but the sum of a row is a sum over tiles."""
    hopper = DeviceFingerprint("cuda", "H200", (9, 0), 132, 232448)
    half = dict.fromkeys(("a", "b", "out"), Operand(torch.float16))
    config = GroupedConfig(**TILE, GROUP_M=3)
    kernel = Grouped()
    for outputs, own in (((), False), ((ROW,), False), ((ROW_SUM,), True)):
        problem = problem_of(replace(parse("silu"), outputs=outputs), device=hopper, **half)
        assert (kernel.name in str(kernel.arithmetic(problem, config))) is own
        assert kernel.workspace_bytes(problem, config) == (4 * 3 * 70 if outputs else 0)


def test_more_outputs_than_the_kernel_has_arguments_are_declined() -> None:
    ports = tuple(Port(f"port{i}", "row", reduce="max") for i in range(MOST + 1))
    problem = problem_of(replace(IDENTITY, outputs=ports))
    assert Grouped().reasons_against(problem) == [f"writes at most {MOST} auxiliary outputs"]
