"""Limits of the Triton kernels: addresses at the ends of operands, and estimates of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from test_skinny import DECODE
from test_triton_kernels import KERNELS, TILE, TOLERANCE, interpreted, problem_of
from tmm_triton.skinny import Skinny, SkinnyConfig
from tmm_triton.split_k import SplitK, SplitKConfig
from triton.runtime import interpreter

FP16 = torch.float16
#: Elements before and after an operand that nobody may touch.
MARGIN = 4096


class Fences:
    """Operands, and the accesses beside them that the interpreter made."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.memory: list[torch.Tensor] = []
        self.stray: list[str] = []

    def matrix(self, rows: int, columns: int, dtype: torch.dtype = FP16) -> torch.Tensor:
        """A matrix whose rows start at multiples of 16 bytes and whose last ends its memory."""
        vector = 16 // dtype.itemsize
        stride = -(-columns // vector) * vector
        count = (rows - 1) * stride + columns
        memory = torch.full((MARGIN + count + MARGIN,), float("nan"), dtype=dtype)
        self.memory.append(memory)
        view = memory[MARGIN:].as_strided((rows, columns), (stride, 1))
        view.normal_(generator=torch.Generator().manual_seed(rows + columns))
        self.ranges.append((view.data_ptr(), view.data_ptr() + count * dtype.itemsize))
        return view

    def check(self, kind: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses, inside = np.broadcast_arrays(pointers.data, mask)
        touched = addresses[inside.astype(bool)].astype(np.int64)
        for start, end in self.ranges:
            far = MARGIN * 2
            near = (touched > start - far) & (touched < end + far)
            if (near & ((touched < start) | (touched + size > end))).any():
                self.stray.append(kind)


@pytest.fixture
def fences(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fences]:
    made, builder = Fences(), interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def loading(self: Any, ptrs: Any, mask: Any, *rest: Any, **hints: Any) -> Any:
        made.check("load", ptrs, mask.data)
        return load(self, ptrs, mask, *rest, **hints)

    def storing(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **hints: Any) -> Any:
        made.check("store", ptrs, mask.data)
        return store(self, ptrs, value, mask, *rest, **hints)

    monkeypatch.setattr(builder, "create_masked_load", loading)
    monkeypatch.setattr(builder, "create_masked_store", storing)
    yield made
    assert not made.stray, f"{made.stray[0]} beside an operand"


AHEAD = SplitKConfig(**TILE | {"num_stages": 1}, SPLIT_K=3, SWAP=True)
CONFIGS = [*KERNELS.items(), (SplitK(), AHEAD), (SplitK(), replace(AHEAD, SPLIT_K=1))]


@interpreted
@pytest.mark.parametrize("size", [(37, 29, 51), (33, 16, 48), (1, 40, 16)], ids=str)
@pytest.mark.parametrize(("kernel", "config"), CONFIGS, ids=lambda of: getattr(of, "name", ""))
def test_nothing_is_touched_beside_an_operand(
    kernel: Any, config: Any, size: tuple[int, int, int], fences: Fences
) -> None:
    """Not even what is never used: the next page may not be there."""
    m, n, k = size
    a, b = fences.matrix(m, k), fences.matrix(k, n)
    out, residual = fences.matrix(m, n), fences.matrix(m, n)
    problem = problem_of(a, b, out, residual=residual)
    kernel.bind(problem, config)(a, b, None, residual, 1.0, out)
    expected = a.double() @ b.double() + residual.double()
    assert (out.double() - expected).norm() < TOLERANCE[FP16] * expected.norm()


@interpreted
def test_the_fences_are_seen(fences: Fences) -> None:
    """A kernel that believes in one more row reads it."""
    a, b, out = fences.matrix(4, 16), fences.matrix(16, 16), fences.matrix(4, 16)
    kernel, config = next(iter(KERNELS.items()))
    problem = replace(problem_of(a, b, out), m=5)
    kernel.bind(problem, config)(a, b, None, None, 1.0, out)
    assert {*fences.stray} == {"load", "store"}
    fences.stray.clear()


# -- estimates ----------------------------------------------------------------------------


def test_a_batch_fills_a_gpu_as_one_product_does() -> None:
    """Eight products of 512 columns read what one of 4096 does, by as many programs."""
    config = Skinny().configs(DECODE)[0]
    one = Skinny().estimate_us(DECODE, config)
    eight = Skinny().estimate_us(replace(DECODE, n=512, batch=8), config)
    assert one <= eight < 1.1 * one


def test_warps_that_sum_other_parts_have_another_arithmetic() -> None:
    def arithmetic(warps: int, step: int) -> str | None:
        config = SkinnyConfig(BLOCK_M=16, BLOCK_N=16, BLOCK_K=step, num_stages=2, num_warps=warps)
        return Skinny().arithmetic(DECODE, config)

    assert arithmetic(4, 512) != arithmetic(4, 1024)  # each warp sums 128 and 256 at a time
    assert arithmetic(2, 512) != arithmetic(4, 512)
    assert arithmetic(1, 256) == arithmetic(1, 512)  # one warp takes them all, in the same order
