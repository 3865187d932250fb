"""Folds N-D operands into one 2-D product or one batch of products.

``[B, M, K] @ [K, N]`` is a single product of B·M rows. Any other batch becomes 3-D operands. Their
broadcast dimensions have stride zero, so nothing is copied that torch.matmul would not copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tmm_core.spec.arguments import PARTS
from tmm_core.spec.launcher import Bound, Launcher

Tensor = torch.Tensor


class Fold(NamedTuple):
    """Converts operands of fixed shapes to 2-D or 3-D, and the result back to N-D."""

    #: The broadcast batch shape of a and b; None: a's leading dimensions become rows.
    batch: tuple[int, ...] | None
    #: The shape of the product for kernels, and for the caller.
    flat: tuple[int, ...]
    shape: torch.Size

    @classmethod
    def of(cls, a: Tensor, b: Tensor, residual: Tensor | None, shape: torch.Size) -> Fold | None:
        """Return the fold of a product of output ``shape``; None if operands are 2-D and a residual
        needs no broadcasting."""
        if a.dim() == 2 and b.dim() == 2 and (residual is None or residual.shape == shape):
            return None
        m = a.shape[-2] if a.dim() > 1 else 1
        n = shape[-1] if b.dim() > 1 else 1
        if b.dim() <= 2:
            return cls(None, (math.prod(a.shape[:-1]), n), shape)
        batch = tuple(shape[: -1 if a.dim() == 1 else -2])
        count = math.prod(batch)
        return cls(batch, (m, n) if count == 1 else (count, m, n), shape)

    # Each of these methods converts the N-D tensor of its name for kernels.

    def a(self, t: Tensor) -> Tensor:
        if self.batch is None:
            return t.reshape(self.flat[0], t.shape[-1])
        return self._stack(t if t.dim() > 1 else t[None])

    def b(self, t: Tensor) -> Tensor:
        if self.batch is None:
            return t if t.dim() == 2 else t[:, None]
        return self._stack(t)

    def _stack(self, t: Tensor) -> Tensor:
        assert self.batch is not None
        matrix = tuple(t.shape[-2:])
        lead = self.flat[:-2]
        return t.expand(*self.batch, *matrix).reshape(*lead, *matrix)

    def residual(self, t: Tensor | None) -> Tensor | None:
        return None if t is None else t.expand(self.shape).reshape(self.flat)

    def _of_a(self, t: Tensor) -> Tensor:
        """Convert scales or zero points of a. One number is not changed; a grid is not copied."""
        if self.batch is None:
            return t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) if t.dim() else t
        return self._parts(t[None] if t.dim() == 1 else t, -1)

    def _of_b(self, t: Tensor) -> Tensor:
        if self.batch is None:
            return t[:, None] if t.dim() == 1 else t
        return self._parts(t, -2)

    def _parts(self, t: Tensor, along_k: int) -> Tensor:
        if t.numel() == 1:
            return t.reshape((1,) * min(t.dim(), len(self.flat)))
        stacked = self._stack(t)
        return stacked if t.shape[along_k] > 1 else stacked.contiguous()

    def out(self, t: Tensor) -> Tensor:
        return t.view(self.flat)

    @staticmethod
    def outputs(allocated: Any) -> Any:
        return allocated  # already in the shapes for kernels

    def in_place(self, a: Tensor, b: Tensor, residual: Tensor | None) -> dict[str, Tensor] | None:
        """Return the operands for kernels, by name, if all of them are views; None if an operand
        has to be copied or is empty."""
        given = {"a": a, "b": b} | ({} if residual is None else {"residual": residual})
        flat = {name: self.flattened(name)(t) for name, t in given.items()}
        are_views = all(
            t.numel() and flat[name].data_ptr() == t.data_ptr() for name, t in given.items()
        )
        return flat if are_views else None

    def flattened(self, name: str) -> Callable[[Tensor], Any]:
        """Return the function that converts the N-D tensor of this name for kernels."""
        operand = {role.keyword: role.of for role in PARTS}.get(name)
        function: Callable[[Tensor], Any] = getattr(self, f"_of_{operand}" if operand else name)
        return function

    def wrap(
        self, launcher: Launcher | Bound, a: Tensor, b: Tensor, residual: Tensor | None
    ) -> Launcher:
        """Return a launcher that takes and returns N-D tensors with exactly these strides."""
        bound = Bound.of(launcher)
        call: Any = bound.run  # may also take extras
        shape = tuple(self.shape)  # a torch.Size costs torch 1.5 µs more
        only_rows = b.dim() == 2 and residual is None and len(shape) > 1

        def by_views(
            a: Tensor,
            b: Tensor,
            bias: Tensor | None,
            residual: Tensor | None,
            alpha: float,
            out: Tensor | None,
            **extras: Tensor | None,
        ) -> Tensor:
            if only_rows and out is None and not extras:
                # A layer's call needs only two views: half the time of the general path below.
                return call(a.flatten(0, -2), b, bias, None, alpha, None).view(*shape)  # type: ignore[no-any-return]
            extras = {name: self.flattened(name)(t) for name, t in extras.items() if t is not None}
            a, b = self.a(a), self.b(b)
            flat = None
            if out is not None and (out.is_contiguous() or out.shape == self.flat):
                flat = out.view(self.flat)
            result = call(a, b, bias, self.residual(residual), alpha, flat, **extras)
            if out is None:
                return result.view(shape)  # type: ignore[no-any-return]
            return out if flat is not None else out.copy_(result.view(self.shape))

        folded = bound.folded and bound.folded(self, a, b, residual, by_views)
        return folded or by_views
