"""The machinery of conformance suites, probe by probe, and what ranks tell each other."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _pytest.outcomes import Failed, Skipped
from fakes import DEVICE, FakeConfig, FakeKernel, problem
from tmm_blas.blas import Blas

import tmm_core
from tmm_core import Groups, Launcher, Operand, Problem, Traits, formats
from tmm_core.bench.case import Case
from tmm_core.epilogues import BUILTIN, parse
from tmm_core.formats import FORMATS, Format, named
from tmm_core.formats.grids import ROW
from tmm_core.spec.operand import Scale
from tmm_core.testing import (
    FormatConformance,
    KernelConformance,
    format_conformance,
    probe_problems,
)
from tmm_core.testing.conformance import _Tensors
from tmm_core.testing.probe_problems import (
    SIZE,
    SIZES,
    contiguous,
    odd_problems,
    problem_id,
    scales_of,
    usual_scale,
    whole_k,
)
from tmm_core.tools import ranks
from tmm_core.tools.cli import main
from tmm_core.verify import compare

CPU = torch.device("cpu")
HALF, F32, BF16 = torch.float16, torch.float32, torch.bfloat16


def suite(kernel: FakeKernel, **fields: Any) -> Any:
    made: Any = type("Suite", (KernelConformance,), {"kernel": kernel, **fields})()
    made._device = lambda: CPU
    return made


# -- kernels ------------------------------------------------------------------------------


def test_the_problems_that_are_served_are_taken() -> None:
    odd = suite(FakeKernel("k", against=lambda p: ["even"] if p.m % 2 == 0 else []))
    assert [p.m for p in odd._served([problem(m=m) for m in (2, 4, 5, 7)])] == [5, 7]
    with pytest.raises(Skipped, match=r"^even$"):
        odd._served([problem(m=2), problem(m=4)])
    never = suite(FakeKernel("k", against=lambda p: [f"M is {p.m}", "never"]))
    with pytest.raises(Skipped, match=r"^M is 4; never$"):  # the last one's reasons
        never._served([problem(m=2), problem(m=4)])
    with pytest.raises(Skipped, match=r"^even$"):
        odd._check(problem(m=2))


@pytest.mark.parametrize(("slack", "passes"), [(1.0, False), (1.9, False), (2.1, True)])
def test_a_result_is_right_within_the_tolerance_times_the_slack(slack: float, passes: bool) -> None:
    """The result is off by twice fp32's tolerance, relative to each element plus the rms of all."""
    checked = suite(FakeKernel("k"), slack=slack)
    tensors = _Tensors.of(checked._probe((4, 6, 8), F32), CPU)
    right = tensors.inputs.a.double() @ tensors.inputs.b.double()
    off = right + 2 * 2e-5 * (right.abs() + right.square().mean().sqrt())
    if passes:
        checked._check_result(tensors, off.float())
        return
    with pytest.raises(Failed, match=r"k is wrong on 4x6x8-float32-nn.*:\nerror 4e-05 exceeds"):
        checked._check_result(tensors, off.float())


@pytest.mark.parametrize(("slack", "passes"), [(1.0, False), (1.9, False), (2.1, True)])
def test_a_kernel_is_verified_with_the_slack(slack: float, passes: bool) -> None:
    def spoil(y: torch.Tensor) -> torch.Tensor:
        return y + 2 * 2e-5 * (y.abs() + y.square().mean().sqrt())

    checked = suite(FakeKernel("k", tiles=(3,), spoil=spoil), slack=slack)
    fault = r"k is wrong on 4x6x8-float32-nn.*:\ntile=3: error [34]\S*e-05 exceeds"
    with contextlib.nullcontext() if passes else pytest.raises(Failed, match=fault):
        checked._check(checked._probe((4, 6, 8), F32))


class OfLastBind(FakeKernel):
    """Serves results of at most 6 columns; its launchers read what the last bind left behind."""

    def __init__(self) -> None:
        super().__init__("k", against=lambda p: ["too wide"] if p.n > self.most else [])
        self.most, self.columns = 6, 0

    def bind(self, problem: Problem, config: FakeConfig) -> Launcher:
        assert problem.n <= self.most
        self.columns = problem.n
        right = super().bind(problem, config)

        def launch(a: Any, b: Any, *arguments: Any) -> Any:
            assert b.shape[1] == self.columns, "of another problem"
            return right(a, b, *arguments)

        return launch


def test_a_launcher_is_verified_after_another_problem_that_is_served_was_bound() -> None:
    kernel = OfLastBind()
    checked = suite(kernel)
    probe = checked._probe((4, 6, 8), F32)
    checked._check(probe, "whole")  # the other problem is too wide
    kernel.most = 12
    with pytest.raises(AssertionError, match="of another problem"):
        checked._check(probe, "whole")
    checked._check(probe)


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
    [(8, None, [*range(1, 9)]), (9, None, [1, 3, 5, 7, 9]), (3, 2, [1, 3]), (4, 2, [1, 3]),
     (2, 2, [1, 2]), (0, None, [1])],
)  # fmt: skip
def test_configs_are_spread_over_the_search_space(
    count: int, most: int | None, tiles: list[int]
) -> None:
    kernel = FakeKernel("k", tiles=range(1, count + 1) or (1,))
    found = suite(kernel, max_configs=most)._configs(problem())
    assert [config.tile for config in found] == tiles


@pytest.mark.parametrize(("count", "found"), [(64, 64), (65, 33), (128, 64)])
def test_a_gpu_tries_64_configs(count: int, found: int) -> None:
    kernel = FakeKernel("k", tiles=range(1, count + 1))
    gpu = problem(device=replace(DEVICE, type="cuda"))
    assert len(suite(kernel)._configs(gpu)) == found


def test_a_kernel_that_serves_nothing_fails() -> None:
    never = FakeKernel("k", against=lambda p: ["never", "ever"])
    with pytest.raises(Failed, match="k declines every problem of the suite on cpu: never; ever"):
        suite(never).test_serves_something()


@pytest.mark.parametrize(
    "serves",
    [
        lambda p: True, lambda p: p.groups, lambda p: p.along == "k",
        lambda p: p.bias and not p.groups, lambda p: p.a.layout == "strided" and not p.groups,
        lambda p: p.m == 1 and not p.groups,
    ],
    ids=["all", "groups", "sums of groups", "a bias", "gaps in a", "one row"],
)  # fmt: skip
def test_a_kernel_of_some_problems_serves_something(serves: Callable[[Problem], Any]) -> None:
    of_some = FakeKernel("k", against=lambda p: [] if serves(p) else ["no"])
    suite(of_some).test_serves_something()


class OfTiles(FakeKernel):
    """Every element is ``value(tile, M)``; tiles have the ``orders`` of their sums."""

    def __init__(self, orders: dict[int, str | None], value: Callable[[int, int], float]) -> None:
        super().__init__("k", tiles=list(orders), traits=Traits(batch_invariant=True))
        self.orders, self.value = orders, value

    def arithmetic(self, problem: Problem, config: FakeConfig) -> str | None:
        return self.orders[config.tile]

    def bind(self, problem: Problem, config: FakeConfig) -> Launcher:
        return lambda *given: given[-1].fill_(self.value(config.tile, problem.m))


@pytest.mark.parametrize(
    ("orders", "value", "fault"),
    [
        ({1: "a", 2: "b"}, lambda tile, m: 0.0, ""),
        ({1: "a", 2: "b"}, lambda tile, m: tile * m, r"with tile=1 rows 0 to 1 of 43"),
        ({1: "a", 2: "b"}, lambda tile, m: tile - 1 and m, r"tile=2 rows 0 to 1 of 43"),
        ({1: "a"}, lambda tile, m: m == 42, r"tile=1 rows 0 to 42 of 43 differ in 3360 elements"),
        # A config that batch-invariant mode never uses may round as it likes.
        ({1: "a", 2: None}, lambda tile, m: tile - 1 and m, ""),
    ],
)  # fmt: skip
def test_rows_have_the_same_bits_among_fewer_rows(
    orders: dict[int, str | None], value: Callable[[int, int], float], fault: str
) -> None:
    checked = suite(OfTiles(orders, value))
    with pytest.raises(AssertionError, match=fault) if fault else contextlib.nullcontext():
        checked.test_batch_invariant()


@pytest.mark.parametrize(
    ("orders", "value", "fault"),
    [
        ({1: "a", 2: "a"}, lambda tile, m: 0.0, ""),
        ({1: "a", 2: "a"}, lambda tile, m: tile,
         r"one arithmetic for tile=1 and tile=2, which differ in 3440"),
        ({1: "a", 2: "b", 3: "a"}, lambda tile, m: tile == 2, ""),
        ({1: "a", 2: "b", 3: "b"}, lambda tile, m: tile == 3, r"tile=2 and tile=3"),
        ({1: "a", 2: None, 3: None, 4: "a"}, lambda tile, m: tile in (2, 3) and tile, ""),
    ],
)  # fmt: skip
def test_configs_of_one_arithmetic_have_the_same_bits(
    orders: dict[int, str | None], value: Callable[[int, int], float], fault: str
) -> None:
    checked = suite(OfTiles(orders, value))
    with pytest.raises(AssertionError, match=fault) if fault else contextlib.nullcontext():
        checked.test_arithmetic()


def test_claims_that_cannot_be_compared_are_skipped() -> None:
    whole = OfTiles({1: "a", 2: "b"}, lambda tile, m: 0.0)
    with pytest.raises(Skipped, match="no two configs share an arithmetic"):
        suite(whole).test_arithmetic()
    whole.against = lambda p: ["too few rows"] if p.m < 43 else []
    with pytest.raises(Skipped, match="declines fewer rows than 43"):
        suite(whole).test_batch_invariant()
    modest = suite(FakeKernel("k", traits=Traits(deterministic=False, batch_invariant=False)))
    for test in (modest.test_batch_invariant, modest.test_arithmetic):
        with pytest.raises(Skipped, match="claims no batch invariance"):
            test()
    with pytest.raises(Skipped, match="claims no determinism"):
        modest.test_deterministic()


def test_each_run_of_a_deterministic_kernel_has_the_bits_of_the_first() -> None:
    launches = itertools.count()
    last = FakeKernel("k", spoil=lambda out: out.add_(next(launches) == 2))
    with pytest.raises(AssertionError, match=r"run 2 of tile=1 differs"):
        suite(last).test_deterministic()


@pytest.mark.parametrize("declined", ["", "m", "n", "k"])
def test_configs_are_tried_on_the_most_revealing_groups_along_each_dimension(declined: str) -> None:
    checked = suite(FakeKernel("k", against=lambda p: ["no"] if p.along == declined else []))
    tried: list[Problem] = []
    checked._check_search_space = tried.append
    checked.test_configs_of_ragged()
    demanding = checked.demanding_ragged()
    first = {along: next(p for p in demanding if p.along == along) for along in "mnk"}
    first.pop(declined, None)
    assert {problem.along: problem for problem in tried} == first
    assert len(tried) == len(first)


# -- probes --------------------------------------------------------------------------------


def test_the_id_of_a_problem_names_its_special_properties() -> None:
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
    assert whole_k(replace(plain, b=four)).k == whole_k(replace(plain, a=four)).k == found
    assert whole_k(plain).k == k
    other = replace(four, scale=Scale((1, 96)))
    assert whole_k(replace(plain, a=four, b=other)).k == 96  # two and 32 divide it, too


def test_scales_of_a_format() -> None:
    int4, mxfp4 = named("int4"), named("mxfp4")
    assert str(usual_scale(int4)) == "row bfloat16"
    assert list(map(str, scales_of(int4))) == [
        "row bfloat16", "1x32 float16", "1x64", "1x128 bfloat16",
    ]  # fmt: skip
    assert usual_scale(mxfp4) == Scale(mxfp4.grids[0], mxfp4.scale_dtypes[0])
    assert ROW not in mxfp4.grids


def problems_of(name: str, device: str = "cpu") -> list[Problem]:
    """The problems of this test of the suite."""
    made: Any = suite(FakeKernel("k"), dtypes=(torch.float16, BF16, F32), device=device)
    made._device = lambda: torch.device(device)
    return list(getattr(made, name)())


PROBES = sorted(
    name for name in dir(KernelConformance)
    if name.startswith("probes_of_") or name in ("sizes_of_tiles", "demanding", "fine_grained")
)  # fmt: skip


@pytest.mark.parametrize("name", PROBES)
def test_no_probe_occurs_twice_and_k_has_whole_groups(name: str) -> None:
    probes = problems_of(name)
    assert len(probes) == len(set(probes))
    for probe in probes:
        assert whole_k(probe) == probe
        assert probe.device.type == "cpu"
        assert 0 in (probe.m, probe.n, probe.k, probe.batch) or name != "probes_of_empties"


def test_a_suite_of_given_sizes_and_dtypes_has_these_alone() -> None:
    sizes = ((4, 8, 16), (1, 2, 3))
    made = suite(FakeKernel("k"), sizes=sizes, dtypes=(F32, BF16))
    found = [(p.a.dtype, (p.m, p.n, p.k)) for p in made.probes_of_sizes()]
    assert found == [(dtype, size) for dtype in (F32, BF16) for size in sizes]
    usual = suite(FakeKernel("k"), dtypes=(F32,)).probes_of_sizes()
    assert [(p.m, p.n, p.k) for p in usual] == list(SIZES["cpu"])


@pytest.mark.parametrize("name", [*PROBES, "ragged_problems", "demanding_ragged"])
def test_a_suite_of_one_dtype_has_plain_operands_of_this_dtype_alone(name: str) -> None:
    """fp32 and TF32 are for kernels that list fp32."""
    made = suite(FakeKernel("k"), dtypes=(BF16,))
    plain = [p for p in getattr(made, name)() if not p.stored]
    assert {operand.dtype for p in plain for operand in (p.a, p.b)} <= {BF16}
    assert not any(p.tf32 for p in plain)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [(8, 16, 24), (1, 5, 8), (5, 1, 3), (1, 8, 5)])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_contiguous_matrices_are_described_as_tensors_are(
    layout: str, size: tuple[int, int, int], batch: int
) -> None:
    m, n, k = size
    stack = (batch,) if batch > 1 else ()

    def made(rows: int, cols: int) -> torch.Tensor:
        flipped = layout == "col"
        t = torch.empty((*stack, *((cols, rows) if flipped else (rows, cols))), dtype=HALF)
        return t.mT if flipped else t

    a, b, out, residual = made(m, k), made(k, n), made(m, n), made(m, n)
    described = Problem.of(a, b, out, DEVICE, residual=residual)
    laid_out = {
        name: replace(operand, layout=layout, aligned=True)
        for name in ("a", "b", "out", "residual")
        if (operand := getattr(described, name)) is not None
    }
    assert contiguous(replace(described, **laid_out)) == described
    loose = {name: replace(operand, aligned=False) for name, operand in laid_out.items()}
    found = contiguous(replace(described, **loose))
    assert not any(getattr(found, name).aligned for name in loose)


def test_the_probes_have_every_layout_of_every_matrix() -> None:
    every = {("row", True), ("col", True), ("row", False), ("col", False), ("strided", False)}

    def laid_out(probe: Problem, *names: str) -> list[tuple[str, bool]]:
        return [(getattr(probe, name).layout, getattr(probe, name).aligned) for name in names]

    probes = problems_of("probes_of_layouts")
    usual = [("row", True)]
    whole = [probe for probe in probes if probe.n == 80]
    for name, others in (("a", ("b", "out")), ("b", ("a", "out")), ("out", ("a", "b"))):
        alone = [p for p in whole if laid_out(p, *others) == usual * 2]
        assert {laid_out(p, name)[0] for p in alone} == every
    assert {tuple(laid_out(p, "a", "b", "out")) for p in whole[13:]} == {
        (("col", True), ("col", True), ("row", True)), (("col", True),) * 3,
        (("row", False), ("col", False), ("row", False)), (("strided", False),) * 3,
    }  # fmt: skip
    odd = [probe for probe in probes if probe.n != 80]
    assert {(p.m, p.n, p.k) for p in odd} == {(45, 77, 109)}
    pairs = {(a, b) for a in ("row", "col") for b in ("row", "col")}
    for aligned in (True, False):
        found = {(p.a.layout, p.b.layout) for p in odd if p.a.aligned is aligned}
        assert found == pairs
    residuals = [p.residual for p in problems_of("probes_of_terms") if p.residual and not p.bias]
    assert {(r.layout, r.aligned) for r in residuals if r.dtype is torch.float16} == every
    assert [r.dtype for r in residuals].count(F32) == 1


def test_the_probes_have_every_dtype_term_and_epilogue() -> None:
    half, three = torch.float16, (torch.float16, BF16, F32)
    dtypes = [(p.a.dtype, p.out.dtype, p.tf32, p.b.layout) for p in problems_of("probes_of_dtypes")]
    assert set(dtypes) == {
        *((a, out, False, "row") for a in three for out in three if a != out),
        (F32, F32, True, "row"), (F32, F32, True, "col"),
    }  # fmt: skip
    keys = {p.epilogue.key for p in problems_of("probes_of_epilogues")}
    assert keys >= {parse(text).key for text in BUILTIN}
    assert len(keys) == len(BUILTIN) + 7
    terms = {(p.bias, p.residual is not None, p.scaled, p.epilogue.key)
             for p in problems_of("probes_of_terms")}  # fmt: skip
    assert terms == {
        (None, False, True, "identity"), (half, False, False, "identity"),
        (F32, False, False, "identity"), (None, True, False, "identity"),
        (half, True, True, "silu"), (half, True, True, "swiglu"),
    }  # fmt: skip
    most, plain, small = problems_of("demanding")
    assert (most.bias, most.residual, most.epilogue.key) == (half, most.out, "silu")
    assert replace(most, bias=None, residual=None, epilogue=plain.epilogue) == plain
    assert (plain.m, plain.n, plain.k) == (43, 80, 448)
    assert (small.m, small.n, small.k) == (48, 80, 112)
    assert [(p.a.dtype, p.out.dtype) for p in problems_of("fine_grained")] == [
        (half, F32), (F32, F32), (half, half), (half, half),
    ]  # fmt: skip
    ports = {(port.kind, port.reduce, port.dtype) for p in problems_of("probes_of_outputs")
             for port in p.epilogue.outputs}  # fmt: skip
    assert {(kind, reduce) for kind, reduce, _ in ports if kind != "tile"} == {
        (kind, reduce) for kind in ("row", "col", "scalar") for reduce in ("max", "sum")
    }
    assert {dtype for _, _, dtype in ports} == {half, BF16, F32}
    terms = {(p.scaled, p.bias, p.residual is not None) for p in problems_of("probes_of_outputs")}
    assert terms == {(True, None, False), (True, None, True), (True, half, True)}


@pytest.mark.parametrize("along", ["m", "n", "k"])
@pytest.mark.parametrize("dtype", [None, BF16])
def test_groups_have_sizes_that_no_block_divides(along: Any, dtype: torch.dtype | None) -> None:
    checked = suite(FakeKernel("k"), dtypes=(F32,))
    ragged, plain = checked._ragged(along, dtype), checked._probe()
    assert (ragged.along, ragged.a.dtype) == (along, dtype or F32)
    assert ragged.extent > getattr(plain, along)
    assert ragged.extent % 2 == 1


def test_the_probes_have_every_format_and_scale() -> None:
    probes = problems_of("probes_of_scales")
    for form in FORMATS.values():
        own = [p for p in probes if p.b.form is form]
        assert {p.b.scale.block for p in own if p.b.scale} >= {s.block for s in scales_of(form)}
        assert {p.b.zero is not None for p in own} == {False, bool(form.zeros)} | {False}
        assert {p.b.dtype for p in own} == set(form.storage)
        if form.implied:
            assert {p.a.form is form for p in own} == {False, True}
        assert {(p.m == 1, p.k == 0) for p in own} == {(True, False), (False, True), (False,) * 2}
        verified = [p for p in problems_of("probes_of_verification") if p.b.form is form]
        grids = {s.block for s in scales_of(form) if s.grid} | {usual_scale(form).block}
        assert {p.b.scale.block for p in verified if p.b.scale} == grids


def test_the_ragged_problems_are_of_every_kind() -> None:
    made = suite(FakeKernel("k"), dtypes=(HALF, BF16))
    every = list(made.ragged_problems())
    plain = [p for p in every if not p.stored]
    assert all(p.groups and p.groups.ragged == p.along for p in every)
    usual = [p for p in every[:6] if p.a == p.b == p.out and p.groups == Groups(6, p.along)]
    kinds = [(p.a.dtype, p.along) for p in usual]
    assert kinds == [(dtype, along) for dtype in (HALF, BF16) for along in "mnk"]
    assert all(math.gcd(p.extent, 16) == 1 for p in usual)  # no block divides it
    assert any(p.along == "m" and p.out.dtype is F32 for p in plain)
    counts = {(p.along, p.groups.count, p.extent) for p in plain if p.groups}
    for along in "mnk":
        (extent,) = {p.extent for p in usual if p.along == along}
        assert counts >= {(along, 1, extent), (along, 19, 7), (along, 6, 0)}
        found = {tuple((o.layout, o.aligned) for o in (p.a, p.b, p.out)) for p in plain
                 if p.along == along}  # fmt: skip
        row, col, gaps, loose = ("row", True), ("col", True), ("strided", False), ("row", False)
        assert found >= {
            (row, row, row), (row, col, row), (col, col, row), (gaps,) * 3, (loose,) * 3,
        }  # fmt: skip
        # A weight's gradient has groups at rows of memory.
        assert ((col, row, row) in found) is (along == "k")
    assert any(p.k == 0 and p.along == "m" and p.bias and not p.epilogue.is_identity for p in plain)
    indexed = {p.groups for p in plain if p.groups and p.groups != Groups(p.groups.count, p.along)}
    wide, narrow = torch.int64, torch.int32
    for fields in (
        {"a_index": wide}, {"a_index": narrow}, {"out_index": wide}, {"zeroed": True},
        {"out_index": narrow, "zeroed": True}, {"out_weights": F32}, {"out_weights": HALF},
    ):  # fmt: skip
        assert Groups(6, "m", **fields) in indexed
    assert {Groups(6, "m", wide, wide, F32, zeroed) for zeroed in (False, True)} <= indexed
    terms = {(p.along, p.bias, p.residual is not None, p.scaled, p.epilogue.key) for p in plain}
    assert terms >= {
        ("m", HALF, False, False, "identity"), ("m", F32, False, True, "identity"),
        ("m", None, True, False, "identity"), ("m", None, False, False, "swiglu"),
        ("m", HALF, True, False, "silu"), ("m", HALF, True, True, "swiglu"),
        ("n", None, True, True, "gelu_tanh"), ("k", HALF, True, True, "swiglu"),
    }  # fmt: skip
    for form in FORMATS.values():
        own = [p for p in every if p.b.form is form]
        packed = form.pack != 1 or scales_of(form)[0].grid
        assert {p.along for p in own} >= ({"m", "n"} if packed else {"m", "n", "k"})
        assert {(p.bias is not None, p.epilogue.key) for p in own if p.along == "m"} == {
            (False, "identity"), (True, "silu"), (True, "swiglu"),
        }  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_size_of_the_suite_has_its_property(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = 256 if device == "cuda" else 16
    odd, even, *rest = SIZES[device]
    assert all(size % 2 for size in odd)
    assert all(size % min(tile, 32) == 0 for size in even)
    for name, of in zip("mnk", ((1, 0), (1, 1), (1, 2)), strict=True):
        assert any(size[of[1]] == 1 for size in rest), name
    assert (1, 1, 1) in rest
    assert any(k < 16 and m >= 32 <= n for m, n, k in rest)
    assert any(k > 10 * max(m, n) for m, n, k in rest)
    assert any(m > 20 * n for m, n, _ in rest)
    assert any(n > 20 * m for m, n, _ in rest)
    if device == "cuda":
        assert any(m // 256 * (n // 256) > 78 for m, n, _ in rest)
        assert all(max(m, n) > 128 for m, n, _ in SIZES[device] if min(m, n) > 1 and m != 48)
    assert all(size % 16 == 0 and size % 32 for size in SIZE[device] if size != 304)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(probe_problems, "fingerprint", lambda _: replace(DEVICE, type=device))
    sizes = {(p.m, p.n, p.k) for p in problems_of("sizes_of_tiles", device)}
    tallest = 128 if device == "cuda" else 32
    for remainder in (*range(1, 17), 20, 24, 28):
        assert {(remainder, 16, 16), (tallest + remainder, 16, 16)} <= sizes
    for size in (8, 24, 40, 56, 17, 33, 47):
        assert {(16, size, 16), (16, 16, size)} <= sizes


def test_problems_that_only_queries_see_are_of_every_kind() -> None:
    odd = list(odd_problems(DEVICE))
    for name in ("m", "n", "k", "batch"):
        assert {getattr(p, name) for p in odd} >= {0, 1, 2**31 - 1, 2**31, 2**40}
    dtypes = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    for name in ("a", "b", "out", "residual"):
        operands = [getattr(p, name) for p in odd if getattr(p, name) is not None]
        assert {o.dtype for o in operands} >= dtypes
        assert len({(o.layout, o.aligned, o.wide) for o in operands}) == 12
    assert {p.bias for p in odd} >= dtypes
    half = torch.float16
    of_dtypes = {(p.a.dtype, p.b.dtype, p.out.dtype) for p in odd}
    for d in dtypes:
        assert of_dtypes >= {(d, d, d), (d, half, half), (half, d, half), (half, half, d)}
        assert any(p.bias is d and p.residual == Operand(d) for p in odd)
    functions = {p.epilogue for p in odd if p.bias and p.scaled}
    assert functions >= {*BUILTIN.values(), probe_problems.USERS, probe_problems.UNFUSABLE}
    zeroed = [p for p in odd if p.groups and p.groups.zeroed and p.gated]
    assert [p.along for p in zeroed] == ["m", "n", "k"]
    small = [p for p in odd if p.m == 1 and p.a.dtype is torch.float8_e4m3fn]
    assert {p.device.type for p in small} == {"cuda", "cpu", "mps", "meta"}
    assert {p.groups.ragged if p.groups else "" for p in odd} == {"", "m", "n", "k"}
    assert {p.groups.count for p in odd if p.groups} == {1, 3, 2**20}
    assert {p.extent for p in odd if p.groups} >= {0, 64, 2**31}
    for flag in ("deterministic", "batch_invariant", "capturing", "tf32", "scaled"):
        assert any(getattr(p, flag) for p in odd)
    assert {p.device.type for p in odd} == {DEVICE.type, "cuda", "cpu", "mps", "meta"}
    assert {p.b.form for p in odd} >= set(FORMATS.values())
    assert {p.epilogue for p in odd} >= set(BUILTIN.values())
    kinds = {None, *map(Scale.parse, ("tensor", "row", "1x32", "128x128"))}
    dtypes_of_a = {p.a.dtype for p in odd if p.a.scale}
    for dtype in dtypes_of_a:
        scaled = [p for p in odd if p.a.dtype is dtype]
        assert {(p.a.scale, p.b.scale) for p in scaled} >= {(x, y) for x in kinds for y in kinds}
    assert {p.b.dtype for p in odd if p.b.zero} >= {torch.float16, torch.uint8, torch.int8}
    assert {p.b.scale for p in odd if p.b.zero} == kinds - {None}
    assert dtypes_of_a >= {torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int8}
    assert {p.device.capability for p in odd} >= {(7, 5), (9, 0), (12, 1), (9, 4)}
    grouped = [p for p in odd if p.groups]
    assert {p.groups.zeroed for p in grouped if p.groups} == {False, True}
    every = [p for p in grouped if p.groups and p.groups.a_index and p.groups.out_index]
    assert any(p.groups and p.groups.out_weights and p.bias and p.residual for p in every)
    assert any(p.groups and p.groups.zeroed for p in every)


def test_a_suite_of_small_sizes_has_no_size_below_one() -> None:
    """The suite subtracts three from a size to get one that no block divides."""
    three = torch.float16, F32
    made: Any = suite(FakeKernel("k"), dtypes=three, size=(4, 4, 4), sizes=((1, 1, 1),))
    smaller = ("probes_of_layouts", "probes_of_batches", "probes_of_outputs", "probes_of_terms")
    for name in (*smaller, "sizes_of_tiles", "demanding", "fine_grained", "demanding_ragged"):
        probes = list(getattr(made, name)())
        assert all(min(p.m, p.n, p.k) >= 1 for p in probes), name
        if name in smaller:
            assert min(p.m for p in probes) == min(p.k for p in probes) == 1, name
    loose = [p for p in made._layouts() if not p.a.aligned and p.a.layout == "row"]
    assert [(p.m, p.n, p.k) for p in loose] == [(2, 1, 1), (1, 2, 1), (1, 1, 2)]


# -- formats -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [("int8", 256), ("int4", 16), ("int4_signed", 16), ("mxfp4", 16), ("fp8", 254)],
)
def test_every_finite_code_of_a_format_is_tested(name: str, count: int) -> None:
    made: Any = type("Suite", (FormatConformance,), {"format": named(name)})()
    assert len(made._codes(made.format.storage[0])) == count


class ForgetsZeros(Format):
    def values(
        self, stored: Any, scale: Any = None, zero: Any = None, *given: Any, **more: Any
    ) -> Any:
        return super().values(stored, scale, None, *given, **more)


class ForgetsScalesOfGroups(Format):
    def values(
        self, stored: Any, scale: Any = None, zero: Any = None, dtype: Any = None,
        block: Any = ROW, along: int = -1,
    ) -> Any:  # fmt: skip
        return super().values(stored, None if block[1] > 1 else scale, zero, dtype, block, along)


class ForgetsScalesOfColumns(Format):
    """Its weights are multiplied without scales, unless they are transposed first."""

    def values(
        self, stored: Any, scale: Any = None, zero: Any = None, dtype: Any = None,
        block: Any = ROW, along: int = -1,
    ) -> Any:  # fmt: skip
        return super().values(stored, scale if along == -1 else None, zero, dtype, block, along)


class RoundsItsRows(Format):
    """Its values are half a percent too large, unless they are transposed first: a product is right
    within the tolerance."""

    def values(
        self, stored: Any, scale: Any = None, zero: Any = None, dtype: Any = None,
        block: Any = ROW, along: int = -1,
    ) -> Any:  # fmt: skip
        found = super().values(stored, scale, zero, dtype, block, along)
        return found * 1.005 if along == -1 else found


class ForgetsScales(Format):
    def values(self, stored: Any, scale: Any = None, *given: Any, **more: Any) -> Any:
        return super().values(stored, None, *given, **more)


class PacksNothing(Format):
    """Stores a code in each element, and reads it back."""

    def packed(self, codes: torch.Tensor, along: int = -1) -> torch.Tensor:
        return codes

    def unpacked(self, stored: torch.Tensor, along: int = -1) -> torch.Tensor:
        return stored


class UnpacksBackwards(Format):
    """Only its ``values`` has the codes in order."""

    def unpacked(self, stored: torch.Tensor, along: int = -1) -> torch.Tensor:
        codes = super().unpacked(stored, along)
        return codes.flip(-1) if along == -1 else codes

    def values(self, *given: Any, **more: Any) -> Any:
        return named("int4").values(*given, **more)


def of_bytes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stores -7 instead of -8, and nothing else, in unsigned bytes."""
    least = -8 if dtype is torch.int8 else -7
    return (x.round().clamp(least, 7).to(torch.int8) & 15).to(dtype)


def all_zero(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return named("int4_signed").quantize(x * (dtype is torch.int8), dtype)


class PacksTheHighBitsFirst(Format):
    def packed(self, codes: torch.Tensor, along: int = -1) -> torch.Tensor:
        swapped = super().packed(codes, along)
        return (swapped << 4) | (swapped >> 4)


def one_too_large(block, dtype):  # type: ignore[no-untyped-def]  # compiled by Triton
    return block.to(dtype) + 1


def changed(name: str, kind: type[Format] = Format, **fields: Any) -> Format:
    return kind(**{**vars(named(name)), "name": "mine", **fields})


@pytest.mark.parametrize(
    ("test", "wrong"),
    [
        ("stored_numbers_are_read_as_they_were_rounded",
         changed("int8", quantize=lambda x, dtype: torch.where(x == 100, 99, x.round()).to(dtype))),
        ("stored_numbers_are_read_as_they_were_rounded",
         changed("int8", dequantize=lambda stored: stored.to(torch.int16))),
        ("rounding_is_close",
         changed("int8", quantize=lambda x, dtype: x.round().clamp(-128, 101).to(dtype))),
        ("values_are_scaled", changed("int8", ForgetsZeros)),
        ("stored_numbers_are_read_as_they_were_rounded",
         changed("int4_signed", quantize=of_bytes)),
        ("rounding_is_close", changed("int4_signed", quantize=all_zero)),
        ("values_are_scaled", changed("int4", PacksTheHighBitsFirst)),
        ("values_are_scaled", changed("int4", PacksNothing)),
        ("values_are_scaled", changed("int4", UnpacksBackwards)),
        ("values_are_scaled", changed("int4", ForgetsScales, zeros=False)),
        ("a_quantised_tensor_stands_for_its_values", changed("int4", PacksTheHighBitsFirst)),
        ("a_quantised_tensor_stands_for_its_values", changed("int8", ForgetsScalesOfGroups)),
        ("a_quantised_tensor_stands_for_its_values", changed("int8", ForgetsScalesOfColumns)),
        ("a_quantised_tensor_stands_for_its_values", changed("int8", RoundsItsRows)),
        ("products", changed("int8", decode=one_too_large)),
    ],
)  # fmt: skip
def test_a_wrong_format_fails(test: str, wrong: Format) -> None:
    checked: Any = type("Suite", (FormatConformance,), {"format": wrong, "dtypes": (HALF,)})()
    checked._device = lambda: CPU
    given = (4, 8, 16, None, 0) if test == "products" else ()
    formats.add(wrong)
    try:
        with pytest.raises(AssertionError):
            getattr(checked, f"test_{test}")(*given)
    finally:
        formats.remove(wrong)


def test_the_k_of_a_format_has_three_groups() -> None:
    made: Any = type("Suite", (FormatConformance,), {"format": named("int4")})()
    assert made._k(24, (1, 0)) == 24
    assert made._k(23, (1, 0)) == 24
    short = made.format.short
    assert made._k(24, (1, 128)) == (3 * 128 - 64 if short else 3 * 128)
    made.format = replace(made.format, short=not short)
    assert made._k(24, (1, 128)) == (3 * 128 if short else 3 * 128 - 64)


@pytest.mark.parametrize(
    ("present", "decodes", "fault"),
    [("blas", False, ""), ("blas", True, "no kernel uses its device function"), ("", False, "^$")],
)
def test_blas_and_a_kernel_have_to_serve_a_format(
    present: str, decodes: bool, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = [kernel for kernel in [Blas()] if kernel.name == present]
    registry = SimpleNamespace(kernels=lambda: kernels)
    found = SimpleNamespace(default_dispatcher=lambda: SimpleNamespace(registry=registry))
    monkeypatch.setattr(format_conformance, "dispatch", found)
    form = named("int8") if decodes else replace(named("int8"), decode=None)
    fields = {"format": form, "dtypes": (HALF,)}
    checked: Any = type("Suite", (FormatConformance,), fields)()
    checked._device = lambda: CPU
    with pytest.raises(AssertionError, match=fault) if fault else contextlib.nullcontext():
        checked.test_products(4, 8, 16, None, 0)


class Nearly(Blas):
    """BLAS, whose results are off by a share of the tolerance."""

    share = 0.0

    def __init__(self) -> None:
        self.served: list[Problem] = []

    def bind(self, problem: Problem, config: Any) -> Any:
        launch: Any = super().bind(problem, config)
        self.served.append(problem)

        def off(*given: Any, **parts: Any) -> torch.Tensor:
            y = launch(*given, **parts).double()
            size = y.abs() + y.square().mean().sqrt()
            return (y + self.share * compare.tolerance(problem) * size).to(problem.out.dtype)

        return off


def by(kernel: Blas, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Any:
    """The suite of int8 without a device function, by this kernel alone."""
    registry = SimpleNamespace(kernels=lambda: [kernel])
    found = SimpleNamespace(default_dispatcher=lambda: SimpleNamespace(registry=registry))
    monkeypatch.setattr(format_conformance, "dispatch", found)
    given = {"format": replace(named("int8"), decode=None), "dtypes": (HALF,), "device": "cpu"}
    return type("Suite", (FormatConformance,), {**given, **fields})()


@pytest.mark.parametrize(("share", "passes"), [(0.5, True), (1.5, False)])
def test_products_of_a_format_are_right_within_the_tolerance(
    share: float, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Nearly()
    kernel.share = share
    checked = by(kernel, monkeypatch)
    with contextlib.nullcontext() if passes else pytest.raises(AssertionError, match=r"^blas: "):
        checked.test_products(4, 8, 16, None, 0)


@pytest.mark.parametrize("epilogue", [None, "silu"])
def test_a_format_is_multiplied_with_each_scale_dtype_and_epilogue(
    epilogue: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the interpreter the two cases of a size share the pairs of a scale and a dtype."""
    monkeypatch.setattr(format_conformance, "interpreting", lambda: True)
    form = replace(named("int8"), decode=None, grids=((1, 0), (1, 32)))
    halves = []
    for half in (0, 1):
        kernel = Nearly()
        by(kernel, monkeypatch, format=form, dtypes=(HALF, BF16)).test_products(
            4, 8, 16, epilogue, half
        )
        assert {p.epilogue.key for p in kernel.served} == {epilogue or "identity"}
        halves.append({(p.a.dtype, p.b.scale) for p in kernel.served})
    scales = [
        Scale(block, dtype) for block, dtype in zip(form.grids, form.scale_dtypes, strict=False)
    ]
    assert [len(each) for each in halves] == [2, 2]
    assert halves[0] | halves[1] == {(dtype, scale) for dtype in (HALF, BF16) for scale in scales}
    one = by(kernel, monkeypatch, format=replace(form, grids=((1, 0),)), dtypes=(HALF, BF16))
    one.test_products(4, 8, 16, epilogue, 1)


@pytest.mark.parametrize(
    ("off", "tolerance", "passes"),
    [(0.012, 0.0, True), (0.02, 0.0, False), (0.045, 0.05, True), (0.055, 0.05, False)],
)
def test_a_layer_of_a_format_is_right_within_the_tolerance(
    off: float, tolerance: float, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tolerance is that of bf16, or the format's own if this is larger."""

    def linear(x: torch.Tensor, weight: Any) -> torch.Tensor:
        if x.requires_grad:
            raise RuntimeError("no derivative")
        y = x.double() @ weight.dequantize().double().T
        return (y + off * (y.abs() + y.square().mean().sqrt())).bfloat16()

    monkeypatch.setattr(tmm_core, "linear", linear)
    form = replace(named("int8"), tolerance=tolerance)
    checked: Any = type("Suite", (FormatConformance,), {"format": form})()
    with contextlib.nullcontext() if passes else pytest.raises(AssertionError):
        checked._stands_for_its_values(ROW)


def test_a_tensor_of_a_format_is_saved_and_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: Any = type("Suite", (FormatConformance,), {"format": named("int8")})()
    with monkeypatch.context() as patch:
        load = torch.load
        patch.setattr(torch, "load", lambda file: SimpleNamespace(
            dequantize=lambda: load(file).dequantize() + 1
        ))  # fmt: skip
        with pytest.raises(AssertionError):
            checked._stands_for_its_values(ROW)
    monkeypatch.setattr(tmm_core, "linear", lambda x, weight: x @ weight.dequantize().T)
    with pytest.raises(Failed, match="DID NOT RAISE"):
        checked._stands_for_its_values(ROW)


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


def test_ranks_compare_their_problems() -> None:
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


# -- problems of commands -------------------------------------------------------------------------


@pytest.mark.parametrize("tf32", [False, True])
def test_explain_uses_the_requested_precision(
    tf32: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The problem is made under this precision, which is part of it on a GPU."""
    matmul = torch.backends.cuda.matmul
    before, made, seen = matmul.fp32_precision, Case.problem, list[str]()

    def noted(case: Case, device: torch.device) -> Any:
        seen.append(matmul.fp32_precision)
        return made(case, device)

    monkeypatch.setattr(Case, "problem", noted)
    more = ["--tf32"] if tf32 else []
    assert main(["explain", "64x64x64", "--dtype", "fp32", "--device", "cpu", *more]) == 0
    assert "64×64×64 float32" in capsys.readouterr().out
    assert set(seen) == {"tf32" if tf32 else before}
    assert matmul.fp32_precision == before


def test_a_config_needs_a_named_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "64x64x64", "--config", "tile=1"]) == 2
    assert "--config belongs to one kernel: name it with --kernel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "aligned", "cols", "found"),
    [
        ("row", True, 8, ("row", True)), ("row", True, 7, ("row", False)),
        ("row", False, 8, ("row", False)), ("col", True, 7, ("col", True)),
        ("col", False, 7, ("col", False)), ("strided", False, 8, ("strided", False)),
    ],
)  # fmt: skip
def test_contiguous_matrices_are_aligned_if_their_sizes_are(
    layout: Any, aligned: bool, cols: int, found: tuple[str, bool]
) -> None:
    """Matrices of a class without alignment stay in that class."""
    made = probe_problems.contiguous(problem(m=8, k=cols, a=Operand(F32, layout, aligned)))
    assert (made.a.layout, made.a.aligned) == found
