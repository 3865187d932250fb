"""int8 weights compile, without a GPU, for Ampere, Hopper, Blackwell and an MI300; on Hopper tiles
of 64 rows or more are multiplied by ``wgmma``."""

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

WEIGHT = Operand(torch.int8, "col", format="int8", scale=Scale.parse("row"))


def compiled(target: str) -> list[bool]:
    device = TARGETS[target]
    decode = Problem(16, 4096, 4096, ROW, WEIGHT, ROW, device, bias=BF16)
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


@pytest.mark.parametrize("target", TARGETS)
def test_int8_weights_compile(target: str, request: pytest.FixtureRequest) -> None:
    process = "uninterpreted_amd" if target == "gfx942" else "uninterpreted"
    assert request.getfixturevalue(process)(compiled, target) == [True] * 4
