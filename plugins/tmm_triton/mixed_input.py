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

import hashlib
import itertools
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tmm_core import ANY, ConfigError, Machine, Operand, Problem, Supports
from tmm_core.triton import SEARCH_LIMITED, Described
from tmm_triton import roofline, word_decoders
from tmm_triton.mixed_input_device import mixed_input_kernel
from tmm_triton.operands import Build, TileConfig, Typed, Zeros, build, check, kind
from tmm_triton.partials import MOST_WORKSPACE, reduction
from tmm_triton.pdl import ways
from tmm_triton.triton_kernel import FLOATS, Built, missing_toolchain, unsteppable

#: Rows of one ``wgmma``.
_WGMMA = 64
#: mbarriers, and Triton's memory for starting the partitions.
_SHARED_OVERHEAD = 1024
#: Registers of a thread for operands and sums, by the number of consumers: 240, 160 or 112 in all.
_MOST_REGISTERS = {1: 200, 2: 200, 3: 128, 4: 80}
#: Registers per thread of a consumer and of the other warps: by whether three of the other warps
#: rearrange ``a``, then by the number of consumers.
_REGISTERS: dict[bool, dict[int, tuple[int, int]]] = {
    False: {1: (240, 24), 2: (240, 24), 3: (160, 24), 4: (112, 24)},
    True: {1: (240, 80), 2: (216, 80), 3: (144, 80), 4: (112, 64)},
}
#: Minimum rows of a tile of ``a`` whose consumers start their products in turn.
_IN_TURN = 128
#: Rows of a tile of ``a`` that three warps can rearrange while others multiply.
_MOST_ARRANGED = 32
#: Rows of a tile of ``a``: where choices are made (``tmm_core.spec.bucket``), in one or two parts.
_HEIGHTS = (16, 32, 64, 80, 96, 128, 160, 192, 256)
#: Maximum rows of a tile in which scales multiply the sums of a step. Tiles of more rows multiply
#: the values. The first number holds where that takes one instruction for two values.
_PROMOTED, _MOST_PROMOTED = 64, 128
#: A digest of the device code, for Triton's cache key (:class:`Constants`).
_SOURCE = hashlib.sha256(
    b"".join(
        pkgutil.get_data("tmm_triton", name) or b""  # also from a zip
        for name in (
            "mixed_input.py",
            "mixed_input_device.py",
            "stream_k.py",
            "transposed_tiles.py",
        )
    )
).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class MixedInputConfig(TileConfig):
    """A tile, and how the block's warps share it.

    Args:
        BLOCK_M: Rows of ``a``.
        BLOCK_N: Columns of the result, of all consumers.
        BLOCK_K: Step along K.
        num_stages: Stages of the ring.
        num_warps: Warps of a consumer.
        consumers: Number of consumers that share the tile.
        k_ways: Number of consumers that share the steps along K, for the same columns.
        splits: Parts along K, added by a second kernel.
        stream_k: Blocks take equal shares of the last tiles (:mod:`tmm_triton.stream_k`), if there
            is an incomplete last wave after a whole one.
        evict_first: Operands are loaded with the ``evict_first`` hint.
        arranged: Values along K are multiplied in an order that makes a thread's stored pairs
            neighbours. A warp brings ``a`` into the same order.
        early: See :mod:`tmm_triton.pdl`; ``""`` or ``"wait"``.
    """

    consumers: int
    splits: int
    k_ways: int = 1
    evict_first: bool = False
    arranged: bool = False
    stream_k: bool = False
    num_warps: int = 4
    early: str = ""

    def __post_init__(self) -> None:
        check("BLOCK_M", self.BLOCK_M, _HEIGHTS)
        check("BLOCK_K", self.BLOCK_K, (64, 128))
        check("num_stages", self.num_stages, range(2, 17))
        check("num_warps", self.num_warps, (4,))
        check("consumers", self.consumers, (1, 2, 3, 4))
        check("splits", self.splits, range(1, 65))
        check("early", self.early, ("", "wait"))  # type: ignore[arg-type]
        check("k_ways", self.k_ways, [ways for ways in (1, 2, 3, 4) if self.consumers % ways == 0])
        if self.num_stages % self.k_ways or self.num_stages == self.k_ways:
            # Each consumer has its own stages, and holds one while it waits for the next.
            raise ValueError(f"{self.k_ways} consumers cannot share {self.num_stages} stages")
        if self.stream_k and self.splits > 1:
            raise ValueError("either splits or stream_k")
        if self.arranged and self.BLOCK_M > _MOST_ARRANGED:
            raise ValueError(f"at most {_MOST_ARRANGED} rows are arranged, not {self.BLOCK_M}")
        if self.rest and self.k_ways > 1:
            raise ValueError(f"consumers cannot share the steps of a tile of {self.BLOCK_M} rows")
        if self.BLOCK_N // self.n_ways not in (_WGMMA, 2 * _WGMMA):
            raise ValueError(f"{self.n_ways} consumers cannot share {self.BLOCK_N} columns")

    @property
    def first(self) -> int:
        """Rows of a tile's first part: a power of two, as Triton requires of all tensors."""
        return self.BLOCK_M - self.rest

    @property
    def rest(self) -> int:
        """Rows of its other part, or 0."""
        return _rest(self.BLOCK_M)

    @property
    def n_ways(self) -> int:
        """Number of consumers that share the columns."""
        return self.consumers // self.k_ways

    @property
    def high(self) -> int:
        """Columns of the result per consumer."""
        return self.BLOCK_N // self.n_ways

    @property
    def edits(self) -> tuple[str, ...]:
        """Edits of the kernel's PTX (:mod:`tmm_core.triton.ptx`)."""
        return ("evict_first",) if self.evict_first else ()

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of shared memory per block."""
        c = Constants.of(problem, self)
        exchanged = 4 * (c.consumers - c.n_ways) * c.rows * c.BLOCK_M
        return self.num_stages * c.stage_bytes + exchanged + _SHARED_OVERHEAD

    def registers(self, problem: Problem) -> int:
        """Registers of a thread for the sums, a step's sums, values and stored pairs."""
        c = Constants.of(problem, self)
        sums = c.rows * c.BLOCK_M // 128
        return sums * (2 if c.PROMOTED else 1) + 2 * c.rows * c.BLOCK_K // 256


@dataclass(frozen=True, kw_only=True)
class Constants(MixedInputConfig):
    """The constants that the kernel is specialised on: a config, and the properties of a problem
    that the code depends on."""

    #: 2 for a gated product: the gate's rows of the weight, then the up projection's.
    HALVES: int
    #: Rows and values along K that share a scale; 0 if the scale is one for whole rows.
    OUTER: int
    GROUP: int
    #: ``"row"``, ``"tensor"`` or None: a scale that multiplies whole sums.
    ROW_SCALE: str | None
    ZERO: bool
    #: The number that is subtracted together with a zero point.
    OFFSET: int
    #: Bytes of two stored values.
    PAIR: int
    #: The sums of each step are multiplied by their scales.
    PROMOTED: bool
    #: How values are multiplied by their scales instead: pairs of 16-bit floats (``"pair"``), or in
    #: fp32 (``"wide"``).
    SCALED: str | None
    PROGRAM: str
    #: Rows are divided into groups, and each group has a matrix of the weight.
    RAGGED: bool
    #: Rows of no group become zeros.
    ZEROED: bool
    #: An index says where rows of the result are stored.
    SCATTERED: bool
    #: The result is stored, and the residual is loaded, by four 16-bit floats at a time.
    STORES_FOURS: bool
    ADDS_FOURS: bool
    OVERLAPS: bool
    #: Makes Triton's cache key depend on the code of the properties below.
    SOURCE: str = _SOURCE

    @classmethod
    def of(cls, problem: Problem, config: MixedInputConfig) -> Constants:
        form, b, value = problem.b.form, problem.b, problem.a.dtype
        assert form is not None
        if b.grid and b.block[1] % config.BLOCK_K and not _groups_share_step(b):
            raise ConfigError(f"{config} has steps of several groups of {b.block[1]} values")
        if problem.gated and config.high != _WGMMA:
            raise ConfigError(f"{config} has {config.high} columns of gate and up, not {_WGMMA}")
        if config.splits > 1 and (problem.gated or problem.groups is not None):
            raise ConfigError(f"{config} splits a gated or grouped product")
        parts = config.splits * config.k_ways
        if parts > 1 and problem.k < parts * config.BLOCK_K:
            raise ConfigError(f"{config} divides K {problem.k} into more parts than steps")
        method = value_scaling(problem)
        # Separate sums of a step need registers, and one group per step. In batch-invariant mode M
        # may choose the tile, so all tiles scale alike.
        most = _PROMOTED if method == "pair" and not problem.batch_invariant else _MOST_PROMOTED
        few = most >= config.BLOCK_M and not _groups_share_step(b)
        promoted = b.grid and (method is None or few)
        scaled = method if b.grid and not promoted else None
        shared = config.stream_k and _last_wave_is_incomplete(problem, config)
        config = replace(config, stream_k=shared)
        return cls(
            **vars(config),
            HALVES=2 if problem.gated else 1,
            OUTER=max(1, b.block[0]),
            GROUP=b.block[1],
            ROW_SCALE=None if b.grid else kind(b),
            ZERO=b.zero is not None,
            OFFSET=0 if b.zero is None else word_decoders.offset(form.name, value, b.zero),
            PAIR=2 * b.dtype.itemsize // b.pack,
            PROMOTED=promoted,
            SCALED=scaled,
            PROGRAM=word_decoders.program(
                form.name, b.dtype, value, b.zero, scaled, word=config.arranged
            ),
            RAGGED=problem.groups is not None,
            ZEROED=problem.groups is not None and problem.groups.zeroed,
            SCATTERED=problem.groups is not None and problem.groups.out_index is not None,
            STORES_FOURS=_by_fours(problem, problem.out),
            ADDS_FOURS=_by_fours(problem, problem.residual),
            OVERLAPS=config.early != "",
        )

    @property
    def rows(self) -> int:
        """Rows of the weight per consumer, of both halves if gated."""
        return self.high * self.HALVES

    @property
    def parts(self) -> int:
        """Groups of values per step."""
        return max(1, self.BLOCK_K // self.GROUP) if self.GROUP else 1

    @property
    def in_turn(self) -> bool:
        """Whether consumers start their products one after the other. Otherwise products that start
        together also end together, and the tensor cores are idle while all consumers decode. Tiles
        of fewer rows lose more time by waiting."""
        return self.BLOCK_M >= _IN_TURN and self.consumers > 1 == self.k_ways

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: both operands of one step."""
        return self.BLOCK_K * (2 * self.BLOCK_M + self.n_ways * self.rows * self.PAIR // 2)

    @property
    def pairs(self) -> int:
        """Pairs of values in a unit that is loaded and decoded: a word, or one pair."""
        return 4 // self.PAIR if self.arranged else 1

    @property
    def registers_of(self) -> str:
        """The operands of the program, as constraints of inline assembly."""
        others = self.ZERO + (self.SCALED is not None)
        return ",".join(["=r"] * self.pairs + ["r"] * (1 + others))

    @property
    def unit(self) -> torch.dtype:
        """The dtype that stored values are read as."""
        return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[self.PAIR * self.pairs]

    @property
    def wide(self) -> int:
        """Units of a row in a step."""
        return self.BLOCK_K // 2 // self.pairs

    @property
    def units(self) -> gl.DistributedLinearLayout:
        """The layout of a consumer's units, [rows, wide]. A thread has the pairs that ``wgmma``
        reads from its registers. Where ``a`` is arranged, each lane of four has a quarter of a
        step's words."""
        return self._units_of(self.rows)

    @property
    def units_of_half(self) -> gl.DistributedLinearLayout:
        """The same for the rows of gate or up, [high, wide]."""
        return self._units_of(self.high)

    @property
    def split_units(self) -> gl.DistributedLinearLayout:
        """The same with a dimension for the groups of a step, [rows, parts, units of a part]."""
        return self._units_of(self.rows, self.parts)

    @property
    def numbers(self) -> gl.SliceLayout:
        """The layout of the scales of a step, [rows, parts]."""
        return gl.SliceLayout(2, self.split_units)

    def _units_of(self, rows: int, parts: int = 0) -> gl.DistributedLinearLayout:
        along = self.wide // max(1, parts)
        # Two bits of a unit's place along K are the lane's, and the others are the register's.
        bits = [[0, 1 << i] for i in range(self.wide.bit_length() - 1)]
        of_lanes, bits = (bits[-2:], bits[:-2]) if self.arranged else (bits[:2], bits[2:])
        registers = [*bits, [8, 0]]
        registers += [[64 << i, 0] for i in range((rows // _WGMMA).bit_length() - 1)]
        lanes, warps = [*of_lanes, [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
        if not parts:
            return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, self.wide])
        split = [
            [[row, unit // along, unit % along] for row, unit in bases]
            for bases in (registers, lanes, warps)
        ]
        return gl.DistributedLinearLayout(*split, [], [rows, parts, along])

    @property
    def b_layout(self) -> gl.NVMMASharedLayout:
        """The layout of a consumer's part of a stage in shared memory."""
        _, element = _ELEMENTS[self.unit]
        return gl.NVMMASharedLayout.get_default_for([self.high, self.wide], element)

    @property
    def at_once(self) -> int:
        """Rows of ``a`` that a warp rearranges at a time."""
        return 16

    @property
    def a_rows(self) -> gl.DistributedLinearLayout:
        """The layout of these rows, [at_once, BLOCK_K]: a thread reads and writes units of 16
        bytes that it holds itself."""
        step = self.BLOCK_K
        own = [[0, 1], [0, 2], [0, 4], [0, step // 4], [0, step // 2]]
        others = [[0, 8 << i] for i in range((step // 32).bit_length() - 1)]
        others += [[1, 0], [2, 0], [4, 0], [8, 0]]
        return gl.DistributedLinearLayout(
            own + others[5:], others[:5], [], [], [self.at_once, step]
        )

    @property
    def sums(self) -> gl.NVMMADistributedLayout:
        """The layout of a consumer's sums of a tile's first part, [rows, first]."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.first, 16])

    @property
    def sums_of_rest(self) -> gl.NVMMADistributedLayout:
        """The same of the other part, [rows, rest]."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.rest, 16])

    def fours(self, height: int) -> gl.DistributedLinearLayout:
        """The layout of ``height`` rows of a consumer's result by four neighbours, [height,
        high / 4]. Four threads have a sector."""
        return self._blocks_of_8(height, 4, [2, 1], [])

    def pairs_of_rows(self, height: int) -> gl.DistributedLinearLayout:
        """The same by pairs, [height, high / 2]."""
        return self._blocks_of_8(height, 2, [4, 2], [1])

    def pairs_of_blocks(self, height: int) -> gl.DistributedLinearLayout:
        """The layout in which ``movmatrix`` leaves pairs, [height, high / 2]: four threads have
        eight neighbours."""
        return self._blocks_of_8(height, 2, [1, 2], [4])

    def _blocks_of_8(
        self, height: int, unit: int, quad: list[int], own: list[int]
    ) -> gl.DistributedLinearLayout:
        """Units of ``unit`` neighbours, at the distances ``quad`` among four threads and ``own`` in
        a thread. The other threads of a warp have the other rows of a block."""
        registers = [[0, at] for at in own]
        registers += [[8 << i, 0] for i in range((height // 8).bit_length() - 1)]
        registers += [[0, 64 // unit << i] for i in range((self.high // _WGMMA).bit_length() - 1)]
        lanes = [*([0, at] for at in quad), [1, 0], [2, 0], [4, 0]]
        warps = [[0, 16 // unit], [0, 32 // unit]]
        return gl.DistributedLinearLayout(registers, lanes, warps, [], [height, self.high // unit])

    @property
    def worker_warps(self) -> list[int]:
        """Warps of each role except the first consumer, which is Triton's default partition. The
        producer is one warp, which Triton completes to four: the other three rearrange ``a``, or
        do nothing."""
        return [4] * (self.consumers - 1) + [1] * 4

    @property
    def worker_registers(self) -> list[int]:
        """Registers per thread of these roles. The producer's four warps have the minimum of
        setmaxnreg unless they rearrange ``a``."""
        consumer, others = _REGISTERS[self.arranged][self.consumers]
        return [consumer] * (self.consumers - 1) + [others] * 4


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
#: Maximum number of stages: more only take longer to fill.
_MOST_STAGES = 12
#: Minimum K of a part.
_LEAST_PART = 512
#: Minimum rows of a tile of ``a`` for stream-K. With fewer rows, handing a part over takes longer
#: than equal shares save.
_SHARED = 64
#: Maximum rows for which operands are loaded with ``evict_first``, which gains up to 5 %.
_EVICTED = 64
#: Constants of the estimate, in µs: of a launch, of a step, and per element to store. Then per
#: value to decode and per product, each for one consumer alone and for an SM. ``_BROUGHT`` is the
#: bytes per µs that an SM receives. All are fitted to two sets of times, both in
#: ``benchmarks/results``. ``h200/few_rows_configs.txt`` has 3,147 configs of 24 products by 4-bit
#: and 8-bit weights. ``h100/mixed_input_configs.txt`` has 239 configs of 17 products by 4-bit
#: weights.
_LAUNCH_US, _STEP_US, _STORE_US = 2.44, 0.203, 1.44e-4
_DECODE_US, _MULTIPLY_US = (4.02e-6, 2.11e-5), (4.39e-8, 2.36e-7)
_BROUGHT = 2.15e5
#: Where ``a`` is arranged: the factor on the cost of decoding, and the additional µs of a launch.
_DECODE_ARRANGED, _ARRANGE_US = 0.805, 1.01
#: µs of the reducing kernel, and for each partial sum.
_REDUCE_US, _PARTIAL_US = 2.0, 1.07e-6
#: µs to hand a part of a tile to another block, and for each of its elements
#: (``h200/stream_k.txt``).
_HAND_US, _PART_US = 0.5, 2.5e-4
#: Four activities of a tile overlap in part. The tile takes the norm of their times of this order:
#: more than the longest of them, and less than their sum.
_OVERLAP = 2.5


def _shapes(m: int) -> Iterable[tuple[int, int, int, int]]:
    """Return the shapes of tiles of ``m`` rows; for an exhaustive search every possible one."""
    counts = range(1, 5)
    shapes: Iterable[tuple[int, int, int, int]]
    if SEARCH_LIMITED.get():
        shapes = next(shapes for most, shapes in _SHAPES.items() if m <= most)
    else:
        shapes = itertools.product((64, 128), counts, counts, (64, 128))
    return [each for each in shapes if each[1] % each[2] == 0 and (each[2] == 1 or not _rest(m))]


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
            if not _groups_share_step(problem.b):
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
            if problem.b.grid and problem.b.block[1] % k and not _groups_share_step(problem.b):
                k = 64
            if problem.gated and rows == _WGMMA:
                continue  # a consumer needs 64 rows for each half
            n = rows // (2 if problem.gated else 1) * consumers // share
            both = m <= _MOST_ARRANGED and not problem.batch_invariant
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
                    if m >= _SHARED and _last_wave_is_incomplete(problem, config):
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
        """Waves of tiles. A tile takes the norm of four times. They are the steps of one consumer
        in sequence, the work of all consumers, reading the weight from memory, and filling shared
        memory."""
        machine, c = Machine.of(problem.device), Constants.of(problem, config)
        units = _work_units(problem, c)
        steps = -(-problem.k // (c.BLOCK_K * c.splits))
        decoded, multiplied = float(c.rows * c.BLOCK_K), c.rows * c.BLOCK_K * c.BLOCK_M
        of_weight = c.n_ways * decoded * c.PAIR / 2
        launch = _LAUNCH_US
        if c.arranged:
            launch += _ARRANGE_US
            decoded *= _DECODE_ARRANGED
        latency = _STEP_US + decoded * _DECODE_US[0] + multiplied * _MULTIPLY_US[0]
        work = c.n_ways * (decoded * _DECODE_US[1] + multiplied * _MULTIPLY_US[1])
        reading = of_weight * min(units, machine.sms) / machine.memory
        filling = c.stage_bytes / _BROUGHT
        times = (-(-steps // c.k_ways) * latency, steps * work, steps * reading, steps * filling)
        tile = roofline.overlapping(times, _OVERLAP) + c.rows * c.BLOCK_M * _STORE_US
        time = -(-units // machine.sms) * tile
        if c.stream_k:
            time = units / machine.sms * tile + _HAND_US
            time += c.n_ways * c.rows * c.BLOCK_M * _PART_US
        if c.splits > 1:
            time += _REDUCE_US + c.splits * problem.m * problem.n * _PARTIAL_US
        return launch + time

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


def value_scaling(problem: Problem) -> str | None:
    """How values can be multiplied by unrounded scales, as ``Constants.SCALED``; None: they
    cannot."""
    b, value = problem.b, problem.a.dtype
    assert b.form is not None
    if b.scale is None:
        return None
    powers = b.scale.dtype is torch.uint8 and value is torch.bfloat16  # exact
    if problem.out.dtype is torch.float32 and not powers:
        return None  # more precise than 16 bits
    if b.scale.dtype == value or powers:
        return "pair"
    through_fp32 = b.form.name in ("int8", "fp8") and b.zero is None
    return "wide" if through_fp32 and b.scale.dtype.is_floating_point else None


def _by_fours(problem: Problem, matrix: Operand | None) -> bool:
    """Whether a matrix of the result's shape has rows of whole numbers of 64 bits."""
    if matrix is None or matrix.layout != "row" or not matrix.aligned:
        return False
    return matrix.dtype.itemsize == 2 and problem.n % 4 == 0


def _groups_share_step(b: Operand) -> bool:
    """Whether one step along K has several groups."""
    return b.grid and b.block[1] == 32


def _rows_per_group(problem: Problem) -> tuple[int, int]:
    """The mean rows of a group, and the number of groups that have rows; all rows and one without
    groups."""
    if problem.groups is None:
        return problem.m, 1
    count = max(1, min(problem.groups.count, problem.m))
    return -(-problem.m // count), count


def _rest(m: int) -> int:
    """Return the rows of a tile of ``m`` rows beyond the largest power of two."""
    return m - (1 << m.bit_length() - 1)


def _heights(problem: Problem) -> list[int]:
    """Return the rows of the tiles to propose: the least height with one tile, and lower ones. More
    than one tile of few rows would decode the weight again."""
    rows = _rows_per_group(problem)[0]
    highest = most = next((m for m in _HEIGHTS if m >= rows), _HEIGHTS[-1])
    heights: Iterable[int] = _HEIGHTS
    if problem.groups is not None:
        # Sizes vary: some groups are larger than the mean.
        heights = [m for m in heights if not _rest(m)]
        highest = next(m for m in heights if m >= highest)
        most = 4 * highest
    return [m for m in heights if min(64, highest) <= m <= most]


def _work_units(problem: Problem, config: MixedInputConfig) -> int:
    """Return the number of units of work, if all groups have the same size."""
    rows, count = _rows_per_group(problem)
    tile_rows = count * -(-rows // config.BLOCK_M)
    return tile_rows * -(-problem.n // config.BLOCK_N) * config.splits


def _last_wave_is_incomplete(problem: Problem, config: MixedInputConfig) -> bool:
    """Whether some blocks have a tile more than others, and may share these tiles. Every block also
    has a whole tile, so that at most two share one."""
    sms, tiles = problem.device.sm_count, _work_units(problem, config)
    one = problem.groups is None and not problem.batch_invariant and config.splits == 1
    return one and tiles > sms and tiles % sms != 0


def _blocks(problem: Problem, config: MixedInputConfig) -> int:
    """The number of blocks of the grid. The host does not know how many tiles groups have."""
    sms = max(1, problem.device.sm_count)
    return sms if problem.groups is not None else min(sms, _work_units(problem, config))


#: Elements of tensor maps in Triton's and in Gluon's spelling: 16-bit floats, or units of stored
#: values.
_ELEMENTS = {
    torch.bfloat16: ("bf16", gl.bfloat16),
    torch.float16: ("fp16", gl.float16),
    torch.uint8: ("u8", gl.uint8),
    torch.int16: ("i16", gl.int16),
    torch.int32: ("i32", gl.int32),
}


def _map(name: str, box: list[int], dtype: torch.dtype) -> tuple[str, Described]:
    """The type and the value of an operand's tensor map. It reads elements of ``dtype`` in boxes in
    memory order; a box of three dimensions is for an operand with a matrix for each group."""
    text, element = _ELEMENTS[dtype]
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
