"""The machinery of conformance suites, probe by probe, and what ranks tell each other."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _pytest.outcomes import Failed, Skipped
from fakes import DEVICE, FakeKernel, problem

from tmm_core import Operand
from tmm_core.bench.case import Case
from tmm_core.formats import named
from tmm_core.formats.grids import ROW
from tmm_core.spec.operand import Scale
from tmm_core.testing import FormatConformance, KernelConformance
from tmm_core.testing.conformance import _Tensors
from tmm_core.testing.probe_problems import problem_id, scales_of, usual_scale, whole_k
from tmm_core.tools import ranks
from tmm_core.tools.cli import main

CPU = torch.device("cpu")
F32, BF16 = torch.float32, torch.bfloat16


def suite(kernel: FakeKernel, **fields: Any) -> Any:
    made: Any = type("Suite", (KernelConformance,), {"kernel": kernel, **fields})()
    made._device = lambda: CPU
    return made


# -- kernels ------------------------------------------------------------------------------


def test_the_first_problem_that_is_served_is_taken() -> None:
    odd = suite(FakeKernel("k", against=lambda p: ["even"] if p.m % 2 == 0 else []))
    assert odd._first_served([problem(m=m) for m in (2, 4, 5, 7)]).m == 5
    with pytest.raises(Skipped, match=r"^even$"):
        odd._first_served([problem(m=2), problem(m=4)])
    with pytest.raises(Skipped, match=r"^even$"):
        odd._check(problem(m=2))


@pytest.mark.parametrize(("slack", "passes"), [(1.0, False), (1.9, False), (2.1, True)])
def test_a_result_is_right_within_the_tolerance_times_the_slack(slack: float, passes: bool) -> None:
    """It is off by twice the tolerance of fp32, relative to its size and the rms of all."""
    checked = suite(FakeKernel("k"), slack=slack)
    tensors = _Tensors.of(checked._probe((4, 6, 8), F32), CPU)
    right = tensors.inputs.a.double() @ tensors.inputs.b.double()
    off = right + 2 * 2e-5 * (right.abs() + right.square().mean().sqrt())
    if passes:
        checked._check_result(tensors, off.float())
        return
    with pytest.raises(Failed, match=r"k is wrong on 4x6x8-float32-nn.*:\nerror 4e-05 exceeds"):
        checked._check_result(tensors, off.float())


def test_elements_that_were_not_written_are_errors() -> None:
    checked = suite(FakeKernel("k"))
    tensors = _Tensors.of(checked._probe((4, 6, 8), F32), CPU)
    right = (tensors.inputs.a.double() @ tensors.inputs.b.double()).float()
    checked._check_result(tensors, right)
    right[1, 2] = math.nan
    with pytest.raises(Failed, match="error nan exceeds 2e-05"):
        checked._check_result(tensors, right)


@pytest.mark.parametrize(
    ("count", "most", "tiles"),
    [(8, None, [1, *range(1, 9)]), (9, None, [1, 1, 3, 5, 7, 9]), (3, 2, [1, 1, 3]),
     (4, 2, [1, 1, 3]), (2, 2, [1, 1, 2]), (0, None, None)],
)  # fmt: skip
def test_configs_are_spread_over_the_search_space(
    count: int, most: int | None, tiles: list[int] | None
) -> None:
    kernel = FakeKernel("k", tiles=range(1, count + 1) or (1,))
    found = suite(kernel, max_configs=most)._configs(problem())
    assert [config.tile for config in found] == (tiles or [1, 1])


def test_a_kernel_that_serves_nothing_fails() -> None:
    never = FakeKernel("k", against=lambda p: ["never", "ever"])
    with pytest.raises(Failed, match="k declines every problem of the suite on cpu: never; ever"):
        suite(never).test_serves_something()
    suite(FakeKernel("k")).test_serves_something()


# -- probes --------------------------------------------------------------------------------


def test_a_problem_is_named_by_what_is_special() -> None:
    made = suite(FakeKernel("k"))._probe((4, 8, 8), F32)
    assert problem_id(None) == "none"
    assert problem_id(made) == "4x8x8-float32-nn"
    loose = replace(made, a=Operand(F32, "col", False), scaled=True, tf32=True)
    assert problem_id(loose) == "4x8x8-float32-tn-unaligned-tf32-alpha-a:col_unaligned"
    wide = replace(made, out=Operand(BF16), bias=BF16, batch=2)
    assert problem_id(wide) == "2x4x8x8-float32_to_bfloat16-nn-bias-out:bfloat16"


@pytest.mark.parametrize(
    ("k", "scale", "found"),
    [(8, None, 8), (7, "1x32 bfloat16", 32), (33, "1x32 bfloat16", 64), (64, "1x32 bfloat16", 64),
     (7, "row bfloat16", 8)],
)  # fmt: skip
def test_k_has_whole_groups_and_elements(k: int, scale: str | None, found: int) -> None:
    four = Operand(torch.uint8, format="int4", scale=Scale.parse(scale) if scale else None)
    plain = problem(k=k, a=Operand(BF16), b=Operand(BF16))
    assert whole_k(replace(plain, b=four)).k == found
    assert whole_k(plain).k == k


def test_scales_of_a_format() -> None:
    int4, mxfp4 = named("int4"), named("mxfp4")
    assert str(usual_scale(int4)) == "row bfloat16"
    assert list(map(str, scales_of(int4))) == [
        "row bfloat16", "1x32 float16", "1x64", "1x128 bfloat16",
    ]  # fmt: skip
    assert usual_scale(mxfp4) == Scale(mxfp4.grids[0], mxfp4.scale_dtypes[0])
    assert ROW not in mxfp4.grids


# -- formats -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [("int8", 256), ("int4", 16), ("int4_signed", 16), ("mxfp4", 16), ("fp8", 254)],
)
def test_every_finite_code_of_a_format_is_tested(name: str, count: int) -> None:
    made: Any = type("Suite", (FormatConformance,), {"format": named(name)})()
    assert len(made._codes(made.format.storage[0])) == count


def test_the_k_of_a_format_has_three_groups() -> None:
    made: Any = type("Suite", (FormatConformance,), {"format": named("int4")})()
    assert made._k(24, (1, 0)) == 24
    assert made._k(23, (1, 0)) == 24
    short = made.format.short
    assert made._k(24, (1, 128)) == (3 * 128 - 64 if short else 3 * 128)
    made.format = replace(made.format, short=not short)
    assert made._k(24, (1, 128)) == (3 * 128 if short else 3 * 128 - 64)


# -- ranks -----------------------------------------------------------------------------------


def test_the_gpu_of_a_rank_is_named_if_any_problem_is_measured_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = problem(device=replace(DEVICE, type="cpu"))
    gpu = problem(device=replace(DEVICE, type="cuda"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}")
    )
    assert ranks._gpu([cpu]) is None
    assert ranks._gpu([]) is None
    assert ranks._gpu([cpu, gpu]) == "GPU-1"


def test_ranks_compare_what_they_tune() -> None:
    one, other = problem(), problem(m=3)
    assert ranks._digest([one]) == ranks._digest([problem()])
    assert ranks._digest([one])["problems"].startswith("1 ")
    different = (
        [other],
        [one, other],
        [other, one],
        [],
        [problem(device=replace(DEVICE, name="x"))],
    )
    digests = [json.dumps(ranks._digest(each)) for each in ([one], *different)]
    assert len(set(digests)) == 6


def test_ranks_are_listed_in_order() -> None:
    assert ranks._list({2, 1}) == "1, 2"
    assert ranks._list(["b", "a"]) == "a, b"


# -- what commands pose -------------------------------------------------------------------------


@pytest.mark.parametrize("tf32", [False, True])
def test_explain_is_of_the_precision_that_was_asked(
    tf32: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under which the problem is made: it is part of the problem on a GPU."""
    matmul = torch.backends.cuda.matmul
    before, made, seen = matmul.fp32_precision, Case.problem, list[str]()

    def pose(case: Case, device: torch.device) -> Any:
        seen.append(matmul.fp32_precision)
        return made(case, device)

    monkeypatch.setattr(Case, "problem", pose)
    more = ["--tf32"] if tf32 else []
    assert main(["explain", "64x64x64", "--dtype", "fp32", "--device", "cpu", *more]) == 0
    assert "64×64×64 float32" in capsys.readouterr().out
    assert set(seen) == {"tf32" if tf32 else before}
    assert matmul.fp32_precision == before


def test_a_config_is_of_one_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "64x64x64", "--config", "tile=1"]) == 2
    assert "--config belongs to one kernel: name it with --kernel" in capsys.readouterr().err
