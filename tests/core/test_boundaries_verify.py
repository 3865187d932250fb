"""Values at and next to each limit of the parts of verification: errors, memory, group sizes,
NaN."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import gc
import importlib.util
import math
import platform
import random
import re
import signal
import sys
import weakref
from collections import UserDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch._inductor.config  # its import sets a variable; torch imports it in deterministic mode
from fakes import problem
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from tmm_core import Groups, Operand, Port
from tmm_core.epilogues import parse
from tmm_core.epilogues.clamped_swiglu import CLAMPED
from tmm_core.formats import FORMATS
from tmm_core.registry import process_state, watched_call
from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.launcher import Bound
from tmm_core.spec.operand import Scale
from tmm_core.verify import (
    auxiliary_outputs,
    checked_launch,
    compare,
    data_sets,
    forms,
    further_inputs,
    guard_bands,
    nonfinite,
    ragged_inputs,
    random_inputs,
    ways_of_use,
)
from tmm_core.verify.checked_launch import CheckedLauncher
from tmm_core.verify.compare import Sample, error, expected, rms, tolerance
from tmm_core.verify.data_sets import DataSets, Expected, default_limit
from tmm_core.verify.forms import WrongError
from tmm_core.verify.guard_bands import MemoryLayout, memory_layout
from tmm_core.verify.ragged_inputs import Inputs, Rows

CPU = torch.device("cpu")
F32, F16 = Operand(torch.float32), Operand(torch.float16)
INT8 = Operand(torch.int8, format="int8", scale=Scale.parse("row"))
NAN, INF = math.nan, math.inf
BF16 = torch.bfloat16


# -- errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "expected", "found"),
    [
        ([1.0, 1.0], [1.0, 1.0], 0.0),
        ([1.5, 1.0], [1.0, 1.0], 0.25),  # 0.5 / (1 + rms 1)
        ([0.5, 1.0], [1.0, 1.0], 0.25),
        ([0.5, 0.0], [0.0, 0.0], 0.5),  # the rms of zeros is one
        ([7.0, 1.0], [7.0, -1.0], 2 / 6),  # rms 5
        ([], [], 0.0),
    ],
)
def test_an_error_is_relative_to_an_element_and_to_all(
    out: list[float], expected: list[float], found: float
) -> None:
    assert error(torch.tensor(out), torch.tensor(expected)) == pytest.approx(found)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_non_finite_value_is_a_large_error(value: float) -> None:
    assert not error(torch.tensor([value, 1.0]), torch.tensor([1.0, 1.0])) < 1e30


@pytest.mark.parametrize(
    ("value", "off", "change"),
    [(4.0, 5.0, 1.0), (0.0, -1.0, INF), (-4.0, 5.0, INF), (-4.0, 1.0, 0.0), (INF, -INF, INF)],
)
def test_a_change_to_or_from_nan_is_infinite(value: float, off: float, change: float) -> None:
    """The epilogue's error is the change of its output."""
    root = Epilogue("root", torch.sqrt)
    values = (torch.tensor([value]),)
    found = compare._change(root, values, 0, torch.tensor([off]), torch.sqrt(values[0]))
    assert found.item() == change


@pytest.mark.parametrize(("epilogue", "columns"), [("silu", 256), ("swiglu", 128)])
def test_both_halves_of_a_gated_weight_are_in_the_memory_of_a_piece(
    epilogue: str, columns: int
) -> None:
    instance = problem(m=64, n=512, k=256, epilogue=parse(epilogue))
    inputs = Inputs(torch.ones(64, 256), torch.ones(256, instance.width), None, None)
    room = 8 * 256 * 256  # bytes of 256 columns of b in fp64
    places = [at for at, _ in compare.pieces(instance, inputs, slice(None), slice(None), room)]
    assert {len(at[-1]) for at in places} == {columns}
    assert len(places) == 512 // columns


def test_a_result_beyond_the_range_does_not_hide_errors_of_others() -> None:
    """It counts as the largest number of its dtype."""
    instance = problem(m=2, n=2, k=1, a=F16, b=F16, out=F16)
    a, b = torch.tensor([[6e4], [1.0]]), torch.tensor([[6e4, 1.0]])
    sample = expected(instance, Inputs(a.half(), b.half(), None, None))
    assert sample.numbers[0, 0] > 3e9
    assert sample.sizes[1, 1] < torch.finfo(torch.float16).max


def test_the_rms_of_complex_and_of_no_numbers() -> None:
    assert rms(torch.tensor([3 + 4j])).item() == 5.0
    assert rms(torch.tensor([])).item() == rms(torch.zeros(3)).item() == 1.0


@pytest.mark.parametrize(
    ("operand", "out", "tf32", "limit"),
    [
        (torch.float64, torch.float64, False, 1e-12),
        (torch.float32, torch.float32, False, 2e-5),
        (torch.float32, torch.float32, True, 4e-3),
        (torch.float16, torch.float16, False, 2e-3),
        (BF16, BF16, False, 1.6e-2),
        (BF16, torch.float32, False, 2e-5),
        (torch.complex64, torch.complex64, False, 2e-5),
        (torch.complex128, torch.complex128, False, 1e-12),
        (torch.int8, torch.int8, False, 0.0),
    ],
)
def test_the_tolerance_is_of_the_result(
    operand: torch.dtype, out: torch.dtype, tf32: bool, limit: float
) -> None:
    one = Operand(operand)
    assert tolerance(problem(a=one, b=one, out=Operand(out), tf32=tf32)) == limit


def test_a_rounded_operand_has_its_own_tolerance_where_it_is_larger() -> None:
    e4m3 = Operand(torch.float8_e4m3fn, scale=Scale.parse("tensor"))
    for out in (torch.float32, BF16):
        instance = problem(a=e4m3, b=e4m3, out=Operand(out))
        (form, _) = instance.forms
        assert form is not None
        assert tolerance(instance) == max(compare.TOLERANCE[out], form.tolerance)


@pytest.mark.parametrize(
    ("ends", "found"),
    [((4,), [(0, 0, 4)]), ((0, 3, 3), [(0, 0, 0), (1, 0, 3), (2, 3, 3)]), ((), [])],
)
def test_groups_begin_where_the_last_ended(ends: Any, found: Any) -> None:
    assert list(compare.ranges(ends)) == found


def test_the_reference_of_groups_is_zero_beyond_the_last() -> None:
    instance = problem(m=6, n=4, k=3, groups=Groups(2, "m"), bias=torch.float32)
    a, b, bias = torch.randn(6, 3), torch.randn(2, 3, 4), torch.randn(2, 4)
    rows = Rows(torch.tensor([2, 5]), (2, 5), 6)
    inputs = Inputs(a, b, bias, alpha=2.0, rows=rows)
    instance = replace(instance, scaled=True)
    right = torch.cat([2 * a[:2] @ b[0] + bias[0], 2 * a[2:5] @ b[1] + bias[1], torch.zeros(1, 4)])
    assert torch.allclose(expected(instance, inputs).numbers.float(), right, atol=1e-5)
    some = expected(instance, inputs, torch.tensor([5, 1]), torch.tensor([3])).numbers
    assert torch.allclose(some.float(), right[[5, 1]][:, [3]], atol=1e-5)


def test_the_reference_of_sums_of_groups_adds_each_groups_terms() -> None:
    a, b, ends = torch.randn(5, 9), torch.randn(9, 4), (3, 9)
    bias, residual = torch.randn(2, 4), torch.randn(2, 5, 4)
    instance = problem(
        m=5, n=4, k=9, groups=Groups(2, "k"), bias=torch.float32, residual=F32, scaled=True
    )
    inputs = Inputs(a, b, bias, residual, alpha=-2.0, rows=Rows(torch.tensor(ends), ends, 9))
    right = torch.stack([-2 * a[:, :3] @ b[:3], -2 * a[:, 3:] @ b[3:]]) + bias[:, None] + residual
    found = expected(instance, inputs).numbers.float()
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("epilogue", [parse("swiglu"), CLAMPED], ids=["halves", "interleaved"])
@pytest.mark.parametrize("groups", [None, Groups(2, "m")])
def test_some_columns_of_a_gated_reference_are_those_of_the_whole(
    epilogue: Any, groups: Groups | None
) -> None:
    instance = problem(
        m=6, n=8, k=5, groups=groups, bias=torch.float32, residual=F32, epilogue=epilogue
    )
    inputs = random_inputs.make(instance, CPU, seed=1)
    whole = expected(instance, inputs).numbers
    rows, cols = torch.tensor([5, 0, 2]), torch.tensor([7, 1, 4])
    found = expected(instance, inputs, rows, cols).numbers
    torch.testing.assert_close(found, whole[rows][:, cols])


def test_the_reference_of_gathered_scattered_and_weighted_rows_is_plain_mathematics() -> None:
    """A weight belongs to a row in its group; the residual to the row of the result."""
    groups = Groups(3, "m", torch.int64, torch.int64, torch.float32, True)
    ends, m, n, k = (4, 4, 9), 11, 6, 5
    index = torch.tensor([2, 0, 1, 1, 3, 0, 2, 3, 1, 0, 0])
    there = torch.tensor([3, 8, 0, 6, 1, 7, 2, 5, 4, 9, 10])
    a, b, bias = torch.randn(4, k), torch.randn(3, k, n), torch.randn(3, n)
    residual, weights = torch.randn(m, n), torch.rand(m) + 0.5
    instance = problem(
        m=m, n=n, k=k, groups=groups, bias=torch.float32, residual=F32, scaled=True,
        epilogue=parse("silu"),
    )  # fmt: skip
    rows = Rows(torch.tensor(ends), ends, 4, index, there, weights)
    found = expected(instance, Inputs(a, b, bias, residual, alpha=2.0, rows=rows)).numbers
    right = torch.zeros(m, n) if groups.zeroed else torch.empty(m, n)
    for place in range(9):
        group = 0 if place < 4 else 2
        y = torch.nn.functional.silu(2 * a[index[place]] @ b[group] + bias[group])
        right[there[place]] = y * weights[place] + residual[there[place]]
    torch.testing.assert_close(found.float()[there[:9]], right[there[:9]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("along", ["m", "n", "k", None])
@pytest.mark.parametrize("room", [1, compare.ROOM])
def test_the_reference_in_pieces_is_plain_mathematics(along: Any, room: int) -> None:
    """Three groups, one of them empty, end before the last row; or a batch has three products."""
    m, n, k, count = 70, 66, 9, 3
    total = {"m": m, "n": n, "k": k, None: 0}[along]
    ends = (0, total // 2, total - 2)
    rows = Rows(torch.tensor(ends), ends, total) if along else None
    a_shape = (count, m, k) if along in ("n", None) else (m, k)
    b_shape = (count, k, n) if along in ("m", None) else (k, n)
    stack = along in ("k", None)
    a, b = torch.randn(a_shape).double(), torch.randn(b_shape).double()
    f64 = Operand(torch.float64)
    fields = {"groups": Groups(count, along)} if along else {"batch": count}
    instance = problem(m=m, n=n, k=k, a=f64, b=f64, out=f64, **fields)
    right = torch.zeros((count, m, n) if stack else (m, n), dtype=torch.float64)
    for group, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        if along == "m":
            right[start:end] = a[start:end] @ b[group]
        elif along == "n":
            right[:, start:end] = a[group] @ b[:, start:end]
        elif along == "k":
            right[group] = a[:, start:end] @ b[start:end]
        else:
            right[group] = a[group] @ b[group]
    inputs = Inputs(a, b, rows=rows)
    torch.testing.assert_close(expected(instance, inputs, room=room).numbers, right)
    some, others = torch.tensor([0, 33, 34, 68, 69]), torch.tensor([0, 32, 65])
    found = expected(instance, inputs, some, others, room=room).numbers
    torch.testing.assert_close(found, right[..., some, :][..., others])
    sample = compare.expected(instance, inputs, some, slice(5), room)
    torch.testing.assert_close(sample.numbers, right[..., some, :5])


@pytest.mark.parametrize("block", ["128x128", "row", "tensor", "1x128"])
def test_the_reference_of_some_rows_has_their_scales(block: str) -> None:
    fp8 = Operand(torch.float8_e4m3fn, scale=Scale.parse(block))
    instance = problem(m=300, n=140, k=256, a=fp8, b=replace(fp8, layout="col"))
    inputs = random_inputs.make(instance, CPU)
    whole = compare.expected(instance, inputs).numbers
    rows, cols = torch.tensor([0, 127, 128, 299]), torch.tensor([3, 128, 139])
    found = compare.expected(instance, inputs, rows, cols).numbers
    torch.testing.assert_close(found, whole[rows][:, cols])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lacking", [0, 1])
def test_large_products_of_16_bits_are_summed_in_fp32(
    dtype: torch.dtype, lacking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a number of operations the sums are exact: fp64 holds these integers, fp32 does not."""
    operand, generator = Operand(dtype), random_inputs.seeded(CPU, 5)
    instance = problem(m=16, n=16, k=64, a=operand, b=operand, out=Operand(torch.float32))
    a, b = torch.randint(-255, 256, (2, 64, 16), generator=generator)
    inputs = Inputs((a * 2**16).to(dtype).t().contiguous(), b.to(dtype))
    inputs.a[:, ::2] = b[:16, :1].to(dtype)  # sums of numbers that differ in size
    monkeypatch.setattr(compare, "FP64_FLOPS", instance.flops - lacking)
    exact = (inputs.a.double() @ inputs.b.double()).float()
    same = torch.equal(compare.expected(instance, inputs).numbers, exact)
    assert same == (dtype == torch.float32 or not lacking)


def test_an_error_is_also_relative_to_the_loss_of_a_right_kernel() -> None:
    """A sum that cancels has rounded terms, and a stage may exceed the dtype's range."""
    cancels = torch.tensor([[1000.0, -1000.0], [1.0, 0.0]]).half()
    ones = torch.ones(2, 1).half()
    instance = problem(m=2, n=1, k=2, a=F16, b=F16, out=F16)
    sample = compare.expected(instance, Inputs(cancels, ones))
    usual = sample.numbers.abs() + rms(sample.numbers)
    assert sample.numbers.tolist() == [[0.0], [1.0]]
    assert torch.equal(sample.sizes, usual)  # its products are exact, and its sums in fp32
    large = torch.full((2, 2), 200.0).half()
    for text, least, most in (("tanh", 2, 3), ("relu2+tanh", 1000, 1001), ("tanh+relu2", 2, 5)):
        chain = replace(instance, epilogue=parse(text))
        sample = compare.expected(chain, Inputs(large, ones))
        assert torch.allclose(sample.numbers, torch.ones(2, 1))
        assert least <= sample.sizes.min() <= sample.sizes.max() <= most, text
    # A bias that cancels the product takes the product's rounding with it.
    instance = replace(instance, bias=torch.float16)
    away = compare.expected(instance, Inputs(large, ones, torch.tensor([-400.0]).half()))
    assert away.numbers.abs().max() == 0
    assert away.sizes.min() >= 400


@pytest.mark.parametrize("terms", ["none", "residual", "weights"])
def test_a_last_stage_beyond_the_range_may_be_inf_before_other_terms(terms: str) -> None:
    """Torch's operators then add a residual to Inf, or multiply Inf by a row's weight."""
    fields: dict[str, Any] = {"residual": F16} if terms == "residual" else {}
    instance = problem(k=1, a=F16, b=F16, out=F16, epilogue=parse("relu2"), **fields)
    z = torch.tensor([[300.0, 10.0]], dtype=torch.float64)
    weights: Any = torch.ones(1, 1) if terms == "weights" else 1.0
    piece = compare.Piece(z, z, z, weights, z.square(), 1.0)
    assert compare._bound(instance, piece).isinf().tolist() == [[terms != "none", False]]


def test_the_bound_of_an_error_does_not_depend_on_alphas_sign() -> None:
    """Of a zero, only steps between the smallest numbers are left."""
    zero = torch.zeros(1, 1, dtype=torch.float64)
    instance = problem(k=1, a=F16, b=F16, out=F16)
    pieces = [compare.Piece(zero, zero, zero, 1.0, zero, alpha) for alpha in (-5.0, 5.0)]
    assert [compare._bound(instance, each).item() for each in pieces] == [2.0**-24 * 4] * 2


def test_a_result_beyond_the_range_may_be_inf_or_the_largest_number() -> None:
    expected = torch.tensor([70000.0, -70000.0])
    for out, found in (([INF, -INF], 0.0), ([65504.0, -65504.0], 0.0), ([INF, INF], None)):
        off = error(torch.tensor(out).half(), expected)
        assert off == found if found is not None else off > 0.5
    assert error(torch.tensor([127], dtype=torch.int8), torch.tensor([127])) == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float16, torch.float32])
@pytest.mark.parametrize("precise", [True, False])
def test_a_product_of_the_reference(dtype: torch.dtype, precise: bool) -> None:
    a = torch.tensor([[100, 2]]).to(dtype)
    b = torch.tensor([[2], [3]]).to(dtype)
    found = compare._product(a, b, precise)
    assert found.item() == (206 - 256 if dtype is torch.int8 else 206)
    kinds = {torch.int8: torch.int8, torch.complex64: torch.complex128}
    single = dtype is torch.float16 and not precise
    assert found.dtype is kinds.get(dtype, torch.float32 if single else torch.float64)


@pytest.mark.parametrize(
    ("a", "b"), [(BF16, torch.float16), (BF16, torch.float32), (torch.float32, torch.float16)]
)
def test_a_product_of_two_dtypes_is_in_fp64(a: torch.dtype, b: torch.dtype) -> None:
    one, two = torch.tensor([[1.0, 1.0]]).to(a), torch.tensor([[1.0], [2.0**-13]]).to(b)
    found = compare._product(one, two, False)
    assert (found.dtype, found.item()) == (torch.float64, 1.0 + 2.0**-13)


@pytest.mark.parametrize(
    ("dtype", "least"),
    [(torch.float16, 2.0**-24), (BF16, 2.0**-126), (torch.float32, 2.0**-126),
     (torch.float64, 2.0**-1022)],
)  # fmt: skip
def test_the_least_numbers_of_a_gpu(dtype: torch.dtype, least: float) -> None:
    """Numbers of fp16 may be subnormal."""
    assert compare._range(dtype) == (least, torch.finfo(dtype).max)


#: The largest error of the product alone, and of each rounded operand or sum.
BOUNDS = [
    (torch.float32, False, 2e-5, 2.0**-20), (torch.float32, True, 4e-3, 4e-3 + 2.0**-20),
    (BF16, False, 1.6e-2, 2.0**-20), (torch.float64, False, 1e-12, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "tf32", "limit", "rounded"), BOUNDS, ids=str)
@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_the_error_of_a_right_kernel(
    dtype: torch.dtype, tf32: bool, limit: float, rounded: float, weight: float
) -> None:
    """The bounds are no looser than torch's operators need: a kernel that rounds once more than
    they do is wrong."""
    one = Operand(dtype)
    instance = problem(k=16, a=one, b=one, out=one, tf32=tf32)
    exact = torch.ones(1, 1, dtype=torch.float64)
    piece = compare.Piece(2 * exact, 3 * exact, 5 * exact, weight * exact, 5 * exact, -2.0)
    least, _ = compare._range(dtype)
    right = weight * (limit * 5 + rounded * (2 + 3) + least * (2 + 3) / 2)
    assert compare._bound(instance, piece).item() == pytest.approx(right, rel=1e-9)
    # relu passes the error on, and rounds once more.
    stage = replace(instance, epilogue=parse("relu"))
    more = right / weight + compare.STAGE * limit * 5 + compare.SMALLER * least
    assert compare._bound(stage, piece).item() == pytest.approx(weight * more, rel=1e-9)
    cut = compare._bound(stage, piece._replace(z=-5 * exact))
    assert cut.item() == pytest.approx(weight * compare.SMALLER * least, rel=1e-9)


@pytest.mark.parametrize(
    ("dtype", "form", "limit"),
    [(BF16, "int8", 1.6e-2), (torch.float32, "int8", 2e-5), (torch.float32, "fp8", 4e-3)],
)
def test_dequantised_values_may_be_rounded(dtype: torch.dtype, form: str, limit: float) -> None:
    """A format without a tolerance of its own has the result's."""
    one, weight = Operand(dtype), Operand(FORMATS[form].storage[0], format=form)
    instance = problem(k=16, a=one, b=weight, out=one)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    piece = compare.Piece(zero, zero + 1, zero, 1.0, zero, 1.0)
    assert compare._bound(instance, piece).item() == pytest.approx(limit + 2.0**-20, rel=1e-9)


@pytest.mark.parametrize(("k", "rounded"), [(1, 2.0**-22), (1024, 2.0**-17), (4096, 2.0**-15)])
def test_the_error_of_a_sum_by_its_terms(k: int, rounded: float) -> None:
    """Rounding errors of partial sums have random signs; truncation errors of many terms have the
    same sign."""
    one = Operand(torch.float32)
    instance = problem(k=k, a=one, b=one, out=one)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    piece = compare.Piece(zero, zero + 1, zero, 1.0, zero, 1.0)
    assert compare._bound(instance, piece).item() == pytest.approx(rounded, rel=1e-9)


def test_sums_in_fp32_round_no_more_than_is_expected() -> None:
    """An epilogue with a steep part multiplies the error of sums near zero."""
    torch.manual_seed(0)
    one = Operand(torch.float32)
    for k in (2, 4, 16, 64, 256):
        instance, a, b = problem(k=k, a=one, b=one, out=one), torch.randn(96, k), torch.randn(k, 96)
        exact, norm = compare._multiplied(instance, Inputs(a, b, None, None, 1.0))
        one_by_one = torch.zeros(96, 96)
        for term in range(k):
            one_by_one += a[:, term : term + 1] * b[term : term + 1]
        piece = compare.Piece(torch.zeros_like(exact), norm, torch.zeros_like(exact), 1.0, exact, 1)
        bound = compare._bound(instance, piece)
        for y in (a @ b, one_by_one):
            assert ((y - exact).abs() <= bound).all(), k


@pytest.mark.parametrize(
    ("at_once", "rows"), [(1, 1), (9, 1), (10, 1), (20, 2), (29, 2), (1000, 7)]
)
def test_the_number_of_numbers_compared_in_one_piece(
    at_once: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece has at least one row."""
    pieces: list[int] = []
    worst = compare.worst

    def compared(out: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        assert len(out) == len(expected) == len(size)
        pieces.append(len(out))
        return worst(out, expected, size)

    monkeypatch.setattr(compare, "worst", compared)
    numbers = torch.arange(70.0).view(7, 10)
    out = numbers.clone()
    out[6, 9] += 1
    found = Sample(numbers, torch.ones(7, 10)).error(out, at_once)
    assert found.item() == 1.0
    assert sum(pieces) == 7
    assert pieces[0] == max(pieces) == rows


def test_empty_results_are_equal() -> None:
    empty = torch.empty(0, 3)
    assert error(empty, empty) == 0.0


# -- memory -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "shape", "padded", "strides", "offset"),
    [
        (F16, (4, 16), False, (16, 1), 0),
        (F16, (4, 16), True, (24, 1), 0),
        (F16, (4, 12), False, (16, 1), 0),
        (F16, (1, 12), False, (12, 1), 0),
        (F32, (4, 12), False, (12, 1), 0),
        (F32, (4, 12), True, (16, 1), 0),
        (replace(F16, layout="col"), (16, 4), False, (1, 16), 0),
        (replace(F16, layout="col"), (12, 4), True, (1, 24), 0),
        (replace(F16, aligned=False), (4, 16), False, (17, 1), 0),
        (replace(F16, aligned=False), (4, 12), False, (12, 1), 0),
        (replace(F16, aligned=False), (4, 12), True, (20, 1), 1),
        (replace(F16, aligned=False), (4, 13), True, (22, 1), 1),
        (replace(F16, aligned=False), (1, 16), False, (16, 1), 1),
        (replace(F16, aligned=False), (1, 13), False, (13, 1), 1),
        (replace(F16, aligned=False), (1, 13), True, (22, 1), 1),
        (replace(F16, layout="col", aligned=False), (13, 1), False, (1, 13), 1),
        (replace(F16, layout="strided", aligned=False), (4, 6), False, (12, 2), 0),
        (replace(F16, layout="strided", aligned=False), (4, 6), True, (3, 13), 0),
        (F16, (2, 4, 16), False, (64, 16, 1), 0),
        (F16, (2, 3, 16), True, (72, 24, 1), 0),
        (F16, (2, 1, 12), False, (16, 12, 1), 0),
        (replace(F16, aligned=False), (2, 3, 12), False, (36, 12, 1), 0),
        (replace(F16, layout="strided", aligned=False), (2, 4, 6), True, (78, 3, 13), 0),
    ],
)
def test_layouts_in_memory(
    spec: Operand, shape: tuple[int, ...], padded: bool, strides: tuple[int, ...], offset: int
) -> None:
    found = memory_layout(spec, shape, padded=padded)
    assert (found.strides, found.offset) == (strides, offset)
    t = torch.empty(found.length, dtype=spec.dtype).as_strided(shape, strides, offset)
    if 1 not in shape[-2:]:
        assert Operand.of(t).layout == spec.layout
        assert spec.layout == "strided" or Operand.of(t).aligned == spec.aligned or not padded


def test_the_length_of_a_layout_reaches_its_last_element() -> None:
    assert MemoryLayout((3, 4), torch.float32, (10, 1), 5).length == 5 + 20 + 3 + 1
    assert MemoryLayout((0, 4), torch.float32, (10, 1)).length == 3 + 1
    assert MemoryLayout((1, 1), torch.float32, (10, 10)).length == 1


def test_gaps_do_not_push_an_offset_beyond_32_bits() -> None:
    rows = 2**27
    assert memory_layout(F16, (rows, 16), padded=True).strides == (16, 1)
    wide = memory_layout(replace(F16, wide=True), (rows, 16), padded=True)
    assert wide.strides == (24, 1)
    assert memory_layout(F16, (89478485, 9), padded=True).strides == (24, 1)
    assert memory_layout(F16, (89478486, 9), padded=True).strides == (16, 1)  # to offset 2^31
    # The last offset is 2^31 - 1: it fits.
    fits = (2**31 - 1 - 7) // 16 + 1
    assert memory_layout(F16, (fits, 8), padded=True).strides == (16, 1)
    assert memory_layout(F16, (fits + 1, 8), padded=True).strides == (8, 1)


@pytest.mark.parametrize(
    ("layout", "aligned", "wide", "shape", "strides"),
    [
        ("row", False, False, (4, 12), (0, 1)),
        ("col", False, False, (4, 12), (1, 0)),
        ("strided", False, False, (4, 12), (0, 0)),
        ("row", True, False, (4, 12), (24, 1)),
        ("row", False, True, (4, 12), (20, 1)),
        ("row", False, False, (1, 12), (20, 1)),
        ("row", False, False, (4, 1), (10, 1)),
        ("row", False, False, (3, 4, 12), (0, 0, 1)),
        ("row", True, False, (3, 4, 16), (0, 24, 1)),
    ],
)
def test_strides_of_zero_where_a_class_allows_them(
    layout: Any, aligned: bool, wide: bool, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    spec = Operand(torch.float16, layout, aligned=aligned, wide=wide)
    assert guard_bands.expanded_layout(spec, shape).strides == strides
    columns = (3, 0) if layout == "strided" else strides
    assert guard_bands.expanded_layout(spec, shape, columns=True).strides == columns


@pytest.mark.parametrize(("step", "strides"), [(0, (0, 0)), (1, (9, 1)), (2, (17, 2))])
def test_the_rows_of_a_vector(step: int, strides: tuple[int, int]) -> None:
    assert guard_bands.vector_layout(F16, (2, 8), step).strides == strides


@pytest.mark.parametrize(
    ("shape", "inside", "band"),
    [
        ((1, 8), 4096, 4096),
        ((1, 2048), 4096, 8 << 16),
        ((2, 2048), 8192, 8 << 16),
        ((4, 16), 4096, 4096),
        ((4, 17), 4096, 8192),  # 24 elements apart
        ((4, 2**16), 2**19, 8 << 20),
        ((257, 8), 8192, 4096),
    ],
)
def test_bands_are_of_whole_lines_between_their_limits(
    shape: tuple[int, int], inside: int, band: int
) -> None:
    """A band has the size of 128 rows, but at least 4 KiB and at most 8 MiB."""
    held = guard_bands.with_guard_bands(memory_layout(F16, shape), CPU, 0xA5)
    assert held.words.numel() * 8 == inside + 2 * band
    assert held.tensor.storage_offset() * 2 == band
    assert guard_bands.footprint(F16, shape) >= inside + 2 * band


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32])
def test_a_tensor_begins_at_its_offset_behind_the_band(dtype: torch.dtype) -> None:
    placed = MemoryLayout((2, 3), dtype, (5, 1), offset=3)
    held = guard_bands.with_guard_bands(placed, CPU, 0xA5)
    assert held.tensor.storage_offset() * dtype.itemsize == 4096 + 3 * dtype.itemsize
    assert held.words.numel() * 8 == 3 * 4096
    before = held.words.view(torch.uint8).flatten()
    assert (before == 0xA5).all()
    held.tensor.view(torch.uint8).zero_()
    assert (before == 0).nonzero().flatten().tolist() == [
        4096 + (3 + row * 5) * dtype.itemsize + byte
        for row in range(2)
        for byte in range(3 * dtype.itemsize)
    ]


@pytest.mark.parametrize("shape", [(64, 64), (1, 1 << 12), (2, 8), (3, 64, 64)])
def test_a_footprint_is_of_the_larger_of_both_layouts(shape: tuple[int, ...]) -> None:
    """A single row with a stride of two is longer than a row with gaps."""
    for spec in (F16, replace(F16, layout="strided", aligned=False)):
        sizes = [
            guard_bands.with_guard_bands(memory_layout(spec, shape, padded=p), CPU, 0)
            .words.numel() * 8
            for p in (False, True)
        ]  # fmt: skip
        assert guard_bands.footprint(spec, shape) == max(sizes)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float64, torch.complex64])
def test_a_tensor_may_change_and_nothing_around_it(dtype: torch.dtype) -> None:
    spec = Operand(dtype)
    held = guard_bands.with_guard_bands(memory_layout(spec, (3, 5), padded=True), CPU, 0xA5)
    held.tensor.fill_(1)
    assert held.intact()
    held.tensor.as_strided((1,), (1,), held.tensor.storage_offset() + 5).fill_(1)
    assert not held.intact()


def test_the_memory_that_two_tensors_share() -> None:
    memory = torch.zeros(8)
    assert guard_bands.overlap(memory[:4], memory[4:])  # one allocation
    assert not guard_bands.overlap(memory[:4], torch.zeros(4))
    assert not guard_bands.overlap(memory[:0], memory)
    assert not guard_bands.overlap(memory, memory[:0])
    held = bytearray(64)
    first, second = (
        torch.frombuffer(held, dtype=torch.int32, count=8, offset=at) for at in (0, 32)
    )
    assert first.untyped_storage().data_ptr() + 32 == second.untyped_storage().data_ptr()
    assert not guard_bands.overlap(first, second)  # they are adjacent
    assert not guard_bands.overlap(second, first)
    inside = torch.frombuffer(held, dtype=torch.int32, count=8, offset=28)
    assert guard_bands.overlap(first, inside)
    assert guard_bands.overlap(inside, first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_the_same_bits(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1]).to(dtype)
    assert guard_bands.same_bits(x, x.clone())
    assert not guard_bands.same_bits(x, torch.tensor([0, 2]).to(dtype))
    if dtype.is_floating_point:
        assert not guard_bands.same_bits(x, x * torch.tensor([-1, 1]).to(dtype))  # -0
        nan = torch.full((2,), NAN, dtype=dtype)
        assert guard_bands.same_bits(nan, nan.clone())


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"bias": torch.float32}, {"residual": F32}, {"batch": 3},
        {"out": Operand(torch.float64), "a": Operand(torch.float64), "b": Operand(torch.float64)},
        {"groups": Groups(3, "m")}, {"groups": Groups(3, "k")},
        {"groups": Groups(3, "m", a_index=torch.int64)},
    ],
)  # fmt: skip
@pytest.mark.parametrize("whole", [True, False])
def test_test_data_take_five_eighths_of_their_limit(changes: dict[str, Any], whole: bool) -> None:
    """The data: two sets, their expected results, both outputs, and three results of a launcher."""
    instance = problem(m=600, n=500, k=64, **changes)

    def made(limit: int) -> tuple[int, bool]:
        return DataSets(instance, CPU, limit)._affordable()

    low, high = 1, 1 << 30
    while low < high:
        middle = (low + high) // 2
        enough = made(middle) == (2, True) if whole else made(middle)[0] == 2
        low, high = (low, middle) if enough else (middle + 1, high)
    data = DataSets(instance, CPU, low)
    sets = data.sets()
    assert made(low) == (2, whole)
    assert made(low - 1) in ((2, False) if whole else (1, False), (1, False), (0, False))
    held = 0
    for each in sets:
        held += sum(8 * memory.words.numel() for memory in each.memory.values())
        expected = each.expected
        for t in (expected.in_rows, expected.in_cols):
            held += 0 if t is None else 2 * t.numbers.nbytes
    held += sum(8 * data.out(which).words.numel() for which in (0, 1))
    held += 3 * instance.empty_out(CPU).numel() * instance.out.dtype.itemsize
    assert 0.94 * (low * 5 // 8) <= held <= 1.02 * (low * 5 // 8) + (1 << 14)


@pytest.mark.parametrize(
    "changes",
    [{}, {"batch": 3}, {"groups": Groups(3, "k")}, {"m": 66, "n": 900}, {"m": 67, "n": 900},
     {"m": 900, "n": 40}, {"m": 66, "n": 66, "batch": 200}, {"m": 67, "n": 66, "batch": 200}],
)  # fmt: skip
def test_one_set_with_samples_takes_five_eighths_of_the_most_memory(
    changes: dict[str, Any],
) -> None:
    """The data: one set, its expected results, an output, and two results of a launcher."""
    instance = problem(**{"m": 600, "n": 500, "k": 4, **changes})

    def made(limit: int) -> tuple[int, bool]:
        return DataSets(instance, CPU, limit, sampled=True)._affordable()

    low, high = 1, 1 << 30
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if made(middle)[0] else (middle + 1, high)
    assert (made(low - 1), made(low), made(1 << 40)) == ((0, False), (1, False), (1, False))
    data = DataSets(instance, CPU, low, sampled=True)
    [only] = data.sets()
    held = sum(8 * memory.words.numel() for memory in only.memory.values())
    samples = (only.expected.in_rows, only.expected.in_cols)
    held += sum(t.nbytes for sample in samples if sample is not None for t in sample)
    held += 8 * data.out(0).words.numel()
    held += 2 * instance.empty_out(CPU).nbytes
    assert 0.94 * (low * 5 // 8) <= held <= 1.02 * (low * 5 // 8) + (1 << 14)


def test_each_argument_takes_memory_of_both_sets() -> None:
    """Tensors may take five eighths of the limit; guard bands and whole cache lines add some."""
    groups = Groups(3, "m")
    tile = replace(parse("identity"), outputs=(Port("x", "tile"),))

    def least(**fields: Any) -> int:
        instance = problem(m=600, n=500, k=64, **{"groups": groups, **fields})
        low, high = 1, 1 << 30
        while low < high:
            middle = (low + high) // 2
            enough = DataSets(instance, CPU, middle)._affordable() == (2, True)
            low, high = (low, middle) if enough else (middle + 1, high)
        return low

    plain = least()
    for fields, size in (
        ({"residual": F32}, 600 * 500), ({"epilogue": tile}, 600 * 500),
        ({"groups": replace(groups, a_index=torch.int64)}, (3 * 200 + 1024 + 8 - 600) * 64),
        ({"bias": torch.float32}, 3 * 2 * 500),
    ):  # fmt: skip
        more = (least(**fields) - plain) * 5 / 8
        assert 2 * 4 * size <= more <= 2 * 4 * 1.1 * size + 34 * 2**20, fields
    wider = (least(residual=F32) - least(residual=F16)) * 5 / 8
    assert 2 * 2 * 600 * 500 <= wider <= 2 * 2 * 1.5 * 600 * 500


def test_a_release_keeps_no_tensor() -> None:
    data = DataSets(problem(m=8, n=8), CPU, 1 << 30)
    data.poison_free_memory()
    tensors = [*data._kept, *(each.inputs.a for each in data.sets()), data.out(1).tensor]
    kept = [weakref.ref(t) for t in tensors]
    assert len(kept) > 3
    data.altered.add("a")
    del tensors
    data.release()
    assert [ref() for ref in kept] == [None] * len(kept)
    assert data.changed_inputs() == []


def test_two_sets_are_made_and_samples_on_request() -> None:
    instance = problem(m=300, n=200)
    assert DataSets(instance, CPU, 1 << 30)._affordable() == (2, True)
    assert DataSets(instance, CPU, 1 << 30, sampled=True)._affordable() == (1, False)
    assert DataSets(instance, CPU, 1)._affordable() == (0, False)
    huge = problem(m=2**12, n=2**12, k=2**8 + 1)  # more than 2^33 operations
    assert not DataSets(huge, CPU, 1 << 40)._affordable()[1]
    assert DataSets(replace(huge, k=2**8), CPU, 1 << 40)._affordable()[1]


def test_the_default_limit_of_a_cpu_is_a_sixteenth_of_its_memory() -> None:
    import os

    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert default_limit(CPU) == min(has // 16, 4 << 30)
    assert default_limit(CPU, math.inf) == has // 16
    assert default_limit(CPU, 5) == 5


@pytest.mark.parametrize("error", [OSError, ValueError, AttributeError])
def test_the_default_limit_of_a_system_that_does_not_report_its_memory(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> int:
        raise error(name)

    monkeypatch.setattr(data_sets.os, "sysconf", unknown)
    assert default_limit(CPU) == data_sets.MOST_MEMORY // 4


def _sample(numbers: torch.Tensor) -> Sample:
    return Sample(numbers, numbers.abs() + rms(numbers))


def test_samples_that_are_wrong_or_not_finite_are_seen() -> None:
    expected = torch.ones(100, 10)
    rows, cols = torch.tensor([0, 99]), torch.tensor([0, 9])
    sampled = Expected(rows, _sample(expected[rows]), cols, _sample(expected[:, cols]))
    out = expected.clone()
    assert sampled.error(out, 1 << 12) == 0
    for at, seen in (((99, 5), True), ((50, 9), True), ((50, 5), False)):
        wrong = out.clone()
        wrong[at] = 2.0
        assert (sampled.error(wrong, 3) > 0) == seen
        wrong[at] = INF
        assert not sampled.error(wrong, 3) < 1e30
    # If a sampled number has to be NaN, the others are not compared by their sum.
    undefined = expected.clone()
    undefined[0, 5] = NAN
    known = Expected(rows, _sample(undefined[rows]), cols, _sample(undefined[:, cols]))
    assert known.error(undefined, 3) == 0
    assert known.error(undefined.index_fill(0, rows[1:], 2.0), 3) > 0
    some = replace(sampled, defined=(slice(100), slice(10)))
    assert some.error(out, 1 << 12) == 0
    beyond = Expected(None, _sample(expected[:60]), None, None, (slice(60), slice(10)))
    out[60:] = NAN
    assert beyond.error(out, 1 << 12) == 0
    assert replace(beyond, defined=(slice(0), slice(10))).error(out, 1 << 12) == 0
    right = Expected(None, _sample(expected[:, :4]), None, None, (slice(100), slice(4)))
    assert right.error(torch.ones(100, 10), 7) == 0


# -- group sizes ----------------------------------------------------------------------------


def sizes_of(count: int, total: int, kind: Any, seed: int = 0) -> list[int]:
    ends = ragged_inputs.ends_of(count, total, random_inputs.seeded(CPU, seed), kind)
    return [end - start for _, start, end in compare.ranges(ends)]


@pytest.mark.parametrize("seed", range(4))
def test_distributions_of_group_sizes(seed: int) -> None:
    assert sorted(sizes_of(8, 20, "small", seed)) == [1, 1, 2, 2, 2, 3, 3, 6]
    assert sorted(sizes_of(8, 15, "small", seed)) == [1, 1, 1, 2, 2, 2, 3, 3]
    assert sorted(sizes_of(8, 14, "small", seed)) == [1] * 7 + [7]
    assert sorted(sizes_of(8, 5, "small", seed)) == [0] * 3 + [1] * 5
    assert sorted(sizes_of(8, 20, "one", seed)) == [0] * 7 + [20]
    sparse = sizes_of(8, 800, "sparse", seed)
    assert (sparse[0], sparse[-1]) == (0, 0)
    assert sum(size > 0 for size in sparse) in (2, 3, 4)
    assert sizes_of(3, 9, "sparse", seed) == [0, 9, 0]
    assert sorted(sizes_of(2, 9, "sparse", seed)) == [0, 9]
    assert sorted(sizes_of(8, 60, "even", seed)) == [0, 0] + [10] * 6  # a fifth, rounded up
    assert sorted(sizes_of(5, 40, "even", seed)) == [0] + [10] * 4
    assert sorted(sizes_of(6, 40, "even", seed)) == [0, 0] + [10] * 4
    skewed = sorted(sizes_of(8, 8000, "skewed", seed))
    assert skewed[:2] == [0, 0]
    assert skewed[-1] >= 2 * skewed[2]
    for kind in ("even", "skewed", "one", "small"):
        assert sizes_of(1, 7, kind, seed) == [7]


@pytest.mark.parametrize(
    ("total", "reads", "rows"),
    [
        (100, "one", 1), (100, "same", 100), (0, "same", 0),
        (100, "twice", 50), (7, "twice", 3), (1, "twice", 1), (0, "twice", 1),
        (100, "fewer", 50), (16, "fewer", 8), (15, "fewer", 8), (0, "fewer", 8),
        (18, "fewer", 9), (100, "more", 408), (1000, "more", 2032), (341, "more", 341 + 1023 + 8),
        (342, "more", 342 + 1024 + 8),
    ],
)  # fmt: skip
def test_the_number_of_rows_to_gather_from(total: int, reads: Any, rows: int) -> None:
    assert ragged_inputs.rows_read(total, reads) == rows


def drawn(groups: Groups, total: int = 40, **more: Any) -> Rows:
    given: dict[str, Any] = {"sizes": "even", "whole": False} | more
    return Rows.of(groups, total, CPU, random_inputs.seeded(CPU, 1), **given)


EVERYTHING = Groups(3, "m", a_index=torch.int64, out_index=torch.int32, out_weights=torch.float32)


def test_indices_and_weights_have_the_form_of_a_calls() -> None:
    rows = drawn(EVERYTHING)
    assert (rows.ends[-1], rows.read) == (37, 20)
    assert rows.a_index is not None
    assert rows.out_index is not None
    assert rows.out_weights is not None
    assert (rows.a_index.dtype, rows.out_index.dtype) == (torch.int64, torch.int32)
    assert int(rows.a_index.min()) >= 0
    assert int(rows.a_index.max()) == 19
    assert sorted(rows.out_index.tolist()) == list(range(40))
    assert rows.out_index[37:].tolist() == [37, 38, 39]
    assert rows.out_weights.isnan().nonzero()[:, 0].tolist() == [37, 38, 39]
    assert float(rows.out_weights[:37].min()) >= 0.5
    assert float(rows.out_weights[:37].max()) < 1.5
    assert len(rows.other_offs) == 5
    assert torch.equal(rows.of_call(6).offs, rows.offs)
    assert torch.equal(rows.of_call(2).offs, rows.other_offs[1])
    assert all(int(offs[-1]) == 37 and offs.dtype is torch.int32 for offs in rows.other_offs)
    plain = drawn(Groups(3, "m"), whole=True)
    assert (plain.ends[-1], plain.read, plain.given.keys()) == (40, 40, {"offs"})
    assert drawn(Groups(3, "m"), total=4).ends[-1] == 3  # at most 3 rows, or a quarter, in no group
    assert drawn(Groups(3, "m"), total=3).ends[-1] == 3


@pytest.mark.parametrize("sizes", get_args(ragged_inputs.Sizes))
def test_indices_and_weights_are_of_the_rows_in_groups(sizes: str) -> None:
    """Rows are moved and weighted up to the end of the last group, whichever groups are empty."""
    rows = drawn(EVERYTHING, sizes=sizes)
    assert rows.out_index is not None
    assert rows.out_weights is not None
    end = rows.ends[-1]
    assert rows.out_weights.isfinite().tolist() == [row < end for row in range(40)]
    moved = (rows.out_index != torch.arange(40)).nonzero()[:, 0].tolist()
    assert (moved[-1] if moved else -1) == end - 1


@pytest.mark.parametrize(
    ("groups", "whole", "defined"),
    [
        (Groups(3, "m"), False, (37, 50)), (Groups(3, "m"), True, (40, 50)),
        (Groups(3, "n"), False, (50, 37)), (Groups(3, "k"), False, (50, 50)),
        (Groups(3, "m", zeroed=True), False, (40, 50)), (None, True, (50, 50)),
    ],
)  # fmt: skip
def test_a_result_is_defined_up_to_the_last_group(
    groups: Groups | None, whole: bool, defined: tuple[int, int]
) -> None:
    sizes = {name: 40 if groups and groups.ragged == name else 50 for name in "mnk"}
    instance = problem(**sizes, groups=groups)
    rows = drawn(groups, whole=whole) if groups else None
    inputs = Inputs(torch.empty(0), torch.empty(0), rows=rows)
    assert inputs.defined(instance) == tuple(map(slice, defined))


@pytest.mark.parametrize(
    ("ragged", "poisoned"),
    [
        ("m", {"a": (slice(2, None),), "residual": (slice(2, None),)}),
        ("n", {"b": (slice(None), slice(2, None)), "residual": (slice(None), slice(2, None))}),
        ("k", {"a": (slice(None), slice(2, None)), "b": (slice(2, None),)}),
    ],
)
def test_data_beyond_the_last_group_is_nan(ragged: Any, poisoned: dict[str, Any]) -> None:
    instance = problem(m=4, n=4, k=4, groups=Groups(2, ragged), residual=F32)
    tensors = {"a": torch.ones(4, 4), "b": torch.ones(4, 4), "residual": torch.ones(4, 4)}
    if ragged == "m":
        tensors["b"] = torch.ones(2, 4, 4)
    if ragged == "n":
        tensors["a"] = torch.ones(2, 4, 4)
    inputs = Inputs(tensors["a"], tensors["b"], None, tensors["residual"])
    Rows(torch.tensor([1, 2]), (1, 2), 4).poison_beyond(instance, inputs)
    for name, t in tensors.items():
        right = torch.ones_like(t)
        if name in poisoned:
            right[poisoned[name]] = NAN
        assert torch.equal(t.isnan(), right.isnan()), name


def test_data_that_no_group_reads_is_nan() -> None:
    instance = problem(
        m=4, n=4, k=4, groups=Groups(3, "m", a_index=torch.int64), bias=torch.float32
    )
    a, b, bias = torch.ones(5, 4), torch.ones(3, 4, 4), torch.ones(3, 4)
    rows = Rows(torch.tensor([1, 1, 3]), (1, 1, 3), 5, a_index=torch.tensor([4, 0, 4, 2]))
    rows.poison_unread(instance, Inputs(a, b, bias))
    assert a.isnan().any(1).tolist() == [False, True, True, True, False]
    assert b.isnan().flatten(1).any(1).tolist() == [False, True, False]
    assert bias.isnan().any(1).tolist() == [False, True, False]
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    Rows(torch.tensor([1, 1, 3]), (1, 1, 3), 4).poison_unread(
        problem(m=4, n=4, k=4, groups=Groups(3, "k")), Inputs(a, b)
    )
    assert not a.isnan().any()
    assert not b.isnan().any()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.int8, 127), (torch.uint8, 255), (torch.int32, 2**31 - 1), (torch.float16, None),
     (torch.complex64, None), (torch.float8_e4m3fn, None)],
)  # fmt: skip
def test_the_poison_of_each_dtype(dtype: torch.dtype, value: int | None) -> None:
    t = ragged_inputs.poison(torch.zeros(3, 2).to(dtype))
    at = torch.zeros(3, 2).to(dtype)
    if not dtype.is_complex:  # groups of complex numbers are not supported
        ragged_inputs._poison_at(at, torch.tensor([False, True, False]))
    if value is not None:
        assert (t == value).all()
        assert at.tolist() == [[0, 0], [value, value], [0, 0]]
        return
    wide = t.to(torch.complex64 if dtype.is_complex else torch.float32)
    assert wide.isnan().all()
    if not dtype.is_complex:
        assert at.float().isnan().any(1).tolist() == [False, True, False]


# -- values that are not finite --------------------------------------------------------------


def test_kinds_of_values() -> None:
    found = nonfinite.kinds_of(torch.tensor([NAN, INF, -INF, 0.0, -5.0]))
    assert found.tolist() == [2.0, 1.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("dtype", "count"),
    [(torch.float32, 3), (torch.float8_e5m2, 3), (torch.float8_e4m3fn, 1), (torch.int8, 0),
     (torch.complex64, 3)],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_a_dtype_has_so_many_values_that_are_not_finite(dtype: torch.dtype, count: int) -> None:
    found = nonfinite.values_of(dtype)
    assert len(found) == count
    assert not count or math.isnan(found[0])
    assert found[1:] == ((INF, -INF) if count > 1 else ())


def test_the_column_that_depends_on_one_of_b() -> None:
    halves = problem(n=8, epilogue=parse("swiglu"))
    assert [nonfinite.column(halves, line) for line in (0, 7, 8, 15)] == [0, 7, 0, 7]
    pairs = problem(n=8, epilogue=CLAMPED)
    assert [nonfinite.column(pairs, line) for line in (0, 1, 14, 15)] == [0, 0, 7, 7]


def expecting(axis: Any, **defined: Any) -> nonfinite.NonFinite:
    """Row or column 1 of a 3 × 2 or 2 × 3 result: NaN, then anything, then a number."""
    kinds = torch.tensor([[2.0, 0.0, 0.0]])
    free = torch.tensor([[False, True, False]])
    if axis == "columns":
        kinds, free = kinds.mT, free.mT
    return nonfinite.NonFinite(axis, (), torch.tensor([1]), kinds, free, **defined)


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_where_nan_is_expected(axis: Any) -> None:
    def fault(row: list[float], other: float = 0.0, **more: Any) -> str | None:
        out = torch.zeros(2, 3)
        out[1] = torch.tensor(row)
        out[0, 2] = other
        return expecting(axis, **more).fault(out if axis == "rows" else out.mT)

    assert fault([NAN, 0.0, 0.0]) is None
    assert fault([NAN, INF, 0.0]) is None
    what = f"with NaN and Inf in {axis} [1]"
    assert fault([0.0, 0.0, 0.0]) == f"{what}, 1 elements there are wrong: one is 0 and not nan"
    text = f"{what}, 2 elements there are wrong: one is inf and not nan"
    assert fault([INF, 0.0, NAN]) == text
    assert fault([NAN, 0.0, 0.0], other=NAN) == f"{what}, 1 elements of others are not finite"
    assert fault([NAN, 0.0, NAN]) == (
        f"{what}, 1 elements there are wrong: one is nan and not a number"
    )


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_other_lines_have_the_bits_of_a_launch_without_nan(axis: Any) -> None:
    out = torch.ones(3, 3)
    out[1] = torch.tensor([NAN, 7.0, 0.0])
    first = (slice(2), slice(3)) if axis == "rows" else (slice(3), slice(2))
    for defined in ({}, {"defined": first}):
        for row, col, seen in ((1, 1, False), (0, 2, True), (2, 0, not defined)):
            usual = torch.ones(3, 3)
            usual[row, col] = torch.nextafter(usual[row, col], torch.tensor(2.0))
            given = (out, usual) if axis == "rows" else (out.mT, usual.mT)
            fault = expecting(axis, **defined).fault(given[0], usual=given[1])
            assert fault == (
                f"with NaN and Inf in {axis} [1], elements of others have other bits"
                if seen
                else None
            )
    nothing = replace(expecting(axis), places=torch.tensor([], dtype=torch.long))
    empty = torch.empty(0, 0)
    bare = replace(nothing, kinds=empty, free=torch.empty(0, 0, dtype=torch.bool))
    assert bare.fault(empty, usual=empty.clone()) is None


def test_nan_is_accepted_where_the_reference_has_it() -> None:
    out = torch.zeros(2, 3)
    out[1, 0] = out[0, 2] = NAN
    assert "others are not finite" in str(expecting("rows").fault(out))
    assert expecting("rows").fault(out, elsewhere_finite=False) is None


def test_any_value_is_accepted_where_the_result_is_undefined() -> None:
    out = torch.zeros(3, 3)
    out[1, 0] = out[2, 2] = NAN
    assert "others" in str(expecting("rows").fault(out))
    assert expecting("rows", defined=(slice(2), slice(3))).fault(out) is None


@pytest.mark.parametrize("along", ["m", "n", "k"])
def test_what_lies_beyond_the_last_group_may_be_anything(along: Any) -> None:
    instance = problem(m=12, n=12, k=12, groups=Groups(3, along))
    data = DataSets(instance, CPU, 1 << 26)
    of = data.sets()[-1]
    assert of.inputs.rows is not None
    end, both = of.inputs.rows.ends[-1], data.nonfinite()
    assert (end < 12, [values.axis for values in both]) == (True, ["rows", "columns"])
    for values in both:
        with nonfinite.planted(values.changes):
            right = expected(instance, of.inputs).numbers.float()
        if along != "k":
            right.movedim("mn".index(along), 0)[end:] = NAN
        assert values.fault(right, True) is None
        wrong = right.nan_to_num(0.0)
        assert "elements there are wrong" in str(values.fault(wrong, True))


def test_planted_values_are_taken_back() -> None:
    t = torch.ones(2, 2)
    change = nonfinite.Change(t, (0, 1), (0,), NAN)
    with nonfinite.planted([change]):
        assert t.isnan().tolist() == [[False, True], [False, False]]
    assert torch.equal(t, torch.ones(2, 2))


@pytest.mark.parametrize("ends", [(0, 4, 4), (4, 4, 4), (0, 0, 1), (1, 3, 4)])
def test_values_are_planted_in_the_first_and_last_terms_of_groups(ends: tuple[int, ...]) -> None:
    instance = problem(m=8, n=6, k=6, groups=Groups(3, "k"))
    rows = Rows(torch.tensor(ends), ends, 6)
    inputs = Inputs(torch.ones(8, 6), torch.ones(6, 6), rows=rows)
    starts = [start for _, start, end in compare.ranges(ends) if start < end]
    last = [end - 1 for _, start, end in compare.ranges(ends) if start < end]
    for seed in range(8):
        for axis in nonfinite.AXES:
            changes = list(nonfinite._changes(instance, inputs, axis, random.Random(seed)))
            terms = [change.index[1] for change in changes]
            assert len(terms) == 3
            assert terms[0] in (last[:-1] or last)
            assert terms[1] in (starts[1:] or starts)
            assert terms[2] < ends[-1]


@pytest.mark.parametrize("k", [1, 2])
def test_values_are_planted_in_terms_that_there_are(k: int) -> None:
    instance, inputs = problem(m=8, n=6, k=k), Inputs(torch.ones(8, k), torch.ones(k, 6))
    for seed in range(8):
        for axis in nonfinite.AXES:
            changes = list(nonfinite._changes(instance, inputs, axis, random.Random(seed)))
            assert len(changes) == 3
            assert all(0 <= change.index[1] < k for change in changes)
    assert list(nonfinite._changes(replace(instance, k=0), inputs, "rows", random.Random())) == []


@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_values_are_planted_in_three_lines_and_twice_in_a_term(axis: Any) -> None:
    instance = problem(m=8, n=6, k=5, bias=torch.float32, residual=F32)
    inputs = Inputs(torch.ones(8, 5), torch.ones(5, 6), torch.ones(6), torch.ones(8, 6))
    *lines, nan, infinite = nonfinite._changes(instance, inputs, axis, random.Random(0))
    assert len(lines) == nonfinite.COUNT == 3
    assert len({change.places for change in lines}) == 3
    assert [str(change.value) for change in lines] == ["nan", "inf", "-inf"]
    assert [change.index[1] for change in lines[:2]] == [4, 0]  # the last term, then the first
    term = inputs.residual if axis == "rows" else inputs.bias
    assert nan.tensor is infinite.tensor is term
    assert math.isnan(nan.value)
    assert math.isinf(infinite.value)
    bare = replace(inputs, bias=None, residual=None)
    plain = problem(m=2, n=6, k=5)
    short = replace(bare, a=torch.ones(2, 5))
    assert len(list(nonfinite._changes(plain, short, "rows", random.Random(0)))) == 2
    alone = replace(instance, m=1), replace(inputs, a=torch.ones(1, 5), residual=torch.ones(1, 6))
    assert len(list(nonfinite._changes(*alone, axis, random.Random(0)))) == (
        3 if axis == "rows" else 5
    )
    no_groups = replace(bare, rows=Rows(torch.tensor([0, 0]), (0, 0), 5))
    for empty, given in (
        ({"m": 0}, bare),
        ({"n": 0}, bare),
        ({"groups": Groups(2, "k")}, no_groups),
    ):
        assert list(nonfinite._changes(replace(plain, **empty), given, axis, random.Random())) == []


CHANGES: dict[Any, int] = {"rows": 6, "columns": 5}


def test_no_planted_value_hides_another() -> None:
    groups = Groups(2, "m", out_index=torch.int64, out_weights=torch.float32)
    instance = problem(m=40, n=30, k=5, bias=torch.float32, residual=F32, groups=groups)
    rows = Rows(
        torch.tensor([16, 40]), (16, 40), 40, out_index=torch.arange(39, -1, -1),
        out_weights=torch.ones(40),
    )  # fmt: skip
    inputs = Inputs(
        torch.ones(40, 5), torch.ones(2, 5, 30), torch.ones(2, 30), torch.ones(40, 30), rows=rows
    )
    for seed in range(20):
        for axis, count in CHANGES.items():
            changes = [*nonfinite._changes(instance, inputs, axis, random.Random(seed))]
            assert all(change.tensor[change.index].dim() == 0 for change in changes)
            places = [place for change in changes for place in change.places]
            assert len(places) == len(set(places)) == count, (seed, axis, places)


def test_the_sign_of_inf_times_a_number_that_may_be_rounded_to_another_sign_is_free() -> None:
    instance = problem(m=1, n=3, k=4, epilogue=parse("swiglu"))
    # Three gates are Inf. Their up values are numbers, the last one small.
    z = torch.tensor([[math.inf] * 3 + [2.0, -3.0, -1e-3]])
    kinds, free = nonfinite.marks(instance, z, instance.epilogue.apply(z))
    assert kinds.tolist() == [[1, -1, -1]]
    assert free.tolist() == [[False, False, True]]


# -- the state of the process -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("torch's default dtype", lambda: torch.set_default_dtype(torch.float64)),
        ("torch's default device", lambda: torch.set_default_device("meta")),
        ("the grad mode", lambda: torch.set_grad_enabled(False)),
        ("autocast", lambda: torch.set_autocast_enabled("cpu", True)),
        ("autocast", lambda: torch.set_autocast_dtype("cuda", torch.float32)),
        ("anomaly detection", lambda: torch.autograd.set_detect_anomaly(True)),
        (
            "torch's deterministic mode",
            lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        ),
        (
            "cuDNN's benchmark mode",
            lambda: torch._C._set_cudnn_benchmark(not torch.backends.cudnn.benchmark),
        ),
        (
            "cuDNN's deterministic mode",
            lambda: torch._C._set_cudnn_deterministic(not torch.backends.cudnn.deterministic),
        ),
        (
            "the reduced precision of fp16 sums",
            lambda: setattr(
                torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False
            ),
        ),
        (
            "the reduced precision of bf16 sums",
            lambda: setattr(
                torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False
            ),
        ),
        (
            "fp16 accumulation",
            lambda: setattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
        ),
        ("torch's random generator", lambda: torch.rand(1)),
        ("Python's random generator", random.random),
    ],
)
def test_state_that_a_launch_changes_is_named_and_restored(name: str, change: Any) -> None:
    before = process_state.State(CPU)
    assert watched_call.watched(lambda: 3, CPU) == (3, [])
    _, changed = watched_call.watched(change, CPU)
    assert changed == [name]
    assert before.changed() == []


def test_state_that_a_launch_changes_for_itself_and_for_others_is_restored() -> None:
    """State that other code shares is checked by a second launch."""
    before = process_state.State(CPU)

    def change() -> None:
        torch.set_default_dtype(torch.float64)
        torch.rand(1, dtype=torch.float32)

    _, changed = watched_call.watched(change, CPU)
    assert changed == ["torch's default dtype", "torch's random generator"]
    assert before.changed() == []


def test_an_alarm_and_a_hook_are_taken_back() -> None:
    """The user's own alarm and hook of all modules stay."""
    mine = register_module_forward_hook(lambda *given: None)
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000)
    try:
        before = process_state.State(CPU)
        assert watched_call.watched(lambda: 3, CPU) == (3, [])

        def change() -> None:
            register_module_forward_hook(lambda *given: None)
            signal.setitimer(signal.ITIMER_REAL, 1000)

        _, changed = watched_call.watched(change, CPU)
        assert changed == ["the hooks of every module", "the alarms of the process"]
        assert before.changed() == []
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0.0
        assert mine.id in torch.nn.modules.module._global_forward_hooks
    finally:
        mine.remove()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def test_a_removed_folder_and_an_absent_numpy_do_not_count_as_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def removed() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(process_state.os, "getcwd", removed)
    monkeypatch.setattr(process_state, "_numpy", lambda: None)
    monkeypatch.setattr(process_state.os, "chdir", None)
    assert process_state._directory() is process_state._numpy_state() is None
    process_state._set_directory(None)
    process_state._set_numpy_state(None)
    assert process_state.State(CPU).changed() == []


def test_another_thread_may_remove_state_while_it_is_read_or_restored(tmp_path: Path) -> None:
    """Such a variable or folder ended a verification, and the environment stayed half restored."""

    class Shared(UserDict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            if name == "theirs":
                del self.data[name]
            return super().__getitem__(name)

        def keys(self) -> Any:
            return {*super().keys(), "gone"} if self.written else super().keys()

        written = False

    shared = Shared(own=1, theirs=2)
    piece = process_state._entries(lambda: shared)
    assert piece.read() == {"own": 1}
    assert piece.write is not None
    shared.written = True
    piece.write({"own": 3})
    assert shared.data == {"own": 3}
    process_state._set_directory(str(tmp_path / "removed"))


def test_features_that_a_system_lacks_do_not_count_as_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    for module, name in ((process_state.signal, "pthread_sigmask"),
                         (process_state.os, "sched_getaffinity"),
                         (process_state.os, "getpriority"),
                         (sys, "setdlopenflags"), (sys, "set_int_max_str_digits")):  # fmt: skip
        monkeypatch.delattr(module, name, raising=False)
    spec = importlib.util.spec_from_file_location("process_state_elsewhere", process_state.__file__)
    assert spec is not None
    assert spec.loader is not None
    elsewhere = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(elsewhere)
    assert process_state.PIECES.keys() - elsewhere.PIECES.keys() == {
        "the signals that are blocked", "the CPUs of the process", "the priority of the process",
        "the limits of resources", "how libraries are loaded", "the limit of digits",
    }  # fmt: skip
    assert elsewhere.State(CPU).changed() == []


def test_the_priority_and_the_cpus_of_the_process_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priorities, own = {(process_state.os.PRIO_PROCESS, 0): 7}, {0: {3}}
    monkeypatch.setattr(process_state.os, "getpriority", lambda *of: priorities[of], raising=False)
    monkeypatch.setattr(process_state.os, "sched_getaffinity", own.__getitem__, raising=False)
    pieces = process_state.PIECES
    assert pieces["the priority of the process"].read() == 7
    assert pieces["the CPUs of the process"].read() == {3}


def test_a_generator_is_shared_by_all_threads() -> None:
    owners = {name: piece.owner for name, piece in process_state.PIECES.items()}
    generators = [name for name, owner in owners.items() if owner == "generator"]
    assert generators == [f"{of} random generator" for of in ("torch's", "Python's", "NumPy's")]


def test_numpys_generator_is_watched_where_numpy_is_imported() -> None:
    numpy = pytest.importorskip("numpy")
    _, changed = watched_call.watched(lambda: numpy.random.rand(), CPU)
    assert changed == ["NumPy's random generator"]


# -- results that are let go ---------------------------------------------------------------


class Cycle:
    def __init__(self, result: torch.Tensor) -> None:
        self.result, self.own = result, self


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_a_cycle_keeps_no_result(generation: int) -> None:
    launches = CheckedLauncher.__new__(CheckedLauncher)
    launches._baseline = False
    cycle = Cycle(torch.zeros(8))
    for young in range(generation):
        gc.collect(young)
    launches._returned = [memory] = [StorageWeakRef(cycle.result.untyped_storage())]
    del cycle
    launches._check_released()
    assert memory.expired()


def test_frames_that_a_profiler_holds_for_a_moment_keep_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = CheckedLauncher.__new__(CheckedLauncher)
    launches._baseline = False
    sample = [torch.zeros(8)]
    launches._returned = [memory] = [StorageWeakRef(sample[0].untyped_storage())]
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 0.2:
            sample.clear()

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(checked_launch, "time", clock)
    launches._check_released()
    assert memory.expired()


def test_a_result_that_a_kernel_keeps_is_not_garbage() -> None:
    launches = CheckedLauncher.__new__(CheckedLauncher)
    launches._baseline = False
    kept = Cycle(torch.zeros(8))
    launches._returned = [StorageWeakRef(kept.result.untyped_storage())]
    with pytest.raises(WrongError, match="keeps the memory of a result"):
        launches._check_released()


class KeepsResults(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.kept = list[Any]()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.kept.append(function(*args, **(kwargs or {})))
        return self.kept[-1]


def test_a_result_kept_by_a_mode_of_the_program_is_not_a_kernels_fault() -> None:
    launches = CheckedLauncher.__new__(CheckedLauncher)
    launches._baseline = False
    with KeepsResults() as mode:
        launches._returned = [StorageWeakRef(torch.zeros(8).untyped_storage())]
        launches._check_released()
    assert mode.kept


def test_frames_that_a_watchdog_holds_keep_no_result() -> None:
    """It holds those that it showed last, for any time."""
    launches = CheckedLauncher.__new__(CheckedLauncher)
    launches._baseline = False

    def launch() -> Any:
        result = torch.zeros(8)
        launches._returned.append(StorageWeakRef(result.untyped_storage()))
        return sys._getframe()

    # A storage is kept by no tensor, and its frame is gone.
    for keeper in (None, Cycle, torch.Tensor.untyped_storage):
        launches._returned = []
        frame = launch()
        kept = None if keeper is None else keeper(frame.f_locals["result"])
        if isinstance(kept, torch.UntypedStorage):
            frame = None
        with contextlib.nullcontext() if kept is None else pytest.raises(WrongError):
            launches._check_released()
        del kept, frame


# -- further inputs ---------------------------------------------------------------------------

#: Rounds that every problem has. Rounds below are for dense, grouped or floating-point problems.
EVERY = {
    "other values at the same addresses", "strides of zero", "strides of zero in b",
    "rows far apart", "unusual addresses", "plain or equal tensors",
    "one tensor as several arguments", "other strides at the same addresses",
    "strides of zero in all operands", "strides of zero between columns", "a of zeros",
    "b of zeros", "positive numbers", "one-hot rows", "one number in each operand",
}  # fmt: skip
DENSE, FLOODED = {"values in another order"}, {"many NaN and Inf"}
GROUPED = {
    f"group sizes: {sizes}" for sizes in ("first", "last", "none", "few", "rising", "falling")
}
SIZED = {"a small, b large", "a large, b small", "zeros and whole numbers"}
ALPHAS = {"alpha=0", "alpha=nan", "alpha=-", "large products and a small alpha"}


@pytest.mark.parametrize(
    ("dtypes", "fields", "further"),
    [
        ("fff", {}, DENSE | FLOODED | SIZED | {"large products"}),
        ("ddd", {}, DENSE | FLOODED), ("bhf", {}, DENSE | FLOODED),
        ("bhh", {"bias": torch.float16}, DENSE | FLOODED), ("hbh", {"k": 4}, DENSE | FLOODED),
        ("bhf", {"scaled": True}, DENSE | FLOODED | ALPHAS - {"large products and a small alpha"}
         | {"a large alpha"}),
        ("iiI", {}, DENSE | {"integers of any size"}), ("ccc", {}, DENSE),
        ("bbb", {}, DENSE | FLOODED | SIZED | {"sums that cancel"}),
        ("bbb", {"k": 4}, DENSE | FLOODED | SIZED | {"sums that cancel"}),
        ("bbb", {"k": 3}, DENSE | FLOODED | SIZED | {"large products"}),
        (
            "bbb", {"epilogue": parse("relu")},
            DENSE | FLOODED | SIZED | {"sums that cancel", "large products"},
        ),
        (
            "bbb", {"n": 32, "epilogue": parse("swiglu")},
            DENSE | FLOODED | SIZED | {"large products"},
        ),
        (
            "hhh", {},
            DENSE | FLOODED | SIZED
            | {"sums that cancel", "results beyond fp16's range", "subnormal results"},
        ),
        (
            "hhh", {"bias": torch.float16},
            DENSE | FLOODED | SIZED
            | {"sums that cancel", "results beyond fp16's range", "subnormal results",
               "products beyond fp16's range"},
        ),
        (
            "hhh", {"bias": torch.float16, "batch": 2},
            DENSE | FLOODED | SIZED
            | {"sums that cancel", "results beyond fp16's range", "subnormal results"},
        ),
        (
            "hhh", {"bias": torch.float16, "scaled": True},
            DENSE | FLOODED | SIZED | ALPHAS
            | {"sums that cancel", "results beyond fp16's range", "subnormal results"},
        ),
        (
            "hhh", {"epilogue": parse("relu")},
            DENSE | FLOODED | SIZED | {"sums that cancel", "large products"},
        ),
        ("hhf", {}, DENSE | FLOODED | SIZED | {"sums that cancel"}),
        (
            "ddd", {"scaled": True},
            DENSE | FLOODED | {"alpha=0", "alpha=nan", "alpha=-", "a large alpha"},
        ),
        (
            "hhh", {"groups": Groups(3, "m")},
            GROUPED | FLOODED | SIZED | {"sums that cancel", "subnormal results"},
        ),
        (
            "hhh", {"groups": Groups(3, "m"), "bias": torch.float16},
            GROUPED | FLOODED | SIZED | {"sums that cancel", "subnormal results"},
        ),
        (
            "hhh", {"groups": Groups(3, "k")},
            GROUPED | FLOODED | SIZED | {"large products", "subnormal results"},
        ),
        (
            "bhf", {"groups": Groups(3, "m")},
            GROUPED | FLOODED | {"a small, b large", "a large, b small"},
        ),
        (
            "ddd", {"groups": replace(Groups(3, "m"), a_index=torch.int32)},
            GROUPED | FLOODED
            | {"a small, b large", "a large, b small", "one row of a to gather",
               "all rows of a in order", "each row of a twice"},
        ),
        (
            "ddd", {"groups": replace(Groups(3, "m"), out_index=torch.int32)},
            GROUPED | FLOODED | {"a small, b large", "a large, b small", "all rows in order"},
        ),
    ],
)  # fmt: skip
def test_which_values_a_problem_is_verified_on(
    dtypes: str, fields: dict[str, Any], further: set[str]
) -> None:
    kinds = {"f": torch.float32, "d": torch.float64, "b": BF16, "h": torch.float16,
             "i": torch.int8, "I": torch.int32, "c": torch.complex64}  # fmt: skip
    a, b, out = (Operand(kinds[letter]) for letter in dtypes)
    plans = list(further_inputs.planned(problem(**{"a": a, "b": b, "out": out, **fields})))
    found = {re.sub(r"(alpha=-).*", r"\1", plan.name) for plan in plans}
    assert found == EVERY | further
    assert plans[0].name == "other values at the same addresses"  # detects a cache by address
    assert len({plan.name for plan in plans}) == len(plans)
    alphas = {plan.recipe.alpha for plan in plans if plan.place != "same"}
    assert len(alphas) >= 4
    for plan in plans:
        usual = plan.recipe.values == further_inputs.USUAL and not plan.infinite
        assert plan.nonfinite is (plan.flooded or plan.name == "alpha=nan")
        assert plan.judges_outputs is (usual and not plan.nonfinite)
        assert plan.flooded is (plan.name == "many NaN and Inf")
        assert plan.rolled is (plan.name == "values in another order")
        # Serving makes its operands in inference mode, and training launches without gradients.
        modes = {
            "rows far apart": "inference mode", "plain or equal tensors": "inference mode",
            "unusual addresses": "no_grad",
        }  # fmt: skip
        assert plan.mode == modes.get(plan.name, "grad mode")
        if plan.name == "large products":  # so large that a bias and a residual still count
            assert (plan.recipe.values.terms > 50) is (out.dtype is a.dtype)
        # Rows that share their memory cannot be poisoned.
        assert plan.recipe.poisoned is ("expanded" not in plan.place)
        if plan.name.startswith("group sizes"):
            assert plan.recipe.sizes == plan.name.removeprefix("group sizes: ")
        if fields.get("scaled"):  # a kernel that keeps an earlier alpha would be wrong
            assert plan.recipe.alpha not in (1.0, data_sets.FIRST.alpha, data_sets.SECOND.alpha)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_every_kind_of_groups_is_launched(dtype: torch.dtype) -> None:
    """The rounds cover all distributions of group sizes and all ways of gathering."""
    one, groups = Operand(dtype), replace(EVERYTHING, zeroed=True)
    instance = problem(a=one, b=one, out=Operand(torch.float32), groups=groups, scaled=True)
    plans = list(further_inputs.planned(instance))
    recipes = [data_sets.FIRST, data_sets.SECOND, *(plan.recipe for plan in plans)]
    assert {recipe.sizes for recipe in recipes} == set(get_args(ragged_inputs.Sizes))
    assert {recipe.reads for recipe in recipes} == set(get_args(ragged_inputs.Reads))
    assert [plan.place for plan in plans if plan.recipe.reads != "fewer"] == ["own"] * 3
    assert {plan.mode for plan in plans} == {"grad mode", "no_grad", "inference mode"}
    assert [recipe.whole for recipe in recipes] == [True, False] + [True] * len(plans)
    assert any(plan.nonfinite for plan in plans) is dtype.is_floating_point


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"m": 16, "n": 16, "k": 16}, {"b": "a"}), ({"m": 16, "n": 32, "k": 16}, {}),
        ({"m": 16, "n": 32, "k": 16, "a": INT8, "b": replace(INT8, layout="col")}, {}),
        ({"m": 32, "n": 32, "k": 16, "a": INT8, "b": replace(INT8, layout="col")}, {}),
        ({"m": 16, "n": 16, "k": 16, "residual": F32}, {"b": "a", "residual": "a"}),
        ({"m": 16, "n": 32, "k": 16, "residual": F32}, {"residual": "b"}),
        ({"m": 32, "n": 32, "k": 16, "b": Operand(torch.float32, "col")}, {"b": "a.mT"}),
        ({"m": 16, "n": 16, "k": 16, "b": Operand(torch.float32, "col")}, {"b": "a.mT"}),
        ({"m": 32, "n": 16, "k": 16, "residual": F32}, {"residual": "a"}),
        ({"m": 16, "n": 16, "k": 16, "b": F16}, {}),
        ({"m": 16, "n": 16, "k": 16, "groups": Groups(2, "k")}, {}),
        ({"m": 16, "n": 16, "k": 16, "batch": 2}, {"b": "a"}),
        (
            {"m": 4, "n": 4, "k": 2, "batch": 3, "b": Operand(torch.float32, "col")},
            {"b": "a.mT"},
        ),
    ],
)  # fmt: skip
def test_arguments_that_may_be_one_tensor(fields: dict[str, Any], found: dict[str, str]) -> None:
    instance = problem(**fields)
    assert further_inputs._aliases(instance) == found
    assert further_inputs._applies(instance, "shared") is ("b" in found)
    for place in ("plain", "shared"):
        made = {"a": torch.ones(3, 2, 2), "b": torch.ones(3, 2, 2)}
        given = further_inputs._OwnMemory(DataSets(instance, CPU, 1 << 26), place, dict(made))  # type: ignore[arg-type]
        b = given.plain("b", instance.b, instance.b_shape)
        # In a plain round the weight is a separate tensor.
        shared = place == "shared" and "b" in found
        assert (b.data_ptr() == made["a"].data_ptr()) is shared


@pytest.mark.parametrize("along", ["m", "n", "k"])
@pytest.mark.parametrize("axis", ["rows", "columns"])
@pytest.mark.parametrize("seed", range(4))
def test_values_are_planted_in_groups_alone(along: Any, axis: Any, seed: int) -> None:
    """No kernel reads operands of an empty group, or rows beyond the last group."""
    fields: dict[str, Any] = {"bias": torch.float32} if along == "m" else {}
    instance = problem(m=9, n=9, k=9, groups=Groups(3, along), residual=F32, **fields)
    rows = Rows(torch.tensor([3, 3, 5]), (3, 3, 5), 9)
    drawn = random_inputs.make(instance, CPU)
    changes = list(
        nonfinite._changes(instance, replace(drawn, rows=rows), axis, random.Random(seed))
    )
    lines, terms = changes[:3], changes[3:]
    for change in lines:
        lead, row, term_of_k = (0, *change.index)[-3:]
        if along == "k":
            assert term_of_k < 5
        elif (along, axis) in (("m", "rows"), ("n", "columns")):
            assert row < 5
        else:
            assert lead in (0, 2)
    assert len(terms) == (2 if axis == "rows" or along == "m" else 0)
    for term in terms:
        if axis == "rows":
            assert term.tensor is drawn.residual
            matrix, row, col = (0, *term.index)[-3:]
            assert {"m": row < 5, "n": col < 5, "k": matrix in (0, 2)}[along]
        else:
            assert term.tensor is drawn.bias
            assert term.index[0] in (0, 2)
            assert term.index[1] < 9


@pytest.mark.parametrize(("batch", "lead"), [(1, (1, 5)), (3, (1, 3))])
def test_n_d_operands_of_a_launcher_have_one_dimension_more(
    batch: int, lead: tuple[int, ...]
) -> None:
    instance = problem(m=5, n=4, k=3, batch=batch)
    bound = Bound(torch.add, folded=lambda *_: None)
    found = forms.folded_of(bound, instance)
    assert found is not None
    assert found.lead == lead
    assert forms.folded_of(Bound(torch.add), instance) is None
    assert forms.folded_of(bound, replace(instance, m=0)) is None


# -- random inputs ------------------------------------------------------------------------


def filled(name: str, t: torch.Tensor, k: int = 16, seed: int = 0, **values: Any) -> torch.Tensor:
    generator = random_inputs.seeded(CPU, seed)
    return random_inputs.fill(name, t, k, generator, random_inputs.Values(**values))


DTYPES = (
    torch.float32, torch.float64, torch.float16, BF16, torch.float8_e4m3fn, torch.complex64,
    torch.int8, torch.uint8, torch.int64,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [{}, {"whole": True}, {"a": 4.0}])
def test_a_seed_gives_the_numbers(dtype: torch.dtype, values: dict[str, Any]) -> None:
    empty = torch.empty(6, 16, dtype=dtype)
    one, same, other = (filled("a", empty.clone(), seed=s, **values) for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    if not (dtype.is_floating_point or dtype.is_complex):
        least = 256 if dtype is torch.uint8 else 0  # uint8 stores −8 as 248
        usual = {number % least if least else number for number in range(-8, 9)}
        assert (set(one.unique().tolist()) <= usual) is not values.get("whole", False)


@pytest.mark.parametrize(("k", "factor"), [(0, 2.0), (1, 2.0), (16, 1.0), (256, 0.5)])
def test_products_have_a_spread_of_one(k: int, factor: float) -> None:
    """Both operands are scaled; a bias is added to the product as it is."""
    empty = torch.empty(4, 8)
    for name in ("a", "b", "residual"):
        found = filled(name, empty.clone(), k)
        assert torch.equal(found, factor * filled(name, empty.clone(), 16)), name
    assert torch.equal(filled("bias", empty.clone(), k), 2.0 * filled("a", empty.clone(), 16))


@pytest.mark.parametrize("k", [8, 9, 2])
def test_sums_that_cancel_grow_to_the_middle(k: int) -> None:
    a = filled("a", torch.empty(3, k), k, cancelling=True)
    b = filled("b", torch.empty(k, 4), k, cancelling=True)
    assert (b > 0).all()
    half = k // 2
    assert (a[:, :half] > 0).all()
    assert (a[:, half : k - half] == 0).all()
    assert (a[:, k - half :] < 0).all()
    peak = a[:, :half] @ b[:half]
    assert 0.4 * random_inputs.PEAK < peak.min() <= peak.max() < 1.6 * random_inputs.PEAK
    # Half of the terms, or one less, where K is odd.
    assert peak.mean() * k / (2 * half) == pytest.approx(random_inputs.PEAK, rel=0.3)
    assert (a @ b).abs().max() < peak.min()


def test_operands_of_zeros_and_whole_numbers() -> None:
    a = filled("a", torch.empty(9, 32), sparse=True)
    b = filled("b", torch.empty(32, 8), sparse=True)
    for t, lines in ((a, a), (b, b.mT)):
        assert torch.equal(t, t.round())
        assert t.min() == 0
        zero = (lines == 0).all(-1)
        assert zero.tolist() == [place % 3 == 2 for place in range(len(lines))]
    for first in (0, 6):  # in other pairs one row is zero
        assert torch.equal(a[first], a[first + 1])
    assert not torch.equal(b[:, 0], b[:, 1])
    assert not torch.equal(a[0], a[3])


@pytest.mark.parametrize(
    ("dtype", "alpha", "found"),
    [
        (torch.float32, 20.5, 20.5), (torch.int8, 20.5, 8.0), (torch.int8, -20.5, -8.0),
        (torch.int8, 0.5, 1.0), (torch.int8, -1.25, -2.0), (torch.uint8, -1.25, 2.0),
        (torch.uint8, -20.5, 8.0), (torch.int8, 0.0, 0.0),
    ],
)  # fmt: skip
def test_the_factor_of_integers_is_whole(dtype: torch.dtype, alpha: float, found: float) -> None:
    one = Operand(dtype)
    instance = problem(m=2, n=2, k=2, a=one, b=one, out=one, scaled=True)
    recipe = random_inputs.Recipe(alpha=alpha)
    assert random_inputs.make(instance, CPU, recipe=recipe).alpha == found
    assert random_inputs.make(replace(instance, scaled=False), CPU, recipe=recipe).alpha == 1.0


def test_the_terms_of_a_stored_product_are_as_large_as_the_product() -> None:
    """A bias as large as stored numbers would hide the product's errors."""
    one = Operand(BF16)
    instance = problem(
        m=64, n=256, k=64, a=one, b=replace(INT8, layout="col"), out=one, bias=BF16, residual=one
    )
    drawn = random_inputs.make(instance, CPU, seed=1)
    for t in (drawn.bias, drawn.residual):
        assert t is not None
        assert 0.1 < float(t.float().std()) < 2.0
    assert float(drawn.b.float().std()) > 10


def test_each_row_is_gathered_twice_on_request() -> None:
    rows = drawn(Groups(3, "m", a_index=torch.int64), reads="twice")
    assert rows.a_index is not None
    assert sorted(rows.a_index.tolist()) == sorted([*range(20)] * 2)
    assert rows.a_index.tolist() != [*range(20)] * 2


@pytest.mark.parametrize("gathered", [False, True])
def test_scales_are_of_the_rows_that_are_read(gathered: bool) -> None:
    fp8 = Operand(torch.float8_e4m3fn, scale=Scale.parse("row"))
    groups = Groups(3, "m", a_index=torch.int64 if gathered else None)
    instance = problem(m=40, n=8, k=8, a=fp8, b=fp8, out=Operand(BF16), groups=groups)
    recipe = random_inputs.Recipe(sizes="first", reads="more")
    given = random_inputs.make(instance, CPU, recipe=recipe)
    assert given.rows is not None
    scale = given.parts["a_scale"]
    assert scale.shape == (given.rows.read,) == ((168,) if gathered else (40,))
    if gathered:
        read = torch.zeros(168, dtype=torch.bool)
        read[given.rows.a_index] = True
        assert torch.equal(scale.isnan(), ~read)
        assert torch.equal(given.a.float().isnan().all(1), ~read)


def test_rows_are_gathered_in_order_on_request() -> None:
    both = Groups(3, "m", a_index=torch.int64, out_index=torch.int32)
    rows = drawn(both, reads="same")
    assert rows.read == 40
    assert rows.a_index is not None
    assert rows.out_index is not None
    assert rows.a_index.tolist() == rows.out_index.tolist() == list(range(40))


# -- further inputs -----------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "columns"), [(0, 4), (5, 4), (3, 1)])
def test_a_flood_leaves_one_row_of_five(seed: int, columns: int) -> None:
    """Other rows are NaN, or have one Inf; a third of the latter hold nothing but Inf. Two of seven
    columns of b have an Inf or a zero."""
    a, b = torch.zeros(2, 31, columns), torch.ones(columns, 10)
    further_inputs._flood(a, b, seed)
    term = seed % columns
    others = [column for column in range(columns) if column != term]
    for row in range(31):
        kind, value = row % 5, {2: INF, 3: -INF}.get(row % 5)
        if kind == 0:
            assert a[:, row].isnan().all()
        elif kind == 4:
            assert (a[:, row] == 0).all()
        elif value is not None:
            assert (a[:, row, term] == value).all()
            whole = row >= 12 and (row - kind) % 15 == 10
            assert (a[:, row, others] == (value if whole else 0)).all()
        else:  # -Inf as the last value, and NaN before it
            assert a[:, row, term - 1].isnan().all()
            assert columns == 1 or (a[:, row, term] == -INF).all()
            assert not a[:, row, [c for c in others if c != (term - 1) % columns]].any()
    right = torch.ones_like(b)
    right[term, 3::7], right[term - 1, 4::7] = 0, INF
    assert torch.equal(b, right)


@pytest.mark.parametrize(
    "b",
    [
        torch.ones(4, 10, dtype=torch.int8), torch.ones(2, 10, dtype=torch.uint8),
        torch.ones(4, 10).to(torch.float8_e4m3fn), torch.ones(2, 10),
    ],
)  # fmt: skip
def test_weights_that_hold_no_inf_stay_unchanged(b: torch.Tensor) -> None:
    """Weights stay unchanged if their dtype has no Inf, or if packing hides the terms of sums."""
    before = b.clone()
    further_inputs._flood(torch.zeros(31, 4), b, 0)
    assert torch.equal(b.float(), before.float())


@pytest.mark.parametrize(
    ("fields", "expanded", "in_b"),
    [
        ({"m": 4, "n": 4, "k": 4}, False, False),
        ({"bias": torch.float32}, True, False),
        ({"residual": Operand(torch.float32, "strided", False)}, None, False),
        ({"b": Operand(torch.float32, "strided", False)}, False, None),
        ({"a": Operand(torch.float32, "strided", False)}, None, False),
        ({"batch": 3}, True, True),
        ({"batch": 3, "residual": F32}, True, True),
    ],
)
def test_which_problems_have_strides_of_zero(
    fields: dict[str, Any], expanded: bool | None, in_b: bool | None
) -> None:
    """None: strides are zero if the layout allows."""

    def allows(spec: Operand, shape: Any) -> bool:
        return 0 in guard_bands.expanded_layout(spec, shape).strides

    instance = problem(**fields)
    if expanded is None:
        expanded = allows(instance.a, instance.a_shape) or (
            instance.residual is not None and allows(instance.residual, instance.out_shape)
        )
    if in_b is None:
        in_b = allows(instance.b, instance.b_shape)
    assert further_inputs._applies(instance, "expanded") is expanded
    assert further_inputs._applies(instance, "expanded b") is in_b
    assert further_inputs._applies(instance, "all expanded") is (expanded and in_b)
    assert further_inputs._applies(instance, "same")


@pytest.mark.parametrize("cancelling", [False, True])
@pytest.mark.parametrize("text", ["identity", "relu"])
def test_results_that_are_judged(text: str, cancelling: bool) -> None:
    """Results of unusual values are judged if the epilogue leaves them finite in fp32. If sums
    cancel, it must also leave results about as large as the sums."""
    recipe = random_inputs.Recipe(random_inputs.Values(cancelling=cancelling, a=8.0))
    instance = problem(m=2, n=2, k=2, a=F16, b=F16, out=F16, epilogue=parse(text))
    data = DataSets(instance, CPU)
    unusual = further_inputs.Round(data, further_inputs.Plan("x", recipe))
    usual = further_inputs.Round(data, further_inputs.Plan("x", random_inputs.Recipe()))
    least = random_inputs.SPREAD / 8
    for number, judged in (
        (least, True), (least * 0.9, not cancelling), (7e4, True), (1.7e38, True),
        (1e-3, not cancelling), (0.0, not cancelling),
        (1.8e38, False), (NAN, False), (INF, False),
    ):  # fmt: skip
        expected = torch.tensor([[0.0, number]])
        assert unusual._is_judged(expected) is (judged or text == "identity")
        assert usual._is_judged(expected)
    assert unusual._is_judged(torch.empty(0, 2))


def test_a_reference_serves_all_forms_of_a_launcher() -> None:
    data = DataSets(problem(m=4, n=4, k=4), CPU)
    found = further_inputs.Round(data, further_inputs.Plan("x", random_inputs.Recipe()))
    assert found.expected is found.expected


@pytest.mark.parametrize("place", ["same", "apart", "near", "plain", "shared", "expanded"])
def test_which_rounds_have_an_output_of_unusual_strides(place: Any) -> None:
    plan = further_inputs.Plan("x", random_inputs.Recipe(), place)
    data = DataSets(problem(m=6, n=10, k=12), CPU)
    made = further_inputs.Round(data, plan)
    out = made.out()
    assert (out is not None) is (place in ("apart", "near"))
    if out is not None:
        assert out.tensor.shape == (6, 10)
        assert (out.tensor == 0.5).all()
        assert out.intact()
        assert out.tensor.stride() != (10, 1)


@pytest.mark.parametrize("place", ["apart", "near"])
def test_a_class_that_allows_no_unusual_layout_has_its_usual_one(place: Any) -> None:
    """A layout with offsets beyond 32 bits would not fit in memory."""
    wide = Operand(torch.float32, wide=True)
    data = DataSets(problem(m=6, n=10, k=12, a=wide, out=wide), CPU)
    made = further_inputs.Round(data, further_inputs.Plan("x", random_inputs.Recipe(), place))
    a = further_inputs._OwnMemory(data, place)("a", wide, (6, 12))
    assert a.stride() == memory_layout(wide, (6, 12)).strides == (12, 1)
    assert made.out().tensor.stride() == memory_layout(wide, (6, 10)).strides == (12, 1)
    b = further_inputs._OwnMemory(data, place)("b", F32, (12, 10))
    assert b.stride() != memory_layout(F32, (12, 10)).strides


@pytest.mark.parametrize(
    ("made", "shared"),
    [
        ({"a": torch.randn(4, 6)}, True), ({"a": torch.randn(4, 5)}, False),
        ({"a": torch.randn(2, 4, 6)}, True), ({"a": torch.randn(4, 6).half()}, False),
        ({"a": torch.randn(0, 6)}, False),
        ({"a": torch.randn(4, 5), "residual": torch.randn(3, 6)}, True),
    ],
)  # fmt: skip
def test_a_bias_that_is_the_first_row_of_another_argument(made: Any, shared: bool) -> None:
    data = DataSets(problem(m=4, n=6, k=6, bias=torch.float32), CPU)
    bias = further_inputs._OwnMemory(data, "plain", dict(made)).plain("bias", F32, (1, 6))
    assert bias.shape == (1, 6)
    last = list(made.values())[-1]
    assert (bias.data_ptr() == last.data_ptr()) is shared
    if shared:
        assert torch.equal(bias[0], last.flatten(0, -2)[0])
    grouped = DataSets(problem(m=4, n=6, k=6, bias=torch.float32, groups=Groups(2, "m")), CPU)
    alone = further_inputs._OwnMemory(grouped, "plain", dict(made)).plain("bias", F32, (2, 6))
    assert alone.shape == (2, 6)
    assert alone.data_ptr() != last.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_an_8_bit_float_is_rounded_by_half_a_step(dtype: torch.dtype) -> None:
    codes = torch.arange(0x01, 0x77, dtype=torch.uint8).view(dtype)
    steps = codes[1:].double() - codes[:-1].double()
    found = auxiliary_outputs.half_step(codes[:-1]).double()
    normal = codes[:-1].double() >= torch.finfo(dtype).smallest_normal
    assert torch.equal(found[normal], (steps / 2)[normal])
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    assert (found[~normal] == least).all()
    assert torch.equal(auxiliary_outputs.half_step((-codes.float()).to(dtype))[:-1].double(), found)


@pytest.mark.parametrize("along", ["m", "n", "k"])
def test_the_reference_of_scaled_groups(along: Any) -> None:
    """Each row of a and column of b has a scale, and one per group if all groups share the row."""
    fp8 = Operand(torch.float8_e4m3fn, scale=Scale.parse("row"))
    groups, n, k = Groups(2, along), 6, 8
    instance = problem(
        m=5, n=n, k=k, a=fp8, b=replace(fp8, layout="col"), out=Operand(BF16), groups=groups
    )
    given = random_inputs.make(instance, CPU, seed=1)
    assert given.rows is not None
    factors = {
        name: given.parts[f"{name}_scale"].double().view(instance.shape(f"{name}_scale"))
        for name in "ab"
    }
    a, b = given.a.double(), given.b.double()
    right = torch.zeros(instance.out_shape, dtype=torch.float64)
    for group, (start, end) in enumerate(zip((0, *given.rows.ends), given.rows.ends, strict=False)):
        of_a, of_b = (t[group] if t.dim() == 2 else t for t in (factors["a"], factors["b"]))
        if along == "m":
            part = (a[start:end] * of_a[start:end, None]) @ (b[group] * of_b)
            right[start:end] = part
        elif along == "n":
            right[:, start:end] = (a[group] * of_a[:, None]) @ (b * of_b)[:, start:end]
        else:
            right[group] = (a[:, start:end] * of_a[:, None]) @ (b[start:end] * of_b)
    torch.testing.assert_close(
        expected(instance, given).numbers.double(), right, rtol=1e-5, atol=1e-6
    )


# -- memory and state ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t", "fits"),
    [
        (torch.empty(4, 16), True), (torch.empty(16, 4).mT, False),
        (torch.empty(4, 17)[:, :16], False), (torch.empty(65)[1:].view(4, 16), False),
        (torch.empty(4, 20)[:, :16], True), (torch.empty(3, 4, 16), True),
    ],
)  # fmt: skip
def test_which_tensors_are_of_a_class(t: torch.Tensor, fits: bool) -> None:
    assert guard_bands.in_class(t, F32) is fits
    assert guard_bands.in_class(t, replace(F32, aligned=False)) is (not fits and t.stride(-1) == 1)
    assert not guard_bands.in_class(t, replace(F32, wide=True))


@pytest.mark.parametrize(
    ("limit", "count"),
    [(1, 1 << 12), (160 << 12, 1 << 12), (320 << 12, 1 << 13), (1 << 60, None)],
)
def test_the_number_of_elements_compared_at_a_time(limit: int, count: int | None) -> None:
    data = DataSets(problem(), CPU, memory_limit=limit)
    assert data.at_once == (data_sets.COMPARED if count is None else count)


def test_the_second_set_has_another_memory_layout() -> None:
    data = DataSets(problem(m=6, n=10, k=12), CPU)
    strides = [of.inputs.a.stride() for of in data.sets()]
    assert strides[0] == (12, 1)
    assert strides[1] == memory_layout(F32, (6, 12), padded=True).strides != strides[0]
    assert [of.recipe for of in data.sets()] == [data_sets.FIRST, data_sets.SECOND]


@pytest.mark.parametrize("layout", ["row", "col", "strided"])
@pytest.mark.parametrize("aligned", [True, False])
def test_both_sets_are_of_the_classes_of_their_operands(layout: Any, aligned: bool) -> None:
    spec = Operand(torch.float16, layout, aligned=aligned and layout != "strided")
    instance = problem(m=8, n=24, k=16, a=spec, b=spec, out=spec, residual=spec)
    data = DataSets(instance, CPU)
    for of in data.sets():
        for t in (of.inputs.a, of.inputs.b, of.inputs.residual):
            assert t is not None
            assert guard_bands.in_class(t, spec)
    assert all(guard_bands.in_class(data.out(which).tensor, spec) for which in (0, 1))


@pytest.mark.parametrize(
    ("along", "ends", "defined"),
    [
        ("m", (2, 5), (5, 7)), ("n", (2, 5), (6, 5)), ("k", (2, 5), (6, 7)), ("m", (0, 0), (0, 7)),
        (None, (), (6, 7)),
    ],
)  # fmt: skip
def test_which_part_of_a_result_is_compared(
    along: Any, ends: Any, defined: tuple[int, int]
) -> None:
    instance = problem(m=6, n=7, k=8, **({"groups": Groups(2, along)} if along else {}))
    data = DataSets(instance, CPU)
    rows = Rows(torch.tensor(ends), ends, 6) if along else None
    at_rows, at_cols = data.sampled(Inputs(torch.empty(0), torch.empty(0), rows=rows))
    assert at_rows.tolist() == list(range(defined[0]))
    assert at_cols == slice(defined[1])


@pytest.mark.parametrize(("m", "all_rows"), [(1, True), (66, True), (67, False), (200, False)])
def test_samples_are_of_results_with_more_rows_than_samples(m: int, all_rows: bool) -> None:
    """Samples are 66 rows: one in each of 64 stripes, the first and the last."""
    data = DataSets(problem(m=m, n=70, k=2), CPU, 1 << 26)
    inputs = data.sets()[0].inputs
    rows, _ = data.sampled(inputs)
    found, whole = data.expect(inputs, whole=False), data.expect(inputs, whole=True)
    for each in (rows, torch.arange(m) if found.rows is None else found.rows):
        assert (len(each) == m) is all_rows
        assert 64 <= len(each) <= 66 or m == 1
        assert (each[0], each[-1]) == (0, m - 1)
    assert (found.rows is None) is (found.cols is None) is (found.in_cols is None) is all_rows
    if found.cols is not None:
        assert (found.cols[0], found.cols[-1]) == (0, 69)
    assert whole.rows is whole.cols is whole.in_cols is None
    assert len(whole.in_rows.numbers) == m


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are this processor's")
def test_every_way_of_rounding_is_distinguished_from_the_others() -> None:
    libm = ctypes.CDLL(None)
    found = []
    try:
        for mode in (0, 0x400, 0x800, 0xC00):  # rounding to nearest, down, up, and to zero
            libm.fesetround(mode)
            found.append(process_state._rounding())
    finally:
        libm.fesetround(0)
    assert found == [
        (True, True, True), (True, False, False), (False, True, True), (True, True, False),
    ]  # fmt: skip


def test_launches_in_the_interpreter_are_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nested launch does not wait for the outer one."""
    running, most = 0, 0

    class Executor:
        def __call__(self, depth: int, *, named: str) -> str:
            nonlocal running, most
            running += 1
            most = max(most, running - depth)
            inside = self(depth + 1, named=named) if depth < 1 else named
            for _ in range(200):
                pass
            running -= 1
            return inside

    interpreter = SimpleNamespace(GridExecutor=Executor)
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", interpreter)
    ways_of_use._interpret_one_at_a_time.__wrapped__()
    assert Executor.__call__.__wrapped__ is not None  # type: ignore[attr-defined]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: Executor()(0, named="x"), range(40)))
    assert found == ["x"] * 40
    assert most == 1
    monkeypatch.setitem(sys.modules, "triton.runtime.interpreter", None)
    ways_of_use._interpret_one_at_a_time.__wrapped__()  # there is nothing to serialise
