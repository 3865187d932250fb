"""Outputs beside the result: each tile's part of them, and the kernel that reduces the parts.

An output of kind tile is stored directly. For the others each tile reduces its elements to a row,
a column or a number in a workspace, and a second launch reduces these parts in a fixed order. So
sums are deterministic, which they would not be with atomics, a maximum keeps NaN, which
``atomic_max`` would drop, and no memory has to be filled beforehand. The order in which a row is
summed does not depend on M.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tmm_core import Launcher, Port, Problem
from tmm_core.triton import Argument, Step, launcher, pointer, port_function
from tmm_triton.operands import Build

#: Outputs that a kernel has arguments for.
MOST = 2
#: The kinds and reductions that kernels declare in :class:`tmm_core.Supports`.
KINDS, REDUCES = ("scalar", "row", "col", "tile"), ("max", "sum")
#: Elements that a program of the reducing kernel loads at once, and the parts they are from.
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
        """The tile kernel's constants."""
        found: dict[str, Any] = {}
        for i, port in enumerate(self.given):
            found |= {
                f"OF_{i}": port_function(port),
                f"KIND_{i}": port.kind,
                f"REDUCE_{i}": port.reduce,
            }
        return found

    def types(self) -> dict[str, str]:
        """The types of the tile kernel's run-time arguments."""
        types: dict[str, str] = {}
        for i, port in enumerate(self.given):
            dtype = port.dtype if port.reduce is None else torch.float32
            types |= {f"port_{i}_ptr": pointer(dtype), f"port_{i}_at": "i64"}
        return types

    def arguments(self) -> dict[str, Argument]:
        """The values of these arguments in a call: an output, or an offset in the workspace."""
        own: dict[str, Argument] = {}
        for i, (port, at) in enumerate(zip(self.given, self._places(), strict=True)):
            own[f"port_{i}_ptr"] = "workspace" if port.reduce else f"output_{i}"
            own[f"port_{i}_at"] = at
        return own

    def workspace(self) -> int:
        """The number of fp32 elements that the parts take in the workspace."""
        return sum(parts * length for parts, length in map(self._extent, self.given))

    def builds(self) -> list[Build]:
        """The compilations of the reducing kernel, one for each reduced output."""
        return [self._build(port) for port in self.given if port.reduce]

    def launcher(self, main: Step) -> Launcher:
        """The launcher that runs ``main``, then the reductions."""
        steps = [main]
        for i, (port, at) in enumerate(zip(self.given, self._places(), strict=True)):
            if port.reduce:
                parts, length = self._extent(port)
                build = self._build(port)
                own: dict[str, Argument] = {
                    "parts_ptr": "workspace", "port_at": at, "out_ptr": f"output_{i}",
                    "parts": parts, "length": length,
                }  # fmt: skip
                grid = triton.cdiv(length, build.constants["BLOCK_L"]), 1, 1
                steps.append(Step(build.launch(self.problem.device.type), grid, own))
        count = self.after + self.workspace()
        return launcher(
            steps,
            self.problem.out_shape,
            self.problem.out.dtype,
            workspace=(count, torch.float32) if count else None,
            outputs=len(self.given),
        )

    def _extent(self, port: Port) -> tuple[int, int]:
        """The number of parts that the tiles leave of an output, and the elements of each."""
        return {
            "row": (self.columns, self.problem.m),
            "col": (self.rows, self.problem.n),
            "scalar": (self.rows * self.columns, 1),
            "tile": (0, 0),
        }[port.kind]

    def _places(self) -> Sequence[int]:
        """The offset of each output's parts in the workspace."""
        places, end = [], self.after
        for parts, length in map(self._extent, self.given):
            places.append(end)
            end += parts * length
        return places

    def _build(self, port: Port) -> Build:
        parts, _ = self._extent(port)
        most = _LOADED if port.kind == "scalar" else _PARTS
        high = min(most, triton.next_power_of_2(parts))
        wide = 1 if port.kind == "scalar" else _LOADED // high
        types = {"parts_ptr": "*fp32", "port_at": "i64", "out_ptr": pointer(port.dtype)}
        return Build(
            reduce_port_kernel,
            {**types, "parts": "i32", "length": "i32"},
            {"REDUCE": port.reduce, "BLOCK_P": high, "BLOCK_L": wide},
            options={"num_warps": 4, "num_stages": 1},
        )
