"""The meaning of racecheck's reports on the Hopper kernel.

Racecheck does not follow bulk copies. All its reports concern the code by which Triton starts
partitions.
"""

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
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    folder = tmp_path_factory.mktemp("racecheck")
    try:
        return {name: RUN.build(folder, name) for name in RUN.PROGRAMS}
    except RUN.UnavailableError as error:
        pytest.skip(str(error))


def judged(program: Path, *variant: str, tool: str = "racecheck") -> Any:
    try:
        return RUN.judge(program, variant, tool)
    except RUN.UnavailableError as error:
        pytest.skip(str(error))


def test_the_tool_sees_reads_by_threads(programs: dict[str, Path]) -> None:
    assert judged(programs["staging"], "plain", "named", "none").reports == 0
    assert judged(programs["staging"], "plain", "named", "barrier").reports > 0


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_the_protocols_are_right(programs: dict[str, Path], tool: str) -> None:
    for name, *variant in (("staging", "tensor", "named"), ("dispatch", "sync", "two")):
        verdict = judged(programs[name], *variant, "none", tool=tool)
        assert verdict.reports == 0, verdict.output
        assert verdict.right


@pytest.mark.parametrize("copy", ["bulk", "tensor"])
@pytest.mark.parametrize("fault", ["barrier", "wait"])
def test_the_tool_does_not_see_reads_by_bulk_copies(
    programs: dict[str, Path], copy: str, fault: str
) -> None:
    """Without the barrier the copy is mostly wrong, and the tool reports nothing (13.0, H100).
    If this test fails, the tool was repaired, and its reports about bulk copies are valid."""
    program = programs["staging"]
    assert judged(program, copy, "named", fault).reports == 0, "racecheck follows bulk copies now"
    assert judged(program, copy, "named", "none").reports == 0


def test_the_tool_understands_the_barrier_of_the_dispatch_alone(programs: dict[str, Path]) -> None:
    assert judged(programs["dispatch"], "sync", "two", "none").reports == 0
    assert judged(programs["dispatch"], "sync", "two", "barrier").reports > 0


def test_the_tool_does_not_understand_two_barriers(programs: dict[str, Path]) -> None:
    """If the first warps also wait for one another, as in Triton's code, the tool reports races of
    a right protocol: 39 reports on an H200. If this test fails, the tool was repaired."""
    verdict = judged(programs["dispatch"], "sync", "beside", "none")
    assert verdict.right
    assert verdict.reports > 0, "racecheck knows two barriers now"


@pytest.mark.parametrize("config", RUN.CONFIGS)
def test_all_reports_on_the_kernel_concern_tritons_dispatch(
    programs: dict[str, Path], config: int
) -> None:
    try:
        _, _, others = RUN.hazards(config)
    except RUN.UnavailableError as error:
        pytest.skip(str(error))
    assert not others, [hex(address) for address in others[:8]]
