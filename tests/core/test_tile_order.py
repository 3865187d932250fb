"""The order of tiles as functions of Python: recorded orders, permutations, and the same order as
the kernels'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tmm_triton.blocks import tile_of
from tmm_triton.naive import Naive
from tmm_triton.split_k import SplitK
from tmm_triton.tiled import FusedEpilogue, Grouped

from tmm_core import Epilogue
from tmm_core.spec.device import interpreting
from tmm_core.tools.commands.tile_order import memory_bytes, order, waves

interpreted = pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted here")


def numbers(rows: int, columns: int, group: int) -> list[list[int]]:
    """Which program computes each tile."""
    found = [[-1] * columns for _ in range(rows)]
    for program, (row, column) in enumerate(order(rows, columns, group)):
        found[row][column] = program
    return found


def test_orders_of_five_by_four_tiles() -> None:
    assert numbers(5, 4, 1) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
        [16, 17, 18, 19],
    ]
    assert numbers(5, 4, 3) == [
        [0, 3, 6, 9],
        [1, 4, 7, 10],
        [2, 5, 8, 11],
        [12, 14, 16, 18],
        [13, 15, 17, 19],
    ]
    assert numbers(5, 4, 8) == [[column * 5 + row for column in range(4)] for row in range(5)]


def test_a_wave_reads_its_rows_and_columns() -> None:
    first = [waves(9, 9, group, 9)[0] for group in (1, 3)]
    assert first == [({0}, {*range(9)}), ({0, 1, 2}, {0, 1, 2})]


def test_every_order_is_a_permutation() -> None:
    for rows in range(1, 13):
        for columns in range(1, 13):
            tiles = [(m, n) for m in range(rows) for n in range(columns)]
            for group in (1, 2, 3, 5, 8, 12, 64):
                assert sorted(order(rows, columns, group)) == tiles
                assert len(waves(rows, columns, group, 7)) == -(-len(tiles) // 7)


def test_bytes() -> None:
    run = waves(4, 4, 2, 4)
    assert memory_bytes(run, row_bytes=10, column_bytes=100) == 4 * (2 * 10 + 2 * 100)
    # An L2 that holds all reads all once.
    assert memory_bytes(run, 10, 100, l2=10_000) == 4 * 10 + 4 * 100
    # One that holds a wave's two columns and two rows keeps the rows of a band.
    assert memory_bytes(run, 10, 100, l2=220) == 4 * 10 + 8 * 100


@triton.jit
def record(out_ptr, M, N, GROUP_M, COUNT: tl.constexpr):
    pid = tl.minimum(tl.arange(0, COUNT), M * N - 1)
    tile_m, tile_n = tile_of(pid, M, N, 1, 1, GROUP_M)
    tl.store(out_ptr + tl.arange(0, COUNT), tile_m * N + tile_n)


@interpreted
def test_the_order_equals_the_kernels() -> None:
    for rows, columns in ((1, 1), (5, 4), (4, 5), (9, 9), (7, 12), (12, 3)):
        for group in (1, 2, 3, 8, 64):
            count = triton.next_power_of_2(rows * columns)
            out = torch.zeros(count, dtype=torch.int32)
            record[(1,)](out, rows, columns, group, count)
            wanted = [row * columns + column for row, column in order(rows, columns, group)]
            assert out[: rows * columns].tolist() == wanted


@triton.jit
def program(z):
    return z * 0 + tl.program_id(0)


@interpreted
@pytest.mark.parametrize(
    ("kernel", "more", "group"),
    [
        (Naive(), {}, 1),
        (Grouped(), {"GROUP_M": 3}, 3),
        (FusedEpilogue(), {"GROUP_M": 2, "SUBTILE": 1}, 2),
        (SplitK(), {"SPLIT_K": 1, "SWAP": False}, 5),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_each_kernel_computes_the_tile_that_its_anatomy_says(
    kernel: Any, more: dict[str, Any], group: int
) -> None:
    """Shown by an epilogue that returns the number of its program."""
    import tmm_core

    tile = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "num_stages": 2, "num_warps": 4}
    config = kernel.config_type(**tile, **more)
    a, b = torch.zeros(5 * 16 - 3, 16), torch.zeros(16, 4 * 16)
    who = Epilogue("program", lambda z: z, device=program)
    problem = tmm_core.problem(a, b, epilogue=who)
    assert kernel.anatomy(problem, config).group_m == group
    out = kernel.bind(problem, config)(a, b, None, None, 1.0, None)
    found = [[int(out[m * 16, n * 16]) for n in range(4)] for m in range(5)]
    assert found == numbers(5, 4, group)
