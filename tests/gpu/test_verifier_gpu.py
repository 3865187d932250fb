"""Tests verification on a GPU: real kernels pass it, within its limits of memory and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import ON_8_BIT_FLOATS, with_scales, without_scales

from tmm_core import Problem, dispatch
from tmm_core.epilogues import BUILTIN, parse
from tmm_core.spec.device import fingerprint
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.operand import Operand
from tmm_core.verify import compare, random_inputs
from tmm_core.verify.data_sets import default_limit
from tmm_core.verify.verifier import Verifier
from tmm_core.verify.ways_of_use import WaysOfUse

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = (Operand(d) for d in (torch.bfloat16, torch.float16, torch.float32))
WEIGHT = Operand(torch.bfloat16, "col")


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def problem(m: int, n: int, k: int, **fields: Any) -> Problem:
    fields = {"a": BF16, "b": WEIGHT, "out": BF16, **fields}
    made = Problem(m=m, n=n, k=k, device=fingerprint(device()), **without_scales(fields))
    return with_scales(made, fields)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "square": lambda: problem(1024, 1024, 1024),
    "decode": lambda: problem(16, 4096, 4096),
    "one row": lambda: problem(1, 4096, 4096),
    "odd": lambda: problem(50, 4096, 1024),
    "large K": lambda: problem(128, 128, 16384),
    "layer": lambda: problem(
        300, 1024, 512, bias=torch.bfloat16, residual=BF16, epilogue=parse("gelu")
    ),
    "batch": lambda: problem(100, 304, 304, batch=12, b=BF16),
    "unaligned": lambda: problem(
        100, 301, 303, a=Operand(torch.bfloat16, aligned=False),
        b=Operand(torch.bfloat16, aligned=False), out=Operand(torch.bfloat16, aligned=False),
    ),
    "given out": lambda: problem(256, 256, 256, out=Operand(torch.bfloat16, "col")),
    "fp16": lambda: problem(512, 512, 512, a=FP16, b=FP16, out=FP16),
    "fp32": lambda: problem(256, 256, 256, a=FP32, b=FP32, out=FP32),
    "tf32": lambda: problem(256, 256, 256, a=FP32, b=FP32, out=FP32, tf32=True),
    "e4m3": lambda: problem(
        256, 512, 512, a=Operand(torch.float8_e4m3fn), b=Operand(torch.float8_e4m3fn, "col"),
        scales=("row", "row"),
    ),
    "e5m2": lambda: problem(
        256, 512, 512, a=Operand(torch.float8_e5m2), b=Operand(torch.float8_e4m3fn, "col"),
        scales=("tensor", "tensor"),
    ),
    **{
        name: lambda name=name: problem(128, 256, 256, epilogue=parse(name)) for name in BUILTIN
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_tmms_kernels_pass(name: str) -> None:
    problem = PROBLEMS[name]()
    verifier, faults = Verifier(problem, device()), []
    for kernel in dispatch.default_dispatcher().registry.kernels():
        if kernel.reasons_against(problem):
            continue
        found = verifier.verdict(
            kernel.bind(problem, kernel.default_config(problem)),
            repeats=20,
            deterministic=kernel.traits.deterministic,
            baseline=kernel.name == BASELINE,
        )
        if not found.ok:
            faults.append(f"{kernel.name}: {found.reason}")
    assert not faults


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name", ON_8_BIT_FLOATS)
def test_operations_on_8_bit_floats(name: str, dtype: torch.dtype) -> None:
    """test_verifier.py asserts that verification needs no other operations."""
    drawn = torch.randn(8, 8).to(dtype)
    found = ON_8_BIT_FLOATS[name](drawn.cuda()).cpu()
    expected = ON_8_BIT_FLOATS[name](drawn)
    assert found.double().equal(expected.double()) or bool(expected.double().isnan().all())


def test_time_and_memory() -> None:
    """Prints the times, and asserts that the memory is within its limit."""
    instance = problem(4096, 4096, 4096)
    blas = dispatch.default_dispatcher().registry.kernel(BASELINE)
    launcher = blas.bind(instance, blas.default_config(instance))
    verifier = Verifier(instance, device())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        assert verifier.verdict(launcher).ok
        times.append(1e3 * (time.perf_counter() - started))
    peak = torch.cuda.max_memory_allocated() - before
    print(
        f"4096³: first verdict {times[0]:.1f} ms, next {times[-1]:.1f} ms, {peak / 2**20:.0f} MiB"
    )
    assert peak <= default_limit(device())
    verifier.release()

    instance = problem(8192, 8192, 8192)
    launcher = blas.bind(instance, blas.default_config(instance))
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        assert Verifier(instance, device(), sampled=True).verdict(launcher, extent="brief").ok
        took = 1e3 * (time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() - before
    print(f"8192³ by samples: {took:.1f} ms, {peak / 2**20:.0f} MiB")
    assert peak <= default_limit(device())


def test_two_threads_launch_a_large_product_within_a_time() -> None:
    """128 launches of each thread would take 180 ms on an H100."""
    instance = problem(4096, 4096, 14336)
    blas = dispatch.default_dispatcher().registry.kernel(BASELINE)
    launcher = blas.bind(instance, blas.default_config(instance))
    checks = WaysOfUse(Verifier(instance, device()), launcher, True, False)
    checks.together()
    started = time.perf_counter()
    checks.together()
    torch.cuda.synchronize()
    assert time.perf_counter() - started < 0.1


def test_references_do_not_depend_on_the_setting_of_tf32() -> None:
    """A large 16-bit product, whose reference is in fp32, is the same under either setting."""
    instance = problem(256, 256, 2048)
    inputs = random_inputs.make(instance, device(), seed=1)
    exact = compare._product(inputs.a, inputs.b, True)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        for setting in ("tf32", "ieee"):
            matmul.fp32_precision = setting
            fast = compare._product(inputs.a, inputs.b, False)
            assert fast.dtype == torch.float32
            assert compare.error(fast, exact) < 1e-4
            assert matmul.fp32_precision == setting
    finally:
        matmul.fp32_precision = before
