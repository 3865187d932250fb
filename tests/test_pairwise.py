"""Parts of many cases keep every value and every pair."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from pairwise import covering, share

CASES = [
    {"m": m, "n": n, "dtype": dtype}
    for m, n, dtype in itertools.product((1, 16, 64), (1, 32), ("half", "single", "double"))
    if (m, dtype) != (1, "double")
]


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERY_CASE", raising=False)


def pairs(cases: list[dict[str, Any]]) -> set[Any]:
    return {pair for case in cases for pair in itertools.combinations(case.items(), 2)}


def test_a_few_cases_cover_every_pair() -> None:
    chosen = covering(CASES, dict)
    assert pairs(chosen) == pairs(CASES)
    # The two largest fields have three values each, and one of their pairs does not occur.
    assert 8 <= len(chosen) <= 10 < len(CASES)
    assert all(case in CASES for case in chosen)
    assert chosen == covering(CASES, dict)


def test_shares_together_are_all_cases() -> None:
    shares = [share(range(10), place, 3) for place in range(3)]
    assert shares == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]
    assert share(range(10), 4, 3) == shares[1]


def test_every_case_is_taken_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERY_CASE", "1")
    assert covering(CASES, dict) == CASES
    assert share(range(10), 1, 3) == [*range(10)]
    monkeypatch.setenv("EVERY_CASE", "0")
    assert share(range(10), 1, 3) == [1, 4, 7]
