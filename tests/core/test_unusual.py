"""Operands without strides, biases of torch's other shapes, and arguments of other types."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tmm_core
from tmm_core.nn import GatedMLP, Linear, convert

Tensor = torch.Tensor

A, B, SQUARE = torch.randn(4, 6), torch.randn(6, 3), torch.randn(4, 4)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((2, 2)),
}


@pytest.fixture(autouse=True)
def _betas_are_silent() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*(Sparse|prototype|nested).*")
        yield


def jagged(*lengths: int, width: int = 6) -> Tensor:
    rows = [torch.randn(n, width) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True])
def test_sparse_operands_are_torchs(layout: str, grad: bool) -> None:
    if grad and layout == "bsr":
        pytest.skip("torch has no derivative of it")
    sparse = LAYOUTS[layout]
    dense = torch.randn(4, 3, requires_grad=grad)
    y = tmm_core.matmul(sparse(SQUARE), dense, bias=torch.ones(3), alpha=2.0, epilogue="relu")
    torch.testing.assert_close(y, torch.relu(2.0 * (SQUARE @ dense) + 1.0))
    if grad:
        (got,) = torch.autograd.grad(y.sum(), dense)
        torch.testing.assert_close(got, 2.0 * SQUARE.t() @ (y > 0).float())
    else:
        y = tmm_core.linear(dense.t(), sparse(SQUARE))
        torch.testing.assert_close(y, F.linear(dense.t(), SQUARE))


def test_a_product_of_sparse_ones_is_sparse() -> None:
    for layout in ("coo", "csr"):
        a, b = LAYOUTS[layout](A), LAYOUTS[layout](B)
        y = tmm_core.matmul(a, b)
        assert y.layout == torch.matmul(a, b).layout
        torch.testing.assert_close(y.to_dense(), A @ B)


def test_jagged_and_nested_operands() -> None:
    x, w, bias = jagged(2, 3), torch.randn(4, 6), torch.randn(4)
    expected = [F.gelu(F.linear(rows, w, bias)) for rows in x.unbind()]
    strided = torch.nested.nested_tensor([t.clone() for t in x.unbind()])
    for given in (x, strided):
        y = tmm_core.linear(given, w, bias, epilogue="gelu")
        assert y.is_nested
        assert y.layout == given.layout
        for got, rows in zip(y.unbind(), expected, strict=True):
            torch.testing.assert_close(got, rows)
    doubled = [t.relu() * 2 for t in tmm_core.matmul(x, w.t()).unbind()]
    both = tmm_core.matmul(x, w.t(), epilogue="relu", alpha=2.0, out_dtype=torch.float64)
    assert both.dtype is torch.float64
    for got, rows in zip(both.unbind(), doubled, strict=True):
        torch.testing.assert_close(got.float(), rows)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu"])
def test_nested_operands_are_gated(activation: str, layout: torch.layout) -> None:
    x, mlp = torch.randn(5, 6), GatedMLP(6, 8, activation)
    rows = torch.nested.nested_tensor([x[:2], x[2:]], layout=layout)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(mlp(rows).unbind()), mlp(x))


def test_jagged_operands_in_layers_and_compiled() -> None:
    x, layer, mlp = jagged(2, 3), Linear(6, 8, epilogue="silu"), GatedMLP(6, 8)
    halves = F.linear(x.values(), mlp.gate_proj.weight), F.linear(x.values(), mlp.up_proj.weight)
    by_hand = (
        F.silu(F.linear(x.values(), layer.weight, layer.bias)),
        F.linear(F.silu(halves[0]) * halves[1], mlp.down_proj.weight),
    )
    for module, expected in zip((layer, mlp), by_hand, strict=True):
        y = module(x)
        assert [len(rows) for rows in y.unbind()] == [2, 3]
        torch.testing.assert_close(y.values(), expected)
        grad, wanted = torch.randn_like(expected), [*module.parameters()]
        for got, theirs in zip(
            torch.autograd.grad(y.values(), wanted, grad),
            torch.autograd.grad(expected, wanted, grad),
            strict=True,
        ):
            torch.testing.assert_close(got, theirs)
    compiled = torch.compile(
        lambda t: tmm_core.linear(t, layer.weight), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(x).values(), F.linear(x.values(), layer.weight))


def test_mkldnn_operands() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without mkldnn")
    y = tmm_core.linear(A.to_mkldnn(), B.t().contiguous().to_mkldnn(), torch.ones(3).to_mkldnn())
    assert y.is_mkldnn
    torch.testing.assert_close(y.to_dense(), A @ B + 1)


ONE = torch.ones((), requires_grad=True)
UNDER_AUTOCAST: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a bias of one number": lambda x, w, b: tmm_core.linear(x, w, b[:1]),
    "a bias for each row": lambda x, w, b: tmm_core.linear(x, w, b.expand(4, 3)),
    "a sparse operand": lambda x, w, b: tmm_core.matmul(x.to_sparse(), w.t(), bias=b),
    "a batch": lambda x, w, b: tmm_core.grouped_matmul(x[None], w.t()[None], bias=b[None])[0],
    "an alpha with a gradient": lambda x, w, b: tmm_core.linear(x, w, b, alpha=ONE).detach(),
}


@pytest.mark.parametrize("case", UNDER_AUTOCAST)
@pytest.mark.parametrize("dtypes", [*itertools.product((torch.float32, torch.bfloat16), repeat=3)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.slow(quick=8)
def test_operands_of_several_dtypes_under_autocast(
    case: str, dtypes: tuple[torch.dtype, ...], compiled: bool
) -> None:
    """Torch computes a part of these calls, before its dispatcher casts anything."""
    if compiled and case == "a sparse operand":
        pytest.skip("torch compiles no sparse tensor")
    given = [t.to(d) for t, d in zip((A, B.t(), torch.randn(3)), dtypes, strict=True)]
    x, w, b = (t.bfloat16() for t in given)
    bias = b[:1] if case == "a bias of one number" else b
    torch.compiler.reset()
    call = UNDER_AUTOCAST[case]
    if compiled:
        call = torch.compile(call, backend="eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(*given)
    assert y.dtype is torch.bfloat16
    wanted = (x.double() @ w.double().t() + bias.double()).bfloat16()
    torch.testing.assert_close(y, wanted, atol=5e-2, rtol=2e-2)


def test_requests_that_sparse_operands_cannot_meet() -> None:
    sparse = A.to_sparse()
    with pytest.raises(
        tmm_core.UnsupportedProblemError, match=r"'triton\.naive' cannot serve sparse"
    ):
        tmm_core.matmul(sparse, B, kernel="triton.naive")
    with pytest.raises(RuntimeError, match=r"dense tensors, got one of layout torch\.sparse_coo"):
        tmm_core.plan(sparse, B)
    with pytest.raises(
        RuntimeError, match="scale_a and scale_b, and quantised operands, are for strided"
    ):
        tmm_core.matmul(sparse, B, scale_a=torch.ones(()))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        tmm_core.matmul(sparse, A)
    out = torch.empty(0)
    assert tmm_core.matmul(sparse, B, out=out, alpha=torch.tensor(2.0)) is out
    torch.testing.assert_close(out, 2 * (A @ B))


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    **LAYOUTS,
    "mkldnn": lambda t: t.to_mkldnn(),
    "jagged": lambda t: jagged(2, 2, width=t.shape[-1]),
    "nested": lambda t: torch.nested.nested_tensor([*t[None]]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        ({"bias": torch.randn(3).double()}, RuntimeError, "bias must have dtype"),
        ({"residual": torch.randn(4, 3).half()}, RuntimeError, "residual must have dtype"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype must be a floating dtype"),
        ({"epilogue": "swiglu"}, ValueError, "needs b of width 2N"),
        ({"bias": torch.randn(5)}, ValueError, "bias must have shape"),
        ({"bias": torch.randn(2, 4, 3)}, ValueError, "bias must have shape"),
        ({"residual": torch.randn(2, 4, 3)}, ValueError, "residual of shape"),
        ({"residual": torch.randn(2, 4, 3), "alpha": 2.0}, ValueError, "residual of shape"),
        ({"bias": torch.randn(2, 4, 3), "alpha": 2.0}, ValueError, "bias must have shape"),
    ],
)  # fmt: skip
def test_calls_that_are_refused_when_dense_are_refused(
    form: str, more: Any, kind: Any, message: str
) -> None:
    x = FORMS[form](torch.randn(4, 4))
    if x.is_nested and "shape" in message:
        kind, message = RuntimeError, "."  # as torch says it
    for call in (
        lambda w: tmm_core.linear(x, w, **more),
        lambda w: tmm_core.matmul(x, w.t(), **more),
        lambda w: tmm_core.linear(x, w.requires_grad_(), **more),
    ):
        with pytest.raises(kind, match=message):
            call(torch.randn(3, 4))


class Quantised(Tensor):
    """A weight of another library: it multiplies, and is not transposed."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: Any = (), more: Any = None
    ) -> Any:
        if function is not F.linear:
            if function in (Tensor.t, torch.ops.tmm.matmul.default):
                raise NotImplementedError
            return super().__torch_function__(function, types, given, more or {})
        x, weight, *bias = given
        return F.linear(x, weight.as_subclass(Tensor).to(x.dtype), *bias)


@pytest.mark.parametrize(
    ("more", "kind", "message"),
    [
        ({"bias": torch.ones(3).double()}, RuntimeError, "bias must have dtype"),
        ({"bias": torch.ones(2, 4, 3), "alpha": 2.0}, ValueError, "bias must have shape"),
        ({"residual": torch.ones(4, 3).half()}, RuntimeError, "residual must have dtype"),
        ({"residual": torch.ones(2, 4, 3)}, ValueError, "residual of shape"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype must be a floating dtype"),
        ({"epilogue": "swiglu"}, ValueError, "needs b of width 2N"),
    ],
)
def test_a_weight_of_another_type_may_have_another_dtype(
    more: Any, kind: Any, message: str
) -> None:
    x, w = A.double(), B.t().contiguous().bfloat16().as_subclass(Quantised)
    expected = F.linear(x, B.t().bfloat16().double()) + 1
    y = tmm_core.linear(x, w, torch.ones(3, dtype=torch.float32).double(), residual=torch.zeros(3))
    torch.testing.assert_close(y, expected)
    with pytest.raises(kind, match=message):
        tmm_core.linear(x.float() if "dtype" in message else x, w, **more)


class Own(Tensor):
    """A tensor of another library: torch's products take it, and few other operators."""

    numbers: Tensor
    takes = (torch.matmul, F.linear)
    #: The answer to other operators: an exception to raise, or NotImplemented.
    answer: Any = NotImplemented

    @staticmethod
    def __new__(cls, numbers: Tensor) -> Any:
        own: Any = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=numbers.dtype)  # type: ignore[attr-defined]
        own.numbers = numbers
        return own

    def __init__(self, numbers: Tensor) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: Any = (), more: Any = None
    ) -> Any:
        if function in cls.takes:
            return function(*(t.numbers if isinstance(t, Own) else t for t in given))
        return super().__torch_function__(function, types, given, more)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, given: Any = (), more: Any = None
    ) -> Any:
        if cls.answer is NotImplemented:
            return NotImplemented
        raise cls.answer


@pytest.mark.parametrize("answer", [NotImplemented, NotImplementedError()], ids=["none", "raised"])
@pytest.mark.parametrize("which", ["input", "weight", "bias"])
def test_a_type_without_tmms_operators_multiplies_itself(
    which: str, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Own, "answer", answer)
    x, w, bias = A, B.t().contiguous(), torch.ones(3)
    expected = F.relu(x @ w.t() + bias)
    given = {"input": x, "weight": w, "bias": bias}
    given[which] = Own(given[which])
    y = tmm_core.linear(given["input"], given["weight"], given["bias"], epilogue="relu")
    torch.testing.assert_close(y, expected)
    with pytest.raises(tmm_core.UnsupportedProblemError, match="cannot serve a tensor of type Own"):
        tmm_core.linear(given["input"], given["weight"], given["bias"], kernel="triton.naive")
    if which == "bias":
        return  # torch.matmul adds none
    given["weight"] = B if which == "input" else Own(B)
    out = torch.empty(4, 3)
    y = tmm_core.matmul(given["input"], given["weight"], bias=bias, epilogue="relu", out=out)
    assert y is out
    torch.testing.assert_close(y, expected)
    with pytest.raises(tmm_core.UnsupportedProblemError, match="cannot serve a tensor of type Own"):
        tmm_core.matmul(given["input"], given["weight"], kernel="triton.naive")
    with pytest.raises(RuntimeError, match="must have dtype"):
        tmm_core.matmul(given["input"], given["weight"], bias=bias.half())


def test_so_does_a_residual_of_such_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "takes", (*Own.takes, Tensor.add))
    residual = torch.randn(4, 3)
    expected = F.relu(A @ B) + residual
    for function, b in ((tmm_core.matmul, B), (tmm_core.linear, B.t())):
        torch.testing.assert_close(
            function(A, b, residual=Own(residual), epilogue="relu"), expected
        )
        with pytest.raises(tmm_core.UnsupportedProblemError, match="a tensor of type Own"):
            function(A, b, residual=Own(residual), kernel="triton.naive")


class Few(Tensor):
    """A tensor of another library that knows the functions of a model's layers, and no others."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: Any = (), more: Any = None
    ) -> Any:
        known = function in (F.linear, F.silu, F.relu, torch.relu, Tensor.mul, Tensor.dim)
        if not known and getattr(function, "__name__", "") != "__get__":
            raise TypeError(f"Few has no {function}")
        return super().__torch_function__(function, types, given, more or {})


class Interval:
    """Bounds of a tensor: no tensor, but torch's functions take it."""

    def __init__(self, low: Tensor, high: Tensor) -> None:
        self.bounds = low, high

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, given: Any = (), more: Any = None
    ) -> Any:
        x, *rest = given
        low, high = x.bounds
        if function is not F.linear:
            return cls(function(low), function(high))
        weight, bias = rest
        middle = F.linear((low + high) / 2, weight, bias)
        wide = F.linear((high - low) / 2, weight.abs())
        return cls(middle - wide, middle + wide)


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_converted_layers_need_no_more_of_a_type_than_torchs(gated: bool, grad: bool) -> None:
    layers = torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)
    model = Gated() if gated else torch.nn.Sequential(*layers)
    x = torch.randn(2, 4)
    with torch.set_grad_enabled(grad):
        expected = model(x)
        assert convert(model).changes
        y = model(x.as_subclass(Few))
        assert type(y) is Few
        torch.testing.assert_close(y.as_subclass(Tensor), expected)


def test_converted_layers_take_objects_that_torchs_functions_take() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    x: Any = Interval(torch.zeros(2, 4), torch.ones(2, 4))
    expected = model(x).bounds
    convert(model)
    torch.testing.assert_close(model(x).bounds, expected)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_the_result_of_a_sparse_operand_has_the_dtype_of_a_dense_ones(dtype: Any) -> None:
    a, b = SQUARE.bfloat16(), torch.randn(4, 3).bfloat16()
    call: Any = {"residual": torch.randn(4, 3), "epilogue": "relu", "out_dtype": dtype}
    expected, y = tmm_core.matmul(a, b, **call), tmm_core.matmul(a.to_sparse(), b, **call)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match="needs a floating dtype"):
        tmm_core.matmul(a.long().to_sparse(), b.long(), epilogue="relu")


SHAPES = [
    (),
    (1,),
    (3,),
    (1, 3),
    (1, 1, 3),
    (4, 3),
    (4, 1),
    (2, 4, 3),
    (2, 1, 1),
    (4,),
    (2,),
    (5, 3),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("of_x", [(6,), (4, 6), (2, 4, 6)], ids=str)
def test_a_bias_has_the_shapes_that_linear_takes(
    shape: tuple[int, ...], of_x: tuple[int, ...]
) -> None:
    x, w, shape_of_y = torch.randn(of_x), torch.randn(3, 6), (*of_x[:-1], 3)
    bias = torch.randn(shape, requires_grad=True)
    try:
        # Torch's answer depends on x's strides too; where it has one, it is this.
        torchs = F.linear(x, w, bias).detach()
    except RuntimeError:
        torchs = None
    one_row = shape == (1, 3) and len(of_x) == 1
    if not one_row and torch.broadcast_shapes(*_fitting(shape, shape_of_y)) != shape_of_y:
        assert torchs is None
        with pytest.raises(ValueError, match=r"bias must have shape \(3,\) or broadcast"):
            tmm_core.linear(x, w, bias)
        return
    product = F.linear(x, w)
    expected = (product + bias).detach().reshape(shape_of_y)
    if torchs is not None:
        torch.testing.assert_close(torchs, expected)
    torch.testing.assert_close(tmm_core.linear(x, w, bias), expected)
    with torch.no_grad():
        torch.testing.assert_close(tmm_core.linear(x, w, bias), expected)
        out = torch.empty_like(expected)
        tmm_core.linear(x, w, bias, out=out)
        torch.testing.assert_close(out, expected)
    residual = torch.randn(shape_of_y)
    y = tmm_core.linear(x, w, bias, alpha=2.0, epilogue="gelu", residual=residual)
    reference = F.gelu(2 * product + bias).reshape(shape_of_y) + residual
    torch.testing.assert_close(y, reference)
    (got,), (right,) = (torch.autograd.grad(t.sum(), bias) for t in (y, reference))
    torch.testing.assert_close(got, right)


@pytest.mark.parametrize("given_out", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 3), (5, 1), (1, 3), (1,)], ids=str)
def test_a_wider_bias_leaves_the_dtype_of_the_result(
    shape: tuple[int, ...], dtype: Any, given_out: bool
) -> None:
    x, w = torch.randn(5, 6).to(torch.bfloat16), torch.randn(3, 6).to(torch.bfloat16)
    bias, residual = torch.randn(shape).to(dtype), torch.randn(5, 3).to(dtype)
    out = torch.empty(5, 3, dtype=torch.bfloat16) if given_out else None
    for more in ({}, {"epilogue": "relu"}, {"residual": residual, "epilogue": "silu"}):
        y = tmm_core.linear(x, w, bias, out=out, **more)  # type: ignore[arg-type]
        assert y is out or not given_out
        assert y.dtype is torch.bfloat16
        z = x.double() @ w.double().T + bias.double()
        apply: Any = {"relu": F.relu, "silu": F.silu, None: lambda z: z}[more.get("epilogue")]
        expected = apply(z) + (residual.double() if "residual" in more else 0)
        torch.testing.assert_close(y.double(), expected, rtol=2e-2, atol=4e-2)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (4,), (4, 1), (1, 4), (1, 1, 1)], ids=str)
def test_a_bias_of_the_product_by_a_vector(shape: tuple[int, ...]) -> None:
    x, v, bias = torch.randn(4, 6), torch.randn(6), torch.randn(shape)
    if len(shape) > 2 or shape in ((4, 1), (1, 4)):  # it would enlarge the result
        with pytest.raises(ValueError, match=r"bias must have shape \(1,\) or broadcast"):
            tmm_core.linear(x, v, bias)
        return
    expected = (x @ v + bias).reshape(4)
    torch.testing.assert_close(tmm_core.linear(x, v, bias), expected)
    out = torch.empty(4)
    torch.testing.assert_close(
        tmm_core.linear(x, v, bias, epilogue="relu", out=out), F.relu(expected)
    )


def _fitting(shape: tuple[int, ...], to: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Both, or a shape that is not ``to`` where they do not broadcast at all."""
    try:
        torch.broadcast_shapes(shape, to)
    except RuntimeError:
        return ((), ())
    return shape, to


def test_a_bias_of_another_shape_compiles() -> None:
    x, w, bias = torch.randn(4, 6), torch.randn(3, 6), torch.randn(1, 3)
    compiled = torch.compile(tmm_core.linear, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, w, bias), F.linear(x, w, bias))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tmm_core.matmul(A, B, bias=1.0), r"matmul\(\): argument 'bias' must be Tensor, not float"),
        (lambda: tmm_core.linear(A, B.t(), [1.0]), r"linear\(\): argument 'bias' must be Tensor, not list"),
        (lambda: tmm_core.linear(A, None), r"linear\(\): argument 'weight' must be Tensor, not NoneType"),
        (lambda: tmm_core.linear(2, B.t()), r"linear\(\): argument 'x' must be Tensor, not int"),
        (lambda: tmm_core.matmul(A, B, residual=1), r"argument 'residual' must be Tensor, not int"),
        (lambda: tmm_core.matmul(A, B, out=1), r"argument 'out' must be Tensor, not int"),
        (lambda: tmm_core.matmul(A, B, scale_a=1.0), r"argument 'scale_a' must be Tensor, not float"),
        (lambda: tmm_core.matmul(A, B, alpha="2"), r"argument 'alpha' must be Number, not str"),
        (lambda: tmm_core.plan(A, B, alpha=[2.0]), r"argument 'alpha' must be Number, not list"),
        (lambda: tmm_core.plan(1.0, B), r"plan\(\): argument 'a' must be Tensor, not float"),
        (lambda: tmm_core.problem(A, B, bias=1.0), r"problem\(\): argument 'bias' must be Tensor, not float"),
    ],
)  # fmt: skip
def test_arguments_of_other_types_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()
    torch.testing.assert_close(tmm_core.matmul(A, B), A @ B)  # and no kernel was blamed
