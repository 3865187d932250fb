"""A choice made once, ready to be replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from tmm_core.kernel import Candidate, Launcher
from tmm_core.problem import Problem

Origin = Literal["forced", "cache", "tuned", "neighbour", "heuristic", "fallback"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which candidate, why, and on what evidence."""

    candidate: Candidate
    origin: Origin
    #: One line for ``explain()``: the record's file, the neighbour, what forbade tuning.
    reason: str = ""
    #: The problem the evidence is about, where it is not the one asked (bucket, neighbour).
    evidence: Problem | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A candidate bound to a problem: compiled, and callable with tensors of the very
    shapes, strides and dtypes it was made for.

    >>> p = tmm_core.plan(x, weight.T, epilogue="silu")      # doctest: +SKIP
    >>> y = p(x, weight.T)                                   # doctest: +SKIP

    Calling it looks nothing up, and checks shapes and strides of ``a`` and ``b`` only.
    """

    problem: Problem
    choice: Choice
    launcher: Launcher
    #: ``(a.shape, a.stride(), b.shape, b.stride())`` of the tensors it was made from.
    layout: tuple[Any, ...]
    alpha: float = 1.0

    @property
    def kernel(self) -> str:
        """Name of the kernel this plan launches."""
        return self.choice.candidate.kernel.name

    @property
    def config(self) -> dict[str, Any]:
        """The kernel's config, as JSON."""
        return self.choice.candidate.config.to_json()

    @property
    def origin(self) -> Origin:
        """Where the choice came from."""
        return self.choice.origin

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Launch on the current stream.

        Raises:
            ValueError: Operands of other shapes, strides or dtypes than planned for, or
                bias and residual given or left out otherwise than planned.
        """
        problem = self.problem
        if (
            (a.shape, a.stride(), b.shape, b.stride()) != self.layout
            or a.dtype is not problem.a.dtype
            or b.dtype is not problem.b.dtype
            or (bias is None) is not (problem.bias is None)
            or (residual is None) is not (problem.residual is None)
        ):
            raise ValueError(self._mismatch(a, b, bias, residual))
        return self.launcher(a, b, bias, residual, self.alpha, out)

    def _mismatch(self, a: Any, b: Any, bias: Any, residual: Any) -> str:
        def show(shape: Any, stride: Any, dtype: Any) -> str:
            return f"{tuple(shape)} stride {tuple(stride)} {dtype}"

        a_shape, a_stride, b_shape, b_stride = self.layout
        return (
            f"plan is for a {show(a_shape, a_stride, self.problem.a.dtype)}, "
            f"b {show(b_shape, b_stride, self.problem.b.dtype)}, "
            f"bias {'given' if self.problem.bias else 'absent'}, "
            f"residual {'given' if self.problem.residual else 'absent'}; "
            f"got a {show(a.shape, a.stride(), a.dtype)}, b {show(b.shape, b.stride(), b.dtype)}, "
            f"bias {'absent' if bias is None else 'given'}, "
            f"residual {'absent' if residual is None else 'given'}"
        )

    def __str__(self) -> str:
        return f"{self.problem} → {self.choice.candidate} ({self.choice.origin})"
