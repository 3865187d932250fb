"""Tuning and verification keep within their limits of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import FakeBlas, FakeConfig, FakeKernel, FakeTimer, Tuner, plugin, problem, settings
from tmm_cache import CacheStore

from tmm_core import TmmWarning
from tmm_core.dispatch.dispatcher import Dispatcher
from tmm_core.registry.registry import Registry
from tmm_core.spec.operand import Operand
from tmm_core.verify.verifier import Verifier

CPU = torch.device("cpu")
MIB = 1 << 20
WIDE = problem(m=64, n=2048, k=64)
TALL = problem(m=1024, n=64, k=1024, residual=Operand(torch.float32))
SQUARE = problem(m=256, n=256, k=256)


def peak(run: Callable[[], object]) -> int:
    """Bytes of tensors held at one time while it runs, by what torch's allocator reports."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True, acc_events=True) as profile:
        run()
    events: Any = profile.profiler
    found = [e for e in events.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(found, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_the_peak_of_memory_is_measured() -> None:
    assert 2 * MIB <= peak(lambda: torch.ones(MIB // 4) + torch.ones(MIB // 4)) <= 4 * MIB


@pytest.mark.parametrize("problem", [WIDE, TALL, SQUARE], ids=str)
@pytest.mark.slow
def test_verification_respects_its_limit_whatever_it_compares(problem: Any) -> None:
    launcher = FakeKernel("k").bind(problem, FakeConfig())
    seen = set()
    for limit in (2 * MIB, 12 * MIB, 20 * MIB, 48 * MIB):
        verifier = Verifier(problem, CPU, memory_limit=limit)
        verdicts = []
        most = peak(lambda v=verifier, kept=verdicts: kept.append(v.verdict(launcher, repeats=2)))
        assert most <= limit
        (verdict,) = verdicts
        if verdict.unknown:
            assert verdict.reason == f"cannot be verified within {limit // MIB} MiB of memory"
        else:
            assert verdict.ok
        seen.add(verdict.unknown)
    assert seen == {True, False}


@pytest.mark.parametrize("limit", [18 * MIB, 32 * MIB, 64 * MIB])
@pytest.mark.slow
def test_tuning_respects_its_limit(limit: int) -> None:
    kernels = [FakeBlas(), FakeKernel("k", tiles=(1, 2))]
    tuner = Tuner(FakeTimer({"k": 5.0, "blas": 10.0}))
    most = peak(lambda: tuner.tune(TALL, kernels, settings(tune_memory=limit)))
    assert 4 * MIB < most <= limit


def test_scratch_memory_past_the_limit_costs_its_candidate() -> None:
    kernels = [FakeBlas(), FakeKernel("greedy", workspace=200 * MIB), FakeKernel("modest")]
    times = {"greedy": 1.0, "modest": 5.0, "blas": 10.0}
    record = Tuner(FakeTimer(times)).tune(SQUARE, kernels, settings(tune_memory=100 * MIB))
    (greedy,) = (c for c in record.candidates if c.kernel == "greedy")
    assert record.best.kernel == "modest"
    assert greedy.reason == (
        "takes 200 MiB of scratch memory, and tune_memory (TMM_TUNE_MEMORY) is 100"
    )


def test_a_problem_past_the_limit_is_answered_untuned(tmp_path: Any) -> None:
    registry = Registry()
    registry.register(plugin(FakeBlas(estimate=10.0), FakeKernel("k")), "fakes")
    d = Dispatcher(registry, Tuner(FakeTimer({})), CacheStore(tmp_path, []))
    small = settings(tune_memory=MIB)
    with pytest.warns(TmmWarning, match="5 MiB, and tune_memory .* leaves 0 for what is timed"):
        choice = d.choose(TALL, small)
    assert choice.candidate.kernel.name == "blas"
    assert "tuning failed" in choice.reason


def test_a_first_use_is_verified_within_the_limit(tmp_path: Any) -> None:
    registry = Registry()
    registry.register(plugin(FakeBlas(estimate=100.0), FakeKernel("k", estimate=1.0)), "fakes")
    d = Dispatcher(registry, None, CacheStore(tmp_path, []))
    guess = settings(on_cache_miss="heuristic", tune_memory=MIB)
    choice, _ = d.bound(TALL, guess)
    assert choice.candidate.kernel.name == "blas"
    assert "cannot be verified within 1 MiB" in choice.reason
    more = settings(on_cache_miss="heuristic", tune_memory=64 * MIB)
    assert d.bound(TALL, more)[0].candidate.kernel.name == "k"
