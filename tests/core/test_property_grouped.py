"""Every path of tmm agrees on what a valid grouped call is. All give the result of a loop over the
groups, or all refuse the call with the same kind of error. Rows in no group may hold NaN and add
nothing."""

from __future__ import annotations

import functools
import itertools
import math
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
    filled,
    is_stored,
    laid_out,
    long,
    often,
    on_fakes,
    on_meta,
    outcome,
    quantised,
    recording,
    rest_of,
    result_dtype,
    seldom,
    tensors,
    tolerance,
    under,
    values,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import tmm_core
from tmm_core import dispatch

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

Tensor = torch.Tensor

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [*[FP32] * 4, *[BF16] * 4, FP16, *[FP64] * 2, E4M3, E4M3, E5M2]
EPILOGUES = [
    *[None] * 4, "silu", "relu", "tanh", "relu+silu", "swiglu", "geglu+relu", "clamped_swiglu",
]  # fmt: skip
ALPHAS: list[Any] = [*[1.0] * 5, 2.0, -0.5, 0, np.float32(0.5), torch.tensor(2.0)]


@st.composite
def calls(draw: Any) -> Call:
    """Arguments of ``grouped_matmul`` with ``offs``: most fit, some miss in one respect."""
    size = st.sampled_from([1, 2, 3, 4, 8])
    m, n, k, count = draw(size), draw(size), draw(size), draw(st.integers(1, 4))
    total = draw(st.integers(0, 9))
    ends = sorted(draw(st.lists(st.integers(0, total), min_size=count, max_size=count)))
    along = draw(st.sampled_from("mmmmnk"))
    epilogue = draw(st.sampled_from(EPILOGUES))
    gated = epilogue is not None and "glu" in epilogue
    width = total if along == "n" else often(draw, 2 * n if gated else n, n)
    narrow = width // 2 if gated else width
    dtype = often(draw, draw(st.sampled_from(DTYPES)), torch.int32)
    stored = draw(st.sampled_from(["", "", "", "b", "b", "a", "ab"]))
    if stored:
        dtype = draw(st.sampled_from([BF16, FP16, FP32]))
        k = draw(st.sampled_from(DEPTHS))
    eight_bit = dtype in (E4M3, E5M2)
    of_b = draw(st.sampled_from([E4M3, E5M2])) if eight_bit else often(draw, dtype, dtype, BF16)
    gathers = along == "m" and draw(st.booleans())
    rows = draw(st.integers(1, 6)) if gathers else total
    shape_a = {"m": (rows, k), "n": (count, m, k), "k": (m, total)}[along]
    shape_b = {"m": (count, k, width), "n": (k, width), "k": (total, width)}[along]
    shape_b = often(draw, shape_b, (*shape_b[:-2], shape_b[-2] + 1, width))
    call: Call = {}
    if "b" in stored:
        call["b"] = draw(quantised(shape_b[:-2], width, shape_b[-2])).mT
        shape_a = (*shape_a[:-1], call["b"].shape[-2])
    if "a" in stored:
        call["a"] = draw(quantised(shape_a[:-2], shape_a[-2], shape_a[-1]))
        shape_b = (*shape_b[:-2], call["a"].shape[-1], width)
    if along == "k" and stored:
        total = call[stored[0]].shape[-1 if stored[0] == "a" else -2]
    call.setdefault("a", draw(tensors(shape_a, dtype)))
    call.setdefault("b", draw(tensors(shape_b, of_b)))
    call["offs"] = torch.tensor(ends, dtype=often(draw, torch.int32, torch.int32, torch.int64))
    call["epilogue"] = epilogue
    call["alpha"] = often(draw, draw(st.sampled_from(ALPHAS)), "2", 1j)
    call["out_dtype"] = often(draw, None, FP32, BF16, FP64, torch.int32)
    own = result_dtype(call, call["out_dtype"])
    term = often(draw, own, FP32, dtype if not eight_bit else own, FP64)
    shape = {"m": (total, narrow), "n": (m, width), "k": (count, m, narrow)}[along]
    if draw(st.booleans()):
        kinds = [(width,), (count, width), (count, width)]
        call["bias"] = draw(tensors(often(draw, draw(st.sampled_from(kinds)), (3,)), term))
    if draw(st.booleans()):
        call["residual"] = draw(tensors(often(draw, shape, shape[1:]), term))
    index = often(draw, torch.int64, torch.int32, FP32)
    if gathers:
        chosen = draw(st.lists(st.integers(0, rows - 1), min_size=total, max_size=total))
        call["a_index"] = torch.tensor(chosen, dtype=index)
    if along == "m" and draw(st.booleans()):
        call["out_index"] = torch.tensor(draw(st.permutations(range(total))), dtype=index)
    if often(draw, along == "m", True) and draw(st.booleans()):
        call["out_weights"] = draw(tensors((total,), term))
    if draw(st.booleans()) if eight_bit else seldom(draw):
        call["scale_a"] = draw(tensors((rows if along == "m" else m,), FP32)).abs()
        if along != "m":
            call["scale_a"] = call["scale_a"].expand(count, m).contiguous()
    if draw(st.booleans()) if eight_bit else seldom(draw):
        scale = draw(tensors((width,), FP32)).abs()
        call["scale_b"] = scale if along == "n" else scale.expand(count, width).contiguous()
    call = {name: value for name, value in call.items() if name == "alpha" or value is not None}
    return poisoned(call, along, ends) if draw(st.booleans()) else call


def poisoned(call: Call, along: str, ends: list[int]) -> Call:
    """The call with NaN wherever nothing is to be read."""
    used = ends[-1]
    sizes = [end - start for start, end in itertools.pairwise([0, *ends])]
    empty = [group for group, size in enumerate(sizes) if not size]
    call = {n: t.clone() if isinstance(t, Tensor) and t.dim() else t for n, t in call.items()}

    def poison(name: str, *places: Any) -> None:
        t = call.get(name)
        if t is not None and t.is_floating_point() and type(t) is Tensor:
            t[places] = math.nan

    index = call.get("a_index")
    if index is not None:
        read = set(index[:used].long().tolist())
        unread = [row for row in range(call["a"].shape[0]) if row not in read]
        poison("a", unread)
        if call.get("scale_a") is not None and call["scale_a"].dim() == 1:
            poison("scale_a", unread)
    elif along == "m":
        poison("a", slice(used, None))
        poison("scale_a", slice(used, None))
    elif along == "k":
        poison("a", slice(None), slice(used, None))
        poison("b", slice(used, None))
    else:
        poison("b", slice(None), slice(used, None))
        poison("scale_b", slice(used, None))
    if along == "m":
        for name in ("b", "scale_b"):
            poison(name, empty)
        if call.get("bias") is not None and call["bias"].dim() == 2:
            poison("bias", [g for g in empty if g < call["bias"].shape[0]])
    poison("out_weights", slice(used, None))
    residual = call.get("residual")
    if residual is not None and along == "m" and residual.dim() == 2:
        if "out_index" in call:
            poison("residual", call["out_index"][used:].long())
        else:
            poison("residual", slice(used, None))
    return call


def expression(call: Call) -> tuple[Tensor, Tensor]:
    """The result by a loop over groups in wide dtypes, and which of its elements are specified."""

    def widened(name: str) -> Any:
        return None if (t := call.get(name)) is None else values(t)

    a, b = widened("a"), widened("b")
    bias, residual, weights = map(widened, ("bias", "residual", "out_weights"))
    scale_a, scale_b = widened("scale_a"), widened("scale_b")
    index = call.get("a_index")
    if index is not None:
        a = a[index.long()]
        scale_a = scale_a if scale_a is None or scale_a.dim() != 1 else scale_a[index.long()]
    epilogue = dispatch.default_dispatcher().registry.epilogue(call.get("epilogue"))
    along = ("k" if b.dim() == 2 else "m") if a.dim() == 2 else "n"
    ends = call["offs"].tolist()
    parts = []
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        if along == "m":
            rows, columns = a[start:end], b[group]
        elif along == "n":
            rows, columns = a[group], b[:, start:end]
        else:
            rows, columns = a[:, start:end], b[start:end]
        z = rows @ columns * float(call["alpha"])
        if scale_a is not None:
            z = z * (scale_a[start:end] if along == "m" else scale_a[group])[:, None]
        if scale_b is not None:
            z = z * (scale_b[start:end] if along == "n" else scale_b[group])
        if bias is not None:
            z = z + (bias if bias.dim() == 1 else bias[group])
        parts.append(epilogue.apply(z))
    if along == "k":
        y = torch.stack(parts)
        return (y if residual is None else y + residual), torch.ones_like(y, dtype=torch.bool)
    y = torch.cat(parts, 0 if along == "m" else 1)
    used = ends[-1]
    if along == "n":
        shape = (y.shape[0], b.shape[1])
        full = y.new_zeros(shape)
        full[:, :used] = y
        known = torch.zeros(shape, dtype=torch.bool)
        known[:, :used] = True
        return (full if residual is None else full + residual), known
    if weights is not None:
        y = y * weights[:used, None]
    places = torch.arange(len(a)) if "out_index" not in call else call["out_index"].long()
    places = places[:used]
    if residual is not None:
        y = y + residual[places]
    full = y.new_zeros((len(a), y.shape[1])).index_copy(0, places, y)
    known = torch.zeros(full.shape, dtype=torch.bool)
    known[places] = True
    return full, known | ("out_index" in call)


# -- the paths of a call -------------------------------------------------------------------


def grouped(call: Call) -> Any:
    return tmm_core.grouped_matmul(call["a"], call["b"], **rest_of(call))


def recorded(call: Call) -> Any:
    return grouped(each(recording, call))


def meta(call: Call) -> Any:
    return grouped(each(on_meta, call))


def fake(call: Call) -> Any:
    return on_fakes(grouped, call)


def grouped_linear(call: Call) -> Any:
    return tmm_core.grouped_linear(call["a"], call["b"].mT, **rest_of(call))


def to_out(call: Call) -> Any:
    with torch.autocast("cpu", enabled=False):
        plain = grouped(call)
    out = torch.empty(plain.shape, dtype=plain.dtype)
    assert grouped(call | {"out": out}) is out
    return out


def described(call: Call) -> Any:
    tmm_core.problem(**call)
    return meta(call)


def compiled_grouped(call: Call) -> Any:
    return compiled(grouped, call, "alpha")


def compiled_recording(call: Call) -> Any:
    if any(is_stored(call[name]) for name in "ab"):  # whose absent derivative would be traced
        return compiled_grouped(call)
    return compiled_grouped(each(recording, call)).detach()


def paths(call: Call) -> Iterator[tuple[str, Path]]:
    yield from {
        "again": grouped, "recorded": recorded, "meta": meta, "out": to_out, "problem": described,
    }.items()  # fmt: skip
    if not isinstance(call["alpha"], Tensor):
        yield "fake", fake
    if call["a"].dim() == 2 and call["b"].dim() == 3:
        yield "linear", grouped_linear


def verify(call: Call, modes: Autocast, *more: tuple[str, Path]) -> None:
    """Hold every path of a call against the plain one, and that against a loop over groups."""
    with torch.no_grad():
        bare = outcome(lambda: grouped(call))
        with under(modes):
            plain = outcome(lambda: grouped(call))
    valid = [y for y in (plain, bare) if not isinstance(y, Exception)]
    given = call if isinstance(plain, Exception) else cast_by(modes, call)
    if valid:
        y = valid[0]
        wanted, known = expression(given)
        coarse = max(given["a"].dtype, y.dtype, key=tolerance)
        assert y.dtype == result_dtype(given, call.get("out_dtype"))
        known = known.expand(y.shape)
        # Beyond a dtype's range, rounding decides between a number and infinity.
        sure = known & ~(wanted.abs() > torch.finfo(y.dtype).max / 2)
        assert_same(y[sure], wanted[sure], coarse, "plain")
    for name, path in [*paths(call), *more]:
        expected = bare if name in UNCAST else plain
        with under(modes):
            found = outcome(functools.partial(path, call))
        if agrees(found, expected, name):
            assert_same(found.detach()[sure], expected[sure], coarse, name)
    stored = any(is_stored(call[name]) for name in "ab")
    if not isinstance(plain, Exception) and not stored and not modes:
        differentiate(call, plain, known, coarse)


def differentiate(call: Call, plain: Tensor, known: Tensor, coarse: torch.dtype) -> None:
    """Compare gradients with the loop's. Elements that are not read have a gradient of zero, also
    where the gradient of the result is NaN because nothing is specified."""
    taken = {n: recording(t) for n, t in call.items() if n != "alpha" and isinstance(t, Tensor)}
    taken = {n: t for n, t in taken.items() if t.requires_grad}
    up = laid_out(filled(plain.shape, FP32, 3), "contiguous").to(plain.dtype)
    up[~known] = math.nan
    y = grouped(call | taken)
    found = torch.autograd.grad(y, list(taken.values()), up)
    inputs = {n: recording(t) for n, t in taken.items()}
    wanted, _ = expression(call | inputs)
    grads = torch.autograd.grad(wanted, list(inputs.values()), up.nan_to_num().to(wanted.dtype))
    for name, one, other in zip(taken, found, grads, strict=True):
        assert one.dtype == call[name].dtype
        assert_same(one.to(other.dtype), other, coarse, f"gradient of {name}")
    if any(t.isnan().any() for t in call.values() if isinstance(t, Tensor)):
        return
    ones = {n: torch.ones(t.shape, dtype=t.dtype) for n, t in taken.items()}
    detached = {n: t.detach().contiguous() for n, t in taken.items()}
    tangents = [
        torch.func.jvp(lambda given, f=function: f(call | given), (detached,), (ones,))[1]
        for function in (grouped, lambda call: expression(call)[0])
    ]
    assert tangents[0].dtype == plain.dtype
    assert_same(tangents[0].to(tangents[1].dtype)[known], tangents[1][known], coarse, "jvp")


@pytest.fixture(autouse=True)
def quick(blas_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMM_ON_CACHE_MISS", "heuristic")


@bounded
@given(call=calls(), modes=autocasts())
@pytest.mark.slow
def test_every_path_gives_the_same_or_refuses(call: Call, modes: Autocast) -> None:
    verify(call, modes)


@settings(bounded, max_examples=3)
@given(call=calls(), modes=autocasts())
@pytest.mark.slow
def test_compiled_calls_agree(call: Call, modes: Autocast) -> None:
    verify(call, modes, ("compiled", compiled_grouped), ("compiled, recorded", compiled_recording))


@pytest.mark.endurance
@long
@given(call=calls(), modes=autocasts())
def test_random_calls_for_long(call: Call, modes: Autocast) -> None:
    verify(call, modes)


@pytest.mark.endurance
@settings(long, max_examples=300)
@given(call=calls(), modes=autocasts())
def test_compiled_calls_agree_for_long(call: Call, modes: Autocast) -> None:
    verify(call, modes, ("compiled", compiled_grouped), ("compiled, recorded", compiled_recording))
