"""Maps a problem to the arguments of a Triton kernel.

The pointer kernels have one calling convention: every operand has a stride per dimension.
All that the problem fixes is a compile-time constant: a stride of one, an absent bias, a batch of
one. So one source serves every layout without overhead. Everything else is a run-time argument,
above all M, because a server sees thousands of its values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from tmm_core import Config, ConfigError, Operand, Problem
from tmm_core.triton import (
    Argument,
    Launch,
    Step,
    compile_for,
    device_function,
    pointer,
    source,
    step_function,
)
from tmm_triton import reduction_order, scaled_step
from tmm_triton.blocks import step as plain_step
from tmm_triton.flags import Counters
from tmm_triton.pdl import Overlapping, hopper_or_later

#: Bytes of the widest load and store of one thread; the alignment in ``Operand.aligned``.
VECTOR = 16


@dataclass(frozen=True, kw_only=True)
class TileConfig(Config):
    """The output tile of one program, its step along K and its pipeline.

    Raises:
        ValueError: A block is not a power of two of at least 16 (the minimum of ``tl.dot``), or
            stages or warps are out of bounds.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_stages: int
    num_warps: int

    def __post_init__(self) -> None:
        for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"):
            check(name, getattr(self, name), (16, 32, 64, 128, 256, 512))
        check("num_stages", self.num_stages, range(1, 9))
        check("num_warps", self.num_warps, (1, 2, 4, 8, 16))

    def width(self, problem: Problem) -> int:
        """Columns of ``b`` per tile: of both halves, if gated."""
        return self.BLOCK_N * (2 if problem.gated else 1)

    def tiles(self, problem: Problem) -> int:
        """Output tiles of one product of the batch."""
        return -(-problem.m // self.BLOCK_M) * -(-problem.n // self.BLOCK_N)

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of the pipelined operand tiles."""
        width = self.width(problem)
        of_a, of_b = problem.a.dtype.itemsize, problem.b.dtype.itemsize
        unpacked = 0
        if problem.b.pack != 1:
            unpacked = width * of_a * self.BLOCK_K  # for the tensor cores
        of_b_k = self.BLOCK_K // problem.b.pack
        staged = self.BLOCK_M * of_a * self.BLOCK_K + width * of_b * of_b_k
        return self.num_stages * staged + unpacked

    def registers(self, problem: Problem) -> int:
        """Registers per thread for tiles: the accumulators and the part of the residual being
        added. An operand with unaligned rows takes registers too, for each element and its address:
        asynchronous copies move at least 4 bytes."""
        threads, width = 32 * self.num_warps, self.width(problem)
        accumulator = self.BLOCK_M * width // threads
        capability = problem.device.capability
        if problem.a.grid or problem.b.grid:
            accumulator *= 2  # the sum of a group, and the full one
        elif problem.native and capability == (9, 0):
            accumulator *= 2  # the low-precision sum, and the full one
        elif kind(problem.b) == "row" and capability >= (10, 0):
            accumulator *= 2  # a thread has a row of the tile and its columns' scales
        copied = 0
        if not problem.a.aligned:
            copied += self.BLOCK_M * self.BLOCK_K
        if not problem.b.aligned:
            copied += self.BLOCK_K * width
        added = 0
        if problem.residual is not None:
            added = self.BLOCK_M * self.BLOCK_N // self.parts // threads
        return accumulator + added + 2 * copied // threads

    @property
    def parts(self) -> int:
        """The number of parts in which the tile is finished."""
        return 1


def check(name: str, value: int, allowed: Sequence[int]) -> None:
    """Check one field of a config.

    Raises:
        ValueError: ``value`` is not one of ``allowed``.
    """
    if value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {value}")


@dataclass(frozen=True)
class Zeros:
    """An argument whose value is made when the kernel is bound: :class:`Counters`."""

    count: int


#: The value of a run-time argument.
Value = Argument | Zeros
#: The types and the values of run-time arguments, by name.
Typed = dict[str, tuple[str, Value]]


@dataclass(frozen=True)
class Build:
    """One Triton compilation and its launch, which :meth:`Built.bind` makes, and which tests can
    compile for an absent GPU."""

    fn: Any
    #: Types of the run-time arguments, in the order of ``fn``'s signature.
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    #: The values of the run-time arguments, and the grid.
    values: Mapping[str, Value] = field(default_factory=dict)
    grid: tuple[int, int, int] = (1, 1, 1)

    def step(self, device: str) -> Step:
        """Return the launch, compiled for the current device of that type."""
        values = {
            name: Counters(value.count) if isinstance(value, Zeros) else value
            for name, value in self.values.items()
        }
        return Step(self.launch(device), self.grid, values)

    def launch(self, device: str) -> Launch:
        """Compile for the current device of that type."""
        blocks = math.prod(self.grid) if self.options.get("launch_pdl") else None
        return Launch(
            self.fn, self.types, self.constants, device=torch.device(device),
            divisible=self.divisible, blocks=blocks, **self.options,
        )  # fmt: skip

    def compile_for(self, target: GPUTarget) -> Any:
        """Compile for a GPU that need not be present."""
        src = source(self.fn, self.types, self.constants, self.divisible)
        return compile_for(target, src, **self.options)

    @classmethod
    def of(cls, fn: Any, typed: Typed, constants: Mapping[str, Any], **fields: Any) -> Build:
        """The build of ``fn``. Arguments that ``fn`` does not take are left out. An argument in
        neither mapping is None, and one in both is a constant."""
        passed = [name for name in fn.arg_names if name in typed and name not in constants]
        return cls(
            fn,
            {name: typed[name][0] for name in passed},
            {name: constants.get(name) for name in fn.arg_names if name not in passed},
            values={name: typed[name][1] for name in passed},
            **fields,
        )


def build(
    fn: Any,
    problem: Problem,
    config: TileConfig,
    grid: tuple[int, int, int],
    constants: Mapping[str, Any] | None = None,
    own: Typed | None = None,
    **options: Any,
) -> Build:
    """``fn`` specialised to ``problem`` and ``config``. It may take any of these arguments:

    ``{a,b,bias,residual,out}_ptr``, ``M N K``, ``stride_{a,b,r,o}{z,…}``, ``stride_bias``,
    ``alpha``, ``{a,b}_scale_ptr``, ``{A,B}_SCALE``, ``STEP``, ``EPILOGUE``, ``PRECISION``, and
    the config's upper-case fields. A config with a field ``early`` also has ``OVERLAPS`` and
    ``EARLY``: whether the launch overlaps the previous one, and whether b is loaded before that one
    has ended. A ragged problem also has ``G``, its number of groups, ``stride_biasz``, and
    ``{offs,a_index,out_index,out_weights}_ptr``; its groups are like the products of a batch.
    ``GROUP_M`` is passed at run time, the other fields are constants.
    ``constants`` and ``own`` name the kernel's own arguments and take precedence. All other
    arguments are None: the problem does not have them.
    """
    for operand in (problem.a, problem.b):
        if operand.grid and operand.block[1] % config.BLOCK_K and "STEP" in fn.arg_names:
            raise ConfigError(f"{config} has steps of several groups of {operand.block[1]} values")
    convention = Convention(problem)
    shared, known = convention.given, convention.constants
    known |= {name: value for name, value in config.to_json().items() if name.isupper()}
    if group := known.pop("GROUP_M", None):
        # Not a constant: for a long M half of the configs differ in nothing else.
        shared["GROUP_M"] = "i32", group
    if isinstance(config, Overlapping):
        overlaps = config.early != "" and hopper_or_later(problem)
        known |= {"OVERLAPS": overlaps, "EARLY": overlaps and config.early == "b"}
        options["launch_pdl"] = overlaps
    shared |= own or {}
    known |= constants or {}
    compiled: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    compiled |= reduction_order.options(problem) | options
    return Build.of(fn, shared, known, divisible=convention.divisible, options=compiled, grid=grid)


def kind(operand: Operand) -> str | None:
    """Return the kind of an operand's scale."""
    return None if operand.scale is None else operand.scale.kind


def parts(problem: Problem) -> Typed:
    """Return the pointers to scales."""
    return {
        f"{name}_scale_ptr": (pointer(operand.scale.dtype), f"{name}_scale")
        for name, operand in (("a", problem.a), ("b", problem.b))
        if operand.scale is not None
    }


@dataclass
class Convention:
    """Types and values, constants, and divisibility of the shared arguments. Strides are read in
    every call: the problem fixes only their class."""

    problem: Problem
    given: Typed = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    divisible: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.problem
        self.given |= {"M": ("i32", problem.m), "N": ("i32", problem.n), "K": ("i32", problem.k)}
        self.constants |= {
            "EPILOGUE": device_function(problem.epilogue),
            "STEP": step_function(problem, plain_step),
            "PRECISION": "tf32" if problem.tf32 else "ieee",
            "A_SCALE": kind(problem.a),
            "B_SCALE": kind(problem.b),
        }
        for name, dims in (("a", "mk"), ("b", "kn"), ("out", "mn"), ("residual", "mn")):
            if (operand := getattr(problem, name)) is not None:
                self._add_matrix(name, operand, dims)
        self._promise_sizes()
        self._add_terms()
        typed, known = scaled_step.arguments(problem)
        self.given |= parts(problem) | typed
        self.constants |= known

    def _add_matrix(self, tensor: str, operand: Operand, dims: str) -> None:
        *stack, rows, columns = self.problem.shape(tensor)
        gathered = tensor == "a" and self.problem.groups and self.problem.groups.a_index
        pointer_name, batch = f"{tensor}_ptr", f"stride_{tensor[0]}z"
        self.given[pointer_name] = pointer(operand.dtype), tensor
        multiples = {pointer_name: VECTOR}
        contiguous = {"row": 1, "col": 0, "strided": None}[operand.layout]
        step = VECTOR // operand.dtype.itemsize
        for i, (dim, extent) in enumerate(zip(dims, (rows, columns), strict=True)):
            name = f"stride_{tensor[0]}{dim}"
            if i == contiguous:
                self.constants[name] = 1
            elif extent <= 1 and (i or not gathered):
                # A single row's stride is arbitrary and may not fit its type. Gathered rows may be
                # any number.
                self.constants[name] = 0
            else:
                self.given[name] = "i64" if operand.wide else "i32", (tensor, i + len(stack))
                multiples[name] = step
        if stack:
            self.given[batch] = "i64", (tensor, 0)
            multiples[batch] = step
        else:
            self.constants[batch] = 0
        if operand.aligned:
            self.divisible |= multiples

    def _promise_sizes(self) -> None:
        """Sizes affect vectorisation through the masks of contiguous dimensions. M is not
        specialised unless it is one, so that its values share compiled kernels."""
        problem = self.problem
        vector = VECTOR // min(problem.a.dtype.itemsize, problem.b.dtype.itemsize)
        sizes = {"N": problem.n, "K": problem.k}
        if "col" in (problem.a.layout, problem.out.layout):
            sizes["M"] = problem.m
        self.divisible |= {name: vector for name, size in sizes.items() if size % vector == 0}

    def _add_terms(self) -> None:
        """The bias, alpha and the tensors of groups."""
        problem, groups = self.problem, self.problem.groups
        if problem.bias is not None:
            self.given["bias_ptr"] = pointer(problem.bias), "bias"
            self.given["stride_bias"] = "i64", ("bias", -1)
            if groups is None:
                self.constants["stride_biasz"] = 0
            else:
                self.given["stride_biasz"] = "i64", ("bias", 0)
        if problem.scaled:
            self.given["alpha"] = "fp32", "alpha"
        if groups is not None:
            self.given["G"] = "i32", groups.count
            extras = {name: dtype for name, dtype in groups.extras.items() if dtype is not None}
            self.given |= {f"{name}_ptr": (pointer(dtype), name) for name, dtype in extras.items()}
