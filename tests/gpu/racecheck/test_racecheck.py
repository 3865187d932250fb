"""What racecheck knows of staging buffers that a bulk copy reads: nothing, neither good nor bad."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu


def _load() -> Any:
    path = Path(__file__).parent / "run.py"
    spec = importlib.util.spec_from_file_location("racecheck_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["racecheck_run"] = module
    spec.loader.exec_module(module)
    return module


RUN = _load()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    try:
        built: Path = RUN.build(tmp_path_factory.mktemp("racecheck"))
    except RUN.UnavailableError as error:
        pytest.skip(str(error))
    return built


def judged(program: Path, copy: str, fault: str, tool: str = "racecheck") -> Any:
    try:
        return RUN.judge(program, (copy, "named", fault), tool)
    except RUN.UnavailableError as error:
        pytest.skip(str(error))


def test_the_tool_knows_reads_that_threads_make(program: Path) -> None:
    assert judged(program, "plain", "none").reports == 0
    assert judged(program, "plain", "barrier").reports > 0


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_the_protocol_is_right(program: Path, tool: str) -> None:
    verdict = judged(program, "tensor", "none", tool)
    assert verdict.reports == 0, verdict.output
    assert verdict.right


@pytest.mark.parametrize("copy", ["bulk", "tensor"])
@pytest.mark.parametrize("fault", ["barrier", "wait"])
def test_the_tool_does_not_see_what_a_bulk_copy_reads(program: Path, copy: str, fault: str) -> None:
    """Fails when the tool is mended: then a report about the kernel's bulk copies means something.
    Without the barrier what is copied is wrong in most runs, and nothing is said (13.0, H100)."""
    assert judged(program, copy, fault).reports == 0, "racecheck follows bulk copies now"
    assert judged(program, copy, "none").reports == 0
