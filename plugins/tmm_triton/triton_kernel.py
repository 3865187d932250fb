"""Base classes of this package's kernels: they decline problems, name reduction orders, and turn
lists of tiles into search spaces."""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
import triton

from tmm_core import (
    ANY,
    Anatomy,
    Config,
    Kernel,
    Launcher,
    Machine,
    Problem,
    Resources,
    Supports,
    Traits,
)
from tmm_core.triton import SEARCH_LIMITED, launcher, reraise, target_of, toolchain
from tmm_triton import reduction_order, roofline, tile_anatomy
from tmm_triton.operands import Build, TileConfig
from tmm_triton.pdl import hopper_or_later

C = TypeVar("C", bound=TileConfig)
D = TypeVar("D", bound=Config)

#: Operand dtypes of the tensor cores (16 bits or TF32), and results of rounding an fp32 sum.
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
#: Registers per thread, of 255, left for tiles after addresses, masks and indices.
_MOST_REGISTERS = 200
#: The same if the tensor cores read operands from registers: before Hopper.
_MOST_REGISTERS_MMA = 176
#: Rows of Blackwell's tensor memory: an accumulator of 256 rows is read back as two, and spills.
_TENSOR_MEMORY_ROWS = 128
#: Limit of the grid's second and third dimension.
GRID_LIMIT = 65535
#: Problems of a kernel over pointers: any strides, and one accumulator.
POINTERS = Supports(
    devices=("cuda", "hip", "interpreter"),
    capability=(8, 0),
    operands=FLOATS,
    formats=("fp8",),
    weights=ANY,
    scales=("tensor", "row"),
    out=FLOATS,
    bias=FLOATS,
    residual=FLOATS,
    layouts=dict.fromkeys(("a", "b", "out", "residual"), ANY),
    unaligned=ANY,
    wide=True,
    batch=GRID_LIMIT,
    alpha=True,
    epilogues=True,
)

#: Problems of kernels whose step unpacks codes and applies zero points and scales of groups.
STEPPED = replace(POINTERS, scales=("tensor", "row", "group", "block"), zeros=True, packed=True)


class Built(Kernel[D]):
    """A kernel that lists its launches, so that it can be compiled without its GPU."""

    #: A config sums every row in one order. It adds products in the order of k, or as an MMA adds
    #: them, and parts of K one after the other. Copies of operands preserve bits.
    traits = Traits(deterministic=True, batch_invariant=True)

    @abc.abstractmethod
    def builds(self, problem: Problem, config: D) -> list[Build]:
        """Every launch of a call, in order."""

    def default_config(self, problem: Problem) -> D:
        return next(iter(self.configs(problem)))

    def compile(self, problem: Problem, config: D) -> None:
        target = target_of(problem.device)
        for build in self.builds(problem, config) if target is not None else ():
            build.compile_for(target)

    def bind(self, problem: Problem, config: D) -> Launcher:
        device, groups = problem.device.type, problem.groups
        scratch = self.workspace_bytes(problem, config) // 4
        return launcher(
            [build.step(device) for build in self.builds(problem, config)],
            problem.out_shape,
            problem.out.dtype,
            workspace=(scratch, torch.float32) if scratch else None,
            extras=(*groups.given, *problem.parts) if groups is not None else (),
            outputs=len(problem.epilogue.outputs),
        )

    def resources(self, problem: Problem, config: D) -> list[Resources]:
        return tile_anatomy.resources(problem, self.builds(problem, config))


def version_with(own: str, inner: Iterable[Kernel[Any]]) -> str:
    """The version of a kernel whose own code has version ``own``, with the versions of the kernels
    that it runs.

    >>> version_with("3", [])
    '3'
    """
    return "+".join([own, *(each.version for each in inner)])


class TritonKernel(Built[C]):
    """A tiled kernel. Subclasses implement ``configs`` and ``builds``."""

    supports = POINTERS
    #: Fraction of the tensor cores' peak that the main loop reaches if nothing else limits it; for
    #: estimates.
    reach: ClassVar[float] = 0.5
    #: Factor on the estimate on Hopper and later, so that it can be compared with an estimate by
    #: ``triton.warp_specialized``. Its medians over 869 shipped records are 1.02 to 1.23 for tiled
    #: kernels. With it, tuning proposes a median of 16 candidates for a problem, instead of 19, and
    #: they include 222 of 290 winners, instead of 214.
    behind: ClassVar[float] = 1.0

    def declines(self, problem: Problem) -> Iterable[str]:
        yield from unsteppable(problem)
        device = problem.device
        if device.type != "cuda":
            return
        yield from missing_toolchain()
        dtypes = problem.a.dtype, problem.b.dtype
        narrow = any(dtype.itemsize == 1 and dtype.is_floating_point for dtype in dtypes)
        if narrow and not (device.nvidia and device.capability >= (8, 9)):
            yield "8-bit floats need an NVIDIA GPU of compute capability 8.9"

    def estimate_us(self, problem: Problem, config: C) -> float:
        splits = self.splits(config)
        times = roofline.times_us(problem, config, splits=splits, reach=self.reach)
        factor = self.behind if hopper_or_later(problem) else 1.0
        return factor * (Machine.EMPTY_US + max(times.values()))

    def anatomy(self, problem: Problem, config: C) -> Anatomy | None:
        return tile_anatomy.of_tiles(problem, config, reach=self.reach, splits=self.splits(config))

    def arithmetic(self, problem: Problem, config: C) -> str | None:
        if problem.a.grid or problem.b.grid:
            return self.own_arithmetic(problem, config)  # step by step
        if any(port.reduce == "sum" for port in problem.epilogue.outputs):
            return self.own_arithmetic(problem, config)  # tile by tile
        shared = reduction_order.summed(problem, self.splits(config), config.BLOCK_K)
        return shared or self.own_arithmetic(problem, config)

    def own_arithmetic(self, problem: Problem, config: C) -> str | None:
        """A reduction order of this config alone. Its ``early`` is left out, since that does not
        affect sums."""
        if getattr(config, "early", ""):
            config = replace(config, early="")  # type: ignore[call-arg]  # it has it
        return Kernel.arithmetic(self, problem, config)

    def splits(self, config: C) -> int:
        """Return the number of ranges into which the sum over K is split."""
        return 1

    def every(
        self, problem: Problem, shapes: Sequence[tuple[int, ...]], **values: Iterable[Any]
    ) -> list[C]:
        """Return the configs with each tile that :func:`proposed` makes from ``shapes`` and each
        combination of ``values`` for the other fields, the first field slowest. A tile is finished
        in parts only if it fills the registers."""
        config_type: Any = self.config_type
        names = [field.name for field in dataclasses.fields(TileConfig)]
        most = step_limit(problem)
        tiles = [
            dict(zip(names, (m, n, min(k, most), *rest), strict=True))
            for m, n, k, *rest in proposed(problem, shapes)
        ]
        configs = [
            config_type(**dict(zip(values, given, strict=True)), **tile)
            for given in itertools.product(*values.values())
            for tile in tiles
        ]
        return [c for c in configs if c.parts == 1 or fills_registers(problem, c)]

    def ranked(self, problem: Problem, configs: Iterable[C], most: int) -> list[C]:
        """The ``configs`` that fit the device and the shape, without duplicates, best estimate
        first, at most ``most`` for a tuning."""
        if problem.device.interpreted:
            return list(dict.fromkeys(configs))[:3]
        fitting = _fitting(problem, configs)
        ranked = sorted(fitting, key=lambda c: self.estimate_us(problem, c))
        return ranked[:most] if SEARCH_LIMITED.get() else ranked


def proposed(problem: Problem, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Tiles for the problem's dtype and device, from ``shapes`` written for 16-bit elements:
    ``(BLOCK_M, BLOCK_N, BLOCK_K, num_stages, num_warps)``.

    fp32 and 8-bit floats get the same number of bytes along K, except for unaligned 8-bit ones,
    which pass through registers one by one. Without TF32, fp32 is summed by FMAs from registers,
    where larger tiles spill.
    """
    if problem.device.interpreted:
        return _INTERPRETED
    if problem.native and problem.a.aligned and problem.b.aligned:
        return [(m, n, min(512, 2 * k), *rest) for m, n, k, *rest in shapes]
    if problem.a.dtype is not torch.float32:
        return list(shapes)
    if not problem.tf32:
        return _FMA
    return [(m, n, max(16, k // 2), *rest) for m, n, k, *rest in shapes]


def unsteppable(problem: Problem) -> Iterator[str]:
    """Yield why scales or zero points cannot be applied step by step."""
    for name, operand in (("a", problem.a), ("b", problem.b)):
        if operand.grid and operand.block[1] not in (16, 32, 64, 128, 256, 512):
            yield f"has steps of 16 to 512 along K, not groups of {operand.block[1]} of {name}"
    zero = problem.b.zero
    if problem.b.pack > 2:
        yield f"unpacks two values of an element, not {problem.b.pack}"
    if zero is not None and zero.is_floating_point:
        rounded = problem.a.dtype.itemsize == 2
        if rounded and problem.out.dtype not in (problem.a.dtype, torch.bfloat16):
            yield f"rounds values to {problem.a.dtype}, too coarse for {problem.out.dtype}"


def step_limit(problem: Problem) -> int:
    """Return the longest step along K that is inside one group of each operand."""
    groups = [operand.block[1] for operand in (problem.a, problem.b) if operand.grid]
    return min(groups, default=512)


def fills_registers(problem: Problem, config: TileConfig) -> bool:
    """Whether the accumulators take half of a thread's registers. Then a tile is faster finished in
    parts: on an H200 a fused 4096³ took 205 µs in two parts and 245 in one."""
    accumulators = config.BLOCK_M * config.width(problem)
    return problem.device.interpreted or accumulators >= 128 * 32 * config.num_warps


def group_sizes(problem: Problem) -> tuple[int, ...]:
    """Return the values of GROUP_M worth trying: one row of tiles if M is long, all rows if N is.
    For a square result a wave gets as many rows of tiles as columns."""
    if problem.device.interpreted:
        return (2,)
    if problem.m > 10 * problem.n:
        return (1,)
    if problem.n > 10 * problem.m:
        return (32,)
    return (8, 16) if problem.m >= 4096 else (8,)


#: Few programs, since each takes the interpreter about 7 ms, and a second size for tails.
_INTERPRETED: list[tuple[int, ...]] = [(128, 128, 64, 2, 4), (32, 64, 32, 2, 4)]
_FMA: list[tuple[int, ...]] = [
    (64, 64, 32, 3, 8),
    (64, 64, 16, 3, 4),
    (32, 32, 32, 3, 4),
    (16, 32, 32, 3, 2),
]


def _fitting(problem: Problem, configs: Iterable[C]) -> list[C]:
    """The configs whose tile fits shared memory and registers and is, in each dimension, no larger
    than the problem needs, or the smallest available."""
    registers = _MOST_REGISTERS if hopper_or_later(problem) else _MOST_REGISTERS_MMA
    blackwell = problem.device.capability >= (10, 0)
    fit = [
        c
        for c in dict.fromkeys(_with_fewer_stages(problem, c) for c in configs)
        if c.shared_memory(problem) <= problem.device.shared_memory
        and c.registers(problem) <= registers
        and not (blackwell and c.BLOCK_M > _TENSOR_MEMORY_ROWS)
    ]
    sizes = {"BLOCK_M": problem.m, "BLOCK_N": problem.n, "BLOCK_K": problem.k}
    for block, size in sizes.items():
        least = min((getattr(c, block) for c in fit), default=0)
        most = max(least, triton.next_power_of_2(size))
        fit = [c for c in fit if getattr(c, block) <= most]
    return fit


def _with_fewer_stages(problem: Problem, config: C) -> C:
    """``config`` with the number of stages reduced to fit shared memory, at least one."""
    while config.num_stages > 1 and config.shared_memory(problem) > problem.device.shared_memory:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def missing_toolchain() -> tuple[str, ...]:
    """Why Triton's driver cannot build its launcher on this machine, if so.

    The driver compiles a C extension when a process first launches a kernel, unless Triton's cache
    has it. From Triton 3.7 on one extension serves every kernel.
    """
    if triton.knobs.build.impl is not None:
        return ()
    lacking = toolchain.lacking()
    return () if lacking is None else _driver_fault(lacking)


@functools.cache
def _driver_fault(lacking: str) -> tuple[str, ...]:
    """Why Triton's driver does not load, if so. Cached: a failed build takes 50 ms."""
    try:
        triton.runtime.driver.active.utils.launch  # noqa: B018  # loading it is the test
    except Exception as error:  # any failed build means the same
        reraise(error)
        return (lacking,)
    return ()
