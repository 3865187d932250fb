"""``benchmarks/pairs.py``, on a CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize("form", ["bf16", "int4"])
def test_both_products_are_timed_apart_and_in_sequence(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    pairs: Any = importlib.import_module("pairs")
    monkeypatch.setattr(pairs, "ROUNDS", 1)
    output = tmp_path / "pairs.json"
    arguments = f"pairs --widths 128x256 --rows 3 --formats {form} --crowded --budget 0.05 --json"
    monkeypatch.setattr(sys, "argv", [*arguments.split(), str(output)])
    from tmm_core.triton import launch

    spread = launch.spread
    pairs.main()
    assert launch.spread is spread
    (found,) = json.loads(output.read_text("utf-8"))
    assert list(found["us"]) == ["torch", "up", "down", "both", "both, crowded"]
    assert (found["format"], found["hidden"], found["between"], found["rows"]) == (
        form,
        128,
        256,
        3,
    )
    assert all(kernel for kernel, _ in found["chosen"].values())
    assert f"{form} 128×256, 3 rows, µs: torch " in capsys.readouterr().out
