"""``on_cache_miss="background"``: the first call answers at once, and later ones tune."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeKernel, FakeTimer, dispatcher, installed, problem, settings

import tmm_core
from tmm_core import dispatch
from tmm_core.dispatch import lookup
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.launch import warm
from tmm_core.settings import Settings, nested
from tmm_core.spec.device import fingerprint
from tmm_core.tuning import background
from tmm_core.tuning.background import SLICE, Background
from tmm_core.tuning.tuner import Tuner
from tmm_core.verify import verifier

FAST = {"fast": 10.0, "blas": 20.0}
STEP = 0.004


class Clock:
    """Seconds that pass when a test or a timer says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow(FakeTimer):
    """A fake timer that takes a step of time for each sample, and knows who is asking."""

    def __init__(self, times: dict[Any, float], clock: Clock) -> None:
        super().__init__(times)
        self.clock, self.rests, self.samples, self.step = clock, 0, 0, STEP
        self.collectors: set[bool] = set()

    def measure_steps(self, runs: Any, rounds: int, **chain: Any) -> Any:
        for _ in range(rounds * len(runs)):
            self.clock.now += self.step
            self.samples += 1
            self.collectors.add(gc.isenabled())
            self.rests += bool((yield ()))
        return super().measure(runs, rounds, **chain)


def background_settings(**fields: Any) -> Settings:
    return settings(on_cache_miss="background", **fields)


#: One object: settings are compared by identity.
BACKGROUND = background_settings()


def made(
    *kernels: Any, times: Any = None, root: Any = None, **options: Any
) -> tuple[Dispatcher, Slow, Clock]:
    """A dispatcher over BLAS and these kernels whose background has a fake clock."""
    d, _ = dispatcher(FakeBlas(), *kernels, root=root)
    clock = Clock()
    timer = Slow(FAST if times is None else times, clock)
    d.tuner = Tuner(timer, **options)
    d.__dict__["background"] = Background(lambda key: d._alone_on(key.device), clock)
    return d, timer, clock


def settle(d: Dispatcher) -> None:
    """Let threads that bind kernels end, as real time passes between calls."""
    for task in [*d.background._tasks.values()]:
        wait(task.pending or (), 20)


def until_done(d: Dispatcher, clock: Clock, instance: Any, most: int = 3000) -> int:
    """The calls, 10 ms apart, until ``instance`` has a choice for good."""
    for count in range(most):
        choice, _ = d.bound(instance, BACKGROUND)
        if choice.lasting:
            return count
        clock.now += 0.01
        settle(d)
    raise AssertionError("it never ends")


def test_the_first_call_answers_at_once_and_later_ones_tune(tmp_path: Path) -> None:
    d, timer, clock = made(FakeKernel("fast"), root=tmp_path)
    choice, launcher = d.bound(problem(), BACKGROUND)
    assert (choice.candidate.kernel.name, choice.origin) == ("blas", "fallback")
    assert not choice.lasting
    assert "later calls tune it" in choice.reason
    assert not timer.samples
    # Without a record, a call of any other problem goes on with it, too.
    clock.now += 0.01
    d.bound(problem(n=48), BACKGROUND)
    again, same = d.bound(problem(), BACKGROUND)
    assert again == choice
    assert same is launcher  # chosen once
    until_done(d, clock, problem())
    choice, _ = d.bound(problem(), BACKGROUND)
    assert (choice.candidate.kernel.name, choice.origin) == ("fast", "cache")
    until_done(d, clock, problem(n=48))
    assert not d.background
    # Another process finds the records.
    other, _ = dispatcher(FakeBlas(), FakeKernel("fast"), root=tmp_path)
    for n in (32, 48):
        assert other.choose(problem(n=n), settings(on_cache_miss="error")).origin == "cache"


def test_slices_are_short_and_within_their_share() -> None:
    """The shares hold for frequent calls and after long pauses. No garbage is collected inside."""
    rng = random.Random(3)
    d, timer, clock = made(*[FakeKernel(f"k{i}", tiles=(1, 2, 3, 4)) for i in range(4)])
    began, spent, calls = clock.now, 0.0, 0
    problems = [problem(n=n) for n in range(16, 16 + 8 * 6, 8)]
    for each in problems:
        d.bound(each, BACKGROUND)
    while d.background:
        calls += 1
        clock.now += rng.choice((1e-5, 1e-4, 0.002, 0.03, 5.0))
        before = clock.now
        d.bound(rng.choice(problems), BACKGROUND)
        took = clock.now - before
        assert took <= SLICE + STEP < 0.02
        spent += took
        assert spent <= 0.1 * (clock.now - began) + SLICE + STEP
        assert calls < 100_000
    assert spent == pytest.approx(timer.samples * STEP)
    assert timer.rests > 50
    assert timer.collectors == {False}
    assert gc.isenabled()
    # A burst of calls after a pause pays for one slice, not for the whole pause.
    d.bound(problem(n=256), BACKGROUND)
    clock.now += 3600.0
    before = clock.now
    for _ in range(50):
        d.bound(problem(n=256), BACKGROUND)
    assert clock.now - before <= SLICE + STEP


def test_the_share_of_background_tuning_is_a_setting(tmp_path: Path) -> None:
    def seconds(share: float) -> float:
        d, _, clock = made(FakeKernel("fast", tiles=(1, 2, 3)), root=tmp_path / str(share))
        mine, began = background_settings(tune_share=share), clock.now
        while not d.bound(problem(), mine)[0].lasting:
            clock.now += 0.001
            settle(d)
        return clock.now - began

    assert seconds(0.5) < seconds(0.1) / 3
    assert Settings.from_environ({"TMM_TUNE_SHARE": "0.25"}).tune_share == 0.25
    for bad in ("0", "1.5", "nan", "-1"):
        with pytest.raises(tmm_core.errors.SettingsError, match="TMM_TUNE_SHARE"):
            Settings.from_environ({"TMM_TUNE_SHARE": bad})


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify in two launches, which suffice to find the faults of fakes."""
    run = verifier._Checks.run
    monkeypatch.setattr(verifier._Checks, "run", lambda checks, _, many: run(checks, "brief", many))


@pytest.mark.usefixtures("briefly")
@pytest.mark.filterwarnings("ignore:plugin 'fakes'. kernel wrong")
@pytest.mark.slow
def test_its_winners_equal_those_of_foreground_tuning(tmp_path: Path) -> None:
    """Many problems are tuned. Most of their kernels differ by little, and some are wrong."""
    rng = random.Random(7)
    names = ["p", "q", "r"]
    times: dict[Any, float] = {}
    problems = [problem(m=m, n=16 + 8 * i) for i in range(15) for m in (64, 320)]
    for name in [*names, "blas"]:
        for tile in (1, 2, 3):
            for m in (64, 33, 49, 320, 257, 289):
                times[name, tile, m] = rng.uniform(90.0, 110.0)

    def kernels() -> list[FakeKernel]:
        wrong = FakeKernel("wrong", spoil=lambda out: out + 1.0)
        return [*(FakeKernel(name, tiles=(1, 2, 3)) for name in names), wrong]

    d, timer, clock = made(*kernels(), times=times)
    timer.step = STEP / 20  # or it takes as many calls
    foreground, _ = dispatcher(FakeBlas(), *kernels(), times=times, root=tmp_path)
    for each in problems:
        until_done(d, clock, each)
        expected = foreground.choose(each, settings())
        found = d.bound(each, BACKGROUND)[0].candidate
        assert str(found) == str(expected.candidate)
        assert times_of(d, each) == times_of(foreground, each)


def times_of(d: Dispatcher, instance: Any) -> list[Any]:
    record = d.record_of(instance)
    assert record is not None
    return [(c.kernel, c.config, c.status, c.samples_us, c.inside_us) for c in record.candidates]


class Pool:
    """Compilers that answer when a test says so."""

    workers = 4

    def __init__(self) -> None:
        self.pending: list[tuple[Any, Future[None]]] = []

    def submit(self, instance: Any, candidate: Any, **more: Any) -> Future[None]:
        self.pending.append((instance, Future()))
        return self.pending[-1][1]

    def are_starting(self, futures: Any) -> bool:
        return False

    def cancel_pending(self, futures: Any) -> None:
        for future in futures:
            future.cancel()

    def answer(self, instance: Any) -> None:
        for one, future in self.pending:
            if one == instance and not future.done():
                future.set_result(None)


def test_compilers_are_not_waited_for() -> None:
    """While one problem waits for them, the next starts its own; only the first measures."""
    pool: Any = Pool()
    d, timer, clock = made(FakeKernel("fast"), compilers=pool)
    problems = [problem(n=n) for n in (32, 48, 64)]

    def calls(count: int) -> None:
        for each in problems * count:
            clock.now += 0.01
            d.bound(each, BACKGROUND)

    began = time.monotonic()
    calls(20)
    assert [one.n for one, _ in pool.pending] == [32, 32, 48, 48]
    assert not timer.samples
    pool.answer(problems[1])
    calls(20)
    assert not timer.samples  # it waits for its turn
    pool.answer(problems[0])
    while not timer.samples and time.monotonic() < began + 4.0:
        calls(1)
        time.sleep(0.001)  # threads bind meanwhile
    assert timer.samples
    assert {one.n for one, _ in pool.pending} == {32, 48}  # two at a time
    assert time.monotonic() - began < 5.0
    for _ in range(200):
        for each in problems:
            pool.answer(each)
            for m in (33, 49):
                pool.answer(each.at(m))
        time.sleep(0.01)
        calls(20)
        if all(d.bound(each, BACKGROUND)[0].lasting for each in problems):
            break
    assert all(d.bound(each, BACKGROUND)[0].candidate.kernel.name == "fast" for each in problems)


def test_pauses_are_not_charged_to_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty seconds of tuning are two hundred of serving."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    d, _, clock = made(FakeKernel("fast", tiles=(1, 2, 3)))
    mine = background_settings(tune_budget=1.0)
    while not d.bound(problem(), mine)[0].lasting:
        clock.now += 0.01
        settle(d)
        now[0] += 3.0
    record = d.record_of(problem())
    assert record is not None
    assert record.best.kernel == "fast"
    assert len(record.best.samples_us) > 4  # it raced
    assert record.tuning_seconds < 1.0


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_slice_ends_its_tuning(
    tmp_path: Path, interruption: type[BaseException]
) -> None:
    d, timer, clock = made(FakeKernel("fast"), root=tmp_path)
    measure, hits = timer.measure_steps, [0]

    def interrupted(*arguments: Any, **named: Any) -> Iterator[Any]:
        hits[0] += 1
        if hits[0] == 2:
            raise interruption
        return (yield from measure(*arguments, **named))

    timer.measure_steps = interrupted  # type: ignore[method-assign]
    with pytest.raises(interruption):
        until_done(d, clock, problem())
    assert not d.background
    assert d.record_of(problem()) is None
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(d._lock.acquire(timeout=5.0)))
    thread.start()
    thread.join()
    assert done == [True]
    d._lock = threading.RLock()  # whose owner has ended
    until_done(d, clock, problem())
    assert d.bound(problem(), BACKGROUND)[0].candidate.kernel.name == "fast"


def test_a_tuning_that_fails_is_reported_and_not_repeated() -> None:
    d, _, clock = made(FakeKernel("fast"))

    def failing(*_: Any, **__: Any) -> Iterator[Any]:
        yield ()
        raise ValueError("broken")

    d.tuner.steps = failing  # type: ignore[method-assign,assignment]
    with pytest.warns(Warning, match="60×32×16.*tuning failed: ValueError: broken"):
        until_done(d, clock, problem(60))
    choice, _ = d.bound(problem(60), BACKGROUND)
    assert "tuning failed" in choice.reason
    assert not d.background


def test_nothing_is_left_if_calls_stop(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    d, timer, clock = made(FakeKernel("fast"), root=tmp_path)
    for _ in range(12):
        d.bound(problem(), BACKGROUND)
        clock.now += 0.01
        settle(d)
    assert d.background
    assert timer.samples
    released: list[str] = []
    (task,) = d.background._tasks.values()
    task.steps, steps = _noting(task.steps, released), task.steps
    assert steps
    next(task.steps)
    for thread in threading.enumerate():
        if thread.name in ("tmm-bind", "tmm-watch"):  # they end by themselves
            thread.join(10)
    assert threads.issuperset(threading.enumerate())
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix == ".lock"]
    d.background._finalizer()  # as at the end of the process
    assert released == ["closed"]
    assert not d.background


def _noting(steps: Any, released: list[str]) -> Any:
    try:
        yield from steps
    except GeneratorExit:
        released.append("closed")
        raise


@pytest.mark.parametrize(
    ("why", "fields", "mode"),
    [
        ("a CUDA graph is being captured", {"capturing": True}, {}),
        ("deterministic mode", {"deterministic": True}, {}),
        ("batch-invariant mode", {}, {"batch_invariant": True}),
        ("several ranks must agree", {}, {}),
    ],
)
def test_some_calls_are_never_delayed(
    monkeypatch: pytest.MonkeyPatch, why: str, fields: Any, mode: Any, tmp_path: Path
) -> None:
    """Nor do they begin a tuning; their misses are noted."""
    d, timer, clock = made(FakeKernel("fast"), root=tmp_path)
    d.bound(problem(n=48), BACKGROUND)
    if "ranks" in why:
        monkeypatch.setattr(lookup, "_ranks", lambda: 2)
    mine = background_settings(**mode)
    for _ in range(20):
        clock.now += 1.0
        choice, _ = d.bound(problem(**fields), mine)
        assert why in choice.reason
    assert not timer.samples
    assert len(d.background) == 1
    assert list(tmp_path.rglob("misses*"))


def test_a_plugins_own_products_do_not_tune() -> None:
    d, timer, clock = made(FakeKernel("fast"))
    d.bound(problem(), BACKGROUND)
    with nested():
        inside = tmm_core.settings.current()
        assert inside.nested
        within = tmm_core.settings.changed(inside, on_cache_miss="background")
        for _ in range(20):
            clock.now += 1.0
            assert d.bound(problem(), within)[0].candidate.kernel.name == "blas"
    assert not timer.samples


def test_no_slice_while_another_process_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    d, timer, clock = made(FakeKernel("fast"))
    busy = [True]
    monkeypatch.setattr(d, "_alone_on", lambda device: contextlib.nullcontext(not busy[0]))
    for _ in range(50):
        clock.now += 1.0
        assert not d.bound(problem(), BACKGROUND)[0].lasting
    assert not timer.samples
    busy[0] = False
    until_done(d, clock, problem())


def test_the_record_of_another_process_ends_it(tmp_path: Path) -> None:
    d, timer, clock = made(FakeKernel("fast"), root=tmp_path)
    for _ in range(5):
        d.bound(problem(), BACKGROUND)
        clock.now += 0.05
        settle(d)
    other, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    other.choose(problem(), settings())
    samples = timer.samples
    assert samples
    assert until_done(d, clock, problem()) <= 20
    assert timer.samples == samples
    assert not d.background


def test_a_record_answers_while_missing_kernels_are_added(tmp_path: Path) -> None:
    """A new plugin's kernel costs the others' answers nothing."""
    old, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=FAST, root=tmp_path)
    old.choose(problem(), settings())
    d, _, clock = made(
        FakeKernel("fast"), FakeKernel("new"), times=FAST | {"new": 5.0}, root=tmp_path
    )
    assert d.bound(problem(), BACKGROUND)[0].candidate.kernel.name == "fast"
    assert not d.bound(problem(), BACKGROUND)[0].lasting
    until_done(d, clock, problem())
    assert d.bound(problem(), BACKGROUND)[0].candidate.kernel.name == "new"


@pytest.mark.usefixtures("briefly")
@pytest.mark.slow
def test_many_threads_at_once() -> None:
    """One slice runs at a time, in any thread; no thread waits for another's slice."""
    d, timer, _ = made(FakeKernel("fast", tiles=(1, 2, 3)))
    d.__dict__["background"] = Background(lambda key: d._alone_on(key.device))
    often = background_settings(tune_share=1.0)
    measure, inside, faults = timer.measure_steps, threading.Lock(), []

    def alone(*arguments: Any, **named: Any) -> Iterator[Any]:
        steps = measure(*arguments, **named)
        while True:
            if not inside.acquire(blocking=False):
                faults.append("two at once")
            try:
                next(steps)
            except StopIteration as end:
                return end.value
            finally:
                inside.release()
            yield ()

    timer.measure_steps = alone  # type: ignore[method-assign]
    problems = [problem(n=n) for n in (16, 24, 32)]

    def calls(seed: int) -> None:
        rng = random.Random(seed)
        try:
            while not all(d.bound(each, often)[0].lasting for each in problems):
                d.bound(rng.choice(problems), often)
        except BaseException as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=calls, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    for each in problems:
        assert d.bound(each, often)[0].candidate.kernel.name == "fast"
    # A thread that measures in the foreground delays no other thread.
    d.bound(problem(n=256), often)
    holding, free = threading.Event(), threading.Event()

    def hold() -> None:
        with d._lock:
            holding.set()
            free.wait(20)

    other = threading.Thread(target=hold)
    other.start()
    holding.wait(20)
    began, samples = time.monotonic(), timer.samples
    d.bound(problem(n=256), often)
    d.bound(problem(n=264), often)
    assert time.monotonic() - began < 5.0
    assert timer.samples == samples
    free.set()
    other.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_begins_anew(tmp_path: Path) -> None:
    d, timer, clock = made(FakeKernel("fast"), root=tmp_path)
    dispatch.default_dispatcher.made = d
    for _ in range(12):
        d.bound(problem(), BACKGROUND)
        clock.now += 0.01
        settle(d)
    assert timer.samples
    assert d.background
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert "background" not in d.__dict__
            choice, _ = d.bound(problem(), BACKGROUND)
            code = 0 if choice.candidate.kernel.name == "blas" and len(d.background) == 1 else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    until_done(d, clock, problem())
    assert d.bound(problem(), BACKGROUND)[0].candidate.kernel.name == "fast"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Times of interpreted kernels mean nothing, and calls do not tune."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    fingerprint.cache_clear()
    yield
    monkeypatch.undo()
    fingerprint.cache_clear()


@pytest.mark.usefixtures("compiled")
def test_public_calls_and_plans() -> None:
    """Each result is right, whoever computes it; a plan is tuned at once, since it is for good."""
    installed(FakeBlas(), FakeKernel("fast"))
    d = dispatch.default_dispatcher()
    d.tuner = Tuner(FakeTimer(FAST))
    x, w = torch.randn(64, 16), torch.randn(16, 32)
    expected = x @ w
    with tmm_core.override(on_cache_miss="background", tune_share=1.0, progress=False):
        for count in range(5000):
            with torch.inference_mode(count % 2 == 0):
                torch.testing.assert_close(tmm_core.matmul(x, w), expected)
            if warm._plans:
                break
            time.sleep(0.0005)
        (plan,) = warm._plans.values()
        assert plan.kernel == "fast"
        assert tmm_core.matmul(x, w) is not None
        other = torch.randn(16, 48)
        plan = tmm_core.plan(x, other)
        assert plan.kernel == "fast"
        assert plan.choice.lasting
        torch.testing.assert_close(plan(x, other), x @ other)
        message = str(tmm_core.explain(x, torch.randn(16, 56)))
    assert "would be tuned" in message
    assert "by later calls" in message


def test_other_modes_neither_resume_nor_begin_tuning() -> None:
    """A tuning of the background is not resumed, and no other mode begins one."""
    d, timer, clock = made(FakeKernel("fast"))
    d.bound(problem(), BACKGROUND)
    for mode in ("heuristic", "error"):
        for _ in range(10):
            clock.now += 1.0
            with contextlib.suppress(tmm_core.errors.CacheMissError):
                assert d.bound(problem(), settings(on_cache_miss=mode))[0].lasting
    assert not timer.samples
    assert d.choose(problem(), settings()).candidate.kernel.name == "fast"  # at once
    assert d.bound(problem(), BACKGROUND)[0].origin == "cache"
    clock.now += 1.0
    d.bound(problem(n=48), BACKGROUND)
    assert len(d.background) <= 1


def test_a_problem_of_another_precision_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    d, timer, clock = made(FakeKernel("fast"))
    allowed = [False]

    def require(_: Any) -> None:
        if not allowed[0]:
            raise tmm_core.errors.UnsupportedProblemError("another precision")

    monkeypatch.setattr(background, "require_precision", require)
    for _ in range(20):
        d.bound(problem(), BACKGROUND)
        clock.now += 1.0
    assert not timer.samples
    allowed[0] = True
    until_done(d, clock, problem())


def test_only_the_oldest_tuning_measures_after_it_has_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A younger one that measured while the oldest could not run stops once it can."""
    older, younger, clock = problem(n=32), problem(n=48), Clock()
    compiling: Future[None] = Future()
    compiled: Future[None] = Future()
    compiled.set_result(None)
    able, samples = [younger], [0]

    def require(instance: Any) -> None:
        if instance not in able:
            raise tmm_core.errors.UnsupportedProblemError("another precision")

    def waits(future: Future[None]) -> Any:
        while True:
            yield [future]

    def measures() -> Any:
        yield [compiled]
        while True:
            samples[0] += 1
            clock.now += STEP
            yield ()

    monkeypatch.setattr(background, "require_precision", require)
    tunings = Background(lambda _: contextlib.nullcontext(True), clock)
    for instance, steps in ((older, waits(compiling)), (younger, measures())):
        tunings.add(instance, background.Task(instance, steps, lambda: False))

    def calls() -> int:
        before = samples[0]
        for _ in range(20):
            clock.now += 1.0
            tunings.resume(0.1)
        return samples[0] - before

    assert calls() == 20
    able.append(older)
    monkeypatch.setattr(background, "CHECK_INTERVAL", 100.0)
    assert calls() == 0


@pytest.mark.usefixtures("compiled", "briefly")
@pytest.mark.slow
def test_the_benchmark_reports_delays_and_winners(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import stalls

    installed(FakeBlas(), FakeKernel("fast"))
    dispatch.default_dispatcher().tuner = Tuner(FakeTimer(FAST))
    shapes = [(3, 16, 8, ""), (5, 24, 8, "relu")]
    output = tmp_path / "stalls.json"
    arguments = ["--device", "cpu", "--share", "1", "--seconds", "60", "-o", str(output)]
    rows = stalls.main(arguments, shapes)
    assert [(row.winner, row.foreground) for row in rows] == [("fast tile=1",) * 2] * 2
    for row in rows:
        assert row.ratio == 1.0
        assert row.calls > 1
        assert row.winner_s > 0
        assert row.first_ms > 0
        assert row.worst_ms > 0
    out = capsys.readouterr().out
    assert "Of 2 winners 2 are the foreground's" in out
    assert re.search(r"^\| \w+:\d+ \| \w+:\d+ \| \d+ ", out, re.M)  # a step's begin and end
    assert "| 5×24×8 relu |" in output.with_suffix(".md").read_text()
    assert len(json.loads(output.read_text())["rows"]) == 2
    # The table says which tunings did not end.
    warm.forget_plans()
    monkeypatch.setenv("OUT", str(tmp_path))
    arguments = ["--device", "cpu", "--share", "0.0001", "--seconds", "0.05"]
    (row,) = stalls.main(arguments, shapes[:1])
    assert (row.winner_s, row.winner, row.foreground) == (None, "", "")
    assert "not ended" in capsys.readouterr().out


FIRST = """
import sys, torch, tmm_core
from tmm_core import dispatch, settings
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.operand import Operand

device = DeviceFingerprint(
    type="cuda", name="NVIDIA H100 80GB HBM3", capability=(9, 0), sm_count=132, torch="2",
    triton="3", shared_memory=232448, l2=52428800,
)
bf16 = Operand(torch.bfloat16)
instance = tmm_core.Problem(m=48, n=5120, k=4096, a=bf16, b=bf16, out=bf16, device=device)
tmm_core.preload()
before = {*sys.modules}
with settings.override(on_cache_miss="background") as current:
    choice = dispatch.default_dispatcher().choose(instance, current)
assert "later calls tune it" in choice.reason, choice
assert len(dispatch.default_dispatcher().background) == 1
assert not {*sys.modules} - before, {*sys.modules} - before
assert dispatch.default_dispatcher()._neighbours._families is not None
"""


@pytest.mark.slow
def test_after_a_preload_a_first_call_imports_nothing(tmp_path: Path) -> None:
    environ = {**os.environ, "TMM_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", FIRST], env=environ, check=True)
