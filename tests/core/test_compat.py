"""Torch without one of its private names: tmm imports, multiplies and learns, with one warning."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tmm_blas
import tmm_triton
import torch
from tmm_blas import blas

import tmm_core
from tmm_core import Operand, Problem, compat
from tmm_core.epilogues import parse
from tmm_core.spec.device import DeviceFingerprint

#: A process that has torch forks one for each group of names, hides them there, and imports tmm.
PROGRAM = """
import builtins, json, os, sys, warnings
import torch
import torch._dynamo, torch.fx  # which would be imported by each of them
import pluggy, tmm_cache

def outcome(paths):
    hidden = {path.split(".")[-1] for path in paths}

    def without(owner, name, *default):
        # From tmm alone: torch itself uses them.
        if name in hidden and sys._getframe(1).f_globals["__name__"] == "tmm_core.compat":
            return default[0]
        return getattr_(owner, name, *default)

    getattr_, builtins.getattr = builtins.getattr, without
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import tmm_core
        from tmm_core.nn import GatedMLP, convert
    messages = [str(w.message) for w in caught if issubclass(w.category, tmm_core.TmmWarning)]
    a, b = torch.randn(4, 6, requires_grad=True), torch.randn(6, 5, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)

    def close(x, y):
        torch.testing.assert_close(x, y)

    for epilogue, reference in ((None, lambda z: z), ("silu", torch.nn.functional.silu)):
        expected = reference(a @ b + bias)
        y = tmm_core.matmul(a, b, bias=bias, epilogue=epilogue)
        close(y, expected)
        close(torch.autograd.grad(y.sum(), (a, b, bias)), torch.autograd.grad(expected.sum(), (a, b, bias)))
        with torch.no_grad():
            close(tmm_core.matmul(a, b, bias=bias, epilogue=epilogue), expected.detach())
            out = torch.empty(4, 5)
            assert tmm_core.matmul(a, b, bias=bias, epilogue=epilogue, out=out) is out
            close(out, expected.detach())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert tmm_core.matmul(a, b).dtype is torch.bfloat16
    mlp, x = GatedMLP(6, 8), torch.randn(3, 6)
    y = mlp(x)
    z = torch.nn.functional.silu(x @ mlp.gate_proj.weight.t()) * (x @ mlp.up_proj.weight.t())
    close(y, z @ mlp.down_proj.weight.t())
    y.sum().backward()
    assert mlp.up_proj.weight.grad is not None
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh())
    expected = model(x)
    assert convert(model)
    close(model(x), expected)
    return messages

for paths in sys.argv[1:]:
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            messages = outcome(paths.split())
        except BaseException as error:
            messages = repr(error)
        os.write(write, json.dumps([paths, messages]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print(pipe.read(), flush=True)
    os.wait()
"""

#: Names of torch that compat reads at import, on a CPU. The names of a group are removed together.
GROUPS = (
    (
        "torch._C._is_any_autocast_enabled",
        "torch._C._are_functorch_transforms_active",
        "torch._debug_has_internal_overlap",
        "torch._C._storage_Use_Count",
    ),
    (
        "torch._C._len_torch_dispatch_stack",
        "torch._C._get_deterministic_algorithms",
        "torch.autograd.profiler._is_profiler_enabled",
    ),
    (
        "torch._C._len_torch_function_stack",
        "torch._C._ExcludeDispatchKeyGuard",
        "torch.nn.modules.module._has_any_global_hook",
    ),
    ("torch._C._autograd._profiler_enabled", "torch._C._functorch.is_legacy_batchedtensor"),
    (
        "torch._C._get_tracing_state",
        "torch.autograd.function._SingleLevelFunction",
        "torch._functorch.utils.enable_single_level_autograd_function",
    ),
    ("torch._C._functorch.peek_interpreter_stack",),
    ("torch.autograd.forward_ad._current_level",),
    ("torch._C._AutoDispatchBelowAutograd", "torch._C._get_tracing_state"),
    ("torch.utils._python_dispatch._disable_current_modes",),
    ("torch._C._get_fp32_precision_getter",),
)


def test_this_torch_lacks_no_private_name() -> None:
    assert compat.missing == []


@pytest.mark.slow
def test_it_works_without_any_private_name(tmp_path: Path) -> None:
    groups = [" ".join(group) for group in GROUPS]
    environment = {**os.environ, "TMM_CACHE_DIR": str(tmp_path), "TMM_DISABLE_PLUGINS": "triton"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *groups],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcomes = dict(json.loads(line) for line in done.stdout.splitlines())
    assert set(outcomes) == set(groups)
    for group, messages in outcomes.items():
        assert isinstance(messages, list), (group, messages)
        (message,) = messages
        assert all(path in message for path in group.split())


def test_every_name_has_a_test() -> None:
    tree = ast.parse(Path(compat.__file__).read_text())
    queried = {
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "private"
        and isinstance(node.args[0], ast.Constant)
    }
    elsewhere = {  # of GPUs, of exports, of DTensor and of compiled graphs
        "torch._inductor.custom_graph_pass.CustomGraphPass",
        "torch._guards.TracingContext.try_get",
        "torch._C._dynamo.guards._empty_strided_cuda",
        "torch._C._cuda_getDevice",
        "torch._C._cuda_getCurrentRawStream",
        "torch._C._cuda_endAllocateToPool",
        "torch.cuda._sleep",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch.distributed.tensor._op_schema.RuntimeSchemaInfo",
        "torch._C.DispatchKeySet",
    }
    assert queried - elsewhere <= {name for group in GROUPS for name in group}


def excluded(context: Any) -> str:
    with context:
        return str(torch._C._dispatch_tls_local_exclude_set())


def test_guards_without_private_names_exclude_the_same_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert excluded(compat._excluding_autograd()) == excluded(compat.below_autograd())
    usual = compat.without_autocast["cpu"]
    monkeypatch.setattr(compat, "private", lambda path, otherwise: otherwise)
    with torch.autocast("cpu", torch.bfloat16):
        for uncast in (usual, compat._without_autocast("cpu")):
            with uncast():
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_a_tensor_shares_its_storage_with_views() -> None:
    t = torch.ones(4)
    assert compat.holds_storage_alone(t)
    view = t[:2]
    assert not compat.holds_storage_alone(t)
    assert not compat.holds_storage_alone(view)
    del view
    assert compat.holds_storage_alone(t)


def test_the_baseline_without_private_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline then multiplies as for other problems."""
    half, eight = Operand(torch.float16), Operand(torch.float8_e4m3fn)
    gpu = DeviceFingerprint("cuda", "NVIDIA H100", (9, 0), 132, 232448)
    relu = Problem(64, 64, 64, half, half, half, gpu, epilogue=parse("relu"), bias=half.dtype)
    column = replace(eight, layout="col")
    fp8 = Problem(64, 64, 64, eight, column, Operand(torch.bfloat16), gpu)
    assert blas._fusable(relu)
    assert blas._takes_8_bit(fp8)
    monkeypatch.delattr(torch, "_addmm_activation")
    monkeypatch.delattr(torch, "_scaled_mm")
    assert list(blas.Blas().configs(relu)) == [blas.BlasConfig()]
    assert callable(blas.Blas().bind(fp8, blas.BlasConfig()))


#: Files outside compat that use private names. They measure torch itself, keep a GPU busy in a
#: test, or call operators that BLAS uses if this torch has them.
ELSEWHERE = {
    "tmm_core/bench/grouped_baselines.py",
    "tmm_core/bench/providers.py",
    "tmm_core/testing/conformance.py",
    "tmm_blas/blas.py",
    "tmm_blas/grouped_mm.py",
}
PACKAGES = [Path(str(package.__file__)).parent for package in (tmm_core, tmm_blas, tmm_triton)]
FILES = {
    path.relative_to(package.parent).as_posix(): path
    for package in PACKAGES
    for path in sorted(package.rglob("*.py"))
}


@pytest.mark.parametrize("place", FILES)
def test_private_names_of_torch_are_in_compat_alone(place: str) -> None:
    found, path = set(), FILES[place]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("torch")]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        found |= {n for n in names if re.search(r"^torch(\.\w+)*\._(?!_)", n)}
    if place == "tmm_core/compat.py":
        assert found
    elif place not in ELSEWHERE:
        assert not found


def test_a_dtensor_of_another_torch_is_made_by_the_public_constructor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other:
        def __new__(cls, local: Any) -> Any:
            raise AssertionError("not called")

        @staticmethod
        def from_local(local: Any, mesh: Any, placements: Any, **more: Any) -> Any:
            return local, mesh, placements, more

    spec = types.SimpleNamespace(mesh="mesh", placements=("S0",), shape=(2, 3), stride=(3, 1))
    monkeypatch.setattr(compat, "dtensor", lambda: Other)
    local = torch.ones(1, 3)
    more = {"run_check": False, "shape": (2, 3), "stride": (3, 1)}
    assert compat.dtensor_of(local, spec) == (local, "mesh", ("S0",), more)
