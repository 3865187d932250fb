"""``triton.warp_specialized``: on Hopper one warp loads tiles by TMA, the others only multiply.

A kernel whose warps both load and multiply stops multiplying at the end of every tile, while it
rounds and stores. Here the block is persistent and its warps have roles:

* The producer is one warp with 24 registers per thread. It walks all k-steps of all the block's
  tiles and keeps a ring of ``num_stages`` shared-memory stages full. It never waits for an
  epilogue, only for a free stage. The first few stages are requested before the warps take their
  roles. Taking roles takes 0.5 µs, in which these stages arrive. ``evict_first`` adds this hint to
  the loads (``tmm_core.triton.ptx``), which saves 2 to 4 µs if few rows multiply a weight.
* If TMA cannot read one operand, and few rows or columns multiply it, a loader of eight warps loads
  it through registers (``tmm_triton.unaligned_loads``), and arrives at a stage like the producer.
* Consumers, warpgroups with up to 240 registers per thread, hold the accumulators and issue
  ``wgmma`` on full stages. ``cooperative``: all share every tile, each owning some of its rows.
  They do not run in lockstep, so one multiplies while another stores. ``pingpong``: two alternate
  on whole tiles, so that the epilogue of one overlaps the main loop of the other. It wins for a
  short K (8192×4096×512 with silu on an H200: 1.54 × eager cuBLAS, cooperative 1.25).

Two mbarriers per stage synchronize this. ``full`` flips when the stage's bytes have arrived,
``empty`` when every consumer has finished reading it. A wait sees only a parity, and would pass if
the barrier were two phases behind. The producer and cooperating consumers wait for every phase in
turn, so that cannot happen. A ping-pong consumer skips the other's k-steps. ``turn`` holds it until
the other has seen its last stage full: then all phases before its own are complete.

With ``tail_splits`` the tiles of an incomplete wave are split along K into as many parts as there
are SMs for, and come first. Here they are two of ten tiles on four SMs::

    block 3  | tile 0, first half ◀┐ | tile 5              | tile 9              |
    block 2  | tile 0, second half ┘ | tile 4              | tile 8              |
    block 1  | tile 1, first half ◀┐ | tile 3              | tile 7              |
    block 0  | tile 1, second half ┘ | tile 2              | tile 6              |

The block with the first k-steps of a tile adds the parts that the others left in the workspace,
while its other consumers multiply. Splitting tiles at equal distances (stream-K) leaves no SM idle.
But then no two blocks need the same part of an operand at the same time. It took up to 20 % longer
on an H200. With ``splits``, for few tiles and a long K, every tile becomes that many tiles,
each with its own part of K. Their sums go to a workspace, and a second kernel adds them up and
finishes. With ``ranges`` one block sums the parts of a tile one after the other, with the same
bits. In batch-invariant mode few rows use ``splits``, and many rows ``ranges``.

Layouts have powers of two, but tiles of another width, such as 144 columns, often fill a wave
better (cuBLAS has all multiples of 8). A tile of 144 columns is a wide and a narrow product. B is
loaded in boxes as wide as the narrow product. The boxes are consecutive in shared memory, so that
the wide product reads several of them as one operand. An edit of the PTX makes one ``wgmma`` of
both, which reads A once (``tmm_core.triton.ptx``). Where Gluon has no view of several boxes as one,
the narrow product's boxes come first, and only the edit says that the others follow. In a gated
tile the first product has gate's columns and some of up's. In a ping-pong tile of 128×192 a thread
holds 192 accumulators; the tile loads a sixth less than one of 128×128 for as many products.

With ``early`` the launch overlaps the previous one (programmatic dependent launch). A block sets up
its barriers, waits for that launch to complete, and then requests its first k-steps. Before the
wait it may load the weight's first k-steps if the weight is not being written (``static_weights``).
Or it may prefetch them into L2, which is always safe.

A finished tile is written strip by strip through staging buffers, by TMA where TMA can write it,
else by pointers. The residual is loaded into the same buffers during the main loop. When it was
read by pointers after the tile was done, it doubled the time of 8192×4096×512. For an auxiliary
output with a number per row, each strip stores one number per row in the workspace. A second launch
reduces these numbers. Outputs with groups of columns are stored strip by strip too; a strip then
has whole groups. A batch is a third dimension of all tensor maps and of the tile scheduler. Groups
of different sizes are scheduled and described by :mod:`tmm_triton.ragged_tiles`.

Sums of 8-bit floats are added in fp32 after each k-step, since the tensor cores keep some 14 bits.
Scales of blocks along K multiply them there; other scales multiply the finished tile.

This module has the launch, and ``kernel_arguments`` what a launch passes. In this folder,
``hopper_kernel`` sets a block up. ``producer``, ``consumer`` and ``tile_epilogue`` are the roles of
its warps, and ``step_scales`` has the scales of blocks. ``scheduler`` orders the tiles,
``tile_shapes`` counts them, and ``operand_layout`` says how operands are accessed. ``config``
defines a config, ``search_space`` lists the configs that are tried, and ``estimate`` models their
time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from tmm_core import ANY, Anatomy, Problem
from tmm_triton import reduction_order
from tmm_triton.hopper import estimate, search_space, tile_shapes
from tmm_triton.hopper.config import WarpSpecializedConfig, columns_grouped, main_problem
from tmm_triton.hopper.hopper_kernel import warp_specialized_kernel
from tmm_triton.hopper.kernel_arguments import KernelArguments
from tmm_triton.hopper.operand_layout import (
    ALIGNMENT,
    MOST_ROWS,
    by_words,
    scattered,
    stored_by_pointers,
)
from tmm_triton.hopper.tile_shapes import most_tiles, part_elements
from tmm_triton.operands import Build
from tmm_triton.output_ports import MOST, REDUCES, Ports
from tmm_triton.partials import reduction
from tmm_triton.ragged_tiles import rows_ragged
from tmm_triton.triton_kernel import POINTERS, Built, missing_toolchain

#: The largest groups of columns that an auxiliary output may have: a strip has whole groups.
_WIDEST = 128
#: The k-step of 8-bit operands: groups of scales have a multiple of it.
_GROUP = 128
#: The grid has a multiple of this many blocks. L2 merges the requests of neighbouring SMs for the
#: same lines while the SMs run in step, which an odd number of blocks ends. In 64×256 tiles an H100
#: gains up to 17 % (1.2 % on average over 87 random problems). Other tiles, and an H200, differ by
#: up to 4 % for one problem and by 0.1 % on average (``benchmarks/results/*/blocks.txt``).
_NEIGHBOURS = 4


class WarpSpecialized(Built[WarpSpecializedConfig]):
    """Persistent TMA + ``wgmma`` with specialised warps, for 16-bit operands and 8-bit floats on
    Hopper."""

    name = "triton.warp_specialized"
    version = "3"
    config_type = WarpSpecializedConfig
    supports = replace(
        POINTERS,  # also unaligned operands: see declines
        weights=(),
        devices=("cuda",),
        capability=(9, 0),
        below=(9, 1),
        operands=(torch.float16, torch.bfloat16),
        layouts={"a": ("row", "col"), "b": ("row", "col"), "out": ("row",), "residual": ANY},
        scales=("tensor", "row", "group", "block"),
        batch=None,
        gated=True,
        outputs=("row", "tile", "group"),
        reduces=REDUCES,
        ragged=("m", "k"),
        indexed=True,
        zeroed=True,
    )

    def declines(self, problem: Problem) -> Iterable[str]:
        yield from _outputs_declined(problem)
        yield from missing_toolchain()
        if problem.native and (problem.a.layout, problem.b.layout) != ("row", "col"):
            yield "wgmma takes 8-bit operands along K only: a row-major, b column-major"
        for name, operand in (("a", problem.a), ("b", problem.b)):
            if not operand.aligned and not by_words(problem):
                yield f"{name} is not aligned to {ALIGNMENT} bytes (TMA)"
            if operand.grid and operand.block[1] % _GROUP:
                yield f"has steps of {_GROUP} along K, not groups of {operand.block[1]} of {name}"
        if problem.gated and problem.b.layout == "row" and 2 * problem.n % ALIGNMENT:
            yield f"the up half of b is not aligned to {ALIGNMENT} bytes (TMA)"
        if problem.groups is not None:
            if problem.along == "k" and (problem.a.layout, problem.b.layout) != ("col", "row"):
                yield "groups along K begin and end at rows of memory: a column-major, b row-major"
            if problem.along == "m" and problem.a.layout != "row":
                yield f"groups along M begin anywhere, TMA at {ALIGNMENT} bytes: a row-major"
            if problem.groups.a_index is not None:
                yield "TMA does not gather rows on Hopper (triton.gathered copies them before)"
            if scattered(problem) and problem.residual is not None:
                yield "rows of the result are scattered, which is not supported with a residual"
            if problem.extent > MOST_ROWS:
                yield f"more than {MOST_ROWS} rows of groups (TMA)"

    def arithmetic(self, problem: Problem, config: WarpSpecializedConfig) -> str | None:
        if config.tail_splits > 1:
            return None  # M decides which tiles are split
        if problem.groups is not None and problem.along == "k":
            # The sizes of the other groups decide how a range of K is summed.
            return None
        fitting = tile_shapes.adapted(problem, config)
        if (fitting.splits, fitting.ranges) != (config.splits, config.ranges):
            return None  # with this M there is no room for all parts
        if any(port.reduce == "sum" for port in problem.epilogue.outputs):
            return super().arithmetic(problem, config)  # strip by strip
        if problem.a.grid or problem.b.grid:
            # Each step's products are multiplied by their scales.
            parts = f"/split{config.splits}" if config.splits > 1 else ""
            return f"{self.name}/scaled{config.BLOCK_K}{parts}"
        if problem.native:
            # Each step's products are summed separately.
            return f"sm90-k32/promoted{config.BLOCK_K}" if config.splits == 1 else None
        return reduction_order.summed(problem, config.splits * config.ranges, config.BLOCK_K)

    def configs(self, problem: Problem) -> Iterable[WarpSpecializedConfig]:
        return search_space.configs(problem)

    def estimate_us(self, problem: Problem, config: WarpSpecializedConfig) -> float:
        return estimate.estimate_us(problem, config)

    def workspace_bytes(self, problem: Problem, config: WarpSpecializedConfig) -> int:
        config = tile_shapes.adapted(problem, config)
        if problem.groups is not None:
            # Each block's table.
            table = _blocks(problem, config) * problem.groups.count
            return 4 * table if rows_ragged(problem) else 0
        return 4 * (_parts(problem, config) + _ports(problem, config).workspace())

    def anatomy(self, problem: Problem, config: WarpSpecializedConfig) -> Anatomy | None:
        config = tile_shapes.adapted(problem, config)
        return Anatomy(
            block_m=config.BLOCK_M,
            block_n=config.BLOCK_N,
            block_k=config.BLOCK_K,
            group_m=config.GROUP_M,
            tiles=tile_shapes.tile_count(problem, config) * config.splits,
            at_once=max(1, problem.device.sm_count),  # one persistent block each
            steps=tile_shapes.steps(problem, config),
            shared_memory=config.shared_memory(problem),
            model_us=estimate.times_us(problem, config),
        )

    def builds(self, problem: Problem, config: WarpSpecializedConfig) -> list[Build]:
        config = tile_shapes.adapted(problem, config)
        builds = [self.specialize(problem, config)]
        if config.splits > 1:
            builds.append(reduction(problem, config.splits, part_elements(problem, config)))
        return builds + _ports(problem, config).builds()

    def specialize(self, problem: Problem, config: WarpSpecializedConfig) -> Build:
        """Return the build of the product itself, which is launched first."""
        blocks, port_at = _blocks(problem, config), _parts(problem, config)
        given = KernelArguments.of(main_problem(problem, config), config, blocks, port_at)
        options = {
            "num_warps": config.num_warps,
            "launch_pdl": given.c.overlaps,
            "edits": config.edits,
            **reduction_order.options(given.problem),
        }
        return Build.of(
            warp_specialized_kernel, given.arguments, given.constants, divisible=given.divisible,
            options=options, grid=(blocks, 1, 1),
        )  # fmt: skip


def _outputs_declined(problem: Problem) -> Iterable[str]:
    """Yield reasons against the problem's auxiliary outputs."""
    outputs = problem.epilogue.outputs
    grouped = [port for port in outputs if port.group]
    if len(outputs) > (MOST if len(grouped) == len(outputs) else 1):
        yield "writes one auxiliary output, or two with groups of columns"
    for port in outputs:
        if port.kind == "tile" and not port.group:
            yield f"writes no output {port.name} (tile) without groups"
    if len({port.group for port in grouped}) > 1 or columns_grouped(problem) > _WIDEST:
        yield f"writes outputs with groups of one size, of at most {_WIDEST} columns"
    if grouped and stored_by_pointers(problem):
        yield f"writes no groups where rows of out are not multiples of {ALIGNMENT} bytes (TMA)"


def _blocks(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Return the number of blocks of the grid.

    As few as the number of waves allows, rounded up to a multiple of :data:`_NEIGHBOURS`. 512 tiles
    take as many waves in 132 blocks as in 128, and 128 blocks work on a rectangle of tiles and
    leave power for higher clocks. The host does not know how many tiles ragged rows have."""
    sms, tiles = problem.device.sm_count, most_tiles(problem, config) * config.splits
    if config.tail_splits > 1:
        return sms
    if rows_ragged(problem) or tiles <= sms:
        return min(sms, tiles)
    least = -(-tiles // -(-tiles // sms))
    return min(sms, -(-least // _NEIGHBOURS) * _NEIGHBOURS)


def _parts(problem: Problem, config: WarpSpecializedConfig) -> int:
    """Workspace elements for the sums over parts of K."""
    if config.splits > 1:
        return config.splits * part_elements(problem, config)
    if config.tail_splits == 1:
        return 0
    width = config.BLOCK_N * (2 if problem.gated else 1)
    return problem.device.sm_count * config.BLOCK_M * width


def _ports(problem: Problem, config: WarpSpecializedConfig) -> Ports:
    strips = -(-problem.n // config.BLOCK_N) * config.subtiles
    return Ports(problem, 0, strips, after=_parts(problem, config))
