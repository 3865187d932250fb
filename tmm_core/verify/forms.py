"""Wraps the other form of a launcher (:class:`tmm_core.spec.launcher.Bound`) to be called like it.

It is then verified in the same ways. A launcher of N-D operands may be wrong where the launcher
itself is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tmm_core.launch.fold import Fold
from tmm_core.spec.launcher import Bound
from tmm_core.spec.problem import Problem
from tmm_core.verify.ragged_inputs import Inputs, divided

Tensor = torch.Tensor


class WrongError(Exception):
    """A launch was wrong; the text says how, in one line."""


@dataclass(frozen=True)
class Folded:
    """Calls a launcher of N-D operands: ``lead`` are the dimensions of their rows, or of a
    batch."""

    problem: Problem
    bound: Bound
    lead: tuple[int, ...]

    def __call__(
        self, a: Tensor, b: Tensor, bias: Any, residual: Any, alpha: float, out: Any, **parts: Any
    ) -> Tensor:
        names = ("a", "residual") if self.problem.batch == 1 else ("a", "b", "residual")
        given = divided(Inputs(a, b, bias, residual, alpha, parts), self.lead, names)
        shape = (*self.lead, *self.problem.out_shape[1:])
        fold = Fold.of(given.a, given.b, given.residual, torch.Size(shape))
        assert fold is not None
        launcher: Any = fold.wrap(self.bound, given.a, given.b, given.residual)
        into = None if out is None else out.unflatten(0, self.lead)
        result = launcher(given.a, given.b, bias, given.residual, alpha, into, **given.parts)
        if result is into and isinstance(out, Tensor):
            return out
        return flattened(result, shape, self.problem)


def flattened(result: Any, shape: tuple[int, ...], problem: Problem) -> Tensor:
    """Return the result of a launch on N-D operands, in the problem's own shape.

    Raises:
        WrongError: It is no tensor of this ``shape``.
    """
    if not isinstance(result, Tensor) or tuple(result.shape) != shape:
        found = tuple(getattr(result, "shape", ()))
        raise WrongError(f"for N-D operands it returned shape {found} and not {shape}")
    return result.view(problem.out_shape)


def folded_of(bound: Bound, problem: Problem) -> Folded | None:
    """Return the launcher's form of N-D operands, if it has one."""
    if bound.folded is None or 0 in problem.out_shape:
        return None
    return Folded(problem, bound, (1, problem.m if problem.batch == 1 else problem.batch))
