"""Quantised weights compile, without a GPU, for Ampere, Hopper, Blackwell and an MI300; on Hopper
tiles of 64 rows or more are multiplied by ``wgmma``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from test_ragged_compile import BF16, ROW, TARGETS
from tmm_triton.ragged import Ragged
from tmm_triton.split_k import SplitK
from tmm_triton.tiled import FusedEpilogue, Grouped

from tmm_core import Groups, Operand, Problem, Scale
from tmm_core.epilogues import parse
from tmm_core.triton import target_of

WEIGHTS = {
    "int8": Operand(torch.int8, "col", format="int8", scale=Scale((1, 0))),
    "int4": Operand(torch.uint8, "col", format="int4", scale=Scale((1, 128), BF16)),
    "mxfp4": Operand(torch.uint8, "col", format="mxfp4", scale=Scale((1, 32), torch.uint8)),
}


def compiled(target: str, form: str) -> list[bool]:
    device = TARGETS[target]
    decode = Problem(16, 4096, 4096, ROW, WEIGHTS[form], ROW, device, bias=BF16)
    gated = replace(decode, m=512, bias=None, epilogue=parse("swiglu"))
    found = []
    for kernel, problem in (
        (SplitK(), decode),
        (Grouped(), replace(decode, m=2048)),
        (FusedEpilogue(), gated),
        (Ragged(), replace(gated, groups=Groups(8, "m"))),
    ):
        config = kernel.default_config(problem)
        result = kernel.builds(problem, config)[0].compile_for(target_of(device))
        wide = config.BLOCK_M >= 64 or getattr(config, "SWAP", False)
        found.append(target != "90" or not wide or "wgmma.mma_async" in result.asm["ptx"])
    return found


@pytest.mark.parametrize("form", WEIGHTS)
@pytest.mark.parametrize("target", TARGETS)
def test_weights_compile(target: str, form: str, request: pytest.FixtureRequest) -> None:
    process = "uninterpreted_amd" if target == "gfx942" else "uninterpreted"
    assert request.getfixturevalue(process)(compiled, target, form) == [True] * 4
