"""Limits of derivatives and of stand-ins for kernels: vectors, complex numbers, sums of many."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tmm_core
from tmm_core import Epilogue, Port, TmmWarning, settings
from tmm_core.epilogues import parse
from tmm_core.interop import (
    aten,
    aten_answers,
    aten_calls,
    autograd_state,
    constants,
    epilogue_kernels,
    flops,
    gradients,
    grouped_operator,
    host_bound,
    inductor,
    row_quantization,
)
from tmm_core.interop.declaration import _in_memory, cast_first
from tmm_core.interop.fallbacks import needs_fallback
from tmm_core.interop.tails import PRODUCTS, Tail, pairs, tails, terms_of
from tmm_core.launch import warm
from tmm_core.spec.arguments import Arguments, GroupedArguments

Tensor = torch.Tensor
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# torch's first forward-mode derivative raises this warning
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def double(*shape: int, **kw: Any) -> Tensor:
    return torch.randn(shape, dtype=FP64, **kw)


def same_gradients(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *of: Tensor) -> None:
    y, expected = ours(*of), theirs(*of)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(expected)
    for mine, other in zip(
        torch.autograd.grad(y, of, grad), torch.autograd.grad(expected, of, grad), strict=True
    ):
        assert mine.dtype is other.dtype
        torch.testing.assert_close(mine, other)


# -- rounding by a kernel -----------------------------------------------------------------

HOPPER = {"triton": "3", "cuda": "12", "capability": (9, 0)}


class Rows(SimpleNamespace):
    """Rows of 8 bf16 numbers on a GPU."""

    is_cuda, dtype, shape, device = True, BF16, (4, 8), "cuda"
    address, leading = 0, 8

    def data_ptr(self) -> int:
        return self.address

    def stride(self, dim: int) -> int:
        return (self.leading, 1)[dim]

    def element_size(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("rows", "of", "aligned"),
    [
        ({}, {}, True),
        ({"leading": 16}, {"capability": (10, 0)}, True),
        ({"address": 8}, {}, False),
        ({"leading": 12}, {}, False),
        ({}, {"capability": (8, 9)}, None),
        ({}, {"triton": ""}, None),
        ({}, {"cuda": "hip-6"}, None),
        ({"is_cuda": False}, {}, None),
        ({}, {"failing": True}, None),
    ],
)
def test_which_rows_a_kernel_rounds(
    rows: dict[str, Any], of: dict[str, Any], aligned: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def kernel(*given: Any) -> Any:
        if "failing" in of:
            raise RuntimeError("no kernel")
        made.append(given)
        return made

    capturing = [True, False, False]
    gpu = SimpleNamespace(**HOPPER | of)
    monkeypatch.setattr(row_quantization, "_found", {})
    monkeypatch.setattr(row_quantization, "fingerprint", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.pop(0))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    module = SimpleNamespace(QuantizeRows=kernel)
    monkeypatch.setitem(sys.modules, "tmm_core.triton.quantize_rows", module)
    with pytest.warns(TmmWarning, match="no kernel") if "failing" in of else nullcontext():
        found = [row_quantization._kernel(Rows(**rows), 32) for _ in range(3)]  # type: ignore[arg-type]
    assert found[0] is None  # during a capture no kernel is loaded
    assert found[1:] == ([None] * 2 if aligned is None else [made] * 2)
    assert made == ([] if aligned is None else [(BF16, 8, 32, aligned, "cuda")])


# -- reverse mode -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes", [((4, 5), (5,)), ((5,), (5, 3)), ((5,), (5,)), ((2, 4, 5), (5,))]
)
def test_gradients_of_complex_vectors(shapes: Any) -> None:
    a, b = (torch.randn(shape, dtype=torch.complex128, requires_grad=True) for shape in shapes)
    same_gradients(lambda a, b: tmm_core.matmul(a, b, alpha=2.0), lambda a, b: 2.0 * (a @ b), a, b)


def test_products_of_a_complex_gradient_go_through_torchs_dispatcher() -> None:
    with torch.no_grad():
        assert gradients._is_direct(torch.ones(2))
        assert not gradients._is_direct(torch.ones(2, dtype=torch.complex64))
        assert gradients._is_direct(torch.ones(2), None, torch.ones(3))
    assert not gradients._is_direct(torch.ones(2))  # a second derivative may be recorded


def test_a_real_term_of_a_complex_product_has_a_real_gradient() -> None:
    a, b = (
        torch.randn(shape, dtype=torch.complex64, requires_grad=True) for shape in ((4, 5), (5, 3))
    )
    bias, residual = torch.randn(3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    same_gradients(
        lambda a, b, bias, residual: tmm_core.matmul(a, b, bias=bias, residual=residual),
        lambda a, b, bias, residual: a @ b + bias + residual,
        a, b, bias, residual,
    )  # fmt: skip


def test_a_differentiated_result_has_the_same_dtype() -> None:
    """The residual has another dtype; each epilogue is tried."""
    a, b = torch.randn(4, 8, dtype=BF16), torch.randn(8, 6, dtype=BF16)
    residual = torch.randn(4, 6)
    for epilogue in (None, "silu", "relu"):
        given: Any = {"residual": residual, "epilogue": epilogue}
        plain = tmm_core.matmul(a, b, **given)
        learned = tmm_core.matmul(a.clone().requires_grad_(), b, **given)
        assert plain.dtype is learned.dtype is BF16
        torch.testing.assert_close(plain, learned.detach(), rtol=2e-2, atol=2e-2)


def test_an_empty_product_is_differentiable() -> None:
    for n in (0, 3):
        a, b = double(4, 5, requires_grad=True), double(5, n, requires_grad=True)
        same_gradients(
            lambda a, b: tmm_core.matmul(a, b, epilogue="silu"),
            lambda a, b: torch.nn.functional.silu(a @ b),
            a.float().detach().requires_grad_(),
            b.float().detach().requires_grad_(),
        )


# -- forward mode -------------------------------------------------------------------------


def same_tangents(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *of: Tensor) -> None:
    tangents = tuple(map(torch.randn_like, of))
    for mine, other in zip(
        torch.func.jvp(ours, of, tangents), torch.func.jvp(theirs, of, tangents), strict=True
    ):
        assert mine.dtype is other.dtype
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("shapes", [((4, 5), (5, 3)), ((4, 5), (5,)), ((5,), (5, 3)), ((5,), (5,))])
def test_tangents_of_every_argument_at_once(shapes: Any) -> None:
    sa, sb = shapes
    a, b, bias = double(*sa), double(*sb), double(sb[1] if len(sb) > 1 else 1)
    residual = torch.randn_like(a @ b)
    term = bias if len(sb) > 1 else bias[0]
    same_tangents(
        lambda a, b, bias, r: tmm_core.matmul(a, b, bias=bias, residual=r, alpha=-3.0),
        lambda a, b, bias, r: -3.0 * (a @ b) + (bias if len(sb) > 1 else bias[0]) + r,
        a, b, bias, residual,
    )  # fmt: skip
    same_tangents(
        lambda bias: tmm_core.matmul(a, b, bias=bias, alpha=-3.0),
        lambda bias: -3.0 * (a @ b) + (bias if len(sb) > 1 else bias[0]),
        bias,
    )
    assert term.dtype is FP64


def test_a_tangent_has_the_dtype_of_its_result() -> None:
    a, b = torch.randn(4, 8, dtype=BF16), torch.randn(8, 6, dtype=BF16)
    r, t = torch.randn(4, 6), torch.randn(4, 6)
    y, tangent = torch.func.jvp(lambda r: tmm_core.matmul(a, b, residual=r), (r,), (t,))
    assert y.dtype is tangent.dtype is BF16
    torch.testing.assert_close(tangent, t.bfloat16())


def gate(z: Tensor, up: Tensor) -> Tensor:
    return torch.sin(z) * up


GATE = Epilogue(
    "sines", gate, gated=True, derivative=lambda z, up: (torch.cos(z) * up, torch.sin(z))
)


def test_a_given_derivative_of_a_gate_is_of_both_halves() -> None:
    a, b = double(4, 5), double(5, 6)

    def by_hand(a: Tensor, b: Tensor) -> Tensor:
        return gate(*(a @ b).chunk(2, dim=-1))

    def ours(a: Tensor, b: Tensor) -> Tensor:
        return tmm_core.matmul(a, b, epilogue=GATE)

    same_tangents(ours, by_hand, a, b)
    same_gradients(ours, by_hand, a.requires_grad_(), b.requires_grad_())


# -- vmap ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 4, 5), (3, 4, 5), (2, 3, 4, 5)], ids=str)
def test_many_vectors_by_operands_of_any_rank(shape: tuple[int, ...]) -> None:
    """The second operand is mapped, or both are."""
    a, b, more = double(*shape), double(3, 5), double(3, *shape)
    row = double(3, *(a @ b[0]).shape)
    for dims, given in ((None, a), (0, more)):
        for term in (None, row):
            in_dims = (dims, 0, None if term is None else 0)

            def ours(a: Tensor, b: Tensor, r: Tensor | None) -> Tensor:
                return tmm_core.matmul(a, b, residual=r, epilogue="silu")

            def by_torch(a: Tensor, b: Tensor, r: Tensor | None) -> Tensor:
                y = torch.nn.functional.silu(a @ b)
                return y if r is None else y + r

            got = torch.vmap(ours, in_dims)(given, b, term)
            torch.testing.assert_close(got, torch.vmap(by_torch, in_dims)(given, b, term))


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float32])
def test_a_mapped_residual_in_float32_leaves_the_results_dtype(
    out_dtype: torch.dtype | None,
) -> None:
    a, b = torch.randn(4, 5).bfloat16(), torch.randn(5, 6).bfloat16()
    residual = torch.randn(3, 4, 6)

    def product(r: Tensor) -> Tensor:
        return tmm_core.matmul(a, b, residual=r, out_dtype=out_dtype)

    got = torch.vmap(product)(residual)
    assert got.dtype is (out_dtype or torch.bfloat16)
    torch.testing.assert_close(got, torch.stack([product(r) for r in residual]))


# -- grouped ------------------------------------------------------------------------------


@pytest.mark.parametrize("of_a", [(5,), (4, 5), (1, 5), (3, 4, 5), (2, 3, 4, 5), (1, 4, 5)])
@pytest.mark.parametrize("of_b", [(5,), (5, 6), (3, 5, 6), (2, 1, 5, 6)])
@pytest.mark.slow(quick=6)
def test_mapped_operands_of_every_rank(of_a: tuple[int, ...], of_b: tuple[int, ...]) -> None:
    """One operand is mapped or both; the residual is mapped, not mapped, or broadcast."""
    a, b = torch.randn(7, *of_a), torch.randn((*of_b, 7))
    shape = (a[0] @ b[..., 0]).shape
    residuals = torch.randn(7, *shape), torch.randn(shape), torch.randn(shape[-1:])
    for dims in ((0, -1), (0, None), (None, -1)):
        given = a if dims[0] == 0 else a[0], b if dims[1] == -1 else b[..., 0]
        expected = torch.vmap(torch.matmul, dims)(*given)
        torch.testing.assert_close(torch.vmap(tmm_core.matmul, dims)(*given), expected)
        for residual, dim in zip(residuals, (0, None, None), strict=True):
            y = torch.vmap(
                lambda a, b, r: tmm_core.matmul(a, b, residual=r), (*dims, dim)
            )(*given, residual)  # fmt: skip
            torch.testing.assert_close(y, expected + residual)


@pytest.mark.parametrize("epilogue", [None, "relu"])
def test_mapped_residuals_of_fp32_leave_a_products_dtype(epilogue: str | None) -> None:
    a, b = torch.randn(4, 6).bfloat16(), torch.randn(6, 5).bfloat16()
    terms = torch.randn(3, 4, 5)

    def ours(term: Tensor) -> Tensor:
        return tmm_core.matmul(a, b, residual=term, epilogue=epilogue)

    got = torch.vmap(ours)(terms)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got, torch.stack([ours(term) for term in terms]))


@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5), (3, 2, 4, 5)], ids=str)
def test_mapped_residuals_meet_the_last_dimensions_of_a_result(shape: tuple[int, ...]) -> None:
    """The residual has fewer dimensions than the result. Each mapped call adds it as torch does."""
    a, b, terms = double(3, *shape), double(5, 6), double(3, 4, 6)
    for dims, given in ((0, a), (None, a[0])):

        def ours(a: Tensor, term: Tensor) -> Tensor:
            return tmm_core.matmul(a, b, residual=term, epilogue="silu")

        def by_torch(a: Tensor, term: Tensor) -> Tensor:
            return torch.nn.functional.silu(a @ b) + term

        for place in range(3):
            moved = terms.movedim(0, place)
            got = torch.vmap(ours, (dims, place))(given, moved)
            torch.testing.assert_close(got, torch.vmap(by_torch, (dims, place))(given, moved))


OFFS = torch.tensor([3, 3, 10], dtype=torch.int32)


@pytest.fixture
def by_blas() -> Any:
    with tmm_core.override(disable="triton.ragged"):
        yield


def by_groups(a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    return alpha * torch.cat([a[0:3] @ b[0], a[3:10] @ b[2]])


@pytest.mark.usefixtures("by_blas")
def test_tangents_of_groups_are_scaled_as_their_product() -> None:
    same_tangents(
        lambda a, b: tmm_core.grouped_matmul(a, b, offs=OFFS, alpha=-3.0),
        lambda a, b: by_groups(a, b, -3.0),
        double(10, 5), double(3, 5, 4),
    )  # fmt: skip


def test_an_operand_without_a_tangent_adds_nothing() -> None:
    """A tangent of zeros would add 0 × Inf = NaN."""
    a, b, tb = double(4, 3), double(2, 3, 5), double(2, 3, 5)
    b[0, 0, 0], offs = torch.inf, torch.tensor([2, 4], dtype=torch.int32)
    _, t = torch.func.jvp(lambda b: tmm_core.grouped_matmul(a, b, offs=offs), (b,), (tb,))
    torch.testing.assert_close(t, torch.cat([a[:2] @ tb[0], a[2:] @ tb[1]]))
    _, t = torch.func.jvp(lambda b: tmm_core.matmul(a, b), (b[0],), (tb[0],))
    torch.testing.assert_close(t, a @ tb[0])


@pytest.mark.usefixtures("by_blas")
def test_a_row_gathered_often_sums_its_gradient_in_fp32() -> None:
    """In bf16 a sum of 512 ones stops at 256."""
    a = torch.ones(2, 8, dtype=BF16, requires_grad=True)
    b = torch.ones(1, 8, 8, dtype=BF16)
    index, offs = torch.zeros(512, dtype=torch.long), torch.tensor([512], dtype=torch.int32)
    y = tmm_core.grouped_matmul(a, b, offs=offs, a_index=index)
    (grad,) = torch.autograd.grad(y.sum(), a)
    assert torch.equal(grad, torch.tensor([[4096.0], [0.0]]).expand(2, 8).to(BF16))


@pytest.mark.usefixtures("by_blas")
@pytest.mark.parametrize("along", ["m", "k"])
def test_the_gradient_of_a_bias_of_groups_is_summed_in_fp32(along: str) -> None:
    """The sum leaves out rows of no group."""
    bias = torch.zeros(1, 8, requires_grad=True)
    if along == "m":
        a, b = torch.ones(1030, 8, dtype=BF16), torch.ones(1, 8, 8, dtype=BF16)
        offs = torch.tensor([1025], dtype=torch.int32)
    else:
        a, b = torch.ones(1025, 16, dtype=BF16), torch.ones(16, 8, dtype=BF16)
        offs = torch.tensor([8], dtype=torch.int32)
    y = tmm_core.grouped_matmul(a, b, offs=offs, bias=bias)
    (grad,) = torch.autograd.grad(y[..., :1025, :].sum(), bias)
    assert torch.equal(grad, torch.full((1, 8), 1025.0))


@pytest.mark.usefixtures("by_blas")
@pytest.mark.parametrize("epilogue", [None, "silu"])
def test_weights_of_rows_outside_all_groups_get_zero_gradients(epilogue: str | None) -> None:
    """The memory of rows that no kernel writes may hold NaN."""
    torch.full((4096,), torch.nan)
    a, b = double(12, 5), double(3, 5, 4)
    weights = double(12, requires_grad=True)
    a[10:] = torch.nan
    for more in ({}, {"out_index": torch.randperm(12)}):
        y = tmm_core.grouped_matmul(a, b, offs=OFFS, out_weights=weights, epilogue=epilogue, **more)  # type: ignore[call-overload]
        (grad,) = torch.autograd.grad(y.sum(), weights)
        assert not grad[10:].any()
        z = by_groups(a, b)
        rows = z if epilogue is None else torch.nn.functional.silu(z)
        torch.testing.assert_close(grad[:10], rows.sum(1))


@pytest.mark.usefixtures("by_blas")
def test_residuals_of_rows_outside_all_groups_get_zero_gradients() -> None:
    a, b, residual = double(12, 5), double(3, 5, 4), double(12, 4, requires_grad=True)
    y = tmm_core.grouped_matmul(a, b, offs=OFFS, residual=residual)
    (grad,) = torch.autograd.grad(y.sum(), residual)
    assert grad[:10].eq(1).all()
    assert not grad[10:].any()


@pytest.mark.usefixtures("by_blas")
@pytest.mark.parametrize(
    ("more", "within"),
    [
        ({}, True), ({"epilogue": "relu"}, False), ({"out_weights": torch.arange(12.0)}, False),
        ({"out_index": torch.arange(11, -1, -1)}, False),
    ],
)  # fmt: skip
def test_a_learned_product_of_groups_adds_its_residual_itself(
    more: dict[str, Any], within: bool
) -> None:
    """Unless something else comes between: a separate addition rounds twice."""
    a, b, residual = double(12, 5, requires_grad=True), double(3, 5, 4), double(12, 4)
    y = tmm_core.grouped_matmul(a, b, offs=OFFS, residual=residual, **more)
    assert ("_Product" in y.grad_fn.name()) is within
    z = by_groups(a, b) * more.get("out_weights", torch.ones(12))[:10, None]
    rows = more.get("out_index", torch.arange(12))[:10]
    expected = (z.relu() if "epilogue" in more else z) + residual[rows]
    torch.testing.assert_close(y[rows], expected)


@pytest.mark.usefixtures("by_blas")
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_zeroed_rows_are_zero_with_everything_added(scattered: bool, learns: bool) -> None:
    """Rows of no group get neither bias nor residual, also when rows are scattered."""
    a, b = double(12, 5, requires_grad=learns), double(3, 5, 4)
    bias, residual = double(3, 4), double(12, 4)
    places = torch.randperm(12) if scattered else None
    call = tmm_core.interop.grouped_operator.GroupedArguments(
        a, b, OFFS, bias, residual, 1.0, parse("silu").interned(), out_index=places, zeroed=True
    )
    y = grouped_operator.grouped_matmul(*call[:-1])
    rows = torch.arange(12) if places is None else places
    z = torch.cat([a[0:3] @ b[0] + bias[0], a[3:10] @ b[2] + bias[2]])
    expected = torch.zeros(12, 4, dtype=FP64)
    expected[rows[:10]] = torch.nn.functional.silu(z).detach() + residual[rows[:10]]
    torch.testing.assert_close(y.detach(), expected)


# -- sharding -----------------------------------------------------------------------------


def test_flat_scales_of_a_ragged_sum_keep_their_rows_together_unless_they_are_one() -> None:
    """Flat scales hold the rows of all groups together, so a shard cannot have its rows' scales."""
    from torch.distributed.tensor import Shard

    from tmm_core.interop import sharding

    def given(*shape: int) -> Any:
        meta = SimpleNamespace(dtype=FP32)
        return SimpleNamespace(shape=torch.Size(shape), ndim=len(shape), tensor_meta=meta)

    def sharded(scale_a: Any, scale_b: Any) -> set[int]:
        a, b, offs = given(8, 12), given(12, 4), given(3)
        rules = sharding.grouped_shardings(a, b, offs, scale_a=scale_a, scale_b=scale_b)
        return {out[0].dim for out, _ in rules if isinstance(out[0], Shard)}

    assert sharded(None, None) == {1, 2}
    assert sharded(given(1), given(1)) == {1, 2}
    assert sharded(given(24), given(1)) == {2}
    assert sharded(given(1), given(12)) == {1}
    assert sharded(given(3, 8), given(3, 4)) == {1, 2}


# -- outputs ------------------------------------------------------------------------------

PEAK = Port("peak", "row", FP16, "max", of=torch.abs)
PEAKED = Epilogue("peaked", torch.relu, linear=False, outputs=(PEAK,))


def test_auxiliary_outputs_of_a_differentiated_call() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    for alpha in (1.0, -2.0):
        y, peak = tmm_core.matmul(a, b, alpha=alpha, epilogue=PEAKED)  # type: ignore[misc]
        learned, also = tmm_core.matmul(  # type: ignore[misc]
            a.clone().requires_grad_(), b, alpha=alpha, epilogue=PEAKED
        )
        torch.testing.assert_close(y, torch.relu(alpha * (a @ b)))
        torch.testing.assert_close(learned.detach(), y)
        assert peak.dtype is also.dtype is FP16
        torch.testing.assert_close(peak, y.abs().amax(-1).half())
        torch.testing.assert_close(also, peak)
        assert not also.requires_grad


def test_outputs_without_memory_have_their_dtypes() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    with FakeTensorMode() as mode:
        fakes = mode.from_tensor(a), mode.from_tensor(b)
        y, peak = tmm_core.matmul(*fakes, epilogue=PEAKED)  # type: ignore[misc]
    assert (tuple(y.shape), y.dtype) == ((4, 6), FP32)
    assert (tuple(peak.shape), peak.dtype) == ((4,), FP16)


# -- what follows a product ---------------------------------------------------------------


def test_kernels_after_a_product_need_a_derivative_in_torch_too() -> None:
    """Torch differentiates this derivative for second derivatives."""
    z, silu = torch.randn(4, 8), parse("silu")
    assert epilogue_kernels.kernels(silu, 8, FP32, z) is not None
    device: Any = {"device": silu.device, "device_derivative": silu.device_derivative}
    bare = Epilogue("mine", torch.nn.functional.silu, **device)
    assert epilogue_kernels.kernels(bare, 8, FP32, z) is None
    forward: Any = {"device": silu.device, "derivative": silu.derivative}
    one_way = Epilogue("mine", torch.nn.functional.silu, **forward)
    assert epilogue_kernels.kernels(one_way, 8, FP32, z) is None
    both = Epilogue("mine", torch.nn.functional.silu, **device, derivative=silu.derivative)
    for of, served in ((both, True), (silu.then(both), True), (silu.then(one_way), False)):
        assert (epilogue_kernels.kernels(of, 8, FP32, z) is not None) is served
    assert epilogue_kernels.kernels(silu, 0, FP32, z) is None
    assert epilogue_kernels.kernels(silu, 8, FP64, z) is None
    with tmm_core.override(disable=epilogue_kernels.NAME):
        assert epilogue_kernels.kernels(silu, 8, FP32, z) is None
    assert epilogue_kernels.kernels(silu, 8, FP32, z) is not None


def test_kernels_that_fail_are_left_and_no_others() -> None:
    z = torch.randn(4, 8)
    bad, good = (epilogue_kernels.kernels(parse(name), 8, FP32, z) for name in ("silu", "gelu"))
    assert bad is not None
    with pytest.warns(tmm_core.TmmWarning, match="failed for epilogue silu"):
        epilogue_kernels.failed(parse("silu"), bad, RuntimeError("boom"))
    assert epilogue_kernels.kernels(parse("silu"), 8, FP32, z) is None
    assert epilogue_kernels.kernels(parse("gelu"), 8, FP32, z) is good is not None


def test_kernels_after_a_product_are_of_gpus_and_of_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = SimpleNamespace(interpreted=True, triton="3")
    monkeypatch.setattr(epilogue_kernels, "fingerprint", lambda device: found)
    cpu, silu = torch.device("cpu"), parse("silu")

    def serves(device: Any = cpu, width: int = 8, dtype: torch.dtype = BF16) -> bool:
        return epilogue_kernels._serves(silu, width, dtype, device)

    assert serves()
    assert serves(width=1)
    assert not serves(width=0)
    assert not serves(dtype=FP64)
    assert not serves(torch.device("meta"))
    with tmm_core.override(disable=[epilogue_kernels.NAME]):
        assert not serves()
    found.interpreted = False
    assert not serves()
    assert serves(torch.device("cuda", 0))
    found.triton = ""
    assert not serves(torch.device("cuda", 0))


def test_kernels_after_a_product_take_dense_rows_on_16_bytes() -> None:
    z = torch.randn(4, 8)
    assert epilogue_kernels.takes(z)
    assert not epilogue_kernels.takes(torch.randn(33)[1:].view(4, 8))
    assert not epilogue_kernels.takes(z.T)


# -- counting -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "products"),
    [
        ((4, 5), (5, 3), 60), ((5,), (5, 3), 15), ((4, 5), (5,), 20), ((5,), (5,), 5),
        ((2, 4, 5), (5,), 40), ((2, 1, 4, 5), (3, 5, 6), 720), ((7, 4, 5), (5, 3), 420),
    ],
)  # fmt: skip
def test_flops_of_vectors_and_batches(a: Any, b: Any, products: int) -> None:
    assert flops.matmul_flops(a, b) == 2 * products


def test_flops_of_a_gated_product_are_of_both_halves() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from tmm_core.nn.gated_product import gated_linear

    x, gate, up = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6, 8)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        gated_linear(x.to("meta"), gate.to("meta"), up.to("meta"), None, None, "swiglu")
    assert counter.get_total_flops() == 2 * 4 * 8 * (6 + 6)


def test_flops_of_groups_are_of_the_rows_that_are_multiplied() -> None:
    assert grouped_operator.grouped_flops((10, 5), (3, 5, 4), (3,)) == 2 * 10 * 5 * 4
    assert grouped_operator.grouped_flops((2, 5), (3, 5, 4), (3,), a_index=(10,)) == 2 * 10 * 5 * 4


@pytest.mark.parametrize("formats", [("int4", "int4"), ("mxfp4", "int8"), ("int8", "mxfp4")])
def test_flops_of_packed_operands_are_of_their_values(formats: tuple[str, str]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, weight = (
        tmm_core.quantize(torch.randn(rows, 64), name, group=32)
        for rows, name in zip((4, 6), formats, strict=True)
    )
    stack = tmm_core.Quantized(
        weight.stored[None], weight.scale[None], format=weight.format, block=weight.block
    )
    offs = torch.tensor([4], dtype=torch.int32)
    for call in (
        lambda: tmm_core.linear(x, weight),
        lambda: tmm_core.matmul(x, weight.t(), out=torch.empty(4, 6, dtype=torch.bfloat16)),
        lambda: tmm_core.grouped_linear(x, stack, offs=offs),
    ):
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == 2 * 4 * 6 * 64


# -- autocast and other operands ----------------------------------------------------------


@pytest.mark.parametrize("kind", [Arguments, GroupedArguments])
def test_autocast_changes_the_dtype_of_floats_alone(kind: Any) -> None:
    """A call that is checked before torch casts it keeps all other arguments."""
    floats = {name: torch.zeros(8, 8) for name in ("a", "bias", "residual")}
    others = {name: torch.zeros(8, dtype=torch.int32) for name in kind._fields[:-1]}
    others |= {"b": torch.zeros(8, 8, dtype=torch.int8), "formats": ",int8"}
    call = kind(**(others | floats))
    assert cast_first(lambda taken: taken, call) is call
    with torch.autocast("cpu", dtype=BF16):
        taken = cast_first(lambda taken: taken, call)
        written = call._replace(out=torch.zeros(8, 8))
        assert cast_first(lambda taken: taken, written) is written
    for name in kind._fields:
        if name in floats:
            assert getattr(taken, name).dtype is BF16
        else:
            assert getattr(taken, name) is getattr(call, name), name


def test_a_weight_that_is_cast_before_the_call_is_not_static() -> None:
    def static(dtype: torch.dtype, autocast: bool = True, out: Any = None) -> bool:
        call = Arguments(torch.zeros(4, 8), torch.zeros(8, 6, dtype=dtype), out=out)
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            return cast_first(lambda taken: settings.current().static_weights, call)  # type: ignore[no-any-return]

    with settings.override(static_weights=True):
        assert not static(FP32)
        assert static(BF16)
        assert static(FP32, autocast=False)
        assert static(FP32, out=torch.zeros(4, 6))


def test_rows_of_another_type_need_torchs_dispatcher() -> None:
    other = type("Other", (torch.Tensor,), {})
    call = GroupedArguments(
        torch.zeros(4, 8), torch.zeros(2, 8, 6), torch.tensor([2, 4], dtype=torch.int32)
    )
    assert grouped_operator._is_eager(call)
    rows = {
        "a_index": torch.arange(4), "out_index": torch.arange(4), "out_weights": torch.ones(4),
        "bias": torch.ones(2, 6), "residual": torch.ones(4, 6),
    }  # fmt: skip
    for name, t in rows.items():
        assert grouped_operator._is_eager(call._replace(**{name: t}))
        assert not grouped_operator._is_eager(call._replace(**{name: t.as_subclass(other)}))


def test_autocast_leaves_fp64_and_8_bits_as_they_are() -> None:
    a, b = double(4, 8), double(8, 6)
    eight = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    with torch.autocast("cpu", dtype=BF16):
        y = tmm_core.matmul(a, b)
        of_eight = tmm_core.matmul(*eight, bias=torch.full((6,), 1 + 2.0**-12), out_dtype=FP32)
    assert y.dtype is FP64
    torch.testing.assert_close(y, a @ b, rtol=1e-14, atol=1e-14)
    expected = eight[0].double() @ eight[1].double() + 1 + 2.0**-12
    torch.testing.assert_close(of_eight.double(), expected, rtol=1e-6, atol=1e-6)


def test_a_bias_of_the_products_shape_is_not_a_vector() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    for shape, other in (((6,), False), ((1, 6), True), ((4, 6), True), ((5,), True)):
        assert needs_fallback(a, b, torch.ones(shape), None) is other
    assert not needs_fallback(a, b[:, 0], torch.ones(1), None)
    assert needs_fallback(a, b[:, 0], torch.ones(4), None)


def test_a_bias_of_one_row_is_a_vector() -> None:
    a, b, bias = torch.randn(4, 8), torch.randn(8, 6), torch.randn(6)
    expected = torch.relu(a @ b + bias)
    for given in (bias, bias[None], bias[:, None].T):
        y = tmm_core.matmul(a, b, bias=given, epilogue="relu")
        torch.testing.assert_close(y, expected)
    stack = tmm_core.matmul(a[None], b, bias=bias[None, None], epilogue="relu")
    torch.testing.assert_close(stack, expected[None])
    for left in (a, a[0]):  # of a vector b
        z = tmm_core.matmul(left, b[:, 0], bias=bias[None, :1], epilogue="relu")
        torch.testing.assert_close(z, torch.relu(left @ b[:, 0] + bias[0]))
    with pytest.raises(ValueError, match="bias must have shape"):
        tmm_core.matmul(a, b, bias=bias[None, :5])
    with pytest.raises(ValueError, match="bias must have shape"):
        tmm_core.matmul(a, b, bias=bias[None, None, None])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_result_without_values_has_the_requested_dtype(device: str) -> None:
    a, b = (torch.zeros(shape, dtype=BF16, device=device) for shape in ((4, 8), (8, 6)))
    for dtype in (None, BF16, FP32):
        with nullcontext() if device == "meta" else FakeTensorMode(allow_non_fake_inputs=True):
            y = torch.ops.tmm.matmul(a, b, out_dtype=dtype)
        assert (y.dtype, tuple(y.shape)) == (dtype or BF16, (4, 6))


def test_a_bias_of_several_rows_with_all_other_terms() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    column, residual = torch.randn(4, 1), torch.randn(4, 6)
    z = -2.0 * (a @ b) + column
    for epilogue, y in ((None, z), ("relu", torch.relu(z))):
        given: Any = {"bias": column, "alpha": -2.0, "epilogue": epilogue}
        torch.testing.assert_close(tmm_core.matmul(a, b, **given), y)
        both = tmm_core.matmul(a, b, residual=residual, **given)
        torch.testing.assert_close(both, y + residual)
        out = torch.empty(4, 6)
        assert tmm_core.matmul(a, b, residual=residual, out=out, **given) is out
        torch.testing.assert_close(out, y + residual)
        room = torch.randn(5, 6)
        for term, out in ((room[:4], room[1:]), (residual, residual)):
            with pytest.raises(RuntimeError, match="a single memory location"):
                tmm_core.matmul(a, b, residual=term, out=out, **given)


@pytest.mark.filterwarnings("ignore:(?s).*(Sparse|prototype|nested)")
def test_torch_answers_for_operands_without_strides_where_blas_is_forced() -> None:
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    y = tmm_core.matmul(a.to_sparse(), b, kernel="blas", alpha=-2.0, bias=torch.ones(6),
                        out_dtype=FP64)  # fmt: skip
    assert y.dtype is FP64
    torch.testing.assert_close(y.float(), -2.0 * (a @ b) + 1)
    rows = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    y = tmm_core.matmul(rows, b, alpha=-2.0, bias=torch.ones(6))
    torch.testing.assert_close(y.values(), -2.0 * (rows.values() @ b) + 1)


# -- torch's own calls under enable() -------------------------------------------------------

ENDS = torch.tensor([3, 8], dtype=torch.int32)
SUMMED = (torch.randn(8, 16, dtype=BF16), torch.randn(2, 16, 8, dtype=BF16), ENDS)
E4M3, ONE = torch.float8_e4m3fn, torch.ones(())
EIGHT = (torch.ones(8, 16, dtype=E4M3), torch.ones(16, 16, dtype=E4M3).t(), ONE, ONE)
BY_ROW = (*EIGHT[:2], torch.ones(8, 1), torch.ones(1, 16))


@pytest.mark.parametrize(
    ("given", "more", "answered"),
    [
        (SUMMED, {}, True), (SUMMED, {"out_dtype": BF16}, True), (SUMMED[:2], {}, False),
        (SUMMED, {"out_dtype": torch.float32}, False), (SUMMED, {"bias": torch.ones(8)}, False),
        ((SUMMED[0].half(), *SUMMED[1:]), {}, False),
        ((SUMMED[0].double(), SUMMED[1].double(), ENDS), {}, False),
    ],
)  # fmt: skip
def test_grouped_products_that_torch_has(given: Any, more: Any, answered: bool) -> None:
    """Torch gets all other calls, and refuses them."""
    assert (aten_calls.grouped_call(*given, **more) is not None) is answered


@pytest.mark.parametrize(
    ("given", "more", "answered"),
    [
        (EIGHT, {"out_dtype": BF16}, True), (BY_ROW, {"out_dtype": BF16}, True),
        (BY_ROW, {"out_dtype": BF16, "bias": torch.ones(16, dtype=BF16)}, True),
        (EIGHT, {}, False), (EIGHT, {"out_dtype": E4M3}, False),
        (EIGHT, {"out_dtype": BF16, "scale_result": ONE}, False),
        ((*EIGHT[:2], ONE, BY_ROW[3]), {"out_dtype": BF16}, False),
        ((*EIGHT[:2], BY_ROW[2], ONE), {"out_dtype": BF16}, False),
        ((*EIGHT[:2], BY_ROW[2].t(), BY_ROW[3].t()), {"out_dtype": BF16}, False),
        ((*EIGHT[:2], ONE.double(), ONE), {"out_dtype": BF16}, False),
        ((EIGHT[0].bfloat16(), *EIGHT[1:]), {"out_dtype": BF16}, False),
        ((EIGHT[0], EIGHT[1].bfloat16(), ONE, ONE), {"out_dtype": BF16}, False),
    ],
)  # fmt: skip
def test_scaled_products_that_tmm_answers(given: Any, more: Any, answered: bool) -> None:
    call = aten_calls.scaled_call(*given, **more)
    assert (call is not None) is answered
    if call is not None:
        assert (call.bias, call.out_dtype) == (more.get("bias"), BF16)
        assert (call.scale_a, call.scale_b) == given[2:]


def test_plain_products_that_tmm_answers() -> None:
    """Torch gets all other calls: invalid ones, and calls of empty or meta tensors."""
    a, b = torch.zeros(4, 8), torch.zeros(8, 6)
    stack = torch.zeros(3, 4, 8), torch.zeros(3, 8, 6)
    for given, answered in (
        ((0, a, b), True), ((0, *stack), True), ((0, a, b, torch.empty(4, 6)), True),
        ((0, a.half(), b.half()), True), ((4, a, b), False), ((0, a.double(), b.double()), False),
        ((0, a, b.half()), False), ((0, a, b[:7]), False), ((0, a[:0], b), False),
        ((0, a, b[:, :0]), False), ((0, a[:, :0], b[:0]), False), ((0, a, stack[1]), False),
        ((0, stack[0], b), False), ((0, stack[0][:2], stack[1]), False),
        ((0, a, b.to("meta")), False), ((0, a, b, torch.empty(4, 6, dtype=FP16)), False),
        ((0, a, b, torch.empty(6, 4)), False), ((0, a, b, torch.empty(1, 6).expand(4, 6)), False),
        ((0, a, b, torch.empty(4, 6, device="meta")), False),
    ):  # fmt: skip
        call = aten_calls.plain_call(*given)
        assert (call is not None) is answered, given
        if call is not None:
            assert call[:2] == given[1:3]
            assert call.out is (given[3] if len(given) > 3 else None)


def test_summands_are_biases_or_residuals() -> None:
    a, b, row, whole = (torch.zeros(shape) for shape in ((4, 8), (8, 6), (6,), (4, 6)))
    stack = torch.zeros(6, 4, 8), torch.zeros(6, 8, 6)
    for given, bias in (
        ((a, b, row, 2), True), ((a, b, whole, 0.5), False), ((a, b, row[None], 1), False),
        ((*stack, torch.zeros(6), 1), False),
    ):  # fmt: skip
        call = aten_calls.call_with_summand(0, *given)
        assert call is not None
        assert call.alpha == float(given[3])
        assert (call.bias, call.residual)[not bias] is given[2]
        assert (call.bias, call.residual)[bias] is None
    for given in ((a, b, row, True), (a, b, row, 1j), (a, b, row.half(), 1),
                  (a, b, row.to("meta"), 1), (a, b.half(), row, 1)):  # fmt: skip
        assert aten_calls.call_with_summand(0, *given) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "unit"), [(BF16, 8), (FP32, 4), (torch.int8, 16)])
def test_strides_that_torch_requires_of_groups(dtype: torch.dtype, unit: int) -> None:
    def able(rows: int, cols: int, down: int, along: int, offset: int = 0) -> bool:
        room = offset + (rows - 1) * down + (cols - 1) * along + 1
        t = torch.zeros(room, dtype=dtype).as_strided((rows, cols), (down, along), offset)
        return aten_calls.strides_accepted(t)

    assert able(3, unit, unit, 1)
    assert able(3, unit - 1, unit, 1)
    assert not able(3, unit + 1, unit, 1)
    assert not able(3, unit, unit + 1, 1)
    assert not able(3, unit, unit, 1, offset=1)
    assert able(3, unit, unit, 1, offset=unit)
    assert able(unit, 3, 1, unit)
    assert not able(unit + 1, 3, 1, unit)
    assert not able(unit, 3, 1, unit + 1)
    assert not able(2, 2, 2 * unit, 2)
    assert able(1, unit, unit, 1)
    assert not able(3, 1, 0, 1)


# -- the state of autograd ----------------------------------------------------------------


def test_a_gradient_is_real_where_its_tensor_is() -> None:
    real, both = torch.tensor([1.5, -2.0]), torch.tensor([1.5 + 2j, -2.0 + 0j])
    assert autograd_state.as_gradient(real, FP32) is real
    assert autograd_state.as_gradient(both, torch.complex64) is both
    assert torch.equal(autograd_state.as_gradient(real, FP64), real.double())
    assert torch.equal(autograd_state.as_gradient(both, FP64), real.double())
    assert torch.equal(autograd_state.as_gradient(real, torch.complex64), real + 0j)
    assert torch.equal(
        autograd_state.as_gradient(both, torch.complex128), both.to(torch.complex128)
    )


def test_a_column_major_matrix_has_columns_of_neighbours() -> None:
    for strides, columns in (((1, 4), True), ((4, 1), False), ((1, 1), False), ((2, 4), False),
                             ((9, 1, 4), True), ((9, 4, 1), False)):  # fmt: skip
        t = torch.empty_strided((2,) * len(strides), strides)
        assert autograd_state.is_column_major(t) is columns
    assert not autograd_state.is_column_major(torch.empty(3))


def test_which_calls_autograd_records_in_a_graph() -> None:
    plain, learns = torch.zeros(2), torch.zeros(2, requires_grad=True)
    assert not autograd_state.recorded(plain, None)
    assert autograd_state.recorded(None, plain, learns)
    with torch.no_grad():
        assert not autograd_state.recorded(learns)
        assert not autograd_state.differentiated(learns)
        with torch.autograd.forward_ad.dual_level():
            assert autograd_state.transformed()
            assert autograd_state.differentiated(plain)
    assert not autograd_state.transformed()
    assert torch.vmap(lambda t: t * autograd_state.transformed())(torch.ones(2)).all()


def test_a_gradient_is_summed_to_sizes_known_and_unknown() -> None:
    t = torch.randn(3, 4, 5)
    for shape in ((3, 4, 5), (4, 5), (1, 5), (3, 1, 5), (5,), (1, 1, 1), ()):
        assert torch.equal(gradients._summed_to(t, shape), t.sum_to_size(shape))

    class Unknown(int):
        """A size whose value must not be read, like a symbolic number of rows."""

    assert gradients._summed_to(t[..., :1], (Unknown(4), 1)).shape == (4, 1)
    assert torch.equal(gradients._summed_to(t, (Unknown(4), 1)), t.sum_to_size((4, 1)))
    assert torch.equal(gradients._summed_to(t, (3, 1, Unknown(5))), t.sum_to_size((3, 1, 5)))
    assert torch.equal(gradients._summed_to(t, (3, Unknown(4), 5)), t)


# -- products and what follows them, in graphs of torch's compiler ------------------------

A, B, B2, R = (torch.randn(shape) / 2 for shape in ((4, 8), (8, 6), (8, 6), (4, 6)))
X, V = torch.randn(2, 2, 8), torch.randn(6)
F = torch.nn.functional


def graph_of(function: Callable[..., Any], dtype: torch.dtype, *given: Tensor) -> Any:
    """The graph of a function as Inductor's passes get it, and the value of each of its nodes."""
    inputs = [t.to(dtype) for t in given]
    module = make_fx(function, select_decomp_table(), tracing_mode="fake")(*inputs)
    values: dict[Any, Any] = {}

    class Values(torch.fx.Interpreter):
        def run_node(self, node: Any) -> Any:
            values[node] = super().run_node(node)
            return values[node]

    Values(module).run(*inputs)
    return module.graph, values


def value_of(tail: Tail, values: dict[Any, Any]) -> Tensor:
    """Return, in fp64, the result of the call that replaces the tail."""
    terms = terms_of(tail.product)
    assert terms is not None
    a, b, bias, residual, alpha = (values.get(t, t) if t is not None else None for t in terms)
    z = alpha * (a.double() @ b.double())  # type: ignore[operator, union-attr]
    for term in (bias, residual):
        z = z if term is None else z + term.double()  # type: ignore[union-attr]
    y = parse(tail.epilogue or None).apply(z)
    assert list(y.shape) == tail.result_shape
    last = values[tail.last]
    y = y.reshape(last.shape)
    return y if tail.residual is None else y + values[tail.residual].double().reshape(last.shape)


def halves(z: Tensor) -> Any:
    return z.chunk(2, dim=-1)


def gelu_of(half: float, root: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: (a @ b) * half * (torch.erf((a @ b) * root) + 1)


#: A function, its arguments, and the expected epilogue of each product: "+" stands for a residual,
#: "x" for one that is reshaped.
TAILS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], list[str]]] = {
    "plain": (lambda a, b: a @ b, (A, B), [""]),
    "relu": (lambda a, b: F.relu(a @ b), (A, B), ["relu"]),
    "tanh": (lambda a, b: torch.tanh(a @ b), (A, B), ["tanh"]),
    "sigmoid": (lambda a, b: torch.sigmoid(a @ b), (A, B), ["sigmoid"]),
    "silu": (lambda a, b: F.silu(a @ b), (A, B), ["silu"]),
    "gelu": (lambda a, b: F.gelu(a @ b), (A, B), ["gelu"]),
    "gelu_tanh": (lambda a, b: F.gelu(a @ b, approximate="tanh"), (A, B), ["gelu_tanh"]),
    "cap": (lambda a, b: 30 * torch.tanh((a @ b) / 30), (A, B), ["softcap(30.0)"]),
    "cap, turned": (lambda a, b: torch.tanh((a @ b) / 2.5) * 2.5, (A, B), ["softcap(2.5)"]),
    "two caps": (lambda a, b: 30 * torch.tanh((a @ b) / 20), (A, B), [""]),
    "negative cap": (lambda a, b: -3 * torch.tanh((a @ b) / -3), (A, B), [""]),
    "product is read": (lambda a, b: (F.silu(z := a @ b), z), (A, B), [""]),
    "inner value is read": (lambda a, b: (1 + (e := torch.exp(-(a @ b))), e), (A, B), [""]),
    "of exp(z)": (lambda a, b: (z := a @ b) / (1 + torch.exp(z)), (A, B), [""]),
    "of another": (lambda a, b, r: r / (1 + torch.exp(-(a @ b))), (A, B, R), [""]),
    "other halves": (gelu_of(0.25, 0.7071067811865476), (A, B), ["", ""]),
    "other root": (lambda a, b: gelu_of(0.5, 0.7)(a, b), (A, B), ["", ""]),
    "relu of silu": (lambda a, b: F.relu(F.silu(a @ b)), (A, B), ["silu"]),
    "residual": (lambda a, b, r: a @ b + r, (A, B, R), ["+"]),
    "residual first": (lambda a, b, r: r + F.relu(a @ b), (A, B, R), ["relu+"]),
    "relu of a sum": (lambda a, b, r: F.relu(a @ b + r), (A, B, R), ["+"]),
    "row as residual": (lambda a, b, v: a @ b + v, (A, B, V), [""]),
    "number as residual": (lambda a, b: a @ b + 1.0, (A, B), [""]),
    "itself": (lambda a, b: (z := a @ b) + z, (A, B), [""]),
    "difference": (lambda a, b, r: a @ b - r, (A, B, R), [""]),
    "twice": (lambda a, b, r: torch.add(a @ b, r, alpha=2), (A, B, R), [""]),
    "two residuals": (lambda a, b, r: a @ b + r + r, (A, B, R), ["+"]),
    "residual of a wider dtype": (lambda a, b, r: a @ b + r.double(), (A, B, R), [""]),
    "bias": (lambda a, b, v: F.relu(torch.addmm(v, a, b)), (A, B, V), ["relu"]),
    "scaled": (lambda a, b, v: torch.addmm(v, a, b, alpha=0.5), (A, B, V), [""]),
    "summand": (lambda a, b, r: F.relu(torch.addmm(r, a, b)), (A, B, R), ["relu"]),
    "summand and residual": (lambda a, b, r: torch.addmm(r, a, b) + r, (A, B, R), [""]),
    "batch": (lambda a, b: F.silu(torch.bmm(a, b)), (X, X.mT.contiguous()), ["silu"]),
    "rows": (lambda x, b: F.silu(x @ b), (X, B), ["silux"]),
    "rows with a residual": (
        lambda x, b, r: F.silu(x @ b) + r.view(2, 2, 6), (X, B, R), ["silux+"],
    ),
    "swiglu": (lambda a, b: F.silu((h := halves(a @ b))[0]) * h[1], (A, B), ["swiglu"]),
    "swiglu, turned": (lambda a, b: (h := halves(a @ b))[1] * F.silu(h[0]), (A, B), ["swiglu"]),
    "swiglu, split": (
        lambda a, b: F.silu((h := (a @ b).split([3, 3], -1))[0]) * h[1], (A, B), ["swiglu"],
    ),
    "swiglu, cut": (lambda a, b: F.silu((z := a @ b)[:, :3]) * z[:, 3:], (A, B), ["swiglu"]),
    "swiglu, rows": (lambda x, b: F.silu((h := halves(x @ b))[0]) * h[1], (X, B), ["swiglux"]),
    "swiglu, residual": (
        lambda a, b, r: F.silu((h := halves(a @ b))[0]) * h[1] + r[:, :3], (A, B, R), ["swiglu+"],
    ),
    "reglu": (lambda a, b: F.relu((h := halves(a @ b))[0]) * h[1], (A, B), ["reglu"]),
    "geglu": (lambda a, b: F.gelu((h := halves(a @ b))[0]) * h[1], (A, B), ["geglu"]),
    "gate on the right": (lambda a, b: F.silu((h := halves(a @ b))[1]) * h[0], (A, B), [""]),
    "gate is up": (lambda a, b: F.silu((h := halves(a @ b))[0]) * h[0], (A, B), [""]),
    "no gate": (lambda a, b: torch.tanh((h := halves(a @ b))[0]) * h[1], (A, B), [""]),
    "halves of rows": (
        lambda a, b: F.silu((h := (a @ b).chunk(2, dim=0))[0]) * h[1], (A, B), [""],
    ),
    "unequal parts": (lambda a, b: F.silu((z := a @ b)[:, :2]) * z[:, 4:], (A, B), [""]),
    "up is read": (
        lambda a, b: (F.silu((h := halves(a @ b))[0]) * h[1], h[1] + 1), (A, B), [""],
    ),
    "sum of halves": (lambda a, b: F.silu((h := halves(a @ b))[0]) + h[1], (A, B), [""]),
    "product of products": (lambda a, b, c: (a @ b) * (a @ c), (A, B, B2), ["", ""]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", TAILS)
@pytest.mark.slow(quick=6)
def test_a_tail_equals_the_call_that_replaces_it(name: str, dtype: torch.dtype) -> None:
    function, given, expected = TAILS[name]
    graph, values = graph_of(function, dtype, *given)
    found = list(tails(graph))
    assert [
        tail.epilogue + "x" * (tail.shape is not None) + "+" * (tail.residual is not None)
        for tail in found
    ] == expected
    for tail in found:
        assert tail.nodes[0] is tail.product
        assert tail.nodes[-1] is tail.last
        assert len(set(tail.nodes)) == len(tail.nodes)
        inner = set(tail.nodes) - {tail.last}
        assert all(set(tail.nodes).issuperset(node.users) for node in inner)
        own = values[tail.last]
        assert own.dtype is dtype
        torch.testing.assert_close(
            own.double(), value_of(tail, values), rtol=2e-2, atol=2e-2 if dtype is BF16 else 1e-5
        )


@pytest.mark.parametrize(("alpha", "found"), [(1, "silu"), (2, "")])
def test_a_factor_of_a_summand_is_a_part_of_a_function(alpha: int, found: str) -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        z = a @ b
        return z / torch.add(torch.exp(-z), 1, alpha=alpha)

    graph, _ = graph_of(function, FP32, A, B)
    assert [tail.epilogue for tail in tails(graph)] == [found]


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda z: (F.silu(z[:, :3]) * z[:, 3:], None), "swiglu"),
        (lambda z: (F.silu(z[:, :3]) * z[:, 3:], z[:, 1:2] + 1), ""),
        (lambda z: (F.silu(z[:, :3]) * z[:, 3:], z + 1), ""),
        (lambda z: (F.silu(z[:, :4]) * z[:, 2:], None), ""),
        (lambda z: (F.silu((h := z.split([3, 3], -1))[0]) * h[1], h[1] + 1), ""),
    ],
    ids=["halves", "a third part", "the whole", "overlapping parts", "up"],
)
def test_a_gate_reads_all_that_is_read_of_its_product(
    function: Callable[[Tensor], Any], found: str
) -> None:
    graph, _ = graph_of(lambda a, b: function(a @ b), FP32, A, B)
    assert [tail.epilogue for tail in tails(graph)] == [found]


@pytest.mark.parametrize("name", ["beta", "alpha of a node"])
def test_a_product_that_no_call_computes_has_no_terms(name: str) -> None:
    graph, _ = graph_of(lambda a, b, v: torch.addmm(v, a, b, beta=0.5), FP32, A, B, V)
    (tail,) = tails(graph)
    if name == "beta":
        assert terms_of(tail.product) is None
        return
    tail.product.kwargs = {"alpha": next(iter(graph.nodes))}
    assert terms_of(tail.product) is None


@pytest.mark.parametrize(
    ("alpha", "served"),
    [
        (1, True), (-2, True), (0.5, True), (-(2.0**-126), True), (2.0**-127, False), (0, False),
        (3.4e38, True), (-3.5e38, False), (float("nan"), False), (1j, False),
    ],
)  # fmt: skip
def test_an_alpha_that_fp32_holds_is_passed_on(alpha: Any, served: bool) -> None:
    graph, _ = graph_of(lambda a, b, v: torch.addmm(v, a, b), FP32, A, B, V)
    (tail,) = tails(graph)
    tail.product.kwargs = {"alpha": alpha}
    terms = terms_of(tail.product)
    assert (terms is not None) == served
    assert terms is None or terms[4] == alpha


#: Gate and up projection by two weights.
PAIRS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int]] = {
    "swiglu": (lambda a, b, c: F.silu(a @ b) * (a @ c), (A, B, B2), 1),
    "turned": (lambda a, b, c: (a @ c) * F.silu(a @ b), (A, B, B2), 1),
    "rows": (lambda x, b, c: F.silu(x @ b) * (x @ c), (X, B, B2), 1),
    "turned rows": (lambda x, b, c: (x @ c) * F.silu(x @ b), (X, B, B2), 1),
    "biases": (
        lambda a, b, c, v: F.silu(torch.addmm(v, a, b)) * torch.addmm(v, a, c), (A, B, B2, V), 1,
    ),
    "one bias": (lambda a, b, c, v: F.silu(torch.addmm(v, a, b)) * (a @ c), (A, B, B2, V), 0),
    "scaled": (
        lambda a, b, c, v: F.silu(torch.addmm(v, a, b, alpha=2)) * torch.addmm(v, a, c),
        (A, B, B2, V), 0,
    ),
    "scaled up": (
        lambda a, b, c, v: F.silu(torch.addmm(v, a, b)) * torch.addmm(v, a, c, alpha=2),
        (A, B, B2, V), 0,
    ),
    "other rows of rows": (
        lambda a, b, c: F.silu((a @ b).view(1, 4, 6)) * (a @ c).view(4, 1, 6), (A, B, B2), 0,
    ),
    "no gate": (lambda a, b, c: torch.tanh(a @ b) * (a @ c), (A, B, B2), 0),
    "sum": (lambda a, b, c: F.silu(a @ b) + (a @ c), (A, B, B2), 0),
    "other rows": (lambda a, b, c: F.silu(a @ b) * ((a + 1) @ c), (A, B, B2), 0),
    "up is read": (lambda a, b, c: (F.silu(a @ b) * (z := a @ c), z), (A, B, B2), 0),
    "rows of up are read": (
        lambda a, b, c: (F.silu(a @ b) * (z := a @ c).view(1, 4, 6), z), (A, B, B2), 0,
    ),
    "gate is read": (lambda a, b, c: ((g := F.silu(a @ b)) * (a @ c), g), (A, B, B2), 0),
    "itself": (lambda a, b: F.silu(z := a @ b) * z, (A, B), 0),
    "square": (lambda a, b: (g := F.silu(a @ b)) * g, (A, B), 0),
    "number": (lambda a, b: F.silu(a @ b) * 2.0, (A, B), 0),
    "two gates": (lambda a, b, c: F.silu(a @ b) * F.silu(a @ c), (A, B, B2), 0),
    "other operand": (lambda a, b, r: F.silu(a @ b) * r, (A, B, R), 0),
    "squared up": (lambda a, b, c: F.silu(a @ b) * (z := a @ c) * z, (A, B, B2), 0),
    "one column": (lambda a, b, c: F.silu(a @ b) * (a @ c), (A, B, B2[:, :1].contiguous()), 0),
    "other columns": (
        lambda a, b, c: F.silu(a @ b) * (a @ c).expand(4, 6), (A, B, B2[:, :1].contiguous()), 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_gate_and_up_of_two_weights_share_their_rows(name: str) -> None:
    function, given, count = PAIRS[name]
    graph, values = graph_of(function, BF16, *given)
    found = list(pairs(graph))
    assert len(found) == count
    for gate, up in found:
        assert (gate.shape is not None) is (up.shape is not None) is ("rows" in name)
        assert gate.product is not up.product
        y = F.silu(values[gate.last].double()) * values[up.last].double()
        output = next(node for node in graph.nodes if node.op == "output").args[0]
        torch.testing.assert_close(values[output].double(), y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "name", ["swiglu", "turned", "rows", "turned rows", "biases", "transposed"]
)
@pytest.mark.parametrize("undone", [False, True])
def test_two_products_of_frozen_weights_become_one(name: str, undone: bool) -> None:
    pair = PAIRS | {"transposed": (lambda a, b, c: F.silu(a @ b.t()) * (a @ c.t()),
                                   (A, B.t().contiguous(), B2.t().contiguous()), 1)}  # fmt: skip
    function, given, _ = pair[name]
    graph, values = graph_of(function, FP32, *given)
    output = next(node for node in graph.nodes if node.op == "output")
    expected = values[output.args[0]]
    _, *weights = (node for node in graph.nodes if node.op == "placeholder")
    ((gate, up),) = pairs(graph)
    for lacking in weights[:2]:
        assert constants.join(graph, gate, up, set(weights) - {lacking}) is None
    late = replace(gate, shape=[output, 6])  # a size that is computed behind both
    assert constants.join(graph, late, up, set(weights)) is None
    product = constants.join(graph, gate, up, set(weights))
    assert product is not None
    assert product.meta["val"].shape[-1] == 12
    if undone:
        constants.undo(product, gate, up)
    graph.eliminate_dead_code()
    graph.lint()
    y = torch.fx.GraphModule(torch.nn.Module(), graph)(*given)
    torch.testing.assert_close(y, expected)
    assert sum(node.target in PRODUCTS for node in graph.nodes) == (2 if undone else 1)


@pytest.mark.parametrize(("rows", "calls"), [(4, 1), (0, 0)])
def test_products_without_elements_stay_torchs(rows: int, calls: int) -> None:
    graph, _ = graph_of(lambda a, b: torch.relu(a @ b), FP32, A[:rows], B)
    inductor.Rewrite("always")._rewrite_all(graph)
    called = [node for node in graph.nodes if node.target is torch.ops.tmm.matmul.default]
    assert len(called) == calls


@pytest.mark.parametrize("gated", [True, False, None])
def test_a_joint_product_stays_only_where_the_activation_follows(
    gated: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, given, _ = PAIRS["swiglu"]
    graph, _ = graph_of(function, FP32, *given)
    weights = {node for node in graph.nodes if node.op == "placeholder"}
    ((gate, up),) = pairs(graph)
    if gated is not True:  # the tail is another, or cannot be read
        found = {False: SimpleNamespace(gated=False)}
        monkeypatch.setattr(inductor.tails, "tail_of", lambda product: found[gated])
    with nullcontext() if gated is not None else pytest.raises(KeyError):
        inductor.Join("always")._join(graph, gate, up, weights)
    graph.eliminate_dead_code()
    assert sum(node.target in PRODUCTS for node in graph.nodes) == (1 if gated else 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c, r: F.silu(a @ b) * (a @ b),
        lambda a, b, c, r: F.silu(torch.addmm(r, a, b)) * torch.addmm(r, a, c),
    ],
    ids=["itself", "summands of rows"],
)
def test_products_of_frozen_weights_that_stay_two(function: Callable[..., Any]) -> None:
    graph, _ = graph_of(function, FP32, A, B, B2, R)
    ((gate, up),) = pairs(graph)
    assert constants.join(graph, gate, up, set(graph.nodes)) is None


@pytest.mark.parametrize("lasting", [True, False])
def test_as_many_answers_are_kept_as_plans(lasting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten_answers.warm, "MAX_PLANS", 3)
    for name in ("answers", "passing", "through"):
        monkeypatch.setattr(aten_answers, name, {})
    kept = aten_answers.answers if lasting else aten_answers.passing
    keep = aten_answers._keep if lasting else aten_answers._keep_for_now
    drops = aten_answers.warm.drops
    for i in range(1, 9):
        answer = aten_answers.Answer()
        assert keep((i,), answer, drops) is kept[i,] is answer
        assert len(kept) == (i - 1) % 3 + 1
    for i in range(1, 9):
        assert aten_answers._keep_for_good((("part", i), 2), drops) is aten_answers.THROUGH
        assert aten_answers.through["part", i] is aten_answers.THROUGH
        assert len(aten_answers.through) == (i - 1) % 3 + 1
    assert aten_answers._keep_for_good(("mm", 2), drops) is aten_answers.THROUGH
    assert "mm" not in aten_answers.through
    # Plans were dropped while the answer was found.
    answer = aten_answers.Answer()
    assert keep((9,), answer, drops - 1) is answer
    assert (9,) not in kept
    aten_answers._keep_for_good((("part", 9), 2), drops - 1)
    assert ("part", 9) not in aten_answers.through


@pytest.mark.parametrize(
    ("slowed", "saved_us", "left", "now"),
    [
        (8, 15.5, "", True), (8, 16.0, "", False), (8, 16.5, "", False), (9, 16.5, "", True),
        (7, 0.0, "", False), (8, 15.5, "before", True),
    ],
)  # fmt: skip
def test_an_operator_is_left_once_enough_calls_cost_more_than_they_saved(
    slowed: int, saved_us: float, left: str, now: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aten, "ENOUGH", 8)
    monkeypatch.setattr(aten, "overhead_us", lambda name: {"mm": 2.0}[name])
    operator = SimpleNamespace(name="mm", left=left, slowed=slowed, saved_us=0.0)
    operator.settle = lambda: setattr(operator, "saved_us", saved_us)
    operator.leave = lambda why: setattr(operator, "left", why)
    block = aten.Enabled(("mm",), None, "heuristic", False, "CPU", {"mm": operator})  # type: ignore[dict-item]
    block.review()
    assert bool(operator.left) is now
    if now and not left:
        assert operator.left.startswith(f"{slowed} calls that torch answered ")
        assert f"cost the host {slowed * 2 / 1e3:.1f} ms" in operator.left
        assert operator.left.endswith(f"saved {saved_us / 1e3:.1f} ms")
    else:
        assert operator.left == left
    monkeypatch.setattr(aten, "_stack", [block])
    monkeypatch.setattr(aten.Enabled, "install", lambda self: None)
    aten._answer_anew()
    assert (operator.left, operator.slowed) == ("", 0 if now else slowed)


@pytest.mark.parametrize("nested", [True, False])
def test_a_product_of_torch_within_a_launch_announces_its_kernel(
    nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's plans are dropped, so that its next launches say that they are under way."""
    old = {("x",): SimpleNamespace(kernel="outer"), ("y",): SimpleNamespace(kernel="other")}
    monkeypatch.setattr(aten_answers, "launching", lambda: "outer")
    monkeypatch.setattr(aten_answers, "answers", {})
    monkeypatch.setattr(warm, "NESTING", set())
    monkeypatch.setattr(warm, "TABLES", [old])
    operator = aten_answers.Operator(
        "mm", SimpleNamespace(call_boxed=None), None, "heuristic", host_bound.Pace(list), list
    )
    call: Any = SimpleNamespace(a=torch.zeros(1))
    with settings.nested() if nested else nullcontext():
        assert operator.first(("mm",), call) is aten_answers.INSIDE
    assert (set() if nested else {"outer"}) == warm.NESTING
    assert [*old] == ([("x",), ("y",)] if nested else [("y",)])
    assert [*aten_answers.answers] == ([("mm",)] if nested else [])
    assert not operator.pace.chose


@pytest.mark.parametrize("saved", [2.0, None])
@pytest.mark.parametrize(
    ("lasting", "capturing", "where"),
    [(True, False, "answers"), (False, False, "passing"), (True, True, ""), (False, True, "")],
)
def test_how_long_an_answer_is_kept(
    saved: float | None,
    lasting: bool,
    capturing: bool,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture restricts the choice, so its answer is not kept."""
    tables: dict[str, dict[Any, Any]] = {"answers": {}, "passing": {}, "through": {}}
    for name, table in tables.items():
        monkeypatch.setattr(aten_answers, name, table)
    plan = SimpleNamespace(
        kernel="blas" if saved is None else "k",
        launcher="launch",
        choice=SimpleNamespace(lasting=lasting),
        problem=SimpleNamespace(capturing=capturing, bias=BF16 if lasting else None),
    )
    monkeypatch.setattr(aten_answers.warm, "make_plan", lambda *given, **more: plan)
    monkeypatch.setattr(aten_answers, "_saved_us", lambda given: saved)
    operator = aten_answers.Operator(
        "mm", SimpleNamespace(call_boxed=None), None, "heuristic", host_bound.Pace(list), list
    )
    key = ("part", 1), 2
    call: Any = SimpleNamespace(a=torch.zeros(1))
    found = operator.first(key, call)
    kept = {name: table for name, table in tables.items() if table}
    expected: dict[str, Any] = {where: {key: found}} if where else {}
    if saved is None and where == "answers":
        expected["through"] = {key[0]: aten_answers.THROUGH}
    assert kept == expected
    assert (found.kernel, found.launch) == (plan.kernel, plan.launcher if saved else None)
    assert found.as_bias is (saved is not None and lasting)
    assert (found is aten_answers.THROUGH) is (saved is None and where != "passing")
    assert (found.until > time.monotonic()) is (where == "passing")


@pytest.mark.parametrize("answered", [True, False])
def test_samples_of_calls_become_rarer(answered: bool) -> None:
    at: list[int] = []
    pace = host_bound.Pace(lambda: at.append(pace.calls))
    pace.chose, tally = True, aten_answers.Tally()
    answer = aten_answers.Answer(saves_us=2.0, tally=tally)
    torchs = SimpleNamespace(call_boxed=None)
    operator = aten_answers.Operator("mm", torchs, None, "heuristic", pace, list)
    x = torch.zeros(1)
    for _ in range(3000):
        answer.count(pace, x) if answered else operator.count(x)
    between = [after - before for before, after in zip([0, *at], at, strict=False)]
    assert between[:5] == [16, 16, 32, 48, 64]
    assert between[15:] == [240, *[256] * (len(between) - 16)]
    assert (pace.host, pace.gpu, pace.chose) == (True, True, False)
    assert (tally.calls, tally.saved_us) == ((3000, 6000.0) if answered else (0, 0.0))
    assert operator.passed == (0 if answered else 3000)


def test_the_gpu_is_behind_if_it_has_not_reached_the_event_of_the_last_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call records an event, and the next one queries it; not during a capture."""
    reached, at = iter([True, False]), list[tuple[int, bool, bool]]()
    event = SimpleNamespace(record=lambda stream: None, query=lambda: next(reached))
    capturing = [False] * 3 + [True] + [False] * 3
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.pop(0))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    pace = host_bound.Pace(lambda: at.append((pace.calls, pace.host, pace.gpu)))
    answer = aten_answers.Answer(tally=aten_answers.Tally())
    x: Any = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    while capturing:
        answer.count(pace, x)
    # Call 33 begins the second sample, the capture at call 34 discards it, and 66 begins it anew.
    assert at == [(17, True, False), (67, False, True)]


def test_out_is_written_by_a_kernel_only_among_plain_tensors() -> None:
    plain = torch.randn(2, 2)
    lazy = torch._neg_view(plain)
    for given in itertools.product((plain, lazy), repeat=2):
        assert _in_memory(*given) is all(t is plain for t in given)
    with FakeTensorMode():
        assert not _in_memory(plain, plain)
