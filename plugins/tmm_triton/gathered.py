"""``triton.gathered`` and ``triton.gathered_mixed_input``: copy the rows of ``a`` that an index
names, then multiply the copy with a Hopper kernel.

Hopper's TMA loads only adjacent rows. ``triton.ragged`` gathers rows through registers instead: it
needs no copy, but reaches less of the tensor cores' rate. The copy reads and writes each row once,
which pays off where groups have many rows and K is long.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
import triton
import triton.language as tl

from tmm_core import Config, Launcher, Machine, Operand, Problem
from tmm_core.triton import pointer
from tmm_triton.hopper.config import WarpSpecializedConfig
from tmm_triton.hopper.operand_layout import ALIGNMENT
from tmm_triton.hopper.warp_specialized import WarpSpecialized
from tmm_triton.operands import Build
from tmm_triton.packed.mixed_input import MixedInput
from tmm_triton.packed.mixed_input_config import MixedInputConfig
from tmm_triton.triton_kernel import Built, version_with

C = TypeVar("C", bound=Config)

#: Rows and bytes of a row that one program copies.
_ROWS, _BYTES = 8, 2048
_WARPS = 4
#: µs that the copy's launch adds in a CUDA graph.
_LAUNCH_US = 1.5
_INT32_MAX = 2**31 - 1


@triton.jit
def gather_kernel(
    a_ptr, index_ptr, offs_ptr, copy_ptr, M, K, G, stride, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Copy rows ``index[:offs[-1]]`` of a. Entries past the last group are not read as rows: they
    may be anything."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLS + tl.arange(0, COLS)
    known = rows < tl.minimum(tl.load(offs_ptr + G - 1), M)
    at = tl.load(index_ptr + rows, mask=known, other=0).to(tl.int64)
    inside = known[:, None] & (columns[None, :] < K)
    row = tl.load(a_ptr + at[:, None] * stride + columns[None, :], mask=inside)
    tl.store(copy_ptr + rows[:, None].to(tl.int64) * K + columns[None, :], row, mask=inside)


class _Copied(Built[C]):
    """A copy of the gathered rows, then another kernel."""

    #: The class of that kernel, and the version of the copy.
    after: ClassVar[type[Built[Any]]]
    own_version: ClassVar[str]

    @functools.cached_property
    def inner(self) -> Built[C]:
        return self.after()

    @functools.cached_property
    def version(self) -> str:
        return version_with(self.own_version, [self.inner])

    def declines(self, problem: Problem) -> Iterable[str]:
        if problem.groups is None or problem.groups.a_index is None:
            yield "is for rows that an index gathers"
        elif not problem.a.aligned or problem.a.layout != "row":
            yield f"rows of a are not contiguous or not aligned to {ALIGNMENT} bytes"
        elif problem.k * problem.a.dtype.itemsize % ALIGNMENT:
            yield f"rows of a are not multiples of {ALIGNMENT} bytes"
        else:
            yield from self.inner.reasons_against(gathered(problem))

    def configs(self, problem: Problem) -> Iterable[C]:
        return self.inner.configs(gathered(problem))

    def arithmetic(self, problem: Problem, config: C) -> str | None:
        return self.inner.arithmetic(gathered(problem), config)

    def estimate_us(self, problem: Problem, config: C) -> float:
        product = self.inner.estimate_us(gathered(problem), config) or 0.0
        # Read once, written once.
        moved = 2 * problem.m * problem.k * problem.a.dtype.itemsize
        return product + _LAUNCH_US + moved / Machine.of(problem.device).memory

    def workspace_bytes(self, problem: Problem, config: C) -> int:
        own = problem.m * problem.k * problem.a.dtype.itemsize
        return own + self.inner.workspace_bytes(gathered(problem), config)

    def builds(self, problem: Problem, config: C) -> list[Build]:
        return [_copy(problem), *self.inner.builds(gathered(problem), config)]

    def bind(self, problem: Problem, config: C) -> Launcher:
        groups = problem.groups
        assert groups is not None
        product: Any = self.inner.bind(gathered(problem), config)
        build = _copy(problem)
        launch = build.launch(problem.device.type).call
        m, k, count = problem.m, problem.k, groups.count
        grid = -(-m // build.constants["ROWS"]), -(-k // build.constants["COLS"]), 1

        def run(a: torch.Tensor, *rest: Any, **extras: Any) -> torch.Tensor:
            index = extras.pop("a_index")
            # torch reuses the copy's memory in stream order; a graph's copy is in the graph's pool.
            copy = a.new_empty(m, k)
            launch(*grid, a, index, extras["offs"], copy, m, k, count, a.stride(0))
            result: torch.Tensor = product(copy, *rest, **extras)
            return result

        return run


class Gathered(_Copied[WarpSpecializedConfig]):
    """A copy of the gathered rows, then ``triton.warp_specialized``."""

    name = "triton.gathered"
    after = WarpSpecialized
    own_version = "3"
    config_type = WarpSpecializedConfig
    # Row scales of a would have to be gathered too.
    supports = replace(WarpSpecialized.supports, ragged=("m",), formats=(), scales=())


class GatheredMixedInput(_Copied[MixedInputConfig]):
    """A copy of the gathered rows, then ``triton.mixed_input``."""

    name = "triton.gathered_mixed_input"
    after = MixedInput
    own_version = "1"
    config_type = MixedInputConfig
    supports = MixedInput.supports


def gathered(problem: Problem) -> Problem:
    """Return the problem of the inner kernel: its ``a`` is the copy, and needs no index."""
    assert problem.groups is not None
    copy = Operand(problem.a.dtype, "row", True, problem.m * problem.k > _INT32_MAX)
    return replace(problem, a=copy, groups=replace(problem.groups, a_index=None))


def _copy(problem: Problem) -> Build:
    assert problem.groups is not None
    assert problem.groups.a_index is not None
    element = pointer(problem.a.dtype)
    types = {
        "a_ptr": element,
        "index_ptr": pointer(problem.groups.a_index),
        "offs_ptr": "*i32",
        "copy_ptr": element,
        "M": "i32",
        "K": "i32",
        "G": "i32",
        "stride": "i64",
    }
    step = ALIGNMENT // problem.a.dtype.itemsize
    columns = min(_BYTES // problem.a.dtype.itemsize, triton.next_power_of_2(problem.k))
    constants = {"ROWS": _ROWS, "COLS": columns}
    divisible = {"a_ptr": ALIGNMENT, "copy_ptr": ALIGNMENT, "K": step, "stride": step}
    return Build(gather_kernel, types, constants, divisible, {"num_warps": _WARPS})
