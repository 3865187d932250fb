"""The budget limits a tuning, including all of its parts. Candidates that it leaves out are
untried."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import (
    DEVICE,
    FakeBlas,
    FakeConfig,
    FakeKernel,
    FakeTimer,
    Tuner,
    dispatcher,
    problem,
    searched,
    settings,
)

from tmm_core.dispatch.explanation import explain_problem
from tmm_core.spec.operand import Operand
from tmm_core.tuning import cold_operands, stages
from tmm_core.tuning.candidate_launchers import Deadline
from tmm_core.tuning.compile_pool import NotCompiledError
from tmm_core.tuning.findings import Findings


class Slow(FakeKernel):
    """Takes 10 ms to answer one kind of query."""

    def __init__(self, name: str, query: str) -> None:
        super().__init__(name, estimate=5.0)
        self.query, self.calls = query, 0

    def _take(self, query: str) -> None:
        if query == self.query:
            self.calls += 1
            time.sleep(0.03)

    def declines(self, problem: Any) -> list[str]:
        self._take("declines")
        return super().declines(problem)

    def configs(self, problem: Any) -> Any:
        self._take("configs")
        return super().configs(problem)

    def default_config(self, problem: Any) -> FakeConfig:
        self._take("default_config")
        return super().default_config(problem)

    def estimate_us(self, problem: Any, config: FakeConfig) -> float | None:
        self._take("estimate_us")
        return super().estimate_us(problem, config)

    def bind(self, problem: Any, config: FakeConfig) -> Any:
        self._take("bind")
        return super().bind(problem, config)

    def workspace_bytes(self, problem: Any, config: FakeConfig) -> int:
        self._take("workspace_bytes")
        return super().workspace_bytes(problem, config)


@pytest.mark.parametrize(
    "query", ["declines", "configs", "default_config", "estimate_us", "bind", "workspace_bytes"]
)
@pytest.mark.slow(quick=6)
def test_queries_count_against_the_budget(query: str, tmp_path: Path) -> None:
    """60 kernels take 1.8 s to answer one query each; the budget is a third of that."""
    kernels = [Slow(f"slow.{number}", query) for number in range(60)]
    d, _ = dispatcher(FakeBlas(), *kernels, times={"blas": 10.0}, root=tmp_path)
    d.tuner.workers = 1
    choice = d.choose(problem(m=64), settings(tune_budget=0.6))
    assert choice.candidate.kernel.name == "blas"
    calls = sum(kernel.calls for kernel in kernels)
    if query == "declines":  # a call queries every kernel once in any case
        assert calls == 60
        assert not any(kernel.bound for kernel in kernels)
    else:
        assert 0 < calls <= 30
    noted = d.untried.get(problem())
    assert noted is not None
    assert {why.cause for why in noted.kernels.values()} == {"budget"}
    assert len(noted.kernels) >= 30


def test_candidates_that_the_budget_left_out_are_tried_on_request(tmp_path: Path) -> None:
    kernels = [Slow(f"slow.{number}", "configs") for number in range(60)]
    times: dict[Any, float] = {"blas": 10.0, "slow.59": 1.0}
    d, _ = dispatcher(FakeBlas(), *kernels, times=times, root=tmp_path)
    d.choose(problem(), settings(tune_budget=0.1))
    left = set(d.untried.get(problem()).kernels)
    assert left
    assert "the tuning budget ended before it" in str(explain_problem(d, problem(), settings()))
    # No call waits for it, in this process or in another.
    again, timer = dispatcher(FakeBlas(), *kernels, times=times, root=tmp_path)
    again.choose(problem(), settings(tune_budget=20.0))
    assert not timer.measured
    again.tune(problem(), settings(tune_budget=20.0))
    assert timer.measured
    assert not again.untried.get(problem()).kernels
    assert again.record(problem())[1].best.kernel == "slow.59"


def test_the_first_candidates_are_tried_whatever_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least as many as tmm's own kernels give are tried; further ones only within the budget."""
    monkeypatch.setattr(stages, "TOGETHER", 3)

    class Late(FakeTimer):
        def measure(self, runs: Any, rounds: int, **chain: Any) -> list[list[float]]:
            time.sleep(0.25)
            return super().measure(runs, rounds, **chain)

    found = Findings()
    kernels = [FakeKernel(f"k.{number}", estimate=1.0 + number) for number in range(6)]
    record = Tuner(Late({"blas": 10.0})).tune(
        problem(), [FakeBlas(), *kernels], settings(tune_budget=0.2), findings=found
    )
    assert {c.kernel for c in record.candidates} == {"blas", "k.0", "k.1"}
    assert {name for name, _ in found.left} == {f"k.{number}" for number in range(2, 6)}


def test_after_the_deadline_only_blas_is_queried() -> None:
    kernels = [FakeKernel("first", estimate=1.0), FakeBlas(estimate=9.0)]
    late = searched(problem(), kernels, kernels, deadline=Deadline(time.monotonic() - 1))
    assert [c.kernel.name for c in late.first()] == ["blas"]
    assert late.empty == {kernels[0]: "the tuning budget ended before it"}
    in_time = searched(problem(), kernels, kernels, deadline=Deadline(time.monotonic() + 60))
    assert {c.kernel.name for c in in_time.first()} == {"blas", "first"}


def test_the_budget_that_finding_the_kernels_took_is_spent() -> None:
    kernels = [FakeBlas(), FakeKernel("k")]
    found = Findings()
    record = Tuner(FakeTimer({"blas": 10.0})).tune(
        problem(), kernels, settings(tune_budget=5.0), findings=found, spent=5.1
    )
    assert [c.kernel for c in record.candidates] == ["blas"]
    assert found.left["k", "1"].cause == "budget"


class Launches:
    """First launches in another process. Launches of one tile take half a second and fail."""

    def failure(self, problem: Any, candidate: Any, memory: int) -> NotCompiledError | None:
        if candidate.config.tile != 2:
            return None
        time.sleep(0.5)
        return NotCompiledError("its first launch did not end within 60 s")


def test_time_that_one_candidate_lost_is_not_charged_to_the_others() -> None:
    tiles = FakeKernel("k", tiles=(2, 1))
    tuner = Tuner(FakeTimer({"k": 5.0, "blas": 10.0}))
    tuner.first_launches = Launches()  # type: ignore[assignment]
    record = tuner.tune(problem(), [FakeBlas(), tiles], settings(tune_budget=0.4))
    assert {(c.kernel, c.config["tile"]): c.status for c in record.candidates} == {
        ("blas", 1): "ok", ("k", 1): "ok", ("k", 2): "failed"
    }  # fmt: skip


def test_results_count_against_the_memory_of_a_chain() -> None:
    """The product's result is larger than its weight."""
    operand = Operand(torch.float32)
    gpu = replace(DEVICE, type="cuda", l2=0)
    wide = problem(m=4096, n=1024, k=16, a=operand, b=operand, out=operand, device=gpu)
    weight, out = wide.sizes["b"], wide.sizes["out"]
    assert out > 100 * weight
    assert cold_operands.copies(wide, limit=5 * (weight + out)) == 5
    assert cold_operands.copies(wide, limit=5 * (weight + out) - 1) == 4


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_a_copy_is_aligned_as_its_original(offset: int) -> None:
    """Otherwise a kernel for unaligned operands would be timed on aligned ones."""
    memory = torch.empty(64 + 8)
    start = (-memory.data_ptr() % cold_operands.ALIGNMENT) // 4 + offset
    t = memory[start : start + 32].view(4, 8)
    assert t.data_ptr() % cold_operands.ALIGNMENT == 4 * offset
    assert cold_operands.duplicate(t).data_ptr() % cold_operands.ALIGNMENT == 4 * offset
