"""Auxiliary outputs of epilogues: what calls return, in every mode. A kernel that gets one wrong is
not used."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import FakeKernel, Tuner, problem, settings

import tmm_core
from tmm_core import Epilogue, Launcher, Port, Problem, Supports, UnsupportedProblemError
from tmm_core.epilogues import BUILTIN, parse
from tmm_core.launch import warm
from tmm_core.spec.launcher import BASELINE
from tmm_core.verify.verifier import Verifier

Tensor = torch.Tensor
CPU = torch.device("cpu")


def same(y: Tensor) -> Tensor:
    return y


def square(y: Tensor) -> Tensor:
    return y * y


AMAX = Port("amax", "row", reduce="max", of=torch.abs)
SQUARES = Port("squares", "col", reduce="sum", of=square)
TOTAL = Port("total", "scalar", reduce="sum")
COPY = Port("copy", "tile", torch.bfloat16)
ALL = (AMAX, SQUARES, TOTAL, COPY)
AUXILIARY = Epilogue("auxiliary", same, linear=True, outputs=ALL)
SILU = parse("silu").then(AUXILIARY)


def right(y: Tensor) -> tuple[Tensor, ...]:
    rows = y.flatten(0, -2)
    return y.abs().amax(-1), rows.square().sum(0), y.sum(), y.bfloat16()


def hold(found: tuple[Tensor, ...], y: Tensor) -> None:
    assert isinstance(found, tuple)
    torch.testing.assert_close(found, (y, *right(y)), rtol=1e-5, atol=1e-5)


@pytest.fixture
def operands() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(3, 5, 8),
        "b": torch.randn(8, 6),
        "bias": torch.randn(6),
        "residual": torch.randn(5, 6),
    }


def expression(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.silu(0.5 * (a @ b) + bias) + residual


def matmul(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> Any:
    return tmm_core.matmul(a, b, bias=bias, residual=residual, alpha=0.5, epilogue=SILU)


def test_a_call_returns_a_tuple(operands: dict[str, Tensor]) -> None:
    y = expression(**operands)
    hold(matmul(**operands), y)
    a, b, bias, residual = operands.values()
    for alpha in (torch.tensor(0.5), torch.tensor(0.5, requires_grad=True)):
        found = tmm_core.matmul(a, b, bias=bias, residual=residual, alpha=alpha, epilogue=SILU)
        hold(tuple(t.detach() for t in found), y)
    hold(tmm_core.linear(a, b.t().contiguous(), epilogue=AUXILIARY), a @ b)
    hold(tmm_core.plan(a, b, epilogue=AUXILIARY)(a, b), a @ b)
    out = torch.empty(15, 6)
    found = tmm_core.plan(a.flatten(0, 1), b, epilogue=[AUXILIARY])(a.flatten(0, 1), b, out=out)
    assert found[0] is out
    hold(found, a.flatten(0, 1) @ b)
    with torch.autocast("cpu"):
        result, *outputs = tmm_core.matmul(a, b, epilogue=AUXILIARY)
    assert [t.dtype for t in (result, *outputs)] == [torch.bfloat16, *(p.dtype for p in ALL)]


def test_a_gated_epilogue_has_outputs(operands: dict[str, Tensor]) -> None:
    a, b = operands["a"], operands["b"]
    gate, up = (a @ b).chunk(2, -1)
    hold(tmm_core.matmul(a, b, epilogue=parse("swiglu").then(AUXILIARY)), F.silu(gate) * up)


@pytest.mark.parametrize("shape", [(0, 8, 6), (4, 8, 0), (4, 0, 6)])
def test_empty_products_are_reduced(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    _, amax, squares, total, copy = tmm_core.matmul(
        torch.ones(m, k), torch.ones(k, n), epilogue=AUXILIARY
    )
    assert amax.tolist() == [0.0 if n else float("-inf")] * m
    assert (squares.tolist(), total.item(), copy.shape) == ([0.0] * n, 0.0, (m, n))


@pytest.mark.slow
def test_it_compiles_and_is_an_operator(operands: dict[str, Tensor]) -> None:
    a, b, bias, residual = operands.values()
    compiled = torch.compile(matmul, fullgraph=True, backend="aot_eager", dynamic=True)
    hold(compiled(**operands), expression(**operands))
    leaf = a.clone().requires_grad_()
    result, *outputs = compiled(leaf, b, bias, residual)
    assert not any(t.requires_grad for t in outputs)
    (found,) = torch.autograd.grad(result.sum(), leaf)
    (exact,) = torch.autograd.grad(expression(leaf, b, bias, residual).sum(), leaf)
    torch.testing.assert_close(found, exact)
    call = (a, b, bias, residual, 0.5, SILU.interned())
    torch.library.opcheck(torch.ops.tmm.matmul_outputs.default, call)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        matmul(**operands)
    assert counter.get_total_flops() == 2 * 15 * 8 * 6


@pytest.mark.parametrize("rest", [None, "silu"])
def test_gradients_where_the_first_stage_has_the_outputs(
    rest: str | None, operands: dict[str, Tensor]
) -> None:
    """The product of a differentiated call computes this stage."""
    first = replace(parse("relu"), name="noted", outputs=(AMAX,))
    epilogue: Any = first if rest is None else [first, rest]
    a, b = (operands[name].clone().requires_grad_() for name in "ab")
    y = F.relu(a @ b)
    y = y if rest is None else F.silu(y)
    for found in (
        tmm_core.matmul(a, b, epilogue=epilogue),
        tmm_core.linear(a, b.t(), epilogue=epilogue),
        tmm_core.matmul(a, b, epilogue=epilogue),
    ):
        assert isinstance(found, tuple)
        torch.testing.assert_close(found[0], y)
        torch.testing.assert_close(found[1], y.abs().amax(-1))
        got = torch.autograd.grad(found[0].sum(), (a, b))
        torch.testing.assert_close(got, torch.autograd.grad(y.sum(), (a, b), retain_graph=True))


def test_gradients_are_the_results_alone(operands: dict[str, Tensor]) -> None:
    leaves = {name: t.clone().requires_grad_() for name, t in operands.items()}
    exact = torch.autograd.grad(expression(**leaves).sum(), list(leaves.values()))
    for call in (matmul, lambda **given: _as_operator(**given)):
        result, *outputs = call(**leaves)
        assert not any(t.requires_grad for t in outputs)
        hold((result.detach(), *outputs), expression(**operands))
        found = torch.autograd.grad(result.sum(), list(leaves.values()))
        torch.testing.assert_close(found, exact)
    a, *rest = operands.values()
    result, *outputs = torch.vmap(lambda a: matmul(a, *rest))(a)
    torch.testing.assert_close(result, expression(**operands))
    torch.testing.assert_close(outputs[0], result.abs().amax(-1))
    torch.testing.assert_close(outputs[2], result.sum((1, 2)))


def _as_operator(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> list[Tensor]:
    return torch.ops.tmm.matmul_outputs(a, b, bias, residual, 0.5, SILU.interned())  # type: ignore[no-any-return]


def test_calls_that_cannot_have_outputs_are_refused(operands: dict[str, Tensor]) -> None:
    a, b = operands["a"], operands["b"]
    for pair in ((a[0, 0], b), (a, b[:, 0]), (a, b.expand(3, 8, 6))):
        with pytest.raises(ValueError, match=r"outputs \(amax, squares, total, copy\) need a of"):
            tmm_core.matmul(*pair, epilogue=AUXILIARY)
    with pytest.raises(ValueError, match="out= cannot be given where the epilogue has outputs"):
        tmm_core.matmul(a, b, out=torch.empty(3, 5, 6), epilogue=AUXILIARY)
    with pytest.raises(RuntimeError, match="kernels take dense tensors"):
        tmm_core.matmul(a[0].to_sparse(), b, epilogue=AUXILIARY)
    for rows in (a[0], a[0].clone().requires_grad_()):
        with pytest.raises(ValueError, match=r"outputs .* are of one product, not of groups"):
            tmm_core.grouped_matmul(rows, b[None], offs=torch.tensor([5]).int(), epilogue=SILU)
    instance = problem(epilogue=AUXILIARY)
    batch = Supports.everything().reasons_against(replace(instance, batch=2))
    assert batch == ["outputs are of one product, not of a batch or of groups"]
    able = Supports.everything()
    for change, message in (
        ({"outputs": ("col", "tile", "scalar")}, "writes no output amax (row max)"),
        ({"reduces": ("sum",)}, "reduces no output amax (row max)"),
        ({"unfused": False}, "output 'amax' has no device function"),
    ):
        assert message in replace(able, **change).reasons_against(instance)
    with pytest.raises(UnsupportedProblemError, match="writes no output amax"):
        tmm_core.matmul(a, b, epilogue=AUXILIARY, kernel="triton.split_k")


def test_a_port_is_checked() -> None:
    for wrong, message in (
        ({"kind": "rows"}, "kind is one of scalar, row, col, tile, group, not 'rows'"),
        ({"kind": "tile"}, "a tile is not reduced, got reduce='max'"),
        ({"reduce": None}, "a row is reduced by max or sum, got reduce=None"),
        ({"dtype": torch.int8}, "dtype is one of"),
        ({"of": None, "device": "somewhere:abs"}, "no reference"),
        ({"name": "a max"}, "must be an identifier"),
        ({"group": 16}, "a row has no groups of 16"),
        ({"kind": "group", "reduce": None}, "a group has no groups of 0"),
        ({"kind": "group", "group": 48, "reduce": None}, "a group has no groups of 48"),
        ({"kind": "group", "group": 16}, "a group is not reduced, got reduce='max'"),
        ({"kind": "group", "group": 16, "reduce": None, "of": None}, "groups and no reference"),
        ({"kind": "tile", "reduce": None, "dtype": torch.float8_e4m3fn}, "dtype is one of"),
    ):
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            replace(AMAX, **wrong)
    with pytest.raises(ValueError, match="two outputs of one name"):
        AUXILIARY.then(AUXILIARY)


def test_the_key_follows_outputs_and_only_those() -> None:
    other = replace(AMAX, of=square)
    keys = [
        replace(AUXILIARY, outputs=ports).key
        for ports in ((), (AMAX,), (other,), (replace(AMAX, dtype=torch.float16),), (TOTAL, AMAX))
    ]
    assert len(set(keys)) == len(keys)
    silu = replace(BUILTIN["silu"], outputs=(AMAX,))
    assert silu.key != "silu"
    assert silu.bare.key == "silu"
    assert SILU.bare.outputs == ()
    assert replace(AUXILIARY, outputs=()).key == Epilogue("auxiliary", same, linear=True).key
    assert problem(epilogue=SILU).to_json()["epilogue"] == SILU.key


class Spoilt(FakeKernel):
    """Gives the right result, and outputs changed by ``spoil_outputs``."""

    def __init__(self, spoil: Callable[[tuple[Tensor, ...], Tensor], Any]) -> None:
        super().__init__("fake.spoilt")
        self._spoil = spoil

    def bind(self, problem: Problem, config: Any) -> Launcher:
        blas = tmm_core.dispatch.default_dispatcher().registry.kernel(BASELINE)
        launch: Any = blas.bind(problem, blas.default_config(problem))

        def run(*given: Any, outputs: tuple[Tensor, ...]) -> Tensor:
            y = launch(*given, outputs=outputs)
            self._spoil(outputs, y)
            return y

        return run


def _shifted(outputs: tuple[Tensor, ...], y: Tensor) -> None:
    outputs[0][-1] += 0.01


def _scaled(outputs: tuple[Tensor, ...], y: Tensor) -> None:
    outputs[2].mul_(1.01)


def _unwritten(outputs: tuple[Tensor, ...], y: Tensor) -> None:
    outputs[3][-1, -1] = float("nan")


def _beyond(outputs: tuple[Tensor, ...], y: Tensor) -> None:
    n = outputs[1].numel()
    outputs[1].as_strided((n + 1,), (1,), outputs[1].storage_offset())[n] = 0.0


def _numbers(outputs: tuple[Tensor, ...], y: Tensor) -> None:
    outputs[0].copy_(outputs[0].nan_to_num(nan=0.0))  # as a maximum that passes NaN over


_launches = iter(range(1000))


def _random(outputs: tuple[Tensor, ...], y: Tensor) -> None:
    outputs[2].mul_(1 + 1e-6 * (next(_launches) % 8))


@pytest.mark.parametrize(
    ("spoil", "message", "sampled"),
    [
        (_shifted, r"output amax \(row max\) has error", False),
        (_shifted, r"output amax \(row max\) has error", True),
        (_scaled, "output total", False),
        (_scaled, "output total", True),
        (_unwritten, "output copy .* nan", True),
        (_beyond, "it wrote beyond its output squares", False),
        (_numbers, "output amax .* is not NaN or Inf", False),
        (_random, "output total .* other bits", False),
    ],
)
@pytest.mark.slow(quick=6)
def test_wrong_outputs_are_detected(spoil: Any, message: str, sampled: bool) -> None:
    instance = problem(m=100, n=72, k=24, epilogue=AUXILIARY)
    for kernel, reason in ((Spoilt(lambda outputs, y: None), None), (Spoilt(spoil), message)):
        verifier = Verifier(instance, CPU, sampled=sampled)
        verdict = verifier.verdict(
            kernel.bind(instance, kernel.default_config(instance)), repeats=2
        )
        if reason is None:
            assert verdict.ok, verdict.reason
        else:
            assert re.search(reason, str(verdict.reason)), verdict.reason


@pytest.mark.parametrize("deterministic", [False, True])
def test_outputs_of_a_kernel_with_atomic_sums_may_have_other_bits(deterministic: bool) -> None:
    """Its traits say so; a deterministic kernel's may not."""
    instance, kernel = problem(m=40, n=72, k=24, epilogue=AUXILIARY), Spoilt(_random)
    launcher = kernel.bind(instance, kernel.default_config(instance))
    verdict = Verifier(instance, CPU).verdict(launcher, repeats=2, deterministic=deterministic)
    assert verdict.ok is not deterministic, verdict.reason


class Elsewhere(Spoilt):
    """Outputs are wrong in launches for which ``wrong`` returns True, given a, b, alpha and the
    outputs."""

    def __init__(self, wrong: Callable[..., bool]) -> None:
        super().__init__(lambda outputs, y: [t.add_(1) for t in outputs if self._is_wrong])
        self._wrong, self._is_wrong = wrong, False

    def bind(self, problem: Problem, config: Any) -> Launcher:
        launch: Any = super().bind(problem, config)

        def run(a: Tensor, b: Tensor, *given: Any, outputs: tuple[Tensor, ...]) -> Tensor:
            self._is_wrong = self._wrong(a, b, given[2], outputs)
            return launch(a, b, *given, outputs=outputs)

        return run


class TogetherWrong(Spoilt):
    """Launches of two threads write to the outputs of one."""

    def __init__(self) -> None:
        super().__init__(lambda outputs, y: None)
        self.outputs: tuple[Tensor, ...] = ()

    def bind(self, problem: Problem, config: Any) -> Launcher:
        launch: Any = super().bind(problem, config)

        def run(*given: Any, outputs: tuple[Tensor, ...]) -> Tensor:
            self.outputs = outputs
            for _ in range(5):
                given[0].sum()
            return launch(*given, outputs=self.outputs)

        return run


@pytest.mark.parametrize(
    "kernel",
    [
        Elsewhere(lambda a, b, alpha, outputs: alpha > 1.7),
        Elsewhere(lambda a, b, alpha, outputs: a.stride(0) > 32),
        Elsewhere(lambda a, b, alpha, outputs: a.data_ptr() == b.data_ptr()),
        Elsewhere(lambda a, b, alpha, outputs: b.requires_grad),
        Elsewhere(lambda a, b, alpha, outputs: bool(outputs[0].isfinite().all())),
        TogetherWrong(),
    ],
    ids=["alpha", "rows apart", "one tensor", "a parameter", "reads outputs", "two threads"],
)
def test_outputs_that_are_wrong_in_some_ways_of_use_are_detected(kernel: Spoilt) -> None:
    instance = problem(m=16, n=16, k=16, epilogue=AUXILIARY, scaled=True)
    verdict = Verifier(instance, CPU).verdict(
        kernel.bind(instance, kernel.default_config(instance))
    )
    assert re.search("output .* has error", str(verdict.reason)), verdict.reason


def test_tuning_times_candidates_with_outputs() -> None:
    good, bad = Spoilt(lambda outputs, y: None), Spoilt(_shifted)
    bad.name = "fake.bad"  # type: ignore[misc]
    blas = tmm_core.dispatch.default_dispatcher().registry.kernel(BASELINE)
    instance = problem(m=40, epilogue=AUXILIARY)
    record = Tuner().tune(
        instance, [blas, good, bad], settings()
    )  # by the clock: they are launched
    found = {c.kernel: (c.status, c.reason) for c in record.candidates}
    assert found["fake.bad"][0] == "wrong", found
    assert found[BASELINE][0] == "ok", found
    assert found["fake.spoilt"][0] in ("ok", "slow"), found


def test_calls_without_outputs_pay_nothing() -> None:
    """The plan of a call without outputs holds the launcher itself."""
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    launcher = tmm_core.plan(a, b).launcher
    assert launcher.__module__.startswith("tmm_blas")
    assert warm.allocating_outputs(parse("silu"), launcher, (4, 6)) is launcher
