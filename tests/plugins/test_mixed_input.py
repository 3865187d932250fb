"""``triton.mixed_input`` without a Hopper GPU: its source on a model of the block, the problems it
declines, its proposals, and the compiled code. ``tests/gpu/test_mixed_input_gpu.py`` compares it
with fp64 on a GPU."""

from __future__ import annotations

import itertools
import math
import subprocess
import tempfile
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from hopper_block import Block, Descriptor, Pointer, Shared, run_block
from pairwise import share
from test_skinny import COL, DEVICES, ROW
from test_streaming import FP8, INT4, INT8, held
from test_word_programs import Machine, halves, twice, words
from tmm_triton import blocks, ragged, ragged_tiles, stream_k
from tmm_triton.operands import Zeros
from tmm_triton.packed import (
    decoding,
    mixed_input,
    mixed_input_consumer,
    mixed_input_kernel,
    tile_sums,
    transposed_tiles,
    work_units,
)
from tmm_triton.packed.mixed_input import MixedInput
from tmm_triton.packed.mixed_input_config import Constants, MixedInputConfig
from tmm_triton.pdl import FEW_ROWS
from tmm_triton.skinny import Skinny
from tmm_triton.split_k import SplitK
from tmm_triton.streaming import Streaming
from tmm_triton.tile_anatomy import usage
from tmm_triton.tiled import Grouped
from triton.backends.compiler import GPUTarget
from uninterpreted import Uninterpreted

from tmm_core import ConfigError, Groups, Kernel, Operand, Problem, Scale
from tmm_core.epilogues import parse
from tmm_core.triton import SEARCH_LIMITED

BF16, FP16 = torch.bfloat16, torch.float16
KERNEL = MixedInput()
PROBLEM = Problem(64, 4096, 4096, ROW, INT4, ROW, DEVICES[90])
FIELDS: dict[str, Any] = {
    "BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128, "num_stages": 4, "consumers": 2, "splits": 1,
}  # fmt: skip
MXFP4 = Operand(torch.uint8, "col", format="mxfp4", scale=Scale((1, 32), torch.uint8))
STREAM_K = {"stream_k": True, "n": 13, "programs": 3}
MODULES = (
    ragged_tiles, blocks, ragged, stream_k, work_units, decoding, tile_sums, mixed_input_consumer,
    mixed_input_kernel,
)  # fmt: skip


def reasons(problem: Problem) -> list[str]:
    # A machine without a GPU has no driver to build a launcher for.
    return [r for r in KERNEL.reasons_against(problem) if "driver" not in r]


def test_serves_packed_weights() -> None:
    small = replace(INT4, scale=Scale((1, 32), BF16))
    for weight in (INT4, INT8, FP8, MXFP4, small, replace(INT4, zero=torch.uint8)):
        for m in (1, 17, 300, 8192):
            assert not reasons(replace(PROBLEM, b=weight, m=m))
        assert not reasons(replace(PROBLEM, b=weight, epilogue=parse("swiglu"), bias=BF16))
        groups = Groups(8, "m", out_index=torch.int32, out_weights=torch.float32, zeroed=True)
        assert not reasons(replace(PROBLEM, b=weight, groups=groups))
    half = Operand(FP16)
    assert not reasons(replace(PROBLEM, a=half, out=half, n=4099, residual=half, bias=FP16))
    assert not reasons(replace(PROBLEM, b=replace(FP8, scale=Scale((128, 128)))))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"b": replace(INT4, scale=Scale((1, 96), BF16))},
            "groups of 96 are neither 32 values nor",
        ),
        (
            {"b": replace(INT4, scale=Scale((1, 32)))},
            "groups of 32 would be rounded to torch.bfl",
        ),
        ({"b": MXFP4, "a": Operand(FP16)}, "groups of 32 would be rounded to torch.float16"),
        (
            {"b": replace(INT4, scale=Scale((1, 32), BF16)), "out": Operand(torch.float32)},
            "groups of 32 would be rounded to torch.bfloat16",
        ),
        (
            {"b": replace(FP8, scale=Scale((1, 32))), "out": Operand(torch.float32)},
            "groups of 32 would be rounded to torch.bfloat16",
        ),
        ({"b": COL}, "is for packed weights"),
        ({"b": replace(INT4, layout="row")}, "b is row-major, not column-major"),
        ({"b": replace(INT4, aligned=False)}, "b is not aligned to 16 bytes"),
        ({"a": replace(ROW, aligned=False)}, "a is not aligned to 16 bytes"),
        ({"a": COL}, "a is column-major, not row-major"),
        ({"groups": Groups(4, "m", a_index=torch.int32)}, "TMA does not gather rows"),
        ({"device": DEVICES[80]}, "compute capability"),
    ],
)
def test_declines(change: dict[str, Any], reason: str) -> None:
    assert any(reason in given for given in reasons(replace(PROBLEM, **change)))


@pytest.mark.parametrize("m", [1, 64, 256, 4096])
def test_no_value_is_rounded_to_16_bits_for_an_fp32_result(m: int) -> None:
    wide = replace(PROBLEM, m=m, out=Operand(torch.float32))
    for scale in (Scale((1, 64), BF16), Scale((1, 128), BF16)):
        problem = replace(wide, b=replace(INT4, scale=scale))
        configs = KERNEL.configs(problem)
        assert configs
        assert not any(Constants.of(problem, config).SCALED for config in configs)
    assert not reasons(replace(wide, b=MXFP4))  # powers of two are exact


@pytest.mark.parametrize(
    "change",
    [
        {"BLOCK_M": 48}, {"BLOCK_K": 32}, {"num_stages": 1}, {"num_warps": 8}, {"consumers": 5},
        {"k_ways": 3}, {"k_ways": 2, "num_stages": 2}, {"k_ways": 2, "num_stages": 5},
        {"BLOCK_N": 64}, {"early": "b"}, {"splits": 0}, {"splits": 2, "stream_k": True},
        {"BLOCK_M": 96, "k_ways": 2},
    ],
)  # fmt: skip
def test_config_bounds(change: dict[str, Any]) -> None:
    assert MixedInputConfig.from_json(FIELDS) == MixedInputConfig(**FIELDS)
    with pytest.raises(ConfigError):
        MixedInputConfig.from_json(FIELDS | change)


@pytest.mark.parametrize("m", [1, 17, 64, 80, 100, 256, 4096])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weight", [INT4, INT8, replace(FP8, scale=Scale((128, 128)))])
def test_proposals_fit_the_gpu(m: int, gated: bool, weight: Operand) -> None:
    for n, k in ((4096, 4096), (28672, 4096), (4096, 14336), (40, 256)):
        problem = replace(PROBLEM, m=m, n=n, k=k, b=weight)
        problem = replace(problem, epilogue=parse("swiglu")) if gated else problem
        configs = KERNEL.configs(problem)
        assert configs
        for config in configs:
            assert config.shared_memory(problem) <= 232448
            assert config.k_ways * config.splits * config.BLOCK_K <= k
            assert KERNEL.workspace_bytes(problem, config) <= 2**27
        estimates = [KERNEL.estimate_us(problem, c) for c in configs]
        assert estimates == sorted(estimates)
        assert {c.early for c in configs} == {"wait" if m <= FEW_ROWS else ""}
        assert len(configs) <= 8


@pytest.mark.parametrize(
    ("kernel", "m", "weight"),
    [
        (KERNEL, 1, INT4), (KERNEL, 64, INT4), (KERNEL, 160, INT4), (Streaming(), 1, INT4),
        (Streaming(), 16, INT8),
        (Skinny(), 4, COL), (SplitK(), 16, COL), (Grouped(), 4096, COL),
    ],
)  # fmt: skip
def test_an_exhaustive_search_gets_every_tile(kernel: Kernel[Any], m: int, weight: Operand) -> None:
    problem = replace(PROBLEM, m=m, b=weight)
    limited = kernel.configs(problem)
    token = SEARCH_LIMITED.set(False)
    try:
        every = kernel.configs(problem)
    finally:
        SEARCH_LIMITED.reset(token)
    assert set(limited) < set(every)
    assert len(set(every)) == len(every)
    assert all(config.shared_memory(problem) <= 232448 for config in every)
    assert all(config.num_warps <= 8 for config in every)


@pytest.mark.parametrize("m", [1, 30, 64, 300])
@pytest.mark.parametrize(("group", "k"), [(64, 64), (64, 1216), (192, 192), (128, 128)])
def test_small_groups_and_sums_have_configs(group: int, k: int, m: int) -> None:
    problem = replace(PROBLEM, m=m, k=k, b=replace(INT4, scale=Scale((1, group), BF16)))
    for invariant in (False, True):
        configs = KERNEL.configs(replace(problem, batch_invariant=invariant))
        assert configs
        assert all(group % config.BLOCK_K == 0 for config in configs)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({}, {"b": replace(INT4, scale=Scale((1, 64), BF16))}, "several groups of 64"),
        ({"BLOCK_N": 256}, {"epilogue": parse("swiglu")}, "128 columns of gate and up"),
        ({"splits": 2}, {"epilogue": parse("swiglu")}, "splits a gated"),
        ({"splits": 2}, {"groups": Groups(4, "m")}, "splits a gated or grouped"),
        ({"k_ways": 2, "BLOCK_N": 64}, {"k": 128}, "more parts than steps"),
    ],
)
def test_configs_that_do_not_suit_the_problem(
    config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        KERNEL.builds(replace(PROBLEM, **change), MixedInputConfig(**(FIELDS | config)))


def test_batch_invariant_mode_has_one_order_of_sums() -> None:
    orders = set()
    for m in (1, 16, 40, 64, 200, 3000):
        problem = replace(PROBLEM, m=m, batch_invariant=True)
        orders |= {KERNEL.arithmetic(problem, c) for c in KERNEL.configs(problem)}
    assert len(orders) == 1
    assert None not in orders


def test_tiles_that_round_values_have_another_order_of_sums() -> None:
    wide = {"BLOCK_M": 256, "BLOCK_K": 64}
    few, many = (MixedInputConfig(**(FIELDS | {"BLOCK_K": 64} | more)) for more in ({}, wide))
    assert KERNEL.arithmetic(PROBLEM, few) != KERNEL.arithmetic(PROBLEM, many)
    plain = replace(PROBLEM, b=INT8)  # a scale for each row multiplies whole sums
    assert KERNEL.arithmetic(plain, few) == KERNEL.arithmetic(plain, many)


@pytest.mark.parametrize(
    ("change", "proposed"),
    [
        ({"n": 28672}, True), ({"n": 28672, "m": 16}, False), ({"n": 132 * 128}, False),
        ({"n": 28672, "batch_invariant": True}, False),
        ({"n": 28672, "groups": Groups(8, "m")}, False),
    ],
)  # fmt: skip
def test_stream_k_is_for_an_incomplete_last_wave(change: dict[str, Any], proposed: bool) -> None:
    configs = KERNEL.configs(replace(PROBLEM, **change))
    assert any(config.stream_k for config in configs) is proposed


@pytest.mark.parametrize(
    ("m", "groups", "heights"),
    [
        (1, None, {16}), (33, None, {64}), (65, None, {64, 80}), (81, None, {64, 80, 96}),
        (200, None, {64, 80, 96, 128, 160, 192, 256}), (4000, 40, {64, 128, 256}),
        (60, 4, {16, 32, 64}), (260, 4, {64, 128, 256}),
    ],
)  # fmt: skip
def test_one_tile_has_all_rows_if_it_can(m: int, groups: int | None, heights: set[int]) -> None:
    """Few rows are not divided. Groups have more rows than the mean, and tiles of one part."""
    problem = replace(PROBLEM, m=m, groups=groups and Groups(groups, "m"))
    token = SEARCH_LIMITED.set(False)
    try:
        found = {config.BLOCK_M for config in KERNEL.configs(problem)}
    finally:
        SEARCH_LIMITED.reset(token)
    assert found == heights


@pytest.mark.parametrize("count", [1, 3, 130])
def test_each_block_has_a_table_of_all_groups(count: int) -> None:
    """Four bytes for each group: where its tiles begin."""
    grouped = replace(PROBLEM, groups=Groups(count, "m"))
    for config in KERNEL.configs(grouped):
        assert KERNEL.workspace_bytes(grouped, config) == 4 * PROBLEM.device.sm_count * count


def test_split_sums_have_a_place_for_every_part() -> None:
    config = MixedInputConfig(**FIELDS)
    for splits, parts in ((1, 0), (2, 2), (5, 5)):
        split = replace(config, splits=splits)
        assert KERNEL.workspace_bytes(PROBLEM, split) == 4 * parts * 64 * 4096


def test_stream_k_needs_more_tiles_than_blocks() -> None:
    config = MixedInputConfig(**FIELDS, stream_k=True)
    plain = replace(config, stream_k=False)
    wide, sms = replace(PROBLEM, n=28672), PROBLEM.device.sm_count
    assert KERNEL.workspace_bytes(wide, config) == sms * 2 * 4 * 64 * 64
    flags = KERNEL.builds(wide, config)[0].values["flags_ptr"]
    assert flags == Zeros(2 * sms)
    assert KERNEL.arithmetic(wide, config) is None
    whole = replace(wide, n=2 * sms * 128)
    for other in (PROBLEM, whole, replace(wide, groups=Groups(8, "m"))):
        assert Constants.of(other, config) == Constants.of(other, plain)
        assert KERNEL.arithmetic(other, config) == KERNEL.arithmetic(other, plain)
        assert "flags_ptr" not in KERNEL.builds(other, config)[0].values


def test_zero_points_are_not_multiplied_in_fp32() -> None:
    config = MixedInputConfig(**(FIELDS | {"BLOCK_M": 256, "BLOCK_K": 64}))
    eight = replace(INT8, scale=Scale((1, 128)))
    assert Constants.of(replace(PROBLEM, b=eight), config).SCALED == "wide"
    assert Constants.of(replace(PROBLEM, b=replace(eight, zero=torch.int8)), config).PROMOTED


@pytest.mark.parametrize(
    ("rows", "invariant", "cheap", "dear"),
    [
        (64, False, True, True), (80, False, False, True), (128, False, False, True),
        (128, True, True, True), (160, False, False, False),
    ],
)  # fmt: skip
def test_sums_of_a_step_are_scaled_in_few_rows_and_one_group(
    rows: int, invariant: bool, cheap: bool, dear: bool
) -> None:
    """Values are scaled in more rows, and where a step has several groups."""
    config = MixedInputConfig(**(FIELDS | {"BLOCK_M": rows, "BLOCK_K": 64}))
    wide = replace(INT8, scale=Scale((1, 128)))
    pair = replace(INT4, scale=Scale((1, 128), BF16))
    for weight, promoted in ((pair, cheap), (wide, dear), (MXFP4, False)):
        problem = replace(PROBLEM, b=weight, batch_invariant=invariant)
        c = Constants.of(problem, config)
        assert c.PROMOTED is promoted
        assert (c.SCALED is None) is promoted


@pytest.mark.parametrize(
    ("block", "columns", "along_k"), [((1, 0), 1, 0), ((1, 128), 1, 128), ((256, 128), 256, 128)]
)
def test_as_many_columns_share_a_scale_as_a_block_has(
    block: tuple[int, int], columns: int, along_k: int
) -> None:
    eight = replace(INT8, scale=Scale(block))
    constants = Constants.of(replace(PROBLEM, b=eight), MixedInputConfig(**FIELDS))
    shared = constants.OUTER, constants.GROUP
    assert shared == (columns, along_k)


@pytest.mark.parametrize("groups", [None, Groups(8, "m")])
def test_ends_of_groups_are_read_if_there_are_groups(groups: Groups | None) -> None:
    instance, config = replace(PROBLEM, b=INT8, groups=groups), MixedInputConfig(**FIELDS)
    main = KERNEL.builds(instance, config)[0]
    assert ("offs_ptr" in main.types) is (groups is not None)
    assert Constants.of(instance, config).RAGGED is (groups is not None)


@pytest.mark.parametrize(
    ("change", "stride"),
    [
        ({}, 4096), ({"epilogue": parse("swiglu")}, 8192), ({"b": INT4}, ("b_scale", 0)),
        ({"b": replace(INT8, scale=Scale.parse("tensor"))}, None),
    ],
)  # fmt: skip
def test_groups_are_so_many_scales_apart(change: dict[str, Any], stride: Any) -> None:
    instance = replace(PROBLEM, **{"b": INT8, "groups": Groups(8, "m"), **change})
    main = KERNEL.builds(instance, MixedInputConfig(**FIELDS))[0]
    assert {**main.values, **main.constants}["stride_bsz"] == stride


@pytest.mark.parametrize(
    ("change", "early", "found"),
    [
        ({}, "", set()),
        ({"b": replace(INT8, zero=torch.int8)}, "", {"ZERO"}),
        ({"groups": Groups(8, "m")}, "", {"RAGGED"}),
        ({"groups": Groups(8, "m", zeroed=True)}, "", {"RAGGED", "ZEROED"}),
        ({"groups": Groups(8, "m", out_index=torch.int64)}, "", {"RAGGED", "SCATTERED"}),
        ({}, "wait", {"OVERLAPS"}),
        ({"out": replace(ROW, aligned=False)}, "", {"not STORES_FOURS"}),
        ({"out": replace(ROW, dtype=torch.float32)}, "", {"not STORES_FOURS"}),
        ({"n": 258, "residual": ROW}, "", {"not STORES_FOURS"}),
        ({"n": 260, "residual": ROW}, "", {"ADDS_FOURS"}),
        ({"residual": COL}, "", set()),
        ({"residual": replace(ROW, aligned=False)}, "", set()),
        ({"residual": replace(ROW, dtype=torch.float32)}, "", set()),
    ],
)
def test_each_property_of_a_problem_is_a_constant(
    change: dict[str, Any], early: str, found: set[str]
) -> None:
    instance = replace(PROBLEM, **({"b": INT8} | change))
    constants = vars(Constants.of(instance, MixedInputConfig(**FIELDS, early=early)))
    names = {"ZERO", "RAGGED", "ZEROED", "SCATTERED", "OVERLAPS", "ADDS_FOURS"}
    kept = set() if constants["STORES_FOURS"] else {"not STORES_FOURS"}
    assert {name for name in names if constants[name]} | kept == found


@pytest.mark.parametrize("value", [BF16, FP16])
@pytest.mark.parametrize("zero", [None, "whole", "fraction"])
@pytest.mark.parametrize(
    "weight", [INT4, replace(INT4, format="int4_signed"), INT8], ids=["int4", "int4_signed", "int8"]
)
def test_the_program_decodes_pairs_less_their_zero_points(
    weight: Operand, zero: str | None, value: torch.dtype
) -> None:
    """The kernel reads ``PAIR`` bytes at a time, and passes minus the sum of zero point and
    ``OFFSET``."""
    dtype = {None: None, "whole": torch.uint8, "fraction": value}[zero]
    b, row = replace(weight, zero=dtype), Operand(value, "row")
    form = b.form
    assert form is not None
    c = Constants.of(replace(PROBLEM, a=row, b=b, out=row), MixedInputConfig(**FIELDS))
    stored = torch.arange(2 ** (8 * c.PAIR))
    given, number = {"$1": stored}, 0.0
    if zero is not None:
        number = 11.0 if zero == "whole" else 6.25
        given["$2"] = torch.full_like(stored, twice(-(number + c.OFFSET), value))
        number -= form.origin or 0  # with zero points, codes are not centred
    machine = Machine(given)
    machine.run(c.PROGRAM)
    bytes_of_pairs = words(stored).view(torch.uint8).unflatten(-1, (-1, 4))[:, : c.PAIR]
    codes = form.unpacked(bytes_of_pairs.contiguous().view(b.dtype))
    expected = form.dequantize(codes).double() - number
    assert torch.equal(halves(machine.registers["$0"], value), expected.to(value).double())


def test_k_may_be_shorter_than_a_step_that_is_not_divided() -> None:
    config = MixedInputConfig(**(FIELDS | {"BLOCK_K": 128, "splits": 1, "k_ways": 1}))
    assert Constants.of(replace(PROBLEM, b=INT8, k=64), config).BLOCK_K == 128
    with pytest.raises(ConfigError, match="more parts than steps"):
        Constants.of(replace(PROBLEM, b=INT8, k=255), replace(config, splits=2))
    assert Constants.of(replace(PROBLEM, b=INT8, k=256), replace(config, splits=2)).splits == 2


def all_constants(m: int, gated: bool) -> list[Constants]:
    """The constants of every proposal for weights of each format."""
    found = []
    for weight in (INT4, INT8, FP8, MXFP4, replace(INT4, zero=torch.uint8)):
        problem = replace(PROBLEM, m=m, b=weight)
        problem = replace(problem, epilogue=parse("swiglu")) if gated else problem
        found += [Constants.of(problem, config) for config in KERNEL.configs(problem)]
    return found


@pytest.mark.parametrize("m", [1, 64, 300])
def test_every_value_is_multiplied_by_one_scale(m: int) -> None:
    found = all_constants(m, gated=False)
    assert all((bool(c.ROW_SCALE), bool(c.SCALED), c.PROMOTED).count(True) == 1 for c in found)


@pytest.mark.parametrize("gated", [False, True])
def test_a_thread_holds_the_pairs_that_wgmma_reads_from_it(gated: bool) -> None:
    found = all_constants(64, gated) + all_constants(8, gated)
    for c in {(c.rows, c.wide, c.parts, c.arranged): c for c in found}.values():
        units = held(c.units)
        assert sorted(itertools.chain(*units.values())) == list(np.ndindex(c.rows, c.wide))
        for (warp, lane), places in units.items():
            assert {(row // 16 % 4, row % 8) for row, _ in places} == {(warp, lane // 4)}
            quarters = {k // (c.wide // 4) if c.arranged else k % 4 for _, k in places}
            assert quarters == {lane % 4}
        of_half = held(c.units_of_half)
        assert of_half == {
            thread: [place for place in places if place[0] < c.high]
            for thread, places in units.items()
        }
        along = c.wide // c.parts
        assert held(c.split_units) == {
            thread: [(row, k // along, k % along) for row, k in places]
            for thread, places in units.items()
        }


@pytest.mark.parametrize("step", [64, 128])
def test_a_warp_holds_each_value_of_the_rows_that_it_arranges_once(step: int) -> None:
    c = replace(next(c for c in all_constants(8, gated=False) if c.arranged), BLOCK_K=step)
    rows = held(c.a_rows)
    assert len(rows) == 32  # lanes
    assert sorted(itertools.chain(*rows.values())) == list(np.ndindex(c.at_once, step))
    for places in rows.values():
        # Four eighths of units of 16 bytes, of each quarter of a step one.
        units = {(row, k // 8) for row, k in places}
        assert len(places) == 8 * len(units)
        first = {(row, unit % (step // 32)) for row, unit in units}
        assert len(units) == 4 * len(first)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("height", [16, 64, 128])
def test_four_threads_store_a_sector_of_each_of_eight_rows(height: int, gated: bool) -> None:
    for high in {c.high: c for c in all_constants(64, gated)}:
        c = next(c for c in all_constants(64, gated) if c.high == high)
        by_thread = held(c.fours(height))
        assert sorted(itertools.chain(*by_thread.values())) == list(np.ndindex(height, high // 4))
        for warp, register in itertools.product(range(4), range(len(by_thread[0, 0]))):
            at = [by_thread[warp, lane][register] for lane in range(32)]
            assert len({row for row, _ in at}) == 8
            assert len({(row, four // 4) for row, four in at}) == 8
        # What the threads exchange stays in a warp.
        for layout in (c.pairs_of_rows(height), c.pairs_of_blocks(height)):
            pairs = held(layout)
            for warp in range(4):
                mine = {pairs[warp, lane][i] for lane in range(32) for i in range(len(pairs[0, 0]))}
                theirs = {place for lane in range(32) for place in by_thread[warp, lane]}
                assert {(row, pair // 2) for row, pair in mine} == theirs


class _Numbers(Block):
    """Integers in registers, or addresses."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else self.astype(dtype)


def _in_registers(asm: str, _constraints: str, args: list[np.ndarray], **_how: Any) -> Any:
    """Execute the inline assembly of stores by four: ``movmatrix`` or a move."""
    if asm.startswith("movmatrix"):
        # [blocks of 8 rows, t, columns]: lane 4 g + t has the elements 2 t and 2 t + 1 of row g.
        blocks, _, columns = args[0].shape
        halves = np.ascontiguousarray(args[0]).view(np.int16).reshape(blocks, 4, columns // 8, 8, 2)
        square = halves.transpose(0, 2, 3, 1, 4).reshape(blocks, columns // 8, 8, 8)
        turned = square.swapaxes(2, 3).reshape(blocks, columns // 8, 8, 4, 2)
        turned = np.ascontiguousarray(turned.transpose(0, 3, 1, 2, 4))
        return turned.view(np.int32).reshape(args[0].shape).view(_Numbers)
    half, whole = {"mov.b32": (np.int16, np.int32), "mov.b64": (np.int32, np.int64)}[asm[:7]]
    if len(args) == 2:
        return np.stack(args, -1).astype(half).view(whole)[..., 0].view(_Numbers)
    parts = np.ascontiguousarray(args[0]).view(half).reshape(*args[0].shape, 2)
    return parts[..., 0].view(_Numbers), parts[..., 1].view(_Numbers)


@pytest.mark.parametrize("scattered", [False, True])
def test_results_are_stored_and_residuals_loaded_by_four(scattered: bool) -> None:
    language = types.SimpleNamespace(
        constexpr=Any, int16=np.int16, int32=np.int32, int64=np.int64,
        convert_layout=lambda x, layout, **checks: x, inline_asm_elementwise=_in_registers,
        join=lambda a, b: np.stack((a, b), -1).view(_Numbers), SliceLayout=lambda axis, of: None,
        arange=lambda start, end, layout: np.arange(start, end), expand_dims=np.expand_dims,
        pointer_type=lambda dtype: dtype,
        load=lambda pointer, mask, other: np.where(mask, places[np.minimum(pointer, 29)], other),
    )  # fmt: skip
    names: dict[str, Any] = {"gl": language, "__builtins__": __builtins__}
    for name in ("_transposed", "fours", "of_fours", "fours_at"):
        code = getattr(transposed_tiles, name).fn.__code__
        names[name] = types.FunctionType(code, names, name)
    c = types.SimpleNamespace(
        high=64, fours=lambda height: None, pairs_of_rows=lambda height: None,
        pairs_of_blocks=lambda height: None,
    )  # fmt: skip
    random = np.random.default_rng()
    tile = random.integers(-(2**15), 2**15, (16, 64), dtype=np.int16).view(_Numbers)
    places = random.permutation(30)
    # Rows 20 to 29 of 30, and columns 128 to 163 of 164, are inside; a row has 176 elements.
    memory = np.full((30, 176), 7, np.int16)
    stored = names["fours"](tile, c)
    base = np.zeros(1, np.int64).view(_Numbers)
    index = base if scattered else None
    at, inside = names["fours_at"](base, 176, (0, 20, 30, 128), 164, index, 16, c)
    flat = memory.view(np.int64).reshape(-1)
    flat[at[inside]] = stored[inside]
    expected = np.full_like(memory, 7)
    rows = places[20:] if scattered else np.arange(20, 30)
    expected[rows, 128:164] = tile[:10, :36]
    assert np.array_equal(memory, expected)
    assert np.array_equal(names["of_fours"](stored, np.int16, None, c), tile)


# -- the kernel on a model of the block ---------------------------------------------------


def _values(units: np.ndarray, zero: Any, scale: Any, T: Any, C: Any) -> Shared:
    """Decode bytes of two numbers from 0 to 15, the lower one in the low bits."""
    values = np.stack([units % 16, units // 16], -1).reshape(C.rows, C.BLOCK_K)
    each = C.BLOCK_K // C.parts
    values = values - (zero.repeat(each, 1) if C.ZERO else 8)
    values = values * scale.repeat(each, 1) if C.SCALED else values
    if C.arranged:
        # Each of four lanes has a quarter of K. A pair is two neighbours, or two of a word's eight.
        values = values.reshape(C.rows, 4, -1, 2, C.pairs if C.pairs == 4 else 1)
        values = values.transpose(0, 2, 4, 1, 3).reshape(C.rows, C.BLOCK_K)
    return Shared(values)


def _units(ring: Shared, stage: int, NTH: int, C: Any) -> np.ndarray:
    box = (stage * C.n_ways + NTH) * C.HALVES
    return np.concatenate([ring.index(box + half).load(None) for half in range(C.HALVES)])


class Call:
    """A product that the model computes.

    Args:
        seed: Seed of the numbers and of the interleaving.
        group: Values along K that share a scale; 0: one scale per row.
        in_operand: Scales multiply values instead of sums.
        ends: The ends of groups of rows.
        exponents: Scales are stored as powers of two.
        pairs: Pairs of values in a stored word; above 1 the values along K are rearranged.
        stream_k: Blocks take equal shares of all steps.
        rest: Rows of a tile's other part, beside two.
    """

    def __init__(
        self, seed: int, *, m: int = 5, n: int = 7, k: int = 16, consumers: int = 2, ways: int = 1,
        splits: int = 1, stages: int = 3, gated: bool = False, group: int = 4, outer: int = 1,
        zeros: bool = False, in_operand: bool = False, extras: bool = False,
        ends: tuple[int, ...] | None = None, programs: int = 3, exponents: bool = False,
        pairs: int = 1, stream_k: bool = False, rest: int = 0,
    ) -> None:  # fmt: skip
        high, step, halves = 2, {1: 2, 2: 16, 4: 32}[pairs], 2 if gated else 1
        self.c = c = types.SimpleNamespace(
            BLOCK_M=2 + rest, first=2, rest=rest, sums_of_rest=None, BLOCK_K=step,
            num_stages=stages, consumers=consumers, k_ways=ways, n_ways=consumers // ways,
            splits=splits, HALVES=halves, high=high, rows=high * halves,
            BLOCK_N=high * (consumers // ways), GROUP=group, OUTER=outer,
            ROW_SCALE=None if group else "row", ZERO=zeros, PROMOTED=bool(group) and not in_operand,
            SCALED="pair" if group and in_operand else None, parts=max(1, step // (group or step)),
            numbers=None, split_units=None, RAGGED=ends is not None,
            ZEROED=ends is not None and seed % 2 == 0, SCATTERED=ends is not None and extras,
            OVERLAPS=seed % 3 == 0, sums=None, units=None, units_of_half=None, b_layout=None,
            worker_warps=None, worker_registers=None, arranged=pairs > 1, pairs=pairs,
            wide=step // 2, at_once=1, a_rows=None, stream_k=stream_k, num_warps=4,
            in_turn=consumers > 1 == ways and seed % 4 < 2, STORES_FOURS=False, ADDS_FOURS=False,
        )  # fmt: skip
        c.stage_bytes = 2 * c.BLOCK_M * step + c.n_ways * c.rows * step // 2
        random = np.random.default_rng(seed)
        self.exponents = exponents
        self.m, self.n, self.k, self.seed, self.programs = m, n, k, seed, programs
        self.ends, count, width = ends, len(ends or (0,)), n * halves
        self.a = random.standard_normal((m, k))
        codes = random.integers(0, 16, (count, width, k))
        self.stored = (codes[..., ::2] + 16 * codes[..., 1::2]).astype(np.float64)
        grid = (count, -(-width // outer), k // group) if group else (count, width, 1)
        self.scale = random.random(grid) + 0.5
        self.stored_scale = np.log2(self.scale) if exponents else self.scale
        self.zero = random.integers(0, 16, grid).astype(np.float64)
        self.values = (codes - (self._spread(self.zero) if zeros else 8)) * self._spread(self.scale)
        self.bias = random.standard_normal((count, width)) if extras else None
        self.residual = random.standard_normal((m, n)) if extras and ends is None else None
        self.places = random.permutation(m) if c.SCATTERED else np.arange(m)
        self.weights = random.random(m) + 0.5 if c.SCATTERED else np.ones(m)
        if ends is not None:
            self.a[ends[-1] :] = np.nan
        self.memory = np.full((m + 2, n + 3), np.nan)
        parts = programs * c.n_ways * c.rows * c.BLOCK_M if stream_k else splits * m * n
        self.parts = np.full(parts, np.nan)
        self.flags = np.zeros(programs * c.n_ways, dtype=int)

    def _spread(self, grid: np.ndarray) -> np.ndarray:
        """Repeat a grid of scales or zero points for each value."""
        width = self.stored.shape[1]
        rows = grid.repeat(-(-width // grid.shape[1]), 1)[:, :width]
        return rows.repeat(self.k // grid.shape[2], 2)

    def run(self) -> None:
        c, count = self.c, len(self.stored)
        box = [c.high, c.BLOCK_K // 2]
        known: dict[str, Any] = dict.fromkeys(mixed_input_kernel.mixed_input_kernel.arg_names)
        ragged_rows = self.ends is not None
        b = self.stored if ragged_rows else self.stored[0]
        known |= {
            "a_desc": Descriptor(self.a, [c.first, c.BLOCK_K]),
            "rest_desc": Descriptor(self.a, [c.rest, c.BLOCK_K]) if c.rest else None,
            "b_desc": Descriptor(b, [1, *box] if ragged_rows else box, 1),
            "out_ptr": Pointer(self.memory.reshape(-1)), "M": self.m, "N": self.n, "K": self.k,
            "stride_om": self.n + 3, "stride_on": 1, "partials_ptr": Pointer(self.parts),
            "flags_ptr": Pointer(self.flags),
            "b_scale_ptr": Pointer(self.stored_scale.ravel()), "EPILOGUE": self.epilogue, "C": c,
            "b_zero_ptr": Pointer(self.zero.ravel()) if c.ZERO else None,
        }  # fmt: skip
        for name in ("bs", "0"):
            known |= {
                f"stride_{name}z": self.scale[0].size,
                f"stride_{name}n": self.scale.shape[2],
                f"stride_{name}k": 1,
            }
        if self.bias is not None:
            known |= {"bias_ptr": Pointer(self.bias.ravel()), "stride_bias": 1, "alpha": -0.5}
        known["stride_biasz"] = self.stored.shape[1]
        if self.residual is not None:
            known |= {"residual_ptr": Pointer(self.residual.ravel()), "stride_rm": self.n}
            known["stride_rn"] = 1
        if ragged_rows:
            known |= {"offs_ptr": Pointer(np.array(self.ends)), "G": count}
            known["table_ptr"] = Pointer(np.full(self.programs * count, -1))
        if c.SCATTERED:
            known |= {"out_index_ptr": Pointer(self.places)}
            known["out_weights_ptr"] = Pointer(self.weights)
        for program in range(self.programs):
            run_block(
                list(known.values()), program, self.programs, self.seed, c.OVERLAPS,
                kernel=("mixed_input_kernel", MODULES),
                instead={
                    "decoded": _values, "stored_units": _units,
                    "_by_thread": lambda sums, C: sums, "_by_row": lambda sums, SUMS, C: sums,
                    "factors": np.exp2 if self.exponents else np.asarray,
                },
            )  # fmt: skip

    def epilogue(self, gate: Block, up: Block | None = None) -> Block:
        return np.abs(gate) if up is None else gate * up

    def check(self) -> None:
        self.run()
        c, found = self.c, self.memory[: self.m, : self.n]
        alpha = 1.0 if self.bias is None else -0.5
        expected = np.full((self.m, self.n), np.nan)
        start = 0
        for group, end in enumerate(self.ends or (self.m,)):
            rows = slice(start, end)
            sums = alpha * (self.a[rows] @ self.values[group].T)
            sums += 0 if self.bias is None else self.bias[group]
            halves = np.split(sums, c.HALVES, axis=1)
            finished = self.epilogue(*halves) * self.weights[rows, None]
            finished += 0 if self.residual is None else self.residual[rows]
            expected[self.places[rows]] = finished
            start = end
        if c.ZEROED:
            expected[self.places[start:]] = 0
        np.testing.assert_allclose(found, expected)
        assert not self.flags.any()
        assert np.isnan(self.memory[:, self.n :]).all()
        assert np.isnan(self.memory[self.m :]).all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("consumers", "ways"), [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (4, 4), (3, 1)]
)
@pytest.mark.slow(quick=8)
def test_consumers_share_columns_and_steps(consumers: int, ways: int, seed: int) -> None:
    how: dict[str, Any] = {"consumers": consumers, "ways": ways, "stages": ways * (2 + seed % 2)}
    how["programs"] = 1 + seed % 4
    Call(seed, extras=seed % 2 == 1, **how).check()
    # The number of steps is no multiple of the ways or stages.
    Call(seed, k=10, group=2, m=3, n=5, gated=True, **how).check()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("consumers", "ways", "pairs"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 1), (3, 3, 2)]
)
@pytest.mark.slow(quick=8)
def test_blocks_share_the_last_tiles(consumers: int, ways: int, pairs: int, seed: int) -> None:
    how: dict[str, Any] = {"consumers": consumers, "ways": ways, "stages": ways * (2 + seed % 2)}
    how |= {"stream_k": True, "programs": 1 + seed % 3, "pairs": pairs, "k": {1: 14, 2: 80}[pairs]}
    how |= {"group": {1: 2, 2: 16}[pairs]}
    Call(seed, extras=seed % 2 == 1, **how).check()
    Call(seed, m=3, n=5, gated=True, **how).check()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rest", [1, 2])
@pytest.mark.parametrize("how", [{}, STREAM_K, {"splits": 2}, {"ends": (0, 5, 6, 8)}])
@pytest.mark.slow(quick=8)
def test_tiles_have_two_parts(how: dict[str, Any], rest: int, seed: int) -> None:
    """A part may begin in the last row, or behind it."""
    how = {"rest": rest, "consumers": 1 + seed % 3, "in_operand": seed % 3 == 0, **how}
    for m in (8, 7, 6, 1):
        if "splits" in how:
            call = Call(seed, m=m, k=24, **how)
            call.run()
            parts = call.parts.reshape(2, m, call.n).sum(0)
            np.testing.assert_allclose(parts, call.a @ call.values[0].T)
        elif m == 8 or "ends" not in how:
            Call(seed, m=m, k=14, group=2, extras=seed > 1, gated=seed % 2 == 1, **how).check()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {"group": 0},
        {"group": 2},
        {"group": 8, "outer": 2},
        {"in_operand": True},
        {"group": 1, "in_operand": True},
    ],
)
@pytest.mark.slow(quick=6)
def test_scales_and_zero_points(how: dict[str, Any], zeros: bool, seed: int) -> None:
    Call(seed, zeros=zeros, ways=1 + seed % 2, stages=4, gated=seed % 2 == 0, **how).check()


@pytest.mark.parametrize("group", [0, 4])
def test_scales_that_are_exponents(group: int) -> None:
    """If K is one group, each row has a single exponent."""
    Call(1, group=group, exponents=True).check()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pairs", [2, 4])
@pytest.mark.slow(quick=6)
def test_values_along_k_in_the_order_of_the_stored_pairs(pairs: int, seed: int) -> None:
    how: dict[str, Any] = {"pairs": pairs, "zeros": seed % 2 == 0, "k": 48 * pairs}
    Call(
        seed, group=8, in_operand=True, ways=1 + seed % 2, stages=2 + 2 * (seed % 2), **how
    ).check()
    Call(seed, group=8 * pairs, m=3, gated=seed % 2 == 1, consumers=3, **how).check()
    Call(seed, group=0, ends=(0, 4, 5), **how).check()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("ends", [(0, 5, 5, 6, 9, 9), (9,), (1, 3), (0, 0)])
@pytest.mark.slow(quick=8)
def test_groups_of_rows(ends: tuple[int, ...], gated: bool, seed: int) -> None:
    how: dict[str, Any] = {"ends": ends, "m": 9, "gated": gated, "extras": seed % 2 == 1}
    Call(seed, zeros=seed > 1, **how).check()
    Call(seed, group=0, ways=2, stages=4, **how).check()


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("group", [0, 4])
def test_partial_sums_are_left_to_the_second_kernel(splits: int, group: int) -> None:
    call = Call(splits, splits=splits, group=group, ways=2, stages=4, k=24)
    call.run()
    parts = call.parts.reshape(splits, call.m, call.n).sum(0)
    if group == 0:
        parts = parts * call.scale[0, :, 0]
    np.testing.assert_allclose(parts, call.a @ call.values[0].T)
    assert np.isnan(call.memory).all()


# -- the compiled code ----------------------------------------------------------------------


def compiled() -> list[dict[str, Any]]:
    half = Operand(FP16)
    groups = Groups(32, "m", out_index=torch.int32, out_weights=torch.float32, zeroed=True)
    problems = {
        "few rows": replace(PROBLEM, m=5),
        "int4": PROBLEM,
        "two parts": replace(PROBLEM, m=150, n=24576),
        "many rows": replace(PROBLEM, m=2048),
        "zero points": replace(PROBLEM, m=2048, b=replace(INT4, zero=BF16)),
        "int8": replace(PROBLEM, b=INT8, a=half, out=half, n=4099),
        "blocks": replace(PROBLEM, m=200, b=replace(FP8, scale=Scale((128, 128)))),
        "wide": replace(PROBLEM, m=2048, b=replace(FP8, scale=Scale((128, 128)))),
        "mxfp4": replace(PROBLEM, k=2880, b=MXFP4),
        "gated": replace(PROBLEM, epilogue=parse("swiglu"), bias=BF16),
        "experts": replace(PROBLEM, groups=groups, epilogue=parse("swiglu")),
    }
    lines = []
    # The first or the last config of each problem, which differ most. Each takes three seconds.
    for place, (name, problem) in enumerate(problems.items()):
        configs = KERNEL.configs(problem)
        for config in share(configs[:: max(1, len(configs) - 1)], place, 2):
            build = KERNEL.builds(problem, config)[0]
            result = build.compile_for(GPUTarget("cuda", 90, 32))
            line = {"name": name, "config": config.to_json(), "shared": result.metadata.shared}
            line |= usage(result.asm["cubin"])
            line |= {
                "claimed": config.shared_memory(problem),
                "products": result.asm["ptx"].count("wgmma.mma_async"),
                "stores of one": result.asm["ptx"].count("st.global.b16"),
                "said": assembled(result.asm["ptx"]),
            }
            lines.append(line)
    return lines


def assembled(ptx: str) -> str:
    """The output of ptxas for a kernel."""
    from triton.backends.nvidia.compiler import get_ptxas

    path = get_ptxas("sm_90a" if "arch" in str(get_ptxas) else 90).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [path, "-v", "-arch=sm_90a", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.slow
def test_weights_go_through_registers_without_waits_or_spills(uninterpreted: Uninterpreted) -> None:
    lines = uninterpreted(compiled)
    assert len({line["name"] for line in lines}) == 11
    for line in lines:
        config = MixedInputConfig.from_json(line["config"])
        products = 2 * config.consumers * config.BLOCK_K // 16
        assert line["products"] % products == 0, line
        assert line["products"] > 0, line
        assert "serialized" not in line["said"], line
        assert line["STACK"] + line["LOCAL"] <= 48, line
        assert line["shared"] <= line["claimed"], line
        if line["name"] != "int8":  # whose N is odd
            assert line["stores of one"] == 0, line


def test_estimates_rank_measured_configs() -> None:
    """The best config of each product measured on an H100 is among the first six by estimate."""
    import json

    table = Path(__file__).parents[2] / "benchmarks/results/h100/mixed_input_configs.txt"
    runs = [json.loads(line) for line in table.read_text().splitlines()]
    device = replace(DEVICES[90], name="NVIDIA H100 80GB HBM3")
    errors = []
    for _, group in itertools.groupby(runs, key=lambda run: (run["m"], run["n"], run["k"])):
        measured = []
        for run in group:
            sizes = {name: run[name] for name in ("m", "n", "k")}
            problem = replace(PROBLEM, device=device, **sizes)
            config = MixedInputConfig.from_json(run["config"])
            measured.append((KERNEL.estimate_us(problem, config), run["us"]))
        errors += [math.log(estimate / us) ** 2 for estimate, us in measured]
        first = sorted(measured)[:6]
        assert min(us for _, us in first) < 1.03 * min(us for _, us in measured)
    assert len(errors) > 200
    assert math.sqrt(sum(errors) / len(errors)) < 0.12


def test_the_proposed_configs_are_close_to_the_best_for_few_rows() -> None:
    """The products were measured on an H200 with every config."""
    import json

    table = Path(__file__).parents[2] / "benchmarks/results/h200/few_rows_configs.txt"
    runs = [json.loads(line) for line in table.read_text().splitlines()[1:]]
    device = replace(DEVICES[90], name="NVIDIA H200")
    weights = {"int4": INT4, "int8": INT8, "fp8": FP8}
    best: dict[tuple[Any, ...], list[float]] = {}
    losses = []
    for run in runs:
        kernel: Any = {each.name: each for each in (KERNEL, Streaming())}[run["kernel"]]
        sizes = {name: run[name] for name in ("m", "n", "k")}
        problem = replace(PROBLEM, device=device, b=weights[run["format"]], **sizes)
        proposed = {tuple(vars(c)[f] for f in run["fields"]) for c in kernel.configs(problem)}
        times = {tuple(values): us for *values, us in run["configs"]}
        assert len(proposed & set(times)) == len(proposed)
        mine = min(times[each] for each in proposed)
        losses.append(mine / min(times.values()))
        found = best.setdefault((run["format"], *sizes.values()), [math.inf, math.inf])
        found[:] = min(found[0], mine), min(found[1], *times.values())
    assert len(best) == 24
    assert max(mine / least for mine, least in best.values()) < 1.045
    assert sum(losses) / len(losses) < 1.006


def measured_on_an_h200(name: str) -> tuple[list[str], dict[tuple[int, int, int], Any]]:
    """A table's names of fields, and by product the times of tiles."""
    import json

    table = Path(__file__).parents[2] / f"benchmarks/results/h200/{name}.txt"
    head, *runs = [json.loads(line) for line in table.read_text().splitlines()]
    times = {
        (run["m"], run["n"], run["k"]): {tuple(values): us for *values, us in run["configs"]}
        for run in runs
        if "promoted" not in run
    }
    return head["fields"], times


@pytest.mark.parametrize(
    ("name", "count", "most", "mean"),
    [("stream_k", 29, 1.05, 1.002), ("two_parts", 13, 1.0001, 1.0001)],
)
def test_the_proposed_configs_are_close_to_the_best_for_more_rows(
    name: str, count: int, most: float, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products were measured with the proposals before their number is limited. The first table
    lacks later tiles. A product of both tables belongs to the second."""
    fields, times = measured_on_an_h200(name)
    if name == "stream_k":
        times.pop((180, 24576, 4096))
        monkeypatch.setattr(mixed_input, "HEIGHTS", (16, 32, 64, 128, 256))
    device = replace(DEVICES[90], name="NVIDIA H200")
    losses = []
    for (m, n, k), of_tiles in times.items():
        configs = KERNEL.configs(replace(PROBLEM, m=m, n=n, k=k, device=device))
        proposed = [tuple(vars(config)[field] for field in fields) for config in configs]
        known = [of_tiles[tile] for tile in proposed if tile in of_tiles or name == "two_parts"]
        losses.append(min(known) / min(of_tiles.values()))
    assert len(losses) == count
    assert max(losses) < most
    assert sum(losses) / len(losses) < mean


def test_constants_hold_a_digest_of_their_source() -> None:
    c = Constants.of(PROBLEM, MixedInputConfig(**FIELDS))
    assert len(c.SOURCE) == 12
    assert c.rows == c.high == 64
    assert (
        Constants.of(replace(PROBLEM, epilogue=parse("swiglu")), MixedInputConfig(**FIELDS)).rows
        == 128
    )
