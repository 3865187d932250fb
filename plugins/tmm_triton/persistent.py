"""``triton.persistent``: one program per SM walks the tiles, fed by bulk tensor copies (TMA).

A persistent program pays its prologue once. With ``FLATTEN`` the loops over tiles and over K are
merged: the loads of the next tile then overlap the epilogue of this one. TMA removes address
arithmetic and bounds checks from the loop. One thread loads a whole tile by one instruction.
Out-of-bounds elements, including the tail of K, arrive as zeros. A descriptor follows its operand's
contiguous dimension. Where the dot needs the other order, the tile is transposed at no cost:
``wgmma`` reads shared memory either way.

Descriptors are made on the host: device-side ones need an allocator set in every thread that
launches.

TMA also stores the output, if a descriptor can express it. SUBTILE=2 stores a tile in two halves:
half the staging buffer leaves room for one more pipeline stage. Gated problems keep two
accumulators, fed from two tiles of the same descriptor of B.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tmm_core import Anatomy, Problem
from tmm_core.triton import Described
from tmm_triton import reduction_order
from tmm_triton.blocks import add_residual, affine, dot, parts, rescale, store, tile_of
from tmm_triton.hopper.operand_layout import described, stored_by_pointers
from tmm_triton.operands import VECTOR, Build, Typed, build, check
from tmm_triton.tile_anatomy import of_tiles
from tmm_triton.tiled import FusedEpilogueConfig
from tmm_triton.triton_kernel import POINTERS, TritonKernel, group_sizes


@triton.jit
def load_tile(desc, z, row, col, LAYOUT: tl.constexpr, BATCHED: tl.constexpr):
    """The tile at (row, col) of matrix z."""
    outer, inner = (row, col) if LAYOUT == "row" else (col, row)
    if BATCHED:
        tile = desc.load([z, outer, inner]).reshape(desc.block_shape[1], desc.block_shape[2])
    else:
        tile = desc.load([outer, inner])
    return tile if LAYOUT == "row" else tl.trans(tile)


@triton.jit
def sum_steps(
    a_desc, b_desc, az, bz, row, col, N, first, last,
    PRECISION: tl.constexpr, GATED: tl.constexpr,
    A_LAYOUT: tl.constexpr, B_LAYOUT: tl.constexpr, BATCHED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sums of one tile over the k-steps from ``first`` to ``last``; two of them if gated."""
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(first, last):
        k = step * BLOCK_K
        a = load_tile(a_desc, az, row, k, A_LAYOUT, BATCHED)
        b = load_tile(b_desc, bz, k, col, B_LAYOUT, BATCHED)
        gate = dot(a, b, gate, PRECISION)
        if GATED:
            b = load_tile(b_desc, bz, k, N + col, B_LAYOUT, BATCHED)
            up = dot(a, b, up, PRECISION)
    return gate, up


@triton.jit
def persistent_kernel(
    a_desc, b_desc, out_desc, a_step, b_step, batch,
    bias_ptr, residual_ptr, out_ptr,
    M, N, K,
    stride_rz, stride_rm, stride_rn,
    stride_oz, stride_om, stride_on,
    stride_bias, alpha, a_scale_ptr, b_scale_ptr, GROUP_M,
    A_SCALE: tl.constexpr, B_SCALE: tl.constexpr,
    EPILOGUE: tl.constexpr, PRECISION: tl.constexpr, GATED: tl.constexpr,
    A_LAYOUT: tl.constexpr, B_LAYOUT: tl.constexpr, BATCHED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SUBTILE: tl.constexpr, FLATTEN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    per_matrix = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    programs = tl.num_programs(0)
    steps = tl.cdiv(K, BLOCK_K)
    # The epilogue has its own tile counter: sharing the loop's would keep values derived from it
    # alive across the main loop, which hinders its pipelining.
    done = tl.program_id(0) - programs
    for tile in tl.range(tl.program_id(0), per_matrix * batch, programs, flatten=FLATTEN):
        z = tile // per_matrix
        # A matrix shared by the whole batch is described once: TMA does not support stride 0.
        az, bz = z * (a_step != 0), z * (b_step != 0)
        tile_m, tile_n = tile_of(tile % per_matrix, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        gate, up = sum_steps(
            a_desc, b_desc, az, bz, row, col, N, 0, steps // PARTS,
            PRECISION, GATED, A_LAYOUT, B_LAYOUT, BATCHED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if PARTS > 1:
            # Same order as kernels with one program per part: equal bits if the parts are equal.
            for part in range(1, PARTS):
                more_gate, more_up = sum_steps(
                    a_desc, b_desc, az, bz, row, col, N,
                    steps * part // PARTS, steps * (part + 1) // PARTS,
                    PRECISION, GATED, A_LAYOUT, B_LAYOUT, BATCHED,
                    BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
                gate += more_gate
                if GATED:
                    up += more_up

        done += programs
        z = done // per_matrix
        tile_m, tile_n = tile_of(done % per_matrix, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        width = 2 * N if GATED else N
        gate = rescale(gate, z, rows, cols, M, width, a_scale_ptr, b_scale_ptr, A_SCALE, B_SCALE)
        if GATED:
            cols += N
            up = rescale(up, z, rows, cols, M, width, a_scale_ptr, b_scale_ptr, A_SCALE, B_SCALE)
        gates, ups = parts(gate, SUBTILE), parts(up, SUBTILE)
        WIDTH: tl.constexpr = BLOCK_N // SUBTILE
        for part in tl.static_range(SUBTILE):
            first = col + part * WIDTH
            at = first + tl.arange(0, WIDTH)
            acc = affine(gates[part], at, N, bias_ptr, stride_bias, alpha)
            if GATED:
                acc = EPILOGUE(acc, affine(ups[part], at + N, 2 * N, bias_ptr, stride_bias, alpha))
            else:
                acc = EPILOGUE(acc)
            acc = add_residual(
                acc, z, rows, at, M, N, residual_ptr, stride_rz, stride_rm, stride_rn
            )
            if out_desc is None:
                store(acc, z, rows, at, M, N, out_ptr, stride_oz, stride_om, stride_on)
            elif BATCHED:
                block = acc.to(out_desc.dtype).reshape(1, BLOCK_M, WIDTH)
                out_desc.store([z, row, first], block)
            else:
                out_desc.store([row, first], acc.to(out_desc.dtype))


#: BLOCK_M, BLOCK_N, BLOCK_K, num_stages, num_warps at 16 bits per element.
_SHAPES = [
    (128, 256, 64, 4, 8),
    (128, 256, 64, 3, 8),
    (256, 128, 64, 4, 8),
    (128, 128, 64, 5, 4),
    (128, 128, 64, 4, 8),
    (64, 256, 64, 4, 4),
    (256, 64, 64, 4, 4),
    (64, 128, 64, 5, 4),
    (64, 64, 128, 4, 4),
    (64, 32, 64, 4, 4),
    (64, 16, 128, 5, 4),
]
#: Shapes if two accumulators share the registers: BLOCK_N is the width of each.
_GATED_SHAPES = [
    (128, 128, 64, 3, 8),
    (128, 128, 64, 4, 8),
    (128, 64, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 5, 4),
    (64, 64, 128, 3, 4),
    (64, 32, 64, 4, 4),
]


#: Additional µs from the launch to the first bytes through a descriptor, compared with pointers
#: (2048×2048×512 on an H200: 14.0, while the machine's rates predict 9.4).
_DESCRIBED_US = 2.0
#: Fraction that each further part of K adds to a product's time: assumed, not measured.
_PART = 0.03


@dataclass(frozen=True, kw_only=True)
class PersistentConfig(FusedEpilogueConfig):
    """A fused epilogue's tile, whether the loops over tiles and K are merged, and the number of
    sequential parts of K."""

    FLATTEN: bool
    PARTS: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check("PARTS", self.PARTS, range(1, 65))
        if self.FLATTEN and self.PARTS > 1:
            raise ValueError("FLATTEN cannot merge the loops over tiles and parts of K")

    def registers(self, problem: Problem) -> int:
        """As for any tile, plus the sum over the previous parts."""
        accumulators = self.BLOCK_M * self.width(problem) // (32 * self.num_warps)
        return super().registers(problem) + (accumulators if self.PARTS > 1 else 0)

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of the operand tiles, the staged output and residual, barriers and bias. An output
        is also staged to be stored by pointers, row by row. A residual is converted there to the
        accumulator's layout."""
        part = self.BLOCK_M * self.BLOCK_N // self.SUBTILE
        staged = part * problem.out.dtype.itemsize
        if problem.residual is not None:
            staged += part * problem.residual.dtype.itemsize
        return super().shared_memory(problem) + staged + 1024


class Persistent(TritonKernel[PersistentConfig]):
    name = "triton.persistent"
    version = "3"
    config_type = PersistentConfig
    supports = replace(
        POINTERS,
        weights=(),
        devices=("cuda", "interpreter"),
        capability=(9, 0),
        layouts={**POINTERS.layouts, "a": ("row", "col"), "b": ("row", "col")},
        unaligned=("out", "residual"),
        gated=True,
    )
    # On Hopper 0.93 to 0.98 of the speed of warp_specialized, where both serve.
    reach, behind = 0.73, 1.1

    def declines(self, problem: Problem) -> Iterable[str]:
        yield from super().declines(problem)
        half = problem.n * problem.b.dtype.itemsize
        if problem.gated and problem.b.layout == "row" and half % VECTOR:
            # Triton's interpreter refuses such a tile; on a GPU it is undefined.
            yield "tiles of the up half of b are not aligned to 16 bytes (TMA)"
        if problem.a.dtype is torch.float32 and not problem.tf32:
            yield "fp32 without TF32 is not for tensor cores"

    def configs(self, problem: Problem) -> list[PersistentConfig]:
        configs = self.every(
            problem,
            _GATED_SHAPES if problem.gated else _SHAPES,
            FLATTEN=(True, False),
            # Among equal estimates the first is the default. If gated, one part was faster on an
            # H200, since the halves of two accumulators are live at once.
            SUBTILE=(1, 2) if problem.gated else (2, 1),
            GROUP_M=group_sizes(problem),
        )
        worth = [c for c in configs if not c.FLATTEN or _next_tile_waits(problem, c)]
        summed_in_parts = [
            replace(c, PARTS=count)
            for count in (reduction_order.equal_splits(problem) if problem.batch_invariant else ())
            for c in worth
            if not c.FLATTEN and c.SUBTILE == 1
        ]
        return self.ranked(problem, worth, 20) + self.ranked(problem, summed_in_parts, 8)

    def splits(self, config: PersistentConfig) -> int:
        return config.PARTS

    def estimate_us(self, problem: Problem, config: PersistentConfig) -> float:
        whole = super().estimate_us(problem, replace(config, PARTS=1))
        # Each part refills the pipeline.
        return whole * (1 + _PART * (config.PARTS - 1)) + _DESCRIBED_US

    def anatomy(self, problem: Problem, config: PersistentConfig) -> Anatomy | None:
        # A program sums all parts of K itself. Fewer tiles than SMs are fewer programs than run at
        # once.
        at_once = max(1, problem.device.sm_count, _programs(problem, config))
        return of_tiles(problem, config, reach=self.reach, splits=1, at_once=at_once)

    def builds(self, problem: Problem, config: PersistentConfig) -> list[Build]:
        kind = "stack" if problem.batch > 1 else "matrix"

        def of(name: str, rows: int, columns: int) -> tuple[str, Described]:
            return described(name, getattr(problem, name), rows, columns, kind, TensorDescriptor)

        own: Typed = {
            "a_desc": of("a", config.BLOCK_M, config.BLOCK_K),
            "b_desc": of("b", config.BLOCK_K, config.BLOCK_N),
        }
        constants: dict[str, Any] = {
            "GATED": problem.gated,
            "BATCHED": problem.batch > 1,
            "A_LAYOUT": problem.a.layout,
            "B_LAYOUT": problem.b.layout,
        }
        if problem.out.layout == "row" and not stored_by_pointers(problem):  # not transposed
            own["out_desc"] = of("out", config.BLOCK_M, config.BLOCK_N // config.SUBTILE)
            constants |= dict.fromkeys(("out_ptr", "stride_oz", "stride_om", "stride_on"))
        if problem.batch > 1:
            own |= {"a_step": ("i64", ("a", 0)), "b_step": ("i64", ("b", 0))}
            own["batch"] = "i32", problem.batch
        else:
            constants |= {"a_step": 0, "b_step": 0, "batch": 1}
        grid = _programs(problem, config), 1, 1
        return [build(persistent_kernel, problem, config, grid, constants, own)]


def _programs(problem: Problem, config: PersistentConfig) -> int:
    """Programs to launch: one per SM, or two if they are small enough to share one."""
    device = problem.device
    count = problem.batch * config.tiles(problem)
    if device.interpreted:
        return min(count, 3)
    shared = config.num_warps <= 4 and 2 * config.shared_memory(problem) <= device.shared_memory
    return min(count, device.sm_count * (2 if shared else 1))


def _next_tile_waits(problem: Problem, config: PersistentConfig) -> bool:
    """Whether FLATTEN can gain: there is a next tile to load during the epilogue, and only one
    accumulator. A merged loop over tiles and K copies two (8192×14336×4096 swiglu: 3.9 ms instead
    of 2.7)."""
    count = problem.batch * config.tiles(problem)
    return not problem.gated and _programs(problem, config) < count
