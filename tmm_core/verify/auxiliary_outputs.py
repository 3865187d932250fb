"""Verifies the auxiliary outputs of an epilogue.

Before each launch the outputs are filled with NaN, between guard bands. Each output is compared
with the reduction of the reference. If the reference covers only samples, outputs per row or column
are compared in the samples. A scalar is compared with the reduction of the launch's own result,
which is verified separately. With NaN or Inf in the inputs, every output is compared so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from tmm_core.spec.launcher import Launcher
from tmm_core.spec.operand import Operand
from tmm_core.spec.port import Port
from tmm_core.verify import compare
from tmm_core.verify.data_sets import DataSets, Expected
from tmm_core.verify.guard_bands import UNWRITTEN, memory_layout, same_bits, with_guard_bands
from tmm_core.verify.nonfinite import kinds_of

Tensor = torch.Tensor

#: Factor on the tolerance of a result: squaring, as in a sum of squares, doubles the error.
SLACK = 2.0


class Outputs:
    """Calls a launcher with outputs for the test data, and reports their faults.

    Args:
        deterministic: Whether the launcher promises the same bits for the same inputs.
        slack: Factor on the tolerance.
    """

    def __init__(
        self, data: DataSets, launcher: Launcher, deterministic: bool, slack: float
    ) -> None:
        self._data, self._launcher = data, launcher
        self._ports = data.problem.epilogue.outputs
        self._deterministic, self._slack = deterministic, slack
        self._shapes = [port.shape(data.problem.out_shape) for port in self._ports]
        self._memory = [
            with_guard_bands(
                memory_layout(Operand(port.dtype), (1, math.prod(shape))), data.device, UNWRITTEN
            )
            for port, shape in zip(self._ports, self._shapes, strict=True)
        ]
        self._given: tuple[Tensor, ...] = ()
        #: The outputs of the first launch, by the id of the inputs' reference, and the right ones.
        self._first: dict[int, tuple[Tensor, ...]] = {}
        self._right: dict[tuple[int, Port], tuple[Tensor, Tensor]] = {}

    def __call__(self, *arguments: Any, **extras: Any) -> Tensor:
        pairs = zip(self._memory, self._shapes, strict=True)
        self._given = tuple(memory.poison().view(shape) for memory, shape in pairs)
        return self._launcher(*arguments, **extras, outputs=self._given)  # type: ignore[call-arg]

    def faults(self, expected: Expected | None, result: Tensor) -> Iterator[tuple[float, str]]:
        """Yield each output's error in the last launch, with the fault or an empty text.

        Args:
            expected: The reference; None if the inputs contain NaN or Inf: then the result itself
                determines the outputs.
        """
        given = tuple(t.clone() for t in self._given)
        first = self._first.setdefault(id(expected), given)
        again = expected is not None and self._deterministic and first is not given
        of_result = compare.tolerance(self._data.problem)
        for port, out, before, memory in zip(self._ports, given, first, self._memory, strict=True):
            if not memory.intact():
                yield math.nan, f"it wrote beyond its output {port}"
                return
            if expected is None:
                right, _ = self._reduced(port, result)
                if not torch.equal(kinds_of(out), kinds_of(right.to(port.dtype))):
                    yield math.nan, f"output {port} is not NaN or Inf where the result makes it"
            elif again:
                if not same_bits(out, before):
                    yield math.nan, f"output {port} has other bits for the same inputs"
            else:
                limit = SLACK * self._slack * max(of_result, compare.TOLERANCE[port.dtype])
                error = self._error(port, expected, out, result)
                fault = f"output {port} has error {error:.3g}, over {limit:.3g}"
                yield error, "" if error <= limit else fault

    def _error(self, port: Port, expected: Expected, out: Tensor, result: Tensor) -> float:
        tile, places = expected.in_rows, expected.rows
        if places is not None and port.kind == "scalar":
            tile = result
        elif places is not None and port.kind == "col":
            assert expected.in_cols is not None
            tile, places = expected.in_cols, expected.cols
        key = id(tile), port
        right, scale = self._right.get(key) or self._reduced(port, tile)
        if tile is not result:
            self._right[key] = right, scale
        if out.isnan().any():
            return math.nan
        if places is not None and port.kind != "scalar":
            out = out[places]
        out = out.to(right.dtype)
        off = (out - right).abs() / (right.abs() + scale)
        return float(torch.where(out == right, 0, off).max()) if out.numel() else 0.0

    def _reduced(self, port: Port, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output for ``tile`` in fp64, and the scale of its error: the rms of a term, or
        of a sum of that many terms of random sign. Computed in pieces, by rows."""
        step = max(1, self._data.at_once // max(1, tile.shape[-1]))
        parts, squares = [], tile.new_zeros((), dtype=torch.float64)
        for low in range(0, max(1, len(tile)), step):
            terms = port.terms(tile[low : low + step].double())
            squares += terms.square().sum()
            parts.append(port.reduced(terms))
        if port.kind in ("row", "tile"):
            right = torch.cat(parts)
        else:
            stacked = torch.stack(parts)
            right = stacked.sum(0) if port.reduce == "sum" else stacked.amax(0)
        scale = (squares / max(1, tile.numel())).sqrt()
        if port.reduce == "sum":
            scale *= math.sqrt(tile.numel() / max(1, right.numel()))
        return right, torch.where(scale > 0, scale, 1.0)
