"""A choice made once, ready to be replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from tmm_core.kernel import Candidate, Launcher, ScaledLauncher
from tmm_core.problem import Problem, packed

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


def signature(t: torch.Tensor) -> tuple[Any, ...]:
    """What a plan depends on of a tensor, besides its values."""
    return (t.shape, t.stride(), t.dtype, t.data_ptr() & 15, t.get_device())


def scales_signature(*scales: torch.Tensor | None) -> tuple[Any, ...] | None:
    """Likewise of scales, whose strides and address no kernel sees; None without any."""
    if all(t is None for t in scales):
        return None
    return tuple(None if t is None else (t.shape, t.dtype, t.get_device()) for t in scales)


@dataclass(frozen=True, slots=True)
class Plan:
    """A candidate bound to a problem: compiled, and callable with tensors of the very
    shapes, strides, dtypes, devices and alignment it was made for.

    >>> p = tmm_core.plan(x, weight.T, epilogue="silu")      # doctest: +SKIP
    >>> y = p(x, weight.T)                                   # doctest: +SKIP

    Calling it looks nothing up.
    """

    problem: Problem
    choice: Choice
    launcher: Launcher
    alpha: float
    #: :func:`signature` of a and of b, one after the other.
    operands: tuple[Any, ...]
    #: Of bias and residual, where the plan has either.
    extras: tuple[Any, ...] | None
    #: :func:`scales_signature` of the scales.
    scales: tuple[Any, ...] | None

    @classmethod
    def of(
        cls,
        problem: Problem,
        choice: Choice,
        launcher: Launcher,
        alpha: float,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    ) -> Plan:
        """The plan for ``tensors``: a, b, bias and residual."""
        a, b, bias, residual = tensors
        operands, extras = signature(a) + signature(b), _extras(bias, residual)
        return cls(problem, choice, launcher, alpha, operands, extras, scales_signature(*scales))

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
        *,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Launch on the current stream.

        Args:
            out: Row-major, of the result's shape and dtype, starting on 16 bytes.

        Raises:
            ValueError: Tensors of other shapes, strides, dtypes, devices or alignment than
                planned for, or bias, residual and scales given or left out otherwise than
                planned.
        """
        if (
            a.shape,
            a.stride(),
            a.dtype,
            a.data_ptr() & 15,
            a.get_device(),
            b.shape,
            b.stride(),
            b.dtype,
            b.data_ptr() & 15,
            b.get_device(),
        ) != self.operands:
            raise ValueError(self._mismatch("a and b", self.operands, signature(a) + signature(b)))
        if bias is not None or residual is not None or self.extras is not None:
            given = _extras(bias, residual)
            if given != self.extras:
                raise ValueError(self._mismatch("bias and residual", self.extras, given))
        if out is not None:
            self._check_out(a, out)
        if scale_a is not None or scale_b is not None or self.scales is not None:
            given = scales_signature(scale_a, scale_b)
            if given != self.scales:
                raise ValueError(self._mismatch("scales", self.scales, given))
            launcher = cast(ScaledLauncher, self.launcher)
            scales = packed(scale_a), packed(scale_b)
            return launcher(a, b, bias, residual, self.alpha, out, *scales)
        return self.launcher(a, b, bias, residual, self.alpha, out)

    def _check_out(self, a: torch.Tensor, out: torch.Tensor) -> None:
        problem = self.problem
        planned = problem.out.dtype, a.get_device()
        if (
            (out.dtype, out.get_device()) != planned
            or out.numel() != problem.batch * problem.m * problem.n
            or out.data_ptr() & 15
            or not out.is_contiguous()
        ):
            raise ValueError(self._mismatch("out", ("contiguous", *planned), signature(out)))

    def _mismatch(self, what: str, planned: Any, given: Any) -> str:
        def show(values: Any) -> str:
            if values is None:
                return "nothing"
            return ", ".join(str(tuple(v) if isinstance(v, tuple) else v) for v in values)

        return (
            f"plan for {self.problem} takes {what} of shape, stride, dtype, offset from 16 bytes "
            f"and device {show(planned)}; got {show(given)}"
        )

    def __str__(self) -> str:
        return f"{self.problem} → {self.choice.candidate} ({self.choice.origin})"


def _extras(bias: torch.Tensor | None, residual: torch.Tensor | None) -> tuple[Any, ...] | None:
    if bias is None and residual is None:
        return None
    return tuple(t if t is None else signature(t) for t in (bias, residual))
