"""Launches that overlap the previous one spread their blocks evenly over the SMs."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from tmm_core.triton import residency  # it imports Triton

MOST = 228 * 1024


@pytest.mark.parametrize("resident", [1, 2, 3, 4, 5, 7, 8, 16, 32])
@pytest.mark.parametrize("needed", [0, 16, 2048, 4096, 5000, 16384, 101_376])
def test_as_many_blocks_fit_on_an_sm_and_no_more(needed: int, resident: int) -> None:
    found = residency.share(needed, resident, MOST)
    if found is None:
        assert resident * (needed + 1024 + 128) > MOST  # with what rounding adds
        return
    each, capacity = found
    assert each >= needed
    assert each % 128 == 0
    assert capacity // (each + 1024) == resident
    smaller = [c for c in residency._CAPACITIES if c < capacity]
    assert all(c // resident - 1024 < needed + 128 for c in smaller)


def test_a_block_may_fill_an_sm() -> None:
    assert residency.share(120_000, 1, MOST) == (131 * 1024, 132 * 1024)
    assert residency.share(227 * 1024, 1, MOST) == (227 * 1024, MOST)
    assert residency.share(227 * 1024 + 1, 1, MOST) is None
    assert residency.share(60_000, 2, 100 * 1024) is None  # of a GPU with less


class Driver:
    """A driver on whose SMs ``fitting`` blocks fit."""

    def __init__(self, fitting: int, status: int = 0, refused: int = 0) -> None:
        self.fitting, self.status, self.refused = fitting, status, refused
        self.asked: list[tuple[int, int, int]] = []
        self.set: dict[int, int] = {}

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(  # noqa: N802
        self, found: Any, function: Any, threads: int, shared: Any
    ) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = self.fitting
        self.asked.append((function.value, threads, shared.value))
        return self.status

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        assert function.value == 77
        if attribute == self.refused:
            return 1
        self.set[attribute] = value
        return 0


def _kernel(shared: int, packed: Any = None) -> Any:
    meta = SimpleNamespace(num_warps=8, num_ctas=1, shared=shared)
    packed = (8, 1, shared) if packed is None else packed
    return SimpleNamespace(metadata=meta, packed_metadata=packed, function=77)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    props = SimpleNamespace(shared_memory_per_multiprocessor=MOST, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: props)

    def made(driver: Driver | None) -> Driver | None:
        monkeypatch.setattr(residency, "_driver", lambda: driver)
        return driver

    return made


def test_an_sm_holds_its_share_of_a_launch(install: Any) -> None:
    install(None)
    assert [residency.even_share(blocks, 0) for blocks in (1, 132, 133, 264)] == [1, 1, 2, 2]


def test_blocks_ask_for_their_share_of_an_sm(install: Any) -> None:
    driver, kernel = install(Driver(4)), _kernel(4096)
    residency.spread(kernel, 0, 1)
    assert driver.asked == [(77, 256, 4096)]
    assert kernel.packed_metadata == (8, 1, 7 * 1024)
    # 3 % of 228 KiB are less than 8 KiB, and 4 % are more, with which two blocks would fit.
    assert driver.set == {8: 7 * 1024, 9: 3}


def test_l1_gets_what_the_blocks_that_fit_do_not_need(install: Any) -> None:
    driver, kernel = install(Driver(2)), _kernel(5000)
    residency.spread(kernel, 0, 9)
    assert kernel.packed_metadata == (8, 1, 7 * 1024)
    assert driver.set == {8: 7 * 1024, 9: 7}  # 16 KiB


@pytest.mark.parametrize(
    ("driver", "kernel", "resident"),
    [
        (Driver(4, status=1), _kernel(4096), 1),  # an error
        (None, _kernel(4096), 1),
        (Driver(4), _kernel(4096, packed=(8, 1, 4096, 0)), 1),  # of another release
        (Driver(9), _kernel(40_000), 8),  # so many do not fit
    ],
)
def test_launches_that_cannot_be_spread_are_unchanged(
    install: Any, driver: Driver | None, kernel: Any, resident: int
) -> None:
    install(driver)
    before = kernel.packed_metadata
    residency.spread(kernel, 0, resident)
    assert kernel.packed_metadata == before
    assert driver is None or not driver.set


@pytest.mark.parametrize("refused", [8, 9])
def test_an_attribute_that_the_driver_refuses_changes_no_launch(install: Any, refused: int) -> None:
    install(Driver(4, refused=refused))
    kernel = _kernel(4096)
    residency.spread(kernel, 0, 1)
    assert kernel.packed_metadata == (8, 1, 4096)
