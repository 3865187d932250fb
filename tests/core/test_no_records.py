"""``tmm bench --no-records``: tuning without any record, compared with an exhaustive search."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeConfig, FakeKernel, register
from test_bench import document
from tmm_cache import CandidateResult, TuningRecord

import tmm_core
from tmm_core import dispatch
from tmm_core.bench import exhaustive, report
from tmm_core.bench.results import Results
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.spec.kernel import SEARCH_LIMITED
from tmm_core.spec.operand import Operand
from tmm_core.spec.problem import Problem
from tmm_core.tools.cli import main
from tmm_core.tuning.stages import FINAL, SCREENING, SECOND
from tmm_core.verify.environment_faults import BUDGET_ENDED

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("blas_alone")


def problem() -> Any:
    return tmm_core.problem(torch.empty(16, 8), torch.empty(8, 16))


class Wide(FakeKernel):
    """A kernel whose last tile only an exhaustive search proposes."""

    def configs(self, problem: Any) -> Iterable[FakeConfig]:
        tiles = self.tiles[:-1] if SEARCH_LIMITED.get() else self.tiles
        return [FakeConfig(tile=tile) for tile in tiles]


class Costs:
    """A timer: a kernel takes the µs given for its tile, and BLAS 10 µs."""

    def __init__(self, us: dict[int, float]) -> None:
        self.us = us

    def measure(self, runs: Sequence[Any], rounds: int, **_: Any) -> list[list[float]]:
        costs = (getattr(run.launcher, "cost", None) for run in runs)
        return [[10.0 if cost is None else self.us[cost[1]]] * rounds for cost in costs]

    def release(self) -> None:
        pass


def searched(
    monkeypatch: pytest.MonkeyPatch, us: dict[int, float], *tried: CandidateResult
) -> dict[str, Any]:
    """The search's document if a tuning chose the first candidate it tried, or BLAS."""
    monkeypatch.setattr(exhaustive, "timer_for", lambda device: Costs(us))
    blas = CandidateResult("blas", "1", blas_config(), "ok", (10.0,))
    record = TuningRecord(
        problem=problem().to_json(), winner=0, candidates=(*tried, blas), tuning_seconds=1.0,
        created="2026-11-22T00:00:00Z",
    )  # fmt: skip
    return exhaustive.search(problem(), record, CPU)


def blas_config() -> dict[str, Any]:
    kernel = dispatch.default_dispatcher().registry.kernel("blas")
    return kernel.default_config(problem()).to_json()


def tile(number: int, samples: int, **more: Any) -> CandidateResult:
    return CandidateResult(
        "fake.wide", "1", {"tile": number}, "ok" if samples else "failed", (5.0,) * samples, **more
    )


def test_a_config_that_only_the_search_has_was_never_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(Wide("fake.wide", tiles=(1, 2, 3)))
    found = searched(monkeypatch, {1: 8.0, 2: 9.0, 3: 4.0}, tile(1, 9), tile(2, 3))
    assert found["best"] == 'fake.wide {"tile": 3}'
    assert (found["step"], found["regret"]) == ("never proposed", 2.0)
    assert found["blas_over_best"] == 2.5
    assert SEARCH_LIMITED.get()


def test_a_tuning_that_found_the_best_has_no_regret(monkeypatch: pytest.MonkeyPatch) -> None:
    register(Wide("fake.wide", tiles=(1, 2, 3)))
    found = searched(monkeypatch, {1: 5.0, 2: 6.0, 3: 7.0}, tile(1, 9), tile(2, 9))
    assert (found["step"], found["regret"]) == ("found", 1.0)
    # BLAS is the best if no kernel beats it by the margin.
    found = searched(monkeypatch, {1: 9.95, 2: 20.0, 3: 20.0})
    assert (found["step"], found["regret"]) == ("found", 1.0)


def test_a_wrong_or_failing_candidate_is_not_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    register(
        Wide("fake.wide", tiles=(1, 2)),
        FakeKernel("fake.wrong", tiles=(3,), spoil=lambda out: out + 1),
        FakeKernel("fake.lame", tiles=(4,), bind_error=OSError("no compiler")),
    )
    found = searched(monkeypatch, {1: 5.0, 2: 6.0, 3: 1.0}, tile(1, 9))
    assert found["best"] == 'fake.wide {"tile": 1}'
    assert found["failed"]['fake.wrong {"tile": 3}'] == "wrong"
    assert "no compiler" in found["failed"]['fake.lame {"tile": 4}']


@pytest.mark.parametrize("chosen", [1, 9])
def test_the_fastest_race_with_blas_and_the_choice(
    chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither BLAS, nor the choice, nor a wrong candidate takes the place of another."""
    register(
        Wide("fake.wide", tiles=range(1, 11)),
        FakeKernel("fake.wrong", tiles=(11,), spoil=lambda out: out + 1),
    )
    us = {number: 1.0 + number / 10 for number in range(1, 11)} | {11: 0.5}
    found = searched(monkeypatch, us, tile(chosen, 9))
    raced = {int(name.split()[-1][:-1]) for name in found["us"] if name.startswith("fake")}
    others = [number for number in range(1, 11) if number != chosen]
    assert raced == {chosen, *others[: exhaustive.FINALISTS]}
    assert len(found["us"]) == exhaustive.FINALISTS + 2
    assert found["best"] == 'fake.wide {"tile": 1}'


def test_searches_share_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their compile cache is not the tunings', which starts empty."""
    folders = []

    class Noting(Wide):
        def bind(self, problem: Any, config: Any) -> Any:
            folders.append(os.environ["TRITON_CACHE_DIR"])
            return super().bind(problem, config)

    register(Noting("fake.wide", tiles=(1, 2)))
    monkeypatch.setenv("TRITON_CACHE_DIR", "the tunings'")
    for _ in range(2):
        searched(monkeypatch, {1: 5.0, 2: 6.0}, tile(1, 9))
    assert len(folders) >= 4
    assert len(set(folders)) == 1
    assert folders[0] != os.environ["TRITON_CACHE_DIR"] == "the tunings'"


@pytest.mark.parametrize(
    ("result", "step"),
    [
        (None, "proposed, but not tried"),
        (tile(2, 0, reason=BUDGET_ENDED), "not compiled in time"),
        (tile(2, 0, reason="OSError: gone"), "failed: OSError: gone"),
        (tile(2, SCREENING), "lost in the screening round"),
        (tile(2, SECOND), "lost in the second round"),
        (tile(2, FINAL), "lost in the deciding round"),
        (tile(2, FINAL, steady_us=6.0), "lost in the steady-state round"),
    ],
    ids=str,
)
def test_the_step_that_lost_the_best(result: CandidateResult | None, step: str) -> None:
    tried = {"best": result} if result else {}
    assert exhaustive.step("best", "other", tried, ["best"]) == step


def test_no_record_answers_and_none_remains() -> None:
    register(FakeKernel("fake.a"))
    usual = dispatch.default_dispatcher()
    tmm_core.tune(problem())
    assert usual.record(problem())
    before = dict(os.environ)
    with exhaustive.without_records():
        hidden = dispatch.default_dispatcher()
        assert hidden.record(problem()) is None
        assert hidden.store.layers == ()
        assert os.environ["TRITON_CACHE_DIR"] != before.get("TRITON_CACHE_DIR")
        tmm_core.tune(problem())
        assert hidden.record(problem())
        folder = hidden.store.root
    assert dispatch.default_dispatcher() is usual
    assert len(list(usual.store.summaries())) == 1
    assert dict(os.environ) == before
    assert not folder.exists()


def test_every_problem_is_tuned_anew_and_reported_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(FakeKernel("fake.a", tiles=(1, 2)))
    argv = ["bench", "--no-records", "--shapes", "16x8x16", "16x8x24", "--dtype", "fp32"]
    argv += ["--device", "cpu", "--seconds-per-problem", "0.01", "--budget", "2"]
    argv += ["--output", str(tmp_path)]
    assert main(argv) == 0
    (file,) = tmp_path.glob("*.jsonl")
    lines = list(map(json.loads, file.read_text().splitlines()))
    problems = [each for each in lines if each["kind"] == "problem"]
    assert [each["suite"] for each in problems] == ["shapes without records"] * 2
    for each in problems:
        assert each["search"]["candidates"] > 2
        assert each["search"]["chosen"].startswith(each["kernel"])
        assert each["search"]["regret"] >= 0.5
    text = (tmp_path / "report.md").read_text()
    assert "## first use without records, against an exhaustive search" in text
    assert "| shapes without records | all | 2 |" in text
    assert list(dispatch.default_dispatcher().store.summaries()) == []
    capsys.readouterr()
    assert main([*argv, "--no-tune"]) == 2
    assert "--no-tune tunes none" in capsys.readouterr().err


def test_the_report_has_a_row_for_each_step() -> None:
    documents = [
        document(m, 1.0, suite="large without records", search={
            "step": step, "regret": regret, "blas_over_best": 2.0,
        })
        for m, step, regret in (
            (64, "found", 1.0), (128, "never proposed", 1.21), (256, "found", 1.0)
        )
    ]  # fmt: skip
    rows = report.searches(Results.of(documents))
    assert [row[1:5] for row in rows] == [
        ("all", "3", "1.066×", "1.210×"),
        ("found", "2", "1.000×", "1.000×"),
        ("never proposed", "1", "1.210×", "1.210×"),
    ]


def test_the_hopper_kernel_lifts_its_limit() -> None:
    pytest.importorskip("triton")
    from tmm_triton.hopper import search_space

    bf16, device = torch.bfloat16, DeviceFingerprint("cuda", "NVIDIA H100", (9, 0), 132, 232448)
    large = Problem(
        5000, 8192, 5120, Operand(bf16), Operand(bf16, "col"), Operand(bf16), device
    )  # fmt: skip
    tried = list(search_space.configs(large))
    token = SEARCH_LIMITED.set(False)
    try:
        every = list(search_space.configs(large))
    finally:
        SEARCH_LIMITED.reset(token)
    assert set(tried) < set(every)
    assert len(every) > 3 * len(tried)
