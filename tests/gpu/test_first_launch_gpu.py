"""A fault on the GPU costs only the candidate that made it, because it runs in another process's
CUDA context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import imported

import tmm_core
from tmm_core.spec.kernel import Candidate
from tmm_core.tuning.first_launch import FirstLaunches

pytestmark = pytest.mark.gpu

PLUGIN = """
import torch
from fakes import FakeKernel, Faulty, plugin

def launched(tile):
    def launch(right, *arguments):
        if tile == 2:
            torch._assert_async(torch.zeros((), device="cuda"))
        return right(*arguments)
    return launch

class Launched(FakeKernel):
    def bind(self, problem, config):
        return Faulty(launched(config.tile), self.name).bind(problem, config)

kernel = Launched("asserts.one", tiles=(1, 2))
hooks = plugin(kernel)
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TMM_PLUGINS", "blas,asserts")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with imported(tmp_path / "site", "asserts", PLUGIN) as module:
        yield module.kernel


def test_a_fault_of_the_gpu_is_not_charged_to_the_next_candidate(kernel: Any) -> None:
    a = torch.ones(64, 64, device="cuda")
    problem = tmm_core.problem(a, a)
    config = type(kernel.default_config(problem))
    with contextlib.closing(FirstLaunches(torch.device("cuda", 0))) as first:
        faults = [
            first.failure(problem, Candidate(kernel, config(tile=tile)), 1 << 28)
            for tile in (1, 2, 1, 2, 1)
        ]
    assert [fault is None for fault in faults] == [True, False, True, False, True]
    assert all("assert" in str(fault) for fault in faults if fault)
    (a @ a).sum().item()  # the context of this process still works
