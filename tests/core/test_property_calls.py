"""Every path of tmm agrees on what a valid call is. All compute what torch's expression does, or
all refuse the call with the same kind of error."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from drawn import (
    UNCAST,
    Autocast,
    Call,
    Path,
    agrees,
    assert_same,
    autocasts,
    bounded,
    cast_by,
    compiled,
    each,
    fake,
    forced,
    inference,
    linear,
    long,
    mapped_one,
    matmul,
    meta,
    often,
    outcome,
    recording,
    result_dtype,
    seldom,
    tensors,
    to_out,
    tolerance,
    under,
    wide,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import tmm_core
from tmm_core import dispatch, formats

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

Tensor = torch.Tensor

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [
    *[FP32] * 4, *[BF16] * 3, FP16, *[FP64] * 2, torch.complex64, torch.int32, torch.int64,
    torch.uint8, torch.bool, E4M3, E4M3, E5M2,
]  # fmt: skip
EPILOGUES = [
    *[None] * 4, "silu", "relu", "tanh", "softcap(3)", "gelu_tanh+relu", "relu+silu",
    "swiglu", "geglu", "swiglu+relu", "clamped_swiglu", "leaky_relu", "scale(2)",
]  # fmt: skip
ALPHAS: list[Any] = [
    *[1.0] * 9, 2.0, -0.5, 0.0, 3, True, np.float32(0.5), np.int64(2), np.float64(1.5), 2 + 0j,
    torch.tensor(2.0),
]  # fmt: skip
NO_ALPHAS: list[Any] = [1j, "2", None, np.ones(1), torch.tensor([2.0]), 2**70]
TERMS = ("bias", "residual", "scale_a", "scale_b")


@st.composite
def calls(draw: Any) -> Call:
    """Arguments of ``matmul``: most of them fit, some miss in one respect."""
    size = st.sampled_from([0, 1, 2, 3, 4, 5])
    m, n, k = draw(size), draw(size), draw(size)
    epilogue = often(draw, draw(st.sampled_from(EPILOGUES)), "nonsense")
    gated = epilogue is not None and "glu" in epilogue
    width = often(draw, 2 * n if gated else n, n)
    batch = draw(st.sampled_from([(), (), (2,), (1,), (2, 3), (0,)]))
    shape_a = often(draw, (*batch, m, k), (k,), (m, k), ())
    fewer = draw(st.sampled_from([(), (), batch, tuple(1 for _ in batch), batch[1:]]))
    shape_b = often(draw, (*fewer, k, width), (k,), (k + 1, width))
    dtype = draw(st.sampled_from(DTYPES))
    eight_bit = dtype in (E4M3, E5M2)
    of_b = draw(st.sampled_from([E4M3, E5M2])) if eight_bit else often(draw, dtype, FP32, BF16)
    call: Call = {"a": draw(tensors(shape_a, dtype)), "b": draw(tensors(shape_b, of_b))}
    call["epilogue"] = epilogue
    call["out_dtype"] = often(draw, None, FP32, BF16, FP64, torch.int32, E4M3)
    call["alpha"] = often(draw, draw(st.sampled_from(ALPHAS)), *NO_ALPHAS)
    own = result_dtype(call, call["out_dtype"])
    if draw(st.booleans()):
        kind = often(draw, dtype if not eight_bit else own, FP32, FP64, FP16, own)
        full = (*shape_a[:-1], width)
        fitting = draw(st.sampled_from([(width,), (width,), (1, width), (1,), (), full]))
        shape = often(draw, fitting, (width + 1,))
        call["bias"] = draw(tensors(shape, kind))
    if draw(st.booleans()):
        kind = often(draw, own, FP32, FP64, dtype if not eight_bit else own)
        narrow = width // 2 if gated else width
        full = (*shape_a[:-1], narrow)
        fitting = draw(st.sampled_from([full, (narrow,), (), (1, narrow)]))
        shape = often(draw, fitting, (2, *full), (7,))
        call["residual"] = draw(tensors(shape, kind))
    for name, shape in (("scale_a", (*shape_a[:-1], 1)), ("scale_b", (*shape_b[:-2], 1, width))):
        if draw(st.booleans()) if eight_bit else seldom(draw):
            shape = often(draw, draw(st.sampled_from([shape, (), (1, 1, 1)])), (3, 1))
            call[name] = draw(tensors(shape, often(draw, FP32, BF16, FP64))).abs()
    return {name: value for name, value in call.items() if name == "alpha" or value is not None}


# -- torch's expression --------------------------------------------------------------------


def widened(t: Tensor) -> Tensor:
    found = formats.IMPLIED.get(t.dtype)
    return (t if found is None else found.dequantize(t)).to(wide(t.dtype))


def expression(call: Call) -> Tensor:
    """The call in torch's operators and wide dtypes; raises where torch does."""
    a, b = widened(call["a"]), widened(call["b"])
    alpha = call["alpha"]
    alpha = alpha.item() if isinstance(alpha, (Tensor, np.generic)) else alpha
    if isinstance(alpha, complex) and not alpha.imag:
        alpha = alpha.real
    integers = not (a.is_floating_point() or a.is_complex())
    whole = integers and not (call.get("out_dtype") or torch.int8).is_floating_point
    z = torch.matmul(a, b) * (int(alpha) if whole else alpha)
    for name in ("scale_a", "scale_b"):
        if name in call:
            z = z * scale_of(call, name)
    bias, residual = (widened(call[n]) if n in call else None for n in ("bias", "residual"))
    if bias is not None and bias.numel() == (b.shape[-1] if b.dim() > 1 else 1):
        # Vectors are matrices of one row or column, which the result lacks.
        bias = bias.reshape(()) if b.dim() == 1 else bias.reshape(-1) if a.dim() == 1 else bias
    epilogue = dispatch.default_dispatcher().registry.epilogue(call.get("epilogue"))
    return epilogue.expression(z, bias, residual)


def scale_of(call: Call, name: str) -> Tensor:
    """A scale with the dimensions of the result, which has none for a vector operand."""
    scale = widened(call[name])
    if scale.numel() == 1:
        return scale.reshape(())
    if call["b"].dim() == 1:
        return scale[..., 0]
    return scale[..., 0, :] if call["a"].dim() == 1 and name == "scale_b" else scale


# -- the paths of a call -------------------------------------------------------------------


def recorded(call: Call) -> Any:
    return matmul(each(recording, call))


def by_operator(call: Call) -> Any:
    return torch.ops.tmm.matmul(*(call.get(name) for name in POSITIONAL[:4]), *(
        default if (value := call.get(name)) is None else value
        for name, default in zip(POSITIONAL[4:], (1.0, "", None, None, None), strict=True)
    ))  # fmt: skip


POSITIONAL = (
    "a", "b", "bias", "residual", "alpha", "epilogue", "out_dtype", "scale_a", "scale_b",
)  # fmt: skip


def mapped(call: Call) -> Any:
    """``torch.vmap`` over two equal copies of every tensor; the first result."""
    tensors = {n: t for n, t in call.items() if isinstance(t, Tensor) and n != "alpha"}
    rest = {n: t for n, t in call.items() if n not in tensors}
    twice = {n: t[None].repeat_interleave(2, 0) for n, t in tensors.items()}
    return torch.vmap(lambda given: matmul(given | rest))(twice)[0]


def described(call: Call) -> Any:
    tmm_core.problem(**call)  # of folded operands
    return meta(call)


def paths(call: Call) -> Iterator[tuple[str, Path]]:
    """The paths that can take a call, by name."""
    yield from {
        "again": matmul, "inference": inference, "recorded": recorded, "forced": forced,
        "meta": meta, "out": to_out,
    }.items()  # fmt: skip
    if not isinstance(call["alpha"], Tensor):  # which would be read
        yield "fake", fake
    if call["b"].dim() == 2:
        yield "linear", linear
    number = isinstance(call["alpha"], (int, float)) and call["alpha"] != 2**70
    usual = "bias" not in call or call["bias"].shape == (
        call["b"].shape[-1] if call["b"].dim() > 1 else 1,
    )
    if number and usual:
        yield "operator", by_operator
        yield "problem", described
    yield "vmap", mapped
    for name in ("a", "bias", "residual", "scale_b"):
        if name in call:
            yield f"vmap of {name}", mapped_one(name)


def verify(call: Call, modes: Autocast, *more: tuple[str, Path]) -> None:
    """Compare every path of a call with the plain one, and that one with torch's expression."""
    with torch.no_grad():
        bare = outcome(lambda: matmul(call))
        with under(modes):
            plain = outcome(lambda: matmul(call))
    given = cast_by(modes, call)
    dtype = result_dtype(given, call.get("out_dtype"))
    wanted = outcome(lambda: expression(given))
    coarse = max(given["a"].dtype, dtype, key=tolerance)
    if not isinstance(plain, Exception):
        assert not isinstance(wanted, Exception), f"plain: {plain}, and torch {wanted!r}"
        assert plain.dtype == dtype
        kept = wanted if dtype.is_floating_point or dtype.is_complex else wanted.to(dtype)
        assert_same(plain, kept, coarse, "plain")
    for name, path in [*paths(call), *more]:
        expected = bare if name in UNCAST else plain
        with under(modes):
            found = outcome(functools.partial(path, call))
        if agrees(found, expected, name):
            assert_same(found.detach(), wanted.to(found.dtype), coarse, name)
    continuous = dtype.is_floating_point or dtype.is_complex
    stored = call["a"].dtype in formats.IMPLIED
    if not isinstance(plain, Exception) and continuous and not stored:
        with under(modes):
            differentiate(call, modes)


def differentiate(call: Call, modes: Autocast) -> None:
    """Compare the gradients of a call with the gradients of torch's expression, in both modes."""
    taken = {n: recording(t) for n, t in call.items() if n != "alpha" and isinstance(t, Tensor)}
    taken = {n: t for n, t in taken.items() if t.requires_grad}
    if not taken:
        return
    coarse = max(cast_by(modes, call)["a"].dtype, matmul(call).dtype, key=tolerance)
    grads = {}
    for function in (matmul, expression):
        inputs = {n: recording(t) for n, t in taken.items()}
        y = function(call | inputs)
        if function is matmul:
            up = torch.ones_like(y)
        found = torch.autograd.grad(y, list(inputs.values()), up.to(y.dtype))
        grads[function] = dict(zip(inputs, found, strict=True))
    for name, found in grads[matmul].items():
        t = call[name]
        assert found.dtype == t.dtype
        wanted = grads[expression][name]
        assert_same(found.to(wanted.dtype), wanted, coarse, f"gradient of {name}")
    given = list(taken.values())
    twice = torch.stack([up, 2 * up])
    batched = torch.autograd.grad(matmul(call | taken), given, twice, is_grads_batched=True)
    for name, both in zip(taken, batched, strict=True):
        wanted = grads[expression][name]
        assert_same(both[1].to(wanted.dtype), 2 * wanted, coarse, f"batched gradient of {name}")
    functional = torch.func.vjp(lambda given: matmul(call | given), taken)[1](up)[0]
    for name, found in functional.items():
        wanted = grads[expression][name]
        assert_same(found.to(wanted.dtype), wanted, coarse, f"vjp of {name}")
    ones = {n: torch.ones_like(t) for n, t in taken.items()}
    # Torch has no tangents for expanded tensors.
    detached = {n: t.detach().contiguous() for n, t in taken.items()}
    tangents = [
        torch.func.jvp(lambda given, f=function: f(call | given), (detached,), (ones,))[1]
        for function in (matmul, expression)
    ]
    assert tangents[0].dtype == y.dtype or tangents[0].dtype == up.dtype
    assert_same(tangents[0].to(tangents[1].dtype), tangents[1], coarse, "jvp")


@pytest.fixture(autouse=True)
def quick(blas_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMM_ON_CACHE_MISS", "heuristic")


@bounded
@given(call=calls(), modes=autocasts())
@pytest.mark.slow
def test_every_path_gives_the_same_or_refuses(call: Call, modes: Autocast) -> None:
    verify(call, modes)


@settings(bounded, max_examples=4)
@given(call=calls(), modes=autocasts())
@pytest.mark.slow
def test_compiled_calls_agree(call: Call, modes: Autocast) -> None:
    verify(call, modes, ("compiled", functools.partial(compiled, matmul)))


@pytest.mark.endurance
@long
@given(call=calls(), modes=autocasts())
def test_random_calls_for_long(call: Call, modes: Autocast) -> None:
    verify(call, modes)


@pytest.mark.endurance
@settings(long, max_examples=400)
@given(call=calls(), modes=autocasts())
def test_compiled_calls_agree_for_long(call: Call, modes: Autocast) -> None:
    verify(call, modes, ("compiled", functools.partial(compiled, matmul)))
