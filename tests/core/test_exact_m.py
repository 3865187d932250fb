"""An M that was never measured: where a call takes long, the best of the bucket race there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeBlas, FakeKernel, FakeTimer, dispatcher, installed, problem, settings
from tmm_cache import CacheStore

from tmm_core import dispatch
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.device import fingerprint
from tmm_core.spec.kernel import Candidate
from tmm_core.tuning.background import Background
from tmm_core.tuning.ranking import MOST_RACED
from tmm_core.tuning.tuner import Tuner

#: The bucket of 320, measured at 257 and 289: p is ahead everywhere, but not at 300, by little.
P, Q = ("p", 1), ("q", 1)
TIMES: dict[Any, float] = {P: 200.0, Q: 204.0, "r": 400.0, "blas": 220.0}


def times_at(m: int, **there: float) -> dict[Any, float]:
    return {**TIMES, **{(name, 1, m): us for name, us in there.items()}}


def kernels(**fields: Any) -> list[FakeKernel]:
    return [FakeBlas(), FakeKernel("p", **fields), FakeKernel("q"), FakeKernel("r")]


def tuned(root: Path, times: dict[Any, float], **fields: Any) -> tuple[Dispatcher, Any]:
    """A dispatcher whose bucket of 320 is on record, as in a new process."""
    before, _ = dispatcher(*kernels(), times=TIMES, root=root)
    before.choose(problem(m=320), settings())
    return dispatcher(*kernels(**fields), times=times, root=root)


def name(choice: Any) -> str:
    return str(choice.candidate.kernel.name)


@pytest.mark.parametrize(
    ("there", "best"),
    [
        ({}, "p"),
        ({"p": 230.0}, "q"),
        ({"p": 230.0, "q": 230.0}, "blas"),
        ({"r": 10.0}, "p"),  # too slow elsewhere to be asked
    ],
)
@pytest.mark.slow(quick=4)
def test_the_best_two_and_blas_race(tmp_path: Path, there: dict[str, float], best: str) -> None:
    d, timer = tuned(tmp_path, times_at(300, **there))
    choice = d.choose(problem(m=300), settings())
    assert name(choice) == best
    assert choice.lasting
    assert set(timer.measured) == {"p", "q", "blas"}
    record = d.record_of(problem(m=320))
    assert record is not None
    assert {c.kernel for c in record.candidates if 300 in c.inside_us} == {"p", "q", "blas"}
    assert record.best.kernel == "p"
    assert "M=300" in choice.reason or best == "p"
    # The record keeps it, for this process and for others.
    timer.measured.clear()
    assert name(d.choose(problem(m=300), settings())) == best
    other, timer = dispatcher(*kernels(), times={}, root=tmp_path)
    assert name(other.choose(problem(m=300), settings(on_cache_miss="error"))) == best
    assert not timer.measured
    # Its kernels were verified there.
    assert other.first_use.may_launch(problem(m=300), other.choose(problem(m=300), settings()))


def test_explain_shows_the_times_at_that_m(tmp_path: Path) -> None:
    from tmm_core.dispatch.explanation import explain_problem

    d, timer = tuned(tmp_path, times_at(300, p=230.0))
    text = explain_problem(d, problem(m=300), settings()).text(140)
    assert not timer.measured  # it never measures
    d.choose(problem(m=300), settings())
    text = " ".join(explain_problem(d, problem(m=300), settings()).text(140).split())
    assert "the best at M=300" in text
    assert "257, 289, 300, 320" in text


def test_a_kernel_that_is_wrong_there_does_not_win(tmp_path: Path) -> None:
    def spoil(out: Any) -> Any:
        return out + 1.0 if out.shape[-2] == 300 else out

    d, _ = tuned(tmp_path, times_at(300, q=210.0), spoil=spoil)
    assert name(d.choose(problem(m=300), settings())) == "q"
    record = d.record_of(problem(m=320))
    assert record is not None
    wrong = next(c for c in record.candidates if c.kernel == "p")
    assert wrong.status == "wrong"
    assert "M=300" in (wrong.reason or "")
    # The new winner was never verified at the bucket's edge.
    edge = d.choose(problem(m=320), settings())
    assert name(edge) == "q"
    assert not d.first_use.may_launch(problem(m=320), edge)


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"capturing": True}, {}),
        ({"deterministic": True}, {}),
        ({}, {"on_cache_miss": "heuristic"}),
        ({}, {"on_cache_miss": "error"}),
    ],
)
def test_where_nothing_is_measured(tmp_path: Path, fields: Any, mode: Any) -> None:
    d, timer = tuned(tmp_path, times_at(300, p=230.0))
    assert name(d.choose(problem(m=300, **fields), settings(**mode))) == "p"
    assert not timer.measured


@pytest.mark.parametrize(
    ("what", "times"),
    [
        ("short", {P: 99.0, Q: 99.5, "blas": 120.0, "r": 300.0}),
        ("clear", {P: 200.0, Q: 260.0, "blas": 260.0, "r": 300.0}),
        ("blas", {P: 260.0, Q: 260.0, "blas": 200.0, "r": 300.0}),
    ],
)
def test_no_race_where_it_is_not_worth_its_time(tmp_path: Path, what: str, times: Any) -> None:
    d, timer = dispatcher(*kernels(), times=times, root=tmp_path)
    d.choose(problem(m=320), settings())
    timer.measured.clear()
    d.choose(problem(m=300), settings())
    assert not timer.measured, what


def test_a_record_keeps_a_limited_number_of_races(tmp_path: Path) -> None:
    times = dict(TIMES)
    d, timer = tuned(tmp_path, times)
    for m in range(258, 258 + MOST_RACED + 8):
        d.choose(problem(m=m), settings())
    record = d.record_of(problem(m=320))
    assert record is not None
    raced = set(record.best.inside_us) - {257, 289}
    assert len(raced) == MOST_RACED
    timer.measured.clear()
    d.choose(problem(m=319), settings())
    assert not timer.measured


def test_the_record_of_a_layer_is_kept_with_its_times(tmp_path: Path) -> None:
    """The user's own cache gets it. Its candidates still count as never verified here."""
    tuned(tmp_path / "layer", TIMES)
    d, _ = dispatcher(*kernels(), times=times_at(300, p=230.0))
    d.store = store = CacheStore(tmp_path / "own", layers=[tmp_path / "layer"])
    d.first_use._store = store
    instance = problem(m=320)
    assert name(d.choose(problem(m=300), settings())) == "q"
    path = store.found(instance.device.gpu, instance.device.environment, instance.to_json())
    assert path is not None
    assert tmp_path / "own" in path.parents
    assert not d.first_use.may_launch(instance, d.choose(instance, settings()))


def test_a_race_that_fails_is_not_repeated(tmp_path: Path) -> None:
    d, _ = tuned(tmp_path, TIMES)
    calls: list[int] = []

    def failing(*_: Any) -> Any:
        calls.append(1)
        yield ()
        raise ValueError("broken")

    d.tuner.race_at = failing  # type: ignore[method-assign]
    mine = settings()
    with pytest.warns(Warning, match="racing failed: ValueError: broken"):
        assert name(d.choose(problem(m=300), mine)) == "p"
    assert name(d.choose(problem(m=300), mine)) == "p"
    assert len(calls) == 1


def test_a_kernel_that_is_wrong_in_a_race_counts_as_never_verified_there(tmp_path: Path) -> None:
    """The kernel is right at all sizes of the record, and wrong at the race's."""
    d, _ = dispatcher(*kernels(), times=TIMES, root=tmp_path)
    d.choose(problem(m=320), settings())
    p, q = FakeKernel("p"), FakeKernel("q", spoil=lambda y: y + float(y.shape[-2] == 300))
    d, _ = dispatcher(FakeBlas(), p, q, times=times_at(300, q=10.0), root=tmp_path)
    instance = problem(m=300)
    assert name(d.choose(instance, settings())) == "p"
    verified = [
        d.first_use.is_verified(instance, Candidate(kernel, kernel.default_config(instance)))
        for kernel in (p, q)
    ]
    assert verified == [True, False]


def test_in_the_background_it_is_raced_by_later_calls(tmp_path: Path) -> None:
    d, timer = tuned(tmp_path, times_at(300, p=230.0))
    now = [100.0]
    d.__dict__["background"] = Background(lambda asked: d._alone_on(asked.device), lambda: now[0])
    mine, instance = settings(on_cache_miss="background"), problem(m=300)
    choice, _ = d.bound(instance, mine)
    assert (name(choice), choice.lasting) == ("p", False)
    assert not timer.measured
    for _ in range(10_000):
        now[0] += 1.0
        choice, _ = d.bound(instance, mine)
        if choice.lasting:
            break
    assert name(choice) == "q"
    assert set(timer.measured) == {"p", "q", "blas"}
    # Two of one bucket, at a time.
    others = [problem(m=m) for m in (302, 304)]
    for _ in range(20_000):
        now[0] += 1.0
        ended = [d.bound(each, mine)[0].lasting for each in others]
        if all(ended):
            break
    record = d.record_of(bucketed(instance))
    assert record is not None
    assert {300, 302, 304} <= set(record.best.inside_us)


def test_the_benchmark_reports_the_cost_and_gain_of_a_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    fingerprint.cache_clear()
    import exact_m

    class Timer(FakeTimer):
        def release(self) -> None:
            pass

    # The kernel that is ahead at the edge and around is behind BLAS at M that were not measured.
    known = [("p", 1, m) for m in (257, 289, 320)]
    times = {"p": 230.0, "q": 201.0, "blas": 220.0, **dict.fromkeys(known, 200.0)}
    installed(FakeBlas(), FakeKernel("p"), FakeKernel("q"))
    dispatch.default_dispatcher().tuner = Tuner(FakeTimer(times))
    monkeypatch.setattr(exact_m.exhaustive, "timer_for", lambda device: Timer(times))
    rows = exact_m.main(["--device", "cpu", "-o", str(tmp_path / "out.json")], [(320, 8, 8, "")])
    fingerprint.cache_clear()
    assert len(rows) == exact_m.EACH
    for row in rows:
        assert row["raced"]
        assert (row["before"].split()[0], row["after"].split()[0]) == ("p", "q")
        assert (row["us"]["before"], row["us"]["after"], row["us"]["blas"]) == (230, 201, 220)
    out = capsys.readouterr().out
    assert "best / after: geometric mean 1.0000" in out
    assert "2 of 2 raced" in out
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == rows
