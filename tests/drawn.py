"""Tensors in any layout, ways to make a call, and comparisons of outcomes, for property tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tmm_core import formats

Tensor = torch.Tensor
Call = dict[str, Any]

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
    said = found if isinstance(found, Exception) else f"a value of {getattr(found, 'dtype', '?')}"
    assert isinstance(found, Exception), f"{what}: {said}, and plainly {wanted!r}"
    # A compiler raises errors of its own.
    alike = kind_of(found) is kind_of(wanted) or what.startswith("compiled")
    assert alike, f"{what}: {found!r}, and plainly {wanted!r}"


def result_dtype(a: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    return out_dtype or formats.pair(a.dtype, a.dtype).result or a.dtype


def recording(t: Any) -> Any:
    """A copy that requires a gradient, in the layout of ``t``, if it can."""
    if not isinstance(t, Tensor):
        return t
    able = (t.is_floating_point() or t.is_complex()) and t.dtype.itemsize > 1
    return t.detach().requires_grad_(able)


def on_meta(t: Any) -> Any:
    return t.to("meta") if isinstance(t, Tensor) else t


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
