"""Auxiliary outputs of an epilogue: a row's amax, a sum, a copy in another dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

Tensor = torch.Tensor

Kind = Literal["scalar", "row", "col", "tile"]
Reduce = Literal["max", "sum"]

#: Dtypes that outputs may have.
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Port:
    """One auxiliary output of an :class:`~tmm_core.Epilogue`, beside its result ``y[..., M, N]``.

    Args:
        name: An identifier, for messages.
        kind: The output has one element per ``"row"`` (``[..., M]``), per column (``"col"``,
            ``[N]``), per element (``"tile"``, ``[..., M, N]``) or in all (``"scalar"``, ``[]``).
        dtype: The output's dtype: fp16, bf16 or fp32. It is reduced in fp32 and rounded once.
        reduce: ``"max"`` or ``"sum"`` over the other dimensions; None for a tile. As in torch, a
            maximum is NaN if one of its elements is.
        of: ``y -> Tensor``, an element-wise torch function whose values are reduced or stored.
            ``y`` is the result before rounding, residual included. None: ``y`` itself.
        device: The same function of an fp32 block in Triton's language, jitted or plain, as
            :attr:`Epilogue.device`. If None beside an ``of``, no kernel can fuse it, and BLAS
            applies ``of``.

    Raises:
        ValueError: An unknown name, kind, dtype or reduction, a tile that is reduced, another kind
            that is not, or a ``device`` without its reference ``of``.
        TypeError: ``device`` is not a function.
    """

    name: str
    kind: Kind
    dtype: torch.dtype = torch.float32
    reduce: Reduce | None = None
    of: Callable[[Tensor], Tensor] | None = None
    device: Any = None

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"output name must be an identifier, got {self.name!r}")
        for field, allowed in (("kind", get_args(Kind)), ("dtype", DTYPES)):
            if getattr(self, field) not in allowed:
                names = ", ".join(map(str, allowed))
                given = getattr(self, field)
                raise ValueError(f"output {self.name!r}: {field} is one of {names}, not {given!r}")
        if self.reduce not in ((None,) if self.kind == "tile" else get_args(Reduce)):
            wanted = "not reduced" if self.kind == "tile" else "reduced by max or sum"
            raise ValueError(
                f"output {self.name!r}: a {self.kind} is {wanted}, got reduce={self.reduce!r}"
            )
        if self.device is not None and self.of is None:
            raise ValueError(f"output {self.name!r} has a device function and no reference `of`")
        if self.device is not None and not callable(self.device):
            raise TypeError(f"output {self.name!r}: {self.device!r} is no device function")

    @property
    def fusable(self) -> bool:
        """Whether kernels can compute it."""
        return self.of is None or self.device is not None

    def shape(self, result: Sequence[int]) -> tuple[int, ...]:
        """The output's shape for a result ``[..., M, N]``."""
        shapes = {"scalar": (), "row": result[:-1], "col": result[-1:], "tile": result}
        return tuple(shapes[self.kind])

    def terms(self, y: Tensor) -> Tensor:
        """The elements to be reduced, in fp32, or in fp64 if ``y`` is."""
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        return wide if self.of is None else self.of(wide)

    def reduced(self, terms: Tensor) -> Tensor:
        """Reduce ``[..., M, N]``. The maximum of no elements is -inf, their sum 0."""
        if self.reduce is None:
            return terms
        if self.kind != "row":
            terms = terms.flatten(0, -2) if self.kind == "col" else terms.flatten()
        along = -1 if self.kind == "row" else 0
        if self.reduce == "sum":
            return terms.sum(along)
        if not terms.shape[along]:
            return terms.new_full(terms.sum(along).shape, -math.inf)
        return terms.amax(along)

    def apply(self, y: Tensor) -> Tensor:
        """The auxiliary output of the result ``y``, by torch's operators."""
        return self.reduced(self.terms(y)).to(self.dtype)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}{f' {self.reduce}' if self.reduce else ''})"
