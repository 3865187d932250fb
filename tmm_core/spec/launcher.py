"""Launchers, which a kernel's ``bind`` returns. Warm calls use nothing else of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

#: Name of the baseline kernel, which every other kernel has to beat.
BASELINE = "blas"


class Launcher(Protocol):
    """A kernel compiled for one problem and config: what the warm path calls.

    Operands are 2-D, or 3-D if the problem is batched, with exactly the shapes, dtypes and stride
    classes of the problem it was bound to. ``out`` is the destination (allocated by the launcher if
    ``None``, with :attr:`Problem.out_strides`) and is returned. The launcher uses the current
    stream of the current device and does not synchronise.

    Other tensors of a problem follow by keyword, if it has them. These are scales and zero points,
    such as ``a_scale``, and ``outputs``. ``outputs`` is a tuple of contiguous tensors to write, one
    for each auxiliary output of the epilogue: ``[M]`` of rows, ``[N]`` of columns, ``[M, N]`` or a
    scalar. A kernel that does not declare problems with these tensors need not accept them.
    """

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        alpha: float,
        out: torch.Tensor | None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A launcher and its form for N-D operands, which ``bind`` may return instead of a function. It
    is called like the launcher.

    Args:
        run: The launcher.
        folded: Makes a launcher for N-D operands that creates no views, since two views cost 2 µs
            in a call whose kernel may take 3. Its arguments are the fold
            (:class:`tmm_core.launch.fold.Fold`), the caller's a, b and residual, and a launcher
            that creates views. It returns a launcher for operands of the same shapes and strides,
            or None.
    """

    run: Launcher
    folded: Callable[..., Launcher | None] | None = None

    def __call__(self, *arguments: Any, **extras: Any) -> torch.Tensor:
        return self.run(*arguments, **extras)

    @classmethod
    def of(cls, launcher: Launcher | Bound) -> Bound:
        """Return the result of ``bind`` as a Bound."""
        return launcher if type(launcher) is Bound else cls(launcher)
