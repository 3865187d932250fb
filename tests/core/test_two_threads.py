"""Two threads launch at once: they overlap for certain, and neither waits for ever."""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
import time
from types import SimpleNamespace
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
    """Here Python hardly ever switches threads."""
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


def test_a_thread_that_shares_a_weight_detects_its_temporary_change() -> None:
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

    paces: tuple[Pace, ...] = ("lines", "launches", "free")
    for pace in paces:
        data = Verifier(half(), CPU)
        with pytest.raises(SystemExit) as raised:
            launch_together(data, Raises().bind(half(), FakeConfig()), pace, 4)
        assert data.raised is raised.value  # else verification would count it as its own
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
    for _ in range(two_threads._MOST_UNSUCCESSFUL):  # the first waits in vain
        alone.pass_on(0)
    assert not alone.over
    for _ in range(1000):
        alone.pass_on(0)
    assert time.monotonic() - began < 5


def test_turns_end_after_some_lines_or_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_turns_do_not_end_because_another_thread_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CPU time ended them, and no launches overlapped."""
    monkeypatch.setattr(two_threads, "_TURNS_CPU", 0.05)
    turns = Turns()
    assert not turns.over

    def work() -> None:
        while time.thread_time() < 0.1:
            pass

    other = threading.Thread(target=work)
    other.start()
    other.join()
    assert not turns.over


@pytest.mark.parametrize("most", [1, 2, 3])
def test_turns_end_after_some_unsuccessful_waits(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(two_threads, "_WAITS", 0)
    monkeypatch.setattr(two_threads, "_MOST_UNSUCCESSFUL", most)
    turns = Turns()
    for count in range(1, most + 1):
        assert not turns.over
        turns.pass_on(count % 2)
    assert turns.over


def test_a_turn_is_passed_on_after_each_line() -> None:
    """A kernel that keeps its operands between two lines, and calls nothing, is found so."""
    turns, passed = Turns(), list[int]()
    turns.pass_on = passed.append  # type: ignore[method-assign]

    found = []

    def run() -> None:
        with turns.after_each_line(0):
            lines()

    def lines() -> None:
        before = len(passed)
        between = len(passed) - before
        found.append(between)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [1]


def test_a_tracer_of_the_thread_is_put_back() -> None:
    """A debugger sets such a tracer."""
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
    """A machine without threads skips this part of verification; lack of memory leaves all of it
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
        assert launch_together(Verifier(half(), CPU), launcher, "lines", 4) == []
    else:
        with pytest.raises(MemoryError):
            launch_together(Verifier(half(), CPU), launcher, "lines", 4)
    assert not started[0].is_alive()


@pytest.mark.parametrize("pace", ["lines", "launches", "free"])
def test_threads_on_a_gpu_have_a_stream_each_and_begin_together(
    pace: Pace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both streams wait for the current one, and it for free launches' common start. The results
    are compared when the GPU is done."""
    gpu: Any = SimpleNamespace(type="cuda")
    data = Verifier(half(), CPU)
    data.sets()
    data.device = gpu
    begun: list[Any] = []
    used: set[tuple[str, int]] = set()
    streams = [
        SimpleNamespace(wait_stream=lambda other, n=n: begun.append((n, other))) for n in (0, 1)
    ]

    def using(stream: Any) -> Any:
        used.add((threading.current_thread().name, streams.index(stream)))
        return contextlib.nullcontext()

    devices: list[Any] = []
    monkeypatch.setattr(two_threads, "_streams", lambda device: streams)
    monkeypatch.setattr(two_threads.compat, "gpu_sleep", lambda cycles: begun.append("sleep"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.cuda, "stream", using)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: begun.append("done"))
    launcher = FakeKernel("k").bind(half(), FakeConfig())
    assert launch_together(data, launcher, pace, 1)
    waits = [(0, "current"), (1, "current"), "done"]
    assert begun == (["sleep", *waits] if pace == "free" else waits)
    assert devices == [gpu, gpu]
    assert used == {("tmm-verify", 0), ("tmm-verify", 1)}


@pytest.mark.parametrize(
    ("most", "share", "into", "kept"),
    [(1, 64, False, 1), (5, 1 << 40, False, 5), (5, 64 * 3, False, 3), (5, 1, False, 1),
     (5, 1 << 40, True, 1)],
)  # fmt: skip
def test_the_number_of_results_kept_for_each_thread(
    most: int, share: int, into: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last launches' results may take a sixty-fourth of the memory limit; an output holds the
    last one alone."""
    for name in ("TOGETHER_SECONDS", "LONGEST_TOGETHER"):
        monkeypatch.setattr(two_threads, name, 1e9)
    data = Verifier(half(), CPU)
    data.sets()
    data.limit = share * data.problem.empty_out("meta").untyped_storage().nbytes()
    launcher = FakeKernel("k").bind(half(), FakeConfig())
    found = launch_together(data, launcher, "free", most, into)
    assert found is not None
    for of in data.sets():
        results = [result for each, result in found if each is of]
        assert len(results) == kept
        for result in results:
            assert float(of.expected.error(result, data.at_once)) < 1e-2
    assert len({result.data_ptr() for _, result in found}) == 2 * kept


@pytest.mark.parametrize(
    ("most", "seconds", "made"),
    [(4, 0.0, 4), (4, 0.003, 3), (4, 1.0, 2), (1, 0.0, 1), (1, 1.0, 1)],
)
def test_free_launches_of_a_thread_that_is_alone(
    most: int, seconds: float, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least two, and no more after 6 ms."""
    now = [0.0]

    def launch(*_: Any, **__: Any) -> torch.Tensor:
        now[0] += seconds
        return torch.empty(0)

    data = Verifier(half(), CPU)
    thread = two_threads.Launches(data, launch, 0, {0}, "free", Turns(), most, 10, False)
    monkeypatch.setattr(two_threads.time, "monotonic", lambda: now[0])
    thread._free()
    assert len(thread.results) == made


@pytest.mark.parametrize(("seconds", "made"), [(0.0, 7), (0.15, 2), (0.05, 5), (0.25, 2)])
def test_free_launches_go_on_while_the_other_thread_launches(
    seconds: float, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number stays below twice the wanted one, and no launch follows after 0.2 s."""
    now = [0.0]

    def launch(*_: Any, **__: Any) -> torch.Tensor:
        now[0] += seconds
        return torch.empty(0)

    busy = {0, 1}
    thread = two_threads.Launches(
        Verifier(half(), CPU), launch, 0, busy, "free", Turns(), 4, 10, False
    )
    monkeypatch.setattr(two_threads.time, "monotonic", lambda: now[0])
    thread._free()
    assert len(thread.results) == made
    assert busy == {1}


def test_a_signal_while_threads_are_started_is_the_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A handler may raise what torch raises where no thread can be started."""

    def expired(*_: Any) -> None:
        raise RuntimeError("the program's time limit")

    before = signal.signal(signal.SIGUSR1, expired)
    monkeypatch.setattr(
        two_threads.Launches, "start", lambda thread: signal.raise_signal(signal.SIGUSR1)
    )
    launcher = FakeKernel("k").bind(half(), FakeConfig())
    try:
        with pytest.raises(RuntimeError, match="the program's time limit"):
            launch_together(Verifier(half(), CPU), launcher, "free", 4)
    finally:
        signal.signal(signal.SIGUSR1, before)
