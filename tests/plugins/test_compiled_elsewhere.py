"""``bind`` finds the kernels that a worker process compiled: the same builds, with the same keys.

Triton cannot compile in a process that interprets, so another process compiles.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tmm_triton.plugin import KERNELS
from tmm_triton.triton_kernel import Built
from triton.backends.compiler import GPUTarget

from tmm_core import Groups, Operand, Problem, Scale
from tmm_core.epilogues import parse
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.triton import Launch, launch, target_of

H100 = DeviceFingerprint("cuda", "NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, cuda="12.8")
MI300 = DeviceFingerprint("cuda", "AMD Instinct MI300X", (9, 4), cuda="hip-6.4", arch="gfx942")
ROW = Operand(torch.bfloat16)
LOOSE = Operand(torch.bfloat16, aligned=False)
INT4 = Operand(torch.uint8, "col", format="int4", scale=Scale((1, 128), torch.bfloat16))
LARGE = Problem(4096, 4096, 4096, ROW, ROW, ROW, H100)
PROBLEMS = {
    "large": replace(LARGE, epilogue=parse("gelu_tanh+softcap(30)"), bias=torch.bfloat16),
    "decode": replace(LARGE, m=16),
    "skinny": replace(LARGE, m=2, b=Operand(torch.bfloat16, "col")),
    "packed": replace(LARGE, m=2, b=INT4),
    "packed_rows": replace(LARGE, m=512, b=INT4),
    "packed_gathered": replace(LARGE, b=INT4, groups=Groups(8, "m", a_index=torch.int32)),
    "large_k": replace(LARGE, m=256, n=256, k=65536, residual=ROW, scaled=True),
    "gated": replace(LARGE, m=2048, n=14336, epilogue=parse("swiglu")),
    "unaligned": replace(LARGE, m=4097, n=4097, k=4097, a=LOOSE, b=LOOSE, out=LOOSE),
    "batched": replace(LARGE, m=512, n=512, k=512, batch=8),
    "grouped": replace(LARGE, groups=Groups(8, "m")),
    "gathered": replace(LARGE, groups=Groups(8, "m", a_index=torch.int32)),
}
#: The numbers of Triton kernels in one launch, if other than one.
LAUNCHES = {
    "triton.split_k": {1, 2},
    "triton.warp_specialized": {1, 2},
    "triton.realigned": {2},
    "triton.gathered": {2},
    "triton.gathered_mixed_input": {2},
    "triton.mixed_input": {1, 2},
}


def kernels() -> Iterator[Built[Any]]:
    for module, name in KERNELS.values():
        yield getattr(importlib.import_module(f"tmm_triton.{module}"), name)()


def served(kernel: Built[Any]) -> Iterator[Problem]:
    for problem in PROBLEMS.values():
        # A machine without a GPU has no driver either; compiling needs none.
        if all("driver" in reason for reason in kernel.reasons_against(problem)):
            yield problem


def described(fn: Any, types: Any, constants: Any, divisible: Any, options: Any) -> Any:
    named = {name: getattr(value, "__name__", value) for name, value in constants.items()}
    return fn.__name__, list(types.items()), named, dict(divisible or {}), dict(options)


@pytest.mark.parametrize("kernel", list(kernels()), ids=lambda kernel: kernel.name)
@pytest.mark.slow(quick=6)
def test_builds_equal_the_compilations_of_bind(
    kernel: Built[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[Any] = []
    initialise = Launch.__init__

    def recorded(
        self: Launch, fn: Any, types: Mapping[str, str], constants: Any, *,
        device: torch.device, divisible: Any = None, blocks: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        bound.append((described(fn, types, constants, divisible, options), blocks))
        initialise(self, fn, types, constants, device=device, divisible=divisible, **options)

    monkeypatch.setattr(Launch, "__init__", recorded)
    # Counters are memory of a GPU.
    monkeypatch.setattr("tmm_triton.operands.Counters", lambda count: lambda: None)
    counts = set()
    for problem in served(kernel):
        for config in kernel.configs(problem):
            bound.clear()
            kernel.bind(problem, config)
            builds = [
                (
                    described(b.fn, b.types, b.constants, b.divisible, b.options),
                    math.prod(b.grid) if b.options.get("launch_pdl") else None,
                )
                for b in kernel.builds(problem, config)
            ]
            assert sorted(map(repr, builds)) == sorted(map(repr, bound)), (
                str(problem),
                str(config),
            )
            counts.add(len(builds))
    assert counts == LAUNCHES.get(kernel.name, {1})


def test_the_target_is_the_drivers() -> None:
    assert target_of(H100) == GPUTarget("cuda", 90, 32)
    assert target_of(replace(H100, capability=(12, 1))) == GPUTarget("cuda", 121, 32)
    assert target_of(MI300) == GPUTarget("hip", "gfx942", 64)
    assert target_of(replace(MI300, arch="gfx1100")) == GPUTarget("hip", "gfx1100", 32)
    # Records may name no architecture, and a CPU has none.
    assert target_of(replace(MI300, arch="")) is None
    assert target_of(DeviceFingerprint("cpu", "cpu")) is None
    assert target_of(DeviceFingerprint("cpu", "cpu", interpreted=True)) is None


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
import json, os, time
import torch, triton
from triton.backends.nvidia.compiler import CUDABackend
from test_compiled_elsewhere import PROBLEMS, kernels
from tmm_core.tuning.compile_pool import Compilers
from tmm_core.spec.kernel import Candidate
from tmm_core.triton import compile_for, source, target_of

jobs = []
for name, problem in (("warp_specialized", "decode"), ("split_k", "large_k"),
                      ("warp_specialized", "large"), ("realigned", "unaligned")):
    (kernel,) = (k for k in kernels() if k.name == "triton." + name)
    config = next(c for c in kernel.configs(PROBLEMS[problem])
                  if name != "split_k" or len(kernel.builds(PROBLEMS[problem], c)) > 1)
    jobs.append((kernel, PROBLEMS[problem], config))
assert jobs[0][2].evict_first

compilers = Compilers(workers=2)
futures = [compilers.submit(problem, Candidate(k, config)) for k, problem, config in jobs]
errors = [repr(future.exception()) for future in futures]
compilers.close()
assert not torch.cuda.is_initialized()

triton_asked, assembled = [], []
compile, make_cubin = triton.compile, CUDABackend.make_cubin
triton.compile = lambda *a, **k: (triton_asked.append(1), compile(*a, **k))[1]
CUDABackend.make_cubin = lambda *a: (assembled.append(1), make_cubin(*a))[1]

def all_compiled():
    found = []
    for kernel, problem, config in jobs:
        for build in kernel.builds(problem, config):
            src = source(build.fn, build.types, build.constants, build.divisible)
            found.append(compile_for(target_of(problem.device), src, **build.options))
    return found

found = all_compiled()
counts = len(triton_asked), len(assembled)
os.environ["TRITON_CACHE_DIR"] += "-another"
here = all_compiled()
print(json.dumps(dict(
    errors=errors, asked=counts[0], assembled=counts[1], builds=len(found),
    anew=len(assembled) - counts[1],
    alike=[a.asm["ptx"] == b.asm["ptx"] and a.hash == b.hash for a, b in zip(found, here)],
    hints=found[0].asm["ptx"].count("L2::cache_hint"),
)))
"""


@pytest.mark.slow
def test_kernels_that_a_worker_compiled_are_found(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment |= {
        "TRITON_CACHE_DIR": str(tmp_path / "triton"), "TMM_CACHE_DIR": str(tmp_path / "tmm"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    program = PROGRAM.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-"], input=program, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["errors"] == ["None"] * 4
    assert report["builds"] == 6
    # Triton finds the workers' kernels, so nothing is assembled again.
    assert (report["asked"], report["assembled"]) == (6, 0)
    assert report["alike"] == [True] * 6
    assert report["anew"] >= 6
    assert report["hints"] > 0


ORDERS = """
import json, os, random, sys
from tmm_core.epilogues import parse
import torch
from tmm_core.triton import Launch, device_function, source
from tmm_triton.naive import naive_kernel

names = ["sigmoid", "silu", "gelu_tanh", "tanh+silu", "gelu", "geglu+softcap(30)"]

def compiling(self, src, *_):
    raise LookupError(src.hash())

Launch._compile = compiling

def key(name, launched):
    constants = {n: None for n in naive_kernel.arg_names}
    constants["EPILOGUE"] = device_function(parse(name))
    if not launched:
        return source(naive_kernel, {}, constants).hash()
    try:
        Launch(naive_kernel, {}, constants, device=torch.device("cuda", 0))
    except LookupError as error:
        return str(error)

for order, launched in ((names, False), (names[::-1], False), (names, True), (names[::-1], True)):
    if os.fork() == 0:
        # Memory that becomes free in some order, so that addresses are in another one.
        dicts = [{"address": i} for i in range(5000)]
        random.shuffle(dicts)
        while dicts:
            dicts.pop()
        print(json.dumps(dict(sorted((name, key(name, launched)) for name in order))), flush=True)
        os._exit(0)
    os.wait()
"""


def test_the_past_of_a_process_does_not_change_a_key() -> None:
    """Triton's hash of a function depends on which callees were hashed before, and on addresses. A
    launch looks its kernel up by this hash."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", ORDERS], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    one, *others = map(json.loads, done.stdout.splitlines())
    assert others == [one] * 3
    assert len(set(one.values())) == len(one) == 6


def loading_at_a_time(monkeypatch: pytest.MonkeyPatch, *signatures: dict[str, str]) -> int:
    """The largest number of kernels with these signatures that load at the same time."""
    loading: list[int] = []
    most = [0]

    class Loaded:
        metadata = SimpleNamespace(target=SimpleNamespace(backend="hip"))

        def __init__(self, signature: dict[str, str]) -> None:
            self.src = SimpleNamespace(signature=signature)

        def _init_handles(self) -> None:
            loading.append(1)
            deadline = time.monotonic() + 0.5
            while time.monotonic() < deadline and len(loading) < len(signatures):
                time.sleep(0.01)
            most[0] = max(most[0], len(loading))
            loading.pop()

    monkeypatch.setattr(launch, "compile_for", lambda target, src, **options: Loaded(src))
    monkeypatch.setattr(launch, "_target", lambda index: None)
    monkeypatch.setattr(launch, "_launcher_class", lambda: object)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    one = object.__new__(Launch)
    threads = [
        threading.Thread(target=one._compile, args=(signature, 0, (), {}))
        for signature in signatures
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return most[0]


def test_only_kernels_with_one_launcher_load_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton 3.6 compiles a C launcher for each signature. Shapes of boxes do not count."""
    boxes = [{"a": f"tensordesc<bf16[{rows}, 64],x>", "M": "i32"} for rows in (64, 128)]
    assert loading_at_a_time(monkeypatch, *boxes) == 1
    assert loading_at_a_time(monkeypatch, boxes[0], {**boxes[1], "K": "i32"}) == 2
