"""Configs up to their limits, and the first ones beyond them."""

from __future__ import annotations

from typing import Any

import pytest
from tmm_triton.hopper.config import WarpSpecializedConfig
from tmm_triton.naive import Naive
from tmm_triton.operands import TileConfig
from tmm_triton.packed.mixed_input_config import MixedInputConfig
from tmm_triton.persistent import PersistentConfig
from tmm_triton.realigned import RealignedConfig
from tmm_triton.skinny import SkinnyConfig
from tmm_triton.split_k import SplitKConfig
from tmm_triton.streaming import StreamingConfig
from tmm_triton.tiled import FusedEpilogueConfig, GroupedConfig

TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_stages": 3, "num_warps": 4}
FUSED = {**TILE, "GROUP_M": 8, "SUBTILE": 1}
SPLIT = {**TILE, "SPLIT_K": 4, "SWAP": False}
SKINNY = {"BLOCK_M": 8, "BLOCK_N": 16, "BLOCK_K": 512, "num_stages": 2, "num_warps": 4}
STREAMING = {"BLOCK_M": 8, "BLOCK_N": 32, "BLOCK_K": 256, "num_stages": 2, "num_warps": 4}
MIXED = {
    "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_stages": 4, "consumers": 2, "splits": 1,
}  # fmt: skip
HOPPER = {
    "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_stages": 4,
    "schedule": "cooperative", "consumers": 2, "num_warps": 4, "subtiles": 1, "tail_splits": 1,
    "splits": 1, "evict_first": False,
}  # fmt: skip
PINGPONG = {"schedule": "pingpong", "BLOCK_M": 64}
THREE = {"consumers": 3, "BLOCK_M": 192}

#: A config type, one of its configs, changes that the type accepts, and changes that it refuses.
LIMITS: list[tuple[type, dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        TileConfig, TILE,
        [
            *({name: size} for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K") for size in (16, 512)),
            {"num_stages": 1}, {"num_stages": 8}, {"num_warps": 1}, {"num_warps": 16},
        ],
        [
            *({name: size} for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K") for size in (8, 48, 1024)),
            {"num_stages": 0}, {"num_stages": 9}, {"num_warps": 3}, {"num_warps": 32},
        ],
    ),
    (
        GroupedConfig, {**TILE, "GROUP_M": 8}, [{"GROUP_M": 1}, {"GROUP_M": 64}],
        [{"GROUP_M": 0}, {"GROUP_M": 65}, {"BLOCK_M": 8}],
    ),
    (
        FusedEpilogueConfig, FUSED, [{"SUBTILE": 2}],
        [{"SUBTILE": 0}, {"SUBTILE": 3}, {"GROUP_M": 0}],
    ),
    (
        PersistentConfig, {**FUSED, "FLATTEN": False},
        [{"FLATTEN": True}, {"PARTS": 1}, {"PARTS": 64}, {"PARTS": 1, "FLATTEN": True}],
        [{"PARTS": 0}, {"PARTS": 65}, {"PARTS": 2, "FLATTEN": True}, {"SUBTILE": 3}],
    ),
    (
        SplitKConfig, SPLIT,
        [{"SPLIT_K": 1}, {"SPLIT_K": 512}, {"early": "wait"}, {"early": "b", "num_stages": 1}],
        [{"SPLIT_K": 0}, {"SPLIT_K": 513}, {"early": "b"}, {"early": "l2"}, {"num_stages": 9}],
    ),
    (
        SkinnyConfig, SKINNY,
        [
            {"BLOCK_M": 16}, {"BLOCK_N": 32}, {"BLOCK_K": 256}, {"BLOCK_K": 2048},
            {"BLOCK_K": 64, "num_warps": 1}, {"num_warps": 8}, {"num_stages": 1}, {"early": "b"},
        ],
        [
            {"BLOCK_M": 32}, {"BLOCK_N": 64}, {"BLOCK_K": 128}, {"BLOCK_K": 4096},
            {"num_warps": 16, "BLOCK_K": 2048}, {"num_stages": 3}, {"num_stages": 0},
            {"early": "b", "num_stages": 1}, {"BLOCK_K": 256, "num_warps": 8},
        ],
    ),
    (
        StreamingConfig, STREAMING,
        [
            {"BLOCK_M": 16}, {"BLOCK_N": 128}, {"BLOCK_K": 128, "num_warps": 1},
            {"BLOCK_K": 2048, "num_warps": 16}, {"early": "b"}, {"BLOCK_N": 16, "num_warps": 2},
            {"BLOCK_N": 128, "num_warps": 16},
        ],
        [
            {"BLOCK_M": 32}, {"BLOCK_N": 256}, {"BLOCK_K": 64}, {"BLOCK_K": 512, "num_warps": 2},
            {"num_stages": 1}, {"num_stages": 3}, {"num_warps": 8}, {"BLOCK_N": 16},
            {"early": "l2"}, {"num_warps": 0}, {"BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 3},
            {"BLOCK_K": 2048, "num_warps": 32},
        ],
    ),
    (
        MixedInputConfig, MIXED,
        [
            {"BLOCK_M": 16}, {"BLOCK_M": 256}, {"BLOCK_N": 256}, {"BLOCK_K": 128},
            {"num_stages": 2}, {"num_stages": 16}, {"splits": 64}, {"early": "wait"},
            {"consumers": 1}, {"consumers": 4, "BLOCK_N": 256}, {"k_ways": 2},
            {"BLOCK_M": 32, "arranged": True}, {"k_ways": 2, "BLOCK_N": 64},
        ],
        [
            {"BLOCK_M": 8}, {"BLOCK_M": 512}, {"BLOCK_N": 512}, {"BLOCK_K": 256},
            {"num_stages": 1}, {"num_stages": 17}, {"splits": 65}, {"splits": 0},
            {"consumers": 3}, {"consumers": 4}, {"k_ways": 2, "num_stages": 2},
            {"k_ways": 2, "num_stages": 5}, {"BLOCK_M": 64, "arranged": True}, {"k_ways": 4},
        ],
    ),
    (
        WarpSpecializedConfig, HOPPER,
        [
            PINGPONG, THREE, {"consumers": 1}, {"consumers": 1, "BLOCK_M": 64},
            {"num_warps": 8, "consumers": 1, "BLOCK_M": 256}, {"num_warps": 8, "consumers": 1},
            {"tail_splits": 4}, {"splits": 256}, {"ranges": 8, "BLOCK_N": 64},
            {"early": "wait"}, {"early": "l2"}, {"early": "b"}, {"evict_first": True},
            {"BLOCK_N": 32}, {"BLOCK_N": 144, "subtiles": 9}, {"BLOCK_K": 32}, {"BLOCK_K": 128},
            {"num_stages": 2}, {"num_stages": 16}, {"GROUP_M": 1}, {"GROUP_M": 1024},
            {"BLOCK_N": 80, "subtiles": 5}, {"BLOCK_N": 192, "subtiles": 3}, {"subtiles": 8},
            {"BLOCK_N": 256}, {**THREE, "BLOCK_N": 256},
            {"BLOCK_M": 256, "BLOCK_N": 192, "subtiles": 3},
            {**THREE, "ranges": 2}, {"ranges": 2, "BLOCK_N": 192, "subtiles": 3},
        ],
        [
            {"schedule": "x"}, {**PINGPONG, "consumers": 1}, {**PINGPONG, "consumers": 3},
            {"consumers": 4, "BLOCK_M": 256}, {"consumers": 0}, {"num_warps": 2},
            {**THREE, "num_warps": 8, "BLOCK_M": 384}, {"tail_splits": 0}, {"tail_splits": 5},
            {"splits": 0}, {"splits": 257}, {"splits": 2, "tail_splits": 2}, {"ranges": 0},
            {"ranges": 9, "BLOCK_N": 64}, {"ranges": 2, "splits": 2, "BLOCK_N": 64},
            {"ranges": 2, "tail_splits": 2, "BLOCK_N": 64}, {"early": "a"}, {"evict_first": 1},
            {**THREE, "BLOCK_M": 128}, {"consumers": 1, "BLOCK_M": 192, "BLOCK_N": 64},
            {"BLOCK_M": 64}, {"BLOCK_M": 96}, {"num_warps": 8},
            {"num_warps": 8, "consumers": 1, "BLOCK_M": 64, "BLOCK_N": 64},
            {"BLOCK_N": 64, "BLOCK_K": 16}, {"BLOCK_N": 112}, {"BLOCK_K": 256},
            {"BLOCK_N": 144, "subtiles": 9, "BLOCK_K": 32}, {"num_stages": 1}, {"num_stages": 17},
            {"BLOCK_N": 144, "subtiles": 9, "tail_splits": 2}, {"GROUP_M": 0}, {"GROUP_M": 1025},
            {"subtiles": 0}, {"subtiles": 16}, {"subtiles": 3}, {"BLOCK_N": 144, "subtiles": 1},
            {"BLOCK_M": 256, "BLOCK_N": 256}, {"ranges": 2, "BLOCK_N": 256},
            {**THREE, "ranges": 2, "BLOCK_N": 160, "subtiles": 5},
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "base", "accepted", "refused"), LIMITS, ids=[limits[0].__name__ for limits in LIMITS]
)
def test_a_config_is_accepted_up_to_its_limits(
    kind: Any, base: dict[str, Any], accepted: list[dict[str, Any]], refused: list[dict[str, Any]]
) -> None:
    for change in ({}, *accepted):
        fields = {**base, **change}
        config = kind(**fields)
        assert {name: getattr(config, name) for name in fields} == fields
    for change in refused:
        with pytest.raises(ValueError, match=r"."):
            print(change, kind(**{**base, **change}))


def test_a_realigned_config_is_one_of_its_inner_kernel() -> None:
    tile = Naive().config_type
    with pytest.raises(ValueError, match=r"must be one of|takes no"):
        RealignedConfig(inner="triton.naive", config=tile(**TILE))
    with pytest.raises(ValueError, match="takes no TileConfig"):
        RealignedConfig(inner="triton.persistent", config=TileConfig(**TILE))
