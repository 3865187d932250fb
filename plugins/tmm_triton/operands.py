"""Maps a problem to the arguments of a Triton kernel.

The pointer kernels have one calling convention: every operand has a stride per dimension, and
everything the problem fixes (a contiguous dimension's stride of one, an absent bias, a batch of
one) is a compile-time constant, so that one source serves every layout without overhead. Everything
else is a run-time argument, above all M, of which a server sees thousands of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from tmm_core import Config, Operand, Problem
from tmm_core.triton import (
    Argument,
    Launch,
    compile_for,
    device_function,
    pointer,
    source,
)

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

    def shared_memory(self, problem: Problem) -> int:
        """Bytes of the pipelined operand tiles."""
        width = self.BLOCK_N * (2 if problem.gated else 1)
        stage = (self.BLOCK_M + width) * self.BLOCK_K * problem.a.dtype.itemsize
        return self.num_stages * stage

    def registers(self, problem: Problem) -> int:
        """Registers per thread for tiles: the accumulators, the part of the residual being added,
        and all of an operand with unaligned rows (asynchronous copies move at least 4 bytes), each
        element with its address."""
        threads = 32 * self.num_warps
        width = self.BLOCK_N * (2 if problem.gated else 1)
        accumulator = self.BLOCK_M * width // threads
        capability = problem.device.capability
        if problem.fp8 and capability == (9, 0):
            accumulator *= 2  # the low-precision sum, and the full one
        elif problem.scale_b == "row" and capability >= (10, 0):
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
class Build:
    """One Triton compilation, which :meth:`TritonKernel.bind` compiles and launches, and which
    tests can compile for an absent GPU."""

    fn: Any
    #: Types of the run-time arguments, in the order of ``fn``'s signature.
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def launch(self, device: str) -> Launch:
        """Compile for the current device of that type."""
        return Launch(
            self.fn, self.types, self.constants,
            device=torch.device(device), divisible=self.divisible, **self.options,
        )  # fmt: skip

    def compile_for(self, capability: int) -> Any:
        """Compile for an NVIDIA GPU (``capability`` 90 for sm_90) without having one."""
        src = source(self.fn, self.types, self.constants, self.divisible)
        return compile_for(GPUTarget("cuda", capability, 32), src, **self.options)


def build(
    fn: Any,
    problem: Problem,
    config: TileConfig,
    constants: Mapping[str, Any] | None = None,
    types: Mapping[str, str] | None = None,
    **options: Any,
) -> Build:
    """``fn`` specialised to ``problem`` and ``config``, with those of the following arguments that
    it takes.

    ``{a,b,bias,residual,out}_ptr``, ``M N K``, ``stride_{a,b,r,o}{z,…}``, ``stride_bias``,
    ``alpha``, ``scale_{a,b}_ptr``, ``SCALE_{A,B}``, ``EPILOGUE``, ``PRECISION``, and
    the config's upper-case fields, of which ``GROUP_M`` is a run-time argument.
    ``constants`` and ``types`` name the kernel's own arguments and take precedence. An argument
    that none of these names is None: what the problem does not have.
    """
    shared_types, shared_constants, divisible = _convention(problem)
    fields = config.to_json()
    shared_constants |= {name: value for name, value in fields.items() if name.isupper()}
    if shared_constants.pop("GROUP_M", None):
        # Not a constant: for a long M half of the configs differ in nothing else.
        shared_types["GROUP_M"] = "i32"
    own_types, own_constants = types or {}, constants or {}
    typed = {**shared_types, **own_types}
    known = {**shared_constants, **own_constants}
    passed = [name for name in fn.arg_names if name in typed and name not in own_constants]
    return Build(
        fn,
        {name: typed[name] for name in passed},
        {name: known.get(name) for name in fn.arg_names if name not in passed},
        divisible,
        {"num_warps": config.num_warps, "num_stages": config.num_stages, **options},
    )


def _strides(problem: Problem) -> Iterator[tuple[str, Operand, tuple[str, str], tuple[int, int]]]:
    """Each operand's letter, class, names of its two dimensions and their extents."""
    m, n, k = problem.m, problem.n, problem.k
    yield "a", problem.a, ("m", "k"), (m, k)
    yield "b", problem.b, ("k", "n"), (k, 2 * n if problem.gated else n)
    yield "o", problem.out, ("m", "n"), (m, n)
    if problem.residual is not None:
        yield "r", problem.residual, ("m", "n"), (m, n)


def _convention(problem: Problem) -> tuple[dict[str, str], dict[str, Any], dict[str, int]]:
    """Types, constants and divisibility of the shared arguments."""
    types: dict[str, str] = {"M": "i32", "N": "i32", "K": "i32"}
    constants: dict[str, Any] = {
        "EPILOGUE": device_function(problem.epilogue),
        "PRECISION": "tf32" if problem.tf32 else "ieee",
        "SCALE_A": problem.scale_a,
        "SCALE_B": problem.scale_b,
    }
    divisible: dict[str, int] = {}
    pointers = {"a": "a_ptr", "b": "b_ptr", "o": "out_ptr", "r": "residual_ptr"}
    vector = VECTOR // problem.a.dtype.itemsize
    for letter, operand, dims, extents in _strides(problem):
        types[pointers[letter]] = pointer(operand.dtype)
        contiguous = {"row": 1, "col": 0, "strided": None}[operand.layout]
        step = VECTOR // operand.dtype.itemsize
        for i, dim in enumerate(dims):
            name = f"stride_{letter}{dim}"
            if i == contiguous:
                constants[name] = 1
            elif extents[i] <= 1:
                # A single row's stride is arbitrary and may not fit its type.
                constants[name] = 0
            else:
                types[name] = "i64" if operand.wide else "i32"
                if operand.aligned:
                    divisible[name] = step
        batch = f"stride_{letter}z"
        if problem.batch > 1:
            types[batch] = "i64"
        else:
            constants[batch] = 0
        if operand.aligned:
            divisible[pointers[letter]] = VECTOR
            if problem.batch > 1:
                divisible[batch] = step
    # Sizes affect vectorisation through the masks of contiguous dimensions. M is not specialised
    # unless it is one, so that its values share compiled kernels.
    sizes = {"N": problem.n, "K": problem.k}
    if "col" in (problem.a.layout, problem.out.layout):
        sizes["M"] = problem.m
    divisible |= {name: vector for name, size in sizes.items() if size % vector == 0}

    if problem.bias is not None:
        types |= {"bias_ptr": pointer(problem.bias), "stride_bias": "i64"}
    if problem.scaled:
        types["alpha"] = "fp32"
    types |= {f"{name}_ptr": "*fp32" for name in problem.scales}
    return types, constants, divisible


def arguments(problem: Problem) -> dict[str, Argument]:
    """The values of the convention's run-time arguments in a call, except for a config's. Strides
    are read in every call: the problem fixes only their class."""
    known: dict[str, Argument] = {"M": problem.m, "N": problem.n, "K": problem.k}
    tensors = ("a", "b", "bias", "scale_a", "scale_b")
    known |= {f"{name}_ptr": name for name in tensors}
    known |= {"residual_ptr": "residual", "out_ptr": "out", "alpha": "alpha"}
    known["stride_bias"] = ("bias", 0)
    letters = {"a": "a", "b": "b", "o": "out", "r": "residual"}
    for letter, _, dims, _ in _strides(problem):
        for i, dim in enumerate((("z",) if problem.batch > 1 else ()) + dims):
            known[f"stride_{letter}{dim}"] = (letters[letter], i)
    return known
