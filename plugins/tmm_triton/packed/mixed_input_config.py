"""The configs of ``triton.mixed_input``, and the constants that its code is specialised on."""

from __future__ import annotations

import hashlib
import pkgutil
from dataclasses import dataclass, replace

import torch
from triton.experimental.gluon import language as gl

from tmm_core import ConfigError, Operand, Problem
from tmm_triton import word_decoders
from tmm_triton.operands import TileConfig, check, kind

#: Rows of one ``wgmma``.
WGMMA = 64
#: mbarriers, and Triton's memory for starting the partitions.
_SHARED_OVERHEAD = 1024
#: Registers per thread of a consumer and of the other warps: by whether three of the other warps
#: rearrange ``a``, then by the number of consumers.
_REGISTERS: dict[bool, dict[int, tuple[int, int]]] = {
    False: {1: (240, 24), 2: (240, 24), 3: (160, 24), 4: (112, 24)},
    True: {1: (240, 80), 2: (216, 80), 3: (144, 80), 4: (112, 64)},
}
#: Minimum rows of a tile of ``a`` whose consumers start their products in turn.
_IN_TURN = 128
#: Rows of a tile of ``a`` that three warps can rearrange while others multiply.
MOST_ARRANGED = 32
#: Rows of a tile of ``a``: where choices are made (``tmm_core.spec.bucket``), in one or two parts.
HEIGHTS = (16, 32, 64, 80, 96, 128, 160, 192, 256)
#: Maximum rows of a tile in which scales multiply the sums of a step. Tiles of more rows multiply
#: the values. The first number holds where that takes one instruction for two values.
_PROMOTED, _MOST_PROMOTED = 64, 128
#: A digest of the device code, for Triton's cache key (:class:`Constants`).
_SOURCE = hashlib.sha256(
    b"".join(
        pkgutil.get_data("tmm_triton", name) or b""  # also from a zip
        for name in (
            "packed/mixed_input_config.py",
            "packed/mixed_input_kernel.py",
            "packed/mixed_input_consumer.py",
            "packed/work_units.py",
            "packed/decoding.py",
            "packed/tile_sums.py",
            "packed/transposed_tiles.py",
            "stream_k.py",
        )
    )
).hexdigest()[:12]


#: Elements of tensor maps in Triton's and in Gluon's spelling: 16-bit floats, or units of stored
#: values.
ELEMENTS = {
    torch.bfloat16: ("bf16", gl.bfloat16),
    torch.float16: ("fp16", gl.float16),
    torch.uint8: ("u8", gl.uint8),
    torch.int16: ("i16", gl.int16),
    torch.int32: ("i32", gl.int32),
}


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
        check("BLOCK_M", self.BLOCK_M, HEIGHTS)
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
        if self.arranged and self.BLOCK_M > MOST_ARRANGED:
            raise ValueError(f"at most {MOST_ARRANGED} rows are arranged, not {self.BLOCK_M}")
        if self.rest and self.k_ways > 1:
            raise ValueError(f"consumers cannot share the steps of a tile of {self.BLOCK_M} rows")
        if self.BLOCK_N // self.n_ways not in (WGMMA, 2 * WGMMA):
            raise ValueError(f"{self.n_ways} consumers cannot share {self.BLOCK_N} columns")

    @property
    def first(self) -> int:
        """Rows of a tile's first part: a power of two, as Triton requires of all tensors."""
        return self.BLOCK_M - self.rest

    @property
    def rest(self) -> int:
        """Rows of its other part, or 0."""
        return rest_of(self.BLOCK_M)

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
        if b.grid and b.block[1] % config.BLOCK_K and not groups_share_step(b):
            raise ConfigError(f"{config} has steps of several groups of {b.block[1]} values")
        if problem.gated and config.high != WGMMA:
            raise ConfigError(f"{config} has {config.high} columns of gate and up, not {WGMMA}")
        if config.splits > 1 and (problem.gated or problem.groups is not None):
            raise ConfigError(f"{config} splits a gated or grouped product")
        parts = config.splits * config.k_ways
        if parts > 1 and problem.k < parts * config.BLOCK_K:
            raise ConfigError(f"{config} divides K {problem.k} into more parts than steps")
        method = value_scaling(problem)
        # Separate sums of a step need registers, and one group per step. In batch-invariant mode M
        # may choose the tile, so all tiles scale alike.
        most = _PROMOTED if method == "pair" and not problem.batch_invariant else _MOST_PROMOTED
        few = most >= config.BLOCK_M and not groups_share_step(b)
        promoted = b.grid and (method is None or few)
        scaled = method if b.grid and not promoted else None
        shared = config.stream_k and last_wave_is_incomplete(problem, config)
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
        registers += [[64 << i, 0] for i in range((rows // WGMMA).bit_length() - 1)]
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
        _, element = ELEMENTS[self.unit]
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
        registers += [[0, 64 // unit << i] for i in range((self.high // WGMMA).bit_length() - 1)]
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


def groups_share_step(b: Operand) -> bool:
    """Whether one step along K has several groups."""
    return b.grid and b.block[1] == 32


def rest_of(m: int) -> int:
    """Return the rows of a tile of ``m`` rows beyond the largest power of two."""
    return m - (1 << m.bit_length() - 1)


def last_wave_is_incomplete(problem: Problem, config: MixedInputConfig) -> bool:
    """Whether some blocks have a tile more than others, and may share these tiles. Every block also
    has a whole tile, so that at most two share one."""
    sms, tiles = problem.device.sm_count, work_units(problem, config)
    one = problem.groups is None and not problem.batch_invariant and config.splits == 1
    return one and tiles > sms and tiles % sms != 0


def work_units(problem: Problem, config: MixedInputConfig) -> int:
    """Return the number of units of work, if all groups have the same size."""
    rows, count = rows_per_group(problem)
    tile_rows = count * -(-rows // config.BLOCK_M)
    return tile_rows * -(-problem.n // config.BLOCK_N) * config.splits


def rows_per_group(problem: Problem) -> tuple[int, int]:
    """The mean rows of a group, and the number of groups that have rows; all rows and one without
    groups."""
    if problem.groups is None:
        return problem.m, 1
    count = max(1, min(problem.groups.count, problem.m))
    return -(-problem.m // count), count
