from __future__ import annotations

import pytest
import torch
from tmm_example.gemv import Gemv, GemvConfig

import tmm_core
from tmm_core.testing import KernelConformance


class TestGemv(KernelConformance):
    kernel = Gemv()
    size = (3, 48, 80)
    sizes = (
        (1, 37, 43),
        (2, 64, 128),
        (3, 1, 40),
        (4, 17, 1),
        (1, 1, 1),
        (4, 33, 5),
        (1, 24, 1030),
        (2, 300, 7),
    )


def test_more_rows_are_declined() -> None:
    with pytest.raises(RuntimeError, match="for 1 to 4 rows, these are 5"):
        tmm_core.matmul(torch.randn(5, 8), torch.randn(8, 8), kernel="example.gemv")


@pytest.mark.parametrize("fields", [{"BLOCK_N": 0}, {"BLOCK_K": 48}, {"num_warps": 32}])
def test_a_config_out_of_bounds_is_none(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be a power of two"):
        GemvConfig(**{"BLOCK_N": 16, "BLOCK_K": 16, "num_warps": 4, **fields})
