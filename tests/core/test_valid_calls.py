"""A call is checked as a whole, by the same checks on every path."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from drawn import on_meta, outcome, recording
from torch.nn import functional as F

import tmm_core
from tmm_core.nn import Experts, GatedMLP, Linear

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

Tensor = torch.Tensor
BF16, FP32, FP64, E4M3 = torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def quick(blas_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMM_ON_CACHE_MISS", "heuristic")


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


OFFS = torch.tensor([2, 4], dtype=torch.int32)
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "matmul": lambda more, a: tmm_core.matmul(a, randn(8, 6).to(a), **more),
    "linear": lambda more, a: tmm_core.linear(a, randn(6, 8).to(a), **more),
    "grouped": lambda more, a: tmm_core.grouped_matmul(
        a, randn(2, 8, 6).to(a), offs=OFFS.to(a.device), **more
    ),
    "grouped linear": lambda more, a: tmm_core.grouped_linear(
        a, randn(2, 6, 8).to(a), offs=OFFS.to(a.device), **more
    ),
    "batch": lambda more, a: tmm_core.grouped_matmul(a.view(2, 2, 8), randn(2, 8, 6).to(a), **more),
}
PATHS: dict[str, Callable[..., Any]] = {
    "plain": lambda f, more, a: f(more, a),
    "recorded": lambda f, more, a: f(more, recording(a)),
    "another recorded": lambda f, more, a: f({n: recording(t) for n, t in more.items()}, a),
    "meta": lambda f, more, a: f({n: on_meta(t) for n, t in more.items()}, a.to("meta")),
    "under vjp": lambda f, more, a: torch.func.vjp(lambda t: f(more, t), a),
    "under jvp": lambda f, more, a: torch.func.jvp(lambda t: f(more, t), (a,), (a,)),
}
#: Arguments that do not fit, and the error.
MISSES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "scale of b": ({"scale_b": torch.ones(1)}, RuntimeError, "scale_b is for"),
    "scale of a": ({"scale_a": torch.ones(1), "epilogue": "relu"}, RuntimeError, "scale_a is for"),
    "residual's dtype": ({"residual": randn(4, 6, dtype=FP64)}, RuntimeError, "residual must have"),
    "residual's dtype, apart": (
        {"residual": randn(4, 6, dtype=FP64), "epilogue": "silu"}, RuntimeError,
        "residual must have dtype"),
    "residual that widens the result": (
        {"residual": randn(2, 2, 4, 6), "epilogue": "silu"}, ValueError, "residual"),
    "bias's dtype": (
        {"bias": randn(6, dtype=torch.float16), "epilogue": "silu"}, RuntimeError, "bias must"),
    "bias's shape": ({"bias": randn(5), "epilogue": "gelu"}, ValueError, "bias must have shape"),
    "out_dtype": ({"out_dtype": torch.int32, "epilogue": "silu"}, TypeError, "out_dtype must be"),
    "width": ({"epilogue": "swiglu", "bias": randn(3)}, ValueError, "bias must have shape"),
    "alpha": ({"alpha": "2"}, TypeError, "'alpha' must be Number"),
    "large alpha": ({"alpha": 2**70}, OverflowError, "int too big"),
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("miss", MISSES)
def test_an_invalid_call_is_refused_on_every_path(miss: str, path: str) -> None:
    more, kind, text = MISSES[miss]
    for name, function in FUNCTIONS.items():
        if name == "batch" and "residual" in miss and "shape" in text:
            continue
        with pytest.raises(kind, match=text):
            PATHS[path](function, dict(more), randn(4, 8))


def test_a_refusal_is_not_forgotten_by_a_warm_call() -> None:
    a, b = recording(randn(4, 8)), randn(8, 6)
    for _ in range(2):
        assert tmm_core.matmul(a, b, epilogue="silu", residual=randn(4, 6)).dtype is BF16
        with pytest.raises(RuntimeError, match="residual must have dtype"):
            tmm_core.matmul(a, b, epilogue="silu", residual=randn(4, 6, dtype=FP64))
        with pytest.raises(RuntimeError, match="scale_b is for"):
            tmm_core.matmul(a, b, epilogue="silu", scale_b=torch.ones(1))
    grouped = functools.partial(tmm_core.grouped_matmul, a, randn(2, 8, 5), offs=OFFS)
    valid: dict[str, Any] = {"bias": randn(5), "residual": randn(4, 5), "epilogue": "silu"}
    for _ in range(2):
        assert grouped(**valid).dtype is BF16
        for more, text in (
            ({"residual": randn(4, 5, dtype=FP64)}, "residual must have dtype"),
            ({"residual": randn(1, 5)}, "must have the result's shape"),
            ({"bias": randn(5, dtype=FP64)}, "bias must have dtype"),
            ({"scale_a": torch.ones(1)}, "scale_a is for"),
            ({"epilogue": "swiglu"}, "needs b of width 2N"),
            ({"out_dtype": torch.int32}, "out_dtype must be"),
        ):
            with pytest.raises((RuntimeError, ValueError, TypeError), match=text):
                grouped(**valid | more)


@pytest.mark.slow
def test_an_invalid_call_is_refused_by_compilers() -> None:
    for more in ({"scale_b": torch.ones(1)}, {"residual": randn(4, 6, dtype=FP64)}):
        for a in (randn(4, 8), recording(randn(4, 8))):
            torch.compiler.reset()
            function = torch.compile(
                lambda a, more=more: tmm_core.matmul(a, randn(8, 6), epilogue="silu", **more),
                backend="aot_eager",
            )
            with pytest.raises(RuntimeError, match=r"scale_b is for|residual must have dtype"):
                function(a)


@pytest.mark.parametrize("epilogue", ["silu", "clamped_swiglu"])
def test_a_bias_of_another_shape_excuses_nothing(epilogue: str) -> None:
    a, b = randn(4, 8).to(torch.complex64), randn(8, 6).to(torch.complex64)
    bias = randn(4, 6).to(torch.complex64)
    for x in (a, recording(a), a.to("meta")):
        with pytest.raises(RuntimeError, match="needs a floating dtype"):
            tmm_core.matmul(x, b.to(x.device), bias=bias.to(x.device), epilogue=epilogue)
    with pytest.raises(RuntimeError, match="scale_a is for"):
        tmm_core.matmul(randn(4, 8), randn(8, 6), bias=randn(4, 6), scale_a=torch.ones(1))


def test_a_mapped_argument_is_checked() -> None:
    a, b = randn(4, 8), randn(8, 6)
    for name, t in {"bias": randn(2, 6), "residual": randn(2, 4, 6)}.items():
        function = torch.vmap(lambda t, name=name: tmm_core.matmul(a, b, **{name: t}))
        assert function(t).shape == (2, 4, 6)
        with pytest.raises(RuntimeError, match=f"{name} must have dtype"):
            function(t.double())
    with pytest.raises(ValueError, match="residual"):
        torch.vmap(lambda t: tmm_core.matmul(a, b, residual=t))(randn(2, 3, 4, 6))


def test_a_problem_drops_no_rows() -> None:
    a, b, rows = randn(4, 8), randn(8, 6), torch.arange(4)
    for name in ("a_index", "out_index", "out_weights"):
        for function in (tmm_core.problem, tmm_core.explain):
            with pytest.raises(ValueError, match="need ragged rows: give offs"):
                function(a, b, **{name: rows})


def test_a_complex_product_is_not_cut_to_its_real_part() -> None:
    a, b = randn(4, 8).to(torch.complex64), randn(8, 6).to(torch.complex64)
    for x in (a, recording(a), a.to("meta")):
        with pytest.raises(TypeError, match=r"out_dtype must be torch\.complex64"):
            tmm_core.matmul(x, b.to(x.device), out_dtype=FP32)


def test_a_compiled_gated_layer_checks_its_operands() -> None:
    layer = GatedMLP(8, 12, dtype=BF16)
    torch.compiler.reset()
    with torch.no_grad(), pytest.raises(RuntimeError):
        torch.compile(layer, backend="aot_eager")(randn(4, 7))
    fake: Any = torch.ops.tmm.gated_linear
    x, w = torch.empty(4, 8, device="meta"), torch.empty(12, 8, device="meta")
    assert fake(x, w, w, None, None, "swiglu").shape == (4, 12)
    with pytest.raises(RuntimeError):
        fake(x, w, w[:, :7], None, None, "swiglu")
    with pytest.raises(ValueError, match="residual"):
        fake(x, w, w[:5], None, None, "swiglu")


@pytest.mark.parametrize("alpha", [2.0, 3, -0.5])
@pytest.mark.parametrize("shapes", [((2, 0), (0, 3)), ((0, 2), (2, 3)), ((2, 0, 3), (2, 3, 0))])
def test_empty_products_of_booleans_take_any_alpha(shapes: Any, alpha: float) -> None:
    """Torch multiplies no others."""
    a, b = (torch.zeros(shape, dtype=torch.bool) for shape in shapes)
    wanted = torch.matmul(a, b)
    for out in (None, torch.empty(0, dtype=torch.bool)):
        assert torch.equal(tmm_core.matmul(a, b, alpha=alpha, out=out), wanted)
    found = tmm_core.matmul(a.to("meta"), b.to("meta"), alpha=alpha)
    assert (found.shape, found.dtype) == (wanted.shape, torch.bool)


# -- autocast ------------------------------------------------------------------------------


def full(*shape: int) -> Tensor:
    return randn(*shape, dtype=FP32)


WRITTEN: dict[str, Callable[[Tensor | None], Tensor]] = {
    "a product": lambda out: tmm_core.matmul(full(4, 8), full(8, 6), out=out),
    "a bias of rows": lambda out: tmm_core.matmul(
        full(4, 8), full(8, 6), bias=full(4, 6), epilogue="silu", out=out
    ),
    "a bias of rows, and a tensor as alpha": lambda out: tmm_core.matmul(
        full(4, 8), full(8, 6), bias=full(4, 1), alpha=torch.tensor(2.0), epilogue="silu", out=out
    ),
    "a sparse operand": lambda out: tmm_core.matmul(full(4, 8).to_sparse(), full(8, 6), out=out),
    "ragged groups": lambda out: tmm_core.grouped_matmul(
        full(4, 8), full(2, 8, 6), offs=OFFS, out=out
    ),
    "a bias for each group": lambda out: tmm_core.grouped_matmul(
        full(2, 4, 8), full(2, 8, 6), bias=full(2, 6), out=out
    ),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_nothing_is_cast_where_out_gives_the_dtype(case: str) -> None:
    """Every way of writing to ``out`` behaves like torch.mm."""
    call = WRITTEN[case]
    torch.manual_seed(0)
    wanted = call(None)
    for dtype in (BF16, torch.float16):
        torch.manual_seed(0)
        out = torch.empty(0)
        with torch.autocast("cpu", dtype):
            assert call(out) is out
        used = slice(0, int(OFFS[-1])) if case == "ragged groups" else slice(None)
        torch.testing.assert_close(out[used], wanted[used], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_mapped_calls_are_cast_as_others(dtype: torch.dtype) -> None:
    """Torch calls the rules of transforms before the rule of autocast."""
    a, b, bias = full(2, 3, 8), randn(8, 6), full(2, 6)
    with torch.autocast("cpu", dtype):
        wanted = torch.stack([torch.addmm(c, x, b) for x, c in zip(a, bias, strict=True)])
        found = torch.vmap(lambda a, bias: tmm_core.matmul(a, b, bias=bias))(a, bias)
        given = torch.vmap(lambda b: tmm_core.matmul(a[0], b, residual=bias[0]))(
            b[None].expand(2, 8, 6)
        )
        slope = torch.func.grad(lambda a: tmm_core.matmul(a, b).float().square().sum())(a[0])
        assert slope.dtype is FP32
    assert found.dtype is wanted.dtype is given.dtype is dtype
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)
    expected = a[0] @ b.float() + bias[0]
    torch.testing.assert_close(given.float(), expected.expand(2, 3, 6), rtol=5e-2, atol=5e-2)


# -- meta tensors --------------------------------------------------------------------------


def each_way(call: Callable[[str], Tensor]) -> None:
    """Make a call on meta tensors, on a CPU, and on meta tensors again."""
    shapes = [call(device) for device in ("meta", "cpu", "meta")]
    with torch.autocast("cpu"):
        call("meta")
    for y, device in zip(shapes, ("meta", "cpu", "meta"), strict=True):
        assert y.device.type == device
        assert (y.shape, y.dtype, y.stride()) == (shapes[1].shape, shapes[1].dtype, y.stride())
    assert shapes[0].stride() == shapes[2].stride()


@pytest.mark.parametrize("epilogue", [None, "silu", "swiglu", "relu+silu"])
@pytest.mark.parametrize("grad", [False, True])
def test_meta_tensors_have_the_result_of_a_cpu(epilogue: str | None, grad: bool) -> None:
    def given(*shape: int, device: str, dtype: torch.dtype = FP32) -> Tensor:
        return randn(*shape, dtype=dtype).to(device).requires_grad_(grad)

    width = 3 if epilogue == "swiglu" else 6
    each_way(lambda d: tmm_core.matmul(
        given(4, 8, device=d), given(8, 6, device=d), epilogue=epilogue,
        residual=given(4, width, device=d),
    ))  # fmt: skip
    each_way(lambda d: tmm_core.linear(
        given(2, 4, 8, device=d), given(6, 8, device=d), given(6, device=d), epilogue=epilogue,
    ))  # fmt: skip
    each_way(lambda d: tmm_core.grouped_matmul(
        given(4, 8, device=d), given(2, 8, 6, device=d), offs=OFFS.to(d), epilogue=epilogue,
        out_index=torch.arange(4, device=d), out_weights=given(4, device=d),
    ))  # fmt: skip
    each_way(lambda d: tmm_core.grouped_matmul(
        given(2, 2, 8, device=d), given(2, 8, 6, device=d), epilogue=epilogue,
    ))  # fmt: skip


@pytest.mark.parametrize("grad", [False, True])
def test_layers_on_meta(grad: bool) -> None:
    layers = {
        device: [
            Experts(4, 8, 12, bias=True, device=device).requires_grad_(grad),
            GatedMLP(8, 12, device=device).requires_grad_(grad),
            Linear(8, 4, epilogue="silu", device=device).requires_grad_(grad),
        ]
        for device in ("meta", "cpu")
    }
    chosen, weights = torch.tensor([[0, 4], [1, 4]]), torch.ones(2, 2)
    for place in range(3):
        more = [chosen, weights] if place == 0 else []
        each_way(lambda d, place=place, more=more: layers[d][place](
            torch.ones(2, 8, device=d), *[t.to(d) for t in more]
        ))  # fmt: skip
    y = layers["meta"][0](torch.ones(2, 8, device="meta"), chosen.to("meta"), weights.to("meta"))
    if grad:
        y.sum().backward()
        assert layers["meta"][0].down_proj.grad.is_meta


def test_an_operand_on_another_device_is_refused_after_a_warm_call() -> None:
    a, b, bias = randn(4, 8), randn(8, 6), randn(6)
    tmm_core.matmul(a, b, bias=bias)
    for given in ((a.to("meta"), b, bias), (a, b.to("meta"), bias), (a, b, bias.to("meta"))):
        with pytest.raises(RuntimeError, match="to be on the same device"):
            tmm_core.matmul(*given[:2], bias=given[2])


def test_outputs_and_out_on_meta() -> None:
    a, b = randn(4, 8, dtype=FP32).to("meta"), randn(8, 6, dtype=FP32).to("meta")
    out = torch.empty(4, 6, device="meta")
    assert tmm_core.matmul(a, b, out=out) is out
    with pytest.raises(RuntimeError, match="Expected out tensor"):
        tmm_core.matmul(a, b, out=out.double())


GROUPED: dict[str, Tensor] = {
    "a": randn(4, 8), "b": randn(2, 8, 6), "offs": OFFS, "bias": randn(2, 6),
    "residual": randn(4, 6), "a_index": torch.arange(4), "out_index": torch.arange(4),
    "out_weights": torch.ones(4, dtype=BF16),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("name", GROUPED)
def test_grouped_calls_refuse_tensors_without_strides(name: str) -> None:
    """Such tensors are refused even after a call with the same shapes, and as meta tensors."""
    tmm_core.grouped_matmul(**GROUPED)
    ways = [Tensor.to_sparse, *[Tensor.to_sparse_csr] * (GROUPED[name].dim() == 2)]
    if GROUPED[name].dim() == 2:
        ways.append(lambda t: torch.nested.as_nested_tensor([t[:1], t[1:]], layout=torch.jagged))
    for way in ways:
        call = GROUPED | {name: way(GROUPED[name])}
        for more in ({}, {"bias": recording(GROUPED["bias"])}, {"out": randn(4, 6)}):
            if name not in more:
                with pytest.raises(RuntimeError, match="kernels take dense tensors"):
                    tmm_core.grouped_matmul(**(call | more))
        with pytest.raises(RuntimeError, match="kernels take dense tensors"):
            tmm_core.grouped_matmul(**{n: on_meta(t) for n, t in call.items()})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_scale_or_out_without_strides_is_refused(device: str) -> None:
    a, b, scale = randn(4, 8), randn(8, 6), torch.ones(1)
    sparse = scale.to_sparse().to(device)
    with pytest.raises(RuntimeError, match="kernels take dense tensors"):
        tmm_core.matmul(a.to(device), b.to(device), out=randn(4, 6).to_sparse().to(device))
    a, b, scale = a.to(E4M3).to(device), b.to(E4M3).to(device), scale.to(device)
    tmm_core.matmul(a, b, scale_a=scale)
    with pytest.raises(RuntimeError, match="kernels take dense tensors"):
        tmm_core.matmul(a, b, scale_a=sparse)


# -- alpha ---------------------------------------------------------------------------------

NUMBERS: list[Any] = [
    2, True, 0, -1.5, np.float32(2), np.float64(0.5), np.float16(2), np.int64(3), np.int8(-2),
    np.bool_(True), np.longdouble(0.5), np.complex64(2), 2 + 0j, torch.tensor(2.0),
    torch.tensor(3), torch.tensor(True),
]  # fmt: skip


def ways(a: Tensor, b: Tensor, bias: Tensor, alpha: Any) -> dict[str, Callable[[], Tensor]]:
    return {
        "matmul": lambda: tmm_core.matmul(a, b, bias=bias, alpha=alpha),
        "recorded": lambda: tmm_core.matmul(recording(a), b, bias=bias, alpha=alpha),
        "linear": lambda: tmm_core.linear(a, b.t().contiguous(), bias, alpha=alpha),
        "linear, recorded": lambda: tmm_core.linear(a, recording(b.t()), bias, alpha=alpha),
        "plan": lambda: tmm_core.plan(a, b, bias=bias, alpha=alpha)(a, b, bias),
        "grouped": lambda: tmm_core.grouped_matmul(
            a, b[None], offs=torch.tensor([4], dtype=torch.int32), bias=bias, alpha=alpha
        ),
        "batch": lambda: tmm_core.grouped_matmul(a[None], b[None], bias=bias, alpha=alpha)[0],
        "forced": lambda: tmm_core.matmul(a, b, bias=bias, alpha=alpha, kernel="blas"),
    }


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # torch's, for complex64
@pytest.mark.parametrize("alpha", NUMBERS, ids=lambda value: f"{type(value).__name__} {value}")
def test_alpha_takes_the_numbers_that_addmm_takes(alpha: Any) -> None:
    a, b, bias = randn(4, 8, dtype=FP32), randn(8, 6, dtype=FP32), randn(6, dtype=FP32)
    wanted = torch.addmm(bias, a, b, alpha=alpha)
    for name, call in ways(a, b, bias, alpha).items():
        torch.testing.assert_close(call().detach(), wanted, msg=lambda text, n=name: f"{n}: {text}")
    assert tmm_core.problem(a, b, alpha=alpha).scaled is bool(complex(alpha) != 1)


@pytest.mark.parametrize("alpha", [1e39, -3.5e38, np.float64(1e300)])
@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16, torch.float64])
def test_alpha_beyond_fp32_is_for_fp64(dtype: torch.dtype, alpha: float) -> None:
    a, b, bias = randn(4, 8, dtype=dtype), randn(8, 6, dtype=dtype), randn(6, dtype=dtype)
    largest = torch.finfo(FP32).max
    usual = ways(a, b, bias, largest)
    for name, call in ways(a, b, bias, alpha).items():
        usual[name]()  # its plan must not answer the next call
        if dtype is torch.float64:
            torch.testing.assert_close(call().detach(), torch.addmm(bias, a, b, alpha=alpha))
        else:
            with pytest.raises(RuntimeError, match="value cannot be converted to type float with"):
                call()
    assert not tmm_core.matmul(a.abs(), b.abs(), alpha=float("inf")).isfinite().any()


@pytest.mark.parametrize("alpha", [np.float32(2), np.int64(2), True])
def test_alpha_of_compiled_calls(alpha: Any) -> None:
    a, b = randn(4, 8, dtype=FP32), randn(8, 6, dtype=FP32)
    torch.compiler.reset()
    function = torch.compile(lambda a, s: tmm_core.matmul(a, b, alpha=s), backend="aot_eager")
    torch.testing.assert_close(function(a, alpha), float(alpha) * (a @ b))


SYMBOLIC: dict[str, Callable[[Tensor, Any], Any]] = {
    "an integer": lambda a, s: s,
    "a size": lambda a, s: a.shape[0],
    "a product": lambda a, s: a.shape[0] * s,
    "a comparison": lambda a, s: a.shape[0] > s,
}


@pytest.mark.parametrize("kind", SYMBOLIC)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.slow(quick=6)
def test_alpha_is_a_symbol_of_a_compiled_graph(kind: str, grouped: bool) -> None:
    b, of = randn(2, 8, 6, dtype=FP32), SYMBOLIC[kind]
    offs = torch.tensor([2, 9], dtype=torch.int32)

    def call(a: Tensor, s: int) -> Tensor:
        if grouped:
            return tmm_core.grouped_matmul(a, b, offs=offs, alpha=of(a, s))
        return tmm_core.matmul(a, b[0], alpha=of(a, s))

    torch.compiler.reset()
    function = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for m, s in ((4, 3), (5, 7), (9, 2)):
        a = randn(m, 8, dtype=FP32)
        torch.testing.assert_close(function(a, s), call(a, s))
        if not grouped:
            torch.testing.assert_close(function(a, s), of(a, s) * (a @ b[0]))


@pytest.mark.parametrize(
    "alpha",
    [
        "2",
        None,
        np.ones(()),
        np.ones(1),
        np.str_("2"),
        np.timedelta64(1, "s"),
        torch.ones(1),
        [2.0],
        1j,
        2**70,
    ],
)
def test_alpha_is_refused_where_addmm_refuses_it(alpha: Any) -> None:
    a, b, bias = randn(4, 8, dtype=FP32), randn(8, 6, dtype=FP32), randn(6, dtype=FP32)
    wanted = outcome(lambda: torch.addmm(bias, a, b, alpha=alpha))
    offs = torch.tensor([4], dtype=torch.int32)
    for call in (
        lambda: tmm_core.matmul(a, b, bias=bias, alpha=alpha),
        lambda: tmm_core.matmul(recording(a), b, bias=bias, alpha=alpha),
        lambda: tmm_core.linear(a, b.t(), bias, alpha=alpha),
        lambda: tmm_core.grouped_matmul(a, b[None], offs=offs, alpha=alpha),
        lambda: tmm_core.plan(a, b, alpha=alpha),
        lambda: tmm_core.problem(a, b, alpha=alpha),
    ):
        found = outcome(call)
        assert type(found) is type(wanted), found


def test_a_complex_alpha_of_complex_operands() -> None:
    a, b = randn(4, 8).to(torch.complex64), randn(8, 6).to(torch.complex64)
    wanted = 2j * (a @ b)
    for x in (a, recording(a)):
        torch.testing.assert_close(tmm_core.matmul(x, b, alpha=2j).detach(), wanted)
    out = torch.empty_like(wanted)
    assert tmm_core.matmul(a, b, alpha=2j, out=out) is out
    torch.testing.assert_close(out, wanted)


def test_integers_are_scaled_as_integers() -> None:
    a, b = torch.tensor([[2**30 + 1]]), torch.tensor([[1]])
    for alpha, wanted in ((2, 2**31 + 2), (2.0, 2**31 + 2), (2.5, 2**31 + 2), (-1.0, -(2**30) - 1)):
        assert int(tmm_core.matmul(a, b, alpha=alpha)) == wanted
        torch.compiler.reset()
        assert int(torch.ops.tmm.matmul(a, b, None, None, alpha)) == wanted
        biased = tmm_core.matmul(a, b, bias=torch.tensor([5]), alpha=alpha)
        assert int(biased) == wanted + 5


def of_integers(a: Tensor, b: Tensor, alpha: Any) -> dict[str, Callable[[], Tensor]]:
    """Products of one number each, by every path that computes integers."""
    out = torch.full_like(a, 7)
    return {
        "plain": lambda: tmm_core.matmul(a, b, alpha=alpha),
        "bias": lambda: tmm_core.matmul(a, b, bias=torch.zeros_like(a[0]), alpha=alpha),
        "out": lambda: tmm_core.matmul(a, b, alpha=alpha, out=out),
        "forced": lambda: tmm_core.matmul(a, b, alpha=alpha, kernel="blas"),
        "plan": lambda: tmm_core.plan(a, b, alpha=alpha)(a, b),
        "linear": lambda: tmm_core.linear(a, b, alpha=alpha),
        "rows": lambda: tmm_core.linear(a[None], b, alpha=alpha),
        "batch": lambda: tmm_core.grouped_matmul(a[None], b[None], alpha=alpha),
        "vmap": lambda: torch.vmap(lambda t: tmm_core.matmul(t, b, alpha=alpha))(a[None]),
        "operator": lambda: torch.ops.tmm.matmul(a, b, None, None, alpha),
    }


@pytest.mark.parametrize(
    ("dtype", "alpha"),
    [(torch.int64, 2**53 + 1), (torch.int64, -(2**62) - 1), (torch.uint8, -1), (torch.int8, 5.9),
     (torch.int16, -(2**15))],
)  # fmt: skip
def test_integers_take_every_alpha_of_their_dtype(dtype: torch.dtype, alpha: Any) -> None:
    one, zero = torch.ones(1, 1, dtype=dtype), torch.zeros(1, dtype=dtype)
    wanted = int(torch.addmm(zero, one, one, alpha=alpha))
    for name, call in of_integers(one, one, alpha).items():
        assert int(call()) == wanted, name
    torch.compiler.reset()
    whole = torch.compile(lambda t: tmm_core.matmul(t, t, alpha=alpha), backend="aot_eager")
    assert int(whole(one)) == wanted


@pytest.mark.parametrize(
    ("dtype", "alpha"),
    [(torch.int32, 2**31), (torch.uint8, 300), (torch.int64, 2**63), (torch.int64, math.nan),
     (torch.int16, 1e30), (torch.uint8, -1.5), (torch.int8, math.inf)],
)  # fmt: skip
def test_integers_refuse_an_alpha_beyond_their_dtype(dtype: torch.dtype, alpha: Any) -> None:
    one, zero = torch.ones(1, 1, dtype=dtype), torch.zeros(1, dtype=dtype)
    wanted = outcome(lambda: torch.addmm(zero, one, one, alpha=alpha))
    assert isinstance(wanted, RuntimeError)
    for name, call in of_integers(one, one, alpha).items():
        found = outcome(call)
        assert (type(found), str(found)) == (RuntimeError, str(wanted)), f"{name}: {found!r}"
    out = torch.full_like(one, 7)
    with pytest.raises(RuntimeError, match="without overflow"):
        tmm_core.matmul(one, one, alpha=alpha, out=out)
    assert int(out) == 7


def by_torch(a: Tensor, b: Tensor, alpha: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Products whose ``alpha`` is a tensor that may be differentiated, or is a graph's."""
    own = recording(alpha) if alpha.is_floating_point() or alpha.is_complex() else alpha
    one = torch.ones(())
    return {
        "recorded": lambda: tmm_core.matmul(a, b, alpha=own).detach(),
        "linear": lambda: tmm_core.linear(a, b.t(), alpha=own).detach(),
        "vmap": lambda: torch.vmap(lambda t: tmm_core.matmul(t, b, alpha=alpha))(a[None])[0],
        "within jvp": lambda: torch.func.jvp(
            lambda t: (tmm_core.matmul(a, b, alpha=alpha), t), (one,), (one,)
        )[0][0],
        "compiled": lambda: torch.compile(tmm_core.matmul, backend="eager")(a, b, alpha=alpha),
    }  # fmt: skip


@pytest.mark.parametrize("alpha", [2.5, -1.0, 3, 1e30, math.nan, 2**40])
def test_a_tensor_scales_integers_as_its_number_does(alpha: Any) -> None:
    a, b = torch.arange(12, dtype=torch.int32).view(3, 4), torch.ones(4, 2, dtype=torch.int32)
    wanted = outcome(lambda: torch.addmm(b[:1], a, b, beta=0, alpha=alpha))
    torch.compiler.reset()
    for name, call in by_torch(a, b, torch.tensor(alpha)).items():
        found = outcome(call)
        if isinstance(wanted, Exception):
            assert (type(found), str(found)) == (RuntimeError, str(wanted)), f"{name}: {found!r}"
        else:
            assert torch.equal(found, wanted), name


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.int32])
def test_a_complex_tensor_scales_no_real_product(dtype: torch.dtype) -> None:
    a, b = torch.ones(3, 4, dtype=dtype), torch.ones(4, 2, dtype=dtype)
    alpha = torch.tensor(1 + 2j)
    torch.compiler.reset()
    for name, call in by_torch(a, b, alpha).items():
        found = outcome(call)
        assert isinstance(found, RuntimeError), f"{name}: {found!r}"
        assert "without overflow" in str(found), name
    for name, call in by_torch(a.cfloat(), b.cfloat(), alpha).items():
        assert torch.equal(call(), torch.full((3, 2), 4 + 8j)), name


# -- scales --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("batch", [(), (1,), (2,)])
def test_one_number_may_have_any_number_of_dimensions(
    shape: tuple[int, ...], batch: tuple[int, ...]
) -> None:
    a, b = randn(*batch, 4, 8).to(E4M3), randn(8, 6).to(E4M3)
    scale = torch.full(shape, 0.5)
    wanted = (0.5 * (a.float() @ b.float())).to(BF16)
    y = tmm_core.matmul(a, b, scale_a=scale)
    assert y.shape == wanted.shape
    torch.testing.assert_close(y, wanted)
    out = torch.empty_like(wanted)
    torch.testing.assert_close(tmm_core.matmul(a, b, scale_b=scale, out=out), wanted)


# -- gradients are torch's -----------------------------------------------------------------


def test_a_call_in_parts_gives_torchs_gradients() -> None:
    a, w, bias = (recording(randn(*s, dtype=FP64)) for s in ((4, 8), (6, 8), (6,)))
    residual = recording(randn(6, dtype=FP64))
    for epilogue, torchs in (("silu", F.silu), ("relu", F.relu), ("tanh", torch.tanh)):
        y = tmm_core.linear(a, w, bias, residual=residual, alpha=0.5, epilogue=epilogue)
        wanted = torchs(0.5 * (a @ w.t()) + bias) + residual
        torch.testing.assert_close(y, wanted)
        given = (a, w, bias, residual)
        for one, other in zip(
            torch.autograd.grad(y.sum(), given), torch.autograd.grad(wanted.sum(), given),
            strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(one, other)
