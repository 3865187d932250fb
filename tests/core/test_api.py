"""The public call against torch's: shapes, values, gradients, errors in torch's words."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import FakeKernel, plugin
from tmm_blas.blas import Blas

import tmm_core
from tmm_core import dispatch
from tmm_core.epilogues import BUILTIN
from tmm_core.interop import operator
from tmm_core.spec.epilogue import Epilogue

SHAPES = [
    ((7,), (7,)),
    ((2, 7), (7,)),
    ((7,), (7, 3)),
    ((5, 7), (7, 3)),
    ((2, 5, 7), (7, 3)),
    ((2, 5, 7), (2, 7, 3)),
    ((4, 1, 5, 7), (3, 7, 2)),
    ((7,), (4, 7, 3)),
    ((4, 5, 7), (7,)),
    ((1, 5, 7), (4, 7, 3)),
    ((5, 7), (4, 7, 3)),
    ((0, 7), (7, 3)),
    ((2, 0), (0, 3)),
    ((0, 5, 7), (7, 3)),
    ((3, 5, 0), (3, 0, 2)),
]


@pytest.mark.parametrize(("sa", "sb"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_shapes_and_values_are_torchs(sa: Any, sb: Any, dtype: torch.dtype) -> None:
    a = torch.randn(sa).mul(4).to(dtype)
    b = torch.randn(sb).mul(4).to(dtype)
    expected = torch.matmul(a, b)
    torch.testing.assert_close(tmm_core.matmul(a, b), expected)
    out = torch.empty(0, dtype=dtype)
    assert tmm_core.matmul(a, b, out=out) is out
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(("sa", "sb"), SHAPES)
def test_gradients_are_torchs(sa: Any, sb: Any) -> None:
    a = torch.randn(sa, dtype=torch.float64, requires_grad=True)
    b = torch.randn(sb, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(torch.matmul(a, b).shape, dtype=torch.float64)
    expected = torch.autograd.grad(torch.matmul(a, b), (a, b), grad)
    got = torch.autograd.grad(tmm_core.matmul(a, b), (a, b), grad)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


STRIDES = {
    "row": lambda r, c: torch.randn(r, c),
    "col": lambda r, c: torch.randn(c, r).t(),
    "sliced": lambda r, c: torch.randn(r, c + 5)[:, 2 : c + 2],
    "every other": lambda r, c: torch.randn(r, 2 * c)[:, ::2],
    "expanded": lambda r, c: torch.randn(1, c).expand(r, c),
    "rows skipped": lambda r, c: torch.randn(3 * r, c)[::3],
}


@pytest.mark.parametrize("left", STRIDES)
@pytest.mark.parametrize("right", STRIDES)
def test_every_stride(left: str, right: str) -> None:
    a, b = STRIDES[left](6, 9), STRIDES[right](9, 4)
    torch.testing.assert_close(tmm_core.matmul(a, b, epilogue="tanh"), torch.tanh(a @ b))


@pytest.mark.parametrize("name", [n for n, e in BUILTIN.items() if not e.gated])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_expression(name: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(6, 9, dtype=dtype), torch.randn(9, 4, dtype=dtype)
    bias, residual = torch.randn(4, dtype=dtype), torch.randn(6, 4, dtype=dtype)
    got = tmm_core.matmul(a, b, bias=bias, residual=residual, alpha=0.5, epilogue=name)
    z = 0.5 * (a.double() @ b.double()) + bias.double()
    expected = BUILTIN[name].apply(z) + residual.double()
    tolerance = 1e-5 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
    assert got.dtype is dtype


@pytest.mark.parametrize("name", [n for n, e in BUILTIN.items() if e.gated])
def test_gated(name: str) -> None:
    x, w, bias = torch.randn(3, 6, 9), torch.randn(8, 9), torch.randn(8)
    gate, up = F.linear(x, w, bias).chunk(2, dim=-1)
    expected = BUILTIN[name].reference(gate, up)
    torch.testing.assert_close(tmm_core.linear(x, w, bias, epilogue=name), expected)


def test_linear_is_torchs() -> None:
    x, w, bias = torch.randn(2, 5, 7), torch.randn(3, 7), torch.randn(3)
    torch.testing.assert_close(tmm_core.linear(x, w, bias), F.linear(x, w, bias))
    with pytest.raises(RuntimeError, match=r"weight must be 2-D \[N, K\] or 1-D \[K\], got 0D"):
        tmm_core.linear(x, w[0, 0])


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 5, 7), (0, 7)])
@pytest.mark.parametrize("bias", [None, (), (-1,)])
def test_a_vector_as_weight_is_torchs(shape: tuple[int, ...], bias: tuple[int, ...] | None) -> None:
    """The bias, which torch takes for some shapes, broadcasts to a product without columns."""
    x, w = torch.randn(shape, requires_grad=True), torch.randn(7, requires_grad=True)
    added = None if bias is None else torch.randn(bias and shape[-2:-1])
    expected = F.linear(x, w) + (0 if added is None else added)
    grads = torch.autograd.grad(expected.square().sum(), (x, w))
    found = tmm_core.linear(x, w, added)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), (x, w)), grads)
    with torch.no_grad():
        torch.testing.assert_close(tmm_core.linear(x, w, added), expected)
        found = tmm_core.matmul(x, w, bias=added, epilogue="relu")
    torch.testing.assert_close(found, F.relu(expected))


def test_chains_and_objects() -> None:
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    cube = Epilogue("cube", lambda z: z**3)
    expected = torch.tanh((a @ b) ** 3)
    torch.testing.assert_close(tmm_core.matmul(a, b, epilogue=[cube, "tanh"]), expected)
    got = tmm_core.matmul(a, b, epilogue="gelu_tanh+softcap(2)")
    torch.testing.assert_close(got, 2 * torch.tanh(F.gelu(a @ b, approximate="tanh") / 2))


@pytest.mark.parametrize("given", ["float32", 6, torch.ones(1)])
@pytest.mark.parametrize("way", ["plain", "gradients", "vmap", "vmap of linear", "groups", "out"])
def test_an_out_dtype_that_is_no_dtype_is_named(way: str, given: Any) -> None:
    """Torch's operators would show their schema."""
    a, b = torch.randn(2, 4, 3), torch.randn(3, 5, requires_grad=way == "gradients")
    offs, weights = torch.tensor([1, 4], dtype=torch.int32), torch.randn(2, 3, 5).requires_grad_()
    options: Any = {"out_dtype": given}
    calls = {
        "vmap": lambda: torch.vmap(lambda a: tmm_core.matmul(a, b, **options))(a),
        "vmap of linear": lambda: torch.vmap(lambda a: tmm_core.linear(a, b.t(), **options))(a),
        "groups": lambda: tmm_core.grouped_matmul(a[0], weights, offs=offs, **options),
        "out": lambda: tmm_core.matmul(a[0], b, out=torch.empty(4, 5), **options),
    }
    call = calls.get(way, lambda: tmm_core.matmul(a[0], b, **options))
    with pytest.raises(TypeError, match=r"out_dtype must be a torch\.dtype, got "):
        call()


def test_out_dtype_and_out() -> None:
    a, b = torch.randn(4, 5).bfloat16(), torch.randn(5, 6).bfloat16()
    wide = tmm_core.matmul(a, b, out_dtype=torch.float32)
    assert wide.dtype is torch.float32
    torch.testing.assert_close(wide, a.float() @ b.float())
    out = torch.full((6, 4), float("nan")).t()
    tmm_core.matmul(a, b, out=out, out_dtype=torch.float32, epilogue="relu")
    torch.testing.assert_close(out, torch.relu(a.float() @ b.float()))
    with pytest.warns(UserWarning, match="resized"):
        tmm_core.matmul(a, b, out=torch.empty(3, dtype=torch.bfloat16))


def t(*shape: int, **kw: Any) -> torch.Tensor:
    return torch.zeros(*shape, **kw)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tmm_core.matmul(t(2, 3), t(2, 3)), RuntimeError, "mat1 and mat2 shapes cannot be multiplied \\(2x3 and 2x3\\)"),
        (lambda: tmm_core.matmul(t(2, 3, 4), t(3, 4, 5)), RuntimeError, "must match the size of tensor b"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2, dtype=torch.float64)), RuntimeError, "expected m1 and m2 to have the same dtype, but got: float != double"),
        (lambda: tmm_core.matmul(t(()), t(3)), RuntimeError, "both arguments to matmul need to be at least 1D, but they are 0D and 1D"),
        (lambda: tmm_core.matmul([[1.0]], t(1, 1)), TypeError, "Tensor"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), bias=t(3)), ValueError, r"bias must have shape \(2,\) or broadcast to the product's shape \(2, 2\), got \(3,\)"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), bias=t(2, dtype=torch.int32)), RuntimeError, "bias must have dtype"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), residual=t(3, 2)), ValueError, "does not broadcast"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 3), epilogue="swiglu"), ValueError, "width 2N"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), epilogue="sillu"), tmm_core.UnknownNameError, "did you mean 'silu'"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), epilogue="silu("), ValueError, "cannot parse epilogue"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), epilogue="softcap(x)"), ValueError, "must be numbers"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), epilogue="softcap(1,2)"), ValueError, "takes 1 parameters, got 2"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), epilogue="softcap(0)"), ValueError, "must be above 0"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), epilogue="tanh+softcap(-1)"), ValueError, "must be above 0"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), epilogue="softcap(1e-50)"), ValueError, "must be above 0"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), epilogue="silu+swiglu"), ValueError, "only come first"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), epilogue=3), TypeError, "must be a str or an Epilogue"),
        (lambda: tmm_core.matmul(t(2, 3, dtype=torch.int32), t(3, 2, dtype=torch.int32), epilogue="silu"), RuntimeError, "needs a floating dtype"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), out_dtype=torch.int8), TypeError, "out_dtype must be a floating dtype of 16 bits or more"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), out=t(2, 2, dtype=torch.float64)), RuntimeError, "Expected out tensor to have dtype"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), kernel="blast"), tmm_core.UnknownNameError, "did you mean 'blas'"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), config={"fused": True}), tmm_core.SettingsError, "config needs kernel"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), kernel="blas", config={"fuse": True}), tmm_core.ConfigError, "fuse"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2), on_cache_miss="never"), tmm_core.SettingsError, "one of tune, background, heuristic, error"),
        (lambda: tmm_core.matmul(t(2, 3), t(3, 2, device="meta")), RuntimeError, "same device"),
    ],
)  # fmt: skip
def test_invalid_input_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    if issubclass(error, tmm_core.TmmError):
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sa", "sb"),
    [
        ((2, 3), (2, 3)),
        ((2, 3, 4), (3, 4, 5)),
        ((3,), (4,)),
        ((2, 3, 4), (5, 2)),
        ((4,), (2, 3, 4)),
    ],
)
def test_shape_errors_are_torchs_own(sa: Any, sb: Any) -> None:
    with pytest.raises(RuntimeError) as theirs:
        torch.matmul(t(*sa), t(*sb))
    with pytest.raises(RuntimeError) as ours:
        tmm_core.matmul(t(*sa), t(*sb))
    assert str(ours.value) == str(theirs.value)


def test_out_may_not_alias_an_input() -> None:
    a = torch.randn(4, 4)
    before = a.clone()
    with pytest.raises(RuntimeError, match="single memory location"):
        tmm_core.matmul(a, a, out=a)
    assert torch.equal(a, before)


def test_out_is_not_differentiable() -> None:
    a = torch.randn(2, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        tmm_core.matmul(a, a, out=torch.empty(2, 2))


@pytest.mark.parametrize("rows", [(6,), (2, 3)])
def test_a_weight_gradient_has_the_memory_layout_of_the_weight(rows: tuple[int, ...]) -> None:
    """Else autograd copies it, transposing, to where it is kept."""
    x = torch.randn(*rows, 8)
    weight, b = torch.randn(5, 8).requires_grad_(), torch.randn(8, 5).requires_grad_()
    for y, parameter in ((tmm_core.linear(x, weight), weight), (tmm_core.matmul(x, b), b)):
        (grad,) = torch.autograd.grad(y.square().sum(), parameter)
        assert grad.stride() == parameter.stride()


@pytest.mark.parametrize("epilogue", [None, "silu", "gelu", "softcap(2)", "swiglu", "relu2+tanh"])
def test_gradients_through_everything(epilogue: str | None) -> None:
    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    width = 4 if epilogue == "swiglu" else 2
    inputs = (leaf(3, 5), leaf(5, width), leaf(width), leaf(3, 2))

    def call(a: Any, b: Any, bias: Any, residual: Any) -> torch.Tensor:
        return tmm_core.matmul(a, b, bias=bias, residual=residual, alpha=0.7, epilogue=epilogue)

    assert torch.autograd.gradcheck(call, inputs)

    def operator(a: Any, b: Any, bias: Any, residual: Any) -> torch.Tensor:
        return torch.ops.tmm.matmul(a, b, bias, residual, 0.7, epilogue or "")

    assert torch.autograd.gradcheck(operator, inputs)


def test_a_given_derivative_is_used() -> None:
    double = Epilogue("steep", lambda z: z * 2, derivative=lambda z: torch.full_like(z, 7.0))
    a, b = torch.randn(2, 3, requires_grad=True), torch.eye(3)
    tmm_core.matmul(a, b, epilogue=double).sum().backward()
    assert torch.equal(a.grad, torch.full((2, 3), 7.0))


def test_autocast_is_torchs() -> None:
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = tmm_core.matmul(a, b), torch.matmul(a, b)
    assert mine.dtype is theirs.dtype is torch.bfloat16
    torch.testing.assert_close(mine, theirs)


# torch 2.14 reads it from its own copies, and hides the warning unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_opcheck() -> None:
    a, b = torch.randn(4, 5, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    bias, residual = torch.randn(6), torch.randn(4, 6)
    torch.library.opcheck(operator.matmul, (a, b))
    torch.library.opcheck(operator.matmul, (a, b, bias, residual, 0.5, "silu", None))
    torch.library.opcheck(
        operator.matmul, (a.detach(), b.detach(), None, None, 1.0, "swiglu", None)
    )


def test_compile_has_no_graph_break_and_few_compiles() -> None:
    compiles = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal compiles
        compiles += 1
        return graph

    w = torch.randn(7, 3)

    @torch.compile(fullgraph=True, dynamic=True, backend=count)
    def f(x: torch.Tensor) -> torch.Tensor:
        return tmm_core.matmul(x, w, epilogue="silu") * 2

    for m in range(1, 51):
        x = torch.randn(m, 7)
        torch.testing.assert_close(f(x), F.silu(x @ w) * 2)
    assert compiles <= 4


def test_conj_and_neg_bits() -> None:
    a = torch.randn(3, 4, dtype=torch.complex64)
    b = torch.randn(4, 2, dtype=torch.complex64)
    torch.testing.assert_close(tmm_core.matmul(a.conj(), b), a.conj() @ b)
    neg = a.conj().imag
    assert neg.is_neg()
    torch.testing.assert_close(tmm_core.matmul(neg, b.real), neg @ b.real)


def test_fake_tensors_have_the_right_shape() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        y = tmm_core.matmul(torch.empty(2, 5, 7), torch.empty(7, 4), epilogue="swiglu")
        assert y.shape == (2, 5, 2)


def test_a_plan_replays_and_refuses_other_tensors() -> None:
    a, b, bias = torch.randn(4, 5), torch.randn(5, 6), torch.randn(6)
    plan = tmm_core.plan(a, b, bias=bias, epilogue="relu")
    torch.testing.assert_close(plan(a, b, bias), torch.relu(a @ b + bias))
    with pytest.raises(ValueError, match=r"takes a of strides \(5, 1\), got strides \(1, 4\)$"):
        plan(a.t().contiguous().t(), b, bias)
    with pytest.raises(ValueError, match=r"takes bias, got none"):
        plan(a, b)
    with pytest.raises(ValueError, match=r"takes bias of strides \(1,\), got strides \(2,\)$"):
        plan(a, b, torch.randn(12)[::2])
    with pytest.raises(
        ValueError, match=r"takes a of dtype torch\.float32, got dtype torch\.float64$"
    ):
        plan(a.double(), b, bias)
    with pytest.raises(
        ValueError, match=r"takes a of offset from 16 bytes 0, got offset from 16 bytes 4$"
    ):
        plan(torch.randn(21)[1:].view(4, 5), b, bias)
    with pytest.raises(ValueError, match=r"takes no residual, got one"):
        tmm_core.plan(a, b, bias=bias)(a, b, bias, torch.randn(4, 6))
    with pytest.raises(TypeError, match=r"plan\(\): argument 'b' must be Tensor, not float"):
        plan(a, 1.0, bias)
    assert plan.kernel == "blas"
    out = torch.full((4, 6), torch.nan)
    assert plan(a, b, bias, out=out) is out
    torch.testing.assert_close(out, torch.relu(a @ b + bias))
    for wrong in (torch.empty(6, 4).t(), torch.empty(4, 7), torch.empty(4, 6, dtype=torch.half)):
        with pytest.raises(ValueError, match="takes out of"):
            plan(a, b, bias, out=wrong)


@pytest.mark.slow
def test_no_module_hides_a_public_name() -> None:
    code = """
import importlib, pkgutil, tmm_core
before = {name: getattr(tmm_core, name) for name in tmm_core.__all__}
for module in pkgutil.iter_modules(tmm_core.__path__):
    if module.name in tmm_core.__all__:
        importlib.import_module(f"tmm_core.{module.name}")
assert all(getattr(tmm_core, name) is value for name, value in before.items())
tmm_core.kernels()
assert callable(tmm_core.explain)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torchs_dispatcher_is_not_skipped_where_it_is_needed() -> None:
    """Modes, tracers, autocast and transforms see the operator; plain calls need none."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    a, b = torch.randn(3, 4), torch.randn(4, 5)
    for mode in (Functions(), Dispatch()):
        with mode:
            torch.testing.assert_close(tmm_core.matmul(a, b), a @ b)
        assert any("tmm.matmul" in name for name in seen), seen
        seen.clear()
    with torch.profiler.profile(acc_events=True) as profile:
        tmm_core.matmul(a, b)
    assert any("tmm::matmul" in event.name for event in profile.events())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", "`torch.jit.trace` is deprecated", FutureWarning)
        traced = torch.jit.trace(lambda x: tmm_core.matmul(x, b), a)
    assert "tmm::matmul" in str(traced.graph)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tmm_core.matmul(a, b).dtype == torch.bfloat16


def test_a_kernel_that_raises_is_quarantined_and_the_call_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def explode(out: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("illegal address")

    dispatch.default_dispatcher().registry.register(
        plugin(FakeKernel("test.bad", spoil=explode, estimate=1.0)), "bad"
    )
    monkeypatch.setattr(Blas, "estimate_us", lambda *_: 100.0)
    a, b = torch.randn(4, 5), torch.randn(5, 6)
    with tmm_core.override(on_cache_miss="heuristic"):
        with pytest.warns(tmm_core.TmmWarning, match="illegal address"):
            got = tmm_core.matmul(a, b)
        torch.testing.assert_close(got, a @ b)
        torch.testing.assert_close(tmm_core.matmul(a, b), a @ b)  # silently now
    with pytest.raises(RuntimeError, match="illegal address"):
        tmm_core.matmul(a, b, kernel="test.bad")


def test_override_nests_and_ends() -> None:
    a, b = torch.randn(2, 2), torch.randn(2, 2)
    dispatch.default_dispatcher().registry.register(
        plugin(FakeKernel("test.plus", spoil=lambda out: out + 1)), "p"
    )
    with tmm_core.override(kernel="test.plus", verify=False):
        torch.testing.assert_close(tmm_core.matmul(a, b), a @ b + 1)
        with tmm_core.override(kernel="blas"):
            torch.testing.assert_close(tmm_core.matmul(a, b), a @ b)
        torch.testing.assert_close(tmm_core.matmul(a, b), a @ b + 1)
    with tmm_core.override(on_cache_miss="heuristic"):  # a tuning would warn that it is wrong
        torch.testing.assert_close(tmm_core.matmul(a, b), a @ b)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TMM_ON_CACHE_MISS", "always", "one of tune, background, heuristic, error"),
        ("TMM_TUNE_BUDGET", "-1", "positive seconds"),
        ("TMM_TUNE_BUDGET", "soon", "found 'soon', accepted is a number"),
        ("TMM_TUNE_SHARE", "10%", "found '10%', accepted is a number"),
        ("TMM_TUNE_MEMORY", "0", "found '0', accepted is a size like 64M or 2G, above 0"),
        ("TMM_TUNE_MEMORY", "0.0k", "accepted is a size like 64M or 2G, above 0"),
        ("TMM_TUNE_MEMORY", "much", "accepted is a size like 64M"),
        ("TMM_PROGRESS", "maybe", "expected 1 or 0"),
    ],
)
def test_invalid_environment(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(tmm_core.SettingsError, match=f"{name}='{value}': .*{message}") as caught:
        tmm_core.matmul(torch.ones(2, 2), torch.ones(2, 2))
    assert "\n" not in str(caught.value)


def test_threads_racing_the_first_call() -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    expected = torch.relu(a @ b)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                torch.testing.assert_close(tmm_core.matmul(a, b, epilogue="relu"), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_flops_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    a, b = torch.randn(4, 5), torch.randn(5, 6)
    with FlopCounterMode(display=False) as counter:
        tmm_core.matmul(a, b, epilogue="silu")
        tmm_core.matmul(torch.randn(3, 4, 5), b)
    assert counter.get_total_flops() == 2 * 4 * 5 * 6 * 4


IMPORT = """
import sys, os, torch
before = set(os.listdir({home!r}))
import tmm_core
assert not torch.cuda.is_initialized()
assert "triton" not in sys.modules, "triton"
assert "tmm_triton" not in sys.modules and "tmm_blas" not in sys.modules
assert "filelock" not in sys.modules
from tmm_core import dispatch
from tmm_core.interop import operator
assert dispatch.default_dispatcher.made is None
assert set(os.listdir({home!r})) == before
"""


@pytest.mark.slow
def test_importing_has_no_side_effects(tmp_path: Any) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    subprocess.run(
        [sys.executable, "-c", IMPORT.format(home=str(tmp_path))], env=environment, check=True
    )


def test_the_public_names() -> None:
    assert sorted(tmm_core.__all__) == tmm_core.__all__
    assert set(tmm_core.__all__) == {
        "ANY", "Bound", "Anatomy", "CacheMissError", "Candidate", "Config", "ConfigError", "Epilogue",
        "Explanation", "Format", "Groups", "Kernel", "KernelInfo", "Launcher", "Machine", "Operand", "Plan", "PluginError", "Port", "Problem",
        "Quantized", "Resources", "Scale", "Settings", "SettingsError", "Supports", "TmmError", "TmmWarning", "Traits", "UnknownNameError",
        "UnsupportedProblemError", "disable", "enable", "enabled_report", "explain", "grouped_linear", "grouped_matmul", "hookimpl", "inductor_options", "kernels", "linear", "matmul",
        "override", "plan", "preload", "problem", "quantize", "quantize_rows", "reraise", "tune",
    }  # fmt: skip
    assert all(hasattr(tmm_core, name) for name in tmm_core.__all__)


def test_no_warning_on_a_plain_call() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tmm_core.matmul(torch.randn(2, 2), torch.randn(2, 2))
