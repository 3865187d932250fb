"""Clocks that tests replace (freezegun, time-machine): one error or warning, and the matmul."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from fakes import FakeBlas, FakeKernel, dispatcher, installed

import tmm_core
from tmm_core import TmmWarning, dispatch
from tmm_core.spec.device import fingerprint
from tmm_core.tuning.timing import HostTimer
from tmm_core.tuning.tuner import Tuner

A, B = torch.randn(4, 8), torch.randn(8, 6)


def falling() -> Callable[[], float]:
    steps = itertools.count(10**6, -1)
    return lambda: float(next(steps))


#: Functions that make an invalid clock, by name.
CLOCKS: dict[str, Callable[[], Callable[[], float]]] = {
    "frozen": lambda: lambda: 5.0,
    "falling": falling,
    "nan": lambda: lambda: math.nan,
    "infinite": lambda: lambda: math.inf,
}


@pytest.fixture(autouse=True)
def tunes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where kernels are interpreted nothing is tuned."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    fingerprint.cache_clear()
    yield
    fingerprint.cache_clear()


@pytest.mark.parametrize("clock", CLOCKS)
def test_invalid_times_give_one_warning(clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded, and ``tune`` raises the warning's text."""
    installed(FakeBlas(), FakeKernel("fast"))
    dispatch.default_dispatcher().tuner = Tuner(HostTimer())
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", CLOCKS[clock]())
        why = r"timing .* failed: time.perf_counter\(\) is no clock: a launch took (0|-.*|nan) µs$"
        with pytest.warns(TmmWarning, match=why) as caught:
            results = [tmm_core.matmul(A, B) for _ in range(2)]
        assert all(torch.allclose(each, A @ B) for each in results)
        assert len(caught) == 1
        with pytest.raises(RuntimeError, match=f"^{why}"):
            tmm_core.tune(tmm_core.problem(A, B))
    [record] = tmm_core.tune(tmm_core.problem(A, B))
    assert all(us > 0 for each in record.candidates for us in each.samples_us)


def test_a_clock_that_stops_after_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier times decide; one warning names the fault."""
    installed(FakeBlas(), FakeKernel("fast"))
    timer = HostTimer()
    dispatch.default_dispatcher().tuner = Tuner(timer)
    clock, measure = time.perf_counter, timer.measure_steps
    rounds = itertools.count()

    def measured(*arguments: object, **options: object) -> object:
        stopped = next(rounds) > 0
        monkeypatch.setattr(time, "perf_counter", (lambda: 5.0) if stopped else clock)
        return (yield from measure(*arguments, **options))  # type: ignore[arg-type]

    monkeypatch.setattr(timer, "measure_steps", measured)
    with pytest.warns(TmmWarning, match="is no clock") as caught:
        [record] = tmm_core.tune(tmm_core.problem(A, B))
    assert len(caught) == 1
    assert {each.status for each in record.candidates} == {"ok"}


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_record_has_no_negative_duration(clock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = dispatcher(FakeBlas(), FakeKernel("fast"))
    dispatch.default_dispatcher.made = made
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(time, "monotonic", CLOCKS[clock]())
        tmm_core.matmul(A, B)
    found = made.record(tmm_core.problem(A, B))
    assert found is not None
    assert found[1].tuning_seconds == 0.0
