"""Ragged products: many of one kind in one call, whose sizes along one dimension differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Ragged = Literal["m", "n", "k"]


@dataclass(frozen=True, slots=True)
class Groups:
    """``count`` products whose extents along one dimension are told by int32 end offsets, which
    stay on the device (the conventions of ``torch.nn.functional.grouped_mm``).

    The problem's size along ``ragged`` is the sum over all groups:

    - ``"m"``: ``a[M, K] @ b[count, K, N] → out[M, N]``, rows ``offs[g-1]:offs[g]`` by ``b[g]``;
    - ``"n"``: ``a[count, M, K] @ b[K, N] → out[M, N]``, columns likewise;
    - ``"k"``: ``a[M, K] @ b[K, N] → out[count, M, N]``, one product of each range of K.

    Raises:
        ValueError: ``count`` is not positive, or ``ragged`` names no dimension.
    """

    count: int
    ragged: Ragged

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"there is at least one group, got {self.count}")
        if self.ragged not in get_args(Ragged):
            raise ValueError(f"products are ragged along m, n or k, not {self.ragged!r}")

    def to_json(self) -> dict[str, Any]:
        return {"count": self.count, "ragged": self.ragged}

    @classmethod
    def from_json(cls, doc: Mapping[str, Any]) -> Groups:
        return cls(int(doc["count"]), doc["ragged"])

    def __str__(self) -> str:
        return f"{self.count} groups along {self.ragged}"
