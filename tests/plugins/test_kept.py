"""Compiled kernels found again: by the key that Triton makes, or by Triton itself.

Compiling needs Triton not to be interpreting, so it is done in processes of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

PROGRAM = """
import json, sys
import triton, triton.language as tl
from tmm_core.triton import kept, launch, source
from triton.backends.compiler import GPUTarget
import program_kernel

asked = []
compile = triton.compile
triton.compile = lambda *a, **k: (asked.append(1), compile(*a, **k))[1]
kept._SETTLED = float(sys.argv[3]) if len(sys.argv) > 3 else kept._SETTLED
src = source(program_kernel.add, {"p": "*fp32", "n": "i32"}, {"C": int(sys.argv[1])}, {"p": 16})
options = json.loads(sys.argv[2])
compiled = kept.compile_kept(src, GPUTarget("cuda", 90, 32), options)
found = len(asked)
other = compile(src, target=GPUTarget("cuda", 90, 32), options=options)
assert (compiled.hash, compiled.kernel) == (other.hash, other.kernel)
reduced = launch._without_constants(src)
assert list(reduced.signature) == ["p", "n"] and list(src.signature) == ["p", "n", "C"]
print(json.dumps([found, compiled.hash]))
"""
KERNEL = """
import triton, triton.language as tl

@triton.jit
def inner(x):
    return x + 1

@triton.jit
def add(p, n, C: tl.constexpr):
    tl.store(p + n, inner(tl.load(p + n)) * C)
"""


class Processes:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernel = folder / "program_kernel.py"
        self.kernel.write_text(KERNEL)
        self.notes = folder / "tmm" / "notes"

    def __call__(self, constant: int = 3, options: Any = None, *more: str, **variables: str) -> Any:
        """How often Triton was asked, and the key."""
        path = os.pathsep.join([str(self.folder), os.environ.get("PYTHONPATH", ""), *sys.path])
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
        environment |= {
            "TMM_CACHE_DIR": str(self.folder / "tmm"), "PYTHONPATH": path,
            "TRITON_CACHE_DIR": str(self.folder / "triton"), **variables,
        }  # fmt: skip
        arguments = [str(constant), json.dumps(options or {"num_warps": 4}), *more]
        command = [sys.executable, "-c", PROGRAM, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path)


def test_the_second_process_does_not_ask_triton(processes: Processes) -> None:
    asked, key = processes()
    assert asked == 1
    assert processes() == [0, key]
    # What decides the code decides the key, and Triton makes it.
    keys = {key}
    for constant, warps in ((4, 4), (3, 8)):
        asked, other = processes(constant, {"num_warps": warps})
        assert asked == 1
        keys.add(other)
    processes.kernel.write_text(KERNEL.replace("x + 1", "x + 2"))
    asked, changed = processes()
    assert asked == 1
    assert len(keys | {changed}) == 4
    processes.kernel.write_text(KERNEL)
    assert processes() == [0, key]


def test_notes_that_are_wrong_or_gone_cost_time(processes: Processes) -> None:
    _, key = processes()
    (path,) = processes.notes.iterdir()
    right = path.read_text()
    lines = [json.loads(line) for line in right.split("\n") if line]
    assert {about for about, _ in lines} == {"triton_key", "backend 90"}
    wrong = "".join(f"\n{json.dumps([about, 'of another Triton'])}" for about, _ in lines)
    for text in ("{", wrong, right.replace("backend 90", "backend 80")):
        path.write_text(text)
        assert processes() == [1, key]
    assert processes() == [0, key]
    shutil.rmtree(processes.folder / "triton")
    assert processes() == [1, key]


def test_what_is_out_of_the_ordinary_is_tritons(processes: Processes) -> None:
    _, key = processes()
    assert processes(3, None, TRITON_ALWAYS_COMPILE="1") == [1, key]
    assert processes(3, None, TRITON_KERNEL_DUMP="1", TRITON_DUMP_DIR=str(processes.folder))[0] == 1
    assert processes(3, None, DISABLE_LLVM_OPT="1")[1] != key
    # Files that changed a moment ago may change again without another time.
    assert processes(3, None, "1e12") == [1, key]
