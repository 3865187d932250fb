"""Stores each tile's part of the auxiliary outputs, and reduces the parts.

An output of kind tile is stored directly. In all other kinds, each tile reduces its elements to a
row, a column or a number in a workspace. A second launch reduces these parts in a fixed order.
So sums are deterministic, unlike sums by atomics, and a maximum keeps NaN, which ``atomic_max``
would drop. No memory has to be filled beforehand. The order in which a row is summed does not
depend on M.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from tmm_core import Port, Problem
from tmm_core.triton import pointer, port_function
from tmm_triton.operands import Build, Typed

#: The number of outputs for which a kernel has arguments.
MOST = 2
#: The kinds and reductions that kernels declare in :class:`tmm_core.Supports`.
KINDS, REDUCES = ("scalar", "row", "col", "tile", "group"), ("max", "sum")
#: Elements that a program of the reducing kernel loads at once, and the parts that they belong to.
_LOADED, _PARTS = 2048, 128


@triton.jit
def combine(terms, AXIS: tl.constexpr, REDUCE: tl.constexpr):
    """The sum, or the maximum, which is NaN if a term is (``tl.max`` skips NaN)."""
    if REDUCE == "max":
        undefined = terms != terms
        most = tl.max(tl.where(undefined, float("-inf"), terms), axis=AXIS)
        result = tl.where(tl.max(undefined.to(tl.int32), axis=AXIS) > 0, float("nan"), most)
    else:
        result = tl.sum(terms, axis=AXIS)
    return result


@triton.jit
def put(
    y, rows, cols, M, N, part_m, part_n, parts_n,
    port_ptr, port_at, OF: tl.constexpr, KIND: tl.constexpr, REDUCE: tl.constexpr,
):  # fmt: skip
    """Store a tile's part of one output; do nothing if KIND is None."""
    if KIND is not None:
        terms = OF(y)
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        if KIND == "tile":
            ptrs = port_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
            tl.store(ptrs, terms.to(port_ptr.dtype.element_ty), mask=inside)
        else:
            least: tl.constexpr = float("-inf") if REDUCE == "max" else 0.0
            terms = tl.where(inside, terms, least)
            parts = port_ptr + port_at
            if KIND == "row":
                parts += part_n.to(tl.int64) * M + rows
                tl.store(parts, combine(terms, 1, REDUCE), mask=rows < M)
            elif KIND == "col":
                parts += part_m.to(tl.int64) * N + cols
                tl.store(parts, combine(terms, 0, REDUCE), mask=cols < N)
            else:
                parts += part_m.to(tl.int64) * parts_n + part_n
                # As [BLOCK_M, 1]: Triton 3.7 fails to reduce the vector for Blackwell.
                total = combine(combine(terms, 1, REDUCE)[:, None], 0, REDUCE)
                tl.store(parts + tl.arange(0, 1), total)


@triton.jit
def put_groups(
    y, rows, cols, M, N, part_n,
    port_ptr, OF: tl.constexpr, GROUPED: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Store what a part of a tile has of an output with groups; do nothing if GROUPED is None. The
    part has whole groups."""
    if GROUPED is not None:
        COUNT: tl.constexpr = y.shape[1] // GROUP
        inside = (rows[:, None] < M) & (cols[None, :] < N)
        found = OF(tl.reshape(tl.where(inside, y, 0.0), (y.shape[0], COUNT, GROUP)))
        if GROUPED == "tile":
            found = tl.reshape(found, (y.shape[0], y.shape[1]))
            ptrs = port_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
        else:
            group = part_n * COUNT + tl.arange(0, COUNT)
            ptrs = port_ptr + group.to(tl.int64)[None, :] * M + rows[:, None]
            inside = (rows[:, None] < M) & (group[None, :] * GROUP < N)
        tl.store(ptrs, found.to(port_ptr.dtype.element_ty), mask=inside)


@triton.jit
def reduce_port_kernel(
    parts_ptr, port_at, out_ptr, parts, length,
    REDUCE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Reduce ``[parts, length]`` to ``out[length]``."""
    places = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    least: tl.constexpr = float("-inf") if REDUCE == "max" else 0.0
    total = tl.full((BLOCK_P, BLOCK_L), least, tl.float32)
    for first in range(0, parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        ptrs = parts_ptr + port_at + part.to(tl.int64)[:, None] * length + places[None, :]
        mask = (part[:, None] < parts) & (places[None, :] < length)
        terms = tl.load(ptrs, mask=mask, other=least)
        if REDUCE == "max":
            total = tl.maximum(total, terms, propagate_nan=tl.PropagateNan.ALL)
        else:
            total += terms
    result = combine(total, 0, REDUCE).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, result, mask=places < length)


@dataclass(frozen=True)
class Ports:
    """The outputs of a problem whose result is computed in ``rows`` by ``columns`` parts.

    Attributes:
        after: Elements at the start of the workspace that have another use.
    """

    problem: Problem
    rows: int
    columns: int
    after: int = 0

    @property
    def given(self) -> tuple[Port, ...]:
        return self.problem.epilogue.outputs

    def constants(self) -> dict[str, Any]:
        """Return the tile kernel's constants."""
        found: dict[str, Any] = {}
        for i, port in enumerate(self.given):
            found |= {
                f"OF_{i}": port_function(port),
                f"KIND_{i}": None if port.group else port.kind,
                f"REDUCE_{i}": port.reduce,
                f"GROUPED_{i}": port.kind if port.group else None,
                f"GROUP_{i}": port.group,
            }
        return found

    def arguments(self) -> Typed:
        """Return the tile kernel's run-time arguments: an output, or an offset in the workspace."""
        own: Typed = {}
        places = self._places()
        for i, port in enumerate(self.given):
            own[f"port_{i}_ptr"] = (
                ("*fp32", "workspace") if port.reduce else (pointer(port.dtype), f"output_{i}")
            )
            own[f"port_{i}_at"] = "i64", places[i]
        return own

    def workspace(self) -> int:
        """Return the number of fp32 elements that the parts take in the workspace."""
        return self._places()[-1] - self.after

    def builds(self) -> list[Build]:
        """Return the compilations of the reducing kernel, one for each reduced output."""
        places = self._places()
        return [self._build(i, places[i]) for i, port in enumerate(self.given) if port.reduce]

    def _extent(self, port: Port) -> tuple[int, int]:
        """Return the number of parts into which tiles reduce an output, and the elements of
        each."""
        return {
            "row": (self.columns, self.problem.m),
            "col": (self.rows, self.problem.n),
            "scalar": (self.rows * self.columns, 1),
        }.get(port.kind, (0, 0))  # tiles and groups are stored whole

    def _places(self) -> list[int]:
        """Return the offset of each output's parts in the workspace, and the end of the last."""
        sizes = [math.prod(self._extent(port)) for port in self.given]
        return list(itertools.accumulate(sizes, initial=self.after))

    def _build(self, i: int, at: int) -> Build:
        port = self.given[i]
        parts, length = self._extent(port)
        most = _LOADED if port.kind == "scalar" else _PARTS
        high = min(most, triton.next_power_of_2(parts))
        wide = 1 if port.kind == "scalar" else _LOADED // high
        own: Typed = {
            "parts_ptr": ("*fp32", "workspace"),
            "port_at": ("i64", at),
            "out_ptr": (pointer(port.dtype), f"output_{i}"),
            "parts": ("i32", parts),
            "length": ("i32", length),
        }
        return Build.of(
            reduce_port_kernel,
            own,
            {"REDUCE": port.reduce, "BLOCK_P": high, "BLOCK_L": wide},
            options={"num_warps": 4, "num_stages": 1},
            grid=(triton.cdiv(length, wide), 1, 1),
        )


def whole_groups(problem: Problem, columns: int) -> bool:
    """Whether parts of a tile with that many columns have whole groups of each output."""
    return not any(port.group and columns % port.group for port in problem.epilogue.outputs)
