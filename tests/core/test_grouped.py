"""Grouped products: torch's conventions, derivatives, and who answers."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import FakeConfig, FakeTimer, dispatcher, plugin, settings
from tmm_blas import grouped_mm
from tmm_blas.blas import Blas
from tmm_cache import CacheStore
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import tmm_core
from tmm_core import Groups, Kernel, Operand, Problem, Supports, UnsupportedProblemError
from tmm_core.bench import grouped_baselines as bench
from tmm_core.bench import runner, suites
from tmm_core.bench.case import Case
from tmm_core.dispatch.dispatcher import ROWS_EACH, Dispatcher
from tmm_core.epilogues import parse
from tmm_core.epilogues.clamped_swiglu import CLAMPED
from tmm_core.interop import grouped_operator
from tmm_core.launch import warm
from tmm_core.nn import Experts
from tmm_core.registry.registry import Registry
from tmm_core.spec.bucket import bucketed
from tmm_core.spec.device import DeviceFingerprint
from tmm_core.tuning import cold_operands
from tmm_core.tuning.tuner import Tuner
from tmm_core.verify import ragged_inputs, random_inputs
from tmm_core.verify.data_sets import DataSets
from tmm_core.verify.verifier import Verifier

Tensor = torch.Tensor
BF16, FP32 = torch.bfloat16, torch.float32

# torch's own: where it first differentiates forwards, and where it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
]


@pytest.fixture(autouse=True)
def by_blas(request: pytest.FixtureRequest) -> Any:
    """BLAS instead of Triton's interpreter, which has separate tests."""
    with tmm_core.override(disable="triton.ragged"):
        yield


def ends(*of: int) -> Tensor:
    return torch.tensor(of, dtype=torch.int32)


OFFS = ends(3, 3, 10)


def randn(*shape: int, **kw: Any) -> Tensor:
    return torch.randn(shape, **kw)


#: Operands of torch's four forms. The last two of 12 rows belong to no group. Rows start at
#: multiples of 16 bytes, as torch requires.
FORMS = {
    "m": lambda **kw: (randn(12, 16, **kw), randn(3, 16, 8, **kw), OFFS),
    "k": lambda **kw: (randn(16, 16, **kw)[:, :12], randn(12, 8, **kw), OFFS),
    "n": lambda **kw: (randn(3, 8, 16, **kw), randn(16, 16, **kw)[:, :12], OFFS),
    "batch": lambda **kw: (randn(3, 4, 16, **kw), randn(3, 16, 8, **kw), None),
}


def known(t: Tensor, form: str) -> Tensor:
    """The part of a tensor that belongs to groups."""
    return {"m": t[..., :10, :], "n": t[..., :10]}.get(form, t)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, BF16, FP32, torch.float64])
def test_torchs_results(form: str, dtype: torch.dtype) -> None:
    a, b, offs = FORMS[form](dtype=dtype)
    y = tmm_core.grouped_matmul(a, b, offs=offs)
    if dtype is torch.float64:  # torch has none
        expected = F.grouped_mm(*(t.float().contiguous() for t in (a, b)), offs=offs).double()
    else:
        expected = F.grouped_mm(a, b, offs=offs)
    torch.testing.assert_close(known(y, form), known(expected, form), rtol=1e-2, atol=1e-2)
    assert y.dtype is dtype
    assert y.is_contiguous() if dtype is torch.float64 else y.stride() == expected.stride()


#: Operands of products with seven columns. The operands have the strides that torch requires.
ODD = {
    "m": lambda **kw: (randn(12, 16, **kw), randn(3, 7, 16, **kw).mT),
    "k": lambda **kw: (randn(16, 16, **kw)[:, :12], randn(12, 8, **kw)[:, :7]),
    "n": lambda **kw: (randn(3, 8, 16, **kw), randn(7, 16, **kw).mT),
}
#: Terms that follow the product, and whether BLAS has to copy the product for them.
FOLLOWED: dict[str, tuple[bool, dict[str, Any]]] = {
    "nothing": (False, {}),
    "expression": (False, {"alpha": 2.0, "bias": randn(3, 7), "residual": randn(12, 7)}),
    "weights": (False, {"out_weights": randn(12)}),
    "scattered": (True, {"out_index": torch.randperm(12)}),
    "epilogue": (True, {"epilogue": "silu"}),
    "out_dtype": (True, {"out_dtype": torch.float64}),
}


@pytest.mark.parametrize("form", ODD)
@pytest.mark.parametrize("dtype", [torch.float16, BF16, FP32])
def test_rows_of_the_result_start_where_torchs_do(form: str, dtype: torch.dtype) -> None:
    """At multiples of 16 bytes; an ``out`` keeps its own strides."""
    a, b = ODD[form](dtype=dtype)
    offs = ends(3, 3, 7) if form == "n" else OFFS
    y, torchs = tmm_core.grouped_matmul(a, b, offs=offs), F.grouped_mm(a, b, offs=offs)
    assert y.stride() == torchs.stride() != torch.empty(torchs.shape).stride()
    (fresh,) = (plan.problem for plan in warm._plans.values())
    assert fresh.out == Operand(dtype)
    out = torch.empty(torchs.shape, dtype=dtype)
    assert tmm_core.grouped_matmul(a, b, offs=offs, out=out) is out
    assert torch.equal(known(out, form), known(y, form))
    *_, given = (plan.problem for plan in warm._plans.values())
    assert given.out == Operand(dtype, aligned=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        assert fresh.out_strides == out.stride()


@pytest.mark.parametrize("case", FOLLOWED)
def test_the_baseline_copies_no_padded_result(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copies, call = FOLLOWED[case]
    products = []

    def spied(*operands: Tensor) -> Tensor:
        products.append(F.grouped_mm(*operands[:2], offs=operands[2]))
        return products[-1]

    monkeypatch.setattr(grouped_mm, "_by_torch", spied)
    a, b = ODD["m"]()
    y = tmm_core.grouped_matmul(a, b, offs=OFFS, **call)
    assert y.stride() == (8, 1)
    if case != "out_dtype":  # which torch does not multiply to
        assert (y.data_ptr() != products[0].data_ptr()) == copies
    expected = expression(a, b, OFFS, **{k: v for k, v in call.items() if k != "out_dtype"})
    torch.testing.assert_close(y[:10].float(), expected[:10])


def test_padded_results_are_verified_and_timed_as_calls_make_them() -> None:
    a, b = ODD["m"]()
    problem, device = tmm_core.problem(a, b, offs=OFFS), torch.device("cpu")
    assert problem.allocates
    assert cold_operands.Copies(problem, device, None)._out is None
    given = replace(problem, out=Operand(FP32, aligned=False))
    assert not given.allocates
    assert cold_operands.Copies(given, device, None)._out is not None
    right: Any = grouped_mm.bind(problem)

    def packs(*arguments: Any, offs: Tensor) -> Tensor:
        y: Tensor = right(*arguments, offs=offs)
        return y.contiguous() if arguments[5] is None else y

    assert Verifier(problem, device).verdict(right).ok
    reason = Verifier(problem, device).verdict(packs).reason
    assert reason == "it returned strides (7, 1); a call returns (8, 1)"


def test_a_weights_gradient_of_odd_rows_is_not_padded() -> None:
    """Autograd would copy it into the weight's own strides."""
    x, weight = randn(12, 7), randn(3, 8, 7, requires_grad=True)
    tmm_core.grouped_linear(x, weight, offs=OFFS)[:10].sum().backward()
    warm.forget_plans()
    y = tmm_core.grouped_linear(x, weight, offs=OFFS)
    (gradient,) = torch.autograd.grad(y[:10].sum(), weight)
    assert gradient.stride() == weight.stride()
    torch.testing.assert_close(gradient, weight.grad)


A, B = randn(12, 16), randn(3, 16, 8)
#: Calls that torch refuses, with a part of the message.
REFUSED: dict[str, Any] = {
    "a's dimensions": (A[0], B, OFFS),
    "b's dimensions": (A, B[0, 0], OFFS),
    "contraction": (A, B[:, :8], OFFS),
    "no offs": (A, B, None),
    "offs of a batch": (randn(3, 4, 16), B, OFFS),
    "groups": (A, B, OFFS[:2]),
    "batches": (randn(2, 4, 16), B, None),
    "dimensions of offs": (A, B, OFFS[None]),
    "dtype of offs": (A, B, OFFS.long()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_torchs_refusals(case: str) -> None:
    a, b, offs = REFUSED[case]
    with pytest.raises(RuntimeError) as torchs:
        F.grouped_mm(a, b, offs=offs)
    with pytest.raises(RuntimeError) as ours:
        tmm_core.grouped_matmul(a, b, offs=offs)
    assert str(ours.value) == str(torchs.value)


INDEX = torch.zeros(12, dtype=torch.long)
OURS: dict[str, Any] = {
    "dtypes": ({"b": B.bfloat16()}, RuntimeError, "one dtype"),
    "integers": ({"a": A.int(), "b": B.int()}, RuntimeError, "are not multiplied"),
    "bias": ({"bias": randn(3)}, ValueError, r"\(8,\) or \(3, 8\)"),
    "bias's dtype": ({"bias": randn(8).half()}, RuntimeError, "bias must have dtype"),
    "residual": ({"residual": randn(8)}, ValueError, r"result's shape \(12, 8\)"),
    "out_dtype": ({"out_dtype": torch.int32}, TypeError, "floating dtype"),
    "odd width": ({"b": B[..., :7], "epilogue": "swiglu"}, ValueError, "width 2N"),
    "index's dtype": ({"a_index": INDEX.short()}, RuntimeError, "int32 or torch.int64"),
    "index's shape": ({"out_index": INDEX[:3]}, ValueError, r"shape \(12,\)"),
    "gathered and scattered": (
        {"a_index": INDEX[:5], "out_weights": randn(12)}, ValueError, r"shape \(5,\)",
    ),
    "index along K": (
        {"a": randn(4, 12), "b": randn(12, 8), "a_index": INDEX}, ValueError, "rows that are ragged"
    ),
    "gated columns": (
        {"a": randn(3, 4, 16), "b": randn(16, 12), "epilogue": "swiglu"}, ValueError, "are ragged"
    ),
    "alpha": ({"alpha": torch.ones(1)}, TypeError, "must be Number"),
    "no tensor": ({"a": [1.0]}, TypeError, "argument 'a' must be Tensor, not list"),
    "no tensor of a batch": (
        {"a": [1.0], "offs": None}, TypeError, "argument 'a' must be Tensor, not list"
    ),
    "no tensor of ends": ({"offs": [3, 12]}, TypeError, "argument 'offs' must be Tensor, not list"),
    "no tensor to add": ({"bias": 3}, TypeError, "argument 'bias' must be Tensor, not int"),
    "no tensor to write": ({"out": 3}, TypeError, "argument 'out' must be Tensor, not int"),
    "epilogue": ({"epilogue": "sliu"}, tmm_core.UnknownNameError, "silu"),
    "kernel": ({"kernel": "triton.grouped"}, UnsupportedProblemError, "ragged along m"),
    "devices": ({"b": B.to("meta")}, RuntimeError, "same device"),
    "no groups": ({"b": B[:0], "offs": OFFS[:0]}, RuntimeError, "one group at least"),
}  # fmt: skip


@pytest.mark.parametrize("case", OURS)
def test_refusals(case: str) -> None:
    changed, kind, text = OURS[case]
    with pytest.raises(kind, match=text):
        tmm_core.grouped_matmul(**{"a": A, "b": B, "offs": OFFS, **changed})


def expression(
    a: Tensor, b: Tensor, offs: Tensor, *, bias: Any = None, residual: Any = None,
    alpha: float = 1.0, epilogue: str | None = None, a_index: Any = None, out_index: Any = None,
    out_weights: Any = None,
) -> Tensor:  # fmt: skip
    """The product of ragged rows by torch's differentiable operators, with zeros beyond the last
    group."""
    x = a if a_index is None else a[a_index.long()]
    parts = []
    for group, (start, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        z = alpha * (x[start:end] @ b[group])
        z = z if bias is None else z + (bias if bias.dim() == 1 else bias[group])
        parts.append(parse(epilogue).apply(z))
    y = torch.cat(parts)
    if out_weights is not None:
        y = y * out_weights[: len(y), None]
    y = F.pad(y, (0, 0, 0, len(x) - len(y)))
    if out_index is not None:
        y = torch.zeros_like(y).index_copy(0, out_index.long(), y)
    if residual is not None:
        rows = torch.arange(len(y)) < int(offs[-1])
        y = torch.where(rows[:, None], y + residual, y)
    return y


GATHER = torch.tensor([0, 2, 4, 1, 1, 3, 2, 0, 4, 3, 0, 4])
SCATTER = torch.tensor([4, 9, 1, 0, 8, 3, 2, 5, 7, 6, 10, 11])
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared bias": {"bias": 8, "epilogue": "silu", "alpha": 0.5},
    "biases": {"bias": (3, 8), "epilogue": "swiglu", "residual": (12, 4)},
    "relu": {"epilogue": "relu", "residual": (12, 8)},
    "linear": {"residual": (12, 8), "bias": 8},
    "indexed": {
        "a_index": GATHER, "out_index": SCATTER, "out_weights": (12,), "bias": (3, 8),
        "epilogue": "geglu", "residual": (12, 4),
    },
    "alternate columns": {"bias": (3, 8), "epilogue": CLAMPED, "residual": (12, 4)},
    "weighed": {"out_weights": (12,), "epilogue": "gelu_tanh+softcap(3)"},
    "scattered": {"out_index": SCATTER},
}  # fmt: skip


def made(call: dict[str, Any], learns: bool = False) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, value in {"a": (12, 5), "b": (3, 5, 8), **call}.items():
        shape = (value,) if isinstance(value, int) else value
        drawn = isinstance(shape, tuple)
        arguments[name] = randn(*shape, dtype=torch.float64) if drawn else value
        if drawn and learns:
            arguments[name].requires_grad_()
    return arguments | {"offs": OFFS}


@pytest.mark.parametrize("call", CALLS)
def test_values_and_gradients(call: str) -> None:
    """Rows beyond the last group hold NaN, in operands and in the result's gradient."""
    ours = made(CALLS[call], learns=True)
    wants = [name for name, t in ours.items() if isinstance(t, Tensor) and t.requires_grad]
    with torch.no_grad():
        for name in wants:
            if name not in ("b", "bias") and not (name == "a" and "a_index" in ours):
                ours[name][10:] = torch.nan
    torchs = {
        name: t.detach().nan_to_num().requires_grad_() if name in wants else t
        for name, t in ours.items()
    }
    y, expected = tmm_core.grouped_matmul(**ours), expression(**torchs)
    torch.testing.assert_close(y[:10], expected[:10])
    fused = tmm_core.grouped_matmul(**{name: _detached(t) for name, t in ours.items()})
    torch.testing.assert_close(fused[:10], expected.detach()[:10])
    if "out_index" in ours:
        assert not y[10:].any()
    grad = torch.full_like(y, torch.nan)
    grad[:10] = randn(10, y.shape[1], dtype=torch.float64)
    got = torch.autograd.grad(y, [ours[name] for name in wants], grad)
    want = torch.autograd.grad(
        expected, [torchs[name] for name in wants], grad.nan_to_num(), allow_unused=True
    )
    for name, mine, other in zip(wants, got, want, strict=True):
        if name == "residual" or name == "out_weights":
            mine, other = mine[:10], other[:10]
        torch.testing.assert_close(
            mine, other, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("learning", ["a", "b", "bias", "residual", "out_weights"])
def test_one_operand_alone_learns(learning: str) -> None:
    """As a router does whose experts are frozen."""
    call: dict[str, Any] = {"bias": (3, 8), "residual": (12, 8), "out_weights": (12,)}
    ours = made(call)
    given = ours[learning].requires_grad_()
    y, expected = tmm_core.grouped_matmul(**ours)[:10], expression(**ours)[:10]
    torch.testing.assert_close(y, expected)
    (got,), (want,) = (torch.autograd.grad(t.sum(), given) for t in (y, expected))
    torch.testing.assert_close(got, want)


def _detached(t: Any) -> Any:
    return t.detach() if isinstance(t, Tensor) else t


@pytest.mark.parametrize("form", ["m", "k", "n"])
@pytest.mark.slow
def test_derivatives_of_derivatives(form: str) -> None:
    shapes = {"m": ((12, 3), (3, 3, 4)), "k": ((3, 12), (12, 2)), "n": ((3, 2, 3), (3, 12))}
    a, b = (randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes[form])

    def f(a: Tensor, b: Tensor) -> Tensor:
        return known(tmm_core.grouped_matmul(a, b, offs=OFFS, epilogue="tanh+silu"), form)

    torch.autograd.gradcheck(f, (a, b), check_forward_ad=True)
    torch.autograd.gradgradcheck(f, (a, b))


@pytest.mark.parametrize("names", ["bias", "residual", "a", "b", "bias residual", "a b bias"])
@pytest.mark.parametrize("each", [False, True], ids=["one bias", "a bias each"])
@pytest.mark.parametrize("form", ["m", "gathered", "k"])
def test_tangents_of_some_operands(form: str, each: bool, names: str) -> None:
    """Against a difference quotient, in float64."""
    rows, form = {} if form != "gathered" else {"a_index": GATHER}, form.replace("gathered", "m")
    a, b, offs = FORMS[form](dtype=torch.float64)
    shape = tmm_core.grouped_matmul(a, b, offs=offs, **rows).shape
    width = shape[-1]
    at = {
        "a": a, "b": b, "bias": randn(*([3] if each else []), width, dtype=torch.float64),
        "residual": randn(*shape, dtype=torch.float64),
    }  # fmt: skip
    tangents = {name: randn(*at[name].shape, dtype=torch.float64) for name in names.split()}

    def product(given: dict[str, Tensor]) -> Tensor:
        return tmm_core.grouped_matmul(**given, **rows, offs=offs, alpha=0.5, epilogue="silu")

    def moved(by: float) -> Tensor:
        return product(at | {name: at[name] + by * t for name, t in tangents.items()})

    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(at[name], t) for name, t in tangents.items()}
        tangent = forward_ad.unpack_dual(product(at | duals)).tangent
    assert tangent is not None
    assert tangent.shape == shape
    quotient = (moved(1e-5) - moved(-1e-5)) / 2e-5
    torch.testing.assert_close(known(tangent, form), known(quotient, form), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("form", ["m", "k", "n"])
def test_gradients_have_the_memory_layout_of_their_operands(form: str) -> None:
    """A layer's weight is given transposed: no transposing copy is made of its gradient."""
    a, b, offs = FORMS[form](dtype=FP32)
    a, b = (t.mT.contiguous().mT.requires_grad_() for t in (a, b))
    y = tmm_core.grouped_matmul(a, b, offs=offs)
    warm.forget_plans()
    da, db = torch.autograd.grad(known(y, form).sum(), (a, b))
    assert da.mT.is_contiguous()
    assert db.mT.is_contiguous()
    kinds = sorted(plan.problem.along for plan in warm._plans.values())
    assert kinds == sorted({"m": "kn", "k": "mn", "n": "mk"}[form])


def test_linear_takes_a_weight_for_each_group() -> None:
    x, weight = randn(12, 16), randn(3, 8, 16)
    y = tmm_core.grouped_linear(x, weight, randn(8), offs=OFFS, epilogue="swiglu")
    assert y.shape == (12, 4)
    with pytest.raises(TypeError, match="argument 'weight' must be Tensor, not list"):
        tmm_core.grouped_linear(x, [1.0], offs=OFFS)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"weight 3-D \[G, N, K\], got 2D and 2D"):
        tmm_core.grouped_linear(x, weight[0], offs=OFFS)


def test_a_batch_takes_a_bias_each() -> None:
    a, b, bias, residual = randn(3, 4, 16), randn(3, 16, 8), randn(3, 8), randn(3, 4, 8)
    y = tmm_core.grouped_matmul(a, b, bias=bias, residual=residual, epilogue="silu")
    torch.testing.assert_close(y, F.silu(a @ b + bias[:, None]) + residual)
    out = torch.empty(3, 4, 8)
    assert tmm_core.grouped_matmul(a, b, bias=bias[0], out=out) is out
    torch.testing.assert_close(out, a @ b + bias[0])
    with pytest.raises(ValueError, match="need ragged rows"):
        tmm_core.grouped_matmul(a, b, out_weights=bias)


@pytest.mark.parametrize("each", [False, True])
def test_terms_and_out_of_a_batch(each: bool) -> None:
    """Each product has a bias, which makes the batch a grouped call, or all share one."""
    a, b, bias = randn(3, 4, 16, requires_grad=True), randn(3, 16, 8), randn(3, 1, 8)
    given = bias[:, 0] if each else bias[0, 0]
    for shape in ((8,), (4, 8), (3, 1, 8)):
        residual = randn(*shape, requires_grad=True)
        y = tmm_core.grouped_matmul(a, b, bias=given, residual=residual)
        expected = a @ b + (bias if each else bias[0, 0]) + residual
        torch.testing.assert_close(y, expected)
        wanted = torch.autograd.grad(expected.sum(), (a, residual))
        torch.testing.assert_close(torch.autograd.grad(y.sum(), (a, residual)), wanted)
    a = a.detach()
    for wrong in ((4, 3, 8), (2, 4, 8), (3, 4, 7)):
        with pytest.raises(ValueError, match="does not broadcast"):
            tmm_core.grouped_matmul(a, b, bias=given, residual=randn(*wrong))
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
        tmm_core.grouped_matmul(a, b, bias=given, out=torch.empty(3, 4, 8).half())
    with pytest.warns(UserWarning, match="was resized"):
        out = tmm_core.grouped_matmul(a, b, bias=given, out=torch.empty(2, 3, 4, 8))
    torch.testing.assert_close(out, a @ b + (bias if each else bias[0, 0]))
    square = randn(3, 8, 8)
    with pytest.raises(RuntimeError, match="single memory location"):
        tmm_core.grouped_matmul(square, b[:, :8], bias=given, out=square)
    for groups, m, k, n in ((0, 4, 3, 2), (3, 0, 4, 2), (3, 4, 0, 2), (3, 4, 5, 0)):
        bias = randn(groups, n) if each else randn(n)
        y = tmm_core.grouped_matmul(randn(groups, m, k), randn(groups, k, n), bias=bias)
        assert y.shape == (groups, m, n)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmapped_calls_run_one_after_another() -> None:
    a, b = randn(2, 12, 16), randn(2, 3, 16, 8)
    offs = torch.stack([OFFS, ends(1, 4, 10)])

    def loss(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        y = tmm_core.grouped_matmul(a, b, offs=offs, epilogue="silu")
        return y[:10].square().sum()

    for function in (loss, torch.func.grad(loss, argnums=(0, 1))):
        expected = [function(*each) for each in zip(a, b, offs, strict=True)]
        found = torch.vmap(function)(a, b, offs)
        for one, of in zip(
            expected, zip(*found, strict=True) if isinstance(found, tuple) else found, strict=True
        ):
            torch.testing.assert_close(of, one)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("columns", [False, True])
def test_a_batch_of_gradients_of_both_operands(columns: bool) -> None:
    b = randn(3, 8, 16).mT if columns else randn(3, 16, 8)
    operands = randn(12, 16).requires_grad_(), b.requires_grad_()
    y = tmm_core.grouped_matmul(*operands, offs=OFFS)
    each = randn(2, *y.shape)
    found = torch.autograd.grad(y, operands, each, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(each):
        expected = torch.autograd.grad(y, operands, grad, retain_graph=True)
        torch.testing.assert_close(tuple(batch[i] for batch in found), expected)


@pytest.mark.parametrize("shape", [(1, 16, 8), (1, 16, 6), (5, 1, 8), (5, 16, 1), (1, 1, 1)])
@pytest.mark.parametrize("form", ["m", "k", "n"])
@pytest.mark.parametrize("packed", [False, True])
def test_single_rows_and_columns_have_any_stride(
    form: str, shape: tuple[int, int, int], packed: bool
) -> None:
    """A step of decoding has one row, whose stride torch's operator checks all the same."""
    m, k, n = shape
    a_shape, b_shape, ragged = {
        "m": ((m, k), (2, k, n), m),
        "k": ((m, k), (k, n), k),
        "n": ((2, m, k), (k, n), n),
    }[form]
    offs = ends(ragged // 2, ragged)

    def by_group(a: Tensor, b: Tensor) -> Tensor:
        cuts = [slice(0, ragged // 2), slice(ragged // 2, ragged)]
        if form == "m":
            return torch.cat([a[cut] @ b[g] for g, cut in enumerate(cuts)])
        if form == "k":
            return torch.stack([a[:, cut] @ b[cut] for cut in cuts])
        return torch.cat([a[g] @ b[:, cut] for g, cut in enumerate(cuts)], 1)

    def lies(*shape: int) -> Tensor:
        if packed:
            return randn(*shape)
        return randn(*shape[:-1], 16)[..., : shape[-1]]

    pairs = [[t.mT.contiguous().mT, t] for t in (lies(*a_shape), lies(*b_shape))]
    for a, b in itertools.product(*pairs):
        operands = [t.detach().requires_grad_() for t in (a, b)]
        ours = tmm_core.grouped_matmul(*operands, offs=offs)
        theirs = by_group(*operands)
        torch.testing.assert_close(ours, theirs, check_stride=False)
        both = [torch.autograd.grad(y.square().sum(), operands) for y in (ours, theirs)]
        torch.testing.assert_close(*both, check_stride=False)


def test_products_without_rows_or_terms() -> None:
    none = ends(0, 0, 0)
    assert tmm_core.grouped_matmul(randn(0, 16), B, offs=none).shape == (0, 8)
    sums = tmm_core.grouped_matmul(randn(4, 0), randn(0, 8), offs=none)
    assert torch.equal(sums, torch.zeros(3, 4, 8))
    bias = randn(3, 8)
    sums = tmm_core.grouped_matmul(randn(4, 0), randn(0, 8), offs=none, bias=bias)
    assert torch.equal(sums, bias[:, None].expand(3, 4, 8))
    assert tmm_core.grouped_matmul(randn(12, 0), randn(3, 0, 8), offs=OFFS)[:10].eq(0).all()


def test_out() -> None:
    out = torch.full((12, 8), torch.nan)
    assert tmm_core.grouped_matmul(A, B, offs=OFFS, out=out) is out
    torch.testing.assert_close(out[:10], expression(A, B, OFFS)[:10])
    with pytest.raises(RuntimeError, match="single memory location"):
        tmm_core.grouped_matmul(A, randn(3, 16, 16), offs=OFFS, out=A)
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        tmm_core.grouped_matmul(A.clone().requires_grad_(), B, offs=OFFS, out=out)


# -- as an operator --------------------------------------------------------------------------

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "plain": (A, randn(3, 16, 7), OFFS),
    "sums": (randn(5, 12), randn(12, 6), OFFS, None, None, 0.5),
    "columns": (randn(3, 5, 4), randn(4, 12), OFFS, None, None, 1.0, "tanh"),
    "everything": (
        # In fp64, since rounding differs between the kernels of two calls.
        randn(5, 16).double(), B.double(), OFFS, randn(3, 8).double(), randn(12, 4).double(), 2.0,
        "swiglu", None, GATHER, SCATTER, randn(12).double(), True,
    ),
    "wide": (A.bfloat16(), B[..., :6].bfloat16(), OFFS, None, None, 1.0, "", FP32),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch reads it
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.slow(quick=6)
def test_opcheck(signature: str, learns: bool) -> None:
    arguments = tuple(
        t.detach().clone().requires_grad_(learns and t.is_floating_point())
        if isinstance(t, Tensor)
        else t
        for t in SIGNATURES[signature]
    )
    # Rows beyond the last group keep their earlier contents.
    zeroed = {} if len(arguments) > 11 else {"zeroed": True}
    torch.library.opcheck(grouped_operator.grouped_matmul, arguments, zeroed)


def test_one_operator_in_a_full_graph() -> None:
    targets = []

    def look(graph: Any, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def layer(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return tmm_core.grouped_linear(x, weight, offs=offs, epilogue="swiglu")

    compiled = torch.compile(layer, fullgraph=True, backend=look, dynamic=True)
    for rows in (12, 20, 33):
        x, weight = randn(rows, 16), randn(3, 8, 16)
        torch.testing.assert_close(compiled(x, weight, OFFS)[:10], layer(x, weight, OFFS)[:10])
    assert len([t for t in targets if "grouped_matmul" in t]) == 1
    torch._dynamo.reset()


def test_a_layer_in_a_full_graph() -> None:
    layer = Experts(3, 6, 5)
    x, index = randn(4, 6), torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]])
    weights = torch.rand(4, 2)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, index, weights), layer(x, index, weights))
    torch._dynamo.reset()


@pytest.mark.parametrize(("biased", "gated"), [(False, True), (True, True), (False, False)])
def test_groups_of_equal_size_compile_before_any_other_call(biased: bool, gated: bool) -> None:
    a, b = torch.randn(2, 3, 8), torch.randn(2, 8, 12)
    bias = torch.randn(2, 12) if biased else None

    @torch.compile(fullgraph=True, backend="eager")
    def layer(a: torch.Tensor) -> torch.Tensor:
        return tmm_core.grouped_matmul(a, b, bias=bias, epilogue="swiglu" if gated else None)

    z = a @ b if bias is None else a @ b + bias[:, None]
    torch.testing.assert_close(layer(a), F.silu(z[..., :6]) * z[..., 6:] if gated else z)


def test_a_compiled_training_step() -> None:
    def step(x: Tensor, weight: Tensor) -> Any:
        y = tmm_core.grouped_linear(x, weight, offs=OFFS, epilogue="swiglu", out_index=SCATTER)
        return torch.autograd.grad(y.square().sum(), (x, weight))

    x, weight = randn(12, 16, requires_grad=True), randn(3, 8, 16, requires_grad=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x: Tensor, weight: Tensor) -> Tensor:
        y = tmm_core.grouped_linear(x, weight, offs=OFFS, epilogue="swiglu", out_index=SCATTER)
        return y.square().sum()

    # Eagerly, a kernel follows the product, whose roundings differ; the gradients cancel.
    for mine, eager in zip(
        torch.autograd.grad(loss(x, weight), (x, weight)), step(x, weight), strict=True
    ):
        torch.testing.assert_close(mine, eager, rtol=0, atol=1e-6 * eager.abs().max().item())
    torch._dynamo.reset()


def test_autocast() -> None:
    """Operands and bias are rounded to 16 bits; the weights of rows, a router's, are not."""
    weights, bias = torch.full((12,), 1 + 2.0**-12), randn(8)
    with torch.autocast("cpu", BF16):
        y = tmm_core.grouped_matmul(A, B, offs=OFFS, bias=bias, out_weights=weights, out_dtype=FP32)
        rounded = tmm_core.grouped_matmul(A, B, offs=OFFS, bias=bias, out_weights=weights)
    a, b, narrow = A.bfloat16().float(), B.bfloat16().float(), bias.bfloat16().float()
    expected = expression(a, b, OFFS, bias=narrow, out_weights=weights)
    torch.testing.assert_close(y[:10], expected[:10], rtol=2e-5, atol=2e-5)
    assert (y[:10] / expected[:10] * weights[:10, None] - 1).abs().median() > 2.0**-13
    assert rounded.dtype is BF16
    torch.testing.assert_close(rounded[:10].float(), expected[:10], rtol=2e-2, atol=2e-2)
    half = weights.half().requires_grad_()
    with torch.autocast("cpu", BF16):
        y = tmm_core.grouped_matmul(A.half(), B.half(), offs=OFFS, out_weights=half)
    assert y.dtype is BF16
    assert torch.autograd.grad(y[:10].sum(), half)[0].dtype is torch.float16
    a, b = (t.half().bfloat16().float() for t in (A, B))
    expected = expression(a, b, OFFS, out_weights=half.float())
    torch.testing.assert_close(y[:10].float(), expected[:10], rtol=2e-2, atol=2e-2)


def test_flops_are_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        tmm_core.grouped_matmul(A, B, offs=OFFS)
        tmm_core.grouped_matmul(randn(5, 16), B, offs=OFFS, a_index=GATHER)
    assert counter.get_total_flops() == 2 * (2 * 12 * 16 * 8)


def test_a_plan_for_each_kind_of_call() -> None:
    """Two calls that differ in one property have a plan each. The values of ``offs`` are no such
    property."""
    base: dict[str, Any] = {"a": A, "b": B, "offs": OFFS}
    calls: list[dict[str, Any]] = [
        {}, {"alpha": 2.0}, {"bias": randn(8)}, {"bias": randn(3, 8)}, {"residual": randn(12, 8)},
        {"epilogue": "silu"}, {"out_dtype": BF16}, {"a_index": GATHER}, {"a_index": GATHER.int()},
        {"out_index": SCATTER}, {"out_index": SCATTER.int()}, {"out_weights": randn(12)},
        {"out_weights": randn(12), "out_index": SCATTER}, {"b": randn(3, 16, 16)},
        {"out": torch.empty(12, 8)}, {"a": randn(16, 12).T}, {"b": randn(3, 8, 16).mT},
    ]  # fmt: skip
    for change in calls:
        for _ in range(2):
            for offs in (OFFS, ends(0, 5, 9)):
                given = {**base, "offs": offs, **change}
                y = tmm_core.grouped_matmul(**given)
                out, dtype = given.pop("out", None), given.pop("out_dtype", FP32)
                end = int(given["offs"][-1])
                expected = expression(**given).to(dtype)
                torch.testing.assert_close(y[:end], expected[:end], rtol=1e-2, atol=1e-3)
                assert out is None or y is out
    assert len(warm._plans) == len(calls)


# -- who answers -----------------------------------------------------------------------------

HOPPER = DeviceFingerprint("cuda", "NVIDIA H100", (9, 0), 132, 232448)
ROW = Operand(BF16)
PROBLEM = Problem(4096, 1536, 2048, ROW, Operand(BF16, "col"), ROW, HOPPER, groups=Groups(128, "m"))


def test_the_baseline_is_torchs_where_it_does_not_wait() -> None:
    blas = Blas()
    assert blas.reasons_against(PROBLEM) == []
    half = Operand(torch.float16)
    for changed, reason in (
        ({"device": replace(HOPPER, capability=(8, 0))}, "on the host"),
        ({"device": replace(HOPPER, cuda="hip-6.4")}, "on NVIDIA GPUs and on CPUs"),
        ({"a": half, "b": half, "out": half}, "takes bf16"),
        ({"out": Operand(FP32)}, "returns bf16"),
        ({"b": Operand(BF16, "col", aligned=False)}, "16 bytes"),
        ({"m": 0}, "a dimension is 0"),
    ):
        problem = replace(PROBLEM, **changed)
        (found, *_) = blas.reasons_against(problem)
        assert reason in found
        with pytest.raises(UnsupportedProblemError, match="no kernel can serve"):
            blas.bind(problem, blas.config_type())


@pytest.mark.parametrize("call", [*CALLS, "k", "n"])
def test_the_baseline_reads_nothing_on_the_host(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have no memory, so that reading a value would fail. With memory, the same launch
    gives the values."""
    monkeypatch.setattr(grouped_mm, "_by_torch", lambda a, b, offs: torch.ops.aten._grouped_mm(
        a.bfloat16(), b.bfloat16(), offs))  # fmt: skip
    on = {"device": "meta", "dtype": BF16}
    if call in CALLS:
        arguments: dict[str, Any] = made(CALLS[call])
        arguments |= {"a": torch.empty(12, 16, **on), "b": torch.empty(3, 16, 8, **on)}
    else:
        a, b, _ = FORMS[call]()
        arguments = {"a": a, "b": b, "offs": OFFS}
    numbers: dict[str, Any] = {
        name: torch.empty_strided(t.shape, t.stride(), dtype=BF16).normal_()
        if t.is_floating_point()
        else t
        for name, t in arguments.items()
        if isinstance(t, Tensor)
    }
    meta: dict[str, Any] = {
        name: without_memory(t) if isinstance(t, Tensor) else t for name, t in arguments.items()
    }
    problem = replace(tmm_core.problem(**meta), device=HOPPER)
    problem = replace(problem, groups=replace(problem.groups, zeroed=call != "k"))
    names = ("offs", "a_index", "out_index", "out_weights")
    launcher: Any = grouped_mm.bind(problem)
    alpha = arguments.get("alpha", 1.0)

    def launched(given: dict[str, Any]) -> Tensor:
        bias = given.get("bias")
        bias = bias.expand(3, -1) if bias is not None and bias.dim() == 1 else bias
        rows = {name: given[name] for name in names if given.get(name) is not None}
        y: Tensor = launcher(
            given["a"], given["b"], bias, given.get("residual"), alpha, None, **rows
        )
        assert (tuple(y.shape), y.stride()) == (problem.out_shape, problem.out_strides)
        assert y.dtype is BF16
        return y

    launched(meta)
    y = launched(numbers).float()
    wide = {name: t.float() if t.is_floating_point() else t for name, t in numbers.items()}
    if call in CALLS:
        expected = expression(**wide, epilogue=arguments.get("epilogue"), alpha=alpha)
    else:
        parts = itertools.pairwise([0, *OFFS.tolist()])
        each = [
            wide["a"][:, start:end] @ wide["b"][start:end] if call == "k"
            else wide["a"][group] @ wide["b"][:, start:end]
            for group, (start, end) in enumerate(parts)
        ]  # fmt: skip
        expected = torch.stack(each) if call == "k" else F.pad(torch.cat(each, 1), (0, 2))
    torch.testing.assert_close(y, expected, rtol=4e-2, atol=0.25)


def without_memory(t: Tensor) -> Tensor:
    dtype = BF16 if t.is_floating_point() else t.dtype
    return torch.empty_strided(t.shape, t.stride(), dtype=dtype, device="meta")


class Loops(Kernel[FakeConfig]):
    """Serves ragged products by torch's products of groups."""

    name = "loops.ragged"
    version = "1"  # type: ignore[assignment]
    config_type = FakeConfig
    supports = Supports(
        devices=("cpu",), operands=(FP32, torch.float64), out=(FP32, torch.float64), ragged=("m",),
        unaligned=("a", "b", "out"), layouts={"b": ("row", "col")},
    )  # fmt: skip

    def configs(self, problem: Problem) -> list[FakeConfig]:
        return [FakeConfig(tile=tile) for tile in (1, 2)]

    def default_config(self, problem: Problem) -> FakeConfig:
        return FakeConfig()

    def bind(self, problem: Problem, config: FakeConfig) -> Any:
        right: Any = grouped_mm.bind(problem)

        def launch(*arguments: Any, **rows: Tensor) -> Tensor:
            return right(*arguments, **rows)

        launch.cost = (self.name, config.tile)  # type: ignore[attr-defined]
        return launch


def cpu_problem(**fields: Any) -> Problem:
    problem = tmm_core.problem(A, B, offs=OFFS)
    device = replace(problem.device, interpreted=False)  # whose times mean something
    return replace(problem, m=160, device=device, **fields)


def test_the_memory_for_timing_counts_the_weights_of_all_groups() -> None:
    problem = cpu_problem()
    weights = problem.groups.count * problem.k * problem.n * 4  # type: ignore[union-attr]
    assert problem.bytes > weights
    with pytest.raises(MemoryError, match="tune_memory"):
        cold_operands.Copies(problem, torch.device("cpu"), weights)


def test_tuning_keeps_groups_on_record(tmp_path: Path) -> None:
    problem = cpu_problem()
    chooser, _ = dispatcher(Blas(), Loops(), times={(Loops.name, 2): 50.0}, root=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Blas, "bind", lambda self, problem, config: costed(problem))
        record = chooser.tune(problem, settings())
    assert record.best.kernel == Loops.name
    assert record.problem["groups"] == {"count": 3, "ragged": "m"}
    recalled = warm.recall(record.problem, torch.device("cpu"))
    assert replace(recalled, device=problem.device) == problem
    assert sorted(record.best.inside_us) == [129, 145]
    other = replace(problem, groups=Groups(4, "m"))
    assert chooser.record(other) is None
    assert chooser.record(problem.at(150)) is not None


def costed(problem: Problem) -> Any:
    right: Any = grouped_mm.bind(problem)

    def launch(*arguments: Any, **rows: Tensor) -> Tensor:
        return right(*arguments, **rows)

    launch.cost = ("blas", 1)  # type: ignore[attr-defined]
    return launch


def test_tuning_where_there_is_nothing_to_beat(tmp_path: Path) -> None:
    problem = cpu_problem()
    timer = FakeTimer({(Loops.name, 1): 70.0, (Loops.name, 2): 50.0})
    registry = Registry()
    registry.register(plugin(Loops(), Declining()), "fakes")
    chooser = Dispatcher(registry, Tuner(timer), CacheStore(tmp_path))
    choice, _ = chooser.bound(problem, settings())
    assert (choice.origin, choice.candidate.config.to_json()) == ("tuned", {"tile": 2})
    # Inside its bucket too.
    choice, _ = chooser.bound(problem.at(150), settings())
    assert choice.candidate.kernel.name == Loops.name
    with pytest.raises(UnsupportedProblemError, match=r"no kernel can serve .* groups along m"):
        chooser.bound(replace(problem, groups=Groups(3, "m", zeroed=True)), settings())


class Declining(Blas):
    """Torch on a GPU for which it has no grouped product."""

    def declines(self, problem: Problem) -> Any:
        yield "has none here"


def test_batch_invariant_mode_has_one_config_for_any_number_of_rows(tmp_path: Path) -> None:
    invariant = replace(Loops.traits, batch_invariant=True)
    kernel = type("Invariant", (Loops,), {"traits": invariant})()
    times: dict[Any, float] = {(Loops.name, 1): 10.0, (Loops.name, 2, 192): 5.0}
    chooser, _ = dispatcher(Blas(), kernel, times=times, root=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Blas, "bind", lambda self, problem, config: costed(problem))
        chosen = {
            chooser.bound(cpu_problem(batch_invariant=True).at(m), settings())[0].candidate.config
            for m in (1, 5, 160, 3 * ROWS_EACH)
        }
    assert chosen == {FakeConfig(tile=2)}


def test_buckets_are_of_the_ragged_dimension() -> None:
    sums = replace(PROBLEM, k=4097, groups=Groups(8, "k"))
    assert bucketed(sums) == replace(sums, k=5120)
    columns = replace(PROBLEM, n=33, groups=Groups(8, "n"))
    assert bucketed(columns) == replace(columns, n=64)
    assert bucketed(replace(PROBLEM, m=3)).m == 4


@pytest.mark.parametrize("distribution", ["even", "skewed"])
def test_distributions_have_empty_groups(distribution: ragged_inputs.Sizes) -> None:
    chance = torch.Generator().manual_seed(0)
    for count, total in ((8, 512), (128, 64), (128, 8192), (2, 100)):
        made = ragged_inputs.ends_of(count, total, chance, distribution)
        sizes = torch.tensor(made).diff(prepend=torch.zeros(1, dtype=torch.long))
        assert made[-1] == total
        assert (sizes >= 0).all()
        assert (sizes == 0).sum() >= count // 5
        mean = total / count
        if total >= count > 2:
            assert (sizes.max() > 2 * mean) == (distribution == "skewed")
    assert ragged_inputs.ends_of(1, 7, chance, distribution) == [7]


def test_both_distributions_are_timed_and_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = cpu_problem()
    inputs = random_inputs.make(problem, torch.device("cpu"), seed=0)
    assert cold_operands.copies(problem) == 2
    first, second = cold_operands.rotated(inputs, problem)
    assert first.rows is not None
    assert second.rows is not None
    assert first.rows.offs.tolist() == list(first.rows.ends)
    assert second.rows.offs.tolist() != list(first.rows.ends)
    # A chain on a GPU takes more draws than copies, if there is memory for the outputs.
    on_gpu = replace(problem, device=HOPPER)
    monkeypatch.setattr(cold_operands, "copies", lambda problem, limit: 2)
    calls = cold_operands.rotated(inputs, on_gpu)
    drawn = {tuple(each.rows.offs.tolist()) for each in calls}
    assert len(calls) == ragged_inputs.SIZE_SAMPLES
    assert len(drawn) > 3
    assert [each.b.data_ptr() for each in calls[:2]] * 3 == [each.b.data_ptr() for each in calls]
    assert len(cold_operands.rotated(inputs, on_gpu, limit=1e4)) == 2
    dense, padded = DataSets(problem, torch.device("cpu"), 1 << 24, sampled=False).sets()
    assert dense.inputs.rows is not None
    assert padded.inputs.rows is not None
    assert dense.inputs.rows.ends[-1] == 160
    assert padded.inputs.rows.ends[-1] < 160
    assert padded.inputs.a[-1].isnan().all()


@pytest.mark.parametrize(
    "fault",
    [
        lambda y, offs: y.roll(1, 0),
        lambda y, offs: torch.where(torch.arange(len(y))[:, None] >= offs[-1] // 2, y * 1.5, y),
        lambda y, offs: torch.where(torch.arange(len(y))[:, None] == offs[-1] - 1, 0, y),
    ],
    ids=["other rows", "half of them", "the last row"],
)
@pytest.mark.parametrize("sampled", [False, True])
def test_wrong_launchers_are_found(fault: Any, sampled: bool) -> None:
    problem = cpu_problem()
    right: Any = grouped_mm.bind(problem)

    def wrong(*arguments: Any, offs: Tensor) -> Tensor:
        y, out = right(*arguments[:5], None, offs=offs), arguments[5]
        y = fault(y, offs)
        return y if out is None else out.copy_(y)

    verifier = Verifier(problem, torch.device("cpu"), sampled=sampled)
    assert verifier.verdict(right, extent="brief" if sampled else "whole").ok
    assert "exceeds" in str(verifier.verdict(wrong, extent="brief" if sampled else "whole").reason)


def test_zeroed_rows_are_verified() -> None:
    zeroed = cpu_problem(groups=Groups(3, "m", zeroed=True))
    assert Verifier(zeroed, torch.device("cpu")).verdict(grouped_mm.bind(zeroed)).ok
    careless: Any = grouped_mm.bind(replace(zeroed, groups=Groups(3, "m")))
    assert not Verifier(zeroed, torch.device("cpu")).verdict(careless).ok


def test_grouped_products_are_benched_with_torch_and_a_loop() -> None:
    listed = {"dtypes": ["bf16"], "layout": "nt", "rows": [16], "epilogues": "bias+swiglu"}
    sums = {"dtypes": ["bf16"], "layout": "tn", "rows": [16], "ragged": "k", "routing": "even"}
    experts = {"experts": [[4, 24, 32], [3, 17, 19]]}
    tasks = suites.expand("rows", listed | experts) + suites.expand("sums", sums | experts)
    options = runner.Options(tune=False, kernels=True, seconds=0.02)
    for measured, task in zip(runner.run(tasks, torch.device("cpu"), options), tasks, strict=True):
        assert "failed" not in measured
        assert Case.from_json(measured["case"]) == task.case
        assert measured["error"] < 1.6e-2
        assert {"torch", "tmm", "kernel blas"} <= set(measured["times"])
        call = task.case.call(torch.device("cpu"))
        assert call.plan(kernel="blas").kernel == "blas"
        with pytest.raises(tmm_core.UnknownNameError, match="no_such"):
            call.plan(kernel="no_such")
        wanted = tmm_core.grouped_matmul(call.a, call.b, **call.keywords)
        torch.testing.assert_close(bench.eager([call])(0), wanted, rtol=2e-2, atol=2e-2)
    assert len(suites.select(["grouped"])) == 20


def test_a_grouped_call_is_explained_and_described() -> None:
    text = str(tmm_core.explain(A, B, offs=OFFS, out_index=SCATTER))
    assert "3 groups along m out_index zeroed" in text
    assert "does not serve products that are ragged along m" in text


def test_groups_refuse_nonsense() -> None:
    for arguments, text in (
        ((0, "m"), "at least one group"),
        ((1, "z"), "along m, n or k"),
        ((2, "k", torch.int32), "only rows have a_index"),
    ):
        with pytest.raises(ValueError, match=text):
            Groups(*arguments)
    groups = Groups(2, "m", torch.int32, torch.int64, FP32, True)
    assert Groups.from_json(groups.to_json()) == groups
    with pytest.raises(ValueError, match="unknown dtype 'nn'"):
        Groups.from_json(groups.to_json() | {"a_index": "nn"})
    assert groups.given == ("offs", "a_index", "out_index", "out_weights")
    assert Groups(2, "m").to_json() == {"count": 2, "ragged": "m"}
