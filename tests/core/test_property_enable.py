"""Torch's products under ``enable()``: bit for bit torch's result, or torch's own error."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from drawn import LAYOUTS, bounded, filled, laid_out, long, often, outcome
from hypothesis import given
from hypothesis import strategies as st
from test_enable import Sums, enable, sums  # noqa: F401  # a fixture

Tensor = torch.Tensor
aten = torch.ops.aten

FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
C64 = torch.complex64
DTYPES = [*[FP32] * 4, *[BF16] * 2, FP16, FP64, C64, torch.int64, torch.int32, torch.bool]
OPERATORS = ("mm", "mm", "addmm", "addmm", "bmm", "baddbmm", "matmul", "linear", "addbmm", "chain")


class Sub(Tensor):
    """A subclass that torch's products keep."""


def dressed(t: Tensor, how: str) -> Tensor:
    """The tensor as one of another kind."""
    if how == "conj":
        return t.conj() if t.is_complex() else t
    if how == "neg":
        return torch.view_as_complex(torch.stack([t, -t], -1)).conj().imag if t.dtype is FP32 else t
    if how == "sparse":
        return t.to_sparse()
    if how == "csr" and t.dim() == 2:
        return t.to_sparse_csr()
    if how == "subclass":
        return t.as_subclass(Sub)
    if how == "parameter" and t.is_floating_point():
        return torch.nn.Parameter(t)
    if how == "recorded" and (t.is_floating_point() or t.is_complex()):
        return t.detach().requires_grad_()
    if how == "inference":
        with torch.inference_mode():
            return t.clone()
    return t.to("meta") if how == "meta" else t


KINDS = [
    *[""] * 16, "conj", "neg", "sparse", "csr", "subclass", "parameter", "recorded", "recorded",
    "inference", "meta",
]  # fmt: skip
OUTS = [
    *["none"] * 8, "right", "right", "empty", "wide", "dtype", "strided", "transposed", "expanded",
    "recorded", "a", "b", "part of a", "reversed rows", "meta",
]  # fmt: skip
MODES = [
    "",
    "",
    "",
    "no_grad",
    "inference",
    "deterministic",
    "autocast",
    "vmap",
    "nested",
    "thread",
]


@st.composite
def products(draw: Any) -> dict[str, Any]:
    """A call of one of torch's products, whose tensors are made anew by ``made``."""
    size = st.sampled_from([0, 1, 2, 3, 4, 8])
    name = draw(st.sampled_from(OPERATORS))
    m, n, k = draw(size), draw(size), draw(size)
    lead = (draw(st.sampled_from([1, 2, 0])),) if "b" in name or name == "chain" else ()
    dtype = draw(st.sampled_from(DTYPES))
    shapes = [(*lead, m, k), (*lead, often(draw, k, k + 1), n)]
    if name == "linear":
        shapes[1] = (n, k)
    if "add" in name:
        full = (m, n) if name == "addbmm" else (*lead, m, n)
        shapes.append(
            often(draw, draw(st.sampled_from([full, full, (n,), (1, n), (), (m, 1)])), (n + 1,))
        )
    elif name == "linear" and draw(st.booleans()):
        shapes.append((n,))
    tensors = [
        (shape, often(draw, dtype, FP32, BF16, FP64), draw(st.integers(0, 9)),
         draw(st.sampled_from(["contiguous", *LAYOUTS])),
         draw(st.sampled_from(KINDS)))
        for shape in shapes
    ]  # fmt: skip
    scalars = {}
    if "add" in name:
        value = st.sampled_from([1, 1, 1.0, 2, 0, 0.5, -1, True, 0.0])
        scalars = {key: draw(value) for key in ("alpha", "beta")}
    out = draw(st.sampled_from(OUTS)) if name in ("mm", "addmm", "bmm", "baddbmm") else "none"
    return {
        "name": name, "tensors": tensors, "scalars": scalars, "out": out,
        "mode": draw(st.sampled_from(MODES)), "size": (*lead, m, n), "dtype": dtype,
    }  # fmt: skip


def made(drawn: dict[str, Any]) -> tuple[list[Tensor], Tensor | None]:
    """The call's tensors and its ``out``."""
    given = [
        dressed(laid_out(filled(shape, dtype, seed), layout), kind)
        for shape, dtype, seed, layout, kind in drawn["tensors"]
    ]
    size, dtype, how = drawn["size"], drawn["dtype"], drawn["out"]
    rows, columns = size[-2:]
    fresh = torch.full(size, 7, dtype=FP32).to(dtype)
    outs: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "right": lambda: fresh,
        "empty": lambda: fresh.new_empty(0),
        "wide": lambda: fresh.new_full((*size[:-1], columns + 1), 7),
        "dtype": lambda: fresh.to(FP64 if dtype is not FP64 else FP32),
        "strided": lambda: laid_out(fresh, "sliced"),
        "transposed": lambda: laid_out(fresh, "transposed"),
        "expanded": lambda: fresh[..., :1, :].expand(size) if rows else fresh,
        "recorded": lambda: dressed(fresh, "recorded"),
        "a": lambda: given[0],
        "b": lambda: given[1],
        "part of a": lambda: (
            given[0][..., :rows, :columns] if given[0].layout is torch.strided else fresh
        ),
        "reversed rows": lambda: fresh.flip(-2) if rows else fresh,
        "meta": lambda: fresh.to("meta"),
    }
    return given, outs[how]()


def computed(drawn: dict[str, Any]) -> Any:
    """The result of the call, its ``out`` and its gradients; or its error."""
    given, out = made(drawn)
    a, b, *more = given
    named = dict(drawn["scalars"])
    if out is not None:
        named["out"] = out

    def product(a: Tensor, b: Tensor, *more: Tensor) -> Tensor:
        name = drawn["name"]
        if "add" in name:
            return getattr(torch, name)(more[0], a, b, **named)  # type: ignore[no-any-return]
        if name == "linear":
            return torch.nn.functional.linear(a, b, *more)
        if name == "chain":
            return torch.bmm(a, b).mT @ a
        return getattr(torch, name)(a, b, **named)  # type: ignore[no-any-return]

    mode = drawn["mode"]
    with contextlib.ExitStack() as stack:
        if mode == "no_grad":
            stack.enter_context(torch.no_grad())
        elif mode == "inference":
            stack.enter_context(torch.inference_mode())
        elif mode == "autocast":
            stack.enter_context(torch.autocast("cpu", BF16))
        elif mode == "deterministic":
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, False)
        if mode == "vmap":
            twice = [t[None].expand(2, *t.shape) if t.layout is torch.strided else t for t in given]
            y = torch.vmap(product)(*twice)[0]
        elif mode == "thread":
            found: list[Any] = []
            worker = threading.Thread(
                target=lambda: found.append(outcome(lambda: product(a, b, *more)))
            )
            worker.start()
            worker.join()
            y = found[0]
            if isinstance(y, Exception):
                raise y
        else:
            y = product(a, b, *more)
    result = [y, out]
    leaves = [t for t in given if t.requires_grad and t.is_leaf]
    if leaves and y.requires_grad and not y.is_meta:
        up = torch.ones_like(y)
        result += torch.autograd.grad(y, leaves, up, allow_unused=True)
    return result


def alike(found: Any, wanted: Any, what: str, unread: bool) -> None:
    if isinstance(wanted, Exception) or isinstance(found, Exception):
        assert type(found) is type(wanted), f"{what}: {found!r}, and torch {wanted!r}"
        # Torch lists all kernels of an operator, tmm's entry among them.
        texts = [str(e).partition("is only available")[0] for e in (found, wanted)]
        assert texts[0] == texts[1], f"{what}: {found!r}, and torch {wanted!r}"
        return
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine is None) == (theirs is None), what
        if theirs is None:
            continue
        assert type(mine) is type(theirs), what
        for field in ("shape", "dtype", "layout", "device", "requires_grad"):
            assert getattr(mine, field) == getattr(theirs, field), f"{what}: {field}"
        if theirs.is_meta or unread:
            continue
        if theirs.layout is torch.strided:
            assert mine.stride() == theirs.stride(), f"{what}: {mine.stride()}, {theirs.stride()}"
        one, other = (
            t.detach().to_dense() if t.layout is not torch.strided else t.detach()
            for t in (mine, theirs)
        )
        assert torch.equal(one.resolve_conj(), other.resolve_conj()), f"{what}: {one}, {other}"


def result_of(drawn: dict[str, Any]) -> Any:
    """The call's outcome, without the warnings that torch gives once in a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return computed(drawn)
        except Exception as error:
            return error


def verify(drawn: dict[str, Any]) -> None:
    # Torch multiplies some operands of two devices, one of them meta, and leaves the result as is.
    unread = any(kind == "meta" for *_, kind in drawn["tensors"])
    wanted = result_of(drawn)
    block = enable()
    with block, enable() if drawn["mode"] == "nested" else contextlib.nullcontext():
        found = result_of(drawn)
        again = result_of(drawn)
    alike(found, wanted, "first", unread)
    alike(again, wanted, "again", unread)
    alike(result_of(drawn), wanted, "afterwards", unread)


@pytest.fixture
def answered(sums: Sums) -> Iterator[Sums]:  # noqa: F811
    """Whether a kernel answers some of the calls; otherwise the test would test nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield sums
    torch.set_num_threads(threads)
    assert sums.launched > 20


@bounded
@given(drawn=products())
@pytest.mark.slow
def test_a_product_equals_torchs(answered: Sums, drawn: dict[str, Any]) -> None:
    verify(drawn)


@pytest.mark.endurance
@long
@given(drawn=products())
def test_a_product_equals_torchs_for_long(answered: Sums, drawn: dict[str, Any]) -> None:
    verify(drawn)
