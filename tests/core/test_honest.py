"""Right kernels pass, however they round; wrong ones do not pass for that (``tests/honest.py``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import FakeKernel, problem
from honest import Rounding, cases, verified

from tmm_core import Problem
from tmm_core.epilogues import BUILTIN, parse
from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.kernel import Config
from tmm_core.spec.operand import Operand
from tmm_core.verify.verifier import Verifier

CPU = torch.device("cpu")
ANY = Config()
CORES, BY_TORCH = Rounding(16, 24), Rounding(torch=True)


def of(dtype: torch.dtype, m: int, n: int, k: int, **fields: Any) -> Problem:
    operand = Operand(dtype)
    return problem(m, n, k, **{"a": operand, "b": operand, "out": operand, **fields})


# The last ones were refused before, or could not be verified.
@pytest.mark.parametrize("seed", [*range(24), 2536, 5665, 10585, 10812, 12311])
@pytest.mark.slow(quick=6)
def test_a_right_kernel_of_a_random_problem_passes(seed: int) -> None:
    ((_, problem, how),) = cases(seed, 1)
    assert verified(problem, how).reason is None


@pytest.mark.endurance
def test_right_kernels_of_many_random_problems_pass() -> None:
    refused = [
        f"{seed}: {problem} ({how}): {found.reason}"
        for seed, problem, how in cases(10_000, 3000)
        if not (found := verified(problem, how)).ok
    ]
    assert not refused


def test_random_problems_are_of_all_kinds() -> None:
    problems = [each for _, each, _ in cases(0, 400)]
    names = {spec.format for each in problems for spec in (each.a, each.b)}
    dtypes = {each.a.dtype for each in problems}
    assert names >= {"", "int8", "int4", "mxfp4"}
    assert dtypes >= {torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn}
    assert {each.along for each in problems if each.groups} == {"m", "n", "k"}
    assert any(each.k == 16384 for each in problems)
    assert any(each.tf32 and each.gated for each in problems)


ROUNDED: dict[str, tuple[Problem, Rounding]] = {
    "sums that tensor cores truncate": (
        of(torch.bfloat16, 16, 16, 28672, out=Operand(torch.float32)), CORES,
    ),
    "the same through an epilogue": (
        of(torch.float16, 16, 16, 16384, out=Operand(torch.float32), epilogue=parse("softcap")),
        CORES,
    ),
    "one element in TF32": (of(torch.float32, 1, 1, 300, tf32=True), Rounding(8, 24)),
    "TF32 with a gate": (
        of(torch.float32, 64, 64, 64, tf32=True, epilogue=parse("swiglu")), Rounding(8, 24),
    ),
    "torch's operators, one after another": (
        of(torch.float16, 2, 5, 7, batch=3, bias=torch.float16,
           epilogue=parse("swiglu+softcap(5.0)")), BY_TORCH,
    ),
    "a bias that cancels": (
        of(torch.bfloat16, 16, 64, 5, batch=2, bias=torch.bfloat16, epilogue=parse("silu"),
           residual=Operand(torch.bfloat16)), BY_TORCH,
    ),
    "subnormal results": (of(torch.float16, 8, 8, 8, epilogue=parse("scale(0.000001)")), CORES),
    "results beyond fp16's range": (
        of(torch.float16, 17, 8, 16384, a=Operand(torch.float16, "col", aligned=False),
           b=Operand(torch.float16, aligned=False), epilogue=parse("swiglu")), CORES,
    ),
    "integers with an alpha": (
        of(torch.int32, 8, 8, 8, scaled=True, bias=torch.int32, residual=Operand(torch.int32)),
        BY_TORCH,
    ),
    "bytes with an alpha": (of(torch.uint8, 8, 8, 8, scaled=True), BY_TORCH),
    "complex numbers": (of(torch.complex64, 8, 8, 8), BY_TORCH),
    "wide complex numbers": (of(torch.complex128, 8, 8, 8, bias=torch.complex128), BY_TORCH),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.slow(quick=6)
def test_a_right_kernel_passes_with(name: str) -> None:
    assert verified(*ROUNDED[name]).reason is None


@pytest.mark.parametrize("function", [torch.log, torch.sqrt, torch.rsqrt])
def test_an_epilogue_may_be_undefined_for_some_inputs(function: Callable[..., Any]) -> None:
    """The result is NaN for negative inputs, and must be."""
    problem = of(torch.float16, 16, 16, 16, epilogue=Epilogue("user", function))
    assert verified(problem, CORES).reason is None
    filled = FakeKernel("k", spoil=lambda out: out.nan_to_num_(1.0)).bind(problem, ANY)
    assert not Verifier(problem, CPU).verdict(filled, extent="brief").ok


@pytest.mark.parametrize("name", [name for name in BUILTIN if name not in ("relu", "sigmoid")])
def test_an_error_of_two_percent_is_refused_with_every_epilogue(name: str) -> None:
    """The bound of errors is no excuse."""
    problem = of(torch.float16, 16, 16, 16, epilogue=parse(name))
    spoiled = FakeKernel("k", spoil=lambda out: out.mul_(1.02)).bind(problem, ANY)
    assert "exceeds 0.002" in str(Verifier(problem, CPU).verdict(spoiled, extent="brief").reason)


@pytest.mark.parametrize("scale", ["0.000001", "0.0001"])
def test_small_results_of_fp16_are_compared_to_its_smallest_numbers(scale: str) -> None:
    """Many results are subnormal, and all are below 0.001."""
    problem = of(torch.float16, 8, 8, 8, epilogue=parse(f"scale({scale})"))
    assert verified(problem, CORES).reason is None
    least = torch.finfo(torch.float16).smallest_normal
    for spoil in (lambda y: y.where(y.abs() >= least, 0.0), lambda y: y * 3):
        kernel = FakeKernel("k", spoil=spoil).bind(problem, ANY)
        assert not Verifier(problem, CPU).verdict(kernel, extent="brief").ok


def test_a_result_beyond_the_range_has_to_have_its_sign() -> None:
    problem = of(torch.float16, 8, 8, 8, epilogue=parse("scale(1000000)"))
    assert verified(problem, CORES).reason is None
    for spoil in (torch.Tensor.neg, lambda out: out * 0):
        kernel = FakeKernel("k", spoil=spoil).bind(problem, ANY)
        assert not Verifier(problem, CPU).verdict(kernel, extent="brief").ok


def test_finite_results_may_not_be_inf() -> None:
    problem = of(torch.float16, 8, 8, 8)
    kernel = FakeKernel("k", spoil=lambda out: out.mul_(math.inf)).bind(problem, ANY)
    assert not Verifier(problem, CPU).verdict(kernel, extent="brief").ok
