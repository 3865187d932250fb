"""Bulk loads hinted in PTX: which, what it takes to have them again, and what a fault costs.

Compiling needs Triton not to be interpreting, so it is done in processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tmm_core.triton.evict_first import hinted

LOAD = (
    "@%p7 cp.async.bulk.tensor.{d}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%r78], [%rd3, {{%r235, %r79}}], [%r77];"
)
STORE = "@%p29 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r222, %r223}], [%r4];"


@pytest.mark.parametrize("dimensions", [2, 3])
def test_loads_are_hinted_and_nothing_else(dimensions: int) -> None:
    load = LOAD.format(d=dimensions)
    out = hinted(f"{load}\n{STORE}\n{load}\nld.global.b32 %r1, [%rd1];")
    lines = out.splitlines()
    assert lines[0] == lines[2]
    assert "complete_tx::bytes.L2::cache_hint [%r78]," in lines[0]
    assert lines[0].endswith("[%r77], 0x12F0000000000000;")
    assert lines[1] == STORE
    assert hinted(out) == out


PROGRAM = """
import json, sys, warnings
sys.path.insert(0, {tests!r})
from test_warp_specialized import KERNEL, problem
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from tmm_core.triton import compile_for, source
from tmm_triton import warp_specialized

assembled = []
make_cubin = CUDABackend.make_cubin
def counted(*args):
    assembled.append(1)
    if {fault!r} and len(assembled) > 1:
        raise RuntimeError("no ptxas")
    return make_cubin(*args)
CUDABackend.make_cubin = counted
asked = problem(64, 4096, 4096)
config = KERNEL.default_config(asked)
assert config.evict_first
of = KERNEL.specialize(asked, config)
src = source(warp_specialized._kernel, of.types, of.constants, of.divisible)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    kernel = compile_for(GPUTarget("cuda", 90, 32), src, **of.options)
ptx = kernel.asm["ptx"]
print(json.dumps(dict(
    assembled=len(assembled), hints=ptx.count("L2::cache_hint"),
    loads=ptx.count("complete_tx::bytes"), loaded=kernel.kernel == kernel.asm["cubin"],
    warnings=[str(w.message) for w in seen],
)))
"""


def compiled(folder: Path, fault: bool = False) -> dict[str, Any]:
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    program = PROGRAM.format(tests=str(Path(__file__).parent), fault=fault)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_a_kernel_is_assembled_twice_once(tmp_path: Path) -> None:
    first = compiled(tmp_path)
    assert first["hints"] == first["loads"] > 0
    assert first["loaded"]
    assert first["assembled"] == 2
    assert compiled(tmp_path) == {**first, "assembled": 0}


def test_without_an_assembler_it_stays_as_it_was(tmp_path: Path) -> None:
    found = compiled(tmp_path, fault=True)
    assert (found["hints"], found["loaded"]) == (0, True)
    (warning,) = found["warnings"]
    assert "no ptxas" in warning
