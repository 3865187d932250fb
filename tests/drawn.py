"""Tensors in any layout, ways to make a call, and comparisons of outcomes, for property tests."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import tmm_core
from tmm_core import Quantized, formats
from tmm_core.formats import grids

Tensor = torch.Tensor
Call = dict[str, Any]

FP32 = torch.float32
LAYOUTS = ("contiguous", "transposed", "sliced", "offset", "expanded")
#: Errors that a caller tells apart; a compiler wraps them in its own.
KINDS = (TypeError, ValueError, OverflowError, RuntimeError)


def filled(shape: Any, dtype: torch.dtype, seed: int) -> Tensor:
    """Multiples of 1/2 of small magnitude: sums of their products are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    size = tuple(shape)
    if dtype is torch.bool:
        return torch.randint(0, 2, size, generator=generator).bool()
    t = torch.randint(-3, 4, size, generator=generator)
    if dtype.is_complex:
        other = torch.randint(-3, 4, size, generator=generator)
        return torch.complex(t.double() / 2, other.double() / 2).to(dtype)
    if dtype.is_floating_point:
        return (t.double() / 2).to(dtype)
    return t.abs().to(dtype)


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The values of ``t`` in another layout; an expanded one repeats its first row."""
    if layout == "transposed" and t.dim() > 1:
        return t.mT.contiguous().mT
    if layout == "sliced" and t.dim():
        wide = t.new_empty((*t.shape[:-1], 2 * t.shape[-1] + 1))
        part = wide[..., 1 : 2 * t.shape[-1] + 1 : 2]
        return part.copy_(t) if t.numel() else part
    if layout == "offset":
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
    if layout == "expanded" and t.dim() and t.shape[0]:
        return t[:1].expand(t.shape)
    return t


@st.composite
def tensors(draw: Any, shape: Any, dtype: torch.dtype) -> Tensor:
    t = filled(shape, dtype, draw(st.integers(0, 9)))
    return laid_out(t, draw(st.sampled_from(LAYOUTS)))


def outcome(call: Callable[[], Any]) -> Any:
    """The result of a call, or the error it raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Torch's own, where a process first differentiates forwards.
            warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)
            return call()
    except Exception as error:
        return error


def kind_of(error: Exception) -> type[Exception]:
    for kind in KINDS:
        if isinstance(error, kind):
            return kind
    return type(error)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a reference is computed."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.int64


def tolerance(dtype: torch.dtype) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    rounding = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.complex64: 1e-4}
    return rounding.get(dtype, 1e-4 if dtype is torch.float32 else 4e-2)


def assert_same(found: Tensor, wanted: Tensor, rounding: torch.dtype, what: str) -> None:
    """Assert values, computed at best in the dtype ``rounding``; NaN and shapes are equal too."""
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)}, not {tuple(wanted.shape)}"
    limit = max(tolerance(rounding), tolerance(found.dtype))
    finite = wanted[wanted.isfinite()] if wanted.is_floating_point() else wanted.new_empty(0)
    size = float(finite.abs().max()) if finite.numel() else 1.0
    torch.testing.assert_close(
        found.to(wanted.dtype),
        wanted,
        rtol=limit,
        atol=limit * max(1.0, min(size, 1e4)),
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def assert_refused_alike(found: Any, wanted: Exception, what: str) -> None:
    shown = found if isinstance(found, Exception) else f"a value of {getattr(found, 'dtype', '?')}"
    assert isinstance(found, Exception), f"{what}: {shown}, and plainly {wanted!r}"
    # A compiler raises errors of its own.
    alike = kind_of(found) is kind_of(wanted) or what.startswith("compiled")
    assert alike, f"{what}: {found!r}, and plainly {wanted!r}"


def is_stored(t: Any) -> bool:
    """Whether an operand has a format."""
    return isinstance(t, Quantized) or t.dtype in formats.IMPLIED


def result_dtype(call: Call, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the result of a valid call where nothing is cast."""
    both = [call["a"], call["b"]]
    if out_dtype is not None or not is_stored(both[0]):
        return out_dtype or both[0].dtype
    if not is_stored(both[1]):
        return both[1].dtype
    first = both[0]
    form = formats.named(first.format) if isinstance(first, Quantized) else None
    return (form or formats.IMPLIED[first.dtype]).result


def recording(t: Any) -> Any:
    """A copy that requires a gradient, in the layout of ``t``, if it can."""
    if not isinstance(t, Tensor) or isinstance(t, Quantized):
        return t
    able = (t.is_floating_point() or t.is_complex()) and t.dtype.itemsize > 1
    return t.detach().requires_grad_(able)


def on_meta(t: Any) -> Any:
    return t.to("meta") if isinstance(t, Tensor) else t


# -- the paths of ``matmul`` -----------------------------------------------------------------

Path = Callable[[Call], Any]
#: Paths on which nothing is cast: to tensors of another device than autocast's, and into ``out``.
UNCAST = ("meta", "out", "problem", "plan")


def rest_of(call: Call) -> Call:
    """All arguments but the operands."""
    return {name: value for name, value in call.items() if name not in ("a", "b")}


def matmul(call: Call) -> Any:
    return tmm_core.matmul(call["a"], call["b"], **rest_of(call))


def linear(call: Call) -> Any:
    return tmm_core.linear(call["a"], call["b"].mT, **rest_of(call))


def inference(call: Call) -> Any:
    with torch.inference_mode():
        return matmul(call)


def meta(call: Call) -> Any:
    return matmul(each(on_meta, call))


def fake(call: Call) -> Any:
    return on_fakes(matmul, call)


def forced(call: Call) -> Any:
    return matmul(call | {"kernel": "blas"})


def to_out(call: Call) -> Any:
    out = torch.empty(0, dtype=result_dtype(call, call.get("out_dtype")))
    assert matmul(call | {"out": out}) is out
    return out


def mapped_one(name: str) -> Path:
    """``torch.vmap`` over two equal copies of an argument, which autocast leaves alone; the second
    result."""

    def path(call: Call) -> Any:
        rest = {n: t for n, t in call.items() if n != name}
        twice = call[name][None].repeat_interleave(2, 0)
        return torch.vmap(lambda t: matmul(rest | {name: t}))(twice)[1]

    return path


def agrees(found: Any, expected: Any, name: str) -> bool:
    """Assert that a path refuses a call as ``expected``, or gives a result of that dtype and shape.
    Returns whether its values can be compared."""
    if isinstance(expected, Exception):
        assert_refused_alike(found, expected, name)
        return False
    assert not isinstance(found, Exception), f"{name}: {found!r}"
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
    return found.device.type == "cpu" and name != "fake"


# -- drawing, and the settings of Hypothesis ------------------------------------------------

bounded = settings(
    max_examples=150, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck), print_blob=False,
)  # fmt: skip
long = settings(bounded, max_examples=20_000, derandomize=False)


def often(draw: Any, usual: Any, *others: Any) -> Any:
    """Mostly the usual value."""
    return draw(st.sampled_from(others)) if seldom(draw) else usual


def seldom(draw: Any) -> bool:
    return bool(draw(st.sampled_from([False] * 14 + [True])))


# -- quantised operands ----------------------------------------------------------------------

#: Sizes of K: none, one, odd, whole groups of each size, and more than one group of 128.
DEPTHS = (0, 1, 2, 7, 16, 32, 64, 96, 128, 160, 256)
#: Formats that only the dtype of the bytes could tell apart.
FORMATS = ("int8", "int4", "int4_signed", "fp8", "mxfp4", "mxfp8", "nvfp4")


@st.composite
def quantised(draw: Any, lead: Any, outer: int | None, k: int) -> Quantized:
    """A weight ``[*lead, outer, K]``, or a vector if ``outer`` is None, of a format with one of its
    grids, in any layout. K is rounded up to a multiple that the format and the grid allow."""
    form = formats.named(draw(st.sampled_from(FORMATS)))
    rows = () if outer is None else (outer,)
    outer = 1 if outer is None else outer
    block = draw(st.sampled_from(form.grids))
    unit = math.lcm(form.pack, 1 if form.short else max(block[1], 1))
    if k >= block[1]:
        k = -(-k // unit) * unit
    k = -(-k // form.pack) * form.pack
    block = form.block(block, outer, k, math.prod(lead))
    seed, dtype = draw(st.integers(0, 9)), draw(st.sampled_from(form.storage))
    shape = (*lead, *rows, k // form.pack)
    if dtype.is_floating_point:
        data = filled(shape, FP32, seed).to(dtype)
    else:
        generator = torch.Generator().manual_seed(seed)
        low, high = (-128, 128) if dtype is torch.int8 else (0, 256)
        if form.pack == 1:
            low, high = -3, 4
        data = torch.randint(low, high, shape, generator=generator).to(dtype)
    size = (*lead, *grids.sizes(block, outer, k)) if block != grids.TENSOR else ()
    size = size if rows else size[1:]
    of_scale = draw(st.sampled_from(form.scale_dtypes))
    generator = torch.Generator().manual_seed(seed + 1)
    power = torch.randint(-2, 2, size, generator=generator)
    scale = (power + 127).to(of_scale) if of_scale is grids.EXPONENT else (2.0**power).to(of_scale)
    zero = None
    if form.zeros and draw(st.booleans()):
        zeros = torch.randint(0, 8, size, generator=generator)
        zero = zeros.to(draw(st.sampled_from(formats.zero_dtypes(form))))
    parts = [t if t is None else laid_out(t, draw(st.sampled_from(LAYOUTS))) for t in (scale, zero)]
    data = laid_out(data, draw(st.sampled_from(LAYOUTS)))
    named = None if block == grids.TENSOR else block
    return Quantized(data, *parts, format=form.name, block=named)


def values(t: Tensor) -> Tensor:
    """The values of an operand in a wide dtype: computed from the parts, not by ``dequantize``."""
    if isinstance(t, Quantized):
        form, parts = formats.named(t.format), (t.stored, t.scale, t.zero)
        return form.values(*parts, torch.float64, t.block, t.along)
    found = formats.IMPLIED.get(t.dtype)
    return (t if found is None else found.dequantize(t)).to(wide(t.dtype))


def rebuilt(t: Quantized, scale: Tensor) -> Quantized:
    """The same weight with another scale of the same shape."""
    named = None if t.block == grids.TENSOR else t.block
    turned = t.along == -2
    parts = [
        p.mT if turned and p is not None and p.dim() > 1 else p for p in (t.stored, scale, t.zero)
    ]
    made: Any = Quantized(*parts, format=t.format, block=named)
    return made.mT if turned else made


# -- autocast --------------------------------------------------------------------------------

#: Arguments of ``torch.autocast`` for a CPU, the outer first.
Autocast = tuple[tuple[torch.dtype, bool, bool], ...]


@st.composite
def autocasts(draw: Any) -> Autocast:
    """No autocast, one, or one in another."""
    one = st.tuples(st.sampled_from([torch.bfloat16, torch.float16]), st.booleans(), st.booleans())
    return tuple(draw(st.lists(one, min_size=0, max_size=2)))


@contextmanager
def under(modes: Autocast) -> Iterator[None]:
    with ExitStack() as stack:
        for dtype, enabled, cached in modes:
            stack.enter_context(torch.autocast("cpu", dtype, enabled, cached))
        yield


def cast_to(modes: Autocast) -> torch.dtype | None:
    """The dtype to which operands are cast; None: they are not."""
    return modes[-1][0] if modes and modes[-1][1] else None


def cast_by(modes: Autocast, call: Call) -> Call:
    """The call as autocast leaves it: plain operands are cast, as are bias and residual, unless
    both operands are stored."""
    dtype = cast_to(modes)
    if dtype is None or (is_stored(call["a"]) and is_stored(call["b"])):
        return call

    def to(name: str, t: Any) -> Any:
        if not isinstance(t, Tensor) or name not in ("a", "b", "bias", "residual"):
            return t
        kept = is_stored(t) or t.dtype is torch.float64
        return t if kept or not t.is_floating_point() else t.to(dtype)

    return {name: to(name, t) for name, t in call.items()}


# -- ways to make a call; alpha stays what it is --------------------------------------------


def each(function: Callable[[Any], Any], call: Call) -> Call:
    """The call with ``function`` applied to all its arguments but alpha."""
    return {name: t if name == "alpha" else function(t) for name, t in call.items()}


def on_fakes(function: Callable[[Call], Any], call: Call) -> Any:
    with FakeTensorMode() as mode:
        fake = each(lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, call)
        return function(fake)


def compiled(function: Callable[[Call], Any], call: Call, *constant: str) -> Any:
    """The result in a graph whose inputs are all tensors but those named ``constant``."""
    torch.compiler.reset()
    tensors = {n: t for n, t in call.items() if isinstance(t, Tensor) and n not in constant}
    rest = {n: t for n, t in call.items() if n not in tensors}
    graph = torch.compile(lambda **given: function(given | rest), backend="aot_eager")
    return graph(**tensors)
