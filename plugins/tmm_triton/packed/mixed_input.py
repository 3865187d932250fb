"""``triton.mixed_input``: multiplies 16-bit rows by packed weights on Hopper's tensor cores.

It serves problems too large for :mod:`tmm_triton.streaming`. The result is computed transposed::

    out.T  [N, M]  =  weight [N, K]  ·  a.T [K, M]
                      in registers      in shared memory

``wgmma`` reads the weight from registers. So the weight stays packed on its way through shared
memory and is decoded in registers; decoded values are never stored. Every thread loads the pairs of
values that ``wgmma`` expects in its registers.

* A producer warp requests boxes of both operands from TMA. One to three consumers of four warps
  multiply their own rows of the weight by all rows of the tile of ``a``.
* While one consumer decodes, the tensor cores work for the others.
* Scales of groups are applied to the sums of each step, in fp32, where a tile has few rows. In
  other tiles, and where a step has several groups of 32, the weight's values are multiplied by
  their scale and rounded to 16 bits, as dequantising does.
* A tile of 80, 96, 160 or 192 rows of ``a`` has two parts with products and sums of their own. Both
  read the same decoded values.
* Blocks are persistent: the next tile's operands arrive while the last tile is stored.
* Where the last wave of tiles is incomplete, blocks may share the last tiles equally (stream-K).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tmm_core import ANY, Problem, Supports
from tmm_core.triton import SEARCH_LIMITED, Described
from tmm_triton import word_decoders
from tmm_triton.operands import Build, Typed, Zeros, build, kind
from tmm_triton.packed.mixed_input_config import (
    ELEMENTS,
    HEIGHTS,
    MOST_ARRANGED,
    WGMMA,
    Constants,
    MixedInputConfig,
    groups_share_step,
    last_wave_is_incomplete,
    rest_of,
    rows_per_group,
    value_scaling,
    work_units,
)
from tmm_triton.packed.mixed_input_estimate import estimate_us
from tmm_triton.packed.mixed_input_kernel import mixed_input_kernel
from tmm_triton.partials import MOST_WORKSPACE, reduction
from tmm_triton.pdl import ways
from tmm_triton.triton_kernel import FLOATS, Built, missing_toolchain, unsteppable

#: BLOCK_K, consumers, k_ways, and rows of the weight per consumer, by the maximum BLOCK_M.
_SHAPES = {
    16: (
        (128, 1, 1, 64), (128, 2, 2, 64), (128, 3, 3, 64), (128, 4, 4, 64), (128, 2, 1, 64),
        (128, 4, 2, 64), (128, 4, 1, 64), (128, 2, 1, 128), (128, 2, 2, 128), (128, 4, 2, 128),
    ),
    32: (
        (128, 1, 1, 64), (128, 2, 2, 64), (128, 3, 3, 64), (128, 4, 4, 64), (128, 2, 1, 64),
        (128, 4, 2, 64), (128, 4, 1, 64), (128, 2, 1, 128), (128, 2, 2, 128),
    ),
    64: (
        (128, 1, 1, 64), (128, 2, 2, 64), (128, 3, 3, 64), (128, 2, 1, 64), (64, 4, 2, 64),
        (64, 2, 1, 128), (64, 2, 2, 128), (128, 3, 1, 64),
    ),
    128: (
        (128, 2, 1, 64), (128, 3, 1, 64), (64, 2, 1, 64), (64, 3, 1, 64), (64, 2, 1, 128),
        (64, 1, 1, 64), (64, 2, 2, 64),
    ),
    192: ((64, 2, 1, 64), (128, 2, 1, 64), (64, 3, 1, 64), (64, 2, 1, 128)),
    256: ((64, 2, 1, 64), (128, 2, 1, 64), (64, 1, 1, 64)),
}  # fmt: skip

#: Configs proposed for one problem, half of them for each value of ``arranged`` if both are
#: possible. In 41 measured products the best of these took 0.5 % longer than the best of all in the
#: mean, and 4 % at most.
_TRIED = 8
#: Registers of a thread for operands and sums, by the number of consumers: 240, 160 or 112 in all.
_MOST_REGISTERS = {1: 200, 2: 200, 3: 128, 4: 80}
#: Maximum number of stages: more only take longer to fill.
_MOST_STAGES = 12
#: Minimum K of a part.
_LEAST_PART = 512
#: Minimum rows of a tile of ``a`` for stream-K. With fewer rows, handing a part over takes longer
#: than equal shares save.
_SHARED = 64
#: Maximum rows for which operands are loaded with ``evict_first``, which gains up to 5 %.
_EVICTED = 64


class MixedInput(Built[MixedInputConfig]):
    """16-bit rows, and a weight of packed numbers contiguous along K, on Hopper."""

    name = "triton.mixed_input"
    version = "6"
    config_type = MixedInputConfig
    supports = Supports(
        devices=("cuda",),
        capability=(9, 0),
        below=(9, 1),
        operands=(torch.float16, torch.bfloat16),
        weights=word_decoders.PAIRS,
        scales=("tensor", "row", "group", "block"),
        packed=True,
        zeros=True,
        out=FLOATS,
        bias=FLOATS,
        residual=FLOATS,
        layouts={"a": ("row",), "b": ("col",), "out": ("row",), "residual": ANY},
        unaligned=("out", "residual"),
        alpha=True,
        epilogues=True,
        gated=True,
        ragged=("m",),
        indexed=True,
        zeroed=True,
    )

    def declines(self, problem: Problem) -> Iterable[str]:
        yield from missing_toolchain()
        yield from unsteppable(problem)
        if not problem.stored:
            yield "is for packed weights"
        if problem.b.grid and problem.b.block[1] % 64:
            size = problem.b.block[1]
            if not groups_share_step(problem.b):
                yield f"groups of {size} are neither 32 values nor multiples of 64"
            elif value_scaling(problem) is None:
                yield f"scales or values of groups of {size} would be rounded to {problem.a.dtype}"
        if problem.groups is not None and problem.groups.a_index is not None:
            yield "TMA does not gather rows on Hopper"

    def arithmetic(self, problem: Problem, config: MixedInputConfig) -> str | None:
        """Named by what affects a row's sums: the division of K, and whether sums or values are
        multiplied by scales. The tile's rows and columns do not."""
        c = Constants.of(problem, config)
        if c.stream_k:
            return None  # M decides where tiles are cut
        how = ("promoted" if c.PROMOTED else "rounded") + "/arranged" * c.arranged
        return f"{self.name}/{c.BLOCK_K}/{c.k_ways}/{c.splits}/{how}"

    def configs(self, problem: Problem) -> list[MixedInputConfig]:
        fitting: list[MixedInputConfig] = []
        for m in _heights(problem):
            fitting += self._fitting(problem, m)
        fitting = sorted(dict.fromkeys(fitting), key=lambda c: self.estimate_us(problem, c))
        # On an H200 waiting was never more than 3 % slower, and mostly 5 % faster.
        waiting = [replace(c, early="wait") for c in fitting if "wait" in ways(problem)]
        if not SEARCH_LIMITED.get():
            return waiting + fitting
        orders = [[c for c in waiting or fitting if c.arranged is order] for order in (True, False)]
        share = _TRIED // 2 if all(orders) else _TRIED
        tried = [c for order in orders for c in order[:share]]
        return sorted(tried, key=lambda c: self.estimate_us(problem, c))

    def _fitting(self, problem: Problem, m: int) -> Iterator[MixedInputConfig]:
        """Yield the configs with tiles of ``m`` rows, and as many stages as fit."""
        for k, consumers, share, rows in _shapes(m):
            if problem.batch_invariant:
                if share > 1 or m > 128:
                    continue  # the sums of a row must not depend on M
                k = 64
            if problem.b.grid and problem.b.block[1] % k and not groups_share_step(problem.b):
                k = 64
            if problem.gated and rows == WGMMA:
                continue  # a consumer needs 64 rows for each half
            n = rows // (2 if problem.gated else 1) * consumers // share
            both = m <= MOST_ARRANGED and not problem.batch_invariant
            orders = (True, False) if both else (False,)
            for splits, arranged in itertools.product(self._splits(problem, m, n, k), orders):
                if problem.k < k * share * splits and share * splits > 1:
                    continue
                config = MixedInputConfig(
                    BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_stages=2 * share, consumers=consumers,
                    k_ways=share, splits=splits, evict_first=problem.m <= _EVICTED,
                    arranged=arranged,
                )  # fmt: skip
                spare = problem.device.shared_memory - config.shared_memory(problem)
                stages = 2 * share + spare // Constants.of(problem, config).stage_bytes
                stages = min(_MOST_STAGES, stages) // share * share
                if spare >= 0 and config.registers(problem) <= _MOST_REGISTERS[consumers]:
                    config = replace(config, num_stages=stages)
                    yield config
                    if m >= _SHARED and last_wave_is_incomplete(problem, config):
                        yield replace(config, stream_k=True)

    def _splits(self, problem: Problem, m: int, n: int, k: int) -> list[int]:
        """Numbers of parts of K: one, and as many as fill the GPU with one tile each."""
        tiles = -(-problem.m // m) * -(-problem.n // n)
        share = problem.device.sm_count // tiles
        most = MOST_WORKSPACE // (4 * problem.m * problem.n)
        splits = min(share, problem.k // max(k, _LEAST_PART), most, 64)
        whole = problem.gated or problem.groups is not None or problem.batch_invariant
        if whole or splits < 2:
            return [1]
        return sorted({1, splits} if SEARCH_LIMITED.get() else range(1, splits + 1))

    def estimate_us(self, problem: Problem, config: MixedInputConfig) -> float:
        return estimate_us(problem, config)

    def workspace_bytes(self, problem: Problem, config: MixedInputConfig) -> int:
        c, blocks = Constants.of(problem, config), _blocks(problem, config)
        if problem.groups is not None:
            return 4 * blocks * problem.groups.count  # each block's table
        if c.stream_k:
            return 4 * blocks * c.n_ways * c.rows * c.BLOCK_M
        return 4 * config.splits * problem.m * problem.n if config.splits > 1 else 0

    def builds(self, problem: Problem, config: MixedInputConfig) -> list[Build]:
        c, groups, split = Constants.of(problem, config), problem.groups, config.splits > 1
        own: Typed = {
            "a_desc": _map("a", [c.first, c.BLOCK_K], problem.a.dtype),
            "b_desc": _map("b", [1] * c.RAGGED + [c.high, c.wide], c.unit),
        }
        if c.rest:
            own["rest_desc"] = _map("a", [c.rest, c.BLOCK_K], problem.a.dtype)
        if split or c.stream_k:
            own["partials_ptr"] = ("*fp32", "workspace")
        if c.stream_k:
            own["flags_ptr"] = "*i32", Zeros(_blocks(problem, c) * c.n_ways)
        if groups is not None:
            own["table_ptr"] = "*i32", "workspace"
            if kind(problem.b) == "row":
                own["stride_bsz"] = "i64", problem.width
        main = build(
            mixed_input_kernel, problem, config, (_blocks(problem, config), 1, 1), {"C": c}, own,
            launch_pdl=c.OVERLAPS, edits=config.edits,
        )  # fmt: skip
        return [main, reduction(problem, c.splits, problem.m * problem.n)] if split else [main]


def _shapes(m: int) -> Iterable[tuple[int, int, int, int]]:
    """Return the shapes of tiles of ``m`` rows; for an exhaustive search every possible one."""
    counts = range(1, 5)
    shapes: Iterable[tuple[int, int, int, int]]
    if SEARCH_LIMITED.get():
        shapes = next(shapes for most, shapes in _SHAPES.items() if m <= most)
    else:
        shapes = itertools.product((64, 128), counts, counts, (64, 128))
    return [each for each in shapes if each[1] % each[2] == 0 and (each[2] == 1 or not rest_of(m))]


def _heights(problem: Problem) -> list[int]:
    """Return the rows of the tiles to propose: the least height with one tile, and lower ones. More
    than one tile of few rows would decode the weight again."""
    rows = rows_per_group(problem)[0]
    highest = most = next((m for m in HEIGHTS if m >= rows), HEIGHTS[-1])
    heights: Iterable[int] = HEIGHTS
    if problem.groups is not None:
        # Sizes vary: some groups are larger than the mean.
        heights = [m for m in heights if not rest_of(m)]
        highest = next(m for m in heights if m >= highest)
        most = 4 * highest
    return [m for m in heights if min(64, highest) <= m <= most]


def _blocks(problem: Problem, config: MixedInputConfig) -> int:
    """The number of blocks of the grid. The host does not know how many tiles groups have."""
    sms = max(1, problem.device.sm_count)
    return sms if problem.groups is not None else min(sms, work_units(problem, config))


def _map(name: str, box: list[int], dtype: torch.dtype) -> tuple[str, Described]:
    """The type and the value of an operand's tensor map. It reads elements of ``dtype`` in boxes in
    memory order; a box of three dimensions is for an operand with a matrix for each group."""
    text, element = ELEMENTS[dtype]
    layout = gl.NVMMASharedLayout.get_default_for(box, element)
    step = 16 // dtype.itemsize

    def describe(t: torch.Tensor) -> Any:
        t = (t if name == "a" else t.mT).view(dtype)
        # A single row, or group, has no meaningful stride; TMA needs an aligned one.
        row = t.stride(-2) if t.shape[-2] > 1 else -(-t.shape[-1] // step) * step
        strides = [row, 1]
        if len(box) == 3:
            strides = [t.stride(0) if t.shape[0] > 1 else t.shape[1] * row, *strides]
        return TensorDescriptor(t, list(t.shape), strides, box, layout=layout)

    return f"tensordesc<{text}{box},{layout!r}>", Described(name, describe)
