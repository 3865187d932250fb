"""Two threads launch at once: they overlap for certain, and neither waits for ever."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from typing import Any

import pytest
import torch
from fakes import FakeConfig, FakeKernel
from lying import LIES, Lie, half

from tmm_core.verify import two_threads
from tmm_core.verify.two_threads import Pace, Turns, launch_together
from tmm_core.verify.verifier import Verifier

CPU = torch.device("cpu")


def wrong(kernel: FakeKernel, pace: Pace, most: int = 4) -> int:
    """Results that are wrong, of the launches of two threads."""
    data = Verifier(half(), CPU)
    launches = launch_together(data, kernel.bind(half(), FakeConfig()), pace, most)
    assert launches is not None
    return sum(float(of.expected.error(r, data.at_once)) > 1e-2 for of, r in launches)


@pytest.mark.parametrize("name", sorted(LIES["A5"].keys() - {"weights that change for a while"}))
def test_state_that_launches_share_is_found_without_chance(name: str) -> None:
    """Also where Python hardly ever switches threads."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(10.0)
    try:
        for _ in range(10):
            assert wrong(LIES["A5"][name](), "lines")
    finally:
        sys.setswitchinterval(before)
    assert not wrong(Lie(), "lines")


class TwoBuffers(Lie):
    """It is wrong where two launches begin and end within another: two that alternate are right."""

    turn, buffers = 0, (torch.empty(64, 32), torch.empty(64, 32))

    def lie(self, right: Any, *given: Any) -> Any:
        self.turn = mine = self.turn + 1
        buffer = self.buffers[mine % 2]
        buffer.copy_(right(*given))
        result = torch.empty(64, 32, dtype=torch.float16)
        return result.copy_(buffer)


def test_a_weight_that_changes_for_a_while_is_found_by_who_shares_it() -> None:
    for _ in range(10):
        assert wrong(LIES["A5"]["weights that change for a while"](), "launches", 128)


def test_whole_launches_between_the_lines_of_another() -> None:
    assert not wrong(TwoBuffers(), "lines")
    assert wrong(TwoBuffers(), "launches", 128)
    assert not wrong(Lie(), "launches", 128)


@pytest.mark.parametrize("most", [1, 3])
def test_launches_between_lines_are_limited(most: int) -> None:
    made = []

    class Counted(Lie):
        def lie(self, right: Any, *given: Any) -> Any:
            made.append(threading.get_ident())
            return right(*given)

    assert not wrong(Counted(), "launches", most)
    assert sorted(made.count(thread) for thread in set(made)) == sorted([2, most])


@pytest.mark.parametrize("pace", ["lines", "launches", "free"])
def test_a_kernel_with_a_lock_does_not_wait_for_ever(pace: Pace) -> None:
    """Within the lock, one thread cannot get the turn from the other, which waits for the lock."""
    lock, inside = threading.Lock(), []

    class Locked(Lie):
        def lie(self, right: Any, *given: Any) -> Any:
            with lock:
                inside.append(0)
                assert inside == [0]
                for _ in range(20):
                    given[0].sum()
                inside.clear()
                return right(*given)

    began = time.monotonic()
    assert not wrong(Locked(), pace)
    assert time.monotonic() - began < 20


def test_a_launch_that_raises_ends_both_threads() -> None:
    class Raises(Lie):
        def lie(self, right: Any, *given: Any) -> Any:
            raise SystemExit(3)

    for pace in ("lines", "launches", "free"):
        with pytest.raises(SystemExit):
            wrong(Raises(), pace)  # type: ignore[arg-type]
    assert not [t for t in threading.enumerate() if t.name == "tmm-verify"]


def test_turns_alternate_and_a_thread_that_is_away_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(two_threads, "_WAIT", 5.0)
    turns, passed = Turns(), []

    def run(thread: int) -> None:
        for _ in range(5):
            turns.pass_on(thread)
            passed.append(thread)
        turns.leave(thread)

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    assert all(one != other for one, other in itertools.pairwise(passed[:8]))
    assert turns.over

    monkeypatch.setattr(two_threads, "_WAIT", 0.001)
    alone = Turns()
    began = time.monotonic()
    for _ in range(1000):  # the first waits in vain
        alone.pass_on(0)
    assert time.monotonic() - began < 5


def test_turns_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a number of lines, and after a time."""
    monkeypatch.setattr(two_threads, "_WAITS", 0)
    with monkeypatch.context() as m:
        m.setattr(two_threads, "_MOST_LINES", 3)
        turns = Turns()
    for over in (False, False, True):
        turns.pass_on(0)
        assert turns.over is over
    assert not Turns().over
    for limit in ("_TURNS_SECONDS", "_TURNS_CPU"):
        with monkeypatch.context() as m:
            m.setattr(two_threads, limit, -1.0)
            assert Turns().over


@pytest.mark.parametrize("most", [1, 2, 3])
def test_turns_end_after_so_many_waits_in_vain(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(two_threads, "_WAITS", 0)
    monkeypatch.setattr(two_threads, "_MOST_VAIN", most)
    turns = Turns()
    for count in range(1, most + 1):
        assert not turns.over
        turns.pass_on(count % 2)
    assert turns.over


def test_a_tracer_of_the_thread_is_put_back() -> None:
    """One that a debugger set."""
    tracer = lambda *_: None  # noqa: E731
    found = []

    def run() -> None:
        sys.settrace(tracer)
        with Turns().after_each_line(0):
            pass
        found.append(sys.gettrace())
        sys.settrace(None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [tracer]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_machine_without_threads_is_distinguished_from_other_faults(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without threads this part of the verification is left out; lack of memory leaves all of it
    undecided."""
    start, started = two_threads.Launches.start, []

    def starting(thread: Any) -> None:
        if started:
            raise error
        started.append(thread)
        start(thread)

    monkeypatch.setattr(two_threads.Launches, "start", starting)
    launcher = FakeKernel("k").bind(half(), FakeConfig())
    if isinstance(error, RuntimeError):
        assert launch_together(Verifier(half(), CPU), launcher, "lines", 4) is None
    else:
        with pytest.raises(MemoryError):
            launch_together(Verifier(half(), CPU), launcher, "lines", 4)
    assert not started[0].is_alive()
