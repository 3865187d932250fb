"""The output of `make demo`."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeKernel, plugin

from tmm_core import dispatch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo")


def run(folder: Path) -> tuple[int, str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TMPDIR"] = str(folder)
    command = [sys.executable, str(EXAMPLES / "demo.py")]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a CPU does")
def test_on_a_cpu_the_interpreted_kernels_are_run_verified_and_tuned(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "temporary").mkdir()
    status, text = run(tmp_path / "temporary")
    assert status == 0, text
    assert "answered by blas; largest difference to F.silu(x @ w): " in text
    lines = text.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 100
    kernels = re.findall(r"^(triton\.\S+) +right +([0-9.e+-]+)", text, re.MULTILINE)
    assert lines[-1].startswith("triton.split_k ")  # it ends with the table
    assert {name for name, _ in kernels} >= {"triton.naive", "triton.grouped", "triton.split_k"}
    assert all(float(error) < 1.6e-2 for _, error in kernels)
    assert re.search(r"^\d+ candidates in ", text, re.MULTILINE)
    # `tmm-cache show` lists the record and no shipped one.
    assert "\nown records of cpu-interpreted, environment " in text
    # No file stays behind, neither next to the user's own records nor among them.
    assert [each.name for each in tmp_path.iterdir()] == ["temporary"]
    assert not [each for each in (tmp_path / "temporary").iterdir() if "tmm" in each.name]


def test_the_users_records_are_untouched_also_after_an_error(demo: Any) -> None:
    own = os.environ["TMM_CACHE_DIR"]
    context = demo.temporary_records()
    context.__enter__()
    folder = dispatch.default_dispatcher().store.root
    assert folder.is_dir()
    assert str(folder) != own
    assert not context.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)  # it goes on
    assert not folder.exists()
    assert str(dispatch.default_dispatcher().store.root) == own == os.environ["TMM_CACHE_DIR"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a CPU does")
def test_without_triton_it_says_so(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    real = demo.importlib.util.find_spec
    monkeypatch.setattr(
        demo.importlib.util, "find_spec", lambda name: None if name == "triton" else real(name)
    )
    assert demo.main() == 0
    text = capsys.readouterr().out
    assert "The Triton kernels are not shown: triton not installed." in text
    assert "largest difference to F.silu(x @ w): 0" in text


def test_a_wrong_kernel_is_called_wrong(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels = (FakeKernel("fake.wrong", spoil=lambda out: out * 1.5), FakeKernel("fake.right"))
    dispatch.default_dispatcher().registry.register(plugin(*kernels), "fakes")
    assert demo.interpreted() == 1
    text = capsys.readouterr().out
    assert re.search(r"^fake\.wrong +WRONG +\d", text, re.MULTILINE)
    assert re.search(r"^fake\.right +right +\d", text, re.MULTILINE)


@pytest.mark.slow
def test_on_a_gpu_torch_is_compared_with_in_temporary_records(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs on small problems of a CPU."""
    monkeypatch.setenv("TMM_PLUGINS", "blas")
    with demo.temporary_records():
        assert demo.on_gpu() == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "torch.matmul" in line]
    assert len(rows) >= 4
    assert all(re.search(r" \d\.\d{3}× +\S+$", row) for row in rows)


@pytest.mark.gpu
@pytest.mark.slow  # two minutes, and more beside other processes
def test_on_a_gpu_problems_of_each_class_are_compared(tmp_path: Path) -> None:
    status, text = run(tmp_path)
    assert status == 0, text
    assert any("torch.matmul" in line for line in text.splitlines())
