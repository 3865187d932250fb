"""Offsets beyond 2³¹ elements, in memory that is mapped but hardly touched. An index may also name
fewer or more rows than there are products."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch

import tmm_core

pytest.importorskip("triton")

GROUPED = ("triton.ragged", "blas")
DENSE = ("triton.naive", "triton.grouped", "triton.split_k", "triton.fused_epilogue",
         "triton.persistent", "triton.realigned")  # fmt: skip
#: The last of 40 rows this far apart begins 808 elements beyond 2³¹. A multiple of 16 bytes.
STEP = 55_063_704


@pytest.fixture(scope="module")
def memory() -> torch.Tensor:
    """4.3 GB of fp16 zeros; memory is taken for the pages that are written."""
    size = 2 * (39 * STEP + 256)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        pages = mmap.mmap(-1, size, flags=flags)
    except OSError:
        pytest.skip("no 4.3 GB of address space")
    return torch.frombuffer(pages, dtype=torch.float16)


def spread(memory: torch.Tensor, values: torch.Tensor, first: int = 0) -> torch.Tensor:
    """``values`` with rows ``STEP`` elements apart."""
    return memory.as_strided(values.shape, (STEP, 1), first).copy_(values)


def close(y: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(y.float(), expected.float(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("which", ["a", "b", "b transposed", "residual", "out"])
@pytest.mark.parametrize("kernel", DENSE)
@pytest.mark.slow(quick=6)
def test_rows_beyond_32_bits(kernel: str, which: str, memory: torch.Tensor) -> None:
    a, b, residual = (torch.randn(shape).half() for shape in ((40, 64), (64, 32), (40, 32)))
    expected = a.float() @ b.float() + residual.float()
    out = torch.empty(40, 32).half()
    if which == "a":
        a = spread(memory, a)
    elif which == "b":
        b, a = spread(memory, b[:40]), a[:, :40].contiguous()
        expected = a.float() @ b.float() + residual.float()
    elif which == "b transposed":
        b, residual = spread(memory, torch.randn(40, 64).half()).mT, torch.randn(40, 40).half()
        expected, out = a.float() @ b.float() + residual.float(), torch.empty(40, 40).half()
    elif which == "residual":
        residual = spread(memory, residual)
    else:
        out = spread(memory, out)
    if kernel == "triton.realigned":
        if which not in ("a", "b"):
            pytest.skip("copies a and b alone")
        a, b = (spread(memory, t.clone(), 1) if t.stride(0) == STEP else t for t in (a, b))
    tmm_core.matmul(a, b, residual=residual, out=out, kernel=kernel)
    close(out, expected)


@pytest.mark.parametrize("along", ["m", "n", "k"])
@pytest.mark.parametrize("kernel", GROUPED)
def test_groups_beyond_32_bits(kernel: str, along: str, memory: torch.Tensor) -> None:
    offs = torch.tensor([7, 7, 40], dtype=torch.int32)
    ranges = [slice(0, 7), slice(7, 7), slice(7, 40)]
    wide = spread(memory, torch.randn(40, 64).half())
    if along == "m":
        a, b = wide, torch.randn(3, 64, 16).half()
        parts = [a[r].float() @ b[g].float() for g, r in enumerate(ranges)]
        expected = torch.cat(parts)
    elif along == "n":
        a, b = torch.randn(3, 16, 64).half(), wide.mT
        expected = torch.cat([a[g].float() @ b[:, r].float() for g, r in enumerate(ranges)], 1)
    else:
        a, b = wide.mT, torch.randn(40, 16).half()
        expected = torch.stack([a[:, r].float() @ b[r].float() for r in ranges])
    close(tmm_core.grouped_matmul(a, b, offs=offs, kernel=kernel), expected)


@pytest.mark.parametrize("kernel", GROUPED)
@pytest.mark.slow
def test_a_batch_beyond_32_bits(kernel: str, memory: torch.Tensor) -> None:
    if kernel == "triton.ragged":
        kernel = "triton.naive"
    a, b = torch.randn(40, 8, 32).half(), torch.randn(40, 32, 8).half()
    wide = memory.as_strided(a.shape, (STEP, 32, 1)).copy_(a)
    close(tmm_core.matmul(wide, b, kernel=kernel), a.float() @ b.float())


# -- rows that an index names ------------------------------------------------------------


def gathered(
    kernel: str, rows: int, index: list[int], ends: list[int], k: int = 32, **given: Any
) -> None:
    """A product of rows ``index`` of ``a`` in groups that end at ``ends``."""
    a, b = torch.randn(rows, k), torch.randn(len(ends), k, 24)
    column_major = given.pop("column_major", False)
    if column_major:
        a = a.mT.contiguous().mT
    offs = torch.tensor(ends, dtype=torch.int32)
    chosen = torch.tensor(index, dtype=given.pop("dtype", torch.int64))
    y = tmm_core.grouped_matmul(a, b, offs=offs, a_index=chosen, kernel=kernel, **given)
    starts = [0, *ends[:-1]]
    parts = [a[index[s:e]] @ b[g] for g, (s, e) in enumerate(zip(starts, ends, strict=True))]
    expected = torch.cat(parts)
    if "out_index" in given:
        expected = torch.empty_like(expected).index_copy_(0, given["out_index"].long(), expected)
    if "residual" in given:
        expected = expected + given["residual"]
    torch.testing.assert_close(y[: len(expected)], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize(
    ("rows", "index", "ends"),
    [
        (10, [5], [0, 1, 1]),  # one product of one of many rows
        (10, [9], [1]),  # one group
        (200, [199], [1, 1]),
        (10, [3, 3], [0, 2]),
        (2, [1], [1]),
        (1, [0, 0, 0], [1, 2, 3]),  # many products of one row
        (1, [0] * 40, [7, 40]),
        (1, [0], [1]),
        (3, [2, 0, 1, 2, 2], [5, 5]),
    ],
)
@pytest.mark.parametrize("kernel", GROUPED)
@pytest.mark.slow(quick=8)
def test_few_products_of_many_rows_and_many_of_few(
    kernel: str, rows: int, index: list[int], ends: list[int], column_major: bool
) -> None:
    for dtype, k in ((torch.int32, 32), (torch.int64, 33), (torch.int64, 1)):
        gathered(kernel, rows, index, ends, k, dtype=dtype, column_major=column_major)


@pytest.mark.parametrize("kernel", GROUPED)
def test_one_row_scattered_or_with_a_residual(kernel: str) -> None:
    gathered(kernel, 10, [7], [1], out_index=torch.tensor([0]))
    gathered(kernel, 10, [7, 2], [1, 2], out_index=torch.tensor([1, 0], dtype=torch.int32))
    gathered(kernel, 10, [7], [0, 1], residual=torch.randn(1, 24))
    gathered(kernel, 10, [7], [1], out_weights=torch.ones(1), residual=torch.randn(1, 24))


@pytest.mark.parametrize("kernel", GROUPED)
def test_the_only_row_may_have_any_stride(kernel: str) -> None:
    a = torch.randn(32).as_strided((1, 32), (2**40, 1))
    b, offs = torch.randn(2, 32, 8), torch.tensor([1, 3], dtype=torch.int32)
    y = tmm_core.grouped_matmul(a, b, offs=offs, a_index=torch.zeros(3).long(), kernel=kernel)
    torch.testing.assert_close(y, torch.cat([a @ b[0], a @ b[1], a @ b[1]]))
