"""Wraps the other forms of a launcher (:class:`tmm_core.spec.launcher.Bound`) to be called like it.

They are then verified in the same ways. A source that a plan inlines, or a launcher of N-D
operands, may be wrong where the launcher itself is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tmm_core.launch.codegen import address, written
from tmm_core.launch.fold import Fold
from tmm_core.spec.arguments import LAUNCHED, LAUNCHED_PARTS, keywords, launch_parameters
from tmm_core.spec.launcher import Bound, Launcher
from tmm_core.spec.problem import Problem
from tmm_core.verify.ragged_inputs import Inputs, divided

Tensor = torch.Tensor


class WrongError(Exception):
    """A launch was wrong; the text says how, in one line."""


def source_of(bound: Bound, problem: Problem) -> Launcher:
    """Return a launcher that runs a launcher's source, after the statements that a plan puts before
    it."""
    terms = {"bias": problem.bias, "residual": problem.residual}
    given = ["a", "b", *(name for name, term in terms.items() if term is not None)]
    arguments = f"({', '.join(LAUNCHED)}{keywords(LAUNCHED_PARTS)})"
    lines = [
        "if out is not None and not (out.is_contiguous() and out.data_ptr() % 16 == 0):",
        f"    return source_launcher{arguments}  # no plan takes this output",
        bound.body.on_device(f"source{arguments}"),
        *map(address, given),
        *bound.body.lines,
    ]
    namespace = {**bound.body.namespace, "source_launcher": bound.run}
    return written("source", launch_parameters(), lines, namespace)  # type: ignore[no-any-return]


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


def forms_of(bound: Bound, problem: Problem) -> dict[str, Any]:
    """Return the other forms of a launcher, by a phrase that names them in messages."""
    found: dict[str, Any] = {}
    if bound.body is not None:
        found["called as a plan's source"] = source_of(bound, problem)
    if bound.folded is not None and 0 not in problem.out_shape:
        lead = (1, problem.m if problem.batch == 1 else problem.batch)
        found["called with N-D operands"] = Folded(problem, bound, lead)
    return found
