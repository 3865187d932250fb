"""Tensors of further rounds of verification, NaN and Inf in groups and scales, and what memory
allows."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import problem

from tmm_core import Groups, Operand, Port, Scale
from tmm_core.epilogues import parse
from tmm_core.epilogues.clamped_swiglu import CLAMPED
from tmm_core.spec.launcher import Bound
from tmm_core.verify import (
    compare,
    data_sets,
    forms,
    further_inputs,
    guard_bands,
    nonfinite,
    ragged_inputs,
    random_inputs,
    two_threads,
    ways_of_use,
)
from tmm_core.verify.checked_launch import CheckedLauncher
from tmm_core.verify.compare import Sample
from tmm_core.verify.data_sets import DataSets, Expected
from tmm_core.verify.forms import WrongError
from tmm_core.verify.further_inputs import Plan, Round
from tmm_core.verify.ragged_inputs import Inputs, Rows
from tmm_core.verify.random_inputs import Recipe

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
HALF, F32 = torch.float16, torch.float32
NAN, INF = math.nan, math.inf
NONE: Any = None


# -- tensors of a round ------------------------------------------------------------------------


def drawn(place: Any, mode: Any = "grad mode", **fields: Any) -> tuple[Round, Inputs]:
    one = Operand(F32, aligned=False)
    wanted = {"m": 6, "n": 10, "k": 7, "a": one, "b": one, "out": one, "residual": one}
    instance = problem(**{**wanted, "bias": F32, **fields})
    made = Round(DataSets(instance, CPU, 1 << 26), Plan("x", Recipe(), place, mode=mode))
    return made, made.drawn


#: Strides of a, b, bias and residual for each placement.
STRIDES = {
    "own": [(7, 1), (10, 1), (1,), (10, 1)],
    "plain": [(7, 1), (10, 1), (1,), (10, 1)],
    "expanded": [(0, 1), (10, 1), (0,), (0, 1)],
    "expanded b": [(7, 1), (0, 1), (1,), (10, 1)],
    "all expanded": [(0, 1), (0, 1), (1,), (0, 1)],
    "apart": [(36, 1), (48, 1), (67,), (48, 1)],
    "near": [(4, 1), (6, 1), (1,), (6, 1)],
    "shared": [(7, 1), (10, 1), (1,), (10, 1)],
}


@pytest.mark.parametrize("place", list(STRIDES))
def test_the_strides_of_each_place(place: Any) -> None:
    made, given = drawn(place)
    tensors = {name: getattr(given, name) for name in ("a", "b", "bias", "residual")}
    assert [t.stride() for t in tensors.values()] == STRIDES[place]
    assert not any(t.isnan().any() for t in tensors.values())
    one_memory = len({t.untyped_storage().data_ptr() for t in tensors.values()}) == 1
    assert one_memory is (place == "apart")
    held = made.out()
    assert (held is not None) is (place in ("apart", "near"))
    if held is not None:
        out = held.tensor
        assert out.stride() == ((48, 1) if place == "apart" else (16, 1))
        assert tensors["bias"].storage_offset() % 2 == 1
        shares = out.untyped_storage().data_ptr() == tensors["a"].untyped_storage().data_ptr()
        assert shares is (place == "apart")


def test_rows_of_groups_do_not_overlap() -> None:
    """Rows beyond the last group are NaN, so reading them would show."""
    _, given = drawn("near", groups=Groups(2, "m"), bias=None)
    assert given.a.stride() == (12, 1)
    assert given.b.stride()[1:] == (16, 1)


@pytest.mark.parametrize("place", ["plain", "shared"])
def test_one_tensor_may_be_several_arguments(place: Any) -> None:
    """In plain rounds b is a parameter, so no other argument may be the same tensor."""
    _, given = drawn(place, n=6, k=6)
    assert (given.b is given.a) is (place == "shared")
    assert given.residual is given.a
    assert given.bias is not None
    assert given.bias.data_ptr() == given.a.data_ptr()
    flipped = replace(Operand(F32, aligned=False), layout="col")
    _, given = drawn(place, n=6, k=6, b=flipped)
    assert (given.b.data_ptr() == given.a.data_ptr()) is (place == "shared")
    assert given.b.stride() == (1, 6)


@pytest.mark.parametrize("mode", ["grad mode", "inference mode"])
def test_weights_are_made_outside_inference_mode(mode: Any) -> None:
    for place in ("plain", "own"):
        _, given = drawn(place, mode)
        inference = mode == "inference mode"
        assert given.residual is not None
        assert given.a.is_inference() is given.residual.is_inference() is inference
        assert given.b.is_inference() is (inference and place == "own")
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("place", ["near", "plain", "own", "apart"])
def test_arguments_of_training_and_of_layers(place: Any) -> None:
    groups = Groups(2, "m", out_weights=F32)
    made, inputs = drawn(place, groups=groups)
    given = made.inputs
    tensors = [given.a, given.b, given.bias, given.residual]
    assert given.rows is not None
    tensors.append(given.rows.out_weights)
    needs = [t.requires_grad for t in tensors]  # type: ignore[union-attr]
    assert needs == [place == "near"] * 5
    parameters = [isinstance(t, torch.nn.Parameter) for t in tensors]
    assert parameters == [False, place in ("near", "plain"), place == "near", False, False]
    assert (given.a.grad_fn is not None) is (place == "near")
    assert given.a.data_ptr() == inputs.a.data_ptr()
    whole = problem(m=4, n=4, k=4, **dict.fromkeys(("a", "b", "out"), Operand(torch.int8)))
    integers = Round(DataSets(whole, CPU, 1 << 26), Plan("x", Recipe(), "near"))
    assert not integers.inputs.a.requires_grad


# -- which rounds there are ----------------------------------------------------------------------


def test_rounds_in_other_memory_need_room_for_two_sets() -> None:
    instance = problem(m=8, n=8, k=8)
    data = DataSets(instance, CPU, 1 << 26)
    size = sum(g.words.nbytes for g in data.sets()[-1].memory.values())
    for limit, fits in ((16 * size, True), (16 * size - 1, False)):
        data.limit = limit
        places = {plan.place for plan in further_inputs.plans_of(data)}
        assert ("near" in places) is fits
        assert "same" in places
    assert "expanded" not in places
    assert further_inputs.plans_of(DataSets(replace(instance, m=0), CPU, 1 << 26)) == []


def test_values_are_put_back_unless_an_input_was_altered() -> None:
    data = DataSets(problem(m=8, n=8, k=8), CPU, 1 << 26)
    a = data.sets()[-1].inputs.a
    before = a.clone()
    with further_inputs.restoring(data):
        a.zero_()
    assert torch.equal(a, before)
    with further_inputs.restoring(data):
        a.zero_()
        data.altered.add("a")
    assert not a.any()


@pytest.mark.parametrize("sampled", [False, True])
def test_rows_are_gathered_from_as_many_rows_as_before(sampled: bool) -> None:
    """The first of two sets has more rows than the second, and is the only one in less memory."""
    instance = problem(m=40, n=8, k=8, groups=Groups(3, "m", torch.int64))
    data = DataSets(instance, CPU, 1 << 26, sampled=sampled)
    of = data.sets()[-1]
    assert len(data.sets()) == 2 - sampled
    before, given = of.inputs.a.clone(), of.inputs
    rows: Any = given.rows
    index = rows.a_index.clone()
    with further_inputs.restoring(data):
        made = Round(data, Plan("x", Recipe(alpha=2.0))).inputs
        assert made.a is given.a
        assert not torch.equal(made.a, before)
        drawn: Any = made.rows
        assert drawn.a_index is rows.a_index
        assert drawn.read == rows.read == len(made.a)
        assert int(drawn.a_index.max()) == len(made.a) - 1
        assert not torch.equal(drawn.a_index, index)
    assert data.changed_inputs() == []


def test_the_largest_error_of_a_round() -> None:
    instance = problem(m=8, n=8, k=8, a=Operand(HALF), b=Operand(HALF), out=Operand(HALF))
    data = DataSets(instance, CPU, 1 << 26)

    def error(plan: Plan, change: Any) -> float:
        made = Round(data, plan)
        given = made.drawn
        y = (given.a.double() @ given.b.double()).to(HALF)
        change(y)
        return made.error(y, data.at_once)

    def nothing(y: torch.Tensor) -> None:
        pass

    def set_nan(y: torch.Tensor) -> None:
        y[1, 1] = NAN

    usual = Plan("x", Recipe())
    assert error(usual, nothing) < 2e-3
    assert math.isnan(error(usual, set_nan))
    assert error(usual, lambda y: y[1].mul_(1.25)) > 2e-3
    flooded = replace(usual, flooded=True)
    assert error(flooded, nothing) == 0
    assert math.isnan(error(flooded, lambda y: y[4, 0].fill_(NAN)))
    assert math.isnan(error(flooded, lambda y: y[5, 0].fill_(0)))
    infinite = replace(usual, infinite=True)
    assert error(infinite, lambda y: y.fill_(INF)) == 0
    assert math.isnan(error(infinite, lambda y: y.fill_(INF)[0, 0].fill_(-INF)))
    assert math.isnan(error(infinite, lambda y: y.fill_(INF)[0, 0].fill_(65504)))


@pytest.mark.parametrize(("text", "times"), [("identity", 1), ("relu", 2)])
def test_sums_that_cancel_may_lose_the_bits_that_tensor_cores_truncate(
    text: str, times: int
) -> None:
    one = Operand(HALF)
    instance = problem(m=8, n=8, k=64, a=one, b=one, out=one, epilogue=parse(text))
    data = DataSets(instance, CPU, 1 << 26)
    assert data.sets()[0].slack == Round(data, Plan("x", Recipe())).slack == 0
    made = Round(data, Plan("x", Recipe(random_inputs.Values(cancelling=True))))
    given = made.drawn
    y = instance.epilogue.apply(given.a.double() @ given.b.double()).to(HALF)
    for _ in range(2):  # the slack does not grow from launcher to launcher
        assert made.error(y, data.at_once) < 2e-3
        assert made.slack == times * 64 * 2.0**-26 * random_inputs.CANCELLED


# -- NaN and Inf -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a_index", "out_index", "found"),
    [
        (None, None, {}), ([3, 3, 0, 9], None, {3: [0, 1], 0: [2]}),
        (None, [2, 0, 1, 9], {0: [2], 1: [0], 2: [1]}),
        ([3, 3, 0, 9], [2, 0, 1, 9], {3: [2, 0], 0: [1]}),
    ],
)  # fmt: skip
def test_rows_that_are_computed_from_a_row(a_index: Any, out_index: Any, found: Any) -> None:
    """The fourth row of a belongs to no group."""
    indices = {"a_index": a_index, "out_index": out_index}
    given: Any = {name: torch.tensor(t) for name, t in indices.items() if t is not None}
    inputs = Inputs(
        torch.empty(4, 2), torch.empty(2, 2), rows=Rows(torch.tensor([3]), (3,), 4, **given)
    )
    assert nonfinite._rows_computed_from(inputs, 3) == found
    assert nonfinite._rows_computed_from(replace(inputs, rows=None), 3) == {}


def test_nan_and_inf_of_a_gated_bias_are_in_different_columns_of_the_result() -> None:
    """The columns j and n + j of the bias are one column of the result, where Inf hides in NaN."""
    a, b, bias = torch.zeros(4, 8), torch.zeros(8, 16), torch.zeros(16)
    gated = problem(m=4, n=8, k=8, bias=F32, epilogue=parse("swiglu"))
    for seed in range(128):
        chance = random.Random(seed)
        found = list(
            nonfinite._in_terms(gated, Inputs(a, b, bias), False, [(0, 0, 4)], chance, {0})
        )
        columns = [change.places for change in found]
        assert columns == [(change.index[0] % 8,) for change in found]
        assert len({*columns, (0,)}) == 4
        # NaN is in a gate and in a number that a gate multiplies.
        halves = [change.index[0] // 8 for change in found if change.value != change.value]
        assert sorted(halves) == [0, 1]


@pytest.mark.parametrize("epilogue", [parse("swiglu"), CLAMPED], ids=lambda each: each.name)
def test_nan_is_in_both_halves_of_gated_columns(epilogue: Any) -> None:
    """By chance it was in gates alone, or in the columns that they multiply alone."""
    gated = problem(m=4, n=8, k=8, batch=2, epilogue=epilogue)
    b = torch.zeros(2, 8, 16)
    for seed in range(64):
        chance = random.Random(seed)
        given = Inputs(torch.zeros(2, 4, 8), b)
        found = list(nonfinite._changes(gated, given, "columns", chance))
        nan = [change.index[1] for change in found if change.value != change.value]
        per_half = [line % 2 if gated.epilogue.interleaved else line // 8 for line in nan]
        assert sorted(per_half) == [0, 1]
        assert len({nonfinite.column(gated, line) for line in nan}) == 2


def test_where_any_result_is_accepted() -> None:
    """Any result is accepted where the epilogue may turn Inf into NaN."""
    half = Operand(HALF)
    silu = problem(m=1, n=4, k=4, out=half, epilogue=parse("silu"))
    z = torch.tensor([[-INF, NAN, INF, -1.0]])
    kinds, free = nonfinite.marks(silu, z, silu.epilogue.apply(z))
    assert kinds[:, 1:].tolist() == [[2, 1, 0]]
    assert free.tolist() == [[True, False, False, False]]
    # A number that is Inf in the result's dtype may become NaN there.
    z = torch.tensor([[-7e4, -6e4]])
    assert nonfinite.marks(silu, z, silu.epilogue.apply(z))[1].tolist() == [[True, False]]
    plain = replace(silu, epilogue=parse("identity"))
    y = torch.tensor([[65000.0, 64000.0, -65000.0, INF]])
    kinds, free = nonfinite.marks(plain, y, y)
    assert free.tolist() == [[True, False, True, False]]
    assert kinds.tolist() == [[0, 0, 0, 1]]
    wide = replace(plain, out=Operand(F32))
    assert not nonfinite.marks(wide, y, y)[1].any()
    whole = replace(plain, out=Operand(torch.int8))
    kinds, free = nonfinite.marks(whole, y.nan_to_num_(0, 1, 1).to(torch.int8), y.to(torch.int8))
    assert not kinds.any()
    assert not free.any()
    complex_ = torch.tensor([1 + 1j, complex(NAN, 0), complex(0, INF)])
    assert nonfinite.kinds_of(complex_).tolist() == [0, 2, 2]


def test_weights_of_any_size() -> None:
    rows = Rows.of(
        Groups(3, "m", out_weights=F32), 64, CPU, random_inputs.seeded(CPU, 1),
        sizes="even", whole=False, any_weights=True,
    )  # fmt: skip
    assert rows.out_weights is not None
    assert rows.out_weights[61:].isnan().all()
    weights = rows.out_weights[:61]
    assert not weights[::4].any()
    assert (weights[1::4] == 1).all()
    others = torch.cat([weights[2::4], weights[3::4]])
    assert others.min() < 0 < others.max()
    assert others.abs().max() > 100 * others.abs().min()


@pytest.mark.parametrize("along", ["m", "n", "k"])
def test_scales_beyond_the_last_group_are_nan(along: Any) -> None:
    """A block of scales that reaches into a group keeps its scale."""
    fp8 = torch.float8_e4m3fn
    for of_a, of_b, high, wide in (("row", "row", 1, 1), ("1x128", "128x128", 1, 128)):
        a = Operand(fp8, scale=Scale.parse(of_a))
        b = Operand(fp8, "col", scale=Scale.parse(of_b))
        if along == "k" and wide > 1:
            continue
        instance = problem(
            m=300, n=300, k=256, a=a, b=b, out=Operand(HALF), groups=Groups(2, along)
        )
        given = random_inputs.make(instance, CPU)
        assert given.rows is not None
        for part in given.parts.values():
            part.fill_(1)
        rows = replace(given.rows, ends=(100, 200))
        rows.poison_beyond(instance, given)
        of_rows = given.parts["a_scale"].isnan()
        of_columns = given.parts["b_scale"].isnan()
        right_rows, right_columns = torch.zeros_like(of_rows), torch.zeros_like(of_columns)
        if along == "m":
            right_rows[-(-200 // high) :] = True
        elif along == "n":
            right_columns[..., -(-200 // wide) :] = True
        assert torch.equal(of_rows, right_rows)
        assert torch.equal(of_columns, right_columns)


# -- what memory and time allow -------------------------------------------------------------------


def test_whole_results_are_compared_up_to_so_many_operations() -> None:
    for dtype, device, most in (
        (HALF, GPU, 2**42), (torch.int8, GPU, 2**42), (F32, GPU, 2**38), (HALF, CPU, 2**33),
    ):  # fmt: skip
        one = Operand(dtype)
        data = DataSets(problem(a=one, b=one, out=one), device, memory_limit=1)
        assert data._most_flops() == most


def test_verification_takes_a_quarter_of_a_gpus_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for free, most, found in ((8 << 20, 4 << 30, 2 << 20), (40 << 30, 4 << 30, 4 << 30),
                              (40 << 30, INF, 10 << 30)):  # fmt: skip
        monkeypatch.setattr(data_sets, "free_memory", lambda device, free=free: free)
        assert data_sets.default_limit(GPU, most) == found
    monkeypatch.delattr(data_sets.os, "sysconf")  # as on Windows
    assert data_sets.default_limit(CPU) == 1 << 30


def test_verification_with_less_memory_has_one_set_and_samples() -> None:
    data = DataSets(problem(m=200, n=8, k=8), CPU, 1 << 26)
    assert [each.expected.rows for each in data.sets()] == [None, None]
    data.altered.add("a")
    data.reduce()
    assert (data.limit, data.is_reduced, data.altered) == (1 << 24, True, set())
    [only] = data.sets()
    assert only.expected.rows is not None
    assert only.expected.cols is not None
    few = DataSets(problem(m=66, n=8, k=8), CPU, 1 << 26, sampled=True)
    assert few.sets()[0].expected.rows is None  # all of 66 rows are compared
    more = DataSets(problem(m=67, n=8, k=8), CPU, 1 << 26, sampled=True)
    assert more.sets()[0].expected.rows is not None


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 128, 1000])
def test_a_sample_is_of_each_stripe_and_both_ends(size: int) -> None:
    found = data_sets._sample(size, CPU).tolist()
    assert found == sorted(set(found))
    assert {0, size - 1} <= set(found)
    assert len(found) == size if size <= 64 else 64 <= len(found) <= 66
    for stripe in range(64):
        low, high = stripe * size // 64, (stripe + 1) * size // 64
        assert low == high or any(low <= place < high for place in found)


def test_expected_numbers_may_be_undefined() -> None:
    numbers = torch.ones(3, 4)
    usual = Sample(numbers, numbers)
    both = Expected(torch.arange(3), usual, torch.arange(4), usual)
    assert both.is_finite(HALF)
    large = Sample(numbers * 1e5, numbers)
    assert not Expected(None, large, None, None).is_finite(HALF)
    assert Expected(None, large, None, None).is_finite(F32)
    assert not replace(both, in_cols=large).is_finite(HALF)


def test_outputs_are_made_once_and_poisoned_again() -> None:
    data = DataSets(problem(m=6, n=8, k=4), CPU, 1 << 26)
    second = data.out(1)
    assert second.tensor.stride() == guard_bands.memory_layout(
        Operand(F32), (6, 8), padded=True
    ).strides != (8, 1)  # fmt: skip
    assert data.out(0).tensor.stride() == (8, 1)
    second.tensor.zero_()
    assert data.out(1) is second
    assert second.tensor.isnan().all()
    assert [bool(out.intact()) for out in data._outs] == [True, True]
    second.words[0, 0] = 0
    assert [bool(out.intact()) for out in data._outs] == [True, False]
    data.release()
    assert data._outs == []


def test_inputs_that_changed_are_named_once() -> None:
    groups = Groups(2, "m", out_weights=F32)
    data = DataSets(problem(m=8, n=8, k=8, groups=groups), CPU, 1 << 26)
    assert data.changed_inputs() == []
    for each in data.sets():
        each.inputs.b.zero_()
    rows = data.sets()[1].inputs.rows
    assert rows is not None
    assert rows.out_weights is not None
    rows.out_weights[0] = 7
    data.altered.update(["b", "a"])
    assert data.changed_inputs() == ["a", "b", "out_weights"]


# -- two threads ---------------------------------------------------------------------------------


def free_launches(
    monkeypatch: pytest.MonkeyPatch, seconds: float, busy: set[int], most: int = 5, held: int = 3
) -> tuple[int, int, set[int]]:
    """Let thread 0 make launches of this duration. Return their number, the number of kept
    results, and the threads still busy."""
    now = [0.0]
    monkeypatch.setattr(two_threads, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made: list[int] = []

    def launch(launcher: Any, out: Any) -> int:
        now[0] += seconds
        made.append(len(made))
        return made[-1]

    of: Any = SimpleNamespace(inputs=SimpleNamespace(launch=launch))
    data: Any = SimpleNamespace(sets=lambda: [of, of], device=CPU)
    turns: Any = None
    thread = two_threads.Launches(data, turns, 0, busy, "free", turns, most, held, False)
    thread._free()
    assert [result for _, result in thread.results] == made[-held:]
    return len(made), len(thread.results), busy


def test_a_thread_ends_its_free_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Fast launches: at least as many as wanted, and more while the other thread has launches left.
    assert free_launches(monkeypatch, 0.0, {0}) == (5, 3, set())
    assert free_launches(monkeypatch, 0.0, {0, 1}) == (9, 3, {1})
    # Slow launches: two, and more until the other thread has had its time.
    assert free_launches(monkeypatch, 0.1, {0}) == (2, 2, set())
    assert free_launches(monkeypatch, 0.004, {0}) == (2, 2, set())
    assert free_launches(monkeypatch, 0.0025, {0}) == (3, 3, set())
    assert free_launches(monkeypatch, 0.3, {0, 1}) == (2, 2, {1})
    assert free_launches(monkeypatch, 0.06, {0, 1}) == (4, 3, {1})
    assert free_launches(monkeypatch, 0.0, {0}, most=1, held=1) == (1, 1, set())


def test_a_thread_that_writes_into_its_output_keeps_one_result() -> None:
    data: Any = SimpleNamespace(
        sets=lambda: [None, None], device=CPU, out=lambda place: SimpleNamespace(tensor=place)
    )
    for into, kept, out in ((True, 1, 1), (False, 7, None)):
        thread = two_threads.Launches(data, NONE, 1, {1}, "free", NONE, 9, 7, into)
        assert (thread.results.maxlen, thread._out) == (kept, out)
        assert thread.daemon  # a launch that hangs does not keep the process alive


@pytest.mark.parametrize(
    ("pace", "place", "launched"),
    [("lines", 0, [0]), ("lines", 1, [1]), ("launches", 0, [0, 0]), ("launches", 1, [1, 0, 0])],
)
def test_which_inputs_interleaved_launches_use(pace: Any, place: int, launched: list[int]) -> None:
    """Launches between the lines of the other thread's second launch use that thread's inputs."""
    made: list[int] = []

    def inputs(number: int) -> Any:
        return SimpleNamespace(inputs=SimpleNamespace(launch=lambda *_: made.append(number)))

    shared = iter([False, True, True])

    class Turns:
        over = False
        shared = False

        def pass_on(self, thread: int) -> None:
            assert thread == place
            self.shared = next(shared)

        @contextlib.contextmanager
        def after_each_line(self, thread: int) -> Iterator[None]:
            seen.append(self.shared)
            yield

    seen: list[bool] = []
    data: Any = SimpleNamespace(sets=lambda: [inputs(0), inputs(1)], device=CPU)
    turns: Any = Turns()
    thread = two_threads.Launches(data, turns, place, set(), pace, turns, 3, 9, False)
    thread._interleaved()
    assert made == launched
    assert seen == {"lines": [False], "launches": [] if place else [False, True]}[pace]
    if place and pace == "launches":
        turns.over = True
        turns.pass_on = lambda thread: None
        thread._interleaved()
        assert made == launched


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("allocates", [True, False])
def test_two_threads_launch_at_each_pace(
    interpreted: bool, allocates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = problem(m=8, n=8 if allocates else 7, k=8)
    if interpreted:
        instance = replace(instance, device=replace(instance.device, interpreted=True))
    assert instance.allocates is allocates
    made: list[Any] = []
    monkeypatch.setattr(
        ways_of_use, "launch_together",
        lambda data, launcher, pace, most, into: made.append((pace, most, into)) or [],
    )  # fmt: skip
    one_at_a_time: list[int] = []
    monkeypatch.setattr(ways_of_use, "_interpret_one_at_a_time", lambda: one_at_a_time.append(1))
    bound = Bound(torch.add, folded=lambda *_: None)

    def together(data: DataSets, baseline: bool = False) -> list[Any]:
        made.clear()
        for _ in ways_of_use.WaysOfUse(data, bound, True, baseline).together():
            pass
        return list(made)

    data = DataSets(instance, CPU, 1 << 26)
    first = "free" if interpreted else "lines"
    paces = ["free"] * 4 if interpreted else ["lines", "lines", "launches", *["free"] * 4]
    wanted = [(pace, 32, not allocates) for pace in paces]
    wanted += [(first, 32, True), (first, 32, False)] if allocates else []
    assert together(data) == wanted
    assert len(one_at_a_time) == interpreted
    assert together(data, baseline=True) == []
    assert together(DataSets(instance, CPU, 1 << 26, sampled=True)) == []  # one set of inputs


def test_other_forms_are_of_launchers_that_allocate() -> None:
    bound = Bound(torch.add, folded=lambda *_: None)
    port = replace(parse("identity"), outputs=(Port("x", "row", reduce="sum"),))

    def count(baseline: bool = False, **fields: Any) -> int:
        data = DataSets(problem(m=8, **{"n": 8, "k": 8, **fields}), CPU, 1 << 26)
        checks = ways_of_use.WaysOfUse(data, bound, True, baseline)
        assert checks.every_form()[0] is checks
        assert checks.every_form()[1:] == checks.every_form()[1:]  # the forms are made once
        return len(checks.every_form())

    assert count() == 2
    assert count(baseline=True) == count(n=7) == count(epilogue=port) == 1
    assert count(groups=Groups(2, "m")) == 1
    data = DataSets(problem(m=8, n=8, k=8), CPU, 1 << 26)
    [_, form] = ways_of_use.WaysOfUse(data, bound, False, False, 3.0).every_form()
    assert (form._deterministic, form._baseline, form._slack) == (False, False, 3.0)
    assert form.called == ", called with N-D operands"


def test_results_of_n_d_operands_have_the_shape_of_the_call() -> None:
    instance = problem(m=6, n=8, k=4)
    y = torch.zeros(2, 3, 8)
    assert forms.flattened(y, (2, 3, 8), instance).shape == (6, 8)
    for wrong, shape in (
        (y.view(6, 8), r"\(6, 8\)"), (y.view(3, 2, 8), r"\(3, 2, 8\)"), (None, r"\(\)"),
        ((2, 3, 8), r"\(\)"),
    ):  # fmt: skip
        text = rf"^for N-D operands it returned shape {shape} and not \(2, 3, 8\)$"
        with pytest.raises(forms.WrongError, match=text):
            forms.flattened(wrong, (2, 3, 8), instance)


@pytest.mark.parametrize(
    ("errors", "found"),
    [([], None), ([0.5], 0.5), ([0.5, 1.0, 0.0], 1.0), ([0.5, NAN, 1.0], NAN), ([NAN], NAN),
     ([1.0, INF, 0.5], INF), ([NAN, 2.0], NAN)],
)  # fmt: skip
def test_the_error_of_a_launcher_is_its_largest(errors: list[float], found: float | None) -> None:
    checks = ways_of_use.WaysOfUse(DataSets(problem(), CPU, 1), NONE, True, False)
    checks._errors = errors
    if found is None:
        assert checks.error is None
    else:
        assert checks.error == pytest.approx(found, nan_ok=True)


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [(1, [(1, 4, 8), (8, 6), (1, 4, 6), (1, 4, 6)]),
     (3, [(1, 3, 4, 8), (1, 3, 8, 6), (1, 3, 4, 6), (1, 3, 4, 6)])],
)  # fmt: skip
@pytest.mark.parametrize("into", [True, False])
def test_a_folded_launcher_has_n_d_operands(batch: int, shapes: list[Any], into: bool) -> None:
    """For a batch, b also has the leading dimensions. A given output is returned itself."""
    given: list[Any] = []

    def launch(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
        y = torch.matmul(a, b)
        y = y if out is None else out.copy_(y)
        given.extend([a, b, residual, y])
        return y

    instance = problem(m=4, n=6, k=8, batch=batch, residual=Operand(F32))
    inputs = random_inputs.make(instance, CPU)
    folded = forms.folded_of(Bound(NONE, folded=lambda *_: launch), instance)
    assert folded is not None
    out = instance.empty_out(CPU) if into else None
    result = inputs.launch(folded, out)
    assert [tuple(t.shape) for t in given] == shapes
    torch.testing.assert_close(result, inputs.a @ inputs.b)
    assert (result is out) is into
    copies = forms.folded_of(Bound(NONE, folded=lambda *_: run), instance)
    assert copies is not None
    run = lambda *given: launch(*given).clone()  # noqa: E731
    assert inputs.launch(copies, out) is not out


@pytest.mark.parametrize("right", [True, False])
def test_outputs_are_judged_with_nan_and_inf_too(right: bool) -> None:
    port = Port("x", "row", reduce="max")
    chain = replace(parse("identity"), outputs=(port,))
    data = DataSets(problem(m=8, n=8, k=8, epilogue=chain), CPU, 1 << 26)

    def run(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any, outputs: Any) -> Any:
        y = torch.matmul(a, b, out=out)
        outputs[0].copy_(y.amax(1) if right else y.nan_to_num(0.0, 1.0, -1.0).amax(1))
        return y

    checks = ways_of_use.WaysOfUse(data, run, True, False)
    [plan] = [plan for plan in further_inputs.planned(data.problem) if plan.flooded]
    made = Round(data, plan)
    if right:
        checks._launched(made)
        return
    with pytest.raises(
        WrongError, match=r"output x .* is not NaN or Inf where the result makes it"
    ):
        checks._launched(made)


def test_writes_around_an_unusual_output_are_detected() -> None:
    data = DataSets(problem(m=8, n=8, k=8), CPU, 1 << 26)
    made = Round(data, Plan("x", Recipe(), "near", mode="no_grad"))

    def run(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
        if beyond and out is not None:
            out.as_strided((1,), (1,), out.storage_offset() + 8).fill_(1)
        return torch.matmul(a, b, out=out)

    checks = ways_of_use.WaysOfUse(data, run, True, False)
    for beyond in (False, True):
        if not beyond:
            checks._launched(made)
            continue
        with pytest.raises(WrongError, match="it wrote outside the out it was given, with x"):
            checks._launched(made)


@pytest.mark.parametrize("baseline", [True, False])
def test_the_outputs_of_blas_are_not_judged(baseline: bool) -> None:
    checks = ways_of_use.WaysOfUse(DataSets(problem(), CPU, 1), NONE, True, baseline)
    faults = [(0.5, ""), (2.0, "it is wrong")]
    if baseline:
        checks._check_outputs(faults, "")
    else:
        with pytest.raises(WrongError, match="it is wrong here"):
            checks._check_outputs(faults, " here")
    assert checks._errors == [0.5, 2.0]


def test_a_grid_of_scales_has_the_memory_layout_of_checkpoints() -> None:
    fp8 = torch.float8_e4m3fn
    a = Operand(fp8, scale=Scale.parse("1x128"))
    b = Operand(fp8, "col", scale=Scale.parse("128x128"))
    given = random_inputs.make(problem(m=256, n=384, k=512, a=a, b=b, out=Operand(HALF)), CPU)
    assert given.parts["a_scale"].stride(-1) == 1
    assert given.parts["b_scale"].stride(-2) == 1
    data = DataSets(problem(m=4, n=384, k=512, b=b, out=Operand(HALF), a=Operand(HALF)), CPU)
    one, other = (of.inputs.parts["b_scale"] for of in data.sets())
    assert one.shape == other.shape == (4, 3)
    assert one.stride(-2) == other.stride(-1) == 1  # a grid may have any strides


def _inference(right: Any) -> torch.Tensor:
    with torch.inference_mode():
        return right().clone()  # type: ignore[no-any-return]


def _shaped(right: Any) -> torch.Tensor:
    raise forms.WrongError("another shape")


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda right: right(), None),
        (_inference, "a tensor of inference mode"),
        (_shaped, "^another shape$"),
        (lambda right: right().tolist(), "it returned list and not a tensor"),
        (lambda right: torch.nn.Parameter(right(), False), "it returned Parameter"),
        (lambda right: right().requires_grad_(), "requires a gradient"),
        (lambda right: torch._neg_view(-right()), "lazy negation"),
        (lambda right: right()[:3], r"shape \(3, 4\) and not \(4, 4\)"),
        (lambda right: right().double(), "torch.float64 and not torch.float32"),
        (lambda right: right().to("meta"), "on meta and not on cpu"),
        (lambda right: right().mT.contiguous().mT, r"returned strides \(1, 4\)"),
    ],
)
def test_a_result_is_a_new_tensor_of_the_call(returned: Any, text: str | None) -> None:
    data = DataSets(problem(m=4, n=4, k=4), CPU, 1 << 26)

    def launch(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
        return returned(lambda: a @ b)

    checks = CheckedLauncher(data, launch, True, False)
    expected: Any = (
        contextlib.nullcontext() if text is None else pytest.raises(WrongError, match=text)
    )
    with expected:
        checks._launch(data.sets()[0])


def test_a_launch_in_the_interpreter_leaves_the_filters_of_warnings() -> None:
    """There it ignores numpy's warnings of NaN."""
    instance = problem(m=4, n=4, k=4)
    instance = replace(instance, device=replace(instance.device, interpreted=True))
    data = DataSets(instance, CPU, 1 << 26)

    def launch(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
        warnings.warn("invalid value", RuntimeWarning, stacklevel=1)
        return a @ b

    before = list(warnings.filters)
    CheckedLauncher(data, launch, True, False)._launch(data.sets()[0])
    assert warnings.filters == before


@pytest.mark.parametrize("name", ["a", "b", "residual"])
def test_a_result_is_in_no_inputs_memory(name: str) -> None:
    data = DataSets(problem(m=4, n=4, k=4, residual=Operand(F32)), CPU, 1 << 26)
    first = data.sets()[0]

    def launch(*given: Any) -> Any:
        return getattr(first.inputs, name)

    with pytest.raises(WrongError, match=f"it returned memory of its input {name}$"):
        CheckedLauncher(data, launch, True, False)._launch(first)
    held = torch.zeros(4, 4)
    with pytest.raises(WrongError, match="returned before and that is in use"):
        CheckedLauncher(data, lambda *_: held, True, False)._launch(first, held=[held])


@pytest.mark.parametrize(
    ("out", "accepted"),
    [
        (lambda out: out, True), (lambda out: out.view(-1).view(4, 4), True),
        (lambda out: out.clone(), False), (lambda out: out.mT, False),
    ],
)  # fmt: skip
def test_a_launch_returns_the_out_it_was_given(out: Any, accepted: bool) -> None:
    data = DataSets(problem(m=4, n=4, k=4), CPU, 1 << 26)
    checks = CheckedLauncher(data, lambda *given: out(given[-1]), True, False)
    expected: Any = contextlib.nullcontext()
    if not accepted:
        expected = pytest.raises(WrongError, match="something else than the out it was given")
    with expected:
        checks._launch(data.sets()[0], into=data.out(0))


@pytest.mark.parametrize("kind", [GeneratorExit, StopIteration])
def test_an_exception_that_ends_generators_does_not_end_a_tuning(kind: type[BaseException]) -> None:
    def launch(*_: Any) -> Any:
        raise kind

    data = DataSets(problem(m=4, n=4, k=4), CPU, 1 << 26)
    with pytest.raises(RuntimeError, match=f"^the launch raised {kind.__name__}$") as raised:
        CheckedLauncher(data, launch, True, False)._launch(data.sets()[0])
    assert data.raised is raised.value


def test_sets_of_inputs_that_were_not_all_made_are_made_again() -> None:
    data = DataSets(problem(m=4, n=4, k=4), CPU, 1 << 26)
    steps = data.making()
    next(steps)
    steps.close()
    assert len(data.sets()) == 2


@pytest.mark.parametrize("name", ["a", "bias", "residual", "b_scale"])
@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda t: None, False),
        (lambda t: t.clone().zero_(), False),
        (lambda t: t.add_(0), True),  # a backward pass detects this by the version
        (lambda t: t.requires_grad_(), True),
        (lambda t: torch._C._set_neg(t, True), True),
        (lambda t: setattr(t, "__class__", torch.nn.Parameter), True),
        (lambda t: setattr(t, "data", t.clone()), True),
        (lambda t: setattr(t, "data", t.data.double()), True),
        (lambda t: setattr(t, "data", t.data.flatten()[:3]), True),
        (lambda t: setattr(t, "data", t.data.as_strided(t.shape, (0,) * t.dim())), True),
    ],
)
def test_a_launch_leaves_its_arguments_as_they_were(name: str, change: Any, seen: bool) -> None:
    instance = problem(m=4, n=4, k=4, bias=F32, residual=Operand(F32))
    if name == "b_scale":
        int8 = Operand(torch.int8, format="int8", scale=Scale.parse("row"))
        instance = replace(instance, b=int8)
    data = DataSets(instance, CPU, 1 << 26)
    first = data.sets()[0]
    given = first.inputs.extras.get(name, getattr(first.inputs, name, None))

    def launch(*_: Any, **extras: Any) -> Any:
        y = torch.empty(4, 4)
        change(given)
        return y

    checks = CheckedLauncher(data, launch, True, False)
    if seen:
        with pytest.raises(WrongError, match=f"^it wrote to its input {name}, or around it$"):
            checks._launch(first)
        assert data.altered == {name}
    else:
        checks._launch(first)
        checks._launch(first, repeated=True)


@pytest.mark.parametrize("name", ["a", "b", "bias", "residual"])
@pytest.mark.parametrize("learns", [False, True])
def test_a_launch_accumulates_no_gradient(name: str, learns: bool) -> None:
    instance = problem(m=4, n=4, k=4, bias=F32, residual=Operand(F32))
    data = DataSets(instance, CPU, 1 << 26)
    first = data.sets()[0]
    given = getattr(first.inputs, name).requires_grad_(learns)

    def launch(*_: Any) -> Any:
        if given.requires_grad:
            given.grad = torch.zeros_like(given)
        return torch.empty(4, 4)

    checks = CheckedLauncher(data, launch, True, False)
    refused = pytest.raises(WrongError, match=f"^it wrote to its input {name}, or around it$")
    with refused if learns else contextlib.nullcontext():
        checks._launch(first)
    assert data.altered == ({name} if learns else set())


# -- pieces of a reference -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "room"),
    [
        ({}, 1 << 20), ({}, 1 << 18), ({}, 1 << 24), ({}, 1), ({"batch": 3}, 1 << 20),
        ({"epilogue": parse("swiglu")}, 1 << 20), ({"k": 1}, 1 << 20), ({"k": 0}, 1 << 20),
    ],
)  # fmt: skip
def test_the_memory_of_the_operands_of_a_piece(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], room: int
) -> None:
    """Pieces in fp64 are as large as memory allows, and at least 64 rows and columns."""
    instance = problem(**{"m": 700, "n": 500, "k": 200, **fields})
    sizes: list[tuple[int, int]] = []

    def piece(problem: Any, part: Any, rows: Any, at: Any, cols: Any) -> None:
        sizes.append((len(rows), len(cols)))

    monkeypatch.setattr(compare, "_piece", piece)
    inputs = Inputs(torch.empty(0), torch.empty(0))
    whole = slice(None)
    assert len(list(compare.pieces(instance, inputs, whole, whole, room))) == len(sizes)
    assert sum(rows * cols for rows, cols in sizes) == 700 * 500
    rows, cols = sizes[0]
    element = 8 * instance.batch
    of_k = element * max(1, instance.k) * (1 + instance.gated)

    def fits(rows: int, cols: int) -> bool:
        return max(rows, cols) * of_k <= room and 3 * rows * cols * element <= room

    assert rows == 64 or rows * of_k <= room
    assert rows in (64, 700) or (rows + 1) * of_k > room
    assert cols == 64 or fits(rows, cols)
    assert cols in (64, 500) or not fits(rows, cols + 1)


def test_samples_of_group_sizes_alternate_between_two_distributions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, int, str]] = []

    def ends_of(count: int, total: int, chance: Any, sizes: str) -> list[int]:
        asked.append((count, total, sizes))
        return [total] * count

    monkeypatch.setattr(ragged_inputs, "ends_of", ends_of)
    for sizes, others in (
        ("skewed", ["even", "skewed"]), ("even", ["skewed", "even"]), ("one", ["skewed", "even"]),
    ):  # fmt: skip
        asked.clear()
        groups = Groups(3, "m")
        Rows.of(
            groups, 40, CPU, random_inputs.seeded(CPU), sizes=sizes, whole=False  # type: ignore
        )  # fmt: skip
        assert asked == [(3, 37, each) for each in (sizes, *(others * 3)[:5])]


@pytest.mark.parametrize(("text", "linear"), [("identity", True), ("silu", False)])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, F32])
def test_magnitudes_of_operands_and_of_alpha(dtype: Any, text: str, linear: bool) -> None:
    """Alphas stay moderate if an epilogue may saturate beyond usual products."""
    one = Operand(dtype)
    instance = problem(a=one, b=one, out=one, scaled=True, epilogue=parse(text))
    plans = {plan.name: plan.recipe for plan in further_inputs.planned(instance)}
    small, large = plans["a small, b large"], plans["a large, b small"]
    for recipe in (small, large):
        assert max(recipe.alpha, 1 / recipe.alpha) > (100 if linear else 2)
        assert linear or max(recipe.alpha, 1 / recipe.alpha) < 10
        product = recipe.values.a * recipe.values.b
        assert 2**-9 < product <= 1  # usual size, or smaller where fp16 lacks range
    assert small.alpha > 1 > large.alpha
    assert small.values.a == large.values.b < 1 < small.values.b == large.values.a
    assert small.values.terms == min(1.0, small.values.a * small.values.b)
    wide = linear and dtype is not HALF
    assert (large.values.terms > 1) is wide
    assert wide or large.values.terms == small.values.terms


def test_stored_values_in_another_order_have_the_same_sums() -> None:
    fp8 = Operand(torch.float8_e4m3fn)
    instance = problem(m=8, n=8, k=16, a=fp8, b=replace(fp8, layout="col"), out=Operand(HALF))
    data = DataSets(instance, CPU, 1 << 26)
    before = data.sets()[-1].inputs
    old = before.a.float(), before.b.float()
    [plan] = [plan for plan in further_inputs.planned(instance) if plan.rolled]
    given = Round(data, plan).inputs
    assert torch.equal(given.a.float(), old[0].roll(1, -1))
    assert torch.equal(given.b.float(), old[1].roll(1, -1))


@pytest.mark.parametrize("values", [random_inputs.Values(), random_inputs.Values(a=8.0)])
def test_results_of_unusual_values_that_saturate_are_not_judged(values: Any) -> None:
    exp = replace(parse("relu"), reference=lambda z: z.exp().exp())
    instance = problem(m=4, n=4, k=4, epilogue=exp)
    data = DataSets(instance, CPU, 1 << 26)
    made = Round(data, Plan("x", Recipe(values), "own"))
    given = made.drawn
    given.a.fill_(3.0)
    given.b.fill_(2.0)
    usual = values == random_inputs.USUAL
    assert math.isnan(made.error(torch.full((4, 4), NAN), data.at_once)) is usual


@pytest.mark.parametrize("wrong", [False, True])
def test_results_of_two_threads_have_the_form_of_a_call(wrong: bool) -> None:
    data = DataSets(problem(m=8, n=8, k=8), CPU, 1 << 26)

    def run(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
        y = torch.matmul(a, b, out=out)
        beside = threading.current_thread() is not threading.main_thread()
        return y.double() if wrong and beside and out is None else y

    checks = ways_of_use.WaysOfUse(data, run, True, False)
    if wrong:
        with pytest.raises(WrongError, match=r"it returned torch\.float64 and not torch\.float32"):
            list(checks.together())
    else:
        list(checks.together())


def of_two_forms(other: Any) -> tuple[ways_of_use.WaysOfUse, list[str], list[Plan]]:
    """Checks of a right launcher whose other form is ``other(y)``, with a list of launches by form
    and the rounds."""
    data = DataSets(problem(m=6, n=8, k=4), CPU, 1 << 26)
    made: list[str] = []

    def by(name: str, spoil: Any) -> Any:
        def run(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
            made.append(name)
            y = spoil(torch.matmul(a.detach(), b.detach()))
            return y if out is None else out.copy_(y)

        return run

    checks = ways_of_use.WaysOfUse(data, by("usual", lambda y: y), True, False)
    form = ways_of_use.WaysOfUse(data, by("form", other), True, False)
    form.called = ", called with N-D operands"
    checks._forms = [form]
    return checks, made, further_inputs.plans_of(data)


def test_each_form_is_launched_in_every_round_unless_only_values_are_unusual() -> None:
    checks, made, plans = of_two_forms(lambda y: y)
    list(checks.rounds())
    outs = sum(plan.place in ("apart", "near", "restrided") for plan in plans)
    of_values = sum(plan.of_values for plan in plans)
    assert (outs, of_values > 2) == (3, True)
    assert made.count("usual") == len(plans) + outs
    assert made.count("form") == len(plans) - of_values + outs
    made.clear()
    list(checks.rounds(1))
    assert made == ["usual", "form"]


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("rounds", "with other values at the same addresses, called with N-D operands"),
        ("together", "launched by two threads at once, called with N-D operands"),
        ("forms", "2e-05, called with N-D operands"),
        ("modes", "under inference mode, called with N-D operands"),
    ],
)
def test_a_fault_names_the_form_that_has_it(way: str, text: str) -> None:
    checks, _, _ = of_two_forms(lambda y: y + 1)
    checked = checks.every_form()[1] if way == "modes" else checks
    with pytest.raises(WrongError, match=f"{text}$"):
        list(getattr(checked, way)())


def test_a_result_in_an_input_of_a_round_names_the_input() -> None:
    data = DataSets(problem(m=6, n=8, k=4, residual=Operand(torch.float32)), CPU, 1 << 26)

    def run(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
        return residual.data.add_(torch.matmul(a, b))  # raises no version

    checks, made = (
        ways_of_use.WaysOfUse(data, run, True, False),
        Round(data, Plan("x", Recipe(), "own")),
    )
    made.refer()
    with pytest.raises(WrongError, match=r"returned memory of its input residual$"):
        checks._launched(made)


@pytest.mark.parametrize("keeps", [False, True])
def test_no_result_of_a_round_is_kept(keeps: bool) -> None:
    data = DataSets(problem(m=6, n=8, k=4), CPU, 1 << 26)
    kept: list[torch.Tensor] = []

    def run(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
        y = torch.matmul(a, b, out=out)
        kept.extend([y] * keeps)
        return y

    checks = ways_of_use.WaysOfUse(data, run, True, False)
    made = Round(data, Plan("x", Recipe()))
    if keeps:
        with pytest.raises(WrongError, match="keeps the memory of a result"):
            checks._launched(made)
    else:
        checks._launched(made)
