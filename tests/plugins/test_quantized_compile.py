"""Quantised weights compile, without a GPU, for Ampere, Hopper, Blackwell and an MI300; on Hopper
tiles of 64 rows or more are multiplied by ``wgmma``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test_ragged_compile import BF16, ROW, TARGETS
from tmm_triton.naive import Naive
from tmm_triton.ragged import Ragged
from tmm_triton.split_k import SplitK
from tmm_triton.tiled import FusedEpilogue, Grouped
from tmm_triton.triton_kernel import TritonKernel

from tmm_core import Groups, Operand, Problem, Scale
from tmm_core.epilogues import parse
from tmm_core.triton import target_of

E4M3 = torch.float8_e4m3fn
INT4 = Operand(torch.uint8, "col", format="int4", scale=Scale.parse("1x128 bfloat16"))
BLOCKS = Operand(E4M3, "col", scale=Scale.parse("128x128"))
#: Operands by name: a, and b.
OPERANDS = {
    "int8": (ROW, Operand(torch.int8, "col", format="int8", scale=Scale.parse("row"))),
    "int8 by 32": (ROW, Operand(torch.int8, "col", format="int8", scale=Scale.parse("1x32"))),
    "int4": (ROW, INT4),
    "int4 with zero points": (ROW, replace(INT4, zero=torch.uint8)),
    "int4_signed": (ROW, replace(INT4, dtype=torch.int8, format="int4_signed", zero=BF16)),
    "mxfp4": (
        ROW, Operand(torch.uint8, "col", format="mxfp4", scale=Scale.parse("1x32 uint8")),
    ),
    "fp8 weights": (ROW, BLOCKS),
    "fp8 by blocks": (Operand(E4M3, scale=Scale.parse("1x128")), BLOCKS),
}  # fmt: skip


def compiled(target: str, of: str, kernel: TritonKernel[Any]) -> None:
    device = TARGETS[target]
    a, b = OPERANDS[of]
    problem = Problem(16, 4096, 4096, a, b, ROW, device, bias=BF16)
    if isinstance(kernel, Grouped):
        problem = replace(problem, m=2048)
    elif isinstance(kernel, FusedEpilogue | Ragged):
        groups = Groups(8, "m") if isinstance(kernel, Ragged) else None
        problem = replace(problem, m=512, bias=None, epilogue=parse("swiglu"), groups=groups)
    assert not list(kernel.supports.reasons_against(problem))
    config = kernel.default_config(problem)
    result = kernel.builds(problem, config)[0].compile_for(target_of(device))
    if target == "90" and (config.BLOCK_M >= 64 or getattr(config, "SWAP", False)):
        assert "wgmma.mma_async" in result.asm["ptx"]


KERNELS = [Naive(), SplitK(), Grouped(), FusedEpilogue(), Ragged()]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("of", OPERANDS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.slow(quick=32)
def test_quantised_weights_compile(
    target: str, of: str, kernel: TritonKernel[Any], request: pytest.FixtureRequest
) -> None:
    device = TARGETS[target]
    if "fp8" in of and (device.capability < (8, 9) or target == "gfx942"):
        pytest.skip("8-bit floats need compute capability 8.9")
    process = "uninterpreted_amd" if target == "gfx942" else "uninterpreted"
    request.getfixturevalue(process)(compiled, target, of, kernel)
