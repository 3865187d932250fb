"""A product gives what ``torch.matmul`` gives: the same tensor, or an error of the same words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tmm_core
from tmm_core import dispatch

Tensor = torch.Tensor

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
    torch.complex128, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip

sizes = st.integers(0, 4)
batches = st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3)


@st.composite
def views(draw: Any, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """A tensor of this shape in some layout: permuted, sliced, expanded, overlapping, flipped
    in sign or conjugated lazily."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))

    def fill(shape: Any) -> Tensor:
        if dtype.is_complex:
            t = torch.complex(*torch.randn((2, *shape), generator=generator))
        else:
            t = torch.randint(-4, 5, shape, generator=generator)
        return t.to(device, dtype)

    layout = draw(st.sampled_from(["contiguous", "permuted", "sliced", "expanded", "overlapping"]))
    dims = len(shape)
    if layout == "permuted" and dims > 1:
        order = draw(st.permutations(range(dims)))
        t = fill([shape[d] for d in order]).permute([order.index(d) for d in range(dims)])
    elif layout == "sliced" and dims:
        dim = draw(st.integers(0, dims - 1))
        wide = list(shape)
        wide[dim] = 2 * wide[dim] + 1
        t = fill(wide).movedim(dim, 0)[1::2][: shape[dim]].movedim(0, dim)
    elif layout == "expanded" and dims:
        dim = draw(st.integers(0, dims - 1))
        t = fill([1 if d == dim else n for d, n in enumerate(shape)]).expand(shape)
    elif layout == "overlapping" and dims == 2:
        t = fill([sum(shape)]).as_strided(shape, (1, 1))
    else:
        t = fill(shape)
    if dtype.is_complex and draw(st.booleans()):
        t = t.conj()
        if draw(st.booleans()) and dtype == torch.complex64:
            t = t.imag  # negated lazily, of another dtype
    return t


@st.composite
def operands(draw: Any, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Operands that mostly multiply; some differ by a size, a dimension or a dtype."""
    m, n, k = draw(sizes), draw(sizes), draw(sizes)
    dtype = draw(st.sampled_from(DTYPES))
    other = draw(st.sampled_from([dtype] * 9 + DTYPES[:1]))
    batch = draw(batches)
    broadcast = [draw(st.sampled_from([size, size, 1])) for size in batch]
    broadcast = broadcast[draw(st.integers(0, len(broadcast))) :]
    a = draw(st.sampled_from([(k,), (m, k), (*batch, m, k), (*broadcast, m, k), ()]))
    wrong = k + 1 if draw(st.integers(0, 9)) == 0 else k
    b = draw(st.sampled_from([(wrong,), (wrong, n), (*broadcast, wrong, n), (*batch, wrong, n)]))
    return draw(views(a, dtype, device)), draw(views(b, other, device))


def outcome(call: Callable[[], Tensor]) -> Tensor | Exception:
    try:
        return call()
    except Exception as error:
        return error


def compare(mine: Tensor | Exception, theirs: Tensor | Exception) -> None:
    if isinstance(theirs, Exception):
        assert isinstance(mine, Exception), f"no error, but torch says: {theirs}"
        assert (type(mine), str(mine)) == (type(theirs), str(theirs))
    else:
        if isinstance(mine, Exception):
            raise mine
        # The same sums by another route round differently where torch takes one of its own.
        torch.testing.assert_close(mine, theirs, check_stride=False)


@given(operands())
@settings(deadline=None, max_examples=400, derandomize=True)
@pytest.mark.slow
def test_values_and_errors_are_torchs(pair: tuple[Tensor, Tensor]) -> None:
    a, b = pair
    theirs = outcome(lambda: torch.matmul(a, b))
    if a.dtype != b.dtype and isinstance(theirs, Tensor):
        # torch.bmm returns before it has looked at dtypes where there is nothing to compute.
        assert theirs.numel() == 0 or a.shape[-1] == 0
        with pytest.raises(RuntimeError, match="one dtype"):
            tmm_core.matmul(a, b)
        return
    compare(outcome(lambda: tmm_core.matmul(a, b)), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int32])
@pytest.mark.parametrize("shape", [(3, 5, 37), (4, 1, 37), (2, 3, 1, 5, 37), (1, 1, 37)], ids=str)
@pytest.mark.slow(quick=6)
def test_more_dimensions_are_the_same_product(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The bits are equal whether tmm or torch folds the dimensions."""
    *batch, m, k = shape
    generator = torch.Generator().manual_seed(0)

    def fill(*sizes: int) -> Tensor:
        return (4 * torch.randn(sizes, generator=generator)).to(dtype)

    def same(y: Tensor, flat: Tensor) -> None:
        assert y.dtype is flat.dtype
        assert y.is_contiguous()
        assert torch.equal(y, flat.view(y.shape))

    b, bias, residual = fill(k, 11), fill(11), fill(*batch, m, 11)
    for a in (
        fill(*shape),
        fill(*batch, m, k + 3)[..., :k],
        fill(*batch, m + 2, k)[..., 1 : m + 1, :],
        fill(*shape[1:], shape[0]).movedim(-1, 0),
        fill(*shape[1:]).expand(shape),
    ):
        rows, added = a.reshape(-1, k), residual.reshape(-1, 11)
        same(tmm_core.matmul(a, b), tmm_core.matmul(rows, b))
        same(tmm_core.plan(a, b)(a, b), tmm_core.matmul(rows, b))
        same(tmm_core.matmul(a, b, bias=bias), tmm_core.matmul(rows, b, bias=bias))
        one = tmm_core.matmul(rows, b, residual=added)
        same(tmm_core.matmul(a, b, residual=residual), one)
        out = torch.zeros_like(residual)
        assert tmm_core.matmul(a, b, out=out) is out
        same(out, torch.mm(rows, b))
        matrices = fill(*batch, k, 11)
        if (count := matrices[..., 0, 0].numel()) > 1:
            stacked = a.reshape(count, m, k), matrices.view(count, k, 11)
            same(tmm_core.matmul(a, matrices), torch.bmm(*stacked))


@st.composite
def outputs(draw: Any) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Operands that multiply, and a function that makes an `out` of some shape and layout."""
    m, n, k = (draw(st.integers(1, 4)) for _ in range(3))
    batch = draw(st.sampled_from([(), (), (2,), (3, 1)]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int32]))
    a, b = draw(views((*batch, m, k), dtype)), draw(views((k, n), dtype))
    right = (*batch, m, n)
    shape = draw(st.sampled_from([right] * 4 + [(0,), (m + 1, n), (2, m, n), ()]))
    other = draw(st.sampled_from([dtype] * 6 + [torch.float64]))
    layout = draw(st.sampled_from(["contiguous", "transposed", "sliced", "expanded"]))

    def make() -> Tensor:
        if layout == "transposed" and len(shape) > 1:
            return torch.zeros(shape, dtype=other).mT.contiguous().mT
        if layout == "sliced" and len(shape) > 1:
            return torch.zeros((*shape[:-1], 2 * shape[-1]), dtype=other)[..., ::2]
        if layout == "expanded" and len(shape) > 1 and shape[-2] > 1:
            return torch.zeros((*shape[:-2], 1, shape[-1]), dtype=other).expand(shape)
        return torch.zeros(shape, dtype=other)

    return a, b, make


@given(outputs())
@settings(deadline=None, max_examples=300, derandomize=True)
@pytest.mark.slow
def test_out_is_torchs(case: tuple[Tensor, Tensor, Callable[[], Tensor]]) -> None:
    a, b, make = case
    results = []
    for matmul in (tmm_core.matmul, torch.matmul):
        out = make()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = outcome(lambda matmul=matmul, out=out: matmul(a, b, out=out))
        if not isinstance(result, Exception):
            assert result is out
        results.append((result, [str(w.message).split(".")[0] for w in caught]))
    (mine, messages), (theirs, torch_messages) = results
    if a.dim() > 2 and isinstance(mine, Exception) and "more than one element" in str(mine):
        assert torch._debug_has_internal_overlap(make()) == 1
        return  # torch writes repeatedly to the same elements here, and refuses to in 2-D
    if "must match the size of tensor b" in str(theirs):
        # torch folds the batch into rows and then cannot find them in a transposed `out`.
        assert a.dim() > 2
        assert isinstance(mine, Tensor)
        torch.testing.assert_close(mine, torch.matmul(a, b))
        return
    compare(mine, theirs)
    if isinstance(theirs, Tensor):
        assert isinstance(mine, Tensor)
        assert mine.stride() == theirs.stride()
        assert [s[:60] for s in messages] == [s[:60] for s in torch_messages]


def test_out_among_its_inputs() -> None:
    """Columns of one buffer: torch looks no closer, and a kernel must not read what it wrote."""
    buffer = torch.randn(4, 12)
    a, b, out = buffer[:, :4], torch.randn(4, 4), buffer[:, 4:8]
    expected, untouched = torch.relu(a @ b), buffer[:, 8:].clone()
    assert tmm_core.matmul(a, b, epilogue="relu", out=out) is out
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(buffer[:, 8:], untouched)
    overlapping = buffer[:, 2:6]
    expected = a @ b
    torch.testing.assert_close(tmm_core.matmul(a, b, out=overlapping), expected)

    # If the overlap is plain, the message is torch's; torch.matmul on a CPU does not check.
    memory = torch.randn(24)
    before = memory.clone()
    square = memory[:16].view(4, 4)
    for out in (square, square.t(), memory[8:].view(4, 4), memory[:16].view(4, 4)):
        with pytest.raises(RuntimeError, match="some elements of the input tensor"):
            tmm_core.matmul(square, b, out=out)
    assert torch.equal(memory, before)


def test_out_that_overlaps_itself_is_refused() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    matmuls = (tmm_core.matmul, torch.matmul)
    compare(*(outcome(lambda m=m: m(a, b, out=torch.zeros(1, 5).expand(3, 5))) for m in matmuls))
    with pytest.raises(RuntimeError, match="more than one element of the written-to"):
        tmm_core.matmul(a, b, epilogue="silu", out=torch.zeros(1, 5).expand(3, 5))


@pytest.mark.parametrize("shapes", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((4,), (2, 4, 5))])
def test_meta_tensors(shapes: Any) -> None:
    a, b = (torch.empty(shape, device="meta") for shape in shapes)
    mine, theirs = tmm_core.matmul(a, b, epilogue="silu"), torch.matmul(a, b)
    assert (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
    out = torch.empty(0, device="meta")
    assert tmm_core.matmul(a, b, out=out) is out
    assert out.shape == theirs.shape
    learning = tmm_core.matmul(a.requires_grad_(), b, epilogue="tanh")
    assert torch.autograd.grad(learning.sum(), a)[0].shape == a.shape
    with pytest.raises(RuntimeError, match="same device"):
        tmm_core.matmul(a.detach(), torch.zeros(shapes[1]))


@given(
    m=sizes, n=sizes, batch=st.sampled_from([(), (2,), (0,), (2, 1)]),
    epilogue=st.sampled_from(["silu", "sigmoid", "softplus", "gelu_tanh+softcap(2)", "swiglu"]),
    bias=st.booleans(), residual=st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=80, derandomize=True)
def test_without_k_the_product_is_zeros_and_then_the_epilogue(
    m: int, n: int, batch: Any, epilogue: str, bias: bool, residual: bool
) -> None:
    width = 2 * n if epilogue == "swiglu" else n
    a, b = torch.randn(*batch, m, 0), torch.randn(0, width)
    vector = torch.randn(width) if bias else None
    addend = torch.randn(*batch, m, n) if residual else None
    parsed = dispatch.default_dispatcher().registry.epilogue(epilogue)
    z = torch.zeros(*batch, m, width) + (0 if vector is None else vector)
    expected = parsed.apply(z) + (0 if addend is None else addend)
    got = tmm_core.matmul(a, b, bias=vector, residual=addend, epilogue=epilogue)
    torch.testing.assert_close(got, expected)
    out = torch.full_like(expected, float("nan"))
    tmm_core.matmul(a, b, bias=vector, residual=addend, epilogue=epilogue, out=out)
    torch.testing.assert_close(out, expected)
