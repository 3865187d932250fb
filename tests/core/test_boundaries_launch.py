"""Limits of a call: empty dimensions, adjacent memory, full tables, kernels that may not fail, and
state that stays behind."""

from __future__ import annotations

import gc
import inspect
import itertools
import linecache
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeBlas, FakeKernel, installed
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tmm_core
from tmm_core import PluginError, Port, compat
from tmm_core.epilogues import parse
from tmm_core.launch import check, grouped_call, nesting, warm
from tmm_core.launch import plan as plan_module
from tmm_core.launch.fold import Fold
from tmm_core.spec.arguments import Arguments, GroupedArguments
from tmm_core.spec.epilogue import IDENTITY, Epilogue
from tmm_core.spec.launcher import Bound

Tensor = torch.Tensor
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
A, B = torch.randn(4, 8), torch.randn(8, 6)


# -- checks -------------------------------------------------------------------------------


@pytest.mark.parametrize("b", [torch.randn(8), torch.randn(7), torch.randn(8, 5)])
def test_a_gated_epilogue_needs_two_halves_of_columns(b: Tensor) -> None:
    """A vector counts as one column, whether its length is even or odd."""
    with pytest.raises(ValueError, match="needs b of width 2N"):
        tmm_core.matmul(torch.randn(4, len(b)), b, epilogue="swiglu")


@pytest.mark.parametrize("name", ["bias", "residual"])
def test_terms_have_the_dtype_of_the_operands_of_the_result_or_fp32(name: str) -> None:
    a, b = A.bfloat16(), B.bfloat16()
    term = torch.randn(6) if name == "bias" else torch.randn(4, 6)
    for dtype in (BF16, FP16, FP32):
        given: Any = {name: term.to(dtype), "out_dtype": FP16}
        y = tmm_core.matmul(a, b, **given)
        expected = a.double() @ b.double() + term.to(dtype).double()
        assert y.dtype is FP16
        torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match=f"{name} must have dtype"):
        tmm_core.matmul(a, b, **{name: term.double()}, out_dtype=FP16)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=f"{name} must have dtype"):
        tmm_core.matmul(a, b, **{name: term.half()})  # type: ignore[arg-type]


#: Shapes with dimensions of size 0 and 1, and with equal and different sizes.
SHAPES = [
    (), (1,), (3,), (2, 3), (3, 2), (1, 3), (3, 1), (0, 3), (3, 0), (2, 3, 2), (1, 3, 2), (4, 2, 3),
    (2, 1, 2, 3), (1, 4, 3, 1), (0, 2, 3),
]  # fmt: skip


@pytest.mark.parametrize("one", SHAPES, ids=str)
def test_shapes_equal_torchs(one: tuple[int, ...]) -> None:
    """Shapes of products and of sums agree, and refusals have torch's words."""
    for other in SHAPES:
        a, b = torch.empty(one), torch.empty(other)
        try:
            right, refused = (a @ b).shape, ""
        except RuntimeError as error:
            right, refused = None, str(error)
        if right is not None:
            assert check.product_shape(a, b) == right
        else:
            with pytest.raises(RuntimeError) as caught:
                check.product_shape(a, b)
            if not (one and other):
                assert str(caught.value) == refused
        try:
            a.add_(b)
            fits = True
        except RuntimeError:
            fits = False
        assert check.broadcasts(other, one) is fits


@pytest.mark.parametrize(
    ("a", "b", "packs", "shape"),
    [
        ((4, 3), (6, 5), (2, 1), (4, 5)), ((4, 6), (3, 5), (1, 2), (4, 5)),
        ((3,), (6,), (2, 1), ()), ((6,), (3,), (1, 2), ()),
        ((2, 4, 3), (2, 3, 5), (2, 2), (2, 4, 5)),
        ((), (6, 5), (2, 1), None), ((4, 3), (), (2, 1), None), ((4, 3), (), (1, 2), None),
        ((4, 3), (3, 5), (2, 1), None), ((4, 3), (3, 5), (1, 2), None),
    ],
)  # fmt: skip
def test_packed_values_are_terms_of_sums(a: Any, b: Any, packs: Any, shape: Any) -> None:
    x, y = torch.empty(a), torch.empty(b)
    if shape is not None:
        assert check.product_shape(x, y, packs) == shape
        return
    words = "shapes cannot be multiplied" if a and b else "need to be at least 1D"
    with pytest.raises(RuntimeError, match=words):
        check.product_shape(x, y, packs)


@pytest.mark.parametrize(
    ("alpha", "found"),
    [
        (2, 2), (2.5, 2.5), (True, True), (2**64 - 1, 2**64 - 1), (-(2**63), -(2**63)),
        (torch.tensor(3), 3), (torch.tensor(0.5), 0.5), (np.float64(1.5), 1.5), (1.5 + 0j, 1.5),
        (np.float32(1.5), 1.5), (np.int64(7), 7), (np.bool_(True), True), (np.float16(2), 2.0),
        (np.complex64(3), 3.0), (np.longdouble(1.5), 1.5),
    ],
)  # fmt: skip
def test_numbers_become_python_numbers(alpha: Any, found: Any) -> None:
    got = check.number("matmul", alpha, A)
    assert (got, type(got)) == (found, type(found))


@pytest.mark.parametrize(
    ("alpha", "error"),
    [
        (2**64, OverflowError), (-(2**63) - 1, OverflowError), ("1", TypeError), (None, TypeError),
        (torch.ones(1), TypeError), (torch.ones((), requires_grad=True), TypeError),
        (np.ones(1), TypeError), (np.timedelta64(3, "s"), TypeError), (1j, RuntimeError),
    ],
)  # fmt: skip
def test_an_alpha_that_is_not_a_number_is_refused(alpha: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        check.number("matmul", alpha, A)
    if alpha == 1j:
        assert check.number("matmul", alpha, A.to(torch.complex64)) == 1j


@pytest.mark.parametrize(
    ("alpha", "found"),
    [
        (np.float64(2), True), (np.int32(2), True), (np.array(2.0), True), (np.ones(1), False),
        (2.0, False), (2, False), (True, False), ("2", False), (None, False),
    ],
)  # fmt: skip
def test_numbers_of_numpy_are_tensors_in_a_graph(alpha: Any, found: bool) -> None:
    assert check._is_numpy_number(alpha) is found


def test_an_out_that_overlaps_itself_is_refused_in_torchs_words() -> None:
    for out in (torch.zeros(6).expand(4, 6), torch.zeros(4, 1).expand(4, 6)):
        with pytest.raises(RuntimeError) as right:
            torch.add(torch.zeros(4, 6), 1.0, out=out)
        with pytest.raises(RuntimeError) as caught:
            check.check_out(out, out.shape, FP32, (A, B))  # Triton's kernels would not check this
        assert str(caught.value) == str(right.value)


def test_the_first_difference_of_operands_is_named() -> None:
    """Different dtypes and a missing operand are each named."""
    with pytest.raises(RuntimeError, match="expected m1 and m2 to have the same dtype"):
        tmm_core.matmul(A, B.half())
    for given in ({"a": None, "b": B}, {"a": A, "b": None}):
        with pytest.raises(TypeError, match="must be Tensor, not NoneType"):
            tmm_core.matmul(**given)  # type: ignore[arg-type]
    assert tmm_core.matmul(A, B, bias=None, residual=None).shape == (4, 6)


@pytest.mark.parametrize("device", ["cpu", "meta"])  # of meta tensors nothing is computed
def test_booleans_are_refused_in_torchs_words(device: str) -> None:
    with pytest.raises(RuntimeError) as right:
        torch.matmul(A.bool(), B.bool())
    with pytest.raises(RuntimeError) as caught:
        tmm_core.matmul(A.bool().to(device), B.bool().to(device))
    assert str(caught.value) == str(right.value)


@pytest.mark.parametrize(
    ("first", "second", "own"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_torch_gets_operands_only_on_a_gpu(
    first: bool, second: bool, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's error names the device of GPU operands; torch gets them without grad mode."""
    given: list[Any] = []

    class Stand:
        def __init__(self, is_cuda: bool) -> None:
            self.is_cuda, self.shape, self.dtype = is_cuda, (2, 3), FP32

        def stride(self) -> tuple[int, int]:
            return (3, 1)

    def matmul(*operands: Any) -> None:
        given.append((operands, torch.is_grad_enabled()))

    a: Any = Stand(first)
    b: Any = Stand(second)
    monkeypatch.setattr(check, "PLAIN", {Stand})
    monkeypatch.setattr(torch, "matmul", matmul)
    check._raise_torchs_error(a, b)
    [(found, recorded)] = given
    assert (found == (a, b)) is own
    assert recorded is not own
    assert own or [(t.shape, t.stride(), t.is_cuda) for t in found] == [((2, 3), (3, 1), False)] * 2
    given.clear()
    monkeypatch.setattr(check, "PLAIN", {Tensor})  # a subclass may override the product
    check._raise_torchs_error(a, b)
    assert given[0][0] != (a, b)


class Unknown(int):
    """A size of a graph, which has another type than int."""


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [((2, 1), (3,), (2, 3)), ((2,), (3,), None), ((), (4,), (4,)), ((0,), (1,), (0,)),
     ((2, 3), (2, 3), (2, 3)), ((3, 1, 2), (1, 5, 1), (3, 5, 2))],
)  # fmt: skip
def test_sizes_of_a_graph_broadcast_as_torch_says(one: Any, other: Any, both: Any) -> None:
    for x, y in ((one, other), (other, one)):
        assert check._broadcast(x, y) == both
        assert check._broadcast(tuple(map(Unknown, x)), y) == both
        assert check._broadcast(x, tuple(map(Unknown, y))) == both


@pytest.mark.parametrize("before", [True, False])
def test_memory_adjacent_to_an_input_is_written(before: bool) -> None:
    """Adjacent tensors share no memory, so the call writes the output."""
    memory = torch.randn(16 + 24)
    a = (memory[24:] if before else memory[:16]).view(4, 4)
    out = (memory[:24] if before else memory[16:]).view(4, 6)
    b = torch.randn(4, 6)
    expected = a.clone() @ b
    assert tmm_core.matmul(a, b, out=out) is out
    torch.testing.assert_close(out, expected)
    # They overlap in one element.
    overlapping = (memory[1:25] if before else memory[15:39]).view(4, 6)
    with pytest.raises(RuntimeError, match="single memory location"):
        tmm_core.matmul(a, b, out=overlapping)


def test_an_out_that_wants_a_gradient_is_refused_alone() -> None:
    out = torch.empty(4, 6, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"out=.* don't support automatic differentiation"):
        tmm_core.matmul(A, B, out=out)
    with torch.no_grad():
        torch.testing.assert_close(tmm_core.matmul(A, B, out=out), A @ B)


def test_only_an_out_with_elements_is_resized_with_a_warning() -> None:
    out = torch.empty(0)
    assert tmm_core.matmul(A, B, out=out) is out
    torch.testing.assert_close(out, A @ B)
    with pytest.warns(UserWarning, match="was resized since it had shape"):
        tmm_core.matmul(A, B, out=torch.empty(3))


@pytest.mark.parametrize(
    ("sa", "sb"),
    [
        ((0, 2, 3), (1, 3, 4)), ((1, 2, 3), (0, 3, 4)), ((5, 1, 2, 3), (0, 3, 4)),
        ((2, 0, 3), (1, 3, 4)), ((0, 2, 3), (3, 4)),
    ],
)  # fmt: skip
def test_an_empty_batch_meets_one_of_one(sa: Any, sb: Any) -> None:
    a, b = torch.randn(sa), torch.randn(sb)
    try:
        expected = torch.matmul(a, b)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            tmm_core.matmul(a, b)
        return
    y = tmm_core.matmul(a, b, epilogue="silu")
    assert y.shape == expected.shape


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_of_one_number_has_any_shape(shape: tuple[int, ...]) -> None:
    a, b = (t.to(torch.float8_e4m3fn) for t in (A, B))
    for lead in ((), (3,)):
        x = a.float().expand(*lead, 4, 8).to(a.dtype)
        y = tmm_core.matmul(
            x, b, scale_a=torch.full(shape, 2.0), scale_b=torch.full(shape, 0.5), out_dtype=FP32
        )
        torch.testing.assert_close(y, x.float() @ b.float())


# -- folds --------------------------------------------------------------------------------


def test_empty_operands_are_not_read_in_place() -> None:
    """An empty tensor has no address, so whether it is in place cannot be checked."""
    a, b = torch.randn(2, 3, 8), B
    fold = Fold.of(a, b, None, torch.Size((2, 3, 6)))
    assert fold is not None
    views = fold.in_place(a, b, None)
    assert views is not None
    assert views["a"].shape == (6, 8)
    empty = torch.empty(0, 3, 8)
    fold = Fold.of(empty, b, None, torch.Size((0, 3, 6)))
    assert fold is not None
    assert fold.in_place(empty, b, None) is None
    transposed = torch.randn(3, 2, 8).transpose(0, 1)
    fold = Fold.of(transposed, b, None, torch.Size((2, 3, 6)))
    assert fold is not None
    assert fold.in_place(transposed, b, None) is None


@pytest.mark.parametrize(
    ("a", "b", "made", "in_place"),
    [
        ((5, 3, 8), (5, 8, 6), lambda *shape: torch.empty(shape), True),
        # Of the kernel's own shape, which needs no view.
        ((5, 3, 8), (5, 8, 6), lambda *shape: torch.empty(*shape[:-1], 9)[..., :6], True),
        ((2, 3, 8), (8, 6), lambda *shape: torch.empty(shape), True),
        ((2, 3, 8), (8, 6), lambda *shape: torch.empty(*shape[:-1], 9)[..., :6], False),
    ],
)
def test_an_out_is_written_in_place_if_it_has_a_view_for_the_kernel(
    a: tuple[int, ...], b: tuple[int, ...], made: Any, in_place: bool
) -> None:
    given = torch.randn(a), torch.randn(b)
    right = given[0] @ given[1]
    fold = Fold.of(*given, None, right.shape)
    assert fold is not None
    outs: list[Any] = []

    def run(a: Any, b: Any, bias: Any, residual: Any, alpha: Any, out: Any) -> Any:
        outs.append(out)
        return torch.matmul(a, b, out=out)

    out = made(*right.shape)
    launch: Any = fold.wrap(run, *given, None)
    assert launch(*given, None, None, 1.0, out) is out
    torch.testing.assert_close(out, right)
    assert [None if each is None else each.data_ptr() for each in outs] == [
        out.data_ptr() if in_place else None
    ]


def test_a_kernel_sees_a_residual_of_the_results_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels index the residual by row and column, so a broadcast one is expanded."""
    monkeypatch.setenv("TMM_ON_CACHE_MISS", "heuristic")
    seen: list[Any] = []

    class Noting(FakeBlas):
        def bind(self, problem: Any, config: Any) -> Any:
            right: Any = super().bind(problem, config)

            def launch(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
                seen.append(tuple(residual.shape))
                return right(a, b, bias, residual, alpha, out)

            launch.cost = right.cost  # type: ignore[attr-defined]
            return launch

    installed(Noting())
    for residual in (torch.randn(4, 6), torch.randn(1, 6), torch.randn(4, 1), torch.randn(6),
                     torch.randn(())):  # fmt: skip
        y = tmm_core.matmul(A, B, residual=residual)
        torch.testing.assert_close(y, A @ B + residual)
    assert seen == [(4, 6)] * 5


def test_a_kernel_sees_the_terms_of_its_problem_alone() -> None:
    """In training the activation is a separate step, and the residual is added after it."""
    seen: list[Any] = []

    class Noting(FakeBlas):
        def bind(self, problem: Any, config: Any) -> Any:
            right = super().bind(problem, config)

            def launch(a: Any, b: Any, bias: Any, residual: Any, alpha: float, out: Any) -> Any:
                seen.append((bias is not None, residual is not None))
                assert (problem.bias is not None, problem.residual is not None) == seen[-1]
                return right(a, b, bias, residual, alpha, out)

            launch.cost = right.cost  # type: ignore[attr-defined]
            return launch

    installed(Noting())
    a, bias, residual = A.clone().requires_grad_(), torch.randn(6), torch.randn(4, 6)
    for _ in range(2):
        y = tmm_core.matmul(a, B, bias=bias, epilogue="tanh", residual=residual)
        torch.testing.assert_close(y, torch.tanh(a @ B + bias) + residual)
    assert seen == [(True, False)] * 2
    y = tmm_core.matmul(a, B, residual=residual)
    torch.testing.assert_close(y, a @ B + residual)
    assert seen[2:] == [(False, True)]


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("capturing", [False, True])
def test_a_plan_is_kept_if_its_choice_lasts(
    lasting: bool, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A choice is not kept if another process was tuning, or if it was made in a capture."""
    plan = SimpleNamespace(
        choice=SimpleNamespace(lasting=lasting), problem=SimpleNamespace(capturing=capturing)
    )
    monkeypatch.setattr(warm, "_planned", lambda call, describe: plan)
    monkeypatch.setattr(warm, "_plans", {})
    assert warm._built((), None, None) is plan  # type: ignore[arg-type, comparison-overlap]
    assert (() in warm._plans) is (lasting and not capturing)


def test_a_launch_that_makes_a_first_call_is_announced_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The outer kernel's plan is dropped, and the plan of the nested call is not kept."""
    made: list[Any] = []
    monkeypatch.setattr(warm, "launching", lambda: "outer")
    monkeypatch.setattr(warm, "NESTING", set())
    old = {("x",): SimpleNamespace(kernel="outer"), ("y",): SimpleNamespace(kernel="other")}
    monkeypatch.setattr(warm, "TABLES", [old])
    monkeypatch.setattr(warm, "_plans", {})

    def planned(call: Any, describe: Any) -> Any:
        made.append((call, describe, tmm_core.settings.current().nested))
        return SimpleNamespace(
            choice=SimpleNamespace(lasting=True), problem=SimpleNamespace(capturing=False)
        )

    monkeypatch.setattr(warm, "_planned", planned)
    call: Any = "call"
    describe: Any = "describe"
    warm._built((), call, describe)
    assert made == [("call", "describe", True)]
    assert {"outer"} == warm.NESTING
    assert [*old] == [("y",)]
    assert warm._plans == {}
    with tmm_core.settings.nested():  # these settings say that a launch is under way
        warm._built((), call, describe)
    assert made[1:] == [("call", "describe", True)]
    assert [*warm._plans] == [()]


#: The source of a launcher, as ``bind`` may return it.
SUMS = replace(IDENTITY, outputs=(Port("x", "row", reduce="sum"),))


@pytest.mark.parametrize("nesting_kernel", [False, True])
@pytest.mark.parametrize(
    ("a", "epilogue", "folded"),
    [
        (A, IDENTITY, False), (A[None], IDENTITY, True), (A[0], parse("silu"), True),
        (A, SUMS, False), (A[None], SUMS, False),
    ],
)  # fmt: skip
def test_which_forms_of_a_launcher_a_plan_has(
    a: Tensor, epilogue: Epilogue, folded: bool, nesting_kernel: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With auxiliary outputs or for a kernel that calls tmm, a plan uses the plain form."""
    folds: list[Any] = []

    def run(*_: Any, **__: Any) -> Any:
        return run

    def fold(of: Fold, *given: Any) -> Any:
        folds.append(given[:3])
        return None

    choice = SimpleNamespace(
        lasting=True, candidate=SimpleNamespace(kernel=SimpleNamespace(name="k"))
    )
    bound = Bound(run, fold)
    chooser = SimpleNamespace(bound=lambda problem, current: (choice, bound))
    monkeypatch.setattr(warm, "answerer", lambda: chooser)
    monkeypatch.setattr(warm, "NESTING", {"k"} if nesting_kernel else set())
    call, current = Arguments(a, B), tmm_core.settings.current()
    warm.make_plan(call, epilogue, current, warm.describe)
    assert [(x is a, y is B, r) for x, y, r in folds] == (
        [(True, True, None)] if folded and not nesting_kernel else []
    )


def test_a_plan_waits_for_a_choice_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call, unlike a plan, uses an interim choice."""
    slept: list[float] = []
    asked: list[str] = []
    plan = SimpleNamespace()

    def bound(problem: Any, current: Any) -> Any:
        asked.append(current.on_cache_miss)
        lasting = len(asked) > 3
        kernel = SimpleNamespace(kernel=SimpleNamespace(name="k"))
        return SimpleNamespace(lasting=lasting, candidate=kernel), lambda *_: None

    monkeypatch.setattr(warm, "answerer", lambda: SimpleNamespace(bound=bound))
    monkeypatch.setattr(warm.time, "sleep", slept.append)
    current = tmm_core.settings.changed(tmm_core.settings.current(), on_cache_miss="background")
    call = Arguments(A, B)
    assert not warm.make_plan(call, IDENTITY, current, warm.describe, waits=False).choice.lasting
    assert (asked, slept) == (["background"], [])
    made: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(warm, "make_plan", lambda *given, waits: made.append(waits) or plan)
        patch.setattr(warm, "epilogue_of", lambda text: IDENTITY)
        assert warm._planned(call, warm.describe) is plan
    assert made == [False]
    asked.clear()
    assert warm.make_plan(call, IDENTITY, current, warm.describe).choice.lasting
    assert (asked, slept) == (["tune"] * 4, [warm._POLL] * 3)
    for miss in ("heuristic", "error"):
        asked.clear()
        other = tmm_core.settings.changed(current, on_cache_miss=miss)
        warm.make_plan(call, IDENTITY, other, warm.describe)
        assert set(asked) == {miss}


@pytest.mark.parametrize(
    ("a", "b", "static"),
    [((4, 8), (8, 6), True), ((2, 4, 8), (8, 6), True), ((8,), (8, 6), True),
     ((4, 8), (8,), False), ((2, 4, 8), (2, 8, 6), False)],
)  # fmt: skip
def test_weights_that_do_not_change_are_matrices(a: Any, b: Any, static: bool) -> None:
    call, usual = Arguments(torch.randn(a), torch.randn(b)), tmm_core.settings.current()
    promised = tmm_core.settings.changed(usual, static_weights=True)
    for current, found in ((usual, False), (promised, static)):
        assert warm.describe(call, IDENTITY, current)[0].static_weights is found


@pytest.mark.parametrize("answer", [True, False, 1, TypeError("another signature")])
def test_guards_that_do_not_accept_their_own_tensors_are_not_used(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guards of another torch may raise in each call of a plan, or refuse its own tensors."""

    def check(*tensors: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    made = SimpleNamespace(check=check)
    monkeypatch.setattr(plan_module, "tensor_guards", lambda: lambda *given, **sizes: made)
    assert plan_module._guards([A, None, B]) is (check if answer is True else None)
    monkeypatch.setattr(plan_module, "tensor_guards", lambda: None)
    assert plan_module._guards([A, None, B]) is None


def test_guards_distinguish_tensors_that_a_plan_distinguishes() -> None:
    """Torch's guards check all tensors in one call."""
    if compat.tensor_guards() is None:
        pytest.skip("this torch has no guards")
    same = plan_module._guards([A, None, B])
    assert same is not None
    assert same(A, B) is True
    assert same(A.clone(), B.clone()) is True
    for x, y in (
        (B, A), (A, B.double()), (torch.randn(5, 8), B), (A, torch.randn(6, 8).T),
        (torch.randn(4, 16)[:, ::2], B), (A.as_subclass(Mine), B),
    ):  # fmt: skip
        assert same(x, y) is not True


@pytest.mark.usefixtures("blas_alone")
def test_a_plan_renews_its_guards_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors of inference mode differ from others for torch's guard, and not for a plan. If such
    calls alternated, guards would be made all the time."""
    if compat.tensor_guards() is None:
        pytest.skip("this torch has no guards")
    made, checked = list[Any](), list[Any]()
    guards, check_all = plan_module._guards, plan_module.Plan._check
    monkeypatch.setattr(plan_module, "_guards", lambda ts: (made.append(ts), guards(ts))[1])
    monkeypatch.setattr(
        plan_module.Plan, "_check", lambda *given: (checked.append(given), check_all(*given))[1]
    )
    with torch.inference_mode():
        a, b = A.clone(), B.clone()
    plan = tmm_core.plan(A, B)
    for given, counts in (
        ((A, B), (1, 0)), ((a, b), (2, 1)), ((a, b), (2, 1)), ((A, B), (2, 2)), ((A, B), (2, 3)),
        ((a, b), (2, 3)),
    ):  # fmt: skip
        torch.testing.assert_close(plan(*given), A @ B)
        assert (len(made), len(checked)) == counts


def test_plans_of_a_kernel_that_multiplies_itself_are_dropped() -> None:
    installed(FakeBlas())
    tmm_core.matmul(A, B)
    tmm_core.matmul(A, B, bias=B[0])
    assert len(warm._plans) == 2
    warm.nest("another")
    assert len(warm._plans) == 2
    warm.nest("blas")
    assert len(warm._plans) == 0
    warm.NESTING.clear()


@pytest.mark.parametrize("epilogue", [None, "silu", "swiglu"])
def test_groups_of_meta_tensors_have_a_shape(epilogue: Any) -> None:
    a, b = torch.empty(7, 8, device="meta"), torch.empty(3, 8, 6, device="meta")
    offs = torch.empty(3, device="meta", dtype=torch.int32)
    y = tmm_core.grouped_matmul(a, b, offs=offs, epilogue=epilogue)
    assert (y.shape, y.device.type) == ((7, 3 if epilogue == "swiglu" else 6), "meta")
    y = tmm_core.matmul(a, b[0], epilogue=epilogue)
    assert (y.shape, y.device.type) == ((7, 3 if epilogue == "swiglu" else 6), "meta")


@pytest.mark.usefixtures("blas_alone")
@pytest.mark.parametrize(
    ("epilogue", "shape"),
    [("quantize", (4, 128)), ("quantize", (3, 4, 128)), ("silu", (4, 128)), ("swiglu", (4, 128))],
)
def test_results_of_meta_tensors_have_the_properties_of_cpu_results(
    epilogue: str, shape: tuple[int, ...]
) -> None:
    """Auxiliary outputs and a given ``out`` are compared, too."""
    a, b = torch.randn(shape), torch.randn(128, 256)
    right: Any = tmm_core.matmul(a, b, epilogue=epilogue)
    a, b = a.to("meta"), b.to("meta")
    found: Any = tmm_core.matmul(a, b, epilogue=epilogue)
    assert type(found) is type(right)
    right, several = (right if type(right) is tuple else (right,)), found
    found = found if type(found) is tuple else (found,)
    places = [(t.shape, t.dtype, t.stride()) for t in right]
    assert [(t.shape, t.dtype, t.stride()) for t in found] == places
    assert all(t.is_meta for t in found)
    if several is not found:
        out = torch.empty_like(found[0])
        assert tmm_core.matmul(a, b, epilogue=epilogue, out=out) is out


def test_a_plan_is_of_the_formats_that_it_was_made_for() -> None:
    a, weight = torch.randn(4, 32), torch.randn(6, 32)
    int8, fp8 = (tmm_core.quantize(weight, name) for name in ("int8", "fp8"))
    plan = tmm_core.plan(a, int8.mT)
    right = tmm_core.matmul(a, int8.mT)
    torch.testing.assert_close(plan(a, int8.mT), right)
    torch.testing.assert_close(plan(a, int8.mT.stored, scale_b=int8.mT.scale), right)
    with pytest.raises(ValueError, match=r"takes operands of formats .*int8.*, got .*"):
        plan(a, fp8.mT)


@pytest.mark.parametrize(
    ("a", "b", "seen"),
    [
        ((8,), (3, 8, 6), ((3, 1, 8), (3, 8, 6))), ((4, 8), (3, 8, 6), ((3, 4, 8), (3, 8, 6))),
        ((2, 1, 4, 8), (3, 8, 6), ((6, 4, 8), (6, 8, 6))), ((2, 4, 8), (8,), ((8, 8), (8, 1))),
        ((1, 4, 8), (1, 8, 6), ((4, 8), (8, 6))), ((2, 4, 8), (8, 6), ((8, 8), (8, 6))),
    ],
)  # fmt: skip
def test_operands_of_any_dimensions_are_matrices_or_stacks(a: Any, b: Any, seen: Any) -> None:
    left, right = torch.randn(a), torch.randn(b)
    y = left @ right
    fold = Fold.of(left, right, None, y.shape)
    assert fold is not None
    found = fold.a(left), fold.b(right)
    assert tuple(tuple(t.shape) for t in found) == seen
    torch.testing.assert_close((found[0] @ found[1]).view(y.shape), y)
    # A scale per row or column is reshaped as its operand is.
    of_a, of_b = torch.rand(*a[:-1], 1), torch.rand(*b[:-2], 1, *b[-1:]) if b[1:] else torch.rand(1)
    scaled = (found[0] * fold._of_a(of_a)) @ (found[1] * fold._of_b(of_b))
    torch.testing.assert_close(scaled.view(y.shape), (left * of_a) @ (right * of_b))
    # A grid of scales has one scale for each four values along K.
    grids = fold._of_a(torch.rand(*a[:-1], 2)), fold._of_b(torch.rand(*b[:-2], 2, *b[-1:])
                                                          if b[1:] else torch.rand(2))  # fmt: skip
    assert grids[0].shape == (*seen[0][:-1], 2)
    assert grids[1].shape == (*seen[1][:-2], 2, seen[1][-1])


def test_the_default_device_does_not_affect_an_error() -> None:
    """Torch's errors are raised by stand-ins of the operands, which are on the CPU."""
    out, other = torch.empty(4, 6, dtype=FP64), torch.empty(7, 6)
    with torch.device("meta"):
        with pytest.raises(RuntimeError, match=r"Expected out tensor to have dtype float, but got"):
            tmm_core.matmul(A, B, out=out)
        with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied"):
            tmm_core.matmul(A, other)
        assert check._values_like(A, 2, -1).shape == (4, 16)
        assert check._values_like(A, 2, -1).device.type == "cpu"


@pytest.mark.parametrize("name", ["b", "bias", "residual", "out"])
def test_operands_on_two_devices_are_refused_in_torchs_words(name: str) -> None:
    shapes = {"b": (8, 6), "bias": (6,), "residual": (4, 6), "out": (4, 6)}
    given: dict[str, Any] = {"b": B, name: torch.empty(shapes[name], device="meta")}
    with pytest.raises(RuntimeError, match=r"^Expected all tensors to be on the same device, but"):
        tmm_core.matmul(A, **given)


def test_scales_of_a_batch_that_shares_them_are_packed() -> None:
    a, b = torch.randn(2, 4, 8), torch.randn(2, 8, 6)
    fold = Fold.of(a, b, None, torch.Size((2, 4, 6)))
    assert fold is not None
    for scale, packed in (
        (torch.rand(4, 1), fold.flattened("a_scale")),
        (torch.rand(1, 6), fold.flattened("b_scale")),
    ):
        found = packed(scale)
        assert found.shape == (2, *scale.shape)
        assert found.is_contiguous()
        assert torch.equal(found[1], scale)
        assert packed(torch.tensor(2.0)).shape == ()


# -- plans --------------------------------------------------------------------------------


@pytest.mark.usefixtures("blas_alone")
def test_a_full_table_of_plans_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a server with ever new sizes stays limited."""
    monkeypatch.setattr(warm, "MAX_PLANS", 4)
    for m in range(1, 12):
        a = torch.randn(m, 8)
        torch.testing.assert_close(tmm_core.matmul(a, B), a @ B)
        assert 1 <= len(warm._plans) <= 4


@pytest.mark.usefixtures("blas_alone")
def test_the_out_of_a_plan_has_room_for_the_whole_batch() -> None:
    a, b = torch.randn(3, 4, 8), torch.randn(3, 8, 6)
    plan, out = tmm_core.plan(a, b), torch.empty(3, 4, 6)
    assert plan(a, b, out=out) is out
    torch.testing.assert_close(out, a @ b)
    # Torch would resize an ``out`` that has as many elements.
    shapes = (4, 6), (3, 4, 7), (12, 6), (3, 6, 4), (72,), (1, 3, 4, 6)
    for wrong in map(torch.empty, shapes):
        with pytest.raises(ValueError, match="takes out of shape"):
            plan(a, b, out=wrong)
    for x, y in ((a[0, 0], b[0]), (a, b[0]), (a[0], b[0, :, 0]), (a[0, 0], b[0, :, 0])):
        out = torch.empty((x @ y).shape)
        torch.testing.assert_close(tmm_core.plan(x, y)(x, y, out=out), x @ y)
    gated = tmm_core.plan(a, b, epilogue="swiglu")
    assert gated(a, b, out=torch.empty(3, 4, 3)).shape == (3, 4, 3)


@pytest.mark.usefixtures("blas_alone")
@pytest.mark.slow
def test_a_source_is_freed_with_its_function() -> None:
    """Tracebacks need the source of a generated function only while the function exists."""

    def kept() -> int:
        return sum(name.startswith("<tmm ") for name in linecache.cache)

    gc.collect()
    before = kept()
    plans = [tmm_core.plan(torch.randn(m, 8), B) for m in range(1, 6)]
    assert kept() >= before + len(plans)
    linecache.checkcache()  # traceback calls this; it keeps entries without a file
    assert kept() >= before + len(plans)
    assert inspect.getsource(plans[0].__call__).startswith("def call(a, b, ")
    plans.clear()
    warm.forget_plans()
    gc.collect()
    assert kept() <= before


# -- who has to see a call ----------------------------------------------------------------


class Functions(TorchFunctionMode):
    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return f(*args, **(kwargs or {}))


class Mine(Tensor):
    pass


def test_a_call_that_torch_has_to_see_is_not_launched_past_it() -> None:
    """Only torch's own kernels see modes, transforms and pending conjugates."""
    contexts: dict[str, Any] = {
        "autocast": lambda: torch.autocast("cpu", dtype=BF16),
        "a function mode": Functions,
        "a dispatch mode": Dispatches,
        "forward mode": torch.autograd.forward_ad.dual_level,
        "a profiler": torch.profiler.profile,
    }
    plain, bias = (A, B), torch.randn(6)
    assert warm.fast_path_allowed(*plain, bias)
    for name, context in contexts.items():
        with context():
            assert not warm.fast_path_allowed(*plain), name
        assert warm.fast_path_allowed(*plain), name
    seen = []
    torch.vmap(lambda x: seen.append(warm.fast_path_allowed(x, B)) or x)(torch.randn(2, 4, 8))
    torch.func.grad(lambda x: seen.append(warm.fast_path_allowed(x, B)) or x.sum())(A)
    assert seen == [False, False]
    a, b, z = (t.to(torch.complex64) for t in (A, B, bias))
    assert warm.fast_path_allowed(a, b, z)
    negative = torch.imag(torch.randn(4, 8, dtype=torch.complex64).conj())
    for given in (
        (a.conj(), b), (a, b.conj()), (a, b, z.conj()), (negative, B), (A, negative.T),
        (A.as_subclass(Mine), B), (A, B.as_subclass(Mine)), (A, B, bias.as_subclass(Mine)),
        (A, B, torch.imag(z.conj())),
    ):  # fmt: skip
        assert not warm.fast_path_allowed(*given)
    assert warm.fast_path_allowed(torch.nn.Parameter(A), torch.nn.Parameter(B))


# -- kernels that fail --------------------------------------------------------------------


class Failing(FakeBlas):
    def __init__(self, error: BaseException) -> None:
        self.launched = 0

        def spoil(out: Tensor) -> Tensor:
            self.launched += 1
            raise error

        super().__init__(spoil=spoil)


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMM_ON_CACHE_MISS", "heuristic")


@pytest.mark.usefixtures("untuned")
def test_the_error_of_the_baseline_is_the_callers_to_see() -> None:
    """The baseline is not set aside, since no other kernel could answer."""
    blas = Failing(RuntimeError("boom"))
    installed(blas)
    for count in (1, 2):
        with pytest.raises(RuntimeError, match="boom"):
            tmm_core.matmul(A, B)
        assert blas.launched == count


@pytest.mark.usefixtures("untuned")
def test_a_kernel_that_would_end_the_process_raises_an_error_instead() -> None:
    def leave(out: Tensor) -> Tensor:
        raise SystemExit(3)

    installed(FakeBlas(), FakeKernel("leaving", spoil=leave))
    with pytest.raises(PluginError, match="leaving raised SystemExit"):
        tmm_core.matmul(A, B, kernel="leaving")


@pytest.mark.parametrize(
    ("error", "kernel", "origin", "launching", "known", "kept", "seen"),
    [
        # The kernel's launch called itself without end: from now on BLAS answers such calls.
        (RecursionError(), "k", "heuristic", "k", False, True, "nests"),
        (RecursionError(), "k", "forced", "k", False, True, "nests"),
        # The plan is older than this finding, so it is made again.
        (RecursionError(), "k", "heuristic", None, True, False, "again"),
        (RecursionError(), "k", "forced", None, True, False, "again"),
        (RecursionError(), "k", "heuristic", None, True, True, "quarantined"),
        (RecursionError(), "k", "heuristic", None, False, False, "quarantined"),
        (RecursionError(), "k", "heuristic", "other", False, True, "quarantined"),
        (ValueError(), "k", "heuristic", "k", True, False, "quarantined"),
        (SystemExit(1), "k", "tuned", None, False, True, "quarantined"),
        # No other kernel could answer, or it would lack memory, too.
        (RecursionError(), "blas", "fallback", None, True, False, "raised"),
        (ValueError(), "blas", "cache", None, False, True, "raised"),
        (ValueError(), "k", "forced", None, False, True, "raised"),
        (torch.OutOfMemoryError(), "k", "cache", None, False, True, "raised"),
        (SystemExit(1), "k", "forced", None, False, True, "refused"),
        (SystemExit(1), "blas", "cache", None, False, True, "refused"),
    ],
)
def test_the_consequences_of_a_launch_that_raises(
    error: BaseException, kernel: str, origin: str, launching: str | None, known: bool, kept: bool,
    seen: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plan = SimpleNamespace(kernel=kernel, problem="problem", choice=SimpleNamespace(origin=origin))
    table: dict[Any, Any] = {"x": plan} if kept else {"x": SimpleNamespace(kernel="other")}
    put_aside: list[Any] = []
    skips: list[int] = []

    def found(skipped: int = 0) -> str | None:
        skips.append(skipped)
        return launching

    chooser = SimpleNamespace(quarantine=lambda *given: put_aside.append(given))
    monkeypatch.setattr(warm, "reraise", lambda error: None)
    monkeypatch.setattr(warm, "answerer", lambda: chooser)
    monkeypatch.setattr(warm, "launching", found)
    monkeypatch.setattr(warm, "NESTING", {kernel} if known else set())
    monkeypatch.setattr(warm, "TABLES", [{}, table])
    if seen == "refused":
        with pytest.raises(PluginError, match=f"^kernel {kernel} raised SystemExit"):
            warm.quarantine(plan, error)
    else:
        assert warm.quarantine(plan, error) is (seen in ("again", "quarantined"))
    assert put_aside == [("problem", plan.choice, error)] * (seen == "quarantined")
    assert (kernel in warm.NESTING) is (known or seen == "nests")
    assert bool(table) is (seen != "nests")
    assert set(skips) <= {1}  # the launch that raised is the innermost


# -- groups -------------------------------------------------------------------------------


def ends(*of: int) -> Tensor:
    return torch.tensor(of, dtype=torch.int32)


def by_groups(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    parts = itertools.pairwise([0, *offs.tolist()])
    return torch.cat([a[start:end] @ b[group] for group, (start, end) in enumerate(parts)])


@pytest.fixture
def by_blas() -> Any:
    with tmm_core.override(disable="triton.ragged"):
        yield


@pytest.mark.usefixtures("by_blas")
def test_as_many_groups_as_columns_share_a_bias_by_column() -> None:
    """A bias of N elements is per column, even if there are N groups."""
    a, b, bias = torch.randn(9, 8), torch.randn(3, 8, 3), torch.randn(3)
    offs = ends(2, 5, 9)
    y = tmm_core.grouped_matmul(a, b, offs=offs, bias=bias)
    torch.testing.assert_close(y, by_groups(a, b, offs) + bias)


@pytest.mark.usefixtures("by_blas")
def test_an_empty_matrix_is_gathered_into_an_empty_result() -> None:
    a, b, index = torch.empty(0, 8), torch.randn(2, 8, 4), torch.empty(0, dtype=torch.int32)
    assert tmm_core.grouped_matmul(a, b, offs=ends(0, 0), a_index=index).shape == (0, 4)
    with pytest.raises(ValueError, match="gathers rows of an a that has none"):
        tmm_core.grouped_matmul(a, b, offs=ends(1, 1), a_index=torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("along", ["m", "n", "k"])
@pytest.mark.parametrize("given_out", [False, True])
def test_the_problem_of_groups_has_all_that_its_call_has(along: Any, given_out: bool) -> None:
    rows, columns, terms, offs = 6, 4, 8, ends(2, 5)
    a = torch.randn(rows, terms) if along != "n" else torch.randn(2, rows, terms)
    b = torch.randn(terms, columns) if along != "m" else torch.randn(2, terms, columns)
    shape = (2, rows, columns) if along == "k" else (rows, columns)
    current = tmm_core.settings.current()
    bare, _ = grouped_call.describe(GroupedArguments(a, b, offs), IDENTITY, current)
    assert (bare.m, bare.n, bare.k, bare.along, bare.out_shape) == (6, 4, 8, along, shape)
    assert (bare.bias, bare.residual, bare.scaled, bare.groups) == (
        None, None, False, tmm_core.Groups(2, along),
    )  # fmt: skip
    more: dict[str, Any] = {"residual": torch.randn(shape).bfloat16()} if along != "n" else {}
    more |= {"bias": torch.randn(4)} if along != "n" else {}
    if along == "m":
        more["a_index"], more["out_index"] = torch.arange(6), torch.arange(6, dtype=torch.int32)
        more["out_weights"] = torch.randn(6)
    if given_out:
        more["out"] = torch.empty(shape, dtype=BF16)
    call = GroupedArguments(
        a.bfloat16(), b.bfloat16(), offs, **more, alpha=2.0, zeroed=True, out_dtype=BF16
    )
    full, _ = grouped_call.describe(call, parse("relu"), current)
    assert full.groups == tmm_core.Groups(
        2, along, zeroed=along != "k",
        **({"a_index": torch.int64, "out_index": torch.int32, "out_weights": FP32}
           if along == "m" else {}),
    )  # fmt: skip
    assert (full.a.dtype, full.b.dtype, full.out.dtype) == (BF16, BF16, BF16)
    assert (full.scaled, full.epilogue.name) == (True, "relu")
    if along != "n":
        assert full.bias is FP32
        assert full.residual is not None
        assert full.residual.dtype is BF16


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.complex64])
def test_groups_are_of_floating_numbers(dtype: torch.dtype) -> None:
    """Without ``offs`` the call is a batched product, which takes these dtypes."""
    a, b = torch.ones(5, 8).to(dtype), torch.ones(2, 8, 4).to(dtype)
    words = rf"^grouped_matmul\(\): {dtype} operands are not multiplied$"
    with pytest.raises(RuntimeError, match=words):
        grouped_call.check(GroupedArguments(a, b, ends(2, 5)), IDENTITY)
    batch = a.expand(2, 5, 8)
    offs: Any = None
    assert grouped_call.check(GroupedArguments(batch, b, offs), IDENTITY) == (2, 5, 4)


def test_indices_and_weights_of_rows_have_one_dimension() -> None:
    a, b, offs = torch.randn(5, 8), torch.randn(2, 8, 4), ends(2, 5)
    for name, t in (
        ("a_index", torch.zeros(5, 1, dtype=torch.int32)), ("out_index", torch.zeros(5, 5).int()),
        ("out_weights", torch.rand(5, 1)), ("a_index", torch.tensor(3)),
    ):  # fmt: skip
        given: Any = {name: t}
        with pytest.raises(ValueError, match=f"^{name} must have one dimension, got"):
            grouped_call.check(GroupedArguments(a, b, offs, **given), IDENTITY)


@pytest.mark.usefixtures("by_blas")
def test_every_row_has_one_place_and_one_weight() -> None:
    a, b, offs = torch.randn(5, 8), torch.randn(2, 8, 4), ends(2, 5)
    for name, t in (("out_index", torch.arange(6)), ("out_weights", torch.rand(6))):
        with pytest.raises(ValueError, match=rf"{name} must have shape \(5,\)"):
            tmm_core.grouped_matmul(a, b, offs=offs, **{name: t})


def test_a_ragged_sum_leaves_nothing_to_be_zeroed() -> None:
    """The result has one product per group, and no rows beyond the last group."""
    a, b, offs = torch.randn(8, 6), torch.randn(6, 4), ends(2, 5)
    call = GroupedArguments(a, b, offs, zeroed=True)
    problem, _ = grouped_call.describe(call, IDENTITY, tmm_core.settings.current())
    assert problem.groups is not None
    assert (problem.along, problem.groups.zeroed) == ("k", False)


@pytest.mark.parametrize(
    ("a", "b", "batch", "sizes"),
    [((2, 3, 8), (8, 6), 1, (6, 6)), ((2, 3, 8), (2, 8, 6), 2, (3, 6)), ((8,), (8, 6), 1, (1, 6)),
     ((3, 8), (8,), 1, (3, 1)), ((3, 8), (8, 6), 1, (3, 6))],
)  # fmt: skip
def test_a_result_to_write_does_not_change_the_sizes_of_a_problem(
    a: Any, b: Any, batch: int, sizes: Any
) -> None:
    call = Arguments(torch.randn(a), torch.randn(b))
    found, _ = warm.describe(call, IDENTITY, tmm_core.settings.current())
    assert (found.batch, found.m, found.n, found.k) == (batch, *sizes, 8)
    out = torch.empty(call.a.shape[:-1] + call.b.shape[1:][-1:])
    assert warm.describe(call._replace(out=out), IDENTITY, tmm_core.settings.current())[0] == found


def test_the_innermost_launches_are_skipped_and_blas_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def entry(kernel: str, inside: Any) -> Any:
        plan = SimpleNamespace(kernel=kernel)
        return plan and inside()

    def found() -> list[str | None]:
        return [nesting.launching(skipped) for skipped in range(4)]

    monkeypatch.setattr(nesting, "ENTRIES", {})
    nesting.add_entry(entry)
    assert found() == [None] * 4
    nested = entry("outer", lambda: entry("blas", lambda: entry("inner", found)))
    assert nested == ["inner", "outer", "outer", None]


def test_stored_values_are_counted_in_one_matrix_of_a_stack() -> None:
    form: Any = SimpleNamespace(pack=2)
    for name, shape, found in (
        ("a", (2, 3, 8, 6), (8, 12, 6)), ("b", (3, 8, 6), (6, 16, 3)), ("b", (8, 6), (6, 16, 1)),
        ("a", (6,), (1, 12, 1)),
    ):  # fmt: skip
        assert check._extents(name, torch.empty(shape), form) == found


@pytest.mark.parametrize(
    ("packs", "blocks", "along", "fault"),
    [
        ((1, 1), (None, None), "k", ""), ((1, 2), (None, None), "k", "would split packed values"),
        ((1, 1), (None, (1, 32)), "k", "would split packed values, or values of one scale"),
        ((1, 2), (None, (1, 32)), "m", ""), ((1, 1), ((128, 128), None), "n", ""),
        ((1, 1), ((128, 128), None), "m", "along M would split blocks of scales of a"),
        ((1, 1), ((1, 128), (128, 128)), "n", "along N would split blocks of scales of b"),
        ((1, 1), ((128, 128), (128, 128)), None, ""),
    ],
)  # fmt: skip
def test_groups_do_not_split_what_shares_a_scale(
    packs: Any, blocks: Any, along: Any, fault: str
) -> None:
    pair: Any = SimpleNamespace(packs=packs, blocks=blocks)
    if not fault:
        grouped_call._refuse_split_blocks(pair, along)
        return
    with pytest.raises(ValueError, match=fault):
        grouped_call._refuse_split_blocks(pair, along)


def test_a_sparse_meta_tensor_is_refused_before_the_operator_is_called() -> None:
    """The operator would call back."""
    sparse = torch.empty((4, 8), layout=torch.sparse_coo, device="meta")
    dense = torch.empty((8, 6), device="meta")
    for given in ((sparse, dense), (dense.T.contiguous()[:, :8], dense, None, sparse)):
        with pytest.raises(RuntimeError, match="kernels take dense tensors, got one of layout"):
            warm._on_meta(Arguments(*given))
    assert warm._on_meta(Arguments(dense.T, dense)).shape == (6, 6)


@pytest.mark.parametrize(
    ("k", "block", "fault"),
    [
        (64, "1x32", ""), (48, "1x32", "groups of 32 do not divide K = 48"),
        (48, "1x16", "int8 has scales by tensor or row or 1x32 or 1x64 or 1x128, not 1x16"),
    ],
)  # fmt: skip
def test_a_grid_of_scales_is_of_whole_blocks_that_the_format_has(
    k: int, block: str, fault: str
) -> None:
    """The shape alone may be right."""
    a, b = torch.randn(4, k).bfloat16(), torch.ones(k, 6, dtype=torch.int8)
    scale = torch.ones(-(-k // int(block[2:])), 6)
    call = Arguments(a, b, scale_b=scale, formats=f",int8/{block}")
    if not fault:
        assert check.check(call, IDENTITY) == (4, 6)
        return
    with pytest.raises(ValueError, match=fault):
        check.check(call, IDENTITY)
