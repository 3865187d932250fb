"""``triton.realigned``: copies misaligned operands to 16-byte aligned rows for a faster kernel.

Bulk tensor copies (TMA) and vector loads need rows that start at multiples of 16 bytes. Without
that, cuBLAS drops to a quarter of its rate (4097³ on an H200: 1028 µs, an aligned neighbour 190).
Copying an operand is O(n²) against the product's O(n³)::

    a ─┐                      ┌─ rows of a, 128 bytes ─┐
       ├─ one launch, a tile ─┤                        ├─ inner kernel ─ out, rows anywhere
    b ─┘  to a program        └─ rows of b, 128 bytes ─┘

* Only misaligned operands are copied, in their own memory order; without a contiguous dimension
  the copy is row-major.
* Eight bytes are loaded, shifted into place and stored at once: the aligned words at both ends of
  a row can always be read. Without a contiguous dimension elements are loaded one by one.
* One launch copies all matrices of a batch; a matrix that the whole batch shares is copied once.
* Zeros follow each row's end, so that a vector or a box that reaches past it reads zeros.
* The config names the inner kernel. Its problem has aligned operands and the original output, which
  it stores by pointers if TMA cannot. If it can overlap, it is launched while the copy ends.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from tmm_core import Anatomy, Config, ConfigError, Kernel, Launcher, Machine, Operand, Problem
from tmm_core.triton import pointer
from tmm_triton.blocks import words
from tmm_triton.hopper.config import WarpSpecializedConfig
from tmm_triton.operands import VECTOR, Build
from tmm_triton.pdl import hopper_or_later
from tmm_triton.plugin import load
from tmm_triton.triton_kernel import POINTERS, Built, version_with

#: The kernels that may multiply the realigned operands, the least demanding last.
_INNER = (
    "triton.warp_specialized",
    "triton.persistent",
    "triton.split_k",
    "triton.grouped",
    "triton.fused_epilogue",
)
#: Maximum number of configs in all, and per inner kernel.
_MOST, _MOST_OF_ONE = 10, 6
#: Bytes of one program's tile, maximum elements in its rows, and the program's warps. Both operands
#: of 4097³ on an H200 take 37.7 µs, 3.6 TB/s; in tiles of twice the size 41.2.
_TILE_BYTES, _WIDTH, _WARPS = 8192, 256, 8
#: A copy's rows are multiples of this many bytes, so that boxes of 128 bytes are four whole L2
#: sectors. With multiples of 16 they would touch five.
_PITCH = 128
#: µs of a copy's launch, in addition to the product's.
_LAUNCH_US = 2.0
_INT32_MAX = 2**31 - 1


@triton.jit
def realign(
    source, copy, rows, cols, stride, step, pitch, apart, tile,
    ROWS: tl.constexpr, COLS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Copy one [ROWS, COLS] tile into rows of ``pitch`` elements, with zeros after each row's end.
    Matrices of a batch are ``apart`` elements apart, their copies are adjacent."""
    across = tl.cdiv(pitch, COLS)
    if apart is not None:
        tiles = tl.cdiv(rows, ROWS) * across
        z = (tile // tiles).to(tl.int64)
        tile = tile % tiles
        source += z * apart
        copy += z * rows * pitch
    row = (tile // across) * ROWS + tl.arange(0, ROWS)
    first = (tile % across) * COLS
    if step is None:
        PER: tl.constexpr = 64 // source.dtype.element_ty.primitive_bitwidth
        word = first // PER + tl.arange(0, COLS // PER)
        block = words(source, row, word, rows, cols, stride)
        targets = copy.to(tl.pointer_type(tl.uint64)) + row[:, None] * (pitch // PER)
        inside = (row[:, None] < rows) & (word[None, :] * PER < pitch)
        tl.store(targets + word[None, :], block, mask=inside)
    else:
        col = first + tl.arange(0, COLS)
        inside = (row[:, None] < rows) & (col[None, :] < cols)
        ptrs = source + row[:, None] * stride + col[None, :] * step
        block = tl.load(ptrs, mask=inside, other=0.0)
        # If it were stored in its loaded shape, Triton would use the stores' layout for the loads.
        # Neighbouring lanes would be 16 bytes apart, and every 2-byte load of a warp would span 512
        # bytes.
        packs = first + tl.arange(0, COLS // PACK)[:, None] * PACK + tl.arange(0, PACK)[None, :]
        targets = copy + row[:, None, None] * pitch + packs[None, :, :]
        inside = (row[:, None, None] < rows) & (packs[None, :, :] < pitch)
        tl.store(targets, block.reshape(ROWS, COLS // PACK, PACK), mask=inside)


@triton.jit
def realign_kernel(
    x_ptr, x_copy, x_rows, x_cols, x_stride, x_step, x_pitch, x_apart,
    y_ptr, y_copy, y_rows, y_cols, y_stride, y_step, y_pitch, y_apart,
    x_tiles,
    X_ROWS: tl.constexpr, X_COLS: tl.constexpr, Y_ROWS: tl.constexpr, Y_COLS: tl.constexpr,
    PACK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Realign x and, if there is a second misaligned operand, y."""
    if CHAINED:
        # The product's launch may begin once every program runs. It waits for the copies itself.
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    if y_ptr is None or tile < x_tiles:
        realign(
            x_ptr, x_copy, x_rows, x_cols, x_stride, x_step, x_pitch, x_apart, tile,
            X_ROWS, X_COLS, PACK,
        )  # fmt: skip
    else:
        tile -= x_tiles
        realign(
            y_ptr, y_copy, y_rows, y_cols, y_stride, y_step, y_pitch, y_apart, tile,
            Y_ROWS, Y_COLS, PACK,
        )  # fmt: skip


@functools.cache
def inner_kernels() -> dict[str, Kernel[Any]]:
    """Return the inner kernels by name; one that cannot be imported declines every problem."""
    return {name: load(name) for name in _INNER}


def _inner(name: object) -> Kernel[Any]:
    """Return the inner kernel of that name. Raises ConfigError if there is none."""
    names = list(inner_kernels())
    if name not in names:
        raise ConfigError(f"inner must be one of {names}, got {name!r}")
    return inner_kernels()[str(name)]


@dataclass(frozen=True, kw_only=True)
class RealignedConfig(Config):
    """The name of the kernel that multiplies the realigned operands, and its config. In JSON both
    form one flat object.

    Raises:
        ValueError: There is no such inner kernel, or the config belongs to another.
    """

    inner: str
    config: Config

    def __post_init__(self) -> None:
        if type(self.config) is not _inner(self.inner).config_type:
            raise ValueError(f"{self.inner} takes no {type(self.config).__name__}")

    @property
    def assumes(self) -> tuple[str, ...]:
        return self.config.assumes

    def to_json(self) -> dict[str, Any]:
        return {"inner": self.inner, **self.config.to_json()}

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> RealignedConfig:
        fields = dict(doc)
        kernel = _inner(fields.pop("inner", None))
        return cls(inner=kernel.name, config=kernel.config_type.from_json(fields))


class Realigned(Built[RealignedConfig]):
    name = "triton.realigned"
    config_type = RealignedConfig

    @functools.cached_property
    def version(self) -> str:
        return version_with("3", inner_kernels().values())

    # Inner kernels may decline more.
    supports = replace(POINTERS, formats=(), weights=(), gated=True)

    def declines(self, problem: Problem) -> Iterable[str]:
        if problem.a.aligned and problem.b.aligned:
            yield "a and b are aligned already"
        elif problem.a.dtype is torch.float32 and not problem.tf32:
            yield "fp32 without TF32 is bound by its arithmetic, not by its loads"
        else:
            served = realigned(problem)
            against = [kernel.reasons_against(served) for kernel in inner_kernels().values()]
            yield from against[-1] if all(against) else ()

    def configs(self, problem: Problem) -> list[RealignedConfig]:
        served = realigned(problem)
        configs = []
        for kernel in inner_kernels().values():
            if kernel.reasons_against(served):
                continue
            worth = kernel.configs(served)
            if not problem.b.aligned:
                # An early read of b would come before its copy is written.
                worth = (inner for inner in worth if not getattr(inner, "early", ""))
            for inner in itertools.islice(worth, _MOST_OF_ONE):
                configs.append(RealignedConfig(inner=kernel.name, config=inner))
        return sorted(configs, key=lambda config: self.estimate_us(problem, config))[:_MOST]

    def arithmetic(self, problem: Problem, config: RealignedConfig) -> str | None:
        return inner_kernels()[config.inner].arithmetic(realigned(problem), config.config)

    def estimate_us(self, problem: Problem, config: RealignedConfig) -> float:
        product = inner_kernels()[config.inner].estimate_us(realigned(problem), config.config)
        assert product is not None  # all inner kernels estimate
        # Read once, written once.
        moved = 2 * _copied_bytes(problem)
        return product + _LAUNCH_US + moved / Machine.of(problem.device).memory

    def workspace_bytes(self, problem: Problem, config: RealignedConfig) -> int:
        inner = inner_kernels()[config.inner]
        return _copied_bytes(problem) + inner.workspace_bytes(realigned(problem), config.config)

    def anatomy(self, problem: Problem, config: RealignedConfig) -> Anatomy | None:
        # The anatomy of the product: the copies have no tiles.
        inner: Kernel[Any] = inner_kernels()[config.inner]
        return inner.anatomy(realigned(problem), config.config)

    def builds(self, problem: Problem, config: RealignedConfig) -> list[Build]:
        kernel = inner_kernels()[config.inner]
        assert isinstance(kernel, Built)  # a stand-in has no configs
        inner = _overlapping(config.config)
        return [copy_build(problem), *kernel.builds(realigned(problem), inner)]

    def bind(self, problem: Problem, config: RealignedConfig) -> Launcher:
        served = realigned(problem)
        if config.config.unmet_promises(served):
            raise ConfigError(f"{config} reads b early, but b is copied right before")
        product = inner_kernels()[config.inner].bind(served, _overlapping(config.config))
        copy = bind_copy(problem)

        def run(a: torch.Tensor, b: torch.Tensor, *rest: Any, **extras: Any) -> torch.Tensor:
            return product(*copy(a, b), *rest, **extras)

        return run


def _overlapping(config: Config) -> Config:
    """Return the inner config with a launch that overlaps the end of the copy, if it can."""
    if isinstance(config, WarpSpecializedConfig) and not config.early:
        return replace(config, early="wait")
    return config


@dataclass(frozen=True)
class Misaligned:
    """An operand to copy, as contiguous rows; the rows of its transpose if it is column-major. It
    describes one matrix of a batch."""

    #: 0: a, 1: b.
    place: int
    operand: Operand
    rows: int
    cols: int

    @classmethod
    def of(cls, problem: Problem) -> list[Misaligned]:
        """Return the misaligned operands of ``problem``, one or two."""
        operands = (problem.a, problem.a_shape[-2:]), (problem.b, problem.b_shape[-2:])
        return [
            cls(place, operand, *(shape[::-1] if operand.layout == "col" else shape))
            for place, (operand, shape) in enumerate(operands)
            if not operand.aligned
        ]

    @property
    def transposed(self) -> bool:
        return self.operand.layout == "col"

    @property
    def pitch(self) -> int:
        """Elements from one row of the copy to the next."""
        unit = _PITCH // self.operand.dtype.itemsize
        return -(-self.cols // unit) * unit

    @property
    def copied(self) -> Operand:
        """The operand that the inner kernel gets instead."""
        wide = (self.rows - 1) * self.pitch + self.cols - 1 > _INT32_MAX
        return Operand(self.operand.dtype, "col" if self.transposed else "row", True, wide)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of one program's tile."""
        cols = min(_WIDTH, triton.next_power_of_2(self.pitch))
        return _TILE_BYTES // self.operand.dtype.itemsize // cols, cols

    @property
    def tiles(self) -> int:
        rows, cols = self.tile
        return -(-self.rows // rows) * -(-self.pitch // cols)


def realigned(problem: Problem) -> Problem:
    """``problem`` with its misaligned operands aligned."""
    operands = [problem.a, problem.b]
    for matrix in Misaligned.of(problem):
        operands[matrix.place] = matrix.copied
    # A copied weight is not static: each call writes it right before the product reads it.
    static = problem.static_weights and problem.b.aligned
    return replace(problem, a=operands[0], b=operands[1], static_weights=static)


def _copied_bytes(problem: Problem) -> int:
    """Upper bound of the copies' bytes: a problem does not say which operands a batch shares."""
    copied = (m.rows * m.pitch * m.operand.dtype.itemsize for m in Misaligned.of(problem))
    return problem.batch * sum(copied)


def copy_build(problem: Problem) -> Build:
    """Return the compilation of the copy, whose arguments :func:`bind_copy` passes."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {
        "PACK": VECTOR // problem.a.dtype.itemsize,
        "CHAINED": hopper_or_later(problem),
    }
    divisible: dict[str, int] = {}
    matrices = Misaligned.of(problem)
    for letter, matrix in zip("xy", matrices, strict=False):
        operand = matrix.operand
        element, index = pointer(operand.dtype), "i64" if operand.wide else "i32"
        types |= {f"{letter}_ptr": element, f"{letter}_copy": element}
        types |= {f"{letter}_rows": "i32", f"{letter}_cols": "i32"}
        if matrix.rows > 1:
            types[f"{letter}_stride"] = index
        else:
            # A single row's stride is arbitrary and may not fit its type.
            constants[f"{letter}_stride"] = 0
        if operand.layout == "strided":
            types[f"{letter}_step"] = index
        types[f"{letter}_pitch"] = "i64" if matrix.copied.wide else "i32"
        if problem.batch > 1:
            types[f"{letter}_apart"] = "i64"
        divisible |= {f"{letter}_copy": VECTOR, f"{letter}_pitch": VECTOR}
        constants[f"{letter.upper()}_ROWS"], constants[f"{letter.upper()}_COLS"] = matrix.tile
    if len(matrices) > 1:
        types["x_tiles"] = "i32"
    names = realign_kernel.arg_names
    constants |= {name: None for name in names if name not in types | constants}
    return Build(realign_kernel, types, constants, divisible, {"num_warps": _WARPS})


def bind_copy(
    problem: Problem,
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function from a and b to aligned a and b; one operand may be unchanged.

    A call allocates both copies at once. torch reuses this memory in stream order; in a CUDA graph
    it is in the graph's pool.
    """
    build = copy_build(problem)
    launch = build.launch(problem.device.type).call
    matrices = Misaligned.of(problem)
    batched, tiles = problem.batch > 1, [matrix.tiles for matrix in matrices]
    work = []
    for letter, matrix in zip("xy", matrices, strict=False):
        strided = [
            d for d, name in ((-2, "stride"), (-1, "step")) if f"{letter}_{name}" in build.types
        ]
        shape, steps = (matrix.rows, matrix.cols), (matrix.pitch, 1)
        work.append((matrix.place, matrix.transposed, shape, steps, strided))
    sizes = [matrix.rows * matrix.pitch for matrix in matrices]

    def run(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        operands = [a, b]
        counts = [1] * len(work)
        if batched:
            # An operand shared by the whole batch is one matrix.
            counts = [len(a) if operands[place].stride(0) else 1 for place, *_ in work]
        workspace = a.new_empty(sum(map(operator.mul, counts, sizes)))
        start = 0
        args: tuple[Any, ...] = ()
        each = zip(work, counts, sizes, strict=True)
        for (place, transposed, shape, steps, strided), count, size in each:
            source = operands[place].mT if transposed else operands[place]
            if batched:
                copy = workspace.as_strided((count, *shape), (size, *steps), start)
            else:
                copy = workspace.as_strided(shape, steps, start)
            args += (source, copy, *shape, *map(source.stride, strided), steps[0])
            args += (source.stride(0),) * batched
            if batched and count == 1:
                copy = copy.expand(len(a), *shape)
            operands[place] = copy.mT if transposed else copy
            start += count * size
        programs = [*map(operator.mul, counts, tiles)]
        launch(sum(programs), 1, 1, *args, *programs[: len(work) - 1])
        return operands[0], operands[1]

    return run
