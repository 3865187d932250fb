"""Verifies the auxiliary outputs of an epilogue.

Before each launch the outputs are filled with NaN, or with small numbers, between guard bands. Each
output is compared with the reduction of the reference. If the reference covers only samples,
outputs per row or column are compared in the samples. A scalar is compared with the reduction of
the launch's own result, which is verified separately. With NaN or Inf in the inputs, only the kind
of each number is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from tmm_core.formats import NARROW_FLOATS
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
    :meth:`tmm_core.verify.verifier.Verifier.steps` explains the arguments."""

    def __init__(
        self, data: DataSets, launcher: Launcher, deterministic: bool, slack: float
    ) -> None:
        self._data, self._launcher = data, launcher
        self._ports = data.problem.epilogue.outputs
        self._deterministic, self._slack = deterministic, slack
        shapes = [port.shape(data.problem.out_shape) for port in self._ports]
        self._memory = [
            with_guard_bands(
                memory_layout(Operand(port.dtype), (1, math.prod(shape))), data.device, UNWRITTEN
            )
            for port, shape in zip(self._ports, shapes, strict=True)
        ]
        self._given: tuple[Tensor, ...] = ()
        self._launches = 0
        #: The outputs of the first launch, by the id of the inputs' reference.
        self._first: dict[int, tuple[Tensor, ...]] = {}

    def __call__(self, *arguments: Any, **extras: Any) -> Tensor:
        pairs, shape = zip(self._memory, self._ports, strict=True), self._data.problem.out_shape
        self._given = tuple(port.placed(memory.poison().view(-1), shape) for memory, port in pairs)
        self._launches += 1
        if self._launches % 2 == 0:
            for t in self._given:
                t.fill_(0.5)
        return self._launcher(*arguments, **extras, outputs=self._given)  # type: ignore[call-arg]

    def apart(self, *arguments: Any, **extras: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Launch with outputs that no other launch has, and return them with the result."""
        problem, device = self._data.problem, self._data.device
        given = []
        for port in self._ports:
            size = math.prod(port.shape(problem.out_shape))
            memory = torch.empty(size, dtype=port.dtype, device=device).fill_(torch.nan)
            given.append(port.placed(memory, problem.out_shape))
        result = self._launcher(*arguments, **extras, outputs=tuple(given))  # type: ignore[call-arg]
        return result, tuple(given)

    def faults(
        self,
        expected: Expected | None,
        result: Tensor,
        apart: tuple[Tensor, ...] | None = None,
        once: bool = False,
    ) -> Iterator[tuple[float, str]]:
        """Yield each output's error in a launch, with the fault or an empty text.

        Args:
            expected: The reference of the inputs. None if they contain NaN or Inf: then the result
                itself determines the outputs.
            apart: The outputs that :meth:`apart` returned; by default the last launch's.
            once: Other launches have other inputs. The reference may be released afterwards.
        """
        given = tuple(t.clone() for t in apart or self._given)
        first = given if once else self._first.setdefault(id(expected), given)
        again = self._deterministic and first is not given
        for port, out, before, memory in zip(self._ports, given, first, self._memory, strict=True):
            if apart is None and not memory.intact():
                yield math.nan, f"it wrote beyond its output {port}"
                return
            if expected is None:
                right, _ = self._reduced(port, result)
                out, right = out.float(), right.to(port.dtype).float()
                if not torch.equal(kinds_of(out), kinds_of(right)):
                    yield math.nan, f"output {port} is not NaN or Inf where the result makes it"
            elif again:
                if not same_bits(out, before):
                    yield math.nan, f"output {port} has other bits for the same inputs"
            else:
                yield self._judged(port, out, expected, result)

    def _judged(
        self, port: Port, out: Tensor, expected: Expected, result: Tensor
    ) -> tuple[float, str]:
        of_result = compare.tolerance(self._data.problem)
        limit = SLACK * self._slack * max(of_result, compare.TOLERANCE.get(port.dtype, 0))
        error = self._error(port, expected, out, result)
        fault = f"output {port} has error {error:.3g}, over {limit:.3g}"
        return error, "" if error <= limit else fault

    def _error(self, port: Port, expected: Expected, out: Tensor, result: Tensor) -> float:
        tile, places = expected.in_rows.numbers, expected.rows
        if places is not None and port.kind == "scalar":
            tile = result
        elif places is not None and port.kind == "col":
            assert expected.in_cols is not None
            tile, places = expected.in_cols.numbers, expected.cols
        right, scale = self._reduced(port, tile)
        if out.float().isnan().any():
            return math.nan
        if places is not None and port.kind != "scalar":
            out = out[places]
        nearest = half_step(out).to(right.dtype) if port.dtype in NARROW_FLOATS else 0.0
        out = out.to(right.dtype)
        off = ((out - right).abs() - nearest).clamp(min=0) / (right.abs() + scale)
        return float(torch.where(out == right, 0, off).max()) if out.numel() else 0.0

    def _reduced(self, port: Port, tile: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output for ``tile`` in fp64, and the scale of its error. This is the rms of a
        term, or of a sum of that many terms of random sign. Both are computed in pieces, by
        rows."""
        step = max(1, self._data.at_once // max(1, tile.shape[-1]))
        parts, squares, count = [], tile.new_zeros((), dtype=torch.float64), 0
        for low in range(0, max(1, len(tile)), step):
            terms = port.terms(tile[low : low + step].double())
            squares, count = squares + terms.square().sum(), count + terms.numel()
            parts.append(port.reduced(terms))
        if port.kind in ("row", "tile", "group"):
            right = torch.cat(parts)
        else:
            stacked = torch.stack(parts)
            right = stacked.sum(0) if port.reduce == "sum" else stacked.amax(0)
        scale = (squares / max(1, count)).sqrt()
        if port.reduce == "sum":
            scale *= math.sqrt(tile.numel() / max(1, right.numel()))
        return right, torch.where(scale > 0, scale, 1.0)


def half_step(t: Tensor) -> Tensor:
    """Half of the distance between an 8-bit float and the next larger one, in fp32: the largest
    error of rounding to it."""
    info = torch.finfo(t.dtype)
    _, exponent = t.float().abs().clamp(min=info.smallest_normal).frexp()
    return torch.ldexp(torch.full_like(exponent, info.eps / 4, dtype=torch.float32), exponent)
