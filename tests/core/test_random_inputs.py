"""The random inputs of tuning, verification, benchmarks and conformance suites."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import tmm_core
from tmm_core import Operand, Problem
from tmm_core.bench.case import Case
from tmm_core.epilogues import parse
from tmm_core.spec.device import fingerprint
from tmm_core.testing.probe_problems import laid
from tmm_core.verify import ragged_inputs, random_inputs
from tmm_core.verify.data_sets import DataSets
from tmm_core.verify.further_inputs import Round, planned
from tmm_core.verify.guard_bands import memory_layout, unusual_layout

CPU = torch.device("cpu")


def test_vectors_and_empty_tensors_are_filled() -> None:
    """Vectors whose elements share an address are filled, too."""
    for t in (torch.zeros(64), torch.zeros(1).expand(64), torch.zeros(0), torch.zeros(0, 4)):
        assert random_inputs.fill("bias", t, 16, random_inputs.seeded(CPU, 0)) is t
        assert not t.numel() or t.abs().min() > 0


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.uint8],
)
def test_values_of_every_dtype(dtype: torch.dtype) -> None:
    t = random_inputs.fill("a", torch.zeros(64, 64, dtype=dtype), 16, random_inputs.seeded(CPU, 0))
    assert t.dtype is dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        assert len(t.unique()) == 17  # from −8 to 8, wrapped if unsigned
        return
    wide = t.to(torch.complex128 if dtype.is_complex else torch.float64)
    assert wide.abs().square().mean().sqrt().item() == pytest.approx(0.5, rel=0.05)  # 16^-¼


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("layout", ["row", "col", "row_unaligned"])
def test_stacked_matrices(layout: str, alike: bool) -> None:
    """Rows of a batch's matrices alternate, or all matrices are one."""
    operand, shape = laid(Operand(torch.float32), layout), (3, 5, 8)
    placed = unusual_layout(operand, shape)
    made = torch.full((placed.length,), math.nan).as_strided(shape, placed.strides, placed.offset)
    made = made[:1].expand(shape) if alike else made
    t = random_inputs.fill("a", made, 1, random_inputs.seeded(CPU, 0))
    assert not t.isnan().any()
    assert len(t.unique()) == (40 if alike else 120)


def test_values_leave_the_users_generator_alone() -> None:
    half = Operand(torch.float16)
    problem = Problem(4, 4, 4, half, half, half, device=fingerprint(CPU))
    before = torch.get_rng_state()
    one, two = (random_inputs.make(problem, CPU).a for _ in range(2))
    again = [random_inputs.make(problem, CPU, seed=3).a for _ in range(2)]
    Case(m=4, n=4, k=4).call(CPU)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one, two)
    assert torch.equal(*again)


def test_one_function_fills_all_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[str] = []

    def fill(name: str, t: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        filled.append(name)
        return t.zero_()

    monkeypatch.setattr("tmm_core.verify.random_inputs.fill", fill)
    case = Case(
        m=8, n=16, k=16, dtype=torch.float8_e4m3fn, layout="nt", bias=True, residual=True,
        scales="row",
    )  # fmt: skip
    problem = case.call(CPU).problem()
    DataSets(problem, CPU, 1 << 20, sampled=True).sets()
    assert sorted(filled) == sorted(2 * ["a", "b", "bias", "residual", "a_scale", "b_scale"])


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((12, 8), (3, 8, 16), (12, 16)),  # ragged rows
        ((3, 12, 8), (8, 16), (12, 16)),  # ragged columns
        ((12, 8), (8, 16), (3, 12, 16)),  # a ragged sum
    ],
)
def test_shapes_of_a_grouped_problem_equal_its_tensors(
    a: tuple[int, ...], b: tuple[int, ...], out: tuple[int, ...]
) -> None:
    offs = torch.tensor([2, 2, 8], dtype=torch.int32)
    problem = tmm_core.problem(torch.randn(a), torch.randn(b), offs=offs)
    assert (problem.shape("a"), problem.shape("b"), problem.shape("out")) == (a, b, out)
    drawn = random_inputs.make(problem, CPU)
    assert (drawn.a.shape, drawn.b.shape) == (a, b)


def test_shapes_of_a_problem_equal_its_tensors() -> None:
    a, b, bias = torch.randn(4, 12, 8), torch.randn(4, 8, 32), torch.randn(32)
    residual = torch.randn(4, 12, 16)
    problem = tmm_core.problem(a, b, bias=bias, residual=residual, epilogue="swiglu")
    shapes = {"a": a, "b": b, "bias": bias, "residual": residual, "out": residual}
    assert {name: problem.shape(name) for name in shapes} == {n: t.shape for n, t in shapes.items()}
    assert problem.shape("a_scale") == (4, 12, 1)
    assert problem.shape("b_scale") == (4, 1, 32)


@pytest.mark.parametrize("sizes", ["small", "one", "even", "skewed", "sparse"])
@pytest.mark.parametrize(("count", "total"), [(1, 0), (1, 9), (4, 0), (4, 3), (4, 4), (4, 11)])
def test_groups_end_where_the_rows_do(sizes: Any, count: int, total: int) -> None:
    ends = ragged_inputs.ends_of(count, total, random_inputs.seeded(CPU, 3), sizes)
    assert len(ends) == count
    assert ends == sorted(ends)
    assert ends[-1] == total


def test_a_single_row_that_is_not_aligned_begins_off_16_bytes() -> None:
    """A single row has no stride that could be misaligned."""
    loose = Operand(torch.float16, aligned=False)
    for cols, padded in ((16, False), (16, True), (7, False)):
        placed = memory_layout(loose, (1, cols), padded=padded)
        assert placed.offset * 2 % 16 or cols % 8, (cols, padded)
    assert memory_layout(loose, (2, 16)).offset == 0
    assert memory_layout(loose, (2, 16)).strides[0] % 8


def test_subnormal_results_are_of_plain_fp16_products() -> None:
    half = Operand(torch.float16)
    plain = Problem(16, 16, 16, half, half, half, fingerprint(CPU))
    single = Operand(torch.float32)
    for problem, has in (
        (plain, True), (replace(plain, epilogue=parse("gelu")), False),
        (replace(plain, out=single), False), (replace(plain, a=single, b=single), False),
    ):  # fmt: skip
        names = {plan.name for plan in planned(problem)}
        assert ("subnormal results" in names) is has


def test_kernels_are_launched_with_parameters_too() -> None:
    """A layer passes a parameter, which may be frozen, also at the address of an earlier one."""
    single = Operand(torch.float32)
    problem = Problem(8, 8, 8, single, single, single, fingerprint(CPU), bias=torch.float32)
    launched = set()
    for plan in planned(problem):
        drawn = Round(DataSets(problem, CPU, 1 << 20), plan)
        inputs, given = drawn.drawn, drawn.inputs
        pairs = {name: (getattr(inputs, name), getattr(given, name)) for name in ("b", "bias")}
        assert all(torch.equal(*pair) for pair in pairs.values())
        names = [name for name, (_, to) in pairs.items() if isinstance(to, torch.nn.Parameter)]
        launched.add((*names, given.b.requires_grad, plan.place == "same"))
    assert launched == {
        (False, False), ("b", False, False), ("b", False, True), ("b", "bias", True, False)
    }  # fmt: skip


def test_inputs_may_be_left_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_inputs, "fill", None)
    given = random_inputs.make(Case(m=2, n=3, k=4).problem(CPU), CPU, filled=False)
    assert (given.a.shape, given.b.shape) == ((2, 4), (4, 3))
