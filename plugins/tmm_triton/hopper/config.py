"""Defines the Hopper kernel's config and the constants that specialise its code for a problem."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import torch

from tmm_core import Operand, Problem
from tmm_core.triton import releases
from tmm_triton.hopper.operand_layout import (
    box_rows_of_a,
    boxed,
    by_words,
    residual_by_tma,
    scattered,
    side_by_side,
    stored_at_once,
    stored_by_pointers,
)
from tmm_triton.operands import kind
from tmm_triton.pdl import Overlapping
from tmm_triton.ragged_tiles import kinds

#: Maximum parts of a tile of the last wave (``tail_splits``), and of every tile (``splits``), and
#: ranges of K.
MOST_TAIL_SPLITS, MOST_SPLITS, MOST_RANGES = 4, 256, 8
#: Maximum accumulator registers per thread, by the number of consumers: one or two have 240
#: registers per thread, three have 160. ``MOST_SUMMED`` is the maximum if sums of earlier ranges of
#: K are held as well.
MOST_ACCUMULATORS = {1: 128, 2: 192, 3: 128}
MOST_SUMMED = {1: 96, 2: 96, 3: 64}
#: Columns of a tile. Layouts have powers of two, so a tile of 80, 96, 144, 160 or 192 columns is
#: computed as two products side by side.
COLUMNS = (32, 64, 80, 96, 128, 144, 160, 192, 256)
#: Bytes for mbarriers, and for Triton to start the partitions: at most 250 over all configs, with
#: two releases of Triton.
_SHARED_OVERHEAD = 512
#: A digest of the files of this folder, also in a zip, without sources too.
_SOURCE = hashlib.sha256(
    b"".join(
        file.read_bytes()
        for file in sorted(
            resources.files("tmm_triton.hopper").iterdir(), key=lambda file: file.name
        )
        if file.name.endswith((".py", ".pyc"))
    )
).hexdigest()[:12]
#: Registers per thread of the loader.
_LOADER_REGISTERS = 112
#: Maximum number of stages requested before the warps take their roles. Compared with none, 4 saved
#: 0.2 to 0.6 µs in each of 25 problems; 1 and 2 saved less.
_PRIMED = 4


@dataclass(frozen=True, kw_only=True)
class WarpSpecializedConfig(Overlapping):
    """A tile, and how the block's warps share it.

    Args:
        BLOCK_M, BLOCK_N, BLOCK_K: The tile; BLOCK_N counts columns of the output (a gated problem
            reads twice as many of B).
        GROUP_M: Tile rows that are walked as a group.
        num_stages: Stages of the ring.
        schedule: ``"cooperative"`` or ``"pingpong"``.
        consumers: Two that alternate, or one to three that share the tile's rows.
        num_warps: Warps per consumer.
        subtiles: Column strips in which a tile is stored; more strips need less staging memory.
        tail_splits: Parts along K into which the tiles of an incomplete wave are split.
        splits: Parts along K into which every tile is split, added by a second kernel.
        ranges: Ranges of K that a block sums one after the other and then adds up: the same sums
            as with as many ``splits``.
        evict_first: Operands are loaded with the ``evict_first`` hint.
        early: How the launch overlaps the previous one (:mod:`tmm_triton.pdl`).
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    num_stages: int
    schedule: str
    consumers: int
    num_warps: int
    subtiles: int
    tail_splits: int
    splits: int
    evict_first: bool
    early: str = ""
    ranges: int = 1

    def __post_init__(self) -> None:
        if self.schedule not in ("cooperative", "pingpong"):
            raise ValueError(f"schedule must be cooperative or pingpong, got {self.schedule!r}")
        if self.consumers not in ((2,) if self.pingpong else (1, 2, 3)):
            raise ValueError(f"{self.schedule}: {self.consumers} consumers")
        if self.num_warps not in (4, 8) or self.consumers * self.num_warps > 12:
            raise ValueError(f"{self.consumers} consumers of {self.num_warps} warps")
        if not 1 <= self.tail_splits <= MOST_TAIL_SPLITS:
            raise ValueError(f"tail_splits {self.tail_splits}")
        if not 1 <= self.splits <= MOST_SPLITS or self.splits > 1 < self.tail_splits:
            raise ValueError(f"splits {self.splits}, tail_splits {self.tail_splits}")
        if not 1 <= self.ranges <= MOST_RANGES or self.ranges > 1 < self.tail_splits * self.splits:
            raise ValueError(f"ranges {self.ranges} of a tile that is split")
        if not isinstance(self.evict_first, bool):
            raise ValueError(f"evict_first {self.evict_first!r}")
        if self.early not in ("", "wait", "l2", "b"):
            raise ValueError(f"early must be '', 'wait', 'l2' or 'b', got {self.early!r}")
        # One wgmma covers 64 rows, 16 per warp of four.
        if self.rows * (1 if self.pingpong else self.consumers) != self.BLOCK_M:
            raise ValueError(f"BLOCK_M {self.BLOCK_M} does not divide among the consumers")
        if self.rows not in (64, 128, 256) or self.rows % (16 * self.num_warps):
            raise ValueError(f"a consumer of {self.num_warps} warps cannot own {self.rows} rows")
        if self.BLOCK_N not in COLUMNS or self.BLOCK_K not in (32, 64, 128):
            raise ValueError(f"tile N×K {self.BLOCK_N}×{self.BLOCK_K}")
        if self.narrow and (self.BLOCK_K != 64 or self.tail_splits > 1):
            raise ValueError(f"a tile of {self.BLOCK_N} columns needs BLOCK_K 64, tail_splits 1")
        most = MOST_ACCUMULATORS if self.ranges == 1 else MOST_SUMMED
        if self.accumulators > most[self.consumers]:
            raise ValueError(f"{self.accumulators} accumulator registers a thread are too many")
        # With one stage, releasing it would wait for the next stage, which waits for the release.
        if not 2 <= self.num_stages <= 16 or not 1 <= self.GROUP_M <= 1024:
            raise ValueError(f"num_stages {self.num_stages}, GROUP_M {self.GROUP_M}")
        width = self.BLOCK_N // max(1, self.subtiles)
        if width * self.subtiles != self.BLOCK_N or width < 16 or self.narrow % width:
            raise ValueError(f"{self.subtiles} subtiles of {self.BLOCK_N} columns")

    @property
    def edits(self) -> tuple[str, ...]:
        """Edits of the kernel's PTX (:mod:`tmm_core.triton.ptx`)."""
        ahead = releases.views_end_with_boxes()
        wanted = {
            "evict_first": self.evict_first,
            "joined": self.narrow and not ahead,
            "joined_ahead": self.narrow and ahead,
        }
        return tuple(edit for edit in wanted if wanted[edit])

    @property
    def pingpong(self) -> bool:
        return self.schedule == "pingpong"

    @property
    def rows(self) -> int:
        """Rows of the tile per consumer."""
        return self.BLOCK_M if self.pingpong else self.BLOCK_M // self.consumers

    @property
    def narrow(self) -> int:
        """Columns of the tile's second product; 0 if one product has all of the tile's columns."""
        lowest = self.BLOCK_N & -self.BLOCK_N
        return lowest if lowest != self.BLOCK_N else 0

    @property
    def accumulators(self) -> int:
        """fp32 accumulators per thread and product (a gated problem has two)."""
        return self.rows * self.BLOCK_N // (32 * self.num_warps)

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of shared memory per block."""
        c = Constants.of(problem, self)
        stage = c.IN_BYTES * (c.BLOCK_M + c.b_boxes * c.box_columns) * c.BLOCK_K
        staging = c.consumers * c.buffers * c.rows * c.width * c.OUT_BYTES
        # The bias is exchanged between threads through shared memory, and so are scales of columns.
        bias = c.consumers * c.width * problem.bias.itemsize if problem.bias else 0
        scales = 4 * c.consumers * c.columns if c.B_GROUP and not c.ALIKE else 0
        # So are the strips of an output with groups, 16 rows of each warp at a time.
        tiles = [port.dtype.itemsize for port in problem.epilogue.outputs if port.kind == "tile"]
        grouped = 16 * c.consumers * c.num_warps * c.width * max(tiles, default=0)
        return c.num_stages * stage + staging + max(bias, scales, grouped) + _SHARED_OVERHEAD


@dataclass(frozen=True, kw_only=True)
class Constants(WarpSpecializedConfig):
    """The constants that the kernel is specialised on: a config, already checked, and the
    properties of a problem that the code depends on. ``GROUP_M`` is a run-time argument, and 1
    here."""

    #: Whether an operand is column-major.
    A_COL: bool
    B_COL: bool
    GATED: bool
    SCALED: bool
    #: Kinds of the scales of 8-bit operands.
    A_SCALE: str | None
    B_SCALE: str | None
    #: Bytes of an element of the operands.
    IN_BYTES: int
    BIAS: bool
    RESIDUAL: bool
    BATCHED: bool
    #: The residual is loaded by TMA, into the staging buffers of the result.
    FETCH: bool
    #: The output is stored through pointers, element by element.
    POINTERS: bool
    #: Bytes of an element of the output.
    OUT_BYTES: int
    #: Rows of A per box.
    A_ROWS: int
    #: Stages requested before the warps take their roles.
    PRIMED: int
    #: The operand, ``"a"`` or ``"b"``, that warps load word by word, and how many warps do.
    WORDS: str | None = None
    LOADERS: int = 8
    #: The dimension along which groups differ in size, and whether rows of no group become zeros.
    RAGGED: str | None = None
    ZEROED: bool = False
    #: Rows of the result are stored where ``out_index`` says, and multiplied by ``out_weights``.
    SCATTERED: bool = False
    WEIGHTED: bool = False
    #: Elements that a thread stores at once where it stores through pointers.
    STORED: int = 1
    #: Values along K that share a scale; 0 if a row has only one.
    A_GROUP: int = 0
    B_GROUP: int = 0
    #: Columns of B that share a scale, and whether all columns of a product share one.
    B_OUTER: int = 1
    ALIKE: bool = False
    #: How each row is reduced to an auxiliary output; None if there is none.
    REDUCE: str | None = None
    #: Columns of a group of auxiliary outputs, 0 if none has groups; the kinds of these outputs.
    GROUP: int = 0
    PORT: str | None = None
    PORT_2: str | None = None
    #: Triton's cache key holds constants' values, not the code of the properties below. This digest
    #: stands for that code.
    SOURCE: str = _SOURCE

    def __post_init__(self) -> None:
        boxes = self.a_boxes if self.WORDS == "a" else self.b_boxes
        if self.WORDS is not None and (self.consumers == 3 or boxes > 1):
            raise ValueError(f"{self.WORDS} is loaded by words, {boxes} boxes at a time")
        if self.early in ("l2", "b") and self.WORDS == "b":
            raise ValueError("b is loaded by words, which starts only after the previous launch")

    @classmethod
    def of(cls, problem: Problem, config: WarpSpecializedConfig) -> Constants:
        problem = main_problem(problem, config)
        if config.narrow and not side_by_side(problem):
            raise ValueError(f"tiles of {config.BLOCK_N} columns do not serve {problem}")
        if config.subtiles > 1 and config.subtiles % 2 and residual_by_tma(problem):
            raise ValueError(f"two alternating buffers cannot load {config.subtiles} strips")
        for operand in (problem.a, problem.b):
            if operand.grid and operand.block[1] % config.BLOCK_K:
                raise ValueError(f"{config} has steps of several groups of {operand.block[1]}")
        group = columns_grouped(problem)
        if group and config.BLOCK_N // config.subtiles % group:
            raise ValueError(f"strips of {config} have parts of groups of {group} columns")
        constants = cls(
            **{**vars(config), "GROUP_M": 1},
            **_of_problem(problem),
            A_ROWS=box_rows_of_a(problem, config.rows),
            PRIMED=min(config.num_stages, 16 if config.early in ("l2", "b") else _PRIMED),
        )
        if not problem.b.grid:
            return constants
        # The up projection's columns begin at N.
        offset = problem.n if problem.gated else 0
        shared = math.gcd(constants.B_OUTER, offset)
        return replace(constants, ALIKE=shared % constants.columns == 0)

    @property
    def overlaps(self) -> bool:
        """Whether the kernel is launched while the previous launch may still run."""
        return bool(self.early)

    @property
    def pieces(self) -> int:
        """``PRIMED`` rounded up to a power of two."""
        return 1 << (self.PRIMED - 1).bit_length()

    @property
    def stacked(self) -> bool:
        """Whether the result is a stack of matrices with equally many tiles."""
        return self.out_kind == "stack"

    @property
    def a_kind(self) -> str:
        return kinds(self.RAGGED, self.BATCHED)["a"]

    @property
    def b_kind(self) -> str:
        return kinds(self.RAGGED, self.BATCHED)["b"]

    @property
    def out_kind(self) -> str:
        """The result's kind of tensor map, and a residual's."""
        return kinds(self.RAGGED, self.BATCHED)["out"]

    @property
    def a_box(self) -> list[int]:
        """The shape of a box of A in shared memory."""
        return boxed(self.rows, self.BLOCK_K, self.A_COL, self.a_kind)

    @property
    def b_box(self) -> list[int]:
        """The shape of a box of B in shared memory."""
        return boxed(self.BLOCK_K, self.box_columns, self.B_COL, self.b_kind)

    @property
    def arrivals(self) -> int:
        """Arrivals that make a stage full: one of the producer, one of the loader if there is
        one."""
        return 1 if self.WORDS is None else 2

    @property
    def policy(self) -> str:
        """The loader's eviction policy."""
        return "evict_first" if self.evict_first else ""

    @property
    def a_boxes(self) -> int:
        """TMA boxes of A per stage, one for each consumer that shares the tile."""
        return self.BLOCK_M // self.rows

    @property
    def b_boxes(self) -> int:
        """TMA boxes of B per stage."""
        return (self.columns + self.second) // self.box_columns

    @property
    def box_columns(self) -> int:
        """Columns of a box of B."""
        return self.narrow or self.columns

    @property
    def ahead(self) -> int:
        """Boxes of a stage that precede the first product's. These are the second product's boxes
        where Gluon has no view of several boxes as one; then only ``joined_ahead`` passes wgmma
        the address of B."""
        return (
            self.second // self.box_columns
            if self.narrow and releases.views_end_with_boxes()
            else 0
        )

    @property
    def promoted(self) -> bool:
        """Whether each k-step is summed separately, and the sums are added in fp32
        (``consumer``)."""
        return self.IN_BYTES == 1

    @property
    def stepped(self) -> bool:
        """Whether the sums of each k-step are multiplied by scales of their own
        (``step_scales``)."""
        return self.A_GROUP > 0 or self.B_GROUP > 0

    @property
    def paired(self) -> bool:
        """Whether registers hold the sums of two products besides the accumulators: one product
        runs while the sums of the other are scaled."""
        fits = not self.halves and self.consumers < 3 and self.columns * self.products <= 128
        return self.stepped and fits

    @property
    def scales_ahead(self) -> int:
        """How many steps ahead scales are loaded. On an H100 more than two took longer if other
        consumers multiply meanwhile, or if products are not paired."""
        few = self.columns * self.products <= 64 or self.consumers == 1
        return 4 if self.paired and few else 2

    @property
    def products(self) -> int:
        """Columns of B per column of the tile: 2 for gate and up, else 1."""
        return 2 if self.GATED else 1

    @property
    def halves(self) -> bool:
        """Whether the tile's left and right halves are separate products, like gate and up in a
        gated tile. Registers hold the separate sum of only one half at a time."""
        return self.promoted and not self.GATED and self.BLOCK_N == 256

    @property
    def second(self) -> int:
        """Columns of the second accumulator; 0 if there is none. In a gated tile it belongs to the
        up projection. In a gated tile of split width it has the up columns that the first lacks."""
        if self.narrow:
            return self.products * self.narrow
        return self.columns if self.GATED or self.halves else 0

    @property
    def columns(self) -> int:
        """Columns of a product; of the first if the two differ."""
        if self.narrow:
            return self.products * (self.BLOCK_N - self.narrow)
        return self.BLOCK_N // 2 if self.halves else self.BLOCK_N

    @property
    def width(self) -> int:
        """Columns of a strip."""
        return self.BLOCK_N // self.subtiles

    @property
    def buffers(self) -> int:
        """Staging buffers per consumer: with two, one is filled while the other is stored."""
        return min(2, self.subtiles)

    @property
    def groups(self) -> int:
        """Warpgroups per block, the producer's included."""
        return -(-(self.num_warps + sum(self.worker_warps)) // 4)

    @property
    def mma_n(self) -> int:
        """Columns of one wgmma. ptxas refuses one with 128 accumulators per thread if the block
        starts with 128 registers per thread (512 threads), although the consumers have more by
        then."""
        return min(self.columns, 128 if self.groups > 3 else 256)

    @property
    def worker_warps(self) -> list[int]:
        """Warps of each role except the first consumer, which is Triton's default partition."""
        loaders = [] if self.WORDS is None else [self.LOADERS]
        return [self.num_warps] * (self.consumers - 1) + [1] + loaders

    @property
    def worker_registers(self) -> list[int]:
        """Registers per thread of these roles. The producer has the minimum of setmaxnreg.
        Consumers have an equal share of the remainder of the SM's 65536; the first gets the
        rest."""
        producer, loaders = 24, [] if self.WORDS is None else [_LOADER_REGISTERS]
        groups = self.consumers * self.num_warps // 4
        each = 65536 // (128 * self.groups) // 8 * 8
        spared = self.groups * each - producer - sum(loaders) * self.LOADERS // 4
        consumer = min(240, spared // groups // 8 * 8)
        return [consumer] * (self.consumers - 1) + [producer] + loaders


@functools.lru_cache(maxsize=16)  # a search makes some 150 configs' constants
def _of_problem(problem: Problem) -> dict[str, Any]:
    """Return the constants that do not depend on the config."""
    outputs, groups = problem.epilogue.outputs, problem.groups
    grouped = [port.kind if port.group else None for port in outputs] + [None, None]
    return {
        "A_COL": problem.a.layout == "col",
        "B_COL": problem.b.layout == "col",
        "GATED": problem.gated,
        "SCALED": problem.scaled,
        "A_SCALE": kind(problem.a),
        "B_SCALE": kind(problem.b),
        "IN_BYTES": problem.a.dtype.itemsize,
        "BIAS": problem.bias is not None,
        "RESIDUAL": problem.residual is not None,
        "BATCHED": problem.batch > 1,
        "FETCH": residual_by_tma(problem),
        "POINTERS": stored_by_pointers(problem),
        "OUT_BYTES": problem.out.dtype.itemsize,
        "WORDS": by_words(problem),
        "RAGGED": groups.ragged if groups else None,
        "ZEROED": groups is not None and groups.zeroed,
        "SCATTERED": scattered(problem),
        "WEIGHTED": groups is not None and groups.out_weights is not None,
        "STORED": stored_at_once(problem),
        "REDUCE": next((port.reduce for port in outputs), None),
        "GROUP": columns_grouped(problem),
        "PORT": grouped[0],
        "PORT_2": grouped[1],
        "A_GROUP": problem.a.block[1] if problem.a.grid else 0,
        "B_GROUP": problem.b.block[1] if problem.b.grid else 0,
        "B_OUTER": problem.b.block[0] if problem.b.grid else 1,
    }


def columns_grouped(problem: Problem) -> int:
    """Columns of a group of the problem's auxiliary outputs; 0 if none has groups."""
    return max((port.group for port in problem.epilogue.outputs), default=0)


def main_problem(problem: Problem, config: WarpSpecializedConfig) -> Problem:
    """Return the problem of the main kernel, without the work of the reducing kernel."""
    return problem if config.splits == 1 else unfinished(problem)


@functools.lru_cache(maxsize=16)
def unfinished(problem: Problem) -> Problem:
    """The product alone in fp32, which another kernel finishes; it applies scales of whole rows
    too."""
    return Problem(
        m=problem.m,
        n=problem.n,
        k=problem.k,
        a=problem.a if problem.a.grid else replace(problem.a, scale=None),
        b=problem.b if problem.b.grid else replace(problem.b, scale=None),
        out=Operand(torch.float32),
        device=problem.device,
        batch=problem.batch,
    )
