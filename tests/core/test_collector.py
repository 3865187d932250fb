"""The cyclic garbage collector during and after a capture."""

from __future__ import annotations

import gc
import os
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tmm_core.launch import warm
from tmm_core.launch.collector import collector_off, garbage_kept


class Node:
    def __init__(self) -> None:
        self.own = self


def churn() -> list[Any]:
    """Allocate more than any threshold of the young generations."""
    return [[] for _ in range(50 * max(gc.get_threshold()[0], 100))]


@pytest.fixture(autouse=True)
def collected() -> None:
    gc.unfreeze()  # another test's preload() froze what there was
    gc.collect()


@pytest.mark.slow
def test_garbage_from_before_outlives_a_first_call() -> None:
    garbage = weakref.ref(Node())
    with garbage_kept():
        assert not gc.isenabled()
        kept = churn()
    assert gc.isenabled()
    kept += churn()
    assert garbage() is not None
    gc.collect()
    assert garbage() is None


def test_without_a_cycle_the_same_tensors_are_freed() -> None:
    garbage = weakref.ref(Node())
    kept = churn()
    assert garbage() is None
    del kept


def test_another_threads_block_that_ends_leaves_the_collector_off() -> None:
    """A background thread imports while this one captures, in each order."""
    first, second = collector_off(), garbage_kept()
    with first:
        second.__enter__()
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_off(), collector_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks")
def test_a_child_does_not_wait_for_blocks_of_the_parents_threads() -> None:
    with collector_off():
        child = os.fork()
        if not child:
            with collector_off():
                pass
            os._exit(not gc.isenabled())
    assert os.waitpid(child, 0)[1] == 0


def test_objects_that_others_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with garbage_kept():
            pass
        assert gc.get_freeze_count() > count // 2  # a thread of another test may free some
    finally:
        gc.unfreeze()


def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with garbage_kept():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("capturing", [True, False])
@pytest.mark.parametrize("cuda", [True, False])
def test_a_plan_that_is_made_during_a_capture_keeps_garbage(
    cuda: bool, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    collects: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(warm, "_built", lambda *_: collects.append(gc.isenabled()))
    call: Any = SimpleNamespace(a=SimpleNamespace(is_cuda=cuda))
    warm._build((), call, lambda *_: (call, None))
    assert collects == [not (cuda and capturing)]
