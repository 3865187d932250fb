"""N-D operands seen as one 2-D product, or as one batch of them.

``[B, M, K] @ [K, N]`` is a single product of B·M rows; anything else with batches becomes
3-D operands whose broadcast dimensions have stride zero, so that nothing is copied which
torch.matmul would not copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tmm_core.spec.kernel import Bound, Launcher


@dataclass(frozen=True, slots=True)
class Fold:
    """How operands of given shapes become 2-D or 3-D, and the result N-D again."""

    #: Broadcast batch shape that a and b are expanded to; None: a's rows are folded.
    batch: tuple[int, ...] | None
    #: Shape of the product as kernels see it, and as the caller does.
    flat: tuple[int, ...]
    shape: torch.Size

    @classmethod
    def of(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        residual: torch.Tensor | None,
        shape: torch.Size,
    ) -> Fold | None:
        """The fold of a product of output ``shape``; None where nothing is to be done:
        operands are 2-D and a residual needs no broadcasting."""
        if a.dim() == 2 and b.dim() == 2 and (residual is None or residual.shape == shape):
            return None
        m = a.shape[-2] if a.dim() > 1 else 1
        n = shape[-1] if b.dim() > 1 else 1
        if b.dim() <= 2:
            return cls(None, (math.prod(a.shape[:-1]), n), shape)
        batch = tuple(shape[: -1 if a.dim() == 1 else -2])
        count = math.prod(batch)
        return cls(batch, (m, n) if count == 1 else (count, m, n), shape)

    def operand_a(self, a: torch.Tensor) -> torch.Tensor:
        if self.batch is None:
            return a.reshape(self.flat[0], a.shape[-1])
        a = a if a.dim() > 1 else a[None]
        return self._stack(a)

    def operand_b(self, b: torch.Tensor) -> torch.Tensor:
        if self.batch is None:
            return b if b.dim() == 2 else b[:, None]
        return self._stack(b)

    def _stack(self, t: torch.Tensor) -> torch.Tensor:
        assert self.batch is not None
        matrix = tuple(t.shape[-2:])
        lead = self.flat[:-2]
        return t.expand(*self.batch, *matrix).reshape(*lead, *matrix)

    def residual(self, t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.expand(self.shape).reshape(self.flat)

    def scale_a(self, t: torch.Tensor) -> torch.Tensor:
        """The scale of a's rows as the folded a has them; one number stays one number."""
        if t.numel() == 1:
            return t
        return t.reshape(-1, 1) if self.batch is None else self._stack(t).contiguous()

    def scale_b(self, t: torch.Tensor) -> torch.Tensor:
        return t if t.numel() == 1 or self.batch is None else self._stack(t).contiguous()

    def in_place(
        self, a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor | None
    ) -> dict[str, torch.Tensor] | None:
        """The operands as kernels see them, by name, where they are all there already; None
        where one has to be copied, or there is nothing to be seen."""
        given = {"a": a, "b": b} | ({} if residual is None else {"residual": residual})
        flat = {name: self.flattened(name)(t) for name, t in given.items()}
        lie = [t.numel() and flat[name].data_ptr() == t.data_ptr() for name, t in given.items()]
        return flat if all(lie) else None

    def flattened(self, name: str) -> Callable[[torch.Tensor], Any]:
        """What makes of the N-D tensor of that name the one that kernels see."""
        if name == "out":
            return lambda out: out.view(self.flat)
        if name == "outputs":  # made as kernels see them
            return lambda outputs: outputs
        return {
            "a": self.operand_a,
            "b": self.operand_b,
            "residual": self.residual,
            "scale_a": self.scale_a,
            "scale_b": self.scale_b,
        }[name]

    def wrap(
        self,
        launcher: Launcher | Bound,
        a: torch.Tensor,
        b: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> Launcher | Bound:
        """A launcher that takes and returns N-D tensors, of the very strides of these."""
        by_views = self._by_views(launcher, layer=b.dim() == 2 and residual is None)
        folded = Bound.of(launcher).folded
        return (folded and folded(self, a, b, residual, by_views)) or by_views

    def _by_views(self, launcher: Launcher | Bound, layer: bool) -> Launcher:
        call: Any = Bound.of(launcher).run  # which may take extras besides
        shape = tuple(self.shape)  # a torch.Size takes torch 1.5 µs longer to read
        only_rows = layer and self.batch is None and len(shape) > 1

        def run(
            a: torch.Tensor,
            b: torch.Tensor,
            bias: torch.Tensor | None,
            residual: torch.Tensor | None,
            alpha: float,
            out: torch.Tensor | None,
            **extras: torch.Tensor | None,
        ) -> torch.Tensor:
            if only_rows and out is None and not extras:
                # A layer's call: two views and nothing else, half the time of what follows.
                return call(a.flatten(0, -2), b, bias, None, alpha, None).view(*shape)  # type: ignore[no-any-return]
            extras = {name: self.flattened(name)(t) for name, t in extras.items() if t is not None}
            a, b = self.operand_a(a), self.operand_b(b)
            flat = None
            if out is not None and (out.is_contiguous() or out.shape == self.flat):
                flat = out.view(self.flat)
            result = call(a, b, bias, self.residual(residual), alpha, flat, **extras)
            if out is None:
                return result.view(shape)  # type: ignore[no-any-return]
            return out if flat is not None else out.copy_(result.view(self.shape))

        return run
