"""Ragged products: many products in one call, whose sizes along one dimension differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from tmm_core.spec.operand import dtype_name, dtype_of

Ragged = Literal["m", "n", "k"]


@dataclass(frozen=True, slots=True)
class Groups:
    """``count`` products whose extents along one dimension are given by int32 end offsets on the
    device (the conventions of ``torch.nn.functional.grouped_mm``).

    The problem's size along ``ragged`` is the sum over all groups:

    - ``"m"``: ``a[M, K] @ b[count, K, N] → out[M, N]``, rows ``offs[g-1]:offs[g]`` by ``b[g]``;
    - ``"n"``: ``a[count, M, K] @ b[K, N] → out[M, N]``, columns likewise;
    - ``"k"``: ``a[M, K] @ b[K, N] → out[count, M, N]``, one product of each range of K.

    If rows are ragged, launches may take further tensors with one number per row; the fields hold
    their dtypes. ``a_index`` is the row of ``a`` to multiply. ``out_index`` is the row of the
    result to write; these rows are distinct. ``out_weights`` is a factor that is applied after the
    epilogue and before the residual, in the order of the product's rows.

    Scales of 8-bit operands are ``a_scale`` per row and ``b_scale`` per column of each group
    (:meth:`Problem.shape`).

    Elements beyond ``offs[-1]`` belong to no group, and are not read. In the result they are not
    changed; with ``zeroed`` they are set to zero, as a gradient requires.

    Raises:
        ValueError: ``count`` is not positive, ``ragged`` is not a dimension, or a dimension other
            than rows is gathered, scattered or weighted.
    """

    count: int
    ragged: Ragged
    a_index: torch.dtype | None = None
    out_index: torch.dtype | None = None
    out_weights: torch.dtype | None = None
    zeroed: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"there must be at least one group, got {self.count}")
        if self.ragged not in get_args(Ragged):
            raise ValueError(f"products are ragged along m, n or k, not {self.ragged!r}")
        if self.ragged != "m" and len(self.given) > 1:
            raise ValueError(f"only rows have {' or '.join(self.given[1:])}, not {self.ragged}")

    @property
    def extras(self) -> dict[str, torch.dtype | None]:
        """The further tensors of a launch of groups, by name, with their dtypes; None if absent."""
        return {
            "offs": torch.int32,
            "a_index": self.a_index,
            "out_index": self.out_index,
            "out_weights": self.out_weights,
        }

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the tensors that are present, in order."""
        return tuple(name for name, dtype in self.extras.items() if dtype is not None)

    def to_json(self) -> dict[str, Any]:
        dtypes = {name: dtype_name(d) for name, d in self.extras.items() if d}
        del dtypes["offs"]
        zeroed = {"zeroed": True} if self.zeroed else {}
        return {"count": self.count, "ragged": self.ragged, **dtypes, **zeroed}

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Groups:
        names = ("a_index", "out_index", "out_weights")
        dtypes = {name: dtype_of(doc[name]) for name in names if doc.get(name)}
        return cls(int(doc["count"]), doc["ragged"], **dtypes, zeroed=bool(doc.get("zeroed")))

    def __str__(self) -> str:
        also = [*self.given[1:], *(["zeroed"] if self.zeroed else [])]
        return " ".join([f"{self.count} groups along {self.ragged}", *also])
