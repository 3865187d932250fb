"""Verification finds each kind of kernel that is right in one launch and wrong in use, and passes
correct ones."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from fakes import (
    ON_8_BIT_FLOATS,
    FakeBlas,
    FakeConfig,
    FakeKernel,
    FakeTimer,
    Faulty,
    Tuner,
    problem,
    settings,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tmm_core import Traits, UnsupportedProblemError
from tmm_core.epilogues import BUILTIN, EPILOGUES, parse
from tmm_core.spec.device import fingerprint
from tmm_core.spec.epilogue import Epilogue
from tmm_core.spec.groups import Groups
from tmm_core.spec.kernel import Config
from tmm_core.spec.operand import Operand
from tmm_core.spec.precision import precision
from tmm_core.verify import compare, data_sets, ways_of_use
from tmm_core.verify.data_sets import DataSets
from tmm_core.verify.guard_bands import UNREADABLE, UNWRITTEN, memory_layout, with_guard_bands
from tmm_core.verify.nonfinite import AXES, Axis, nonfinite_inputs, planted
from tmm_core.verify.verifier import Verdict, Verifier
from tmm_core.verify.ways_of_use import WaysOfUse

CPU = torch.device("cpu")
F16, F32, F64 = (Operand(dtype) for dtype in (torch.float16, torch.float32, torch.float64))
ANY = Config()
#: Operations that move no data.
VIEWS = frozenset(
    [
        "alias",
        "as_strided",
        "detach",
        "expand",
        "lift_fresh",
        "mT",
        "narrow",
        "select",
        "slice",
        "transpose",
        "view",
    ]
)

Fault = Callable[..., Any]


def verdict(fault: Fault, instance: Any = None, **keywords: Any) -> Verdict:
    instance = instance or problem()
    deterministic = keywords.pop("deterministic", True)
    launcher = Faulty(fault).bind(instance, ANY)
    return Verifier(instance, CPU).verdict(launcher, deterministic=deterministic, **keywords)


# -- faults: the right launcher, a, b, bias, residual, alpha, out ------------------------


def zeros_without_out(right: Any, a: Any, b: Any, c: Any, d: Any, alpha: float, out: Any) -> Any:
    result = right(a, b, c, d, alpha, out)
    return result if out is not None else torch.zeros_like(result)


def first_launch_only() -> Fault:
    kept: list[torch.Tensor] = []

    def fault(right: Any, a: Any, b: Any, c: Any, d: Any, alpha: float, out: Any) -> Any:
        if not kept:
            kept.append(right(a, b, c, d, alpha, None).clone())
        return kept[0].clone() if out is None else out.copy_(kept[0])

    return fault


def wrong_dtype(right: Any, *rest: Any) -> Any:
    result = right(*rest)
    return result.double() if rest[-1] is None else result


def extra_dimension(right: Any, *rest: Any) -> Any:
    result = right(*rest)
    return result[None] if rest[-1] is None else result


def transposed_strides(right: Any, *rest: Any) -> Any:
    result = right(*rest)
    return result.mT.contiguous().mT if rest[-1] is None else result


def ring_of(size: int, after: int = 0) -> Fault:
    """It reuses ``size`` buffers in turn, and does not reuse its first ``after`` results."""
    buffers: list[torch.Tensor] = []
    launches = itertools.count()

    def fault(right: Any, *rest: Any) -> Any:
        result = right(*rest)
        if rest[-1] is not None or next(launches) < after:
            return result
        buffers.append(result if len(buffers) < size else buffers.pop(0).copy_(result))
        return buffers[-1]

    return fault


def overwrites_a(right: Any, a: Any, *rest: Any) -> Any:
    result = right(a, *rest)
    a[0, 0] += 1
    return result


def transposes_b_in_place(right: Any, a: Any, b: Any, *rest: Any) -> Any:
    result = right(a, b, *rest)
    b.copy_(b.flip(0).clone())
    return result


def writes_around_b(right: Any, a: Any, b: Any, *rest: Any) -> Any:
    result = right(a, b, *rest)
    whole = torch.empty(0, dtype=b.dtype).set_(b.untyped_storage())  # type: ignore[call-overload]
    whole[b.storage_offset() - 1] = 0
    return result


def ignores_out(right: Any, a: Any, b: Any, c: Any, d: Any, alpha: float, out: Any) -> Any:
    return right(a, b, c, d, alpha, None)


def returns_another_than_out(right: Any, *rest: Any) -> Any:
    return right(*rest).clone()


def zero_for_nan(right: Any, *rest: Any) -> Any:
    result = right(*rest)
    return result.copy_(result.nan_to_num(0.0, torch.inf, -torch.inf))


def large_for_inf(right: Any, *rest: Any) -> Any:
    result = right(*rest)
    return result.copy_(result.nan_to_num(torch.nan))


def nan_spreads_to_the_next_row(right: Any, a: Any, *rest: Any) -> Any:
    result = right(a, *rest)
    result[1:] += result[:-1] * 0
    return result


def partial(right: Any, a: Any, b: Any, c: Any, d: Any, alpha: float, out: Any) -> Any:
    result = right(a, b, c, d, alpha, None)
    out = torch.empty_like(result) if out is None else out
    out[:-1] = result[:-1]
    return out


def writes_nothing(right: Any, *rest: Any) -> Any:
    return right(*rest) if rest[-1] is None else rest[-1]


def beyond_out(right: Any, *rest: Any) -> Any:
    result, out = right(*rest), rest[-1]
    if out is not None:
        rows, cols = out.shape
        out.as_strided((rows + 1, cols), out.stride())[-1] = 1.0
    return result


def between_rows_of_out(right: Any, *rest: Any) -> Any:
    result, out = right(*rest), rest[-1]
    if out is not None and out.stride(0) > out.shape[1]:
        out.as_strided((1,), (1,), out.storage_offset() + out.shape[1]).fill_(0)
    return result


def view_of_a(right: Any, a: Any, b: Any, c: Any, d: Any, alpha: float, out: Any) -> Any:
    if out is not None:
        return right(a, b, c, d, alpha, out)
    result = right(a, b, c, d, alpha, None)
    dense = a.as_strided(result.shape, result.stride(), a.storage_offset())
    return dense.copy_(result)


def reads_past_the_sum(right: Any, a: Any, *rest: Any) -> Any:
    """It reads one more column of a, times zero."""
    result = right(a, *rest)
    more = a.as_strided((len(a), 1), a.stride(), a.storage_offset() + a.shape[1])
    return result.add_(more * 0)


def reads_b_at_its_first_address() -> Fault:
    kept: list[torch.Tensor] = []

    def fault(right: Any, a: Any, b: Any, *rest: Any) -> Any:
        kept.append(b)
        return right(a, kept[0], *rest)

    return fault


def writes_to_its_first_out() -> Fault:
    kept: list[torch.Tensor] = []

    def fault(right: Any, a: Any, b: Any, c: Any, d: Any, alpha: float, out: Any) -> Any:
        result = right(a, b, c, d, alpha, out)
        if out is not None:
            kept.append(out)
            kept[0].copy_(result)
        return result

    return fault


FAULTS: dict[str, tuple[Fault, str]] = {
    "right with out and zeros without": (zeros_without_out, "error"),
    "right on the first launch only": (first_launch_only(), "second launch"),
    "wrong dtype": (wrong_dtype, "float64 and not torch.float32"),
    "[1, M, N]": (extra_dimension, "shape"),
    "column-major memory": (transposed_strides, "strides"),
    "a reused buffer": (ring_of(1), "returned before"),
    "two buffers alternately": (ring_of(2), "returned before"),
    "an overwritten input": (overwrites_a, "input a"),
    "an input in another order": (transposes_b_in_place, "input b"),
    "a write before an input": (writes_around_b, "input b"),
    "a given out ignored": (ignores_out, "something else than the out"),
    "another tensor for the out": (returns_another_than_out, "something else than the out"),
    "NaN turned to zero": (zero_for_nan, "not nan"),
    "Inf turned to a number": (large_for_inf, "not -?inf"),
    "NaN in a row too many": (nan_spreads_to_the_next_row, "elements of others"),
    # Memory that it allocated and did not write holds NaN or an old number.
    "a partial write": (partial, r"error \S+ exceeds"),
    "no write": (writes_nothing, "of the out"),
    "a row beyond out": (beyond_out, "outside the out"),
    "a write between rows of out": (between_rows_of_out, "outside the out"),
    "a view of an input": (view_of_a, "input a"),
    "a read past the sum": (reads_past_the_sum, "error nan"),
    "an address kept": (reads_b_at_its_first_address(), "second launch"),
    "the first out kept": (writes_to_its_first_out(), "of the out"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_seen(name: str) -> None:
    fault, says = FAULTS[name]
    found = verdict(fault)
    assert not found.ok
    assert found.reason is not None
    assert re.search(says, found.reason), found.reason


def test_what_a_launcher_raises_is_passed_on_and_not_kept() -> None:
    """Its frames refer to the verifier, which would keep its tensors until garbage is collected."""
    error = LookupError("no such tile")

    def fails(right: Any, *rest: Any) -> Any:
        raise error

    verifier = Verifier(problem(), CPU)
    with pytest.raises(LookupError) as found:
        verifier.verdict(Faulty(fails).bind(problem(), ANY))
    assert found.value is error
    assert verifier.raised is None


@pytest.mark.parametrize(("size", "seen"), [(3, True), (4, False)])
def test_results_of_repeated_launches_are_held(size: int, seen: bool) -> None:
    found = verdict(ring_of(size, after=2), repeats=4, extent="repeated")
    assert ("returned before" in str(found.reason)) == seen


def test_a_kernel_that_is_wrong_for_incomplete_tiles_is_refused() -> None:
    def ragged(right: Any, a: Any, *rest: Any) -> Any:
        result = right(a, *rest)
        result[len(a) // 16 * 16 :] = 0
        return result

    kernel, instance = Faulty(ragged), problem(m=64)
    verifier = Verifier(instance, CPU)
    assert verifier.verdict(kernel.bind(instance, ANY)).ok
    inside = Verifier(replace(instance, m=50), CPU)
    assert not inside.verdict(kernel.bind(inside.problem, ANY)).ok
    assert inside.verdict(FakeKernel("right").bind(inside.problem, ANY)).ok


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.slow
def test_a_race_that_is_wrong_once_in_twenty(deterministic: bool) -> None:
    def race(seed: int) -> Fault:
        chance = random.Random(seed)

        def fault(right: Any, *rest: Any) -> Any:
            result = right(*rest)
            if chance.random() < 0.05:
                result[-1, -1] += 0.5
            return result

        return fault

    instance = problem(m=16, n=8, k=8)
    verifier = Verifier(instance, CPU)

    def misses(repeats: int) -> int:
        launchers = [Faulty(race(seed)).bind(instance, ANY) for seed in range(100)]
        found = [
            verifier.verdict(
                launcher, repeats=repeats, deterministic=deterministic, extent="repeated"
            )
            for launcher in launchers
        ]
        return sum(each.ok for each in found)

    # Chance misses 0.95⁶⁰ = 4.6 of a hundred, and fewer by the other launches.
    assert misses(60) <= 9
    assert misses(1) >= 50


def test_other_bits_are_a_fault_of_deterministic_kernels_alone() -> None:
    calls = [0]

    def wavering(right: Any, *rest: Any) -> Any:
        calls[0] += 1
        return right(*rest).mul_(1 + 1e-7 * (calls[0] % 3))

    given = problem(out=Operand(torch.float32, "col"))  # launches write into outputs
    for instance in (None, given):
        assert "other bits" in str(verdict(wavering, instance, repeats=3).reason)
        assert verdict(wavering, instance, repeats=3, deterministic=False).ok
        assert verdict(wavering, instance, repeats=3, baseline=True).ok  # BLAS is not judged


@pytest.mark.parametrize(
    "fault", ["NaN turned to zero", "Inf turned to a number", "a partial write"]
)
def test_outputs_that_launchers_do_not_make(fault: str) -> None:
    """A strided output is always given; two launches go into two of them."""
    instance = problem(out=Operand(torch.float32, "col"))
    assert not verdict(FAULTS[fault][0], instance).ok
    assert verdict(lambda right, *rest: right(*rest), instance).ok
    assert not verdict(writes_to_its_first_out(), instance).ok


def test_a_wrong_kernel_never_wins_end_to_end() -> None:
    """The tuner calls the verifier."""
    for name in ("right with out and zeros without", "a reused buffer", "NaN turned to zero"):
        timer = FakeTimer({"faulty": 1.0, "blas": 20.0})
        record = Tuner(timer).tune(problem(), [FakeBlas(), Faulty(FAULTS[name][0])], settings())
        assert record.best.kernel == "blas"
        (evidence,) = (c for c in record.candidates if c.kernel == "faulty")
        assert evidence.status == "wrong"
        assert evidence.reason


def test_a_kernel_that_overwrites_its_inputs_affects_no_other() -> None:
    instance = problem()
    verifier = Verifier(instance, CPU)
    right = FakeKernel("right").bind(instance, ANY)

    def explodes(right: Any, a: Any, *rest: Any) -> Any:
        a.zero_()
        raise RuntimeError("after it wrote")

    assert not verifier.verdict(Faulty(overwrites_a).bind(instance, ANY)).ok
    assert verifier.verdict(right).ok
    with pytest.raises(RuntimeError, match="after it wrote"):
        verifier.verdict(Faulty(explodes).bind(instance, ANY))
    assert verifier.verdict(right).ok


def test_an_input_that_a_launch_changed_before_it_is_rewritten_is_noticed() -> None:
    """The first use has one set of inputs; further inputs are written to the same memory."""
    launches = 0

    def launch(right: Any, a: torch.Tensor, *arguments: Any) -> Any:
        nonlocal launches
        result = right(a, *arguments)
        launches += 1
        if launches == 2:
            a.data[0, 0] += 8
        return result

    launcher = Faulty(launch).bind(problem(), FakeConfig())
    data = Verifier(problem(), torch.device("cpu"), sampled=True)
    verdict = data.verdict(launcher, extent="first use")
    assert launches == 2
    assert verdict.reason == "it wrote to its input a, or around it"


def test_a_verification_within_inference_mode_makes_ordinary_tensors() -> None:
    """A kernel keeps memory from one launch to the next, which only torch.inference_mode may write
    if it was allocated there."""
    kept: list[torch.Tensor] = []

    def launch(right: Any, *arguments: Any) -> Any:
        if not kept:
            kept.append(torch.zeros(1))
        kept[0].add_(1)
        return right(*arguments)

    launcher = Faulty(launch).bind(problem(), FakeConfig())
    with torch.inference_mode():
        verdict = Verifier(problem(), torch.device("cpu")).verdict(launcher)
    assert verdict.reason is None
    kept[0].add_(1)


def test_special_values_are_taken_back() -> None:
    data = DataSets(problem(bias=torch.float32, residual=F32), CPU, 1 << 28, sampled=False)
    of = data.sets()[1]
    rows, columns = data.nonfinite()
    assert of.changed() == []
    for values, tensors in ((rows, ["a", "residual"]), (columns, ["b", "bias"])):
        with planted(values.changes):
            assert of.changed() == tensors
        assert of.changed() == []


def test_memory_that_a_launcher_may_get_next_holds_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = DataSets(problem(), CPU, 1 << 28, sampled=False)
    poison, poisoned = data_sets.poison, []
    monkeypatch.setattr(data_sets, "poison", lambda t: (poisoned.append(t), poison(t)))
    data.poison_free_memory()
    assert [(t.shape, t.dtype) for t in poisoned] == 2 * [
        (problem().out_shape, problem().out.dtype)
    ]
    assert all(t.isnan().all() for t in poisoned)


def test_free_memory_is_poisoned_just_before_a_launcher_allocates_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = []
    poisoned = DataSets.poison_free_memory
    monkeypatch.setattr(
        DataSets, "poison_free_memory", lambda self: (poisoned(self), events.append("poisoned"))
    )

    def noted(right: Any, *arguments: Any) -> Any:
        events.append("allocates" if arguments[-1] is None else "writes")
        return right(*arguments)

    assert Verifier(problem(), CPU).verdict(Faulty(noted).bind(problem(), ANY)).ok
    before = [first for first, then in itertools.pairwise(events) if then == "allocates"]
    assert events[0] == "poisoned"
    # Launches of the same kind are repeated without another check.
    assert "poisoned" in before
    assert events.count("poisoned") == before.count("poisoned")


@pytest.mark.parametrize("epilogue", ["identity", "silu", "swiglu"])
def test_non_finite_values_in_pieces_equal_those_of_the_whole(epilogue: str) -> None:
    instance = problem(m=200, n=150, k=40, residual=F32, epilogue=parse(epilogue))
    data = DataSets(instance, CPU, 1 << 28, sampled=False)
    inputs = data.sets()[1].inputs
    for axis in AXES:
        values = nonfinite_inputs(instance, inputs, axis, room=1)
        assert values is not None
        with planted(values.changes):
            z, _ = compare._multiplied(instance, inputs)
            right = instance.epilogue.expression(z, residual=inputs.residual)
        assert values.fault(right) is None
        # The reference leaves open only what silu makes of -Inf, which a gate is given by chance.
        if epilogue != "swiglu":
            assert bool(values.free.any()) is (epilogue == "silu")
        assert int((values.kinds != 0).sum()) > 0
        assert values.fault(right.nan_to_num(0.0)) is not None


ROWS = {"a_index": torch.int64, "out_index": torch.int32, "out_weights": torch.float32}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("epilogue", ["identity", "silu", "swiglu", "clamped_swiglu"])
@pytest.mark.parametrize(
    ("along", "rows"),
    [("m", {}), ("m", {"zeroed": True}), ("m", ROWS), ("m", {"a_index": torch.int32}),
     ("n", {}), ("k", {})],
)  # fmt: skip
def test_special_values_of_groups(
    along: Literal["m", "n", "k"], rows: dict[str, Any], epilogue: str, axis: Axis
) -> None:
    if along == "n" and EPILOGUES[epilogue].gated:
        pytest.skip("gate and up would be in two groups")
    instance = problem(
        40, 33, 20, residual=F32, bias=None if along == "n" else torch.float32,
        epilogue=EPILOGUES[epilogue], groups=Groups(6, along, **rows),
    )  # fmt: skip
    inputs = DataSets(instance, CPU, 1 << 28, sampled=False).sets()[1].inputs
    assert inputs.rows is not None
    values = nonfinite_inputs(instance, inputs, axis, room=1)
    assert values is not None
    with planted(values.changes):
        right = compare.expected(instance, inputs).numbers
    written = torch.full_like(right, torch.nan)
    defined = (..., *inputs.defined(instance))
    written[defined] = right[defined]
    right = written
    assert values.fault(right) is None
    assert values.fault(right.nan_to_num(0.0)) is not None
    # In an element that none of them affects.
    dim = -2 if axis == "rows" else -1
    other = min(set(range(right.shape[dim])) - set(values.places.tolist()))
    right.select(dim, other)[..., 0] = torch.nan
    assert "elements of others are not finite" in str(values.fault(right))


def test_special_values_at_the_ends_of_groups() -> None:
    """There a tile that sums a group's terms also loads terms of the neighbouring group."""
    instance = problem(40, 33, 50, groups=Groups(6, "k"))
    inputs = DataSets(instance, CPU, 1 << 28, sampled=False).sets()[1].inputs
    assert inputs.rows is not None
    filled = [each for each in compare.ranges(inputs.rows.ends) if each[1] < each[2]]
    values = nonfinite_inputs(instance, inputs, "rows", room=1)
    assert values is not None
    last, first = (change.index[-1] for change in values.changes[:2])
    assert last in {end - 1 for _, _, end in filled[:-1]}
    assert first in {start for _, start, _ in filled[1:]}


# -- no false alarms ---------------------------------------------------------------------

EDGES = {
    "empty": problem(m=0),
    "no sum": problem(k=0, bias=torch.float32),
    "one row": problem(m=1),
    "one column": problem(n=1, out=F32),
    "one of each": problem(m=1, n=1, k=1),
    "fp64": problem(a=F64, b=F64, out=F64),
    "wider out": problem(a=F16, b=F16, out=F32),
    "batch": problem(batch=3, residual=F32, bias=torch.float32, scaled=True),
    "gated batch": problem(batch=2, epilogue=parse("swiglu"), bias=torch.float32),
    "columns": problem(a=Operand(torch.float32, "col"), b=Operand(torch.float32, "col")),
    "strided": problem(a=Operand(torch.float32, "strided", aligned=False)),
    "unaligned": problem(a=Operand(torch.float32, aligned=False), n=31),
    "out with gaps": problem(n=31),
    "out strided": problem(out=Operand(torch.float32, "strided", aligned=False)),
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.slow(quick=6)
def test_a_right_kernel_passes(name: str) -> None:
    found = verdict(lambda right, *rest: right(*rest), EDGES[name], repeats=2)
    assert found.ok, found.reason


def kernels() -> list[Any]:
    from tmm_core import dispatch

    return dispatch.default_dispatcher().registry.kernels()


LOOSE = replace(F32, aligned=False)
REAL = {
    "fp32": problem(),
    "ragged": problem(m=5, n=7, k=9, a=LOOSE, b=LOOSE, out=LOOSE),
    "layer": problem(
        m=33,
        n=24,
        k=40,
        a=F16,
        b=Operand(torch.float16, "col"),
        out=F16,
        bias=torch.float16,
        residual=F16,
        epilogue=parse("gelu"),
    ),
    "batch": problem(m=16, n=32, k=32, batch=3, a=F16, b=F16, out=F16),
}


@pytest.mark.parametrize(
    ("name", "interpreted"),
    # The conformance suite verifies each of them on many problems, at three seconds each.
    [
        ("fp32", "triton.naive"),
        ("ragged", "triton.split_k"),
        ("layer", "triton.fused_epilogue"),
        ("batch", "triton.grouped"),
    ],
)
@pytest.mark.slow
def test_tmms_kernels_pass(name: str, interpreted: str) -> None:
    problem = replace(REAL[name], device=fingerprint(CPU))
    verifier, count = Verifier(problem, CPU), 0
    for kernel in kernels():
        if kernel.name not in ("blas", interpreted) or kernel.reasons_against(problem):
            continue
        found = verifier.verdict(
            kernel.bind(problem, kernel.default_config(problem)),
            deterministic=kernel.traits.deterministic,
        )
        assert found.ok, f"{kernel.name}: {found.reason}"
        count += 1
    assert count == 2


@pytest.mark.parametrize("name", sorted(BUILTIN))
@pytest.mark.slow(quick=6)
def test_special_values_through_epilogues(name: str) -> None:
    """Triton's formulas map NaN and Inf to the same results as torch's. Other ways of use need no
    launch for each function."""
    instance = problem(
        m=16, n=16, k=32, a=F16, b=F16, out=F16, epilogue=parse(name), device=fingerprint(CPU)
    )
    (kernel,) = (k for k in kernels() if k.name == "triton.fused_epilogue")
    launcher = kernel.bind(instance, kernel.default_config(instance))
    found = Verifier(instance, CPU).verdict(launcher, extent="repeated")
    assert found.ok, found.reason


def test_fp8() -> None:
    e4m3 = Operand(torch.float8_e4m3fn)
    e5m2 = Operand(torch.float8_e5m2, "col")
    instance = problem(
        m=32, n=32, k=32, a=e4m3, b=e5m2, out=Operand(torch.bfloat16), device=fingerprint(CPU),
        scales=("row", "tensor"),
    )  # fmt: skip
    served = []
    for kernel in kernels():
        if kernel.name in ("blas", "triton.grouped") and not kernel.reasons_against(instance):
            launcher = kernel.bind(instance, kernel.default_config(instance))
            found = Verifier(instance, CPU).verdict(launcher)
            assert found.ok, f"{kernel.name}: {found.reason}"
            assert found.error is not None
            served.append(kernel.name)
    assert served == ["blas", "triton.grouped"]


class EightBitOperations(TorchDispatchMode):
    """Names the operations of torch that take 8-bit floats."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        if any(isinstance(t, torch.Tensor) and "float8" in str(t.dtype) for t in given):
            self.names.add(str(operation).removeprefix("aten.").partition(".")[0])
        return operation(*args, **kwargs)


@pytest.mark.parametrize(
    "fields",
    [
        {"scales": ("row", "tensor"), "residual": Operand(torch.bfloat16)},
        {"scales": ("1x128", "128x128"), "k": 128},
        {"groups": Groups(3, "m"), "scales": ("row", "row")},
        {"a": Operand(torch.bfloat16), "scales": (None, "row")},
    ],
    ids=["residual", "blocks", "groups", "weight"],
)
@pytest.mark.slow(quick=4)
def test_operations_on_8_bit_floats_exist_on_gpus(fields: dict[str, Any]) -> None:
    """``tests/gpu/test_verifier_gpu.py`` calls each of them on a GPU."""
    e4m3 = Operand(torch.float8_e4m3fn)
    instance = problem(
        **{
            "m": 32, "n": 32, "k": 32, "a": e4m3, "b": Operand(torch.float8_e4m3fn, "col"),
            "out": Operand(torch.bfloat16), "device": fingerprint(CPU), **fields,
        }
    )  # fmt: skip
    (blas,) = (k for k in kernels() if k.name == "blas")
    launcher = blas.bind(instance, blas.default_config(instance))
    with EightBitOperations() as used:
        found = Verifier(instance, CPU).verdict(launcher)
    assert found.ok, found.reason
    assert used.names <= {*ON_8_BIT_FLOATS, *VIEWS}


# -- memory, samples, precision ----------------------------------------------------------


def test_samples_where_memory_is_short() -> None:
    instance = problem(m=300, n=700, k=64)

    def tile(right: Any, *rest: Any) -> Any:
        result = right(*rest)
        result[100:116, 200:216] += 1.0  # of 19 × 44 tiles one
        return result

    def one_nan(right: Any, *rest: Any) -> Any:
        result = right(*rest)
        result[123, 456] = torch.nan
        return result

    limit = 8 << 20
    assert not DataSets(instance, CPU, limit, False)._affordable()[1]
    assert DataSets(instance, CPU, limit * 8, False)._affordable() == (2, True)
    # One set may take more than all else.
    small = DataSets(instance, CPU, limit // 16, False)
    assert small._affordable() == (0, False)
    small.most = limit
    assert small._affordable() == (1, False)
    for fault, fine in ((lambda r, *rest: r(*rest), True), (tile, False), (one_nan, False)):
        launcher = Faulty(fault).bind(instance, ANY)
        found = Verifier(instance, CPU, memory_limit=limit).verdict(launcher)
        assert found.ok is fine
        assert Verifier(instance, CPU, sampled=True).verdict(launcher, extent="brief").ok is fine


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.complex64])
def test_integers_and_complex_numbers(dtype: torch.dtype) -> None:
    """Integers have to be exact, and both parts of complex numbers count."""
    operand = Operand(dtype)
    instance = problem(m=12, n=20, k=36, a=operand, b=operand, out=operand)
    one = torch.ones((), dtype=dtype) * (1e-2j if dtype.is_complex else 1)

    def off_by(error: torch.Tensor) -> Any:
        def launch(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
            out = torch.empty(instance.out_shape, dtype=dtype) if rest[-1] is None else rest[-1]
            return out.copy_((a @ b).add_(error))

        return launch

    verifier = Verifier(instance, CPU)
    assert verifier.verdict(off_by(0 * one), extent="brief").ok
    assert "error" in str(verifier.verdict(off_by(one), extent="brief").reason)


@pytest.mark.parametrize(
    ("dtype", "by"),
    [(torch.int32, torch.float32), (torch.int64, torch.float64), (torch.int64, torch.float32)],
)
def test_large_integers_have_to_be_exact(dtype: torch.dtype, by: torch.dtype) -> None:
    """A kernel that multiplies them as floating numbers rounds sums, or saturates."""
    operand = Operand(dtype)
    instance = problem(m=6, n=4, k=3, a=operand, b=operand, out=operand)

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = torch.empty(instance.out_shape, dtype=dtype) if rest[-1] is None else rest[-1]
        return out.copy_((a.to(by) @ b.to(by)).to(torch.int64))

    assert "integers of any size" in str(Verifier(instance, CPU).verdict(launch).reason)


@pytest.mark.parametrize("least", [-(2**63), -(2**63) + 1, 2**62])
def test_errors_of_the_largest_integers(least: int) -> None:
    expected = torch.tensor([[least, 3]])
    assert compare.error(expected, expected) == 0
    for place in (0, 1):
        off = expected.clone()
        off[0, place] += 1
        assert compare.error(off, expected) > 0


def test_without_memory_nothing_is_known() -> None:
    instance = problem(m=300, n=700, k=64)
    found = Verifier(instance, CPU, memory_limit=1 << 18).verdict(
        FakeKernel("k").bind(instance, ANY)
    )
    assert (found.ok, found.unknown, found.error) == (False, True, None)
    assert "memory" in str(found.reason)


def test_samples_are_in_every_stripe() -> None:
    from tmm_core.verify.data_sets import SAMPLES, _sample

    places = _sample(1000, CPU)
    assert places[0] == 0
    assert places[-1] == 999
    assert len(places) <= SAMPLES + 2
    assert int(places.diff().max()) <= 2 * (1000 // SAMPLES + 1)


def test_a_reference_in_pieces_is_the_reference() -> None:
    instance = problem(
        m=150, n=130, k=2000, batch=2, bias=torch.float32, residual=F32, epilogue=parse("swiglu")
    )
    data = DataSets(instance, CPU, 1 << 28, sampled=False)
    (one, _) = data.sets()
    data.limit = 1 << 20
    every = slice(None)
    in_pieces = data._reference(one.inputs, every, every).numbers
    z, _ = compare._multiplied(instance, one.inputs)
    whole = instance.epilogue.expression(z + one.inputs.bias, residual=one.inputs.residual)
    assert torch.allclose(in_pieces.double(), whole, atol=1e-6)
    rows, cols = torch.tensor([0, 7, 149]), torch.tensor([3, 64])
    assert torch.allclose(data._reference(one.inputs, rows, every).numbers, in_pieces[:, rows])
    assert torch.allclose(data._reference(one.inputs, every, cols).numbers, in_pieces[..., cols])


@pytest.mark.parametrize("name", EDGES)
def test_both_sets_are_of_the_requested_class(name: str) -> None:
    problem = EDGES[name]
    if 0 in (problem.m, problem.k):
        pytest.skip("no class to speak of")
    first, second = DataSets(problem, CPU, 1 << 28, sampled=False).sets()
    for of in (first, second):
        for operand, t in ((problem.a, of.inputs.a), (problem.b, of.inputs.b)):
            if 1 not in t.shape:
                assert Operand.of(t) == operand
    assert first.inputs.a.data_ptr() != second.inputs.a.data_ptr()


def test_guard_bands_detect_writes() -> None:
    held = with_guard_bands(memory_layout(F16, (3, 5)), CPU, UNWRITTEN)
    held.poison()
    assert held.tensor.isnan().all()
    assert held.intact()
    held.poison()
    held.words[0, 0] += 1
    assert not held.intact()
    around = with_guard_bands(memory_layout(F16, (3, 5), padded=True), CPU, UNREADABLE).tensor
    assert around.as_strided((1,), (1,), around.storage_offset() + 5).isnan().all()
    before = held.sums()
    held.tensor[0, 0], held.tensor[2, 4] = 1.0, 2.0
    assert not torch.equal(held.sums(), before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["row", "col"])
def test_bands_hold_a_tile_of_128_rows(dtype: torch.dtype, layout: Literal["row", "col"]) -> None:
    """The last row that a tile without masks writes lies in the band, before and behind."""
    shape = (4, 512) if layout == "row" else (512, 4)
    held = with_guard_bands(memory_layout(Operand(dtype, layout), shape), CPU, UNWRITTEN)
    held.poison()
    first = held.tensor.storage_offset()
    for offset in (first + (3 + 127) * 512, first - 127 * 512):
        held.poison()
        held.tensor.as_strided((512,), (1,), offset).fill_(1)
        assert not held.intact()


def test_tuning_leaves_the_process_wide_precision_to_the_user() -> None:
    from tmm_core.spec.precision import precision, require_precision

    gpu = replace(problem().device, type="cuda")
    half = Operand(F16)
    rounded = problem(device=gpu, tf32=True)
    require_precision(problem(a=half, b=half, out=half, device=gpu, tf32=True))
    require_precision(problem(tf32=True))  # on a CPU nothing depends on it
    require_precision(problem(device=gpu))
    with pytest.raises(UnsupportedProblemError, match="fp32_precision = 'tf32'"):
        require_precision(rounded)
    with precision(tf32=True):
        require_precision(rounded)
        with pytest.raises(UnsupportedProblemError, match="fp32_precision = 'ieee'"):
            require_precision(problem(device=gpu))
    with pytest.raises(UnsupportedProblemError, match="fp32_precision"):
        Tuner(FakeTimer({})).tune(rounded, [FakeBlas()], settings())


def test_another_thread_sees_no_other_precision_while_a_call_is_tuned() -> None:
    matmul = torch.backends.cuda.matmul
    seen: set[str] = set()
    before = matmul.fp32_precision

    def looking(right: Any, *rest: Any) -> Any:
        with ThreadPoolExecutor(1) as other:
            seen.add(other.submit(lambda: matmul.fp32_precision).result())
        return right(*rest)

    for tf32 in (False, True):  # with and without the setting in force
        Tuner(FakeTimer({})).tune(problem(tf32=tf32), [FakeBlas(), Faulty(looking)], settings())
    assert seen == {before}


def test_precision_is_left_alone_where_it_is_as_wanted() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with precision(tf32=False):
        assert matmul.fp32_precision == before
    with precision(tf32=True):
        assert matmul.fp32_precision == "tf32"
        with precision(tf32=False):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    assert matmul.fp32_precision == before


def test_another_precision_waits_until_the_first_is_left() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision

    def other() -> str:
        with precision(tf32=False):
            return str(matmul.fp32_precision)

    with ThreadPoolExecutor(1) as threads:
        with precision(tf32=True):
            waiting = threads.submit(other)
            assert wait([waiting], timeout=0.05).not_done == {waiting}
            assert matmul.fp32_precision == "tf32"
        assert waiting.result(timeout=60) == "ieee"
    assert matmul.fp32_precision == before


def test_a_users_epilogue_is_verified_by_its_reference() -> None:
    shifted = Epilogue("shifted", lambda z: torch.tanh(z) + 1)
    assert verdict(lambda right, *rest: right(*rest), problem(epilogue=shifted)).ok


def test_traits_decide_how_repeats_are_compared() -> None:
    calls = [0]

    def wavering(right: Any, *rest: Any) -> Any:
        calls[0] += 1
        return right(*rest).mul_(1 + 1e-7 * (calls[0] % 3))

    for deterministic, status in ((True, "wrong"), (False, "ok")):
        kernel = Faulty(wavering, traits=Traits(deterministic=deterministic))
        timer = FakeTimer({"faulty": 10.0, "blas": 20.0})
        record = Tuner(timer).tune(problem(), [FakeBlas(), kernel], settings())
        (evidence,) = (c for c in record.candidates if c.kernel == "faulty")
        assert evidence.status == status, evidence.reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.slow
def test_sums_that_tensor_cores_truncate_are_right(dtype: torch.dtype) -> None:
    """They lose up to a unit in the last place of an fp32 sum per 16 products."""

    def truncated(_: Any, a: Any, b: Any, c: Any, d: Any, alpha: float, out: Any) -> Any:
        total = torch.zeros(a.shape[0], b.shape[1])
        for x, y in zip(a.float().split(16, 1), b.float().split(16), strict=True):
            total = ((total + x @ y).view(torch.int32) & ~1).view(torch.float32)
        return total.to(a.dtype) if out is None else out.copy_(total)

    operand = Operand(dtype)
    for k in (512, 14336):
        instance = problem(8, 8, k, a=operand, b=operand, out=operand)
        found = verdict(truncated, instance, extent="whole", repeats=2)
        assert found.ok, found.reason


class Subclass(torch.Tensor):
    pass


RESULTS: dict[str, tuple[Any, str]] = {
    "subclass": (lambda y: y.as_subclass(Subclass), "returned Subclass and not a tensor"),
    "parameter": (lambda y: torch.nn.Parameter(y), "returned Parameter and not a tensor"),
    "grad": (lambda y: y.requires_grad_(), "requires a gradient"),
    "recorded": (lambda y: y.requires_grad_() * 1, "requires a gradient"),
    "negation": (lambda y: torch._neg_view(y.neg()), "lazy negation"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_is_more_than_its_values_is_wrong(name: str) -> None:
    """A call with plain operands returns a plain tensor that records nothing."""
    change, why = RESULTS[name]

    def fault(right: Any, *given: Any) -> Any:
        result = right(*given)
        return change(result) if given[-1] is None and torch.is_grad_enabled() else result

    for extent in ("brief", "whole"):
        found = verdict(fault, extent=extent)
        assert found.reason is not None
        assert why in found.reason


@pytest.mark.parametrize("allocates", [True, False])
def test_a_brief_verification_has_one_launch_of_each_kind(allocates: bool) -> None:
    """It is made for each candidate at other M, so it is not repeated for the second set."""
    given: list[bool] = []

    def noted(right: Any, *arguments: Any) -> Any:
        given.append(arguments[-1] is not None)
        return right(*arguments)

    instance = problem() if allocates else problem(out=Operand(torch.float32, "col"))
    assert verdict(noted, instance, extent="brief").ok
    assert given == ([False, True] if allocates else [True])


@pytest.mark.parametrize(("ms", "launches"), [(100.0, 2), (0.2, 10), (0.001, 32)])
def test_long_launches_of_two_threads_are_few(
    ms: float, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host submits launches faster than a GPU ends them, so their number follows their time."""
    now = [0.0]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(ways_of_use, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def takes(right: Any, *given: Any) -> Any:
        now[0] += 1e-3 * ms
        return right(*given)

    checks = WaysOfUse(Verifier(problem(), CPU), Faulty(takes).bind(problem(), ANY), True, False)
    assert checks._most_together() == launches
