"""Overlapping tiles, some of them cut along K: an element that two tiles store must have the same
sum in both."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton.experimental.gluon")

from test_warp_specialized import BF16, H200, KERNEL, computed, problem
from tmm_triton.hopper import search_space, tile_shapes
from tmm_triton.hopper.config import WarpSpecializedConfig

from tmm_core import Operand, Problem

WIDE = problem(300, 13824, 5120)


def starts(problem: Problem, config: WarpSpecializedConfig) -> list[tuple[int, int]]:
    """The first row and column of each tile in order, as ``_tile`` and ``_moved`` compute them."""
    rows, columns = -(-problem.m // config.BLOCK_M), -(-problem.n // config.BLOCK_N)

    def moved(start: int, size: int, block: int, contiguous: bool) -> int:
        latest = size - block
        latest = -(-latest // 16) * 16 if contiguous else latest
        return max(min(start, latest), 0)

    found = []
    for index in range(rows * columns):
        first = index // (config.GROUP_M * columns) * config.GROUP_M
        height = min(rows - first, config.GROUP_M)
        within = index % (config.GROUP_M * columns)
        row, column = first + within % height, within // height
        found.append((
            moved(row * config.BLOCK_M, problem.m, config.BLOCK_M, problem.a.layout == "col"),
            moved(column * config.BLOCK_N, problem.n, config.BLOCK_N, True),
        ))  # fmt: skip
    return found


def stored_unlike(problem: Problem, config: WarpSpecializedConfig) -> int:
    """The number of elements that both a cut tile and a whole one store."""
    tail = tile_shapes.tail_tiles(problem, config)
    by_cut, by_whole = (np.zeros((problem.m, problem.n), bool) for _ in range(2))
    for index, (row, column) in enumerate(starts(problem, config)):
        into = by_cut if index < tail else by_whole
        into[row : row + config.BLOCK_M, column : column + config.BLOCK_N] = True
    assert (by_cut | by_whole).all()
    return int((by_cut & by_whole).sum())


def test_no_element_is_stored_by_a_cut_tile_and_a_whole_one() -> None:
    draw = random.Random(0)
    kept = refused = 0
    for _ in range(400):
        m, n = draw.randint(65, 700), 8 * draw.randint(100, 1200)
        instance = problem(m, n, 4096, "t" + draw.choice("nt") if draw.random() < 0.3 else "nt")
        if instance.a.layout == "col":
            instance = dataclasses.replace(instance, m=-(-m // 8) * 8)
        tile = draw.choice([t for t in search_space._TILES if t[0] == "pingpong" or t[1] < 3])
        config = dataclasses.replace(
            search_space._fitted(instance, tile)[0],
            GROUP_M=draw.choice((1, 2, 4, 8, 16)), tail_splits=draw.choice((2, 3, 4)),
        )  # fmt: skip
        adapted = tile_shapes.adapted(instance, config)
        if adapted.tail_splits > 1:
            kept += 1
            assert stored_unlike(instance, adapted) == 0, (str(instance), str(adapted))
            tail = tile_shapes.tail_tiles(instance, adapted)
            assert tail * adapted.tail_splits <= H200.sm_count
            assert tail >= tile_shapes.tile_count(instance, adapted) % H200.sm_count
            # The whole tiles take no more waves than before.
            count = tile_shapes.tile_count(instance, adapted)
            assert -(-(count - tail) // H200.sm_count) <= count // H200.sm_count
        else:
            refused += 1
    assert kept > 50
    assert refused > 50


def test_tiles_whose_overlap_would_be_summed_differently_are_not_cut() -> None:
    config = next(c for c in KERNEL.configs(WIDE) if c.tail_splits > 1)
    assert stored_unlike(WIDE, config) == 0
    # In bands of four rows a column of five tiles is divided, and the last begins in the fourth.
    bands = dataclasses.replace(config, GROUP_M=4)
    assert tile_shapes.adapted(WIDE, bands).tail_splits == 1
    assert stored_unlike(WIDE, bands) > 0
    # All tiles of a partial wave are cut, or only a part of the last column.
    for n, splits in ((1000, 4), (13816, 4)):
        instance = problem(300, n, 5120)
        adapted = tile_shapes.adapted(instance, dataclasses.replace(config, tail_splits=splits))
        assert adapted.tail_splits == 1 or stored_unlike(instance, adapted) == 0
    # Only columns overlap, and fewer than two columns of tiles stay whole.
    across = problem(config.BLOCK_M, 1000, 5120)
    assert tile_shapes.room_for_splits(across, config) == 1
    assert tile_shapes.room_for_splits(dataclasses.replace(across, n=1024), config) > 1
    assert tile_shapes.adapted(dataclasses.replace(WIDE, batch=2), config).tail_splits == 1
    fixed = dataclasses.replace(WIDE, batch_invariant=True)
    assert tile_shapes.adapted(fixed, config).tail_splits == 1


def test_few_rows_by_wide_weights_have_cut_tiles() -> None:
    """162, 324 or 270 whole tiles take two or three waves of 132 SMs; cut ones take 1.25 and so on.
    On an H200 cuBLAS takes 82 µs, and whole tiles of one product take 92."""
    for m in (150, 200, 300, 380):
        cut = [c for c in KERNEL.configs(problem(m, 13824, 5120)) if c.tail_splits > 1]
        assert len(cut) >= 1, m
    first = next(config for config in KERNEL.configs(WIDE) if not config.narrow)
    assert first.tail_splits > 1


@pytest.mark.parametrize("early", ["", "b"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_overlapping_tiles_cut_in_the_model(layout: str, early: str) -> None:
    ways: list[dict[str, Any]] = [{"consumers": 1}, {"consumers": 2, "pingpong": True}]
    for seed, way in enumerate(ways * 3):
        # 5 rows in tiles of 2, 14 columns in tiles of 4: the last tiles begin inside others.
        out, expected = computed(
            seed, m=5, n=14, k=16, programs=8, splits=2, layout=layout, early=early, **way
        )
        np.testing.assert_allclose(out, expected)


def test_tiles_that_are_stored_by_pointers_do_not_overlap() -> None:
    problem = dataclasses.replace(WIDE, n=13823, out=Operand(BF16, aligned=False))
    config = next(c for c in KERNEL.configs(WIDE) if c.tail_splits > 1)
    assert tile_shapes.adapted(problem, dataclasses.replace(config, GROUP_M=1)).tail_splits > 1


if __name__ == "__main__":
    for config in KERNEL.configs(WIDE):
        print(round(KERNEL.estimate_us(WIDE, config), 1), config)
