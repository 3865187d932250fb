"""``explain()`` of a call that no record answers: the effect of the settings."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from fakes import DEVICE, FakeBlas, FakeKernel, dispatcher, problem, settings
from tmm_cache import CacheWarning

from tmm_core import CacheMissError, Traits
from tmm_core.dispatch.explanation import Explanation, explain_problem

TIMES = {"fast": 10.0, "blas": 20.0}


def explained(d: Any, m: int = 64, **fields: Any) -> Explanation:
    return explain_problem(d, problem(m), settings(**fields))


def test_a_miss_that_would_be_tuned_says_so_and_measures_nothing(tmp_path: Path) -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast", estimate=1.0), times=TIMES, root=tmp_path)
    why = explained(d, m=60, tune_budget=7.0)
    assert why.origin == why.to_json()["origin"] == "tune"
    text = str(why)
    assert "miss      would be tuned: no record at M=64: blas, fast, for up to 7 s" in text
    assert "untuned   blas tile=1" in text  # BLAS has no estimate, so no other is ahead of it
    assert "because   fallback: without a record" in text
    assert "chosen" not in text
    assert timer.measured == []
    assert not list(tmp_path.rglob("*.json*"))  # neither a record nor a miss


def test_the_document_of_a_miss_and_of_a_record(tmp_path: Path) -> None:
    """``tmm explain --json`` gives programs what the text gives people."""
    kernels = FakeBlas(), FakeKernel("fast"), FakeKernel("odd", against=lambda p: ["m is even"])
    d, _ = dispatcher(*kernels, times=TIMES, root=tmp_path)
    common = {
        "problem": problem(60).to_json(), "gpu": DEVICE.gpu, "arithmetic": None, "untried": {},
        "able": ["blas", "fast"], "rejected": {"odd": ["m is even"]}, "cache": str(tmp_path),
    }  # fmt: skip
    why = explained(d, m=60)
    assert why.miss is not None
    assert why.to_json() == {
        **common, "kernel": "blas", "config": {"tile": 1}, "origin": "tune",
        "reason": why.miss.reason, "measured": None, "record": None,
    }  # fmt: skip
    d.choose(problem(60), settings())
    why = explained(d, m=60)
    assert why.record is not None
    assert why.to_json() == {
        **common, "kernel": "fast", "config": {"tile": 1}, "origin": "cache",
        "reason": why.choice.reason, "measured": problem(64).to_json(),
        "record": why.record.to_json(),
    }  # fmt: skip


def test_the_dry_run_agrees_with_the_call(tmp_path: Path) -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast"), times=TIMES, root=tmp_path)
    why = explained(d, on_cache_miss="error")
    assert why.origin == "error"
    with pytest.raises(CacheMissError) as raised:
        d.choose(problem(), settings(on_cache_miss="error"))
    lines = " ".join(str(why).split())  # which wrap
    assert f"miss would raise CacheMissError: {raised.value}" in lines
    guess = explained(d, on_cache_miss="heuristic")
    assert (guess.miss, guess.origin) == (None, "fallback")
    d.choose(problem(), settings())
    assert timer.measured
    assert explained(d).kernel == "fast"
    for policy in ("tune", "error", "heuristic"):
        found = explained(d, on_cache_miss=policy)
        assert (found.miss, found.origin, found.kernel) == (None, "cache", "fast"), policy


def test_a_record_that_lacks_a_kernel_would_be_completed(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=TIMES, root=tmp_path)
    d.choose(problem(), settings())
    more, _ = dispatcher(FakeBlas(), FakeKernel("fast"), FakeKernel("new"), root=tmp_path)
    why = explained(more)
    assert why.miss is not None
    assert why.miss.reason == "a record without them at M=64: new, for up to 20 s"
    assert (why.kernel, why.choice.origin) == ("fast", "cache")
    assert explained(more, on_cache_miss="error").kernel == "fast"


def test_a_problem_with_an_earlier_choice_is_not_a_miss(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=TIMES, root=tmp_path)
    mine = settings()
    d.choose(problem(), mine)
    for file in tmp_path.rglob("*.json"):
        file.unlink()
    assert explain_problem(d, problem(), mine).kernel == "fast"


def test_nothing_that_explaining_finds_is_kept(tmp_path: Path) -> None:
    d, timer = dispatcher(FakeBlas(), FakeKernel("fast", estimate=1.0), times=TIMES, root=tmp_path)
    mine = settings()
    explain_problem(d, problem(), mine)
    assert d._choices == {}
    explain_problem(d, problem(deterministic=True), mine)
    assert not list(tmp_path.rglob("*miss*"))
    assert d.choose(problem(), mine).candidate.kernel.name == "fast"
    assert timer.measured  # its guess did not stand in for the tuning


def test_it_does_not_wait_for_another_threads_tuning(tmp_path: Path) -> None:
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=TIMES, root=tmp_path)
    found: list[Explanation] = []
    with d._lock:
        thread = threading.Thread(target=lambda: found.append(explained(d)), daemon=True)
        thread.start()
        thread.join(10)
    assert [why.origin for why in found] == ["tune"]


def test_batch_invariant_mode_too(tmp_path: Path) -> None:
    invariant = Traits(batch_invariant=True)
    kernel = FakeKernel("fast", traits=invariant, estimate=1.0)
    d, timer = dispatcher(FakeBlas(), kernel, times=TIMES, root=tmp_path)
    instance = problem(batch_invariant=True)
    for policy, origin in (("tune", "tune"), ("error", "error"), ("heuristic", "heuristic")):
        why = explain_problem(d, instance, settings(batch_invariant=True, on_cache_miss=policy))
        assert why.origin == origin
        assert why.kernel == "fast"
    assert timer.measured == []


def test_a_locked_store_without_an_answer_would_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMM_REQUIRE_LOCKED", "1")
    d, _ = dispatcher(FakeBlas(), FakeKernel("fast"), times=TIMES, root=tmp_path)
    with pytest.warns(CacheWarning, match="there is no such file"):
        why = explained(d)
    assert why.miss is not None
    assert why.miss.action == "error"
    assert "tmm-cache freeze" in why.miss.reason
    assert why.kernel == "blas"
