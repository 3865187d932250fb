"""Inputs of verification: the numbers of each recipe, what each round claims, memory layouts and
N-D operands."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from fakes import problem

from tmm_core import Groups, Operand, Port
from tmm_core.epilogues import parse
from tmm_core.formats import grids, named
from tmm_core.spec.launcher import Bound
from tmm_core.spec.problem import Problem
from tmm_core.verify import (
    compare,
    further_inputs,
    guard_bands,
    ragged_inputs,
    random_inputs,
    ways_of_use,
)
from tmm_core.verify.auxiliary_outputs import Outputs
from tmm_core.verify.compare import Sample
from tmm_core.verify.data_sets import DataSets, Expected
from tmm_core.verify.ragged_inputs import Inputs, Reads, Rows
from tmm_core.verify.verifier import Verifier

CPU = torch.device("cpu")
HALF, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def filled(
    name: str, dtype: torch.dtype, form: Any = None, shape: Any = (64, 64), k: int = 16, **v: Any
) -> torch.Tensor:
    t = torch.empty(shape, dtype=dtype)
    generator = random_inputs.seeded(CPU, 0)
    return random_inputs.fill(name, t, k, generator, random_inputs.Values(**v), form)


# -- numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "values", "least", "most"),
    [
        ("a", F32, {"of_a": "positive"}, 1 / 16, 1 / 2),  # times 16^-¼
        ("b", F32, {"of_b": "negative"}, -1 / 2, -1 / 16),
        ("b", BF16, {"of_b": "positive", "b": 4.0}, 1 / 4, 2),
        ("a", torch.float8_e4m3fn, {"of_a": "negative", "a": 2.0}, -1, -1 / 8),
        ("a", torch.int8, {"of_a": "positive"}, 99, 127),
        ("a", torch.int8, {"of_a": "negative"}, -127, -99),
        ("a", torch.uint8, {"of_a": "negative"}, 199, 255),
        ("b", torch.int32, {"of_b": "positive"}, 3.125 * 2**28, 2**30),
        ("a", F32, {"sum": 1600.0}, 9.5, 10.5),
        ("b", HALF, {"sum": 1600.0}, 9.5, 10.5),
        ("bias", F32, {"sum": 1600.0, "bias": -3.0}, -3.15, -2.85),
        ("a_scale", F32, {}, 0.5, 1.5),
        ("b_scale", grids.EXPONENT, {}, 126, 128),  # a half, one and two
        ("b_zero", torch.int8, {}, -8, 8),
        ("a", torch.int8, {"whole": True}, -128, 127),
        ("a", torch.uint8, {"whole": True}, 0, 255),
        ("a", torch.int64, {"whole": True}, -(2.0**63), 2.0**62),
    ],
)  # fmt: skip
def test_numbers_fill_the_range_of_their_recipe(
    name: str, dtype: torch.dtype, values: dict[str, Any], least: float, most: float
) -> None:
    t = filled(name, dtype, **values).double()
    tenth, room = (most - least) / 10, 4e-3 * max(abs(least), abs(most))
    assert least - room <= t.min() <= least + tenth
    assert most - tenth <= t.max() <= most + room


def test_numbers_without_a_pattern_are_spread_by_their_factor() -> None:
    for name, values, spread in (
        ("a", {}, 0.5), ("a", {"a": 3.0}, 1.5), ("b", {"b": 3.0}, 1.5), ("a", {"b": 3.0}, 0.5),
        ("residual", {"terms": 3.0}, 1.5), ("bias", {"terms": 3.0}, 3.0), ("bias", {}, 1.0),
        ("bias", {"a": 3.0}, 1.0),
    ):  # fmt: skip
        for dtype in (HALF, F32, torch.float64):
            t = filled(name, dtype, **values).double()
            assert t.square().mean().sqrt().item() == pytest.approx(spread, rel=0.06)
            assert abs(t.mean().item()) < 0.06 * spread
    for dtype in (torch.float8_e4m3fn, HALF, torch.int8, torch.complex64):
        assert not filled("a", dtype, a=0.0).to(torch.complex64).any()
    # Large tensors of 16 bits are drawn in place.
    large = filled("b", HALF, shape=(1 << 10, (1 << 10) + 1))
    assert large.double().square().mean().sqrt().item() == pytest.approx(0.5, rel=0.01)


def test_operands_with_one_number_or_one_sign() -> None:
    same = filled("a", F32, of_a="one number")
    assert len(same.unique()) == 1
    assert 1 / 16 <= same[0, 0] <= 1 / 2
    for dtype in (torch.complex64, torch.complex128):
        positive = filled("a", dtype, of_a="positive")
        assert 1 / 16 <= positive.real.min() < positive.real.max() <= 1 / 2
        assert not positive.imag.any()
    hot = filled("b", F32, of_b="one-hot")
    assert hot.sum(-1).tolist() == [0.5] * 64
    assert (hot != 0).sum(-1).tolist() == [1] * 64
    assert len(hot.argmax(-1).unique()) > 16
    assert filled("b", F32, shape=(4, 0), of_b="one-hot").shape == (4, 0)
    assert len(filled("b", F32, shape=(64, 1), of_b="one-hot").unique()) == 1


def test_scales_of_any_size() -> None:
    """In a large tensor of scales, every fourth along the longest dimension is zero."""
    for shape, zero in (((3, 64), (slice(None), slice(1, None, 4))), ((64, 3), slice(1, None, 4))):
        t = filled("b_scale", F32, shape=shape, scales=True)
        right = torch.zeros(shape, dtype=torch.bool)
        right[zero] = True
        assert torch.equal(t == 0, right)
        some = t[~right]
        assert some.min() > 0.5 * 10**-2.5
        assert some.max() < 1.5 * 10**0.5
        assert some.max() > 100 * some.min()
    assert filled("a_scale", F32, shape=(1, 1), scales=True) > 0
    assert filled("a_scale", F32, shape=(2, 1), scales=True)[:, 0].bool().tolist() == [True, False]
    exponents = filled("b_scale", grids.EXPONENT, scales=True)
    assert 127 - 9 <= exponents.min() < 127 - 6  # an exponent has no zero
    assert exponents.max() in (129, 130)


@pytest.mark.parametrize("name", ["int4", "int4_signed", "int8", "mxfp4", "nvfp4"])
def test_stored_numbers_and_scales_of_a_format_have_the_usual_spread(name: str) -> None:
    """The largest stored number is four standard deviations."""
    form = named(name)
    limit = form.limit
    assert limit is not None
    stored = filled("b", form.storage[0], form)
    numbers = form.dequantize(form.unpacked(stored)).double()
    assert numbers.square().mean().sqrt().item() == pytest.approx(limit / 4, rel=0.1)
    many = form.dequantize(form.unpacked(filled("b", form.storage[0], form, scales=True))).double()
    assert (many.abs() >= limit).double().mean() > 20 * (numbers.abs() >= limit).double().mean()
    # Multiplied by their scale, they are as large as numbers of plain dtypes.
    scale = grids.factors(filled("b_scale", form.scale_dtypes[0], form), F32).double()
    assert (numbers * scale.mean()).square().mean().sqrt().item() == pytest.approx(0.5, rel=0.3)
    positive = form.dequantize(form.unpacked(filled("b", form.storage[0], form, of_b="positive")))
    assert (positive >= 0).all()
    assert positive.any()
    if form.zeros:
        zeros = filled("b_zero", torch.int8, form)
        assert (zeros.min().item(), zeros.max().item()) == ((0 if form.origin else -8), 8)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((8,), (1,)), ((8,), (0,)), ((1,), (0,)), ((3, 8), (0, 1)), ((3, 8), (8, 1)),
        ((3, 8), (5, 1)), ((8, 3), (1, 5)), ((1, 8), (5, 1)), ((3, 8), (9, 1)),
        ((2, 3, 8), (30, 5, 1)), ((2, 3, 8), (0, 5, 1)), ((3, 1), (0, 1)), ((0, 8), (5, 1)),
    ],
)  # fmt: skip
def test_each_address_is_filled_once(shape: Any, strides: Any) -> None:
    memory = torch.arange(64)
    addresses = memory.as_strided(shape, strides).flatten().tolist()
    distinct = random_inputs._distinct(memory.as_strided(shape, strides)).flatten().tolist()
    assert sorted(distinct) == sorted(set(addresses))


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_static_weights_of_a_gpu_are_written_before_they_are_used(
    kind: str, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may read them on another stream, or while earlier work goes on."""
    done: list[Any] = []
    generator = random_inputs.seeded(CPU, 0)
    monkeypatch.setattr(random_inputs, "seeded", lambda device, seed: generator)
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    device: Any = SimpleNamespace(type=kind)
    random_inputs.make(
        replace(problem(m=4, n=4, k=4), static_weights=static), device,
        allocate=lambda name, spec, shape: torch.empty(shape),
    )  # fmt: skip
    assert done == ([device] if static and kind == "cuda" else [])


@pytest.mark.parametrize(("shape", "called"), [((2, 3), "mm"), ((4, 2, 3), "bmm")])
def test_a_product_of_16_bits_on_a_gpu_ignores_the_tf32_setting(
    shape: tuple[int, ...], called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference calls torch's operator with an fp32 result. A product of fp32 obeys it."""

    class OnGPU:
        dtype, is_cuda = HALF, True

        def is_floating_point(self) -> bool:
            return True

        def dim(self) -> int:
            return len(shape)

    a: Any = OnGPU()
    for name in ("mm", "bmm"):
        found = lambda *given, name=name, **more: (name, given, more)  # noqa: E731
        monkeypatch.setattr(torch, name, found)
    assert compare._product(a, a, False) == (called, (a, a), {"out_dtype": F32})


# -- rounds --------------------------------------------------------------------------------


def drawn_rounds(instance: Problem) -> dict[str, tuple[Inputs, torch.Tensor, torch.Tensor]]:
    """The inputs of each round by its name, with the product and the result."""
    data = DataSets(instance, CPU, 1 << 26)
    found = {}
    for plan in further_inputs.planned(instance):
        made = further_inputs.Round(data, plan)
        given = made.drawn
        tensors = {name: getattr(given, name) for name in ("a", "b", "bias", "residual")}
        kept: Any = {name: t.clone() for name, t in tensors.items() if t is not None}
        same = replace(given, **kept)
        product, _ = compare._multiplied(instance, same)
        found[plan.name.split("=-")[0]] = same, product, compare.expected(instance, same).numbers
    return found


def rms(t: Any) -> float:
    return t.double().square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", [HALF, BF16, F32])
def test_each_round_has_the_numbers_of_its_name(dtype: torch.dtype) -> None:
    one = Operand(dtype)
    largest = torch.finfo(dtype).max
    instance = problem(m=32, n=24, k=64, a=one, b=one, out=one, residual=one)
    rounds = drawn_rounds(instance)

    def of(name: str) -> tuple[Any, ...]:
        given, product, y = rounds[name]
        return given.a, given.b, given.residual, product, y

    a, b, residual, product, y = of("a small, b large")
    assert rms(a) < 2e-5
    assert rms(b) > 64
    assert 0.3 * rms(product) < rms(residual) < rms(product)  # neither term hides the other
    a, b, residual, product, y = of("a large, b small")
    assert rms(b) < 2e-5
    assert rms(a) > 64
    assert (rms(residual) > 1e5 * rms(product)) is (dtype is not HALF)
    a, b, _, product, y = of("zeros and whole numbers")
    assert torch.equal(y[2::3], rounds["zeros and whole numbers"][0].residual[2::3])
    for name, sign_a, sign_b in (("positive numbers", 1, 1), ("one-hot rows", 1, -1)):
        a, b, *_ = of(name)
        assert (sign_a * a >= 0).all(), name
        assert (sign_b * b > 0).all(), name
    assert ((a != 0).sum(-1) == 1).all()
    a, b, residual, *_ = of("a of zeros")
    assert not a.any()
    assert not residual.any()
    assert b.any()
    a, b, residual, *_ = of("b of zeros")
    assert not b.any()
    assert (a > 0).all()
    assert residual.any()
    a, b, *_ = of("one number in each operand")
    assert len(a.unique()) == len(b.unique()) == 1
    if dtype is F32:
        _, _, _, product, y = of("large products")
        assert rms(product) > 88  # exp overflows
    else:
        a, b, _, product, y = of("sums that cancel")
        middle = a[:, :32].double() @ b[:32].double()
        assert middle.min() > 65504
        assert rms(product) < 65504 / 4
    if dtype is HALF:
        y = of("results beyond fp16's range")[-1]
        assert (y > largest).all()
        y = of("subnormal results")[-1]
        assert rms(y) < torch.finfo(HALF).smallest_normal
        assert rms(y) > torch.finfo(HALF).smallest_normal * 2**-6


def test_a_sum_beyond_the_range_of_fp16_comes_back_with_its_bias() -> None:
    half = Operand(HALF)
    rounds = drawn_rounds(problem(m=8, n=8, k=64, a=half, b=half, out=half, bias=HALF))
    _, product, y = rounds["products beyond fp16's range"]
    beside, spread = torch.empty(8, 8), random_inputs.Values(sum=8e4)
    random_inputs.fill("residual", beside, 64, random_inputs.seeded(CPU), spread)
    assert beside.min() < 0 < beside.max() < 4
    assert product.min() > 65504
    assert y.max() < 65504


@pytest.mark.parametrize(("text", "least", "most"), [("identity", 10**2.5, 1e3), ("silu", 1, 4)])
def test_alphas_have_each_sign_and_magnitude(text: str, least: float, most: float) -> None:
    """An epilogue saturates beyond the smaller alphas."""
    one = Operand(F32)
    instance = problem(m=8, n=8, k=8, a=one, b=one, out=one, scaled=True, epilogue=parse(text))
    plans = list(further_inputs.planned(instance))
    alphas = {plan.name: plan.recipe.alpha for plan in plans}
    small, large = (value for name, value in alphas.items() if name.startswith("alpha=-"))
    assert -0.1 <= small <= -(10**-2.5)
    assert -most <= large <= -least
    assert alphas["alpha=0"] == 0
    assert math.isnan(alphas["alpha=nan"])
    assert ("a large alpha" in alphas) is (text == "identity")
    assert alphas.get("a large alpha", 1e5) >= 10**4.5
    rounds = drawn_rounds(instance)
    given, product, _ = rounds["large products and a small alpha"]
    assert rms(given.a) * rms(given.b) > 1e30
    assert 0.5 < rms(product) < 2
    # The product has the usual size, whatever the magnitudes of the operands.
    of_values = [plan for plan in plans if plan.of_values]
    assert {plan.name for plan in of_values} >= {"a of zeros", "positive numbers"}
    assert all(plan.place == "same" for plan in of_values)
    for plan in of_values:
        assert 0.009 <= plan.recipe.alpha <= (1e6 if plan.name == "a large alpha" else most)


def test_values_in_another_order_have_the_same_sums() -> None:
    """A launcher that caches by checksums would mistake them for the previous set."""
    instance = problem(m=8, n=8, k=8, scaled=True, bias=F32, residual=Operand(F32))
    data = DataSets(instance, CPU, 1 << 26)
    [plan] = [plan for plan in further_inputs.planned(instance) if plan.rolled]
    before = data.sets()[-1].inputs
    old = {name: getattr(before, name).clone() for name in ("a", "b", "bias", "residual")}
    given = further_inputs.Round(data, plan).inputs
    for name, t in old.items():
        assert torch.equal(getattr(given, name), t.roll(1, -1)), name
        assert getattr(given, name) is getattr(before, name)
    assert given.alpha == plan.recipe.alpha != before.alpha
    plain = replace(instance, scaled=False)
    assert further_inputs.Round(DataSets(plain, CPU, 1 << 26), plan).inputs.alpha == 1.0


def test_results_beyond_fp16s_range_are_inf_and_not_its_largest_number() -> None:
    half = Operand(HALF)
    instance = problem(m=8, n=8, k=8, a=half, b=half, out=half)
    plans = {plan.name: plan for plan in further_inputs.planned(instance)}
    data = DataSets(instance, CPU, 1 << 26)
    beyond = further_inputs.Round(data, plans["results beyond fp16's range"])
    out = torch.full((8, 8), math.inf, dtype=HALF)
    assert beyond.error(out, 1 << 20) == 0.0
    out[3, 4] = torch.finfo(HALF).max
    assert math.isnan(beyond.error(out, 1 << 20))


def test_values_change_unseen_in_rounds_at_the_same_addresses() -> None:
    """A launcher that caches by object, address or version mistakes them for the previous set."""
    instance = problem(m=8, n=8, k=8, bias=F32, residual=Operand(F32), groups=Groups(2, "m"))
    data = DataSets(instance, CPU, 1 << 26)
    before = data.sets()[-1].inputs
    names = ("a", "b", "bias", "residual")
    version = {name: getattr(before, name)._version for name in names}
    for plan in further_inputs.planned(instance):
        given = further_inputs.Round(data, plan).drawn
        same = [getattr(given, name) is getattr(before, name) for name in names]
        assert same == [plan.place == "same"] * 4, plan.name
        assert given.rows is not None
        assert before.rows is not None
        in_place = plan.place in ("same", "restrided")
        assert (given.rows.offs is before.rows.offs) is in_place
        addresses = [getattr(given, name).data_ptr() for name in names]
        assert (addresses == [getattr(before, name).data_ptr() for name in names]) is in_place
        assert given.rows.ends == tuple(given.rows.offs.tolist())  # the reference reads them
    assert {name: getattr(before, name)._version for name in names} == version


@pytest.mark.parametrize("name", ["small", "sparse", "one", "even", "equal", "first", "few"])
def test_rounds_of_groups_have_the_sizes_of_their_names(name: str) -> None:
    instance = problem(m=24, n=8, k=8, groups=Groups(4, "m", out_weights=F32))
    sizes = {plan.name: plan.recipe.sizes for plan in further_inputs.planned(instance)}
    assert name in sizes.values()
    weighted = {plan.name for plan in further_inputs.planned(instance) if plan.recipe.weights}
    assert weighted == {each for each in sizes if each.startswith("group sizes")} | {
        "plain or equal tensors"
    }


# -- layouts in memory -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "aligned", "shape", "near", "overlapping", "strides", "offset"),
    [
        # fp16: 16 bytes are 8 elements. A row of 12 elements takes 16, plus a gap of 8.
        ("row", True, (4, 12), False, False, (72, 1), 8),
        ("row", True, (4, 12), True, False, (24, 1), 8),
        ("row", True, (4, 12), True, True, (24, 1), 8),
        ("row", False, (4, 12), False, False, (72, 1), 2),
        ("row", False, (4, 12), True, False, (24, 1), 4),
        ("row", False, (4, 12), True, True, (7, 1), 4),
        ("row", False, (4, 1), True, True, (16, 1), 4),
        ("col", True, (12, 4), False, False, (1, 72), 8),
        ("col", False, (12, 4), True, True, (1, 7), 4),
        ("strided", False, (4, 12), False, False, (144, 3), 0),
        ("strided", False, (4, 12), True, False, (32, 2), 0),
        ("strided", False, (4, 12), True, True, (3, 2), 0),
        ("row", True, (2, 4, 12), False, False, (24, 144, 1), 8),
        ("row", True, (2, 4, 12), True, False, (112, 24, 1), 8),
        ("row", True, (4, 16), False, False, (72, 1), 8),
        ("row", True, (4, 17), False, False, (96, 1), 8),
    ],
)  # fmt: skip
def test_unusual_layouts_of_each_class(
    layout: Any, aligned: bool, shape: Any, near: bool, overlapping: bool, strides: Any, offset: int
) -> None:
    spec = Operand(HALF, layout, aligned=aligned)
    placed = guard_bands.unusual_layout(spec, shape, near=near, overlapping=overlapping)
    assert (placed.strides, placed.offset, placed.shape) == (strides, offset, shape)
    t = torch.empty(placed.length, dtype=HALF).as_strided(shape, placed.strides, placed.offset)
    assert guard_bands.in_class(t, spec) or 1 in shape
    wide = replace(spec, wide=True)
    own = guard_bands.unusual_layout(wide, shape, near=near, overlapping=overlapping).strides
    assert own == guard_bands.unusual_layout(spec, shape, near=near).strides


def test_gaps_that_just_fit_32_bits_are_kept() -> None:
    """The last offset of 15790321 rows that are 136 apart is 2^31 - 1."""
    half = Operand(HALF)
    rows = (2**31 + 8) // 136
    for more, leading in ((0, 136), (1, 128)):
        placed = guard_bands.memory_layout(half, (rows + more, 128), padded=True)
        assert placed.strides == (leading, 1)
        flipped = replace(half, layout="col")
        placed = guard_bands.memory_layout(flipped, (128, rows + more), padded=True)
        assert placed.strides == (1, leading)


@pytest.mark.parametrize("layout", ["row", "col"])
@pytest.mark.parametrize(
    ("shape", "expands"),
    [((2, 2), True), ((1, 2), False), ((2, 1), False), ((1, 1), False), ((3, 2, 2), True)],
)
def test_two_rows_and_columns_may_share_an_address(layout: Any, shape: Any, expands: bool) -> None:
    placed = guard_bands.expanded_layout(Operand(HALF, layout, aligned=False), shape)
    assert (0 in placed.strides[-2:]) is expands
    assert placed.strides[-1 if layout == "row" else -2] == 1
    assert len(shape) == 2 or placed.strides[0] == 0


def test_tensors_of_one_memory_follow_one_another() -> None:
    placed = guard_bands.unusual_layout(Operand(HALF), (3, 5))
    column = guard_bands.MemoryLayout((2, 2), torch.float32, (1, 2), offset=1)
    banded = {
        name: guard_bands.with_guard_bands(each, CPU, filler)
        for name, each, filler in (("a", placed, 0xFF), ("b", column, 0xA5))
    }
    given = {name: each.tensor for name, each in banded.items()}
    for t in given.values():
        t.copy_(torch.randn(t.shape))
    moved = guard_bands.in_one_memory(banded)
    found = {name: each.tensor for name, each in moved.items()}
    storages = {t.untyped_storage().data_ptr() for t in found.values()}
    assert len(storages) == 1
    for name, t in given.items():
        assert torch.equal(found[name], t)
        assert found[name].stride() == t.stride()
        assert found[name].data_ptr() % 16 == t.data_ptr() % 16
    starts = [t.data_ptr() for t in found.values()]
    assert starts == sorted(starts)
    size = found["a"].untyped_storage().nbytes()
    assert size == sum(t.untyped_storage().nbytes() for t in given.values())
    assert all(torch.equal(moved[name].words, each.words) for name, each in banded.items())
    found["a"].as_strided((1,), (1,), found["a"].storage_offset() + 20).fill_(1)  # a wild write
    assert [bool(each.intact()) for each in moved.values()] == [False, True]


# -- N-D operands ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "batch", "leads"),
    [
        (6, 1, [(2, 3), (2, 3), (1, 6), (2, 3), (1, 1, 6), (1, 2, 1, 3)]),
        (5, 1, [(5, 1), (1, 5), (1, 5), (1, 1, 5), (1, 5, 1, 1)]),
        (4, 1, [(2, 2), (2, 2), (1, 4), (2, 2), (1, 1, 4), (1, 2, 1, 2)]),
        (9, 1, [(3, 3), (3, 3), (1, 9), (1, 9), (1, 1, 9), (1, 3, 1, 3)]),
        (1, 1, [(1, 1), (1, 1, 1), (1, 1, 1, 1), ()]),
        (3, 2, [(2, 3), (1, 2, 3), (2, 1, 3)]), (0, 1, []), (3, 0, []),
        (3, 6, [(6, 3), (1, 6, 3), (2, 3, 3)]),
    ],
)  # fmt: skip
def test_inputs_in_the_shapes_of_n_d_calls(m: int, batch: int, leads: list[Any]) -> None:
    one = Operand(F32, aligned=False)
    instance = problem(m=m, n=4, k=3, batch=batch, a=one, b=one, residual=one, bias=F32)
    inputs = random_inputs.make(instance, CPU)
    found = list(ways_of_use.folds(instance, inputs))
    assert [shape[:-1] for _, shape in found] == leads
    strides = set()
    for given, shape in found:
        assert shape[-1] == 4
        assert given.a.shape == (*shape[:-1], 3)
        assert given.residual is not None
        assert given.residual.shape == shape
        assert torch.equal(given.a.reshape(inputs.a.shape), inputs.a)
        assert inputs.residual is not None
        assert torch.equal(given.residual.reshape(inputs.residual.shape), inputs.residual)
        assert (given.b.dim() > 2) is (batch != 1)
        strides.add(given.a.stride())
    if m == 6:  # transposed leading dimensions, and rows with gaps
        assert {(3, 6, 1), (12, 3, 1)} <= strides


@pytest.mark.parametrize(
    ("k", "aligned", "transposed", "apart"),
    [(2, True, False, False), (2, False, True, True), (4, True, True, True),
     (4, False, False, False)],
)  # fmt: skip
def test_n_d_operands_are_of_the_class_of_their_rows(
    k: int, aligned: bool, transposed: bool, apart: bool
) -> None:
    """Rows of two fp32 numbers without gaps are not aligned to 16 bytes."""
    one = Operand(F32, aligned=aligned)
    instance = problem(m=6, n=4, k=k, a=one, b=one)
    inputs = random_inputs.make(instance, CPU)
    found = [(given.a.stride(), shape) for given, shape in ways_of_use.folds(instance, inputs)]
    assert (((k, 2 * k, 1), (2, 3, 4)) in found) is transposed
    assert (((4 * k, k, 1), (2, 3, 4)) in found) is apart
    assert len(found) == 4 + transposed + apart


@pytest.mark.parametrize(
    ("names", "divides"), [(("a", "residual"), {"a_scale", "a_zero"}),
                           (("a", "b", "residual"), {"a_scale", "a_zero", "b_scale"}),
                           (("b",), {"b_scale"}), ((), set())],
)  # fmt: skip
def test_scales_are_divided_with_their_operand(names: tuple[str, ...], divides: set[str]) -> None:
    """A scalar scale has no dimension to divide."""
    parts = {
        "a_scale": torch.randn(6, 3), "a_zero": torch.randn(6, 1), "b_scale": torch.randn(6, 1, 4),
        "b_zero": torch.randn(6),
    }  # fmt: skip
    given = Inputs(torch.randn(6, 8), torch.randn(6, 8, 4), torch.randn(4), None, 2.0, parts)
    found = ragged_inputs.divided(given, (2, 3), names)
    assert (found.a.shape[0] == 2, found.b.shape[0] == 2) == ("a" in names, "b" in names)
    assert found.residual is None
    assert found.bias is given.bias
    assert found.alpha == 2.0
    assert {name for name, t in found.parts.items() if t.shape[0] == 2} == divides
    for name, t in found.parts.items():
        assert torch.equal(t.reshape(parts[name].shape), parts[name])


# -- how much is verified ------------------------------------------------------------------------


def launches(extent: Any, *, folded: bool = False, **options: Any) -> list[tuple[str, bool]]:
    """The launches of a right launcher: which form, and whether into an output."""
    made: list[tuple[str, bool]] = []

    def by(form: str) -> Any:
        def run(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
            made.append((form, out is not None))
            return torch.matmul(a, b, out=out)

        return run

    bound = Bound(by("run"), folded=(lambda *_: by("folded")) if folded else None)
    verdict = Verifier(problem(m=6, n=8, k=4), CPU).verdict(bound, extent=extent, **options)
    assert verdict.ok, verdict.reason
    assert verdict.error is not None
    return made


RUN, INTO, FOLDED = ("run", False), ("run", True), ("folded", False)


def test_a_brief_verification_is_two_launches() -> None:
    assert launches("brief") == launches("brief", folded=True) == [RUN, INTO]


def test_a_first_use_also_launches_each_form_and_other_values() -> None:
    assert launches("first use") == [RUN, INTO, RUN]
    # A call in N-D, one of its shapes, and other values in both forms.
    assert launches("first use", folded=True) == [RUN, INTO, FOLDED, FOLDED, RUN, FOLDED]


def test_blas_is_launched_and_not_searched_for_faults() -> None:
    repeated = launches("repeated", repeats=2, baseline=True)
    assert launches("whole", repeats=2, baseline=True) == repeated
    brief = launches("brief", baseline=True)
    assert launches("first use", baseline=True, folded=True) == brief


def test_launches_are_in_the_modes_of_calls() -> None:
    """Training calls launch without grad mode, serving calls in inference mode."""
    modes: list[str] = []

    def run(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
        inference = torch.is_inference_mode_enabled()
        modes.append("inference" if inference else "grad" if torch.is_grad_enabled() else "no grad")
        return torch.matmul(a, b, out=out)

    with torch.no_grad():
        verdict = Verifier(problem(m=6, n=8, k=4), CPU).verdict(run, extent="repeated", repeats=2)
    assert verdict.ok
    # Both sets, the first one again, outputs, and pairs of launches with NaN and Inf.
    assert modes == ["grad", "inference", *["no grad"] * 2, *["inference"] * 2, *["grad"] * 4]
    modes.clear()
    assert Verifier(problem(m=6, n=8, k=4), CPU).verdict(run, extent="brief").ok
    assert modes == ["grad", "inference"]


@pytest.mark.parametrize(
    ("seconds", "count"), [(1.0, 2), (0.001, 2), (0.0005, 4), (0.0001, 20), (1e-5, 32)]
)
def test_two_threads_make_the_launches_that_a_gpu_completes_in_4_ms(
    monkeypatch: pytest.MonkeyPatch, seconds: float, count: int
) -> None:
    """The time of one launch, from an idle GPU, determines how many both threads make."""
    now, waits = [5.0], list[float]()

    def wait(device: Any) -> None:
        waits.append(now[0])

    def run(*_: Any, **__: Any) -> Any:
        now[0] += seconds

    checks = ways_of_use.WaysOfUse(DataSets(problem(), CPU, 1 << 26), run, True, False)
    monkeypatch.setattr(checks, "_launch", run)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(ways_of_use.time, "perf_counter", lambda: now[0])
    assert checks._most_together() == count
    assert waits == [5.0, 5.0 + seconds]  # the GPU is idle before and after


def test_a_launcher_that_never_allocates_writes_to_both_outputs() -> None:
    made: list[int] = []

    def run(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
        made.append(out.data_ptr())
        return torch.matmul(a, b, out=out)

    instance = problem(m=6, n=5, k=4)
    assert not instance.allocates
    assert Verifier(instance, CPU).verdict(run, extent="repeated", repeats=3).ok
    # The first launch, the same three times, both outputs, and non-finite values.
    first = made[0]
    assert [place == first for place in made] == [
        True,
        False,
        False,
        False,
        True,
        False,
        *[True] * 4,
    ]
    assert len(set(made)) == 2


@pytest.mark.parametrize("repeats", [1, 5])
def test_repeated_launches(repeats: int) -> None:
    begun = [RUN] * (2 + repeats) + [INTO] * 2
    # Non-finite values in rows and in columns, each beside a usual launch.
    assert launches("repeated", repeats=repeats) == [*begun, *[RUN] * 4]
    assert launches("repeated", repeats=repeats, deterministic=False) == [*begun, *[RUN] * 2]
    assert launches("repeated", repeats=repeats, baseline=True) == begun
    both = launches("repeated", repeats=repeats, folded=True)
    assert both == [*begun, *[RUN, RUN, FOLDED, FOLDED] * 2]


def test_results_of_repeated_launches_are_held() -> None:
    """A launcher that returns one of its two buffers would overwrite them."""
    ring = [torch.empty(6, 8), torch.empty(6, 8)]
    made: list[int] = []

    def run(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
        made.append(len(made))
        y = torch.empty(6, 8) if len(made) <= 2 else ring[len(made) % 2]
        return torch.matmul(a, b, out=y if out is None else out)

    verdict = Verifier(problem(m=6, n=8, k=4), CPU).verdict(run, extent="repeated", repeats=6)
    assert verdict.reason == "it returned memory that it had returned before and that is in use"
    assert len(made) == 5


@pytest.mark.parametrize("deterministic", [True, False])
def test_other_bits_of_repeated_launches(deterministic: bool) -> None:
    made: list[int] = []

    def run(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
        made.append(len(made))
        return torch.matmul(a, b, out=out).mul_(1 + 1e-6 * (len(made) == 4))

    verdict = Verifier(problem(m=6, n=8, k=4), CPU).verdict(
        run, extent="repeated", repeats=4, deterministic=deterministic
    )
    assert verdict.ok is not deterministic
    assert verdict.ok or str(verdict.reason).startswith("one of 4 launches on inputs it had before")


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("value", [2.0, math.nan, math.inf])
def test_one_wrong_result_of_repeated_launches(repeats: int, value: float) -> None:
    """The kernel's bits may differ. The error of BLAS is reported, but not judged."""
    for baseline in (False, True):
        made: list[int] = []

        def run(
            a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any, made: Any = made
        ) -> Any:
            made.append(len(made))
            y = torch.matmul(a, b, out=out)
            if len(made) == 2 + repeats:  # the last one, after both sets
                y[2, 3] += value
            return y

        verdict = Verifier(problem(m=6, n=8, k=4), CPU).verdict(
            run, extent="repeated", repeats=repeats, deterministic=False, baseline=baseline
        )
        when = f", in one of {repeats} launches on inputs it had before"
        assert verdict.ok is baseline
        assert baseline or str(verdict.reason).endswith(when)
        assert verdict.error is not None
        assert not verdict.error <= 1e-2


def test_the_size_of_a_product_of_terms_with_random_signs() -> None:
    a, b = torch.tensor([[3.0, 4.0]] * 2), torch.tensor([[0.0], [2.0]])
    instance = problem(m=2, n=1, k=2, scaled=True)
    product, size = compare._multiplied(instance, Inputs(a, b, alpha=-3.0))
    assert product.tolist() == [[-24.0]] * 2
    assert size.tolist() == [[pytest.approx(3 * 5 * 2 / 2**0.5)]] * 2
    product, size = compare._multiplied(instance, Inputs(a[:, :1], b[1:], alpha=1.0))
    assert (product.tolist(), size.tolist()) == ([[6.0]] * 2, [[6.0]] * 2)
    _, size = compare._multiplied(instance, Inputs(a[:, :0], b[:0]))
    assert size.tolist() == [[0.0]] * 2


def test_rows_are_scattered_unless_they_are_in_order() -> None:
    groups = Groups(3, "m", out_index=torch.int64)
    for reads in get_args(Reads):
        rows = Rows.of(
            groups, 40, CPU, random_inputs.seeded(CPU, 1), sizes="even", whole=True, reads=reads
        )  # fmt: skip
        assert rows.out_index is not None
        assert (rows.out_index.tolist() == list(range(40))) is (reads == "same")
        assert sorted(rows.out_index.tolist()) == list(range(40))


ALLOCATED, GIVEN = False, True
GRAD, NO_GRAD, INFERENCE = (True, False), (False, False), (False, True)


@pytest.mark.parametrize(
    ("dtype", "called", "baseline", "modes"),
    [
        (F32, "", False, [(GIVEN, GRAD, False), (GIVEN, NO_GRAD, False)]),
        (
            BF16, "", False,
            [(ALLOCATED, GRAD, True), (ALLOCATED, INFERENCE, True), (GIVEN, GRAD, True),
             (GIVEN, GRAD, False), (GIVEN, NO_GRAD, False)],
        ),
        (
            F32, ", as a form", False,
            [(ALLOCATED, INFERENCE, False), (ALLOCATED, NO_GRAD, False), (GIVEN, GRAD, False),
             (GIVEN, NO_GRAD, False)],
        ),
        (BF16, "", True, []),
    ],
)  # fmt: skip
def test_the_modes_of_torch_that_a_launcher_is_launched_in(
    dtype: torch.dtype, called: str, baseline: bool, modes: list[Any]
) -> None:
    made: list[Any] = []

    def run(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        made.append((out is not None, mode, torch.is_autocast_enabled("cpu")))
        y = (a.float() @ b.float()).to(dtype)
        return y if out is None else out.copy_(y)

    one = Operand(dtype)
    data = DataSets(problem(m=8, n=8, k=8, a=one, b=one, out=one), CPU)
    checks = ways_of_use.WaysOfUse(data, run, True, baseline)
    checks.called = called
    for _ in checks.modes():
        assert not torch.is_autocast_enabled("cpu")
    assert made == modes


@pytest.mark.parametrize(
    ("a", "b", "out", "casts"),
    [
        (BF16, BF16, BF16, True), (HALF, HALF, HALF, True), (HALF, HALF, F32, False),
        (F32, F32, F32, False), (F32, F32, BF16, False), (BF16, HALF, BF16, False),
    ],
)  # fmt: skip
def test_autocast_is_tried_where_it_casts_nothing(a: Any, b: Any, out: Any, casts: bool) -> None:
    seen: list[bool] = []

    def run(x: Any, y: Any, bias: Any, residual: Any, alpha: float, into: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        with torch.autocast("cpu", enabled=False):
            result = (x.float() @ y.float()).to(out)
        return result if into is None else into.copy_(result)

    instance = problem(m=8, n=8, k=8, a=Operand(a), b=Operand(b), out=Operand(out))
    checks = ways_of_use.WaysOfUse(DataSets(instance, CPU), run, True, False)
    assert len(list(checks.modes())) == 2 + 3 * casts
    assert seen == [True] * (3 * casts) + [False] * 2


@pytest.mark.parametrize("of_values", [False, True])
def test_unusual_values_are_tried_in_one_form(
    of_values: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All forms of a launcher read values alike, so one form suffices."""
    launched: list[Any] = []
    plan = further_inputs.Plan("x", random_inputs.Recipe(), of_values=of_values)
    checks = ways_of_use.WaysOfUse(DataSets(problem(m=6, n=8, k=4), CPU), NONE, True, False)
    forms = [SimpleNamespace(_launched=lambda each, n=n: launched.append(n)) for n in range(3)]
    monkeypatch.setattr(checks, "every_form", lambda: forms)
    monkeypatch.setattr(ways_of_use, "plans_of", lambda data: [plan] * 2)
    for _ in checks.rounds():
        pass
    assert launched == ([0, 0] if of_values else [0, 1, 2, 0, 1, 2])
    launched.clear()
    for _ in checks.rounds(1):
        pass
    assert launched == ([0] if of_values else [0, 1, 2])


# -- auxiliary outputs ---------------------------------------------------------------------------


def outputs_of(m: int, *ports: Port, **fields: Any) -> Outputs:
    chain = replace(parse("identity"), outputs=ports)
    return Outputs(DataSets(problem(m=m, n=9, k=4, epilogue=chain, **fields), CPU), NONE, True, 1.0)


NONE: Any = None
ROW_SUM, ROW_MAX = Port("x", "row", reduce="sum"), Port("x", "row", reduce="max")
COL_SUM, COL_MAX = Port("x", "col", reduce="sum"), Port("x", "col", reduce="max")
ALL_SUM, ALL_MAX = Port("x", "scalar", reduce="sum"), Port("x", "scalar", reduce="max")
TILE = Port("x", "tile")
SQUARES = Port("x", "row", reduce="sum", of=torch.square)


@pytest.mark.parametrize(
    ("port", "right", "scale"),
    [
        # Outputs of 4 × 9 twos, and their scales. A sum of n twos of random signs is about 2√n.
        (ROW_SUM, 18, 6), (ROW_MAX, 2, 2), (COL_SUM, 8, 4), (COL_MAX, 2, 2), (ALL_SUM, 72, 12),
        (ALL_MAX, 2, 2), (TILE, 2, 2), (SQUARES, 36, 12),
    ],
)  # fmt: skip
def test_an_error_of_an_output_is_relative_to_it_and_to_its_terms(
    port: Port, right: float, scale: float
) -> None:
    checked, tile = outputs_of(4, port), torch.full((4, 9), 2.0)
    expected = Expected(None, Sample(tile, tile), None, None)
    shape = port.shape(tile.shape)

    def found(change: float) -> tuple[float, str]:
        out = torch.full(shape, float(right))
        out.view(-1)[-1] += change
        [fault] = checked.faults(expected, tile, (out,), once=True)
        return fault

    assert found(0.0) == (0.0, "")
    for change in (-0.5, 0.5):
        error, fault = found(change)
        assert error == pytest.approx(0.5 / (right + scale))
        assert fault == f"output {port} has error {error:.3g}, over 4e-05"
    assert found(3e-5 * (right + scale))[1] == ""
    assert math.isnan(found(math.nan)[0])
    assert found(math.nan)[1] != ""
    nothing = torch.zeros(4, 9)
    zeros = Expected(None, Sample(nothing, nothing), None, None)
    [(error, _)] = checked.faults(zeros, nothing, (torch.full(shape, 0.25),), once=True)
    assert error == 0.25  # the scale of zeros is one


def test_outputs_hold_nothing_that_a_launch_may_read() -> None:
    """They hold NaN or small numbers in the same memory; for two threads, NaN in their own."""
    seen: list[tuple[int, float]] = []

    def launch(*_: Any, outputs: Any, **__: Any) -> str:
        rows, columns = outputs
        assert (rows.shape, columns.shape, columns.dtype) == ((4,), (9,), HALF)
        assert rows.is_contiguous()
        for t in outputs:
            assert torch.equal(t.isnan(), t[:1].isnan().expand_as(t))
        assert columns[0].isnan() == rows[0].isnan()
        seen.append((rows.data_ptr(), rows[0].item()))
        rows.zero_()
        columns.zero_()
        return "result"

    chain = replace(parse("identity"), outputs=(ROW_SUM, Port("y", "col", HALF, reduce="max")))
    data = DataSets(problem(m=4, n=9, k=4, epilogue=chain), CPU)
    checked: Any = Outputs(data, launch, True, 1.0)
    assert [checked() for _ in range(4)] == ["result"] * 4
    assert len({place for place, _ in seen}) == 1
    assert [math.isnan(value) for _, value in seen] == [True, False, True, False]
    assert seen[1][1] == 0.5
    seen.clear()
    made = [checked.apart() for _ in range(3)]
    assert all(math.isnan(value) for _, value in seen)
    assert len({place for place, _ in seen}) == 3
    for (result, given), (place, _) in zip(made, seen, strict=True):
        assert result == "result"
        assert given[0].data_ptr() == place


def test_faults_of_outputs() -> None:
    tile = torch.full((4, 9), 2.0)
    expected = Expected(None, Sample(tile, tile), None, None)
    found = torch.full((4,), 18.0)

    def launch(*_: Any, outputs: Any) -> Any:
        outputs[0].copy_(found)
        return tile

    def fault(result: torch.Tensor = tile, of: Expected | None = expected) -> str:
        checked()
        return "".join(text for _, text in checked.faults(of, result))

    chain = replace(parse("identity"), outputs=(ROW_SUM,))
    data = DataSets(problem(m=4, n=9, k=4, epilogue=chain), CPU)
    checked: Any = Outputs(data, launch, True, 1.0)
    assert [fault(), fault()] == ["", ""]
    found[1] += 1e-5
    assert fault() == "output x (row sum) has other bits for the same inputs"
    checked._deterministic = False
    assert fault() == ""
    found[1] = 0
    assert "has error 0.75" in fault()
    # With NaN and Inf in the inputs, the expected output is computed from the result itself.
    infinite = tile.clone()
    infinite[1, 3] = math.inf
    found[1] = math.inf
    assert fault(infinite, None) == ""
    found[1] = math.nan
    wrong = "output x (row sum) is not NaN or Inf where the result makes it"
    assert fault(infinite, None) == wrong
    found[1], found[2] = math.inf, math.nan
    assert fault(infinite, None) == wrong
    checked()
    checked._memory[0].words[0, 0] = 0
    beyond = [(pytest.approx(math.nan, nan_ok=True), "it wrote beyond its output x (row sum)")]
    assert list(checked.faults(None, infinite)) == beyond
    found.fill_(18.0)
    checked()
    checked._memory[0].words[0, 0] = 0
    assert list(checked.faults(expected, tile, once=True)) == beyond
    checked()
    assert list(checked.faults(expected, tile, once=True)) == [(0.0, "")]


@pytest.mark.parametrize("port", [ROW_SUM, ROW_MAX, COL_SUM, COL_MAX, ALL_SUM, ALL_MAX, TILE])
def test_outputs_are_reduced_in_pieces(port: Port) -> None:
    checked, tile = outputs_of(1000, port), torch.randn(1000, 9)
    _, whole = checked._reduced(port, tile)
    checked._data.limit = 0
    assert checked._data.at_once // 9 < 500
    right, scale = checked._reduced(port, tile)
    assert torch.allclose(right, port.reduced(port.terms(tile.double())))
    assert torch.allclose(scale, whole)


@pytest.mark.parametrize("port", [ROW_SUM, ROW_MAX, COL_SUM, ALL_SUM, TILE])
@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_outputs_of_no_rows(port: Port, wrong: float) -> None:
    """A sum of no numbers is zero; an output by row has no element that could be wrong."""
    checked, tile = outputs_of(0, port), torch.zeros(0, 9)
    expected = Expected(None, Sample(tile, tile), None, None)
    [(error, fault)] = checked.faults(
        expected, tile, (torch.full(port.shape(tile.shape), wrong),), once=True
    )
    seen = wrong and port in (COL_SUM, ALL_SUM)
    assert (error, bool(fault)) == (float(seen), bool(seen))


def test_outputs_are_compared_in_the_samples() -> None:
    """A scalar output is compared with the launch's own result, which is compared by samples."""
    tile = torch.randn(200, 9)
    rows, cols = torch.tensor([0, 50, 199]), torch.tensor([0, 8])
    expected = Expected(
        rows, Sample(tile[rows], tile[rows]), cols, Sample(tile[:, cols], tile[:, cols])
    )
    other = tile + 1
    for port, inside, outside in (
        (ROW_SUM, (50,), (51,)), (COL_MAX, (8,), (7,)), (TILE, (199, 4), (198, 4)),
    ):  # fmt: skip
        checked, right = outputs_of(200, port), port.reduced(port.terms(tile))
        for at, seen in ((inside, True), (outside, False)):
            out = right.clone()
            out[at] += 100
            [(error, fault)] = checked.faults(expected, other, (out,), once=True)
            assert (error > 1) is seen
            assert bool(fault) is seen
        # Elements outside the samples only have to be numbers.
        out[outside] = math.nan
        [(error, fault)] = checked.faults(expected, other, (out,), once=True)
        assert math.isnan(error)
        assert fault
    checked = outputs_of(200, ALL_SUM)
    [(error, fault)] = checked.faults(expected, other, (other.sum(),), once=True)
    assert error < 1e-5
    [(error, fault)] = checked.faults(expected, other, (tile.sum(),), once=True)
    assert error > 0.1


@pytest.mark.parametrize(
    ("port", "operand", "slack", "limit"),
    [
        (ROW_SUM, F32, 1.0, "4e-05"), (ROW_SUM, F32, 3.0, "0.00012"), (ROW_SUM, HALF, 1.0, "0.004"),
        (Port("x", "row", HALF, reduce="sum"), F32, 1.0, "0.004"),
        (Port("x", "row", BF16, reduce="sum"), HALF, 1.0, "0.032"),
    ],
)  # fmt: skip
def test_the_tolerance_of_an_output_is_twice_the_larger_of_its_own_and_the_results(
    port: Port, operand: torch.dtype, slack: float, limit: str
) -> None:
    one = Operand(operand)
    checked = outputs_of(4, port, a=one, b=one, out=one)
    checked._slack = slack
    tile = torch.ones(4, 9)
    expected = Expected(None, Sample(tile, tile), None, None)
    [(_, fault)] = checked.faults(expected, tile, (torch.zeros(4, dtype=port.dtype),), once=True)
    assert fault == f"output {port} has error 0.75, over {limit}"


# -- group sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "count", "found"),
    [
        ("first", 4, [12, 0, 0, 0]), ("last", 4, [0, 0, 0, 12]), ("equal", 4, [3, 3, 3, 3]),
        ("equal", 5, [2, 2, 2, 2, 2]), ("none", 4, [0, 0, 0, 0]), ("rising", 4, [0, 2, 4, 6]),
        ("falling", 4, [6, 4, 2, 0]), ("rising", 1, [12]), ("falling", 1, [12]), ("first", 1, [12]),
        ("last", 1, [12]), ("few", 1, [4]),
    ],
)  # fmt: skip
def test_extremes_of_group_sizes(sizes: Any, count: int, found: list[int]) -> None:
    ends = ragged_inputs.ends_of(count, 12, random_inputs.seeded(CPU, 3), sizes)
    assert [end - start for _, start, end in compare.ranges(ends)] == found
    few = ragged_inputs.ends_of(4, 31, random_inputs.seeded(CPU, 3), "few")
    assert few[-1] == 10
