"""Quantised weights compile, without a GPU, for Ampere, Hopper, Blackwell and an MI300; on Hopper
tiles of 64 rows or more are multiplied by ``wgmma``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from pairwise import every_case
from test_ragged_compile import BF16, ROW, TARGETS
from tmm_triton.naive import Naive
from tmm_triton.ragged import Ragged
from tmm_triton.split_k import SplitK
from tmm_triton.tiled import FusedEpilogue, Grouped

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


def compiled(target: str, of: str, which: list[int]) -> list[bool]:
    device = TARGETS[target]
    a, b = OPERANDS[of]
    decode = Problem(16, 4096, 4096, a, b, ROW, device, bias=BF16)
    gated = replace(decode, m=512, bias=None, epilogue=parse("swiglu"))
    kernels = [
        (Naive(), decode),
        (SplitK(), decode),
        (Grouped(), replace(decode, m=2048)),
        (FusedEpilogue(), gated),
        (Ragged(), replace(gated, groups=Groups(8, "m"))),
    ]
    found = []
    for kernel, problem in (kernels[place] for place in which):
        assert not list(kernel.supports.reasons_against(problem))
        config = kernel.default_config(problem)
        result = kernel.builds(problem, config)[0].compile_for(target_of(device))
        wide = config.BLOCK_M >= 64 or getattr(config, "SWAP", False)
        found.append(target != "90" or not wide or "wgmma.mma_async" in result.asm["ptx"])
    return found


@pytest.mark.parametrize("of", OPERANDS)
@pytest.mark.parametrize("target", TARGETS)
def test_quantised_weights_compile(target: str, of: str, request: pytest.FixtureRequest) -> None:
    device = TARGETS[target]
    if "fp8" in of and (device.capability < (8, 9) or target == "gfx942"):
        pytest.skip("8-bit floats need compute capability 8.9")
    process = "uninterpreted_amd" if target == "gfx942" else "uninterpreted"
    # Three of the five kernels for Hopper, and elsewhere one: a compilation takes a second. Each
    # kernel meets several operands.
    place = list(OPERANDS).index(of) + list(TARGETS).index(target)
    turns = (0, 1, 3) if target == "90" else (0,)
    which = list(range(5)) if every_case() else [(place + turn) % 5 for turn in turns]
    assert all(request.getfixturevalue(process)(compiled, target, of, which))
