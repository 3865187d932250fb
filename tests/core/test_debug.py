"""Looking into some programs of a grid, and at tensors before a launch."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tmm_core.spec.device import interpreting
from tmm_core.testing import breakpoint_if, print_if
from tmm_core.testing.debug import holds, parse_condition

interpreted = pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted here")


@triton.jit
def mark(out_ptr, CONDITION: tl.constexpr):
    where = (tl.program_id(0) * 3 + tl.program_id(1)) * 2 + tl.program_id(2)
    tl.store(out_ptr + where, holds(CONDITION).to(tl.int32))


@triton.jit
def show(x_ptr, CONDITION: tl.constexpr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    print_if("x", CONDITION, x, tl.program_id(0), BLOCK)


@triton.jit
def show_four(x_ptr, FIRST: tl.constexpr):
    print_if("y", "", FIRST, FIRST + 1, FIRST + 2, FIRST + 3)


@triton.jit
def stop(x_ptr, CONDITION: tl.constexpr):
    here = tl.program_id(0)
    breakpoint_if(CONDITION)
    tl.store(x_ptr + here, 1)


CONDITIONS: dict[str, Any] = {
    "0": lambda x, y, z: x == 0,
    "=1": lambda x, y, z: x == 1,
    "=0,>1": lambda x, y, z: x == 0 and y > 1,
    "0,*,!=1": lambda x, y, z: x == 0 and z != 1,
    "": lambda x, y, z: True,
    "*": lambda x, y, z: True,
    "*,*,*": lambda x, y, z: True,
    " < 2 , >= 1 , <= 0 ": lambda x, y, z: x < 2 and y >= 1 and z <= 0,
    ">7": lambda x, y, z: False,
    "!=0,!=0,!=0": lambda x, y, z: x != 0 and y != 0 and z != 0,
}


@interpreted
@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_selects_programs(condition: str) -> None:
    out = torch.full((4, 3, 2), -1, dtype=torch.int32)
    mark[(4, 3, 2)](out, condition)
    wanted = CONDITIONS[condition]
    assert out.tolist() == [
        [[int(wanted(x, y, z)) for z in range(2)] for y in range(3)] for x in range(4)
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (",", "'', for program_id(0), is none of"),
        ("0,,1", "'', for program_id(1), is none of"),
        ("0,1,2,3", "has 4 terms; a grid has three axes"),
        ("x", "'x', for program_id(0)"),
        ("0,=x", "'=x', for program_id(1)"),
        ("=-1", "'=-1'"),
        ("==1", "'==1'"),
        ("1.0", "'1.0'"),
        ("=*", "'=*'"),
        ("<", "'<'"),
        ("0 1", "'0 1'"),
        ("²", "'²', for program_id(0)"),
        ("٣", "'٣', for program_id(0)"),
        ("1;2", "'1;2'"),
    ],
)
def test_a_malformed_condition_names_the_invalid_term(text: str, complaint: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_condition(text)
    assert complaint in str(caught.value)
    assert repr(text) in str(caught.value)


@interpreted
def test_print_if_prints_in_the_named_programs_only(capsys: pytest.CaptureFixture[str]) -> None:
    show[(4,)](torch.arange(16), ">=2", 4)
    show[(1,)](torch.tensor([5]), "", 1)
    show[(2,)](torch.tensor([1.5, -2, 3, 0.25]).bfloat16(), "1", 2)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [" ".join(words) for words in lines] == [
        "(2, 0, 0) x: [ 8 9 10 11]", "(2, 0, 0) x: [2]", "(2, 0, 0) x: [4]",
        "(3, 0, 0) x: [12 13 14 15]", "(3, 0, 0) x: [3]", "(3, 0, 0) x: [4]",
        "(0, 0, 0) x: [5]", "(0, 0, 0) x: [0]", "(0, 0, 0) x: [1]",
        "(1, 0, 0) x: [3. 0.25]", "(1, 0, 0) x: [1]", "(1, 0, 0) x: [2]",
    ]  # fmt: skip


@interpreted
def test_print_if_prints_up_to_four_values(capsys: pytest.CaptureFixture[str]) -> None:
    show_four[(1,)](torch.zeros(1), 5)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [f"(0, 0, 0) y: [{value}]" for value in (5, 6, 7, 8)]


@interpreted
def test_breakpoint_if_calls_the_breakpoint_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stops.append(1))
    x = torch.zeros(4)
    stop[(4,)](x, ">1")
    assert len(stops) == 2
    assert x.tolist() == [1, 1, 1, 1]


@interpreted
def test_breakpoint_if_stops_in_the_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setattr(sys, "stdin", io.StringIO("p here\nc\n"))
    stop[(4,)](torch.zeros(4), "3")
    out = capsys.readouterr().out
    # Until Python 3.13 the debugger stops before the next line.
    line = "tl.store(x_ptr + here, 1)" if sys.version_info < (3, 13) else "breakpoint_if(CONDITION)"
    assert f"-> {line}" in out
    assert "array([3]" in out


@interpreted
def test_a_malformed_condition_fails_the_launch() -> None:
    with pytest.raises(Exception, match=r"0;1.*for program_id\(0\), is none of 3, =3, !=3"):
        show[(1,)](torch.zeros(4), "0;1", 4)


@pytest.mark.slow
def test_which_conditions_compile(tmp_path: Path) -> None:
    """Needs its own process: whether Triton interprets is decided when it is imported."""
    script = f"""
    import traceback
    from triton.backends.compiler import GPUTarget
    from tmm_core.triton import compile_for, source
    from {Path(__file__).stem} import show, stop

    def compiled(fn, **constants):
        src = source(fn, {{"x_ptr": "*bf16"}}, constants)
        try:
            return compile_for(GPUTarget("cuda", 90, 32), src).asm["ttir"]
        except Exception:
            return traceback.format_exc()

    print(compiled(show, CONDITION="0,>1", BLOCK=16), end="\f")
    print(compiled(show, CONDITION="0;1", BLOCK=16), end="\f")
    print(compiled(stop, CONDITION="0"))
    """
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    printing, malformed, stopping = done.stdout.split("\f")
    before, _, inside = printing.partition("scf.if")
    assert "tt.print" not in before
    assert inside.partition("tt.return")[0].count("tt.print") == 3
    assert "'0;1', for program_id(0), is none of 3, =3, !=3" in malformed
    assert "breakpoint_if needs Triton's interpreter: set TRITON_INTERPRET=1" in stopping


@pytest.mark.slow
def test_importing_the_package_imports_neither_triton_nor_pytest(tmp_path: Path) -> None:
    script = "import sys, tmm_core.testing"
    script += "; print([m for m in ('triton', 'pytest') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]"


def test_the_package_has_all_listed_names() -> None:
    from tmm_core import testing

    for name in testing.__all__:
        assert getattr(testing, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'helpers'"):
        testing.helpers  # noqa: B018
