"""Tuning among ranks in one process: the entries of the other ranks are already in the store."""

from __future__ import annotations

import json
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fakes import DEVICE, problem
from tmm_cache import CandidateResult, TuningRecord

from tmm_core import Candidate, Epilogue, settings
from tmm_core.dispatch.measuring import LOCK_PATIENCE
from tmm_core.errors import SettingsError, TmmWarning
from tmm_core.tools import ranks
from tmm_core.tuning.compile_pool import COMPILE_LIMIT

Board = ranks._Board
FIRST, SECOND = problem(m=16), problem(m=32)
RECORD = TuningRecord(
    problem=FIRST.to_json(),
    winner=0,
    candidates=(CandidateResult("blas", "1", {}, "ok", (2.0,)),),
    created="2026-01-31T12:00:00Z",
    tuning_seconds=1.0,
)


class Clock:
    """A clock that only sleeps advance. Each sleep is recorded, and runs the next of ``events``."""

    def __init__(self, *events: Callable[[], object], step: float = 1.0) -> None:
        self.now, self.events, self.step = 0.0, list(events), step
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        assert len(self.slept) < 20, "the ranks wait without end"
        self.now += self.step
        if self.events:
            self.events.pop(0)()


def store() -> dist.Store:
    """An empty store that waits only briefly for an absent key."""
    empty = dist.HashStore()
    empty.set_timeout(timedelta(milliseconds=100))
    return empty


def board(timeout: float = 1.5, me: int = 0, **documents: Any) -> Board:
    """A board of ranks 0 and 1 with these documents, whose names have ``_`` for ``/``."""
    result = Board(store(), [0, 1], me, timeout)
    for name, document in documents.items():
        result.put(name.replace("_", "/"), document)
    return result


@contextmanager
def warned(*texts: str) -> Iterator[None]:
    """Expect one warning per text, in this order, each containing its text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [caught[i].category for i in range(len(caught))] == [TmmWarning] * len(texts)
    for each, text in zip(caught, texts, strict=True):
        assert text in str(each.message)


def dispatch_to(monkeypatch: pytest.MonkeyPatch, dispatcher: Any) -> None:
    """Make this dispatcher the default of the tested module alone."""
    monkeypatch.setattr(ranks, "dispatch", SimpleNamespace(default_dispatcher=lambda: dispatcher))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ranks, "time", clock)
    return clock


# -- the board -----------------------------------------------------------------------------


def test_a_rank_that_has_put_all_keys_is_not_waited_for(clock: Clock) -> None:
    mine = board(a=1, b=2, c=3)
    assert mine.await_all({0: ["a"], 1: ["b", "c"], 2: []}) == []
    assert clock.slept == []


def test_a_rank_is_lost_once_it_adds_nothing_for_the_timeout(clock: Clock) -> None:
    mine = board(a=1)
    assert mine.await_all({0: ["a"], 1: ["a", "x"], 2: ["y"]}) == [1, 2]
    assert clock.now == 2.0
    assert clock.slept == [ranks.PAUSE * 2] * 2


def test_a_rank_that_adds_a_key_now_and_then_is_waited_for(clock: Clock) -> None:
    mine = board()
    clock.events = [lambda key=key: mine.put(key, 1) for key in "abc"]  # type: ignore[misc]
    assert mine.await_all({1: ["a", "b", "c"]}) == []
    assert clock.now == 3.0


def test_a_rank_that_works_keeps_the_others_from_being_lost(clock: Clock) -> None:
    mine = board()
    clock.events = [lambda: mine.put("a", 1), lambda: mine.put("b", 1), lambda: mine.put("x", 1)]
    assert mine.await_all({1: ["a", "b", "c"], 2: ["x"]}) == [1]


def test_a_rank_whose_call_raised_is_lost_at_once(clock: Clock) -> None:
    mine = board(failed_1="E: no")
    assert mine.await_all({1: ["a"]}) == [1]
    assert clock.slept == []
    mine.put("a", 1)
    assert mine.await_all({1: ["a"]}) == []
    clock.events = [lambda: mine.put("b", 1)]
    assert mine.await_all({0: ["b"], 1: ["x"]}) == [1]


def test_a_board_without_this_rank_is_left_if_others_tuned_something_else() -> None:
    given_up: dict[str, Any] = {"lost": [0], "ended": []}
    assert board(asked_1="P", verdict_0=given_up).missed("Q")
    assert not board(asked_1="P", verdict_0=given_up).missed("P")  # it adopts their records
    assert not board(asked_1="P", verdict_0={"lost": [1], "ended": []}).missed("Q")
    assert not board(asked_1="P").missed("Q")


def test_waiting_ends_once_there_is_a_verdict(clock: Clock) -> None:
    mine = board()
    clock.events = [lambda: mine.put("verdict/0", 1)]
    assert mine.await_all({1: ["x"]}, until="verdict/0") == [1]
    assert clock.now == 1.0
    clock.events = [lambda: mine.put("x", 1)]
    assert mine.await_all({1: ["x"]}, until="verdict/1") == []


def test_the_first_proposal_counts() -> None:
    mine = board()
    assert mine.agree("verdict/0", [1]) == [1]
    assert mine.agree("verdict/0", [2]) == [1]
    assert mine.get("verdict/0") == [1]
    assert mine.has("verdict/0")
    assert not mine.has("verdict/1")


def test_the_error_of_ranks_that_tune_different_problems_names_the_difference() -> None:
    digest = ranks._digest([FIRST])
    mine = board(asked_0=digest, asked_1=digest, left_1={"problems": "other"})
    assert mine.await_all({1: ["asked/1", "left/1"]}) == []
    for theirs, unlike in (
        (ranks._digest([FIRST, SECOND]), "problems"),
        (digest | {"devices": []}, "devices"),
        ({"problems": "", "devices": []}, "problems, devices"),
    ):
        mine = board(asked_0=digest, asked_1=theirs)
        message = f"ranks 0 and 1 tune different things: they differ in {unlike}$"
        with pytest.raises(ValueError, match=message):
            mine.await_all({1: ["asked/1"]})


def test_a_digest_covers_problems_their_order_and_their_devices() -> None:
    other = problem(m=16, device=DEVICE)
    assert ranks._digest([FIRST]) == ranks._digest([problem(m=16)])
    assert ranks._digest([FIRST, SECOND])["problems"] != ranks._digest([SECOND, FIRST])["problems"]
    assert len(ranks._digest([FIRST, SECOND, other])["devices"]) == 1
    assert ranks._digest([FIRST, SECOND])["problems"].startswith("2 ")


def test_each_tuning_of_a_group_has_an_empty_board(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = store()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: everything)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 3 if group is None else group)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [1, 3])
    group: Any = 1
    first = Board.of(group)
    assert (first.ranks, first.me) == ([1, 3], 3)
    first.put("asked/3", "mine")
    assert not Board.of(group).has("asked/3")
    assert first.has("asked/3")
    outside: Any = -1
    with pytest.raises(ValueError, match="rank 3 is not in the group that tunes"):
        Board.of(outside)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    with pytest.raises(ValueError, match="rank 3 is not in the group that tunes"):
        Board.of(group)


# -- measuring -----------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[int]:
    """The M of each problem that this rank measured; no measurement fails."""
    done: list[int] = []

    def measure(problem: Any, current: object, force: bool) -> dict[str, Any]:
        done.append(problem.m)
        return {"record": problem.m}

    monkeypatch.setattr(ranks, "_measure", measure)
    return done


def measure_all(mine: Board, *problems: Any) -> tuple[dict[int, str], set[int]]:
    return ranks._measure_all(mine, problems or (FIRST, SECOND), settings.current(), False)


def test_each_rank_measures_its_share(measured: list[int]) -> None:
    mine = board(asked_0=1, asked_1=1, result_0_1={"record": 32})
    with warned():
        found, lost = measure_all(mine)
    assert (found, lost) == ({0: "result/0/0", 1: "result/0/1"}, set())
    assert measured == [16]
    assert not mine.has("verdict/1")
    assert mine.get("verdict/0") == {"lost": [], "ended": [[0, None], [1, None]]}


@pytest.mark.parametrize(
    ("failure", "fate"),
    [
        ({}, "showed no sign of life for 1.5 s"),
        ({"failed_1": "E: no"}, "ended its tuning with E: no"),
    ],
)
def test_the_problems_of_a_lost_rank_are_measured_by_the_others(
    measured: list[int], failure: dict[str, Any], fate: str
) -> None:
    mine = board(asked_0=1, **failure)
    with warned(f"rank 1 {fate}; the other ranks measured its problems"):
        found, lost = measure_all(mine)
    assert (found, lost) == ({0: "result/0/0", 1: "result/1/1"}, {1})
    assert measured == [16, 32]


def test_a_verdict_of_another_rank_ends_the_wait(measured: list[int], clock: Clock) -> None:
    mine = board(asked_0=1)
    clock.events = [lambda: mine.put("verdict/0", {"lost": [1], "ended": [[0, None]]})]
    with warned("rank 1 showed no sign of life"):
        assert measure_all(mine)[1] == {1}
    assert measured == [16, 32]
    assert clock.now == 1.0


@pytest.mark.parametrize("again", [{"error": "again"}, {"record": 16}])
def test_a_problem_that_failed_is_measured_once_more_by_another(
    measured: list[int], monkeypatch: pytest.MonkeyPatch, again: dict[str, Any]
) -> None:
    monkeypatch.setattr(ranks, "_measure", lambda *_: {"error": "no memory"})
    mine = board(asked_0=1, asked_1=1, result_1_0=again)
    expected = [f"{FIRST} could not be tuned: again; ranks may choose"] if "error" in again else []
    with warned(*expected):
        found, lost = measure_all(mine, FIRST)
    assert (found, lost) == ({} if expected else {0: "result/1/0"}, set())
    assert not mine.has("verdict/2")


def test_the_last_rank_measures_its_own_failure_again(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [{"error": "no memory"}, {"record": 16}]
    monkeypatch.setattr(ranks, "_measure", lambda *_: answers.pop(0))
    with warned("rank 1 showed no sign of life"):
        assert measure_all(board(asked_0=1), FIRST) == ({0: "result/1/0"}, {1})
    assert answers == []


def test_a_rank_that_was_given_up_measures_nothing(measured: list[int]) -> None:
    ended = [[0, None], [1, None]]
    mine = board(asked_0=1, asked_1=1, verdict_0={"lost": [0], "ended": ended})
    with warned("rank 0 showed no sign of life"):
        assert measure_all(mine)[1] == {0}
    assert measured == []


def test_a_problem_whose_ranks_were_all_lost_is_named(measured: list[int]) -> None:
    mine = board(asked_0=1, verdict_0={"lost": [0, 1], "ended": []})
    message = f"{FIRST} could not be tuned: each rank that tried was lost; "
    with warned("rank 0, 1 showed no sign of life", message):
        assert measure_all(mine, FIRST) == ({}, {0, 1})


def test_a_measurement_is_a_record_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def tune(problem: Any, current: Any, force: bool) -> Any:
        given.append((problem, current, force))
        if force:
            raise RuntimeError("no memory")
        return RECORD

    dispatch_to(monkeypatch, SimpleNamespace(tune=tune))
    current = settings.current()
    assert ranks._measure(FIRST, current, False) == {"record": RECORD.to_json()}
    assert "no memory" in ranks._measure(FIRST, current, True)["error"]
    assert given == [(FIRST, current, False), (FIRST, current, True)]


def test_an_exception_of_a_signal_handler_is_not_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def alarm(number: int, frame: object) -> None:
        raise TimeoutError("alarm")

    def tune(*_: Any, **__: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)

    dispatch_to(monkeypatch, SimpleNamespace(tune=tune))
    before = signal.signal(signal.SIGUSR1, alarm)
    try:
        with pytest.raises(TimeoutError, match="alarm"):
            ranks._measure(FIRST, settings.current(), False)
    finally:
        signal.signal(signal.SIGUSR1, before)


# -- comparing -----------------------------------------------------------------------------


def compare(monkeypatch: pytest.MonkeyPatch, theirs: Any, gpu: str | None = None) -> Board:
    """Compare the choices of ranks 0 and 1 for two problems."""
    config = SimpleNamespace(to_json=lambda: {"x": 1})
    kernel = SimpleNamespace(name="k", version="1")
    choice = SimpleNamespace(candidate=Candidate(kernel, config))  # type: ignore[arg-type]
    modes: list[str] = []

    def choose(problem: Any, current: Any) -> Any:
        modes.append(current.on_cache_miss)
        return choice

    chooser = SimpleNamespace(
        choose=choose, registry=SimpleNamespace(kernels=lambda: [kernel, kernel])
    )
    dispatch_to(monkeypatch, chooser)
    monkeypatch.setattr(ranks, "_gpu", lambda problems: gpu)
    mine = board(left_1=True) if theirs is None else board(chose_1=theirs, left_1=True)
    ranks._compare(mine, [FIRST, SECOND], set())
    assert modes == ["heuristic"] * 2
    return mine


SAME: dict[str, Any] = {
    "kernels": ["k 1", "k 1"],
    "choices": [["k", "1", {"x": 1}]] * 2,
    "gpu": None,
}


@pytest.mark.parametrize(
    ("changes", "gpu", "message"),
    [
        ({}, None, None),
        ({"gpu": "other"}, "mine", None),
        ({"gpu": "mine"}, "mine", "ranks 0 and 1 measured on the same GPU"),
        ({"kernels": ["k 1", "k 2"]}, None, "ranks 0 and 1 have different kernels: k 2"),
        ({"kernels": ["j 1", "k 1"], "choices": []}, None, "different kernels: j 1"),
        (
            {"choices": [["k", "1", {"x": 1}], ["k", "1", {"x": 2}]]},
            None,
            f"ranks 0 and 1 choose differently for {SECOND}",
        ),
    ],
)
def test_a_warning_says_how_ranks_differ(
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    changes: dict[str, Any],
    gpu: str | None,
    message: str | None,
) -> None:
    with warned(*([message] if message else [])):
        mine = compare(monkeypatch, SAME | changes, gpu)
    assert mine.get("chose/0") == SAME | {"gpu": gpu}
    assert mine.get("left/0") is True
    assert clock.slept == []


def test_a_rank_that_does_not_report_is_named_and_not_waited_for_again(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    with warned("rank 1 did not report its choices: it showed no sign of life for 1.5 s"):
        compare(monkeypatch, None)
    assert clock.now == 2.0


@pytest.mark.parametrize(("me", "waits"), [(0, 2.0), (1, 0.0)])
def test_the_first_rank_leaves_last(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, me: int, waits: float
) -> None:
    """The first rank's process may host the store."""
    chooser = SimpleNamespace(registry=SimpleNamespace(kernels=list))
    dispatch_to(monkeypatch, chooser)
    other: Any = {"kernels": [], "choices": [], "gpu": None}
    mine = Board(store(), [0, 1, 2], me, 1.5)
    mine.put(f"chose/{1 - me}", other)
    with warned():
        ranks._compare(mine, [], {2})  # rank 2 was lost before
    assert mine.has(f"left/{me}")
    assert clock.now == waits


def test_only_problems_on_a_gpu_have_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu {index}")
    )
    here: Any = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    cpu: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    assert ranks._gpu([cpu, here]) == "gpu 2"
    assert ranks._gpu([cpu]) is None
    assert ranks._gpu([]) is None


# -- all of it -----------------------------------------------------------------------------


def test_without_a_group_a_process_tunes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def alone(problems: list[Any], **more: Any) -> list[TuningRecord]:
        given.append((problems, more))
        return [RECORD]

    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(ranks.api, "tune", alone)
    assert ranks.tune(FIRST, force=True, budget=3.0) == [RECORD]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "fake")
    assert ranks.tune(iter([FIRST, SECOND])) == [RECORD]
    assert given == [
        ([FIRST], {"force": True, "budget": 3.0}),
        ([FIRST, SECOND], {"force": False, "budget": None}),
    ]


@pytest.mark.parametrize(
    ("given", "timeout"),
    [
        ({"budget": 3.0}, LOCK_PATIENCE * 3.0 + COMPILE_LIMIT),
        ({"timeout": 9.0}, 9.0),
        ({"budget": 3.0, "timeout": 0.5}, 0.5),
        ({}, LOCK_PATIENCE * settings.Settings().tune_budget + COMPILE_LIMIT),
    ],
)
def test_every_rank_adopts_each_record(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], timeout: float
) -> None:
    mine = board(result_0_1={"record": json.loads(json.dumps(RECORD.to_json()))})
    adopted: list[Any] = []
    compared: list[Any] = []
    budgets: list[float] = []

    def measure_all(
        board: Board, problems: list[Any], current: settings.Settings, force: bool
    ) -> tuple[dict[int, str], set[int]]:
        budgets.append(current.tune_budget)
        assert mine.get("asked/0") == ranks._digest(problems)
        return {1: "result/0/1"}, {1}

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(Board, "of", lambda group: mine)
    monkeypatch.setattr(ranks, "_measure_all", measure_all)
    monkeypatch.setattr(ranks, "_compare", lambda *given: compared.append(given))
    dispatch_to(monkeypatch, SimpleNamespace(adopt=lambda *given: adopted.append(given)))
    # A plan made from an earlier record would answer further calls.
    monkeypatch.setattr(ranks.warm, "forget_plans", lambda: adopted.append("plans forgotten"))
    assert ranks.tune([SECOND, FIRST], **given) == [RECORD]
    assert adopted == [(FIRST, RECORD), "plans forgotten"]
    assert compared == [(replace(mine, timeout=timeout), [SECOND, FIRST], {1})]
    assert not mine.has("failed/0")
    assert budgets == [given.get("budget", settings.Settings().tune_budget)]


def test_a_problem_that_only_this_rank_knows_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 2.0
    own = problem(epilogue=Epilogue("mine", lambda z: z * factor))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(Board, "of", lambda group: board())
    monkeypatch.setattr(ranks, "_tune", lambda mine, problems, *_: problems)
    with warned("is not tuned: only this rank knows its epilogue"):
        left: list[Any] = ranks.tune([FIRST, own, SECOND, own], timeout=1.5)
    assert left == [FIRST, SECOND]


def failing() -> Iterator[Any]:
    yield FIRST
    raise KeyboardInterrupt


@pytest.mark.parametrize("given", [{"problems": failing()}, {"problems": FIRST, "budget": -1.0}])
def test_a_call_that_raises_counts_and_the_other_ranks_get_the_reason(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    taken: list[Board] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(Board, "of", lambda group: taken.append(board()) or taken[-1])
    with pytest.raises((KeyboardInterrupt, SettingsError)) as raised:
        ranks.tune(**given)
    (mine,) = taken
    assert mine.get("failed/0").startswith(raised.type.__name__)


def test_a_rank_that_missed_tunings_joins_the_others_again(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: dict[str, Any] = {"lost": [0], "ended": []}
    boards = [board(asked_1="P", verdict_0=given_up), board(asked_1="Q", verdict_0=given_up)]
    left = iter([*boards, last := board()])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(Board, "of", lambda group: next(left))
    monkeypatch.setattr(ranks, "_tune", lambda mine, *_: [mine])
    assert ranks.tune(FIRST, timeout=1.5) == [last]
    assert [each.has("asked/0") for each in (*boards, last)] == [False, False, True]
