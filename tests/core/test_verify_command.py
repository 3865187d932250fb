"""``tmm verify`` checks every record that would answer, and reports its faults."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import FakeKernel, plugin, register
from msgspec.structs import replace as revised
from tmm_cache import CacheStore, TuningRecord

import tmm_core
from tmm_core import dispatch
from tmm_core.launch import warm
from tmm_core.spec.device import fingerprint
from tmm_core.spec.kernel import Candidate
from tmm_core.tools.cli import main
from tmm_core.tools.commands import verify

CPU = ["--device", "cpu"]
DEVICE = fingerprint(torch.device("cpu"))


def record(kernel: FakeKernel, m: int, root: Path | None = None, **fields: Any) -> TuningRecord:
    """One that says that this kernel won, in the user's root or in another."""
    problem = tmm_core.problem(torch.empty(m, 16), torch.empty(16, 8))
    (tuned,) = tmm_core.tune(problem)
    tuned = revised(tuned, problem={**tuned.problem, **fields})
    winner = revised(
        tuned.best, kernel=kernel.name, version=kernel.version, config={"tile": 1}, status="ok"
    )
    changed = revised(tuned, candidates=(*tuned.candidates, winner), winner=len(tuned.candidates))
    store = CacheStore(root) if root else dispatch.default_dispatcher().store
    store.save(DEVICE.gpu, DEVICE.environment, changed)
    return changed


def delayed(out: torch.Tensor) -> torch.Tensor:
    time.sleep(2e-4)
    return out


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    monkeypatch.setattr(verify, "REPEATS", 2)
    # BLAS wins the tunings, under any load of the machine.
    kernel = FakeKernel("test.fine", spoil=delayed)
    register(kernel)
    return kernel


def run(capsys: pytest.CaptureFixture[str], status: int) -> tuple[list[str], list[Any]]:
    """Lines, and what --json has."""
    assert main(["verify", *CPU]) == status
    lines = capsys.readouterr().out.splitlines()
    assert main(["verify", "--json", *CPU]) == status
    return lines, json.loads(capsys.readouterr().out)


def test_verify_without_records(capsys: pytest.CaptureFixture[str]) -> None:
    lines, found = run(capsys, 0)
    assert lines == [f"0 records for {DEVICE.gpu}"]
    assert found == []


def test_a_right_record_is_stamped(fine: FakeKernel, capsys: pytest.CaptureFixture[str]) -> None:
    document = record(fine, 24).problem
    tmm_core.tune(tmm_core.problem(torch.empty(32, 16), torch.empty(16, 8)))
    problem = warm.recall(document, torch.device("cpu"))
    trust = dispatch.default_dispatcher().first_use
    candidate = Candidate(fine, fine.default_config(problem))
    assert not trust.is_verified(problem, candidate)
    lines, found = run(capsys, 0)
    assert lines == [f"2 records for {DEVICE.gpu}: 1 verified, 1 won by BLAS"]
    assert sorted(each["status"] for each in found) == ["blas", "ok"]
    (ok,) = (each for each in found if each["status"] == "ok")
    assert (ok["kernel"], ok["problem"]) == ("test.fine", dict(document))
    assert ok["error"] < 1e-5
    assert trust.is_verified(problem, candidate)


@pytest.mark.filterwarnings("ignore::tmm_core.TmmWarning")  # of what was wrong in tuning
def test_each_fault_is_a_line(fine: FakeKernel, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = FakeKernel("test.wrong", spoil=lambda out: out.nan_to_num(0.0))
    lame = FakeKernel("test.lame", bind_error=OSError("no compiler"))
    dispatch.default_dispatcher().registry.register(plugin(wrong, lame), "more")
    for kernel, m in ((fine, 16), (wrong, 24), (lame, 40), (FakeKernel("test.gone"), 48)):
        record(kernel, m)
    for text in ("gone@0123456789ab", "silu@0123456789ab", "silu(1.0)"):
        other = FakeKernel("test.fine", version=fine.version)
        record(other, 16, epilogue=text)
    lines, found = run(capsys, 1)
    assert {each["status"] for each in found if each["problem"]["epilogue"] != "identity"} == {
        "stale"
    }
    found = [each for each in found if each["problem"]["epilogue"] == "identity"]
    assert {each["kernel"]: each["status"] for each in found} == {
        "test.fine": "ok",
        "test.wrong": "wrong",
        "test.lame": "failed",
        "test.gone": "stale",
    }
    *faults, summary = lines
    assert len(faults) == 2
    (about,) = (line for line in faults if "test.wrong" in line)
    assert about.startswith("24×8×16 float32 nn  test.wrong tile=1  wrong: with NaN and Inf in ")
    (about,) = (line for line in faults if "test.lame" in line)
    assert ": bind raised OSError: no compiler (" in about
    assert summary.endswith(
        "1 verified, 4 for kernels or epilogues that have changed since, 1 wrong, 1 failed"
    )


@pytest.mark.filterwarnings("ignore::tmm_core.TmmWarning")  # of what was wrong in tuning
def test_layers_are_looked_at_where_nothing_hides_them(
    fine: FakeKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    wrong = FakeKernel("test.wrong", spoil=lambda out: out + 1)
    dispatch.default_dispatcher().registry.register(plugin(wrong), "more")
    for m in (24, 40):
        record(wrong, m, tmp_path / "layer")
    own = dispatch.default_dispatcher().store
    [path] = (e.path for e in own.summaries() if e.record.problem["m"] == 40)
    path.unlink()
    assert own.layers == ()
    assert run(capsys, 0)[1][0]["status"] == "blas"
    monkeypatch.setattr(own, "layers", (tmp_path / "layer",))
    found = run(capsys, 1)[1]
    assert [(each["problem"]["m"], each["status"]) for each in found] == [
        (24, "blas"),
        (40, "wrong"),
    ]
    assert "layer" in found[1]["path"]


def test_records_that_nobody_waits_for_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while one of many records is verified ends the command soon."""
    compiled: list[Any] = []

    def compile_record(record: Any, device: torch.device) -> None:
        compiled.append(record)
        time.sleep(0.02)

    monkeypatch.setattr(verify, "_compiled", compile_record)
    monkeypatch.setattr(verify, "compiling_threads", lambda: 1)
    best = SimpleNamespace(kernel="blas", config={})
    entry: Any = SimpleNamespace(record=SimpleNamespace(best=best, problem={}), path=Path("x"))
    documents: Any = verify.verified([entry] * 50, torch.device("cpu"))
    assert next(documents)["status"] == "stale"
    documents.close()
    assert len(compiled) < 25
