"""Calls with quantised operands of every format. All paths give what torch computes from their
values, or all refuse the call with the same kind of error."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from drawn import (
    DEPTHS,
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
    quantised,
    rebuilt,
    rest_of,
    result_dtype,
    seldom,
    tensors,
    to_out,
    tolerance,
    under,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import tmm_core
from tmm_core import Quantized, dispatch
from tmm_core.quantized import unpacked
from tmm_core.spec.arguments import Arguments

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

Tensor = torch.Tensor
F = torch.nn.functional

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3 = torch.float8_e4m3fn
PLAIN = [*[BF16] * 4, *[FP32] * 4, *[FP16] * 2]
EPILOGUES = [*[None] * 4, "silu", "relu", "softcap(3)", "gelu_tanh+relu", "swiglu", "geglu+relu"]
ALPHAS: list[Any] = [*[1.0] * 6, 2, -0.5, 0.0, np.float32(0.5), torch.tensor(2.0)]
#: The argument that requires a gradient; "": none does.
WITH_GRADIENTS = [*[""] * 8, "a", "b", "bias", "residual", "scale of a", "scale of b", "alpha"]


@st.composite
def calls(draw: Any) -> Call:
    """Arguments of ``matmul`` with one or two quantised operands: most fit."""
    size = st.sampled_from([0, 1, 2, 3, 5])
    m, n, k = draw(size), draw(st.sampled_from([0, 1, 2, 3, 5, 130])), draw(st.sampled_from(DEPTHS))
    epilogue = draw(st.sampled_from(EPILOGUES))
    gated = epilogue is not None and "glu" in epilogue
    width = often(draw, 2 * n if gated else n, n)
    lead = draw(st.sampled_from([(), (), (), (2,), (1,), (0,), (2, 3)]))
    both = draw(st.sampled_from([(False, True)] * 4 + [(True, False), (True, True)]))
    first = draw(quantised(() if both[1] else lead, m, k)) if both[0] else None
    if first is not None and seldom(draw):
        first = draw(quantised((), None, k))
    k = first.shape[-1] if first is not None else k
    second = draw(quantised(draw(st.sampled_from([(), lead])), width, k)) if both[1] else None
    k = second.shape[-1] if second is not None else k
    other = often(draw, draw(st.sampled_from(PLAIN)), FP64, torch.int32, torch.complex64, E4M3)
    if first is None:
        rows = often(draw, draw(st.sampled_from([(*lead, m), (m,), (), (3, *lead, m)])), (5, m))
        first = draw(tensors((*rows, often(draw, k, k + 1)), other))
    if second is None:
        weight = draw(tensors((*draw(st.sampled_from([(), lead])), k, width), other))
    else:
        weight = often(draw, second.mT, second, second.dequantize().mT)
    call: Call = {"a": first, "b": weight, "epilogue": epilogue}
    call["alpha"] = often(draw, draw(st.sampled_from(ALPHAS)), "2", None, 1j)
    call["out_dtype"] = often(draw, None, FP32, BF16, FP64, torch.int8)
    own = often(draw, result_dtype(call, call.get("out_dtype")), FP32, BF16, FP16, FP64)
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(width,)] * 3 + [(1, width), (1,), (), (m, width)]))
        call["bias"] = draw(tensors(often(draw, shape, (width + 1,)), own))
    if draw(st.booleans()):
        narrow = width // 2 if gated else width
        full = (*first.shape[:-1], narrow)
        shape = draw(st.sampled_from([full, full, (narrow,), (), (1, narrow)]))
        call["residual"] = draw(tensors(often(draw, shape, (7,)), own))
    if seldom(draw):
        call["scale_b"] = torch.ones(())
    call = {name: t for name, t in call.items() if name == "alpha" or t is not None}
    return learning(call, draw(st.sampled_from(WITH_GRADIENTS)))


def learning(call: Call, name: str) -> Call:
    """The call with an argument, or the scale of an operand, that requires a gradient."""
    operand = name[-1:]
    if name.startswith("scale"):
        t = call[operand]
        if isinstance(t, Quantized) and t.scale.is_floating_point() and t.scale.itemsize > 1:
            call[operand] = rebuilt(t, t.scale.detach().requires_grad_())
    elif name == "alpha":
        call["alpha"] = torch.tensor(2.0, requires_grad=True)
    elif (t := call.get(name)) is not None and t.is_floating_point() and t.dtype is not E4M3:
        call[name] = t.detach().requires_grad_()
    return call


def learns(call: Call) -> bool:
    return any(isinstance(t, Tensor) and t.requires_grad for t in call.values())


# -- torch's expression --------------------------------------------------------------------


def expression(call: Call) -> Tensor:
    a, b = values(call["a"]), values(call["b"])
    alpha = call["alpha"]
    alpha = alpha.detach() if isinstance(alpha, Tensor) else alpha
    alpha = alpha.item() if isinstance(alpha, (Tensor, np.generic)) else alpha
    bias, residual = (t if (t := call.get(n)) is None else t.double() for n in ("bias", "residual"))
    if bias is not None and a.dim() == 1:
        bias = bias.reshape(-1)
    epilogue = dispatch.default_dispatcher().registry.epilogue(call.get("epilogue"))
    return epilogue.expression(torch.matmul(a, b) * alpha, bias, residual)


# -- the paths of a call -------------------------------------------------------------------


def torchs_linear(call: Call) -> Any:
    return F.linear(call["a"], call["b"].mT, call.get("bias"))


def by_sign(call: Call) -> Any:
    return call["a"] @ call["b"]


def by_operator(call: Call) -> Any:
    given = {name: t for name, t in call.items() if t is not None}
    parts = unpacked(Arguments(**given | {"epilogue": call.get("epilogue") or ""}))
    return torch.ops.tmm.matmul(*parts[:-1])


def described(call: Call) -> Any:
    tmm_core.problem(**call)
    str(tmm_core.explain(**call))
    return meta(call)


def planned(call: Call) -> Any:
    return tmm_core.plan(call["a"], call["b"], **rest_of(call))(
        call["a"], call["b"], bias=call.get("bias"), residual=call.get("residual")
    )


def traced(call: Call) -> Any:
    """A graph of the call, run with other tensors of the same kind."""
    names = [n for n, t in call.items() if isinstance(t, Tensor) and n not in ("a", "b", "alpha")]
    names += [n for n in "ab" if not isinstance(call[n], Quantized)]
    graph = make_fx(lambda *given: matmul(call | dict(zip(names, given, strict=True))))
    given = [call[n] for n in names]
    return graph(*given)(*given)


def functional(call: Call) -> Any:
    names = [n for n, t in call.items() if isinstance(t, Tensor) and n != "alpha"]
    names = [n for n in names if not isinstance(call[n], Quantized)]
    run = torch.func.functionalize(
        lambda *given: matmul(call | dict(zip(names, given, strict=True)))
    )
    return run(*(call[n] for n in names))


def copied(call: Call) -> Any:
    def again(t: Any) -> Any:
        if not isinstance(t, Quantized):
            return t
        file = io.BytesIO()
        torch.save(copy.deepcopy(t.detach()), file)
        file.seek(0)
        return torch.load(file).requires_grad_(t.requires_grad)

    return matmul(each(again, call))


def compiled_matmul(call: Call) -> Any:
    # A graph traces derivatives when it is compiled, and products have none.
    plain = each(lambda t: t.detach() if type(t) is Tensor else t, call)
    return compiled(matmul, plain, "alpha")


def paths(call: Call) -> Iterator[tuple[str, Path]]:
    yield from {
        "again": matmul, "forced": forced, "meta": meta, "copied": copied,
    }.items()  # fmt: skip
    simple = {n for n, t in call.items() if n != "alpha" and t is not None} <= {"a", "b"}
    plain = isinstance(call["alpha"], float) and call["alpha"] == 1.0
    if plain and simple:
        yield "@", by_sign
    tensor = isinstance(call["alpha"], Tensor)
    if call["b"].dim() == 2:
        yield "linear", linear
        if (
            isinstance(call["b"], Quantized)
            and plain
            and not {"residual", "epilogue", "out_dtype", "scale_b"} & set(call)
        ):
            yield "F.linear", torchs_linear
    usual = "bias" not in call or call["bias"].shape == call["b"].shape[-1:]
    if not tensor:
        if not learns(call):  # torch's conversion reads the gradients, and warns of views
            yield "fake", fake
        yield "traced", traced
        yield "functional", functional
        if usual and isinstance(call["alpha"], (int, float)):
            yield "operator", by_operator
            yield "problem", described
            if not learns(call):
                yield "plan", planned
    for name in ("a", "b", "bias", "residual"):
        if name in call and not isinstance(call[name], Quantized):
            yield f"vmap of {name}", mapped_one(name)


def verify(call: Call, modes: Autocast, *more: tuple[str, Path]) -> None:
    with torch.no_grad():
        bare = outcome(lambda: matmul(call))
        with under(modes):
            plain = outcome(lambda: matmul(call))
    given = cast_by(modes, call)
    if not isinstance(plain, Exception):
        assert plain.dtype == result_dtype(given, call.get("out_dtype"))
        with torch.no_grad():
            wanted = expression(given)
        coarse = max(
            plain.dtype,
            *(t.dtype for n in "ab" if isinstance(t := given[n], Tensor)),
            key=tolerance,
        )
        # Beyond a dtype's range, rounding decides between a number and infinity.
        near = ~(wanted.abs() > torch.finfo(plain.dtype).max / 2)
        assert_same(plain[near], wanted[near], coarse, "plain")
    quantised_ones = [t for n in "ab" if isinstance(t := call[n], Quantized)]
    learnt = any(t.requires_grad for t in quantised_ones)
    held = [*paths(call), ("out", to_out), ("inference", inference), *more]
    for name, path in held:
        expected = bare if name in UNCAST else plain
        recorded = learns(call) and name != "inference"
        with under(modes):
            found = outcome(functools.partial(path, call))
        if learnt and name != "inference":
            # A call with two faults may name either.
            expected = found if isinstance(expected, Exception) else RuntimeError("no gradient")
            assert isinstance(found, Exception), f"{name}: {found}"
        elif recorded and name == "out":
            expected = found if isinstance(expected, Exception) else RuntimeError("out")
            assert isinstance(found, Exception), f"{name}: {found}"
        if agrees(found, expected, name):
            assert_same(found.detach().double(), expected.double(), expected.dtype, name)
        valid = not isinstance(expected, Exception)
        if valid and recorded and name != "fake" and not name.startswith("compiled"):
            assert found.requires_grad, name


@pytest.fixture(autouse=True)
def quick(blas_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMM_ON_CACHE_MISS", "heuristic")


@settings(bounded, max_examples=50)
@given(call=calls(), modes=autocasts())
@pytest.mark.slow
def test_every_path_gives_the_same_or_refuses(call: Call, modes: Autocast) -> None:
    verify(call, modes)


@settings(bounded, max_examples=3)
@given(call=calls(), modes=autocasts())
@pytest.mark.slow
def test_compiled_calls_agree(call: Call, modes: Autocast) -> None:
    verify(call, modes, ("compiled", compiled_matmul))


@pytest.mark.endurance
@long
@given(call=calls(), modes=autocasts())
def test_random_calls_for_long(call: Call, modes: Autocast) -> None:
    verify(call, modes)


@pytest.mark.endurance
@settings(long, max_examples=300)
@given(call=calls(), modes=autocasts())
def test_compiled_calls_agree_for_long(call: Call, modes: Autocast) -> None:
    verify(call, modes, ("compiled", compiled_matmul))
