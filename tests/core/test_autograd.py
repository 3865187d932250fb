"""Derivatives of every kind, order and transform, against torch's own and against differences."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tmm_core
from tmm_core import TmmWarning, dispatch
from tmm_core.epilogues import BUILTIN, parse
from tmm_core.interop import autograd_state, epilogue_kernels
from tmm_core.launch import warm
from tmm_core.nn import SwiGLU
from tmm_core.spec.epilogue import Epilogue

Tensor = torch.Tensor

# Its own, where torch first differentiates forwards.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    # Numpy's, of what becomes infinite in a kernel and may.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

CUBE = Epilogue("cube", lambda z: z**3, derivative=lambda z: 3 * z**2)
PAIR = Epilogue(
    "pair", lambda gate, up: gate.sin() * up, gated=True,
    derivative=lambda gate, up: (gate.cos() * up, gate.sin()),
)  # fmt: skip
PLAIN = Epilogue("sine", lambda z: z.sin())
USERS: list[Any] = [CUBE, PAIR, PLAIN, [CUBE, "tanh"], ["relu", CUBE]]
EPILOGUES: list[Any] = [None, *BUILTIN, "gelu_tanh+softcap(2)", "swiglu+tanh", *USERS]


def name(epilogue: Any) -> str:
    if isinstance(epilogue, list):
        return "+".join(map(name, epilogue))
    return str(getattr(epilogue, "name", epilogue))


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def operands(epilogue: Any, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """a, b, bias and residual for a result of 3×2."""
    gated = dispatch.default_dispatcher().registry.epilogue(epilogue).gated
    width = 4 if gated else 2
    shapes = ((3, 5), (5, width), (width,), (3, 2))
    return tuple(leaf(*shape, dtype=dtype) for shape in shapes)


def calls(epilogue: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The whole expression by tmm, and by torch."""
    parsed = dispatch.default_dispatcher().registry.epilogue(epilogue)

    def ours(a: Tensor, b: Tensor, bias: Any = None, residual: Any = None) -> Tensor:
        return tmm_core.matmul(a, b, bias=bias, residual=residual, alpha=0.7, epilogue=epilogue)

    def theirs(a: Tensor, b: Tensor, bias: Any = None, residual: Any = None) -> Tensor:
        z = 0.7 * torch.matmul(a, b)
        z = z if bias is None else z + bias
        y = parsed.apply(z)
        return y if residual is None else y + residual

    return ours, theirs


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=name)
@pytest.mark.slow(quick=8)
def test_gradcheck(epilogue: Any) -> None:
    inputs = operands(epilogue)
    ours, _ = calls(epilogue)
    assert torch.autograd.gradcheck(ours, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(ours, inputs, check_fwd_over_rev=True)

    parsed = dispatch.default_dispatcher().registry.epilogue(epilogue)
    text = parsed.interned()

    def operator(*tensors: Tensor) -> Tensor:
        return torch.ops.tmm.matmul(*tensors, 0.7, text)

    assert torch.autograd.gradcheck(operator, inputs, check_forward_ad=True)


class _Seeing(torch.overrides.TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize(
    ("a", "b", "biased"),
    [
        ((4,), (4, 5), False),
        ((2, 3, 4), (4, 5), True),
        ((1, 1, 4), (4, 5), True),
        ((3, 4), (3, 4, 5), True),
    ],
    ids=str,
)
def test_a_result_is_modified_in_place_as_torchs(a: Any, b: Any, biased: bool, seen: bool) -> None:
    """``nn.ReLU(inplace=True)`` after a layer does so. A mode makes the result the operator's."""
    x, w, bias = leaf(*a), leaf(*b), leaf(5) if biased else None
    with _Seeing() if seen else contextlib.nullcontext():
        ours = tmm_core.matmul(x, w, bias=bias)
    theirs = torch.matmul(x, w) if bias is None else torch.matmul(x, w) + bias
    inputs = [t for t in (x, w, bias) if t is not None]
    found = []
    for y in (ours, theirs):
        y[..., 0] = 3.0
        y.mul_(2.0).relu_()
        found.append((y.detach(), torch.autograd.grad(y.square().sum(), inputs)))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=name)
@pytest.mark.slow(quick=6)
def test_gradients_in_16_bits_are_eagers_within_rounding(epilogue: Any, dtype: Any) -> None:
    inputs = operands(epilogue, dtype)
    ours, theirs = calls(epilogue)
    grad = torch.randn(3, 2, dtype=dtype)
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    truth = torch.autograd.grad(theirs(*exact), exact, grad.double())
    expected = torch.autograd.grad(theirs(*inputs), inputs, grad)
    got = torch.autograd.grad(ours(*inputs), inputs, grad)
    # Eager's own rounding, over sums of a handful of terms, sets the scale: of the terms, which may
    # cancel each other.
    terms = torch.autograd.grad(theirs(*exact), exact, grad.double().abs())
    for mine, eagers, exactly, term in zip(got, expected, truth, terms, strict=True):
        assert mine.dtype is dtype
        scale = torch.maximum(exactly.abs(), term.abs()).max() + 1
        bound = (eagers.double() - exactly).abs().max() + 8 * torch.finfo(dtype).eps * scale
        assert (mine.double() - exactly).abs().max() <= bound


def scalar(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: call(*inputs).pow(3).sum()


TRANSFORMS: dict[str, Callable[[Any, tuple[Tensor, ...]], Any]] = {
    "grad": lambda f, x: torch.func.grad(scalar(f), (0, 1, 2, 3))(*x),
    "vjp": lambda f, x: torch.func.vjp(f, *x)[1](torch.ones(3, 2, dtype=torch.float64)),
    "jvp": lambda f, x: torch.func.jvp(f, x, tuple(t + 1 for t in x)),
    "jvp of a": lambda f, x: torch.func.jvp(lambda a: f(a, *x[1:]), (x[0],), (x[0] + 1,)),
    "jvp of bias": lambda f, x: torch.func.jvp(lambda b: f(*x[:2], b, x[3]), x[2:3], x[2:3]),
    "jvp of residual": lambda f, x: torch.func.jvp(lambda r: f(*x[:3], r), x[3:], x[3:]),
    "jacrev": lambda f, x: torch.func.jacrev(f, (0, 1, 2, 3))(*x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f, (0, 1, 2, 3))(*x),
    "hessian": lambda f, x: torch.func.hessian(scalar(f), (0, 1))(*x),
    "reverse over reverse": lambda f, x: torch.func.jacrev(torch.func.grad(scalar(f)), 1)(*x),
    "reverse over forward": lambda f, x: torch.func.jacrev(torch.func.jacfwd(f), 1)(*x),
    "forward over forward": lambda f, x: torch.func.jacfwd(torch.func.jacfwd(f), 1)(*x),
    "per sample": lambda f, x: torch.vmap(torch.func.grad(scalar(f), (0, 1)), (0, None, None, 0))(
        x[0][None] * torch.arange(4.0).double()[:, None, None],
        *x[1:3],
        x[3].expand(4, 3, 2),
    ),
    "grad of vmap": lambda f, x: torch.func.grad(
        lambda a, b: torch.vmap(f, (0, None))(a, b).pow(3).sum(), (0, 1)
    )(torch.stack([x[0], x[0] * 2]), x[1]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("epilogue", [None, "tanh", "gelu", "swiglu", CUBE, PAIR], ids=name)
@pytest.mark.slow(quick=6)
def test_transforms_of_torch_func(transform: str, epilogue: Any) -> None:
    inputs = tuple(t.detach() for t in operands(epilogue))
    ours, theirs = calls(epilogue)
    apply = TRANSFORMS[transform]
    torch.testing.assert_close(apply(ours, inputs), apply(theirs, inputs))
    # Gradients outside the transform, too.
    tracked = tuple(t.requires_grad_() for t in inputs)

    def gradients(call: Any) -> tuple[Tensor, ...]:
        leaves = torch.utils._pytree.tree_leaves(apply(call, tracked))
        terms = [t.square().sum() for t in leaves if t.requires_grad]
        if not terms:  # the second derivative of a product is a constant
            terms = [(tracked[0].sum() + tracked[1].sum()) * 0]
        total = sum(terms[1:], terms[0])
        return torch.autograd.grad(total, tracked[:2], materialize_grads=True)

    torch.testing.assert_close(gradients(ours), gradients(theirs))


SHAPES = [
    ((5,), (5,)), ((3, 5), (5,)), ((5,), (5, 2)), ((4, 3, 5), (5, 2)), ((4, 3, 5), (5,)),
    ((5,), (4, 5, 2)), ((4, 1, 3, 5), (6, 5, 2)), ((3, 5), (4, 5, 2)), ((1, 3, 5), (4, 5, 2)),
    ((0, 5), (5, 2)), ((3, 0), (0, 2)), ((2, 0, 5), (2, 5, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("sa", "sb"), SHAPES)
@pytest.mark.parametrize("epilogue", [None, "tanh", "silu"])
@pytest.mark.slow(quick=6)
def test_every_shape_in_both_modes(sa: Any, sb: Any, epilogue: Any) -> None:
    a, b = leaf(*sa), leaf(*sb)
    ours, theirs = calls(epilogue)
    n = b.shape[-1] if b.dim() > 1 else 1
    bias, residual = leaf(n), leaf(*theirs(a, b).shape)
    if b.dim() == 1:  # a bias is one number then, and the result has no column for it
        expression = theirs

        def theirs(a: Tensor, b: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
            return expression(a, b, bias[0], residual)

    inputs = (a, b, bias, residual)
    y, expected = ours(*inputs), theirs(*inputs)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, inputs, grad), torch.autograd.grad(expected, inputs, grad)
    )
    for wanted in range(4):
        with forward_ad.dual_level():
            dual = [
                forward_ad.make_dual(t.detach(), torch.ones_like(t)) if i == wanted else t.detach()
                for i, t in enumerate(inputs)
            ]
            mine, eagers = (forward_ad.unpack_dual(f(*dual)).tangent for f in (ours, theirs))
            torch.testing.assert_close(mine, eagers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)])
def test_the_tangent_of_an_fp32_result_is_not_rounded(
    dtype: torch.dtype, wanted: tuple[int, ...]
) -> None:
    inputs = torch.randn(9, 40).to(dtype), torch.randn(40, 7).to(dtype)
    tangents = [torch.randn_like(t) for t in inputs]
    with forward_ad.dual_level():
        dual = [
            forward_ad.make_dual(t, tangents[i]) if i in wanted else t for i, t in enumerate(inputs)
        ]
        y = tmm_core.matmul(*dual, out_dtype=torch.float32)
        got = forward_ad.unpack_dual(y).tangent
    a, b, ta, tb = (t.double() for t in (*inputs, *tangents))
    expected = (ta @ b if 0 in wanted else 0) + (a @ tb if 1 in wanted else 0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


class TorchCalls(TorchDispatchMode):
    """Counts calls of the operator."""

    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.tmm.matmul.default
        return func(*args, **(kwargs or {}))


MAPPED: list[tuple[Any, Any, Any, Any]] = [
    (0, None, None, None), (None, 0, None, None), (0, 0, None, None), (1, -1, None, 0),
    (None, None, 0, None), (None, None, None, 0), (0, None, 0, None), (None, 0, 0, 0),
    (-1, None, None, 1), (0, 1, 1, 0), (None, None, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("sa", "sb"), SHAPES)
@pytest.mark.parametrize("in_dims", MAPPED, ids=str)
def test_vmap_is_one_call(sa: Any, sb: Any, in_dims: Any) -> None:
    epilogue = "swiglu" if len(sb) > 1 and sb[-1] % 2 == 0 else "gelu"
    ours, theirs = calls(epilogue)
    n = sb[-1] if len(sb) > 1 else 1
    out = theirs(torch.zeros(sa), torch.zeros(sb)).shape
    shapes = (sa, sb, (n,), out[1:] if in_dims == (None, None, 0, 0) else out)
    inputs = []
    for shape, dim in zip(shapes, in_dims, strict=True):
        t = torch.randn(shape if dim is None else (3, *shape), dtype=torch.float64)
        inputs.append(t if dim is None else t.movedim(0, dim if t.dim() > abs(dim) else 0))
    in_dims = tuple(
        d if d is None or t.dim() > abs(d) else 0 for d, t in zip(in_dims, inputs, strict=True)
    )

    def one(*index: Tensor) -> Tensor:
        a, b, bias, residual = index
        return theirs(a, b, bias if len(sb) > 1 else bias[0], residual)

    expected = torch.stack(
        [
            one(*(t if d is None else t.select(d, i) for t, d in zip(inputs, in_dims, strict=True)))
            for i in range(3)
        ]
    )
    with TorchCalls() as seen:
        got = torch.vmap(ours, in_dims)(*inputs)
    assert seen.products == 1
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected)
    swapped = torch.vmap(ours, in_dims, out_dims=-1)(*inputs)
    torch.testing.assert_close(swapped, expected.movedim(0, -1))


def test_vmap_nests_and_makes_the_product_torch_would() -> None:
    a, b = torch.randn(2, 3, 4, 5), torch.randn(2, 5, 6)
    nested = torch.vmap(torch.vmap(tmm_core.matmul, (0, None)), (0, 0))(a, b)
    torch.testing.assert_close(nested, a @ b[:, None])
    # Rows of one product, not a batch of them.
    torch.vmap(tmm_core.matmul, (0, None))(a[0], b[0])
    (folded,) = (p for p in warm._plans.values() if p.problem.n == 6 and p.problem.batch == 1)
    assert (folded.problem.m, folded.problem.k) == (3 * 4, 5)
    vectors = torch.randn(7, 5)
    got = torch.vmap(lambda v: tmm_core.matmul(a[0, 0], v))(vectors)
    torch.testing.assert_close(got, vectors @ a[0, 0].t())


def kept(call: Callable[[], Tensor]) -> int:
    """Bytes of storage that a call keeps for backward; a storage that is kept twice counts once."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call()
    assert y.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("learns", ["a", "b", "both"])
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=name)
def test_no_more_is_kept_than_eager_keeps(epilogue: Any, learns: str) -> None:
    a, b, bias, residual = (t.detach() for t in operands(epilogue))
    a.requires_grad_(learns != "b")
    b.requires_grad_(learns != "a")
    ours, theirs = calls(epilogue)
    mine = kept(lambda: ours(a, b, bias, residual))
    assert mine <= kept(lambda: theirs(a, b, bias, residual))
    if str(epilogue) in ("relu", "sigmoid", "tanh", "softcap", "softplus"):
        # An operand where the other learns, and the output that tells the derivative.
        operands_kept = (learns != "a") * a.nbytes + (learns != "b") * b.nbytes
        assert mine == operands_kept + 3 * 2 * 8


def test_nothing_is_kept_alive_without_need() -> None:
    a, b = torch.randn(3, 5), leaf(5, 2, dtype=torch.float32)
    frozen = torch.randn(2, 6)
    h = tmm_core.matmul(a, b, epilogue="tanh")
    watched = weakref.ref(h)
    y = tmm_core.matmul(h * 2, frozen, epilogue="gelu")
    del h
    gc.collect()
    assert watched() is None
    y.sum().backward()
    assert b.grad is not None


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("epilogue", [None, "relu", "silu", "swiglu", CUBE], ids=name)
def test_activation_checkpointing(epilogue: Any, reentrant: bool) -> None:
    inputs = operands(epilogue)
    ours, theirs = calls(epilogue)
    y = checkpoint(ours, *inputs, use_reentrant=reentrant)
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(theirs(*inputs), inputs, grad)
    y.backward(grad)
    torch.testing.assert_close(tuple(t.grad for t in inputs), expected)


def test_backward_goes_through_the_dispatcher() -> None:
    x, w = leaf(2, 6, 5, dtype=torch.float32), leaf(4, 5, dtype=torch.float32)
    y = tmm_core.linear(x, w, epilogue="relu")
    warm.forget_plans()
    y.sum().backward()
    sizes = {(p.problem.m, p.problem.n, p.problem.k) for p in warm._plans.values()}
    # The gradient of the input, and of the weight in its memory layout, over all rows.
    assert sizes == {(12, 5, 4), (4, 5, 12)}


def test_complex_gradients() -> None:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.complex128, requires_grad=True)

    inputs = (leaf(2, 3), leaf(3, 4), leaf(4), leaf(2, 4))

    def call(a: Any, b: Any, bias: Any, residual: Any) -> Tensor:
        return tmm_core.matmul(a, b, bias=bias, residual=residual, alpha=0.5)

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)


@pytest.mark.parametrize("way", ["a layer", "batches", "a transform"])
def test_a_bias_in_fp32_is_summed_for_in_fp32(way: str) -> None:
    """The bias's gradient is a sum over rows. In bf16 it would be off by up to 2e-3 of itself."""
    rows, dtype = 513, torch.bfloat16
    x, w, bias = leaf(rows, 8, dtype=dtype), leaf(16, 8, dtype=dtype), leaf(16)
    bias = bias.detach().float().requires_grad_()
    grad = (torch.randn(rows, 16) + 1).to(dtype)
    if way == "a layer":
        y = tmm_core.linear(x, w, bias)
    elif way == "batches":
        y = tmm_core.matmul(x[None], w.t()[None], bias=bias)
    if way == "a transform":

        def loss(bias: torch.Tensor) -> torch.Tensor:
            return (tmm_core.matmul(x.detach(), w.detach().t(), bias=bias) * grad).float().sum()

        got = torch.func.grad(loss)(bias.detach())
    else:
        (got,) = torch.autograd.grad(y, bias, grad.view(y.shape))
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, grad.double().sum(0).float(), rtol=1e-6, atol=1e-6)


def test_gradients_of_wide_outputs_and_biases() -> None:
    a, b = leaf(64, 32, dtype=torch.bfloat16), leaf(32, 16, dtype=torch.bfloat16)
    bias = leaf(16, dtype=torch.float32)
    y = tmm_core.matmul(a, b, bias=bias, epilogue="gelu", out_dtype=torch.float32)
    assert y.dtype is torch.float32
    grad = torch.randn(64, 16)
    got = torch.autograd.grad(y, (a, b, bias), grad)
    exact = tuple(t.detach().double().requires_grad_() for t in (a, b, bias))
    expected = torch.autograd.grad(F.gelu(exact[0] @ exact[1] + exact[2]), exact, grad.double())
    assert [t.dtype for t in got] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for mine, theirs, tolerance in zip(got, expected, (3e-2, 3e-2, 1e-5), strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("epilogue", [None, "silu", "swiglu"])
@pytest.mark.parametrize("layout", ["columns", "columns of all", "rows"])
@pytest.mark.parametrize("lead", [(), (1,), (1, 1), (2,), (1, 2)])
def test_a_gradient_has_the_memory_layout_that_torch_gives_it(
    lead: tuple[int, ...], layout: str, epilogue: str | None
) -> None:
    """Torch's batch normalisation on a CPU computes wrong gradients from rows of one image, where
    torch's own products would give it columns."""
    weight = torch.randn(6, 8, dtype=torch.float64).requires_grad_()
    strides = []
    for linear in (torch.nn.functional.linear, tmm_core.linear):
        x = torch.randn(*lead, 8, 5, dtype=torch.float64).mT
        if layout != "columns":
            x = x.contiguous() if layout == "rows" else x.movedim(-1, 0).contiguous().movedim(0, -1)
        x.requires_grad_()
        passed = x.view_as(x)
        passed.register_hook(lambda grad: strides.append(grad.stride()))
        if linear is tmm_core.linear:
            y = tmm_core.linear(passed, weight, epilogue=epilogue)
        else:
            y = linear(passed, weight)
            y = y if epilogue is None else parse(epilogue).apply(y)
        y.sum().backward()
    assert strides[0] == strides[1]


def by_tokens(image: Tensor, weight: Tensor, multiply: Any) -> Tensor:
    return multiply(image.flatten(2).mT, weight.t())


def by_positions(image: Tensor, weight: Tensor, multiply: Any) -> Tensor:
    return multiply(image.permute(2, 0, 3, 1), weight.t())


def by_a_weight_of_four_dimensions(image: Tensor, weight: Tensor, multiply: Any) -> Tensor:
    return multiply(image.permute(0, 2, 3, 1), weight.t()[None, None])


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("way", [by_tokens, by_positions, by_a_weight_of_four_dimensions])
def test_a_normalised_image_before_a_product_has_its_gradients(way: Any, width: int) -> None:
    """From strides that fit several layouts torch's normalisation computes wrong gradients."""
    norm = torch.nn.BatchNorm2d(8, dtype=torch.float64).eval()
    image = torch.randn(1, 8, 3, width, dtype=torch.float64)
    weight = torch.randn(8, 8).double().requires_grad_()
    found = []
    for multiply in (torch.matmul, tmm_core.matmul):
        y = way(norm(image), weight, multiply)
        found.append(torch.autograd.grad(y, tuple(norm.parameters()), torch.sin(y.detach())))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("transposed", [True, False])
def test_a_gradient_has_the_memory_layout_of_its_operand(transposed: bool) -> None:
    """Else autograd copies it, transposing, to where it is kept."""

    def operand(*shape: int) -> tuple[Tensor, Tensor]:
        t = leaf(*(shape[::-1] if transposed else shape))
        return t, t.mT if transposed else t

    (a, a_view), (b, b_view) = operand(6, 8), operand(8, 5)
    y = tmm_core.matmul(a_view, b_view)
    grad = torch.randn_like(y)
    grads = torch.autograd.grad(y, (a, b), grad)
    assert [g.stride() for g in grads] == [a.stride(), b.stride()]
    torch.testing.assert_close(grads, torch.autograd.grad(a_view @ b_view, (a, b), grad))


@pytest.mark.parametrize("epilogue", [None, "relu", "silu", "swiglu", CUBE], ids=name)
@pytest.mark.slow(quick=4)
def test_alpha_as_a_tensor_with_a_gradient(epilogue: Any) -> None:
    inputs = (*operands(epilogue), torch.tensor(0.6, dtype=torch.float64, requires_grad=True))
    parsed = dispatch.default_dispatcher().registry.epilogue(epilogue)

    def ours(a: Any, b: Any, bias: Any, residual: Any, alpha: Any) -> Tensor:
        return tmm_core.matmul(a, b, bias=bias, residual=residual, alpha=alpha, epilogue=epilogue)

    def theirs(a: Any, b: Any, bias: Any, residual: Any, alpha: Any) -> Tensor:
        return parsed.apply(alpha * (a @ b) + bias) + residual

    torch.testing.assert_close(ours(*inputs), theirs(*inputs))
    assert torch.autograd.gradcheck(ours, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, inputs)
    assert kept(lambda: ours(*inputs)) <= kept(lambda: theirs(*inputs))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*inputs).sum(), inputs),
        torch.autograd.grad(theirs(*inputs).sum(), inputs),
    )


@pytest.mark.parametrize("value", [1.0, 0.5])
@pytest.mark.parametrize("by_torch", [False, True])
def test_alpha_has_a_gradient_whatever_its_value(by_torch: bool, value: float) -> None:
    a, b, alpha = torch.randn(3, 5), torch.randn(5, 2), torch.tensor(value, requires_grad=True)
    y = tmm_core.matmul(a.to_sparse() if by_torch else a, b, alpha=alpha)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), alpha), ((a @ b).sum(),))


def test_alpha_as_a_tensor_without_a_gradient() -> None:
    a, b = torch.randn(3, 5), torch.randn(5, 2)
    alpha = torch.tensor(0.5)
    warm.forget_plans()
    torch.testing.assert_close(tmm_core.matmul(a, b, alpha=alpha), 0.5 * (a @ b))
    # A number on the host is one to the kernel too.
    assert [p.problem.scaled for p in warm._plans.values()] == [True]
    out = torch.empty(3, 2)
    tmm_core.linear(a, b.t(), alpha=alpha, epilogue="relu", out=out)
    torch.testing.assert_close(out, torch.relu(0.5 * (a @ b)))
    got = torch.vmap(lambda s: tmm_core.matmul(a, b, alpha=s))(torch.arange(3.0))
    torch.testing.assert_close(got, torch.arange(3.0)[:, None, None] * (a @ b))
    with pytest.raises(TypeError, match=r"'alpha' must be Number or 0-d Tensor, not \(2,\)"):
        tmm_core.matmul(a, b, alpha=torch.ones(2))
    with pytest.raises(ValueError, match="bias must have shape"):
        tmm_core.matmul(a, b, bias=torch.ones(3), alpha=alpha.requires_grad_())
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        tmm_core.matmul(a, b, alpha=alpha, out=out)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(alpha.detach(), torch.tensor(1.0))
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            tmm_core.matmul(a, b, alpha=dual, out=out)
        got = forward_ad.unpack_dual(tmm_core.matmul(a, b, alpha=dual)).tangent
        torch.testing.assert_close(got, a @ b)


def test_gradients_under_autocast_are_torchs() -> None:
    x, w = leaf(6, 8, dtype=torch.float32), leaf(5, 8, dtype=torch.float32)
    bias = leaf(5, dtype=torch.float32)
    results = []
    for linear in (tmm_core.linear, F.linear):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = linear(x, w, bias)
            assert y.dtype is torch.bfloat16
            loss = y.float().square().sum()
        results.append(torch.autograd.grad(loss, (x, w, bias)))
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item())


# Torch issues it when it makes stand-ins for saved tensors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow
def test_compiled_autograd() -> None:
    from torch._dynamo import compiled_autograd

    w = leaf(8, 5, dtype=torch.float32)
    cases = [
        (epilogue, alpha, shape)
        for epilogue in ("tanh", "silu", None, CUBE)
        for alpha in (1.0, 0.5)
        for shape in ((6, 8), (2, 3, 8))
    ]
    for epilogue, alpha, shape in cases:
        parsed = dispatch.default_dispatcher().registry.epilogue(epilogue)
        x = torch.randn(shape)
        with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            w.grad = None
            tmm_core.matmul(x, w, alpha=alpha, epilogue=epilogue).sum().backward()
        expected = torch.autograd.grad(parsed.apply(alpha * (x @ w)).sum(), w)
        torch.testing.assert_close((w.grad,), expected)
    a, b = leaf(6, 8, dtype=torch.float32), leaf(2, 8, 5, dtype=torch.float32)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        tmm_core.grouped_matmul(a, b, offs=ends, epilogue="silu").sum().backward()
    product = torch.cat([a[:2] @ b[0], a[2:] @ b[1]])
    expected = torch.autograd.grad(F.silu(product).sum(), (a, b))
    torch.testing.assert_close((a.grad, b.grad), expected)


# -- what follows a product, by kernels ----------------------------------------------------


@triton.jit
def _ramp(gate, up, slope: tl.constexpr):
    return gate * gate * slope + up


@triton.jit
def _ramp_slopes(gate, up, slope: tl.constexpr):
    return 2 * slope * gate, tl.full(up.shape, 1.0, tl.float32)


RAMP = Epilogue(
    "ramp", lambda gate, up, slope: gate.square() * slope + up, gated=True, parameters=(0.5,),
    derivative=lambda gate, up, slope: (2 * slope * gate, torch.ones_like(up)),
    device=_ramp, device_derivative=_ramp_slopes,
)  # fmt: skip
FOLLOWING: list[Any] = [e for e in BUILTIN if BUILTIN[e].parts[1] is not None]
FOLLOWING += ["gelu_tanh+softcap(2)", "swiglu+tanh+scale(3)", "relu+silu", "leaky_relu(0.3)+relu"]
FOLLOWING += [RAMP, [RAMP, "softplus+relu2"], "sigmoid+identity+silu+sigmoid"]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that kernels made."""
    from tmm_core.triton.pointwise import Pointwise

    made: list[str] = []

    def watch(way: str, original: Any) -> None:
        def spy(*arguments: Any) -> Any:
            made.append(way)
            return original(*arguments)

        monkeypatch.setattr(Pointwise, way, spy)

    watch("forward", Pointwise.forward)
    watch("backward", Pointwise.backward)
    return made


def rows(epilogue: Any, dtype: torch.dtype, *lead: int, n: int = 300) -> tuple[Tensor, ...]:
    gated = dispatch.default_dispatcher().registry.epilogue(epilogue).gated
    width = 2 * n if gated else n
    shapes = ((*lead, 8), (8, width), (width,), (*lead, n))
    return tuple(torch.randn(s).to(dtype).requires_grad_() for s in shapes)


def hold(got: Any, expected: Any, truth: Any, dtype: torch.dtype) -> None:
    """No further from the truth than eager, but for a few roundings."""
    for mine, eagers, exactly in zip(got, expected, truth, strict=True):
        assert (mine.dtype, mine.shape) == (dtype, exactly.shape)
        bound = (eagers.double() - exactly).abs().max()
        bound = bound + 8 * torch.finfo(dtype).eps * (exactly.abs().max() + 1)
        assert (mine.double() - exactly).abs().max() <= bound


def alike(got: Any, expected: Any, rounding: float = 1e-5) -> None:
    """Within the rounding of fp32, of the largest number."""
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=0, atol=rounding * theirs.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("epilogue", FOLLOWING, ids=name)
@pytest.mark.slow(quick=6)
def test_a_pass_each_way(epilogue: Any, dtype: Any, passes: list[str]) -> None:
    # The larger of two roundings' largest errors is either's by chance.
    torch.manual_seed(0)
    inputs = rows(epilogue, dtype, 3, 7)
    ours, theirs = calls(epilogue)
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    truth, expected, got = theirs(*exact), theirs(*inputs), ours(*inputs)
    assert passes == ["forward"]
    hold([got.detach()], [expected.detach()], [truth.detach()], dtype)
    grad = torch.randn(truth.shape).to(dtype)
    exactly = torch.autograd.grad(truth, exact, grad.double())
    eagers = torch.autograd.grad(expected, inputs, grad)
    mine = torch.autograd.grad(got, inputs, grad)
    assert passes == ["forward", "backward"]
    hold(mine, eagers, exactly, dtype)


@pytest.mark.parametrize("epilogue", ["sigmoid", "silu", "tanh", "gelu", "gelu_tanh", "softplus"])
def test_a_derivative_errs_no_more_than_torchs(epilogue: str, passes: list[str]) -> None:
    """The error is at most torch's or 2 eps: 1 − sigmoid(z) loses no digits by cancellation."""
    ours, theirs = calls(f"scale(1)+{epilogue}")  # a stage by itself, not within the product
    z = torch.linspace(-12, 12, 4096)[None].requires_grad_()
    exact = z.detach().double().requires_grad_()
    one, ones = torch.ones(1, 1), torch.ones(1, 4096)
    (mine,) = torch.autograd.grad(ours(one, z), z, ones)
    (eagers,) = torch.autograd.grad(theirs(one, z), z, ones)
    (truth,) = torch.autograd.grad(theirs(one.double(), exact), exact, ones.double())
    assert passes == ["forward", "backward"]
    bound = max((eagers - truth).abs().max(), 2 * torch.finfo(torch.float32).eps)
    assert (mine - truth).abs().max() <= bound


@pytest.mark.parametrize("learns", ["a", "b", "bias", "both"])
@pytest.mark.parametrize("epilogue", ["silu", "geglu"])
def test_gradients_that_nobody_needs_are_not_computed(
    epilogue: str, learns: str, passes: list[str]
) -> None:
    a, b, bias, _ = (t.detach() for t in rows(epilogue, torch.float32, 40))
    wanted = {"a": [a], "b": [b], "bias": [bias], "both": [a, b]}[learns]
    for t in wanted:
        t.requires_grad_()
    ours, theirs = calls(epilogue)
    grad = torch.randn(40, 300)
    warm.forget_plans()
    got = torch.autograd.grad(ours(a, b, bias), wanted, grad)
    assert len(warm._plans) == {"bias": 1, "both": 3}.get(learns, 2)
    alike(got, torch.autograd.grad(theirs(a, b, bias), wanted, grad))
    assert passes == ["forward", "backward"]


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda t: t.sum(),
    "of a row": lambda t: t.sum(0).square().sum(),
    "of a column": lambda t: t.sum(-1, keepdim=True).square().sum(),
    "transposed": lambda t: torch.einsum(
        "...mn,nm->", t, t.detach().flatten(0, -2)[: t.shape[-2]].t()
    ),
    "a slice": lambda t: t[..., 1:5].square().sum(),
    "wider": lambda t: t.double().square().sum(),
}


@pytest.mark.parametrize("layout", GRADIENTS)
@pytest.mark.parametrize("lead", [(50,), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("epilogue", ["gelu", "swiglu"])
@pytest.mark.slow(quick=6)
def test_gradients_of_any_layout(epilogue: Any, lead: Any, layout: str, passes: list[str]) -> None:
    inputs = rows(epilogue, torch.float32, *lead, n=20)
    loss, (ours, theirs) = GRADIENTS[layout], calls(epilogue)
    got = torch.autograd.grad(loss(ours(*inputs)), inputs)
    alike(got, torch.autograd.grad(loss(theirs(*inputs)), inputs))
    assert passes == ["forward", "backward"]


@pytest.mark.parametrize("inside", [False, True])
def test_a_pass_each_way_under_autocast(inside: bool, passes: list[str]) -> None:
    inputs = rows("swiglu", torch.float32, 6, n=5)
    grad = torch.randn(6, 5)
    results = []
    for call in calls("swiglu"):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call(*inputs)
            if inside:
                results.append(torch.autograd.grad(y, inputs, grad.to(y.dtype)))
        if not inside:
            results.append(torch.autograd.grad(y, inputs, grad.to(y.dtype)))
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, theirs, rtol=0, atol=4e-2 * theirs.abs().max().item())
    assert passes[0] == "forward"


@pytest.mark.parametrize("epilogue", ["silu", "swiglu"])
@pytest.mark.slow
def test_a_product_is_let_go_before_its_operands_gradients(
    epilogue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it, its gradient and theirs are in memory at once, which eager's never are."""
    from tmm_core.triton.pointwise import Pointwise

    a, b, *_ = rows(epilogue, torch.float32, 6, n=5)
    products, alive = [], []
    original = Pointwise.forward

    def forward(self: Any, z: Tensor) -> Tensor:
        products.append(StorageWeakRef(z.untyped_storage()))
        return original(self, z)

    def run(*arguments: Any) -> Tensor:
        gc.collect()  # Triton's interpreter leaves cycles that hold what it was given
        alive.extend(not product.expired() for product in products)
        return warm.run(*arguments)

    monkeypatch.setattr(Pointwise, "forward", forward)
    y = calls(epilogue)[0](a, b)
    monkeypatch.setattr("tmm_core.interop.gradients.run", run)
    y.sum().backward()
    assert alive == [False, False]


@pytest.mark.parametrize("lead", [(0,), (2, 0)])
def test_rows_of_none_have_zero_gradients(lead: Any) -> None:
    inputs = rows("swiglu", torch.float32, *lead, n=4)
    y = calls("swiglu")[0](*inputs)
    assert y.shape == (*lead, 4)
    gradients = torch.autograd.grad(y, inputs, torch.randn_like(y))
    assert [g.shape for g in gradients] == [t.shape for t in inputs]
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("epilogue", FOLLOWING, ids=name)
def test_second_derivatives_after_a_pass(epilogue: Any, passes: list[str]) -> None:
    inputs = rows(epilogue, torch.float32, 6, n=5)
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    ours, theirs = calls(epilogue)

    def derivatives(call: Any, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        first = torch.autograd.grad(call(*inputs).square().sum(), inputs, create_graph=True)
        total = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(total, inputs, materialize_grads=True)
        return [g.detach().double() for g in (*first, *second)]

    # 1 − tanh² loses digits: in 400 draws up to 1.5e-5 of the largest number, and torch 2.2e-5.
    alike(derivatives(ours, inputs), derivatives(theirs, exact), rounding=5e-5)
    assert passes[0] == "forward"


def test_batched_gradients_after_a_pass() -> None:
    inputs = rows("geglu", torch.float32, 6, n=5)[:3]
    ours, theirs = calls("geglu")
    grads = torch.randn(4, 6, 5)
    got, expected = (
        torch.autograd.grad(call(*inputs), inputs, grads, is_grads_batched=True)
        for call in (ours, theirs)
    )
    alike(got, expected)


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 1, 3, 4), (0, 3, 4), (2, 3, 0)])
@pytest.mark.parametrize("epilogue", [None, "silu", "tanh"])
def test_batched_gradients_of_rows_of_several_dimensions(
    shape: tuple[int, ...], epilogue: str | None
) -> None:
    inputs = (leaf(*shape), leaf(shape[-1], 6), leaf(6))
    ours, theirs = calls(epilogue)
    grads = torch.randn(5, *shape[:-1], 6, dtype=inputs[0].dtype)
    got, expected = (
        torch.autograd.grad(call(*inputs), inputs, grads, is_grads_batched=True)
        for call in (ours, theirs)
    )
    torch.testing.assert_close(got, expected)
    if not all(shape):  # torch stacks no rows of a jacobian that has none
        return
    layer = tmm_core.nn.Linear(shape[-1], 6, epilogue=epilogue, dtype=inputs[0].dtype)
    jacobian = functools.partial(torch.autograd.functional.jacobian, inputs=inputs[0].detach())
    torch.testing.assert_close(jacobian(layer, vectorize=True), jacobian(layer))


@pytest.mark.parametrize("epilogue", FOLLOWING, ids=name)
def test_no_more_is_kept_where_kernels_follow(epilogue: Any) -> None:
    inputs = rows(epilogue, torch.float32, 6, n=5)
    ours, theirs = calls(epilogue)
    mine = kept(lambda: ours(*inputs))
    assert mine <= kept(lambda: theirs(*inputs))
    # Both operands and what comes before.
    assert mine == sum(t.nbytes for t in (*inputs[:2], inputs[0] @ inputs[1]))


@pytest.mark.parametrize("shape", [(6, 8), (8,)], ids=["rows", "vector"])
def test_gradients_go_by_the_settings_of_their_product(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's backward runs in a thread of autograd's own, which knows no ``with`` of ours."""
    seen: list[Any] = []
    choose = dispatch.default_dispatcher().choose

    def noted(problem: Any, settings: Any) -> Any:
        seen.append(settings)
        return choose(problem, settings)

    monkeypatch.setattr(dispatch.default_dispatcher(), "choose", noted)
    x, w = leaf(*shape), leaf(8, 5)
    with tmm_core.override(tune_budget=3.25) as other:
        y = tmm_core.matmul(x, w)
    seen.clear()
    thread = threading.Thread(target=y.sum().backward)
    thread.start()
    thread.join()
    assert x.grad is not None
    assert len(seen) == 2
    assert all(settings is other for settings in seen)
    # And operators that were computed outside are not fused into the graph.
    warm.forget_plans()
    y = tmm_core.matmul(x, w)
    seen.clear()
    with tmm_core.override(tune_budget=3.25):
        y.sum().backward()
    assert seen
    assert all(settings is not other for settings in seen)


@pytest.mark.parametrize("reason", ["dtype", "disabled", "no device function", "no derivative"])
def test_torch_computes_what_kernels_after_a_product_cannot(reason: str, passes: list[str]) -> None:
    epilogue: Any = {
        "no device function": CUBE,
        "no derivative": Epilogue("bare", RAMP.reference, _ramp, parameters=(0.5,), gated=True),
    }.get(reason, "swiglu")
    dtype = torch.float64 if reason == "dtype" else torch.float32
    inputs = rows(epilogue, dtype, 6, n=5)
    ours, theirs = calls(epilogue)
    disable = [epilogue_kernels.NAME] if reason == "disabled" else []
    with tmm_core.override(disable=disable):
        got = torch.autograd.grad(ours(*inputs).square().sum(), inputs)
    alike(got, torch.autograd.grad(theirs(*inputs).square().sum(), inputs))
    assert not passes


@pytest.mark.parametrize("way", ["forward", "backward", "made"])
def test_kernels_that_fail_are_reported_and_left_alone(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tmm_core.triton.pointwise import Pointwise

    def fail(*_: Any) -> Any:
        raise ValueError("out of paper")

    monkeypatch.setattr(Pointwise, "__init__" if way == "made" else way, fail)
    inputs = rows("swiglu", torch.float32, 6, n=5)
    ours, theirs = calls("swiglu")
    expected = torch.autograd.grad(theirs(*inputs).square().sum(), inputs)
    with pytest.warns(TmmWarning, match="failed for epilogue swiglu.*out of paper"):
        got = torch.autograd.grad(ours(*inputs).square().sum(), inputs)
    alike(got, expected)
    # Said once.
    got = torch.autograd.grad(ours(*inputs).square().sum(), inputs)
    alike(got, expected)


def test_out_of_memory_is_not_the_kernels_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from tmm_core.triton.pointwise import Pointwise

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    inputs = rows("silu", torch.float32, 6, n=5)
    with monkeypatch.context() as patched:
        patched.setattr(Pointwise, "forward", fail)
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            calls("silu")[0](*inputs)
    assert epilogue_kernels.kernels(parse("silu"), 5, torch.float32, inputs[0]) is not None


@pytest.mark.parametrize("epilogue", ["silu", "swiglu", RAMP], ids=name)
def test_a_pass_each_way_after_grouped_products(epilogue: Any, passes: list[str]) -> None:
    """Rows beyond the last group hold NaN, and their gradient too."""
    x, weight = torch.randn(12, 16), torch.randn(3, 8, 16, requires_grad=True)
    x[10:] = torch.nan
    x.requires_grad_()
    offs = torch.tensor([3, 3, 10], dtype=torch.int32)

    def gradients() -> tuple[Tensor, ...]:
        y = tmm_core.grouped_linear(x, weight, offs=offs, epilogue=epilogue)
        grad = torch.full_like(y, torch.nan)
        grad[:10] = torch.linspace(-1, 1, y.shape[1])
        return y[:10].detach(), *torch.autograd.grad(y, (x, weight), grad)

    got = gradients()
    assert passes == ["forward", "backward"]
    with tmm_core.override(disable=[epilogue_kernels.NAME]):
        alike(got, gradients())
    assert len(passes) == 2


def test_a_profile_shows_the_launches_of_an_unprofiled_call(passes: list[str]) -> None:
    """The same products, and the same passes after them: otherwise it would also tune others."""
    mlp, x = SwiGLU(8, 12), torch.randn(5, 8)
    a, b, *_ = rows("silu", torch.float32, 6, n=5)

    def step() -> Any:
        warm.forget_plans()
        passes.clear()
        (mlp(x).sum() + calls("silu")[0](a, b).sum()).backward()
        return {(p.problem, p.kernel) for p in warm._plans.values()}, list(passes)

    alone = step()
    assert alone[1] == ["forward", "forward", "backward", "backward"]
    with torch.profiler.profile():
        assert step() == alone


@pytest.mark.parametrize("learns", [("x",), ("gate",), ("up",), ("x", "gate", "up")], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_mlp_trains_with_one_product(bias: bool, learns: Any, passes: list[str]) -> None:
    mlp = SwiGLU(8, 12, bias=bias)
    x = torch.randn(2, 5, 8, requires_grad="x" in learns)
    mlp.gate_proj.requires_grad_("gate" in learns)
    mlp.up_proj.requires_grad_("up" in learns)
    wanted = [t for t in (x, *mlp.parameters()) if t.requires_grad]

    def eager() -> Tensor:
        gate, up = mlp.gate_proj, mlp.up_proj
        between = F.silu(F.linear(x, gate.weight, gate.bias)) * F.linear(x, up.weight, up.bias)
        return F.linear(between, mlp.down_proj.weight, mlp.down_proj.bias)

    warm.forget_plans()
    y = mlp(x)
    assert {(p.problem.n, p.problem.k) for p in warm._plans.values()} == {(24, 8), (8, 12)}
    got = torch.autograd.grad(y.square().sum(), wanted)
    assert passes == ["forward", "backward"]
    alike(got, torch.autograd.grad(eager().square().sum(), wanted))
    again = torch.autograd.grad(mlp(x).square().sum(), wanted, create_graph=True)
    expected = torch.autograd.grad(eager().square().sum(), wanted, create_graph=True)
    second, truth = (
        torch.autograd.grad(sum(g.square().sum() for g in first), wanted)
        for first in (again, expected)
    )
    alike(second, truth)


def test_a_gated_mlp_sees_its_weights_change() -> None:
    mlp, x = SwiGLU(8, 12), torch.randn(5, 8, requires_grad=True)
    for projection in (mlp.gate_proj, mlp.up_proj):
        y = mlp(x)
        with torch.no_grad():
            projection.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    y = mlp(x)
    # As savers of memory do, who bring back copies.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = mlp(x)
    (got,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(mlp(x).sum(), x)[0])


def test_a_gated_mlp_runs_the_hooks_of_its_layers(passes: list[str]) -> None:
    mlp, x = SwiGLU(8, 12), torch.randn(5, 8, requires_grad=True)
    seen = []
    mlp.up_proj.register_full_backward_hook(lambda *_: seen.append(1))
    mlp(x).sum().backward()
    assert seen == [1]
    assert not passes


@pytest.mark.parametrize("epilogue", ["", "silu"])
def test_saved_tensors_may_be_unpacked_as_views_that_negate(epilogue: str) -> None:
    """Kernels read memory, in which such a view has the other sign."""
    a, b = (torch.randn(32, 32, requires_grad=True) for _ in "ab")
    with tmm_core.override(kernel="triton.naive"):
        (*expected,) = torch.autograd.grad(tmm_core.matmul(a, b, epilogue=epilogue).sum(), (a, b))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: -t.detach(), torch._neg_view):
            y = tmm_core.matmul(a, b, epilogue=epilogue)
        got = torch.autograd.grad(y.sum(), (a, b))
    torch.testing.assert_close(got, tuple(expected))


def unaligned(t: Tensor) -> Tensor:
    return torch.empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


@pytest.mark.parametrize("unpack", [lambda t: t.mT.contiguous().mT, unaligned])
@pytest.mark.parametrize("epilogue", ["silu", "swiglu"])
def test_saved_products_may_be_unpacked_in_another_layout(
    epilogue: str, unpack: Any, passes: list[str]
) -> None:
    """Kernels read a product that is row-major and aligned."""
    inputs = rows(epilogue, torch.float32, 6, n=8)
    ours, theirs = calls(epilogue)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
        y = ours(*inputs)
    got = torch.autograd.grad(y.square().sum(), inputs)
    assert passes == ["forward"]
    alike(got, torch.autograd.grad(theirs(*inputs).square().sum(), inputs))


GROUPS = torch.tensor([2, 5], dtype=torch.int32)
PARAMETER = torch.randn(3, 4, requires_grad=True)
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "epilogue": lambda a, b: tmm_core.linear(a, b, epilogue="tanh"),
    "both sides": lambda a, b: tmm_core.matmul(a, a.t() * b.sum()),
    "own derivative": lambda a, b: tmm_core.linear(a, b, epilogue=CUBE),
    "groups": lambda a, b: tmm_core.grouped_matmul(a, b.t().expand(2, -1, -1), offs=GROUPS),
    "recorded": lambda a, _: tmm_core.linear(a, PARAMETER),
    "gate and up": lambda a, b: torch.ops.tmm.gated_linear(a, b, b, None, None, "swiglu"),
    "recorded gate and up": lambda a, _: torch.ops.tmm.gated_linear(
        a, PARAMETER, PARAMETER, None, None, "swiglu"
    ),
}


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("operator", ["gate and up", "joint"])
def test_tangents_of_several_weights_by_a_kernel(operator: str, learns: bool) -> None:
    """Torch's own products keep tangents, kernels only where autograd calls them."""
    a, t = torch.randn(5, 4), torch.randn(5, 4)
    one, other = (torch.randn(3, 4, requires_grad=learns) for _ in range(2))

    def in_a_level(a: Tensor, t: Tensor) -> Any:
        with torch.set_grad_enabled(learns), forward_ad.dual_level():
            x = forward_ad.make_dual(a, t)
            if operator == "joint":
                y = torch.ops.tmm.joint_linear(x, [one, other], [None, None])
            else:
                y = torch.ops.tmm.gated_linear(x, one, other, None, None, "swiglu")
            return tuple(forward_ad.unpack_dual(y))

    wanted = in_a_level(a, t)
    torch._dynamo.reset()
    with tmm_core.override(kernel="triton.naive"):
        compiled = torch.compile(in_a_level, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(a, t), wanted)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.slow(quick=3)
def test_tangents_inside_a_graph(name: str) -> None:
    """A graph enters forward mode without changing the level that Python knows."""
    product = PRODUCTS[name]
    a, b, t = torch.randn(5, 4), torch.randn(3, 4), torch.randn(5, 4)

    def in_a_level(a: Tensor, t: Tensor) -> Any:
        with torch.set_grad_enabled("recorded" in name), forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(product(forward_ad.make_dual(a, t), b)))

    def transformed(a: Tensor, t: Tensor) -> Any:
        return torch.func.jvp(lambda a: product(a, b), (a,), (t,))

    wanted = in_a_level(a, t)
    torch.testing.assert_close(wanted, transformed(a, t))
    for function in (in_a_level, transformed):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(a, t), wanted)


@pytest.mark.parametrize("name", ["epilogue", "own derivative", "groups"])
@pytest.mark.parametrize("traced", [False, True])
def test_batched_gradients_after_forward_mode(
    name: str, traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has no rule that queries a batch of gradients for a tangent."""
    monkeypatch.setattr(autograd_state, "_levels_were_traced", traced)
    a, b = leaf(5, 4).float(), torch.randn(3, 4)
    torch.func.jvp(lambda a: PRODUCTS[name](a, b), (a,), (a,))
    y = PRODUCTS[name](a, b)
    each = torch.randn(2, *y.shape)
    (found,) = torch.autograd.grad(y, a, each, is_grads_batched=True, retain_graph=True)
    for grad, expected in zip(each, found, strict=True):
        torch.testing.assert_close(torch.autograd.grad(y, a, grad, retain_graph=True)[0], expected)


def test_eager_forward_mode_leaves_no_query_for_tangents_behind() -> None:
    a, b = torch.randn(5, 4), torch.randn(3, 4)
    with forward_ad.dual_level():
        tmm_core.linear(forward_ad.make_dual(a, a), b)
    assert not autograd_state._levels_were_traced


def test_a_gradient_with_a_tangent_inside_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd_state, "_levels_were_traced", True)
    a, b, grad, t = torch.randn(5, 4), leaf(3, 4).float(), torch.randn(5, 3), torch.randn(5, 3)
    a.requires_grad_()
    with tmm_core.override(kernel="triton.naive"):  # torch's own products keep tangents
        products = [tmm_core.linear(a, b), tmm_core.linear(a, b, epilogue="relu")]
    groups = tmm_core.grouped_matmul(a, b.t().expand(2, -1, -1), offs=GROUPS)
    for y in (*products, groups):
        (wanted,) = torch.autograd.grad(y, a, t, retain_graph=True)
        with forward_ad.dual_level():
            level, forward_ad._current_level = forward_ad._current_level, -1  # as in a graph
            try:
                dual = forward_ad.make_dual(grad, t, level=0)
                (found,) = torch.autograd.grad(y, a, dual)
                tangent = forward_ad.unpack_dual(found, level=0).tangent
            finally:
                forward_ad._current_level = level
        torch.testing.assert_close(tangent, wanted)
