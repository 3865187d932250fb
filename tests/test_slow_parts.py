"""CI runs a part of the slow tests for each commit; the parts together are all of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def conftest(pytestconfig: pytest.Config) -> Any:
    return pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))


def item(number: int, mark: pytest.Mark | None) -> Any:
    named = {"slow": mark}
    return SimpleNamespace(nodeid=f"test_{number}", get_closest_marker=named.get)


def test_each_slow_test_is_in_one_part(conftest: Any) -> None:
    items = [item(number, pytest.mark.slow.mark) for number in range(600)]
    assert all(conftest._is_slow(each) for each in items)
    places = [
        [part for part in range(12) if conftest._is_in_part(each, f"{part}/12")] for each in items
    ]
    assert all(len(parts) == 1 for parts in places)
    assert all(20 < places.count([part]) < 90 for part in range(12))
    assert all(conftest._is_in_part(each, "0/1") for each in items)
    assert not any(conftest._is_in_part(each, "0/0") for each in items)


def test_one_in_five_cases_is_quick_and_the_others_are_spread_over_all_parts(conftest: Any) -> None:
    items = [item(number, pytest.mark.slow(quick=5).mark) for number in range(1000)]
    slow = [each for each in items if conftest._is_slow(each)]
    assert 750 < len(slow) < 850
    assert {
        next(p for p in range(12) if conftest._is_in_part(each, f"{p}/12")) for each in slow
    } == {*range(12)}
    assert not conftest._is_slow(item(1, None))
