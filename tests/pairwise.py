"""Parts of many cases; with ``EVERY_CASE=1`` in the environment, all of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Case = TypeVar("Case")


def every_case() -> bool:
    """Whether tests run all of their cases, which takes minutes longer."""
    return os.environ.get("EVERY_CASE", "") not in ("", "0")


def share(cases: Iterable[Case], place: int, of: int) -> list[Case]:
    """Every ``of``-th case, from ``place`` on: tests that differ in ``place`` divide the cases."""
    found = list(cases)
    return found if every_case() else found[place % of :: of]


def covering(cases: Iterable[Case], fields: Callable[[Case], Mapping[str, Any]]) -> list[Case]:
    """A few cases that together have every pair of values of two fields that occurs in any case.

    Args:
        cases: Those to choose from, greedily; the first of equally good ones is taken.
        fields: The values of a case that affect the test, by name; two or more.
    """
    left = [(case, set(itertools.combinations(fields(case).items(), 2))) for case in cases]
    if every_case():
        return [case for case, _ in left]
    missing = set().union(*(pairs for _, pairs in left))
    chosen = []
    while missing:
        case, pairs = max(left, key=lambda each: len(each[1] & missing))
        chosen.append(case)
        missing -= pairs
    return chosen
