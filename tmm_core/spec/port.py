"""Auxiliary outputs of an epilogue: a row's amax, a sum, a copy in another dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from tmm_core.errors import name_of, of_the_call
from tmm_core.formats import FLOATS, NARROW_FLOATS

Tensor = torch.Tensor

Kind = Literal["scalar", "row", "col", "tile", "group"]
Reduce = Literal["max", "sum"]


@dataclass(frozen=True)
class Port:
    """One auxiliary output of an :class:`~tmm_core.Epilogue`, whose result is ``y[..., M, N]``.

    Args:
        name: An identifier, for messages.
        kind: The output has one element per ``"row"`` (``[..., M]``), per column (``"col"``,
            ``[N]``), per element (``"tile"``, ``[..., M, N]``), per row and group of columns
            (``"group"``, ``[..., M, ⌈N/group⌉]``) or in all (``"scalar"``, ``[]``). The elements of
            one group are adjacent in memory for all rows.
        dtype: The output's dtype: fp16, bf16 or fp32; of a tile with groups also an 8-bit float, in
            whose range the values have to be. It is reduced in fp32 and rounded once.
        reduce: ``"max"`` or ``"sum"`` over the other dimensions; None for a tile and for groups. As
            in torch, a maximum is NaN if one of its elements is.
        of: ``y -> Tensor``, an element-wise torch function whose values are reduced or stored.
            ``y`` is the result before rounding, residual included. None: ``y`` itself.
        device: The same function of an fp32 block in Triton's language, jitted or plain, as
            :attr:`Epilogue.device`. None, although there is an ``of``: no kernel can fuse it, and
            BLAS applies ``of``.
        group: The number of columns in a group, a power of two. ``of`` then takes whole groups,
            ``[..., groups, group]``, the last one filled up with zeros, and ``device`` such a
            block. A tile's returns the same shape, a group's ``[..., groups]``.

    Raises:
        ValueError: A name, kind, dtype or reduction is unknown. A tile or group is reduced, or
            another kind is not. A kind without groups has one. Or a ``device`` or group lacks the
            reference ``of``.
        TypeError: ``device`` is not a function.
    """

    name: str
    kind: Kind
    dtype: torch.dtype = torch.float32
    reduce: Reduce | None = None
    of: Callable[[Tensor], Tensor] | None = None
    device: Any = None
    group: int = 0

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"output name must be an identifier, got {self.name!r}")
        dtypes = (*FLOATS, *NARROW_FLOATS) if self.kind == "tile" and self.group else FLOATS
        for field, allowed in (("kind", get_args(Kind)), ("dtype", dtypes)):
            if getattr(self, field) not in allowed:
                names = ", ".join(map(str, allowed))
                given = getattr(self, field)
                raise ValueError(f"output {self.name!r}: {field} is one of {names}, not {given!r}")
        stored = self.kind in ("tile", "group")
        if self.reduce not in ((None,) if stored else get_args(Reduce)):
            wanted = "not reduced" if stored else "reduced by max or sum"
            raise ValueError(
                f"output {self.name!r}: a {self.kind} is {wanted}, got reduce={self.reduce!r}"
            )
        grouped = {"tile": self.group >= 0, "group": self.group > 0}.get(self.kind, not self.group)
        if not grouped or self.group & (self.group - 1):
            raise ValueError(f"output {self.name!r}: a {self.kind} has no groups of {self.group}")
        if (self.device is not None or self.group) and self.of is None:
            what = "groups" if self.device is None else "a device function"
            raise ValueError(f"output {self.name!r} has {what} and no reference `of`")
        if self.device is not None and not callable(self.device):
            raise TypeError(f"output {self.name!r}: {self.device!r} is no device function")

    @property
    def fusable(self) -> bool:
        """Whether kernels can compute it."""
        return self.of is None or self.device is not None

    def shape(self, result: Sequence[int]) -> tuple[int, ...]:
        """Return the output's shape for a result ``[..., M, N]``."""
        shapes = {"scalar": (), "row": result[:-1], "col": result[-1:], "tile": result}
        if self.kind == "group":
            return (*result[:-1], -(-result[-1] // self.group))
        return tuple(shapes[self.kind])

    def placed(self, elements: Tensor, result: Sequence[int]) -> Tensor:
        """Return a vector of the output's elements in the output's shape, for a result
        ``[..., M, N]``."""
        shape = self.shape(result)
        if self.kind != "group":
            return elements.view(shape)
        *rows, groups = shape
        found: Tensor = elements.view(groups, math.prod(rows)).t().unflatten(0, rows)
        return found

    @of_the_call
    def terms(self, y: Tensor) -> Tensor:
        """Return the elements to be reduced or stored, in fp32, or in fp64 if ``y`` is."""
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        if self.of is None:
            return wide
        if not self.group:
            return returned("output", "function `of`", self.name, self.of(wide), wide.shape)
        columns = wide.shape[-1]
        groups = -(-columns // self.group)
        padded = torch.nn.functional.pad(wide, (0, groups * self.group - columns))
        padded = padded.unflatten(-1, (groups, self.group))
        shape = padded.shape if self.kind == "tile" else padded.shape[:-1]
        found = returned("output", "function `of`", self.name, self.of(padded), shape)
        return found.flatten(-2)[..., :columns] if self.kind == "tile" else found

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
        """Return the auxiliary output of the result ``y``, by torch's operators."""
        return self.reduced(self.terms(y)).to(self.dtype)

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}{f' {self.reduce}' if self.reduce else ''})"


def returned(whose: str, what: str, name: str, y: Any, shape: torch.Size) -> Tensor:
    """Return ``y``, which the user's function ``what`` returned.

    Raises:
        TypeError: It is not a tensor.
        ValueError: It has another shape. Later operators would broadcast it.
    """
    if not isinstance(y, Tensor):
        kind = name_of(type(y))
        raise TypeError(f"{whose} {name!r}: its {what} returned {kind}, not a tensor")
    if y.shape != shape:
        found, wanted = tuple(y.shape), tuple(shape)
        raise ValueError(f"{whose} {name!r}: its {what} returned shape {found}, not {wanted}")
    return y
