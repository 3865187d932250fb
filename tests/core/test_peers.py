"""``benchmarks/peers.py``, on a CPU: torch and tmm alone."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tmm_core.tuning.timing import HostTimer

CPU = torch.device("cpu")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark = importlib.import_module("peers")
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    return benchmark


def test_every_problem_is_timed_by_torch_and_by_tmm(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "peers.json"
    arguments = ["peers", "--small", "--budget", "0.05", "--json", str(output)]
    monkeypatch.setattr(sys, "argv", arguments)
    peers.main()
    found = json.loads(output.read_text("utf-8"))
    assert [(each["what"], each.get("experts")) for each in found] == [
        ("swiglu", None), ("experts", 4), ("product", None),
    ]  # fmt: skip
    for each in found:
        assert list(each["us"]) == list(each["ratios"]) == ["torch", "tmm"]
        assert each["ratios"]["torch"] == 1.0
    assert "experts 4×32×64×128: torch " in capsys.readouterr().out
    assert [found[1][name] for name in "mnk"] == [32, 64, 128]


def test_a_provider_that_fails_or_is_wrong_is_left_out(
    peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    y = torch.randn(4, 4)

    def failing(i: int) -> Any:
        raise NotImplementedError("no kernel")

    calls = {"torch": lambda i: y, "wrong": lambda i: 1.1 * y, "failing": failing}
    calls["right"] = lambda i: 1.001 * y
    found = peers.measure("product", (4, 4, 4), calls, 1, CPU)
    assert list(found["us"]) == ["torch", "right"]
    assert "experts" not in found
    errors = capsys.readouterr().err
    assert "wrong fails: ValueError: differs by 0.1 of the largest element" in errors
    assert "failing fails: NotImplementedError: no kernel" in errors


def test_a_project_that_is_not_installed_is_left_out(
    peers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peers.installed("no_such_project") is None
    assert "no_such_project is left out: ModuleNotFoundError" in capsys.readouterr().err
    assert peers.installed("json") is json


def test_a_provider_that_cannot_be_captured_is_left_out(
    peers: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    y = torch.randn(4, 4)
    calls = {"torch": lambda i: y, "waiting": lambda i: 1.001 * y}
    runs = {name: SimpleNamespace(run=call, graph=object()) for name, call in calls.items()}
    runs["waiting"].graph = None
    timer = HostTimer()
    timer._chains = runs  # type: ignore[attr-defined]
    monkeypatch.setattr(peers, "timer_for", lambda device: timer)
    found = peers.measure("product", (4, 4, 4), calls, 1, CPU)
    assert list(found["us"]) == list(found["ratios"]) == ["torch"]
    assert "waiting cannot be captured" in capsys.readouterr().err
