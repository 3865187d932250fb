"""Verification distinguishes changes by a launch from those that other threads make meanwhile, and
does not undo theirs."""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tmm_core.verify import process_state

CPU = torch.device("cpu")


def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def among_others(change: Callable[[], Any]) -> Callable[[], None]:
    """A launch in whose first call another thread makes a change."""
    left = [change]

    def launch() -> None:
        if left:
            in_another_thread(left.pop())

    return launch


@pytest.mark.parametrize("run", [in_another_thread, lambda function: function()])
@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.manual_seed(3), lambda: torch.rand(5), random.random,
        lambda: os.environ.__setitem__("OF_THE_PROGRAM", "1"),
        lambda: warnings.simplefilter("ignore", ImportWarning),
    ],
)  # fmt: skip
def test_what_another_thread_changes_meanwhile_stays(
    change: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is verified while another thread draws random numbers."""
    monkeypatch.setenv("OF_THE_PROGRAM", "0")
    state = process_state.State(CPU)
    with warnings.catch_warnings():
        change()
        changed = process_state.State(CPU)
        state.restore(state.changed())
        assert run(lambda: process_state.watched(among_others(change), CPU))[1] == []
        assert changed.changed() == []


def test_a_setting_of_the_main_thread_stays() -> None:
    def change() -> None:
        torch.set_default_dtype(torch.float64)

    try:
        found = in_another_thread(lambda: process_state.watched(among_others(change), CPU))
        assert found == (None, [])
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("torch's default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("environment variables", lambda: os.environ.__setitem__("OF_THE_PROGRAM", "1")),
        ("the grad mode", lambda: torch.set_grad_enabled(not torch.is_grad_enabled())),
        ("torch's random generator", lambda: torch.rand(1)),
    ],
)
def test_what_a_launch_changes_beside_the_main_thread_is_named(
    name: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_PROGRAM", "0")
    before = process_state.State(CPU)
    assert in_another_thread(lambda: process_state.watched(change, CPU)[1]) == [name]
    # Numbers may not be drawn twice, whoever drew them.
    assert before.changed() == ([name] if "random generator" in name else [])


def test_random_numbers_are_not_drawn_twice_while_a_launch_is_watched() -> None:
    """Another thread draws all the time."""
    drawn: list[float] = []
    ended = threading.Event()

    def launches() -> list[list[str]]:
        try:
            return [process_state.watched(lambda: time.sleep(1e-3), CPU)[1] for _ in range(20)]
        finally:
            ended.set()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(launches)
        while not ended.is_set():
            drawn.append(float(torch.rand((), dtype=torch.float64)))
        assert found.result() == [[]] * 20
    assert len(set(drawn)) == len(drawn) > 100
