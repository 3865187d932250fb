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
import json, os, sys, warnings
sys.path.insert(0, {tests!r})
from test_warp_specialized import KERNEL, problem
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from tmm_core.triton import compile_for, evict_first, source
from tmm_triton import warp_specialized
from tmm_triton.hopper_kernel import warp_specialized_kernel

assembled, theirs, hook, load = [], [], evict_first._HOOK, evict_first._LOAD
make_cubin = CUDABackend.make_cubin
CUDABackend.make_cubin = lambda *args: assembled.append(1) or make_cubin(*args)
asked = problem(64, 4096, 4096)
config = KERNEL.default_config(asked)
assert config.evict_first
of = KERNEL.specialize(asked, config)
found = {{}}
for fault in "", "kept", "no hook", "other PTX", "theirs":
    assembled.clear()
    knobs.cache.dir = os.path.join({folder!r}, "" if fault == "kept" else fault)
    evict_first._HOOK = "looked for in vain" if fault == "no hook" else hook
    evict_first._LOAD = evict_first.re.compile("(bulk)( loads);") if fault == "other PTX" else load
    if fault == "theirs":
        knobs.runtime.add_stages_inspection_hook = lambda *a: theirs.append(len(a)) or ("k", "h")
    src = source(warp_specialized_kernel, of.types, of.constants, of.divisible)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        kernel = compile_for(GPUTarget("cuda", 90, 32), src, **of.options)
    ptx = kernel.asm["ptx"]
    found[fault] = dict(
        assembled=len(assembled), hints=ptx.count("L2::cache_hint"),
        loads=ptx.count("complete_tx::bytes"), warnings=[str(w.message) for w in seen],
        hook=knobs.runtime.add_stages_inspection_hook is not None, theirs=theirs[-1:],
    )
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each case gave; one process for all, which takes seconds to start."""
    folder = tmp_path_factory.mktemp("evict_first")
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TMM_CACHE_DIR": str(folder / "tmm"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    program = PROGRAM.format(tests=str(Path(__file__).parent), folder=str(folder))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_kernel_is_assembled_once_with_its_hints(found: Any) -> None:
    first = found[""]
    assert first["hints"] == first["loads"] > 0
    assert (first["assembled"], first["warnings"], first["hook"]) == (1, [], False)
    assert found["kept"] == {**first, "assembled": 0}


@pytest.mark.parametrize(
    ("fault", "says"), [("no hook", "inspection hook"), ("other PTX", "no bulk")]
)
def test_without_a_way_to_hint_it_stays_as_it_was(found: Any, fault: str, says: str) -> None:
    case = found[fault]
    assert (case["hints"], case["assembled"]) == (0, 1)
    (warning,) = case["warnings"]
    assert says in warning


def test_another_hook_is_called_too_and_kept(found: Any) -> None:
    case = found["theirs"]
    assert case["hints"] == case["loads"] > 0
    assert case["theirs"] == [5]
    assert case["hook"]
