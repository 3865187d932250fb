"""Baselines for grouped calls: torch's grouped product, a loop, and quack's kernel."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tmm_core.bench.case import Call
from tmm_core.dispatch.timing import Run

Tensor = torch.Tensor
#: Computes the product of one call, with its epilogue.
Product = Callable[[Call], Tensor]

#: Columns beside torch's and tmm's.
LOOP, QUACK = "loop", "quack"
#: Row alignment in bytes that torch's grouped product requires.
_ALIGNMENT = 16


def eager(calls: Sequence[Call]) -> Run:
    """``F.grouped_mm``, then the bias and the activation, as in a model's code; a gated one is one
    product of both halves. Operands that it rejects are padded, and the padding is timed too."""
    return _on(calls, _padded if _refuses(calls[0]) else _by_torch)


def peers(calls: Sequence[Call], failed: dict[str, str]) -> dict[str, Run]:
    """Baselines by column; ``failed`` gets the reasons of those that are unavailable."""
    found = {LOOP: loop(calls)}
    try:
        found[QUACK] = quack(calls)
    except Exception as error:  # not installed, or does not support such calls
        failed[QUACK] = f"{type(error).__name__}: {error}"
    return found


def loop(calls: Sequence[Call]) -> Run:
    """A product per group, with sizes known on the host. A real loop would have to wait for them;
    that cost is not included."""
    ends: dict[int, list[int]] = {}
    for copy, call in enumerate(calls):
        assert call.rows is not None
        ends[copy] = call.rows.offs.tolist()

    def run(copy: int) -> Tensor:
        call = calls[copy]
        return _followed(call, _looped(call, ends[copy]))

    return run


def quack(calls: Sequence[Call]) -> Run:
    """quack-kernels' product of ragged rows, which takes the starts of groups with a leading zero.

    Raises:
        ImportError: It is not installed.
        ValueError: It does not support the call.
    """
    call = calls[0]
    if importlib.util.find_spec("quack") is None:
        raise ImportError("quack-kernels is not installed")
    if call.rows is None or call.a.dim() != 2 or call.b.dim() != 3 or not call.a.is_cuda:
        raise ValueError("it is timed for ragged rows on a GPU")
    gemm = importlib.import_module("quack.gemm_interface").gemm

    # Made once: a model would store this form, and torch's form is given for free as well.
    starts = {id(each): F.pad(each.rows.offs, (1, 0)) for each in calls if each.rows is not None}
    return _on(
        calls, lambda each: _followed(each, gemm(each.a, each.b, cu_seqlens_m=starts[id(each)]))
    )


def _on(calls: Sequence[Call], product: Product) -> Run:
    return lambda copy: product(calls[copy])


def _refuses(call: Call) -> bool:
    """Whether torch's grouped product rejects the call's strides or addresses."""
    for t in (call.a, call.b):
        size = t.element_size()
        strides = [s for s, n in zip(t.stride(), t.shape, strict=True) if s != 1 and n > 1]
        if t.data_ptr() % _ALIGNMENT or any(s * size % _ALIGNMENT for s in strides):
            return True
    return False


def _by_torch(call: Call) -> Tensor:
    assert call.rows is not None
    return _followed(call, F.grouped_mm(call.a, call.b, offs=call.rows.offs))


def _padded(call: Call) -> Tensor:
    """The product of copied operands, zero-padded to the next multiple of 16 bytes, as is usual."""
    assert call.rows is not None
    a, b = call.a, call.b
    unit = _ALIGNMENT // a.element_size()
    (m, k), n = a.shape[-2:], b.shape[-1]
    by_k = a.stride(-1) == 1, b.stride(-2) == 1
    ragged_k = a.dim() == b.dim()
    more = -k % unit if any(by_k) and not ragged_k else 0
    a = _grown(a, 0 if by_k[0] else -m % unit, more)
    b = _grown(b, more, 0 if by_k[1] else -n % unit)
    return _followed(call, F.grouped_mm(a, b, offs=call.rows.offs)[..., :m, :n])


def _grown(t: Tensor, rows: int, cols: int) -> Tensor:
    """``t`` with this many more rows and columns, in the same layout."""
    if t.stride(-1) == 1:
        return F.pad(t, (0, cols, 0, rows))
    return F.pad(t.mT, (0, rows, 0, cols)).mT


def _looped(call: Call, ends: Sequence[int]) -> Tensor:
    a, b = call.a, call.b
    parts = itertools.pairwise([0, *ends])
    if a.dim() == 2 and b.dim() == 2:
        z = a.new_empty((len(ends), a.shape[0], b.shape[1]))
        for group, (start, end) in enumerate(parts):
            torch.mm(a[:, start:end], b[start:end], out=z[group])
        return z
    z = a.new_empty((a.shape[-2], b.shape[-1]))
    for group, (start, end) in enumerate(parts):
        if start == end:
            continue
        if a.dim() == 2:
            torch.mm(a[start:end], b[group], out=z[start:end])
        else:
            z[:, start:end] = a[group] @ b[:, start:end]
    return z


def _followed(call: Call, z: Tensor) -> Tensor:
    """Apply bias, epilogue and residual with torch's operators."""
    y: Any = call.epilogue.expression(z, call.bias, call.residual)
    return y if call.out_dtype is None else y.to(call.out_dtype)  # type: ignore[no-any-return]
